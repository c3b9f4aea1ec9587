/* The codes of blocks in vectors of 64 bytes, without a sign, as the integer dot
 * products of AVX-512 take them. Formats whose groups are 16 bytes of two codes each,
 * the first half of a group low, are "turned": a vector has the first or the last
 * halves of four groups, since these are what one load leaves. The others have two
 * neighbouring groups. `s` is the first of the blocks that hold 256 values. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_UNPACK_AVX512_H
#define QUIRE_KERNELS_CPU_BLOCKS_UNPACK_AVX512_H

#include "kernels/cpu/blocks/unpack_x86.h"

#ifdef __AVX512BW__

/* log2 of what the codes here are above those of the format; -1: nothing. */
INLINE int zero_shift(const enum weight_format_id f)
{
    switch (zero_point(f)) {
    case 4:
        return 2;
    case 8:
        return 3;
    case 16:
        return 4;
    case 32:
        return 5;
    default:
        return has_minima(f) ? -1 : 7;
    }
}

/* The 16 bytes of n of four groups from `g` on; zeros behind them. */
INLINE __m512i load_groups(const enum weight_format_id f, const uint8_t *s, const int g,
                           const int32_t n)
{
    __m512i v = _mm512_zextsi128_si512(_mm_loadu_si128((const __m128i *)group_at(f, s, g)));

    if (f == FORMAT_IQ4_XS) {
        return _mm512_loadu_si512(s + 8 + 16 * g);
    }
    if (n > 1) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)group_at(f, s, g + 1)), 1);
    }
    if (n > 2) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)group_at(f, s, g + 2)), 2);
    }
    if (n > 3) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)group_at(f, s, g + 3)), 3);
    }
    return v;
}

/* 16 where the fifth bits of n of four groups are set: of their first halves, their
 * last ones. */
INLINE void fifth_of_groups(const enum weight_format_id f, const uint8_t *s, const int g,
                            const int32_t n, __m512i ret[2])
{
    uint64_t mask[2] = {0};

    for (int i = 0; i < 4 && i < n; i++) {
        uint32_t bits = load_u32(group_at(f, s, g + i) - 4);
        mask[0] |= (uint64_t)(bits & 0xFFFF) << (16 * i);
        mask[1] |= (uint64_t)(bits >> 16) << (16 * i);
    }
    ret[0] = _mm512_maskz_mov_epi8(mask[0], _mm512_set1_epi8(16));
    ret[1] = _mm512_maskz_mov_epi8(mask[1], _mm512_set1_epi8(16));
}

/* The levels of the four bits of each code, plus 128. */
INLINE __m512i level_of(const int8_t *level, __m512i code)
{
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)level));

    return _mm512_shuffle_epi8(_mm512_xor_si512(table, _mm512_set1_epi8(-128)), code);
}

/* The codes of the low and of the high four bits of each byte. */
INLINE void split_codes(const enum weight_format_id f, __m512i v, __m512i ret[2])
{
    const __m512i four = _mm512_set1_epi8(15);

    ret[0] = _mm512_and_si512(v, four);
    ret[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), four);
    if (f == FORMAT_MXFP4 || f == FORMAT_IQ4_NL || f == FORMAT_IQ4_XS) {
        const int8_t *level = f == FORMAT_MXFP4 ? weight_levels_mxfp4 : weight_levels_iq4;
        ret[0] = level_of(level, ret[0]);
        ret[1] = level_of(level, ret[1]);
    }
}

/* The halves of n of four groups from group g on, first and last. */
INLINE void turned_codes(const enum weight_format_id f, const uint8_t *s, const int g,
                         const int32_t n, __m512i ret[2])
{
    split_codes(f, load_groups(f, s, g, n), ret);
    if (f == FORMAT_Q5_0 || f == FORMAT_Q5_1) {
        __m512i fifth[2];
        fifth_of_groups(f, s, g, n, fifth);
        ret[0] = _mm512_or_si512(ret[0], fifth[0]);
        ret[1] = _mm512_or_si512(ret[1], fifth[1]);
    }
}

INLINE __m512i both(const uint8_t *p)
{
    return _mm512_broadcast_i64x4(load32(p));
}

/* Each byte's bits from `even` and `odd` on, in the lower and the upper 32 bytes, moved
 * to bit `to`; the others are what they come to be. */
INLINE __m512i spread_bits(__m512i v, const int even, const int odd, const int to)
{
    __m512i left = _mm512_inserti64x4(_mm512_set1_epi16((short)(to > even ? to - even : 0)),
                                      _mm256_set1_epi16((short)(to > odd ? to - odd : 0)), 1);
    __m512i right = _mm512_inserti64x4(_mm512_set1_epi16((short)(even > to ? even - to : 0)),
                                       _mm256_set1_epi16((short)(odd > to ? odd - to : 0)), 1);

    v = to > even || to > odd ? _mm512_sllv_epi16(v, left) : v;
    return even > to || odd > to ? _mm512_srlv_epi16(v, right) : v;
}

/* low | (high & mask) */
INLINE __m512i with_bits(__m512i low, __m512i high, const int mask)
{
    return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8((char)mask), 0xF8);
}

/* Codes of groups 2p and 2p + 1 of a format that is not turned. */
INLINE __m512i pair_codes(const enum weight_format_id f, const uint8_t *s, const int p)
{
    const __m512i four = _mm512_set1_epi8(15), two = _mm512_set1_epi8(3);
    const int half = p / 2, in_half = p % 2;
    __m512i v;

    switch (f) {
    case FORMAT_Q4_K:
        return _mm512_and_si512(spread_bits(both(s + 16 + 32 * p), 0, 4, 0), four);
    case FORMAT_Q5_K:
        v = _mm512_and_si512(spread_bits(both(s + 48 + 32 * p), 0, 4, 0), four);
        return with_bits(v, spread_bits(both(s + 16), 2 * p, 2 * p + 1, 4), 16);
    case FORMAT_Q6_K:
        v = _mm512_loadu_si512(s + 64 * half);
        v = _mm512_and_si512(in_half ? _mm512_srli_epi16(v, 4) : v, four);
        return with_bits(v, spread_bits(both(s + 128 + 32 * half), 4 * in_half, 4 * in_half + 2, 4),
                         48);
    case FORMAT_Q2_K:
        return _mm512_and_si512(
            spread_bits(both(s + 16 + 32 * half), 4 * in_half, 4 * in_half + 2, 0), two);
    case FORMAT_Q3_K:
        v = spread_bits(both(s + 32 + 32 * half), 4 * in_half, 4 * in_half + 2, 0);
        return with_bits(_mm512_and_si512(v, two), spread_bits(both(s), 2 * p, 2 * p + 1, 2), 4);
    default: /* FORMAT_Q8_0 */
        v = _mm512_inserti64x4(_mm512_castsi256_si512(load32(s + 68 * p + 2)),
                               load32(s + 68 * p + 36), 1);
        return _mm512_xor_si512(v, _mm512_set1_epi8(-128));
    }
}

#endif
#endif
