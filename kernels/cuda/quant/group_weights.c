/* Weights in groups (groups.h) and blocks that no kernel multiplies: packed or decoded
 * by threads of the host, some rows at a time, and sent to the device. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/quant/groups.h"
#include "kernels/weight_pieces.h"

enum { MAX_THREADS = 16 };
static const int64_t SLICE_BYTES = (int64_t)32 << 20;

/* ---- threads ---- */

/* Units of work that threads take one after another. */
struct work {
    int (*run)(const struct work *w, int32_t unit);
    const struct weight_desc *d;
    const struct groups_layout *layout; /* of packing */
    int32_t all;                        /* rows */
    int32_t first;                      /* the slice's first row */
    int32_t rows;                       /* of the slice */
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

static int send_slice(struct cuda_backend *c, const struct work *w, int64_t row_bytes,
                      struct err *e)
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
        cudaMemcpyAsync(w->to + w->first * row_bytes, w->out, (size_t)(w->rows * row_bytes),
                        cudaMemcpyHostToDevice, c->stream);
    rc = rc == cudaSuccess ? cudaStreamSynchronize(c->stream) : rc;
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, w->d->name);
}

/* Runs slices of about SLICE_BYTES, whose rows, of row_bytes each, are a multiple of
 * `unit`, and sends each to its place. */
static int send_slices(struct cuda_backend *c, struct work *w, int64_t row_bytes, int32_t unit,
                       struct err *e)
{
    int32_t all = w->all,
            slice = (int32_t)MIN(MAX(SLICE_BYTES / (row_bytes * unit), 1) * unit, all);
    int rc = 0;

    w->out = malloc((size_t)(row_bytes * slice));
    if (!w->out) {
        return err_nomem(e, w->d->name);
    }
    for (w->first = 0; w->first < all && rc == 0; w->first += slice) {
        w->rows = MIN(slice, all - w->first);
        w->n = (int32_t)div_ceil(w->rows, unit);
        rc = work_all(w);
        rc = rc < 0 ? err_nomem(e, w->d->name) : send_slice(c, w, row_bytes, e);
    }
    free(w->out);
    return rc;
}

/* ---- groups ---- */

static int pack_tile(const struct work *w, int32_t unit)
{
    int32_t row = unit * QUANT_TILE_ROWS;

    return groups_pack_tile(w->d, w->layout, w->first + row,
                            (uint8_t *)w->out + unit * groups_tile_bytes(w->layout),
                            w->factor + w->first + row);
}

static int fill(struct cuda_backend *c, const struct weight_desc *d, const struct groups_layout *l,
                struct quant_weight *q, struct err *e)
{
    int32_t rows = (int32_t)div_ceil(d->rows, QUANT_TILE_ROWS) * QUANT_TILE_ROWS;
    size_t factor_bytes = (size_t)rows * sizeof(float);
    float *factor = malloc(factor_bytes);
    void *codes = cuda_alloc(c, (size_t)(q->row_bytes * rows), d->name, e);
    void *scale = codes ? cuda_alloc(c, factor_bytes, d->name, e) : NULL;
    struct work w = {
        .run = pack_tile, .d = d, .layout = l, .all = rows, .factor = factor, .to = codes};
    int rc = !factor ? err_nomem(e, d->name) : !scale ? ERR_NOMEM : 0;

    rc = rc < 0 ? rc : send_slices(c, &w, q->row_bytes, QUANT_TILE_ROWS, e);
    if (rc == 0) {
        cudaError_t status =
            cudaMemcpyAsync(scale, factor, factor_bytes, cudaMemcpyHostToDevice, c->stream);
        status = status == cudaSuccess ? cudaStreamSynchronize(c->stream) : status;
        rc = status == cudaSuccess ? 0 : cuda_error(e, status, d->name);
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
    *q = (struct quant_weight){.format = (int32_t)d->piece[0].format->id,
                               .layout = QUANT_GROUPS,
                               .kind = l->kind,
                               .embedded = d->kind == WEIGHT_EMBEDDING && !d->tied_head,
                               .logits = d->logits,
                               .rows = d->rows,
                               .cols = d->cols,
                               .row_bytes = (int64_t)l->segments * l->bytes,
                               .segment = l->bytes,
                               .group_cols = l->halves ? 16 : 32,
                               .n_groups = (int32_t)div_ceil(d->cols, l->halves ? 16 : 32)};
    int rc = fill(c, d, l, q, e);
    /* logits are never widened (linear_mixed.c) */
    return rc < 0 || q->embedded || q->logits || cuda_quant_reserve(c, q, d->dtype, e) ? rc
                                                                                       : ERR_NOMEM;
}

/* ---- blocks decoded ---- */

/* A row as floats, which the device converts. */
static int decode_row(const struct work *w, int32_t unit)
{
    int32_t row;
    const struct weight_piece *p = weight_piece_of(w->d, w->first + unit, &row);
    const char *blocks = (const char *)p->data + row * weight_format_bytes(p->format, p->stride);

    weight_format_decode(p->format, blocks, w->d->cols,
                         (float *)w->out + (int64_t)unit * w->d->cols);
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
    int64_t row_bytes = d->cols * (int64_t)sizeof(float);

    m.data =
        cuda_alloc(c, (size_t)((int64_t)d->rows * d->cols * dtype_bytes(d->dtype)), d->name, e);
    if (!m.data) {
        return ERR_NOMEM;
    }
    struct work w = {.run = decode_row, .d = d, .all = d->rows, .plain = &m};
    int rc = send_slices(c, &w, row_bytes, 1, e);
    rc = rc < 0 ? rc : note_decoded(c, m.data, why, e);
    *ret = m;
    return rc;
}
