/* The life of a stream: made from a completion with all its requests, submitted to the
 * engine, freed with the last reference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/stream/stream.h"
#include "server/stream/writer.h"

enum { LARGE_BYTES = 1 << 20 }; /* a stream that holds more is freed by a renderer */

/* The limit of unread bytes. It grows with the number of sequences, because a single
 * step may produce an event for each. */
static size_t stream_limit(const struct completion *c)
{
    const struct gen_params *p = &c->params;
    size_t event = 512 + 64 * (size_t)MAX(p->n_logprobs, 0),
           sequences = (size_t)c->n_prompts * (size_t)p->n;

    return LIMIT_STREAM_BYTES + sequences * event;
}

/* The least JSON bytes of a prompt token or a generated one, assuming texts of one
 * letter and short numbers. */
static int64_t min_token_bytes(const struct completion *c, bool prompt)
{
    enum { ENTRY = 8, TOKEN = 12, ID = 2, PROMPT_ENTRY = 40 };
    const struct gen_params *p = &c->params;
    int64_t n = 0;

    if (prompt ? c->echo_logprobs : p->n_logprobs >= 0) {
        n += TOKEN + ENTRY * (int64_t)MAX(p->n_logprobs, 0);
    }
    if (prompt && c->has_prompt_logprobs) {
        n += PROMPT_ENTRY * (int64_t)MAX(p->n_prompt_logprobs, 1);
    }
    return n + (c->return_token_ids ? ID : 0);
}

int64_t stream_min_bytes(const struct completion *c)
{
    const struct gen_params *p = &c->params;
    bool runs_on = p->ignore_eos && p->n_stop == 0 && p->n_stop_token == 0;
    int64_t generated = (runs_on ? p->max_tokens : p->min_tokens) * min_token_bytes(c, false),
            n = 0;

    for (int32_t i = 0; i < c->n_prompts; i++) {
        n += p->n * (c->prompt[i].n * min_token_bytes(c, true) + generated);
    }
    return n;
}

/* The request of prompt i. Its ids are copied to their exact size and freed here. */
static int make_request(struct stream *s, struct completion *c, int32_t i, struct shared_params *p,
                        struct err *e)
{
    int rc = request_new_shared(&s->request[i], p, c->prompt[i].id, c->prompt[i].n, e);

    if (!rc) {
        free(c->prompt[i].id);
        c->prompt[i].id = NULL;
    }
    return rc;
}

static int make_requests(struct stream *s, struct completion *c, const char *id, struct err *e)
{
    struct shared_params *params = NULL;
    int rc = shared_params_new(&params, &c->params, e);

    for (int32_t i = 0; i < c->n_prompts && !rc; i++) {
        rc = make_request(s, c, i, params, e);
        if (rc) {
            break;
        }
        struct request *r = s->request[i];
        r->seed = c->prompt[i].seed;
        snprintf(r->id, sizeof(r->id), "%s", id);
        r->index = i;
        r->arrival_us = s->begin_us;
        r->user = s;
        r->tenant = c->tenant;
        r->weight = c->weight;
        s->n_requests++;
    }
    shared_params_unref(params);
    return rc;
}

/* Echoed prompts are rendered once for all their choices. */
static int share_prompts(struct stream *s, const struct completion *c, struct err *e)
{
    if (!c->params.echo && c->params.n_prompt_logprobs < 0) {
        return 0;
    }
    if (s->mode == STREAM_COLLECT) {
        collector_share_prompts(&s->collector, c->n_prompts);
        return 0;
    }
    if (s->n == 1) {
        return 0;
    }
    s->shared = calloc((size_t)c->n_prompts, sizeof(*s->shared));
    if (!s->shared) {
        return err_nomem(e, "an answer");
    }
    for (int32_t i = 0; i < c->n_prompts; i++) {
        buf_init(&s->shared[i].middle, LIMIT_RESPONSE_BYTES);
    }
    return 0;
}

/* An answer that is read by the model's format. */
static int make_answer(struct stream *s, struct completion *c, const char *id,
                       const struct api_context *ctx, struct err *e)
{
    struct answer_info info = {.id = id,
                               .model = ctx->info.model_name,
                               .fingerprint = ctx->info.fingerprint,
                               .created = s->begin_unix,
                               .n_choices = c->n_prompts * c->params.n,
                               .whole = s->mode == STREAM_COLLECT,
                               .style = &s->style,
                               .include_usage = c->include_usage,
                               .functions = c->functions};

    return answer_new(&s->answer, atomic_load(&s->hub->engine),
                      c->dialect ? c->dialect : &chat_dialect, &info, c, e);
}

static int stream_fill(struct stream *s, struct completion *c, const char *id,
                       const struct api_context *ctx, struct err *e)
{
    struct sse_style *st = &s->style;
    int32_t n_choices = c->n_prompts * c->params.n;

    s->request = calloc((size_t)c->n_prompts, sizeof(*s->request));
    s->usage = calloc((size_t)c->n_prompts, sizeof(*s->usage));
    s->begun = c->return_token_ids || c->chat ? calloc((size_t)n_choices, 1) : NULL;
    if (!s->request || !s->usage || ((c->return_token_ids || c->chat) && !s->begun)) {
        return err_nomem(e, "an answer");
    }
    st->chat = c->chat;
    st->whole = s->mode == STREAM_COLLECT;
    st->logprobs = c->params.n_logprobs >= 0;
    st->echo_logprobs = c->echo_logprobs;
    st->prompt_logprobs = c->has_prompt_logprobs;
    st->n_top = c->params.n_logprobs;
    st->n_prompt_top = c->n_prompt_top;
    st->token_ids = c->return_token_ids;
    st->continuous_usage = c->continuous_usage;
    st->arg = ctx->arg;
    st->token_bytes = ctx->token_bytes;
    int rc = sse_style_init(st, id, s->begin_unix, ctx->info.model_name, ctx->info.fingerprint, e);
    if (!rc && (c->parsed || c->dialect)) {
        rc = make_answer(s, c, id, ctx, e);
    } else if (!rc && s->mode == STREAM_COLLECT) {
        collector_init(&s->collector, n_choices);
    }
    rc = rc ? rc : share_prompts(s, c, e);
    return rc ? rc : make_requests(s, c, id, e);
}

/* An adaptive mutex: it is held so briefly that spinning is cheaper than sleeping. */
static void init_lock(pthread_mutex_t *lock)
{
    pthread_mutexattr_t a;

    pthread_mutexattr_init(&a);
    pthread_mutexattr_settype(&a, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(lock, &a);
    pthread_mutexattr_destroy(&a);
}

static struct stream *stream_alloc(struct stream_hub *h, enum stream_mode mode)
{
    struct stream *s = calloc(1, sizeof(*s));

    if (!s) {
        return NULL;
    }
    atomic_init(&s->refs, 1);
    atomic_fetch_add(&h->n_streams, 1);
    s->hub = h;
    s->writer = writer_pick(h);
    s->mode = mode;
    s->begin_us = clock_us();
    atomic_init(&s->wrote_us, s->begin_us);
    s->begin_unix = time(NULL);
    s->status = 200;
    s->fd = -1;
    account_open(&s->account, &h->budget);
    init_lock(&s->lock);
    buf_init(&s->pending, LIMIT_RESPONSE_BYTES);
    buf_init(&s->out, LIMIT_RESPONSE_BYTES);
    return s;
}

int stream_new(struct stream **ret, struct stream_hub *h, struct completion *c, const char *id,
               const struct api_context *ctx, struct err *e)
{
    struct stream *s = stream_alloc(h, c->params.stream ? STREAM_DIRECT : STREAM_COLLECT);

    if (!s) {
        return err_nomem(e, "an answer");
    }
    s->include_usage = c->include_usage;
    s->n = c->params.n;
    s->limit_bytes = stream_limit(c);
    int rc = stream_fill(s, c, id, ctx, e);
    if (rc) {
        stream_unref(s);
        return rc;
    }
    *ret = s;
    return 0;
}

int stream_new_plain(struct stream **ret, struct stream_hub *h, enum stream_mode mode,
                     struct err *e)
{
    struct stream *s = stream_alloc(h, mode);

    if (!s) {
        return err_nomem(e, "an answer");
    }
    *ret = s;
    return 0;
}

bool stream_reserve(struct stream *s, int64_t bytes)
{
    s->min_bytes = bytes;
    return account_try(&s->account, bytes);
}

int stream_submit(struct stream *s, struct engine *engine, struct err *e)
{
    s->n_left = s->n_requests;
    stream_ref(s); /* the engine's, until `last` arrived for every request */
    int rc = engine_submit_all(engine, s->request, s->n_requests, e);
    if (rc) {
        s->n_left = 0;
        stream_unref(s);
    }
    return rc;
}

struct stream *stream_ref(struct stream *s)
{
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

void stream_unref(struct stream *s)
{
    if (atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (!s->dying && atomic_load_explicit(&s->account.bytes, memory_order_relaxed) > LARGE_BYTES) {
        s->dying = true; /* freeing this much takes time: leave it to a renderer */
        renderers_push(&s->hub->renderers, s);
        return;
    }
    for (int32_t i = 0; i < s->n_requests; i++) {
        request_unref(s->request[i]);
    }
    stream_drop_queue(s);
    for (int32_t i = 0; s->shared && i < s->n_requests; i++) {
        buf_release(&s->shared[i].middle);
    }
    free(s->shared);
    free(s->request);
    free(s->usage);
    free(s->begun);
    collector_release(&s->collector);
    answer_free(s->answer);
    sse_style_release(&s->style);
    buf_release(&s->pending);
    buf_release(&s->out);
    pthread_mutex_destroy(&s->lock);
    account_close(&s->account);
    atomic_fetch_sub(&s->hub->n_streams, 1);
    free(s);
}
