/* What one step computes: flat, read-only arrays, made by engine/sched/decode/pack.c
 * and consumed by a backend.
 *
 * A batch is the only thing that crosses the executor seam, so it can be sent to
 * another process as it is. Steps take effect in order: blocks, table rows and the
 * sampled tokens of the step before are as the step launched before left them, although
 * the host may launch step N+1 before it has read the results of step N. Inside a step
 * the order is
 *     swap_out, swap_in, copy, table updates, forward, sampling.
 *
 * Layers of one kind of attention form a KV group (kernels/backend.h), which has block
 * tables of its own; all groups take their blocks from one pool. Entries of a group
 * with a window that lie wholly behind it are not kept up to date, and no layer of the
 * group may depend on what they name. Group 0 has every token of a sequence.
 *
 * The backend keeps the block tables, in each group one row per persistent batch slot;
 * a step carries the changes alone. Beside each block's keys and values it keeps the
 * ids of the block's tokens, from which penalties are counted: a step notes the id of
 * each of its tokens at the token's slot in group 0, and block copies and swaps take
 * ids along.
 *
 * With pipeline parallelism a step reaches the backend as micro-batches
 * (engine/workers/microbatch.c): consecutive ranges of its tokens, the first with all
 * memory operations. Each is a batch like any other, with the same `step`.
 */
#ifndef QUIRE_KERNELS_BATCH_H
#define QUIRE_KERNELS_BATCH_H

#include "config/base/base.h"

/* Copy block `src` to block `dst`, all layers. Device block ids for `copy`; for a swap
 * one side is a host block. */
struct block_copy {
    int32_t src; /* block id */
    int32_t dst; /* block id; its contents are overwritten */
};

/* Entries [index, index + count) of table row `row` of a KV group become
 * table_block[first .. first + count). */
struct table_update {
    int32_t group; /* KV group, below backend_config.n_kv_groups */
    int32_t row;   /* of the group's block tables, below backend_config.max_seqs */
    int32_t index; /* first entry of the row to be set */
    int32_t count; /* entries */
    int32_t first; /* where their block ids begin in batch.table_block */
};

/* One entry of a sampling row's bias list (logit_bias, bad_words, min_tokens). */
struct token_bias {
    int32_t token; /* id; a row names it at most once */
    float bias;    /* added to its logit; -INFINITY bans the token */
};

enum sample_kind {
    SAMPLE_TOKEN, /* one token by the parameters below */
    /* the n_candidates best (token, log-probability) of the processed logits, for
     * beams */
    SAMPLE_CANDIDATES,
    SAMPLE_SCORE, /* the log-probability of `target`, for prompt logprobs */
};

/* One sampling row: how one token is chosen, or candidates are ranked, from a row of
 * logits. Several rows may read one logits row (samples of one prompt).
 *
 * Order of operations on a copy of the logits: repetition, frequency and presence
 * penalties; bias; mask; then temperature 0 takes the greatest logit (the smallest id
 * on a tie); else divide by temperature, top-k, top-p, min-p, and Gumbel-max over the
 * survivors. The noise of token t is a function of (seed, position, t) alone
 * (kernels/noise.h); kernels/cpu/sample.c is the specification. Reported
 * log-probabilities are those of the unprocessed logits, except for SAMPLE_CANDIDATES,
 * which reports the processed ones (as beam search in transformers does).
 */
struct sample_row {
    int32_t logits_row;       /* index into logits_token */
    int32_t kind;             /* enum sample_kind */
    float temperature;        /* 0: greedy */
    float top_p;              /* (0, 1]; 1: off */
    float min_p;              /* [0, 1]; 0: off */
    int32_t top_k;            /* 0: off */
    float presence_penalty;   /* subtracted once from tokens of the output; 0: off */
    float frequency_penalty;  /* subtracted per occurrence in the output; 0: off */
    float repetition_penalty; /* 1: off */
    /* best tokens reported beside the chosen token's log-probability,
     * 0..LIMIT_LOGPROBS; -1: no log-probabilities wanted */
    int32_t n_logprobs;
    int32_t n_candidates; /* SAMPLE_CANDIDATES: 1..LIMIT_CANDIDATES */
    int32_t target;       /* SAMPLE_SCORE: id of the token to be scored */
    uint64_t seed;        /* of the sequence */
    /* in the sequence, of the token to be sampled: the number of tokens before it in
     * the sequence's blocks */
    int32_t position;
    /* block-table row of the sequence, through which penalties find its tokens in group
     * 0 */
    int32_t row;
    /* the sequence's first tokens; they count for the repetition penalty alone */
    int32_t n_prompt;
    int32_t bias_first, n_bias; /* range of batch.token_bias */
    /* first word of the row's mask in batch.mask_word, one bit per id: id t is bit t %
     * 32 of word t / 32, and 0 bans it; -1: no mask */
    int32_t mask_first;
    /* number of the row's late mask, from 1, which bans tokens beside the other one; 0:
     * none */
    int32_t late_mask;
};

/* A mask that arrives after its step was launched, because the tokens that it follows
 * from were not known before. */
struct late_mask {
    /* [mask_words] bits as of batch.mask_word, read during the call only; NULL: every
     * id is allowed */
    const uint32_t *word;
};

/* In batch.token_src: `token` is a place-holder. */
enum { TOKEN_MASKED = -2 };

/* Words of a mask over `vocab` ids. */
static inline int32_t mask_words(int32_t vocab)
{
    return (int32_t)div_ceil(vocab, 32);
}

/* Whether penalties change the row's logits. */
static inline bool sample_penalised(const struct sample_row *s)
{
    return s->repetition_penalty != 1.0f
               ? s->position > 0
               : (s->frequency_penalty != 0 || s->presence_penalty != 0) &&
                     s->position > s->n_prompt;
}

struct batch {
    uint64_t step;      /* 1, 2, ... */
    int32_t microbatch; /* index of the micro-batch in the step; 0: the first or only one */
    /* index of sample[0] among the sampling rows of the whole step, which token_src of
     * the next step refers to */
    int32_t first_sample;

    /* Memory operations, done before the forward pass in this order. */
    const struct block_copy *swap_out; /* [n_swap_out] device -> host */
    const struct block_copy *swap_in;  /* [n_swap_in] host -> device */
    /* [n_copy] device -> device, copy-on-write; no dst is another's src */
    const struct block_copy *copy;
    const struct table_update *table_update; /* [n_table_update] */
    const int32_t *table_block;              /* [n_table_block] block ids for table_update */
    int32_t n_swap_out, n_swap_in, n_copy, n_table_update, n_table_block; /* lengths */

    /* Tokens, sequence after sequence: decodes (one token) first, then sequences that
     * verify drafts (engine/sched/draft.h: their last tokens, each sampled from), then
     * prefill chunks. */
    int32_t n_tokens;     /* of all sequences */
    const int32_t *token; /* [n_tokens] id; not read where token_src >= 0 */
    /* [n_tokens] sampling row of the step launched before, whose sampled token is this
     * token's id; -1: `token` has it. A row that could not be sampled reads as id 0,
     * and results that depend on it are discarded. TOKEN_MASKED: `token` stands for one
     * that is not known yet, nor is its hidden state (draft heads). NULL: -1 for
     * all */
    const int32_t *token_src;
    const int32_t *position; /* [n_tokens] in the sequence, from 0 */
    /* [n_tokens] block id * block_size + offset, where the token's key and value go in
     * KV group 0; -1: nowhere */
    const int32_t *slot;
    /* [n_tokens, n_kv_groups - 1] the same in groups 1, 2, ... */
    const int32_t *group_slot;
    int32_t n_group_slots; /* its elements; 0 with one group */

    int32_t n_seqs;         /* sequences with tokens in this batch */
    int32_t n_decode;       /* the first n_decode sequences have exactly one token */
    const int32_t *q_start; /* [n_seqs + 1] first token of each sequence; [n_seqs] is n_tokens */
    /* [n_seqs] tokens in the cache once this step's are written; >= its query tokens */
    const int32_t *kv_len;
    const int32_t *row; /* [n_seqs] block-table row, the same in each group */
    /* [n_seqs] leading blocks shared with the sequence before, in every group without a
     * window (0 for the first) */
    const int32_t *lcp_blocks;

    /* Rows of the output head. */
    int32_t n_logits;                    /* tokens whose logits are computed */
    const int32_t *logits_token;         /* [n_logits] token index, ascending */
    int32_t n_samples;                   /* sampling rows */
    const struct sample_row *sample;     /* [n_samples], ascending by logits_row */
    const struct token_bias *token_bias; /* [n_token_bias] of all rows, by bias_first */
    const uint32_t *mask_word;           /* [n_mask_word] of all rows, by mask_first */
    int32_t n_token_bias, n_mask_word;   /* lengths */
    /* late masks, at most one a sequence: sampling waits until all have arrived */
    int32_t n_late_mask;
};

/* results.token where no token could be sampled. */
enum {
    /* the model's logits hold a NaN or +infinity, or nothing above -infinity */
    TOKEN_NO_NUMBER = -1,
    /* the logits are valid, but the row's penalties, bias and mask leave nothing above
     * -infinity, or overflow */
    TOKEN_NONE_ALLOWED = -2,
};

/* How a step's layers of experts were loaded, those of this pipeline stage together. */
struct expert_load {
    int64_t rows; /* rows of all experts; a row counts for each of its experts */
    /* rows of a layer's most loaded expert, times its experts: `rows` if all were
     * loaded alike */
    int64_t peak;
};

/* Results of a step. The arrays belong to the executor and hold until its next wait. */
struct results {
    uint64_t step;        /* of the batch */
    int32_t n_samples;    /* of the batch */
    int32_t top_stride;   /* columns of top_token and top_logprob */
    const int32_t *token; /* [n_samples] id; below 0: TOKEN_NO_NUMBER, TOKEN_NONE_ALLOWED */
    const float *logprob; /* [n_samples] of the token (SAMPLE_SCORE: of target) */
    /* [n_samples, top_stride] best first, then -1; rows that asked for none are
     * unset */
    const int32_t *top_token;
    const float *top_logprob;   /* [n_samples, top_stride] */
    int64_t device_us;          /* time the device worked on it; 0: unknown */
    struct expert_load experts; /* zeros: none, or the device does not count */
};

/* Every array of struct batch with the number of its elements, for code that copies or
 * sends whole batches. */
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
    X(group_slot, n_group_slots)    \
    X(q_start, n_seqs + 1)          \
    X(kv_len, n_seqs)               \
    X(row, n_seqs)                  \
    X(lcp_blocks, n_seqs)           \
    X(logits_token, n_logits)       \
    X(sample, n_samples)            \
    X(token_bias, n_token_bias)     \
    X(mask_word, n_mask_word)

#endif
