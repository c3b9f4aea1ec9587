/* One request, from its request line to its end, as MHD's callbacks (see http.h).
 *
 * A request is refused by its headers where possible, but the response is sent only
 * after its body, which is dropped: a client that is still sending would not see it. An
 * ambiguous head (http_head.h) is answered at once, since the end of its body is not
 * known.
 */
#include "server/http/http_head.h"
#include "server/http/loop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

/* A body that is too large is read and dropped up to this many times max-body-bytes. */
enum { REFUSED_BODY_FACTOR = 4 };

/* ---- headers ---- */

static void set_refusal(struct http_request *x, int status, const char *message)
{
    struct reply *r = malloc(sizeof(*r));

    x->refused = true;
    if (r) {
        reply_begin(r, x, status);
        reply_error(r, status, NULL, message);
        x->refusal = r;
    }
}

static const char *header(struct MHD_Connection *c, const char *name)
{
    return MHD_lookup_connection_value(c, MHD_HEADER_KIND, name);
}

/* Take the client's X-Request-Id if it is valid, else a random id. */
static void name_request(struct http_request *x, struct MHD_Connection *c)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
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

/* Keep the Origin header if the setting cors-origins allows it. */
static void check_origin(struct http_request *x, struct MHD_Connection *c)
{
    const char *origin = header(c, MHD_HTTP_HEADER_ORIGIN),
               *list = x->server->settings->cors_origins;
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

    return !content_type || (strncasecmp(content_type, json, n) == 0 &&
                             (!content_type[n] || strchr("; \t", content_type[n])));
}

/* Whether a Content-Encoding says that the body must be decoded. */
static bool is_encoded(const char *coding)
{
    return coding && *coding && strcasecmp(coding, "identity") != 0;
}

/* ---- whether the head is unambiguous (http_head.h) ---- */

struct fields {
    struct http_field field[LIMIT_HEADER_FIELDS + 1];
    size_t n;
};

static enum MHD_Result add_field(void *cls, enum MHD_ValueKind kind, const char *name,
                                 size_t name_len, const char *value, size_t value_len)
{
    struct fields *f = cls;

    (void)kind, (void)name_len, (void)value_len;
    f->field[f->n++] = (struct http_field){name, value ? value : ""};
    return f->n < ARRAY_LEN(f->field) ? MHD_YES : MHD_NO;
}

/* Whether this MHD version parses in place, as http_head.h describes. Later versions
 * refuse what this one repairs. */
static bool parses_in_place(void)
{
    return strncmp(MHD_get_version(), "0.9.", 4) == 0;
}

static void check_head(struct http_request *x, struct MHD_Connection *c, const char *url,
                       const char *version)
{
    const union MHD_ConnectionInfo *size =
        MHD_get_connection_info(c, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    struct fields f = {.n = 0};
    struct http_head h = {.method = x->method, .url = url, .version = version, .field = f.field};

    MHD_get_connection_values_n(c, MHD_HEADER_KIND, add_field, &f);
    h.n_fields = f.n;
    h.size = size ? size->header_size : 0;
    h.target_len = x->target_len;
    h.target_error = x->target_error;
    h.in_place = size && parses_in_place();
    struct http_verdict v = http_head_check(&h);
    x->close = x->close || v.close;
    if (v.status) {
        set_refusal(x, v.status, v.message);
    }
}

/* What this connection may request: everything; on the admin listener only health and
 * metrics; beyond max-connections only health, and only once. */
static void check_listener(struct http_request *x)
{
    bool reserved = x->conn && x->conn->admitted.reserved;
    bool health = x->route && x->route->admin && x->route->open;

    x->close = x->close || reserved;
    if (x->listener->admin && !(x->route && x->route->admin)) {
        set_refusal(x, 404, "only /health, /ping and /metrics are served here (admin-listen)");
    } else if (!x->listener->admin && reserved && !health) {
        set_refusal(x, 503, "too many connections (max-connections); try again");
    }
}

/* Whether the request has a key, in either of the headers that clients send it in. */
static bool has_key(struct http_request *x, struct MHD_Connection *c)
{
    struct keys *k = &x->server->keys;

    return keys_find(k, header(c, MHD_HTTP_HEADER_AUTHORIZATION), &x->auth) ||
           keys_find_bare(k, header(c, "x-api-key"), &x->auth);
}

/* Refuse what needs no body: wrong key, route, method or content type. */
static void check_headers(struct http_request *x, struct MHD_Connection *c, const char *allow)
{
    const char *type = header(c, MHD_HTTP_HEADER_CONTENT_TYPE),
               *coding = header(c, MHD_HTTP_HEADER_CONTENT_ENCODING);
    bool preflight = strcmp(x->method, "OPTIONS") == 0;
    char text[256];

    if (!(x->route && (x->route->open || (x->listener->admin && x->listener->local))) &&
        !preflight && !has_key(x, c)) {
        set_refusal(x, 401,
                    "API key missing or wrong; send the header 'Authorization: Bearer KEY'");
    } else if (!x->route && !allow) {
        snprintf(text, sizeof(text), "no route %.100s; see /openapi.json", x->path);
        set_refusal(x, 404, text);
    } else if (!x->route) {
        snprintf(text, sizeof(text), "%.16s is not allowed on %.100s; allowed: %s", x->method,
                 x->path, allow);
        set_refusal(x, 405, text);
        if (x->refusal) {
            x->refusal->allow = allow;
            if (preflight) {
                x->refusal->status = 204;
                buf_clear(&x->refusal->body);
            }
        }
    } else if (strcmp(x->route->method, "POST") == 0 && !is_json(type)) {
        snprintf(text, sizeof(text),
                 "Content-Type is '%.80s'; send the header 'Content-Type: application/json'", type);
        set_refusal(x, 415, text);
    } else if (strcmp(x->route->method, "POST") == 0 && is_encoded(coding)) {
        snprintf(text, sizeof(text),
                 "Content-Encoding is '%.80s'; bodies must be sent as they are, without it",
                 coding);
        set_refusal(x, 415, text);
    }
}

/* Let a sleeping engine wake up while the request's body is read. */
static void announce_to_engine(const struct http_request *x)
{
    struct engine *engine = atomic_load(&x->server->engine);

    if (engine && x->route && x->route->generates && !x->refused) {
        engine_expect(engine);
    }
}

/* Set the connection's deadline to `seconds` after `from_us`. */
static void set_due(struct http_request *x, int64_t from_us, double seconds)
{
    if (x->conn) {
        x->conn->due_us = from_us + (int64_t)(seconds * 1e6);
    }
}

static struct http_request *http_request_new(struct http_loop *loop, struct MHD_Connection *c)
{
    struct http_request *x = calloc(1, sizeof(*x));
    const union MHD_ConnectionInfo *peer =
        MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    if (!x) {
        return NULL;
    }
    x->loop = loop;
    x->listener = loop->listener;
    x->server = loop->listener->server;
    x->conn = peer ? peer->socket_context : NULL;
    x->begin_us = clock_us();
    buf_init(&x->body, (size_t)x->server->settings->max_body_bytes);
    account_open(&x->account, &x->server->hub.budget);
    return x;
}

void *http_on_target(void *cls, const char *target, struct MHD_Connection *c)
{
    struct http_request *x = http_request_new(cls, c);

    if (!x) {
        return NULL;
    }
    x->target_len = strlen(target);
    x->target_error = http_target_check(target);
    /* The first request's deadline was set when the connection was opened. */
    if (x->conn && atomic_exchange(&x->conn->idle_us, 0)) {
        double left = (double)(x->conn->due_us - x->begin_us) / 1e6;
        set_due(x, x->begin_us, MIN(left, x->server->settings->header_timeout));
    }
    return x;
}

/* The head is complete. */
static void http_request_begin(struct http_request *x, struct MHD_Connection *c, const char *method,
                               const char *url, const char *version)
{
    const char *arg, *allow = NULL;

    x->begun = true;
    x->method = method;
    snprintf(x->method_name, sizeof(x->method_name), "%s", method);
    x->http_1_0 = strcmp(version, "HTTP/1.0") == 0;
    x->body_begin_us = clock_us();
    set_due(x, x->body_begin_us, x->server->settings->body_timeout);
    const char *path = http_target_path(url);
    snprintf(x->path, sizeof(x->path), "%s", path);
    x->route = strlen(path) < sizeof(x->path) ? route_find(method, x->path, &arg, &allow) : NULL;
    name_request(x, c);
    trace_read(&x->trace, header(c, "traceparent"));
    check_origin(x, c);
    keys_anonymous(&x->server->keys, &x->auth);
    check_head(x, c, url, version);
    if (x->refused) {
        x->unread = true;
        return;
    }
    check_listener(x);
    if (!x->refused) {
        check_headers(x, c, allow);
    }
    announce_to_engine(x);
}

/* ---- body ---- */

static void too_large(struct http_request *x)
{
    char text[128];

    snprintf(text, sizeof(text), "body is larger than %lld bytes (max-body-bytes)",
             (long long)x->server->settings->max_body_bytes);
    set_refusal(x, 413, text);
}

/* The budget for client memory is exhausted. */
static void refuse_for_room(struct http_request *x)
{
    set_refusal(x, 503, "");
    if (x->refusal) {
        reply_no_room(x->refusal);
    }
}

static void drop_body(struct http_request *x)
{
    buf_release(&x->body);
    account_set(&x->account, 0);
}

static void take_body(struct http_request *x, const char *data, size_t len)
{
    if (x->refused) {
        return;
    }
    if (x->body.len + len > x->body.max) {
        too_large(x);
    } else if (buf_append(&x->body, data, len) != 0) {
        set_refusal(x, 503, "out of memory");
    }
    if (!x->refused && !account_try(&x->account, (int64_t)x->body.cap)) {
        budget_make_room(&x->server->hub.budget);
        refuse_for_room(x);
    }
    if (x->refused) {
        drop_body(x);
    }
}

/* Whether to refuse before the body is sent: if the client waits for that (Expect), or
 * the announced body is too large to be read and dropped. */
static bool refuse_unsent(struct http_request *x, struct MHD_Connection *c)
{
    const char *length = header(c, MHD_HTTP_HEADER_CONTENT_LENGTH),
               *expect = header(c, MHD_HTTP_HEADER_EXPECT);

    unsigned long long n = length ? strtoull(length, NULL, 10) : 0,
                       max = (unsigned long long)x->server->settings->max_body_bytes;

    if (!x->refused && n > max) {
        too_large(x);
    }
    return x->refused && ((expect && n) || n > max * REFUSED_BODY_FACTOR);
}

/* A chunked body begins: its lines are of no known length. */
static void watch_chunks(struct http_request *x, struct MHD_Connection *c)
{
    if (x->conn && header(c, MHD_HTTP_HEADER_TRANSFER_ENCODING)) {
        x->conn->request = x;
        http_loop_watch(x->conn);
    }
}

void http_refuse_chunk(struct http_request *x, struct buf *to)
{
    struct reply r;

    reply_begin(&r, x, 400);
    reply_error(&r, 400, NULL, "a line of the chunked body is too long");
    x->status = 400;
    x->answered = true;
    buf_printf(to,
               "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
               "Content-Length: %zu\r\nX-Request-Id: %s\r\nConnection: close\r\n\r\n",
               r.body.len, x->request_id);
    buf_append(to, r.body.data, r.body.len);
    buf_release(&r.body);
}

static enum MHD_Result answer_refusal(struct http_request *x, struct MHD_Connection *c)
{
    if (x->conn) {
        x->conn->due_us = INT64_MAX;
    }
    return x->refusal ? reply_send(x, c, x->refusal) : MHD_NO;
}

/* ---- response ---- */

/* Answer with the stream: send the headers of its events, or park the connection until
 * the one body is complete. */
static enum MHD_Result begin_stream(struct http_request *x, struct MHD_Connection *c)
{
    struct stream *s = x->stream;

    if (s->mode != STREAM_COLLECT) {
        return reply_events(x, c);
    }
    if (stream_collected(s)) {
        return reply_collected(x, c);
    }
    x->parked = true;
    return MHD_YES;
}

bool http_request_argument(const struct http_request *x, const char *name, const char **ret)
{
    const char *value = NULL;
    size_t len;

    if (MHD_lookup_connection_value_n(x->connection, MHD_GET_ARGUMENT_KIND, name, strlen(name),
                                      &value, &len) != MHD_YES) {
        return false;
    }
    *ret = value ? value : "";
    return true;
}

void http_request_handle(struct http_request *x)
{
    const char *arg = x->path + strlen(x->route->path);

    reply_begin(&x->reply, x, 200);
    if (x->route->needs_engine && !atomic_load(&x->server->engine)) {
        reply_error(&x->reply, 503, NULL, "the server is starting; try again");
    } else {
        x->route->handle(x, arg, &x->reply);
    }
    drop_body(x);
}

void http_request_refuse(struct http_request *x)
{
    reply_begin(&x->reply, x, 503);
    reply_error(&x->reply, 503, NULL, HTTP_SHUTTING_DOWN);
    drop_body(x);
}

/* The handler has run: send what it has made. */
static enum MHD_Result answer(struct http_request *x, struct MHD_Connection *c)
{
    x->connection = NULL;
    if (!x->stream) {
        return reply_send(x, c, &x->reply);
    }
    buf_release(&x->reply.body);
    x->stream->connection = c;
    x->stream->wake_fd = x->loop->wake_fd;
    x->stream->fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    account_list(&x->stream->account, x->stream->mode == STREAM_COLLECT ? -1 : x->stream->fd);
    return begin_stream(x, c);
}

/* The request is complete: call its handler, or have a worker do so. */
static enum MHD_Result dispatch(struct http_request *x, struct MHD_Connection *c)
{
    x->connection = c;
    if (x->body.len > LIMIT_SHORT_BODY_BYTES && workers_take(&x->server->workers, x)) {
        return MHD_YES;
    }
    http_request_handle(x);
    return answer(x, c);
}

static enum MHD_Result answer_handed(struct http_request *x, struct MHD_Connection *c)
{
    x->handed = false;
    enum MHD_Result result = answer(x, c);
    workers_done(&x->server->workers);
    return result;
}

enum MHD_Result http_on_request(void *cls, struct MHD_Connection *c, const char *url,
                                const char *method, const char *version, const char *data,
                                size_t *size, void **context)
{
    struct http_request *x = *context;

    if (!x) {
        x = *context = http_request_new(cls, c);
    }
    if (!x) {
        return MHD_NO;
    }
    if (!x->begun) {
        http_request_begin(x, c, method, url, version);
        if (x->unread || refuse_unsent(x, c)) {
            return answer_refusal(x, c);
        }
        watch_chunks(x, c);
        return MHD_YES;
    }
    if (x->conn) {
        x->conn->heard = true;
    }
    if (*size) {
        take_body(x, data, *size);
        x->body_seen += *size;
        *size = 0;
        set_due(x, x->body_begin_us,
                x->server->settings->body_timeout + (double)x->body_seen / LIMIT_BODY_BYTES_PER_S);
        /* Disconnect a client that sends an endless chunked body. */
        return x->body_seen > (uint64_t)x->server->settings->max_body_bytes * REFUSED_BODY_FACTOR
                   ? MHD_NO
                   : MHD_YES;
    }
    if (x->conn) {
        http_loop_unwatch(x->conn);
        x->conn->due_us = INT64_MAX;
    }
    if (x->refused) {
        return answer_refusal(x, c);
    }
    if (x->handed) {
        return answer_handed(x, c);
    }
    return x->parked ? begin_stream(x, c) : dispatch(x, c);
}

/* ---- end ---- */

static void count_request(const struct http_request *x)
{
    const struct server *s = x->server;
    long route = x->route ? x->route - routes : n_routes;

    atomic_fetch_add(&s->requests[route][status_slot(x->status)], 1);
}

void http_on_completed(void *cls, struct MHD_Connection *c, void **context,
                       enum MHD_RequestTerminationCode code)
{
    struct http_request *x = *context;

    (void)cls, (void)c;
    if (!x) {
        return;
    }
    if (!x->begun && code == MHD_REQUEST_TERMINATED_WITH_ERROR) {
        x->status = 400; /* refused by MHD, which does not tell whether with 400 or 431 */
    } else if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK && !x->answered) {
        x->status = 499; /* the client left or was disconnected before the response ended */
    }
    if (x->handed) { /* the client left while a worker had it */
        buf_release(&x->reply.body);
        workers_done(&x->server->workers);
    }
    if (x->stream) {
        stream_detach(x->stream);
    }
    if (x->answer) {
        body_leave(x->answer);
    }
    if (x->begun || x->status == 400) {
        /* the line first: whoever sees the request counted finds it in the log */
        request_log(x);
        count_request(x);
    }
    if (x->counted) {
        client_end(x->auth.client);
    }
    if (x->conn) {
        http_loop_unwatch(x->conn);
        x->conn->idle_us = clock_us();
        set_due(x, x->conn->idle_us, LIMIT_IDLE_S);
    }
    if (x->stream) {
        stream_unref(x->stream);
    }
    if (x->refusal) {
        buf_release(&x->refusal->body);
        free(x->refusal);
    }
    drop_body(x);
    account_close(&x->account);
    free(x);
    *context = NULL;
}
