/* Connections between requests: those that bring none in time, and those whose client left unseen, are closed. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/http.h"

void http_on_connection(void *cls, struct MHD_Connection *c, void **context, enum MHD_ConnectionNotificationCode code)
{
    struct server *s = cls;
    struct peer *p = *context;

    pthread_mutex_lock(&s->peers_lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        p = calloc(1, sizeof(*p));
        if (p) {
            p->fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
            p->due_us = clock_us() + LIMIT_REQUEST_S * (int64_t)1000000;
            p->next = s->peers;
            if (p->next) {
                p->next->prev = p;
            }
            s->peers = p;
        }
        *context = p;
        atomic_fetch_add(&s->connections, 1);
    } else {
        atomic_fetch_sub(&s->connections, 1);
        if (p) {
            *(p->prev ? &p->prev->next : &s->peers) = p->next;
            if (p->next) {
                p->next->prev = p->prev;
            }
            free(p);
            *context = NULL;
        }
    }
    pthread_mutex_unlock(&s->peers_lock);
}

/* Which of the connections between requests have a client that left: microhttpd 0.9.75 misses it where the last bytes of a
 * request cut short and the end came together (it takes a short read for "nothing more", and the edge is gone). */
static void poll_peers(const struct server *s, struct pollfd *p, nfds_t n)
{
    nfds_t i = 0;

    for (const struct peer *q = s->peers; q && i < n; q = q->next, i++) {
        bool between = q->due_us != INT64_MAX;
        p[i] = (struct pollfd){.fd = between ? q->fd : -1, .events = POLLRDHUP};
    }
    if (poll(p, i, 0) < 0) {
        memset(p, 0, n * sizeof(*p));
    }
}

/* How long until the requests waiting now have ended, at the rate of the last seconds. */
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
    double share = MIN(seconds / 10, 1);
    s->ended_per_s += share * ((double)(ended - s->ended) / seconds - s->ended_per_s);
    s->ended = ended;
    double wait = (double)atomic_load_explicit(&stats->waiting, memory_order_relaxed) / MAX(s->ended_per_s, 1e-3);
    atomic_store(&s->retry_after_s, (int)MIN(MAX(wait + 0.5, 1), LONGEST_S));
}

void server_sweep(struct server *s)
{
    int64_t now = clock_us();
    nfds_t n = 0, i = 0;

    if (now - s->swept_us < 1000 * 1000) {
        return;
    }
    estimate_retry(s, (double)(now - s->swept_us) / 1e6);
    s->swept_us = now;
    atomic_fetch_add(&s->hub.n_slow, (uint64_t)budget_sweep(&s->hub.budget, LIMIT_STALL_S * (int64_t)1000000));
    pthread_mutex_lock(&s->peers_lock);
    for (const struct peer *p = s->peers; p; p = p->next) {
        n++;
    }
    struct pollfd *polled = calloc(n + 1, sizeof(*polled));
    if (polled) {
        poll_peers(s, polled, n);
    }
    for (struct peer *p = s->peers; p; p = p->next, i++) {
        /* Seen twice, a second apart: what it sent before it left has been looked at. */
        bool left = polled && (polled[i].revents & (POLLRDHUP | POLLHUP | POLLERR));
        if (p->due_us < now || (left && p->left)) {
            shutdown(p->fd, SHUT_RDWR); /* MHD sees the end and closes it */
            p->due_us = INT64_MAX;
        }
        p->left = left;
    }
    pthread_mutex_unlock(&s->peers_lock);
    free(polled);
}
