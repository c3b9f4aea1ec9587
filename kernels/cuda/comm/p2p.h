/* All-reduce between peer devices (p2p.cu) and sampling over them (p2p_sample.cu,
 * topk_merge.cu). Every rank has an inbox, memory that the others write. */
#ifndef QUIRE_KERNELS_CUDA_COMM_P2P_H
#define QUIRE_KERNELS_CUDA_COMM_P2P_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    P2P_MAX_RANKS = 8,
    P2P_SLOTS = 256, /* blocks of a sum at most */
    P2P_ROW_BYTES = 32 << 10,
    P2P_BUFFERS = 3,     /* slot sets used in turn, see p2p.cu */
    P2P_BESIDE_SMS = 16, /* multiprocessors of a sum beside a product */
    P2P_BESIDE_BLOCKS = 2 * P2P_BESIDE_SMS,
    P2P_MAX_TOKENS = 1024, /* samples per exchange */
    TOPK_MOST = 64,        /* entries of a top-k list (topk_merge.cu) */
    TOPK_SAMPLES = 256,    /* samples per exchange of lists */
    TOPK_WORDS = 336,      /* words per sample */
    P2P_EPOCH_TOKENS = 0,  /* p2p_args.epoch: exchanges of tokens so far */
    P2P_EPOCH_ROWS = 1,    /* of logits rows */
    P2P_EPOCH_FUSED = 2,   /* sums in fused launches */
    P2P_EPOCH_SMALL = 3,   /* in products of few rows */
    P2P_EPOCHS = 4,
    P2P_FUSED_BUFFERS = 2,               /* slot sets used in turn, see all_reduce.cuh */
    P2P_FUSED_BYTES = 8 * P2P_ROW_BYTES, /* per sum in a fused launch */
    P2P_SMALL_BUFFERS = 2,               /* slot sets used in turn, see small_sum.cuh */
    P2P_SMALL_ROWS = 64,
    P2P_SMALL_BYTES = P2P_SMALL_ROWS * P2P_ROW_BYTES, /* per sum in such a product */
};

/* A rank's candidate for a row of logits, or a sampled token, each data word beside its
 * exchange's number (p2p_sample.cu). */
struct p2p_token {
    uint32_t line[8]; /* two 16-byte stores */
};

/* A block's state in the all-reduce of p2p.cu. */
struct p2p_row {
    int32_t buffer;            /* [0, P2P_BUFFERS) slot set of the next row */
    int32_t used[P2P_BUFFERS]; /* bytes received in a set and not yet blanked */
};

/* A rank's memory that the others write. `row`, `fused` and `small` start with all
 * bytes 0xFF, the rest with 0. */
struct p2p_inbox {
    char *row;               /* [P2P_BUFFERS][n_ranks][P2P_SLOTS][P2P_ROW_BYTES] */
    char *fused;             /* [P2P_FUSED_BUFFERS][n_ranks][P2P_FUSED_BYTES] */
    char *small;             /* [P2P_SMALL_BUFFERS][n_ranks][P2P_SMALL_BYTES] */
    struct p2p_token *token; /* [2][n_ranks][P2P_MAX_TOKENS] */
    uint32_t
        /* [n_ranks] number of the last exchange of logits rows that each rank has
         * completed */
        *rows_epoch;
    /* [2][n_ranks][TOPK_SAMPLES][TOPK_WORDS] high half: the exchange's number, low
     * half: data */
    unsigned long long *topk;
};

struct p2p_args {
    struct p2p_inbox inbox[P2P_MAX_RANKS]; /* each rank's */
    struct p2p_row *row;                   /* this rank's: [P2P_SLOTS], initially 0 */
    /* this rank's: [P2P_EPOCHS] exchanges so far, initially 0 */
    uint32_t *epoch;
    /* this rank's: blocks that are done; 0 between launches */
    int32_t *arrived;
    int32_t *stop; /* in pinned host memory; 1: a rank is gone, wait for none; results are void */
    int32_t rank, n_ranks; /* n_ranks is at most P2P_MAX_RANKS */
};

/* What of the ranks a product needs that sums over them in its epilogue. */
struct p2p_summands {
    char *inbox[P2P_MAX_RANKS]; /* each rank's `small` */
    uint32_t *epoch;            /* this rank's: sums so far */
    int32_t *arrived;           /* this rank's: blocks that are done; 0 between launches */
    const int32_t *stop;        /* as in p2p_args */
    int32_t rank, n_ranks;      /* n_ranks 0: nothing is summed over ranks */
};

/* Sums y over the ranks, in their order, in float32. x NULL: y = the sum; else x += the
 * sum, and out = norm(x) unless out is NULL. All ranks call with the same shape: rows
 * of at most P2P_ROW_BYTES, 16-byte aligned. False: the shape does not fit. */
bool launch_p2p_sum(const struct p2p_args *p, void *out, int64_t out_stride, void *x,
                    int64_t x_stride, void *y, int64_t y_stride, const struct norm_args *n,
                    int32_t rows, int32_t cols, int type, cudaStream_t stream);

/* Logits rows on the ranks that sample them. With n = rows / n_ranks, rounded up, row i
 * of a step belongs to rank i / n, where it is row i % n. */
struct p2p_rows {
    float *row[P2P_MAX_RANKS]; /* each rank's: [n, vocab] */
    int64_t stride;            /* in elements */
    /* columns of all, and of a rank's shard; the last shards have what is left */
    int32_t vocab, width;
};
/* Sends `shard` [rows, the rank's columns] to the ranks that sample its rows; at its
 * end this rank's rows are complete. */
void launch_p2p_rows(const struct p2p_args *p, const struct p2p_rows *out, const float *shard,
                     int64_t stride, int32_t rows, cudaStream_t stream);
/* Distributes tokens after each rank has sampled its share of the step's rows
 * [first_row, first_row + rows), with at most P2P_MAX_TOKENS samples, and has written
 * its results to rank 0's memory: all ranks get the tokens, and rank 0's host the
 * results. */
void launch_p2p_share_tokens(const struct p2p_args *p, const struct step_arrays *s,
                             int32_t first_row, int32_t rows, cudaStream_t stream);

/* Samples the step's rows from a->first on. a->logits [rows, the rank's columns] is
 * this rank's shard of `vocab` columns; `width` is the first rank's. Rows belong to
 * ranks as in struct p2p_rows; launch_p2p_share_tokens must follow. At most
 * TOPK_SAMPLES samples, each greedy or with a top_k of at most TOPK_MOST, and with at
 * most as many candidates and best tokens. */
void launch_topk_merge(const struct p2p_args *p, const struct sample_args *a,
                       const struct step_arrays *s, int32_t vocab, int32_t width,
                       cudaStream_t stream);

/* Combines greedy samples of the ranks' shards of the vocabulary. `shard` [rows, cols]
 * is this rank's logits, from id `first` on, of the step's rows from first_row on: the
 * greatest of all becomes the samples' token, with its log-probability, on every rank.
 * At most P2P_MAX_TOKENS rows. */
void launch_p2p_tokens(const struct p2p_args *p, const struct step_arrays *s, const float *shard,
                       int64_t stride, int32_t first, int32_t first_row, int32_t rows,
                       cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
