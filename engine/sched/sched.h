/* The scheduler: groups and a budget go in, a plan comes out. Pure: no clock,
 * allocation, randomness, threads, I/O or logging after sched_new, so the code that
 * serves can be simulated; time is an argument.
 *
 * One rule, no phases: each sequence's gap n_tokens - n_computed is closed under the
 * step's token budget. sched_plan, in this order:
 *     1. end groups that were cancelled or waited too long
 *     2. decodes, oldest group first, never delayed by prefill; if a block is missing,
 *        the newest group is preempted
 *     3. resume swapped groups, oldest first (not in a step that preempted)
 *     4. prefill chunks of running groups, oldest first (prompt, recomputation; prefix
 *        hits shorten them)
 *     5. admit waiting groups, first come, first served, while blocks for their
 *        prompts, slots and the budget suffice
 * "Oldest" and "first come" are by arrival, within a priority if the policy is
 * priority. With policy: fair tenants are served in turn instead (sched_fair.c). A
 * group is planned or preempted whole, and never preempted in a step that has planned
 * it; blocks for a prompt are taken at admission, so only decodes can lack one.
 *
 * How the loop uses it (executor depth 1: N+1 is launched before N is waited for):
 *
 *     while ((g = next of inbox)) sched_add(s, g, now);
 *     n = sched_plan(s, now, plan);      // one of two plans: the other is in flight
 *     if (n > 0) { pack_batch(packer, plan, &batch); x->launch(x, &batch, &e); }
 *     if (a step is in flight and (n == 0 or two are)) {
 *         x->wait(x, &results, &e);
 *         decode_commit(s, oldest, &results, now, out);
 *     }
 *     decode_reap(s, out);               // DELTA_END, and the groups are freed
 *
 * An empty plan is not launched and has no step number. If nothing is in flight and no
 * group is left, the engine is idle; if groups are left, the next call of sched_plan
 * finds something to do (this one only preempted, or ended cancelled groups).
 *
 * Invariants (sched_check):
 *  S1  a group is in exactly the queue its state names, in order; with policy: fair,
 *      exactly the tenants with waiting groups are in the heap of tenants
 *  S2  every device block's count equals the number of tables of RUNNING groups that
 *      hold it (plus pins); the same for host blocks and SWAPPED groups; WAITING and
 *      ENDED groups hold none
 *  S3  a live sequence of a RUNNING group has n_computed <= n_tokens and, in every KV
 *      group, blocks for those of n_computed tokens that its next token sees; behind
 *      a window it has none when a step has been planned
 *  S4  slots are held by live sequences of RUNNING groups only, each once; reserved
 *      slots add up, by tenant too, and so do the reservations of a kv_policy other
 *      than paged, which only RUNNING groups have
 *  S5  planned tokens <= budget, sequences <= max_num_seqs, logits rows <= max_logits
 *  S6  every block that a planned item writes has count 1, except blocks that siblings
 *      hold and do not read before a later step: the prompt that a recompute's root
 *      computes for its siblings, the last block of a prompt forked in this step
 *  S7  n_inflight counts the uncommitted plans that name the group
 *  S8  RUNNING and SWAPPED groups have their memory, and so have WAITING groups that
 *      have started; ENDED ones may have it; nothing else was taken from the regions
 *  S9  resume_need of a SWAPPED group, once counted, is what it needs to resume
 *  S10 n_held of a constraint_node counts the sequences that hold it, which are LIVE,
 *      of one group that has not ended, and have generated what the node has read
 */
#ifndef QUIRE_ENGINE_SCHED_SCHED_H
#define QUIRE_ENGINE_SCHED_SCHED_H

#include "config/base/limits.h"
#include "config/base/policies.h"
#include "engine/kv_snapshot.h"
#include "engine/sched/draft.h"
#include "engine/sched/kv/kv_window.h"
#include "engine/sched/seq.h"

/* The cost model of a step, measured at start: its time is estimated as fixed_us +
 * tokens * token_us + context tokens read * context_us. */
enum { STEP_FEW_ROWS = 8 };
struct step_cost {
    double fixed_us, token_us, context_us;
    double swap_block_us; /* one block between host and device, one way */
    /* a further token that is sampled from, as drafts are: up to STEP_FEW_ROWS in the
     * step, and beyond */
    double row_us, many_row_us;
};

struct tokenizer;
struct sched_config {
    /* ---- what the executor holds ---- */
    int32_t n_blocks, n_host_blocks; /* KV blocks on the device, and on the host for swapping */
    int32_t block_size;              /* tokens of a block */
    /* KV groups, which share the pool; 0: one. The first has no window. */
    int32_t n_kv_groups;
    /* [n_kv_groups] tokens that a token sees; 0: all; KV_WINDOW_STATE: the group holds
     * recurrent states */
    int32_t kv_window[LIMIT_KV_GROUPS];
    bool kv_chunked; /* the windows are chunks (kv_window.h) */
    /* With groups of states: those behind each multiple of so many tokens are found by
     * the prefix cache. A multiple of block_size. */
    int32_t snapshot_distance;
    /* A window is taken to begin at a multiple of this many tokens; 0: anywhere. */
    int32_t kv_window_align;
    int32_t n_pinned; /* blocks that sched_pin holds: no group can have them */
    int32_t vocab;    /* token ids are 0 .. vocab - 1 */
    int32_t max_len;  /* prompt and generated tokens of a sequence */

    /* ---- settings ---- */
    int32_t max_num_seqs;           /* slots: sequences of running groups */
    int32_t max_num_batched_tokens; /* of a step; >= max_num_seqs, so that decodes always fit */
    /* Logits rows, and sampling rows, of a step; > max_num_seqs: the rest is for prompt
     * log-probabilities. */
    int32_t max_logits;
    int32_t max_waiting; /* groups that have not started; sched_add: ERR_FULL beyond */
    int32_t max_started; /* groups that have started and not ended; 0: twice max_num_seqs */
    /* Address space for the memory of started groups; 0: sched_new reserves the most
     * that they can need, and sched_config tells how much. */
    int64_t group_bytes;
    int preemption; /* enum preemption */
    /* enum kv_policy; other than paged, reservations limit admission
     * (contiguous_alloc.h), and prefix_cache is off. */
    int kv_policy;
    int policy;            /* enum policy */
    bool prefix_cache;     /* full blocks are found again by their contents */
    int64_t target_itl_us; /* inter-token latency that prefill keeps to; 0: none */
    int64_t shared_itl_us; /* policy: fair, time of a step while tenants share; 0: none */
    /* Large steps are best a multiple of this many tokens; 0: any size. */
    int32_t step_quantum;
    int64_t queue_timeout_us;   /* from arrival to first admission; 0: none */
    int64_t request_timeout_us; /* from arrival to end; 0: none */
    struct step_cost cost;      /* all 0: unknown */
    /* Bits of a block's hash that count in the prefix cache; 0: all 128. Tests use few,
     * so that hashes collide. */
    int32_t hash_bits;
    uint64_t secret; /* keys the hashes of the prefix cache */
    /* Of stop strings inside beam searches; NULL: only the output side handles them. */
    const struct tokenizer *tokenizer;
    int32_t eos[LIMIT_EOS_IDS]; /* end-of-sequence ids */
    int32_t n_eos;              /* of `eos` */
};

/* One sequence's part of a step: `n` tokens from position `first`. The sampling rows of
 * an item are its n_scores SAMPLE_SCORE rows, then n_sampled rows that sample the next
 * token. With drafts (draft.h) the last n_verify of the n tokens are those, and
 * n_sampled is 1: the item then has n_verify more rows, which sample behind each of its
 * last n_verify + 1 tokens. */
struct plan_item {
    struct seq *seq;
    int32_t first, n; /* positions first .. first + n - 1 are computed */
    int32_t n_verify; /* drafts; they stand in seq->out behind the known tokens */
    /* Prompt log-probabilities: score row i reads the logits of position first +
     * score_offset + i. */
    int32_t score_offset, n_scores;
    /* Rows that sample from the last token's logits: 1 for the sequence itself, or at
     * the end of a prompt one for each of the group's seq[0 .. n_sampled). */
    int32_t n_sampled;
    int32_t sample_first; /* index in the step of its first sampling row */
    /* Sampling row of the previous step that samples its last token; -1: the token is
     * known. */
    int32_t src_row;
    bool last_prompt; /* the prompt is complete with this item */
};

/* What one step does. Belongs to the caller; filled by sched_plan, read by pack_batch
 * and decode_commit. */
struct plan {
    uint64_t step;                         /* 1, 2, ...; 0: empty */
    double estimate_us;                    /* its time by the cost model; 0: costs are unknown */
    bool ahead;                            /* it was planned while another one runs */
    struct plan_item *item;                /* [max_num_seqs] items of one token first */
    int32_t n_items;                       /* in all */
    int32_t n_decode;                      /* leading items of one token */
    int32_t n_verify;                      /* drafts of all items */
    int32_t n_tokens, n_logits, n_samples; /* tokens, logits rows and sampling rows of all items */
    struct block_copy *copy;               /* [max_num_seqs * n_kv_groups] copy-on-write */
    struct block_copy *swap_out, *swap_in; /* [n_host_blocks] */
    int32_t n_copy, n_swap_out, n_swap_in; /* of the three arrays above */
};
int plan_init(struct plan *p, const struct sched_config *c, struct err *e);
void plan_release(struct plan *p);

static inline int32_t sched_kv_groups(const struct sched_config *c)
{
    return MAX(c->n_kv_groups, 1);
}

static inline struct kv_window sched_kv_window(const struct sched_config *c, int32_t k)
{
    return kv_window_of(c->kv_window[k], c->kv_chunked, MAX(c->kv_window_align, 1), c->block_size);
}

static inline bool sched_has_states(const struct sched_config *c)
{
    return c->snapshot_distance > 0;
}

static inline bool sched_is_state(const struct sched_config *c, int32_t k)
{
    return c->kv_window[k] == KV_WINDOW_STATE;
}

/* KV groups of states; those before group k. */
static inline int32_t sched_states_before(const struct sched_config *c, int32_t k)
{
    int32_t n = 0;

    for (int32_t i = 0; i < k; i++) {
        n += sched_is_state(c, i);
    }
    return n;
}

/* Blocks that a sequence needs in KV group k at a time. */
static inline int32_t sched_window_blocks(const struct sched_config *c, int32_t k)
{
    int32_t step = c->max_num_batched_tokens;

    if (c->kv_window[k] == KV_WINDOW_STATE) {
        step = MIN(step, c->snapshot_distance);
    }
    return window_blocks(sched_kv_window(c, k), step);
}

/* Blocks that it may hold there: of states as many as two steps pass, the one that is
 * planned and the one before it, whose snapshots are not published yet. */
static inline int32_t sched_most_blocks(const struct sched_config *c, int32_t k)
{
    return c->kv_window[k] == KV_WINDOW_STATE
               ? window_blocks(sched_kv_window(c, k), 2 * c->max_num_batched_tokens)
               : sched_window_blocks(c, k);
}

/* The arena of a kv_policy other than paged: the device's pool, in chunks of at least a
 * block. */
static inline struct reserve_rule sched_reserve_rule(const struct sched_config *c)
{
    int32_t least = 1;

    while (least < c->block_size) {
        least *= 2;
    }
    int32_t slots = (int32_t)MIN((int64_t)c->n_blocks * c->block_size, 1 << 30);
    return (struct reserve_rule){c->kv_policy, slots, c->max_len, least};
}

struct sched;
/* ERR_INVALID, with the numbers, for a configuration that cannot work. */
int sched_new(struct sched **ret, const struct sched_config *c, struct err *e);
/* Frees the groups that it still holds, too. */
void sched_free(struct sched *s);
const struct sched_config *sched_config(const struct sched *s);
/* Verify up to max_draft (1 .. LIMIT_DRAFT) drafts of a sequence in a step, from `d`,
 * which must outlive the scheduler's groups. Called while it has none. */
void sched_speculate(struct sched *s, struct draft_source *d, int32_t max_draft);

/* Take over a group (NEW -> WAITING): 0 or ERR_FULL, and then the group is still the
 * caller's. */
int sched_add(struct sched *s, struct group *g, int64_t now_us);
/* Fill `p` for the next step: the number of items (0: nothing can run now). */
int32_t sched_plan(struct sched *s, int64_t now_us, struct plan *p);
/* Report how long a planned step took on the device; 0: unknown. Steps that mix decodes
 * and prefill correct the cost model: where they take longer than it says, as at lower
 * clocks under sustained load, later ones are planned smaller. */
void sched_observe(struct sched *s, const struct plan *p, int64_t us);
/* Report the time between the end of a step and the start of the next, `p`, in which
 * the device had nothing to do. */
void sched_observe_gap(struct sched *s, const struct plan *p, int64_t us);
/* End a group in any state: its blocks and slots are free at once; decode_reap reports
 * it. O(its blocks). Cancelled requests are found by sched_plan itself (running: in the
 * next step, waiting: within a few steps). */
void sched_end(struct sched *s, struct group *g, int finish, const char *error);
/* End every group (device error, shutdown). */
void sched_end_all(struct sched *s, int finish, const char *error);

/* Whether some group has ended and was not freed by decode_reap yet. */
bool sched_has_ended(const struct sched *s);

/* Pin the cached full blocks of a prefix that a request has just computed; they are
 * held for good. Returns how many blocks this adds, which the caller adds to n_pinned
 * of the configuration that it passes to group_new. */
int32_t sched_pin(struct sched *s, const int32_t *token, int32_t n_tokens);

/* For gauges and counters. */
struct sched_counts {
    /* gauges: groups and live sequences by state */
    int32_t running_groups, running_seqs, waiting_groups, swapped_groups;
    int32_t blocks_used, blocks_cached, host_blocks_used; /* gauges: blocks by state */
    uint64_t preempt_swap, preempt_recompute;             /* counters: groups preempted, by how */
    /* counters: blocks of resumed groups, copied from the host or still on the
     * device */
    uint64_t swap_in_copied, swap_in_found;
    uint64_t prefix_queries, prefix_hits; /* counters: prompt tokens looked up, and found */
    /* counters: verified drafts, by sequence and step, and their tokens */
    uint64_t drafts, draft_tokens;
    uint64_t accepted_tokens[LIMIT_DRAFT]; /* counters: those that held, by their place */
    uint64_t late_masks; /* counter: masks that a step went on without, by sequence */
};
void sched_counts(const struct sched *s, struct sched_counts *ret);
/* With policy: fair, whether several tenants have submitted lately, so that steps are
 * kept short (shared_itl_us) and should be launched late. */
bool sched_is_shared(const struct sched *s, int64_t now_us);
/* Fill all of `p` but its events, step and times. O(blocks + size of the snapshot). */
void sched_snapshot(const struct sched *s, struct kv_snapshot *p);

/* NULL, or a sentence about the first invariant that does not hold. `p`: the plan just
 * made, or NULL. Walks everything: tests and debug builds. */
const char *sched_check(struct sched *s, const struct plan *p);

#endif
