/* The operations of the three sides of a stream: the engine's output thread, MHD's
 * threads and the writer. See stream.h. */
#include "server/stream/stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/stream/writer.h"

/* Units of JSON (sse_units) that the output thread renders itself between two flushes:
 * the log-probabilities of a few tokens. */
enum { UNITS_AT_ONCE = 64 };

/* ---- the engine's side: sink.emit and sink.flush, on its output thread ---- */

void stream_cancel(struct stream *s)
{
    struct engine *engine = atomic_load(&s->hub->engine);

    for (int32_t i = 0; i < s->n_requests; i++) {
        engine_cancel(engine, s->request[i]);
    }
}

void stream_begin_pending(struct stream *s)
{
    if (s->pending.len == 0 && s->mode == STREAM_DIRECT && s->chunked) {
        buf_append(&s->pending, CHUNK_HEAD, CHUNK_HEAD_BYTES);
    }
}

void stream_account(struct stream *s)
{
    size_t n = s->pending.cap + s->out.cap + s->queue_bytes + s->collected + s->shared_bytes;

    account_set(&s->account, MAX((int64_t)n, s->min_bytes));
}

void stream_finish(struct stream *s)
{
    if (s->mode != STREAM_COLLECT) {
        stream_begin_pending(s);
    }
    if (s->mode != STREAM_COLLECT && s->answer) {
        if (s->status == 200) {
            answer_end(s->answer, &s->pending, &s->total);
        } else {
            answer_error(s->answer, &s->pending, s->status, s->error);
        }
    } else if (s->mode != STREAM_COLLECT) {
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

static void add_course(struct request_timing *all, const struct request_timing *c)
{
    all->queue_us = MAX(all->queue_us, c->queue_us);
    all->prefill_us = MAX(all->prefill_us, c->prefill_us);
    all->decode_us = MAX(all->decode_us, c->decode_us);
    all->preemptions += c->preemptions;
    all->drafted += c->drafted;
    all->accepted += c->accepted;
    all->n_sampled += c->n_sampled;
}

/* The last output has arrived, or an error: finish the stream once the queue has been
 * rendered. Under lock. */
static void stream_end_behind_queue(struct stream *s)
{
    s->ending = true;
    if (!s->queue || (s->mode == STREAM_COLLECT && s->status != 200)) {
        stream_finish(s);
    }
}

/* Bytes that the client has not read. */
static size_t unread(const struct stream *s)
{
    return s->pending.len + s->unsent + s->queue_unread;
}

/* Whether to disconnect a client with more than limit_bytes unread: not while it still
 * takes bytes, as long as there is memory. */
static bool is_slow(const struct stream *s)
{
    int64_t silent_us = clock_us() - atomic_load_explicit(&s->wrote_us, memory_order_relaxed);

    return silent_us > LIMIT_SLOW_S * (int64_t)1000000 ||
           unread(s) > s->limit_bytes + LIMIT_BURST_BYTES || budget_is_over(&s->hub->budget);
}

/* Whether the output thread renders this output itself: nothing is queued before it,
 * and the allowance until the next flush covers it. */
static bool render_at_once(struct stream *s, const struct output *o, int32_t n_prompt_ids)
{
    if (s->queue) {
        return false;
    }
    int32_t units = sse_units(&s->style, o, n_prompt_ids);
    if (units > s->hub->allowance) {
        return false;
    }
    s->hub->allowance -= units;
    return true;
}

static int add_event(struct stream *s, int32_t index, const struct output *o)
{
    const struct request *r = o->request;
    bool first = s->begun && !s->begun[index];
    bool with_ids = first && s->style.token_ids;

    if (unread(s) > s->limit_bytes && is_slow(s)) {
        return ERR_FULL;
    }
    if (first) {
        s->begun[index] = 1;
    }
    if (!render_at_once(s, o, with_ids ? r->n_prompt : 0)) {
        return stream_defer(s, index, o, first);
    }
    stream_begin_pending(s);
    if (first && s->style.chat) {
        sse_role(&s->pending, &s->style, index);
    }
    return sse_piece(&s->pending, &s->style, index, o, with_ids ? r->prompt : NULL,
                     with_ids ? r->n_prompt : 0, &s->total);
}

/* An output of an answer that is read by the model's format. */
static int add_to_answer(struct stream *s, int32_t index, const struct output *o)
{
    struct answer_cursor at = {0};
    int32_t units = INT32_MAX;
    bool with_ids = s->begun && !s->begun[index] && s->style.token_ids;

    if (s->mode != STREAM_COLLECT && unread(s) > s->limit_bytes && is_slow(s)) {
        return ERR_FULL;
    }
    if (with_ids) {
        s->begun[index] = 1;
    }
    if (!render_at_once(s, o, with_ids ? o->request->n_prompt : 0)) {
        return stream_defer(s, index, o, false);
    }
    size_t before = s->pending.len;
    if (s->mode != STREAM_COLLECT) {
        stream_begin_pending(s);
    }
    size_t begun = s->pending.len;
    int rc = answer_add(s->answer, &s->pending, index, o, &s->total, &at, &units);
    if (s->pending.len == begun && begun > before) {
        /* The parser holds the text back. A chunk of nothing would end the body. */
        s->pending.len = before;
        s->pending.data[before] = '\0';
    }
    s->collected = answer_held(s->answer);
    return rc;
}

static int collect(struct stream *s, int32_t index, const struct output *o)
{
    if (!render_at_once(s, o, 0)) {
        return stream_defer(s, index, o, false);
    }
    int rc = collector_add(&s->collector, &s->style, index, o);
    s->collected = s->collector.held;
    return rc;
}

void stream_break(struct stream *s, int rc)
{
    if (s->finished || s->lost) {
        return;
    }
    if (s->mode == STREAM_COLLECT) {
        set_error(s, rc == ERR_FULL ? 400 : 503,
                  rc == ERR_FULL
                      ? "the answer became too large for one body: request less, or stream"
                      : "out of memory");
        s->finished = true;
    } else {
        s->lost = true;
        atomic_fetch_add(&s->hub->n_slow, account_cut(&s->account));
    }
}

/* Add an output of a choice. False: the stream cannot go on. Under lock. */
static bool add_output(struct stream *s, const struct output *o)
{
    int32_t index = o->request->index * s->n + o->choice;

    if (!s->first_us && o->n_tokens && !o->prompt) {
        s->first_us = clock_us();
    }
    if (o->finish != FINISH_NONE && s->finish == FINISH_NONE) {
        s->finish = o->finish;
    }
    int rc = s->answer                   ? add_to_answer(s, index, o)
             : s->mode == STREAM_COLLECT ? collect(s, index, o)
                                         : add_event(s, index, o);
    if (rc) {
        stream_break(s, rc);
    }
    return !rc;
}

bool stream_end_if_cut(struct stream *s)
{
    if (s->mode != STREAM_COLLECT || !atomic_load_explicit(&s->account.cut, memory_order_relaxed)) {
        return false;
    }
    set_error(s, 503,
              "the server's memory for clients is used up (client-buffer-bytes); try again");
    stream_finish(s);
    return true;
}

/* A request that ended before its first token (queue-timeout, shutdown) is answered
 * with an error. After that, finish_reason tells how it ended, as it does for a choice
 * that could not go on. */
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

/* Process one output. False: the stream cannot go on. Under lock. */
static bool take_output(struct stream *s, const struct output *o)
{
    bool broken = false;

    add_usage(s, o);
    if (o->error) {
        note_error(s, o);
    }
    if (s->status != 200) {
        stream_end_behind_queue(s);
        broken = true;
    } else if (stream_end_if_cut(s)) {
        broken = true;
    } else if (o->choice >= 0 && o->choice < s->n) {
        broken = !add_output(s, o);
    }
    stream_account(s);
    return !broken;
}

static void hub_emit(struct sink *sink, const struct output *o)
{
    struct stream *s = o->request->user;
    bool ended = false, broken = false;

    (void)sink;
    pthread_mutex_lock(&s->lock);
    if (!s->finished && !s->ending && !s->lost && !s->detached) {
        broken = !take_output(s, o);
    }
    if (o->last) {
        add_course(&s->course, &o->request->course);
        ended = --s->n_left == 0;
        /* before the client sees the end: it may send the next request at once */
        if (ended && s->client) {
            client_charge(s->client, s->course.n_sampled);
        }
        if (ended && !s->finished && !s->ending && !s->lost) {
            stream_end_behind_queue(s);
        }
    }
    bool tell = s->mode != STREAM_COLLECT || s->finished;
    pthread_mutex_unlock(&s->lock);
    if (broken) {
        stream_cancel(s);
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

    h->allowance = UNITS_AT_ONCE;
    budget_make_room(&h->budget);
    for (int i = 0; i < h->n_writers; i++) {
        writer_wake(&h->writer[i]);
    }
}

/* ---- MHD's side ---- */

/* Hand the socket to the writer's epoll set, before the connection is parked for the
 * first time. On an MHD thread inside a callback, without the lock. */
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
    /* Flush the headers that MHD has corked, and send small events at once. Fails
     * harmlessly on Unix sockets. */
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    writer_attach(s->writer, s);
}

/* Suspend the connection until the writer resumes it. Under lock, on an MHD thread
 * inside a callback. */
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
        stream_wake_renderer(s);
        stream_account(s);
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
    stream_wake_renderer(s);
    pthread_mutex_unlock(&s->lock);
    account_unlist(&s->account);
    if (running) {
        atomic_fetch_add(&s->hub->n_gone, 1);
        stream_cancel(s);
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
    stream_wake_renderer(s);
    pthread_mutex_unlock(&s->lock);
    if (running) {
        /* Count before cancelling, so that freed blocks imply an updated counter. */
        if (gone) {
            atomic_fetch_add(&s->hub->n_gone, 1);
        }
        stream_cancel(s);
    }
}

void stream_fail(struct stream *s, int status, const char *message)
{
    pthread_mutex_lock(&s->lock);
    bool running = !s->finished && !s->ending && !s->lost;
    if (running) {
        set_error(s, status, message);
        stream_end_behind_queue(s);
        stream_account(s);
    }
    pthread_mutex_unlock(&s->lock);
    if (running) {
        stream_cancel(s);
    }
}

void stream_keepalive(struct stream *s)
{
    stream_begin_pending(s);
    sse_keepalive(&s->pending);
}

/* ---- streams without requests ---- */

bool stream_offer(struct stream *s, const char *data, size_t len, bool last)
{
    pthread_mutex_lock(&s->lock);
    bool take = !s->finished && !s->lost && !s->detached && s->pending.len == 0 && s->unsent == 0;
    if (take) {
        stream_begin_pending(s);
        s->lost = buf_append(&s->pending, data, len) != 0;
        s->finished = last;
        stream_account(s);
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

bool stream_is_over(struct stream *s)
{
    pthread_mutex_lock(&s->lock);
    bool over = s->detached;
    pthread_mutex_unlock(&s->lock);
    return over;
}

/* ---- the hub ---- */

int stream_hub_open(struct stream_hub *h, int n_writers, int64_t budget, struct err *e)
{
    memset(h, 0, sizeof(*h));
    budget_init(&h->budget, budget);
    int rc = renderers_open(&h->renderers, e);
    if (rc) {
        return rc;
    }
    h->allowance = UNITS_AT_ONCE;
    h->sink = (struct sink){.emit = hub_emit, .flush = hub_flush};
    h->writer = calloc((size_t)n_writers, sizeof(*h->writer));
    if (!h->writer) {
        stream_hub_close(h);
        return err_nomem(e, "writers");
    }
    for (; h->n_writers < n_writers; h->n_writers++) {
        rc = writer_open(&h->writer[h->n_writers], h, e);
        if (rc) {
            stream_hub_close(h);
            return rc;
        }
    }
    return 0;
}

void stream_hub_close(struct stream_hub *h)
{
    if (h->renderers.n) {
        renderers_close(&h->renderers);
        budget_release(&h->budget);
    }
    for (int i = 0; i < h->n_writers; i++) {
        writer_close(&h->writer[i]);
    }
    free(h->writer);
    h->writer = NULL;
    h->n_writers = 0;
}

uint64_t stream_hub_slow(const struct stream_hub *h)
{
    return atomic_load(&h->n_slow) + atomic_load(&h->budget.n_cut);
}

void stream_hub_abort(struct stream_hub *h, const char *why)
{
    for (int i = 0; i < h->n_writers; i++) {
        writer_abort(&h->writer[i], why);
    }
}
