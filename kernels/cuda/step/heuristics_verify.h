/* Steps that verify drafts, as steps of decodes: a pure function, tested without a
 * device. */
#ifndef QUIRE_KERNELS_CUDA_STEP_HEURISTICS_VERIFY_H
#define QUIRE_KERNELS_CUDA_STEP_HEURISTICS_VERIFY_H

#include "config/base/limits.h"
#include "kernels/batch.h"

/* Arrays of struct batch with a sequence for each token; all NULL: none. */
struct verify_rows {
    int32_t *q_start;                   /* [max_seqs + 1] */
    int32_t *kv_len, *row, *lcp_blocks; /* [max_seqs] */
};

/* Sequences of several tokens that are all sampled from, right behind the decodes,
 * become sequences of one token each over the same block table: a token's keys are
 * written before attention reads them, and it sees those up to its own. Recurrent
 * states are taken from sequence to sequence (kernels/cuda/states/recurrence.cu). So a
 * step that verifies drafts is computed by the kernels, and the graphs, of a decode
 * step of as many rows. Fills `r` and points `b` there, as far as max_seqs sequences
 * suffice. False: there are none. */
bool split_verified(struct batch *b, struct verify_rows *r, int32_t max_seqs, int32_t block_size);

#endif
