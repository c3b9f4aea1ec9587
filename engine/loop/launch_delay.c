#include "engine/loop/launch_delay.h"

#include "config/base/base.h"

/* How long before the running step's end the next one is launched: a constant for the
 * host's work on it, and a fraction of the estimate for its error. */
enum { MARGIN_US = 1000, MARGIN_FRACTION = 10 };

void launch_delay_launched(struct launch_delay *p, int64_t now_us, double estimate_us)
{
    if (p->n_running++ == 0) {
        p->begin_us = now_us;
        p->running_us = estimate_us;
    } else {
        p->next_us = estimate_us;
    }
}

void launch_delay_ended(struct launch_delay *p, int64_t now_us)
{
    if (p->running_us > 0) {
        double ratio = (double)(now_us - p->begin_us) / p->running_us;
        p->ratio += (p->ratio > 0 ? 0.2 : 1) * (ratio - p->ratio);
    }
    p->n_running--;
    p->begin_us = now_us;
    p->running_us = p->next_us;
}

int64_t launch_delay_hold_us(const struct launch_delay *p, int64_t now_us)
{
    if (p->n_running != 1) {
        return 0;
    }
    double us = p->ratio * p->running_us;
    return MAX(p->begin_us + (int64_t)(us - us / MARGIN_FRACTION) - MARGIN_US - now_us, 0);
}
