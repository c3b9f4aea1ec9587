/* Blocks and slot of one sequence, and the verbs fork and free (append: decode.c). */
#include <assert.h>
#include <string.h>

#include "engine/sched/decode/constrained.h"
#include "engine/sched/sched_impl.h"

int32_t take_block(struct sched *s)
{
    prefix_drop(&s->prefix, kvpool_peek(&s->pool));
    return kvpool_take(&s->pool);
}

void seq_take_slot(struct sched *s, struct seq *q)
{
    assert(s->n_free_slots > 0 && q->slot < 0);
    q->slot = s->free_slot[--s->n_free_slots];
    q->n_synced = 0;
}

/* A host block is released: cancel a swap-out into it that was not launched yet,
 * because another one may get the same block in the same step. */
static void forget_swap_out(struct sched *s, int32_t host_block)
{
    for (int32_t i = 0; i < s->n_swap_out; i++) {
        if (s->swap_out[i].dst == host_block) {
            s->swap_out[i] = s->swap_out[--s->n_swap_out];
            return;
        }
    }
}

static void drop_host_blocks(struct sched *s, struct seq *q)
{
    while (q->n_blocks > 0) {
        int32_t h = q->block[--q->n_blocks];
        kvpool_unref(&s->host, h);
        if (s->host.block[h].count == 0) {
            forget_swap_out(s, h);
        }
    }
}

void seq_drop_memory(struct sched *s, struct seq *q)
{
    if (q->group->state == GROUP_SWAPPED) {
        drop_host_blocks(s, q);
        return;
    }
    /* Tail first: the head of a chain is worth most to the prefix cache. */
    while (q->n_blocks > 0) {
        kvpool_unref(&s->pool, q->block[--q->n_blocks]);
    }
    if (q->slot >= 0) {
        s->free_slot[s->n_free_slots++] = q->slot;
        q->slot = -1;
    }
}

void seq_fork(struct sched *s, struct seq *child, const struct seq *parent)
{
    child->state = SEQ_LIVE;
    child->n_tokens = parent->n_tokens;
    child->n_computed = parent->n_computed;
    child->n_stored = parent->n_stored;
    child->n_out = parent->n_out;
    memcpy(child->out, parent->out, (size_t)parent->n_out * sizeof(*parent->out));
    child->chain = parent->chain;
    child->sample_step = parent->sample_step;
    child->sample_row = parent->sample_row;
    child->cum_logprob = parent->cum_logprob;
    child->constraint_end = CONSTRAINT_GOES_ON;
    child->constraint = parent->constraint;
    if (child->constraint) {
        child->constraint->n_held++;
    }
    struct kvpool *pool = child->group->state == GROUP_SWAPPED ? &s->host : &s->pool;
    for (int32_t i = 0; i < parent->n_blocks; i++) {
        kvpool_ref(pool, parent->block[i]);
    }
    memcpy(child->block, parent->block, (size_t)parent->n_blocks * sizeof(*parent->block));
    child->n_blocks = parent->n_blocks;
    if (child->group->state == GROUP_RUNNING) {
        seq_take_slot(s, child);
    }
}

void reserve_slots(struct sched *s, struct group *g, int32_t n)
{
    g->n_reserved += n;
    s->n_reserved += n;
    if (s->policy->reserved) {
        s->policy->reserved(s, g, n);
    }
}

bool take_reservations(struct sched *s, struct group *g)
{
    for (int32_t i = 0; s->contiguous && i < g->width; i++) {
        if (g->seq[i].state != SEQ_DONE &&
            !contiguous_take(s->contiguous, g->n_prompt, g->max_tokens, &g->seq[i].reservation)) {
            give_reservations(s, g);
            return false;
        }
    }
    return true;
}

void give_reservations(struct sched *s, struct group *g)
{
    for (int32_t i = 0; s->contiguous && i < g->width; i++) {
        contiguous_give(s->contiguous, &g->seq[i].reservation);
    }
}

void group_unreserve(struct sched *s, struct group *g)
{
    reserve_slots(s, g, -g->n_reserved);
    give_reservations(s, g);
    if (g->mask >= 0) {
        s->mask[s->n_masks++] = g->mask;
        g->mask = -1;
    }
}

void seq_publish(struct sched *s, struct seq *q)
{
    const struct group *g = q->group;
    int32_t size = s->c.block_size;

    if (!s->c.prefix_cache) {
        return;
    }
    while ((q->chain.n_blocks + 1) * size <= q->n_stored) {
        int32_t first = q->chain.n_blocks * size;
        /* Its tokens are of the prompt, of the output, or of both. */
        assert(first + size <= g->n_prompt + q->n_out);
        for (int32_t i = 0; i < size; i++) {
            s->tokens[i] = seq_token(q, first + i);
        }
        prefix_publish(&s->prefix, &q->chain, q->block[q->chain.n_blocks], s->tokens);
    }
}

int64_t group_gap(const struct group *g)
{
    int64_t n = 0;

    for (int32_t i = 0; i < g->n_seqs; i++) {
        const struct seq *q = &g->seq[i];
        if (q->state == SEQ_LIVE) {
            n += MAX(prefill_target(g, q) - q->n_computed, 0);
        }
    }
    return n;
}

bool in_prefill(const struct group *g)
{
    for (int32_t i = 0; i < g->width; i++) {
        if (g->seq[i].state == SEQ_LIVE && g->seq[i].n_computed < prefill_target(g, &g->seq[i])) {
            return true;
        }
    }
    return false;
}

int32_t decode_need(struct sched *s, const struct kvpool *pool, struct group *g)
{
    /* All holders of a shared block but the last copy it; mark[block] counts those
     * seen. */
    int32_t n = 0;

    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < g->width; i++) {
            const struct seq *q = &g->seq[i];
            int32_t b = q->n_computed / s->c.block_size;
            if (q->state != SEQ_LIVE || !can_sample(g, q)) {
                continue;
            }
            if (b >= q->n_blocks) {
                n += pass == 0;
                continue;
            }
            int32_t *seen = &s->mark[q->block[b]];
            if (pass == 1) {
                *seen = 0;
            } else if (pool->block[q->block[b]].count - *seen > 1) {
                ++*seen;
                n++;
            }
        }
    }
    return n;
}

void seq_own_next_block(struct sched *s, struct seq *q, struct plan *p)
{
    int32_t b = q->n_computed / s->c.block_size;

    if (b >= q->n_blocks) {
        q->block[q->n_blocks++] = take_block(s);
        return;
    }
    int32_t old = q->block[b];
    if (s->pool.block[old].count == 1) {
        return;
    }
    /* Copy-on-write: a sibling holds the last block too. */
    q->block[b] = take_block(s);
    q->n_synced = MIN(q->n_synced, b);
    p->copy[p->n_copy++] = (struct block_copy){.src = old, .dst = q->block[b]};
    kvpool_unref(&s->pool, old);
}
