/* Which of two sources drafts for a sequence. */
#include "engine/speculate/mixed.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* A source that always drafts one token. */
struct one {
    struct draft_source base;
    float expects;
    int32_t token; /* -1: none */
    int32_t n_prepared, n_verified, n_ended;
};

static struct one text, model;
static struct mixed_drafts mixed;
static struct group group = {.order = 3};
static struct seq seq[2] = {{.group = &group, .slot = 0}, {.group = &group, .index = 1, .slot = 1}};

static float expect(struct draft_source *d, struct seq *q)
{
    (void)q;
    return CONTAINER_OF(d, struct one, base)->expects;
}

static int32_t draft(struct draft_source *d, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    const struct one *o = CONTAINER_OF(d, struct one, base);

    (void)q, (void)most;
    token[0] = o->token;
    prob[0] = 1;
    return o->token >= 0;
}

static void verified(struct draft_source *d, struct seq *q, int32_t n, int32_t n_accepted)
{
    (void)q, (void)n_accepted;
    CONTAINER_OF(d, struct one, base)->n_verified += n;
}

static void ended(struct draft_source *d, struct group *g)
{
    (void)g;
    CONTAINER_OF(d, struct one, base)->n_ended++;
}

static void outlook(struct draft_source *d, const struct draft_step *step, int32_t n)
{
    (void)d, (void)step, (void)n;
}

static double prepare(struct draft_source *d, struct draft_want *want, int32_t n,
                      const struct draft_step *step)
{
    (void)want, (void)step;
    CONTAINER_OF(d, struct one, base)->n_prepared += n;
    return 100;
}

static int start(void **state)
{
    (void)state;
    struct draft_source source = {.expect = expect,
                                  .draft = draft,
                                  .verified = verified,
                                  .ended = ended,
                                  .outlook = outlook,
                                  .prepare = prepare};
    struct err e;
    text = (struct one){.base = source, .token = 1};
    model = (struct one){.base = source, .token = 2};
    return mixed_drafts_init(&mixed, &text.base, &model.base, 2, &e);
}

static int stop(void **state)
{
    (void)state;
    mixed_drafts_release(&mixed);
    return 0;
}

/* Prepares both sequences and drafts for the first; returns the draft. */
static int32_t drafted(void)
{
    struct draft_want want[] = {{&seq[0], 4}, {&seq[1], 4}};
    struct draft_step step = {.tokens = 2};
    int32_t token[1] = {-1};
    float prob[1];

    mixed.base.prepare(&mixed.base, want, 2, &step);
    mixed.base.draft(&mixed.base, &seq[0], 1, token, prob);
    mixed.base.verified(&mixed.base, &seq[0], 1, 1);
    return token[0];
}

static void the_source_that_brings_more_drafts_and_learns(void **state)
{
    (void)state;
    text.expects = 2;
    model.expects = 1;
    assert_true(mixed.base.expect(&mixed.base, &seq[0]) == 2);
    assert_int_equal(drafted(), 1);
    assert_int_equal(model.n_prepared, 0);
    assert_int_equal(text.n_verified, 1);
    model.expects = 3;
    assert_true(mixed.base.expect(&mixed.base, &seq[0]) == 3);
    assert_int_equal(drafted(), 2);
    assert_int_equal(model.n_prepared, 2);
    assert_int_equal(model.n_verified, 1);
    assert_int_equal(text.n_verified, 1);
}

static void text_drafts_while_the_model_still_reads(void **state)
{
    (void)state;
    text.expects = 1;
    model.expects = 3;
    model.token = -1;
    assert_int_equal(drafted(), 1);
    assert_int_equal(text.n_verified, 1);
    assert_int_equal(model.n_verified, 0);
}

static void both_hear_of_an_end(void **state)
{
    (void)state;
    mixed.base.ended(&mixed.base, &group);
    assert_int_equal(text.n_ended, 1);
    assert_int_equal(model.n_ended, 1);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(the_source_that_brings_more_drafts_and_learns),
        CASE(text_drafts_while_the_model_still_reads),
        CASE(both_hear_of_an_end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
