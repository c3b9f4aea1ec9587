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
 *   GROUPS_2       as GROUPS_4, of codes of two bits
 *
 * A group's word has the scale in its upper half as fp16, and in the lower one the zero
 * point as fp16; or, of groups of 16 columns, the second group's scale, and the zero
 * point is GROUPS_ZERO_4 or GROUPS_ZERO_8. That of levels is GROUPS_ZERO_8.
 *
 * Of GROUPS_2 the lower half of a word has for either 16 columns four bits s and four
 * bits m; the upper ones of two neighbouring words, of 64 columns, are two numbers d
 * and e that these share, and value = d * s * code - e * m, as in a block of Q2_K.
 *
 * The factor is a power of two that brings the row's greatest scale to 2^14 at least,
 * so that scales of 16 bits are as they are in the file, and others, which are products
 * of two numbers there, are off by at most 2^-11 of themselves; a bf16 is by 2^-8. A
 * row of one scale has it in its factor, to the last bit.
 */
#ifndef QUIRE_KERNELS_CUDA_QUANT_GROUPS_H
#define QUIRE_KERNELS_CUDA_QUANT_GROUPS_H

#include "kernels/backend.h"
#include "kernels/cuda/quant/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

enum groups_kind { GROUPS_NONE, GROUPS_4, GROUPS_LEVELS, GROUPS_8, GROUPS_2 };

enum {
    GROUPS_COLS = 512,   /* columns are filled up to a multiple */
    GROUPS_CODES = 256,  /* bytes of a row's codes in a segment */
    GROUPS_COLS_4 = 512, /* of a segment */
    GROUPS_COLS_8 = 256,
    GROUPS_BYTES_4 = GROUPS_CODES + GROUPS_COLS_4 / 32 * 4, /* of a row in a segment */
    GROUPS_BYTES_8 = GROUPS_CODES + GROUPS_COLS_8 / 32 * 4,
    GROUPS_ZERO_4 = 8,
    GROUPS_ZERO_8 = 128,
    GROUP_COLS = 32, /* of a word */
};

/* How a weight's groups are written. */
struct group_form {
    int32_t kind; /* enum groups_kind */
    bool halves;  /* groups of 16 columns */
};

/* ---- rows of the file (group_rows.c) ---- */

/* A word's columns of a row. */
struct group_cols {
    uint8_t code[GROUP_COLS];
    float scale[2]; /* of either half; of GROUPS_2 the block's d and e */
    float zero;
    uint8_t nibbles[2]; /* of GROUPS_2: s, and m above it, of either half */
};

/* In which form a piece of codes is kept. NULL, or why in none, a constant. */
const char *group_form_of(const struct weight_piece *p, struct group_form *ret);
/* g [cols / GROUP_COLS] = a row of the weight in a form that has all of its pieces. */
void group_cols_read(const struct weight_desc *d, int32_t row, const struct group_form *form,
                     struct group_cols *g);
/* The factor of a row of n words. */
float group_row_factor(const struct group_cols *g, int32_t n);
/* The word of columns g, the i-th of its row. */
uint32_t group_word(const struct group_cols *g, int32_t i, const struct group_form *form,
                    float factor);
/* The value of a code of a row's i-th group, of its second half or not, but for the
 * row's factor; word: of groups i & ~1 and i | 1. */
float group_value(const struct group_form *form, const uint32_t word[2], int32_t i, bool second,
                  float code);

/* ---- the layout ---- */

/* How a weight lies so. */
struct groups_layout {
    struct group_form form;
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
