/* A batch as bytes, for ranks in other processes: one piece of memory, written once,
 * read in place.
 *
 *     struct head │ array │ array │ …        in the order of BATCH_ARRAYS, each padded
 *                                            to 16 bytes
 *
 * The bytes are of this machine and this version: ranks compare versions before the
 * first. A reader trusts nothing of them: every count, id, slot and slice is checked
 * against what the rank holds, so that a torn or foreign message is an error.
 */
#ifndef QUIRE_ENGINE_WORKERS_BATCH_WIRE_H
#define QUIRE_ENGINE_WORKERS_BATCH_WIRE_H

#include "engine/workers/executor.h"

/* The largest message for an executor of these sizes. */
size_t batch_wire_max(const struct executor_info *x);
/* Bytes of b's message; `at` NULL: only that. `at` is aligned to 16. */
size_t batch_wire_write(void *at, const struct batch *b);
/* ret's arrays point into the message, which is aligned to 16. ERR_INVALID: it is not a
 * batch for an executor of these sizes. */
int batch_wire_read(struct batch *ret, const void *at, size_t n_bytes,
                    const struct executor_info *x, struct err *e);

#endif
