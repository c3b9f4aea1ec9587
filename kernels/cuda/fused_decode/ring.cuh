/* Weight loading of a fused launch: a block's tiles, the ring of shared-memory stages,
 * and the warps that fill it; also the barriers between warps and between blocks. */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_RING_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_RING_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/fused_decode/fused_decode.h"
#include "kernels/cuda/gemm/read_once.cuh"
#include "kernels/cuda/quant/quant.h"

enum {
    MMA_THREADS = FUSED_MMA_WARPS * 32, /* threads of the MMA warps */
    EPILOGUE_WARPS = 4,                 /* they take tiles in turn */
    /* each loads a quarter of a tile's rows */
    LOAD_WARPS = 4,
    LOAD_ROWS = FUSED_TILE / LOAD_WARPS,
};

/* The shape of a stage of weights of format F. A lane has two 16-byte vectors of a
 * row's codes; the columns of one are CODES neighbours. */
template <int F> struct stage_shape {
    static constexpr int K = F == FUSED_INT4 ? 2048 : F == FUSED_FP8 ? 1024 : FUSED_STAGE_K;
    static constexpr int WARP_K = K / FUSED_MMA_WARPS; /* columns of an MMA warp */
    static constexpr int CODES = F == FUSED_INT4 ? 32 : F == FUSED_FP8 ? 16 : 8;
    static constexpr int VECTORS = 2 * CODES / 8; /* of 8 activations that a lane has */
    static constexpr int SLICE_STAGES = FUSED_SLICE_K / K;
    /* Bytes between rows; of FUSED_INT4 all rows of a segment are followed by those of
     * the next one. */
    static constexpr int PITCH = F == FUSED_INT4 ? FUSED_SEGMENT_BYTES : 1024;
    static constexpr int BYTES = FUSED_TILE * PITCH * (F == FUSED_INT4 ? K / FUSED_SEGMENT_K : 1);

    /* Columns from a lane's first one in a stage to those of its vector i. */
    static __device__ __forceinline__ int column(int i)
    {
        return i / (VECTORS / 2) * (4 * CODES) + i % (VECTORS / 2) * 8;
    }
};
static_assert(stage_shape<FUSED_16>::WARP_K == 64, "a lane's two vectors of a row are its columns");

/* ---- barriers ---- */

/* Named barriers: of the MMA warps; of the MMA and epilogue warps, before and after an
 * op. */
enum { BARRIER_MMA = 1, BARRIER_OP_OPEN, BARRIER_OP_DONE };

__device__ __forceinline__ void mma_warps_sync(void)
{
    asm volatile("bar.sync %0, %1;" ::"n"((int)BARRIER_MMA), "n"((int)MMA_THREADS) : "memory");
}

__device__ __forceinline__ void op_sync(int barrier)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(MMA_THREADS + EPILOGUE_WARPS * 32)
                 : "memory");
}

__device__ __forceinline__ void op_arrive(int barrier)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(MMA_THREADS + EPILOGUE_WARPS * 32)
                 : "memory");
}

/* Grid barrier, first half, by an epilogue warp: this block's writes of the op are
 * done. */
__device__ __forceinline__ void blocks_arrive(int32_t *counter)
{
    random_delay();
    if ((threadIdx.x & 31) == 0) {
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
    }
}

/* Grid barrier, second half: the first epilogue warp polls, the others and the MMA
 * warps wait for it. */
__device__ __forceinline__ void blocks_wait(const int32_t *counter, int warp_index)
{
    if (warp_index > 0) {
        return op_sync(BARRIER_OP_OPEN);
    }
    if ((threadIdx.x & 31) == 0) {
        int32_t n;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
        } while (n < (int)gridDim.x);
    }
    random_delay();
    __syncwarp();
    op_arrive(BARRIER_OP_OPEN);
}

/* Counts blocks that have passed all grid barriers; the last one resets them for the
 * next launch. */
__device__ __forceinline__ void blocks_leave(const fused_args &a, uint32_t summed)
{
    int32_t *left = a.counter + FUSED_OPS * FUSED_COUNTER_STRIDE;

    if ((threadIdx.x & 31) == 0 && atomicAdd(left, 1) == (int)gridDim.x - 1) {
        for (int i = 0; i < a.n_ops; i++) {
            a.counter[i * FUSED_COUNTER_STRIDE] = 0;
        }
        *left = 0;
        if (a.p2p.n_ranks > 1) {
            a.p2p.epoch[P2P_EPOCH_FUSED] = summed;
        }
    }
}

/* ---- a block's work ---- */

/* The columns of a split-K slice, by stages, the last of which may be narrower. Blocks
 * begin at different stages, because all of them read the same activations at the same
 * time. */
template <int F> struct k_range {
    /* first column, columns, stages; first stage visited, as a column of the slice */
    int k0, cols, n, begin;
    __device__ __forceinline__ k_range(const fused_op &q, int slice)
        : k0(slice * q.slice_k), cols(min(q.slice_k, q.k - k0)),
          n((cols + stage_shape<F>::K - 1) / stage_shape<F>::K)
    {
        begin = (int)blockIdx.x % n * stage_shape<F>::K;
    }
    __device__ __forceinline__ int after(int at) const
    {
        return at + stage_shape<F>::K < cols ? at + stage_shape<F>::K : 0;
    }
};

__device__ __forceinline__ tile_schedule schedule_of(const fused_op &q)
{
    return tile_schedule_of(&q, blockIdx.x, gridDim.x);
}

/* Weight row behind row i of a tile. */
__device__ __forceinline__ int weight_row(const fused_op &q, int tile, int i)
{
    int tiles = q.pair / FUSED_TILE;

    return tile / tiles * q.pair + tile % tiles * (FUSED_TILE / 2) + (i & 7) +
           (i < 8 ? 0 : q.pair / 2);
}

/* A position in the ring; load and MMA warps step through it alike. */
template <int F> struct ring {
    /* shared-memory addresses: of stage 0, of its two kinds of mbarriers */
    uint32_t base, full, empty;
    int n, index;   /* stages; current stage */
    uint32_t phase; /* parity of the mbarriers' phase */
    __device__ __forceinline__ uint32_t stage_address(void) const
    {
        return base + index * stage_shape<F>::BYTES;
    }
    __device__ __forceinline__ void next(void)
    {
        if (++index == n) {
            index = 0;
            phase ^= 1;
        }
    }
};

/* ---- load warps ---- */

/* A load warp's iterator over the stages of this block's tiles of all ops. */
template <int F> struct tile_iterator {
    const fused_args &a; /* the launch */
    /* load warp; op; tile, distance to the next, tiles left in the op */
    int loader, p, tile, step, n_tiles;
    const char *row; /* first of this warp's weight rows of the tile */
    int64_t stride;  /* bytes between weight rows */
    /* stages left in the tile; current, and first, column in the slice; columns of the
     * slice */
    int left, at, begin, cols;

    __device__ __forceinline__ tile_iterator(const fused_args &a, int loader)
        : a(a), loader(loader), p(-1), n_tiles(0)
    {
        enter();
    }
    __device__ __forceinline__ bool more() const
    {
        return p < a.n_ops;
    }

    /* Starts the current tile, or the next op's first one. */
    __device__ __forceinline__ void enter()
    {
        while (n_tiles == 0) {
            if (++p == a.n_ops) {
                return;
            }
            tile_schedule d = schedule_of(a.op[p]);
            tile = d.first;
            step = d.step;
            n_tiles = d.n;
        }
        const fused_op &q = a.op[p];
        k_range<F> x(q, schedule_of(q).slice);
        stride = F == FUSED_16 ? q.w_stride * 2 : q.w_stride;
        int first = weight_row(q, tile, loader * LOAD_ROWS);
        row = (const char *)q.w +
              (F == FUSED_INT4 ? quant_segment_at(first, x.k0 / FUSED_SEGMENT_K,
                                                  q.k / FUSED_SEGMENT_K, FUSED_SEGMENT_BYTES)
                               : first * stride + fused_row_bytes(F, x.k0));
        left = x.n;
        at = x.begin;
        cols = x.cols;
    }
    __device__ __forceinline__ void next()
    {
        at = at + stage_shape<F>::K < cols ? at + stage_shape<F>::K : 0;
        if (--left == 0) {
            n_tiles--;
            tile += step;
            enter();
        }
    }
};

/* Loads this warp's rows of a stage. Called by one thread, because a copy needs the
 * same operands in all lanes. */
template <int F>
__device__ __forceinline__ void load_stage(ring<F> &r, const tile_iterator<F> &w, uint64_t policy)
{
    using S = stage_shape<F>;
    uint32_t bar = r.full + r.index * 8, to = r.stage_address() + w.loader * LOAD_ROWS * S::PITCH,
             bytes = (uint32_t)fused_row_bytes(F, min(S::K, w.cols - w.at));

    static_assert(QUANT_TILE_ROWS % FUSED_TILE == 0, "a tile's rows of a segment are neighbours");
    random_delay();
    barrier_expect(bar, LOAD_ROWS * bytes);
    if (F == FUSED_INT4) {
        const char *from = w.row + (int64_t)(w.at / FUSED_SEGMENT_K) * QUANT_TILE_BYTES;
        for (uint32_t i = 0; i < bytes / FUSED_SEGMENT_BYTES; i++) {
            bulk_copy_evict_first(to + i * FUSED_TILE * S::PITCH, from + i * QUANT_TILE_BYTES,
                                  LOAD_ROWS * FUSED_SEGMENT_BYTES, bar, policy);
        }
    } else {
        const char *from = w.row + fused_row_bytes(F, w.at);
#pragma unroll
        for (int i = 0; i < LOAD_ROWS; i++) {
            bulk_copy_evict_first(to + i * S::PITCH, from + i * w.stride, bytes, bar, policy);
        }
    }
    r.next();
}

template <int F>
__device__ __forceinline__ void load_weights(const fused_args &a, ring<F> &r, int loader)
{
    uint64_t policy = evict_first_policy();
    ring<F> lag = r;
    int issued = 0;

    for (tile_iterator<F> w(a, loader); w.more(); w.next()) {
        if (issued++ >= a.in_flight) {
            barrier_wait(lag.full + lag.index * 8, lag.phase);
            lag.next();
        }
        barrier_wait(r.empty + r.index * 8, r.phase ^ 1);
        load_stage<F>(r, w, policy);
    }
}

#endif
