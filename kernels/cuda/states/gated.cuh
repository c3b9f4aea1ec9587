/* The gated norm of a recurrence's output (struct gated_norm_args), by element, for
 * the launch of its own (gated.cu) and for decode_heads.cu: roundings are spelled out,
 * since both have the same bits. */
#ifndef QUIRE_KERNELS_CUDA_STATES_GATED_CUH
#define QUIRE_KERNELS_CUDA_STATES_GATED_CUH

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/states/states.h"

__device__ __forceinline__ float silu_of(float x)
{
    return x / (1.0f + expf(-x));
}

/* `squares` and the square of x, gated if the gate comes first. */
__device__ __forceinline__ float add_gated_square(const gated_norm_args &a, float squares, float x,
                                                  float gate)
{
    float v = a.gate_first ? __fmul_rn(x, silu_of(gate)) : x;

    return __fmaf_rn(v, v, squares);
}

/* What a group is multiplied by. */
__device__ __forceinline__ float group_factor(const gated_norm_args &a, float squares)
{
    return 1.0f / sqrtf(__fadd_rn(squares / a.width, a.eps));
}

__device__ __forceinline__ float gated_element(float x, float factor, float weight, float gate)
{
    return __fmul_rn(__fmul_rn(__fmul_rn(x, factor), weight), silu_of(gate));
}

#endif
