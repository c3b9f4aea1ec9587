/* Ranks on devices of their own: one process each, sums over NVLink.
 *
 * Small sums, those of decode steps, go straight into the peers' memory (peer.cu), fused with the residual and the norm. The
 * others go through NCCL, which is opened at run time: a machine with one GPU needs no NCCL library. The ranks' first
 * exchange, NCCL's id, is comm's; the handles of their memory then travel through NCCL itself. Rank 0 draws, as on CPUs, and
 * its tokens are handed to the others on the device, so that every rank's next step starts without the host.
 */
#include <dlfcn.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm.h"
#include "kernels/cuda/cuda.h"

#define NCCL_FUNCTIONS(X) \
    X(GetUniqueId)        \
    X(CommInitRank)       \
    X(CommAbort) X(AllReduce) X(AllGather) X(Broadcast) X(Send) X(Recv) X(GroupStart) X(GroupEnd) X(GetErrorString)

struct cuda_ranks {
    void *lib;
#define X(name) __typeof__(nccl##name) *name;
    NCCL_FUNCTIONS(X)
#undef X
    ncclComm_t comm;
    int32_t rank, n;
    struct peer_args peer; /* inbox[rank] NULL: the devices cannot reach each other's memory */
    void *opened[2 * PEER_MAX_RANKS];
    int32_t n_opened;
    float *logits; /* rank 0: the other ranks' parts, [n - 1][rows][width] */
    int64_t logits_bytes;
};

static bool nccl_check(struct cuda_backend *c, ncclResult_t rc, const char *what)
{
    if (rc != ncclSuccess && c->failed.code == 0) {
        err_set(&c->failed, ERR_DEVICE, "cuda: rank %d: %s: %s", c->ranks->rank, what, c->ranks->GetErrorString(rc));
    }
    return rc == ncclSuccess;
}

/* ---- start ---------------------------------------------------------------------------------------------------------- */

static int open_library(struct cuda_ranks *r, struct err *e)
{
    r->lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (r->lib == NULL) {
        return err_set(e, ERR_UNSUPPORTED, "several GPUs need NCCL: %s", dlerror());
    }
#define X(name)                                                                                   \
    *(void **)&r->name = dlsym(r->lib, "nccl" #name);                                             \
    if (r->name == NULL) {                                                                        \
        return err_set(e, ERR_UNSUPPORTED, "several GPUs need NCCL 2.7 or newer: no nccl" #name); \
    }
    NCCL_FUNCTIONS(X)
#undef X
    return 0;
}

static int meet(struct cuda_backend *c, struct err *e)
{
    struct cuda_ranks *r = c->ranks;
    struct comm *m = c->config.comm;
    ncclUniqueId id;
    memset(&id, 0, sizeof(id));
    ncclResult_t rc = r->rank == 0 ? r->GetUniqueId(&id) : ncclSuccess;
    if (rc == ncclSuccess) {
        int met = m->ops->broadcast(m, &id, sizeof(id), e);
        if (met < 0) {
            return met;
        }
        rc = r->CommInitRank(&r->comm, r->n, id, r->rank);
    }
    return rc == ncclSuccess ? 0 : err_set(e, ERR_DEVICE, "cuda: rank %d: NCCL: %s", r->rank, r->GetErrorString(rc));
}

/* What a rank tells the others of its memory. */
struct peer_handles {
    cudaIpcMemHandle_t inbox, arrived;
    int32_t reachable, pad[15];
};

/* Whether this device can reach all the other ranks' devices, which are those of their numbers. */
static bool peers_reachable(const struct cuda_ranks *r, int32_t first_device)
{
    for (int32_t i = 0; i < r->n; i++) {
        int can = 0;
        if (i != r->rank &&
            (cudaDeviceCanAccessPeer(&can, first_device + r->rank, first_device + i) != cudaSuccess || !can)) {
            return false;
        }
    }
    return r->n <= PEER_MAX_RANKS;
}

static int open_peers(struct cuda_backend *c, const struct peer_handles *h, struct err *e)
{
    struct cuda_ranks *r = c->ranks;
    for (int32_t i = 0; i < r->n; i++) {
        if (i == r->rank) {
            continue;
        }
        void *inbox = NULL, *arrived = NULL;
        cudaError_t rc = cudaIpcOpenMemHandle(&inbox, h[i].inbox, cudaIpcMemLazyEnablePeerAccess);
        if (rc == cudaSuccess) {
            r->opened[r->n_opened++] = inbox;
            rc = cudaIpcOpenMemHandle(&arrived, h[i].arrived, cudaIpcMemLazyEnablePeerAccess);
        }
        if (rc != cudaSuccess) {
            return cuda_error(e, rc, "opening a peer's memory");
        }
        r->opened[r->n_opened++] = arrived;
        r->peer.inbox[i] = inbox;
        r->peer.arrived[i] = arrived;
    }
    return 0;
}

/* Memory that the others write, and the others' here. Without a link between all devices NCCL does every sum. */
static int meet_peers(struct cuda_backend *c, struct err *e)
{
    struct cuda_ranks *r = c->ranks;
    size_t inbox_bytes = (size_t)2 * (size_t)r->n * PEER_SLOT_BYTES;
    size_t arrived_bytes = (size_t)r->n * PEER_MAX_ROWS * sizeof(uint32_t);
    struct peer_handles mine, all[COMM_MAX_RANKS];
    memset(&mine, 0, sizeof(mine));
    char *inbox = cuda_alloc(c, inbox_bytes, "ranks", e);
    uint32_t *arrived = cuda_alloc(c, arrived_bytes, "ranks", e);
    struct peer_handles *exchange = cuda_alloc(c, sizeof(mine) * (size_t)(r->n + 1), "ranks", e);
    r->peer.epoch = cuda_alloc(c, PEER_MAX_ROWS * sizeof(uint32_t), "ranks", e);
    if (inbox == NULL || arrived == NULL || exchange == NULL || r->peer.epoch == NULL) {
        return ERR_NOMEM;
    }
    mine.reachable = peers_reachable(r, c->config.device - r->rank) &&
                     cudaIpcGetMemHandle(&mine.inbox, inbox) == cudaSuccess &&
                     cudaIpcGetMemHandle(&mine.arrived, arrived) == cudaSuccess;
    cudaError_t rc = cudaHostAlloc((void **)&r->peer.gave_up, sizeof(int32_t), cudaHostAllocMapped);
    rc = rc == cudaSuccess ? cudaMemsetAsync(arrived, 0, arrived_bytes, c->stream) : rc;
    rc = rc == cudaSuccess ? cudaMemsetAsync(r->peer.epoch, 0, PEER_MAX_ROWS * sizeof(uint32_t), c->stream) : rc;
    rc = rc == cudaSuccess ? cudaMemcpyAsync(exchange, &mine, sizeof(mine), cudaMemcpyHostToDevice, c->stream) : rc;
    if (rc == cudaSuccess &&
        !nccl_check(c, r->AllGather(exchange, exchange + 1, sizeof(mine), ncclChar, r->comm, c->stream), "meeting")) {
        return err_set(e, c->failed.code, "%s", c->failed.text);
    }
    rc = rc == cudaSuccess
             ? cudaMemcpyAsync(all, exchange + 1, sizeof(mine) * (size_t)r->n, cudaMemcpyDeviceToHost, c->stream)
             : rc;
    rc = rc == cudaSuccess ? cudaStreamSynchronize(c->stream) : rc;
    if (rc != cudaSuccess) {
        return cuda_error(e, rc, "meeting the other ranks");
    }
    *r->peer.gave_up = 0;
    for (int32_t i = 0; i < r->n; i++) {
        if (!all[i].reachable) {
            return 0;
        }
    }
    r->peer.rank = r->rank;
    r->peer.n_ranks = r->n;
    r->peer.arrived[r->rank] = arrived;
    r->peer.inbox[r->rank] = inbox;
    return open_peers(c, all, e);
}

int cuda_ranks_init(struct cuda_backend *c, struct err *e)
{
    if (c->config.comm == NULL) {
        return 0;
    }
    c->ranks = calloc(1, sizeof(*c->ranks));
    if (c->ranks == NULL) {
        return err_nomem(e, "ranks");
    }
    c->ranks->rank = c->config.comm->rank;
    c->ranks->n = c->config.comm->n_ranks;
    int rc = open_library(c->ranks, e);
    rc = rc < 0 ? rc : meet(c, e);
    return rc < 0 ? rc : meet_peers(c, e);
}

void cuda_ranks_release(struct cuda_backend *c)
{
    struct cuda_ranks *r = c->ranks;
    if (r == NULL) {
        return;
    }
    for (int32_t i = 0; i < r->n_opened; i++) {
        cudaIpcCloseMemHandle(r->opened[i]);
    }
    cudaFreeHost(r->peer.gave_up);
    cudaFree(r->logits);
    if (r->comm != NULL) {
        r->CommAbort(r->comm); /* no last words: another rank may be gone */
    }
    if (r->lib != NULL) {
        dlclose(r->lib);
    }
    free(r);
    c->ranks = NULL;
}

bool cuda_ranks_gave_up(const struct cuda_backend *c)
{
    return c->ranks != NULL && c->ranks->peer.gave_up != NULL && *(volatile int32_t *)c->ranks->peer.gave_up != 0;
}

/* ---- sums ----------------------------------------------------------------------------------------------------------- */

static ncclDataType_t nccl_type(enum dtype t)
{
    return t == DTYPE_F32 ? ncclFloat : t == DTYPE_F16 ? ncclHalf : ncclBfloat16;
}

/* y summed in place by NCCL; its rows may lie apart. */
static void nccl_sum(struct cuda_backend *c, struct mat y, int32_t rows)
{
    size_t n =
        (size_t)(rows - 1) * (size_t)y.stride + (size_t)y.cols; /* what lies between rows is summed too, unused */
    nccl_check(c, c->ranks->AllReduce(y.data, y.data, n, nccl_type(y.dtype), ncclSum, c->ranks->comm, c->stream),
               "a sum");
}

bool cuda_rank_sum(struct cuda_backend *c, struct mat *out, struct mat *x, struct mat y, const struct norm_args *n,
                   int32_t rows)
{
    if (c->ranks == NULL || !cuda_usable(c) || rows < 1) {
        return false;
    }
    bool peer = c->ranks->peer.inbox[c->ranks->rank] != NULL;
    if (peer && launch_peer_sum(&c->ranks->peer, out ? out->data : NULL, out ? out->stride : 0, x ? x->data : NULL,
                                x ? x->stride : 0, y.data, y.stride, n, rows, y.cols, (int)y.dtype, c->stream)) {
        return true;
    }
    nccl_sum(c, y, rows);
    return false;
}

void cuda_all_reduce(struct backend *b, struct mat x)
{
    struct cuda_backend *c = cuda_of(b);
    cuda_start(c);
    cuda_rank_sum(c, NULL, NULL, x, NULL, cuda_rows(c, x));
}

void cuda_embed_part(struct backend *b, struct mat out, struct mat table, int32_t first, float scale)
{
    struct cuda_backend *c = cuda_of(b);
    cuda_start(c);
    int32_t rows = cuda_rows(c, out);
    launch_embed(out.data, out.stride, table.data, table.stride, c->arrays.token, first, table.rows, rows, out.cols,
                 scale, (int)out.dtype, c->stream);
    cuda_rank_sum(c, NULL, NULL, out, NULL, rows);
}

/* ---- logits and tokens ---------------------------------------------------------------------------------------------- */

/* Room on rank 0 for the others' parts. Not while a graph is captured: the eager step before has made it. */
static bool logits_room(struct cuda_backend *c, int64_t n_bytes)
{
    struct cuda_ranks *r = c->ranks;
    if (n_bytes <= r->logits_bytes) {
        return true;
    }
    cudaFree(r->logits);
    r->logits = NULL;
    r->logits_bytes = 0;
    if (!cuda_check(c, cudaMalloc((void **)&r->logits, (size_t)n_bytes), "the ranks' logits")) {
        return false;
    }
    r->logits_bytes = n_bytes;
    return true;
}

void cuda_gather_logits(struct backend *b, struct mat logits, struct mat part)
{
    struct cuda_backend *c = cuda_of(b);
    struct cuda_ranks *r = c->ranks;
    cuda_start(c);
    int32_t rows = cuda_rows(c, part);
    size_t slot = (size_t)rows * (size_t)part.stride; /* the first rank's part is the widest: all send its stride */
    if (r == NULL || !cuda_usable(c) || rows < 1) {
        return;
    }
    if (r->rank > 0) {
        nccl_check(c, r->Send(part.data, slot, ncclFloat, 0, r->comm, c->stream), "logits");
        return;
    }
    int64_t most = (int64_t)MAX(c->max_graph_rows, rows) * part.stride * (r->n - 1) * 4;
    if (!logits_room(c, most)) {
        return;
    }
    bool ok = nccl_check(c, r->GroupStart(), "logits");
    for (int32_t i = 1; i < r->n && ok; i++) {
        ok = nccl_check(c, r->Recv(r->logits + (size_t)(i - 1) * slot, slot, ncclFloat, i, r->comm, c->stream),
                        "logits");
    }
    nccl_check(c, r->GroupEnd(), "logits");
    int32_t width = (int32_t)div_ceil(logits.cols, r->n);
    for (int32_t i = 0; i < r->n; i++) {
        const void *from = i == 0 ? part.data : r->logits + (size_t)(i - 1) * slot;
        int32_t cols = MIN(width, logits.cols - i * width);
        cuda_check(c,
                   cudaMemcpy2DAsync((float *)logits.data + (size_t)i * (size_t)width, (size_t)logits.stride * 4, from,
                                     (size_t)part.stride * 4, (size_t)cols * 4, (size_t)rows, cudaMemcpyDeviceToDevice,
                                     c->stream),
                   "logits");
    }
}

bool cuda_draws(const struct cuda_backend *c)
{
    return c->ranks == NULL || c->ranks->rank == 0;
}

void cuda_share_tokens(struct cuda_backend *c, int32_t n)
{
    if (c->ranks != NULL && cuda_usable(c) && n > 0) {
        nccl_check(c,
                   c->ranks->Broadcast(c->arrays.sampled, c->arrays.sampled, (size_t)n, ncclInt32, 0, c->ranks->comm,
                                       c->stream),
                   "tokens");
    }
}
