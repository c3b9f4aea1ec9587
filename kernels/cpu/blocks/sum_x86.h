/* The end of all sums of products with blocks and codes. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_SUM_X86_H
#define QUIRE_KERNELS_CPU_BLOCKS_SUM_X86_H

#ifdef __AVX2__ /* empty where a header is compiled alone */

#include <immintrin.h>

#include "kernels/cpu/simd/fetch.h"

/* The end of the tree: eight lanes, in halves. */
INLINE float sum_lanes(__m256 v)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

#endif
#endif
