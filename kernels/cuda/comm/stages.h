/* Of the stages of a pipeline, what waiting needs to know. */
#ifndef QUIRE_KERNELS_CUDA_COMM_STAGES_H
#define QUIRE_KERNELS_CUDA_COMM_STAGES_H

#include "kernels/cuda/cuda.h"

/* Whether the device itself waits for the stage before or after it. */
bool cuda_stages_linked(const struct cuda_backend *c);
/* The others are gone: let the device's kernels go. */
void cuda_stages_abort(struct cuda_backend *c);

#endif
