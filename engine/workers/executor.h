/* The seam between the engine and what computes: launch a batch, wait for its results.
 *
 * Real ones: runner.c (one rank: a model on a backend), null.c (answers at once),
 * ranks.c (many). In tests: the oracle, whose memory holds token ids. Launches take
 * effect in order; at most `depth` launches may be outstanding when another is made (so
 * depth + 1 in flight), and waits return results in launch order.
 */
#ifndef QUIRE_ENGINE_WORKERS_EXECUTOR_H
#define QUIRE_ENGINE_WORKERS_EXECUTOR_H

#include "kernels/batch.h"

struct settings;
struct model_config;

struct executor_info {
    int32_t vocab;   /* width of the logits */
    int32_t max_len; /* longest sequence it can hold */
    int32_t n_blocks, n_host_blocks;
    int32_t block_size; /* tokens */
    int64_t block_bytes;
    int32_t max_num_seqs; /* table rows */
    int32_t max_num_batched_tokens;
    int32_t max_samples; /* sampling rows, and rows of the output head, of a step */
    int32_t depth;
    int32_t n_ranks;    /* processes that share the model; 0: it is not cut */
    bool sets_up_sizes; /* the first step of a size takes long: sizes are tried at start */
    /* large steps are computed best in multiples of so many tokens; 0: no matter */
    int32_t step_quantum;
    int32_t target_itl_us; /* what suits the device where target_itl_ms leaves it open; 0: none */
    int32_t shared_itl_us; /* the same while tenants share it (policy: fair) */
    char device[160];
    char dtype[16];
};

struct executor {
    struct executor_info info;
    /* The arrays of `b` are not read after return. ERR_DEVICE is sticky. */
    int (*launch)(struct executor *x, const struct batch *b, struct err *e);
    /* Results of the oldest launch not waited for; arrays hold until the next wait but
     * one. */
    int (*wait)(struct executor *x, struct results *ret, struct err *e);
    void (*free)(struct executor *x);
    /* Whether it could still compute, asked now and then while nothing runs: 0, or
     * ERR_DEVICE and why not. (optional) */
    int (*check)(struct executor *x, struct err *e);
    /* Bit r: rank r computes. Any thread. (optional: one rank) */
    uint64_t (*ranks_up)(struct executor *x);
};

/* runner.c: a model (its directory and configuration) on the backend that the settings
 * ask for, pools sized from them. */
int runner_open(struct executor **ret, const struct settings *s, const char *dir,
                const struct model_config *c, struct err *e);
/* ranks.c: the same on tensor_parallel_size ranks, one process each, of which this one
 * is the first. */
int ranks_open(struct executor **ret, const struct settings *s, const char *dir,
               const struct model_config *c, struct err *e);
/* null.c: no model; every sample is a letter or a space of the byte tokenizer, at once
 * or at the pace in the model's name. */
bool is_null_model(const char *model);
int null_open(struct executor **ret, const struct settings *s, struct err *e);

#endif
