/* Pipeline stages on GPUs, as far as wait.c needs them. */
#ifndef QUIRE_KERNELS_CUDA_COMM_STAGES_H
#define QUIRE_KERNELS_CUDA_COMM_STAGES_H

#include "kernels/cuda/cuda.h"

/* Whether kernels may wait for a neighbouring stage (by NCCL). */
bool cuda_stages_linked(const struct cuda_backend *c);
/* Releases kernels that wait for stages that are gone. */
void cuda_stages_abort(struct cuda_backend *c);

#endif
