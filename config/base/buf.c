/* A growable byte buffer with a maximum. Capacity doubles, so appending n bytes costs
 * O(n) in all. */
#include "config/base/buf.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json_plain.h"
#include "config/base/utf8.h"

enum { BUF_FIRST_BYTES = 64 };

void buf_init(struct buf *b, size_t max_bytes)
{
    *b = (struct buf){.max = max_bytes};
}

void buf_release(struct buf *b)
{
    free(b->data);
    buf_init(b, b->max);
}

void buf_clear(struct buf *b)
{
    b->len = 0;
    b->failed = b->no_memory = false;
    if (b->data) {
        b->data[0] = '\0';
    }
}

static int buf_fail(struct buf *b, int rc)
{
    b->failed = true;
    b->no_memory = b->no_memory || rc == ERR_NOMEM;
    return rc;
}

int buf_reserve(struct buf *b, size_t len)
{
    if (len > b->max - b->len) {
        return buf_fail(b, ERR_FULL);
    }
    size_t need = b->len + len + 1; /* the NUL */
    if (need <= b->cap) {
        return 0;
    }

    size_t cap = MAX(b->cap, (size_t)BUF_FIRST_BYTES);
    while (cap < need) {
        cap = cap > SIZE_MAX / 2 ? need : cap * 2;
    }
    if (cap > b->max && b->max < SIZE_MAX) {
        cap = MAX(need, b->max + 1);
    }
    char *data = realloc(b->data, cap);
    if (!data) {
        return buf_fail(b, ERR_NOMEM);
    }
    data[b->len] = '\0';
    b->data = data;
    b->cap = cap;
    return 0;
}

int buf_append(struct buf *b, const void *data, size_t len)
{
    int rc = buf_reserve(b, len);

    if (rc < 0) {
        return rc;
    }
    if (len > 0) {
        memcpy(b->data + b->len, data, len);
    }
    b->len += len;
    b->data[b->len] = '\0';
    return 0;
}

int buf_puts(struct buf *b, const char *text)
{
    return buf_append(b, text, strlen(text));
}

int buf_putc(struct buf *b, char c)
{
    return buf_append(b, &c, 1);
}

int buf_printf(struct buf *b, const char *fmt, ...)
{
    va_list args, again;

    va_start(args, fmt);
    va_copy(again, args);
    int len = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    int rc = len < 0 ? buf_fail(b, ERR_INVALID) : buf_reserve(b, (size_t)len);
    if (rc == 0) {
        vsnprintf(b->data + b->len, (size_t)len + 1, fmt, again);
        b->len += (size_t)len;
    }
    va_end(again);
    return rc;
}

void buf_consume(struct buf *b, size_t len)
{
    if (len == 0) {
        return;
    }
    len = MIN(len, b->len);
    if (len == 0) {
        return;
    }
    b->len -= len;
    memmove(b->data, b->data + len, b->len + 1);
}

/* The escape of an ASCII character in a JSON string; NULL if it needs none. */
static const char *json_escape_of(unsigned char c, char room[8])
{
    switch (c) {
    case '"':
        return "\\\"";
    case '\\':
        return "\\\\";
    case '\n':
        return "\\n";
    case '\r':
        return "\\r";
    case '\t':
        return "\\t";
    case '\b':
        return "\\b";
    case '\f':
        return "\\f";
    default:
        if (c >= 0x20 && c != 0x7F) {
            return NULL;
        }
        snprintf(room, 8, "\\u%04x", c);
        return room;
    }
}

int buf_json_escape(struct buf *b, const char *text, size_t len)
{
    const unsigned char *s = (const unsigned char *)text;
    size_t before = b->len;
    size_t plain = 0; /* start of the run that needs no escape */
    int rc = 0;

    for (size_t i = json_plain_len(text, len); i < len && rc == 0;) {
        char room[8];
        size_t n = utf8_char_len(s + i, len - i);
        const char *escape = n == 0 ? "\xEF\xBF\xBD" : n == 1 ? json_escape_of(s[i], room) : NULL;
        if (escape) {
            rc = buf_append(b, text + plain, i - plain);
            if (rc == 0) {
                rc = buf_puts(b, escape);
            }
            plain = i + MAX(n, (size_t)1);
        }
        i += MAX(n, (size_t)1);
        i += json_plain_len(text + i, len - i);
    }
    if (rc == 0) {
        rc = buf_append(b, text + plain, len - plain);
    }
    if (rc < 0 && b->data) { /* a failed append adds nothing */
        b->len = before;
        b->data[before] = '\0';
    }
    return rc;
}

void buf_json_string(struct buf *b, const char *text, size_t len)
{
    buf_putc(b, '"');
    buf_json_escape(b, text, len);
    buf_putc(b, '"');
}

void buf_json_puts(struct buf *b, const char *text)
{
    buf_json_string(b, text, strlen(text));
}

int buf_read_file(struct buf *ret, const char *path, struct err *e)
{
    FILE *in = fopen(path, "re");

    if (!in) {
        return err_set(e, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "'%s' cannot be opened: %s",
                       path, strerror(errno));
    }
    char chunk[4096];
    size_t n;
    int rc = 0;
    while (rc == 0 && (n = fread(chunk, 1, sizeof(chunk), in)) > 0) {
        rc = buf_append(ret, chunk, n);
    }
    if (rc == ERR_FULL) {
        rc = err_set(e, ERR_INVALID, "'%s' is larger than %zu bytes", path, ret->max);
    } else if (rc < 0) {
        rc = err_nomem(e, path);
    } else if (ferror(in)) {
        rc = err_set(e, ERR_IO, "'%s' cannot be read: %s", path, strerror(errno));
    }
    fclose(in);
    return rc;
}
