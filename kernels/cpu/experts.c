/* Layers of experts: route the rows, then multiply each expert's rows at once, so that
 * the weights of an expert are read once a step.
 *
 * The experts are visited by index and each adds its share to the rows' sums: a row's
 * result does not depend on the other rows of the step.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { TASK_ROWS = 16 };

static const float NOT_CHOSEN = -1; /* in place of a weight */

struct experts_job {
    struct cpu_backend *c;
    const struct experts *e;
    struct mat scores;  /* [rows, n]: of the router, then weights or NOT_CHOSEN */
    struct mat y, x;    /* [rows, hidden] */
    struct mat from;    /* one expert's rows, in or out */
    struct mat gate;    /* [rows, 1] of the shared expert */
    const int32_t *row; /* [n_rows] of the expert */
    int32_t n_rows, expert;
    void (*one)(const struct experts_job *j, int32_t i);
};

static void run_task(void *arg, int32_t task, int32_t thread)
{
    const struct experts_job *j = arg;
    int32_t end = MIN((task + 1) * TASK_ROWS, j->n_rows);

    (void)thread;
    for (int32_t i = task * TASK_ROWS; i < end; i++) {
        j->one(j, i);
    }
}

static void run(struct experts_job *j, int32_t n_rows,
                void (*one)(const struct experts_job *, int32_t))
{
    j->n_rows = n_rows;
    j->one = one;
    cpu_pool_run(j->c->pool, (int32_t)div_ceil(n_rows, TASK_ROWS), run_task, j);
}

/* ---- routing ---- */

/* The index of the greatest of n scores; -1: none is a number. */
static int32_t greatest(const float *score, int32_t n)
{
    int32_t best = -1;

    for (int32_t i = 0; i < n; i++) {
        if (score[i] > (best < 0 ? -INFINITY : score[best])) {
            best = i;
        }
    }
    return best;
}

/* Replace the scores of a row by the weights of its experts. The softmax is over all
 * scores; with weights that sum to 1 the others' share cancels. */
static void route_row(const struct experts_job *j, int32_t r)
{
    float *score = mat_row(j->scores, r), weight[LIMIT_EXPERTS], most = -INFINITY, all = 0, sum = 0;
    int32_t n = j->e->n, chosen[LIMIT_EXPERTS], n_chosen = 0;

    for (int32_t i = 0; i < n; i++) {
        most = fmaxf(most, score[i]);
    }
    for (int32_t i = 0; i < n; i++) {
        all += expf(score[i] - most);
    }
    while (n_chosen < j->e->top) {
        int32_t best = greatest(score, n);
        if (best < 0) { /* not enough numbers among the scores: it shows in the logits */
            break;
        }
        weight[n_chosen] = expf(score[best] - most) / all;
        sum += weight[n_chosen];
        chosen[n_chosen++] = best;
        score[best] = NAN;
    }
    bool broken = n_chosen < j->e->top;
    for (int32_t i = 0; i < n; i++) {
        score[i] = NOT_CHOSEN;
    }
    for (int32_t i = 0; i < n_chosen; i++) {
        score[chosen[i]] = weight[i] / (j->e->normalised ? sum : 1);
    }
    float *y = mat_row(j->y, r);
    for (int32_t i = 0; i < j->y.cols; i++) {
        y[i] = broken ? NAN : 0;
    }
}

/* The rows that go to an expert. */
static int32_t rows_of(const struct experts_job *j, int32_t expert, int32_t *row)
{
    int32_t n = 0;

    for (int32_t r = 0; r < j->scores.rows; r++) {
        if (mat_row_const(j->scores, r)[expert] != NOT_CHOSEN) {
            row[n++] = r;
        }
    }
    return n;
}

/* ---- one expert ---- */

static void gather_row(const struct experts_job *j, int32_t i)
{
    memcpy(mat_row(j->from, i), mat_row_const(j->x, j->row[i]), (size_t)j->x.cols * sizeof(float));
}

static void add_row(const struct experts_job *j, int32_t i)
{
    float *y = mat_row(j->y, j->row[i]), weight = mat_row_const(j->scores, j->row[i])[j->expert];
    const float *from = mat_row_const(j->from, i);

    for (int32_t k = 0; k < j->y.cols; k++) {
        y[k] += weight * from[k];
    }
}

/* Rows [first, first + n) of a stacked weight. It is not the weight that its handle
 * stands for. */
static struct mat part(struct mat w, int32_t first, int32_t n)
{
    struct mat m = mat_rows(w, first, n);

    m.priv = NULL;
    return m;
}

static void run_expert(struct experts_job *j, const struct expert_scratch *s, int32_t n)
{
    const struct experts *e = j->e;
    struct backend *b = &j->c->base;
    struct mat x = mat_rows(s->x, 0, n), y = mat_rows(s->y, 0, n), act = mat_rows(s->act, 0, n);
    int32_t hidden = j->x.cols;

    j->from = x;
    run(j, n, gather_row);
    cpu_linear_gated(b, act, mat_rows(s->up, 0, n), x,
                     part(e->up, j->expert * 2 * e->width, 2 * e->width), (struct mat){0}, e->act);
    cpu_linear(b, y, act, part(e->down, j->expert * hidden, hidden), NULL);
    j->from = y;
    run(j, n, add_row);
}

/* ---- the shared expert ---- */

static void add_shared_row(const struct experts_job *j, int32_t r)
{
    float *y = mat_row(j->y, r), factor = 1 / (1 + expf(-mat_row_const(j->gate, r)[0]));
    const float *from = mat_row_const(j->from, r);

    for (int32_t k = 0; k < j->y.cols; k++) {
        y[k] += factor * from[k];
    }
}

static void run_shared(struct experts_job *j, const struct expert_scratch *s)
{
    const struct experts *e = j->e;
    struct backend *b = &j->c->base;
    int32_t n = j->x.rows;

    cpu_linear_gated(b, s->shared_act, s->shared_up, j->x, e->shared_up, (struct mat){0}, e->act);
    j->from = mat_rows(s->y, 0, n);
    cpu_linear(b, j->from, s->shared_act, e->shared_down, NULL);
    j->gate = mat_cols(mat_rows(s->x, 0, n), 0, 1);
    cpu_linear(b, j->gate, j->x, e->shared_gate, NULL);
    run(j, n, add_shared_row);
}

void cpu_experts(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                 const struct expert_scratch *s)
{
    int32_t *row = s->row.data;
    struct experts_job j = {
        .c = cpu_of(b), .e = e, .scores = s->scores, .y = y, .x = x, .row = row};

    cpu_linear(b, j.scores, x, e->router, NULL);
    run(&j, x.rows, route_row);
    for (j.expert = 0; j.expert < e->n; j.expert++) {
        int32_t n = rows_of(&j, j.expert, row);
        if (n > 0) {
            run_expert(&j, s, n);
        }
    }
    if (e->shared_up.data) {
        run_shared(&j, s);
    }
}
