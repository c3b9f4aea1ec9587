/* Mixed-input products of very few rows in whole numbers (few_int4.cu). */
#ifndef QUIRE_KERNELS_CUDA_MIXED_FEW_INT4_CUH
#define QUIRE_KERNELS_CUDA_MIXED_FEW_INT4_CUH

#include "kernels/cuda/mixed/mixed.h"

enum {
    FEW_INT4_ROWS = 4, /* of activations at most */
    /* of a block's part of the depth at most, so that its activations leave room for
     * codes */
    FEW_INT4_COLUMNS = 9216,
};

/* Enqueues a product of FUSED_INT4 in tiles `t`: m.s.rows rows of bf16 at x, at
 * multiples of 4 bytes. False: the launch failed. */
struct mixed_args;
bool launch_few_int4(struct small_tile t, const mixed_args &m, const void *x, int64_t x_stride,
                     cudaStream_t stream);

#endif
