/* Sequences and sequence groups: what the scheduler schedules.
 *
 * A request is a group: one prompt, `width` sequences (best_of samples, or beams). A
 * group is scheduled, preempted, swapped and resumed whole. Until its first admission
 * it has only the request's parameters and one sequence; several sequences, their block
 * tables and the state of a beam search are made when it starts, in memory of the
 * scheduler's regions, which it gives back when it is freed (sched_start.c). A group's
 * states and the function behind each arrow:
 *
 *           sched_add         sched_admit            decode_commit: the last one ended
 *     NEW ─────────────► WAITING ────────► RUNNING ───────────────────────► ENDED ──► freed
 *                           ▲               │ ▲ ▲ decode_reap
 *                           └───────────────┤   │ sched_resume                │
 *                        preempt_recompute  ▼   │                             │
 *                        preempt_swap     SWAPPED                             │
 *     any state but NEW: sched_end (cancelled, timed out, failed) ────────────┘
 *
 * Decoding algorithms use three verbs on sequences: fork (a new sequence over the same
 * blocks), append (one token), free. A sequence is UNBORN until forked (seq 0: until
 * sched_add), then LIVE, then DONE.
 *
 * Look-ahead: step N+1 is planned while step N runs, so counters exist twice, as
 * planned and as committed.
 *     n_tokens    prompt + tokens sampled in steps planned so far; the last ones may be
 *                 placeholders
 *     n_out       sampled tokens that are known (committed):
 *                 n_tokens - n_prompt - n_out are in flight
 *     n_computed  tokens whose keys and values are written once all planned steps have
 *                 run; n_computed <= n_tokens
 *     n_stored    tokens whose keys and values were written by committed steps
 * While a step verifies drafts (draft.h), n_tokens and n_computed count them all; its
 * commit takes off those that did not hold. What these left behind n_computed in the
 * cache is overwritten before it is read; the states behind each draft go to a block of
 * their own, of which the commit keeps that of the last one that held.
 * Steps take effect in the order launched (kernels/batch.h), so blocks and slots of a
 * sequence that ended or was preempted can be reused at once: a step in flight writes
 * there before any later step.
 */
#ifndef QUIRE_ENGINE_SCHED_SEQ_H
#define QUIRE_ENGINE_SCHED_SEQ_H

#include "config/base/limits.h"
#include "engine/request.h"
#include "engine/sched/kv/contiguous_alloc.h"
#include "engine/sched/kv/prefix.h"
#include "kernels/batch.h"

enum group_state { GROUP_NEW, GROUP_WAITING, GROUP_RUNNING, GROUP_SWAPPED, GROUP_ENDED };
enum seq_state { SEQ_UNBORN, SEQ_LIVE, SEQ_DONE };
enum constraint_end {
    CONSTRAINT_GOES_ON,
    CONSTRAINT_SENTENCE, /* its grammar admits nothing behind its tokens */
    CONSTRAINT_REFUSED,  /* a token was sampled that the grammar does not allow */
    CONSTRAINT_COSTLY,   /* the next mask needs too much work or memory */
};

struct sched_config;
struct beam;
struct constraint_node;

/* The blocks of a sequence in one KV group. In a group with a sliding window, entries
 * below `first` lie wholly behind it: their blocks were given back. Group 0 has no
 * window, so it has a block for every token; penalties and hashes read tokens there. */
struct block_table {
    /* [max_blocks] device blocks, or host blocks while the group is SWAPPED; -1: none,
     * as below `first` and where a sibling waits for group->root. NULL like `out`. */
    int32_t *block;
    int32_t n_blocks; /* entries */
    int32_t first;    /* first entry that may hold a block; 0 without a window */
    int32_t n_synced; /* leading entries that the backend's table is known to hold */
};

/* What every decode step reads or writes stands first, in three cache lines. */
struct seq {
    struct group *group; /* that it belongs to */
    /* [max_tokens] generated ids, behind them the drafts of a step in flight; NULL: the
     * group has not started */
    int32_t *out;
    int32_t n_tokens, n_computed, n_stored, n_out; /* see above */
    int32_t state;                                 /* enum seq_state */
    int32_t index;                                 /* choice: 0 .. width-1 */
    int32_t slot; /* persistent batch slot: row of its block tables on the backend; -1: none */
    /* enum constraint_end: why the next commit ends it, whatever was sampled */
    int32_t constraint_end;
    uint64_t sample_step; /* step that samples its last token */
    int32_t sample_row;   /* and the sampling row there */
    /* Of a step in flight that verifies drafts: sampling rows that count */
    int32_t verify_rows;
    uint64_t void_step; /* what steps up to this one sample for it does not count */
    /* The state of its grammar (decode/constrained.h), in which it holds a share; NULL:
     * it has none, or is not LIVE. */
    struct constraint_node *constraint;
    struct prefix_chain chain;                 /* blocks published or found so far */
    struct block_table table[LIMIT_KV_GROUPS]; /* [n_kv_groups] */

    uint64_t seed;      /* of its samples */
    double cum_logprob; /* beams: sum over the generated tokens */
    int32_t finish;     /* enum finish_reason once DONE */

    struct reservation reservation; /* RUNNING, kv_policy other than paged */

    int32_t draft_state; /* the draft source's own; 0 at first */
    /* In KV groups of states, of a step in flight that verifies drafts: a block for the
     * states behind each, [groups of states, n_spare], in the order of the groups.
     * NULL: no such groups */
    int32_t *spare;
    int32_t n_spare; /* drafts; 0: the sequence holds no such blocks */
};

/* Token sequences that must not be generated (bad_words), encoded by the caller: word i
 * is token[first[i] .. first[i + 1]). */
struct word_list {
    int32_t *token; /* [first[n]] */
    int32_t *first; /* [n + 1] */
    int32_t n;      /* words */
};
void word_list_release(struct word_list *w);

/* What every decode step reads or writes stands first, in two cache lines. */
struct group {
    struct request *request; /* borrowed; outlives the group */
    struct seq *seq;         /* [n_seqs] in `memory`; &first until it has started, or of width 1 */
    struct beam *beam;       /* in `memory`; NULL: sampling, or not started */
    /* RUNNING, SWAPPED, ENDED: links of the queue that its state names. WAITING: of a
     * leftist heap, the right child and the parent. */
    struct group *next, *prev;
    int32_t state;                /* enum group_state */
    int32_t width;                /* sequences it may hold */
    int32_t n_prompt, max_tokens; /* of a sequence: prompt tokens, generated tokens at most */
    bool lookahead;               /* may be planned before its last step is committed */
    bool beams;                   /* a beam search */
    bool parked;       /* request->parked was PARK_RUNNING when the step's planning began */
    bool scores;       /* prompt log-probabilities are wanted */
    bool started;      /* was admitted once */
    bool joined;       /* the siblings have taken over root's blocks inside the windows */
    bool scored_first; /* the first prompt token was reported; it has no score */
    uint64_t plan_step, commit_step; /* the last step that named it, planned and committed */
    int32_t n_inflight;              /* steps planned with it and not committed */
    int32_t n_live;                  /* sequences that are LIVE */
    int32_t cached_tokens; /* prompt tokens found in the prefix cache at first admission */
    int32_t mask;          /* RUNNING with allowed ids: index of its mask in the packer; else -1 */
    /* For the histograms; 0: not yet. */
    int64_t first_token_us, last_token_us, admitted_us;

    uint64_t order;   /* arrival number, from sched_add: smaller is older */
    struct seq first; /* at the beginning of a line */

    int32_t priority;         /* 0 unless the policy is priority */
    int32_t tenant;           /* 0 unless the policy is fair */
    int32_t max_blocks;       /* of one sequence */
    int32_t n_reserved;       /* RUNNING: slots reserved for it, taken or not */
    uint64_t ahead_step;      /* policy: fair, the last step that computed its prefill first */
    int32_t probe_available;  /* blocks that were available when it last did not fit */
    uint64_t probe_step;      /* the step after that; 0: it has not been probed since it waits */
    int32_t root;             /* after a recompute: the sequence that computes the shared prompt */
    int32_t n_shared;         /* tokens of `root` that its siblings wait for; 0: none */
    int32_t n_scores_planned; /* prompt positions scored, in steps planned so far */
    int32_t n_preempted;      /* times it was preempted */
    int32_t n_drafted, n_accepted; /* drafts that were verified, and of these those that held */
    int64_t n_chosen;              /* beams: tokens chosen for live beams and hypotheses */
    int32_t resume_need;           /* SWAPPED: blocks needed to resume it; -1: not counted yet */
    struct word_list words;        /* the caller's of group_new */
    /* Beam search with stop strings: the detokenizer behind the prompt; else NULL.
     * Owned. */
    struct detokenizer *text_start;

    int64_t n_bytes; /* of `memory`: everything that it may come to need */
    void *memory;    /* from the scheduler's regions; NULL: it has not started */
    int32_t n_seqs;  /* width, or 1 until it has started */

    int32_t finish;    /* how the group's open choices end: enum finish_reason, set by sched_end */
    const char *error; /* static sentence for the client, or NULL */

    int32_t wait_index;  /* WAITING: index in sched->waiting, started groups first */
    int32_t heap_rank;   /* WAITING: steps down to the nearest missing child */
    int64_t wait_tokens; /* WAITING: its part of sched->waiting_tokens */
    struct group *child; /* WAITING: the left child in the heap */
};

/* Make a group that has not started, on the submitting thread. ERR_INVALID, with the
 * numbers, for a request that could not run even alone. The request and `words` (NULL:
 * none) must outlive the group. */
int group_new(struct group **ret, struct request *r, const struct word_list *words,
              const struct sched_config *c, struct err *e);
/* Free a group without `memory`: one that has not started, or has given it back. */
void group_free(struct group *g);
/* Part of group_new: ERR_INVALID, naming the field, if every token is banned as the
 * first one. */
int group_check_allowed(const struct request *r, const struct word_list *words,
                        const struct sched_config *c, struct err *e);

/* Lay out the memory of a started group; returns its bytes. With `base` (else NULL) the
 * group's arrays are placed there, their elements not set. */
int64_t group_lay_out(struct group *g, const struct sched_config *c, char *base);

/* Token at `position`, which must be known (prompt or committed). */
static inline int32_t seq_token(const struct seq *s, int32_t position)
{
    const struct group *g = s->group;

    return position < g->n_prompt ? g->request->prompt[position] : s->out[position - g->n_prompt];
}

/* The sampling row of the token at `position`, which logits row `logits_row` is for, by
 * the request's parameters: without log-probabilities, biases and masks. */
void seq_sample_row(struct sample_row *ret, const struct seq *s, int32_t position,
                    int32_t logits_row);

/* Seed of sample `index` of a request: a bijective mix, so that samples of one request
 * have different seeds. */
uint64_t seq_seed(uint64_t request_seed, int32_t index);

#endif
