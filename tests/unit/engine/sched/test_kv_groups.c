/* KV groups with a sliding window: what they give back, what the prefix cache still
 * finds, how many sequences fit. Random cases: test_oracle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "engine/sched/sched_impl.h"
#include "tests/sim/rig.h"

static struct rig rig;

/* 64 blocks of 4 tokens; group 0 sees all, group 1 the last 8 tokens. */
static void open_windowed(void)
{
    struct sched_config c;

    rig_config(&c);
    c.n_kv_groups = 2;
    c.kv_window[1] = 8;
    c.prefix_cache = true;
    c.policy = POLICY_PRIORITY;
    rig_open(&rig, &c);
}

/* The same with chunks of 12 tokens in group 1. */
static void open_chunked(void)
{
    struct sched_config c;

    rig_config(&c);
    c.n_kv_groups = 2;
    c.kv_window[1] = 12;
    c.kv_chunked = true;
    c.prefix_cache = true;
    rig_open(&rig, &c);
}

static struct gen_params params_of(int32_t max_tokens)
{
    struct gen_params p = rig_params();

    p.max_tokens = max_tokens;
    p.ignore_eos = true;
    return p;
}

static int32_t held(const struct rig_request *q, int32_t group)
{
    const struct block_table *t = &q->group->seq[0].table[group];

    return t->n_blocks - t->first;
}

static void blocks_behind_the_window_are_given_back(void **state)
{
    (void)state;
    open_windowed();
    struct rig_request *q = rig_add(&rig, params_of(30), 1, 90);
    for (int32_t i = 0; i < 10; i++) {
        rig_step(&rig);
    }
    /* 90 prompt tokens in three steps, then one token a step */
    assert_int_equal(q->group->seq[0].n_tokens, 98);
    assert_int_equal(held(q, 0), 25);
    assert_int_equal(q->group->seq[0].table[1].first, (96 + 1 - 8) / 4);
    assert_int_equal(held(q, 1), 25 - 22);
    rig_run(&rig, 100);
    assert_true(q->ended);
    rig_close(&rig);
}

static void chunks_that_ended_are_given_back_whole(void **state)
{
    (void)state;
    open_chunked();
    struct rig_request *q = rig_add(&rig, params_of(57), 1, 70);
    for (int32_t i = 0; i < 3; i++) {
        rig_step(&rig);
    }
    const struct seq *s = &q->group->seq[0];
    for (int32_t i = 0; i < 40; i++) {
        rig_step(&rig);
        /* the step began by giving back, and computed the last of so many tokens */
        int32_t position = s->n_computed - 1, first = position / 12 * 12;
        assert_int_equal(s->table[1].first, first / 4);
        assert_in_range(held(q, 1), 1, 3);
        assert_int_equal(s->table[1].n_blocks, position / 4 + 1);
        assert_int_equal(s->table[0].first, 0);
    }
    assert_true(s->n_computed > 96);
    rig_run(&rig, 100);
    assert_true(q->ended);
    rig_close(&rig);
}

static void a_prefill_holds_what_its_steps_see(void **state)
{
    (void)state;
    open_windowed();
    struct rig_request *q = rig_add(&rig, params_of(1), 1, 120);
    rig_step(&rig);
    /* 8 - 1 + 32 positions, wherever they begin in a block */
    assert_int_equal(held(q, 0), 30);
    assert_int_equal(rig.sched->window_blocks[1], 11);
    for (int32_t i = 0; i < 3; i++) {
        assert_in_range(held(q, 1), 3, 11);
        rig_step(&rig);
    }
    rig_run(&rig, 10);
    assert_true(q->ended);
    rig_close(&rig);
}

static int32_t cached_of(struct rig_request *q)
{
    rig_run(&rig, 100);
    for (int32_t i = 0; i < rig.n_deltas; i++) {
        if (rig.delta[i].request == &q->request && rig.delta[i].kind == DELTA_END) {
            return rig.delta[i].cached_tokens;
        }
    }
    return -1;
}

/* Drop the peers of the blocks of tokens 1 .. 80 in group 1, but for those from a block
 * on. */
static void drop_peers_before(int32_t block)
{
    struct prefix *px = &rig.sched->prefix;
    struct prefix_chain chain;
    int32_t token[80], peer[19];

    for (int32_t i = 0; i < 80; i++) {
        token[i] = (1 + i) % 90;
    }
    prefix_start(px, &chain, NULL);
    for (int32_t i = 0; i < 19; i++) {
        int32_t entry = prefix_find(px, &chain, token + 4 * i);
        assert_true(entry >= 0);
        peer[i] = prefix_block(px, entry, 1);
    }
    for (int32_t i = 0; i < block; i++) {
        if (peer[i] >= 0) {
            prefix_drop(px, peer[i]);
        }
    }
}

static void a_hit_needs_the_blocks_inside_the_windows_alone(void **state)
{
    (void)state;
    open_windowed();
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 80)), 0);
    drop_peers_before(17); /* a hit behind 76 tokens needs the last two */
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 80)), 76);
    rig_close(&rig);
}

static void a_hit_needs_the_blocks_of_its_chunk_alone(void **state)
{
    (void)state;
    open_chunked();
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 80)), 0);
    drop_peers_before(18); /* a hit behind 76 tokens needs that of the chunk from 72 on */
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 80)), 76);
    drop_peers_before(19); /* one at the end of a chunk needs none */
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 80)), 72);
    rig_close(&rig);
}

static void a_hit_without_its_window_is_shortened_and_made_whole(void **state)
{
    (void)state;
    open_windowed();
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 80)), 0);
    struct prefix *px = &rig.sched->prefix;
    for (int32_t b = 0; b < rig.config.n_blocks; b++) {
        if (px->owner[b] >= 0) {
            prefix_drop(px, b);
        }
    }
    /* the blocks of group 0 are there, those of group 1 are computed and found again */
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 80)), 0);
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 80)), 76);
    rig_close(&rig);
}

static void prefill_waits_for_blocks_of_its_window(void **state)
{
    struct sched_config c;

    (void)state;
    rig_config(&c);
    c.n_kv_groups = 2;
    c.kv_window[1] = 16;
    c.n_blocks = 48;
    rig_open(&rig, &c);
    struct rig_request *a = rig_add(&rig, params_of(20), 1, 60);
    struct rig_request *b = rig_add(&rig, params_of(20), 31, 60);
    struct rig_request *d = rig_add(&rig, params_of(20), 61, 60);
    rig_run(&rig, 1000);
    assert_true(a->ended && b->ended && d->ended);
    assert_int_equal(rig_count(&rig, b, DELTA_TOKEN, 0), 20);
    rig_close(&rig);
}

/* rig_commit without the invariants, which a test has broken on purpose. */
static void commit_unchecked(void)
{
    struct plan *p = &rig.plan[rig.committed % 2];
    int32_t token[64] = {0};
    float logprob[64] = {0};
    struct results r = {
        .step = p->step, .n_samples = p->n_samples, .token = token, .logprob = logprob};

    decode_commit(rig.sched, p, &r, rig.now_us, &rig.out);
    rig.committed++;
}

/* A group in prefill whose blocks are all shared gets none back from its window: when
 * nothing else runs, the newest group makes room. */
static void a_prefill_without_blocks_preempts_the_newest(void **state)
{
    (void)state;
    open_windowed();
    struct gen_params later = params_of(20);
    later.priority = 1;
    struct rig_request *a = rig_add(&rig, later, 1, 8);
    rig_step(&rig);
    struct rig_request *b = rig_add(&rig, params_of(1), 31, 120);
    rig_step(&rig);
    assert_ptr_equal(rig.sched->running.last, a->group);
    a->request.parked = PARK_RUNNING;
    struct block_table *t = &b->group->seq[0].table[1];
    for (int32_t i = t->first; i < t->n_blocks; i++) {
        kvpool_ref(&rig.sched->pool, t->block[i]);
    }
    while (kvpool_available(&rig.sched->pool) > 0) {
        take_block(rig.sched);
    }
    for (int32_t i = 0; i < 10 && a->group->state == GROUP_RUNNING; i++) {
        struct plan *p = &rig.plan[rig.launched % 2];
        if (sched_plan(rig.sched, rig.now_us, p) > 0) {
            pack_batch(rig.packer, p, &rig.batch);
            rig.launched++;
            commit_unchecked();
        }
    }
    assert_int_equal(a->group->state, GROUP_WAITING);
    assert_int_equal(b->group->state, GROUP_RUNNING);
    rig_close(&rig);
}

static void copies_are_made_in_every_group(void **state)
{
    (void)state;
    open_windowed();
    struct gen_params p = params_of(4);
    p.n = p.best_of = 3;
    rig_add(&rig, p, 1, 6);
    rig_step(&rig);
    rig_plan(&rig); /* three sequences write into one shared block of each group */
    assert_int_equal(rig.batch.n_copy, 4);
    assert_int_equal(rig.batch.n_group_slots, 3);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_not_equal(rig.batch.slot[i], rig.batch.group_slot[i]);
    }
    rig_commit(&rig);
    rig_run(&rig, 100);
    rig_close(&rig);
}

/* ---- states ---- */

/* Group 1 holds states, a snapshot every 8 tokens: two blocks. */
static void open_states(int32_t n_blocks)
{
    struct sched_config c;

    rig_config(&c);
    c.n_kv_groups = 2;
    c.kv_window[1] = KV_WINDOW_STATE;
    c.snapshot_distance = 8;
    c.n_blocks = n_blocks;
    c.prefix_cache = true;
    c.policy = POLICY_PRIORITY;
    rig_open(&rig, &c);
}

static int32_t peers(void)
{
    int32_t n = 0;

    for (int32_t b = 0; b < rig.config.n_blocks; b++) {
        n += rig.sched->prefix.owner[b] >= 0;
    }
    return n;
}

static void a_step_passes_several_snapshots(void **state)
{
    (void)state;
    open_states(128);
    struct rig_request *q = rig_add(&rig, params_of(1), 1, 100);
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, q, 0)->n, 32);
    assert_int_equal(held(q, 1), 8);
    rig_commit(&rig);
    assert_int_equal(peers(), 4);
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, q, 0)->n, 32);
    assert_int_equal(held(q, 1), 8 + 1); /* what the first step passed was given back */
    rig_commit(&rig);
    assert_int_equal(peers(), 8);
    assert_int_equal(cached_of(q), 0);
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 76)), 72);
    assert_int_equal(cached_of(rig_add(&rig, params_of(1), 1, 31)), 24);
    rig_close(&rig);
}

/* The next step is planned before the one that passes them is committed. */
static void snapshots_stay_until_they_are_published(void **state)
{
    (void)state;
    open_states(128);
    struct rig_request *q = rig_add(&rig, params_of(1), 1, 100);
    rig_plan(&rig);
    rig_plan(&rig);
    assert_int_equal(rig.sched->n_in_flight, 2);
    assert_int_equal(q->group->seq[0].table[1].first, 1); /* the first snapshot's */
    assert_int_equal(held(q, 1), 15);
    commit_unchecked();
    rig_commit(&rig);
    assert_int_equal(peers(), 8);
    rig_plan(&rig);
    assert_int_equal(q->group->seq[0].table[1].first, 15);
    rig_commit(&rig);
    rig_close(&rig);
}

/* 25 blocks of group 0, in group 1 those of one distance and the one before it, and
 * `more`: no more are taken than leave one for the sequence in each group. */
static void passes(int32_t more, int32_t first_step, int32_t second_step)
{
    open_states(25 + 3 + more);
    struct rig_request *q = rig_add(&rig, params_of(1), 1, 100);
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, q, 0)->n, first_step);
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, q, 0)->n, second_step);
    commit_unchecked();
    rig_commit(&rig);
    assert_int_equal(peers(), (first_step + second_step) / 8);
    rig_run(&rig, 100);
    assert_true(q->ended);
    rig_close(&rig);
}

static void a_short_pool_passes_as_many_as_it_has(void **state)
{
    (void)state;
    passes(0, 8, 8);
    passes(2, 8, 8);
    passes(3, 16, 8);
    passes(4, 16, 8);
}

/* Blocks are taken elsewhere between two steps: snapshots that wait for their commit
 * make room. */
static void a_prefill_gives_up_snapshots_that_are_not_published(void **state)
{
    (void)state;
    open_states(128);
    struct rig_request *q = rig_add(&rig, params_of(1), 1, 100);
    rig_plan(&rig);
    while (kvpool_available(&rig.sched->pool) > 0) {
        take_block(rig.sched);
    }
    struct plan *p = &rig.plan[rig.launched % 2];
    assert_int_equal(sched_plan(rig.sched, rig.now_us, p), 1);
    assert_int_equal(p->item[0].n, 16);
    assert_int_equal(q->group->seq[0].table[1].first, 7);
    pack_batch(rig.packer, p, &rig.batch);
    rig.launched++;
    commit_unchecked();
    commit_unchecked();
    assert_int_equal(peers(), 1 + 2); /* the last of the first step, and the second one's */
    rig_close(&rig);
}

/* A host block for each that the next token needs, none for what waits for a commit. */
static void unpublished_snapshots_are_not_swapped(void **state)
{
    struct sched_config c;

    (void)state;
    rig_config(&c);
    c.n_kv_groups = 2;
    c.kv_window[1] = KV_WINDOW_STATE;
    c.snapshot_distance = 8;
    c.prefix_cache = true;
    c.preemption = PREEMPT_SWAP;
    c.n_host_blocks = 64;
    rig_open(&rig, &c);
    struct rig_request *q = rig_add(&rig, params_of(1), 1, 100);
    rig_plan(&rig);
    rig_plan(&rig);
    preempt(rig.sched, q->group);
    assert_int_equal(q->group->state, GROUP_SWAPPED);
    assert_int_equal(kvpool_used(&rig.sched->host), 16 + 1);
    commit_unchecked();
    rig_commit(&rig);
    rig_run(&rig, 100);
    assert_true(q->ended);
    rig_close(&rig);
}

/* Two prompts have a snapshot each, and half of what is left of the step. */
static void steps_are_divided_among_prompts(void **state)
{
    (void)state;
    open_states(128);
    struct rig_request *a = rig_add(&rig, params_of(1), 1, 100);
    struct rig_request *b = rig_add(&rig, params_of(1), 31, 100);
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, a, 0)->n, 16);
    assert_int_equal(rig_item(&rig, b, 0)->n, 16);
    rig_commit(&rig);
    assert_int_equal(peers(), 4);
    struct rig_request *d = rig_add(&rig, params_of(1), 61, 10); /* leaves its rest to others */
    rig_plan(&rig);
    assert_int_equal(rig_item(&rig, d, 0)->n + rig_item(&rig, a, 0)->n + rig_item(&rig, b, 0)->n,
                     32);
    rig_commit(&rig);
    rig_run(&rig, 100);
    rig_close(&rig);
}

/* ---- how many sequences fit ---- */

enum { LONG = 32768, WINDOW = 4096, LAYERS = 26 };

/* The most sequences of LONG tokens that decode at a time in a pool of `places` places
 * for the keys and values of 16 tokens in one layer. */
static int32_t most_running(int32_t n_groups, int32_t places)
{
    struct sched_config c;
    int32_t most = 0;

    rig_config(&c);
    c.n_kv_groups = n_groups;
    c.kv_window[1] = n_groups == 2 ? WINDOW : 0;
    c.kv_window_align = 64;
    c.block_size = 16;
    c.n_blocks = places / (LAYERS / n_groups);
    c.max_len = LONG + 64;
    c.max_num_seqs = 64;
    c.max_num_batched_tokens = 8192;
    c.max_logits = 65;
    rig_open(&rig, &c);
    struct rig_request *q[48];
    for (size_t i = 0; i < ARRAY_LEN(q); i++) {
        q[i] = rig_add(&rig, params_of(2), (int32_t)i, LONG);
        q[i]->request.parked = PARK_RUNNING; /* once computed it stays */
    }
    while (rig_step(&rig)) {
        most = MAX(most, rig.sched->running.n);
    }
    assert_int_equal(rig.sched->counted.preempt_recompute, 0);
    rig_close(&rig);
    return most;
}

/* Gemma-2's layers: 13 with a window of 4,096 tokens, 13 without. */
static void a_window_in_every_other_layer_lets_more_sequences_run(void **state)
{
    (void)state;
    int32_t places = 20 * (LONG / 16) * LAYERS; /* for twenty sequences without windows */
    int32_t one = most_running(1, places), two = most_running(2, places);
    print_message("%d sequences of %d tokens with one KV group, %d with two\n", one, LONG, two);
    assert_in_range(one, 18, 20);
    assert_true(10 * two >= 17 * one);
}

/* ---- refusals ---- */

static int try_open(int32_t n_groups, int32_t first_window, int kv_policy)
{
    struct sched_config c;
    struct sched *s;
    struct err e;

    rig_config(&c);
    c.n_kv_groups = n_groups;
    c.kv_window[0] = first_window;
    c.kv_policy = kv_policy;
    return sched_new(&s, &c, &e);
}

static void impossible_groups_are_refused(void **state)
{
    (void)state;
    assert_int_equal(try_open(LIMIT_KV_GROUPS + 1, 0, KV_PAGED), ERR_INVALID);
    assert_int_equal(try_open(2, 8, KV_PAGED), ERR_INVALID);
    assert_int_equal(try_open(2, 0, KV_ORCA_MAX), ERR_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_behind_the_window_are_given_back),
        cmocka_unit_test(chunks_that_ended_are_given_back_whole),
        cmocka_unit_test(a_prefill_holds_what_its_steps_see),
        cmocka_unit_test(a_hit_needs_the_blocks_inside_the_windows_alone),
        cmocka_unit_test(a_hit_needs_the_blocks_of_its_chunk_alone),
        cmocka_unit_test(a_hit_without_its_window_is_shortened_and_made_whole),
        cmocka_unit_test(prefill_waits_for_blocks_of_its_window),
        cmocka_unit_test(a_prefill_without_blocks_preempts_the_newest),
        cmocka_unit_test(copies_are_made_in_every_group),
        cmocka_unit_test(a_step_passes_several_snapshots),
        cmocka_unit_test(snapshots_stay_until_they_are_published),
        cmocka_unit_test(a_short_pool_passes_as_many_as_it_has),
        cmocka_unit_test(a_prefill_gives_up_snapshots_that_are_not_published),
        cmocka_unit_test(unpublished_snapshots_are_not_swapped),
        cmocka_unit_test(steps_are_divided_among_prompts),
        cmocka_unit_test(a_window_in_every_other_layer_lets_more_sequences_run),
        cmocka_unit_test(impossible_groups_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
