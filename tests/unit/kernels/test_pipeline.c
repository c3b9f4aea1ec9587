/* Pipeline stages that are threads, over one shared mapping and over sockets: any
 * number of bytes goes round the ring whole and in order; a rank that is missing fails
 * all. */
#include "kernels/comm/pipeline.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/comm/comm.h"

enum {
    STAGES = 3,
    RANKS = 2,
    ALL = STAGES * RANKS,
    MOST_BYTES = 5 << 20,
    ROUNDS = 24,
    LOOK_EVERY = 61
};
static const int64_t LONG_US = 60000000;

static bool over_tcp; /* which pipeline the tests run over */

/* One rank's thread and its results. */
struct rank_thread {
    void *shared;
    int source, target[RANKS]; /* over_tcp */
    struct pipeline_place at;
    int64_t timeout_us;
    int (*body)(struct pipeline *p, struct err *e);
    int rc;
    struct err err;
};

static void *member_main(void *arg)
{
    struct rank_thread *m = arg;
    struct pipeline *p = NULL;

    m->rc = over_tcp ? pipeline_tcp_open(&p, m->source, m->target, &m->at, m->timeout_us, &m->err)
                     : pipeline_shm_open(&p, m->shared, &m->at, m->timeout_us, &m->err);
    if (m->rc == 0) {
        m->rc = m->body(p, &m->err);
    }
    if (p) {
        p->ops->free(p);
    }
    return NULL;
}

/* Connect each rank to its targets. */
static void connect_all(struct rank_thread *m)
{
    int32_t to[RANKS];
    int pair[2];

    for (int32_t r = 0; r < ALL; r++) {
        pipeline_targets(&m[r].at, to);
        for (int32_t i = 0; i < RANKS; i++) {
            m[r].target[i] = -1;
            if (to[i] < 0) {
                continue;
            }
            assert_int_equal(pipeline_source(&m[to[i]].at), r);
            assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
            m[r].target[i] = pair[0];
            m[to[i]].source = pair[1];
        }
    }
}

static void run(struct rank_thread *m, int64_t timeout_us,
                int (*body)(struct pipeline *, struct err *))
{
    pthread_t thread[ALL];
    size_t n_bytes = pipeline_shm_bytes(ALL);
    void *shared = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(shared != MAP_FAILED);
    for (int32_t r = 0; r < ALL; r++) {
        m[r] = (struct rank_thread){.shared = shared,
                                    .source = -1,
                                    .at = pipeline_place_of(r, STAGES, RANKS),
                                    .timeout_us = timeout_us,
                                    .body = body};
    }
    if (over_tcp) {
        connect_all(m);
    }
    for (int32_t r = 0; r < ALL; r++) {
        assert_int_equal(pthread_create(&thread[r], NULL, member_main, &m[r]), 0);
    }
    for (int32_t r = 0; r < ALL; r++) {
        pthread_join(thread[r], NULL);
    }
    munmap(shared, n_bytes);
}

#define CHECK(cond)                                                         \
    do {                                                                    \
        if (!(cond))                                                        \
            return err_set(e, ERR_INVALID, "line %d: %s", __LINE__, #cond); \
    } while (0)

/* From one byte to more than an inbox holds, including sizes that wrap around its
 * end. */
static size_t size_of_round(int32_t round)
{
    return round % 12 == 7 ? MOST_BYTES : (size_t)1 + (size_t)(round * 7919) % 300000;
}

static char byte_at(int32_t round, int32_t rank, size_t i)
{
    return (char)(i * 31 + (size_t)round * 7 + (size_t)rank);
}

static int compute(struct pipeline *p, char *data, int32_t round, struct err *e)
{
    const struct pipeline_place *at = &p->at;
    size_t n = size_of_round(round);
    int rc = at->stage > 0 ? p->ops->receive(p, data, n, e) : 0;

    for (size_t i = (size_t)round % LOOK_EVERY; i < n && rc == 0; i += LOOK_EVERY) {
        CHECK(at->stage == 0 || data[i] == byte_at(round, at->rank, i));
        data[i] = byte_at(round, at->rank, i);
    }
    if (rc == 0 && !pipeline_is_last(at)) {
        rc = p->ops->send(p, at->rank, data, n, e);
    }
    for (int32_t i = 0; i < RANKS && rc == 0 && pipeline_is_last(at) && at->rank == 0; i++) {
        rc = p->ops->send(p, i, &round, sizeof(round), e);
    }
    return rc;
}

/* The first stage sends two rounds ahead of what it has received. */
static int go_round(struct pipeline *p, struct err *e)
{
    char *data = malloc(MOST_BYTES);
    int rc = data ? 0 : err_nomem(e, "a test");

    for (int32_t round = 0, back = 0; rc == 0 && back < ROUNDS; round++) {
        int32_t token = -1;
        if (round < ROUNDS) {
            rc = compute(p, data, round, e);
        }
        bool waits = rc == 0 && p->at.stage == 0 && round >= 2;
        if (waits) {
            rc = p->ops->receive(p, &token, sizeof(token), e);
        }
        if (rc == 0 && waits && token != back) {
            rc = err_set(e, ERR_INVALID, "round %d came back as %d", back, token);
        }
        back = p->at.stage > 0 ? round + 1 : waits ? back + 1 : back;
    }
    free(data);
    return rc;
}

static void bytes_go_round_in_order(void **state)
{
    (void)state;
    struct rank_thread m[ALL];
    run(m, LONG_US, go_round);
    for (int32_t r = 0; r < ALL; r++) {
        if (m[r].rc < 0) {
            fail_msg("rank %d: %s", r, m[r].err.text);
        }
    }
}

/* Rank 4 waits for rank 2; all others are silent, and leave when they see the
 * failure. */
static int only_one_waits(struct pipeline *p, struct err *e)
{
    char byte = 0;

    if (pipeline_number(&p->at, p->at.stage, p->at.rank) == 4) {
        return p->ops->receive(p, &byte, 1, e);
    }
    while (p->ops->check(p, e) == 0) {
        usleep(1000);
    }
    return 0;
}

static void a_stage_that_says_nothing_is_named(void **state)
{
    (void)state;
    struct rank_thread m[ALL];
    run(m, 200000, only_one_waits);
    assert_int_equal(m[4].rc, ERR_DEVICE);
    assert_non_null(strstr(m[4].err.text, "rank 2 did not answer"));
}

static int leaves(struct pipeline *p, struct err *e)
{
    char byte = 0;

    if (p->at.stage == 1 && p->at.rank == 0) {
        p->ops->abort(p, "rank 2 was ended");
        p->ops->abort(p, "another reason");
    }
    int rc = p->ops->receive(p, &byte, 1, e);
    CHECK(rc == ERR_DEVICE);
    rc = p->ops->receive(p, &byte, 1, e); /* the failure is sticky */
    CHECK(rc == ERR_DEVICE);
    return p->ops->check(p, e);
}

static void an_abort_lets_everyone_go(void **state)
{
    (void)state;
    struct rank_thread m[ALL];
    run(m, LONG_US, leaves);
    for (int32_t r = 0; r < ALL; r++) {
        /* over sockets a rank sees its neighbours' connections close; the first stage
         * waits for the last, which waits for the second */
        assert_int_equal(m[r].rc, ERR_DEVICE);
        if (r == 2 || !over_tcp) {
            assert_string_equal(m[r].err.text, "rank 2 was ended");
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_go_round_in_order),
        cmocka_unit_test(a_stage_that_says_nothing_is_named),
        cmocka_unit_test(an_abort_lets_everyone_go),
    };
    int failed = cmocka_run_group_tests_name("shared memory", tests, NULL, NULL);

    over_tcp = true;
    return failed + cmocka_run_group_tests_name("sockets", tests, NULL, NULL);
}
