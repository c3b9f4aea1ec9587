/* The executor of one rank (runner.c, opened by runner_open in executor.h): how a rank
 * of many is opened, and the decisions about limits and pools, which have tests of
 * their own. */
#ifndef QUIRE_ENGINE_WORKERS_RUNNER_H
#define QUIRE_ENGINE_WORKERS_RUNNER_H

#include "config/settings/settings.h"
#include "engine/workers/executor.h"
#include "kernels/comm/comm.h"
#include "kernels/comm/pipeline.h"
#include "models/model.h"

/* The place of one rank among the ranks of a model. */
struct rank_place {
    struct pipeline_place at;             /* stage, and tensor-parallel rank within it */
    int32_t local_rank, local_world_size; /* rank among the ranks on this machine; their number */
    struct comm *comm;                    /* all-reduce within the stage; NULL: one rank a stage */
    struct pipeline *pipeline;            /* between stages; NULL: one stage */
    uint64_t draft;                       /* model_digest of the draft model; 0: none */
    bool direct;                          /* steps run inside launch, on the calling thread */
    /* Called between sizing the KV pools (x) and allocating them: lowers x to the
     * smallest pools of all ranks. */
    int (*agree)(struct rank_place *place, struct executor_info *x, const struct model *m,
                 struct err *e);
};

/* runner_open_both for one rank of many; `draft` NULL: without one. `place` must
 * outlive the executors. */
int runner_open_rank(struct executor **ret, struct executor **ret_draft, const struct settings *s,
                     const char *dir, const struct model_config *c,
                     const struct runner_draft *draft, struct rank_place *place, struct err *e);
/* Resolves device `auto` to cuda if a GPU opens, else to cpu, so that all ranks use one
 * kind of device. An explicit device is not probed here: the ranks open it together. */
void runner_choose_device(struct settings *s);
/* The data type of the weights on the device. */
enum dtype runner_dtype(const struct settings *s, const struct model_config *c);
/* The type of cached keys and values beside activations of type `act`. By default a
 * CPU, whose activations are float32, rounds keys and values to bfloat16 as GPUs do,
 * unless the weights are float32: its attention is faster and reads half as many bytes.
 * Latents keep the activations' type: each is the key and the value of all heads. */
enum dtype runner_kv_dtype(const struct settings *s, const struct model_config *c, enum dtype act);

/* Sets the limits of a step (sequences, tokens, sampling rows) and the longest
 * sequence, by device. */
int runner_limits(struct executor_info *ret, const struct settings *s, const struct model_config *c,
                  bool gpu, struct err *e);
/* The same for a draft model `c` beside `target`, by its own settings. */
int runner_draft_limits(struct executor_info *ret, const struct settings *s,
                        const struct model_config *c, const struct model_config *target, bool gpu,
                        struct err *e);
/* Sets the number of KV blocks on the device and the host, from the settings and the
 * memory that is free once the weights are loaded. ret->block_bytes is an input;
 * ret->max_len is lowered to what the pool holds unless max_model_len was given. */
int runner_pools(struct executor_info *ret, const struct settings *s,
                 const struct backend_memory *m, bool gpu, struct err *e);

#endif
