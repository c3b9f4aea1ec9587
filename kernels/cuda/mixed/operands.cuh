/* Codes to the matrix instruction's operand in registers, a format each: half_codes
 * takes them from a stage, group_scales widens them and has their scales.
 */
#ifndef QUIRE_KERNELS_CUDA_MIXED_OPERANDS_CUH
#define QUIRE_KERNELS_CUDA_MIXED_OPERANDS_CUH

#include "kernels/cuda/fused_decode/small_pipeline.cuh"
#include "kernels/cuda/mixed/mixed.h"
#include "kernels/cuda/mixed/wgmma_mixed.cuh"
#include "kernels/cuda/quant/codes.cuh"
#include "kernels/cuda/quant/quant.h"

enum {
    MIXED_MULTIPLIERS = MIXED_WARPGROUPS * 128,
    MIXED_THREADS = MIXED_MULTIPLIERS + 128, /* and those of which one loads */
    RING_BYTES = 220 * 1024,
    MOST_STAGES = 12,
};

/* A product; the epilogue's part is that of small_rows.cu. */
struct mixed_args {
    small_args s; /* depth_steps: groups of a block's part of the depth */
    /* Of all but FUSED_INT4: scales [n, n_groups] and, of FUSED_INT8, zero points
     * likewise or NULL; n_groups: 1, or one for each 128 columns. */
    const float *w_scale;
    const int8_t *w_zero;
    int32_t n_groups;
    /* Of FUSED_INT4, whose copies need no tensor map: QUANT_SEGMENTS, segments of a row. */
    const char *segments;
    int32_t n_segments;
    int32_t f16_scales;
};

/* F: enum fused_format; N: rows of the activations' operand; WIDTH: of the tile. */
template <int F, int N, int WIDTH> struct mixed_layout {
    static constexpr int TILES = WIDTH / MIXED_ROWS;           /* of 64 weight rows */
    static constexpr int PARTS = MIXED_WARPGROUPS / TILES;     /* of the depth, by warpgroup */
    static constexpr int GROUPS = F == FUSED_INT4 ? 4 : PARTS; /* of a stage of codes */
    /* Bytes between rows of codes, and of 64 rows' codes of a stage. Rows of
     * FUSED_INT4 are whole segments, whose banks differ; others are of one group and
     * swizzled. */
    static constexpr int PITCH = F == FUSED_INT4 ? (int)FUSED_SEGMENT_BYTES : (int)MIXED_GROUP;
    static constexpr int TILE_BYTES = MIXED_ROWS * PITCH * (F == FUSED_INT4 ? 1 : GROUPS);
    static constexpr int STAGE_BYTES = TILES * TILE_BYTES;
    static constexpr int SOURCE_BYTES = N * MIXED_GROUP * 2;
    static constexpr int SOURCES = N < 64 ? 8 : TILES == 4 ? 5 : TILES == 2 ? 7 : 8;
    static constexpr int FIT = (RING_BYTES - SOURCES * SOURCE_BYTES) / STAGE_BYTES;
    static constexpr int STAGES = FIT > MOST_STAGES ? MOST_STAGES : FIT;
    static constexpr int RING = SOURCES * SOURCE_BYTES + STAGES * STAGE_BYTES;
    static constexpr int BARRIERS = 2 * (SOURCES + STAGES);
    static constexpr int BYTES = RING + BARRIERS * 8 + 1024;
    static constexpr int SUM_PITCH = WIDTH + 4; /* floats of a row of sums */

    static_assert(STAGES >= 2, "codes arrive while others are multiplied");
    static_assert(PARTS * N * SUM_PITCH * 4 <= RING, "sums fit");
};

#if HAS_WGMMA

__device__ __forceinline__ uint4 load_vector(uint32_t at)
{
    uint4 v;

    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* A lane's codes of half a group: of two weight rows, 8 apart, the columns 2 t, 2 t + 1,
 * 2 t + 8 and 2 t + 9 of each 16, where t is its number modulo 4. */
template <int F> struct half_codes { /* of eight bits */
    uint32_t low[4][2], high[4][2];  /* of each 16 columns two words; t chooses half of each */

    __device__ __forceinline__ void load(uint32_t tile, int group, int half)
    {
        int lane = threadIdx.x & 31, row = lane >> 2;
        uint32_t at = tile +
                      (group * MIXED_ROWS + (threadIdx.x >> 5 & 3) * 16 + row) * MIXED_GROUP +
                      (lane >> 1 & 1) * 4;

#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t chunk = ((half * 4 + k) ^ row) * 16; /* the 128-byte swizzle */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                low[k][i] = load_word(at + chunk + i * 8);
                high[k][i] = load_word(at + 8 * MIXED_GROUP + chunk + i * 8);
            }
        }
    }
};

template <> struct half_codes<FUSED_INT4> {
    uint4 low[2], high[2]; /* whole words of the rows; t chooses in each word */

    __device__ __forceinline__ void load(uint32_t tile, int group, int half)
    {
        int lane = threadIdx.x & 31;
        uint32_t at = tile +
                      ((threadIdx.x >> 5 & 3) * 16 + (lane >> 2)) * (uint32_t)FUSED_SEGMENT_BYTES +
                      group * 64 + half * 32;

        low[0] = load_vector(at);
        low[1] = load_vector(at + 16);
        high[0] = load_vector(at + 8 * FUSED_SEGMENT_BYTES);
        high[1] = load_vector(at + 8 * FUSED_SEGMENT_BYTES + 16);
    }
};

/* The scales of a group of these two rows, and how their codes are widened. tile, group:
 * as for the codes; row: the weight's, of the lower one; index: the group in its rows. */
template <int F> struct group_scales;

/* The lower row's group in the tensor of scales; the upper one's is 8 * n_groups on. */
__device__ __forceinline__ int64_t group_at(int row, int index, const mixed_args &a)
{
    return (int64_t)row * a.n_groups + (a.n_groups > 1 ? index : 0);
}

template <> struct group_scales<FUSED_FP8> {
    float scale[2];
    uint32_t select; /* spreads two codes over the upper bytes of two values */

    __device__ __forceinline__ group_scales(uint32_t, int, int row, int index, const mixed_args &a)
        : select(threadIdx.x & 1 ? 0x3424 : 0x1404)
    {
        int64_t at = group_at(row, index, a);

        scale[0] = __ldg(a.w_scale + at);
        scale[1] = __ldg(a.w_scale + at + (int64_t)8 * a.n_groups);
    }
    __device__ __forceinline__ uint32_t values(uint32_t word) const
    {
        uint32_t v = __byte_perm(word, 0, select);

        return e4m3_pair((v >> 4 & 0x07f007f0u) | (v & 0x80008000u));
    }
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], const half_codes<FUSED_FP8> &codes,
                                            int k) const
    {
        ret[0] = values(codes.low[k][0]);
        ret[1] = values(codes.high[k][0]);
        ret[2] = values(codes.low[k][1]);
        ret[3] = values(codes.high[k][1]);
    }
};

/* Codes plus 128 become the last bits of 2^23 + n, from which 2^23 + 128 + zero point is
 * taken away; bf16 has the difference exactly. */
template <> struct group_scales<FUSED_INT8> {
    float scale[2], bias[2];
    uint32_t select; /* the first code, then the upper bytes of 2^23 */

    __device__ __forceinline__ group_scales(uint32_t, int, int row, int index, const mixed_args &a)
        : select(threadIdx.x & 1 ? 0x7652 : 0x7650)
    {
        int64_t at = group_at(row, index, a);

#pragma unroll
        for (int h = 0; h < 2; h++) {
            scale[h] = __ldg(a.w_scale + at);
            bias[h] = 0x1p23f + 128.0f + (a.w_zero ? (float)__ldg(a.w_zero + at) : 0.0f);
            at += (int64_t)8 * a.n_groups;
        }
    }
    __device__ __forceinline__ uint32_t values(uint32_t word, int h) const
    {
        uint32_t v = word ^ 0x80808080u, first = __byte_perm(v, 0x4b000000u, select),
                 second = __byte_perm(v, 0x4b000000u, select + 1);

        return pair(__uint_as_float(first) - bias[h], __uint_as_float(second) - bias[h]);
    }
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], const half_codes<FUSED_INT8> &codes,
                                            int k) const
    {
        ret[0] = values(codes.low[k][0], 0);
        ret[1] = values(codes.high[k][0], 1);
        ret[2] = values(codes.low[k][1], 0);
        ret[3] = values(codes.high[k][1], 1);
    }
};

template <> struct group_scales<FUSED_INT4> {
    float scale[2];
    uint32_t zero[2];
    int shift;

    __device__ __forceinline__ group_scales(uint32_t tile, int group, int, int, const mixed_args &a)
        : shift((threadIdx.x & 3) * 4)
    {
        uint32_t at =
            tile +
            ((threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7)) * (uint32_t)FUSED_SEGMENT_BYTES +
            FUSED_SEGMENT_K / 2 + group * 4;

#pragma unroll
        for (int h = 0; h < 2; h++) {
            int4_group g(load_word(at + h * 8 * FUSED_SEGMENT_BYTES), a.f16_scales);
            scale[h] = g.scale;
            zero[h] = g.zero;
        }
    }
    /* 128 + code is exact in bf16, and so is the difference to 128 + zero point. */
    __device__ __forceinline__ uint32_t values(uint32_t word, int h) const
    {
        uint32_t bits = ((word >> shift) & 0x000f000fu) | 0x43004300u;
        __nv_bfloat162 x = __hsub2(*(__nv_bfloat162 *)&bits, *(const __nv_bfloat162 *)&zero[h]);

        return *(uint32_t *)&x;
    }
    /* The operand of the k-th 16 columns of the half. */
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], const half_codes<FUSED_INT4> &codes,
                                            int k) const
    {
        const uint4 &l = codes.low[k / 2], &h = codes.high[k / 2];

        ret[0] = values(k & 1 ? l.z : l.x, 0);
        ret[1] = values(k & 1 ? h.z : h.x, 1);
        ret[2] = values(k & 1 ? l.w : l.y, 0);
        ret[3] = values(k & 1 ? h.w : h.y, 1);
    }
};

#endif

#endif
