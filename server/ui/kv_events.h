/* The event stream of KV-pool snapshots (/debug/kv): one thread takes snapshots of the
 * engine, at most ten per second, and sends them to all subscribers.
 *
 * A subscriber is a stream without requests (stream.h). It gets the newest snapshot
 * whenever its client has read the previous one, so a slow client gets fewer and
 * nothing accumulates. Snapshots are taken only while there are subscribers, and so
 * rarely that they cost at most one percent of the engine thread's time. A pool is sent
 * in two ways: a window of single blocks, which follows the blocks in use unless the
 * client chose its position, and an overview of the whole pool in at most
 * KV_OVERVIEW_CELLS cells, each the average of equally many neighbouring blocks.
 */
#ifndef QUIRE_SERVER_UI_KV_EVENTS_H
#define QUIRE_SERVER_UI_KV_EVENTS_H

#include <pthread.h>

#include "config/base/limits.h"
#include "engine/engine.h"
#include "engine/kv_snapshot.h"

enum {
    KV_OVERVIEW_CELLS = 256,
    KV_WINDOW_BLOCKS = 1024,     /* of a window, by default */
    KV_WINDOW_MAX_BLOCKS = 8192, /* and at most */
};

struct server;
struct stream;

/* The blocks that are sent one by one. */
struct kv_window {
    int32_t first; /* first device block; host blocks are sent from 0 on */
    int32_t n;     /* most device blocks, and most host blocks */
    bool follow;   /* `first` moves to where blocks are in use */
};

struct kv_subscriber {
    struct stream *stream;   /* holds a reference */
    struct kv_window window; /* which blocks it gets */
    bool once;               /* wants one snapshot, as a JSON body */
    uint64_t last_hash;      /* of the last snapshot that was sent */
    int64_t last_us;         /* when it was sent */
    int ending;              /* rounds since the error of the shutdown was sent */
};

struct kv_events {
    struct server *server;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a subscriber was added, or `stopping` was set */
    pthread_t thread;
    bool started, stopping;           /* under lock */
    struct kv_subscriber *subscriber; /* [LIMIT_KV_SUBSCRIBERS] under lock */
    int n;                            /* under lock */
    struct kv_snapshot *snapshot;     /* only the thread uses it; NULL before the first start */
    int64_t taken_us;                 /* of the last snapshot; 0: none since it was idle */
};

/* `s` must have its settings. The thread starts with the first subscriber. */
int kv_events_open(struct kv_events *w, struct server *s, struct err *e);
void kv_events_close(struct kv_events *w);
/* Send snapshots to `s` from now on; takes a reference. ERR_FULL: too many
 * subscribers. */
int kv_events_subscribe(struct kv_events *w, struct stream *s, struct kv_window window, bool once,
                        struct err *e);

/* ---- kv_events_json.c ---- */

/* Move a window that follows the blocks in use. It stays as long as it shows half as
 * many as the best window would. */
void kv_window_follow(struct kv_window *w, const struct kv_snapshot *p);
/* Append the snapshot as one JSON object. */
void kv_events_json(struct buf *b, const struct kv_snapshot *p, const struct kv_window *w,
                    const struct engine *engine);

#endif
