/* Threshold selection without a full sort, over the tokens that can still be drawn. */
#ifndef QUIRE_KERNELS_CPU_SELECT_H
#define QUIRE_KERNELS_CPU_SELECT_H

#include "kernels/cpu/simd/kernels.h"

/* Keep the survivors whose z is at least the k-th greatest (ties at the edge stay).
 * Returns how many; order is kept. */
int32_t select_top_k(struct cpu_survivor *s, int32_t n, int32_t k);

/* Keep the survivors with z >= v, v the greatest value for which those weigh at least
 * `goal`, 1 <= goal <= their sum. */
int32_t select_top_p(struct cpu_survivor *s, int32_t n, uint64_t goal);

uint64_t survivor_mass(const struct cpu_survivor *s, int32_t n);

/* The n best of v[0, n_values) in order, greatest first, the smaller index first on a
 * tie; -infinity is not taken. Returns how many were found. */
int32_t select_best(const float *v, int32_t n_values, int32_t n, int32_t *ret_index,
                    float *ret_value);

#endif
