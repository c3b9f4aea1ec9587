/* How the blocks of each format are unpacked; for weight_format.c, which lists them. */
#ifndef QUIRE_KERNELS_WEIGHT_BLOCKS_H
#define QUIRE_KERNELS_WEIGHT_BLOCKS_H

#include "kernels/weight_format.h"

void unpack_q4_0(const uint8_t *s, struct weight_codes *ret);
void unpack_q4_1(const uint8_t *s, struct weight_codes *ret);
void unpack_q5_0(const uint8_t *s, struct weight_codes *ret);
void unpack_q5_1(const uint8_t *s, struct weight_codes *ret);
void unpack_q8_0(const uint8_t *s, struct weight_codes *ret);
void unpack_iq4_nl(const uint8_t *s, struct weight_codes *ret);
void unpack_mxfp4(const uint8_t *s, struct weight_codes *ret);
void unpack_q2_k(const uint8_t *s, struct weight_codes *ret);
void unpack_q3_k(const uint8_t *s, struct weight_codes *ret);
void unpack_q4_k(const uint8_t *s, struct weight_codes *ret);
void unpack_q5_k(const uint8_t *s, struct weight_codes *ret);
void unpack_q6_k(const uint8_t *s, struct weight_codes *ret);
void unpack_iq4_xs(const uint8_t *s, struct weight_codes *ret);

/* The first of n blocks with a scale or minimum that is not finite; -1: there is
 * none. */
int64_t weight_blocks_find_nan(const struct weight_format *f, const uint8_t *blocks, int64_t n);

#endif
