/* Codes of e4m3 as integers, multiples of their smallest number, with AVX-512. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_E4M3_AVX512_H
#define QUIRE_KERNELS_CPU_BLOCKS_E4M3_AVX512_H

#ifdef __AVX512BW__ /* empty where a header is compiled alone */

#include <immintrin.h>

#include "kernels/cpu/simd/fetch.h"

enum {
    DIGIT_BITS = 6, /* of the bytes that an integer of 18 bits is divided into */
    DIGITS = 3,
    DIGIT_ABOVE = 64, /* digits with a sign are stored so much higher */
    /* what integers of such digits are too high by */
    DIGITS_ABOVE = DIGIT_ABOVE * (1 + (1 << DIGIT_BITS) + (1 << 2 * DIGIT_BITS)),
};

/* Thirty-two magnitudes, 512 * high + low, and which are negative. */
struct e4m3_words {
    __m512i high, low;
    __mmask32 minus;
};

INLINE struct e4m3_words e4m3_words_of(const uint8_t *codes)
{
    __m512i c = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    __m512i exponent = _mm512_and_si512(_mm512_srli_epi16(c, 3), _mm512_set1_epi16(15));
    __mmask32 normal = _mm512_test_epi16_mask(exponent, exponent);
    __m512i digits = _mm512_and_si512(c, _mm512_set1_epi16(7));
    __m512i shift = _mm512_mask_sub_epi16(exponent, normal, exponent, _mm512_set1_epi16(1));

    digits = _mm512_or_si512(digits, _mm512_maskz_set1_epi16(normal, 8));
    return (struct e4m3_words){
        .high = _mm512_srlv_epi16(_mm512_slli_epi16(digits, 5),
                                  _mm512_sub_epi16(_mm512_set1_epi16(14), shift)),
        .low = _mm512_and_si512(_mm512_sllv_epi16(digits, shift), _mm512_set1_epi16(511)),
        .minus = _mm512_test_epi16_mask(c, _mm512_set1_epi16(0x80))};
}

/* v, or -v where it is of a negative number. */
INLINE __m512i e4m3_signed(__m512i v, __mmask32 minus)
{
    return _mm512_mask_sub_epi16(v, minus, _mm512_setzero_si512(), v);
}

/* The digits of 32 codes, DIGIT_ABOVE too high, the greatest first: ret[i * step]. */
INLINE void e4m3_digits(uint8_t *ret, const int step, const uint8_t *codes)
{
    const __m512i six = _mm512_set1_epi16(63), above = _mm512_set1_epi16(DIGIT_ABOVE);
    struct e4m3_words w = e4m3_words_of(codes);
    __m512i middle = _mm512_and_si512(_mm512_slli_epi16(w.high, 3), six);
    __m512i digit[DIGITS] = {_mm512_srli_epi16(w.high, 3),
                             _mm512_or_si512(middle, _mm512_srli_epi16(w.low, DIGIT_BITS)),
                             _mm512_and_si512(w.low, six)};

#pragma GCC unroll 3
    for (int i = 0; i < DIGITS; i++) {
        __m512i v = _mm512_add_epi16(e4m3_signed(digit[i], w.minus), above);
        _mm256_storeu_si256((__m256i *)(ret + i * step), _mm512_cvtepi16_epi8(v));
    }
}

#endif
#endif
