/* Tenants: whose turn it is among those who wait, and whose group gives way.
 *
 * Fair shares are the Virtual Token Counter's (Sheng et al., "Fairness in Serving Large
 * Language Models", OSDI 2024): each tenant has a counter of the tokens it was served,
 * over its weight; the first group of the tenant with the least counter is admitted
 * next. A prompt counts when it is admitted (less what the prefix cache had), a
 * generated token when it is planned. A tenant that was away does not come back with
 * credit: its counter is lifted to the least of those who wait, less one, so that it is
 * next in turn and no further ahead. No tenant starves: others' counters grow while it
 * waits, its own does not.
 *
 * Counters make shares fair over time; they do not make room. Where a tenant's turn has
 * come and another one's long answers hold all rows or blocks, the tenant with most
 * rows for its weight gives up its newest group, if it still has no less than the other
 * then (so they do not take it from each other in turn). And where it was served less
 * and holds fewer rows than others, its prompt is computed before their next tokens
 * are, which may wait a step for it.
 *
 * Short steps: whoever comes waits for the step that runs, so while several tenants ask
 * (each has within the last ten seconds), a step takes no more decodes of the heaviest
 * tenant than fit into shared_itl_us, in turn, and the loop launches it as late as it
 * may (launch_delay.h). It costs throughput, so a tenant alone does not pay for it.
 *
 * Cost: a token O(1), an admission O(log tenants + log waiting); where someone waits
 * without room, a walk over the running groups. A counter only grows while its tenant
 * stands ready, so the heap of tenants is put right when its top is looked at: `key` is
 * the counter at the tenant's place, at most its counter now. Waiting groups of one
 * tenant are a leftist heap (Crane, 1972), which needs no memory but pointers in the
 * group and is O(log n) each time, so that no step pays for the many who came before
 * it: the right child of a group has the lesser rank, the number of steps down to a
 * missing child. Without fair shares there is one tenant, and all this is a heap of
 * groups.
 */
#include <assert.h>

#include "engine/sched/sched_impl.h"

/* ---- the waiting groups of one tenant ---- */

static int32_t rank_of(const struct group *g)
{
    return g ? g->heap_rank : 0;
}

/* Its children in order of their ranks, and its own rank. False: nothing changed. */
static bool settle(struct group *g)
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

/* Two heaps as one, along their right sides, which are short. */
static struct group *meld(struct group *a, struct group *b)
{
    if (!a || !b) {
        return a ? a : b;
    }
    if (group_before(b, a)) {
        struct group *t = a;
        a = b;
        b = t;
    }
    a->next = meld(a->next, b);
    a->next->prev = a;
    settle(a);
    return a;
}

static struct group *alone(struct group *g)
{
    g->prev = g->next = g->child = NULL;
    g->heap_rank = 1;
    return g;
}

/* The heap without `g`. Above it ranks can fall, as long as they do. */
static struct group *heap_without(struct group *root, struct group *g)
{
    struct group *above = g->prev, *rest = meld(g->child, g->next);

    if (rest) {
        rest->prev = above;
    }
    if (!above) {
        root = rest;
    } else if (above->child == g) {
        above->child = rest;
    } else {
        above->next = rest;
    }
    while (above && settle(above)) {
        above = above->prev;
    }
    alone(g);
    return root;
}

/* ---- the tenants that stand ready ---- */

static void ready_set(struct sched *s, int32_t i, int32_t tenant)
{
    s->ready[i] = tenant;
    s->tenant[tenant].ready_index = i;
}

static bool less_served(const struct sched *s, int32_t a, int32_t b)
{
    return s->tenant[a].key < s->tenant[b].key;
}

static void sift_up(struct sched *s, int32_t i, int32_t tenant)
{
    for (; i > 0 && less_served(s, tenant, s->ready[(i - 1) / 2]); i = (i - 1) / 2) {
        ready_set(s, i, s->ready[(i - 1) / 2]);
    }
    ready_set(s, i, tenant);
}

static void sift_down(struct sched *s, int32_t i, int32_t tenant)
{
    for (;;) {
        int32_t child = 2 * i + 1;
        if (child >= s->n_ready) {
            break;
        }
        if (child + 1 < s->n_ready && less_served(s, s->ready[child + 1], s->ready[child])) {
            child++;
        }
        if (!less_served(s, s->ready[child], tenant)) {
            break;
        }
        ready_set(s, i, s->ready[child]);
        i = child;
    }
    ready_set(s, i, tenant);
}

/* The tenant with the least counter; there is one. */
static struct tenant *first_ready(struct sched *s)
{
    for (;;) {
        struct tenant *t = &s->tenant[s->ready[0]];
        if (t->key == t->service) {
            return t;
        }
        t->key = t->service;
        sift_down(s, 0, s->ready[0]);
    }
}

/* Where a counter begins whose tenant asks again after a pause. */
static double lift(struct sched *s)
{
    return (s->n_ready > 0 ? first_ready(s) : &s->tenant[s->last_tenant])->service - 1;
}

void tenant_push(struct sched *s, struct group *g)
{
    struct tenant *t = &s->tenant[g->tenant];

    s->n_tenants = MAX(s->n_tenants, g->tenant + 1);
    if (!g->started) {
        t->weight = g->request->weight > 0 ? (double)g->request->weight : 1;
        if (!t->first) {
            t->service = MAX(t->service, lift(s));
        }
    }
    bool was_ready = t->first != NULL;
    t->first = meld(t->first, alone(g));
    if (was_ready) {
        return;
    }
    t->key = t->service;
    sift_up(s, s->n_ready++, g->tenant);
}

void tenant_remove(struct sched *s, struct group *g)
{
    struct tenant *t = &s->tenant[g->tenant];

    t->first = heap_without(t->first, g);
    if (t->first) {
        return;
    }
    int32_t i = t->ready_index, moved = s->ready[--s->n_ready];
    t->ready_index = -1;
    if (moved == g->tenant) {
        return;
    }
    if (i > 0 && less_served(s, moved, s->ready[(i - 1) / 2])) {
        sift_up(s, i, moved);
    } else {
        sift_down(s, i, moved);
    }
}

void tenant_charge(struct sched *s, const struct group *g, int32_t n_tokens)
{
    struct tenant *t = &s->tenant[g->tenant];

    t->service += n_tokens / t->weight;
}

/* ---- whether tenants share ---- */

/* A tenant who has not asked for so long need not be waited for. */
enum { SHARED_US = 10000000 };

void tenant_asks(struct sched *s, int32_t tenant, int64_t now_us)
{
    if (tenant != s->last_asker && s->next_order > 1) {
        s->shared_until_us = now_us + SHARED_US;
    }
    s->last_asker = tenant;
}

bool sched_is_shared(const struct sched *s, int64_t now_us)
{
    return is_fair(s) && s->c.shared_itl_us > 0 && now_us < s->shared_until_us;
}

/* ---- turns ---- */

struct group *waiting_first(struct sched *s)
{
    struct group *g = s->n_ready > 0 ? first_ready(s)->first : NULL, *started = NULL;

    if (!g || can_start(s, g)) {
        return g;
    }
    /* Those who have started hold all the memory. They give it back when they end, so
     * they must not wait behind it. */
    for (int32_t i = 0; i < s->n_preempted; i++) {
        if (!started || turn_before(s, s->waiting[i], started)) {
            started = s->waiting[i];
        }
    }
    return started ? started : g;
}

bool turn_before(const struct sched *s, const struct group *a, const struct group *b)
{
    double served_a = s->tenant[a->tenant].service, served_b = s->tenant[b->tenant].service;

    return a->tenant != b->tenant && served_a != served_b ? served_a < served_b
                                                          : group_before(a, b);
}

struct group *swapped_first(const struct sched *s)
{
    struct group *first = NULL;

    for (struct group *g = s->swapped.first; g && (is_fair(s) || !first); g = g->next) {
        if (!g->parked && (!first || turn_before(s, g, first))) {
            first = g;
        }
    }
    return first;
}

bool goes_before_swapped(struct sched *s, const struct group *g, const struct group *other)
{
    return (is_fair(s) || g->started) && can_start(s, g) && turn_before(s, g, other);
}

/* ---- room ---- */

void reserve_slots(struct sched *s, struct group *g, int32_t n)
{
    g->n_reserved += n;
    s->n_reserved += n;
    s->tenant[g->tenant].n_slots += n;
}

/* Rows for its weight, with `more` of them. */
static double slots_held(const struct sched *s, const struct group *g, int32_t more)
{
    const struct tenant *t = &s->tenant[g->tenant];

    return (t->n_slots + more) / t->weight;
}

struct group *heaviest(const struct sched *s)
{
    struct group *most = NULL;

    for (struct group *g = s->running.last; g; g = g->prev) {
        if (!goes_ahead(s, g) && (!most || slots_held(s, g, 0) > slots_held(s, most, 0))) {
            most = g;
        }
    }
    return most;
}

bool is_poorer(const struct sched *s, const struct group *g, const struct group *other)
{
    return s->tenant[g->tenant].service < s->tenant[other->tenant].service &&
           slots_held(s, g, g->state == GROUP_WAITING ? group_slots(g) : 0) <
               slots_held(s, other, 0);
}

/* A group to preempt so that `g` can run; NULL: its tenant has its share. */
static struct group *who_gives_way(const struct sched *s, const struct group *g)
{
    struct group *victim = heaviest(s);

    return victim && slots_held(s, g, group_slots(g)) <= slots_held(s, victim, -victim->n_reserved)
               ? victim
               : NULL;
}

void make_way(struct sched *s)
{
    struct group *g = is_fair(s) ? waiting_first(s) : NULL, *swapped = g ? swapped_first(s) : NULL,
                 *victim;

    if (!g || g->n_inflight > 0 || !can_start(s, g) ||
        (swapped && !goes_before_swapped(s, g, swapped))) {
        return;
    }
    while (!fits_now(s, g) && (victim = who_gives_way(s, g)) != NULL) {
        preempt(s, victim);
    }
    s->made_way = s->preempted; /* the room is for who waits, in this step */
}
