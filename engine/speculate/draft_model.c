#include "engine/speculate/draft_model.h"

#include <math.h>
#include <stdlib.h>

#include "engine/speculate/draft_pace.h"
#include "engine/speculate/draft_steps.h"

/* How often drafts are first taken to hold. */
static const float FIRST_RATE = 0.7f;

struct draft_model {
    struct draft_source base;
    struct draft_model_config c;
    struct draft_cache cache;
    struct draft_steps steps;
    struct draft_job *job; /* [max_num_seqs] */
    float rate;            /* of all sequences, the part of drafts that held lately */
    int32_t n_seen;        /* drafts that it was learned from */
    struct draft_pace pace;
    int32_t depth;      /* drafts of a sequence that the next step will want */
    double gain;        /* how much faster the step is with them */
    double tax;         /* tokens that it loses by them, for each sequence */
    int64_t us;         /* spent in steps */
    int64_t start_us;   /* when drafts of the step at work were begun; 0: unknown */
    double drafting_us; /* what they took */
    double device_us;   /* what the target's last step took; 0: unknown */
    struct err failed;  /* code 0: it works */
};

static struct draft_model *model_of(struct draft_source *base)
{
    return CONTAINER_OF(base, struct draft_model, base);
}

static int32_t n_known(const struct draft_model *d, const struct seq *q)
{
    return draft_cache_known(&d->cache, q);
}

/* ---- what pays ---- */

/* The tokens that k drafts of one sequence bring. */
static double sum_of(double rate, int32_t k)
{
    double all = 1, sum = 0;

    for (int32_t i = 0; i < k; i++) {
        sum += all *= rate;
    }
    return sum;
}

/* How many drafts make the most tokens in the time of both models' steps, if those of
 * n sequences hold at `rate`; 0: none do. `gain`: how much faster the step is then. */
static int32_t best_depth(const struct draft_model *d, const struct draft_step *step, int32_t n,
                          double rate, double *gain)
{
    double plain = step->tokens / pace_step_us(&d->pace, step, n, 0), best = plain;
    int32_t depth = 0;

    for (int32_t k = 1; k <= d->c.max_draft; k++) {
        double us = pace_step_us(&d->pace, step, n, k) + pace_drafting_us(&d->pace, n, k);
        double speed = (step->tokens + n * sum_of(rate, k)) / us;
        if (speed > best) {
            best = speed;
            depth = k;
        }
    }
    *gain = best / plain;
    return depth;
}

static void set_depth(struct draft_model *d, const struct draft_step *step, int32_t n, double rate)
{
    d->gain = INFINITY;
    d->tax = 0;
    if (d->failed.code != 0 || n == 0) {
        d->depth = 0;
    } else if (!pace_is_known(&d->pace, step)) {
        d->depth = d->c.max_draft;
    } else {
        d->depth = best_depth(d, step, n, rate, &d->gain);
        d->tax = pace_drafting_us(&d->pace, n, d->depth) * step->tokens /
                 pace_step_us(&d->pace, step, n, 0) / n;
    }
}

static void outlook(struct draft_source *base, const struct draft_step *step, int32_t n)
{
    const float SLOW = 1.0f / 1024;
    struct draft_model *d = model_of(base);

    set_depth(d, step, n, (double)d->rate);
    if (d->depth == 0) { /* it is tried again one day */
        d->rate += SLOW * (FIRST_RATE - d->rate);
        pace_forget(&d->pace);
    }
}

static float rate_of(struct draft_model *d, const struct seq *q)
{
    const struct draft_seq *s = draft_cache_seq(&d->cache, q);

    return s && s->n_seen > 0 ? s->rate : d->rate;
}

static float expect(struct draft_source *base, struct seq *q)
{
    struct draft_model *d = model_of(base);

    return (float)MAX(sum_of((double)rate_of(d, q), d->depth) - d->tax, 0);
}

/* ---- drafting ---- */

/* The drafts of a sequence that are worth a row of the target each. */
static int32_t worth(const struct draft_model *d, const struct draft_step *step, double rate,
                     int32_t most)
{
    double all = rate;
    int32_t n = 0;

    while (n < MIN(most, d->depth) &&
           (!pace_is_known(&d->pace, step) || all * step->us > step->row_us * step->tokens)) {
        all *= rate;
        n++;
    }
    return n;
}

/* A sequence from which nothing is drafted comes back to the rate of all, so that it is
 * tried again one day. */
static void forget(struct draft_model *d, const struct seq *q)
{
    const float SLOW = 1.0f / 256;
    struct draft_seq *s = draft_cache_seq(&d->cache, q);

    if (s) {
        s->rate += SLOW * (d->rate - s->rate);
    }
}

/* Known tokens that may be computed beside drafts: what takes a quarter of the time of
 * the target's step. */
static int32_t catch_up_tokens(const struct draft_model *d, const struct draft_step *step)
{
    enum { LEAST = 64 };
    int32_t most = d->c.executor->info.max_num_batched_tokens;

    return pace_is_known(&d->pace, step)
               ? (int32_t)MIN(MAX(step->us / 4 / d->pace.cost.token_us, LEAST), most)
               : most;
}

/* Whether reading the tokens that it lacks pays: whether half of those that it may
 * still generate save more time. */
static bool is_worth_reading(const struct draft_model *d, const struct draft_step *step,
                             const struct seq *q, int32_t n)
{
    if (!pace_is_known(&d->pace, step)) {
        return true;
    }
    double left = (q->group->max_tokens - q->n_out) / 2.0;
    double saved_us = step->us / step->tokens * (1 - 1 / d->gain);
    return n * d->pace.cost.token_us < left * saved_us;
}

/* Tokens that the step being put together may still have. */
struct left {
    int32_t tokens, catch_up; /* in all; of sequences that lack more than a few */
    int32_t rows;             /* to be sampled; of drafts in one step */
};

/* A sequence whose state was just found; n_drafts 0: it only reads. */
static void add_job(struct draft_model *d, const struct seq *q, int32_t n_drafts, int32_t *n_jobs,
                    struct left *left)
{
    struct draft_seq *s = draft_cache_seq(&d->cache, q);
    int32_t lacks = n_known(d, q) - s->n_valid;
    int32_t n = MIN(lacks, lacks <= DRAFT_FEW ? left->tokens : MIN(left->tokens, left->catch_up));
    bool all = n == lacks;

    if (d->steps.mask_token >= 0) { /* a row for each draft, too */
        n_drafts = MIN(n_drafts, MAX(left->tokens - n, 0) + 1);
        n_drafts = MIN(n_drafts, left->rows);
    }
    if (n <= 0 || !draft_cache_hidden(&d->cache, q) ||
        !draft_cache_take(&d->cache, q, s->n_valid,
                          s->n_valid + n + (all ? MAX(n_drafts - 1, 0) : 0), d->steps.step + 1)) {
        return;
    }
    left->tokens -= n;
    if (d->steps.mask_token >= 0 && all) {
        left->tokens -= MAX(n_drafts - 1, 0);
        left->rows -= n_drafts;
    }
    left->catch_up -= lacks > DRAFT_FEW ? n : 0;
    d->job[(*n_jobs)++] = (struct draft_job){.seq = q,
                                             .state = s,
                                             .first = s->n_valid,
                                             .n = n,
                                             .n_drafts = all ? n_drafts : 0,
                                             .row = {-1, -1}};
}

static int32_t lacking(struct draft_model *d, const struct seq *q)
{
    return n_known(d, q) - draft_cache_seq(&d->cache, q)->n_valid;
}

/* Of n sequences the sums of their rates, and of those that are ready to draft: they
 * lack a few tokens at most. */
struct crowd {
    int32_t n, n_ready;
    double rates, ready_rates;
};

static struct crowd find_all(struct draft_model *d, const struct draft_want *want, int32_t n)
{
    struct crowd c = {.n = n};
    double context = 0;

    for (int32_t i = 0; i < n; i++) {
        draft_cache_find(&d->cache, want[i].seq, d->rate);
        bool is_ready = lacking(d, want[i].seq) <= DRAFT_FEW;
        double rate = (double)rate_of(d, want[i].seq);
        c.rates += rate;
        c.n_ready += is_ready;
        c.ready_rates += is_ready ? rate : 0;
        context += n_known(d, want[i].seq);
    }
    d->pace.context = context / n;
    return c;
}

/* Sequences that are ready draft, if that pays for as many as there are. The others
 * read on, if it paid for all. */
static int32_t make_jobs(struct draft_model *d, const struct draft_want *want, int32_t n,
                         const struct draft_step *step)
{
    const struct executor_info *x = &d->c.executor->info;
    struct left left = {x->max_num_batched_tokens, catch_up_tokens(d, step), x->max_samples};
    struct crowd c = find_all(d, want, n);
    int32_t n_jobs = 0;

    set_depth(d, step, c.n_ready, c.ready_rates / MAX(c.n_ready, 1));
    for (int32_t i = 0; i < n; i++) {
        const struct seq *q = want[i].seq;
        int32_t n_drafts = worth(d, step, (double)rate_of(d, q), want[i].most);
        if (lacking(d, q) <= DRAFT_FEW && n_drafts > 0) {
            add_job(d, q, n_drafts, &n_jobs, &left);
        } else if (lacking(d, q) <= DRAFT_FEW) {
            forget(d, q);
        }
    }
    set_depth(d, step, n, c.rates / n);
    for (int32_t i = 0; i < n && d->depth > 0; i++) {
        const struct seq *q = want[i].seq;
        int32_t lacks = lacking(d, q),
                n_drafts = worth(d, step, (double)rate_of(d, q), want[i].most);
        if (lacks > DRAFT_FEW && n_drafts > 0 && is_worth_reading(d, step, q, lacks)) {
            add_job(d, q, n_drafts, &n_jobs, &left);
        }
    }
    return n_jobs;
}

/* What was computed is there; returns the most drafts of a sequence. */
static int32_t end_jobs(struct draft_model *d, int32_t n_jobs, bool *only_few)
{
    int32_t most = 0;

    *only_few = true;
    for (int32_t i = 0; i < n_jobs; i++) {
        const struct draft_job *j = &d->job[i];
        draft_cache_written(&d->cache, j->seq, j->first + j->n);
        j->state->n_from = j->first + j->n;
        most = MAX(most, j->n_drafts);
        *only_few = *only_few && j->n <= DRAFT_FEW;
    }
    return most;
}

/* Learn from the time since the step before began, if that drafted: what is neither the
 * draft model's nor the target's is the host's. */
static void learn_gap(struct draft_model *d, int64_t start_us)
{
    const double WEIGHT = 1.0 / 16;
    double us = (double)(start_us - d->start_us) - d->drafting_us - d->device_us;

    if (d->start_us > 0 && d->device_us > 0 && us >= 0) {
        d->pace.gap_us += WEIGHT * (MIN(us, d->device_us) - d->pace.gap_us);
    }
    d->start_us = 0;
    d->device_us = 0;
}

static bool pays_for_all(struct draft_model *d, const struct draft_want *want, int32_t n,
                         const struct draft_step *step)
{
    double rates = 0;

    for (int32_t i = 0; i < n; i++) {
        rates += (double)rate_of(d, want[i].seq);
    }
    set_depth(d, step, n, rates / MAX(n, 1));
    for (int32_t i = 0; i < n && d->depth == 0; i++) {
        forget(d, want[i].seq);
    }
    return d->depth > 0;
}

static double prepare(struct draft_source *base, struct draft_want *want, int32_t n,
                      const struct draft_step *step)
{
    struct draft_model *d = model_of(base);
    int64_t start_us = d->c.now_us();
    bool only_few;

    learn_gap(d, start_us);
    if (!pays_for_all(d, want, n, step)) {
        return 0;
    }
    int32_t n_jobs = make_jobs(d, want, n, step);
    if (n_jobs == 0) {
        draft_cache_drop_updates(&d->cache);
        return 0;
    }
    d->failed.code = draft_steps_run(&d->steps, &d->cache, d->job, n_jobs, &d->failed);
    int32_t most = end_jobs(d, n_jobs, &only_few);
    d->drafting_us = (double)(d->c.now_us() - start_us);
    d->us += (int64_t)d->drafting_us;
    if (!pace_is_known(&d->pace, step)) {
        return 0;
    }
    if (most > 0 && only_few) {
        pace_saw_drafting(&d->pace, n_jobs, most, d->drafting_us);
        d->start_us = start_us;
    }
    return d->drafting_us;
}

static void observed(struct draft_source *base, int32_t n_rows, double estimate_us, double us)
{
    struct draft_model *d = model_of(base);

    d->device_us = us;
    pace_saw_target(&d->pace, n_rows, estimate_us, us);
}

static int32_t draft(struct draft_source *base, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    struct draft_model *d = model_of(base);
    const struct draft_seq *s = draft_cache_seq(&d->cache, q);
    float all = 1;

    if (d->failed.code != 0 || !s || s->n_from != n_known(d, q)) {
        return 0;
    }
    int32_t n = MIN(most, s->n_drafts);
    for (int32_t i = 0; i < n; i++) {
        token[i] = s->token[i];
        prob[i] = all *= s->rate;
    }
    return n;
}

/* Both rates are means of what was seen last, at first of all that was seen; that of
 * the sequence moves faster. */
static void verified(struct draft_source *base, struct seq *q, int32_t n, int32_t n_accepted)
{
    const float QUICK = 1.0f / 16, SLOW = 1.0f / 256;
    enum { DOUBT = 8, MANY = 1 << 20 }; /* drafts that the first rates stand for */
    struct draft_model *d = model_of(base);
    struct draft_seq *s = draft_cache_seq(&d->cache, q);

    if (s && s->n_seen == 0) {
        s->rate = d->rate;
    }
    for (int32_t i = 0; s && i < MIN(n, n_accepted + 1); i++) {
        float held = i < n_accepted;
        s->n_seen = MIN(s->n_seen + 1, MANY);
        d->n_seen = MIN(d->n_seen + 1, MANY);
        s->rate += MAX(QUICK, 1.0f / (float)(DOUBT + s->n_seen)) * (held - s->rate);
        d->rate += MAX(SLOW, 1.0f / (float)(DOUBT + d->n_seen)) * (held - d->rate);
    }
}

static void ended(struct draft_source *base, struct group *g)
{
    (void)base, (void)g;
}

/* ---- start and stop ---- */

int draft_model_open(struct draft_model **ret, const struct draft_model_config *c, struct err *e)
{
    const struct executor_info *x = &c->executor->info;
    struct draft_model *d = calloc(1, sizeof(*d));

    if (!d) {
        return err_nomem(e, "drafts");
    }
    d->base = (struct draft_source){.expect = expect,
                                    .draft = draft,
                                    .verified = verified,
                                    .ended = ended,
                                    .outlook = outlook,
                                    .prepare = prepare,
                                    .observed = observed};
    d->c = *c;
    d->pace.cost = c->cost;
    d->rate = FIRST_RATE;
    d->job = calloc((size_t)x->max_num_seqs, sizeof(*d->job));
    int rc = d->job ? draft_cache_init(&d->cache, x->n_blocks, x->block_size, x->max_len,
                                       x->max_num_seqs, c->secret, e)
                    : err_nomem(e, "drafts");
    if (rc == 0) {
        d->cache.shift = c->shift;
        d->cache.reads_drafts = c->mask_token < 0;
        d->pace.one_step = c->mask_token >= 0;
        rc = draft_steps_init(&d->steps, c->executor, c->vocab, c->mask_token, e);
    }
    if (rc < 0) {
        draft_model_free(d);
        return rc;
    }
    *ret = d;
    return 0;
}

void draft_model_free(struct draft_model *d)
{
    if (!d) {
        return;
    }
    draft_cache_release(&d->cache);
    draft_steps_release(&d->steps);
    free(d->job);
    free(d);
}

struct draft_source *draft_model_source(struct draft_model *d)
{
    return &d->base;
}

void draft_model_replace(struct draft_model *d, const struct seq *q, int32_t n,
                         const int32_t *token)
{
    struct draft_seq *s = draft_cache_seq(&d->cache, q);

    for (int32_t i = 0; s && i < MIN(n, s->n_drafts); i++) {
        s->token[i] = token[i];
    }
}

int64_t draft_model_us(const struct draft_model *d)
{
    return d->us;
}

const char *draft_model_death(const struct draft_model *d)
{
    return d->failed.code != 0 ? d->failed.text : NULL;
}
