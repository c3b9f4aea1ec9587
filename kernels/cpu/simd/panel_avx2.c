/* Inner products of many rows of x with stored rows, AVX2 and FMA: an outer product
 * over panels.
 *
 * tile_avx2.c sums the elements of a product in eight lanes, and the lanes in one tree.
 * This file takes the same sums in the same order, so the bits do not depend on which
 * of the two runs, but one lane at a time. Panels lie as [lane][step][row], packed x as
 * [lane][tile][step][row]; an accumulator holds one lane's sums of eight rows of w with
 * one row of x, and the lanes are added as they become complete. No sum crosses lanes
 * of a register, and of the sixteen registers twelve hold sums, three w and one x.
 * Weights are converted to float32 and transposed once per panel, which needs many rows
 * of x to pay.
 */
#include <immintrin.h>
#include <string.h>

#include "kernels/cpu/simd/avx2.h"

enum {
    LANES = 8,
    GROUP = 16, /* elements packed together: two for each lane */
    PANEL_ROWS = 24,
    VECTORS = PANEL_ROWS / 8,
    SUMS = VECTORS * TILE_ROWS,
    /* floats between lanes, so that they do not fall into the same cache sets */
    LANE_PAD = PANEL_SLACK / LANES,
};

/* Floats from a lane to the next: of a panel of n elements, and of packed x. */
static int64_t panel_lane(int32_t n)
{
    return (int64_t)n / LANES * PANEL_ROWS + LANE_PAD;
}
static int64_t x_lane(int32_t n, int32_t n_tiles)
{
    return (int64_t)n / LANES * TILE_ROWS * n_tiles + LANE_PAD;
}

/* Of sixteen stored elements, those that the lanes take first (part 0) or second, as in
 * tile_avx2.c. */
INLINE __m256 lane_elements(const void *w, const enum dtype t, const int part)
{
    if (t == DTYPE_BF16) {
        __m256i both = _mm256_loadu_si256(w);
        return _mm256_castsi256_ps(part == 0 ? _mm256_slli_epi32(both, 16)
                                             : _mm256_and_si256(both, _mm256_set1_epi32(-65536)));
    }
    return vec_load_type(w, t, (int64_t)part * 8);
}

INLINE void pack_type(float *panel, const void *const *row, int64_t first, int32_t n,
                      const enum dtype t)
{
    int64_t lane_stride = panel_lane(n);

    for (int32_t at = 0; at < n; at += GROUP) {
        for (int32_t v = 0; v < VECTORS; v++) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                __m256 r[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    r[i] = lane_elements(
                        (const char *)row[8 * v + i] + (first + at) * dtype_bytes(t), t, part);
                }
                vec_transpose(r);
#pragma GCC unroll 8
                for (int l = 0; l < LANES; l++) {
                    _mm256_store_ps(
                        panel + l * lane_stride + (at / LANES + part) * PANEL_ROWS + 8 * v, r[l]);
                }
            }
        }
    }
}

static void pack_rows(float *panel, const void *const *row, int64_t first, int32_t n, enum dtype t)
{
    if (t == DTYPE_BF16) {
        pack_type(panel, row, first, n, DTYPE_BF16);
    } else if (t == DTYPE_F16) {
        pack_type(panel, row, first, n, DTYPE_F16);
    } else {
        pack_type(panel, row, first, n, DTYPE_F32);
    }
}

/* Transpose four rows of eight lanes into one step of each lane. */
INLINE void put_step(float *out, int64_t lane_stride, const __m256 r[TILE_ROWS])
{
    __m256 low[2] = {_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1])};
    __m256 high[2] = {_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3])};

#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m256 even = _mm256_shuffle_ps(low[i], high[i], 0x44); /* lanes 2 i and 2 i + 4 */
        __m256 odd = _mm256_shuffle_ps(low[i], high[i], 0xEE);
        _mm_store_ps(out + 2 * i * lane_stride, _mm256_castps256_ps128(even));
        _mm_store_ps(out + (2 * i + 1) * lane_stride, _mm256_castps256_ps128(odd));
        _mm_store_ps(out + (2 * i + 4) * lane_stride, _mm256_extractf128_ps(even, 1));
        _mm_store_ps(out + (2 * i + 5) * lane_stride, _mm256_extractf128_ps(odd, 1));
    }
}

static void pack_x(float *out, int32_t tile, int32_t n_tiles, const float *const *x, int32_t n_x,
                   int32_t n, int32_t padded, enum dtype t)
{
    int64_t lane_stride = x_lane(padded, n_tiles);

    out += (int64_t)tile * (padded / LANES * TILE_ROWS);
    for (int32_t at = 0; at < padded; at += GROUP, out += 2 * TILE_ROWS) {
        __m256 part[2][TILE_ROWS];
        for (int r = 0; r < TILE_ROWS; r++) {
            float last[GROUP] = {0};
            const float *from = x[MIN(r, n_x - 1)] + at;
            if (at + GROUP > n) {
                memcpy(last, from, (size_t)MAX(n - at, 0) * sizeof(*last));
                from = last;
            }
            __m256 both[2];
            split16(both, from, t);
            part[0][r] = both[0];
            part[1][r] = both[1];
        }
        put_step(out, lane_stride, part[0]);
        put_step(out + TILE_ROWS, lane_stride, part[1]);
    }
}

/* Partial sums of a tile between its lanes: the tree
 * ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) needs up to three at a time. */
struct partial {
    __m256 at[3][SUMS];
};

/* Add lane l's sums into the tree. */
INLINE void fold_lane(struct partial *p, const __m256 *a, const int l)
{
    static const int place[LANES] = {0, 0, 1, 1, 1, 1, 2, 2};
    const int to = place[l];

#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) {
        __m256 s = l % 2 == 0 ? a[i] : _mm256_add_ps(p->at[to][i], a[i]);
        if (l == 3) {
            p->at[0][i] = _mm256_add_ps(p->at[0][i], s);
        } else if (l == 7) {
            p->at[0][i] = _mm256_add_ps(p->at[0][i], _mm256_add_ps(p->at[1][i], s));
        } else {
            p->at[to][i] = s;
        }
    }
}

/* Lane l of one tile, summed in registers over the lane's steps. */
INLINE void lane_tile(struct partial *p, const float *panel, const float *x, int32_t n_steps,
                      const int l)
{
    __m256 a[SUMS];

#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) {
        a[i] = _mm256_setzero_ps();
    }
    for (int32_t s = 0; s < n_steps; s++, panel += PANEL_ROWS, x += TILE_ROWS) {
        __m256 w[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) {
            w[v] = _mm256_load_ps(panel + 8 * v);
        }
#pragma GCC unroll 4
        for (int r = 0; r < TILE_ROWS; r++) {
            __m256 b = _mm256_broadcast_ss(x + r);
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) {
                a[r * VECTORS + v] = _mm256_fmadd_ps(w[v], b, a[r * VECTORS + v]);
            }
        }
    }
    fold_lane(p, a, l);
}

/* A lane of the panel stays in the first-level cache while all tiles use it. */
static void panel_dots(float *sum, const float *panel, const float *x, int32_t tile, int32_t count,
                       int32_t n_tiles, int32_t n, enum dtype t, struct line_prefetch *ahead)
{
    struct partial p[PANEL_TILES];
    int32_t n_steps = n / LANES;
    int64_t tile_floats = (int64_t)n_steps * TILE_ROWS;

    (void)t; /* floats, whatever was stored */
    x += tile * tile_floats;
#pragma GCC unroll 8
    for (int l = 0; l < LANES; l++) {
        for (int32_t i = 0; i < count; i++) {
            prefetch_lines(ahead, ahead->per_tile / LANES + 1);
            lane_tile(&p[i], panel, x + i * tile_floats, n_steps, l);
        }
        panel += panel_lane(n);
        x += x_lane(n, n_tiles);
    }
    for (int32_t at = 0; at < count; at++, sum += 8 * SUMS) {
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) {
            _mm256_store_ps(sum + 8 * i, p[at].at[0][i]);
        }
    }
}

void cpu_panels_avx2(struct cpu_kernels *k)
{
    k->panels = (struct cpu_panels){.k_block = k->linear.k_block,
                                    .rows = PANEL_ROWS,
                                    .from = 48,
                                    .pack_rows = pack_rows,
                                    .pack_x = pack_x,
                                    .dots = panel_dots};
}
