/* Recurrences whose channels know nothing of each other: short convolutions, and
 * selective scans in two calls (struct recurrence of backend.h).
 *
 * Both keep what a channel needs of its past where only its own block reads and writes
 * it, and take a sequence's tokens in order, so that the bits of a row do not depend on
 * how a sequence is cut into steps or on what else is in them. States are read before
 * the wait, as in recurrence.cu. */
#include "kernels/cuda/states/span.cuh"

/* ---- convolution ---- */

/* A block has CONV_WARPS warps, a lane of which takes a channel. In a step of single
 * tokens each warp has channels of its own; else all have the same ones, and each takes
 * CONV_TOKENS tokens of a chunk. */
enum { CONV_WARPS = 8, CONV_TOKENS = 8, CONV_BEFORE = STATE_CONV_KERNEL - 1 };

/* The inputs of a chunk of tokens, behind those that come before it. */
template <int WARPS> struct conv_tile {
    float x[CONV_BEFORE + WARPS * CONV_TOKENS][32];
    int block[WARPS * CONV_TOKENS]; /* for the state behind a token; -1: none */
};

template <int WARPS> __device__ __forceinline__ void conv_sync(void)
{
    if (WARPS == 1) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

/* A lane's inputs of the tokens [first, first + CONV_TOKENS) of n. */
template <typename T>
__device__ __forceinline__ void conv_fetch(T (&to)[CONV_TOKENS], const recurrence_args &a,
                                           const state_span &p, int first, int c, bool live)
{
    const T *from = (const T *)a.x + (int64_t)(p.start + first) * a.x_stride + c;

#pragma unroll
    for (int j = 0; j < CONV_TOKENS; j++) {
        to[j] = live && first + j < p.n ? from[j * a.x_stride] : from_float<T>(0.0f);
    }
}

/* What channel c is behind the convolution, whose oldest input is x[0]. K: its size; 0:
 * a.kernel. */
template <int K>
__device__ __forceinline__ float conv_sum(const recurrence_args &a, const float (*x)[32], int c,
                                          int lane)
{
    int size = K > 0 ? K : a.kernel;
    float sum = a.conv_bias ? a.conv_bias[c] : 0.0f;

#pragma unroll
    for (int k = 0; k < size; k++) {
        sum += a.conv[(int64_t)c * size + k] * x[k][lane];
    }
    return a.kind == STATES_SCAN ? sum / (1.0f + expf(-sum)) : sum;
}

/* Results and states of the tokens [first, first + CONV_TOKENS) of a sequence, which
 * are those from `at` on in the tile. */
template <typename T, int K, int WARPS>
__device__ __forceinline__ void conv_tokens(const recurrence_args &a, const state_span &p,
                                            const conv_tile<WARPS> &tile, int first, int at, int c,
                                            int lane)
{
    T *out = (T *)a.out + (int64_t)(p.start + first) * a.out_stride + c;
    int before = a.kernel - 1;

    for (int j = 0; j < CONV_TOKENS && first + j < p.n; j++) {
        out[j * a.out_stride] = from_float<T>(conv_sum<K>(a, tile.x + at + j, c, lane));
        if (tile.block[at + j] >= 0) {
            float *to = a.states + tile.block[at + j] * a.block_stride + (int64_t)c * before;
            for (int i = 0; i < before; i++) {
                to[i] = tile.x[at + j + 1 + i][lane];
            }
        }
    }
}

/* Grid (channels, sequence). WARPS warps have the same 32 channels. out may be x: what
 * is behind a chunk is on its way before that is written, what lies before it is in the
 * tile. */
template <typename T, int K, int WARPS>
__global__ void __launch_bounds__(CONV_WARPS * 32) conv_kernel(recurrence_args a, step_arrays s)
{
    constexpr int CHUNK = WARPS * CONV_TOKENS;
    __shared__ conv_tile<WARPS> tiles[CONV_WARPS / WARPS];

    pdl_release();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, mine = warp % WARPS;
    int c = (blockIdx.x * (CONV_WARPS / WARPS) + warp / WARPS) * 32 + lane, before = a.kernel - 1;
    int seq = gridDim.y - 1 - blockIdx.y;
    conv_tile<WARPS> &tile = tiles[warp / WARPS];
    bool live = c < channels_of(a);
    if (goes_on(s, seq)) {
        pdl_wait();
        return;
    }
    state_span p = span_of(a, s, seq, gridDim.y);
    for (int i = mine; i < before; i += WARPS) {
        tile.x[i][lane] = live && p.from ? p.from[(int64_t)c * before + i] : 0.0f;
    }
    pdl_wait();
    T next[CONV_TOKENS];
    conv_fetch<T>(next, a, p, mine * CONV_TOKENS, c, live);
    for (int first = 0; first < p.n; first += CHUNK) {
        int at = mine * CONV_TOKENS;
        for (int j = 0; j < CONV_TOKENS; j++) {
            tile.x[before + at + j][lane] = to_float(next[j]);
        }
        if (lane < CONV_TOKENS) {
            int token = first + at + lane;
            tile.block[at + lane] =
                p.cached && token < p.n ? block_behind(s, p.start + token, p.start + p.n) : -1;
        }
        conv_sync<WARPS>();
        conv_fetch<T>(next, a, p, first + CHUNK + at, c, live);
        if (live) {
            conv_tokens<T, K, WARPS>(a, p, tile, first + at, at, c, lane);
        }
        conv_sync<WARPS>();
        for (int i = mine; i < before; i += WARPS) {
            tile.x[i][lane] = tile.x[CHUNK + i][lane];
        }
        conv_sync<WARPS>();
    }
}

/* ---- selective scan ---- */

/* A block has SCAN_CHANNELS channels. Four neighbouring lanes share one, each has J
 * neighbouring elements of its state. */
enum { SCAN_CHANNELS = 32, SCAN_THREADS = SCAN_CHANNELS * 4 };

/* Tokens that a block has in shared memory. */
template <int J> constexpr int SCAN_TOKENS = J <= 4 ? 16 : 4;

template <int J> struct scan_tile {
    float k[SCAN_TOKENS<J>][4 * J], q[SCAN_TOKENS<J>][4 * J]; /* behind key_dim zeros */
    float dt[SCAN_TOKENS<J>][SCAN_CHANNELS];
    float v[SCAN_TOKENS<J>][SCAN_CHANNELS]; /* then the results */
    int block[SCAN_TOKENS<J>];              /* for the state behind a token; -1: none */
};

/* A thread's share of a tile, on its way. */
template <typename T, int J> struct scan_operands {
    static constexpr int EACH = SCAN_TOKENS<J> * SCAN_CHANNELS / SCAN_THREADS;
    static constexpr int KEYS = SCAN_TOKENS<J> * 8 * J / SCAN_THREADS;
    T gate[EACH], v[EACH], key[KEYS]; /* key: of k, then of q, token by token */
    int block;
};

/* The tokens [first, first + SCAN_TOKENS) of a sequence and the channels from c on. */
template <typename T, int J>
__device__ __forceinline__ void scan_fetch(scan_operands<T, J> &to, const recurrence_args &a,
                                           const step_arrays &s, const state_span &p, int first,
                                           int c)
{
    const T zero = from_float<T>(0.0f);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = min(p.n - first, SCAN_TOKENS<J>);
    bool live = c + lane < channels_of(a);

#pragma unroll
    for (int i = 0; i < to.EACH; i++) {
        int t = i * (SCAN_THREADS / 32) + warp;
        int64_t row = p.start + first + t;
        to.gate[i] = live && t < n ? ((const T *)a.gates)[row * a.gate_stride + c + lane] : zero;
        to.v[i] = live && t < n ? ((const T *)a.x)[row * a.x_stride + c + lane] : zero;
    }
#pragma unroll
    for (int i = 0; i < to.KEYS; i++) {
        int at = i * SCAN_THREADS + threadIdx.x, t = at / (8 * J), key = at % (4 * J);
        int column = a.gate_cols - (at % (8 * J) < 4 * J ? 2 : 1) * a.key_dim + key;
        to.key[i] = key < a.key_dim && t < n
                        ? ((const T *)a.gates)[(p.start + first + t) * a.gate_stride + column]
                        : zero;
    }
    to.block =
        (int)threadIdx.x < n ? block_behind(s, p.start + first + threadIdx.x, p.start + p.n) : -1;
}

template <typename T, int J>
__device__ __forceinline__ void scan_store(scan_tile<J> &tile, const scan_operands<T, J> &from,
                                           float bias)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

#pragma unroll
    for (int i = 0; i < from.EACH; i++) {
        int t = i * (SCAN_THREADS / 32) + warp;
        tile.dt[t][lane] = softplus(to_float(from.gate[i]) + bias);
        tile.v[t][lane] = to_float(from.v[i]);
    }
#pragma unroll
    for (int i = 0; i < from.KEYS; i++) {
        int at = i * SCAN_THREADS + threadIdx.x, t = at / (8 * J), key = at % (4 * J);
        (at % (8 * J) < 4 * J ? tile.k : tile.q)[t][key] = to_float(from.key[i]);
    }
    if (threadIdx.x < SCAN_TOKENS<J>) {
        tile.block[threadIdx.x] = from.block;
    }
}

/* 2^x, 0 where that is no normal number. */
__device__ __forceinline__ float power_of_two(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* One token: the state [J] is this lane's part of its channel's, a step takes it to its
 * 2^(rate dt)-fold. Returns the channel's sum. */
template <int J>
__device__ __forceinline__ float scan_token(float (&state)[J], const float (&rate)[J],
                                            const scan_tile<J> &tile, int t, int channel, int sub)
{
    const float4 *k = (const float4 *)(tile.k[t] + sub * J),
                 *q = (const float4 *)(tile.q[t] + sub * J);
    float dt = tile.dt[t][channel], add = dt * tile.v[t][channel], sum[4] = {};

#pragma unroll
    for (int j = 0; j < J; j += 4) {
        float4 y = k[j / 4], z = q[j / 4];
        state[j] = power_of_two(rate[j] * dt) * state[j] + y.x * add;
        state[j + 1] = power_of_two(rate[j + 1] * dt) * state[j + 1] + y.y * add;
        state[j + 2] = power_of_two(rate[j + 2] * dt) * state[j + 2] + y.z * add;
        state[j + 3] = power_of_two(rate[j + 3] * dt) * state[j + 3] + y.w * add;
        sum[0] += state[j] * z.x;
        sum[1] += state[j + 1] * z.y;
        sum[2] += state[j + 2] * z.z;
        sum[3] += state[j + 3] * z.w;
    }
    return sum_of_four((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* The tokens [first, first + n) of a sequence, which are in the tile; the results
 * replace v. */
template <int J>
__device__ __forceinline__ void scan_tokens(const recurrence_args &a, float (&state)[J],
                                            const float (&rate)[J], scan_tile<J> &tile, int n,
                                            int64_t matrix, bool live, float skip)
{
    int channel = threadIdx.x >> 2, sub = threadIdx.x & 3;

    for (int t = 0; t < n; t++) {
        float sum = scan_token<J>(state, rate, tile, t, channel, sub);
        if (sub == 0) { /* alone reads v[t][channel] from here on */
            tile.v[t][channel] = sum + skip * tile.v[t][channel];
        }
        if (tile.block[t] >= 0 && live) {
            float *to = a.states + tile.block[t] * a.block_stride + matrix;
#pragma unroll
            for (int j = 0; j < J; j++) {
                if (sub * J + j < a.key_dim) {
                    to[j] = state[j];
                }
            }
        }
    }
}

/* Grid (channels, sequence). */
template <typename T, int J>
__global__ void __launch_bounds__(SCAN_THREADS) scan_kernel(recurrence_args a, step_arrays s)
{
    __shared__ alignas(16) scan_tile<J> tile;

    pdl_release();
    int c = blockIdx.x * SCAN_CHANNELS, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int channel = c + (threadIdx.x >> 2), sub = threadIdx.x & 3, channels = channels_of(a);
    bool live = channel < channels;
    int seq = gridDim.y - 1 - blockIdx.y;
    if (goes_on(s, seq)) {
        pdl_wait();
        return;
    }
    state_span p = span_of(a, s, seq, gridDim.y);
    int64_t matrix = (int64_t)channels * (a.kernel - 1) + (int64_t)channel * a.key_dim + sub * J;
    float state[J], rate[J];
#pragma unroll
    for (int j = 0; j < J; j++) {
        bool has = live && sub * J + j < a.key_dim;
        state[j] = has && p.from ? p.from[matrix + j] : 0.0f;
        /* of 2, which has an instruction */
        rate[j] =
            has ? -1.44269504088896341f * expf(a.a_log[channel * a.a_log_stride + sub * J + j])
                : 0.0f;
    }
    float skip = live && a.d ? a.d[channel] : 0.0f;
    float bias = c + lane < channels ? a.dt_bias[c + lane] : 0.0f;
    pdl_wait();
    scan_operands<T, J> next;
    scan_fetch<T, J>(next, a, s, p, 0, c);
    for (int first = 0; first < p.n; first += SCAN_TOKENS<J>) {
        int n = min(p.n - first, SCAN_TOKENS<J>);
        scan_store<T, J>(tile, next, bias);
        __syncthreads();
        scan_fetch<T, J>(next, a, s, p, first + SCAN_TOKENS<J>, c);
        if (p.cached) { /* else there are no results */
            scan_tokens<J>(a, state, rate, tile, n, matrix, live, skip);
        }
        __syncthreads();
        /* as they lie in next.v, so that a thread overwrites its own */
        for (int t = warp; t < n && c + lane < channels; t += SCAN_THREADS / 32) {
            ((T *)a.out)[(p.start + first + t) * a.out_stride + c + lane] =
                from_float<T>(p.cached ? tile.v[t][lane] : 0.0f);
        }
    }
}

/* ---- launchers ---- */

template <typename T, int K>
static void launch_conv_of(const recurrence_args &a, const step_arrays &s, int n_seqs, int rows,
                           cudaStream_t stream)
{
    int groups = (a.n_heads * a.value_dim + 31) / 32;

    if (rows > n_seqs) {
        launch(conv_kernel<T, K, CONV_WARPS>, dim3(groups, n_seqs), dim3(CONV_WARPS * 32), 0,
               stream, a, s);
    } else {
        launch(conv_kernel<T, K, 1>, dim3((groups + CONV_WARPS - 1) / CONV_WARPS, n_seqs),
               dim3(CONV_WARPS * 32), 0, stream, a, s);
    }
}

template <typename T>
static void launch_conv_type(const recurrence_args &a, const step_arrays &s, int n_seqs, int rows,
                             cudaStream_t stream)
{
    if (a.kernel == 3) {
        launch_conv_of<T, 3>(a, s, n_seqs, rows, stream);
    } else if (a.kernel == 4) {
        launch_conv_of<T, 4>(a, s, n_seqs, rows, stream);
    } else {
        launch_conv_of<T, 0>(a, s, n_seqs, rows, stream);
    }
}

template <typename T>
static void launch_scan_type(const recurrence_args &a, const step_arrays &s, int n_seqs,
                             cudaStream_t stream)
{
    dim3 grid((a.n_heads * a.value_dim + SCAN_CHANNELS - 1) / SCAN_CHANNELS, n_seqs);

    launch(a.key_dim <= 16 ? scan_kernel<T, 4> : scan_kernel<T, SCAN_KEY_DIM / 4>, grid,
           dim3(SCAN_THREADS), 0, stream, a, s);
}

extern "C" void launch_convolution(const struct recurrence_args *a, const struct step_arrays *s,
                                   int32_t n_seqs, int32_t rows, cudaStream_t stream)
{
    DISPATCH_TYPE(a->type, launch_conv_type<T>(*a, *s, n_seqs, rows, stream));
}

extern "C" void launch_scan(const struct recurrence_args *a, const struct step_arrays *s,
                            int32_t n_seqs, cudaStream_t stream)
{
    DISPATCH_TYPE(a->type, launch_scan_type<T>(*a, *s, n_seqs, stream));
}
