/* Products of 9 to 64 rows on Hopper (over ranks of 3 to 64), with the norm before them
 * and the gate or the residual sum behind them inside: four launches between two
 * attentions.
 *
 * The activations are the 64-row operand of the matrix instruction and weight rows the
 * other. A tile may have any multiple of 8 weight rows, a product is one wave of tiles,
 * the last perhaps cut, and a block streams its weights before it waits for the launch
 * ahead (programmatic dependent launch): memory is never idle between two products.
 *
 * A norm is taken apart: the product that makes the residual stream also writes it
 * times the norm's weight, and adds the row's squares to one whole-number sum; the
 * product behind the norm reads the former as its source and multiplies its results by
 * the factor of the latter.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_ROWS_H
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_ROWS_H

#include "kernels/cuda/fused_decode/fused_decode.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SMALL_ROWS = 64,              /* activation rows at most */
    SMALL_DEPTH = 64,             /* columns of a stage: 128 bytes, the widest swizzle */
    SMALL_SENT_BYTES = 512 << 10, /* by a rank, for a sum in an epilogue */
    WIDE_GATE = 224,              /* weight rows of a tile of gates of more than SMALL_ROWS rows */
};

enum small_kind {
    SMALL_PLAIN, /* out = act(x w^T + bias) */
    SMALL_GATED, /* gated = act(first half) * second half */
    SMALL_SUM,   /* sum += x w^T, and what the next norm needs */
};

/* How a product is cut into blocks: `width` weight rows a tile, the depth in `split`
 * parts whose sums a cluster of so many blocks adds. width 0: the product is for
 * cuBLASLt. */
struct small_tile {
    enum small_kind kind;
    int32_t width, split;
};

/* Where the results of op `p` go, [rows] at the stride, and their activation, which a
 * gate has for its first half. */
struct small_target {
    void *out;
    int64_t stride;
    int32_t act;
};
static inline struct small_target small_target_of(const struct fused_op *p, enum small_kind kind)
{
    struct small_target plain = {p->out, p->out_stride, p->act},
                        gated = {p->gated, p->gated_stride, p->gate_act},
                        sum = {p->sum, p->sum_stride, p->act};

    return kind == SMALL_GATED ? gated : kind == SMALL_SUM ? sum : plain;
}

/* Every tile there is a kernel for: TILE(width, split, kind). */
#define SMALL_TILES(TILE)     \
    TILE(32, 1, SMALL_PLAIN)  \
    TILE(40, 1, SMALL_PLAIN)  \
    TILE(48, 1, SMALL_PLAIN)  \
    TILE(56, 1, SMALL_PLAIN)  \
    TILE(64, 1, SMALL_PLAIN)  \
    TILE(72, 1, SMALL_PLAIN)  \
    TILE(80, 1, SMALL_PLAIN)  \
    TILE(96, 1, SMALL_PLAIN)  \
    TILE(112, 1, SMALL_PLAIN) \
    TILE(128, 1, SMALL_PLAIN) \
    TILE(24, 2, SMALL_PLAIN)  \
    TILE(40, 2, SMALL_PLAIN)  \
    TILE(48, 2, SMALL_PLAIN)  \
    TILE(64, 2, SMALL_PLAIN)  \
    TILE(72, 2, SMALL_PLAIN)  \
    TILE(80, 2, SMALL_PLAIN)  \
    TILE(96, 2, SMALL_PLAIN)  \
    TILE(112, 2, SMALL_PLAIN) \
    TILE(128, 2, SMALL_PLAIN) \
    TILE(64, 1, SMALL_GATED)  \
    TILE(96, 1, SMALL_GATED)  \
    TILE(112, 1, SMALL_GATED) \
    TILE(128, 1, SMALL_GATED) \
    TILE(160, 1, SMALL_GATED) \
    TILE(192, 1, SMALL_GATED) \
    TILE(224, 1, SMALL_GATED) \
    TILE(256, 1, SMALL_GATED) \
    TILE(32, 2, SMALL_SUM)    \
    TILE(40, 2, SMALL_SUM)    \
    TILE(48, 2, SMALL_SUM)    \
    TILE(56, 2, SMALL_SUM)    \
    TILE(64, 2, SMALL_SUM)    \
    TILE(72, 2, SMALL_SUM)    \
    TILE(80, 2, SMALL_SUM)    \
    TILE(96, 2, SMALL_SUM)    \
    TILE(112, 2, SMALL_SUM)   \
    TILE(128, 2, SMALL_SUM)

/* Grids of no more blocks than this do not read an H200's memory fast enough. A gate in
 * the product saves a launch. */
static inline int32_t small_enough_blocks(enum small_kind kind, int32_t n_blocks)
{
    return kind == SMALL_GATED ? n_blocks * 5 / 6 : n_blocks * 7 / 8;
}

/* Whether an add and norm is likely to join the op's product: then its depth is split,
 * and there are twice as many blocks. */
bool small_becomes_sum(const struct fused_op *p);

/* The tile for op `p` on a device of n_blocks multiprocessors: of one wave the most
 * blocks, however few (heuristics_grids.h); width 0: there is none. Pure. */
struct small_tile small_tile_of(const struct fused_op *p, int32_t n_blocks);
/* Whether the products of op `p` may be a summand of several ranks: in an inbox there
 * is room for them, all of the launch's blocks run at the same time, and so little is
 * sent that every rank may get all of it (p2p.cu has a way for more). Pure. */
static inline bool small_sums_over_ranks(const struct fused_args *a, const struct fused_op *p,
                                         const struct small_tile *t, int32_t n_blocks)
{
    int64_t sent = (int64_t)a->rows * p->n * 2 * (a->p2p.n_ranks - 1);

    return p->sum && (int64_t)SMALL_ROWS * p->n * 2 <= P2P_SMALL_BYTES &&
           sent <= SMALL_SENT_BYTES && p->n / t->width * t->split <= n_blocks;
}
/* Whether the norm before op i is taken apart: the product before it makes the residual
 * stream, and its result need not be stored. Pure. */
bool small_norm_apart(const struct fused_args *a, int32_t i);
/* Whether all of `a` goes by these launches, of more rows than a fused launch. Pure. */
bool small_plan(const struct fused_args *a, int32_t n_blocks);

/* Whether the kernels run here: Hopper's own code, room for the rings, a driver that
 * makes tensor maps. */
bool small_prepare(void);
/* Sums of squares of the residual stream's rows, for the norms that are taken apart.
 * Two sets in turn: the product that reads one clears the other for the next product
 * that adds to it. */
struct small_squares {
    unsigned long long *sum[2]; /* [SMALL_ROWS] on the device; NULL: the kernels do not run here */
    bool zero[2];               /* cleared by an operation enqueued before */
    int32_t turn;               /* the set that was added to last */
};
struct tiles_args;
/* Enqueues a gated bf16 product of SMALL_ROWS + 1 to 2 * SMALL_ROWS rows, whose n is a
 * multiple of WIDE_GATE. False: it does not fit or the kernels do not run here; nothing
 * was done. */
bool launch_gated_wide(const struct tiles_args *a, cudaStream_t stream);
/* Enqueue a's operations, planned by small_plan or small_mixed_plan. False: a launch
 * failed, and the error is CUDA's last. */
bool launch_small_rows(const struct fused_args *a, struct small_squares *squares, int32_t n_blocks,
                       cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
