/* pthread conditions with CLOCK_MONOTONIC. */
#include "config/base/wait.h"

#include <errno.h>
#include <time.h>

void wait_init(pthread_cond_t *c)
{
    pthread_condattr_t monotonic;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(c, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

bool wait_until(pthread_cond_t *c, pthread_mutex_t *lock, int64_t until_us)
{
    struct timespec until = {.tv_sec = until_us / 1000000, .tv_nsec = until_us % 1000000 * 1000};

    return pthread_cond_timedwait(c, lock, &until) != ETIMEDOUT;
}
