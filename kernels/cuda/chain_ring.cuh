/* The weights' way into a chain: which tiles a block has, the ring of stages in shared memory, the warps that fill it; and the
 * barriers of its warps and of all blocks. */
#ifndef QUIRE_CUDA_CHAIN_RING_CUH
#define QUIRE_CUDA_CHAIN_RING_CUH

#include "kernels/cuda/attn_common.cuh"
#include "kernels/cuda/chain.h"

enum {
    THREADS = CHAIN_WARPS * 32, /* that multiply */
    PITCH = CHAIN_STEP * 2,
    SLICE = CHAIN_STEP / CHAIN_WARPS, /* columns of a stage that a warp has */
    VECTORS = CHAIN_PANEL_VECTORS / THREADS,
    TILES = 2, /* of a block that share a panel, where x is deeper than it */
    LOADERS = 4, /* warps that load, each a quarter of a tile's rows: 12 warps have the same registers as 9 */
    LOADED_ROWS = CHAIN_TILE / LOADERS,
};
static_assert(SLICE == 64, "a lane loads 16 columns of a row as two vectors");


/* ---- barriers ------------------------------------------------------------------------------------------------------- */

/* The multiplying warps. */
__device__ __forceinline__ void warps_sync(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"((int)THREADS) : "memory");
}

__device__ __forceinline__ void ring_arrive(uint32_t bar)
{
#if BULK_COPY
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

/* All of this block's writes are done; counted once a block. */
__device__ __forceinline__ void blocks_arrive(int32_t *counter)
{
    warps_sync();
    if (threadIdx.x == 0)
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void blocks_wait(const int32_t *counter)
{
    if (threadIdx.x == 0) {
        int32_t n;
        do
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
        while (n < (int)gridDim.x);
    }
    warps_sync();
}

/* Every block has passed every barrier once it was here; the last one makes them ready for the next launch. */
__device__ __forceinline__ void blocks_leave(const chain_args &a, uint32_t summed)
{
    int32_t *left = a.counter + CHAIN_PHASES * CHAIN_COUNTER_STRIDE;
    if (threadIdx.x == 0 && atomicAdd(left, 1) == (int)gridDim.x - 1) {
        for (int i = 0; i < a.n_phases; i++)
            a.counter[i * CHAIN_COUNTER_STRIDE] = 0;
        *left = 0;
        if (a.peer.n_ranks > 1)
            a.peer.epoch[PEER_EPOCH_CHAIN] = summed;
    }
}

/* ---- what a block has to do ----------------------------------------------------------------------------------------- */

/* This block's tiles of a phase. */
struct deal {
    chain_deal d;
    __device__ __forceinline__ deal(const chain_phase &q) : d(chain_deal_of(&q, blockIdx.x, gridDim.x)) {}
    __device__ __forceinline__ int n() const { return d.n; }
    __device__ __forceinline__ int tile(int i) const { return d.first + i * gridDim.x; }
};

/* Tiles of a block that are multiplied by one panel before the next. */
__device__ __forceinline__ int tiles_together(const chain_phase &q) { return q.depth < q.k ? TILES : 1; }

/* Row of the weight that is row i of a tile. */
__device__ __forceinline__ int weight_row(const chain_phase &q, int tile, int i)
{
    int tiles = q.pair / CHAIN_TILE;
    return tile / tiles * q.pair + tile % tiles * (CHAIN_TILE / 2) + (i & 7) + (i < 8 ? 0 : q.pair / 2);
}

/* Places in the ring, taken in turn by loader and multipliers alike. */
struct ring {
    uint32_t stage, full, empty; /* shared addresses: of place 0, of barriers */
    int n, at;
    uint32_t round; /* parity */
    __device__ __forceinline__ uint32_t place(void) const { return stage + at * CHAIN_STAGE_BYTES; }
    __device__ __forceinline__ void next(void)
    {
        if (++at == n) {
            at = 0;
            round ^= 1;
        }
    }
};

/* ---- the loading warps ---------------------------------------------------------------------------------------------- */

/* Weights are read once: they make room in the second-level cache first. */
__device__ __forceinline__ uint64_t once_policy(void)
{
    uint64_t policy = 0;
#if BULK_COPY
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

__device__ __forceinline__ void bulk_copy_once(uint32_t to, const void *from, uint32_t bytes, uint32_t bar, uint64_t policy)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
#endif
}

/* Rows from `row` on of a stage, by one thread: a copy needs its operands the same in all lanes. */
template <typename T>
__device__ __forceinline__ void load_stage(ring &r, const T *row, int64_t stride, int cols, int loader, uint64_t policy)
{
    uint32_t bar = r.full + r.at * 8, to = r.place() + loader * LOADED_ROWS * PITCH;
    barrier_wait(r.empty + r.at * 8, r.round ^ 1);
    barrier_expect(bar, LOADED_ROWS * cols * sizeof(T));
#pragma unroll
    for (int i = 0; i < LOADED_ROWS; i++)
        bulk_copy_once(to + i * PITCH, row + i * stride, cols * sizeof(T), bar, policy);
    r.next();
}

template <typename T> __device__ __forceinline__ void load_weights(const chain_args &a, ring &r, int loader)
{
    uint64_t policy = once_policy();
    ring lag = r;
    int issued = 0;
    for (int p = 0; p < a.n_phases; p++) {
        const chain_phase &q = a.phase[p];
        deal d(q);
        int group = tiles_together(q);
        for (int i = 0; i < d.n(); i += group)
            for (int k0 = 0; k0 < q.k; k0 += q.depth)
                for (int j = i; j < min(i + group, d.n()); j++) {
                    const T *row = (const T *)q.w + weight_row(q, d.tile(j), loader * LOADED_ROWS) * q.w_stride;
                    int end = min(k0 + q.depth, q.k);
                    for (int k = k0; k < end; k += CHAIN_STEP) {
                        if (issued++ >= a.window) {
                            barrier_wait(lag.full + lag.at * 8, lag.round);
                            lag.next();
                        }
                        load_stage<T>(r, row + k, q.w_stride, min(CHAIN_STEP, end - k), loader, policy);
                    }
                }
    }
}

#endif
