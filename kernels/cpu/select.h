/* Selection by threshold, without a full sort, over the tokens that can still be
 * sampled. */
#ifndef QUIRE_KERNELS_CPU_SELECT_H
#define QUIRE_KERNELS_CPU_SELECT_H

#include "kernels/cpu/simd/kernels.h"

/* Keep the survivors whose z is at least the k-th greatest (ties with it stay). Returns
 * their number; order is kept. */
int32_t select_top_k(struct cpu_survivor *s, int32_t n, int32_t k);

/* Keep the survivors with z >= v, where v is the greatest value for which their masses
 * sum to at least `goal`; 1 <= goal <= the mass of all. Returns their number; order is
 * kept. */
int32_t select_top_p(struct cpu_survivor *s, int32_t n, uint64_t goal);

/* The sum of their masses. */
uint64_t survivor_mass(const struct cpu_survivor *s, int32_t n);

/* The n greatest of v[0, n_values), greatest first, the smaller index first on a tie;
 * -infinity is skipped. Returns the number found. */
int32_t select_best(const float *v, int32_t n_values, int32_t n, int32_t *ret_index,
                    float *ret_value);

#endif
