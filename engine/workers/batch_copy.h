/* A batch with memory of its own, for an executor that computes after launch has
 * returned. */
#ifndef QUIRE_ENGINE_WORKERS_BATCH_COPY_H
#define QUIRE_ENGINE_WORKERS_BATCH_COPY_H

#include "kernels/batch.h"

struct batch_copy {
    struct batch batch;
    char *arena;
    size_t cap;
};

/* Room for a batch of n_bytes > 0 (batch_wire_max), of which pages are touched as
 * they are needed. 0 or ERR_NOMEM. */
int batch_copy_reserve(struct batch_copy *c, size_t n_bytes, struct err *e);
/* Copy `b` with all its arrays; the memory is kept for the next copy. 0 or ERR_NOMEM.
 * Zeroed struct: empty. */
int batch_copy_set(struct batch_copy *c, const struct batch *b, struct err *e);
void batch_copy_release(struct batch_copy *c);

#endif
