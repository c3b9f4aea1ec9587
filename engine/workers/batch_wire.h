/* Serialises a batch for ranks in other processes: one piece of memory, written once,
 * read in place.
 *
 *     struct head │ array │ array │ …        in the order of BATCH_ARRAYS, each padded
 *                                            to 16 bytes
 *
 * The format is that of this machine and version: ranks compare versions before the
 * first message. The reader trusts no value: every count, id, slot and slice is checked
 * against the rank's own sizes, so that a torn or foreign message is an error. */
#ifndef QUIRE_ENGINE_WORKERS_BATCH_WIRE_H
#define QUIRE_ENGINE_WORKERS_BATCH_WIRE_H

#include "engine/workers/executor.h"

/* Size of the largest message for an executor of these sizes. */
size_t batch_wire_max(const struct executor_info *x);
/* Writes b's message to `at`, which is aligned to 16, and returns its size in bytes;
 * `at` NULL: only returns the size. */
size_t batch_wire_write(void *at, const struct batch *b);
/* Reads a message, which is aligned to 16 and must outlive `ret`: its arrays point into
 * it. ERR_INVALID: not a batch for an executor of these sizes. */
int batch_wire_read(struct batch *ret, const void *at, size_t n_bytes,
                    const struct executor_info *x, struct err *e);

#endif
