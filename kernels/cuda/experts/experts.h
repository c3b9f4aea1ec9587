/* Layers of experts on a device: launchers of the kernels behind backend_ops.experts.
 *
 * A pair is a row and one of the experts that it chose; pair row * top + i is the row's
 * i-th expert in the order of their indices. A shared expert that is some experts wide
 * may be so many `parts`, pairs of every row behind the chosen ones: then a row has
 * top + parts pairs. Results of products lie by pair, so no row
 * is moved: products gather the rows of x that an expert's pairs stand for, and a row's
 * pairs are added in a fixed order. Nothing that the host enqueues depends on the
 * routing.
 *
 *     route     scores to pairs and weights, and the lists of each expert's pairs; of
 *               some rows from the router's product on (router.cu)
 *     products  up (with the gate inside), then down: expert by expert, by the lists
 *     combine   a row's pairs times their weights, and the shared expert, where it is
 *               no parts
 *
 * A few rows take one launch of their own (expert_stream/), or three (few.cu).
 */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_EXPERTS_H
#define QUIRE_KERNELS_CUDA_EXPERTS_EXPERTS_H

#include "kernels/cuda/comm/p2p.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Some pairs of one expert, which a product takes at once. */
struct expert_tile {
    int32_t expert;
    int32_t first; /* of the expert's list */
    int32_t n;     /* pairs, at most a tile's rows */
    int32_t unused;
};

/* What the routing leaves for the products, in memory of the device. */
struct expert_lists {
    /* Of each pair, those of parts left out: -1 and 0: it is not held here */
    int32_t *expert;
    float *weight;
    /* Of n experts, the parts as the last ones: */
    int32_t *count;           /* [n] pairs of each expert */
    int32_t *list;            /* [n, rows] the pairs of each expert, in any order */
    int32_t *active;          /* [n] the experts that have pairs, in the order of their indices */
    int32_t *total;           /* [2] tiles, active experts */
    struct expert_tile *tile; /* [tiles], expert by expert */
    int32_t cap;              /* rows of the call: entries of each list */
    int32_t tile_rows;        /* most pairs of a tile */
};

struct expert_route {
    const float *scores;      /* [rows, n] the router's products */
    int64_t scores_stride;    /* elements */
    const float *choice_bias; /* [n], or NULL */
    const float *scale;       /* [n] of the weights, or NULL */
    /* Rows from *n_live on are padding: they have no pairs. NULL: none are. */
    const int32_t *n_live;
    int32_t rows, n, top;
    /* The experts that are held here (struct experts). Lists and products number them
     * from 0 on. */
    int32_t first, held;
    /* Of a shared expert, numbered from `held` on in the lists. */
    int32_t parts;
    int32_t n_groups, top_groups; /* n_groups <= 1: no groups */
    int32_t sigmoid, normalised, groups_by_two;
    int32_t mixer; /* SCORES_MIXER, with `jitter` */
    int32_t *load; /* [n] += the rows of each expert; NULL: they are not counted */
    /* Zero between launches: where blocks meet. NULL: one block routes few rows. */
    int32_t *counter;
    float factor, jitter;
};

/* Of up (gated: out [pairs, width], w [n * 2 * width, k]) or of down (out [pairs,
 * width], w [n * width, k]). */
struct expert_product {
    void *out;          /* rows are pairs */
    int64_t out_stride; /* elements */
    const void *x;      /* rows are pairs; with `divide` above 1, of pair p its p / divide */
    int64_t x_stride;   /* elements */
    const void *w;
    int64_t w_stride;
    const void *bias; /* of w's rows, or NULL */
    int32_t k, width, n;
    int32_t divide, gated;
    int32_t act;  /* enum activation */
    int32_t type; /* enum dtype of all of them */
    float limit;  /* gpt-oss's clamped form, above 0 */
    /* w is e4m3 codes, w_stride in bytes: value = scale * code, with scales [rows of w,
     * n_groups], each of group_cols columns. NULL: w is of `type`. */
    const float *w_scale;
    int32_t n_groups, group_cols;
    int32_t group_shift; /* the logarithm of group_cols where that is a power of two; else 0 */
    int32_t panels;      /* enum panel_kind: w is of QUANT_PANELS, w_scale [rows of w] */
    /* x is e4m3 codes too, x_stride in bytes, with scales
     * [rows of x, k / EXPERT_CODES_K] of so many columns; NULL: x is of `type`. */
    const float *x_scale;
    float *out_scale; /* of a gated one with x_scale: out likewise, out_stride in bytes */
    float out_fixed;  /* with out_scale: the scale of all; 0: each group's own */
    /* Experts from n on are parts of a shared one without biases, whose weight is of
     * `type`: of up [2 * parts * width, k], all of gate first; of down [width, parts *
     * k]. Of launch_expert_tiles alone, for tiles of at most 64 rows. */
    const void *shared;
    int64_t shared_stride;
    int32_t parts; /* 0: there are none */
    /* Of down by launch_expert_tiles: the launch ahead is up by the same. It waits for
     * the lists before others may begin, and writes neither w nor `shared`: all may be
     * read before it has ended. */
    bool ahead;
};

/* x [rows, cols], bf16, as codes [rows, cols] and scale [rows, cols / EXPERT_CODES_K]:
 * the greatest magnitude of a group of columns is code 448, or `fixed` above 0 is the
 * scale of all and what is beyond that code is cut. */
struct expert_quantise {
    const void *x;
    int64_t x_stride; /* elements */
    uint8_t *codes;
    float *scale;
    float fixed;
    int32_t rows, cols;
};

struct expert_combine {
    void *y; /* [rows, hidden] */
    int64_t y_stride;
    bool adds;         /* y += the sum, in place of y = the sum */
    const void *pairs; /* [rows * (top + parts), hidden] */
    int64_t pairs_stride;
    const float *weight;   /* as many, of parts unused */
    const int32_t *n_live; /* as of the routing; other rows become zero */
    const void *shared;    /* [rows, hidden] of the shared expert, or NULL */
    int64_t shared_stride;
    /* [rows, hidden], [hidden]: both have the factor sigmoid(gate x); NULL: 1 */
    const void *x, *gate;
    int64_t x_stride;
    /* With `adds`: h [rows, hidden] = the norm of y, all rows of which are in vectors
     * of 16 bytes. NULL: not. */
    void *h;
    int64_t h_stride;
    struct norm_args norm;
    int32_t rows, top, parts, hidden, type;
};

enum { EXPERT_PARTS_ROWS = 256 }; /* rows of a call up to which lists may have parts */
enum { EXPERT_MOST = 1024, EXPERT_MOST_TOP = 32, EXPERT_MOST_GROUPS = 32 }; /* of a layer */
/* With q also its codes. */
void launch_expert_route(const struct expert_route *a, const struct expert_lists *l,
                         const struct expert_quantise *q, cudaStream_t stream);
/* Any shape and type: a warp multiplies a row of w with the rows of an expert, four at
 * a time. The fastest for a few rows. */
void launch_expert_product(const struct expert_product *a, const struct expert_lists *l,
                           int32_t rows, int32_t top, cudaStream_t stream);
/* The same by tiles with wgmma, which only code for sm_90a has. False: not for this
 * shape, or other code runs; nothing was done. */
bool launch_expert_tiles(const struct expert_product *a, const struct expert_lists *l,
                         int32_t n_blocks, cudaStream_t stream);
/* What launch_expert_tiles does for tiles of EXPERT_WIDE_ROWS, where expert_wide_fits
 * says that there is shared memory for it. */
enum { EXPERT_WIDE_ROWS = 256 };
bool expert_wide_fits(void);
bool launch_expert_wide(const struct expert_product *a, const struct expert_lists *l,
                        int32_t n_blocks, cudaStream_t stream);
/* All of it, from the router's product to y, for at most EXPERT_FEW_ROWS rows and
 * EXPERT_FEW_EXPERTS experts without a shared one; launch_expert_few does all but down
 * with the sum, which launch_expert_down does. False: not for this shape; nothing was
 * done. */
enum { EXPERT_FEW_ROWS = 4, EXPERT_FEW_EXPERTS = 512 };
struct expert_exchange; /* expert_stream/exchange.h */
struct expert_few {
    struct expert_route route; /* its scores are written first */
    struct expert_product up, down;
    const void *router, *router_bias; /* [n, hidden], [n] or NULL */
    int64_t router_stride;
    void *y; /* [rows, hidden] */
    int64_t y_stride;
    bool adds; /* y += the result */
    /* Of launch_expert_stream alone. `normed`: up.x is normed first, an RMS norm, and
     * the result stored to h unless that is NULL. */
    bool normed;
    struct norm_args norm;
    void *h; /* [rows, hidden] */
    int64_t h_stride;
    /* The shared expert as so many parts of up.width; 0: there is none. Weights are as
     * in struct experts. */
    const void *shared_up, *shared_down;
    int64_t shared_up_stride, shared_down_stride;
    int32_t shared_parts;
    struct expert_exchange *exchange; /* NULL: no such launches */
};
bool launch_expert_few(const struct expert_few *a, const struct expert_lists *l,
                       cudaStream_t stream);
void launch_expert_down(const struct expert_few *a, const struct expert_lists *l,
                        cudaStream_t stream);
/* What a launch of few rows needs that sums its results over ranks, tile by tile
 * (expert_stream/stream_ranks.cuh). */
struct expert_ranks {
    char *inbox[P2P_MAX_RANKS]; /* each rank's p2p_inbox.fused */
    uint32_t *epoch;            /* this rank's: sums by way of these inboxes so far */
    int32_t *arrived;           /* as in p2p_args */
    const int32_t *stop;        /* likewise */
    int32_t rank, n_ranks;      /* n_ranks 0: nothing is summed */
};
/* All of it, with a shared expert without a gate, in one launch of n_blocks blocks, one
 * on each multiprocessor, for at most EXPERT_STREAM_ROWS rows where expert_stream_fits
 * says so. Of route, scores is unused, and scores_stride is at most
 * EXPERT_STREAM_EXPERTS; up.out and down.x are unused. Over ranks the result is the sum
 * of all ranks' results, each rounded to the type of y. */
enum { EXPERT_STREAM_ROWS = 8, EXPERT_STREAM_EXPERTS = 512 };
enum { EXPERT_COUNTERS = 2, EXPERT_COUNTER_STRIDE = 32 };
bool expert_stream_fits(const struct expert_few *a, int32_t n_blocks);
void launch_expert_stream(const struct expert_few *a, const struct expert_ranks *ranks,
                          int32_t n_blocks, cudaStream_t stream);
/* The same for panels but those of int4, if there is a kernel for the kinds of up and
 * down. */
bool expert_stream_panels_fit(const struct expert_few *a);
void launch_expert_stream_panels(const struct expert_few *a, const struct expert_ranks *ranks,
                                 int32_t n_blocks, cudaStream_t stream);
/* The router's products of at most EXPERT_ROUTER_ROWS rows, into a->route.scores.
 * False: not for this shape; nothing was done. Of a only what concerns the router
 * and x counts. */
enum { EXPERT_ROUTER_ROWS = 16 };
bool launch_expert_router(const struct expert_few *a, cudaStream_t stream);
/* The router's products of at most EXPERT_PARTS_ROWS rows, then as launch_expert_route,
 * in one launch. Of a as before, with all of its route but the scores, which are not
 * stored. False: not for this shape; nothing was done. */
bool launch_expert_choose(const struct expert_few *a, const struct expert_lists *l,
                          const struct expert_quantise *q, cudaStream_t stream);
/* The last launch of `experts`, which may add to the residual stream if the operation
 * behind it is known: what waits is launched by cuda_experts_flush or
 * cuda_experts_add. */
struct expert_pending {
    bool waits, few, stream;       /* few: it is an expert_few; stream: of everything */
    struct expert_few down;        /* with few */
    struct expert_ranks ranks;     /* with stream */
    struct expert_lists lists;     /* with few, but not stream */
    struct expert_combine combine; /* else */
};
/* The same by tiles with mma, at most 64 rows each, of 16-bit floats whose width and
 * depth are multiples of EXPERT_MMA_K. False: not for this shape; nothing was done. */
enum { EXPERT_MMA_K = 64 };
bool launch_expert_mma(const struct expert_product *a, const struct expert_lists *l,
                       int32_t n_blocks, cudaStream_t stream);
/* The same for codes in multiples of EXPERT_CODES_K columns, times bf16, in tiles of at
 * most 64 rows. False: not for this shape; nothing was done. */
enum { EXPERT_CODES_K = 128 };
bool launch_expert_codes(const struct expert_product *a, const struct expert_lists *l,
                         int32_t n_blocks, cudaStream_t stream);
/* The same for codes times codes (x_scale), in tiles of at most EXPERT_E4M3_ROWS rows,
 * where expert_e4m3_fits says so for the weights of both products of a layer. */
enum { EXPERT_E4M3_ROWS = 128 };
bool expert_e4m3_fits(int32_t k, int32_t group_cols);
bool launch_expert_e4m3(const struct expert_product *a, const struct expert_lists *l,
                        int32_t n_blocks, cudaStream_t stream);
/* The same for panels (quant/panels.h), whose width and depth are multiples of
 * EXPERT_PANEL_K. */
enum { EXPERT_PANEL_K = 64 };
/* Most rows of a tile for which a block has the shared memory: 16, 32 or 64. */
int32_t expert_panels_rows(int32_t kind);
bool launch_expert_panels(const struct expert_product *a, const struct expert_lists *l,
                          int32_t n_blocks, cudaStream_t stream);
/* A product beside experts, of at most EXPERT_STREAM_ROWS rows
 * (expert_stream/stream_linear.cu). Over ranks `sum` gets the sum of all ranks'
 * results, each rounded.
 * False: not for this shape; nothing was done. */
struct expert_linear {
    struct expert_product product; /* out [rows, width] = x w^T + bias; out NULL: not wanted */
    void *sum;                     /* [rows, width] += that; NULL: not */
    int64_t sum_stride;
    int32_t rows;
    /* x is normed first, an RMS norm, and the result stored to h unless that is
     * NULL. */
    bool normed;
    struct norm_args norm;
    void *h; /* [rows, k] */
    int64_t h_stride;
};
bool launch_expert_linear(const struct expert_linear *a, const struct expert_ranks *ranks,
                          int32_t n_blocks, cudaStream_t stream);
/* Whether launch_expert_tiles takes both products of such a layer. */
bool expert_tiles_fit(int32_t hidden, int32_t width, int32_t type);
void launch_expert_combine(const struct expert_combine *a, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
