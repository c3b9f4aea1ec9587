/* Prefill attention over heads expanded from latents, on Hopper: the kernel of
 * attn_prefill_sm90.cu for keys wider than values that lie in memory row by row.
 *
 * A key is its head's own part, a row of k, and the rotated part that all heads share,
 * at the end of a row of latents; both have panels of 64 dims, which tensor copies
 * bring swizzled. Of the two producing threads one fills the ring of keys, the other
 * that of values. Sequences begin at multiples of EXPANDED_ALIGN rows, and rows up to
 * the next one are zeros: no tile has a row of another sequence.
 */
#include "kernels/cuda/attention/attn_fragments.cuh"
#include "kernels/cuda/attention/latent_expanded.h"
#include "kernels/cuda/gemm/tensor_map.cuh"

enum { ROT = 64, PANEL = 64, GATHER_WARPS = 8 };

/* ---- gathering latents ---- */

/* The sequence that has row `row`. */
__device__ __forceinline__ expanded_seq expanded_seq_of(const expanded_seq *seq, int n, int row)
{
    return seq[last_begun(0, n, row, [&](int i) { return seq[i].first; })];
}

/* A warp a row, of kv.head_dim elements of 16 bits. */
__global__ void __launch_bounds__(GATHER_WARPS * 32)
    latent_gather_kernel(uint16_t *out, kv_view kv, int layer, step_arrays s,
                         const expanded_seq *seq, int n_seqs, int n_rows)
{
    pdl_release();
    pdl_wait();
    int lane = threadIdx.x & 31, row = blockIdx.x * GATHER_WARPS + (threadIdx.x >> 5);
    if (row >= n_rows) {
        return;
    }
    expanded_seq q = expanded_seq_of(seq, n_seqs, row);
    int token = row - q.first, chunks = kv.head_dim / 8;
    bool real = token < q.n_keys;
    token = real ? token : 0;
    int block = s.table[(int64_t)q.row * s.table_width + token / kv.block_size];
    const uint16_t *from = (const uint16_t *)kv.base + layer * kv.layer_stride +
                           block * kv.block_stride + (int64_t)(token % kv.block_size) * kv.head_dim;
    uint4 *to = (uint4 *)(out + (int64_t)row * kv.head_dim);
    for (int i = lane; i < chunks; i += 32) {
        to[i] = real ? __ldcg((const uint4 *)from + i) : make_uint4(0, 0, 0, 0);
    }
}

extern "C" void launch_latent_gather(void *out, const struct kv_view *kv, int32_t layer,
                                     const struct step_arrays *s, const struct expanded_seq *seq,
                                     int32_t n_seqs, int32_t n_rows, cudaStream_t stream)
{
    launch(latent_gather_kernel, dim3((n_rows + GATHER_WARPS - 1) / GATHER_WARPS),
           dim3(GATHER_WARPS * 32), 0, stream, (uint16_t *)out, *kv, layer, *s, seq, n_seqs,
           n_rows);
}

/* ---- attention ---- */

struct expanded_maps {
    CUtensorMap k, rot, v;
};

/* Of heads with NOPE dims of a key's own and values of V dims: shared memory. */
template <int NOPE, int V> struct expanded_shared {
    static constexpr int D = NOPE + ROT, KEYS = V > 128 ? 64 : 128; /* of a tile */
    static constexpr int Q = ROWS * D * 2, K_TILE = KEYS * D * 2, V_TILE = KEYS * V * 2;
    static constexpr int BYTES = Q + STAGES * (K_TILE + V_TILE) + 4 * STAGES * 8 + 1024;
    uint32_t base;
    __device__ uint32_t queries(void) const
    {
        return base;
    }
    __device__ uint32_t tile(int which, int stage) const
    {
        return base + Q + (which ? STAGES * K_TILE + stage * V_TILE : stage * K_TILE);
    }
    __device__ uint32_t full(int which, int stage) const
    {
        return tile(1, STAGES) + (which * STAGES + stage) * 8;
    }
    __device__ uint32_t empty(int which, int stage) const
    {
        return full(2 + which, stage);
    }
};

/* The block's work tile in `wave`, with its query tile t. False: there is none. */
template <int KEYS>
__device__ __forceinline__ bool expanded_tile_of(work_tile &w, int wave, int4 t, int n_heads,
                                                 int n_work)
{
    int i = work_tile_index(wave);

    w.rows = {t.x, t.y, t.z, t.w};
    w.head = i % n_heads;
    w.begin = 0;
    w.end = t.z + t.w;
    w.n_tiles = (w.end + KEYS - 1) / KEYS;
    return i < n_work;
}

/* One thread: the ring of keys (which 0) or of values. */
template <int NOPE, int V>
__device__ __forceinline__ void produce(const expanded_maps &m, const expanded_args &a,
                                        const query_tile *tile, int n_work,
                                        const expanded_shared<NOPE, V> &sh, int which)
{
    using S = expanded_shared<NOPE, V>;
    constexpr int BYTES = S::KEYS * PANEL * 2; /* of a panel */
    pipeline_state r = {0, 1};
    work_tile w;

    for (int wave = 0; expanded_tile_of<S::KEYS>(
             w, wave, query_tile_of(tile, wave, a.n_heads, n_work), a.n_heads, n_work);
         wave++) {
        for (int j = 0; j < w.n_tiles; j++) {
            uint32_t bar = sh.full(which, r.stage), to = sh.tile(which, r.stage);
            int row = w.rows.row + j * S::KEYS;
            barrier_wait(sh.empty(which, r.stage), r.phase);
            random_delay();
            barrier_expect(bar, which ? S::V_TILE : S::K_TILE);
            if (which) {
                for (int i = 0; i < V / PANEL; i++) {
                    tensor_copy(to + i * BYTES, &m.v, w.head * V + i * PANEL, row, bar);
                }
            } else {
                for (int i = 0; i < NOPE / PANEL; i++) {
                    tensor_copy(to + i * BYTES, &m.k, w.head * NOPE + i * PANEL, row, bar);
                }
                tensor_copy(to + NOPE / PANEL * BYTES, &m.rot, 0, row, bar);
            }
            r.advance();
        }
    }
}

/* Its warpgroup's queries are there, for wgmma. */
__device__ __forceinline__ void queries_arrived(int group)
{
#if BULK_COPY
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
    proxy_fence();
    group_sync(group);
}

template <typename T, int V, int KEYS>
__device__ __forceinline__ void write_rows(const fragments<V, KEYS> &x, const expanded_args &a,
                                           const work_tile &w, int first, int lane)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first + (lane >> 2) + h * 8;
        T *out = (T *)a.out + row * a.out_stride + (int64_t)w.head * V;
        write_row(x, h, 1.0f / sum_of_weights(x, h), out, row < w.rows.end,
                  std::is_same<T, __half>::value, lane);
    }
}

/* Consumer warp 0 to 7, whose rows begin at 16 * warp. The order of waits is that of
 * attn_prefill_sm90.cu. */
template <typename T, int NOPE, int V>
__device__ __forceinline__ void consume(const expanded_args &a, const query_tile *tile, int n_work,
                                        const expanded_shared<NOPE, V> &sh, int warp, int lane)
{
    constexpr int D = NOPE + ROT, KEYS = expanded_shared<NOPE, V>::KEYS;
    int group = warp >> 2, thread = threadIdx.x & 127;
    const float factor = a.scale * LOG2E;
    const uint32_t q = sh.queries() + group * GROUP_ROWS * panels<D>::ROW;
    bool leader = thread == 0, more = true;
    pipeline_state k = {}, v = {};
    fragments<V, KEYS> x;
    work_tile w = {}, next;
    int4 ahead = query_tile_of(tile, 1, a.n_heads, n_work);

    expanded_tile_of<KEYS>(next, 0, query_tile_of(tile, 0, a.n_heads, n_work), a.n_heads, n_work);
    queries_fetch<T, D>(a.q, a.q_stride, next, sh.queries(), group, thread);
    auto arrive = [&](uint32_t bar) {
        if (leader) {
            random_delay();
            barrier_arrive(bar);
        }
    };
    /* softmax of tile j, whose scores are in x.s; frees the keys' stage */
    auto finish_scores = [&](int j) {
        arrive(sh.empty(0, k.stage));
        k.advance();
        mask(x, j * KEYS, w.rows.first + w.rows.shift + warp * 16, 0, lane);
        softmax<0>(x, factor);
    };
    for (int wave = 0; more; wave++) {
        queries_arrived(group);
        w = next;
        clear_sums(x);
        barrier_wait(sh.full(0, k.stage), k.phase);
        issue_scores<T, D>(x, q, sh.tile(0, k.stage));
        more = expanded_tile_of<KEYS>(next, wave + 1, ahead, a.n_heads, n_work);
        ahead = query_tile_of(tile, wave + 2, a.n_heads, n_work);
        wgmma_wait<0>();
        finish_scores(0);
        pack_weights<T>(x);
        for (int j = 1; j < w.n_tiles; j++) {
            barrier_wait(sh.full(0, k.stage), k.phase);
            issue_scores<T, D>(x, q, sh.tile(0, k.stage));
            barrier_wait(sh.full(1, v.stage), v.phase);
            issue_values<T>(x, sh.tile(1, v.stage));
            wgmma_wait<1>();
            finish_scores(j);
            /* as in attn_prefill_sm90.cu: for ptxas */
            if (j + 1 < w.n_tiles || x.l[0] + x.l[1] < 0.0f) {
                barrier_wait(sh.full(0, k.stage), k.phase);
            }
            wgmma_wait<0>();
            arrive(sh.empty(1, v.stage));
            v.advance();
            rescale(x);
            pack_weights<T>(x);
        }
        barrier_wait(sh.full(1, v.stage), v.phase);
        issue_values<T>(x, sh.tile(1, v.stage));
        if (more) {
            group_sync(group); /* all of the warpgroup's scores are done */
            queries_fetch<T, D>(a.q, a.q_stride, next, sh.queries(), group, thread);
        }
        wgmma_wait<0>();
        arrive(sh.empty(1, v.stage));
        v.advance();
        write_rows<T>(x, a, w, w.rows.first + warp * 16, lane);
    }
}

/* Code without wgmma compiles to an empty kernel; its launch bounds tell the host. */
enum { KERNEL_THREADS = HAS_WGMMA ? HOPPER_THREADS : 32 };

template <typename T, int NOPE, int V>
__global__ void __launch_bounds__(KERNEL_THREADS, 1)
    latent_expanded_kernel(const __grid_constant__ expanded_maps m, expanded_args a,
                           const query_tile *tile, int n_work)
{
#if HAS_WGMMA
    extern __shared__ char raw[];
    expanded_shared<NOPE, V> sh = {(shared_address(raw) + 1023) & ~1023u};
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, producer = warp - CONSUMER_THREADS / 32;
    if (threadIdx.x == CONSUMER_THREADS) {
        for (int i = 0; i < 2 * STAGES; i++) {
            barrier_init(sh.full(0, i), 1);
            barrier_init(sh.empty(0, i), 2);
        }
        barrier_init_fence();
    }
    pdl_wait();
    pdl_release();
    __syncthreads();
    if (producer >= 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (producer < 2 && lane == 0) {
            produce<NOPE, V>(m, a, tile, n_work, sh, producer);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume<T, NOPE, V>(a, tile, n_work, sh, warp, lane);
    }
#endif
}

/* Blocks of the kernel, one per multiprocessor; 0 where it is empty or does not fit. */
template <typename T, int NOPE, int V> static int expanded_blocks(void)
{
    static const int blocks = [] {
        auto kernel = latent_expanded_kernel<T, NOPE, V>;
        cudaFuncAttributes made = {};
        bool ok = cudaFuncGetAttributes(&made, kernel) == cudaSuccess &&
                  made.maxThreadsPerBlock >= HOPPER_THREADS &&
                  allow_shared(kernel, expanded_shared<NOPE, V>::BYTES) && tensor_map_encoder();
        cudaGetLastError();
        return ok ? cuda_multiprocessors() : 0;
    }();

    return blocks;
}

template <typename T, int NOPE, int V>
static bool expanded_launch(const expanded_args &a, const query_tile *tile, int n_tiles,
                            cudaStream_t stream)
{
    using S = expanded_shared<NOPE, V>;
    int n_work = n_tiles * a.n_heads, blocks = expanded_blocks<T, NOPE, V>();
    expanded_maps m;

    if (!tensor_map_16(&m.k, a.type, a.k, a.n_keys, (int64_t)a.n_heads * NOPE,
                       (int64_t)a.n_heads * NOPE, S::KEYS) ||
        !tensor_map_16(&m.v, a.type, a.v, a.n_keys, (int64_t)a.n_heads * V, (int64_t)a.n_heads * V,
                       S::KEYS) ||
        !tensor_map_16(&m.rot, a.type, (const uint16_t *)a.latents + a.latent, a.n_keys, ROT,
                       a.latent + ROT, S::KEYS)) {
        return false;
    }
    launch(latent_expanded_kernel<T, NOPE, V>, dim3(n_work < blocks ? n_work : blocks),
           dim3(HOPPER_THREADS), S::BYTES, stream, m, a, tile, n_work);
    return true;
}

/* tile NULL: only whether there is such a kernel. */
template <typename T>
static bool expanded_dispatch(const expanded_args &a, const query_tile *tile, int n_tiles,
                              cudaStream_t stream)
{
    if (a.nope_dim == 128 && a.v_dim == 128) {
        return tile ? expanded_launch<T, 128, 128>(a, tile, n_tiles, stream)
                    : expanded_blocks<T, 128, 128>() > 0;
    }
    if (a.nope_dim == 192 && a.v_dim == 256) {
        return tile ? expanded_launch<T, 192, 256>(a, tile, n_tiles, stream)
                    : expanded_blocks<T, 192, 256>() > 0;
    }
    return false;
}

static bool expanded_by_type(const expanded_args &a, const query_tile *tile, int n_tiles,
                             cudaStream_t stream)
{
    return a.type == T_F16    ? expanded_dispatch<__half>(a, tile, n_tiles, stream)
           : a.type == T_BF16 ? expanded_dispatch<__nv_bfloat16>(a, tile, n_tiles, stream)
                              : false;
}

extern "C" bool latent_expanded_takes(const struct expanded_args *a)
{
    return a->rot_dim == ROT && a->latent % 64 == 0 && a->q_stride % 8 == 0 &&
           (uintptr_t)a->q % 16 == 0 && a->out_stride % 8 == 0 && (uintptr_t)a->out % 16 == 0 &&
           expanded_by_type(*a, NULL, 0, NULL);
}

extern "C" bool launch_latent_expanded(const struct expanded_args *a, const struct query_tile *tile,
                                       int32_t n_tiles, cudaStream_t stream)
{
    return expanded_by_type(*a, tile, n_tiles, stream);
}
