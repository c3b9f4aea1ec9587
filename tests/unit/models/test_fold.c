/* Factors of columns that `quire quantize` moves from inputs into weights, on small
 * matrices whose errors are counted here.
 *
 *     build/tests/unit/models/test_fold
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/checkpoint/weights.h"
#include "models/quantise/fold.h"

enum { ROWS = 6, COLS = 32, TOKENS = 5 };

/* A weight of floats and inputs of its product; column LOUD of the inputs is a hundred
 * times as large as the others. */
enum { LOUD = 7, SILENT = 20 };
struct product_rig {
    float w[ROWS * COLS], x[TOKENS * COLS];
    struct tensor t;
    struct weight_view view;
    const struct weight_view *read[1];
    struct readers r;
    float most[COLS];
    double sum[COLS], squares[COLS];
    struct inputs in;
    uint64_t seed;
};

static float uniform(struct product_rig *p)
{
    p->seed = p->seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(p->seed >> 40) / (float)(1 << 23) - 1;
}

static void count_inputs(struct product_rig *p)
{
    p->in = (struct inputs){.cols = COLS,
                            .n = TOKENS,
                            .most = p->most,
                            .sum = p->sum,
                            .squares = p->squares,
                            .sample = p->x,
                            .n_samples = TOKENS};
    for (int i = 0; i < TOKENS * COLS; i++) {
        int j = i % COLS;
        p->most[j] = fmaxf(p->most[j], fabsf(p->x[i]));
        p->sum[j] += (double)fabsf(p->x[i]);
        p->squares[j] += (double)p->x[i] * p->x[i];
    }
}

static void rig_init(struct product_rig *p)
{
    *p = (struct product_rig){.seed = 1};
    for (int i = 0; i < ROWS * COLS; i++) {
        p->w[i] = uniform(p);
    }
    for (int i = 0; i < TOKENS * COLS; i++) {
        int j = i % COLS;
        p->x[i] = j == SILENT ? 0 : uniform(p) * (j == LOUD ? 100.0f : 1.0f);
    }
    p->t = (struct tensor){.name = "w",
                           .dtype = DTYPE_F32,
                           .n_dims = 2,
                           .dim = {ROWS, COLS},
                           .data = p->w,
                           .n_bytes = sizeof(p->w)};
    p->view = weight_view_of(&p->t);
    p->read[0] = &p->view;
    p->r = (struct readers){.v = p->read, .n = 1};
    count_inputs(p);
}

/* ---- norms ---- */

static void a_norms_weights_are_rounded_before_the_factors(void **state)
{
    (void)state;
    static const float OFFSETS[] = {0, 1};
    float w[5] = {0.37f, -1.91f, 3.0f, 0.004f, 0}, s[5];
    struct tensor norm = {.name = "norm", .dtype = DTYPE_F32, .n_dims = 1, .dim = {5}, .data = w};
    struct err e = {0};

    for (size_t o = 0; o < ARRAY_LEN(OFFSETS); o++) {
        static const float WANTED[5] = {1.7f, 0.3f, 11.3f, 1.01f, 2};
        memcpy(s, WANTED, sizeof(s));
        assert_int_equal(fold_round_factors(&norm, OFFSETS[o], s, &e), 0);
        for (int i = 0; i < 5; i++) {
            float written = fold_norm_weight(w[i], OFFSETS[o], WANTED[i]);
            uint32_t bits;
            memcpy(&bits, &written, sizeof(bits));
            assert_int_equal(bits & 0xFFFF, 0); /* a value of bfloat16 */
            if (w[i] + OFFSETS[o] == 0) {
                assert_true(s[i] == 1); /* nothing is divided */
                continue;
            }
            /* what the norm makes, times the factor, is what it made before */
            float before = w[i] + OFFSETS[o], after = written + OFFSETS[o];
            assert_true(fabsf(after * s[i] - before) <= 1e-6f * fabsf(before));
            assert_true(fabsf(s[i] / WANTED[i] - 1) < 0.05f);
        }
    }
}

/* ---- formulas ---- */

static double mean_of_logs(const float *s)
{
    double sum = 0;

    for (int j = 0; j < COLS; j++) {
        sum += log((double)s[j]);
    }
    return sum / COLS;
}

static void smoothing_is_the_formula_of_the_paper(void **state)
{
    (void)state;
    static const float ALPHAS[] = {0.2f, 0.5f, 0.8f};
    struct product_rig p;
    struct err e = {0};
    float s[COLS], most[COLS] = {0};

    rig_init(&p);
    for (int i = 0; i < ROWS * COLS; i++) {
        most[i % COLS] = fmaxf(most[i % COLS], fabsf(p.w[i]));
    }
    for (size_t a = 0; a < ARRAY_LEN(ALPHAS); a++) {
        double alpha = (double)ALPHAS[a];
        assert_int_equal(fold_smooth(&p.r, &p.in, ALPHAS[a], s, &e), 0);
        assert_true(fabs(mean_of_logs(s)) < 1e-5);
        for (int j = 1; j < COLS; j++) { /* a column without inputs counts as 1 */
            double want = j == SILENT
                              ? 1
                              : pow((double)p.most[j], alpha) / pow((double)most[j], 1 - alpha),
                   first = pow((double)p.most[0], alpha) / pow((double)most[0], 1 - alpha);
            assert_true(fabs((double)s[j] / (double)s[0] * first / want - 1) < 1e-4);
        }
    }
}

/* ---- errors ---- */

/* The expected error of the outputs by the definition: the columns' errors times the
 * columns' mean squares, and a step's uniform error of each token for int8. */
static double error_by_hand(const struct product_rig *p, const struct rounding *k, const float *s)
{
    double each = 0, error = 0, all = 0;

    for (int t = 0; t < TOKENS && k->format == FORMAT_INT8; t++) {
        double most = 0;
        for (int j = 0; j < COLS; j++) {
            most = fmax(most, fabs((double)p->x[t * COLS + j] / (double)s[j]));
        }
        each += most / 127 * (most / 127) / 12 / TOKENS;
    }
    for (int r = 0; r < ROWS; r++) {
        float row[COLS], value[COLS], scale[COLS];
        uint8_t codes[COLS];
        double sum[2] = {0};
        for (int j = 0; j < COLS; j++) {
            row[j] = p->w[r * COLS + j] * s[j];
        }
        round_row(k, row, COLS,
                  &(struct rounded_row){.codes = codes, .scale = scale, .value = value}, sum);
        for (int j = 0; j < COLS; j++) {
            double square = p->squares[j] / TOKENS,
                   off = ((double)value[j] - (double)row[j]) / (double)s[j],
                   w = (double)p->w[r * COLS + j];
            error += square * off * off + each * (double)row[j] * (double)row[j];
            all += square * w * w;
        }
    }
    return sqrt(error / all);
}

static const struct rounding WAYS[] = {{.format = FORMAT_INT8},
                                       {.format = FORMAT_INT4, .group = 8},
                                       {.format = FORMAT_INT4, .group = 16},
                                       {.format = FORMAT_INT4}};

static void an_error_is_the_one_counted_by_hand(void **state)
{
    (void)state;
    struct product_rig p;
    struct err e = {0};
    float s[COLS], ones[COLS];

    rig_init(&p);
    for (int j = 0; j < COLS; j++) {
        s[j] = 0.5f + fabsf(uniform(&p));
        ones[j] = 1;
    }
    for (size_t i = 0; i < ARRAY_LEN(WAYS); i++) {
        double got;
        assert_int_equal(fold_error(&p.r, &p.in, &WAYS[i], NULL, &got, &e), 0);
        assert_true(fabs(got / error_by_hand(&p, &WAYS[i], ones) - 1) < 1e-4);
        assert_int_equal(fold_error(&p.r, &p.in, &WAYS[i], s, &got, &e), 0);
        assert_true(fabs(got / error_by_hand(&p, &WAYS[i], s) - 1) < 1e-4);
    }
}

/* The least error of AWQ's factors, mean input^alpha of geometric mean 1, over the
 * exponents that are tried, and of none. */
static double least_of_awq(const struct product_rig *p, const struct rounding *k)
{
    double least = INFINITY;

    for (int i = 0; i <= 10; i++) { /* 0: all are 1 */
        float s[COLS];
        for (int j = 0; j < COLS; j++) {
            s[j] = j == SILENT ? 1 : powf((float)(p->sum[j] / TOKENS), (float)i / 10);
        }
        float mean = (float)exp(mean_of_logs(s));
        for (int j = 0; j < COLS; j++) {
            s[j] /= mean;
        }
        least = fmin(least, error_by_hand(p, k, s));
    }
    return least;
}

static void a_search_takes_the_factors_of_the_least_error(void **state)
{
    (void)state;
    struct product_rig p;
    struct err e = {0};
    float s[COLS];

    rig_init(&p);
    for (size_t i = 0; i < ARRAY_LEN(WAYS); i++) {
        double none, found;
        assert_int_equal(fold_error(&p.r, &p.in, &WAYS[i], NULL, &none, &e), 0);
        assert_int_equal(fold_search(&p.r, &p.in, &WAYS[i], false, s, &e), 0);
        assert_int_equal(fold_error(&p.r, &p.in, &WAYS[i], s, &found, &e), 0);
        if (WAYS[i].format == FORMAT_INT8) { /* one column is all that counts */
            assert_true(found < 0.5 * none && s[LOUD] > s[0]);
        } else {
            assert_true(fabs(found / least_of_awq(&p, &WAYS[i]) - 1) < 1e-4);
        }
    }
}

static void where_nothing_is_lost_there_are_no_factors(void **state)
{
    (void)state;
    struct product_rig p;
    struct err e = {0};
    static const struct rounding k = {.format = FORMAT_INT4};
    float s[COLS];
    double error;

    rig_init(&p);
    for (int i = 0; i < ROWS * COLS; i++) { /* codes of int4, times the row's scale */
        p.w[i] = i % COLS == 0 ? 7.5f : (float)(i * 5 % 15 - 7);
    }
    p.squares[0] = 0; /* of the only value that no code has */
    assert_int_equal(fold_error(&p.r, &p.in, &k, NULL, &error, &e), 0);
    assert_true(error == 0);
    assert_int_equal(fold_search(&p.r, &p.in, &k, false, s, &e), 0);
    for (int j = 0; j < COLS; j++) {
        assert_true(s[j] == 1);
    }
}

static void rows_are_floats_of_every_type(void **state)
{
    (void)state;
    static const uint16_t BF16[4] = {0x3F80, 0xC000, 0x3E80, 0}, F16[4] = {0x3C00, 0xC000, 0x3400};
    static const float WANT[4] = {1, -2, 0.25f, 0};
    struct tensor t = {.name = "w", .dtype = DTYPE_BF16, .n_dims = 2, .dim = {2, 2}, .data = BF16};
    struct weight_view all = weight_view_of(&t);
    float got[4];

    for (int i = 0; i < 2; i++) {
        fold_load_row(&all, 0, got);
        fold_load_row(&all, 1, got + 2);
        assert_memory_equal(got, WANT, sizeof(WANT));
        t.dtype = DTYPE_F16;
        t.data = F16;
    }
    t.n_dims = 1;
    t.dim[0] = 4;
    fold_load_vector(&t, got);
    assert_memory_equal(got, WANT, sizeof(WANT));
}

/* Of [2, 3, 4] stored [in, out] with two products' rows in turn, the second expert's
 * second product. */
static void a_view_is_some_values_of_a_tensor(void **state)
{
    (void)state;
    float w[24], got[3];
    struct tensor t = {.name = "w", .dtype = DTYPE_F32, .n_dims = 3, .dim = {2, 3, 4}, .data = w};
    struct weight_view v = {
        .t = &t, .rows = 2, .cols = 3, .first = 13, .row_step = 2, .col_step = 4};

    for (int i = 0; i < 24; i++) {
        w[i] = (float)i;
    }
    fold_load_row(&v, 0, got);
    assert_memory_equal(got, ((float[]){13, 17, 21}), sizeof(got));
    fold_load_row(&v, 1, got);
    assert_memory_equal(got, ((float[]){15, 19, 23}), sizeof(got));
}

static void powers_of_two_are_the_nearest_ones(void **state)
{
    (void)state;
    float s[] = {1, 1.4f, 1.5f, 3, 0.3f, 256, 1.0f / 256};
    static const float WANT[] = {1, 1, 2, 4, 0.25f, 256, 1.0f / 256};

    fold_to_powers(s, ARRAY_LEN(s));
    assert_memory_equal(s, WANT, sizeof(WANT));
}

static void a_search_for_powers_finds_powers(void **state)
{
    (void)state;
    static const struct rounding INT8 = {.format = FORMAT_INT8};
    struct product_rig p;
    struct err e = {0};
    float s[COLS];
    double none, found;

    rig_init(&p);
    assert_int_equal(fold_error(&p.r, &p.in, &INT8, NULL, &none, &e), 0);
    assert_int_equal(fold_search(&p.r, &p.in, &INT8, true, s, &e), 0);
    assert_int_equal(fold_error(&p.r, &p.in, &INT8, s, &found, &e), 0);
    assert_true(found < 0.6 * none && s[LOUD] > s[0]);
    for (int j = 0; j < COLS; j++) {
        int exponent;
        assert_true(frexpf(s[j], &exponent) == 0.5f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_norms_weights_are_rounded_before_the_factors),
        cmocka_unit_test(smoothing_is_the_formula_of_the_paper),
        cmocka_unit_test(an_error_is_the_one_counted_by_hand),
        cmocka_unit_test(a_search_takes_the_factors_of_the_least_error),
        cmocka_unit_test(where_nothing_is_lost_there_are_no_factors),
        cmocka_unit_test(rows_are_floats_of_every_type),
        cmocka_unit_test(a_view_is_some_values_of_a_tensor),
        cmocka_unit_test(powers_of_two_are_the_nearest_ones),
        cmocka_unit_test(a_search_for_powers_finds_powers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
