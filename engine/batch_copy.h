/* A batch with memory of its own, for an executor that computes after launch has returned. */
#ifndef QUIRE_ENGINE_BATCH_COPY_H
#define QUIRE_ENGINE_BATCH_COPY_H

#include "kernels/batch.h"

/* Every array of struct batch with the number of its elements. */
#define BATCH_ARRAYS(X)             \
    X(swap_out, n_swap_out)         \
    X(swap_in, n_swap_in)           \
    X(copy, n_copy)                 \
    X(table_update, n_table_update) \
    X(table_block, n_table_block)   \
    X(token, n_tokens)              \
    X(token_src, n_tokens)          \
    X(position, n_tokens)           \
    X(slot, n_tokens)               \
    X(q_start, n_seqs + 1)          \
    X(kv_len, n_seqs)               \
    X(row, n_seqs)                  \
    X(lcp_blocks, n_seqs)           \
    X(logits_token, n_logits)       \
    X(sample, n_samples)            \
    X(token_count, n_token_count)   \
    X(token_bias, n_token_bias)     \
    X(allowed_token, n_allowed_token)

struct batch_copy {
    struct batch batch;
    char *arena;
    size_t cap;
};

/* Copy `b` with all its arrays; the memory is kept for the next copy. 0 or ERR_NOMEM. Zeroed struct: empty. */
int batch_copy_set(struct batch_copy *c, const struct batch *b, struct err *e);
void batch_copy_release(struct batch_copy *c);

#endif
