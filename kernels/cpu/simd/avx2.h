/* Vector primitives of AVX2: what rows_vec.h and attention_vec.h need (vec_*, the same
 * names as in neon.h), and what the tiles and panels of AVX2 and AVX-512 share. */
#ifndef QUIRE_KERNELS_CPU_SIMD_AVX2_H
#define QUIRE_KERNELS_CPU_SIMD_AVX2_H

#ifdef __AVX2__ /* empty where a header is compiled alone, without -mavx2 */

#include <immintrin.h>

#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/fetch.h"
#include "kernels/cpu/simd/kernels.h"

#define VEC_LANES 8
typedef __m256 vec;

INLINE vec vec_set1(float x)
{
    return _mm256_set1_ps(x);
}

INLINE vec vec_broadcast(const float *x)
{
    return _mm256_broadcast_ss(x);
}

INLINE vec vec_load(const float *x)
{
    return _mm256_loadu_ps(x);
}

/* x a multiple of the vector's size. */
INLINE vec vec_load_aligned(const float *x)
{
    return _mm256_load_ps(x);
}

INLINE void vec_store(float *x, vec v)
{
    _mm256_storeu_ps(x, v);
}

INLINE void vec_store_aligned(float *x, vec v)
{
    _mm256_store_ps(x, v);
}

INLINE vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

INLINE vec vec_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}

INLINE vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

INLINE vec vec_max(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}

/* a * b + c, rounded once. */
INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

/* The sum of the lanes, always in the same tree. */
static inline float vec_sum(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* The greatest lane. */
static inline float vec_max_lane(__m256 v)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* e^x for x <= 88, 0 below -87.3; relative error about 1e-7. Range reduction and
 * polynomial of Cephes. */
static inline __m256 vec_exp(__m256 x)
{
    __m256 low = _mm256_cmp_ps(x, _mm256_set1_ps(-87.3f), _CMP_LT_OQ);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);

    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    __m256i e =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(low, _mm256_mul_ps(p, _mm256_castsi256_ps(e)));
}

/* The values of eight codes of e4m3, by way of float16: the codes' bits in their places
 * are the values times 2^-8. */
INLINE __m256 vec_of_e4m3(__m128i codes)
{
    const __m128i all = _mm_set1_epi16(0x7F);
    __m128i w = _mm_cvtepu8_epi16(codes), rest = _mm_and_si128(w, all);
    __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(rest, all), _mm_set1_epi16(0x7E00));
    __m128i sign = _mm_slli_epi16(_mm_andnot_si128(all, w), 8);
    __m128i h = _mm_or_si128(_mm_or_si128(sign, nan), _mm_slli_epi16(rest, 7));

    return _mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256));
}

/* Elements [i, i + VEC_LANES) of an array of t. */
INLINE __m256 vec_load_type(const void *x, enum dtype t, int64_t i)
{
    if (t == DTYPE_F32) {
        return _mm256_loadu_ps((const float *)x + i);
    }
    if (t == DTYPE_F8 || t == DTYPE_I8) {
        __m128i codes = _mm_loadl_epi64((const __m128i *)((const uint8_t *)x + i));
        return t == DTYPE_F8 ? vec_of_e4m3(codes) : _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    }
    __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i));
    return t == DTYPE_F16 ? _mm256_cvtph_ps(h)
                          : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* Sixteen floats of x in the order in which stored elements of type t reach the lanes:
 * for bfloat16 the even ones first. */
INLINE void split16(__m256 ret[2], const float *x, enum dtype t)
{
    ret[0] = _mm256_loadu_ps(x);
    ret[1] = _mm256_loadu_ps(x + 8);
    if (t == DTYPE_BF16) {
        __m256 even = _mm256_shuffle_ps(ret[0], ret[1], 0x88); /* a0 a2 b0 b2 | a4 a6 b4 b6 */
        __m256 odd = _mm256_shuffle_ps(ret[0], ret[1], 0xDD);
        ret[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xD8));
        ret[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xD8));
    }
}

/* Transpose 8 x 8 floats. */
INLINE void vec_transpose(__m256 r[8])
{
    __m256 a[8];

#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        a[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        a[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        r[i] = a[i];
    }
}

/* Prefetch the next n lines of the next panel's stored rows. */
INLINE void prefetch_lines(struct line_prefetch *w, int32_t n)
{
    for (int32_t i = 0; i < n && w->left > 0; i++, w->left--) {
        _mm_prefetch(w->at, _MM_HINT_T1);
        w->at += 64;
        if (++w->in_row == w->row_lines) {
            w->in_row = 0;
            w->at += w->skip;
        }
    }
}

#endif
#endif
