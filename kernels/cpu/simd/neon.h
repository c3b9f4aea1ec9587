/* Vector primitives of NEON: what rows_vec.h and attention_vec.h need (vec_*, the same
 * names as in avx2.h). */
#ifndef QUIRE_KERNELS_CPU_SIMD_NEON_H
#define QUIRE_KERNELS_CPU_SIMD_NEON_H

#ifdef __aarch64__ /* empty where a header is compiled alone on another machine */

#include <arm_neon.h>
#include <string.h>

#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/fetch.h"
#include "kernels/cpu/simd/kernels.h"

#define VEC_LANES 4
typedef float32x4_t vec;

INLINE vec vec_set1(float x)
{
    return vdupq_n_f32(x);
}

INLINE vec vec_broadcast(const float *x)
{
    return vld1q_dup_f32(x);
}

INLINE vec vec_load(const float *x)
{
    return vld1q_f32(x);
}

/* x a multiple of the vector's size. */
INLINE vec vec_load_aligned(const float *x)
{
    return vld1q_f32(x);
}

INLINE void vec_store(float *x, vec v)
{
    vst1q_f32(x, v);
}

INLINE void vec_store_aligned(float *x, vec v)
{
    vst1q_f32(x, v);
}

INLINE vec vec_add(vec a, vec b)
{
    return vaddq_f32(a, b);
}

INLINE vec vec_sub(vec a, vec b)
{
    return vsubq_f32(a, b);
}

INLINE vec vec_mul(vec a, vec b)
{
    return vmulq_f32(a, b);
}

INLINE vec vec_max(vec a, vec b)
{
    return vmaxq_f32(a, b);
}

/* a * b + c, rounded once. */
INLINE vec vec_fma(vec a, vec b, vec c)
{
    return vfmaq_f32(c, a, b);
}

/* The sum of the lanes, always in the same tree. */
INLINE float vec_sum(vec v)
{
    return vaddvq_f32(v);
}

/* The greatest lane. */
INLINE float vec_max_lane(vec v)
{
    return vmaxvq_f32(v);
}

/* Up to four floats, n >= 1; lanes beyond are 0. */
INLINE float32x4_t load_some(const float *x, int32_t n)
{
    float v[4] = {0};

    if (n >= 4) {
        return vld1q_f32(x);
    }
    memcpy(v, x, (size_t)n * sizeof(*v));
    return vld1q_f32(v);
}

/* The first n lanes; all four where n >= 4. */
INLINE void store_some(float *x, float32x4_t v, int32_t n)
{
    float some[4];

    if (n >= 4) {
        vst1q_f32(x, v);
    } else {
        vst1q_f32(some, v);
        memcpy(x, some, (size_t)n * sizeof(*x));
    }
}

/* Elements [i, i + VEC_LANES) of an array of t. */
INLINE float32x4_t vec_load_type(const void *x, const enum dtype t, int64_t i)
{
    if (t == DTYPE_F32) {
        return vld1q_f32((const float *)x + i);
    }
    if (t == DTYPE_F8 || t == DTYPE_I8) {
        uint32_t four;
        memcpy(&four, (const uint8_t *)x + i, sizeof(four));
        uint8x8_t codes = vreinterpret_u8_u32(vdup_n_u32(four));
        if (t == DTYPE_I8) {
            int16x4_t w = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(codes)));
            return vcvtq_f32_s32(vmovl_s16(w));
        }
        /* by way of float16: the codes' bits in their places are the values times
         * 2^-8 */
        uint16x4_t w = vget_low_u16(vmovl_u8(codes)), all = vdup_n_u16(0x7F);
        uint16x4_t rest = vand_u16(w, all);
        uint16x4_t nan = vand_u16(vceq_u16(rest, all), vdup_n_u16(0x7E00));
        uint16x4_t sign = vshl_n_u16(vbic_u16(w, all), 8);
        uint16x4_t half = vorr_u16(vorr_u16(sign, nan), vshl_n_u16(rest, 7));
        return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), 256);
    }
    uint16x4_t h = vld1_u16((const uint16_t *)x + i);
    return t == DTYPE_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(h))
                          : vreinterpretq_f32_u32(vshll_n_u16(h, 16));
}

/* e^x for x <= 88, 0 below -87.3; relative error about 1e-7. Range reduction and
 * polynomial of Cephes. */
INLINE float32x4_t vec_exp(float32x4_t x)
{
    uint32x4_t low = vcltq_f32(x, vdupq_n_f32(-87.3f));
    float32x4_t n = vrndnq_f32(vmulq_n_f32(x, 1.44269504f));
    float32x4_t r = vfmsq_f32(x, n, vdupq_n_f32(0.693359375f));

    r = vfmsq_f32(r, n, vdupq_n_f32(-2.12194440e-4f));
    float32x4_t p = vdupq_n_f32(1.9875691500e-4f);
    p = vfmaq_f32(vdupq_n_f32(1.3981999507e-3f), p, r);
    p = vfmaq_f32(vdupq_n_f32(8.3334519073e-3f), p, r);
    p = vfmaq_f32(vdupq_n_f32(4.1665795894e-2f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.6666665459e-1f), p, r);
    p = vfmaq_f32(vdupq_n_f32(5.0000001201e-1f), p, r);
    p = vfmaq_f32(vaddq_f32(r, vdupq_n_f32(1.0f)), vmulq_f32(r, r), p);
    int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vreinterpretq_f32_u32(
        vbicq_u32(vreinterpretq_u32_f32(vmulq_f32(p, vreinterpretq_f32_s32(e))), low));
}

/* Transpose 4 x 4 floats. */
INLINE void vec_transpose(float32x4_t r[4])
{
    float32x4x2_t a = vtrnq_f32(r[0], r[1]);
    float32x4x2_t b = vtrnq_f32(r[2], r[3]);

    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

#endif
#endif
