/* Activations of a fused op: one split-K slice in the registers of the MMA warps,
 * normed on the way in if the op starts with a norm.
 *
 * They lie as the matrix instruction takes its B operand: a warp has its 64 columns of
 * every stage, a lane 16 of these, as two vectors, of row lane / 4. So no warp depends
 * on another, except for a norm's sums over a row.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_ACTIVATIONS_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_ACTIVATIONS_CUH

#include "kernels/cuda/fused_decode/ring.cuh"
#include "kernels/cuda/gemm/async_copy.cuh"

/* Vectors of 8 activations that a lane has of a slice. */
enum { VECTORS = FUSED_SLICE_K / FUSED_MMA_WARPS / 4 / 8 };

/* Pointers into shared memory, behind the ring's stages. */
struct shared_storage {
    char *norm_weight;    /* weight of the next norm */
    float4 *accumulators; /* [2][FUSED_MMA_WARPS][32]: two tiles */
    float *norm_sums;     /* [2][FUSED_MMA_WARPS][FUSED_ROWS]: sums for mean and for variance */
    /* mbarriers' addresses: one per epilogue warp, one per buffer */
    uint32_t accumulators_full, accumulators_empty;
};

/* Sum of a row over all MMA warps, from what its four lanes of this warp have. */
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

/* The two elements of a 32-bit word as floats. */
template <typename T> __device__ __forceinline__ float2 unpack2(uint32_t v);
template <> __device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack2<__half>(uint32_t v)
{
    return __half22float2(*(const __half2 *)&v);
}

/* Eight 16-bit elements. */
struct vector16 {
    uint32_t v[4]; /* two elements each */
};

struct accumulator {
    float even[4], odd[4]; /* two sums, so that matrix instructions do not depend on each other */
};

template <typename T>
__device__ __forceinline__ void mma_columns(accumulator &f, const uint4 &low, const uint4 &high,
                                            const vector16 &x)
{
    uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};

    mma16816<T>(f.even, first, x.v[0], x.v[1]);
    mma16816<T>(f.odd, second, x.v[2], x.v[3]);
}

/* The activations of a split-K slice, as weights of format F meet them. Loops over
 * them process the front vectors and rotate these to the back, instead of being
 * unrolled: code that runs once is fetched from far, so it must be short. */
template <typename T, int F> struct activations {
    using S = stage_shape<F>;
    vector16 v[VECTORS]; /* zero past the rows and columns */
    int row, lane_at;    /* this lane's row; its first column in a stage */

    __device__ __forceinline__ activations(void)
        : row((threadIdx.x & 31) >> 2),
          lane_at((threadIdx.x >> 5) * S::WARP_K + (threadIdx.x & 3) * S::CODES)
    {
    }

    /* Whether the slice has this warp's columns of the i-th stage, which begins at
     * `at`. */
    __device__ __forceinline__ bool has(const k_range<F> &x, int i, int at) const
    {
        return i < x.n && at + lane_at < x.cols;
    }

    __device__ __forceinline__ void load_slice(const fused_op &q, const k_range<F> &x, int rows)
    {
        const T *from = (const T *)q.x + row * q.x_stride + x.k0 + lane_at;
        int at = x.begin;
#pragma unroll
        for (int i = 0; i < S::SLICE_STAGES; i++) {
            bool here = row < rows && has(x, i, at);
#pragma unroll
            for (int j = 0; j < S::VECTORS; j++) {
                uint4 u = {};
                if (here) {
                    u = __ldcg((const uint4 *)(from + at + S::column(j)));
                }
                v[S::VECTORS * i + j] = {u.x, u.y, u.z, u.w};
            }
            at = x.after(at);
        }
    }

    /* Rotates the `n` front vectors to the back. */
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

    /* This lane's sum of squares, by matrix instructions: the diagonal of x x^T. */
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

    /* For a layer norm: this lane's sum, or its sum of squared deviations from the
     * mean. */
    __device__ __forceinline__ float deviations(const k_range<F> &x, bool squared, float mean)
    {
        float sum = 0.0f;
        int at = x.begin;
#pragma unroll 1
        for (int i = 0; i < VECTORS; i += 2) {
#pragma unroll
            for (int j = 0; j < 8 && has(x, i / S::VECTORS, at); j++) {
                float2 f = unpack2<T>(v[j / 4].v[j % 4]);
                sum +=
                    squared ? (f.x - mean) * (f.x - mean) + (f.y - mean) * (f.y - mean) : f.x + f.y;
            }
            rotate<2>();
            at = (i + 2) % S::VECTORS == 0 ? x.after(at) : at;
        }
        return sum;
    }

    /* plain: an RMS norm with only a weight. */
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
                                         const k_range<F> &x, float2 stats)
    {
        int at = x.begin;
#pragma unroll 1
        for (int i = 0; i < VECTORS; i += 4) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int in_stage = (i + j) % S::VECTORS;
                if (has(x, (i + j) / S::VECTORS, at)) {
                    norm_vector<plain>(v[j], q, s, stats,
                                       x.k0 + lane_at + at + S::column(in_stage));
                }
                at = in_stage + 1 == S::VECTORS ? x.after(at) : at;
            }
            rotate<4>();
        }
    }

    /* Puts each four columns into the order in which e4m3_values has their codes. */
    __device__ __forceinline__ void to_e4m3_order(void)
    {
#pragma unroll 1
        for (int i = 0; i < VECTORS; i += 4) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                uint32_t *at = &v[j / 2].v[j % 2 * 2], first = at[0], second = at[1];
                at[0] = __byte_perm(first, second, 0x5410);
                at[1] = __byte_perm(first, second, 0x7632);
            }
            rotate<4>();
        }
    }

    /* Puts each 32 columns into the order in which a segment's words have codes. */
    __device__ __forceinline__ void to_segment_order(void)
    {
#pragma unroll 1
        for (int i = 0; i < VECTORS; i += 4) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int k = 0; k < j; k++) {
                    uint32_t other = v[j].v[k];
                    v[j].v[k] = v[k].v[j];
                    v[k].v[j] = other;
                }
            }
            rotate<4>();
        }
    }

    /* Stores the slice to the norm's result. */
    __device__ __forceinline__ void store_norm(const fused_op &q, const k_range<F> &x,
                                               int rows) const
    {
        int at = x.begin;
        T *h = (T *)q.h + row * q.h_stride + x.k0 + lane_at;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (row < rows && has(x, i / S::VECTORS, at)) {
                *(uint4 *)(h + at + S::column(i % S::VECTORS)) =
                    make_uint4(v[i].v[0], v[i].v[1], v[i].v[2], v[i].v[3]);
            }
            at = (i + 1) % S::VECTORS == 0 ? x.after(at) : at;
        }
    }

    /* Loads a slice, normed if the op starts with a norm; then the other slices are
     * read first, for its sums. A layer norm takes two passes, the second for the
     * squares once the mean is known. rows: rows that exist; others become zero. */
    __device__ __forceinline__ void load_normed(const fused_op &q, const shared_storage &s,
                                                int slice, int rows)
    {
        bool layer_norm = q.h && q.norm.layer_norm;
        float2 stats = {};
        if (q.h) {
            /* this thread's part of the norm's weight; sum_over_warps has a barrier for
             * the rest */
            asm volatile("cp.async.wait_all;" ::: "memory");
        }
        for (int round = layer_norm ? 0 : 1; round < 2; round++) {
            float sum = 0.0f;
            for (int i = q.h ? 1 : q.slices; i <= q.slices; i++) {
                k_range<F> x(q, (slice + i) % q.slices);
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
            norm<false>(q, s, k_range<F>(q, slice), stats);
        } else {
            norm<true>(q, s, k_range<F>(q, slice), stats);
        }
    }
};

/* Starts copying the weight of an op's norm to shared memory; load_normed waits for
 * it. */
__device__ __forceinline__ void fetch_norm_weight(const fused_op &q, const shared_storage &s)
{
    if (!q.h) {
        return;
    }
    /* an earlier copy may be pending in a block that had no tiles */
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int n = threadIdx.x; n < q.k / 8; n += MMA_THREADS) {
        async_copy(shared_address(s.norm_weight + n * 16), (const uint4 *)q.norm.weight + n);
    }
}

#endif
