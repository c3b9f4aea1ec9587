/* Mixed-input products (mixed.h): the host's part. */
#include "kernels/cuda/fused_decode/small_codes.h"
#include "kernels/cuda/gemm/tensor_map.cuh"
#include "kernels/cuda/mixed/few_int4.cuh"
#include "kernels/cuda/mixed/operands.cuh"

template <int F>
bool launch_mixed(struct small_tile t, const CUtensorMap &w, const CUtensorMap &x,
                  const mixed_args &a, cudaStream_t stream);
template <int F> void prepare_mixed(void);

extern "C" void small_mixed_prepare(void)
{
    prepare_mixed<FUSED_INT4>();
    prepare_mixed<FUSED_FP8>();
    prepare_mixed<FUSED_INT8>();
    prepare_mixed<FUSED_MXFP4>();
    prepare_mixed<FUSED_NVFP4>();
    prepare_mixed<FUSED_GROUPS_4>();
    prepare_mixed<FUSED_LEVELS>();
    prepare_mixed<FUSED_GROUPS_8>();
    prepare_mixed<FUSED_GROUPS_2>();
}

bool launch_small_mixed(const struct fused_args *a, const struct fused_op *p, struct small_tile t,
                        const struct small_args &s, const void *x, int64_t x_stride,
                        cudaStream_t stream)
{
    CUtensorMap wm = {}, xm;
    mixed_args m = {};
    int32_t depth = mixed_depth(a->format, p->k);

    m.s = s;
    m.s.depth_steps = depth / MIXED_GROUP / t.split;
    m.w_scale = p->w_scale;
    m.w_zero = (const int8_t *)p->w_zero;
    m.n_groups = p->n_groups;
    m.f16_scales = p->f16_scales;
    m.segments = (const char *)p->w;
    m.halves = p->halves;
    m.n_segments = depth / (a->format == FUSED_GROUPS_8 ? (int)GROUPS_COLS_8 : (int)QUANT_SEGMENT);
    if (a->format == FUSED_INT4 && a->rows <= FEW_INT4_ROWS && p->k / t.split <= FEW_INT4_COLUMNS &&
        (uintptr_t)x % 4 == 0 && x_stride % 2 == 0) {
        return launch_few_int4(t, m, x, x_stride, stream);
    }
    bool ok = mixed_in_segments(a->format) ||
              small_map_bytes(&wm, p->w, p->n, p->k, p->w_stride, MIXED_ROWS);
    if (!ok || !tensor_map_panels(&xm, x, a->rows, p->k, x_stride, mixed_source_rows(a->rows),
                                  mixed_source_groups(a->rows) * (MIXED_GROUP / SMALL_DEPTH))) {
        return false;
    }
    return a->format == FUSED_INT4       ? launch_mixed<FUSED_INT4>(t, wm, xm, m, stream)
           : a->format == FUSED_FP8      ? launch_mixed<FUSED_FP8>(t, wm, xm, m, stream)
           : a->format == FUSED_MXFP4    ? launch_mixed<FUSED_MXFP4>(t, wm, xm, m, stream)
           : a->format == FUSED_NVFP4    ? launch_mixed<FUSED_NVFP4>(t, wm, xm, m, stream)
           : a->format == FUSED_GROUPS_4 ? launch_mixed<FUSED_GROUPS_4>(t, wm, xm, m, stream)
           : a->format == FUSED_LEVELS   ? launch_mixed<FUSED_LEVELS>(t, wm, xm, m, stream)
           : a->format == FUSED_GROUPS_8 ? launch_mixed<FUSED_GROUPS_8>(t, wm, xm, m, stream)
           : a->format == FUSED_GROUPS_2 ? launch_mixed<FUSED_GROUPS_2>(t, wm, xm, m, stream)
                                         : launch_mixed<FUSED_INT8>(t, wm, xm, m, stream);
}

extern "C" bool launch_mixed_wide(const struct fused_args *a, int32_t n_blocks, cudaStream_t stream)
{
    const struct fused_op *p = &a->op[0];
    struct small_tile t = small_mixed_tile(p, a->format, a->rows, n_blocks);
    struct small_target to = small_target_of(p, t.kind);
    small_args k = {};

    k.out = (bf16 *)to.out;
    k.out_stride = to.stride;
    k.floats = p->out_floats ? (float *)p->out : NULL;
    k.bias = (const bf16 *)p->bias;
    k.act = to.act;
    k.rows = a->rows;
    k.n = p->n;
    return launch_small_mixed(a, p, t, k, p->x, p->x_stride, stream);
}
