/* The choice of experts in a launch of few rows (stream.cu). */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_CHOICE_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_CHOICE_CUH

#include "kernels/cuda/expert_stream/stream_ring.cuh"

namespace expert_stream
{
/* route_row where the greatest scores are chosen and a softmax weighs them, of at most
 * 32 * PER experts: short, since code that runs once is fetched from far, and of one
 * copy, since it is rehearsed. Lane i < top: an expert of the row and its weight, in
 * any order. */
template <int PER>
__device__ __noinline__ int2 route_plain(const expert_route &a, const float *from, int lane)
{
    int expert = 0;
    float weight = 0.0f;
    uint32_t key[PER], first = 0;
    float sum = 0.0f, score[PER];

    scores_wait<PER>(score, from, a.n, lane);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        key[i] = i * 32 + lane < a.n ? choice_key(score[i]) : 0;
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
            expert = most ? index : lane;
            weight = most ? __expf(key_value(most) - key_value(first)) : NAN;
        }
#pragma unroll
        for (int i = 0; i < PER; i++) {
            key[i] = i * 32 + lane == index ? 0 : key[i];
        }
    }
    sum = warp_sum(lane < a.top ? weight : 0.0f);
    if (!a.normalised) { /* over all */
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            sum += i * 32 + lane < a.n ? __expf(score[i] - key_value(first)) : 0.0f;
        }
        sum = warp_sum(sum);
    }
    return make_int2(expert, __float_as_int(weight * (a.factor / sum)));
}

/* Whether a row's choice is route_plain's. */
__device__ __forceinline__ bool is_plain(const expert_route &r)
{
    return !r.sigmoid && !r.mixer && !r.choice_bias && r.n_groups <= 1;
}

/* scores: of the row. */
__device__ __forceinline__ int2 choose_plain(const expert_route &r, const float *scores, int lane)
{
    return r.n <= 128   ? route_plain<4>(r, scores, lane)
           : r.n <= 256 ? route_plain<8>(r, scores, lane)
                        : route_plain<MOST_EXPERTS / 32>(r, scores, lane);
}

/* route_row when the scores are there. */
template <int PER>
__device__ __forceinline__ int2 choose_other(const expert_route &r, int row, const float *scores,
                                             int lane)
{
    float score[PER], weight;
    int expert;

    expert_route at = r;

    scores_wait<PER>(score, scores, r.n, lane);
    at.scores = scores - row * r.scores_stride;
    route_row<PER>(at, row, lane, &expert, &weight);
    return make_int2(expert, __float_as_int(weight));
}

/* Of more than 256 experts; apart, so that its registers are not those of all. */
static __device__ __noinline__ int2 choose_many(const expert_route &r, int row, const float *scores,
                                                int lane)
{
    return choose_other<MOST_EXPERTS / 32>(r, row, scores, lane);
}

/* Brings the code of the choice near, by a warp that has nothing else to do. scores:
 * any. */
__device__ __forceinline__ void rehearse_choice(const expert_route &r, const float *scores,
                                                int lane)
{
    if (is_plain(r)) {
        int2 got = choose_plain(r, scores, lane);
        asm volatile("" ::"r"(got.x), "r"(got.y));
    }
}

/* By the multiplying warps: waits for the scores of all blocks. */
__device__ __forceinline__ void choose(const expert_few &a, chosen_experts &c,
                                       const float *all_scores, int warp, int lane)
{
    const expert_route &r = a.route;
    int live = live_rows(r), expert = 0;
    bool mine = warp < live && lane < r.top;
    float weight = 0.0f;

    if (warp < live) {
        const float *scores = all_scores + warp * r.scores_stride;
        int2 got = is_plain(r)  ? choose_plain(r, scores, lane)
                   : r.n <= 256 ? choose_other<8>(r, warp, scores, lane)
                                : choose_many(r, warp, scores, lane);
        expert = got.x;
        weight = __int_as_float(got.y);
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
        c.pair[all + lane][warp] = (uint8_t)(r.top + lane);
        c.share[all + lane][warp] = 1.0f;
        c.expert[all + lane] = (int16_t)(r.held + lane);
    }
    if (warp == 0 && lane == 0) {
        c.n = live > 0 ? all + a.shared_parts : 0;
    }
}

} // namespace expert_stream

#endif
