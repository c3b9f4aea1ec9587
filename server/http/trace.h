/* W3C trace context: a request's place in a trace that began elsewhere (header
 * `traceparent`, level 1). */
#ifndef QUIRE_SERVER_HTTP_TRACE_H
#define QUIRE_SERVER_HTTP_TRACE_H

#include "config/base/base.h"

struct trace {
    char id[33];     /* trace-id, 32 hex digits; "": the request has no trace */
    char parent[17]; /* the caller's span */
    char span[17];   /* this request's, new */
    char flags[3];   /* trace-flags, two hex digits, passed on unchanged */
};

/* Parse a traceparent header's value (or NULL). An invalid one counts as absent. */
void trace_read(struct trace *ret, const char *header);
/* The value of the response's traceparent header; "" without a trace. */
enum { TRACE_HEADER_BYTES = 56 };
void trace_header(const struct trace *t, char ret[TRACE_HEADER_BYTES]);

#endif
