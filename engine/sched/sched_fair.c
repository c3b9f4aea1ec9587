/* policy: fair: tenants share the scheduler by their weights.
 *
 * Counters: the Virtual Token Counter (Sheng et al., "Fairness in Serving Large
 * Language Models", OSDI 2024). Each tenant has a counter of the tokens that it was
 * served, divided by its weight. The next group to admit is the first one of the tenant
 * with the least counter. A prompt counts at its admission, without the tokens found in
 * the prefix cache; a generated token counts when it is planned. A tenant that starts
 * to wait again gets no credit for its pause: its counter is raised to just below the
 * least of the waiting tenants, which makes it the next in turn. No tenant starves:
 * while it waits, the counters of others grow and its own does not.
 *
 * Preemption: counters alone free no slots or blocks. If the next group in turn does
 * not fit, the tenant with most slots for its weight loses its newest group, unless it
 * would then hold less than the other tenant, which would preempt back
 * (preempt_for_waiting).
 *
 * Prefill first: a prompt of a tenant that was served less and holds less than the
 * heaviest one is computed before any decode of the step; decodes that do not fit then
 * wait for the next step (plan_prefill_first).
 *
 * Short steps: a new request waits for the running step. So while tenants share (in the
 * last SHARED_US different tenants have submitted), a step decodes only as many groups
 * of the heaviest tenant as fit into shared_itl_us, in rotation, and the loop launches
 * it late (launch_delay.h). This costs throughput, so it does not apply to a tenant
 * alone.
 *
 * Cost: O(1) a token and O(log tenants + log waiting groups) an admission; while a
 * group waits that does not fit, a walk over the running groups. The tenants with
 * waiting groups form a binary heap by `key`, a copy of the counter. A counter only
 * grows while its tenant is in the heap, so key <= service, and the heap is repaired
 * when its top is read (first_ready).
 */
#include <assert.h>
#include <math.h>

#include "engine/sched/sched_impl.h"

static struct tenant *tenant_of(const struct sched *s, const struct group *g)
{
    return &s->fair.tenant[g->tenant];
}

/* ---- the heap of tenants with waiting groups ---- */

static void ready_set(struct fair *f, int32_t i, int32_t tenant)
{
    f->ready[i] = tenant;
    f->tenant[tenant].ready_index = i;
}

static bool less_served(const struct fair *f, int32_t a, int32_t b)
{
    return f->tenant[a].key < f->tenant[b].key;
}

static void sift_up(struct fair *f, int32_t i, int32_t tenant)
{
    for (; i > 0 && less_served(f, tenant, f->ready[(i - 1) / 2]); i = (i - 1) / 2) {
        ready_set(f, i, f->ready[(i - 1) / 2]);
    }
    ready_set(f, i, tenant);
}

static void sift_down(struct fair *f, int32_t i, int32_t tenant)
{
    for (;;) {
        int32_t child = 2 * i + 1;
        if (child >= f->n_ready) {
            break;
        }
        if (child + 1 < f->n_ready && less_served(f, f->ready[child + 1], f->ready[child])) {
            child++;
        }
        if (!less_served(f, f->ready[child], tenant)) {
            break;
        }
        ready_set(f, i, f->ready[child]);
        i = child;
    }
    ready_set(f, i, tenant);
}

/* The waiting tenant with the least counter; there is one. */
static struct tenant *first_ready(struct fair *f)
{
    for (;;) {
        struct tenant *t = &f->tenant[f->ready[0]];
        if (t->key == t->service) {
            return t;
        }
        t->key = t->service;
        sift_down(f, 0, f->ready[0]);
    }
}

/* The least counter of a tenant that starts to wait again. */
static double least_service(struct fair *f)
{
    return (f->n_ready > 0 ? first_ready(f) : &f->tenant[f->last_admitted])->service - 1;
}

/* ---- the waiting queue ---- */

static void fair_push(struct sched *s, struct group *g)
{
    struct fair *f = &s->fair;
    struct tenant *t = tenant_of(s, g);

    f->n_tenants = MAX(f->n_tenants, g->tenant + 1);
    if (!g->started) {
        t->weight = g->request->weight > 0 ? (double)g->request->weight : 1;
        if (!t->waiting) {
            t->service = MAX(t->service, least_service(f));
        }
    }
    bool was_ready = t->waiting != NULL;
    heap_push(&t->waiting, g);
    if (was_ready) {
        return;
    }
    t->key = t->service;
    sift_up(f, f->n_ready++, g->tenant);
}

static void fair_remove(struct sched *s, struct group *g)
{
    struct fair *f = &s->fair;
    struct tenant *t = tenant_of(s, g);

    heap_remove(&t->waiting, g);
    if (t->waiting) {
        return;
    }
    int32_t i = t->ready_index, moved = f->ready[--f->n_ready];
    t->ready_index = -1;
    if (moved == g->tenant) {
        return;
    }
    if (i > 0 && less_served(f, moved, f->ready[(i - 1) / 2])) {
        sift_up(f, i, moved);
    } else {
        sift_down(f, i, moved);
    }
}

static struct group *fair_first(struct sched *s)
{
    return s->fair.n_ready > 0 ? first_ready(&s->fair)->waiting : NULL;
}

static bool fair_before(const struct sched *s, const struct group *a, const struct group *b)
{
    double served_a = tenant_of(s, a)->service, served_b = tenant_of(s, b)->service;

    return a->tenant != b->tenant && served_a != served_b ? served_a < served_b
                                                          : group_before(a, b);
}

static struct group *fair_first_swapped(const struct sched *s)
{
    struct group *first = NULL;

    for (struct group *g = s->swapped.first; g; g = g->next) {
        if (!g->parked && (!first || fair_before(s, g, first))) {
            first = g;
        }
    }
    return first;
}

/* ---- accounting ---- */

/* A tenant that has not submitted for this long does not share. */
enum { SHARED_US = 10000000 };

static void fair_submitted(struct sched *s, const struct group *g, int64_t now_us)
{
    if (g->tenant != s->fair.last_submitter && s->next_order > 1) {
        s->fair.shared_until_us = now_us + SHARED_US;
    }
    s->fair.last_submitter = g->tenant;
}

bool sched_is_shared(const struct sched *s, int64_t now_us)
{
    return s->c.shared_itl_us > 0 && now_us < s->fair.shared_until_us;
}

static void charge(struct sched *s, const struct group *g, int32_t n_tokens)
{
    struct tenant *t = tenant_of(s, g);

    t->service += n_tokens / t->weight;
}

static void fair_admitted(struct sched *s, const struct group *g, int32_t n_tokens)
{
    charge(s, g, n_tokens);
    s->fair.last_admitted = g->tenant;
}

static void fair_sampled(struct sched *s, const struct group *g)
{
    charge(s, g, 1);
}

static void fair_reserved(struct sched *s, const struct group *g, int32_t n)
{
    s->fair.tenant[g->tenant].n_slots += n;
}

/* Slots of the group's tenant, and `more` of them, divided by its weight. */
static double slots_held(const struct sched *s, const struct group *g, int32_t more)
{
    const struct tenant *t = tenant_of(s, g);

    return (t->n_slots + more) / t->weight;
}

/* ---- prefill first ---- */

/* Whether the step being planned begins with this group's prefill. */
static bool is_first(const struct sched *s, const struct group *g)
{
    return g->ahead_step == s->step + 1;
}

/* The newest running group of the tenant with most slots for its weight, without groups
 * that this step has planned; NULL: none. */
static struct group *heaviest(const struct sched *s)
{
    struct group *most = NULL;

    for (struct group *g = s->running.last; g; g = g->prev) {
        if (!is_first(s, g) && (!most || slots_held(s, g, 0) > slots_held(s, most, 0))) {
            most = g;
        }
    }
    return most;
}

/* Whether the group's tenant was served less than that of `other` and holds fewer slots
 * for its weight. */
static bool is_underserved(const struct sched *s, const struct group *g, const struct group *other)
{
    return tenant_of(s, g)->service < tenant_of(s, other)->service &&
           slots_held(s, g, g->state == GROUP_WAITING ? group_slots(g) : 0) <
               slots_held(s, other, 0);
}

/* The group to preempt so that `g` can run; NULL: none, its tenant has its share. */
static struct group *victim_for(const struct sched *s, const struct group *g)
{
    struct group *victim = heaviest(s);

    return victim && slots_held(s, g, group_slots(g)) <= slots_held(s, victim, -victim->n_reserved)
               ? victim
               : NULL;
}

/* Preempt until the next waiting group fits, as long as its tenant has less than its
 * share. */
static void preempt_for_waiting(struct sched *s)
{
    struct group *g = waiting_first(s), *swapped = g ? fair_first_swapped(s) : NULL, *victim;

    if (!g || g->n_inflight > 0 || !can_start(s, g) ||
        (swapped && !goes_before_swapped(s, g, swapped))) {
        return;
    }
    while (!fits_now(s, g) && (victim = victim_for(s, g)) != NULL) {
        preempt(s, victim);
    }
    s->admission_closed = false; /* what was freed is for the waiting group */
}

/* Prefill of tenants that are underserved, compared with the heaviest one. */
static void plan_prefill_first(struct sched *s, int64_t now_us, struct plan *p)
{
    const struct group *heavy = heaviest(s);

    if (!heavy) {
        return;
    }
    for (struct group *g = s->running.first; g && s->tokens_left > 0; g = g->next) {
        if (in_prefill(g) && is_underserved(s, g, heavy)) {
            g->ahead_step = s->step + 1;
            plan_prefill(s, g, p);
        }
    }
    for (struct group *g;
         (g = waiting_first(s)) && is_underserved(s, g, heavy) && plan_admission(s, now_us, p);) {
        g->ahead_step = s->step + 1;
    }
    s->prefill_first = p->n_items + s->n_chunks > 0;
}

/* A planning that found no block for a prefill, and nothing else to do, made no step:
 * what it marked for that step has its turn in this planning as all others have. */
static void forget_marks(struct sched *s)
{
    for (struct group *g = s->running.first; g; g = g->next) {
        if (is_first(s, g)) {
            g->ahead_step = 0;
        }
    }
}

static void fair_begin(struct sched *s, int64_t now_us, struct plan *p)
{
    s->fair.shared = sched_is_shared(s, now_us);
    forget_marks(s);
    preempt_for_waiting(s);
    plan_prefill_first(s, now_us, p);
}

/* ---- decodes ---- */

/* Preempt until all decodes have their blocks. The victim may be anywhere in the list
 * of running groups, so this comes before the first of them is planned. */
static void free_decode_blocks(struct sched *s)
{
    int64_t need = 0;

    for (struct group *g = s->running.first; g; g = g->next) {
        need += will_decode(s, g) ? decode_need(s, &s->pool, g) : 0;
    }
    while (kvpool_available(&s->pool) < need) {
        if (drop_unpublished(s)) {
            continue;
        }
        struct group *victim = heaviest(s);
        if (!victim) {
            return;
        }
        need -= will_decode(s, victim) ? decode_need(s, &s->pool, victim) : 0;
        preempt(s, victim);
    }
}

/* Decode one group of the rotation and add its time to *us. False: a group was
 * preempted, so the rotation ends. */
static bool plan_turn(struct sched *s, struct group *g, struct plan *p, double *us)
{
    int32_t before = p->n_items, n_running = s->running.n;

    if (!plan_decode(s, g, p) || s->running.n != n_running) {
        return false;
    }
    for (int32_t i = before; i < p->n_items; i++) {
        *us += item_us(s, &p->item[i]);
        s->fair.turn_order = g->order;
    }
    return true;
}

/* Decode groups of `tenant` in rotation, beginning behind the last one of the previous
 * step, while the step stays short; at least one. Behind a prefill that was planned
 * first it is only one, because decodes delay that first token by more than the cost
 * model says. */
static void plan_turns(struct sched *s, int32_t tenant, struct plan *p)
{
    double us = s->prefill_first ? INFINITY : planned_us(s, p);
    struct group *g = s->running.first;

    while (g && g->order <= s->fair.turn_order) {
        g = g->next;
    }
    int32_t before = p->n_items;
    for (int32_t n = s->running.n; n > 0; n--, g = g->next) {
        g = g ? g : s->running.first;
        if (us >= (double)s->c.shared_itl_us && p->n_items > before) {
            return;
        }
        if (g->tenant == tenant && !plan_turn(s, g, p, &us)) {
            return;
        }
    }
}

/* While tenants share: the heaviest tenant decodes last, and only as much as fits into
 * a short step. */
static void plan_short_step(struct sched *s, struct plan *p)
{
    const struct group *heavy = heaviest(s);

    for (struct group *g = s->running.first; g; g = g->next) {
        if ((!heavy || g->tenant != heavy->tenant) && !plan_decode(s, g, p)) {
            return;
        }
    }
    if (heavy) {
        plan_turns(s, heavy->tenant, p);
    }
}

static void fair_decodes(struct sched *s, struct plan *p)
{
    free_decode_blocks(s);
    if (s->fair.shared) {
        plan_short_step(s, p);
    } else {
        plan_decodes(s, p);
    }
}

/* ---- prefill ---- */

static double fair_prefill_budget(struct sched *s, int64_t now_us, const struct plan *p)
{
    if (!s->fair.shared) {
        return prefill_budget(s, now_us, p);
    }
    if (s->c.cost.token_us <= 0) {
        return INFINITY;
    }
    return MAX(((double)s->c.shared_itl_us - planned_us(s, p)) / s->c.cost.token_us, 0);
}

/* Prefill of running groups and admission, in the order of turns: one tenant's long
 * prompts do not delay another's short one. */
static void fair_prefills(struct sched *s, int64_t now_us, struct plan *p)
{
    struct group **order = s->fair.prefill_order;
    int32_t n = 0;

    for (struct group *g = s->running.first; g; g = g->next) {
        if (!in_prefill(g) || is_first(s, g)) {
            continue;
        }
        int32_t i = n++; /* insertion sort: few, as admission stops where the budget ends */
        for (; i > 0 && fair_before(s, g, order[i - 1]); i--) {
            order[i] = order[i - 1];
        }
        order[i] = g;
    }
    for (int32_t i = 0; i < n; i++) {
        for (struct group *g;
             (g = waiting_first(s)) && fair_before(s, g, order[i]) && plan_admission(s, now_us, p);)
            ;
        plan_prefill(s, order[i], p);
    }
    while (plan_admission(s, now_us, p))
        ;
}

/* ---- invariants ---- */

static const char *fair_check(const struct sched *s, int32_t n_heaps)
{
    const struct fair *f = &s->fair;
    int32_t n = 0, n_slots = 0;

    for (int32_t i = 0; i < f->n_tenants; i++) {
        const struct tenant *t = &f->tenant[i];
        bool ready =
            t->ready_index >= 0 && t->ready_index < f->n_ready && f->ready[t->ready_index] == i;
        if (ready != (t->waiting != NULL) || (!ready && t->ready_index != -1) || t->n_slots < 0) {
            return "S1: a tenant with waiting groups is not in the heap, or one without is";
        }
        if (ready && (t->key > t->service || t->waiting->prev)) {
            return "S1: a tenant's key or first waiting group is wrong";
        }
        n += ready;
        n_slots += t->n_slots;
    }
    for (int32_t i = 1; i < f->n_ready; i++) {
        if (less_served(f, f->ready[i], f->ready[(i - 1) / 2])) {
            return "S1: the heap of tenants is broken";
        }
    }
    if (n != f->n_ready || n != n_heaps) {
        return "S1: tenants with waiting groups are miscounted";
    }
    return n_slots == s->n_reserved ? NULL : "S4: the tenants' slots do not add up";
}

const struct sched_policy policy_fair = {
    .push = fair_push,
    .remove = fair_remove,
    .first = fair_first,
    .before = fair_before,
    .first_swapped = fair_first_swapped,
    .starts_before_swapped = true,
    .submitted = fair_submitted,
    .admitted = fair_admitted,
    .sampled = fair_sampled,
    .reserved = fair_reserved,
    .begin = fair_begin,
    .decodes = fair_decodes,
    .prefill_budget = fair_prefill_budget,
    .prefills = fair_prefills,
    .check = fair_check,
};
