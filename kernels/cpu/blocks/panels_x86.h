/* What panels and tiles of codes have in common on all instruction sets: the order of
 * their entries, and the codes of rows of x. */
#ifndef QUIRE_KERNELS_CPU_BLOCKS_PANELS_X86_H
#define QUIRE_KERNELS_CPU_BLOCKS_PANELS_X86_H

#include "kernels/cpu/blocks/unpack_x86.h"

#ifdef __AVX2__

enum { DEPTH = 5 }; /* sums that wait to be added, at most: log2(16) + 1 */

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
