/* Ends: of a sequence, of a group in any state, and the sweep that ends cancelled and
 * timed-out groups. All lead to the ended queue, which decode_reap empties. */
#include "engine/sched/decode/constrained.h"
#include "engine/sched/sched_impl.h"

/* Move a group without live sequences to the ended queue. */
static void group_finish(struct sched *s, struct group *g)
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
    if (s->drafts && g->started && !g->beams) {
        s->drafts->ended(s->drafts, g);
    }
    g->state = GROUP_ENDED;
    list_append(&s->ended, g);
}

void seq_finish(struct sched *s, struct seq *q, int finish)
{
    struct group *g = q->group;

    if (finish == FINISH_STOP || finish == FINISH_LENGTH) {
        seq_publish_tail(s, q);
    }
    seq_drop_memory(s, q);
    seq_drop_constraint(s, q);
    q->state = SEQ_DONE;
    q->finish = finish;
    if (g->state == GROUP_RUNNING) {
        reserve_slots(s, g, -1);
    }
    if (s->contiguous) {
        contiguous_give(s->contiguous, &q->reservation);
    }
    if (--g->n_live == 0) {
        group_finish(s, g);
    }
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
        seq_drop_constraint(s, &g->seq[i]);
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

/* ---- the sweep ---- */

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

/* True: the group was ended. */
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

/* `fetched`: a plan that names most of the groups, in this order; NULL: none. */
static void sweep_list(struct sched *s, struct group_list *l, const struct plan *fetched,
                       int64_t now_us)
{
    int32_t i = 0;

    for (struct group *g = l->first, *next; g; g = next) {
        next = g->next;
        if (fetched) {
            fetch_ahead(fetched, i, false);
        }
        i += g->n_live;
        g->parked = atomic_load_explicit(&g->request->parked, memory_order_relaxed) == PARK_RUNNING;
        end_if_due(s, g, now_us);
    }
}

/* Waiting groups checked in a step, in turn, so that the cost does not grow with their
 * number. */
enum { SWEPT_A_STEP = 64 };

/* Prefetch the groups to be checked: with many waiting ones they are not in the CPU's
 * caches. */
FETCH void fetch_waiting(const struct sched *s)
{
    int32_t last = MIN(s->sweep + SWEPT_A_STEP, s->n_waiting);

    for (int32_t i = s->sweep; i < last; i++) {
        __builtin_prefetch(s->waiting[i]);
    }
    for (int32_t i = s->sweep; i < last; i++) {
        __builtin_prefetch(s->waiting[i]->request);
    }
}

void sched_sweep(struct sched *s, int64_t now_us)
{
    sweep_list(s, &s->running, s->n_in_flight > 0 ? s->in_flight[s->n_in_flight - 1] : NULL,
               now_us);
    sweep_list(s, &s->swapped, NULL, now_us);
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
