/* What goes out: headers, JSON bodies, and the beginning of a stream of events. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http.h"

void reply_init(struct reply *r, int status)
{
    *r = (struct reply){.status = status};
    buf_init(&r->body, 2 * LIMIT_RESPONSE_BYTES);
}

void reply_error(struct reply *r, int status, const char *param, const char *message)
{
    buf_clear(&r->body);
    r->status = status;
    r->content_type = NULL;
    api_error(&r->body, status, param, message);
}

static const int known_status[HTTP_STATUS_SLOTS] = {0, 200, 204, 400, 401, 404, 405, 413, 415, 429, 499, 500, 503, 504};

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

/* As Go writes durations, which is what clients of such headers read: "1m2.5s". */
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

/* Of a key with limits, on the routes that count. */
static void add_rate_limits(const struct exchange *x, struct MHD_Response *m)
{
    const struct key_limits *l = &x->grant.limits;
    struct quota_view requests, tokens;

    if (!x->route || !x->route->limited || (!l->requests_per_minute && !l->tokens_per_minute)) {
        return;
    }
    client_view(x->grant.client, l, clock_us(), &requests, &tokens);
    add_quota(m, "requests", &requests);
    add_quota(m, "tokens", &tokens);
}

/* When to come again: what is known, else by the rate at which requests end. */
static void add_retry_after(const struct exchange *x, const struct reply *r, struct MHD_Response *m)
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

static void add_common_headers(const struct exchange *x, struct MHD_Response *m)
{
    char trace[TRACE_HEADER_BYTES];

    add_header(m, "X-Request-Id", x->request_id);
    trace_header(&x->trace, trace);
    add_header(m, "traceparent", trace);
    add_header(m, "X-Quire-Ignored", x->ignored);
    add_rate_limits(x, m);
    if (x->origin[0]) {
        add_header(m, "Access-Control-Allow-Origin", x->origin);
        add_header(m, "Access-Control-Expose-Headers",
                   "X-Request-Id, X-Quire-Ignored, Retry-After, retry-after-ms, x-ratelimit-limit-requests, "
                   "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
                   "x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, traceparent");
        add_header(m, "Vary", "Origin");
    }
    if (atomic_load(&x->server->draining)) {
        add_header(m, MHD_HTTP_HEADER_CONNECTION, "close");
    }
}

/* A page may run the script and style that it brings, and talk to this server; nothing else. */
static void add_page_headers(struct MHD_Response *m, const char *nonce)
{
    char policy[320];

    snprintf(policy, sizeof(policy),
             "default-src 'none'; script-src 'nonce-%s'; style-src 'nonce-%s'; connect-src 'self'; img-src data:; "
             "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
             nonce, nonce);
    add_header(m, "Content-Security-Policy", policy);
    add_header(m, "X-Content-Type-Options", "nosniff");
    add_header(m, "Referrer-Policy", "no-referrer");
    add_header(m, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
}

static enum MHD_Result queue(struct exchange *x, struct MHD_Connection *c, int status, struct MHD_Response *m)
{
    x->status = status;
    enum MHD_Result ok = MHD_queue_response(c, (unsigned)status, m);
    MHD_destroy_response(m);
    return ok;
}

/* Takes over r->body. */
enum MHD_Result reply_send(struct exchange *x, struct MHD_Connection *c, struct reply *r)
{
    if (r->body.failed) {
        reply_error(r, 503, NULL, "out of memory");
    }
    size_t len = r->body.len;
    struct MHD_Response *m = MHD_create_response_from_buffer(
        len, r->body.data ? r->body.data : "", r->body.data ? MHD_RESPMEM_MUST_FREE : MHD_RESPMEM_PERSISTENT);
    if (!m) {
        buf_release(&r->body);
        return MHD_NO;
    }
    buf_init(&r->body, 1);
    if (len) {
        add_header(m, MHD_HTTP_HEADER_CONTENT_TYPE, r->content_type ? r->content_type : "application/json");
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
    if (r->close && !atomic_load(&x->server->draining)) {
        add_header(m, MHD_HTTP_HEADER_CONNECTION, "close");
    }
    if (r->allow && x->origin[0]) {
        add_header(m, "Access-Control-Allow-Methods", r->allow);
        add_header(m, "Access-Control-Allow-Headers", "Authorization, Content-Type, X-Request-Id, traceparent");
        add_header(m, "Access-Control-Max-Age", "600");
    }
    add_common_headers(x, m);
    return queue(x, c, r->status, m);
}

/* ---- answering with a stream ---- */

static void free_nothing(void *cls)
{
    (void)cls; /* the exchange holds the stream's reference */
}

enum MHD_Result reply_events(struct exchange *x, struct MHD_Connection *c)
{
    struct MHD_Response *m =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1024, stream_read, x->stream, free_nothing);

    if (!m) {
        return MHD_NO;
    }
    add_header(m, MHD_HTTP_HEADER_CONTENT_TYPE, "text/event-stream; charset=utf-8");
    add_header(m, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
    add_header(m, "X-Accel-Buffering", "no");
    add_common_headers(x, m);
    return queue(x, c, 200, m);
}

/* The body of a stream that has come to its end without one. */
enum MHD_Result reply_collected(struct exchange *x, struct MHD_Connection *c)
{
    struct stream *s = x->stream;
    struct reply r;

    pthread_mutex_lock(&s->lock);
    bool lost = s->lost;
    pthread_mutex_unlock(&s->lock);
    if (lost) {
        return MHD_NO;
    }
    /* Finished: nothing of it changes any more, but `lost`. */
    reply_init(&r, s->status);
    if (s->status != 200) {
        reply_error(&r, s->status, NULL, s->error);
        return reply_send(x, c, &r);
    }
    if (s->n_requests == 0) {
        buf_append(&r.body, s->pending.data, s->pending.len);
        return reply_send(x, c, &r);
    }
    struct prompt_ids *ids = s->style.token_ids ? calloc((size_t)s->n_requests, sizeof(*ids)) : NULL;
    for (int32_t i = 0; ids && i < s->n_requests; i++) {
        ids[i] = (struct prompt_ids){s->request[i]->prompt, s->request[i]->n_prompt};
    }
    if (s->style.token_ids && !ids) {
        reply_error(&r, 503, NULL, "out of memory");
    } else {
        collector_body(&r.body, &s->collector, &s->style, ids, s->n, &s->total);
    }
    free(ids);
    return reply_send(x, c, &r);
}
