/* The page at / and the KV-pool snapshots that it shows (/debug/kv). The page is one
 * HTML file, embedded in the executable. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "server/http/http.h"

__asm__(".section .rodata\n"
        ".global page_html, page_html_end\n"
        "page_html:\n"
        ".incbin \"server/ui/index.html\"\n"
        "page_html_end:\n"
        ".byte 0\n"
        ".previous\n");
extern const char page_html[], page_html_end[];

/* The placeholder of the CSP nonce in the page, replaced in every response. */
#define NONCE_MARK "@NONCE@"

static bool is_off(const struct http_request *x, struct reply *r)
{
    if (x->server->settings->ui) {
        return false;
    }
    reply_error(r, 404, NULL, "the page is turned off (--no-ui)");
    return true;
}

static bool make_nonce(char ret[33])
{
    uint64_t random[2];

    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random)) {
        return false;
    }
    snprintf(ret, 33, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    return true;
}

void handle_page(struct http_request *x, const char *arg, struct reply *r)
{
    const char *from = page_html, *mark;

    (void)arg;
    if (is_off(x, r)) {
        return;
    }
    if (!make_nonce(r->nonce)) {
        reply_error(r, 503, NULL, "getrandom gave no nonce");
        return;
    }
    r->content_type = "text/html; charset=utf-8";
    while ((mark = strstr(from, NONCE_MARK))) {
        buf_append(&r->body, from, (size_t)(mark - from));
        buf_puts(&r->body, r->nonce);
        from = mark + sizeof(NONCE_MARK) - 1;
    }
    buf_append(&r->body, from, (size_t)(page_html_end - from));
}

/* ---- /debug/kv ---- */

/* Read a number from the URL, if it is there. False: it is not in [least, most], and
 * `r` is the refusal. */
static bool read_number(const struct http_request *x, const char *name, int32_t least, int32_t most,
                        int32_t *ret, struct reply *r)
{
    const char *text;
    char *end;
    char message[128];

    if (!http_request_argument(x, name, &text)) {
        return true;
    }
    long v = strtol(text, &end, 10);
    if (end == text || *end || v < least || v > most) {
        snprintf(message, sizeof(message), "%s must be a number from %d to %d", name, least, most);
        reply_error(r, 400, name, message);
        return false;
    }
    *ret = (int32_t)v;
    return true;
}

static bool read_window(const struct http_request *x, struct kv_window *w, struct reply *r)
{
    const char *text;

    *w = (struct kv_window){.n = KV_WINDOW_BLOCKS,
                            .follow = !http_request_argument(x, "first", &text)};
    return read_number(x, "first", 0, INT32_MAX, &w->first, r) &&
           read_number(x, "n", 1, KV_WINDOW_MAX_BLOCKS, &w->n, r);
}

void handle_kv_events(struct http_request *x, const char *arg, struct reply *r)
{
    struct server *s = x->server;
    struct kv_window window;
    struct stream *stream;
    struct err e = {0};
    const char *text;
    bool once = http_request_argument(x, "once", &text);

    (void)arg;
    if (is_off(x, r) || !read_window(x, &window, r)) {
        return;
    }
    if (atomic_load(&s->draining)) {
        reply_error(r, 503, NULL, "the server is shutting down");
        return;
    }
    enum stream_mode events = s->tls ? STREAM_READER : STREAM_DIRECT;
    int rc = stream_new_plain(&stream, &s->hub, once ? STREAM_COLLECT : events, &e);
    if (!rc) {
        stream->chunked = !x->http_1_0;
        rc = kv_events_subscribe(&s->kv_events, stream, window, once, &e);
        if (rc) {
            stream_unref(stream);
        }
    }
    if (rc) {
        reply_error(r, http_status_of(e.code), NULL, e.text);
        return;
    }
    x->stream = stream;
}
