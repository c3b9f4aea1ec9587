/* The packer's arrays: between pack.c, which fills them, and setup.c, which sizes
 * them. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_PACK_IMPL_H
#define QUIRE_ENGINE_SCHED_DECODE_PACK_IMPL_H

#include "engine/sched/decode/pack.h"

/* table updates a sequence and step, at most; the last one covers the rest */
enum { PACK_RUNS = 4 };

struct packer {
    struct sched_config c;
    int32_t table_width; /* blocks of the longest sequence */
    int32_t *shadow;     /* [max_num_seqs, table_width] what the backend's rows hold */

    struct table_update *table_update;            /* [PACK_RUNS * max_num_seqs] */
    int32_t *table_block;                         /* [max_num_seqs * table_width] */
    int32_t *token, *token_src, *position, *slot; /* [max_num_batched_tokens] */
    int32_t *q_start, *kv_len, *row, *lcp_blocks; /* [max_num_seqs + 1] */
    int32_t *logits_token;                        /* [max_logits] */
    struct sample_row *sample;                    /* [max_logits] */
    struct token_bias *token_bias;                /* [bias_cap] LIMIT_ROW_BIASES a sequence */
    int64_t bias_cap;
    /* [vocab] where in token_bias an id was written last, whatever stands there now */
    int32_t *bias_at;
    uint32_t *mask_word; /* [max_num_seqs * mask_words] the step's */
    int32_t mask_words;  /* of one mask */

    /* Masks of the running groups, made when first packed, by group->mask. */
    uint32_t *mask;       /* [max_num_seqs][mask_words] */
    uint64_t *mask_order; /* [max_num_seqs] the group's order + 1; 0: of none */

    /* The bias slice and the mask last written: rows of one group share them. */
    const struct group *slice_group;
    int32_t bias_first, n_bias, mask_first;
};

#endif
