/* Decode attention over a cache of the activations' type (attn_decode.cuh), and the
 * choice of its kernels. */
#include "kernels/cuda/attention/attn_decode.cuh"

template <bool PREFIX>
static bool decode_any(const attn_args *a, const step_arrays *s, const attn_workspace *w,
                       cudaStream_t stream)
{
    if (a->kv.panel_log2 == 0 || a->type == T_F32 || a->qkv_stride % 2 || a->out_stride % 4 ||
        (uintptr_t)a->out % 8) {
        return false;
    }
    int row_tiles = (a->n_heads / a->kv.n_kv_heads + DECODE_ROWS - 1) / DECODE_ROWS;
    if (a->kv.n_kv_heads * row_tiles > w->blocks * w->shape.warps) {
        return false; /* fewer warps than head tiles */
    }
    if (kv_narrow(a->kv)) {
        return PREFIX ? launch_attn_shared_narrow(a, s, w, stream)
                      : launch_attn_decode_narrow(a, s, w, stream);
    }
    return a->type == T_F16
               ? decode_dispatch<__half, __half, PREFIX>(a, s, w, stream)
               : decode_dispatch<__nv_bfloat16, __nv_bfloat16, PREFIX>(a, s, w, stream);
}

extern "C" int32_t attn_panel_log2(int32_t head_dim, int32_t block_size, int dtype)
{
    if (block_size % 8 != 0 || dtype == T_F32 || dtype == T_I32) {
        return 0;
    }
    if (dtype == T_F8 || dtype == T_I8) {
        return head_dim == 128 || head_dim == 256 ? 7 : head_dim == 64 ? 6 : head_dim == 96 ? 5 : 0;
    }
    switch (head_dim) {
    case 64:
    case 128:
    case 256:
        return 6;
    case 96:
        return 5;
    case 80:
        return 4;
    default:
        return 0;
    }
}

extern "C" int32_t attn_decode_blocks(void)
{
    return cuda_multiprocessors();
}

extern "C" bool launch_attn_decode(const struct attn_args *a, const struct step_arrays *s,
                                   const struct attn_workspace *w, int32_t n_rows,
                                   cudaStream_t stream)
{
    (void)n_rows;
    return decode_any<false>(a, s, w, stream);
}

extern "C" bool launch_attn_shared(const struct attn_args *a, const struct step_arrays *s,
                                   const struct attn_workspace *w, cudaStream_t stream)
{
    return decode_any<true>(a, s, w, stream);
}
