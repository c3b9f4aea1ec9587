/* Threshold selection without a full sort, over the tokens that can still be drawn. */
#ifndef QUIRE_KERNELS_CPU_SELECT_H
#define QUIRE_KERNELS_CPU_SELECT_H

#include "config/base.h"

/* A token that can still be drawn: z = (logit - max) / temperature, mass = sample_mass(z) > 0. */
struct cpu_survivor {
    float z;
    int32_t token;
    uint64_t mass;
};

/* Keep the survivors whose z is at least the k-th greatest (ties at the edge stay). Returns how many; order is kept. */
int32_t select_top_k(struct cpu_survivor *s, int32_t n, int32_t k);

/* Keep the survivors with z >= v, v the greatest value for which those weigh at least sample_mass_goal(top_p, sum of mass). */
int32_t select_top_p(struct cpu_survivor *s, int32_t n, float top_p);

/* The n best of v[0, n_values) in order, greatest first, the smaller index first on a tie; -infinity is not taken.
 * Returns how many were found. */
int32_t select_best(const float *v, int32_t n_values, int32_t n, int32_t *ret_index, float *ret_value);

#endif
