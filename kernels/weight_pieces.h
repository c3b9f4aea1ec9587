/* The pieces of a weight (backend.h) as the backends see them before they make it. */
#ifndef QUIRE_KERNELS_WEIGHT_PIECES_H
#define QUIRE_KERNELS_WEIGHT_PIECES_H

#include "kernels/backend.h"

/* Rows and columns that a piece gives to the weight: a transposed one is turned. */
static inline int32_t weight_piece_rows(const struct weight_piece *p)
{
    return p->transposed ? p->cols : p->rows;
}

static inline int32_t weight_piece_cols(const struct weight_piece *p)
{
    return p->transposed ? p->rows : p->cols;
}

/* Whether a piece of the weight is stored in blocks. */
static inline bool weight_has_blocks(const struct weight_desc *d)
{
    for (int32_t i = 0; i < d->n_pieces; i++) {
        if (d->piece[i].format) {
            return true;
        }
    }
    return false;
}

/* The piece that has a row of the weight, which has no transposed ones; *ret_row: the
 * row of the piece, as it is stored. */
const struct weight_piece *weight_piece_of(const struct weight_desc *d, int32_t row,
                                           int32_t *ret_row);

/* ERR_INVALID where the pieces of `d` do not make [rows, cols] of floats, or a stored
 * row of one has more than max_row_bytes. */
int weight_pieces_check(const struct weight_desc *d, int64_t max_row_bytes, struct err *e);

#endif
