/* Weights: copied to the device straight into their fused place (upload.c), or dummy
 * values made there. */
#include "kernels/cuda/cuda.h"

#include <stdlib.h>

#include "kernels/weight_pieces.h"

/* Notes a matrix, so that its product can be timed beside others of its shape. */
static int note_weight(struct cuda_backend *c, struct mat m, struct err *e)
{
    if (c->n_weights == c->weight_cap) {
        int32_t cap = c->weight_cap * 2 + 64;
        struct mat *grown = realloc(c->weight, (size_t)cap * sizeof(*grown));
        if (!grown) {
            return err_nomem(e, "weights");
        }
        c->weight = grown;
        c->weight_cap = cap;
    }
    c->weight[c->n_weights++] = m;
    return 0;
}

int cuda_weight(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    int rc = weight_pieces_check(d, UPLOAD_SLICE_BYTES, e);

    if (rc < 0) {
        return rc;
    }
    bool stored = weight_has_blocks(d);
    if (stored && cuda_weight_parted(d)) {
        return cuda_parts_weight(c, d, ret, e);
    }
    if (stored || (d->n_pieces == 0 && d->dummy_format)) {
        rc = cuda_quant_weight(c, d, ret, e);
        return rc == 0 && d->kind == WEIGHT_LINEAR && !ret->format ? note_weight(c, *ret, e) : rc;
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
        at +=
            d->kind == WEIGHT_VECTOR ? (int64_t)p->rows * p->cols : weight_piece_rows(p) * m.stride;
    }
    cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        return cuda_error(e, status, "loading weights");
    }
    *ret = m;
    return d->kind == WEIGHT_LINEAR ? note_weight(c, m, e) : 0;
}

int cuda_ready(struct backend *b, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    int rc = cuda_upload_finish(c, e);

    rc = rc < 0 ? rc : cuda_ranks_ready(c, e);
    return rc < 0 ? rc : cuda_stages_ready(c, e);
}
