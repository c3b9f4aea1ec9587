/* Scanning a row of logits: its view, statistics, and thresholds.
 *
 * Only short lists are sorted. A threshold (top-k, top-p, the n best) is found in one
 * of two ways. If few tokens are wanted: at least k tokens, and not many more, reach
 * the k-th greatest among the threads' own maxima; these are collected. Otherwise by
 * histograms of integer keys, ten bits per pass from the widest bits down, over counts
 * or fixed-point masses, which are summed exactly. No result depends on the order of
 * threads.
 */
#ifndef QUIRE_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH
#define QUIRE_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH

#include <float.h>

#include "kernels/cuda/cluster.cuh"
#include "kernels/noise.h"

enum {
    SAMPLE_THREADS = 512,
    SAMPLE_WARPS = SAMPLE_THREADS / 32,
    BUCKETS = 1024,
    LIST = BUCKETS,
    MAX_CLUSTER = 8
};
enum { FEW = 256 }; /* up to so many tokens are selected by the threads' maxima */

/* struct sample_row of batch.h, with the same layout. */
struct row_params {
    int32_t logits_row, kind;                                      /* index of the row; KIND_... */
    float temperature, top_p, min_p;                               /* 0: greedy; 1: off; 0: off */
    int32_t top_k;                                                 /* 0: off */
    float presence_penalty, frequency_penalty, repetition_penalty; /* 0, 0, 1: off */
    /* best tokens wanted, -1: none; of KIND_CANDIDATES; of KIND_SCORE */
    int32_t n_logprobs, n_candidates, target;
    uint64_t seed; /* of the noise */
    /* tokens before the sampled one; block-table row; prompt tokens */
    int32_t position, row, n_prompt;
    /* into the header's biases and masks; mask_first -1: none */
    int32_t bias_first, n_bias, mask_first;
    int32_t late_mask; /* from 1, in the header's late masks; 0: none */
};
static_assert(sizeof(row_params) == 88, "struct sample_row of batch.h");
enum { KIND_TOKEN, KIND_CANDIDATES, KIND_SCORE };
enum { NO_NUMBER = -1, NONE_ALLOWED = -2 }; /* TOKEN_... of batch.h */
/* struct token_bias of batch.h. */
struct bias_entry {
    int32_t token; /* id */
    float bias;    /* added to its logit */
};

/* Statistics of a scan. The maximum is (order key, ~token), so that the smallest id
 * wins a tie. */
struct stats {
    unsigned long long best; /* 0: nothing above -infinity */
    uint32_t bad;            /* a logit is NaN or +infinity */
    float least;             /* smallest logit */
    float sum;               /* of exp(l - max) */
};

struct shared_state {
    unsigned long long bucket[BUCKETS];    /* histogram, or the list of tokens */
    unsigned long long scan[SAMPLE_WARPS]; /* scratch of block_scan and block_max */
    unsigned long long pick;         /* this block's maximum, read by the cluster's other blocks */
    unsigned long long arrival;      /* mbarrier of the slice's copy */
    stats warp_stats[SAMPLE_WARPS];  /* of each warp */
    stats block, row;                /* this block's, and the whole row's */
    float peak[SAMPLE_THREADS];      /* each thread's greatest logit; read by the other blocks */
    uint32_t tally[2][SAMPLE_WARPS]; /* scratch of peak_threshold */
    uint16_t again[SAMPLE_THREADS];  /* threads whose tokens are scanned again */
    int32_t n_again;                 /* entries of again */
    unsigned long long skipped, inside; /* narrow: weight above the chosen bucket and in it */
    int32_t chosen;                     /* narrow: the bucket with the threshold */
    int32_t n_ties;                     /* tokens that a list's last entry stands for */
    /* length of the list in the first block's `bucket`; two lists in turn */
    int32_t n_list[2];
    uint32_t floor;      /* least order key that stays; in the first block */
    float sampled_logit; /* raw logit of the sampled token (topk_merge.cu) */
};

struct row_view {
    const float *l; /* indexed by token id; of a staged row only the slice exists */
    int lo, hi;     /* this block's slice */
};

/* Logits of tokens t .. t + 3, t - lo a multiple of 4; -infinity past the end. */
__device__ __forceinline__ float4 quad_at(const row_view &r, int t)
{
    float4 v;

    if (t + 4 <= r.hi && (uintptr_t)(r.l + t) % 16 == 0) {
        v = *(const float4 *)(r.l + t);
    } else {
        v.x = t < r.hi ? r.l[t] : -INFINITY;
        v.y = t + 1 < r.hi ? r.l[t + 1] : -INFINITY;
        v.z = t + 2 < r.hi ? r.l[t + 2] : -INFINITY;
        v.w = t + 3 < r.hi ? r.l[t + 3] : -INFINITY;
    }
    return v;
}

/* Calls f(token, four logits) for the slice, by whole warps, ascending in each thread;
 * the next four are loaded meanwhile. */
template <typename F> __device__ __forceinline__ void for_quads(const row_view &r, F f)
{
    const int step = 4 * SAMPLE_THREADS;
    int t = r.lo + 4 * (int)threadIdx.x;
    float4 next = quad_at(r, t);

    for (; t - 4 * (int)(threadIdx.x & 31) < r.hi; t += step) {
        float4 v = next;
        next = quad_at(r, t + step);
        f(t, v);
    }
}

/* The same with f(token, logit); past the end the logit is -infinity. */
template <typename F> __device__ __forceinline__ void for_row(const row_view &r, F f)
{
    for_quads(r, [&](int t, float4 v) {
        f(t, v.x);
        f(t + 1, v.y);
        f(t + 2, v.z);
        f(t + 3, v.w);
    });
}

__device__ __forceinline__ float key_float(uint32_t k)
{
    return noise_bits_float(k & 0x80000000u ? k & 0x7FFFFFFFu : ~k);
}

__device__ __forceinline__ float stats_max(const stats &s)
{
    return key_float((uint32_t)(s.best >> 32));
}
__device__ __forceinline__ int stats_token(const stats &s)
{
    return s.best == 0 || s.bad ? NO_NUMBER : (int)~(uint32_t)s.best;
}

/* The same for a changed row; `raw`: before the change. */
__device__ __forceinline__ int asked_token(const stats &raw, const stats &asked)
{
    int token = stats_token(asked);

    return token >= 0 || stats_token(raw) < 0 ? token : NONE_ALLOWED;
}

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
    a.least = fminf(a.least, b.least);
}

__device__ __forceinline__ stats stats_none(void)
{
    return {0ull, 0, INFINITY, 0.0f};
}

/* Joins the statistics of a warp's lanes, in lane 0. */
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

/* What one thread saw of a row, from token `first` on, four tokens every `step`. A NaN
 * or +infinity makes the sum a NaN. */
struct thread_scan {
    float peak, least, sum; /* greatest and least logit, sum of exponentials */
    int at;                 /* the peak is in one of the AHEAD quads from here on */
};
enum { AHEAD = 4 };

__device__ __forceinline__ thread_scan scan_quads(const row_view &r, int first, int step)
{
    thread_scan s = {-FLT_MAX, INFINITY, 0.0f, first};

    for (int t = first; t < r.hi; t += AHEAD * step) {
        float4 v[AHEAD];
        float high = -FLT_MAX;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            v[j] = quad_at(r, t + j * step);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            high = fmaxf(high, fmaxf(fmaxf(v[j].x, v[j].y), fmaxf(v[j].z, v[j].w)));
            if (t + j * step < r.hi) {
                s.least = fminf(s.least, fminf(fminf(v[j].x, v[j].y), fminf(v[j].z, v[j].w)));
            }
        }
        if (high > s.peak) {
            s.sum *= __expf(s.peak - high);
            s.peak = high;
            s.at = t;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            s.sum += (__expf(v[j].x - s.peak) + __expf(v[j].y - s.peak)) +
                     (__expf(v[j].z - s.peak) + __expf(v[j].w - s.peak));
        }
    }
    return s;
}

__device__ __forceinline__ stats scan_stats(const row_view &r, const thread_scan &s, int step)
{
    int token = -1;

    for (int j = 0; j < AHEAD && token < 0; j++) {
        float4 v = quad_at(r, s.at + j * step);
        int i = v.x == s.peak ? 0 : v.y == s.peak ? 1 : v.z == s.peak ? 2 : v.w == s.peak ? 3 : -1;
        token = i < 0 ? -1 : s.at + j * step + i;
    }
    unsigned long long best =
        (unsigned long long)sample_order(s.peak + 0.0f) << 32 | (uint32_t)~token;
    return {s.sum == 0.0f ? 0ull : best, !(s.sum < INFINITY), s.least, s.sum};
}

/* Maximum, minimum, and sum of exponentials of the row; the same in all threads of the
 * cluster. Before the next call the whole cluster must be done with `peak`. */
inline __device__ stats row_stats(const row_view &r, shared_state *sh)
{
    const block_cluster cluster;
    const int step = 4 * SAMPLE_THREADS;
    const thread_scan seen = scan_quads(r, r.lo + 4 * (int)threadIdx.x, step);

    sh->peak[threadIdx.x] = seen.peak;
    stats s = stats_warp(scan_stats(r, seen, step));
    int lane = threadIdx.x & 31;
    if (lane == 0) {
        sh->warp_stats[threadIdx.x >> 5] = s;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        s = stats_warp(lane < SAMPLE_WARPS ? sh->warp_stats[lane] : stats_none());
        if (lane == 0) {
            sh->block = s;
        }
    }
    cluster.sync();
    if (threadIdx.x < 32) {
        s = stats_warp(lane < (int)cluster.blocks() ? *cluster.of(&sh->block, lane) : stats_none());
        if (lane == 0) {
            sh->row = s;
        }
    }
    __syncthreads();
    return sh->row;
}

/* Inclusive sum over the threads of the block; the total in *total. */
__device__ __forceinline__ unsigned long long block_scan(unsigned long long sum, shared_state *sh,
                                                         unsigned long long *total)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    for (int o = 1; o < 32; o <<= 1) {
        unsigned long long up = __shfl_up_sync(0xffffffffu, sum, o);
        if (lane >= o) {
            sum += up;
        }
    }
    if (lane == 31) {
        sh->scan[warp] = sum;
    }
    __syncthreads();
    unsigned long long before = 0, all = 0;
    for (int i = 0; i < SAMPLE_WARPS; i++) {
        before += i < warp ? sh->scan[i] : 0;
        all += sh->scan[i];
    }
    *total = all;
    return before + sum;
}

/* Maximum of one packed value per thread, over the block: in thread 0. */
inline __device__ unsigned long long block_max(unsigned long long v, shared_state *sh)
{
    for (int o = 16; o > 0; o >>= 1) {
        v = max(v, __shfl_xor_sync(0xffffffffu, v, o));
    }
    if ((threadIdx.x & 31) == 0) {
        sh->scan[threadIdx.x >> 5] = v;
    }
    __syncthreads();
    for (int i = 0; i < SAMPLE_WARPS; i++) {
        v = max(v, sh->scan[i]);
    }
    return v;
}

/* Maximum over the cluster, in all threads. */
inline __device__ unsigned long long cluster_max(unsigned long long v, shared_state *sh)
{
    const block_cluster cluster;

    v = block_max(v, sh);
    if (threadIdx.x == 0) {
        sh->pick = v;
    }
    cluster.sync();
    for (unsigned i = 0; i < cluster.blocks(); i++) {
        v = max(v, *cluster.of(&sh->pick, i));
    }
    cluster.sync();
    return v;
}

/* ---- few tokens: the list ---- */

/* A value that at least k tokens reach, and not many more unless they are adjacent in
 * the row: the greatest, to some bits, that the peaks of k threads reach. Called after
 * row_stats of the same view. */
inline __device__ float peak_threshold(shared_state *sh, int k)
{
    const block_cluster cluster;
    uint32_t key[MAX_CLUSTER], from = 0;

#pragma unroll
    for (unsigned i = 0; i < MAX_CLUSTER; i++) {
        key[i] = i < cluster.blocks() ? sample_order(cluster.of(sh->peak, i)[threadIdx.x]) : 0;
    }
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t to = from | 1u << bit, n = 0;
#pragma unroll
        for (int i = 0; i < MAX_CLUSTER; i++) {
            n += key[i] >= to;
        }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        n = __reduce_add_sync(0xffffffffu, n);
#endif
        uint32_t *tally = sh->tally[bit & 1];
        if ((threadIdx.x & 31) == 0) {
            tally[threadIdx.x >> 5] = n;
        }
        __syncthreads();
        n = 0;
#pragma unroll
        for (int i = 0; i < SAMPLE_WARPS; i++) {
            n += tally[i];
        }
        if (n < (uint32_t)k) {
            continue;
        }
        from = to;
        if (n <= (uint32_t)(k + k / 4 + 8)) {
            break;
        }
    }
    __syncthreads();
    return from < sample_order(-FLT_MAX) ? -FLT_MAX : key_float(from);
}

__device__ __forceinline__ void push(shared_state *root, int n_lists, int t, uint32_t key)
{
    int i = atomicAdd(&root->n_list[n_lists & 1], 1);

    if (i < LIST) {
        root->bucket[i] = (unsigned long long)key << 32 | (uint32_t)~t;
    }
}

/* Ends a list; returns whether it fits. `n_lists` counts the lists of this launch. The
 * cluster syncs once. */
__device__ __forceinline__ bool list_end(shared_state *sh, int n_lists)
{
    const block_cluster cluster;

    if (cluster.rank() == 0 && threadIdx.x == 0) {
        sh->n_list[~n_lists & 1] = 0;
    }
    cluster.sync();
    return cluster.of(sh, 0)->n_list[n_lists & 1] <= LIST;
}

/* Collects tokens into the first block's list as (key, ~token); `wanted(token, logit,
 * &key)` selects them. Returns whether they fit. */
template <typename F>
__device__ bool collect(const row_view &r, shared_state *sh, int n_lists, F wanted)
{
    shared_state *root = block_cluster().of(sh, 0);

    for_row(r, [&](int t, float l) {
        uint32_t key;
        if (wanted(t, l, &key)) {
            push(root, n_lists, t, key);
        }
    });
    return list_end(sh, n_lists);
}

/* The same if few threads have `some` set: only what these saw in row_stats is scanned
 * again, by all threads. */
template <typename F>
__device__ bool collect_few(const row_view &r, shared_state *sh, int n_lists, bool some, F wanted)
{
    const int step = 4 * SAMPLE_THREADS, each = (r.hi - r.lo + step - 1) / step;
    shared_state *root = block_cluster().of(sh, 0);

    if (threadIdx.x == 0) {
        sh->n_again = 0;
    }
    __syncthreads();
    if (some) {
        sh->again[atomicAdd(&sh->n_again, 1)] = (uint16_t)threadIdx.x;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < sh->n_again * each; i += SAMPLE_THREADS) {
        int t = r.lo + 4 * sh->again[i / each] + i % each * step;
        float4 v = quad_at(r, t);
        const float l[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t key;
            if (wanted(t + j, l[j], &key)) {
                push(root, n_lists, t + j, key);
            }
        }
    }
    return list_end(sh, n_lists);
}

/* Bitonic sort (Batcher 1968) of the first n entries, greatest first, padded with zeros
 * to a power of two. */
inline __device__ void sort_list(shared_state *sh, int n)
{
    int size = 32;

    while (size < n) {
        size *= 2;
    }
    for (int i = n + threadIdx.x; i < size; i += blockDim.x) {
        sh->bucket[i] = 0;
    }
    __syncthreads();
    for (int k = 2; k <= size; k *= 2) {
        for (int j = k / 2; j > 0; j /= 2) {
            int i = 2 * (int)threadIdx.x - ((int)threadIdx.x & (j - 1));
            if (i < size) {
                unsigned long long a = sh->bucket[i], b = sh->bucket[i + j];
                if ((a < b) == ((i & k) == 0)) {
                    sh->bucket[i] = b;
                    sh->bucket[i + j] = a;
                }
            }
            __syncthreads();
        }
    }
}

/* ---- many: histograms ---- */

/* The search for a threshold: the greatest key for which the weights of entries with
 * that or a greater key sum to at least the goal. It lies in [lo, hi]. */
struct selection {
    uint32_t lo, hi; /* range of keys */
    /* weights: of greater keys; still wanted from the range; of the range */
    unsigned long long above, goal, inside;
};

/* *sum += weight, by concurrent threads. Shared memory adds 32 bits natively, but 64
 * only by compare-and-swap; so the low half goes first, its carry with the high
 * half. */
__device__ __forceinline__ void add_weight(unsigned long long *sum, unsigned long long weight)
{
    uint32_t low = (uint32_t)weight, high = (uint32_t)(weight >> 32);
    uint32_t *half = (uint32_t *)sum;

    high += atomicAdd(&half[0], low) + low < low;
    if (high != 0) {
        atomicAdd(&half[1], high);
    }
}

/* One pass: divides [lo, hi] into at most BUCKETS equal parts and keeps the one with
 * the threshold. `entry(token, logit, lo, hi, &key, &weight)` tells whether a token
 * counts, with a key in that range; at the first pass goal_of makes the goal from the
 * sum of all weights. The result is the same in all threads of the cluster. */
template <typename E, typename G>
inline __device__ void narrow(const row_view &r, shared_state *sh, selection &s, bool first,
                              E entry, G goal_of)
{
    const block_cluster cluster;
    int shift = 0;

    while ((s.hi - s.lo) >> shift >= BUCKETS) {
        shift++;
    }
    for (int i = threadIdx.x; i < BUCKETS; i += blockDim.x) {
        sh->bucket[i] = 0;
    }
    __syncthreads();
    for_row(r, [&](int t, float l) {
        uint32_t key;
        unsigned long long weight;
        if (entry(t, l, s.lo, s.hi, &key, &weight)) {
            add_weight(&sh->bucket[(key - s.lo) >> shift], weight);
        }
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
    /* over: weight above this thread's buckets */
    unsigned long long upto = block_scan(a + b, sh, &total), over = upto - a - b;
    if (first) {
        s.goal = goal_of(total);
    }
    if (over < s.goal && upto >= s.goal) {
        bool upper = over + a >= s.goal;
        sh->chosen = upper ? top : top - 1;
        sh->skipped = upper ? over : over + a;
        sh->inside = upper ? a : b;
    }
    cluster.sync(); /* the choice is made, and no block reads this block's buckets any more */
    s.lo += (uint32_t)sh->chosen << shift;
    uint32_t end = s.lo + ((1u << shift) - 1);
    s.hi = end < s.hi ? end : s.hi;
    s.goal -= sh->skipped;
    s.above += sh->skipped;
    s.inside = sh->inside;
    __syncthreads();
}

/* Narrows until one key is left: lo. */
template <typename E, typename G>
inline __device__ selection select_key(const row_view &r, shared_state *sh, uint32_t lo,
                                       uint32_t hi, E entry, G goal_of)
{
    selection s = {lo, hi, 0, 0, 0};
    bool first = true;

    do {
        narrow(r, sh, s, first, entry, goal_of);
        first = false;
    } while (s.lo < s.hi);
    return s;
}

#endif
