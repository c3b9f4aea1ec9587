/* The interface between the engine and what computes: launch a batch, wait for its
 * results.
 *
 * Implementations: runner.c (one rank: a model on a backend), null.c (answers at once),
 * ranks.c (several ranks); in tests an oracle that stores token ids as its KV cache.
 * Launches take effect in order; at most `depth` may be outstanding when another is
 * made (so depth + 1 are in flight), and waits return results in launch order. */
#ifndef QUIRE_ENGINE_WORKERS_EXECUTOR_H
#define QUIRE_ENGINE_WORKERS_EXECUTOR_H

#include "config/base/limits.h"
#include "kernels/batch.h"

struct settings;
struct model_config;

struct executor_info {
    int32_t vocab;                   /* width of the logits */
    int32_t max_len;                 /* tokens of the longest sequence it can hold */
    int32_t n_blocks, n_host_blocks; /* KV blocks on the device; in swap space */
    int32_t block_size;              /* tokens */
    int64_t block_bytes;             /* of one block of a KV group, on this rank */
    int64_t draft_block_bytes;       /* of a block in the draft model's cache; 0: none */
    int32_t n_kv_groups;             /* KV groups; 0: one */
    /* [n_kv_groups] tokens that its layers see, 0: all, KV_WINDOW_STATE: it holds
     * recurrent states; 0 for the first group */
    int32_t kv_window[LIMIT_KV_GROUPS];
    bool kv_chunked;           /* they see those of a chunk of so many (struct attention) */
    int32_t snapshot_distance; /* tokens between snapshots of states; 0: there are none */
    int32_t kv_window_align;   /* of what the device reads before a window (struct backend); 0: 1 */
    int32_t max_num_seqs;      /* rows of the block table: sequences of a step */
    int32_t max_num_batched_tokens; /* tokens of a step */
    int32_t max_samples;            /* sampling rows, and rows of the output head, of a step */
    int32_t depth;                  /* launches that may be outstanding when another is made */
    int32_t n_ranks;                /* processes that share the model; 0: not sharded */
    /* Prefill takes far longer than planning and launching a step: while a step with
     * prefill runs, the next one is not planned, so that what arrives joins it. */
    bool plans_behind_prefill;
    bool sets_up_sizes; /* the first step of a size is slow: the usual sizes are run at start */
    /* large steps run best in multiples of so many tokens; 0: any number */
    int32_t step_quantum;
    int32_t target_itl_us; /* default for target_itl_ms on this device, microseconds; 0: none */
    int32_t shared_itl_us; /* the same while several tenants are active (policy: fair) */
    char device[160];      /* "cpu: …", "cuda: NVIDIA H200" */
    char dtype[16];        /* of the weights: "bfloat16", … */
    char kv_dtype[16];     /* of cached keys and values, likewise; "": there are none */
};

static inline int32_t executor_kv_groups(const struct executor_info *x)
{
    return MAX(x->n_kv_groups, 1);
}

/* Bytes of a token that all layers see, on this rank. */
static inline int64_t executor_token_bytes(const struct executor_info *x)
{
    return x->block_size > 0 ? x->block_bytes * executor_kv_groups(x) / x->block_size : 0;
}

struct executor {
    struct executor_info info;
    /* Starts a step. The arrays of `b` are not read after return. ERR_DEVICE is
     * sticky. */
    int (*launch)(struct executor *x, const struct batch *b, struct err *e);
    /* Waits for the oldest outstanding launch. The arrays of `ret` are valid until the
     * next wait but one. */
    int (*wait)(struct executor *x, struct results *ret, struct err *e);
    /* Gives a launched step its late masks: mask[n], where n is the batch's
     * n_late_mask, once the results of the step before were waited for. The step
     * samples no row with a late mask before. `mask` NULL: none will come any more, now
     * or later, and rows are sampled without. Any thread, one at a time. (optional: no
     * step has any) */
    int (*masks)(struct executor *x, uint64_t step, const struct late_mask *mask, int32_t n,
                 struct err *e);
    /* Microseconds that launches have waited so far because the device took nothing:
     * its queue was full, or it loaded a kernel. (optional: they never wait) */
    int64_t (*launch_waits_us)(struct executor *x);
    void (*free)(struct executor *x); /* drops outstanding launches */
    /* Called now and then while no step runs: 0, or ERR_DEVICE and why the executor can
     * no longer compute. (optional) */
    int (*check)(struct executor *x, struct err *e);
    /* Bit r: rank r is ready. Any thread. (optional: one rank) */
    uint64_t (*ranks_up)(struct executor *x);
};

/* runner.c: a model (its directory and configuration) on the backend that the settings
 * name, with pools sized by them. */
int runner_open(struct executor **ret, const struct settings *s, const char *dir,
                const struct model_config *c, struct err *e);
/* A draft model or draft head: its files, its configuration, and settings of its own.
 * All borrowed, for the time of a call. */
struct runner_draft {
    const char *dir;
    const struct model_config *config;
    const struct settings *settings;
};
/* The same with a draft model or head beside the model, in *ret_draft, which is freed
 * first. It has as many blocks and slots as the model, under the same ids; the cache of
 * the model leaves room for its own. All its layers are in one KV group, and a head
 * reads the hidden states that the model keeps for it. */
int runner_open_both(struct executor **ret, struct executor **ret_draft, const struct settings *s,
                     const char *dir, const struct model_config *c,
                     const struct runner_draft *draft, struct err *e);
/* ranks.c: runner_open on tensor_parallel_size * pipeline_parallel_size ranks, one
 * process each; this process is rank 0. `draft` NULL: none; else as runner_open_both,
 * and divided as the model is. ERR_UNSUPPORTED: a draft model on ranks with GPUs, or in
 * stages. */
int ranks_open(struct executor **ret, struct executor **ret_draft, const struct settings *s,
               const char *dir, const struct model_config *c, const struct runner_draft *draft,
               struct err *e);
/* null.c: no model; every sample is a letter or a space of the byte tokenizer, at once
 * or at the rate given in the model's name. */
bool is_null_model(const char *model);
int null_open(struct executor **ret, const struct settings *s, struct err *e);

#endif
