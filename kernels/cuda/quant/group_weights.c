/* Weights in groups (groups.h) and blocks that no kernel multiplies: packed or decoded
 * by threads of the host, some rows at a time, and sent to the device. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/quant/groups.h"
#include "kernels/cuda/quant/panels.h"
#include "kernels/weight_pieces.h"

enum { MAX_THREADS = 16 };
static const int64_t SLICE_BYTES = (int64_t)32 << 20;

/* ---- threads ---- */

/* Units of work that threads take one after another. */
struct work {
    int (*run)(const struct work *w, int32_t unit);
    const struct weight_desc *d;
    const struct groups_layout *layout; /* of packing tiles */
    const struct panels_layout *panels; /* of packing panels */
    int32_t unit;                       /* rows that go together */
    int32_t all;                        /* rows */
    int32_t first;                      /* the slice's first row */
    int32_t rows;                       /* of the slice */
    int64_t row_bytes;                  /* in `out` */
    char *out;                          /* of the slice, in host memory */
    float *factor;                      /* [rows], of packing */
    char *to;                           /* on the device, of packing */
    const struct mat *plain;            /* of decoding: the weight; else NULL */
    int32_t n;                          /* units */
    _Atomic int32_t next;
    _Atomic int32_t failed; /* a negative ERR_ of a unit; 0 */
};

static void *work_run(void *arg)
{
    struct work *w = arg;

    for (int32_t i = w->next++; i < w->n && w->failed == 0; i = w->next++) {
        int rc = w->run(w, i);
        if (rc < 0) {
            w->failed = rc;
        }
    }
    return NULL;
}

/* Runs all units; threads that do not start are missed by nobody. */
static int work_all(struct work *w)
{
    pthread_t thread[MAX_THREADS];
    int32_t n = (int32_t)MIN(sysconf(_SC_NPROCESSORS_ONLN), MAX_THREADS), started = 0;

    w->next = 0;
    w->failed = 0;
    while (started + 1 < MIN(n, w->n) && pthread_create(&thread[started], NULL, work_run, w) == 0) {
        started++;
    }
    work_run(w);
    for (int32_t i = 0; i < started; i++) {
        pthread_join(thread[i], NULL);
    }
    return w->failed;
}

static int send_slice(struct cuda_backend *c, const struct work *w, struct err *e)
{
    if (w->plain) {
        struct weight_piece floats = {.data = w->out,
                                      .dtype = DTYPE_F32,
                                      .rows = w->rows,
                                      .cols = w->d->cols,
                                      .stride = w->d->cols};
        return upload_send(c, &floats, *w->plain, w->first * w->plain->stride, false, e);
    }
    cudaError_t rc =
        cudaMemcpyAsync(w->to + w->first * w->row_bytes, w->out, (size_t)(w->rows * w->row_bytes),
                        cudaMemcpyHostToDevice, c->stream);
    rc = rc == cudaSuccess ? cudaStreamSynchronize(c->stream) : rc;
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, w->d->name);
}

/* Runs slices of about SLICE_BYTES, whose rows are a multiple of a unit's, and sends
 * each to its place. */
static int send_slices(struct cuda_backend *c, struct work *w, struct err *e)
{
    int32_t all = w->all,
            slice = (int32_t)MIN(MAX(SLICE_BYTES / (w->row_bytes * w->unit), 1) * w->unit, all);
    int rc = 0;

    w->out = malloc((size_t)(w->row_bytes * slice));
    if (!w->out) {
        return err_nomem(e, w->d->name);
    }
    for (w->first = 0; w->first < all && rc == 0; w->first += slice) {
        w->rows = MIN(slice, all - w->first);
        w->n = (int32_t)div_ceil(w->rows, w->unit);
        rc = work_all(w);
        rc = rc < 0 ? err_nomem(e, w->d->name) : send_slice(c, w, e);
    }
    free(w->out);
    return rc;
}

/* ---- groups ---- */

static int pack_tile(const struct work *w, int32_t unit)
{
    int32_t row = unit * QUANT_TILE_ROWS;

    return groups_pack_tile(w->d, w->layout, w->first + row, (uint8_t *)w->out + row * w->row_bytes,
                            w->factor + w->first + row);
}

static int pack_panel(const struct work *w, int32_t unit)
{
    int32_t row = unit * PANEL_ROWS;

    return panels_pack(w->d, w->panels, w->first + row, (uint8_t *)w->out + row * w->row_bytes,
                       w->factor + w->first + row);
}

/* Codes and factors of the weight as `w` packs them. */
static int fill(struct cuda_backend *c, struct work *w, struct quant_weight *q, struct err *e)
{
    const char *name = w->d->name;
    size_t factor_bytes = (size_t)w->all * sizeof(float);
    float *factor = malloc(factor_bytes);
    void *codes = cuda_alloc(c, (size_t)(w->row_bytes * w->all), name, e);
    void *scale = codes ? cuda_alloc(c, factor_bytes, name, e) : NULL;
    int rc = !factor ? err_nomem(e, name) : !scale ? ERR_NOMEM : 0;

    w->factor = factor;
    w->to = codes;
    rc = rc < 0 ? rc : send_slices(c, w, e);
    if (rc == 0) {
        cudaError_t status =
            cudaMemcpyAsync(scale, factor, factor_bytes, cudaMemcpyHostToDevice, c->stream);
        status = status == cudaSuccess ? cudaStreamSynchronize(c->stream) : status;
        rc = status == cudaSuccess ? 0 : cuda_error(e, status, name);
    }
    free(factor);
    q->codes = codes;
    q->scale = scale;
    return rc;
}

bool cuda_groups_run(const struct cuda_backend *c)
{
    return c->small_squares.sum[0] && !c->config.deterministic;
}

bool cuda_group_fits(const struct cuda_backend *c, const struct weight_desc *d,
                     struct groups_layout *ret, const char **ret_why)
{
    if (!cuda_groups_run(c)) {
        *ret_why = c->config.deterministic ? "`deterministic`" : "no kernel for this device";
        return false;
    }
    return groups_layout_of(d, ret, ret_why);
}

int cuda_group_weight(struct cuda_backend *c, const struct weight_desc *d,
                      const struct groups_layout *l, struct quant_weight *q, struct err *e)
{
    int32_t cols = l->form.halves ? 16 : 32;

    *q = (struct quant_weight){.format = (int32_t)d->piece[0].format->id,
                               .layout = QUANT_GROUPS,
                               .kind = l->form.kind,
                               .embedded = d->kind == WEIGHT_EMBEDDING && !d->tied_head,
                               .logits = d->logits,
                               .rows = d->rows,
                               .cols = d->cols,
                               .row_bytes = (int64_t)l->segments * l->bytes,
                               .segment = l->bytes,
                               .group_cols = cols,
                               .n_groups = (int32_t)div_ceil(d->cols, cols)};
    struct work w = {.run = pack_tile,
                     .d = d,
                     .layout = l,
                     .unit = QUANT_TILE_ROWS,
                     .all = (int32_t)div_ceil(d->rows, QUANT_TILE_ROWS) * QUANT_TILE_ROWS,
                     .row_bytes = q->row_bytes};
    int rc = fill(c, &w, q, e);
    /* logits are never widened (linear_mixed.c) */
    return rc < 0 || q->embedded || q->logits || cuda_quant_reserve(c, q, d->dtype, e) ? rc
                                                                                       : ERR_NOMEM;
}

int cuda_panel_weight(struct cuda_backend *c, const struct weight_desc *d,
                      const struct panels_layout *l, struct quant_weight *q, struct err *e)
{
    int32_t cols = l->kind != PANELS_FP4 && l->form.halves ? 16 : 32;

    *q = (struct quant_weight){.format = (int32_t)d->piece[0].format->id,
                               .layout = QUANT_PANELS,
                               .kind = l->kind,
                               .rows = d->rows,
                               .cols = d->cols,
                               .row_bytes = panel_bytes(d->cols, l->kind) / PANEL_ROWS,
                               .group_cols = cols,
                               .n_groups = d->cols / cols};
    struct work w = {.run = pack_panel,
                     .d = d,
                     .panels = l,
                     .unit = PANEL_ROWS,
                     .all = d->rows,
                     .row_bytes = q->row_bytes};
    int rc = fill(c, &w, q, e);
    return rc < 0 || cuda_quant_reserve(c, q, d->dtype, e) ? rc : ERR_NOMEM;
}

/* ---- blocks decoded ---- */

/* A row of floats of 16 or 32 bits, as floats. */
static void convert_row(const struct weight_piece *p, int32_t row, float *out)
{
    struct weight_scales s = {.data = p->data,
                              .type = p->dtype == DTYPE_F32   ? SCALE_F32
                                      : p->dtype == DTYPE_F16 ? SCALE_F16
                                                              : SCALE_BF16};

    for (int32_t i = 0; i < p->cols; i++) {
        out[i] = weight_scale_load(&s, row * p->stride + i);
    }
}

/* A row as floats, which the device converts. */
static int decode_row(const struct work *w, int32_t unit)
{
    int32_t row, cols = w->d->cols;
    const struct weight_piece *p = weight_piece_of(w->d, w->first + unit, &row);
    float *out = (float *)w->out + (int64_t)unit * cols;

    if (!p->format) {
        convert_row(p, row, out);
        return 0;
    }
    const char *blocks = (const char *)p->data + row * weight_format_bytes(p->format, p->stride);
    weight_format_decode(p->format, blocks, cols, out);
    return 0;
}

static int note_decoded(struct cuda_backend *c, const void *data, const char *why, struct err *e)
{
    struct cuda_decoded *grown =
        realloc(c->decoded, (size_t)(c->n_decoded + 1) * sizeof(*c->decoded));

    if (!grown) {
        return err_nomem(e, "weights");
    }
    c->decoded = grown;
    c->decoded[c->n_decoded++] = (struct cuda_decoded){.data = data, .why = why};
    return 0;
}

int cuda_decoded_weight(struct cuda_backend *c, const struct weight_desc *d, const char *why,
                        struct mat *ret, struct err *e)
{
    struct mat m = {.stride = d->cols, .rows = d->rows, .cols = d->cols, .dtype = d->dtype};
    m.data =
        cuda_alloc(c, (size_t)((int64_t)d->rows * d->cols * dtype_bytes(d->dtype)), d->name, e);
    if (!m.data) {
        return ERR_NOMEM;
    }
    struct work w = {.run = decode_row,
                     .d = d,
                     .unit = 1,
                     .all = d->rows,
                     .row_bytes = d->cols * (int64_t)sizeof(float),
                     .plain = &m};
    int rc = send_slices(c, &w, e);
    rc = rc < 0 ? rc : note_decoded(c, m.data, why, e);
    *ret = m;
    return rc;
}
