/* Batch-invariant matrix products, for `deterministic`: a row's result must not depend
 * on how many rows there are.
 *
 * cuBLASLt picks different algorithms for different row counts. Hopper's kernels for
 * aligned 16-bit operands add a row's products in order of depth whatever their tile,
 * unless they split the depth: there the algorithm's id is fixed by the weight's shape,
 * and the tile follows the row count. Other kernels slice the depth among the warps of
 * small tiles (as seen with float16 and 301 columns), so there one algorithm serves
 * every row count. tests/unit/kernels/test_batch_invariant.c and test_ops.c check both.
 */
#include "kernels/cuda/cuda.h"

enum { CANDIDATES = 48, REFERENCE_ROWS = 4096 };

static int32_t config_of(const cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoConfigAttributes_t what)
{
    int32_t v = 0;
    size_t n;

    cublasLtMatmulAlgoConfigGetAttribute(a, what, &v, sizeof(v), &n);
    return v;
}

static bool whole_depth(const cublasLtMatmulAlgo_t *a)
{
    return config_of(a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
           config_of(a, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == CUBLASLT_REDUCTION_SCHEME_NONE;
}

/* The best candidate with this id (-1: any) that does not split the depth. False:
 * none. */
static bool choose(struct cuda_backend *c, const struct matmul_setup *m, int32_t id,
                   cublasLtMatmulHeuristicResult_t *ret)
{
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    int n = 0;

    if (cublasLtMatmulAlgoGetHeuristic(c->lt, m->desc, m->w, m->x, m->residual, m->out, m->want,
                                       CANDIDATES, found, &n) != CUBLAS_STATUS_SUCCESS) {
        return false;
    }
    for (int i = 0; i < n; i++) {
        if (found[i].state == CUBLAS_STATUS_SUCCESS && whole_depth(&found[i].algo) &&
            (id < 0 || config_of(&found[i].algo, CUBLASLT_ALGO_CONFIG_ID) == id)) {
            *ret = found[i];
            return true;
        }
    }
    return false;
}

static void set_rows(const struct matmul_setup *m, uint64_t rows)
{
    cublasLtMatrixLayoutSetAttribute(m->x, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof(rows));
    cublasLtMatrixLayoutSetAttribute(m->out, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof(rows));
    cublasLtMatrixLayoutSetAttribute(m->residual, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof(rows));
}

cublasStatus_t linear_invariant_algo(struct cuda_backend *c, const struct matmul_setup *m,
                                     int32_t rows, bool any_tile,
                                     cublasLtMatmulHeuristicResult_t *ret)
{
    uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasLtMatmulHeuristicResult_t reference;

    cublasLtMatmulPreferenceSetAttribute(m->want, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none,
                                         sizeof(none));
    set_rows(m, REFERENCE_ROWS);
    bool known = choose(c, m, -1, &reference);
    set_rows(m, (uint64_t)rows);
    if (!known) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (any_tile && choose(c, m, config_of(&reference.algo, CUBLASLT_ALGO_CONFIG_ID), ret)) {
        return CUBLAS_STATUS_SUCCESS;
    }
    *ret = reference; /* its tile may be too large for few rows, but the bits are right */
    return cublasLtMatmulAlgoCheck(c->lt, m->desc, m->w, m->x, m->residual, m->out, &reference.algo,
                                   ret);
}
