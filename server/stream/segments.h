/* A long text as a list of segments, each in the buffer in which it was written:
 * joining them copies nothing, and each is freed as soon as it has been read. */
#ifndef QUIRE_SERVER_STREAM_SEGMENTS_H
#define QUIRE_SERVER_STREAM_SEGMENTS_H

#include "config/base/buf.h"

struct segment {
    const char *data; /* NULL: it is in `literal`, from byte `at` on */
    size_t at, len;
    void *owned;  /* freed when read; NULL: another segment or the caller owns it */
    size_t bytes; /* allocated for `owned` */
};

struct segments {
    struct segment *list; /* [n] */
    int32_t n, cap;       /* cap: segments allocated */
    /* Short text between the segments, appended with the functions of buf.h; it follows
     * what was taken before. */
    struct buf literal;
    size_t closed;   /* bytes of `literal` that are in `list` already */
    size_t total;    /* bytes of text in `list` */
    bool failed;     /* memory ran out, or `literal` overflowed */
    int32_t reading; /* the segment to read next */
    size_t offset;   /* bytes of that segment that have been read */
    size_t given;    /* bytes of its pages that were returned to the system */
};

void segments_init(struct segments *s, size_t max_literal);
void segments_release(struct segments *s);
/* Append the buffer's bytes and take over its memory; the buffer is empty
 * afterwards. */
void segments_take(struct segments *s, struct buf *from);
/* Append the buffer's bytes without taking them over: a later segments_take of the same
 * buffer must follow. */
void segments_share(struct segments *s, const struct buf *from);
/* End the text: nothing may be appended any more. 0 or ERR_NOMEM. */
int segments_close(struct segments *s);
/* Bytes of memory held for the text that has not been read. */
size_t segments_held(const struct segments *s);
/* Copy the next bytes, at most `max`, to `to` and free segments that are read to their
 * end. Returns the number of bytes; 0 at the end. */
size_t segments_read(struct segments *s, char *to, size_t max);

#endif
