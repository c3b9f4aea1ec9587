/* The arrays of a batch, one case each. Random cases: test_oracle. */
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
    rig_close(&rig);
    return 0;
}

static void a_prompt_is_laid_out_token_by_token(void **state)
{
    (void)state;
    rig_add(&rig, rig_params(), 10, 6);
    rig_plan(&rig);
    const struct batch *b = &rig.batch;
    assert_int_equal(b->step, 1);
    assert_int_equal(b->n_tokens, 6);
    assert_int_equal(b->n_decode, 0);
    assert_int_equal(b->kv_len[0], 6);
    assert_int_equal(b->n_table_update, 1);
    assert_int_equal(b->table_update[0].count, 2);
    for (int32_t i = 0; i < 6; i++) {
        assert_int_equal(b->token[i], 10 + i);
        assert_int_equal(b->token_src[i], -1);
        assert_int_equal(b->position[i], i);
        assert_int_equal(b->slot[i], b->table_block[i / 4] * 4 + i % 4);
    }
    assert_int_equal(b->n_logits, 1);
    assert_int_equal(b->logits_token[0], 5);
    assert_int_equal(b->sample[0].position, 6);
    rig_commit(&rig);
}

static void only_new_blocks_are_sent(void **state)
{
    (void)state;
    rig_add(&rig, rig_params(), 10, 6);
    rig_step(&rig);
    int32_t sent[4];
    for (int32_t i = 0; i < 4; i++) {
        rig_plan(&rig);
        sent[i] = rig.batch.n_table_block;
        rig_commit(&rig);
    }
    /* Positions 6, 7 lie in the second block; 8 opens the third. */
    assert_int_equal(sent[0] + sent[1], 0);
    assert_int_equal(sent[2], 1);
    assert_int_equal(sent[3], 0);
}

static void a_slot_used_again_gets_its_whole_table(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.max_tokens = 1;
    rig_add(&rig, p, 10, 6);
    rig_run(&rig, 5);
    struct rig_request *hold = rig_add(&rig, rig_params(), 50, 3);
    rig_step(&rig);
    rig_add(&rig, p, 30, 6);
    rig_plan(&rig);
    const struct batch *b = &rig.batch;
    assert_int_equal(b->row[1], b->table_update[b->n_table_update - 1].row);
    for (int32_t i = b->n_decode; i < b->n_tokens; i++) {
        assert_int_equal(
            b->slot[i] / 4,
            rig.plan[(rig.launched - 1) % 2].item[1].seq->table[0].block[b->position[i] / 4]);
    }
    rig_commit(&rig);
    (void)hold;
}

static void decodes_stand_before_chunks(void **state)
{
    (void)state;
    rig_add(&rig, rig_params(), 10, 6);
    rig_step(&rig);
    rig_add(&rig, rig_params(), 30, 8);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_seqs, 2);
    assert_int_equal(rig.batch.n_decode, 1);
    assert_int_equal(rig.batch.q_start[1], 1);
    assert_int_equal(rig.batch.q_start[2], 9);
    rig_commit(&rig);
}

static void a_token_in_flight_is_named_by_its_row(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.presence_penalty = 1;
    rig_add(&rig, p, 10, 6);
    rig_plan(&rig); /* not committed */
    rig_plan(&rig);
    assert_int_equal(rig.batch.step, 2);
    assert_int_equal(rig.batch.token_src[0], 0);
    assert_int_equal(rig.batch.sample[0].position, 7);
}

static void samples_of_a_prompt_read_one_row_with_seeds_of_their_own(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.n = p.best_of = 3;
    p.temperature = 0.5F;
    p.seed = 1234;
    rig_add(&rig, p, 10, 6);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_logits, 1);
    assert_int_equal(rig.batch.n_samples, 3);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(rig.batch.sample[i].logits_row, 0);
        assert_true(rig.batch.sample[i].seed == seq_seed(1234, i));
    }
    rig_commit(&rig);
    assert_true(seq_seed(1234, 0) != seq_seed(1234, 1));
    assert_true(seq_seed(1234, 0) != seq_seed(1235, 0));
}

static size_t batch_bytes(const struct batch *b)
{
    size_t n = 0;

#define X(array, count) n += (size_t)(b->count) * sizeof(*b->array);
    BATCH_ARRAYS(X)
#undef X
    return n;
}

/* For penalties the backend counts the tokens in a sequence's blocks: a sampling row
 * names the block table, however many tokens there are. */
static void penalties_send_nothing_but_where_the_tokens_are(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.repetition_penalty = 1.5F;
    struct rig_request *q = rig_add(&rig, p, 10, 3);
    rig_plan(&rig);
    assert_int_equal(rig.batch.sample[0].row, q->group->seq[0].slot);
    assert_int_equal(rig.batch.sample[0].n_prompt, 3);
    assert_int_equal(rig.batch.sample[0].position, 3);
    rig_commit(&rig);
    rig_step(&rig);
    rig_step(&rig);
    rig_plan(&rig);
    size_t early = batch_bytes(&rig.batch);
    rig_commit(&rig);
    for (int32_t i = 0; i < 7; i++) {
        rig_step(&rig);
    }
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_table_block, 0);
    assert_int_equal(rig.batch.sample[0].position, 14);
    assert_int_equal(batch_bytes(&rig.batch), early);
    rig_commit(&rig);
}

/* Nor does a look-ahead by more than one step need token lists. */
static void penalties_look_as_far_ahead_as_others(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.frequency_penalty = 1;
    rig_add(&rig, p, 10, 6);
    assert_int_equal(rig_plan(&rig), 1);
    assert_int_equal(rig_plan(&rig), 1);
    assert_int_equal(rig_plan(&rig), 1);
    assert_int_equal(rig.batch.token_src[0], 0);
}

/* One mask a group; one bit an id, however often it is named. */
static void allowed_ids_are_one_mask_a_group(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    int32_t id[] = {5, 98, 31, 5, 32, 5};
    p.allowed_token = id;
    p.n_allowed = 6;
    p.n = p.best_of = 3;
    rig_add(&rig, p, 10, 3);
    rig_add(&rig, rig_params(), 20, 3);
    for (int32_t step = 0; step < 3; step++) {
        rig_plan(&rig);
        const struct batch *b = &rig.batch;
        assert_int_equal(b->n_samples, 4);
        assert_int_equal(b->n_mask_word, 4); /* 100 ids */
        for (int32_t i = 0; i < 3; i++) {
            assert_int_equal(b->sample[i].mask_first, 0);
        }
        assert_int_equal(b->sample[3].mask_first, -1);
        assert_int_equal(b->mask_word[0], UINT32_C(1) << 5 | UINT32_C(1) << 31);
        assert_int_equal(b->mask_word[1], 1);
        assert_int_equal(b->mask_word[2], 0);
        assert_int_equal(b->mask_word[3], 4);
        rig_commit(&rig);
    }
}

/* A later group with the same mask index has a mask of its own. */
static void a_mask_goes_with_its_group(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    int32_t first = 7, second = 8;
    p.max_tokens = 1;
    p.allowed_token = &first;
    p.n_allowed = 1;
    rig_add(&rig, p, 10, 3);
    rig_run(&rig, 3);
    p.allowed_token = &second;
    rig_add(&rig, p, 10, 3);
    rig_plan(&rig);
    assert_int_equal(rig.batch.mask_word[0], 1 << 8);
    rig_commit(&rig);
}

static void an_id_has_one_bias(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    struct gen_bias bias[] = {{55, 2.5F}, {3, 1}, {55, 0.5F}};
    int32_t stop_id[] = {3, 3};
    p.bias = bias;
    p.n_bias = 3;
    p.stop_token = stop_id;
    p.n_stop_token = 2;
    p.min_tokens = 1;
    rig_add(&rig, p, 10, 3);
    rig_plan(&rig);
    const struct batch *b = &rig.batch;
    assert_int_equal(b->sample[0].n_bias, 3);
    assert_int_equal(b->token_bias[0].token, 55);
    assert_true(b->token_bias[0].bias == 3.0F);
    assert_int_equal(b->token_bias[1].token, 3);
    assert_true(isinf(b->token_bias[1].bias) && b->token_bias[1].bias < 0);
    assert_int_equal(b->token_bias[2].token, 99);
    rig_commit(&rig);
}

static void min_tokens_bans_the_ends_until_they_may_come(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    int32_t stop_id = 55;
    struct gen_bias bias = {3, 2.5F};
    p.min_tokens = 2;
    p.stop_token = &stop_id;
    p.n_stop_token = 1;
    p.bias = &bias;
    p.n_bias = 1;
    rig_add(&rig, p, 10, 3);
    for (int32_t i = 0; i < 4; i++) {
        rig_plan(&rig);
        const struct batch *b = &rig.batch;
        assert_int_equal(b->sample[0].n_bias, i < 2 ? 3 : 1);
        assert_int_equal(b->token_bias[0].token, 3);
        if (i < 2) {
            assert_int_equal(b->token_bias[1].token, 99);
            assert_int_equal(b->token_bias[2].token, 55);
            assert_true(isinf(b->token_bias[1].bias) && b->token_bias[1].bias < 0);
        }
        rig_commit(&rig);
    }
}

static void prompt_scores_are_cut_to_the_rows_there_are(void **state)
{
    (void)state;
    struct gen_params p = rig_params();
    p.n_prompt_logprobs = 2;
    p.max_tokens = 1;
    /* 19 scores, 8 rows a step beside the samples */
    struct rig_request *a = rig_add(&rig, p, 10, 20);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_samples, 8);
    assert_int_equal(rig.batch.n_tokens, 8);
    assert_int_equal(rig.batch.sample[0].kind, SAMPLE_SCORE);
    assert_int_equal(rig.batch.sample[0].target, 11);
    assert_int_equal(rig.batch.sample[0].n_logprobs, 2);
    rig_commit(&rig);
    rig_run(&rig, 10);
    assert_int_equal(rig_count(&rig, a, DELTA_PROMPT, 0), 20);
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 0), 1);
}

int main(void)
{
#define CASE(f) cmocka_unit_test_setup_teardown(f, start, stop)
    const struct CMUnitTest tests[] = {
        CASE(a_prompt_is_laid_out_token_by_token),
        CASE(only_new_blocks_are_sent),
        CASE(a_slot_used_again_gets_its_whole_table),
        CASE(decodes_stand_before_chunks),
        CASE(a_token_in_flight_is_named_by_its_row),
        CASE(samples_of_a_prompt_read_one_row_with_seeds_of_their_own),
        CASE(penalties_send_nothing_but_where_the_tokens_are),
        CASE(penalties_look_as_far_ahead_as_others),
        CASE(allowed_ids_are_one_mask_a_group),
        CASE(a_mask_goes_with_its_group),
        CASE(an_id_has_one_bias),
        CASE(min_tokens_bans_the_ends_until_they_may_come),
        CASE(prompt_scores_are_cut_to_the_rows_there_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
