/* The cuBLASLt of recorder.c: any product has an algorithm, which runs nothing. Ranks
 * meet in no product of the library, so none is written down. */
#include <cublasLt.h>

#include <stdlib.h>
#include <string.h>

static cublasStatus_t made(void **ret)
{
    *ret = malloc(1);
    return *ret ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

static cublasStatus_t freed(void *p)
{
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *ret)
{
    return made((void **)ret);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h)
{
    return freed(h);
}
size_t cublasLtGetVersion(void)
{
    return CUBLAS_VERSION;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *ret, cublasComputeType_t c,
                                        cudaDataType_t t)
{
    return made((void **)ret);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t p)
{
    return freed(p);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t p,
                                              cublasLtMatmulDescAttributes_t a, const void *v,
                                              size_t n)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *ret, cudaDataType t,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    return made((void **)ret);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t p)
{
    return freed(p);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t p,
                                                cublasLtMatrixLayoutAttribute_t a, const void *v,
                                                size_t n)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *ret)
{
    return made((void **)ret);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    return freed(p);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t a,
                                                    const void *v, size_t n)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                              cublasLtMatmulPreference_t p, int n,
                                              cublasLtMatmulHeuristicResult_t *ret, int *ret_n)
{
    memset(ret, 0, sizeof(*ret) * (size_t)n);
    *ret_n = n;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t h, cublasLtMatmulDesc_t d,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                       const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *ret)
{
    memset(ret, 0, sizeof(*ret));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t what,
                                                    void *ret, size_t n_bytes, size_t *ret_bytes)
{
    memset(ret, 0, n_bytes);
    if (ret_bytes) {
        *ret_bytes = n_bytes;
    }
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_is, const void *b,
                              cublasLtMatrixLayout_t b_is, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_is, void *out, cublasLtMatrixLayout_t out_is,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t n_bytes,
                              cudaStream_t stream)
{
    return CUBLAS_STATUS_SUCCESS;
}
