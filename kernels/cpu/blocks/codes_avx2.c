/* Products with codes whose scales are apart, with AVX2: as codes_plain.c specifies. */
#include "kernels/cpu/blocks/codes_x86.h"

#ifdef __AVX2__

/* Accumulators of groups of 32, or of first and last halves of eight groups of 32. */
struct sums {
    __m256 acc[TILE_ROWS][2];
};

/* 256 codes of a row. */
struct codes {
    __m256i v[GROUPS];                       /* with their sign */
    struct halves_of_codes half[2 * GROUPS]; /* of e4m3 */
};

/* What the groups of a block are multiplied with. */
struct factors {
    __m256 scale[2], min[2];
};

/* Of sixteen numbers the even ones and the odd ones. */
INLINE void part_numbers(__m256 ret[2], const float *v)
{
    __m256 a = _mm256_loadu_ps(v), b = _mm256_loadu_ps(v + 8);

    ret[0] = _mm256_castpd_ps(
        _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)), 0xD8));
    ret[1] = _mm256_castpd_ps(
        _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xDD)), 0xD8));
}

INLINE void factors_of(struct factors *ret, const float *scale, const float *min, const int group,
                       const bool minima)
{
    if (group == 32) {
        ret->scale[0] = _mm256_loadu_ps(scale);
        ret->min[0] = minima ? _mm256_loadu_ps(min) : ret->scale[0];
        return;
    }
    part_numbers(ret->scale, scale);
    if (minima) {
        part_numbers(ret->min, min);
    }
}

/* The products of group g, in the first four lanes those of its first half. */
INLINE __m256i products(const enum weight_format_id f, const struct codes *w, const int g,
                        const int8_t *x)
{
    if (f != FORMAT_FP8) {
        __m256i q = _mm256_load_si256((const __m256i *)(x + 32 * g));
        __m256i pairs =
            _mm256_maddubs_epi16(_mm256_abs_epi8(w->v[g]), _mm256_sign_epi8(q, w->v[g]));
        return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    __m256i v[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const struct halves_of_codes *half = &w->half[2 * g + h];
        __m256i q = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)(x + 32 * g + 16 * h)));
        v[h] = _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(half->high, q), 9),
                                _mm256_madd_epi16(half->low, q));
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(v[0], v[1], 0x20),
                            _mm256_permute2x128_si256(v[0], v[1], 0x31));
}

INLINE void add_groups(__m256 acc[2], const enum weight_format_id f, const struct codes *w,
                       const struct factors *by, const struct act_block *x, const int group,
                       const bool minima)
{
    __m256i v[GROUPS];
    __m256 of_x = _mm256_load_ps(x->scale);

#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
        v[g] = products(f, w, g, x->code);
    }
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    __m256i sum[2] = {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)};
    __m256 sum_x[2] = {_mm256_load_ps(x->sum32), of_x};
    if (group == 32) {
        sum[0] = _mm256_add_epi32(sum[0], sum[1]);
    } else if (minima) {
        part_numbers(sum_x, x->sum16);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 32 / group; h++) {
        __m256 scale = _mm256_mul_ps(by->scale[h], of_x);
        acc[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[h]), scale, acc[h]);
        acc[h] = minima ? _mm256_fnmadd_ps(by->min[h], sum_x[h], acc[h]) : acc[h];
    }
}

INLINE void unpack(struct codes *ret, const enum weight_format_id f, const uint8_t *codes,
                   const int8_t *zero, const int group)
{
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
        if (f == FORMAT_FP8) {
            ret->half[2 * g] = halves_of(codes + 32 * g);
            ret->half[2 * g + 1] = halves_of(codes + 32 * g + 16);
        } else {
            ret->v[g] = signed_codes(f, codes, g, zero, group);
        }
    }
}

INLINE void add_block(struct sums *s, const enum weight_format_id f, const struct codes *w,
                      const float *scale, const float *min, const struct act_block *x,
                      const int n_x, const int group, const bool minima)
{
    struct factors by;

    factors_of(&by, scale, min, group, minima);
#pragma GCC unroll 4
    for (int j = 0; j < n_x; j++) {
        add_groups(s->acc[j], f, w, &by, &x[j], group, minima);
    }
}

INLINE void clear_sums(struct sums *s, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        s->acc[j][0] = s->acc[j][1] = _mm256_setzero_ps();
    }
}

INLINE void put_sums(float *out, const struct sums *s, const int n_x, const int group)
{
    for (int j = 0; j < n_x; j++) {
        float first = sum_lanes(s->acc[j][0]);
        out[j] = group == 32 ? first : first + sum_lanes(s->acc[j][1]);
    }
}

#include "kernels/cpu/blocks/codes_rows_x86.h"

void cpu_codes_avx2(struct cpu_kernels *k)
{
    set_dots(&k->blocks);
    k->blocks.codes_name = "int8, avx2";
}

#endif
