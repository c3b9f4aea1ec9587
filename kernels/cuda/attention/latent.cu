/* Multi-head latent attention, for any shape and type: the cache write, products by
 * head, and attention with one warp per (token, head). latent_mma.cu has the fast
 * attention.
 *
 * The cache of latents has no panels: [block][layer][token][latent + rot_dim]. */
#include "kernels/cuda/attention/latent.cuh"
#include "kernels/cuda/attention/latent.h"

enum { KV_THREADS = 128, PLAIN_WARPS = 4, PLAIN_MAX_PER_LANE = 64 }; /* latents up to 2048 */

/* ---- norm, rotation, cache write ---- */

/* Rotates pair i of the rotated part at x; a copy goes to `cache` unless it is NULL. */
template <typename T>
__device__ __forceinline__ void rotate_dims(T *x, T *cache, int i, const latent_kv_args &a,
                                            const float *angles)
{
    int half = a.rot_dim / 2, p = a.interleaved ? 2 * i : i, q = a.interleaved ? p + 1 : i + half;
    float c = angles[i], s = angles[half + i], low = to_float(x[p]), high = to_float(x[q]);

    x[p] = from_float<T>(low * c - high * s);
    x[q] = from_float<T>(high * c + low * s);
    if (cache) {
        cache[p] = x[p];
        cache[q] = x[q];
    }
}

/* Grid (token, parts): part 0 norms and rotates the latent, the others share the query
 * heads. */
template <typename T>
__global__ void __launch_bounds__(KV_THREADS)
    latent_kv_kernel(latent_kv_args a, const int32_t *position, const int32_t *slot)
{
    __shared__ float sums[33];

    pdl_release();
    pdl_wait();
    int token = blockIdx.x, half = a.rot_dim / 2, width = a.nope_dim + a.rot_dim;
    const float *angles = a.cos_sin + position[token] * a.cos_sin_stride;
    if (blockIdx.y > 0) {
        T *q = (T *)a.q + token * a.q_stride + a.nope_dim;
        for (int i = (blockIdx.y - 1) * KV_THREADS + threadIdx.x; i < a.n_heads * half;
             i += (gridDim.y - 1) * KV_THREADS) {
            rotate_dims<T>(q + (int64_t)(i / half) * width, nullptr, i % half, a, angles);
        }
        return;
    }
    T *x = (T *)a.kv + token * a.kv_stride, *cache = nullptr;
    int at = slot[token];
    if (at >= 0) {
        cache = (T *)a.view.base + at / a.view.block_size * a.view.block_stride +
                a.layer * a.view.layer_stride + (int64_t)(at % a.view.block_size) * a.view.head_dim;
    }
    float squares = 0.0f;
    for (int i = threadIdx.x; i < a.latent; i += KV_THREADS) {
        float f = to_float(x[i]);
        squares += f * f;
    }
    float scale = rsqrtf(block_sum(squares, sums) / a.latent + a.norm.eps);
    for (int i = threadIdx.x; i < a.latent; i += KV_THREADS) {
        float w = load_any(a.norm.weight, a.norm.weight_type, i) + a.norm.weight_offset;
        T y = from_float<T>(to_float(x[i]) * scale * w);
        x[i] = y;
        if (cache) {
            cache[i] = y;
        }
    }
    for (int i = threadIdx.x; i < half; i += KV_THREADS) {
        rotate_dims<T>(x + a.latent, cache ? cache + a.latent : nullptr, i, a, angles);
    }
}

extern "C" void launch_latent_kv(const struct latent_kv_args *a, const struct step_arrays *s,
                                 int32_t rows, cudaStream_t stream)
{
    int pairs = a->n_heads * a->rot_dim / 2, parts = (pairs + KV_THREADS - 1) / KV_THREADS;

    DISPATCH_TYPE(a->view.dtype,
                  launch(latent_kv_kernel<T>, dim3(rows, 1 + (parts < 16 ? parts : 16)),
                         dim3(KV_THREADS), 0, stream, *a, s->position, s->slot));
}

/* ---- products by head ---- */

enum { HEAD_WARPS = 4, HEAD_OUTPUTS = 64 };

/* Grid (row, head, 64 outputs): one warp per output. */
template <typename T>
__global__ void __launch_bounds__(HEAD_WARPS * 32) head_linear_plain_kernel(head_linear_args a)
{
    pdl_release();
    pdl_wait();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y;
    const T *x = (const T *)a.x + blockIdx.x * a.x_stride + (int64_t)head * a.x_head;
    T *out = (T *)a.out + blockIdx.x * a.out_stride + (int64_t)head * a.out_head;
    int end = min(a.n, (int)(blockIdx.z + 1) * HEAD_OUTPUTS);
    for (int o = blockIdx.z * HEAD_OUTPUTS + warp; o < end; o += HEAD_WARPS) {
        const T *w = (const T *)a.w + ((int64_t)head * a.n + o) * a.w_stride;
        float sum = 0.0f;
        for (int i = lane; i < a.k; i += 32) {
            sum += to_float(x[i]) * to_float(w[i]);
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            out[o] = from_float<T>(sum);
        }
    }
}

/* Grid (64 outputs, head, 16 rows): each warp multiplies 16 rows with 16 outputs. Rows
 * past the end repeat the last one. */
template <typename T>
__global__ void __launch_bounds__(HEAD_WARPS * 32) head_linear_mma_kernel(head_linear_args a)
{
    pdl_release();
    pdl_wait();
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, head = blockIdx.y;
    int o = blockIdx.x * HEAD_OUTPUTS + (threadIdx.x >> 5) * 16, row = blockIdx.z * 16 + g;
    if (o >= a.n) {
        return;
    }
    const T *x0 = (const T *)a.x + (int64_t)min(row, a.rows - 1) * a.x_stride +
                  (int64_t)head * a.x_head + t * 2;
    const T *x1 = (const T *)a.x + (int64_t)min(row + 8, a.rows - 1) * a.x_stride +
                  (int64_t)head * a.x_head + t * 2;
    const T *w0 = (const T *)a.w + ((int64_t)head * a.n + o + g) * a.w_stride + t * 2;
    const T *w1 = w0 + 8 * a.w_stride;
    float c0[4] = {}, c1[4] = {};
#pragma unroll 4
    for (int k = 0; k < a.k; k += 16) {
        uint32_t x[4] = {*(const uint32_t *)(x0 + k), *(const uint32_t *)(x1 + k),
                         *(const uint32_t *)(x0 + k + 8), *(const uint32_t *)(x1 + k + 8)};
        mma16816<T>(c0, x, *(const uint32_t *)(w0 + k), *(const uint32_t *)(w0 + k + 8));
        mma16816<T>(c1, x, *(const uint32_t *)(w1 + k), *(const uint32_t *)(w1 + k + 8));
    }
    for (int i = 0; i < 2; i++) {
        if (row + 8 * i < a.rows) {
            T *out = (T *)a.out + (row + 8 * i) * a.out_stride + (int64_t)head * a.out_head + o;
            *(uint32_t *)(out + t * 2) = pack2<T>(c0[2 * i], c0[2 * i + 1]);
            *(uint32_t *)(out + 8 + t * 2) = pack2<T>(c1[2 * i], c1[2 * i + 1]);
        }
    }
}

enum {
    FEW_ROWS = 8, /* a tile's */
    FEW_TILES = 4,
    FEW_OUTPUTS = 16,
    FEW_GROUPS = 4,
    FEW_STEP = HEAD_WARPS * 32,
    FEW_DEPTH = FEW_GROUPS * FEW_STEP
};

/* Of k of up to FEW_DEPTH. Grid (16 outputs, head, TILES tiles of 8 rows): the warps
 * divide the depth, in groups of 32 columns of which a lane has 8 neighbours. All
 * weights are on their way before the wait. Rows past the end repeat the last one. */
template <typename T, int TILES>
__global__ void __launch_bounds__(HEAD_WARPS * 32) head_linear_few_kernel(head_linear_args a)
{
    __shared__ float4 sums[TILES][HEAD_WARPS][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, head = blockIdx.y;
    int first = warp * 32 + (lane & 3) * 8, o = blockIdx.x * FEW_OUTPUTS,
        top = blockIdx.z * TILES * FEW_ROWS;
    const T *w = (const T *)a.w + ((int64_t)head * a.n + o + g) * a.w_stride + first;
    const T *x = (const T *)a.x + (int64_t)head * a.x_head + first;
    uint4 low[FEW_GROUPS] = {}, high[FEW_GROUPS] = {}, v[TILES][FEW_GROUPS] = {};

#pragma unroll
    for (int i = 0; i < FEW_GROUPS; i++) {
        if (first + i * FEW_STEP < a.k) {
            low[i] = __ldg((const uint4 *)(w + i * FEW_STEP));
            high[i] = __ldg((const uint4 *)(w + 8 * a.w_stride + i * FEW_STEP));
        }
    }
    pdl_release();
    pdl_wait();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const T *from = x + min(top + t * FEW_ROWS + g, a.rows - 1) * a.x_stride;
#pragma unroll
        for (int i = 0; i < FEW_GROUPS; i++) {
            if (first + i * FEW_STEP < a.k) {
                v[t][i] = __ldcg((const uint4 *)(from + i * FEW_STEP));
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int i = 0; i < FEW_GROUPS; i++) {
            uint32_t one[4] = {low[i].x, high[i].x, low[i].y, high[i].y},
                     two[4] = {low[i].z, high[i].z, low[i].w, high[i].w};
            mma16816<T>(even, one, v[t][i].x, v[t][i].y);
            mma16816<T>(odd, two, v[t][i].z, v[t][i].w);
        }
        sums[t][warp][lane] =
            make_float4(even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]);
    }
    __syncthreads();
    if (warp >= TILES) {
        return;
    }
    float all[4] = {};
#pragma unroll
    for (int i = 0; i < HEAD_WARPS; i++) {
        float4 s = sums[warp][i][lane];
        all[0] += s.x;
        all[1] += s.y;
        all[2] += s.z;
        all[3] += s.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = top + warp * FEW_ROWS + (lane & 3) * 2 + (i & 1);
        if (row < a.rows) {
            T *out = (T *)a.out + row * a.out_stride + (int64_t)head * a.out_head;
            out[o + g + i / 2 * 8] = from_float<T>(all[i]);
        }
    }
}
static_assert((int)FEW_TILES <= (int)HEAD_WARPS, "a warp adds up a tile");

template <typename T> static void launch_few(const head_linear_args &a, cudaStream_t stream)
{
    int rows = a.rows <= FEW_ROWS ? FEW_ROWS : FEW_ROWS * FEW_TILES;
    dim3 grid(a.n / FEW_OUTPUTS, a.n_heads, (a.rows + rows - 1) / rows), block(HEAD_WARPS * 32);

    if (rows == FEW_ROWS) {
        launch(head_linear_few_kernel<T, 1>, grid, block, 0, stream, a);
    } else {
        launch(head_linear_few_kernel<T, FEW_TILES>, grid, block, 0, stream, a);
    }
}

/* Whether the operands come in vectors of 16 bytes. */
static bool few_fits(const head_linear_args *a, int type)
{
    return type != T_F32 && a->k <= FEW_DEPTH && a->k % 32 == 0 && a->n % FEW_OUTPUTS == 0 &&
           (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->w % 16 == 0 && a->x_stride % 8 == 0 &&
           a->x_head % 8 == 0 && a->w_stride % 8 == 0;
}

extern "C" bool launch_head_linear_few(const struct head_linear_args *a, int type,
                                       cudaStream_t stream)
{
    bool fits = few_fits(a, type);

    if (fits && type == T_BF16) {
        launch_few<__nv_bfloat16>(*a, stream);
    } else if (fits) {
        launch_few<__half>(*a, stream);
    }
    return fits;
}

template <typename T> static void launch_head_linear_mma(const head_linear_args &a, cudaStream_t s)
{
    launch(head_linear_mma_kernel<T>,
           dim3((a.n + HEAD_OUTPUTS - 1) / HEAD_OUTPUTS, a.n_heads, (a.rows + 15) / 16),
           dim3(HEAD_WARPS * 32), 0, s, a);
}

static bool even(const void *p, int64_t stride, int64_t head)
{
    return (uintptr_t)p % 4 == 0 && stride % 2 == 0 && head % 2 == 0;
}

extern "C" void launch_head_linear(const struct head_linear_args *a, int type, cudaStream_t stream)
{
    bool fits = a->n % 16 == 0 && a->k % 16 == 0 && even(a->x, a->x_stride, a->x_head) &&
                even(a->out, a->out_stride, a->out_head) && even(a->w, a->w_stride, 0);

    if (fits && type == T_BF16) {
        launch_head_linear_mma<__nv_bfloat16>(*a, stream);
    } else if (fits && type == T_F16) {
        launch_head_linear_mma<__half>(*a, stream);
    } else {
        DISPATCH_TYPE(type,
                      launch(head_linear_plain_kernel<T>,
                             dim3(a->rows, a->n_heads, (a->n + HEAD_OUTPUTS - 1) / HEAD_OUTPUTS),
                             dim3(HEAD_WARPS * 32), 0, stream, *a));
    }
}

/* ---- attention ---- */

template <typename T>
__global__ void __launch_bounds__(PLAIN_WARPS * 32)
    latent_plain_kernel(latent_args a, step_arrays s, int32_t first_seq, int32_t n_seqs)
{
    extern __shared__ float shared_q[]; /* [PLAIN_WARPS][latent + rot_dim] */

    pdl_release();
    pdl_wait();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, width = a.latent + a.rot_dim;
    int token = a.first + blockIdx.x, head = blockIdx.y * PLAIN_WARPS + warp;
    if (head >= a.n_heads) {
        return;
    }
    int seq = sequence_of(s, token, first_seq, n_seqs);
    int n_keys = s.kv_len[seq] - (s.q_start[seq + 1] - token) + 1;
    const T *q = (const T *)a.q + blockIdx.x * a.q_stride + (int64_t)head * width;
    T *out = (T *)a.sum + blockIdx.x * a.sum_stride + (int64_t)head * a.latent;
    float *my_q = shared_q + warp * width;
    const T *tail = (const T *)a.tail + blockIdx.x * a.tail_stride + (int64_t)head * a.tail_head;
    for (int i = lane; i < width; i += 32) {
        my_q[i] = to_float(i < a.latent ? q[i] : tail[i - a.latent]);
    }
    __syncwarp();
    const T *keys = (const T *)a.kv.base + a.layer * a.kv.layer_stride;
    const int32_t *table = s.table + (int64_t)s.row[seq] * s.table_width;
    float best = -INFINITY, sum = 0.0f, acc[PLAIN_MAX_PER_LANE] = {};
    for (int first = 0; first < n_keys; first += 32) {
        int t = first + lane;
        float score = -INFINITY;
        if (t < n_keys) {
            const T *k = keys + table[t / a.kv.block_size] * a.kv.block_stride +
                         (int64_t)(t % a.kv.block_size) * width;
            float dot = 0.0f;
            for (int i = 0; i < width; i++) {
                dot += my_q[i] * to_float(k[i]);
            }
            score = dot * a.scale;
        }
        float new_best = fmaxf(best, warp_max(score));
        float p = t < n_keys ? expf(score - new_best) : 0.0f, keep = expf(best - new_best);
        best = new_best;
        sum = sum * keep + warp_sum(p);
#pragma unroll
        for (int j = 0; j < PLAIN_MAX_PER_LANE; j++) {
            acc[j] *= keep;
        }
        int n = min(32, n_keys - first);
        for (int j = 0; j < n; j++) {
            float pj = __shfl_sync(0xffffffffu, p, j);
            const T *k = keys + table[(first + j) / a.kv.block_size] * a.kv.block_stride +
                         (int64_t)((first + j) % a.kv.block_size) * width;
#pragma unroll
            for (int i = 0; i < PLAIN_MAX_PER_LANE; i++) {
                if (i * 32 + lane < a.latent) {
                    acc[i] += pj * to_float(k[i * 32 + lane]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < PLAIN_MAX_PER_LANE; i++) {
        if (i * 32 + lane < a.latent) {
            out[i * 32 + lane] = from_float<T>(n_keys > 0 ? acc[i] / sum : 0.0f);
        }
    }
}

extern "C" void launch_latent_plain(const struct latent_args *a, const struct step_arrays *s,
                                    int32_t first_seq, int32_t n_seqs, int32_t n_tokens,
                                    cudaStream_t stream)
{
    size_t shared = PLAIN_WARPS * (size_t)(a->latent + a->rot_dim) * sizeof(float);

    DISPATCH_TYPE(a->kv.dtype,
                  launch(latent_plain_kernel<T>,
                         dim3(n_tokens, (a->n_heads + PLAIN_WARPS - 1) / PLAIN_WARPS),
                         dim3(PLAIN_WARPS * 32), shared, stream, *a, *s, first_seq, n_seqs));
}
