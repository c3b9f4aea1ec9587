/* A third layout of weights on the device, of experts of FORMAT_FP4 in groups of 32
 * columns, and of FORMAT_INT4 in groups of multiples of 32 (struct quant_weight).
 *
 * Eight rows make a panel, and panels follow one another. A panel is divided into
 * segments of 768 columns, the last of which may be shorter. A segment has, group by
 * group, the codes [row][4 words]: a word has eight neighbouring columns, as fp4_pair
 * wants them, and behind all groups the bytes of their scales [group][row]
 * (fp4_scales.h). So a part of a weight is one copy, and a warp that multiplies eight
 * rows with a group reads 128 bytes in a row. `scale` has a factor for each row.
 *
 * Of FORMAT_INT4 a word has the code of column 2 i of its eight in nibble i, that of
 * 2 i + 1 in nibble i + 4, and each 32 columns of a row have four bytes in place of
 * one: the scale's float, whose last four bits are the zero point (scales of 16 bits
 * have zeros there). The factors of rows are 1.
 */
#ifndef QUIRE_KERNELS_CUDA_QUANT_PANELS_H
#define QUIRE_KERNELS_CUDA_QUANT_PANELS_H

#include "kernels/cuda/quant/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { QUANT_PANELS = QUANT_SEGMENTS + 1 }; /* of quant_weight.layout */

enum {
    PANEL_ROWS = 8,
    PANEL_COLS = 768, /* of a segment */
    PANEL_GROUP = 32,
    PANEL_CODES = PANEL_ROWS * PANEL_GROUP / 2, /* bytes of a group's */
};

#ifdef __CUDACC__
#define PANEL_BOTH __host__ __device__ constexpr
#else
#define PANEL_BOTH
#endif

enum panel_kind { PANELS_NONE, PANELS_FP4, PANELS_INT4 };

/* Bytes of a group's scale. */
static inline PANEL_BOTH int32_t panel_scale_bytes(int32_t kind)
{
    return kind == PANELS_INT4 ? 4 : 1;
}

/* Bytes of a panel of so many columns, or of its segments with so many. */
static inline PANEL_BOTH int32_t panel_bytes(int32_t cols, int32_t kind)
{
    return cols / PANEL_GROUP * (PANEL_CODES + PANEL_ROWS * panel_scale_bytes(kind));
}

/* What panels a weight has. */
static inline int32_t panel_kind(const struct quant_weight *w)
{
    return w->layout != QUANT_PANELS  ? PANELS_NONE
           : w->format == FORMAT_INT4 ? PANELS_INT4
                                      : PANELS_FP4;
}

/* Packs rows of codes of FORMAT_FP4 as stored, pitch bytes apart; scale: bytes of
 * fp4_scales.h [rows, cols / PANEL_GROUP]. rows a multiple of PANEL_ROWS, cols of twice
 * PANEL_GROUP. */
void launch_pack_panels(void *out, const uint8_t *codes, int64_t pitch, const uint8_t *scale,
                        int32_t rows, int32_t cols, cudaStream_t stream);
/* The same of FORMAT_INT4; scale, zero [rows, cols / group_cols] as in struct
 * quant_weight, group_cols a multiple of PANEL_GROUP; zero NULL: 8. */
void launch_pack_int4_panels(void *out, const uint8_t *codes, int64_t pitch, const float *scale,
                             const uint8_t *zero, int32_t group_cols, int32_t rows, int32_t cols,
                             cudaStream_t stream);
/* Pseudo-random codes with scales of one, of FORMAT_INT4 of this scale and zero points
 * of 8. */
void launch_dummy_panels(void *out, int32_t rows, int32_t cols, int32_t kind, float scale,
                         uint64_t seed, cudaStream_t stream);
/* out [rows, cols] = the weight's values as `type` (enum dtype). */
void launch_widen_panels(void *out, int64_t out_stride, const struct quant_weight *w, int type,
                         cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
