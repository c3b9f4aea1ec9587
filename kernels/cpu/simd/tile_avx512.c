/* Inner products of stored rows with packed rows of activations, AVX-512: as
 * tile_avx2.c, with sixteen lanes and up to twenty-four accumulators.
 */
#include "kernels/cpu/simd/avx512.h"

enum {
    K_BLOCK = 2048,
    ROWS_1 = 4,
    ROWS_2 = 8,
    ROWS_3 = 6,
    ROWS_4 = 6,
    TILE_SUMS = FLOAT_TILE_SUMS
};

static int32_t packed_bytes(enum dtype t)
{
    (void)t;
    return 4;
}

INLINE void tile(float *sum, const char *const *w, const void *x, const enum dtype t, const int n_w,
                 const int n_x, int32_t n_chunks, bool add, struct fetch *fetch)
{
    float_tile(sum, w, x, t, n_w, n_x, n_chunks, add, fetch);
}

#include "kernels/cpu/simd/tile_rows.h"

static void pack(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t)
{
    pack_floats(out, x, n_x, n, t);
}

/* ---- panels ---- */

INLINE bool in_pairs(enum dtype t)
{
    (void)t;
    return false;
}

INLINE __m512 pack_pairs(const float *x)
{
    return _mm512_loadu_ps(x); /* never used: in_pairs */
}

INLINE __m512 add_product(__m512 a, __m512 w, __m512 x, const bool pairs)
{
    (void)pairs;
    return _mm512_fmadd_ps(w, x, a);
}

#include "kernels/cpu/simd/panel_avx512.h"

void cpu_tiles_avx512(struct cpu_kernels *k)
{
    k->linear = row_tiles();
    k->panels = avx512_panels;
}
