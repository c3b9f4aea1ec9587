/* The inner loops of attention for NEON: keys transposed, so that scores of 64 keys are
 * rows of an outer product. */
#include <math.h>

#include "kernels/cpu/simd/neon.h"

/* Four rows of four floats become four columns. */
INLINE void transpose4(float32x4_t r[4])
{
    float32x4x2_t a = vtrnq_f32(r[0], r[1]);
    float32x4x2_t b = vtrnq_f32(r[2], r[3]);

    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

INLINE void transpose_type(float *out, const void *const *key, int32_t dim, const enum dtype t)
{
    for (int32_t first = 0; first < TILE_KEYS; first += 4) {
        int32_t d = 0;
        for (; d + 4 <= dim; d += 4) {
            float32x4_t r[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                r[i] = load4(key[first + i], t, d);
            }
            transpose4(r);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vst1q_f32(out + (d + i) * TILE_KEYS + first, r[i]);
            }
        }
        for (; d < dim; d++) {
            for (int i = 0; i < 4; i++) {
                out[d * TILE_KEYS + first + i] = dtype_load(key[first + i], t, d);
            }
        }
    }
}

static void transpose_keys(float *out, const void *const *key, int32_t dim, enum dtype t)
{
    if (t == DTYPE_BF16) {
        transpose_type(out, key, dim, DTYPE_BF16);
    } else if (t == DTYPE_F16) {
        transpose_type(out, key, dim, DTYPE_F16);
    } else {
        transpose_type(out, key, dim, DTYPE_F32);
    }
}

/* n_rows of q, 4 n_v of the part's keys, in registers while the dimensions go by. */
INLINE void score_tile(float *score, const float *const *q, const float *keys, int32_t dim,
                       float scale, const int n_rows, const int n_v)
{
    float32x4_t a[16];

#pragma GCC unroll 16
    for (int i = 0; i < n_rows * n_v; i++) {
        a[i] = vdupq_n_f32(0);
    }
    for (int32_t d = 0; d < dim; d++) {
#pragma GCC unroll 8
        for (int i = 0; i < n_v; i++) {
            float32x4_t k = vld1q_f32(keys + (int64_t)d * TILE_KEYS + 4 * i);
#pragma GCC unroll 2
            for (int r = 0; r < n_rows; r++) {
                a[r * n_v + i] = vfmaq_n_f32(a[r * n_v + i], k, q[r][d]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < n_rows * n_v; i++) {
        vst1q_f32(score + i / n_v * TILE_KEYS + i % n_v * 4, vmulq_n_f32(a[i], scale));
    }
}

static void scores(float *score, const float *const *q, int32_t rows, const float *keys,
                   int32_t dim, float scale)
{
    for (int32_t at = 0; at < TILE_KEYS; at += 32) {
        int32_t r = 0;
        for (; r + 2 <= rows; r += 2) {
            score_tile(score + r * TILE_KEYS + at, q + r, keys + at, dim, scale, 2, 8);
        }
        if (r < rows) {
            score_tile(score + r * TILE_KEYS + at, q + r, keys + at, dim, scale, 1, 8);
        }
    }
}

/* Scores outside [lo, hi) count as minus infinity. */
static float softmax(float *s, int32_t lo, int32_t hi, float *max, float *sum)
{
    static const int32_t steps[4] = {0, 1, 2, 3};
    const float32x4_t minus = vdupq_n_f32(-INFINITY);
    float32x4_t v[TILE_KEYS / 4];
    float32x4_t best = minus;

    for (int i = 0; i < TILE_KEYS / 4; i++) {
        int32x4_t at = vaddq_s32(vdupq_n_s32(4 * i), vld1q_s32(steps));
        uint32x4_t in = vandq_u32(vcgeq_s32(at, vdupq_n_s32(lo)), vcltq_s32(at, vdupq_n_s32(hi)));
        v[i] = vbslq_f32(in, vld1q_f32(s + 4 * i), minus);
        best = vmaxq_f32(best, v[i]);
    }
    float old = *max;
    *max = MAX(old, vmaxvq_f32(best));
    float32x4_t total = vdupq_n_f32(0);
    for (int i = 0; i < TILE_KEYS / 4; i++) {
        float32x4_t p = exp4(vsubq_f32(v[i], vdupq_n_f32(*max)));
        vst1q_f32(s + 4 * i, p);
        total = vaddq_f32(total, p);
    }
    float keep = old == *max ? 1.0f : expf(old - *max);
    *sum = *sum * keep + vaddvq_f32(total);
    return keep;
}

/* Columns [at, at + 4 n_v) of a row of acc in registers while the keys go by. */
INLINE void accumulate_tile(float *acc, float keep, const float *p, const void *const *value,
                            int32_t lo, int32_t hi, int64_t at, const enum dtype t, const int n_v)
{
    float32x4_t a[8];

#pragma GCC unroll 8
    for (int i = 0; i < n_v; i++) {
        a[i] = vmulq_n_f32(vld1q_f32(acc + at + 4 * i), keep);
    }
    for (int32_t j = lo; j < hi; j++) {
#pragma GCC unroll 8
        for (int i = 0; i < n_v; i++) {
            a[i] = vfmaq_n_f32(a[i], load4(value[j], t, at + 4 * i), p[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_v; i++) {
        vst1q_f32(acc + at + 4 * i, a[i]);
    }
}

INLINE void accumulate_type(float *acc, int32_t dim, const float *keep, const float *p,
                            int32_t rows, const void *const *value, int32_t lo, int32_t hi,
                            const enum dtype t)
{
    for (int32_t r = 0; r < rows; r++, acc += dim, p += TILE_KEYS) {
        int32_t at = 0;
        for (; at + 32 <= dim; at += 32) {
            accumulate_tile(acc, keep[r], p, value, lo, hi, at, t, 8);
        }
        for (; at + 4 <= dim; at += 4) {
            accumulate_tile(acc, keep[r], p, value, lo, hi, at, t, 1);
        }
        for (; at < dim; at++) {
            float a = acc[at] * keep[r];
            for (int32_t j = lo; j < hi; j++) {
                a = fmaf(p[j], dtype_load(value[j], t, at), a);
            }
            acc[at] = a;
        }
    }
}

static void accumulate(float *acc, int32_t dim, const float *keep, const float *p, int32_t rows,
                       const void *const *value, int32_t lo, int32_t hi, enum dtype t)
{
    if (t == DTYPE_BF16) {
        accumulate_type(acc, dim, keep, p, rows, value, lo, hi, DTYPE_BF16);
    } else if (t == DTYPE_F16) {
        accumulate_type(acc, dim, keep, p, rows, value, lo, hi, DTYPE_F16);
    } else {
        accumulate_type(acc, dim, keep, p, rows, value, lo, hi, DTYPE_F32);
    }
}

void cpu_attention_neon(struct cpu_kernels *k)
{
    k->transpose_keys = transpose_keys;
    k->scores = scores;
    k->softmax = softmax;
    k->accumulate = accumulate;
}
