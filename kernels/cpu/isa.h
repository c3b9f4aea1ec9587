/* The instruction set of the CPU backend, chosen when it opens, not at build time.
 *
 * By default it is the best that the machine has. The environment variable
 * QUIRE_CPU_ISA (plain, avx2, avx512, avx512vnni, avx512bf16, amx, neon) selects
 * another one that the machine has, so that tests reach every variant. QUIRE_CPU_BF16
 * and QUIRE_CPU_WAYS: ways/bf16_way.h, ways/block_ways.h. */
#ifndef QUIRE_KERNELS_CPU_ISA_H
#define QUIRE_KERNELS_CPU_ISA_H

#include "config/base/base.h"

enum cpu_isa {
    CPU_PLAIN,
    CPU_AVX2,
    CPU_AVX512,
    CPU_AVX512_VNNI, /* the one before, and integer dot products */
    CPU_AVX512_BF16, /* the one before, and bfloat16 */
    CPU_AMX,         /* the one before, and tiles of bfloat16 and of int8 */
    CPU_NEON
};

/* How CPU_AVX512_BF16 multiplies rows of bfloat16 (ways/bf16_way.h). */
enum cpu_bf16 {
    CPU_BF16_PAIRS, /* two elements in a word; other instruction sets have this value */
    CPU_BF16_FLOATS /* converted to float32, as AVX-512 without the instruction does */
};

const char *cpu_isa_name(enum cpu_isa isa);
/* False: there is none of that name. */
bool cpu_isa_named(enum cpu_isa *ret, const char *name);
/* ERR_UNSUPPORTED: QUIRE_CPU_ISA names one that the machine does not have. */
int cpu_isa_detect(enum cpu_isa *ret, struct err *e);

/* A hint to the processor in a loop that spins. */
static inline void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
