/* The sums of plain loops that multiply blocks (blocks_plain.c) and codes
 * (codes_plain.c). */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_PLAIN_H
#define QUIRE_KERNELS_CPU_BLOCKS_PLAIN_H

#include <math.h>

#include "kernels/cpu/simd/kernels.h"

enum { GROUP = 32, LANES = 16 };

/* Add the products of n <= FORMAT_BLOCK_MAX codes to acc[LANES], and their minima to
 * min[LANES]: the sum of each four products, scaled, to the lane that a vector of 64
 * bytes has them in. */
static inline void add_block(float *acc, float *min, const struct weight_format *f,
                             const struct weight_codes *c, const struct act_block *x, int32_t n)
{
    for (int32_t i = 0; i < n; i += 4) {
        int32_t sum = 0;
        for (int32_t k = i; k < i + 4; k++) {
            sum += c->code[k] * x->code[k];
        }
        float scale = c->scale[i / FORMAT_GROUP] * x->scale[i / GROUP];
        float *to = &acc[i / 4 % LANES];
        *to = fmaf((float)sum, scale, *to);
    }
    int32_t wide = f->group_values / FORMAT_GROUP; /* entries of c->min to a minimum */
    const float *sum = wide == 1 ? x->sum16 : x->sum32;
    for (int32_t i = 0; i < n / f->group_values && f->minima; i++) {
        min[i] = fmaf(c->min[i * wide], sum[i], min[i]);
    }
}

/* The sum of v[n], n = 8 or LANES, in the order of vectors that are halved. */
static inline float tree(const float *v, int32_t n)
{
    float t[LANES / 2];

    for (int32_t i = 0; i < n / 2; i++) {
        t[i] = v[i] + v[i + n / 2];
    }
    for (int32_t half = n / 4; half > 0; half /= 2) {
        for (int32_t i = 0; i < half; i++) {
            t[i] += t[i + half];
        }
    }
    return t[0];
}

#endif
