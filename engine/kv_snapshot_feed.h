/* Observers of the engine's thread: snapshots taken between two steps (engine.h,
 * engine_kv_snapshot).
 *
 *     observer   puts an empty snapshot into `wanted`, wakes the engine's thread, sleeps
 *                on `done`
 *     engine     takes it at the end of its turn, fills it, posts `done`
 *     observer   at its time-out takes the snapshot back out of `wanted`; if it is not
 *                there any more, it is being filled
 *
 * The engine's thread never waits and locks nothing. Observers take turns. While
 * somebody asked within the last ten seconds, copies and swaps are written down as they
 * are planned; with nobody there, a step pays one comparison.
 */
#ifndef QUIRE_ENGINE_KV_SNAPSHOT_FEED_H
#define QUIRE_ENGINE_KV_SNAPSHOT_FEED_H

#include <pthread.h>
#include <semaphore.h>

#include "engine/kv_snapshot.h"
#include "engine/sched/sched.h"

struct kv_feed {
    pthread_mutex_t observer_lock; /* of the observers */
    sem_t done;
    struct kv_snapshot *_Atomic wanted;
    /* what `done` was posted for: orders the filling before the reading in so many
     * words, since ThreadSanitizer does not know sem_clockwait */
    struct kv_snapshot *_Atomic filled;
    /* Engine's thread. */
    int64_t until_us; /* events are recorded till then */
    struct kv_event event[KV_SNAPSHOT_EVENTS];
    int32_t n_events;
    int64_t events_lost;
};

void kv_feed_init(struct kv_feed *f);
void kv_feed_release(struct kv_feed *f);

/* Engine's thread. Whether somebody watches. */
static inline bool kv_feed_wanted(const struct kv_feed *f, int64_t now_us)
{
    return now_us < f->until_us;
}
/* Engine's thread: write down the copies and swaps of a step. */
void kv_feed_record(struct kv_feed *f, const struct plan *p);
/* Engine's thread, between steps: fill the snapshot that is wanted, if one is. */
void kv_feed_serve(struct kv_feed *f, const struct sched *s, uint64_t step);

#endif
