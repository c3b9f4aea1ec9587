/* Products of codes of more rows than decode steps fuse (mixed.h). */
#include "kernels/cuda/fused_decode/heuristics_fused.h"
#include "kernels/cuda/gemm/linear.h"
#include "kernels/cuda/mixed/mixed.h"

bool cuda_linear_mixed(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep, bool gated)
{
    struct fused_args a = {0};
    int32_t rows = cuda_rows(c, out);

    /* with `deterministic` a row's bits must not depend on the number of rows */
    if (!w.format || rows > MIXED_MOST_ROWS || c->config.deterministic ||
        !c->small_squares.sum[0]) {
        return false;
    }
    bool fits = gated ? fused_push_linear_gated(&a, rows, out, x, w, ep->bias, ep->act)
                      : fused_push_linear(&a, rows, out, x, w, ep);
    if (!fits || !mixed_wide_suits(&a, &a.op[0], c->n_sms)) {
        return false;
    }
    if (!launch_mixed_wide(&a, c->n_sms, c->stream)) {
        cudaError_t rc = cudaGetLastError();
        cuda_check(c, rc == cudaSuccess ? cudaErrorInvalidValue : rc, "products of codes");
    }
    return true;
}
