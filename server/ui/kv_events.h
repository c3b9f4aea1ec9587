/* Those who watch the KV pool (/debug/kv): one thread takes snapshots of the engine, at
 * most ten a second, and offers them to every watcher.
 *
 * A watcher is a stream without requests (stream.h). Its client gets the newest
 * snapshot when it has read the one before, so a slow one sees fewer and holds nothing.
 * Pictures are taken only while somebody watches, and so seldom that the engine's
 * thread spends at most one part in a hundred on them. A pool larger than a watcher's
 * window is shown in two ways: a window of blocks one by one, which follows where
 * blocks are in use unless the watcher chose its place, and an overview of the whole
 * pool in at most WATCH_CELLS cells, each the average of equally many neighbours.
 */
#ifndef QUIRE_SERVER_UI_KV_EVENTS_H
#define QUIRE_SERVER_UI_KV_EVENTS_H

#include <pthread.h>

#include "config/base/limits.h"
#include "engine/engine.h"
#include "engine/kv_snapshot.h"

enum { WATCH_CELLS = 256, KV_WINDOW_BLOCKS = 1024, WATCH_MAX_BLOCKS = 8192 };

struct server;
struct stream;

/* Which blocks are shown one by one. */
struct kv_window {
    int32_t first; /* device block */
    int32_t n;     /* at most, of device blocks; the same of host blocks, from 0 */
    bool follow;   /* `first` moves to where blocks are in use */
};

struct watcher {
    struct stream *stream; /* holds a reference */
    struct kv_window window;
    bool once;          /* one snapshot as a JSON body */
    uint64_t last_hash; /* of the last snapshot that it took */
    int64_t last_us;    /* when */
    int ending;         /* rounds since it was told that the server ends */
};

struct watchers {
    struct server *server;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stopping;
    struct watcher *watcher; /* [LIMIT_WATCHERS] under lock */
    int n;
    struct kv_snapshot *snapshot; /* the thread's own */
    int64_t taken_us;
};

/* Starts no thread yet; `s` has its settings. */
int kv_watchers_open(struct watchers *w, struct server *s, struct err *e);
void kv_watchers_close(struct watchers *w);
/* Offer snapshots to `s` from now on; takes a reference. ERR_FULL: too many watch. */
int kv_watchers_add(struct watchers *w, struct stream *s, struct kv_window window, bool once,
                    struct err *e);

/* ---- kv_events_json.c ---- */

/* Move a window that follows. It stays as long as it holds half of what the best one
 * would. */
void kv_window_follow(struct kv_window *w, const struct kv_snapshot *p);
/* Append the snapshot as one JSON object. */
void kv_events_json(struct buf *b, const struct kv_snapshot *p, const struct kv_window *w,
                    const struct engine *engine);

#endif
