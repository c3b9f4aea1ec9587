/* Weights onto the device: through two pinned buffers, straight into their fused place, converted there where the
 * stored type or order differs. The second buffer fills while the first is on its way.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"

#define UPLOAD_BYTES ((int64_t)32 << 20)

static int upload_init(struct cuda_backend *c, struct err *e)
{
    if (c->upload_device != NULL) {
        return 0;
    }
    cudaError_t rc = cudaSuccess;
    for (int i = 0; i < 2 && rc == cudaSuccess; i++) {
        rc = cudaHostAlloc((void **)&c->upload_pinned[i], (size_t)UPLOAD_BYTES, cudaHostAllocDefault);
        rc = rc == cudaSuccess ? cudaEventCreateWithFlags(&c->upload_free[i], cudaEventDisableTiming) : rc;
    }
    rc = rc == cudaSuccess ? cudaMalloc((void **)&c->upload_device, (size_t)UPLOAD_BYTES * 2) : rc;
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "buffers for loading weights");
}

void cuda_upload_release(struct cuda_backend *c)
{
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(c->upload_pinned[i]);
        if (c->upload_free[i] != NULL) {
            cudaEventDestroy(c->upload_free[i]);
        }
        c->upload_pinned[i] = NULL;
        c->upload_free[i] = NULL;
    }
    cudaFree(c->upload_device);
    c->upload_device = NULL;
}

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
        return err_set(e, ERR_INVALID, "weight %s: [%d, %d] of %s is not possible", d->name, d->rows, d->cols,
                       dtype_name(d->dtype));
    }
    int64_t rows = 0;
    int64_t n = 0;
    bool fits = true;
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        rows += piece_rows(p);
        n += (int64_t)p->rows * p->cols;
        fits = fits && p->dtype != DTYPE_I32 && (d->kind == WEIGHT_VECTOR || piece_cols(p) == d->cols) &&
               p->cols * dtype_bytes(p->dtype) <= UPLOAD_BYTES;
    }
    fits = fits && (d->kind == WEIGHT_VECTOR ? d->rows == 1 && n == d->cols : rows == d->rows);
    if (d->n_pieces > 0 && !fits) {
        return err_set(e, ERR_INVALID, "weight %s: its pieces do not make [%d, %d]", d->name, d->rows, d->cols);
    }
    return 0;
}

/* Stored rows [first, first + n) of a piece, packed into a pinned buffer and on their way to the device. `at`: element of
 * the weight where stored row 0 goes (or column, when transposed). */
static int send_rows(struct cuda_backend *c, const struct weight_piece *p, int32_t first, int32_t n, struct mat m,
                     int64_t at, struct err *e)
{
    int turn = c->upload_turn ^= 1;
    char *pinned = c->upload_pinned[turn];
    char *device = c->upload_device + turn * UPLOAD_BYTES;
    cudaError_t rc = cudaEventSynchronize(c->upload_free[turn]);
    int64_t size = dtype_bytes(p->dtype);
    size_t row_bytes = (size_t)(p->cols * size);
    const char *from = (const char *)p->data + first * p->stride * size;
    if (p->stride == p->cols) {
        memcpy(pinned, from, row_bytes * (size_t)n);
    } else {
        for (int32_t r = 0; r < n; r++) {
            memcpy(pinned + (size_t)r * row_bytes, from + r * p->stride * size, row_bytes);
        }
    }
    bool direct = !p->transposed && p->dtype == m.dtype;
    char *to = (char *)m.data + (at + (p->transposed ? first : first * m.stride)) * dtype_bytes(m.dtype);
    rc = rc == cudaSuccess
             ? cudaMemcpyAsync(direct ? to : device, pinned, row_bytes * (size_t)n, cudaMemcpyHostToDevice, c->stream)
             : rc;
    if (rc == cudaSuccess && !direct) {
        if (p->transposed) {
            launch_convert(to, (int)m.dtype, m.stride, device, (int)p->dtype, p->cols, p->cols, n, true, c->stream);
        } else {
            launch_convert(to, (int)m.dtype, m.stride, device, (int)p->dtype, p->cols, n, p->cols, false, c->stream);
        }
        rc = cudaGetLastError();
    }
    rc = rc == cudaSuccess ? cudaEventRecord(c->upload_free[turn], c->stream) : rc;
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "loading weights");
}

/* Elements [at, ...) of the weight from one piece. */
static int send_piece(struct cuda_backend *c, const struct weight_piece *p, struct mat m, int64_t at, struct err *e)
{
    int32_t rows = (int32_t)MAX(UPLOAD_BYTES / (p->cols * dtype_bytes(p->dtype)), 1);
    for (int32_t first = 0; first < p->rows; first += rows) {
        int rc = send_rows(c, p, first, MIN(rows, p->rows - first), m, at, e);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

int cuda_weight(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    int rc = check_pieces(d, e);
    rc = rc < 0 ? rc : upload_init(c, e);
    if (rc < 0) {
        return rc;
    }
    struct mat m = {.stride = d->cols, .rows = d->rows, .cols = d->cols, .dtype = d->dtype};
    int64_t n = (int64_t)d->rows * d->cols;
    m.data = cuda_alloc(c, (size_t)(n * dtype_bytes(d->dtype)), d->name, e);
    if (m.data == NULL) {
        return ERR_NOMEM;
    }
    if (d->n_pieces == 0) {
        launch_dummy(m.data, (int)d->dtype, n, ++c->n_dummies, c->stream);
    }
    int64_t at = 0;
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        struct weight_piece flat = *p;
        if (d->kind == WEIGHT_VECTOR && p->stride == p->cols) { /* joined along the columns */
            flat = (struct weight_piece){.data = p->data,
                                         .dtype = p->dtype,
                                         .rows = 1,
                                         .cols = p->rows * p->cols,
                                         .stride = (int64_t)p->rows * p->cols};
        }
        rc = send_piece(c, &flat, m, at, e);
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
    cudaError_t rc = cudaStreamSynchronize(c->stream);
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "loading weights");
}
