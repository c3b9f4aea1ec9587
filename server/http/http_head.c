/* The rules of RFC 9110 and RFC 9112 that http_head.h names, in order of the head. */
#include "server/http/http_head.h"

#include <stdint.h>
#include <string.h>
#include <strings.h>

#include "config/base/limits.h"

/* ---- bytes ---- */

/* RFC 9110 section 5.6.2: the form of methods, field names and names of codings. */
static bool is_token(const char *text, size_t len)
{
    static const char allowed[] = "!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                  "abcdefghijklmnopqrstuvwxyz";

    for (size_t i = 0; i < len; i++) {
        if (!memchr(allowed, text[i], sizeof(allowed) - 1)) {
            return false;
        }
    }
    return len > 0;
}

/* Field values may have visible bytes, spaces, tabs and bytes above ASCII. */
static bool has_control_bytes(const char *value)
{
    for (const unsigned char *p = (const unsigned char *)value; *p; p++) {
        if ((*p < ' ' && *p != '\t') || *p == 0x7f) {
            return true;
        }
    }
    return false;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

static struct http_verdict refuse(int status, const char *message)
{
    return (struct http_verdict){.status = status, .message = message, .close = true};
}

static struct http_verdict accept(void)
{
    return (struct http_verdict){0};
}

/* ---- the request line ---- */

/* The bytes of the scheme that a target in absolute form (RFC 9112, 3.2.2) begins with;
 * 0: another form. */
static size_t scheme_len(const char *target)
{
    return strncasecmp(target, "http://", 7) == 0    ? 7
           : strncasecmp(target, "https://", 8) == 0 ? 8
                                                     : 0;
}

const char *http_target_path(const char *url)
{
    size_t scheme = scheme_len(url);
    const char *path = scheme ? strchr(url + scheme, '/') : url;

    return path ? path : "/";
}

const char *http_target_check(const char *target)
{
    for (const char *p = target; *p; p++) {
        if ((unsigned char)*p <= ' ' || (unsigned char)*p >= 0x7f || *p == '#') {
            return "the request target has bytes that must be percent-encoded";
        }
        if (*p == '%') {
            int high = hex_digit(p[1]), low = high < 0 ? -1 : hex_digit(p[2]);
            if (low < 0 || high * 16 + low < ' ' || high * 16 + low == 0x7f) {
                return "the request target is wrongly percent-encoded, or encodes a control byte";
            }
        }
    }
    size_t scheme = scheme_len(target);
    if (target[0] != '/' && !scheme && strcmp(target, "*") != 0) {
        return "the request target must begin with '/'";
    }
    size_t authority = scheme ? strcspn(target + scheme, "/?") : 0;
    /* An encoded '/' would move the path's beginning, which is read when decoded. */
    if (scheme && (authority == 0 || memchr(target + scheme, '%', authority))) {
        return "the request target's authority is empty or percent-encoded";
    }
    return NULL;
}

static struct http_verdict check_request_line(const struct http_head *h)
{
    if (!is_token(h->method, strlen(h->method))) {
        return refuse(400, "the request method is not a token");
    }
    if (h->target_error) {
        return refuse(400, h->target_error);
    }
    return accept();
}

/* ---- the bytes between the strings ---- */

/* The length of the line end, overwritten by NUL, between `at` and `next`: 2 for CRLF,
 * 1 for a bare LF, 0 for anything else. */
static size_t line_end(const char *at, const char *next)
{
    uintptr_t from = (uintptr_t)at, to = (uintptr_t)next;

    if (to <= from || to - from > 2) {
        return 0;
    }
    return at[0] == '\0' && next[-1] == '\0' ? to - from : 0;
}

/* Compare where the strings are with where they must be; bytes between them are read
 * only after their addresses were checked. */
static struct http_verdict check_bytes(const struct http_head *h)
{
    struct http_verdict v = accept();
    const char *at = h->method + strlen(h->method) + 1;
    uintptr_t end = (uintptr_t)h->method + h->size;

    if (at != h->url || at + h->target_len + 1 != h->version) {
        return refuse(400, "the request line must be METHOD TARGET HTTP/1.1, with single spaces");
    }
    at = h->version + strlen(h->version);
    for (size_t i = 0; i < h->n_fields; i++) {
        size_t n = line_end(at, h->field[i].name);
        if (n == 0) {
            return refuse(400, "a header is folded over lines, or has a NUL");
        }
        v.close = v.close || n == 1;
        at = h->field[i].value + strlen(h->field[i].value);
    }
    size_t left = end > (uintptr_t)at ? end - (uintptr_t)at : 0;
    if (left < 2 || left > 4 || memcmp(at, "\0\0\0", left) != 0) {
        return refuse(400, "a header is folded over lines, or has a NUL");
    }
    v.close = v.close || left != 4;
    return v;
}

/* ---- fields ---- */

static struct http_verdict check_fields(const struct http_head *h)
{
    for (size_t i = 0; i < h->n_fields; i++) {
        if (!is_token(h->field[i].name, strlen(h->field[i].name))) {
            return refuse(400, "a header name is not a token; no space may precede the colon");
        }
        if (has_control_bytes(h->field[i].value)) {
            return refuse(400, "a header value has control bytes");
        }
    }
    return accept();
}

/* The number of fields with this name, and the value of the first. */
static size_t count(const struct http_head *h, const char *name, const char **ret_value)
{
    size_t n = 0;

    *ret_value = NULL;
    for (size_t i = 0; i < h->n_fields; i++) {
        if (strcasecmp(h->field[i].name, name) == 0 && n++ == 0) {
            *ret_value = h->field[i].value;
        }
    }
    return n;
}

static bool is_http_1_0(const struct http_head *h)
{
    return strcmp(h->version, "HTTP/1.0") == 0;
}

static struct http_verdict check_host(const struct http_head *h)
{
    const char *host;
    size_t n = count(h, "Host", &host);

    if (n > 1) {
        return refuse(400, "the request has several Host headers");
    }
    if (n == 0) {
        return is_http_1_0(h) ? accept() : refuse(400, "the request has no Host header");
    }
    for (const char *p = host; *p && *p != ' ' && *p != '\t'; p++) {
        if ((unsigned char)*p >= 0x7f || strchr("/?#@\\<>\"^`{|}", *p)) {
            return refuse(400, "the Host header does not name a host");
        }
    }
    const char *rest = host + strcspn(host, " \t");
    return rest[strspn(rest, " \t")] ? refuse(400, "the Host header does not name a host")
                                     : accept();
}

/* ---- where the body ends ---- */

/* Accept only one header `Transfer-Encoding: chunked`; 501 for any other coding. */
static struct http_verdict check_codings(const struct http_head *h, size_t n)
{
    bool unknown = false, list = true, exact = n == 1;

    for (size_t i = 0; i < h->n_fields; i++) {
        const char *at = h->field[i].value;
        if (strcasecmp(h->field[i].name, "Transfer-Encoding") != 0) {
            continue;
        }
        exact = exact && strcasecmp(at, "chunked") == 0;
        do {
            at += strspn(at, " \t");
            size_t len = strcspn(at, ", \t");
            const char *word = at;
            at += len + strspn(at + len, " \t");
            list = list && is_token(word, len) && (!*at || *at == ',');
            unknown = unknown || len != 7 || strncasecmp(word, "chunked", 7) != 0;
        } while (list && *at++ == ',');
    }
    if (!list) {
        return refuse(400, "Transfer-Encoding is not a list of codings");
    }
    if (unknown) {
        return refuse(501, "a transfer coding other than chunked is not supported");
    }
    return exact ? accept() : refuse(400, "Transfer-Encoding must be one coding, chunked");
}

/* MHD alone determines where a chunked body ends, and does not show its bytes. So the
 * connection is closed afterwards: nothing that follows may be read as a request. */
static struct http_verdict check_body(const struct http_head *h)
{
    const char *coding, *length;
    size_t n_codings = count(h, "Transfer-Encoding", &coding);
    size_t n_lengths = count(h, "Content-Length", &length);

    if (n_codings && n_lengths) {
        return refuse(400, "the request has both Content-Length and Transfer-Encoding");
    }
    if (n_codings && is_http_1_0(h)) {
        return refuse(400, "HTTP/1.0 has no Transfer-Encoding");
    }
    if (n_lengths > 1) {
        return refuse(400, "the request has several Content-Length headers");
    }
    if (n_lengths && (!*length || length[strspn(length, "0123456789")])) {
        return refuse(400, "Content-Length is not a number of bytes");
    }
    struct http_verdict v = n_codings ? check_codings(h, n_codings) : accept();
    v.close = n_codings > 0;
    return v;
}

struct http_verdict http_head_check(const struct http_head *h)
{
    if (h->n_fields > LIMIT_HEADER_FIELDS) {
        return refuse(431, "the request has too many headers");
    }
    if (h->size > LIMIT_HEADER_BYTES) {
        return refuse(431, "the request's line and headers are too large");
    }
    struct http_verdict v = check_request_line(h);
    bool close = false;
    if (!v.status && h->in_place) {
        v = check_bytes(h);
        close = v.close;
    }
    v = v.status ? v : check_fields(h);
    v = v.status ? v : check_host(h);
    v = v.status ? v : check_body(h);
    v.close = v.close || close;
    return v;
}
