/* Weights: copied to the device straight into their fused place (upload.c), or dummy
 * values made there. */
#include "kernels/cuda/cuda.h"

static int32_t piece_rows(const struct weight_piece *p)
{
    return p->transposed ? p->cols : p->rows;
}
static int32_t piece_cols(const struct weight_piece *p)
{
    return p->transposed ? p->rows : p->cols;
}

static int check_pieces(const struct weight_desc *d, struct err *e)
{
    if (d->rows < 1 || d->cols < 1 || d->dtype == DTYPE_I32) {
        return err_set(e, ERR_INVALID, "weight %s: [%d, %d] of %s is not possible", d->name,
                       d->rows, d->cols, dtype_name(d->dtype));
    }
    int64_t rows = 0;
    int64_t n = 0;
    bool fits = true;
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        rows += piece_rows(p);
        n += (int64_t)p->rows * p->cols;
        fits = fits && p->dtype != DTYPE_I32 &&
               (d->kind == WEIGHT_VECTOR || piece_cols(p) == d->cols) &&
               p->cols * dtype_bytes(p->dtype) <= UPLOAD_SLICE_BYTES;
    }
    fits = fits && (d->kind == WEIGHT_VECTOR ? d->rows == 1 && n == d->cols : rows == d->rows);
    if (d->n_pieces > 0 && !fits) {
        return err_set(e, ERR_INVALID, "weight %s: its pieces do not make [%d, %d]", d->name,
                       d->rows, d->cols);
    }
    return 0;
}

int cuda_weight(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    int rc = check_pieces(d, e);

    if (rc < 0) {
        return rc;
    }
    struct mat m = {.stride = d->cols, .rows = d->rows, .cols = d->cols, .dtype = d->dtype};
    int64_t n = (int64_t)d->rows * d->cols;
    m.data = cuda_alloc(c, (size_t)(n * dtype_bytes(d->dtype)), d->name, e);
    if (!m.data) {
        return ERR_NOMEM;
    }
    if (d->n_pieces == 0) {
        launch_dummy(m.data, (int)d->dtype, n, ++c->n_dummies, c->stream);
    }
    int64_t at = 0;
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        struct weight_piece flat = *p;
        /* a vector's pieces are joined along the columns */
        if (d->kind == WEIGHT_VECTOR && p->stride == p->cols) {
            flat = (struct weight_piece){.data = p->data,
                                         .dtype = p->dtype,
                                         .rows = 1,
                                         .cols = p->rows * p->cols,
                                         .stride = (int64_t)p->rows * p->cols};
        }
        rc = upload_send(c, &flat, m, at, d->mapped, e);
        if (rc < 0) {
            return rc;
        }
        at += d->kind == WEIGHT_VECTOR ? (int64_t)p->rows * p->cols : piece_rows(p) * m.stride;
    }
    cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        return cuda_error(e, status, "loading weights");
    }
    *ret = m;
    return 0;
}

int cuda_ready(struct backend *b, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    int rc = cuda_upload_finish(c, e);

    rc = rc < 0 ? rc : cuda_ranks_ready(c, e);
    return rc < 0 ? rc : cuda_stages_ready(c, e);
}
