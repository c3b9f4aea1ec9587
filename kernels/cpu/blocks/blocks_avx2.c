/* Products with blocks with AVX2: the sums of a group's products are a vector of eight;
 * even and odd groups have a vector of accumulators each. */
#include "kernels/cpu/blocks/unpack_x86.h"

#ifdef __AVX2__

struct sums {
    __m256 even[TILE_ROWS], odd[TILE_ROWS];   /* of products */
    __m256 first[TILE_ROWS], last[TILE_ROWS]; /* of minima: eight groups, and eight more */
};

INLINE void clear_sums(struct sums *s, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        s->even[j] = s->odd[j] = s->first[j] = s->last[j] = _mm256_setzero_ps();
    }
}

/* Eight sums of four products each. The products of a pair fit into 16 bits: codes with
 * a sign have 7 bits, the others 5. */
INLINE __m256i products(const enum weight_format_id f, __m256i w, __m256i x)
{
    __m256i pairs = has_minima(f)
                        ? _mm256_maddubs_epi16(w, x)
                        : _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));

    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

/* The scales of a row of x times those of the weights: of each group, or of its
 * halves. */
INLINE void scale_products(float *to, const enum weight_format_id f, const __m256 *w,
                           const struct act_block *x)
{
    __m256 d = _mm256_load_ps(x->scale);

    if (has_halves(f)) {
        __m256 low = _mm256_unpacklo_ps(d, d), high = _mm256_unpackhi_ps(d, d);
        _mm256_store_ps(to, _mm256_mul_ps(w[0], _mm256_permute2f128_ps(low, high, 0x20)));
        _mm256_store_ps(to + 8, _mm256_mul_ps(w[1], _mm256_permute2f128_ps(low, high, 0x31)));
    } else {
        _mm256_store_ps(to, _mm256_mul_ps(w[0], d));
    }
}

INLINE __m256 group_scale(const enum weight_format_id f, const float *scale, int g)
{
    if (has_halves(f)) {
        __m128 low = _mm_broadcast_ss(scale + 2 * g), high = _mm_broadcast_ss(scale + 2 * g + 1);
        return _mm256_set_m128(high, low);
    }
    return _mm256_broadcast_ss(scale + g);
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
        const float *of_x = has_halves(f) ? x[j].sum16 : x[j].sum32;
        sums->first[j] = _mm256_fmadd_ps(min[0], _mm256_load_ps(of_x), sums->first[j]);
        if (has_halves(f)) {
            sums->last[j] = _mm256_fmadd_ps(min[1], _mm256_load_ps(of_x + 8), sums->last[j]);
        }
    }
}

INLINE void add_block(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                      const struct act_block *x, const int n_x, const int32_t groups)
{
    _Alignas(32) float scale[TILE_ROWS][16];
    __m256 w[2];

    if (has_halves(f)) {
        half_scales_of(f, s, w);
    } else {
        w[0] = scales_of(f, s, groups);
    }
    for (int j = 0; j < n_x; j++) {
        scale_products(scale[j], f, w, &x[j]);
    }
    if (has_minima(f)) {
        add_minima(sums, f, s, x, n_x, groups);
    }
#pragma GCC unroll 8
    for (int g = 0; g < groups; g++) {
        __m256i code =
            _mm256_sub_epi8(stored_codes(f, s, g), _mm256_set1_epi8((char)zero_point(f)));
#pragma GCC unroll 4
        for (int j = 0; j < n_x; j++) {
            __m256i q = _mm256_load_si256((const __m256i *)(x[j].code + 32 * g));
            __m256 sum = _mm256_cvtepi32_ps(products(f, code, q));
            __m256 *to = g % 2 == 0 ? &sums->even[j] : &sums->odd[j];
            *to = _mm256_fmadd_ps(sum, group_scale(f, scale[j], g), *to);
        }
    }
}

INLINE void put_sums(float *out, const struct sums *s, const enum weight_format_id f, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        out[j] = sum_lanes(_mm256_add_ps(s->even[j], s->odd[j]));
        if (has_minima(f)) {
            out[j] -= sum_lanes(_mm256_add_ps(s->first[j], s->last[j]));
        }
    }
}

#include "kernels/cpu/blocks/rows_x86.h"

void cpu_blocks_avx2(struct cpu_kernels *k)
{
    k->blocks = (struct cpu_blocks){
        .name = "int8, avx2", .quantise = quantise, .dots = {EACH_BLOCK_FORMAT(ENTRY)}};
}

#endif
