/* Random runs of the scheduler against the oracle:
 *
 *     build/tests/sim/oracle_runs [--runs N] [--seed N] [--first N] [--jobs N] [--ranks N]
 *                           [--stages N]
 *
 * --runs N     runs with seeds first, first + 1, ... (default 10,000 from 1) --jobs N
 * processes that share them (default 1) --seed N     one run, its scenario printed
 * --ranks N    each step is sent as a message to N oracles, which must agree (default
 * 1) --stages N   with --ranks: each step is computed in N micro-batches (default 1) A
 * failing run is shrunk and printed; the exit status is 1. */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/sim/many.h"
#include "tests/sim/scenario.h"

enum { MAX_JOBS = 64 };

struct runs {
    uint64_t first, n, jobs;
    int32_t n_ranks, n_stages;
    bool show;
};

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

/* Every jobs-th run from `offset` on. */
static int run_share(const struct runs *r, uint64_t offset, struct sim_totals *t)
{
    static struct scenario s;
    char why[512];

    for (uint64_t i = offset; i < r->n; i += r->jobs) {
        scenario_random(&s, r->first + i);
        s.n_ranks = r->n_ranks;
        s.n_stages = r->n_stages;
        if (r->show) {
            scenario_print(&s, stdout);
        }
        if (world_run(&s, t, why, sizeof(why)) < 0) {
            return fail(r->first + i, &s, why, sizeof(why));
        }
    }
    return 0;
}

/* A child that runs its share and writes its totals into the pipe. */
static pid_t start_share(const struct runs *r, uint64_t offset, int fd)
{
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) {
        return child;
    }
    struct sim_totals t = {0};
    int status = run_share(r, offset, &t);
    fflush(stdout);
    _exit(status == 0 && write(fd, &t, sizeof(t)) != (ssize_t)sizeof(t) ? 2 : status);
}

static void print_totals(const struct runs *r, const struct sim_totals *t, double s)
{
    printf("%lld runs (seeds %llu to %llu) in %.1f s, %.0f a second: %lld requests (%lld beams, "
           "%lld refused, %lld "
           "cancelled), %lld steps, %lld tokens, %lld swaps (%lld blocks back from the host, %lld "
           "found on the device), "
           "%lld recomputations, %lld cached tokens, %lld copies on write, "
           "%lld under a grammar (%lld complete, %lld late masks), %lld drafts (%lld held), %lld "
           "forced (%lld held), "
           "%lld of a draft model, %lld runs with states (%lld requests went on from cached ones, "
           "%lld of them behind a tail), %lld with chunks (%lld requests went on from cached "
           "ones)\n",
           (long long)t->runs, (unsigned long long)r->first,
           (unsigned long long)(r->first + r->n - 1), s, (double)t->runs / s,
           (long long)t->requests, (long long)t->beams, (long long)t->refused,
           (long long)t->cancelled, (long long)t->steps, (long long)t->tokens,
           (long long)t->preempt_swap, (long long)t->swap_in_copied, (long long)t->swap_in_found,
           (long long)t->preempt_recompute, (long long)t->cached_tokens, (long long)t->copies,
           (long long)t->constrained, (long long)t->sentences, (long long)t->late_masks,
           (long long)t->drafted, (long long)t->accepted, (long long)t->forced,
           (long long)t->forced_accepted, (long long)t->model_drafted, (long long)t->state_runs,
           (long long)t->state_hits, (long long)t->state_tails, (long long)t->chunk_runs,
           (long long)t->chunk_hits);
}

/* struct sim_totals is an array of counters. */
static void add_totals(struct sim_totals *sum, const struct sim_totals *t)
{
    int64_t *to = (int64_t *)sum;
    const int64_t *from = (const int64_t *)t;

    for (size_t i = 0; i < sizeof(*sum) / sizeof(*to); i++) {
        to[i] += from[i];
    }
}

static int run_all(const struct runs *r)
{
    struct sim_totals sum = {0}, t;
    pid_t child[MAX_JOBS];
    int fd[2], status, failed = 0;
    int64_t start_us = clock_us();

    if (pipe(fd) < 0) {
        return 2;
    }
    for (uint64_t i = 0; i < r->jobs; i++) {
        if ((child[i] = start_share(r, i, fd[1])) < 0) {
            return 2;
        }
    }
    close(fd[1]);
    while (read(fd[0], &t, sizeof(t)) == (ssize_t)sizeof(t)) { /* a write of this size is whole */
        add_totals(&sum, &t);
    }
    for (uint64_t i = 0; i < r->jobs; i++) {
        failed |= waitpid(child[i], &status, 0) < 0 || status != 0;
    }
    close(fd[0]);
    if (!failed) {
        print_totals(r, &sum, (double)(clock_us() - start_us) * 1e-6);
    }
    return failed;
}

int main(int argc, char **argv)
{
    struct runs r = {.first = 1, .n = 10000, .jobs = 1, .n_ranks = 1, .n_stages = 1};

    for (int i = 1; i < argc; i += 2) {
        uint64_t value = i + 1 < argc ? strtoull(argv[i + 1], NULL, 0) : 0;
        if (i + 1 < argc && strcmp(argv[i], "--runs") == 0) {
            r.n = value;
        } else if (i + 1 < argc && strcmp(argv[i], "--first") == 0) {
            r.first = value;
        } else if (i + 1 < argc && strcmp(argv[i], "--jobs") == 0 && value >= 1 &&
                   value <= MAX_JOBS) {
            r.jobs = value;
        } else if (i + 1 < argc && strcmp(argv[i], "--ranks") == 0 && value >= 1 &&
                   value <= MANY_MAX) {
            r.n_ranks = (int32_t)value;
        } else if (i + 1 < argc && strcmp(argv[i], "--stages") == 0 && value >= 1 &&
                   value <= MANY_MAX) {
            r.n_stages = (int32_t)value;
        } else if (i + 1 < argc && strcmp(argv[i], "--seed") == 0) {
            r.first = value;
            r.n = r.jobs = 1;
            r.show = true;
        } else {
            fprintf(stderr,
                    "usage: oracle_runs [--runs N] [--first N] [--seed N] [--jobs 1..%d] [--ranks "
                    "1..%d] "
                    "[--stages 1..%d, with ranks]\n",
                    MAX_JOBS, MANY_MAX, MANY_MAX);
            return 2;
        }
    }
    return run_all(&r);
}
