/* A third layout of weights on the device, of experts (struct quant_weight).
 *
 * Eight rows make a panel, and panels follow one another. A panel is divided into
 * segments of 768 columns, the last of which may be shorter. A segment has, group of
 * 32 columns by group, the codes [row][4 words, or 8], and behind all groups their
 * scales [group][row]. So a part of a weight is one copy, and a warp that multiplies
 * eight rows with a group reads 128 bytes in a row, or 256. `scale` has a factor for
 * each row.
 *
 *   PANELS_FP4       FORMAT_FP4 in groups of 32 columns, blocks of MXFP4: a word has eight
 *                    neighbouring columns as fp4_pair wants them; a scale is a byte
 *                    (fp4_scales.h)
 *   PANELS_NVFP4     FORMAT_FP4 in groups of 16 columns: likewise, two bytes
 *   PANELS_INT4      FORMAT_INT4 in groups of multiples of 32 columns: a word has the code
 *                    of column 2 i of its eight in nibble i, that of 2 i + 1 in nibble
 *                    i + 4. A scale is a float whose last four bits are the zero point
 *                    (scales of 16 bits have zeros there). The factors of rows are 1
 *   PANELS_GROUPS_4, PANELS_GROUPS_2, PANELS_LEVELS, PANELS_GROUPS_8
 *                    what groups.h has under these names: GGUF's blocks, FORMAT_INT8. Four
 *                    bits lie as those of PANELS_INT4, levels and bytes in the order of
 *                    their columns; a scale is a group's word
 */
#ifndef QUIRE_KERNELS_CUDA_QUANT_PANELS_H
#define QUIRE_KERNELS_CUDA_QUANT_PANELS_H

#include "kernels/backend.h"
#include "kernels/cuda/quant/groups.h"
#include "kernels/cuda/quant/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

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

enum panel_kind {
    PANELS_NONE,
    PANELS_FP4,
    PANELS_INT4,
    PANELS_NVFP4,
    PANELS_GROUPS_4,
    PANELS_GROUPS_2,
    PANELS_LEVELS,
    PANELS_GROUPS_8
};

/* Bytes of the codes of a group. */
static inline PANEL_BOTH int32_t panel_code_bytes(int32_t kind)
{
    return kind == PANELS_GROUPS_8 ? 2 * PANEL_CODES : PANEL_CODES;
}

/* Bytes of a row's scale of a group. */
static inline PANEL_BOTH int32_t panel_scale_bytes(int32_t kind)
{
    return kind == PANELS_FP4 ? 1 : kind == PANELS_NVFP4 ? 2 : 4;
}

/* Bytes of a panel of so many columns, or of its segments with so many. */
static inline PANEL_BOTH int32_t panel_bytes(int32_t cols, int32_t kind)
{
    return cols / PANEL_GROUP * (panel_code_bytes(kind) + PANEL_ROWS * panel_scale_bytes(kind));
}

/* What panels a weight has. */
static inline int32_t panel_kind(const struct quant_weight *w)
{
    return w->layout == QUANT_PANELS ? w->kind : (int32_t)PANELS_NONE;
}

/* ---- packed by the host (panels.c) ---- */

/* How experts lie so that are blocks or FORMAT_INT8. */
struct panels_layout {
    int32_t kind;           /* enum panel_kind */
    struct group_form form; /* not of PANELS_FP4 */
    int32_t cols;
};

/* Whether the pieces of `d` can be multiplied so; *ret: how. Otherwise *ret_why says
 * why not, a constant. */
bool panels_layout_of(const struct weight_desc *d, struct panels_layout *ret, const char **ret_why);
/* Writes the panel of PANEL_ROWS rows from first_row on to `out`, and the factors of
 * its rows. 0 or ERR_NOMEM. */
int panels_pack(const struct weight_desc *d, const struct panels_layout *l, int32_t first_row,
                uint8_t *out, float *factor);
/* out [cols] = a row of a panel, read as kernels read it. */
void panels_unpack_row(const struct panels_layout *l, const uint8_t *panel, float factor,
                       int32_t row, float *out);

/* ---- packed by the device (panels.cu) ---- */

/* Packs rows of codes of FORMAT_FP4 as stored, pitch bytes apart, in groups of 32
 * columns or of 16; scale: bytes of fp4_scales.h [rows, cols / group_cols]. rows a
 * multiple of PANEL_ROWS, cols of twice PANEL_GROUP. */
void launch_pack_panels(void *out, const uint8_t *codes, int64_t pitch, const uint8_t *scale,
                        int32_t group_cols, int32_t rows, int32_t cols, cudaStream_t stream);
/* The same of FORMAT_INT4; scale, zero [rows, cols / group_cols] as in struct
 * quant_weight, group_cols a multiple of PANEL_GROUP; zero NULL: 8. */
void launch_pack_int4_panels(void *out, const uint8_t *codes, int64_t pitch, const float *scale,
                             const uint8_t *zero, int32_t group_cols, int32_t rows, int32_t cols,
                             cudaStream_t stream);
/* Pseudo-random codes with scales of one, of FORMAT_INT4 of this scale and zero points
 * of 8, of PANELS_GROUPS_8 of GROUPS_ZERO_8. */
void launch_dummy_panels(void *out, int32_t rows, int32_t cols, int32_t kind, float scale,
                         uint64_t seed, cudaStream_t stream);
/* out [rows, cols] = the weight's values as `type` (enum dtype). */
void launch_widen_panels(void *out, int64_t out_stride, const struct quant_weight *w, int type,
                         cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
