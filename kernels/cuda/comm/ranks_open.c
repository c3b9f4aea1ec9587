/* Connecting ranks on devices of their own.
 *
 *     comm: NCCL's id ─► NCCL's initialisation, on a thread, while weights are read
 *           handles of the inboxes ─► each rank maps the others' memory
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"
#include "kernels/cuda/comm/ranks.h"
#include "kernels/cuda/fused_decode/small_rows.h"

/* Starts NCCL's initialisation, which runs while weights are read. */
static int start_nccl(struct cuda_backend *c, struct err *e)
{
    struct cuda_ranks *r = c->ranks;
    ncclUniqueId id = {0};
    ncclResult_t got = r->rank == 0 ? r->nccl.lib->GetUniqueId(&id) : ncclSuccess;

    if (got != ncclSuccess) {
        return err_set(e, ERR_DEVICE, "cuda: rank %d: NCCL: %s", r->rank,
                       r->nccl.lib->GetErrorString(got));
    }
    int rc = r->comm->ops->broadcast(r->comm, &id, sizeof(id), e);
    return rc < 0 ? rc : nccl_init_start(&r->nccl, c->config.device, &id, r->n, r->rank, e);
}

int cuda_ranks_ready(struct cuda_backend *c, struct err *e)
{
    return !c->ranks ? 0 : nccl_ready(&c->ranks->nccl, c, e);
}

/* ---- peers' memory ---- */

/* A rank's description of its memory, sent to the others. */
struct p2p_handle {
    cudaIpcMemHandle_t memory;
    int32_t reachable, fused_bytes, small_rows, pad[13];
};

/* Whether this device can access all other ranks' devices, which are numbered like the
 * ranks. */
static bool p2p_reachable(const struct cuda_ranks *r, int32_t first_device)
{
    for (int32_t i = 0; i < r->n; i++) {
        int can = 0;
        if (i != r->rank && (cudaDeviceCanAccessPeer(&can, first_device + r->rank,
                                                     first_device + i) != cudaSuccess ||
                             !can)) {
            cudaGetLastError();
            return false;
        }
    }
    return r->n <= P2P_MAX_RANKS;
}

/* Exchanges handles: comm gathers them on rank 0 and broadcasts them, in the order of
 * the ranks. Afterwards all earlier work is done on all devices. */
static int exchange_handles(struct cuda_backend *c, struct p2p_handle *mine, struct p2p_handle *all,
                            struct err *e)
{
    enum { WORDS = sizeof(*mine) / sizeof(float) };
    struct comm *m = c->ranks->comm;
    struct mat shard = {
        .data = mine, .rows = 1, .cols = WORDS, .stride = WORDS, .dtype = DTYPE_F32};
    int32_t n = WORDS * m->n_ranks;
    struct mat whole = {.data = all, .rows = 1, .cols = n, .stride = n, .dtype = DTYPE_F32};

    if (!cuda_check(c, cuda_wait_stream(c), "ranks")) {
        return err_set(e, c->failed.code, "%s", c->failed.text);
    }
    int rc = m->ops->gather_cols(m, whole, shard, e);
    return rc < 0 ? rc : m->ops->broadcast(m, all, sizeof(*all) * (size_t)m->n_ranks, e);
}

static int open_handles(const struct cuda_ranks *r, const struct p2p_handle *h,
                        struct rank_map *ret, struct err *e)
{
    for (int32_t i = 0; i < r->n; i++) {
        cudaError_t rc = i == r->rank ? cudaSuccess
                                      : cudaIpcOpenMemHandle(&ret->of[i], h[i].memory,
                                                             cudaIpcMemLazyEnablePeerAccess);
        if (rc != cudaSuccess) {
            return cuda_error(e, rc, "opening a peer's memory");
        }
    }
    return 0;
}

static void map_release(const struct cuda_ranks *r, struct rank_map *m)
{
    for (int32_t i = 0; i < MIN(r->n, P2P_MAX_RANKS); i++) {
        if (i != r->rank && m->of[i]) {
            cudaIpcCloseMemHandle(m->of[i]);
        }
    }
    memset(m, 0, sizeof(*m));
}

/* As cuda_ranks_map, but *ret stays all NULL if some device cannot access another. */
static int map_if_reachable(struct cuda_backend *c, void *memory, struct rank_map *ret,
                            struct err *e)
{
    struct cuda_ranks *r = c->ranks;
    struct p2p_handle mine, all[COMM_MAX_RANKS];

    memset(ret, 0, sizeof(*ret));
    memset(&mine, 0, sizeof(mine));
    mine.reachable = p2p_reachable(r, c->config.device - r->rank) &&
                     cudaIpcGetMemHandle(&mine.memory, memory) == cudaSuccess;
    mine.fused_bytes = cuda_fused_bytes(c);
    mine.small_rows = mine.fused_bytes > 0 && small_prepare();
    cudaGetLastError();
    int rc = exchange_handles(c, &mine, all, e);
    for (int32_t i = 0; i < r->n && rc == 0; i++) {
        if (!all[i].reachable) {
            return 0;
        }
        r->fused_bytes = i == 0 ? all[i].fused_bytes : MIN(r->fused_bytes, all[i].fused_bytes);
        r->small_rows = (i == 0 || r->small_rows) && all[i].small_rows;
    }
    rc = rc < 0 ? rc : open_handles(r, all, ret, e);
    if (rc < 0) {
        map_release(r, ret);
        return rc;
    }
    ret->of[r->rank] = memory;
    return 0;
}

int cuda_ranks_map(struct cuda_backend *c, void *memory, struct rank_map *ret, struct err *e)
{
    int rc = map_if_reachable(c, memory, ret, e);

    return rc < 0 || ret->of[c->ranks->rank]
               ? rc
               : err_set(e, ERR_DEVICE, "cuda: rank %d: a piece of memory has no handle",
                         c->ranks->rank);
}

/* ---- inboxes ---- */

/* Offsets in an inbox's memory, and its size. `answers` is used on rank 0 only. */
struct inbox_layout {
    size_t fused, small, tokens, topk, rows_epoch, results, n_bytes;
};

enum {
    ROWS_EPOCH_BYTES = 256,
    RESULT_BYTES = P2P_MAX_TOKENS * 4,
    TOP_BYTES = RESULT_BYTES * LIMIT_CANDIDATES
};

static struct inbox_layout inbox_layout(int32_t n)
{
    struct inbox_layout l;

    l.fused = (size_t)P2P_BUFFERS * (size_t)n * P2P_SLOTS * P2P_ROW_BYTES;
    l.small = l.fused + (size_t)P2P_FUSED_BUFFERS * (size_t)n * P2P_FUSED_BYTES;
    l.tokens = l.small + (size_t)P2P_SMALL_BUFFERS * (size_t)n * P2P_SMALL_BYTES;
    l.topk = l.tokens + (size_t)2 * (size_t)n * P2P_MAX_TOKENS * sizeof(struct p2p_token);
    l.rows_epoch =
        l.topk + (size_t)2 * (size_t)n * TOPK_SAMPLES * TOPK_WORDS * sizeof(unsigned long long);
    l.results = l.rows_epoch + ROWS_EPOCH_BYTES;
    l.n_bytes = l.results + 2 * ((size_t)RESULT_BYTES + TOP_BYTES);
    return l;
}

static void place_inboxes(struct cuda_ranks *r, const struct rank_map *m)
{
    const struct inbox_layout l = inbox_layout(r->n);

    for (int32_t i = 0; i < r->n; i++) {
        char *at = m->of[i];
        r->p2p.inbox[i] = (struct p2p_inbox){
            .row = at,
            .fused = at + l.fused,
            .small = at + l.small,
            .token = (struct p2p_token *)(at + l.tokens),
            .rows_epoch = (uint32_t *)(at + l.rows_epoch),
            .topk = (unsigned long long *)(at + l.topk),
        };
    }
    char *results = (char *)m->of[0] + l.results;
    r->results =
        (struct step_results){.token = (int32_t *)results,
                              .logprob = (float *)(results + RESULT_BYTES),
                              .top_token = (int32_t *)(results + 2 * RESULT_BYTES),
                              .top_logprob = (float *)(results + 2 * RESULT_BYTES + TOP_BYTES)};
}

/* Allocates zeroed device memory of this rank's own. */
static void *counters(struct cuda_backend *c, size_t n_bytes, struct err *e)
{
    void *p = cuda_alloc(c, n_bytes, "ranks", e);

    if (p) {
        cuda_check(c, cudaMemsetAsync(p, 0, n_bytes, c->stream), "ranks");
    }
    return p;
}

/* Allocates this rank's inbox and maps the others'. If not all devices are linked, NCCL
 * does every sum. */
static int open_inboxes(struct cuda_backend *c, struct err *e)
{
    struct cuda_ranks *r = c->ranks;
    const struct inbox_layout l = inbox_layout(r->n);
    char *memory = cuda_alloc(c, l.n_bytes, "ranks", e);

    r->p2p.row = counters(c, P2P_SLOTS * sizeof(*r->p2p.row), e);
    r->p2p.epoch = counters(c, P2P_EPOCHS * sizeof(*r->p2p.epoch), e);
    r->p2p.arrived = counters(c, sizeof(*r->p2p.arrived), e);
    r->map = calloc(1, sizeof(*r->map));
    if (!memory || !r->p2p.row || !r->p2p.epoch || !r->p2p.arrived) {
        return ERR_NOMEM;
    }
    if (!r->map) {
        return err_nomem(e, "ranks");
    }
    r->n_maps = 1;
    cuda_check(c, cudaMemsetAsync(memory, 0xFF, l.tokens, c->stream), "ranks");
    cuda_check(c, cudaMemsetAsync(memory + l.tokens, 0, l.n_bytes - l.tokens, c->stream), "ranks");
    r->p2p.rank = r->rank;
    r->p2p.n_ranks = r->n;
    int rc = map_if_reachable(c, memory, r->map, e);
    if (rc == 0 && r->map->of[r->rank]) {
        place_inboxes(r, r->map);
    }
    return rc;
}

int32_t cuda_ranks_fused(struct cuda_backend *c, struct p2p_args *ret)
{
    *ret = c->ranks->p2p;
    return cuda_ranks_p2p(c->ranks) ? c->ranks->fused_bytes : 0;
}

bool cuda_ranks_small(const struct cuda_backend *c)
{
    return c->ranks->small_rows;
}

/* ---- the whole ---- */

static void describe(struct cuda_backend *c)
{
    size_t used = strlen(c->base.device);
    char version[32];

    nccl_version_text(c->ranks->nccl.lib, version, sizeof(version));
    snprintf(c->base.device + used, sizeof(c->base.device) - used, ", NCCL %s%s", version,
             cuda_ranks_p2p(c->ranks) ? " and peer memory" : ", no peer memory");
}

int cuda_ranks_init(struct cuda_backend *c, struct err *e)
{
    if (!c->config.comm) {
        return 0;
    }
    struct cuda_ranks *r = calloc(1, sizeof(*r));
    if (!r) {
        return err_nomem(e, "ranks");
    }
    c->ranks = r;
    r->comm = c->config.comm;
    r->rank = r->comm->rank;
    r->n = r->comm->n_ranks;
    cudaError_t status = cudaHostAlloc((void **)&r->p2p.stop, sizeof(int32_t), cudaHostAllocMapped);
    if (status != cudaSuccess) {
        return cuda_error(e, status, "ranks");
    }
    *r->p2p.stop = 0;
    int rc = nccl_open(&r->nccl.lib, e);
    rc = rc < 0 ? rc : start_nccl(c, e);
    rc = rc < 0 ? rc : open_inboxes(c, e);
    if (rc == 0) {
        describe(c);
    }
    return rc;
}

void cuda_ranks_abort(struct cuda_backend *c)
{
    if (c->ranks) {
        nccl_abort(&c->ranks->nccl);
    }
}

void cuda_ranks_release(struct cuda_backend *c)
{
    struct cuda_ranks *r = c->ranks;

    if (!r) {
        return;
    }
    for (int32_t i = 0; i < r->n_maps; i++) {
        map_release(r, &r->map[i]);
    }
    free(r->map);
    cudaFreeHost(r->p2p.stop);
    cudaFree(r->shards);
    nccl_release(&r->nccl);
    free(r);
    c->ranks = NULL;
}
