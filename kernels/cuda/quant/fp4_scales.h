/* Scales of FORMAT_FP4 in segments (quant.h): a byte for each group and a float for
 * each row, whose product is the scale exactly, so that a code times the byte's value
 * is a bf16.
 *
 *   groups of 16   e4m3 scales: five bits of exponent and three of mantissa. An
 *                  exponent of 31 is 2^8, that of the greatest. Byte 0 is a scale of
 *                  zero.
 *   groups of 32   powers of two: the exponent, 253 that of the row's greatest. Scales
 *                  that are less by 2^252 and more are zero.
 */
#ifndef QUIRE_KERNELS_CUDA_QUANT_FP4_SCALES_H
#define QUIRE_KERNELS_CUDA_QUANT_FP4_SCALES_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/backend.h"

/* Whether all scales of the pieces, of FORMAT_FP4 in groups of group_cols columns,
 * can be written so: of one type, no NaN, none negative. */
bool fp4_scales_fit(const struct weight_desc *d, int32_t group_cols);
/* Fills byte [rows, n_groups] and factor [rows]. */
void fp4_scales_fill(const struct weight_desc *d, int32_t n_groups, uint8_t *byte, float *factor);

#endif
