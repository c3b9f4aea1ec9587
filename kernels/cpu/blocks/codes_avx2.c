/* Products with codes whose scales are apart, with AVX2: as codes_plain.c specifies. */
#include "kernels/cpu/blocks/codes.h"
#include "kernels/cpu/blocks/sum_x86.h"

#ifdef __AVX2__

enum { GROUPS = FORMAT_BLOCK_MAX / 32 };

struct sums {
    __m256 even[TILE_ROWS], odd[TILE_ROWS];   /* of the products of even and odd groups of 32 */
    __m256 first[TILE_ROWS], last[TILE_ROWS]; /* of minima */
};

INLINE int code_bytes(const enum weight_format_id f, int n)
{
    return f == FORMAT_FP8 || f == FORMAT_INT8 ? n : n / 2;
}

/* The 32 codes of group g in their order. */
INLINE __m256i codes_of(const enum weight_format_id f, const uint8_t *codes, int g)
{
    if (f == FORMAT_FP8 || f == FORMAT_INT8) {
        return _mm256_loadu_si256((const __m256i *)(codes + 32 * g));
    }
    __m128i pairs = _mm_loadu_si128((const __m128i *)(codes + 16 * g));
    __m128i low = _mm_and_si128(pairs, _mm_set1_epi8(15));
    __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi8(15));
    return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
}

/* Of two neighbouring groups of 16 codes, each in its half. */
INLINE __m256 halves(const float *v)
{
    return _mm256_set_m128(_mm_broadcast_ss(v + 1), _mm_broadcast_ss(v));
}

INLINE __m256i signed_codes(const enum weight_format_id f, const uint8_t *codes, int g,
                            const struct code_groups *of)
{
    __m256i v = codes_of(f, codes, g);

    if (f == FORMAT_FP4) {
        __m128i level = _mm_loadu_si128((const __m128i *)weight_levels_mxfp4);
        return _mm256_shuffle_epi8(_mm256_set_m128i(level, level), v);
    }
    if (f == FORMAT_INT4) {
        return _mm256_sub_epi8(v, _mm256_set_m128i(_mm_set1_epi8(of->zero[2 * g + 1]),
                                                   _mm_set1_epi8(of->zero[2 * g])));
    }
    return v;
}

INLINE void add_integers(struct sums *s, const enum weight_format_id f, const uint8_t *codes,
                         const struct code_groups *of, const struct act_block *x, const int n_x,
                         int groups)
{
    for (int g = 0; g < groups; g++) {
        __m256i w = signed_codes(f, codes, g, of), magnitude = _mm256_abs_epi8(w);
        __m256 scale = halves(of->scale + 2 * g);
        for (int j = 0; j < n_x; j++) {
            __m256i q = _mm256_load_si256((const __m256i *)(x[j].code + 32 * g));
            __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(q, w));
            __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            __m256 by = _mm256_mul_ps(scale, _mm256_broadcast_ss(&x[j].scale[g]));
            __m256 *to = g % 2 == 0 ? &s->even[j] : &s->odd[j];
            *to = _mm256_fmadd_ps(sum, by, *to);
        }
    }
}

INLINE void add_minima(struct sums *s, const struct code_groups *of, const struct act_block *x,
                       const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        s->first[j] =
            _mm256_fmadd_ps(_mm256_loadu_ps(of->min), _mm256_load_ps(x[j].sum16), s->first[j]);
        s->last[j] = _mm256_fmadd_ps(_mm256_loadu_ps(of->min + 8), _mm256_load_ps(x[j].sum16 + 8),
                                     s->last[j]);
    }
}

/* Eight codes of e4m3 as floats: the product makes up for the exponent's bias. */
INLINE __m256 floats_of(const uint8_t *codes)
{
    __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
    __m256i rest = _mm256_and_si256(c, _mm256_set1_epi32(0x7F));
    __m256i nan = _mm256_cmpeq_epi32(rest, _mm256_set1_epi32(0x7F));
    __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(0x7F), c), 24);
    __m256i bits = _mm256_or_si256(sign, _mm256_slli_epi32(rest, 20));
    __m256 v = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));

    return _mm256_or_ps(v, _mm256_castsi256_ps(nan));
}

INLINE __m256 act_floats(const int8_t *codes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
}

INLINE void add_floats(struct sums *s, const uint8_t *codes, const struct code_groups *of,
                       const struct act_block *x, const int n_x, int groups)
{
    for (int k = 0; k < 2 * groups; k++) { /* halves of groups */
        __m256 w0 = floats_of(codes + 16 * k), w1 = floats_of(codes + 16 * k + 8);
        for (int j = 0; j < n_x; j++) {
            __m256 sum = _mm256_mul_ps(w0, act_floats(x[j].code + 16 * k));
            __m256 by = _mm256_set1_ps(of->scale[k] * x[j].scale[k / 2]);
            __m256 *to = k / 2 % 2 == 0 ? &s->even[j] : &s->odd[j];
            sum = _mm256_fmadd_ps(w1, act_floats(x[j].code + 16 * k + 8), sum);
            *to = _mm256_fmadd_ps(sum, by, *to);
        }
    }
}

INLINE void dot_row(float *out, const enum weight_format_id f, const uint8_t *row,
                    const struct row_scales *scales, int32_t n, const struct act_block *x,
                    const int n_x, struct row_fetch ahead)
{
    bool minima = codes_have_minima(f, scales->of);
    uint8_t last[FORMAT_BLOCK_MAX];
    struct code_groups of;
    struct sums s;

    for (int j = 0; j < n_x; j++) {
        s.even[j] = s.odd[j] = s.first[j] = s.last[j] = _mm256_setzero_ps();
    }
    for (int32_t at = 0; at < n; at += FORMAT_BLOCK_MAX, x += n_x) {
        int32_t here = MIN(FORMAT_BLOCK_MAX, n - at);
        const uint8_t *codes = row + code_bytes(f, at);
        fetch_row(ahead, codes, code_bytes(f, FORMAT_BLOCK_MAX));
        if (here % 32 != 0) { /* what follows the row is not read */
            memset(last, 0, sizeof(last));
            memcpy(last, codes,
                   (size_t)(f == FORMAT_FP8 || f == FORMAT_INT8 ? here : (here + 1) / 2));
            codes = last;
        }
        code_groups_of(scales, f, at, n, &of);
        if (f == FORMAT_FP8) {
            add_floats(&s, codes, &of, x, n_x, (here + 31) / 32);
        } else {
            add_integers(&s, f, codes, &of, x, n_x, (here + 31) / 32);
        }
        if (minima) {
            add_minima(&s, &of, x, n_x);
        }
    }
    for (int j = 0; j < n_x; j++) {
        out[j] = sum_lanes(_mm256_add_ps(s.even[j], s.odd[j]));
        if (minima) {
            out[j] -= sum_lanes(_mm256_add_ps(s.first[j], s.last[j]));
        }
    }
}

INLINE void dots_of(float *sum, const struct dot_rows *w, const enum weight_format_id f, int32_t n,
                    const struct act_block *x, int32_t n_x, const struct prefetch *ahead)
{
    for (int32_t i = 0; i < w->n; i++, sum += n_x) {
        bool fetches =
            ahead->period == 1 || (ahead->period > 1 && i % ahead->period == ahead->phase);
        struct row_fetch fetch = {.distance = fetches ? ahead->distance : 0, .far = ahead->far};
        switch (n_x) {
        case 1:
            dot_row(sum, f, w->row[i], &w->scales[i], n, x, 1, fetch);
            break;
        case 2:
            dot_row(sum, f, w->row[i], &w->scales[i], n, x, 2, fetch);
            break;
        case 3:
            dot_row(sum, f, w->row[i], &w->scales[i], n, x, 3, fetch);
            break;
        default:
            dot_row(sum, f, w->row[i], &w->scales[i], n, x, 4, fetch);
            break;
        }
    }
}

#define DOTS(NAME)                                                                                \
    static void dots_##NAME(float *sum, const struct dot_rows *w, int32_t n,                      \
                            const struct act_block *x, int32_t n_x, const struct prefetch *ahead) \
    {                                                                                             \
        dots_of(sum, w, FORMAT_##NAME, n, x, n_x, ahead);                                         \
    }
DOTS(FP8)
DOTS(INT8)
DOTS(INT4)
DOTS(FP4)

void cpu_codes_avx2(struct cpu_kernels *k)
{
    k->blocks.codes_name = "int8, avx2";
    k->blocks.dots[FORMAT_FP8] = dots_FP8;
    k->blocks.dots[FORMAT_INT8] = dots_INT8;
    k->blocks.dots[FORMAT_INT4] = dots_INT4;
    k->blocks.dots[FORMAT_FP4] = dots_FP4;
}

#endif
