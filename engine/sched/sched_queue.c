/* The queues: waiting groups, ordered lists of running and swapped groups, ended
 * groups. */
#include <assert.h>
#include <string.h>

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

/* ---- ends ---- */

void group_finish(struct sched *s, struct group *g)
{
    switch (g->state) {
    case GROUP_WAITING:
        waiting_remove(s, g);
        break;
    case GROUP_RUNNING:
        list_remove(&s->running, g);
        group_unreserve(s, g);
        break;
    case GROUP_SWAPPED:
        list_remove(&s->swapped, g);
        break;
    default:
        return;
    }
    g->state = GROUP_ENDED;
    list_append(&s->ended, g);
}

void sched_end(struct sched *s, struct group *g, int finish, const char *error)
{
    if (g->state == GROUP_ENDED) {
        return;
    }
    g->finish = finish;
    g->error = error;
    for (int32_t i = 0; i < g->n_seqs; i++) {
        if (g->seq[i].state == SEQ_LIVE) {
            seq_drop_memory(s, &g->seq[i]);
        }
    }
    group_finish(s, g);
}

static void end_list(struct sched *s, struct group_list *l, int finish, const char *error)
{
    while (l->first) {
        sched_end(s, l->first, finish, error);
    }
}

void sched_end_all(struct sched *s, int finish, const char *error)
{
    end_list(s, &s->running, finish, error);
    end_list(s, &s->swapped, finish, error);
    while (s->n_waiting > 0) {
        sched_end(s, s->waiting[s->n_waiting - 1], finish, error);
    }
}

bool sched_has_ended(const struct sched *s)
{
    return s->ended.first != NULL;
}

/* Whether the output side has closed every open choice of a group that does not run.
 * (Of running groups decode_commit ends the choices.) */
static bool all_stopped(const struct group *g)
{
    if (g->state == GROUP_RUNNING || !g->started || g->beams) {
        return false;
    }
    for (int32_t i = 0; i < g->width; i++) {
        if (g->seq[i].state != SEQ_DONE &&
            atomic_load_explicit(&g->request->stop_at[i], memory_order_relaxed) > g->seq[i].n_out) {
            return false;
        }
    }
    return true;
}

/* True when the group was ended. */
static bool end_if_due(struct sched *s, struct group *g, int64_t now_us)
{
    int64_t waited_us = now_us - g->request->arrival_us;

    if (atomic_load_explicit(&g->request->cancelled, memory_order_relaxed)) {
        sched_end(s, g, FINISH_ABORT, NULL);
    } else if (s->c.request_timeout_us > 0 && waited_us > s->c.request_timeout_us) {
        sched_end(s, g, FINISH_ABORT, "the request took longer than request_timeout allows");
    } else if (s->c.queue_timeout_us > 0 && !g->started && waited_us > s->c.queue_timeout_us) {
        sched_end(s, g, FINISH_ABORT,
                  "the request waited in the queue longer than queue_timeout allows");
    } else if (all_stopped(g)) {
        sched_end(s, g, FINISH_STOP, NULL);
    } else {
        return false;
    }
    return true;
}

static void sweep_list(struct sched *s, struct group_list *l, int64_t now_us)
{
    for (struct group *g = l->first, *next; g; g = next) {
        next = g->next;
        g->parked = atomic_load_explicit(&g->request->parked, memory_order_relaxed) == PARK_RUNNING;
        end_if_due(s, g, now_us);
    }
}

/* Waiting groups checked in a step, in turn, so that the cost does not grow with their
 * number. */
enum { SWEPT_A_STEP = 64 };

/* Prefetch the groups to be checked: with many waiting ones they are not in the CPU's
 * caches. */
static void fetch_waiting(const struct sched *s)
{
    int32_t last = MIN(s->sweep + SWEPT_A_STEP, s->n_waiting);

    for (int32_t i = s->sweep; i < last; i++) {
        __builtin_prefetch(s->waiting[i]);
        __builtin_prefetch(&s->waiting[i]->started);
    }
    for (int32_t i = s->sweep; i < last; i++) {
        __builtin_prefetch(&s->waiting[i]->request->arrival_us);
        __builtin_prefetch(&s->waiting[i]->request->cancelled);
    }
}

void sched_sweep(struct sched *s, int64_t now_us)
{
    sweep_list(s, &s->running, now_us);
    sweep_list(s, &s->swapped, now_us);
    for (struct group *g = waiting_first(s); g && end_if_due(s, g, now_us);) {
        g = waiting_first(s);
    }
    fetch_waiting(s);
    for (int32_t i = 0; i < SWEPT_A_STEP && s->n_waiting > 0; i++) {
        if (s->sweep >= s->n_waiting) {
            s->sweep = 0;
        }
        if (!end_if_due(s, s->waiting[s->sweep], now_us)) {
            s->sweep++;
        }
    }
}

void sched_counts(const struct sched *s, struct sched_counts *ret)
{
    *ret = s->counted;
    ret->running_groups = s->running.n;
    ret->running_seqs = s->c.max_num_seqs - s->n_free_slots;
    ret->waiting_groups = s->n_waiting;
    ret->swapped_groups = s->swapped.n;
    ret->blocks_used = kvpool_used(&s->pool);
    ret->blocks_cached = s->pool.n_cached;
    ret->host_blocks_used = kvpool_used(&s->host);
}

const struct sched_config *sched_config(const struct sched *s)
{
    return &s->c;
}
