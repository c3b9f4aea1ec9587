/* Chunks of tokens on tensor cores: which tokens they are, and loading their operands
 * (chunk_scores.cu, chunk_states.cu).
 *
 * Chunks end at whole numbers of STATE_CHUNK tokens of a state's block and at its end,
 * so that the state behind a block's last token is there to be kept. The chunk that a
 * token is in thus follows from its position, but where a step ends inside one the bits
 * behind it are others; `deterministic` takes token after token. */
#ifndef QUIRE_KERNELS_CUDA_STATES_CHUNKS_CUH
#define QUIRE_KERNELS_CUDA_STATES_CHUNKS_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/gemm/async_copy.cuh"
#include "kernels/cuda/states/span.cuh"
#include "kernels/cuda/states/tf32.cuh"

/* Rows of tiles are four floats longer than what they hold: neither ldmatrix nor the
 * loads of a transposed operand then meet a bank conflict. */
enum { C = STATE_CHUNK, KEYS = STATE_CHUNK_KEYS, KEY_ROW = KEYS + 4, CHUNK_ROW = C + 4 };
static_assert(C == 32, "a lane has a token of a chunk");

/* ---- which tokens ---- */

/* Chunks of a block of states. */
__device__ __forceinline__ int chunks_a_block(const step_arrays &s)
{
    return (s.block_size + C - 1) / C;
}

__device__ __forceinline__ int chunk_of(const step_arrays &s, int position)
{
    return position / s.block_size * chunks_a_block(s) + position % s.block_size / C;
}

/* First position of a chunk. */
__device__ __forceinline__ int chunk_begin(const step_arrays &s, int chunk)
{
    int each = chunks_a_block(s);

    return chunk / each * s.block_size + chunk % each * C;
}

/* Tokens of the step. */
struct token_range {
    int seq, start, n; /* n 0: none */
};

/* Chunk i of a sequence, counted from that of its first token in the step. */
__device__ __forceinline__ token_range chunk_at(const step_arrays &s, int seq, int i)
{
    int start = s.q_start[seq], n = s.q_start[seq + 1] - start, first = s.kv_len[seq] - n;
    int chunk = chunk_of(s, first) + i;
    int begin = max(chunk_begin(s, chunk), first), end = min(chunk_begin(s, chunk + 1), first + n);

    return {seq, start + begin - first, max(end - begin, 0)};
}

/* Chunks of a sequence of the step; 0: it is not taken in chunks. */
__device__ __forceinline__ int n_chunks_of(const recurrence_args &a, const step_arrays &s, int seq,
                                           int n_seqs)
{
    if (seq >= n_seqs || !in_chunks(a, s, seq)) {
        return 0;
    }
    int end = s.kv_len[seq], first = end - (s.q_start[seq + 1] - s.q_start[seq]);
    return chunk_of(s, end - 1) - chunk_of(s, first) + 1;
}

/* By a whole warp: the sequence that has number `at` of what `count` counts of each
 * sequence, and its number there; -1: there are fewer. */
template <typename F>
__device__ __forceinline__ int2 find_sequence(int at, int n_seqs, const F &count)
{
    int lane = threadIdx.x & 31;

    for (int first = 0; first < n_seqs; first += 32) {
        int mine = count(first + lane), end = mine;
        for (int i = 1; i < 32; i *= 2) {
            int below = __shfl_up_sync(0xffffffffu, end, i);
            end += lane >= i ? below : 0;
        }
        unsigned has = __ballot_sync(0xffffffffu, at < end);
        if (has) {
            int source = __ffs(has) - 1;
            return make_int2(first + source, at - __shfl_sync(0xffffffffu, end - mine, source));
        }
        at -= __shfl_sync(0xffffffffu, end, 31);
    }
    return make_int2(-1, 0);
}

/* Where P, of `which` 0, or T B of a head lie behind a token: [C] each, their columns
 * as by tf32_place. */
__device__ __forceinline__ float *chunk_row(const recurrence_args &a, int token, int head,
                                            int which)
{
    return a.chunks + (((int64_t)token * a.n_heads + head) * (a.delta ? 2 : 1) + which) * C;
}

/* Channels of group 0's q or k in a token's row. */
__device__ __forceinline__ int first_key(const recurrence_args &a, bool is_k)
{
    int keys = a.n_groups * a.key_dim, values = a.n_heads * a.value_dim;

    return a.delta ? (is_k ? keys : 0) : (is_k ? values : values + keys);
}

/* async_copy of 8 bytes. */
__device__ __forceinline__ void async_copy_pair(float2 *to, const float2 *from)
{
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
}

/* Starts loading a tile [C, KEYS] of q or k; tokens from n on are zeros. */
__device__ __forceinline__ void fetch_keys(float (*to)[KEY_ROW], const recurrence_args &a,
                                           int channel, int start, int n)
{
    int channels = channels_of(a);

    for (int i = threadIdx.x; i < C * KEYS / 4; i += blockDim.x) {
        int t = i / (KEYS / 4), at = i % (KEYS / 4) * 4;
        int64_t row = start + min(t, n - 1);
        async_copy_or_zeros((uint32_t)__cvta_generic_to_shared(&to[t][at]),
                            a.prepared + row * channels + channel + at, t < n);
    }
}

/* Address of the element of a tile's row that a lane gives ldmatrix: of 8 rows 16
 * columns, or (LEFT) of 16 rows 8. */
template <int ROW, bool LEFT>
__device__ __forceinline__ uint32_t tile_address(const float (*tile)[ROW], int row, int column)
{
    int lane = threadIdx.x & 31;
    int r = lane & (LEFT ? 15 : 7), c = LEFT ? lane >> 4 : lane >> 3;

    return (uint32_t)__cvta_generic_to_shared(&tile[row + r][column + c * 4]);
}

#endif
