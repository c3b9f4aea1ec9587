/* The sums of plain loops that multiply blocks (blocks_plain.c) and codes
 * (codes_plain.c). */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_PLAIN_H
#define QUIRE_KERNELS_CPU_BLOCKS_PLAIN_H

#include <math.h>

#include "kernels/cpu/simd/kernels.h"

enum { GROUP = 32, LANES = 16 };

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
