/* Products of 9 to 64 rows of e4m3 codes on Hopper: the tiles of small_rows.h, whose
 * stages hold 128 columns of codes in place of 64 of bf16.
 *
 * A row of activations is quantised by its greatest magnitude, so all of it has to
 * be there before its product: a launch of its own in front, with the norm in it
 * where there is one. The product's blocks stream their weights meanwhile. Sums of
 * 128 columns, which Hopper adds up with few bits, are added up in float32.
 *  */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_CODES_H
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_CODES_H

#include "kernels/cuda/fused_decode/fused_decode.h"
#include "kernels/cuda/fused_decode/small_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CODES_DEPTH = 128 }; /* columns of a stage */

/* Every tile there is a kernel for: TILE(width, split, kind). */
#define CODES_TILES(TILE)     \
    TILE(24, 1, SMALL_PLAIN)  \
    TILE(32, 1, SMALL_PLAIN)  \
    TILE(40, 1, SMALL_PLAIN)  \
    TILE(48, 1, SMALL_PLAIN)  \
    TILE(56, 1, SMALL_PLAIN)  \
    TILE(64, 1, SMALL_PLAIN)  \
    TILE(80, 1, SMALL_PLAIN)  \
    TILE(96, 1, SMALL_PLAIN)  \
    TILE(128, 1, SMALL_PLAIN) \
    TILE(64, 1, SMALL_GATED)  \
    TILE(96, 1, SMALL_GATED)  \
    TILE(112, 1, SMALL_GATED) \
    TILE(128, 1, SMALL_GATED) \
    TILE(160, 1, SMALL_GATED) \
    TILE(192, 1, SMALL_GATED) \
    TILE(224, 1, SMALL_GATED) \
    TILE(32, 2, SMALL_SUM)    \
    TILE(40, 2, SMALL_SUM)    \
    TILE(48, 2, SMALL_SUM)    \
    TILE(56, 2, SMALL_SUM)    \
    TILE(64, 2, SMALL_SUM)    \
    TILE(80, 2, SMALL_SUM)    \
    TILE(96, 2, SMALL_SUM)    \
    TILE(128, 2, SMALL_SUM)

/* The tile for op `p` on a device of n_blocks multiprocessors; width 0: there is none.
 * Pure. */
struct small_tile small_codes_tile(const struct fused_op *p, int32_t n_blocks);
/* Whether all of `a` goes by these launches, of more rows than a fused launch. Pure. */
bool small_codes_plan(const struct fused_args *a, int32_t n_blocks);

/* A tensor map, a CUtensorMap at `ret`, of [rows, columns] bytes, `pitch` bytes
 * between rows, for boxes of box_rows by CODES_DEPTH with the 128-byte swizzle
 * (small_rows.cu). */
bool small_map_bytes(void *ret, const void *data, int64_t rows, int64_t columns, int64_t pitch,
                     int box_rows);

/* Allows the kernels their shared memory; where small_prepare has said that its run. */
void small_codes_prepare(void);
/* Enqueue a's operations. False: a launch failed, and the error is CUDA's last. */
bool launch_small_codes(const struct fused_args *a, int32_t n_blocks, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
