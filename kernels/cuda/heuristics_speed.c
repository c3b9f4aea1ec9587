/* See heuristics_speed.h. */
#include "kernels/cuda/heuristics_speed.h"

#include <math.h>

#include "config/base/base.h"

enum { STEPS = 8 }; /* of rated_gbs in a doubling */

int32_t rated_gbs(double measured)
{
    if (!(measured >= 1)) {
        return 0;
    }
    double step = round(STEPS * log2(measured / H200_READ_GBS));

    return (int32_t)MAX(lround(H200_GBS * exp2(step / STEPS)), 1);
}

int32_t rows_that_pay(int32_t there, const struct device_speed *s)
{
    int64_t sms = s->n_sms > 0 ? s->n_sms : H200_SMS,
            gbs = s->memory_gbs > 0 ? s->memory_gbs : H200_GBS;

    return (int32_t)MAX(there * sms * H200_GBS / (H200_SMS * gbs), 1);
}
