/* Batch-invariant attention, for `deterministic`: a query's result is bit for bit the
 * same whatever else the step holds, and whether the query came alone (decode) or in a
 * chunk of its prompt.
 *
 * Every query visits the keys of its sequence in tiles of 64, aligned to position 0,
 * from first to last; nothing is split between blocks. Only the queries that share a
 * matrix tile of 16 rows differ: 16 tokens of one head, or for a single token the query
 * heads of one KV head. A row of a matrix instruction does not depend on the other
 * rows, and a tile that is masked for a row adds exact zeros, so both give the same
 * bits.
 */
#include "kernels/cuda/attention/key_tiles.cuh"

enum { CHUNK_WARPS = 8, FEW_PAIRS = 396 };
static_assert(ATTN_WINDOW_ALIGN % KEY_TILE == 0, "tiles begin behind freed blocks");

/* One warp's 16 rows: queries, output, running maxima, this lane's share of the sums,
 * positions. */
template <int D> struct rows16 {
    uint32_t q[D / 16][4];
    float o[D / 8][4], m[2], l[2];
    int position[2];
};

/* Attends from the warp's rows to the key tile at `token`. */
template <typename T, int D>
__device__ __forceinline__ void attend_tile(rows16<D> &w, const attn_args &a, uint32_t keys,
                                            uint32_t values, const float *scales, int token,
                                            int lane)
{
    constexpr int ST = KEY_TILE / 8, NT = D / 8;
    int t4 = lane & 3;
    const float scale = (a.softcap > 0.0f ? a.scale : a.scale * LOG2E) * scale_of_keys(a);
    float sc[ST][4];

    scores_of<T, D>(sc, w.q, keys, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int position = w.position[h];
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < ST; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float v = __fmul_rn(sc[i][h * 2 + j], scale);
                if (scales) {
                    v = __fmul_rn(v, scales[i * 8 + t4 * 2 + j]);
                }
                if (a.softcap > 0.0f) {
                    v = __fmul_rn(soft_cap(v, a.softcap), LOG2E);
                }
                int at = token + i * 8 + t4 * 2 + j;
                if (at > position || (a.window > 0 && at <= position - a.window)) {
                    v = -INFINITY;
                }
                sc[i][h * 2 + j] = v;
                top = fmaxf(top, v);
            }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        /* -infinity: nothing seen yet */
        float next = fmaxf(w.m[h], top), base = next == -INFINITY ? 0.0f : next;
        float keep = exp2f(__fsub_rn(w.m[h], base)), add = 0.0f;
        w.m[h] = next;
#pragma unroll
        for (int i = 0; i < ST; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float p = exp2f(__fsub_rn(sc[i][h * 2 + j], base));
                sc[i][h * 2 + j] =
                    scales && p > 0.0f ? __fmul_rn(p, scales[KEY_TILE + i * 8 + t4 * 2 + j]) : p;
                add = __fadd_rn(add, p);
            }
        w.l[h] = __fadd_rn(__fmul_rn(w.l[h], keep), add);
#pragma unroll
        for (int i = 0; i < NT; i++) {
            w.o[i][h * 2] *= keep;
            w.o[i][h * 2 + 1] *= keep;
        }
    }
    add_values<T, D>(w.o, sc, values, scales, lane);
}

/* WARPS warps of 16 rows each. SINGLE: grid (head tile, sequence), rows are query heads
 * of one KV head; else grid (head, tile of tokens). */
template <typename T, int D, int WARPS, bool SINGLE, int STAGES>
__global__ void __launch_bounds__(WARPS * 32)
    attn_invariant_kernel(attn_args a, step_arrays s, const query_tile *tile)
{
    using L = key_ring<T, D, STAGES>;
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
    int group = a.n_heads / a.kv.n_kv_heads, head_tiles = (group + 15) / 16;
    query_tile mine;
    if (SINGLE) {
        int row = s.q_start[blockIdx.y], len = s.kv_len[blockIdx.y];
        mine = {s.row[blockIdx.y], row, row + 1, len - row - 1};
    } else {
        mine = tile[blockIdx.y];
    }
    int row0 = mine.first, shift = mine.shift;
    int kv_head = SINGLE ? blockIdx.x / head_tiles : blockIdx.x / group;
    int first = row0 + shift, end = mine.end + shift;
    int begin =
        a.window > 0 && first + 1 > a.window ? (first + 1 - a.window) / KEY_TILE * KEY_TILE : 0;
    if (end <= 0) {
        return; /* padding of a captured step */
    }

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

    rows16<D> w;
    /* element offset of the row within a token of qkv and of out; -1: no such row */
    int64_t at[2];
    int token[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = warp * 16 + g + h * 8;
        int head = SINGLE ? kv_head * group + blockIdx.x % head_tiles * 16 + r : blockIdx.x;
        token[h] = SINGLE ? row0 : row0 + r;
        bool real = SINGLE ? blockIdx.x % head_tiles * 16 + r < group : token[h] < mine.end;
        at[h] = real ? (int64_t)head * D : -1;
        w.position[h] = token[h] + shift;
        w.m[h] = -INFINITY;
        w.l[h] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int h = j & 1;
            const T *q =
                (const T *)a.qkv + token[h] * a.qkv_stride + at[h] + k * 16 + t4 * 2 + (j >> 1) * 8;
            w.q[k][j] = at[h] >= 0 ? *(const uint32_t *)q : 0;
        }
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        w.o[i][0] = w.o[i][1] = w.o[i][2] = w.o[i][3] = 0.0f;
    }
    bool busy = SINGLE || row0 + warp * 16 < mine.end;
    /* greatest position of the warp */
    int last = SINGLE ? first : min(first + warp * 16 + 15, end - 1);

    for (int n = 0; n < n_tiles; n++) {
        int stage = n % L::STAGES, key = begin + n * KEY_TILE;
        barrier_wait(bars + stage * 8, n / L::STAGES & 1);
        if (warp == 0) {
            copy_wait<L::STAGES - 1>();
        }
        if (!BULK_COPY) {
            __syncthreads();
        }
        uint32_t keys = ring + stage * L::STAGE;
        if (key + KEY_TILE > end) {
            clear_tokens<D, KEY_TILE>(shared + stage * L::STAGE + L::KV, end - key, threadIdx.x,
                                      blockDim.x);
            __syncthreads();
        }
        if (busy && key <= last) {
            const char *scales = shared + stage * L::STAGE + 2 * L::KV;
            attend_tile<T, D>(w, a, keys, keys + L::KV,
                              a.kv.dtype == T_I8 ? (const float *)scales : nullptr, key, lane);
        }
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
        w.l[h] += __shfl_xor_sync(0xffffffffu, w.l[h], 1);
        w.l[h] += __shfl_xor_sync(0xffffffffu, w.l[h], 2);
        if (at[h] < 0) {
            continue;
        }
        T *out = (T *)a.out + token[h] * a.out_stride + at[h];
        float r = scale_of_values(a) / __fadd_rn(w.l[h], sink_weight(a, (int)(at[h] / D), w.m[h]));
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            *(uint32_t *)(out + i * 8 + t4 * 2) =
                pack2<T>(w.o[i][h * 2] * r, w.o[i][h * 2 + 1] * r);
        }
    }
}

template <typename T, int D, int WARPS, bool SINGLE, int STAGES>
static void invariant_launch(const attn_args *a, const step_arrays *s, const query_tile *tile,
                             dim3 grid, cudaStream_t stream)
{
    launch(attn_invariant_kernel<T, D, WARPS, SINGLE, STAGES>, grid, dim3(WARPS * 32),
           key_ring<T, D, STAGES>::BYTES, stream, *a, *s, tile);
}

/* All kernels fit or none is used: decode and prefill give the same bits only if the
 * same arithmetic serves both. */
template <typename T, int D> static bool invariant_fits(void)
{
    constexpr int one = key_ring<T, D, 1>::BYTES, two = key_ring<T, D, 2>::BYTES;

    return allow_shared(attn_invariant_kernel<T, D, 1, true, 1>, one) &&
           allow_shared(attn_invariant_kernel<T, D, 1, true, 2>, two) &&
           allow_shared(attn_invariant_kernel<T, D, CHUNK_WARPS, false, 2>, two);
}

template <typename T, int D>
static bool invariant_both(const attn_args *a, const step_arrays *s, int32_t n_single,
                           const query_tile *tile, int32_t n_tiles, cudaStream_t stream)
{
    static const bool fits = invariant_fits<T, D>();

    if (!fits) {
        return false;
    }
    int group = a->n_heads / a->kv.n_kv_heads;
    dim3 pairs(a->kv.n_kv_heads * ((group + 15) / 16), n_single);
    /* Few pairs: two stages, so that loads overlap. Many: one stage, so that twice as
     * many blocks fit on a multiprocessor. */
    if (n_single > 0 && (int)pairs.x * n_single <= FEW_PAIRS) {
        invariant_launch<T, D, 1, true, 2>(a, s, nullptr, pairs, stream);
    } else if (n_single > 0) {
        invariant_launch<T, D, 1, true, 1>(a, s, nullptr, pairs, stream);
    }
    for (int32_t first = 0; first < n_tiles; first += 65535) {
        invariant_launch<T, D, CHUNK_WARPS, false, 2>(
            a, s, tile + first, dim3(a->n_heads, n_tiles - first < 65535 ? n_tiles - first : 65535),
            stream);
    }
    return true;
}

template <typename T>
static bool invariant_dispatch(const attn_args *a, const step_arrays *s, int32_t n_single,
                               const query_tile *tile, int32_t n_tiles, cudaStream_t stream)
{
    switch (a->kv.head_dim) {
    case 64:
        return invariant_both<T, 64>(a, s, n_single, tile, n_tiles, stream);
    case 80:
        return invariant_both<T, 80>(a, s, n_single, tile, n_tiles, stream);
    case 96:
        return invariant_both<T, 96>(a, s, n_single, tile, n_tiles, stream);
    case 128:
        return invariant_both<T, 128>(a, s, n_single, tile, n_tiles, stream);
    default:
        return false;
    }
}

extern "C" bool launch_attn_invariant(const struct attn_args *a, const struct step_arrays *s,
                                      int32_t n_single, const query_tile *tile, int32_t n_tiles,
                                      cudaStream_t stream)
{
    if (a->kv.panel_log2 == 0 || a->type == T_F32 || a->qkv_stride % 2 || a->out_stride % 2) {
        return false;
    }
    return a->type == T_F16
               ? invariant_dispatch<__half>(a, s, n_single, tile, n_tiles, stream)
               : invariant_dispatch<__nv_bfloat16>(a, s, n_single, tile, n_tiles, stream);
}
