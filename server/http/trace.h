/* W3C trace context: a request's place in a trace that began elsewhere (header
 * `traceparent`, level 1). */
#ifndef QUIRE_SERVER_HTTP_TRACE_H
#define QUIRE_SERVER_HTTP_TRACE_H

#include "config/base/base.h"

struct trace {
    char id[33];     /* of the trace, 32 hex digits; "": the request is in none */
    char parent[17]; /* the caller's span */
    char span[17];   /* this request's, new */
    char flags[3];
};

/* Take a traceparent header's value (or NULL). What is not valid is as if it were not
 * there. */
void trace_read(struct trace *ret, const char *header);
/* The header to answer with, "" without a trace. */
enum { TRACE_HEADER_BYTES = 56 };
void trace_header(const struct trace *t, char ret[TRACE_HEADER_BYTES]);

#endif
