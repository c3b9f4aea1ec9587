/* One request's method, path, headers and body, from its first callback to its end, on
 * a server whose engine answers at once: what libmicrohttpd would hand over, made up
 * here in its place. The input is lines: "METHOD PATH[?NAME=VALUE]", then "Name: value"
 * lines, an empty line, the body. Its length says the rest: odd, the server drains; by
 * four and two left, the engine is not there yet; by seven, HTTP/1.0; by eleven, the
 * client leaves when it has the head. Whatever it is, it gets one answer with a known
 * status, or none, and nothing is left. covers: server/http/http.c server/http/reply.c
 * server/http/routes.c server/access/quota.c */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "config/base/wait.h"
#include "server/http/http.h"

#define CHECK(x)                                                     \
    do {                                                             \
        if (!(x)) {                                                  \
            fprintf(stderr, "fuzz_headers: %s does not hold\n", #x); \
            abort();                                                 \
        }                                                            \
    } while (0)

enum { MAX_HEADERS = 16, PATIENCE_S = 15 };

/* In place of libmicrohttpd's. */
struct MHD_Connection {
    char *method, *path, *query, *body, *target;
    char *name[MAX_HEADERS], *value[MAX_HEADERS];
    size_t n, body_len;
    unsigned status; /* of the answer; 0: none yet */
    /* its body, where it comes in pieces */
    ssize_t (*read)(void *cls, uint64_t pos, char *to, size_t max);
    void *read_arg;
    MHD_ContentReaderFreeCallback free_arg;
    uint64_t size; /* of that body; MHD_SIZE_UNKNOWN: until it ends */
    int fd, other; /* the socket's two ends */
    bool leaves;
    pthread_mutex_t lock;
    pthread_cond_t resumed;
    bool suspended; /* under lock */
};

/* the one being asked for an answer; one thread makes answers */
static struct MHD_Connection *current;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

const char *MHD_lookup_connection_value(struct MHD_Connection *c, enum MHD_ValueKind kind,
                                        const char *key)
{
    for (size_t i = 0; kind == MHD_HEADER_KIND && i < c->n; i++) {
        if (strcasecmp(c->name[i], key) == 0) {
            return c->value[i];
        }
    }
    return NULL;
}

/* Its headers, and a Host where the input has none. */
int MHD_get_connection_values_n(struct MHD_Connection *c, enum MHD_ValueKind kind,
                                MHD_KeyValueIteratorN each, void *arg)
{
    CHECK(kind == MHD_HEADER_KIND);
    if (!MHD_lookup_connection_value(c, kind, "Host") &&
        each(arg, kind, "Host", 4, "x", 1) == MHD_NO) {
        return 1;
    }
    for (size_t i = 0; i < c->n; i++) {
        if (each(arg, kind, c->name[i], strlen(c->name[i]), c->value[i], strlen(c->value[i])) ==
            MHD_NO) {
            break;
        }
    }
    return (int)c->n;
}

/* One argument at most. */
enum MHD_Result MHD_lookup_connection_value_n(struct MHD_Connection *c, enum MHD_ValueKind kind,
                                              const char *key, size_t len, const char **ret,
                                              size_t *ret_len)
{
    CHECK(kind == MHD_GET_ARGUMENT_KIND);
    if (!c->query || strncmp(c->query, key, len) != 0) {
        return MHD_NO;
    }
    *ret = c->query[len] == '=' ? c->query + len + 1 : NULL;
    *ret_len = *ret ? strlen(*ret) : 0;
    return MHD_YES;
}

/* Most requests end without their socket being looked at. */
static void open_socket(struct MHD_Connection *c)
{
    int fd[2];

    if (c->fd >= 0) {
        return;
    }
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) == 0);
    c->fd = fd[0];
    c->other = fd[1];
}

const union MHD_ConnectionInfo *MHD_get_connection_info(struct MHD_Connection *c,
                                                        enum MHD_ConnectionInfoType type, ...)
{
    static union MHD_ConnectionInfo info;

    if (type != MHD_CONNECTION_INFO_CONNECTION_FD) {
        return NULL;
    }
    open_socket(c);
    info.connect_fd = c->fd;
    return &info;
}

struct MHD_Response *MHD_create_response_from_callback(uint64_t size, size_t block,
                                                       MHD_ContentReaderCallback read, void *arg,
                                                       MHD_ContentReaderFreeCallback free_arg)
{
    (void)block;
    current->size = size;
    current->free_arg = free_arg;
    current->read = read;
    current->read_arg = arg;
    return MHD_create_response_from_buffer(0, "", MHD_RESPMEM_PERSISTENT);
}

enum MHD_Result MHD_queue_response(struct MHD_Connection *c, unsigned int status,
                                   struct MHD_Response *r)
{
    CHECK(c->status == 0 && status >= 200 && status < 600 && r);
    CHECK(status_slot((int)status) != 0);
    c->status = status;
    return MHD_YES;
}

void MHD_suspend_connection(struct MHD_Connection *c)
{
    pthread_mutex_lock(&c->lock);
    CHECK(!c->suspended);
    c->suspended = true;
    pthread_mutex_unlock(&c->lock);
}

void MHD_resume_connection(struct MHD_Connection *c)
{
    pthread_mutex_lock(&c->lock);
    CHECK(c->suspended);
    c->suspended = false;
    pthread_cond_signal(&c->resumed);
    pthread_mutex_unlock(&c->lock);
}

/* Read what the writer sends until it lets go of the socket. */
static void await_resume(struct MHD_Connection *c)
{
    char unread[4096];
    int64_t end_us = clock_us() + PATIENCE_S * (int64_t)1000000;

    if (c->leaves) {
        shutdown(c->other, SHUT_RDWR);
    }
    pthread_mutex_lock(&c->lock);
    while (c->suspended) {
        CHECK(clock_us() < end_us);
        wait_until(&c->resumed, &c->lock, clock_us() + 1000);
        while (recv(c->other, unread, sizeof(unread), MSG_DONTWAIT) > 0)
            ;
    }
    pthread_mutex_unlock(&c->lock);
}

/* The line at *at, without its end; *at goes behind it. NULL where nothing is left. */
static char *take_line(char **at)
{
    char *line = *at;

    if (!line) {
        return NULL;
    }
    char *end = strchr(line, '\n');
    *at = end ? end + 1 : NULL;
    if (end) {
        *end = '\0';
    }
    return line;
}

static bool read_input(struct MHD_Connection *c, char *text, size_t size)
{
    char *at = text, *line;

    c->method = take_line(&at);
    c->path = c->method ? strchr(c->method, ' ') : NULL;
    if (!c->path) {
        return false;
    }
    *c->path++ = '\0';
    c->target = strdup(c->path);
    CHECK(c->target);
    c->query = strchr(c->path, '?');
    if (c->query) {
        *c->query++ = '\0';
    }
    while ((line = take_line(&at)) && *line) {
        char *colon = strchr(line, ':');
        if (!colon || c->n == MAX_HEADERS) {
            continue;
        }
        *colon = '\0';
        c->name[c->n] = line;
        c->value[c->n++] = colon + 1 + strspn(colon + 1, " ");
    }
    c->body = at ? at : text + size;
    c->body_len = (size_t)(text + size - c->body);
    return true;
}

/* ---- the server ---- */

static void api_defaults(void *arg, struct gen_params *p)
{
    gen_params_init(p, arg);
}

static uint64_t api_new_seed(void *arg)
{
    (void)arg;
    return 1;
}

static int api_encode(void *arg, const char *text, size_t len, bool add_special, int32_t max_tokens,
                      int32_t **ret_ids, int32_t *ret_n, struct err *e)
{
    return engine_encode(arg, text, len, add_special, max_tokens, ret_ids, ret_n, e);
}

static const char *api_token_bytes(const void *arg, int32_t id, size_t *ret_len)
{
    return engine_token_bytes(arg, id, ret_len);
}

/* As the daemon does when the model is there (serve.c). */
static struct engine *start_engine(struct server *s)
{
    struct engine *engine;
    struct err e = {0};

    CHECK(stream_hub_open(&s->hub, 1, (int64_t)1 << 30, &e) == 0);
    CHECK(engine_open(&engine, s->settings, &s->hub.sink, &e) == 0);
    struct api_context *api = &s->api;
    engine_info(engine, &api->info);
    api->max_logprobs = 20;
    api->defaults = api_defaults;
    api->new_seed = api_new_seed;
    api->encode = api_encode;
    api->token_bytes = api_token_bytes;
    api->arg = engine;
    engine_chat(engine, &api->chat);
    engine_fim(engine, &api->fim);
    atomic_store(&s->hub.engine, engine);
    return engine;
}

/* Keys of every kind: one asks as it likes, the others have limits. */
static char *make_key_file(void)
{
    static const char text[] =
        "name=free key=alpha\nname=few key=beta requests_per_minute=2 priority=0..2\n"
        "name=small key=gamma tokens_per_minute=20 concurrent_requests=1 weight=2\n";
    static char flag[64];
    int fd = memfd_create("keys", 0);

    CHECK(fd >= 0 && write(fd, text, sizeof(text) - 1) == sizeof(text) - 1);
    snprintf(flag, sizeof(flag), "--api-key-file=/proc/self/fd/%d", fd);
    return flag;
}

/* A server with keys, pages of two origins and small bodies, and its engine. */
static struct server *start(struct engine **ret_engine)
{
    static struct server s;
    static struct settings settings;
    char *argv[] = {"null",
                    "--config=none",
                    make_key_file(),
                    "--max-body-bytes=1KiB",
                    "--max-model-len=256",
                    "--kv-blocks=64",
                    "--cors-origins=http://a.example, http://b.example"};
    struct err e = {0};
    bool help;

    CHECK(settings_load(&settings, ARRAY_LEN(argv), argv, NULL, &help, &e) == 0);
    s.settings = &settings;
    s.main_listener = (struct listener){.server = &s, .fd = -1};
    pthread_mutex_init(&s.conns_lock, NULL);
    CHECK(keys_open(&s.keys, &settings, &e) == 0 && kv_events_open(&s.kv_events, &s, &e) == 0);
    s.requests = calloc((size_t)n_routes + 1, sizeof(*s.requests));
    CHECK(s.requests);
    log_setup(LOG_TEXT, LOG_ERROR);
    *ret_engine = start_engine(&s);
    return &s;
}

/* ---- one request ---- */

/* The body of the answer, as libmicrohttpd would ask for it. */
static void read_answer(struct MHD_Connection *c)
{
    char some[512];

    for (uint64_t pos = 0; pos < c->size;) {
        ssize_t n = c->read(c->read_arg, pos, some, sizeof(some));
        CHECK(n >= MHD_CONTENT_READER_END_WITH_ERROR && n <= (ssize_t)sizeof(some));
        if (n < 0) {
            return;
        }
        pos += (uint64_t)n;
        if (n == 0) {
            await_resume(c);
        }
    }
}

static enum MHD_Result deliver(struct listener *d, struct MHD_Connection *c, const char *version,
                               void **context)
{
    size_t n = 0;

    *context = http_on_target(d, c->target, c);
    enum MHD_Result ok = http_on_request(d, c, c->path, c->method, version, NULL, &n, context);
    /* The body in two pieces. */
    for (size_t at = 0; ok == MHD_YES && !c->status && at < c->body_len; at += n) {
        size_t left = n = MIN(c->body_len - at, MAX(c->body_len / 2, (size_t)1));
        ok = http_on_request(d, c, c->path, c->method, version, c->body + at, &left, context);
        CHECK(ok == MHD_NO || left == 0);
    }
    while (ok == MHD_YES && !c->status) {
        n = 0;
        ok = http_on_request(d, c, c->path, c->method, version, NULL, &n, context);
        if (ok == MHD_YES && !c->status) {
            await_resume(c);
        }
    }
    if (ok == MHD_YES && c->read) {
        read_answer(c);
    }
    return ok;
}

static void open_connection(struct MHD_Connection *c, size_t size)
{
    c->fd = c->other = -1;
    c->leaves = size % 11 == 0;
    pthread_mutex_init(&c->lock, NULL);
    wait_init(&c->resumed);
    current = c;
}

static void close_connection(struct MHD_Connection *c)
{
    if (c->free_arg) {
        c->free_arg(c->read_arg);
    }
    if (c->fd >= 0) {
        close(c->fd);
        close(c->other);
    }
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->resumed);
}

/* A stream whose client left goes on until the engine has heard of it: now and then all
 * must be back. */
static void await_quiet(const struct server *s)
{
    int64_t end_us = clock_us() + PATIENCE_S * (int64_t)1000000;

    while (server_busy(s) > 0) {
        CHECK(clock_us() < end_us);
        sched_yield();
    }
}

/* Pictures of the pool take a tenth of a second each, and do not end: few are asked
 * for. */
static bool is_watch(const struct MHD_Connection *c)
{
    return strcmp(c->path, "/debug/kv") == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct server *s;
    static struct engine *engine;

    if (!s) {
        s = start(&engine);
    }
    char *text = malloc(size + 1);
    CHECK(text);
    memcpy(text, data, size);
    text[size] = '\0';
    atomic_store(&s->draining, size & 1);
    atomic_store(&s->engine, size % 4 == 2 ? NULL : engine);

    struct MHD_Connection c = {0};
    void *context = NULL;
    if (read_input(&c, text, size)) {
        open_connection(&c, size);
        if (is_watch(&c) && size % 256 == 0) {
            c.leaves = true;
        } else if (is_watch(&c)) {
            atomic_store(&s->engine, NULL);
        }
        enum MHD_Result ok =
            deliver(&s->main_listener, &c, size % 7 == 0 ? "HTTP/1.0" : "HTTP/1.1", &context);
        CHECK(ok == MHD_NO || c.status != 0);
        http_on_completed(&s->main_listener, &c, &context,
                          ok == MHD_YES ? MHD_REQUEST_TERMINATED_COMPLETED_OK
                                        : MHD_REQUEST_TERMINATED_WITH_ERROR);
        CHECK(!context);
        if (size % 64 == 0) {
            await_quiet(s);
        }
        close_connection(&c);
        free(c.target);
    }
    free(text);
    return 0;
}
