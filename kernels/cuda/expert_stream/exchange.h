/* What the blocks of a launch of few rows (stream.cu) hand each other. */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_STREAM_EXCHANGE_H
#define QUIRE_KERNELS_CUDA_EXPERT_STREAM_EXCHANGE_H

#include <stdalign.h>
#include <stdint.h>

#include "kernels/cuda/experts/experts.h"

enum { EXPERT_STREAM_MIDDLE = 1 << 19 }; /* most results of up */

/* Which set of struct expert_exchange a launch fills, and what the launch before has
 * left in the other one; 16 bytes, which are copied at once. */
struct exchange_turn {
    alignas(16) int32_t set;
    int32_t scores, middle; /* scores, and 16 bytes of middle */
    int32_t unused;
};

/* In memory of the device. Launches take the two sets in turn and clear the set of the
 * launch before, so no block waits until another has read. */
struct expert_exchange {
    struct {
        uint32_t scores[EXPERT_STREAM_ROWS * EXPERT_STREAM_EXPERTS];
        uint16_t middle[EXPERT_STREAM_MIDDLE]; /* [rows, pairs of a row, width] */
    } set[2];                                  /* all bits set where nothing is */
    struct exchange_turn turn;                 /* of the next launch */
    int32_t left; /* blocks that have read `turn`; zero between launches */
};

#endif
