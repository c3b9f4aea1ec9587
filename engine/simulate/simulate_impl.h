/* Inside `quire simulate`: the scheduler and memory manager that serve, under a cost
 * model in place of a device.
 *
 *     simulate.c           the event loop, what a step costs
 *     simulate_main.c      replicas, the search for a rate that keeps a target
 *     simulate_options.c   the command line
 *     simulate_cost.c      what a step costs, from records of `quire bench`
 *     simulate_record.c    real runs: lengths, and how beams fork and die;
 *                          simulate_beams.c replays them
 *     simulate_workload.c  requests: Poisson arrivals over length distributions, or a
 *                          trace file
 *     simulate_report.c    what was seen: latencies, batch sizes, memory by kind
 */
#ifndef QUIRE_ENGINE_SIMULATE_SIMULATE_IMPL_H
#define QUIRE_ENGINE_SIMULATE_SIMULATE_IMPL_H

#include <stdio.h>

#include "engine/sched/kv/contiguous_alloc.h"
#include "engine/sched/sched_impl.h"

/* Paged is Quire. The others reserve contiguous room for a request's whole life before
 * the same scheduler gets it (SOSP'23 paper, section 6.1): Max for the model's length,
 * Pow2 for the next power of two of the output, Oracle for exactly the output, and
 * Static like Max but a batch at a time, as FasterTransformer. */
enum manager {
    MANAGER_PAGED = KV_PAGED,
    MANAGER_ORCA_MAX = KV_ORCA_MAX,
    MANAGER_ORCA_POW2 = KV_ORCA_POW2,
    MANAGER_ORCA_ORACLE = KV_ORCA_ORACLE,
    MANAGER_STATIC
};

struct sim_options {
    double rate; /* requests a second */
    int64_t requests;
    uint64_t seed;
    const char *dataset;   /* "sharegpt", "alpaca", "chat", "recorded" or "IN:OUT" */
    const char *trace;     /* file, or NULL */
    const char *cost_from; /* file of records, or NULL */
    int32_t n, beam;       /* samples; beam width, 0: none */
    int32_t shared_prefix; /* tokens that all prompts begin with */
    int32_t slots;         /* tokens that the KV memory holds */
    int32_t block_size, host_blocks, max_num_seqs, max_num_batched_tokens, max_len;
    int preemption;            /* enum preemption */
    int manager;               /* enum manager */
    int32_t replicas, replica; /* engines that share the requests; which of them this is */
    int routing;               /* enum routing */
    /* The search for the rate: 0: none. Percentile 0 is the mean. */
    double target_latency_s, target_ttft_s;
    int32_t target_percentile;
    bool prefix_cache, json;
    /* A step takes overhead + requests * request + sequences * seq + max(weights,
     * tokens * token) + context tokens read * context + tokens copied * 2 * context +
     * blocks swapped * swap_block. */
    double overhead_us, request_us, seq_us, weights_us, token_us, context_us, swap_block_us;
};

enum { SIM_VOCAB = 32000, SIM_TOKEN = 5 }; /* every sampled token is SIM_TOKEN */
enum routing { ROUTING_ROUND_ROBIN, ROUTING_PREFIX };

/* Defaults, then the arguments. */
int sim_options_parse(struct sim_options *ret, int argc, char **argv, struct err *e);
void sim_options_help(void);

struct sim_arrival {
    double at_us;
    int32_t prompt, output, n, beam;
};

/* Set what a step costs from the records of `quire bench offline` in a file. */
int sim_cost_read(struct sim_options *o, const char *path, struct err *e);

/* ---- records of real runs ---- */
struct sim_beam_record {
    int32_t width;
    const char *steps;
};
extern const struct sim_beam_record sim_beam_records[]; /* [sim_n_beam_records] by width */
extern const int32_t sim_n_beam_records;
extern const int16_t sim_prompt_lengths[], sim_output_lengths[]; /* [sim_n_lengths] sorted */
extern const int32_t sim_n_lengths;

/* A search's place in a record. Zeroed: not begun. */
struct beam_replay {
    const char *step;
    int32_t n; /* letters of the step */
};
/* On to the next step; then the candidates of each live beam: top[stride] and
 * top_logprob[stride]. */
void beam_replay_step(struct beam_replay *b, int32_t width, uint64_t *rng);
/* Children of the step that cannot stay in their parent's place, because a sibling
 * does. */
int32_t beam_replay_copies(const struct beam_replay *b, const struct group *g);
void beam_replay_candidates(const struct beam_replay *b, const struct seq *q, int32_t stride,
                            int32_t *top, float *top_logprob);

/* ---- workload ---- */
struct workload;
int workload_open(struct workload **ret, const struct sim_options *o, struct err *e);
void workload_free(struct workload *w);
/* The next request in order of arrival: 1; 0: no more; ERR_INVALID: the trace's next
 * line is no request. */
int workload_next(struct workload *w, struct sim_arrival *ret, struct err *e);
/* The n prompt tokens of the request that workload_next made last. */
void workload_prompt(struct workload *w, int32_t *token, int32_t n);
double sim_uniform(uint64_t *state);     /* [0, 1) */
double sim_exponential(uint64_t *state); /* mean 1 */

/* ---- report ---- */
struct sim_report {
    double *latency_s, *per_token_s, *ttft_s; /* [n_done] */
    int64_t n_done, n_refused, tokens_out, capacity;
    int64_t steps;
    /* integrals over time, in microseconds times the thing */
    double time_us, busy_us, requests_us, seqs_us, live_us, reserved_us, internal_us, external_us,
        free_us, shared_us, entries_us;
    struct sched_counts counts;
};
/* What a simulation saw; `r` is opened here, and the caller's. */
int simulate_once(const struct sim_options *o, struct sim_report *r, struct err *e);

int report_open(struct sim_report *r, int64_t requests, struct err *e);
void report_release(struct sim_report *r);
/* Another replica's report into this one. There is room for all their requests. */
void report_add(struct sim_report *r, const struct sim_report *other);
/* The targets that are set are kept. */
bool report_keeps_targets(struct sim_report *r, const struct sim_options *o);
void report_print(struct sim_report *r, const struct sim_options *o, FILE *out);

#endif
