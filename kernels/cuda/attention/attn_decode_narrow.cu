/* Decode attention over a cache of e4m3 or int8 (attn_decode.cuh). */
#include "kernels/cuda/attention/attn_decode.cuh"

template <bool PREFIX>
static bool decode_narrow(const attn_args *a, const step_arrays *s, const attn_workspace *w,
                          cudaStream_t stream)
{
    bool e4m3 = a->kv.dtype == T_F8;

    if (a->type == T_F16) {
        return e4m3 ? decode_dispatch<__half, uint8_t, PREFIX>(a, s, w, stream)
                    : decode_dispatch<__half, int8_t, PREFIX>(a, s, w, stream);
    }
    return e4m3 ? decode_dispatch<__nv_bfloat16, uint8_t, PREFIX>(a, s, w, stream)
                : decode_dispatch<__nv_bfloat16, int8_t, PREFIX>(a, s, w, stream);
}

extern "C" bool launch_attn_decode_narrow(const struct attn_args *a, const struct step_arrays *s,
                                          const struct attn_workspace *w, cudaStream_t stream)
{
    return decode_narrow<false>(a, s, w, stream);
}

extern "C" bool launch_attn_shared_narrow(const struct attn_args *a, const struct step_arrays *s,
                                          const struct attn_workspace *w, cudaStream_t stream)
{
    return decode_narrow<true>(a, s, w, stream);
}
