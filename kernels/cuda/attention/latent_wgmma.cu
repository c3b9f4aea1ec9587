/* Attention over latents of 512 and a rotated key of 64 dims on Hopper: wgmma,
 * warp-specialised.
 *
 * A block computes 64 query rows, heads of one token, over tiles of 64 keys in a ring
 * of three stages. One warpgroup holds the queries in registers and turns tiles into
 * weights; two others each sum up 256 dims of the values, which are the keys' first
 * 512. The weights of a tile take the place of its rotated keys, which only scores
 * need, so that a stage holds all there is of a tile until both sums are done.
 *
 * A tile lies in shared memory as groups of eight keys, a group as nine panels of 64
 * dims: a tensor copy brings a group whatever the size of blocks, and both products
 * reach all of the tile with one stride.
 */
#include "kernels/cuda/attention/latent.cuh"
#include "kernels/cuda/attention/latent.h"
#include "kernels/cuda/gemm/async_copy.cuh"
#include "kernels/cuda/gemm/tensor_map.cuh"
#include "kernels/cuda/gemm/wgmma.cuh"

/* Weights count from a maximum that may be behind by so many powers of two: sums are
 * rescaled when it is behind by more, which is seldom. */
#define SLACK 6.0f

enum {
    LATENT = 512,
    WIDTH = 576,
    ROWS = 64,
    KEYS = LATENT_KEYS,
    PANELS = WIDTH / 64,
    GROUP = PANELS * 1024, /* bytes of eight keys */
    STAGE = KEYS / 8 * GROUP,
    STAGES = 3,
    STEPS = WIDTH / 16,
    Q_PANEL = ROWS * 128, /* bytes of 64 dims of the queries */
    HELD = 31, /* steps of 16 dims of queries in registers; the others are in shared memory */
    THREADS = 384
};

/* Shared-memory addresses. */
struct latent_shared {
    uint32_t base;
    static constexpr int LAST = STAGES * STAGE + Q_PANEL, KEEP = LAST + ROWS * 32,
                         BARS = KEEP + STAGES * ROWS * 4, BYTES = BARS + (STAGES * 3 + 2) * 8;
    __device__ uint32_t tile(int stage) const
    {
        return base + stage * STAGE;
    }
    /* the weights of a tile, eight rows of 64 keys a group */
    __device__ uint32_t weights(int stage) const
    {
        return tile(stage) + LATENT / 64 * 1024;
    }
    /* the queries' rotated ends */
    __device__ uint32_t tail(void) const
    {
        return tile(STAGES);
    }
    /* the queries' latent dims from 16 * HELD on, in rows of 32 bytes */
    __device__ uint32_t last(void) const
    {
        return base + LAST;
    }
    /* factors of what was summed before a tile, [64] */
    __device__ float *keep(int stage) const
    {
        return (float *)__cvta_shared_to_generic(base + KEEP) + stage * ROWS;
    }
    /* greatest score and sum of weights of each row, [64][2], once all is scored: in
     * the place of the rotated ends */
    __device__ float2 *stats(void) const
    {
        return (float2 *)__cvta_shared_to_generic(tail());
    }
    __device__ uint32_t full(int stage) const
    {
        return base + BARS + stage * 8;
    }
    __device__ uint32_t ready(int stage) const
    {
        return full(STAGES + stage);
    }
    __device__ uint32_t empty(int stage) const
    {
        return ready(STAGES + stage);
    }
    /* the queries have left the last stage */
    __device__ uint32_t loaded(void) const
    {
        return empty(STAGES);
    }
    /* the rows' statistics are there */
    __device__ uint32_t done(void) const
    {
        return loaded() + 8;
    }
};

struct ring {
    int stage;
    uint32_t phase;
    __device__ __forceinline__ void advance(void)
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* Descriptor of an operand in rows of 128 bytes, swizzled. `sbo`: bytes from eight rows
 * to the next; `lbo`: from a panel to the next, of an operand stored with its depth in
 * rows. */
__device__ __forceinline__ uint64_t operand(uint32_t at, int sbo, int lbo)
{
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(lbo >> 4) << 16 |
           (uint64_t)(sbo >> 4) << 32 | 1ull << 62;
}

/* Eight keys. */
__device__ __forceinline__ void copy_group(uint32_t to, const CUtensorMap *map, int token,
                                           int layer, int block, uint32_t bar)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
                 "l"(map), "r"(0), "r"(token), "r"(0), "r"(layer), "r"(block), "r"(bar)
                 : "memory");
#endif
}

/* The group of a tile that this summing warp copies. */
__device__ __forceinline__ int my_group(void)
{
    return (threadIdx.x >> 5) - 4;
}

/* The block of the warp's group of the tile at `key`; any one if it has no keys. */
__device__ __forceinline__ int block_at(const int32_t *table, int key, int hi, int block_size)
{
    return table[min(key + my_group() * 8, hi - 1) / block_size];
}

/* The warp's copy of the tile at `key`, of keys up to hi; called by one lane. */
__device__ __forceinline__ void load_group(const CUtensorMap *map, const latent_args &a, int block,
                                           int key, int hi, const latent_shared &sh, int stage)
{
    int at = key + my_group() * 8;

    random_delay();
    if (at < hi) {
        barrier_expect(sh.full(stage), GROUP);
        copy_group(sh.tile(stage) + my_group() * GROUP, map, at % a.kv.block_size, a.layer, block,
                   sh.full(stage));
    } else {
        barrier_arrive(sh.full(stage));
    }
}

__device__ __forceinline__ uint32_t panel_at(uint32_t row, uint32_t chunk)
{
    return row * 128 + ((chunk ^ (row & 7)) << 4);
}

/* Syncs the scoring warpgroup. */
__device__ __forceinline__ void scorers_sync(void)
{
    random_delay();
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

/* Queries into registers, by way of the last stage; rows that are not real are
 * zeros. */
template <typename T>
__device__ __forceinline__ void load_queries(uint32_t (&q)[HELD][4], const latent_args &a,
                                             const tile_rows &w, const latent_shared &sh)
{
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane & 15);
    uint32_t to = sh.tile(STAGES - 1);

    for (int i = threadIdx.x; i < ROWS * (WIDTH / 8); i += 128) {
        int r = i / (WIDTH / 8), c = i % (WIDTH / 8), token = r / w.heads,
            head = w.head + r % w.heads;
        bool real = token < w.n_tokens && head < a.n_heads;
        int64_t at = real ? w.token + token - a.first : 0, h = real ? head : 0;
        const T *from = c < LATENT / 8 ? (const T *)a.q + at * a.q_stride + h * WIDTH + c * 8
                                       : (const T *)a.tail + at * a.tail_stride + h * a.tail_head +
                                             (c - LATENT / 8) * 8;
        uint32_t at_row = panel_at(r, c % 8), dst = to + c / 8 * Q_PANEL + at_row;
        if (c >= LATENT / 8) {
            dst = sh.tail() + at_row;
        } else if (c >= HELD * 2) {
            dst = sh.last() + r * 32 + ((c & 1) ^ (r >> 2 & 1)) * 16;
        }
        async_copy_or_zeros(dst, from, real);
    }
    async_commit();
    async_wait<0>();
    proxy_fence();
    scorers_sync();
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        ldmatrix_x4(q[i], to + i / 4 * Q_PANEL + panel_at(row, i % 4 * 2 + (lane >> 4)));
    }
    proxy_fence();
    __syncwarp();
    if (lane == 0) {
        random_delay();
        barrier_arrive(sh.loaded());
    }
}

/* What a scoring thread keeps of rows g and g + 8 of its warp's 16. */
struct scores {
    float s[KEYS / 2];
    float m[2], l[2], keep[2]; /* as in attn_prefill_sm90.cu */
};

/* Scores of the tile that `keys` describes. */
template <typename T>
__device__ __forceinline__ void issue_scores(scores &x, const uint32_t (&q)[HELD][4], uint64_t keys,
                                             const latent_shared &sh)
{
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        uint64_t b = keys + i / 4 * (1024 / 16) + i % 4 * 2;
        if (i < HELD) {
            wgmma_rs_k<T, KEYS>::run(x.s, q[i < HELD ? i : 0], b, i > 0);
        } else if (i < LATENT / 16) {
            wgmma_ss<T, KEYS>::run(x.s, wgmma_descriptor(sh.last(), 32), b, 1);
        } else {
            wgmma_ss<T, KEYS>::run(x.s, wgmma_descriptor(sh.tail()) + i % 4 * 2, b, 1);
        }
    }
}

/* Zeroes keys from n on: memory behind a sequence may hold NaN, and 0 * NaN is NaN. */
__device__ __forceinline__ void clear_keys(uint32_t tile, int n)
{
    for (int i = threadIdx.x; i < (KEYS - n) * PANELS * 8; i += 128) {
        int row = n + i / (PANELS * 8), c = i % (PANELS * 8);
        store_shared16(tile + row / 8 * GROUP + c / 8 * 1024 + row % 8 * 128 + c % 8 * 16,
                       make_uint4(0, 0, 0, 0));
    }
    proxy_fence();
    scorers_sync();
}

__device__ __forceinline__ void mask(scores &x, int n)
{
    int lane = threadIdx.x & 31;

#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        if ((lane & 3) * 2 + i / 4 * 8 + (i & 1) >= n) {
            x.s[i] = -INFINITY;
        }
    }
}

/* Scores to weights, which go to the row at `to` and the eighth behind it. factor:
 * makes scores exponents of two. */
template <typename T> __device__ __forceinline__ void softmax(scores &x, uint32_t to, float factor)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            top = fmaxf(top, fmaxf(x.s[i * 4 + h * 2], x.s[i * 4 + h * 2 + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top *= factor;
        float next = top > x.m[h] + SLACK ? top : x.m[h], from = next == -INFINITY ? 0.0f : next;
        x.keep[h] = next == x.m[h] ? 1.0f : fast_exp2(x.m[h] - from);
        x.m[h] = next;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            uint32_t v = pack2<T>(fast_exp2(x.s[i * 4 + h * 2] * factor - from),
                                  fast_exp2(x.s[i * 4 + h * 2 + 1] * factor - from));
            float2 f = unpack2_as(v, std::is_same<T, __half>::value);
            sum += f.x + f.y;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"((to ^ i << 4) + h * GROUP), "r"(v)
                         : "memory");
        }
        x.l[h] = x.l[h] * x.keep[h] + sum;
    }
}

/* Rows of the block that are worth computing, a multiple of 16. */
__device__ __forceinline__ int active_rows(const latent_args &a, const tile_rows &w)
{
    return min((w.n_tokens * w.heads + 15) & ~15, ROWS);
}

/* The scoring warpgroup. A tile's weights are shown once the next tile's scores are
 * done, so that the matrix unit has sums to do during the softmax. */
template <typename T>
__device__ __forceinline__ void score(const latent_args &a, const tile_rows &rows, const segment &g,
                                      const latent_shared &sh)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = warp * 16 + (lane >> 2);
    uint32_t q[HELD][4];
    scores x;
    ring r = {0, 0};
    int left = g.hi - g.lo, active = active_rows(a, rows);
    bool mine = warp * 16 < active, first = true;

    x.m[0] = x.m[1] = -INFINITY;
    x.l[0] = x.l[1] = 0.0f;
    load_queries<T>(q, a, rows, sh);
    for (; left > 0; left -= KEYS) {
        /* by a shuffle, so that descriptors are computed in uniform registers */
        uint64_t keys = operand(__shfl_sync(0xffffffffu, sh.tile(r.stage), 0), GROUP, 16);
        barrier_wait(sh.full(r.stage), r.phase);
        if (left < KEYS) {
            clear_keys(sh.tile(r.stage), left);
        }
        wgmma_fence();
        issue_scores<T>(x, q, keys, sh);
        wgmma_commit();
        wgmma_wait<0>();
        if (lane == 0 && !first) {
            random_delay();
            barrier_arrive(sh.ready(r.stage == 0 ? STAGES - 1 : r.stage - 1));
        }
        scorers_sync(); /* all of the warpgroup's scores are done */
        if (mine) {
            if (left < KEYS) {
                mask(x, left);
            }
            softmax<T>(
                x, sh.weights(r.stage) + warp * 2 * GROUP + panel_at(lane >> 2, 0) + (lane & 3) * 4,
                a.scale * LOG2E);
            if ((lane & 3) == 0) {
                sh.keep(r.stage)[row] = x.keep[0];
                sh.keep(r.stage)[row + 8] = x.keep[1];
            }
            proxy_fence();
            __syncwarp();
        }
        first = false;
        r.advance();
    }
    if (lane == 0 && !first) {
        barrier_arrive(sh.ready(r.stage == 0 ? STAGES - 1 : r.stage - 1));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        x.l[h] += __shfl_xor_sync(0xffffffffu, x.l[h], 1);
        x.l[h] += __shfl_xor_sync(0xffffffffu, x.l[h], 2);
        if ((lane & 3) == 0) {
            sh.stats()[row + 8 * h] = make_float2(x.m[h], x.l[h]);
        }
    }
    __syncwarp();
    if (lane == 0) {
        random_delay();
        barrier_arrive(sh.done());
    }
}

/* Writes a summing warpgroup's rows: as results, or as partial results of a split. */
template <typename T>
__device__ __forceinline__ void write_sums(const float (&acc)[128], const latent_args &a,
                                           const latent_splits &p, const tile_rows &w,
                                           const latent_shared &sh, int half)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, dim = half * 256 + (lane & 3) * 2;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = warp * 16 + (lane >> 2) + 8 * i, token = r / w.heads, head = w.head + r % w.heads;
        if (token >= w.n_tokens || head >= a.n_heads) {
            continue;
        }
        int64_t row = w.token + token - a.first;
        float2 ml = sh.stats()[r];
        if (p.n > 1) {
            int64_t to = (row * a.n_heads + head) * p.n + blockIdx.x;
            float *out = p.o + to * LATENT + dim;
#pragma unroll
            for (int n = 0; n < 32; n++) {
                *(float2 *)(out + n * 8) = make_float2(acc[n * 4 + 2 * i], acc[n * 4 + 2 * i + 1]);
            }
            if (dim == 0) {
                *(float2 *)(p.ml + to * 2) = ml;
            }
            continue;
        }
        float scale = ml.y > 0.0f ? 1.0f / ml.y : ml.y == 0.0f ? 0.0f : ml.y;
        T *out = (T *)a.sum + row * a.sum_stride + (int64_t)head * LATENT + dim;
#pragma unroll
        for (int n = 0; n < 32; n++) {
            *(uint32_t *)(out + n * 8) =
                pack2<T>(acc[n * 4 + 2 * i] * scale, acc[n * 4 + 2 * i + 1] * scale);
        }
    }
}

/* A summing warpgroup: dims [256 * half, 256 * half + 256). */
template <typename T>
__device__ __forceinline__ void sum_up(const CUtensorMap *map, const latent_args &a,
                                       const latent_splits &p, const tile_rows &rows,
                                       const segment &g, const latent_shared &sh, int half)
{
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
    bool mine = (row & ~15) < active_rows(a, rows);
    float acc[128];
    ring r = {0, 0};

#pragma unroll
    for (int i = 0; i < 128; i++) {
        acc[i] = 0.0f;
    }
    for (int i = 0; i < STAGES && g.lo + i * KEYS < g.hi; i++) {
        int key = g.lo + i * KEYS;
        if (i == STAGES - 1) {
            barrier_wait(sh.loaded(), 0);
        }
        if (lane == 0) {
            load_group(map, a, block_at(g.table, key, g.hi, a.kv.block_size), key, g.hi, sh, i);
        }
    }
    for (int key = g.lo; key < g.hi; key += KEYS) {
        int ahead = key + STAGES * KEYS, block = 0;
        if (lane == 0 && ahead < g.hi) {
            block = block_at(g.table, ahead, g.hi, a.kv.block_size);
        }
        barrier_wait(sh.full(r.stage), r.phase);
        barrier_wait(sh.ready(r.stage), r.phase);
        float low = sh.keep(r.stage)[row], high = sh.keep(r.stage)[row + 8];
        if (mine && !__all_sync(0xffffffffu, low == 1.0f && high == 1.0f)) {
#pragma unroll
            for (int i = 0; i < 128; i++) {
                acc[i] *= i & 2 ? high : low;
            }
        }
        uint32_t tile = __shfl_sync(0xffffffffu, sh.tile(r.stage), 0);
        uint64_t weights = operand(tile + LATENT / 64 * 1024, GROUP, 16),
                 values = operand(tile + half * 4 * 1024, GROUP, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            wgmma_ss_n<T, 256>::run(acc, weights + k * 2, values + k * (2 * GROUP / 16));
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (lane == 0) {
            random_delay();
            barrier_arrive(sh.empty(r.stage));
            if (ahead < g.hi) {
                barrier_wait(sh.empty(r.stage), r.phase);
                load_group(map, a, block, ahead, g.hi, sh, r.stage);
            }
        }
        __syncwarp();
        r.advance();
    }
    barrier_wait(sh.done(), 0);
    write_sums<T>(acc, a, p, rows, sh, half);
}

/* Code without wgmma compiles to an empty kernel; its launch bounds tell the host. */
enum { KERNEL_THREADS = HAS_WGMMA ? THREADS : 32 };

/* Grid as of latent_mma_kernel. */
template <typename T>
__global__ void __launch_bounds__(KERNEL_THREADS, 1)
    latent_wgmma_kernel(const __grid_constant__ CUtensorMap map, latent_args a, step_arrays s,
                        latent_splits p, latent_work w)
{
#if HAS_WGMMA
    extern __shared__ __align__(1024) char raw[];
    latent_shared sh = {shared_address(raw)};

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(sh.full(i), 8);
            barrier_init(sh.ready(i), 4);
            barrier_init(sh.empty(i), 8);
        }
        barrier_init(sh.loaded(), 4);
        barrier_init(sh.done(), 4);
        barrier_init_fence();
    }
    pdl_release();
    pdl_wait();
    __syncthreads();
    tile_rows rows = rows_of_block(a, w, ROWS);
    segment g = segment_at(s, p, w, rows.token, rows.token + rows.n_tokens);
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
        score<T>(a, rows, g, sh);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 160;");
        sum_up<T>(&map, a, p, rows, g, sh, (threadIdx.x >> 7) - 1);
    }
#endif
}

/* Describes the cache for copies of eight keys: 64 dims, tokens, panels, layers and
 * blocks, of which there are more than that. */
static bool map_cache(CUtensorMap *ret, const latent_args &a)
{
    cuuint64_t size[5] = {64, (cuuint64_t)a.kv.block_size, PANELS, 1u << 12, 1u << 30};
    cuuint64_t pitch[4] = {WIDTH * 2, 128, (cuuint64_t)a.kv.layer_stride * 2,
                           (cuuint64_t)a.kv.block_stride * 2};
    cuuint32_t box[5] = {64, 8, PANELS, 1, 1}, step[5] = {1, 1, 1, 1, 1};
    tensor_map_encode encode = tensor_map_encoder();

    return encode && encode(ret,
                            a.kv.dtype == T_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                            5, a.kv.base, size, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T> static bool usable(void)
{
    cudaFuncAttributes made = {};
    auto kernel = latent_wgmma_kernel<T>;
    bool ok = cudaFuncGetAttributes(&made, kernel) == cudaSuccess &&
              made.maxThreadsPerBlock >= THREADS && allow_shared(kernel, latent_shared::BYTES);

    cudaGetLastError();
    return ok;
}

template <typename T>
static bool launch_wgmma(const latent_args &a, const step_arrays &s, const latent_splits &p,
                         const latent_work &w, cudaStream_t stream)
{
    static const bool ok = usable<T>();
    int heads = (a.n_heads + ROWS - 1) / ROWS, tiles = (w.end - w.first + w.tokens - 1) / w.tokens;
    dim3 grid = w.decode ? dim3(p.n, heads, tiles) : dim3(tiles, heads);
    CUtensorMap map;

    if (!ok || a.kv.block_size % 8 || !map_cache(&map, a)) {
        return false;
    }
    launch(latent_wgmma_kernel<T>, grid, dim3(THREADS), latent_shared::BYTES, stream, map, a, s, p,
           w);
    return true;
}

extern "C" bool launch_latent_wgmma(const struct latent_args *a, const struct step_arrays *s,
                                    const struct latent_splits *p, const struct latent_work *w,
                                    cudaStream_t stream)
{
    if (w->tokens != 1) {
        return false;
    }
    return a->kv.dtype == T_BF16 ? launch_wgmma<__nv_bfloat16>(*a, *s, *p, *w, stream)
                                 : launch_wgmma<__half>(*a, *s, *p, *w, stream);
}
