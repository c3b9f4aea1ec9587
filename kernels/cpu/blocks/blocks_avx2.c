/* Products with blocks with AVX2: the codes of 256 values are unpacked once for all
 * rows of x; the vectors of a row's eight groups are added pairwise until a vector
 * holds the sum of each. */
#include "kernels/cpu/blocks/unpack_x86.h"

#ifdef __AVX2__

struct sums {
    __m256 acc[TILE_ROWS][2]; /* of groups 0 to 7, and 8 to 15 of formats of 16 */
};

INLINE void clear_sums(struct sums *s, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        s->acc[j][0] = s->acc[j][1] = _mm256_setzero_ps();
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

/* The sums of four groups' halves: the first half of each in the lower 16 bytes. */
INLINE __m256i four_groups(const enum weight_format_id f, const __m256i *code, const int8_t *x)
{
    __m256i v[4];

#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        v[g] = products(f, code[g], _mm256_load_si256((const __m256i *)(x + 32 * g)));
    }
    return _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
}

/* Add the sums of eight groups of 32 to those of row j. */
INLINE void add_groups(__m256 *acc, const enum weight_format_id f, __m256i low, __m256i high,
                       __m256 w, __m256 min, const struct act_block *x)
{
    __m256i sum = _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                                   _mm256_permute2x128_si256(low, high, 0x31));
    __m256 scale = _mm256_mul_ps(w, _mm256_load_ps(x->scale));

    *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, *acc);
    if (has_minima(f)) {
        *acc = _mm256_fnmadd_ps(min, _mm256_load_ps(x->sum32), *acc);
    }
}

/* The same of sixteen groups of 16. */
INLINE void add_halves(__m256 *acc, const enum weight_format_id f, __m256i low, __m256i high,
                       const __m256 *w, const __m256 *min, const struct act_block *x)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256 d = _mm256_load_ps(x->scale);
    __m256 a = _mm256_unpacklo_ps(d, d), b = _mm256_unpackhi_ps(d, d);
    __m256 scale[2] = {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
    __m256i sum[2] = {_mm256_permutevar8x32_epi32(low, order),
                      _mm256_permutevar8x32_epi32(high, order)};

#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        acc[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i]), _mm256_mul_ps(w[i], scale[i]), acc[i]);
        if (has_minima(f)) {
            acc[i] = _mm256_fnmadd_ps(min[i], _mm256_load_ps(x->sum16 + 8 * i), acc[i]);
        }
    }
}

INLINE void add_block(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                      const struct act_block *x, const int n_x, const int32_t groups)
{
    __m256i code[GROUPS];
    __m256 w[2], min[2];

    if (has_halves(f)) {
        half_scales_of(f, s, w);
        if (has_minima(f)) {
            half_minima_of(s, min);
        }
    } else {
        w[0] = scales_of(f, s, groups);
        min[0] = has_minima(f) ? minima_of(f, s, groups) : w[0];
    }
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
        code[g] = g < groups ? _mm256_sub_epi8(stored_codes(f, s, g),
                                               _mm256_set1_epi8((char)zero_point(f)))
                             : _mm256_setzero_si256();
    }
#pragma GCC unroll 4
    for (int j = 0; j < n_x; j++) {
        __m256i low = four_groups(f, code, x[j].code);
        __m256i high = four_groups(f, code + 4, x[j].code + 128);
        if (has_halves(f)) {
            add_halves(sums->acc[j], f, low, high, w, min, &x[j]);
        } else {
            add_groups(&sums->acc[j][0], f, low, high, w[0], min[0], &x[j]);
        }
    }
}

INLINE void put_sums(float *out, const struct sums *s, const enum weight_format_id f, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        out[j] =
            sum_lanes(has_halves(f) ? _mm256_add_ps(s->acc[j][0], s->acc[j][1]) : s->acc[j][0]);
    }
}

#include "kernels/cpu/blocks/rows_x86.h"

void cpu_blocks_avx2(struct cpu_kernels *k)
{
    k->blocks = (struct cpu_blocks){
        .name = "int8, avx2", .quantise = quantise, .dots = {EACH_BLOCK_FORMAT(ENTRY)}};
}

#endif
