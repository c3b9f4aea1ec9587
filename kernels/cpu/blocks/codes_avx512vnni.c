/* Products with codes whose scales are apart with AVX-512's integer dot products: as
 * codes_plain.c specifies. Those of bytes want codes without a sign; what they are too
 * high by is taken off the sums of groups. Codes of e4m3 are two words each. */
#include "kernels/cpu/blocks/codes_sums_avx512.h"
#include "kernels/cpu/blocks/e4m3_avx512.h"

#ifdef __AVX512VNNI__

/* 256 codes of a row. */
struct codes {
    __m512i v[PAIRS];                  /* of two groups of 32, above_by too high */
    __m512i high[GROUPS], low[GROUPS]; /* of e4m3, of a group each: 512 * high + low */
};

/* What codes.v are above the codes. */
INLINE int above_by(const enum weight_format_id f)
{
    return f == FORMAT_FP8 ? 0 : f == FORMAT_INT8 ? 128 : 16;
}

/* The zero points of the 64 codes of pair p. */
INLINE __m512i zeros_of_pair(const int8_t *zero, const int p, const int group)
{
    const __m512i lane =
        _mm512_setr_epi64(0, 0, 0x0101010101010101, 0x0101010101010101, 0x0202020202020202,
                          0x0202020202020202, 0x0303030303030303, 0x0303030303030303);
    __m512i of = _mm512_add_epi8(lane, _mm512_set1_epi8((char)(4 * p)));
    __m128i all = group == 32 ? _mm_loadl_epi64((const __m128i *)zero)
                              : _mm_loadu_si128((const __m128i *)zero);

    if (group == 32) { /* a half of the numbers of groups of 16 */
        of = _mm512_and_si512(_mm512_srli_epi16(of, 1), _mm512_set1_epi8(7));
    }
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), of);
}

INLINE __m512i pair_codes(const enum weight_format_id f, const uint8_t *codes, const int p,
                          const int8_t *zero, const int group)
{
    const __m512i levels = _mm512_add_epi8(
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)weight_levels_mxfp4)),
        _mm512_set1_epi8(16));

    if (f == FORMAT_INT8) {
        return _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * p), _mm512_set1_epi8((char)0x80));
    }
    __m512i v = _mm512_cvtepu8_epi16(load32(codes + 32 * p));
    v = _mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi16(v, 4)), _mm512_set1_epi8(15));
    if (f == FORMAT_FP4) {
        return _mm512_shuffle_epi8(levels, v);
    }
    v = _mm512_add_epi8(v, _mm512_set1_epi8(zero ? 16 : 8));
    return zero ? _mm512_sub_epi8(v, zeros_of_pair(zero, p, group)) : v;
}

INLINE void unpack(struct codes *ret, const enum weight_format_id f, const uint8_t *codes,
                   const int8_t *zero, const int group)
{
    if (f == FORMAT_FP8) {
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; g++) {
            struct e4m3_words v = e4m3_words_of(codes + 32 * g);
            ret->high[g] = e4m3_signed(v.high, v.minus);
            ret->low[g] = e4m3_signed(v.low, v.minus);
        }
        return;
    }
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++) {
        ret->v[p] = pair_codes(f, codes, p, zero, group);
    }
}

/* The sums of products of a group of e4m3, two and two. */
INLINE __m512i word_products(const struct codes *w, const struct act_block *x, const int g)
{
    __m512i q = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *)(x->code + 32 * g)));
    __m512i sum = _mm512_slli_epi32(_mm512_madd_epi16(w->high[g], q), 9);

    return _mm512_dpwssd_epi32(sum, w->low[g], q);
}

/* The sums of the products of groups 2p and 2p + 1, four in the place of four bytes. */
INLINE __m512i products(const enum weight_format_id f, const struct codes *w,
                        const struct act_block *x, const int p)
{
    if (f == FORMAT_FP8) {
        __m512i a = word_products(w, x, 2 * p), b = word_products(w, x, 2 * p + 1);
        return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
    }
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w->v[p],
                               _mm512_load_si512(x->code + 64 * p));
}

INLINE void add_block(struct sums *s, const enum weight_format_id f, const struct codes *w,
                      const float *scale, const float *min, const struct act_block *x,
                      const int n_x, const int group, const bool minima)
{
#pragma GCC unroll 4
    for (int j = 0; j < n_x; j++) {
        __m512i sums = sums_of_vectors(products(f, w, &x[j], 0), products(f, w, &x[j], 1),
                                       products(f, w, &x[j], 2), products(f, w, &x[j], 3));
        s->acc[j] = add_sums(s->acc[j], sums, above_by(f), scale, min, &x[j], group, minima);
    }
}

#include "kernels/cpu/blocks/codes_rows_x86.h"

void cpu_codes_avx512vnni(struct cpu_kernels *k)
{
    set_dots(&k->blocks);
    k->blocks.codes_name = "int8, avx512vnni";
}

#endif
