/* The scheduler: groups and a budget go in, a plan comes out. Pure: no clock,
 * allocation, randomness, threads, I/O or logging after sched_new, so the code that
 * serves can be simulated; time is an argument.
 *
 * One rule, no phases: each sequence's gap n_tokens - n_computed is worked off under
 * the step's token budget. sched_plan, in this order:
 *     1. end groups that were cancelled or waited too long
 *     2. decodes, oldest group first, never kept back by prefill; without a block the
 *        newest group is preempted
 *     3. resume swapped groups, oldest first (not in a step that preempted)
 *     4. prefill chunks of running groups, oldest first (prompt, recomputation; prefix
 *        hits shorten them)
 *     5. admit waiting groups, first come, first served, while prompt blocks, sequences
 *        and budget allow
 * With policy: fair the order among groups is their tenants': who was served least goes
 * first, in 3, 4 and 5, and who holds most gives way (sched_fair.c). While several
 * tenants ask, a step is kept short: 2 takes only as many groups of who holds most as
 * fit into shared_itl_us, in turn. A group is planned or preempted whole, and never
 * preempted in a step that has planned it; blocks for a prompt are taken at admission,
 * so only decodes can lack one.
 *
 * How the loop uses it (executor depth 1: N+1 is launched before N is waited for):
 *
 *     while ((g = next of inbox)) sched_add(s, g, now);
 *     n = sched_plan(s, now, plan);      // plans alternate: one in flight, one being
 *                                        made
 *     if (n > 0) { pack_batch(packer, plan, &batch); x->launch(x, &batch, &e); }
 *     if (a step is in flight and (n == 0 or two are)) {
 *         x->wait(x, &results, &e);
 *         decode_commit(s, oldest, &results, now, out);
 *     }
 *     decode_reap(s, out);               // DELTA_END, and the groups are freed
 *
 * An empty plan is not launched and has no step number. With nothing in flight before
 * it and no group anywhere the engine is idle; with groups, the next call finds
 * something to do (this one preempted, or their clients are gone).
 *
 * Invariants (sched_check):
 *  S1  a group is in exactly the queue its state names, in order; tenants with waiting
 *      groups, and no others, stand ready
 *  S2  every device block's count equals the number of tables of RUNNING groups holding
 *      it (plus pins); the same for host blocks and SWAPPED groups; WAITING and ENDED
 *      groups hold none
 *  S3  a live sequence of a RUNNING group has n_computed <= n_tokens and blocks for
 *      n_computed tokens
 *  S4  rows are held by live sequences of RUNNING groups only, each once; reservations
 *      add up, by tenant too, and so do the chunks of a kv_policy other than paged,
 *      which only RUNNING groups have
 *  S5  planned tokens <= budget, sequences <= max_num_seqs, logits rows <= max_logits
 *  S6  every block a planned item writes has count 1, but for what others hold and do
 *      not read before a later step: the prompt that a recompute's root computes for
 *      its siblings, the last block of a prompt forked in this step
 *  S7  n_inflight counts the uncommitted plans that name the group
 *  S8  RUNNING and SWAPPED groups have their memory, WAITING ones too where they have
 *      started, and no others but ENDED ones; it is all that was taken
 *  S9  what a SWAPPED group needs to come back is what was counted
 */
#ifndef QUIRE_ENGINE_SCHED_SCHED_H
#define QUIRE_ENGINE_SCHED_SCHED_H

#include "config/base/limits.h"
#include "config/base/policies.h"
#include "engine/kv_snapshot.h"
#include "engine/sched/seq.h"

/* A step's time is estimated as fixed + tokens * per_token + context tokens read *
 * per_context; measured at start. */
struct step_cost {
    double fixed_us, token_us, context_us;
    double swap_block_us; /* one block between host and device, one way */
};

struct tokenizer;
struct sched_config {
    /* what the executor holds */
    int32_t n_blocks, n_host_blocks, block_size;
    int32_t n_pinned; /* blocks that sched_pin holds: no group can have them */
    int32_t vocab;
    int32_t max_len; /* prompt and generated tokens of a sequence */
    /* settings */
    int32_t max_num_seqs;           /* table rows: sequences of running groups */
    int32_t max_num_batched_tokens; /* of a step; >= max_num_seqs, so that decodes always fit */
    /* rows of the output head, and sampling rows, in a step; > max_num_seqs: the rest
     * is for prompt log-probabilities */
    int32_t max_logits;
    int32_t max_waiting; /* groups that have not started; sched_add says ERR_FULL beyond */
    int32_t max_started; /* groups that have started and not ended; 0: twice max_num_seqs */
    int64_t
        /* address space for what these hold; 0: sched_new takes what they can need, and
         * says how much */
        group_bytes;
    int preemption; /* enum preemption */
    /* enum kv_policy: reservations limit who is admitted (contiguous_alloc.h); no
     * prefix_cache then */
    int kv_policy;
    int policy; /* enum policy */
    bool prefix_cache;
    int64_t target_itl_us; /* 0: none */
    /* with fair shares, while several tenants ask: of whole steps; 0: none */
    int64_t shared_itl_us;
    int32_t step_quantum; /* large steps are best a multiple of so many tokens; 0: no matter */
    int64_t queue_timeout_us, request_timeout_us; /* 0: none */
    struct step_cost cost;                        /* all 0: unknown */
    /* of a block's hash that count in the prefix cache; 0: all 128. Few make hashes
     * collide, which must cost time only */
    int32_t name_bits;
    uint64_t secret; /* keys the hashes of the prefix cache */
    const struct tokenizer *
        /* for stop strings inside beams; NULL: they are the output side's affair
         * alone */
        tokenizer;
    int32_t eos[LIMIT_EOS_IDS]; /* end-of-sequence ids */
    int32_t n_eos;
};

/* One sequence's share of a step: `n` tokens from position `first`. The sampling rows
 * of an item are its n_scores SAMPLE_SCORE rows (positions first + score_offset + i,
 * one a logits row), then n_draws rows that all read the last token's logits: of the
 * sequence itself, or after the prompt of seq[0 .. n_draws) of the group. */
struct plan_item {
    struct seq *seq;
    int32_t first, n;
    int32_t score_offset, n_scores;
    int32_t n_draws;
    int32_t sample_first; /* index of its first sampling row */
    /* sampling row of the step before that draws its last token; -1: the token is
     * known */
    int32_t src_row;
    bool last_prompt; /* the prompt is complete with this piece */
};

/* What one step does. Belongs to the caller; filled by sched_plan, read by pack_batch
 * and decode_commit. */
struct plan {
    uint64_t step;          /* 1, 2, ...; 0: empty */
    double estimate_us;     /* what it takes, by the costs measured; 0: they are unknown */
    struct plan_item *item; /* [max_num_seqs] items of one token first */
    int32_t n_items, n_decode;
    int32_t n_tokens, n_logits, n_samples;
    struct block_copy *copy;               /* [max_num_seqs] */
    struct block_copy *swap_out, *swap_in; /* [n_host_blocks] */
    int32_t n_copy, n_swap_out, n_swap_in;
};
int plan_init(struct plan *p, const struct sched_config *c, struct err *e);
void plan_release(struct plan *p);

/* The arena of kv_policy: the pool, in chunks of a block at least. */
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
/* ERR_INVALID for a configuration that cannot work, with the numbers. */
int sched_new(struct sched **ret, const struct sched_config *c, struct err *e);
/* Frees the groups still inside, too. */
void sched_free(struct sched *s);
const struct sched_config *sched_config(const struct sched *s);

/* Take over a group (NEW -> WAITING): 0 or ERR_FULL, and then the group is still the
 * caller's. */
int sched_add(struct sched *s, struct group *g, int64_t now_us);
/* Fill `p` for the next step: the number of items (0: nothing can run now). */
int32_t sched_plan(struct sched *s, int64_t now_us, struct plan *p);
/* How long a planned step took on the device; 0: unknown. Steps of decodes and prefill
 * that take longer than the cost table says, as under a sustained load, which lowers
 * clocks, are planned smaller. */
void sched_observe(struct sched *s, const struct plan *p, int64_t us);
/* End a group in any state: its memory returns at once; decode_reap reports it. O(1)
 * but for its blocks. Cancelled requests are found by sched_plan itself (running: at
 * once, waiting: within a few steps). */
void sched_end(struct sched *s, struct group *g, int finish, const char *error);
/* End every group (device error, shutdown). */
void sched_end_all(struct sched *s, int finish, const char *error);

/* Groups have ended and were not freed by decode_reap yet. */
bool sched_has_ended(const struct sched *s);

/* Hold for good the cached blocks of a prefix that a request has just computed: how
 * many blocks this adds. Only full blocks; 0 when nothing is cached. The caller then
 * raises n_pinned in the configuration that it hands to group_new. */
int32_t sched_pin(struct sched *s, const int32_t *token, int32_t n_tokens);

/* For gauges and counters. */
struct sched_counts {
    int32_t running_groups, running_seqs, waiting_groups, swapped_groups;
    int32_t blocks_used, blocks_cached, host_blocks_used;
    uint64_t preempt_swap, preempt_recompute;
    /* blocks that came back: from the host; still on the device */
    uint64_t swap_in_copied, swap_in_found;
    uint64_t prefix_queries, prefix_hits; /* tokens */
};
/* With fair shares: whether several tenants asked lately, so that each step should be
 * short and begin with who came last. */
bool sched_is_shared(const struct sched *s, int64_t now_us);
void sched_counts(const struct sched *s, struct sched_counts *ret);
/* Fill all of `p` but its events, step and times. O(blocks + what the snapshot
 * holds). */
void sched_snapshot(const struct sched *s, struct kv_snapshot *p);

/* NULL, or the sentence of the first invariant that does not hold. `p`: the plan just
 * made, or NULL. O(everything). */
const char *sched_check(struct sched *s, const struct plan *p);

#endif
