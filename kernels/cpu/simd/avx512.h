/* Shared by the two AVX-512 tile files: the tile for rows of x packed as floats. */
#ifndef QUIRE_KERNELS_CPU_SIMD_AVX512_H
#define QUIRE_KERNELS_CPU_SIMD_AVX512_H

#ifdef __AVX512F__ /* empty where a header is compiled alone, without -mavx512f */

#include <immintrin.h>
#include <string.h>

#include "kernels/cpu/simd/avx2.h"

/* Lower half + upper half. */
INLINE __m256 fold16(__m512 a)
{
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}

/* The sums over the lanes of four accumulators, always in the same tree. */
INLINE __m128 sum4(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m256 s =
        _mm256_hadd_ps(_mm256_hadd_ps(fold16(a), fold16(b)), _mm256_hadd_ps(fold16(c), fold16(d)));

    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* Of four registers, the elements i of each next to one another: 128 bits q of r[j]
 * become those of column 4 q + j. */
INLINE void transpose4(__m512 r[4])
{
    __m512d low[2] = {_mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1])),
                      _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]))};
    __m512d high[2] = {_mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1])),
                       _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]))};

    r[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low[0], low[1]));
    r[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low[0], low[1]));
    r[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high[0], high[1]));
    r[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high[0], high[1]));
}

/* Transpose sixteen registers of sixteen words. */
INLINE void transpose16(__m512 r[16])
{
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        transpose4(r + i);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512 even0 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
        __m512 odd0 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xDD);
        __m512 even1 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
        __m512 odd1 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xDD);
        r[j] = _mm512_shuffle_f32x4(even0, even1, 0x88);
        r[4 + j] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
        r[8 + j] = _mm512_shuffle_f32x4(even0, even1, 0xDD);
        r[12 + j] = _mm512_shuffle_f32x4(odd0, odd1, 0xDD);
    }
}

/* Write the n_w x n_x accumulators as [n_w][n_x]. */
INLINE void put_tile(float *sum, const __m512 *acc, const int n_w, const int n_x, bool add)
{
    /* where n_x is 3, the fourth float belongs to the next row, which is written
     * next */
    const int step = n_x == 3 ? 3 : 4;

#pragma GCC unroll 8
    for (int i = 0; i < n_w * n_x; i += step) {
        __m128 s =
            sum4(acc[i], acc[i + 1], acc[i + 2], n_x == 3 ? _mm512_setzero_ps() : acc[i + 3]);
        _mm_storeu_ps(sum + i, add ? _mm_add_ps(_mm_loadu_ps(sum + i), s) : s);
    }
}

/* Pack thirty-two floats in the order in which stored elements of type t reach the
 * lanes: for bfloat16 the even ones first. */
INLINE void pack32(float *out, const float *x, enum dtype t)
{
    __m512 a = _mm512_loadu_ps(x);
    __m512 b = _mm512_loadu_ps(x + 16);

    if (t == DTYPE_BF16) {
        const __m512i even =
            _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        __m512 e = _mm512_permutex2var_ps(a, even, b);
        b = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
        a = e;
    }
    _mm512_store_ps(out, a);
    _mm512_store_ps(out + 16, b);
}

/* cpu_tiles' pack, as floats. */
INLINE void pack_floats(float *to, const float *const *x, int32_t n_x, int32_t n, enum dtype t)
{
    for (int32_t at = 0; at < n; at += TILE_CHUNK) {
        for (int32_t j = 0; j < n_x; j++, to += TILE_CHUNK) {
            float last[TILE_CHUNK] = {0};
            const float *from = x[j] + at;
            if (at + TILE_CHUNK > n) {
                memcpy(last, from, (size_t)(n - at) * sizeof(*last));
                from = last;
            }
            pack32(to, from, t);
        }
    }
}

/* Of thirty-two stored elements, those that are multiplied with elements [0, 16) and
 * [16, 32) of packed x. */
INLINE __m512 stored_low(const void *w, enum dtype t)
{
    if (t == DTYPE_BF16) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(w), 16));
    }
    return t == DTYPE_F16 ? _mm512_cvtph_ps(_mm256_loadu_si256(w)) : _mm512_loadu_ps(w);
}

INLINE __m512 stored_high(const void *w, enum dtype t)
{
    if (t == DTYPE_BF16) {
        return _mm512_castsi512_ps(
            _mm512_and_si512(_mm512_loadu_si512(w), _mm512_set1_epi32(-65536)));
    }
    return t == DTYPE_F16 ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w + 1))
                          : _mm512_loadu_ps((const float *)w + 16);
}

enum { FLOAT_TILE_SUMS = 24 };

/* One tile against rows of x packed as floats: n_w rows of w, n_x of x, n_chunks chunks
 * of 32 elements. */
INLINE void float_tile(float *sum, const char *const *w, const float *x, const enum dtype t,
                       const int n_w, const int n_x, int32_t n_chunks, bool add,
                       struct fetch *fetch)
{
    const int width = t == DTYPE_F32 ? 128 : 64; /* bytes of a chunk of a stored row */
    __m512 acc[FLOAT_TILE_SUMS];
    struct fetch ahead = *fetch;
    const char *row[8];

#pragma GCC unroll 24
    for (int i = 0; i < n_w * n_x; i++) {
        acc[i] = _mm512_setzero_ps();
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++) {
        row[i] = w[i];
    }
    for (int32_t c = 0; c < n_chunks; c++, x += n_x * TILE_CHUNK) {
        fetch_chunk(&ahead, row, n_w, width / 64);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            __m512 v[TILE_ROWS];
#pragma GCC unroll 4
            for (int j = 0; j < n_x; j++) {
                v[j] = _mm512_load_ps(x + j * TILE_CHUNK + part * 16);
            }
#pragma GCC unroll 8
            for (int i = 0; i < n_w; i++) {
                __m512 u = part == 0 ? stored_low(row[i], t) : stored_high(row[i], t);
#pragma GCC unroll 4
                for (int j = 0; j < n_x; j++) {
                    acc[i * n_x + j] = _mm512_fmadd_ps(u, v[j], acc[i * n_x + j]);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < n_w; i++) {
            row[i] += width;
        }
    }
    *fetch = ahead;
    put_tile(sum, acc, n_w, n_x, add);
}

#endif
#endif
