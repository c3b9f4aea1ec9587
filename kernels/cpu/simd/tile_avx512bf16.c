/* Inner products with AVX-512's bfloat16 instruction, 32 products at a time: rows as
 * stored, x rounded to bfloat16 (the type that a GPU's activations have with bfloat16
 * weights). Other types as in tile_avx512.c.
 */
#include "kernels/cpu/simd/avx512.h"

#ifdef __AVX512BF16__

enum {
    K_BLOCK = 2048,
    ROWS_1 = 4,
    ROWS_2 = 4,
    ROWS_3 = 6,
    ROWS_4 = 6,
    TILE_SUMS = FLOAT_TILE_SUMS
};

static int32_t packed_bytes(enum dtype t)
{
    return t == DTYPE_BF16 ? 2 : 4;
}

INLINE void bf16_tile(float *sum, const char *const *w, const uint16_t *x, const int n_w,
                      const int n_x, int32_t n_chunks, bool add, struct fetch *fetch)
{
    __m512 acc[TILE_SUMS];
    struct fetch ahead = *fetch;
    const char *row[8];

#pragma GCC unroll 24
    for (int i = 0; i < n_w * n_x; i++) {
        acc[i] = _mm512_setzero_ps();
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++) {
        row[i] = w[i];
    }
    for (int32_t c = 0; c < n_chunks; c++, x += n_x * TILE_CHUNK) {
        fetch_chunk(&ahead, row, n_w, 1);
        __m512bh v[TILE_ROWS];
#pragma GCC unroll 4
        for (int j = 0; j < n_x; j++) {
            v[j] = (__m512bh)_mm512_load_si512(x + j * TILE_CHUNK);
        }
#pragma GCC unroll 8
        for (int i = 0; i < n_w; i++) {
            __m512bh u = (__m512bh)_mm512_loadu_si512(row[i]);
#pragma GCC unroll 4
            for (int j = 0; j < n_x; j++) {
                acc[i * n_x + j] = _mm512_dpbf16_ps(acc[i * n_x + j], u, v[j]);
            }
            row[i] += 2 * TILE_CHUNK;
        }
    }
    *fetch = ahead;
    put_tile(sum, acc, n_w, n_x, add);
}

INLINE void tile(float *sum, const char *const *w, const void *x, const enum dtype t, const int n_w,
                 const int n_x, int32_t n_chunks, bool add, struct fetch *fetch)
{
    if (t == DTYPE_BF16) {
        bf16_tile(sum, w, x, n_w, n_x, n_chunks, add, fetch);
    } else {
        float_tile(sum, w, x, t, n_w, n_x, n_chunks, add, fetch);
    }
}

#include "kernels/cpu/simd/tile_rows.h"

/* Thirty-two floats, rounded to bfloat16. */
INLINE __m512 pack_pairs(const float *x)
{
    return (__m512)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
}

static void pack(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t)
{
    if (t != DTYPE_BF16) {
        pack_floats(out, x, n_x, n, t);
        return;
    }
    uint16_t *to = out;
    for (int32_t at = 0; at < n; at += TILE_CHUNK) {
        for (int32_t j = 0; j < n_x; j++, to += TILE_CHUNK) {
            float last[TILE_CHUNK] = {0};
            const float *from = x[j] + at;
            if (at + TILE_CHUNK > n) {
                memcpy(last, from, (size_t)(n - at) * sizeof(*last));
                from = last;
            }
            _mm512_store_ps(to, pack_pairs(from));
        }
    }
}

/* ---- panels ---- */

INLINE bool in_pairs(enum dtype t)
{
    return t == DTYPE_BF16;
}

INLINE __m512 add_product(__m512 a, __m512 w, __m512 x, const bool pairs)
{
    return pairs ? _mm512_dpbf16_ps(a, (__m512bh)w, (__m512bh)x) : _mm512_fmadd_ps(w, x, a);
}

#include "kernels/cpu/simd/panel_avx512.h"

void cpu_tiles_avx512bf16(struct cpu_kernels *k)
{
    k->linear = row_tiles();
    k->panels = avx512_panels;
}

#endif
