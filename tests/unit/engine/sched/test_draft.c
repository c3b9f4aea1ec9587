/* Steps that verify drafts: what the scheduler spends on them, one case each. Random
 * cases: test_oracle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/sched/sched_impl.h"
#include "tests/sim/rig.h"

#include <string.h>

static struct rig rig;
static struct sched_config config;

/* Drafts the same tokens every time. */
static struct fixed {
    struct draft_source base;
    int32_t token[8], n;
    float prob;
    int32_t n_verified, n_accepted, n_ended;
} source;

static float expect(struct draft_source *d, struct seq *q)
{
    (void)d, (void)q;
    return source.n > 0 ? 1 : 0;
}

static int32_t draft(struct draft_source *d, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    (void)d, (void)q;
    int32_t n = MIN(most, source.n);
    for (int32_t i = 0; i < n; i++) {
        token[i] = source.token[i];
        prob[i] = source.prob;
    }
    return n;
}

static void verified(struct draft_source *d, struct seq *q, int32_t n, int32_t n_accepted)
{
    (void)d, (void)q;
    source.n_verified += n;
    source.n_accepted += n_accepted;
}

static void ended(struct draft_source *d, struct group *g)
{
    (void)d, (void)g;
    source.n_ended++;
}

/* A rig that drafts n tokens; it samples 7. */
static void open_rig(int32_t n, const int32_t *token)
{
    rig_open(&rig, &config);
    source = (struct fixed){
        .base = {.expect = expect, .draft = draft, .verified = verified, .ended = ended},
        .n = n,
        .prob = 1};
    memcpy(source.token, token, (size_t)n * sizeof(*token));
    sched_speculate(rig.sched, &source.base, 8);
}

static int start(void **state)
{
    (void)state;
    rig_config(&config);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    return rig_close_empty(&rig);
}

static void drafts_that_hold_are_tokens_of_one_step(void **state)
{
    (void)state;
    open_rig(3, (int32_t[]){7, 7, 7});
    struct rig_request *q = rig_add(&rig, rig_tokens(16), 0, 5);
    assert_true(rig_step(&rig)); /* the prompt; the first token */
    assert_true(rig_step(&rig));
    assert_int_equal(rig_count(&rig, q, DELTA_TOKEN, 0), 1 + 4);
    assert_int_equal(rig.batch.n_samples, 4);
    assert_int_equal(rig.batch.n_decode, 0);
    for (int32_t i = 0; i < 4; i++) { /* each row draws behind its own token */
        assert_int_equal(rig.batch.logits_token[i], i);
        assert_int_equal(rig.batch.sample[i].position, 6 + i);
        assert_int_equal(rig.batch.token[i], 7);
    }
    assert_int_equal(source.n_verified, 3);
    assert_int_equal(source.n_accepted, 3);
    assert_int_equal(q->group->n_drafted, 3);
}

static void behind_a_wrong_draft_nothing_counts(void **state)
{
    (void)state;
    open_rig(3, (int32_t[]){7, 8, 7});
    struct rig_request *q = rig_add(&rig, rig_tokens(16), 0, 5);
    rig_step(&rig);
    rig_step(&rig);
    assert_int_equal(rig_count(&rig, q, DELTA_TOKEN, 0), 1 + 2);
    assert_int_equal(source.n_accepted, 1);
    const struct seq *s = &q->group->seq[0];
    assert_int_equal(s->n_computed, 5 + 2);
    assert_int_equal(s->n_tokens, 5 + 3);
    assert_int_equal(s->table[0].n_blocks, 2); /* the block of the void ones is given back */
    struct sched_counts c;
    sched_counts(rig.sched, &c);
    assert_int_equal(c.drafts, 1);
    assert_int_equal(c.draft_tokens, 3);
    assert_int_equal(c.accepted_tokens[0], 1);
    assert_int_equal(c.accepted_tokens[1], 0);
}

static int32_t end_at_8(struct rig *r, const struct sample_row *row)
{
    (void)r;
    return row->position == 8 ? 99 : 7;
}

static void an_end_among_accepted_drafts_ends_the_text(void **state)
{
    (void)state;
    open_rig(4, (int32_t[]){7, 7, 99, 7});
    rig.answer = end_at_8;
    struct rig_request *q = rig_add(&rig, rig_tokens(16), 0, 5);
    rig_run(&rig, 2);
    assert_true(q->ended);
    assert_int_equal(rig_count(&rig, q, DELTA_TOKEN, 0), 4); /* at 5, 6, 7 and 8 */
    assert_int_equal(rig_finish(&rig, q, 0)->finish, FINISH_STOP);
    assert_int_equal(source.n_ended, 1);
}

static void a_text_has_max_tokens_with_drafts_too(void **state)
{
    (void)state;
    open_rig(8, (int32_t[]){7, 7, 7, 7, 7, 7, 7, 7});
    struct rig_request *q = rig_add(&rig, rig_tokens(6), 0, 5);
    assert_int_equal(rig_run(&rig, 10), 2);
    assert_int_equal(rig_count(&rig, q, DELTA_TOKEN, 0), 6);
    assert_int_equal(rig_finish(&rig, q, 0)->finish, FINISH_LENGTH);
}

static void nothing_is_planned_while_drafts_are_verified(void **state)
{
    (void)state;
    struct plan p;
    struct err e;
    open_rig(2, (int32_t[]){7, 7});
    assert_int_equal(plan_init(&p, &config, &e), 0);
    rig_add(&rig, rig_tokens(16), 0, 5);
    rig_step(&rig);
    assert_int_equal(rig_plan(&rig), 1);
    rig_add(&rig, rig_tokens(16), 20, 5);
    assert_int_equal(sched_plan(rig.sched, rig.now_us, &p), 0);
    rig_commit(&rig);
    plan_release(&p);
    assert_int_equal(rig_plan(&rig), 2); /* and then with the one that came */
    rig_commit(&rig);
}

static void without_drafts_in_sight_steps_are_planned_ahead(void **state)
{
    (void)state;
    open_rig(0, (int32_t[]){0});
    rig_add(&rig, rig_tokens(16), 0, 5);
    rig_step(&rig);
    assert_int_equal(rig_plan(&rig), 1);
    struct plan *ahead = &rig.plan[rig.launched % 2];
    assert_int_equal(sched_plan(rig.sched, rig.now_us, ahead), 1);
    assert_true(ahead->item[0].src_row >= 0);
    rig_commit(&rig);
    pack_batch(rig.packer, ahead, &rig.batch);
    rig.launched++;
    rig_commit(&rig);
}

/* A row costs 10 of a step that costs 90 and 10 a token. */
static void drafts_take_only_rows_that_pay(void **state)
{
    (void)state;
    config.cost = (struct step_cost){.fixed_us = 90, .token_us = 10};
    open_rig(8, (int32_t[]){7, 7, 7, 7, 7, 7, 7, 7});
    source.prob = 0.3F;
    rig_add(&rig, rig_tokens(40), 0, 5);
    rig_step(&rig);
    rig_plan(&rig);
    /* behind n drafts the next is worth it if 0.3 (100 + 10 n) > 10 (1 + 0.3 n) */
    assert_int_equal(rig.plan[(rig.launched - 1) % 2].n_verify, 8);
    rig_commit(&rig);
    source.prob = 0.05F;
    rig_plan(&rig);
    assert_int_equal(rig.plan[(rig.launched - 1) % 2].n_verify, 0);
    rig_commit(&rig);
}

static void a_step_of_prefill_verifies_nothing(void **state)
{
    (void)state;
    config.cost = (struct step_cost){.fixed_us = 90, .token_us = 10};
    open_rig(4, (int32_t[]){7, 7, 7, 7});
    source.prob = 0.6F;
    struct rig_request *q = rig_add(&rig, rig_tokens(40), 0, 5);
    rig_step(&rig);
    rig_add(&rig, rig_tokens(4), 30, 25);
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, q, 0)->n_verify, 0);
    rig_commit(&rig);
    rig_step(&rig);
    rig_plan(&rig);
    assert_true(rig_item(&rig, q, 0)->n_verify > 0);
    rig_commit(&rig);
}

static void drafts_leave_blocks_for_what_is_to_come(void **state)
{
    (void)state;
    config.n_blocks = 6;
    config.max_num_seqs = 2;
    config.max_num_batched_tokens = 32;
    open_rig(8, (int32_t[]){7, 7, 7, 7, 7, 7, 7, 7});
    rig_add(&rig, rig_tokens(12), 0, 4); /* blocks of 4: at the end 4 of them */
    rig_add(&rig, rig_tokens(4), 0, 8);  /* 3 */
    rig_run(&rig, 100);
    struct sched_counts c;
    sched_counts(rig.sched, &c);
    assert_int_equal(c.preempt_recompute + c.preempt_swap, 0);
    assert_true(c.draft_tokens > 0);
}

static void beams_decode_plainly(void **state)
{
    (void)state;
    open_rig(3, (int32_t[]){7, 7, 7});
    struct gen_params p = rig_tokens(6);
    p.beam_width = p.n = p.best_of = 2;
    rig_add(&rig, p, 0, 5);
    rig_run(&rig, 100);
    assert_int_equal(source.n_verified, 0);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(drafts_that_hold_are_tokens_of_one_step),
        CASE(behind_a_wrong_draft_nothing_counts),
        CASE(an_end_among_accepted_drafts_ends_the_text),
        CASE(a_text_has_max_tokens_with_drafts_too),
        CASE(nothing_is_planned_while_drafts_are_verified),
        CASE(without_drafts_in_sight_steps_are_planned_ahead),
        CASE(drafts_take_only_rows_that_pay),
        CASE(a_step_of_prefill_verifies_nothing),
        CASE(drafts_leave_blocks_for_what_is_to_come),
        CASE(beams_decode_plainly),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
