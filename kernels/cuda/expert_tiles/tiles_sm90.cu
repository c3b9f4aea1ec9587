/* Products of experts by tiles with wgmma (experts.h).
 *
 * A tile is an expert's weight rows times some of the rows that chose it. The weights
 * are the instruction's 64-row operand and the rows its N columns, so that a few rows
 * waste little. Blocks are persistent and walk the list of tiles times blocks of
 * weight rows, the latter innermost: neighbours read the same rows of x.
 *
 * A producer warpgroup fills a ring of stages of 64 columns: its first lane the
 * weights by tensor copies, all its lanes the gathered rows, 16 bytes at a time,
 * swizzled by hand. These copies arrive at the stage's barrier by themselves, and the
 * consumer warpgroup fences them off from what the matrix instructions read. It has two
 * blocks of 64 weight rows; with a gate they are its rows and the ones that it gates,
 * so that a lane has both of a column. Tiles of more rows: tiles_wide.cu.
 *
 * The ring has room for N rows; a tile of at most NARROW of them takes the narrowest
 * instruction all the same. Parts of a shared expert are tiles like others, whose
 * weights have a map of their own.
 *
 * A block of down has its first weights on their way before the launch ahead has ended
 * (expert_product.ahead): what that one needed to begin, the lists, is there by then.
 */
#include "kernels/cuda/expert_tiles/gather.cuh"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/gemm/tensor_map.cuh"
#include "kernels/cuda/gemm/wgmma.cuh"

namespace
{

enum { DEPTH = 64, BLOCK_ROWS = 64, BLOCK_BYTES = BLOCK_ROWS * DEPTH * 2 };
enum { CONSUMERS = 128, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS, NARROW = 16 };

/* N rows. */
template <int N> struct tile_layout {
    static constexpr int WEIGHTS = 2 * BLOCK_BYTES;
    static constexpr int STAGE = WEIGHTS + N * DEPTH * 2;
    static constexpr int RESULT = N * 128; /* 64 columns of each row */
    static constexpr int FIT = (224 * 1024 - RESULT) / STAGE;
    static constexpr int STAGES = FIT > 12 ? 12 : FIT;
    static constexpr int BYTES = STAGES * STAGE + RESULT + 2 * STAGES * 8 + 1024;
};

#if HAS_WGMMA

template <typename T> struct narrow; /* widths that wgmma.cuh lacks */

#define NARROW_OF(T, type)                                                                         \
    template <> struct narrow<T> {                                                                 \
        static __device__ __forceinline__ void run(float (&d)[8], uint64_t a, uint64_t b, int add) \
        {                                                                                          \
            WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                                 \
                      "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                  \
                      " {" WGMMA_NAMES_8 "}, %8, %9, p, 1, 1, 0, 0;\n}"                            \
                      : WGMMA_BIND_8(d)                                                            \
                      : "l"(a), "l"(b), "r"(add));                                                 \
        }                                                                                          \
        static __device__ __forceinline__ void run(float (&d)[16], uint64_t a, uint64_t b,         \
                                                   int add)                                        \
        {                                                                                          \
            WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                 \
                      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                  \
                      " {" WGMMA_NAMES_16 "}, %16, %17, p, 1, 1, 0, 0;\n}"                         \
                      : WGMMA_BIND_16(d)                                                           \
                      : "l"(a), "l"(b), "r"(add));                                                 \
        }                                                                                          \
    };

NARROW_OF(__nv_bfloat16, "bf16")
NARROW_OF(__half, "f16")

template <typename T, int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int add)
{
    if constexpr (N <= 32) {
        narrow<T>::run(d, a, b, add);
    } else {
        wgmma_ss<T, N>::run(d, a, b, add);
    }
}

/* Two pairs of 8 x 8 values, each stored by columns: the lane's address is of row lane
 * % 8 of matrix lane / 8. */
__device__ __forceinline__ void store_transposed(uint32_t to, const uint32_t (&v)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

template <typename T> __device__ __forceinline__ uint32_t both(float lo, float hi)
{
    vec<T, 2> v = {{from_float<T>(lo), from_float<T>(hi)}};

    return *(uint32_t *)&v;
}

/* What a block does in turn: a tile, and a block of its expert's weight rows. */
struct work {
    expert_tile tile;
    int m;
};

__device__ __forceinline__ work work_of(const expert_lists &l, int i, int m_blocks)
{
    int4 t = __ldg((const int4 *)l.tile + i / m_blocks);

    return {{t.x, t.y, t.z, t.w}, i % m_blocks};
}

/* Where the two blocks of weight rows of an item lie. */
struct weight_place {
    const CUtensorMap *map;
    int first, second, column;
};

template <bool GATED>
__device__ __forceinline__ weight_place place_of(const CUtensorMap *w, const CUtensorMap *shared,
                                                 const expert_product &a, const work &k)
{
    int part = k.tile.expert - a.n, row = k.m * BLOCK_ROWS * (GATED ? 1 : 2);

    if (part < 0) {
        row += k.tile.expert * a.width * (GATED ? 2 : 1);
        return {w, row, row + (GATED ? a.width : BLOCK_ROWS), 0};
    }
    if (GATED) {
        row += part * a.width;
        return {shared, row, row + a.parts * a.width, 0};
    }
    return {shared, row, row + BLOCK_ROWS, part * a.k};
}

/* A block's ring of stages, and how much there is to do. */
struct places {
    char *ring; /* the same as `base` */
    uint32_t base, full, empty;
    int n_work, m_blocks;
};

template <int N>
__device__ __forceinline__ void load_stage(const weight_place &at, uint32_t to, uint32_t bar, int s)
{
    barrier_expect(bar, tile_layout<N>::WEIGHTS);
    tensor_copy(to, at.map, at.column + s * DEPTH, at.first, bar);
    tensor_copy(to + BLOCK_BYTES, at.map, at.column + s * DEPTH, at.second, bar);
}

/* Begins to load the weights of the first stages of the block's first item, of a
 * product without a gate. By one thread. Returns how many stages. */
template <int N>
__device__ __forceinline__ int load_ahead(const CUtensorMap *w, const CUtensorMap *shared,
                                          const expert_product &a, const expert_lists &l,
                                          const places &p)
{
    using L = tile_layout<N>;
    int stages = min((int)L::STAGES, a.k / DEPTH);

    if ((int)blockIdx.x >= l.total[0] * p.m_blocks) {
        return 0;
    }
    weight_place at = place_of<false>(w, shared, a, work_of(l, blockIdx.x, p.m_blocks));
    for (int s = 0; s < stages; s++) {
        load_stage<N>(at, p.base + s * L::STAGE, p.full + s * 8, s);
    }
    return stages;
}

/* ahead: of the first stages, whose weights this thread has on their way. */
template <typename T, int N, bool GATED>
__device__ __forceinline__ void produce(const CUtensorMap *w, const CUtensorMap *shared,
                                        const expert_product &a, const expert_lists &l,
                                        const places &p, int ahead)
{
    using L = tile_layout<N>;
    constexpr int ROWS = (N + 15) / 16; /* of a thread: 8 threads copy a row's 128 bytes */
    int t = threadIdx.x - CONSUMERS, chunk = t & 7, r0 = t >> 3, steps = a.k / DEPTH;
    int i = 0; /* stages so far */

    for (int item = blockIdx.x; item < p.n_work; item += gridDim.x) {
        work k = work_of(l, item, p.m_blocks);
        const int32_t *list = l.list + (int64_t)k.tile.expert * l.cap + k.tile.first;
        const T *from[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            int r = r0 + j * 16;
            from[j] = r < k.tile.n
                          ? (const T *)a.x + (int64_t)(list[r] / a.divide) * a.x_stride + chunk * 8
                          : NULL;
        }
        weight_place at = place_of<GATED>(w, shared, a, k);
        for (int s = 0; s < steps; s++, i++) {
            int stage = i % L::STAGES;
            uint32_t to = p.base + stage * L::STAGE, bar = p.full + stage * 8;
            if (i >= L::STAGES) {
                barrier_wait(p.empty + stage * 8, (i / L::STAGES & 1) ^ 1);
            }
            if (t == 0 && i >= ahead) {
                load_stage<N>(at, to, bar, s);
            }
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                int r = r0 + j * 16;
                if (from[j]) {
                    copy_chunk(to + L::WEIGHTS + r * 128 + ((chunk ^ (r & 7)) << 4),
                               from[j] + s * DEPTH);
                }
            }
            random_delay();
            arrive_behind_copies(bar);
        }
    }
    finish_copies();
}

/* Stores 64 columns of the tile's rows, `d` being [64 columns, N rows] as the
 * instruction leaves it, by way of `result` in shared memory. `column`: the first
 * one. */
template <typename T, int N>
__device__ __forceinline__ void store_block(const float (&d)[N / 2], uint32_t result,
                                            const char *result_at, const expert_product &a,
                                            const int32_t *list, int n, int column)
{
    int t = threadIdx.x & 127, lane = t & 31, warp = t >> 5;

#pragma unroll
    for (int j = 0; j < N / 16; j++) { /* matrices: columns + 0, + 8 of rows j * 16 + 0, + 8 */
        int r = j * 16 + (lane >> 4) * 8 + (lane & 7), chunk = warp * 2 + (lane >> 3 & 1);
        uint32_t v[4] = {both<T>(d[j * 8], d[j * 8 + 1]), both<T>(d[j * 8 + 2], d[j * 8 + 3]),
                         both<T>(d[j * 8 + 4], d[j * 8 + 5]), both<T>(d[j * 8 + 6], d[j * 8 + 7])};
        store_transposed(result + r * 128 + ((chunk ^ (r & 7)) << 4), v);
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
    for (int r = t >> 3; r < n; r += 16) {
        uint4 v = *(const uint4 *)(result_at + r * 128 + (((t & 7) ^ (r & 7)) << 4));
        *(uint4 *)((T *)a.out + (int64_t)list[r] * a.out_stride + column + (t & 7) * 8) = v;
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

/* Adds biases (NULL: none) and gates: what is left is in d0; without a gate the blocks
 * stay apart. */
template <typename T, int N, bool GATED>
__device__ __forceinline__ void finish(float (&d0)[N / 2], float (&d1)[N / 2],
                                       const expert_product &a, const T *bias, int64_t first,
                                       int64_t second)
{
    int lane = threadIdx.x & 31, r = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);

#pragma unroll
    for (int h = 0; h < 2; h++) {
        float b0 = bias ? to_float(bias[first + r + h * 8]) : 0.0f;
        float b1 = bias ? to_float(bias[second + r + h * 8]) : 0.0f;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &u = d0[j * 4 + h * 2 + c], &v = d1[j * 4 + h * 2 + c];
                if (bias) {
                    u += b0;
                    v += b1;
                }
                u = GATED ? expert_gate(u, v, a.act, a.limit) : u;
            }
        }
    }
}

/* Multiplies a tile of at most W rows with a block of weight rows; i: stages so far. */
template <typename T, int N, int W, bool GATED>
__device__ __forceinline__ void multiply_item(float (&d0)[W / 2], float (&d1)[W / 2],
                                              const places &p, int steps, int &i)
{
    using L = tile_layout<N>;
    int lane = threadIdx.x & 31;

    for (int s = 0; s < steps; s++, i++) {
        int stage = i % L::STAGES;
        uint32_t at = p.base + stage * L::STAGE;
        barrier_wait(p.full + stage * 8, i / L::STAGES & 1);
        proxy_fence();
        uint64_t w0 = wgmma_descriptor(at), w1 = wgmma_descriptor(at + BLOCK_BYTES),
                 x = wgmma_descriptor(at + L::WEIGHTS);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < DEPTH / 16; c++) {
            multiply<T, W>(d0, w0 + c * 2, x + c * 2, s > 0 || c > 0);
            multiply<T, W>(d1, w1 + c * 2, x + c * 2, s > 0 || c > 0);
        }
        wgmma_commit();
        if (s > 0) {
            wgmma_wait<1>();
            if (lane == 0) {
                barrier_arrive(p.empty + (i - 1) % L::STAGES * 8);
            }
        }
    }
    wgmma_wait<0>();
    if (lane == 0) {
        barrier_arrive(p.empty + (i - 1) % L::STAGES * 8);
    }
}

template <typename T, int N, int W, bool GATED>
__device__ __forceinline__ void consume_item(const expert_product &a, const expert_lists &l,
                                             const places &p, const work &k, int &i)
{
    using L = tile_layout<N>;
    float d0[W / 2], d1[W / 2];
    uint32_t offset = L::STAGES * L::STAGE;

    multiply_item<T, N, W, GATED>(d0, d1, p, a.k / DEPTH, i);
    const int32_t *list = l.list + (int64_t)k.tile.expert * l.cap + k.tile.first;
    int column = k.m * BLOCK_ROWS * (GATED ? 1 : 2);
    int64_t first = (int64_t)k.tile.expert * a.width * (GATED ? 2 : 1) + column;
    const T *bias = k.tile.expert < a.n ? (const T *)a.bias : NULL;
    if (column < a.width) {
        bool two = !GATED && column + BLOCK_ROWS < a.width;
        int next = GATED ? a.width : two ? BLOCK_ROWS : 0;
        finish<T, W, GATED>(d0, d1, a, bias, first, first + next);
        store_block<T, W>(d0, p.base + offset, p.ring + offset, a, list, k.tile.n, column);
        if (two) {
            store_block<T, W>(d1, p.base + offset, p.ring + offset, a, list, k.tile.n,
                              column + BLOCK_ROWS);
        }
    }
}

template <typename T, int N, bool GATED>
__device__ __forceinline__ void consume(const expert_product &a, const expert_lists &l,
                                        const places &p)
{
    int i = 0;

    for (int item = blockIdx.x; item < p.n_work; item += gridDim.x) {
        work k = work_of(l, item, p.m_blocks);
        if (N > NARROW && k.tile.n > NARROW) {
            consume_item<T, N, N, GATED>(a, l, p, k, i);
        } else {
            consume_item<T, N, NARROW, GATED>(a, l, p, k, i);
        }
    }
}

#endif

template <typename T, int N, bool GATED>
__global__ void __launch_bounds__(HAS_WGMMA ? THREADS : 32, 1)
    tiles_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap shared,
                 const __grid_constant__ expert_product a, const __grid_constant__ expert_lists l)
{
#if HAS_WGMMA
    using L = tile_layout<N>;
    extern __shared__ char raw[];
    places p;

    p.base = (shared_address(raw) + 1023) & ~1023u;
    p.ring = raw + (p.base - shared_address(raw));
    p.full = p.base + L::STAGES * L::STAGE + L::RESULT;
    p.empty = p.full + L::STAGES * 8;
    if (threadIdx.x == 0) {
        barriers_init(p.full, L::STAGES, 1 + PRODUCERS);
    } else if (threadIdx.x == 32) {
        barriers_init(p.empty, L::STAGES, CONSUMERS / 32);
    }
    __syncthreads();
    int rows = BLOCK_ROWS * (GATED ? 1 : 2), ahead = 0;
    p.m_blocks = (a.width + rows - 1) / rows;
    if (!GATED && a.ahead && threadIdx.x == CONSUMERS) {
        ahead = load_ahead<N>(&w, &shared, a, l, p);
    }
    pdl_wait();
    pdl_release();
    p.n_work = l.total[0] * p.m_blocks;
    if (threadIdx.x >= CONSUMERS) {
        produce<T, N, GATED>(&w, &shared, a, l, p, ahead);
    } else {
        consume<T, N, GATED>(a, l, p);
    }
#endif
}

/* ---- host ---- */

/* Maps of the experts' weight and of the shared expert's, for boxes of 64 rows and
 * columns. */
struct weight_maps {
    CUtensorMap experts, shared; /* without parts the second is as the first */

    bool make(const expert_product &a)
    {
        int64_t rows = (int64_t)a.width * (a.gated ? 2 : 1), parts = a.parts;

        if (!tensor_map_16(&experts, a.type, a.w, a.n * rows, a.k, a.w_stride, BLOCK_ROWS)) {
            return false;
        }
        shared = experts;
        return parts == 0 ||
               tensor_map_16(&shared, a.type, a.shared, a.gated ? parts * rows : rows,
                             a.gated ? a.k : parts * a.k, a.shared_stride, BLOCK_ROWS);
    }
};

/* Whether the device runs code with wgmma, which only sm_90a's has: the kernel of other
 * code has blocks of a warp. */
bool has_wgmma(void)
{
    static int found = -1;
    cudaFuncAttributes f;

    if (found < 0) {
        found = cudaFuncGetAttributes(&f, tiles_kernel<__nv_bfloat16, 16, true>) == cudaSuccess &&
                f.maxThreadsPerBlock > 32;
        cudaGetLastError();
    }
    return found > 0;
}

template <typename T, int N, bool GATED>
bool run(const weight_maps &m, const expert_product &a, const expert_lists &l, int n_blocks,
         cudaStream_t stream)
{
    using L = tile_layout<N>;
    auto kernel = tiles_kernel<T, N, GATED>;
    static bool allowed = allow_shared(kernel, L::BYTES);

    if (!allowed) {
        return false;
    }
    launch(kernel, dim3((unsigned)n_blocks), dim3(THREADS), L::BYTES, stream, m.experts, m.shared,
           a, l);
    return true;
}

template <typename T, bool GATED>
bool run_width(const weight_maps &m, const expert_product &a, const expert_lists &l, int n_blocks,
               cudaStream_t stream)
{
    switch (l.tile_rows) {
    case 16:
        return run<T, 16, GATED>(m, a, l, n_blocks, stream);
    case 32:
        return run<T, 32, GATED>(m, a, l, n_blocks, stream);
    default:
        return run<T, 64, GATED>(m, a, l, n_blocks, stream);
    }
}

} // namespace

extern "C" bool expert_tiles_fit(int32_t hidden, int32_t width, int32_t type)
{
    return (type == T_BF16 || type == T_F16) && hidden % 64 == 0 && width % 64 == 0 &&
           has_wgmma() && tensor_map_encoder() && expert_wide_fits();
}

extern "C" bool launch_expert_tiles(const struct expert_product *a, const struct expert_lists *l,
                                    int32_t n_blocks, cudaStream_t stream)
{
    weight_maps m;

    if (l->tile_rows > 64) {
        return a->parts == 0 && launch_expert_wide(a, l, n_blocks, stream);
    }
    if (!m.make(*a)) {
        return false;
    }
    if (a->type == T_F16) {
        return a->gated ? run_width<__half, true>(m, *a, *l, n_blocks, stream)
                        : run_width<__half, false>(m, *a, *l, n_blocks, stream);
    }
    return a->gated ? run_width<__nv_bfloat16, true>(m, *a, *l, n_blocks, stream)
                    : run_width<__nv_bfloat16, false>(m, *a, *l, n_blocks, stream);
}
