/* Sums over ranks on peer devices (peer.cu): every rank has an inbox, memory that the others write. */
#ifndef QUIRE_CUDA_PEER_H
#define QUIRE_CUDA_PEER_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PEER_MAX_RANKS = 8,
    PEER_MAX_ROWS = 256,
    PEER_LINE_ROWS = 64,       /* so few rows go as lines */
    PEER_ROW_BYTES = 32 << 10, /* of a row; as lines, of half of it */
    PEER_SLOT_BYTES = (PEER_MAX_ROWS + PEER_LINE_ROWS) * PEER_ROW_BYTES,
};

struct peer_args {
    char *inbox[PEER_MAX_RANKS];       /* each rank's: [2][n_ranks] slots of rows, then of rows as lines */
    uint32_t *arrived[PEER_MAX_RANKS]; /* each rank's: [n_ranks][PEER_MAX_ROWS] epochs */
    uint32_t *epoch;                   /* this rank's: [PEER_MAX_ROWS] */
    int32_t *stop;                     /* in pinned host memory, 1: a rank is gone, wait for none; sums are void */
    int32_t rank, n_ranks;
};

/* Summed over the ranks, in their order, in float32: x == NULL: y = the sum; else x += the sum, and out = norm(x) when out is
 * not NULL. Every rank calls with the same shape: at most PEER_MAX_ROWS rows of at most PEER_ROW_BYTES, 16-byte aligned.
 * False: not such a shape. */
bool launch_peer_sum(const struct peer_args *p, void *out, int64_t out_stride, void *x, int64_t x_stride, void *y,
                     int64_t y_stride, const struct norm_args *n, int32_t rows, int32_t cols, int type,
                     cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
