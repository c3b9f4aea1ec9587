/* Tests `quire simulate`: its workloads, its reservations, and the paper's batch
 * sizes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/commands.h"
#include "engine/simulate/simulate_impl.h"

static struct sim_options options(const char *text)
{
    struct sim_options o;
    struct err e = {0};
    char copy[512], *argv[64], *rest = NULL;
    int argc = 0;

    snprintf(copy, sizeof(copy), "%s", text);
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        argv[argc++] = word;
    }
    static char kept[512];
    memcpy(kept, copy, sizeof(kept)); /* text options point into their argument */
    for (int i = 0; i < argc; i++) {
        argv[i] = kept + (argv[i] - copy);
    }
    assert_int_equal(sim_options_parse(&o, argc, argv, &e), 0);
    return o;
}

static void datasets_have_the_means_of_the_paper(void **state)
{
    (void)state;
    static const struct {
        const char *args;
        double prompt, output;
    } want[] = {{"--dataset sharegpt --requests 40000", 161.31, 337.99},
                {"--dataset alpaca --requests 40000", 19.31, 58.45},
                {"--dataset 100:7 --requests 10", 100, 7}};
    for (size_t i = 0; i < ARRAY_LEN(want); i++) {
        struct sim_options o = options(want[i].args);
        struct workload *w;
        struct sim_arrival a;
        struct err e;
        double prompt = 0, output = 0, last_us = 0;
        assert_int_equal(workload_open(&w, &o, &e), 0);
        while (workload_next(w, &a, &e) == 1) {
            assert_true(a.at_us >= last_us && a.prompt + a.output <= o.max_len);
            last_us = a.at_us;
            prompt += a.prompt;
            output += a.output;
        }
        workload_free(w);
        assert_true(fabs(prompt / (double)o.requests / want[i].prompt - 1) < 0.03);
        assert_true(fabs(output / (double)o.requests / want[i].output - 1) < 0.03);
        assert_true(fabs(last_us * 1e-6 * o.rate / (double)o.requests - 1) <
                    0.5 / sqrt((double)o.requests) * 10);
    }
}

static int trace_says(const char *text, struct err *e)
{
    char path[] = "/tmp/quire-trace-XXXXXX";
    int fd = mkstemp(path);

    assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
    struct sim_options o = options("--requests 100");
    struct workload *w;
    struct sim_arrival a;
    o.trace = path;
    assert_int_equal(workload_open(&w, &o, e), 0);
    int n = 0, code;
    while ((code = workload_next(w, &a, e)) == 1) {
        n++;
    }
    workload_free(w);
    unlink(path);
    return code < 0 ? code : n;
}

static void a_trace_is_read_and_a_broken_one_refused(void **state)
{
    (void)state;
    struct err e = {0};
    assert_int_equal(trace_says("# comment\n0.5 10 20\n\n1.5,10,20,2\n2 10 20 4 4\n", &e), 3);
    assert_int_equal(trace_says("1 10 20\n0.5 10 20\n", &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "line 2"));
    assert_int_equal(trace_says("1 ten 20\n", &e), ERR_INVALID);
    assert_int_equal(trace_says("1 10 0\n", &e), ERR_INVALID);
    assert_int_equal(trace_says("nan 10 1\n", &e), ERR_INVALID);
    assert_int_equal(trace_says("1 10 20 1000\n", &e), ERR_INVALID);
}

static void a_buddy_arena_is_whole_again_when_all_is_given_back(void **state)
{
    (void)state;
    struct reserve_rule rule = {
        .policy = KV_ORCA_ORACLE, .slots = 15700, .max_len = 2048, .least = 1};
    struct contiguous_alloc *r;
    struct err e;
    struct reservation taken[64];
    uint64_t rng = 3;
    int32_t n = 0;
    assert_int_equal(contiguous_open(&r, &rule, &e), 0);
    for (int i = 0; i < 2000; i++) {
        int32_t prompt = 1 + (int32_t)(sim_uniform(&rng) * 300);
        if (n < 64 && sim_uniform(&rng) < 0.6 && contiguous_take(r, prompt, 100, &taken[n])) {
            assert_true(taken[n].size >= prompt + 100 &&
                        taken[n].start + taken[n].size <= rule.slots);
            for (int32_t k = 0; k < n; k++) { /* not part of another chunk */
                assert_true(taken[n].start >= taken[k].start + taken[k].size ||
                            taken[k].start >= taken[n].start + taken[n].size);
            }
            n++;
        } else if (n > 0) {
            n--;
            contiguous_give(r, &taken[n]);
        }
    }
    while (n > 0) {
        contiguous_give(r, &taken[--n]);
    }
    /* 15700 = 8192 + 4096 + 2048 + 1024 + ...: seven chunks of 2048 fit again. */
    while (n < 64 && contiguous_take(r, 1000, 1048, &taken[n])) {
        n++;
    }
    assert_int_equal(reserve_most(&rule, 1000, 1048), 7);
    assert_int_equal(n, 7);
    contiguous_free(r);
}

/* Runs a simulation and reads one number from its JSON report. */
static double simulated(const char *args, const char *key)
{
    char copy[512], text[4096], *argv[64], *rest = NULL;
    int argc = 0, pipe_fd[2];

    snprintf(copy, sizeof(copy), "%s --json", args);
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        argv[argc++] = word;
    }
    fflush(stdout);
    int kept = dup(1);
    assert_int_equal(pipe(pipe_fd), 0);
    dup2(pipe_fd[1], 1);
    int status = simulate_main(argc, argv);
    fflush(stdout);
    dup2(kept, 1);
    close(kept);
    close(pipe_fd[1]);
    ssize_t n = read(pipe_fd[0], text, sizeof(text) - 1);
    close(pipe_fd[0]);
    assert_int_equal(status, 0);
    assert_true(n > 0);
    text[n] = '\0';
    const char *at = strstr(text, key);
    assert_non_null(at);
    return strtod(at + strlen(key) + 2, NULL);
}

static void batches_are_as_large_as_in_the_paper(void **state)
{
    (void)state;
    /* Fig. 13a: OPT-13B, ShareGPT, 2 requests a second. */
    static const struct {
        const char *args;
        double batch;
    } want[] = {{"--rate 2 --requests 1500 --manager orca-max", 7.00},
                {"--rate 2 --requests 1500 --manager orca-pow2", 9.81},
                {"--rate 2 --requests 1500 --manager orca-oracle", 13.62},
                {"--rate 2 --requests 1500", 30.42}};
    for (size_t i = 0; i < ARRAY_LEN(want); i++) {
        assert_true(fabs(simulated(want[i].args, "\"batch_requests\"") / want[i].batch - 1) < 0.15);
    }
}

static void paging_wastes_little_even_when_it_preempts(void **state)
{
    (void)state;
    const char *args = "--rate 3 --requests 800";
    assert_true(simulated(args, "\"preempt_recompute\"") > 0);
    assert_true(simulated(args, "\"live_of_allocated\"") >= 0.963);
    assert_true(simulated("--rate 3 --requests 800 --preemption swap --host-blocks 981",
                          "\"preempt_swap\"") > 0);
}

static void sharing_saves_what_it_saves_in_the_paper(void **state)
{
    (void)state;
    /* Section 6.3: 6.1-9.8 % for 2 to 6 samples of Alpaca, 16.2-30.5 % of ShareGPT. */
    double two =
        simulated("--dataset alpaca --n 2 --rate 5 --requests 800", "\"saved_by_sharing\"");
    double six =
        simulated("--dataset alpaca --n 6 --rate 5 --requests 800", "\"saved_by_sharing\"");
    assert_true(two > 0.05 && six > 0.09 && six < 0.14);
    double more = simulated("--n 4 --rate 0.5 --requests 500", "\"saved_by_sharing\"");
    assert_true(more > 0.162 && more < 0.305);
    assert_true(simulated("--dataset alpaca --beam 4 --rate 2 --requests 300",
                          "\"saved_by_sharing\"") > 0.37);
}

static void a_shared_prefix_is_computed_once(void **state)
{
    (void)state;
    const char *args = "--dataset 50:20 --shared-prefix 320 --prefix-cache --rate 5 --requests 400";
    double hits = simulated(args, "\"prefix_hit_tokens\""),
           asked = simulated(args, "\"prefix_query_tokens\"");
    assert_true(hits / asked > 0.8);
}

static void beams_of_any_width_are_replayed(void **state)
{
    (void)state;
    static const char *const width[] = {"1", "3", "4", "7", "16"};
    double before = -1;
    for (size_t i = 0; i < ARRAY_LEN(width); i++) {
        char args[128];
        snprintf(args, sizeof(args), "--dataset 40:60 --rate 1 --requests 40 --beam %s", width[i]);
        double saved = simulated(args, "\"saved_by_sharing\"");
        assert_true(saved > before);
        before = saved;
    }
}

static void conversations_find_what_was_said_before(void **state)
{
    (void)state;
    const char *args = "--dataset chat --prefix-cache --rate 0.3 --requests 600 --kv-slots 400000";
    double hits = simulated(args, "\"prefix_hit_tokens\""),
           asked = simulated(args, "\"prefix_query_tokens\"");
    assert_true(hits / asked > 0.2 && hits / asked < 0.9);
}

static void replicas_share_the_load_and_prefix_routing_keeps_the_cache(void **state)
{
    (void)state;
    double one = simulated("--rate 2 --requests 1000", "\"batch_requests\"");
    double two = simulated("--rate 2 --requests 1000 --replicas 2", "\"batch_requests\"");
    assert_true(two < 0.6 * one);
    assert_true(simulated("--rate 2 --requests 1000 --replicas 2", "\"requests\"") == 1000);
    const char *args[] = {
        "--dataset chat --prefix-cache --rate 1 --requests 1000 --kv-slots 400000 --replicas 4",
        "--dataset chat --prefix-cache --rate 1 --requests 1000 --kv-slots 400000 --replicas 4 "
        "--routing prefix"};
    assert_true(simulated(args[1], "\"prefix_hit_tokens\"") >
                1.5 * simulated(args[0], "\"prefix_hit_tokens\""));
}

static void the_rate_that_keeps_a_target_is_found(void **state)
{
    (void)state;
    const char *args = "--dataset 100:20 --target-latency 0.05";
    double rate = simulated(args, "\"rate\"");
    char beyond[128];
    assert_true(simulated(args, "\"normalized_latency_s\": {\"mean\"") <= 0.05);
    snprintf(beyond, sizeof(beyond), "--dataset 100:20 --rate %g --requests 3000", rate * 1.1);
    assert_true(simulated(beyond, "\"normalized_latency_s\": {\"mean\"") > 0.05);
}

static void costs_are_fitted_to_records(void **state)
{
    (void)state;
    struct sim_options o = {0};
    struct err e = {0};
    char path[] = "/tmp/quire-records-XXXXXX", text[2048];
    int fd = mkstemp(path), n = 0;
    /* 1000 us, 10 us a sequence, 0.1 us a token of context. */
    static const int batch[] = {1, 8, 64, 64}, context[] = {500, 500, 500, 4000};
    for (int i = 0; i < 4; i++) {
        n += snprintf(text + n, sizeof(text) - (size_t)n,
                      "{\"requests\": %d, \"prompt_tokens\": %d, \"output_tokens\": %d, "
                      "\"decode_steps\": 50, "
                      "\"decode_step_ms\": %.6f, \"prefill_tok_s\": 20000}\n",
                      batch[i], batch[i] * context[i], 2 * batch[i],
                      1 + 0.01 * batch[i] + 0.0001 * (batch[i] * context[i] + batch[i]));
    }
    assert_int_equal(write(fd, text, (size_t)n), n);
    assert_int_equal(sim_cost_read(&o, path, &e), 0);
    assert_true(fabs(o.weights_us - 1000) < 1 && fabs(o.seq_us - 10) < 0.1 &&
                fabs(o.context_us - 0.1) < 0.001);
    assert_true(fabs(o.token_us - 50) < 0.1);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(sim_cost_read(&o, path, &e), ERR_INVALID);
    assert_int_equal(pwrite(fd, "{\"requests\": [", 14, 0), 14);
    assert_int_equal(sim_cost_read(&o, path, &e), ERR_INVALID);
    close(fd);
    unlink(path);
    assert_int_equal(sim_cost_read(&o, path, &e), ERR_IO);
}

static void a_cache_of_8_bits_holds_more_and_costs_less(void **state)
{
    (void)state;
    struct sim_options wide = options("--dataset sharegpt"),
                       fp8 = options("--kv-cache-dtype fp8 --dataset sharegpt"),
                       int8 = options("--dataset sharegpt --kv-cache-dtype int8");
    assert_int_equal(fp8.slots, 2 * wide.slots);
    assert_true(fabs(fp8.context_us - wide.context_us / 2) < 1e-9);
    assert_true(fabs(fp8.swap_block_us - wide.swap_block_us / 2) < 1e-9);
    assert_true(int8.slots > 1.9 * wide.slots && int8.slots < fp8.slots);
}

static void wrong_options_are_named(void **state)
{
    (void)state;
    struct sim_options o;
    struct err e = {0};
    char *bad[][2] = {{"--rate", "-1"},
                      {"--manager", "best"},
                      {"--kv-cache-dtype", "int4"},
                      {"--n", "1.5"},
                      {"--requests", "many"}};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        assert_int_equal(sim_options_parse(&o, 2, bad[i], &e), ERR_INVALID);
        assert_non_null(strstr(e.text, bad[i][0]));
        assert_non_null(strstr(e.text, bad[i][1]));
    }
    assert_int_equal(sim_options_parse(&o, 1, bad[0], &e), ERR_INVALID);
    char *unknown[] = {"--speed"};
    assert_int_equal(sim_options_parse(&o, 1, unknown, &e), ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(datasets_have_the_means_of_the_paper),
        cmocka_unit_test(a_trace_is_read_and_a_broken_one_refused),
        cmocka_unit_test(a_buddy_arena_is_whole_again_when_all_is_given_back),
        cmocka_unit_test(batches_are_as_large_as_in_the_paper),
        cmocka_unit_test(paging_wastes_little_even_when_it_preempts),
        cmocka_unit_test(sharing_saves_what_it_saves_in_the_paper),
        cmocka_unit_test(a_shared_prefix_is_computed_once),
        cmocka_unit_test(beams_of_any_width_are_replayed),
        cmocka_unit_test(conversations_find_what_was_said_before),
        cmocka_unit_test(replicas_share_the_load_and_prefix_routing_keeps_the_cache),
        cmocka_unit_test(a_cache_of_8_bits_holds_more_and_costs_less),
        cmocka_unit_test(the_rate_that_keeps_a_target_is_found),
        cmocka_unit_test(costs_are_fitted_to_records),
        cmocka_unit_test(wrong_options_are_named),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
