/* Values of weights in groups (groups.h), in registers. */
#ifndef QUIRE_KERNELS_CUDA_QUANT_GROUPS_CUH
#define QUIRE_KERNELS_CUDA_QUANT_GROUPS_CUH

#include "kernels/cuda/quant/codes.cuh"
#include "kernels/cuda/quant/groups.h"
#include "kernels/cuda/quant/panels.h"

/* Two floats as two bf16, rounded to the nearest; `low` in the lower half. */
__device__ __forceinline__ uint32_t group_pair(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);

    return *(uint32_t *)&v;
}

/* What a group's codes are multiplied by and what is added. */
struct group_scale {
    float scale, minus; /* minus = -scale * zero point */

    /* Of 16 of a word's 32 columns, which are its second half or not. */
    template <int KIND>
    __device__ __forceinline__ static group_scale of(uint32_t word, bool halves, bool second)
    {
        float upper = __half2float(__ushort_as_half((unsigned short)(word >> 16)));
        float lower = __half2float(__ushort_as_half((unsigned short)word));
        float fixed = KIND == GROUPS_4 ? GROUPS_ZERO_4 : GROUPS_ZERO_8;
        group_scale g;

        g.scale = KIND != GROUPS_LEVELS && halves && second ? lower : upper;
        g.minus = -g.scale * (KIND == GROUPS_LEVELS || halves ? fixed : lower);
        return g;
    }
    /* Of GROUPS_2, by the words of groups i & ~1 and i | 1 for group i. */
    __device__ __forceinline__ static group_scale of_two(uint32_t even, uint32_t odd, int i,
                                                         bool second)
    {
        uint32_t nibbles = (i % 2 ? odd : even) >> (second ? 8 : 0);
        group_scale g;

        g.scale =
            __half2float(__ushort_as_half((unsigned short)(even >> 16))) * (float)(nibbles & 15);
        g.minus = -__half2float(__ushort_as_half((unsigned short)(odd >> 16))) *
                  (float)(nibbles >> 4 & 15);
        return g;
    }
};

/* The value of a byte of a word: the byte becomes the last bits of 2^15 + code, so
 * that nothing is rounded before the end. */
__device__ __forceinline__ float group_byte(uint32_t word, int i, const group_scale &g)
{
    float code = __uint_as_float(__byte_perm(word, 0x47u, 0x4505 + i * 16)) - 0x1p15f;

    return fmaf(code, g.scale, g.minus);
}

/* The levels of four codes, plus 128: of the upper or the lower half of a word. A
 * selection by four bits has eight bytes alone: its fourth bit repeats a sign. */
__device__ __forceinline__ uint32_t group_levels(uint32_t word, bool upper)
{
    uint32_t v = upper ? word >> 16 : word, place = v & 0x7777u;
    uint32_t least = __byte_perm(0x3f2d1801u, 0x766a5d4fu, place),
             most = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, place);

    return __byte_perm(least, most, (v & 0x8888u) >> 1 | 0x3210u);
}

/* The values of two neighbours of GROUPS_4: nibbles I and I + 4 of a word, which a
 * shift brings to where they are the last bits of 2048 + code or 128 + code. The sum of
 * these and the zero point times the scale is off by 2^-13 of a scale at most. */
struct group_nibbles {
    float scale, of_2048, of_128;

    __device__ __forceinline__ explicit group_nibbles(const group_scale &g)
        : scale(g.scale), of_2048(fmaf(-2048.0f, g.scale, g.minus)),
          of_128(fmaf(-128.0f, g.scale, g.minus))
    {
    }
    __device__ __forceinline__ float even(uint32_t v) const /* bits 12 to 15 */
    {
        return fmaf(__uint_as_float((v & 0x0000f000u) | 0x45000000u), scale, of_2048);
    }
    __device__ __forceinline__ float odd(uint32_t v) const /* bits 16 to 19 */
    {
        return fmaf(__uint_as_float((v & 0x000f0000u) | 0x43000000u), scale, of_128);
    }
    /* Nibbles 0 and 4, 1 and 5; of the second half 2 and 6, 3 and 7. */
    __device__ __forceinline__ void pairs(uint32_t word, bool second, uint32_t &first,
                                          uint32_t &next) const
    {
        uint32_t low = second ? word << 4 : word << 12, high = second ? word >> 12 : word >> 4;

        first = group_pair(even(low), even(high));
        next = group_pair(odd(low), odd(high));
    }
};

/* ---- panels (panels.h) ---- */

/* What the words of panels are in groups.h. */
template <int KIND>
constexpr int GROUPS_OF = KIND == PANELS_GROUPS_8 ? GROUPS_8
                          : KIND == PANELS_LEVELS ? GROUPS_LEVELS
                                                  : GROUPS_4;

/* Eight neighbours of a panel's row, times its factor to come: those of lane / 4, the
 * columns 8 * (lane % 4) and after of a group. */
template <int KIND> struct panel_eight {
    static constexpr bool BYTES = KIND == PANELS_GROUPS_8, PAIRED = KIND == PANELS_GROUPS_2;
    uint32_t v, more, word, odd; /* more: of bytes; odd: of PANELS_GROUPS_2 */

    /* `codes`, `scales`: where the group's begin in shared memory, the i-th of its
     * row. */
    __device__ __forceinline__ void load(uint32_t codes, uint32_t scales, int i, int lane)
    {
        uint32_t row = lane >> 2;

        if constexpr (BYTES) {
            asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                         : "=r"(v), "=r"(more)
                         : "r"(codes + lane * 8)
                         : "memory");
        } else {
            v = load_word(codes + lane * 4);
        }
        if constexpr (KIND == PANELS_FP4 || KIND == PANELS_NVFP4) {
            uint32_t at = KIND == PANELS_FP4 ? row : row * 2 + (lane >> 1 & 1);
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(word) : "r"(scales + at) : "memory");
        } else if constexpr (PAIRED) {
            uint32_t even = scales + row * 4 - i % 2 * (PANEL_ROWS * 4);
            word = load_word(even);
            odd = load_word(even + PANEL_ROWS * 4);
        } else {
            word = load_word(scales + row * 4);
        }
    }
    __device__ __forceinline__ uint4 values(bool halves, int i, int lane) const
    {
        bool second = lane & 2;

        if constexpr (KIND == PANELS_FP4 || KIND == PANELS_NVFP4) {
            uint32_t f = fp4_factor < KIND == PANELS_FP4 ? 32 : 16 > (word);
            return make_uint4(fp4_values(fp4_pair(v, 0), f), fp4_values(fp4_pair(v, 1), f),
                              fp4_values(fp4_pair(v, 2), f), fp4_values(fp4_pair(v, 3), f));
        } else if constexpr (KIND == PANELS_GROUPS_4 || PAIRED) {
            group_nibbles n(PAIRED ? group_scale::of_two(word, odd, i, second)
                                   : group_scale::of<GROUPS_4>(word, halves, second));
            uint4 ret;
            n.pairs(v, false, ret.x, ret.y);
            n.pairs(v, true, ret.z, ret.w);
            return ret;
        } else {
            group_scale g = group_scale::of<GROUPS_OF<KIND>>(word, halves, second);
            uint32_t low = BYTES ? v : group_levels(v, false),
                     high = BYTES ? more : group_levels(v, true);
            return make_uint4(group_pair(group_byte(low, 0, g), group_byte(low, 1, g)),
                              group_pair(group_byte(low, 2, g), group_byte(low, 3, g)),
                              group_pair(group_byte(high, 0, g), group_byte(high, 1, g)),
                              group_pair(group_byte(high, 2, g), group_byte(high, 3, g)));
        }
    }
};

#endif
