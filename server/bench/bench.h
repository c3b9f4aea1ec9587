/* `quire bench`: the interfaces between its files. `offline` drives the engine in this
 * process, `serve` any OpenAI-compatible server over HTTP. */
#ifndef QUIRE_SERVER_BENCH_BENCH_H
#define QUIRE_SERVER_BENCH_BENCH_H

#include <stdio.h>

#include "config/base/base.h"

/* `quire bench …`: the arguments after the word bench; an exit status. */
int bench_main(int argc, char **argv);

/* ---- options: bench_options.c ---- */

struct bench_options {
    /* the load */
    /* requests 0: all of the workload, or by the concurrency; lengths in tokens */
    int64_t requests, input_len, output_len;
    char *workload; /* path of a file of lengths, or NULL */
    char *script;   /* path of a file of prompts and their answers, or NULL */
    int64_t vocab;  /* prompts are random ids below it; 0: the model's (offline), 256 (serve) */
    int64_t seed;   /* -1: not given */
    /* sampling */
    double temperature, top_p;
    int64_t top_k, n, beam_width;
    bool stop_at_eos;
    /* serve */
    char *url, *api_key, *model; /* NULL: the default, none, none */
    int64_t concurrency;         /* streams open at a time, at most */
    double request_rate;         /* per second, Poisson arrivals; 0: a closed loop */
    /* offline */
    /* the chance that a draft holds, in a second run of the same requests;
     * -1: one run, as the engine's settings say */
    double acceptance;
    int64_t warmup; /* tokens per request in a first run that is not measured */
    int64_t settle; /* seconds to wait before it */
    char *schemas;  /* path of a file of JSON Schemas, or NULL */
    /* report */
    char *json, *name; /* output file and name of the run, or NULL */
};

/* Remove bench's own flags from argv; the *ret_argc arguments that stay, in order, are
 * settings. Strings point into argv. ERR_INVALID names the flag. */
int bench_options_read(struct bench_options *ret, int argc, char **argv, int *ret_argc,
                       struct err *e);
void bench_options_help(FILE *out);

/* ---- the load: bench_load.c ---- */

struct bench_item {
    int32_t n_prompt, max_tokens; /* lengths of prompt and output */
    int64_t start_us;             /* from the start of the run; 0 in a closed loop */
    /* [n_prompt], [max_tokens] ids of a script, the answer behind the prompt in the
     * same memory; NULL: the prompt is random */
    int32_t *prompt, *answer;
};

struct bench_load {
    struct bench_item *item;              /* [n] */
    int32_t n, max_prompt;                /* max_prompt: the longest prompt */
    int64_t prompt_tokens, output_tokens; /* sums over all items */
    uint64_t seed;                        /* of the prompts */
    int32_t vocab;                        /* prompts are random ids below it */
};

/* Lengths from the workload file or the options, start times from request_rate. */
int bench_load_make(struct bench_load *ret, const struct bench_options *o, struct err *e);
void bench_load_release(struct bench_load *l);
/* Make the prompt of item i in ret [n_prompt]; the same seed gives the same ids. */
void bench_load_prompt(const struct bench_load *l, int32_t i, int32_t *ret);

/* ---- schemas: bench_schemas.c ---- */

struct bench_schemas {
    char **text; /* [n] JSON Schemas, owned */
    int32_t n;
};

/* The lines of a file that are not empty. ERR_IO; ERR_INVALID: there is none;
 * ERR_NOMEM. */
int bench_schemas_read(struct bench_schemas *ret, const char *path, struct err *e);
void bench_schemas_release(struct bench_schemas *s);

/* ---- figures: bench_report.c ---- */

/* A histogram of times in log-linear buckets, exact to 1 %. All zeros: empty. */
enum { LATENCY_SUB = 128, LATENCY_OCTAVES = 40 };
struct latency_hist {
    uint64_t count[LATENCY_OCTAVES * LATENCY_SUB]; /* by bucket_of in bench_report.c */
    uint64_t n;                                    /* number of values */
    double sum_us;
    int64_t min_us, max_us; /* exact */
};
void latency_hist_add(struct latency_hist *s, int64_t us);
/* In milliseconds; NaN if empty. p in 0 .. 100. */
double latency_hist_percentile_ms(const struct latency_hist *s, double p);
double latency_hist_mean_ms(const struct latency_hist *s);

/* A report: a flat list of named values, printed as a table and written as JSON. */
struct bench_report;
int bench_report_new(struct bench_report **ret, const char *what, const struct bench_options *o,
                     struct err *e);
void bench_report_free(struct bench_report *r);
void bench_report_number(struct bench_report *r, const char *key, double value, const char *unit);
/* Append to a list that only the JSON has. */
void bench_report_add(struct bench_report *r, const char *key, double value);
void bench_report_text(struct bench_report *r, const char *key, const char *value);
/* mean, p50, p90, p99, max. */
void bench_report_latency(struct bench_report *r, const char *key, const struct latency_hist *s);
/* The table to `out`, the JSON to the file of --json, if any. */
int bench_report_write(const struct bench_report *r, FILE *out, const struct bench_options *o,
                       struct err *e);

/* Redraw the progress line on stderr, if that is a terminal. `fraction`: 0 .. 1. */
void bench_progress(double fraction, const char *text);
void bench_progress_end(void);

/* ---- the two benchmarks ---- */

int bench_offline(const struct bench_options *o, int argc, char **argv, struct err *e);
int bench_serve(const struct bench_options *o, struct err *e);

#endif
