/* Commit: how choices end and what the output side is told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>

#include "tests/sim/rig.h"

static struct rig rig;
static struct sched_config config;

static int start(void **state)
{
    (void)state;
    rig_config(&config);
    rig_open(&rig, &config);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    struct sched_counts c;
    rig_run(&rig, 1000);
    sched_counts(rig.sched, &c);
    rig_close(&rig);
    return c.blocks_used == 0 ? 0 : -1;
}

static void assert_finish(const struct rig_request *q, int32_t choice, int finish,
                          int32_t stop_token)
{
    const struct delta *d = rig_finish(&rig, q, choice);

    assert_non_null(d);
    assert_int_equal(d->finish, finish);
    assert_int_equal(d->stop_token, stop_token);
}

static void max_tokens_ends_by_length(void **state)
{
    (void)state;
    struct rig_request *a = rig_add(&rig, rig_params(), 0, 5);
    rig_run(&rig, 100);
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 0), 16);
    assert_finish(a, 0, FINISH_LENGTH, -1);
    assert_int_equal(rig.delta[rig.n_deltas - 1].kind, DELTA_END);
    assert_int_equal(rig_count(&rig, a, DELTA_END, -1), 1);
}

static void the_end_token_is_the_last_one_told(void **state)
{
    (void)state;
    rig.token = 99;
    struct rig_request *a = rig_add(&rig, rig_params(), 0, 5);
    rig_run(&rig, 100);
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 0), 1);
    assert_int_equal(rig.delta[0].token, 99);
    assert_finish(a, 0, FINISH_STOP, -1);
}

static void ignore_eos_goes_on(void **state)
{
    (void)state;
    rig.token = 99;
    struct gen_params p = rig_params();
    p.ignore_eos = true;
    struct rig_request *a = rig_add(&rig, p, 0, 5);
    rig_run(&rig, 100);
    assert_finish(a, 0, FINISH_LENGTH, -1);
}

static void a_stop_id_is_named(void **state)
{
    (void)state;
    int32_t stop_id = 7;
    struct gen_params p = rig_params();
    p.stop_token = &stop_id;
    p.n_stop_token = 1;
    p.min_tokens = 3;
    struct rig_request *a = rig_add(&rig, p, 0, 5);
    rig_run(&rig, 100);
    /* the first three could not stop it */
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 0), 4);
    assert_finish(a, 0, FINISH_STOP, 7);
}

static void a_stop_mark_ends_the_choice_alone(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.n = p.best_of = 2;
    p.temperature = 1;
    struct rig_request *a = rig_add(&rig, p, 0, 5);
    rig_run(&rig, 4);
    atomic_store(&a->stop_at[1], 3);
    rig_run(&rig, 100);
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 0), 16);
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 1), 5);
    assert_finish(a, 0, FINISH_LENGTH, -1);
    assert_finish(a, 1, FINISH_STOP, -1);
}

static int32_t nan_at_the_third(struct rig *r, const struct sample_row *row)
{
    (void)r;
    return row->position == 7 ? TOKEN_NO_NUMBER : 7;
}

/* The first sample, which reads the same logits as the second, has no allowed token. */
static int32_t nothing_at_the_third(struct rig *r, const struct sample_row *row)
{
    static uint64_t first;

    first = row->position == 5 && !first ? row->seed : first;
    (void)r;
    return row->position == 7 && row->seed == first ? TOKEN_NONE_ALLOWED : 7;
}

static void a_choice_that_cannot_go_on_ends_alone(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.n = p.best_of = 2;
    p.temperature = 1;
    p.seed = 4711;
    rig.answer = nothing_at_the_third;
    struct rig_request *a = rig_add(&rig, p, 0, 5);
    rig_run(&rig, 100);
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 0), 2);
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 1), 16);
    assert_finish(a, 0, FINISH_IMPOSSIBLE, -1);
    assert_non_null(rig_finish(&rig, a, 0)->error);
    assert_finish(a, 1, FINISH_LENGTH, -1);
    for (int32_t i = 0; i < rig.n_deltas; i++) {
        assert_true(rig.delta[i].kind != DELTA_END ||
                    (rig.delta[i].finish == FINISH_NONE && !rig.delta[i].error));
    }
}

/* is_stop is set for the token that ends a choice by its id, and for no other. */
static void the_token_that_ends_a_choice_says_so(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct gen_params p = rig_params();
        int32_t stop = 7;
        p.stop_token = &stop;
        p.n_stop_token = i > 0;
        p.max_tokens = 3;
        p.min_tokens = i == 2 ? 3 : 1; /* 2: the length ends it first */
        rig.n_deltas = 0;
        struct rig_request *a = rig_add(&rig, p, 0, 5);
        rig_run(&rig, 100);
        int32_t n_tokens = rig_count(&rig, a, DELTA_TOKEN, 0), n = 0;
        assert_int_equal(n_tokens, i == 1 ? 2 : 3);
        for (int32_t k = 0; k < rig.n_deltas; k++) {
            n += rig.delta[k].kind == DELTA_TOKEN;
            assert_int_equal(rig.delta[k].is_stop,
                             rig.delta[k].kind == DELTA_TOKEN && i == 1 && n == n_tokens);
        }
    }
}

static void a_nan_ends_the_request_with_an_error(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.n = p.best_of = 2;
    p.temperature = 1;
    rig.answer = nan_at_the_third;
    struct rig_request *a = rig_add(&rig, p, 0, 5);
    struct rig_request *b = rig_add(&rig, rig_params(), 0, 30);
    rig_run(&rig, 100);
    for (int i = 0; i < 2; i++) {
        assert_finish(a, i, FINISH_ERROR, -1);
        assert_non_null(rig_finish(&rig, a, i)->error);
    }
    assert_finish(b, 0, FINISH_LENGTH, -1); /* the others go on */
}

static void max_tokens_zero_is_the_prompt_alone(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.max_tokens = 0;
    p.echo = true;
    p.n_logprobs = 1;
    struct rig_request *a = rig_add(&rig, p, 0, 5);
    rig_run(&rig, 100);
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 0), 0);
    assert_int_equal(rig_count(&rig, a, DELTA_PROMPT, 0), 5);
    assert_true(isnan(rig.delta[0].logprob));
    assert_int_equal(rig.delta[1].n_top, 1);
    assert_finish(a, 0, FINISH_LENGTH, -1);
}

static void max_tokens_zero_ends_every_decoding_method(void **state)
{
    (void)state;
    for (int32_t k = 0; k < 4; k++) {
        struct gen_params p = rig_params();
        p.max_tokens = 0;
        p.echo = true;
        p.n_logprobs = k % 2 ? 1 : -1;
        p.n = p.best_of = 3;
        p.beam_width = k >= 2 ? 3 : 0;
        struct rig_request *a = rig_add(&rig, p, 0, 40); /* in pieces */
        assert_true(rig_run(&rig, 100) < 100);
        assert_true(a->ended);
        for (int32_t i = 0; i < 3; i++) {
            assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, i), 0);
            assert_finish(a, i, FINISH_LENGTH, -1);
        }
        assert_int_equal(rig_count(&rig, a, DELTA_PROMPT, 0), k % 2 ? 40 : 0);
    }
}

static void a_request_that_bans_every_token_is_refused(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    struct group *g = NULL;
    struct err e = {0};
    int32_t prompt[] = {1, 2}, allowed[] = {99, 8, 8}, stop = 8;
    struct request r = {.prompt = prompt, .n_prompt = 2};
    p.allowed_token = allowed;
    p.n_allowed = 3;
    p.min_tokens = 1;
    p.stop_token = &stop;
    p.n_stop_token = 1;
    r.params = p;
    assert_int_equal(group_new(&g, &r, NULL, &rig.config, &e), ERR_INVALID);
    assert_string_equal(e.param, "allowed_token_ids");
    r.params.min_tokens = 0; /* either may be sampled */
    assert_int_equal(group_new(&g, &r, NULL, &rig.config, &e), 0);
    group_free(g);
    r.params.min_tokens = 1;
    r.params.ignore_eos = true;
    assert_int_equal(group_new(&g, &r, NULL, &rig.config, &e), 0);
    group_free(g);
    int32_t word[] = {8, 99, 5}, first[] = {0, 1, 2, 3};
    struct word_list words = {word, first, 3};
    r.params.min_tokens = 0;
    assert_int_equal(group_new(&g, &r, &words, &rig.config, &e), ERR_INVALID);
    first[1] = 2; /* "8 99" is one word; the encoder never makes "" */
    first[2] = 2;
    words.n = 1;
    assert_int_equal(group_check_allowed(&r, &words, &rig.config, &e), 0);
    struct gen_bias bias[100];
    for (int32_t i = 0; i < 100; i++) {
        bias[i] = (struct gen_bias){i, -INFINITY};
    }
    r.params.n_allowed = 0;
    r.params.bias = bias;
    r.params.n_bias = 100;
    assert_int_equal(group_new(&g, &r, NULL, &rig.config, &e), ERR_INVALID);
    assert_string_equal(e.param, "logit_bias");
    r.params.max_tokens = 0; /* no token is generated */
    assert_int_equal(group_new(&g, &r, NULL, &rig.config, &e), 0);
    group_free(g);
}

static void ending_everything_tells_everyone_once(void **state)
{
    (void)state;
    struct rig_request *q[12];
    for (int i = 0; i < 12; i++) {
        q[i] = rig_add(&rig, rig_params(), i, 20);
    }
    rig_run(&rig, 3);
    rig_plan(&rig); /* a step is in flight */
    sched_end_all(rig.sched, FINISH_ERROR, "the device failed");
    assert_int_equal(decode_reap(rig.sched, &rig.out) < 12, 1);
    decode_abandon(rig.sched, &rig.plan[rig.committed++ % 2]);
    decode_reap(rig.sched, &rig.out);
    for (int i = 0; i < 12; i++) {
        assert_true(q[i]->ended);
        assert_finish(q[i], 0, FINISH_ERROR, -1);
    }
}

static void what_can_never_fit_is_refused_with_the_numbers(void **state)
{
    (void)state;
    struct group *g = NULL;
    struct err e = {0};
    struct rig_request *a = rig_add(&rig, rig_params(), 0, 5);
    struct request r = a->request;
    r.params.max_tokens = 124;
    assert_int_equal(group_new(&g, &r, NULL, &config, &e), ERR_INVALID);
    assert_string_equal(e.param, "max_tokens");
    assert_string_equal(
        e.text,
        "5 prompt tokens and max_tokens 124 are 129, more than the model length of 128 tokens");
    r.params.max_tokens = 10;
    r.params.n = r.params.best_of = 9;
    assert_int_equal(group_new(&g, &r, NULL, &config, &e), ERR_INVALID);
    assert_string_equal(e.param, "n");
    r.params.n = r.params.best_of = 3;
    r.params.max_tokens = 123;
    /* 1 shared + 3 x 31 of 64 blocks */
    assert_int_equal(group_new(&g, &r, NULL, &config, &e), ERR_INVALID);
    int32_t id = 100;
    r.params = rig_params();
    r.params.allowed_token = &id;
    r.params.n_allowed = 1;
    assert_int_equal(group_new(&g, &r, NULL, &config, &e), ERR_INVALID);
    assert_string_equal(e.param, "allowed_token_ids");
    assert_null(g);
}

int main(void)
{
#define CASE(f) cmocka_unit_test_setup_teardown(f, start, stop)
    const struct CMUnitTest tests[] = {
        CASE(max_tokens_ends_by_length),
        CASE(the_end_token_is_the_last_one_told),
        CASE(ignore_eos_goes_on),
        CASE(a_stop_id_is_named),
        CASE(a_stop_mark_ends_the_choice_alone),
        CASE(a_nan_ends_the_request_with_an_error),
        CASE(a_choice_that_cannot_go_on_ends_alone),
        CASE(the_token_that_ends_a_choice_says_so),
        CASE(max_tokens_zero_is_the_prompt_alone),
        CASE(max_tokens_zero_ends_every_decoding_method),
        CASE(a_request_that_bans_every_token_is_refused),
        CASE(ending_everything_tells_everyone_once),
        CASE(what_can_never_fit_is_refused_with_the_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
