/* The recurrence of layers with states (states.h), for the shapes of struct recurrence
 * in backend.h.
 *
 * Blocks of the second kernel read a state before they wait for the first one. They
 * may: memory operations of a step and the steps before it are complete when a kernel
 * behind the embedding starts (common.cuh), and of this step's kernels only that one
 * writes the layer's states, each block its own part. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/states/states.h"

/* A sequence of the step and where its states lie. */
struct state_span {
    int start, n;      /* its tokens in the step */
    const float *from; /* the layer's state before them; NULL: all 0 */
    float *to;         /* and behind them; NULL: the sequence has no cache */
};

__device__ __forceinline__ state_span span_of(const recurrence_args &a, const step_arrays &s,
                                              int seq)
{
    int start = s.q_start[seq], end = s.q_start[seq + 1], first = s.kv_len[seq] - (end - start);
    const int32_t *table = s.table + (int64_t)s.row[seq] * s.table_width;
    /* two loads that do not wait for each other */
    int last = end > start ? s.slot[end - 1] : -1;
    int before = first > 0 ? table[(first - 1) / s.block_size] : -1;
    state_span p = {start, end - start, nullptr, nullptr};

    if (last >= 0) {
        p.to = a.states + last / s.block_size * a.block_stride;
        p.from = before >= 0 ? a.states + before * a.block_stride : nullptr;
    }
    return p;
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

/* ---- tokens on their own ---- */

/* Tokens of a block: few where there are few, so that all are taken at once. */
enum { PREPARE_WARPS = 4, PREPARE_TOKENS = 4, PREPARE_ONE = 512 };

__device__ __forceinline__ float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/* The sequence of a token of the step. */
__device__ __forceinline__ int sequence_of(const step_arrays &s, int token, int n_seqs)
{
    int lo = 0, hi = n_seqs - 1;

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

template <typename T>
__device__ __forceinline__ void prepare_gates(const recurrence_args &a, int token, int lane)
{
    const T *gate = (const T *)a.gates + token * a.gate_stride;

    for (int h = lane; h < a.n_heads; h += 32) {
        float dt = softplus(to_float(gate[a.delta ? a.n_heads + h : h]) + a.dt_bias[h]);
        dt = a.delta ? dt : fminf(fmaxf(dt, a.dt_min), a.dt_max);
        float2 f = {expf(-expf(a.a_log[h]) * dt),
                    a.delta ? 1.0f / (1.0f + expf(-to_float(gate[h]))) : dt};
        *(float2 *)(a.factors + ((int64_t)token * a.n_heads + h) * 2) = f;
    }
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
    return sum / (1.0f + expf(-sum));
}

/* n channels from `first` on, which are one head's q, k or v: norm_scale is what q or k
 * are multiplied by besides the inverse of their length, 0: v, or nothing to norm. A
 * lane keeps N channels in registers at a time. */
template <typename T>
__device__ __forceinline__ void prepare_vector(const recurrence_args &a, const state_span &p,
                                               int token, int first, int n, float norm_scale,
                                               int lane)
{
    enum { N = STATE_KEY_DIM / 32 };
    float *to = a.prepared + (int64_t)token * channels_of(a) + first, squares = 0.0f, x[N];

    for (int from = 0; from < n; from += 32 * N) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = from + j * 32 + lane;
            x[j] = i >= n          ? 0.0f
                   : a.kernel == 4 ? convolve<T, 4>(a, p, token, first + i)
                                   : convolve<T, 0>(a, p, token, first + i);
            squares += x[j] * x[j];
        }
        float scale = norm_scale == 0.0f ? 1.0f : norm_scale / sqrtf(warp_sum(squares) + 1e-6f);
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = from + j * 32 + lane;
            if (i < n) {
                to[i] = x[j] * scale;
            }
        }
    }
}

/* Grid (units in fours, tokens in `each`): a unit is a q, a k, a v, or all
 * gates of a token; a warp takes it. */
template <typename T>
__global__ void __launch_bounds__(PREPARE_WARPS * 32)
    prepare_kernel(recurrence_args a, step_arrays s, int32_t n_seqs, int32_t rows, int32_t each)
{
    pdl_release();
    pdl_wait();
    int lane = threadIdx.x & 31, unit = blockIdx.x * PREPARE_WARPS + (threadIdx.x >> 5);
    int vectors = 2 * a.n_groups + a.n_heads, keys = a.n_groups * a.key_dim;
    if (unit > vectors) {
        return;
    }
    int n = unit < 2 * a.n_groups ? a.key_dim : a.value_dim;
    bool is_q = unit < a.n_groups, is_k = !is_q && unit < 2 * a.n_groups;
    int values = a.n_heads * a.value_dim, index = is_q   ? unit
                                                  : is_k ? unit - a.n_groups
                                                         : unit - 2 * a.n_groups;
    int base = is_q   ? (a.delta ? 0 : values + keys)
               : is_k ? (a.delta ? keys : values)
                      : (a.delta ? 2 * keys : 0);
    float scale = !a.delta ? 0.0f : is_q ? 1.0f / sqrtf((float)a.key_dim) : is_k ? 1.0f : 0.0f;
    int end = min(rows, (int)(blockIdx.y + 1) * each);
    for (int token = blockIdx.y * each; token < end; token++) {
        if (unit == vectors) {
            prepare_gates<T>(a, token, lane);
            continue;
        }
        state_span p = span_of(a, s, n_seqs == rows ? token : sequence_of(s, token, n_seqs));
        if (p.to) {
            prepare_vector<T>(a, p, token, base + index * n, n, scale, lane);
        }
    }
}

/* ---- one token after the other ---- */

/* A block has COLUMNS columns of a head's matrix, a warp eight of them. A lane has
 * four neighbouring columns of every sixteenth group of four rows, so that an operand
 * that it reads from shared memory serves four columns. */
enum { COLUMNS = 32, THREADS = COLUMNS * 4, TILE_TOKENS = 8, ROW_LANES = 16 };

/* The operands of TILE_TOKENS tokens, in shared memory. */
template <int R> struct token_tile {
    float q[TILE_TOKENS][ROW_LANES * R], k[TILE_TOKENS][ROW_LANES * R], v[TILE_TOKENS][COLUMNS];
    float factor[TILE_TOKENS][2];
};

__device__ __forceinline__ void fetch4(float *to, const float *from)
{
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
}

__device__ __forceinline__ void fetch16(float *to, const float *from)
{
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
}

/* n floats, by all threads; WIDE: both sides are aligned to 16 bytes. */
template <bool WIDE> __device__ __forceinline__ void fetch_row(float *to, const float *from, int n)
{
    if (WIDE) {
        for (int i = threadIdx.x * 4; i < n; i += THREADS * 4) {
            fetch16(to + i, from + i);
        }
    } else {
        for (int i = threadIdx.x; i < n; i += THREADS) {
            fetch4(to + i, from + i);
        }
    }
}

/* Where a block's operands begin in a token's channels. */
struct operand_offsets {
    int q, k, v, columns; /* columns: of the block */
};

/* Starts loading the tokens [first, first + n). */
template <int R>
__device__ __forceinline__ void fetch_tile(token_tile<R> &to, const recurrence_args &a,
                                           const operand_offsets &o, int head, int first, int n)
{
    int channels = channels_of(a);
    bool wide = ((a.key_dim | a.value_dim) & 3) == 0;

    for (int t = 0; t < n; t++) {
        const float *from = a.prepared + (int64_t)(first + t) * channels;
        if (wide) {
            fetch_row<true>(to.q[t], from + o.q, a.key_dim);
            fetch_row<true>(to.k[t], from + o.k, a.key_dim);
            fetch_row<true>(to.v[t], from + o.v, o.columns);
        } else {
            fetch_row<false>(to.q[t], from + o.q, a.key_dim);
            fetch_row<false>(to.k[t], from + o.k, a.key_dim);
            fetch_row<false>(to.v[t], from + o.v, o.columns);
        }
        fetch_row<false>(to.factor[t], a.factors + ((int64_t)(first + t) * a.n_heads + head) * 2,
                         2);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Of four columns' parts in ROW_LANES lanes the sum of the lane's own column. */
__device__ __forceinline__ float reduce_columns(const float (&x)[4], int lane)
{
    bool high = lane & 8, odd = lane & 4;
    float a = (high ? x[2] : x[0]) + __shfl_xor_sync(0xffffffffu, high ? x[0] : x[2], 8);
    float b = (high ? x[3] : x[1]) + __shfl_xor_sync(0xffffffffu, high ? x[1] : x[3], 8);
    float sum = (odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 4);

    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}

/* The reverse: what the lanes have of their own columns, for all four. */
__device__ __forceinline__ void gather_columns(float (&x)[4], float own, int lane)
{
    bool high = lane & 8, odd = lane & 4;
    float other = __shfl_xor_sync(0xffffffffu, own, 4), a = odd ? other : own,
          b = odd ? own : other;
    float far_a = __shfl_xor_sync(0xffffffffu, a, 8), far_b = __shfl_xor_sync(0xffffffffu, b, 8);

    x[0] = high ? far_a : a;
    x[1] = high ? far_b : b;
    x[2] = high ? a : far_a;
    x[3] = high ? b : far_b;
}

/* Four neighbouring rows of an operand, the i-th of the lane's. */
__device__ __forceinline__ void load_rows(float (&x)[4], const float *operand, int i, int lane)
{
    float4 y = ((const float4 *)operand)[i * ROW_LANES + (lane & (ROW_LANES - 1))];

    x[0] = y.x;
    x[1] = y.y;
    x[2] = y.z;
    x[3] = y.w;
}

/* One token: state [rows][columns] is the lane's part of the matrix, v that of its own
 * column. Returns S^T q of that column. */
template <int R, bool DELTA>
__device__ __forceinline__ float take_token(float (&state)[R][4], const token_tile<R> &tile, int t,
                                            int lane, float v)
{
    float decay = tile.factor[t][0], rate = tile.factor[t][1], add[4], sum[4] = {}, k[4], q[4];

    if (DELTA) {
        float known[4] = {};
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (r % 4 == 0) {
                load_rows(k, tile.k[t], r / 4, lane);
            }
#pragma unroll
            for (int c = 0; c < 4; c++) {
                known[c] += state[r][c] * k[r % 4];
            }
        }
        v -= decay * reduce_columns(known, lane);
    }
    gather_columns(add, rate * v, lane);
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (r % 4 == 0) {
            load_rows(k, tile.k[t], r / 4, lane);
            load_rows(q, tile.q[t], r / 4, lane);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            state[r][c] = decay * state[r][c] + k[r % 4] * add[c];
            sum[c] += state[r][c] * q[r % 4];
        }
    }
    return reduce_columns(sum, lane);
}

/* A lane's part of a matrix in memory: `at` is its first column in row 0, n its
 * columns, at most 4. */
struct matrix_part {
    int64_t at;
    int n;
};

template <int R> __device__ __forceinline__ int row_of(int r, int lane)
{
    return (r / 4 * ROW_LANES + (lane & (ROW_LANES - 1))) * 4 + r % 4;
}

template <int R>
__device__ __forceinline__ void load_state(float (&state)[R][4], const recurrence_args &a,
                                           const float *from, matrix_part m, int lane)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        int row = row_of<R>(r, lane);
        const float *x = from + m.at + (int64_t)row * a.value_dim;
        bool here = from && row < a.key_dim;
        if (a.wide && m.n == 4) {
            float4 y = here ? *(const float4 *)x : float4{};
            state[r][0] = y.x;
            state[r][1] = y.y;
            state[r][2] = y.z;
            state[r][3] = y.w;
            continue;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            state[r][c] = here && c < m.n ? x[c] : 0.0f;
        }
    }
}

template <int R>
__device__ __forceinline__ void store_state(float *to, const float (&state)[R][4],
                                            const recurrence_args &a, matrix_part m, int lane)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        int row = row_of<R>(r, lane);
        float *x = to + m.at + (int64_t)row * a.value_dim;
        if (row >= a.key_dim) {
            continue;
        }
        if (a.wide && m.n == 4) {
            *(float4 *)x = float4{state[r][0], state[r][1], state[r][2], state[r][3]};
            continue;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (c < m.n) {
                x[c] = state[r][c];
            }
        }
    }
}

/* The convolution's last inputs: each block of a sequence writes those of some
 * channels. */
template <typename T>
__device__ __forceinline__ void keep_inputs(const recurrence_args &a, const state_span &p)
{
    int channels = channels_of(a), before = a.kernel - 1;
    int first = (int)((int64_t)channels * blockIdx.x / gridDim.x);
    int end = (int)((int64_t)channels * (blockIdx.x + 1) / gridDim.x);

    for (int c = first + threadIdx.x; c < end; c += THREADS) {
        for (int i = 0; i < before; i++) { /* in place: nothing is read behind its writing */
            p.to[(int64_t)c * before + i] = input_of<T>(a, p, p.start + p.n - before + i, c);
        }
    }
}

/* The rows behind key_dim of all operands, which no copy fills. */
template <int R> __device__ __forceinline__ void clear_rows(token_tile<R> (&tile)[2], int key_dim)
{
    enum { ROWS = ROW_LANES * R };

    for (int i = threadIdx.x; i < 2 * TILE_TOKENS * ROWS && key_dim < ROWS; i += THREADS) {
        int t = i / ROWS % TILE_TOKENS, row = i % ROWS;
        if (row >= key_dim) {
            tile[i / ROWS / TILE_TOKENS].q[t][row] = 0.0f;
            tile[i / ROWS / TILE_TOKENS].k[t][row] = 0.0f;
        }
    }
}

/* Grid (head and part of its columns, sequence); the last sequences, which may have
 * many tokens, start first. Keys fill 16 * R rows, those behind key_dim with zeros. */
template <typename T, int R, bool DELTA>
__global__ void __launch_bounds__(THREADS, R <= 4   ? 8
                                           : R <= 8 ? 6
                                                    : 3)
    recurrence_kernel(recurrence_args a, step_arrays s)
{
    __shared__ alignas(16) token_tile<R> tile[2];

    pdl_release();
    int parts = (a.value_dim + COLUMNS - 1) / COLUMNS, head = blockIdx.x / parts;
    int lane = threadIdx.x & 31, column = blockIdx.x % parts * COLUMNS;
    /* in the block: the first of the lane's columns, and its own */
    int four = (threadIdx.x >> 5) * 8 + (lane >> 4) * 4,
        own = four + ((lane & 8) ? 2 : 0) + ((lane & 4) ? 1 : 0);
    int group = head / (a.n_heads / a.n_groups), keys = a.n_groups * a.key_dim;
    int values = a.n_heads * a.value_dim, at = head * a.value_dim + column;
    operand_offsets o = {(DELTA ? 0 : values + keys) + group * a.key_dim,
                         (DELTA ? keys : values) + group * a.key_dim, (DELTA ? 2 * keys : 0) + at,
                         min(COLUMNS, a.value_dim - column)};
    matrix_part m = {(int64_t)channels_of(a) * (a.kernel - 1) +
                         (int64_t)head * a.key_dim * a.value_dim + column + four,
                     max(min(o.columns - four, 4), 0)};
    state_span p = span_of(a, s, gridDim.y - 1 - blockIdx.y);
    float state[R][4];
    load_state<R>(state, a, p.to ? p.from : nullptr, m, lane);
    clear_rows<R>(tile, a.key_dim);
    pdl_wait();
    T *out = (T *)a.out + at + own;
    bool writes = own < o.columns && (lane & 3) == 0;
    if (!p.to) {
        for (int t = 0; t < p.n && writes; t++) {
            out[(p.start + t) * a.out_stride] = from_float<T>(0.0f);
        }
        return;
    }
    float skip = a.d ? a.d[head] : 0.0f;
    fetch_tile(tile[0], a, o, head, p.start, min(p.n, TILE_TOKENS));
    keep_inputs<T>(a, p);
    for (int first = 0, half = 0; first < p.n; first += TILE_TOKENS, half ^= 1) {
        int n = min(p.n - first, TILE_TOKENS), next = first + TILE_TOKENS;
        fetch_tile(tile[half ^ 1], a, o, head, p.start + next, min(p.n - next, TILE_TOKENS));
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        for (int t = 0; t < n; t++) {
            float v = tile[half].v[t][own];
            float sum = take_token<R, DELTA>(state, tile[half], t, lane, v);
            if (writes) {
                out[(p.start + first + t) * a.out_stride] = from_float<T>(sum + skip * v);
            }
        }
        __syncthreads();
    }
    store_state<R>(p.to, state, a, m, lane);
}

/* ---- launchers ---- */

template <typename T, int R>
static void launch_tokens(const recurrence_args &a, const step_arrays &s, int n_seqs,
                          cudaStream_t stream)
{
    int parts = (a.value_dim + COLUMNS - 1) / COLUMNS;
    dim3 grid(a.n_heads * parts, n_seqs);

    if (a.delta) {
        launch(recurrence_kernel<T, R, true>, grid, dim3(THREADS), 0, stream, a, s);
    } else {
        launch(recurrence_kernel<T, R, false>, grid, dim3(THREADS), 0, stream, a, s);
    }
}

template <typename T>
static void launch_all(const recurrence_args &a, const step_arrays &s, int n_seqs, int rows,
                       cudaStream_t stream)
{
    int units = 2 * a.n_groups + a.n_heads + 1, each = rows > PREPARE_ONE ? PREPARE_TOKENS : 1;

    launch(prepare_kernel<T>,
           dim3((units + PREPARE_WARPS - 1) / PREPARE_WARPS, (rows + each - 1) / each),
           dim3(PREPARE_WARPS * 32), 0, stream, a, s, n_seqs, rows, each);
    if (a.key_dim <= 64) {
        launch_tokens<T, 4>(a, s, n_seqs, stream);
    } else if (a.key_dim <= 128) {
        launch_tokens<T, 8>(a, s, n_seqs, stream);
    } else {
        launch_tokens<T, 16>(a, s, n_seqs, stream);
    }
}

extern "C" void launch_recurrence(const struct recurrence_args *a, const struct step_arrays *s,
                                  int32_t n_seqs, int32_t rows, cudaStream_t stream)
{
    DISPATCH_TYPE(a->type, launch_all<T>(*a, *s, n_seqs, rows, stream));
}
