/* Texts scored without a server, against the goldens' logits, and what a text shows of
 * the inputs of products.
 *
 *     build/tests/unit/models/test_scorer
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/checkpoint/weights.h"
#include "models/families/layers.h"
#include "models/quantise/inputs.h"

#define OK(call, e)                              \
    do {                                         \
        if ((call) < 0)                          \
            fail_msg("%s: %s", #call, (e).text); \
    } while (0)

/* A model of all tokens, one with windows in some layers. */
static const char *const GOLDENS[] = {"tests/golden/llama-mha24", "tests/golden/gemma2"};

static void open_golden(struct scorer *s, const char *golden)
{
    static const struct model_options how = {0};
    struct err e = {0};

    OK(scorer_init(s, golden, &how, 1, &e), e);
}

/* ---- logits ---- */

struct seen {
    float *logits; /* [n, vocab] */
    int32_t vocab, n, ends_at;
};

static int keep(void *ctx, int32_t first, int32_t rows, const float *logits, struct err *e)
{
    struct seen *seen = ctx;

    if (seen->ends_at >= 0 && first + rows > seen->ends_at) {
        return err_set(e, ERR_INVALID, "enough");
    }
    assert_int_equal(first, seen->n); /* in order, none twice */
    memcpy(seen->logits + (ptrdiff_t)first * seen->vocab, logits,
           (size_t)rows * (size_t)seen->vocab * sizeof(*logits));
    seen->n += rows;
    return 0;
}

static struct seen logits_of(struct scorer *s, const int32_t *token, int32_t n)
{
    struct err e = {0};
    struct seen seen = {.vocab = s->config.vocab, .ends_at = -1};

    seen.logits = calloc((size_t)n * (size_t)seen.vocab, sizeof(*seen.logits));
    assert_non_null(seen.logits);
    OK(scorer_window(s, token, n, keep, &seen, &e), e);
    assert_int_equal(seen.n, n);
    return seen;
}

static const struct tensor *expected(const struct checkpoint *c, const char *name, int i)
{
    char full[32];

    snprintf(full, sizeof(full), "%s.%d", name, i);
    return checkpoint_find(c, full);
}

static void logits_are_the_goldens(void **state)
{
    (void)state;
    for (size_t g = 0; g < ARRAY_LEN(GOLDENS); g++) {
        struct scorer s;
        struct checkpoint *c;
        struct err e = {0};
        char path[128];
        open_golden(&s, GOLDENS[g]);
        snprintf(path, sizeof(path), "%s/expected", GOLDENS[g]);
        OK(checkpoint_open(&c, path, &e), e);
        double sum = 0, bound = 0;
        for (int i = 0; i < 3; i++) {
            const struct tensor *prompt = expected(c, "prompt", i), *t = expected(c, "logits", i);
            struct seen seen = logits_of(&s, prompt->data, (int32_t)prompt->dim[0]);
            const float *want = t->data;
            double own = (double)*(const float *)expected(c, "error", i)->data;
            for (int64_t k = 0; k < t->dim[0] * t->dim[1]; k++) {
                double off = (double)seen.logits[k] - (double)want[k];
                sum += off * off;
            }
            bound += 4 * own * own * (double)(t->dim[0] * t->dim[1]);
            free(seen.logits);
        }
        assert_true(sum <= bound); /* twice the error of transformers' own */
        checkpoint_free(c);
        scorer_release(&s);
    }
}

/* ---- loss ---- */

enum { TEXT = SCORER_WINDOW + 41 };

static void text_of(const struct scorer *s, int32_t *token, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        token[i] = (i * 37 + i / 5) % s->config.vocab;
    }
}

/* Minus the logarithms of what follows each token of a window, summed. */
static double loss_by_hand(struct scorer *s, const int32_t *token, int32_t n)
{
    struct seen seen = logits_of(s, token, n);
    double loss = 0;

    for (int32_t i = 0; i + 1 < n; i++) {
        const float *x = seen.logits + (ptrdiff_t)i * seen.vocab;
        double sum = 0;
        for (int32_t k = 0; k < seen.vocab; k++) {
            sum += exp((double)x[k] - (double)x[0]);
        }
        loss += log(sum) + (double)x[0] - (double)x[token[i + 1]];
    }
    free(seen.logits);
    return loss;
}

static void a_loss_is_that_of_its_windows(void **state)
{
    (void)state;
    static const int32_t N[] = {1, 2, 300, SCORER_WINDOW, SCORER_WINDOW + 1, TEXT};
    int32_t token[TEXT], count;
    struct scorer s;
    struct err e = {0};

    open_golden(&s, GOLDENS[0]);
    text_of(&s, token, TEXT);
    for (size_t i = 0; i < ARRAY_LEN(N); i++) {
        double want = loss_by_hand(&s, token, MIN(N[i], SCORER_WINDOW)), got;
        int32_t rest = N[i] - SCORER_WINDOW;
        want += rest > 1 ? loss_by_hand(&s, token + SCORER_WINDOW, rest) : 0;
        OK(scorer_loss(&s, token, N[i], &got, &count, &e), e);
        assert_int_equal(count, N[i] - 1 - (rest > 0)); /* a window's first is not scored */
        assert_true(fabs(got - want) <= 1e-5 * want);
    }
    scorer_release(&s);
}

/* ---- what is refused ---- */

static void windows_that_cannot_be_are_refused(void **state)
{
    (void)state;
    int32_t token[SCORER_WINDOW + 1] = {0};
    struct scorer s;
    struct err e = {0};
    struct seen none = {.ends_at = -1};

    open_golden(&s, GOLDENS[0]);
    assert_int_equal(scorer_window(&s, token, 0, keep, &none, &e), ERR_INVALID);
    assert_int_equal(scorer_window(&s, token, SCORER_WINDOW + 1, keep, &none, &e), ERR_INVALID);
    token[2] = s.config.vocab;
    assert_int_equal(scorer_window(&s, token, 3, keep, &none, &e), ERR_INVALID);
    token[2] = -1;
    assert_int_equal(scorer_window(&s, token, 3, keep, &none, &e), ERR_INVALID);
    assert_int_equal(none.n, 0);
    scorer_release(&s);
    assert_true(scorer_init(&s, "tests/golden/none", NULL, 1, &e) < 0);
    assert_null(s.model);
}

static void a_window_ends_where_its_reader_does(void **state)
{
    (void)state;
    int32_t token[200];
    struct scorer s;
    struct err e = {0};

    open_golden(&s, GOLDENS[0]);
    text_of(&s, token, 200);
    struct seen some = {.vocab = s.config.vocab, .ends_at = 100};
    some.logits = calloc((size_t)200 * (size_t)s.config.vocab, sizeof(*some.logits));
    assert_non_null(some.logits);
    assert_int_equal(scorer_window(&s, token, 200, keep, &some, &e), ERR_INVALID);
    assert_string_equal(e.text, "enough");
    assert_true(some.n > 0 && some.n <= 100);
    struct seen whole = logits_of(&s, token, 200); /* the next one is as any */
    assert_memory_equal(whole.logits, some.logits,
                        (size_t)some.n * (size_t)s.config.vocab * sizeof(float));
    free(whole.logits);
    free(some.logits);
    scorer_release(&s);
}

/* ---- inputs ---- */

static void check_inputs(const struct inputs *in, int32_t n)
{
    assert_int_equal(in->n, n);
    assert_in_range(in->n_samples, 1, INPUT_SAMPLES);
    double all = 0;
    for (int32_t c = 0; c < in->cols; c++) {
        double most = (double)in->most[c], mean = in->sum[c] / n, square = in->squares[c] / n;
        assert_true(mean <= most * 1.000001 && square <= most * most * 1.000001);
        assert_true(mean * mean <= square * 1.000001);
        all += most;
        for (int32_t i = 0; i < in->n_samples; i++) {
            assert_true(fabsf(in->sample[(ptrdiff_t)i * in->cols + c]) <= in->most[c]);
        }
    }
    assert_true(all > 0);
}

static void a_text_shows_every_products_input(void **state)
{
    (void)state;
    int32_t token[TEXT], count, count_rounded;
    struct scorer s;
    struct inputs *in;
    struct err e = {0};
    double before, after, rounded;

    open_golden(&s, GOLDENS[0]);
    text_of(&s, token, TEXT);
    const struct backend_ops *ops = s.backend->ops;
    OK(scorer_loss(&s, token, TEXT, &before, &count, &e), e);
    OK(inputs_gather(&s, token, TEXT, &in, &e), e);
    int32_t n = s.model->weights->n_layers * PRODUCTS;
    for (int32_t i = 0; i < n; i++) {
        bool experts = i % PRODUCTS >= PRODUCT_EXPERTS;
        assert_int_equal(in[i].cols > 0, !experts);
        if (!experts) {
            check_inputs(&in[i], TEXT);
        }
    }
    inputs_free(in, n);
    /* rounding them is seen, and ends with the call */
    struct input_rounding int8 = {.format = FORMAT_INT8};
    OK(inputs_rounded_loss(&s, &int8, token, TEXT, &rounded, &count_rounded, &e), e);
    assert_ptr_equal(s.backend->ops, ops);
    OK(scorer_loss(&s, token, TEXT, &after, &count, &e), e);
    assert_int_equal(count_rounded, count);
    assert_true(after == before && rounded != before);
    assert_true(fabs(rounded - before) < 0.05 * before);
    scorer_release(&s);
}

/* Every expert sees its own tokens: as many in all as the layer's tokens have
 * experts. */
static void a_text_shows_the_inputs_of_experts(void **state)
{
    (void)state;
    int32_t token[TEXT];
    struct scorer s;
    struct inputs *in;
    struct err e = {0};

    open_golden(&s, "tests/golden/qwen2-moe-shared");
    text_of(&s, token, TEXT);
    OK(inputs_gather(&s, token, TEXT, &in, &e), e);
    int32_t each = inputs_per_layer(&s.config), n = s.model->weights->n_layers * each, layers = 0;
    for (int32_t i = 0; i < s.model->weights->n_layers; i++) {
        const struct inputs *of = &in[i * each];
        int64_t rows = 0;
        if (!s.config.experts.layer[i]) {
            assert_true(of[PRODUCT_DOWN].cols > 0 && of[PRODUCT_EXPERTS].cols == 0);
            continue;
        }
        layers++;
        check_inputs(&of[PRODUCT_EXPERTS], TEXT);
        check_inputs(&of[PRODUCT_SHARED_DOWN], TEXT);
        assert_int_equal(of[PRODUCT_EXPERTS].cols, s.config.hidden);
        for (int32_t x = 0; x < s.config.experts.n; x++) {
            const struct inputs *down = &of[PRODUCTS + x];
            rows += down->n;
            if (down->n > 0) {
                assert_int_equal(down->cols, s.config.experts.intermediate);
                check_inputs(down, (int32_t)down->n);
            }
        }
        assert_int_equal(rows, (int64_t)TEXT * s.config.experts.top);
    }
    assert_true(layers > 0);
    inputs_free(in, n);
    scorer_release(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_the_goldens),
        cmocka_unit_test(a_loss_is_that_of_its_windows),
        cmocka_unit_test(windows_that_cannot_be_are_refused),
        cmocka_unit_test(a_window_ends_where_its_reader_does),
        cmocka_unit_test(a_text_shows_every_products_input),
        cmocka_unit_test(a_text_shows_the_inputs_of_experts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
