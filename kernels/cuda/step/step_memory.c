/* Memory of steps: arrays on the device, buffers of inputs and results, and what
 * sampling works in. All of it is for the largest step that the configuration allows.
 */
#include <stdlib.h>

#include "config/base/limits.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/heuristics.h"
#include "kernels/cuda/step/heuristics_verify.h"

static void staging_release(struct cuda_backend *c)
{
    for (int i = 0; i < STEP_RING; i++) {
        cudaFreeHost(c->step[i].staging);
        c->step[i].staging = NULL;
    }
    free(c->staging_large);
    cudaFree(c->staging_device);
    c->staging_large = NULL;
    c->staging_device = NULL;
    c->staging_cap = 0;
}

static void graphs_drop(struct cuda_backend *c)
{
    for (int32_t i = 0; i < c->n_graphs; i++) {
        if (c->graph[i].exec) {
            cudaGraphExecDestroy(c->graph[i].exec);
        }
    }
    c->n_graphs = 0;
}

/* Bytes of the largest step that the configuration allows. */
static int64_t staging_most(const struct cuda_backend *c)
{
    const struct backend_config *k = &c->config;
    const int64_t I = sizeof(int32_t), seqs = k->max_seqs, tokens = k->max_tokens,
                  samples = k->max_samples;
    /* alignment costs each array up to 15 bytes; table updates per sequence */
    enum { ARRAYS = 32, RUNS = 4 };
    int64_t groups = backend_kv_groups(k);
    /* tiles, and those of a step that is widened */
    int64_t of_tokens = tokens * ((5 + groups) * I) + (tokens / ATTN_PREFILL_ROWS + seqs + 1) * 2 *
                                                          (int64_t)sizeof(struct query_tile);
    int64_t of_tables = groups * (RUNS * seqs * (int64_t)sizeof(struct table_update) +
                                  seqs * k->max_blocks_per_seq * I);
    int64_t of_seqs = (seqs + 1) * (6 + CUDA_MAX_WINDOWS) * I +
                      seqs * (int64_t)sizeof(struct widened_seq) +
                      (seqs / 2 + 1) * (int64_t)sizeof(struct shared_run) +
                      groups * seqs * (int64_t)sizeof(struct block_copy);
    int64_t of_samples = samples * (int64_t)sizeof(struct sample_row) +
                         seqs * LIMIT_ROW_BIASES * (int64_t)sizeof(struct token_bias) +
                         seqs * mask_words(k->vocab) * I;

    return (int64_t)sizeof(struct step_header) + ARRAYS * 16 + of_tokens + of_tables + of_seqs +
           of_samples;
}

/* Allocates buffers for the largest step, so that no step ever needs more. Steps of
 * usual size have pinned buffers of their own; a larger step is packed into one
 * ordinary buffer, which is not touched before, and step_begin waits while it is
 * copied. */
static int staging_open(struct cuda_backend *c, struct err *e)
{
    int64_t cap = div_ceil(staging_most(c), 4096) * 4096;

    if (cap > INT32_MAX) {
        return err_set_param(e, ERR_INVALID, "max_num_seqs",
                             "cuda: a step of %d sequences of %d blocks may have %lld MiB, more "
                             "than can be addressed",
                             c->config.max_seqs, c->config.max_blocks_per_seq,
                             (long long)(cap >> 20));
    }
    c->staging_pinned = MIN(cap, STAGING_PINNED_BYTES);
    cudaError_t rc = cudaSuccess;
    for (int i = 0; i < STEP_RING && rc == cudaSuccess; i++) {
        rc = cudaHostAlloc((void **)&c->step[i].staging, (size_t)c->staging_pinned,
                           cudaHostAllocDefault);
    }
    rc = rc == cudaSuccess ? cudaMalloc((void **)&c->staging_device, (size_t)cap) : rc;
    if (rc != cudaSuccess) {
        return cuda_error(e, rc, "buffers of a step");
    }
    c->staging_large = cap > c->staging_pinned ? malloc((size_t)cap) : NULL;
    if (cap > c->staging_pinned && !c->staging_large) {
        return err_nomem(e, "buffers of a step");
    }
    c->staging_cap = cap;
    c->arrays.header = (struct step_header *)c->staging_device;
    return 0;
}

/* Allocates sample.work for `rows` rows of `vocab`. Graphs hold its address, so they
 * are dropped when it moves. */
static int work_reserve(struct cuda_backend *c, int32_t rows, int32_t vocab, struct err *e)
{
    int64_t stride = div_ceil(vocab, 8) * 8;

    if (stride <= c->sample.work_stride && rows <= c->work_rows) {
        return 0;
    }
    stride = MAX(stride, c->sample.work_stride);
    rows = MAX(rows, c->work_rows);
    cudaError_t rc = c->sample.work ? cuda_wait_stream(c) : cudaSuccess;
    graphs_drop(c);
    cudaFree(c->sample.work);
    c->sample.work = NULL;
    c->sample.work_stride = 0;
    c->work_rows = 0;
    rc = rc == cudaSuccess
             ? cudaMalloc((void **)&c->sample.work, (size_t)(rows * stride) * sizeof(float))
             : rc;
    if (rc != cudaSuccess) {
        return cuda_error(e, rc, "sampling");
    }
    c->sample.work_stride = stride;
    c->work_rows = rows;
    return 0;
}

bool cuda_sample_reserve(struct cuda_backend *c, struct mat logits)
{
    struct err e = {0};
    int32_t rows = cuda_rows_capacity(c, logits);

    if (c->greedy || (logits.cols <= c->sample.work_stride && rows <= c->work_rows)) {
        return true;
    }
    if (c->capturing) { /* the eager step before has made it */
        err_set(&e, ERR_DEVICE, "cuda: sampling: no room for %d rows of %d", rows, logits.cols);
    } else {
        work_reserve(c, rows, logits.cols, &e);
    }
    if (e.code < 0 && c->failed.code == 0) {
        c->failed = e;
    }
    return cuda_usable(c);
}

static int32_t *ints(struct cuda_backend *c, int64_t n, struct err *e)
{
    int32_t *p = cuda_alloc(c, (size_t)n * sizeof(*p), "arrays of a step", e);

    if (p && !cuda_check(c, cudaMemsetAsync(p, 0, (size_t)n * sizeof(*p), c->stream),
                         "arrays of a step")) {
        *e = c->failed;
        return NULL;
    }
    return p;
}

/* The arrays on the device. */
static int arrays_init(struct cuda_backend *c, struct err *e)
{
    const struct backend_config *k = &c->config;
    struct step_arrays *a = &c->arrays;
    int64_t rows = MAX(MAX(k->max_tokens, k->max_seqs), k->max_samples) + 1;
    int64_t groups = backend_kv_groups(k);
    const struct {
        int32_t **array;
        int64_t n;
    } wanted[] = {
        {&a->token, rows},
        {&a->position, rows},
        {&a->slot, groups * rows},
        {&a->q_start, rows},
        {&a->kv_len, rows},
        {&a->row, rows},
        {&a->logits_token, rows},
        {&a->sampled, rows},
        {&c->sample.arrived, rows},
        {(int32_t **)&a->shared, 3 * rows},
        {&a->shared_start, rows},
        {&a->skip, rows},
        {&a->chunk_start, (int64_t)CUDA_MAX_WINDOWS * (k->max_seqs + 1)},
        {&a->table, groups * k->max_seqs * k->max_blocks_per_seq},
    };

    a->table_width = k->max_blocks_per_seq;
    a->max_seqs = k->max_seqs;
    a->slot_rows = (int32_t)rows;
    for (size_t i = 0; i < ARRAY_LEN(wanted); i++) {
        *wanted[i].array = ints(c, wanted[i].n, e);
        if (!*wanted[i].array) {
            return e->code;
        }
    }
    c->sample.partial = cuda_alloc(c, (size_t)sample_partial_bytes((int32_t)rows), "sampling", e);
    return c->sample.partial ? 0 : e->code;
}

/* What the device writes for the host in one step: n_samples results, each with
 * LIMIT_CANDIDATES candidates. */
static cudaError_t results_init(struct cuda_step *s, size_t n_samples)
{
    cudaError_t status = cudaEventCreate(&s->begun);

    s->top_cap = (int64_t)n_samples * LIMIT_CANDIDATES;
    const struct {
        void **memory;
        size_t n;
    } wanted[] = {{(void **)&s->token, n_samples},
                  {(void **)&s->logprob, n_samples},
                  {(void **)&s->top_token, (size_t)s->top_cap},
                  {(void **)&s->top_logprob, (size_t)s->top_cap}};
    if (status == cudaSuccess) {
        status = cudaEventCreate(&s->done);
    }
    for (size_t i = 0; i < ARRAY_LEN(wanted) && status == cudaSuccess; i++) {
        status = cudaHostAlloc(wanted[i].memory, wanted[i].n * 4, cudaHostAllocMapped);
    }
    return status;
}

/* The host's arrays of rows that verify drafts. */
static int verify_rows_init(struct verify_rows *r, size_t n_seqs, struct err *e)
{
    r->q_start = malloc((n_seqs + 1) * sizeof(*r->q_start));
    r->kv_len = malloc(n_seqs * sizeof(*r->kv_len));
    r->row = malloc(n_seqs * sizeof(*r->row));
    r->lcp_blocks = malloc(n_seqs * sizeof(*r->lcp_blocks));
    bool ok = r->q_start && r->kv_len && r->row && r->lcp_blocks;
    return ok ? 0 : err_nomem(e, "arrays of a step");
}

int cuda_steps_init(struct cuda_backend *c, struct err *e)
{
    const struct backend_config *k = &c->config;
    int rc = arrays_init(c, e);

    for (int i = 0; i < STEP_RING && rc == 0; i++) {
        cudaError_t status = results_init(&c->step[i], (size_t)k->max_samples);
        rc = status == cudaSuccess ? 0 : cuda_error(e, status, "results of a step");
    }
    rc = rc == 0 ? verify_rows_init(&c->verify_rows, (size_t)k->max_seqs, e) : rc;
    if (rc == 0 && k->max_logits > 0 && k->vocab > 0) {
        rc = work_reserve(c, k->max_logits, k->vocab, e);
    }
    rc = rc == 0 ? cuda_late_init(c, e) : rc;
    return rc == 0 ? staging_open(c, e) : rc;
}

void cuda_steps_release(struct cuda_backend *c)
{
    graphs_drop(c);
    staging_release(c);
    cudaFree(c->sample.work);
    cuda_late_release(c);
    for (int i = 0; i < STEP_RING; i++) {
        struct cuda_step *s = &c->step[i];
        if (s->begun) {
            cudaEventDestroy(s->begun);
        }
        if (s->done) {
            cudaEventDestroy(s->done);
        }
        cudaFreeHost(s->token);
        cudaFreeHost(s->logprob);
        cudaFreeHost(s->top_token);
        cudaFreeHost(s->top_logprob);
    }
    free(c->graph);
    free(c->verify_rows.q_start);
    free(c->verify_rows.kv_len);
    free(c->verify_rows.row);
    free(c->verify_rows.lcp_blocks);
}
