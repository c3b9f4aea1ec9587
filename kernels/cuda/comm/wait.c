/* Waiting for a device that may itself be waiting for other processes, ranks or stages.
 *
 * The host never waits without checking its peers. When one is gone, or a step exceeds
 * the peers' time limit, the host stops waiting, and the device's results are void. The
 * device is drained when the backend is freed: `stop` releases our kernels, NCCL's
 * abort its own.
 */
#include <stdio.h>

#include "kernels/comm/pipeline.h"
#include "kernels/cuda/comm/ranks.h"
#include "kernels/cuda/comm/stages.h"

enum {
    POLL_EVERY = 16,    /* queries of the device between checks of the peers */
    DRAIN_US = 2000000, /* for kernels to end after they were released */
};

/* Whether kernels may wait for other processes. */
static bool has_peers(const struct cuda_backend *c)
{
    return c->ranks || cuda_stages_linked(c);
}

int32_t cuda_rank_number(const struct cuda_backend *c)
{
    const struct comm *m = c->config.comm;
    const struct pipeline *p = c->config.pipeline;

    return p ? pipeline_number(&p->at, p->at.stage, p->at.rank) : m != NULL ? m->rank : 0;
}

/* 0, or why one of them is gone, as far as is known here. */
static int peers_status(struct cuda_backend *c, struct err *e)
{
    struct comm *m = c->config.comm;
    struct pipeline *p = c->config.pipeline;
    int rc = m ? m->ops->check(m, e) : 0;

    return rc == 0 && p ? p->ops->check(p, e) : rc;
}

int cuda_check_peers(struct cuda_backend *c, int64_t start_us, const char *what, struct err *e)
{
    struct comm *m = c->config.comm;
    struct pipeline *p = c->config.pipeline;
    int64_t limit_us = m ? m->timeout_us : p->timeout_us;
    int rc = peers_status(c, e);

    if (rc == 0 && clock_us() - start_us > limit_us) {
        char why[96];
        snprintf(why, sizeof(why), "the ranks have not %s in %.0f s (rank %d waits)", what,
                 (double)limit_us * 1e-6, cuda_rank_number(c));
        if (m) {
            m->ops->abort(m, why);
        }
        if (p) {
            p->ops->abort(p, why);
        }
        rc = peers_status(c, e);
    }
    return rc;
}

static cudaError_t query(struct cuda_backend *c, cudaEvent_t event)
{
    return event ? cudaEventQuery(event) : cudaStreamQuery(c->stream);
}

static void abort_waits(struct cuda_backend *c)
{
    c->aborted = true;
    cuda_late_give_up(c);
    if (c->ranks) {
        *(volatile int32_t *)c->ranks->p2p.stop = 1;
    }
}

static cudaError_t wait_for(struct cuda_backend *c, cudaEvent_t event)
{
    int64_t start_us = clock_us();
    struct err e;

    for (int64_t round = 1;; round++) {
        cudaError_t rc = query(c, event);
        if (rc != cudaErrorNotReady) {
            return rc;
        }
        if (!c->aborted && round % POLL_EVERY == 0 &&
            cuda_check_peers(c, start_us, "ended a step", &e) < 0) {
            abort_waits(c);
            if (c->failed.code == 0) {
                c->failed = e;
            }
        }
        if (c->aborted) {
            return cudaErrorLaunchTimeout; /* c->failed has the reason */
        }
    }
}

cudaError_t cuda_wait_event(struct cuda_backend *c, cudaEvent_t event)
{
    return has_peers(c) ? wait_for(c, event) : cudaEventSynchronize(event);
}

cudaError_t cuda_wait_stream(struct cuda_backend *c)
{
    return has_peers(c) ? wait_for(c, NULL) : cudaStreamSynchronize(c->stream);
}

bool cuda_drain(struct cuda_backend *c)
{
    if (!c->aborted) {
        return true;
    }
    cuda_ranks_abort(c);
    cuda_stages_abort(c);
    for (int64_t until_us = clock_us() + DRAIN_US; clock_us() < until_us;) {
        if (query(c, NULL) != cudaErrorNotReady) {
            return true;
        }
    }
    return false;
}
