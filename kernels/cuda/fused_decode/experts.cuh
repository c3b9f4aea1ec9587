/* The products of a layer of experts in a fused launch (choice.cuh): what the MMA warps
 * and the epilogue warps do apart from other products. */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_EXPERTS_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_EXPERTS_CUH

#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/fused_decode/activations.cuh"

/* By the MMA warps, when the scores are there. */
__device__ __forceinline__ void choose_experts(const fused_args &a, const choice_view &c)
{
    const expert_route &route = a.experts.route;
    int warp = threadIdx.x >> 5, rows = c.choice->rows;

    if (warp < rows) {
        choose_row(*c.choice, route, warp, threadIdx.x & 31);
    }
    mma_warps_sync();
    place_experts(*c.choice, route, rows, threadIdx.x, MMA_THREADS);
    mma_warps_sync();
    if (threadIdx.x == 0) {
        barrier_arrive(c.made);
    }
}

/* Stages of a slice of FUSED_EXPERT_DOWN, at most: FUSED_DOWN_K columns. */
template <int F> constexpr int DOWN_STAGES = FUSED_DOWN_K / stage_shape<F>::K;

/* The activations of a slice: a row's pair with each expert, zero where it has none.
 * They lie as those of other ops do (struct activations). */
template <typename T, int F>
__device__ __forceinline__ void load_pairs(vector16 *x, const fused_args &a, const fused_op &q,
                                           const expert_choice &c, const down_slice &part)
{
    using S = stage_shape<F>;
    int row = (threadIdx.x & 31) >> 2, place = part.first, at = part.begin;
    int lane_at = (threadIdx.x >> 5) * S::WARP_K + (threadIdx.x & 3) * S::CODES;

#pragma unroll
    for (int i = 0; i < DOWN_STAGES<F>; i++) {
        int of_row = i < part.n_stages ? c.of_row[place][row] : -1;
        const T *from = (const T *)q.x + (row * a.experts.route.top + of_row) * q.x_stride;
        bool here = of_row >= 0 && at + lane_at < part.end;
#pragma unroll
        for (int j = 0; j < S::VECTORS; j++) {
            uint4 u = {};
            if (here) {
                u = __ldcg((const uint4 *)(from + at + lane_at + S::column(j)));
            }
            x[S::VECTORS * i + j] = {u.x, u.y, u.z, u.w};
        }
        at += S::K;
        if (at >= part.end) {
            at = part.begin;
            place++;
        }
    }
    if (F == FUSED_FP8) {
        to_e4m3_order<DOWN_STAGES<F> * S::VECTORS>(x);
    }
}

/* sum += the expert's results times its weight in two rows of activations, and the
 * scales of two rows of its matrix. A row that did not choose it takes nothing, not
 * even of a result that is no number. */
__device__ __forceinline__ void add_weighted(float (&sum)[4], const accumulator &f, float2 weight,
                                             const float (&scale)[2])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float w = i & 1 ? weight.y : weight.x;
        sum[i] += w == 0.0f ? 0.0f : w * (scale[i >> 1] * (f.even[i] + f.odd[i]));
    }
}

/* The sum over the slice's experts of weight times bias, for this lane's results. */
template <typename T>
__device__ __forceinline__ void add_biases(float4 &all, const fused_args &a, const fused_op &q,
                                           const expert_choice &c, int slice,
                                           const int (&column)[2], int row)
{
    down_slice part(a, q, c, slice);
    int end = min(part.first + a.experts.per_slice, c.n);

    for (int place = part.first; place < end && q.bias && part.begin == 0; place++) {
        const T *bias = (const T *)q.bias + (int64_t)c.expert[place] * q.n;
        float low = to_float(__ldg(bias + column[0])), high = to_float(__ldg(bias + column[1]));
        float w = c.weight[place][row], v = c.weight[place][row + 1];
        all.x += w * low;
        all.y += v * low;
        all.z += w * high;
        all.w += v * high;
    }
}

/* Of FUSED_ROUTER: float32 scores. */
template <typename T>
__device__ __forceinline__ void store_scores(const fused_args &a, const fused_op &q,
                                             const float4 &all, const int (&column)[2], int row)
{
    const float sum[4] = {all.x, all.y, all.z, all.w};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = row + (i & 1), at = column[i >> 1];
        if (r < a.rows) {
            float bias = q.bias ? to_float(((const T *)q.bias)[at]) : 0.0f;
            __stcg((float *)q.out + r * q.out_stride + at, sum[i] + bias);
        }
    }
}

__device__ __noinline__ float gated(float gate, float up, int act, float limit)
{
    return expert_gate(gate, up, act, limit);
}

/* Of FUSED_EXPERT_UP, of the expert at `place`: the gated results of rows that chose
 * it, by pair. */
template <typename T>
__device__ __forceinline__ void
store_pairs(const fused_args &a, const fused_op &q, const expert_choice &c, int place,
            const float4 &all, const float (&scale)[2], const int (&column)[2], int row)
{
    const float gate[2] = {all.x, all.y}, up[2] = {all.z, all.w};
    const T *bias = (const T *)q.bias + (int64_t)c.expert[place] * q.n;
    float gate_bias = q.bias ? to_float(__ldg(bias + column[0])) : 0.0f;
    float up_bias = q.bias ? to_float(__ldg(bias + column[1])) : 0.0f;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        int of_row = c.of_row[place][row + i];
        if (of_row >= 0) {
            ((T *)
                 q.gated)[((row + i) * a.experts.route.top + of_row) * q.gated_stride + column[0]] =
                from_float<T>(gated(gate[i] * scale[0] + gate_bias, up[i] * scale[1] + up_bias,
                                    q.gate_act, a.experts.limit));
        }
    }
}

#endif
