/* What a stage of a pipeline hands to the next (pipeline.h), on GPUs: by way of the host.
 *
 *     device ─► pinned memory ─► shared memory or TCP ─► pinned memory ─► device
 *
 * A part of a step is a few hundred KB when it decodes: copies of tens of microseconds beside the milliseconds that a stage
 * computes; that of a long prompt is a hundred MB beside most of a second. For it every network does, a stage that is gone
 * is noticed by the host, and no kernel of another stage can be waited for without an end. Each part is waited for before the
 * next begins (engine/runner.c), so one buffer is enough.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/stage_tokens.h"

struct cuda_stages {
    struct pipeline *pipeline;
    struct stage_tokens tokens;
    int32_t *before; /* pinned, [max_samples]: the tokens of the step before */
    char *wire;      /* pinned: a part's residual stream */
    size_t wire_bytes;
    struct mat out; /* what step_end sends; data NULL: nothing */
};

int cuda_stages_init(struct cuda_backend *c, struct err *e)
{
    if (c->config.pipeline == NULL) {
        return 0;
    }
    struct cuda_stages *s = calloc(1, sizeof(*s));
    if (s == NULL) {
        return err_nomem(e, "stages");
    }
    c->stages = s;
    s->pipeline = c->config.pipeline;
    int rc = stage_tokens_init(&s->tokens, s->pipeline, c->config.max_samples, e);
    cudaError_t got = rc < 0 ? cudaSuccess
                             : cudaHostAlloc((void **)&s->before, (size_t)c->config.max_samples * sizeof(*s->before),
                                             cudaHostAllocDefault);
    return got == cudaSuccess ? rc : cuda_error(e, got, "tokens of the stages");
}

void cuda_stages_release(struct cuda_backend *c)
{
    struct cuda_stages *s = c->stages;
    if (s == NULL) {
        return;
    }
    stage_tokens_release(&s->tokens);
    cudaFreeHost(s->before);
    cudaFreeHost(s->wire);
    free(s);
    c->stages = NULL;
}

static void check(struct cuda_backend *c, int rc, const struct err *e)
{
    if (rc < 0 && c->failed.code == 0) {
        c->failed = *e;
    }
}

/* The prologue finds the tokens of the step before where it expects those of the part before. */
int cuda_stage_begin(struct cuda_backend *c, const struct batch *b, struct err *e)
{
    struct cuda_stages *s = c->stages;
    if (s == NULL) {
        return 0;
    }
    int rc = stage_tokens_begin(&s->tokens, b, e);
    if (rc < 0) {
        check(c, rc, e);
        return rc;
    }
    const struct step_tokens *t = stage_tokens_before(&s->tokens);
    size_t n_bytes = (size_t)t->n * sizeof(*t->token);
    c->n_prev_samples = t->n;
    s->out.data = NULL;
    memcpy(s->before, t->token, n_bytes);
    if (n_bytes > 0) {
        cuda_check(c, cudaMemcpyAsync(c->arrays.sampled, s->before, n_bytes, cudaMemcpyHostToDevice, c->stream),
                   "tokens of the stages");
    }
    return 0;
}

/* Bytes of a mat with what lies between its rows, which every stage has alike; the buffer holds them. */
static size_t wire_room(struct cuda_backend *c, struct mat x)
{
    struct cuda_stages *s = c->stages;
    size_t n_bytes = (size_t)(x.rows * x.stride * dtype_bytes(x.dtype));
    if (n_bytes > s->wire_bytes) {
        cudaFreeHost(s->wire);
        s->wire = NULL;
        s->wire_bytes = 0;
        if (cuda_check(c, cudaHostAlloc((void **)&s->wire, n_bytes, cudaHostAllocDefault), "what stages exchange")) {
            s->wire_bytes = n_bytes;
        }
    }
    return n_bytes;
}

void cuda_stage_receive(struct backend *b, struct mat x)
{
    struct cuda_backend *c = cuda_of(b);
    struct pipeline *p = c->stages->pipeline;
    size_t n_bytes = wire_room(c, x);
    struct err e;
    if (!cuda_usable(c)) {
        return;
    }
    check(c, p->ops->receive(p, c->stages->wire, n_bytes, &e), &e);
    cuda_check(c, cudaMemcpyAsync(x.data, c->stages->wire, n_bytes, cudaMemcpyHostToDevice, c->stream),
               "what stages exchange");
}

/* Noted: a graph that is being captured has not run yet. */
void cuda_stage_send(struct backend *b, struct mat x)
{
    cuda_of(b)->stages->out = x;
}

void cuda_stage_end(struct cuda_backend *c)
{
    struct cuda_stages *s = c->stages;
    struct err e;
    if (s == NULL || s->out.data == NULL) {
        return;
    }
    struct pipeline *p = s->pipeline;
    size_t n_bytes = wire_room(c, s->out);
    if (cuda_usable(c) &&
        cuda_check(c, cudaMemcpyAsync(s->wire, s->out.data, n_bytes, cudaMemcpyDeviceToHost, c->stream),
                   "what stages exchange") &&
        cuda_check(c, cuda_wait_stream(c), "what stages exchange")) {
        check(c, p->ops->send(p, p->at.rank, s->wire, n_bytes, &e), &e);
    }
}

void cuda_stage_drawn(struct cuda_backend *c, const int32_t *token)
{
    struct err e;
    if (c->stages != NULL) {
        check(c, stage_tokens_end(&c->stages->tokens, &c->batch, token, &e), &e);
    }
}
