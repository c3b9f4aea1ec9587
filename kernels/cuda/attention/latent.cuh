/* Shared by the kernels of attention over latents. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_LATENT_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_LATENT_CUH

#include "kernels/cuda/attention/attn_common.cuh"

/* Of the sequences [first_seq, first_seq + n_seqs) the last that starts at or before
 * the token. */
__device__ __forceinline__ int latent_sequence(const step_arrays &s, int token, int first_seq,
                                               int n_seqs)
{
    int lo = first_seq, hi = first_seq + n_seqs - 1;

    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (s.q_start[mid] <= token) {
            lo = mid;
        } else {
            hi = mid - 1;
        }
    }
    return lo;
}

#endif
