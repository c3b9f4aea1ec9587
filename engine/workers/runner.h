/* The decisions of runner.c that are worth a test of their own: what the settings leave
 * open. */
#ifndef QUIRE_ENGINE_WORKERS_RUNNER_H
#define QUIRE_ENGINE_WORKERS_RUNNER_H

#include "config/settings/settings.h"
#include "engine/workers/executor.h"
#include "kernels/comm/comm.h"
#include "kernels/comm/pipeline.h"
#include "models/model.h"

/* One rank of a model that several share. */
struct rank_place {
    struct pipeline_place at;
    int32_t local_rank, local_world_size; /* its place among the ranks of this machine */
    struct comm *comm;                    /* NULL: one rank a stage */
    struct pipeline *pipeline;            /* NULL: one stage */
    bool direct; /* steps are computed inside launch, on the thread that calls it */
    /* Between sizing the pools (x) and making them: all ranks settle for the least. */
    int (*agree)(struct rank_place *place, struct executor_info *x, const struct model *m,
                 struct err *e);
};

/* runner_open for one rank of many. `share` outlives the executor. */
int runner_open_rank(struct executor **ret, const struct settings *s, const char *dir,
                     const struct model_config *c, struct rank_place *place, struct err *e);
/* `auto` becomes cuda or cpu, so that all ranks compute on one kind of device; a GPU
 * that is there is not passed over. One that is asked for is not looked at: the ranks
 * open it at once, all together. */
void runner_choose_device(struct settings *s);
/* The type of the weights on the device. */
enum dtype runner_dtype(const struct settings *s, const struct model_config *c);

/* Sequences, tokens, sampling rows of a step and the longest sequence, by device: into
 * `ret`. */
int runner_limits(struct executor_info *ret, const struct settings *s, const struct model_config *c,
                  bool gpu, struct err *e);
/* Blocks for the device and the host, from the settings and the memory there is once
 * the weights are in place. ret->block_bytes is set; ret->max_len shrinks to what the
 * pool holds unless max_model_len was given. */
int runner_pools(struct executor_info *ret, const struct settings *s,
                 const struct backend_memory *m, bool gpu, struct err *e);

#endif
