/* Activations of a fused launch's phase: a part of their depth in the registers of the
 * multiplying warps, normed on the way where a norm comes first.
 *
 * They lie as the matrix instructions take them: a warp has its 64 columns of every
 * stage, a lane of it 16 of these, as two vectors, of row lane / 4. So nobody waits for
 * another warp, but for the sums over a row of which the norm is made.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_ACTIVATIONS_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_ACTIVATIONS_CUH

#include "kernels/cuda/fused_decode/ring.cuh"

enum { VECTORS = 2 * FUSED_SLICE_STAGES };

/* Where shared memory holds what. */
struct shared_storage {
    char *norm_weight;    /* of the phase that is waited for */
    float4 *accumulators; /* [2][FUSED_WARPS][32] */
    float *norm_sums;     /* [2][FUSED_WARPS][FUSED_ROWS] */
    /* shared addresses of barriers: of each finishing warp, of each place */
    uint32_t accumulators_full, accumulators_empty;
};

/* Sum of a row over all warps, from what its four lanes of this warp have. */
__device__ __forceinline__ float sum_over_warps(float x, float *shared)
{
    int lane = threadIdx.x & 31, row = lane >> 2;

    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    if ((lane & 3) == 0) {
        shared[(threadIdx.x >> 5) * FUSED_ROWS + row] = x;
    }
    mma_warps_sync();
    float sum = 0.0f;
    for (int i = 0; i < FUSED_MMA_WARPS; i++) {
        sum += shared[i * FUSED_ROWS + row];
    }
    return sum;
}

/* Two elements of a vector's word as floats, and back. */
template <typename T> __device__ __forceinline__ float2 unpack2(uint32_t v);
template <> __device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack2<__half>(uint32_t v)
{
    return __half22float2(*(const __half2 *)&v);
}

struct vector16 {
    uint32_t v[4];
};

struct accumulator {
    float even[4], odd[4]; /* two sums, so that matrix instructions need not wait for each other */
};

template <typename T>
__device__ __forceinline__ void mma_columns(accumulator &f, const uint4 &low, const uint4 &high,
                                            const vector16 &x)
{
    uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};

    mma16816<T>(f.even, first, x.v[0], x.v[1]);
    mma16816<T>(f.odd, second, x.v[2], x.v[3]);
}

/* A part of a phase's source. Loops over all of it take the vectors in front, and what
 * is in front then goes to the back: code that runs once is fetched from far, so it has
 * to be short. */
template <typename T> struct activations {
    vector16 v[VECTORS]; /* zero where there is nothing */
    int row, lane_at;    /* of this lane; its first column of a stage */

    __device__ __forceinline__ activations(void)
        : row((threadIdx.x & 31) >> 2), lane_at((threadIdx.x >> 5) * WARP_K + (threadIdx.x & 3) * 8)
    {
    }

    /* Whether the part has this warp's columns of the i-th stage, which begins at
     * `at`. */
    __device__ __forceinline__ bool has(const k_range &x, int i, int at) const
    {
        return i < x.n && at + lane_at < x.cols;
    }

    __device__ __forceinline__ void load_slice(const fused_op &q, const k_range &x, int rows)
    {
        const T *from = (const T *)q.x + row * q.x_stride + x.k0 + lane_at;
        int at = x.begin;
#pragma unroll
        for (int i = 0; i < FUSED_SLICE_STAGES; i++) {
            uint4 first = {}, second = {};
            if (row < rows && has(x, i, at)) {
                first = __ldcg((const uint4 *)(from + at));
                second = __ldcg((const uint4 *)(from + at + WARP_K / 2));
            }
            v[2 * i] = {first.x, first.y, first.z, first.w};
            v[2 * i + 1] = {second.x, second.y, second.z, second.w};
            at = x.after(at);
        }
    }

    /* The `n` vectors in front go to the back. */
    template <int n> __device__ __forceinline__ void rotate(void)
    {
        vector16 w[n];
#pragma unroll
        for (int i = 0; i < n; i++) {
            w[i] = v[i];
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            v[i] = i + n < VECTORS ? v[i + n] : w[i + n - VECTORS];
        }
    }

    /* This lane's sum of squares by matrix instructions: the diagonal of x x^T. */
    __device__ __forceinline__ float squares(void) const
    {
        accumulator f = {};
        const uint4 none = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            mma_columns<T>(f, make_uint4(v[i].v[0], v[i].v[1], v[i].v[2], v[i].v[3]), none, v[i]);
        }
        bool mine = (threadIdx.x & 3) == row >> 1;
        return !mine ? 0.0f : row & 1 ? f.even[1] + f.odd[1] : f.even[0] + f.odd[0];
    }

    /* Of a layer norm: this lane's sum, or that of the squares of what differs from the
     * mean. */
    __device__ __forceinline__ float deviations(const k_range &x, bool squared, float mean)
    {
        float sum = 0.0f;
        int at = x.begin;
#pragma unroll 1
        for (int i = 0; i < FUSED_SLICE_STAGES; i++) {
#pragma unroll
            for (int j = 0; j < 8 && has(x, i, at); j++) {
                float2 f = unpack2<T>(v[j / 4].v[j % 4]);
                sum +=
                    squared ? (f.x - mean) * (f.x - mean) + (f.y - mean) * (f.y - mean) : f.x + f.y;
            }
            rotate<2>();
            at = x.after(at);
        }
        return sum;
    }

    /* `plain`: a root mean square norm with no more than a weight. */
    template <bool plain>
    __device__ __forceinline__ void norm_vector(vector16 &x, const fused_op &q,
                                                const shared_storage &s, float2 stats, int at)
    {
        uint4 weight = *(const uint4 *)(s.norm_weight + at * 2), bias = {};
        if (!plain && q.norm.bias) {
            bias = __ldg((const uint4 *)((const T *)q.norm.bias + at));
        }
        const uint32_t w[4] = {weight.x, weight.y, weight.z, weight.w},
                       b[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 f = unpack2<T>(x.v[j]), g = unpack2<T>(w[j]), h = unpack2<T>(b[j]);
            x.v[j] = plain
                         ? pack2<T>(f.x * stats.y * g.x, f.y * stats.y * g.y)
                         : pack2<T>((f.x - stats.x) * stats.y * (g.x + q.norm.weight_offset) + h.x,
                                    (f.y - stats.x) * stats.y * (g.y + q.norm.weight_offset) + h.y);
        }
    }

    template <bool plain>
    __device__ __forceinline__ void norm(const fused_op &q, const shared_storage &s,
                                         const k_range &x, float2 stats)
    {
        int at = x.begin;
#pragma unroll 1
        for (int i = 0; i < FUSED_SLICE_STAGES; i += 2) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (has(x, i + j / 2, at)) {
                    norm_vector<plain>(v[j], q, s, stats, x.k0 + lane_at + at + j % 2 * WARP_K / 2);
                }
                at = j % 2 ? x.after(at) : at;
            }
            rotate<4>();
        }
    }

    /* To the norm's result. */
    __device__ __forceinline__ void store_norm(const fused_op &q, const k_range &x, int rows) const
    {
        int at = x.begin;
        T *h = (T *)q.h + row * q.h_stride + x.k0 + lane_at;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (row < rows && has(x, i / 2, at)) {
                *(uint4 *)(h + at + i % 2 * WARP_K / 2) =
                    make_uint4(v[i].v[0], v[i].v[1], v[i].v[2], v[i].v[3]);
            }
            at = i % 2 ? x.after(at) : at;
        }
    }

    /* Load a part, and norm it where a norm comes first: then the other parts are read
     * too, before it. A layer norm's sums are taken twice, that of the squares once the
     * mean is known. `rows`: that there are, the others are zero. */
    __device__ __forceinline__ void load_normed(const fused_op &q, const shared_storage &s,
                                                int slice, int rows)
    {
        bool layer_norm = q.h && q.norm.layer_norm;
        float2 stats = {};
        if (q.h) {
            /* the norm's weight; row_sum has a barrier */
            asm volatile("cp.async.wait_all;" ::: "memory");
        }
        for (int round = layer_norm ? 0 : 1; round < 2; round++) {
            float sum = 0.0f;
            for (int i = q.h ? 1 : q.slices; i <= q.slices; i++) {
                k_range x(q, (slice + i) % q.slices);
                if (round == 1 - layer_norm || q.slices > 1) {
                    load_slice(q, x, rows);
                }
                if (q.h) {
                    sum += layer_norm ? deviations(x, round == 1, stats.x) : squares();
                }
            }
            if (!q.h) {
                return;
            }
            sum = sum_over_warps(sum, s.norm_sums + round * FUSED_MMA_WARPS * FUSED_ROWS) / q.k;
            (round == 0 ? stats.x : stats.y) = sum;
        }
        stats.y = rsqrtf(stats.y + q.norm.eps);
        if (layer_norm || q.norm.bias || q.norm.weight_offset != 0.0f) {
            norm<false>(q, s, k_range(q, slice), stats);
        } else {
            norm<true>(q, s, k_range(q, slice), stats);
        }
    }
};

/* The weight of a phase's norm on its way into shared memory; source::take waits for
 * it. */
__device__ __forceinline__ void fetch_norm_weight(const fused_op &q, const shared_storage &s)
{
    if (!q.h) {
        return;
    }
    /* one that nobody took, of a block that had nothing to do */
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int n = threadIdx.x; n < q.k / 8; n += MMA_THREADS) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         shared_address(s.norm_weight + n * 16)),
                     "l"((const uint4 *)q.norm.weight + n)
                     : "memory");
    }
}

#endif
