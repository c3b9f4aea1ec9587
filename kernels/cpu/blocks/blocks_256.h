/* Products with blocks in vectors of 32 bytes, for a file of AVX2 and for one of the
 * integer dot products of AVX-512, which take the place of two instructions. The codes
 * of 256 values are unpacked once for all rows of x. Where a load leaves the first
 * halves of two groups apart from their last ones, vectors have them so
 * (act_block.turned), and half as many sums are left to be added across lanes. Codes of
 * up to 6 bits have no sign here; what they are too high by is taken off the sums of
 * groups. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_BLOCKS_256_H
#define QUIRE_KERNELS_CPU_BLOCKS_BLOCKS_256_H

#include "kernels/cpu/blocks/unpack_x86.h"

#ifdef __AVX2__

enum {
#ifdef __AVX512VL__
    PAIRED_ROWS_X = 2,
#else
    PAIRED_ROWS_X = 1, /* half as many registers */
#endif
    ROWS_TOGETHER = 2,
};

struct sums {
    /* of groups 0 to 7, and 8 to 15 of formats of 16; of formats whose sums are parted
     * in the order 0, 2, 4, 6, 1, 3, 5, 7 */
    __m256 acc[TILE_ROWS][2];
};

INLINE void clear_sums(struct sums *s, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        s->acc[j][0] = s->acc[j][1] = _mm256_setzero_ps();
    }
}

/* ---- codes ---- */

/* Codes of eight bits, with their sign. */
INLINE bool has_signs(const enum weight_format_id f)
{
    return f == FORMAT_Q8_0 || f == FORMAT_IQ4_NL || f == FORMAT_IQ4_XS;
}

/* Vectors of codes in the order of act_block.turned: those of groups 2p and 2p + 1 are
 * their first halves, then their last ones. */
INLINE bool in_turned_pairs(const enum weight_format_id f)
{
    return is_turned(f) || f == FORMAT_Q4_K;
}

/* Sums of the even groups come out of the lower half of a vector, those of the odd ones
 * out of the upper half, and are kept so to the end of the row. */
INLINE bool is_parted(const enum weight_format_id f)
{
    return has_halves(f) || in_turned_pairs(f);
}

/* Eight lanes that are parted, in order. */
INLINE __m256i in_order(__m256i v)
{
    return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE __m256i broadcast16(const uint8_t *p)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}

/* Each byte's four bits from bit 0 on in the lower 16 bytes, from bit 4 on in the
 * others. */
INLINE __m256i low_and_high(__m256i v)
{
#ifdef __GFNI__
    /* bit i of a result is that of a byte and row 7 - i of the matrix */
    const long long low = 0x0102040800000000, high = 0x1020408000000000;

    return _mm256_gf2p8affine_epi64_epi8(v, _mm256_setr_epi64x(low, low, high, high), 0);
#else
    const __m256i by = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);

    return _mm256_and_si256(_mm256_srlv_epi32(v, by), _mm256_set1_epi8(15));
#endif
}

/* Groups 2p and 2p + 1 of Q4_K. */
INLINE void pair_of_q4_k(const uint8_t *s, const int p, __m256i ret[2])
{
    ret[0] = low_and_high(broadcast16(s + 16 + 32 * p));
    ret[1] = low_and_high(broadcast16(s + 32 + 32 * p));
}

/* Groups 2p and 2p + 1 of a format that is turned. */
INLINE void pair_of_turned(const enum weight_format_id f, const uint8_t *s, const int p,
                           __m256i ret[2])
{
    const uint8_t *a = group_at(f, s, 2 * p), *b = group_at(f, s, 2 * p + 1);
    const __m256i four = _mm256_set1_epi8(15);
    __m256i v = f == FORMAT_IQ4_XS ? load32(a)
                                   : _mm256_set_m128i(_mm_loadu_si128((const __m128i *)b),
                                                      _mm_loadu_si128((const __m128i *)a));

    ret[0] = _mm256_and_si256(v, four);
    ret[1] = _mm256_and_si256(_mm256_srli_epi16(v, 4), four);
    if (f == FORMAT_Q5_0 || f == FORMAT_Q5_1) {
        uint32_t of_a = load_u32(a - 4), of_b = load_u32(b - 4);
        ret[0] = _mm256_or_si256(ret[0], fifth_bits((of_a & 0xFFFFu) | of_b << 16));
        ret[1] = _mm256_or_si256(ret[1], fifth_bits(of_a >> 16 | (of_b & 0xFFFF0000u)));
    } else if (f == FORMAT_MXFP4) {
        const __m256i twelve = _mm256_set1_epi8(12);
        ret[0] = _mm256_add_epi8(look_up(weight_levels_mxfp4, ret[0]), twelve);
        ret[1] = _mm256_add_epi8(look_up(weight_levels_mxfp4, ret[1]), twelve);
    } else if (f == FORMAT_IQ4_NL || f == FORMAT_IQ4_XS) {
        ret[0] = look_up(weight_levels_iq4, ret[0]);
        ret[1] = look_up(weight_levels_iq4, ret[1]);
    }
}

/* Groups 2p and 2p + 1 of a format that is in turned pairs. */
INLINE void pair_of(const enum weight_format_id f, const uint8_t *s, const int p, __m256i ret[2])
{
    if (f == FORMAT_Q4_K) {
        pair_of_q4_k(s, p, ret);
    } else {
        pair_of_turned(f, s, p, ret);
    }
}

/* The codes of a block's first `groups` groups, and zeros. */
INLINE void unpack(__m256i code[GROUPS], const enum weight_format_id f, const uint8_t *s,
                   const int32_t groups)
{
#pragma GCC unroll 4
    for (int p = 0; p < GROUPS / 2; p++) {
        __m256i *to = code + 2 * p;
        if (2 * p >= groups) {
            to[0] = to[1] = _mm256_setzero_si256();
        } else if (in_turned_pairs(f)) {
            pair_of(f, s, p, to);
        } else {
            to[0] = stored_codes(f, s, 2 * p);
            to[1] = stored_codes(f, s, 2 * p + 1);
        }
    }
}

/* ---- sums ---- */

INLINE __m256i pairs(__m256i v)
{
    return _mm256_madd_epi16(v, _mm256_set1_epi16(1));
}

/* Eight sums of four products each of w without a sign and x, of which two fit into 16
 * bits. */
INLINE __m256i code_products(__m256i w, __m256i x)
{
#ifdef __AVX512VNNI__
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, x);
#else
    return pairs(_mm256_maddubs_epi16(w, x));
#endif
}

INLINE __m256i load_x(const int8_t *x)
{
    return _mm256_load_si256((const __m256i *)x);
}

/* Eight sums of four products each of codes with a sign: of Q8_0, which may be -128 and
 * have a magnitude only without a sign. */
INLINE __m256i signed_products(__m256i w, __m256i x)
{
    return code_products(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}

/* The same of codes above -128, of which x's sign may be taken in place of theirs. */
INLINE __m256i level_products(__m256i w, const int8_t *x, const uint8_t *magnitude)
{
    __m256i of_x = _mm256_load_si256((const __m256i *)magnitude);

    return code_products(of_x, _mm256_sign_epi8(w, load_x(x)));
}

/* Of each 16 bytes of a and b, four sums each, two sums. `small`: they fit into 16
 * bits. */
INLINE __m256i two_of_four(__m256i a, __m256i b, const bool small)
{
    return small ? pairs(_mm256_packs_epi32(a, b))
                 : _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* Of each 16 bytes of a and b, two sums of two groups each, one sum of each group. */
INLINE __m256i one_of_two(__m256i a, __m256i b, const bool small)
{
    __m256 c = _mm256_castsi256_ps(a), d = _mm256_castsi256_ps(b);

    return small ? pairs(_mm256_packs_epi32(a, b))
                 : _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(c, d, 0x88)),
                                    _mm256_castps_si256(_mm256_shuffle_ps(c, d, 0xDD)));
}

/* Eight sums of eight products each of groups 2p and 2p + 1, which are in turned
 * order. */
INLINE __m256i turned_products(const enum weight_format_id f, const __m256i *code,
                               const struct act_block *b, const int p)
{
    const int at = p / 2 * 128 + p % 2 * 32;
    const int8_t *x = b->turned + at;
    const uint8_t *m = b->magnitude + at;

    if (has_signs(f)) {
        return _mm256_add_epi32(level_products(code[0], x, m),
                                level_products(code[1], x + 64, m + 64));
    }
    __m256i first = load_x(x), last = load_x(x + 64);
#ifdef __AVX512VNNI__
    return _mm256_dpbusd_epi32(code_products(code[0], first), code[1], last);
#else
    return pairs(_mm256_add_epi16(_mm256_maddubs_epi16(code[0], first),
                                  _mm256_maddubs_epi16(code[1], last)));
#endif
}

/* Whether sums of 16 products fit into 16 bits. */
INLINE bool are_smaller(const enum weight_format_id f)
{
    return f == FORMAT_Q4_0 || f == FORMAT_Q4_1 || f == FORMAT_Q4_K;
}

/* The sums of eight groups of 32, parted, those behind the first `groups` zero. */
INLINE __m256i sums_turned(const enum weight_format_id f, const __m256i *code,
                           const struct act_block *x, const int32_t groups)
{
    const bool small = !has_signs(f), smaller = are_smaller(f);
    __m256i v[4];

#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        v[p] = 2 * p < groups ? turned_products(f, code + 2 * p, x, p) : _mm256_setzero_si256();
    }
    return one_of_two(two_of_four(v[0], v[1], small), two_of_four(v[2], v[3], small), smaller);
}

/* The same in order, of codes in the order of act_block.code: those of Q8_0 and
 * Q5_K. */
INLINE __m256i sums_plain(const enum weight_format_id f, const __m256i *code,
                          const struct act_block *x, const int32_t groups)
{
    const bool small = !has_signs(f);
    __m256i v[GROUPS];

#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
        __m256i of_x = load_x(x->code + 32 * g);
        v[g] = g >= groups    ? _mm256_setzero_si256()
               : has_signs(f) ? signed_products(code[g], of_x)
                              : code_products(code[g], of_x);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        v[i] = one_of_two(two_of_four(v[i], v[i + 1], small),
                          two_of_four(v[i + 2], v[i + 3], small), small);
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(v[0], v[4], 0x20),
                            _mm256_permute2x128_si256(v[0], v[4], 0x31));
}

/* The sums of sixteen groups of 16, parted, eight from group 8 * i on in ret[i]. */
INLINE void sums_halves(const __m256i *code, const struct act_block *x, __m256i ret[2])
{
    __m256i v[GROUPS];

#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
        v[g] = code_products(code[g], load_x(x->code + 32 * g));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m256i *of = v + 4 * i;
        ret[i] =
            one_of_two(two_of_four(of[0], of[1], true), two_of_four(of[2], of[3], true), false);
    }
}

/* What sums of codes without a sign are too high by, from the sums of x's codes. */
INLINE __m256i too_high(const enum weight_format_id f, const int32_t *total)
{
    __m256i v = _mm256_load_si256((const __m256i *)total);

    switch (f) {
    case FORMAT_Q3_K:
        return _mm256_slli_epi32(v, 2);
    case FORMAT_Q4_0:
        return _mm256_slli_epi32(v, 3);
    case FORMAT_Q5_0:
        return _mm256_slli_epi32(v, 4);
    case FORMAT_Q6_K:
        return _mm256_slli_epi32(v, 5);
    default: /* FORMAT_MXFP4 */
        return _mm256_add_epi32(_mm256_slli_epi32(v, 3), _mm256_slli_epi32(v, 2));
    }
}

/* Add the sums of eight groups of 32 to those of a row. */
INLINE void add_groups(__m256 *acc, const enum weight_format_id f, __m256i sum, __m256 w,
                       __m256 min, const struct act_block *x)
{
    const bool parted = is_parted(f);
    __m256 scale = _mm256_mul_ps(w, _mm256_load_ps(parted ? x->parted_scale : x->scale));

    if (!has_minima(f) && !has_signs(f)) {
        sum = _mm256_sub_epi32(sum, too_high(f, parted ? x->parted_total32 : x->total32));
    }
    *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, *acc);
    if (has_minima(f)) {
        *acc = _mm256_fnmadd_ps(min, _mm256_load_ps(parted ? x->parted_sum32 : x->sum32), *acc);
    }
}

/* The same of sixteen groups of 16. */
INLINE void add_halves(__m256 *acc, const enum weight_format_id f, const __m256i *code,
                       const __m256 *w, const __m256 *min, const struct act_block *x)
{
    __m256i sum[2];

    sums_halves(code, x, sum);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m256 scale = _mm256_broadcast_ps((const __m128 *)(x->scale + 4 * i));
        if (!has_minima(f)) {
            sum[i] = _mm256_sub_epi32(sum[i], too_high(f, x->parted_total16 + 8 * i));
        }
        acc[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i]), _mm256_mul_ps(w[i], scale), acc[i]);
        if (has_minima(f)) {
            __m256 of_x = _mm256_load_ps(x->sum16 + 8 * i);
            of_x = _mm256_permutevar8x32_ps(of_x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
            acc[i] = _mm256_fnmadd_ps(min[i], of_x, acc[i]);
        }
    }
}

INLINE void add_block(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                      const struct act_block *x, const int n_x, const int32_t groups)
{
    __m256i code[GROUPS];
    __m256 w[2], min[2];

    if (has_halves(f)) {
        half_scales_of(f, s, w, true);
        if (has_minima(f)) {
            half_minima_of(s, min, true);
        }
    } else {
        w[0] = scales_of(f, s, groups, is_parted(f));
        min[0] = has_minima(f) ? minima_of(f, s, groups, is_parted(f)) : w[0];
    }
    unpack(code, f, s, groups);
#pragma GCC unroll 4
    for (int j = 0; j < n_x; j++) {
        if (has_halves(f)) {
            add_halves(sums->acc[j], f, code, w, min, &x[j]);
        } else {
            __m256i sum = in_turned_pairs(f) ? sums_turned(f, code, &x[j], groups)
                                             : sums_plain(f, code, &x[j], groups);
            add_groups(&sums->acc[j][0], f, sum, w[0], min[0], &x[j]);
        }
    }
}

/* The 256 values of two rows in a format that is in turned pairs, with one row of x.
 * Two groups of each are multiplied before the next ones are unpacked: x is loaded once
 * for both, and is not kept in memory on the way, as it would be if one block were
 * multiplied after the other. */
INLINE void add_two_turned(struct sums *sums, const enum weight_format_id f,
                           const uint8_t *const *s, const struct act_block *x)
{
    __m256i v[ROWS_TOGETHER][2], two[ROWS_TOGETHER][2];

#pragma GCC unroll 8
    for (int i = 0; i < GROUPS; i++) {
        const int p = i / 2, r = i % 2;
        __m256i code[2];
        pair_of(f, s[r], p, code);
        v[r][p % 2] = turned_products(f, code, x, p);
        if (p % 2 == 1) {
            two[r][p / 2] = two_of_four(v[r][0], v[r][1], !has_signs(f));
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < ROWS_TOGETHER; r++) {
        __m256 w = scales_of(f, s[r], GROUPS, true);
        __m256 min = has_minima(f) ? minima_of(f, s[r], GROUPS, true) : w;
        __m256i sum = one_of_two(two[r][0], two[r][1], are_smaller(f));
        add_groups(&sums[r].acc[0][0], f, sum, w, min, x);
    }
}

INLINE void add_blocks(struct sums *sums, const enum weight_format_id f, const uint8_t *const *s,
                       const int n_rows, const struct act_block *x, const int n_x,
                       const int32_t groups, struct row_fetch ahead)
{
    if (in_turned_pairs(f) && n_rows == ROWS_TOGETHER && n_x == 1 && groups == GROUPS) {
        fetch_row(ahead, s[0], bytes_of(f));
        fetch_row(ahead, s[1], bytes_of(f));
        add_two_turned(sums, f, s, x);
        return;
    }
#pragma GCC unroll 2
    for (int r = 0; r < n_rows; r++) {
        fetch_row(ahead, s[r], bytes_of(f));
        add_block(&sums[r], f, s[r], x, n_x, groups);
    }
}

INLINE void put_sums(float *out, const struct sums *s, const enum weight_format_id f, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        __m256 v = has_halves(f) ? _mm256_add_ps(s->acc[j][0], s->acc[j][1]) : s->acc[j][0];
        if (is_parted(f)) {
            v = _mm256_castsi256_ps(in_order(_mm256_castps_si256(v)));
        }
        out[j] = sum_lanes(v);
    }
}

#include "kernels/cpu/blocks/rows_x86.h"

#endif
#endif
