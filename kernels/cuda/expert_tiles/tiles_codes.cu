/* Products of experts whose weights are e4m3 codes (experts.h), by tiles with mma.
 * Codes are widened to bf16, exactly, in the registers of the lanes that multiply them.
 *
 * As in tiles.cu a block multiplies 64 rows of an expert's weight, gated: 64 of gate
 * and the 64 of up that go with them, with the rows of one tile; four warps divide the
 * weight's rows and two halves of the block the tile's. Blocks are persistent, and
 * their ring of stages runs on from one piece of work to the next.
 *
 * Which columns a lane multiplies is free as long as both operands agree: of 64 columns
 * it has 16 neighbours, so that it reads 16 bytes of codes at once.
 */
#include "kernels/cuda/expert_tiles/tile_store.cuh"
#include "kernels/cuda/expert_tiles/tile_walk.cuh"
#include "kernels/cuda/quant/codes.cuh"

namespace
{

using namespace expert_tiles;
using T = __nv_bfloat16;

enum {
    DEPTH = EXPERT_CODES_K,
    BLOCK_ROWS = 64,
    THREADS = 256,
    CODE_ROW = DEPTH, /* bytes of a weight's row in a stage */
    X_ROW = DEPTH * 2 /* of a row of x */
};

template <int N, bool GATED> struct codes_layout {
    static constexpr int WEIGHT_ROWS = BLOCK_ROWS * (GATED ? 2 : 1);
    static constexpr int X = WEIGHT_ROWS * CODE_ROW; /* of a stage: where the rows of x begin */
    static constexpr int STAGE = X + N * X_ROW;
    static constexpr int STAGES = N <= 32 ? 4 : 3; /* two blocks fit a multiprocessor */
    static constexpr int BYTES = STAGES * STAGE;
};

/* Address of 16-byte chunk `chunk` of row r: lanes that read together hit each bank
 * once. */
__device__ __forceinline__ uint32_t code_chunk(uint32_t base, int r, int chunk)
{
    return base + r * CODE_ROW + ((chunk ^ (r & 1) << 2) << 4);
}

__device__ __forceinline__ uint32_t x_chunk(uint32_t base, int r, int chunk)
{
    return base + r * X_ROW + ((chunk ^ (r & 1)) << 4);
}

using place = position<BLOCK_ROWS, DEPTH>;

/* What a thread loads of each stage of an item: 16 bytes of every 32nd row of the
 * weight and of every 16th of x. */
template <int N, bool GATED> struct loader {
    using L = codes_layout<N, GATED>;
    static constexpr int CODES = L::WEIGHT_ROWS * 8 / THREADS, ROWS = N * 16 / THREADS;
    const uint8_t *code; /* of the first row */
    int64_t stride;      /* to the next of its rows */
    int64_t up;          /* from a row of gate to that of up */
    const T *x[ROWS];    /* NULL: the tile lacks the row */
    uint32_t code_to, x_to;

    __device__ __forceinline__ loader(const expert_product &a)
        : stride(32 * a.w_stride), up(a.width * a.w_stride - 2 * stride),
          code_to(code_chunk(0, threadIdx.x >> 3, threadIdx.x & 7)),
          x_to(x_chunk(L::X, threadIdx.x >> 4, threadIdx.x & 15))
    {
    }
    __device__ __forceinline__ void enter(const expert_product &a, const place &p)
    {
        code = (const uint8_t *)a.w + (p.first + (threadIdx.x >> 3)) * a.w_stride +
               (threadIdx.x & 7) * 16;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int r = (threadIdx.x >> 4) + 16 * i;
            x[i] = nullptr;
            if (r < p.tile.n) {
                x[i] = (const T *)a.x + p.list[r] / a.divide * a.x_stride + (threadIdx.x & 15) * 8;
            }
        }
    }
    /* Rows that the tile lacks are not loaded: no result that is stored depends on
     * them. */
    __device__ __forceinline__ void load(const expert_product &, uint32_t to, int step) const
    {
        const uint8_t *from = code + step * DEPTH;

#pragma unroll
        for (int i = 0; i < CODES; i++) {
            async_copy(to + code_to + i * 32 * CODE_ROW,
                       from + i * stride + (i * 32 < BLOCK_ROWS ? 0 : up));
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (x[i]) {
                async_copy(to + x_to + i * 16 * X_ROW, x[i] + step * DEPTH);
            }
        }
    }
};

/* 16 columns of x in the order in which e4m3_values has their codes. */
__device__ __forceinline__ void load_x(uint32_t (&v)[8], uint32_t rows, int r, int chunk)
{
    uint4 a = load_shared16(x_chunk(rows, r, chunk)),
          b = load_shared16(x_chunk(rows, r, chunk + 1));
    const uint32_t word[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};

#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        v[i] = __byte_perm(word[i], word[i + 1], 0x5410);
        v[i + 1] = __byte_perm(word[i], word[i + 1], 0x7632);
    }
}

/* d += 8 of a lane's columns: codes of two rows of the weight, and of x. */
__device__ __forceinline__ void multiply8(float (&d)[4], const uint4 &low, const uint4 &high,
                                          const uint32_t *x)
{
    uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};

    mma16816<T>(d, first, x[0], x[1]);
    mma16816<T>(d, second, x[2], x[3]);
}

/* What a warp makes of a stage: TILES tiles of 8 rows of x, with 16 rows of the weight,
 * gated: of gate and of up. */
template <int TILES, int KINDS>
__device__ __forceinline__ void multiply_stage(float (&d)[KINDS][TILES][4], uint32_t weights,
                                               uint32_t rows, int warp_row, int first, int lane)
{
    int g = lane >> 2, t = lane & 3;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 low[KINDS][2], high[KINDS][2];
#pragma unroll
        for (int s = 0; s < KINDS; s++) {
            int r = s * BLOCK_ROWS + warp_row + g;
            uint4 a = load_shared16(code_chunk(weights, r, half * 4 + t));
            uint4 b = load_shared16(code_chunk(weights, r + 8, half * 4 + t));
            low[s][0] = e4m3_values(a.x, a.y);
            low[s][1] = e4m3_values(a.z, a.w);
            high[s][0] = e4m3_values(b.x, b.y);
            high[s][1] = e4m3_values(b.z, b.w);
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint32_t x[8];
            load_x(x, rows, first + i * 8 + g, half * 8 + t * 2);
#pragma unroll
            for (int s = 0; s < KINDS; s++) {
                multiply8(d[s][i], low[s][0], high[s][0], x);
                multiply8(d[s][i], low[s][1], high[s][1], x + 4);
            }
        }
    }
}

/* sum += scales * d, and d = 0; of the group that ends with column `end`. */
template <int TILES, int KINDS>
__device__ __forceinline__ void end_group(float (&sum)[KINDS][TILES][4],
                                          float (&d)[KINDS][TILES][4], const expert_product &a,
                                          int64_t row, int end)
{
    int group = (end - 1) / a.group_cols;

#pragma unroll
    for (int s = 0; s < KINDS; s++) {
        const float *at = a.w_scale + (row + s * a.width) * a.n_groups + group;
        float low = __ldg(at), high = __ldg(at + 8 * a.n_groups);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                sum[s][i][k] += (k < 2 ? low : high) * d[s][i][k];
                d[s][i][k] = 0.0f;
            }
        }
    }
}

template <int TILES, int KINDS> __device__ __forceinline__ void clear(float (&d)[KINDS][TILES][4])
{
#pragma unroll
    for (int s = 0; s < KINDS; s++) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            d[s][t][0] = d[s][t][1] = d[s][t][2] = d[s][t][3] = 0.0f;
        }
    }
}

template <int N, bool GATED>
__global__ void __launch_bounds__(THREADS, N <= 32 ? 2 : 1)
    codes_kernel(const __grid_constant__ expert_product a, const __grid_constant__ expert_lists l)
{
    using L = codes_layout<N, GATED>;
    constexpr int TILES = N / 16, KINDS = GATED ? 2 : 1;
    extern __shared__ __align__(1024) char shared[];
    uint32_t base = shared_address(shared);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_row = (warp & 3) * 16;
    int first = (warp >> 2) * (N / 2);
    float d[KINDS][TILES][4] = {}, sum[KINDS][TILES][4] = {};

    pdl_wait();
    pdl_release();
    place now(a, l), ahead(a, l);
    loader<N, GATED> load(a);
    if (ahead.more()) {
        load.enter(a, ahead);
    }
    for (int i = 0; i < L::STAGES - 1; i++) {
        load_next(load, ahead, a, l, base + i * L::STAGE);
    }
    for (int i = 0; now.more(); i++) {
        async_wait<L::STAGES - 2>();
        __syncthreads(); /* stage i is there; all are done with the one before */
        load_next(load, ahead, a, l, base + (i + L::STAGES - 1) % L::STAGES * L::STAGE);
        uint32_t at = base + i % L::STAGES * L::STAGE;
        multiply_stage<TILES, KINDS>(d, at, at + L::X, warp_row, first, lane);
        int end = (now.step + 1) * DEPTH;
        if (end % a.group_cols == 0 || end == a.k) {
            end_group<TILES, KINDS>(sum, d, a, now.first + warp_row + (lane >> 2), end);
        }
        if (end == a.k) {
            store_tile<T, TILES, KINDS>(sum, a, {now.list, now.tile.n, now.first, now.column},
                                        warp_row, first, lane);
            clear<TILES, KINDS>(sum);
        }
        now.next(a, l);
    }
}

template <int N, bool GATED> struct codes_of {
    static constexpr auto KERNEL = codes_kernel<N, GATED>;
    static constexpr int BLOCK = THREADS, BYTES = codes_layout<N, GATED>::BYTES;
};

} // namespace

extern "C" bool launch_expert_codes(const struct expert_product *a, const struct expert_lists *l,
                                    int32_t n_blocks, cudaStream_t stream)
{
    bool fits = a->w_scale && !a->panels && a->type == T_BF16 && a->k % DEPTH == 0 &&
                a->group_cols % DEPTH == 0 && a->width % BLOCK_ROWS == 0 && a->x_stride % 8 == 0 &&
                a->w_stride % 16 == 0 && l->tile_rows <= 64;

    return fits && launch_product<codes_of>(*a, *l, n_blocks, stream);
}
