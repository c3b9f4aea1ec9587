/* Sequences and groups: what the scheduler moves about.
 *
 * A request is a group: one prompt, `width` sequences (best_of samples, or beams). A
 * group is scheduled, preempted, swapped and resumed whole. While it waits for its
 * first turn it holds what the request says and one sequence; its other sequences,
 * their tables and the state of a beam search are made when it starts, in memory of the
 * scheduler's that it gives back when it is freed (sched_start.c). A group's state and
 * the function behind each arrow:
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
 * admitted first), LIVE, then DONE.
 *
 * Look-ahead: step N+1 is planned while step N runs, so counters exist in two tenses.
 *     n_tokens    prompt + tokens drawn in steps planned so far; the last ones may be
 *                 placeholders
 *     n_out       drawn tokens that are known (committed):
 *                 n_tokens - n_prompt - n_out are in flight
 *     n_computed  keys and values written once all planned steps have run;
 *                 n_computed <= n_tokens
 *     n_stored    keys and values written by committed steps
 * Steps take effect in the order launched (kernels/batch.h), so blocks and table rows
 * of a sequence that ended or was preempted may be given away at once: whatever a step
 * in flight still writes there is written before.
 */
#ifndef QUIRE_ENGINE_SCHED_SEQ_H
#define QUIRE_ENGINE_SCHED_SEQ_H

#include "engine/request.h"
#include "engine/sched/kv/contiguous_alloc.h"
#include "engine/sched/kv/prefix.h"
#include "kernels/batch.h"

enum group_state { GROUP_NEW, GROUP_WAITING, GROUP_RUNNING, GROUP_SWAPPED, GROUP_ENDED };
enum seq_state { SEQ_UNBORN, SEQ_LIVE, SEQ_DONE };

struct sched_config;
struct beam;

struct seq {
    struct group *group;
    int32_t index;  /* choice: 0 .. width-1 */
    int32_t state;  /* enum seq_state */
    int32_t finish; /* enum finish_reason once DONE */

    int32_t n_tokens, n_computed, n_stored, n_out; /* see above */
    int32_t *out;  /* [max_tokens] generated ids; NULL: the group has not started */
    uint64_t seed; /* of this sample */

    /* [max_blocks] block table; device ids, host ids while the group is SWAPPED; NULL
     * as `out` */
    int32_t *block;
    int32_t n_blocks;
    /* kv_policy other than paged: what is set aside for it while its group runs */
    struct reservation room;
    int32_t row;               /* the backend's table row; -1: none */
    int32_t n_synced;          /* leading table entries that the backend's row is known to hold */
    struct prefix_chain chain; /* blocks published or found so far */

    uint64_t draw_step; /* step and sampling row of the last token drawn */
    int32_t draw_row;

    double cum_logprob; /* beams: of the generated tokens */
};

/* Token sequences that must not be generated, encoded by the caller: word i is
 * token[first[i] .. first[i + 1]). */
struct word_list {
    int32_t *token;
    int32_t *first; /* [n + 1] */
    int32_t n;
};
void word_list_release(struct word_list *w);

struct group {
    struct request *request; /* borrowed; outlives the group */
    int32_t state;           /* enum group_state */
    int32_t priority;        /* 0 unless the policy is priority */
    int32_t tenant;          /* 0 unless the policy is fair */
    uint64_t order;          /* arrival number, from sched_add: smaller is older */
    int32_t width;           /* sequences it may hold */
    int32_t n_live;
    int32_t n_prompt, max_tokens;
    int32_t max_blocks; /* of one sequence */
    bool lookahead;     /* may be planned before its last step is committed */
    bool beams;         /* a beam search */
    bool parked;        /* request->parked is PARK_RUNNING, as it was when this step was begun */
    bool scores;        /* prompt log-probabilities are wanted */
    bool started;       /* was admitted once */
    int32_t n_inflight; /* steps planned with it and not committed */
    uint64_t plan_step, commit_step; /* the last step that named it, planned and committed */
    uint64_t ahead_step;     /* the last step whose first work was its prefill (fair shares) */
    int32_t n_reserved;      /* RUNNING: rows set aside for it */
    int32_t probe_available; /* blocks that could be taken when it was last found not to fit */
    uint64_t probe_step;
    int32_t root;             /* sequence that computes what the others share, after a recompute */
    int32_t n_shared;         /* tokens that the others wait for; 0: nobody waits */
    int32_t n_scores_planned; /* prompt positions scored, in steps planned so far */
    bool scored_first;        /* the first prompt token was reported; it has no score */
    int32_t cached_tokens;    /* prompt tokens found in the prefix cache at first admission */
    int32_t n_preempted;      /* times it had to make room */
    int64_t n_chosen;         /* beams: tokens chosen for live beams and hypotheses */
    int32_t resume_need;      /* SWAPPED: blocks that it takes to come back; -1: not counted yet */
    int32_t mask; /* RUNNING with allowed ids: its place among the packer's masks; else -1 */
    struct word_list words; /* the caller's of group_new */
    /* owned; where the texts of beams with stop strings begin; NULL: no such search */
    struct detokenizer *text_start;

    int64_t n_bytes;   /* of `memory`, with everything that it may come to need */
    void *memory;      /* of the scheduler's regions; NULL: it has not started */
    struct beam *beam; /* in `memory`; NULL: sampling, or not started */
    struct seq *seq;   /* [n_seqs] in `memory`; &first until it has started */
    int32_t n_seqs;    /* width, or 1 */
    struct seq first;

    int32_t finish;    /* how the group's open choices end: enum finish_reason, set by sched_end */
    const char *error; /* static sentence for the client, or NULL */

    /* For the histograms; 0: not yet. */
    int64_t admitted_us, first_token_us, last_token_us;

    int32_t wait_index;  /* WAITING: place in sched->waiting; those who have started come first */
    int64_t wait_tokens; /* WAITING: its part of sched->waiting_tokens */
    /* RUNNING, SWAPPED, ENDED: the queue its state names. WAITING: its tenant's heap,
     * who stands above and the two behind it. */
    struct group *prev, *next, *child;
    int32_t heap_rank;
};

/* A group that has not started, allocated on the submitting thread. Refuses with
 * ERR_INVALID and the numbers what could never fit alone, and with ERR_UNSUPPORTED what
 * this build lacks. The request and `words` (NULL: none) must outlive the group. */
int group_new(struct group **ret, struct request *r, const struct word_list *words,
              const struct sched_config *c, struct err *e);
/* A group without `memory`: one that has not started, or has given it back. */
void group_free(struct group *g);
/* Part of it: ERR_INVALID, naming the field, where every token is banned from the
 * start. */
int group_check_allowed(const struct request *r, const struct word_list *words,
                        const struct sched_config *c, struct err *e);

/* The layout of what a started group holds: its bytes, and with `base` the arrays in
 * it, their elements not set. */
int64_t group_lay_out(struct group *g, const struct sched_config *c, char *base);

/* Token at `position`, which must be known (prompt or committed). */
static inline int32_t seq_token(const struct seq *s, int32_t position)
{
    const struct group *g = s->group;

    return position < g->n_prompt ? g->request->prompt[position] : s->out[position - g->n_prompt];
}

/* Seed of sample `index` of a request: a bijective mix, so samples of one request never
 * share one. */
uint64_t seq_seed(uint64_t request_seed, int32_t index);

#endif
