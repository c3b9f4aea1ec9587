/* Stored codes to bf16 in registers, exactly. */
#ifndef QUIRE_KERNELS_CUDA_QUANT_CODES_CUH
#define QUIRE_KERNELS_CUDA_QUANT_CODES_CUH

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/quant/fp4_order.h"

__device__ __forceinline__ uint32_t load_word(uint32_t shared_at)
{
    uint32_t v;

    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_at) : "memory");
    return v;
}

/* Sign, exponent and mantissa of two e4m3 codes, in their places of bf16, as values:
 * the product makes up for the exponents' biases, also of subnormal codes. */
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t bits)
{
    __nv_bfloat162 bias = __floats2bfloat162_rn(0x1p120f, 0x1p120f),
                   x = __hmul2(*(__nv_bfloat162 *)&bits, bias);

    return *(uint32_t *)&x;
}

/* Eight neighbouring e4m3 codes, each four in the order 0 2 1 3: the even ones are
 * moved up by products, which have a pipe of their own. */
__device__ __forceinline__ uint4 e4m3_values(uint32_t a, uint32_t b)
{
    const uint32_t word[2] = {a, b};
    uint32_t out[4];

#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t w = word[i];
        out[2 * i] = e4m3_pair(((w * 16) & 0x07f007f0u) | ((w * 256) & 0x80008000u));
        out[2 * i + 1] = e4m3_pair(((w >> 4) & 0x07f007f0u) | (w & 0x80008000u));
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

/* to[0 .. 2) = scale times the two values of bf16 in `two`. */
template <typename T> __device__ __forceinline__ void store_pair(T *to, float scale, uint32_t two)
{
    to[0] = from_float<T>(scale * __uint_as_float(two << 16));
    to[1] = from_float<T>(scale * __uint_as_float(two & 0xffff0000u));
}

/* ---- e2m1 ---- */

/* The i-th two neighbours of a word of segments of FORMAT_FP4: sign, exponent and
 * mantissa of each in their places of bf16, so the value times 2^-126. The first two
 * lie as a mask wants them, the second three places below, the others rotated. Of
 * these the last has the bits between, from the lowest: upper bit of the exponent,
 * sign, -, mantissa, lower bit of the exponent. One product moves them up by 8, 14 and
 * 3 places, so that no two of the bits that it makes meet. Products have a pipe of
 * their own; shifts share that of the masks. */
__device__ __forceinline__ uint32_t fp4_pair(uint32_t v, int i)
{
    uint32_t turned = __funnelshift_r(v, v, FP4_TURN);

    return (i == 0   ? v
            : i == 1 ? v * 8
            : i == 2 ? turned
                     : (turned & 0x001b001bu) * 0x4108u) &
           0x81c081c0u;
}

/* A scale's byte (fp4_scales.h) as bf16 times 2^126, twice. GROUP: columns that share
 * it. */
template <int GROUP> __device__ __forceinline__ uint32_t fp4_factor(uint32_t byte)
{
    return GROUP == 16 ? byte * 0x00100010u + 0x6f006f00u : byte * 0x00800080u;
}

/* That of byte i of a word. */
template <int GROUP> __device__ __forceinline__ uint32_t fp4_factor_of(uint32_t word, int i)
{
    uint32_t two = __byte_perm(word, 0, 0x4040 + i * 0x0101);

    return GROUP == 16 ? two * 16 + 0x6f006f00u : two * 128;
}

/* Values of two codes, exactly: three bits of mantissa times one or four. */
__device__ __forceinline__ uint32_t fp4_values(uint32_t bits, uint32_t factor)
{
    __nv_bfloat162 x = __hmul2(*(__nv_bfloat162 *)&bits, *(__nv_bfloat162 *)&factor);

    return *(uint32_t *)&x;
}

/* ---- int4 ---- */

/* A group of QUANT_SEGMENTS, by its word. */
struct int4_group {
    float scale;
    uint32_t zero; /* 128 + zero point, twice */

    int4_group(void) = default;
    __device__ __forceinline__ int4_group(uint32_t word, bool f16)
    {
        scale = f16 ? __half2float(__ushort_as_half((unsigned short)(word >> 16)))
                    : __uint_as_float(word & 0xffff0000u);
        zero = __byte_perm(word, word, 0x1010);
    }
    /* By the word of a group of panels (panels.h). */
    __device__ __forceinline__ explicit int4_group(uint32_t word)
    {
        scale = __uint_as_float(word & 0xfffffff0u);
        zero = (word & 15) * 0x00010001u | 0x43004300u;
    }
    /* Code minus zero point of the i-th two neighbours of a word. 128 + code is exact
     * in bf16: its last four bits of mantissa are the code. */
    __device__ __forceinline__ uint32_t pair(uint32_t v, int i) const
    {
        uint32_t bits; /* (v >> 4 * i & 0x000f000f) | 0x43004300, in one instruction */

        asm("lop3.b32 %0, %1, %2, %3, 0xea;"
            : "=r"(bits)
            : "r"(v >> (4 * i)), "r"(0x000f000fu), "r"(0x43004300u));
        __nv_bfloat162 x = __hsub2(*(__nv_bfloat162 *)&bits, *(const __nv_bfloat162 *)&zero);
        return *(uint32_t *)&x;
    }
    /* Likewise of all eight codes. */
    __device__ __forceinline__ uint4 values(uint32_t v) const
    {
        return make_uint4(pair(v, 0), pair(v, 1), pair(v, 2), pair(v, 3));
    }
};

#endif
