/* Inside the scheduler: what sched*.c and decode.c share. Nobody else includes this.
 *
 *     sched.c          the step: decodes, prefill, numbering of rows
 *     sched_queue.c    the queues, ends, time-outs
 *     sched_fair.c     tenants: whose turn it is among those who wait, whose group
 *                      gives way
 *     sched_admit.c    WAITING -> RUNNING, SWAPPED -> RUNNING
 *     sched_preempt.c  RUNNING -> WAITING, RUNNING -> SWAPPED
 *     sched_seq.c      fork, free, blocks and rows of one sequence
 *     sched_start.c    what a group holds from its start to its end
 *     sched_check.c    the invariants
 *     sched_snapshot.c  what observers see
 *     setup.c          all that allocates
 */
#ifndef QUIRE_ENGINE_SCHED_SCHED_IMPL_H
#define QUIRE_ENGINE_SCHED_SCHED_IMPL_H

#include "config/base/buf.h"
#include "engine/sched/kv/kvpool.h"
#include "engine/sched/kv/prefix.h"
#include "engine/sched/kv/regions.h"
#include "engine/sched/sched.h"

struct group_list {
    struct group *first, *last;
    int32_t n;
};

/* Whoever requests are counted for. Without policy: fair there is one. */
struct tenant {
    struct group *first; /* its waiting groups: a heap by group_before; NULL: nothing waits */
    int32_t ready_index; /* place in sched->ready; -1: nothing waits */
    int32_t n_rows;      /* set aside for its running groups */
    double weight;       /* its share, of its newest request */
    /* tokens computed and drawn for it, over its weight; comparable between tenants */
    double service;
    double key; /* `service` when its place in sched->ready was found: service only grows */
};

enum { MAX_IN_FLIGHT = 16 }; /* plans made and not committed */

struct sched {
    struct sched_config c;
    struct kvpool pool, host;
    struct prefix prefix;

    /* [max_waiting + max_started] all that wait, in no order; their order is the
     * tenants' */
    struct group **waiting;
    int32_t n_waiting;
    int32_t n_preempted; /* the first of them, who have started */
    /* that they have to compute, as if nothing of it were in the prefix cache */
    int64_t waiting_tokens;
    struct tenant *tenant; /* [LIMIT_TENANTS], 1 without fair shares */
    int32_t n_tenants;     /* up to the last one that ever asked */
    int32_t *ready; /* as many: heap of the tenants with waiting groups, the least `key` on top */
    int32_t n_ready;
    int32_t last_tenant;     /* whose group was admitted last */
    int32_t last_asker;      /* whose group was added last */
    int64_t shared_until_us; /* so long tenants count as sharing; 0: one alone has asked */
    uint64_t turn_order;     /* of the group that the last step with turns decoded last */
    int32_t sweep;           /* the entry of `waiting` to look at next for cancels and time-outs */
    struct group_list running; /* by group_before */
    struct group_list swapped; /* by group_before */
    struct group_list ended;   /* waiting for decode_reap */

    struct regions regions; /* of groups that have started */
    struct buf text;        /* scratch: what one token adds to a beam's text; never grows */
    struct contiguous_alloc *contiguous; /* NULL: paged */

    int32_t *row; /* [max_num_seqs] free table rows, a stack */
    int32_t n_rows;
    uint8_t *row_seen;  /* [max_num_seqs] scratch of sched_check */
    int32_t n_reserved; /* rows set aside for running groups, taken or not */
    /* [max_num_seqs] free places among the packer's masks, a stack: one a running group
     * at most */
    int32_t *mask;
    int32_t n_masks;

    struct block_copy *out; /* [n_host_blocks] swap-outs not launched yet */
    int32_t n_out;
    bool *pinned; /* [n_blocks] */
    /* [max(n_blocks, n_host_blocks)] scratch: a number by block, all 0 between uses */
    int32_t *mark;

    int32_t *found; /* [n_host_blocks] scratch: host blocks whose contents the device still has */
    int32_t n_found;

    int32_t *tokens; /* [block_size] scratch */
    /* [blocks of max_len] scratch: what the prefix cache has of the group that is
     * looked at */
    int32_t *hit;

    struct plan_item *piece; /* [max_num_seqs] scratch: items of several tokens */
    int32_t n_pieces;
    struct group **line;              /* [max_num_seqs] scratch: fair shares' order of prefills */
    int32_t tokens_left, scores_left; /* of the step being planned */
    bool preempted;                   /* in the step being planned */
    bool made_way;                    /* and only for a group that waits */
    bool ahead;  /* it begins with prefills of tenants who hold less than others */
    bool shared; /* it is to be short, for tenants who share */
    double pace; /* how long steps of decodes and prefill take, over what the cost table says */
    uint64_t n_delayed; /* steps that told */
    uint64_t step;      /* the last one planned */
    uint64_t next_order;
    struct plan *in_flight[MAX_IN_FLIGHT]; /* oldest first */
    int32_t n_in_flight;

    struct sched_counts counted; /* the counters of it */
};

/* sched_queue.c */
static inline bool group_before(const struct group *a, const struct group *b)
{
    return a->priority != b->priority ? a->priority < b->priority : a->order < b->order;
}
void list_insert(struct group_list *l, struct group *g);
void list_append(struct group_list *l, struct group *g);
void list_remove(struct group_list *l, struct group *g);
void waiting_push(struct sched *s, struct group *g);
void waiting_remove(struct sched *s, struct group *g);
/* End the groups whose client is gone or whose time is up. */
void sched_sweep(struct sched *s, int64_t now_us);
/* Its last sequence ended: to the ended queue. */
void group_finish(struct sched *s, struct group *g);

/* sched_fair.c */
static inline bool is_fair(const struct sched *s)
{
    return s->c.policy == POLICY_FAIR;
}
/* The waiting group whose turn it is among those that can have their memory; NULL: none
 * waits. */
struct group *waiting_first(struct sched *s);
/* Whose turn it is of two groups: the tenant's who was served less, then the older
 * one's; group_before without fair shares. */
bool turn_before(const struct sched *s, const struct group *a, const struct group *b);
/* The swapped group to come back next; NULL: none is swapped out that is not parked. */
struct group *swapped_first(const struct sched *s);
/* Whether waiting `g` goes before swapped `other`: while anything is swapped out,
 * nothing new comes in out of turn. */
bool goes_before_swapped(struct sched *s, const struct group *g, const struct group *other);
/* Its tenant was served so many tokens. */
void tenant_charge(struct sched *s, const struct group *g, int32_t n_tokens);
/* The tenant has a waiting group more or less; called by waiting_push,
 * waiting_remove. */
void tenant_push(struct sched *s, struct group *g);
void tenant_remove(struct sched *s, struct group *g);
/* Rows set aside for a running group: n more, or fewer. */
void reserve_rows(struct sched *s, struct group *g, int32_t n);
/* The running group to preempt first: the newest of the tenant who holds most rows for
 * its weight; NULL: none that this step has not planned. */
struct group *heaviest(const struct sched *s);
/* `tenant` asks: whether tenants share. */
void tenant_asks(struct sched *s, int32_t tenant, int64_t now_us);
/* With fair shares, before the step is planned: preempt for a tenant who holds less
 * than others and has no room. */
void make_way(struct sched *s);
/* `g`'s tenant holds fewer rows for its weight than `other`'s and was served less. */
bool is_poorer(const struct sched *s, const struct group *g, const struct group *other);
/* The step being planned begins with this group's prefill. */
static inline bool goes_ahead(const struct sched *s, const struct group *g)
{
    return g->ahead_step == s->step + 1;
}

/* sched_seq.c */
/* Without paging: contiguous room for every sequence that is not done, or for none;
 * true if there is, or with paging. */
bool take_room(struct sched *s, struct group *g);
void give_room(struct sched *s, struct group *g);
/* A block for a table, the least recently used one; its old name is dropped. There must
 * be one. */
int32_t take_block(struct sched *s);
void seq_take_row(struct sched *s, struct seq *q);
/* Give back blocks and row; the sequence keeps its tokens. */
void seq_drop_memory(struct sched *s, struct seq *q);
/* `child`, which holds nothing, becomes LIVE where `parent` stands, over the same
 * blocks. */
void seq_fork(struct sched *s, struct seq *child, const struct seq *parent);
/* LIVE -> DONE, memory returned; ends the group with its last one. */
void seq_finish(struct sched *s, struct seq *q, int finish);
/* The group leaves RUNNING: rows and side room are no longer set aside. */
void group_unreserve(struct sched *s, struct group *g);
/* Name the full blocks that committed steps have written. */
void seq_publish(struct sched *s, struct seq *q);

/* The first live sequence; there is one in any group that has not ended. */
static inline struct seq *group_first_live(struct group *g)
{
    struct seq *q = g->seq;

    while (q->state != SEQ_LIVE) {
        q++;
    }
    return q;
}
/* Nothing was drawn yet: only seq[0] exists and computes the prompt. */
static inline bool group_fresh(const struct group *g)
{
    return g->seq[0].n_tokens == g->n_prompt && g->n_live == 1 && g->seq[0].state == SEQ_LIVE;
}
/* Where prefill ends for a sequence: after the prompt the first time, else before the
 * last token, which the decode pass computes, so that all sequences of a group draw in
 * the same step. */
static inline int32_t prefill_target(const struct group *g, const struct seq *q)
{
    return q->n_tokens == g->n_prompt ? g->n_prompt : q->n_tokens - 1;
}

/* Rows it may come to hold: all of its width until the prompt has been forked. */
static inline int32_t group_rows(const struct group *g)
{
    return g->beams || group_fresh(g) ? g->width : g->n_live;
}

static inline bool can_draw(const struct group *g, const struct seq *q)
{
    return q->n_tokens - g->n_prompt < g->max_tokens;
}
/* Some live sequence has more to compute than the token that it draws from. */
bool in_prefill(const struct group *g);
/* Tokens that its sequences have to compute before they draw again. */
int64_t group_gap(const struct group *g);
/* Blocks that the group's next tokens take: new ones, and copies of shared ones. `pool`
 * is the one its tables name. */
int32_t decode_need(struct sched *s, const struct kvpool *pool, struct group *g);
/* The block that the next token of `q` goes to is its own afterwards. */
void seq_own_next_block(struct sched *s, struct seq *q, struct plan *p);

/* sched_admit.c */
/* Blocks that a swapped group, which no step in flight names, needs to come back: those
 * it has on the host, and what it takes to run at once. O(its blocks). */
int32_t blocks_to_resume(struct sched *s, struct group *g);
void sched_resume(struct sched *s, struct plan *p);
/* The waiting group whose turn it is begins in this step; false: there is none, or no
 * room. */
bool sched_admit_one(struct sched *s, int64_t now_us, struct plan *p);
/* Rows and blocks for a waiting group are there. */
bool has_room(struct sched *s, struct group *g);
/* sched_start.c */
/* Memory for all that may run at the longest. */
int64_t group_bytes_most(const struct sched_config *c);
/* Its memory is there, taken already or free. */
bool can_start(struct sched *s, const struct group *g);
/* Take the memory of a group that has none, and make its sequences; false: there is not
 * enough now. */
bool group_start(struct sched *s, struct group *g);
/* Give it back: no step in flight names the group. As before group_start, but for the
 * state of its first sequence. */
void group_end_memory(struct sched *s, struct group *g);
/* sched_preempt.c */
void preempt(struct sched *s, struct group *g);
/* sched.c */
bool plan_decode(struct sched *s, struct group *g, struct plan *p);
void plan_prefill(struct sched *s, struct group *g, struct plan *p);

#endif
