/* The ring of stages of a launch of few rows (stream.cu), the warps that fill it, and
 * where blocks meet. */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_STREAM_RING_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_STREAM_RING_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/experts/route.cuh"
#include "kernels/cuda/gemm/read_once.cuh"

namespace expert_stream
{

enum {
    WARPS = 8,   /* that multiply */
    LOADERS = 4, /* warps that load, a quarter of a tile's rows each */
    MULTIPLIERS = WARPS * 32,
    THREADS = MULTIPLIERS + LOADERS * 32,
    ROWS = EXPERT_STREAM_ROWS,
    TILE = 16, /* rows of weights */
    GROUP = 32,
    STAGE_COLS = 768,
    SHARE = STAGE_COLS / GROUP / WARPS, /* groups of a stage that a warp has */
    MOST_PAIRS = 128,
    MOST_EXPERTS = 256,
    ACT_AHEAD = 4, /* stages of down whose activations are on their way */
    NONE = 0xff,
};

/* A stage of weights of which 8 neighbours take B bytes. The space between rows keeps
 * the lanes of a load on different banks. */
template <int B> struct stage_of {
    static constexpr int ROW = STAGE_COLS / 8 * B, PITCH = ROW + 4 * B;
    static constexpr int BYTES = TILE * PITCH;
    static constexpr int COUNT = 8 * 16 / B;
    static constexpr int IN_FLIGHT = 3 * 16 / B; /* on their way at a time */
};

/* What the choice leaves, in shared memory: the chosen experts in the order of their
 * indices, and for each which rows have it. */
struct chosen_experts {
    float share[MOST_PAIRS][ROWS];  /* weight of the expert in a row; 0: not chosen */
    uint8_t pair[MOST_PAIRS][ROWS]; /* its place among the row's; NONE: not chosen */
    int16_t expert[MOST_PAIRS];
    uint32_t bit[MOST_EXPERTS / 32];
    int32_t n;
};

/* Eight activations, and sums of two chains of matrix instructions. */
struct vector16 {
    uint32_t v[4];
};
struct sums {
    float even[4], odd[4];
};

/* ---- the ring ---- */

template <int B> struct ring {
    uint32_t base, full, empty; /* addresses: stages, barriers of each */
    int index;
    uint32_t phase;

    __device__ __forceinline__ uint32_t stage(void) const
    {
        return base + index * stage_of<B>::BYTES;
    }
    __device__ __forceinline__ void next(void)
    {
        if (++index == stage_of<B>::COUNT) {
            index = 0;
            phase ^= 1;
        }
    }
};

/* By one thread, before a barrier of the block. */
template <int B> __device__ __forceinline__ void ring_init(const ring<B> &r)
{
    for (int i = 0; i < stage_of<B>::COUNT; i++) {
        barrier_init(r.full + i * 8, LOADERS);
        barrier_init(r.empty + i * 8, WARPS);
    }
    barrier_init_fence();
}

__device__ __forceinline__ void multipliers_sync(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"((int)MULTIPLIERS) : "memory");
}

/* All threads: the choice is there. */
__device__ __forceinline__ void choice_sync(void)
{
    asm volatile("bar.sync 2, %0;" ::"n"((int)THREADS) : "memory");
}

/* One thread of a block that is done with a phase, and one that needs it done. */
__device__ __forceinline__ void blocks_arrive(int32_t *counter)
{
    random_delay();
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void blocks_wait(const int32_t *counter, int all)
{
    int32_t n;

    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
    } while (n < all);
    random_delay();
}

/* ---- loading ---- */

/* A load warp, by one thread. */
template <int B> struct loader {
    ring<B> at, lag;
    int issued, warp;
    uint64_t policy;

    __device__ __forceinline__ loader(const ring<B> &r, int w)
        : at(r), lag(r), issued(0), warp(w), policy(evict_first_policy())
    {
    }
    /* `rows` of this warp's rows of a tile, `stride` bytes apart, of `length` bytes. */
    __device__ __forceinline__ void tile(const char *row, int64_t stride, int rows, int length)
    {
        constexpr int MOST = stage_of<B>::ROW;

        for (int c = 0; c < length; c += MOST) {
            uint32_t bytes = min(MOST, length - c), bar = at.full + at.index * 8;
            if (issued++ >= stage_of<B>::IN_FLIGHT) {
                barrier_wait(lag.full + lag.index * 8, lag.phase);
                lag.next();
            }
            barrier_wait(at.empty + at.index * 8, at.phase ^ 1);
            random_delay();
            barrier_expect(bar, rows * bytes);
            uint32_t to = at.stage() + warp * (TILE / LOADERS) * stage_of<B>::PITCH;
#pragma unroll
            for (int i = 0; i < TILE / LOADERS; i++) {
                if (i < rows) {
                    bulk_copy_evict_first(to + i * stage_of<B>::PITCH, row + i * stride, bytes, bar,
                                          policy);
                }
            }
            row += MOST;
            at.next();
        }
    }
};

template <int B>
__device__ __forceinline__ void load_weights(const expert_few &a, const ring<B> &r,
                                             const chosen_experts &c, int warp, int lane)
{
    constexpr int MINE = TILE / LOADERS;
    loader<B> load(r, warp);
    int first = blockIdx.x * TILE + warp * MINE, width = a.up.width;
    int64_t stride = a.router_stride * 2;

    if (lane == 0) {
        if (blockIdx.x * TILE < a.route.n) {
            load.tile((const char *)a.router + first * stride, stride,
                      max(0, min(MINE, a.route.n - first)), a.up.k * 2);
        }
    }
    __syncwarp();
    choice_sync();
    if (lane > 0) {
        return;
    }
    int per = width / (TILE / 2);
    int half = warp * MINE >= TILE / 2 ? width - TILE / 2 : 0; /* rows of gate, or of up */
    stride = a.up.w_stride * (B == 16 ? 2 : 1);                /* of codes it is in bytes */
    for (int i = blockIdx.x; i < c.n * per; i += gridDim.x) {
        int64_t row = (int64_t)c.expert[i / per] * 2 * width + i % per * (TILE / 2);
        load.tile((const char *)a.up.w + (row + half + warp * MINE) * stride, stride, MINE,
                  a.up.k / 8 * B);
    }
    stride = a.down.w_stride * (B == 16 ? 2 : 1);
    for (int t = blockIdx.x; t < a.down.width / TILE; t += gridDim.x) {
        for (int i = 0; i < c.n; i++) {
            int64_t row = (int64_t)c.expert[i] * a.down.width + t * TILE + warp * MINE;
            load.tile((const char *)a.down.w + row * stride, stride, MINE, a.down.k / 8 * B);
        }
    }
}

} // namespace expert_stream

#endif
