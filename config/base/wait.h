/* Waiting on a condition until a time of the monotonic clock: a jump of the wall clock
 * ends no wait, and prolongs none. */
#ifndef QUIRE_CONFIG_BASE_WAIT_H
#define QUIRE_CONFIG_BASE_WAIT_H

#include <pthread.h>

#include "config/base/base.h"

/* A condition for wait_until; give it back with pthread_cond_destroy. */
void wait_init(pthread_cond_t *c);
/* As pthread_cond_wait, but no longer than until clock_us() is `until_us`: true when
 * woken (or spuriously), false when that time has come. */
bool wait_until(pthread_cond_t *c, pthread_mutex_t *lock, int64_t until_us);

#endif
