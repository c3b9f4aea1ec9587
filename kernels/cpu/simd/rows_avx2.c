/* The row functions of kernels.h for AVX2 with FMA and F16C (see rows_vec.h): eight
 * floats at a time, tails by mask. */
#include <immintrin.h>
#include <math.h>

#include "kernels/cpu/simd/avx2.h"

static const int32_t tail_mask[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};

/* Lanes [0, n) of 8, 0 <= n <= 8. */
static inline __m256i first_lanes(int32_t n)
{
    return _mm256_loadu_si256((const __m256i *)(tail_mask + 8 - n));
}

/* Up to eight floats, n >= 1, the lanes beyond 0. Only tails are masked, because masked
 * stores are slow on some processors. */
static inline __m256 load_some(const float *x, int32_t n)
{
    return n >= 8 ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, first_lanes(n));
}

static inline void store_some(float *x, __m256 v, int32_t n)
{
    if (n >= 8) {
        _mm256_storeu_ps(x, v);
    } else {
        _mm256_maskstore_ps(x, first_lanes(n), v);
    }
}

/* 1 / (1 + e^-x), from e^-|x| so that nothing overflows. */
static inline vec vec_sigmoid(vec x)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 one = _mm256_set1_ps(1.0f);
    __m256 e = vec_exp(_mm256_or_ps(x, sign));
    __m256 top = _mm256_blendv_ps(one, e, x);

    return _mm256_div_ps(top, _mm256_add_ps(one, e));
}

static inline __m128i to_bf16(__m256 x)
{
    __m256i u = _mm256_castps_si256(x);
    __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, lsb), _mm256_set1_epi32(0x7FFF));
    __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256i h = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan)), 16);

    return _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

/* e4m3_store of convert.h, eight at a time, in lanes of 32 bits. */
static inline __m256i to_e4m3(__m256 x)
{
    const __m256i most = _mm256_set1_epi32(0x43E00000); /* 448 */
    __m256i u = _mm256_castps_si256(x), rest = _mm256_and_si256(u, _mm256_set1_epi32(0x7FFFFFFF));
    __m256i nan = _mm256_cmpgt_epi32(rest, _mm256_set1_epi32(0x7F800000));
    __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), rest);
    __m256 magic = _mm256_set1_ps(0x1p14f);
    __m256i fine = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(rest), magic));

    rest = _mm256_min_epi32(rest, most);
    __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(rest, 20), _mm256_set1_epi32(1));
    rest = _mm256_add_epi32(_mm256_add_epi32(rest, lsb), _mm256_set1_epi32(0x7FFFF - 0x3C000000));
    rest = _mm256_blendv_epi8(_mm256_srli_epi32(rest, 20),
                              _mm256_sub_epi32(fine, _mm256_castps_si256(magic)), small);
    rest = _mm256_blendv_epi8(rest, _mm256_set1_epi32(0x7F), nan);
    return _mm256_or_si256(rest,
                           _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80)));
}

/* int8_store of convert.h, likewise. */
static inline __m256i to_int8(__m256 x)
{
    __m256 most = _mm256_set1_ps(127), least = _mm256_set1_ps(-127);
    __m256 number = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));

    return _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(number, most), least));
}

/* The lowest bytes of eight lanes. */
static inline __m128i low_bytes(__m256i v)
{
    __m128i w =
        _mm_packus_epi32(_mm_and_si128(_mm256_castsi256_si128(v), _mm_set1_epi32(0xFF)),
                         _mm_and_si128(_mm256_extracti128_si256(v, 1), _mm_set1_epi32(0xFF)));

    return _mm_packus_epi16(w, w);
}

INLINE void vec_store_type(void *out, enum dtype t, int64_t i, vec v)
{
    if (t == DTYPE_F32) {
        vec_store((float *)out + i, v);
    } else if (t == DTYPE_F8 || t == DTYPE_I8) {
        _mm_storel_epi64((__m128i *)((uint8_t *)out + i),
                         low_bytes(t == DTYPE_F8 ? to_e4m3(v) : to_int8(v)));
    } else {
        __m128i h = t == DTYPE_F16 ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : to_bf16(v);
        _mm_storeu_si128((__m128i *)((uint16_t *)out + i), h);
    }
}

static float square_sum_row(const float *x, int32_t n, float mean)
{
    __m256 m = _mm256_set1_ps(mean);
    __m256 a = _mm256_setzero_ps();
    __m256 b = a;
    int32_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m256 u = _mm256_sub_ps(_mm256_loadu_ps(x + i), m);
        __m256 v = _mm256_sub_ps(_mm256_loadu_ps(x + i + 8), m);
        a = _mm256_fmadd_ps(u, u, a);
        b = _mm256_fmadd_ps(v, v, b);
    }
    float sum = vec_sum(_mm256_add_ps(a, b));
    for (; i < n; i++) {
        sum += (x[i] - mean) * (x[i] - mean);
    }
    return sum;
}

INLINE vec vec_mul2_sub(vec a, vec b, vec c, vec d)
{
    return _mm256_fmsub_ps(a, b, _mm256_mul_ps(c, d));
}

INLINE vec vec_mul2_add(vec a, vec b, vec c, vec d)
{
    return _mm256_fmadd_ps(a, b, _mm256_mul_ps(c, d));
}

#include "kernels/cpu/simd/rows_vec.h"

static void add_row(float *x, const float *y, int32_t n)
{
    int32_t i = 0;

    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    }
    for (; i < n; i++) {
        x[i] += y[i];
    }
}

/* ---- scans of logits ---- */

static struct row_scan scan_row(const float *x, int32_t n)
{
    __m256 inf = _mm256_set1_ps(INFINITY);
    __m256 best = _mm256_set1_ps(-INFINITY);
    __m256 bad = _mm256_setzero_ps();
    int32_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        best = _mm256_max_ps(best, v);
        /* not less: infinity or NaN */
        bad = _mm256_or_ps(bad, _mm256_cmp_ps(v, inf, _CMP_NLT_UQ));
    }
    struct row_scan s = {.bad = _mm256_movemask_ps(bad) != 0};
    s.max = s.bad ? NAN : vec_max_lane(best);
    for (; i < n; i++) {
        s.bad = s.bad || !(x[i] < INFINITY);
        s.max = x[i] > s.max ? x[i] : s.max;
    }
    return s;
}

/* sample_exp of kernels/noise.h, eight at a time: the same operations, none fused. */
static inline __m256 sample_exp8(__m256 z)
{
    const __m256 magic = _mm256_set1_ps(12582912.0f);
    __m256 n =
        _mm256_sub_ps(_mm256_add_ps(_mm256_mul_ps(z, _mm256_set1_ps(1.44269504f)), magic), magic);
    __m256 r = _mm256_sub_ps(_mm256_sub_ps(z, _mm256_mul_ps(n, _mm256_set1_ps(0.693359375f))),
                             _mm256_mul_ps(n, _mm256_set1_ps(-2.12194440e-4f)));
    __m256 p = _mm256_set1_ps(1.0f / 720);

    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f / 120));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f / 24));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.0f / 6));
    p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(0.5f));
    p = _mm256_add_ps(_mm256_mul_ps(_mm256_mul_ps(p, r), r), r);
    p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    __m256i e =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127)), 23);
    __m256 in_range = _mm256_cmp_ps(z, _mm256_set1_ps(-80.0f), _CMP_GT_OQ);
    return _mm256_and_ps(in_range, _mm256_mul_ps(p, _mm256_castsi256_ps(e)));
}

/* Add the masses of eight tokens to four sums: integers below 2^53, which doubles hold
 * exactly. */
static inline __m256d add_masses(__m256d sum, __m256 exp_z)
{
    __m256 scaled = _mm256_mul_ps(exp_z, _mm256_set1_ps(0x1p40f));
    __m256d lo = _mm256_round_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(scaled)),
                                 _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    __m256d hi = _mm256_round_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(scaled, 1)),
                                 _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);

    return _mm256_add_pd(sum, _mm256_add_pd(lo, hi));
}

static uint64_t take_masses(__m256d sum)
{
    double s[4];

    _mm256_storeu_pd(s, sum);
    return (uint64_t)s[0] + (uint64_t)s[1] + (uint64_t)s[2] + (uint64_t)s[3];
}

static int32_t survivors(struct cpu_survivor *out, const float *logits, int32_t n, float max,
                         float inv_temperature, float least, uint64_t *ret_total)
{
    int32_t found = 0;
    uint64_t total = 0;
    __m256d sum = _mm256_setzero_pd();

    for (int32_t t = 0; t < n; t += 8) {
        __m256i lanes = first_lanes(MIN(8, n - t));
        __m256 l = _mm256_maskload_ps(logits + t, lanes);
        __m256 z =
            _mm256_mul_ps(_mm256_sub_ps(l, _mm256_set1_ps(max)), _mm256_set1_ps(inv_temperature));
        __m256 p = _mm256_and_ps(sample_exp8(z), _mm256_castsi256_ps(lanes));
        sum = add_masses(sum, p);
        int keep = _mm256_movemask_ps(
            _mm256_and_ps(_mm256_cmp_ps(z, _mm256_set1_ps(least), _CMP_GT_OQ),
                          _mm256_cmp_ps(p, _mm256_set1_ps(0x1p-40f), _CMP_GE_OQ)));
        if (keep != 0) {
            float zs[8];
            float ps[8];
            _mm256_storeu_ps(zs, z);
            _mm256_storeu_ps(ps, p);
            for (; keep != 0; keep &= keep - 1) {
                int i = __builtin_ctz((unsigned)keep);
                out[found++] = (struct cpu_survivor){
                    .z = zs[i], .token = t + i, .mass = (uint64_t)(ps[i] * 0x1p40f)};
            }
        }
        if (t % 8192 == 0) { /* at most 2048 masses of at most 2^40 in a sum */
            total += take_masses(sum);
            sum = _mm256_setzero_pd();
        }
    }
    *ret_total = total + take_masses(sum);
    return found;
}

/* ---- sums of tiles to rows ---- */

static void transpose_sums(float *out, int32_t stride, const float *sum, int32_t n, int32_t n_x)
{
    int32_t i = 0;

    for (; n_x == 4 && i + 4 <= n; i += 4) {
        __m128 a = _mm_loadu_ps(sum + 4 * i);
        __m128 b = _mm_loadu_ps(sum + 4 * i + 4);
        __m128 c = _mm_loadu_ps(sum + 4 * i + 8);
        __m128 d = _mm_loadu_ps(sum + 4 * i + 12);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(out + i, a);
        _mm_storeu_ps(out + stride + i, b);
        _mm_storeu_ps(out + 2 * stride + i, c);
        _mm_storeu_ps(out + 3 * stride + i, d);
    }
    for (; i < n; i++) {
        for (int32_t x = 0; x < n_x; x++) {
            out[x * stride + i] = sum[i * n_x + x];
        }
    }
}

void cpu_kernels_avx2(struct cpu_kernels *k)
{
    k->norm = norm_row;
    k->add = add_row;
    k->gate = gate_row;
    k->epilogue = epilogue_row;
    k->load = load_row;
    k->store = store_row;
    k->rotate = rotate_row;
    k->scan = scan_row;
    k->sum_exp = sum_exp_row;
    k->survivors = survivors;
    k->transpose_sums = transpose_sums;
}
