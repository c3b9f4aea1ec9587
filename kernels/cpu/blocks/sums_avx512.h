/* Sums of groups of codes with AVX-512, from vectors that have the sums of four
 * products each. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_SUMS_AVX512_H
#define QUIRE_KERNELS_CPU_BLOCKS_SUMS_AVX512_H

#ifdef __AVX512BW__ /* empty where a header is compiled alone */

#include <immintrin.h>

#include "kernels/cpu/simd/fetch.h"

INLINE __m512 join(const __m256 v[2])
{
    return _mm512_insertf32x8(_mm512_castps256_ps512(v[0]), v[1], 1);
}

/* The four sums of each 16 bytes of a and b added pairwise. */
INLINE __m512i add_pairs(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

/* The sums of each 16 codes of vectors that have two groups of 32, in the order
 * 0 4 8 12 1 5 ... */
INLINE __m512i sums_of_vectors(__m512i a, __m512i b, __m512i c, __m512i d)
{
    a = add_pairs(a, b);
    c = add_pairs(c, d);
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
}

/* These in ascending order. */
INLINE __m512i halves_of_sums(__m512i sum)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);

    return _mm512_permutexvar_epi32(order, sum);
}

/* Those of groups of 32. */
INLINE __m256i pairs_of_sums(__m512i sum)
{
    const __m512i first = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i last = _mm512_setr_epi32(4, 12, 5, 13, 6, 14, 7, 15, 0, 0, 0, 0, 0, 0, 0, 0);

    return _mm256_add_epi32(_mm512_castsi512_si256(_mm512_permutexvar_epi32(first, sum)),
                            _mm512_castsi512_si256(_mm512_permutexvar_epi32(last, sum)));
}

/* Eight numbers, each twice. */
INLINE __m512 twice(const float *v)
{
    const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);

    return _mm512_permutexvar_ps(order, _mm512_castps256_ps512(_mm256_load_ps(v)));
}

#endif
#endif
