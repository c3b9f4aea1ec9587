/* See comm_wait.h. No wake-up is lost: a counter is raised before `sleeping` is read,
 * and a sleeper is counted in `sleeping` before it reads the counter again. */
#include "kernels/comm/comm_wait.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SPIN_ROUNDS = 2000,  /* looks at a counter before sleeping */
    YIELD_EVERY = 500,   /* rounds between offers of the core to other threads */
    SOCKET_ROUNDS = 200, /* tries of a socket before polling it */
    NAP_MS = 100,        /* longest sleep on a counter before timeout and failure are checked */
    SOCKET_NAP_MS = 50,  /* the same on a socket */
    MOST_WAITERS = 1 << 20,
};

bool failure_set(struct failure *f, const char *why)
{
    int none = 0;

    if (!atomic_compare_exchange_strong(&f->state, &none, 1)) {
        return false;
    }
    snprintf(f->why, FAILURE_BYTES, "%s", why);
    atomic_store(&f->state, 2);
    return true;
}

int failure_check(struct failure *f, struct err *e)
{
    if (atomic_load_explicit(&f->state, memory_order_relaxed) == 0) {
        return 0;
    }
    while (atomic_load(&f->state) == 1) {
        sched_yield();
    }
    return err_set(e, ERR_DEVICE, "%.*s", FAILURE_BYTES, f->why);
}

int failure_timeout(struct failure *f, int32_t rank, int64_t timeout_us, struct err *e)
{
    char why[80];

    snprintf(why, sizeof(why), "rank %d did not answer for %.0f s", rank,
             (double)timeout_us * 1e-6);
    failure_set(f, why);
    return failure_check(f, e);
}

/* ---- shared memory ---- */

void counter_wake(struct counter *c)
{
    syscall(SYS_futex, &c->n, FUTEX_WAKE, MOST_WAITERS, NULL, NULL, 0);
}

void counter_set(struct sync_group *g, struct counter *c, unsigned n)
{
    atomic_store(&c->n, n);
    if (atomic_load(&g->sleeping) > 0) {
        counter_wake(c);
    }
}

static void relax(int round)
{
    if (round % YIELD_EVERY == YIELD_EVERY - 1) {
        sched_yield();
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Sleep until the counter differs from `seen`, the group fails, or NAP_MS have
 * passed. */
static void nap(struct sync_group *g, struct counter *c, unsigned seen)
{
    struct timespec t = {.tv_nsec = NAP_MS * 1000000L};

    atomic_fetch_add(&g->sleeping, 1);
    if (atomic_load(&c->n) == seen && !atomic_load(&g->failure.state)) {
        syscall(SYS_futex, &c->n, FUTEX_WAIT, seen, &t, NULL, 0);
    }
    atomic_fetch_sub(&g->sleeping, 1);
}

int counter_await(struct sync_group *g, struct counter *c, unsigned least, int32_t rank,
                  int64_t timeout_us, struct err *e)
{
    int64_t start_us = 0;

    for (int round = 0;; round++) {
        unsigned now = atomic_load_explicit(&c->n, memory_order_acquire);
        if ((int)(now - least) >= 0) {
            return 0;
        }
        int rc = failure_check(&g->failure, e);
        if (rc < 0) {
            return rc;
        }
        if (round < SPIN_ROUNDS) {
            relax(round);
            continue;
        }
        int64_t now_us = clock_us();
        start_us = start_us ? start_us : now_us;
        if (now_us - start_us > timeout_us) {
            return failure_timeout(&g->failure, rank, timeout_us, e);
        }
        nap(g, c, now);
    }
}

/* ---- sockets ---- */

static int connection_closed(struct failure *f, int32_t rank, struct err *e)
{
    char why[80];

    snprintf(why, sizeof(why), "rank %d closed its connection", rank);
    failure_set(f, why);
    return failure_check(f, e);
}

/* Wait until the socket is ready or SOCKET_NAP_MS have passed. *start_us: when waiting
 * began, set where 0. 0, or ERR_DEVICE: the wait has failed or has lasted too long. */
static int await_socket(struct failure *f, int fd, int32_t rank, bool out, int64_t *start_us,
                        int64_t timeout_us, struct err *e)
{
    int64_t now_us = clock_us();

    *start_us = *start_us ? *start_us : now_us;
    int rc = failure_check(f, e);
    if (rc < 0) {
        return rc;
    }
    if (now_us - *start_us > timeout_us) {
        return failure_timeout(f, rank, timeout_us, e);
    }
    struct pollfd wait = {.fd = fd, .events = out ? POLLOUT : POLLIN};
    poll(&wait, 1, SOCKET_NAP_MS);
    return 0;
}

int socket_move(struct failure *f, int fd, int32_t rank, void *data, size_t n_bytes, bool out,
                int64_t timeout_us, struct err *e)
{
    int64_t start_us = 0;
    int idle = 0, rc = failure_check(f, e);

    for (size_t at = 0; at < n_bytes && rc == 0;) {
        ssize_t n = out ? send(fd, (char *)data + at, n_bytes - at, MSG_DONTWAIT | MSG_NOSIGNAL)
                        : recv(fd, (char *)data + at, n_bytes - at, MSG_DONTWAIT);
        if (n > 0) {
            at += (size_t)n;
            start_us = idle = 0;
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            rc = connection_closed(f, rank, e);
        } else if (idle++ >= SOCKET_ROUNDS) {
            rc = await_socket(f, fd, rank, out, &start_us, timeout_us, e);
        }
    }
    return rc;
}

int socket_check(struct failure *f, int fd, int32_t rank, struct err *e)
{
    char byte;
    int rc = failure_check(f, e);

    if (rc == 0 && fd >= 0 && recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
        return connection_closed(f, rank, e);
    }
    return rc;
}

void sockets_abort(struct failure *f, const int *fd, int32_t n, const char *why)
{
    failure_set(f, why);
    for (int32_t i = 0; i < n; i++) {
        if (fd[i] >= 0) {
            shutdown(fd[i], SHUT_RDWR); /* the others see that it ended */
        }
    }
}

void sockets_close(const int *fd, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (fd[i] >= 0) {
            close(fd[i]);
        }
    }
}
