/* The table of routes, and their handlers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/json_fields.h"
#include "server/http/http.h"
#include "server/stream/agents/dialects.h"

static void reply_failure(struct reply *r, const struct err *e)
{
    reply_error(r, http_status_of(e->code), e->param, e->text);
}

/* ---- completions ---- */

/* The id "cmpl-…", "resp_…" and so on, from the body's request_id or from
 * x->request_id. */
static void name_completion(struct http_request *x, const struct completion *c, char *id,
                            size_t size)
{
    static const char *const prefix[] = {[API_COMPLETIONS] = "cmpl-",
                                         [API_CHAT] = "chatcmpl-",
                                         [API_RESPONSES] = "resp_",
                                         [API_MESSAGES] = "msg_"};

    if (c->request_id[0]) {
        snprintf(x->request_id, sizeof(x->request_id), "%s", c->request_id);
    }
    snprintf(id, size, "%s%s", prefix[c->api], x->request_id);
}

/* ---- limits of the key ---- */

static void reply_limited(struct reply *r, const struct quota_refusal *why)
{
    reply_error(r, 429, NULL, why->text);
    r->retry_us = why->wait_us;
}

/* Check the limits before the body is parsed. False: `r` is the refusal. */
static bool begin_for_client(struct http_request *x, struct reply *r)
{
    struct quota_refusal why;

    x->counted =
        client_begin(x->auth.client, &x->auth.limits, (int64_t)x->body.len, clock_us(), &why);
    if (!x->counted) {
        reply_limited(r, &why);
    }
    return x->counted;
}

static int64_t prompt_tokens(const struct completion *c)
{
    int64_t n = 0;

    for (int32_t i = 0; i < c->n_prompts; i++) {
        n += c->prompt[i].n;
    }
    return n;
}

/* After parsing: bring the priority within the key's bounds and take the prompts'
 * tokens. False: `r` is the refusal. */
static bool charge_client(struct http_request *x, struct completion *c, struct reply *r)
{
    const struct key_limits *l = &x->auth.limits;
    struct gen_params *p = &c->params;
    struct quota_refusal why;
    char text[160];

    if (!c->has_priority) {
        p->priority = MIN(MAX(p->priority, l->priority_low), l->priority_high);
    }
    if (p->priority < l->priority_low || p->priority > l->priority_high) {
        snprintf(text, sizeof(text), "priority is %d; %d to %d is allowed with this key",
                 p->priority, l->priority_low, l->priority_high);
        reply_error(r, 400, "priority", text);
        return false;
    }
    c->tenant = x->auth.client->tenant;
    c->weight = l->weight;
    if (!client_take_tokens(x->auth.client, l, prompt_tokens(c), clock_us(), &why)) {
        reply_limited(r, &why);
        return false;
    }
    return true;
}

/* Prepend the key's scope to the client's cache salt, so that cached prefixes of one
 * key are not found by another. The newline between them cannot occur in a scope. */
static int scope_cache(const struct http_request *x, struct completion *c, struct err *e)
{
    const char *scope = x->auth.scope, *given = c->params.cache_salt;
    char *salt;

    if (!scope[0] || x->server->settings->prefix_cache_scope != PREFIX_CACHE_KEY) {
        return 0;
    }
    if (asprintf(&salt, "%s\n%s", scope, given ? given : "") < 0) {
        return err_nomem(e, "cache_salt");
    }
    free(c->params.cache_salt);
    c->params.cache_salt = salt;
    return 0;
}

/* Refuse an answer that is certain to exceed one body before it is computed. False: `r`
 * is the refusal. */
static bool fits_a_body(const struct completion *c, struct reply *r)
{
    int64_t least = stream_min_bytes(c);
    char text[200];

    if (c->params.stream || least <= (int64_t)LIMIT_RESPONSE_BYTES) {
        return true;
    }
    snprintf(text, sizeof(text),
             "the answer would have at least %lld bytes; one body may have %zu: request less, or "
             "stream",
             (long long)least, LIMIT_RESPONSE_BYTES);
    reply_error(r, 400, c->params.n > 1 ? "n" : "logprobs", text);
    return false;
}

/* The stream of a completion, which is released, on its way to the engine. NULL: it was
 * refused in r. */
static struct stream *submit_completion(struct http_request *x, struct completion *c,
                                        const char *id, const struct api_context *ctx,
                                        struct reply *r)
{
    struct server *s = x->server;
    struct stream *stream;
    struct err e = {0};
    int64_t least = c->params.stream ? 0 : stream_min_bytes(c);
    int rc = scope_cache(x, c, &e);

    rc = rc ? rc : stream_new(&stream, &s->hub, c, id, ctx, &e);
    completion_release(c);
    if (rc) {
        reply_failure(r, &e);
        return NULL;
    }
    stream->client = x->auth.client;
    if (!stream_reserve(stream, least)) {
        stream_unref(stream);
        reply_no_room(r);
        return NULL;
    }
    stream->begin_us = x->begin_us;
    stream->chunked = !x->http_1_0;
    if (s->tls && stream->mode == STREAM_DIRECT) {
        stream->mode = STREAM_READER;
    }
    if (stream_submit(stream, atomic_load(&s->engine), &e)) {
        stream_unref(stream);
        reply_failure(r, &e);
        return NULL;
    }
    return stream;
}

/* All generating routes, which differ in `parse` and in the route's dialect. */
static void generate(struct http_request *x, struct reply *r,
                     int (*parse)(struct completion *ret, const char *body, size_t len,
                                  const struct api_context *ctx, struct err *e))
{
    struct server *s = x->server;
    struct api_context ctx = s->api;
    struct completion c;
    struct err e = {0};
    char id[sizeof(x->request_id) + 12];
    int64_t tokens;

    if (atomic_load(&s->draining)) {
        reply_error(r, 503, NULL, HTTP_SHUTTING_DOWN);
        return;
    }
    if (budget_is_over(&s->hub.budget)) {
        budget_make_room(&s->hub.budget);
        reply_no_room(r);
        return;
    }
    if (!begin_for_client(x, r)) {
        return;
    }
    ctx.tenant = x->auth.client->tenant;
    if (parse(&c, x->body.data ? x->body.data : "", x->body.len, &ctx, &e)) {
        reply_failure(r, &e);
        return;
    }
    c.dialect = x->route->dialect;
    memcpy(x->ignored, c.ignored, sizeof(x->ignored));
    name_completion(x, &c, id, sizeof(id));
    if (!charge_client(x, &c, r)) {
        completion_release(&c);
        return;
    }
    tokens = prompt_tokens(&c);
    if (!fits_a_body(&c, r)) {
        client_return_tokens(x->auth.client, tokens);
        completion_release(&c);
        return;
    }
    x->stream = submit_completion(x, &c, id, &ctx, r);
    if (!x->stream) {
        client_return_tokens(x->auth.client, tokens);
        return;
    }
    prompts_log(x);
}

static void handle_completions(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    generate(x, r, completion_parse);
}

static void handle_chat(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    generate(x, r, chat_parse);
}

static void handle_responses(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    generate(x, r, responses_parse);
}

static void handle_messages(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    generate(x, r, messages_parse);
}

/* ---- tokens ---- */

/* The number of tokens that a body's prompt has. */
static void count_tokens(struct http_request *x, struct reply *r, enum api_kind api)
{
    struct err e = {0};
    int32_t n;

    if (!begin_for_client(x, r)) {
        return;
    }
    if (count_parse(api, &n, x->ignored, x->body.data ? x->body.data : "", x->body.len,
                    &x->server->api, &e)) {
        reply_failure(r, &e);
        return;
    }
    buf_printf(&r->body,
               api == API_RESPONSES ? "{\"object\":\"response.input_tokens\",\"input_tokens\":%d}"
                                    : "{\"input_tokens\":%d}",
               n);
}

static void handle_input_tokens(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    count_tokens(x, r, API_RESPONSES);
}

static void handle_count_tokens(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    count_tokens(x, r, API_MESSAGES);
}

/* Append the tokens' ids, or with a style their texts. False: the budget is exhausted,
 * and `r` says so. */
static bool put_tokens(struct http_request *x, struct reply *r, const struct tokenize *t,
                       const struct sse_style *style)
{
    enum { AT_ONCE = 1024 };

    for (int32_t i = 0; i < t->n; i++) {
        if (i) {
            buf_putc(&r->body, ',');
        }
        if (style) {
            put_token_string(&r->body, style, t->id[i]);
        } else {
            put_i64(&r->body, t->id[i]);
        }
        if (i % AT_ONCE == 0 && !reply_grow(x, r, r->body.cap)) {
            return false;
        }
    }
    return reply_grow(x, r, r->body.cap);
}

static void handle_tokenize(struct http_request *x, const char *arg, struct reply *r)
{
    const struct api_context *api = &x->server->api;
    struct sse_style style = {.token_bytes = api->token_bytes, .arg = api->arg};
    struct tokenize t;
    struct err e = {0};

    (void)arg;
    if (!begin_for_client(x, r) || !reply_grow(x, r, 0)) {
        return;
    }
    if (tokenize_parse(&t, x->body.data ? x->body.data : "", x->body.len, api, &e)) {
        reply_failure(r, &e);
        return;
    }
    memcpy(x->ignored, t.ignored, sizeof(x->ignored));
    buf_printf(&r->body, "{\"count\":%d,\"max_model_len\":%d,\"tokens\":[", t.n,
               api->info.max_model_len);
    if (put_tokens(x, r, &t, NULL)) {
        buf_putc(&r->body, ']');
        if (t.return_strings) {
            buf_puts(&r->body, ",\"token_strs\":[");
        }
        if (!t.return_strings || (put_tokens(x, r, &t, &style) && buf_putc(&r->body, ']') == 0)) {
            buf_putc(&r->body, '}');
        }
    }
    tokenize_release(&t);
}

/* The size of the tokens' texts, plain and as JSON. */
static size_t text_bytes(const struct api_context *api, const struct tokenize *t)
{
    size_t n = 0, len;

    for (int32_t i = 0; i < t->n; i++) {
        api->token_bytes(api->arg, t->id[i], &len);
        n += 2 * len;
    }
    return n;
}

static void handle_detokenize(struct http_request *x, const char *arg, struct reply *r)
{
    struct server *s = x->server;
    struct tokenize t;
    struct err e = {0};
    struct buf text;

    (void)arg;
    if (!begin_for_client(x, r)) {
        return;
    }
    if (detokenize_parse(&t, x->body.data ? x->body.data : "", x->body.len, &s->api, &e)) {
        reply_failure(r, &e);
        return;
    }
    memcpy(x->ignored, t.ignored, sizeof(x->ignored));
    if (!reply_grow(x, r, text_bytes(&s->api, &t))) {
        tokenize_release(&t);
        return;
    }
    buf_init(&text, LIMIT_RESPONSE_BYTES);
    if (engine_decode(atomic_load(&s->engine), t.id, t.n, false, &text, &e)) {
        reply_failure(r, &e);
    } else {
        buf_puts(&r->body, "{\"prompt\":");
        buf_json_string(&r->body, text.data ? text.data : "", text.len);
        buf_putc(&r->body, '}');
    }
    buf_release(&text);
    tokenize_release(&t);
}

/* ---- models ---- */

static void handle_models(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    api_models(&r->body, &x->server->api);
}

static void handle_model(struct http_request *x, const char *arg, struct reply *r)
{
    const char *served = x->server->api.info.model_name;
    char text[256];

    if (strcmp(arg, served) != 0) {
        snprintf(text, sizeof(text), "model '%.80s' is not served here; '%.100s' is", arg, served);
        reply_error(r, 404, "model", text);
        return;
    }
    api_model(&r->body, &x->server->api);
}

/* ---- health and metrics ---- */

static void handle_health(struct http_request *x, const char *arg, struct reply *r)
{
    struct server *s = x->server;
    const struct engine *engine = atomic_load(&s->engine);
    enum engine_health h = atomic_load(&s->dead) ? HEALTH_DEAD
                           : engine              ? engine_health(engine)
                                                 : HEALTH_STARTING;

    (void)arg;
    if (h == HEALTH_READY && atomic_load(&s->draining)) {
        h = HEALTH_DRAINING;
    }
    r->status = h == HEALTH_READY ? 200 : 503;
    buf_printf(&r->body, "{\"status\":\"%s\"", engine_health_name(h));
    if (h == HEALTH_DEAD && engine && engine_death(engine)[0]) {
        buf_puts(&r->body, ",\"reason\":");
        buf_json_puts(&r->body, engine_death(engine));
    }
    buf_putc(&r->body, '}');
}

static void handle_metrics(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    r->content_type = "text/plain; version=0.0.4; charset=utf-8";
    metrics_write(&r->body, x->server);
}

static void handle_version(struct http_request *x, const char *arg, struct reply *r)
{
    (void)x, (void)arg;
    buf_puts(&r->body, "{\"version\":\"" QUIRE_VERSION "\"}");
}

static void handle_openapi(struct http_request *x, const char *arg, struct reply *r)
{
    (void)arg;
    api_openapi(&r->body, &x->server->api);
}

/* ---- the table ---- */

const struct route routes[] = {
    {"POST", "/v1/completions", "/v1/completions", .needs_engine = true, .limited = true,
     .generates = true, .handle = handle_completions},
    {"POST", "/v1/chat/completions", "/v1/chat/completions", .needs_engine = true, .limited = true,
     .generates = true, .handle = handle_chat},
    {"POST", "/v1/responses", "/v1/responses", .needs_engine = true, .limited = true,
     .generates = true, .dialect = &responses_dialect, .handle = handle_responses},
    {"POST", "/v1/responses/input_tokens", "/v1/responses/input_tokens", .needs_engine = true,
     .limited = true, .dialect = &responses_dialect, .handle = handle_input_tokens},
    {"POST", "/v1/messages", "/v1/messages", .needs_engine = true, .limited = true,
     .generates = true, .dialect = &messages_dialect, .handle = handle_messages},
    {"POST", "/v1/messages/count_tokens", "/v1/messages/count_tokens", .needs_engine = true,
     .limited = true, .dialect = &messages_dialect, .handle = handle_count_tokens},
    {"GET", "/v1/models", "/v1/models", .needs_engine = true, .handle = handle_models},
    {"GET", "/v1/models/", "/v1/models/{id}", .needs_engine = true, .handle = handle_model},
    {"POST", "/tokenize", "/tokenize", .needs_engine = true, .limited = true,
     .handle = handle_tokenize},
    {"POST", "/detokenize", "/detokenize", .needs_engine = true, .limited = true,
     .handle = handle_detokenize},
    {"GET", "/health", "/health", .open = true, .admin = true, .quiet = true,
     .handle = handle_health},
    {"GET", "/ping", "/ping", .open = true, .admin = true, .quiet = true, .handle = handle_health},
    {"GET", "/metrics", "/metrics", .admin = true, .quiet = true, .handle = handle_metrics},
    {"GET", "/version", "/version", .handle = handle_version},
    {"GET", "/", "/", .open = true, .quiet = true, .handle = handle_page},
    {"GET", "/debug/kv", "/debug/kv", .quiet = true, .needs_engine = true,
     .handle = handle_kv_events},
    {"POST", "/debug/masks", "/debug/masks", .quiet = true, .needs_engine = true, .limited = true,
     .handle = handle_masks},
    {"GET", "/openapi.json", "/openapi.json", .needs_engine = true, .handle = handle_openapi},
};
const int n_routes = ARRAY_LEN(routes);

static bool path_matches(const struct route *t, const char *path)
{
    size_t n = strlen(t->path);

    return n > 1 && t->path[n - 1] == '/' ? strncmp(path, t->path, n) == 0 && path[n]
                                          : strcmp(path, t->path) == 0;
}

const struct route *route_find(const char *method, const char *path, const char **ret_arg,
                               const char **ret_allow)
{
    for (int i = 0; i < n_routes; i++) {
        const struct route *t = &routes[i];
        if (!path_matches(t, path)) {
            continue;
        }
        bool get = strcmp(t->method, "GET") == 0;
        if (strcmp(method, t->method) == 0 || (get && strcmp(method, "HEAD") == 0)) {
            *ret_arg = path + strlen(t->path);
            return t;
        }
        *ret_allow = get ? "GET, HEAD, OPTIONS" : "POST, OPTIONS";
        return NULL;
    }
    return NULL;
}
