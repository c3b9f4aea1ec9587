/* An incremental parser of one streamed HTTP response: status, headers, chunked body,
 * SSE lines. No sockets. */
#ifndef QUIRE_SERVER_BENCH_BENCH_STREAM_H
#define QUIRE_SERVER_BENCH_BENCH_STREAM_H

#include "config/base/base.h"

enum { STREAM_LINE = 2048 };

struct stream_reader {
    int state;                 /* enum of bench_stream.c */
    int status;                /* HTTP, 0 before it is known */
    bool chunked, close;       /* Transfer-Encoding: chunked; Connection: close */
    int64_t left;              /* bytes left of chunk or body; -1: the connection's end ends it */
    bool done;                 /* the answer is complete */
    int32_t n_events;          /* data events with choices, each with one or more tokens */
    int32_t completion_tokens; /* from the usage event; -1: none came */
    bool failed;               /* an error event came, or a status other than 200 */
    /* The beginning of an incomplete SSE line; after an error, its text. */
    char line[STREAM_LINE];
    int32_t n_line;
    char protocol[256]; /* the beginning of an incomplete header or chunk line */
    int32_t n_protocol;
};

void stream_reader_init(struct stream_reader *r);
/* Parse `len` bytes; returns the number of data events in them. Bytes after the end of
 * the answer, and anything that is not HTTP, are ERR_INVALID. */
int32_t stream_feed(struct stream_reader *r, const char *data, size_t len, struct err *e);
/* The connection was closed: 0 if that ends the answer, else ERR_IO. */
int stream_closed(struct stream_reader *r, struct err *e);

#endif
