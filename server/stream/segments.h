/* A long text in parts that lie where they were made: nothing is copied to put it
 * together, and each part is freed as soon as it was read. */
#ifndef QUIRE_SERVER_STREAM_SEGMENTS_H
#define QUIRE_SERVER_STREAM_SEGMENTS_H

#include "config/base/buf.h"

struct segment {
    const char *data; /* NULL: in `literal`, from byte `at` on */
    size_t at, len;
    void *owned;  /* freed behind it; NULL: it belongs to another */
    size_t bytes; /* that freeing it gives back */
};

struct segments {
    struct segment *list; /* [n] */
    int32_t n, cap;
    /* short parts, written with the functions of buf.h: they stand behind what was
     * taken before */
    struct buf literal;
    size_t closed;   /* the literal's bytes that are in the list */
    size_t total;    /* bytes of the list's segments */
    bool failed;     /* memory ran out, or the literal overflowed */
    int32_t reading; /* segment to read next */
    size_t offset;   /* bytes of it that were read, and that were given back before its end */
    size_t given;
};

void segments_init(struct segments *s, size_t max_literal);
void segments_release(struct segments *s);
/* The buffer's bytes, which belong to the segments afterwards; the buffer is empty
 * then. */
void segments_take(struct segments *s, struct buf *from);
/* The buffer's bytes, which stay the buffer's until they are taken. */
void segments_share(struct segments *s, const struct buf *from);
/* Nothing more is added. 0, or ERR_NOMEM. */
int segments_close(struct segments *s);
/* Bytes of memory behind what was not read. */
size_t segments_held(const struct segments *s);
/* The next bytes, `max` at most; 0 at the end. What lies behind them is given back. */
size_t segments_read(struct segments *s, char *to, size_t max);

#endif
