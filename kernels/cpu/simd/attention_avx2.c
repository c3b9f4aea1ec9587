/* The inner loops of attention for AVX2: keys transposed, so that scores of 64 keys are
 * rows of an outer product. */
#include <immintrin.h>
#include <math.h>

#include "kernels/cpu/simd/avx2.h"

INLINE void transpose_type(float *out, const void *const *key, int32_t dim, const enum dtype t)
{
    for (int32_t first = 0; first < TILE_KEYS; first += 8) {
        int32_t d = 0;
        for (; d + 8 <= dim; d += 8) {
            __m256 r[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                r[i] = load8(key[first + i], t, d);
            }
            transpose8(r);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                _mm256_store_ps(out + (d + i) * TILE_KEYS + first, r[i]);
            }
        }
        for (; d < dim; d++) {
            for (int i = 0; i < 8; i++) {
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

/* n_rows of q, 8 n_v of the part's keys, in registers while the dimensions go by. */
INLINE void score_tile(float *score, const float *const *q, const float *keys, int32_t dim,
                       float scale, const int n_rows, const int n_v)
{
    __m256 a[8];

#pragma GCC unroll 8
    for (int i = 0; i < n_rows * n_v; i++) {
        a[i] = _mm256_setzero_ps();
    }
    for (int32_t d = 0; d < dim; d++) {
        __m256 k[8];
#pragma GCC unroll 8
        for (int i = 0; i < n_v; i++) {
            k[i] = _mm256_load_ps(keys + (int64_t)d * TILE_KEYS + 8 * i);
        }
#pragma GCC unroll 2
        for (int r = 0; r < n_rows; r++) {
            __m256 x = _mm256_broadcast_ss(q[r] + d);
#pragma GCC unroll 8
            for (int i = 0; i < n_v; i++) {
                a[r * n_v + i] = _mm256_fmadd_ps(x, k[i], a[r * n_v + i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_rows * n_v; i++) {
        _mm256_store_ps(score + i / n_v * TILE_KEYS + i % n_v * 8,
                        _mm256_mul_ps(a[i], _mm256_set1_ps(scale)));
    }
}

static void scores(float *score, const float *const *q, int32_t rows, const float *keys,
                   int32_t dim, float scale)
{
    int32_t r = 0;

    for (; r + 2 <= rows; r += 2) {
        score_tile(score + r * TILE_KEYS, q + r, keys, dim, scale, 2, 4);
        score_tile(score + r * TILE_KEYS + 32, q + r, keys + 32, dim, scale, 2, 4);
    }
    if (r < rows) {
        score_tile(score + r * TILE_KEYS, q + r, keys, dim, scale, 1, 8);
    }
}

/* Scores outside [lo, hi) count as minus infinity. */
static float softmax(float *s, int32_t lo, int32_t hi, float *max, float *sum)
{
    const __m256 minus = _mm256_set1_ps(-INFINITY);
    __m256 v[TILE_KEYS / 8];
    __m256 best = minus;

    for (int i = 0; i < TILE_KEYS / 8; i++) {
        v[i] = _mm256_load_ps(s + 8 * i);
        if (8 * i < lo || 8 * i + 8 > hi) {
            __m256i at = _mm256_add_epi32(_mm256_set1_epi32(8 * i),
                                          _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), at),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), at));
            v[i] = _mm256_blendv_ps(minus, v[i], _mm256_castsi256_ps(in));
        }
        best = _mm256_max_ps(best, v[i]);
    }
    float old = *max;
    *max = MAX(old, max_lanes(best));
    __m256 m = _mm256_set1_ps(*max);
    __m256 total = _mm256_setzero_ps();
    for (int i = 0; i < TILE_KEYS / 8; i++) {
        __m256 p = exp8(_mm256_sub_ps(v[i], m));
        _mm256_store_ps(s + 8 * i, p);
        total = _mm256_add_ps(total, p);
    }
    float keep = old == *max ? 1.0f : expf(old - *max);
    *sum = *sum * keep + sum_lanes(total);
    return keep;
}

/* Columns [0, 8 n_v) of n_rows rows of acc in registers while the keys go by. */
INLINE void accumulate_tile(float *acc, int32_t stride, const float *keep, const float *p,
                            const void *const *value, int32_t lo, int32_t hi, int64_t at,
                            const enum dtype t, const int n_rows, const int n_v)
{
    __m256 a[8];

#pragma GCC unroll 8
    for (int i = 0; i < n_rows * n_v; i++) {
        a[i] = _mm256_mul_ps(_mm256_loadu_ps(acc + i / n_v * stride + at + i % n_v * 8),
                             _mm256_set1_ps(keep[i / n_v]));
    }
    for (int32_t j = lo; j < hi; j++) {
        __m256 v[8];
#pragma GCC unroll 8
        for (int i = 0; i < n_v; i++) {
            v[i] = load8(value[j], t, at + 8 * i);
        }
#pragma GCC unroll 2
        for (int r = 0; r < n_rows; r++) {
            __m256 w = _mm256_broadcast_ss(p + r * TILE_KEYS + j);
#pragma GCC unroll 8
            for (int i = 0; i < n_v; i++) {
                a[r * n_v + i] = _mm256_fmadd_ps(w, v[i], a[r * n_v + i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_rows * n_v; i++) {
        _mm256_storeu_ps(acc + i / n_v * stride + at + i % n_v * 8, a[i]);
    }
}

INLINE void accumulate_rows(float *acc, int32_t dim, const float *keep, const float *p,
                            const void *const *value, int32_t lo, int32_t hi, const enum dtype t,
                            const int n_rows)
{
    int32_t at = 0;

    for (; at + 32 <= dim; at += 32) {
        accumulate_tile(acc, dim, keep, p, value, lo, hi, at, t, n_rows, 4);
    }
    for (; at + 8 <= dim; at += 8) {
        accumulate_tile(acc, dim, keep, p, value, lo, hi, at, t, n_rows, 1);
    }
    for (; at < dim; at++) {
        for (int r = 0; r < n_rows; r++) {
            float a = acc[r * dim + at] * keep[r];
            for (int32_t j = lo; j < hi; j++) {
                a = fmaf(p[r * TILE_KEYS + j], dtype_load(value[j], t, at), a);
            }
            acc[r * dim + at] = a;
        }
    }
}

INLINE void accumulate_type(float *acc, int32_t dim, const float *keep, const float *p,
                            int32_t rows, const void *const *value, int32_t lo, int32_t hi,
                            const enum dtype t)
{
    int32_t r = 0;

    for (; r + 2 <= rows; r += 2) {
        accumulate_rows(acc + (int64_t)r * dim, dim, keep + r, p + r * TILE_KEYS, value, lo, hi, t,
                        2);
    }
    if (r < rows) {
        accumulate_rows(acc + (int64_t)r * dim, dim, keep + r, p + r * TILE_KEYS, value, lo, hi, t,
                        1);
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

void cpu_attention_avx2(struct cpu_kernels *k)
{
    k->transpose_keys = transpose_keys;
    k->scores = scores;
    k->softmax = softmax;
    k->accumulate = accumulate;
}
