/* The command `quire simulate`: runs the replicas, or searches for the highest request
 * rate that meets a target. */
#include <stdlib.h>
#include <string.h>

#include "engine/commands.h"
#include "engine/simulate/simulate_impl.h"

/* Simulates all replicas, one after another: they share only the arrivals, which
 * routing divides among them. */
static int simulate_replicas(struct sim_options *o, struct sim_report *ret, struct err *e)
{
    o->replica = 0;
    int rc = simulate_once(o, ret, e);
    for (o->replica = 1; rc == 0 && o->replica < o->replicas; o->replica++) {
        struct sim_report other = {0};
        rc = simulate_once(o, &other, e);
        if (rc == 0) {
            report_add(ret, &other);
        }
        report_release(&other);
    }
    return rc;
}

/* Simulates requests at one rate. */
static int try_rate(struct sim_options *o, double rate, struct sim_report *r, bool *ret_meets,
                    struct err *e)
{
    enum { SECONDS = 1200, LEAST = 300, MOST = 200000 };

    o->rate = rate;
    o->requests = (int64_t)MIN(MAX(rate * SECONDS, LEAST), MOST);
    report_release(r);
    int rc = simulate_replicas(o, r, e);
    *ret_meets = rc == 0 && report_meets_targets(r, o);
    return rc;
}

/* Finds the highest rate that meets the targets, within 1 %: sets o->rate and its
 * report. Doubles or halves o->rate until the answer is bracketed, then bisects. */
static int search_rate(struct sim_options *o, struct sim_report *r, struct err *e)
{
    enum { STEPS = 24 };
    double low = 0, high = 0, rate = o->rate;
    bool meets;

    for (int i = 0; i < STEPS && (low == 0 || high == 0 || high > low * 1.01); i++) {
        int rc = try_rate(o, rate, r, &meets, e);
        if (rc < 0) {
            return rc;
        }
        *(meets ? &low : &high) = rate;
        rate = high == 0 ? low * 2 : low == 0 ? high / 2 : (low + high) / 2;
    }
    if (low == 0) {
        return err_set(e, ERR_INVALID,
                       "no rate keeps the target: even %g requests a second miss it", high);
    }
    return try_rate(o, low, r, &meets, e);
}

int simulate_main(int argc, char **argv)
{
    struct sim_options o;
    struct sim_report r = {0};
    struct err e = {0};

    if (argc > 0 && strcmp(argv[0], "--help") == 0) {
        sim_options_help();
        return 0;
    }
    int rc = sim_options_parse(&o, argc, argv, &e);
    bool search = rc == 0 && (o.target_latency_s > 0 || o.target_ttft_s > 0);
    if (search && o.trace) {
        rc = err_set(&e, ERR_INVALID, "a trace has a rate of its own; a target needs a --dataset");
    }
    if (rc == 0) {
        rc = search ? search_rate(&o, &r, &e) : simulate_replicas(&o, &r, &e);
    }
    if (rc == 0) {
        report_print(&r, &o, stdout);
    } else {
        fprintf(stderr, "quire simulate: %s\n", e.text);
    }
    report_release(&r);
    return rc == 0 ? 0 : 1;
}
