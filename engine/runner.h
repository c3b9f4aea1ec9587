/* The decisions of runner.c that are worth a test of their own: what the settings leave open. */
#ifndef QUIRE_ENGINE_RUNNER_H
#define QUIRE_ENGINE_RUNNER_H

#include "config/settings.h"
#include "engine/executor.h"
#include "models/model.h"

/* Sequences, tokens, sampling rows of a step and the longest sequence, by device: into `ret`. */
int runner_limits(struct executor_info *ret, const struct settings *s, const struct model_config *c, bool gpu,
                  struct err *e);
/* Blocks for the device and the host, from the settings and the memory there is once the weights are in place. ret->block_bytes
 * is set; ret->max_len shrinks to what the pool holds unless max_model_len was given. */
int runner_pools(struct executor_info *ret, const struct settings *s, const struct backend_memory *m, bool gpu,
                 struct err *e);

#endif
