/* How AVX-512 with bfloat16 instructions multiplies rows of bfloat16: chosen by timing,
 * because on some processors the instruction for pairs of bfloat16 is slower than that
 * for floats.
 *
 * Pairs round x to bfloat16, floats do not, so results differ. The choice is therefore
 * made once in a process, and kept in a file for the next ones and for other ranks on
 * the machine (kept_ways.h). The environment variable QUIRE_CPU_BF16 (pairs, floats)
 * takes the place of timing and of the file.
 */
#ifndef QUIRE_KERNELS_CPU_WAYS_BF16_WAY_H
#define QUIRE_KERNELS_CPU_WAYS_BF16_WAY_H

#include "config/base/base.h"
#include "kernels/cpu/isa.h"

const char *cpu_bf16_name(enum cpu_bf16 way);
/* The way for instruction set `isa`. ERR_INVALID: QUIRE_CPU_BF16 names none. */
int cpu_bf16_detect(enum cpu_bf16 *ret, enum cpu_isa isa, struct err *e);
/* The choice between two times of the same product. */
enum cpu_bf16 cpu_bf16_faster(double pairs_us, double floats_us);
/* Times both ways. False: there was no memory to do it. */
bool cpu_bf16_time(enum cpu_bf16 *ret);

#endif
