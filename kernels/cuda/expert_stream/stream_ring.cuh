/* The ring of stages of a launch of few rows (stream.cu), the warps that fill it, and
 * where blocks meet. */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_RING_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_RING_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/expert_stream/exchange.h"
#include "kernels/cuda/experts/route.cuh"
#include "kernels/cuda/gemm/read_once.cuh"
#include "kernels/cuda/quant/panels.h"

namespace expert_stream
{

enum {
    WARPS = 16,    /* that multiply */
    LOADERS = 4,   /* warps that load, a part of a tile's rows each */
    FINISHERS = 2, /* warps that add up tiles and store them, in turn */
    MULTIPLIERS = WARPS * 32,
    THREADS = MULTIPLIERS + LOADERS * 32 + FINISHERS * 32,
    SUM_BUFFERS = 2, /* tiles that wait for finishers */
    ROWS = EXPERT_STREAM_ROWS,
    TILE = 16,       /* rows of weights */
    ROUTER_TILE = 8, /* of the router's */
    GROUP = 32,
    STAGE_COLS = 768,
    SHARE = 3, /* groups of a stage that a warp has at a time */
    MOST_PAIRS = 128,
    MOST_EXPERTS = EXPERT_STREAM_EXPERTS,
    MOST_STAGES = 32, /* of a ring */
    MOST_DEPTH = 6,   /* stages of a row of up */
    NONE = 0xff,
};

/* In place of bytes: a kind of panels. */
enum { B_PANELS = 32 };
constexpr int B_INT4 = B_PANELS + PANELS_INT4;

template <int B> constexpr bool IS_PANELS = B >= B_PANELS;
template <int B> constexpr int KIND_OF = IS_PANELS<B> ? B - B_PANELS : PANELS_FP4;
/* Bytes of eight neighbouring codes. */
template <int B>
constexpr int BYTES_OF = IS_PANELS<B> ? panel_code_bytes(KIND_OF<B>) / (PANEL_ROWS * 4) : B;

/* A stage of weights of which 8 neighbours take B bytes. The space between rows keeps
 * the lanes of a load on different banks. Of panels (panels.h) a tile has two. */
template <int B> struct stage_of {
    static constexpr int ROW = STAGE_COLS / 8 * BYTES_OF<B>, PITCH = ROW + 4 * BYTES_OF<B>;
    static constexpr int PANEL = panel_bytes(STAGE_COLS, KIND_OF<B>);
    static constexpr int BYTES = IS_PANELS<B> ? (TILE / PANEL_ROWS) * PANEL : TILE * PITCH;
    static constexpr int MINE = IS_PANELS<B> ? PANEL_ROWS : TILE / LOADERS; /* a load warp's rows */
};

/* Warps that multiply a stage, and how many such teams take stages in turn. Codes cost
 * more instructions than bytes, so that more stages are multiplied at a time. */
template <int B> struct team_of {
    static constexpr int SIZE = B == 16 ? 8 : 4, COUNT = WARPS / SIZE;
    static constexpr int TURNS = STAGE_COLS / GROUP / SIZE / SHARE; /* of SHARE groups each */
};

/* Rows of activations that a launch of `rows` makes room for. */
__host__ __device__ constexpr int room_for(int rows)
{
    return rows <= 1 ? 1 : rows <= 4 ? 4 : (int)ROWS;
}

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

/* Stages on their way at a time, of `count`. When a team waits for a stage, the one
 * that lay there before must have come, since an mbarrier tells a phase from the next
 * one alone. It was begun before the last stage that the team has had, and has come if
 * the two are as many stages apart as may be on their way. */
template <int B> int stages_in_flight(int count)
{
    int most = 2 * 16 / BYTES_OF<B>, safe = count - team_of<B>::COUNT;

    return most < safe ? most : safe;
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
    __device__ __forceinline__ void next(int n = 1)
    {
        index += n;
        if (index >= count) { /* n is less than that */
            index -= count;
            phase ^= 1;
        }
    }
};

/* By all threads, before a barrier of the block. */
template <int B> __device__ __forceinline__ void ring_init(const ring<B> &r)
{
    if (threadIdx.x == 64) {
        barriers_init(r.full, r.count, TILE / stage_of<B>::MINE);
    } else if (threadIdx.x == 96) {
        barriers_init(r.empty, r.count, team_of<B>::SIZE);
    }
}

/* A barrier of some warps of the block, all lanes of which come together. */
template <int ID, int COUNT> __device__ __forceinline__ void warps_sync(void)
{
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

__device__ __forceinline__ void multipliers_sync(void)
{
    warps_sync<1, MULTIPLIERS>();
}

/* All threads: the choice is there. */
__device__ __forceinline__ void choice_sync(void)
{
    warps_sync<2, THREADS>();
}

/* ---- what blocks hand each other ---- */

/* What blocks hand each other are words that are their own flags: NOT_THERE is no
 * score, nor two results of up, whose numbers that are none have one form. */
constexpr uint32_t NOT_THERE = 0xffffffffu;

/* By one thread of a block that has its turn. The last block prepares the next
 * launch's: this one leaves so many scores and 16 bytes of results of up. */
__device__ __forceinline__ void turn_pass(const exchange_turn &t, expert_exchange *e, int scores,
                                          int middle)
{
    random_delay();
    if (atomicAdd(&e->left, 1) == (int)gridDim.x - 1) {
        e->left = 0;
        e->turn.set = t.set ^ 1;
        e->turn.scores = scores;
        e->turn.middle = middle;
    }
}

/* Clears this block's part of what the launch before has left: by thread `i` of
 * `threads`. */
__device__ __forceinline__ void turn_clear(const exchange_turn &t, expert_exchange *e, int i,
                                           int threads)
{
    auto &old = e->set[t.set ^ 1];
    const uint4 none = make_uint4(NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE);
    int first = blockIdx.x * threads + i, step = gridDim.x * threads;

#pragma unroll 1
    for (int at = first; at < t.middle; at += step) {
        ((uint4 *)old.middle)[at] = none;
    }
#pragma unroll 1
    for (int at = first; at < t.scores; at += step) {
        old.scores[at] = NOT_THERE;
    }
}

__device__ __forceinline__ void word_give(void *to, uint32_t word)
{
    random_delay();
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

/* A word of word_give, when it is there. */
__device__ __forceinline__ uint32_t word_wait(const void *from)
{
    uint32_t word;

    do {
        asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    } while (word == NOT_THERE);
    return word;
}

__device__ __forceinline__ void score_give(float *to, float score)
{
    word_give(to, score == score ? __float_as_uint(score) : 0x7fc00000u);
}

/* Element i: of expert i * 32 + lane of n. */
template <int PER>
__device__ __forceinline__ void scores_wait(float (&v)[PER], const float *from, int n, int lane)
{
    bool all;

    do {
        all = true;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int e = min(i * 32 + lane, n - 1);
            uint32_t u;
            asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(u) : "l"(from + e) : "memory");
            all = all && u != NOT_THERE;
            v[i] = __uint_as_float(u);
        }
    } while (!all);
    random_delay();
    __syncwarp();
}

__device__ __forceinline__ void store_word(uint32_t shared_at, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_at), "r"(v) : "memory");
}

/* ---- loading ---- */

/* Copies n bytes; `bar` then says that they are there. By one thread. */
__device__ __forceinline__ void bulk_copy_all(uint32_t to, const void *from, int n, uint32_t bar)
{
    barrier_expect(bar, n);
    bulk_copy(to, from, n, bar);
}

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
    /* This warp's rows of a tile, `stride` bytes apart, of `length` bytes. */
    __device__ __forceinline__ void tile(const char *row, int64_t stride, int length)
    {
        constexpr int MOST = stage_of<B>::ROW;

#pragma unroll 1
        for (int c = 0; c < length; c += MOST) {
            uint32_t bytes = min(MOST, length - c), bar = enter(MINE * bytes);
            uint32_t to = at.stage() + warp * MINE * stage_of<B>::PITCH;
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                bulk_copy_evict_first(to + i * stage_of<B>::PITCH, row + i * stride, bytes, bar,
                                      policy);
            }
            row += MOST;
            at.next();
        }
    }
    /* This warp's panel of a tile, of k columns of the kind that P says. */
    template <int P> __device__ __forceinline__ void panel(const char *from, int k)
    {
#pragma unroll 1
        for (int c = 0; c < k; c += STAGE_COLS) {
            uint32_t bytes = panel_bytes(min((int)STAGE_COLS, k - c), KIND_OF<P>);
            uint32_t bar = enter(bytes);
            bulk_copy_evict_first(at.stage() + warp * stage_of<P>::PANEL, from, bytes, bar, policy);
            from += stage_of<P>::PANEL;
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

/* The block's tile of the router's weights lies row by row where stages come later. */
__host__ __device__ constexpr int router_pitch(int k)
{
    return (k * 2 + 127) / 128 * 128 + 64; /* two rows of a load on different banks */
}

/* By one warp; `bar` then says that it is there. */
__device__ __forceinline__ void load_router(const expert_few &a, uint32_t to, uint32_t bar,
                                            int lane)
{
    int first = blockIdx.x * ROUTER_TILE, rows = min((int)ROUTER_TILE, a.route.n - first);
    int bytes = a.up.k * 2;

    if (rows > 0 && lane == 0) {
        barrier_expect(bar, rows * bytes);
    }
    __syncwarp();
    if (lane < rows) {
        bulk_copy(to + lane * router_pitch(a.up.k),
                  (const char *)a.router + (first + lane) * a.router_stride * 2, bytes, bar);
    }
}

/* The weights of up are stored as B says, those of down as D. */
template <int B, int D, int R>
__device__ __forceinline__ void load_weights(const expert_few &a, const ring<R> &r,
                                             const chosen_experts &c, int warp, int lane)
{
    constexpr int MINE = stage_of<R>::MINE;
    loader<R> load(r, warp);
    int width = a.up.width;

    choice_sync();
    if (lane != 0 || warp >= TILE / MINE) {
        return;
    }
    int per = width / (TILE / 2), at = warp * MINE % (TILE / 2), half = warp * MINE / (TILE / 2);
#pragma unroll 1
    for (int i = blockIdx.x; i < c.n * per; i += gridDim.x) {
        weight_rows w = up_rows<B>(a, c.expert[i / per], half, i % per * (TILE / 2) + at);
        if constexpr (IS_PANELS<B>) {
            load.template panel<B>(w.at, a.up.k);
        } else {
            load.tile(w.at, w.stride, a.up.k / 8 * BYTES_OF<B>);
        }
    }
#pragma unroll 1
    for (int t = blockIdx.x; t < a.down.width / TILE; t += gridDim.x) {
#pragma unroll 1
        for (int i = 0; i < c.n; i++) {
            weight_rows w = down_rows<D>(a, c.expert[i], t * TILE + warp * MINE);
            if constexpr (IS_PANELS<D>) {
                load.template panel<D>(w.at, a.down.k);
            } else {
                load.tile(w.at, w.stride, a.down.k / 8 * BYTES_OF<D>);
            }
        }
    }
}

} // namespace expert_stream

#endif
