/* What panels and tiles of codes have in common on AVX-512 and AMX: the order of their
 * entries, and columns for rows. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_PANELS_AVX512_H
#define QUIRE_KERNELS_CPU_BLOCKS_PANELS_AVX512_H

#include "kernels/cpu/blocks/unpack_avx512.h"

#ifdef __AVX512BW__

enum {
    ROWS = CODE_PANEL_ROWS,
    DEPTH = 5, /* sums that wait to be added, at most: log2(16) + 1 */
};

/* Where accumulator `lane` of n = 8 or 16 comes in the order of entries: its bits
 * turned around. */
INLINE int turn_of(int lane, const int n)
{
    int turned = (lane & 1) << 3 | (lane & 2) << 1 | (lane & 4) >> 1 | (lane & 8) >> 3;

    return n == 8 ? turned >> 1 : turned;
}

INLINE int group_of(const enum weight_format_id f)
{
    return has_halves(f) ? 16 : 32;
}

/* Columns for rows: v[i] gets lane i of each. */
INLINE void transpose(__m512i v[16])
{
    __m512i t[16];

#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]),
                b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]);
        __m512i d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        t[i] = _mm512_unpacklo_epi64(a, c);
        t[i + 1] = _mm512_unpackhi_epi64(a, c);
        t[i + 2] = _mm512_unpacklo_epi64(b, d);
        t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xDD);
        __m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xDD);
        v[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        v[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
        v[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
}

INLINE __m512i join(const __m256 v[2])
{
    return _mm512_castps_si512(_mm512_insertf32x8(_mm512_castps256_ps512(v[0]), v[1], 1));
}

/* Where the entries of the block under way are, by accumulator. */
struct entries {
    char *at[FORMAT_BLOCK_MAX / FORMAT_GROUP];
};

/* Those of the first of n blocks. */
INLINE struct entries first_entries(char *at, const int group, int64_t entry, int32_t n)
{
    const int lanes = FORMAT_BLOCK_MAX / group;
    struct entries e = {{NULL}};

    for (int l = 0; l < lanes; l++) {
        e.at[l] = at + turn_of(l, lanes) * (int64_t)n * entry;
    }
    return e;
}

INLINE void next_entries(struct entries *e, const int group, int64_t entry)
{
    for (int l = 0; l < FORMAT_BLOCK_MAX / group; l++) {
        e->at[l] += entry;
    }
}

/* Values [at, at + 256) of plane `plane` of a row of n floats. */
static void quantise_plane(struct act_block *ret, const float *x, int32_t at, int32_t n,
                           int32_t plane)
{
    int32_t here = MIN(n - at, FORMAT_BLOCK_MAX);

    quantise(ret, 1, x + at, here);
    if (plane > 0) {
        float rest[FORMAT_BLOCK_MAX];
        act_rest(rest, ret, x + at, here);
        quantise(ret, 1, rest, here);
    }
}

/* The panels of a format, of the functions and sizes that the file defines. */
#define CODE_PANELS(NAME)                                                              \
    k->code_panels[FORMAT_##NAME] = (struct cpu_code_panels){.tile_rows = TILE,        \
                                                             .from = FROM,             \
                                                             .pack_rows = pack_##NAME, \
                                                             .pack_x = pack_x,         \
                                                             .dots = dots};

#endif
#endif
