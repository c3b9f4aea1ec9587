/* What is sampled with drafts has the distribution of what is sampled without: a
 * chi-square test of 10^6 tokens of a Markov chain over 64 tokens, whose drafts a draft
 * model of another opinion makes. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/speculate/draft_model.h"
#include "kernels/noise.h"
#include "tests/sim/rig.h"
#include "tests/sim/toy.h"

enum { VOCAB = 64, DRAWS = 1000000, LENGTH = 110, ROWS = 256, SEQS = 32 };

/* The logits of both models behind a token. */
static float target[VOCAB][VOCAB], draft[VOCAB][VOCAB];

struct tally {
    int64_t pair[VOCAB][VOCAB], n; /* a token behind another */
    int64_t drafted, accepted;
};

/* A standard normal number. */
static float normal(struct rng *r)
{
    double u = ((double)(rng_next(r) >> 11) + 0.5) * 0x1p-53,
           v = (double)(rng_next(r) >> 11) * 0x1p-53;

    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

static void make_models(void)
{
    struct rng r = {71};

    for (int32_t i = 0; i < VOCAB; i++) {
        for (int32_t k = 0; k < VOCAB; k++) {
            target[i][k] = 2 * normal(&r);
            draft[i][k] = target[i][k] + normal(&r);
        }
    }
}

static int32_t sample(const float *logit, const struct sample_row *row)
{
    uint64_t key = noise_key(row->seed, row->position);
    float best = -INFINITY, inverse = noise_inv_temperature(row->temperature);
    int32_t ret = 0;

    for (int32_t t = 0; t < VOCAB; t++) {
        float score = logit[t] * inverse + noise_gumbel(noise_bits(key, t));
        if (score > best) {
            best = score;
            ret = t;
        }
    }
    return ret;
}

/* The tokens that a model samples in a step, into ret[n_samples]; before: those of the
 * step before. */
static void sample_all(float (*model)[VOCAB], const struct batch *b, const int32_t *before,
                       int32_t *ret)
{
    for (int32_t i = 0; i < b->n_samples; i++) {
        int32_t t = b->logits_token[b->sample[i].logits_row];
        int32_t id = b->token_src[t] >= 0 ? before[b->token_src[t]] : b->token[t];
        ret[i] = sample(model[id], &b->sample[i]);
    }
}

/* ---- the draft model ---- */

static struct fake {
    struct executor base;
    int32_t token[3][ROWS], n[3];
    uint64_t launched, waited;
} fake;

static int launch(struct executor *x, const struct batch *b, struct err *e)
{
    (void)x, (void)e;
    int32_t *before = fake.token[fake.launched % 3], *now = fake.token[++fake.launched % 3];
    assert_true(b->n_samples <= ROWS);
    sample_all(draft, b, before, now);
    fake.n[fake.launched % 3] = b->n_samples;
    return 0;
}

static int wait(struct executor *x, struct results *ret, struct err *e)
{
    (void)x, (void)e;
    int32_t at = (int32_t)(++fake.waited % 3);
    *ret = (struct results){.n_samples = fake.n[at], .token = fake.token[at]};
    return 0;
}

static struct draft_model *open_draft_model(const struct sched_config *c)
{
    struct draft_model *ret;
    struct err e;

    fake = (struct fake){.base = {.launch = launch, .wait = wait}};
    fake.base.info = (struct executor_info){.vocab = VOCAB,
                                            .max_len = c->max_len,
                                            .n_blocks = c->n_blocks,
                                            .block_size = c->block_size,
                                            .max_num_seqs = c->max_num_seqs,
                                            .max_num_batched_tokens = ROWS,
                                            .max_samples = ROWS,
                                            .depth = 1};
    struct draft_model_config d = {.executor = &fake.base,
                                   .vocab = VOCAB,
                                   .max_draft = 4,
                                   .mask_token = -1,
                                   .now_us = clock_us};
    assert_int_equal(draft_model_open(&ret, &d, &e), 0);
    return ret;
}

/* ---- runs ---- */

/* A step, committed at once. The model is replaced by `wrong` in a share of rows: 0 for
 * what is claimed, more for what the test must find. */
static bool step(struct rig *r, double wrong, struct rng *random)
{
    int32_t token[ROWS];
    float logprob[ROWS] = {0};

    r->now_us += 1000;
    if (sched_plan(r->sched, r->now_us, &r->plan[0]) == 0) {
        decode_reap(r->sched, &r->out);
        return false;
    }
    pack_batch(r->packer, &r->plan[0], &r->batch);
    assert_true(r->batch.n_samples <= ROWS);
    sample_all(target, &r->batch, NULL, token);
    for (int32_t i = 0; i < r->batch.n_samples && wrong > 0; i++) {
        const struct batch *b = &r->batch;
        int32_t behind = b->token[b->logits_token[b->sample[i].logits_row]];
        if ((double)(rng_next(random) >> 11) * 0x1p-53 < wrong) {
            token[i] = sample(draft[behind], &b->sample[i]);
        }
    }
    struct results results = {
        .step = r->batch.step, .n_samples = r->batch.n_samples, .token = token, .logprob = logprob};
    decode_commit(r->sched, &r->plan[0], &results, r->now_us, &r->out);
    decode_reap(r->sched, &r->out);
    return true;
}

/* Run SEQS requests to their ends and count their tokens. */
static void run(struct tally *t, bool drafts, double wrong, uint64_t seed)
{
    static int32_t last[RIG_REQUESTS];
    struct sched_config c;
    struct rig r;
    struct rng random = {seed};
    struct draft_model *model = NULL;

    rig_config(&c);
    c.vocab = VOCAB;
    c.max_num_seqs = SEQS;
    c.n_blocks = 1200;
    c.max_num_batched_tokens = ROWS;
    c.max_logits = ROWS;
    rig_open(&r, &c);
    if (drafts) {
        model = open_draft_model(&c);
        sched_speculate(r.sched, draft_model_source(model), 4);
    }
    for (int32_t i = 0; i < SEQS; i++) {
        struct gen_params p = rig_params();
        p.max_tokens = LENGTH;
        p.temperature = 1;
        p.seed = rng_next(&random);
        rig_add(&r, p, i, 1);
        last[i] = r.request[i].request.prompt[0];
    }
    while (step(&r, wrong, &random)) {
        for (int32_t i = 0; i < r.n_deltas; i++) {
            const struct delta *d = &r.delta[i];
            ptrdiff_t q = (struct rig_request *)d->request->user - r.request;
            if (d->kind == DELTA_TOKEN) {
                t->pair[last[q]][d->token]++;
                t->n++;
                last[q] = d->token;
            }
        }
        r.n_deltas = 0;
    }
    struct sched_counts counts;
    sched_counts(r.sched, &counts);
    t->drafted += (int64_t)counts.draft_tokens;
    for (int32_t i = 0; i < LIMIT_DRAFT; i++) {
        t->accepted += (int64_t)counts.accepted_tokens[i];
    }
    rig_close(&r);
    draft_model_free(model);
}

/* How many standard deviations the chi-square statistic lies above its mean (Wilson and
 * Hilferty 1931). Cells of fewer than five expected tokens are taken together. */
static double surprise(const struct tally *t)
{
    double chi = 0, freedom = 0;

    for (int32_t i = 0; i < VOCAB; i++) {
        double sum = 0, n = 0, rest = 0, rest_expected = 0;
        for (int32_t k = 0; k < VOCAB; k++) {
            sum += exp((double)target[i][k]);
            n += (double)t->pair[i][k];
        }
        for (int32_t k = 0; k < VOCAB; k++) {
            double expected = n * exp((double)target[i][k]) / sum, got = (double)t->pair[i][k];
            if (expected < 5) {
                rest += got;
                rest_expected += expected;
                continue;
            }
            chi += (got - expected) * (got - expected) / expected;
            freedom++;
        }
        if (rest_expected >= 5) {
            chi += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
            freedom++;
        }
        freedom--;
    }
    double v = 2 / (9 * freedom);
    return (cbrt(chi / freedom) - (1 - v)) / sqrt(v);
}

static struct tally draw(bool drafts, double wrong)
{
    struct tally t = {0};

    for (uint64_t seed = 1; t.n < DRAWS; seed++) {
        run(&t, drafts, wrong, seed << 32);
    }
    return t;
}

/* A p-value of 1e-4. */
static const double BAR = 3.719;

static void drafts_do_not_change_the_distribution(void **state)
{
    (void)state;
    struct tally t = draw(true, 0);
    double rate = (double)t.accepted / (double)t.drafted;

    print_message("%lld tokens, %.2f of the drafts held, %.2f standard deviations\n",
                  (long long)t.n, rate, surprise(&t));
    assert_true(rate > 0.2 && rate < 0.9);
    assert_true(surprise(&t) < BAR);
}

static void a_distribution_that_leans_to_the_drafts_is_noticed(void **state)
{
    (void)state;
    struct tally t = draw(false, 0.03);

    assert_true(surprise(&t) > BAR);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(drafts_do_not_change_the_distribution),
        cmocka_unit_test(a_distribution_that_leans_to_the_drafts_is_noticed),
    };

    make_models();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
