#include "engine/kv_snapshot_feed.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine_state.h"
#include "engine/kv_snapshot.h"

enum { RECORD_US = 10000000 }; /* events are recorded so long after a snapshot, for the next one */

void kv_feed_init(struct kv_feed *w)
{
    pthread_mutex_init(&w->turn, NULL);
    sem_init(&w->done, 0, 0);
}

void kv_feed_release(struct kv_feed *w)
{
    pthread_mutex_destroy(&w->turn);
    sem_destroy(&w->done);
}

/* ---- the engine's thread ---- */

static void note(struct kv_feed *w, enum kv_event_kind kind, const struct block_copy *c, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (w->n_events == KV_SNAPSHOT_EVENTS) {
            w->events_lost += n - i;
            return;
        }
        w->event[w->n_events++] = (struct kv_event){.kind = kind, .from = c[i].src, .to = c[i].dst};
    }
}

void kv_feed_note(struct kv_feed *w, const struct plan *p)
{
    note(w, KV_SWAP_OUT, p->swap_out, p->n_swap_out);
    note(w, KV_SWAP_IN, p->swap_in, p->n_swap_in);
    note(w, KV_COPY, p->copy, p->n_copy);
}

void kv_feed_serve(struct kv_feed *w, const struct sched *s, uint64_t step)
{
    if (!atomic_load_explicit(&w->wanted, memory_order_relaxed)) {
        return;
    }
    struct kv_snapshot *p = atomic_exchange(&w->wanted, NULL);
    if (!p) {
        return; /* taken back just now */
    }
    p->taken_us = clock_us();
    p->step = step;
    sched_snapshot(s, p);
    memcpy(p->event, w->event, (size_t)w->n_events * sizeof(*p->event));
    p->n_events = w->n_events;
    p->events_lost = w->events_lost;
    w->n_events = 0;
    w->events_lost = 0;
    int64_t now_us = clock_us();
    w->until_us = now_us + RECORD_US;
    p->cost_us = now_us - p->taken_us;
    atomic_store_explicit(&w->filled, p, memory_order_release);
    sem_post(&w->done);
}

/* ---- observers ---- */

static void wait_done(sem_t *done)
{
    while (sem_wait(done) != 0 && errno == EINTR)
        ;
}

/* Whether `done` was posted in time. */
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
    struct kv_feed *w = &e->kv_feed;
    int rc = 0;

    if (atomic_load(&e->state) == HEALTH_DEAD) {
        return err_set(err, ERR_DEVICE, "the engine died");
    }
    pthread_mutex_lock(&w->turn);
    atomic_store(&w->wanted, p);
    inbox_mark(&e->inbox);
    if (!wait_done_for(&w->done, timeout_us)) {
        if (atomic_exchange(&w->wanted, NULL) == p) {
            rc = err_set(err, ERR_TIMEOUT, "the engine's step has not ended for %lld ms",
                         (long long)timeout_us / 1000);
        } else {
            wait_done(&w->done);
        }
    }
    if (rc == 0 && atomic_load_explicit(&w->filled, memory_order_acquire) != p) {
        rc = err_set(err, ERR_DEVICE, "another snapshot was filled than the one that was wanted");
    }
    pthread_mutex_unlock(&w->turn);
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
