/* Kernels of latents that launch.h's launchers choose (latent.cu, latent_mma.cu). */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_LATENT_H
#define QUIRE_KERNELS_CUDA_ATTENTION_LATENT_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* launch_head_linear for some hundred rows, whose sums are not in that one's order.
 * False: not for this shape or type; nothing was done. */
bool launch_head_linear_few(const struct head_linear_args *a, int type, cudaStream_t stream);

/* launch_latent_mma on Hopper, of one token a block (w->tokens), without merging
 * splits. */
bool launch_latent_wgmma(const struct latent_args *a, const struct step_arrays *s,
                         const struct latent_splits *p, const struct latent_work *w,
                         cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
