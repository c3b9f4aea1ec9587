/* Shared by the NEON files: loads and stores of any type and number, exp. */
#ifndef QUIRE_KERNELS_CPU_SIMD_NEON_H
#define QUIRE_KERNELS_CPU_SIMD_NEON_H

#ifdef __aarch64__ /* empty where a header is compiled alone on another machine */

#include <arm_neon.h>
#include <string.h>

#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/fetch.h"
#include "kernels/cpu/simd/kernels.h"

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

/* Elements [i, i + 4) of an array of t. */
INLINE float32x4_t load4(const void *x, const enum dtype t, int64_t i)
{
    if (t == DTYPE_F32) {
        return vld1q_f32((const float *)x + i);
    }
    uint16x4_t h = vld1_u16((const uint16_t *)x + i);
    return t == DTYPE_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(h))
                          : vreinterpretq_f32_u32(vshll_n_u16(h, 16));
}

/* e^x for x <= 88, 0 below -87.3; relative error about 1e-7. Range reduction and
 * polynomial of Cephes. */
INLINE float32x4_t exp4(float32x4_t x)
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

#endif
#endif
