/* Sums, logits and tokens over ranks on devices of their own; ranks_open.c made them meet.
 *
 * Small sums, those of decode steps, go straight into the peers' memory (peer.cu), fused with the residual and the norm. The
 * others go through NCCL. Rank 0 draws, as on CPUs, and its tokens are handed to the others on the device, so that every
 * rank's next step starts without the host.
 *
 * A rank that is gone leaves the others' devices waiting for it. So the host never waits for its device without looking
 * at comm: once that was aborted, or a step takes longer than comm's limit, it stops waiting, and what the device gives is
 * void. The device comes to rest when the backend is freed: `stop` lets our kernels go, NCCL's abort its own. That returns only
 * when no graph uses NCCL any more, so it gets a thread.
 */
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/ranks.h"

enum {
    LOOK_EVERY = 16,   /* queries of the device between looks at comm */
    REST_US = 2000000, /* for the kernels to end once they were let go */
};

bool nccl_check(struct cuda_backend *c, ncclResult_t rc, const char *what)
{
    if (rc != ncclSuccess && c->failed.code == 0) {
        err_set(&c->failed, ERR_DEVICE, "cuda: rank %d: %s: %s", c->ranks->rank, what, c->ranks->GetErrorString(rc));
    }
    return rc == ncclSuccess;
}

/* ---- waiting -------------------------------------------------------------------------------------------------------- */

static cudaError_t query(struct cuda_backend *c, cudaEvent_t event)
{
    return event != NULL ? cudaEventQuery(event) : cudaStreamQuery(c->stream);
}

/* Whether waiting any longer makes sense; if not, why is kept. */
static bool ranks_alive(struct cuda_backend *c, int64_t start_us)
{
    struct comm *m = c->ranks->comm;
    struct err e;
    int rc = m->ops->check(m, &e);
    if (rc == 0 && clock_us() - start_us > m->timeout_us) {
        char why[96];
        snprintf(why, sizeof(why), "the ranks have not ended a step in %.0f s (rank %d waits)",
                 (double)m->timeout_us * 1e-6, m->rank);
        m->ops->abort(m, why);
        rc = m->ops->check(m, &e);
    }
    if (rc < 0 && c->failed.code == 0) {
        c->failed = e;
    }
    return rc == 0;
}

static cudaError_t wait_for(struct cuda_backend *c, cudaEvent_t event)
{
    int64_t start_us = clock_us();
    for (int64_t round = 1;; round++) {
        cudaError_t rc = query(c, event);
        if (rc != cudaErrorNotReady) {
            return rc;
        }
        if (c->ranks->let_go || (round % LOOK_EVERY == 0 && !ranks_alive(c, start_us))) {
            c->ranks->let_go = true;
            *(volatile int32_t *)c->ranks->peer.stop = 1;
            return cudaErrorLaunchTimeout; /* c->failed has the reason */
        }
    }
}

cudaError_t cuda_wait_event(struct cuda_backend *c, cudaEvent_t event)
{
    return c->ranks == NULL ? cudaEventSynchronize(event) : wait_for(c, event);
}

cudaError_t cuda_wait_stream(struct cuda_backend *c)
{
    return c->ranks == NULL ? cudaStreamSynchronize(c->stream) : wait_for(c, NULL);
}

static void *aborter_main(void *arg)
{
    struct cuda_ranks *r = arg;
    r->CommAbort(r->nccl);
    return NULL;
}

bool cuda_ranks_rest(struct cuda_backend *c)
{
    struct cuda_ranks *r = c->ranks;
    if (r == NULL || !r->let_go) {
        return true;
    }
    r->aborting = r->nccl != NULL && pthread_create(&r->aborter, NULL, aborter_main, r) == 0;
    for (int64_t until_us = clock_us() + REST_US; clock_us() < until_us;) {
        if (query(c, NULL) != cudaErrorNotReady) {
            return true;
        }
    }
    return false;
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
    nccl_check(c, c->ranks->AllReduce(y.data, y.data, n, nccl_type(y.dtype), ncclSum, c->ranks->nccl, c->stream),
               "a sum");
}

bool cuda_rank_sum(struct cuda_backend *c, struct mat *out, struct mat *x, struct mat y, const struct norm_args *n,
                   int32_t rows)
{
    if (c->ranks == NULL || !cuda_usable(c) || rows < 1) {
        return false;
    }
    if (cuda_ranks_peers(c->ranks) &&
        launch_peer_sum(&c->ranks->peer, out ? out->data : NULL, out ? out->stride : 0, x ? x->data : NULL,
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

/* Greedy steps need no logits but their own rank's: the candidates are compared where they are. */
static bool compares_candidates(const struct cuda_backend *c, int32_t rows)
{
    return c->greedy && c->ranks != NULL && cuda_ranks_peers(c->ranks) && rows <= PEER_MAX_TOKEN_ROWS;
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
    r->part = part;
    if (compares_candidates(c, rows)) {
        return;
    }
    if (r->rank > 0) {
        nccl_check(c, r->Send(part.data, slot, ncclFloat, 0, r->nccl, c->stream), "logits");
        return;
    }
    int64_t most = (int64_t)MAX(c->max_graph_rows, rows) * part.stride * (r->n - 1) * 4;
    if (!logits_room(c, most)) {
        return;
    }
    bool ok = nccl_check(c, r->GroupStart(), "logits");
    for (int32_t i = 1; i < r->n && ok; i++) {
        ok = nccl_check(c, r->Recv(r->logits + (size_t)(i - 1) * slot, slot, ncclFloat, i, r->nccl, c->stream),
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

/* The first n drawn tokens of the step, from rank 0 to all. */
static void share_tokens(struct cuda_backend *c, int32_t n)
{
    struct cuda_ranks *r = c->ranks;
    if (n > 0) {
        nccl_check(c, r->Broadcast(c->arrays.sampled, c->arrays.sampled, (size_t)n, ncclInt32, 0, r->nccl, c->stream),
                   "tokens");
    }
}

bool cuda_rank_sample(struct cuda_backend *c, struct sample_args *a, int32_t vocab)
{
    struct cuda_ranks *r = c->ranks;
    if (!cuda_usable(c)) {
        return true;
    }
    if (compares_candidates(c, a->rows)) {
        a->logits = r->part.data;
        a->stride = r->part.stride;
        a->vocab = r->part.cols;
        bool ok = launch_sample(a, &c->arrays, c->stream);
        launch_peer_tokens(&r->peer, &c->arrays, r->part.data, r->part.stride, r->rank * (int32_t)div_ceil(vocab, r->n),
                           a->first, a->rows, c->stream);
        return ok;
    }
    bool ok = r->rank > 0 || launch_sample(a, &c->arrays, c->stream);
    share_tokens(c, c->capturing ? c->padded : c->batch.n_samples);
    return ok;
}
