/* Activations of a chain's phase: from global memory into shared memory, normed on the way where a norm comes first. */
#ifndef QUIRE_CUDA_CHAIN_PANEL_CUH
#define QUIRE_CUDA_CHAIN_PANEL_CUH

#include "kernels/cuda/chain_ring.cuh"

/* Where shared memory holds what. */
struct places {
    char *panel;       /* [rows][depth], rows `pitch` bytes apart */
    char *norm_weight; /* of the phase that is waited for */
    float4 *sums;      /* [2][CHAIN_WARPS][32] */
    float *row_sums;   /* [2][CHAIN_WARPS] */
};

/* Sum over the threads that share a row. */
__device__ __forceinline__ float row_sum(float x, float *shared, int warps)
{
    int warp = threadIdx.x >> 5, first = warp / warps * warps;
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0)
        shared[warp] = x;
    warps_sync();
    float sum = 0.0f;
    for (int i = 0; i < warps; i++)
        sum += shared[first + i];
    return sum;
}

/* Two elements of a vector's word as floats, and back. */
template <typename T> __device__ __forceinline__ float2 unpack2(uint32_t v);
template <> __device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack2<__half>(uint32_t v) { return __half22float2(*(const __half2 *)&v); }

struct vector16 {
    uint32_t v[4];
};

/* Mean and reciprocal deviation of a row whose vectors its threads hold; those from n_vectors on are zero. */
template <typename T, int N>
__device__ __forceinline__ float2 row_stats(const vector16 (&v)[N], const chain_phase &q, const places &s, int at, int threads,
                                            int n_vectors)
{
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4 && i * threads < n_vectors; j++) {
            float2 f = unpack2<T>(v[i].v[j]);
            sum += f.x + f.y;
            squares += f.x * f.x + f.y * f.y;
        }
    float mean = 0.0f;
    if (q.norm.layer_norm) {
        mean = row_sum(sum, s.row_sums, threads / 32) / q.k;
        squares = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (at + i * threads < n_vectors)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 f = unpack2<T>(v[i].v[j]);
                    squares += (f.x - mean) * (f.x - mean) + (f.y - mean) * (f.y - mean);
                }
    }
    return make_float2(mean, rsqrtf(row_sum(squares, s.row_sums + CHAIN_WARPS, threads / 32) / q.k + q.norm.eps));
}

template <typename T>
__device__ __forceinline__ void norm_vector(vector16 &v, const chain_phase &q, const places &s, float2 stats, int n)
{
    uint4 weight = *(const uint4 *)(s.norm_weight + n * 16), bias = {};
    if (q.norm.bias)
        bias = __ldg((const uint4 *)q.norm.bias + n);
    const uint32_t w[4] = {weight.x, weight.y, weight.z, weight.w}, b[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 f = unpack2<T>(v.v[j]), g = unpack2<T>(w[j]), h = unpack2<T>(b[j]);
        v.v[j] = pack2<T>((f.x - stats.x) * stats.y * (g.x + q.norm.weight_offset) + h.x,
                          (f.y - stats.x) * stats.y * (g.y + q.norm.weight_offset) + h.y);
    }
}

/* A thread's part of a panel: vectors at, at + threads, ... below n_vectors of one row. */
struct part {
    int threads, row, at;
    __device__ __forceinline__ part(const chain_args &a) : threads(THREADS / a.rows_shared), row(threadIdx.x / threads), at(threadIdx.x % threads) {}
    __device__ __forceinline__ int n_vectors(const chain_args &a, int cols) const { return row < a.rows ? cols / 8 : 0; }
};

/* Columns [k0, k0 + cols) of the source into registers. */
template <typename T, int N>
__device__ __forceinline__ void load_panel(vector16 (&v)[N], const chain_args &a, const chain_phase &q, int k0, int cols)
{
    part t(a);
    int n_vectors = t.n_vectors(a, cols);
    const uint4 *x = (const uint4 *)((const T *)q.x + t.row * q.x_stride + k0);
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint4 raw = t.at + i * t.threads < n_vectors ? __ldcg(x + t.at + i * t.threads) : make_uint4(0, 0, 0, 0);
        v[i] = {raw.x, raw.y, raw.z, raw.w};
    }
}

/* From registers into shared memory, normed on the way: then they are whole rows. */
template <typename T, int N>
__device__ __forceinline__ void store_panel(vector16 (&v)[N], const chain_args &a, const chain_phase &q, const places &s, int cols)
{
    part t(a);
    int n_vectors = t.n_vectors(a, cols);
    char *to = s.panel + t.row * (q.depth * (int)sizeof(T) + CHAIN_PAD_BYTES);
    uint4 *h = q.h && blockIdx.x == gridDim.x - 1 - t.row ? (uint4 *)((T *)q.h + t.row * q.h_stride) : nullptr;
    float2 stats = {};
    if (q.h) {
        asm volatile("cp.async.wait_all;" ::: "memory"); /* the norm's weight; row_stats has a barrier */
        stats = row_stats<T, N>(v, q, s, t.at, t.threads, n_vectors);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        int n = t.at + i * t.threads;
        if (n < n_vectors) {
            if (q.h)
                norm_vector<T>(v[i], q, s, stats, n);
            uint4 raw = make_uint4(v[i].v[0], v[i].v[1], v[i].v[2], v[i].v[3]);
            *(uint4 *)(to + n * 16) = raw;
            if (h)
                h[n] = raw;
        }
    }
    warps_sync();
}

/* The weight of a phase's norm on its way into shared memory; store_panel waits for it. */
__device__ __forceinline__ void fetch_norm_weight(const chain_phase &q, const places &s)
{
    if (q.h)
        for (int n = threadIdx.x; n < q.k / 8; n += THREADS)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(s.norm_weight + n * 16)),
                         "l"((const uint4 *)q.norm.weight + n)
                         : "memory");
}

#endif
