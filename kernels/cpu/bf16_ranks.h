/* The way of ranks for bfloat16 (ways/bf16_way.h). */
#ifndef QUIRE_KERNELS_CPU_BF16_RANKS_H
#define QUIRE_KERNELS_CPU_BF16_RANKS_H

#include "kernels/comm/comm.h"
#include "kernels/cpu/isa.h"

/* *way = that of the first rank of comm. All ranks call it: what they choose by results
 * that all of them have, as experts, would differ where these round differently, and
 * each may have timed for itself. */
int cpu_bf16_agree(enum cpu_bf16 *way, enum cpu_isa isa, struct comm *comm, struct err *e);

#endif
