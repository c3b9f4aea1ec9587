/* Sums of at most FEW_FP4_ROWS rows of activations and MXFP4 by the instruction of a
 * warp: each group of 32 columns by itself, so that its scale is applied to few sums in
 * place of to all of its values.
 *
 * The instruction has eight columns for rows of activations. Of ROWS rows, 8 / ROWS
 * groups are summed side by side: the operand of a group has its activations in columns
 * of their own and zeros in the others, so that a lane has one group's sums of two rows
 * (of four rows two groups' in turns), which take one scale. Zeros are the rows that a
 * copy of the activations has behind the real ones.
 *
 * Codes are multiplied as their bits are, 2^-126 times the value. So that products stay
 * far above the least float, idle warps make activations 2^64 times as large in shared
 * memory, which takes them too long of more rows.
 *
 * The sums of every fourth group are added up, then these four, whatever ROWS is.
 */
#ifndef QUIRE_KERNELS_CUDA_MIXED_FEW_FP4_CUH
#define QUIRE_KERNELS_CUDA_MIXED_FEW_FP4_CUH

#include "kernels/cuda/mixed/operands.cuh"

enum {
    FEW_FP4_ROWS = 4,
    SCALING_WARPS = 2,
};

#if HAS_WGMMA

/* Activations of `rows` rows times 2^64: groups of 128 columns that begin at `at`, as
 * copied, in panels of eight rows. By a warp. */
__device__ __forceinline__ void scale_source(uint32_t at, int groups, int rows)
{
    constexpr int ROW = 128; /* bytes of a panel's */
    const __nv_bfloat162 factor = __floats2bfloat162_rn(0x1p64f, 0x1p64f);
    int shift = (rows > 1) + (rows > 2), each = ROW << shift; /* bytes of whole rows */
    int bytes = groups * (MIXED_GROUP / SMALL_DEPTH) * each;

    for (int i = (threadIdx.x & 31) * 16; i < bytes; i += 32 * 16) {
        uint32_t in = i & (each - 1), to = at + ((i - in) << (3 - shift)) + in;
        uint4 v = load_shared16(to);
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            __nv_bfloat162 x = __hmul2(*(__nv_bfloat162 *)&w[j], factor);
            w[j] = *(uint32_t *)&x;
        }
        store_shared16(to, make_uint4(w[0], w[1], w[2], w[3]));
    }
}

/* Where a lane's scales are in a stage of codes: bytes of the groups whose sums it
 * has. */
template <int ROWS> struct fp4_scales {
    uint32_t at;

    __device__ __forceinline__ explicit fp4_scales(int part)
        : at(lane_row() * (uint32_t)QUANT_MXFP4_BYTES + QUANT_SEGMENT / 2 + part * 4 +
             (threadIdx.x & 3) * 2 / ROWS)
    {
    }
    /* scale[h]: of the lower and the upper row's group `group` behind the first, times
     * 2^126; tile: where the stage has the tile's rows. */
    __device__ __forceinline__ void load(float (&scale)[2], uint32_t tile, int group) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t byte;
            asm volatile("ld.shared.u8 %0, [%1];"
                         : "=r"(byte)
                         : "r"(tile + at + h * 8 * QUANT_MXFP4_BYTES + group)
                         : "memory");
            scale[h] = __uint_as_float(byte << 23);
        }
    }
};

/* ROWS: 2 or 4. */
template <int ROWS> struct fp4_sums {
    static constexpr int SIDE = 8 / ROWS;  /* groups side by side */
    static constexpr int TURNS = ROWS / 2; /* of these, in 128 columns */
    float d[TURNS][4] = {};

    /* += the products of 128 columns; tile, g, from, ready: of sum_group_by_warp in
     * mixed.cuh. */
    template <typename READY>
    __device__ __forceinline__ void add(lane_codes<FUSED_MXFP4> &codes,
                                        const fp4_scales<ROWS> &bytes, uint32_t tile, int g,
                                        uint32_t from, READY ready)
    {
        lane_codes<FUSED_MXFP4> second = codes;
        float scale[TURNS][2];

        codes.load(tile, g, 0);
        second.load(tile, g, 1);
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            bytes.load(scale[i], tile, g * 4 + i * SIDE);
        }
        ready();
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            float sums[4] = {};
#pragma unroll
            for (int j = 0; j < SIDE; j++) {
                constexpr int ROW = 128, CHUNK = 16;
                int group = i * SIDE + j, half = group / 2;
                uint32_t x[4], a[4];
                /* row and chunk of a panel, which is swizzled */
                ldmatrix_x4(x, (from ^ group % 2 * (4 * CHUNK) ^ j * ROWS * (ROW + CHUNK)) +
                                   half * (8 * MIXED_GROUP));
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    (half == 0 ? codes : second).bits(a, group % 2 * 2 + k);
                    mma16816<bf16>(sums, a, x[k * 2], x[k * 2 + 1]);
                }
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                d[i][e] = fmaf(scale[i][e / 2], sums[e], d[i][e]);
            }
        }
        __syncwarp(); /* all lanes have read their codes */
    }
    /* to = the sums as those of a warp's instruction of eight rows, each times its
     * weight row's scale. */
    __device__ __forceinline__ void finish(float (&to)[4], const float (&row_scale)[2]) const
    {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float sum[TURNS];
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                sum[i] = d[i][e];
#pragma unroll
                for (int o = ROWS / 2; o < 4; o *= 2) { /* groups of other lanes */
                    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], o);
                }
            }
            to[e] = row_scale[e / 2] * ((TURNS == 2 ? sum[0] + sum[TURNS - 1] : sum[0]) * 0x1p-64f);
        }
    }
};

#endif

#endif
