/* Daemons of libmicrohttpd (MHD), the threads that run them, and the refusal of a line
 * in a chunked body that does not fit in the connection's memory (see loop.h).
 *
 * MHD 0.9 and 1.0 keep such a connection as ready without reading on. The thread looks
 * before and after each pass whether bytes wait in the socket: if they are not fewer
 * though MHD has had its turn, and no part of the body has come, for several passes,
 * then MHD will never take them.
 */
#include "server/http/loop.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <gnutls/gnutls.h>

#include "server/http/tls.h"

enum {
    PASSES = 8,   /* without progress, until a connection is refused */
    LINGER_S = 2, /* for the client to read the answer and to close */
};

/* ---- a line that does not fit ---- */

void http_loop_watch(struct conn *p)
{
    struct http_loop *l = p->loop;

    p->passes = 0;
    p->watched = true;
    p->prev_chunked = NULL;
    p->next_chunked = l->chunked;
    if (p->next_chunked) {
        p->next_chunked->prev_chunked = p;
    }
    l->chunked = p;
}

void http_loop_unwatch(struct conn *p)
{
    if (!p->watched) {
        return;
    }
    *(p->prev_chunked ? &p->prev_chunked->next_chunked : &p->loop->chunked) = p->next_chunked;
    if (p->next_chunked) {
        p->next_chunked->prev_chunked = p->prev_chunked;
    }
    p->watched = false;
}

static int unread_bytes(int fd)
{
    int n = 0;

    return ioctl(fd, FIONREAD, &n) == 0 ? n : 0;
}

/* Drop what has come. Returns whether the client has closed its side. */
static bool drain(int fd)
{
    enum { READS = 64 }; /* a turn's */
    char scratch[16 * 1024];
    ssize_t n = 1;

    for (int i = 0; i < READS && n > 0; i++) {
        n = recv(fd, scratch, sizeof(scratch), MSG_DONTWAIT);
    }
    return n == 0;
}

/* Write to a connection that MHD does not use while it is suspended. An answer that
 * does not fit in the socket's buffer is cut: nothing was sent before it. */
static void write_apart(const struct conn *p, const char *data, size_t len)
{
    const union MHD_ConnectionInfo *tls =
        MHD_get_connection_info(p->mhd, MHD_CONNECTION_INFO_GNUTLS_SESSION);

    if (tls && tls->tls_session) {
        gnutls_record_send(tls->tls_session, data, len);
        gnutls_bye(tls->tls_session, GNUTLS_SHUT_WR);
    } else {
        ssize_t sent = send(p->fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL);
        (void)sent;
    }
}

/* The connection is taken from MHD until the client has read the answer: closing it
 * with bytes unread would reset it, and the answer could be lost. */
static void refuse(struct conn *p)
{
    struct buf answer;

    http_loop_unwatch(p);
    MHD_suspend_connection(p->mhd);
    drain(p->fd);
    buf_init(&answer, 4096);
    http_refuse_chunk(p->request, &answer);
    write_apart(p, answer.data, answer.len);
    buf_release(&answer);
    shutdown(p->fd, SHUT_WR);
    p->due_us = clock_us() + LINGER_S * (int64_t)1000000;
    atomic_store(&p->lingers, true);
}

void http_loop_linger(struct conn *p, int64_t now)
{
    if (drain(p->fd) || now >= p->due_us) {
        atomic_store(&p->lingers, false);
        p->due_us = INT64_MAX;
        shutdown(p->fd, SHUT_RDWR); /* MHD notices and closes it */
        MHD_resume_connection(p->mhd);
        eventfd_write(p->loop->wake_fd, 1);
    }
}

static void before_pass(struct http_loop *l)
{
    for (struct conn *p = l->chunked; p; p = p->next_chunked) {
        p->unread = unread_bytes(p->fd);
    }
}

static void after_pass(struct http_loop *l)
{
    struct conn *next;

    for (struct conn *p = l->chunked; p; p = next) {
        next = p->next_chunked;
        bool stands = p->unread > 0 && unread_bytes(p->fd) >= p->unread;
        p->passes = stands && !p->heard ? p->passes + 1 : 0;
        p->heard = false;
        if (p->passes >= PASSES) {
            refuse(p);
        }
    }
}

/* ---- threads ---- */

/* How long MHD can wait for an event, in milliseconds; -1: for any time. */
static int wait_ms(struct http_loop *l)
{
    MHD_UNSIGNED_LONG_LONG ms = 0;

    return MHD_get_timeout(l->daemon, &ms) == MHD_YES ? (int)MIN(ms, INT_MAX) : -1;
}

static void *loop_main(void *arg)
{
    struct http_loop *l = arg;
    struct pollfd p[2] = {{.fd = l->epoll_fd, .events = POLLIN},
                          {.fd = l->wake_fd, .events = POLLIN}};

    while (!atomic_load(&l->ending)) {
        eventfd_t wakes;
        /* At its limit MHD does not wait for new connections; it begins again in the
         * pass after one has closed. */
        int wait = l->closed ? 0 : wait_ms(l);
        l->closed = false;
        if (poll(p, 2, wait) > 0 && p[1].revents) {
            eventfd_read(l->wake_fd, &wakes);
        }
        before_pass(l);
        MHD_run_wait(l->daemon, 0);
        after_pass(l);
    }
    return NULL;
}

static void on_mhd_message(void *cls, const char *format, va_list args)
{
    char text[512];

    (void)cls;
    vsnprintf(text, sizeof(text), format, args);
    text[strcspn(text, "\n")] = '\0';
    log_event(LOG_DEBUG, "microhttpd", LOG_STR("message", text));
}

/* libmicrohttpd has met a state that it considers impossible, such as a failing
 * epoll_ctl. Its data cannot be trusted any more, so the process logs the reason and
 * exits at once, to be restarted by its supervisor. */
_Noreturn static void on_mhd_panic(void *cls, const char *file, unsigned line, const char *reason)
{
    (void)cls;
    log_event(LOG_ERROR, "microhttpd gave up", LOG_STR("reason", reason ? reason : "unknown"),
              LOG_STR("file", file ? file : ""), LOG_I64("line", line));
    _exit(1);
}

/* Start a daemon with a limit of `connections`; it owns `fd`, after an error too. */
static int start_daemon(struct http_loop *l, int fd, int64_t connections, bool tls, struct err *e)
{
    unsigned flags =
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | (tls ? MHD_USE_TLS : 0);
    struct MHD_OptionItem more[] = {
#if MHD_VERSION >= 0x01000000
        {MHD_OPTION_CLIENT_DISCIPLINE_LVL, 1, NULL},
#endif
        {tls ? MHD_OPTION_HTTPS_CERT_CALLBACK : MHD_OPTION_END, 0, (void *)(intptr_t)tls_retrieve},
        {MHD_OPTION_END, 0, NULL},
    };

    MHD_set_panic_func(on_mhd_panic, NULL);
    l->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, http_on_request, l, MHD_OPTION_EXTERNAL_LOGGER, on_mhd_message, NULL,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)connections,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)LIMIT_CONNECTION_BYTES,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)LIMIT_IDLE_S, MHD_OPTION_URI_LOG_CALLBACK,
        http_on_target, l, MHD_OPTION_NOTIFY_COMPLETED, http_on_completed, l,
        MHD_OPTION_NOTIFY_CONNECTION, http_on_connection, l, MHD_OPTION_ARRAY, more,
        MHD_OPTION_END);
    if (!l->daemon) {
        close(fd);
        return err_set(e, ERR_IO, "libmicrohttpd did not start%s",
                       tls ? ": is the certificate right?" : "");
    }
    l->epoll_fd = MHD_get_daemon_info(l->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    return 0;
}

static int loop_start(struct http_loop *l, struct listener *listener, int64_t connections, bool tls,
                      struct err *e)
{
    *l = (struct http_loop){.listener = listener, .wake_fd = -1};
    int fd = fcntl(listener->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) {
        return err_set(e, ERR_IO, "the listening socket: %s", strerror(errno));
    }
    int rc = start_daemon(l, fd, connections, tls, e);
    if (rc < 0) {
        return rc;
    }
    l->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->wake_fd < 0) {
        return err_set(e, ERR_IO, "eventfd: %s", strerror(errno));
    }
    if (pthread_create(&l->thread, NULL, loop_main, l) != 0) {
        return err_set(e, ERR_IO, "a thread of the HTTP server did not start");
    }
    l->started = true;
    pthread_setname_np(l->thread, "quire-http");
    return 0;
}

int http_loops_start(struct http_loops *l, struct listener *listener, int n, int64_t connections,
                     bool tls, struct err *e)
{
    l->loop = calloc((size_t)n, sizeof(*l->loop));
    if (!l->loop) {
        return err_nomem(e, "the HTTP server");
    }
    for (int rc = 0; l->n < n; l->n++) {
        int64_t share = connections / n + (l->n < connections % n);
        rc = loop_start(&l->loop[l->n], listener, share, tls, e);
        if (rc < 0) {
            l->n++;
            return rc;
        }
    }
    return 0;
}

/* MHD stops no daemon while connections are suspended. */
static void resume_lingering(struct server *s)
{
    pthread_mutex_lock(&s->conns_lock);
    for (struct conn *p = s->conns; p; p = p->next) {
        if (atomic_exchange(&p->lingers, false)) {
            MHD_resume_connection(p->mhd);
        }
    }
    pthread_mutex_unlock(&s->conns_lock);
}

void http_loops_stop(struct http_loops *l)
{
    for (int i = 0; i < l->n; i++) {
        struct http_loop *p = &l->loop[i];
        if (p->started) {
            atomic_store(&p->ending, true);
            eventfd_write(p->wake_fd, 1);
        }
    }
    for (int i = 0; i < l->n; i++) {
        struct http_loop *p = &l->loop[i];
        if (p->started) {
            pthread_join(p->thread, NULL);
        }
        if (p->daemon) {
            resume_lingering(p->listener->server);
            MHD_stop_daemon(p->daemon); /* closes its connections and its listening socket */
        }
        if (p->wake_fd >= 0) {
            close(p->wake_fd);
        }
    }
    free(l->loop);
    *l = (struct http_loops){0};
}
