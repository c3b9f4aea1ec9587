/* Connections between requests: those that bring none in time, and those whose client
 * left unseen, are closed. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/http/http.h"

/* It is closed where its address has too many: the library, which has taken it, sees
 * its end. */
static struct conn *peer_new(struct door *door, struct MHD_Connection *c, int fd)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct settings *settings = door->server->settings;
    struct conn *p = calloc(1, sizeof(*p));

    if (!p) {
        return NULL;
    }
    p->fd = fd;
    if (!admission_enter(&door->admission, &p->admitted, info ? info->client_addr : NULL, fd)) {
        shutdown(fd, SHUT_RDWR);
    }
    double seconds = settings->header_timeout;
    seconds = p->admitted.reserved && !door->admin ? MIN(seconds, LIMIT_RESERVED_S) : seconds;
    p->due_us = clock_us() + (int64_t)(seconds * 1e6);
    return p;
}

static void peers_add(struct server *s, struct conn *p)
{
    pthread_mutex_lock(&s->peers_lock);
    p->next = s->peers;
    if (p->next) {
        p->next->prev = p;
    }
    s->peers = p;
    pthread_mutex_unlock(&s->peers_lock);
}

static void peers_remove(struct server *s, struct conn *p)
{
    pthread_mutex_lock(&s->peers_lock);
    *(p->prev ? &p->prev->next : &s->peers) = p->next;
    if (p->next) {
        p->next->prev = p->prev;
    }
    pthread_mutex_unlock(&s->peers_lock);
}

void http_on_connection(void *cls, struct MHD_Connection *c, void **context,
                        enum MHD_ConnectionNotificationCode code)
{
    struct door *door = cls;
    struct server *s = door->server;
    struct conn *p = *context;

    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        int fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        p = *context = peer_new(door, c, fd);
        atomic_fetch_add(&s->connections, 1);
        if (p) {
            peers_add(s, p);
        } else {
            shutdown(fd, SHUT_RDWR);
        }
        return;
    }
    atomic_fetch_sub(&s->connections, 1);
    if (p) {
        peers_remove(s, p);
        admission_leave(&door->admission, &p->admitted);
        free(p);
        *context = NULL;
    }
}

/* Which of the connections between requests have a client that left: microhttpd 0.9.75
 * misses it where the last bytes of a request cut short and the end came together (it
 * takes a short read for "nothing more", and the edge is gone). */
static void poll_peers(const struct server *s, struct pollfd *p, nfds_t n)
{
    nfds_t i = 0;

    for (const struct conn *q = s->peers; q && i < n; q = q->next, i++) {
        bool between = q->due_us != INT64_MAX;
        p[i] = (struct pollfd){.fd = between ? q->fd : -1, .events = POLLRDHUP};
    }
    if (poll(p, i, 0) < 0) {
        memset(p, 0, n * sizeof(*p));
    }
}

/* How long until the requests waiting now have ended, at the rate of the last
 * seconds. */
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
    double wait = (double)atomic_load_explicit(&stats->waiting, memory_order_relaxed) /
                  MAX(s->ended_per_s, 1e-3);
    atomic_store(&s->retry_after_s, (int)MIN(MAX(wait + 0.5, 1), LONGEST_S));
}

/* Whether bytes have come since its last answer ended. The library tells of a request
 * once its line is whole; the kernel tells before (of TCP, to a tick or two of its
 * clock: what comes at the end of the answer is taken for a part of its request). */
static bool has_begun(const struct conn *p, int64_t idle_us, int64_t now)
{
    enum { TICKS_US = 50 * 1000 };
    struct tcp_info info;
    socklen_t len = sizeof(info);

    return idle_us && getsockopt(p->fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0 &&
           now - info.tcpi_last_data_recv * (int64_t)1000 > idle_us + TICKS_US;
}

/* A request's head has header-timeout from its first byte on, as far as that is
 * known. */
static void start_head(struct conn *p, double header_timeout, int64_t now)
{
    int64_t due_us = p->due_us, idle_us = p->idle_us,
            until_us = now + (int64_t)(header_timeout * 1e6);

    if (due_us > until_us && due_us != INT64_MAX && has_begun(p, idle_us, now)) {
        /* Unless its thread has set another one meanwhile. */
        atomic_compare_exchange_strong(&p->due_us, &due_us, until_us);
    }
}

/* Under peers_lock. The library sees the end of what is shut down, and closes it. */
static void close_due(struct server *s, int64_t now)
{
    for (struct conn *p = s->peers; p; p = p->next) {
        int64_t due_us = p->due_us;
        start_head(p, s->settings->header_timeout, now);
        if (due_us < now && atomic_compare_exchange_strong(&p->due_us, &due_us, INT64_MAX)) {
            shutdown(p->fd, SHUT_RDWR);
        }
    }
}

/* Under peers_lock. */
static void close_left(struct server *s)
{
    nfds_t n = 0, i = 0;

    for (const struct conn *p = s->peers; p; p = p->next) {
        n++;
    }
    struct pollfd *polled = calloc(n + 1, sizeof(*polled));
    if (polled) {
        poll_peers(s, polled, n);
    }
    for (struct conn *p = s->peers; p; p = p->next, i++) {
        /* Seen twice, a second apart: what it sent before it left has been looked
         * at. */
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
        atomic_fetch_add(&s->hub.n_slow,
                         (uint64_t)budget_sweep(&s->hub.budget, LIMIT_STALL_S * (int64_t)1000000));
    }
    pthread_mutex_lock(&s->peers_lock);
    close_due(s, now);
    if (second) {
        close_left(s);
    }
    pthread_mutex_unlock(&s->peers_lock);
}
