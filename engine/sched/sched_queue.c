/* The queues: ordered lists of running and swapped groups, the list of ended ones, and
 * the waiting groups.
 *
 * Waiting groups are in one array, for walks over all of them, and in leftist heaps
 * (Crane, 1972), for their order: one heap for all or one a tenant, as the policy keeps
 * them. Such a heap needs no memory except links in the group, and is O(log n): of a
 * node's two children the right one has the lesser rank, which is the number of steps
 * down to the nearest missing child.
 */
#include <assert.h>

#include "engine/sched/sched_impl.h"

void list_append(struct group_list *l, struct group *g)
{
    g->prev = l->last;
    g->next = NULL;
    if (l->last) {
        l->last->next = g;
    } else {
        l->first = g;
    }
    l->last = g;
    l->n++;
}

/* In order; searched from the end, because `g` is usually the newest. */
void list_insert(struct group_list *l, struct group *g)
{
    struct group *after = l->last;

    while (after && group_before(g, after)) {
        after = after->prev;
    }
    if (!after || after == l->last) {
        if (after || !l->first) {
            list_append(l, g);
            return;
        }
        g->prev = NULL;
        g->next = l->first;
        l->first->prev = g;
        l->first = g;
        l->n++;
        return;
    }
    g->prev = after;
    g->next = after->next;
    after->next->prev = g;
    after->next = g;
    l->n++;
}

void list_remove(struct group_list *l, struct group *g)
{
    if (g->prev) {
        g->prev->next = g->next;
    } else {
        l->first = g->next;
    }
    if (g->next) {
        g->next->prev = g->prev;
    } else {
        l->last = g->prev;
    }
    g->prev = g->next = NULL;
    l->n--;
}

/* ---- leftist heaps of waiting groups ---- */

static int32_t rank_of(const struct group *g)
{
    return g ? g->heap_rank : 0;
}

/* Order the children of `g` by rank and set its own. False: its rank did not change. */
static bool heap_restore(struct group *g)
{
    int32_t before = g->heap_rank;

    if (rank_of(g->child) < rank_of(g->next)) {
        struct group *t = g->child;
        g->child = g->next;
        g->next = t;
    }
    g->heap_rank = rank_of(g->next) + 1;
    return g->heap_rank != before;
}

/* Merge two heaps along their right sides, which are short. */
static struct group *heap_meld(struct group *a, struct group *b)
{
    if (!a || !b) {
        return a ? a : b;
    }
    if (group_before(b, a)) {
        struct group *t = a;
        a = b;
        b = t;
    }
    a->next = heap_meld(a->next, b);
    a->next->prev = a;
    heap_restore(a);
    return a;
}

static struct group *heap_single(struct group *g)
{
    g->prev = g->next = g->child = NULL;
    g->heap_rank = 1;
    return g;
}

void heap_push(struct group **root, struct group *g)
{
    *root = heap_meld(*root, heap_single(g));
}

void heap_remove(struct group **root, struct group *g)
{
    struct group *above = g->prev, *rest = heap_meld(g->child, g->next);

    if (rest) {
        rest->prev = above;
    }
    if (!above) {
        *root = rest;
    } else if (above->child == g) {
        above->child = rest;
    } else {
        above->next = rest;
    }
    while (above && heap_restore(above)) { /* ranks may fall on the way to the root */
        above = above->prev;
    }
    heap_single(g);
}

/* ---- the waiting groups ---- */

static void waiting_place(struct sched *s, struct group *g, int32_t at)
{
    s->waiting[at] = g;
    g->wait_index = at;
}

void waiting_push(struct sched *s, struct group *g)
{
    int32_t at = s->n_waiting++;

    g->state = GROUP_WAITING;
    g->probe_step = 0;
    if (g->started) {
        int32_t in_front = s->n_preempted++;
        if (in_front < at) {
            waiting_place(s, s->waiting[in_front], at);
        }
        at = in_front;
    }
    waiting_place(s, g, at);
    g->wait_tokens = group_gap(g);
    s->waiting_tokens += g->wait_tokens;
    s->policy->push(s, g);
}

void waiting_remove(struct sched *s, struct group *g)
{
    int32_t hole = g->wait_index;

    s->policy->remove(s, g);
    if (hole < s->n_preempted) {
        waiting_place(s, s->waiting[--s->n_preempted], hole);
        hole = s->n_preempted;
    }
    if (hole < --s->n_waiting) {
        waiting_place(s, s->waiting[s->n_waiting], hole);
    }
    g->wait_index = -1;
    s->waiting_tokens -= g->wait_tokens;
}

struct group *waiting_first(struct sched *s)
{
    struct group *g = s->policy->first(s), *started = NULL;

    if (!g || can_start(s, g)) {
        return g;
    }
    /* Started groups hold all the memory and give it back only when they end, so they
     * must not wait behind a group that needs some. */
    for (int32_t i = 0; i < s->n_preempted; i++) {
        if (!started || s->policy->before(s, s->waiting[i], started)) {
            started = s->waiting[i];
        }
    }
    return started ? started : g;
}

bool goes_before_swapped(struct sched *s, const struct group *g, const struct group *other)
{
    return (s->policy->starts_before_swapped || g->started) && can_start(s, g) &&
           s->policy->before(s, g, other);
}

int sched_add(struct sched *s, struct group *g, int64_t now_us)
{
    assert(g->state == GROUP_NEW);
    if (s->n_waiting - s->n_preempted >= s->c.max_waiting) {
        return ERR_FULL;
    }
    g->order = s->next_order++;
    g->seq[0].state = SEQ_LIVE;
    g->n_live = 1;
    if (s->policy->submitted) {
        s->policy->submitted(s, g, now_us);
    }
    waiting_push(s, g);
    return 0;
}
