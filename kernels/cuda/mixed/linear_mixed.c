/* Products of codes of more rows than decode steps fuse (mixed.h). */
#include "kernels/cuda/fused_decode/heuristics_fused.h"
#include "kernels/cuda/gemm/linear.h"
#include "kernels/cuda/mixed/mixed.h"

static bool launch(struct cuda_backend *c, const struct fused_args *a)
{
    bool ok = launch_mixed_wide(a, c->n_sms, c->stream);

    if (!ok) {
        cudaError_t rc = cudaGetLastError();
        cuda_check(c, rc == cudaSuccess ? cudaErrorInvalidValue : rc, "products of codes");
    }
    return ok;
}

static bool aligned(const void *p, int64_t stride_bytes)
{
    return (uintptr_t)p % 16 == 0 && stride_bytes % 16 == 0;
}

/* Logits, of a weight in groups, which is never widened: more rows than a launch takes
 * are several. */
static bool float_results(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                          const struct epilogue *ep, int32_t rows)
{
    struct fused_args a = {.n_ops = 1, .type = (int32_t)x.dtype};
    struct fused_op *p = &a.op[0];

    a.format = fused_format_of(w, x.dtype);
    if (!mixed_in_groups(a.format) || ep->residual.data || !aligned(x.data, x.stride * 2) ||
        !aligned(out.data, out.stride * 4) ||
        (ep->bias.data && (ep->bias.dtype != x.dtype || !aligned(ep->bias.data, 0)))) {
        return false;
    }
    fused_set_weight(p, w);
    p->x_stride = x.stride;
    p->out_stride = out.stride;
    p->out_floats = 1;
    p->bias = ep->bias.data;
    p->act = (int32_t)ep->act;
    a.rows = MIN(rows, MIXED_MOST_ROWS);
    if (!mixed_wide_suits(&a, p, c->n_sms)) {
        return false;
    }
    for (int32_t first = 0; first < rows; first += MIXED_MOST_ROWS) {
        p->x = mat_rows(x, first, 0).data;
        p->out = mat_rows(out, first, 0).data;
        a.rows = MIN(rows - first, MIXED_MOST_ROWS);
        if (!launch(c, &a)) {
            break;
        }
    }
    return true;
}

bool cuda_linear_mixed(struct cuda_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep, bool gated)
{
    struct fused_args a = {0};
    int32_t rows = cuda_rows(c, out);

    /* with `deterministic` a row's bits must not depend on the number of rows */
    if (w.format && out.dtype == DTYPE_F32 && !gated && cuda_groups_run(c)) {
        return float_results(c, out, x, w, ep, rows);
    }
    if (!w.format || rows > MIXED_MOST_ROWS || c->config.deterministic ||
        !c->small_squares.sum[0]) {
        return false;
    }
    bool fits = gated ? fused_push_linear_gated(&a, rows, out, x, w, ep->bias, ep->act)
                      : fused_push_linear(&a, rows, out, x, w, ep);
    if (!fits || !mixed_wide_suits(&a, &a.op[0], c->n_sms)) {
        return false;
    }
    launch(c, &a);
    return true;
}
