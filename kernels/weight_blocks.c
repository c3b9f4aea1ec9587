/* GGUF's blocks, unpacked to codes and scales.
 *
 * A block of 32 values has one float16 scale, and in the _1 formats one float16
 * minimum. A block of 256 (the K formats and IQ4_XS) has float16 scales, which multiply
 * 4- to 8-bit scales of sub-blocks. Source: ggml's documentation of the block layouts;
 * MXFP4: OCP Microscaling Formats 1.0.
 */
#include "kernels/weight_blocks.h"

#include <string.h>

static float float_of(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

float weight_format_f16(const uint8_t *p)
{
    uint32_t h = (uint32_t)(p[0] | p[1] << 8), sign = (h & 0x8000) << 16, exponent = h >> 10 & 31,
             mantissa = h & 1023;

    if (exponent == 0) {
        return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    }
    return float_of(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

float weight_format_half_e8m0(uint8_t e)
{
    return float_of(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

/* The same scale and minimum for groups [first, first + n). */
static void set_groups(struct weight_codes *c, int first, int n, float scale, float min)
{
    for (int i = first; i < first + n; i++) {
        c->scale[i] = scale;
        c->min[i] = min;
    }
}

/* ---- 32 values: a byte has the values i (low half) and i + 16 ---- */

/* Codes of four bits at q, less `zero`. */
static void halves(const uint8_t *q, int zero, int16_t *code)
{
    for (int i = 0; i < 16; i++) {
        code[i] = (int16_t)((q[i] & 15) - zero);
        code[i + 16] = (int16_t)((q[i] >> 4) - zero);
    }
}

/* Adds the fifth bits: bit i of the 32 bits at `high` is that of code i. */
static void fifth_bits(const uint8_t *high, int16_t *code)
{
    for (int i = 0; i < 32; i++) {
        code[i] = (int16_t)(code[i] + ((high[i / 8] >> i % 8 & 1) << 4));
    }
}

static void levels(const uint8_t *q, const int8_t *level, int16_t *code)
{
    for (int i = 0; i < 16; i++) {
        code[i] = level[q[i] & 15];
        code[i + 16] = level[q[i] >> 4];
    }
}

void unpack_q4_0(const uint8_t *s, struct weight_codes *ret)
{
    set_groups(ret, 0, 2, weight_format_f16(s), 0);
    halves(s + 2, 8, ret->code);
}

void unpack_q4_1(const uint8_t *s, struct weight_codes *ret)
{
    set_groups(ret, 0, 2, weight_format_f16(s), -weight_format_f16(s + 2));
    halves(s + 4, 0, ret->code);
}

void unpack_q5_0(const uint8_t *s, struct weight_codes *ret)
{
    set_groups(ret, 0, 2, weight_format_f16(s), 0);
    halves(s + 6, 16, ret->code);
    fifth_bits(s + 2, ret->code);
}

void unpack_q5_1(const uint8_t *s, struct weight_codes *ret)
{
    set_groups(ret, 0, 2, weight_format_f16(s), -weight_format_f16(s + 2));
    halves(s + 8, 0, ret->code);
    fifth_bits(s + 4, ret->code);
}

void unpack_q8_0(const uint8_t *s, struct weight_codes *ret)
{
    set_groups(ret, 0, 2, weight_format_f16(s), 0);
    for (int i = 0; i < 32; i++) {
        ret->code[i] = (int8_t)s[2 + i];
    }
}

const int8_t weight_levels_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
const int8_t weight_levels_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void unpack_iq4_nl(const uint8_t *s, struct weight_codes *ret)
{
    set_groups(ret, 0, 2, weight_format_f16(s), 0);
    levels(s + 2, weight_levels_iq4, ret->code);
}

/* One exponent, codes [16]. */
void unpack_mxfp4(const uint8_t *s, struct weight_codes *ret)
{
    set_groups(ret, 0, 2, weight_format_half_e8m0(s[0]), 0);
    levels(s + 1, weight_levels_mxfp4, ret->code);
}

/* ---- 256 values ---- */

/* Two bits of value i; a byte holds those of four values, 32 apart. */
static int two_bits(const uint8_t *q, int i)
{
    return q[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
}

/* Sixteen sub-blocks' scales (low half) and minima [16], values [64], two float16
 * scales. */
void unpack_q2_k(const uint8_t *s, struct weight_codes *ret)
{
    float d = weight_format_f16(s + 80), dmin = weight_format_f16(s + 82);

    for (int i = 0; i < 16; i++) {
        set_groups(ret, i, 1, d * (float)(s[i] & 15), dmin * (float)(s[i] >> 4));
    }
    for (int i = 0; i < 256; i++) {
        ret->code[i] = (int16_t)two_bits(s + 16, i);
    }
}

/* Third bits [32] (a clear one subtracts four), lower two bits [64], sixteen scales of
 * 6 bits [12], one float16 scale. */
void unpack_q3_k(const uint8_t *s, struct weight_codes *ret)
{
    const uint8_t *scales = s + 96;
    float d = weight_format_f16(s + 108);

    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
        int scale = low | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4;
        set_groups(ret, i, 1, d * (float)(scale - 32), 0);
    }
    for (int i = 0; i < 256; i++) {
        ret->code[i] = (int16_t)(two_bits(s + 32, i) - (s[i % 32] >> i / 32 & 1 ? 0 : 4));
    }
}

/* One float16 scale, the upper two bits of eight sub-blocks' scales [2], their lower
 * four [4], values [128]. */
void unpack_iq4_xs(const uint8_t *s, struct weight_codes *ret)
{
    float d = weight_format_f16(s);
    int high = s[2] | s[3] << 8;

    for (int i = 0; i < 8; i++) {
        int scale = (s[4 + i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4;
        set_groups(ret, 2 * i, 2, d * (float)(scale - 32), 0);
        levels(s + 8 + 16 * i, weight_levels_iq4, ret->code + 32 * i);
    }
}

/* Scales and minima of eight sub-blocks, 6 bits each, in 12 bytes: those of the first
 * four take the lower bits of bytes 0 to 7, whose upper bits hold the upper two bits of
 * the others. */
static void sub_scale(const uint8_t *s, int i, int *ret_scale, int *ret_min)
{
    *ret_scale = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
    *ret_min = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | s[i] >> 6 << 4;
}

/* Q4_K, or Q5_K if `high` is not NULL: bit i of high[k] is the fifth bit of value k of
 * sub-block i. */
static void unpack_k45(const uint8_t *s, const uint8_t *high, const uint8_t *low,
                       struct weight_codes *ret)
{
    float d = weight_format_f16(s), dmin = weight_format_f16(s + 2);

    for (int i = 0; i < 8; i++) {
        int scale, min;
        sub_scale(s + 4, i, &scale, &min);
        set_groups(ret, 2 * i, 2, d * (float)scale, dmin * (float)min);
        const uint8_t *q = low + i / 2 * 32; /* two sub-blocks share 32 bytes */
        for (int k = 0; k < 32; k++) {
            int v = i % 2 ? q[k] >> 4 : q[k] & 15;
            ret->code[32 * i + k] = (int16_t)(v | (high ? (high[k] >> i & 1) << 4 : 0));
        }
    }
}

void unpack_q4_k(const uint8_t *s, struct weight_codes *ret)
{
    unpack_k45(s, NULL, s + 16, ret);
}

void unpack_q5_k(const uint8_t *s, struct weight_codes *ret)
{
    unpack_k45(s, s + 16, s + 48, ret);
}

/* Lower four bits [128], upper two [64], 16 signed scales, one float16 scale. */
void unpack_q6_k(const uint8_t *s, struct weight_codes *ret)
{
    const uint8_t *low = s, *high = s + 128, *scale = s + 192;
    float d = weight_format_f16(s + 208);

    for (int i = 0; i < 16; i++) {
        set_groups(ret, i, 1, d * (float)(int8_t)scale[i], 0);
    }
    for (int i = 0; i < 256; i++) {
        int half = i / 128, group = i / 32 % 4, k = i % 32;
        uint8_t l = low[64 * half + group % 2 * 32 + k];
        int v = (group < 2 ? l & 15 : l >> 4) | (high[32 * half + k] >> 2 * group & 3) << 4;
        ret->code[i] = (int16_t)(v - 32);
    }
}

/* Where the float16 scale of a block lies, and where its minimum does, or the scale
 * again. */
static const struct {
    int32_t scale, min;
} HALVES[WEIGHT_FORMATS] = {
    [FORMAT_Q4_0] = {0, 0},   [FORMAT_Q4_1] = {0, 2},     [FORMAT_Q5_0] = {0, 0},
    [FORMAT_Q5_1] = {0, 2},   [FORMAT_Q8_0] = {0, 0},     [FORMAT_IQ4_NL] = {0, 0},
    [FORMAT_Q2_K] = {80, 82}, [FORMAT_Q3_K] = {108, 108}, [FORMAT_Q4_K] = {0, 2},
    [FORMAT_Q5_K] = {0, 2},   [FORMAT_Q6_K] = {208, 208}, [FORMAT_IQ4_XS] = {0, 0},
};

/* weight_blocks_find_nan of MXFP4: 2^126 times the greatest level, 6, is beyond
 * float32. */
static int64_t find_nan_mxfp4(const uint8_t *blocks, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (blocks[i * 17] >= 126 + 127) {
            return i;
        }
    }
    return -1;
}

int64_t weight_blocks_find_nan(const struct weight_format *f, const uint8_t *blocks, int64_t n)
{
    int32_t scale_at = HALVES[f->id].scale, min_at = HALVES[f->id].min;
    const uint16_t exponent = 0x7C00; /* all of it set: infinite, or a NaN */

    if (f->id == FORMAT_MXFP4) {
        return find_nan_mxfp4(blocks, n);
    }
    for (int64_t i = 0; i < n; i++, blocks += f->block_bytes) {
        uint16_t scale, min;
        memcpy(&scale, blocks + scale_at, sizeof(scale));
        memcpy(&min, blocks + min_at, sizeof(min));
        if ((scale & exponent) == exponent || (min & exponent) == exponent) {
            return i;
        }
    }
    return -1;
}
