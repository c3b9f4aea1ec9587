/* Workers: threads that run the handlers of requests with long bodies.
 *
 * Such a body may take a second to be parsed and encoded, and a thread of MHD reads and
 * answers many connections. So it hands the request over and suspends its connection; a
 * worker runs the handler and resumes it, whereupon the same thread of MHD sends the
 * reply.
 */
#ifndef QUIRE_SERVER_HTTP_WORKERS_H
#define QUIRE_SERVER_HTTP_WORKERS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "config/base/base.h"

enum { WORKERS_MAX = 16 };

struct http_request;

struct workers {
    pthread_mutex_t lock;
    pthread_cond_t wake;               /* a request was queued, or `stopping` was set */
    struct http_request *first, *last; /* to be handled, linked by next_long; under lock */
    bool stopping;                     /* under lock */
    atomic_bool refusing;              /* see workers_refuse */
    pthread_t thread[WORKERS_MAX];
    int n;                /* threads started */
    _Atomic int64_t busy; /* requests taken whose replies are not queued yet */
};

int workers_open(struct workers *w, int n, struct err *e);
/* Handle what is queued, and join the threads; nothing is taken any more. */
void workers_close(struct workers *w);
/* The server waits no longer: whatever no worker has begun is answered with 503. */
void workers_refuse(struct workers *w);
/* From MHD's callback of x->connection, which is suspended. False: the caller is to
 * handle x itself. */
bool workers_take(struct workers *w, struct http_request *x);
/* The reply of a request that was taken is queued. */
void workers_done(struct workers *w);

#endif
