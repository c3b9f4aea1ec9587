/* Transitions to RUNNING: admission of a waiting group, with blocks for everything that
 * its prefill will write, and resumption of a swapped one. */
#include <assert.h>
#include <string.h>

#include "engine/sched/sched_impl.h"

/* ---- WAITING -> RUNNING ---- */

/* The blocks that an admission takes: those of the root, of which all live sequences
 * share the first `shared`, and the further ones of each sibling. A group that is
 * recomputed shares the full blocks of its prompt: the root computes them, its siblings
 * wait (group->n_shared) and then compute the rest on their own. */
struct demand {
    int32_t blocks;     /* all, those found in the prefix cache included */
    int32_t shared;     /* leading blocks that all live sequences share */
    int32_t found;      /* leading blocks found in the prefix cache */
    int32_t found_held; /* those of them that some table holds already */
};

static int32_t blocks_for(const struct sched *s, int32_t n_tokens)
{
    return (int32_t)div_ceil(n_tokens, s->c.block_size);
}

static void demand_init(const struct sched *s, struct group *g, struct demand *d)
{
    *d = (struct demand){0};
    if (g->n_live > 1) {
        d->shared = (g->n_prompt - 1) / s->c.block_size; /* each computes at least one token */
    }
    for (int32_t i = 0; i < g->n_seqs; i++) {
        if (g->seq[i].state == SEQ_LIVE) {
            d->blocks += blocks_for(s, prefill_target(g, &g->seq[i])) - d->shared;
        }
    }
    d->blocks += d->shared;
}

/* The cached block with the tokens of block i of `q`, whose chain ends before it; -1:
 * none. */
static int32_t find_block(struct sched *s, struct seq *q, int32_t i)
{
    for (int32_t k = 0; k < s->c.block_size; k++) {
        s->tokens[k] = seq_token(q, i * s->c.block_size + k);
    }
    return prefix_find(&s->prefix, &q->chain, s->tokens);
}

/* Look up the prompt in the prefix cache. The found blocks are in s->hit; their counts
 * do not change. */
static void find_prefix(struct sched *s, struct group *g, struct demand *d)
{
    struct seq *q = group_first_live(g);
    int32_t size = s->c.block_size;
    int32_t most =
        /* the last token is always computed */
        g->n_live > 1 ? d->shared : (prefill_target(g, q) - 1) / size;

    prefix_start(&s->prefix, &q->chain, g->request->params.cache_salt);
    if (!s->c.prefix_cache || (g->scores && g->n_scores_planned < g->n_prompt - 1)) {
        return; /* scores need every prompt position computed */
    }
    while (d->found < most) {
        int32_t b = find_block(s, q, d->found);
        if (b < 0) {
            break;
        }
        d->found_held += s->pool.block[b].count > 0;
        s->hit[d->found++] = b;
    }
}

/* Blocks that an admission must leave free, so that it does not cause a preemption soon
 * after: 1 % of the pool, and what running sequences write in STEPS steps, at most half
 * a block each. A few steps suffice: a larger reserve prevents hardly more preemptions,
 * and keeps requests waiting. */
static int32_t watermark(const struct sched *s)
{
    enum { STEPS = 8 };
    int32_t n_seqs = s->c.max_num_seqs - s->n_free_slots;

    if (s->contiguous) {
        return 0; /* running groups have reserved all that they will need */
    }
    return s->running.n > 0 ? s->c.n_blocks / 100 + n_seqs * STEPS / MAX(s->c.block_size, 2 * STEPS)
                            : 0;
}

static bool slots_fit(const struct sched *s, int32_t n_slots)
{
    return s->n_reserved + n_slots <= s->c.max_num_seqs;
}

/* Whether to look up a group in the prefix cache that did not fit before: if more
 * blocks are available, or after some steps. Hashing a long prompt in every step would
 * cost more than it finds. */
static bool worth_probing(const struct sched *s, const struct group *g, int32_t available,
                          int32_t blocks)
{
    enum { AGAIN_AFTER_STEPS = 32 };

    return blocks <= available || g->probe_step == 0 || available > g->probe_available ||
           s->step >= g->probe_step + AGAIN_AFTER_STEPS;
}

static bool blocks_fit(struct sched *s, struct group *g, struct demand *d)
{
    int32_t available = kvpool_available(&s->pool) - watermark(s);

    demand_init(s, g, d);
    if (!worth_probing(s, g, available, d->blocks)) {
        return false;
    }
    find_prefix(s, g, d);
    if (d->blocks - d->found_held <= available) {
        return true;
    }
    g->probe_available = available;
    g->probe_step = s->step + 1;
    return false;
}

static void extend_table(struct sched *s, struct seq *q, int32_t n_blocks)
{
    while (q->n_blocks < n_blocks) {
        q->block[q->n_blocks++] = take_block(s);
    }
}

static void take_blocks(struct sched *s, struct group *g, const struct demand *d)
{
    struct seq *root = group_first_live(g);

    for (int32_t b = 0; b < d->found; b++) {
        root->block[b] = s->hit[b];
        kvpool_ref(&s->pool, root->block[b]);
    }
    root->n_blocks = d->found;
    root->n_computed = root->n_stored = d->found * s->c.block_size;
    extend_table(s, root, blocks_for(s, prefill_target(g, root)));
    seq_take_slot(s, root);
    for (struct seq *q = root + 1; q < g->seq + g->width; q++) {
        if (q->state != SEQ_LIVE) {
            continue;
        }
        for (int32_t b = 0; b < d->shared; b++) {
            q->block[b] = root->block[b];
            kvpool_ref(&s->pool, q->block[b]);
        }
        q->n_blocks = d->shared;
        q->n_computed = q->n_stored = d->shared * s->c.block_size;
        prefix_start(&s->prefix, &q->chain, g->request->params.cache_salt);
        extend_table(s, q, blocks_for(s, prefill_target(g, q)));
        seq_take_slot(s, q);
    }
}

static void group_reserve(struct sched *s, struct group *g)
{
    reserve_slots(s, g, group_slots(g));
    if (g->request->params.n_allowed > 0) {
        g->mask = s->mask[--s->n_masks];
    }
}

static void admit(struct sched *s, struct group *g, const struct demand *d, int64_t now_us)
{
    int32_t n_computed = 0;

    waiting_remove(s, g);
    group_reserve(s, g);
    take_blocks(s, g, d);
    g->root = group_first_live(g)->index;
    g->n_shared = d->shared * s->c.block_size;
    if (!g->started) {
        g->started = true;
        g->admitted_us = now_us;
        g->cached_tokens = g->seq[g->root].n_computed;
        s->counted.prefix_queries += (uint64_t)g->n_prompt;
        s->counted.prefix_hits += (uint64_t)g->cached_tokens;
        n_computed = g->n_prompt - g->cached_tokens;
    }
    if (s->policy->admitted) {
        s->policy->admitted(s, g, n_computed);
    }
    g->state = GROUP_RUNNING;
    list_insert(&s->running, g);
}

/* Take the group's memory and, without paging, its reservations; or neither. */
static bool take_memory(struct sched *s, struct group *g)
{
    bool started = g->memory != NULL;

    if (!started && !group_start(s, g)) {
        return false;
    }
    if (take_reservations(s, g)) {
        return true;
    }
    if (!started) {
        group_end_memory(s, g);
    }
    return false;
}

bool fits_now(struct sched *s, struct group *g)
{
    struct demand d;
    bool started = g->memory != NULL;

    if (!slots_fit(s, group_slots(g)) || !can_start(s, g) || !blocks_fit(s, g, &d)) {
        return false;
    }
    if (!s->contiguous) {
        return true;
    }
    if (!take_memory(s, g)) {
        return false;
    }
    give_reservations(s, g);
    if (!started) {
        group_end_memory(s, g);
    }
    return true;
}

struct group *sched_admit(struct sched *s, int64_t now_us)
{
    struct group *g = waiting_first(s), *swapped = s->policy->first_swapped(s);
    struct demand d;

    if (!g || s->tokens_left <= 0 || s->admission_closed) {
        return NULL;
    }
    if (g->n_inflight > 0) { /* just preempted: a step in flight still samples a token of it */
        return NULL;
    }
    if (swapped && !goes_before_swapped(s, g, swapped)) {
        return NULL;
    }
    if (!slots_fit(s, group_slots(g)) || !can_start(s, g) || !blocks_fit(s, g, &d) ||
        !take_memory(s, g)) {
        return NULL;
    }
    admit(s, g, &d, now_us);
    return g;
}

int32_t sched_pin(struct sched *s, const int32_t *token, int32_t n_tokens)
{
    int32_t n = 0, size = s->c.block_size;
    struct prefix_chain chain;

    prefix_start(&s->prefix, &chain, NULL);
    while ((chain.n_blocks + 1) * size <= n_tokens) {
        int32_t b = prefix_find(&s->prefix, &chain, token + chain.n_blocks * size);
        if (b < 0) {
            break;
        }
        if (s->pinned[b]) {
            continue;
        }
        s->pinned[b] = true;
        prefix_share(&s->prefix, b);
        kvpool_ref(&s->pool, b);
        n++;
    }
    return n;
}

/* ---- SWAPPED -> RUNNING ---- */

static int32_t host_blocks(struct sched *s, struct group *g)
{
    int32_t n = 0;

    for (int pass = 0; pass < 2; pass++) { /* count, then clear the marks */
        for (int32_t i = 0; i < g->width; i++) {
            for (int32_t b = 0; g->seq[i].state == SEQ_LIVE && b < g->seq[i].n_blocks; b++) {
                int32_t *mark = &s->mark[g->seq[i].block[b]];
                n += pass == 0 && *mark == 0;
                *mark = pass == 0;
            }
        }
    }
    return n;
}

/* Blocks that it needs besides the swapped ones to run at once: for the rest of its
 * prefill, or for its next tokens. */
static int32_t blocks_missing(struct sched *s, struct group *g)
{
    int32_t n = 0;

    if (!in_prefill(g)) {
        return decode_need(s, &s->host, g);
    }
    for (int32_t i = 0; i < g->width; i++) {
        const struct seq *q = &g->seq[i];
        if (q->state == SEQ_LIVE) {
            n += MAX(blocks_for(s, prefill_target(g, q)) - q->n_blocks, 0);
        }
    }
    return n;
}

int32_t blocks_to_resume(struct sched *s, struct group *g)
{
    return host_blocks(s, g) + blocks_missing(s, g);
}

/* Find the full blocks of a sequence that the prefix cache still has: they need no copy
 * from the host. mark[host block] becomes the device block + 1, and the device block's
 * count is raised for the mark, so that it is not taken. Blocks behind them are
 * published again at commit. */
static void find_on_device(struct sched *s, struct seq *q)
{
    prefix_start(&s->prefix, &q->chain, q->group->request->params.cache_salt);
    while (s->c.prefix_cache && (q->chain.n_blocks + 1) * s->c.block_size <= q->n_computed) {
        int32_t i = q->chain.n_blocks, *mark = &s->mark[q->block[i]];
        int32_t b = find_block(s, q, i);
        if (b < 0) {
            return;
        }
        if (*mark > 0) {
            continue;
        }
        *mark = b + 1;
        kvpool_ref(&s->pool, b);
        s->found[s->n_found++] = q->block[i];
    }
}

/* Replace a host block by a device block; mark[host block] is that + 1. */
static int32_t swap_in_block(struct sched *s, int32_t h, struct plan *p)
{
    if (s->mark[h] > 0) {
        kvpool_ref(&s->pool, s->mark[h] - 1);
    } else {
        s->mark[h] = take_block(s) + 1;
        p->swap_in[p->n_swap_in++] = (struct block_copy){.src = h, .dst = s->mark[h] - 1};
    }
    kvpool_unref(&s->host, h);
    return s->mark[h] - 1;
}

static void clear_marks(struct sched *s, const struct plan *p, int32_t first_in)
{
    for (int32_t i = first_in; i < p->n_swap_in; i++) {
        s->mark[p->swap_in[i].src] = 0;
    }
    for (int32_t i = 0; i < s->n_found; i++) {
        kvpool_unref(&s->pool, s->mark[s->found[i]] - 1);
        s->mark[s->found[i]] = 0;
    }
    s->counted.swap_in_copied += (uint64_t)(p->n_swap_in - first_in);
    s->counted.swap_in_found += (uint64_t)s->n_found;
    s->n_found = 0;
}

static void swap_in(struct sched *s, struct group *g, struct plan *p)
{
    int32_t first_in = p->n_swap_in;

    for (int32_t i = 0; i < g->width; i++) {
        if (g->seq[i].state == SEQ_LIVE) {
            find_on_device(s, &g->seq[i]);
        }
    }
    for (int32_t i = 0; i < g->width; i++) {
        struct seq *q = &g->seq[i];
        if (q->state != SEQ_LIVE) {
            continue;
        }
        for (int32_t b = 0; b < q->n_blocks; b++) {
            q->block[b] = swap_in_block(s, q->block[b], p);
        }
        q->n_stored = q->n_computed;
        seq_take_slot(s, q);
    }
    clear_marks(s, p, first_in);
    /* Only after the marks are cleared: taking blocks must not depend on them. */
    for (int32_t i = 0; i < g->width; i++) {
        if (g->seq[i].state == SEQ_LIVE) {
            extend_table(s, &g->seq[i], blocks_for(s, prefill_target(g, &g->seq[i])));
        }
    }
}

struct group *sched_resume(struct sched *s, struct plan *p)
{
    if (!s->swapped.first || s->preempted) {
        return NULL;
    }
    struct group *g = s->policy->first_swapped(s), *waiting = waiting_first(s);
    if (!g || g->n_inflight > 0 || (waiting && goes_before_swapped(s, waiting, g))) {
        return NULL;
    }
    if (g->resume_need < 0) { /* it does not change while nothing is in flight */
        g->resume_need = blocks_to_resume(s, g);
    }
    int32_t need = g->resume_need + watermark(s);
    if (!slots_fit(s, group_slots(g)) || need > kvpool_available(&s->pool) ||
        !take_reservations(s, g)) {
        return NULL;
    }
    list_remove(&s->swapped, g);
    group_reserve(s, g);
    swap_in(s, g, p);
    g->state = GROUP_RUNNING;
    list_insert(&s->running, g);
    return g;
}
