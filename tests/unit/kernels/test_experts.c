/* Layers of experts against a loop over experts in float64, and a row alone against the
 * same row in company. */
#include "tests/unit/ops.h"

struct shape {
    int32_t rows, n, top, hidden, width, shared; /* shared: 0: there is no shared expert */
    bool normalised;
    float skew; /* added to the scores of the first experts: all rows go to them */
};

static const struct shape SHAPES[] = {
    {1, 4, 2, 64, 48, 0, true, 0},     {7, 5, 5, 40, 24, 0, false, 0},
    {33, 16, 3, 96, 72, 0, true, 0},   {64, 8, 2, 128, 64, 56, false, 0},
    {100, 64, 8, 64, 32, 0, true, 0},  {65, 8, 2, 48, 32, 0, true, 40},
    {20, 6, 1, 72, 40, 24, false, 40},
};

/* The operands of one shape, as numbers. */
struct values {
    float *x, *router, *up, *down, *shared_up, *shared_down, *shared_gate;
};

struct layer_rig {
    struct mat x, y;
    struct experts e;
    struct expert_scratch s;
};

static double activated(double x)
{
    return x / (1 + exp(-x));
}

static double dot(const float *a, const float *b, int32_t n)
{
    double sum = 0;

    for (int32_t i = 0; i < n; i++) {
        sum += (double)a[i] * b[i];
    }
    return sum;
}

/* y += weight * MLP(x); up [2 * width, hidden], down [hidden, width]. */
static void add_mlp(double *y, const float *x, const float *up, const float *down, int32_t hidden,
                    int32_t width, double weight)
{
    double *act = rig_alloc((size_t)width * sizeof(*act));

    for (int32_t i = 0; i < width; i++) {
        act[i] = activated(dot(x, up + (int64_t)i * hidden, hidden)) *
                 dot(x, up + (int64_t)(width + i) * hidden, hidden);
    }
    for (int32_t k = 0; k < hidden; k++) {
        for (int32_t i = 0; i < width; i++) {
            y[k] += weight * act[i] * down[(int64_t)k * width + i];
        }
    }
    free(act);
}

static void reference_row(double *y, const float *x, const struct values *v, const struct shape *t)
{
    double p[64], all = 0, sum = 0, most = -INFINITY;
    bool chosen[64] = {false};

    for (int32_t i = 0; i < t->n; i++) {
        p[i] = dot(x, v->router + (int64_t)i * t->hidden, t->hidden);
        most = fmax(most, p[i]);
    }
    for (int32_t i = 0; i < t->n; i++) {
        p[i] = exp(p[i] - most);
        all += p[i];
    }
    for (int32_t k = 0; k < t->top; k++) {
        int32_t best = -1;
        for (int32_t i = 0; i < t->n; i++) {
            best = !chosen[i] && (best < 0 || p[i] > p[best]) ? i : best;
        }
        chosen[best] = true;
        sum += p[best];
    }
    for (int32_t i = 0; i < t->n; i++) {
        if (chosen[i]) {
            add_mlp(y, x, v->up + (int64_t)i * 2 * t->width * t->hidden,
                    v->down + (int64_t)i * t->hidden * t->width, t->hidden, t->width,
                    p[i] / (t->normalised ? sum : all));
        }
    }
    if (t->shared > 0) {
        add_mlp(y, x, v->shared_up, v->shared_down, t->hidden, t->shared,
                1 / (1 + exp(-dot(x, v->shared_gate, t->hidden))));
    }
}

static struct values make_values(struct rig *r, const struct shape *t)
{
    enum dtype b = DTYPE_BF16;
    int64_t h = t->hidden, w = t->width;
    float range = 2 / sqrtf((float)h);
    struct values v = {
        .x = rig_floats(r, t->rows * h, 1, b),
        .router = rig_floats(r, t->n * h, 1, b),
        .up = rig_floats(r, t->n * 2 * w * h, range, b),
        .down = rig_floats(r, t->n * h * w, range, b),
        .shared_up = rig_floats(r, 2 * t->shared * h, range, b),
        .shared_down = rig_floats(r, h * t->shared, range, b),
        .shared_gate = rig_floats(r, h, range, b),
    };

    for (int64_t i = 0; i < t->rows && t->skew > 0; i++) {
        v.x[i * h] = 1; /* the column that carries the skew */
    }
    for (int32_t i = 0; i < t->top && t->skew > 0; i++) {
        v.router[i * h] = t->skew + (float)i;
    }
    return v;
}

static void free_values(struct values *v)
{
    free(v->x);
    free(v->router);
    free(v->up);
    free(v->down);
    free(v->shared_up);
    free(v->shared_down);
    free(v->shared_gate);
}

static struct mat linear_weight(struct rig *r, int32_t rows, int32_t cols, const float *v)
{
    return rig_weight(r, WEIGHT_LINEAR, DTYPE_BF16, rows, cols, v);
}

static struct layer_rig make_layer(struct rig *r, const struct shape *t, const struct values *v)
{
    enum dtype act = act_of(r, DTYPE_BF16);
    struct layer_rig l = {
        .x = rig_mat(r, t->rows, t->hidden, act, v->x),
        .y = rig_mat(r, t->rows, t->hidden, act, NULL),
        .e = {.router = linear_weight(r, t->n, t->hidden, v->router),
              .up = linear_weight(r, t->n * 2 * t->width, t->hidden, v->up),
              .down = linear_weight(r, t->n * t->hidden, t->width, v->down),
              .n = t->n,
              .top = t->top,
              .width = t->width,
              .act = ACT_SILU,
              .normalised = t->normalised},
        .s = {.scores = rig_mat(r, t->rows, t->n, DTYPE_F32, NULL),
              .row = rig_mat(r, 1, t->rows, DTYPE_I32, NULL),
              .x = rig_mat(r, t->rows, t->hidden, act, NULL),
              .y = rig_mat(r, t->rows, t->hidden, act, NULL),
              .up = rig_mat(r, t->rows, 2 * t->width, act, NULL),
              .act = rig_mat(r, t->rows, t->width, act, NULL)},
    };

    if (t->shared > 0) {
        l.e.shared_up = linear_weight(r, 2 * t->shared, t->hidden, v->shared_up);
        l.e.shared_down = linear_weight(r, t->hidden, t->shared, v->shared_down);
        l.e.shared_gate = linear_weight(r, 1, t->hidden, v->shared_gate);
        l.s.shared_up = rig_mat(r, t->rows, 2 * t->shared, act, NULL);
        l.s.shared_act = rig_mat(r, t->rows, t->shared, act, NULL);
    }
    return l;
}

/* y of rows [first, first + n). */
static float *run_rows(struct rig *r, const struct layer_rig *l, int32_t first, int32_t n)
{
    struct expert_scratch s = l->s;
    struct mat y = mat_rows(l->y, 0, n);

    s.scores = mat_rows(s.scores, 0, n);
    if (l->e.shared_up.data) {
        s.shared_up = mat_rows(s.shared_up, 0, n);
        s.shared_act = mat_rows(s.shared_act, 0, n);
    }
    rig_begin_plain(r, n);
    r->b->ops->experts(r->b, y, mat_rows(l->x, first, n), &l->e, &s);
    rig_end(r);
    return rig_download(r, y);
}

static void experts_are_those_of_the_definition(void **state)
{
    struct rig r;

    (void)state;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(SHAPES) && r.b->ops->experts; i++) {
        const struct shape *t = &SHAPES[i];
        struct values v = make_values(&r, t);
        struct layer_rig l = make_layer(&r, t, &v);
        int64_t n = (int64_t)t->rows * t->hidden;
        double *want = rig_alloc((size_t)n * sizeof(*want));
        for (int32_t k = 0; k < t->rows; k++) {
            reference_row(want + (int64_t)k * t->hidden, v.x + (int64_t)k * t->hidden, &v, t);
        }
        float *got = run_rows(&r, &l, 0, t->rows);
        /* the products' operands are rounded once more, the result of act * up */
        double limit = operand_of(&r, DTYPE_BF16) == DTYPE_F32 ? 1e-10 : 1e-4;
        if (!(nmse(got, want, n) <= limit)) {
            fail_msg("shape %zu: NMSE %.3g, allowed %.3g", i, nmse(got, want, n), limit);
        }
        free(got);
        free(want);
        free_values(&v);
    }
    rig_close(&r);
}

static void a_row_alone_is_the_same_row(void **state)
{
    struct rig r;

    (void)state;
    rig_open_deterministic(&r);
    const char *isa = getenv("QUIRE_CPU_ISA");
    bool plain = strcmp(rig_device, "cpu") == 0 && isa && strcmp(isa, "plain") == 0;
    for (size_t i = 0; i < ARRAY_LEN(SHAPES) && r.b->ops->experts && !plain; i++) {
        const struct shape *t = &SHAPES[i];
        struct values v = make_values(&r, t);
        struct layer_rig l = make_layer(&r, t, &v);
        float *all = run_rows(&r, &l, 0, t->rows);
        for (int32_t k = 0; k < t->rows; k += 1 + t->rows / 8) {
            float *one = run_rows(&r, &l, k, 1);
            assert_memory_equal(one, all + (int64_t)k * t->hidden,
                                (size_t)t->hidden * sizeof(*one));
            free(one);
        }
        free(all);
        free_values(&v);
    }
    rig_close(&r);
}

/* Equal scores go to the smaller indices; scores that are no numbers give results that
 * are none. */
static void ties_and_broken_scores(void **state)
{
    struct shape t = {3, 6, 2, 32, 24, 0, true, 0};
    struct rig r;

    (void)state;
    rig_open(&r);
    if (r.b->ops->experts) {
        struct values v = make_values(&r, &t);
        memset(v.router, 0, (size_t)(t.n * t.hidden) * sizeof(*v.router));
        v.x[2 * t.hidden] = NAN;
        struct layer_rig l = make_layer(&r, &t, &v);
        float *got = run_rows(&r, &l, 0, t.rows);
        double want[32] = {0};
        add_mlp(want, v.x, v.up, v.down, t.hidden, t.width, 0.5);
        add_mlp(want, v.x, v.up + 2 * t.width * t.hidden, v.down + t.hidden * t.width, t.hidden,
                t.width, 0.5);
        assert_true(nmse(got, want, t.hidden) < 1e-4);
        assert_true(isnan(got[2 * t.hidden]));
        free(got);
        free_values(&v);
    }
    rig_close(&r);
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_are_those_of_the_definition),
        cmocka_unit_test(a_row_alone_is_the_same_row),
        cmocka_unit_test(ties_and_broken_scores),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
