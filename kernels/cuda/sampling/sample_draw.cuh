/* The draw: steps 6 and 7 of the specification (kernels/cpu/sample.c).
 *
 * With a small top-k, the candidates are collected in the cluster's first block, which
 * sorts them, applies the cuts and samples. Otherwise one histogram tells where the
 * threshold of top-k or top-p lies; the few tokens around it are collected and sorted,
 * and the threshold is read off. If the list holds all that stays, the token is sampled
 * there; else by one more pass over the row. Rows that crowd one bucket, and very large
 * k, are narrowed pass by pass to a single key.
 *
 * z is the logit minus the row's maximum, times the inverse temperature; a token's mass
 * is its fixed-point exp(z) (kernels/noise.h).
 */
#ifndef QUIRE_KERNELS_CUDA_SAMPLING_SAMPLE_DRAW_CUH
#define QUIRE_KERNELS_CUDA_SAMPLING_SAMPLE_DRAW_CUH

#include "kernels/cuda/sampling/sample_row.cuh"

#define LINEAR_ONE 67108864.0f /* 2^26 */
enum : uint32_t { LINEAR_TOP = 0x80000000u };

/* Maps z in (-28, 0] to an integer of the same order: linear, so that no bucket is
 * crowded; injective for z <= -1/4. */
__device__ __forceinline__ uint32_t linear_key(float z)
{
    return LINEAR_TOP - (uint32_t)(-z * LINEAR_ONE);
}

/* The next float nearer to zero than a negative x. */
__device__ __forceinline__ float nearer_zero(float x)
{
    return noise_bits_float(noise_float_bits(x) - 1);
}

/* The least z of a linear key. */
__device__ __forceinline__ float linear_floor(uint32_t key)
{
    uint32_t below = LINEAR_TOP - key;

    return below < (1u << 24) - 1 ? nearer_zero(-((float)(below + 1) / LINEAR_ONE))
                                  : -(__uint2float_rd(below) / LINEAR_ONE);
}

/* The tokens that can be sampled: those of positive mass whose z is at least
 * `least`. */
struct support {
    float max, inv_temperature, least; /* the row's maximum; for z; smallest z that stays */
};

__device__ __forceinline__ float z_of(float l, const support &d)
{
    return NOISE_MUL(NOISE_SUB(l, d.max), d.inv_temperature);
}

__device__ __forceinline__ bool in_support(float l, const support &d, float *z)
{
    *z = z_of(l, d);
    return *z >= d.least;
}

/* Histogram entry of a token in the support: its mass, or 1 each. */
struct weigh_linear {
    support d;    /* whose tokens */
    bool by_mass; /* weights are masses */
    __device__ bool operator()(int, float l, uint32_t from, uint32_t to, uint32_t *key,
                               unsigned long long *weight) const
    {
        float z;
        if (!in_support(l, d, &z)) {
            return false;
        }
        *key = linear_key(z);
        if (*key < from || *key > to) {
            return false;
        }
        *weight = by_mass || z < -27.0f ? sample_mass(z) : 1ull; /* from -27 on it is positive */
        if (*weight == 0) {
            return false;
        }
        *weight = by_mass ? *weight : 1ull;
        return true;
    }
};

/* Raises d.least to the single key that `s`, narrowed once, leads to. */
inline __device__ void raise_floor(const row_view &r, shared_state *sh, support &d, selection s,
                                   bool by_mass)
{
    const weigh_linear entry = {d, by_mass};
    auto known = [&](unsigned long long) { return s.goal; };

    while (s.lo < s.hi) {
        narrow(r, sh, s, false, entry, known);
    }
    d.least = fmaxf(d.least, linear_floor(s.lo));
    uint32_t step = LINEAR_TOP - s.lo;
    if (step >= 1u << 24 || s.inside == 0) {
        return;
    }
    /* near 0 several z share a key: select among them by their exact order */
    float z_hi = -((float)step / LINEAR_ONE), z_lo = -((float)(step + 1) / LINEAR_ONE);
    selection exact = select_key(
        r, sh, sample_order(z_lo), sample_order(step == 0 ? 0.0f : z_hi),
        [&](int, float l, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
            float z;
            if (!in_support(l, entry.d, &z) || linear_key(z) != s.lo) {
                return false;
            }
            *key = sample_order(z);
            if (*key < from || *key > to) {
                return false;
            }
            *weight = by_mass ? sample_mass(z) : 1ull;
            return true;
        },
        known);
    d.least = fmaxf(d.least, key_float(exact.lo));
}

/* The first pass of the search for a threshold. */
template <typename G>
inline __device__ selection first_pass(const row_view &r, shared_state *sh, const support &d,
                                       float least_logit, bool by_mass, G goal_of)
{
    selection s = {linear_key(fmaxf(d.least, z_of(least_logit, d))), LINEAR_TOP, 0, 0, 0};

    narrow(r, sh, s, true, weigh_linear{d, by_mass}, goal_of);
    return s;
}

/* ---- the list: (order key of z, ~token) ---- */

/* Collects tokens of positive mass with linear keys in [lo, hi]. */
inline __device__ bool collect_keys(const row_view &r, shared_state *sh, int n_lists,
                                    const support &d, uint32_t lo, uint32_t hi)
{
    const weigh_linear entry = {d, false};

    return collect(r, sh, n_lists, [&](int, float l, uint32_t *key) {
        unsigned long long weight;
        if (!entry(0, l, lo, hi, key, &weight)) {
            return false;
        }
        *key = sample_order(z_of(l, d));
        return true;
    });
}

/* Collects tokens of positive mass: at least the k of greatest z and all equal to the
 * last of them. */
inline __device__ bool collect_top(const row_view &r, shared_state *sh, int n_lists,
                                   const support &d, int k)
{
    float least = z_of(peak_threshold(sh, k), d);

    return collect_few(r, sh, n_lists, z_of(sh->peak[threadIdx.x], d) >= least,
                       [&](int, float l, uint32_t *key) {
                           float z = z_of(l, d);
                           *key = sample_order(z);
                           return z >= least && sample_mass(z) > 0;
                       });
}

__device__ __forceinline__ unsigned long long entry_mass(unsigned long long e)
{
    return e == 0 ? 0 : sample_mass(key_float((uint32_t)(e >> 32)));
}

/* Sets sh->floor, the least order key that stays, from the sorted list of n. With kth >
 * 0 by top-k first, whose total mass then gives the goal of top-p; else for the given
 * goal. `more` tokens that equal `edge` are not listed, but at least one of them is;
 * top-k's floor is at least `edge`. */
inline __device__ void set_list_floor(shared_state *sh, int n, int kth, float top_p,
                                      unsigned long long goal, uint32_t edge = 0,
                                      unsigned long long more = 0)
{
    int i = 2 * (int)threadIdx.x;

    unsigned long long e0 = i < n ? sh->bucket[i] : 0, e1 = i + 1 < n ? sh->bucket[i + 1] : 0,
                       e2 = i + 2 < n ? sh->bucket[i + 2] : 0;
    unsigned long long a = entry_mass(e0), b = entry_mass(e1), all;
    unsigned long long upto1 = block_scan(a + b, sh, &all), upto0 = upto1 - b;
    if (kth > 0) {
        if (i == kth - 1) {
            sh->floor = (uint32_t)(e0 >> 32);
        } else if (i + 1 == kth - 1) {
            sh->floor = (uint32_t)(e1 >> 32);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            sh->floor = max(sh->floor, edge);
        }
        __syncthreads();
        unsigned long long least = (unsigned long long)sh->floor << 32;
        if (e1 >= least && e2 < least) {
            sh->inside = upto1;
        } else if (e0 >= least && e1 < least) {
            sh->inside = upto0;
        }
        __syncthreads();
        goal = top_p < 1.0f
                   ? sample_mass_goal(
                         top_p,
                         sh->inside + (sh->floor == edge ? more * sample_mass(key_float(edge)) : 0))
                   : 0;
    }
    if (goal > 0 && upto0 >= goal && upto0 - a < goal) {
        sh->floor = (uint32_t)(e0 >> 32);
    } else if (goal > 0 && upto1 >= goal && upto0 < goal) {
        sh->floor = (uint32_t)(e1 >> 32);
    }
    __syncthreads();
}

/* ---- the race: the token of greatest z + Gumbel noise is sampled ---- */

/* One thread's race: its best token so far. */
struct race {
    uint64_t key;                  /* of the sample's noise */
    unsigned long long least_mass; /* min-p's threshold */
    float best;                    /* its z + noise */
    int token;                     /* -1: none */
};

__device__ __forceinline__ race race_start(const row_params &p)
{
    return {noise_key(p.seed, p.position), (unsigned long long)NOISE_MUL(p.min_p, 1099511627776.0f),
            -INFINITY, -1};
}

/* Enters token t; the smallest id wins a tie. */
__device__ __forceinline__ void race_enter(race &c, float z, int t)
{
    unsigned long long mass = sample_mass(z);
    if (mass == 0 || mass < c.least_mass) {
        return;
    }
    float score = NOISE_ADD(z, noise_gumbel(noise_bits(c.key, t)));
    if (score > c.best || (score == c.best && t < c.token)) {
        c.best = score;
        c.token = t;
    }
}

__device__ __forceinline__ unsigned long long race_result(const race &c)
{
    return c.token < 0 ? 0 : (unsigned long long)sample_order(c.best) << 32 | (uint32_t)~c.token;
}

/* Runs the race over the row. A token's noise exceeds best - z only if w = bits / 2^32
 * is at most exp(z - best), so w exp(-z) tells which tokens can win: the warp's least
 * one is drawn first, then those near the best known. */
inline __device__ int race_row(const row_view &r, shared_state *sh, const support &d,
                               const row_params &p)
{
    race c = race_start(p);
    /* a bound; race_enter is exact */
    const float least = fmaxf(d.least, p.min_p > 0.0f ? logf(p.min_p) - 1e-4f : -INFINITY);
    uint32_t lowest = 0xFFFFFFFFu;
    float limit = FLT_MAX; /* tokens that cannot win have an infinite chance value */

    for_quads(r, [&](int t, float4 v) {
        const float l[4] = {v.x, v.y, v.z, v.w};
        const uint64_t key = c.key + (uint64_t)(uint32_t)t * 0x9E3779B97F4A7C15ull;
        float z[4], chance[4], low = INFINITY;
        auto enter = [&](float reach) {
            uint32_t may = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
                may |= (uint32_t)(chance[j] <= reach) << j;
            for (; may != 0; may &= may - 1) {
                int j = __ffs(may) - 1;
                race_enter(c, j < 2 ? (j == 0 ? z[0] : z[1]) : (j == 2 ? z[2] : z[3]), t + j);
            }
        };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            z[j] = z_of(l[j], d);
            /* rounded down */
            float w = noise_bits_float(noise_bits(key, j) >> 9 | 0x3F800000u) - 1.0f;
            chance[j] = z[j] >= least ? w * __expf(-z[j]) : INFINITY;
            low = fminf(low, chance[j]);
        }
        __syncwarp();
        /* none is negative: ordered as integers */
        uint32_t now = __reduce_min_sync(0xffffffffu, noise_float_bits(low));
        if (now < lowest) {
            lowest = now;
            if (low == noise_bits_float(now))
                enter(fminf(low, FLT_MAX));
            __syncwarp();
            float best = key_float(__reduce_max_sync(0xffffffffu, sample_order(c.best)));
            limit = fminf(1.02f * __expf(-best), FLT_MAX);
        }
        if (low <= limit)
            enter(limit);
    });
    unsigned long long v = cluster_max(race_result(c), sh);
    return v == 0 ? -1 : (int)~(uint32_t)v;
}

/* Runs the race over the first block's list of n; the token is returned in its thread
 * 0. */
inline __device__ int race_list(shared_state *sh, int n, const row_params &p)
{
    unsigned long long v = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        unsigned long long e = sh->bucket[i];
        race c = race_start(p); /* one race per token: the list is in the order of z, not of ids */
        if ((uint32_t)(e >> 32) >= sh->floor) {
            race_enter(c, key_float((uint32_t)(e >> 32)), (int)~(uint32_t)e);
        }
        v = max(v, race_result(c));
    }
    v = block_max(v, sh);
    return (int)~(uint32_t)v;
}

/* An upper bound on how many tokens of z at or above the range's least have this total
 * weight. */
__device__ __forceinline__ unsigned long long most_tokens(unsigned long long weight, uint32_t lo,
                                                          bool by_mass)
{
    unsigned long long least =
        by_mass ? sample_mass(-((float)(LINEAR_TOP - lo) + 1.0f) / LINEAR_ONE) : 1ull;
    return weight / (least > 0 ? least : 1ull);
}

/* Applies the cuts and samples from the list, which holds all tokens that may stay.
 * Only the first block works; the others are done. */
inline __device__ int sample_list(shared_state *sh, int n_lists, const row_params &p, int kth,
                                  unsigned long long goal)
{
    if (block_cluster().rank() != 0) {
        return 0;
    }
    int n = sh->n_list[n_lists & 1];
    sort_list(sh, n);
    set_list_floor(sh, n, min(kth, n), p.top_p, goal);
    return race_list(sh, n, p);
}

/* Samples a token of the row by temperature, top-k, top-p and min-p; returned in the
 * first block's thread 0, -1: none. *n_lists counts lists, as in collect. *ret_listed:
 * the first block is still working when the others return. */
inline __device__ int sample_token(const row_view &r, shared_state *sh, const row_params &p,
                                   const stats &st, int *n_lists, bool *ret_listed)
{
    const block_cluster cluster;
    support d = {stats_max(st), noise_inv_temperature(p.temperature), nearer_zero(-28.0f)};

    if (p.top_k <= 0 && p.top_p >= 1.0f) {
        return race_row(r, sh, d, p);
    }
    bool by_mass = p.top_k <= 0;
    if (!by_mass && p.top_k <= FEW) {
        if (collect_top(r, sh, ++*n_lists, d, p.top_k)) {
            *ret_listed = true;
            return sample_list(sh, *n_lists, p, p.top_k, 0);
        }
        cluster.sync();
    }
    auto mass_goal = [&](unsigned long long total) {
        return (unsigned long long)sample_mass_goal(p.top_p, total);
    };
    selection s = first_pass(r, sh, d, st.least, by_mass, [&](unsigned long long total) {
        return by_mass ? mass_goal(total) : min(total, (unsigned long long)p.top_k);
    });
    bool whole = most_tokens(s.above + s.inside, s.lo, by_mass) <= LIST;
    if ((whole || (by_mass && most_tokens(s.inside, s.lo, true) <= LIST)) &&
        collect_keys(r, sh, ++*n_lists, d, s.lo, whole ? LINEAR_TOP : s.hi)) {
        int kth = by_mass ? 0 : (int)(s.above + s.goal), n = sh->n_list[*n_lists & 1];
        if (whole) {
            *ret_listed = true;
            return sample_list(sh, *n_lists, p, kth, s.above + s.goal);
        }
        if (cluster.rank() == 0) {
            sort_list(sh, n);
            set_list_floor(sh, n, 0, p.top_p, s.goal);
        }
        cluster.sync();
        d.least = fmaxf(d.least, key_float(cluster.of(sh, 0)->floor));
        cluster.sync();
        return race_row(r, sh, d, p);
    }
    raise_floor(r, sh, d, s, by_mass);
    if (!by_mass && p.top_p < 1.0f) {
        s = first_pass(r, sh, d, st.least, true, mass_goal);
        raise_floor(r, sh, d, s, true);
    }
    return race_row(r, sh, d, p);
}

#endif
