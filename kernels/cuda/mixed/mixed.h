/* Products of rows of bf16 with weights of codes on Hopper (mixed input: W4A16, W8A16).
 * Of 1 to 64 rows they take the place of those of small_rows.h, with the same
 * epilogues; of up to MIXED_MOST_ROWS they are launches of their own.
 *
 * Weights are the larger operand of the matrix instruction and come from registers,
 * where their codes are widened; activations are the other one. Each 128 columns are
 * summed by themselves and multiplied by their scale in float32, so no weight is
 * rounded. Those of QUANT_GROUPS, whose groups are shorter, are made whole, and
 * rounded as a bf16 is.
 *
 *   rows        activations   blocks
 *   1 to 16     8 or 16       one a multiprocessor, of four warpgroups, whose warps
 *                             multiply 16 weight rows each by themselves; FUSED_INT4 and
 *                             FUSED_MXFP4 of 1 to 4 rows as few_int4.cuh and
 *                             few_fp4.cuh say
 *   17 to 64    32 or 64      the same with a warpgroup's instruction of 64 weight rows:
 *                             while one widens codes, others multiply
 *   more        128           one, of two warpgroups, for each 128 rows
 *
 * A tile is 1, 2 or 4 times 64 weight rows, whose depth its warpgroups share.
 */
#ifndef QUIRE_KERNELS_CUDA_MIXED_MIXED_H
#define QUIRE_KERNELS_CUDA_MIXED_MIXED_H

#include "kernels/cuda/fused_decode/small_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#define MIXED_CONST constexpr __host__ __device__
#else
#define MIXED_CONST
#endif

enum {
    MIXED_FEW_ROWS = 16,   /* up to so many, warps multiply by themselves */
    MIXED_WIDE_ROWS = 128, /* of a block of products of more than SMALL_ROWS */
    MIXED_MOST_ROWS = 256, /* up to so many, they are faster than widened weights */
    MIXED_ROWS = 64,       /* weight rows of a matrix instruction */
    MIXED_GROUP = 128,     /* columns that are summed before their scale is applied */
};

/* Whether weights of the format lie in segments, of 512 columns. */
static inline MIXED_CONST bool mixed_in_segments(int32_t format)
{
    return format == FUSED_INT4 || format >= FUSED_MXFP4;
}

/* Whether they lie in QUANT_GROUPS. */
static inline MIXED_CONST bool mixed_in_groups(int32_t format)
{
    return format >= FUSED_GROUPS_4;
}

/* The depth of a product of k columns: those of QUANT_GROUPS are filled up. */
static inline MIXED_CONST int32_t mixed_depth(int32_t format, int32_t k)
{
    return mixed_in_groups(format) ? (k + FUSED_SEGMENT_K - 1) / FUSED_SEGMENT_K * FUSED_SEGMENT_K
                                   : k;
}

/* Every tile there is a kernel for: TILE(width, split), of all kinds; only four
 * warpgroups have those of 256. */
#define MIXED_TILES(TILE) \
    TILE(64, 1)           \
    TILE(64, 2)           \
    TILE(128, 1)          \
    TILE(256, 1)

/* Warpgroups of a block that multiply, for so many activation rows. */
static inline MIXED_CONST int32_t mixed_warpgroups(int32_t rows)
{
    return rows > SMALL_ROWS ? 2 : 4;
}

/* The tile for op `p` of a launch of `format` (enum fused_format) with so many rows of
 * activations; width 0: there is none. Pure. */
struct small_tile small_mixed_tile(const struct fused_op *p, int32_t format, int32_t rows,
                                   int32_t n_blocks);
/* Whether all of `a` goes by these launches; with at most FUSED_ROWS rows only where
 * they fill the device, as other products do with a fused launch. Pure. */
bool small_mixed_plan(const struct fused_args *a, int32_t n_blocks);

/* Whether op `p`, of more than SMALL_ROWS rows, is one of these products. Pure. */
bool mixed_wide_suits(const struct fused_args *a, const struct fused_op *p, int32_t n_blocks);

/* Columns of the activations that one copy brings, in groups. */
static inline MIXED_CONST int32_t mixed_source_groups(int32_t rows)
{
    return rows <= 8 ? 2 : rows <= MIXED_FEW_ROWS ? 4 : rows <= 32 ? 2 : 1;
}
/* Rows of such a copy, those of the matrix instruction. */
static inline MIXED_CONST int32_t mixed_source_rows(int32_t rows)
{
    return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : MIXED_WIDE_ROWS;
}

/* Allows the kernels their shared memory; where small_prepare has said that its run. */
void small_mixed_prepare(void);

/* Enqueues a->op[0], which mixed_wide_suits. False: the launch failed. */
bool launch_mixed_wide(const struct fused_args *a, int32_t n_blocks, cudaStream_t stream);

#ifdef __cplusplus
}

/* Enqueues the product of op `p` in tiles `t`; `s` has its epilogue, of a source x
 * [rows, k]. For launch_small_rows. False: as there. */
struct small_args;
bool launch_small_mixed(const struct fused_args *a, const struct fused_op *p, struct small_tile t,
                        const struct small_args &s, const void *x, int64_t x_stride,
                        cudaStream_t stream);
#endif

#endif
