/* Products with codes whose scales are apart with AVX-512's integer dot products: as
 * codes_plain.c specifies. Those of bytes want codes without a sign; what they are too
 * high by is taken off the sums of groups. Codes of e4m3 are two words each. */
#include "kernels/cpu/blocks/codes_sums_avx512.h"
#include "kernels/cpu/blocks/e4m3_avx512.h"

#ifdef __AVX512VNNI__

enum { ABOVE_4 = 16 }; /* what codes of four bits less a zero point are too high by */

/* 256 codes of a row. */
struct codes {
    __m512i v[PAIRS]; /* above_by too high; of four bits in the order of `turned` */
    __m512i high[GROUPS], low[GROUPS]; /* of e4m3, of a group each: 512 * high + low */
};

/* What codes.v are above the codes. */
INLINE int above_by(const enum weight_format_id f)
{
    return f == FORMAT_FP8 ? 0 : f == FORMAT_INT8 ? 128 : ABOVE_4;
}

/* The zero points of the codes of vector p in the order of act_block's `turned`. */
INLINE __m512i zeros_of_turned(const int8_t *zero, const int p, const int group)
{
    const __m512i lane =
        _mm512_setr_epi64(0, 0, 0x0101010101010101, 0x0101010101010101, 0x0202020202020202,
                          0x0202020202020202, 0x0303030303030303, 0x0303030303030303);
    __m512i of = _mm512_add_epi8(lane, _mm512_set1_epi8((char)(p / 2 * 4)));
    __m128i all = group == 32 ? _mm_loadl_epi64((const __m128i *)zero)
                              : _mm_loadu_si128((const __m128i *)zero);

    if (group == 16) {
        of = _mm512_add_epi8(_mm512_add_epi8(of, of), _mm512_set1_epi8(p % 2));
    }
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), of);
}

/* Vectors p and p + 1 of codes of four bits, in the order of act_block's `turned`, into
 * which pairs of codes fall. */
INLINE void turned_codes(__m512i ret[2], const enum weight_format_id f, const uint8_t *codes,
                         const int p, const int8_t *zero, const int group)
{
    const __m512i levels = _mm512_add_epi8(
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)weight_levels_mxfp4)),
        _mm512_set1_epi8(ABOVE_4));
    const __m512i four = _mm512_set1_epi8(15), above = _mm512_set1_epi8(ABOVE_4);
    __m512i v = _mm512_loadu_si512(codes + 32 * p);
    __m512i low = _mm512_and_si512(v, four), high = _mm512_and_si512(_mm512_srli_epi16(v, 4), four);

    if (f == FORMAT_FP4) {
        low = _mm512_shuffle_epi8(levels, low);
        high = _mm512_shuffle_epi8(levels, high);
    }
    ret[0] = _mm512_unpacklo_epi8(low, high);
    ret[1] = _mm512_unpackhi_epi8(low, high);
    if (f == FORMAT_INT4 && zero) {
        ret[0] = _mm512_add_epi8(ret[0], _mm512_sub_epi8(above, zeros_of_turned(zero, p, group)));
        ret[1] =
            _mm512_add_epi8(ret[1], _mm512_sub_epi8(above, zeros_of_turned(zero, p + 1, group)));
    } else if (f == FORMAT_INT4) {
        ret[0] = _mm512_add_epi8(ret[0], _mm512_set1_epi8(ABOVE_4 - 8));
        ret[1] = _mm512_add_epi8(ret[1], _mm512_set1_epi8(ABOVE_4 - 8));
    }
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
        if (f == FORMAT_INT8) {
            ret->v[p] =
                _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * p), _mm512_set1_epi8((char)0x80));
        } else if (p % 2 == 0) {
            turned_codes(ret->v + p, f, codes, p, zero, group);
        }
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
    const int8_t *of_x = f == FORMAT_INT8 ? x->code : x->turned;
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w->v[p], _mm512_load_si512(of_x + 64 * p));
}

/* The sums of each 16 codes, in the order of sums_of_vectors. */
INLINE __m512i block_sums(const enum weight_format_id f, const struct codes *w,
                          const struct act_block *x)
{
    return sums_of_vectors(products(f, w, x, 0), products(f, w, x, 1), products(f, w, x, 2),
                           products(f, w, x, 3));
}

/* Those of codes of four bits in ascending order. */
INLINE __m512i turned_halves(__m512i sum)
{
    const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);

    return _mm512_permutexvar_epi32(order, sum);
}

/* The sums of eight groups of 32 codes of four bits. */
INLINE __m256i turned_sums(const enum weight_format_id f, const struct codes *w,
                           const struct act_block *x)
{
    const __m512i *of_x = (const __m512i *)x->turned;
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
    __m512i low = _mm512_dpbusd_epi32(products(f, w, x, 0), w->v[1], of_x[1]);
    __m512i high = _mm512_dpbusd_epi32(products(f, w, x, 2), w->v[3], of_x[3]);
    __m512i sum = add_pairs(low, high);

    sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_BADC));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, sum));
}

INLINE void add_block(struct sums *s, const enum weight_format_id f, const struct codes *w,
                      const float *scale, const float *min, const struct act_block *x,
                      const int n_x, const int group, const bool minima)
{
    const bool four = f == FORMAT_INT4 || f == FORMAT_FP4;

#pragma GCC unroll 4
    for (int j = 0; j < n_x; j++) {
        const int above = above_by(f);
        if (group == 32) {
            __m256i sum = four ? turned_sums(f, w, &x[j]) : pairs_of_sums(block_sums(f, w, &x[j]));
            s->acc[j] = add_groups(s->acc[j], sum, above, scale, min, &x[j], minima);
        } else {
            __m512i sums = block_sums(f, w, &x[j]);
            sums = four ? turned_halves(sums) : halves_of_sums(sums);
            s->acc[j] = add_halves(s->acc[j], sums, above, scale, min, &x[j], minima);
        }
    }
}

#include "kernels/cpu/blocks/codes_rows_x86.h"

void cpu_codes_avx512vnni(struct cpu_kernels *k)
{
    set_dots(&k->blocks);
    k->blocks.codes_name = "int8, avx512vnni";
}

#endif
