/* A fourth layout of weights on the device, of codes of up to eight bits whose groups
 * of 32 or 16 columns have a scale, and where they need one a zero point that need not
 * be a whole number (struct quant_weight):
 *
 *     value = factor of the row * scale of the group * (code - zero)
 *
 * GGUF's blocks and integers of compressed-tensors, AWQ and GPTQ are all so. Sixty-four
 * rows make a tile, and a tile is divided into segments, one behind the other, whose
 * columns are filled up with zeros to GROUPS_COLS. A segment has
 *
 *     codes   [64 rows][16 chunks of 16 bytes]; chunk i of a row lies at i ^ (row & 7),
 *             so that rows of a tile are read from different banks of shared memory
 *     groups  [words][64 rows]: a word for each 32 columns
 *
 * What the four words of a chunk have, by `kind`:
 *
 *   GROUPS_4       32 columns, four bits each. Of word i the nibbles from the lowest on
 *                  are columns 2 i, 2 i + 8, 2 i + 16, 2 i + 24, then those behind these
 *   GROUPS_LEVELS  likewise, columns 2 i, 2 i + 1, 2 i + 8, 2 i + 9, then those 16 on; a
 *                  code is a place in the levels of IQ4
 *   GROUPS_8       16 columns, a byte each: columns 2 i, 2 i + 1, 2 i + 8, 2 i + 9
 *
 * A group's word has the scale in its upper half as fp16, and in the lower one the zero
 * point as fp16; or, of groups of 16 columns, the second group's scale, and the zero
 * point is GROUPS_ZERO_4 or GROUPS_ZERO_8. That of levels is GROUPS_ZERO_8.
 *
 * The factor is a power of two that brings the row's greatest scale to 2^14 at least,
 * so that scales of 16 bits are as they are in the file, and others, which are products
 * of two numbers there, are off by at most 2^-11 of themselves; a bf16 is by 2^-8.
 */
#ifndef QUIRE_KERNELS_CUDA_QUANT_GROUPS_H
#define QUIRE_KERNELS_CUDA_QUANT_GROUPS_H

#include "kernels/backend.h"
#include "kernels/cuda/quant/panels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { QUANT_GROUPS = QUANT_PANELS + 1 }; /* of quant_weight.layout */

enum groups_kind { GROUPS_NONE, GROUPS_4, GROUPS_LEVELS, GROUPS_8 };

enum {
    GROUPS_COLS = 512,   /* columns are filled up to a multiple */
    GROUPS_CODES = 256,  /* bytes of a row's codes in a segment */
    GROUPS_COLS_4 = 512, /* of a segment */
    GROUPS_COLS_8 = 256,
    GROUPS_BYTES_4 = GROUPS_CODES + GROUPS_COLS_4 / 32 * 4, /* of a row in a segment */
    GROUPS_BYTES_8 = GROUPS_CODES + GROUPS_COLS_8 / 32 * 4,
    GROUPS_ZERO_4 = 8,
    GROUPS_ZERO_8 = 128,
};

/* How a weight lies so. */
struct groups_layout {
    int32_t kind; /* enum groups_kind */
    bool halves;  /* groups of 16 columns */
    int32_t rows, cols;
    int32_t segments; /* of a row */
    int32_t bytes;    /* of a row in a segment */
};

/* Whether the pieces of `d`, which are of one format, can be multiplied so; *ret: how.
 * Otherwise *ret_why says why not, a constant. */
bool groups_layout_of(const struct weight_desc *d, struct groups_layout *ret, const char **ret_why);

static inline int64_t groups_tile_bytes(const struct groups_layout *l)
{
    return (int64_t)l->segments * QUANT_TILE_ROWS * l->bytes;
}

/* Writes the tile of 64 rows from first_row on to `out`, and the factors of its rows
 * [64]. Rows behind the weight's are zero. 0 or ERR_NOMEM. */
int groups_pack_tile(const struct weight_desc *d, const struct groups_layout *l, int32_t first_row,
                     uint8_t *out, float *factor);
/* out [cols] = a row of the weight, read from its tile as kernels read it. */
void groups_unpack_row(const struct groups_layout *l, const uint8_t *tile, float factor,
                       int32_t row_in_tile, float *out);

/* out [rows, cols] = the weight's values as `type` (enum dtype). */
void launch_widen_groups(void *out, int64_t out_stride, const struct quant_weight *w, int type,
                         cudaStream_t stream);

/* Rows of an embedding, as launch_embed. */
void launch_embed_groups(void *out, int64_t out_stride, const struct quant_weight *w,
                         const int32_t *token, int32_t first, int32_t rows, float scale, int type,
                         cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
