#include "engine/batch_copy.h"

#include <stdlib.h>
#include <string.h>

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

static size_t rounded(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

static size_t batch_bytes(const struct batch *b)
{
    size_t n = 0;
#define X(array, count) n += rounded((size_t)(b->count) * sizeof(*b->array));
    BATCH_ARRAYS(X)
#undef X
    return n;
}

int batch_copy_set(struct batch_copy *c, const struct batch *b, struct err *e)
{
    size_t need = batch_bytes(b);
    if (need > c->cap) {
        char *p = realloc(c->arena, need + need / 2);
        if (!p)
            return err_nomem(e, "a step's batch");
        c->arena = p;
        c->cap = need + need / 2;
    }
    c->batch = *b;
    char *at = c->arena;
#define X(array, count)                                               \
    if ((b->count) > 0 && b->array) {                                 \
        memcpy(at, b->array, (size_t)(b->count) * sizeof(*b->array)); \
        c->batch.array = (const void *)at;                            \
        at += rounded((size_t)(b->count) * sizeof(*b->array));        \
    }
    BATCH_ARRAYS(X)
#undef X
    return 0;
}

void batch_copy_release(struct batch_copy *c)
{
    free(c->arena);
    *c = (struct batch_copy){0};
}
