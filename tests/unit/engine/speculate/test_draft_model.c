/* Drafts of a draft model: when it is asked, what it computes and what it costs. That
 * its cache is right and texts stay the same is shown by test_oracle. */
#include "engine/speculate/draft_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/sim/rig.h"

enum { TOKENS = 48, STEPS = 64 };

/* A draft model that always says the same. */
static struct fake {
    struct executor base;
    int32_t says, n_launched, n_waited;
    bool fails;
    int64_t step_us, now_us;
    int32_t n_tokens[STEPS], n_seqs[STEPS], n_decode[STEPS], n_samples[STEPS];
    int32_t token[TOKENS + 8];
    int32_t input[TOKENS], position[TOKENS]; /* of the first step */
} fake;

static int64_t now_us(void)
{
    return fake.now_us;
}

static struct rig rig;
static struct sched_config config;
static struct draft_model *model;
static int32_t shift; /* of the next rig */

static int launch(struct executor *x, const struct batch *b, struct err *e)
{
    (void)x, (void)e;
    int32_t i = fake.n_launched++ % STEPS;
    assert_true(b->n_tokens > 0 && b->n_tokens <= TOKENS);
    assert_int_equal(b->step, fake.n_launched);
    fake.n_tokens[i] = b->n_tokens;
    fake.n_seqs[i] = b->n_seqs;
    fake.n_decode[i] = b->n_decode;
    fake.n_samples[i] = b->n_samples;
    for (int32_t k = 0; k < b->n_tokens && fake.n_launched == 1; k++) {
        fake.input[k] = b->token[k];
        fake.position[k] = b->position[k];
    }
    return 0;
}

static int wait(struct executor *x, struct results *ret, struct err *e)
{
    (void)x;
    if (fake.fails) {
        return err_set(e, ERR_DEVICE, "it is gone");
    }
    int32_t i = fake.n_waited++ % STEPS;
    fake.now_us += fake.step_us;
    assert_true(fake.n_waited <= fake.n_launched);
    for (int32_t k = 0; k < fake.n_samples[i]; k++) {
        fake.token[k] = fake.says;
    }
    *ret = (struct results){
        .step = (uint64_t)fake.n_waited, .n_samples = fake.n_samples[i], .token = fake.token};
    return 0;
}

/* The rig's model says 7. fixed_us: of a step of the draft model; the rig's takes
 * 1000. */
static void open_rig(int32_t says, double fixed_us)
{
    struct err e;

    config.cost = (struct step_cost){
        .fixed_us = 1000, .token_us = 1, .context_us = 0, .row_us = 5, .many_row_us = 5};
    rig_open(&rig, &config);
    fake = (struct fake){.says = says, .step_us = (int64_t)fixed_us};
    fake.base.launch = launch;
    fake.base.wait = wait;
    fake.base.info = (struct executor_info){.vocab = config.vocab,
                                            .max_len = config.max_len,
                                            .n_blocks = config.n_blocks,
                                            .block_size = config.block_size,
                                            .max_num_seqs = config.max_num_seqs,
                                            .max_num_batched_tokens = TOKENS,
                                            .max_samples = TOKENS,
                                            .depth = 1};
    struct draft_model_config c = {
        .executor = &fake.base,
        .cost = {.fixed_us = fixed_us, .token_us = 1, .row_us = 1, .many_row_us = 1},
        .vocab = config.vocab,
        .max_draft = 4,
        .shift = shift,
        .mask_token = -1,
        .now_us = now_us};
    assert_int_equal(draft_model_open(&model, &c, &e), 0);
    sched_speculate(rig.sched, draft_model_source(model), c.max_draft);
}

static int start(void **state)
{
    (void)state;
    rig_config(&config);
    config.max_logits = config.max_num_seqs + 32;
    shift = 0;
    return 0;
}

static int stop(void **state)
{
    (void)state;
    int rc = rig_close_empty(&rig);
    draft_model_free(model);
    return rc;
}

static uint64_t drafted(void)
{
    struct sched_counts c;

    sched_counts(rig.sched, &c);
    return c.draft_tokens;
}

static void all_sequences_are_drafted_in_the_same_steps(void **state)
{
    (void)state;
    open_rig(7, 50);
    struct rig_request *q[3];
    for (int32_t i = 0; i < 3; i++) {
        q[i] = rig_add(&rig, rig_tokens(16), 10 * i, 5);
    }
    assert_true(rig_step(&rig));
    assert_int_equal(fake.n_launched, 0);
    assert_true(rig_step(&rig));
    assert_int_equal(fake.n_launched, 4);   /* a step for each draft */
    assert_int_equal(fake.n_tokens[0], 18); /* the prompts, and a token each */
    for (int32_t i = 1; i < 4; i++) {
        assert_int_equal(fake.n_decode[i], 3);
        assert_int_equal(fake.n_samples[i], 3);
    }
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(rig_count(&rig, q[i], DELTA_TOKEN, 0), 1 + 5);
    }
    assert_true(rig_step(&rig));
    /* the last draft, which it has not read, and the token behind it */
    assert_int_equal(fake.n_tokens[4], 6);
    assert_int_equal(fake.n_samples[4], 6); /* as decodes on a GPU */
}

static void nothing_is_drafted_where_it_takes_longer(void **state)
{
    (void)state;
    open_rig(7, 900);
    rig_add(&rig, rig_tokens(16), 0, 5);
    rig_run(&rig, 100);
    assert_int_equal(fake.n_launched, 0);
    assert_int_equal(drafted(), 0);
}

static void drafts_that_do_not_hold_end(void **state)
{
    (void)state;
    open_rig(8, 100);
    struct rig_request *q = rig_add(&rig, rig_tokens(120), 0, 5);
    for (int32_t i = 0; i < 60; i++) {
        rig_step(&rig);
    }
    uint64_t before = drafted();
    int32_t launched = fake.n_launched;
    assert_in_range(before, 1, 60);
    for (int32_t i = 0; i < 50; i++) {
        rig_step(&rig);
    }
    assert_in_range(drafted() - before, 0, 4);
    assert_in_range(fake.n_launched - launched, 0, 4);
    assert_true(rig_count(&rig, q, DELTA_TOKEN, 0) >= 110);
}

static void a_shared_prefix_is_read_once(void **state)
{
    (void)state;
    config.prefix_cache = true;
    open_rig(7, 50);
    rig_add(&rig, rig_tokens(4), 0, 17);
    rig_run(&rig, 100);
    assert_int_equal(fake.n_tokens[0], 18);
    int32_t at = fake.n_launched;
    rig_add(&rig, rig_tokens(4), 0, 17);
    rig_run(&rig, 100);
    assert_true(fake.n_launched > at);
    assert_int_equal(fake.n_tokens[at], 2); /* behind the 16 tokens of four blocks */
}

static void samples_of_a_prompt_share_what_was_read(void **state)
{
    (void)state;
    open_rig(7, 50);
    struct gen_params p = rig_tokens(8);
    p.n = p.best_of = 2;
    rig_add(&rig, p, 0, 17);
    rig_step(&rig);
    rig_step(&rig);
    assert_int_equal(fake.n_seqs[0], 1); /* one reads the prompt, the other one waits */
    assert_int_equal(fake.n_tokens[0], 18);
    int32_t at = fake.n_launched;
    rig_step(&rig);
    assert_int_equal(fake.n_seqs[at], 2);
    assert_true(fake.n_tokens[at] <= 8);
}

static void a_long_prompt_is_read_in_portions(void **state)
{
    (void)state;
    open_rig(7, 50);
    struct rig_request *q = rig_add(&rig, rig_tokens(20), 0, 100);
    while (rig_count(&rig, q, DELTA_TOKEN, 0) == 0) {
        assert_true(rig_step(&rig));
    }
    rig_step(&rig);
    assert_int_equal(fake.n_tokens[0], TOKENS);
    assert_int_equal(fake.n_launched, 1);
    assert_int_equal(drafted(), 0);
    rig_step(&rig);
    rig_step(&rig);
    assert_int_equal(fake.n_tokens[1], TOKENS);
    assert_int_equal(fake.n_tokens[2], 100 + 3 - 2 * TOKENS);
    assert_int_equal(drafted(), 4);
}

static void a_head_reads_each_token_behind_a_hidden_state(void **state)
{
    (void)state;
    shift = 1;
    open_rig(7, 50);
    struct rig_request *q = rig_add(&rig, rig_tokens(16), 0, 5);
    rig_step(&rig);
    rig_step(&rig);
    assert_int_equal(fake.n_launched, 4);
    assert_int_equal(fake.n_tokens[0], 5); /* the prompt but its first token, and the new one */
    for (int32_t i = 0; i < 5; i++) {
        assert_int_equal(fake.position[i], i);
        assert_int_equal(fake.input[i], i < 4 ? q->request.prompt[i + 1] : 7);
    }
    assert_int_equal(rig_count(&rig, q, DELTA_TOKEN, 0), 1 + 5);
    rig_step(&rig);
    assert_int_equal(fake.n_tokens[4], 2); /* the last draft, and the token behind it */
}

static void a_head_waits_until_copies_are_there(void **state)
{
    (void)state;
    shift = 1;
    open_rig(7, 50);
    struct gen_params p = rig_tokens(8);
    p.n = p.best_of = 2;
    rig_add(&rig, p, 0, 17); /* the last block is shared, and copied by the first write */
    rig_step(&rig);
    rig_step(&rig);
    assert_int_equal(fake.n_launched, 0);
    rig_step(&rig);
    assert_int_equal(fake.n_seqs[0], 1); /* one reads the prompt, the other one waits */
}

static void a_failure_ends_the_drafts_alone(void **state)
{
    (void)state;
    open_rig(7, 50);
    fake.fails = true;
    struct rig_request *q = rig_add(&rig, rig_tokens(16), 0, 5);
    rig_step(&rig);
    rig_step(&rig);
    assert_non_null(strstr(draft_model_death(model), "it is gone"));
    int32_t launched = fake.n_launched;
    rig_run(&rig, 100);
    assert_int_equal(fake.n_launched, launched);
    assert_true(q->ended);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(all_sequences_are_drafted_in_the_same_steps),
        CASE(nothing_is_drafted_where_it_takes_longer),
        CASE(drafts_that_do_not_hold_end),
        CASE(a_shared_prefix_is_read_once),
        CASE(samples_of_a_prompt_share_what_was_read),
        CASE(a_long_prompt_is_read_in_portions),
        CASE(a_head_reads_each_token_behind_a_hidden_state),
        CASE(a_head_waits_until_copies_are_there),
        CASE(a_failure_ends_the_drafts_alone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
