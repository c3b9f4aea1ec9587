/* Sampling on the device: the same tokens as kernels/cpu/sample.c, which is the specification, for the same logits.
 *
 * A cluster of blocks takes one logits row, each block a slice of the vocabulary, and answers the row's samples one
 * after another (samples of one prompt share a row). Penalties and biases are written into the row and taken back
 * afterwards. Nothing is sorted: a threshold (top-k, top-p, the n best) is found by histograms of integer keys,
 * eleven bits a pass from the widest bits down, counts or fixed-point masses summed exactly, so that no result depends
 * on the order of threads. Every block of a cluster computes every decision, from the same sums.
 */
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
    unsigned long long bucket[BUCKETS];
    unsigned long long scan[32];
    stats part[33];
    unsigned long long pick;      /* this block's reductions, read by the others of the cluster */
    stats whole;
    unsigned long long skipped, inside; /* select_key: weight above the chosen bucket and in it */
    int32_t chosen;
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
    for (int t = r.lo + threadIdx.x; t < r.hi; t += blockDim.x) {
        float v = at(r, t);
        bad |= !(v < INFINITY);
        if (v == -INFINITY)
            continue;
        least = fminf(least, v);
        if (v > m) {
            sum = sum * __expf(m - v) + 1.0f;
            m = v;
            token = t;
        } else {
            sum += __expf(v - m);
        }
    }
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

/* Outcome of select_key: the key, the weight above it, what of the goal is left for entries of that very key, and
 * the weight of those entries. */
struct selection {
    uint32_t key;
    unsigned long long above, goal, inside;
};

/* The greatest key for which the weights of the entries with that key or a greater one sum to at least the goal, which
 * goal_of makes of the sum of all. Keys lie in [lo, hi]. `entry(token, lo, hi, &key, &weight)` says whether a token
 * takes part with a key in that range. Same answer in all threads of the cluster. */
template <typename E, typename G>
__device__ selection select_key(const row_view &r, shared_state *sh, uint32_t lo, uint32_t hi, E entry, G goal_of)
{
    const block_cluster cluster;
    selection s = {lo, 0, 0, 0};
    for (bool first = true;; first = false) {
        int shift = 0;
        while ((hi - lo) >> shift >= BUCKETS)
            shift++;
        for (int i = threadIdx.x; i < BUCKETS; i += blockDim.x)
            sh->bucket[i] = 0;
        __syncthreads();
        for (int t = r.lo + threadIdx.x; t < r.hi; t += blockDim.x) {
            uint32_t key;
            unsigned long long weight;
            if (entry(t, lo, hi, &key, &weight))
                atomicAdd(&sh->bucket[(key - lo) >> shift], weight);
        }
        cluster.sync();
        /* thread i sums two buckets, from the top, over the cluster; then a scan over the block */
        int top = BUCKETS - 1 - 2 * (int)threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        unsigned long long a = 0, b = 0;
        for (unsigned i = 0; i < cluster.blocks(); i++) {
            const unsigned long long *other = cluster.of(sh->bucket, i);
            a += other[top];
            b += other[top - 1];
        }
        unsigned long long sum = a + b;
        for (int o = 1; o < 32; o <<= 1) {
            unsigned long long up = __shfl_up_sync(0xffffffffu, sum, o);
            if (lane >= o)
                sum += up;
        }
        if (lane == 31)
            sh->scan[warp] = sum;
        __syncthreads();
        unsigned long long before = 0, total = 0;
        for (int i = 0; i < SAMPLE_THREADS / 32; i++) {
            before += i < warp ? sh->scan[i] : 0;
            total += sh->scan[i];
        }
        if (first)
            s.goal = goal_of(total);
        unsigned long long upto = before + sum, over = upto - a - b; /* over: above this thread's buckets */
        if (over < s.goal && upto >= s.goal) {
            bool upper = over + a >= s.goal;
            sh->chosen = upper ? top : top - 1;
            sh->skipped = upper ? over : over + a;
            sh->inside = upper ? a : b;
        }
        cluster.sync(); /* the choice is there; and nobody reads this block's buckets any more */
        lo += (uint32_t)sh->chosen << shift;
        uint32_t end = lo + ((1u << shift) - 1);
        hi = end < hi ? end : hi;
        s.goal -= sh->skipped;
        s.above += sh->skipped;
        s.inside = sh->inside;
        __syncthreads();
        if (lo == hi) {
            s.key = lo;
            return s;
        }
    }
}

/* ---- drawing: steps 6 and 7 of the specification ---- */

#define LINEAR_ONE 67108864.0f /* 2^26 */

/* z in (-28, 0] as an integer that orders alike: linear, so that no bucket is crowded; injective for z <= -1/4. */
__device__ __forceinline__ uint32_t linear_key(float z) { return 0x80000000u - (uint32_t)(-z * LINEAR_ONE); }

/* What is left to draw from: tokens of positive mass whose z reaches both floors. */
struct drawing {
    float max, inv_temperature;
    uint32_t least_linear, least_order;
};

__device__ __forceinline__ bool takes_part(float l, const drawing &d, float *z)
{
    *z = NOISE_MUL(NOISE_SUB(l, d.max), d.inv_temperature);
    return *z > -28.0f && linear_key(*z) >= d.least_linear && sample_order(*z) >= d.least_order;
}

/* Raise the floors so that what is left weighs at least the goal; weights are masses, or 1 each. */
template <typename G>
__device__ void raise_floor(const row_view &r, shared_state *sh, drawing &d, float least_logit, bool by_mass, G goal_of)
{
    const drawing now = d;
    float z_least = NOISE_MUL(NOISE_SUB(least_logit, d.max), d.inv_temperature);
    uint32_t lo = max(d.least_linear, linear_key(z_least > -28.0f ? z_least : -28.0f));
    selection s = select_key(
        r, sh, lo, 0x80000000u,
        [&](int token, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
            float z;
            if (!takes_part(at(r, token), now, &z))
                return false;
            *key = linear_key(z);
            if (*key < from || *key > to)
                return false;
            unsigned long long mass = sample_mass(z);
            *weight = by_mass ? mass : 1ull;
            return mass > 0;
        },
        goal_of);
    d.least_linear = s.key;
    uint32_t step = 0x80000000u - s.key;
    if (step >= 1u << 24 || s.inside == 0)
        return;
    /* near 0 several z share a key: settle among them by their exact order */
    float z_hi = -((float)step / LINEAR_ONE), z_lo = -((float)(step + 1) / LINEAR_ONE);
    selection exact = select_key(
        r, sh, sample_order(z_lo), sample_order(step == 0 ? 0.0f : z_hi),
        [&](int token, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
            float z;
            if (!takes_part(at(r, token), now, &z) || linear_key(z) != s.key)
                return false;
            *key = sample_order(z);
            if (*key < from || *key > to)
                return false;
            *weight = by_mass ? sample_mass(z) : 1ull;
            return true;
        },
        [&](unsigned long long) { return s.goal; });
    d.least_order = max(d.least_order, exact.key);
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

__device__ int draw(const row_view &r, shared_state *sh, const row_params &p, const stats &st)
{
    drawing d = {stats_max(st), noise_inv_temperature(p.temperature), 0, 0};
    float least_logit = key_float(st.least);
    if (p.top_k > 0)
        raise_floor(r, sh, d, least_logit, false, [&](unsigned long long total) {
            return total < (unsigned long long)p.top_k ? total : (unsigned long long)p.top_k;
        });
    if (p.top_p < 1.0f)
        raise_floor(r, sh, d, least_logit, true,
                    [&](unsigned long long total) { return (unsigned long long)sample_mass_goal(p.top_p, total); });
    unsigned long long least_mass = (unsigned long long)NOISE_MUL(p.min_p, 1099511627776.0f);
    uint64_t key = noise_key(p.seed, p.position);
    float best = -INFINITY;
    int token = -1;
    for (int t = r.lo + threadIdx.x; t < r.hi; t += blockDim.x) {
        float z;
        if (!takes_part(at(r, t), d, &z) || NOISE_ADD(z, NOISE_MAX) < best)
            continue;
        unsigned long long mass = sample_mass(z);
        if (mass == 0 || mass < least_mass)
            continue;
        float score = NOISE_ADD(z, noise_gumbel(noise_bits(key, t)));
        if (score > best) {
            best = score;
            token = t;
        }
    }
    unsigned long long v = token < 0 ? 0 : (unsigned long long)sample_order(best) << 32 | (uint32_t)~token;
    v = cluster_max(v, sh);
    return v == 0 ? -1 : (int)~(uint32_t)v;
}

/* ---- steps 1 to 3 ---- */

__device__ __forceinline__ float penalised(float x, int n_output, bool seen, const row_params &p)
{
    if (seen && p.repetition_penalty != 1.0f)
        x = x > 0.0f ? __fdiv_rn(x, p.repetition_penalty) : __fmul_rn(x, p.repetition_penalty);
    if (n_output > 0)
        x = __fsub_rn(__fsub_rn(x, __fmul_rn(p.frequency_penalty, (float)n_output)), p.presence_penalty);
    return x;
}

__device__ __forceinline__ bool mine(const row_view &r, int t) { return t >= r.lo && t < r.hi; }

struct changes {
    const count_entry *count;
    const bias_entry *bias;
    float *saved_count, *saved_bias; /* the logits before */
    int prev;                        /* token of the step before that counts once more, or -1 */
    bool penalties;
};

/* Write penalties and biases into this block's slice, keeping what was there. */
__device__ void changes_apply(const row_view &r, shared_state *sh, const row_params &p, const changes &c)
{
    if (threadIdx.x == 0)
        sh->prev_seen = 0;
    __syncthreads();
    if (c.penalties) {
        for (int i = threadIdx.x; i < p.n_counts; i += blockDim.x) {
            count_entry e = c.count[i];
            if (!mine(r, e.token))
                continue;
            float x = r.l[e.token];
            c.saved_count[i] = x;
            int n = e.n_output + (e.token == c.prev);
            if (e.token == c.prev)
                sh->prev_seen = 1;
            r.l[e.token] = penalised(x, n, n > 0 || e.in_prompt, p);
        }
        __syncthreads();
        if (threadIdx.x == 0 && mine(r, c.prev) && !sh->prev_seen) {
            sh->prev_saved = r.l[c.prev];
            r.l[c.prev] = penalised(sh->prev_saved, 1, true, p);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < p.n_bias; i += blockDim.x)
        if (mine(r, c.bias[i].token))
            c.saved_bias[i] = r.l[c.bias[i].token];
    __syncthreads();
    for (int i = threadIdx.x; i < p.n_bias; i += blockDim.x)
        if (mine(r, c.bias[i].token))
            atomicAdd(&r.l[c.bias[i].token], c.bias[i].bias);
    __syncthreads();
}

__device__ void changes_undo(const row_view &r, shared_state *sh, const row_params &p, const changes &c)
{
    __syncthreads();
    for (int i = threadIdx.x; i < p.n_bias; i += blockDim.x)
        if (mine(r, c.bias[i].token))
            r.l[c.bias[i].token] = c.saved_bias[i];
    __syncthreads();
    if (c.penalties) {
        if (threadIdx.x == 0 && mine(r, c.prev) && !sh->prev_seen)
            r.l[c.prev] = sh->prev_saved;
        for (int i = threadIdx.x; i < p.n_counts; i += blockDim.x)
            if (mine(r, c.count[i].token))
                r.l[c.count[i].token] = c.saved_count[i];
    }
    __syncthreads();
}

/* ---- answers ---- */

/* The n best of the row with their logits minus lse: greatest first, the smallest id first on a tie. */
__device__ void write_best(const row_view &r, shared_state *sh, const stats &st, float lse, int n, int32_t *ret_token,
                           float *ret_logprob)
{
    const block_cluster cluster;
    if (threadIdx.x == 0)
        sh->n_best = 0;
    uint32_t least_key = 0xFFFFFFFFu, least_id = 0; /* of what is taken: key above, or equal with ~id from least_id on */
    if (!st.bad && st.best != 0) {
        selection s = select_key(
            r, sh, st.least, (uint32_t)(st.best >> 32),
            [&](int token, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
                float v = at(r, token);
                *key = sample_order(v);
                *weight = 1;
                return v > -INFINITY && *key >= from && *key <= to;
            },
            [&](unsigned long long total) { return total < (unsigned long long)n ? total : (unsigned long long)n; });
        least_key = s.key;
        if (s.inside > s.goal) {
            selection tie = select_key(
                r, sh, 0x80000000u, 0xFFFFFFFFu,
                [&](int token, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
                    float v = at(r, token);
                    *key = ~(uint32_t)token;
                    *weight = 1;
                    return v > -INFINITY && sample_order(v) == s.key && *key >= from && *key <= to;
                },
                [&](unsigned long long) { return s.goal; });
            least_id = tie.key;
        }
    }
    cluster.sync();
    shared_state *root = cluster.of(sh, 0);
    if (least_key != 0xFFFFFFFFu)
        for (int t = r.lo + threadIdx.x; t < r.hi; t += blockDim.x) {
            float v = at(r, t);
            uint32_t key = sample_order(v);
            if (v > -INFINITY && (key > least_key || (key == least_key && ~(uint32_t)t >= least_id))) {
                int i = atomicAdd(&root->n_best, 1);
                if (i < MAX_BEST) {
                    root->best_key[i] = key;
                    root->best_token[i] = t;
                }
            }
        }
    cluster.sync();
    if (cluster.rank() == 0) {
        int found = min(sh->n_best, n);
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            if (i >= found) {
                ret_token[i] = -1;
                ret_logprob[i] = -INFINITY;
                continue;
            }
            int rank = 0;
            for (int j = 0; j < found; j++)
                rank += sh->best_key[j] > sh->best_key[i] ||
                        (sh->best_key[j] == sh->best_key[i] && sh->best_token[j] < sh->best_token[i]);
            ret_token[rank] = sh->best_token[i];
            ret_logprob[rank] = key_float(sh->best_key[i]) - lse;
        }
    }
    __syncthreads();
}

/* One cluster a logits row, all its samples. Dynamic shared memory: the bitmap of allowed tokens of this slice. */
__global__ void __launch_bounds__(SAMPLE_THREADS) sample_kernel(sample_args a, step_arrays s)
{
    extern __shared__ uint32_t bitmap[];
    __shared__ shared_state state;
    shared_state *sh = &state;
    const block_cluster cluster;
    pdl_wait();
    pdl_release();
    const char *base = (const char *)s.header;
    const step_header *h = s.header;
    int row = blockIdx.x / cluster.blocks();
    if (a.first + row >= h->n_logits)
        return;
    const int32_t *group = (const int32_t *)(base + h->off_group);
    int i0 = group[a.first + row], i1 = group[a.first + row + 1];
    if (i0 == i1)
        return;
    int slice = ((a.vocab + (int)cluster.blocks() - 1) / (int)cluster.blocks() + 31) / 32 * 32;
    row_view raw = {a.logits + row * a.stride, min(a.vocab, (int)cluster.rank() * slice), 0, nullptr};
    raw.hi = min(a.vocab, raw.lo + slice);
    bool speaker = cluster.rank() == 0 && threadIdx.x == 0;
    const stats st = row_stats(raw, sh);
    float lse = stats_max(st) + logf(st.sum);
    for (int i = i0; i < i1; i++) {
        const row_params p = ((const row_params *)(base + h->off_sample))[i];
        int32_t *top_token = h->result_top_token + (int64_t)i * h->top_stride;
        float *top_logprob = h->result_top_logprob + (int64_t)i * h->top_stride;
        int n_best = p.kind == KIND_CANDIDATES ? p.n_candidates : max(p.n_logprobs, 0);
        int token = stats_token(st);
        float logprob = 0.0f;
        bool answered = false;
        if (p.kind == KIND_SCORE && token >= 0) {
            token = p.target < a.vocab ? p.target : -1;
        } else if (token >= 0 || p.kind == KIND_CANDIDATES) {
            changes c = {(const count_entry *)(base + h->off_count) + p.counts_first,
                         (const bias_entry *)(base + h->off_bias) + p.bias_first, a.saved + p.counts_first,
                         a.saved + h->n_counts + p.bias_first, -1, false};
            if (p.prev_sample >= 0 && p.prev_sample < h->n_prev)
                c.prev = s.sampled_before[p.prev_sample];
            c.penalties = (p.repetition_penalty != 1.0f || p.frequency_penalty != 0.0f || p.presence_penalty != 0.0f) &&
                          (p.n_counts > 0 || c.prev >= 0);
            row_view view = raw;
            stats now = st;
            bool changed = c.penalties || p.n_bias > 0;
            if (changed)
                changes_apply(raw, sh, p, c);
            if (p.n_allowed > 0) {
                const int32_t *allowed = (const int32_t *)(base + h->off_allowed) + p.allowed_first;
                for (int k = threadIdx.x; k < slice / 32; k += blockDim.x)
                    bitmap[k] = 0;
                __syncthreads();
                for (int k = threadIdx.x; k < p.n_allowed; k += blockDim.x)
                    if (mine(raw, allowed[k]))
                        atomicOr(&bitmap[(allowed[k] - raw.lo) >> 5], 1u << ((allowed[k] - raw.lo) & 31));
                __syncthreads();
                view.allowed = bitmap;
            }
            if (changed || view.allowed)
                now = row_stats(view, sh);
            token = stats_token(now);
            if (p.kind == KIND_CANDIDATES) {
                float all = stats_max(now) + logf(now.sum);
                write_best(view, sh, now, all, n_best, top_token, top_logprob);
                logprob = stats_max(now) - all;
                answered = true;
            } else if (token >= 0 && p.temperature != 0.0f && p.top_k != 1) {
                token = draw(view, sh, p, now);
            }
            if (changed) {
                changes_undo(raw, sh, p, c);
                cluster.sync();
            }
        }
        if (!answered) {
            if (n_best > 0) {
                stats none = st;
                if (token < 0)
                    none.best = 0;
                write_best(raw, sh, none, lse, n_best, top_token, top_logprob);
            }
            if (speaker && token >= 0)
                logprob = raw.l[token] - lse;
        }
        if (speaker) {
            s.sampled[i] = token;
            h->result_token[i] = token;
            h->result_logprob[i] = token >= 0 ? logprob : -INFINITY;
        }
    }
}

/* ---- every row greedy and nothing else asked: several blocks a row, one pass ---- */

__global__ void __launch_bounds__(512) greedy_kernel(sample_args a, step_arrays s)
{
    __shared__ stats part[16];
    pdl_wait();
    pdl_release();
    const step_header *h = s.header;
    int row = blockIdx.y;
    if (a.first + row >= h->n_logits)
        return;
    const float *l = a.logits + row * a.stride;
    float m = -INFINITY, sum = 0.0f;
    int token = 0;
    uint32_t bad = 0;
    int n = a.vocab / 4, step = gridDim.x * blockDim.x;
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k <= n; k += step) {
        float v[4];
        if (k < n) {
            *(float4 *)v = ((const float4 *)l)[k];
        } else {
            for (int j = 0; j < 4; j++)
                v[j] = 4 * k + j < a.vocab ? l[4 * k + j] : -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bad |= !(v[j] < INFINITY);
            if (v[j] > m) {
                sum = sum * __expf(m - v[j]) + 1.0f;
                m = v[j];
                token = 4 * k + j;
            } else if (v[j] > -INFINITY) {
                sum += __expf(v[j] - m);
            }
        }
    }
    stats st = {m == -INFINITY ? 0ull : (unsigned long long)sample_order(m) << 32 | (uint32_t)~token, bad, 0, sum};
    st = stats_warp(st);
    if ((threadIdx.x & 31) == 0)
        part[threadIdx.x >> 5] = st;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    int lane = threadIdx.x, last = 0;
    st = stats_warp(lane < (int)(blockDim.x >> 5) ? part[lane] : stats_none());
    stats *all = (stats *)a.partial + row * gridDim.x;
    if (lane == 0) {
        all[blockIdx.x] = st;
        __threadfence();
        last = atomicAdd(&a.arrived[row], 1) == (int)gridDim.x - 1;
        __threadfence();
    }
    if (!__shfl_sync(0xffffffffu, last, 0))
        return;
    st = stats_none();
    if (lane < (int)gridDim.x) { /* at most GREEDY_BLOCKS */
        st.best = __ldcg(&all[lane].best);
        st.bad = __ldcg(&all[lane].bad);
        st.sum = __ldcg(&all[lane].sum);
    }
    st = stats_warp(st);
    if (lane != 0)
        return;
    a.arrived[row] = 0;
    const int32_t *group = (const int32_t *)((const char *)h + h->off_group);
    int drawn = stats_token(st);
    for (int i = group[a.first + row]; i < group[a.first + row + 1]; i++) {
        s.sampled[i] = drawn;
        h->result_token[i] = drawn;
        h->result_logprob[i] = drawn >= 0 ? -logf(st.sum) : -INFINITY;
    }
}

extern "C" int64_t sample_partial_bytes(int32_t max_rows) { return (int64_t)max_rows * GREEDY_BLOCKS * sizeof(stats); }

extern "C" bool launch_sample(const struct sample_args *a, const struct step_arrays *s, cudaStream_t stream)
{
    if (a->greedy && a->stride % 4 == 0 && (uintptr_t)a->logits % 16 == 0) {
        int blocks = 264 / a->rows < 1 ? 1 : 264 / a->rows > GREEDY_BLOCKS ? GREEDY_BLOCKS : 264 / a->rows;
        launch(greedy_kernel, dim3(blocks, a->rows), dim3(512), 0, stream, *a, *s);
        return true;
    }
    int cluster = !pdl_available() ? 1 : a->deterministic ? 4 : a->rows <= 16 ? 8 : a->rows <= 33 ? 4 : a->rows <= 66 ? 2 : 1;
    size_t bitmap = a->any_allowed ? (a->vocab / cluster + 64) / 8 + 4 : 0;
    if (bitmap > 128 * 1024)
        return false;
    if (bitmap > 16 * 1024)
        cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 128 * 1024);
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[2];
    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim.x = cluster;
    attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3(a->rows * cluster);
    c.blockDim = dim3(SAMPLE_THREADS);
    c.dynamicSmemBytes = bitmap;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = pdl_available() ? 2 : 0;
    cudaLaunchKernelEx(&c, sample_kernel, *a, *s);
    return true;
}
