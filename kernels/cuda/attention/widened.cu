/* Prefill attention over a cache of e4m3 by way of a panel: the keys and values that a
 * step's queries see are widened to the activations' type, which is exact, and the
 * kernel for a cache of that type reads them there.
 *
 * The panel has a bounded size. Where it is too small for all KV heads of the step's
 * sequences they take turns: some heads are widened and attended to, then the next. In
 * it sequences lie end to end in blocks of the cache's size, each [k|v][head][panels],
 * and block ids are their places.
 */
#include "kernels/cuda/attention/attn_common.cuh"

enum { WIDEN_THREADS = 256, WIDEN_AHEAD = 4 };

/* Eight codes as T. */
template <typename T> __device__ __forceinline__ uint4 widened(uint2 codes)
{
    uint4 v;

    widen_four<T, uint8_t>(codes.x, v.x, v.y);
    widen_four<T, uint8_t>(codes.y, v.z, v.w);
    return v;
}

/* The sequence that has block `block` of the panel. */
__device__ __forceinline__ widened_seq widened_seq_of(const widened_step &w, int block)
{
    return w.seq[last_begun(0, w.n_seqs, block, [&](int i) { return w.seq[i].first; })];
}

/* A block of the panel for each block: KV heads [first_head, first_head +
 * to.n_kv_heads) of the cache. */
template <typename T, int D>
__global__ void __launch_bounds__(WIDEN_THREADS)
    widen_kernel(attn_args a, kv_view to, step_arrays s, widened_step w, int first_head)
{
    using P = panels<D, 1>;

    pdl_release();
    widened_seq q = widened_seq_of(w, blockIdx.x);
    int bs = to.block_size, j = blockIdx.x - q.first, tiles = 2 * to.n_kv_heads;
    if (a.window > 0 && (j + 1) * bs <= (q.position + 1 - a.window) / 16 * 16) {
        pdl_wait();
        return; /* no query sees it */
    }
    const uint8_t *from = (const uint8_t *)a.kv.base + a.layer * a.kv.layer_stride +
                          first_head * a.kv.head_stride +
                          s.table[(int64_t)q.row * s.table_width + j] * a.kv.block_stride;
    T *panel = (T *)to.base + blockIdx.x * to.block_stride;
    pdl_wait();
    for (int n = threadIdx.x; n < bs * (D / 8); n += WIDEN_THREADS) {
        /* eight codes of a token, as they lie in the cache */
        int t = n / (P::ROW / 8) % bs, column = n / (P::ROW / 8) / bs * P::WIDTH,
            chunk = n % (P::ROW / 8) / 2 ^ (t * P::ROW / 128 % P::CHUNKS);
        int64_t at = kv_offset(to, t, column + chunk * 16 + n % 2 * 8);
        for (int i = 0; i < tiles; i += WIDEN_AHEAD) {
            uint2 codes[WIDEN_AHEAD];
#pragma unroll
            for (int k = 0; k < WIDEN_AHEAD; k++) {
                int tile = min(i + k, tiles - 1);
                codes[k] = __ldcg((const uint2 *)(from + (tile & 1) * a.kv.kv_stride +
                                                  tile / 2 * a.kv.head_stride + n * 8));
            }
#pragma unroll
            for (int k = 0; k < WIDEN_AHEAD; k++) {
                int tile = i + k;
                if (tile < tiles) {
                    *(uint4 *)(panel + (tile & 1) * to.kv_stride + tile / 2 * to.head_stride + at) =
                        widened<T>(codes[k]);
                }
            }
        }
    }
}

template <typename T>
static bool widen(const attn_args *a, const kv_view *to, const step_arrays *s,
                  const widened_step *w, int first_head, cudaStream_t stream)
{
    auto kernel = to->head_dim == 64    ? widen_kernel<T, 64>
                  : to->head_dim == 96  ? widen_kernel<T, 96>
                  : to->head_dim == 128 ? widen_kernel<T, 128>
                  : to->head_dim == 256 ? widen_kernel<T, 256>
                                        : nullptr;

    if (kernel) {
        launch(kernel, dim3(w->n_blocks), dim3(WIDEN_THREADS), 0, stream, *a, *to, *s, *w,
               first_head);
    }
    return kernel != nullptr;
}

/* The panel as a cache of `heads` KV heads of the activations' type. */
static kv_view panel_view(const attn_args *a, const kv_panel *p, int32_t heads)
{
    kv_view v = a->kv;

    v.base = p->data;
    v.head_stride = (int64_t)v.block_size * v.head_dim;
    v.kv_stride = v.head_stride * heads;
    v.block_stride = v.kv_stride * 2;
    v.layer_stride = 0;
    v.n_kv_heads = heads;
    v.dtype = a->type;
    v.panel_log2 = attn_panel_log2(v.head_dim, v.block_size, a->type);
    v.scale_offset = 0;
    return v;
}

extern "C" bool launch_attn_widened(const struct attn_args *a, const struct step_arrays *s,
                                    const struct kv_panel *p, const struct widened_step *w,
                                    cudaStream_t stream)
{
    int64_t one_head = (int64_t)w->n_blocks * a->kv.block_size * a->kv.head_dim * 2 * 2;
    int32_t heads = one_head > 0 ? (int32_t)min(p->n_bytes / one_head, (int64_t)INT32_MAX) : 0,
            all = a->kv.n_kv_heads, group = a->n_heads / all;

    if (heads == 0 || a->kv.dtype != T_F8 || (a->type != T_F16 && a->type != T_BF16)) {
        return false;
    }
    int32_t turns = (all + heads - 1) / heads;
    heads = (all + turns - 1) / turns;
    step_arrays in_panel = *s;
    in_panel.table = p->block;
    in_panel.table_width = 1;
    for (int32_t first = 0; first < all; first += heads) {
        attn_args k = *a;
        int64_t columns = (int64_t)first * group * a->kv.head_dim;
        k.kv = panel_view(a, p, min(heads, all - first));
        k.layer = 0;
        k.n_heads = k.kv.n_kv_heads * group;
        k.qkv = (const char *)a->qkv + columns * 2;
        k.out = (char *)a->out + columns * 2;
        k.sinks = a->sinks ? a->sinks + first * group : nullptr;
        bool ok = k.kv.panel_log2 > 0 &&
                  (a->type == T_F16 ? widen<__half>(a, &k.kv, s, w, first, stream)
                                    : widen<__nv_bfloat16>(a, &k.kv, s, w, first, stream)) &&
                  launch_attn_prefill_hopper(&k, &in_panel, w->tile, w->n_tiles, stream);
        if (!ok) {
            return false;
        }
    }
    return true;
}
