/* Products of many rows on Hopper, with what follows them in the same launch. */
#ifndef QUIRE_KERNELS_CUDA_GEMM_TILES_H
#define QUIRE_KERNELS_CUDA_GEMM_TILES_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out [rows, n] = x w^T, x [rows, k], w [n, k]; gated: out [rows, n / 2] = act(gate) *
 * up, of the lower and the upper half of w. */
struct tiles_args {
    void *out;
    const void *x, *w;
    int64_t out_stride, x_stride, w_stride; /* elements */
    int32_t rows, n, k;
    int32_t gated, act; /* enum activation: A_NONE without a gate */
    int32_t type;       /* enum dtype of all of them */
    int32_t group;      /* pairs of row tiles that are walked together; 0: chosen */
};

/* Whether launch_tiles takes such a product here: bf16 or f16 in rows of multiples of
 * 16 bytes, the gate's activation SiLU or GELU by tanh; only code for sm_90a has it. */
bool tiles_fit(const struct tiles_args *a);
/* Enqueues the product. False: it does not fit; nothing was done. */
bool launch_tiles(const struct tiles_args *a, int32_t n_blocks, cudaStream_t stream);

/* The same of e4m3 codes, each row with a scale: out [rows, n] bf16 = x_scale * w_scale
 * * (x w^T), or that added to out, rounded before. */
struct codes_tiles_args {
    void *out;
    const void *x, *w;              /* [rows, k], [n, k] */
    const float *x_scale, *w_scale; /* [rows], [n] */
    int64_t out_stride;             /* elements */
    int64_t x_stride, w_stride;     /* bytes */
    int32_t rows, n, k;
    int32_t gated, act; /* as in tiles_args */
    int32_t add;        /* out += ..., not of a gated product */
};

/* Whether launch_codes_tiles takes such a product here: n a multiple of 128, the rest
 * as of tiles_fit. */
bool codes_tiles_fit(const struct codes_tiles_args *a);
/* Enqueues the product. False: it does not fit; nothing was done. */
bool launch_codes_tiles(const struct codes_tiles_args *a, int32_t n_blocks, cudaStream_t stream);
/* Whether the device runs code with wgmma and tensor maps. */
bool tiles_available(void);

#ifdef __cplusplus
}
#endif

#endif
