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

/* The scale of a group, and the zero point that its codes have taken off. */
struct affine {
    float scale, zero;
};

/* The code of x, and its value. */
static uint8_t code_of(const struct rounding *k, float x, struct affine a, float *ret_value)
{
    enum weight_format_id f = k->format;

    if (f == FORMAT_FP8) {
        uint8_t code = weight_e4m3_of(x / a.scale);
        *ret_value = a.scale * weight_code_value(f, code);
        return code;
    }
    if (f == FORMAT_FP4) {
        uint8_t code = a.scale > 0 ? weight_e2m1_of(x / a.scale) : 0;
        *ret_value = a.scale * weight_code_value(f, code);
        return code;
    }
    float low = f == FORMAT_INT4 ? 0 : k->zeros ? -128 : -127, high = f == FORMAT_INT4 ? 15 : 127;
    float code = fminf(fmaxf(nearbyintf(x / a.scale) + a.zero, low), high);
    *ret_value = a.scale * (code - a.zero);
    return f == FORMAT_INT4 ? (uint8_t)code : (uint8_t)(int8_t)code;
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

/* Codes from the least value to the greatest, 0 among both. */
static struct affine affine_of(const struct rounding *k, const float *x, int64_t n)
{
    float low = 0, high = 0;

    for (int64_t i = 0; i < n; i++) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    float first = k->format == FORMAT_INT8 ? -128 : 0, last = k->format == FORMAT_INT8 ? 127 : 15;
    float scale = high > low ? (high - low) / (last - first) : 1;
    return (struct affine){scale, fminf(fmaxf(nearbyintf(first - low / scale), first), last)};
}

static struct affine group_of(const struct rounding *k, const float *x, int64_t n)
{
    if (k->zeros) {
        return affine_of(k, x, n);
    }
    return (struct affine){scale_of(k, greatest(x, n)), k->format == FORMAT_INT4 ? 8 : 0};
}

void round_row(const struct rounding *k, const float *x, int64_t n, const struct rounded_row *ret,
               double sum[2])
{
    bool halves = k->format == FORMAT_INT4 || k->format == FORMAT_FP4;
    int64_t group = k->group > 0 ? k->group : n;

    for (int64_t g = 0; g * group < n; g++) {
        int64_t at = g * group;
        struct affine a = group_of(k, x + at, MIN(group, n - at));
        ret->scale[g] = a.scale;
        if (ret->zero) {
            ret->zero[g] = k->format == FORMAT_INT8 ? (uint8_t)(int8_t)a.zero : (uint8_t)a.zero;
        }
        for (int64_t i = at; i < MIN(at + group, n); i++) {
            float value;
            uint8_t code = code_of(k, x[i], a, &value);
            if (!halves) {
                ret->codes[i] = code;
            } else {
                ret->codes[i / 2] = i % 2 ? (uint8_t)(ret->codes[i / 2] | code << 4) : code;
            }
            if (ret->value) {
                ret->value[i] = value;
            }
            sum[0] += ((double)x[i] - value) * ((double)x[i] - value);
            sum[1] += (double)x[i] * x[i];
        }
    }
}
