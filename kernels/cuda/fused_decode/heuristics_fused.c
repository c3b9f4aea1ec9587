/* See heuristics_fused.h and fused_decode.h. */
#include "kernels/cuda/fused_decode/heuristics_fused.h"

#include "kernels/cuda/mixed/mixed.h"
#include "kernels/cuda/quant/groups.h"

enum { NORM_K = 64 }; /* a norm's columns are a multiple */

/* ---- what suits ---- */

static bool aligned(const void *p, int64_t stride)
{
    return (uintptr_t)p % 16 == 0 && stride % 8 == 0;
}

/* Whether `rows` rows of 2-byte elements at p do not overlap those at q. */
static bool apart(const void *p, int64_t p_stride, const void *q, int64_t q_stride, int32_t rows)
{
    uintptr_t a = (uintptr_t)p;
    uintptr_t b = (uintptr_t)q;

    return !p || !q || a + (uintptr_t)(rows * p_stride * 2) <= b ||
           b + (uintptr_t)(rows * q_stride * 2) <= a;
}

static bool vector_suits(struct mat v, enum dtype t)
{
    return !v.data || (v.dtype == t && aligned(v.data, 0));
}

static bool rows_suit(const struct fused_args *a, int32_t rows, enum dtype t)
{
    bool first = a->n_ops == 0;

    return rows >= 1 && rows <= MIXED_MOST_ROWS && (t == DTYPE_F16 || t == DTYPE_BF16) &&
           (first || a->rows == rows) && (first || a->type == (int32_t)t);
}

static struct fused_op *last_op(struct fused_args *a)
{
    return a->n_ops > 0 ? &a->op[a->n_ops - 1] : NULL;
}

/* ---- weights ---- */

int32_t fused_format_of(struct mat w, enum dtype act)
{
    const struct quant_weight *q = w.priv;
    int32_t format = FUSED_16;

    if (w.format) {
        bool rows = q->layout == QUANT_ROWS && (q->n_groups == 1 || q->group_cols == QUANT_GROUP);
        bool fp4 = q->format == FORMAT_FP4;
        format = q->layout == QUANT_GROUPS          ? (int32_t)FUSED_GROUPS_4 + q->kind - GROUPS_4
                 : q->layout == QUANT_SEGMENTS      ? !fp4                  ? FUSED_INT4
                                                      : q->group_cols == 16 ? FUSED_NVFP4
                                                                            : FUSED_MXFP4
                 : rows && q->format == FORMAT_FP8  ? FUSED_FP8
                 : rows && q->format == FORMAT_INT8 ? FUSED_INT8
                                                    : -1;
        format = act == DTYPE_BF16 ? format : -1;
    }
    bool fits = format >= 0 && (mixed_in_groups(format) || w.cols % fused_warp_k(format) == 0) &&
                (format != FUSED_INT4 || w.cols % FUSED_SEGMENT_K == 0);
    return fits ? format : -1;
}

/* Makes `format` that of the launch; false: its products have another one. */
static bool format_joins(struct fused_args *a, int32_t format)
{
    for (int32_t i = 0; i < a->n_ops; i++) {
        if (a->op[i].n > 0 && a->format != format) {
            return false;
        }
    }
    a->format = format;
    return true;
}

void fused_set_weight(struct fused_op *p, struct mat w)
{
    const struct quant_weight *q = w.format ? w.priv : NULL;

    p->w = w.data;
    p->w_stride = q ? q->row_bytes : w.stride;
    p->w_scale = q ? q->scale : NULL;
    p->w_zero = q ? q->zero : NULL;
    p->n_groups = q && q->layout == QUANT_ROWS ? q->n_groups : 1;
    p->e4m3 = q && q->quantises;
    p->act_scale = q ? q->act_scale : 0;
    p->f16_scales = q && q->f16_scales;
    p->halves = q && q->layout == QUANT_GROUPS && q->group_cols == 16;
    p->n = w.rows;
    p->k = w.cols;
}

/* ---- joining ---- */

static bool push(struct fused_args *a, int32_t rows, enum dtype t, const struct fused_op *p)
{
    if (a->n_ops == FUSED_OPS) {
        return false;
    }
    a->rows = rows;
    a->type = (int32_t)t;
    a->op[a->n_ops++] = *p;
    return true;
}

static bool linear_suits(int32_t rows, struct mat out, struct mat x, struct mat w,
                         const struct epilogue *ep)
{
    bool ok = out.dtype == x.dtype && w.dtype == x.dtype && w.cols == x.cols &&
              w.rows == out.cols && w.rows % FUSED_TILE == 0 && aligned(w.data, w.stride) &&
              aligned(x.data, x.stride) && apart(x.data, x.stride, out.data, out.stride, rows);

    if (!ep || !ok) {
        return ok;
    }
    const struct mat *r = &ep->residual;
    bool same = r->data == out.data && r->stride == out.stride;
    return vector_suits(ep->bias, x.dtype) &&
           (!r->data || (r->dtype == out.dtype &&
                         (same || apart(r->data, r->stride, out.data, out.stride, rows))));
}

bool fused_push_linear(struct fused_args *a, int32_t rows, struct mat out, struct mat x,
                       struct mat w, const struct epilogue *ep)
{
    int32_t format = fused_format_of(w, x.dtype);

    if (format < 0 || !rows_suit(a, rows, x.dtype) || !linear_suits(rows, out, x, w, ep) ||
        !format_joins(a, format)) {
        return false;
    }
    struct fused_op p = {.x = x.data, .x_stride = x.stride};
    struct fused_op *last = last_op(a);
    bool after_norm = last && last->n == 0 && last->h == x.data && last->h_stride == x.stride &&
                      last->k == x.cols &&
                      apart(last->x, last->x_stride, out.data, out.stride, rows);
    if (after_norm) {
        p = *last;
    }
    fused_set_weight(&p, w);
    p.out = out.data;
    p.out_stride = out.stride;
    p.out_transient = out.transient;
    p.pair = FUSED_TILE;
    if (ep) {
        p.bias = ep->bias.data;
        p.act = (int32_t)ep->act;
        p.residual = ep->residual.data;
        p.residual_stride = ep->residual.stride;
    }
    if (after_norm) {
        *last = p;
        return true;
    }
    return push(a, rows, x.dtype, &p);
}

bool fused_push_norm(struct fused_args *a, int32_t rows, struct mat out, struct mat x,
                     const struct norm *n)
{
    if (!rows_suit(a, rows, x.dtype) || out.dtype != x.dtype || !n->weight.data ||
        x.cols % NORM_K != 0 || x.cols > FUSED_MAX_NORM || !vector_suits(n->weight, x.dtype) ||
        !vector_suits(n->bias, x.dtype) || !aligned(x.data, x.stride) ||
        !aligned(out.data, out.stride) || !apart(x.data, x.stride, out.data, out.stride, rows)) {
        return false;
    }
    struct fused_op p = {.x = x.data,
                         .x_stride = x.stride,
                         .h = out.data,
                         .h_stride = out.stride,
                         .h_transient = out.transient,
                         .k = x.cols,
                         .norm = {.weight = n->weight.data,
                                  .bias = n->bias.data,
                                  .weight_type = (int32_t)n->weight.dtype,
                                  .layer_norm = n->kind == NORM_LAYER,
                                  .eps = n->eps,
                                  .weight_offset = n->weight_offset}};
    return push(a, rows, x.dtype, &p);
}

bool fused_push_add_norm(struct fused_args *a, int32_t rows, struct mat out, struct mat x,
                         struct mat y, const struct norm *n, bool partial)
{
    struct fused_op *last = last_op(a);
    bool ends_in_y = last && last->n == x.cols && last->out == y.data &&
                     last->out_stride == y.stride && y.cols == x.cols && !last->sum && !last->gated;
    bool fits = !partial || x.cols / FUSED_TILE * FUSED_RESULT_BYTES <= P2P_FUSED_BYTES;

    if (!ends_in_y || !fits || !apart(x.data, x.stride, last->x, last->x_stride, rows) ||
        !apart(x.data, x.stride, last->h, last->h_stride, rows) ||
        !apart(x.data, x.stride, y.data, y.stride, rows) || !fused_push_norm(a, rows, out, x, n)) {
        return false;
    }
    last->sum = x.data;
    last->sum_stride = x.stride;
    last->partial = partial;
    return true;
}

bool fused_push_linear_gated(struct fused_args *a, int32_t rows, struct mat out, struct mat x,
                             struct mat w, struct mat bias, enum activation act)
{
    struct mat both = out; /* both halves of the product, which are not stored */

    both.cols = w.rows;
    if (w.rows != 2 * out.cols ||
        !fused_push_linear(a, rows, both, x, w, &(struct epilogue){.bias = bias})) {
        return false;
    }
    struct fused_op *last = last_op(a);
    last->gated = out.data;
    last->gated_stride = out.stride;
    last->gate_act = (int32_t)act;
    last->out = NULL;
    last->pair = w.rows;
    return true;
}

bool fused_push_rope_kv(struct fused_args *a, int32_t rows, struct mat qkv, const struct rope *r,
                        const struct attention *attention, const struct fused_rope *at)
{
    struct fused_op *last = last_op(a);
    int32_t dim = attention->head_dim;
    bool rotates = r->cos_sin.data != NULL;

    if (!rows_suit(a, rows, qkv.dtype) || !last || last->n == 0 || last->out != qkv.data ||
        last->out_stride != qkv.stride ||
        last->n != (attention->n_heads + 2 * attention->n_kv_heads) * dim || last->sum ||
        last->gated || last->residual || a->rope.kv.base || dim % FUSED_TILE != 0 ||
        r->q_norm.weight.data || r->k_norm.weight.data ||
        (rotates && (r->rot_dim != dim || r->interleaved)) ||
        (at->kv.dtype != (int32_t)qkv.dtype && at->kv.dtype != DTYPE_F8)) {
        return false;
    }
    a->rope = *at;
    a->rope.cos_sin = r->cos_sin.data;
    a->rope.cos_sin_stride = r->cos_sin.stride;
    a->rope.query_factors = rotates && r->query_factors;
    a->rope.n_heads = attention->n_heads;
    a->rope.k_over = 1 / attention_k_scale(attention);
    a->rope.v_over = 1 / attention_v_scale(attention);
    a->rope.layer = attention->layer;
    last->roped = 1;
    last->pair = dim;
    return true;
}

/* ---- the tile schedule ---- */

/* Cuts the depth into split-K slices of whole stages, as even as possible. */
static void plan_slices(struct fused_op *p)
{
    p->slices = (p->k + FUSED_SLICE_K - 1) / FUSED_SLICE_K;
    int32_t slice_k = (p->k + p->slices - 1) / p->slices;
    p->slice_k = (slice_k + FUSED_STAGE_K - 1) / FUSED_STAGE_K * FUSED_STAGE_K;
    p->slices = (p->k + p->slice_k - 1) / p->slice_k;
}

bool fused_plan(struct fused_args *a, int32_t n_blocks, int32_t max_shared_bytes)
{
    int32_t first = 0;
    bool fits = true;

    a->norm_bytes = 0;
    for (int32_t i = 0; i < a->n_ops; i++) {
        struct fused_op *p = &a->op[i];
        plan_slices(p);
        bool mixed_alone = a->format >= FUSED_INT8 || p->n_groups > 1;
        if (p->slices > n_blocks || p->k % fused_warp_k(a->format) != 0 || mixed_alone) {
            return false;
        }
        p->first = first;
        int32_t n_tiles = p->n / FUSED_TILE;
        first = (first + n_tiles % (n_blocks / p->slices)) % n_blocks;
        fits = fits && (p->slices == 1 || n_tiles * p->slices <= FUSED_MAX_PARTIALS);
        a->norm_bytes = MAX(a->norm_bytes, p->h != NULL ? p->k * 2 : 0);
    }
    int32_t rest = a->norm_bytes + FUSED_FIXED_BYTES;
    int32_t stage = fused_stage_bytes(a->format);
    a->n_stages = MIN(FUSED_MAX_STAGES, (max_shared_bytes - rest) / stage);
    a->in_flight = MIN(FUSED_MAX_IN_FLIGHT, a->n_stages);
    a->shared_bytes = a->n_stages * stage + rest;
    return fits && a->n_stages >= FUSED_MIN_STAGES;
}
