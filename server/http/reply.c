/* Responses: headers, JSON bodies, and the start of a stream of events. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/http.h"
#include "server/stream/agents/dialects.h"

void reply_init(struct reply *r, int status)
{
    *r = (struct reply){.status = status};
    buf_init(&r->body, 2 * LIMIT_RESPONSE_BYTES);
}

void reply_begin(struct reply *r, const struct http_request *x, int status)
{
    reply_init(r, status);
    r->dialect = x->route ? x->route->dialect : NULL;
}

void reply_error(struct reply *r, int status, const char *param, const char *message)
{
    buf_clear(&r->body);
    r->status = status;
    r->content_type = NULL;
    (r->dialect ? r->dialect->error_body : api_error)(&r->body, status, param, message);
}

static const int known_status[HTTP_STATUS_SLOTS] = {0,   200, 204, 400, 401, 404, 405, 413,
                                                    415, 429, 431, 499, 500, 501, 503, 504};

int status_slot(int status)
{
    for (int i = 1; i < HTTP_STATUS_SLOTS; i++) {
        if (known_status[i] == status) {
            return i;
        }
    }
    return 0;
}

int slot_status(int slot)
{
    return known_status[slot];
}

static void add_header(struct MHD_Response *m, const char *name, const char *value)
{
    if (value && value[0]) {
        MHD_add_response_header(m, name, value);
    }
}

/* Durations in Go's format, which clients of these headers expect: "1m2.500s". */
static void print_duration(char *to, size_t size, int64_t us)
{
    long long ms = (us + 999) / 1000, minutes = ms / 60000;

    if (minutes) {
        snprintf(to, size, "%lldm%lld.%03llds", minutes, ms / 1000 % 60, ms % 1000);
    } else {
        snprintf(to, size, "%lld.%03llds", ms / 1000, ms % 1000);
    }
}

static void add_quota(struct MHD_Response *m, const char *what, const struct quota_view *v)
{
    char name[48], value[32];

    if (!v->limit) {
        return;
    }
    snprintf(name, sizeof(name), "x-ratelimit-limit-%s", what);
    snprintf(value, sizeof(value), "%d", v->limit);
    add_header(m, name, value);
    snprintf(name, sizeof(name), "x-ratelimit-remaining-%s", what);
    snprintf(value, sizeof(value), "%d", v->remaining);
    add_header(m, name, value);
    snprintf(name, sizeof(name), "x-ratelimit-reset-%s", what);
    print_duration(value, sizeof(value), v->reset_us);
    add_header(m, name, value);
}

/* The x-ratelimit-* headers, for a key with limits on the routes that count. */
static void add_rate_limits(const struct http_request *x, struct MHD_Response *m)
{
    const struct key_limits *l = &x->auth.limits;
    struct quota_view requests, tokens;

    if (!x->route || !x->route->limited || (!l->requests_per_minute && !l->tokens_per_minute)) {
        return;
    }
    client_view(x->auth.client, l, clock_us(), &requests, &tokens);
    add_quota(m, "requests", &requests);
    add_quota(m, "tokens", &tokens);
}

/* Retry-After: the known time, else an estimate from the rate at which requests end. */
static void add_retry_after(const struct http_request *x, const struct reply *r,
                            struct MHD_Response *m)
{
    char text[32];
    int64_t ms = (r->retry_us + 999) / 1000, s = (ms + 999) / 1000;

    if (r->retry_us) {
        snprintf(text, sizeof(text), "%lld", (long long)ms);
        add_header(m, "retry-after-ms", text);
    } else {
        s = r->status == 429 || x->stream ? MAX(atomic_load(&x->server->retry_after_s), 1) : 1;
    }
    snprintf(text, sizeof(text), "%lld", (long long)s);
    add_header(m, MHD_HTTP_HEADER_RETRY_AFTER, text);
}

static void add_common_headers(const struct http_request *x, struct MHD_Response *m)
{
    char trace[TRACE_HEADER_BYTES];

    add_header(m, "X-Request-Id", x->request_id);
    if (x->route && x->route->dialect == &messages_dialect) {
        add_header(m, "request-id", x->request_id); /* the name that Anthropic's clients read */
    }
    trace_header(&x->trace, trace);
    add_header(m, "traceparent", trace);
    add_header(m, "X-Quire-Ignored", x->ignored);
    add_rate_limits(x, m);
    if (x->origin[0]) {
        add_header(m, "Access-Control-Allow-Origin", x->origin);
        add_header(
            m, "Access-Control-Expose-Headers",
            "X-Request-Id, X-Quire-Ignored, Retry-After, retry-after-ms, "
            "x-ratelimit-limit-requests, "
            "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
            "x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, traceparent");
        add_header(m, "Vary", "Origin");
    }
    if (x->close || atomic_load(&x->server->draining)) {
        add_header(m, MHD_HTTP_HEADER_CONNECTION, "close");
    }
}

/* Allow a page only its own inline script and style, and requests to this server. */
static void add_page_headers(struct MHD_Response *m, const char *nonce)
{
    char policy[320];

    snprintf(policy, sizeof(policy),
             "default-src 'none'; script-src 'nonce-%s'; style-src 'nonce-%s'; connect-src 'self'; "
             "img-src data:; "
             "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
             nonce, nonce);
    add_header(m, "Content-Security-Policy", policy);
    add_header(m, "X-Content-Type-Options", "nosniff");
    add_header(m, "Referrer-Policy", "no-referrer");
    add_header(m, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
}

static enum MHD_Result queue(struct http_request *x, struct MHD_Connection *c, int status,
                             struct MHD_Response *m)
{
    x->status = status;
    enum MHD_Result ok = MHD_queue_response(c, (unsigned)status, m);
    MHD_destroy_response(m);
    return ok;
}

void reply_no_room(struct reply *r)
{
    reply_error(r, 503, NULL,
                "the server's memory for clients is used up (client-buffer-bytes); try again");
}

bool reply_grow(struct http_request *x, struct reply *r, size_t bytes)
{
    if (account_try(&x->account, (int64_t)(x->body.cap + bytes))) {
        return true;
    }
    budget_make_room(x->account.budget);
    buf_release(&r->body);
    account_set(&x->account, (int64_t)x->body.cap);
    reply_no_room(r);
    return false;
}

/* A response that sends the segments, which are taken over; NULL: out of memory. */
static struct MHD_Response *response_of(struct http_request *x, struct segments *g)
{
    struct body *b = body_new(&x->server->hub.budget, g);

    if (!b) {
        return NULL;
    }
    x->answer = b;
    return body_response(b, x->conn ? x->conn->fd : -1);
}

/* Queue the reply with r->body or, if not NULL, with `long_body`; the body is taken
 * over. */
static enum MHD_Result send_reply(struct http_request *x, struct MHD_Connection *c, struct reply *r,
                                  struct segments *long_body)
{
    struct segments g;

    if (!long_body) {
        if (r->body.failed) {
            reply_error(r, 503, NULL, "out of memory");
        }
        segments_init(&g, 1);
        segments_take(&g, &r->body);
        segments_close(&g);
        long_body = &g;
    }
    size_t len = long_body->total;
    struct MHD_Response *m = response_of(x, long_body);
    if (!m) {
        return MHD_NO;
    }
    if (len) {
        add_header(m, MHD_HTTP_HEADER_CONTENT_TYPE,
                   r->content_type ? r->content_type : "application/json");
    }
    add_header(m, MHD_HTTP_HEADER_ALLOW, r->allow);
    if (r->status == 401) {
        add_header(m, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    }
    if (r->status == 429 || r->status == 503) {
        add_retry_after(x, r, m);
    }
    if (r->nonce[0]) {
        add_page_headers(m, r->nonce);
    }
    x->close = x->close || r->close;
    if (r->allow && x->origin[0]) {
        add_header(m, "Access-Control-Allow-Methods", r->allow);
        add_header(m, "Access-Control-Allow-Headers",
                   "Authorization, Content-Type, X-Request-Id, traceparent, x-api-key, "
                   "anthropic-version, anthropic-beta, "
                   "anthropic-dangerous-direct-browser-access");
        add_header(m, "Access-Control-Max-Age", "600");
    }
    add_common_headers(x, m);
    return queue(x, c, r->status, m);
}

enum MHD_Result reply_send(struct http_request *x, struct MHD_Connection *c, struct reply *r)
{
    return send_reply(x, c, r, NULL);
}

/* ---- answering with a stream ---- */

static void free_nothing(void *cls)
{
    (void)cls; /* the request holds the stream's reference */
}

enum MHD_Result reply_events(struct http_request *x, struct MHD_Connection *c)
{
    struct MHD_Response *m = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1024, stream_read,
                                                               x->stream, free_nothing);

    if (!m) {
        return MHD_NO;
    }
    add_header(m, MHD_HTTP_HEADER_CONTENT_TYPE, "text/event-stream; charset=utf-8");
    add_header(m, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
    add_header(m, "X-Accel-Buffering", "no");
    add_common_headers(x, m);
    return queue(x, c, 200, m);
}

/* Move what a finished stream has collected into the segments of the body. */
static int collected_body(struct stream *s, struct segments *g)
{
    struct prompt_ids *ids =
        s->style.token_ids ? calloc((size_t)s->n_requests, sizeof(*ids)) : NULL;

    if (s->style.token_ids && !ids) {
        return ERR_NOMEM;
    }
    for (int32_t i = 0; ids && i < s->n_requests; i++) {
        ids[i] = (struct prompt_ids){s->request[i]->prompt, s->request[i]->n_prompt};
    }
    segments_init(g, 2 * LIMIT_RESPONSE_BYTES);
    int rc = collector_segments(g, &s->collector, &s->style, ids, s->n, &s->total);
    free(ids);
    pthread_mutex_lock(&s->lock);
    s->collected = 0;
    s->min_bytes = 0;
    stream_account(s);
    pthread_mutex_unlock(&s->lock);
    if (rc) {
        segments_release(g);
    }
    return rc;
}

/* Copy a short body into one buffer, so that it is sent at once. */
static void join(struct segments *g, struct buf *to)
{
    enum { SHORT_BYTES = 32 * 1024 };

    if (g->total > SHORT_BYTES || buf_reserve(to, g->total)) {
        return;
    }
    to->len = segments_read(g, to->data, g->total);
    to->data[to->len] = '\0';
}

/* The response of a collecting stream that is finished or lost. */
enum MHD_Result reply_collected(struct http_request *x, struct MHD_Connection *c)
{
    struct stream *s = x->stream;
    struct segments g;
    struct reply r;

    pthread_mutex_lock(&s->lock);
    bool lost = s->lost;
    pthread_mutex_unlock(&s->lock);
    if (lost) {
        return MHD_NO;
    }
    /* Of a finished stream only `lost` can still change. */
    reply_begin(&r, x, s->status);
    if (s->status != 200) {
        reply_error(&r, s->status, NULL, s->error);
        return reply_send(x, c, &r);
    }
    if (s->n_requests == 0) {
        buf_append(&r.body, s->pending.data, s->pending.len);
        return reply_send(x, c, &r);
    }
    if (s->answer) {
        if (answer_end(s->answer, &r.body, &s->total) || r.body.failed) {
            reply_error(&r, 503, NULL, "out of memory");
        }
        return reply_send(x, c, &r);
    }
    if (collected_body(s, &g)) {
        reply_error(&r, 503, NULL, "out of memory");
        return reply_send(x, c, &r);
    }
    join(&g, &r.body);
    if (!r.body.len) {
        return send_reply(x, c, &r, &g);
    }
    segments_release(&g);
    return reply_send(x, c, &r);
}
