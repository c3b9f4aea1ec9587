#include "server/ui/kv_events.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "config/base/wait.h"
#include "engine/kv_snapshot.h"
#include "server/http/http.h"

enum {
    PERIOD_US = 100 * 1000,
    QUIET_US = 1000 * 1000, /* a snapshot that has not changed is told again after so long */
    COST_SHARE = 100,       /* the engine's thread gives one part of so many */
    PATIENCE_US = 500 * 1000,
    END_ROUNDS = 10, /* of PERIOD_US, for a client to read that the server ends */
    EVENT_BYTES = 4 << 20,
};

/* ---- the list ---- */

static void remove_watcher(struct watchers *w, int i)
{
    stream_unref(w->watcher[i].stream);
    w->watcher[i] = w->watcher[--w->n];
}

/* Under lock: those whose client is gone. */
static void remove_ended(struct watchers *w)
{
    for (int i = w->n - 1; i >= 0; i--) {
        if (stream_over(w->watcher[i].stream)) {
            remove_watcher(w, i);
        }
    }
}

/* ---- telling ---- */

static void end_watcher(struct watcher *v)
{
    if (v->ending++ == 0) {
        stream_end(v->stream, 503, "the server is shutting down", false);
    } else if (v->ending > END_ROUNDS) {
        stream_end(v->stream, 503, "", true);
    }
}

/* Under lock: `b` holds "data: " and a snapshot of the watcher's window. */
static void tell(struct watcher *v, struct buf *b, int64_t now_us)
{
    static const size_t front = sizeof("data: ") - 1;
    /* What changes with time alone stands in front of "pool". */
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

static void tell_snapshot(struct watchers *w, struct watcher *v, struct buf *b)
{
    buf_clear(b);
    buf_puts(b, "data: ");
    kv_window_follow(&v->window, w->snapshot);
    kv_events_json(b, w->snapshot, &v->window, atomic_load(&w->server->engine));
    if (b->failed) {
        stream_end(v->stream, 503, "out of memory", false);
    } else {
        tell(v, b, w->snapshot->taken_us);
    }
}

/* The engine is in a long step, or dead. */
static void tell_stall(const struct watchers *w, struct watcher *v, struct buf *b, const char *why)
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

static void round_of(struct watchers *w, struct buf *b)
{
    struct err e = {0};
    int rc = engine_kv_snapshot(atomic_load(&w->server->engine), w->snapshot, PATIENCE_US, &e);

    if (!rc) {
        w->taken_us = w->snapshot->taken_us;
    }
    pthread_mutex_lock(&w->lock);
    remove_ended(w);
    for (int i = 0; i < w->n; i++) {
        struct watcher *v = &w->watcher[i];
        if (atomic_load(&w->server->draining)) {
            end_watcher(v);
        } else if (rc) {
            tell_stall(w, v, b, e.text);
        } else {
            tell_snapshot(w, v, b);
        }
    }
    pthread_mutex_unlock(&w->lock);
}

/* Under lock: until it is time for the next snapshot. */
static void rest(struct watchers *w)
{
    int64_t pause_us = MAX(PERIOD_US, w->snapshot->cost_us * COST_SHARE);
    int64_t until_us = clock_us() + pause_us;

    while (!w->stopping && wait_until(&w->changed, &w->lock, until_us)) {
    }
}

static void *watch_main(void *arg)
{
    struct watchers *w = arg;
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
        round_of(w, &b);
        pthread_mutex_lock(&w->lock);
        rest(w);
    }
    pthread_mutex_unlock(&w->lock);
    buf_release(&b);
    return NULL;
}

/* ---- for the server ---- */

int kv_watchers_open(struct watchers *w, struct server *s, struct err *e)
{

    *w = (struct watchers){.server = s};
    pthread_mutex_init(&w->lock, NULL);
    wait_init(&w->changed);
    w->watcher = calloc(LIMIT_WATCHERS, sizeof(*w->watcher));
    return w->watcher ? 0 : err_nomem(e, "watchers");
}

void kv_watchers_close(struct watchers *w)
{
    if (!w->watcher) {
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
        remove_watcher(w, w->n - 1);
    }
    free(w->watcher);
    w->watcher = NULL;
    kv_snapshot_free(w->snapshot);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
}

/* Under lock, with the first watcher: memory and thread. */
static int begin(struct watchers *w, struct err *e)
{
    if (!w->snapshot) {
        int rc = kv_snapshot_new(&w->snapshot, atomic_load(&w->server->engine), e);
        if (rc) {
            return rc;
        }
    }
    if (!w->started && pthread_create(&w->thread, NULL, watch_main, w) != 0) {
        return err_set(e, ERR_NOMEM, "cannot start a thread");
    }
    if (!w->started) {
        pthread_setname_np(w->thread, "watch");
    }
    w->started = true;
    return 0;
}

int kv_watchers_add(struct watchers *w, struct stream *s, struct kv_window window, bool once,
                    struct err *e)
{
    pthread_mutex_lock(&w->lock);
    int rc = begin(w, e);
    if (!rc && w->n == LIMIT_WATCHERS) {
        rc = err_set(e, ERR_FULL, "%d watch already; close a page and try again", w->n);
    }
    if (!rc) {
        w->watcher[w->n++] =
            (struct watcher){.stream = stream_ref(s), .window = window, .once = once};
        pthread_cond_signal(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return rc;
}
