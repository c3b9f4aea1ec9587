/* Products with blocks with AVX-512's integer dot products. The instruction wants codes
 * without a sign; what they are too high by is taken off the sums of groups, with the
 * sums of the activations' codes. */
#include "kernels/cpu/blocks/sums_avx512.h"
#include "kernels/cpu/blocks/unpack_avx512.h"

#ifdef __AVX512VNNI__

enum {
    PAIRED_ROWS_X = 2,
    ROWS_TOGETHER = 2,
};

struct sums {
    __m512 acc[TILE_ROWS]; /* of groups 0 to 15; formats of 8 use the lower half */
};

/* The 256 codes of a block, in the order of struct act_block's `code` or `turned`. */
struct codes {
    __m512i v[4];
};

INLINE void clear_sums(struct sums *s, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        s->acc[j] = _mm512_setzero_ps();
    }
}

INLINE __m512i multiply(__m512i sum, __m512i w, const int8_t *x)
{
    return _mm512_dpbusd_epi32(sum, w, _mm512_load_si512(x));
}

/* The sums of `groups` of eight groups, the others 0, from the products of two vectors,
 * whose 16 bytes are of one group each. */
INLINE __m256i sums_turned(const struct codes *w, const struct act_block *x, const int32_t groups)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
    const __m512i zero = _mm512_setzero_si512();
    __m512i low = multiply(multiply(zero, w->v[0], x->turned), w->v[1], x->turned + 64);
    __m512i high = zero;
    if (groups > 4) {
        high = multiply(multiply(zero, w->v[2], x->turned + 128), w->v[3], x->turned + 192);
    }
    __m512i sum = add_pairs(low, high);

    sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_BADC));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, sum));
}

/* add_pairs where the sums of eight products fit into 16 bits. */
INLINE __m512i add_small_pairs(__m512i a, __m512i b)
{
    return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1));
}

/* The products of groups 2p and 2p + 1, 0 if they are not among the first `groups`. */
INLINE __m512i products(const struct codes *w, const struct act_block *x, const int p,
                        const int32_t groups)
{
    const __m512i zero = _mm512_setzero_si512();

    return 2 * p < groups ? multiply(zero, w->v[p], x->code + 64 * p) : zero;
}

/* The sums of each 16 codes of `groups` groups, in the order 0 4 8 12 1 5 ... `small`:
 * of codes below 32. */
INLINE __m512i sums_of_16(const struct codes *w, const struct act_block *x, const bool small,
                          const int32_t groups)
{
    __m512i a = products(w, x, 0, groups), b = products(w, x, 1, groups);
    __m512i c = products(w, x, 2, groups), d = products(w, x, 3, groups);

    if (small) {
        return add_small_pairs(add_small_pairs(a, b), add_small_pairs(c, d));
    }
    return sums_of_vectors(a, b, c, d);
}

/* Add the sums of eight groups of 32; those behind the first `groups` are 0. */
INLINE __m512 add_groups(__m512 acc, const enum weight_format_id f, const struct codes *code,
                         __m256 w, __m256 min, const struct act_block *x, const int32_t groups)
{
    __m256i sum = is_turned(f) ? sums_turned(code, x, groups)
                               : pairs_of_sums(sums_of_16(code, x, has_minima(f), groups));
    __m256 to = _mm512_castps512_ps256(acc), scale = _mm256_mul_ps(w, _mm256_load_ps(x->scale));

    if (!has_minima(f)) {
        __m256i above = _mm256_load_si256((const __m256i *)x->total32);
        sum = _mm256_sub_epi32(sum, _mm256_slli_epi32(above, zero_shift(f)));
    }
    to = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, to);
    if (has_minima(f)) {
        to = _mm256_fnmadd_ps(min, _mm256_load_ps(x->sum32), to);
    }
    return _mm512_castps256_ps512(to);
}

/* The same of sixteen groups of 16. */
INLINE __m512 add_halves(__m512 acc, const enum weight_format_id f, const struct codes *code,
                         __m512 w, __m512 min, const struct act_block *x)
{
    __m512 scale = twice(x->scale);
    __m512i sum = halves_of_sums(sums_of_16(code, x, has_minima(f), GROUPS));

    if (!has_minima(f)) {
        __m512i above = _mm512_load_si512(x->total16);
        sum = _mm512_sub_epi32(sum, _mm512_slli_epi32(above, (unsigned)zero_shift(f)));
    }
    scale = _mm512_mul_ps(w, scale);
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc);
    return has_minima(f) ? _mm512_fnmadd_ps(min, _mm512_load_ps(x->sum16), acc) : acc;
}

INLINE void unpack(struct codes *ret, const enum weight_format_id f, const uint8_t *s,
                   const int32_t groups)
{
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        bool there = is_turned(f) ? p / 2 * 4 < groups : 2 * p < groups;
        if (!there) {
            ret->v[p] = _mm512_setzero_si512();
        } else if (!is_turned(f)) {
            ret->v[p] = pair_codes(f, s, p);
        } else if (p % 2 == 0) {
            turned_codes(f, s, 2 * p, groups - 2 * p, ret->v + p);
        }
    }
}

INLINE void add_block(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                      const struct act_block *x, const int n_x, const int32_t groups)
{
    struct codes code;
    __m256 w[2], min[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};

    unpack(&code, f, s, groups);
    if (has_halves(f)) {
        half_scales_of(f, s, w, false);
        if (has_minima(f)) {
            half_minima_of(s, min, false);
        }
    } else {
        w[0] = scales_of(f, s, groups, false);
        min[0] = has_minima(f) ? minima_of(f, s, groups, false) : min[0];
    }
#pragma GCC unroll 4
    for (int j = 0; j < n_x; j++) {
        if (has_halves(f)) {
            sums->acc[j] = add_halves(sums->acc[j], f, &code, join(w), join(min), &x[j]);
        } else {
            sums->acc[j] = add_groups(sums->acc[j], f, &code, w[0], min[0], &x[j], groups);
        }
    }
}

INLINE void add_blocks(struct sums *sums, const enum weight_format_id f, const uint8_t *const *s,
                       const int n_rows, const struct act_block *x, const int n_x,
                       const int32_t groups, struct row_fetch ahead)
{
#pragma GCC unroll 2
    for (int r = 0; r < n_rows; r++) {
        fetch_row(ahead, s[r], bytes_of(f));
        add_block(&sums[r], f, s[r], x, n_x, groups);
    }
}

INLINE void put_sums(float *out, const struct sums *s, const enum weight_format_id f, const int n_x)
{
    for (int j = 0; j < n_x; j++) {
        __m256 low = _mm512_castps512_ps256(s->acc[j]);
        out[j] = sum_lanes(has_halves(f) ? _mm256_add_ps(low, _mm512_extractf32x8_ps(s->acc[j], 1))
                                         : low);
    }
}

#include "kernels/cpu/blocks/rows_x86.h"

void cpu_blocks_avx512vnni(struct cpu_kernels *k)
{
    k->blocks = (struct cpu_blocks){.name = "int8, avx512vnni",
                                    .way = "avx512vnni",
                                    .quantise = quantise,
                                    .dots = {EACH_BLOCK_FORMAT(ENTRY)}};
}

#endif
