/* Products with blocks with AVX-512's integer dot products in vectors of 32 bytes,
 * which is faster than 64 on processors that take those in two halves. */
#include "kernels/cpu/blocks/blocks_256.h"

#ifdef __AVX512VNNI__

void cpu_blocks_256_avx512vnni(struct cpu_kernels *k)
{
    k->other[OTHER_BLOCKS_256] = (struct cpu_blocks){.name = "int8, avx512vnni, 256 bits",
                                                     .way = "avx512vnni-256",
                                                     .quantise = quantise,
                                                     .dots = {EACH_BLOCK_FORMAT(ENTRY)}};
}

#endif
