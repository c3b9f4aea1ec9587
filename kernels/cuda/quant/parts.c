/* Weights whose rows are stored in several ways, as q, k and v are of which one has
 * another format: each part is a weight of its own, and its product writes its columns
 * of the result. */
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/quant/groups.h"
#include "kernels/weight_pieces.h"

enum { QUANT_PARTS = QUANT_GROUPS + 1 }; /* of quant_weight.layout */

/* What mat.priv points to. */
struct parts {
    struct quant_weight base; /* layout, rows and cols alone */
    int32_t n;
    struct mat part[]; /* [n] */
};

static int32_t columns_of(const struct weight_piece *p)
{
    return p->scales.group_cols > 0 ? MIN(p->scales.group_cols, p->cols) : p->cols;
}

/* Whether two pieces can be in one weight. */
static bool join(const struct weight_piece *a, const struct weight_piece *b)
{
    return a->format == b->format &&
           (!a->format || !weight_format_has_scales(a->format) || columns_of(a) == columns_of(b));
}

/* Pieces from the i-th on that are one part. */
static int32_t part_pieces(const struct weight_desc *d, int32_t i)
{
    int32_t n = 1;

    while (i + n < d->n_pieces && join(&d->piece[i], &d->piece[i + n])) {
        n++;
    }
    return n;
}

bool cuda_weight_parted(const struct weight_desc *d)
{
    return d->kind == WEIGHT_LINEAR && !d->experts && d->n_pieces > 0 &&
           part_pieces(d, 0) < d->n_pieces;
}

int cuda_parts_weight(struct cuda_backend *c, const struct weight_desc *d, struct mat *ret,
                      struct err *e)
{
    struct parts *p = calloc(1, sizeof(*p) + (size_t)d->n_pieces * sizeof(p->part[0]));
    void **grown = realloc(c->quant, (size_t)(c->n_quant + 1) * sizeof(*grown));
    const struct weight_format *format = NULL;
    int rc = 0;

    if (!p || !grown) {
        free(p);
        c->quant = grown ? grown : c->quant;
        return err_nomem(e, d->name);
    }
    c->quant = grown;
    c->quant[c->n_quant++] = p;
    p->base = (struct quant_weight){.layout = QUANT_PARTS, .rows = d->rows, .cols = d->cols};
    for (int32_t i = 0, n; i < d->n_pieces && rc == 0; i += n) {
        struct weight_desc part = *d;
        n = part_pieces(d, i);
        part.piece = d->piece + i;
        part.n_pieces = n;
        part.rows = 0;
        for (int32_t j = 0; j < n; j++) {
            part.rows += weight_piece_rows(&part.piece[j]);
        }
        format = format ? format : part.piece->format;
        rc = cuda_weight(&c->base, &part, &p->part[p->n++], e);
    }
    p->base.format = format ? (int32_t)format->id : 0;
    *ret = (struct mat){.data = p->part[0].data,
                        .stride = d->cols,
                        .rows = d->rows,
                        .cols = d->cols,
                        .dtype = d->dtype,
                        .format = format,
                        .priv = p};
    return rc;
}

bool cuda_is_parted(struct mat w, int32_t row, struct mat *ret_part)
{
    const struct parts *p = w.format ? w.priv : NULL;

    if (!p || p->base.layout != QUANT_PARTS) {
        return false;
    }
    for (int32_t i = 0; ret_part && i < p->n; row -= p->part[i++].rows) {
        if (row < p->part[i].rows) {
            *ret_part = p->part[i];
            break;
        }
    }
    return true;
}

/* Has a norm stored that was to be read once. */
static void keep_norm(struct cuda_backend *c, struct mat x)
{
    struct fused_op *last = c->fused.n_ops > 0 ? &c->fused.op[c->fused.n_ops - 1] : NULL;

    if (last && last->n == 0 && last->h == x.data) {
        last->h_transient = 0;
    }
    if (c->pending.kind != PENDING_NONE) {
        cuda_start(c);
    }
}

void cuda_parts_linear(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep)
{
    const struct parts *p = w.priv;

    keep_norm(c, x);
    out.transient = false;
    for (int32_t i = 0, at = 0; i < p->n; at += p->part[i++].rows) {
        struct epilogue part = ep ? *ep : (struct epilogue){0};
        int32_t n = p->part[i].rows;
        part.bias = part.bias.data ? mat_cols(part.bias, at, n) : part.bias;
        part.residual = part.residual.data ? mat_cols(part.residual, at, n) : part.residual;
        struct mat rows = p->part[i];
        rows.alike = w.alike;
        cuda_linear(&c->base, mat_cols(out, at, n), x, rows, &part);
    }
}

void cuda_parts_gated(struct cuda_backend *c, struct mat out, struct mat both, struct mat x,
                      struct mat w, struct mat bias, enum activation act)
{
    cuda_parts_linear(c, both, x, w, &(struct epilogue){.bias = bias});
    cuda_start(c);
    launch_gated_act(out.data, out.stride, both.data, both.stride, cuda_rows(c, out), out.cols,
                     (int)act, (int)out.dtype, c->stream);
}
