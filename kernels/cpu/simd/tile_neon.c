/* Inner products of stored rows with packed rows of activations, NEON.
 *
 * As in tile_avx2.c a sum has eight lanes, here two registers of four, and x is packed
 * with the even elements first for bfloat16: of eight loaded, a shift gives the even
 * and a mask the odd ones. Up to 24 of the 32 registers are sums: three rows of w by
 * four of x.
 */
#include "kernels/cpu/simd/neon.h"

enum { K_BLOCK = 2048, HALVES = 2 };

/* Of sixteen stored elements, lanes [4 half, 4 half + 4) of those that are multiplied
 * with elements [0, 8) (part 0) or [8, 16) of packed x. */
INLINE float32x4_t stored(const char *w, const enum dtype t, const int part, const int half)
{
    if (t != DTYPE_BF16) {
        return vec_load_type(w, t, 8 * part + 4 * half);
    }
    uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)w + 16 * half));
    return vreinterpretq_f32_u32(part == 0 ? vshlq_n_u32(both, 16)
                                           : vandq_u32(both, vdupq_n_u32(0xFFFF0000u)));
}

/* One tile: n_w rows of w, n_x of x, n_chunks chunks of 32 elements (see
 * tile_rows.h). */
INLINE void tile(float *sum, const char *const *w, const void *packed, const enum dtype t,
                 const int n_w, const int n_x, int32_t n_chunks, bool add, struct fetch *fetch)
{
    const float *x = packed;
    const int width = t == DTYPE_F32 ? 64 : 32; /* bytes of sixteen stored elements */
    float32x4_t acc[12 * HALVES];
    const char *row[8];

#pragma GCC unroll 24
    for (int i = 0; i < n_w * n_x * HALVES; i++) {
        acc[i] = vdupq_n_f32(0);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++) {
        row[i] = w[i];
    }
    for (int32_t c = 0; c < n_chunks; c++) {
        fetch_chunk(fetch, row, n_w, width / 32);
#pragma GCC unroll 8
        /* four elements of each row: which sixteen, which part, which lanes */
        for (int at = 0; at < 8; at++) {
            const int h = at / 4, part = at / 2 % 2, half = at % 2;
            float32x4_t u[8];
#pragma GCC unroll 8
            for (int i = 0; i < n_w; i++) {
                u[i] = stored(row[i] + h * width, t, part, half);
            }
#pragma GCC unroll 4
            for (int j = 0; j < n_x; j++) {
                float32x4_t v = vld1q_f32(x + j * TILE_CHUNK + h * 16 + part * 8 + half * 4);
#pragma GCC unroll 8
                for (int i = 0; i < n_w; i++) {
                    acc[(i * n_x + j) * HALVES + half] =
                        vfmaq_f32(acc[(i * n_x + j) * HALVES + half], u[i], v);
                }
            }
        }
        x += n_x * TILE_CHUNK;
#pragma GCC unroll 8
        for (int i = 0; i < n_w; i++) {
            row[i] += 2 * width;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < n_w * n_x; i++) {
        float s = vaddvq_f32(vaddq_f32(acc[HALVES * i], acc[HALVES * i + 1]));
        sum[i] = add ? sum[i] + s : s;
    }
}

static int32_t packed_bytes(enum dtype t)
{
    (void)t;
    return 4;
}

enum { ROWS_1 = 4, ROWS_2 = 4, ROWS_3 = 4, ROWS_4 = 3, TILE_SUMS = 12 };

#include "kernels/cpu/simd/tile_rows.h"

/* Pack eight floats: for bfloat16 the even ones to `out` and the odd to out + 8, which
 * are lanes of the two parts of their sixteen. */
INLINE void pack8(float *out, const float *x, enum dtype t)
{
    if (t == DTYPE_BF16) {
        float32x4x2_t v = vld2q_f32(x);
        vst1q_f32(out, v.val[0]);
        vst1q_f32(out + 8, v.val[1]);
    } else {
        memcpy(out, x, 8 * sizeof(*x));
    }
}

static void pack(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t)
{
    float *to = out;

    for (int32_t at = 0; at < n; at += TILE_CHUNK) {
        for (int32_t j = 0; j < n_x; j++, to += TILE_CHUNK) {
            float last[TILE_CHUNK] = {0};
            const float *from = x[j] + at;
            if (at + TILE_CHUNK > n) {
                memcpy(last, from, (size_t)(n - at) * sizeof(*last));
                from = last;
            }
            for (int32_t i = 0; i < TILE_CHUNK; i += 8) {
                pack8(to + (t == DTYPE_BF16 ? i / 16 * 16 + i / 8 % 2 * 4 : i), from + i, t);
            }
        }
    }
}

void cpu_tiles_neon(struct cpu_kernels *k)
{
    k->linear = row_tiles();
}
