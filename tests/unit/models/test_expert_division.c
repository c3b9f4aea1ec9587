/* Whether ranks hold slices of experts or whole ones, where that is left open: the
 * decision, and what it makes of goldens on a CPU and on a backend with kernels of
 * certain widths, as a GPU is.
 */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "config/settings/settings.h"
#include "models/families/load/load.h"
#include "tests/unit/loaded.h"
#include "tests/unit/models/narrower.h"

#define FLOATS "tests/golden/gpt-oss"            /* 6 experts of 40 columns */
#define CODES "tests/golden/quant-mxfp4-experts" /* 4 of 96, in groups of 32 */

/* ---- the decision ---- */

static void fast_kernels_of_floats_want_whole_multiples(void **state)
{
    (void)state;
    static const struct {
        int32_t multiple, hidden, width;
        enum expert_way way;
    } CASES[] = {{64, 2880, 2880, EXPERTS_FLOATS},   {64, 2880, 1440, EXPERTS_ANY_SHAPE},
                 {64, 2048, 768, EXPERTS_FLOATS},    {64, 2048, 768 / 8, EXPERTS_ANY_SHAPE},
                 {64, 2072, 768, EXPERTS_ANY_SHAPE}, {1, 24, 5, EXPERTS_FLOATS},
                 {0, 2880, 2880, EXPERTS_ANY_SHAPE}};

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct weight_support s = {.experts_floats = CASES[i].multiple};
        assert_int_equal(expert_floats_way(&s, CASES[i].hidden, CASES[i].width), CASES[i].way);
    }
}

static void whole_experts_pay_only_where_slices_lose(void **state)
{
    (void)state;
    static const struct {
        int32_t n_ranks, n_experts;
        enum expert_way whole, sliced;
        bool pays;
    } CASES[] = {{2, 32, EXPERTS_CODES, EXPERTS_ANY_SHAPE, true},
                 {2, 32, EXPERTS_CODES, EXPERTS_FLOATS, true},
                 {2, 32, EXPERTS_CODES, EXPERTS_REFUSED, true},
                 {8, 128, EXPERTS_FLOATS, EXPERTS_ANY_SHAPE, true},
                 {2, 32, EXPERTS_CODES, EXPERTS_CODES, false},
                 {2, 32, EXPERTS_FLOATS, EXPERTS_FLOATS, false},
                 {2, 32, EXPERTS_ANY_SHAPE, EXPERTS_ANY_SHAPE, false},
                 {2, 32, EXPERTS_ANY_SHAPE, EXPERTS_FLOATS, false},
                 {3, 32, EXPERTS_CODES, EXPERTS_ANY_SHAPE, false},
                 {1, 32, EXPERTS_CODES, EXPERTS_ANY_SHAPE, false}};

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        assert_int_equal(experts_pay_whole(CASES[i].n_ranks, CASES[i].n_experts, CASES[i].whole,
                                           CASES[i].sliced),
                         CASES[i].pays);
    }
}

/* ---- of a model ---- */

/* Codes of experts in multiples of 64, floats in multiples of 8. */
static struct weight_support of_certain_widths(const struct backend *b,
                                               const struct weight_format *f)
{
    (void)b, (void)f;
    return (struct weight_support){
        .as_stored = true, .act = DTYPE_F32, .kernel = "", .experts = 64, .experts_floats = 8};
}

/* How the experts of a rank are to be divided, and the lines that are logged of it. */
enum { TEXT_BYTES = 4096 };
struct divided {
    bool whole;
    char log[TEXT_BYTES];
};

static void log_to(struct divided *d, const struct model *m)
{
    int fd[2], saved = dup(STDERR_FILENO);

    assert_int_equal(pipe(fd), 0);
    dup2(fd[1], STDERR_FILENO);
    model_log_experts(m);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(fd[1]);
    size_t n = 0;
    for (ssize_t got; (got = read(fd[0], d->log + n, TEXT_BYTES - 1 - n)) > 0;) {
        n += (size_t)got;
    }
    d->log[n] = '\0';
    close(fd[0]);
}

static struct divided divide(const char *dir, supports_fn *supports, int32_t rank, int32_t n_ranks,
                             enum switch_choice choice)
{
    struct model_options o = part_options(DTYPE_F32, rank, n_ranks);
    struct divided d = {0};
    struct loaded l;
    struct err e = {0};

    o.expert_parallel = choice == SWITCH_ON;
    o.expert_parallel_auto = choice == SWITCH_AUTO;
    if (load_with(&l, dir, supports, &o, &e) < 0) {
        fail_msg("%s, rank %d of %d: %s", dir, rank, n_ranks, e.text);
    }
    const struct model_config *c = &l.model->config;
    const struct experts *x = &l.model->weights->layer[0].experts;
    d.whole = l.model->options.expert_parallel;
    int32_t parts = n_ranks > 1 && d.whole ? n_ranks : 1;
    assert_int_equal(experts_held(x), c->experts.n / parts);
    assert_int_equal(x->width, c->experts.intermediate / (d.whole ? 1 : n_ranks));
    log_to(&d, l.model);
    unload(&l);
    return d;
}

static void a_cpu_holds_slices(void **state)
{
    (void)state;
    for (int32_t rank = 0; rank < 2; rank++) {
        struct divided d = divide(FLOATS, NULL, rank, 2, SWITCH_AUTO);
        assert_false(d.whole);
        assert_string_equal(d.log, "");
    }
}

static void slices_without_a_fast_kernel_become_whole_experts(void **state)
{
    (void)state;
    struct divided first = divide(FLOATS, of_certain_widths, 0, 2, SWITCH_AUTO),
                   second = divide(FLOATS, of_certain_widths, 1, 2, SWITCH_AUTO);

    assert_true(first.whole && second.whole);
    assert_non_null(strstr(first.log, "ranks hold whole experts"));
    assert_non_null(strstr(first.log, "slices of 20 of 40 columns have no fast kernel"));
    assert_string_equal(second.log, ""); /* the first rank has said so */
}

static void slices_whose_codes_no_kernel_takes_become_whole_experts(void **state)
{
    (void)state;
    static const struct narrowing NARROW = {
        {{96, 64}, {192, 128}, {12, 8}, {3, 2}},
        {{"\"intermediate_size\": 96", "\"intermediate_size\": 64"}}};
    char dir[64];

    narrow_golden(&NARROW, CODES, dir);
    assert_false(divide(dir, NULL, 0, 2, SWITCH_AUTO).whole); /* any kernel of a CPU does */
    struct divided d = divide(dir, of_certain_widths, 0, 2, SWITCH_AUTO);
    assert_true(d.whole);
    assert_non_null(strstr(d.log, "slices of 32 of 64 columns are decoded to float32 (FP4)"));
    narrow_remove(dir);
}

static void slices_that_would_be_refused_become_whole_experts(void **state)
{
    (void)state;
    struct divided d = divide(CODES, NULL, 0, 2, SWITCH_AUTO);

    assert_true(d.whole);
    assert_non_null(strstr(d.log, "slices of 48 of 96 columns cut groups (FP4)"));
}

static void a_choice_is_obeyed_and_a_slow_one_is_logged(void **state)
{
    (void)state;
    struct divided d = divide(FLOATS, of_certain_widths, 0, 2, SWITCH_OFF);

    assert_false(d.whole);
    assert_non_null(strstr(d.log, "ranks hold slices of experts, which is slow"));
    assert_non_null(strstr(d.log, "expert_parallel: true"));
    assert_non_null(strstr(d.log, "a slow kernel multiplies experts"));
    assert_non_null(strstr(d.log, "float32, 20 x 24"));
    d = divide(FLOATS, of_certain_widths, 0, 2, SWITCH_ON);
    assert_true(d.whole);
    assert_string_equal(d.log, "");
}

/* Four ranks do not divide six experts. */
static void experts_that_ranks_do_not_divide_stay_slices(void **state)
{
    (void)state;
    struct err e = {0};
    struct loaded l;
    struct model_options o = part_options(DTYPE_F32, 0, 4);

    o.expert_parallel_auto = true;
    l.model = NULL;
    int rc = load_with(&l, FLOATS, of_certain_widths, &o, &e);
    if (rc < 0) {
        fail_msg("%s", e.text);
    }
    struct divided d;
    log_to(&d, l.model);
    assert_false(l.model->options.expert_parallel);
    assert_non_null(strstr(d.log, "a number of ranks that divides the experts"));
    unload(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fast_kernels_of_floats_want_whole_multiples),
        cmocka_unit_test(whole_experts_pay_only_where_slices_lose),
        cmocka_unit_test(a_cpu_holds_slices),
        cmocka_unit_test(slices_without_a_fast_kernel_become_whole_experts),
        cmocka_unit_test(slices_whose_codes_no_kernel_takes_become_whole_experts),
        cmocka_unit_test(slices_that_would_be_refused_become_whole_experts),
        cmocka_unit_test(a_choice_is_obeyed_and_a_slow_one_is_logged),
        cmocka_unit_test(experts_that_ranks_do_not_divide_stay_slices),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
