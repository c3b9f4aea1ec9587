/* What both forms of the recurrence have in common (recurrence.cu, decode.cu): a token
 * behind the convolution, its gates, and what it does to a head's matrix. Their bits
 * are the same, since a sequence may be cut into steps anywhere. */
#ifndef QUIRE_KERNELS_CUDA_STATES_TOKEN_CUH
#define QUIRE_KERNELS_CUDA_STATES_TOKEN_CUH

#include "kernels/cuda/states/gated.cuh"
#include "kernels/cuda/states/span.cuh"

/* ---- tokens on their own ---- */

/* The logarithm of a decay in a chunk is not below this: what is left of a state behind
 * it is nothing in float32, and differences of sums keep their bits. */
#define LEAST_LOG_DECAY -60.0f

/* What a token multiplies S and the summand of a head by; chunked: the logarithm of the
 * first. */
template <typename T>
__device__ __forceinline__ float2 factors_of(const recurrence_args &a, int token, int h,
                                             bool chunked)
{
    const T *gate = (const T *)a.gates + token * a.gate_stride;
    float dt = softplus(to_float(gate[a.delta ? a.n_heads + h : h]) + a.dt_bias[h]);

    dt = a.delta ? dt : fminf(fmaxf(dt, a.dt_min), a.dt_max);
    float log_decay = -expf(a.a_log[h]) * dt;
    return {chunked ? fmaxf(log_decay, LEAST_LOG_DECAY) : expf(log_decay),
            a.delta ? 1.0f / (1.0f + expf(-to_float(gate[h]))) : dt};
}

/* What channel c of token t is behind the convolution. K: its size; 0: a.kernel. */
template <typename T, int K>
__device__ __forceinline__ float convolve(const recurrence_args &a, const state_span &p, int t,
                                          int c)
{
    int size = K > 0 ? K : a.kernel;
    float sum = a.conv_bias ? a.conv_bias[c] : 0.0f;

#pragma unroll
    for (int k = 0; k < size; k++) {
        sum += a.conv[(int64_t)c * size + k] * input_of<T>(a, p, t - size + 1 + k, c);
    }
    return silu_of(sum);
}

/* What q is multiplied by besides the inverse of its length. */
__device__ __forceinline__ float query_scale(const recurrence_args &a)
{
    return 1.0f / sqrtf((float)a.key_dim);
}

/* ---- a head's matrix ---- */

/* A block has COLUMNS columns of a head's matrix. Four neighbouring lanes share a
 * column; of each 16 rows a lane has four neighbours. */
enum { COLUMNS = 32, THREADS = COLUMNS * 4, TILE_TOKENS = 8 };

/* The operands of TILE_TOKENS tokens, in shared memory. */
template <int J> struct token_tile {
    float q[TILE_TOKENS][16 * J], k[TILE_TOKENS][16 * J], v[TILE_TOKENS][COLUMNS];
    float factor[TILE_TOKENS][2];
    int block[TILE_TOKENS]; /* for the state behind it, -1: none */
};

/* A block's head and part of its columns, and where its operands begin in a token's
 * channels. */
struct operand_offsets {
    int head, group;
    int q, k, v, columns; /* columns: of the block */
    int at;               /* its first column in the output */
    int64_t matrix;       /* its first element in a state */
};

/* The operands of a block of grid (head and part of its columns, ..). */
template <bool DELTA>
__device__ __forceinline__ operand_offsets offsets_of(const recurrence_args &a)
{
    int parts = (a.value_dim + COLUMNS - 1) / COLUMNS, head = blockIdx.x / parts;
    int column = blockIdx.x % parts * COLUMNS, at = head * a.value_dim + column;
    int group = a.tiled ? head % a.n_groups : head / (a.n_heads / a.n_groups);
    int keys = a.n_groups * a.key_dim, values = a.n_heads * a.value_dim;

    return {head,
            group,
            (DELTA ? 0 : values + keys) + group * a.key_dim,
            (DELTA ? keys : values) + group * a.key_dim,
            (DELTA ? 2 * keys : 0) + at,
            min(COLUMNS, a.value_dim - column),
            at,
            (int64_t)channels_of(a) * (a.kernel - 1) + (int64_t)head * a.key_dim * a.value_dim +
                column};
}

/* One token: S [4 * J] is this lane's part of its column. Returns S^T q. Roundings are
 * spelled out, since decode_heads.cu has the same ones. */
template <int J, bool DELTA>
__device__ __forceinline__ float take_token(float (&state)[J][4], const token_tile<J> &tile, int t,
                                            int sub, float v)
{
    const float4 *q = (const float4 *)tile.q[t], *k = (const float4 *)tile.k[t];
    float decay = tile.factor[t][0], rate = tile.factor[t][1], known[4] = {}, sum[4] = {};

    if (DELTA) {
#pragma unroll
        for (int j = 0; j < J; j++) {
            float4 y = k[j * 4 + sub];
            known[0] = __fmaf_rn(state[j][0], y.x, known[0]);
            known[1] = __fmaf_rn(state[j][1], y.y, known[1]);
            known[2] = __fmaf_rn(state[j][2], y.z, known[2]);
            known[3] = __fmaf_rn(state[j][3], y.w, known[3]);
        }
        v = __fmaf_rn(-decay, sum_of_four((known[0] + known[1]) + (known[2] + known[3])), v);
    }
    float add = rate * v;
#pragma unroll
    for (int j = 0; j < J; j++) {
        float4 y = k[j * 4 + sub], z = q[j * 4 + sub];
        state[j][0] = __fmaf_rn(decay, state[j][0], __fmul_rn(y.x, add));
        state[j][1] = __fmaf_rn(decay, state[j][1], __fmul_rn(y.y, add));
        state[j][2] = __fmaf_rn(decay, state[j][2], __fmul_rn(y.z, add));
        state[j][3] = __fmaf_rn(decay, state[j][3], __fmul_rn(y.w, add));
        sum[0] = __fmaf_rn(state[j][0], z.x, sum[0]);
        sum[1] = __fmaf_rn(state[j][1], z.y, sum[1]);
        sum[2] = __fmaf_rn(state[j][2], z.z, sum[2]);
        sum[3] = __fmaf_rn(state[j][3], z.w, sum[3]);
    }
    return sum_of_four((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* This lane's part of the state at p.from; `at`: of its column. */
template <int J>
__device__ __forceinline__ void load_matrix(const recurrence_args &a, float (&state)[J][4],
                                            const state_span &p, bool live, int sub, int64_t at)
{
#pragma unroll
    for (int i = 0; i < J * 4; i++) {
        int row = (i / 4 * 4 + sub) * 4 + i % 4;
        state[i / 4][i % 4] =
            p.from && live && row < a.key_dim ? p.from[at + (int64_t)row * a.value_dim] : 0.0f;
    }
}

/* This lane's part of a state, whose elements begin at `to`. */
template <int J>
__device__ __forceinline__ void keep_matrix(const recurrence_args &a, const float (&state)[J][4],
                                            int sub, float *to)
{
#pragma unroll
    for (int i = 0; i < J * 4; i++) {
        int row = (i / 4 * 4 + sub) * 4 + i % 4;
        if (row < a.key_dim) {
            to[(int64_t)row * a.value_dim] = state[i / 4][i % 4];
        }
    }
}

/* Zeros for the keys behind key_dim. */
template <int J>
__device__ __forceinline__ void clear_tile(const recurrence_args &a, token_tile<J> &tile)
{
    for (int i = threadIdx.x; a.key_dim < 16 * J && i < TILE_TOKENS * 16 * J; i += THREADS) {
        if (i % (16 * J) >= a.key_dim) {
            tile.q[i / (16 * J)][i % (16 * J)] = 0.0f;
            tile.k[i / (16 * J)][i % (16 * J)] = 0.0f;
        }
    }
}

/* The rows of a sequence whose states are kept nowhere. */
template <typename T>
__device__ __forceinline__ void write_zeros(const recurrence_args &a, const state_span &p, T *out)
{
    for (int t = 0; t < p.n; t++) {
        out[(p.start + t) * a.out_stride] = from_float<T>(0.0f);
    }
}

#endif
