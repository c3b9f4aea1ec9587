/* Rows rounded to nearest (see quantise.h). */
#include <math.h>

#include "models/quantise/quantise.h"

static float greatest(const float *x, int64_t n)
{
    float most = 0;

    for (int64_t i = 0; i < n; i++) {
        most = fmaxf(most, fabsf(x[i]));
    }
    return most;
}

/* The code of x, and its value. */
static uint8_t code_of(enum weight_format_id f, float x, float scale, float *ret_value)
{
    if (f == FORMAT_FP8) {
        uint8_t code = weight_e4m3_of(x / scale);
        *ret_value = scale * weight_code_value(f, code);
        return code;
    }
    float low = f == FORMAT_INT8 ? -127 : -8, high = f == FORMAT_INT8 ? 127 : 7;
    float code = fminf(fmaxf(nearbyintf(x / scale), low), high);
    *ret_value = scale * code;
    return f == FORMAT_INT8 ? (uint8_t)(int8_t)code : (uint8_t)(int8_t)(code + 8);
}

void round_row(const struct rounding *k, const float *x, int64_t n, uint8_t *codes, float *scale,
               float *ret_value, double sum[2])
{
    float most_code = k->format == FORMAT_FP8 ? 448 : k->format == FORMAT_INT8 ? 127 : 7.5f;
    int64_t group = k->group > 0 ? k->group : n;

    for (int64_t at = 0; at < n; at += group, scale++) {
        float most = greatest(x + at, MIN(group, n - at));
        *scale = most > 0 ? most / most_code : 1;
        for (int64_t i = at; i < MIN(at + group, n); i++) {
            float value;
            uint8_t code = code_of(k->format, x[i], *scale, &value);
            if (k->format != FORMAT_INT4) {
                codes[i] = code;
            } else {
                codes[i / 2] = i % 2 ? (uint8_t)(codes[i / 2] | code << 4) : code;
            }
            if (ret_value) {
                ret_value[i] = value;
            }
            sum[0] += ((double)x[i] - value) * ((double)x[i] - value);
            sum[1] += (double)x[i] * x[i];
        }
    }
}
