/* A response body that is being sent. Its memory is accounted to the client budget; a
 * long body is freed piece by piece as the client takes it. */
#ifndef QUIRE_SERVER_HTTP_BODY_H
#define QUIRE_SERVER_HTTP_BODY_H

#include <microhttpd.h>

#include "server/access/budget.h"
#include "server/stream/segments.h"

struct body {
    struct account account;   /* memory that `segments` still holds */
    struct segments segments; /* read from by MHD, in order */
    atomic_int refs;          /* the MHD response's and the http_request's */
};

/* Takes over `g`, which must be closed; the caller holds one reference. NULL: out of
 * memory, and `g` is released. */
struct body *body_new(struct budget *budget, struct segments *g);
void body_unref(struct body *b);
/* An MHD response that sends the body. If it is long, the budget may shut down `fd`,
 * the client's socket, while the client does not read; `fd` must stay open until
 * body_leave. NULL: out of memory. */
struct MHD_Response *body_response(struct body *b, int fd);
/* The response has ended, or its socket is about to be closed: drops the caller's
 * reference. */
void body_leave(struct body *b);

#endif
