/* The scheduler's rules, one case each. Random cases: test_oracle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/sched/sched_impl.h"
#include "tests/sim/rig.h"

#include <stdlib.h>
#include <string.h>

static struct rig rig;
static struct sched_config config;

static int start(void **state)
{
    (void)state;
    rig_config(&config);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    struct sched_counts c;
    rig_run(&rig, 1000);
    sched_counts(rig.sched, &c);
    int leaked =
        c.blocks_used + c.host_blocks_used + c.running_seqs + c.waiting_groups + c.swapped_groups;
    rig_close(&rig);
    return leaked == 0 ? 0 : -1;
}

/* Pinned blocks stay. */
static int stop_pinned(void **state)
{
    (void)state;
    rig_close(&rig);
    return 0;
}

static struct gen_params tokens(int32_t n)
{
    struct gen_params p = rig_params();

    p.max_tokens = n;
    return p;
}

static void a_configuration_that_cannot_work_is_refused(void **state)
{
    (void)state;
    struct sched *s;
    struct err e = {0};
    config.max_num_batched_tokens = config.max_num_seqs - 1;
    assert_int_equal(sched_new(&s, &config, &e), ERR_INVALID);
    assert_string_equal(e.param, "max_num_batched_tokens");
    rig_config(&config);
    config.preemption = PREEMPT_SWAP;
    assert_int_equal(sched_new(&s, &config, &e), ERR_INVALID);
    assert_string_equal(e.param, "swap_space");
}

static int group_refused(struct request *r, struct err *e)
{
    struct group *g = NULL;
    int rc = group_new(&g, r, NULL, &config, e);

    group_free(g);
    return rc;
}

static void what_can_never_run_or_be_swapped_is_refused_at_once(void **state)
{
    (void)state;
    int32_t prompt[20] = {0};
    struct request r = {.params = tokens(12), .prompt = prompt, .n_prompt = 20};
    struct err e = {0};
    config.preemption = PREEMPT_SWAP;
    config.n_host_blocks = 8; /* 20 tokens and 11 are 8 blocks */
    assert_int_equal(group_refused(&r, &e), 0);
    config.n_host_blocks = 7;
    assert_int_equal(group_refused(&r, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "need 8 KV blocks"));
    assert_non_null(strstr(e.text, "holds 7"));
    config.preemption = PREEMPT_AUTO; /* recomputes it instead */
    assert_int_equal(group_refused(&r, &e), 0);
    r.params.n = r.params.best_of = config.max_num_seqs + 1;
    assert_int_equal(group_refused(&r, &e), ERR_INVALID);
    assert_string_equal(e.param, "n");
    r.params.n = r.params.best_of = 1;
    r.params.beam_width = config.max_num_seqs + 1;
    assert_int_equal(group_refused(&r, &e), ERR_INVALID);
    assert_string_equal(e.param, "beam_width");
}

/* max_tokens of the request's group; 0: it is refused. */
static int32_t granted(struct request *r, struct err *e)
{
    struct group *g = NULL;

    if (group_new(&g, r, NULL, &config, e) < 0) {
        return 0;
    }
    int32_t n = g->max_tokens;
    group_free(g);
    return n;
}

static void a_default_max_tokens_gives_way(void **state)
{
    int32_t prompt[20] = {0};
    struct request r = {.params = tokens(1000), .prompt = prompt, .n_prompt = 10};
    struct gen_params *p = &r.params;
    struct err e = {0};

    (void)state;
    config.max_len = 1010;
    config.n_blocks =
        /* of four tokens: two shared, four sequences of five more are 28, and the last
         * is not written */
        22;
    config.n_host_blocks = 12;
    p->n = p->best_of = 4;
    assert_int_equal(granted(&r, &e), 0);
    assert_string_equal(e.param, "max_tokens");
    p->max_tokens_yields = true;
    assert_int_equal(granted(&r, &e), 28 - 10 + 1);
    p->max_tokens = 5;
    assert_int_equal(granted(&r, &e), 5);
    p->max_tokens = 1000;
    p->min_tokens = 20;
    assert_int_equal(granted(&r, &e), 0);
    assert_string_equal(e.param, "n");
    p->min_tokens = 0;
    config.preemption = PREEMPT_SWAP; /* twelve: two shared, and 2.5 each */
    assert_int_equal(granted(&r, &e), 16 - 10 + 1);
    config.preemption = PREEMPT_AUTO;
    config.n_pinned = 8; /* three each */
    assert_int_equal(granted(&r, &e), 20 - 10 + 1);
    p->n = p->best_of = 1;
    p->beam_width = 4;
    assert_int_equal(granted(&r, &e), 20 - 10 + 1);
    r.n_prompt = 20;
    config.n_blocks = 11;
    p->beam_width = 1;
    assert_int_equal(granted(&r, &e), 0);
    assert_string_equal(e.param, "prompt");
}

static void a_long_prompt_is_computed_in_chunks(void **state)
{
    (void)state;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, tokens(2), 0, 70);
    const int32_t chunk[] = {32, 32, 6};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(rig_plan(&rig), 1);
        assert_int_equal(rig_item(&rig, a, 0)->n, chunk[i]);
        assert_int_equal(rig.batch.n_samples, i == 2);
        rig_commit(&rig);
    }
    assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, 0), 1);
}

static void decodes_are_not_starved_by_prefill(void **state)
{
    (void)state;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, tokens(16), 0, 5);
    rig_step(&rig);
    rig_add(&rig, tokens(4), 20, 100);
    for (int i = 0; i < 4; i++) {
        rig_plan(&rig);
        assert_int_equal(rig_item(&rig, a, 0)->n, 1);
        assert_int_equal(rig.batch.n_decode, 1);
        assert_int_equal(rig.batch.n_tokens, i < 3 ? 32 : 1 + 7);
        rig_commit(&rig);
    }
}

static void first_come_first_served_even_when_a_later_one_would_fit(void **state)
{
    (void)state;
    config.n_blocks = 10;
    rig_open(&rig, &config);
    rig_add(&rig, tokens(4), 0, 24); /* 6 blocks now, 7 in all */
    rig_step(&rig);
    struct rig_request *big = rig_add(&rig, tokens(1), 30, 20); /* 5: does not fit */
    struct rig_request *small = rig_add(&rig, tokens(1), 60, 4);
    rig_step(&rig);
    assert_int_equal(rig_count(&rig, small, DELTA_TOKEN, 0), 0);
    rig_run(&rig, 100);
    assert_true(big->ended && small->ended);
}

/* Two groups that outgrow the pool together. */
static void crowd(struct rig_request **old, struct rig_request **new)
{
    config.n_blocks = 9;
    rig_open(&rig, &config);
    *old = rig_add(&rig, tokens(16), 0, 8);
    *new = rig_add(&rig, tokens(16), 30, 8);
}

static void run_until_preempted(struct sched_counts *c)
{
    do {
        assert_true(rig_step(&rig));
        sched_counts(rig.sched, c);
    } while (c->preempt_recompute + c->preempt_swap == 0);
}

static void a_recomputed_group_goes_before_the_queue(void **state)
{
    (void)state;
    struct rig_request *old, *new;
    struct sched_counts c;
    crowd(&old, &new);
    struct rig_request *third = rig_add(&rig, tokens(1), 60, 4);
    (void)third;
    run_until_preempted(&c);
    assert_int_equal(c.preempt_recompute, 1);
    assert_int_equal(new->group->state, GROUP_WAITING);
    assert_int_equal(old->group->state, GROUP_RUNNING);
    rig_run(&rig, 100);
    assert_int_equal(rig_count(&rig, old, DELTA_TOKEN, 0), 16);
    assert_int_equal(rig_count(&rig, new, DELTA_TOKEN, 0), 16);
}

static void nothing_new_comes_in_while_a_group_is_swapped_out(void **state)
{
    (void)state;
    struct rig_request *old, *new;
    struct sched_counts c;
    config.preemption = PREEMPT_SWAP;
    config.n_host_blocks = 9;
    crowd(&old, &new);
    run_until_preempted(&c);
    assert_int_equal(c.preempt_swap, 1);
    assert_int_equal(new->group->state, GROUP_SWAPPED);
    /* 8 prompt tokens and 7 generated ones are computed */
    assert_int_equal(c.host_blocks_used, 4);
    struct rig_request *third = rig_add(&rig, tokens(1), 60, 4);
    rig_step(&rig);
    assert_int_equal(third->group->state, GROUP_WAITING);
    while (new->group &&new->group->state == GROUP_SWAPPED) {
        rig_step(&rig);
    }
    assert_true(old->ended);
    rig_run(&rig, 100);
    assert_true(new->ended && third->ended);
}

static void blocks_shared_by_samples_are_swapped_once(void **state)
{
    (void)state;
    struct sched_counts c;
    config.preemption = PREEMPT_SWAP;
    config.n_host_blocks = config.n_blocks = 24;
    rig_open(&rig, &config);
    rig_add(&rig, tokens(16), 30, 8);
    struct gen_params p = tokens(16);
    p.n = p.best_of = 4;
    p.temperature = 1;
    struct rig_request *new = rig_add(&rig, p, 0, 16);
    run_until_preempted(&c);
    int32_t distinct = c.host_blocks_used, entries = 0;
    for (int i = 0; i < 4; i++) {
        entries += new->group->seq[i].table[0].n_blocks;
    }
    assert_int_equal(new->group->state, GROUP_SWAPPED);
    assert_int_equal(entries - distinct, 3 * 4); /* four prompt blocks in four tables */
    rig_run(&rig, 200);
    assert_true(new->ended);
}

static void the_cheaper_preemption_is_taken(void **state)
{
    (void)state;
    for (int costly_swap = 0; costly_swap < 2; costly_swap++) {
        struct rig_request *old, *new;
        struct sched_counts c;
        rig_config(&config);
        config.preemption = PREEMPT_AUTO;
        config.n_host_blocks = 9;
        config.cost = (struct step_cost){.token_us = 10, .swap_block_us = costly_swap ? 1000 : 1};
        crowd(&old, &new);
        run_until_preempted(&c);
        assert_int_equal(c.preempt_swap, !costly_swap);
        assert_int_equal(c.preempt_recompute, costly_swap);
        rig_run(&rig, 100);
        if (!costly_swap) {
            rig_close(&rig);
        }
    }
}

static void samples_share_their_prompt_and_copy_one_block(void **state)
{
    (void)state;
    struct sched_counts c;
    struct gen_params p = tokens(8);
    p.n = p.best_of = 3;
    p.temperature = 1;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, p, 0, 10); /* two full blocks and a half */
    rig_step(&rig);
    sched_counts(rig.sched, &c);
    assert_int_equal(c.blocks_used, 3);
    assert_int_equal(c.running_seqs, 3);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_copy, 2); /* the last of the three writes in place */
    assert_int_equal(rig.batch.lcp_blocks[1], 2);
    rig_commit(&rig);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_copy, 0);
    rig_commit(&rig);
    rig_run(&rig, 100);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(rig_count(&rig, a, DELTA_TOKEN, i), 8);
    }
}

static void a_prefix_hit_leaves_the_last_token_to_compute(void **state)
{
    (void)state;
    config.prefix_cache = true;
    rig_open(&rig, &config);
    rig_add(&rig, tokens(1), 0, 16);
    rig_run(&rig, 10);
    struct rig_request *b = rig_add(&rig, tokens(1), 0, 16);
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, b, 0)->first, 12);
    assert_int_equal(rig_item(&rig, b, 0)->n, 4);
    rig_commit(&rig);
    assert_int_equal(rig.delta[rig.n_deltas - 1].kind, DELTA_END);
    assert_int_equal(rig.delta[rig.n_deltas - 1].cached_tokens, 12);
}

static void generated_blocks_are_found_by_the_next_turn(void **state)
{
    (void)state;
    config.prefix_cache = true;
    rig_open(&rig, &config);
    rig.token = 8; /* the prompt 0..7 goes on 8, 8, 8, ... */
    rig_add(&rig, tokens(9), 0, 8);
    rig_run(&rig, 20);
    struct rig_request *b = rig_add(&rig, tokens(1), 0, 20);
    for (int32_t i = 8; i < 17; i++) {
        b->request.prompt[i] = 8;
    }
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, b, 0)->first, 16);
    rig_commit(&rig);
}

static void a_pinned_prefix_outlives_everything(void **state)
{
    (void)state;
    struct sched_counts c;
    config.prefix_cache = true;
    config.n_blocks = 12;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, tokens(1), 0, 17);
    rig_run(&rig, 10);
    assert_int_equal(sched_pin(rig.sched, a->request.prompt, 17), 4);
    assert_int_equal(sched_pin(rig.sched, a->request.prompt, 17), 0); /* they are pinned already */
    rig.config.n_pinned = 4;
    for (int32_t i = 0; i < 5; i++) { /* others need all the rest */
        rig_add(&rig, tokens(2), 20 + 10 * i, 30);
    }
    rig_run(&rig, 100);
    sched_counts(rig.sched, &c);
    assert_int_equal(c.blocks_used, 4);
    struct rig_request *b = rig_add(&rig, tokens(1), 0, 17);
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, b, 0)->first, 16);
    rig_commit(&rig);
    struct group *g;
    struct err e = {0};
    b->request.params.max_tokens = 20; /* 9 blocks of the 8 that are not pinned */
    assert_int_equal(group_new(&g, &b->request, NULL, &rig.config, &e), ERR_INVALID);
}

static void scoring_a_prompt_reads_no_cache(void **state)
{
    (void)state;
    config.prefix_cache = true;
    rig_open(&rig, &config);
    rig_add(&rig, tokens(1), 0, 16);
    rig_run(&rig, 10);
    struct gen_params p = tokens(1);
    p.n_prompt_logprobs = 0;
    struct rig_request *b = rig_add(&rig, p, 0, 16);
    rig_run(&rig, 10);
    assert_int_equal(rig_count(&rig, b, DELTA_PROMPT, 0), 16);
}

static void priority_goes_first_and_stays_longest(void **state)
{
    (void)state;
    config.policy = POLICY_PRIORITY;
    config.n_blocks = 9;
    rig_open(&rig, &config);
    struct gen_params low = tokens(16), high = tokens(16);
    low.priority = 5;
    high.priority = -5;
    struct rig_request *a = rig_add(&rig, low, 0, 8);
    struct rig_request *b = rig_add(&rig, high, 30, 8);
    struct sched_counts c;
    run_until_preempted(&c);
    assert_int_equal(a->group->state, GROUP_WAITING);
    assert_int_equal(b->group->state, GROUP_RUNNING);
}

static void a_request_that_waits_too_long_ends(void **state)
{
    (void)state;
    config.queue_timeout_us = 5000;
    config.n_blocks = 8;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, tokens(12), 0, 20);
    struct rig_request *b = rig_add(&rig, tokens(1), 30, 20);
    rig_run(&rig, 7);
    assert_false(a->ended);
    assert_true(b->ended);
    assert_int_equal(rig_finish(&rig, b, 0)->finish, FINISH_ABORT);
    assert_non_null(rig_finish(&rig, b, 0)->error);
}

static void a_request_ends_at_request_timeout(void **state)
{
    (void)state;
    config.request_timeout_us = 5000;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, tokens(100), 0, 20);
    rig_run(&rig, 20);
    assert_true(a->ended);
    assert_int_equal(rig_finish(&rig, a, 0)->finish, FINISH_ABORT);
    assert_in_range(rig_count(&rig, a, DELTA_TOKEN, 0), 3, 6);
}

static void a_cancelled_request_is_gone_with_the_next_step(void **state)
{
    (void)state;
    struct sched_counts c;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, tokens(50), 0, 20);
    rig_run(&rig, 3);
    atomic_store(&a->request.cancelled, true);
    assert_false(rig_step(&rig));
    sched_counts(rig.sched, &c);
    assert_true(a->ended);
    assert_int_equal(c.blocks_used, 0);
}

static void a_full_queue_says_so(void **state)
{
    (void)state;
    struct group *g;
    struct err e;
    config.max_waiting = 1;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, tokens(1), 0, 4);
    assert_int_equal(group_new(&g, &a->request, NULL, &config, &e), 0);
    assert_int_equal(sched_add(rig.sched, g, 0), ERR_FULL);
    group_free(g);
}

static void a_group_that_waits_holds_one_sequence(void **state)
{
    struct gen_params p = tokens(16);

    (void)state;
    rig_open(&rig, &config);
    p.n = p.best_of = 8;
    struct rig_request *a = rig_add(&rig, p, 0, 4), *b = rig_add(&rig, p, 0, 4);
    rig_step(&rig);
    assert_int_equal(a->group->n_seqs, 8);
    assert_non_null(a->group->seq[7].out);
    assert_int_equal(b->group->n_seqs, 1);
    assert_ptr_equal(b->group->seq, &b->group->first);
    assert_null(b->group->memory);
    assert_null(b->group->first.out);
}

/* The memory of started groups is used up, part of it by a preempted one: it resumes
 * before a group that is first by priority but has not started. */
static void a_started_group_does_not_wait_for_one_that_cannot_start(void **state)
{
    struct gen_params p = tokens(24);

    (void)state;
    config.policy = POLICY_PRIORITY;
    config.max_started = 2;
    config.n_blocks = 10;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, p, 0, 8), *b = rig_add(&rig, p, 40, 8);
    for (int i = 0; i < 100 && b->group->n_preempted == 0; i++) {
        rig_step(&rig);
    }
    assert_int_equal(b->group->state, GROUP_WAITING);
    assert_int_equal(rig.sched->n_preempted, 1);
    p.priority = -1;
    struct rig_request *c = rig_add(&rig, p, 60, 8);
    while (!a->ended) {
        assert_null(c->group->memory);
        assert_true(rig_step(&rig));
    }
    assert_true(rig_run(&rig, 200) < 200);
    assert_true(b->ended && c->ended);
}

/* The chain of a group continues behind the blocks that it found when it started, with
 * its salt. */
static void a_salt_holds_from_the_first_block_on(void **state)
{
    struct gen_params salted = tokens(4);

    (void)state;
    config.prefix_cache = true;
    rig_open(&rig, &config);
    salted.cache_salt = (char *)"mine";
    rig_add(&rig, salted, 0, 16);
    rig_run(&rig, 100);
    struct rig_request *plain = rig_add(&rig, tokens(4), 0, 16);
    rig_step(&rig);
    assert_int_equal(plain->group->cached_tokens, 0);
    rig_run(&rig, 100);
    struct rig_request *again = rig_add(&rig, salted, 0, 16);
    rig_step(&rig);
    assert_int_equal(again->group->cached_tokens, 12);
}

/* A preempted group keeps its memory, so no group is preempted to free memory. */
static void no_slot_is_taken_for_a_group_that_cannot_start(void **state)
{
    (void)state;
    config.policy = POLICY_FAIR;
    config.max_started = 2;
    config.max_num_seqs = 2;
    rig_open(&rig, &config);
    struct rig_request *a = rig_add(&rig, tokens(16), 0, 4), *b = rig_add(&rig, tokens(16), 20, 4);
    rig_step(&rig);
    rig.tenant = 1;
    struct rig_request *c = rig_add(&rig, tokens(4), 40, 4);
    for (int i = 0; i < 8; i++) {
        rig_step(&rig);
    }
    assert_int_equal(a->group->n_preempted + b->group->n_preempted, 0);
    assert_null(c->group->memory);
}

/* Let request `i` have waited for `us`. */
static void make_late(int32_t i, int64_t us)
{
    rig.request[i].request.arrival_us = rig.now_us - us;
}

enum { READY_US = 850000 }; /* as in sched.c */

static void prefill_beside_decodes_keeps_to_the_itl_target(void **state)
{
    (void)state;
    config.target_itl_us = 160;
    config.cost = (struct step_cost){.fixed_us = 90, .token_us = 10};
    rig_open(&rig, &config);
    rig_add(&rig, tokens(8), 0, 5);
    rig_step(&rig);
    rig_add(&rig, tokens(1), 20, 120);
    make_late(1, READY_US);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_tokens, 1 + 6);
    /* Four times as slow as the cost model says, for long: nothing fits but a block's
     * worth. */
    for (int i = 0; i < 100; i++) {
        sched_observe(rig.sched, &(struct plan){.estimate_us = 160, .n_items = 2, .n_decode = 1},
                      4 * 160);
    }
    rig_commit(&rig);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_tokens, 1 + config.block_size);
    rig_commit(&rig);
}

/* Prefill that is due joins decodes, even if the target allows more: in each step as
 * much as completes the backlog READY_US after its oldest arrival; at least three
 * tokens a decode. */
static void prefill_beside_decodes_is_spread(void **state)
{
    (void)state;
    config.target_itl_us = 700;
    config.cost = (struct step_cost){.fixed_us = 90, .token_us = 10};
    rig_open(&rig, &config);
    rig_add(&rig, tokens(8), 0, 5);
    rig_step(&rig);
    rig_add(&rig, tokens(1), 20, 96);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_tokens,
                     /* three are due, but a block's worth may always join */
                     1 + config.block_size);
    rig_commit(&rig);
    make_late(1, READY_US - 92 * 10 - 800);
    rig_plan(&rig); /* prompts of 92 tokens in 800 us of decodes, 100 us each */
    assert_int_equal(rig.batch.n_tokens, 1 + 92 * 100 / 800);
    rig_commit(&rig);
    make_late(1, READY_US);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_tokens, config.max_num_batched_tokens);
    rig_commit(&rig);
}

static void large_steps_are_multiples_of_the_quantum(void **state)
{
    (void)state;
    config.target_itl_us = 700;
    config.cost = (struct step_cost){.fixed_us = 90, .token_us = 10};
    config.step_quantum = 6;
    rig_open(&rig, &config);
    rig_add(&rig, tokens(8), 0, 5);
    rig_step(&rig);
    rig_add(&rig, tokens(1), 20, 30);
    rig_plan(&rig);
    assert_int_equal(rig.batch.n_tokens, 6); /* fewer cost as much */
    rig_commit(&rig);
    rig_add(&rig, tokens(1), 30, 105);
    make_late(1, READY_US - 130 * 10 - 900);
    rig_plan(&rig);
    /* 130 tokens in nine steps of 100 us are 15 each, and a decode */
    assert_int_equal(rig.batch.n_tokens, 18);
    rig_commit(&rig);
}

/* 256 slots: two of the model's length; prompt 4 and 16 to come are 20, so 32 slots
 * each; prompt 4 and 17 are 36 with the next power of two, so 64 each. */
static void reservations_limit_admission(void **state)
{
    static const struct {
        int policy;
        int32_t max_tokens, n, runs;
    } want[] = {{KV_PAGED, 16, 1, 8},       {KV_ORCA_MAX, 16, 1, 2},  {KV_ORCA_ORACLE, 16, 1, 8},
                {KV_ORCA_ORACLE, 16, 3, 2}, {KV_ORCA_POW2, 17, 1, 4}, {KV_ORCA_ORACLE, 17, 1, 8}};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(want); i++) {
        struct sched_counts c;
        config.kv_policy = want[i].policy;
        rig_open(&rig, &config);
        for (int k = 0; k < 10; k++) {
            struct gen_params p = tokens(want[i].max_tokens);
            p.n = p.best_of = want[i].n;
            rig_add(&rig, p, k, 4);
        }
        rig_run(&rig, 4);
        sched_counts(rig.sched, &c);
        assert_int_equal(c.running_groups, want[i].runs);
        rig_run(&rig, 1000); /* all of them get their turn */
        assert_int_equal(rig_count(&rig, &rig.request[9], DELTA_FINISH, 0), 1);
        if (i + 1 < ARRAY_LEN(want)) {
            assert_int_equal(stop(NULL), 0);
        }
    }
}

static void what_no_reservation_can_hold_is_refused(void **state)
{
    struct request r = {.params = tokens(16), .prompt = (int32_t[]){1, 2, 3, 4}, .n_prompt = 4};
    struct group *g;
    struct err e = {0};

    (void)state;
    config.kv_policy = KV_ORCA_MAX;
    r.params.n = r.params.best_of = 3;
    assert_int_equal(group_new(&g, &r, NULL, &config, &e), ERR_INVALID);
    assert_string_equal(e.param, "max_tokens");
    rig_open(&rig, &config);
}

static void slots_are_reserved_for_samples_to_come(void **state)
{
    (void)state;
    struct gen_params p = tokens(4);
    p.n = p.best_of = 6;
    p.temperature = 1;
    rig_open(&rig, &config);
    rig_add(&rig, p, 0, 40);
    struct rig_request *b = rig_add(&rig, p, 50, 4);
    rig_step(&rig); /* a is in prefill: it has one slot, and has reserved six of eight */
    assert_int_equal(b->group->state, GROUP_WAITING);
}

static int32_t n_running(struct rig_request **q, int32_t n)
{
    int32_t running = 0;

    for (int32_t i = 0; i < n; i++) {
        running += q[i]->group && q[i]->group->state == GROUP_RUNNING;
    }
    return running;
}

static void leave(struct rig_request **q, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        atomic_store(&q[i]->request.cancelled, true);
    }
}

/* The longest list of allowed ids that the API accepts, in each of many requests: none
 * waits for the arrays of a batch. */
static void long_lists_of_ids_keep_no_slot_idle(void **state)
{
    (void)state;
    enum { N = 40 };
    struct rig_request *q[N + 1];
    struct gen_params p = tokens(40);
    int32_t *id = malloc(LIMIT_ALLOWED_TOKEN_IDS * sizeof(*id));
    assert_non_null(id);
    for (int32_t i = 0; i < LIMIT_ALLOWED_TOKEN_IDS; i++) {
        id[i] = i % 90;
    }
    p.allowed_token = id;
    p.n_allowed = LIMIT_ALLOWED_TOKEN_IDS;
    config.max_num_seqs = config.max_num_batched_tokens = 48;
    config.max_logits = 64;
    config.n_blocks = 1024;
    rig_open(&rig, &config);
    for (int32_t i = 0; i < N; i++) {
        q[i] = rig_add(&rig, p, i, 1);
    }
    q[N] = rig_add(&rig, tokens(40), 0, 1);
    rig_step(&rig);
    int32_t running = n_running(q, N + 1);
    leave(q, N + 1);
    rig_run(&rig, 10);
    free(id);
    assert_int_equal(running, N + 1);
}

/* No request waits because of the tokens that penalties may have to count. */
static void penalties_over_long_models_keep_no_slot_idle(void **state)
{
    (void)state;
    enum { N = 60 };
    struct rig_request *q[N];
    config.vocab = config.max_len = 1 << 19;
    config.block_size = 64;
    config.n_blocks = 2 * config.max_len / config.block_size;
    config.max_num_seqs = config.max_num_batched_tokens = N;
    config.max_logits = N + 1;
    struct gen_params p = tokens(config.max_len - 1);
    p.presence_penalty = 0.5F;
    rig_open(&rig, &config);
    for (int32_t i = 0; i < N; i++) {
        q[i] = rig_add(&rig, p, i, 1);
    }
    rig_step(&rig);
    int32_t running = n_running(q, N);
    leave(q, N);
    assert_int_equal(running, N);
}

/* More biases than LIMIT_ROW_BIASES. */
static void lists_beyond_their_limits_are_refused(void **state)
{
    (void)state;
    struct gen_params p = tokens(1);
    struct gen_bias bias[LIMIT_LOGIT_BIAS + 1] = {{0, 0}};
    struct request r = {.prompt = (int32_t[]){1}, .n_prompt = 1};
    struct group *g;
    struct err e = {0};
    p.bias = bias;
    p.n_bias = LIMIT_LOGIT_BIAS + 1;
    r.params = p;
    assert_int_equal(group_new(&g, &r, NULL, &config, &e), ERR_INVALID);
    assert_string_equal(e.param, "logit_bias");
}

int main(void)
{
#define CASE(f) cmocka_unit_test_setup_teardown(f, start, stop)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_configuration_that_cannot_work_is_refused, start),
        cmocka_unit_test_setup(what_can_never_run_or_be_swapped_is_refused_at_once, start),
        cmocka_unit_test_setup(a_default_max_tokens_gives_way, start),
        CASE(a_long_prompt_is_computed_in_chunks),
        CASE(decodes_are_not_starved_by_prefill),
        CASE(first_come_first_served_even_when_a_later_one_would_fit),
        CASE(a_recomputed_group_goes_before_the_queue),
        CASE(nothing_new_comes_in_while_a_group_is_swapped_out),
        CASE(blocks_shared_by_samples_are_swapped_once),
        CASE(the_cheaper_preemption_is_taken),
        CASE(samples_share_their_prompt_and_copy_one_block),
        CASE(a_prefix_hit_leaves_the_last_token_to_compute),
        CASE(generated_blocks_are_found_by_the_next_turn),
        cmocka_unit_test_setup_teardown(a_pinned_prefix_outlives_everything, start, stop_pinned),
        CASE(scoring_a_prompt_reads_no_cache),
        CASE(priority_goes_first_and_stays_longest),
        CASE(a_request_that_waits_too_long_ends),
        CASE(a_request_ends_at_request_timeout),
        CASE(a_cancelled_request_is_gone_with_the_next_step),
        CASE(a_full_queue_says_so),
        CASE(a_group_that_waits_holds_one_sequence),
        CASE(a_started_group_does_not_wait_for_one_that_cannot_start),
        CASE(no_slot_is_taken_for_a_group_that_cannot_start),
        CASE(a_salt_holds_from_the_first_block_on),
        CASE(prefill_beside_decodes_keeps_to_the_itl_target),
        CASE(prefill_beside_decodes_is_spread),
        CASE(large_steps_are_multiples_of_the_quantum),
        CASE(slots_are_reserved_for_samples_to_come),
        CASE(long_lists_of_ids_keep_no_slot_idle),
        CASE(penalties_over_long_models_keep_no_slot_idle),
        cmocka_unit_test_setup(lists_beyond_their_limits_are_refused, start),
        CASE(reservations_limit_admission),
        CASE(what_no_reservation_can_hold_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
