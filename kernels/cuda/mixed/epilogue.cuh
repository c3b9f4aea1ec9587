/* Epilogues of mixed-input products, from sums in shared memory.
 */
#ifndef QUIRE_KERNELS_CUDA_MIXED_EPILOGUE_CUH
#define QUIRE_KERNELS_CUDA_MIXED_EPILOGUE_CUH

#include "kernels/cuda/fused_decode/small_sum.cuh"
#include "kernels/cuda/mixed/operands.cuh"

#if HAS_WGMMA

/* The weight row at which a tile's i-th 64 rows begin: those of a gated product are the
 * gate's first, then those that it gates. */
template <int WIDTH>
__device__ __forceinline__ int first_row(const small_args &a, int kind, int tile, int i)
{
    constexpr int HALF = WIDTH / 2;
    int row = i * MIXED_ROWS;

    if (kind != SMALL_GATED) {
        return tile * WIDTH + row;
    }
    return row < HALF ? tile * HALF + row : a.n / 2 + tile * HALF + row - HALF;
}

/* A barrier of the threads that multiply. */
template <typename L> __device__ __forceinline__ void sync_multipliers(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"(L::MULTIPLIERS) : "memory");
}

__device__ __forceinline__ float4 plus(const float4 &x, const float4 &y)
{
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

/* Sums in shared memory, [PARTS][N][SUM_PITCH]. With a split depth each block of the
 * cluster has its half of the columns to finish: [N][PUSH_PITCH] sums of the other
 * block's depth are behind. */
template <typename L, int N, int SPLIT> struct shared_sums {
    static constexpr int COLUMNS = (L::SUM_PITCH - 4) / SPLIT, PUSH_PITCH = COLUMNS + 4;
    static constexpr int PUSHED = L::PARTS * N * L::SUM_PITCH;
    static_assert(SPLIT == 1 || (PUSHED + N * PUSH_PITCH) * 4 <= L::RING, "sums fit");
    const float *at;
    int part;

    /* Four columns of a row: the sums of all parts of this block's depth, in order. */
    __device__ __forceinline__ float4 own(int row, int column) const
    {
        float4 v = *(const float4 *)(at + row * L::SUM_PITCH + column);

#pragma unroll
        for (int i = 1; i < L::PARTS; i++) {
            v = plus(v, *(const float4 *)(at + (i * N + row) * L::SUM_PITCH + column));
        }
        return v;
    }
    /* Of the whole depth. */
    __device__ __forceinline__ float4 quad(int row, int column) const
    {
        float4 v = own(row, column);

        if constexpr (SPLIT > 1) {
            v = plus(v,
                     *(const float4 *)(at + PUSHED + row * PUSH_PITCH + column - part * COLUMNS));
        }
        return v;
    }
    /* Pushes what the other block finishes to it, and waits for what it pushes; `base`:
     * the address of `at`, `pushed`: of the mbarrier. */
    __device__ __forceinline__ void share(uint32_t base, uint32_t pushed, int rows) const
    {
        constexpr int LANES = COLUMNS / 4;
        int other = part ^ 1;
        uint32_t to = address_in(base + PUSHED * 4, other), bar = address_in(pushed, other);

        for (int e = threadIdx.x; e < N * LANES; e += L::MULTIPLIERS) {
            int row = e / LANES, column = e % LANES * 4;
            if (row < rows) {
                push(to + (row * PUSH_PITCH + column) * 4, own(row, other * COLUMNS + column), bar);
            }
        }
        push_wait(pushed);
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

__device__ __forceinline__ float4 plain_floats(const float4 &v, uint2 bias, float f, int act)
{
    return make_float4(activate(v.x * f + low(bias.x), act), activate(v.y * f + high(bias.x), act),
                       activate(v.z * f + low(bias.y), act), activate(v.w * f + high(bias.y), act));
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
        if constexpr (L::FLOATS) {
            if (a.floats) {
                *(float4 *)(a.floats + row * a.out_stride + at) = plain_floats(v, bias, f, a.act);
                continue;
            }
        }
        *(uint2 *)(a.out + row * a.out_stride + at) = a.act == A_NONE
                                                          ? plain_quad<A_NONE>(v, bias, f, a.act)
                                                          : plain_quad<-1>(v, bias, f, a.act);
    }
}

/* The residual stream += sums, and what the next norm needs. */
template <typename L, int N, int SPLIT, int WIDTH> struct stream_part {
    static constexpr int COLUMNS = WIDTH / SPLIT, LANES = COLUMNS / 4, ALL = N * LANES;
    static constexpr int QUADS = (ALL + L::MULTIPLIERS - 1) / L::MULTIPLIERS;
    stream_quad quad[QUADS]; /* of this thread */

    __device__ __forceinline__ void load(const small_args &a, int tile, int part)
    {
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            int e = min((int)threadIdx.x + q * L::MULTIPLIERS, ALL - 1);
            quad[q] = load_stream(a, e / LANES, tile * WIDTH + part * COLUMNS + e % LANES * 4);
        }
    }
};

template <typename L, int N, int SPLIT, int WIDTH>
__device__ __forceinline__ void store_sum(const shared_sums<L, N, SPLIT> &sums,
                                          const stream_part<L, N, SPLIT, WIDTH> &stream,
                                          const small_args &a, int tile, int part)
{
    using P = stream_part<L, N, SPLIT, WIDTH>;
    constexpr int COLUMNS = P::COLUMNS, LANES = P::LANES, LAST = LANES < 32 ? LANES : 32;
    constexpr int ALL = P::ALL, QUADS = P::QUADS;
    float v[QUADS][4];

    static_assert(ALL % 32 == 0, "whole warps");
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int e = min((int)threadIdx.x + q * L::MULTIPLIERS, ALL - 1);
        float4 four = sums.quad(e / LANES, part * COLUMNS + e % LANES * 4);
        v[q][0] = four.x;
        v[q][1] = four.y;
        v[q][2] = four.z;
        v[q][3] = four.w;
    }
    if (a.ranks.n_ranks > 0) {
        sum_over_ranks<ALL, LANES, L::MULTIPLIERS>(v, a.ranks, a.rows);
        sync_multipliers<L>();
        if (threadIdx.x == 0) {
            leave_sum(a.ranks);
        }
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int e = threadIdx.x + q * L::MULTIPLIERS, row = e / LANES,
            column = part * COLUMNS + e % LANES * 4;
        float square = 0.0f;
        if (e >= ALL) {
            break; /* whole warps */
        }
        if (row < a.rows) {
            square = add_to_stream(a, row, tile * WIDTH + column, stream.quad[q], v[q]);
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
__device__ __forceinline__ void store(const shared_sums<L, N, SPLIT> &sums,
                                      const stream_part<L, N, SPLIT, WIDTH> &stream,
                                      const small_args &a, int kind, int tile, int part)
{
    if (kind == SMALL_SUM) {
        if constexpr (N != MIXED_WIDE_ROWS) { /* which are launches of their own */
            store_sum<L, N, SPLIT, WIDTH>(sums, stream, a, tile, part);
        }
    } else if (kind == SMALL_PLAIN) {
        store_plain<L, N, SPLIT, WIDTH>(sums, a, tile, part);
    } else if (WIDTH > MIXED_ROWS) {
        store_gated<L, N, SPLIT, WIDTH>(sums, a, tile);
    }
}

#endif

#endif
