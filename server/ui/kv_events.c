/* The subscribers of /debug/kv and the thread that sends them snapshots. */
#include "server/ui/kv_events.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "config/base/wait.h"
#include "engine/kv_snapshot.h"
#include "server/http/http.h"

enum {
    PERIOD_US = 100 * 1000,
    QUIET_US = 1000 * 1000,  /* an unchanged snapshot is sent again after this time */
    COST_SHARE = 100,        /* snapshots take at most 1/COST_SHARE of the engine's time */
    TIMEOUT_US = 500 * 1000, /* for the engine to take a snapshot */
    END_ROUNDS = 10,         /* of PERIOD_US, for a client to read that the server stops */
    EVENT_BYTES = 4 << 20,
};

/* ---- the list ---- */

static void remove_subscriber(struct kv_events *w, int i)
{
    stream_unref(w->subscriber[i].stream);
    w->subscriber[i] = w->subscriber[--w->n];
}

/* Remove subscribers whose HTTP request is over. Under lock. */
static void remove_ended(struct kv_events *w)
{
    for (int i = w->n - 1; i >= 0; i--) {
        if (stream_is_over(w->subscriber[i].stream)) {
            remove_subscriber(w, i);
        }
    }
}

/* ---- sending ---- */

static void end_subscriber(struct kv_subscriber *v)
{
    if (v->ending++ == 0) {
        stream_end(v->stream, 503, "the server is shutting down", false);
    } else if (v->ending > END_ROUNDS) {
        stream_end(v->stream, 503, "", true);
    }
}

/* `b` holds "data: " and a snapshot of the subscriber's window. Under lock. */
static void send_event(struct kv_subscriber *v, struct buf *b, int64_t now_us)
{
    static const size_t front = sizeof("data: ") - 1;
    /* The members before "pool" change with time alone and are not hashed. */
    const char *body = b->len ? strstr(b->data, "\"pool\"") : NULL;
    uint64_t hash = body ? XXH3_64bits(body, b->len - (size_t)(body - b->data)) : 0;

    if (v->once) {
        stream_offer(v->stream, b->data + front, b->len - front, true);
        return;
    }
    if (hash == v->last_hash && now_us - v->last_us < QUIET_US) {
        return;
    }
    buf_puts(b, "\n\n");
    if (stream_offer(v->stream, b->data, b->len, false)) {
        v->last_hash = hash;
        v->last_us = now_us;
    }
}

static void send_snapshot(struct kv_events *w, struct kv_subscriber *v, struct buf *b)
{
    buf_clear(b);
    buf_puts(b, "data: ");
    kv_window_follow(&v->window, w->snapshot);
    kv_events_json(b, w->snapshot, &v->window, atomic_load(&w->server->engine));
    if (b->failed) {
        stream_end(v->stream, 503, "out of memory", false);
    } else {
        send_event(v, b, w->snapshot->taken_us);
    }
}

/* No snapshot: the engine is in a long step, or dead. */
static void send_stall(const struct kv_events *w, struct kv_subscriber *v, struct buf *b,
                       const char *why)
{
    int64_t now_us = clock_us();

    if (v->once) {
        stream_end(v->stream, 503, why, false);
        return;
    }
    if (now_us - v->last_us < QUIET_US) {
        return;
    }
    buf_clear(b);
    buf_printf(b, "data: {\"stalled_ms\":%lld}\n\n",
               w->taken_us ? (long long)(now_us - w->taken_us) / 1000 : 0);
    if (stream_offer(v->stream, b->data, b->len, false)) {
        v->last_us = now_us;
        v->last_hash = 0;
    }
}

/* ---- the thread ---- */

static void send_round(struct kv_events *w, struct buf *b)
{
    struct err e = {0};
    int rc = engine_kv_snapshot(atomic_load(&w->server->engine), w->snapshot, TIMEOUT_US, &e);

    if (!rc) {
        w->taken_us = w->snapshot->taken_us;
    }
    pthread_mutex_lock(&w->lock);
    remove_ended(w);
    for (int i = 0; i < w->n; i++) {
        struct kv_subscriber *v = &w->subscriber[i];
        if (atomic_load(&w->server->draining)) {
            end_subscriber(v);
        } else if (rc) {
            send_stall(w, v, b, e.text);
        } else {
            send_snapshot(w, v, b);
        }
    }
    pthread_mutex_unlock(&w->lock);
}

/* Wait until the next snapshot is due. Under lock. */
static void rest(struct kv_events *w)
{
    int64_t pause_us = MAX(PERIOD_US, w->snapshot->cost_us * COST_SHARE);
    int64_t until_us = clock_us() + pause_us;

    while (!w->stopping && wait_until(&w->changed, &w->lock, until_us)) {
    }
}

static void *kv_events_main(void *arg)
{
    struct kv_events *w = arg;
    struct buf b;

    buf_init(&b, EVENT_BYTES);
    pthread_mutex_lock(&w->lock);
    while (!w->stopping) {
        if (w->n == 0) {
            w->taken_us = 0;
            buf_release(&b);
            pthread_cond_wait(&w->changed, &w->lock);
            continue;
        }
        pthread_mutex_unlock(&w->lock);
        send_round(w, &b);
        pthread_mutex_lock(&w->lock);
        rest(w);
    }
    pthread_mutex_unlock(&w->lock);
    buf_release(&b);
    return NULL;
}

/* ---- for the server ---- */

int kv_events_open(struct kv_events *w, struct server *s, struct err *e)
{
    *w = (struct kv_events){.server = s};
    pthread_mutex_init(&w->lock, NULL);
    wait_init(&w->changed);
    w->subscriber = calloc(LIMIT_KV_SUBSCRIBERS, sizeof(*w->subscriber));
    return w->subscriber ? 0 : err_nomem(e, "subscribers");
}

void kv_events_close(struct kv_events *w)
{
    if (!w->subscriber) {
        return;
    }
    pthread_mutex_lock(&w->lock);
    w->stopping = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (w->started) {
        pthread_join(w->thread, NULL);
    }
    while (w->n > 0) {
        remove_subscriber(w, w->n - 1);
    }
    free(w->subscriber);
    w->subscriber = NULL;
    kv_snapshot_free(w->snapshot);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
}

/* With the first subscriber: allocate the snapshot, start the thread. Under lock. */
static int begin(struct kv_events *w, struct err *e)
{
    if (!w->snapshot) {
        int rc = kv_snapshot_new(&w->snapshot, atomic_load(&w->server->engine), e);
        if (rc) {
            return rc;
        }
    }
    if (!w->started && pthread_create(&w->thread, NULL, kv_events_main, w) != 0) {
        return err_set(e, ERR_NOMEM, "cannot start a thread");
    }
    if (!w->started) {
        pthread_setname_np(w->thread, "kv_events");
    }
    w->started = true;
    return 0;
}

int kv_events_subscribe(struct kv_events *w, struct stream *s, struct kv_window window, bool once,
                        struct err *e)
{
    pthread_mutex_lock(&w->lock);
    int rc = begin(w, e);
    if (!rc && w->n == LIMIT_KV_SUBSCRIBERS) {
        rc = err_set(e, ERR_FULL, "%d clients read this already; close a page and try again", w->n);
    }
    if (!rc) {
        w->subscriber[w->n++] =
            (struct kv_subscriber){.stream = stream_ref(s), .window = window, .once = once};
        pthread_cond_signal(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return rc;
}
