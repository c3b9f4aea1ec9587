/* The recurrence of steps whose sequences have one token each, in one launch
 * (states.h). Sequences that go on from one another, as drafts do, are taken as one of
 * some tokens.
 *
 * Each block makes the operands of its columns itself: all that have a head of the same
 * group read the same channels of q and k, and the convolution's earlier inputs of
 * those. The last of them to have read replaces these. Inputs of v have one reader.
 *
 * States are read before the wait, as in recurrence.cu. */
#include "kernels/cuda/states/token.cuh"

/* Channels that a thread of a block takes, of v's columns, a q and a k. */
template <int J> struct channel_terms {
    enum { EACH = (2 * 16 * J + COLUMNS + THREADS - 1) / THREADS };
    /* of the first token: the convolution without its own input, that one's weight */
    float sum[EACH], weight[EACH];
};

/* Channel i of a block: those of v come first, then q and k. */
__device__ __forceinline__ int channel_of(const recurrence_args &a, const operand_offsets &o, int i)
{
    int of_keys = i - o.columns;

    return of_keys < 0 ? o.v + i : of_keys < a.key_dim ? o.q + of_keys : o.k + of_keys - a.key_dim;
}

/* Where channel i of a token lies in a tile. */
template <int J>
__device__ __forceinline__ float *place_of(const recurrence_args &a, const operand_offsets &o,
                                           token_tile<J> &tile, int t, int i)
{
    int of_keys = i - o.columns;

    return of_keys < 0           ? &tile.v[t][i]
           : of_keys < a.key_dim ? &tile.q[t][of_keys]
                                 : &tile.k[t][of_keys - a.key_dim];
}

/* What the convolution of the first token has from earlier steps, in the order of
 * convolve. K: its size; 0: a.kernel. */
template <typename T, int K>
__device__ __forceinline__ float earlier_terms(const recurrence_args &a, const state_span &p, int c)
{
    int size = K > 0 ? K : a.kernel;
    float sum = a.conv_bias ? a.conv_bias[c] : 0.0f;

#pragma unroll
    for (int k = 0; k < size - 1; k++) {
        sum += a.conv[(int64_t)c * size + k] * input_of<T>(a, p, p.start - size + 1 + k, c);
    }
    return sum;
}

template <typename T, int J>
__device__ __forceinline__ void load_terms(const recurrence_args &a, const state_span &p,
                                           const operand_offsets &o, channel_terms<J> &to)
{
#pragma unroll
    for (int u = 0; u < channel_terms<J>::EACH; u++) {
        int i = u * THREADS + threadIdx.x;
        to.sum[u] = to.weight[u] = 0.0f;
        if (p.cached && i < o.columns + 2 * a.key_dim) {
            int c = channel_of(a, o, i);
            to.sum[u] = a.kernel == 4 ? earlier_terms<T, 4>(a, p, c) : earlier_terms<T, 0>(a, p, c);
            to.weight[u] = a.conv[(int64_t)c * a.kernel + a.kernel - 1];
        }
    }
}

/* Gives a q or k its length, by a warp, in the order of prepare_vector. */
__device__ __forceinline__ void norm_keys(float *x, int n, float norm_scale, int lane)
{
    float squares = 0.0f;

    for (int i = lane; i < n; i += 32) {
        squares += x[i] * x[i];
    }
    float scale = norm_scale / sqrtf(warp_sum(squares) + 1e-6f);
    for (int i = lane; i < n; i += 32) {
        x[i] *= scale;
    }
}

/* The channels of n tokens from `first` of the span on, before their lengths. */
template <typename T, int J>
__device__ __forceinline__ void make_channels(token_tile<J> &to, const recurrence_args &a,
                                              const state_span &p, const operand_offsets &o,
                                              const channel_terms<J> &terms, int first, int n)
{
    const T *x = (const T *)a.x + p.start * a.x_stride;

#pragma unroll
    for (int u = 0; u < channel_terms<J>::EACH; u++) {
        int i = u * THREADS + threadIdx.x, c = channel_of(a, o, i), t = 0;
        if (i >= o.columns + 2 * a.key_dim) {
            continue;
        }
        if (first == 0) {
            float sum = terms.sum[u] + terms.weight[u] * to_float(x[c]);
            *place_of(a, o, to, t++, i) = silu_of(sum);
        }
        for (; t < n; t++) {
            int token = p.start + first + t;
            *place_of(a, o, to, t, i) =
                a.kernel == 4 ? convolve<T, 4>(a, p, token, c) : convolve<T, 0>(a, p, token, c);
        }
    }
}

/* The operands of n tokens from `first` of the span on. */
template <typename T, int J, bool DELTA>
__device__ __forceinline__ void
make_tile(token_tile<J> &to, const recurrence_args &a, const step_arrays &s, const state_span &p,
          const operand_offsets &o, const channel_terms<J> &terms, int first, int n)
{
    int gated = THREADS - 1 - threadIdx.x; /* the last warp has the fewest channels */

    make_channels<T>(to, a, p, o, terms, first, n);
    if (gated < n) {
        float2 f = factors_of<T>(a, p.start + first + gated, o.head, false);
        to.factor[gated][0] = f.x;
        to.factor[gated][1] = f.y;
        to.block[gated] = block_behind(s, p.start + first + gated, p.start + p.n);
    }
    __syncthreads();
    if (DELTA) {
        for (int i = threadIdx.x >> 5; i < 2 * n; i += THREADS / 32) {
            norm_keys(i & 1 ? to.k[i >> 1] : to.q[i >> 1], a.key_dim, i & 1 ? 1.0f : query_scale(a),
                      threadIdx.x & 31);
        }
        __syncthreads();
    }
}

/* The convolution's last inputs behind a token, of the first n channels of a block. */
template <typename T>
__device__ __forceinline__ void keep_channels(const recurrence_args &a, const state_span &p,
                                              const operand_offsets &o, int n, int token, float *to)
{
    int before = a.kernel - 1;

    for (int i = threadIdx.x; i < n; i += THREADS) {
        int c = channel_of(a, o, i);
        for (int k = 0; k < before; k++) { /* in place: nothing is read behind its writing */
            to[(int64_t)c * before + k] = input_of<T>(a, p, token + 1 - before + k, c);
        }
    }
}

/* The same behind all tokens, the block that is read last. */
template <typename T>
__device__ __forceinline__ void keep_span(const recurrence_args &a, const step_arrays &s,
                                          const state_span &p, const operand_offsets &o, int n)
{
    int end = p.start + p.n, late = -1;

    for (int token = p.start; token < end; token++) {
        int block = block_behind(s, token, end);
        float *to = a.states + block * a.block_stride;
        if (block >= 0 && to == p.from) {
            late = token;
        } else if (block >= 0) {
            keep_channels<T>(a, p, o, n, token, to);
        }
    }
    if (late >= 0) {
        keep_channels<T>(a, p, o, n, late, (float *)p.from);
    }
}

/* Whether all other blocks of the sequence that read this block's q and k have come
 * here before, behind the last time; the counter is zero again then. Called by one
 * thread. */
__device__ __forceinline__ bool arrives_last(const recurrence_args &a, int seq, int group)
{
    unsigned readers = gridDim.x / a.n_groups;

    random_delay();
    __threadfence();
    return atomicInc(a.arrivals + (int64_t)seq * a.n_groups + group, readers - 1) == readers - 1;
}

/* Grid as recurrence_kernel. */
template <typename T, int J, bool DELTA>
__global__ void __launch_bounds__(THREADS, J <= 4   ? 8
                                           : J <= 8 ? 6
                                                    : 3)
    decode_kernel(recurrence_args a, step_arrays s)
{
    __shared__ alignas(16) token_tile<J> tile;
    __shared__ bool last;

    pdl_release();
    const operand_offsets o = offsets_of<DELTA>(a);
    int mine = threadIdx.x >> 2, sub = threadIdx.x & 3, seq = gridDim.y - 1 - blockIdx.y;
    if (goes_on(s, seq)) {
        pdl_wait();
        return;
    }
    state_span p = span_of(a, s, seq, gridDim.y);
    int64_t matrix = o.matrix + mine;
    bool live = mine < o.columns, arrived_last = false;
    float state[J][4], skip = a.d ? a.d[o.head] : 0.0f;
    channel_terms<J> terms;
    load_matrix(a, state, p, live, sub, matrix);
    load_terms<T>(a, p, o, terms);
    clear_tile(a, tile);
    pdl_wait();
    T *out = (T *)a.out + o.at + mine;
    if (!p.cached) {
        if (live && sub == 0) {
            write_zeros(a, p, out);
        }
        return;
    }
    for (int first = 0; first < p.n; first += TILE_TOKENS) {
        int n = min(p.n - first, TILE_TOKENS);
        make_tile<T, J, DELTA>(tile, a, s, p, o, terms, first, n);
        if (first + n == p.n && threadIdx.x == 0) {
            arrived_last = arrives_last(a, seq, o.group);
        }
        for (int t = 0; t < n; t++) {
            float v = tile.v[t][mine];
            float sum = take_token<J, DELTA>(state, tile, t, sub, v);
            if (live && sub == 0) {
                out[(p.start + first + t) * a.out_stride] = from_float<T>(__fmaf_rn(skip, v, sum));
            }
            if (live && tile.block[t] >= 0) {
                keep_matrix(a, state, sub, a.states + tile.block[t] * a.block_stride + matrix);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        last = arrived_last;
    }
    __syncthreads();
    keep_span<T>(a, s, p, o, last ? o.columns + 2 * a.key_dim : o.columns);
}

/* ---- launchers ---- */

template <typename T, int J>
static void launch_keys(const recurrence_args &a, const step_arrays &s, int n_seqs,
                        cudaStream_t stream)
{
    dim3 grid(a.n_heads * ((a.value_dim + COLUMNS - 1) / COLUMNS), n_seqs);

    if (a.delta) {
        launch(decode_kernel<T, J, true>, grid, dim3(THREADS), 0, stream, a, s);
    } else {
        launch(decode_kernel<T, J, false>, grid, dim3(THREADS), 0, stream, a, s);
    }
}

template <typename T>
static void launch_decode(const recurrence_args &a, const step_arrays &s, int n_seqs,
                          cudaStream_t stream)
{
    if (a.key_dim <= 64) {
        launch_keys<T, 4>(a, s, n_seqs, stream);
    } else if (a.key_dim <= 128) {
        launch_keys<T, 8>(a, s, n_seqs, stream);
    } else {
        launch_keys<T, 16>(a, s, n_seqs, stream);
    }
}

extern "C" void launch_recurrence_decode(const struct recurrence_args *a,
                                         const struct step_arrays *s, int32_t n_seqs,
                                         cudaStream_t stream)
{
    DISPATCH_TYPE(a->type, launch_decode<T>(*a, *s, n_seqs, stream));
}
