/* The queue of a stream, one portion of its first piece, and the renderer threads. */
#include "server/stream/render.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/stream/stream.h"
#include "server/stream/writer.h"

enum {
    PORTION_UNITS = 1024,     /* units of JSON per portion (see sse_middle) */
    SLICE_BYTES = 64 * 1024,  /* of a shared prompt, copied per portion */
    AHEAD_BYTES = 128 * 1024, /* pending bytes beyond which rendering stops */
    /* Queued bytes beyond which the requests are parked, until a quarter is left. */
    PARK_BYTES = 256 * 1024,
    KEEP_BYTES = 1 << 20, /* a scratch buffer larger than this is freed after use */
    CORES_A_THREAD = 4,   /* one renderer for so many cores */
};

/* The part of a piece's event that is written next. */
enum piece_section { SECTION_OPEN, SECTION_MIDDLE, SECTION_CLOSE };

/* An output that waits to be rendered. */
struct piece {
    struct piece *next;
    struct output o;             /* its pointers lead to behind the piece or into `memory` */
    struct output_memory memory; /* taken over from the engine; `taken` false: none */
    struct usage total;          /* the stream's usage when the output arrived */
    int32_t index;               /* of the choice */
    bool first;                  /* it makes the choice's first event */
    enum piece_section section;
    struct sse_cursor cursor;    /* position in the middle section */
    struct answer_cursor answer; /* of an answer that is read by the model's format */
    size_t copied;               /* bytes of the shared prompt that were copied */
    size_t bytes;                /* memory of the piece */
};

/* ---- the queue ---- */

static void piece_free(struct piece *p)
{
    if (p->memory.taken) {
        free(p->memory.text);
        free(p->memory.token);
        free(p->memory.top_id);
        free(p->memory.top_logprob);
    }
    sse_cursor_release(&p->cursor);
    free(p);
}

static int32_t count_tops(const struct output *o)
{
    int32_t n = 0;

    for (int32_t i = 0; o->token && i < o->n_tokens; i++) {
        n += o->token[i].n_top;
    }
    return n;
}

/* Copy the tokens of `o` to `at`, the memory behind the piece. */
static void copy_tokens(struct piece *p, const struct output *o, char *at, int32_t n_top)
{
    struct token_out *token = (struct token_out *)at;
    float *logprob = (float *)(token + o->n_tokens);
    int32_t *id = (int32_t *)(logprob + n_top);

    for (int32_t i = 0; i < o->n_tokens; i++) {
        size_t n = (size_t)o->token[i].n_top;
        token[i] = o->token[i];
        token[i].top_id = id;
        token[i].top_logprob = logprob;
        if (n) {
            id = mempcpy(id, o->token[i].top_id, n * sizeof(*id));
            logprob = mempcpy(logprob, o->token[i].top_logprob, n * sizeof(*logprob));
        }
    }
    p->o.token = token;
}

/* A piece with a copy of the output's data, or with the memory of a long output, taken
 * over from the engine. NULL: out of memory. */
static struct piece *piece_new(const struct output *o)
{
    enum { TAKE_TOKENS = 16 };
    bool take = o->memory && o->n_tokens >= TAKE_TOKENS;
    int32_t n_top = count_tops(o);
    size_t tops = (size_t)n_top * (sizeof(int32_t) + sizeof(float)),
           stop = o->stop_string ? (size_t)o->stop_string_len : 0;
    size_t tokens = o->token ? (size_t)o->n_tokens * sizeof(*o->token) + tops : 0;
    size_t copied = stop + (take ? 0 : tokens + o->text_len);
    struct piece *p = malloc(sizeof(*p) + copied);

    if (!p) {
        return NULL;
    }
    *p = (struct piece){.o = *o, .bytes = sizeof(*p) + stop + tokens + o->text_len};
    p->o.memory = NULL;
    char *at = (char *)(p + 1);
    if (take) {
        o->memory->taken = true;
        p->memory = *o->memory;
    } else {
        if (o->token) {
            copy_tokens(p, o, at, n_top);
            at += tokens;
        }
        p->o.text = at;
        if (o->text_len) {
            at = mempcpy(at, o->text, o->text_len);
        }
    }
    if (stop) {
        memcpy(at, o->stop_string, stop);
        p->o.stop_string = at;
    }
    return p;
}

/* Under lock. */
static void park_all(struct stream *s, enum request_parking how)
{
    struct engine *engine = atomic_load(&s->hub->engine);

    if (s->parking == how) {
        return;
    }
    s->parking = how;
    for (int32_t i = 0; i < s->n_requests; i++) {
        engine_park(engine, s->request[i], how);
    }
}

int stream_defer(struct stream *s, int32_t index, const struct output *o, bool first)
{
    struct piece *p = piece_new(o);

    if (!p) {
        return ERR_NOMEM;
    }
    p->index = index;
    p->first = first;
    p->total = s->total;
    *(s->queue_last ? &s->queue_last->next : &s->queue) = p;
    s->queue_last = p;
    s->queue_bytes += p->bytes;
    s->queue_unread += p->memory.taken ? 0 : p->bytes;
    if (s->queue_unread > PARK_BYTES) {
        /* If the client does not read, its requests must not keep blocks that others
         * may need. */
        park_all(s, s->render == RENDER_BLOCKED ? PARK_ENDED : PARK_RUNNING);
    }
    if (s->render == RENDER_IDLE) {
        s->render = RENDER_QUEUED;
        renderers_push(&s->hub->renderers, s);
    }
    return 0;
}

/* Under lock. */
static void pop(struct stream *s)
{
    struct piece *p = s->queue;

    s->queue = p->next;
    if (!s->queue) {
        s->queue_last = NULL;
    }
    s->queue_bytes -= p->bytes;
    s->queue_unread -= p->memory.taken ? 0 : p->bytes;
    piece_free(p);
}

void stream_drop_queue(struct stream *s)
{
    while (s->queue) {
        pop(s);
    }
}

void stream_wake_renderer(struct stream *s)
{
    if (s->render == RENDER_BLOCKED) {
        s->render = RENDER_QUEUED;
        renderers_push(&s->hub->renderers, s);
    }
}

/* ---- one portion ---- */

/* Render an echoed prompt, once for all choices. True: it is complete. */
static bool make_shared(struct stream *s, struct piece *p, const struct prompt_ids *ids)
{
    struct shared_prompt *h = &s->shared[p->o.request->index];
    int32_t units = PORTION_UNITS;

    if (!h->whole && sse_middle(&h->middle, &s->style, &p->o, ids, &p->cursor, &units)) {
        h->whole = true;
        h->left = s->n;
    }
    return h->whole;
}

/* Copy the next slice of the shared prompt. True: that was the last. */
static bool copy_shared(struct stream *s, struct piece *p, struct buf *b)
{
    struct shared_prompt *h = &s->shared[p->o.request->index];
    size_t n = MIN(h->middle.len - p->copied, (size_t)SLICE_BYTES);

    buf_append(b, h->middle.data + p->copied, n);
    b->failed = b->failed || h->middle.failed;
    p->copied += n;
    if (p->copied < h->middle.len) {
        return false;
    }
    if (--h->left == 0) {
        buf_release(&h->middle);
    }
    return true;
}

/* Render one portion of a piece's event. True: the event is complete. */
static bool make_event(struct stream *s, struct piece *p, struct buf *b)
{
    const struct request *r = p->o.request;
    struct prompt_ids ids = {r->prompt, r->n_prompt};
    const struct prompt_ids *with_ids = p->first && s->style.token_ids ? &ids : NULL;
    bool shared = p->o.prompt && s->shared;
    int32_t units = PORTION_UNITS;

    if (shared && !make_shared(s, p, with_ids)) {
        return false;
    }
    if (p->section == SECTION_OPEN) {
        if (p->first && s->style.chat) {
            sse_role(b, &s->style, p->index);
        }
        sse_open(b, &s->style, p->index);
        p->section = SECTION_MIDDLE;
    }
    if (p->section == SECTION_MIDDLE) {
        if (!(shared ? copy_shared(s, p, b)
                     : sse_middle(b, &s->style, &p->o, with_ids, &p->cursor, &units))) {
            return false;
        }
        p->section = SECTION_CLOSE;
    }
    sse_close(b, &s->style, &p->total);
    return true;
}

/* Move a rendered portion to the stream. Under lock. */
static void take_portion(struct stream *s, struct buf *made, bool done, int rc)
{
    rc = rc ? rc : made->failed ? ERR_NOMEM : 0;
    if (s->answer) {
        s->collected = answer_held(s->answer);
    } else if (s->mode == STREAM_COLLECT) {
        s->collected = s->collector.held;
    }
    if (s->mode != STREAM_COLLECT && made->len && !rc) {
        stream_begin_pending(s);
        rc = buf_append(&s->pending, made->data, made->len);
    }
    s->shared_bytes = 0;
    for (int32_t i = 0; s->shared && i < s->n_requests; i++) {
        s->shared_bytes += s->shared[i].middle.cap;
    }
    if (done) {
        pop(s);
    }
    if (rc) {
        stream_break(s, rc);
    }
    if (s->queue_unread <= PARK_BYTES / 4) {
        park_all(s, PARK_NONE);
    }
}

/* Whether to render now; if not, the stream's state has changed accordingly. Under
 * lock. */
static bool may_render(struct stream *s)
{
    stream_end_if_cut(s);
    if (s->lost || s->detached || s->finished) {
        stream_drop_queue(s);
        s->render = RENDER_IDLE;
        stream_account(s);
        return false;
    }
    if (s->mode != STREAM_COLLECT && s->pending.len >= AHEAD_BYTES) {
        s->render = RENDER_BLOCKED;
        if (s->parking == PARK_RUNNING) {
            park_all(s, PARK_ENDED);
        }
        return false;
    }
    return true;
}

/* Render a portion of a piece; *ret_done: it is complete. */
static int add_portion(struct stream *s, struct piece *p, struct buf *made, bool *ret_done)
{
    int32_t units = PORTION_UNITS;
    int rc;

    if (!s->answer && s->mode != STREAM_COLLECT) {
        *ret_done = make_event(s, p, made);
        return 0;
    }
    if (s->answer) {
        rc = answer_add(s->answer, made, p->index, &p->o, &p->total, &p->answer, &units);
        *ret_done = rc != ANSWER_MORE;
    } else {
        rc = collector_add_some(&s->collector, &s->style, p->index, &p->o, &p->cursor, &units);
        *ret_done = rc != COLLECT_MORE;
    }
    return *ret_done ? rc : 0;
}

/* Render a portion of the first piece. True: the stream must be queued again. */
static bool render(struct stream *s, struct buf *made)
{
    bool done, broken, more, tell;
    int rc = 0;

    pthread_mutex_lock(&s->lock);
    more = may_render(s);
    struct piece *p = s->queue;
    bool over = s->finished || s->lost;
    pthread_mutex_unlock(&s->lock);
    if (!more) {
        if (over) {
            stream_cancel(s);
            writer_push(s->writer, s);
            writer_wake(s->writer);
        }
        return false;
    }
    rc = add_portion(s, p, made, &done);
    pthread_mutex_lock(&s->lock);
    take_portion(s, made, done, rc);
    broken = rc || made->failed || s->lost;
    more = s->queue != NULL;
    if (!more) {
        s->render = RENDER_IDLE;
        if (s->ending && !s->finished && !s->lost) {
            stream_finish(s);
        }
    }
    stream_account(s);
    tell = s->mode != STREAM_COLLECT || s->finished;
    pthread_mutex_unlock(&s->lock);
    budget_make_room(&s->hub->budget);
    if (broken) {
        stream_cancel(s);
    }
    if (tell) {
        writer_push(s->writer, s);
        writer_wake(s->writer);
    }
    return more;
}

/* ---- the threads ---- */

void renderers_push(struct renderers *r, struct stream *s)
{
    stream_ref(s);
    s->next_rendered = NULL;
    pthread_mutex_lock(&r->lock);
    *(r->last ? &r->last->next_rendered : &r->first) = s;
    r->last = s;
    pthread_cond_signal(&r->wake);
    pthread_mutex_unlock(&r->lock);
}

/* Wait for the next stream; NULL: the renderers stop. */
static struct stream *next_stream(struct renderers *r)
{
    pthread_mutex_lock(&r->lock);
    while (!r->first && !r->stopping) {
        pthread_cond_wait(&r->wake, &r->lock);
    }
    struct stream *s = r->first;
    if (s) {
        r->first = s->next_rendered;
        if (!r->first) {
            r->last = NULL;
        }
    }
    pthread_mutex_unlock(&r->lock);
    return s;
}

static void *render_main(void *arg)
{
    struct renderers *r = arg;
    struct stream *s;
    struct buf made;

    buf_init(&made, LIMIT_RESPONSE_BYTES);
    while ((s = next_stream(r)) != NULL) {
        if (!s->dying && render(s, &made)) {
            renderers_push(r, s);
        }
        stream_unref(s);
        if (made.cap > KEEP_BYTES) {
            buf_release(&made);
        }
        buf_clear(&made);
    }
    buf_release(&made);
    return NULL;
}

int renderers_open(struct renderers *r, struct err *e)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int want = (int)MAX(1, MIN(cores / CORES_A_THREAD, RENDERERS_MAX));

    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->wake, NULL);
    for (; r->n < want; r->n++) {
        if (pthread_create(&r->thread[r->n], NULL, render_main, r) != 0) {
            renderers_close(r);
            return err_set(e, ERR_IO, "cannot start a renderer");
        }
        pthread_setname_np(r->thread[r->n], "renderer");
    }
    return 0;
}

void renderers_close(struct renderers *r)
{
    pthread_mutex_lock(&r->lock);
    r->stopping = true;
    pthread_cond_broadcast(&r->wake);
    pthread_mutex_unlock(&r->lock);
    for (int i = 0; i < r->n; i++) {
        pthread_join(r->thread[i], NULL);
    }
    r->n = 0;
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->wake);
}
