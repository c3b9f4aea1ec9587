/* Products of float32 operands rounded to tf32, in tiles of 16 x 8 by 8.
 *
 * An accumulator is the left operand of the next product as it is, if that takes the
 * eight columns of a tile in the order 0 2 4 6 1 3 5 7: so matrices that such a product
 * reads lie in memory with their columns in that order (tf32_place). */
#ifndef QUIRE_KERNELS_CUDA_STATES_TF32_CUH
#define QUIRE_KERNELS_CUDA_STATES_TF32_CUH

#include "kernels/cuda/common.cuh"

/* x rounded to tf32. */
__device__ __forceinline__ float tf32_of(float x)
{
    uint32_t y;

    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}

/* Where column i lies. */
__device__ __forceinline__ int tf32_place(int i)
{
    return (i & ~7) | (i >> 1 & 3) | (i & 1) << 2;
}

/* c [16, 8] += a [16, 8] b [8, 8] */
__device__ __forceinline__ void mma1688(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* An accumulator as a left operand. */
__device__ __forceinline__ void tf32_operand(uint32_t (&a)[4], const float (&c)[4])
{
    a[0] = __float_as_uint(tf32_of(c[0]));
    a[1] = __float_as_uint(tf32_of(c[2]));
    a[2] = __float_as_uint(tf32_of(c[1]));
    a[3] = __float_as_uint(tf32_of(c[3]));
}

/* A tile of 8 x 8 elements of 16 bits, two neighbours of a row to a lane, transposed. */
__device__ __forceinline__ uint32_t transposed(uint32_t x)
{
    uint32_t y;

    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

#endif
