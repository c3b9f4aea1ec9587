#include "engine/sched/step_pace.h"

#include <math.h>

enum { EXACT = 16 }; /* rows that are a size of their own */

int32_t step_size(int32_t rows)
{
    int32_t first = EXACT, size = EXACT - 1;

    if (rows <= EXACT) {
        return MAX(rows, 1) - 1;
    }
    while (rows >= 2 * first) {
        first *= 2;
        size += 4;
    }
    return MIN(size + 4 * (rows - first) / first, STEP_SIZES - 1);
}

double step_model_us(const struct step_cost *c, int32_t n)
{
    int32_t few = MIN(n, STEP_FEW_ROWS);

    return c->fixed_us + MAX(few - 1, 0) * MAX(c->row_us, c->token_us) +
           (n - few) * MAX(c->many_row_us, c->token_us);
}

double step_pace_us(const struct step_pace *p, const struct step_cost *c, int32_t n)
{
    return (double)expf((float)(p->mean[0] + p->mean[1 + step_size(n)])) * step_model_us(c, n);
}

/* Sizes are like those beside them, except for a part of their own. */
static void begin(struct step_pace *p)
{
    const double COMMON = 0.04, OWN = 0.01, DISTANCE = 6;

    p->has_seen = true;
    p->cov[0][0] = COMMON;
    for (int32_t i = 0; i < STEP_SIZES; i++) {
        for (int32_t k = 0; k < STEP_SIZES; k++) {
            int32_t apart = MAX(i - k, k - i);
            p->cov[1 + i][1 + k] =
                COMMON * (double)expf((float)(-apart / DISTANCE)) + (i == k ? OWN : 0);
        }
    }
}

/* What is not seen is known ever worse. */
static void drift(struct step_pace *p)
{
    const double DEVICE = 2e-4, SIZE = 2e-6, MOST = 0.05;

    p->cov[0][0] += p->cov[0][0] < MOST ? DEVICE : 0;
    for (int32_t i = 1; i <= STEP_SIZES; i++) {
        p->cov[i][i] += p->cov[i][i] < MOST ? SIZE : 0;
    }
}

/* The filter's step: what was measured is the sum of the device's number and the
 * size's. One that was disturbed counts as a little slower only. */
void step_pace_saw(struct step_pace *p, const struct step_cost *c, int32_t n, double us)
{
    const double NOISE = 4e-3, MOST = 0.3;
    int32_t at = 1 + step_size(n);
    double with[1 + STEP_SIZES], expected = step_pace_us(p, c, n);

    if (us <= 0 || expected <= 0) {
        return;
    }
    if (!p->has_seen) {
        begin(p);
    }
    drift(p);
    for (int32_t i = 0; i <= STEP_SIZES; i++) {
        with[i] = p->cov[i][0] + p->cov[i][at];
    }
    double spread = with[0] + with[at] + NOISE;
    double off = MIN(MAX((double)logf((float)(us / expected)), -MOST), MOST);
    for (int32_t i = 0; i <= STEP_SIZES; i++) {
        p->mean[i] += with[i] / spread * off;
        for (int32_t k = 0; k <= STEP_SIZES; k++) {
            p->cov[i][k] -= with[i] * with[k] / spread;
        }
    }
    p->n_seen[at - 1] = MIN(p->n_seen[at - 1] + 1, 1 << 20);
}

/* Whether a step of n rows may well be the better one of two, though it seems to
 * make 1 / `worse` of the other's tokens: whether twice the doubt in the ratio of
 * their times spans that. */
static bool is_open(const struct step_pace *p, int32_t n, int32_t other, double worse)
{
    const double LEAST = 2.5e-4;
    int32_t a = 1 + step_size(n), b = 1 + step_size(other);
    double doubt = p->cov[a][a] + p->cov[b][b] - 2 * p->cov[a][b];
    double apart = (double)logf((float)worse);

    return p->has_seen && doubt > LEAST && (apart <= 0 || apart * apart < 4 * doubt);
}

/* The time of the step with n drafts. */
static double time_of(const struct step_pace *p, const struct step_cost *c,
                      const struct pace_step *s, int32_t n)
{
    double row_us = s->rows < STEP_FEW_ROWS ? c->row_us : c->many_row_us;

    return s->extra_us + n * s->draft_us +
           (s->has_prefill ? s->us + n * MAX(row_us, c->token_us)
                           : step_pace_us(p, c, s->rows + n));
}

/* Whether the budget covers drafts that take `us`, and the wait for them. */
static bool pays_for(const struct step_pace *p, double us)
{
    return p->token_us <= 0 || us + p->gap_us <= p->budget_us;
}

int32_t step_pace_choose(struct step_pace *p, const struct step_cost *c, const struct pace_step *s,
                         const struct draft_odds *o, int32_t most)
{
    enum { TRIAL_GAP = 16 };
    const double TRIAL_LOSS = 0.8;
    double plain_us = time_of(p, c, s, 0), plain = s->tokens / plain_us, best = plain * s->gain;
    double tokens = s->tokens, trial = plain * TRIAL_LOSS;
    int32_t n = 0, chosen = 0, tried = 0;
    bool may_try =
        !s->has_prefill && (s->number == p->tried_step || s->number - p->tried_step > TRIAL_GAP);

    for (int32_t i = ODDS_LEVELS - 1; i > 0 && n < most; i--) {
        for (int32_t k = 0; k < o->n[i] && n < most; k++) {
            tokens += o->sum[i] / o->n[i];
            double us = time_of(p, c, s, ++n), speed = tokens / us;
            if (!pays_for(p, us - plain_us)) {
                continue;
            }
            if (speed > best) {
                best = speed;
                chosen = n;
            }
            if (may_try && speed > trial && is_open(p, s->rows + n, s->rows, plain / speed)) {
                trial = speed;
                tried = n;
            }
        }
    }
    bool is_trial =
        may_try && (chosen > 0 ? is_open(p, s->rows, s->rows + chosen, best / plain) : tried > 0);
    if (is_trial) {
        p->tried_step = s->number;
        return chosen > 0 ? 0 : tried;
    }
    return chosen;
}

void step_pace_saw_gap(struct step_pace *p, double us)
{
    const double WEIGHT = 1.0 / 16, MOST = 2000;

    p->gap_us += WEIGHT * (MIN(MAX(us, 0), MOST) - p->gap_us);
}

/* A rare long draft counts no more than it brings in the steps that pass until the next
 * one: payoffs are a mean. */
void step_pace_saw_odds(struct step_pace *p, const struct step_cost *c, const struct pace_step *s,
                        const struct draft_odds *o, int32_t most)
{
    const double WEIGHT = 1.0 / 32;
    double plain = s->tokens / time_of(p, c, s, 0), best = plain, tokens = s->tokens;
    int32_t n = 0;

    for (int32_t i = ODDS_LEVELS - 1; i > 0 && n < most; i--) {
        for (int32_t k = 0; k < o->n[i] && n < most; k++) {
            tokens += o->sum[i] / o->n[i];
            double speed = tokens / time_of(p, c, s, ++n);
            best = MAX(best, speed);
        }
    }
    double gain = best > plain * s->gain ? best / plain - 1 : 0;
    p->payoff += WEIGHT * (gain - p->payoff);
}

void step_pace_text_begins(struct step_pace *p)
{
    p->text_begins = true;
}

/* A prefill's time says nothing of what drafts may lose. */
bool step_pace_refill(struct step_pace *p, const struct step_cost *c, const struct pace_step *s)
{
    const double SHARE = 0.01, FIRST = 1, MOST = 8;
    double plain_us = time_of(p, c, s, 0);

    if (s->has_prefill) {
        return p->token_us <= 0 || p->budget_us > 0;
    }
    if (p->token_us <= 0) {
        p->budget_us = FIRST * plain_us;
    }
    if (p->text_begins) {
        p->budget_us = MIN(p->budget_us, FIRST * plain_us);
    }
    if (p->refilled_step != s->number && p->budget_us < FIRST * plain_us) {
        p->budget_us += SHARE * plain_us;
    }
    p->text_begins = false;
    p->refilled_step = s->number;
    p->budget_us = MIN(p->budget_us, MOST * plain_us);
    p->token_us = plain_us / MAX(s->tokens, 1);
    return pays_for(p, time_of(p, c, s, 1) - plain_us);
}

void step_pace_spend(struct step_pace *p, const struct step_cost *c, const struct pace_step *s,
                     int32_t n, bool waited)
{
    p->budget_us -= time_of(p, c, s, n) - time_of(p, c, s, 0) + (waited ? p->gap_us : 0);
}

void step_pace_earn(struct step_pace *p, int32_t n)
{
    p->budget_us += n * p->token_us;
}

bool step_pace_awaits(const struct step_pace *p, const struct step_cost *c,
                      const struct pace_step *s)
{
    return p->payoff > p->gap_us / time_of(p, c, s, 0);
}
