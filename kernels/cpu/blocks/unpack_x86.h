/* Blocks in vectors of 32 bytes: the codes of a group and the scales of eight, by
 * format, and the quantisation of activations. Included by the files of instruction
 * sets that have AVX2; the formats are constants there. `s` is the first of the blocks
 * that hold 256 values.
 */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_UNPACK_X86_H
#define QUIRE_KERNELS_CPU_BLOCKS_UNPACK_X86_H

#ifdef __AVX2__ /* empty where a header is compiled alone */

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/blocks/sum_x86.h"
#include "kernels/cpu/simd/fetch.h"
#include "kernels/cpu/simd/kernels.h"

enum { GROUPS = 8 }; /* of 32 in 256 values */

INLINE uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

INLINE __m256i load32(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* ---- codes ---- */

/* Bytes of 256 values. */
INLINE int bytes_of(const enum weight_format_id f)
{
    switch (f) {
    case FORMAT_Q4_0:
    case FORMAT_IQ4_NL:
        return 8 * 18;
    case FORMAT_Q4_1:
        return 8 * 20;
    case FORMAT_Q5_0:
        return 8 * 22;
    case FORMAT_Q5_1:
        return 8 * 24;
    case FORMAT_Q8_0:
        return 8 * 34;
    case FORMAT_MXFP4:
        return 8 * 17;
    case FORMAT_Q2_K:
        return 84;
    case FORMAT_Q3_K:
        return 110;
    case FORMAT_Q4_K:
        return 144;
    case FORMAT_Q5_K:
        return 176;
    case FORMAT_Q6_K:
        return 210;
    default:
        return 136;
    }
}

/* Formats with minima have codes that are not negative. */
INLINE bool has_minima(const enum weight_format_id f)
{
    return f == FORMAT_Q4_1 || f == FORMAT_Q5_1 || f == FORMAT_Q2_K || f == FORMAT_Q4_K ||
           f == FORMAT_Q5_K;
}

/* Groups of 16 values, not 32. */
INLINE bool has_halves(const enum weight_format_id f)
{
    return f == FORMAT_Q2_K || f == FORMAT_Q3_K || f == FORMAT_Q6_K;
}

/* Formats with groups of 16 bytes, two codes each: the first half of a group low. */
INLINE bool is_turned(const enum weight_format_id f)
{
    return f == FORMAT_Q4_0 || f == FORMAT_Q4_1 || f == FORMAT_Q5_0 || f == FORMAT_Q5_1 ||
           f == FORMAT_IQ4_NL || f == FORMAT_MXFP4 || f == FORMAT_IQ4_XS;
}

/* What stored_codes are above the codes. */
INLINE int zero_point(const enum weight_format_id f)
{
    return f == FORMAT_Q4_0   ? 8
           : f == FORMAT_Q5_0 ? 16
           : f == FORMAT_Q3_K ? 4
           : f == FORMAT_Q6_K ? 32
                              : 0;
}

/* The low halves of 16 bytes, then the high ones. */
INLINE __m256i nibbles(const uint8_t *p)
{
    __m128i q = _mm_loadu_si128((const __m128i *)p);

    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(q, 4), q), _mm256_set1_epi8(15));
}

/* 16 where the bit is set, of 32 bits. */
INLINE __m256i fifth_bits(uint32_t bits)
{
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                            2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201ull);
    __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)bits), spread);

    v = _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
    return _mm256_and_si256(v, _mm256_set1_epi8(16));
}

/* Bits [from, ..) of each byte moved to [to, ..), and the rest cleared by `mask`. */
INLINE __m256i move_bits(__m256i v, const int from, const int to, const int mask)
{
    v = from < to   ? _mm256_slli_epi16(v, to - from)
        : from > to ? _mm256_srli_epi16(v, from - to)
                    : v;
    return _mm256_and_si256(v, _mm256_set1_epi8((char)mask));
}

INLINE __m256i look_up(const int8_t *level, __m256i v)
{
    __m128i t = _mm_loadu_si128((const __m128i *)level);

    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), v);
}

/* Where the codes of group g begin; of formats that are turned. */
INLINE const uint8_t *group_at(const enum weight_format_id f, const uint8_t *s, const int g)
{
    return f == FORMAT_IQ4_XS ? s + 8 + 16 * g
                              : s + (bytes_of(f) / GROUPS) * g + bytes_of(f) / GROUPS - 16;
}

/* Group g's codes plus zero_point(f). */
INLINE __m256i stored_codes(const enum weight_format_id f, const uint8_t *s, const int g)
{
    int half = g / 4, quarter = g % 4;

    switch (f) {
    case FORMAT_Q4_0:
        return nibbles(s + 18 * g + 2);
    case FORMAT_Q4_1:
        return nibbles(s + 20 * g + 4);
    case FORMAT_Q5_0:
        return _mm256_or_si256(nibbles(s + 22 * g + 6), fifth_bits(load_u32(s + 22 * g + 2)));
    case FORMAT_Q5_1:
        return _mm256_or_si256(nibbles(s + 24 * g + 8), fifth_bits(load_u32(s + 24 * g + 4)));
    case FORMAT_Q8_0:
        return load32(s + 34 * g + 2);
    case FORMAT_IQ4_NL:
        return look_up(weight_levels_iq4, nibbles(s + 18 * g + 2));
    case FORMAT_MXFP4:
        return look_up(weight_levels_mxfp4, nibbles(s + 17 * g + 1));
    case FORMAT_Q2_K:
        return move_bits(load32(s + 16 + 32 * half), 2 * quarter, 0, 3);
    case FORMAT_Q3_K:
        return _mm256_or_si256(move_bits(load32(s + 32 + 32 * half), 2 * quarter, 0, 3),
                               move_bits(load32(s), g, 2, 4));
    case FORMAT_Q4_K:
        return move_bits(load32(s + 16 + g / 2 * 32), g % 2 * 4, 0, 15);
    case FORMAT_Q5_K:
        return _mm256_or_si256(move_bits(load32(s + 48 + g / 2 * 32), g % 2 * 4, 0, 15),
                               move_bits(load32(s + 16), g, 4, 16));
    case FORMAT_Q6_K:
        return _mm256_or_si256(
            move_bits(load32(s + 64 * half + g % 2 * 32), quarter / 2 * 4, 0, 15),
            move_bits(load32(s + 128 + 32 * half), 2 * quarter, 4, 48));
    default: /* FORMAT_IQ4_XS */
        return look_up(weight_levels_iq4, nibbles(s + 8 + 16 * g));
    }
}

/* ---- scales ---- */

#ifdef __AVX512BW__
/* Whether load_eight_halves reads only what is in eight blocks of `step` bytes. */
INLINE bool in_vectors(const int step)
{
    return (step % 2 == 0 && step >= 18 && step <= 20) || step == 34;
}

/* Eight float16 numbers, `step` bytes apart, from vectors that have two or four. */
INLINE __m256 load_eight_halves(const uint8_t *p, const int step)
{
    const short a = (short)(step / 2), b = (short)(32 + step / 2), c = (short)(3 * a);
    __m512i v[4];

    if (step <= 20) {
        const __m512i at = _mm512_castsi128_si512(
            _mm_setr_epi16(0, a, (short)(2 * a), c, 32, b, (short)(b + a), (short)(32 + c)));
        v[0] =
            _mm512_permutex2var_epi16(_mm512_loadu_si512(p), at, _mm512_loadu_si512(p + 4 * step));
        return _mm256_cvtph_ps(_mm512_castsi512_si128(v[0]));
    }
    const __m512i at = _mm512_castsi128_si512(_mm_setr_epi16(0, a, 32, b, 0, a, 32, b));
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_loadu_si512(p + 2 * i * step);
    }
    v[0] = _mm512_permutex2var_epi16(v[0], at, v[1]);
    v[2] = _mm512_permutex2var_epi16(v[2], at, v[3]);
    return _mm256_cvtph_ps(
        _mm_unpacklo_epi64(_mm512_castsi512_si128(v[0]), _mm512_castsi512_si128(v[2])));
}
#endif

/* Eight float16 numbers, `step` >= 16 bytes apart: each load has its number where the
 * vector shall have it. */
INLINE __m128i blend_eight_halves(const uint8_t *p, const int step)
{
    __m128i v[8];

    if (step == 18) { /* two of a load: every other number is in the upper 16 bytes */
        __m256i w = load32(p);
        w = _mm256_blend_epi16(w, load32(p + 32), 0x0C);
        w = _mm256_blend_epi16(w, load32(p + 64), 0x30);
        w = _mm256_blend_epi16(w, load32(p + 96), 0xC0);
        return _mm_blend_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1), 0xAA);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        v[i] = _mm_loadu_si128((const __m128i *)(p + i * (step - 2)));
    }
    v[0] =
        _mm_blend_epi16(_mm_blend_epi16(v[0], v[1], 0x02), _mm_blend_epi16(v[2], v[3], 0x08), 0x0C);
    v[4] =
        _mm_blend_epi16(_mm_blend_epi16(v[4], v[5], 0x20), _mm_blend_epi16(v[6], v[7], 0x80), 0xC0);
    return _mm_blend_epi16(v[0], v[4], 0xF0);
}

/* Eight numbers of 16 bits: the even ones, then the odd ones. */
INLINE __m128i part_halves(__m128i v)
{
    return _mm_shuffle_epi8(v, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
}

/* n float16 numbers, `step` bytes apart, and zeros up to eight; the first is one of the
 * first two of a block. `parted`: the even ones, then the odd ones. */
INLINE __m256 load_halves(const uint8_t *p, const int step, const int32_t n, const bool parted)
{
    uint16_t h[8];
    __m128i v;

#ifdef __AVX512BW__
    if (n == 8 && in_vectors(step) && !parted) {
        return load_eight_halves(p, step);
    }
#endif
    if (n == 8) {
        v = blend_eight_halves(p, step);
        return _mm256_cvtph_ps(parted ? part_halves(v) : v);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        h[i] = 0;
        if (i < n) {
            memcpy(&h[i], p + i * step, sizeof(h[i]));
        }
    }
    v = _mm_setr_epi16((short)h[0], (short)h[1], (short)h[2], (short)h[3], (short)h[4], (short)h[5],
                       (short)h[6], (short)h[7]);
    return _mm256_cvtph_ps(parted ? part_halves(v) : v);
}

INLINE __m256 load_half(const uint8_t *p)
{
    int16_t h;

    memcpy(&h, p, sizeof(h));
    return _mm256_cvtph_ps(_mm_set1_epi16(h));
}

INLINE __m256 unsigned_times(__m128i bytes, __m256 d)
{
    return _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)));
}

INLINE __m256 signed_times(__m128i bytes, __m256 d)
{
    return _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
}

/* weight_format_half_e8m0 of n bytes, `step` apart; beyond them any numbers. `parted`
 * as of load_halves. */
INLINE __m256 load_e8m0(const uint8_t *p, const int step, const int32_t n, const bool parted)
{
    int32_t b[8];

#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        int from = !parted ? i : i < 4 ? 2 * i : 2 * i - 7;
        b[i] = from < n ? p[from * step] : 0;
    }
    __m256i e = _mm256_setr_epi32(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]);
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);

    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small));
}

/* Sixteen bytes: of each eight first the even ones, then the odd ones. */
INLINE __m128i part_bytes(__m128i v)
{
    return _mm_shuffle_epi8(v, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

/* Q4_K's and Q5_K's eight scales of 6 bits, then their eight minima, from the 12 bytes
 * at p, which 4 bytes follow: those of the first four groups, then of the last four, or
 * parted as those of part_bytes. */
INLINE __m128i six_bits(const uint8_t *p, const bool parted)
{
    __m128i v = _mm_loadu_si128((const __m128i *)p);
    __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(v, 0x98), _mm_setr_epi32(0, 0, 0, 4));
    __m128i high = _mm_srli_epi16(_mm_shuffle_epi32(v, 0x40), 2);

    low = _mm_and_si128(low, _mm_setr_epi32(0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F));
    high = _mm_and_si128(high, _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
    low = _mm_or_si128(low, high);
    return parted ? part_bytes(low) : low;
}

/* IQ4_XS's eight scales of 6 bits, less 32: their upper two bits are 2 bytes into the
 * block, the lower four 4 bytes. `parted`: the even groups', then the odd ones'. */
INLINE __m256i scales_iq4_xs(const uint8_t *s, const bool parted)
{
    __m256i high = _mm256_set1_epi32((int32_t)load_u32(s));
    __m256i low = _mm256_set1_epi32((int32_t)load_u32(s + 4));

    if (parted) {
        high = _mm256_srlv_epi32(high, _mm256_setr_epi32(12, 16, 20, 24, 14, 18, 22, 26));
        low = _mm256_srlv_epi32(low, _mm256_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28));
    } else {
        high = _mm256_srlv_epi32(high, _mm256_setr_epi32(12, 14, 16, 18, 20, 22, 24, 26));
        low = _mm256_srlv_epi32(low, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    }
    high = _mm256_and_si256(high, _mm256_set1_epi32(0x30));
    low = _mm256_and_si256(low, _mm256_set1_epi32(0x0F));
    return _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
}

/* Q3_K's sixteen scales of 6 bits, less 32. */
INLINE __m128i scales_q3_k(const uint8_t *p)
{
    uint32_t a = load_u32(p), b = load_u32(p + 4), high = load_u32(p + 8);
    const uint32_t four = 0x0F0F0F0Fu, two = 0x03030303u;
    __m128i v = _mm_setr_epi32((int32_t)((a & four) | (high & two) << 4),
                               (int32_t)((b & four) | (high >> 2 & two) << 4),
                               (int32_t)((a >> 4 & four) | (high >> 4 & two) << 4),
                               (int32_t)((b >> 4 & four) | (high >> 6 & two) << 4));

    return _mm_sub_epi8(v, _mm_set1_epi8(32));
}

/* The scales of n groups of 32, at most eight; fewer only where a group is a block.
 * `parted`: the even groups', then the odd ones'. */
INLINE __m256 scales_of(const enum weight_format_id f, const uint8_t *s, const int32_t n,
                        const bool parted)
{
    switch (f) {
    case FORMAT_MXFP4:
        return load_e8m0(s, 17, n, parted);
    case FORMAT_Q4_K:
    case FORMAT_Q5_K:
        return unsigned_times(six_bits(s + 4, parted), load_half(s));
    case FORMAT_IQ4_XS:
        return _mm256_mul_ps(load_half(s), _mm256_cvtepi32_ps(scales_iq4_xs(s, parted)));
    default:
        return load_halves(s, bytes_of(f) / GROUPS, n, parted);
    }
}

INLINE __m256 minima_of(const enum weight_format_id f, const uint8_t *s, const int32_t n,
                        const bool parted)
{
    if (f == FORMAT_Q4_1 || f == FORMAT_Q5_1) {
        return _mm256_xor_ps(load_halves(s + 2, bytes_of(f) / GROUPS, n, parted),
                             _mm256_set1_ps(-0.0f));
    }
    return unsigned_times(_mm_srli_si128(six_bits(s + 4, parted), 8), load_half(s + 2));
}

/* Sixteen scales of groups of 16 as bytes, in units of half_scale_unit. */
INLINE __m128i half_scale_bytes(const enum weight_format_id f, const uint8_t *s)
{
    if (f == FORMAT_Q2_K) {
        return _mm_and_si128(_mm_loadu_si128((const __m128i *)s), _mm_set1_epi8(15));
    }
    return f == FORMAT_Q3_K ? scales_q3_k(s + 96) : _mm_loadu_si128((const __m128i *)(s + 192));
}

INLINE __m256 half_scale_unit(const enum weight_format_id f, const uint8_t *s)
{
    return load_half(s + (f == FORMAT_Q2_K ? 80 : f == FORMAT_Q3_K ? 108 : 208));
}

/* The scales of sixteen groups of 16: the first and the last eight, each in order or
 * parted. */
INLINE void half_scales_of(const enum weight_format_id f, const uint8_t *s, __m256 ret[2],
                           const bool parted)
{
    __m256 d = half_scale_unit(f, s);
    __m128i v = half_scale_bytes(f, s);

    v = parted ? part_bytes(v) : v;
    ret[0] = signed_times(v, d);
    ret[1] = signed_times(_mm_srli_si128(v, 8), d);
}

/* Q2_K's sixteen minima, likewise. */
INLINE void half_minima_of(const uint8_t *s, __m256 ret[2], const bool parted)
{
    __m128i v = _mm_srli_epi16(_mm_loadu_si128((const __m128i *)s), 4);
    __m256 d = load_half(s + 82);

    v = _mm_and_si128(v, _mm_set1_epi8(15));
    v = parted ? part_bytes(v) : v;
    ret[0] = unsigned_times(v, d);
    ret[1] = unsigned_times(_mm_srli_si128(v, 8), d);
}

/* ---- activations ---- */

/* The greatest lane of each of eight vectors. */
INLINE __m256i greatest_of_each(const __m256i v[GROUPS])
{
    __m256i two[4], four[2];

#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        two[i] = _mm256_max_epu32(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                                  _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        four[i] = _mm256_max_epu32(_mm256_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                                   _mm256_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
    }
    return _mm256_max_epu32(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                            _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

/* The greatest magnitudes of eight groups, as bits; those of a NaN are greater. */
INLINE __m256i magnitudes(const float *x)
{
    const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i v[GROUPS];

#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
        __m256i m = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256i of_x = _mm256_castps_si256(_mm256_loadu_ps(x + 32 * g + 8 * i));
            m = _mm256_max_epu32(m, _mm256_and_si256(of_x, mask));
        }
        v[g] = m;
    }
    return greatest_of_each(v);
}

INLINE void put_halves(void *to, __m256i v)
{
    __m128i *at = to;

    _mm_store_si128(at, _mm256_castsi256_si128(v));
    _mm_store_si128(at + 4, _mm256_extracti128_si256(v, 1));
}

/* The codes of a group, and those of its turned order. */
INLINE __m256i put_group_codes(struct act_block *out, const int g, const float *x, __m256 inverse,
                               __m256i some)
{
    __m256i v[4];

#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), inverse));
    }
    __m256i w = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    w = _mm256_permutevar8x32_epi32(w, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    w = _mm256_and_si256(w, some);
    _mm256_store_si256((__m256i *)(out->code + 32 * g), w);
    const int at = g / 4 * 128 + g % 4 * 16;
    put_halves(out->turned + at, w);
    put_halves(out->magnitude + at, _mm256_abs_epi8(w));
    return w;
}

/* a and b with the lanes of each pair side by side. */
INLINE void interleave(__m256i a, __m256i b, __m256i ret[2])
{
    __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);

    ret[0] = _mm256_permute2x128_si256(low, high, 0x20);
    ret[1] = _mm256_permute2x128_si256(low, high, 0x31);
}

/* The members of `out` that are parted. Of 16 codes: the sums of the first and the last
 * halves of four groups. */
INLINE void put_parted(struct act_block *out, __m256i first_four, __m256i last_four, __m256i total,
                       __m256 scale)
{
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    __m256i parted_total = _mm256_permutevar8x32_epi32(total, order);
    __m256 parted_scale = _mm256_permutevar8x32_ps(scale, order);

    _mm256_store_si256((__m256i *)out->parted_total16, first_four);
    _mm256_store_si256((__m256i *)(out->parted_total16 + 8), last_four);
    _mm256_store_si256((__m256i *)out->parted_total32, parted_total);
    _mm256_store_ps(out->parted_scale, parted_scale);
    _mm256_store_ps(out->parted_sum32,
                    _mm256_mul_ps(parted_scale, _mm256_cvtepi32_ps(parted_total)));
}

/* The sums of codes, of which v[g] has four at a time of group g, and scaled. */
INLINE void put_totals(struct act_block *out, const __m256i v[GROUPS], __m256 scale)
{
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    __m256i first = _mm256_permute2x128_si256(a, b, 0x20);
    __m256i last = _mm256_permute2x128_si256(a, b, 0x31), sum = _mm256_add_epi32(first, last);
    __m256i half[2], by[2];

    _mm256_store_si256((__m256i *)out->total32, sum);
    _mm256_store_ps(out->sum32, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum)));
    put_parted(out, a, b, sum, scale);
    interleave(first, last, half);
    interleave(_mm256_castps_si256(scale), _mm256_castps_si256(scale), by);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        _mm256_store_si256((__m256i *)(out->total16 + 8 * i), half[i]);
        _mm256_store_ps(out->sum16 + 8 * i,
                        _mm256_mul_ps(_mm256_castsi256_ps(by[i]), _mm256_cvtepi32_ps(half[i])));
    }
}

/* 256 values. */
static void quantise_block(struct act_block *out, const float *x)
{
    const __m256i ones = _mm256_set1_epi8(1), infinite = _mm256_set1_epi32(0x7F800000);
    const __m256 top = _mm256_set1_ps(127.0f);
    __m256i max = magnitudes(x), finite = _mm256_cmpgt_epi32(infinite, max);
    __m256 most = _mm256_castsi256_ps(max);
    __m256 small = _mm256_cmp_ps(most, _mm256_set1_ps(1e-30f), _CMP_LT_OQ);
    __m256 some = _mm256_andnot_ps(small, _mm256_castsi256_ps(finite));
    __m256 nan = _mm256_andnot_ps(_mm256_castsi256_ps(finite), _mm256_set1_ps(NAN));
    __m256 scale = _mm256_or_ps(_mm256_and_ps(some, _mm256_div_ps(most, top)), nan);
    _Alignas(32) float inverse[GROUPS];
    _Alignas(32) int32_t mask[GROUPS];
    __m256i v[GROUPS];

    _mm256_store_ps(inverse, _mm256_and_ps(some, _mm256_div_ps(top, most)));
    _mm256_store_si256((__m256i *)mask, _mm256_castps_si256(some));
    _mm256_store_ps(out->scale, scale);
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
        __m256i w = put_group_codes(out, g, x + 32 * g, _mm256_set1_ps(inverse[g]),
                                    _mm256_set1_epi32(mask[g]));
        v[g] = _mm256_madd_epi16(_mm256_maddubs_epi16(ones, w), _mm256_set1_epi16(1));
    }
    put_totals(out, v, scale);
}

static inline void quantise(struct act_block *out, int32_t n_x, const float *x, int32_t n)
{
    float last[256];

    for (int32_t at = 0; at < n; at += 256, out += n_x) {
        const float *from = x + at;
        if (n - at < 256) {
            memset(last, 0, sizeof(last));
            from = memcpy(last, from, (size_t)(n - at) * sizeof(*x));
        }
        quantise_block(out, from);
    }
}

#endif
#endif
