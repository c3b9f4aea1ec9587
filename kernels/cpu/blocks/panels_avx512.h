/* Panels and tiles of codes on AVX-512 and AMX: what they have in common. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_PANELS_AVX512_H
#define QUIRE_KERNELS_CPU_BLOCKS_PANELS_AVX512_H

#include "kernels/cpu/blocks/panels_x86.h"
#include "kernels/cpu/blocks/unpack_avx512.h"

#ifdef __AVX512BW__

enum { ROWS = CODE_PANEL_ROWS };

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

#endif
#endif
