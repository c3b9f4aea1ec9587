#include "server/http.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/listen.h"

enum {
    IDLE_TIMEOUT_S = 75, /* a connection with nothing on it */
    REFUSED_BODY_FACTOR =
        4, /* a body over the cap is read to its end up to so many times the cap: the answer is then seen */
};

/* ---- replies ---- */

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

static void add_common_headers(const struct exchange *x, struct MHD_Response *m)
{
    add_header(m, "X-Request-Id", x->request_id);
    add_header(m, "X-Quire-Ignored", x->ignored);
    if (x->origin[0]) {
        add_header(m, "Access-Control-Allow-Origin", x->origin);
        add_header(m, "Access-Control-Expose-Headers", "X-Request-Id, X-Quire-Ignored, Retry-After");
        add_header(m, "Vary", "Origin");
    }
    if (atomic_load(&x->server->draining)) {
        add_header(m, MHD_HTTP_HEADER_CONNECTION, "close");
    }
}

static enum MHD_Result queue(struct exchange *x, struct MHD_Connection *c, int status, struct MHD_Response *m)
{
    x->status = status;
    enum MHD_Result ok = MHD_queue_response(c, (unsigned)status, m);
    MHD_destroy_response(m);
    return ok;
}

/* Takes over r->body. */
static enum MHD_Result send_reply(struct exchange *x, struct MHD_Connection *c, struct reply *r)
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
        char seconds[16];
        snprintf(seconds, sizeof(seconds), "%d", r->status == 429 ? MAX(atomic_load(&x->server->retry_after_s), 1) : 1);
        add_header(m, MHD_HTTP_HEADER_RETRY_AFTER, seconds);
    }
    if (r->close && !atomic_load(&x->server->draining)) {
        add_header(m, MHD_HTTP_HEADER_CONNECTION, "close");
    }
    if (r->allow && x->origin[0]) {
        add_header(m, "Access-Control-Allow-Methods", r->allow);
        add_header(m, "Access-Control-Allow-Headers", "Authorization, Content-Type, X-Request-Id");
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

static enum MHD_Result send_events(struct exchange *x, struct MHD_Connection *c)
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
static enum MHD_Result send_collected(struct exchange *x, struct MHD_Connection *c)
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
        return send_reply(x, c, &r);
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
    return send_reply(x, c, &r);
}

static enum MHD_Result begin_stream(struct exchange *x, struct MHD_Connection *c)
{
    struct stream *s = x->stream;

    if (s->mode != STREAM_COLLECT) {
        return send_events(x, c);
    }
    if (stream_collected(s)) {
        return send_collected(x, c);
    }
    x->parked = true;
    return MHD_YES;
}

/* ---- one request ---- */

static void set_refusal(struct exchange *x, int status, const char *message)
{
    struct reply *r = malloc(sizeof(*r));

    x->refused = true;
    if (r) {
        reply_init(r, status);
        reply_error(r, status, NULL, message);
        x->refusal = r;
    }
}

static const char *header(struct MHD_Connection *c, const char *name)
{
    return MHD_lookup_connection_value(c, MHD_HEADER_KIND, name);
}

/* The client's X-Request-Id where it is one, else a new one. */
static void name_request(struct exchange *x, struct MHD_Connection *c)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
    const char *given = header(c, "X-Request-Id");
    size_t len = given ? strlen(given) : 0;
    uint64_t random[2] = {0};

    if (len >= 1 && len <= LIMIT_REQUEST_ID_BYTES && strspn(given, allowed) == len) {
        memcpy(x->request_id, given, len + 1);
        return;
    }
    ssize_t got = getrandom(random, sizeof(random), 0);
    (void)got;
    snprintf(x->request_id, sizeof(x->request_id), "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
}

/* Remember the Origin of a request from a page that the settings allow. */
static void check_origin(struct exchange *x, struct MHD_Connection *c)
{
    const char *origin = header(c, MHD_HTTP_HEADER_ORIGIN), *list = x->server->settings->cors_origins;
    size_t len = origin ? strlen(origin) : 0;

    if (!list || len < 1 || len >= sizeof(x->origin)) {
        return;
    }
    for (const char *p = list; *p; p += strcspn(p, ","), p += *p == ',') {
        p += strspn(p, " ");
        size_t n = strcspn(p, ", ");
        if ((n == 1 && p[0] == '*') || (n == len && strncasecmp(p, origin, n) == 0)) {
            memcpy(x->origin, origin, len + 1);
            return;
        }
    }
}

static bool is_json(const char *content_type)
{
    static const char json[] = "application/json";
    size_t n = sizeof(json) - 1;

    return !content_type ||
           (strncasecmp(content_type, json, n) == 0 && (!content_type[n] || strchr("; \t", content_type[n])));
}

/* What can be refused before the body is read. */
static void check_headers(struct exchange *x, struct MHD_Connection *c, const char *allow)
{
    struct server *s = x->server;
    bool preflight = strcmp(x->method, "OPTIONS") == 0;
    char text[256];

    if (!(x->route && x->route->open) && !preflight &&
        !keys_allow(&s->keys, header(c, MHD_HTTP_HEADER_AUTHORIZATION))) {
        set_refusal(x, 401, "API key missing or wrong; send the header 'Authorization: Bearer KEY'");
    } else if (!x->route && !allow) {
        snprintf(text, sizeof(text), "no route %.100s; see /openapi.json", x->path);
        set_refusal(x, 404, text);
    } else if (!x->route) {
        snprintf(text, sizeof(text), "%.16s is not allowed on %.100s; allowed: %s", x->method, x->path, allow);
        set_refusal(x, 405, text);
        if (x->refusal) {
            x->refusal->allow = allow;
            if (preflight) {
                x->refusal->status = 204;
                buf_clear(&x->refusal->body);
            }
        }
    } else if (strcmp(x->route->method, "POST") == 0 && !is_json(header(c, MHD_HTTP_HEADER_CONTENT_TYPE))) {
        set_refusal(x, 415, "Content-Type must be application/json");
    }
}

/* Headers are there. */
static struct exchange *exchange_new(struct server *s, struct MHD_Connection *c, const char *method, const char *url)
{
    struct exchange *x = calloc(1, sizeof(*x));
    const union MHD_ConnectionInfo *peer = MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    const char *arg, *allow = NULL;

    if (!x) {
        return NULL;
    }
    x->server = s;
    x->peer = peer ? peer->socket_context : NULL;
    x->method = method;
    snprintf(x->method_name, sizeof(x->method_name), "%s", method);
    x->begin_us = clock_us();
    buf_init(&x->body, (size_t)s->settings->max_body_bytes);
    snprintf(x->path, sizeof(x->path), "%s", url);
    x->route = strlen(url) < sizeof(x->path) ? route_find(method, x->path, &arg, &allow) : NULL;
    name_request(x, c);
    check_origin(x, c);
    check_headers(x, c, allow);
    return x;
}

static void too_large(struct exchange *x)
{
    char text[128];

    snprintf(text, sizeof(text), "body is larger than %lld bytes (max-body-bytes)",
             (long long)x->server->settings->max_body_bytes);
    set_refusal(x, 413, text);
}

static void drop_body(struct exchange *x)
{
    atomic_fetch_sub(&x->server->body_bytes, (int64_t)x->body.cap);
    buf_release(&x->body);
}

static void take_body(struct exchange *x, const char *data, size_t len)
{
    size_t before = x->body.cap;

    if (x->refused) {
        return;
    }
    if (x->body.len + len > x->body.max) {
        too_large(x);
    } else if (buf_append(&x->body, data, len) != 0) {
        set_refusal(x, 503, "out of memory");
    }
    int64_t total = atomic_fetch_add(&x->server->body_bytes, (int64_t)(x->body.cap - before));
    if (!x->refused && total > (int64_t)LIMIT_BODIES_BYTES) {
        set_refusal(x, 503, "too many large bodies at once; try again");
    }
    if (x->refused) {
        drop_body(x);
    }
}

/* A body that is announced as too large: say so before it is sent, where the client waits for that or it is huge. */
static bool refuse_unsent(struct exchange *x, struct MHD_Connection *c)
{
    const char *length = header(c, MHD_HTTP_HEADER_CONTENT_LENGTH), *expect = header(c, MHD_HTTP_HEADER_EXPECT);
    unsigned long long n = length ? strtoull(length, NULL, 10) : 0,
                       max = (unsigned long long)x->server->settings->max_body_bytes;

    if (!x->refused && n > max) {
        too_large(x);
    }
    return x->refused && ((expect && n) || n > max * REFUSED_BODY_FACTOR);
}

static enum MHD_Result answer_refusal(struct exchange *x, struct MHD_Connection *c)
{
    return x->refusal ? send_reply(x, c, x->refusal) : MHD_NO;
}

/* The request is whole. */
static enum MHD_Result dispatch(struct exchange *x, struct MHD_Connection *c)
{
    struct server *s = x->server;
    const char *arg = x->path + strlen(x->route->path);
    struct reply r;

    reply_init(&r, 200);
    if (x->route->needs_engine && !atomic_load(&s->engine)) {
        reply_error(&r, 503, NULL, "the server is starting; try again");
    } else {
        x->route->handle(x, arg, &r);
    }
    if (!x->stream) {
        return send_reply(x, c, &r);
    }
    buf_release(&r.body);
    drop_body(x);
    x->stream->connection = c;
    x->stream->fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    return begin_stream(x, c);
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *c, const char *url, const char *method,
                                  const char *version, const char *data, size_t *size, void **context)
{
    struct exchange *x = *context;

    if (!x) {
        x = exchange_new(cls, c, method, url);
        *context = x;
        if (!x) {
            return MHD_NO;
        }
        x->http_1_0 = strcmp(version, "HTTP/1.0") == 0;
        return refuse_unsent(x, c) ? answer_refusal(x, c) : MHD_YES;
    }
    if (*size) {
        take_body(x, data, *size);
        x->body_seen += *size;
        *size = 0;
        /* An endless chunked body is cut off. */
        return x->body_seen > (uint64_t)x->server->settings->max_body_bytes * REFUSED_BODY_FACTOR ? MHD_NO : MHD_YES;
    }
    if (x->peer) {
        x->peer->due_us = INT64_MAX;
    }
    if (x->refused) {
        return answer_refusal(x, c);
    }
    return x->parked ? begin_stream(x, c) : dispatch(x, c);
}

/* ---- the end of a request ---- */

static void log_request(const struct exchange *x)
{
    const struct stream *s = x->stream;
    enum log_level level = x->route && x->route->quiet ? LOG_DEBUG : LOG_INFO;
    double ms = (double)(clock_us() - x->begin_us) / 1e3;
    const char *route = x->route ? x->route->label : "other";

    if (!s) {
        log_event(level, "request", LOG_STR("id", x->request_id), LOG_STR("method", x->method_name),
                  LOG_STR("route", route), LOG_I64("status", x->status), LOG_F64("ms", ms));
        return;
    }
    double ttft_ms = s->first_us ? (double)(s->first_us - x->begin_us) / 1e3 : -1;
    log_event(level, "request", LOG_STR("id", x->request_id), LOG_STR("method", x->method_name),
              LOG_STR("route", route), LOG_I64("status", x->status), LOG_F64("ms", ms), LOG_F64("ttft_ms", ttft_ms),
              LOG_I64("prompts", s->n_requests), LOG_I64("n", s->n), LOG_I64("prompt_tokens", s->total.prompt_tokens),
              LOG_I64("cached_tokens", s->total.cached_tokens),
              LOG_I64("completion_tokens", s->total.completion_tokens),
              LOG_STR("finish", s->finish ? finish_reason_name(s->finish) : "none"));
}

static void count_request(const struct exchange *x)
{
    const struct server *s = x->server;
    long route = x->route ? x->route - routes : n_routes;

    atomic_fetch_add(&s->requests[route][status_slot(x->status)], 1);
}

static void on_completed(void *cls, struct MHD_Connection *c, void **context, enum MHD_RequestTerminationCode code)
{
    struct exchange *x = *context;

    (void)cls, (void)c;
    if (!x) {
        return;
    }
    if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK) {
        x->status = 499; /* the client left, or was cut off, before the end of its answer */
    }
    if (x->stream) {
        stream_detach(x->stream);
    }
    count_request(x);
    log_request(x);
    if (x->peer) {
        x->peer->due_us = clock_us() + LIMIT_REQUEST_S * (int64_t)1000000;
    }
    if (x->stream) {
        stream_unref(x->stream);
    }
    if (x->refusal) {
        buf_release(&x->refusal->body);
        free(x->refusal);
    }
    drop_body(x);
    free(x);
    *context = NULL;
}

/* ---- connections ---- */

static void on_connection(void *cls, struct MHD_Connection *c, void **context, enum MHD_ConnectionNotificationCode code)
{
    struct server *s = cls;
    struct peer *p = *context;

    pthread_mutex_lock(&s->peers_lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        p = calloc(1, sizeof(*p));
        if (p) {
            p->fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
            p->due_us = clock_us() + LIMIT_REQUEST_S * (int64_t)1000000;
            p->next = s->peers;
            if (p->next) {
                p->next->prev = p;
            }
            s->peers = p;
        }
        *context = p;
        atomic_fetch_add(&s->connections, 1);
    } else {
        atomic_fetch_sub(&s->connections, 1);
        if (p) {
            *(p->prev ? &p->prev->next : &s->peers) = p->next;
            if (p->next) {
                p->next->prev = p->prev;
            }
            free(p);
            *context = NULL;
        }
    }
    pthread_mutex_unlock(&s->peers_lock);
}

/* Which of the connections between requests have a client that left: microhttpd 0.9.75 misses it where the last bytes of a
 * request cut short and the end came together (it takes a short read for "nothing more", and the edge is gone). */
static void poll_peers(const struct server *s, struct pollfd *p, nfds_t n)
{
    nfds_t i = 0;

    for (const struct peer *q = s->peers; q && i < n; q = q->next, i++) {
        bool between = q->due_us != INT64_MAX;
        p[i] = (struct pollfd){.fd = between ? q->fd : -1, .events = POLLRDHUP};
    }
    if (poll(p, i, 0) < 0) {
        memset(p, 0, n * sizeof(*p));
    }
}

/* How long until the requests waiting now have ended, at the rate of the last seconds. */
static void estimate_retry(struct server *s, double seconds)
{
    enum { LONGEST_S = 120 };
    const struct engine *engine = atomic_load(&s->engine);
    uint64_t ended = 0;

    if (!engine) {
        return;
    }
    const struct engine_stats *stats = engine_stats(engine);
    for (int f = FINISH_STOP; f <= FINISH_ERROR; f++) {
        ended += atomic_load_explicit(&stats->finished[f], memory_order_relaxed);
    }
    double share = MIN(seconds / 10, 1);
    s->ended_per_s += share * ((double)(ended - s->ended) / seconds - s->ended_per_s);
    s->ended = ended;
    double wait = (double)atomic_load_explicit(&stats->waiting, memory_order_relaxed) / MAX(s->ended_per_s, 1e-3);
    atomic_store(&s->retry_after_s, (int)MIN(MAX(wait + 0.5, 1), LONGEST_S));
}

void server_sweep(struct server *s)
{
    int64_t now = clock_us();
    nfds_t n = 0, i = 0;

    if (now - s->swept_us < 1000 * 1000) {
        return;
    }
    estimate_retry(s, (double)(now - s->swept_us) / 1e6);
    s->swept_us = now;
    pthread_mutex_lock(&s->peers_lock);
    for (const struct peer *p = s->peers; p; p = p->next) {
        n++;
    }
    struct pollfd *polled = calloc(n + 1, sizeof(*polled));
    if (polled) {
        poll_peers(s, polled, n);
    }
    for (struct peer *p = s->peers; p; p = p->next, i++) {
        /* Seen twice, a second apart: what it sent before it left has been looked at. */
        bool left = polled && (polled[i].revents & (POLLRDHUP | POLLHUP | POLLERR));
        if (p->due_us < now || (left && p->left)) {
            shutdown(p->fd, SHUT_RDWR); /* MHD sees the end and closes it */
            p->due_us = INT64_MAX;
        }
        p->left = left;
    }
    pthread_mutex_unlock(&s->peers_lock);
    free(polled);
}

/* ---- starting and stopping ---- */

static void on_mhd_message(void *cls, const char *format, va_list args)
{
    char text[512];

    (void)cls;
    vsnprintf(text, sizeof(text), format, args);
    text[strcspn(text, "\n")] = '\0';
    log_event(LOG_DEBUG, "microhttpd", LOG_STR("message", text));
}

static int pool_threads(const struct settings *s)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);

    return (int)(s->http_threads ? s->http_threads : MAX(2, MIN(cores / 2, 16)));
}

static int read_pem(char **ret, const char *path, const char *param, struct err *e)
{
    char text[4096];
    struct buf b;
    FILE *f = fopen(path, "re");
    size_t n;

    if (!f) {
        return err_set_param(e, ERR_IO, param, "cannot read %s '%s': %m", param, path);
    }
    buf_init(&b, LIMIT_YAML_BYTES);
    while ((n = fread(text, 1, sizeof(text), f)) > 0) {
        buf_append(&b, text, n);
    }
    fclose(f);
    if (b.failed || !b.len) {
        buf_release(&b);
        return err_set_param(e, ERR_INVALID, param, "%s '%s' is empty or too large", param, path);
    }
    *ret = b.data;
    return 0;
}

static int load_tls(struct server *s, struct err *e)
{
    const struct settings *o = s->settings;

    if (!o->ssl_certfile && !o->ssl_keyfile) {
        return 0;
    }
    if (!o->ssl_certfile || !o->ssl_keyfile) {
        return err_set_param(e, ERR_INVALID, o->ssl_certfile ? "ssl-keyfile" : "ssl-certfile",
                             "ssl-certfile and ssl-keyfile go together; one is missing");
    }
    if (MHD_is_feature_supported(MHD_FEATURE_TLS) != MHD_YES) {
        return err_set_param(e, ERR_UNSUPPORTED, "ssl-certfile", "this machine's libmicrohttpd was built without TLS");
    }
    int rc = read_pem(&s->tls_cert, o->ssl_certfile, "ssl-certfile", e);
    rc = rc ? rc : read_pem(&s->tls_key, o->ssl_keyfile, "ssl-keyfile", e);
    s->tls = rc == 0;
    return rc;
}

static int start_daemon(struct server *s, struct err *e)
{
    int threads = pool_threads(s->settings);
    int64_t connections = MAX(raise_nofile(s->settings->max_connections), threads);
    unsigned flags =
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | (s->tls ? MHD_USE_TLS : 0);
    struct MHD_OptionItem more[] = {
        {s->tls ? MHD_OPTION_HTTPS_MEM_CERT : MHD_OPTION_END, 0, s->tls_cert},
        {MHD_OPTION_HTTPS_MEM_KEY, 0, s->tls_key},
        {MHD_OPTION_END, 0, NULL},
    };

    s->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, s, MHD_OPTION_EXTERNAL_LOGGER, on_mhd_message, NULL, MHD_OPTION_LISTEN_SOCKET,
        s->listen_fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)connections, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)LIMIT_HEADER_BYTES, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_TIMEOUT_S,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, s, MHD_OPTION_NOTIFY_CONNECTION, on_connection, s,
        MHD_OPTION_THREAD_POOL_SIZE, (unsigned)(threads > 1 ? threads : 0), MHD_OPTION_ARRAY, more, MHD_OPTION_END);
    return s->daemon ? 0
                     : err_set(e, ERR_IO, "libmicrohttpd did not start%s", s->tls ? ": is the certificate right?" : "");
}

int server_open(struct server *s, const struct settings *settings, struct err *e)
{
    memset(s, 0, sizeof(*s));
    s->settings = settings;
    s->listen_fd = -1;
    pthread_mutex_init(&s->peers_lock, NULL);
    s->requests = calloc((size_t)n_routes + 1, sizeof(*s->requests));
    int rc = s->requests ? 0 : err_nomem(e, "counters");
    rc = rc ? rc : keys_load(&s->keys, settings, e);
    rc = rc ? rc : load_tls(s, e);
    rc = rc ? rc : listen_open(&s->listen_fd, s->url, sizeof(s->url), settings, e);
    rc = rc ? rc : stream_hub_open(&s->hub, pool_threads(settings) / 2 > 0 ? pool_threads(settings) / 2 : 1, e);
    rc = rc ? rc : start_daemon(s, e);
    if (rc) {
        server_close(s);
    }
    return rc;
}

void server_ready(struct server *s, struct engine *engine)
{
    atomic_store(&s->hub.engine, engine);
    atomic_store(&s->engine, engine); /* last: handlers look at it first */
}

int64_t server_busy(const struct server *s)
{
    return atomic_load(&s->hub.n_streams);
}

void server_stop(struct server *s)
{
    if (s->daemon) {
        MHD_stop_daemon(s->daemon); /* closes the listening socket */
    } else if (s->listen_fd >= 0) {
        close(s->listen_fd);
    }
    s->daemon = NULL;
    s->listen_fd = -1;
}

void server_close(struct server *s)
{
    server_stop(s);
    stream_hub_close(&s->hub);
    keys_release(&s->keys);
    free(s->tls_cert);
    free(s->tls_key);
    free(s->requests);
    pthread_mutex_destroy(&s->peers_lock);
}
