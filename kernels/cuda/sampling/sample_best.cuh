/* The n best tokens of a row, from which candidates and log-probabilities are made. */
#ifndef QUIRE_KERNELS_CUDA_SAMPLING_SAMPLE_BEST_CUH
#define QUIRE_KERNELS_CUDA_SAMPLING_SAMPLE_BEST_CUH

#include "kernels/cuda/sampling/sample_row.cuh"

/* Collects the n best of the row by histograms; at the edge the smallest ids win. */
inline __device__ void collect_best(const row_view &r, shared_state *sh, const stats &st, int n,
                                    int n_lists)
{
    /* taken are keys above least_key, and equal ones with ~id of at least least_id */
    uint32_t least_key, least_id = 0;
    selection s = select_key(
        r, sh, sample_order(st.least), (uint32_t)(st.best >> 32),
        [&](int, float v, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
            *key = sample_order(v);
            *weight = 1;
            return v > -INFINITY && *key >= from && *key <= to;
        },
        [&](unsigned long long total) {
            return total < (unsigned long long)n ? total : (unsigned long long)n;
        });

    least_key = s.lo;
    if (s.inside > s.goal) {
        selection tie = select_key(
            r, sh, 0x80000000u, 0xFFFFFFFFu,
            [&](int token, float v, uint32_t from, uint32_t to, uint32_t *key,
                unsigned long long *weight) {
                *key = ~(uint32_t)token;
                *weight = 1;
                return v > -INFINITY && sample_order(v) == s.lo && *key >= from && *key <= to;
            },
            [&](unsigned long long) { return s.goal; });
        least_id = tie.lo;
    }
    collect(r, sh, n_lists, [&](int t, float v, uint32_t *key) {
        *key = sample_order(v);
        return v > -INFINITY &&
               (*key > least_key || (*key == least_key && ~(uint32_t)t >= least_id));
    });
}

/* Lists at least the n best of the row, as (order key of the logit, ~token), in the
 * first block, which sorts them: greatest first, the smallest id first on a tie. Called
 * after row_stats of the same view. False: there are none; else the first block is
 * still sorting when the others return. */
inline __device__ bool list_best(const row_view &r, shared_state *sh, const stats &st, int n,
                                 int *n_lists)
{
    const block_cluster cluster;
    bool some = !st.bad && st.best != 0, fit = false;

    if (some && n <= FEW) {
        float least = peak_threshold(sh, n);
        fit = collect_few(r, sh, ++*n_lists, sh->peak[threadIdx.x] >= least,
                          [&](int, float v, uint32_t *key) {
                              *key = sample_order(v);
                              return v >= least && v > -INFINITY;
                          });
        if (!fit) {
            cluster.sync();
        }
    }
    if (some && !fit) {
        collect_best(r, sh, st, min(n, (int)LIST), ++*n_lists);
    }
    if (some && cluster.rank() == 0) {
        sort_list(sh, sh->n_list[*n_lists & 1]);
    }
    return some;
}

/* Writes the first n entries of the block's list, of which `found` exist, with their
 * logits minus lse. */
inline __device__ void write_list(const shared_state *sh, int found, int n, float lse,
                                  int32_t *ret_token, float *ret_logprob)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        ret_token[i] = i < found ? (int)~(uint32_t)sh->bucket[i] : -1;
        ret_logprob[i] = i < found ? key_float((uint32_t)(sh->bucket[i] >> 32)) - lse : -INFINITY;
    }
}

#endif
