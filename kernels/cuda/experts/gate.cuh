/* The middle of an expert's MLP. */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_GATE_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_GATE_CUH

#include "kernels/cuda/common.cuh"

/* act(gate) * up; with a limit gpt-oss's form (struct experts). */
__device__ __forceinline__ float expert_gate(float gate, float up, int act, float limit)
{
    if (limit > 0.0f) {
        /* written so that numbers that are none stay none */
        float g = gate > limit ? limit : gate, u = up > limit ? limit : up < -limit ? -limit : up;
        return __fdividef(g, 1.0f + __expf(-1.702f * g)) * (u + 1.0f);
    }
    return activate(gate, act) * up;
}

#endif
