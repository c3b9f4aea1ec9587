/* Micro-benchmarks of a backend's operations: `quire bench kernels`.
 *
 * Shapes are those of Llama-3.1-8B in bf16; on a CPU, those of a small model. A time is
 * the median device time of seven steps divided by the calls in a step, with operands
 * rotated so that none is found in a cache. Each line also prints the bytes that the
 * operation has to move and its floating-point operations, as fractions of ceilings
 * that the same run measures first: reading memory (one row times 4 GiB of weights),
 * copying it (blocks of the cache), and a large matrix product.
 */
#ifndef QUIRE_KERNELS_BENCH_BENCH_OPS_H
#define QUIRE_KERNELS_BENCH_BENCH_OPS_H

#include <stdio.h>

#include "config/base/base.h"

/* Measure what[n_what], of linear, decode, prefill, glue and sample, on the device, and
 * print to `out`; n_what 0: all. ERR_INVALID: a word is none of these. */
int bench_run(const char *device, int n_what, char **what, FILE *out, struct err *e);

#endif
