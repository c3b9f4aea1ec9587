/* Accumulators of products with codes whose scales are apart, with AVX-512. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_CODES_SUMS_AVX512_H
#define QUIRE_KERNELS_CPU_BLOCKS_CODES_SUMS_AVX512_H

#include "kernels/cpu/blocks/codes_x86.h"
#include "kernels/cpu/blocks/sums_avx512.h"

#ifdef __AVX512BW__ /* empty where a header is compiled alone */

enum { PAIRS = GROUPS / 2 };

/* Accumulators of groups of 16; of groups of 32 in the lower half. */
struct sums {
    __m512 acc[TILE_ROWS];
};

INLINE __m512i times(__m512i v, const int by)
{
    return by == 16    ? _mm512_slli_epi32(v, 4)
           : by == 128 ? _mm512_slli_epi32(v, 7)
                       : _mm512_mullo_epi32(v, _mm512_set1_epi32(by));
}

/* Add the sums of eight groups of 32. */
INLINE __m512 add_groups(__m512 acc, __m256i sum, const int above, const float *scale,
                         const float *min, const struct act_block *x, const bool minima)
{
    __m256 by = _mm256_mul_ps(_mm256_loadu_ps(scale), _mm256_load_ps(x->scale));

    if (above > 0) {
        __m256i total = _mm256_load_si256((const __m256i *)x->total32);
        sum = _mm256_sub_epi32(sum,
                               _mm512_castsi512_si256(times(_mm512_castsi256_si512(total), above)));
    }
    __m256 to = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), by, _mm512_castps512_ps256(acc));
    if (minima) {
        to = _mm256_fnmadd_ps(_mm256_loadu_ps(min), _mm256_load_ps(x->sum32), to);
    }
    return _mm512_castps256_ps512(to);
}

/* The same of sixteen groups of 16. */
INLINE __m512 add_halves(__m512 acc, __m512i sum, const int above, const float *scale,
                         const float *min, const struct act_block *x, const bool minima)
{
    if (above > 0) {
        sum = _mm512_sub_epi32(sum, times(_mm512_load_si512(x->total16), above));
    }
    __m512 by = _mm512_mul_ps(_mm512_loadu_ps(scale), twice(x->scale));
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), by, acc);
    return minima ? _mm512_fnmadd_ps(_mm512_loadu_ps(min), _mm512_load_ps(x->sum16), acc) : acc;
}

INLINE void clear_sums(struct sums *s, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        s->acc[j] = _mm512_setzero_ps();
    }
}

INLINE void put_sums(float *out, const struct sums *s, const int n_x, const int group)
{
    for (int j = 0; j < n_x; j++) {
        __m256 low = _mm512_castps512_ps256(s->acc[j]);
        out[j] =
            sum_lanes(group == 32 ? low : _mm256_add_ps(low, _mm512_extractf32x8_ps(s->acc[j], 1)));
    }
}

#endif
#endif
