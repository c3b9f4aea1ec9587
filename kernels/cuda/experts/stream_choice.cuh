/* The choice of experts in a launch of few rows (stream.cu). */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_STREAM_CHOICE_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_STREAM_CHOICE_CUH

#include "kernels/cuda/experts/stream_ring.cuh"

namespace expert_stream
{
/* route_row where the greatest scores are chosen and a softmax weighs them: short,
 * since code that runs once is fetched from far. Lane i < top: an expert of the row and
 * its weight, in any order. */
__device__ __forceinline__ void route_plain(const expert_route &a, int row, int lane,
                                            int *ret_expert, float *ret_weight)
{
    constexpr int PER = MOST_EXPERTS / 32;
    const float *from = a.scores + row * a.scores_stride;
    uint32_t key[PER], first = 0;
    float sum = 0.0f;

#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        key[i] = e < a.n ? choice_key(__ldcg(from + e)) : 0;
    }
    for (int n = 0; n < a.top; n++) {
        uint32_t most = 0;
        int at = EXPERT_MOST, index;
#pragma unroll
        for (int i = PER - 1; i >= 0; i--) {
            at = key[i] >= most ? i * 32 + lane : at;
            most = max(most, key[i]);
        }
        most = warp_greatest(most, at, &index);
        first = n == 0 ? most : first;
        if (lane == n) {
            *ret_expert = most ? index : lane;
            *ret_weight = most ? __expf(key_value(most) - key_value(first)) : NAN;
        }
#pragma unroll
        for (int i = 0; i < PER; i++) {
            key[i] = i * 32 + lane == index ? 0 : key[i];
        }
    }
    sum = warp_sum(lane < a.top ? *ret_weight : 0.0f);
    if (!a.normalised) { /* over all */
        sum = 0.0f;
        for (int e = lane; e < a.n; e += 32) {
            sum += __expf(__ldcg(from + e) - key_value(first));
        }
        sum = warp_sum(sum);
    }
    *ret_weight *= a.factor / sum;
}

/* By the multiplying warps, when all scores are there. */
__device__ __forceinline__ void choose(const expert_few &a, chosen_experts &c, int tiles, int warp,
                                       int lane)
{
    const expert_route &r = a.route;
    int live = live_rows(r), expert = 0;
    bool mine = warp < live && lane < r.top;
    float weight = 0.0f;

    if (warp < live) {
        if (lane == 0) {
            blocks_wait(a.counter, tiles);
        }
        __syncwarp();
        if (r.sigmoid || r.mixer || r.choice_bias || r.n_groups > 1) {
            route_row<MOST_EXPERTS / 32>(r, warp, lane, &expert, &weight);
        } else {
            route_plain(r, warp, lane, &expert, &weight);
        }
        if (blockIdx.x == gridDim.x - 1 && mine) {
            count_row(r, expert);
        }
        expert = held_place(r, expert);
        mine = mine && expert >= 0;
        if (mine) {
            atomicOr(c.bit + (expert >> 5), 1u << (expert & 31));
        }
    }
    multipliers_sync();
    uint32_t word = lane < MOST_EXPERTS / 32 ? c.bit[lane] : 0;
    int count = __popc(word), end = count;
    for (int o = 1; o < MOST_EXPERTS / 32; o <<= 1) {
        int before = __shfl_up_sync(ROUTE_LANES, end, o);
        end += lane >= o ? before : 0;
    }
    int of = __shfl_sync(ROUTE_LANES, end - count, mine ? expert >> 5 : 0);
    if (mine) {
        int k = of + __popc(c.bit[expert >> 5] & ((1u << (expert & 31)) - 1));
        c.pair[k][warp] = (uint8_t)lane;
        c.share[k][warp] = weight;
        c.expert[k] = (int16_t)expert;
    }
    int all = __shfl_sync(ROUTE_LANES, end, MOST_EXPERTS / 32 - 1);
    if (warp < live && lane < a.shared_parts) {
        c.pair[all + lane][warp] = 0;
        c.share[all + lane][warp] = 1.0f;
        c.expert[all + lane] = (int16_t)(r.held + lane);
    }
    if (warp == 0 && lane == 0) {
        c.n = live > 0 ? all + a.shared_parts : 0;
    }
}

} // namespace expert_stream

#endif
