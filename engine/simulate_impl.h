/* Inside `quire simulate`: the scheduler and memory manager that serve, under a cost model in place of a device.
 *
 *     simulate.c           the event loop, what a step costs
 *     simulate_options.c   the command line
 *     simulate_workload.c  requests: Poisson arrivals over length distributions, or a trace file
 *     simulate_reserve.c   the memory managers of before paging: contiguous reservations from a buddy allocator
 *     simulate_report.c    what was seen: latencies, batch sizes, memory by kind
 */
#ifndef QUIRE_ENGINE_SIMULATE_IMPL_H
#define QUIRE_ENGINE_SIMULATE_IMPL_H

#include <stdio.h>

#include "engine/sched_impl.h"

/* Paged is Quire. The others reserve contiguous room for a request's whole life before the same scheduler gets it
 * (SOSP'23 paper, section 6.1): Max for the model's length, Pow2 for the next power of two of the output, Oracle for
 * exactly the output, and Static like Max but a batch at a time, as FasterTransformer. */
enum manager { MANAGER_PAGED, MANAGER_ORCA_MAX, MANAGER_ORCA_POW2, MANAGER_ORCA_ORACLE, MANAGER_STATIC };

struct sim_options {
    double rate; /* requests a second */
    int64_t requests;
    uint64_t seed;
    const char *dataset;   /* "sharegpt", "alpaca" or "IN:OUT" */
    const char *trace;     /* file, or NULL */
    int32_t n, beam;       /* samples; beam width, 0: none */
    int32_t shared_prefix; /* tokens that all prompts begin with */
    int32_t slots;         /* tokens that the KV memory holds */
    int32_t block_size, host_blocks, max_num_seqs, max_num_batched_tokens, max_len;
    int preemption; /* enum preemption */
    int manager;    /* enum manager */
    bool prefix_cache, json;
    /* A step takes overhead + sequences * seq + max(weights, tokens * token) + context tokens read * context +
     * blocks swapped * swap_block. */
    double overhead_us, seq_us, weights_us, token_us, context_us, swap_block_us;
    double beam_gap; /* mean distance in nats between a beam's candidates: how fast beams die */
};

/* Defaults, then the arguments. */
int sim_options_parse(struct sim_options *ret, int argc, char **argv, struct err *e);
void sim_options_help(void);

struct sim_arrival {
    double at_us;
    int32_t prompt, output, n, beam;
};

/* ---- workload ---- */
struct workload;
int workload_open(struct workload **ret, const struct sim_options *o, struct err *e);
void workload_free(struct workload *w);
/* The next request in order of arrival: 1; 0: no more; ERR_INVALID: the trace's next line is no request. */
int workload_next(struct workload *w, struct sim_arrival *ret, struct err *e);
double sim_uniform(uint64_t *state);     /* [0, 1) */
double sim_exponential(uint64_t *state); /* mean 1 */

/* ---- reservations ---- */
struct reserver;
int reserver_open(struct reserver **ret, const struct sim_options *o, struct err *e);
void reserver_free(struct reserver *r);
struct reservation {
    int32_t start, size;    /* slots of a chunk; size 0: none */
    int32_t wanted, needed; /* asked for; will be used in the end */
};
/* Room for one sequence of the request; false: not now. */
bool reserver_take(struct reserver *r, const struct sim_arrival *a, struct reservation *ret);
void reserver_give(struct reserver *r, const struct reservation *x);

/* ---- report ---- */
struct sim_report {
    double *latency_s, *per_token_s, *ttft_s; /* [n_done] */
    int64_t n_done, n_refused, tokens_out, capacity;
    int64_t steps;
    /* integrals over time, in microseconds times the thing */
    double time_us, busy_us, requests_us, seqs_us, live_us, reserved_us, internal_us, external_us, free_us, shared_us,
        entries_us;
    struct sched_counts counts;
};
int report_open(struct sim_report *r, int64_t requests, struct err *e);
void report_release(struct sim_report *r);
void report_print(struct sim_report *r, const struct sim_options *o, FILE *out);

#endif
