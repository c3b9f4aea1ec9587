/* The arithmetic of sampling that all backends must agree on to the last bit: hash,
 * Gumbel noise, fixed-point mass.
 *
 * Usable from C and from CUDA. All floating-point operations here are single IEEE
 * operations rounded to nearest, none fused (-std=c11 turns contraction off in the C
 * build; CUDA's _rn intrinsics are never fused), so that scalar units, vector units and
 * GPUs agree. Given the same logits, any two backends sample the same token.
 *
 *     key   = noise_key(seed, position)                  one per row
 *     z     = (logit - max) * noise_inv_temperature(T)   <= 0
 *     mass  = sample_mass(z)                             0 .. 2^40: exp(z) in fixed point
 *     score = z + noise_gumbel(noise_bits(key, token))   the greatest wins; on a tie, the
 *                                                        smallest id
 *
 * The noise lies in [NOISE_MIN, NOISE_MAX], a range of about 26 nats. A token of mass 0
 * lies 27.7 nats or more below the best one, so it can never win and may be skipped.
 */
#ifndef QUIRE_KERNELS_NOISE_H
#define QUIRE_KERNELS_NOISE_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define NOISE_FN static __host__ __device__ __forceinline__
#else
#define NOISE_FN static inline
#endif

#ifdef __CUDA_ARCH__
#define NOISE_ADD(a, b) __fadd_rn((a), (b))
#define NOISE_SUB(a, b) __fsub_rn((a), (b))
#define NOISE_MUL(a, b) __fmul_rn((a), (b))
#define NOISE_DIV(a, b) __fdiv_rn((a), (b))
#else
#define NOISE_ADD(a, b) ((a) + (b))
#define NOISE_SUB(a, b) ((a) - (b))
#define NOISE_MUL(a, b) ((a) * (b))
#define NOISE_DIV(a, b) ((a) / (b))
#endif

/* Bounds of noise_gumbel. */
#define NOISE_MAX 22.9f
#define NOISE_MIN (-3.2f)
/* The best token's mass is 2^MASS_BITS; the sum over 2^22 tokens (LIMIT_VOCAB) fits
 * into 64 bits. */
#define MASS_BITS 40

/* The finaliser of SplitMix64 (Steele, Lea, Flood 2014). */
NOISE_FN uint64_t noise_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* The key of one sampling row: the sequence's seed and the position of the token to be
 * sampled. */
NOISE_FN uint64_t noise_key(uint64_t seed, int32_t position)
{
    return noise_mix(seed ^ noise_mix((uint64_t)(uint32_t)position * 0x9E3779B97F4A7C15ull + 1));
}

/* 32 uniform bits for one token id: counter-based, so ids can be evaluated in any
 * order. */
NOISE_FN uint32_t noise_bits(uint64_t key, int32_t token)
{
    return (uint32_t)(noise_mix(key + ((uint64_t)(uint32_t)token + 1) * 0x9E3779B97F4A7C15ull) >>
                      32);
}

NOISE_FN uint32_t noise_float_bits(float x)
{
    uint32_t u;

    memcpy(&u, &x, 4);
    return u;
}

NOISE_FN float noise_bits_float(uint32_t u)
{
    float x;

    memcpy(&x, &u, 4);
    return x;
}

/* 2 atanh(num / den) for 0 <= |num / den| <= 1/3: seven terms of the odd series. */
NOISE_FN float noise_atanh2(float num, float den)
{
    float s = NOISE_DIV(num, den);
    float z = NOISE_MUL(s, s);
    float p = 1.0f / 15;

    p = NOISE_ADD(NOISE_MUL(p, z), 1.0f / 13);
    p = NOISE_ADD(NOISE_MUL(p, z), 1.0f / 11);
    p = NOISE_ADD(NOISE_MUL(p, z), 1.0f / 9);
    p = NOISE_ADD(NOISE_MUL(p, z), 1.0f / 7);
    p = NOISE_ADD(NOISE_MUL(p, z), 1.0f / 5);
    p = NOISE_ADD(NOISE_MUL(p, z), 1.0f / 3);
    p = NOISE_MUL(NOISE_MUL(p, z), s);
    p = NOISE_ADD(p, s);
    return NOISE_ADD(p, p);
}

/* Natural logarithm of a positive normal float. */
NOISE_FN float noise_log(float x)
{
    uint32_t u = noise_float_bits(x);
    int32_t e = (int32_t)(u >> 23) - 127;
    float m = noise_bits_float((u & 0x7FFFFFu) | 0x3F800000u);

    if (m > 1.41421356f) {
        m = NOISE_MUL(m, 0.5f);
        e++;
    }
    float a = noise_atanh2(NOISE_SUB(m, 1.0f), NOISE_ADD(m, 1.0f));
    return NOISE_ADD(NOISE_MUL((float)e, 0.693147181f), a);
}

/* A Gumbel variate -log(-log u), u = 1 - (bits + 1/2) / 2^32. Near u = 1 the logarithm
 * is taken of 1 - w with w = 1 - u, which keeps all 32 bits. */
NOISE_FN float noise_gumbel(uint32_t bits)
{
    float e; /* -log u */

    if (bits < 0x80000000u) {
        float w = NOISE_MUL(NOISE_ADD((float)(int32_t)bits, 0.5f), 0x1p-32f);
        e = noise_atanh2(w, NOISE_SUB(2.0f, w));
    } else {
        float u = NOISE_MUL(NOISE_ADD((float)(int32_t)~bits, 0.5f), 0x1p-32f);
        e = -noise_log(u);
    }
    return -noise_log(e);
}

/* 1 / temperature; temperatures below 1e-5 count as 1e-5. */
NOISE_FN float noise_inv_temperature(float temperature)
{
    return NOISE_DIV(1.0f, temperature < 1e-5f ? 1e-5f : temperature);
}

/* exp(z) for z <= 0; 0 below -80. Relative error below 2e-7. */
NOISE_FN float sample_exp(float z)
{
    if (!(z > -80.0f)) {
        return 0.0f;
    }
    /* round to an integer */
    float n = NOISE_SUB(NOISE_ADD(NOISE_MUL(z, 1.44269504f), 12582912.0f), 12582912.0f);
    float r = NOISE_SUB(NOISE_SUB(z, NOISE_MUL(n, 0.693359375f)), NOISE_MUL(n, -2.12194440e-4f));
    float p = 1.0f / 720;
    p = NOISE_ADD(NOISE_MUL(p, r), 1.0f / 120);
    p = NOISE_ADD(NOISE_MUL(p, r), 1.0f / 24);
    p = NOISE_ADD(NOISE_MUL(p, r), 1.0f / 6);
    p = NOISE_ADD(NOISE_MUL(p, r), 0.5f);
    p = NOISE_ADD(NOISE_MUL(NOISE_MUL(p, r), r), r);
    p = NOISE_ADD(p, 1.0f);
    return NOISE_MUL(p, noise_bits_float((uint32_t)((int32_t)n + 127) << 23));
}

/* Probability relative to the best token's, in units of 2^-MASS_BITS. An integer, so
 * that sums do not depend on the order of summation. */
NOISE_FN uint64_t sample_mass(float z)
{
    return (uint64_t)NOISE_MUL(sample_exp(z), 1099511627776.0f);
}

/* The mass that the tokens kept by top-p must reach together, of `total`: at least
 * 1. */
NOISE_FN uint64_t sample_mass_goal(float top_p, uint64_t total)
{
    uint64_t goal = (uint64_t)((double)top_p * (double)total);

    return goal == 0 ? 1 : goal > total ? total : goal;
}

/* An unsigned key that orders as the float does (not for NaN); -0 is just below +0. */
NOISE_FN uint32_t sample_order(float x)
{
    uint32_t u = noise_float_bits(x);

    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

#endif
