/* The inner loops of attention for AVX2 (see attention_vec.h). */
#include <immintrin.h>
#include <math.h>

#include "kernels/cpu/simd/avx2.h"

enum { SCORE_KEYS = TILE_KEYS, ACCUMULATE_ROWS = 2 };

INLINE vec vec_between(vec v, int32_t first, int32_t lo, int32_t hi, vec other)
{
    if (first >= lo && first + 8 <= hi) {
        return v;
    }
    __m256i at =
        _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), at),
                                     _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), at));
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(in));
}

#include "kernels/cpu/simd/attention_vec.h"

void cpu_attention_avx2(struct cpu_kernels *k)
{
    k->transpose_keys = transpose_keys;
    k->scores = scores;
    k->softmax = softmax;
    k->accumulate = accumulate;
}
