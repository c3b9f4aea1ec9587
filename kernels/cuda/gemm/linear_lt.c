/* cuBLASLt's side of matrix products: descriptors, proposals, running.
 *
 * cuBLAS is column-major: out^T [n, m] = w x^T, where the row-major w [n, k] is passed
 * as a transposed column-major [k, n].
 */
#include "kernels/cuda/gemm/linear.h"

#include <string.h>

const char *lt_text(cublasStatus_t s)
{
    switch (s) {
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "shape or type not supported";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "out of memory";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "not initialised";
    default:
        return "failed";
    }
}

cudaDataType_t lt_type(int32_t t)
{
    return t == PRODUCT_E4M3 ? CUDA_R_8F_E4M3
           : t == DTYPE_F32  ? CUDA_R_32F
           : t == DTYPE_F16  ? CUDA_R_16F
                             : CUDA_R_16BF;
}

/* A scale for each row of the weights and of x. Without the attribute for fast sums
 * cuBLASLt adds up Hopper's short sums in float32. */
static void set_scales(struct matmul_plan *p, const float *w_scale, const float *x_scale)
{
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &w_scale,
                                   sizeof(w_scale));
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x_scale,
                                   sizeof(x_scale));
}

#if CUBLAS_VERSION >= 120900
static cublasStatus_t set_scale_modes(struct matmul_plan *p, const float *any)
{
    cublasLtMatmulMatrixScale_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    cublasStatus_t s = cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
                                                      &mode, sizeof(mode));

    s = s == CUBLAS_STATUS_SUCCESS
            ? cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode,
                                             sizeof(mode))
            : s;
    set_scales(p, any, any); /* proposals ask for the addresses' alignment */
    return s;
}
#else
static cublasStatus_t set_scale_modes(struct matmul_plan *p, const float *any)
{
    (void)p, (void)any;
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
#endif

cublasStatus_t lt_describe(struct matmul_plan *p, const struct product_key *k)
{
    cublasOperation_t transpose = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)k->epilogue;
    cublasStatus_t s = cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);

    if (s != CUBLAS_STATUS_SUCCESS) {
        p->desc = NULL;
        return s;
    }
    p->rows = k->m;
    uint64_t m = (uint64_t)k->m;
    uint64_t n = (uint64_t)k->n;
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                   sizeof(transpose));
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                   sizeof(epilogue));
    cublasLtMatrixLayoutCreate(&p->w, lt_type(k->x_type), (uint64_t)k->k, n, k->w_stride);
    cublasLtMatrixLayoutCreate(&p->x, lt_type(k->x_type), (uint64_t)k->k, m, k->x_stride);
    cublasLtMatrixLayoutCreate(&p->out, lt_type(k->out_type), n, m, k->out_stride);
    s = cublasLtMatrixLayoutCreate(&p->residual, lt_type(k->out_type), n, m,
                                   k->residual ? k->residual_stride : k->out_stride);
    return s == CUBLAS_STATUS_SUCCESS && k->x_type == PRODUCT_E4M3
               ? set_scale_modes(p, (const float *)(uintptr_t)256)
               : s;
}

bool lt_has_e4m3(struct cuda_backend *c, int32_t n, int32_t k)
{
    enum { SOME_ROWS = 64 };
    struct matmul_plan p = {.key = {.x_stride = k,
                                    .w_stride = k,
                                    .out_stride = n,
                                    .m = SOME_ROWS,
                                    .n = n,
                                    .k = k,
                                    .x_type = PRODUCT_E4M3,
                                    .out_type = DTYPE_BF16,
                                    .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
                                    .alignment = 16}};
    cublasLtMatmulHeuristicResult_t found;
    int n_found = 0;
    bool ok = lt_describe(&p, &p.key) == CUBLAS_STATUS_SUCCESS &&
              lt_propose(c, &p, 1, &found, &n_found) == CUBLAS_STATUS_SUCCESS;

    lt_release(&p);
    return ok;
}

void lt_release(struct matmul_plan *p)
{
    if (p->desc) {
        cublasLtMatmulDescDestroy(p->desc);
        cublasLtMatrixLayoutDestroy(p->w);
        cublasLtMatrixLayoutDestroy(p->x);
        cublasLtMatrixLayoutDestroy(p->residual);
        cublasLtMatrixLayoutDestroy(p->out);
        p->desc = NULL;
    }
}

cublasStatus_t lt_propose(struct cuda_backend *c, struct matmul_plan *p, int most,
                          cublasLtMatmulHeuristicResult_t *ret, int *ret_n)
{
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const struct product_key *k = &p->key;
    cublasLtMatmulPreference_t want;
    cublasStatus_t s = cublasLtMatmulPreferenceCreate(&want);

    if (s != CUBLAS_STATUS_SUCCESS) {
        return s;
    }
    size_t workspace = WORKSPACE_BYTES;
    uint32_t alignment = (uint32_t)k->alignment;
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof(workspace));
    for (size_t i = 0; i < ARRAY_LEN(alignments); i++) {
        cublasLtMatmulPreferenceSetAttribute(want, alignments[i], &alignment, sizeof(alignment));
    }
    *ret_n = 1;
    if (c->config.deterministic) {
        struct matmul_setup m = {p->desc, p->w, p->x, p->residual, p->out, want};
        bool tma = c->capability == 90 && k->x_type != DTYPE_F32 && k->n % 8 == 0 &&
                   k->k % 8 == 0 && k->alignment >= 16;
        s = linear_invariant_algo(c, &m, k->m, tma, ret);
    } else {
        s = cublasLtMatmulAlgoGetHeuristic(c->lt, p->desc, p->w, p->x, p->residual, p->out, want,
                                           most, ret, ret_n);
    }
    cublasLtMatmulPreferenceDestroy(want);
    return s == CUBLAS_STATUS_SUCCESS && *ret_n == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : s;
}

bool lt_takes(struct cuda_backend *c, const struct matmul_plan *p, const cublasLtMatmulAlgo_t *algo)
{
    cublasLtMatmulHeuristicResult_t r;

    return cublasLtMatmulAlgoCheck(c->lt, p->desc, p->w, p->x, p->residual, p->out, algo, &r) ==
               CUBLAS_STATUS_SUCCESS &&
           r.state == CUBLAS_STATUS_SUCCESS && r.workspaceSize <= WORKSPACE_BYTES;
}

static void set_rows(struct matmul_plan *p, int32_t rows)
{
    uint64_t n = (uint64_t)rows;

    if (p->rows != rows) {
        cublasLtMatrixLayoutSetAttribute(p->x, CUBLASLT_MATRIX_LAYOUT_COLS, &n, sizeof(n));
        cublasLtMatrixLayoutSetAttribute(p->out, CUBLASLT_MATRIX_LAYOUT_COLS, &n, sizeof(n));
        cublasLtMatrixLayoutSetAttribute(p->residual, CUBLASLT_MATRIX_LAYOUT_COLS, &n, sizeof(n));
        p->rows = rows;
    }
}

cublasStatus_t lt_run(struct cuda_backend *c, struct matmul_plan *p,
                      const cublasLtMatmulAlgo_t *algo, const struct product *d)
{
    float one = 1.0f;
    float beta = p->key.residual ? 1.0f : 0.0f;

    set_rows(p, d->args.rows);
    if (p->key.x_type == PRODUCT_E4M3) {
        set_scales(p, d->w_scale, d->x_scale);
    }
    if (d->lt_bias) {
        cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &d->args.bias,
                                       sizeof(d->args.bias));
    }
    return cublasLtMatmul(c->lt, p->desc, &one, d->args.w, p->w, d->args.x, p->x, &beta,
                          p->key.residual ? d->residual : d->lt_out, p->residual, d->lt_out, p->out,
                          algo, c->workspace, WORKSPACE_BYTES, c->stream);
}
