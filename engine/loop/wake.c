#include "engine/loop/wake.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* A reader spins for SPIN_US. After MAX_FALSE_ALARMS announcements that no post
 * followed, only one in RETRY_EVERY is honoured. */
enum { SPIN_US = 100, MAX_FALSE_ALARMS = 8, RETRY_EVERY = 64 };

static bool has_one_cpu(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) == 1;
}

int wake_init(struct wake *w, struct err *e)
{
    atomic_init(&w->asleep, false);
    atomic_init(&w->expected, false);
    w->false_alarms = 0;
    w->single_cpu = has_one_cpu();
    w->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return w->fd < 0 ? err_set(e, ERR_IO, "eventfd: %s", strerror(errno)) : 0;
}

void wake_release(struct wake *w)
{
    if (w->fd >= 0) {
        close(w->fd);
    }
    w->fd = -1;
}

void wake_post(struct wake *w)
{
    if (!atomic_load(&w->asleep) || !atomic_exchange(&w->asleep, false)) {
        return;
    }
    /* The counter cannot overflow (one write a sleep), so a write fails only when
     * interrupted. */
    while (eventfd_write(w->fd, 1) != 0 && errno == EINTR)
        ;
}

bool wake_is_asleep(struct wake *w)
{
    return atomic_load(&w->asleep);
}

void wake_expect(struct wake *w)
{
    if (w->single_cpu || !atomic_load(&w->asleep)) {
        return;
    }
    atomic_store(&w->expected, true);
    wake_post(w);
}

static void spin_for_work(struct wake *w, bool (*has_work)(void *ctx), void *ctx)
{
    if (w->false_alarms >= MAX_FALSE_ALARMS && w->false_alarms % RETRY_EVERY != 0) {
        w->false_alarms++;
        return;
    }
    int64_t until = clock_us() + SPIN_US;
    while (!has_work(ctx) && clock_us() < until) {
        sched_yield();
    }
    w->false_alarms = has_work(ctx) ? 0 : w->false_alarms + 1;
}

void wake_sleep(struct wake *w, bool (*has_work)(void *ctx), void *ctx, int64_t timeout_us)
{
    atomic_store(&w->asleep, true);
    if (!has_work(ctx)) {
        struct pollfd p = {.fd = w->fd, .events = POLLIN};
        struct timespec ts = {.tv_sec = timeout_us / 1000000,
                              .tv_nsec = timeout_us % 1000000 * 1000};
        ppoll(&p, 1, timeout_us < 0 ? NULL : &ts, NULL);
    }
    /* A poster that cleared `asleep` has written or will: leave the count for the next
     * sleep, which at worst returns at once. */
    if (!atomic_exchange(&w->asleep, false)) {
        eventfd_t count;
        eventfd_read(w->fd, &count);
    }
    if (atomic_exchange(&w->expected, false)) {
        spin_for_work(w, has_work, ctx);
    }
}
