/* A library to preload into a server: it makes every n-th call of some functions fail,
 * without doing what the call would have done. FAULTS names them: "accept=7 recv=11";
 * with FAULTS_FILE calls fail only while that file exists. FAULTS_CLOCK: the wall clock
 * is wrong by this many seconds, as if it were set while the process runs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static int is_trouble(void)
{
    struct stat s;
    const char *file = getenv("FAULTS_FILE");

    return !file || stat(file, &s) == 0;
}

/* Whether this call fails. `count`: of the calls of this function. */
static int fails(const char *name, atomic_ulong *count)
{
    const char *list = getenv("FAULTS");
    size_t len = strlen(name);

    for (; list && *list; list += strcspn(list, " "), list += strspn(list, " ")) {
        if (strncmp(list, name, len) == 0 && list[len] == '=') {
            unsigned long every = strtoul(list + len + 1, NULL, 10);
            return every && is_trouble() && atomic_fetch_add(count, 1) % every == every - 1;
        }
    }
    return 0;
}

#define FAULT(result, failure, error, name, option, parameters, arguments) \
    FAULT_WHERE(1, result, failure, error, name, option, parameters, arguments)
#define FAULT_WHERE(where, result, failure, error, name, option, parameters, arguments) \
    result name parameters                                                              \
    {                                                                                   \
        static result(*real) parameters;                                                \
        static atomic_ulong count;                                                      \
        if ((where) && fails(option, &count)) {                                         \
            errno = error;                                                              \
            return failure;                                                             \
        }                                                                               \
        if (!real)                                                                      \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                                  \
        return real arguments;                                                          \
    }

FAULT(int, -1, EMFILE, accept4, "accept", (int fd, struct sockaddr *a, socklen_t *n, int flags),
      (fd, a, n, flags))
FAULT(ssize_t, -1, ECONNRESET, recv, "recv", (int fd, void *to, size_t n, int flags),
      (fd, to, n, flags))
FAULT(ssize_t, -1, EPIPE, send, "send", (int fd, const void *from, size_t n, int flags),
      (fd, from, n, flags))
FAULT(ssize_t, -1, EPIPE, sendmsg, "send", (int fd, const struct msghdr *m, int flags),
      (fd, m, flags))
FAULT(int, -1, EINTR, epoll_wait, "epoll", (int fd, struct epoll_event *e, int n, int ms),
      (fd, e, n, ms))
FAULT(ssize_t, -1, EIO, read, "read", (int fd, void *to, size_t n), (fd, to, n))
FAULT(void *, MAP_FAILED, ENODEV, mmap, "mmap", (void *at, size_t n, int p, int f, int fd, off_t o),
      (at, n, p, f, fd, o))

static const char *epoll_option(int op)
{
    return op == EPOLL_CTL_DEL ? "epoll_del" : "epoll_ctl";
}
FAULT_WHERE(op != EPOLL_CTL_MOD, int, -1, ENOSPC, epoll_ctl, epoll_option(op),
            (int fd, int op, int of, struct epoll_event *e), (fd, op, of, e))

/* ---- the wall clock ---- */

static time_t clock_shift(void)
{
    const char *shift = getenv("FAULTS_CLOCK");

    return shift && is_trouble() ? (time_t)strtol(shift, NULL, 10) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *ret)
{
    static int (*real)(clockid_t, struct timespec *);

    if (!real) {
        *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    }
    int rc = real(clock, ret);
    if (rc == 0 && clock == CLOCK_REALTIME) {
        ret->tv_sec += clock_shift();
    }
    return rc;
}

time_t time(time_t *ret)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (ret) {
        *ret = now.tv_sec;
    }
    return now.tv_sec;
}

int gettimeofday(struct timeval *ret, void *zone)
{
    struct timespec now;

    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *ret = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
    return 0;
}
