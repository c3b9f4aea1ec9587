/* The products of a layer of experts in a fused launch (choice.cuh): what the MMA warps
 * and the epilogue warps do apart from other products. */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_EXPERTS_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_EXPERTS_CUH

#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/fused_decode/activations.cuh"

/* By the MMA warps, when the scores are there. `warm`: on any scores, to have the code
 * fetched; nobody is told. */
__device__ __forceinline__ void choose_experts(const fused_args &a, const choice_view &c, bool warm)
{
    const expert_route &route = a.experts.route;
    int warp = threadIdx.x >> 5, rows = warm ? 1 : live_rows(route);

    if (warp < rows) {
        choose_row(*c.choice, route, warp, threadIdx.x & 31);
    }
    mma_warps_sync();
    place_experts(*c.choice, route, rows, threadIdx.x, MMA_THREADS);
    mma_warps_sync();
    if (warm) {
        clear_choice(*c.choice, threadIdx.x, MMA_THREADS);
        mma_warps_sync();
    } else if (threadIdx.x == 0) {
        barrier_arrive(c.made);
    }
}

/* Where a lane is in the stages of a slice of FUSED_EXPERT_DOWN: they go through the
 * depth of one expert after another. */
struct down_stage {
    int place, at; /* of the expert; first column of the stage */

    template <int K> __device__ __forceinline__ void next(int cols)
    {
        at += K;
        if (at >= cols) {
            at = 0;
            place++;
        }
    }
};

/* The activations of a slice: a row's pair with each expert, zero where it has none. */
template <typename T, int F>
__device__ __forceinline__ void load_pairs(activations<T, F> &x, const fused_args &a,
                                           const fused_op &q, const expert_choice &c, int first,
                                           int n_stages)
{
    using S = stage_shape<F>;
    down_stage d = {first, 0};

#pragma unroll
    for (int i = 0; i < S::SLICE_STAGES; i++) {
        int of_row = i < n_stages ? c.of_row[d.place][x.row] : -1;
        const T *from = (const T *)q.x + (x.row * a.experts.route.top + of_row) * q.x_stride +
                        d.at + x.lane_at;
        bool here = of_row >= 0 && d.at + x.lane_at < q.k;
#pragma unroll
        for (int j = 0; j < S::VECTORS; j++) {
            uint4 u = {};
            if (here) {
                u = __ldcg((const uint4 *)(from + S::column(j)));
            }
            x.v[S::VECTORS * i + j] = {u.x, u.y, u.z, u.w};
        }
        d.next<S::K>(q.k);
    }
}

/* sum += the expert's results times its weight in two rows of activations, and the scales
 * of two rows of its matrix. A row that did not choose it takes nothing, not even of a
 * result that is no number. */
__device__ __forceinline__ void add_weighted(accumulator &sum, const accumulator &f, float2 weight,
                                             const float (&scale)[2])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float w = i & 1 ? weight.y : weight.x;
        sum.even[i] += w == 0.0f ? 0.0f : w * (scale[i >> 1] * (f.even[i] + f.odd[i]));
    }
}

/* The sum over the slice's experts of weight times bias, for this lane's results. */
template <typename T>
__device__ __forceinline__ void add_biases(float4 &all, const fused_args &a, const fused_op &q,
                                           const expert_choice &c, int slice, const int (&column)[2],
                                           int row)
{
    int first = slice * a.experts.per_slice, end = min(first + a.experts.per_slice, c.n);

    for (int place = first; place < end && q.bias; place++) {
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

/* Of FUSED_EXPERT_UP, of the expert at `place`: the gated results of rows that chose it,
 * by pair. */
template <typename T>
__device__ __forceinline__ void store_pairs(const fused_args &a, const fused_op &q,
                                            const expert_choice &c, int place, const float4 &all,
                                            const float (&scale)[2], const int (&column)[2],
                                            int row)
{
    const float gate[2] = {all.x, all.y}, up[2] = {all.z, all.w};
    const T *bias = (const T *)q.bias + (int64_t)c.expert[place] * q.n;
    float gate_bias = q.bias ? to_float(__ldg(bias + column[0])) : 0.0f;
    float up_bias = q.bias ? to_float(__ldg(bias + column[1])) : 0.0f;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        int of_row = c.of_row[place][row + i];
        if (of_row >= 0) {
            ((T *)q.gated)[((row + i) * a.experts.route.top + of_row) * q.gated_stride +
                           column[0]] =
                from_float<T>(gated(gate[i] * scale[0] + gate_bias, up[i] * scale[1] + up_bias,
                                    q.gate_act, a.experts.limit));
        }
    }
}

#endif
