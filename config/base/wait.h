/* Condition variables with deadlines on the monotonic clock: a jump of the wall clock
 * does not shorten or prolong a wait. */
#ifndef QUIRE_CONFIG_BASE_WAIT_H
#define QUIRE_CONFIG_BASE_WAIT_H

#include <pthread.h>

#include "config/base/base.h"

/* Initialise a condition for wait_until; to be freed with pthread_cond_destroy. */
void wait_init(pthread_cond_t *c);
/* As pthread_cond_wait, but at most until clock_us() is `until_us`: true when woken,
 * possibly spuriously, false when that time has come. */
bool wait_until(pthread_cond_t *c, pthread_mutex_t *lock, int64_t until_us);

#endif
