/* A line is built on the caller's stack and written by a single write(2), so that lines
 * of several threads do not mix and nothing is allocated. A value is truncated at
 * LOG_VALUE_BYTES; a field that would exceed LOG_LINE_BYTES is omitted, so that the
 * line stays parsable. */
#include "config/base/log.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "config/base/buf.h"

enum { LOG_LINE_BYTES = 4096, LOG_VALUE_BYTES = 1024 };

static _Atomic int log_format_now = LOG_TEXT;
static _Atomic int log_least_now = LOG_INFO;
static _Atomic uint64_t log_dropped_lines;

static const char *const LEVEL_NAME[] = {"debug", "info", "warn", "error"};

void log_setup(enum log_format format, enum log_level least)
{
    atomic_store_explicit(&log_format_now, (int)format, memory_order_relaxed);
    atomic_store_explicit(&log_least_now, (int)least, memory_order_relaxed);
}

enum log_level log_least(void)
{
    return (enum log_level)atomic_load_explicit(&log_least_now, memory_order_relaxed);
}

uint64_t log_dropped(void)
{
    return atomic_load_explicit(&log_dropped_lines, memory_order_relaxed);
}

/* The line being built: a buf on the stack, which never grows because `max` fits in. */
struct line {
    struct buf buf;
    char room[LOG_LINE_BYTES];
};

static void line_init(struct line *l)
{
    /* newline, NUL */
    l->buf = (struct buf){.data = l->room, .cap = sizeof(l->room), .max = sizeof(l->room) - 2};
    l->room[0] = '\0';
}

/* RFC 3339 with milliseconds, UTC. */
static void line_time(struct line *l)
{
    struct timespec now;
    struct tm utc;
    char text[32];

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &utc);
    buf_printf(&l->buf, "%s.%03ldZ", text, now.tv_nsec / 1000000);
}

/* Whether a text needs no quotes in a key=value line. */
static bool is_bare(const char *text)
{
    if (text[0] == '\0') {
        return false;
    }
    for (const unsigned char *c = (const unsigned char *)text; *c != '\0'; c++) {
        if (*c <= ' ' || *c == '"' || *c == '\\' || *c == '=' || *c >= 0x7F) {
            return false;
        }
    }
    return true;
}

static void line_quoted(struct line *l, const char *text)
{
    buf_json_string(&l->buf, text, strnlen(text, LOG_VALUE_BYTES));
}

/* As much of a text as fits, in whole characters, with space left for the rest of the
 * line. */
static void line_text(struct line *l, const char *text, size_t len)
{
    enum { ESCAPE_BYTES = 6, REST_BYTES = 64 };
    size_t used = l->buf.len + REST_BYTES, max = l->buf.max, n = 0;

    for (size_t step = 1; n < len; n += step) {
        unsigned char c = (unsigned char)text[n];
        step = c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
        bool control = c < 0x20 || c == 0x7f, quoted = c == '"' || c == '\\';
        used += control ? ESCAPE_BYTES : quoted ? 2 : MAX(step, (size_t)(c < 0x80 ? 1 : 3));
        if (used > max || step > len - n) {
            break;
        }
    }
    buf_json_string(&l->buf, text, n);
}

static void line_value(struct line *l, const struct log_field *f, bool json)
{
    if (f->type == LOG_FIELD_I64) {
        buf_printf(&l->buf, "%lld", (long long)f->i64);
    } else if (f->type == LOG_FIELD_TEXT) {
        line_text(l, f->str, f->len);
    } else if (f->type == LOG_FIELD_F64 && (isfinite(f->f64) || !json)) {
        buf_printf(&l->buf, "%.6g", f->f64);
    } else if (f->type == LOG_FIELD_F64 || !f->str) {
        buf_puts(&l->buf, json ? "null" : "-");
    } else if (!json && is_bare(f->str) && strlen(f->str) <= LOG_VALUE_BYTES) {
        buf_puts(&l->buf, f->str);
    } else {
        line_quoted(l, f->str);
    }
}

static void line_field(struct line *l, const struct log_field *f, bool json)
{
    size_t before = l->buf.len;

    buf_printf(&l->buf, json ? ",\"%s\":" : " %s=", f->key);
    line_value(l, f, json);
    if (l->buf.failed || l->buf.len + 1 > l->buf.max) { /* room for the closing brace */
        l->buf.len = before;
        l->room[before] = '\0';
        l->buf.failed = false;
    }
}

/* Whether a write of a line would not block: a stalled reader of stderr must not stop a
 * serving thread, so the line is dropped instead. A line is shorter than PIPE_BUF, so
 * a pipe that poll reports as writable takes all of it. */
static bool stderr_is_writable(void)
{
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};

    return poll(&p, 1, 0) > 0 && (p.revents & POLLOUT) != 0;
}

static void line_write(const struct line *l)
{
    size_t done = 0;

    if (!stderr_is_writable()) {
        atomic_fetch_add_explicit(&log_dropped_lines, 1, memory_order_relaxed);
        return;
    }
    while (done < l->buf.len) {
        ssize_t n = write(STDERR_FILENO, l->room + done, l->buf.len - done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            atomic_fetch_add_explicit(&log_dropped_lines, 1, memory_order_relaxed);
            return;
        }
        done += (size_t)n;
    }
}

void log_fields(enum log_level level, const char *event, const struct log_field *fields,
                size_t n_fields)
{
    /* logging must not change errno between a failed call and its report */
    int saved = errno;
    bool json = atomic_load_explicit(&log_format_now, memory_order_relaxed) == LOG_JSON;
    struct line l;

    line_init(&l);
    if (json) {
        buf_puts(&l.buf, "{\"ts\":\"");
    }
    line_time(&l);
    buf_printf(&l.buf, json ? "\",\"level\":\"%s\",\"event\":" : " %s ", LEVEL_NAME[level]);
    if (json || !is_bare(event)) {
        line_quoted(&l, event);
    } else {
        buf_puts(&l.buf, event);
    }
    for (size_t i = 0; i < n_fields; i++) {
        line_field(&l, &fields[i], json);
    }
    if (json) {
        buf_putc(&l.buf, '}');
    }
    l.room[l.buf.len++] = '\n';
    line_write(&l);
    errno = saved;
}
