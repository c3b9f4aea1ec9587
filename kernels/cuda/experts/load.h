/* How a step's layers of experts were loaded (struct expert_load of batch.h).
 *
 * The routing of each layer adds an expert's pairs to a row of counts of its own. One
 * launch at the end of a step adds all rows up, leaves them zero, and writes the sums
 * of all steps so far to host memory, where they are read once a step is done: they may
 * have a part of the next step already, which then counts for this one. */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_LOAD_H
#define QUIRE_KERNELS_CUDA_EXPERTS_LOAD_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counts of a step; layers behind those that fit are not counted. */
enum { LOAD_COUNTS = 1 << 16 };

/* Sums over steps. */
struct load_sums {
    uint64_t rows, peak; /* as in struct expert_load */
};

/* counts [n_layers, n]; sums: of steps, on the device, and their copy in pinned host
 * memory. */
void launch_expert_load(int32_t *counts, int32_t n_layers, int32_t n, struct load_sums *sums,
                        struct load_sums *copy, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
