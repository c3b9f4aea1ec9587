/* Attention over latents of 512 and a rotated key of 64 dims on tensor cores.
 *
 * All heads read the same latents, so a block computes a tile of query rows, which are
 * heads of one token or of a few neighbouring ones, over tiles of 64 keys. A tile of
 * keys is loaded once, by cp.async and two stages ahead of each other: all 576 dims are
 * the keys, the first 512 the values. Eight warps divide the scores of a tile by rows
 * and keys, exchange maxima and weights through shared memory, and then divide the sums
 * by dims, 64 each.
 *
 * With few sequences a row's keys are divided into splits, whose partial results a
 * second kernel merges. For `deterministic` there is one split, and decodes take the
 * tiles of prefill: a row's bits then depend on its own keys alone.
 */
#include "kernels/cuda/attention/latent.cuh"
#include "kernels/cuda/attention/latent.h"
#include "kernels/cuda/gemm/async_copy.cuh"
#include <cstdlib>

enum {
    LATENT = 512,
    WIDTH = 576,
    CHUNKS = WIDTH / 8,
    KEYS = LATENT_KEYS,
    WARPS = 8,
    THREADS = 256
};
enum { ROW_BYTES = WIDTH * 2, TILE_BYTES = KEYS * ROW_BYTES };

/* Offsets in shared memory. Rows of queries and keys have their 16-byte chunks permuted
 * within groups of 8, those of weights within 8, so that ldmatrix meets no bank
 * twice. */
template <int ROWS> struct shared_layout {
    static constexpr int M_TILES = ROWS / 16, KEY_GROUPS = WARPS / M_TILES;
    static constexpr int KEY = ROWS * ROW_BYTES, WEIGHT = KEY + 2 * TILE_BYTES;
    static constexpr int MAX = WEIGHT + ROWS * KEYS * 2; /* [2][ROWS] running maxima */
    static constexpr int SUM = MAX + 2 * ROWS * 4;       /* [ROWS] sums of weights */
    static constexpr int PART_MAX = SUM + ROWS * 4;      /* [KEY_GROUPS][ROWS] of a tile */
    static constexpr int PART_SUM = PART_MAX + KEY_GROUPS * ROWS * 4;
    static constexpr int BYTES = PART_SUM + KEY_GROUPS * ROWS * 4;
};

__device__ __forceinline__ uint32_t row_at(uint32_t row, uint32_t chunk)
{
    return row * ROW_BYTES + (((chunk & ~7u) | ((chunk ^ row) & 7)) << 4);
}

__device__ __forceinline__ uint32_t weight_at(uint32_t row, uint32_t chunk)
{
    return row * (KEYS * 2) + ((chunk ^ (row & 7)) << 4);
}

/* Loads keys [key, key + 64), those from `hi` on as zeros. Each warp loads eight. */
template <typename T>
__device__ __forceinline__ void load_keys(const latent_args &a, const segment &g, int key,
                                          uint32_t to)
{
    int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 8;
    int mine = min(key + first + (lane & 7), g.hi - 1);
    int block = g.table[mine / a.kv.block_size], offset = mine % a.kv.block_size;
    const T *base = (const T *)a.kv.base + a.layer * a.kv.layer_stride;

#pragma unroll 6
    for (int i = 0; i < 8 * CHUNKS / 32; i++) {
        int at = i * 32 + lane, k = at / CHUNKS, c = at % CHUNKS;
        int64_t from = __shfl_sync(0xffffffffu, block, k);
        int token = __shfl_sync(0xffffffffu, offset, k);
        async_copy_or_zeros(to + row_at(first + k, c),
                            base + from * a.kv.block_stride + (int64_t)token * WIDTH + c * 8,
                            key + first + k < g.hi);
    }
}

template <typename T, int ROWS>
__device__ __forceinline__ void load_queries(const latent_args &a, const tile_rows &w, uint32_t to)
{
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS, token = r / w.heads, head = w.head + r % w.heads;
        bool real = token < w.n_tokens && head < a.n_heads;
        int64_t row = real ? w.token + token - a.first : 0, h = real ? head : 0;
        const T *from = c < LATENT / 8 ? (const T *)a.q + row * a.q_stride + h * WIDTH + c * 8
                                       : (const T *)a.tail + row * a.tail_stride + h * a.tail_head +
                                             (c - LATENT / 8) * 8;
        async_copy_or_zeros(to + row_at(r, c), from, real);
    }
}

/* Scores of the warp's 16 rows and 8 * M_TILES keys. */
template <typename T, int N_TILES>
__device__ __forceinline__ void score_keys(float (&c)[N_TILES][4], uint32_t q, uint32_t keys,
                                           int row, int key)
{
    int lane = threadIdx.x & 31;

#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
    }
    /* few products in a row are summed in two halves, which do not wait for each
     * other */
    constexpr int HALVES = N_TILES <= 2 ? 2 : 1;
    float other[HALVES == 2 ? N_TILES : 1][4] = {};
#pragma unroll 6
    for (int k = 0; k < WIDTH / 32; k++) {
        uint32_t x0[4], x1[4];
        ldmatrix_x4(x0, q + row_at(row + (lane & 15), k * 4 + (lane >> 4)));
        ldmatrix_x4(x1, q + row_at(row + (lane & 15), k * 4 + 2 + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, keys + row_at(key + n * 8 + (lane & 7), k * 4 + (lane >> 3)));
            mma16816<T>(c[n], x0, b[0], b[1]);
            if (HALVES == 2) {
                mma16816<T>(other[HALVES == 2 ? n : 0], x1, b[2], b[3]);
            } else {
                mma16816<T>(c[n], x1, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N_TILES && HALVES == 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            c[n][i] += other[HALVES == 2 ? n : 0][i];
        }
    }
}

/* acc += weights x values, over the dims of this warp. */
template <typename T, int M_TILES>
__device__ __forceinline__ void add_values(float (&acc)[M_TILES][8][4], uint32_t weights,
                                           uint32_t keys)
{
    int lane = threadIdx.x & 31, chunk = (threadIdx.x >> 5) * 8 + (lane >> 4);

#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        uint32_t p[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            ldmatrix_x4(p[m], weights + weight_at(m * 16 + (lane & 15), k * 2 + (lane >> 4)));
        }
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, keys + row_at(k * 16 + (lane & 15), chunk + n));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                mma16816<T>(acc[m][n], p[m], b[0], b[1]);
                mma16816<T>(acc[m][n + 1], p[m], b[2], b[3]);
            }
        }
    }
}

/* Scores to weights: masks, finds the rows' maxima over all warps, writes the weights
 * to shared memory. `max` are the running maxima before (from) and after (to). */
template <typename T, int ROWS>
__device__ __forceinline__ void weigh(float (&c)[ROWS / 16][4], const latent_args &a,
                                      const segment &g, const tile_rows &w, int key, char *shared,
                                      int from, int to)
{
    using L = shared_layout<ROWS>;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp / L::M_TILES;
    int row = warp % L::M_TILES * 16 + (lane >> 2),
        column = group * 8 * L::M_TILES + (lane & 3) * 2;
    float *max = (float *)(shared + L::MAX), *part_max = (float *)(shared + L::PART_MAX),
          *part_sum = (float *)(shared + L::PART_SUM), top[2] = {-INFINITY, -INFINITY};
    float scale = a.scale * LOG2E;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        int end = min(keys_of(g, w, row + 8 * i), g.hi);
#pragma unroll
        for (int n = 0; n < L::M_TILES; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float &s = c[n][2 * i + j];
                s = key + column + n * 8 + j < end ? s * scale : -INFINITY;
                top[i] = fmaxf(top[i], s);
            }
        }
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
        if ((lane & 3) == 0) {
            part_max[group * ROWS + row + 8 * i] = top[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int r = row + 8 * i;
        float best = max[from * ROWS + r], sum = 0.0f;
        for (int k = 0; k < L::KEY_GROUPS; k++) {
            best = fmaxf(best, part_max[k * ROWS + r]);
        }
        float base = best == -INFINITY ? 0.0f : best;
#pragma unroll
        for (int n = 0; n < L::M_TILES; n++) {
            float p0 = fast_exp2(c[n][2 * i] - base), p1 = fast_exp2(c[n][2 * i + 1] - base);
            sum += rounded<T>(p0) + rounded<T>(p1);
            *(uint32_t *)(shared + L::WEIGHT + weight_at(r, group * L::M_TILES + n) +
                          (lane & 3) * 4) = pack2<T>(p0, p1);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if ((lane & 3) == 0) {
            part_sum[group * ROWS + r] = sum;
            if (group == 0) {
                max[to * ROWS + r] = best;
            }
        }
    }
    __syncthreads();
}

/* Factor of what a row had before its maximum rose. */
__device__ __forceinline__ float kept(const float *max, int rows, int from, int to, int row)
{
    float before = max[from * rows + row];

    return before == -INFINITY ? 0.0f : fast_exp2(before - max[to * rows + row]);
}

template <typename T, int ROWS>
__device__ __forceinline__ void run_segment(const latent_args &a, const segment &g,
                                            const tile_rows &w, char *shared, int *at_max,
                                            float (&acc)[ROWS / 16][8][4])
{
    using L = shared_layout<ROWS>;
    uint32_t base = shared_address(shared);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, from = *at_max;
    float *max = (float *)(shared + L::MAX), *sums = (float *)(shared + L::SUM),
          *part_sum = (float *)(shared + L::PART_SUM);

    __syncthreads(); /* both stages are free */
    load_keys<T>(a, g, g.lo, base + L::KEY);
    async_commit();
    for (int key = g.lo, stage = 0; key < g.hi; key += KEYS, stage ^= 1) {
        uint32_t keys = base + L::KEY + stage * TILE_BYTES;
        async_wait<0>();
        __syncthreads();
        if (key + KEYS < g.hi) {
            load_keys<T>(a, g, key + KEYS, base + L::KEY + (stage ^ 1) * TILE_BYTES);
        }
        async_commit();
        float c[L::M_TILES][4];
        score_keys<T, L::M_TILES>(c, base, keys, warp % L::M_TILES * 16,
                                  warp / L::M_TILES * 8 * L::M_TILES);
        weigh<T, ROWS>(c, a, g, w, key, shared, from, from ^ 1);
        if (threadIdx.x < ROWS) {
            float sum = sums[threadIdx.x] * kept(max, ROWS, from, from ^ 1, threadIdx.x);
            for (int k = 0; k < L::KEY_GROUPS; k++) {
                sum += part_sum[k * ROWS + threadIdx.x];
            }
            sums[threadIdx.x] = sum;
        }
#pragma unroll
        for (int m = 0; m < L::M_TILES; m++) {
            float low = kept(max, ROWS, from, from ^ 1, m * 16 + (lane >> 2));
            float high = kept(max, ROWS, from, from ^ 1, m * 16 + (lane >> 2) + 8);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                acc[m][n][0] *= low;
                acc[m][n][1] *= low;
                acc[m][n][2] *= high;
                acc[m][n][3] *= high;
            }
        }
        add_values<T, L::M_TILES>(acc, base + L::WEIGHT, keys);
        from ^= 1;
    }
    *at_max = from;
}

/* Writes the tile: as results, or as partial results of a split. */
template <typename T, int ROWS>
__device__ __forceinline__ void write_tile(const latent_args &a, const latent_splits &p,
                                           const tile_rows &w, const char *shared, int at_max,
                                           float (&acc)[ROWS / 16][8][4])
{
    using L = shared_layout<ROWS>;
    int lane = threadIdx.x & 31, dim = (threadIdx.x >> 5) * 64 + (lane & 3) * 2;
    const float *max = (const float *)(shared + L::MAX) + at_max * ROWS,
                *sums = (const float *)(shared + L::SUM);

#pragma unroll
    for (int m = 0; m < L::M_TILES; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = m * 16 + (lane >> 2) + 8 * i, token = r / w.heads, head = w.head + r % w.heads;
            if (token >= w.n_tokens || head >= a.n_heads) {
                continue;
            }
            int64_t row = w.token + token - a.first;
            if (p.n > 1) {
                int64_t to = (row * a.n_heads + head) * p.n + blockIdx.x;
                float *out = p.o + to * LATENT + dim;
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    *(float2 *)(out + n * 8) = make_float2(acc[m][n][2 * i], acc[m][n][2 * i + 1]);
                }
                if (dim == 0) {
                    *(float2 *)(p.ml + to * 2) = make_float2(max[r], sums[r]);
                }
                continue;
            }
            float scale = sums[r] > 0.0f ? 1.0f / sums[r] : sums[r] == 0.0f ? 0.0f : sums[r];
            T *out = (T *)a.sum + row * a.sum_stride + (int64_t)head * LATENT + dim;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                *(uint32_t *)(out + n * 8) =
                    pack2<T>(acc[m][n][2 * i] * scale, acc[m][n][2 * i + 1] * scale);
            }
        }
    }
}

/* Grid (splits, heads, tokens) for decodes, of which token t is sequence t; or (tiles
 * of w.tokens tokens, heads), the last and longest first. */
template <typename T, int ROWS>
__global__ void __launch_bounds__(THREADS, 1)
    latent_mma_kernel(latent_args a, step_arrays s, latent_splits p, latent_work w)
{
    extern __shared__ __align__(128) char shared[];
    using L = shared_layout<ROWS>;

    pdl_release();
    pdl_wait();
    tile_rows rows = rows_of_block(a, w, ROWS);
    float acc[L::M_TILES][8][4] = {};
    load_queries<T, ROWS>(a, rows, shared_address(shared));
    async_commit();
    if (threadIdx.x < ROWS) {
        ((float *)(shared + L::MAX))[threadIdx.x] = -INFINITY;
        ((float *)(shared + L::SUM))[threadIdx.x] = 0.0f;
    }
    int at_max = 0, end = rows.token + rows.n_tokens;
    for (int token = rows.token; token < end;) {
        segment g = segment_at(s, p, w, token, end);
        if (g.lo < g.hi) {
            run_segment<T, ROWS>(a, g, rows, shared, &at_max, acc);
        }
        token = g.end;
    }
    async_wait<0>();
    __syncthreads();
    write_tile<T, ROWS>(a, p, rows, shared, at_max, acc);
}

/* Grid (token, head): merges the splits of a row. Every split of at least one key comes
 * before those of none. */
template <typename T>
__global__ void __launch_bounds__(LATENT / 4) latent_merge_kernel(latent_args a, latent_splits p)
{
    pdl_release();
    pdl_wait();
    int64_t row = (int64_t)blockIdx.x * a.n_heads + blockIdx.y;
    const float2 *ml = (const float2 *)p.ml + row * p.n;
    const float *from = p.o + row * p.n * LATENT + threadIdx.x * 4;
    float best = -INFINITY, sum = 0.0f;
    float4 acc = {};
    for (int i = 0; i < p.n; i++) {
        best = fmaxf(best, ml[i].x);
    }
    for (int i = 0; i < p.n && ml[i].y != 0.0f; i++) {
        float f = fast_exp2(ml[i].x - best);
        float4 v = *(const float4 *)(from + (int64_t)i * LATENT);
        sum += ml[i].y * f;
        acc.x += v.x * f;
        acc.y += v.y * f;
        acc.z += v.z * f;
        acc.w += v.w * f;
    }
    float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    T *out =
        (T *)a.sum + blockIdx.x * a.sum_stride + (int64_t)blockIdx.y * LATENT + threadIdx.x * 4;
    *(uint2 *)out =
        make_uint2(pack2<T>(acc.x * scale, acc.y * scale), pack2<T>(acc.z * scale, acc.w * scale));
}

template <typename T, int ROWS>
static bool launch_tile(const latent_args &a, const step_arrays &s, const latent_splits &p,
                        const latent_work &w, cudaStream_t stream)
{
    int heads = (a.n_heads + ROWS - 1) / ROWS, tiles = (w.end - w.first + w.tokens - 1) / w.tokens;
    dim3 grid = w.decode ? dim3(p.n, heads, tiles) : dim3(tiles, heads);

    if (!allow_shared(latent_mma_kernel<T, ROWS>, shared_layout<ROWS>::BYTES)) {
        return false;
    }
    launch(latent_mma_kernel<T, ROWS>, grid, dim3(THREADS), shared_layout<ROWS>::BYTES, stream, a,
           s, p, w);
    return true;
}

template <typename T>
static bool launch_rows(const latent_args &a, const step_arrays &s, const latent_splits &p,
                        const latent_work &w, cudaStream_t stream)
{
    if (w.invariant) {
        return launch_tile<T, 64>(a, s, p, w, stream);
    }
    if (w.decode && a.n_heads <= 16) {
        return launch_tile<T, 16>(a, s, p, w, stream);
    }
    if (w.decode && a.n_heads <= 32) {
        return launch_tile<T, 32>(a, s, p, w, stream);
    }
    return launch_tile<T, 64>(a, s, p, w, stream);
}

/* Whether the kernel for Hopper, whose blocks have heads of one token, is for such
 * work: it computes 64 rows of a block whatever there is of heads, which pays with many
 * sequences alone if they are few. */
static bool for_wgmma(const latent_args &a, const latent_work &w)
{
    enum { FEW_HEADS = 32, MANY_ROWS = 24 };

    return w.tokens == 1 &&
           (a.n_heads > FEW_HEADS || (!w.invariant && w.end - w.first >= MANY_ROWS));
}

template <typename T>
static bool launch_type(const latent_args &a, const step_arrays &s, const latent_splits &p,
                        latent_work w, cudaStream_t stream)
{
    w.tokens = w.decode || a.n_heads > 64 ? 1 : 64 / a.n_heads;

    if (!(for_wgmma(a, w) && launch_latent_wgmma(&a, &s, &p, &w, stream)) &&
        !launch_rows<T>(a, s, p, w, stream)) {
        return false;
    }
    if (p.n > 1) {
        launch(latent_merge_kernel<T>, dim3(w.end - w.first, a.n_heads), dim3(LATENT / 4), 0,
               stream, a, p);
    }
    return true;
}

static bool fits(const latent_args *a)
{
    bool aligned = (uintptr_t)a->q % 16 == 0 && a->q_stride % 8 == 0 &&
                   (uintptr_t)a->tail % 16 == 0 && a->tail_stride % 8 == 0 &&
                   a->tail_head % 8 == 0 && (uintptr_t)a->sum % 8 == 0 && a->sum_stride % 4 == 0;

    return a->latent == LATENT && a->rot_dim == WIDTH - LATENT && aligned &&
           (a->kv.dtype == T_BF16 || a->kv.dtype == T_F16);
}

extern "C" bool launch_latent_mma(const struct latent_args *a, const struct step_arrays *s,
                                  const struct latent_splits *p, const struct latent_work *w,
                                  cudaStream_t stream)
{
    if (!fits(a)) {
        return false;
    }
    return a->kv.dtype == T_BF16 ? launch_type<__nv_bfloat16>(*a, *s, *p, *w, stream)
                                 : launch_type<__half>(*a, *s, *p, *w, stream);
}
