/* A growable byte buffer; each has a maximum size. */
#ifndef QUIRE_CONFIG_BASE_BUF_H
#define QUIRE_CONFIG_BASE_BUF_H

#include "config/base/base.h"

struct buf {
    char *data;     /* NUL-terminated whenever it is not NULL */
    size_t len;     /* bytes before the NUL */
    size_t cap;     /* bytes allocated */
    size_t max;     /* len never exceeds this */
    bool failed;    /* an append did not fit or memory ran out; sticky until buf_clear */
    bool no_memory; /* memory ran out: with `failed` */
};

/* Empty, no memory yet. `max_bytes` > 0. */
void buf_init(struct buf *b, size_t max_bytes);
/* Free the memory; the buffer is as after buf_init. */
void buf_release(struct buf *b);
/* Length 0, memory kept, `failed` reset. */
void buf_clear(struct buf *b);
/* Appends return 0, ERR_FULL (over max) or ERR_NOMEM; a failed append adds nothing and
 * sets `failed`. */
int buf_append(struct buf *b, const void *data, size_t len);
int buf_puts(struct buf *b, const char *text);
int buf_putc(struct buf *b, char c);
int buf_printf(struct buf *b, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Append `len` bytes as the inside of a JSON string (quotes not included): control
 * characters, quote and backslash escaped, invalid UTF-8 replaced by U+FFFD. */
int buf_json_escape(struct buf *b, const char *text, size_t len);
/* The same as a whole string, with its quotes. */
void buf_json_string(struct buf *b, const char *text, size_t len);
void buf_json_puts(struct buf *b, const char *text);
/* Allocate space for `len` more bytes; the data does not move until they are used. */
int buf_reserve(struct buf *b, size_t len);
/* Drop the first `len` bytes. */
void buf_consume(struct buf *b, size_t len);
/* Append a file's bytes. ERR_NOT_FOUND, ERR_IO, ERR_INVALID (larger than ret->max) or
 * ERR_NOMEM. */
int buf_read_file(struct buf *ret, const char *path, struct err *e);

#endif
