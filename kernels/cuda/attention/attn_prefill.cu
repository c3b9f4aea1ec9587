/* Paged causal prefill attention on tensor cores (mma.sync), over ragged chunks of
 * queries.
 *
 * One block per (tile of 128 query rows, head); its eight warps hold 16 rows each, with
 * queries and output in registers. Keys and values arrive in tiles of 64 tokens through
 * a ring of shared-memory stages, which the first warp fills straight from the cache's
 * blocks. A chunk of a prompt, a prefix hit and a whole prompt are one case: the
 * queries are the last ones of their sequence. Tiles are scheduled longest first.
 */
#include "kernels/cuda/attention/key_tiles.cuh"

enum { PREFILL_WARPS = 8 };

template <typename T, int D> using prefill_ring = key_ring<T, D, D <= 128 ? 2 : 1>;

template <typename T, int D>
__global__ void __launch_bounds__(PREFILL_WARPS * 32)
    attn_prefill_kernel(attn_args a, step_arrays s, const query_tile *tile)
{
    using L = prefill_ring<T, D>;
    constexpr int NT = D / 8, ST = KEY_TILE / 8;
    extern __shared__ __align__(128) char shared[];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    uint32_t ring = shared_address(shared), bars = ring + L::STAGES * L::STAGE;

    if (threadIdx.x == 0) {
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(bars + i * 8, 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    pdl_wait();
    pdl_release();
    const query_tile mine = tile[blockIdx.y];
    int row0 = mine.first, head = blockIdx.x, shift = mine.shift;
    int row[2] = {row0 + warp * 16 + g, row0 + warp * 16 + g + 8};
    int last = mine.end - 1 + shift; /* the tile's greatest position */
    int first = row0 + shift;
    int begin = a.window > 0 && first + 1 > a.window ? (first + 1 - a.window) / 16 * 16 : 0,
        end = last + 1;

    int kv_head = head / (a.n_heads / a.kv.n_kv_heads);
    const int32_t *table = s.table + (int64_t)mine.row * s.table_width;
    int n_tiles = (end - begin + KEY_TILE - 1) / KEY_TILE;
    if (warp == 0) {
        for (int i = 0; i < L::STAGES; i++) {
            if (i < n_tiles) {
                load_tile<T, D>(a, kv_head, table, begin + i * KEY_TILE, end, ring + i * L::STAGE,
                                bars + i * 8, lane);
            }
            copy_commit();
        }
    }

    uint32_t qf[D / 16][4];
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = row[j & 1];
            const T *q = (const T *)a.qkv + r * a.qkv_stride + (int64_t)head * D + k * 16 + t4 * 2 +
                         (j >> 1) * 8;
            qf[k][j] = r < mine.end ? *(const uint32_t *)q : 0;
        }
    float o[NT][4];
#pragma unroll
    for (int i = 0; i < NT; i++) {
        o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    }
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
    const float scale = (a.softcap > 0.0f ? a.scale : a.scale * LOG2E) * scale_of_keys(a);
    const bool scaled = a.kv.dtype == T_I8;

    for (int n = 0; n < n_tiles; n++) {
        int stage = n % L::STAGES, token = begin + n * KEY_TILE;
        barrier_wait(bars + stage * 8, n / L::STAGES & 1);
        if (warp == 0) {
            copy_wait<L::STAGES - 1>();
        }
        if (!BULK_COPY) {
            __syncthreads();
        }
        uint32_t keys = ring + stage * L::STAGE, values = keys + L::KV;
        if (token + KEY_TILE > end) {
            clear_tokens<D, KEY_TILE>(shared + stage * L::STAGE + L::KV, end - token, threadIdx.x,
                                      blockDim.x);
            __syncthreads();
        }
        const float *scales = (const float *)(shared + stage * L::STAGE + 2 * L::KV) + t4 * 2;
        float sc[ST][4];
        scores_of<T, D>(sc, qf, keys, lane);
        int warp_first = row0 + warp * 16 + shift;
        bool edge = token + KEY_TILE - 1 > warp_first ||
                    (a.window > 0 && token <= warp_first + 15 - a.window);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int position = row[h] + shift;
            float top = -INFINITY;
#pragma unroll
            for (int i = 0; i < ST; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float v = sc[i][h * 2 + j] * scale;
                    if (scaled) {
                        v *= scales[i * 8 + j];
                    }
                    if (a.softcap > 0.0f) {
                        v = soft_cap(v, a.softcap) * LOG2E;
                    }
                    int at = token + i * 8 + t4 * 2 + j;
                    if (edge && (at > position || (a.window > 0 && at <= position - a.window))) {
                        v = -INFINITY;
                    }
                    sc[i][h * 2 + j] = v;
                    top = fmaxf(top, v);
                }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            float next = fmaxf(m[h], top);
            /* -infinity: nothing seen yet, by window or causal mask */
            float base = next == -INFINITY ? 0.0f : next;
            float keep = fast_exp2(m[h] - base);
            m[h] = next;
            float add = 0.0f;
#pragma unroll
            for (int i = 0; i < ST; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float p = fast_exp2(sc[i][h * 2 + j] - base);
                    sc[i][h * 2 + j] = scaled && p > 0.0f ? p * scales[KEY_TILE + i * 8 + j] : p;
                    add += p;
                }
            l[h] = l[h] * keep + add;
#pragma unroll
            for (int i = 0; i < NT; i++) {
                o[i][h * 2] *= keep;
                o[i][h * 2 + 1] *= keep;
            }
        }
        add_values<T, D>(o, sc, values, scaled, lane);
        __syncthreads(); /* all warps are done with this stage */
        if (warp == 0) {
            int ahead = n + L::STAGES;
            if (ahead < n_tiles) {
                load_tile<T, D>(a, kv_head, table, begin + ahead * KEY_TILE, end,
                                ring + stage * L::STAGE, bars + stage * 8, lane);
            }
            copy_commit();
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
        if (row[h] < mine.end) {
            T *out = (T *)a.out + row[h] * a.out_stride + (int64_t)head * D;
            float r = scale_of_values(a) / (l[h] + sink_weight(a, head, m[h]));
#pragma unroll
            for (int i = 0; i < NT; i++) {
                *(uint32_t *)(out + i * 8 + t4 * 2) =
                    pack2<T>(o[i][h * 2] * r, o[i][h * 2 + 1] * r);
            }
        }
    }
}

template <typename T, int D>
static bool prefill_launch(const attn_args *a, const step_arrays *s, const query_tile *tile,
                           int32_t n, cudaStream_t stream)
{
    static bool ready;
    constexpr int bytes = prefill_ring<T, D>::BYTES;
    auto kernel = attn_prefill_kernel<T, D>;

    ready = ready || allow_shared(kernel, bytes);
    if (!ready) {
        return false;
    }
    for (int32_t first = 0; first < n; first += 65535) {
        launch(kernel, dim3(a->n_heads, n - first < 65535 ? n - first : 65535),
               dim3(PREFILL_WARPS * 32), bytes, stream, *a, *s, tile + first);
    }
    return true;
}

template <typename T>
static bool prefill_dispatch(const attn_args *a, const step_arrays *s, const query_tile *tile,
                             int32_t n, cudaStream_t stream)
{
    switch (a->kv.head_dim) {
    case 64:
        return prefill_launch<T, 64>(a, s, tile, n, stream);
    case 80:
        return prefill_launch<T, 80>(a, s, tile, n, stream);
    case 96:
        return prefill_launch<T, 96>(a, s, tile, n, stream);
    case 128:
        return prefill_launch<T, 128>(a, s, tile, n, stream);
    case 256:
        return prefill_launch<T, 256>(a, s, tile, n, stream);
    default:
        return false;
    }
}

extern "C" bool launch_attn_prefill(const struct attn_args *a, const struct step_arrays *s,
                                    const query_tile *tile, int32_t n_tiles, cudaStream_t stream)
{
    if (a->kv.panel_log2 == 0 || a->type == T_F32 || a->qkv_stride % 2 || a->out_stride % 2) {
        return false;
    }
    return a->type == T_F16 ? prefill_dispatch<__half>(a, s, tile, n_tiles, stream)
                            : prefill_dispatch<__nv_bfloat16>(a, s, tile, n_tiles, stream);
}
