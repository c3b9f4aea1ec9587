/* The rules of policy: fair, one case each. Random cases: test_oracle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/sim/rig.h"

static struct rig rig;
static struct sched_config config;

static int start(void **state)
{
    (void)state;
    rig_config(&config);
    config.policy = POLICY_FAIR;
    return 0;
}

static int stop(void **state)
{
    (void)state;
    struct sched_counts c;
    rig_run(&rig, 3000);
    sched_counts(rig.sched, &c);
    int leaked =
        c.blocks_used + c.host_blocks_used + c.running_seqs + c.waiting_groups + c.swapped_groups;
    rig_close(&rig);
    return leaked == 0 ? 0 : -1;
}

static struct gen_params tokens(int32_t n)
{
    struct gen_params p = rig_params();

    p.max_tokens = n;
    p.ignore_eos = true;
    return p;
}

/* `n` requests of a tenant, each of 4 prompt tokens and n_tokens answers. */
static struct rig_request *ask(int32_t tenant, int32_t n, int32_t n_tokens)
{
    struct rig_request *first = &rig.request[rig.n_requests];

    rig.tenant = tenant;
    for (int32_t i = 0; i < n; i++) {
        rig_add(&rig, tokens(n_tokens), tenant, 4);
    }
    return first;
}

/* Tokens sampled for a tenant so far. */
static int32_t sampled(int32_t tenant)
{
    int32_t n = 0;

    for (int32_t i = 0; i < rig.n_deltas; i++) {
        n += rig.delta[i].kind == DELTA_TOKEN && rig.delta[i].request->tenant == tenant;
    }
    return n;
}

static uint64_t preemptions(void)
{
    struct sched_counts c;

    sched_counts(rig.sched, &c);
    return c.preempt_recompute + c.preempt_swap;
}

static void two_floods_share_alike(void **state)
{
    (void)state;
    config.max_num_seqs = 4;
    rig_open(&rig, &config);
    ask(1, 30, 8);
    ask(2, 10, 8);
    rig_run(&rig, 38);
    assert_true(sampled(2) >= 64);
    assert_in_range(sampled(1) - sampled(2) + 16, 0, 32); /* within two requests of each other */
}

static void shares_follow_weights(void **state)
{
    (void)state;
    config.max_num_seqs = 4;
    rig_open(&rig, &config);
    rig.weight = 3;
    ask(1, 28, 8);
    rig.weight = 1;
    ask(2, 28, 8);
    rig_run(&rig, 60);
    assert_in_range(sampled(1) * 10 / sampled(2), 25, 36);
}

static void a_flood_is_preempted_at_once(void **state)
{
    (void)state;
    rig_open(&rig, &config);
    struct rig_request *flood = ask(1, 20, 20);
    rig_run(&rig, 4);
    struct rig_request *late = ask(2, 1, 20);
    rig_run(&rig, 1);
    assert_int_equal(late->group->state, GROUP_RUNNING);
    assert_int_equal(rig_count(&rig, late, DELTA_TOKEN, 0), 1);
    assert_int_equal(preemptions(), 1);
    assert_int_equal(flood[0].group->state,
                     GROUP_RUNNING); /* the newest running one was preempted */
    assert_int_equal(flood[7].group->state, GROUP_WAITING);
}

static void blocks_count_like_slots(void **state)
{
    (void)state;
    config.n_blocks = 16;
    rig_open(&rig, &config);
    rig.tenant = 1;
    rig_add(&rig, tokens(4), 0, 28);
    rig_add(&rig, tokens(4), 30, 28);
    rig_run(&rig, 2);
    struct rig_request *late = ask(2, 1, 9);
    rig.tenant = 2;
    struct rig_request *large = rig_add(&rig, tokens(4), 60, 24);
    rig_run(&rig, 3);
    assert_true(rig_count(&rig, late, DELTA_TOKEN, 0) > 0);
    assert_true(rig_run(&rig, 200) < 200); /* and no request starves */
    assert_true(large->ended);
}

static void tenants_do_not_preempt_each_other_in_turn(void **state)
{
    (void)state;
    rig_open(&rig, &config);
    ask(1, 16, 16);
    ask(2, 16, 16);
    rig_run(&rig, 60);
    assert_in_range(preemptions(), 0, 4);
}

static void a_pause_brings_no_credit(void **state)
{
    (void)state;
    config.max_num_seqs = 2;
    rig_open(&rig, &config);
    ask(1, 24, 8);
    rig_run(&rig, 40);
    int32_t before = sampled(1);
    ask(2, 16, 8);
    rig_run(&rig, 40);
    assert_true(sampled(1) - before >= 24); /* about 40 of the 80 tokens of 40 steps */
    assert_true(sampled(2) >= 24);
}

static void no_tenant_starves(void **state)
{
    (void)state;
    config.max_num_seqs = 1;
    rig_open(&rig, &config);
    ask(1, 20, 6);
    ask(2, 20, 6);
    struct rig_request *one = ask(3, 1, 6);
    rig_run(&rig, 24);
    assert_true(one->ended);
}

static void a_long_prompt_lets_a_short_one_pass(void **state)
{
    (void)state;
    rig_open(&rig, &config);
    rig.tenant = 1;
    rig_add(&rig, tokens(2), 0, 100);
    rig_run(&rig, 1); /* 32 of 100 */
    struct rig_request *late = ask(2, 1, 2);
    rig_run(&rig, 1);
    assert_int_equal(rig_count(&rig, late, DELTA_TOKEN, 0), 1);
}

/* The prompt of a tenant that holds less is computed before others decode: whole in one
 * step, although their tokens do not fit then. */
static void a_prompt_goes_ahead_of_decodes(void **state)
{
    (void)state;
    config.max_num_batched_tokens = 12;
    rig_open(&rig, &config);
    struct rig_request *flood = ask(1, 20, 20);
    rig_run(&rig, 8);
    rig.tenant = 2;
    struct rig_request *late = rig_add(&rig, tokens(4), 0, 10);
    int32_t before = rig_count(&rig, &flood[6], DELTA_TOKEN, 0);
    rig_run(&rig, 1);
    assert_int_equal(rig_count(&rig, late, DELTA_TOKEN, 0), 1);
    /* two of seven decodes fitted behind it */
    assert_int_equal(rig_count(&rig, &flood[6], DELTA_TOKEN, 0), before);
    rig_run(&rig, 1);
    assert_int_equal(rig_count(&rig, &flood[6], DELTA_TOKEN, 0), before + 1);
}

/* If blocks are short, the tenant that holds most is preempted, not the newest
 * group. */
static void a_prompt_without_a_step_has_its_turn(void **state)
{
    (void)state;
    rig_open(&rig, &config);
    rig.tenant = 1;
    struct group *g = rig_add(&rig, tokens(2), 0, 100)->group;
    rig_run(&rig, 1);
    assert_int_equal(g->seq[0].n_computed, 32);
    g->ahead_step = g->plan_step + 1; /* as a planning leaves it that finds no block */
    rig_run(&rig, 1);
    assert_int_equal(g->seq[0].n_computed, 64);
}

static void a_shortage_takes_from_the_heaviest(void **state)
{
    (void)state;
    config.n_blocks = 12;
    rig_open(&rig, &config);
    struct rig_request *heavy = ask(1, 3, 20);
    rig_run(&rig, 1);
    struct rig_request *light = ask(2, 1, 20);
    for (int32_t i = 0; i < 40 && preemptions() == 0; i++) {
        rig_step(&rig);
    }
    assert_int_equal(preemptions(), 1);
    assert_int_equal(light->group->state, GROUP_RUNNING);
    assert_int_equal(heavy[2].group->state, GROUP_WAITING);
}

static void other_policies_know_no_tenants(void **state)
{
    (void)state;
    config.policy = POLICY_FCFS;
    config.max_num_seqs = 1;
    rig_open(&rig, &config);
    ask(1, 5, 4);
    struct rig_request *late = ask(2, 1, 4);
    rig_run(&rig, 19);
    assert_int_equal(sampled(2), 0);
    assert_false(late->ended);
}

/* Costs with which a step of 4 tokens takes 100 + 4 * 25 us, the limit while tenants
 * share. */
static void keep_steps_short(void)
{
    config.cost = (struct step_cost){.fixed_us = 100, .token_us = 25};
    config.shared_itl_us = 200;
}

static void a_tenant_alone_pays_nothing_for_short_steps(void **state)
{
    (void)state;
    keep_steps_short();
    rig_open(&rig, &config);
    ask(1, 8, 8);
    rig_run(&rig, 2);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_tokens, 8);
    assert_true(rig.plan[(rig.launched - 1) % 2].estimate_us == 100 + 8 * 25);
    rig_commit(&rig);
}

static void steps_are_short_while_tenants_share_and_all_have_their_turn(void **state)
{
    (void)state;
    keep_steps_short();
    rig_open(&rig, &config);
    struct rig_request *flood = ask(1, 7, 40);
    rig_run(&rig, 2);
    struct rig_request *late = ask(2, 1, 40);
    rig_step(&rig); /* its prompt of four tokens, and one decode at least */
    assert_int_equal(rig_count(&rig, late, DELTA_TOKEN, 0), 1);
    int32_t before = sampled(1);
    for (int i = 0; i < 14; i++) {
        rig_plan(&rig);
        assert_int_equal(rig.batch.n_tokens, 4);
        assert_non_null(rig_item(&rig, late, 0)); /* the tenant that holds least is in each */
        rig_commit(&rig);
    }
    assert_int_equal(sampled(1) - before, 42);
    for (int i = 0; i < 7; i++) {
        assert_in_range(rig_count(&rig, &flood[i], DELTA_TOKEN, 0), 6, 9);
    }
}

static void a_tenant_that_went_away_is_not_waited_for(void **state)
{
    (void)state;
    keep_steps_short();
    rig_open(&rig, &config);
    ask(1, 1, 1);
    assert_false(sched_is_shared(rig.sched, rig.now_us));
    ask(2, 1, 1);
    assert_true(sched_is_shared(rig.sched, rig.now_us));
    assert_false(sched_is_shared(rig.sched, rig.now_us + 10000000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(two_floods_share_alike, start, stop),
        cmocka_unit_test_setup_teardown(shares_follow_weights, start, stop),
        cmocka_unit_test_setup_teardown(a_flood_is_preempted_at_once, start, stop),
        cmocka_unit_test_setup_teardown(blocks_count_like_slots, start, stop),
        cmocka_unit_test_setup_teardown(tenants_do_not_preempt_each_other_in_turn, start, stop),
        cmocka_unit_test_setup_teardown(a_pause_brings_no_credit, start, stop),
        cmocka_unit_test_setup_teardown(no_tenant_starves, start, stop),
        cmocka_unit_test_setup_teardown(a_long_prompt_lets_a_short_one_pass, start, stop),
        cmocka_unit_test_setup_teardown(a_prompt_goes_ahead_of_decodes, start, stop),
        cmocka_unit_test_setup_teardown(a_prompt_without_a_step_has_its_turn, start, stop),
        cmocka_unit_test_setup_teardown(a_shortage_takes_from_the_heaviest, start, stop),
        cmocka_unit_test_setup_teardown(a_tenant_alone_pays_nothing_for_short_steps, start, stop),
        cmocka_unit_test_setup_teardown(steps_are_short_while_tenants_share_and_all_have_their_turn,
                                        start, stop),
        cmocka_unit_test_setup_teardown(a_tenant_that_went_away_is_not_waited_for, start, stop),
        cmocka_unit_test_setup_teardown(other_policies_know_no_tenants, start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
