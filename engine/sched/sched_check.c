/* The invariants of sched.h as code, for tests and debug builds: a check walks
 * everything. */
#include <string.h>

#include "engine/sched/decode/constrained.h"
#include "engine/sched/sched_impl.h"

static void mark_seq(struct sched *s, const struct seq *q, int32_t sign)
{
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        const struct block_table *t = &q->table[k];
        for (int32_t b = t->first; b < t->n_blocks; b++) {
            if (t->block[b] >= 0) {
                s->mark[t->block[b]] += sign;
            }
        }
    }
    for (int32_t i = 0; i < q->n_spare * sched_states_before(&s->c, s->c.n_kv_groups); i++) {
        s->mark[q->spare[i]] += sign;
    }
}

/* Add `sign` to mark[block] for every entry of every table of the list. */
static void mark_tables(struct sched *s, const struct group_list *l, int32_t sign)
{
    for (const struct group *g = l->first; g; g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            if (g->seq[i].state == SEQ_LIVE) {
                mark_seq(s, &g->seq[i], sign);
            }
        }
    }
}

static bool counts_match(struct sched *s, const struct kvpool *pool, const struct group_list *l,
                         const bool *pinned)
{
    bool same = true;

    mark_tables(s, l, 1);
    for (int32_t b = 0; b < pool->n_blocks; b++) {
        same = same && s->mark[b] + (pinned && pinned[b]) == pool->block[b].count;
    }
    mark_tables(s, l, -1);
    return same;
}

static const char *check_list(const struct group_list *l, int state)
{
    int32_t n = 0;
    const struct group *before = NULL;

    for (const struct group *g = l->first; g; before = g, g = g->next, n++) {
        if (g->state != state || g->prev != before) {
            return "S1: a group is in a queue that its state does not name";
        }
        if (before && state != GROUP_ENDED && !group_before(before, g)) {
            return "S1: a queue is out of order";
        }
    }
    return n == l->n && l->last == before ? NULL : "S1: a queue's ends do not match";
}

/* The number of children of `g` in its leftist heap; -1: the heap is broken there. */
static int32_t count_children(const struct group *g)
{
    const struct group *const child[] = {g->child, g->next};
    int32_t n = 0, rank[2] = {0};

    for (int i = 0; i < 2; i++) {
        if (!child[i]) {
            continue;
        }
        if (child[i]->prev != g || child[i]->tenant != g->tenant || group_before(child[i], g)) {
            return -1;
        }
        rank[i] = child[i]->heap_rank;
        n++;
    }
    return rank[0] >= rank[1] && g->heap_rank == rank[1] + 1 ? n : -1;
}

static bool holds_blocks(const struct sched *s, const struct seq *q)
{
    int32_t n = 0;

    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        n += q->table[k].n_blocks;
    }
    return n > 0;
}

static const char *check_waiting(const struct sched *s)
{
    int32_t n_children = 0; /* the others are the tops of heaps */

    for (int32_t i = 0; i < s->n_waiting; i++) {
        const struct group *g = s->waiting[i];
        int32_t n = count_children(g);
        n_children += MAX(n, 0);
        if (g->state != GROUP_WAITING || g->wait_index != i || n < 0 ||
            g->started != (i < s->n_preempted)) {
            return "S1: the heap of waiting groups is broken";
        }
        for (int32_t k = 0; k < g->n_seqs; k++) {
            if (g->seq[k].state == SEQ_LIVE &&
                (holds_blocks(s, &g->seq[k]) || g->seq[k].slot >= 0 || g->seq[k].n_computed > 0)) {
                return "S2: a waiting group holds memory, or counts on some";
            }
        }
    }
    return s->policy->check(s, s->n_waiting - n_children);
}

static const char *check_tables(const struct sched *s, const struct seq *q)
{
    const struct group *g = q->group;

    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        const struct block_table *t = &q->table[k];
        int32_t n_computed = q->n_computed - (sched_is_state(&s->c, k) ? q->n_spare : 0);
        int32_t seen = window_first_block(sched_kv_window(&s->c, k), n_computed);
        /* a sibling that waits for the root has no block inside the window */
        bool waits = !g->joined && q->index != g->root && s->c.kv_window[k] != 0;
        if ((int64_t)t->n_blocks * s->c.block_size < n_computed || t->first > seen) {
            return "S3: a sequence lacks a block for what it has computed";
        }
        for (int32_t b = seen; b < blocks_for(s, n_computed) && !waits; b++) {
            if (t->block[b] < 0) {
                return "S3: a sequence lacks a block that its next token sees";
            }
        }
        if (t->n_blocks > g->max_blocks) {
            return "S3: a table is longer than its group's longest";
        }
        if (t->n_blocks - t->first > s->most_blocks[k]) {
            return "S3: a table holds more blocks than its window may have";
        }
    }
    return NULL;
}

static const char *check_seqs(const struct sched *s)
{
    for (const struct group *g = s->running.first; g; g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            const struct seq *q = &g->seq[i];
            if (q->state != SEQ_LIVE) {
                continue;
            }
            if (q->n_computed > q->n_tokens || q->n_stored > q->n_computed ||
                q->n_out > q->n_tokens - g->n_prompt) {
                return "S3: a sequence's counters are out of order";
            }
            const char *wrong = check_tables(s, q);
            if (wrong) {
                return wrong;
            }
        }
    }
    return NULL;
}

static const char *check_memory(const struct sched *s)
{
    const struct group_list *lists[] = {&s->running, &s->swapped, &s->ended};
    int32_t n = s->n_preempted;
    int64_t lines = 0;

    for (size_t l = 0; l < ARRAY_LEN(lists); l++) {
        for (const struct group *g = lists[l]->first; g; g = g->next) {
            if (!g->memory && (g->state != GROUP_ENDED || g->started)) {
                return "S8: a group that runs or is swapped out has no memory";
            }
            n += g->memory != NULL;
        }
    }
    for (int32_t i = 0; i < s->n_waiting; i++) {
        if ((s->waiting[i]->memory != NULL) != (i < s->n_preempted)) {
            return "S8: a waiting group has memory and has not started, or the other way round";
        }
    }
    for (int32_t i = 0; i < s->regions.n_runs; i++) {
        lines += s->regions.run[i].n;
    }
    if (n == 0 && (s->regions.n_runs != 1 || lines != s->regions.n_lines)) {
        return "S8: memory of groups was lost";
    }
    return n == s->regions.n_taken ? NULL : "S8: groups with memory are miscounted";
}

static const char *check_swapped(struct sched *s)
{
    for (struct group *g = s->swapped.first; g; g = g->next) {
        if (g->resume_need >= 0 && g->resume_need != blocks_to_resume(s, g)) {
            return "S9: a swapped group does not need the number of blocks that was counted";
        }
    }
    return NULL;
}

/* A node is held by sequences of one group alone. */
static bool nodes_match(const struct group *g)
{
    for (int32_t i = 0; i < g->n_seqs; i++) {
        const struct constraint_node *node = g->seq[i].constraint;
        int32_t n_held = 0;
        if (!node) {
            continue;
        }
        for (int32_t k = 0; k < g->n_seqs; k++) {
            n_held += g->seq[k].constraint == node;
        }
        if (g->seq[i].state != SEQ_LIVE || g->state == GROUP_ENDED || n_held != node->n_held ||
            node->n_read > g->seq[i].n_out) {
            return false;
        }
    }
    return true;
}

static const char *check_constraints(const struct sched *s)
{
    const struct group_list *const list[] = {&s->running, &s->swapped, &s->ended};
    bool match = true;

    for (size_t i = 0; i < ARRAY_LEN(list); i++) {
        for (const struct group *g = list[i]->first; g; g = g->next) {
            match = match && nodes_match(g);
        }
    }
    for (int32_t i = 0; i < s->n_waiting; i++) {
        match = match && nodes_match(s->waiting[i]);
    }
    return match ? NULL : "S10: a grammar's state is not held by the sequences that share it";
}

static const char *check_reservations(const struct sched *s)
{
    int32_t n = 0;

    for (const struct group *g = s->running.first; g && s->contiguous; g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            if ((g->seq[i].reservation.size > 0) != (g->seq[i].state != SEQ_DONE)) {
                return "S4: a running sequence has no reservation, or one that is done has";
            } else {
                n += g->seq[i].reservation.size > 0;
            }
        }
    }
    return s->contiguous && n != s->contiguous->n_taken ? "S4: reservations do not add up" : NULL;
}

static const char *check_slots(struct sched *s)
{
    int32_t held = 0, reserved = 0, masks = 0;
    bool once = true;

    for (const struct group *g = s->running.first; g; g = g->next) {
        int32_t of_group = 0;
        masks += g->mask >= 0;
        for (int32_t i = 0; i < g->width; i++) {
            if (g->seq[i].slot < 0) {
                continue;
            }
            if (g->seq[i].state != SEQ_LIVE) {
                return "S4: a sequence that is not live holds a slot";
            }
            of_group++;
        }
        if (of_group > g->n_reserved) {
            return "S4: a group holds more slots than were reserved for it";
        }
        held += of_group;
        reserved += g->n_reserved;
    }
    uint8_t *seen = s->slot_seen;
    memset(seen, 0, (size_t)s->c.max_num_seqs);
    for (int32_t i = 0; i < s->n_free_slots; i++) {
        once = once && seen[s->free_slot[i]]++ == 0;
    }
    for (const struct group *g = s->running.first; g; g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            once = once && (g->seq[i].slot < 0 || seen[g->seq[i].slot]++ == 0);
        }
    }
    if (masks + s->n_masks != s->c.max_num_seqs) {
        return "S4: a mask is held twice, or lost";
    }
    if (!once || held + s->n_free_slots != s->c.max_num_seqs) {
        return "S4: a slot is held twice, or lost";
    }
    return reserved == s->n_reserved && reserved <= s->c.max_num_seqs
               ? NULL
               : "S4: reserved slots do not add up";
}

static bool writes_own_block(const struct sched *s, const struct plan_item *it, int32_t k,
                             int32_t b)
{
    const struct group *g = it->seq->group;
    const struct block_table *t = &it->seq->table[k];

    if (b < t->first || b >= t->n_blocks || t->block[b] < 0) {
        return false;
    }
    if (s->pool.block[t->block[b]].count == 1) {
        return true;
    }
    /* Two exceptions: the root of a recompute writes shared blocks before its siblings
     * read them; and in a step that forks behind the prompt the parent writes a block
     * that its children read from the next step on. */
    return (it->seq->index == g->root && (b + 1) * s->c.block_size <= g->n_shared) ||
           it->n_sampled > 1;
}

/* The same for all tokens of an item; the states behind drafts go to spare blocks. */
static bool writes_own_blocks(const struct sched *s, const struct plan_item *it, int32_t k)
{
    int32_t n = sched_is_state(&s->c, k) ? it->n - it->n_verify : it->n;
    int32_t last = (it->first + n - 1) / s->c.block_size;

    for (int32_t b = it->first / s->c.block_size; b <= last; b++) {
        if (!writes_own_block(s, it, k, b)) {
            return false;
        }
    }
    for (int32_t i = 0; i < it->n - n; i++) {
        int32_t block = it->seq->spare[sched_states_before(&s->c, k) * it->seq->n_spare + i];
        if (it->seq->n_spare != it->n_verify || s->pool.block[block].count != 1) {
            return false;
        }
    }
    return true;
}

static const char *check_plan(const struct sched *s, const struct plan *p)
{
    if (p->n_tokens > s->c.max_num_batched_tokens || p->n_items > s->c.max_num_seqs ||
        p->n_logits > s->c.max_logits || p->n_samples > s->c.max_logits) {
        return "S5: a step is larger than its budget";
    }
    for (int32_t i = 0; i < p->n_items; i++) {
        const struct plan_item *it = &p->item[i];
        if (it->n < 1 || (it->n == 1) != (i < p->n_decode)) {
            return "S5: items of one token do not come first";
        }
        for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
            if (!writes_own_blocks(s, it, k)) {
                return "S6: a step writes a block that others hold";
            }
        }
    }
    return NULL;
}

static int32_t flights_of(const struct sched *s, const struct group *g)
{
    int32_t n = 0;

    for (int32_t f = 0; f < s->n_in_flight; f++) {
        bool named = false;
        for (int32_t i = 0; i < s->in_flight[f]->n_items; i++) {
            named = named || s->in_flight[f]->item[i].seq->group == g;
        }
        n += named;
    }
    return n;
}

static const char *check_flights(const struct sched *s)
{
    const struct group_list *lists[] = {&s->running, &s->swapped, &s->ended};

    for (size_t l = 0; l < ARRAY_LEN(lists); l++) {
        for (const struct group *g = lists[l]->first; g; g = g->next) {
            if (g->n_inflight != flights_of(s, g)) {
                return "S7: a group's steps in flight are miscounted";
            }
        }
    }
    return NULL;
}

const char *sched_check(struct sched *s, const struct plan *p)
{
    const char *wrong = kvpool_check(&s->pool);

    if (!wrong) {
        wrong = kvpool_check(&s->host);
    }
    if (!wrong) {
        wrong = prefix_check(&s->prefix);
    }
    if (!wrong) {
        wrong = check_list(&s->running, GROUP_RUNNING);
    }
    if (!wrong) {
        wrong = check_list(&s->swapped, GROUP_SWAPPED);
    }
    if (!wrong) {
        wrong = check_list(&s->ended, GROUP_ENDED);
    }
    if (!wrong) {
        wrong = check_waiting(s);
    }
    if (!wrong && !counts_match(s, &s->pool, &s->running, s->pinned)) {
        wrong = "S2: a block's count is not the number of tables that hold it";
    }
    if (!wrong && !counts_match(s, &s->host, &s->swapped, NULL)) {
        wrong = "S2: a host block's count is not the number of tables that hold it";
    }
    if (!wrong) {
        wrong = check_seqs(s);
    }
    if (!wrong) {
        wrong = check_slots(s);
    }
    if (!wrong) {
        wrong = check_reservations(s);
    }
    if (!wrong) {
        wrong = check_memory(s);
    }
    if (!wrong) {
        wrong = check_swapped(s);
    }
    if (!wrong) {
        wrong = check_constraints(s);
    }
    if (!wrong && p && p->step > 0) {
        wrong = check_plan(s, p);
    }
    return wrong ? wrong : check_flights(s);
}
