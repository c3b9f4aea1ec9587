/* Paged prefill attention on Hopper: wgmma, warp-specialised as in FlashAttention-3,
 * with one producer and two consumer warpgroups.
 *
 * Blocks are persistent and take work tiles in turn, most keys first: 128 query rows of
 * one head, 64 per consumer warpgroup. The producer warps walk the block table and keep
 * two rings full with bulk copies, two warps for keys and two for values, tile after
 * tile (128 tokens; 64 for wide heads) and on into the next work tile; they read a
 * tile's block ids while they wait for a free stage. A consumer issues the scores of
 * tile j, then the product of tile j - 1's weights with its values, and computes the
 * softmax of tile j while the latter runs. The next work tile's queries are loaded
 * beside the current ones, or, for wide heads, once the current scores are done. wgmma
 * reads the cache's swizzled panels: keys as they are, values through its transposed
 * form.
 *
 * From a cache of 8 bits (C) the producer warps copy codes to a staging area and widen
 * them to float16 (T) on their way to the rings, which is exact. Each warp has a half
 * of the tile's tokens, in two parts, and copies a part of the next tile as soon as it
 * has widened this one's. Queries, of attn_args.type, are brought into float16's range
 * by QUERY_UNIT, weights as in attn_decode.cuh.
 */
#include "kernels/cuda/attention/attn_fragments.cuh"
#include "kernels/cuda/attention/attn_hopper_narrow.cuh"

/* Producer warps 0 to 3, two per ring. They take a tile's segments (16 tokens of a
 * panel; 8 if the block size is no multiple of 16) in turn, at most ROUNDS per lane. */
template <typename T, int D>
__device__ __forceinline__ void produce(const attn_args &a, const step_arrays &s,
                                        const query_tile *tile, int n_work,
                                        const hopper_shared<D, T> &sh, int warp, int lane)
{
    using P = panels<D>;
    constexpr int KEYS = hopper_layout<D>::KEYS, ROUNDS = (KEYS / 8 * P::COUNT + 63) / 64;
    int which = warp >> 1, index = lane * 2 + (warp & 1), bs = a.kv.block_size,
        segment = bs % 16 ? 8 : 16;
    /* of each of the lane's segments: panel, first token, block of this tile, of the
     * next */
    int panel[ROUNDS], at[ROUNDS], block[ROUNDS], next[ROUNDS];

#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        panel[i] = (index + i * 64) % P::COUNT;
        at[i] = (index + i * 64) / P::COUNT * segment;
    }
    pipeline_state r = {0, 1};
    uint32_t last_phase = 0;
    work_tile w;
    int4 ahead = query_tile_of(tile, 0, a.n_heads, n_work);
    for (int wave = 0; work_tile_of<D>(w, wave, ahead, a, n_work); wave++) {
        ahead = query_tile_of(tile, wave + 1, a.n_heads, n_work);
        int kv_head = w.head / (a.n_heads / a.kv.n_kv_heads);
        const T *base = (const T *)a.kv.base + a.layer * a.kv.layer_stride +
                        which * a.kv.kv_stride + kv_head * a.kv.head_stride;
        const int32_t *table = s.table + (int64_t)w.rows.row * s.table_width;
        auto mine = [&](int i, int token) { return at[i] < KEYS && token + at[i] < w.end; };
        auto find_blocks = [&](int(&ret)[ROUNDS], int token) {
#pragma unroll
            for (int i = 0; i < ROUNDS; i++)
                ret[i] = mine(i, token) ? table[(token + at[i]) / bs] : 0;
        };
        find_blocks(block, w.begin);
        for (int token = w.begin; token < w.end; token += KEYS) {
            find_blocks(next, token + KEYS);
            bool partial = which && token + KEYS > w.end;
            uint32_t bar = partial ? sh.last() : sh.full(which, r.stage),
                     to = sh.tile(which, r.stage);
            int rows = (min(KEYS, w.end - token) + segment - 1) / segment * segment;
            barrier_wait(sh.empty(which, r.stage), r.phase);
            random_delay();
            if (lane == 0) {
                /* half of the bytes; the ring's other warp announces the rest */
                barrier_expect(bar, rows * D);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                if (mine(i, token)) {
                    int64_t row = (int64_t)panel[i] * bs + (token + at[i]) % bs;
                    bulk_copy(to + (panel[i] * KEYS + at[i]) * P::ROW,
                              base + block[i] * a.kv.block_stride + row * P::WIDTH,
                              segment * P::ROW, bar);
                }
            }
            if (partial) {
                barrier_wait(bar, last_phase);
                last_phase ^= 1;
                clear_tokens<D, KEYS>((char *)__cvta_shared_to_generic(to), w.end - token,
                                      (warp & 1) * 32 + lane, 64);
                proxy_fence();
                __syncwarp();
                if (lane == 0) {
                    random_delay();
                    barrier_arrive(sh.full(1, r.stage));
                }
            }
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                block[i] = next[i];
            }
            r.advance();
        }
    }
}

template <typename C, int D>
__device__ __forceinline__ void queries_wait(uint32_t q_tile, int group, int thread, bool half)
{
#if BULK_COPY
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
    if (NARROW<C>) { /* a thread turns what it has fetched itself into float16 */
#pragma unroll
        for (int i = 0; i < GROUP_ROWS * D / 8 / 128; i++) {
            int n = i * 128 + thread, r = group * GROUP_ROWS + n / (D / 8), chunk = n % (D / 8);
            uint32_t at = q_tile + tile_at<D, ROWS>(r, chunk);
            uint4 v = load_shared16(at);
            auto narrow = [&](uint32_t x) {
                float2 f = unpack2_as(x, half);
                return pack2<__half>(f.x * QUERY_UNIT, f.y * QUERY_UNIT);
            };
            v = make_uint4(narrow(v.x), narrow(v.y), narrow(v.z), narrow(v.w));
            store_shared16(at, v);
        }
    }
    proxy_fence();
    group_sync(group);
}

/* Multiplies the scores by their keys' scales. */
template <int V, int KEYS>
__device__ __forceinline__ void scale_scores(fragments<V, KEYS> &x, const float *scales, int lane)
{
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
        float2 v = *(const float2 *)(scales + i * 8 + (lane & 3) * 2);
        x.s[i * 4] *= v.x, x.s[i * 4 + 1] *= v.y;
        x.s[i * 4 + 2] *= v.x, x.s[i * 4 + 3] *= v.y;
    }
}

/* Multiplies the weights by their values' scales, in units of x.unit, which grows with
 * them: `keep` then brings the output to the new one. */
template <int V, int KEYS>
__device__ __forceinline__ void scale_weights(fragments<V, KEYS> &x, const float *scales, int lane)
{
    float most = 0.0f;

#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
        float2 v = *(const float2 *)(scales + i * 8 + (lane & 3) * 2);
        most = fmaxf(most, fmaxf(v.x, v.y));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    if (most > x.unit) { /* the same in all lanes */
        float next = __uint_as_float((__float_as_uint(most) & 0x7f800000u) + 0x800000u);
        x.keep[0] *= x.unit / next, x.keep[1] *= x.unit / next;
        x.unit = next;
    }
    float over = 1.0f / x.unit;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
        float2 v = *(const float2 *)(scales + i * 8 + (lane & 3) * 2);
        v.x *= over, v.y *= over;
        x.s[i * 4] *= v.x, x.s[i * 4 + 1] *= v.y;
        x.s[i * 4 + 2] *= v.x, x.s[i * 4 + 3] *= v.y;
    }
}

template <typename T, typename C, int D, int KEYS>
__device__ __forceinline__ void write_rows(const fragments<D, KEYS> &x, const attn_args &a,
                                           const work_tile &w, int first, int lane)
{
    bool half = NARROW<C> ? a.type == T_F16 : std::is_same<T, __half>::value;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first + (lane >> 2) + h * 8;
        T *out = (T *)a.out + row * a.out_stride + (int64_t)w.head * D;
        float over = (SCALED<C> ? x.unit : a.v_scale) /
                     (sum_of_weights(x, h) + sink_weight(a, w.head, x.m[h]));
        write_row(x, h, over, out, row < w.rows.end, half, lane);
    }
}

/* Consumer warp 0 to 7, whose rows begin at 16 * warp. */
template <typename T, typename C, int D>
__device__ __forceinline__ void consume(const attn_args &a, const query_tile *tile, int n_work,
                                        const hopper_shared<D, C> &sh, int warp, int lane)
{
    constexpr int KEYS = hopper_layout<D>::KEYS;
    constexpr bool PREFETCH_Q = hopper_layout<D, C>::Q_STAGES == 2;
    int group = warp >> 2, thread = threadIdx.x & 127;
    const float scale = a.scale * a.k_scale * (NARROW<C> ? 1.0f / QUERY_UNIT : 1.0f),
                factor = a.softcap > 0.0f ? LOG2E : scale * LOG2E;
    bool leader = thread == 0;
    pipeline_state k = {}, v = {};
    fragments<D, KEYS> x;
    work_tile w = {}, next;
    int4 ahead = query_tile_of(tile, 1, a.n_heads, n_work);

    work_tile_of<D>(next, 0, query_tile_of(tile, 0, a.n_heads, n_work), a, n_work);
    queries_fetch<T, D>(a.qkv, a.qkv_stride, next, sh.queries(0), group, thread);
    /* softmax of tile j, whose scores are in x.s; frees the keys' stage */
    auto finish_scores = [&](int j) {
        const float *scales = nullptr;
        if (SCALED<C>) {
            scales =
                (const float *)__cvta_shared_to_generic(sh.scales(k.stage + STAGES * (int)k.phase));
            scale_scores(x, scales, lane);
        }
        if (leader) {
            random_delay();
            barrier_arrive(sh.empty(0, k.stage));
        }
        k.advance();
        if (a.softcap > 0.0f)
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                x.s[i] = soft_cap(x.s[i] * scale, a.softcap);
        mask(x, w.begin + j * KEYS, w.rows.first + w.rows.shift + warp * 16, a.window, lane);
        softmax<NARROW<C> ? NARROW_HEADROOM : 0>(x, factor);
        if (SCALED<C>) {
            scale_weights(x, scales + KEYS, lane);
        }
    };
    bool more = true;
    for (int wave = 0; more; wave++) {
        queries_wait<C, D>(sh.queries(wave), group, thread, a.type == T_F16);
        w = next;
        clear_sums(x);
        const uint32_t q = sh.queries(wave) + group * GROUP_ROWS * panels<D>::ROW;
        barrier_wait(sh.full(0, k.stage), k.phase);
        issue_scores<T, D>(x, q, sh.tile(0, k.stage));
        more = work_tile_of<D>(next, wave + 1, ahead, a, n_work);
        ahead = query_tile_of(tile, wave + 2, a.n_heads, n_work);
        if (PREFETCH_Q && more) {
            queries_fetch<T, D>(a.qkv, a.qkv_stride, next, sh.queries(wave + 1), group, thread);
        }
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
            /* ptxas keeps the wait below the softmax only if a basic block ends between
             * them, and the sums above it only if they are used: they are never
             * negative, so the condition is exact. */
            if (j + 1 < w.n_tiles || x.l[0] + x.l[1] < 0.0f) {
                barrier_wait(sh.full(0, k.stage), k.phase);
            }
            wgmma_wait<0>();
            if (leader) {
                random_delay();
                barrier_arrive(sh.empty(1, v.stage));
            }
            v.advance();
            rescale(x);
            pack_weights<T>(x);
        }
        barrier_wait(sh.full(1, v.stage), v.phase);
        issue_values<T>(x, sh.tile(1, v.stage));
        if (!PREFETCH_Q && more) {
            group_sync(group); /* all of the warpgroup's scores are done */
            queries_fetch<T, D>(a.qkv, a.qkv_stride, next, sh.queries(wave + 1), group, thread);
        }
        wgmma_wait<0>();
        if (leader) {
            random_delay();
            barrier_arrive(sh.empty(1, v.stage));
        }
        v.advance();
        write_rows<T, C, D>(x, a, w, w.rows.first + warp * 16, lane);
    }
}

/* Code without wgmma compiles to an empty kernel; its launch bounds prevent a launch
 * and tell the host that it is empty. */
enum { KERNEL_THREADS = HAS_WGMMA ? HOPPER_THREADS : 32 };

template <typename T, typename C, int D>
__global__ void __launch_bounds__(KERNEL_THREADS, 1)
    prefill_hopper_kernel(attn_args a, step_arrays s, const query_tile *tile, int n_work)
{
#if HAS_WGMMA
    extern __shared__ char raw[];
    hopper_shared<D, C> sh = {(shared_address(raw) + 1023) & ~1023u};
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == CONSUMER_THREADS) {
        for (int i = 0; i < 2 * STAGES; i++) {
            barrier_init(sh.full(0, i), 2);
            barrier_init(sh.empty(0, i), 2);
        }
        barrier_init(sh.last(), 2);
        for (int i = 0; i < 4 * hopper_layout<D>::PARTS && NARROW<C>; i++) {
            barrier_init(sh.staged(0, i), 1);
        }
        barrier_init_fence();
    }
    pdl_wait();
    pdl_release();
    __syncthreads();
    if (warp >= CONSUMER_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if constexpr (NARROW<C>) {
            produce_narrow<C, D>(a, s, tile, n_work, sh, warp - CONSUMER_THREADS / 32, lane);
        } else {
            produce<T, D>(a, s, tile, n_work, sh, warp - CONSUMER_THREADS / 32, lane);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume<T, C, D>(a, tile, n_work, sh, warp, lane);
    }
#endif
}

/* Blocks of the kernel, one per multiprocessor; 0 where it is empty or does not fit. */
template <typename T, typename C, int D> static int hopper_blocks(void)
{
    auto kernel = prefill_hopper_kernel<T, C, D>;
    cudaFuncAttributes made = {};
    int device = 0, n = 0;
    bool ok = cudaFuncGetAttributes(&made, kernel) == cudaSuccess &&
              made.maxThreadsPerBlock >= HOPPER_THREADS &&
              allow_shared(kernel, hopper_layout<D, C>::BYTES) &&
              cudaGetDevice(&device) == cudaSuccess &&
              cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;

    cudaGetLastError();
    return ok ? n : 0;
}

template <typename T, typename C, int D>
static bool hopper_launch(const attn_args *a, const step_arrays *s, const query_tile *tile,
                          int32_t n_tiles, cudaStream_t stream)
{
    static const int blocks = hopper_blocks<T, C, D>();
    int n_work = n_tiles * a->n_heads;

    if (blocks > 0) {
        launch(prefill_hopper_kernel<T, C, D>, dim3(n_work < blocks ? n_work : blocks),
               dim3(HOPPER_THREADS), hopper_layout<D, C>::BYTES, stream, *a, *s, tile, n_work);
    }
    return blocks > 0;
}

template <typename T, typename C>
static bool hopper_dispatch(const attn_args *a, const step_arrays *s, const query_tile *tile,
                            int32_t n, cudaStream_t stream)
{
    switch (a->kv.head_dim) {
    case 64:
        return hopper_launch<T, C, 64>(a, s, tile, n, stream);
    case 80:
        if constexpr (sizeof(C) > 1) {
            return hopper_launch<T, C, 80>(a, s, tile, n, stream);
        }
        return false;
    case 96:
        return hopper_launch<T, C, 96>(a, s, tile, n, stream);
    case 128:
        return hopper_launch<T, C, 128>(a, s, tile, n, stream);
    case 256:
        return hopper_launch<T, C, 256>(a, s, tile, n, stream);
    default:
        return false;
    }
}

extern "C" bool launch_attn_prefill_hopper(const struct attn_args *a, const struct step_arrays *s,
                                           const query_tile *tile, int32_t n_tiles,
                                           cudaStream_t stream)
{
    if (a->kv.panel_log2 == 0 || a->type == T_F32 || a->qkv_stride % 8 || (uintptr_t)a->qkv % 16 ||
        a->out_stride % 8 || (uintptr_t)a->out % 16) {
        return false;
    }
    if (kv_narrow(a->kv)) {
        return a->kv.dtype == T_F8 ? hopper_dispatch<__half, uint8_t>(a, s, tile, n_tiles, stream)
                                   : hopper_dispatch<__half, int8_t>(a, s, tile, n_tiles, stream);
    }
    return a->type == T_F16
               ? hopper_dispatch<__half, __half>(a, s, tile, n_tiles, stream)
               : hopper_dispatch<__nv_bfloat16, __nv_bfloat16>(a, s, tile, n_tiles, stream);
}
