/* Sums over ranks on devices of their own, and waiting for them; ranks_open.c made them meet, rank_draw.c has the logits.
 *
 * Small sums, those of decode steps, go straight into the peers' memory (peer.cu), fused with the residual and the norm. The
 * others go through NCCL.
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
