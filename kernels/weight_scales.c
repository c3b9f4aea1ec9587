/* Codes whose scales are a tensor of their own: their values (see weight_format.h). */
#include <math.h>
#include <string.h>

#include "kernels/weight_format.h"

int32_t scale_type_bytes(enum scale_type t)
{
    switch (t) {
    case SCALE_F32:
        return 4;
    case SCALE_F16:
    case SCALE_BF16:
        return 2;
    default:
        return 1;
    }
}

static float float_of_bits(uint32_t u)
{
    float f;

    memcpy(&f, &u, sizeof(f));
    return f;
}

/* e4m3: bias 7, no infinities; all bits of exponent and mantissa set is a NaN. */
static float e4m3(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80) << 24;

    if ((code & 0x7F) == 0x7F) {
        return float_of_bits(sign | 0x7FC00000u);
    }
    /* The exponent's bias is made up for by the product, which also normalises
     * subnormal numbers. */
    return float_of_bits(sign | (uint32_t)(code & 0x7F) << 20) * 0x1p120f;
}

static bool has_nan(const uint8_t *codes, int64_t n)
{
    const uint64_t magnitudes = 0x7F7F7F7F7F7F7F7Fu, ones = 0x0101010101010101u;
    uint64_t found = 0, word;

    /* 0x7F plus 1 sets the bit of the sign, and nothing carries beyond */
    for (; n >= 8; n -= 8, codes += 8) {
        memcpy(&word, codes, sizeof(word));
        found |= (word & magnitudes) + ones;
    }
    for (; n > 0; n--, codes++) {
        found |= (uint64_t)(*codes & 0x7F) + 1;
    }
    return found & ~magnitudes;
}

int64_t weight_e4m3_find_nan(const uint8_t *codes, int64_t n)
{
    int64_t i = 0;

    if (!has_nan(codes, n)) {
        return -1;
    }
    while ((codes[i] & 0x7F) != 0x7F) {
        i++;
    }
    return i;
}

uint8_t weight_e4m3_of(float f)
{
    uint8_t sign = signbit(f) ? 0x80 : 0;
    uint32_t u;

    f = fabsf(f);
    if (f < 0x1p-6f) { /* subnormal: steps of 2^-9 */
        return sign | (uint8_t)nearbyintf(f * 0x1p9f);
    }
    memcpy(&u, &f, sizeof(u));
    u = (u + 0x7FFFF + (u >> 20 & 1)) >> 20;
    return sign | (uint8_t)MIN(u - (120u << 3), 0x7Eu);
}

float weight_act_round(enum weight_format_id id, float scale, float x)
{
    float code = x / scale;

    if (isnan(code)) {
        return code;
    }
    return scale * (id == FORMAT_FP8 ? weight_code_value(id, weight_e4m3_of(code))
                                     : fminf(fmaxf(nearbyintf(code), -127), 127));
}

static float e8m0(uint8_t code)
{
    return code == 0xFF ? NAN : ldexpf(1, code - 127);
}

float weight_scale_load(const struct weight_scales *s, int64_t i)
{
    const uint8_t *at = (const uint8_t *)s->data + i * scale_type_bytes(s->type);
    uint32_t word = 0;

    switch (s->type) {
    case SCALE_F32:
        memcpy(&word, at, 4);
        return float_of_bits(word);
    case SCALE_F16:
        return weight_format_f16(at);
    case SCALE_BF16:
        return float_of_bits((uint32_t)at[0] << 16 | (uint32_t)at[1] << 24);
    case SCALE_E8M0:
        return e8m0(*at);
    case SCALE_E4M3:
        return e4m3(*at);
    }
    return NAN;
}

struct weight_scales weight_scales_slice(const struct weight_scales *s, int32_t row, int32_t col)
{
    struct weight_scales part = *s;
    int64_t i = s->group_rows > 0 ? row / s->group_rows : 0;
    int64_t j = s->group_cols > 0 ? col / s->group_cols : 0;

    part.data = (const uint8_t *)s->data + (i * s->stride + j) * scale_type_bytes(s->type);
    if (s->zero) {
        part.zero = s->zero + i * s->zero_stride + j;
    }
    return part;
}

uint8_t weight_e2m1_of(float f)
{
    static const float between[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    float size = fabsf(f);
    uint8_t code = 0;

    while (code < ARRAY_LEN(between) &&
           (size > between[code] || (size == between[code] && code % 2 == 1))) {
        code++;
    }
    return code | (signbit(f) ? 8 : 0);
}

float weight_code_value(enum weight_format_id id, uint8_t code)
{
    switch (id) {
    case FORMAT_FP8:
        return e4m3(code);
    case FORMAT_INT8:
        return (float)(int8_t)code;
    case FORMAT_FP4: /* with its negative zero */
        return (code & 8 ? -0.5f : 0.5f) * (float)weight_levels_mxfp4[code & 7];
    default: /* FORMAT_INT4 */
        return (float)(code & 15);
    }
}

/* The zero point of a group. */
static float zero_point(enum weight_format_id id, const struct weight_scales *s, int64_t i,
                        int64_t j)
{
    if (!s->zero) {
        return id == FORMAT_INT4 ? 8 : 0;
    }
    uint8_t z = s->zero[i * s->zero_stride + j];
    return id == FORMAT_INT8 ? (float)(int8_t)z : (float)z;
}

void weight_scales_decode(const struct weight_format *f, const struct weight_scales *s,
                          const uint8_t *codes, int64_t row, int64_t n, float *out)
{
    int64_t i = s->group_rows > 0 ? row / s->group_rows : 0;
    int64_t width = s->group_cols > 0 ? s->group_cols : n;

    for (int64_t at = 0, j = 0; at < n; at += width, j++) {
        float scale = s->factor * weight_scale_load(s, i * s->stride + j);
        float zero = zero_point(f->id, s, i, j);
        for (int64_t k = at; k < MIN(at + width, n); k++) {
            uint8_t code = f->bits == 8 ? codes[k] : codes[k / 2] >> (k % 2 * 4) & 15;
            out[k] = scale * (weight_code_value(f->id, code) - zero);
        }
    }
}
