/* Preemption of a whole group: its blocks are swapped out to the host pool, or dropped
 * and computed again later.
 *
 * A group is never preempted in a step that has planned it, but the step before may
 * still be in flight. The swap-out takes effect after that step, so what the step
 * writes is saved too, and the tokens that it samples are appended at its commit. The
 * group does not run again before that (sched_admit.c).
 */
#include "engine/sched/sched_impl.h"

/* Leading entries of a sequence's tables to keep: those with computed tokens, and those
 * that the root of a recompute still has to compute for its siblings. */
static int32_t blocks_computed(const struct sched *s, const struct seq *q)
{
    return blocks_for(s, MAX(q->n_computed, q->group->n_shared));
}

static void leave_running(struct sched *s, struct group *g)
{
    list_remove(&s->running, g);
    group_unreserve(s, g);
    g->n_preempted++;
    s->preempted = s->admission_closed = true;
}

static void preempt_recompute(struct sched *s, struct group *g)
{
    leave_running(s, g);
    for (int32_t i = 0; i < g->width; i++) {
        struct seq *q = &g->seq[i];
        if (q->state != SEQ_LIVE) {
            continue;
        }
        seq_drop_memory(s, q);
        q->n_computed = q->n_stored = 0;
    }
    g->n_shared = 0;
    s->counted.preempt_recompute++;
    waiting_push(s, g);
}

/* The number of distinct blocks that a swap copies. */
static int32_t distinct_blocks(struct sched *s, struct group *g)
{
    int32_t n = 0;

    for (int pass = 0; pass < 2; pass++) { /* count, then clear the marks */
        for (int32_t i = 0; i < g->width; i++) {
            const struct seq *q = &g->seq[i];
            n += q->state == SEQ_LIVE ? mark_blocks(s, q, blocks_computed(s, q), pass == 0) : 0;
        }
    }
    return n;
}

/* The host block for a device block of a table; a block that several sequences share is
 * copied once. mark[block] is its host block + 1. */
static int32_t swap_out_block(struct sched *s, int32_t block)
{
    if (s->mark[block] > 0) {
        kvpool_ref(&s->host, s->mark[block] - 1);
        return s->mark[block] - 1;
    }
    int32_t h = kvpool_take(&s->host);
    s->mark[block] = h + 1;
    s->swap_out[s->n_swap_out++] = (struct block_copy){.src = block, .dst = h};
    return h;
}

static void swap_out_table(struct sched *s, struct block_table *t, int32_t keep)
{
    for (int32_t b = t->n_blocks - 1; b >= t->first; b--) {
        int32_t block = t->block[b];
        if (block < 0) {
            continue;
        }
        if (b < keep) {
            t->block[b] = swap_out_block(s, block);
        }
        kvpool_unref(&s->pool, block);
    }
    t->n_blocks = MIN(t->n_blocks, keep);
}

static void preempt_swap(struct sched *s, struct group *g)
{
    int32_t first_out = s->n_swap_out;

    leave_running(s, g);
    for (int32_t i = 0; i < g->width; i++) {
        struct seq *q = &g->seq[i];
        if (q->state != SEQ_LIVE) {
            continue;
        }
        for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
            swap_out_table(s, &q->table[k], blocks_computed(s, q));
        }
        seq_drop_slot(s, q);
    }
    for (int32_t i = first_out; i < s->n_swap_out; i++) {
        s->mark[s->swap_out[i].src] = 0;
    }
    s->counted.preempt_swap++;
    g->resume_need = -1;
    g->state = GROUP_SWAPPED;
    list_insert(&s->swapped, g);
}

/* Tokens that a recompute would have to compute again. */
static int64_t tokens_computed(const struct group *g)
{
    int64_t n = 0;
    int32_t shared = 0;

    for (int32_t i = 0; i < g->width; i++) {
        if (g->seq[i].state != SEQ_LIVE) {
            continue;
        }
        n += g->seq[i].n_computed - shared;
        shared = MIN(g->n_prompt, g->seq[i].n_computed); /* the prompt is computed once for all */
    }
    return n;
}

static bool swap_is_cheaper(const struct sched *s, const struct group *g, int32_t n_blocks)
{
    const struct step_cost *k = &s->c.cost;

    if (s->c.preemption != PREEMPT_AUTO) {
        return s->c.preemption == PREEMPT_SWAP;
    }
    return 2 * n_blocks * k->swap_block_us < tokens_computed(g) * k->token_us;
}

bool drop_unpublished(struct sched *s)
{
    bool some = false;

    for (struct group *g = s->running.first; g && sched_has_states(&s->c); g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            some = (g->seq[i].state == SEQ_LIVE && seq_drop_unpublished(s, &g->seq[i])) || some;
        }
    }
    return some;
}

void preempt(struct sched *s, struct group *g)
{
    for (int32_t i = 0; i < g->width; i++) { /* else it could need more than there is */
        if (g->seq[i].state == SEQ_LIVE) {
            seq_drop_unpublished(s, &g->seq[i]);
        }
    }
    int32_t n = s->c.preemption == PREEMPT_RECOMPUTE ? 0 : distinct_blocks(s, g);
    bool fits = n > 0 && n <= s->host.n_free;

    if (fits && swap_is_cheaper(s, g, n)) {
        preempt_swap(s, g);
    } else {
        preempt_recompute(s, g);
    }
}
