/* The inner loops of attention for NEON (see attention_vec.h). */
#include <math.h>

#include "kernels/cpu/simd/neon.h"

enum { SCORE_KEYS = TILE_KEYS / 2, ACCUMULATE_ROWS = 1 };

INLINE vec vec_between(vec v, int32_t first, int32_t lo, int32_t hi, vec other)
{
    static const int32_t steps[4] = {0, 1, 2, 3};
    int32x4_t at = vaddq_s32(vdupq_n_s32(first), vld1q_s32(steps));
    uint32x4_t in = vandq_u32(vcgeq_s32(at, vdupq_n_s32(lo)), vcltq_s32(at, vdupq_n_s32(hi)));

    return vbslq_f32(in, v, other);
}

#include "kernels/cpu/simd/attention_vec.h"

void cpu_attention_neon(struct cpu_kernels *k)
{
    k->transpose_keys = transpose_keys;
    k->scores = scores;
    k->softmax = softmax;
    k->accumulate = accumulate;
}
