/* A step: how decodes, prefill and admissions are put together, and policy: fcfs, which
 * is also policy: priority (group_before). */
#include "engine/sched/sched.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/sched/sched_impl.h"

static void plan_clear(struct plan *p)
{
    p->step = 0;
    p->n_items = p->n_decode = p->n_verify = p->n_tokens = p->n_logits = p->n_samples = 0;
    p->n_copy = p->n_swap_out = p->n_swap_in = 0;
    p->estimate_us = 0;
}

/* Items of one token go to the front of the plan; finish_plan appends the longer
 * ones. */
static void add_item(struct sched *s, struct plan *p, const struct plan_item *it)
{
    *(it->n == 1 ? &p->item[p->n_items++] : &s->chunk[s->n_chunks++]) = *it;
    s->tokens_left -= it->n;
}

/* ---- decodes ---- */

/* The item is written where it stays, field by field: the copy of one that was just
 * made waits for the stores of its fields. */
static void add_decode(struct sched *s, struct plan *p, struct seq *q)
{
    struct plan_item *it = &p->item[p->n_items++];

    it->seq = q;
    it->first = q->n_computed;
    it->n = it->n_sampled = 1;
    it->n_verify = it->score_offset = it->n_scores = 0;
    it->src_row = -1;
    it->last_prompt = false;
    s->tokens_left--;
}

/* Preempt the newest groups until there are blocks for the next tokens of `g`. False:
 * `g` itself was preempted. */
static bool free_blocks_for(struct sched *s, struct group *g)
{
    if (g->n_live * s->c.n_kv_groups <= kvpool_available(&s->pool)) {
        return true; /* each takes at most one in each KV group */
    }
    int32_t need = decode_need(s, &s->pool, g);

    while (kvpool_available(&s->pool) < need) {
        if (drop_unpublished(s)) {
            continue;
        }
        struct group *victim = s->running.last;
        preempt(s, victim);
        if (victim == g) {
            return false;
        }
    }
    return true;
}

/* Whether the next token can be sampled before the last ones are known. A batch can
 * name sampling rows of the step before, but of no older one. */
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

/* will_decode of a group that is not in prefill. */
static bool may_decode(const struct sched *s, const struct group *g)
{
    return may_look_ahead(s, g) && !g->parked;
}

bool will_decode(const struct sched *s, const struct group *g)
{
    return !in_prefill(g) && may_decode(s, g);
}

/* Whether the decode fits behind prefill that was planned first, without preemption. */
static bool fits_behind(struct sched *s, struct group *g)
{
    return g->n_live <= s->tokens_left && decode_need(s, &s->pool, g) <= kvpool_available(&s->pool);
}

bool plan_decode(struct sched *s, struct group *g, struct plan *p)
{
    bool computes = in_prefill(g);

    s->prefilling = s->prefilling || computes || !g->joined;
    if (computes || !may_decode(s, g) || (s->prefill_first && !fits_behind(s, g))) {
        return true;
    }
    if (!free_blocks_for(s, g)) {
        return false;
    }
    for (int32_t i = 0; i < g->width; i++) {
        struct seq *q = &g->seq[i];
        if (q->state != SEQ_LIVE || !can_sample(g, q)) {
            continue; /* at max_tokens: its last token is in flight */
        }
        seq_own_next_block(s, q, p);
        add_decode(s, p, q);
    }
    return true;
}

void plan_decodes(struct sched *s, struct plan *p)
{
    s->prefilling = false;
    for (struct group *g = s->running.first; g; g = g->next) {
        if (!plan_decode(s, g, p)) {
            return; /* `g` was preempted, and with it all behind it */
        }
    }
}

/* ---- the cost model ---- */

double item_us(const struct sched *s, const struct plan_item *it)
{
    return it->n * s->c.cost.token_us + it->first * s->c.cost.context_us;
}

double planned_us(const struct sched *s, const struct plan *p)
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

/* ---- prefill ---- */

/* The score rows of a chunk of n tokens: the row of position i gives the
 * log-probability of the prompt token at i + 1. Returns n, lowered to what the step's
 * logits rows allow. */
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

/* Where the next chunk of a prefill ends, of at most n tokens. With windows and states
 * that is as far as there are blocks, of states at the last snapshot if there are too
 * few; the root of a recompute stops where its siblings join. */
static int32_t prefill_end(struct sched *s, struct seq *q, int32_t n)
{
    const struct group *g = q->group;
    int32_t target = prefill_target(g, q), distance = s->c.snapshot_distance;

    if (s->c.n_kv_groups == 1) {
        return MIN(target, q->n_computed + n);
    }
    int32_t end = seq_extend(s, q);
    int32_t most = MIN(g->joined ? target : MIN(target, g->n_shared), q->n_computed + n);
    s->starved = s->starved || end <= q->n_computed;
    if (!sched_has_states(&s->c) || end <= q->n_computed) {
        return MIN(end, most);
    }
    end = seq_extend_states(s, q, most);
    bool stops = end < most && end / distance * distance > q->n_computed;
    return MIN(stops ? end / distance * distance : end, most);
}

/* The next chunk of a prefill, of at most n tokens; false: there is none. Its score
 * rows are taken. */
static bool make_chunk(struct sched *s, struct seq *q, int32_t n, struct plan_item *ret)
{
    struct group *g = q->group;
    struct plan_item it = {.seq = q, .first = q->n_computed, .src_row = -1};

    it.n = plan_scores(s, g, &it, prefill_end(s, q, n) - q->n_computed);
    if (it.n <= 0) {
        return false;
    }
    s->scores_left -= it.n_scores;
    g->n_scores_planned += it.n_scores;
    if (q->n_tokens == g->n_prompt && it.first + it.n == g->n_prompt) {
        it.last_prompt = true;
        it.n_sampled = g->max_tokens == 0 ? 0 : g->beam ? 1 : g->width;
    }
    *ret = it;
    return true;
}

/* With states a chunk ends at the next snapshot, until lengthen_chunks. */
static void plan_chunk(struct sched *s, struct seq *q, struct plan *p)
{
    int32_t distance = s->c.snapshot_distance, n = s->tokens_left;
    struct plan_item chunk;

    if (sched_has_states(&s->c)) {
        n = MIN(n, distance - q->n_computed % distance);
    }
    if (make_chunk(s, q, n, &chunk)) {
        add_item(s, p, &chunk);
    }
}

/* Of models with states: chunks pass further snapshots with what is left of the step,
 * which is divided evenly. A recurrence takes the tokens of one sequence one after the
 * other, so those of many are sooner done. */
static void lengthen_chunks(struct sched *s)
{
    for (int32_t i = 0; i < s->n_chunks && s->tokens_left > 0; i++) {
        struct plan_item *it = &s->chunk[i];
        int32_t n = it->n + (int32_t)div_ceil(s->tokens_left, s->n_chunks - i);
        s->tokens_left += it->n;
        s->scores_left += it->n_scores;
        it->seq->group->n_scores_planned -= it->n_scores;
        make_chunk(s, it->seq, n, it);
        s->tokens_left -= it->n;
    }
}

void plan_prefill(struct sched *s, struct group *g, struct plan *p)
{
    bool shared_is_there = g->seq[g->root].n_computed >= g->n_shared;

    if (shared_is_there && !g->joined) {
        group_join(s, g);
    }
    for (int32_t i = 0; i < g->width && s->tokens_left > 0; i++) {
        struct seq *q = &g->seq[i];
        if (q->state == SEQ_LIVE && q->n_computed < prefill_target(g, q) &&
            (i == g->root || shared_is_there)) {
            plan_chunk(s, q, p);
        }
    }
}

bool plan_admission(struct sched *s, int64_t now_us, struct plan *p)
{
    struct group *g = sched_admit(s, now_us);

    if (!g) {
        return false;
    }
    plan_prefill(s, g, p);
    return p->n_items + s->n_chunks > 0;
}

/* ---- the prefill budget ---- */

/* Where a walk over running groups in search of prefill begins; NULL: there is none. */
static struct group *first_prefilling(const struct sched *s)
{
    return s->prefilling ? s->running.first : NULL;
}

/* Tokens of prefill, recomputation included, that running and waiting groups still have
 * to compute. */
static int64_t prefill_backlog(const struct sched *s)
{
    int64_t n = s->waiting_tokens;

    for (const struct group *g = first_prefilling(s); g; g = g->next) {
        if (in_prefill(g)) {
            n += group_gap(g);
        }
    }
    return n;
}

/* Round the tokens of a step to a multiple of step_quantum. A step below one quantum is
 * not rounded down. */
static int32_t round_to_quantum(const struct sched *s, double n_tokens, bool up)
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

/* The oldest group in prefill; NULL: none. */
static const struct group *oldest_prefill(struct sched *s)
{
    for (const struct group *g = first_prefilling(s); g; g = g->next) {
        if (in_prefill(g)) {
            return g;
        }
    }
    return waiting_first(s);
}

/* Prefill tokens that are due in this step, whatever the budget: as many in each step
 * as complete the backlog READY_US after the arrival of its oldest group. So under a
 * steady load steps are alike, and prefill fills the capacity that decodes leave,
 * instead of full steps alternating with steps without prefill. A backlog that is late,
 * as at the end of a burst, is computed as fast as the target allows. At least
 * TOKENS_A_DECODE tokens for each decode are due: many decodes are followed by as many
 * new prompts. */
static double due_prefill(struct sched *s, int64_t now_us, const struct plan *p)
{
    enum { READY_US = 850000, TOKENS_A_DECODE = 3 };
    const struct group *oldest = oldest_prefill(s);
    double backlog = (double)prefill_backlog(s),
           waited_us = oldest ? (double)(now_us - oldest->request->arrival_us) : 0;
    double decodes_us = /* time left for decodes */
        READY_US - waited_us - backlog * s->c.cost.token_us * s->cost_scale;

    if (decodes_us <= 0) {
        return INFINITY;
    }
    return MAX(backlog * planned_us(s, p) * s->cost_scale / decodes_us,
               (double)TOKENS_A_DECODE * p->n_items);
}

/* What is due, as far as target_itl_us allows by the cost model. */
double prefill_budget(struct sched *s, int64_t now_us, const struct plan *p)
{
    if (s->c.target_itl_us == 0 || s->c.cost.token_us <= 0 || p->n_items == 0) {
        return INFINITY;
    }
    double us = (double)s->c.target_itl_us / s->cost_scale - planned_us(s, p);
    double most = MAX(us / s->c.cost.token_us, 0);
    int32_t others = s->c.max_num_batched_tokens - s->tokens_left;
    return MIN(round_to_quantum(s, others + most, false),
               round_to_quantum(s, others + due_prefill(s, now_us, p), true)) -
           others;
}

/* Lower the step's budget to the policy's. A block of prefill may always join, so that
 * it does not starve. */
static void limit_prefill(struct sched *s, int64_t now_us, const struct plan *p)
{
    double most = s->policy->prefill_budget(s, now_us, p);

    s->tokens_left = (int32_t)MIN(MAX(most, s->c.block_size), s->tokens_left);
}

/* A step that only decodes tells what so many rows take. */
static void observe_rows(struct sched *s, const struct plan *p, double us)
{
    double contexts_us = 0;

    if (s->drafts->observed) {
        s->drafts->observed(s->drafts, p->n_tokens, p->estimate_us, us);
    }
    for (int32_t i = 0; i < p->n_items; i++) {
        const struct plan_item *it = &p->item[i];
        contexts_us += it->first * s->c.cost.context_us * (1 + it->n_verify / 2.0);
    }
    step_pace_saw(&s->pace, &s->c.cost, p->n_tokens, us - contexts_us);
}

void sched_observe(struct sched *s, const struct plan *p, int64_t us)
{
    const double WEIGHT = 1.0 / 16, LEAST = 0.5, MOST = 4;
    bool mixed = p->n_decode > 0 && p->n_items > p->n_decode;

    if (us > 0 && s->drafts && p->n_tokens == p->n_items + p->n_verify) {
        observe_rows(s, p, (double)us);
    }
    if (us <= 0 || !mixed || p->n_verify > 0 || p->estimate_us <= 0) {
        return;
    }
    double weight = MAX(WEIGHT, 1.0 / ++s->n_observed); /* the first ones count most */
    s->cost_scale = MIN(
        MAX(s->cost_scale + weight * ((double)us / p->estimate_us - s->cost_scale), LEAST), MOST);
}

void sched_observe_gap(struct sched *s, const struct plan *p, int64_t us)
{
    if (s->drafts && !p->ahead && p->n_tokens == p->n_items + p->n_verify) {
        step_pace_saw_gap(&s->pace, (double)us);
    }
}

/* ---- numbering and bookkeeping of the finished plan ---- */

/* `q` gets the token of sampling row `row` of this step: a placeholder until the
 * commit. */
static void append_placeholder(struct sched *s, struct seq *q, int32_t row)
{
    q->n_tokens++;
    q->sample_step = s->step;
    q->sample_row = row;
    if (s->policy->sampled) {
        s->policy->sampled(s, q->group);
    }
}

static void account(struct sched *s, struct plan *p, struct plan_item *it)
{
    struct seq *q = it->seq;
    struct group *g = q->group;

    /* its last token is sampled by the step before */
    if (it->first + it->n - it->n_verify > g->n_prompt + q->n_out) {
        assert(q->sample_step == s->step - 1 && it->n == 1 && it->first == q->n_tokens - 1);
        it->src_row = q->sample_row;
    }
    it->sample_first = p->n_samples;
    p->n_tokens += it->n;
    p->n_logits += it->n_scores + (it->n_sampled > 0) + it->n_verify;
    p->n_samples += it->n_scores + it->n_sampled + it->n_verify;
    q->n_computed += it->n;
    q->n_tokens += it->n_verify;
    q->verify_rows = it->n_verify + 1;
    int32_t row = it->sample_first + it->n_scores;
    for (int32_t i = 1; i < it->n_sampled; i++) {
        seq_fork(s, &g->seq[i], q);
        g->n_live++;
        append_placeholder(s, &g->seq[i], row + i);
    }
    if (it->n_sampled > 0) {
        append_placeholder(s, q, row);
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
        return 0; /* swap-outs, if any, are sent with a later step */
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

/* Give back what no token to come sees: steps in flight may still read it, but the
 * sequence that takes it writes in a later step. Then prefills take as much anew,
 * before any group is admitted: else groups that are admitted again and again could
 * keep one waiting. */
static void move_windows(struct sched *s)
{
    for (struct group *g = s->running.first; g; g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            if (g->seq[i].state == SEQ_LIVE) {
                seq_trim(s, &g->seq[i]);
            }
        }
    }
    for (struct group *g = s->running.first; g; g = g->next) {
        for (int32_t i = 0; i < g->width; i++) {
            if (g->seq[i].state == SEQ_LIVE &&
                g->seq[i].n_computed < prefill_target(g, &g->seq[i])) {
                seq_extend(s, &g->seq[i]);
            }
        }
    }
}

int32_t sched_plan(struct sched *s, int64_t now_us, struct plan *p)
{
    assert(s->n_in_flight < MAX_IN_FLIGHT);
    plan_clear(p);
    p->ahead = s->n_in_flight > 0;
    s->n_chunks = 0;
    s->preempted = s->admission_closed = s->prefill_first = s->starved = false;
    s->prefilling = true;
    s->tokens_left = s->c.max_num_batched_tokens;
    s->scores_left = s->c.max_logits - s->c.max_num_seqs;
    sched_sweep(s, now_us);
    if (drafts_awaited(s)) {
        return 0;
    }
    if (s->c.n_kv_groups > 1) {
        move_windows(s);
    }
    if (s->policy->begin) {
        s->policy->begin(s, now_us, p);
    }
    s->policy->decodes(s, p);
    for (struct group *g; (g = sched_resume(s, p));) {
        plan_decode(s, g, p);
    }
    limit_prefill(s, now_us, p);
    s->policy->prefills(s, now_us, p);
    if (sched_has_states(&s->c)) {
        lengthen_chunks(s);
    }
    if (s->starved && p->n_items + s->n_chunks == 0 && s->running.n > 1 && !drop_unpublished(s)) {
        preempt(s, s->running.last); /* nothing else will free a block */
    }
    plan_drafts(s, p);
    return finish_plan(s, p);
}

/* ---- policy: fcfs and priority ---- */

static void fcfs_push(struct sched *s, struct group *g)
{
    heap_push(&s->queue, g);
}

static void fcfs_remove(struct sched *s, struct group *g)
{
    heap_remove(&s->queue, g);
}

static struct group *fcfs_first(struct sched *s)
{
    return s->queue;
}

static bool fcfs_before(const struct sched *s, const struct group *a, const struct group *b)
{
    (void)s;
    return group_before(a, b);
}

static struct group *fcfs_first_swapped(const struct sched *s)
{
    struct group *g = s->swapped.first;

    while (g && g->parked) {
        g = g->next;
    }
    return g;
}

static void fcfs_prefills(struct sched *s, int64_t now_us, struct plan *p)
{
    for (struct group *g = first_prefilling(s); g && s->tokens_left > 0; g = g->next) {
        plan_prefill(s, g, p);
    }
    while (plan_admission(s, now_us, p))
        ;
}

static const char *fcfs_check(const struct sched *s, int32_t n_heaps)
{
    bool one = s->queue ? n_heaps == 1 && !s->queue->prev : n_heaps == 0;

    return one ? NULL : "S1: the waiting groups are not one heap";
}

const struct sched_policy policy_fcfs = {
    .push = fcfs_push,
    .remove = fcfs_remove,
    .first = fcfs_first,
    .before = fcfs_before,
    .first_swapped = fcfs_first_swapped,
    .decodes = plan_decodes,
    .prefill_budget = prefill_budget,
    .prefills = fcfs_prefills,
    .check = fcfs_check,
};
