/* Weights whose scales are a tensor of their own (struct weight_scales), on the device.
 *
 * A weight is kept in one of these layouts, repacked once while it is loaded:
 *
 *   QUANT_ROWS      codes row by row as in the file, scales and zero points for groups of
 *                   columns of each row; any grouping
 *   QUANT_SEGMENTS  FORMAT_INT4 in groups of 128 columns: segments of 512 columns, in which
 *                   256 bytes of codes are followed by four words, one a group: its scale
 *                   in the upper 16 bits as bf16 or fp16, and 128 + its zero point as bf16
 *                   in the lower. Of each 32 columns, word i has from the lowest nibble
 *                   on the codes of columns 2 i, 2 i + 8, 2 i + 16 and 2 i + 24, then
 *                   those behind these: a mask of every fourth nibble gives two
 *                   neighbours, and a word what a lane needs of two matrix
 *                   instructions. A segment of QUANT_TILE_ROWS rows is contiguous, so that
 *                   one copy brings it (quant_segment_at); rows are padded to whole tiles.
 *                   FORMAT_FP4 in groups of 16 or 32 columns likewise: a segment's codes
 *                   are followed by a byte for each group, its scale (fp4_scales.h), and
 *                   a word has its codes as fp4_pair wants them.
 *   QUANT_GROUPS    groups of 32 or 16 columns, also of GGUF's blocks (groups.h)
 *   QUANT_PANELS    experts (panels.h)
 *
 * Which kernel multiplies, where activations are bf16:
 *   up to 8 rows of a decode step   mixed-input products (cuda/mixed; FORMAT_INT4 of up to
 *                                   4 rows by whole numbers), or the fused launch where
 *                                   they would not fill the device (not FORMAT_FP4,
 *                                   FORMAT_INT8, QUANT_GROUPS)
 *   9 to 64 rows of one             the same of QUANT_SEGMENTS, QUANT_GROUPS, FORMAT_INT8,
 *                                   and FORMAT_FP8 in groups of 128 columns or of files
 *                                   that keep the activations; other FORMAT_FP8 as below,
 *                                   in own tiles
 *   FORMAT_FP8 with a scale a row   activations quantised to e4m3 with a scale a row or
 *                                   the file's (quant.cu), then tiles of codes (gemm/tiles.h) where
 *                                   they keep the device busy, else cuBLASLt's product
 *   everything else                 the weight widened to the activations' type in a buffer,
 *                                   then the product of that type
 */
#ifndef QUIRE_KERNELS_CUDA_QUANT_QUANT_H
#define QUIRE_KERNELS_CUDA_QUANT_QUANT_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/launch.h"
#include "kernels/weight_format.h"

#ifdef __cplusplus
extern "C" {
#endif

enum quant_layout { QUANT_ROWS, QUANT_SEGMENTS, QUANT_PANELS, QUANT_GROUPS };

enum {
    QUANT_GROUP = 128,
    QUANT_SEGMENT = 512,
    QUANT_SEGMENT_BYTES = QUANT_SEGMENT / 2 + 16,
    QUANT_TILE_ROWS = 64,
    QUANT_TILE_BYTES = QUANT_TILE_ROWS * QUANT_SEGMENT_BYTES,   /* of a segment of all rows */
    QUANT_MXFP4_BYTES = QUANT_SEGMENT / 2 + QUANT_SEGMENT / 32, /* of such a segment */
    QUANT_NVFP4_BYTES = QUANT_SEGMENT / 2 + QUANT_SEGMENT / 16,
};

#ifdef __CUDACC__
#define QUANT_BOTH __host__ __device__
#else
#define QUANT_BOTH
#endif

/* Where a row's segment begins, of a weight of QUANT_SEGMENTS with n_segments of so
 * many bytes in a row; its next one is QUANT_TILE_ROWS * bytes on. */
static inline QUANT_BOTH int64_t quant_segment_at(int64_t row, int64_t segment, int64_t n_segments,
                                                  int64_t bytes)
{
    return (row / QUANT_TILE_ROWS * n_segments + segment) * QUANT_TILE_ROWS * bytes +
           row % QUANT_TILE_ROWS * bytes;
}

/* What mat.priv of such a weight points to; owned by the backend. Pointers are to
 * device memory. */
struct quant_weight {
    int32_t format;     /* enum weight_format_id */
    int32_t layout;     /* enum quant_layout */
    int32_t rows, cols; /* values */
    int64_t row_bytes;  /* of a row's codes; of QUANT_ROWS also between rows */
    int32_t segment;    /* bytes of a segment of QUANT_SEGMENTS */
    int32_t group_cols; /* columns that share a scale */
    int32_t n_groups;   /* of a row */
    bool f16_scales;    /* of QUANT_SEGMENTS: fp16, else bf16 */
    int32_t kind;       /* of QUANT_GROUPS: enum groups_kind; of QUANT_PANELS: panel_kind */
    /* The file's scale for all activations (ACT_SCALE_TENSOR), of several pieces the
     * greatest; 0: there is none. */
    float act_scale;
    bool embedded;       /* of QUANT_GROUPS: embed reads it, no product */
    bool logits;         /* its products are float32 */
    bool quantises;      /* activations are quantised for products of cuBLASLt */
    const void *codes;   /* [rows], row_bytes apart */
    const float *scale;  /* [rows, n_groups], of QUANT_ROWS; [rows] of segments of FORMAT_FP4 */
    const uint8_t *zero; /* [rows, n_groups], as weight_scales; NULL: none. Of QUANT_ROWS */
};

/* out [rows, cols] = the weight's values as `type` (enum dtype). */
void launch_widen(void *out, int64_t out_stride, const struct quant_weight *w, int type,
                  cudaStream_t stream);
/* Packs rows of FORMAT_INT4 codes, as stored and in pitch bytes, into segments.
 * scale: of groups, 16 bits each [rows, n_groups]; zero likewise, one byte each;
 * NULL: 8. */
void launch_pack_segments(void *out, const uint8_t *codes, int64_t pitch, const uint16_t *scale,
                          const uint8_t *zero, int32_t rows, int32_t cols, cudaStream_t stream);
/* Likewise of FORMAT_FP4; scale: bytes of fp4_scales.h, [rows, groups of 16 or 32
 * columns]. */
void launch_pack_fp4(void *out, const uint8_t *codes, int64_t pitch, const uint8_t *scale,
                     int32_t rows, int32_t cols, int32_t group_cols, cudaStream_t stream);
/* Pseudo-random codes (QUANT_ROWS, no NaN), or segments of INT4 of zero point 8 and
 * this scale, or of FP4 of scales of one. segment: its bytes; 0: QUANT_ROWS. */
void launch_dummy_codes(void *out, int64_t row_bytes, int32_t rows, int format, int32_t segment,
                        uint16_t scale, uint64_t seed, cudaStream_t stream);
/* launch_widen of segments of FORMAT_FP4. */
void launch_widen_fp4(void *out, int64_t out_stride, const struct quant_weight *w, int type,
                      cudaStream_t stream);
void launch_fill(float *out, int64_t n, float value, cudaStream_t stream);
/* codes [rows, cols] e4m3 and scale [rows]: x = scale * code, the greatest magnitude
 * of a row is code 448. A row of zeros has scale 0. `fixed` above 0: every row has this
 * scale, and what is beyond code 448 becomes it. x of `type`, bf16 or fp16; cols a
 * multiple of 16. */
void launch_quantise_rows(uint8_t *codes, float *scale, float fixed, const void *x,
                          int64_t x_stride, int type, int32_t rows, int32_t cols,
                          cudaStream_t stream);
/* Columns of a row that the launches below take; a multiple of 16. */
enum { QUANT_ROW_COLS = 16384 };
struct norm_quantise_args {
    uint8_t *codes; /* [rows, cols] */
    float *scale;   /* [rows] */
    float fixed;    /* as of launch_quantise_rows */
    void *h;        /* [rows, cols] the norm's result as it is; NULL: not wanted */
    void *x;        /* [rows, cols]; += y first, unless that is NULL */
    const void *y;
    int64_t h_stride, x_stride, y_stride; /* elements; rows are aligned to 16 bytes */
    struct norm_args norm;
};
/* norm(x) as launch_quantise_rows makes it of a norm's result, of bf16 or fp16. */
void launch_norm_quantise(const struct norm_quantise_args *a, int type, int32_t rows, int32_t cols,
                          cudaStream_t stream);
/* Likewise act(gate) * up, which are the halves of gate_up [rows, 2 * cols]. */
void launch_gate_quantise(uint8_t *codes, float *scale, float fixed, const void *gate_up,
                          int64_t in_stride, int type, int32_t rows, int32_t cols, int act,
                          cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
