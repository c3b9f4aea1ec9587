/* Rows of activations as e4m3 codes with a scale for each EXPERT_CODES_K columns. */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_TILES_CODE_GROUP_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_TILES_CODE_GROUP_CUH

#include <cuda_fp8.h>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/experts/experts.h"

/* EXPERT_CODES_K values that half a warp holds, eight a lane, as codes: their greatest
 * magnitude is code 448, or with a fixed scale above 0 what is beyond that code is
 * cut. */
struct code_group {
    vec<__nv_bfloat16, 8> v;
    float most, fixed;

    __device__ __forceinline__ code_group(const uint4 &values, float fixed)
        : v(*(const vec<__nv_bfloat16, 8> *)&values), fixed(fixed)
    {
        most = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            most = fmaxf(most, fabsf(to_float(v.v[i])));
        }
#pragma unroll
        for (int i = 8; i > 0; i >>= 1) {
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
        }
    }
    __device__ __forceinline__ float scale(void) const
    {
        return fixed > 0.0f ? fixed : most / 448.0f;
    }
    __device__ __forceinline__ uint2 codes(void) const
    {
        float by = fixed > 0.0f ? 1.0f / fixed : most > 0.0f ? 448.0f / most : 0.0f;
        uint32_t out[2] = {};

#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 f = make_float2(to_float(v.v[2 * i]) * by, to_float(v.v[2 * i + 1]) * by);
            out[i / 2] |= (uint32_t)__nv_cvt_float2_to_fp8x2(f, __NV_SATFINITE, __NV_E4M3)
                          << (i % 2 * 16);
        }
        return make_uint2(out[0], out[1]);
    }
};

/* Groups first, first + step and so on of a->x by half a warp each. All lanes of a warp
 * take part. */
__device__ __forceinline__ void quantise_groups(const expert_quantise &a, int first, int step)
{
    int groups = a.cols / EXPERT_CODES_K, n = a.rows * groups, part = threadIdx.x & 15;

    for (int i = first; (i & ~1) < n; i += step) {
        int at = min(i, n - 1), row = at / groups, group = at - row * groups;
        const __nv_bfloat16 *x = (const __nv_bfloat16 *)a.x + row * a.x_stride;
        code_group g(*(const uint4 *)(x + group * EXPERT_CODES_K + part * 8), a.fixed);
        if (i < n) {
            *(uint2 *)(a.codes + (int64_t)at * EXPERT_CODES_K + part * 8) = g.codes();
            if (part == 0) {
                a.scale[at] = g.scale();
            }
        }
    }
}

#endif
