/* Matrix products of at most 32 rows (decode): out [m, n] = act(x [m, k] w [n, k]^T + bias) + residual, bound by reading
 * the weights once.
 *
 * Weights go from memory straight into registers as operands of mma.sync: rows of w are its 16 rows, tokens its 8
 * columns. A matrix product may take the k of both operands in any common order, so a lane loads 16 contiguous bytes of
 * a row of w and of x and calls them what the instruction wants. One block a multiprocessor takes an equal range of w's
 * rows, its eight warps a slice of k each; they add up through shared memory once every 16 rows. Each lane keeps
 * 2 * DEPTH * 32 bytes in flight, across tile borders, and issues the first of them before the kernel before this one
 * is done: weights do not depend on it (programmatic dependent launch). The order of every sum depends on k alone, so a
 * row's result is the same whatever else is in the batch.
 */
#include "kernels/cuda/attn_common.cuh"

enum { STREAM_WARPS = 8, TILE_ROWS = 16, STEP_K = 32, DEPTH = 4 };

__device__ __forceinline__ uint4 load_weights(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* A lane's walk over its warp's slice of k, tile of rows after tile of rows. */
template <typename T> struct walk {
    const T *at;        /* row g of the tile, this lane's 8 columns of the next step */
    int step, n_steps;  /* of the slice */
    int row, end;       /* row g of the tile; end of the block's rows */
    int64_t next_tile;  /* elements from the end of one tile's slice to the start of the next one's */
    int64_t down;       /* elements to row g + 8 */
};

template <typename T> __device__ __forceinline__ void walk_load(walk<T> &w, uint4 (&a)[2])
{
    a[0] = w.row < w.end ? load_weights(w.at) : make_uint4(0, 0, 0, 0);
    a[1] = w.row + 8 < w.end ? load_weights(w.at + w.down) : make_uint4(0, 0, 0, 0);
    w.at += STEP_K;
    if (++w.step == w.n_steps) {
        w.step = 0;
        w.at += w.next_tile;
        w.row += TILE_ROWS;
    }
}

template <typename T, int NT>
__device__ __forceinline__ void stream_store(const stream_args &a, float v, int token, int row)
{
    if (a.bias)
        v += load_any(a.bias, a.bias_type, row);
    v = activate(v, a.act);
    if (a.residual)
        v += load_any(a.residual, a.out_type, token * a.residual_stride + row);
    store_any(a.out, a.out_type, token * a.out_stride + row, v);
}

template <typename T, int NT>
__global__ void __launch_bounds__(STREAM_WARPS * 32, 2) stream_kernel(stream_args a)
{
    __shared__ float part[2][STREAM_WARPS][NT * 8][TILE_ROWS + 1];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    int begin = (int)((int64_t)a.n * blockIdx.x / gridDim.x), end = (int)((int64_t)a.n * (blockIdx.x + 1) / gridDim.x);
    int steps = a.k / STEP_K, first = steps * warp / STREAM_WARPS, n_steps = steps * (warp + 1) / STREAM_WARPS - first;
    int tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS, total = tiles * n_steps;
    walk<T> w;
    w.at = (const T *)a.w + (int64_t)(begin + g) * a.k + first * STEP_K + t4 * 8;
    w.step = 0;
    w.n_steps = n_steps;
    w.row = begin + g;
    w.end = end;
    w.next_tile = (int64_t)TILE_ROWS * a.k - (int64_t)n_steps * STEP_K;
    w.down = (int64_t)8 * a.k;
    uint4 buffer[2][DEPTH][2];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            walk_load(w, buffer[h][i]);
    pdl_wait();
    pdl_release();

    const T *x[NT]; /* row g of each 8 tokens, this lane's columns of the slice's first step */
#pragma unroll
    for (int j = 0; j < NT; j++)
        x[j] = j * 8 + g < a.m ? (const T *)a.x + (int64_t)(j * 8 + g) * a.x_stride + first * STEP_K + t4 * 8 : nullptr;
    float acc[NT][4];
#pragma unroll
    for (int j = 0; j < NT; j++)
        acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
    int step = 0, tile = 0;
    for (int done = 0; done < total; done += 2 * DEPTH) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (done + h * DEPTH + i < total) {
                    uint4 (&wv)[2] = buffer[h][i];
                    uint32_t lo[4] = {wv[0].x, wv[1].x, wv[0].y, wv[1].y}, hi[4] = {wv[0].z, wv[1].z, wv[0].w, wv[1].w};
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        uint4 xv = make_uint4(0, 0, 0, 0);
                        if (x[j])
                            xv = *(const uint4 *)(x[j] + step * STEP_K);
                        mma16816<T>(acc[j], lo, xv.x, xv.y);
                        mma16816<T>(acc[j], hi, xv.z, xv.w);
                    }
                    walk_load(w, wv);
                    if (++step == n_steps) { /* the tile is done in this slice of k: add the slices up */
                        float (&mine)[NT * 8][TILE_ROWS + 1] = part[tile & 1][warp];
#pragma unroll
                        for (int j = 0; j < NT; j++)
#pragma unroll
                            for (int e = 0; e < 4; e++) {
                                mine[j * 8 + t4 * 2 + (e & 1)][g + (e >> 1) * 8] = acc[j][e];
                                acc[j][e] = 0.0f;
                            }
                        __syncthreads();
                        for (int o = threadIdx.x; o < a.m * TILE_ROWS; o += STREAM_WARPS * 32) {
                            int token = o / TILE_ROWS, r = o % TILE_ROWS, row = begin + tile * TILE_ROWS + r;
                            float v = 0.0f;
#pragma unroll
                            for (int k = 0; k < STREAM_WARPS; k++)
                                v += part[tile & 1][k][token][r];
                            if (row < end)
                                stream_store<T, NT>(a, v, token, row);
                        }
                        step = 0;
                        tile++;
                    }
                }
            }
    }
}

template <typename T> static void stream_dispatch(const stream_args *a, int blocks, cudaStream_t stream)
{
    dim3 grid(blocks), block(STREAM_WARPS * 32);
    if (a->m <= 8)
        launch(stream_kernel<T, 1>, grid, block, 0, stream, *a);
    else if (a->m <= 16)
        launch(stream_kernel<T, 2>, grid, block, 0, stream, *a);
    else
        launch(stream_kernel<T, 4>, grid, block, 0, stream, *a);
}

extern "C" bool launch_stream(const struct stream_args *a, int32_t n_sms, cudaStream_t stream)
{
    bool fits = a->m >= 1 && a->m <= STREAM_MAX_ROWS && a->k % STEP_K == 0 && a->k >= STREAM_WARPS * STEP_K && a->x_stride % 8 == 0 &&
                (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->w % 16 == 0 && (a->type == T_F16 || a->type == T_BF16);
    if (!fits)
        return false;
    int blocks = a->n / TILE_ROWS < n_sms ? (a->n + TILE_ROWS - 1) / TILE_ROWS : n_sms;
    if (a->type == T_F16)
        stream_dispatch<__half>(a, blocks, stream);
    else
        stream_dispatch<__nv_bfloat16>(a, blocks, stream);
    return true;
}
