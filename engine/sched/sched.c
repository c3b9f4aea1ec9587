#include "engine/sched/sched.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/sched/sched_impl.h"

static void plan_clear(struct plan *p)
{
    p->step = 0;
    p->n_items = p->n_decode = p->n_tokens = p->n_logits = p->n_samples = 0;
    p->n_copy = p->n_swap_out = p->n_swap_in = 0;
    p->estimate_us = 0;
}

/* Items of one token go to the front of the plan, pieces behind them when it is
 * complete. */
static struct plan_item *add_item(struct sched *s, struct plan *p, struct seq *q, int32_t n)
{
    struct plan_item *it = n == 1 ? &p->item[p->n_items++] : &s->chunk[s->n_chunks++];

    *it = (struct plan_item){.seq = q, .first = q->n_computed, .n = n, .src_row = -1};
    s->tokens_left -= n;
    return it;
}

/* ---- decodes ---- */

/* Blocks for the group's next tokens, at the cost of the newest groups if need be.
 * False: it was the newest itself, and was preempted. */
static bool make_room(struct sched *s, struct group *g)
{
    int32_t need = decode_need(s, &s->pool, g);

    while (kvpool_available(&s->pool) < need) {
        struct group *victim = s->running.last;
        preempt(s, victim);
        if (victim == g) {
            return false;
        }
    }
    return true;
}

/* Whether the next token can be asked for before the last ones are known. A batch can
 * name the sampling rows of the step before, no older ones. */
static bool may_look_ahead(const struct sched *s, const struct group *g)
{
    if (g->n_inflight == 0) {
        return true;
    }
    if (!g->lookahead) {
        return false;
    }
    for (int32_t i = 0; i < g->width; i++) {
        const struct seq *q = &g->seq[i];
        if (q->state == SEQ_LIVE && q->n_tokens > g->n_prompt + q->n_out &&
            q->sample_step != s->step) {
            return false;
        }
    }
    return true;
}

static bool will_decode(const struct sched *s, const struct group *g)
{
    return !in_prefill(g) && may_look_ahead(s, g) && !g->parked;
}

/* With fair shares prompts may have been planned already, which took tokens and
 * blocks. */
static bool fits_behind(struct sched *s, struct group *g)
{
    return g->n_live <= s->tokens_left && decode_need(s, &s->pool, g) <= kvpool_available(&s->pool);
}

/* One token for each live sequence of a group that has its prefill behind it. False:
 * the group was preempted. */
bool plan_decode(struct sched *s, struct group *g, struct plan *p)
{
    if (!will_decode(s, g) || (s->ahead && !fits_behind(s, g))) {
        return true;
    }
    if (!make_room(s, g)) {
        return false;
    }
    for (int32_t i = 0; i < g->width; i++) {
        struct seq *q = &g->seq[i];
        if (q->state != SEQ_LIVE || !can_sample(g, q)) {
            continue; /* a sequence at its max_tokens waits for its last token to be committed */
        }
        seq_own_next_block(s, q, p);
        add_item(s, p, q, 1)->n_sampled = 1;
    }
    return true;
}

/* With fair shares the group to preempt may stand anywhere in the list: room is made
 * before the first is planned. */
static void make_room_for_all(struct sched *s)
{
    int64_t need = 0;

    for (struct group *g = s->running.first; g; g = g->next) {
        need += will_decode(s, g) ? decode_need(s, &s->pool, g) : 0;
    }
    while (kvpool_available(&s->pool) < need) {
        struct group *victim = heaviest(s);
        if (!victim) {
            return;
        }
        need -= will_decode(s, victim) ? decode_need(s, &s->pool, victim) : 0;
        preempt(s, victim);
    }
}

static double item_us(const struct sched *s, const struct plan_item *it)
{
    return it->n * s->c.cost.token_us + it->first * s->c.cost.context_us;
}

/* What the plan takes, so far. */
static double planned_us(const struct sched *s, const struct plan *p)
{
    double us = s->c.cost.fixed_us;

    for (int32_t i = 0; i < p->n_items; i++) {
        us += item_us(s, &p->item[i]);
    }
    for (int32_t i = 0; i < s->n_chunks; i++) {
        us += item_us(s, &s->chunk[i]);
    }
    return us;
}

/* One group's turn; false: no more of them, some group was preempted. *us grows by what
 * it takes. */
static bool plan_turn(struct sched *s, struct group *g, struct plan *p, double *us)
{
    int32_t before = p->n_items, n_running = s->running.n;

    if (!plan_decode(s, g, p) || s->running.n != n_running) {
        return false;
    }
    for (int32_t i = before; i < p->n_items; i++) {
        *us += item_us(s, &p->item[i]);
        s->turn_order = g->order;
    }
    return true;
}

/* Groups of `tenant`, from the one behind the last turn's on and round, while the step
 * stays short; one at least. Beside a prompt that goes ahead no more than that: its
 * first token comes sooner than the cost table says it would with decodes. */
static void plan_turns(struct sched *s, int32_t tenant, struct plan *p)
{
    double us = s->ahead ? INFINITY : planned_us(s, p);
    struct group *g = s->running.first;

    while (g && g->order <= s->turn_order) {
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

/* Tenants share: who holds most decodes last, and only what a short step has room
 * for. */
static void plan_decodes_by_turns(struct sched *s, struct plan *p)
{
    const struct group *rich = heaviest(s);

    for (struct group *g = s->running.first; g; g = g->next) {
        if ((!rich || g->tenant != rich->tenant) && !plan_decode(s, g, p)) {
            return;
        }
    }
    if (rich) {
        plan_turns(s, rich->tenant, p);
    }
}

static void plan_decodes(struct sched *s, struct plan *p)
{
    if (is_fair(s)) {
        make_room_for_all(s);
    }
    if (s->shared) {
        plan_decodes_by_turns(s, p);
        return;
    }
    for (struct group *g = s->running.first; g; g = g->next) {
        if (!plan_decode(s, g, p)) {
            return; /* it was the last of the list */
        }
    }
}

/* ---- prefill ---- */

/* Where a piece scores prompt tokens: the row of position i tells the log-probability
 * of the token at i + 1. Shortens the piece to what the step's logits rows allow. */
static int32_t plan_scores(struct sched *s, struct group *g, struct plan_item *it, int32_t n)
{
    int32_t last = MIN(it->first + n, g->n_prompt - 1); /* behind the last scoring position */
    int32_t start = MAX(it->first, g->n_scores_planned);

    if (!g->scores || start >= last) {
        return n;
    }
    if (last - start > s->scores_left) {
        last = start + s->scores_left;
        n = last - it->first;
    }
    it->score_offset = start - it->first;
    it->n_scores = last - start;
    return n;
}

static void plan_chunk(struct sched *s, struct seq *q, struct plan *p)
{
    struct group *g = q->group;
    int32_t n = MIN(prefill_target(g, q) - q->n_computed, s->tokens_left);
    struct plan_item piece = {.first = q->n_computed};

    n = plan_scores(s, g, &piece, n);
    if (n <= 0) {
        return;
    }
    struct plan_item *it = add_item(s, p, q, n);
    it->score_offset = piece.score_offset;
    it->n_scores = piece.n_scores;
    s->scores_left -= it->n_scores;
    g->n_scores_planned += it->n_scores;
    if (q->n_tokens == g->n_prompt && it->first + n == g->n_prompt) {
        it->last_prompt = true;
        it->n_sampled = g->max_tokens == 0 ? 0 : g->beam ? 1 : g->width;
    }
}

/* What the budget leaves of the group's gaps. */
void plan_prefill(struct sched *s, struct group *g, struct plan *p)
{
    bool shared_is_there = g->seq[g->root].n_computed >= g->n_shared;

    for (int32_t i = 0; i < g->width && s->tokens_left > 0; i++) {
        struct seq *q = &g->seq[i];
        if (q->state == SEQ_LIVE && q->n_computed < prefill_target(g, q) &&
            (i == g->root || shared_is_there)) {
            plan_chunk(s, q, p);
        }
    }
}

/* Prefill and admission, oldest first. */
static void plan_prefills(struct sched *s, int64_t now_us, struct plan *p)
{
    for (struct group *g = s->running.first; g && s->tokens_left > 0; g = g->next) {
        plan_prefill(s, g, p);
    }
    while (sched_admit_one(s, now_us, p))
        ;
}

/* Prefill of tenants who were served less and hold less than the heaviest: before
 * anything else of the step. */
static void plan_ahead(struct sched *s, int64_t now_us, struct plan *p)
{
    const struct group *rich = is_fair(s) ? heaviest(s) : NULL;

    if (!rich) {
        return;
    }
    for (struct group *g = s->running.first; g && s->tokens_left > 0; g = g->next) {
        if (in_prefill(g) && is_poorer(s, g, rich)) {
            g->ahead_step = s->step + 1;
            plan_prefill(s, g, p);
        }
    }
    for (struct group *g;
         (g = waiting_first(s)) && is_poorer(s, g, rich) && sched_admit_one(s, now_us, p);) {
        g->ahead_step = s->step + 1;
    }
    s->ahead = p->n_items + s->n_chunks > 0;
}

/* The same by turns, so that one tenant's long prompts do not stand before another's
 * short one. */
static void plan_prefills_fairly(struct sched *s, int64_t now_us, struct plan *p)
{
    int32_t n = 0;

    for (struct group *g = s->running.first; g; g = g->next) {
        if (!in_prefill(g) || goes_ahead(s, g)) {
            continue;
        }
        int32_t i = n++; /* few: admission stops where the budget ends */
        for (; i > 0 && turn_before(s, g, s->prefill_order[i - 1]); i--) {
            s->prefill_order[i] = s->prefill_order[i - 1];
        }
        s->prefill_order[i] = g;
    }
    for (int32_t i = 0; i < n; i++) {
        for (struct group *g; (g = waiting_first(s)) && turn_before(s, g, s->prefill_order[i]) &&
                              sched_admit_one(s, now_us, p);)
            ;
        plan_prefill(s, s->prefill_order[i], p);
    }
    while (sched_admit_one(s, now_us, p))
        ;
}

/* Tokens of prompts, and of what is to be computed again, that running and waiting
 * groups have before them. */
static int64_t prefill_backlog(const struct sched *s)
{
    int64_t n = s->waiting_tokens;

    for (const struct group *g = s->running.first; g; g = g->next) {
        if (in_prefill(g)) {
            n += group_gap(g);
        }
    }
    return n;
}

/* Tokens of a large step, made a number that the device computes well; a small one may
 * be larger. */
static int32_t whole(const struct sched *s, double n_tokens, bool up)
{
    int32_t n = (int32_t)MIN(n_tokens, s->c.max_num_batched_tokens), size = s->c.step_quantum;

    if (size <= 1) {
        return n;
    }
    if (n < size) {
        return up ? MIN(size, s->c.max_num_batched_tokens) : n;
    }
    return up ? (n + size - 1) / size * size : n / size * size;
}

/* The group that waits for its prompt longest; NULL: none does. */
static const struct group *oldest_prefill(struct sched *s)
{
    for (const struct group *g = s->running.first; g; g = g->next) {
        if (in_prefill(g)) {
            return g;
        }
    }
    return waiting_first(s);
}

/* Prompt tokens of a step that are due, however many it has room for: as many in each
 * step as make what waits ready a second after the oldest of it came. So steps of a
 * steady load are alike, and prompts fill what a step of decodes leaves of the device,
 * instead of some steps at the bound and others with nothing; what is late, as the end
 * of a burst, is computed as fast as the bound allows. Three prompt tokens a decode
 * always are: many who decode bring as many prompts behind them. */
static double due_prefill(struct sched *s, int64_t now_us, const struct plan *p)
{
    enum { READY_US = 1000000, TOKENS_A_DECODE = 3 };
    const struct group *oldest = oldest_prefill(s);
    double backlog = (double)prefill_backlog(s),
           waited_us = oldest ? (double)(now_us - oldest->request->arrival_us) : 0;
    double decodes_us =
        /* left to steps without prompts */
        READY_US - waited_us - backlog * s->c.cost.token_us * s->cost_scale;

    if (decodes_us <= 0) {
        return INFINITY;
    }
    return MAX(backlog * planned_us(s, p) * s->cost_scale / decodes_us,
               (double)TOKENS_A_DECODE * p->n_items);
}

/* How much prefill joins decodes: what is due, within target_itl by the cost table at
 * the pace that steps keep. A block's worth always may, so that it is not starved. */
static void bound_prefill(struct sched *s, int64_t now_us, const struct plan *p)
{
    int64_t target_us = s->shared ? s->c.shared_itl_us : s->c.target_itl_us;

    if (target_us == 0 || s->c.cost.token_us <= 0 || (p->n_items == 0 && !s->shared)) {
        return;
    }
    double us = (double)target_us / (s->shared ? 1 : s->cost_scale) - planned_us(s, p);
    double most = MAX(us / s->c.cost.token_us, 0);
    if (!s->shared) {
        int32_t others = s->c.max_num_batched_tokens - s->tokens_left;
        most = MIN(whole(s, others + most, false),
                   whole(s, others + due_prefill(s, now_us, p), true)) -
               others;
    }
    s->tokens_left = (int32_t)MIN(MAX(most, s->c.block_size), s->tokens_left);
}

void sched_observe(struct sched *s, const struct plan *p, int64_t us)
{
    const double WEIGHT = 1.0 / 16, LEAST = 0.5, MOST = 4;
    bool mixed = p->n_decode > 0 && p->n_items > p->n_decode;

    if (us <= 0 || !mixed || p->estimate_us <= 0) {
        return;
    }
    double weight = MAX(WEIGHT, 1.0 / ++s->n_observed); /* the first ones tell most */
    s->cost_scale = MIN(
        MAX(s->cost_scale + weight * ((double)us / p->estimate_us - s->cost_scale), LEAST), MOST);
}

/* ---- numbering and bookkeeping of the finished plan ---- */

/* `q` draws sampling row `row` of this step: a placeholder until the commit. */
static void draw(struct sched *s, struct seq *q, int32_t row)
{
    q->n_tokens++;
    q->sample_step = s->step;
    q->sample_row = row;
    tenant_charge(s, q->group, 1);
}

static void account(struct sched *s, struct plan *p, struct plan_item *it)
{
    struct seq *q = it->seq;
    struct group *g = q->group;

    /* its last token is drawn by the step before */
    if (it->first + it->n > g->n_prompt + q->n_out) {
        assert(q->sample_step == s->step - 1 && it->n == 1 && it->first == q->n_tokens - 1);
        it->src_row = q->sample_row;
    }
    it->sample_first = p->n_samples;
    p->n_tokens += it->n;
    p->n_logits += it->n_scores + (it->n_sampled > 0);
    p->n_samples += it->n_scores + it->n_sampled;
    q->n_computed += it->n;
    int32_t row = it->sample_first + it->n_scores;
    for (int32_t i = 1; i < it->n_sampled; i++) {
        seq_fork(s, &g->seq[i], q);
        g->n_live++;
        draw(s, &g->seq[i], row + i);
    }
    if (it->n_sampled > 0) {
        draw(s, q, row);
    }
    if (g->plan_step != s->step) {
        g->plan_step = s->step;
        g->n_inflight++;
    }
}

static int32_t finish_plan(struct sched *s, struct plan *p)
{
    p->estimate_us = s->c.cost.token_us > 0 ? planned_us(s, p) : 0;
    p->n_decode = p->n_items;
    memcpy(p->item + p->n_items, s->chunk, (size_t)s->n_chunks * sizeof(*s->chunk));
    p->n_items += s->n_chunks;
    if (p->n_items == 0) {
        return 0; /* swap-outs, if any, wait for a step to travel with */
    }
    p->step = ++s->step;
    memcpy(p->swap_out, s->swap_out, (size_t)s->n_swap_out * sizeof(*s->swap_out));
    p->n_swap_out = s->n_swap_out;
    s->n_swap_out = 0;
    for (int32_t i = 0; i < p->n_items; i++) {
        account(s, p, &p->item[i]);
    }
    s->in_flight[s->n_in_flight++] = p;
    return p->n_items;
}

int32_t sched_plan(struct sched *s, int64_t now_us, struct plan *p)
{
    assert(s->n_in_flight < MAX_IN_FLIGHT);
    plan_clear(p);
    s->n_chunks = 0;
    s->preempted = s->made_way = s->ahead = false;
    s->shared = sched_is_shared(s, now_us);
    s->tokens_left = s->c.max_num_batched_tokens;
    s->scores_left = s->c.max_logits - s->c.max_num_seqs;
    sched_sweep(s, now_us);
    make_way(s);
    plan_ahead(s, now_us, p);
    plan_decodes(s, p);
    sched_resume(s, p);
    bound_prefill(s, now_us, p);
    if (is_fair(s)) {
        plan_prefills_fairly(s, now_us, p);
    } else {
        plan_prefills(s, now_us, p);
    }
    return finish_plan(s, p);
}
