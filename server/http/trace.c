/* Parsing and printing of the header traceparent. */
#include "server/http/trace.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

/* version "-" trace-id "-" parent-id "-" trace-flags; all lower-case hex. */
enum { AT_ID = 3, AT_PARENT = 36, AT_FLAGS = 53, END = 55 };

/* n lower-case hex digits; with `nonzero` not all of them 0. */
static bool is_hex(const char *s, size_t n, bool nonzero)
{
    return strspn(s, "0123456789abcdef") >= n && (!nonzero || strspn(s, "0") < n);
}

static bool is_valid(const char *h)
{
    size_t len = strlen(h);

    if (len < END || h[2] != '-' || h[AT_PARENT - 1] != '-' || h[AT_FLAGS - 1] != '-') {
        return false;
    }
    if (!is_hex(h, 2, false) || strncmp(h, "ff", 2) == 0) {
        return false;
    }
    /* A later version may have more fields after another dash. */
    if (len > END && (strncmp(h, "00", 2) == 0 || h[END] != '-')) {
        return false;
    }
    return is_hex(h + AT_ID, 32, true) && is_hex(h + AT_PARENT, 16, true) &&
           is_hex(h + AT_FLAGS, 2, false);
}

void trace_read(struct trace *ret, const char *header)
{
    uint64_t span = 0;

    *ret = (struct trace){0};
    if (!header || !is_valid(header)) {
        return;
    }
    while (span == 0) {
        if (getrandom(&span, sizeof(span), 0) != (ssize_t)sizeof(span)) {
            return;
        }
    }
    memcpy(ret->id, header + AT_ID, 32);
    memcpy(ret->parent, header + AT_PARENT, 16);
    memcpy(ret->flags, header + AT_FLAGS, 2);
    snprintf(ret->span, sizeof(ret->span), "%016llx", (unsigned long long)span);
}

void trace_header(const struct trace *t, char ret[TRACE_HEADER_BYTES])
{
    ret[0] = '\0';
    if (t->id[0]) {
        snprintf(ret, TRACE_HEADER_BYTES, "00-%s-%s-%s", t->id, t->span, t->flags);
    }
}
