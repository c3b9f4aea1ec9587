#include "engine/speculate/draft_pace.h"

/* Half octaves: 1, 2, 3, 4, 6, 8, 12, ... rows. */
static int32_t size_of(int32_t rows)
{
    int32_t octave = 0;

    while (rows >> (octave + 1) > 0) {
        octave++;
    }
    bool upper = octave > 0 && (rows >> (octave - 1) & 1) != 0;
    return MIN(2 * octave + upper, PACE_SIZES - 1);
}

/* The least rows of a size. */
static int32_t rows_of(int32_t size)
{
    int32_t octave = size / 2;

    return size % 2 == 0 ? 1 << octave : (1 << octave) + (1 << octave) / 2;
}

double pace_decode_us(const struct draft_pace *p, int32_t n)
{
    const struct step_cost *c = &p->cost;
    int32_t few = MIN(n, STEP_FEW_ROWS);

    return c->fixed_us + MAX(few - 1, 0) * MAX(c->row_us, c->token_us) +
           (n - few) * MAX(c->many_row_us, c->token_us) + n * p->context * c->context_us;
}

/* Behind the largest size that was seen, rows take what the cost model says. */
double pace_step_us(const struct draft_pace *p, const struct draft_step *step, int32_t n, int32_t k)
{
    int32_t rows = n * (k + 1), size = size_of(rows);

    while (size > 0 && p->target[size] == 0) {
        size--;
    }
    if (p->target[size] == 0) {
        return step->us + n * k * step->row_us;
    }
    int32_t seen = size == size_of(rows) ? rows : rows_of(size + 1) - 1;
    double model = step->us + (seen - n) * step->token_us;
    return (double)p->target[size] * MAX(model, 0) + (rows - seen) * step->row_us;
}

/* Drafting k tokens of n sequences, by the cost model. */
static double drafting_model_us(const struct draft_pace *p, int32_t n, int32_t k)
{
    return p->one_step ? pace_decode_us(p, n * k) : k * pace_decode_us(p, n);
}

double pace_drafting_us(const struct draft_pace *p, int32_t n, int32_t k)
{
    float seen = p->drafting[size_of(n)];

    return k == 0 ? 0 : drafting_model_us(p, n, k) * (seen > 0 ? (double)seen : 1) + p->gap_us;
}

/* From the cost model on. A step that was disturbed, as the first of a size by what the
 * device sets up for it, moves the mean no further than one a little slower. */
static void learn(float *mean, double value)
{
    const float MOST = 0.5f, WEIGHT = 1.0f / 8;
    float before = *mean == 0 ? 1 : *mean;

    *mean = before + WEIGHT * MIN(MAX((float)value - before, -MOST), MOST);
}

void pace_saw_target(struct draft_pace *p, int32_t rows, double estimate_us, double us)
{
    if (estimate_us > 0 && us > 0) {
        learn(&p->target[size_of(rows)], us / estimate_us);
    }
}

void pace_saw_drafting(struct draft_pace *p, int32_t n, int32_t k, double us)
{
    double model = drafting_model_us(p, n, k);

    if (model > 0) {
        learn(&p->drafting[size_of(n)], us / model);
    }
}

void pace_forget(struct draft_pace *p)
{
    const float SLOW = 1.0f / 4096;

    for (int32_t i = 0; i < PACE_SIZES; i++) {
        p->drafting[i] += p->drafting[i] > 1 ? SLOW * (1 - p->drafting[i]) : 0;
    }
}
