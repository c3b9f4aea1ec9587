/* The queues: waiting groups, ordered lists of running and swapped groups, ended
 * groups. */
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
    tenant_push(s, g);
}

void waiting_remove(struct sched *s, struct group *g)
{
    int32_t hole = g->wait_index;

    tenant_remove(s, g);
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

int sched_add(struct sched *s, struct group *g, int64_t now_us)
{
    assert(g->state == GROUP_NEW);
    if (s->n_waiting - s->n_preempted >= s->c.max_waiting) {
        return ERR_FULL;
    }
    g->order = s->next_order++;
    g->seq[0].state = SEQ_LIVE;
    g->n_live = 1;
    tenant_asks(s, g->tenant, now_us);
    waiting_push(s, g);
    return 0;
}
