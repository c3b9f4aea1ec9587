/* GGUF's encodings of tensors, decoded to floats.
 *
 * A row is a sequence of blocks. A block of 32 values has one float16 scale, and in the
 * _1 encodings one float16 minimum. A block of 256 (the K encodings and IQ4_XS) has
 * float16 scales, which multiply 4- to 8-bit scales of sub-blocks. Source: ggml's
 * documentation of the block layouts.
 */
#include "models/checkpoint/gguf/gguf.h"

#include <string.h>

static float load_f16(const uint8_t *p)
{
    uint32_t h = (uint32_t)(p[0] | p[1] << 8), sign = (h & 0x8000) << 16, exponent = h >> 10 & 31,
             mantissa = h & 1023;

    if (exponent == 0) {
        return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    }
    uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static float load_bits(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static void decode_f32(const uint8_t *s, float *y)
{
    *y = load_bits((uint32_t)s[0] | (uint32_t)s[1] << 8 | (uint32_t)s[2] << 16 |
                   (uint32_t)s[3] << 24);
}

static void decode_f16(const uint8_t *s, float *y)
{
    *y = load_f16(s);
}

static void decode_bf16(const uint8_t *s, float *y)
{
    *y = load_bits((uint32_t)s[0] << 16 | (uint32_t)s[1] << 24);
}

/* ---- 32 values: a byte has the values i (low half) and i + 16 ---- */

static void decode_q4_0(const uint8_t *s, float *y)
{
    float d = load_f16(s);

    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)((s[2 + i] & 15) - 8);
        y[i + 16] = d * (float)((s[2 + i] >> 4) - 8);
    }
}

static void decode_q4_1(const uint8_t *s, float *y)
{
    float d = load_f16(s), m = load_f16(s + 2);

    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)(s[4 + i] & 15) + m;
        y[i + 16] = d * (float)(s[4 + i] >> 4) + m;
    }
}

/* Bit i of the 32 bits at `high`: the fifth bit of value i. */
static int fifth_bit(const uint8_t *high, int i)
{
    return (high[i / 8] >> i % 8 & 1) << 4;
}

static void decode_q5_0(const uint8_t *s, float *y)
{
    float d = load_f16(s);

    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)(((s[6 + i] & 15) | fifth_bit(s + 2, i)) - 16);
        y[i + 16] = d * (float)(((s[6 + i] >> 4) | fifth_bit(s + 2, i + 16)) - 16);
    }
}

static void decode_q5_1(const uint8_t *s, float *y)
{
    float d = load_f16(s), m = load_f16(s + 2);

    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)((s[8 + i] & 15) | fifth_bit(s + 4, i)) + m;
        y[i + 16] = d * (float)((s[8 + i] >> 4) | fifth_bit(s + 4, i + 16)) + m;
    }
}

static void decode_q8_0(const uint8_t *s, float *y)
{
    float d = load_f16(s);

    for (int i = 0; i < 32; i++) {
        y[i] = d * (float)(int8_t)s[2 + i];
    }
}

/* The sixteen levels that four bits select, denser around zero. */
static const int8_t LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};

static void decode_levels(float d, const uint8_t *q, float *y)
{
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)LEVELS[q[i] & 15];
        y[i + 16] = d * (float)LEVELS[q[i] >> 4];
    }
}

static void decode_iq4_nl(const uint8_t *s, float *y)
{
    decode_levels(load_f16(s), s + 2, y);
}

/* ---- 256 values ---- */

/* Two bits of value i; a byte holds those of four values, 32 apart. */
static int two_bits(const uint8_t *q, int i)
{
    return q[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
}

/* Sixteen sub-blocks' scales (low half) and minima [16], values [64], two float16
 * scales. */
static void decode_q2_k(const uint8_t *s, float *y)
{
    float d = load_f16(s + 80), dmin = load_f16(s + 82);

    for (int i = 0; i < 256; i++) {
        int sub = s[i / 16];
        y[i] = d * (float)(sub & 15) * (float)two_bits(s + 16, i) - dmin * (float)(sub >> 4);
    }
}

/* Third bits [32] (a clear one subtracts four), lower two bits [64], sixteen scales of
 * 6 bits [12], one float16 scale. */
static void decode_q3_k(const uint8_t *s, float *y)
{
    const uint8_t *scales = s + 96;
    float d = load_f16(s + 108);

    for (int i = 0; i < 256; i++) {
        int sub = i / 16;
        int low = sub < 8 ? scales[sub] & 15 : scales[sub - 8] >> 4;
        int scale = low | (scales[8 + sub % 4] >> sub / 4 * 2 & 3) << 4;
        int v = two_bits(s + 32, i) - (s[i % 32] >> i / 32 & 1 ? 0 : 4);
        y[i] = d * (float)(scale - 32) * (float)v;
    }
}

/* One float16 scale, the upper two bits of eight sub-blocks' scales [2], their lower
 * four [4], values [128]. */
static void decode_iq4_xs(const uint8_t *s, float *y)
{
    float d = load_f16(s);
    int high = s[2] | s[3] << 8;

    for (int i = 0; i < 8; i++) {
        int scale = (s[4 + i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4;
        decode_levels(d * (float)(scale - 32), s + 8 + 16 * i, y + 32 * i);
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
static void decode_k45(const uint8_t *s, const uint8_t *high, const uint8_t *low, float *y)
{
    float d = load_f16(s), dmin = load_f16(s + 2);

    for (int i = 0; i < 8; i++) {
        int scale, min;
        sub_scale(s + 4, i, &scale, &min);
        float a = d * (float)scale, b = dmin * (float)min;
        const uint8_t *q = low + i / 2 * 32; /* two sub-blocks share 32 bytes */
        for (int k = 0; k < 32; k++) {
            int v = i % 2 ? q[k] >> 4 : q[k] & 15;
            v |= high ? (high[k] >> i & 1) << 4 : 0;
            y[32 * i + k] = a * (float)v - b;
        }
    }
}

static void decode_q4_k(const uint8_t *s, float *y)
{
    decode_k45(s, NULL, s + 16, y);
}

static void decode_q5_k(const uint8_t *s, float *y)
{
    decode_k45(s, s + 16, s + 48, y);
}

/* Lower four bits [128], upper two [64], 16 signed scales, one float16 scale. */
static void decode_q6_k(const uint8_t *s, float *y)
{
    const uint8_t *low = s, *high = s + 128, *scale = s + 192;
    float d = load_f16(s + 208);

    for (int i = 0; i < 256; i++) {
        int half = i / 128, group = i / 32 % 4, k = i % 32;
        uint8_t l = low[64 * half + group % 2 * 32 + k];
        int v = (group < 2 ? l & 15 : l >> 4) | (high[32 * half + k] >> 2 * group & 3) << 4;
        y[i] = d * (float)(int8_t)scale[i / 16] * (float)(v - 32);
    }
}

static const struct {
    const char *name;
    int16_t values, bytes;
    void (*decode)(const uint8_t *block, float *ret);
} ENCODINGS[] = {
    [0] = {"F32", 1, 4, decode_f32},          [1] = {"F16", 1, 2, decode_f16},
    [2] = {"Q4_0", 32, 18, decode_q4_0},      [3] = {"Q4_1", 32, 20, decode_q4_1},
    [6] = {"Q5_0", 32, 22, decode_q5_0},      [7] = {"Q5_1", 32, 24, decode_q5_1},
    [8] = {"Q8_0", 32, 34, decode_q8_0},      [10] = {"Q2_K", 256, 84, decode_q2_k},
    [11] = {"Q3_K", 256, 110, decode_q3_k},   [12] = {"Q4_K", 256, 144, decode_q4_k},
    [13] = {"Q5_K", 256, 176, decode_q5_k},   [14] = {"Q6_K", 256, 210, decode_q6_k},
    [20] = {"IQ4_NL", 32, 18, decode_iq4_nl}, [23] = {"IQ4_XS", 256, 136, decode_iq4_xs},
    [30] = {"BF16", 1, 2, decode_bf16},
};

const char *gguf_encoding_name(uint32_t encoding)
{
    return encoding < ARRAY_LEN(ENCODINGS) ? ENCODINGS[encoding].name : NULL;
}

const char *gguf_encoding_list(void)
{
    return "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, "
           "IQ4_XS";
}

const char *gguf_encoding_refused(uint32_t encoding)
{
    static const char *const NAMES[] = {
        [15] = " (Q8_K)",  [16] = " (IQ2_XXS)", [17] = " (IQ2_XS)", [18] = " (IQ3_XXS)",
        [19] = " (IQ1_S)", [21] = " (IQ3_S)",   [22] = " (IQ2_S)",  [24] = " (I8)",
        [25] = " (I16)",   [26] = " (I32)",     [27] = " (I64)",    [28] = " (F64)",
        [29] = " (IQ1_M)", [34] = " (TQ1_0)",   [35] = " (TQ2_0)",  [39] = " (MXFP4)",
    };

    return encoding < ARRAY_LEN(NAMES) && NAMES[encoding] ? NAMES[encoding] : "";
}

int32_t gguf_block_values(uint32_t encoding)
{
    return ENCODINGS[encoding].values;
}

int32_t gguf_block_bytes(uint32_t encoding)
{
    return ENCODINGS[encoding].bytes;
}

bool gguf_encoding_dtype(uint32_t encoding, enum dtype *ret)
{
    if (encoding != 0 && encoding != 1 && encoding != 30) {
        return false;
    }
    *ret = encoding == 0 ? DTYPE_F32 : encoding == 1 ? DTYPE_F16 : DTYPE_BF16;
    return true;
}

void gguf_decode(uint32_t encoding, const uint8_t *src, int64_t n, float *ret)
{
    int32_t values = ENCODINGS[encoding].values, bytes = ENCODINGS[encoding].bytes;

    for (int64_t i = 0; i < n; i += values, src += bytes) {
        ENCODINGS[encoding].decode(src, ret + i);
    }
}
