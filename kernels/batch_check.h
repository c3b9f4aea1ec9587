/* Whether a step fits a backend. */
#ifndef QUIRE_KERNELS_BATCH_CHECK_H
#define QUIRE_KERNELS_BATCH_CHECK_H

#include "kernels/backend.h"

/* What every backend refuses of a step: sizes beyond its own, and indices outside of
 * its block tables. `noted_tokens` of a sequence have their ids beside the cache, where
 * penalties find them. Errors begin with the backend's name. */
int batch_check(const struct backend_config *c, const char *name, int64_t noted_tokens,
                const struct batch *b, struct err *e);

#endif
