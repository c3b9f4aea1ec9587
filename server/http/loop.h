/* The threads that run libmicrohttpd: each has a daemon of its own, which accepts from
 * the listener's socket and polls its connections in an epoll set.
 *
 * The thread, not the library, waits for events. So it can tell the one case in which
 * the library neither reads on nor answers: a line of a chunked body, with its
 * extension, that does not fit in the connection's memory. Such a connection is
 * answered here and closed. */
#ifndef QUIRE_SERVER_HTTP_LOOP_H
#define QUIRE_SERVER_HTTP_LOOP_H

#include "server/http/http.h"

struct http_loop {
    struct listener *listener;
    struct MHD_Daemon *daemon; /* NULL: not started */
    pthread_t thread;
    bool started;         /* the thread runs */
    atomic_bool ending;   /* the thread shall return */
    int epoll_fd;         /* the daemon's */
    int wake_fd;          /* eventfd: written after MHD_resume_connection and `ending`; -1: none */
    bool closed;          /* a connection was closed in the last pass; of the thread alone */
    struct conn *chunked; /* connections that send a chunked body; of the thread alone */
};

/* Start n daemons and their threads, with `connections` connections in all. The socket
 * l->fd is duplicated for each. After an error http_loops_stop is due. */
int http_loops_start(struct http_loops *l, struct listener *listener, int n, int64_t connections,
                     bool tls, struct err *e);
/* End the threads, close the connections and the daemons. */
void http_loops_stop(struct http_loops *l);

/* A chunked body begins on p; it ends, or the connection does. From MHD's callbacks. */
void http_loop_watch(struct conn *p);
void http_loop_unwatch(struct conn *p);
/* Called by the sweep: read and drop what still comes for a connection that was
 * answered by its loop, until the client closes its side or p->due_us. */
void http_loop_linger(struct conn *p, int64_t now);

#endif
