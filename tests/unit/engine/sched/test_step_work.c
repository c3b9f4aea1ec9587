/* The cost of a step must not grow with the number of waiting requests or cached
 * blocks. Times are too noisy for this, so the scheduler is compiled for this test such
 * that each basic block calls the counter below (Makefile: counted), and the counts are
 * compared. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/sched/decode/decode.h"
#include "engine/sched/decode/pack.h"
#include "engine/sched/sched_impl.h"
#include "tests/sim/rig.h"

enum {
    RUNNING = 8,
    PROMPT = 20,
    BLOCK = 4,
    STEPS = 128,
    WARM = 16,
    VOCAB = 1000,
    FEW = 200,
    MANY = 20000,
    WIDE_MOST = 8
};

static uint64_t n_run; /* basic blocks */

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void)
{
    n_run++;
}

struct world {
    struct sched_config config;
    struct sched *sched;
    struct packer *packer;
    struct plan plan;
    struct delta_out out;
    struct request *request;
    int32_t n_requests, n_ended;
};

struct cost {
    uint64_t all, worst; /* basic blocks: of all steps, of the longest one */
};

static _Atomic int32_t stop_at[1];

static void on_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    (void)g;
    CONTAINER_OF(out, struct world, out)->n_ended += d->kind == DELTA_END;
}

/* All blocks are cached: each that is taken is dropped from the prefix cache first. */
static void fill_cache(struct world *w)
{
    int32_t n = w->config.n_blocks, tokens[BLOCK] = {0}, *block = calloc((size_t)n, sizeof(*block));
    struct prefix_chain chain;

    assert_non_null(block);
    prefix_start(&w->sched->prefix, &chain, "old");
    for (int32_t i = 0; i < n; i++) {
        tokens[0] = i;
        block[i] = kvpool_take(&w->sched->pool);
        prefix_publish(&w->sched->prefix, &chain, block[i], tokens);
    }
    while (n-- > 0) {
        kvpool_unref(&w->sched->pool, block[n]);
    }
    free(block);
}

static void ask(struct world *w, struct request *r, int32_t i, int32_t max_tokens, int32_t policy)
{
    struct err e = {0};
    struct group *g = NULL;

    r->params = rig_params();
    r->params.max_tokens = max_tokens;
    r->params.priority = policy == POLICY_PRIORITY ? i * 7 % 5 : 0;
    r->params.ignore_eos = true;
    r->n_prompt = PROMPT;
    r->prompt = calloc(PROMPT, sizeof(*r->prompt));
    assert_non_null(r->prompt);
    for (int32_t k = 0; k < PROMPT; k++) {
        r->prompt[k] = (i + k) % VOCAB;
    }
    r->tenant = policy == POLICY_FAIR ? i % 3 : 0;
    r->stop_at = stop_at;
    assert_int_equal(group_new(&g, r, NULL, &w->config, &e), 0);
    assert_int_equal(sched_add(w->sched, g, 0), 0);
}

/* `n` samples of `max_tokens` tokens each, with a prompt of its own. */
static void ask_of(struct world *w, struct request *r, int32_t n_prompt, int32_t max_tokens,
                   int32_t n)
{
    static _Atomic int32_t no_stop[WIDE_MOST];
    struct err e = {0};
    struct group *g = NULL;

    r->params = rig_params();
    r->params.max_tokens = max_tokens;
    r->params.n = r->params.best_of = n;
    r->params.ignore_eos = true;
    r->n_prompt = n_prompt;
    r->prompt = calloc((size_t)n_prompt, sizeof(*r->prompt));
    r->stop_at = no_stop;
    assert_non_null(r->prompt);
    for (int32_t i = 0; i < n; i++) {
        atomic_init(&no_stop[i], INT32_MAX);
    }
    assert_int_equal(group_new(&g, r, NULL, &w->config, &e), 0);
    assert_int_equal(sched_add(w->sched, g, 0), 0);
}

static void open_world(struct world *w, int32_t policy, int32_t waiting, int32_t cached,
                       int32_t max_tokens)
{
    struct err e = {0};

    atomic_init(&stop_at[0], INT32_MAX);
    *w = (struct world){.out.emit = on_delta, .n_requests = RUNNING + waiting};
    w->config =
        (struct sched_config){.n_blocks = RUNNING * ((PROMPT + max_tokens) / BLOCK + 1) + cached,
                              .block_size = BLOCK,
                              .vocab = VOCAB,
                              .max_len = PROMPT + max_tokens,
                              .max_num_seqs = RUNNING,
                              .max_num_batched_tokens = RUNNING * PROMPT,
                              .max_logits = RUNNING + 1,
                              .max_waiting = w->n_requests,
                              .preemption = PREEMPT_RECOMPUTE,
                              .policy = policy,
                              .prefix_cache = true};
    assert_int_equal(sched_new(&w->sched, &w->config, &e), 0);
    assert_int_equal(packer_new(&w->packer, &w->config, &e), 0);
    assert_int_equal(plan_init(&w->plan, &w->config, &e), 0);
    w->request = calloc((size_t)w->n_requests, sizeof(*w->request));
    assert_non_null(w->request);
    if (cached > 0) {
        fill_cache(w);
    }
    for (int32_t i = 0; i < w->n_requests; i++) {
        ask(w, &w->request[i], i, max_tokens, policy);
    }
}

static void close_world(struct world *w)
{
    sched_free(w->sched);
    packer_free(w->packer);
    plan_release(&w->plan);
    for (int32_t i = 0; i < w->n_requests; i++) {
        free(w->request[i].prompt);
    }
    free(w->request);
}

/* One step: the basic blocks it ran. */
static uint64_t step(struct world *w)
{
    static int32_t token[RUNNING + 1];
    static float logprob[RUNNING + 1];
    struct batch b;
    uint64_t before = n_run;

    assert_true(sched_plan(w->sched, 1, &w->plan) > 0);
    pack_batch(w->packer, &w->plan, &b);
    struct results r = {
        .step = w->plan.step, .n_samples = w->plan.n_samples, .token = token, .logprob = logprob};
    decode_commit(w->sched, &w->plan, &r, 1, &w->out);
    decode_reap(w->sched, &w->out);
    return n_run - before;
}

static struct cost cost_of(int32_t policy, int32_t waiting, int32_t cached, int32_t max_tokens,
                           int32_t *ret_ended)
{
    struct world w;
    struct cost c = {0};

    open_world(&w, policy, waiting, cached, max_tokens);
    for (int32_t i = 0; i < WARM; i++) {
        step(&w);
    }
    for (int32_t i = 0; i < STEPS; i++) {
        uint64_t n = step(&w);
        c.all += n;
        c.worst = MAX(c.worst, n);
    }
    *ret_ended = w.n_ended;
    close_world(&w);
    return c;
}

static const int32_t policies[] = {POLICY_FCFS, POLICY_PRIORITY, POLICY_FAIR};

/* A walk over the waiting groups would be 19,800 basic blocks more a step. A few more
 * are possible, where a comparison depends on their number. */
static void a_step_does_not_pay_for_waiting_groups(void **state)
{
    int32_t ended;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(policies); i++) {
        struct cost few = cost_of(policies[i], FEW, 0, 2 * STEPS, &ended);
        struct cost many = cost_of(policies[i], MANY, 0, 2 * STEPS, &ended);
        assert_int_equal(ended, 0);
        assert_true(few.all > STEPS * RUNNING); /* it does count */
        assert_true(many.all < few.all + few.all / 20 && many.worst < few.worst + few.worst / 20);
    }
}

/* The cost of an admission is the depth of a heap: log2(20,000) / log2(200) = 1.9 times
 * as much. */
static void an_admission_pays_for_the_logarithm_at_most(void **state)
{
    int32_t ended;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(policies); i++) {
        struct cost few = cost_of(policies[i], FEW, 0, 6, &ended);
        struct cost many = cost_of(policies[i], MANY, 0, 6, &ended);
        assert_true(ended > RUNNING * STEPS / 8); /* many were admitted */
        assert_true(many.worst < 2 * few.worst && many.all < 2 * few.all);
    }
}

/* Buckets of the prefix cache have random lengths, so the counts are not equal. */
static void a_step_does_not_pay_for_what_is_cached(void **state)
{
    int32_t ended;

    (void)state;
    struct cost few = cost_of(POLICY_FCFS, FEW, 5 * FEW, 6, &ended);
    struct cost many = cost_of(POLICY_FCFS, FEW, 5 * MANY, 6, &ended);
    assert_true(ended > RUNNING * STEPS / 8);
    assert_true(many.all < few.all + few.all / 20 && few.all < many.all + many.all / 20);
}

/* ---- a swapped group that cannot resume ---- */

enum { WIDE = 6, SMALL = 2, LARGE = 40 }; /* blocks of each sample's answer */

/* The cost of a step of a group that runs alone and holds all blocks, while a group of
 * WIDE samples, each `blocks` long, is swapped out. */
static uint64_t cost_beside_swapped(int32_t blocks)
{
    struct world w = {.out.emit = on_delta, .n_requests = 2};
    struct err e = {0};
    int32_t wide = WIDE * blocks + PROMPT / BLOCK, tokens = (blocks + 1) * BLOCK, rest = 4 * BLOCK;

    atomic_init(&stop_at[0], INT32_MAX);
    w.config = (struct sched_config){.n_blocks = 2 * wide,
                                     .n_host_blocks = 2 * wide,
                                     .block_size = BLOCK,
                                     .vocab = VOCAB,
                                     .max_len = 2 * wide * BLOCK,
                                     .max_num_seqs = WIDE + 1,
                                     .max_num_batched_tokens = 2 * wide * BLOCK,
                                     .max_logits = WIDE + 2,
                                     .max_waiting = 2,
                                     .preemption = PREEMPT_SWAP};
    assert_int_equal(sched_new(&w.sched, &w.config, &e), 0);
    assert_int_equal(packer_new(&w.packer, &w.config, &e), 0);
    assert_int_equal(plan_init(&w.plan, &w.config, &e), 0);
    w.request = calloc(2, sizeof(*w.request));
    assert_non_null(w.request);
    ask_of(&w, &w.request[0], wide * BLOCK, wide * BLOCK / 2, 1);
    ask_of(&w, &w.request[1], PROMPT, tokens, WIDE);
    for (int32_t i = 0; i < tokens + 2 * blocks * WIDE * BLOCK; i++) {
        if (w.sched->swapped.n > 0) {
            break;
        }
        step(&w);
    }
    assert_int_equal(w.sched->swapped.n, 1);
    assert_int_equal(w.sched->running.n, 1);
    step(&w);
    uint64_t least = UINT64_MAX;
    for (int32_t i = 0; i < rest; i++) {
        uint64_t n = step(&w);
        least = MIN(least, n);
    }
    assert_int_equal(w.sched->swapped.n, 1);
    close_world(&w);
    return least;
}

static void a_step_does_not_pay_for_swapped_groups(void **state)
{
    (void)state;
    uint64_t small = cost_beside_swapped(SMALL), large = cost_beside_swapped(LARGE);
    assert_true(small > 0);
    assert_true(large <= small + small / 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_does_not_pay_for_waiting_groups),
        cmocka_unit_test(an_admission_pays_for_the_logarithm_at_most),
        cmocka_unit_test(a_step_does_not_pay_for_what_is_cached),
        cmocka_unit_test(a_step_does_not_pay_for_swapped_groups),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
