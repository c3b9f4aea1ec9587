/* Looking through a row of logits: its view, statistics, and thresholds by histograms.
 *
 * Nothing is sorted: a threshold (top-k, top-p, the n best) is found by histograms of integer keys, eleven bits a pass
 * from the widest bits down, counts or fixed-point masses summed exactly, so that no result depends on the order of
 * threads.
 */
#ifndef QUIRE_CUDA_SAMPLE_ROW_CUH
#define QUIRE_CUDA_SAMPLE_ROW_CUH

#include "kernels/cuda/cluster.cuh"
#include "kernels/noise.h"

enum { SAMPLE_THREADS = 1024, BUCKETS = 2048, MAX_CLUSTER = 8, MAX_BEST = 256 };

/* struct sample_row, token_count, token_bias of batch.h */
struct row_params {
    int32_t logits_row, kind;
    float temperature, top_p, min_p;
    int32_t top_k;
    float presence_penalty, frequency_penalty, repetition_penalty;
    int32_t n_logprobs, n_candidates, target;
    uint64_t seed;
    int32_t position, prev_sample;
    int32_t counts_first, n_counts, bias_first, n_bias, allowed_first, n_allowed;
};
static_assert(sizeof(row_params) == 88, "struct sample_row of batch.h");
enum { KIND_TOKEN, KIND_CANDIDATES, KIND_SCORE };
struct count_entry {
    int32_t token, n_output, in_prompt;
};
struct bias_entry {
    int32_t token;
    float bias;
};

/* What a scan of the row found: the greatest as (order key, ~token), so that the smallest token wins a tie. */
struct stats {
    unsigned long long best; /* 0: nothing above -infinity */
    uint32_t bad;            /* a NaN or +infinity */
    uint32_t least;          /* order key of the least above -infinity */
    float sum;               /* of exp(l - max) */
};

struct shared_state {
    unsigned long long bucket[BUCKETS]; /* or the list that draw sorts */
    unsigned long long scan[32];
    stats part[33];
    unsigned long long pick;      /* this block's reductions, read by the others of the cluster */
    stats whole;
    unsigned long long skipped, inside; /* narrow: weight above the chosen bucket and in it */
    int32_t chosen;
    int32_t n_list; /* draw's list, in `bucket` of the cluster's first block */
    uint32_t floor; /* order key of the least z that stays, there too */
    int32_t n_best;
    int32_t prev_seen;
    float prev_saved;
    uint32_t best_key[MAX_BEST];
    int32_t best_token[MAX_BEST];
};

struct row_view {
    float *l;                /* the whole row */
    int lo, hi;              /* this block's slice */
    const uint32_t *allowed; /* bitmap of the slice, or NULL */
};

__device__ __forceinline__ float at(const row_view &r, int t)
{
    if (r.allowed && !(r.allowed[(t - r.lo) >> 5] >> ((t - r.lo) & 31) & 1))
        return -INFINITY;
    return r.l[t];
}

/* f(token, logit) for the slice, by whole warps, ascending in each thread; lanes past the end see -infinity. */
template <typename F> __device__ __forceinline__ void for_row(const row_view &r, F f)
{
    int n = (uintptr_t)r.l % 16 == 0 ? (r.hi - r.lo) / 4 : 0; /* of four tokens; slices begin at multiples of 32 */
    for (int k = threadIdx.x; (k & ~31) < n; k += blockDim.x) {
        int t = r.lo + 4 * k;
        float4 v = k < n ? *(const float4 *)(r.l + t) : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        uint32_t may = r.allowed && k < n ? r.allowed[4 * k >> 5] >> (4 * k & 31) : 0xFu;
        f(t, may & 1 ? v.x : -INFINITY);
        f(t + 1, may & 2 ? v.y : -INFINITY);
        f(t + 2, may & 4 ? v.z : -INFINITY);
        f(t + 3, may & 8 ? v.w : -INFINITY);
    }
    for (int t = r.lo + 4 * n + threadIdx.x; t - (int)(threadIdx.x & 31) < r.hi; t += blockDim.x)
        f(t, t < r.hi ? at(r, t) : -INFINITY);
}

__device__ __forceinline__ float key_float(uint32_t k)
{
    return noise_bits_float(k & 0x80000000u ? k & 0x7FFFFFFFu : ~k);
}

__device__ __forceinline__ float stats_max(const stats &s) { return key_float((uint32_t)(s.best >> 32)); }
__device__ __forceinline__ int stats_token(const stats &s) { return s.best == 0 || s.bad ? -1 : (int)~(uint32_t)s.best; }

__device__ __forceinline__ void stats_join(stats &a, const stats &b)
{
    if (b.best != 0) {
        if (a.best == 0) {
            a.sum = b.sum;
        } else {
            float ma = stats_max(a), mb = stats_max(b), m = fmaxf(ma, mb);
            a.sum = a.sum * expf(ma - m) + b.sum * expf(mb - m);
        }
    }
    a.best = max(a.best, b.best);
    a.bad |= b.bad;
    a.least = min(a.least, b.least);
}

__device__ __forceinline__ stats stats_none(void) { return {0ull, 0, 0xFFFFFFFFu, 0.0f}; }

/* Of the lanes of a warp, in lane 0. */
__device__ __forceinline__ stats stats_warp(stats s)
{
    for (int o = 16; o > 0; o >>= 1) {
        stats b;
        b.best = __shfl_down_sync(0xffffffffu, s.best, o);
        b.bad = __shfl_down_sync(0xffffffffu, s.bad, o);
        b.least = __shfl_down_sync(0xffffffffu, s.least, o);
        b.sum = __shfl_down_sync(0xffffffffu, s.sum, o);
        stats_join(s, b);
    }
    return s;
}

/* Greatest, least, sum of exponentials of the row; the same in all threads of the cluster. */
__device__ stats row_stats(const row_view &r, shared_state *sh)
{
    const block_cluster cluster;
    float m = -INFINITY, sum = 0.0f, least = INFINITY;
    int token = 0;
    uint32_t bad = 0;
    for_row(r, [&](int t, float v) {
        bad |= !(v < INFINITY);
        if (v > m) {
            sum = sum * __expf(m - v) + 1.0f;
            m = v;
            token = t;
        } else if (v > -INFINITY) {
            sum += __expf(v - m);
        }
        least = fminf(least, v > -INFINITY ? v : INFINITY);
    });
    stats s = {m == -INFINITY ? 0ull : (unsigned long long)sample_order(m) << 32 | (uint32_t)~token, bad,
               least == INFINITY ? 0xFFFFFFFFu : sample_order(least), sum};
    s = stats_warp(s);
    if ((threadIdx.x & 31) == 0)
        sh->part[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x < 32) {
        s = stats_warp(sh->part[threadIdx.x]);
        if (threadIdx.x == 0)
            sh->whole = s;
    }
    cluster.sync();
    if (threadIdx.x == 0) {
        stats all = *cluster.of(&sh->whole, 0);
        for (unsigned i = 1; i < cluster.blocks(); i++)
            stats_join(all, *cluster.of(&sh->whole, i));
        sh->part[32] = all;
    }
    cluster.sync();
    return sh->part[32];
}

/* Inclusive sum over the threads of the block; the total in *total. */
__device__ __forceinline__ unsigned long long block_scan(unsigned long long sum, shared_state *sh, unsigned long long *total)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int o = 1; o < 32; o <<= 1) {
        unsigned long long up = __shfl_up_sync(0xffffffffu, sum, o);
        if (lane >= o)
            sum += up;
    }
    if (lane == 31)
        sh->scan[warp] = sum;
    __syncthreads();
    unsigned long long before = 0, all = 0;
    for (int i = 0; i < SAMPLE_THREADS / 32; i++) {
        before += i < warp ? sh->scan[i] : 0;
        all += sh->scan[i];
    }
    *total = all;
    return before + sum;
}

/* Where a threshold is looked for: the greatest key for which the weights of the entries with that key or a greater one sum
 * to at least the goal. It lies in [lo, hi]; `above` is the weight of greater keys, `inside` of those in the range, and the
 * goal what those in the range still have to give. */
struct selection {
    uint32_t lo, hi;
    unsigned long long above, goal, inside;
};

/* *sum += weight, by all threads at once. Shared memory adds 32 bits natively, 64 only by trial: so the low half first, and
 * its carry with the high half. */
__device__ __forceinline__ void add_weight(unsigned long long *sum, unsigned long long weight)
{
    uint32_t low = (uint32_t)weight, high = (uint32_t)(weight >> 32);
    uint32_t *half = (uint32_t *)sum;
    high += atomicAdd(&half[0], low) + low < low;
    if (high != 0)
        atomicAdd(&half[1], high);
}

/* One pass: of at most BUCKETS equal parts of [lo, hi] keep the one that holds the threshold. `entry(token, logit, lo, hi,
 * &key, &weight)` says whether a token takes part with a key in that range; goal_of makes the goal of the sum of all
 * weights at the first pass. Same answer in all threads of the cluster. */
template <typename E, typename G>
__device__ void narrow(const row_view &r, shared_state *sh, selection &s, bool first, E entry, G goal_of)
{
    const block_cluster cluster;
    int shift = 0;
    while ((s.hi - s.lo) >> shift >= BUCKETS)
        shift++;
    for (int i = threadIdx.x; i < BUCKETS; i += blockDim.x)
        sh->bucket[i] = 0;
    __syncthreads();
    for_row(r, [&](int t, float l) {
        uint32_t key;
        unsigned long long weight;
        if (entry(t, l, s.lo, s.hi, &key, &weight))
            add_weight(&sh->bucket[(key - s.lo) >> shift], weight);
    });
    cluster.sync();
    /* thread i sums two buckets, from the top, over the cluster */
    int top = BUCKETS - 1 - 2 * (int)threadIdx.x;
    unsigned long long a = 0, b = 0, total;
    for (unsigned i = 0; i < cluster.blocks(); i++) {
        const unsigned long long *other = cluster.of(sh->bucket, i);
        a += other[top];
        b += other[top - 1];
    }
    unsigned long long upto = block_scan(a + b, sh, &total), over = upto - a - b; /* over: above this thread's buckets */
    if (first)
        s.goal = goal_of(total);
    if (over < s.goal && upto >= s.goal) {
        bool upper = over + a >= s.goal;
        sh->chosen = upper ? top : top - 1;
        sh->skipped = upper ? over : over + a;
        sh->inside = upper ? a : b;
    }
    cluster.sync(); /* the choice is there; and nobody reads this block's buckets any more */
    s.lo += (uint32_t)sh->chosen << shift;
    uint32_t end = s.lo + ((1u << shift) - 1);
    s.hi = end < s.hi ? end : s.hi;
    s.goal -= sh->skipped;
    s.above += sh->skipped;
    s.inside = sh->inside;
    __syncthreads();
}

/* Passes until one key is left: lo. */
template <typename E, typename G>
__device__ selection select_key(const row_view &r, shared_state *sh, uint32_t lo, uint32_t hi, E entry, G goal_of)
{
    selection s = {lo, hi, 0, 0, 0};
    bool first = true;
    do {
        narrow(r, sh, s, first, entry, goal_of);
        first = false;
    } while (s.lo < s.hi);
    return s;
}

/* The greatest of one packed value a thread, over the cluster. */
__device__ unsigned long long cluster_max(unsigned long long v, shared_state *sh)
{
    const block_cluster cluster;
    for (int o = 16; o > 0; o >>= 1)
        v = max(v, __shfl_xor_sync(0xffffffffu, v, o));
    if ((threadIdx.x & 31) == 0)
        sh->scan[threadIdx.x >> 5] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < SAMPLE_THREADS / 32; i++)
            v = max(v, sh->scan[i]);
        sh->pick = v;
    }
    cluster.sync();
    for (unsigned i = 0; i < cluster.blocks(); i++)
        v = max(v, *cluster.of(&sh->pick, i));
    cluster.sync();
    return v;
}

#endif
