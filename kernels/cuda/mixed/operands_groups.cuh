/* lane_codes (operands.cuh) of weights in groups (quant/groups.h). A value is made
 * whole and rounded once, to the bf16 that the weight decoded would be. */
#ifndef QUIRE_KERNELS_CUDA_MIXED_OPERANDS_GROUPS_CUH
#define QUIRE_KERNELS_CUDA_MIXED_OPERANDS_GROUPS_CUH

#include "kernels/cuda/mixed/mixed.cuh"
#include "kernels/cuda/quant/groups.cuh"

#if HAS_WGMMA

template <int KIND> struct lane_groups {
    static constexpr bool BYTES = KIND == GROUPS_8;
    static constexpr int SEGMENT_GROUPS = BYTES ? 2 : 4; /* of 128 columns */
    static constexpr int CHUNKS = BYTES ? 4 : 2;         /* of 64 columns */
    static constexpr int PITCH = BYTES ? GROUPS_BYTES_8 : GROUPS_BYTES_4;
    float scale[2];       /* the rows' factors */
    uint32_t group[2][4]; /* of each row, a word for each 32 columns */
    uint32_t word[2][CHUNKS];
    uint32_t at, groups_at;
    bool halves;

    __device__ __forceinline__ lane_groups(int row, int part, const mixed_args &a)
        : halves(a.halves != 0)
    {
        uint32_t segment = part / SEGMENT_GROUPS * (MIXED_ROWS * PITCH), in = part % SEGMENT_GROUPS;

        /* lane_row() modulo 8 is the lane's number divided by four */
        at = segment + lane_row() * (uint32_t)GROUPS_CODES + (threadIdx.x >> 2 & 7) * 16 +
             (threadIdx.x & 3) * 4;
        at ^= in * (2 * CHUNKS * 16);
        groups_at = segment + MIXED_ROWS * GROUPS_CODES + (in * 4 * MIXED_ROWS + lane_row()) * 4;
        scale[0] = __ldg(a.w_scale + row + lane_row());
        scale[1] = __ldg(a.w_scale + row + lane_row() + 8);
    }
    __device__ __forceinline__ void scales(uint32_t tile, int i, int, const mixed_args &)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                group[h][j] = load_word(tile + groups_at + h * 32 + (i * 4 + j) * (MIXED_ROWS * 4));
            }
        }
    }
    __device__ __forceinline__ void load(uint32_t tile, int i, int half)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                /* a row's chunks begin at a multiple of their bytes */
                uint32_t chunk = (tile + at) ^ ((i * 2 + half) * CHUNKS + j) * 16;
                word[h][j] = load_word(chunk + h * 8 * GROUPS_CODES);
            }
        }
    }
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], int half, int k) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            group_scale g =
                KIND == GROUPS_2
                    ? group_scale::of_two(group[h][half * 2], group[h][half * 2 + 1], k / 2,
                                          k % 2 == 1)
                    : group_scale::of<KIND>(group[h][half * 2 + k / 2], halves, k % 2 == 1);
            if constexpr (KIND == GROUPS_4 || KIND == GROUPS_2) {
                group_nibbles(g).pairs(word[h][k / 2], k % 2 == 1, ret[h], ret[h + 2]);
            } else {
                uint32_t v = BYTES ? word[h][k % CHUNKS] : group_levels(word[h][k / 2], k % 2 == 1);
                ret[h] = group_pair(group_byte(v, 0, g), group_byte(v, 1, g));
                ret[h + 2] = group_pair(group_byte(v, 2, g), group_byte(v, 3, g));
            }
        }
    }
};

template <> struct lane_codes<FUSED_GROUPS_4> : lane_groups<GROUPS_4> {
    using lane_groups<GROUPS_4>::lane_groups;
};
/* Products of the codes themselves, 128 more than they are, which bf16 has exactly;
 * behind 16 columns the scale. The zero point, and the 128, take the sum of the
 * activations, which is a product with ones. With eight rows it takes fewer
 * instructions than values made whole. */
template <typename READY>
__device__ __forceinline__ void
sum_nibbles_by_warp(warp_sums<8> &sums, lane_codes<FUSED_GROUPS_4> &codes, uint32_t tile, int g,
                    uint32_t from, READY ready)
{
    constexpr uint32_t ONES[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
    int lane = threadIdx.x & 31;
    uint32_t at = from + (lane & 7) * 128, chunk = ((lane >> 3) ^ (lane & 7)) * 16, x[4];
    lane_codes<FUSED_GROUPS_4> second = codes;

    codes.load(tile, g, 0);
    second.load(tile, g, 1);
    ready();
#pragma unroll
    for (int k = 0; k < MIXED_GROUP / 16; k++) {
        float of_codes[4] = {}, of_ones[4] = {}, scale[2], minus[2];
        uint32_t a[4];
        if (k % 2 == 0) {
            ldmatrix_x4(x, at + k / 4 * (8 * MIXED_GROUP) + (chunk ^ k % 4 * 32));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t word = (k < 4 ? codes : second).word[h][k / 2 % 2];
            group_scale of =
                group_scale::of<GROUPS_4>(codes.group[h][k / 2], codes.halves, k % 2 == 1);
            scale[h] = of.scale;
            minus[h] = fmaf(-128.0f, of.scale, of.minus);
            a[h] = (word >> (k % 2 * 8) & 0x000f000fu) | 0x43004300u;
            a[h + 2] = (word >> (k % 2 * 8 + 4) & 0x000f000fu) | 0x43004300u;
        }
        mma16816<bf16>(of_codes, a, x[k % 2 * 2], x[k % 2 * 2 + 1]);
        mma16816<bf16>(of_ones, ONES, x[k % 2 * 2], x[k % 2 * 2 + 1]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float &sum = k % 2 == 0 ? sums.even[0][j] : sums.odd[0][j];
            sum = fmaf(scale[j / 2], of_codes[j], sum);
            sum = fmaf(minus[j / 2], of_ones[j % 2], sum);
        }
    }
    __syncwarp(); /* all lanes have read their codes */
}

template <> struct lane_codes<FUSED_LEVELS> : lane_groups<GROUPS_LEVELS> {
    using lane_groups<GROUPS_LEVELS>::lane_groups;
};
template <> struct lane_codes<FUSED_GROUPS_8> : lane_groups<GROUPS_8> {
    using lane_groups<GROUPS_8>::lane_groups;
};
template <> struct lane_codes<FUSED_GROUPS_2> : lane_groups<GROUPS_2> {
    using lane_groups<GROUPS_2>::lane_groups;
};

#endif

#endif
