/* Paged prefill attention on Hopper: wgmma with one loading warp and two computing warpgroups.
 *
 * A block takes 128 query rows of one head, 64 a warpgroup. The loading warp walks the block table and keeps a ring of key
 * and value tiles (128 tokens) full with bulk copies, a lane a piece; keys and values have barriers of their own, so
 * that a product starts as soon as its operand is there. A warpgroup issues the scores of tile j, then the product of
 * tile j - 1's weights with its values, and computes the softmax of tile j while the latter runs. The cache's swizzled
 * panels are what wgmma reads: keys as they are, values through its transposed form.
 */
#include "kernels/cuda/attn_common.cuh"
#include "kernels/cuda/wgmma.cuh"

enum { ROWS = ATTN_PREFILL_ROWS, KEYS = 128, COMPUTE = 256, HOPPER_THREADS = COMPUTE + 128, RING_STAGES = 2 };

template <int D> struct hopper_layout {
    static constexpr int PANELS = D / 64;
    static constexpr int Q = ROWS * D * 2, TILE = KEYS * D * 2; /* bytes; a panel is [rows][64] */
    static constexpr int BYTES = Q + 2 * RING_STAGES * TILE + 4 * RING_STAGES * 8 + 1024;
};

__device__ __forceinline__ void arrive(uint32_t bar)
{
#if BULK_COPY
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

__device__ __forceinline__ void compute_sync(void) { asm volatile("bar.sync 1, 256;" ::: "memory"); }

/* Keys (which 0) or values (1) of tokens [token, token + KEYS) as far as they lie before `end`. One warp. */
template <typename T, int D>
__device__ __forceinline__ void fetch(const attn_args &a, const T *head_base, const int32_t *table, int token, int end, int which,
                                      uint32_t to, uint32_t bar, int lane)
{
    constexpr int PANELS = D / 64;
    int bs = a.kv.block_size, piece = bs < 16 ? 8 : 16, n = (min(KEYS, end - token) + piece - 1) / piece;
    if (lane == 0)
        barrier_expect(bar, n * piece * D * 2);
    __syncwarp();
    for (int i = lane; i < n * PANELS; i += 32) {
        int c = i / PANELS, panel = i % PANELS, t = token + c * piece;
        const T *from = head_base + table[t / bs] * a.kv.block_stride + which * a.kv.kv_stride + (int64_t)panel * bs * 64 + t % bs * 64;
        bulk_copy(to + panel * KEYS * 128 + c * piece * 128, from, piece * 128, bar);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(HOPPER_THREADS, 1) prefill_hopper_kernel(attn_args a, step_arrays s, const int32_t *tile)
{
#if HAS_WGMMA
    using L = hopper_layout<D>;
    extern __shared__ char raw[];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t q_tile = (shared_address(raw) + 1023) & ~1023u;
    char *base = raw + (q_tile - shared_address(raw));
    uint32_t k_ring = q_tile + L::Q, v_ring = k_ring + RING_STAGES * L::TILE, bars = v_ring + RING_STAGES * L::TILE;
    uint32_t k_full = bars, v_full = bars + RING_STAGES * 8, k_empty = bars + 2 * RING_STAGES * 8, v_empty = bars + 3 * RING_STAGES * 8;
    if (threadIdx.x == COMPUTE) {
        for (int i = 0; i < RING_STAGES; i++) {
            barrier_init(k_full + i * 8, 1);
            barrier_init(v_full + i * 8, 1);
            barrier_init(k_empty + i * 8, 2);
            barrier_init(v_empty + i * 8, 2);
        }
        barrier_init_fence();
    }
    pdl_wait();
    pdl_release();
    int seq = tile[2 * blockIdx.y], row0 = tile[2 * blockIdx.y + 1], head = blockIdx.x;
    int q_end = s.q_start[seq + 1], shift = s.kv_len[seq] - q_end; /* position of token row = row + shift */
    int end = min(row0 + ROWS, q_end) + shift, first = row0 + shift;
    int begin = a.window > 0 && first + 1 > a.window ? (first + 1 - a.window) / 16 * 16 : 0;
    int n_tiles = (end - begin + KEYS - 1) / KEYS;
    __syncthreads();

    if (warp >= COMPUTE / 32) { /* the loader: one warp of the third warpgroup, which gives its registers to the others */
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        int kv_head = head / (a.n_heads / a.kv.n_kv_heads);
        const T *head_base = (const T *)a.kv.base + a.layer * a.kv.layer_stride + kv_head * a.kv.head_stride;
        const int32_t *table = s.table + (int64_t)s.row[seq] * s.table_width;
        for (int j = 0; warp == COMPUTE / 32 && j < n_tiles; j++) {
            int stage = j % RING_STAGES;
            for (int which = 0; which < 2; which++) {
                if (j >= RING_STAGES)
                    barrier_wait((which ? v_empty : k_empty) + stage * 8, (j / RING_STAGES - 1) & 1);
                fetch<T, D>(a, head_base, table, begin + j * KEYS, end, which, (which ? v_ring : k_ring) + stage * L::TILE,
                            (which ? v_full : k_full) + stage * 8, lane);
            }
        }
    } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int group = warp >> 2, g = lane >> 2, t4 = lane & 3;
    /* queries: rows of the tile, swizzled panels; rows past the sequence are zero */
    for (int i = threadIdx.x; i < ROWS * D / 8; i += COMPUTE) {
        int r = i / (D / 8), chunk = i % (D / 8);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row0 + r < q_end)
            v = *(const uint4 *)((const T *)a.qkv + (row0 + r) * a.qkv_stride + (int64_t)head * D + chunk * 8);
        *(uint4 *)(base + (chunk >> 3) * ROWS * 128 + r * 128 + (((chunk & 7) ^ (r & 7)) << 4)) = v;
    }
    proxy_fence();
    compute_sync();

    int warp_row = row0 + group * 64 + (warp & 3) * 16; /* first row of this warp */
    int row[2] = {warp_row + g, warp_row + g + 8};
    float o[D / 2], sc[KEYS / 2], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f}, keep[2];
    uint32_t p[KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        o[i] = 0.0f;
    const float scale = a.softcap > 0.0f ? a.scale : a.scale * LOG2E;
    const uint64_t dq = wgmma_descriptor(q_tile + group * 64 * 128);

    auto issue_scores = [&](int j) {
        uint64_t dk = wgmma_descriptor(k_ring + j % RING_STAGES * L::TILE);
        barrier_wait(k_full + j % RING_STAGES * 8, j / RING_STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            wgmma_ss<T, KEYS>::run(sc, dq + (k / 4) * (ROWS * 128 / 16) + k % 4 * 2, dk + (k / 4) * (KEYS * 128 / 16) + k % 4 * 2,
                                   k > 0);
        wgmma_commit();
    };
    auto issue_values = [&](int j) {
        uint32_t v = v_ring + j % RING_STAGES * L::TILE;
        barrier_wait(v_full + j % RING_STAGES * 8, j / RING_STAGES & 1);
        int from = end - (begin + j * KEYS);
        if (from < KEYS) { /* what lies past the end may be anything: 0 * NaN is NaN */
            int count = KEYS - from;
            for (int i = threadIdx.x; i < L::PANELS * count * 8; i += COMPUTE)
                *(uint4 *)(base + (v - q_tile) + i / (count * 8) * KEYS * 128 + (from + i % (count * 8) / 8) * 128 + i % 8 * 16) =
                    make_uint4(0, 0, 0, 0);
            proxy_fence();
            compute_sync();
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            wgmma_rs<T, D>::run(o, p[k], wgmma_descriptor_n(v + k * 16 * 128, KEYS * 128));
        wgmma_commit();
    };
    auto softmax = [&](int j) {
        int token = begin + j * KEYS, position = warp_row + shift;
        bool edge = token + KEYS - 1 > position || (a.window > 0 && token <= position + 15 - a.window);
        if (a.softcap > 0.0f)
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                sc[i] = soft_cap(sc[i] * a.scale, a.softcap);
        if (edge)
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                int at = token + i / 4 * 8 + t4 * 2 + (i & 1), mine = row[i >> 1 & 1] + shift;
                if (at > mine || (a.window > 0 && at <= mine - a.window))
                    sc[i] = -INFINITY;
            }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = -INFINITY;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
                top = fmaxf(top, fmaxf(sc[i * 4 + h * 2], sc[i * 4 + h * 2 + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            float factor = a.softcap > 0.0f ? LOG2E : scale;
            float next = fmaxf(m[h], top * factor), from = next == -INFINITY ? 0.0f : next;
            keep[h] = fast_exp2(m[h] - from);
            m[h] = next;
            float add = 0.0f;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    float e = fast_exp2(sc[i * 4 + h * 2 + x] * factor - from);
                    sc[i * 4 + h * 2 + x] = e;
                    add += e;
                }
            l[h] = l[h] * keep[h] + add;
        }
    };
    auto pack_weights = [&] {
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            p[k][0] = pack2<T>(sc[k * 8], sc[k * 8 + 1]);
            p[k][1] = pack2<T>(sc[k * 8 + 2], sc[k * 8 + 3]);
            p[k][2] = pack2<T>(sc[k * 8 + 4], sc[k * 8 + 5]);
            p[k][3] = pack2<T>(sc[k * 8 + 6], sc[k * 8 + 7]);
        }
    };

    bool speaker = (threadIdx.x & 127) == 0;
    issue_scores(0);
    wgmma_wait<0>();
    if (speaker)
        arrive(k_empty);
    softmax(0);
    pack_weights();
    for (int j = 1; j < n_tiles; j++) {
        issue_scores(j);
        issue_values(j - 1);
        wgmma_wait<1>();
        if (speaker)
            arrive(k_empty + j % RING_STAGES * 8);
        softmax(j);
        wgmma_wait<0>();
        if (speaker)
            arrive(v_empty + (j - 1) % RING_STAGES * 8);
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            o[i] *= keep[i >> 1 & 1];
        pack_weights();
    }
    issue_values(n_tiles - 1);
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
        if (row[h] < q_end) {
            T *out = (T *)a.out + row[h] * a.out_stride + (int64_t)head * D;
            float r = 1.0f / l[h];
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                *(uint32_t *)(out + i * 8 + t4 * 2) = pack2<T>(o[i * 4 + h * 2] * r, o[i * 4 + h * 2 + 1] * r);
        }
    }
    }
#endif
}

template <typename T, int D>
static bool hopper_launch(const attn_args *a, const step_arrays *s, const int32_t *tile, int32_t n, cudaStream_t stream)
{
    static bool ready;
    constexpr int bytes = hopper_layout<D>::BYTES;
    auto kernel = prefill_hopper_kernel<T, D>;
    if (!ready) {
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
            return false;
        ready = true;
    }
    for (int32_t first = 0; first < n; first += 65535)
        launch(kernel, dim3(a->n_heads, n - first < 65535 ? n - first : 65535), dim3(HOPPER_THREADS), bytes, stream, *a, *s,
               tile + 2 * first);
    return true;
}

extern "C" bool launch_attn_prefill_hopper(const struct attn_args *a, const struct step_arrays *s, const int32_t *tile,
                                           int32_t n_tiles, cudaStream_t stream)
{
    if (!a->kv.swizzled || a->qkv_stride % 8 || (uintptr_t)a->qkv % 16 || a->out_stride % 2)
        return false;
    bool half = a->kv.dtype == T_F16;
    switch (a->kv.head_dim) {
    case 64:
        return half ? hopper_launch<__half, 64>(a, s, tile, n_tiles, stream) : hopper_launch<__nv_bfloat16, 64>(a, s, tile, n_tiles, stream);
    case 128:
        return half ? hopper_launch<__half, 128>(a, s, tile, n_tiles, stream) : hopper_launch<__nv_bfloat16, 128>(a, s, tile, n_tiles, stream);
    default: return false;
    }
}
