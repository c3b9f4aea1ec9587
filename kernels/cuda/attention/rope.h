/* Rotation of queries and keys whose norms stand behind it (struct rope's norm_last);
 * the usual order is launch_rope_kv's (launch.h). */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ROPE_H
#define QUIRE_KERNELS_CUDA_ATTENTION_ROPE_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

void launch_rope_kv_late(void *qkv, int64_t stride, const struct rope_args *r,
                         const struct kv_view *kv, const int32_t *position, const int32_t *slot,
                         int32_t rows, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
