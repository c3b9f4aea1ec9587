/* Weights that are kept in the blocks they are stored in: read in their mapped file, or
 * copied where the file does not stay. */
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/weight_pieces.h"

enum { FINE_BITS = 8 };

/* The scale by which inputs of products with a piece are rounded; 0: by none of the
 * file's. */
static float act_scale_of(const struct weight_piece *p)
{
    bool fixed =
        p->format && weight_format_has_scales(p->format) && p->scales.act == ACT_SCALE_TENSOR;

    return fixed ? p->scales.act_scale : 0;
}

/* What the inputs of products with a piece become (ACT_PLANES_MAX). They keep their
 * precision where the file quantises weights alone, or has a scale for them, by which
 * they were rounded; of other formats where it is felt most; and in a head of FINE_BITS
 * a code: no layer follows whose own rounding hides what is lost there, and with fewer
 * bits the weights have lost more. */
static int32_t planes_of(const struct weight_desc *d, const struct weight_piece *p)
{
    if (!p->format) {
        return 1;
    }
    bool apart = weight_format_has_scales(p->format);
    bool weights_alone =
        apart && (p->scales.act == ACT_AS_THEY_ARE || p->scales.act == ACT_SCALE_TENSOR);
    bool fine_head = d->logits && p->format->bits >= FINE_BITS;

    return weights_alone || fine_head || d->fine_inputs ? ACT_PLANES_MAX : 1;
}

/* Whether panels of rows of both pieces, of one format, may be one. */
static bool panels_alike(const struct weight_piece *a, const struct weight_piece *b)
{
    return !a->format || !weight_format_has_scales(a->format) ||
           codes_panels_of(a->format->id, &a->scales) == codes_panels_of(b->format->id, &b->scales);
}

/* The pieces [from, *end) of d that make one run: neighbours of one format, whose
 * products take inputs alike. */
static int32_t run_end(const struct weight_desc *d, int32_t from)
{
    int32_t end = from + 1;

    while (end < d->n_pieces && d->piece[end].format == d->piece[from].format &&
           d->piece[end].stride == d->piece[from].stride &&
           planes_of(d, &d->piece[end]) == planes_of(d, &d->piece[from]) &&
           act_scale_of(&d->piece[end]) == act_scale_of(&d->piece[from]) &&
           panels_alike(&d->piece[from], &d->piece[end])) {
        end++;
    }
    return end;
}

/* Where the backend reads the rows of a piece. */
static const char *piece_data(struct cpu_backend *c, const struct weight_desc *d,
                              const struct weight_piece *p, struct err *e)
{
    /* of the last row only its own columns */
    int64_t n_bytes = weight_format_bytes(p->format, (p->rows - 1) * p->stride + p->cols);

    if (d->mapped) {
        return cpu_hugepages_add(c, p->data, n_bytes, e) < 0 ? NULL : p->data;
    }
    char *copy = cpu_alloc_weight(c, (size_t)n_bytes, d->name, e);
    return copy ? memcpy(copy, p->data, (size_t)n_bytes) : NULL;
}

/* The scales of a piece, copied where its memory does not stay. */
static int keep_scales(struct cpu_backend *c, const struct weight_desc *d,
                       const struct weight_piece *p, struct weight_scales *ret, struct err *e)
{
    const struct weight_scales *s = &p->scales;
    int64_t rows = s->group_rows > 0 ? div_ceil(p->rows, s->group_rows) : 1;
    int64_t cols = s->group_cols > 0 ? div_ceil(p->cols, s->group_cols) : 1;

    *ret = *s;
    if (d->mapped || !weight_format_has_scales(p->format)) {
        return 0;
    }
    size_t n_bytes = (size_t)((rows - 1) * s->stride + cols) * (size_t)scale_type_bytes(s->type);
    size_t n_zeros = s->zero ? (size_t)((rows - 1) * s->zero_stride + cols) : 0;
    char *copy = cpu_alloc(c, n_bytes + n_zeros);
    if (!copy) {
        return err_nomem(e, d->name);
    }
    ret->data = memcpy(copy, s->data, n_bytes);
    ret->zero = s->zero ? memcpy(copy + n_bytes, s->zero, n_zeros) : NULL;
    return 0;
}

static int make_parts(struct cpu_backend *c, const struct weight_desc *d, int32_t from, int32_t end,
                      struct cpu_weight *ret, struct err *e)
{
    int32_t n = end - from;

    ret->planes = planes_of(d, &d->piece[from]);
    ret->act_scale = act_scale_of(&d->piece[from]);
    ret->part = cpu_alloc(c, (size_t)n * sizeof(*ret->part));
    if (!ret->part) {
        return err_nomem(e, d->name);
    }
    ret->m = (struct mat){.stride = d->piece[from].stride,
                          .cols = d->cols,
                          .dtype = d->dtype,
                          .format = d->piece[from].format,
                          .priv = ret};
    for (int32_t i = 0; i < n; i++) {
        const struct weight_piece *p = &d->piece[from + i];
        const char *data = piece_data(c, d, p, e);
        if (!data) {
            return ERR_NOMEM;
        }
        ret->part[i] = (struct cpu_part){
            .data = data, .first = ret->m.rows, .rows = p->rows, .head_rows = p->head_rows};
        int rc = keep_scales(c, d, p, &ret->part[i].scales, e);
        if (rc < 0) {
            return rc;
        }
        ret->m.rows += p->rows;
    }
    ret->n_parts = n;
    cpu_block_ways(&c->ways, &c->k, ret->m.format->id);
    cpu_block_ways(&c->ways, &c->k, cpu_panels_as(ret));
    ret->m.data = (void *)(uintptr_t)ret->part[0].data; /* only read */
    return 0;
}

/* A run of plain pieces, as a weight of its own. */
static int make_plain(struct cpu_backend *c, const struct weight_desc *d, int32_t from, int32_t end,
                      struct cpu_weight *ret, struct err *e)
{
    struct weight_desc part = *d;

    part.piece = d->piece + from;
    part.n_pieces = end - from;
    part.rows = 0;
    for (int32_t i = from; i < end; i++) {
        part.rows += weight_piece_rows(&d->piece[i]);
    }
    return cpu_weight(&c->base, &part, &ret->m, e);
}

int cpu_weight_blocks(struct cpu_backend *c, const struct weight_desc *d, struct mat *ret,
                      struct err *e)
{
    struct cpu_weight *first = NULL, **link = &first;
    const struct weight_format *format = NULL;
    int rc = 0;

    for (int32_t from = 0; from < d->n_pieces && rc == 0;) {
        int32_t end = run_end(d, from);
        struct cpu_weight *run = cpu_alloc(c, sizeof(*run));
        if (!run) {
            return err_nomem(e, d->name);
        }
        if (d->piece[from].format) {
            rc = make_parts(c, d, from, end, run, e);
            format = format ? format : run->m.format;
        } else {
            rc = make_plain(c, d, from, end, run, e);
        }
        *link = run;
        link = &run->below;
        from = end;
    }
    if (rc == 0) {
        *ret = first->m;
        ret->rows = d->rows;
        ret->format = format;
        ret->priv = first;
    }
    return rc;
}

/* ---- rows of a weight ---- */

/* The overlap of a run with the view's rows [first, end), as run i of the view; `at` is
 * the run's first row in the weight. */
static void view_run(struct cpu_view *v, int32_t i, const struct cpu_weight *run, int32_t at,
                     int32_t first, int32_t end, int32_t *n_parts)
{
    struct cpu_weight *to = &v->run[i];
    int32_t from = MAX(first - at, 0), last = MIN(end - at, run->m.rows);

    *to = (struct cpu_weight){
        .m = run->m, .planes = run->planes, .act_scale = run->act_scale, .view = true};
    to->m.priv = to;
    to->m.rows = last - from;
    if (!run->m.format) {
        to->m.data = (char *)run->m.data + from * cpu_row_bytes(&run->m);
        return;
    }
    to->part = &v->part[*n_parts];
    for (int32_t k = 0; k < run->n_parts && run->part[k].first < last; k++) {
        const struct cpu_part *p = &run->part[k];
        int32_t begin = MAX(from, p->first), stop = MIN(last, p->first + p->rows);
        if (begin < stop) {
            struct cpu_part *part = &v->part[(*n_parts)++];
            *part = *p;
            part->first = begin - from;
            part->rows = stop - begin;
            part->data += (begin - p->first) * cpu_row_bytes(&run->m);
            if (p->scales.data) {
                part->scales = weight_scales_slice(&p->scales, begin - p->first, 0);
            }
            to->n_parts++;
        }
    }
    to->m.data = (void *)(uintptr_t)to->part[0].data; /* only read */
}

struct mat cpu_weight_rows(struct mat w, int32_t first, int32_t n, struct cpu_view *v)
{
    int32_t at = 0, n_runs = 0, n_parts = 0;

    if (!w.format) {
        w = mat_rows(w, first, n);
        w.priv = NULL; /* it is not the weight that its handle stands for */
        return w;
    }
    for (const struct cpu_weight *run = w.priv; run && at < first + n; run = run->below) {
        if (at + run->m.rows > first) {
            if (n_runs > 0) {
                v->run[n_runs - 1].below = &v->run[n_runs];
            }
            view_run(v, n_runs++, run, at, first, first + n, &n_parts);
        }
        at += run->m.rows;
    }
    struct mat m = v->run[0].m;
    m.rows = n;
    m.format = w.format;
    m.priv = &v->run[0];
    return m;
}

void cpu_decode_row(const struct mat *w, int32_t r, float *out)
{
    const struct cpu_weight *run = w->priv;

    while (r >= run->m.rows) {
        r -= run->m.rows;
        run = run->below;
    }
    if (run->m.format && weight_format_has_scales(run->m.format)) {
        struct row_scales s = cpu_row_scales(&run->m, r);
        weight_scales_decode(run->m.format, s.of, (const uint8_t *)cpu_row(&run->m, r), s.row,
                             w->cols, out);
        return;
    }
    if (run->m.format) {
        weight_format_decode(run->m.format, cpu_row(&run->m, r), w->cols, out);
        return;
    }
    for (int64_t i = 0; i < w->cols; i++) {
        out[i] = dtype_load(cpu_row(&run->m, r), run->m.dtype, i);
    }
}
