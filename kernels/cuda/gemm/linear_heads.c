/* Products of many rows by head, as one strided-batched product of cuBLASLt: each
 * head's columns of x with its own rows of a stacked weight, into its columns of out.
 *
 * As in linear.c algorithms are cached per row bucket, cuBLASLt's first proposal is
 * taken, and cuBLAS is column-major: out^T [n, rows] = w x^T, head by head.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/gemm/linear.h"
#include "kernels/cuda/heuristics.h"

/* What determines the choice for a product. Zeroed before it is filled in, because it
 * is compared as bytes. */
struct heads_key {
    int64_t x_stride, w_stride, out_stride; /* of rows, in elements */
    int64_t x_head, w_head, out_head;       /* of heads, likewise */
    int32_t rows, n, k, n_heads;            /* row bucket; columns of a head's out; depth */
    int32_t type;                           /* enum dtype of all operands */
    int32_t transposed;                     /* w is [k, n] */
    int32_t alignment;                      /* in bytes, that all operands have */
    int32_t unused;
};

struct heads_plan {
    struct heads_key key;
    bool used;                        /* the slot of the hash table is taken */
    bool none;                        /* cuBLASLt has no algorithm */
    cublasLtMatmulDesc_t desc;        /* NULL: not made */
    cublasLtMatrixLayout_t w, x, out; /* made and freed with desc */
    cublasLtMatmulAlgo_t algo;
};

int cuda_linear_heads_init(struct cuda_backend *c, struct err *e)
{
    c->heads_plan = calloc(HEADS_PLANS, sizeof(*c->heads_plan));
    return c->heads_plan ? 0 : err_nomem(e, "matrix products");
}

static void plan_clear(struct heads_plan *p)
{
    if (p->desc) {
        cublasLtMatmulDescDestroy(p->desc);
    }
    cublasLtMatrixLayout_t layout[] = {p->w, p->x, p->out};
    for (size_t i = 0; i < ARRAY_LEN(layout); i++) {
        if (layout[i]) {
            cublasLtMatrixLayoutDestroy(layout[i]);
        }
    }
    memset(p, 0, sizeof(*p));
}

void cuda_linear_heads_release(struct cuda_backend *c)
{
    for (int32_t i = 0; c->heads_plan != NULL && i < HEADS_PLANS; i++) {
        plan_clear(&c->heads_plan[i]);
    }
    free(c->heads_plan);
    c->heads_plan = NULL;
}

/* A column-major matrix of each head. */
static cublasStatus_t layout_of(cublasLtMatrixLayout_t *ret, int32_t type, int32_t rows,
                                int32_t cols, int64_t stride, int32_t n_heads, int64_t head)
{
    cublasStatus_t s =
        cublasLtMatrixLayoutCreate(ret, lt_type(type), (uint64_t)rows, (uint64_t)cols, stride);

    s = s == CUBLAS_STATUS_SUCCESS
            ? cublasLtMatrixLayoutSetAttribute(*ret, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n_heads,
                                               sizeof(n_heads))
            : s;
    return s == CUBLAS_STATUS_SUCCESS
               ? cublasLtMatrixLayoutSetAttribute(*ret, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                  &head, sizeof(head))
               : s;
}

static cublasStatus_t describe(struct heads_plan *p)
{
    const struct heads_key *k = &p->key;
    cublasOperation_t op = k->transposed ? CUBLAS_OP_N : CUBLAS_OP_T;
    cublasStatus_t s = cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);

    if (s != CUBLAS_STATUS_SUCCESS) {
        return s;
    }
    s = cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op, sizeof(op));
    s = s == CUBLAS_STATUS_SUCCESS
            ? layout_of(&p->w, k->type, k->transposed ? k->n : k->k, k->transposed ? k->k : k->n,
                        k->w_stride, k->n_heads, k->w_head)
            : s;
    s = s == CUBLAS_STATUS_SUCCESS
            ? layout_of(&p->x, k->type, k->k, k->rows, k->x_stride, k->n_heads, k->x_head)
            : s;
    return s == CUBLAS_STATUS_SUCCESS
               ? layout_of(&p->out, k->type, k->n, k->rows, k->out_stride, k->n_heads, k->out_head)
               : s;
}

static cublasStatus_t propose(struct cuda_backend *c, struct heads_plan *p)
{
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasLtMatmulPreference_t want;
    cublasLtMatmulHeuristicResult_t found;
    size_t workspace = WORKSPACE_BYTES;
    uint32_t alignment = (uint32_t)p->key.alignment;
    int n = 0;
    cublasStatus_t s = cublasLtMatmulPreferenceCreate(&want);

    if (s != CUBLAS_STATUS_SUCCESS) {
        return s;
    }
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof(workspace));
    for (size_t i = 0; i < ARRAY_LEN(alignments); i++) {
        cublasLtMatmulPreferenceSetAttribute(want, alignments[i], &alignment, sizeof(alignment));
    }
    s = cublasLtMatmulAlgoGetHeuristic(c->lt, p->desc, p->w, p->x, p->out, p->out, want, 1, &found,
                                       &n);
    cublasLtMatmulPreferenceDestroy(want);
    if (s == CUBLAS_STATUS_SUCCESS && n == 0) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (s == CUBLAS_STATUS_SUCCESS) {
        p->algo = found.algo;
    }
    return s;
}

/* The plan for the key, cached or made. */
static struct heads_plan *plan_find(struct cuda_backend *c, const struct heads_key *k)
{
    uint64_t h = product_hash(k, sizeof(*k));
    struct heads_plan *p = NULL;

    for (int i = 0; i < 8; i++) {
        p = &c->heads_plan[(h + (uint64_t)i) % HEADS_PLANS];
        if (p->used && memcmp(&p->key, k, sizeof(*k)) == 0) {
            return p;
        }
        if (!p->used) {
            break;
        }
    }
    plan_clear(p); /* free, or the last slot probed: replaced */
    p->used = true;
    p->key = *k;
    p->none = describe(p) != CUBLAS_STATUS_SUCCESS || propose(c, p) != CUBLAS_STATUS_SUCCESS;
    return p;
}

static cublasStatus_t run(struct cuda_backend *c, struct heads_plan *p,
                          const struct head_products *d)
{
    uint64_t rows = (uint64_t)d->rows;
    float one = 1.0f, zero = 0.0f;

    cublasLtMatrixLayoutSetAttribute(p->x, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof(rows));
    cublasLtMatrixLayoutSetAttribute(p->out, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof(rows));
    return cublasLtMatmul(c->lt, p->desc, &one, d->w.data, p->w, d->x.data, p->x, &zero,
                          d->out.data, p->out, d->out.data, p->out, &p->algo, c->workspace,
                          WORKSPACE_BYTES, c->stream);
}

/* Of the operands and of their strides. */
static int32_t alignment_of(const struct head_products *d, const struct heads_key *k)
{
    int64_t bytes = dtype_bytes(d->x.dtype),
            bits =
                (k->x_stride | k->w_stride | k->out_stride | k->x_head | k->w_head | k->out_head) *
                    bytes |
                (int64_t)((uintptr_t)d->x.data | (uintptr_t)d->w.data | (uintptr_t)d->out.data);

    return (int32_t)MIN(bits & -bits, 16);
}

bool cuda_linear_heads(struct cuda_backend *c, const struct head_products *d)
{
    struct heads_key k;

    if (d->w.format || d->w.dtype != d->x.dtype || d->out.dtype != d->x.dtype) {
        return false;
    }
    memset(&k, 0, sizeof(k));
    k.x_stride = d->x.stride;
    k.w_stride = d->w.stride;
    k.out_stride = d->out.stride;
    k.x_head = d->x_head;
    k.w_head = d->w.rows / d->n_heads * d->w.stride;
    k.out_head = d->out_head;
    k.n = d->transposed ? d->w.cols : d->w.rows / d->n_heads;
    k.k = d->transposed ? d->w.rows / d->n_heads : d->w.cols;
    k.n_heads = d->n_heads;
    k.type = (int32_t)d->x.dtype;
    k.transposed = d->transposed;
    k.alignment = alignment_of(d, &k);
    k.rows = product_rows(d->rows);
    for (int i = 0; i < 2; i++) { /* its bucket's algorithm may not take these rows */
        struct heads_plan *p = plan_find(c, &k);
        if (!p->none && run(c, p, d) == CUBLAS_STATUS_SUCCESS) {
            return true;
        }
        k.rows = d->rows;
    }
    return false;
}
