/* Delays a launch, under policy: fair, until shortly before the running step ends. A
 * request that arrives in between then joins the next step instead of the one after it,
 * and the device is never idle.
 *
 * The end is predicted from the scheduler's estimate, scaled by the ratio that recent
 * steps took. Pure: time is an argument. For executors of depth 1, where one more step
 * may be launched while one runs. */
#ifndef QUIRE_ENGINE_LOOP_LAUNCH_DELAY_H
#define QUIRE_ENGINE_LOOP_LAUNCH_DELAY_H

#include <stdint.h>

/* Initially all zero. */
struct launch_delay {
    int32_t n_running;          /* steps launched that have not ended: 0 to 2 */
    int64_t begin_us;           /* when the older one began, clock_us */
    double running_us, next_us; /* estimated durations of the older and the newer; 0: unknown */
    double ratio;               /* actual to estimated duration, smoothed; 0: none seen */
};

void launch_delay_launched(struct launch_delay *p, int64_t now_us, double estimate_us);
/* The older step ended. */
void launch_delay_ended(struct launch_delay *p, int64_t now_us);
/* How long to delay the next launch; 0: not at all. */
int64_t launch_delay_hold_us(const struct launch_delay *p, int64_t now_us);

#endif
