/* Activations of one value that several operations have. */
#ifndef QUIRE_KERNELS_CPU_ACTIVATIONS_H
#define QUIRE_KERNELS_CPU_ACTIVATIONS_H

#include <math.h>

static inline float silu(float x)
{
    return x / (1 + expf(-x));
}

static inline float softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

#endif
