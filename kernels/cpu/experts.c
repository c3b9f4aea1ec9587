/* Layers of experts: route the rows, then multiply each expert's rows at once, so that
 * the weights of an expert are read once a step.
 *
 * The experts are visited by index and each adds its share to the rows' sums: a row's
 * result does not depend on the other rows of the step. Products are called by the
 * backend's table, so that one in its place sees their inputs
 * (models/quantise/inputs.c).
 *
 * Where few rows come to experts in blocks, as in decoding, a product is so small that
 * threads would spend much of its time meeting: then the first products of all experts
 * are one job, and the second ones another. The results are the same bits. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum {
    TASK_ROWS = 16,
    PAIRS_MAX = 32, /* a row and one of its experts, where experts run together */
    PRODUCTS_MAX = PAIRS_MAX * CPU_VIEW_PARTS,
};

static const float NOT_CHOSEN = -1; /* in place of a weight */

struct experts_job {
    struct cpu_backend *c;
    const struct experts *e;
    struct mat scores;  /* [rows, n]: of the router, then weights or NOT_CHOSEN */
    struct mat y, x;    /* [rows, hidden] */
    struct mat from;    /* one expert's rows, in or out */
    struct mat act;     /* [n_rows, width] of the expert */
    struct mat gate;    /* [rows, 1] of the shared expert; data NULL: it has none */
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

/* A row's s, in place of the router's products. */
static void score_row(const struct experts *e, float *score)
{
    float most = -INFINITY, all = 0;

    for (int32_t i = 0; i < e->n && e->scores == SCORES_SIGMOID; i++) {
        score[i] = 1 / (1 + expf(-score[i]));
    }
    if (e->scores == SCORES_SIGMOID) {
        return;
    }
    for (int32_t i = 0; i < e->n; i++) {
        most = fmaxf(most, score[i]);
    }
    for (int32_t i = 0; i < e->n; i++) {
        score[i] = expf(score[i] - most);
        all += score[i];
    }
    for (int32_t i = 0; i < e->n; i++) {
        score[i] /= all;
    }
}

/* What the choice goes by: c, or what has the same order. A softmax does not change the
 * order of its products, but rounds near ones to the same. */
static void choice_of(const struct experts *e, const float *product, const float *score, float *c)
{
    bool products = e->scores == SCORES_SOFTMAX && !e->choice_bias.data && !e->groups_by_two;

    for (int32_t i = 0; i < e->n; i++) {
        c[i] = products ? product[i] : score[i];
        if (e->choice_bias.data) {
            c[i] += mat_row_const(e->choice_bias, 0)[i];
        }
    }
}

/* What a group of n experts is worth; NAN if it has too few numbers. */
static float worth_of(float *c, int32_t n, bool by_two)
{
    int32_t best = greatest(c, n);
    float first = best < 0 ? NAN : c[best];

    if (best < 0 || !by_two || n == 1) {
        return first;
    }
    c[best] = NAN;
    int32_t second = greatest(c, n);
    c[best] = first;
    return second < 0 ? NAN : first + c[second];
}

/* Make the c of experts outside the best groups no numbers, which are not chosen. */
static void choose_groups(const struct experts *e, float *c)
{
    float worth[LIMIT_EXPERTS];
    bool stays[LIMIT_EXPERTS] = {false};
    int32_t n = e->n / e->n_groups;

    for (int32_t g = 0; g < e->n_groups; g++) {
        worth[g] = worth_of(c + (int64_t)g * n, n, e->groups_by_two);
    }
    for (int32_t i = 0; i < e->top_groups; i++) {
        int32_t g = greatest(worth, e->n_groups);
        if (g >= 0) {
            stays[g] = true;
            worth[g] = NAN;
        }
    }
    for (int32_t i = 0; i < e->n; i++) {
        c[i] = stays[i / n] ? c[i] : NAN;
    }
}

/* Choose the experts of a row: the router's products in `score` become s, and the
 * chosen ones' indices are in chosen[]; returns how many were found, fewer than `top`
 * if too few are numbers. */
static int32_t choose_row(const struct experts *e, float *score, int32_t *chosen)
{
    float c[LIMIT_EXPERTS], product[LIMIT_EXPERTS];
    int32_t n = 0, best;

    memcpy(product, score, (size_t)e->n * sizeof(*score));
    score_row(e, score);
    choice_of(e, product, score, c);
    if (e->n_groups > 1) {
        choose_groups(e, c);
    }
    while (n < e->top && (best = greatest(c, e->n)) >= 0) {
        c[best] = NAN;
        chosen[n++] = best;
    }
    return n;
}

/* The weight of expert `best` among those that are not chosen yet, c [n] their router's
 * products, NAN: chosen. */
static float mixer_weight(const struct experts *e, const float *c, int32_t best)
{
    float sum = 0;

    for (int32_t i = 0; i < e->n; i++) {
        float away = (c[best] - c[i]) / fmaxf(fabsf(c[i]), c[best]);
        if (!isnan(c[i]) && !(away > 2 * e->mixer_jitter)) {
            sum += expf(c[i] - c[best]);
        }
    }
    return 1 / sum;
}

/* Choose the experts of a row by SCORES_MIXER: as choose_row. */
static int32_t mix_row(const struct experts *e, float *score, int32_t *chosen)
{
    float c[LIMIT_EXPERTS];
    int32_t n = 0, best;

    memcpy(c, score, (size_t)e->n * sizeof(*score));
    while (n < e->top && (best = greatest(c, e->n)) >= 0) {
        score[best] = mixer_weight(e, c, best);
        c[best] = NAN;
        chosen[n++] = best;
    }
    return n;
}

/* Replace the router's products of a row by the weights of its experts. */
static void route_row(const struct experts_job *j, int32_t r)
{
    const struct experts *e = j->e;
    float *score = mat_row(j->scores, r), c[LIMIT_EXPERTS], sum = 0;
    int32_t chosen[LIMIT_EXPERTS];
    int32_t n_chosen =
        e->scores == SCORES_MIXER ? mix_row(e, score, chosen) : choose_row(e, score, chosen);

    for (int32_t i = 0; i < n_chosen; i++) {
        sum += score[chosen[i]];
    }
    bool broken = n_chosen < e->top; /* not enough numbers: it shows in the logits */
    float factor = (e->factor != 0 ? e->factor : 1) / (e->normalised ? sum : 1);
    for (int32_t i = 0; i < n_chosen; i++) {
        const float *scale = e->expert_scale.data;
        c[chosen[i]] = factor * score[chosen[i]] * (scale ? scale[chosen[i]] : 1);
    }
    for (int32_t i = 0; i < e->n; i++) {
        score[i] = NOT_CHOSEN;
    }
    for (int32_t i = 0; i < n_chosen; i++) {
        score[chosen[i]] = c[chosen[i]];
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

/* Columns [first, first + n) of stacked biases; no matrix where there are none. */
static struct mat bias_part(struct mat bias, int32_t first, int32_t n)
{
    struct mat m = mat_cols(bias, first, n);

    return bias.data ? m : bias;
}

/* gpt-oss's middle of an MLP: `from` holds gate, then up. */
static void clamped_row(const struct experts_job *j, int32_t i)
{
    const float *gate = mat_row_const(j->from, i), *up = gate + j->e->width;
    float *act = mat_row(j->act, i), limit = j->e->swiglu_limit;

    for (int32_t k = 0; k < j->e->width; k++) {
        float g = fminf(gate[k], limit), u = fminf(fmaxf(up[k], -limit), limit);
        act[k] = g / (1 + expf(-1.702F * g)) * (u + 1);
    }
}

static void run_expert(struct experts_job *j, const struct expert_scratch *s, int32_t n)
{
    const struct experts *e = j->e;
    struct backend *b = &j->c->base;
    const struct backend_ops *ops = b->ops;
    struct mat x = mat_rows(s->x, 0, n), y = mat_rows(s->y, 0, n), both = mat_rows(s->up, 0, n);
    int32_t rows = e->self_gated ? e->width : 2 * e->width;
    int32_t hidden = j->x.cols, at = j->expert - e->first, first = at * rows;
    struct cpu_view of_up, of_down;
    struct mat up = cpu_weight_rows(e->up, first, rows, &of_up),
               down = cpu_weight_rows(e->down, at * hidden, hidden, &of_down),
               bias = bias_part(e->up_bias, first, rows);

    j->act = mat_rows(s->act, 0, n);
    j->from = x;
    run(j, n, gather_row);
    if (e->swiglu_limit > 0) {
        ops->linear(b, both, x, up, &(struct epilogue){.bias = bias});
        j->from = both;
        run(j, n, clamped_row);
    } else if (e->self_gated) {
        ops->linear(b, j->act, x, up, NULL);
        cpu_multiply(b, j->act, j->act, e->act);
    } else {
        ops->linear_gated(b, j->act, both, x, up, bias, e->act);
    }
    ops->linear(b, y, j->act, down,
                &(struct epilogue){.bias = bias_part(e->down_bias, at * hidden, hidden)});
    j->from = y;
    run(j, n, add_row);
}

/* Adds the n rows of expert j->expert to the load, and to the most rows of an expert;
 * whether it is held and has any. */
static bool count_rows(struct experts_job *j, int32_t n, int32_t *most)
{
    const struct experts *e = j->e;

    cpu_results_now(j->c)->experts.rows += n;
    *most = MAX(*most, n);
    return n > 0 && j->expert >= e->first && j->expert < e->first + experts_held(e);
}

/* ---- experts of few rows, together ---- */

/* Pairs lie by expert, then by row. */
struct together {
    int32_t n_pairs, n_experts;
    int32_t row[PAIRS_MAX];
    int32_t expert[PAIRS_MAX], first[PAIRS_MAX], n[PAIRS_MAX]; /* [n_experts]: n pairs from first */
    struct cpu_view view[PAIRS_MAX];                           /* [n_experts] */
    struct cpu_product product[PRODUCTS_MAX];
    int32_t n_products;
};

/* Whether a weight is all in blocks, whose products take at most TILE_ROWS rows of
 * codes for n rows, and round nothing before. */
static bool is_in_blocks(struct mat w, int32_t n)
{
    const struct cpu_weight *run = w.format ? w.priv : NULL;
    bool fits = w.format;

    for (; run && fits; run = run->below) {
        fits = run->m.format && run->act_scale == 0 && n * run->planes <= TILE_ROWS;
    }
    return fits;
}

static bool fits_together(const struct experts_job *j, const struct expert_scratch *s)
{
    const struct experts *e = j->e;
    const struct backend_ops *ops = j->c->base.ops;
    int32_t n = j->x.rows, most = MIN(MIN(s->act.rows, s->x.rows), MIN(s->y.rows, s->up.rows));
    bool own = ops->linear == cpu_linear && ops->linear_gated == cpu_linear_gated;

    return own && n * e->top <= MIN(PAIRS_MAX, most) && is_in_blocks(e->up, n) &&
           is_in_blocks(e->down, n);
}

/* The pairs of the experts that are held, and the rows copied so; returns the most rows
 * of an expert, held or not. */
static int32_t list_pairs(struct experts_job *j, const struct expert_scratch *s, struct together *t)
{
    int32_t most = 0;

    for (j->expert = 0; j->expert < j->e->n; j->expert++) {
        int32_t *row = t->row + t->n_pairs, n = rows_of(j, j->expert, row);
        if (!count_rows(j, n, &most)) {
            continue;
        }
        t->expert[t->n_experts] = j->expert;
        t->first[t->n_experts] = t->n_pairs;
        t->n[t->n_experts++] = n;
        t->n_pairs += n;
    }
    j->row = t->row;
    j->from = s->x;
    if (j->x.rows > 1) {
        run(j, t->n_pairs, gather_row);
    }
    return most;
}

/* Add out = x . rows [first, first + out.cols) of w, of the pairs of expert i. */
static void add_products(struct together *t, int32_t i, struct mat out, struct mat x, struct mat w,
                         int32_t first, struct mat bias)
{
    int32_t at = 0;

    w = cpu_weight_rows(w, first, out.cols, &t->view[i]);
    for (const struct cpu_weight *of = w.priv; of; of = of->below) {
        int32_t rows = of->m.rows;
        t->product[t->n_products++] =
            (struct cpu_product){.out = mat_cols(out, at, rows),
                                 .x = x,
                                 .w = of->m,
                                 .ep = {.bias = bias_part(bias, first + at, rows)}};
        at += rows;
    }
}

static void gate_row(const struct experts_job *j, int32_t i)
{
    const float *gate = mat_row_const(j->from, i);

    j->c->k.gate(mat_row(j->act, i), gate, gate + j->e->width, j->e->width, j->e->act);
}

/* What lies between the products of an MLP, of all pairs. */
static void run_middle(struct experts_job *j, struct together *t)
{
    const struct experts *e = j->e;

    if (e->self_gated) {
        cpu_multiply(&j->c->base, j->act, j->act, e->act);
    } else {
        run(j, t->n_pairs, e->swiglu_limit > 0 ? clamped_row : gate_row);
    }
}

static void run_together(struct experts_job *j, const struct expert_scratch *s, struct together *t)
{
    const struct experts *e = j->e;
    int32_t rows = e->self_gated ? e->width : 2 * e->width, hidden = j->x.cols;
    struct mat y = mat_rows(s->y, 0, t->n_pairs), up = mat_rows(s->up, 0, t->n_pairs);

    j->act = mat_rows(s->act, 0, t->n_pairs);
    j->from = e->self_gated ? j->act : mat_cols(up, 0, rows);
    for (int32_t i = 0; i < t->n_experts; i++) {
        struct mat x = j->x.rows > 1 ? mat_rows(s->x, t->first[i], t->n[i]) : j->x;
        add_products(t, i, mat_rows(j->from, t->first[i], t->n[i]), x, e->up,
                     (t->expert[i] - e->first) * rows, e->up_bias);
    }
    cpu_linear_products(j->c, t->product, t->n_products);
    run_middle(j, t);
    t->n_products = 0;
    for (int32_t i = 0; i < t->n_experts; i++) {
        add_products(t, i, mat_rows(y, t->first[i], t->n[i]),
                     mat_rows(j->act, t->first[i], t->n[i]), e->down,
                     (t->expert[i] - e->first) * hidden, e->down_bias);
    }
    cpu_linear_products(j->c, t->product, t->n_products);
    for (int32_t i = 0; i < t->n_experts; i++) {
        j->expert = t->expert[i];
        j->row = t->row + t->first[i];
        j->from = mat_rows(y, t->first[i], t->n[i]);
        run(j, t->n[i], add_row);
    }
}

/* ---- one expert after the other ---- */

/* Returns the most rows of an expert, held or not. */
static int32_t run_in_turn(struct experts_job *j, const struct expert_scratch *s)
{
    int32_t *row = s->row.data, most = 0;

    j->row = row;
    for (j->expert = 0; j->expert < j->e->n; j->expert++) {
        int32_t n = rows_of(j, j->expert, row);
        if (count_rows(j, n, &most)) {
            run_expert(j, s, n);
        }
    }
    return most;
}

/* ---- the shared expert ---- */

static void add_shared_row(const struct experts_job *j, int32_t r)
{
    float *y = mat_row(j->y, r), factor = 1;
    const float *from = mat_row_const(j->from, r);

    if (j->gate.data) {
        factor = 1 / (1 + expf(-mat_row_const(j->gate, r)[0]));
    }
    for (int32_t k = 0; k < j->y.cols; k++) {
        y[k] += factor * from[k];
    }
}

static void run_shared(struct experts_job *j, const struct expert_scratch *s)
{
    const struct experts *e = j->e;
    struct backend *b = &j->c->base;
    int32_t n = j->x.rows;

    if (e->shared_gate.data) { /* first: x is not needed behind shared_up */
        j->gate = mat_cols(mat_rows(s->x, 0, n), 0, 1);
        b->ops->linear(b, j->gate, j->x, e->shared_gate, NULL);
    }
    b->ops->linear_gated(b, s->shared_act, s->shared_up, j->x, e->shared_up, (struct mat){0},
                         e->act);
    j->from = mat_rows(s->y, 0, n);
    b->ops->linear(b, j->from, s->shared_act, e->shared_down, NULL);
    run(j, n, add_shared_row);
}

void cpu_experts(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                 const struct expert_scratch *s)
{
    struct experts_job j = {.c = cpu_of(b), .e = e, .scores = s->scores, .y = y, .x = x};
    struct together t;
    int32_t most;

    b->ops->linear(b, j.scores, s->router_x.data ? s->router_x : x, e->router,
                   &(struct epilogue){.bias = e->router_bias});
    run(&j, x.rows, route_row);
    if (fits_together(&j, s)) {
        t.n_pairs = t.n_experts = t.n_products = 0;
        most = list_pairs(&j, s, &t);
        run_together(&j, s, &t);
    } else {
        most = run_in_turn(&j, s);
    }
    cpu_results_now(j.c)->experts.peak += (int64_t)most * e->n;
    if (e->shared_up.data) {
        run_shared(&j, s);
    }
}
