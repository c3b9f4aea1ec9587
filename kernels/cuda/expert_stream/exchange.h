/* What the blocks of a launch of few rows (stream.cu) hand each other. */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_STREAM_EXCHANGE_H
#define QUIRE_KERNELS_CUDA_EXPERT_STREAM_EXCHANGE_H

#include "kernels/cuda/experts/experts.h"

enum { EXPERT_STREAM_MIDDLE = 1 << 19 }; /* most results of up */

/* In memory of the device. Launches take the two sets in turn and clear the set of the
 * launch before, so no block waits until another has read. */
struct expert_exchange {
    struct {
        uint32_t scores[EXPERT_STREAM_ROWS * EXPERT_STREAM_EXPERTS];
        uint16_t middle[EXPERT_STREAM_MIDDLE]; /* [rows, pairs of a row, width] */
    } set[2];                                  /* all bits set where nothing is */
    /* The set of the next launch, and what the last one wrote in the other: scores, and
     * 16 bytes of middle. */
    struct {
        int32_t set, scores, middle, unused;
    } next;
    int32_t left; /* blocks that have read `next`; zero between launches */
};

#endif
