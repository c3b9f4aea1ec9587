/* A bounded multi-producer, single-consumer queue, and the count that makes "full" mean
 * what a client understands.
 *
 * `held` counts the requests that wait, here or in the scheduler, so that --max-queue
 * bounds both together. A submit first reserves its n in `held` (one atomic add; undone
 * when that passes max_queue), then takes n positions of the ring (one atomic add),
 * then fills its cells. Since the ring has at least max_queue cells and everything in
 * it is held, a reservation always finds its cells free: a set goes in whole or not at
 * all, in order, with no retry loop. (A large set that is refused may, while it undoes
 * its add, make a small one at the brink be refused too: it is told to retry.)
 *
 * Concurrency Kit's ck_ring was the alternative. Its multi-producer enqueue takes one
 * pointer a call, so a set could be cut in two by another thread's, and all-or-none
 * would need this same count in front of it; with the count a ring need not check for
 * room at all. It also spins until every producer before it has published, so one that
 * is preempted holds up all others, where here only the consumer passes it by. Measured
 * on two busy cores (tests/bench/inbox.c): with one or two producers ck_ring is the
 * quicker by 20 to 80 ns a request, which nobody will notice; with four, more than
 * there are cores, ck_ring takes 15 to 900 ns and in every second run stalls for
 * seconds, while this one took 15 to 75 and, once, 2400.
 *
 * Cell at position p holds group p once sequence == p + 1; the consumer is the only one to
 * read it, and it is written again a lap later at the earliest, after `held` was
 * lowered, which orders the two.
 */
#include "engine/loop/inbox.h"

#include <stdlib.h>

#define INBOX_CLOSED ((int64_t)1 << 40)

int inbox_init(struct inbox *b, int64_t max_queue, struct err *e)
{
    *b = (struct inbox){.max_queue = max_queue, .wake.fd = -1};
    uint64_t cap = 1;
    while (cap < (uint64_t)max_queue) {
        cap *= 2;
    }
    b->cell = calloc(cap, sizeof(*b->cell));
    if (!b->cell) {
        return err_nomem(e, "the request queue");
    }
    b->mask = cap - 1;
    return wake_init(&b->wake, e);
}

void inbox_release(struct inbox *b)
{
    free(b->cell);
    b->cell = NULL;
    wake_release(&b->wake);
}

/* Whether n more may wait where `held` do. */
static int check_capacity(const struct inbox *b, int64_t held, int32_t n, struct err *e)
{
    if (n > b->max_queue) {
        return err_set_param(
            e, ERR_INVALID, "prompt",
            "%d prompts in one request are more than the queue holds (max-queue %lld)", n,
            (long long)b->max_queue);
    }
    if (held + n <= b->max_queue) {
        return 0;
    }
    if (held >= INBOX_CLOSED / 2) {
        return err_set(e, ERR_DRAINING, "the server is shutting down");
    }
    return err_set(e, ERR_FULL,
                   "the queue is full: %lld requests wait, at most %lld may; try again later",
                   (long long)held, (long long)b->max_queue);
}

int inbox_check(const struct inbox *b, int32_t n, struct err *e)
{
    return check_capacity(b, atomic_load(&b->held), n, e);
}

/* Reserve n places, or say why not. */
static int inbox_reserve(struct inbox *b, int32_t n, struct err *e)
{
    int rc = check_capacity(b, atomic_fetch_add(&b->held, n), n, e);

    if (rc < 0) {
        atomic_fetch_sub(&b->held, n);
    }
    return rc;
}

int inbox_submit(struct inbox *b, struct group *const *g, int32_t n, struct err *e)
{
    int rc = inbox_reserve(b, n, e);

    if (rc < 0) {
        return rc;
    }
    uint64_t at = atomic_fetch_add(&b->tail, (uint64_t)n);
    for (int32_t i = 0; i < n; i++) {
        struct inbox_cell *c = &b->cell[(at + (uint64_t)i) & b->mask];
        c->group = g[i];
        atomic_store(&c->sequence, at + (uint64_t)i + 1);
    }
    wake_post(&b->wake);
    return 0;
}

void inbox_mark(struct inbox *b)
{
    atomic_store(&b->marked, true);
    wake_post(&b->wake);
}

void inbox_expect(struct inbox *b)
{
    wake_expect(&b->wake);
}

void inbox_close(struct inbox *b)
{
    /* An add, not a store: reservations made meanwhile must not be lost. */
    if (atomic_load(&b->held) < INBOX_CLOSED / 2) {
        atomic_fetch_add(&b->held, INBOX_CLOSED);
    }
    wake_post(&b->wake);
}

int32_t inbox_take(struct inbox *b, struct group **ret, int32_t max)
{
    int32_t n = 0;

    for (; n < max; n++) {
        struct inbox_cell *c = &b->cell[b->head & b->mask];
        if (atomic_load(&c->sequence) != b->head + 1) {
            break;
        }
        ret[n] = c->group;
        b->head++;
    }
    b->taken += n;
    return n;
}

void inbox_admit(struct inbox *b, int64_t n)
{
    if (n == 0) {
        return;
    }
    b->admitted += n;
    atomic_fetch_sub(&b->held, n);
}

static bool inbox_has_work(void *ctx)
{
    struct inbox *b = ctx;

    return atomic_load(&b->marked) ||
           atomic_load(&b->cell[b->head & b->mask].sequence) == b->head + 1;
}

void inbox_sleep(struct inbox *b, int64_t timeout_us)
{
    wake_sleep(&b->wake, inbox_has_work, b, timeout_us);
    atomic_store(&b->marked, false);
}

bool inbox_drained(const struct inbox *b)
{
    return atomic_load(&b->held) % INBOX_CLOSED == b->taken - b->admitted;
}

int64_t inbox_waiting(const struct inbox *b)
{
    return atomic_load(&b->held) % INBOX_CLOSED;
}
