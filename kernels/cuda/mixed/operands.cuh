/* Codes of a stage to the matrix instruction's operand in registers, a format each. */
#ifndef QUIRE_KERNELS_CUDA_MIXED_OPERANDS_CUH
#define QUIRE_KERNELS_CUDA_MIXED_OPERANDS_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/fused_decode/small_pipeline.cuh"
#include "kernels/cuda/mixed/mixed.h"
#include "kernels/cuda/mixed/wgmma_mixed.cuh"
#include "kernels/cuda/quant/codes.cuh"
#include "kernels/cuda/quant/groups.h"

enum { MOST_STAGES = 12 };

/* A product; the epilogue's part is that of small_rows.cu. */
struct mixed_args {
    small_args s; /* depth_steps: groups of a block's part of the depth */
    /* Of all but FUSED_INT4: scales [n, n_groups] and, of FUSED_INT8, zero points
     * likewise or NULL; n_groups: 1, or one for each 128 columns. Of FP4 [n]: what its
     * rows' scales have in common. */
    const float *w_scale;
    const int8_t *w_zero;
    int32_t n_groups;
    /* Of QUANT_SEGMENTS, whose copies need no tensor map: n_segments of a row. */
    const char *segments;
    int32_t n_segments;
    int32_t f16_scales;
    int32_t halves; /* of FUSED_GROUPS_4 and _8 */
};

/* F: enum fused_format; N: rows of the activations' operand; WIDTH: of the tile. */
template <int F, int N, int WIDTH> struct mixed_layout {
    static constexpr int WARPGROUPS = mixed_warpgroups(N);
    static constexpr int MULTIPLIERS = WARPGROUPS * 128;
    static constexpr int THREADS = MULTIPLIERS + 128; /* and those of which one loads */
    /* of a multiplier and of a loading thread, of 65536 in all */
    static constexpr int REGISTERS = WARPGROUPS == 4 ? 112 : 232;
    static constexpr int LOADER_REGISTERS = WARPGROUPS == 4 ? 32 : 40;
    static constexpr int RING_BYTES = 225 * 1024;
    static constexpr int TILES = WIDTH / MIXED_ROWS; /* of 64 weight rows */
    static constexpr int PARTS = WARPGROUPS / TILES; /* of the depth, by warpgroup */
    static constexpr bool SEGMENTS = mixed_in_segments(F);
    static constexpr bool FLOATS = mixed_in_groups(F);          /* small_args.floats may be set */
    static constexpr bool FEW_FP4 = F == FUSED_MXFP4 && N == 8; /* few_fp4.cuh */
    static constexpr int SEGMENT_GROUPS = F == FUSED_GROUPS_8 ? 2 : 4; /* of 128 columns */
    static constexpr int GROUPS = !SEGMENTS                ? PARTS     /* of a stage of codes */
                                  : PARTS < SEGMENT_GROUPS ? SEGMENT_GROUPS
                                                           : PARTS;
    /* Bytes between rows of codes, and of 64 rows' codes of a stage. Rows of segments
     * begin in different banks; others are of one group and swizzled. */
    static constexpr int PITCH = F == FUSED_INT4       ? (int)QUANT_SEGMENT_BYTES
                                 : F == FUSED_MXFP4    ? (int)QUANT_MXFP4_BYTES
                                 : F == FUSED_NVFP4    ? (int)QUANT_NVFP4_BYTES
                                 : F == FUSED_GROUPS_8 ? (int)GROUPS_BYTES_8
                                 : mixed_in_groups(F)  ? (int)GROUPS_BYTES_4
                                                       : (int)MIXED_GROUP;
    static constexpr int TILE_BYTES =
        MIXED_ROWS * PITCH * (SEGMENTS ? GROUPS / SEGMENT_GROUPS : GROUPS);
    static constexpr int STAGE_BYTES = TILES * TILE_BYTES;
    /* Copies of the activations: each of some groups, which so many parts read. */
    static constexpr int SOURCE_GROUPS = mixed_source_groups(N);
    static constexpr int SOURCE_PARTS = SOURCE_GROUPS < PARTS ? SOURCE_GROUPS : PARTS;
    static constexpr int GROUP_BYTES = N * MIXED_GROUP * 2;
    static constexpr int SOURCE_BYTES = SOURCE_GROUPS * GROUP_BYTES;
    static constexpr int SOURCES = N == 8    ? (TILES == 4 ? 4 : 8)
                                   : N == 16 ? (TILES == 4 ? 2 : 3)
                                   : N == 32 ? (TILES == 1 ? 4 : 3)
                                   : N == 64 ? (TILES == 4   ? (mixed_in_groups(F) ? 4 : 5)
                                                : TILES == 2 ? 7
                                                             : 8)
                                             : 4;
    static constexpr int FIT = (RING_BYTES - SOURCES * SOURCE_BYTES) / STAGE_BYTES;
    static constexpr int STAGES = FIT > MOST_STAGES ? MOST_STAGES : FIT;
    static constexpr int RING = SOURCES * SOURCE_BYTES + STAGES * STAGE_BYTES;
    static constexpr int SLOTS = STAGES * TILES; /* come and are free again by themselves */
    static constexpr int BARRIERS = 2 * (SOURCES + SLOTS) + 1 + (FEW_FP4 ? SOURCES : 0);
    static constexpr int BYTES = RING + BARRIERS * 8 + 1024;
    static constexpr int SUM_PITCH = WIDTH + 4; /* floats of a row of sums */

    static_assert(STAGES >= 2, "codes arrive while others are multiplied");
    static_assert(PARTS * N * SUM_PITCH * 4 <= RING, "sums fit");
};

#if HAS_WGMMA

/* ---- what a lane makes of its codes ----
 *
 * Of two weight rows, 8 apart, the columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each
 * 16, where t is its number modulo 4. tile: where the stage has the tile's 64 rows;
 * group: in the stage.
 *
 *     lane_codes(row, part, a)      row: the weight's row of the warpgroup's first;
 *                                   part: the stage's group that `group` 0 stands for
 *     scales(tile, group, i, a)     fetches the scales of a group; i: its place in the row
 *     load(tile, group, half)       fetches the codes of 64 columns
 *     operand(ret, half, k)         the matrix instruction's, of the k-th 16 of these
 */
template <int F> struct lane_codes;

__device__ __forceinline__ int lane_row(void)
{
    return (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
}

template <> struct lane_codes<FUSED_INT4> {
    float scale[2];
    int4_group group[2]; /* of the lower and the upper row */
    uint32_t word[2][2];
    uint32_t at, scales_at;

    __device__ __forceinline__ lane_codes(int, int part, const mixed_args &)
        : at(lane_row() * (uint32_t)FUSED_SEGMENT_BYTES + part * 64 + (threadIdx.x & 3) * 4),
          scales_at(lane_row() * (uint32_t)FUSED_SEGMENT_BYTES + FUSED_SEGMENT_K / 2 + part * 4)
    {
    }
    __device__ __forceinline__ void scales(uint32_t tile, int i, int, const mixed_args &a)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            group[h] = int4_group(load_word(tile + scales_at + h * 8 * FUSED_SEGMENT_BYTES + i * 4),
                                  a.f16_scales);
            scale[h] = group[h].scale;
        }
    }
    __device__ __forceinline__ void load(uint32_t tile, int i, int half)
    {
        uint32_t from = tile + at + i * 64 + half * 32;

#pragma unroll
        for (int h = 0; h < 2; h++) {
            word[h][0] = load_word(from + h * 8 * FUSED_SEGMENT_BYTES);
            word[h][1] = load_word(from + h * 8 * FUSED_SEGMENT_BYTES + 16);
        }
    }
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], int, int k) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ret[i] = group[i & 1].pair(word[i & 1][k / 2], k % 2 * 2 + i / 2);
        }
    }
};

/* Segments of FP4: a code times its scale is a bf16, exactly. */
template <int F> struct lane_fp4 {
    static constexpr int GROUP = F == FUSED_NVFP4 ? 16 : 32; /* columns that share a scale */
    static constexpr int PITCH = F == FUSED_NVFP4 ? QUANT_NVFP4_BYTES : QUANT_MXFP4_BYTES;
    float scale[2];
    uint32_t factor[2][32 / GROUP]; /* of each row, a byte for each GROUP columns */
    uint32_t word[2][2];
    uint32_t at, scales_at;

    __device__ __forceinline__ lane_fp4(int row, int part, const mixed_args &a)
        : at(lane_row() * (uint32_t)PITCH + part * 64 + (threadIdx.x & 3) * 4),
          scales_at(lane_row() * (uint32_t)PITCH + QUANT_SEGMENT / 2 + part * (MIXED_GROUP / GROUP))
    {
        scale[0] = __ldg(a.w_scale + row + lane_row());
        scale[1] = __ldg(a.w_scale + row + lane_row() + 8);
    }
    __device__ __forceinline__ void scales(uint32_t tile, int i, int, const mixed_args &)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t from = tile + scales_at + h * 8 * PITCH + i * (MIXED_GROUP / GROUP);
#pragma unroll
            for (int j = 0; j < 32 / GROUP; j++) {
                factor[h][j] = load_word(from + j * 4);
            }
        }
    }
    __device__ __forceinline__ void load(uint32_t tile, int i, int half)
    {
        uint32_t from = tile + at + i * 64 + half * 32;

#pragma unroll
        for (int h = 0; h < 2; h++) {
            word[h][0] = load_word(from + h * 8 * PITCH);
            word[h][1] = load_word(from + h * 8 * PITCH + 16);
        }
    }
    /* operand() of codes as they are, 2^-126 times their values */
    __device__ __forceinline__ void bits(uint32_t (&ret)[4], int k) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            ret[h] = fp4_pair(word[h][k / 2], k % 2 * 2);
            ret[h + 2] = fp4_pair(word[h][k / 2], k % 2 * 2 + 1);
        }
    }
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], int half, int k) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int place = (half * 4 + k) * 16 / GROUP;
            uint32_t f = fp4_factor_of<GROUP>(factor[h][place / 4], place % 4);
            ret[h] = fp4_values(fp4_pair(word[h][k / 2], k % 2 * 2), f);
            ret[h + 2] = fp4_values(fp4_pair(word[h][k / 2], k % 2 * 2 + 1), f);
        }
    }
};

template <> struct lane_codes<FUSED_MXFP4> : lane_fp4<FUSED_MXFP4> {
    using lane_fp4<FUSED_MXFP4>::lane_fp4;
};
template <> struct lane_codes<FUSED_NVFP4> : lane_fp4<FUSED_NVFP4> {
    using lane_fp4<FUSED_NVFP4>::lane_fp4;
};

/* Rows of eight bits, in the 128-byte swizzle.
 *
 *     load_rows(tile, group)        fetches all 128 columns of a group for the instruction
 *                                   of a warp: of each 64 of them 16 t to 16 t + 15
 *     next_operand(ret, panel, i)   that instruction's, of the i-th four of these 16 */
struct lane_bytes {
    float scale[2];
    uint32_t low[4][2], high[4][2]; /* of each 16 columns two words; t chooses half of each */
    uint4 own[2][2];                /* of load_rows: of either row 16 columns of each 64 */
    uint32_t at, own_at;
    int64_t first; /* of the lower row's scales; the upper row's are 8 * n_groups on */

    __device__ __forceinline__ lane_bytes(int row, int part, const mixed_args &a)
        : at(part * (MIXED_ROWS * MIXED_GROUP) + lane_row() * (uint32_t)MIXED_GROUP +
             (threadIdx.x >> 2 & 7) * 16 + (threadIdx.x >> 1 & 1) * 4),
          own_at(part * (MIXED_ROWS * MIXED_GROUP) + lane_row() * (uint32_t)MIXED_GROUP +
                 ((threadIdx.x >> 2 & 7) ^ (threadIdx.x & 3)) * 16),
          first((int64_t)(row + lane_row()) * a.n_groups)
    {
        scale[0] = __ldg(a.w_scale + first);
        scale[1] = __ldg(a.w_scale + first + (int64_t)8 * a.n_groups);
    }
    /* Of a row that has more than one. */
    __device__ __forceinline__ void scales(uint32_t, int, int i, const mixed_args &a)
    {
        if (a.n_groups > 1) {
            scale[0] = __ldg(a.w_scale + first + i);
            scale[1] = __ldg(a.w_scale + first + (int64_t)8 * a.n_groups + i);
        }
    }
    __device__ __forceinline__ void load(uint32_t tile, int group, int half)
    {
        uint32_t from = tile + at + group * (MIXED_ROWS * MIXED_GROUP);

#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t chunk =
                from ^ (half * 4 + k) * 16; /* a row is 128 bytes, and begins at such */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                low[k][i] = load_word(chunk + i * 8);
                high[k][i] = load_word(chunk + 8 * MIXED_GROUP + i * 8);
            }
        }
    }
    __device__ __forceinline__ void load_rows(uint32_t tile, int group)
    {
        uint32_t from = tile + own_at + group * (MIXED_ROWS * MIXED_GROUP);

#pragma unroll
        for (int panel = 0; panel < 2; panel++) {
            own[0][panel] = load_shared16(from ^ panel * 64);
            own[1][panel] = load_shared16((from ^ panel * 64) + 8 * MIXED_GROUP);
        }
    }
    __device__ __forceinline__ uint32_t own_word(int h, int panel, int i) const
    {
        const uint4 &v = own[h][panel];

        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }
};

template <> struct lane_codes<FUSED_FP8> : lane_bytes {
    uint32_t select; /* spreads two codes over the upper bytes of two values */

    __device__ __forceinline__ lane_codes(int row, int part, const mixed_args &a)
        : lane_bytes(row, part, a), select(threadIdx.x & 1 ? 0x3424 : 0x1404)
    {
    }
    __device__ __forceinline__ uint32_t values(uint32_t word) const
    {
        uint32_t v = __byte_perm(word, 0, select);

        return e4m3_pair((v >> 4 & 0x07f007f0u) | (v & 0x80008000u));
    }
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], int, int k) const
    {
        ret[0] = values(low[k][0]);
        ret[1] = values(high[k][0]);
        ret[2] = values(low[k][1]);
        ret[3] = values(high[k][1]);
    }
    /* Two codes, spread over the lower bytes of two values: a product moves them up,
     * which has a pipe of its own. */
    __device__ __forceinline__ static uint32_t moved(uint32_t v)
    {
        return e4m3_pair((v * 16 & 0x07f007f0u) | (v * 256 & 0x80008000u));
    }
    __device__ __forceinline__ void next_operand(uint32_t (&ret)[4], int panel, int i) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t word = own_word(h, panel, i);
            ret[h] = moved(__byte_perm(word, 0, 0x4140));
            ret[h + 2] = moved(__byte_perm(word, 0, 0x4342));
        }
    }
};

/* Codes plus 128 become the last bits of 2^23 + n, from which 2^23 + 128 + zero point
 * is taken away; bf16 has the difference exactly. */
template <> struct lane_codes<FUSED_INT8> : lane_bytes {
    float bias[2];
    uint32_t select; /* the first code, then the upper bytes of 2^23 */

    __device__ __forceinline__ lane_codes(int row, int part, const mixed_args &a)
        : lane_bytes(row, part, a), select(threadIdx.x & 1 ? 0x7652 : 0x7650)
    {
        zeros(0, a);
    }
    __device__ __forceinline__ void zeros(int i, const mixed_args &a)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int64_t at = first + (int64_t)h * 8 * a.n_groups + i;
            bias[h] = 0x1p23f + 128.0f + (a.w_zero ? (float)__ldg(a.w_zero + at) : 0.0f);
        }
    }
    __device__ __forceinline__ void scales(uint32_t tile, int group, int i, const mixed_args &a)
    {
        lane_bytes::scales(tile, group, i, a);
        if (a.n_groups > 1) {
            zeros(i, a);
        }
    }
    __device__ __forceinline__ uint32_t values(uint32_t word, int h, uint32_t first_of) const
    {
        uint32_t v = word ^ 0x80808080u, one = __byte_perm(v, 0x4b000000u, first_of),
                 two = __byte_perm(v, 0x4b000000u, first_of + 1);

        return pair(__uint_as_float(one) - bias[h], __uint_as_float(two) - bias[h]);
    }
    __device__ __forceinline__ uint32_t values(uint32_t word, int h) const
    {
        return values(word, h, select);
    }
    __device__ __forceinline__ void next_operand(uint32_t (&ret)[4], int panel, int i) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t word = own_word(h, panel, i);
            ret[h] = values(word, h, 0x7650);
            ret[h + 2] = values(word, h, 0x7652);
        }
    }
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], int, int k) const
    {
        ret[0] = values(low[k][0], 0);
        ret[1] = values(high[k][0], 1);
        ret[2] = values(low[k][1], 0);
        ret[3] = values(high[k][1], 1);
    }
};

#endif

#endif
