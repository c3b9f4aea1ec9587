/* The draw: steps 6 and 7 of the specification (kernels/cpu/sample.c).
 *
 * One histogram tells where the threshold of top-k or top-p lies. The few tokens around it are gathered into the
 * cluster's first block and sorted, and it is read off. When all that stays is in that list, the draw is made there too;
 * else one more pass over the row makes it. Rows that crowd a bucket, and very large k, are narrowed down to a
 * single key pass by pass.
 */
#ifndef QUIRE_CUDA_SAMPLE_DRAW_CUH
#define QUIRE_CUDA_SAMPLE_DRAW_CUH

#include "kernels/cuda/sample_row.cuh"

#define LINEAR_ONE 67108864.0f /* 2^26 */
enum { LIST = BUCKETS };
enum : uint32_t { LINEAR_TOP = 0x80000000u };

/* z in (-28, 0] as an integer that orders alike: linear, so that no bucket is crowded; injective for z <= -1/4. */
__device__ __forceinline__ uint32_t linear_key(float z) { return LINEAR_TOP - (uint32_t)(-z * LINEAR_ONE); }

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

/* Weights of the tokens that take part: masses, or 1 each. */
struct weigh_linear {
    drawing d;
    bool by_mass;
    __device__ bool operator()(int, float l, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) const
    {
        float z;
        if (!takes_part(l, d, &z))
            return false;
        *key = linear_key(z);
        if (*key < from || *key > to)
            return false;
        *weight = by_mass || z < -27.0f ? sample_mass(z) : 1ull; /* above -27 it is positive */
        if (*weight == 0)
            return false;
        *weight = by_mass ? *weight : 1ull;
        return true;
    }
};

/* Raise the floors to the single key that `s`, narrowed once, leads to. */
__device__ void raise_floor(const row_view &r, shared_state *sh, drawing &d, selection s, bool by_mass)
{
    const weigh_linear entry = {d, by_mass};
    auto known = [&](unsigned long long) { return s.goal; };
    while (s.lo < s.hi)
        narrow(r, sh, s, false, entry, known);
    d.least_linear = s.lo;
    uint32_t step = LINEAR_TOP - s.lo;
    if (step >= 1u << 24 || s.inside == 0)
        return;
    /* near 0 several z share a key: settle among them by their exact order */
    float z_hi = -((float)step / LINEAR_ONE), z_lo = -((float)(step + 1) / LINEAR_ONE);
    selection exact = select_key(
        r, sh, sample_order(z_lo), sample_order(step == 0 ? 0.0f : z_hi),
        [&](int, float l, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
            float z;
            if (!takes_part(l, entry.d, &z) || linear_key(z) != s.lo)
                return false;
            *key = sample_order(z);
            if (*key < from || *key > to)
                return false;
            *weight = by_mass ? sample_mass(z) : 1ull;
            return true;
        },
        known);
    d.least_order = max(d.least_order, exact.lo);
}

/* The first pass of a threshold. */
template <typename G>
__device__ selection first_pass(const row_view &r, shared_state *sh, const drawing &d, float least_logit, bool by_mass, G goal_of)
{
    float z = NOISE_MUL(NOISE_SUB(least_logit, d.max), d.inv_temperature);
    selection s = {max(d.least_linear, linear_key(z > -28.0f ? z : -28.0f)), LINEAR_TOP, 0, 0, 0};
    narrow(r, sh, s, true, weigh_linear{d, by_mass}, goal_of);
    return s;
}

/* ---- the list ---- */

/* Tokens of positive mass with keys in [lo, hi] as (order of z, ~token), into the first block. False: too many. */
__device__ bool gather(const row_view &r, shared_state *sh, const drawing &d, uint32_t lo, uint32_t hi)
{
    const block_cluster cluster;
    shared_state *root = cluster.of(sh, 0);
    const weigh_linear entry = {d, false};
    if (threadIdx.x == 0)
        sh->n_list = 0;
    cluster.sync();
    for_row(r, [&](int t, float l) {
        uint32_t key;
        unsigned long long weight;
        if (!entry(t, l, lo, hi, &key, &weight))
            return;
        int i = atomicAdd(&root->n_list, 1);
        if (i < LIST)
            root->bucket[i] =
                (unsigned long long)sample_order(NOISE_MUL(NOISE_SUB(l, d.max), d.inv_temperature)) << 32 | (uint32_t)~t;
    });
    cluster.sync();
    bool fits = root->n_list <= LIST;
    cluster.sync(); /* the first block's shared memory stays until all have read it */
    return fits;
}

/* Bitonic sort (Batcher 1968), greatest first, filled up with zeros to a power of two. */
__device__ void sort_list(shared_state *sh)
{
    int n = sh->n_list, size = 32;
    while (size < n)
        size *= 2;
    for (int i = n + threadIdx.x; i < size; i += blockDim.x)
        sh->bucket[i] = 0;
    __syncthreads();
    for (int k = 2; k <= size; k *= 2)
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

__device__ __forceinline__ unsigned long long entry_mass(unsigned long long e)
{
    return e == 0 ? 0 : sample_mass(key_float((uint32_t)(e >> 32)));
}

/* sh->floor of the sorted list: with kth > 0 first top-k, whose total then gives the goal of top-p; else the goal is given. */
__device__ void settle(shared_state *sh, int kth, float top_p, unsigned long long goal)
{
    int n = sh->n_list, i = 2 * (int)threadIdx.x;
    unsigned long long e0 = i < n ? sh->bucket[i] : 0, e1 = i + 1 < n ? sh->bucket[i + 1] : 0, e2 = i + 2 < n ? sh->bucket[i + 2] : 0;
    unsigned long long a = entry_mass(e0), b = entry_mass(e1), all;
    unsigned long long upto1 = block_scan(a + b, sh, &all), upto0 = upto1 - b;
    if (kth > 0) {
        if (i == kth - 1)
            sh->floor = (uint32_t)(e0 >> 32);
        else if (i + 1 == kth - 1)
            sh->floor = (uint32_t)(e1 >> 32);
        __syncthreads();
        unsigned long long least = (unsigned long long)sh->floor << 32;
        if (e1 >= least && e2 < least)
            sh->inside = upto1;
        else if (e0 >= least && e1 < least)
            sh->inside = upto0;
        __syncthreads();
        goal = top_p < 1.0f ? sample_mass_goal(top_p, sh->inside) : 0;
    }
    if (goal > 0 && upto0 >= goal && upto0 - a < goal)
        sh->floor = (uint32_t)(e0 >> 32);
    else if (goal > 0 && upto1 >= goal && upto0 < goal)
        sh->floor = (uint32_t)(e1 >> 32);
    __syncthreads();
}

/* ---- the race ---- */

/* The best so far of one thread, and what noise must beat to matter: noise exceeds best - z only when its bits are at most
 * 2^32 exp(z - best); 2 % for rounding. */
struct race {
    uint64_t key;
    unsigned long long least_mass;
    float best, scale;
    int token;
};

__device__ __forceinline__ race race_start(const row_params &p)
{
    return {noise_key(p.seed, p.position), (unsigned long long)NOISE_MUL(p.min_p, 1099511627776.0f), -INFINITY, INFINITY, -1};
}

/* Tokens come in ascending order: the smallest id wins a tie. */
__device__ __forceinline__ void race_enter(race &c, float z, int t)
{
    unsigned long long mass = sample_mass(z);
    uint32_t bits = noise_bits(c.key, t);
    if (mass == 0 || mass < c.least_mass || (float)bits > ((float)mass + 1.0f) * c.scale)
        return;
    float score = NOISE_ADD(z, noise_gumbel(bits));
    if (score > c.best) {
        c.best = score;
        c.token = t;
    }
}

__device__ __forceinline__ int race_end(const race &c, shared_state *sh)
{
    unsigned long long v = c.token < 0 ? 0 : (unsigned long long)sample_order(c.best) << 32 | (uint32_t)~c.token;
    v = cluster_max(v, sh);
    return v == 0 ? -1 : (int)~(uint32_t)v;
}

/* Over the row; a warp shares its best, so that few tokens need a logarithm. */
__device__ int race_row(const row_view &r, shared_state *sh, const drawing &d, const row_params &p)
{
    race c = race_start(p);
    uint32_t known = sample_order(-INFINITY);
    for_row(r, [&](int t, float l) {
        float z;
        if (takes_part(l, d, &z))
            race_enter(c, z, t);
        __syncwarp();
        uint32_t best = __reduce_max_sync(0xffffffffu, sample_order(c.best));
        if (best != known) {
            known = best;
            c.scale = 1.02f / 256.0f * expf(-key_float(best));
        }
    });
    return race_end(c, sh);
}

/* Over the list, by the first block; the others wait. */
__device__ int race_list(shared_state *sh, const row_params &p)
{
    race c = race_start(p);
    if (block_cluster().rank() == 0) {
        /* in the order of z: a thread's second token may have the smaller id, so each is a race of its own */
        race other = c;
        int i = 2 * (int)threadIdx.x;
        unsigned long long e0 = i < sh->n_list ? sh->bucket[i] : 0, e1 = i + 1 < sh->n_list ? sh->bucket[i + 1] : 0;
        if (e0 != 0 && (uint32_t)(e0 >> 32) >= sh->floor)
            race_enter(c, key_float((uint32_t)(e0 >> 32)), (int)~(uint32_t)e0);
        if (e1 != 0 && (uint32_t)(e1 >> 32) >= sh->floor)
            race_enter(other, key_float((uint32_t)(e1 >> 32)), (int)~(uint32_t)e1);
        if (other.token >= 0 && (c.token < 0 || other.best > c.best || (other.best == c.best && other.token < c.token)))
            c = other;
    }
    return race_end(c, sh);
}

/* ---- */

/* At most how many tokens of z at or above the range's least weigh this much together. */
__device__ __forceinline__ unsigned long long most_tokens(unsigned long long weight, uint32_t lo, bool by_mass)
{
    unsigned long long least = by_mass ? sample_mass(-((float)(LINEAR_TOP - lo) + 1.0f) / LINEAR_ONE) : 1ull;
    return weight / (least > 0 ? least : 1ull);
}

/* A token of the row by temperature, top-k, top-p and min-p; -1: none. Same answer in all threads of the cluster. */
__device__ int draw(const row_view &r, shared_state *sh, const row_params &p, const stats &st)
{
    const block_cluster cluster;
    drawing d = {stats_max(st), noise_inv_temperature(p.temperature), 0, 0};
    if (p.top_k <= 0 && p.top_p >= 1.0f)
        return race_row(r, sh, d, p);
    bool by_mass = p.top_k <= 0;
    float least_logit = key_float(st.least);
    auto mass_goal = [&](unsigned long long total) { return (unsigned long long)sample_mass_goal(p.top_p, total); };
    selection s = first_pass(r, sh, d, least_logit, by_mass, [&](unsigned long long total) {
        return by_mass ? mass_goal(total) : min(total, (unsigned long long)p.top_k);
    });
    bool whole = most_tokens(s.above + s.inside, s.lo, by_mass) <= LIST;
    if ((whole || (by_mass && most_tokens(s.inside, s.lo, true) <= LIST)) && gather(r, sh, d, s.lo, whole ? LINEAR_TOP : s.hi)) {
        if (cluster.rank() == 0) {
            sort_list(sh);
            settle(sh, by_mass ? 0 : (int)(s.above + s.goal), p.top_p, whole ? s.above + s.goal : s.goal);
        }
        if (whole)
            return race_list(sh, p);
        cluster.sync();
        d.least_order = cluster.of(sh, 0)->floor;
        cluster.sync();
        return race_row(r, sh, d, p);
    }
    raise_floor(r, sh, d, s, by_mass);
    if (!by_mass && p.top_p < 1.0f) {
        s = first_pass(r, sh, d, least_logit, true, mass_goal);
        raise_floor(r, sh, d, s, true);
    }
    return race_row(r, sh, d, p);
}

#endif
