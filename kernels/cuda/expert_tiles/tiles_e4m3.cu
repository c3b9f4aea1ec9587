/* Products of experts of e4m3 codes with rows of e4m3 codes, by tiles with wgmma
 * (experts.h).
 *
 * A tile is an expert's weight rows times some of the rows that chose it: the weights
 * are the instruction's 64-row operand and the rows its N columns. Two consumer
 * warpgroups have two blocks of 64 weight rows each; with a gate they are rows of the
 * gate and the rows that these gate, so that a lane has both of a column and the block
 * has 128 columns of a pair: one group of the codes that down reads. Blocks are
 * persistent and walk the list of tiles times blocks of weight rows, the latter
 * innermost.
 *
 * A producer warpgroup fills a ring of stages of 128 columns: its first lane the
 * weights by tensor copies, all its lanes the gathered rows, 16 bytes at a time,
 * swizzled by hand, and the rows' scales of these columns. Hopper adds up products of
 * e4m3 with about 14 bits, so the sums of a stage are added in float32, times the
 * scales of its columns.
 */
#include "kernels/cuda/expert_tiles/code_group.cuh"
#include "kernels/cuda/expert_tiles/gather.cuh"
#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/gemm/tensor_map.cuh"
#include "kernels/cuda/gemm/tiles.h"
#include "kernels/cuda/gemm/wgmma_widths.cuh"

namespace
{

using T = __nv_bfloat16;

enum {
    DEPTH = EXPERT_CODES_K, /* columns, and bytes, of a stage */
    BLOCK_ROWS = 64,        /* of weights, of an instruction */
    BOX_ROWS = 128,         /* of weights, of a tensor copy */
    BOX_BYTES = BOX_ROWS * DEPTH,
    BLOCK_BYTES = BLOCK_ROWS * DEPTH,
    GROUPS = 2, /* consumer warpgroups */
    CONSUMERS = GROUPS * 128,
    PRODUCERS = 128,
    THREADS = CONSUMERS + PRODUCERS
};

/* N rows. */
template <int N> struct tile_layout {
    static constexpr int X = 2 * BOX_BYTES; /* of a stage: where the rows begin */
    static constexpr int STAGE = X + N * DEPTH;
    static constexpr int PANEL = N * 128; /* 64 results of each row */
    static constexpr int RESULT = GROUPS * PANEL;
    static constexpr int SCALES = N * 4; /* of a stage */
    static constexpr int FIT = (225 * 1024 - RESULT) / (STAGE + SCALES + 16);
    static constexpr int STAGES = FIT > 8 ? 8 : FIT;
    static constexpr int SCALES_AT = STAGES * STAGE + RESULT;
    static constexpr int BARRIERS_AT = SCALES_AT + STAGES * SCALES;
    static constexpr int BYTES = BARRIERS_AT + STAGES * 16 + 1024;
};

#if HAS_WGMMA

__device__ __forceinline__ void copy_scale(uint32_t to, const float *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ float2 load_scales(uint32_t from)
{
    float2 v;

    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

/* Two pairs of 8 x 8 values, each stored by columns: the lane's address is of row lane
 * % 8 of matrix lane / 8. */
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&v)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

__device__ __forceinline__ uint32_t both(float lo, float hi)
{
    vec<T, 2> v = {{from_float<T>(lo), from_float<T>(hi)}};

    return *(uint32_t *)&v;
}

__device__ __forceinline__ void sync_threads(int barrier, int n)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(n) : "memory");
}

/* What a block does in turn: a tile, and a block of its expert's weight rows. */
struct work {
    int expert, n;       /* pairs */
    const int32_t *list; /* the pairs */
    int m;
};

__device__ __forceinline__ work work_of(const expert_lists &l, int i, int m_blocks)
{
    int4 t = __ldg((const int4 *)l.tile + i / m_blocks);

    return {t.x, t.z, l.list + (int64_t)t.x * l.cap + t.y, i % m_blocks};
}

/* The list's entries of rows first, first + 16 and so on; any where there is none. */
template <int COUNT>
__device__ __forceinline__ void load_pairs(int32_t (&pair)[COUNT], const work &k, int first)
{
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        int r = first + j * 16;
        pair[j] = r < k.n ? k.list[r] : 0;
    }
}

/* The places of a block in shared memory. */
struct places {
    char *ring; /* the same as `base` */
    uint32_t base, scales, full, empty;
    int n_work, m_blocks;
};

/* A tile's work and rows are read while the one before it is copied. */
template <int N, bool GATED>
__device__ __forceinline__ void produce(const CUtensorMap *w, const expert_product &a,
                                        const expert_lists &l, const places &p)
{
    using L = tile_layout<N>;
    constexpr int ROWS = N / 16; /* of a thread: 8 threads copy a row's 128 bytes */
    int t = threadIdx.x - CONSUMERS, chunk = t & 7, r0 = t >> 3, steps = a.k / DEPTH;
    uint32_t at = r0 * 128 + ((chunk ^ (r0 & 7)) << 4);
    int32_t pair[ROWS], row[ROWS];
    int i = blockIdx.x, stage = 0;
    uint32_t phase = 1;

    if (i >= p.n_work) {
        return;
    }
    work next = work_of(l, i, p.m_blocks);
    load_pairs(pair, next, r0);
    for (; i < p.n_work; i += gridDim.x) {
        work k = next;
        int first = k.expert * a.width * (GATED ? 2 : 1) + k.m * BOX_ROWS * (GATED ? 1 : 2);
        int second = first + (GATED ? a.width : BOX_ROWS);
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            row[j] = pair[j] / a.divide;
        }
        next = work_of(l, min(i + (int)gridDim.x, p.n_work - 1), p.m_blocks);
        load_pairs(pair, next, r0);
        for (int s = 0; s < steps; s++) {
            uint32_t to = p.base + stage * L::STAGE, bar = p.full + stage * 8;
            barrier_wait(p.empty + stage * 8, phase); /* holds at once in the first round */
            if (t == 0) {
                barrier_expect(bar, 2 * BOX_BYTES);
                tensor_copy(to, w, s * DEPTH, first, bar);
                tensor_copy(to + BOX_BYTES, w, s * DEPTH, second, bar);
            }
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                int r = r0 + j * 16;
                if (r < k.n) {
                    copy_chunk(to + L::X + at + j * 16 * 128,
                               (const uint8_t *)a.x + row[j] * a.x_stride + s * DEPTH + chunk * 16);
                }
                if (r < k.n && chunk == (j & 7)) {
                    copy_scale(p.scales + stage * L::SCALES + r * 4,
                               a.x_scale + (int64_t)row[j] * steps + s);
                }
            }
            random_delay();
            arrive_behind_copies(bar);
            if (++stage == L::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
    finish_copies();
}

/* Scales of the lane's rows of weights: two of each kind. */
struct row_scales {
    float of[2][2];

    /* `row`: the first of them, `next` rows before that of the other kind; of the group
     * of columns. Rows behind the weight's last one have the last one's. */
    __device__ __forceinline__ void load(const expert_product &a, int64_t row, int next, int group)
    {
        int64_t last = (int64_t)a.n * a.width * (a.gated ? 2 : 1) - 1;

#pragma unroll
        for (int s = 0; s < 2; s++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int64_t r = min(row + s * next + h * 8, last);
                of[s][h] = __ldg(a.w_scale + r * a.n_groups + group);
            }
        }
    }
};

/* sum += d times the scales of the columns. */
template <int N, bool GROUPED>
__device__ __forceinline__ void add_stage(float (&sum)[N / 2], const float (&d)[N / 2],
                                          uint32_t scales, const float (&of_rows)[2])
{
    int at = (threadIdx.x & 3) * 8;

#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        float2 f = load_scales(scales + j * 32 + at);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float by = GROUPED ? of_rows[h] : 1.0f;
            sum[j * 4 + h * 2] += d[j * 4 + h * 2] * (GROUPED ? f.x * by : f.x);
            sum[j * 4 + h * 2 + 1] += d[j * 4 + h * 2 + 1] * (GROUPED ? f.y * by : f.y);
        }
    }
}

template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], uint32_t w, uint32_t x)
{
    uint64_t of_w = wgmma_descriptor(w), of_x = wgmma_descriptor(x);

#pragma unroll
    for (int c = 0; c < DEPTH / 32; c++) {
        wgmma_width<N>::run_e4m3(d, of_w + c * 2, of_x + c * 2, c > 0);
    }
}

/* Adds a stage to both blocks of weight rows of the warpgroup. */
template <int N, bool GROUPED>
__device__ __forceinline__ void take_stage(float (&sum)[2][N / 2], uint32_t at, uint32_t scales,
                                           const row_scales &of_rows)
{
    using L = tile_layout<N>;
    uint32_t w = at + (threadIdx.x >> 7) * BLOCK_BYTES;

    if constexpr (N <= 64) {
        float d[2][N / 2];
        wgmma_fence();
        multiply<N>(d[0], w, at + L::X);
        multiply<N>(d[1], w + BOX_BYTES, at + L::X);
        wgmma_commit();
        wgmma_wait<0>();
        add_stage<N, GROUPED>(sum[0], d[0], scales, of_rows.of[0]);
        add_stage<N, GROUPED>(sum[1], d[1], scales, of_rows.of[1]);
    } else { /* registers for one: the other warpgroup multiplies meanwhile */
        float d[N / 2];
#pragma unroll
        for (int s = 0; s < 2; s++) {
            wgmma_fence();
            multiply<N>(d, w + s * BOX_BYTES, at + L::X);
            wgmma_commit();
            wgmma_wait<0>();
            add_stage<N, GROUPED>(sum[s], d, scales, of_rows.of[s]);
        }
    }
}

__device__ __forceinline__ float bias_of(const expert_product &a, int64_t row)
{
    return a.bias ? to_float(((const T *)a.bias)[row]) : 0.0f;
}

/* Scales rows, adds biases and gates: what is left is in d[0]; without a gate the
 * blocks stay apart. */
template <int N, bool GATED, bool GROUPED>
__device__ __forceinline__ void finish(float (&d)[2][N / 2], const expert_product &a, int64_t row,
                                       int next, const row_scales &scale)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float b0 = bias_of(a, row + h * 8), b1 = bias_of(a, row + next + h * 8);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &u = d[0][j * 4 + h * 2 + c], &v = d[1][j * 4 + h * 2 + c];
                u = (GROUPED ? u : u * scale.of[0][h]) + b0;
                v = (GROUPED ? v : v * scale.of[1][h]) + b1;
                u = GATED ? expert_gate(u, v, a.act, a.limit) : u;
            }
        }
    }
}

/* Writes 64 columns of the tile's rows, `d` being [64 columns, N rows] as the
 * instruction leaves it, to a panel of rows of 128 bytes, swizzled. */
template <int N> __device__ __forceinline__ void fill_panel(const float (&d)[N / 2], uint32_t panel)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;

#pragma unroll
    for (int j = 0; j < N / 16; j++) { /* matrices: columns + 0, + 8 of rows j * 16 + 0, + 8 */
        int r = j * 16 + (lane >> 4) * 8 + (lane & 7), chunk = warp * 2 + (lane >> 3 & 1);
        uint32_t v[4] = {both(d[j * 8], d[j * 8 + 1]), both(d[j * 8 + 2], d[j * 8 + 3]),
                         both(d[j * 8 + 4], d[j * 8 + 5]), both(d[j * 8 + 6], d[j * 8 + 7])};
        store_transposed(panel + r * 128 + ((chunk ^ (r & 7)) << 4), v);
    }
}

/* The warpgroup's 64 columns from `column` on, as they are. */
template <int N>
__device__ __forceinline__ void store_columns(const float (&d)[N / 2], const places &p,
                                              const expert_product &a,
                                              const int32_t (&pair)[N / 16], int n, int column)
{
    using L = tile_layout<N>;
    int t = threadIdx.x & 127, group = threadIdx.x >> 7;
    uint32_t panel = p.base + L::STAGES * L::STAGE + group * L::PANEL;

    fill_panel<N>(d, panel);
    sync_threads(1 + group, 128);
#pragma unroll
    for (int j = 0; j < N / 16; j++) {
        int r = (t >> 3) + j * 16;
        if (r < n) {
            uint4 v = load_shared16(panel + r * 128 + (((t & 7) ^ (r & 7)) << 4));
            *(uint4 *)((T *)a.out + pair[j] * a.out_stride + column + (t & 7) * 8) = v;
        }
    }
    sync_threads(1 + group, 128);
}

/* The block's 128 columns, as codes with a scale for each row. */
template <int N>
__device__ __forceinline__ void store_codes(const float (&d)[N / 2], const places &p,
                                            const expert_product &a, const int32_t (&pair)[N / 16],
                                            int n, int m)
{
    using L = tile_layout<N>;
    int t = threadIdx.x, part = t & 15;
    uint32_t panels = p.base + L::STAGES * L::STAGE;

    fill_panel<N>(d, panels + (t >> 7) * L::PANEL);
    sync_threads(1, CONSUMERS);
#pragma unroll
    for (int j = 0; j < N / 16; j++) {
        int r = (t >> 4) + j * 16;
        uint32_t at = panels + (part >> 3) * L::PANEL + r * 128 + (((part & 7) ^ (r & 7)) << 4);
        code_group g(load_shared16(at), a.out_fixed);
        if (r < n) {
            *(uint2 *)((uint8_t *)a.out + pair[j] * a.out_stride + m * DEPTH + part * 8) =
                g.codes();
            if (part == 0) {
                a.out_scale[(int64_t)pair[j] * (a.width / DEPTH) + m] = g.scale();
            }
        }
    }
    sync_threads(1, CONSUMERS);
}

template <int N, bool GATED, bool GROUPED>
__device__ __forceinline__ void consume(const expert_product &a, const expert_lists &l,
                                        const places &p)
{
    using L = tile_layout<N>;
    int lane = threadIdx.x & 31, group = threadIdx.x >> 7, steps = a.k / DEPTH;
    int lane_row = group * BLOCK_ROWS + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
    int first_pair = GATED ? threadIdx.x >> 4 : threadIdx.x >> 3 & 15;
    int i = blockIdx.x, stage = 0;
    uint32_t phase = 0;

    if (i >= p.n_work) {
        return;
    }
    work following = work_of(l, i, p.m_blocks);
    for (; i < p.n_work; i += gridDim.x) {
        work k = following;
        int32_t pair[N / 16];
        float sum[2][N / 2] = {};
        row_scales scale;
        int column = k.m * BOX_ROWS * (GATED ? 1 : 2), next = GATED ? a.width : BOX_ROWS;
        int64_t row = (int64_t)k.expert * a.width * (GATED ? 2 : 1) + column + lane_row;
        if (N <= 64) { /* else they would not fit the registers */
            load_pairs(pair, k, first_pair);
        }
        scale.load(a, row, next, 0);
        following = work_of(l, min(i + (int)gridDim.x, p.n_work - 1), p.m_blocks);
        for (int s = 0; s < steps; s++) {
            row_scales ahead = scale;
            if (GROUPED && s + 1 < steps) {
                ahead.load(a, row, next, (s + 1) * DEPTH / a.group_cols);
            }
            barrier_wait(p.full + stage * 8, phase);
            proxy_fence();
            take_stage<N, GROUPED>(sum, p.base + stage * L::STAGE, p.scales + stage * L::SCALES,
                                   scale);
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(p.empty + stage * 8);
            }
            if (++stage == L::STAGES) {
                stage = 0;
                phase ^= 1;
            }
            scale = ahead;
        }
        /* of a block of down that ends behind the expert's rows only half is stored */
        bool second = GATED || column + BOX_ROWS < a.width;
        if (N > 64) {
            load_pairs(pair, k, first_pair);
        }
        finish<N, GATED, GROUPED>(sum, a, row, second ? next : 0, scale);
        if (GATED) {
            store_codes<N>(sum[0], p, a, pair, k.n, k.m);
        } else {
            store_columns<N>(sum[0], p, a, pair, k.n, column + group * BLOCK_ROWS);
            if (second) {
                store_columns<N>(sum[1], p, a, pair, k.n, column + BOX_ROWS + group * BLOCK_ROWS);
            }
        }
    }
}

#endif

template <int N, bool GATED, bool GROUPED>
__global__ void __launch_bounds__(HAS_WGMMA ? THREADS : 32, 1)
    e4m3_tiles_kernel(const __grid_constant__ CUtensorMap w,
                      const __grid_constant__ expert_product a,
                      const __grid_constant__ expert_lists l)
{
#if HAS_WGMMA
    using L = tile_layout<N>;
    extern __shared__ char raw[];
    places p;

    p.base = (shared_address(raw) + 1023) & ~1023u;
    p.scales = p.base + L::SCALES_AT;
    p.full = p.base + L::BARRIERS_AT;
    p.empty = p.full + L::STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(p.full + i * 8, 1 + PRODUCERS);
            barrier_init(p.empty + i * 8, CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();
    pdl_wait();
    pdl_release();
    int rows = BOX_ROWS * (GATED ? 1 : 2);
    p.m_blocks = (a.width + rows - 1) / rows;
    p.n_work = l.total[0] * p.m_blocks;
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        produce<N, GATED>(&w, a, l, p);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume<N, GATED, GROUPED>(a, l, p);
    }
#endif
}

/* ---- host ---- */

template <int N, bool GATED, bool GROUPED>
bool run(const CUtensorMap &w, const expert_product &a, const expert_lists &l, int n_blocks,
         cudaStream_t stream)
{
    using L = tile_layout<N>;
    auto kernel = e4m3_tiles_kernel<N, GATED, GROUPED>;
    static bool allowed = allow_shared(kernel, L::BYTES);

    if (!allowed) {
        return false;
    }
    launch(kernel, dim3((unsigned)n_blocks), dim3(THREADS), L::BYTES, stream, w, a, l);
    return true;
}

template <bool GATED, bool GROUPED>
bool run_width(const CUtensorMap &w, const expert_product &a, const expert_lists &l, int n_blocks,
               cudaStream_t stream)
{
    switch (l.tile_rows) {
    case 16:
        return run<16, GATED, GROUPED>(w, a, l, n_blocks, stream);
    case 32:
        return run<32, GATED, GROUPED>(w, a, l, n_blocks, stream);
    case 64:
        return run<64, GATED, GROUPED>(w, a, l, n_blocks, stream);
    default:
        return run<128, GATED, GROUPED>(w, a, l, n_blocks, stream);
    }
}

} // namespace

extern "C" bool expert_e4m3_fits(int32_t k, int32_t group_cols)
{
    return k % DEPTH == 0 && group_cols % DEPTH == 0 && tiles_available() &&
           cuda_shared_limit() >= tile_layout<EXPERT_E4M3_ROWS>::BYTES;
}

extern "C" bool launch_expert_e4m3(const struct expert_product *a, const struct expert_lists *l,
                                   int32_t n_blocks, cudaStream_t stream)
{
    int64_t rows = (int64_t)a->n * a->width * (a->gated ? 2 : 1);
    CUtensorMap w;

    if (!tensor_map(&w, CU_TENSOR_MAP_DATA_TYPE_UINT8, a->w, rows, a->k, a->w_stride, BOX_ROWS,
                    DEPTH)) {
        return false;
    }
    if (a->gated) {
        return a->n_groups > 1 ? run_width<true, true>(w, *a, *l, n_blocks, stream)
                               : run_width<true, false>(w, *a, *l, n_blocks, stream);
    }
    return a->n_groups > 1 ? run_width<false, true>(w, *a, *l, n_blocks, stream)
                           : run_width<false, false>(w, *a, *l, n_blocks, stream);
}
