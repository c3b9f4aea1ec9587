#include "tests/sim/drafts.h"

#include "tests/sim/toy.h"

static struct rng rng_of(const struct sim_drafts *d, const struct seq *q, uint64_t what)
{
    struct rng r = {d->s->seed ^ what ^ q->seed * 31 ^ (uint64_t)q->n_out << 20};

    rng_next(&r);
    return r;
}

static float expect(struct draft_source *base, struct seq *q)
{
    const struct sim_drafts *d = CONTAINER_OF(base, struct sim_drafts, base);
    struct rng r = rng_of(d, q, 0xe8);

    if (d->model) {
        return d->model->expect(d->model, q);
    }
    return rng_chance(&r, 40) ? 0 : (float)rng_range(&r, 1, 30) / 10;
}

/* Whether a model that sees the request's tokens alone draws what it gives. A head
 * draws without penalties. */
static bool is_plain(const struct sim_drafts *d, const struct sim_request *q)
{
    bool penalised = q->presence != 0 || q->frequency != 0 || q->repetition != 1;

    return !(d->s->draft_head && penalised) && !q->language && q->n_bias == 0 && q->n_words == 0 &&
           q->n_allowed == 0 && q->min_tokens == 0;
}

/* What the draft model drafts is what the request gives: they are one model. */
static int32_t model_draft(struct sim_drafts *d, struct seq *q, int32_t most, int32_t *token,
                           float *prob)
{
    const struct sim_request *request = NULL;
    const struct sim_choice *want = d->want(q, &request);
    struct rng r = rng_of(d, q, 0xd5);
    int32_t n = d->model->draft(d->model, q, most, token, prob);

    for (int32_t i = 0; i < n && want && is_plain(d, request) && d->s->fail_at == 0; i++) {
        if (q->n_out + i < want->n && token[i] != want->token[q->n_out + i]) {
            snprintf(d->why, sizeof(d->why), "the draft model drafts %d in place of %d", token[i],
                     want->token[q->n_out + i]);
        }
    }
    for (int32_t i = 0; i < n && request; i++) {
        if (!rng_chance(&r, request->draft_quality)) {
            token[i] = rng_range(&r, 0, d->s->config.vocab - 1);
        }
    }
    d->totals->model_drafted += n;
    /* the step may have room for fewer */
    return rng_chance(&r, 30) ? rng_range(&r, 0, n) : n;
}

static void outlook(struct draft_source *base, const struct draft_step *step, int32_t n)
{
    const struct sim_drafts *d = CONTAINER_OF(base, struct sim_drafts, base);

    d->model->outlook(d->model, step, n);
}

static double prepare(struct draft_source *base, struct draft_want *want, int32_t n,
                      const struct draft_step *step)
{
    const struct sim_drafts *d = CONTAINER_OF(base, struct sim_drafts, base);

    return d->model->prepare(d->model, want, n, step);
}

static int32_t draft(struct draft_source *base, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    struct sim_drafts *d = CONTAINER_OF(base, struct sim_drafts, base);
    if (d->model) {
        return model_draft(d, q, most, token, prob);
    }
    const struct sim_request *request = NULL;
    const struct sim_choice *want = d->want(q, &request);
    struct rng r = rng_of(d, q, 0xd4);
    int32_t n = rng_chance(&r, 50) ? most : rng_range(&r, 0, most);
    float sure = 1;

    for (int32_t i = 0; i < n; i++) {
        bool right = want && q->n_out + i < want->n && rng_chance(&r, request->draft_quality);
        token[i] = right ? want->token[q->n_out + i] : rng_range(&r, 0, d->s->config.vocab - 1);
        sure *= (float)rng_range(&r, 5, 10) / 10;
        prob[i] = sure;
    }
    return n;
}

/* Drafts that the sequence has alone must hold. Under a grammar they may be left to a
 * later step. */
static void verified(struct draft_source *base, struct seq *q, int32_t n, int32_t n_accepted)
{
    struct sim_drafts *d = CONTAINER_OF(base, struct sim_drafts, base);
    const struct sim_request *request = NULL;
    const struct sim_choice *want = d->want(q, &request);
    int32_t right = 0;

    while (want && right < n && q->n_out + right < want->n &&
           q->out[q->n_out + right] == want->token[q->n_out + right]) {
        right++;
    }
    if (d->model) {
        d->model->verified(d->model, q, n, n_accepted);
    }
    d->totals->drafted += n;
    d->totals->accepted += n_accepted;
    if (want && !request->language && n_accepted < right && d->s->fail_at == 0) {
        snprintf(d->why, sizeof(d->why), "of %d drafts %d hold, and %d were accepted", n, right,
                 n_accepted);
    }
}

static void ended(struct draft_source *base, struct group *g)
{
    struct sim_drafts *d = CONTAINER_OF(base, struct sim_drafts, base);

    if (g->seq[0].n_out < 0) {
        snprintf(d->why, sizeof(d->why), "a group ends without its sequences");
    }
}

void sim_drafts_init(struct sim_drafts *d, const struct scenario *s, struct draft_source *model,
                     struct sim_totals *t)
{
    *d = (struct sim_drafts){
        .base = {.expect = expect, .draft = draft, .verified = verified, .ended = ended},
        .s = s,
        .model = model,
        .totals = t};
    if (model) {
        d->base.outlook = outlook;
        d->base.prepare = prepare;
    }
}
