/* Prefill of recurrences with matrices in chunks, on tensor cores: the gated delta rule
 * in its WY form (Yang, Kautz and Hatamizadeh 2024, section 3.3) and Mamba-2 (Dao and Gu
 * 2024, section 6).
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
 * A first launch, of a block for each chunk and some heads, makes P and T B; the inverse
 * is float32. In a second one a warp has 16 columns of a head's matrix, transposed, in
 * the accumulators of its products, and takes the chunks in order: each accumulator is
 * the next product's left operand, so the columns know nothing of each other and warps
 * of no other. Operands are tf32, sums and the state float32.
 *
 * Chunks end at whole numbers of STATE_CHUNK tokens of a state's block and at its end,
 * so that the state behind a block's last token is there to be kept. The chunk that a
 * token is in thus follows from its position, but where a step ends inside one the bits
 * behind it are others; `deterministic` takes token after token. */
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

/* Where P, of `which` 0, or T B of a head lie behind a token: [C] each, their columns as
 * by tf32_place. */
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

/* ---- inside a chunk ---- */

enum { SCORE_THREADS = 128, SCORE_HEADS = 4 }; /* heads of a block, at most */

struct score_tiles {
    float q[C][KEY_ROW], k[C][KEY_ROW];
    float qk[C][CHUNK_ROW], kk[C][CHUNK_ROW]; /* products of tokens */
    float a[C][CHUNK_ROW];                    /* A, then T */
    float sum[C], rate[C];                    /* G, b */
};

/* 16 rows and 16 columns of the products, by a warp each; of the delta rule in two
 * turns. */
__device__ __forceinline__ void score_products(score_tiles &tile, bool delta)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int row = (warp >> 1) * 16, column = (warp & 1) * 16;

    for (int turn = 0; turn < (delta ? 2 : 1); turn++) {
        const float(*left)[KEY_ROW] = turn == 0 ? tile.q : tile.k;
        float(*to)[CHUNK_ROW] = turn == 0 ? tile.qk : tile.kk, sum[2][4] = {};
#pragma unroll 4
        for (int k = 0; k < KEYS; k += 16) {
            uint32_t x0[4], x1[4];
            ldmatrix_x4(x0, tile_address<KEY_ROW, true>(left, row, k));
            ldmatrix_x4(x1, tile_address<KEY_ROW, true>(left, row, k + 8));
#pragma unroll
            for (int n = 0; n < 2; n++) {
                uint32_t y[4];
                ldmatrix_x4(y, tile_address<KEY_ROW, false>(tile.k, column + n * 8, k));
                mma1688(sum[n], x0, y[0], y[1]);
                mma1688(sum[n], x1, y[2], y[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            int c = column + n * 8 + (lane & 3) * 2;
            *(float2 *)&to[row + (lane >> 2)][c] = make_float2(sum[n][0], sum[n][1]);
            *(float2 *)&to[row + 8 + (lane >> 2)][c] = make_float2(sum[n][2], sum[n][3]);
        }
    }
}

/* By warp 0: G and b of a head, which stay in factors for the second launch. */
__device__ __forceinline__ void score_factors(score_tiles &tile, const recurrence_args &a,
                                              const token_range &r, int head)
{
    int t = threadIdx.x;
    float2 *at = (float2 *)a.factors + (int64_t)(r.start + t) * a.n_heads + head;
    float2 f = t < r.n ? *at : make_float2(0.0f, 0.0f);

    for (int i = 1; i < C; i *= 2) {
        float below = __shfl_up_sync(0xffffffffu, f.x, i);
        f.x += t >= i ? below : 0.0f;
    }
    tile.sum[t] = f.x;
    tile.rate[t] = f.y;
    if (t < r.n) {
        *at = f;
    }
}

/* A thread's eight columns of a row of a head's P, and of A. */
__device__ __forceinline__ void score_rows(score_tiles &tile, const recurrence_args &a,
                                           const token_range &r, int head)
{
    int t = threadIdx.x >> 2, first = (threadIdx.x & 3) * 8;
    float p[8];

#pragma unroll
    for (int i = 0; i < 8; i++) {
        int j = first + i;
        float fade = j <= t ? expf(tile.sum[t] - tile.sum[j]) : 0.0f;
        p[tf32_place(i)] = tf32_of(fade * tile.qk[t][j]);
        if (a.delta) {
            tile.a[t][j] = j < t ? fade * tile.rate[t] * tile.kk[t][j] : 0.0f;
        }
    }
    if (t < r.n) {
        float4 *to = (float4 *)(chunk_row(a, r.start + t, head, 0) + first);
        to[0] = make_float4(p[0], p[1], p[2], p[3]);
        to[1] = make_float4(p[4], p[5], p[6], p[7]);
    }
}

/* By a warp: the inverses of both 16 x 16 blocks of I + A on the diagonal, a column a
 * lane. */
__device__ __forceinline__ void invert_diagonal(float (*a)[CHUNK_ROW])
{
    int base = threadIdx.x & 16, column = threadIdx.x & 15;
    float x[16];

#pragma unroll
    for (int t = 0; t < 16; t++) {
        float even = t == column ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
        for (int i = 0; i < t; i++) {
            float y = a[base + t][base + i] * x[i];
            if (i & 1) {
                odd -= y;
            } else {
                even -= y;
            }
        }
        x[t] = even + odd;
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < 16; t++) {
        a[base + t][base + column] = x[t];
    }
}

/* By the block: the 16 x 16 blocks x and z of T on the diagonal are there; the one below
 * them becomes -z a x. */
__device__ __forceinline__ void invert_below(float (*a)[CHUNK_ROW])
{
    int row = 16 + (threadIdx.x >> 3), column = (threadIdx.x & 7) * 2;

#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float left = turn == 0 ? a[row][i] : -a[row][16 + i];
            float2 right = *(float2 *)&a[turn == 0 ? i : 16 + i][column];
            sum.x += left * right.x;
            sum.y += left * right.y;
        }
        __syncthreads();
        *(float2 *)&a[row][column] = sum;
        __syncthreads();
    }
}

/* A thread's eight columns of a row of T B. */
__device__ __forceinline__ void score_inverse(const score_tiles &tile, const recurrence_args &a,
                                              const token_range &r, int head)
{
    int t = threadIdx.x >> 2, first = (threadIdx.x & 3) * 8;
    float x[8];

    if (t >= r.n) {
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[tf32_place(i)] = tf32_of(tile.a[t][first + i] * tile.rate[first + i]);
    }
    float4 *to = (float4 *)(chunk_row(a, r.start + t, head, 1) + first);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
}

/* Grid (chunk, group and part of its heads). */
__global__ void __launch_bounds__(SCORE_THREADS)
    chunk_scores_kernel(recurrence_args a, step_arrays s, int32_t n_seqs)
{
    extern __shared__ __align__(16) char shared[];
    score_tiles &tile = *(score_tiles *)shared;

    pdl_release();
    int group = blockIdx.y % a.n_groups, each = a.n_heads / a.n_groups;
    int first = blockIdx.y / a.n_groups * SCORE_HEADS, end = min(first + SCORE_HEADS, each);
    int2 at =
        find_sequence(blockIdx.x, n_seqs, [&](int seq) { return n_chunks_of(a, s, seq, n_seqs); });
    token_range r = at.x >= 0 ? chunk_at(s, at.x, at.y) : token_range{0, 0, 0};
    pdl_wait();
    if (r.n == 0 || s.slot[r.start] < 0) {
        return;
    }
    fetch_keys(tile.q, a, first_key(a, false) + group * KEYS, r.start, r.n);
    fetch_keys(tile.k, a, first_key(a, true) + group * KEYS, r.start, r.n);
    async_commit();
    async_wait<0>();
    __syncthreads();
    score_products(tile, a.delta);
    for (int i = first; i < end; i++) {
        int head = a.tiled ? i * a.n_groups + group : group * each + i;
        if (threadIdx.x < 32) {
            score_factors(tile, a, r, head);
        }
        __syncthreads();
        score_rows(tile, a, r, head);
        if (a.delta) {
            __syncthreads();
            if (threadIdx.x < 32) {
                invert_diagonal(tile.a);
            }
            __syncthreads();
            invert_below(tile.a);
            score_inverse(tile, a, r, head);
        }
        __syncthreads();
    }
}

/* ---- from chunk to chunk ---- */

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
            async_copy_pair((uint32_t)__cvta_generic_to_shared(&to.factor[half][threadIdx.x]),
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
static void launch_chunks_of(const recurrence_args &a, const step_arrays &s,
                             const recurrence_step &w, cudaStream_t stream)
{
    int parts = (a.n_heads / a.n_groups + SCORE_HEADS - 1) / SCORE_HEADS;
    int64_t narrow = (int64_t)w.n_long * a.n_heads * (a.value_dim / 32);

    launch(chunk_scores_kernel, dim3(w.n_chunks, a.n_groups * parts), dim3(SCORE_THREADS),
           sizeof(score_tiles), stream, a, s, w.n_seqs);
    if (a.value_dim % 64 != 0 || narrow <= cuda_multiprocessors()) {
        launch_states<DELTA, 32>(a, s, w, stream);
    } else {
        launch_states<DELTA, 64>(a, s, w, stream);
    }
}

extern "C" bool recurrence_chunks_prepare(void)
{
    return allow_shared(chunk_scores_kernel, sizeof(score_tiles)) &&
           allow_shared(chunk_states_kernel<__nv_bfloat16, true, 32>, sizeof(state_tiles<32>)) &&
           allow_shared(chunk_states_kernel<__nv_bfloat16, true, 64>, sizeof(state_tiles<64>)) &&
           allow_shared(chunk_states_kernel<__nv_bfloat16, false, 32>, sizeof(state_tiles<32>)) &&
           allow_shared(chunk_states_kernel<__nv_bfloat16, false, 64>, sizeof(state_tiles<64>));
}

extern "C" void launch_recurrence_chunks(const struct recurrence_args *a,
                                         const struct step_arrays *s,
                                         const struct recurrence_step *w, cudaStream_t stream)
{
    if (a->delta) {
        launch_chunks_of<true>(*a, *s, *w, stream);
    } else {
        launch_chunks_of<false>(*a, *s, *w, stream);
    }
}
