/* The sequences of a step as recurrences see them: which tokens follow from one
 * another, and in which blocks their states lie.
 *
 * Drafts of a sequence that are verified are sequences of one token each
 * (heuristics_verify.h). Their states follow from one another, so the blocks of the
 * first one take the tokens of all. */
#ifndef QUIRE_KERNELS_CUDA_STATES_SPAN_CUH
#define QUIRE_KERNELS_CUDA_STATES_SPAN_CUH

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/states/states.h"

/* A sequence of the step and where its states lie. */
struct state_span {
    int start, n;      /* its tokens in the step */
    const float *from; /* the layer's state before them; NULL: all 0 */
    bool cached;       /* else its states are kept nowhere */
};

/* Whether a sequence of one token goes on where the one before it ends. */
__device__ __forceinline__ bool goes_on(const step_arrays &s, int seq)
{
    return seq > 0 && s.row[seq] == s.row[seq - 1] && s.kv_len[seq] == s.kv_len[seq - 1] + 1;
}

/* The tokens of a sequence that goes on from no other one, with those of the ones
 * behind it that do; n_seqs: of the step. */
__device__ __forceinline__ state_span span_of(const recurrence_args &a, const step_arrays &s,
                                              int seq, int n_seqs)
{
    int start = s.q_start[seq], end = s.q_start[seq + 1], first = s.kv_len[seq] - (end - start);
    const int32_t *table = s.table + (int64_t)s.row[seq] * s.table_width;
    /* two loads that do not wait for each other */
    int slot = end > start ? s.slot[end - 1] : -1;
    int before = first > 0 ? table[(first - 1) / s.block_size] : -1;
    state_span p = {start, end - start, nullptr, slot >= 0};

    if (p.cached && before >= 0) {
        p.from = a.states + before * a.block_stride;
    }
    while (seq + 1 < n_seqs && goes_on(s, seq + 1)) {
        p.n = s.q_start[++seq + 1] - start;
    }
    return p;
}

/* The block for the state behind a token before `end`; -1: it is not kept, since the
 * next token has the same block. */
__device__ __forceinline__ int block_behind(const step_arrays &s, int token, int end)
{
    int block = s.slot[token] / s.block_size;

    return token + 1 < end && s.slot[token + 1] / s.block_size == block ? -1 : block;
}

/* Whether a sequence that goes on from no other one is taken in chunks
 * (chunk_states.cu): its own number of tokens alone decides, so company does not change
 * its bits. */
__device__ __forceinline__ bool in_chunks(const recurrence_args &a, const step_arrays &s, int seq)
{
    return a.chunks && s.q_start[seq + 1] - s.q_start[seq] >= STATE_CHUNK_LEAST;
}

__device__ __forceinline__ int channels_of(const recurrence_args &a)
{
    return 2 * a.n_groups * a.key_dim + a.n_heads * a.value_dim;
}

/* Input of channel c of token `at`, which may lie before the step. */
template <typename T>
__device__ __forceinline__ float input_of(const recurrence_args &a, const state_span &p, int at,
                                          int c)
{
    if (at >= p.start) {
        return to_float(((const T *)a.x)[at * a.x_stride + c]);
    }
    return p.from ? p.from[(int64_t)c * (a.kernel - 1) + at - p.start + a.kernel - 1] : 0.0f;
}

/* The convolution's last inputs behind a token: each block of a sequence writes those
 * of some channels. */
template <typename T>
__device__ __forceinline__ void keep_inputs(const recurrence_args &a, const state_span &p,
                                            int token, float *to)
{
    int channels = channels_of(a), before = a.kernel - 1;
    int first = (int)((int64_t)channels * blockIdx.x / gridDim.x);
    int end = (int)((int64_t)channels * (blockIdx.x + 1) / gridDim.x);

    for (int c = first + threadIdx.x; c < end; c += blockDim.x) {
        for (int i = 0; i < before; i++) { /* in place: nothing is read behind its writing */
            to[(int64_t)c * before + i] = input_of<T>(a, p, token + 1 - before + i, c);
        }
    }
}

__device__ __forceinline__ float sum_of_four(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

#endif
