/* The options of `quire simulate`: one table defines parsing, bounds and --help. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/simulate/simulate_impl.h"

enum option_type {
    OPTION_INT32,
    OPTION_INT64,
    OPTION_DOUBLE,
    OPTION_TEXT,
    OPTION_CHOICE,
    OPTION_BOOL
};

struct option_row {
    const char *name;
    int type;
    size_t offset;
    double least, most;
    const char *choices; /* OPTION_CHOICE: names by value, separated by '|' */
    const char *help;
};

#define ROW(name, type, field, least, most, choices, help) \
    {name, type, offsetof(struct sim_options, field), least, most, choices, help}

static const struct option_row option_rows[] = {
    ROW("rate", OPTION_DOUBLE, rate, 1e-6, 1e9, NULL,
        "requests a second, arriving as a Poisson process"),
    ROW("requests", OPTION_INT64, requests, 1, 1e9, NULL, "how many"),
    ROW("seed", OPTION_INT64, seed, 0, 9e15, NULL, "of everything random"),
    ROW("dataset", OPTION_TEXT, dataset, 0, 0, NULL,
        "lengths: sharegpt, alpaca, chat, recorded, or IN:OUT in tokens"),
    ROW("trace", OPTION_TEXT, trace, 0, 0, NULL,
        "file of 'arrival_s prompt output [n [beam]]' instead"),
    ROW("n", OPTION_INT32, n, 1, LIMIT_CHOICES, NULL, "samples a request"),
    ROW("beam", OPTION_INT32, beam, 0, LIMIT_CHOICES, NULL, "beam width, 0: no beam search"),
    ROW("shared-prefix", OPTION_INT32, shared_prefix, 0, LIMIT_MODEL_LEN, NULL,
        "tokens that every prompt begins with"),
    ROW("manager", OPTION_CHOICE, manager, 0, 0, "paged|orca-max|orca-pow2|orca-oracle|static",
        "memory manager"),
    ROW("preemption", OPTION_CHOICE, preemption, 0, 0, "auto|swap|recompute",
        "what happens to the newest group"),
    ROW("prefix-cache", OPTION_BOOL, prefix_cache, 0, 0, NULL, "reuse of prompts seen before"),
    ROW("kv-slots", OPTION_INT32, slots, 16, 1 << 30, NULL, "tokens that the KV memory holds"),
    ROW("kv-cache-dtype", OPTION_CHOICE, kv_cache_dtype, 0, 0, "bf16|fp8|int8",
        "type of keys and values: kv-slots, context-us and swap-block-us are those of bf16"),
    ROW("block-size", OPTION_INT32, block_size, 1, 1024, NULL, "tokens a block"),
    ROW("host-blocks", OPTION_INT32, host_blocks, 0, 1 << 24, NULL, "blocks of swap space"),
    ROW("max-num-seqs", OPTION_INT32, max_num_seqs, 1, LIMIT_NUM_SEQS, NULL,
        "sequences running at a time"),
    ROW("max-num-batched-tokens", OPTION_INT32, max_num_batched_tokens, 1, LIMIT_BATCHED_TOKENS,
        NULL, "tokens a step"),
    ROW("max-model-len", OPTION_INT32, max_len, 2, LIMIT_MODEL_LEN, NULL, "tokens a sequence"),
    ROW("replicas", OPTION_INT32, replicas, 1, 1024, NULL, "engines that share the requests"),
    ROW("routing", OPTION_CHOICE, routing, 0, 0, "round-robin|prefix",
        "which of them a request goes to"),
    ROW("target-latency", OPTION_DOUBLE, target_latency_s, 0, 1e6, NULL,
        "find the rate that keeps the latency a token below so many seconds"),
    ROW("target-ttft", OPTION_DOUBLE, target_ttft_s, 0, 1e6, NULL,
        "and the time to the first token below so many"),
    ROW("target-percentile", OPTION_INT32, target_percentile, 0, 99, NULL,
        "of requests that keep it; 0: in the mean"),
    ROW("cost-from", OPTION_TEXT, cost_from, 0, 0, NULL,
        "records of `quire bench offline`: what a step costs"),
    ROW("overhead-us", OPTION_DOUBLE, overhead_us, 0, 1e9, NULL, "of a step, whatever is in it"),
    ROW("request-us", OPTION_DOUBLE, request_us, 0, 1e9, NULL, "of a step for each request in it"),
    ROW("seq-us", OPTION_DOUBLE, seq_us, 0, 1e9, NULL, "of a step for each sequence in it"),
    ROW("weights-us", OPTION_DOUBLE, weights_us, 0, 1e9, NULL,
        "to read the weights once: the least a step takes"),
    ROW("token-us", OPTION_DOUBLE, token_us, 0, 1e9, NULL,
        "of computing one token when a step has many"),
    ROW("context-us", OPTION_DOUBLE, context_us, 0, 1e9, NULL,
        "to read one cached token's keys and values"),
    ROW("swap-block-us", OPTION_DOUBLE, swap_block_us, 0, 1e9, NULL,
        "to move one block to or from the host"),
    ROW("json", OPTION_BOOL, json, 0, 0, NULL, "the report as JSON"),
};

/* OPT-13B on one A100-40GB, as in the paper: 26 GB of weights, 12 GB for keys and
 * values, 819,200 bytes a token. The costs of a step and a sequence are fitted to the
 * batch sizes of the paper's Fig. 13. */
static const struct sim_options default_options = {
    .rate = 1,
    .requests = 1000,
    .seed = 1,
    .dataset = "sharegpt",
    .n = 1,
    .replicas = 1,
    .slots = 15700,
    .block_size = 16,
    .host_blocks = 0,
    .max_num_seqs = 256,
    .max_num_batched_tokens = 2560,
    .max_len = 2048,
    .preemption = PREEMPT_RECOMPUTE,
    .overhead_us = 7000,
    .seq_us = 250,
    .weights_us = 19500,
    .token_us = 150,
    .context_us = 0.62,
    .swap_block_us = 525,
};

static int choice_of(const char *choices, const char *text)
{
    size_t len = strlen(text);

    for (int i = 0;; i++) {
        size_t n = strcspn(choices, "|");
        if (n == len && strncmp(choices, text, n) == 0) {
            return i;
        }
        if (choices[n] == '\0') {
            return -1;
        }
        choices += n + 1;
    }
}

static int set_number(const struct option_row *row, void *field, const char *text, struct err *e)
{
    char *end;

    errno = 0;
    double x = strtod(text, &end);
    bool whole = row->type == OPTION_DOUBLE || x == floor(x);
    if (end == text || *end || errno || !isfinite(x) || !whole || x < row->least || x > row->most) {
        return err_set_param(
            e, ERR_INVALID, row->name, "--%s is '%s'; allowed are %s from %.9g to %.9g", row->name,
            text, row->type == OPTION_DOUBLE ? "numbers" : "whole numbers", row->least, row->most);
    }
    if (row->type == OPTION_DOUBLE) {
        *(double *)field = x;
    } else if (row->type == OPTION_INT64) {
        *(int64_t *)field = (int64_t)x;
    } else {
        *(int32_t *)field = (int32_t)x;
    }
    return 0;
}

static int set_option(struct sim_options *o, const struct option_row *row, const char *text,
                      struct err *e)
{
    void *field = (char *)o + row->offset;

    if (row->type == OPTION_TEXT) {
        *(const char **)field = text;
        return 0;
    }
    if (row->type != OPTION_CHOICE) {
        return set_number(row, field, text, e);
    }
    int value = choice_of(row->choices, text);
    if (value < 0) {
        return err_set_param(e, ERR_INVALID, row->name, "--%s is '%s'; allowed are %s", row->name,
                             text, row->choices);
    }
    *(int *)field = value;
    return 0;
}

static const struct option_row *row_of(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(option_rows); i++) {
        if (strcmp(option_rows[i].name, name) == 0) {
            return &option_rows[i];
        }
    }
    return NULL;
}

/* Costs from a file are read first, so that flags override them. */
static int read_costs(struct sim_options *o, int argc, char **argv, struct err *e)
{
    for (int i = 0; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--cost-from") == 0) {
            return sim_cost_read(o, argv[i + 1], e);
        }
    }
    return 0;
}

/* What a cache of 8 bits holds in the same memory. int8: with a scale of four bytes for
 * each 128 dims. */
static void apply_cache(struct sim_options *o)
{
    enum { HEAD_DIM = 128 };
    int32_t bytes = o->kv_cache_dtype == SIM_CACHE_FP8    ? HEAD_DIM
                    : o->kv_cache_dtype == SIM_CACHE_INT8 ? HEAD_DIM + 4
                                                          : 2 * HEAD_DIM;
    double share = (double)bytes / (2 * HEAD_DIM);

    o->slots = (int32_t)fmin((double)o->slots / share, 1 << 30);
    o->context_us *= share;
    o->swap_block_us *= share;
}

int sim_options_parse(struct sim_options *o, int argc, char **argv, struct err *e)
{
    *o = default_options;
    if (read_costs(o, argc, argv, e) < 0) {
        return e->code;
    }
    for (int i = 0; i < argc; i++) {
        const struct option_row *row = strncmp(argv[i], "--", 2) == 0 ? row_of(argv[i] + 2) : NULL;
        if (!row) {
            return err_set(e, ERR_INVALID, "unknown argument '%s'; see quire simulate --help",
                           argv[i]);
        }
        if (row->type == OPTION_BOOL) {
            *(bool *)((char *)o + row->offset) = true;
            continue;
        }
        if (i + 1 == argc) {
            return err_set_param(e, ERR_INVALID, row->name, "--%s needs a value", row->name);
        }
        int rc = set_option(o, row, argv[++i], e);
        if (rc < 0) {
            return rc;
        }
    }
    apply_cache(o);
    return 0;
}

void sim_options_help(void)
{
    printf("quire simulate: the serving scheduler and memory manager under a cost model; simulated "
           "time, no model\n\n");
    for (size_t i = 0; i < ARRAY_LEN(option_rows); i++) {
        const struct option_row *row = &option_rows[i];
        printf("  --%-24s %s%s%s\n", row->name, row->help, row->choices ? ": " : "",
               row->choices ? row->choices : "");
    }
    printf("\nThe defaults are OPT-13B on one A100-40GB. A step takes, in microseconds, overhead\n"
           "+ requests * request + sequences * seq + max(weights, tokens * token)\n"
           "+ cached tokens read * context + tokens copied between places * 2 * context\n"
           "+ blocks swapped * swap-block. Without paging a forked sequence is copied.\n");
}
