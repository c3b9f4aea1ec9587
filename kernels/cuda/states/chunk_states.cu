/* Prefill of recurrences with matrices in chunks, on tensor cores: the gated delta rule
 * in its WY form (Yang, Kautz and Hatamizadeh 2024, section 3.3) and Mamba-2 (Dao and
 * Gu 2024, section 6).
 *
 * Let G_t be the sum of the logarithms of a chunk's decays up to its token t, and S the
 * state before the chunk. What token t adds to the state is k_t u_t^T, so
 *     S_t   = exp(G_t) S + sum over i <= t of exp(G_t - G_i) k_i u_i^T
 *     out_t = exp(G_t) S^T q_t + sum over i <= t of P_ti u_i,  P_ti = exp(G_t - G_i) q_t.k_i
 * Mamba-2 has u_t = dt_t v_t. The delta rule has
 *     u_t = b_t (v_t - exp(G_t) S^T k_t - sum over i < t of exp(G_t - G_i) (k_t.k_i) u_i),
 * whose solution is U = T B (V - exp(G) K S), T = (I + A)^-1, where A has what the sum
 * multiplies u by, and B the b_t.
 *
 * A first launch, of a block for each chunk and some heads, makes P and T B; the
 * inverse is float32. In a second one a warp has 16 columns of a head's matrix, transposed, in
 * the accumulators of its products, and takes the chunks in order: each accumulator is
 * the next product's left operand, so the columns know nothing of each other and warps
 * of no other. Operands are tf32, sums and the state float32. */
#include "kernels/cuda/states/chunks.cuh"

template <int COLS> struct state_tiles {
    float k[2][C][KEY_ROW], q[C][KEY_ROW];
    float p[C][CHUNK_ROW], t[C][CHUNK_ROW]; /* t: T B, of the delta rule */
    float v[C][COLS + 4];
    float2 factor[2][C]; /* G and b */
};

/* What a block works on. */
struct head_part {
    int head, column, q, k, v; /* q, k, v: their first channels */
    int64_t matrix;            /* its elements of a layer's state */
};

template <int COLS> __device__ __forceinline__ head_part part_of(const recurrence_args &a)
{
    int parts = a.value_dim / COLS, head = blockIdx.x / parts, column = blockIdx.x % parts * COLS;
    int group = a.tiled ? head % a.n_groups : head / (a.n_heads / a.n_groups);
    int values = head * a.value_dim + column;

    return {head,
            column,
            first_key(a, false) + group * KEYS,
            first_key(a, true) + group * KEYS,
            (a.delta ? 2 * a.n_groups * KEYS : 0) + values,
            (int64_t)channels_of(a) * (a.kernel - 1) + (int64_t)head * KEYS * a.value_dim + column};
}

/* Starts loading what the first products of a chunk read. */
template <int COLS>
__device__ __forceinline__ void fetch_operands(state_tiles<COLS> &to, const recurrence_args &a,
                                               const head_part &h, const token_range &r, int half)
{
    int channels = channels_of(a);

    if (r.n > 0) {
        fetch_keys(to.k[half], a, h.k, r.start, r.n);
        fetch_keys(to.q, a, h.q, r.start, r.n);
        for (int i = threadIdx.x; i < C * COLS / 4; i += blockDim.x) {
            int t = i / (COLS / 4), at = i % (COLS / 4) * 4;
            int64_t row = r.start + min(t, r.n - 1);
            async_copy_or_zeros((uint32_t)__cvta_generic_to_shared(&to.v[t][at]),
                                a.prepared + row * channels + h.v + at, t < r.n);
        }
        if (threadIdx.x < C) { /* G goes on as it was behind the last token, b is of no use */
            int64_t row = r.start + min((int)threadIdx.x, r.n - 1);
            async_copy_pair(&to.factor[half][threadIdx.x],
                            (const float2 *)a.factors + row * a.n_heads + h.head);
        }
    }
    async_commit();
}

/* The same of P and T B. */
template <int COLS>
__device__ __forceinline__ void fetch_scores(state_tiles<COLS> &to, const recurrence_args &a,
                                             const head_part &h, const token_range &r)
{
    for (int i = threadIdx.x; i < C * C / 4 && r.n > 0; i += blockDim.x) {
        int t = i / (C / 4), at = i % (C / 4) * 4, row = r.start + min(t, r.n - 1);
        async_copy_or_zeros((uint32_t)__cvta_generic_to_shared(&to.p[t][at]),
                            chunk_row(a, row, h.head, 0) + at, t < r.n);
        if (a.delta) {
            async_copy_or_zeros((uint32_t)__cvta_generic_to_shared(&to.t[t][at]),
                                chunk_row(a, row, h.head, 1) + at, t < r.n);
        }
    }
    async_commit();
}

/* What a warp has of a matrix [16 columns, tokens or keys], in tiles of 8. */
typedef float chunk_tile[C / 8][4];
typedef float state_tile[KEYS / 8][4];

/* known += S^T k (DELTA) and out += S^T q of all tokens. */
template <bool DELTA>
__device__ __forceinline__ void read_state(chunk_tile &known, chunk_tile &out,
                                           const state_tile &state, const float (*k)[KEY_ROW],
                                           const float (*q)[KEY_ROW])
{
#pragma unroll
    for (int i = 0; i < KEYS / 8; i += 2) {
        uint32_t x0[4], x1[4];
        tf32_operand(x0, state[i]);
        tf32_operand(x1, state[i + 1]);
#pragma unroll
        for (int n = 0; n < C / 8; n++) {
            uint32_t y[4];
            if (DELTA) {
                ldmatrix_x4(y, tile_address<KEY_ROW, false>(k, n * 8, i * 8));
                mma1688(known[n], x0, y[0], y[1]);
                mma1688(known[n], x1, y[2], y[3]);
            }
            ldmatrix_x4(y, tile_address<KEY_ROW, false>(q, n * 8, i * 8));
            mma1688(out[n], x0, y[0], y[1]);
            mma1688(out[n], x1, y[2], y[3]);
        }
    }
}

/* to += x y^T, where y [token, token] has zeros above its diagonal. */
__device__ __forceinline__ void multiply_tokens(chunk_tile &to, const chunk_tile &x,
                                                const float (*y)[CHUNK_ROW])
{
#pragma unroll
    for (int i = 0; i < C / 8; i += 2) {
        uint32_t x0[4], x1[4];
        tf32_operand(x0, x[i]);
        tf32_operand(x1, x[i + 1]);
#pragma unroll
        for (int n = i; n < C / 8; n++) {
            uint32_t z[4];
            ldmatrix_x4(z, tile_address<CHUNK_ROW, false>(y, n * 8, i * 8));
            mma1688(to[n], x0, z[0], z[1]);
            mma1688(to[n], x1, z[2], z[3]);
        }
    }
}

/* state += u k. */
__device__ __forceinline__ void add_to_state(state_tile &state, const chunk_tile &u,
                                             const float (*k)[KEY_ROW])
{
    int lane = threadIdx.x & 31, key = tf32_place(lane >> 2);

#pragma unroll
    for (int i = 0; i < C / 8; i++) {
        const float *row = &k[i * 8 + (lane & 3) * 2][key];
        uint32_t x[4];
        tf32_operand(x, u[i]);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            mma1688(state[n], x, __float_as_uint(row[n * 8]),
                    __float_as_uint(row[KEY_ROW + n * 8]));
        }
    }
}

/* What the chunk's tokens bring along: of the delta rule known = v - exp(G) known, else
 * known = b v; and out = exp(G) out + skip v. */
template <bool DELTA, int COLS>
__device__ __forceinline__ void bring_values(chunk_tile &known, chunk_tile &out,
                                             const state_tiles<COLS> &tile, int half, float skip)
{
    int lane = threadIdx.x & 31, column = (threadIdx.x >> 5) * 16 + (lane >> 2);

#pragma unroll
    for (int n = 0; n < C / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int t = n * 8 + (lane & 3) * 2 + (i & 1);
            float2 f = tile.factor[half][t];
            float fade = expf(f.x), v = tile.v[t][column + (i >> 1) * 8];
            known[n][i] = DELTA ? v - fade * known[n][i] : f.y * v;
            out[n][i] = fade * out[n][i] + skip * v;
        }
    }
}

/* Everything fades to the chunk's end: u of each token, and the state. */
__device__ __forceinline__ void fade_to_end(chunk_tile &u, state_tile &state,
                                            const float2 (&factor)[C])
{
    float last = factor[C - 1].x, all = expf(last);

#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        int t = n * 8 + (threadIdx.x & 3) * 2;
        float even = expf(last - factor[t].x), odd = expf(last - factor[t + 1].x);
        u[n][0] *= even;
        u[n][1] *= odd;
        u[n][2] *= even;
        u[n][3] *= odd;
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            state[n][i] *= all;
        }
    }
}

/* Results of the tokens: two neighbouring columns of a token at a time. */
template <typename T>
__device__ __forceinline__ void store_results(const chunk_tile &out, const recurrence_args &a,
                                              const head_part &h, const token_range &r)
{
    int lane = threadIdx.x & 31;
    T *to = (T *)a.out + h.head * a.value_dim + h.column + (threadIdx.x >> 5) * 16 + (lane & 3) * 2;

#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        int t = n * 8 + (lane >> 2);
        uint32_t low = transposed(pack2<T>(out[n][0], out[n][1])),
                 high = transposed(pack2<T>(out[n][2], out[n][3]));
        if (t < r.n) {
            T *row = to + (r.start + t) * a.out_stride;
            *(uint32_t *)row = low;
            *(uint32_t *)(row + 8) = high;
        }
    }
}

/* Element i of tile n of a warp's part of a state, which begins at its first column. */
__device__ __forceinline__ int64_t state_at(const recurrence_args &a, int n, int i)
{
    int lane = threadIdx.x & 31, key = n * 8 + (lane & 3) * 2 + (i & 1);

    return (int64_t)key * a.value_dim + (threadIdx.x >> 5) * 16 + (lane >> 2) + (i >> 1) * 8;
}

__device__ __forceinline__ void load_state(state_tile &state, const recurrence_args &a,
                                           const float *from)
{
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            state[n][i] = from ? from[state_at(a, n, i)] : 0.0f;
        }
    }
}

__device__ __forceinline__ void keep_state(const state_tile &state, const recurrence_args &a,
                                           float *to)
{
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[state_at(a, n, i)] = state[n][i];
        }
    }
}

/* One chunk, whose operands are there or on their way; `next` is loaded meanwhile. */
template <typename T, bool DELTA, int COLS>
__device__ __forceinline__ void
take_chunk(state_tile &state, state_tiles<COLS> &tile, const recurrence_args &a, const head_part &h,
           const token_range &r, const token_range &next, int half, float skip)
{
    chunk_tile known = {}, out = {}, u = {};

    async_wait<1>();
    __syncthreads();
    read_state<DELTA>(known, out, state, tile.k[half], tile.q);
    bring_values<DELTA, COLS>(known, out, tile, half, skip);
    async_wait<0>();
    __syncthreads(); /* q and v may be overwritten, p and t are there */
    fetch_operands(tile, a, h, next, half ^ 1);
    if (DELTA) {
        multiply_tokens(u, known, tile.t);
        multiply_tokens(out, u, tile.p);
        fade_to_end(u, state, tile.factor[half]);
    } else {
        multiply_tokens(out, known, tile.p);
        fade_to_end(known, state, tile.factor[half]);
    }
    __syncthreads(); /* p and t may be overwritten */
    fetch_scores(tile, a, h, next);
    store_results<T>(out, a, h, r);
    add_to_state(state, DELTA ? u : known, tile.k[half]);
}

/* A sequence without a cache has zeros for results. */
template <typename T, int COLS>
__device__ __forceinline__ void store_zeros(const recurrence_args &a, const head_part &h,
                                            const state_span &p)
{
    T *out = (T *)a.out + h.head * a.value_dim + h.column;

    for (int i = threadIdx.x; i < p.n * COLS; i += blockDim.x) {
        out[(p.start + i / COLS) * a.out_stride + i % COLS] = from_float<T>(0.0f);
    }
}

/* Grid (head and part of its columns, sequence of those in chunks). A warp has 16
 * columns. */
template <typename T, bool DELTA, int COLS>
__global__ void __launch_bounds__(COLS * 2)
    chunk_states_kernel(recurrence_args a, step_arrays s, int32_t n_seqs)
{
    extern __shared__ __align__(16) char shared[];
    state_tiles<COLS> &tile = *(state_tiles<COLS> *)shared;

    pdl_release();
    int seq = find_sequence(blockIdx.y, n_seqs, [&](int i) {
                  return i < n_seqs && in_chunks(a, s, i) ? 1 : 0;
              }).x;
    head_part h = part_of<COLS>(a);
    pdl_wait();
    if (seq < 0) {
        return;
    }
    state_span p = span_of(a, s, seq, n_seqs);
    if (!p.cached) {
        store_zeros<T, COLS>(a, h, p);
        return;
    }
    token_range r = chunk_at(s, seq, 0);
    fetch_operands(tile, a, h, r, 0);
    fetch_scores(tile, a, h, r);
    state_tile state;
    load_state(state, a, p.from ? p.from + h.matrix : nullptr);
    float skip = a.d ? a.d[h.head] : 0.0f;
    int late = -1; /* the token whose state goes to the block read */
    for (int i = 0; r.n > 0; i++) {
        token_range next = chunk_at(s, seq, i + 1);
        take_chunk<T, DELTA, COLS>(state, tile, a, h, r, next, i & 1, skip);
        int last = r.start + r.n - 1, block = block_behind(s, last, p.start + p.n);
        float *to = a.states + block * a.block_stride;
        if (block >= 0) {
            keep_state(state, a, to + h.matrix);
        }
        if (block >= 0 && to == p.from) { /* its inputs are read for the tokens behind it */
            late = last;
        } else if (block >= 0) {
            keep_inputs<T>(a, p, last, to);
        }
        r = next;
    }
    if (late >= 0) {
        keep_inputs<T>(a, p, late, (float *)p.from);
    }
}

/* ---- launchers ---- */

template <bool DELTA, int COLS>
static void launch_states(const recurrence_args &a, const step_arrays &s, const recurrence_step &w,
                          cudaStream_t stream)
{
    dim3 grid(a.n_heads * (a.value_dim / COLS), w.n_long);

    launch(chunk_states_kernel<__nv_bfloat16, DELTA, COLS>, grid, dim3(COLS * 2),
           sizeof(state_tiles<COLS>), stream, a, s, w.n_seqs);
}

template <bool DELTA>
static void launch_width(const recurrence_args &a, const step_arrays &s, const recurrence_step &w,
                         cudaStream_t stream)
{
    int64_t narrow = (int64_t)w.n_long * a.n_heads * (a.value_dim / 32);

    if (a.value_dim % 64 != 0 || narrow <= cuda_multiprocessors()) {
        launch_states<DELTA, 32>(a, s, w, stream);
    } else {
        launch_states<DELTA, 64>(a, s, w, stream);
    }
}

extern "C" bool recurrence_chunks_prepare(void)
{
    return chunk_scores_prepare() &&
           allow_shared(chunk_states_kernel<__nv_bfloat16, true, 32>, sizeof(state_tiles<32>)) &&
           allow_shared(chunk_states_kernel<__nv_bfloat16, true, 64>, sizeof(state_tiles<64>)) &&
           allow_shared(chunk_states_kernel<__nv_bfloat16, false, 32>, sizeof(state_tiles<32>)) &&
           allow_shared(chunk_states_kernel<__nv_bfloat16, false, 64>, sizeof(state_tiles<64>));
}

extern "C" void launch_recurrence_chunks(const struct recurrence_args *a,
                                         const struct step_arrays *s,
                                         const struct recurrence_step *w, cudaStream_t stream)
{
    launch_chunk_scores(a, s, w, stream);
    if (a->delta) {
        launch_width<true>(*a, *s, *w, stream);
    } else {
        launch_width<false>(*a, *s, *w, stream);
    }
}
