#include "engine/sched/step_pace.h"

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

/* The factor of a size; of one that was never seen that of those beside it, in
 * proportion. */
static double shape_of(const struct step_pace *p, int32_t size)
{
    int32_t below = size, above = size;

    while (below >= 0 && p->n_seen[below] == 0) {
        below--;
    }
    while (above < STEP_SIZES && p->n_seen[above] == 0) {
        above++;
    }
    if (below < 0 && above == STEP_SIZES) {
        return 1;
    }
    if (below < 0 || above == STEP_SIZES || below == above) {
        return (double)p->shape[below < 0 ? above : below];
    }
    double part = (double)(size - below) / (above - below);
    return (double)p->shape[below] * (1 - part) + (double)p->shape[above] * part;
}

double step_pace_us(const struct step_pace *p, const struct step_cost *c, int32_t n)
{
    double speed = p->speed > 0 ? (double)p->speed : 1;

    return speed * shape_of(p, step_size(n)) * step_model_us(c, n);
}

/* What a step takes beyond what was expected tells of its size while that was seen
 * seldom, and of the device when it was seen often. One that was disturbed counts as a
 * little slower only. */
void step_pace_saw(struct step_pace *p, const struct step_cost *c, int32_t n, double us,
                   uint64_t number)
{
    const double MOST = 0.5, LEAST_WEIGHT = 1.0 / 64, DEVICE_WEIGHT = 1.0 / 8;
    int32_t size = step_size(n), seen = p->n_seen[size];
    double expected = step_pace_us(p, c, n);

    if (us <= 0 || expected <= 0) {
        return;
    }
    double off = MIN(MAX(us / expected - 1, -MOST), MOST);
    double shape = shape_of(p, size) * (1 + MAX(1.0 / (seen + 1), LEAST_WEIGHT) * off);
    p->speed = p->speed > 0 ? p->speed : 1;
    p->speed *= (float)(1 + DEVICE_WEIGHT * seen / (seen + 4) * off);
    p->shape[size] = (float)shape;
    p->n_seen[size] = MIN(seen + 1, 1 << 20);
    p->seen_step[size] = number;
}

/* Whether n rows were last seen more than `first` steps before this one, twice as many
 * for each time that they were seen, at most 2^`doublings` times. */
static bool is_stale(const struct step_pace *p, const struct pace_step *s, int32_t n, int32_t first,
                     int32_t doublings)
{
    int32_t size = step_size(n);

    return p->speed > 0 && s->number - p->seen_step[size] > (uint64_t)first
                                                                << MIN(p->n_seen[size], doublings);
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

int32_t step_pace_choose(struct step_pace *p, const struct step_cost *c, const struct pace_step *s,
                         const struct draft_odds *o, int32_t most)
{
    enum { TRIAL_GAP = 32, PLAIN_FIRST = 4, TRIAL_FIRST = 64, DOUBLINGS = 6 };
    const double TRIAL_LOSS = 0.8;
    double plain = s->tokens / time_of(p, c, s, 0), best = plain * s->gain, trial = 0;
    double tokens = s->tokens;
    int32_t n = 0, chosen = 0, tried = 0;

    for (int32_t i = ODDS_LEVELS - 1; i > 0 && n < most; i--) {
        for (int32_t k = 0; k < o->n[i] && n < most; k++) {
            tokens += o->sum[i] / o->n[i];
            double speed = tokens / time_of(p, c, s, ++n);
            if (speed > best) {
                best = speed;
                chosen = n;
            }
            if (speed > trial && is_stale(p, s, s->rows + n, TRIAL_FIRST, DOUBLINGS)) {
                trial = speed;
                tried = n;
            }
        }
    }
    if (s->has_prefill || chosen > 0) {
        bool is_due = !s->has_prefill && is_stale(p, s, s->rows, PLAIN_FIRST, DOUBLINGS);
        return is_due ? 0 : chosen;
    }
    if (tried > 0 && trial > TRIAL_LOSS * plain &&
        (s->number == p->tried_step || s->number - p->tried_step > TRIAL_GAP)) {
        p->tried_step = s->number;
        return tried;
    }
    return 0;
}
