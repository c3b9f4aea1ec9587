/* Products with codes of e4m3 whose scales are apart, with AVX-512's permutations of
 * bytes: an integer of 18 bits is three digits, each looked up for 64 codes at once. */
#include "kernels/cpu/blocks/codes_sums_avx512.h"
#include "kernels/cpu/blocks/e4m3_avx512.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#define CODES_FORMATS(X) X(FP8)

struct codes {
    __m512i digit[DIGITS][PAIRS]; /* DIGIT_ABOVE too high, the greatest first */
};

/* The integer of a code without a sign, and its digits as they are stored. */
#define INTEGER(C) ((((C) & 7) | ((C) > 7 ? 8 : 0)) << ((C) > 7 ? ((C) >> 3) - 1 : 0))
#define DIGIT(I, C) (DIGIT_ABOVE + (INTEGER(C) >> (DIGITS - 1 - (I)) * DIGIT_BITS & 63))
#define FOUR(I, C) DIGIT(I, C), DIGIT(I, C + 1), DIGIT(I, C + 2), DIGIT(I, C + 3)
#define SIXTEEN(I, C) FOUR(I, C), FOUR(I, C + 4), FOUR(I, C + 8), FOUR(I, C + 12)
#define HALF(I, C) SIXTEEN(I, C), SIXTEEN(I, C + 16), SIXTEEN(I, C + 32), SIXTEEN(I, C + 48)
#define ALL(I) {HALF(I, 0), HALF(I, 64)}

_Alignas(64) static const uint8_t table[DIGITS][128] = {ALL(0), ALL(1), ALL(2)};

INLINE void unpack(struct codes *ret, const enum weight_format_id f, const uint8_t *codes,
                   const int8_t *zero, const int group)
{
    const __m512i twice_above = _mm512_set1_epi8((char)(2 * DIGIT_ABOVE));

    (void)f;
    (void)zero;
    (void)group;
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++) {
        __m512i c = _mm512_loadu_si512(codes + 64 * p);
        __mmask64 minus = _mm512_movepi8_mask(c);
#pragma GCC unroll 3
        for (int i = 0; i < DIGITS; i++) {
            __m512i v = _mm512_permutex2var_epi8(_mm512_load_si512(table[i]), c,
                                                 _mm512_load_si512(table[i] + 64));
            ret->digit[i][p] = _mm512_mask_sub_epi8(v, minus, twice_above, v);
        }
    }
}

INLINE __m512i products(const struct codes *w, const struct act_block *x, const int p)
{
    __m512i of_x = _mm512_load_si512(x->code + 64 * p), sum = _mm512_setzero_si512();

    sum = _mm512_dpbusd_epi32(sum, w->digit[0][p], of_x);
    sum = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, DIGIT_BITS), w->digit[1][p], of_x);
    return _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, DIGIT_BITS), w->digit[2][p], of_x);
}

INLINE void add_block(struct sums *s, const enum weight_format_id f, const struct codes *w,
                      const float *scale, const float *min, const struct act_block *x,
                      const int n_x, const int group, const bool minima)
{
    (void)f;
#pragma GCC unroll 4
    for (int j = 0; j < n_x; j++) {
        __m512i sums = sums_of_vectors(products(w, &x[j], 0), products(w, &x[j], 1),
                                       products(w, &x[j], 2), products(w, &x[j], 3));
        s->acc[j] = group == 32 ? add_groups(s->acc[j], pairs_of_sums(sums), DIGITS_ABOVE, scale,
                                             min, &x[j], minima)
                                : add_halves(s->acc[j], halves_of_sums(sums), DIGITS_ABOVE, scale,
                                             min, &x[j], minima);
    }
}

#include "kernels/cpu/blocks/codes_rows_x86.h"

void cpu_codes_vbmi_avx512vnni(struct cpu_kernels *k)
{
    set_dots(&k->blocks);
}

#endif
