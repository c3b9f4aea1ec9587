/* Tiles of AMX: eight registers of up to 16 rows of 64 bytes each.
 *
 * A product adds A [m][k] B [k][n] to C [m][n], where each element of k is 4 bytes: two
 * values of bfloat16, or four of int8, side by side in A and in B. An element of C
 * depends on its row of A, its column of B, and the order of products, and on nothing
 * else in the tiles.
 *
 * The shapes are set by each function that uses tiles, and given up at its end, so that
 * no thread has to prepare and none keeps tiles that are saved when it is switched:
 *
 *     struct amx_config t = amx_config();
 *     amx_shape(&t, 0, 16, 64);
 *     amx_begin(&t);
 *     _tile_zero(0); …
 *     amx_end();
 *
 * Compilers do not know that tiles are read from memory and written to it. What is
 * stored before amx_begin or amx_order is there for loads behind it, and what tiles
 * stored before amx_order or amx_end is there for reads behind that.
 */
#ifndef QUIRE_KERNELS_CPU_SIMD_AMX_H
#define QUIRE_KERNELS_CPU_SIMD_AMX_H

/* Empty where a header is compiled alone, without -mamx-tile. The second name is
 * clang's. */
#if defined(__AMX_TILE__) || defined(__AMXTILE__)

#include <immintrin.h>

#include "kernels/cpu/simd/fetch.h"

enum {
    AMX_TILES = 8,
    AMX_ROWS = 16,  /* of a tile, at most */
    AMX_BYTES = 64, /* of a row of a tile, at most */
};

/* What ldtilecfg reads. */
struct amx_config {
    _Alignas(64) uint8_t palette; /* 1: AMX's tiles */
    uint8_t start_row;            /* 0: loads begin with the first row */
    uint8_t reserved[14];         /* 0 */
    uint16_t bytes[16];           /* of a row, by tile */
    uint8_t rows[16];             /* by tile */
};

/* No tile has a shape yet. */
INLINE struct amx_config amx_config(void)
{
    return (struct amx_config){.palette = 1};
}

INLINE void amx_shape(struct amx_config *t, int tile, int rows, int bytes)
{
    t->rows[tile] = (uint8_t)rows;
    t->bytes[tile] = (uint16_t)bytes;
}

INLINE void amx_order(void)
{
    __asm__ volatile("" : : : "memory");
}

INLINE void amx_begin(const struct amx_config *t)
{
    amx_order();
    _tile_loadconfig(t);
}

INLINE void amx_end(void)
{
    _tile_release();
    amx_order();
}

#endif
#endif
