/* Which instruction set the CPU backend runs on, found at start, never at build time.
 *
 * The environment variable QUIRE_CPU_ISA (plain, avx2, avx512, avx512bf16, neon) asks
 * for another, usually a lower one, so that tests reach every variant the machine has.
 */
#ifndef QUIRE_KERNELS_CPU_SIMD_ISA_H
#define QUIRE_KERNELS_CPU_SIMD_ISA_H

#include "config/base/base.h"

enum cpu_isa { CPU_PLAIN, CPU_AVX2, CPU_AVX512, CPU_AVX512_BF16, CPU_NEON };

const char *cpu_isa_name(enum cpu_isa isa);
/* The best this machine and QUIRE_CPU_ISA allow; ERR_UNSUPPORTED when the variable
 * names one that is not there. */
int cpu_isa_detect(enum cpu_isa *ret, struct err *e);

static inline void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
