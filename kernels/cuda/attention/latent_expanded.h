/* Prefill over heads expanded from latents (latent_expanded.cu): its kernels and what
 * they read. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_LATENT_EXPANDED_H
#define QUIRE_KERNELS_CUDA_ATTENTION_LATENT_EXPANDED_H

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A sequence whose heads are expanded: the latents of its n_keys tokens, found by row
 * `row` of the block table, are rows from `first` on, a multiple of EXPANDED_ALIGN. */
struct expanded_seq {
    int32_t row, first, n_keys;
};
enum { EXPANDED_ALIGN = 128 };

/* out [n_rows] = the latents and rotated keys of n_seqs sequences; rows behind one's
 * last token are zeros. */
void launch_latent_gather(void *out, const struct kv_view *kv, int32_t layer,
                          const struct step_arrays *s, const struct expanded_seq *seq,
                          int32_t n_seqs, int32_t n_rows, cudaStream_t stream);
/* Some heads of all rows of a portion of sequences. */
struct expanded_args {
    void *out;                    /* [rows of the step], a head every v_dim elements */
    const void *q;                /* likewise, a head every nope_dim + rot_dim */
    int64_t out_stride, q_stride; /* of a row, in elements */
    const void *k, *v;            /* [n_keys, n_heads * nope_dim], [n_keys, n_heads * v_dim] */
    const void *latents;          /* [n_keys, latent + rot_dim] */
    int32_t n_keys, n_heads;      /* rows, a multiple of EXPANDED_ALIGN; heads */
    int32_t latent, rot_dim, nope_dim, v_dim;
    float scale;
    int32_t type; /* enum dtype of all operands */
};
/* Whether there is a kernel; k, v and latents do not count. */
bool latent_expanded_takes(const struct expanded_args *a);
/* The rows of the tiles, whose `row` is their sequence's first row of k and v. False:
 * nothing was done. */
bool launch_latent_expanded(const struct expanded_args *a, const struct query_tile *tile,
                            int32_t n_tiles, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
