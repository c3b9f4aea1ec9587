/* Epilogues of mixed-input products, from sums in shared memory.
 */
#ifndef QUIRE_KERNELS_CUDA_MIXED_EPILOGUE_CUH
#define QUIRE_KERNELS_CUDA_MIXED_EPILOGUE_CUH

#include "kernels/cuda/mixed/operands.cuh"

#if HAS_WGMMA

/* Sums in shared memory, [PARTS][N][SUM_PITCH] in each block of the cluster. */
template <typename L, int N, int SPLIT> struct shared_sums {
    uint32_t at[SPLIT];

    __device__ __forceinline__ shared_sums(uint32_t base)
    {
#pragma unroll
        for (int i = 0; i < SPLIT; i++) {
            at[i] = address_in(base, i);
        }
    }
    /* Four columns of a row: the sums of all parts of the depth, in order. */
    __device__ __forceinline__ float4 quad(int row, int column) const
    {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

#pragma unroll
        for (int i = 0; i < SPLIT * L::PARTS; i++) {
            float4 e = load_from(at[i / L::PARTS] +
                                 ((i % L::PARTS * N + row) * L::SUM_PITCH + column) * 4);
            v = make_float4(v.x + e.x, v.y + e.y, v.z + e.z, v.w + e.w);
        }
        return v;
    }
};

/* The warpgroups' sums to shared memory, as rows of the activations. */
template <typename L, int N>
__device__ __forceinline__ void keep_sums(const float (&d)[N / 2], float *sums)
{
    int lane = threadIdx.x & 31, warpgroup = threadIdx.x / 128;
    float *to = sums + warpgroup / L::TILES * N * L::SUM_PITCH + warpgroup % L::TILES * MIXED_ROWS +
                (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);

#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        int row = j / 4 * 8 + (lane & 3) * 2 + (j & 1);
        to[row * L::SUM_PITCH + (j >> 1 & 1) * 8] = d[j];
    }
}

template <int ACT>
__device__ __forceinline__ uint2 gated_quad(const float4 &gate, const float4 &up, float f, int act)
{
    return make_uint2(pair(activated<ACT>(gate.x * f, act) * (up.x * f),
                           activated<ACT>(gate.y * f, act) * (up.y * f)),
                      pair(activated<ACT>(gate.z * f, act) * (up.z * f),
                           activated<ACT>(gate.w * f, act) * (up.w * f)));
}

template <typename L, int N, int SPLIT, int WIDTH>
__device__ __forceinline__ void store_gated(const shared_sums<L, N, SPLIT> &sums,
                                            const small_args &a, int tile)
{
    constexpr int LANES = WIDTH / 8;

    for (int e = threadIdx.x; e < N * LANES; e += L::MULTIPLIERS) {
        int row = e / LANES, column = e % LANES * 4;
        if (row >= a.rows) {
            continue;
        }
        float4 gate = sums.quad(row, column), up = sums.quad(row, WIDTH / 2 + column);
        float f = norm_factor(a, row);
        *(uint2 *)(a.out + row * a.out_stride + tile * (WIDTH / 2) + column) =
            a.act == A_SILU ? gated_quad<A_SILU>(gate, up, f, a.act)
                            : gated_quad<-1>(gate, up, f, a.act);
    }
}

template <int ACT>
__device__ __forceinline__ uint2 plain_quad(const float4 &v, uint2 bias, float f, int act)
{
    return make_uint2(pair(activated<ACT>(v.x * f + low(bias.x), act),
                           activated<ACT>(v.y * f + high(bias.x), act)),
                      pair(activated<ACT>(v.z * f + low(bias.y), act),
                           activated<ACT>(v.w * f + high(bias.y), act)));
}

/* out = act(factor * sums + bias); of a cluster's tile each block has its part of the
 * columns. */
template <typename L, int N, int SPLIT, int WIDTH>
__device__ __forceinline__ void store_plain(const shared_sums<L, N, SPLIT> &sums,
                                            const small_args &a, int tile, int part)
{
    constexpr int COLUMNS = WIDTH / SPLIT, LANES = COLUMNS / 4;

    for (int e = threadIdx.x; e < N * LANES; e += L::MULTIPLIERS) {
        int row = e / LANES, column = part * COLUMNS + e % LANES * 4, at = tile * WIDTH + column;
        if (row >= a.rows) {
            continue;
        }
        float4 v = sums.quad(row, column);
        float f = norm_factor(a, row);
        uint2 bias = a.bias ? *(const uint2 *)(a.bias + at) : make_uint2(0, 0);
        *(uint2 *)(a.out + row * a.out_stride + at) = a.act == A_NONE
                                                          ? plain_quad<A_NONE>(v, bias, f, a.act)
                                                          : plain_quad<-1>(v, bias, f, a.act);
    }
}

/* The residual stream += sums, and what the next norm needs. */
template <typename L, int N, int SPLIT, int WIDTH>
__device__ __forceinline__ void store_sum(const shared_sums<L, N, SPLIT> &sums, const small_args &a,
                                          int tile, int part)
{
    constexpr int COLUMNS = WIDTH / SPLIT, LANES = COLUMNS / 4, LAST = LANES < 32 ? LANES : 32;

    static_assert(N * LANES % 32 == 0, "whole warps");
    for (int e = threadIdx.x; e < N * LANES; e += L::MULTIPLIERS) {
        int row = e / LANES, column = part * COLUMNS + e % LANES * 4;
        float square = 0.0f;
        if (row < a.rows) {
            float4 v = sums.quad(row, column);
            const float four[4] = {v.x, v.y, v.z, v.w};
            square = add_to_stream(a, row, tile * WIDTH + column, four);
        }
        if (a.squares_out) {
#pragma unroll
            for (int o = LAST / 2; o > 0; o >>= 1) {
                square += __shfl_xor_sync(0xffffffffu, square, o);
            }
            if (row < a.rows && e % LAST == 0) {
                atomicAdd(a.squares_out + row, as_squares(square));
            }
        }
    }
}

template <typename L, int N, int SPLIT, int WIDTH>
__device__ __forceinline__ void store(const shared_sums<L, N, SPLIT> &sums, const small_args &a,
                                      int kind, int tile, int part)
{
    if (kind == SMALL_SUM) {
        store_sum<L, N, SPLIT, WIDTH>(sums, a, tile, part);
    } else if (kind == SMALL_PLAIN) {
        store_plain<L, N, SPLIT, WIDTH>(sums, a, tile, part);
    } else if (WIDTH > MIXED_ROWS) {
        store_gated<L, N, SPLIT, WIDTH>(sums, a, tile);
    }
}

#endif

#endif
