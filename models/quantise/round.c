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
    if (f == FORMAT_FP4) {
        uint8_t code = scale > 0 ? weight_e2m1_of(x / scale) : 0;
        *ret_value = scale * weight_code_value(f, code);
        return code;
    }
    float low = f == FORMAT_INT8 ? -127 : -8, high = f == FORMAT_INT8 ? 127 : 7;
    float code = fminf(fmaxf(nearbyintf(x / scale), low), high);
    *ret_value = scale * code;
    return f == FORMAT_INT8 ? (uint8_t)(int8_t)code : (uint8_t)(int8_t)(code + 8);
}

/* The scale that brings the greatest magnitude of a group to the greatest code. */
static float scale_of(const struct rounding *k, float most)
{
    static const float MOST[WEIGHT_FORMATS] = {
        [FORMAT_FP8] = 448, [FORMAT_INT8] = 127, [FORMAT_INT4] = 7.5f, [FORMAT_FP4] = 6};
    float scale = most > 0 ? most / MOST[k->format] : 1;

    if (k->format != FORMAT_FP4) {
        return scale;
    }
    if (k->over > 0) {
        uint8_t code = most > 0 ? weight_e4m3_of(scale * k->over) : 0;
        return weight_code_value(FORMAT_FP8, code) / k->over;
    }
    /* 4 is the power of two of the greatest code; as in families/load/quantise.c */
    return ldexpf(1, most > 0 ? MIN(MAX(ilogbf(most) - 2, -126), 127) : -126);
}

void round_row(const struct rounding *k, const float *x, int64_t n, uint8_t *codes, float *scale,
               float *ret_value, double sum[2])
{
    bool halves = k->format == FORMAT_INT4 || k->format == FORMAT_FP4;
    int64_t group = k->group > 0 ? k->group : n;

    for (int64_t at = 0; at < n; at += group, scale++) {
        *scale = scale_of(k, greatest(x + at, MIN(group, n - at)));
        for (int64_t i = at; i < MIN(at + group, n); i++) {
            float value;
            uint8_t code = code_of(k->format, x[i], *scale, &value);
            if (!halves) {
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
