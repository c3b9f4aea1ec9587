/* See weight_pieces.h. */
#include "kernels/weight_pieces.h"

/* Whether blocks make whole rows, as products and embeddings read them. Codes whose
 * scales are apart begin each row in a byte of its own. */
static bool blocks_fit(const struct weight_desc *d, const struct weight_piece *p)
{
    int32_t values = p->format->block_values;

    if (weight_format_has_scales(p->format)) {
        return (d->kind == WEIGHT_LINEAR || d->kind == WEIGHT_EMBEDDING) && !p->transposed &&
               p->stride % values == 0 && p->stride >= p->cols && p->head_rows == 0 &&
               p->scales.data;
    }
    return (d->kind == WEIGHT_LINEAR || d->kind == WEIGHT_EMBEDDING) && !p->transposed &&
           p->cols % values == 0 && p->stride % values == 0 && p->stride >= p->cols &&
           (p->head_rows == 0 || (p->head_rows % 2 == 0 && p->rows % p->head_rows == 0));
}

const struct weight_piece *weight_piece_of(const struct weight_desc *d, int32_t row,
                                           int32_t *ret_row)
{
    const struct weight_piece *p = d->piece;

    for (; row >= p->rows; p++) {
        row -= p->rows;
    }
    if (p->head_rows > 0) {
        int32_t half = p->head_rows / 2, in = row % p->head_rows;
        row += (in < half ? 2 * in : 2 * (in - half) + 1) - in;
    }
    *ret_row = row;
    return p;
}

int weight_pieces_check(const struct weight_desc *d, int64_t max_row_bytes, struct err *e)
{
    if (d->rows < 1 || d->cols < 1 || d->dtype == DTYPE_I32) {
        return err_set(e, ERR_INVALID, "weight %s: [%d, %d] of %s is not possible", d->name,
                       d->rows, d->cols, dtype_name(d->dtype));
    }
    int64_t rows = 0;
    int64_t n = 0;
    bool fits = true;
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        rows += weight_piece_rows(p);
        n += (int64_t)p->rows * p->cols;
        fits = fits && p->dtype != DTYPE_I32 &&
               (d->kind == WEIGHT_VECTOR || weight_piece_cols(p) == d->cols) &&
               p->cols * dtype_bytes(p->dtype) <= max_row_bytes && (!p->format || blocks_fit(d, p));
    }
    fits = fits && (d->kind == WEIGHT_VECTOR ? d->rows == 1 && n == d->cols : rows == d->rows);
    if (d->n_pieces > 0 && !fits) {
        return err_set(e, ERR_INVALID, "weight %s: its pieces do not make [%d, %d]", d->name,
                       d->rows, d->cols);
    }
    return 0;
}
