/* The ring of stages of a launch of few rows (stream.cu), the warps that fill it, and
 * where blocks meet. */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_STREAM_RING_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_STREAM_RING_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/experts/route.cuh"
#include "kernels/cuda/gemm/read_once.cuh"
#include "kernels/cuda/quant/panels.h"

namespace expert_stream
{

enum {
    WARPS = 8,     /* that multiply */
    LOADERS = 4,   /* warps that load, a part of a tile's rows each */
    FINISHERS = 2, /* warps that add up tiles and store them, in turn */
    MULTIPLIERS = WARPS * 32,
    THREADS = MULTIPLIERS + LOADERS * 32 + FINISHERS * 32,
    SUM_BUFFERS = 4, /* tiles that wait for finishers */
    ROWS = EXPERT_STREAM_ROWS,
    TILE = 16, /* rows of weights */
    GROUP = 32,
    STAGE_COLS = 768,
    SHARE = STAGE_COLS / GROUP / WARPS, /* groups of a stage that a warp has */
    MOST_PAIRS = 128,
    MOST_EXPERTS = 256,
    MOST_STAGES = 32, /* of a ring */
    MOST_DEPTH = 6,   /* stages of a row of up */
    ACT_AHEAD = 4,    /* stages of down whose activations are on their way */
    NONE = 0xff,
};

/* In place of bytes: panels of int4. */
enum { B_INT4 = 5 };

template <int B> constexpr bool IS_PANELS = B == 4 || B == B_INT4;
template <int B> constexpr int KIND_OF = B == B_INT4 ? PANELS_INT4 : PANELS_FP4;
/* Bytes of eight neighbouring codes. */
template <int B> constexpr int BYTES_OF = B == B_INT4 ? 4 : B;

/* A stage of weights of which 8 neighbours take B bytes. The space between rows keeps
 * the lanes of a load on different banks. Of 4 bytes they are panels (quant.h), two a
 * tile; only rows of 16 bits, the router's, lie row by row then. */
template <int B> struct stage_of {
    static constexpr int ROW = STAGE_COLS / 8 * BYTES_OF<B>, PITCH = ROW + 4 * BYTES_OF<B>;
    static constexpr int PANEL = panel_bytes(STAGE_COLS, KIND_OF<B>);
    static constexpr int BYTES = IS_PANELS<B> ? (TILE / PANEL_ROWS) * PANEL : TILE * PITCH;
    static constexpr int MINE = IS_PANELS<B> ? PANEL_ROWS : TILE / LOADERS; /* a load warp's rows */
};

/* What the choice leaves, in shared memory: the chosen experts in the order of their
 * indices, and for each which rows have it. The shared expert follows as a.shared_parts
 * parts as wide as an expert, which all rows have, numbered from route.held on. */
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

/* Stages on their way at a time. */
template <int B> int stages_in_flight(int count)
{
    return 2 * 16 / BYTES_OF<B> < count ? 2 * 16 / BYTES_OF<B> : count;
}

template <int B> struct ring {
    uint32_t base, full, empty; /* addresses: stages, barriers of each */
    int count;                  /* stages, at most MOST_STAGES */
    int in_flight;              /* on their way at a time */
    int index;
    uint32_t phase;

    __device__ __forceinline__ uint32_t stage(void) const
    {
        return base + index * stage_of<B>::BYTES;
    }
    __device__ __forceinline__ void next(void)
    {
        if (++index == count) {
            index = 0;
            phase ^= 1;
        }
    }
};

/* By one thread, before a barrier of the block. */
template <int B> __device__ __forceinline__ void ring_init(const ring<B> &r)
{
    for (int i = 0; i < r.count; i++) {
        barrier_init(r.full + i * 8, TILE / stage_of<B>::MINE);
        barrier_init(r.empty + i * 8, WARPS);
    }
    barrier_init_fence();
}

__device__ __forceinline__ void multipliers_sync(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"((int)MULTIPLIERS) : "memory");
}

/* Multiplying and finishing warps: all tiles so far are stored. */
__device__ __forceinline__ void stored_sync(void)
{
    asm volatile("bar.sync 3, %0;" ::"n"((int)(MULTIPLIERS + FINISHERS * 32)) : "memory");
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
    static constexpr int MINE = stage_of<B>::MINE;
    ring<B> at, lag;
    int issued, warp;
    uint64_t policy;

    __device__ __forceinline__ loader(const ring<B> &r, int w)
        : at(r), lag(r), issued(0), warp(w), policy(evict_first_policy())
    {
    }
    /* Waits for the next stage to be free; returns its barrier, which expects n
     * bytes. */
    __device__ __forceinline__ uint32_t enter(uint32_t n)
    {
        uint32_t bar = at.full + at.index * 8;

        if (issued++ >= at.in_flight) {
            barrier_wait(lag.full + lag.index * 8, lag.phase);
            lag.next();
        }
        barrier_wait(at.empty + at.index * 8, at.phase ^ 1);
        random_delay();
        barrier_expect(bar, n);
        return bar;
    }
    /* `rows` of this warp's rows of a tile, `stride` bytes apart, of `length` bytes. */
    __device__ __forceinline__ void tile(const char *row, int64_t stride, int rows, int length)
    {
        constexpr int MOST = stage_of<B>::ROW;

#pragma unroll 1
        for (int c = 0; c < length; c += MOST) {
            uint32_t bytes = min(MOST, length - c), bar = enter(rows * bytes);
            uint32_t to = at.stage() + warp * MINE * stage_of<B>::PITCH;
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                if (i < rows) {
                    bulk_copy_evict_first(to + i * stage_of<B>::PITCH, row + i * stride, bytes, bar,
                                          policy);
                }
            }
            row += MOST;
            at.next();
        }
    }
    /* This warp's panel of a tile, of k columns. */
    __device__ __forceinline__ void panel(const char *from, int k)
    {
#pragma unroll 1
        for (int c = 0; c < k; c += STAGE_COLS) {
            uint32_t bytes = panel_bytes(min((int)STAGE_COLS, k - c), KIND_OF<B>);
            uint32_t bar = enter(bytes);
            bulk_copy_evict_first(at.stage() + warp * stage_of<B>::PANEL, from, bytes, bar, policy);
            from += stage_of<B>::PANEL;
            at.next();
        }
    }
};

/* Where rows of a weight of up or of down lie: `half` of up is 0 for gate, 1 for up; of
 * a part of the shared expert (chosen_experts) in the shared weights. */
struct weight_rows {
    const char *at;
    int64_t stride; /* bytes */
};

template <int B>
__device__ __forceinline__ weight_rows up_rows(const expert_few &a, int e, int half, int column)
{
    constexpr int BYTES = B == 16 ? 2 : 1; /* of an element of a stride */
    const expert_product &p = a.up;
    int part = e - a.route.held;
    int64_t row = ((int64_t)e * 2 + half) * p.width + column;

    if (B == 16 && part >= 0) {
        row = (int64_t)(half * a.shared_parts + part) * p.width + column;
        return {(const char *)a.shared_up + row * a.shared_up_stride * 2, a.shared_up_stride * 2};
    }
    if (IS_PANELS<B>) {
        return {(const char *)p.w + row * panel_bytes(p.k, KIND_OF<B>) / PANEL_ROWS, 0};
    }
    return {(const char *)p.w + row * p.w_stride * BYTES, p.w_stride * BYTES};
}

template <int B>
__device__ __forceinline__ weight_rows down_rows(const expert_few &a, int e, int column)
{
    constexpr int BYTES = B == 16 ? 2 : 1;
    const expert_product &p = a.down;
    int part = e - a.route.held;
    int64_t row = (int64_t)e * p.width + column;

    if (B == 16 && part >= 0) {
        const char *base = (const char *)a.shared_down + (int64_t)part * p.k * 2;
        return {base + column * a.shared_down_stride * 2, a.shared_down_stride * 2};
    }
    if (IS_PANELS<B>) {
        return {(const char *)p.w + row * panel_bytes(p.k, KIND_OF<B>) / PANEL_ROWS, 0};
    }
    return {(const char *)p.w + row * p.w_stride * BYTES, p.w_stride * BYTES};
}

template <int B>
__device__ __forceinline__ void load_weights(const expert_few &a, const ring<B> &r,
                                             const chosen_experts &c, int warp, int lane)
{
    constexpr int MINE = stage_of<B>::MINE;
    loader<B> load(r, warp);
    int first = blockIdx.x * TILE + warp * MINE, width = a.up.width;
    bool loads = lane == 0 && warp < TILE / MINE;

    if (loads && blockIdx.x * TILE < a.route.n) {
        int64_t stride = a.router_stride * 2;
        load.tile((const char *)a.router + first * stride, stride,
                  max(0, min(MINE, a.route.n - first)), a.up.k * 2);
    }
    __syncwarp();
    choice_sync();
    if (!loads) {
        return;
    }
    int per = width / (TILE / 2), at = warp * MINE % (TILE / 2), half = warp * MINE / (TILE / 2);
#pragma unroll 1
    for (int i = blockIdx.x; i < c.n * per; i += gridDim.x) {
        weight_rows w = up_rows<B>(a, c.expert[i / per], half, i % per * (TILE / 2) + at);
        if constexpr (IS_PANELS<B>) {
            load.panel(w.at, a.up.k);
        } else {
            load.tile(w.at, w.stride, MINE, a.up.k / 8 * B);
        }
    }
#pragma unroll 1
    for (int t = blockIdx.x; t < a.down.width / TILE; t += gridDim.x) {
#pragma unroll 1
        for (int i = 0; i < c.n; i++) {
            weight_rows w = down_rows<B>(a, c.expert[i], t * TILE + warp * MINE);
            if constexpr (IS_PANELS<B>) {
                load.panel(w.at, a.down.k);
            } else {
                load.tile(w.at, w.stride, MINE, a.down.k / 8 * B);
            }
        }
    }
}

} // namespace expert_stream

#endif
