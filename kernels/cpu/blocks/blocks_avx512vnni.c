/* Products with blocks with AVX-512's integer dot products: two groups a vector, the
 * even one in its lower half. The instruction wants codes without a sign, so 128 is
 * added to those that have one, and act_block.offset takes it off again. */
#include "kernels/cpu/blocks/unpack_x86.h"

#ifdef __AVX512VNNI__

struct sums {
    __m512 acc[TILE_ROWS]; /* of products */
    __m512 min[TILE_ROWS]; /* of minima, sixteen groups */
};

INLINE void clear_sums(struct sums *s, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        s->acc[j] = s->min[j] = _mm512_setzero_ps();
    }
}

/* Lanes of sixteen scales: pair p of groups has 4 of each half, or 8 of each group. */
INLINE __m512 pair_scale(const enum weight_format_id f, __m512 scale, const int p)
{
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i groups = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);

    if (has_halves(f)) {
        return _mm512_permutexvar_ps(_mm512_add_epi32(halves, _mm512_set1_epi32(4 * p)), scale);
    }
    return _mm512_permutexvar_ps(_mm512_add_epi32(groups, _mm512_set1_epi32(2 * p)), scale);
}

INLINE __m512 join(const __m256 v[2])
{
    return _mm512_insertf32x8(_mm512_castps256_ps512(v[0]), v[1], 1);
}

/* Codes of groups 2p and 2p + 1, without a sign. */
INLINE __m512i pair_codes(const enum weight_format_id f, const uint8_t *s, const int p)
{
    __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(stored_codes(f, s, 2 * p)),
                                   stored_codes(f, s, 2 * p + 1), 1);

    return has_minima(f) ? v : _mm512_add_epi8(v, _mm512_set1_epi8((char)(128 - zero_point(f))));
}

INLINE __m512 row_scales(const enum weight_format_id f, __m512 w, const struct act_block *x)
{
    __m512 d = _mm512_castps256_ps512(_mm256_load_ps(x->scale));

    if (has_halves(f)) {
        d = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                  d);
        return _mm512_mul_ps(w, d);
    }
    return _mm512_castps256_ps512(
        _mm256_mul_ps(_mm512_castps512_ps256(w), _mm512_castps512_ps256(d)));
}

INLINE void add_minima(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                       const struct act_block *x, const int n_x, const int32_t groups)
{
    __m256 min[2];

    if (has_halves(f)) {
        half_minima_of(s, min);
    } else {
        min[0] = minima_of(f, s, groups);
    }
    for (int j = 0; j < n_x; j++) {
        if (has_halves(f)) {
            sums->min[j] = _mm512_fmadd_ps(join(min), _mm512_load_ps(x[j].sum16), sums->min[j]);
        } else {
            sums->min[j] = _mm512_zextps256_ps512(_mm256_fmadd_ps(
                min[0], _mm256_load_ps(x[j].sum32), _mm512_castps512_ps256(sums->min[j])));
        }
    }
}

INLINE void add_block(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                      const struct act_block *x, const int n_x, const int32_t groups)
{
    __m512 scale[TILE_ROWS];
    __m256 half[2];
    __m512 w;

    if (has_halves(f)) {
        half_scales_of(f, s, half);
        w = join(half);
    } else {
        w = _mm512_castps256_ps512(scales_of(f, s, groups));
    }
    for (int j = 0; j < n_x; j++) {
        scale[j] = row_scales(f, w, &x[j]);
    }
    if (has_minima(f)) {
        add_minima(sums, f, s, x, n_x, groups);
    }
#pragma GCC unroll 4
    for (int p = 0; p < groups / 2; p++) {
        __m512i code = pair_codes(f, s, p);
#pragma GCC unroll 4
        for (int j = 0; j < n_x; j++) {
            __m512i from =
                has_minima(f) ? _mm512_setzero_si512() : _mm512_load_si512(x[j].offset + 16 * p);
            __m512i sum = _mm512_dpbusd_epi32(from, code, _mm512_load_si512(x[j].code + 64 * p));
            sums->acc[j] =
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), pair_scale(f, scale[j], p), sums->acc[j]);
        }
    }
}

INLINE __m256 fold(__m512 v)
{
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

INLINE void put_sums(float *out, const struct sums *s, const enum weight_format_id f, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        out[j] = sum_lanes(fold(s->acc[j]));
        if (has_minima(f)) {
            out[j] -= sum_lanes(fold(s->min[j]));
        }
    }
}

#include "kernels/cpu/blocks/rows_x86.h"

void cpu_blocks_avx512vnni(struct cpu_kernels *k)
{
    k->blocks = (struct cpu_blocks){
        .name = "int8, avx512vnni", .quantise = quantise, .dots = {EACH_BLOCK_FORMAT(ENTRY)}};
}

#endif
