/* Speculative decoding: which steps verify drafts, and how many.
 *
 * Drafts take only what a step has left: they are added when all else has been planned,
 * into the token budget, the logits rows and the blocks that are then free, less a
 * block for each sequence to come. So they delay nothing and preempt nobody. Among
 * those that fit, over all sequences, the likeliest are verified, as many as make the
 * most tokens in their time (step_pace.h). So a step has none whose time is that of its
 * tokens, as with prefill or with very many sequences.
 *
 * How many tokens a sequence gets is known only when its step is committed. Until then
 * nothing else is planned: a step planned ahead could hold the other sequences alone,
 * and from then on each half of them would wait for the other's steps. While drafts
 * bring less than the host's work between two steps costs, no step is waited for, and
 * sequences whose last token is in flight are decoded without drafts.
 *
 * Keys and values behind a draft that does not hold are written over. A recurrent state
 * that has read it cannot go back, so in a KV group of states each draft has a spare
 * block, to which the states behind it go; those of the last one that holds become the
 * table's.
 */
#include <assert.h>
#include <string.h>

#include "engine/sched/sched_impl.h"

/* How much faster drafts must make a step. Those that are to be waited for must also
 * make up for the gap between two steps, in which the device has nothing to do. */
static const double GAIN = 1 + 1.0 / 64;

/* Tokens of a step that verifies drafts, at most: measured costs of few rows say
 * nothing of more, whose products are bound by arithmetic. */
enum { VERIFY_TOKENS = 256 };

void sched_speculate(struct sched *s, struct draft_source *d, int32_t max_draft)
{
    assert(max_draft >= 1 && max_draft <= LIMIT_DRAFT);
    s->drafts = d;
    s->max_draft = max_draft;
}

static bool can_verify(const struct seq *q)
{
    return q->state == SEQ_LIVE && !q->group->beams && q->n_out > 0 &&
           q->n_tokens > q->group->n_prompt;
}

/* A step as far as it is planned. */
struct room {
    struct pace_step step;
    int32_t left; /* tokens that still fit */
    /* Rows that may have biases or masks of their own: the packer and the backends hold
     * as many of each as there are slots. */
    int32_t own_rows;
};

/* The time that reading n tokens of context takes a row behind another one of the same
 * sequence: half as long. */
static double behind_us(const struct sched *s, double n)
{
    return n * s->c.cost.context_us / 2;
}

/* The step as a source of drafts sees it. */
static struct draft_step step_of(const struct sched *s, const struct room *r)
{
    const struct step_cost *c = &s->c.cost;
    double row = r->step.tokens < STEP_FEW_ROWS ? c->row_us : c->many_row_us;

    return (struct draft_step){.tokens = r->step.tokens,
                               .us = c->token_us > 0 ? r->step.us : 0,
                               .token_us = c->token_us,
                               .row_us = MAX(c->token_us, row)};
}

/* ---- whether drafts are worth a wait ---- */

/* What the sequences of a running group are expected to draft. */
static void expect_of(struct sched *s, struct group *g, struct draft_odds *o, double *ret_sum)
{
    for (int32_t i = 0; i < g->width; i++) {
        struct seq *q = &g->seq[i];
        if (q->state != SEQ_LIVE || !can_verify(q) || !can_sample(g, q)) {
            continue;
        }
        double n = (double)s->drafts->expect(s->drafts, q);
        float p = (float)(n / (1 + n)), all = p; /* n = p + p^2 + … */
        for (int32_t k = 0; k < s->max_draft && odds_level(all) > 0; k++) {
            odds_add(o, all);
            all *= p;
        }
        *ret_sum += n;
    }
}

/* A step in which all running sequences decode. */
static struct pace_step outlook_of(const struct sched *s)
{
    struct pace_step p = {.us = s->c.cost.fixed_us, .gain = GAIN, .number = s->step + 1};
    double context = 0;

    for (const struct group *g = s->running.first; g; g = g->next) {
        p.rows += g->n_live;
        context += (double)g->n_live * g->seq[0].n_tokens;
    }
    p.tokens = p.rows;
    p.extra_us = context * s->c.cost.context_us;
    p.us += p.rows * s->c.cost.token_us + p.extra_us;
    p.draft_us = behind_us(s, context / MAX(p.rows, 1));
    return p;
}

bool drafts_awaited(struct sched *s)
{
    struct draft_odds odds = {{0}, {0}};
    double sum = 0;

    if (!s->drafts || s->n_in_flight == 0) {
        return false;
    }
    for (int32_t i = 0; i < s->n_in_flight; i++) {
        if (s->in_flight[i]->n_verify > 0) {
            return true;
        }
    }
    struct room r = {.step = outlook_of(s)};
    int32_t most = MIN(s->c.max_num_batched_tokens, VERIFY_TOKENS) - r.step.rows;
    if (most <= 0) {
        return false;
    }
    if (s->drafts->outlook) {
        struct draft_step step = step_of(s, &r);
        s->drafts->outlook(s->drafts, &step, r.step.rows);
    }
    for (struct group *g = s->running.first; g; g = g->next) {
        if (!in_prefill(g) && !g->parked) {
            expect_of(s, g, &odds, &sum);
        }
    }
    if (s->c.cost.token_us <= 0) {
        return sum > (GAIN - 1) * r.step.rows;
    }
    step_pace_saw_odds(&s->pace, &s->c.cost, &r.step, &odds, most);
    if (!step_pace_refill(&s->pace, &s->c.cost, &r.step)) {
        return false;
    }
    bool is_trial = step_pace_choose(&s->pace, &s->c.cost, &r.step, &odds, most) > 0 &&
                    s->pace.tried_step == r.step.number;
    return is_trial || step_pace_awaits(&s->pace, &s->c.cost, &r.step);
}

/* ---- room for drafts ---- */

/* Blocks that the tables of `q` lack for n_tokens, of which all but the next one are
 * drafts. */
static int32_t blocks_lacking(const struct sched *s, const struct seq *q, int32_t n_tokens)
{
    int32_t n = 0;

    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        n += sched_is_state(&s->c, k) ? n_tokens - q->n_computed - 1
                                      : MAX(blocks_for(s, n_tokens) - q->table[k].n_blocks, 0);
    }
    return n;
}

/* Whether there are blocks for n_tokens of `q`, and one more for each sequence. Windows
 * need no look: a table holds what a whole step writes behind them. */
static bool tables_hold(const struct sched *s, const struct seq *q, int32_t n_tokens)
{
    return kvpool_available(&s->pool) - blocks_lacking(s, q, n_tokens) >=
           s->n_reserved * s->c.n_kv_groups;
}

/* Blocks for n_tokens in the groups without states. */
static void take_blocks(struct sched *s, struct seq *q, int32_t n_tokens)
{
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        struct block_table *t = &q->table[k];
        while (!sched_is_state(&s->c, k) && t->n_blocks < blocks_for(s, n_tokens)) {
            t->block[t->n_blocks++] = take_block(s);
        }
    }
}

/* A block for the states behind each of n drafts. */
static void take_spare(struct sched *s, struct seq *q, int32_t n)
{
    int32_t n_states = sched_states_before(&s->c, s->c.n_kv_groups);

    q->n_spare = n_states > 0 ? n : 0;
    for (int32_t i = 0; i < n_states * n; i++) {
        q->spare[i] = take_block(s);
    }
}

/* In KV group k the spare blocks of the n_accepted drafts from `position` on become the
 * table's, at each index that of the last draft. */
static void keep_states(struct sched *s, struct seq *q, int32_t k, int32_t position,
                        int32_t n_accepted)
{
    int32_t *spare = q->spare + (ptrdiff_t)sched_states_before(&s->c, k) * q->n_spare;
    struct block_table *t = &q->table[k];

    for (int32_t i = 0; i < n_accepted; i++) {
        int32_t at = (position + i) / s->c.block_size;
        if (at < t->n_blocks) {
            kvpool_unref(&s->pool, t->block[at]);
        } else {
            t->n_blocks = at + 1;
        }
        t->block[at] = spare[i];
        t->n_synced = MIN(t->n_synced, at);
        spare[i] = -1;
    }
}

/* Give back the blocks behind those of n_tokens, in the groups without states. */
static void drop_behind(struct sched *s, struct seq *q, int32_t n_tokens)
{
    for (int32_t k = 0; k < s->c.n_kv_groups; k++) {
        struct block_table *t = &q->table[k];
        if (sched_is_state(&s->c, k)) {
            continue;
        }
        while (t->n_blocks > MAX(blocks_for(s, n_tokens), t->first)) {
            kvpool_unref(&s->pool, t->block[--t->n_blocks]);
        }
        t->n_synced = MIN(t->n_synced, t->n_blocks);
    }
}

static struct room step_room(const struct sched *s, const struct plan *p)
{
    struct room r = {.step = {.us = planned_us(s, p),
                              .has_prefill = s->n_chunks > 0,
                              .gain = GAIN,
                              .number = s->step + 1}};
    double context = 0;

    for (int32_t i = 0; i < p->n_items; i++) {
        r.step.rows += p->item[i].n;
        context += p->item[i].first;
    }
    for (int32_t i = 0; i < s->n_chunks; i++) {
        r.step.rows += s->chunk[i].n;
    }
    r.step.tokens = r.step.rows;
    r.step.extra_us = r.step.has_prefill ? 0 : context * s->c.cost.context_us;
    r.step.draft_us = behind_us(s, context / MAX(p->n_items, 1));
    r.left = MIN(s->c.max_num_batched_tokens, VERIFY_TOKENS) - r.step.rows;
    r.own_rows = s->c.max_num_seqs - p->n_items - s->n_chunks;
    return r;
}

/* Whether the sequence's rows differ in their biases or masks. */
static bool has_own_rows(const struct seq *q)
{
    const struct group *g = q->group;

    return q->constraint || g->words.n > 0 || q->n_out <= g->request->params.min_tokens;
}

static int32_t most_drafts(struct sched *s, const struct seq *q, const struct room *r)
{
    int32_t n = MIN(MIN(s->max_draft, r->left), s->scores_left);

    n = MIN(n, q->group->max_tokens - q->n_out - 1);
    if (has_own_rows(q)) {
        n = MIN(n, r->own_rows);
    }
    while (n > 0 && !tables_hold(s, q, q->n_computed + 1 + n)) {
        n--;
    }
    return n;
}

/* ---- a step's drafts ---- */

static bool takes_drafts(const struct plan_item *it)
{
    const struct seq *q = it->seq;

    return it->n_sampled == 1 && can_verify(q) && q->n_tokens == q->group->n_prompt + q->n_out;
}

/* Let the source draft for all items at once: each has its share of the room, and
 * blocks for it. False: it does not. */
static bool prepare_drafts(struct sched *s, const struct plan *p, struct room *r)
{
    struct draft_step step = step_of(s, r);
    int32_t n = 0, n_items = 0;

    if (!s->drafts->prepare || s->n_in_flight > 0) {
        return false;
    }
    for (int32_t i = 0; i < p->n_items; i++) {
        n_items += takes_drafts(&p->item[i]);
    }
    for (int32_t i = 0; i < p->n_items; i++) {
        const struct plan_item *it = &p->item[i];
        int32_t most = takes_drafts(it) ? most_drafts(s, it->seq, r) : 0;
        most = MIN(most, MIN(r->left, s->scores_left) / MAX(n_items, 1));
        if (most > 0) {
            take_blocks(s, it->seq, it->first + it->n + most);
            s->want[n++] = (struct draft_want){it->seq, most};
        }
    }
    if (n > 0) {
        r->step.extra_us += s->drafts->prepare(s->drafts, s->want, n, &step);
    }
    return true;
}

/* The drafts that an item could have; they are kept behind the sequence's known tokens,
 * their chances in its candidate. */
static void find_drafts(struct sched *s, const struct plan_item *it, const struct room *r,
                        struct draft_candidate *c)
{
    struct seq *q = it->seq;
    int32_t most = takes_drafts(it) ? most_drafts(s, q, r) : 0;

    c->n = most > 0 ? s->drafts->draft(s->drafts, q, most, q->out + q->n_out, c->chance) : 0;
    for (int32_t i = 1; i < c->n; i++) {
        c->chance[i] = MIN(c->chance[i], c->chance[i - 1]);
    }
}

/* The likeliest drafts of all candidates: those above a level, and so many of it. */
struct threshold {
    int32_t level, left;
};

static struct threshold choose_drafts(struct sched *s, const struct room *r, int32_t n)
{
    struct draft_odds odds = {{0}, {0}};
    struct threshold t = {.level = ODDS_LEVELS};
    int32_t most = MIN(r->left, s->scores_left);

    for (int32_t i = 0; i < n; i++) {
        for (int32_t k = 0; k < s->candidate[i].n; k++) {
            odds_add(&odds, s->candidate[i].chance[k]);
        }
    }
    if (s->c.cost.token_us <= 0) {
        return (struct threshold){.level = -1};
    }
    if (s->n_in_flight == 0 && !r->step.has_prefill) {
        step_pace_saw_odds(&s->pace, &s->c.cost, &r->step, &odds, most);
    }
    t.left = step_pace_choose(&s->pace, &s->c.cost, &r->step, &odds, most);
    while (t.left > 0 && t.left > odds.n[t.level - 1]) {
        t.left -= odds.n[--t.level];
    }
    t.level -= t.left > 0;
    return t;
}

/* How many of an item's drafts are verified. */
static int32_t take_drafts(struct sched *s, const struct plan_item *it,
                           const struct draft_candidate *c, struct threshold *t, struct room *r)
{
    int32_t n = 0, most = c->n > 0 ? MIN(c->n, most_drafts(s, it->seq, r)) : 0;

    while (n < most) {
        int32_t level = odds_level(c->chance[n]);
        if (level < t->level || (level == t->level && t->left == 0)) {
            break;
        }
        t->left -= level == t->level;
        n++;
    }
    r->left -= n;
    s->scores_left -= n;
    r->own_rows -= has_own_rows(it->seq) ? n : 0;
    return n;
}

/* Items with drafts come before prefill, as decodes do. */
static void insert_chunk(struct sched *s, int32_t at, const struct plan_item *it)
{
    memmove(s->chunk + at + 1, s->chunk + at, (size_t)(s->n_chunks - at) * sizeof(*s->chunk));
    s->chunk[at] = *it;
    s->n_chunks++;
}

void plan_drafts(struct sched *s, struct plan *p)
{
    int32_t kept = 0, n_verifying = 0;

    if (!s->drafts) {
        return;
    }
    struct room r = step_room(s, p);
    bool costs = s->c.cost.token_us > 0 && s->n_in_flight == 0 && r.step.rows > 0;
    if (costs && !step_pace_refill(&s->pace, &s->c.cost, &r.step)) {
        step_pace_spend(&s->pace, &s->c.cost, &r.step, 0, !r.step.has_prefill);
        return;
    }
    bool has_blocks = prepare_drafts(s, p, &r);
    for (int32_t i = 0; i < p->n_items; i++) {
        find_drafts(s, &p->item[i], &r, &s->candidate[i]);
    }
    struct threshold t = choose_drafts(s, &r, p->n_items);
    for (int32_t i = 0; i < p->n_items; i++) {
        struct plan_item it = p->item[i];
        int32_t n = take_drafts(s, &it, &s->candidate[i], &t, &r);
        if (has_blocks && takes_drafts(&it)) {
            drop_behind(s, it.seq, it.first + it.n + n);
        }
        if (n == 0) {
            p->item[kept++] = it;
            continue;
        }
        it.n += n;
        it.n_verify = n;
        take_blocks(s, it.seq, it.first + it.n);
        take_spare(s, it.seq, n);
        insert_chunk(s, n_verifying++, &it);
        p->n_verify += n;
    }
    p->n_items = kept;
    if (costs) {
        step_pace_spend(&s->pace, &s->c.cost, &r.step, p->n_verify, !r.step.has_prefill);
    }
}

/* ---- commit ---- */

int32_t drafts_accepted(const struct plan_item *it, const int32_t *token)
{
    const struct seq *q = it->seq;
    int32_t n = 0, most = MIN(it->n_verify, q->verify_rows - 1);

    while (n < most && token[n] == q->out[q->n_out + n]) {
        n++;
    }
    return n;
}

void drafts_settle(struct sched *s, const struct plan_item *it, int32_t n_accepted)
{
    struct seq *q = it->seq;
    struct group *g = q->group;
    int32_t void_tokens = it->n_verify - n_accepted;

    assert(g->state == GROUP_RUNNING); /* nothing was planned since, so it is not preempted */
    q->n_tokens -= void_tokens;
    q->n_computed -= void_tokens;
    drop_behind(s, q, q->n_computed);
    for (int32_t k = 0; k < s->c.n_kv_groups && q->n_spare > 0; k++) {
        if (sched_is_state(&s->c, k)) {
            keep_states(s, q, k, it->first + it->n - it->n_verify, n_accepted);
        }
    }
    seq_drop_spare(s, q);
    for (int32_t i = 0; i < n_accepted && s->policy->sampled; i++) {
        s->policy->sampled(s, g);
    }
    step_pace_earn(&s->pace, n_accepted);
    g->n_drafted += it->n_verify;
    g->n_accepted += n_accepted;
    s->counted.drafts++;
    s->counted.draft_tokens += (uint64_t)it->n_verify;
    for (int32_t i = 0; i < n_accepted; i++) {
        s->counted.accepted_tokens[i]++;
    }
    s->drafts->verified(s->drafts, q, it->n_verify, n_accepted);
}
