/* An answer's body on its way to its client: it counts for the budget, and what is long
 * is freed as it is sent. */
#ifndef QUIRE_SERVER_HTTP_BODY_H
#define QUIRE_SERVER_HTTP_BODY_H

#include <microhttpd.h>

#include "server/access/budget.h"
#include "server/stream/segments.h"

struct body {
    struct account account;
    struct segments segments;
    atomic_int refs; /* the response's, and its maker's */
};

/* Takes over `g`, which is closed. NULL: no memory; then `g` is released. One reference
 * is the caller's. */
struct body *body_new(struct budget *budget, struct segments *g);
void body_unref(struct body *b);
/* A response that sends it; long ones may be cut off while their client does not read
 * (`fd` is its socket, open until body_leave). NULL: no memory. */
struct MHD_Response *body_response(struct body *b, int fd);
/* The socket is about to be closed, or the answer has ended. Gives back the caller's
 * reference. */
void body_leave(struct body *b);

#endif
