/* Observers of the engine's thread: pictures taken between two steps (engine.h,
 * engine_kv_snapshot).
 *
 *     observer   puts an empty picture into `wanted`, wakes the engine's thread, sleeps
 *                on `done`
 *     engine     takes it at the end of its turn, fills it, posts `done`
 *     observer   at its time-out takes the picture back out of `wanted`; if it is not
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

struct watch {
    pthread_mutex_t turn; /* of the observers */
    sem_t done;
    struct kv_picture *_Atomic wanted;
    /* what `done` was posted for: orders the filling before the reading in so many
     * words, since ThreadSanitizer does not know sem_clockwait */
    struct kv_picture *_Atomic filled;
    /* Engine's thread. */
    int64_t until_us; /* events are recorded till then */
    struct kv_event event[KV_PICTURE_EVENTS];
    int32_t n_events;
    int64_t events_lost;
};

void watch_init(struct watch *w);
void watch_release(struct watch *w);

/* Engine's thread. Whether somebody watches. */
static inline bool watch_wanted(const struct watch *w, int64_t now_us)
{
    return now_us < w->until_us;
}
/* Engine's thread: write down the copies and swaps of a step. */
void watch_note(struct watch *w, const struct plan *p);
/* Engine's thread, between steps: fill the picture that is wanted, if one is. */
void watch_serve(struct watch *w, const struct sched *s, uint64_t step);

#endif
