/* Tests cost_measure on an executor whose steps take known times. */
#include "engine/loop/cost.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

/* The executor's own clock: it advances by the duration of each step, so the results
 * are exact on any machine. */
static int64_t fake_us;

static int64_t fake_clock(void)
{
    return fake_us;
}

/* A step takes as long as the model says, from launch to wait. */
struct timed {
    struct executor base;
    struct step_cost cost;
    int64_t step_us;
    int32_t n_steps;
    int32_t n_table; /* entries of table row 0 received */
    int32_t token, top;
    float logprob, top_logprob;
    int32_t n_row_table[1024]; /* entries received, by row */
    bool seen[1025];           /* steps of so many sequences */
};

static int timed_launch(struct executor *x, const struct batch *b, struct err *e)
{
    struct timed *t = CONTAINER_OF(x, struct timed, base);

    (void)e;
    assert_int_equal(b->n_seqs, 1);
    assert_int_equal(b->row[0], 0);
    for (int32_t i = 0; i < b->n_table_update; i++) {
        assert_int_equal(b->table_update[i].index, t->n_table);
        t->n_table += b->table_update[i].count;
        assert_true(b->table_update[i].first + b->table_update[i].count <= b->n_table_block);
    }
    assert_true(t->n_table * x->info.block_size >= b->kv_len[0]);
    assert_true(t->n_table <= x->info.n_blocks && b->kv_len[0] <= x->info.max_len);
    assert_true(b->n_tokens <= x->info.max_num_batched_tokens);
    for (int32_t i = 0; i < b->n_tokens; i++) {
        assert_true(b->slot[i] == b->position[i] &&
                    b->position[i] == b->kv_len[0] - b->n_tokens + i);
    }
    double us = t->cost.fixed_us + b->n_tokens * t->cost.token_us +
                b->position[0] * t->cost.context_us + b->n_swap_in * t->cost.swap_block_us;
    t->step_us = (int64_t)us;
    t->n_steps++;
    return 0;
}

static int timed_wait(struct executor *x, struct results *ret, struct err *e)
{
    struct timed *t = CONTAINER_OF(x, struct timed, base);

    (void)e;
    fake_us += t->step_us;
    *ret = (struct results){
        .n_samples = 1, .top_stride = 1, .token = &t->token, .logprob = &t->logprob};
    return 0;
}

static struct timed make(int32_t n_blocks, int32_t n_host_blocks, int32_t max_len)
{
    return (struct timed){
        .base = {.info = {.vocab = 10,
                          .max_len = max_len,
                          .n_blocks = n_blocks,
                          .n_host_blocks = n_host_blocks,
                          .block_size = 16,
                          .max_num_seqs = 8,
                          .max_num_batched_tokens = 512,
                          .max_samples = 16,
                          .depth = 1},
                 .launch = timed_launch,
                 .wait = timed_wait},
        .cost = {2000, 20, 2, 300},
    };
}

static void assert_near(double got, double want)
{
    if (!(got > want * 0.999 && got < want * 1.001)) {
        fail_msg("%g, expected %g", got, want);
    }
}

static void the_four_costs_are_found(void **state)
{
    (void)state;
    struct timed t = make(1000, 100, 8192);
    struct step_cost c;
    struct err e;
    assert_int_equal(cost_measure(&t.base, fake_clock, &c, &e), 0);
    assert_near(c.fixed_us, 2020);
    assert_near(c.token_us, 20);
    assert_near(c.context_us, 2);
    assert_near(c.swap_block_us, 300);
    assert_near(c.row_us, 20);
    assert_true(c.many_row_us == 0); /* no more rows than sequences */
    assert_true(t.n_steps <= 21);
}

static void a_tiny_pool_is_not_overrun(void **state)
{
    (void)state;
    struct timed small = make(2, 0, 20), one = make(1, 1, 1);
    struct step_cost c;
    struct err e;
    assert_int_equal(cost_measure(&small.base, fake_clock, &c, &e), 0);
    assert_true(c.swap_block_us == 0);
    assert_near(c.token_us, 20);
    assert_int_equal(cost_measure(&one.base, fake_clock, &c, &e), 0);
    assert_true(c.token_us > 0 && c.context_us == 0);
}

/* Accepts whatever a backend would, and records the number of sequences. */
static int sizes_launch(struct executor *x, const struct batch *b, struct err *e)
{
    struct timed *t = CONTAINER_OF(x, struct timed, base);

    (void)e;
    assert_true(b->n_seqs <= x->info.max_num_seqs && b->n_tokens <= x->info.max_num_batched_tokens);
    for (int32_t i = 0; i < b->n_table_update; i++) {
        const struct table_update *u = &b->table_update[i];
        assert_true(u->row < x->info.max_num_seqs && u->first + u->count <= b->n_table_block);
        assert_int_equal(u->index, t->n_row_table[u->row]);
        t->n_row_table[u->row] += u->count;
    }
    for (int32_t i = 0; i < b->n_seqs; i++) {
        assert_true(t->n_row_table[b->row[i]] * x->info.block_size >= b->kv_len[i]);
        assert_true(b->slot[b->q_start[i + 1] - 1] < x->info.n_blocks * x->info.block_size);
        assert_true(b->n_seqs == 1 || (b->q_start[i + 1] == i + 1 && b->logits_token[i] == i &&
                                       b->sample[i].logits_row == i));
    }
    t->step_us = 1000;
    t->seen[b->n_seqs] = true;
    return 0;
}

static void steps_of_every_size_are_set_up(void **state)
{
    (void)state;
    static const int32_t N_SEQS[] = {1, 5, 100, 1024}, LARGEST[] = {1, 4, 96, 256};
    struct step_cost c;
    struct err e;
    for (int i = 0; i < 4; i++) {
        struct timed t = make(1000, 0, 4096);
        t.base.launch = sizes_launch;
        t.base.info.sets_up_sizes = true;
        t.base.info.max_num_seqs = N_SEQS[i];
        assert_int_equal(cost_measure(&t.base, fake_clock, &c, &e), 0);
        for (int32_t n = 1; n <= 256; n *= 2) {
            assert_true(t.seen[n] == (n <= LARGEST[i]));
        }
        assert_true(t.seen[LARGEST[i]]);
        for (int32_t n = LARGEST[i] + 1; n <= 1024; n++) {
            assert_false(t.seen[n]);
        }
    }
    struct timed tiny = make(2, 0, 20);
    tiny.base.launch = sizes_launch;
    tiny.base.info.sets_up_sizes = true;
    assert_int_equal(cost_measure(&tiny.base, fake_clock, &c, &e), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_four_costs_are_found),
        cmocka_unit_test(a_tiny_pool_is_not_overrun),
        cmocka_unit_test(steps_of_every_size_are_set_up),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
