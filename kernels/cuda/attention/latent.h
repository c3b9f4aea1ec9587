/* Products by head of a few rows (latent.cu), beside those of launch.h. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_LATENT_H
#define QUIRE_KERNELS_CUDA_ATTENTION_LATENT_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* launch_head_linear for at most 8 rows, whose sums are not in that one's order. False:
 * not for this shape or type; nothing was done. */
bool launch_head_linear_few(const struct head_linear_args *a, int type, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
