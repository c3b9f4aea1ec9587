/* A fused launch does several row-wise operations of a small decode step in one
 * persistent kernel, so that weights stream without a pause between the operations.
 *
 * A fused op is a product, with the norm before it and the activation, gate and
 * residual behind it; a barrier of all blocks separates fused ops. Every result that
 * the operations alone would write is written, rounded as they round; sums are taken in
 * an order of their own, the same in every run. What may join and which block does what
 * are pure functions (heuristics_fused.c); fused_decode.c collects the ops of a step,
 * fused_decode.cu runs them.
 *
 * All types are the activations' (bf16 or fp16); strides are in elements.
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
    FUSED_OPS = 8,  /* ops per launch, at most */
    FUSED_ROWS = 8, /* activation rows at most: N of the matrix instruction */
    /* rows up to which fused launches are used: they are faster than single operations
     * there */
    FUSED_WORTH_ROWS = 8,
    FUSED_WORTH_ROWS_OVER_RANKS = 2, /* the same with several ranks */
    FUSED_TILE = 16,                 /* weight rows of a tile: M of the matrix instruction */
    FUSED_MMA_WARPS = 8,             /* MMA warps; each has its share of a stage's depth */
    /* depth whose activations fit into a block's registers; deeper products are cut
     * into split-K slices, of a multiple of FUSED_STAGE_K columns */
    FUSED_SLICE_K = 4096,
    FUSED_STAGE_K = 512, /* least depth (columns of w) of a stage */
    /* results of a tile, as sent to another rank */
    FUSED_RESULT_BYTES = FUSED_TILE * FUSED_ROWS * 2,
    FUSED_MAX_STAGES = 16,
    FUSED_MIN_STAGES = 4,
    /* loads in flight at a time */
    FUSED_MAX_IN_FLIGHT = 3,
    /* accumulators of two tiles, sums of rows for norms, mbarriers of the ring and of
     * the accumulators */
    FUSED_FIXED_BYTES = 2 * FUSED_MMA_WARPS * 32 * 16 + 2 * FUSED_MMA_WARPS * FUSED_ROWS * 4 +
                        (2 * FUSED_MAX_STAGES + 8) * 8,
    FUSED_COUNTERS = FUSED_OPS + 1, /* of grid barriers, each on a cache line of its own */
    FUSED_COUNTER_STRIDE = 32,
    /* partial sums of one split-K slice of a tile */
    FUSED_PARTIAL_BYTES = FUSED_TILE * FUSED_ROWS * 4,
    FUSED_MAX_PARTIALS = 8192, /* slices of tiles whose partial sums may be stored at a time */
    FUSED_MAX_NORM = 32768,    /* columns of a norm, whose weight lies in shared memory */
};

/* How the weights of a launch are stored. A stage has 1 KB of codes of each weight row
 * in all formats, so its depth is fused_stage_k. */
enum fused_format {
    FUSED_16,   /* bf16 or fp16, as the activations */
    FUSED_FP8,  /* e4m3; a scale a row in w_scale, or a group */
    FUSED_INT4, /* struct quant_weight, QUANT_SEGMENTS */
    /* of mixed-input products alone (mixed.h) */
    FUSED_INT8,     /* int8; w_scale and w_zero */
    FUSED_MXFP4,    /* struct quant_weight, QUANT_SEGMENTS in groups of 32; a factor a row */
    FUSED_NVFP4,    /* in groups of 16 */
    FUSED_GROUPS_4, /* struct quant_weight, QUANT_GROUPS by kind; a factor a row */
    FUSED_LEVELS,
    FUSED_GROUPS_8,
    FUSED_GROUPS_2,
};

enum {
    /* 512 columns of FUSED_INT4: their codes, and four groups' scales and zero
     * points */
    FUSED_SEGMENT_K = 512,
    FUSED_SEGMENT_BYTES = FUSED_SEGMENT_K / 2 + 16,
};

/* One product of a fused launch, or a norm alone. Pointers are to device memory. */
struct fused_op {
    /* activations [rows, k]: x, or norm(x), which the block with tile 0 also writes to
     * `h` */
    const void *x;
    int64_t x_stride;
    void *h; /* NULL: no norm */
    int64_t h_stride;
    struct norm_args norm;
    /* weight [n, k]; n 0: a norm alone */
    const void *w;
    int64_t w_stride;     /* of FUSED_16 in elements, else in bytes; not of FUSED_INT4 */
    const float *w_scale; /* [n] results are multiplied by it; NULL: not */
    /* Of FUSED_INT8: zero points, or NULL. They and w_scale are [n, n_groups]: 1, or
     * one for each 128 columns, which fused launches do not take. */
    const uint8_t *w_zero;
    int32_t n_groups;
    int32_t e4m3;       /* more than FUSED_ROWS rows of x are quantised for it (small_codes.h) */
    float act_scale;    /* with e4m3: of all rows of x; 0: each has its own */
    int32_t f16_scales; /* of FUSED_INT4: groups' scales are fp16, else bf16 */
    int32_t halves;     /* of FUSED_GROUPS_4 and _8: groups of 16 columns */
    int32_t n, k;
    const void *bias;     /* [n] or NULL */
    int32_t act;          /* enum activation */
    const void *residual; /* [rows, n] or NULL */
    int64_t residual_stride;
    void *out;          /* [rows, n]; NULL where only `gated` is wanted */
    int32_t out_floats; /* out is float32: of launch_mixed_wide alone */
    int64_t out_stride;
    /* Further results; NULL: none. sum [rows, n] += out, and with `partial` the other
     * ranks' out too; gated [rows, n / 2] = act(out[:, :n / 2]) * out[:, n / 2:]. */
    void *sum;
    int64_t sum_stride;
    void *gated;
    int64_t gated_stride;
    int32_t gate_act;
    int32_t partial;
    int32_t h_transient, out_transient; /* need not be stored */
    int32_t roped; /* out is the q, k and v heads that fused_args.rope rotates and caches */
    /* Row i of the lower half of each group of `pair` rows of w is processed together
     * with row i of its upper half: a tile has FUSED_TILE / 2 rows of each half. */
    int32_t pair;
    /* set by fused_plan */
    /* columns of a split-K slice (the last may have fewer); number of slices */
    int32_t slice_k, slices;
    int32_t first; /* the block that has tile 0 of slice 0 */
};

/* Rotation of q and k over whole heads, halves paired; k and v are also written to the
 * cache. */
struct fused_rope {
    const float *cos_sin;           /* [positions, head_dim or more]; NULL: no rotation */
    int64_t cos_sin_stride;         /* of a position */
    int32_t query_factors;          /* as in struct rope_args */
    const int32_t *position, *slot; /* [rows] */
    struct kv_view kv;              /* the cache; base NULL: no op has it yet */
    float k_over, v_over;           /* as in struct rope_args */
    int32_t n_heads, layer;         /* query heads; layer of the cache */
};

struct fused_args {
    struct fused_op op[FUSED_OPS];
    struct fused_rope rope;    /* of the op that is `roped` */
    struct p2p_args p2p;       /* for ops that are `partial` */
    int32_t n_ops, rows, type; /* ops used; activation rows; enum dtype of all but weights */
    int32_t format;            /* enum fused_format of all weights */
    /* For rows of x as e4m3 codes and their scales; NULL: there are none. */
    uint8_t *codes;
    float *code_scale;
    /* set by fused_plan */
    int32_t n_stages;                 /* stages of the ring */
    int32_t norm_bytes, shared_bytes; /* shared memory for a norm's weight, and in all */
    /* loads in flight at a time: more would delay the stage that is needed next */
    int32_t in_flight;
    /* grid barriers [FUSED_COUNTERS * FUSED_COUNTER_STRIDE], zero between launches */
    int32_t *counter;
    /* [FUSED_MAX_PARTIALS] slices of a tile that are done; zero between launches */
    int32_t *arrived;
    void *partials; /* [FUSED_MAX_PARTIALS] of FUSED_PARTIAL_BYTES: split-K partial sums */
};

#ifdef __CUDACC__
#define FUSED_BOTH __host__ __device__
#else
#define FUSED_BOTH
#endif

/* Columns of a stage. */
static inline FUSED_BOTH int32_t fused_stage_k(int32_t format)
{
    return format == FUSED_INT4 ? 2048 : format == FUSED_16 ? FUSED_STAGE_K : 1024;
}

/* Bytes of the first `cols` columns of a weight row. */
static inline FUSED_BOTH int64_t fused_row_bytes(int32_t format, int64_t cols)
{
    return format == FUSED_INT4 ? cols / FUSED_SEGMENT_K * FUSED_SEGMENT_BYTES
           : format == FUSED_16 ? cols * 2
                                : cols;
}

static inline FUSED_BOTH int32_t fused_stage_bytes(int32_t format)
{
    return FUSED_TILE * (int32_t)fused_row_bytes(format, fused_stage_k(format));
}

/* Columns that a warp of the matrix instruction has of a stage; a weight's columns
 * are a multiple. */
static inline FUSED_BOTH int32_t fused_warp_k(int32_t format)
{
    return fused_stage_k(format) / FUSED_MMA_WARPS;
}

/* A block's tiles of an op: the n tiles first, first + step, ... of one split-K
 * slice. */
struct tile_schedule {
    int32_t slice, first, step, n; /* see above */
};
static inline FUSED_BOTH struct tile_schedule tile_schedule_of(const struct fused_op *p,
                                                               int32_t block, int32_t n_blocks)
{
    int32_t rank = block - p->first + (block < p->first ? n_blocks : 0),
            n_tiles = p->n / FUSED_TILE;
    struct tile_schedule d;

    d.slice = rank * p->slices / n_blocks;
    /* the first block, counted from p->first, that has this slice */
    int32_t begin = (d.slice * n_blocks + p->slices - 1) / p->slices;
    d.step = ((d.slice + 1) * n_blocks + p->slices - 1) / p->slices - begin;
    d.first = rank - begin;
    d.n = d.first < n_tiles ? (n_tiles - d.first + d.step - 1) / d.step : 0;
    return d;
}

/* Fills in the fields that are marked so, for n_blocks blocks. False: the ops do not
 * fit. */
bool fused_plan(struct fused_args *a, int32_t n_blocks, int32_t max_shared_bytes);

/* Enqueues the launch; n_blocks as planned. */
void launch_fused_decode(const struct fused_args *a, int32_t n_blocks, cudaStream_t stream);
/* Allows the kernel this much shared memory. False: the device has less, or the running
 * code was compiled for older ones. */
bool fused_prepare(int32_t max_shared_bytes);

#ifdef __cplusplus
}
#endif

#endif
