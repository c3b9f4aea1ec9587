/* Multi-head latent attention as kernel launches: the queries into the space of
 * latents, attention over the cache, and the values of the heads out of it. Sequences
 * with many new rows have their heads expanded instead (latent_expanded.c).
 *
 * Products by head have a kernel of their own for few rows; for many, cuBLASLt does all
 * heads at once. For `deterministic` a row's bits must not depend on which of the two
 * its step takes, so there it is always the kernel. */
#include "kernels/cuda/attention/latent.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/heuristics.h"

enum { HEAD_KERNEL_ROWS = 256, MAX_SPLITS = 32, TILE_HEADS = 64 };

/* ---- the cache ---- */

void cuda_latent_kv(struct backend *b, struct mat q, struct mat kv,
                    const struct latent_attention *a)
{
    struct cuda_backend *c = cuda_of(b);
    const struct latent_kv_args k = {.q = q.data,
                                     .kv = kv.data,
                                     .q_stride = q.stride,
                                     .kv_stride = kv.stride,
                                     .cos_sin = a->cos_sin.data,
                                     .cos_sin_stride = a->cos_sin.stride,
                                     .norm = cuda_norm_args(&a->norm),
                                     .n_heads = a->n_heads,
                                     .latent = a->latent,
                                     .rot_dim = a->rot_dim,
                                     .nope_dim = a->nope_dim,
                                     .interleaved = a->interleaved,
                                     .layer = a->layer,
                                     .view = c->kv_view};

    cuda_start(c);
    const struct step_arrays s = cuda_group_arrays(c, a->group);
    cuda_rows(c, kv);
    launch_latent_kv(&k, &s, cuda_rows(c, q), c->stream);
}

/* ---- products by head ---- */

/* Rows [first, first + n) of a stacked weight. It is not the weight that its handle
 * stands for. */
static struct mat part(struct mat w, int32_t first, int32_t n)
{
    struct mat m = mat_rows(w, first, n);

    m.priv = NULL;
    return m;
}

static void multiply_heads(struct cuda_backend *c, const struct head_products *p)
{
    int32_t n = p->w.rows / p->n_heads, rows = p->rows;
    const struct head_linear_args k = {.out = p->out.data,
                                       .x = p->x.data,
                                       .w = p->w.data,
                                       .out_stride = p->out.stride,
                                       .x_stride = p->x.stride,
                                       .w_stride = p->w.stride,
                                       .out_head = p->out_head,
                                       .x_head = p->x_head,
                                       .rows = rows,
                                       .n_heads = p->n_heads,
                                       .n = n,
                                       .k = p->w.cols};

    bool few = rows <= HEAD_KERNEL_ROWS || c->recording;

    if (few && !c->config.deterministic && launch_head_linear_few(&k, (int)p->x.dtype, c->stream)) {
        return;
    }
    if (few || c->config.deterministic) {
        launch_head_linear(&k, (int)p->x.dtype, c->stream);
        return;
    }
    if (cuda_linear_heads(c, p)) {
        return;
    }
    for (int32_t h = 0; h < p->n_heads; h++) {
        cuda_linear(&c->base, mat_cols(mat_rows(p->out, 0, rows), h * p->out_head, n),
                    mat_cols(mat_rows(p->x, 0, rows), h * p->x_head, p->w.cols),
                    part(p->w, h * n, n), NULL);
    }
}

/* ---- attention ---- */

/* Splits of the keys of `rows` decodes: as many as give each multiprocessor a block. */
static int32_t splits_of(const struct cuda_backend *c, const struct latent_attention *a,
                         int32_t rows)
{
    int32_t tiles = rows * (int32_t)div_ceil(a->n_heads, TILE_HEADS);

    return c->config.deterministic ? 1 : MAX(MIN(c->n_sms / MAX(tiles, 1), MAX_SPLITS), 1);
}

/* Makes the work space of splits; with n > 1 there are at most n_sms tiles of at most
 * TILE_HEADS heads. False: c->failed. */
static bool prepare(struct cuda_backend *c, const struct latent_attention *a)
{
    if (c->latent.o) {
        return true;
    }
    size_t rows = (size_t)c->n_sms * (size_t)MIN(a->n_heads, TILE_HEADS);
    c->latent.ml = cuda_alloc(c, rows * 2 * sizeof(float), "attention", &c->failed);
    c->latent.o = cuda_alloc(c, rows * (size_t)a->latent * sizeof(float), "attention", &c->failed);
    return cuda_usable(c);
}

/* Tokens [first, end) of the portion that `k` describes, of one kind. */
static void attend(struct cuda_backend *c, const struct latent_args *k, const struct step_arrays *s,
                   const struct latent_work *w, struct latent_splits splits)
{
    struct latent_args at = *k;
    int64_t skipped = w->first - k->first;

    if (w->first >= w->end || launch_latent_mma(k, s, &splits, w, c->stream)) {
        return;
    }
    at.first = w->first;
    at.q = (const char *)k->q + skipped * k->q_stride * dtype_bytes((enum dtype)k->kv.dtype);
    at.tail =
        (const char *)k->tail + skipped * k->tail_stride * dtype_bytes((enum dtype)k->kv.dtype);
    at.sum = (char *)k->sum + skipped * k->sum_stride * dtype_bytes((enum dtype)k->kv.dtype);
    launch_latent_plain(&at, s, w->first_seq, w->n_seqs, w->end - w->first, c->stream);
}

/* Rows [first, first + rows) of the step. */
static void attend_portion(struct cuda_backend *c, struct mat out, struct mat q,
                           const struct latent_attention *a, const struct latent_scratch *scratch,
                           int32_t first, int32_t rows)
{
    const struct step_arrays s = cuda_group_arrays(c, a->group);
    int32_t n_decode = c->capturing ? c->padded : c->batch.n_decode, end = first + rows;
    int32_t width = a->latent + a->rot_dim;
    struct mat over = scratch->q, sum = scratch->sum;
    const struct latent_args k = {
        .sum = sum.data,
        .q = over.data,
        .sum_stride = sum.stride,
        .q_stride = over.stride,
        .tail = mat_cols(mat_rows(q, first, rows), a->nope_dim, a->rot_dim).data,
        .tail_stride = q.stride,
        .tail_head = a->nope_dim + a->rot_dim,
        .first = first,
        .n_heads = a->n_heads,
        .latent = a->latent,
        .rot_dim = a->rot_dim,
        .layer = a->layer,
        .scale = a->scale,
        .kv = c->kv_view};
    const struct head_products in = {.out = over,
                                     .x = mat_rows(q, first, rows),
                                     .w = a->k_up,
                                     .out_head = width,
                                     .x_head = a->nope_dim + a->rot_dim,
                                     .n_heads = a->n_heads,
                                     .rows = rows};
    const struct head_products back = {.out = mat_rows(out, first, rows),
                                       .x = sum,
                                       .w = a->v_up,
                                       .out_head = a->v_dim,
                                       .x_head = a->latent,
                                       .n_heads = a->n_heads,
                                       .rows = rows};
    struct latent_splits splits = c->latent;

    multiply_heads(c, &in);
    splits.n = splits_of(c, a, MIN(end, n_decode) - first);
    attend(c, &k, &s,
           &(struct latent_work){.first = first,
                                 .end = MIN(end, n_decode),
                                 .n_seqs = n_decode,
                                 .decode = true,
                                 .invariant = c->config.deterministic},
           splits);
    splits.n = 1;
    attend(c, &k, &s,
           &(struct latent_work){.first = MAX(first, n_decode),
                                 .end = end,
                                 .first_seq = c->batch.n_decode,
                                 .n_seqs = c->batch.n_seqs - c->batch.n_decode},
           splits);
    multiply_heads(c, &back);
}

/* Rows [first, end) of the step in the space of latents. */
static void attend_rows(struct cuda_backend *c, struct mat out, struct mat q,
                        const struct latent_attention *a, const struct latent_scratch *s,
                        int32_t first, int32_t end)
{
    int32_t most = MIN(s->q.rows, s->sum.rows);

    for (; first < end; first += most) {
        attend_portion(c, out, q, a, s, first, MIN(most, end - first));
    }
}

/* The rows between those of sequences that were expanded. */
static void attend_others(struct cuda_backend *c, struct mat out, struct mat q,
                          const struct latent_attention *a, const struct latent_scratch *s)
{
    const char *base = (const char *)c->header;
    const int32_t *q_start = (const int32_t *)(base + c->header->off_q_start),
                  *kv_len = (const int32_t *)(base + c->header->off_kv_len);
    int32_t done = 0;

    for (int32_t i = c->batch.n_decode; i < c->batch.n_seqs; i++) {
        if (sequence_expands(q_start[i + 1] - q_start[i], kv_len[i], c->expanded.most_rows)) {
            attend_rows(c, out, q, a, s, done, q_start[i]);
            done = q_start[i + 1];
        }
    }
    attend_rows(c, out, q, a, s, done, c->batch.n_tokens);
}

void cuda_latent_attention(struct backend *b, struct mat out, struct mat q,
                           const struct latent_attention *a, const struct latent_scratch *s)
{
    struct cuda_backend *c = cuda_of(b);
    int32_t most = MIN(s->q.rows, s->sum.rows);

    cuda_start(c);
    /* a graph's rows must fit into the scratch */
    cuda_rows(c, mat_rows(s->q, 0, MIN(c->batch.n_tokens, most)));
    cuda_rows(c, mat_rows(s->sum, 0, MIN(c->batch.n_tokens, most)));
    cuda_rows(c, q);
    int32_t rows = cuda_rows(c, out);
    if (!prepare(c, a)) {
        return;
    }
    if (cuda_latent_expanded(c, out, q, a)) {
        attend_others(c, out, q, a, s);
    } else {
        attend_rows(c, out, q, a, s, 0, rows);
    }
}
