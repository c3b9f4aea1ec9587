/* Scalar conversions between float32 and the types of 16 and 8 bits. They round to
 * nearest, ties to even; a NaN stays a NaN. */
#ifndef QUIRE_KERNELS_CPU_SIMD_CONVERT_H
#define QUIRE_KERNELS_CPU_SIMD_CONVERT_H

#include <math.h>
#include <string.h>

#include "kernels/backend.h"

static inline float f32_of_bits(uint32_t u)
{
    float f;

    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t bits_of_f32(float f)
{
    uint32_t u;

    memcpy(&u, &f, 4);
    return u;
}

static inline float bf16_load(uint16_t h)
{
    return f32_of_bits((uint32_t)h << 16);
}

static inline uint16_t bf16_store(float f)
{
    uint32_t u = bits_of_f32(f);

    if ((u & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint16_t)(u >> 16 | 0x40); /* a quiet NaN stays one */
    }
    return (uint16_t)((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

static inline float f16_load(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t rest = h & 0x7FFFu;

    if (rest >= 0x7C00u) { /* infinity, NaN */
        return f32_of_bits(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    }
    /* The product with 2^112 corrects the exponent's bias and normalises subnormal
     * numbers. */
    return f32_of_bits(sign | bits_of_f32(f32_of_bits(rest << 13) * 0x1p112f));
}

static inline uint16_t f16_store(float f)
{
    uint32_t u = bits_of_f32(f);
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);

    u &= 0x7FFFFFFFu;
    if (u >= 0x47800000u) { /* 65536 and above, infinity, NaN */
        return (uint16_t)(sign | (u > 0x7F800000u ? 0x7E00u : 0x7C00u));
    }
    if (u < 0x38800000u) { /* subnormal: the addition rounds at 2^-24 */
        return (uint16_t)(sign | (bits_of_f32(f32_of_bits(u) + 0.5f) - 0x3F000000u));
    }
    return (uint16_t)(sign | (u - 0x38000000u + 0xFFFu + (u >> 13 & 1)) >> 13);
}

/* e4m3: four bits of exponent with a bias of 7, no infinity; all bits but the sign set
 * are a NaN. */
static inline float e4m3_load(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24, rest = code & 0x7Fu;

    /* The product corrects the exponent's bias and normalises subnormal numbers. */
    return rest == 0x7Fu ? f32_of_bits(sign | 0x7FC00000u)
                         : f32_of_bits(sign | bits_of_f32(f32_of_bits(rest << 20) * 0x1p120f));
}

/* Beyond the greatest value, 448, that one. */
static inline uint8_t e4m3_store(float f)
{
    uint32_t u = bits_of_f32(f);
    uint8_t sign = (uint8_t)(u >> 24 & 0x80u);

    u &= 0x7FFFFFFFu;
    if (u > 0x7F800000u) {
        return sign | 0x7F;
    }
    if (u >= 0x43E00000u) { /* 448 */
        return sign | 0x7E;
    }
    if (u < 0x3C800000u) { /* subnormal: the addition rounds at 2^-9 */
        return (uint8_t)(sign | (bits_of_f32(f32_of_bits(u) + 0x1p14f) - 0x46800000u));
    }
    return (uint8_t)(sign | (u - 0x3C000000u + 0x7FFFFu + (u >> 20 & 1)) >> 20);
}

/* The whole number from -127 to 127 that is nearest; 0 of a NaN. */
static inline int8_t int8_store(float f)
{
    return f != f ? 0 : (int8_t)rintf(f < -127 ? -127 : f > 127 ? 127 : f);
}

/* Element i of an array of `t`. */
static inline float dtype_load(const void *data, enum dtype t, int64_t i)
{
    switch (t) {
    case DTYPE_F32:
        return ((const float *)data)[i];
    case DTYPE_F16:
        return f16_load(((const uint16_t *)data)[i]);
    case DTYPE_BF16:
        return bf16_load(((const uint16_t *)data)[i]);
    case DTYPE_I32:
        return (float)((const int32_t *)data)[i];
    case DTYPE_F8:
        return e4m3_load(((const uint8_t *)data)[i]);
    case DTYPE_I8:
        return ((const int8_t *)data)[i];
    }
    return 0;
}

/* Element i of an array of `t` = f. */
static inline void dtype_store(void *data, enum dtype t, int64_t i, float f)
{
    switch (t) {
    case DTYPE_F32:
        ((float *)data)[i] = f;
        break;
    case DTYPE_F16:
        ((uint16_t *)data)[i] = f16_store(f);
        break;
    case DTYPE_BF16:
        ((uint16_t *)data)[i] = bf16_store(f);
        break;
    case DTYPE_I32:
        ((int32_t *)data)[i] = (int32_t)f;
        break;
    case DTYPE_F8:
        ((uint8_t *)data)[i] = e4m3_store(f);
        break;
    case DTYPE_I8:
        ((int8_t *)data)[i] = int8_store(f);
        break;
    }
}

#endif
