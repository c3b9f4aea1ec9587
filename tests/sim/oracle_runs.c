/* Random runs of the engine's heart against the oracle, as many as asked for:
 *
 *     build/tests/sim/oracle_runs [--runs N] [--seed N] [--first N]
 *
 * --runs N     runs with seeds first, first + 1, ... (default 10,000 from 1)
 * --seed N     one run, its scenario printed
 * A failing run is shrunk and printed; the exit status is 1. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/scenario.h"

static int fail(uint64_t seed, struct scenario *s, char *why, size_t why_size)
{
    printf("seed %llu fails: %s\n", (unsigned long long)seed, why);
    fflush(stdout);
    scenario_shrink(s, why, why_size);
    printf("shrunk: %s\n", why);
    scenario_print(s, stdout);
    printf("replay with --seed %llu\n", (unsigned long long)seed);
    return 1;
}

static int runs(uint64_t first, uint64_t n, bool show)
{
    static struct scenario s;
    struct sim_totals t = {0};
    char why[512];
    int64_t start_us = clock_us();
    for (uint64_t seed = first; seed < first + n; seed++) {
        scenario_random(&s, seed);
        if (show)
            scenario_print(&s, stdout);
        if (world_run(&s, &t, why, sizeof(why)) < 0)
            return fail(seed, &s, why, sizeof(why));
    }
    double s_taken = (double)(clock_us() - start_us) * 1e-6;
    printf("%lld runs (seeds %llu to %llu) in %.1f s, %.0f a second: %lld requests (%lld beams, %lld refused, %lld "
           "cancelled), "
           "%lld steps, "
           "%lld tokens, %lld swaps, %lld recomputations, %lld cached tokens, %lld copies on write\n",
           (long long)t.runs, (unsigned long long)first, (unsigned long long)(first + n - 1), s_taken,
           (double)t.runs / s_taken, (long long)t.requests, (long long)t.beams, (long long)t.refused,
           (long long)t.cancelled, (long long)t.steps, (long long)t.tokens, (long long)t.preempt_swap,
           (long long)t.preempt_recompute, (long long)t.cached_tokens, (long long)t.copies);
    return 0;
}

int main(int argc, char **argv)
{
    uint64_t first = 1, n = 10000;
    bool show = false;
    for (int i = 1; i + 1 < argc; i += 2) {
        uint64_t value = strtoull(argv[i + 1], NULL, 0);
        if (strcmp(argv[i], "--runs") == 0) {
            n = value;
        } else if (strcmp(argv[i], "--first") == 0) {
            first = value;
        } else if (strcmp(argv[i], "--seed") == 0) {
            first = value;
            n = 1;
            show = true;
        } else {
            fprintf(stderr, "usage: oracle_runs [--runs N] [--first N] [--seed N]\n");
            return 2;
        }
    }
    return runs(first, n, show);
}
