/* Sampling over ranks on devices of their own. Each has the logits of its shard of the
 * vocabulary; every rank gets every token on its device, so its next step starts
 * without the host.
 *
 * A step is sampled in one of four ways, the same on all ranks:
 *     compared  all rows greedy: each rank finds the best of its shard, and the ranks
 *               compare (no logits move)
 *     merged    no row wants more than a few tokens of each shard, by top_k or as its
 *               best ones: top-k lists go to the rank that owns the row (topk_merge.cu);
 *               results go to rank 0
 *     shared    each rank samples its share of the rows, which receives the others'
 *               columns; results likewise
 *     by rank 0 as on CPUs, through NCCL: where the devices do not reach each other,
 *               there are more than SHARING_RANKS ranks, or a step has very many samples
 * The first and the third are in p2p_sample.cu.
 */
#include <stdlib.h>

#include "kernels/cuda/comm/ranks.h"

enum { SHARING_RANKS = 2 };

/* ---- by rank 0 ---- */

/* Allocates space for shards in transit. Never during a capture: the eager step before
 * has done it. */
static bool shards_reserve(struct cuda_backend *c, int64_t n_bytes)
{
    struct cuda_ranks *r = c->ranks;

    if (n_bytes <= r->shards_bytes) {
        return true;
    }
    cudaFree(r->shards);
    r->shards = NULL;
    r->shards_bytes = 0;
    if (!cuda_check(c, cudaMalloc((void **)&r->shards, (size_t)n_bytes), "logits of the ranks")) {
        return false;
    }
    r->shards_bytes = n_bytes;
    return true;
}

/* Columns of a rank's shard of `vocab`; the last shards have what is left. */
static int32_t shard_cols(const struct cuda_ranks *r, int32_t vocab, int32_t rank)
{
    int32_t width = (int32_t)div_ceil(vocab, r->n);

    return MAX(MIN(width, vocab - rank * width), 0);
}

/* Copies [rows, cols] of float32 from one stride to another. */
static void copy_cols(struct cuda_backend *c, float *to, int64_t to_stride, const void *from,
                      int64_t from_stride, int32_t cols, int32_t rows)
{
    cuda_check(c,
               cudaMemcpy2DAsync(to, (size_t)to_stride * 4, from, (size_t)from_stride * 4,
                                 (size_t)cols * 4, (size_t)rows, cudaMemcpyDeviceToDevice,
                                 c->stream),
               "logits");
}

/* Sent without the padding of rows, which differs by rank as the shards' widths do. */
static void send_shard(struct cuda_backend *c, struct mat shard, int32_t rows)
{
    struct cuda_ranks *r = c->ranks;
    const struct nccl *n = r->nccl.lib;

    copy_cols(c, r->shards, shard.cols, shard.data, shard.stride, shard.cols, rows);
    nccl_check(c, n,
               n->Send(r->shards, (size_t)rows * (size_t)shard.cols, ncclFloat, 0, r->nccl.comm,
                       c->stream),
               "logits");
}

static void receive_shards(struct cuda_backend *c, struct mat logits, struct mat shard,
                           int32_t rows)
{
    struct cuda_ranks *r = c->ranks;
    const struct nccl *n = r->nccl.lib;
    int64_t width = div_ceil(logits.cols, r->n), slot = width * rows;
    bool ok = nccl_check(c, n, n->GroupStart(), "logits");

    for (int32_t i = 1; i < r->n && ok; i++) {
        size_t count = (size_t)rows * (size_t)shard_cols(r, logits.cols, i);
        ok = nccl_check(
            c, n, n->Recv(r->shards + (i - 1) * slot, count, ncclFloat, i, r->nccl.comm, c->stream),
            "logits");
    }
    nccl_check(c, n, n->GroupEnd(), "logits");
    copy_cols(c, logits.data, logits.stride, shard.data, shard.stride, shard.cols, rows);
    for (int32_t i = 1; i < r->n; i++) {
        int32_t cols = shard_cols(r, logits.cols, i);
        copy_cols(c, (float *)logits.data + i * width, logits.stride, r->shards + (i - 1) * slot,
                  cols, cols, rows);
    }
}

static void gather_whole(struct cuda_backend *c, struct mat logits, struct mat shard, int32_t rows)
{
    struct cuda_ranks *r = c->ranks;
    int64_t most = MAX(cuda_rows_capacity(c, shard), rows) * div_ceil(logits.cols, r->n) * 4;

    if (!shards_reserve(c, r->rank > 0 ? most : most * (r->n - 1))) {
        return;
    }
    if (r->rank > 0) {
        send_shard(c, shard, rows);
    } else {
        receive_shards(c, logits, shard, rows);
    }
}

/* Broadcasts the step's first n tokens from rank 0. */
static void share_tokens(struct cuda_backend *c, int32_t n)
{
    const struct nccl_group *g = &c->ranks->nccl;
    int32_t *token = c->arrays.sampled;

    if (n > 0) {
        nccl_check(c, g->lib,
                   g->lib->Broadcast(token, token, (size_t)n, ncclInt32, 0, g->comm, c->stream),
                   "tokens");
    }
}

/* ---- shared ---- */

/* Whether a top-k list of each shard suffices. */
static bool wants_few(const struct sample_row *s)
{
    bool draws = s->kind == SAMPLE_TOKEN && s->temperature != 0 && s->top_k != 1;
    int32_t n_best = s->kind == SAMPLE_CANDIDATES ? s->n_candidates : s->n_logprobs;

    return n_best <= TOPK_MOST && (!draws || (s->top_k > 0 && s->top_k <= TOPK_MOST));
}

void cuda_rank_choose(struct cuda_backend *c, const struct batch *b)
{
    struct cuda_ranks *r = c->ranks;

    if (!r) {
        return;
    }
    bool peers = cuda_ranks_p2p(r) && !c->greedy;
    /* Merging adds a row's exponentials shard by shard, which does not give the bits of
     * whole rows that other requests of the batch may need. */
    c->topk_merge = peers && !c->config.deterministic && b->n_samples <= TOPK_SAMPLES;
    for (int32_t i = 0; i < b->n_samples && c->topk_merge; i++) {
        c->topk_merge = wants_few(&b->sample[i]);
    }
    r->shares_rows =
        peers && r->n <= SHARING_RANKS && !c->topk_merge && b->n_samples <= P2P_MAX_TOKENS;
}

void cuda_rank_results(struct cuda_backend *c, struct step_header *h)
{
    struct cuda_ranks *r = c->ranks;

    if (r && (c->topk_merge || r->shares_rows)) {
        h->host_results = (struct step_results){h->result_token, h->result_logprob,
                                                h->result_top_token, h->result_top_logprob};
        h->result_token = r->results.token;
        h->result_logprob = r->results.logprob;
        h->result_top_token = r->results.top_token;
        h->result_top_logprob = r->results.top_logprob;
    }
}

/* The addresses of all ranks' `logits`, the same piece of scratch everywhere. They are
 * mapped when first used, in an eager step. NULL: c->failed is set. */
static const struct rank_map *logits_map(struct cuda_backend *c, struct mat logits)
{
    struct cuda_ranks *r = c->ranks;

    for (int32_t i = 0; i < r->n_maps; i++) {
        if (r->map[i].of[r->rank] == logits.data) {
            return &r->map[i];
        }
    }
    struct err e = {0};
    struct rank_map *grown = realloc(r->map, (size_t)(r->n_maps + 1) * sizeof(*grown));
    if (!grown) {
        err_nomem(&c->failed, "ranks");
        return NULL;
    }
    r->map = grown;
    if (cuda_ranks_map(c, logits.data, &r->map[r->n_maps], &e) < 0) {
        c->failed = e;
        return NULL;
    }
    return &r->map[r->n_maps++];
}

static void send_rows(struct cuda_backend *c, struct mat logits, struct mat shard, int32_t rows)
{
    struct cuda_ranks *r = c->ranks;
    const struct rank_map *map = logits_map(c, logits);

    if (!map) {
        return;
    }
    struct p2p_rows to = {.stride = logits.stride,
                          .vocab = logits.cols,
                          .width = (int32_t)div_ceil(logits.cols, r->n)};
    for (int32_t i = 0; i < r->n; i++) {
        to.row[i] = map->of[i];
    }
    launch_p2p_rows(&r->p2p, &to, shard.data, shard.stride, rows, c->stream);
}

static void sample_rows(struct cuda_backend *c, struct sample_args *a)
{
    struct cuda_ranks *r = c->ranks;
    int32_t first = a->first, rows = a->rows, rows_per_rank = (int32_t)div_ceil(rows, r->n);

    a->first += r->rank * rows_per_rank;
    a->rows = MIN(rows_per_rank, rows - r->rank * rows_per_rank);
    if (a->rows > 0) {
        launch_sample(a, &c->arrays, c->stream);
    }
    launch_p2p_share_tokens(&r->p2p, &c->arrays, first, rows, c->stream);
}

/* ---- compared, and the choice ---- */

static bool compares_candidates(const struct cuda_backend *c, int32_t rows)
{
    return c->greedy && cuda_ranks_p2p(c->ranks) && rows <= P2P_MAX_TOKENS;
}

void cuda_gather_logits(struct backend *b, struct mat logits, struct mat shard)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    int32_t rows = cuda_rows(c, shard);
    if (!c->ranks || !cuda_usable(c) || rows < 1) {
        return;
    }
    c->ranks->shard = shard;
    if (c->ranks->shares_rows) {
        send_rows(c, logits, shard, rows);
    } else if (!c->topk_merge && !compares_candidates(c, rows)) {
        gather_whole(c, logits, shard, rows);
    }
}

static void sample_compared(struct cuda_backend *c, struct sample_args *a)
{
    struct cuda_ranks *r = c->ranks;
    int32_t first_id = r->rank * (int32_t)div_ceil(a->vocab, r->n);

    a->logits = r->shard.data;
    a->stride = r->shard.stride;
    a->vocab = r->shard.cols;
    launch_sample(a, &c->arrays, c->stream);
    launch_p2p_tokens(&r->p2p, &c->arrays, r->shard.data, r->shard.stride, first_id, a->first,
                      a->rows, c->stream);
}

static void sample_topk(struct cuda_backend *c, struct sample_args *a)
{
    struct cuda_ranks *r = c->ranks;
    int32_t vocab = a->vocab;

    a->logits = r->shard.data;
    a->stride = r->shard.stride;
    a->vocab = r->shard.cols;
    launch_topk_merge(&r->p2p, a, &c->arrays, vocab, (int32_t)div_ceil(vocab, r->n), c->stream);
    launch_p2p_share_tokens(&r->p2p, &c->arrays, a->first, a->rows, c->stream);
}

void cuda_rank_sample(struct cuda_backend *c, struct sample_args *a)
{
    if (!cuda_usable(c)) {
        return;
    }
    if (c->topk_merge) {
        sample_topk(c, a);
    } else if (c->ranks->shares_rows) {
        sample_rows(c, a);
    } else if (compares_candidates(c, a->rows)) {
        sample_compared(c, a);
    } else {
        if (c->ranks->rank == 0) {
            launch_sample(a, &c->arrays, c->stream);
        }
        share_tokens(c, c->capturing ? c->padded : c->batch.n_samples);
    }
}
