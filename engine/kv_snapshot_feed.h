/* How observers get snapshots that the engine's thread takes between two steps
 * (engine_kv_snapshot in kv_snapshot.h).
 *
 *     observer   puts an empty snapshot into `wanted`, wakes the engine's thread, waits
 *                for `done`
 *     engine     at the end of its turn takes the snapshot, fills it, posts `done`
 *     observer   on a timeout takes the snapshot back out of `wanted`; if it is no longer
 *                there, it is being filled, and the observer waits for `done`
 *
 * The engine's thread neither waits nor locks. Observers are serialised by
 * `observer_lock`. Copies and swaps are recorded as they are planned while a snapshot
 * was taken within the last RECORD_US; otherwise a step pays one comparison. */
#ifndef QUIRE_ENGINE_KV_SNAPSHOT_FEED_H
#define QUIRE_ENGINE_KV_SNAPSHOT_FEED_H

#include <pthread.h>
#include <semaphore.h>

#include "engine/kv_snapshot.h"
#include "engine/sched/sched.h"

struct kv_feed {
    pthread_mutex_t observer_lock;      /* held by an observer for its whole request */
    sem_t done;                         /* posted when `filled` was set */
    struct kv_snapshot *_Atomic wanted; /* the snapshot to fill; NULL: none */
    /* The snapshot that `done` was posted for. Orders the fill before the read
     * explicitly, because ThreadSanitizer does not model sem_clockwait. */
    struct kv_snapshot *_Atomic filled;
    /* The engine's thread. */
    int64_t until_us; /* events are recorded until then (clock_us) */
    struct kv_event event[KV_SNAPSHOT_EVENTS];
    int32_t n_events;
    int64_t events_lost;
};

void kv_feed_init(struct kv_feed *f);
void kv_feed_release(struct kv_feed *f);

/* The engine's thread: whether events are to be recorded. */
static inline bool kv_feed_wanted(const struct kv_feed *f, int64_t now_us)
{
    return now_us < f->until_us;
}
/* The engine's thread: records the copies and swaps of a step. */
void kv_feed_record(struct kv_feed *f, const struct plan *p);
/* The engine's thread, between steps: fills the snapshot that is wanted, if there is
 * one. */
void kv_feed_serve(struct kv_feed *f, const struct sched *s, uint64_t step);

#endif
