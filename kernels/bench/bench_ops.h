/* What single operations of a backend take: `quire bench kernels`.
 *
 * Shapes are those of Llama-3.1-8B in bf16, on a CPU a small model's. Every figure is
 * the median of seven steps' device time over the calls in a step, operands rotated so
 * that nothing is found in the cache. Beside it stand the bytes that the operation must
 * move and the sums it must do, against the ceilings measured first in the same run:
 * reading memory (one row times 4 GiB of weights), copying it (blocks of the cache),
 * and a large matrix product.
 */
#ifndef QUIRE_KERNELS_BENCH_BENCH_OPS_H
#define QUIRE_KERNELS_BENCH_BENCH_OPS_H

#include <stdio.h>

#include "config/base/base.h"

/* Measure `what` on the device, and print to `out`: of linear, decode, prefill, glue,
 * sample; all where none is named. ERR_INVALID names a word that is none of these. */
int bench_run(const char *device, int n_what, char **what, FILE *out, struct err *e);

#endif
