/* Sums over ranks on peer devices (p2p.cu) and the drawing of tokens (p2p_sample.cu):
 * every rank has an inbox, memory that the others write. */
#ifndef QUIRE_KERNELS_CUDA_COMM_P2P_H
#define QUIRE_KERNELS_CUDA_COMM_P2P_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PEER_MAX_RANKS = 8,
    PEER_MAX_ROWS = 256,
    PEER_ROW_BYTES = 32 << 10,
    PEER_TURNS = 3,           /* see p2p.cu */
    PEER_MAX_TOKENS = 1024,   /* samples of an exchange */
    PEER_SHORT_MOST = 64,     /* entries of a short list (topk_merge.cu) */
    PEER_SHORT_SAMPLES = 256, /* samples of an exchange of them */
    PEER_SHORT_CELLS = 336,   /* of a sample */
    PEER_EPOCH_TOKENS = 0,    /* exchanges of tokens so far */
    PEER_EPOCH_ROWS = 1,      /* of logits rows */
    PEER_EPOCH_CHAIN = 2,     /* sums in chains */
    PEER_EPOCHS = 3,
    PEER_CHAIN_TURNS = 2,                  /* see all_reduce.cuh */
    PEER_CHAIN_BYTES = 8 * PEER_ROW_BYTES, /* of a sum in a chain */
};

/* What a rank says of a row of logits: its best token, how likely. */
struct peer_token {
    uint32_t line[8];
};

struct peer_row {
    int32_t turn;             /* [0, PEER_TURNS) */
    int32_t used[PEER_TURNS]; /* bytes that came in a turn and are not wiped yet */
};

/* A rank's memory that the others write; all bytes of `row` and `chain` 0xFF, the rest
 * 0, before anyone does. */
struct peer_inbox {
    char *row;                /* [PEER_TURNS][n_ranks][PEER_MAX_ROWS][PEER_ROW_BYTES] */
    char *chain;              /* [PEER_CHAIN_TURNS][n_ranks][PEER_CHAIN_BYTES] */
    struct peer_token *token; /* [2][n_ranks][PEER_MAX_TOKENS] */
    uint32_t *came; /* [n_ranks] exchange of logits rows to which each rank's columns have come */
    /* [2][n_ranks][PEER_SHORT_SAMPLES][PEER_SHORT_CELLS] a number each, and its
     * exchange's */
    unsigned long long *cell;
};

struct peer_args {
    struct peer_inbox inbox[PEER_MAX_RANKS]; /* each rank's */
    struct peer_row *row;                    /* this rank's: [PEER_MAX_ROWS], 0 */
    uint32_t *epoch;                         /* this rank's: [PEER_EPOCHS], 0 */
    int32_t *arrived;                        /* this rank's: 0 between launches */
    int32_t *stop; /* in pinned host memory, 1: a rank is gone, wait for none; sums are void */
    int32_t rank, n_ranks;
};

/* Summed over the ranks, in their order, in float32: x == NULL: y = the sum; else x +=
 * the sum, and out = norm(x) when out is not NULL. Every rank calls with the same
 * shape: at most PEER_MAX_ROWS rows of at most PEER_ROW_BYTES, 16-byte aligned. False:
 * not such a shape. */
bool launch_peer_sum(const struct peer_args *p, void *out, int64_t out_stride, void *x,
                     int64_t x_stride, void *y, int64_t y_stride, const struct norm_args *n,
                     int32_t rows, int32_t cols, int type, cudaStream_t stream);

/* Logits rows as those who draw them have them: row i of a step's rows is drawn by rank
 * i / share, share the rows over the ranks rounded up, and is row i % share there. */
struct peer_rows {
    float *row[PEER_MAX_RANKS]; /* each rank's: [share, vocab] at stride */
    int64_t stride;
    /* columns of all, and of a rank's part, the last ones' being what is left */
    int32_t vocab, width;
};
/* `part` [rows, the rank's columns] to the ranks that draw its rows; at the end theirs
 * have come here. */
void launch_peer_rows(const struct peer_args *p, const struct peer_rows *out, const float *part,
                      int64_t stride, int32_t rows, cudaStream_t stream);
/* Each rank has drawn its share of the step's rows first_row .. first_row + rows, whose
 * samples are PEER_MAX_TOKENS at most, and has answered into rank 0's memory: all get
 * the tokens, and rank 0's host the answers. */
void launch_peer_drawn(const struct peer_args *p, const struct step_arrays *s, int32_t first_row,
                       int32_t rows, cudaStream_t stream);

/* Draws the step's rows a->first .. of which a->logits [rows, the rank's columns] is a
 * part, as launch_sample does from `vocab` columns; `width`: of the first rank's part.
 * Row i is drawn by rank i / share: launch_peer_drawn hands out what it drew. At most
 * PEER_SHORT_SAMPLES samples, each greedy or with a top_k of at most PEER_SHORT_MOST,
 * with as few candidates and best tokens. False as launch_sample's. */
void launch_peer_short(const struct peer_args *p, const struct sample_args *a,
                       const struct step_arrays *s, int32_t vocab, int32_t width,
                       cudaStream_t stream);

/* Each rank has drawn greedily from its part of the vocabulary, part [rows, cols] being
 * its logits, which begin at id `first`, of the step's rows from `first_row` on: the
 * greatest of all becomes the samples' token, with its log-probability, on every rank.
 * At most PEER_MAX_TOKENS rows. */
void launch_peer_tokens(const struct peer_args *p, const struct step_arrays *s, const float *part,
                        int64_t stride, int32_t first, int32_t first_row, int32_t rows,
                        cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
