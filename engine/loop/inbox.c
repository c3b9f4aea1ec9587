/* A bounded multi-producer, single-consumer queue, with a count that makes "full" cover
 * every request that waits.
 *
 * `held` counts the requests that wait, here or in the scheduler, so that --max-queue
 * bounds both together. A submit first reserves its n in `held` (one atomic add; undone
 * if that exceeds max_queue), then takes n positions of the ring (one atomic add), then
 * fills its cells. Since the ring has at least max_queue cells and everything in it is
 * held, a reservation always finds its cells free: a set is queued whole or not at all,
 * in order, without a retry loop. (While a large refused set undoes its add, a small
 * one at the limit may be refused too; its client is told to retry.)
 *
 * A plain multi-producer ring (Concurrency Kit's ck_ring) does not suffice: it enqueues
 * one pointer a call, so another thread could split a set, and all-or-none would need
 * this same count in front of it. Its producers also spin until every earlier producer
 * has published, so a preempted producer delays the others; here only the consumer
 * waits for it. Compare with tests/bench/inbox.c.
 *
 * The cell at position p holds group p once sequence == p + 1. Only the consumer reads
 * it, and it is written again a lap later at the earliest, after `held` was lowered,
 * which orders the two. */
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

/* Whether n more requests may wait beside `held` others. */
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

/* Adds n to `held`, or returns why it cannot. */
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
    /* An add, not a store: concurrent reservations must not be lost. */
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
