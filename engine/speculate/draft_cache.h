/* Which keys and values the cache of a draft model holds.
 *
 * The cache has as many blocks as the target's, of as many tokens and under the same
 * ids: a sequence's tokens lie in the blocks of its table of KV group 0. So forked
 * sequences share them, and what the prefix cache finds is there for both models.
 *
 * The draft model writes later than the target, and only where drafts are wanted, so
 * each block has a tag of what it holds: a chain hash of all tokens up to its end, set
 * when the draft model has written the whole block, and cleared when it begins to write
 * there. Nothing needs to be told when a block changes hands. A block that the target
 * has copied or swapped has no tag of its new contents: its tokens are computed anew. A
 * wrong guess would cost drafts that do not hold, and nothing else. */
#ifndef QUIRE_ENGINE_SPECULATE_DRAFT_CACHE_H
#define QUIRE_ENGINE_SPECULATE_DRAFT_CACHE_H

#include "engine/sched/seq.h"

/* What is known of the sequence in one slot. */
struct draft_seq {
    uint64_t key;        /* of the sequence; 0: none */
    int32_t n_preempted; /* of its group, when it was seen last */
    int32_t n_valid;     /* leading known tokens whose keys and values are there */
    float rate;          /* of its drafts, the part that held lately */
    int32_t n_seen;      /* drafts that it was learned from; 0: it is that of all */
    /* Drafts behind its first n_from tokens; the keys and values of all but the last
     * are there. */
    int32_t n_from, n_drafts;
    int32_t token[LIMIT_DRAFT];
};

struct draft_cache {
    int32_t block_size, table_width; /* tokens of a block; blocks of the longest sequence */
    int32_t max_num_seqs;
    int32_t shift;         /* as in struct draft_model_config */
    bool reads_drafts;     /* drafts but the last are read, as tokens are */
    uint64_t secret;       /* keys the tags */
    uint64_t *tag;         /* [n_blocks] of what a block holds; 0: unknown */
    uint64_t *writer;      /* [n_blocks] key of the sequence that wrote there last */
    uint64_t *busy;        /* [n_blocks] the step that last wrote there, or read its end */
    int32_t *shadow;       /* [max_num_seqs, table_width] the backend's block tables */
    int32_t *token;        /* [block_size] scratch */
    struct draft_seq *seq; /* [max_num_seqs] by slot */

    /* Table updates for the next step, as of struct batch. */
    struct table_update *update; /* [max_num_seqs] */
    int32_t *table_block;        /* [max_num_seqs * table_width] */
    int32_t n_updates, n_table_blocks;
};

/* Entries of a sequence that its known tokens make: one a token, less the shift. */
static inline int32_t draft_cache_known(const struct draft_cache *c, const struct seq *q)
{
    return q->group->n_prompt + q->n_out - c->shift;
}

/* Whether the hidden states of those entries are where the table has them: a block
 * that is copied, swapped in or new to the table is so only behind the step being
 * planned. */
static inline bool draft_cache_hidden(const struct draft_cache *c, const struct seq *q)
{
    return c->shift == 0 ||
           (int64_t)q->table[0].n_synced * c->block_size >= draft_cache_known(c, q);
}

int draft_cache_init(struct draft_cache *c, int32_t n_blocks, int32_t block_size, int32_t max_len,
                     int32_t max_num_seqs, uint64_t secret, struct err *e);
void draft_cache_release(struct draft_cache *c);

/* What is known of a sequence that has a slot; NULL: nothing. */
struct draft_seq *draft_cache_seq(struct draft_cache *c, const struct seq *q);
/* The same, brought up to date with its table and its tokens, which are all known; new
 * if there was none, with `rate`. n_valid leaves out its last token, behind which
 * logits are wanted. Notes what changed in its table for the next step. */
struct draft_seq *draft_cache_find(struct draft_cache *c, const struct seq *q, float rate);
/* There is no next step for what was noted: note it again later. */
void draft_cache_drop_updates(struct draft_cache *c);
/* Whether a sequence may write positions [first, end) in `step`: no other one does in
 * the same step, nor writes a head's entry before them, where sequences share it. If so
 * they are taken for it. */
bool draft_cache_take(struct draft_cache *c, const struct seq *q, int32_t first, int32_t end,
                      uint64_t step);
/* The keys and values of its known tokens before `end` are there. */
void draft_cache_written(struct draft_cache *c, const struct seq *q, int32_t end);

#endif
