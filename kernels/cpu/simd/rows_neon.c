/* The row functions of kernels.h for NEON (see rows_vec.h), four floats at a time.
 * Those that are not here stay plain. */
#include <math.h>

#include "kernels/cpu/simd/neon.h"

/* 1 / (1 + e^-x), from e^-|x| so that nothing overflows. */
INLINE vec vec_sigmoid(vec x)
{
    float32x4_t one = vdupq_n_f32(1.0f);
    float32x4_t e = vec_exp(vnegq_f32(vabsq_f32(x)));

    return vdivq_f32(vbslq_f32(vcltzq_f32(x), e, one), vaddq_f32(one, e));
}

INLINE uint16x4_t to_half(float32x4_t x, enum dtype t)
{
    if (t == DTYPE_F16) {
        return vreinterpret_u16_f16(vcvt_f16_f32(x));
    }
    uint32x4_t u = vreinterpretq_u32_f32(x);
    uint32x4_t lsb = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(vaddq_u32(u, lsb), vdupq_n_u32(0x7FFF));
    uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}

INLINE void vec_store_type(void *out, enum dtype t, int64_t i, vec v)
{
    if (t == DTYPE_F32) {
        vec_store((float *)out + i, v);
    } else if (t == DTYPE_F8 || t == DTYPE_I8) {
        float four[VEC_LANES];
        vec_store(four, v);
        for (int j = 0; j < VEC_LANES; j++) {
            dtype_store(out, t, i + j, four[j]);
        }
    } else {
        vst1_u16((uint16_t *)out + i, to_half(v, t));
    }
}

static float square_sum_row(const float *x, int32_t n, float mean)
{
    float32x4_t m = vdupq_n_f32(mean);
    float32x4_t a = vdupq_n_f32(0);
    int32_t i = 0;

    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vsubq_f32(vld1q_f32(x + i), m);
        a = vfmaq_f32(a, v, v);
    }
    float sum = vaddvq_f32(a);
    for (; i < n; i++) {
        sum += (x[i] - mean) * (x[i] - mean);
    }
    return sum;
}

INLINE vec vec_mul2_sub(vec a, vec b, vec c, vec d)
{
    return vfmsq_f32(vmulq_f32(a, b), c, d);
}

INLINE vec vec_mul2_add(vec a, vec b, vec c, vec d)
{
    return vfmaq_f32(vmulq_f32(a, b), c, d);
}

#include "kernels/cpu/simd/rows_vec.h"

/* ---- scans of logits ---- */

static struct row_scan scan_row(const float *x, int32_t n)
{
    struct row_scan s = {.max = -INFINITY};
    float32x4_t best = vdupq_n_f32(-INFINITY);
    uint32x4_t good = vdupq_n_u32(UINT32_MAX);
    int32_t i = 0;

    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vld1q_f32(x + i);
        best = vmaxnmq_f32(best, v);
        good = vandq_u32(good, vcltq_f32(v, vdupq_n_f32(INFINITY)));
    }
    s.max = vmaxvq_f32(best);
    s.bad = vminvq_u32(good) == 0;
    for (; i < n; i++) {
        s.bad = s.bad || !(x[i] < INFINITY);
        s.max = x[i] > s.max ? x[i] : s.max;
    }
    return s;
}

void cpu_kernels_neon(struct cpu_kernels *k)
{
    k->norm = norm_row;
    k->gate = gate_row;
    k->epilogue = epilogue_row;
    k->load = load_row;
    k->store = store_row;
    k->rotate = rotate_row;
    k->scan = scan_row;
    k->sum_exp = sum_exp_row;
}
