/* Hidden states of draft heads: launchers of hidden.cu, operations of hidden.c. */
#ifndef QUIRE_KERNELS_CUDA_STEP_HIDDEN_H
#define QUIRE_KERNELS_CUDA_STEP_HIDDEN_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a step, and the blocks that keep hidden states of the same type. */
struct hidden_args {
    void *row;           /* [rows, cols] of the step's tokens */
    int64_t row_stride;  /* elements */
    char *block;         /* hidden states of block 0 */
    int64_t block_bytes; /* from block to block */
    int32_t block_size;  /* tokens */
    int32_t width;       /* elements of a token */
    int32_t first, cols; /* the elements that rows have */
    int32_t rows;
    const int32_t *slot; /* [rows] of the tokens; below 0: nowhere */
};

/* From rows to blocks, and the reverse; where a slot is below 0 a row becomes zero. */
void launch_hidden_store(const struct hidden_args *a, int type, cudaStream_t stream);
void launch_hidden_load(const struct hidden_args *a, int type, cudaStream_t stream);
/* out[i] = own[token_src of i]; zero where there is none. */
void launch_hidden_own(void *out, int64_t out_stride, const void *own, int64_t own_stride,
                       int32_t own_rows, const struct step_header *header, int32_t rows,
                       int32_t cols, int type, cudaStream_t stream);
/* out[i] = row where token_src of i is TOKEN_MASKED. */
void launch_hidden_masked(void *out, int64_t out_stride, const void *row,
                          const struct step_header *header, int32_t rows, int32_t cols, int type,
                          cudaStream_t stream);
/* As backend_ops.spread: x and id have n columns. */
void launch_spread(float *out, int64_t out_stride, const float *x, int64_t x_stride,
                   const float *id, int32_t rows, int32_t vocab, int32_t n, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
