/* Products of experts by tiles with mma (experts.h), for code without wgmma. As in
 * tiles_sm90.cu the weights are the rows of the instruction and the rows of x its
 * columns.
 *
 * A block multiplies 64 rows of an expert's weight, gated: 64 of gate and the 64 of up
 * that go with them, with the rows of one tile. Blocks are persistent. Four warps
 * divide the 64 rows and two halves of the block divide the tile's rows; a warp's gate
 * and up rows meet in the same registers. A ring of stages is filled by cp.async, 16
 * bytes a thread, with chunks permuted so that ldmatrix has no bank conflicts.
 */
#include "kernels/cuda/expert_tiles/tile_store.cuh"
#include "kernels/cuda/expert_tiles/tile_walk.cuh"

namespace
{

enum { DEPTH = 64, BLOCK_ROWS = 64, THREADS = 256, STAGES = 3, ROW_BYTES = DEPTH * 2 };

template <int N, bool GATED> struct mma_layout {
    static constexpr int WEIGHT_ROWS = BLOCK_ROWS * (GATED ? 2 : 1);
    static constexpr int STAGE = (WEIGHT_ROWS + N) * ROW_BYTES;
    static constexpr int BYTES = STAGES * STAGE;
};

/* Address of 16-byte chunk `chunk` of row r. */
__device__ __forceinline__ uint32_t chunk_at(uint32_t base, int r, int chunk)
{
    return base + r * ROW_BYTES + ((chunk ^ (r & 7)) << 4);
}

/* One tile times one block of weight rows: what the threads load. */
struct mma_work {
    expert_tile tile;
    int column;          /* the first of the block's weight rows, of gate's or of all */
    int64_t first;       /* its row in the stacked weight */
    const int32_t *list; /* the tile's pairs */
};

__device__ __forceinline__ mma_work mma_work_of(const expert_product &a, const expert_lists &l,
                                                int i, int m_blocks)
{
    int4 t = __ldg((const int4 *)l.tile + i / m_blocks);
    mma_work w = {{t.x, t.y, t.z, t.w}, i % m_blocks * BLOCK_ROWS, 0, nullptr};

    w.first = (int64_t)t.x * a.width * (a.gated ? 2 : 1) + w.column;
    w.list = l.list + (int64_t)t.x * l.cap + t.y;
    return w;
}

/* Stage `step` of the depth. Rows that the tile lacks are not loaded: no result that is
 * stored depends on them. */
template <typename T, int N, bool GATED>
__device__ __forceinline__ void load_stage(const expert_product &a, const mma_work &w, int step,
                                           uint32_t to)
{
    using L = mma_layout<N, GATED>;

    for (int i = threadIdx.x; i < (L::WEIGHT_ROWS + N) * 8; i += THREADS) {
        int r = i >> 3, chunk = i & 7, c = step * DEPTH + chunk * 8;
        if (r < L::WEIGHT_ROWS) {
            int64_t row = w.first + (r < BLOCK_ROWS ? r : a.width + r - BLOCK_ROWS);
            async_copy(chunk_at(to, r, chunk), (const T *)a.w + row * a.w_stride + c);
        } else if (r - L::WEIGHT_ROWS < w.tile.n) {
            int pair = w.list[r - L::WEIGHT_ROWS] / a.divide;
            async_copy(chunk_at(to, r, chunk), (const T *)a.x + pair * a.x_stride + c);
        }
    }
}

/* What a warp makes of a stage: TILES tiles of 8 rows of x, with 16 rows of the weight,
 * gated: of gate and of up. */
template <typename T, int TILES, int KINDS>
__device__ __forceinline__ void multiply_stage(float (&d)[KINDS][TILES][4], uint32_t weights,
                                               uint32_t rows, int warp_row, int first, int lane)
{
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        uint32_t w[KINDS][4];
#pragma unroll
        for (int s = 0; s < KINDS; s++) {
            int r = s * BLOCK_ROWS + warp_row + (lane & 15);
            ldmatrix_x4(w[s], chunk_at(weights, r, k * 2 + (lane >> 4)));
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            uint32_t b[4]; /* the upper half repeats the lower */
            int r = first + t * 8 + (lane & 7);
            ldmatrix_x4(b, chunk_at(rows, r, k * 2 + (lane >> 3 & 1)));
#pragma unroll
            for (int s = 0; s < KINDS; s++) {
                mma16816<T>(d[s][t], w[s], b[0], b[1]);
            }
        }
    }
}

template <typename T, int N, bool GATED>
__global__ void __launch_bounds__(THREADS)
    mma_kernel(const __grid_constant__ expert_product a, const __grid_constant__ expert_lists l)
{
    using L = mma_layout<N, GATED>;
    constexpr int TILES = N / 16, KINDS = GATED ? 2 : 1;
    extern __shared__ __align__(1024) char shared[];
    uint32_t base = shared_address(shared);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_row = (warp & 3) * 16;
    int first = (warp >> 2) * (N / 2), steps = a.k / DEPTH, m_blocks = a.width / BLOCK_ROWS;

    pdl_wait();
    pdl_release();
    int n_work = l.total[0] * m_blocks;
    for (int item = blockIdx.x; item < n_work; item += gridDim.x) {
        mma_work w = mma_work_of(a, l, item, m_blocks);
        float d[KINDS][TILES][4] = {};
        for (int i = 0; i < STAGES - 1; i++) {
            if (i < steps) {
                load_stage<T, N, GATED>(a, w, i, base + i * L::STAGE);
            }
            async_commit();
        }
        for (int i = 0; i < steps; i++) {
            async_wait<STAGES - 2>();
            __syncthreads(); /* stage i is there; all are done with the one before */
            int ahead = i + STAGES - 1;
            if (ahead < steps) {
                load_stage<T, N, GATED>(a, w, ahead, base + ahead % STAGES * L::STAGE);
            }
            async_commit();
            uint32_t at = base + i % STAGES * L::STAGE;
            multiply_stage<T, TILES, KINDS>(d, at, at + L::WEIGHT_ROWS * ROW_BYTES, warp_row, first,
                                            lane);
        }
        store_tile<T, TILES, KINDS>(d, a, {w.list, w.tile.n, w.first, w.column}, warp_row, first,
                                    lane);
        __syncthreads(); /* the ring is free */
    }
}

template <typename T> struct mma_of {
    template <int N, bool GATED> struct tile {
        static constexpr auto KERNEL = mma_kernel<T, N, GATED>;
        static constexpr int BLOCK = THREADS, BYTES = mma_layout<N, GATED>::BYTES;
    };
};

} // namespace

extern "C" bool launch_expert_mma(const struct expert_product *a, const struct expert_lists *l,
                                  int32_t n_blocks, cudaStream_t stream)
{
    bool fits = (a->type == T_F16 || a->type == T_BF16) && a->k % DEPTH == 0 &&
                a->width % BLOCK_ROWS == 0 && a->x_stride % 8 == 0 && a->w_stride % 8 == 0 &&
                l->tile_rows <= 64;

    if (!fits) {
        return false;
    }
    return a->type == T_F16
               ? expert_tiles::launch_product<mma_of<__half>::tile>(*a, *l, n_blocks, stream)
               : expert_tiles::launch_product<mma_of<__nv_bfloat16>::tile>(*a, *l, n_blocks,
                                                                           stream);
}
