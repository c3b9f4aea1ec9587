/* What one step computes: flat, read-only arrays, made by engine/sched/decode/pack.c,
 * consumed by a backend.
 *
 * A batch is the only thing that crosses the executor seam, so it can be sent to
 * another process as it is. Steps take effect one after another: whatever a step reads
 * (blocks, table rows, tokens of the step before) it finds as the step launched before
 * it left it, although the host may launch step N+1 before it has read the results of
 * step N. Inside a step the order is
 *     swap_out, swap_in, copy, table updates, forward, sampling.
 * Block tables live with the backend, one row a resident sequence; a step carries only
 * what changed. So do the ids of the tokens in each block, beside their keys and
 * values: a step's tokens are noted at their slots, and block copies and swaps take
 * them along. Penalties count a sequence's tokens there.
 *
 * Where layers are divided over a pipeline, a step comes to the backend in parts
 * (engine/workers/microbatch.c), micro-batches: ranges of its tokens, in their order,
 * the first with all memory operations. Each is a batch as any other, of the same
 * `step`.
 */
#ifndef QUIRE_KERNELS_BATCH_H
#define QUIRE_KERNELS_BATCH_H

#include "config/base/base.h"

/* Copy block `src` to block `dst`, all layers. Device block ids for `copy`; for a swap
 * one side is a host block. */
struct block_copy {
    int32_t src;
    int32_t dst;
};

/* Entries [index, index + count) of table row `row` become table_block[first .. first +
 * count). */
struct table_update {
    int32_t row;
    int32_t index;
    int32_t count;
    int32_t first;
};

/* Added to the logit of `token`, which a row names once; -INFINITY bans it
 * (logit_bias, bad_words, min_tokens). */
struct token_bias {
    int32_t token;
    float bias;
};

enum sample_kind {
    SAMPLE_TOKEN, /* one token by the parameters below */
    /* the n_candidates best (token, log-probability) of the processed logits, for
     * beams */
    SAMPLE_CANDIDATES,
    SAMPLE_SCORE, /* the log-probability of `target`, for prompt logprobs */
};

/* One row of sampling. Several rows may read one logits row (samples of one prompt).
 *
 * Order of operations on a copy of the logits: repetition, presence and frequency
 * penalties; bias; allowed ids; then temperature 0 takes the greatest logit (the
 * smallest id on a tie); else divide by temperature, top-k, top-p, min-p, and
 * Gumbel-max over the survivors. The noise of token t is a function of (seed, position,
 * t) alone. The log-probabilities reported are of the unprocessed logits, but of the
 * penalised and biased ones for SAMPLE_CANDIDATES (as transformers' beam search).
 */
struct sample_row {
    int32_t logits_row; /* index into logits_token */
    int32_t kind;       /* enum sample_kind */
    float temperature;  /* 0: greedy */
    float top_p;        /* (0, 1]; 1: off */
    float min_p;        /* [0, 1]; 0: off */
    int32_t top_k;      /* 0: off */
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty; /* 1: off */
    /* -1: none wanted, else the top n beside the chosen token's own;
     * 0..LIMIT_LOGPROBS */
    int32_t n_logprobs;
    int32_t n_candidates; /* SAMPLE_CANDIDATES: 1..LIMIT_CANDIDATES */
    int32_t target;       /* SAMPLE_SCORE */
    uint64_t seed;        /* of the sequence */
    /* of the token to be drawn, in the sequence: so many stand before it in its
     * blocks */
    int32_t position;
    int32_t row;      /* block-table row of the sequence: where the penalties find its tokens */
    int32_t n_prompt; /* its first tokens, which count for the repetition penalty alone */
    int32_t bias_first, n_bias; /* into token_bias */
    /* into mask_word: one bit an id, id t is bit t % 32 of word t / 32, 0 bans it; -1:
     * no mask */
    int32_t mask_first;
};

/* Words of a mask over `vocab` ids. */
static inline int32_t mask_words(int32_t vocab)
{
    return (int32_t)div_ceil(vocab, 32);
}

/* Whether tokens of the sequence change the row's logits. */
static inline bool sample_penalised(const struct sample_row *s)
{
    return s->repetition_penalty != 1.0f
               ? s->position > 0
               : (s->frequency_penalty != 0 || s->presence_penalty != 0) &&
                     s->position > s->n_prompt;
}

struct batch {
    uint64_t step; /* 1, 2, ... */
    int32_t part;  /* of the step; 0: the first or only one */
    /* which of the step's sampling rows is the first here; token_src names rows of the
     * whole step before */
    int32_t first_sample;

    /* Memory operations, before the forward pass. */
    const struct block_copy *swap_out; /* device -> host */
    const struct block_copy *swap_in;  /* host -> device */
    const struct block_copy *copy; /* device -> device, copy-on-write; no dst is another's src */
    const struct table_update *table_update;
    const int32_t *table_block;
    int32_t n_swap_out, n_swap_in, n_copy, n_table_update, n_table_block;

    /* Tokens, sequence after sequence. Decodes (one token) come first, then the longer
     * pieces. */
    int32_t n_tokens;
    const int32_t *token; /* [n_tokens] id; not read where token_src >= 0 */
    /* [n_tokens] sampling row of the step launched before whose token this is; -1:
     * `token`. Below 0 (none could be drawn) it is read as 0, and its results are
     * thrown away */
    const int32_t *token_src;
    const int32_t *position; /* [n_tokens] in the sequence, from 0 */
    const int32_t *
        /* [n_tokens] block id * block_size + offset, where the token's key and value
         * go; -1: nowhere */
        slot;

    int32_t n_seqs;
    int32_t n_decode;       /* the first n_decode sequences have exactly one token */
    const int32_t *q_start; /* [n_seqs + 1] first token of each sequence */
    /* [n_seqs] tokens in the cache once this step's are written; >= its query tokens */
    const int32_t *kv_len;
    const int32_t *row; /* [n_seqs] block-table row */
    /* [n_seqs] leading blocks shared with the sequence before (0 for the first) */
    const int32_t *lcp_blocks;

    /* Rows of the output head. */
    int32_t n_logits;
    const int32_t *logits_token; /* [n_logits] token index, ascending */
    int32_t n_samples;
    const struct sample_row *sample; /* [n_samples], ascending by logits_row */
    const struct token_bias *token_bias;
    const uint32_t *mask_word;
    int32_t n_token_bias, n_mask_word;
};

/* results.token where there is none. */
enum {
    /* the model's logits hold a NaN or +infinity, or nothing above -infinity */
    TOKEN_NO_NUMBER = -1,
    /* They are sound, but what the sampling row asks for leaves nothing above
     * -infinity, or overflows. */
    TOKEN_NONE_ALLOWED = -2,
};

/* What a step answers; arrays belong to the executor and hold until its next wait. */
struct results {
    uint64_t step;
    int32_t n_samples;
    int32_t top_stride;   /* columns of top_token and top_logprob */
    const int32_t *token; /* [n_samples] below 0: TOKEN_NO_NUMBER, TOKEN_NONE_ALLOWED */
    const float *logprob; /* [n_samples] of the token (SAMPLE_SCORE: of target) */
    /* [n_samples, top_stride] best first; rows that asked for none are unset */
    const int32_t *top_token;
    const float *top_logprob; /* [n_samples, top_stride] */
    int64_t device_us;        /* time the device worked on it; 0: unknown */
};

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
    X(token_bias, n_token_bias)     \
    X(mask_word, n_mask_word)

#endif
