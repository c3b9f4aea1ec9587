/* Transitions to RUNNING: admission of a waiting group, with blocks for everything that
 * its prefill will write, and resumption of a swapped one. */
#include <assert.h>
#include <string.h>

#include "engine/sched/sched_impl.h"

/* ---- WAITING -> RUNNING ---- */

/* The blocks that an admission takes: those of the root, of which all live sequences
 * share the first `shared`, and the further ones of each sibling. A group that is
 * recomputed shares the full blocks of its prompt: the root computes them, its siblings
 * wait (group->n_shared) and then compute the rest on their own. In groups with a
 * window a sequence takes blocks for as much as it may hold at a time; siblings get the
 * shared ones when the root has computed them (group_join), because until then the root
 * gives back those behind its window. */
struct demand {
    int32_t blocks;     /* all that it takes, those found in the prefix cache included */
    int32_t shared;     /* leading entries of its tables that all live sequences share */
    int32_t found;      /* leading entries whose blocks the prefix cache has */
    int32_t tail;       /* and the block of the tail behind them (prefix.h); -1: none */
    int32_t tokens;     /* that all of these hold */
    int32_t found_held; /* those of the blocks that some table holds already */
};

int32_t blocks_for(const struct sched *s, int32_t n_tokens)
{
    return (int32_t)div_ceil(n_tokens, s->c.block_size);
}

/* The first entry of a table of KV group k that n_tokens tokens leave. */
static int32_t first_behind(const struct sched *s, int32_t k, int32_t n_tokens)
{
    return window_first_block(sched_kv_window(&s->c, k), n_tokens);
}

/* The same if its leading n entries are there. */
static int32_t first_entry(const struct sched *s, int32_t k, int32_t n)
{
    return first_behind(s, k, n * s->c.block_size);
}

/* Set d->blocks by d->shared and d->found. */
static void count_blocks(const struct sched *s, struct group *g, struct demand *d)
{
    const struct seq *root = group_first_live(g);

    d->blocks = 0;
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        for (int32_t i = 0; i < g->n_seqs; i++) {
            const struct seq *q = &g->seq[i];
            int32_t first =
                q == root ? first_behind(s, k, d->tokens) : first_entry(s, k, d->shared);
            if (q->state == SEQ_LIVE) {
                d->blocks +=
                    table_end(s, k, first, prefill_target(g, q)) - (q == root ? first : d->shared);
            }
        }
    }
}

static void demand_init(const struct sched *s, struct group *g, struct demand *d)
{
    *d = (struct demand){.tail = -1};
    if (g->n_live > 1) {
        d->shared = (g->n_prompt - 1) / s->c.block_size; /* each computes at least one token */
    }
    count_blocks(s, g, d);
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

/* Whether every KV group has the blocks that the token behind n found entries sees. */
static bool windows_found(const struct sched *s, int32_t n)
{
    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        for (int32_t i = first_entry(s, k, n); i < n; i++) {
            if (prefix_block(&s->prefix, s->hit[i], k) < 0) {
                return false;
            }
        }
    }
    return true;
}

/* Shorten what was found to the longest prefix that all KV groups have. */
static void limit_to_windows(struct sched *s, struct seq *q, struct demand *d)
{
    int32_t n = d->found;

    while (!windows_found(s, n)) {
        n--;
    }
    if (n == d->found) {
        return;
    }
    d->found = 0; /* the chain goes back to its position behind n blocks */
    prefix_start(&s->prefix, &q->chain, q->group->request->params.cache_salt);
    while (d->found < n) {
        find_block(s, q, d->found++);
    }
}

/* Look for a tail behind the d->found entries, at most `most` tokens, whose blocks all
 * KV groups have. */
static void find_tail(struct sched *s, struct seq *q, struct demand *d, int32_t most)
{
    int32_t first = d->found * s->c.block_size, n = MIN(most - first, s->c.block_size - 1);

    for (int32_t i = 0; i < n; i++) {
        s->tokens[i] = seq_token(q, first + i);
    }
    int32_t tail = prefix_find_tail(&s->prefix, &q->chain, s->tokens, n, &n);
    for (int32_t k = 1; k < s->c.n_kv_groups && tail >= 0; k++) {
        bool whole = prefix_block(&s->prefix, tail, k) >= 0;
        for (int32_t i = first_behind(s, k, first + n); i < d->found && whole; i++) {
            whole = prefix_block(&s->prefix, s->hit[i], k) >= 0;
        }
        tail = whole ? tail : -1;
    }
    d->tail = tail;
    d->tokens = tail >= 0 ? first + n : 0;
}

static void count_held(const struct sched *s, struct demand *d)
{
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        for (int32_t i = first_behind(s, k, d->tokens); i < d->found; i++) {
            d->found_held += s->pool.block[prefix_block(&s->prefix, s->hit[i], k)].count > 0;
        }
    }
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
        s->hit[d->found++] = b;
    }
    if (sched_has_states(&s->c) && g->n_live == 1) {
        find_tail(s, q, d, prefill_target(g, q) - 1);
    }
    if (d->tail < 0) {
        limit_to_windows(s, q, d);
        d->tokens = d->found * size;
    }
    if (s->c.n_kv_groups > 1) {
        count_blocks(s, g, d);
    }
    count_held(s, d);
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
    int32_t writes = n_seqs * s->c.n_kv_groups * STEPS / MAX(s->c.block_size, 2 * STEPS);
    return s->running.n > 0 ? s->c.n_blocks / 100 + writes : 0;
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

static void extend_tables(struct sched *s, struct seq *q)
{
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        struct block_table *t = &q->table[k];
        int32_t end = table_end(s, k, t->first, prefill_target(q->group, q));
        while (t->n_blocks < end) {
            t->block[t->n_blocks++] = take_block(s);
        }
    }
}

static void take_found(struct sched *s, struct block_table *t, int32_t k, const struct demand *d)
{
    t->first = first_behind(s, k, d->tokens);
    t->n_blocks = d->found;
    for (int32_t b = t->first; b < d->found; b++) {
        t->block[b] = prefix_block(&s->prefix, s->hit[b], k);
        kvpool_ref(&s->pool, t->block[b]);
    }
    if (d->tail >= 0) {
        t->block[t->n_blocks] = prefix_block(&s->prefix, d->tail, k);
        kvpool_ref(&s->pool, t->block[t->n_blocks++]);
    }
}

/* The first n entries of a sibling's table are root's; with a window they stay empty
 * until group_join. */
static void take_shared(struct sched *s, struct block_table *t, const struct block_table *root,
                        int32_t k, int32_t n)
{
    t->first = first_entry(s, k, n);
    for (int32_t b = t->first; b < n; b++) {
        t->block[b] = s->c.kv_window[k] != 0 ? -1 : root->block[b];
        if (t->block[b] >= 0) {
            kvpool_ref(&s->pool, t->block[b]);
        }
    }
    t->n_blocks = n;
}

static void take_blocks(struct sched *s, struct group *g, const struct demand *d)
{
    struct seq *root = group_first_live(g);

    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        take_found(s, &root->table[k], k, d);
    }
    if (d->tail >= 0) {
        prefix_drop(&s->prefix, d->tail); /* its blocks are written to from now on */
    }
    root->n_computed = root->n_stored = d->tokens;
    extend_tables(s, root);
    seq_take_slot(s, root);
    for (struct seq *q = root + 1; q < g->seq + g->width; q++) {
        if (q->state != SEQ_LIVE) {
            continue;
        }
        for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
            take_shared(s, &q->table[k], &root->table[k], k, d->shared);
        }
        q->n_computed = q->n_stored = d->shared * s->c.block_size;
        prefix_start(&s->prefix, &q->chain, g->request->params.cache_salt);
        extend_tables(s, q);
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
    g->joined = d->shared == 0 || s->c.n_kv_groups == 1;
    if (!g->started) {
        g->started = true;
        g->admitted_us = now_us;
        g->cached_tokens = g->seq[g->root].n_computed;
        s->counted.prefix_queries += (uint64_t)g->n_prompt;
        s->counted.prefix_hits += (uint64_t)g->cached_tokens;
        n_computed = g->n_prompt - g->cached_tokens;
        step_pace_text_begins(&s->pace);
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

/* Pin a block that is not pinned yet; returns whether it was not. */
static bool pin_block(struct sched *s, int32_t block)
{
    if (block < 0 || s->pinned[block]) {
        return false;
    }
    s->pinned[block] = true;
    kvpool_ref(&s->pool, block);
    return true;
}

/* Pin the blocks that a prompt sees behind the first n_found blocks of hit[], or behind
 * as many of them as all KV groups have. */
static int32_t pin_peers(struct sched *s, int32_t n_found)
{
    int32_t n = 0;

    while (!windows_found(s, n_found)) {
        n_found--;
    }

    for (int32_t k = 1; k < s->c.n_kv_groups; k++) {
        for (int32_t i = first_entry(s, k, n_found); i < n_found; i++) {
            n += pin_block(s, prefix_block(&s->prefix, s->hit[i], k));
        }
    }
    return n;
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
        s->hit[chain.n_blocks - 1] = b;
        if (pin_block(s, b)) {
            prefix_share(&s->prefix, b);
            n++;
        }
    }
    return n + pin_peers(s, chain.n_blocks);
}

/* ---- SWAPPED -> RUNNING ---- */

static int32_t host_blocks(struct sched *s, struct group *g)
{
    int32_t n = 0;

    for (int32_t i = 0; i < g->width; i++) {
        n += g->seq[i].state == SEQ_LIVE ? mark_blocks(s, &g->seq[i], INT32_MAX, true) : 0;
    }
    for (int32_t i = 0; i < g->width; i++) {
        n += g->seq[i].state == SEQ_LIVE ? mark_blocks(s, &g->seq[i], INT32_MAX, false) : 0;
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
        for (int32_t k = 0; k < s->c.n_kv_groups && q->state == SEQ_LIVE; k++) {
            const struct block_table *t = &q->table[k];
            n += MAX(table_end(s, k, t->first, prefill_target(g, q)) - t->n_blocks, 0);
        }
    }
    return n;
}

int32_t blocks_to_resume(struct sched *s, struct group *g)
{
    return host_blocks(s, g) + blocks_missing(s, g);
}

static void mark_found(struct sched *s, int32_t host_block, int32_t block)
{
    if (s->mark[host_block] == 0) {
        s->mark[host_block] = block + 1;
        kvpool_ref(&s->pool, block);
        s->found[s->n_found++] = host_block;
    }
}

/* Find the full blocks of a sequence that the prefix cache still has: they need no copy
 * from the host. mark[host block] becomes the device block + 1, and the device block's
 * count is raised for the mark, so that it is not taken. Blocks behind them are
 * published again at commit. */
static void find_on_device(struct sched *s, struct seq *q)
{
    prefix_start(&s->prefix, &q->chain, q->group->request->params.cache_salt);
    while (s->c.prefix_cache && (q->chain.n_blocks + 1) * s->c.block_size <= q->n_computed) {
        int32_t i = q->chain.n_blocks;
        int32_t b = find_block(s, q, i);
        if (b < 0) {
            return;
        }
        for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
            int32_t h = i >= q->table[k].first ? q->table[k].block[i] : -1;
            int32_t device = prefix_block(&s->prefix, b, k);
            if (h >= 0 && device >= 0) {
                mark_found(s, h, device);
            }
        }
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
        for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
            struct block_table *t = &q->table[k];
            for (int32_t b = t->first; b < t->n_blocks; b++) {
                t->block[b] = t->block[b] < 0 ? -1 : swap_in_block(s, t->block[b], p);
            }
        }
        q->n_stored = q->n_computed;
        seq_take_slot(s, q);
    }
    clear_marks(s, p, first_in);
    /* Only after the marks are cleared: taking blocks must not depend on them. */
    for (int32_t i = 0; i < g->width; i++) {
        if (g->seq[i].state == SEQ_LIVE) {
            extend_tables(s, &g->seq[i]);
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
