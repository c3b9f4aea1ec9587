/* Inner products of stored rows with packed rows of activations, AVX2 and FMA.
 *
 * Rows are summed along their elements, sixteen at a time, into accumulators of eight
 * lanes. Weights are used as stored, [out, in], and converted in registers. A bfloat16
 * is the upper half of a float32: of sixteen loaded, a shift gives the even and a mask
 * the odd ones, so x is packed with the even elements of each sixteen first. A tile has
 * twelve accumulators (three rows of w by four of x), enough to hide the latency of
 * FMA. With one row of x the loop is bound by memory, and reads four rows of w as four
 * streams.
 */
#include <immintrin.h>
#include <string.h>

#include "kernels/cpu/simd/avx2.h"

enum { K_BLOCK = 2048 };

/* Makes the compiler take `pointer` for a new one. All sixteen registers are in use
 * (twelve sums, three rows of w, one of x), so it must not keep a loaded value for a
 * second use, which would spill sums to memory. */
#define FORGET(pointer) __asm__("" : "+r"(pointer))

static const _Alignas(32) int32_t upper_halves[8] = {-65536, -65536, -65536, -65536,
                                                     -65536, -65536, -65536, -65536};

/* Of sixteen stored elements, those that are multiplied with elements [0, 8) and [8,
 * 16) of packed x. */
INLINE __m256 stored_low(const void *w, enum dtype t)
{
    if (t == DTYPE_BF16) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(w), 16));
    }
    return t == DTYPE_F16 ? _mm256_cvtph_ps(_mm_loadu_si128(w)) : _mm256_loadu_ps(w);
}

INLINE __m256 stored_high(const void *w, enum dtype t)
{
    if (t == DTYPE_BF16) {
        const int32_t *mask = upper_halves;
        FORGET(mask);
        return _mm256_castsi256_ps(
            _mm256_and_si256(_mm256_load_si256((const __m256i *)mask), _mm256_loadu_si256(w)));
    }
    return t == DTYPE_F16 ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)w + 1))
                          : _mm256_loadu_ps((const float *)w + 8);
}

/* The sums over the lanes of four accumulators, always in the same tree. */
INLINE __m128 sum4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));

    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

INLINE void put4(float *sum, __m128 s, bool add)
{
    _mm_storeu_ps(sum, add ? _mm_add_ps(_mm_loadu_ps(sum), s) : s);
}

/* Write the n_w x n_x accumulators as [n_w][n_x]. */
INLINE void put_tile(float *sum, const __m256 *acc, const int n_w, const int n_x, bool add)
{
    const __m256 zero = _mm256_setzero_ps();

    if (n_x == 3) { /* the fourth float is the next row's, which is written after it */
        for (int w = 0; w < n_w; w++) {
            put4(sum + 3 * w, sum4(acc[3 * w], acc[3 * w + 1], acc[3 * w + 2], zero), add);
        }
        return;
    }
    for (int i = 0; i < n_w * n_x; i += 4) {
        put4(sum + i, sum4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]), add);
    }
}

/* One tile: n_w rows of w, n_x of x, n_chunks chunks of 32 elements (see
 * tile_rows.h). */
INLINE void tile(float *sum, const char *const *w, const void *packed, const enum dtype t,
                 const int n_w, const int n_x, int32_t n_chunks, bool add, struct fetch *fetch)
{
    const float *x = packed;
    const int width = t == DTYPE_F32 ? 64 : 32; /* bytes of sixteen stored elements */
    __m256 acc[12];

#pragma GCC unroll 12
    for (int i = 0; i < n_w * n_x; i++) {
        acc[i] = _mm256_setzero_ps();
    }
    struct fetch ahead = *fetch;
    const char *row[8];
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++) {
        row[i] = w[i];
    }
    for (int32_t c = 0; c < n_chunks; c++) {
        fetch_chunk(&ahead, row, n_w, width / 32);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) { /* sixteen elements each */
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                __m256 u[8];
#pragma GCC unroll 8
                for (int i = 0; i < n_w; i++) {
                    FORGET(row[i]);
                    const char *at = row[i] + h * width;
                    u[i] = part == 0 ? stored_low(at, t) : stored_high(at, t);
                }
#pragma GCC unroll 4
                for (int j = 0; j < n_x; j++) {
                    __m256 v = _mm256_load_ps(x + j * TILE_CHUNK + h * 16 + part * 8);
#pragma GCC unroll 8
                    for (int i = 0; i < n_w; i++) {
                        acc[i * n_x + j] = _mm256_fmadd_ps(u[i], v, acc[i * n_x + j]);
                    }
                }
            }
        }
        x += n_x * TILE_CHUNK;
#pragma GCC unroll 8
        for (int i = 0; i < n_w; i++) {
            row[i] += 2 * width;
        }
    }
    *fetch = ahead;
    put_tile(sum, acc, n_w, n_x, add);
}

static int32_t packed_bytes(enum dtype t)
{
    (void)t;
    return 4;
}

enum { ROWS_1 = 4, ROWS_2 = 6, ROWS_3 = 4, ROWS_4 = 3, TILE_SUMS = 12 };

#include "kernels/cpu/simd/tile_rows.h"

INLINE void pack16(float *out, const float *x, enum dtype t)
{
    __m256 part[2];

    split16(part, x, t);
    _mm256_store_ps(out, part[0]);
    _mm256_store_ps(out + 8, part[1]);
}

static void pack(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t)
{
    float *to = out;

    for (int32_t at = 0; at < n; at += TILE_CHUNK) {
        for (int32_t j = 0; j < n_x; j++, to += TILE_CHUNK) {
            if (at + TILE_CHUNK <= n) {
                pack16(to, x[j] + at, t);
                pack16(to + 16, x[j] + at + 16, t);
            } else {
                float last[TILE_CHUNK] = {0};
                memcpy(last, x[j] + at, (size_t)(n - at) * sizeof(*last));
                pack16(to, last, t);
                pack16(to + 16, last + 16, t);
            }
        }
    }
}

void cpu_tiles_avx2(struct cpu_kernels *k)
{
    k->linear = row_tiles();
}
