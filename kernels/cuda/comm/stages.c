/* Passes the residual stream of a micro-batch from pipeline stage to stage (pipeline.h)
 * on GPUs, device to device by NCCL.
 *
 *     x ─► slice ─► send, on a stream of its own ─────► receive ─► x of the next stage
 *
 * Each pair of neighbours has a communicator of two, so that sending never waits for
 * receiving. A sender goes on with its next micro-batch while the next stage still
 * computes the previous one; by then the data to send lies in one of two slices.
 *
 * Unless every stage has NCCL, the data goes through the hosts: pinned memory, shared
 * memory or TCP, pinned memory. Tokens always do, because the hosts need them. Each
 * micro-batch is waited for before the next begins (engine/workers/runner.c), so one
 * host buffer suffices.
 */
#include "kernels/cuda/comm/stages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm/stage_tokens.h"
#include "kernels/cuda/comm/nccl.h"

#define SLICE_BYTES ((size_t)32 << 20)
enum { SLICES = 2, SENDER = 0, RECEIVER = 1 };

/* A piece of x in transit to the next stage. */
struct slice {
    char *data;
    cudaEvent_t filled, sent;
};

struct cuda_stages {
    struct pipeline *pipeline;
    struct stage_tokens tokens;
    int32_t *before; /* pinned, [max_samples]: tokens of the previous step */
    int32_t *sampled
        /* last stage, every rank: on the device, [max_samples], the tokens of
         * stage_tokens' two steps */
        [2];
    char *host; /* pinned: what is in transit, without NCCL */
    size_t host_bytes;
    struct mat out[STAGE_MATS]; /* [n_out] sent by step_end */
    int n_out;
    bool linked;                /* NCCL is used: */
    struct nccl_group from, to; /* the previous and next stage, if any */
    cudaStream_t stream;        /* for sends */
    struct slice slice[SLICES];
    int n_sent; /* slices sent: selects the next one */
};

/* ---- connecting ---- */

static bool is_first(const struct cuda_stages *s)
{
    return s->pipeline->at.stage == 0;
}

static bool is_last(const struct cuda_stages *s)
{
    return pipeline_is_last(&s->pipeline->at);
}

/* Whether all stages have NCCL: the ranks 0 AND their answers down the pipeline, the
 * last stage sends the result to all ranks of the first stage, and it is passed down
 * again. */
static int agree(struct cuda_stages *s, int32_t *have, struct err *e)
{
    struct pipeline *p = s->pipeline;
    int32_t before = 1, rc = 0;

    if (p->at.rank == 0 && !is_first(s)) {
        rc = p->ops->receive(p, &before, sizeof(before), e);
    }
    *have = *have && before;
    if (rc == 0 && p->at.rank == 0 && !is_last(s)) {
        rc = p->ops->send(p, 0, have, sizeof(*have), e);
    }
    for (int32_t i = 0; rc == 0 && is_last(s) && p->at.rank == 0 && i < p->at.n_ranks; i++) {
        rc = p->ops->send(p, i, have, sizeof(*have), e);
    }
    if (rc == 0) {
        rc = p->ops->receive(p, have, sizeof(*have), e);
    }
    return rc == 0 && !is_last(s) ? p->ops->send(p, p->at.rank, have, sizeof(*have), e) : rc;
}

/* Starts connecting to the neighbours; the sender's id goes ahead. */
static int connect_neighbours(struct cuda_backend *c, const struct nccl *lib, struct err *e)
{
    struct cuda_stages *s = c->stages;
    struct pipeline *p = s->pipeline;
    ncclUniqueId id;
    int rc = 0;

    s->from.lib = s->to.lib = lib;
    if (!is_last(s)) {
        ncclResult_t got = lib->GetUniqueId(&id);
        rc = got == ncclSuccess ? p->ops->send(p, p->at.rank, &id, sizeof(id), e)
                                : err_set(e, ERR_DEVICE, "cuda: rank %d: NCCL: %s",
                                          cuda_rank_number(c), lib->GetErrorString(got));
        rc = rc < 0 ? rc : nccl_init_start(&s->to, c->config.device, &id, 2, SENDER, e);
    }
    if (rc == 0 && !is_first(s)) {
        rc = p->ops->receive(p, &id, sizeof(id), e);
        rc = rc < 0 ? rc : nccl_init_start(&s->from, c->config.device, &id, 2, RECEIVER, e);
    }
    return rc;
}

static int open_slices(struct cuda_backend *c, struct err *e)
{
    struct cuda_stages *s = c->stages;
    cudaError_t rc = cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking);

    for (int i = 0; i < SLICES && rc == cudaSuccess; i++) {
        s->slice[i].data = cuda_alloc(c, SLICE_BYTES, "stage transfer", e);
        if (!s->slice[i].data) {
            return ERR_NOMEM;
        }
        rc = cudaEventCreateWithFlags(&s->slice[i].filled, cudaEventDisableTiming);
        rc = rc == cudaSuccess ? cudaEventCreateWithFlags(&s->slice[i].sent, cudaEventDisableTiming)
                               : rc;
    }
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "stage transfer");
}

/* Connects the stages by NCCL if every stage has it. */
static int link_stages(struct cuda_backend *c, struct err *e)
{
    struct cuda_stages *s = c->stages;
    const struct nccl *lib = NULL;
    struct err why = {0};
    int32_t have = nccl_open(&lib, &why) == 0;
    int rc = agree(s, &have, e);

    if (rc < 0 || !have) {
        return rc;
    }
    if (!lib) {
        return err_set(e, why.code, "%s", why.text);
    }
    s->linked = true;
    rc = connect_neighbours(c, lib, e);
    rc = rc < 0 || is_last(s) ? rc : open_slices(c, e);
    if (rc == 0) {
        size_t used = strlen(c->base.device);
        char version[32];
        nccl_version_text(lib, version, sizeof(version));
        snprintf(c->base.device + used, sizeof(c->base.device) - used, ", NCCL %s between stages",
                 version);
    }
    return rc;
}

int cuda_stages_init(struct cuda_backend *c, struct err *e)
{
    if (!c->config.pipeline) {
        return 0;
    }
    struct cuda_stages *s = calloc(1, sizeof(*s));
    if (!s) {
        return err_nomem(e, "stages");
    }
    c->stages = s;
    s->pipeline = c->config.pipeline;
    int rc = stage_tokens_init(&s->tokens, s->pipeline, c->config.max_samples, e);
    cudaError_t got = rc < 0 ? cudaSuccess
                             : cudaHostAlloc((void **)&s->before,
                                             (size_t)c->config.max_samples * sizeof(*s->before),
                                             cudaHostAllocDefault);
    if (got != cudaSuccess) {
        return cuda_error(e, got, "stage tokens");
    }
    for (int i = 0; i < 2 && rc == 0 && is_last(s); i++) {
        s->sampled[i] = cuda_alloc(c, (size_t)c->config.max_samples * sizeof(*s->sampled[i]),
                                   "stage tokens", e);
        rc = s->sampled[i] ? 0 : ERR_NOMEM;
    }
    return rc < 0 ? rc : link_stages(c, e);
}

int cuda_stages_ready(struct cuda_backend *c, struct err *e)
{
    struct cuda_stages *s = c->stages;
    int rc = !s ? 0 : nccl_ready(&s->from, c, e);

    return !s || rc < 0 ? rc : nccl_ready(&s->to, c, e);
}

bool cuda_stages_linked(const struct cuda_backend *c)
{
    return c->stages && c->stages->linked;
}

void cuda_stages_abort(struct cuda_backend *c)
{
    if (c->stages) {
        nccl_abort(&c->stages->from);
        nccl_abort(&c->stages->to);
    }
}

void cuda_stages_release(struct cuda_backend *c)
{
    struct cuda_stages *s = c->stages;

    if (!s) {
        return;
    }
    nccl_release(&s->from);
    nccl_release(&s->to);
    for (int i = 0; i < SLICES; i++) {
        if (s->slice[i].filled) {
            cudaEventDestroy(s->slice[i].filled);
        }
        if (s->slice[i].sent) {
            cudaEventDestroy(s->slice[i].sent);
        }
    }
    if (s->stream) {
        cudaStreamDestroy(s->stream);
    }
    stage_tokens_release(&s->tokens);
    cudaFreeHost(s->before);
    cudaFreeHost(s->host);
    free(s);
    c->stages = NULL;
}

static void check(struct cuda_backend *c, int rc, const struct err *e)
{
    if (rc < 0 && c->failed.code == 0) {
        c->failed = *e;
    }
}

/* Puts the previous step's tokens where the prologue expects those of the previous
 * micro-batch. The last stage sampled them: its devices have them all, its hosts only
 * those that rank 0 received. */
int cuda_stage_begin(struct cuda_backend *c, const struct batch *b, struct err *e)
{
    struct cuda_stages *s = c->stages;

    if (!s) {
        return 0;
    }
    int rc = stage_tokens_begin(&s->tokens, b, e);
    if (rc < 0) {
        check(c, rc, e);
        return rc;
    }
    const struct step_tokens *t = stage_tokens_before(&s->tokens);
    size_t n_bytes = (size_t)t->n * sizeof(*t->token);
    s->n_out = 0;
    if (n_bytes == 0) {
        return 0;
    }
    const int32_t *from = s->before;
    if (is_last(s)) {
        from = s->sampled[1 - s->tokens.now];
    } else {
        memcpy(s->before, t->token, n_bytes);
    }
    cuda_check(c, cudaMemcpyAsync(c->arrays.sampled, from, n_bytes, cudaMemcpyDefault, c->stream),
               "stage tokens");
    return 0;
}

/* Appends the micro-batch's tokens to those of the step's earlier micro-batches. */
static void keep_sampled(struct cuda_backend *c)
{
    struct cuda_stages *s = c->stages;
    const struct batch *b = &c->batch;
    size_t n_bytes = (size_t)b->n_samples * sizeof(int32_t);

    if (is_last(s) && n_bytes > 0) {
        cuda_check(c,
                   cudaMemcpyAsync(s->sampled[s->tokens.now] + b->first_sample, c->arrays.sampled,
                                   n_bytes, cudaMemcpyDeviceToDevice, c->stream),
                   "stage tokens");
    }
}

/* Bytes of a mat including its rows' padding, which is the same on every stage. */
static size_t bytes_of(struct mat x)
{
    return (size_t)(x.rows * x.stride * dtype_bytes(x.dtype));
}

/* ---- by NCCL ---- */

static void receive_slices(struct cuda_backend *c, struct mat x)
{
    struct nccl_group *g = &c->stages->from;
    size_t n_bytes = bytes_of(x);

    for (size_t at = 0; at < n_bytes && cuda_usable(c); at += SLICE_BYTES) {
        nccl_check(c, g->lib,
                   g->lib->Recv((char *)x.data + at, MIN(SLICE_BYTES, n_bytes - at), ncclChar,
                                SENDER, g->comm, c->stream),
                   "stage transfer");
    }
}

static cudaError_t send_slice(struct cuda_backend *c, const char *data, size_t n_bytes)
{
    struct cuda_stages *s = c->stages;
    struct slice *l = &s->slice[s->n_sent++ % SLICES];
    cudaError_t rc = cudaStreamWaitEvent(c->stream, l->sent, 0);

    rc = rc == cudaSuccess
             ? cudaMemcpyAsync(l->data, data, n_bytes, cudaMemcpyDeviceToDevice, c->stream)
             : rc;
    rc = rc == cudaSuccess ? cudaEventRecord(l->filled, c->stream) : rc;
    rc = rc == cudaSuccess ? cudaStreamWaitEvent(s->stream, l->filled, 0) : rc;
    if (rc != cudaSuccess ||
        !nccl_check(c, s->to.lib,
                    s->to.lib->Send(l->data, n_bytes, ncclChar, RECEIVER, s->to.comm, s->stream),
                    "stage transfer")) {
        return rc;
    }
    return cudaEventRecord(l->sent, s->stream);
}

static void send_slices(struct cuda_backend *c, struct mat x)
{
    size_t n_bytes = bytes_of(x);

    for (size_t at = 0; at < n_bytes && cuda_usable(c); at += SLICE_BYTES) {
        cuda_check(c, send_slice(c, (const char *)x.data + at, MIN(SLICE_BYTES, n_bytes - at)),
                   "stage transfer");
    }
}

/* ---- through the host ---- */

static bool host_reserve(struct cuda_backend *c, size_t n_bytes)
{
    struct cuda_stages *s = c->stages;

    if (n_bytes > s->host_bytes) {
        cudaFreeHost(s->host);
        s->host = NULL;
        s->host_bytes = 0;
        if (cuda_check(c, cudaHostAlloc((void **)&s->host, n_bytes, cudaHostAllocDefault),
                       "stage transfer")) {
            s->host_bytes = n_bytes;
        }
    }
    return cuda_usable(c);
}

static void receive_on_host(struct cuda_backend *c, struct mat x)
{
    struct cuda_stages *s = c->stages;
    struct pipeline *p = s->pipeline;
    size_t n_bytes = bytes_of(x);
    struct err e;

    if (host_reserve(c, n_bytes)) {
        check(c, p->ops->receive(p, s->host, n_bytes, &e), &e);
        cuda_check(c, cudaMemcpyAsync(x.data, s->host, n_bytes, cudaMemcpyHostToDevice, c->stream),
                   "stage transfer");
        cuda_check(c, cuda_wait_stream(c), "stage transfer"); /* before the next one's bytes */
    }
}

static void send_from_host(struct cuda_backend *c, struct mat x)
{
    struct cuda_stages *s = c->stages;
    struct pipeline *p = s->pipeline;
    size_t n_bytes = bytes_of(x);
    struct err e;

    if (host_reserve(c, n_bytes) &&
        cuda_check(c, cudaMemcpyAsync(s->host, x.data, n_bytes, cudaMemcpyDeviceToHost, c->stream),
                   "stage transfer") &&
        cuda_check(c, cuda_wait_stream(c), "stage transfer")) {
        check(c, p->ops->send(p, p->at.rank, s->host, n_bytes, &e), &e);
    }
}

/* ---- either ---- */

void cuda_stage_receive(struct backend *b, struct mat x)
{
    struct cuda_backend *c = cuda_of(b);

    if (!cuda_usable(c)) {
        return;
    }
    if (c->stages->linked) {
        receive_slices(c, x);
    } else {
        receive_on_host(c, x);
    }
}

/* Only recorded: a graph that is being captured has not run yet. cuda_stage_end
 * sends. */
void cuda_stage_send(struct backend *b, struct mat x)
{
    struct cuda_stages *s = cuda_of(b)->stages;

    if (s->n_out < STAGE_MATS) {
        s->out[s->n_out++] = x;
    }
}

void cuda_stage_end(struct cuda_backend *c)
{
    struct cuda_stages *s = c->stages;

    if (!s || !cuda_usable(c)) {
        return;
    }
    keep_sampled(c);
    for (int i = 0; i < s->n_out; i++) {
        if (s->linked) {
            send_slices(c, s->out[i]);
        } else {
            send_from_host(c, s->out[i]);
        }
    }
}

void cuda_stage_tokens_sampled(struct cuda_backend *c, const int32_t *token)
{
    struct err e;

    if (c->stages) {
        check(c, stage_tokens_end(&c->stages->tokens, &c->batch, token, &e), &e);
    }
}
