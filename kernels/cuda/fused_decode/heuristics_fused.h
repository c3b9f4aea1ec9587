/* Which operations may join a fused launch (fused_decode.h), as pure functions.
 *
 * Each appends an operation over `rows` rows to `a`. False: it cannot be fused, or not
 * with what `a` holds, and nothing has changed.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_HEURISTICS_FUSED_H
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_HEURISTICS_FUSED_H

#include "kernels/backend.h"
#include "kernels/cuda/fused_decode/fused_decode.h"

/* How launches of few rows read w, with activations of type `act` (enum fused_format);
 * -1: they do not. */
int32_t fused_format_of(struct mat w, enum dtype act);
/* Sets the op's weight. */
void fused_set_weight(struct fused_op *p, struct mat w);
/* out = x w^T with the epilogue. */
bool fused_push_linear(struct fused_args *a, int32_t rows, struct mat out, struct mat x,
                       struct mat w, const struct epilogue *ep);
/* out = norm(x). */
bool fused_push_norm(struct fused_args *a, int32_t rows, struct mat out, struct mat x,
                     const struct norm *n);
/* x += y; out = norm(x). y must be the last op's result; partial: each rank's
 * summand. */
bool fused_push_add_norm(struct fused_args *a, int32_t rows, struct mat out, struct mat x,
                         struct mat y, const struct norm *n, bool partial);
bool fused_push_linear_gated(struct fused_args *a, int32_t rows, struct mat out, struct mat x,
                             struct mat w, struct mat bias, enum activation act);
/* qkv must be the last op's result. `at` holds the cache and the rows' positions and
 * slots; the rest of it is filled in here. */
bool fused_push_rope_kv(struct fused_args *a, int32_t rows, struct mat qkv, const struct rope *r,
                        const struct attention *attention, const struct fused_rope *at);
#endif
