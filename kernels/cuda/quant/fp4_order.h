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

enum { FP4_TURN = 10 }; /* bits by which the last two of each half are rotated */

/* The bits of a code, as the i-th of the lower half of a word or of the upper one. */
FP4_FN uint32_t fp4_placed(uint32_t code, int i, bool upper)
{
    uint32_t sign = code >> 3, low = code & 7, half = upper ? 16 : 0, v;

    if (i < 2) { /* a product moves the second ones up */
        return (low << 6 | sign << 15) >> 3 * i << half;
    }
    v = i == 2 ? low << 6 | sign << 15
               : low >> 2 | sign << 1 | (low & 1) << 3 | (low >> 1 & 1) << 4;
    v <<= half;
    return v << FP4_TURN | v >> (32 - FP4_TURN);
}

#endif
