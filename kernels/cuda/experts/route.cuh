/* The choice of a row's experts by one warp: a lane holds every 32nd expert's score,
 * and each choice is two reductions over the warp. */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_ROUTE_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_ROUTE_CUH

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/experts/experts.h"

#define ROUTE_LANES 0xffffffffu

/* Unsigned numbers in the order of floats; 0: not to be chosen (no number, or
 * -infinity). */
__device__ __forceinline__ uint32_t choice_key(float c)
{
    uint32_t u = __float_as_uint(c + 0.0f);

    return !(c > -INFINITY) ? 0 : u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The greatest key of the warp, and in *index the smallest index that has it. */
__device__ __forceinline__ uint32_t warp_greatest(uint32_t key, int at, int *index)
{
    uint32_t most = __reduce_max_sync(ROUTE_LANES, key);

    *index = (int)__reduce_min_sync(ROUTE_LANES, key == most ? (unsigned)at : ~0u);
    return most;
}

/* The scores of a row: element i of a lane is expert i * 32 + lane. */
template <int PER> struct row_scores {
    float s[PER];    /* the share or score of each expert */
    uint32_t c[PER]; /* the key that the choice goes by; 0: not to be chosen */
};

template <int PER>
__device__ __forceinline__ void load_scores(row_scores<PER> &r, const expert_route &a, int row,
                                            int lane)
{
    const float *from = a.scores + row * a.scores_stride;
    float most = -INFINITY, sum = 0.0f;
    bool products = !a.sigmoid && !a.choice_bias && !a.groups_by_two;

#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        r.s[i] = e < a.n ? from[e] : -INFINITY;
        r.c[i] = e < a.n ? choice_key(r.s[i]) : 0;
        most = fmaxf(most, r.s[i]);
    }
    if (a.mixer) { /* its scores are the products */
        return;
    }
    most = warp_max(most);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        r.s[i] = a.sigmoid ? 1.0f / (1.0f + expf(-r.s[i])) : expf(r.s[i] - most);
        sum += r.s[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        r.s[i] /= a.sigmoid ? 1.0f : sum;
        if (!products && e < a.n) {
            r.c[i] = choice_key(r.s[i] + (a.choice_bias ? a.choice_bias[e] : 0.0f));
        }
    }
}

__device__ __forceinline__ float key_value(uint32_t key)
{
    return key == 0 ? NAN : __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* Leave the experts of the best groups alone. Lane g weighs group g. */
template <int PER>
__device__ __forceinline__ void choose_groups(row_scores<PER> &r, const expert_route &a, int lane)
{
    int size = a.n / a.n_groups;
    uint32_t worth = 0, stays = 0;

    for (int g = 0; g < a.n_groups; g++) {
        uint32_t best[2];
        int taken = -1;
        for (int round = 0; round < 2; round++) {
            uint32_t most = 0;
            int at = -1;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                int e = i * 32 + lane;
                if (e / size == g && e != taken && r.c[i] > most) {
                    most = r.c[i];
                    at = e;
                }
            }
            best[round] = warp_greatest(most, at, &taken);
        }
        float sum = key_value(best[0]);
        if (a.groups_by_two && size > 1) {
            sum += key_value(best[1]);
        }
        worth = lane == g ? choice_key(sum) : worth;
    }
    for (int i = 0; i < a.top_groups; i++) {
        int g;
        if (warp_greatest(worth, lane, &g) > 0) {
            stays |= 1u << g;
            worth = lane == g ? 0 : worth;
        }
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int g = min((i * 32 + lane) / size, 31);
        r.c[i] = stays >> g & 1 ? r.c[i] : 0;
    }
}

/* The greatest of the keys, which is taken, and its score; false: there is none. */
template <int PER>
__device__ __forceinline__ bool take_greatest(row_scores<PER> &r, int lane, int *ret, float *score)
{
    uint32_t most = 0;
    int at = EXPERT_MOST;
    float share = 0.0f;

#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (r.c[i] > most) {
            most = r.c[i];
            at = i * 32 + lane;
            share = r.s[i];
        }
    }
    if (warp_greatest(most, at, ret) == 0) {
        return false;
    }
    *score = __shfl_sync(ROUTE_LANES, share, *ret & 31);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        r.c[i] = i * 32 + lane == *ret ? 0 : r.c[i];
    }
    return true;
}

/* The weight of an expert whose product is p among those that a sparse mixer has not
 * chosen yet; it is itself the one of index `best`. */
template <int PER>
__device__ __forceinline__ float mixer_weight(const row_scores<PER> &r, const expert_route &a,
                                              float p, int best, int lane)
{
    float sum = 0.0f;

#pragma unroll
    for (int i = 0; i < PER; i++) {
        float away = (p - r.s[i]) / fmaxf(fabsf(r.s[i]), p);
        bool left = r.c[i] != 0 || i * 32 + lane == best;
        sum += left && !(away > 2.0f * a.jitter) ? expf(r.s[i] - p) : 0.0f;
    }
    return 1.0f / warp_sum(sum);
}

/* Lane i < top: the row's i-th expert by index, and its weight. */
template <int PER>
__device__ __forceinline__ void route_row(const expert_route &a, int row, int lane, int *ret_expert,
                                          float *ret_weight)
{
    row_scores<PER> r;
    int expert = -1, n = 0;
    float weight = 0.0f, sum = 0.0f;

    load_scores(r, a, row, lane);
    if (a.n_groups > 1) {
        choose_groups(r, a, lane);
    }
    for (; n < a.top; n++) {
        int index;
        float share;
        if (!take_greatest(r, lane, &index, &share)) {
            break;
        }
        share = a.mixer ? mixer_weight(r, a, share, index, lane) : share;
        sum += share;
        expert = lane == n ? index : expert;
        weight = lane == n ? share : weight;
    }
    if (n < a.top) { /* not enough numbers among the scores: it shows in the logits */
        *ret_expert = lane;
        *ret_weight = NAN;
        return;
    }
    weight *= a.factor / (a.normalised ? sum : 1.0f);
    if (a.scale && lane < a.top) {
        weight *= a.scale[expert];
    }
    int place = 0; /* in the order of the indices */
    for (int i = 0; i < a.top; i++) {
        place += __shfl_sync(ROUTE_LANES, expert, i) < expert;
    }
    int from = 0;
    for (int i = 0; i < a.top; i++) {
        int at = __shfl_sync(ROUTE_LANES, place, i);
        from = at == lane ? i : from;
    }
    *ret_expert = __shfl_sync(ROUTE_LANES, expert, from);
    *ret_weight = __shfl_sync(ROUTE_LANES, weight, from);
}

/* The number of expert e among those that are held here; -1: it is not. */
__device__ __forceinline__ int held_place(const expert_route &a, int e)
{
    int i = e - a.first;

    return i >= 0 && i < a.held ? i : -1;
}

/* Counts a row for one of its experts. */
__device__ __forceinline__ void count_row(const expert_route &a, int expert)
{
    if (a.load) {
        atomicAdd(a.load + expert, 1);
    }
}

__device__ __forceinline__ int live_rows(const expert_route &a)
{
    return a.n_live ? min(*a.n_live, a.rows) : a.rows;
}

#endif
