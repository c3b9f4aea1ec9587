/* Products with rows of w in bfloat16 by AMX: what tiles and panels share. x is rounded
 * to bfloat16; other types are multiplied as without AMX.
 *
 * Sixteen rows of w are operand A, packed x is operand B with a column for each row of
 * x, so C is [w][x]. An element of C adds, for each chunk of 16 pairs, the products of
 * the pairs' first elements in their order, those of their second ones in theirs, then
 * both to the sum so far; denormal numbers count as 0. A block of K_BLOCK elements is
 * one such sum; sums of blocks are added in their order.
 *
 * A chunk's pairs are not neighbours. Elements are taken in steps of 512: of the 256
 * pairs of a step, pair i belongs to chunk i % 16. Behind the last whole step of a row,
 * each line is a chunk of 16 neighbouring pairs.
 */
#ifndef QUIRE_KERNELS_CPU_SIMD_AMX_BF16_H
#define QUIRE_KERNELS_CPU_SIMD_AMX_BF16_H

#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/avx512.h"

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)

enum {
    K_BLOCK = 2048,
    STEP_LINES = 16, /* of TILE_CHUNK elements, and chunks */
    STEP = STEP_LINES * TILE_CHUNK,
    STEP_BYTES = 2 * STEP, /* of a stored row */
    BLOCK_STEPS = K_BLOCK / STEP,
    LINE_BYTES = 2 * TILE_CHUNK,
    W_ROWS = AMX_ROWS,            /* stored rows of w in a tile register */
    X_ROWS = AMX_ROWS,            /* rows of x in a tile register */
    SUMS = W_ROWS * X_ROWS,       /* of one product of two registers */
    W_BYTES = W_ROWS * AMX_BYTES, /* a tile register of w, or a full one of x */
};

/* Tile registers, whose numbers are part of the instructions. */
#define C00 0
#define C01 1
#define C10 2
#define C11 3
#define W0 4
#define W1 5
#define X0 6
#define X1 7

/* Thirty-two floats of a row of n from `at` on, zero-padded, rounded to bfloat16. */
INLINE __m512 pack_line(const float *x, int32_t at, int32_t n)
{
    float last[TILE_CHUNK] = {0};

    if (at + TILE_CHUNK > n) {
        memcpy(last, x + MIN(at, n), (size_t)MAX(n - at, 0) * sizeof(*last));
        x = last;
        at = 0;
    }
    return (__m512)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + at + 16), _mm512_loadu_ps(x + at));
}

/* A step of a row to its chunks, which lie W_BYTES apart: transposed, or the n_lines
 * that are left as they are. */
INLINE void turn_step(char *to, const char *from, int32_t n_lines)
{
    __m512 r[STEP_LINES];

    if (n_lines < STEP_LINES) {
        for (int32_t i = 0; i < n_lines; i++) {
            _mm512_store_ps(to + (int64_t)i * W_BYTES,
                            _mm512_loadu_ps(from + (int64_t)i * LINE_BYTES));
        }
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < STEP_LINES; i++) {
        r[i] = _mm512_loadu_ps(from + (int64_t)i * LINE_BYTES);
    }
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < STEP_LINES; i++) {
        _mm512_store_ps(to + (int64_t)i * W_BYTES, r[i]);
    }
}

#endif
#endif
