#include "engine/kv_snapshot_feed.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine_state.h"
#include "engine/kv_snapshot.h"

/* for how long events are recorded after a snapshot, for the next one */
enum { RECORD_US = 10000000 };

void kv_feed_init(struct kv_feed *f)
{
    pthread_mutex_init(&f->observer_lock, NULL);
    sem_init(&f->done, 0, 0);
}

void kv_feed_release(struct kv_feed *f)
{
    pthread_mutex_destroy(&f->observer_lock);
    sem_destroy(&f->done);
}

/* ---- the engine's thread ---- */

static void record_copies(struct kv_feed *f, enum kv_event_kind kind, const struct block_copy *c,
                          int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (f->n_events == KV_SNAPSHOT_EVENTS) {
            f->events_lost += n - i;
            return;
        }
        f->event[f->n_events++] = (struct kv_event){.kind = kind, .from = c[i].src, .to = c[i].dst};
    }
}

void kv_feed_record(struct kv_feed *f, const struct plan *p)
{
    record_copies(f, KV_SWAP_OUT, p->swap_out, p->n_swap_out);
    record_copies(f, KV_SWAP_IN, p->swap_in, p->n_swap_in);
    record_copies(f, KV_COPY, p->copy, p->n_copy);
}

void kv_feed_serve(struct kv_feed *f, const struct sched *s, uint64_t step)
{
    if (!atomic_load_explicit(&f->wanted, memory_order_relaxed)) {
        return;
    }
    struct kv_snapshot *p = atomic_exchange(&f->wanted, NULL);
    if (!p) {
        return; /* the observer has just taken it back */
    }
    p->taken_us = clock_us();
    p->step = step;
    sched_snapshot(s, p);
    memcpy(p->event, f->event, (size_t)f->n_events * sizeof(*p->event));
    p->n_events = f->n_events;
    p->events_lost = f->events_lost;
    f->n_events = 0;
    f->events_lost = 0;
    int64_t now_us = clock_us();
    f->until_us = now_us + RECORD_US;
    p->cost_us = now_us - p->taken_us;
    atomic_store_explicit(&f->filled, p, memory_order_release);
    sem_post(&f->done);
}

/* ---- observers ---- */

static void wait_done(sem_t *done)
{
    while (sem_wait(done) != 0 && errno == EINTR)
        ;
}

/* Waits for `done`; false: not within timeout_us. */
static bool wait_done_for(sem_t *done, int64_t timeout_us)
{
    int64_t end_us = clock_us() + timeout_us;
    struct timespec end = {.tv_sec = end_us / 1000000, .tv_nsec = end_us % 1000000 * 1000};
    int rc;

    while ((rc = sem_clockwait(done, CLOCK_MONOTONIC, &end)) != 0 && errno == EINTR)
        ;
    return rc == 0;
}

int engine_kv_snapshot(struct engine *e, struct kv_snapshot *p, int64_t timeout_us, struct err *err)
{
    struct kv_feed *f = &e->kv_feed;
    int rc = 0;

    if (atomic_load(&e->state) == HEALTH_DEAD) {
        return err_set(err, ERR_DEVICE, "the engine died");
    }
    pthread_mutex_lock(&f->observer_lock);
    atomic_store(&f->wanted, p);
    inbox_mark(&e->inbox);
    if (!wait_done_for(&f->done, timeout_us)) {
        if (atomic_exchange(&f->wanted, NULL) == p) {
            rc = err_set(err, ERR_TIMEOUT, "the engine's step has not ended for %lld ms",
                         (long long)timeout_us / 1000);
        } else {
            wait_done(&f->done);
        }
    }
    if (rc == 0 && atomic_load_explicit(&f->filled, memory_order_acquire) != p) {
        rc = err_set(err, ERR_DEVICE, "another snapshot was filled than the one that was wanted");
    }
    pthread_mutex_unlock(&f->observer_lock);
    return rc;
}

int kv_snapshot_new(struct kv_snapshot **ret, const struct engine *e, struct err *err)
{
    struct kv_snapshot *p = calloc(1, sizeof(*p));

    if (!p) {
        return err_nomem(err, "a snapshot of the KV pool");
    }
    p->block_size = e->config.block_size;
    p->n_blocks = e->config.n_blocks;
    p->n_host_blocks = e->config.n_host_blocks;
    p->block = calloc((size_t)p->n_blocks + 1, 1);
    p->host = calloc((size_t)p->n_host_blocks + 1, 1);
    p->group = calloc(KV_SNAPSHOT_GROUPS, sizeof(*p->group));
    p->seq = calloc(KV_SNAPSHOT_SEQS, sizeof(*p->seq));
    p->entry = calloc(KV_SNAPSHOT_ENTRIES, sizeof(*p->entry));
    if (!p->block || !p->host || !p->group || !p->seq || !p->entry) {
        kv_snapshot_free(p);
        return err_nomem(err, "a snapshot of the KV pool");
    }
    *ret = p;
    return 0;
}

void kv_snapshot_free(struct kv_snapshot *p)
{
    if (!p) {
        return;
    }
    free(p->block);
    free(p->host);
    free(p->group);
    free(p->seq);
    free(p->entry);
    free(p);
}
