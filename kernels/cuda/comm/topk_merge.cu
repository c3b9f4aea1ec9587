/* Sampling over ranks on peer devices by merging top-k lists: each rank has the logits
 * of its shard of the vocabulary, and sends only a few numbers per sample.
 *
 *     every rank    steps 1 to 5 of kernels/cpu/sample.c on its shard
 *                   ─► maximum, sum ─► all ranks: those of the whole row
 *                   the shard's top-k tokens (n best, the target's logit)
 *                   ─► the row's owner
 *     the owner     merges the lists, applies top-k, top-p and min-p, samples, writes results;
 *                   p2p_share_tokens_kernel distributes the tokens
 *
 * A cluster takes a row on every rank, as in sample_kernel, and addresses its shard by
 * the vocabulary's own ids, so noise, ties and lists are those of the whole row. More
 * tokens may tie at the edge of a shard's top-k than the list can hold. They stay or go
 * together, and only the one that wins their race can be sampled, so the list has that
 * one and their number.
 *
 * Each number is sent in one store with its exchange's number beside it, so no flags
 * are needed. Clusters wait for those of the same row on other ranks. Each sends before
 * it waits, and rows start in ascending order everywhere. Every rank receives from all
 * others in every exchange, so before a half of the inbox is written again it has been
 * read.
 */
#include "kernels/cuda/comm/p2p.cuh"
#include "kernels/cuda/sampling/sample_best.cuh"
#include "kernels/cuda/sampling/sample_change.cuh"
#include "kernels/cuda/sampling/sample_draw.cuh"

/* Words of a sample from one rank. An entry of the list: order key of z, ~token, raw
 * logit; of the n best: order key of the logit, ~token. */
enum {
    STATS_WORDS = 4,
    WORD_RAW = 0,
    WORD_NOW = 4,
    WORD_VALUE = 8,
    WORD_TIE_KEY = 9,
    WORD_TIE_MORE = 10,
    WORD_LIST = 11,
    LIST_WORDS = 3
};
enum { WORD_BEST = WORD_LIST + LIST_WORDS * TOPK_MOST, BEST_WORDS = 2 };
static_assert(WORD_BEST + BEST_WORDS * TOPK_MOST <= TOPK_WORDS, "a sample's words");
static_assert(P2P_MAX_RANKS * TOPK_MOST <= SAMPLE_THREADS,
              "an entry a thread when lists are merged");

/* ---- the channel ---- */

struct topk_channel {
    const p2p_args &p;
    uint32_t epoch;
    int sample, owner;

    __device__ __forceinline__ unsigned long long *word(int receiver, int sender, int at) const
    {
        int64_t slot = ((int64_t)(epoch & 1) * p.n_ranks + sender) * TOPK_SAMPLES + sample;
        return p.inbox[receiver].topk + slot * TOPK_WORDS + at;
    }
    __device__ __forceinline__ void send(int receiver, int at, uint32_t v) const
    {
        unsigned long long both = (unsigned long long)epoch << 32 | v;
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word(receiver, p.rank, at)),
                     "l"(both)
                     : "memory");
    }
    __device__ __forceinline__ uint32_t receive(int sender, int at) const
    {
        const unsigned long long *from = word(p.rank, sender, at);
        unsigned long long v;
        int i = 1;
        do {
            asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
        } while ((uint32_t)(v >> 32) != epoch && !stopped(p, i++));
        return (uint32_t)v;
    }
};

/* Merges the shards' statistics into the whole row's, in all threads of the cluster and
 * the same on all ranks. `at`: first of their words. */
__device__ stats merge_stats(const topk_channel &m, shared_state *sh, const stats &mine, int at)
{
    const block_cluster cluster;

    __syncthreads(); /* all have read sh->row */
    if (cluster.rank() == 0 && threadIdx.x < 32) {
        int r = threadIdx.x;
        stats s = stats_none();
        random_delay();
        if (r < m.p.n_ranks) {
            m.send(r, at, (uint32_t)(mine.best >> 32));
            m.send(r, at + 1, (uint32_t)mine.best);
            m.send(r, at + 2, __float_as_uint(mine.sum));
            m.send(r, at + 3, mine.bad);
            s.best = (unsigned long long)m.receive(r, at) << 32;
            s.best |= m.receive(r, at + 1);
            s.sum = __uint_as_float(m.receive(r, at + 2));
            s.bad = m.receive(r, at + 3);
        }
        s = stats_warp(s);
        if (r == 0) {
            sh->row = s;
        }
    }
    cluster.sync();
    stats all = cluster.of(sh, 0)->row;
    all.least = mine.least;
    cluster.sync(); /* before sh->row is written again */
    return all;
}

/* ---- a shard's list ---- */

/* When more tokens are near the shard's k-th than the list holds: lists those above it,
 * and of those equal to it only the winner of their race, with their number in
 * n_ties. */
__device__ void list_crowded(const row_view &r, shared_state *sh, support d, const row_params &p,
                             float least_logit, int *n_lists)
{
    const block_cluster cluster;
    shared_state *root = cluster.of(sh, 0);

    cluster.sync();
    selection s = first_pass(r, sh, d, least_logit, false, [&](unsigned long long total) {
        return min(total, (unsigned long long)p.top_k);
    });
    raise_floor(r, sh, d, s, false);
    if (cluster.rank() == 0 && threadIdx.x == 0) {
        sh->n_ties = 0;
    }
    collect(r, sh, ++*n_lists, [&](int, float l, uint32_t *key) {
        float z = z_of(l, d);
        *key = sample_order(z);
        return z > d.least;
    });
    race c = race_start(p);
    int n = 0, any = -1;
    for_row(r, [&](int t, float l) {
        float z;
        if (!in_support(l, d, &z) || z != d.least) {
            return;
        }
        n++;
        any = t;
        race_enter(c, z, t);
    });
    if (n > 0) {
        atomicAdd(&root->n_ties, n);
    }
    unsigned long long won = cluster_max(race_result(c), sh);
    /* min-p may leave none */
    unsigned long long some = cluster_max(any < 0 ? 0 : (uint32_t)~any, sh);
    if (cluster.rank() == 0 && threadIdx.x == 0) {
        int at = sh->n_list[*n_lists & 1]++;
        sh->bucket[at] =
            (unsigned long long)sample_order(d.least) << 32 | (uint32_t)(won != 0 ? won : some);
    }
    __syncthreads();
}

/* In the first block: cuts its sorted list of n after the k-th, representing all tokens
 * equal to that by one. Returns the number of entries left. */
__device__ int represent_ties(shared_state *sh, int n, const row_params &p)
{
    int k = p.top_k;

    if (n <= k) {
        sh->n_ties = 1;
        return n;
    }
    uint32_t edge = (uint32_t)(sh->bucket[k - 1] >> 32);
    int above = 0, upto = 0;
    for (int i = threadIdx.x; i < (n + SAMPLE_THREADS - 1) / SAMPLE_THREADS * SAMPLE_THREADS;
         i += SAMPLE_THREADS) {
        above += __syncthreads_count(i < n && (uint32_t)(sh->bucket[i] >> 32) > edge);
        upto += __syncthreads_count(i < n && (uint32_t)(sh->bucket[i] >> 32) >= edge);
    }
    if (upto == k) {
        sh->n_ties = 1;
        return k;
    }
    unsigned long long v = 0;
    for (int i = above + (int)threadIdx.x; i < upto; i += SAMPLE_THREADS) {
        race c = race_start(p);
        race_enter(c, key_float(edge), (int)~(uint32_t)sh->bucket[i]);
        v = max(v, race_result(c));
    }
    v = block_max(v, sh);
    if (threadIdx.x == 0) {
        if (v != 0) {
            sh->bucket[above] = (unsigned long long)edge << 32 | (uint32_t)v;
        }
        sh->n_ties = upto - above;
    }
    __syncthreads();
    return above + 1;
}

/* The shard's top-k list: in the first block at most k sorted entries, the last one
 * standing for n_ties tokens. Returns their number. */
__device__ int list_top(const row_view &r, shared_state *sh, const support &d, const row_params &p,
                        float least_logit, int *n_lists)
{
    const block_cluster cluster;
    bool fit = collect_top(r, sh, ++*n_lists, d, p.top_k);

    if (!fit) {
        list_crowded(r, sh, d, p, least_logit, n_lists);
    }
    if (cluster.rank() != 0) {
        return 0;
    }
    int n = sh->n_list[*n_lists & 1];
    sort_list(sh, n);
    return fit ? represent_ties(sh, n, p) : n;
}

/* Sends the first block's n entries to the owner, with what the last one stands for.
 * `logit[t]`: the raw row. */
__device__ void send_list(const topk_channel &m, const shared_state *sh, int n, int k,
                          const float *logit)
{
    int i = threadIdx.x;

    random_delay();
    if (i < k) {
        unsigned long long e = i < n ? sh->bucket[i] : 0;
        m.send(m.owner, WORD_LIST + LIST_WORDS * i, (uint32_t)(e >> 32));
        m.send(m.owner, WORD_LIST + LIST_WORDS * i + 1, (uint32_t)e);
        m.send(m.owner, WORD_LIST + LIST_WORDS * i + 2,
               e == 0 ? 0 : __float_as_uint(logit[(int)~(uint32_t)e]));
    }
    if (i == 0) {
        bool ties = n > 0 && sh->n_ties > 1;
        m.send(m.owner, WORD_TIE_KEY, ties ? (uint32_t)(sh->bucket[n - 1] >> 32) : 0);
        m.send(m.owner, WORD_TIE_MORE, ties ? (uint32_t)sh->n_ties - 1 : 0);
    }
}

/* Sends the first n entries of the first block's list of best tokens to the owner;
 * `found` of them exist. */
__device__ void send_best(const topk_channel &m, const shared_state *sh, int found, int n)
{
    random_delay();
    for (int i = threadIdx.x; i < n; i += SAMPLE_THREADS) {
        unsigned long long e = i < found ? sh->bucket[i] : 0;
        m.send(m.owner, WORD_BEST + BEST_WORDS * i, (uint32_t)(e >> 32));
        m.send(m.owner, WORD_BEST + BEST_WORDS * i + 1, (uint32_t)e);
    }
}

/* ---- the owner ---- */

/* Receives all ranks' entries, n of each, `stride` words apart, into the first block's
 * list, and sorts it. Returns how many exist. */
__device__ int merge_lists(const topk_channel &m, shared_state *sh, int n, int first, int stride)
{
    int i = threadIdx.x, all = n * m.p.n_ranks;

    unsigned long long e = 0;
    __syncthreads();
    random_delay();
    if (i < all) {
        e = (unsigned long long)m.receive(i / n, first + stride * (i % n)) << 32;
        e |= m.receive(i / n, first + stride * (i % n) + 1);
        sh->bucket[i] = e;
    }
    int found = __syncthreads_count(e != 0);
    sort_list(sh, all);
    return found;
}

/* Samples a token from all ranks' lists, with its raw logit; in thread 0. */
__device__ int sample_merged(const topk_channel &m, shared_state *sh, const row_params &p,
                             float *ret_logit)
{
    int k = p.top_k, found = merge_lists(m, sh, k, WORD_LIST, LIST_WORDS);
    uint32_t edge = 0;

    unsigned long long more = 0;
    for (int r = 0; r < m.p.n_ranks; r++) {
        edge = max(edge, m.receive(r, WORD_TIE_KEY));
    }
    for (int r = 0; r < m.p.n_ranks; r++) {
        more += edge != 0 && m.receive(r, WORD_TIE_KEY) == edge ? m.receive(r, WORD_TIE_MORE) : 0;
    }
    set_list_floor(sh, found, min(k, found), p.top_p, 0, edge, more);
    int token = race_list(sh, found, p), i = threadIdx.x;
    __syncthreads();
    if (i < k * m.p.n_ranks &&
        m.receive(i / k, WORD_LIST + LIST_WORDS * (i % k) + 1) == (uint32_t)~token &&
        m.receive(i / k, WORD_LIST + LIST_WORDS * (i % k)) != 0) {
        sh->sampled_logit = __uint_as_float(m.receive(i / k, WORD_LIST + LIST_WORDS * (i % k) + 2));
    }
    __syncthreads();
    *ret_logit = sh->sampled_logit;
    return token;
}

/* ---- a sample ---- */

/* A cluster's row. */
struct shard_row {
    const sample_args &a;
    const step_arrays &s;
    row_slice slice;  /* of the shard, addressed by the vocabulary's ids */
    int vocab, width; /* ids in all, and per shard */
    stats mine, all;  /* statistics of the shard, of the whole row */
    int n_lists;
    bool other_peaks; /* row_stats last saw a changed view */
};

struct answer {
    int token;
    float logprob;
    bool none; /* no token can be sampled; known to all threads of all ranks */
};

/* Writes the best tokens of the row as the sample's. `some`: the shard's are listed. */
__device__ void answer_best(const topk_channel &m, shared_state *sh, const shard_row &row,
                            bool some, int n, float lse)
{
    const step_header *h = row.s.header;

    send_best(m, sh, some ? min(sh->n_list[row.n_lists & 1], n) : 0, n);
    if (m.p.rank != m.owner) {
        return;
    }
    int found = min(merge_lists(m, sh, n, WORD_BEST, BEST_WORDS), n);
    write_list(sh, found, n, lse, h->result_top_token + (int64_t)m.sample * h->top_stride,
               h->result_top_logprob + (int64_t)m.sample * h->top_stride);
}

/* The raw logit of a token that all ranks know, sent to the owner by the rank that has
 * it; in thread 0 of the owner's first block. */
__device__ float value_of(const topk_channel &m, const shard_row &row, int token)
{
    int from = token / row.width;

    if (threadIdx.x > 0) {
        return 0.0f;
    }
    random_delay();
    if (m.p.rank == from) {
        m.send(m.owner, WORD_VALUE, __float_as_uint(row.slice.logit[token]));
    }
    return m.p.rank == m.owner ? __uint_as_float(m.receive(from, WORD_VALUE)) : 0.0f;
}

/* A sample that is drawn, or wants the best tokens of the changed row. Thread 0 of the
 * owner's first block has the result. */
__device__ answer answer_changed(const topk_channel &m, shared_state *sh, shard_row &row,
                                 const row_params &p)
{
    const block_cluster cluster;
    stats mine = row.mine, all = row.all;
    bool changed = changes_row(row.s, p), first = cluster.rank() == 0;
    row_view view = changed ? make_row(row.slice, row.s, p) : row.slice.raw;

    if (changed || row.other_peaks) {
        cluster.sync();
        mine = row_stats(view, sh);
        row.other_peaks = changed;
    }
    if (changed) {
        all = merge_stats(m, sh, mine, WORD_NOW);
    }
    answer ret = {asked_token(row.all, all), 0.0f, false};
    ret.none = ret.token < 0;
    bool draws = p.kind == KIND_TOKEN && ret.token >= 0 && p.temperature != 0.0f && p.top_k != 1,
         some = false;
    int n = 0;
    support d = {stats_max(all), noise_inv_temperature(p.temperature), nearer_zero(-28.0f)};
    if (draws) {
        n = list_top(view, sh, d, p, mine.least, &row.n_lists);
    } else if (p.kind == KIND_CANDIDATES) {
        some = list_best(view, sh, mine, p.n_candidates, &row.n_lists) && ret.token >= 0;
    }
    if (changed && row.slice.staged) {
        stage_again(row.slice);
    }
    if (!first) {
        return ret;
    }
    float lse = stats_max(row.all) + logf(row.all.sum), logit = 0.0f;
    if (p.kind == KIND_CANDIDATES) {
        lse = stats_max(all) + logf(all.sum);
        answer_best(m, sh, row, some, p.n_candidates, lse);
        logit = stats_max(all);
    } else if (draws) {
        send_list(m, sh, n, p.top_k, row.slice.logit);
        if (m.p.rank == m.owner) {
            ret.token = sample_merged(m, sh, p, &logit);
        }
    } else if (ret.token >= 0) {
        logit = value_of(m, row, ret.token);
    }
    ret.logprob = logit - lse;
    return ret;
}

__device__ void answer_sample(const topk_channel &m, shared_state *sh, shard_row &row,
                              const row_params &p)
{
    const block_cluster cluster;
    const step_header *h = row.s.header;
    float lse = stats_max(row.all) + logf(row.all.sum);
    answer got = {stats_token(row.all), 0.0f, stats_token(row.all) < 0};

    if (p.kind == KIND_SCORE && got.token >= 0) {
        got.token = p.target < row.vocab ? p.target : -1;
        if (got.token >= 0 && cluster.rank() == 0) {
            got.logprob = value_of(m, row, got.token) - lse;
        }
    } else if (got.token >= 0 || p.kind == KIND_CANDIDATES) {
        got = answer_changed(m, sh, row, p);
    }
    if (p.kind != KIND_CANDIDATES && p.n_logprobs > 0) {
        cluster.sync();
        stats mine = row.other_peaks ? row_stats(row.slice.raw, sh) : row.mine;
        row.other_peaks = false;
        bool some = list_best(row.slice.raw, sh, mine, p.n_logprobs, &row.n_lists) && !got.none;
        if (cluster.rank() == 0) {
            answer_best(m, sh, row, some, p.n_logprobs, lse);
        }
    }
    if (m.p.rank == m.owner && cluster.rank() == 0 && threadIdx.x == 0) {
        row.s.sampled[m.sample] = got.token;
        h->result_token[m.sample] = got.token;
        h->result_logprob[m.sample] = got.token >= 0 ? got.logprob : -INFINITY;
    }
}

/* One cluster per logits row, all its samples; a.logits is this rank's shard. `vocab`:
 * ids of the whole row, `width` those of the first shard. Shared memory as in
 * sample_kernel. */
__global__ void __launch_bounds__(SAMPLE_THREADS, 2)
    topk_merge_kernel(const __grid_constant__ p2p_args p, const __grid_constant__ sample_args a,
                      const __grid_constant__ step_arrays s, int vocab, int width, bool staged,
                      int tile)
{
    extern __shared__ __align__(128) uint32_t smem[];
    __shared__ shared_state state;
    shared_state *sh = &state;
    const block_cluster cluster;

    pdl_wait();
    pdl_release();
    const step_header *h = s.header;
    const cluster_row of = row_of(a, h);
    if (of.i0 == of.i1) {
        return;
    }
    int rows_per_rank = (a.rows + p.n_ranks - 1) / p.n_ranks;
    const row_slice slice = slice_of(a, of.at, p.rank * width, smem, staged, tile, sh);
    topk_channel m = {p, p.epoch[P2P_EPOCH_TOKENS] + 1, of.i0, of.at / rows_per_rank};
    stats mine = row_stats(slice.raw, sh);
    shard_row row = {a, s, slice, vocab, width, mine, merge_stats(m, sh, mine, WORD_RAW), 0, false};
    for (int i = of.i0; i < of.i1; i++) {
        if (i > of.i0) {
            cluster.sync();
        }
        m.sample = i;
        answer_sample(m, sh, row, ((const row_params *)((const char *)h + h->off_sample))[i]);
    }
    cluster.sync(); /* blocks stay until the others have read their shared memory */
}

extern "C" bool topk_merge_load(void)
{
    cudaFuncAttributes made;

    return cudaFuncGetAttributes(&made, topk_merge_kernel) == cudaSuccess;
}

extern "C" void launch_topk_merge(const struct p2p_args *p, const struct sample_args *a,
                                  const struct step_arrays *s, int32_t vocab, int32_t width,
                                  cudaStream_t stream)
{
    const sample_shape shape = sample_shape_of(a);

    launch_rows(topk_merge_kernel, shape, a->rows, stream, *p, *a, *s, vocab, width, shape.staged,
                shape.tile);
}
