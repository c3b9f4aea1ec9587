/* Where the bits of FP4 codes lie in a word of eight, as fp4_pair (codes.cuh) reads
 * them: one definition for what packs on the host and on the device. */
#ifndef QUIRE_KERNELS_CUDA_QUANT_FP4_ORDER_H
#define QUIRE_KERNELS_CUDA_QUANT_FP4_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define FP4_FN static __host__ __device__ __forceinline__
#else
#define FP4_FN static inline
#endif

/* The bits of a code, as the i-th of the lower half of a word or of the upper one. */
FP4_FN uint32_t fp4_placed(uint32_t code, int i, bool upper)
{
    uint32_t sign = code >> 3, low = code & 7, half = upper ? 16 : 0;

    if (i < 3) { /* rotated */
        uint64_t v = (uint64_t)(low << 6 | sign << 15) << (half + 3 * (uint32_t)i);
        return (uint32_t)(v | v >> 32);
    }
    return (low >> 1 | (low & 1) << 4 | sign << 3) << half;
}

#endif
