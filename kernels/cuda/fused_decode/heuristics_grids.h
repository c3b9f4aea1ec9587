/* Whether the grids of products of few rows read memory fast enough to be worth it. */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_HEURISTICS_GRIDS_H
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_HEURISTICS_GRIDS_H

#include "kernels/cuda/fused_decode/small_rows.h"

/* small_tile_of, or small_codes_tile. */
typedef struct small_tile small_tile_fn(const struct fused_op *p, int32_t n_blocks);

/* Blocks, one on a multiprocessor, that read as fast as memory of so many GB/s gives;
 * 0: unknown. */
int32_t memory_blocks(int32_t memory_gbs);
/* Whether all products of `a`, which small_plan or small_codes_plan takes, have
 * enough blocks on a device of n_blocks multiprocessors, `memory` of which take all
 * of its bandwidth (0: unknown). One of too few has enough while it may become a sum
 * that has. */
bool small_grids_fill(const struct fused_args *a, small_tile_fn *tile, int32_t n_blocks,
                      int32_t memory);

#endif
