/* The lifetime of connections: MHD's notifications, deadlines, and the sweep that
 * closes connections past their deadline or left by their client. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/http/loop.h"

/* A new connection's record; NULL: out of memory. A connection that is not admitted is
 * shut down: MHD, which has accepted it, notices and closes it. */
static struct conn *conn_new(struct listener *listener, struct MHD_Connection *c, int fd)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct settings *settings = listener->server->settings;
    struct conn *p = calloc(1, sizeof(*p));

    if (!p) {
        return NULL;
    }
    p->fd = fd;
    if (!admission_enter(&listener->admission, &p->admitted, info ? info->client_addr : NULL, fd)) {
        shutdown(fd, SHUT_RDWR);
    }
    double seconds = settings->header_timeout;
    seconds = p->admitted.reserved && !listener->admin ? MIN(seconds, LIMIT_RESERVED_S) : seconds;
    p->due_us = clock_us() + (int64_t)(seconds * 1e6);
    return p;
}

static void conns_add(struct server *s, struct conn *p)
{
    pthread_mutex_lock(&s->conns_lock);
    p->next = s->conns;
    if (p->next) {
        p->next->prev = p;
    }
    s->conns = p;
    pthread_mutex_unlock(&s->conns_lock);
}

static void conns_remove(struct server *s, struct conn *p)
{
    pthread_mutex_lock(&s->conns_lock);
    *(p->prev ? &p->prev->next : &s->conns) = p->next;
    if (p->next) {
        p->next->prev = p->prev;
    }
    pthread_mutex_unlock(&s->conns_lock);
}

void http_on_connection(void *cls, struct MHD_Connection *c, void **context,
                        enum MHD_ConnectionNotificationCode code)
{
    struct http_loop *loop = cls;
    struct listener *listener = loop->listener;
    struct server *s = listener->server;
    struct conn *p = *context;

    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        int fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        p = *context = conn_new(listener, c, fd);
        atomic_fetch_add(&s->connections, 1);
        if (p) {
            p->loop = loop;
            p->mhd = c;
            conns_add(s, p);
        } else {
            shutdown(fd, SHUT_RDWR);
        }
        return;
    }
    atomic_fetch_sub(&s->connections, 1);
    loop->closed = true;
    if (p) {
        http_loop_unwatch(p);
        conns_remove(s, p);
        admission_leave(&listener->admission, &p->admitted);
        free(p);
        *context = NULL;
    }
}

/* Poll the connections that are not answering a request for clients that left.
 * microhttpd 0.9.75 misses this if the end arrives together with the last bytes of an
 * incomplete request: it takes a short read for "nothing more", and the edge-triggered
 * event is lost. */
static void poll_conns(const struct server *s, struct pollfd *p, nfds_t n)
{
    nfds_t i = 0;

    for (const struct conn *q = s->conns; q && i < n; q = q->next, i++) {
        bool between = q->due_us != INT64_MAX;
        p[i] = (struct pollfd){.fd = between ? q->fd : -1, .events = POLLRDHUP};
    }
    if (poll(p, i, 0) < 0) {
        memset(p, 0, n * sizeof(*p));
    }
}

/* Update retry_after_s: the time until the requests that wait now will have ended, at
 * the smoothed rate at which requests end. */
static void estimate_retry(struct server *s, double seconds)
{
    enum { LONGEST_S = 120 };
    const struct engine *engine = atomic_load(&s->engine);
    uint64_t ended = 0;

    if (!engine) {
        return;
    }
    const struct engine_stats *stats = engine_stats(engine);
    for (int f = FINISH_STOP; f <= FINISH_ERROR; f++) {
        ended += atomic_load_explicit(&stats->finished[f], memory_order_relaxed);
    }
    double weight = MIN(seconds / 10, 1);
    s->ended_per_s += weight * ((double)(ended - s->ended) / seconds - s->ended_per_s);
    s->ended = ended;
    double wait = (double)atomic_load_explicit(&stats->waiting, memory_order_relaxed) /
                  MAX(s->ended_per_s, 1e-3);
    atomic_store(&s->retry_after_s, (int)MIN(MAX(wait + 0.5, 1), LONGEST_S));
}

/* Whether bytes have arrived since the last response ended. MHD reports a request only
 * when its line is complete; TCP_INFO tells earlier, to within a tick or two of the
 * kernel's clock. Bytes that arrive while the response ends are not recognised. */
static bool has_begun(const struct conn *p, int64_t idle_us, int64_t now)
{
    enum { TICKS_US = 50 * 1000 };
    struct tcp_info info;
    socklen_t len = sizeof(info);

    return idle_us && getsockopt(p->fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0 &&
           now - info.tcpi_last_data_recv * (int64_t)1000 > idle_us + TICKS_US;
}

/* Start header-timeout with the first byte of a request's head, as far as that can be
 * detected. */
static void start_head(struct conn *p, double header_timeout, int64_t now)
{
    int64_t due_us = p->due_us, idle_us = p->idle_us,
            until_us = now + (int64_t)(header_timeout * 1e6);

    if (due_us > until_us && due_us != INT64_MAX && has_begun(p, idle_us, now)) {
        /* Not if its MHD thread has changed it meanwhile. */
        atomic_compare_exchange_strong(&p->due_us, &due_us, until_us);
    }
}

/* Shut down connections past their deadline; MHD notices and closes them. Under
 * conns_lock. */
static void close_due(struct server *s, int64_t now)
{
    for (struct conn *p = s->conns; p; p = p->next) {
        int64_t due_us = p->due_us;
        if (atomic_load(&p->lingers)) {
            http_loop_linger(p, now);
            continue;
        }
        start_head(p, s->settings->header_timeout, now);
        if (due_us < now && atomic_compare_exchange_strong(&p->due_us, &due_us, INT64_MAX)) {
            shutdown(p->fd, SHUT_RDWR);
        }
    }
}

/* Shut down connections whose client has left. Under conns_lock. */
static void close_left(struct server *s)
{
    nfds_t n = 0, i = 0;

    for (const struct conn *p = s->conns; p; p = p->next) {
        n++;
    }
    struct pollfd *polled = calloc(n + 1, sizeof(*polled));
    if (polled) {
        poll_conns(s, polled, n);
    }
    for (struct conn *p = s->conns; p; p = p->next, i++) {
        /* Seen in two sweeps, a second apart: so MHD has read all that the client sent
         * before it left. */
        bool left = polled && (polled[i].revents & (POLLRDHUP | POLLHUP | POLLERR));
        if (left && p->left) {
            shutdown(p->fd, SHUT_RDWR);
            p->due_us = INT64_MAX;
        }
        p->left = left;
    }
    free(polled);
}

void server_sweep(struct server *s)
{
    int64_t now = clock_us();
    bool second = now - s->swept_us >= 1000 * 1000;

    if (second) {
        estimate_retry(s, (double)(now - s->swept_us) / 1e6);
        s->swept_us = now;
        budget_sweep(&s->hub.budget, LIMIT_STALL_S * (int64_t)1000000);
    }
    pthread_mutex_lock(&s->conns_lock);
    close_due(s, now);
    if (second) {
        close_left(s);
    }
    pthread_mutex_unlock(&s->conns_lock);
}
