/* See fp4_scales.h. */
#include "kernels/cuda/quant/fp4_scales.h"

#include <math.h>

#include "kernels/weight_pieces.h"

enum { TOP_EXPONENT = 253 }; /* of the greatest power of two of a row */

static const uint8_t *scales_of_row(const struct weight_scales *s, int32_t row)
{
    return (const uint8_t *)s->data + (s->group_rows > 0 ? row / s->group_rows : 0) * s->stride;
}

/* A scale of e4m3, not negative, as a byte of five bits of exponent. */
static uint8_t wide_exponent(uint8_t e4m3)
{
    uint32_t exponent = e4m3 >> 3;
    uint32_t mantissa = e4m3 & 7;

    if (exponent > 0) { /* 2^(exponent - 7) is 2^8 less 15 - exponent */
        return (uint8_t)((exponent + 16) << 3 | mantissa);
    }
    if (mantissa == 0) {
        return 0;
    }
    for (exponent = 17; mantissa < 8; mantissa *= 2) { /* subnormal: becomes normal */
        exponent--;
    }
    return (uint8_t)(exponent << 3 | (mantissa & 7));
}

bool fp4_scales_fit(const struct weight_desc *d, int32_t group_cols)
{
    enum scale_type type = group_cols == 16 ? SCALE_E4M3 : SCALE_E8M0;

    if (group_cols != 16 && group_cols != 32) {
        return false;
    }
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        int64_t n = div_ceil(p->cols, group_cols);
        if (p->scales.type != type) {
            return false;
        }
        for (int32_t row = 0; row < p->rows; row++) {
            const uint8_t *s = scales_of_row(&p->scales, row);
            for (int64_t j = 0; j < n; j++) {
                if (type == SCALE_E8M0 ? s[j] == 0xFF : s[j] >= 0x7F) {
                    return false;
                }
            }
        }
    }
    return true;
}

/* A row's scales of e8m0; returns the factor of all. */
static float relative_exponents(const uint8_t *scale, int32_t n, uint8_t *byte)
{
    int32_t most = 0;

    for (int32_t j = 0; j < n; j++) {
        most = MAX(most, scale[j]);
    }
    for (int32_t j = 0; j < n; j++) {
        byte[j] = (uint8_t)MAX(scale[j] - most + TOP_EXPONENT, 0);
    }
    return ldexpf(1, most - 127);
}

void fp4_scales_fill(const struct weight_desc *d, int32_t n_groups, uint8_t *byte, float *factor)
{
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_scales *s = &d->piece[i].scales;
        for (int32_t row = 0; row < d->piece[i].rows; row++, byte += n_groups, factor++) {
            const uint8_t *from = scales_of_row(s, row);
            if (s->type == SCALE_E8M0) {
                *factor = s->factor * relative_exponents(from, n_groups, byte);
                continue;
            }
            for (int32_t j = 0; j < n_groups; j++) {
                byte[j] = wide_exponent(from[j]);
            }
            *factor = s->factor * 0x1p8f;
        }
    }
}
