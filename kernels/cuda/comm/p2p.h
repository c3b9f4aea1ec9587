/* Sums over ranks on peer devices (p2p.cu) and the drawing of tokens (p2p_sample.cu):
 * every rank has an inbox, memory that the others write. */
#ifndef QUIRE_KERNELS_CUDA_COMM_P2P_H
#define QUIRE_KERNELS_CUDA_COMM_P2P_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    P2P_MAX_RANKS = 8,
    P2P_MAX_ROWS = 256,
    P2P_ROW_BYTES = 32 << 10,
    P2P_BUFFERS = 3,       /* see p2p.cu */
    P2P_MAX_TOKENS = 1024, /* samples of an exchange */
    TOPK_MOST = 64,        /* entries of a short list (topk_merge.cu) */
    TOPK_SAMPLES = 256,    /* samples of an exchange of them */
    TOPK_WORDS = 336,      /* of a sample */
    P2P_EPOCH_TOKENS = 0,  /* exchanges of tokens so far */
    P2P_EPOCH_ROWS = 1,    /* of logits rows */
    P2P_EPOCH_FUSED = 2,   /* sums in fused launches */
    P2P_EPOCHS = 3,
    P2P_FUSED_BUFFERS = 2,               /* see all_reduce.cuh */
    P2P_FUSED_BYTES = 8 * P2P_ROW_BYTES, /* of a sum in a fused launch */
};

/* What a rank says of a row of logits: its best token, how likely. */
struct p2p_token {
    uint32_t line[8];
};

struct p2p_row {
    int32_t buffer;            /* [0, P2P_TURNS) */
    int32_t used[P2P_BUFFERS]; /* bytes that came in a turn and are not wiped yet */
};

/* A rank's memory that the others write; all bytes of `row` and `chain` 0xFF, the rest
 * 0, before anyone does. */
struct p2p_inbox {
    char *row;               /* [P2P_TURNS][n_ranks][P2P_MAX_ROWS][P2P_ROW_BYTES] */
    char *fused;             /* [P2P_FUSED_TURNS][n_ranks][P2P_FUSED_BYTES] */
    struct p2p_token *token; /* [2][n_ranks][P2P_MAX_TOKENS] */
    uint32_t
        *rows_epoch; /* [n_ranks] exchange of logits rows to which each rank's columns have come */
    /* [2][n_ranks][TOPK_SAMPLES][TOPK_CELLS] a number each, and its
     * exchange's */
    unsigned long long *topk;
};

struct p2p_args {
    struct p2p_inbox inbox[P2P_MAX_RANKS]; /* each rank's */
    struct p2p_row *row;                   /* this rank's: [P2P_MAX_ROWS], 0 */
    uint32_t *epoch;                       /* this rank's: [P2P_EPOCHS], 0 */
    int32_t *arrived;                      /* this rank's: 0 between launches */
    int32_t *stop; /* in pinned host memory, 1: a rank is gone, wait for none; sums are void */
    int32_t rank, n_ranks;
};

/* Summed over the ranks, in their order, in float32: x == NULL: y = the sum; else x +=
 * the sum, and out = norm(x) when out is not NULL. Every rank calls with the same
 * shape: at most P2P_MAX_ROWS rows of at most P2P_ROW_BYTES, 16-byte aligned. False:
 * not such a shape. */
bool launch_p2p_sum(const struct p2p_args *p, void *out, int64_t out_stride, void *x,
                    int64_t x_stride, void *y, int64_t y_stride, const struct norm_args *n,
                    int32_t rows, int32_t cols, int type, cudaStream_t stream);

/* Logits rows as those who draw them have them: row i of a step's rows is drawn by rank
 * i / share, share the rows over the ranks rounded up, and is row i % share there. */
struct p2p_rows {
    float *row[P2P_MAX_RANKS]; /* each rank's: [share, vocab] at stride */
    int64_t stride;
    /* columns of all, and of a rank's part, the last ones' being what is left */
    int32_t vocab, width;
};
/* `part` [rows, the rank's columns] to the ranks that draw its rows; at the end theirs
 * have come here. */
void launch_p2p_rows(const struct p2p_args *p, const struct p2p_rows *out, const float *shard,
                     int64_t stride, int32_t rows, cudaStream_t stream);
/* Each rank has drawn its share of the step's rows first_row .. first_row + rows, whose
 * samples are P2P_MAX_TOKENS at most, and has answered into rank 0's memory: all get
 * the tokens, and rank 0's host the answers. */
void launch_p2p_share_tokens(const struct p2p_args *p, const struct step_arrays *s,
                             int32_t first_row, int32_t rows, cudaStream_t stream);

/* Draws the step's rows a->first .. of which a->logits [rows, the rank's columns] is a
 * part, as launch_sample does from `vocab` columns; `width`: of the first rank's part.
 * Row i is drawn by rank i / share: launch_p2p_drawn hands out what it drew. At most
 * TOPK_SAMPLES samples, each greedy or with a top_k of at most TOPK_MOST,
 * with as few candidates and best tokens. False as launch_sample's. */
void launch_topk_merge(const struct p2p_args *p, const struct sample_args *a,
                       const struct step_arrays *s, int32_t vocab, int32_t width,
                       cudaStream_t stream);

/* Each rank has drawn greedily from its part of the vocabulary, part [rows, cols] being
 * its logits, which begin at id `first`, of the step's rows from `first_row` on: the
 * greatest of all becomes the samples' token, with its log-probability, on every rank.
 * At most P2P_MAX_TOKENS rows. */
void launch_p2p_tokens(const struct p2p_args *p, const struct step_arrays *s, const float *shard,
                       int64_t stride, int32_t first, int32_t first_row, int32_t rows,
                       cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
