/* The parts of `quire simulate`, which runs the real scheduler and memory manager under
 * a cost model instead of a device.
 *
 *     simulate.c           the event loop, the cost of a step
 *     simulate_main.c      replicas, the search for the highest rate that meets a target
 *     simulate_options.c   the command line
 *     simulate_cost.c      cost parameters, fitted to records of `quire bench`
 *     simulate_record.c    recorded runs: lengths, and how beams fork and die;
 *                          simulate_beams.c replays the beams
 *     simulate_workload.c  requests: Poisson arrivals with sampled lengths, or a trace file
 *     simulate_report.c    the report: latencies, batch sizes, memory by use */
#ifndef QUIRE_ENGINE_SIMULATE_SIMULATE_IMPL_H
#define QUIRE_ENGINE_SIMULATE_SIMULATE_IMPL_H

#include <stdio.h>

#include "engine/sched/kv/contiguous_alloc.h"
#include "engine/sched/sched_impl.h"

/* The memory manager that is simulated. Paged is Quire's. The others reserve contiguous
 * memory for a request's lifetime before it enters the same scheduler (SOSP'23 paper,
 * section 6.1): Max for the longest sequence, Pow2 for the output's length rounded up
 * to a power of two, Oracle for exactly the output, and Static as Max but one batch at
 * a time, like FasterTransformer. */
enum manager {
    MANAGER_PAGED = KV_PAGED,
    MANAGER_ORCA_MAX = KV_ORCA_MAX,
    MANAGER_ORCA_POW2 = KV_ORCA_POW2,
    MANAGER_ORCA_ORACLE = KV_ORCA_ORACLE,
    MANAGER_STATIC
};

struct sim_options {
    double rate;           /* requests a second */
    int64_t requests;      /* how many */
    uint64_t seed;         /* of everything random */
    const char *dataset;   /* "sharegpt", "alpaca", "chat", "recorded" or "IN:OUT" */
    const char *trace;     /* file with the requests, or NULL */
    const char *cost_from; /* file of records to fit costs to, or NULL */
    int32_t n, beam;       /* samples; beam width, 0: none */
    int32_t shared_prefix; /* tokens that all prompts share as their beginning */
    int32_t slots;         /* tokens that the KV memory holds */
    int kv_cache_dtype;    /* enum sim_cache */
    /* as the engine's settings */
    int32_t block_size, host_blocks, max_num_seqs, max_num_batched_tokens, max_len;
    int preemption; /* enum preemption */
    int manager;    /* enum manager */
    /* engines that the requests are divided among; the one that is simulated */
    int32_t replicas, replica;
    int routing; /* enum routing */
    /* Targets of the search for the highest rate; 0: none. Percentile 0 is the mean. */
    double target_latency_s, target_ttft_s;
    int32_t target_percentile;
    bool prefix_cache, json; /* prefix caching on; report as JSON */
    /* A step takes overhead + requests * request + sequences * seq + max(weights,
     * tokens * token) + context tokens read * context + tokens copied * 2 * context +
     * blocks swapped * swap_block. */
    double overhead_us, request_us, seq_us, weights_us, token_us, context_us, swap_block_us;
};

enum { SIM_VOCAB = 32000, SIM_TOKEN = 5 }; /* every sampled token is SIM_TOKEN */
/* Type of the cache: the tokens that its memory holds, and what reading and swapping
 * them costs, are given for 16 bits and follow from it. */
enum sim_cache { SIM_CACHE_16_BITS, SIM_CACHE_FP8, SIM_CACHE_INT8 };
enum routing { ROUTING_ROUND_ROBIN, ROUTING_PREFIX };

/* Sets the defaults, then applies the arguments. */
int sim_options_parse(struct sim_options *ret, int argc, char **argv, struct err *e);
void sim_options_help(void);

struct sim_arrival {
    double at_us; /* arrival */
    /* tokens of prompt and output; samples; beam width, 0: none */
    int32_t prompt, output, n, beam;
};

/* Sets the costs of a step from a file of `quire bench offline` records. */
int sim_cost_read(struct sim_options *o, const char *path, struct err *e);

/* ---- records of real runs ---- */
struct sim_beam_record {
    int32_t width;     /* beams */
    const char *steps; /* a word a step; see simulate_beams.c */
};
extern const struct sim_beam_record sim_beam_records[]; /* [sim_n_beam_records] by width */
extern const int32_t sim_n_beam_records;
extern const int16_t sim_prompt_lengths[], sim_output_lengths[]; /* [sim_n_lengths] sorted */
extern const int32_t sim_n_lengths;

/* A search's position in a record. Zeroed: not started. */
struct beam_replay {
    const char *step; /* the current step's word */
    int32_t n;        /* letters of that word */
};
/* beam_replay_step advances to the next step; beam_replay_candidates then fills one
 * live beam's candidates: top[stride] and top_logprob[stride]. */
void beam_replay_step(struct beam_replay *b, int32_t width, uint64_t *rng);
/* Children of the step that need a copy because a sibling keeps the parent's memory. */
int32_t beam_replay_copies(const struct beam_replay *b, const struct group *g);
void beam_replay_candidates(const struct beam_replay *b, const struct seq *q, int32_t stride,
                            int32_t *top, float *top_logprob);

/* ---- workload ---- */
struct workload;
int workload_open(struct workload **ret, const struct sim_options *o, struct err *e);
void workload_free(struct workload *w);
/* Gets the next request in order of arrival: 1; 0: there are no more; ERR_INVALID:
 * malformed line of the trace. */
int workload_next(struct workload *w, struct sim_arrival *ret, struct err *e);
/* The n prompt tokens of the request that workload_next returned last. */
void workload_prompt(struct workload *w, int32_t *token, int32_t n);
double sim_uniform(uint64_t *state);     /* [0, 1) */
double sim_exponential(uint64_t *state); /* mean 1 */

/* ---- report ---- */
struct sim_report {
    double *latency_s, *per_token_s, *ttft_s; /* [n_done] of each request, seconds */
    /* capacity: entries allocated in each array */
    int64_t n_done, n_refused, tokens_out, capacity;
    int64_t steps; /* scheduled */
    /* Integrals over simulated time: microseconds, or microseconds times requests,
     * sequences, KV slots or block-table entries. */
    double time_us, busy_us, requests_us, seqs_us, live_us, reserved_us, internal_us, external_us,
        free_us, shared_us, entries_us;
    struct sched_counts counts; /* of preemptions and prefix hits */
};
/* Runs one simulation; `r` is opened here and belongs to the caller. */
int simulate_once(const struct sim_options *o, struct sim_report *r, struct err *e);

int report_open(struct sim_report *r, int64_t requests, struct err *e);
void report_release(struct sim_report *r);
/* Adds another replica's report to this one, which has capacity for all requests. */
void report_add(struct sim_report *r, const struct sim_report *other);
/* Whether the report meets the targets that are set. */
bool report_meets_targets(struct sim_report *r, const struct sim_options *o);
void report_print(struct sim_report *r, const struct sim_options *o, FILE *out);

#endif
