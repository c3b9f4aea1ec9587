/* A fused launch: row-wise operations of few rows that one launch does, so that weights
 * stream without a pause between them.
 *
 * Operations become phases. A phase is a product, with the norm before it and the
 * activation, gate and residual behind it; phases are divided by a barrier of all
 * blocks. Whatever the operations alone would have written is written, rounded as they
 * round; sums are taken in an order of their own, the same in every run. What may join
 * and how the work is dealt are pure functions (heuristics_fused.c); fused_decode.c
 * collects the phases of a step under capture, fused_decode.cu runs them.
 *
 * Types are the activations' (bf16 or fp16) throughout. Strides in elements.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_FUSED_DECODE_H
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_FUSED_DECODE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/comm/p2p.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FUSED_OPS = 8,
    FUSED_ROWS = 8, /* activation rows at most: the columns of a matrix instruction */
    /* rows up to which a fused launch was measured to be faster than its operations one
     * by one */
    FUSED_WORTH_ROWS = 8,
    FUSED_WORTH_ROWS_OVER_RANKS = 2, /* the same, measured no further */
    FUSED_TILE = 16,                 /* weight rows of a tile: the rows of a matrix instruction */
    FUSED_MMA_WARPS = 8,             /* that multiply; each has its share of the depth */
    FUSED_STAGE_K = 512,             /* depth of a stage */
    /* stages whose activations a block holds in registers: what is deeper is done in
     * parts */
    FUSED_SLICE_STAGES = 8,
    FUSED_SLICE_K = FUSED_SLICE_STAGES * FUSED_STAGE_K,
    FUSED_STAGE_BYTES = FUSED_TILE * FUSED_STAGE_K * 2,
    FUSED_RESULT_BYTES = FUSED_TILE * FUSED_ROWS * 2, /* of a tile's results, to another rank */
    FUSED_MAX_STAGES = 16,
    FUSED_MIN_STAGES = 4,
    /* stages on their way at a time: with more, what the multiplying warps read waits
     * behind them */
    FUSED_MAX_IN_FLIGHT = 3,
    /* partial sums of two tiles, sums of rows, barriers of the ring and of the sums */
    FUSED_FIXED_BYTES = 2 * FUSED_MMA_WARPS * 32 * 16 + 2 * FUSED_MMA_WARPS * FUSED_ROWS * 4 +
                        (2 * FUSED_MAX_STAGES + 8) * 8,
    FUSED_COUNTERS = FUSED_OPS + 1, /* of barriers, each on a cache line of its own */
    FUSED_COUNTER_STRIDE = 32,
    FUSED_PARTIAL_BYTES = FUSED_TILE * FUSED_ROWS * 4, /* of a part of a tile */
    FUSED_MAX_PARTIALS = 8192, /* parts of tiles whose sums wait for the others of their tile */
    FUSED_MAX_NORM = 32768,    /* columns of a norm, whose weight is in shared memory */
};

struct fused_op {
    /* source [rows, k]: x, or norm(x), which the block with tile 0 also writes to
     * `h` */
    const void *x;
    int64_t x_stride;
    void *h; /* NULL: no norm */
    int64_t h_stride;
    struct norm_args norm;
    /* product with w [n, k]; n 0: a norm alone */
    const void *w;
    int64_t w_stride;
    int32_t n, k;
    const void *bias;     /* [n] or NULL */
    int32_t act;          /* enum activation */
    const void *residual; /* [rows, n] or NULL */
    int64_t residual_stride;
    void *out; /* [rows, n]; NULL where only `gated` is wanted */
    int64_t out_stride;
    /* out's other uses; NULL: none. sum [rows, n] += out, where partial: and the other
     * ranks' out; gated [rows, n / 2] = act(out[:, :n / 2]) * out[:, n / 2:] */
    void *sum;
    int64_t sum_stride;
    void *gated;
    int64_t gated_stride;
    int32_t gate_act;
    int32_t partial;
    int32_t roped; /* out is the q, k and v heads of the fused launch's rope */
    /* Rows of w that belong together lie half of `pair` apart, in spans of `pair`; a
     * tile has FUSED_TILE / 2 of each half. */
    int32_t pair;
    /* set by fused_plan */
    int32_t slice_k, slices; /* columns of a part, but for the last */
    int32_t first;           /* the block that has tile 0 of part 0 */
};

/* q and k heads turn by whole halves, k and v heads go to the cache too. */
struct fused_rope {
    const float *cos_sin; /* [positions, head_dim]; NULL: no rotation */
    int64_t cos_sin_stride;
    const int32_t *position, *slot; /* [rows] */
    struct kv_view kv;
    int32_t n_heads, layer;
};

struct fused_args {
    struct fused_op op[FUSED_OPS];
    struct fused_rope rope; /* of the phase that is `turned` */
    struct p2p_args p2p;    /* of phases that are `partial` */
    int32_t n_ops, rows, type;
    /* set by fused_plan */
    int32_t n_stages; /* of the ring */
    int32_t norm_bytes, shared_bytes;
    int32_t in_flight; /* stages on their way at a time */
    int32_t *counter;  /* [FUSED_COUNTERS * FUSED_COUNTER_STRIDE], zero between launches */
    int32_t *arrived;  /* [FUSED_MAX_SUMS] parts of a tile that are there; zero between launches */
    void *partials;    /* [FUSED_MAX_SUMS] of FUSED_SUM_BYTES */
};

/* What a block has of a phase: of one part, tiles first, first + step, ... */
struct tile_schedule {
    int32_t slice, first, step, n;
};
#ifdef __CUDACC__
#define FUSED_BOTH __host__ __device__
#else
#define FUSED_BOTH
#endif
static inline FUSED_BOTH struct tile_schedule tile_schedule_of(const struct fused_op *p,
                                                               int32_t block, int32_t n_blocks)
{
    int32_t rank = block - p->first + (block < p->first ? n_blocks : 0),
            n_tiles = p->n / FUSED_TILE;
    struct tile_schedule d;

    d.slice = rank * p->slices / n_blocks;
    /* the first turn that has this part */
    int32_t begin = (d.slice * n_blocks + p->slices - 1) / p->slices;
    d.step = ((d.slice + 1) * n_blocks + p->slices - 1) / p->slices - begin;
    d.first = rank - begin;
    d.n = d.first < n_tiles ? (n_tiles - d.first + d.step - 1) / d.step : 0;
    return d;
}

/* The blocks and shared memory of the device; false: the phases do not fit. */
bool fused_plan(struct fused_args *a, int32_t n_blocks, int32_t max_shared_bytes);

/* Enqueue; n_blocks as planned. */
void launch_fused_decode(const struct fused_args *a, int32_t n_blocks, cudaStream_t stream);
/* Let the kernel have this much shared memory. False: the device does not, or the
 * plugin was built for older ones. */
bool fused_prepare(int32_t max_shared_bytes);

#ifdef __cplusplus
}
#endif

#endif
