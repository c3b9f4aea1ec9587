/* Reading one streamed HTTP answer as it arrives: status, headers, chunked body, SSE
 * lines. No sockets here. */
#ifndef QUIRE_SERVER_BENCH_BENCH_STREAM_H
#define QUIRE_SERVER_BENCH_BENCH_STREAM_H

#include "config/base/base.h"

enum { STREAM_LINE = 2048 };

struct stream_reader {
    int state;  /* enum of bench_stream.c */
    int status; /* HTTP, 0 before it is known */
    bool chunked, close;
    int64_t left;     /* bytes of the chunk, or of the body; -1: until the end of the connection */
    bool done;        /* the answer is complete */
    int32_t n_events; /* data events with choices: tokens, one or several each */
    int32_t completion_tokens; /* from the usage event; -1: none came */
    bool failed;               /* an error event, or a status other than 200 */
    /* of an SSE line that is not complete yet, its beginning; of an error: its text */
    char line[STREAM_LINE];
    int32_t n_line;
    char protocol[256]; /* of a header or chunk line that is not complete yet */
    int32_t n_protocol;
};

void stream_reader_init(struct stream_reader *r);
/* Take in `len` bytes; the number of data events among them. A byte behind the end of
 * the answer is ERR_INVALID, as is what is not HTTP. */
int32_t stream_feed(struct stream_reader *r, const char *data, size_t len, struct err *e);
/* The connection was closed: 0 where that ends the answer, else ERR_IO. */
int stream_closed(struct stream_reader *r, struct err *e);

#endif
