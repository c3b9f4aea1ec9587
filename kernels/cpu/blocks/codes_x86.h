/* Codes whose scales are apart in vectors of 32 bytes, and their scales eight at a
 * time: for the rows and panels of instruction sets that have AVX2. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_CODES_X86_H
#define QUIRE_KERNELS_CPU_BLOCKS_CODES_X86_H

#include "kernels/cpu/blocks/codes.h"
#include "kernels/cpu/blocks/unpack_x86.h"

#ifdef __AVX2__ /* empty where a header is compiled alone */

INLINE bool takes_bytes(const enum weight_format_id f)
{
    return f == FORMAT_FP8 || f == FORMAT_INT8;
}

/* Bytes of n codes. */
INLINE int32_t codes_bytes(const enum weight_format_id f, int32_t n)
{
    return takes_bytes(f) ? n : (n + 1) / 2;
}

/* ---- scales ---- */

/* The numbers of e4m3 at eight bytes, less NaN: the product makes up for the exponent's
 * bias. */
INLINE __m256 e4m3_of(__m256i code)
{
    __m256i rest = _mm256_and_si256(code, _mm256_set1_epi32(0x7F));
    __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(0x7F), code), 24);
    __m256i bits = _mm256_or_si256(sign, _mm256_slli_epi32(rest, 20));

    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}

/* Powers of two, of which 2^-127 is subnormal; none is a NaN. */
INLINE __m256 e8m0_of(__m256i code)
{
    __m256i least = _mm256_cmpeq_epi32(code, _mm256_setzero_si256());
    __m256i bits = _mm256_slli_epi32(code, 23);

    least = _mm256_and_si256(least, _mm256_set1_epi32(0x00400000));
    return _mm256_castsi256_ps(_mm256_or_si256(bits, least));
}

/* Eight scales. */
INLINE __m256 eight_scales(const enum scale_type t, const void *at)
{
    switch (t) {
    case SCALE_F32:
        return _mm256_loadu_ps(at);
    case SCALE_F16:
        return _mm256_cvtph_ps(_mm_loadu_si128(at));
    case SCALE_BF16:
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16));
    case SCALE_E8M0:
        return e8m0_of(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at)));
    default:
        return e4m3_of(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at)));
    }
}

/* n scales at `at`, each to 2^shift neighbours. */
INLINE void spread_scales(float *to, const enum scale_type t, const char *at, int32_t n,
                          int32_t shift, float scale_factor, float unit)
{
    const __m256 factor = _mm256_set1_ps(scale_factor), of_code = _mm256_set1_ps(unit);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int32_t bytes = t == SCALE_F32 ? 4 : t == SCALE_F16 || t == SCALE_BF16 ? 2 : 1;

    for (; n > 0; n -= 8, at += 8 * bytes) {
        char last[32] = {0};
        const void *from = n < 8 ? memcpy(last, at, (size_t)(n * bytes)) : at;
        __m256 v = _mm256_mul_ps(_mm256_mul_ps(factor, eight_scales(t, from)), of_code);
        for (int32_t k = 0; k < 1 << shift; k++, to += 8) {
            __m256i of = _mm256_srli_epi32(_mm256_add_epi32(lane, _mm256_set1_epi32(8 * k)), shift);
            _mm256_store_ps(to, _mm256_permutevar8x32_ps(v, of));
        }
    }
}

/* Those of a row from scale `first` on. */
static inline void scales_of_row(float *to, const struct weight_scales *s, int64_t first, int32_t n,
                                 int32_t shift, float unit)
{
    const char *at = (const char *)s->data + first * scale_type_bytes(s->type);

    switch (s->type) {
    case SCALE_F32:
        spread_scales(to, SCALE_F32, at, n, shift, s->factor, unit);
        break;
    case SCALE_F16:
        spread_scales(to, SCALE_F16, at, n, shift, s->factor, unit);
        break;
    case SCALE_BF16:
        spread_scales(to, SCALE_BF16, at, n, shift, s->factor, unit);
        break;
    case SCALE_E8M0:
        spread_scales(to, SCALE_E8M0, at, n, shift, s->factor, unit);
        break;
    case SCALE_E4M3:
        spread_scales(to, SCALE_E4M3, at, n, shift, s->factor, unit);
        break;
    }
}

/* code_groups_of; members that `f` does not use may be anything. */
static void groups_of_span(struct code_groups *ret, const struct row_scales *r,
                           enum weight_format_id f, int32_t group, int32_t at, int32_t n)
{
    const struct weight_scales *s = r->of;
    int32_t width = s->group_cols > 0 ? s->group_cols : n, here = MIN(CODES_SPAN, n - at);
    int32_t shift = width >= n ? 0 : __builtin_ctz((unsigned)(width / group));
    int32_t n_groups = (int32_t)div_ceil(here, group);
    int64_t i = s->group_rows > 0 ? r->row / s->group_rows : 0;

    if (s->zero || (width < n && (shift > 3 || width != group << shift))) {
        code_groups_of(r, f, group, at, n, ret);
        return;
    }
    if (width < n) {
        scales_of_row(ret->scale, s, i * s->stride + at / width, (int32_t)div_ceil(here, width),
                      shift, codes_unit(f));
    } else {
        __m256 v = _mm256_set1_ps(s->factor * weight_scale_load(s, i * s->stride) * codes_unit(f));
        for (int32_t g = 0; g < n_groups; g += 8) {
            _mm256_store_ps(ret->scale + g, v);
        }
    }
    for (int32_t g = n_groups; g % 16 != 0; g++) {
        ret->scale[g] = 0;
    }
}

/* ---- codes ---- */

/* Zero points of FORMAT_INT4 for the 32 codes of group g of 32; `zero`: of groups,
 * NULL: all are 8. */
INLINE __m256i zeros_of(const int8_t *zero, const int g, const int group)
{
    if (!zero) {
        return _mm256_set1_epi8(8);
    }
    return group == 32
               ? _mm256_set1_epi8(zero[g])
               : _mm256_set_m128i(_mm_set1_epi8(zero[2 * g + 1]), _mm_set1_epi8(zero[2 * g]));
}

/* The 32 codes of group g of 32, with their sign; not of FORMAT_FP8. */
INLINE __m256i signed_codes(const enum weight_format_id f, const uint8_t *codes, const int g,
                            const int8_t *zero, const int group)
{
    if (f == FORMAT_INT8) {
        return load32(codes + 32 * g);
    }
    __m128i pairs = _mm_loadu_si128((const __m128i *)(codes + 16 * g));
    __m256i v = _mm256_cvtepu8_epi16(pairs);
    v = _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16(v, 4)), _mm256_set1_epi8(15));
    return f == FORMAT_FP4 ? look_up(weight_levels_mxfp4, v)
                           : _mm256_sub_epi8(v, zeros_of(zero, g, group));
}

/* Sixteen codes of e4m3 as integers: 512 * high + low, with the sign in both. */
struct halves_of_codes {
    __m256i high, low;
};

INLINE struct halves_of_codes halves_of(const uint8_t *codes)
{
    const __m256i powers = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(1, 1, 2, 4, 8, 16, 32, 64, (char)128, 0, 0, 0, 0, 0, 0, 0));
    const __m256i great_powers = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64));
    __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
    __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(c, 3), _mm256_set1_epi16(15));
    __m256i normal = _mm256_cmpgt_epi16(exponent, _mm256_setzero_si256());
    __m256i digits = _mm256_or_si256(_mm256_and_si256(c, _mm256_set1_epi16(7)),
                                     _mm256_and_si256(normal, _mm256_set1_epi16(8)));
    __m256i power = _mm256_and_si256(_mm256_shuffle_epi8(powers, exponent), _mm256_set1_epi16(255));
    __m256i sign = _mm256_or_si256(_mm256_slli_epi16(c, 8), _mm256_set1_epi16(1));

    power =
        _mm256_or_si256(power, _mm256_slli_epi16(_mm256_shuffle_epi8(great_powers, exponent), 8));
    __m256i low = _mm256_and_si256(_mm256_mullo_epi16(digits, power), _mm256_set1_epi16(511));
    __m256i high = _mm256_mulhi_epu16(_mm256_slli_epi16(digits, 7), power);
    return (struct halves_of_codes){_mm256_sign_epi16(high, sign), _mm256_sign_epi16(low, sign)};
}

#endif
#endif
