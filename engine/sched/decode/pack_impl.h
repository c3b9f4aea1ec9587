/* The packer's arrays, which setup.c allocates and pack.c fills. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_PACK_IMPL_H
#define QUIRE_ENGINE_SCHED_DECODE_PACK_IMPL_H

#include "engine/sched/decode/pack.h"

/* Table updates of a sequence in a step and a KV group, at most; the last one covers
 * all that follow. */
enum { PACK_RUNS = 4 };

/* What is kept of the sequence in a slot from step to step, beside its kept_row. */
struct packed_slot {
    uint64_t kept; /* number of its kept_row, from 1 */
    /* position from which on its sampling rows have neither biases nor a mask that is
     * sent with the step */
    int32_t bare_from;
    /* When it was an item last: in which step, the slot of the sequence in front of it,
     * -1: none, the blocks in common with that one, tokens up to its last one, and
     * where that went in KV group 0. */
    int32_t before, n_common, kv_len, token_slot;
    uint64_t step;
};

struct packer {
    struct sched_config c; /* the scheduler's */
    int32_t table_width;   /* blocks of the longest sequence */
    /* [n_kv_groups, max_num_seqs, table_width] by slot, the backend's block tables */
    int32_t *shadow;
    struct packed_slot *packed; /* [max_num_seqs] by slot */
    /* [max_num_seqs] by slot, what the sampling rows of a sequence have in common:
     * without biases and masks, for no position */
    struct sample_row *kept_row;
    uint64_t n_kept; /* kept rows made so far */

    /* Arrays of struct batch. */

    struct table_update *table_update;            /* [PACK_RUNS * n_kv_groups * max_num_seqs] */
    int32_t *table_block;                         /* [n_kv_groups * max_num_seqs * table_width] */
    int32_t *token, *token_src, *position, *slot; /* [max_num_batched_tokens] */
    int32_t *group_slot;                          /* [max_num_batched_tokens, n_kv_groups - 1] */
    int32_t *q_start, *kv_len, *row, *lcp_blocks; /* [max_num_seqs + 1] */
    int32_t *logits_token;                        /* [max_logits] */
    struct sample_row *sample;                    /* [max_logits] */
    /* [max_logits] number of the kept_row that sample[i] is, but for logits_row,
     * position and late_mask; 0: of none */
    uint64_t *sample_kept;
    struct token_bias *token_bias; /* [bias_cap] */
    int64_t bias_cap;              /* max_num_seqs * LIMIT_ROW_BIASES */
    /* [vocab] index in token_bias where an id was written last, maybe in another
     * step */
    int32_t *bias_at;
    uint32_t *mask_word; /* [max_num_seqs * mask_words] */
    int32_t mask_words;  /* words of one mask */

    /* Masks of running groups by group->mask, made when first packed. */
    uint32_t *mask;       /* [max_num_seqs, mask_words] */
    uint64_t *mask_order; /* [max_num_seqs] its group's order + 1; 0: no mask was made */

    /* Of the item packed last: blocks that had not changed, and whether none had */
    int32_t before_synced;
    bool before_unchanged;

    /* The bias slice and mask written last, which rows of one group share. */
    const struct group *slice_group;
    bool slice_is_short;        /* for rows below min_tokens */
    int32_t bias_first, n_bias; /* in token_bias */
    int32_t mask_first;         /* in mask_word; -1: no mask */
};

#endif
