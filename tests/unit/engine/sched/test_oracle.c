/* The scheduler against the oracle: random runs, each request's output compared with
 * what it gives alone. build/tests/sim/oracle_runs does the same for any number of
 * runs, and replays a seed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/sim/scenario.h"

enum { FIRST_SEED = 1, RUNS = 4000, MANY_RUNS = 800, RANKS = 3, STAGES = 3 };

static struct scenario scenario;

static void random_runs(uint64_t n, int32_t n_ranks, int32_t n_stages)
{
    struct sim_totals t = {0};
    char why[512];

    for (uint64_t seed = FIRST_SEED; seed < FIRST_SEED + n; seed++) {
        scenario_random(&scenario, seed);
        scenario.n_ranks = n_ranks;
        scenario.n_stages = n_stages;
        if (world_run(&scenario, &t, why, sizeof(why)) == 0) {
            continue;
        }
        scenario_shrink(&scenario, why, sizeof(why));
        scenario_print(&scenario, stderr);
        fail_msg("seed %llu: %s (replay: build/tests/sim/oracle_runs --ranks %d --stages %d --seed "
                 "%llu)",
                 (unsigned long long)seed, why, n_ranks, n_stages, (unsigned long long)seed);
    }
    /* The runs must have covered all of these. */
    assert_true(t.requests > (int64_t)n);
    assert_true(t.preempt_swap > 0);
    assert_true(t.swap_in_copied > 0);
    assert_true(t.swap_in_found > 0);
    assert_true(t.preempt_recompute > 0);
    assert_true(t.cached_tokens > 0);
    assert_true(t.copies > 0);
    assert_true(t.beams > 0);
    assert_true(t.yielded > 0);
    assert_true(t.pin_hits > 0);
    assert_true(t.cancelled > 0);
    assert_true(t.drafted > t.accepted);
    assert_true(t.accepted > 0);
    assert_true(t.state_hits > t.state_tails);
    assert_true(t.state_tails > 0);
    assert_true(t.chunk_hits > 0);
}

static void random_runs_give_each_request_what_it_gives_alone(void **state)
{
    (void)state;
    random_runs(RUNS, 1, 1);
}

static void so_they_do_when_each_step_goes_to_many_ranks(void **state)
{
    (void)state;
    random_runs(MANY_RUNS, RANKS, 1);
}

static void so_they_do_in_the_parts_of_a_pipeline(void **state)
{
    (void)state;
    random_runs(MANY_RUNS, 2, STAGES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_runs_give_each_request_what_it_gives_alone),
        cmocka_unit_test(so_they_do_when_each_step_goes_to_many_ranks),
        cmocka_unit_test(so_they_do_in_the_parts_of_a_pipeline),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
