/* Collectives between ranks that are threads, over one shared mapping and over sockets:
 * sums in rank order, gathers of uneven widths, and ranks that are silent or
 * missing. */
#include "kernels/comm/comm.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 3, LONG_S = 60 };

static bool over_tcp; /* which comm the tests run over */

/* One rank's thread and its results. */
struct rank_thread {
    void *shared;
    int fd[COMM_MAX_RANKS]; /* over_tcp */
    int32_t rank, n_ranks;
    int64_t timeout_us;
    int (*body)(struct rank_thread *m, struct comm *c, struct err *e);
    int rc;
    struct err err;
};

static void *member_main(void *arg)
{
    struct rank_thread *m = arg;
    struct comm *c = NULL;

    m->rc = over_tcp ? comm_tcp_open(&c, m->fd, m->rank, m->n_ranks, m->timeout_us, &m->err)
                     : comm_shm_open(&c, m->shared, m->rank, m->n_ranks, m->timeout_us, &m->err);
    if (m->rc == 0) {
        m->rc = m->body(m, c, &m->err);
    }
    if (c) {
        c->ops->free(c);
    }
    return NULL;
}

static void run(struct rank_thread *m, int32_t n, int64_t timeout_us,
                int (*body)(struct rank_thread *, struct comm *, struct err *))
{
    pthread_t thread[COMM_MAX_RANKS];
    size_t n_bytes = comm_shm_bytes(n);
    void *shared = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(shared != MAP_FAILED);
    for (int32_t r = 0; r < n; r++) {
        m[r] = (struct rank_thread){
            .shared = shared, .rank = r, .n_ranks = n, .timeout_us = timeout_us, .body = body};
    }
    for (int32_t r = 1; r < n && over_tcp; r++) {
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        m[0].fd[r] = pair[0];
        m[r].fd[0] = pair[1];
    }
    for (int32_t r = 0; r < n; r++) {
        assert_int_equal(pthread_create(&thread[r], NULL, member_main, &m[r]), 0);
    }
    for (int32_t r = 0; r < n; r++) {
        pthread_join(thread[r], NULL);
    }
    munmap(shared, n_bytes);
}

static void all_well(const struct rank_thread *m, int32_t n)
{
    for (int32_t r = 0; r < n; r++) {
        if (m[r].rc < 0) {
            fail_msg("rank %d: %s", r, m[r].err.text);
        }
    }
}

static struct mat floats(float *data, int32_t rows, int32_t cols, int64_t stride)
{
    return (struct mat){
        .data = data, .stride = stride, .rows = rows, .cols = cols, .dtype = DTYPE_F32};
}

#define CHECK(cond)                                                         \
    do {                                                                    \
        if (!(cond))                                                        \
            return err_set(e, ERR_INVALID, "line %d: %s", __LINE__, #cond); \
    } while (0)

/* Rank r's element i: numbers whose sum depends on the order of summation. */
static float value(int32_t r, int64_t i)
{
    return ((float)(i * 7 % 1000) + 0.1f) * (r == 0 ? 1e6f : r == 1 ? -1e6f : 1e-3f);
}

/* Rows longer than a slot, and narrower than their stride, many times, so that slots
 * are reused. */
static int sums(struct rank_thread *m, struct comm *c, struct err *e)
{
    static const int32_t shape[][3] = {
        {1, 1, 1}, {5, 7, 16}, {600, 576, 576}, {2, 300000, 300001}, {3, 64, 64}};

    for (size_t s = 0; s < ARRAY_LEN(shape); s++) {
        int32_t rows = shape[s][0], cols = shape[s][1], stride = shape[s][2];
        float *x = malloc((size_t)rows * (size_t)stride * sizeof(*x));
        CHECK(x);
        for (int64_t i = 0; i < (int64_t)rows * stride; i++) {
            x[i] = value(m->rank, i);
        }
        int rc = c->ops->all_reduce(c, floats(x, rows, cols, stride), e);
        for (int64_t i = 0; rc == 0 && i < (int64_t)rows * stride; i++) {
            float want = value(m->rank, i);
            if (i % stride < cols) {
                want = value(0, i);
                for (int32_t r = 1; r < m->n_ranks; r++) {
                    want += value(r, i);
                }
            }
            CHECK(x[i] == want);
        }
        free(x);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

static void sums_are_taken_in_rank_order(void **state)
{
    (void)state;
    struct rank_thread m[4];
    for (int32_t n = 1; n <= 4; n++) {
        run(m, n, LONG_S * INT64_C(1000000), sums);
        all_well(m, n);
    }
}

static float cell(int32_t row, int32_t col)
{
    return (float)(row * 1000003 + col);
}

/* 67 columns over 3 ranks (23, 23, 21), and more columns than a slot holds. */
static int gathers(struct rank_thread *m, struct comm *c, struct err *e)
{
    static const int32_t shape[][2] = {{5, 67}, {1, 3}, {3, 900001}, {70, 4099}};

    for (size_t s = 0; s < ARRAY_LEN(shape); s++) {
        int32_t rows = shape[s][0], cols = shape[s][1], width = (int32_t)div_ceil(cols, m->n_ranks);
        int32_t first = m->rank * width, mine = MIN(width, cols - first);
        float *out = calloc((size_t)rows * (size_t)cols, sizeof(*out));
        float *part = malloc((size_t)rows * (size_t)mine * sizeof(*part));
        CHECK(out && part);
        for (int64_t i = 0; i < (int64_t)rows * mine; i++) {
            part[i] = cell((int32_t)(i / mine), first + (int32_t)(i % mine));
        }
        int rc = c->ops->gather_cols(c, floats(out, rows, cols, cols),
                                     floats(part, rows, mine, mine), e);
        for (int64_t i = 0; rc == 0 && i < (int64_t)rows * cols; i++) {
            CHECK(out[i] == (m->rank == 0 ? cell((int32_t)(i / cols), (int32_t)(i % cols)) : 0));
        }
        free(out);
        free(part);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

static void columns_come_to_the_first_rank(void **state)
{
    (void)state;
    struct rank_thread m[RANKS];
    run(m, RANKS, LONG_S * INT64_C(1000000), gathers);
    all_well(m, RANKS);
}

static int broadcasts(struct rank_thread *m, struct comm *c, struct err *e)
{
    enum { N = 3000000 };
    char *data = malloc(N);

    CHECK(data);
    int rc = 0;
    for (size_t n = 1; rc == 0 && n <= N; n = n * 17 + 3) {
        memset(data, m->rank == 0 ? (int)(n % 100) : 111, N);
        rc = c->ops->broadcast(c, data, n, e);
        if (rc == 0) {
            rc = c->ops->barrier(c, e);
        }
        CHECK(rc < 0 || (data[0] == (char)(n % 100) && data[n - 1] == (char)(n % 100)));
        CHECK(rc < 0 || m->rank == 0 || n == N || data[n] == 111);
    }
    free(data);
    return rc;
}

static void bytes_of_the_first_rank_come_to_all(void **state)
{
    (void)state;
    struct rank_thread m[RANKS];
    run(m, RANKS, LONG_S * INT64_C(1000000), broadcasts);
    all_well(m, RANKS);
}

/* Rank 2 is connected but silent, for longer than the others wait. */
static int silent_third(struct rank_thread *m, struct comm *c, struct err *e)
{
    if (m->rank < 2) {
        return c->ops->barrier(c, e);
    }
    while (c->ops->check(c, e) == 0) {
        usleep(1000);
    }
    return 0;
}

static void a_rank_that_says_nothing_is_named(void **state)
{
    (void)state;
    struct rank_thread m[RANKS];
    run(m, RANKS, 200000, silent_third);
    assert_int_equal(m[0].rc, ERR_DEVICE);
    assert_int_equal(m[1].rc, ERR_DEVICE);
    assert_non_null(strstr(m[0].err.text, "did not answer"));
}

/* Rank 2 is missing. */
static int two_of_three(struct rank_thread *m, struct comm *c, struct err *e)
{
    return m->rank == 2 ? 0 : c->ops->barrier(c, e);
}

static void a_rank_that_does_not_come_is_named(void **state)
{
    (void)state;
    struct rank_thread m[RANKS];
    run(m, RANKS, 200000, two_of_three);
    for (int32_t r = 0; r < 2; r++) {
        assert_int_equal(m[r].rc, ERR_DEVICE);
        if (r == 0 || !over_tcp) { /* over sockets rank 1 waits for rank 0 alone */
            assert_non_null(strstr(m[r].err.text, over_tcp ? "rank 2 closed its connection"
                                                           : "rank 2 did not answer"));
        }
    }
}

static int leaves(struct rank_thread *m, struct comm *c, struct err *e)
{
    if (m->rank == 2) {
        c->ops->abort(c, "rank 2 was ended");
        c->ops->abort(c, "another reason");
    }
    float x = 1;
    int rc = c->ops->all_reduce(c, floats(&x, 1, 1, 1), e);
    CHECK(rc == ERR_DEVICE);
    return c->ops->broadcast(c, &x, sizeof(x), e); /* the failure is sticky */
}

static void an_abort_lets_everyone_go_with_its_reason(void **state)
{
    (void)state;
    struct rank_thread m[RANKS];
    run(m, RANKS, LONG_S * INT64_C(1000000), leaves);
    for (int32_t r = 0; r < RANKS; r++) {
        assert_int_equal(m[r].rc, ERR_DEVICE);
        if (r == 2 || !over_tcp) {
            assert_string_equal(m[r].err.text, "rank 2 was ended");
        }
    }
}

static void impossible_ranks_are_refused(void **state)
{
    (void)state;
    struct comm *c;
    struct err e;
    assert_int_equal(comm_shm_open(&c, NULL, 0, COMM_MAX_RANKS + 1, 1, &e), ERR_INVALID);
    assert_int_equal(comm_shm_open(&c, NULL, 2, 2, 1, &e), ERR_INVALID);
    assert_int_equal(comm_shm_open(&c, NULL, -1, 2, 1, &e), ERR_INVALID);
    assert_int_equal(comm_tcp_open(&c, NULL, 2, 2, 1, &e), ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_taken_in_rank_order),
        cmocka_unit_test(columns_come_to_the_first_rank),
        cmocka_unit_test(bytes_of_the_first_rank_come_to_all),
        cmocka_unit_test(a_rank_that_does_not_come_is_named),
        cmocka_unit_test(a_rank_that_says_nothing_is_named),
        cmocka_unit_test(an_abort_lets_everyone_go_with_its_reason),
        cmocka_unit_test(impossible_ranks_are_refused),
    };
    int failed = cmocka_run_group_tests_name("shared memory", tests, NULL, NULL);

    over_tcp = true;
    return failed + cmocka_run_group_tests_name("sockets", tests, NULL, NULL);
}
