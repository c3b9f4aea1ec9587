/* Blocks and slot of one sequence, and the verbs fork and free (append: decode.c). */
#include <assert.h>
#include <string.h>

#include "engine/sched/decode/constrained.h"
#include "engine/sched/sched_impl.h"

int32_t take_block(struct sched *s)
{
    prefix_drop(&s->prefix, kvpool_peek(&s->pool));
    int32_t b = kvpool_take(&s->pool), next = kvpool_peek(&s->pool);
    if (next >= 0) { /* what will be read of the block that is taken after this one */
        __builtin_prefetch(&s->prefix.entry[next]);
        __builtin_prefetch(&s->pool.block[next]);
    }
    return b;
}

void seq_take_slot(struct sched *s, struct seq *q)
{
    assert(s->n_free_slots > 0 && q->slot < 0);
    q->slot = s->free_slot[--s->n_free_slots];
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        q->table[k].n_synced = 0;
    }
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

/* Tail first: the head of a chain is worth most to the prefix cache. */
static void drop_blocks(struct sched *s, struct block_table *t)
{
    while (t->n_blocks > t->first) {
        int32_t b = t->block[--t->n_blocks];
        if (b >= 0) {
            kvpool_unref(&s->pool, b);
        }
    }
    t->n_blocks = t->first = 0;
}

static void drop_host_blocks(struct sched *s, struct block_table *t)
{
    while (t->n_blocks > t->first) {
        int32_t h = t->block[--t->n_blocks];
        if (h < 0) {
            continue;
        }
        kvpool_unref(&s->host, h);
        if (s->host.block[h].count == 0) {
            forget_swap_out(s, h);
        }
    }
    t->n_blocks = t->first = 0;
}

void seq_drop_spare(struct sched *s, struct seq *q)
{
    int32_t n = q->n_spare * sched_states_before(&s->c, s->c.n_kv_groups);

    while (n > 0) {
        n--;
        if (q->spare[n] >= 0) {
            kvpool_unref(&s->pool, q->spare[n]);
        }
    }
    q->n_spare = 0;
}

void seq_drop_slot(struct sched *s, struct seq *q)
{
    if (q->slot >= 0) {
        s->free_slot[s->n_free_slots++] = q->slot;
        q->slot = -1;
    }
}

void seq_drop_memory(struct sched *s, struct seq *q)
{
    bool swapped = q->group->state == GROUP_SWAPPED;

    seq_drop_spare(s, q);
    for (int32_t k = s->c.n_kv_groups - 1; k >= 0; k--) {
        if (swapped) {
            drop_host_blocks(s, &q->table[k]);
        } else {
            drop_blocks(s, &q->table[k]);
        }
    }
    seq_drop_slot(s, q);
}

/* The child's empty table becomes a copy of its parent's. */
static void share_table(struct kvpool *pool, struct block_table *child,
                        const struct block_table *parent)
{
    for (int32_t i = parent->first; i < parent->n_blocks; i++) {
        child->block[i] = parent->block[i];
        if (parent->block[i] >= 0) {
            kvpool_ref(pool, parent->block[i]);
        }
    }
    child->first = parent->first;
    child->n_blocks = parent->n_blocks;
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
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        share_table(pool, &child->table[k], &parent->table[k]);
    }
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

/* ---- groups with a window ---- */

/* The first entry of q's table of KV group k that a token to come sees. */
static int32_t first_seen(const struct sched *s, const struct seq *q, int32_t k)
{
    return window_first_block(sched_kv_window(&s->c, k), q->n_computed);
}

/* The same of one that is still to be published, in a group of states. */
static int32_t first_unpublished(const struct sched *s, const struct seq *q)
{
    int32_t distance = s->c.snapshot_distance;

    return (q->n_stored / distance + 1) * (distance / s->c.block_size) - 1;
}

/* Returns whether that gave back blocks. */
static bool drop_below(struct sched *s, struct block_table *t, int32_t first)
{
    bool some = false;

    for (; t->first < MIN(first, t->n_blocks); t->first++) {
        if (t->block[t->first] >= 0) {
            kvpool_unref(&s->pool, t->block[t->first]);
            some = true;
        }
    }
    return some;
}

void seq_trim(struct sched *s, struct seq *q)
{
    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        int32_t seen = first_seen(s, q, k), first = seen;
        if (sched_is_state(&s->c, k) && s->c.prefix_cache) {
            first = MIN(first, first_unpublished(s, q));
            first = MAX(first, seen + s->window_blocks[k] - s->most_blocks[k]);
        }
        drop_below(s, &q->table[k], first);
    }
}

bool seq_drop_unpublished(struct sched *s, struct seq *q)
{
    bool some = false;

    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        some = drop_below(s, &q->table[k], first_seen(s, q, k)) || some;
    }
    return some;
}

int32_t table_end(const struct sched *s, int32_t k, int32_t first, int32_t n_tokens)
{
    return MIN(blocks_for(s, n_tokens), first + s->window_blocks[k]);
}

/* Tokens of its prefill that all tables have blocks for. */
static int32_t tokens_held(const struct sched *s, const struct seq *q)
{
    int32_t n_tokens = prefill_target(q->group, q);

    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        n_tokens = (int32_t)MIN(n_tokens, (int64_t)q->table[k].n_blocks * s->c.block_size);
    }
    return n_tokens;
}

int32_t seq_extend(struct sched *s, struct seq *q)
{
    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        struct block_table *t = &q->table[k];
        int32_t end = table_end(s, k, first_seen(s, q, k), prefill_target(q->group, q));
        if (end - t->n_blocks > kvpool_available(&s->pool)) {
            seq_drop_unpublished(s, q);
        }
        while (t->n_blocks < end && kvpool_available(&s->pool) > 0) {
            t->block[t->n_blocks++] = take_block(s);
        }
    }
    return tokens_held(s, q);
}

/* Tables of states that end at entry `at` or before, and may have one there. */
static int32_t states_lacking(const struct sched *s, const struct seq *q, int32_t at)
{
    int32_t n = 0;

    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        n += sched_is_state(&s->c, k) && q->table[k].n_blocks <= at;
    }
    return n;
}

int32_t seq_extend_states(struct sched *s, struct seq *q, int32_t n_tokens)
{
    /* Others may want a block for each sequence in the next step. */
    int32_t reserve = s->n_reserved * s->c.n_kv_groups, end = blocks_for(s, n_tokens);

    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        if (sched_is_state(&s->c, k)) {
            end = MIN(end, q->table[k].first + s->most_blocks[k]);
        }
    }
    for (int32_t at = tokens_held(s, q) / s->c.block_size; at < end; at++) {
        if (kvpool_available(&s->pool) - states_lacking(s, q, at) < reserve) {
            break;
        }
        for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
            struct block_table *t = &q->table[k];
            if (sched_is_state(&s->c, k) && t->n_blocks <= at) {
                t->block[t->n_blocks++] = take_block(s);
            }
        }
    }
    return tokens_held(s, q);
}

static void take_over(struct sched *s, struct block_table *t, const struct block_table *root,
                      int32_t end)
{
    for (int32_t b = t->first; b < end; b++) {
        t->block[b] = root->block[b];
        kvpool_ref(&s->pool, t->block[b]);
    }
    t->n_synced = MIN(t->n_synced, t->first);
}

void group_join(struct sched *s, struct group *g)
{
    const struct seq *root = &g->seq[g->root];

    for (int32_t i = 0; i < g->width; i++) {
        struct seq *q = &g->seq[i];
        for (int32_t k = 1; k < s->c.n_kv_groups && q->state == SEQ_LIVE && q != root; k++) {
            if (s->c.kv_window[k] != 0) {
                take_over(s, &q->table[k], &root->table[k], g->n_shared / s->c.block_size);
            }
        }
    }
    g->joined = true;
}

/* ---- publishing ---- */

/* Whether a block of states at index i holds those behind its last token: a step may
 * have passed over others. */
static bool is_snapshot(const struct sched *s, int32_t i)
{
    return (int64_t)(i + 1) * s->c.block_size % s->c.snapshot_distance == 0;
}

/* The blocks of the further KV groups at index i become peers of `entry`. */
static void publish_peers(struct sched *s, const struct seq *q, int32_t i, int32_t entry)
{
    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        const struct block_table *t = &q->table[k];
        bool whole = s->c.kv_window[k] != KV_WINDOW_STATE || is_snapshot(s, i);
        if (whole && i >= t->first && t->block[i] >= 0) {
            prefix_attach(&s->prefix, entry, k, t->block[i]);
        }
    }
}

void seq_publish(struct sched *s, struct seq *q)
{
    int32_t size = s->c.block_size;

    while (has_block_to_publish(s, q)) {
        int32_t first = q->chain.n_blocks * size;
        /* Its tokens are of the prompt, of the output, or of both. */
        assert(first + size <= q->n_tokens);
        for (int32_t i = 0; i < size; i++) {
            s->tokens[i] = seq_token(q, first + i);
        }
        int32_t i = q->chain.n_blocks;
        int32_t entry = prefix_publish(&s->prefix, &q->chain, q->table[0].block[i], s->tokens);
        if (entry >= 0) {
            publish_peers(s, q, i, entry);
        }
    }
}

void seq_fetch_block(const struct sched *s, const struct seq *q)
{
    int32_t size = s->c.block_size, i = q->chain.n_blocks, first = i * size;

    if (q->state != SEQ_LIVE || i >= q->table[0].n_blocks ||
        first + size > q->group->n_prompt + q->n_out) {
        return;
    }
    for (int32_t t = 0; t < size; t++) {
        s->tokens[t] = seq_token(q, first + t);
    }
    prefix_fetch(&s->prefix, &q->chain, q->table[0].block[i], s->tokens);
}

/* Whether q's table of KV group k has a block at index i that nothing else has. */
static bool holds_alone(const struct sched *s, const struct seq *q, int32_t k, int32_t i)
{
    const struct block_table *t = &q->table[k];

    return i >= t->first && i < t->n_blocks && t->block[i] >= 0 &&
           s->pool.block[t->block[i]].count == 1 && !s->pool.block[t->block[i]].hashed;
}

void seq_publish_tail(struct sched *s, struct seq *q)
{
    const struct group *g = q->group;
    int32_t i = q->chain.n_blocks, first = i * s->c.block_size, n = q->n_computed - first;

    if (!s->c.prefix_cache || !sched_has_states(&s->c) || g->state != GROUP_RUNNING || g->beams ||
        n < prefix_least_tail(&s->prefix) || n >= s->c.block_size ||
        q->n_computed > g->n_prompt + q->n_out) {
        return;
    }
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        if (!holds_alone(s, q, k, i)) {
            return;
        }
    }
    for (int32_t t = 0; t < n; t++) {
        s->tokens[t] = seq_token(q, first + t);
    }
    int32_t block = q->table[0].block[i];
    if (!prefix_publish_tail(&s->prefix, &q->chain, block, s->tokens, n)) {
        return;
    }
    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        prefix_attach(&s->prefix, block, k, q->table[k].block[i]);
    }
}

int32_t mark_blocks(struct sched *s, const struct seq *q, int32_t end, bool on)
{
    int32_t n = 0;

    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        const struct block_table *t = &q->table[k];
        for (int32_t b = t->first; b < MIN(t->n_blocks, end); b++) {
            if (t->block[b] >= 0) {
                n += on && s->mark[t->block[b]] == 0;
                s->mark[t->block[b]] = on;
            }
        }
    }
    return n;
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

/* decode_need in KV group k of a group of one sequence. It alone holds the block that
 * it writes next: what it took from the cache are full blocks before it, and a tail,
 * which has left the cache. */
static int32_t need_alone(const struct sched *s, const struct group *g, int32_t k)
{
    const struct seq *q = g->seq;

    return q->state == SEQ_LIVE && can_sample(g, q) && lacks_block(s, &q->table[k], q->n_computed);
}

/* decode_need in KV group k. */
static int32_t need_in(struct sched *s, const struct kvpool *pool, struct group *g, int32_t k)
{
    /* All holders of a shared block but the last copy it; mark[block] counts those
     * seen. */
    int32_t n = 0;

    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < g->width; i++) {
            const struct seq *q = &g->seq[i];
            const struct block_table *t = &q->table[k];
            int32_t b = q->n_computed / s->c.block_size;
            if (q->state != SEQ_LIVE || !can_sample(g, q)) {
                continue;
            }
            if (b >= t->n_blocks) {
                n += pass == 0;
                continue;
            }
            int32_t *seen = &s->mark[t->block[b]];
            if (pass == 1) {
                *seen = 0;
            } else if (pool->block[t->block[b]].count - *seen > 1) {
                ++*seen;
                n++;
            }
        }
    }
    return n;
}

int32_t decode_need(struct sched *s, const struct kvpool *pool, struct group *g)
{
    int32_t n = 0;

    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        n += g->width == 1 ? need_alone(s, g, k) : need_in(s, pool, g, k);
    }
    return n;
}

/* Copy-on-write of entry b, unless the table alone holds the block. */
static void own_block(struct sched *s, struct block_table *t, int32_t b, struct plan *p)
{
    int32_t old = t->block[b];

    if (s->pool.block[old].count == 1) {
        return;
    }
    t->block[b] = take_block(s);
    t->n_synced = MIN(t->n_synced, b);
    p->copy[p->n_copy++] = (struct block_copy){.src = old, .dst = t->block[b]};
    kvpool_unref(&s->pool, old);
}

void seq_void(struct sched *s, struct seq *q)
{
    assert(s->c.n_kv_groups == 1 && q->state == SEQ_LIVE);
    q->void_step = q->sample_step;
    q->n_tokens = q->group->n_prompt + q->n_out;
    q->n_computed = MIN(q->n_computed, q->n_tokens - 1);
}

void seq_own_next_block(struct sched *s, struct seq *q, struct plan *p)
{
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        struct block_table *t = &q->table[k];
        if (lacks_block(s, t, q->n_computed)) {
            t->block[t->n_blocks++] = take_block(s);
        } else if (q->group->width > 1) { /* a sibling may hold the block too */
            own_block(s, t, q->n_computed / s->c.block_size, p);
        }
    }
}
