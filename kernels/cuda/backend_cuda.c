/* The CUDA backend: opening a device, its memory, and the operations as kernel
 * launches. */
#include "kernels/cuda/cuda.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"
#include "kernels/cuda/attention/rope.h"
#include "kernels/cuda/heuristics.h"
#include "kernels/cuda/quant/groups.h"

int cuda_error(struct err *e, cudaError_t status, const char *what)
{
    cudaGetLastError(); /* clears an error that is not sticky */
    int rc = status == cudaErrorMemoryAllocation ? ERR_NOMEM : ERR_DEVICE;
    return err_set(e, rc, "cuda: %s: %s", what, cudaGetErrorString(status));
}

bool cuda_check(struct cuda_backend *c, cudaError_t rc, const char *what)
{
    if (rc != cudaSuccess && c->failed.code == 0) {
        cuda_error(&c->failed, rc, what);
    }
    return rc == cudaSuccess;
}

void *cuda_alloc(struct cuda_backend *c, size_t n_bytes, const char *what, struct err *e)
{
    if (c->n_owned == c->owned_cap) {
        int32_t cap = c->owned_cap * 2 + 64;
        void **grown = realloc(c->owned, (size_t)cap * sizeof(*grown));
        if (!grown) {
            err_nomem(e, what);
            return NULL;
        }
        c->owned = grown;
        c->owned_cap = cap;
    }
    void *p = NULL;
    cudaError_t rc = cudaMalloc(&p, MAX(n_bytes, (size_t)256));
    if (rc != cudaSuccess) {
        cudaGetLastError();
        size_t free_bytes = 0, total_bytes = 0;
        cudaMemGetInfo(&free_bytes, &total_bytes);
        err_set(e, ERR_NOMEM,
                "cuda: %s: no room for %zu MiB on the device, %zu of %zu MiB are free (%s)", what,
                n_bytes >> 20, free_bytes >> 20, total_bytes >> 20, cudaGetErrorString(rc));
        return NULL;
    }
    c->owned[c->n_owned++] = p;
    return p;
}

void cuda_release(struct cuda_backend *c, void *p)
{
    for (int32_t i = c->n_owned - 1; i >= 0 && p; i--) {
        if (c->owned[i] == p) {
            c->owned[i] = c->owned[--c->n_owned];
            cudaFree(p);
            return;
        }
    }
}

static int cuda_memory(struct backend *b, struct backend_memory *ret, struct err *e)
{
    (void)b;
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    cudaError_t rc = cudaMemGetInfo(&free_bytes, &total_bytes);
    if (rc != cudaSuccess) {
        return cuda_error(e, rc, "memory size");
    }
    *ret = (struct backend_memory){.total_bytes = (int64_t)total_bytes,
                                   .free_bytes = (int64_t)free_bytes};
    return 0;
}

static int cuda_scratch(struct backend *b, int32_t rows, int32_t cols, enum dtype t,
                        struct mat *ret, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);

    if (rows < 1 || cols < 1) {
        return err_set(e, ERR_INVALID, "scratch of [%d, %d] is not possible", rows, cols);
    }
    int64_t stride = div_ceil(cols, 8) * 8; /* rows start at multiples of 16 bytes or more */
    int64_t row_bytes = stride * dtype_bytes(t);
    struct cuda_scratch *grown = realloc(c->scratch, (size_t)(c->n_scratch + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(e, "activations");
    }
    c->scratch = grown;
    void *data = cuda_alloc(c, (size_t)(row_bytes * rows), "activations", e);
    if (!data) {
        return ERR_NOMEM;
    }
    c->scratch[c->n_scratch++] =
        (struct cuda_scratch){.data = data, .n_bytes = row_bytes * rows, .row_bytes = row_bytes};
    *ret = (struct mat){.data = data, .stride = stride, .rows = rows, .cols = cols, .dtype = t};
    return 0;
}

int32_t cuda_rows_capacity(const struct cuda_backend *c, struct mat m)
{
    for (int32_t i = 0; i < c->n_scratch; i++) {
        const struct cuda_scratch *s = &c->scratch[i];
        int64_t offset = (char *)m.data - s->data;
        if (offset >= 0 && offset < s->n_bytes) {
            return (int32_t)((s->n_bytes - offset + s->row_bytes - 1) / s->row_bytes);
        }
    }
    return m.rows;
}

int32_t cuda_rows(struct cuda_backend *c, struct mat m)
{
    if (c->capturing) {
        int32_t first = MAX(c->logits_first, 0);
        return first + m.rows == c->batch.n_tokens ? c->padded - first : m.rows;
    }
    /* The eager step before a capture: find how far rows can be padded. Parts of logits
     * are never padded beyond their end (step.c). */
    if (c->in_step && c->recording && c->logits_first < 0) {
        c->max_graph_rows =
            MIN(c->max_graph_rows, m.rows < c->batch.n_tokens ? m.rows : cuda_rows_capacity(c, m));
    }
    return m.rows;
}

/* ---- operations ---- */

struct norm_args cuda_norm_args(const struct norm *n)
{
    return (struct norm_args){.weight = n->weight.data,
                              .bias = n->bias.data,
                              .weight_type = (int32_t)n->weight.dtype,
                              .layer_norm = n->kind == NORM_LAYER,
                              .eps = n->eps,
                              .weight_offset = n->weight_offset};
}

void cuda_embed_rows(struct cuda_backend *c, struct mat out, struct mat table, int32_t first,
                     int32_t rows, float scale)
{
    if (table.format) {
        launch_embed_groups(out.data, out.stride, table.priv, c->arrays.token, first, rows, scale,
                            (int)out.dtype, c->stream);
        return;
    }
    launch_embed(out.data, out.stride, table.data, table.stride, c->arrays.token, first, table.rows,
                 rows, out.cols, scale, (int)out.dtype, c->stream);
}

static void cuda_embed(struct backend *b, struct mat out, struct mat table, float scale)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    cuda_embed_rows(c, out, table, 0, cuda_rows(c, out), scale);
}

static void cuda_embed_position(struct backend *b, struct mat x, struct mat table, int32_t offset)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    launch_embed_position(x.data, x.stride, table.data, (int)table.dtype, table.stride,
                          c->arrays.position, offset, cuda_rows(c, x), x.cols, (int)x.dtype,
                          c->stream);
}

static void cuda_norm(struct backend *b, struct mat out, struct mat x, const struct norm *n)
{
    struct cuda_backend *c = cuda_of(b);
    struct norm_args a = cuda_norm_args(n);

    if (cuda_fused_norm(c, out, x, n)) {
        return;
    }
    cuda_start(c);
    int32_t rows = cuda_rows(c, out);
    if (cuda_pending_suits(c, out, rows)) {
        cuda_pending_put(c, &(struct pending_codes){
                                .kind = PENDING_NORM, .out = out, .x = x, .norm = a, .rows = rows});
        return;
    }
    launch_norm(out.data, out.stride, x.data, x.stride, NULL, 0, &a, rows, out.cols, (int)x.dtype,
                c->stream);
}

static void cuda_add_norm(struct backend *b, struct mat out, struct mat x, struct mat y,
                          const struct norm *n, bool partial)
{
    struct cuda_backend *c = cuda_of(b);
    struct norm_args a = cuda_norm_args(n);

    if (cuda_linear_add(c, x, y, partial)) {
        cuda_norm(b, out, x, n);
        return;
    }
    enum experts_added added = cuda_experts_add(c, out, x, y, &a, partial);
    if (added == EXPERTS_ADDED) {
        cuda_norm(b, out, x, n);
    }
    if (added != EXPERTS_WAIT) {
        return;
    }
    if (cuda_fused_add_norm(c, out, x, y, n, partial)) {
        return;
    }
    cuda_start(c);
    int32_t rows = cuda_rows(c, out);
    if (cuda_pending_suits(c, out, rows)) {
        cuda_pending_put(
            c, &(struct pending_codes){
                   .kind = PENDING_NORM, .out = out, .x = x, .y = y, .norm = a, .rows = rows});
        return;
    }
    if (!partial || !cuda_rank_sum(c, &out, &x, y, &a, rows)) {
        launch_norm(out.data, out.stride, x.data, x.stride, y.data, y.stride, &a, rows, out.cols,
                    (int)x.dtype, c->stream);
    }
}

static void cuda_add(struct backend *b, struct mat x, struct mat y, bool partial)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    int32_t rows = cuda_rows(c, x);
    if (!partial || !cuda_rank_sum(c, NULL, &x, y, NULL, rows)) {
        launch_add(x.data, x.stride, y.data, y.stride, rows, x.cols, (int)x.dtype, c->stream);
    }
}

static void cuda_gather(struct backend *b, struct mat out, struct mat x, int32_t first)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    c->logits_first = first;
    if (c->recording && !c->capturing) {
        c->logits_rows = cuda_rows_capacity(c, out);
    }
    launch_gather(out.data, out.stride, x.data, x.stride, c->arrays.logits_token + first,
                  cuda_rows(c, out), out.cols, (int)out.dtype, c->stream);
}

static void cuda_soft_cap(struct backend *b, struct mat x, float cap)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    launch_soft_cap(x.data, x.stride, cuda_rows(c, x), x.cols, cap, c->stream);
}

static void cuda_xielu(struct backend *b, struct mat x, struct mat factors)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    launch_xielu(x.data, x.stride, factors.data, cuda_rows(c, x), x.cols, (int)x.dtype, c->stream);
}

static void cuda_scale_by_score(struct backend *b, struct mat out, struct mat x, struct mat scores)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    cuda_rows(c, x);
    cuda_rows(c, scores);
    launch_scale_by_score(out.data, out.stride, x.data, x.stride, scores.data, scores.stride,
                          scores.cols, cuda_rows(c, out), out.cols, (int)out.dtype, c->stream);
}

struct step_arrays cuda_group_arrays(const struct cuda_backend *c, int32_t group)
{
    struct step_arrays a = c->arrays;

    a.slot += (int64_t)group * a.slot_rows;
    a.table += (int64_t)group * a.max_seqs * a.table_width;
    return a;
}

static void cuda_rope_kv(struct backend *b, struct mat qkv, const struct rope *r,
                         const struct attention *a)
{
    struct cuda_backend *c = cuda_of(b);
    struct rope_args k = {.cos_sin = r->cos_sin.data,
                          .cos_sin_stride = r->cos_sin.stride,
                          .query_factors = r->cos_sin.data && r->query_factors,
                          .rot_dim = r->rot_dim,
                          .interleaved = r->interleaved,
                          .q_norm = cuda_norm_args(&r->q_norm),
                          .k_norm = cuda_norm_args(&r->k_norm),
                          .v_eps = r->v_eps,
                          .n_heads = a->n_heads,
                          .layer = a->layer,
                          .k_over = 1 / attention_k_scale(a),
                          .v_over = 1 / attention_v_scale(a),
                          .type = (int32_t)qkv.dtype};

    struct kv_view kv = c->group_view[a->group];

    kv.n_kv_heads = a->n_kv_heads; /* 0: queries alone */
    if (cuda_fused_rope_kv(c, qkv, r, a)) {
        return;
    }
    cuda_start(c);
    const struct step_arrays s = cuda_group_arrays(c, a->group);
    (r->norm_last ? launch_rope_kv_late : launch_rope_kv)(qkv.data, qkv.stride, &k, &kv, s.position,
                                                          s.slot, cuda_rows(c, qkv), c->stream);
}

/* Makes the attention's work space when the model's shape is first seen. False:
 * c->failed. */
static bool attention_prepare(struct cuda_backend *c, const struct attention *a, enum dtype act)
{
    if (c->attn.partial_o) {
        return true;
    }
    struct attn_workspace w = {
        .blocks = attn_decode_blocks(),
        .shape =
            attn_decode_shape(a->head_dim, (int32_t)dtype_bytes(c->kv.dtype), cuda_shared_limit())};
    size_t rows = (size_t)w.blocks * (size_t)MAX(w.shape.warps, 1) * 2 * 16;
    size_t n_prefix = (size_t)c->config.max_seqs * (size_t)a->n_heads;
    w.partial_ml = cuda_alloc(c, rows * 2 * sizeof(float), "attention", &c->failed);
    w.partial_o =
        cuda_alloc(c, rows * (size_t)a->head_dim * sizeof(float), "attention", &c->failed);
    w.prefix_ml = cuda_alloc(c, n_prefix * 2 * sizeof(float), "attention", &c->failed);
    w.prefix_o =
        cuda_alloc(c, n_prefix * (size_t)a->head_dim * sizeof(float), "attention", &c->failed);
    if (!cuda_usable(c) ||
        !cuda_check(c, cudaMemsetAsync(w.partial_ml, 0xFF, rows * 2 * sizeof(float), c->stream),
                    "attention") ||
        !cuda_check(c,
                    cudaMemsetAsync(w.partial_o, 0xFF, rows * (size_t)a->head_dim * sizeof(float),
                                    c->stream),
                    "attention")) {
        return false;
    }
    c->attn = w;
    c->q_heads = a->n_heads / c->kv_view.n_kv_heads;
    cuda_panel_prepare(c, act);
    return true;
}

/* Index of a window's chunk starts; those of a new window are computed now. -1: too
 * many windows. */
static int32_t attention_window(struct cuda_backend *c, int32_t window)
{
    for (int32_t i = 0; i < c->n_windows; i++) {
        if (c->window[i] == window) {
            return i;
        }
    }
    if (c->n_windows == CUDA_MAX_WINDOWS || c->capturing) {
        return -1;
    }
    int32_t i = c->n_windows++;
    c->window[i] = window;
    int32_t *start = malloc((size_t)(c->batch.n_decode + 1) * sizeof(*start));
    if (!start) {
        err_nomem(&c->failed, "attention");
        return -1;
    }
    attn_chunk_starts(&c->batch, window, ATTN_CHUNK, NULL, start);
    struct split_kv_plan plan = cuda_split_kv(c, start, c->batch.n_decode);
    cuda_check(c,
               cudaMemcpyAsync(c->arrays.chunk_start + (int64_t)i * (c->config.max_seqs + 1), start,
                               (size_t)(c->batch.n_decode + 1) * sizeof(*start),
                               cudaMemcpyHostToDevice, c->stream),
               "attention");
    cuda_check(c,
               cudaMemcpyAsync((char *)c->arrays.header + offsetof(struct step_header, split_kv) +
                                   (size_t)i * sizeof(plan),
                               &plan, sizeof(plan), cudaMemcpyHostToDevice, c->stream),
               "attention");
    cuda_check(c, cudaStreamSynchronize(c->stream), "attention");
    free(start);
    return i;
}

/* Attention over heads of any shape. */
static void attention_plain(struct cuda_backend *c, const struct attn_args *k,
                            const struct step_arrays *s, int32_t n_decode, int32_t rest)
{
    if (n_decode > 0) {
        launch_attn_plain(k, s, 0, n_decode, 0, n_decode, c->stream);
    }
    if (rest > 0) {
        launch_attn_plain(k, s, c->batch.n_decode, c->batch.n_seqs - c->batch.n_decode,
                          c->batch.n_decode, rest, c->stream);
    }
}

/* Batch-invariant attention: every query visits its keys in the same order, whatever
 * else is in the step. */
static void attention_invariant(struct cuda_backend *c, const struct attn_args *k,
                                const struct step_arrays *s, int32_t n_decode, int32_t rest)
{
    if (!launch_attn_invariant(k, s, n_decode, c->tile_device, rest > 0 ? c->n_tiles : 0,
                               c->stream)) {
        attention_plain(c, k, s, n_decode, rest);
    }
}

static void cuda_attention(struct backend *b, struct mat out, struct mat qkv,
                           const struct attention *a)
{
    struct cuda_backend *c = cuda_of(b);

    const struct kv_view *kv = &c->group_view[a->group];
    /* the schedule of a step is for heads of one shape and without chunks; others take
     * the plain kernel */
    bool usual = kv->head_dim == c->kv_view.head_dim && kv->n_kv_heads == c->kv_view.n_kv_heads &&
                 a->chunk == 0;

    cuda_start(c);
    cuda_rows(c, out);
    if (usual && !attention_prepare(c, a, qkv.dtype)) {
        return;
    }
    int32_t window = usual ? attention_window(c, a->window) : -1;
    struct attn_args k = {.out = out.data,
                          .qkv = qkv.data,
                          .out_stride = out.stride,
                          .qkv_stride = qkv.stride,
                          .layer = a->layer,
                          .n_heads = a->n_heads,
                          .scale = a->scale,
                          .softcap = a->softcap,
                          .window = a->window,
                          .window_index = MAX(window, 0),
                          .chunk = a->chunk,
                          .sinks = a->sinks.data,
                          .k_scale = c->kv.dtype == DTYPE_F8 ? attention_k_scale(a) : 1,
                          .v_scale = c->kv.dtype == DTYPE_F8 ? attention_v_scale(a) : 1,
                          .type = (int32_t)qkv.dtype,
                          .shared = usual && c->shared && a->window == 0,
                          .kv = *kv};
    const struct step_arrays s = cuda_group_arrays(c, a->group);
    int32_t n_decode = c->capturing ? c->padded : c->batch.n_decode,
            rest = c->batch.n_tokens - c->batch.n_decode;
    if (!usual) {
        attention_plain(c, &k, &s, n_decode, rest);
        return;
    }
    if (c->config.deterministic) {
        attention_invariant(c, &k, &s, n_decode, rest);
        return;
    }
    k.shared = k.shared && launch_attn_shared(&k, &s, &c->attn, c->stream);
    if (n_decode > 0 &&
        (window < 0 || !launch_attn_decode(&k, &s, &c->attn, n_decode, c->stream))) {
        launch_attn_plain(&k, &s, 0, n_decode, 0, n_decode, c->stream);
    }
    bool widened = rest > 0 && c->panel_step.n_blocks > 0 &&
                   launch_attn_widened(&k, &s, &c->panel, &c->panel_step, c->stream);
    if (rest > 0 && !widened &&
        !launch_attn_prefill_hopper(&k, &s, c->tile_device, c->n_tiles, c->stream) &&
        !launch_attn_prefill(&k, &s, c->tile_device, c->n_tiles, c->stream)) {
        launch_attn_plain(&k, &s, c->batch.n_decode, c->batch.n_seqs - c->batch.n_decode,
                          c->batch.n_decode, rest, c->stream);
    }
}

static void cuda_sample(struct backend *b, struct mat logits, int32_t first)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    if (!cuda_sample_reserve(c, logits)) {
        return;
    }
    struct sample_args a = c->sample;
    a.logits = logits.data;
    a.stride = logits.stride;
    a.vocab = logits.cols;
    a.first = first;
    a.rows = cuda_rows(c, logits);
    a.greedy = c->greedy;
    a.deterministic = c->config.deterministic;
    cuda_late_wait(c);
    if (c->ranks) {
        cuda_rank_sample(c, &a);
    } else {
        launch_sample(&a, &c->arrays, c->stream);
    }
    c->logits_first = -1;
}

/* ---- tests and profiling ---- */

/* Grows the buffer for float32 conversion to n floats. */
static int convert_reserve(struct cuda_backend *c, int64_t n, struct err *e)
{
    if (n * 4 > c->convert_bytes) {
        cudaFree(c->convert);
        c->convert = NULL;
        c->convert_bytes = 0;
        cudaError_t rc = cudaMalloc((void **)&c->convert, (size_t)n * 4);
        if (rc != cudaSuccess) {
            return cuda_error(e, rc, "a copy to the host");
        }
        c->convert_bytes = n * 4;
    }
    return 0;
}

static int cuda_download(struct backend *b, struct mat m, float *out, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    int64_t n = (int64_t)m.rows * m.cols;
    int rc = convert_reserve(c, n, e);

    if (rc < 0) {
        return rc;
    }
    cuda_fused_flush(c);
    launch_convert(c->convert, DTYPE_F32, m.cols, m.data, (int)m.dtype, m.stride, m.rows, m.cols,
                   false, c->stream);
    cudaError_t status =
        cudaMemcpyAsync(out, c->convert, (size_t)n * 4, cudaMemcpyDeviceToHost, c->stream);
    status = status == cudaSuccess ? cudaStreamSynchronize(c->stream) : status;
    return status == cudaSuccess ? 0 : cuda_error(e, status, "download");
}

static int cuda_upload(struct backend *b, struct mat m, const float *in, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    int64_t n = (int64_t)m.rows * m.cols;
    int rc = convert_reserve(c, n, e);

    if (rc < 0) {
        return rc;
    }
    cudaError_t status =
        cudaMemcpyAsync(c->convert, in, (size_t)n * 4, cudaMemcpyHostToDevice, c->stream);
    launch_convert(m.data, (int)m.dtype, m.stride, c->convert, DTYPE_F32, m.cols, m.rows, m.cols,
                   false, c->stream);
    status = status == cudaSuccess ? cudaStreamSynchronize(c->stream) : status;
    return status == cudaSuccess ? 0 : cuda_error(e, status, "upload");
}

/* ---- opening ---- */

static void cuda_free(struct backend *b)
{
    if (!b) {
        return;
    }
    struct cuda_backend *c = cuda_of(b);
    cuda_late_give_up(c);
    if (c->stream) {
        cuda_wait_stream(c);
    }
    if (!cuda_drain(c)) {
        return; /* the device still waits; the process is about to end */
    }
    cuda_kv_release(c);
    cuda_steps_release(c);
    cuda_linear_release(c);
    cuda_ranks_release(c);
    cuda_stages_release(c);
    cuda_upload_release(c);
    cuda_expert_load_release(c);
    for (int32_t i = 0; i < c->n_owned; i++) {
        cudaFree(c->owned[i]);
    }
    cudaFree(c->convert);
    if (c->stream) {
        cudaStreamDestroy(c->stream);
    }
    for (int32_t i = 0; i < c->n_quant; i++) {
        free(c->quant[i]);
    }
    free(c->quant);
    free(c->decoded);
    free(c->owned);
    free(c->weight);
    free(c->scratch);
    free(c);
}

static struct weight_support cuda_supports(const struct backend *b, const struct weight_format *f)
{
    const struct cuda_backend *c = (const struct cuda_backend *)b;

    if (weight_format_has_scales(f)) {
        bool fp8 = f->id == FORMAT_FP8, int4 = f->id == FORMAT_INT4;
        return (struct weight_support){.as_stored = true,
                                       .act = DTYPE_BF16,
                                       .kernel = cuda_quant_kernel(c, f),
                                       .experts = fp8 ? EXPERT_CODES_K : EXPERT_PANEL_K,
                                       .expert_group = fp8    ? EXPERT_CODES_K
                                                       : int4 ? 32
                                                              : 16,
                                       .experts_bf16 = true};
    }
    if (!weight_format_is_plain(f)) {
        return (struct weight_support){.as_stored = cuda_groups_run(c),
                                       .act = DTYPE_BF16,
                                       .kernel = "bf16 tensor cores up to 256 rows, widened above",
                                       .experts = EXPERT_PANEL_K,
                                       .experts_bf16 = true};
    }
    return (struct weight_support){.as_stored = true,
                                   .act = (enum dtype)f->id,
                                   .kernel = "tensor cores",
                                   .experts_floats = f->id == FORMAT_F32 ? 0 : EXPERT_MMA_K};
}

static const struct backend_ops ops = {
    .free = cuda_free,
    .memory = cuda_memory,
    .supports = cuda_supports,
    .weight = cuda_weight,
    .use = cuda_weight_use,
    .scratch = cuda_scratch,
    .kv_create = cuda_kv_create,
    .ready = cuda_ready,
    .step_begin = cuda_step_begin,
    .masks = cuda_masks,
    .replay = cuda_replay,
    .step_end = cuda_step_end,
    .launch_waits_us = cuda_launch_waits_us,
    .step_wait = cuda_step_wait,
    .embed = cuda_embed,
    .embed_position = cuda_embed_position,
    .norm = cuda_norm,
    .add_norm = cuda_add_norm,
    .linear = cuda_linear,
    .linear_gated = cuda_linear_gated,
    .experts = cuda_experts,
    .rope_kv = cuda_rope_kv,
    .attention = cuda_attention,
    .recurrence = cuda_recurrence,
    .gate_sigmoid = cuda_gate_sigmoid,
    .multiply = cuda_multiply,
    .latent_kv = cuda_latent_kv,
    .latent_attention = cuda_latent_attention,
    .add = cuda_add,
    .gather = cuda_gather,
    .soft_cap = cuda_soft_cap,
    .xielu = cuda_xielu,
    .scale_by_score = cuda_scale_by_score,
    .sample = cuda_sample,
    .all_reduce = cuda_all_reduce,
    .square_sums = cuda_square_sums,
    .norm_by_sums = cuda_norm_by_sums,
    .embed_shard = cuda_embed_part,
    .gather_logits = cuda_gather_logits,
    .stage_receive = cuda_stage_receive,
    .stage_send = cuda_stage_send,
    .hidden_store = cuda_hidden_store,
    .hidden_pool = cuda_hidden_pool,
    .hidden_load = cuda_hidden_load,
    .hidden_own = cuda_hidden_own,
    .hidden_masked = cuda_hidden_masked,
    .spread = cuda_spread,
    .download = cuda_download,
    .upload = cuda_upload,
};

/* Sets the error that tells why no GPU can be used. */
static int no_gpu(struct err *e, cudaError_t rc)
{
    int driver = 0;
    int runtime = 0;

    cudaGetLastError();
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        return err_set(e, ERR_UNSUPPORTED,
                       "no usable GPU: there is no NVIDIA driver (libcuda.so.1) here");
    }
    if (rc == cudaErrorInsufficientDriver && cudaRuntimeGetVersion(&runtime) == cudaSuccess) {
        return err_set(
            e, ERR_UNSUPPORTED,
            "no usable GPU: the NVIDIA driver is for CUDA %d.%d, this build needs %d.%d or newer",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    return err_set(e, ERR_UNSUPPORTED, "no usable GPU: %s",
                   rc != cudaSuccess ? cudaGetErrorString(rc) : "none found");
}

/* What kernels allow and the device has is asked once a process (cuda_shared_limit and
 * others), so all its backends must use one device. The first one chooses. */
static bool claim_device(int32_t device)
{
    static _Atomic int32_t claimed = -1;
    int32_t none = -1;

    return atomic_compare_exchange_strong(&claimed, &none, device) || none == device;
}

/* Opens the configured device and describes it. */
static int open_device(struct cuda_backend *c, struct err *e)
{
    int n = 0;
    cudaError_t rc = cudaGetDeviceCount(&n);

    if (rc != cudaSuccess || n == 0) {
        return no_gpu(e, rc);
    }
    if (c->config.local_world_size > n) {
        return err_set(e, ERR_UNSUPPORTED, "%d ranks on this machine need as many GPUs; it has %d",
                       c->config.local_world_size, n);
    }
    if (c->config.device < 0 || c->config.device >= n) {
        return err_set(e, ERR_INVALID, "GPU %d does not exist: there are %d", c->config.device, n);
    }
    struct cudaDeviceProp p;
    if (!claim_device(c->config.device)) {
        return err_set(e, ERR_UNSUPPORTED,
                       "GPU %d: this process uses another one already; a process has one GPU",
                       c->config.device);
    }
    rc = cudaSetDevice(c->config.device);
    rc = rc == cudaSuccess ? cudaGetDeviceProperties(&p, c->config.device) : rc;
    if (rc != cudaSuccess) {
        return cuda_error(e, rc, "opening the device");
    }
    if (p.major < 8) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s has compute capability %d.%d: 8.0 or newer is needed", p.name, p.major,
                       p.minor);
    }
    if (cuda_code_version() == 0) {
        return err_set(e, ERR_UNSUPPORTED,
                       "libquire_cuda.so has no code for %s, of compute capability %d.%d: "
                       "add it to CUDA_ARCHS, or an older one to CUDA_PTX",
                       p.name, p.major, p.minor);
    }
    c->n_sms = p.multiProcessorCount;
    c->capability = p.major * 10 + p.minor;
    snprintf(c->base.device, sizeof(c->base.device), "%.100s, %zu GiB", p.name,
             p.totalGlobalMem >> 30);
    rc = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "a stream");
}

static int check_config(const struct backend_config *k, struct err *e)
{
    if (k->max_tokens < 1 || k->max_seqs < 1 || k->max_samples < 0 || k->max_blocks_per_seq < 0 ||
        k->n_kv_groups < 0 || k->n_kv_groups > LIMIT_KV_GROUPS) {
        return err_set(e, ERR_INVALID,
                       "cuda: steps of %d tokens, %d sequences, %d samples are not possible",
                       k->max_tokens, k->max_seqs, k->max_samples);
    }
    return 0;
}

__attribute__((visibility("default"))) int
quire_backend_open(struct backend **ret, int abi, const struct backend_config *k, struct err *e);

int quire_backend_open(struct backend **ret, int abi, const struct backend_config *k, struct err *e)
{
    if (abi != BACKEND_ABI) {
        return err_set(
            e, ERR_UNSUPPORTED,
            "libquire_cuda.so is of interface %d, the program of %d: install both from one build",
            BACKEND_ABI, abi);
    }
    int rc = check_config(k, e);
    if (rc < 0) {
        return rc;
    }
    struct cuda_backend *c = calloc(1, sizeof(*c));
    if (!c) {
        return err_nomem(e, "the CUDA backend");
    }
    c->base = (struct backend){.ops = &ops,
                               .name = "cuda",
                               .async = true,
                               .expert_pairs = true,
                               .mixer_experts = true,
                               .convolutions = true,
                               .scans = true,
                               .late_head_norms = true,
                               .window_align = ATTN_WINDOW_ALIGN};
    c->config = *k;
    c->config.max_samples = MAX(k->max_samples, 1);
    c->config.max_blocks_per_seq = MAX(k->max_blocks_per_seq, 1);
    c->max_graph_rows =
        MIN(MIN(k->max_tokens, k->max_seqs), MIN(c->config.max_samples, GRAPH_MAX_ROWS));
    rc = open_device(c, e);
    rc = rc < 0 ? rc : cuda_steps_init(c, e);
    rc = rc < 0 ? rc : cuda_linear_init(c, e);
    rc = rc < 0 ? rc : cuda_speed_init(c, e);
    rc = rc < 0 ? rc : cuda_ranks_init(c, e);
    rc = rc < 0 ? rc : cuda_stages_init(c, e);
    rc = rc < 0 ? rc : cuda_fused_init(c, e);
    if (rc < 0) {
        cuda_free(&c->base);
        return rc;
    }
    *ret = &c->base;
    return 0;
}
