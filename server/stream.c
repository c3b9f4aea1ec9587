/* What three parties do with a stream: the engine's output thread, MHD's workers and the writer. See stream.h. */
#include "server/stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/writer.h"

/* ---- the engine's side: sink.emit and sink.flush, on the output thread ---- */

static void cancel_all(struct stream *s)
{
    struct engine *engine = atomic_load(&s->hub->engine);

    for (int32_t i = 0; i < s->n_requests; i++) {
        engine_cancel(engine, s->request[i]);
    }
}

/* Under lock: `pending` begins with room for a chunk's length. */
static void pending_begin(struct stream *s)
{
    if (s->pending.len == 0 && s->mode == STREAM_DIRECT && s->chunked) {
        buf_append(&s->pending, CHUNK_HEAD, CHUNK_HEAD_BYTES);
    }
}

/* Under lock: all has been said. */
static void stream_finish(struct stream *s)
{
    if (s->mode != STREAM_COLLECT) {
        pending_begin(s);
        if (s->status == 200 && s->include_usage) {
            sse_usage(&s->pending, &s->style, &s->total);
        }
        if (s->status != 200) {
            sse_error(&s->pending, s->status, s->error);
        }
        sse_done(&s->pending);
    }
    s->finished = true;
}

/* Under lock. */
static void set_error(struct stream *s, int status, const char *message)
{
    if (s->status == 200) {
        s->status = status;
        snprintf(s->error, sizeof(s->error), "%s", message);
    }
}

static void add_usage(struct stream *s, const struct output *o)
{
    struct usage *u = &s->usage[o->request->index];

    s->total.prompt_tokens += o->usage.prompt_tokens - u->prompt_tokens;
    s->total.completion_tokens += o->usage.completion_tokens - u->completion_tokens;
    s->total.cached_tokens += o->usage.cached_tokens - u->cached_tokens;
    *u = o->usage;
}

static void add_course(struct request_course *all, const struct request_course *c)
{
    all->queue_us = MAX(all->queue_us, c->queue_us);
    all->prefill_us = MAX(all->prefill_us, c->prefill_us);
    all->decode_us = MAX(all->decode_us, c->decode_us);
    all->preemptions += c->preemptions;
    all->n_drawn += c->n_drawn;
}

/* More is unread than should be. A client that still takes something is given time, as long as there is memory. */
static bool is_slow(const struct stream *s)
{
    int64_t silent_us = clock_us() - atomic_load_explicit(&s->wrote_us, memory_order_relaxed);

    return silent_us > LIMIT_SLOW_S * (int64_t)1000000 ||
           s->pending.len + s->unsent > s->limit_bytes + LIMIT_BURST_BYTES ||
           atomic_load_explicit(&s->hub->unsent_bytes, memory_order_relaxed) > (int64_t)LIMIT_UNSENT_BYTES;
}

static int add_event(struct stream *s, int32_t index, const struct output *o)
{
    const struct request *r = o->request;
    bool first = s->begun && !s->begun[index];

    if (s->pending.len + s->unsent > s->limit_bytes && is_slow(s)) {
        return ERR_FULL;
    }
    pending_begin(s);
    if (first) {
        s->begun[index] = 1;
    }
    if (first && s->style.chat) {
        sse_role(&s->pending, &s->style, index);
    }
    first = first && s->style.token_ids;
    return sse_piece(&s->pending, &s->style, index, o, first ? r->prompt : NULL, first ? r->n_prompt : 0, &s->total);
}

/* Under lock: a piece of a choice. False when the stream cannot go on. */
static bool add_piece(struct stream *s, const struct output *o)
{
    int32_t index = o->request->index * s->n + o->choice;

    if (!s->first_us && o->n_tokens && !o->prompt) {
        s->first_us = clock_us();
    }
    if (o->finish != FINISH_NONE && s->finish == FINISH_NONE) {
        s->finish = o->finish;
    }
    int rc = s->mode == STREAM_COLLECT ? collector_add(&s->collector, &s->style, index, o) : add_event(s, index, o);
    if (!rc) {
        return true;
    }
    if (s->mode == STREAM_COLLECT) {
        set_error(s, rc == ERR_FULL ? 400 : 503,
                  rc == ERR_FULL ? "the answer grew too large for one body: ask for less, or stream" : "out of memory");
        s->finished = true;
    } else {
        s->lost = true;
        atomic_fetch_add(&s->hub->n_slow, 1);
    }
    return false;
}

/* A request that ended before it began (its queue time ran out, the server stops) is
 * refused; one under way says so in finish_reason, as does a choice that could not go
 * on. */
static void note_error(struct stream *s, const struct output *o)
{
    if (o->finish == FINISH_IMPOSSIBLE) {
        return;
    }
    bool begun = s->total.completion_tokens > 0;

    if (o->finish == FINISH_ERROR) {
        set_error(s, 500, o->error ? o->error : "the request failed");
    } else if (o->error && !begun) {
        set_error(s, 503, o->error);
    }
}

static void hub_emit(struct sink *sink, const struct output *o)
{
    struct stream *s = o->request->user;
    bool ended = false, broken = false;

    (void)sink;
    pthread_mutex_lock(&s->lock);
    if (!s->finished && !s->lost && !s->detached) {
        add_usage(s, o);
        if (o->error) {
            note_error(s, o);
        }
        if (s->status != 200) {
            stream_finish(s);
            broken = true;
        } else if (o->choice >= 0 && o->choice < s->n) {
            broken = !add_piece(s, o);
        }
    }
    if (o->last) {
        add_course(&s->course, &o->request->course);
        ended = --s->n_left == 0;
        if (ended && s->client) { /* before the client hears of the end: it may ask again at once */
            client_charge(s->client, s->course.n_drawn);
        }
        if (ended && !s->finished && !s->lost) {
            stream_finish(s);
        }
    }
    bool tell = s->mode != STREAM_COLLECT || s->finished;
    pthread_mutex_unlock(&s->lock);
    if (broken) {
        cancel_all(s);
    }
    if (tell || broken) {
        writer_push(s->writer, s);
    }
    if (ended) {
        stream_unref(s);
    }
}

static void hub_flush(struct sink *sink)
{
    struct stream_hub *h = CONTAINER_OF(sink, struct stream_hub, sink);

    for (int i = 0; i < h->n_writers; i++) {
        writer_wake(&h->writer[i]);
    }
}

/* ---- MHD's side ---- */

/* On an MHD thread inside a callback, before the first time that the connection is parked: system calls that need no lock. */
static void stream_attach(struct stream *s)
{
    int on = 1;

    pthread_mutex_lock(&s->lock);
    bool attached = s->attached;
    s->attached = true;
    pthread_mutex_unlock(&s->lock);
    if (attached) {
        return;
    }
    /* What MHD held back of the headers goes out, and small events are never held back. Not TCP: no matter. */
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    writer_attach(s->writer, s);
}

/* Under lock, on an MHD thread inside a callback: nothing to do until the writer says so. */
static void stream_park(struct stream *s)
{
    s->parked = true;
    MHD_suspend_connection(s->connection);
}

static void stream_tell_writer(struct stream *s)
{
    writer_push(s->writer, s);
    writer_wake(s->writer);
}

ssize_t stream_read(void *stream, uint64_t pos, char *to, size_t max)
{
    struct stream *s = stream;
    ssize_t n = 0;

    (void)pos;
    stream_attach(s);
    pthread_mutex_lock(&s->lock);
    size_t have = s->mode == STREAM_READER ? MIN(s->pending.len, max) : 0;
    bool written = s->pending.len == 0 && s->out.len == 0;
    if (s->lost) {
        n = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (have) {
        memcpy(to, s->pending.data, have);
        buf_consume(&s->pending, have);
        n = (ssize_t)have;
    } else if (s->finished && written) {
        n = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        stream_park(s);
    }
    pthread_mutex_unlock(&s->lock);
    if (n == 0) {
        stream_tell_writer(s);
    }
    return n;
}

bool stream_collected(struct stream *s)
{
    pthread_mutex_lock(&s->lock);
    bool done = s->finished || s->lost;
    pthread_mutex_unlock(&s->lock);
    if (done) {
        return true;
    }
    stream_attach(s);
    pthread_mutex_lock(&s->lock);
    done = s->finished || s->lost;
    if (!done) {
        stream_park(s);
    }
    pthread_mutex_unlock(&s->lock);
    if (!done) {
        stream_tell_writer(s);
    }
    return done;
}

void stream_detach(struct stream *s)
{
    pthread_mutex_lock(&s->lock);
    bool attached = s->attached, running = s->n_left > 0 && !s->finished && !s->lost;
    s->detached = true;
    if (attached) {
        writer_forget(s->writer, s);
    }
    pthread_mutex_unlock(&s->lock);
    if (running) {
        atomic_fetch_add(&s->hub->n_gone, 1);
        cancel_all(s);
    }
    if (attached) {
        stream_tell_writer(s);
    }
}

/* ---- the writer's side ---- */

void stream_lose(struct stream *s, bool gone)
{
    pthread_mutex_lock(&s->lock);
    bool running = s->n_left > 0 && !s->finished && !s->lost && !s->detached;
    s->lost = true;
    pthread_mutex_unlock(&s->lock);
    if (running) {
        /* Before the engine knows: a client that sees its blocks come back sees itself counted. */
        if (gone) {
            atomic_fetch_add(&s->hub->n_gone, 1);
        }
        cancel_all(s);
    }
}

void stream_fail(struct stream *s, int status, const char *message)
{
    pthread_mutex_lock(&s->lock);
    bool running = !s->finished && !s->lost;
    if (running) {
        set_error(s, status, message);
        stream_finish(s);
    }
    pthread_mutex_unlock(&s->lock);
    if (running) {
        cancel_all(s);
    }
}

void stream_keepalive(struct stream *s)
{
    pending_begin(s);
    sse_keepalive(&s->pending);
}

/* ---- streams without requests ---- */

bool stream_offer(struct stream *s, const char *data, size_t len, bool last)
{
    pthread_mutex_lock(&s->lock);
    bool take = !s->finished && !s->lost && !s->detached && s->pending.len == 0 && s->unsent == 0;
    if (take) {
        pending_begin(s);
        s->lost = buf_append(&s->pending, data, len) != 0;
        s->finished = last;
    }
    pthread_mutex_unlock(&s->lock);
    if (take) {
        stream_tell_writer(s);
    }
    return take;
}

void stream_end(struct stream *s, int status, const char *message, bool at_once)
{
    if (at_once) {
        stream_lose(s, false);
    } else {
        stream_fail(s, status, message);
    }
    stream_tell_writer(s);
}

bool stream_over(struct stream *s)
{
    pthread_mutex_lock(&s->lock);
    bool over = s->detached;
    pthread_mutex_unlock(&s->lock);
    return over;
}

/* ---- the hub ---- */

int stream_hub_open(struct stream_hub *h, int n_writers, struct err *e)
{
    memset(h, 0, sizeof(*h));
    h->sink = (struct sink){.emit = hub_emit, .flush = hub_flush};
    h->writer = calloc((size_t)n_writers, sizeof(*h->writer));
    if (!h->writer) {
        return err_nomem(e, "writers");
    }
    for (; h->n_writers < n_writers; h->n_writers++) {
        int rc = writer_open(&h->writer[h->n_writers], h, e);
        if (rc) {
            stream_hub_close(h);
            return rc;
        }
    }
    return 0;
}

void stream_hub_close(struct stream_hub *h)
{
    for (int i = 0; i < h->n_writers; i++) {
        writer_close(&h->writer[i]);
    }
    free(h->writer);
    h->writer = NULL;
    h->n_writers = 0;
}

void stream_hub_abort(struct stream_hub *h, const char *why)
{
    for (int i = 0; i < h->n_writers; i++) {
        writer_abort(&h->writer[i], why);
    }
}
