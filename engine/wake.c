#include "engine/wake.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

int wake_init(struct wake *w, struct err *e)
{
    atomic_init(&w->asleep, false);
    w->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return w->fd < 0 ? err_set(e, ERR_IO, "eventfd: %s", strerror(errno)) : 0;
}

void wake_release(struct wake *w)
{
    if (w->fd >= 0)
        close(w->fd);
    w->fd = -1;
}

void wake_post(struct wake *w)
{
    if (!atomic_load(&w->asleep) || !atomic_exchange(&w->asleep, false))
        return;
    /* The counter cannot overflow (one write a sleep), so a failed write would be a bug of the kernel. */
    while (eventfd_write(w->fd, 1) != 0 && errno == EINTR)
        ;
}

void wake_sleep(struct wake *w, bool (*has_work)(void *ctx), void *ctx, int64_t timeout_us)
{
    atomic_store(&w->asleep, true);
    if (!has_work(ctx)) {
        struct pollfd p = {.fd = w->fd, .events = POLLIN};
        struct timespec ts = {.tv_sec = timeout_us / 1000000, .tv_nsec = timeout_us % 1000000 * 1000};
        ppoll(&p, 1, timeout_us < 0 ? NULL : &ts, NULL);
    }
    /* A poster that took `asleep` down has written or will: leave the count for the next sleep to find, at worst
     * that one returns at once. */
    if (!atomic_exchange(&w->asleep, false)) {
        eventfd_t count;
        eventfd_read(w->fd, &count);
    }
}
