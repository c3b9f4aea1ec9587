/* The products of a chunk's tokens with each other: P and, of the delta rule, T B
 * (chunk_states.cu). */
#include "kernels/cuda/states/chunks.cuh"

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

/* By a warp: the inverses of both 16 x 16 blocks of I + A on the diagonal, a lane for
 * each column. */
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

/* By the block: the 16 x 16 blocks x and z of T on the diagonal are there; that below
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

extern "C" bool chunk_scores_prepare(void)
{
    return allow_shared(chunk_scores_kernel, sizeof(score_tiles));
}

extern "C" void launch_chunk_scores(const struct recurrence_args *a, const struct step_arrays *s,
                                    const struct recurrence_step *w, cudaStream_t stream)
{
    int parts = (a->n_heads / a->n_groups + SCORE_HEADS - 1) / SCORE_HEADS;

    launch(chunk_scores_kernel, dim3(w->n_chunks, a->n_groups * parts), dim3(SCORE_THREADS),
           sizeof(score_tiles), stream, *a, *s, w->n_seqs);
}
