/* Products with blocks with AVX2. */
#include "kernels/cpu/blocks/blocks_256.h"

#ifdef __AVX2__

void cpu_blocks_avx2(struct cpu_kernels *k)
{
    k->blocks = (struct cpu_blocks){.name = "int8, avx2",
                                    .way = "avx2",
                                    .quantise = quantise,
                                    .dots = {EACH_BLOCK_FORMAT(ENTRY)}};
}

#endif
