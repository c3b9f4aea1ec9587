/* One request's method, path, headers and body, from its first callback to its end, on a server whose model is still loading: what
 * libmicrohttpd would hand over, made up here in its place. The input is lines: "METHOD PATH", then "Name: value" lines, an empty
 * line, the body. Whatever it is, it gets one answer with a known status, or none, and nothing is left.
 * covers: server/http.c server/auth.c server/reply.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server/http.h"

#define CHECK(x)                                                     \
    do {                                                             \
        if (!(x)) {                                                  \
            fprintf(stderr, "fuzz_headers: %s does not hold\n", #x); \
            abort();                                                 \
        }                                                            \
    } while (0)

enum { MAX_HEADERS = 16 };

/* In place of libmicrohttpd's. */
struct MHD_Connection {
    char *method, *path, *body;
    char *name[MAX_HEADERS], *value[MAX_HEADERS];
    size_t n, body_len;
    unsigned status; /* of the answer; 0: none yet */
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

const char *MHD_lookup_connection_value(struct MHD_Connection *c, enum MHD_ValueKind kind, const char *key)
{
    for (size_t i = 0; kind == MHD_HEADER_KIND && i < c->n; i++)
        if (strcasecmp(c->name[i], key) == 0)
            return c->value[i];
    return NULL;
}

const union MHD_ConnectionInfo *MHD_get_connection_info(struct MHD_Connection *c, enum MHD_ConnectionInfoType type, ...)
{
    (void)c, (void)type;
    return NULL;
}

enum MHD_Result MHD_queue_response(struct MHD_Connection *c, unsigned int status, struct MHD_Response *r)
{
    CHECK(c->status == 0 && status >= 200 && status < 600 && r);
    CHECK(status_slot((int)status) != 0);
    c->status = status;
    return MHD_YES;
}

/* The line at *at, without its end; *at goes behind it. NULL where nothing is left. */
static char *take_line(char **at)
{
    char *line = *at;
    if (!line)
        return NULL;
    char *end = strchr(line, '\n');
    *at = end ? end + 1 : NULL;
    if (end)
        *end = '\0';
    return line;
}

static bool read_input(struct MHD_Connection *c, char *text, size_t size)
{
    char *at = text, *line;
    c->method = take_line(&at);
    c->path = c->method ? strchr(c->method, ' ') : NULL;
    if (!c->path)
        return false;
    *c->path++ = '\0';
    while ((line = take_line(&at)) && *line) {
        char *colon = strchr(line, ':');
        if (!colon || c->n == MAX_HEADERS)
            continue;
        *colon = '\0';
        c->name[c->n] = line;
        c->value[c->n++] = colon + 1 + strspn(colon + 1, " ");
    }
    c->body = at ? at : text + size;
    c->body_len = (size_t)(text + size - c->body);
    return true;
}

/* A server with a key, pages of one origin and small bodies, that has no engine yet. */
static struct server *start(void)
{
    static struct server s;
    static struct settings settings;
    static char *argv[] = {
        "null",           "--config=none",         "--api-key=alpha",
        "--api-key=beta", "--max-body-bytes=1KiB", "--cors-origins=http://a.example, http://b.example"};
    struct err e = {0};
    bool help;
    CHECK(settings_load(&settings, ARRAY_LEN(argv), argv, NULL, &help, &e) == 0);
    s.settings = &settings;
    CHECK(keys_open(&s.keys, &settings, &e) == 0);
    s.requests = calloc((size_t)n_routes + 1, sizeof(*s.requests));
    CHECK(s.requests);
    log_setup(LOG_TEXT, LOG_ERROR);
    return &s;
}

static enum MHD_Result deliver(struct server *s, struct MHD_Connection *c, void **context)
{
    size_t n = 0;
    enum MHD_Result ok = http_on_request(s, c, c->path, c->method, "HTTP/1.1", NULL, &n, context);
    /* The body in two pieces. */
    for (size_t at = 0; ok == MHD_YES && !c->status && at < c->body_len; at += n) {
        size_t left = n = MIN(c->body_len - at, MAX(c->body_len / 2, (size_t)1));
        ok = http_on_request(s, c, c->path, c->method, "HTTP/1.1", c->body + at, &left, context);
        CHECK(ok == MHD_NO || left == 0);
    }
    n = 0;
    if (ok == MHD_YES && !c->status)
        ok = http_on_request(s, c, c->path, c->method, "HTTP/1.1", NULL, &n, context);
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct server *s;
    if (!s)
        s = start();
    char *text = malloc(size + 1);
    CHECK(text);
    memcpy(text, data, size);
    text[size] = '\0';
    atomic_store(&s->draining, size & 1);

    struct MHD_Connection c = {0};
    void *context = NULL;
    if (read_input(&c, text, size)) {
        enum MHD_Result ok = deliver(s, &c, &context);
        CHECK(ok == MHD_NO || c.status != 0);
        http_on_completed(s, &c, &context,
                          ok == MHD_YES ? MHD_REQUEST_TERMINATED_COMPLETED_OK : MHD_REQUEST_TERMINATED_WITH_ERROR);
        CHECK(!context && atomic_load(&s->body_bytes) == 0);
    }
    free(text);
    return 0;
}
