/* The recurrence of layers with states (states.h), for the shapes of struct recurrence
 * in backend.h.
 *
 * Blocks of the second kernel read a state before they wait for the first one. They
 * may: memory operations of a step and the steps before it are complete when a kernel
 * behind the embedding starts (common.cuh), and of this step's kernels only that one
 * writes the layer's states, each block its own part. */
#include "kernels/cuda/states/tf32.cuh"
#include "kernels/cuda/states/token.cuh"

/* ---- tokens on their own ---- */

/* Tokens of a block: few where there are few, so that all are taken at once. */
enum { PREPARE_WARPS = 4, PREPARE_TOKENS = 16, PREPARE_ONE = 512 };
/* Channels of a lane in prepare_run, and inputs of its convolution. */
enum { RUN_EACH = 4, RUN_KERNEL = 4 };

template <typename T>
__device__ __forceinline__ void prepare_gates(const recurrence_args &a, int token, bool chunked,
                                              int lane)
{
    for (int h = lane; h < a.n_heads; h += 32) {
        float2 *to = (float2 *)(a.factors + ((int64_t)token * a.n_heads + h) * 2);
        *to = factors_of<T>(a, token, h, chunked);
    }
}

/* n channels from c on, which are one head's q, k or v: norm_scale is what q or k are
 * multiplied by besides the inverse of their length, 0: v, or nothing to norm.
 * `chunked`: a q or k of a sequence in chunks. */
template <typename T>
__device__ __forceinline__ void prepare_vector(const recurrence_args &a, const state_span &p,
                                               int token, int first, int n, float norm_scale,
                                               bool chunked, int lane)
{
    float *to = a.prepared + (int64_t)token * channels_of(a) + first, squares = 0.0f;

    for (int i = lane; i < n; i += 32) {
        float x = a.kernel == 4 ? convolve<T, 4>(a, p, token, first + i)
                                : convolve<T, 0>(a, p, token, first + i);
        to[i] = x;
        squares += x * x;
    }
    if (norm_scale == 0.0f && !chunked) {
        return;
    }
    float scale = norm_scale == 0.0f ? 1.0f : norm_scale / sqrtf(warp_sum(squares) + 1e-6f);
    for (int i = lane; i < n; i += 32) {
        float x = to[i] * scale;
        if (chunked) { /* n is a multiple of 32 */
            __syncwarp();
            to[tf32_place(i)] = tf32_of(x);
        } else {
            to[i] = x;
        }
    }
}

/* What a lane has of a run of tokens: its channels' weights and their last inputs. */
struct run_channels {
    float weight[RUN_EACH][RUN_KERNEL], bias[RUN_EACH], input[RUN_EACH][RUN_KERNEL];
};

template <typename T>
__device__ __forceinline__ void load_run(run_channels &to, const recurrence_args &a,
                                         const state_span &p, int token, int first, int n, int lane)
{
#pragma unroll
    for (int u = 0; u < RUN_EACH; u++) {
        int c = first + min(u * 32 + lane, n - 1);
        to.bias[u] = a.conv_bias ? a.conv_bias[c] : 0.0f;
#pragma unroll
        for (int k = 0; k < RUN_KERNEL; k++) {
            to.weight[u][k] = a.conv[(int64_t)c * RUN_KERNEL + k];
            to.input[u][k] =
                k + 1 < RUN_KERNEL ? input_of<T>(a, p, token - RUN_KERNEL + 1 + k, c) : 0.0f;
        }
    }
}

/* prepare_vector of the tokens [token, end) of a sequence, with the same bits: inputs
 * are read once. n is at most 32 * RUN_EACH, the convolution has RUN_KERNEL inputs. */
template <typename T>
__device__ __forceinline__ void prepare_run(const recurrence_args &a, const state_span &p,
                                            int token, int end, int first, int n, float norm_scale,
                                            bool chunked, int lane)
{
    int channels = channels_of(a);
    const T *x = (const T *)a.x + token * a.x_stride + first;
    float *to = a.prepared + (int64_t)token * channels + first;
    run_channels r;
    float next[RUN_EACH];

    load_run<T>(r, a, p, token, first, n, lane);
#pragma unroll
    for (int u = 0; u < RUN_EACH; u++) {
        next[u] = to_float(x[min(u * 32 + lane, n - 1)]);
    }
    for (; token < end; token++, to += channels) {
        float y[RUN_EACH], squares = 0.0f;
        x += token + 1 < end ? a.x_stride : 0;
#pragma unroll
        for (int u = 0; u < RUN_EACH; u++) {
            r.input[u][RUN_KERNEL - 1] = next[u];
            next[u] = to_float(x[min(u * 32 + lane, n - 1)]);
            float sum = r.bias[u];
#pragma unroll
            for (int k = 0; k < RUN_KERNEL; k++) {
                sum += r.weight[u][k] * r.input[u][k];
            }
#pragma unroll
            for (int k = 0; k + 1 < RUN_KERNEL; k++) {
                r.input[u][k] = r.input[u][k + 1];
            }
            y[u] = silu_of(sum);
            if (u * 32 + lane < n) {
                squares += y[u] * y[u];
            }
        }
        float scale = norm_scale == 0.0f ? 1.0f : norm_scale / sqrtf(warp_sum(squares) + 1e-6f);
#pragma unroll
        for (int u = 0; u < RUN_EACH; u++) {
            int i = u * 32 + lane;
            if (i < n) {
                to[chunked ? tf32_place(i) : i] = chunked              ? tf32_of(y[u] * scale)
                                                  : norm_scale == 0.0f ? y[u]
                                                                       : y[u] * scale;
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
    float scale = !a.delta ? 0.0f : is_q ? query_scale(a) : is_k ? 1.0f : 0.0f;
    int end = min(rows, (int)(blockIdx.y + 1) * each);
    for (int token = blockIdx.y * each, stop; token < end; token = stop) {
        int seq = sequence_of(s, token, 0, n_seqs);
        stop = min(end, max(s.q_start[seq + 1], token + 1));
        while (goes_on(s, seq)) {
            seq--;
        }
        bool chunked = in_chunks(a, s, seq);
        if (unit == vectors) {
            for (int t = token; t < stop; t++) {
                prepare_gates<T>(a, t, chunked, lane);
            }
            continue;
        }
        state_span p = span_of(a, s, seq, seq + 1);
        if (!p.cached) {
            continue;
        }
        chunked = chunked && (is_q || is_k);
        if (a.kernel == RUN_KERNEL && n <= 32 * RUN_EACH) {
            prepare_run<T>(a, p, token, stop, base + index * n, n, scale, chunked, lane);
        } else {
            for (int t = token; t < stop; t++) {
                prepare_vector<T>(a, p, t, base + index * n, n, scale, chunked, lane);
            }
        }
    }
}

/* ---- one token after the other ---- */

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

/* Starts loading the tokens [first, first + n), and of `end` tokens where their states
 * go. */
template <int J>
__device__ __forceinline__ void fetch_tile(token_tile<J> &to, const recurrence_args &a,
                                           const step_arrays &s, const operand_offsets &o,
                                           int first, int n, int end)
{
    int channels = channels_of(a);
    bool wide = ((a.key_dim | a.value_dim) & 3) == 0;

    if ((int)threadIdx.x < n) {
        to.block[threadIdx.x] = block_behind(s, first + threadIdx.x, end);
    }

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
        fetch_row<false>(to.factor[t], a.factors + ((int64_t)(first + t) * a.n_heads + o.head) * 2,
                         2);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Grid (head and part of its columns, sequence); the last sequences, which may have
 * many tokens, start first. Keys fill 16 * J rows, those behind key_dim with zeros. */
template <typename T, int J, bool DELTA>
__global__ void __launch_bounds__(THREADS, J <= 4   ? 8
                                           : J <= 8 ? 6
                                                    : 3)
    recurrence_kernel(recurrence_args a, step_arrays s)
{
    __shared__ alignas(16) token_tile<J> tile[2];

    pdl_release();
    const operand_offsets o = offsets_of<DELTA>(a);
    int mine = threadIdx.x >> 2, sub = threadIdx.x & 3;
    int seq = gridDim.y - 1 - blockIdx.y;
    if (goes_on(s, seq) || in_chunks(a, s, seq)) {
        pdl_wait();
        return;
    }
    state_span p = span_of(a, s, seq, gridDim.y);
    int64_t matrix = o.matrix + mine;
    bool live = mine < o.columns;
    float state[J][4];
    load_matrix(a, state, p, live, sub, matrix);
    clear_tile(a, tile[0]);
    clear_tile(a, tile[1]);
    pdl_wait();
    T *out = (T *)a.out + o.at + mine;
    if (!p.cached) {
        if (live && sub == 0) {
            write_zeros(a, p, out);
        }
        return;
    }
    float skip = a.d ? a.d[o.head] : 0.0f;
    int end = p.start + p.n, late = -1; /* the token whose state goes to the block read */
    fetch_tile(tile[0], a, s, o, p.start, min(p.n, TILE_TOKENS), end);
    for (int first = 0, half = 0; first < p.n; first += TILE_TOKENS, half ^= 1) {
        int n = min(p.n - first, TILE_TOKENS), next = first + TILE_TOKENS;
        fetch_tile(tile[half ^ 1], a, s, o, p.start + next, min(p.n - next, TILE_TOKENS), end);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        for (int t = 0; t < n; t++) {
            float v = tile[half].v[t][mine];
            float sum = take_token<J, DELTA>(state, tile[half], t, sub, v);
            if (live && sub == 0) {
                out[(p.start + first + t) * a.out_stride] = from_float<T>(__fmaf_rn(skip, v, sum));
            }
            if (tile[half].block[t] < 0) {
                continue;
            }
            float *to = a.states + tile[half].block[t] * a.block_stride;
            if (live) {
                keep_matrix(a, state, sub, to + matrix);
            }
            if (to == p.from) { /* its inputs are read for the tokens behind it */
                late = p.start + first + t;
            } else {
                keep_inputs<T>(a, p, p.start + first + t, to);
            }
        }
        __syncthreads();
    }
    if (late >= 0) {
        keep_inputs<T>(a, p, late, (float *)p.from);
    }
}

/* ---- launchers ---- */

template <typename T, int J>
static void launch_tokens(const recurrence_args &a, const step_arrays &s, int n_seqs,
                          cudaStream_t stream)
{
    int parts = (a.value_dim + COLUMNS - 1) / COLUMNS;
    dim3 grid(a.n_heads * parts, n_seqs);

    if (a.delta) {
        launch(recurrence_kernel<T, J, true>, grid, dim3(THREADS), 0, stream, a, s);
    } else {
        launch(recurrence_kernel<T, J, false>, grid, dim3(THREADS), 0, stream, a, s);
    }
}

template <typename T>
static void launch_all(const recurrence_args &a, const step_arrays &s, const recurrence_step &w,
                       cudaStream_t stream)
{
    int units = 2 * a.n_groups + a.n_heads + 1, each = w.rows > PREPARE_ONE ? PREPARE_TOKENS : 1;

    launch(prepare_kernel<T>,
           dim3((units + PREPARE_WARPS - 1) / PREPARE_WARPS, (w.rows + each - 1) / each),
           dim3(PREPARE_WARPS * 32), 0, stream, a, s, w.n_seqs, w.rows, each);
    if (w.n_long == w.n_seqs) {
        return;
    }
    if (a.key_dim <= 64) {
        launch_tokens<T, 4>(a, s, w.n_seqs, stream);
    } else if (a.key_dim <= 128) {
        launch_tokens<T, 8>(a, s, w.n_seqs, stream);
    } else {
        launch_tokens<T, 16>(a, s, w.n_seqs, stream);
    }
}

extern "C" void launch_recurrence(const struct recurrence_args *a, const struct step_arrays *s,
                                  const struct recurrence_step *w, cudaStream_t stream)
{
    bool decode = w->n_long == 0 && w->rows == w->n_seqs;

    if (decode && !w->verifies && launch_recurrence_heads(a, s, w->n_seqs, stream)) {
        return;
    }
    if (decode) {
        launch_recurrence_decode(a, s, w->n_seqs, stream);
    } else {
        DISPATCH_TYPE(a->type, launch_all<T>(*a, *s, *w, stream));
    }
    if (w->n_long > 0) {
        launch_recurrence_chunks(a, s, w, stream);
    }
    if (a->after.gate) {
        launch_norm_gated(&a->after, w->rows, a->n_heads * a->value_dim, a->type, stream);
    }
}
