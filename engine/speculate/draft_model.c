#include "engine/speculate/draft_model.h"

#include <stdlib.h>

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
    int32_t depth;         /* drafts of a sequence that the next step will want */
    double tax;            /* tokens that the step loses by them, for each sequence */
    int64_t us;            /* spent in steps */
    struct err failed;     /* code 0: it works */
};

static struct draft_model *model_of(struct draft_source *base)
{
    return CONTAINER_OF(base, struct draft_model, base);
}

static int32_t n_known(const struct seq *q)
{
    return q->group->n_prompt + q->n_out;
}

/* ---- what pays ---- */

static bool is_known(const struct draft_model *d, const struct draft_step *step)
{
    return d->c.cost.token_us > 0 && step->us > 0;
}

/* The time of a step of the draft model that decodes n sequences. */
static double decode_us(const struct draft_model *d, int32_t n)
{
    const struct step_cost *c = &d->c.cost;
    int32_t few = MIN(n, STEP_FEW_ROWS);

    return c->fixed_us + MAX(few - 1, 0) * MAX(c->row_us, c->token_us) +
           (n - few) * MAX(c->many_row_us, c->token_us);
}

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
 * n sequences hold at `rate`; 0: none do. */
static int32_t best_depth(const struct draft_model *d, const struct draft_step *step, int32_t n,
                          double rate)
{
    double best = step->tokens / step->us, one = decode_us(d, n) + n * step->row_us;
    int32_t depth = 0;

    for (int32_t k = 1; k <= d->c.max_draft; k++) {
        double speed = (step->tokens + n * sum_of(rate, k)) / (step->us + k * one);
        if (speed > best) {
            best = speed;
            depth = k;
        }
    }
    return depth;
}

static void set_depth(struct draft_model *d, const struct draft_step *step, int32_t n, double rate)
{
    if (d->failed.code != 0 || n == 0) {
        d->depth = 0;
    } else if (!is_known(d, step)) {
        d->depth = d->c.max_draft;
        d->tax = 0;
    } else {
        d->depth = best_depth(d, step, n, rate);
        d->tax = d->depth * decode_us(d, n) * step->tokens / step->us / n;
    }
}

static void outlook(struct draft_source *base, const struct draft_step *step, int32_t n)
{
    const float SLOW = 1.0f / 4096;
    struct draft_model *d = model_of(base);

    set_depth(d, step, n, (double)d->rate);
    if (d->depth == 0) { /* it is tried again one day */
        d->rate += SLOW * (FIRST_RATE - d->rate);
    }
}

static float rate_of(struct draft_model *d, const struct seq *q)
{
    const struct draft_seq *s = draft_cache_seq(&d->cache, q);

    return s ? s->rate : d->rate;
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
           (!is_known(d, step) || all * step->us > step->row_us * step->tokens)) {
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

/* Known tokens that may be computed beside drafts: what takes half as long as the
 * target's step. */
static int32_t catch_up_tokens(const struct draft_model *d, const struct draft_step *step)
{
    enum { LEAST = 64 };
    int32_t most = d->c.executor->info.max_num_batched_tokens;

    return is_known(d, step) ? (int32_t)MIN(MAX(step->us / 2 / d->c.cost.token_us, LEAST), most)
                             : most;
}

/* Tokens that the step being put together may still have. */
struct left {
    int32_t tokens, catch_up; /* in all; of sequences that lack more than a few */
};

static void add_job(struct draft_model *d, const struct draft_want *w, int32_t n_drafts,
                    int32_t *n_jobs, struct left *left)
{
    struct draft_seq *s = draft_cache_find(&d->cache, w->seq, d->rate);
    int32_t lacks = n_known(w->seq) - s->n_valid;
    int32_t n = MIN(lacks, lacks <= DRAFT_FEW ? left->tokens : MIN(left->tokens, left->catch_up));
    bool all = n == lacks;

    if (n <= 0 || !draft_cache_take(&d->cache, w->seq, s->n_valid,
                                    s->n_valid + n + (all ? n_drafts - 1 : 0), d->steps.step + 1)) {
        return;
    }
    left->tokens -= n;
    left->catch_up -= lacks > DRAFT_FEW ? n : 0;
    d->job[(*n_jobs)++] = (struct draft_job){.seq = w->seq,
                                             .state = s,
                                             .first = s->n_valid,
                                             .n = n,
                                             .n_drafts = all ? n_drafts : 0,
                                             .row = {-1, -1}};
}

static int32_t make_jobs(struct draft_model *d, const struct draft_want *want, int32_t n,
                         const struct draft_step *step)
{
    struct left left = {d->c.executor->info.max_num_batched_tokens, catch_up_tokens(d, step)};
    int32_t n_jobs = 0;

    for (int32_t i = 0; i < n; i++) {
        int32_t n_drafts = worth(d, step, (double)rate_of(d, want[i].seq), want[i].most);
        if (n_drafts > 0) {
            add_job(d, &want[i], n_drafts, &n_jobs, &left);
        } else {
            forget(d, want[i].seq);
        }
    }
    return n_jobs;
}

/* The mean of the sequences' rates. */
static double mean_rate(struct draft_model *d, const struct draft_want *want, int32_t n)
{
    double sum = 0;

    for (int32_t i = 0; i < n; i++) {
        sum += (double)rate_of(d, want[i].seq);
    }
    return n > 0 ? sum / n : 0;
}

static double prepare(struct draft_source *base, struct draft_want *want, int32_t n,
                      const struct draft_step *step)
{
    struct draft_model *d = model_of(base);
    int64_t start_us = clock_us();
    int32_t most = 0;

    set_depth(d, step, n, mean_rate(d, want, n));
    int32_t n_jobs = d->depth > 0 ? make_jobs(d, want, n, step) : 0;
    if (n_jobs == 0) {
        return 0;
    }
    int rc = draft_steps_run(&d->steps, &d->cache, d->job, n_jobs, &d->failed);
    d->failed.code = rc;
    for (int32_t i = 0; i < n_jobs; i++) {
        const struct draft_job *j = &d->job[i];
        draft_cache_written(&d->cache, j->seq, j->first + j->n);
        j->state->n_from = j->first + j->n;
        most = MAX(most, j->n_drafts);
    }
    d->us += clock_us() - start_us;
    return is_known(d, step) ? most * decode_us(d, n_jobs) : 0;
}

static int32_t draft(struct draft_source *base, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    struct draft_model *d = model_of(base);
    const struct draft_seq *s = draft_cache_seq(&d->cache, q);
    float all = 1;

    if (d->failed.code != 0 || !s || s->n_from != n_known(q)) {
        return 0;
    }
    int32_t n = MIN(most, s->n_drafts);
    for (int32_t i = 0; i < n; i++) {
        token[i] = s->token[i];
        prob[i] = all *= s->rate;
    }
    return n;
}

/* Both rates are means of what was seen last; that of the sequence moves faster. */
static void verified(struct draft_source *base, struct seq *q, int32_t n, int32_t n_accepted)
{
    const float QUICK = 1.0f / 16, SLOW = 1.0f / 256;
    struct draft_model *d = model_of(base);
    struct draft_seq *s = draft_cache_seq(&d->cache, q);

    for (int32_t i = 0; s && i < MIN(n, n_accepted + 1); i++) {
        float held = i < n_accepted;
        s->rate += QUICK * (held - s->rate);
        d->rate += SLOW * (held - d->rate);
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
                                    .prepare = prepare};
    d->c = *c;
    d->rate = FIRST_RATE;
    d->job = calloc((size_t)x->max_num_seqs, sizeof(*d->job));
    int rc = d->job ? draft_cache_init(&d->cache, x->n_blocks, x->block_size, x->max_len,
                                       x->max_num_seqs, c->secret, e)
                    : err_nomem(e, "drafts");
    if (rc == 0) {
        rc = draft_steps_init(&d->steps, c->executor, c->vocab, e);
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

int64_t draft_model_us(const struct draft_model *d)
{
    return d->us;
}

const char *draft_model_death(const struct draft_model *d)
{
    return d->failed.code != 0 ? d->failed.text : NULL;
}
