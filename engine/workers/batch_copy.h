/* A batch with memory of its own, for an executor that computes after launch
 * returned. */
#ifndef QUIRE_ENGINE_WORKERS_BATCH_COPY_H
#define QUIRE_ENGINE_WORKERS_BATCH_COPY_H

#include "kernels/batch.h"

struct batch_copy {
    struct batch batch; /* its arrays point into the arena */
    char *arena;        /* [cap] owned */
    size_t cap;         /* bytes */
};

/* Reserves n_bytes > 0 (batch_wire_max); pages are touched only as they are needed. 0
 * or ERR_NOMEM. */
int batch_copy_reserve(struct batch_copy *c, size_t n_bytes, struct err *e);
/* Copies `b` with all its arrays, reusing the arena. 0 or ERR_NOMEM. A zeroed struct is
 * empty. */
int batch_copy_set(struct batch_copy *c, const struct batch *b, struct err *e);
void batch_copy_release(struct batch_copy *c);

#endif
