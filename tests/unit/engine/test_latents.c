/* A cache of latents under the engine: samples, beams and greedy texts over shared
 * prefixes are the same in a pool that swaps and recomputes as in one with room for all
 * and no prefix cache. On a CPU a row's bits do not depend on its company, so they are
 * compared token by token. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/engine_state.h"
#include "engine/workers/runner.h"
#include "tests/sim/recorder.h"

enum { PATIENCE_S = 120, N = 9, PREFIX = 17, OUTPUT = 30 };

struct rig {
    struct settings s;
    struct recorder recorder;
    struct engine *engine;
    struct request *q[N];
    struct recording *rec[N];
};

static void open_rig(struct rig *r, char *blocks, char *preemption, char *prefix_cache)
{
    char *argv[] = {"--device=cpu",   "--dtype=float32",
                    "--threads=2",    "--max-num-seqs=8",
                    "--block-size=4", "--max-num-batched-tokens=24",
                    "--config=none",  blocks,
                    preemption,       prefix_cache};
    char *env[] = {NULL};
    struct generation_defaults unused;
    struct model_config c;
    struct tokenizer *t;
    struct executor *x;
    struct err e;
    bool help;

    *r = (struct rig){0};
    if (settings_load(&r->s, ARRAY_LEN(argv), argv, env, &help, &e) < 0 ||
        model_config_read(&c, &unused, "tests/golden/deepseek-v3", &e) < 0 ||
        runner_open(&x, &r->s, "tests/golden/deepseek-v3", &c, &e) < 0 ||
        tokenizer_open_bytes(&t, &e) < 0) {
        fail_msg("%s", e.text);
    }
    recorder_init(&r->recorder);
    if (engine_open_on(&r->engine, &r->s, x, t, &r->recorder.sink, &e) < 0) {
        fail_msg("%s", e.text);
    }
}

/* Requests with one prefix: greedy ones, pairs of samples, beams. */
static void run(struct rig *r)
{
    struct err e;

    for (int32_t i = 0; i < N; i++) {
        struct gen_params p;
        int32_t prompt[PREFIX + N];
        gen_params_init(&p, r->engine);
        p.max_tokens = OUTPUT;
        p.ignore_eos = true;
        p.temperature = i % 3 == 1 ? 1 : 0;
        p.n = p.best_of = i % 3 == 0 ? 1 : 2;
        p.beam_width = i % 3 == 2 ? 3 : 0;
        p.seed = 7;
        for (int32_t k = 0; k < PREFIX + i; k++) {
            prompt[k] = 3 + (k < PREFIX ? k : k + 5 * i) % 60;
        }
        assert_int_equal(request_new(&r->q[i], &p, prompt, PREFIX + i, &e), 0);
        r->rec[i] = recording_new();
        r->q[i]->user = r->rec[i];
        r->q[i]->seed = 5;
    }
    if (engine_submit_all(r->engine, r->q, N, &e) < 0) {
        fail_msg("%s", e.text);
    }
    for (int32_t i = 0; i < N; i++) {
        assert_true(recorder_wait(&r->recorder, r->rec[i], PATIENCE_S));
    }
}

static void close_rig(struct rig *r)
{
    engine_free(r->engine);
    for (int32_t i = 0; i < N; i++) {
        request_unref(r->q[i]);
        recording_free(r->rec[i]);
    }
    recorder_release(&r->recorder);
    settings_release(&r->s);
}

static void compare(const struct rig *a, const struct rig *b)
{
    for (int32_t i = 0; i < N; i++) {
        for (int32_t k = 0; k < (i % 3 == 0 ? 1 : 2); k++) {
            const struct recorded_choice *x = &a->rec[i]->choice[k], *y = &b->rec[i]->choice[k];
            assert_int_equal(x->n_tokens, OUTPUT);
            assert_int_equal(x->n_tokens, y->n_tokens);
            assert_memory_equal(x->id, y->id, (size_t)x->n_tokens * sizeof(x->id[0]));
        }
    }
}

static void texts_survive_preemption(char *preemption, bool swaps)
{
    struct rig roomy, tight;

    open_rig(&roomy, "--kv-blocks=400", "--preemption=recompute", "--prefix-cache=false");
    run(&roomy);
    open_rig(&tight, "--kv-blocks=40", preemption, "--prefix-cache=true");
    run(&tight);
    const struct engine_stats *s = engine_stats(tight.engine);
    assert_true((swaps ? s->preempt_swap : s->preempt_recompute) > 0);
    assert_true(s->prefix_hits > 0);
    assert_int_equal(engine_stats(roomy.engine)->prefix_hits, 0);
    compare(&roomy, &tight);
    close_rig(&tight);
    close_rig(&roomy);
}

static void texts_survive_swapping(void **state)
{
    (void)state;
    texts_survive_preemption("--preemption=swap", true);
}

static void texts_survive_recomputing(void **state)
{
    (void)state;
    texts_survive_preemption("--preemption=recompute", false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_survive_swapping),
        cmocka_unit_test(texts_survive_recomputing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
