/* Products with Q4_K as in blocks_256_avx512vnni.c, for processors that take the two
 * halves of a byte apart by one instruction (GFNI) in place of a shift and a mask. */
#define ROWS_FORMATS(X) X(Q4_K)
#include "kernels/cpu/blocks/blocks_256.h"

#if defined(__AVX512VNNI__) && defined(__GFNI__)

void cpu_blocks_gfni_avx512vnni(struct cpu_kernels *k)
{
    struct cpu_blocks *b = &k->other[OTHER_BLOCKS_256];

    b->quantise = quantise;
    b->dots[FORMAT_Q4_K] = dots_Q4_K;
}

#endif
