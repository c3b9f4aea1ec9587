/* Inside the scheduler: shared by its sources and by commit (decode/). Not for other
 * folders, except simulations and tests.
 *
 * Each file calls only those below it; policies are called through struct sched_policy.
 *
 *     sched_fair.c      policy: fair
 *     sched.c           a step: decodes, prefill, numbering of sampling rows; policy: fcfs
 *                       and priority
 *     sched_admit.c     WAITING -> RUNNING, SWAPPED -> RUNNING
 *     sched_preempt.c   RUNNING -> WAITING, RUNNING -> SWAPPED
 *     sched_end.c       ends and time-outs
 *     sched_queue.c     the queues
 *     sched_seq.c       fork, blocks and slot of one sequence
 *     sched_start.c     memory of a group from its start to its end
 *
 * Beside these: setup.c (everything that allocates), sched_check.c (the invariants),
 * sched_snapshot.c (what observers see).
 */
#ifndef QUIRE_ENGINE_SCHED_SCHED_IMPL_H
#define QUIRE_ENGINE_SCHED_SCHED_IMPL_H

#include "config/base/buf.h"
#include "engine/sched/kv/kvpool.h"
#include "engine/sched/kv/prefix.h"
#include "engine/sched/kv/regions.h"
#include "engine/sched/sched.h"
#include "engine/sched/step_pace.h"

/* Begins functions that only prefetch. GCC takes them to have no effect, and leaves out
 * calls that it has not inlined by then. */
#define FETCH static inline __attribute__((always_inline))

/* An intrusive list of groups (prev, next). */
struct group_list {
    struct group *first, *last; /* NULL: empty */
    int32_t n;                  /* groups in it */
};

/* What depends on the policy setting: first come, first served, also within priorities
 * (sched.c), or fair (sched_fair.c). Functions are required unless NULL is allowed. */
struct sched_policy {
    /* The order of waiting groups: add one, remove one, the first one (NULL: none). */
    void (*push)(struct sched *s, struct group *g);
    void (*remove)(struct sched *s, struct group *g);
    struct group *(*first)(struct sched *s);
    /* Whether `a` has its turn before `b`. */
    bool (*before)(const struct sched *s, const struct group *a, const struct group *b);
    /* The swapped group to resume next; NULL: none that is not parked. */
    struct group *(*first_swapped)(const struct sched *s);
    /* Whether a group may start before swapped ones whose turn is later; else none
     * starts while any is swapped out. */
    bool starts_before_swapped;

    /* Accounting; NULL: none. A group was submitted; was admitted, with n prompt tokens
     * to compute, or 0 if it had started before; samples a token; has n more slots
     * reserved. */
    void (*submitted)(struct sched *s, const struct group *g, int64_t now_us);
    void (*admitted)(struct sched *s, const struct group *g, int32_t n);
    void (*sampled)(struct sched *s, const struct group *g);
    void (*reserved)(struct sched *s, const struct group *g, int32_t n);

    /* The parts of sched_plan, in this order. */
    void (*begin)(struct sched *s, int64_t now_us, struct plan *p); /* NULL: nothing */
    void (*decodes)(struct sched *s, struct plan *p);
    /* Prefill tokens that may join; INFINITY: as many as the step has left. */
    double (*prefill_budget)(struct sched *s, int64_t now_us, const struct plan *p);
    void (*prefills)(struct sched *s, int64_t now_us, struct plan *p); /* and admissions */

    /* For sched_check: the policy's part of S1 and S4. n_heaps: tops of heaps among the
     * waiting groups. */
    const char *(*check)(const struct sched *s, int32_t n_heaps);
};
extern const struct sched_policy policy_fcfs, policy_fair;

/* policy: fair: one API key. */
struct tenant {
    struct group *waiting; /* top of its heap of waiting groups; NULL: none waits */
    int32_t ready_index;   /* index in fair->ready; -1: no group waits */
    int32_t n_slots;       /* reserved for its running groups */
    double weight;         /* its share, by its newest request */
    double service;        /* tokens computed and sampled for it, divided by its weight */
    double key; /* `service` when its index in fair->ready was found: service only grows */
};

/* The state of policy: fair (sched_fair.c). */
struct fair {
    struct tenant *tenant;        /* [LIMIT_TENANTS] */
    int32_t n_tenants;            /* up to the last one that has submitted a group */
    int32_t *ready;               /* [LIMIT_TENANTS] heap of waiting tenants, least `key` on top */
    int32_t n_ready;              /* of `ready` */
    int32_t last_admitted;        /* tenant of the group admitted last */
    int32_t last_submitter;       /* tenant of the group submitted last */
    int64_t shared_until_us;      /* until then tenants share; 0: one alone has submitted */
    uint64_t turn_order;          /* `order` of the group that plan_turns decoded last */
    struct group **prefill_order; /* [max_num_seqs] scratch */
    bool shared;                  /* the step being planned is to be short */
};

/* Drafts that an item of a plan could verify. */
struct draft_candidate {
    int32_t n;
    float chance[LIMIT_DRAFT]; /* [n] that this one and all before it hold; they do not rise */
};

enum { MAX_IN_FLIGHT = 16 }; /* plans made and not committed */

struct sched {
    struct sched_config c;
    struct kvpool pool, host; /* blocks of the device, and of the host for swapping */
    struct prefix prefix;     /* cached blocks of `pool` */
    /* [n_kv_groups] blocks of a sequence that it needs at a time, and may hold */
    int32_t window_blocks[LIMIT_KV_GROUPS], most_blocks[LIMIT_KV_GROUPS];

    const struct sched_policy *policy;
    struct group *queue; /* policy_fcfs: top of its heap of waiting groups; NULL: none waits */
    struct fair fair;    /* policy_fair */

    /* [max_waiting + max_started] all waiting groups, those that have started first;
     * else in no order. */
    struct group **waiting;
    int32_t n_waiting;
    int32_t n_preempted;       /* leading ones that have started */
    int64_t waiting_tokens;    /* that they have to compute if the prefix cache has none */
    int32_t sweep;             /* entry of `waiting` to check next for cancels and time-outs */
    struct group_list running; /* by group_before */
    struct group_list swapped; /* by group_before */
    struct group_list ended;   /* until decode_reap frees them */

    struct regions regions; /* memory of groups that have started */
    struct buf text;        /* scratch: what one token adds to a beam's text; never grows */
    struct contiguous_alloc *contiguous; /* NULL: paged */

    int32_t *free_slot;   /* [max_num_seqs] a stack */
    int32_t n_free_slots; /* of the stack */
    uint8_t *slot_seen;   /* [max_num_seqs] scratch of sched_check */
    int32_t n_reserved;   /* slots reserved for running groups, taken or not */
    int32_t *mask;        /* [max_num_seqs] free masks of the packer, a stack */
    int32_t n_masks;      /* of the stack */

    struct block_copy *swap_out; /* [n_host_blocks] swap-outs not launched yet */
    int32_t n_swap_out;          /* of these */
    bool *pinned;                /* [n_blocks] */
    /* [max(n_blocks, n_host_blocks)] scratch: a number by block, all 0 between uses */
    int32_t *mark;

    int32_t *found;  /* [n_host_blocks] scratch: host blocks whose contents the device still has */
    int32_t n_found; /* of these */

    int32_t *tokens; /* [block_size] scratch */
    /* [blocks of max_len] scratch: cached blocks of the group probed, of KV group 0 */
    int32_t *hit;

    struct plan_item *chunk; /* [max_num_seqs] scratch: items of several tokens */
    int32_t n_chunks;        /* of these */

    /* Of the step being planned: */
    int32_t tokens_left, scores_left; /* budget of tokens, and of score rows */
    bool preempted;                   /* a group was preempted: none is resumed */
    bool admission_closed; /* and, unless that was for a waiting group, none is admitted */
    bool starved;          /* a prefill lacked a block inside a window */
    bool prefilling;       /* false: no running group has prefill to compute */
    bool prefill_first;    /* prefill was planned before the decodes, which must fit behind */

    double cost_scale;                     /* time of mixed steps over the cost model's estimate */
    uint64_t n_observed;                   /* steps that cost_scale was learned from */
    uint64_t step;                         /* the last one planned */
    uint64_t next_order;                   /* arrival number of the next group */
    struct plan *in_flight[MAX_IN_FLIGHT]; /* oldest first */
    int32_t n_in_flight;                   /* of these */

    struct draft_source *drafts;       /* NULL: no speculation */
    int32_t max_draft;                 /* of a sequence in a step */
    struct draft_want *want;           /* [max_num_seqs] scratch */
    struct draft_candidate *candidate; /* [max_num_seqs] scratch: by item of the plan */
    struct step_pace pace;             /* of steps that only decode, while there are drafts */

    struct constraint_node *dropped; /* states of grammars that no sequence holds any more */

    struct sched_counts counted; /* its counters; gauges are filled by sched_counts */
};

/* sched_queue.c */
static inline bool group_before(const struct group *a, const struct group *b)
{
    return a->priority != b->priority ? a->priority < b->priority : a->order < b->order;
}
void list_insert(struct group_list *l, struct group *g);
void list_append(struct group_list *l, struct group *g);
void list_remove(struct group_list *l, struct group *g);
/* A leftist heap by group_before; *root NULL: empty. */
void heap_push(struct group **root, struct group *g);
void heap_remove(struct group **root, struct group *g);
/* -> WAITING, and out of it. */
void waiting_push(struct sched *s, struct group *g);
void waiting_remove(struct sched *s, struct group *g);
/* The next waiting group; NULL: none waits. While memory is short it is one that has
 * started, if there is one. */
struct group *waiting_first(struct sched *s);
/* Whether waiting `g` goes before swapped `other`. */
bool goes_before_swapped(struct sched *s, const struct group *g, const struct group *other);

/* sched_seq.c */
/* Reserve n more slots for a running group; n < 0: fewer. */
void reserve_slots(struct sched *s, struct group *g, int32_t n);
/* Without paging: reservations for every sequence that is not done, or for none. True
 * if there are, or with paging. */
bool take_reservations(struct sched *s, struct group *g);
void give_reservations(struct sched *s, struct group *g);
/* Take the next block of the device's pool for a table; its cached contents, if any,
 * are dropped. There must be one. */
int32_t take_block(struct sched *s);
/* Give back the blocks that lie wholly behind the windows, but for the snapshots of
 * states that steps in flight write, which their commits publish. */
void seq_trim(struct sched *s, struct seq *q);
/* Those as well. Returns whether there were some, which others may hold too. */
bool seq_drop_unpublished(struct sched *s, struct seq *q);
/* Entries that its table of KV group k has for prefill up to n_tokens, as far as the
 * window allows with `first` as the first one that is needed. */
int32_t table_end(const struct sched *s, int32_t k, int32_t first, int32_t n_tokens);
/* Take the blocks that the prefill of `q` needs at a time as long as there are some;
 * returns the tokens that all its tables have blocks for. */
int32_t seq_extend(struct sched *s, struct seq *q);
/* Behind seq_extend: take blocks for the states behind up to n_tokens tokens, as far as
 * others can do without them; returns the same. */
int32_t seq_extend_states(struct sched *s, struct seq *q, int32_t n_tokens);
/* The siblings of a recompute take over the blocks inside the windows that the root has
 * computed for them. */
void group_join(struct sched *s, struct group *g);
void seq_take_slot(struct sched *s, struct seq *q);
void seq_drop_slot(struct sched *s, struct seq *q);
/* Give back the blocks for states behind drafts. */
void seq_drop_spare(struct sched *s, struct seq *q);
/* Give back blocks and slot; the sequence keeps its tokens. */
void seq_drop_memory(struct sched *s, struct seq *q);
/* `child`, which holds nothing, becomes a LIVE copy of `parent` over the same
 * blocks. */
void seq_fork(struct sched *s, struct seq *child, const struct seq *parent);
/* The group leaves RUNNING: give back its reserved slots, reservations and mask. */
void group_unreserve(struct sched *s, struct group *g);
/* Whether committed steps have written a full block that was not published. */
static inline bool has_block_to_publish(const struct sched *s, const struct seq *q)
{
    return s->c.prefix_cache && (int64_t)(q->chain.n_blocks + 1) * s->c.block_size <= q->n_stored;
}
/* Publish such blocks in the prefix cache. */
void seq_publish(struct sched *s, struct seq *q);
/* Prefetch what that will touch of the prefix cache, if the next block is about to be
 * full. */
void seq_fetch_block(const struct sched *s, const struct seq *q);
/* Before a sequence ends: what stands behind its last full block stays in the prefix
 * cache as a tail, with the states behind its last token. With states alone, where a
 * prefix that ends between two snapshots would be read again. */
void seq_publish_tail(struct sched *s, struct seq *q);

/* What steps in flight sample for `q` will not count: it samples again from its last
 * known token, which is computed anew. With neither windows nor states. */
void seq_void(struct sched *s, struct seq *q);

/* For a walk over the items of a plan that has come to item i: prefetches what planning
 * and packing the next step, or committing this one, reads and writes of the sequences
 * ahead, each pointer when what holds it has arrived. The caches have forgotten much of
 * it since the walk before. */
FETCH void fetch_ahead(const struct plan *p, int32_t i, bool commits)
{
    enum { SEQ_AHEAD = 12, GROUP_AHEAD = 8, REQUEST_AHEAD = 4 };

    if (i + SEQ_AHEAD < p->n_items) {
        const struct seq *q = p->item[i + SEQ_AHEAD].seq;
        __builtin_prefetch(&q->group);
        __builtin_prefetch(&q->chain);
        if (!commits) {
            __builtin_prefetch(&q->table[0]);
        }
    }
    if (i + GROUP_AHEAD < p->n_items) {
        const struct seq *q = p->item[i + GROUP_AHEAD].seq;
        __builtin_prefetch(&q->group->request);
        __builtin_prefetch(&q->group->commit_step);
        if (commits) {
            __builtin_prefetch(q->out + q->n_out, 1);
        }
    }
    if (i + REQUEST_AHEAD < p->n_items) {
        __builtin_prefetch(p->item[i + REQUEST_AHEAD].seq->group->request);
    }
}

/* The first live sequence; there is one in any group that has not ended. */
static inline struct seq *group_first_live(struct group *g)
{
    struct seq *q = g->seq;

    while (q->state != SEQ_LIVE) {
        q++;
    }
    return q;
}
/* Nothing was sampled yet: only seq[0] is live and computes the prompt. */
static inline bool group_fresh(const struct group *g)
{
    return g->seq[0].n_tokens == g->n_prompt && g->n_live == 1 && g->seq[0].state == SEQ_LIVE;
}
/* Where prefill ends for a sequence: behind the prompt the first time, else before the
 * last token, which the decode pass computes, so that all sequences of a group sample
 * in the same step. */
static inline int32_t prefill_target(const struct group *g, const struct seq *q)
{
    return q->n_tokens == g->n_prompt ? g->n_prompt : q->n_tokens - 1;
}

/* Slots that it may come to hold: all of its width until the prompt was forked. */
static inline int32_t group_slots(const struct group *g)
{
    return g->beams || group_fresh(g) ? g->width : g->n_live;
}

static inline bool can_sample(const struct group *g, const struct seq *q)
{
    return q->n_tokens - g->n_prompt < g->max_tokens;
}
/* Whether some live sequence has more to compute than the token that it samples
 * from. */
static inline bool in_prefill(const struct group *g)
{
    for (int32_t i = 0; i < g->width; i++) {
        const struct seq *q = &g->seq[i];
        if (q->state == SEQ_LIVE && q->n_computed < prefill_target(g, q)) {
            return true;
        }
    }
    return false;
}
/* Whether a table has no entry yet for the token at `position`. */
static inline bool lacks_block(const struct sched *s, const struct block_table *t, int32_t position)
{
    return position >= (int64_t)t->n_blocks * s->c.block_size;
}
/* Set (on) or clear the marks of the blocks in a sequence's tables, of the entries
 * below `end`. Returns how many it has set that were not. */
int32_t mark_blocks(struct sched *s, const struct seq *q, int32_t end, bool on);
/* Tokens that its sequences have to compute before they sample again. */
int64_t group_gap(const struct group *g);
/* Blocks that the group's next tokens take in all KV groups: new ones, and copies of
 * shared ones. `pool`: that of its block tables. */
int32_t decode_need(struct sched *s, const struct kvpool *pool, struct group *g);
/* In every KV group make the block that the next token of `q` goes to its own: a new
 * one, or a copy. */
void seq_own_next_block(struct sched *s, struct seq *q, struct plan *p);

/* sched_admit.c */
/* Blocks for n_tokens in a group without a window. */
int32_t blocks_for(const struct sched *s, int32_t n_tokens);
/* Blocks that a swapped group, which no step in flight names, needs to resume: those
 * that it has on the host, and what it needs to run at once. O(its blocks). */
int32_t blocks_to_resume(struct sched *s, struct group *g);
/* Resume the next swapped group, if it fits; the caller plans its next tokens, because
 * its swap-in is sent with this step. Returns it; NULL: none. */
struct group *sched_resume(struct sched *s, struct plan *p);
/* Admit the next waiting group, if it fits; the caller plans its prefill. Returns it;
 * NULL: none. */
struct group *sched_admit(struct sched *s, int64_t now_us);
/* Whether slots, memory and blocks suffice to admit a waiting group. */
bool fits_now(struct sched *s, struct group *g);
/* sched_start.c */
/* Memory for as many groups as may run, at their longest. */
int64_t group_bytes_most(const struct sched_config *c);
/* Whether the group has its memory, or could take it. */
bool can_start(struct sched *s, const struct group *g);
/* Take memory for a group that has none, and make its sequences; false: not enough is
 * free. */
bool group_start(struct sched *s, struct group *g);
/* Give the memory back; no step in flight names the group. It is as before group_start,
 * except for the state of its first sequence. */
void group_end_memory(struct sched *s, struct group *g);
/* sched_end.c */
/* LIVE -> DONE, memory returned; ends the group with its last one. */
void seq_finish(struct sched *s, struct seq *q, int finish);
/* End groups that were cancelled or have timed out: all running and swapped ones, and
 * some of the waiting ones in turn. */
void sched_sweep(struct sched *s, int64_t now_us);

/* sched_draft.c */
/* Whether the step in flight is to be committed before another is planned. */
bool drafts_awaited(struct sched *s);
/* Add drafts to the decodes of a step in which all else was planned. */
void plan_drafts(struct sched *s, struct plan *p);
/* How many of an item's drafts hold, if its rows have sampled token[]. */
int32_t drafts_accepted(const struct plan_item *it, const int32_t *token);
/* The item's step was committed: take off what did not hold. The sequence is live. */
void drafts_settle(struct sched *s, const struct plan_item *it, int32_t n_accepted);

/* sched_preempt.c */
/* RUNNING -> SWAPPED or WAITING, by the preemption setting. */
void preempt(struct sched *s, struct group *g);
/* Before that: give back all snapshots that wait for their commits. Returns whether
 * there were some. */
bool drop_unpublished(struct sched *s);
/* sched.c: what policies put a step together from */
/* Whether the group could decode in this step. */
bool will_decode(const struct sched *s, const struct group *g);
/* Plan one token for each live sequence of a group behind its prefill, if it will
 * decode. If blocks are missing, the newest groups are preempted. False: `g` itself
 * was. */
bool plan_decode(struct sched *s, struct group *g, struct plan *p);
/* Plan the decodes of all running groups, oldest first. */
void plan_decodes(struct sched *s, struct plan *p);
/* Plan prefill chunks of a running group, as far as the budget allows. */
void plan_prefill(struct sched *s, struct group *g, struct plan *p);
/* Admit the next waiting group and plan its prefill; false: none waits, or it does not
 * fit. */
bool plan_admission(struct sched *s, int64_t now_us, struct plan *p);
/* The prefill budget by target_itl_us and by what is due. */
double prefill_budget(struct sched *s, int64_t now_us, const struct plan *p);
/* The time of an item, and of the plan so far, by the cost model. */
double item_us(const struct sched *s, const struct plan_item *it);
double planned_us(const struct sched *s, const struct plan *p);

#endif
