/* The tile of a product of many rows (Hopper, sm_90a): 128 rows of x times 256 rows of
 * weights, by two consumer warpgroups of 64 rows each, whose operands a producer puts
 * into a ring of stages of 64 columns.
 *
 * Both operands of a stage are swizzled as 128-byte rows. A full barrier has one
 * arrival and the stage's bytes; an empty barrier one arrival of each warpgroup that
 * reads the stage, in the other block of a cluster too if that one's producer writes to
 * both.
 */
#ifndef QUIRE_KERNELS_CUDA_GEMM_TILES_SM90_CUH
#define QUIRE_KERNELS_CUDA_GEMM_TILES_SM90_CUH

#include "kernels/cuda/gemm/tensor_map.cuh"
#include "kernels/cuda/gemm/wgmma.cuh"

namespace tiles
{

enum {
    ROWS = 128,
    COLUMNS = 256,
    DEPTH = 64,
    GROUPS = 2, /* consumer warpgroups */
    THREADS = (GROUPS + 1) * 128,
    X_BYTES = ROWS * DEPTH * 2,
    W_BYTES = COLUMNS * DEPTH * 2,
    STAGE = X_BYTES + W_BYTES,
    STAGES = 4,
    PANEL = 64 * 128, /* 64 rows of 64 results */
    PANELS = 2,       /* of a warpgroup, used in turn */
    BARRIERS = STAGES * STAGE + GROUPS * PANELS * PANEL,
    BYTES = BARRIERS + 2 * STAGES * 8 + 1024,
};

/* The walk over tiles: `group` pairs of row tiles times all tiles of columns, then the
 * next pairs, so that blocks at work at one time share operands in the second-level
 * cache. */
struct walk {
    int32_t n_pairs, n_columns; /* of row tiles; tiles of columns */
    int32_t group;
};

struct tile {
    int row, column; /* first row of x of this block; column of out */
};

#if HAS_WGMMA

/* HEIGHT: rows of a block's tile; WIDTH: its columns of out. */
template <int CLUSTER, int WIDTH, int HEIGHT>
__device__ __forceinline__ tile tile_of(const walk &w, int i, int rank)
{
    int whole = w.group * w.n_columns, g = i / whole, left = i - g * whole;
    int pairs = min(w.group, w.n_pairs - g * w.group);
    int column = left / pairs, pair = g * w.group + left - column * pairs;

    return {(pair * CLUSTER + rank) * HEIGHT, column * WIDTH};
}

/* Where a thread stands in the ring. */
struct ring {
    uint32_t base; /* of shared memory, a multiple of 1024 */
    int stage;
    uint32_t phase;

    __device__ __forceinline__ uint32_t at() const
    {
        return base + stage * STAGE;
    }
    __device__ __forceinline__ uint32_t full() const
    {
        return base + BARRIERS + stage * 8;
    }
    __device__ __forceinline__ uint32_t empty() const
    {
        return base + BARRIERS + (STAGES + stage) * 8;
    }
    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* The address in block `rank` of the cluster of what is at `shared` in each. */
__device__ __forceinline__ uint32_t address_in(uint32_t shared, uint32_t rank)
{
    uint32_t v;

    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(shared), "r"(rank));
    return v;
}

__device__ __forceinline__ void arrive_in_cluster(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* A warpgroup has read the stage: its threads 0 .. CLUSTER - 1 tell each block. */
template <int CLUSTER> __device__ __forceinline__ void give_back(uint32_t empty)
{
    random_delay();
    if ((threadIdx.x & 127) < CLUSTER) {
        if (CLUSTER > 1) {
            arrive_in_cluster(address_in(empty, threadIdx.x & 127));
        } else {
            barrier_arrive(empty);
        }
    }
}

/* d [64 rows of the warpgroup, 256] = the product over `steps` stages. FENCED: some of
 * a stage was not written by the copy engine. */
template <typename T, int CLUSTER, bool FENCED = false>
__device__ __forceinline__ void multiply(float (&d)[COLUMNS / 2], ring &r, int steps, int group)
{
    uint32_t last = 0;

    for (int s = 0; s < steps; s++) {
        barrier_wait(r.full(), r.phase);
        if (FENCED) {
            proxy_fence();
        }
        uint64_t x = wgmma_descriptor(r.at() + group * (X_BYTES / GROUPS)),
                 w = wgmma_descriptor(r.at() + X_BYTES);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < DEPTH / 16; c++) {
            wgmma_ss<T, COLUMNS>::run(d, x + c * 2, w + c * 2, s > 0 || c > 0);
        }
        wgmma_commit();
        if (s > 0) {
            wgmma_wait<1>();
            give_back<CLUSTER>(last);
        }
        last = r.empty();
        r.next();
    }
    wgmma_wait<0>();
    give_back<CLUSTER>(last);
}

/* Four 8 x 8 matrices: the lane's address is of row lane % 8 of matrix lane / 8. */
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&v)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

template <typename T> __device__ __forceinline__ uint32_t both(float lo, float hi)
{
    vec<T, 2> v = {{from_float<T>(lo), from_float<T>(hi)}};

    return *(uint32_t *)&v;
}

/* A barrier of one consumer warpgroup. */
__device__ __forceinline__ void sync_group(int group)
{
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

/* In place of `multiply`, for a warpgroup that has no rows. */
template <int CLUSTER> __device__ __forceinline__ void pass_over(ring &r, int steps, int group)
{
    for (int s = 0; s < steps; s++, r.next()) {
        barrier_wait(r.full(), r.phase);
        sync_group(group); /* no warp may fall a round behind */
        give_back<CLUSTER>(r.empty());
    }
}

/* Writes results 64 p .. 64 p + 63 of the warpgroup's rows to `panel`, swizzled.
 * value(j, i): the thread's i-th result of four in columns 8 j .. 8 j + 7, as the
 * instruction leaves them. */
template <typename T, typename VALUE>
__device__ __forceinline__ void fill_panel(uint32_t panel, int p, VALUE value)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    int row = warp * 16 + (lane & 15);
    uint32_t to = panel + row * 128;

#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        int c = p * 8 + j;
        uint32_t v[4] = {both<T>(value(c, 0), value(c, 1)), both<T>(value(c, 2), value(c, 3)),
                         both<T>(value(c + 1, 0), value(c + 1, 1)),
                         both<T>(value(c + 1, 2), value(c + 1, 3))};
        store_matrices(to + (((j + (lane >> 4)) ^ (row & 7)) << 4), v);
    }
}

#endif

} // namespace tiles

#endif
