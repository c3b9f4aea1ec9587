/* When to launch the next step, with fair shares: not as soon as it can be planned, but
 * shortly before the running one ends. A request that comes in between is then in the
 * next step, not in the one after it, and the device waits for nothing.
 *
 * How long a step takes is the scheduler's estimate, corrected by what the steps before
 * took. Pure: time is an argument. For executors of depth 1: while a step runs, one
 * more is launched.
 */
#ifndef QUIRE_ENGINE_LOOP_LAUNCH_DELAY_H
#define QUIRE_ENGINE_LOOP_LAUNCH_DELAY_H

#include <stdint.h>

/* All 0 at first. */
struct launch_delay {
    int32_t n_running;          /* steps launched and not ended: 0 to 2 */
    int64_t begin_us;           /* of the older one */
    double running_us, next_us; /* estimates of both; 0: unknown */
    double ratio;               /* of time taken to time estimated, smoothed; 0: none seen */
};

void launch_delay_launched(struct launch_delay *p, int64_t now_us, double estimate_us);
/* The older step ended. */
void launch_delay_ended(struct launch_delay *p, int64_t now_us);
/* How long the next launch is to be kept back; 0: not. */
int64_t launch_delay_hold_us(const struct launch_delay *p, int64_t now_us);

#endif
