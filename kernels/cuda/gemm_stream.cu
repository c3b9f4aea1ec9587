/* Matrix products of at most 16 rows (decode): out [m, n] = act(x [m, k] w [n, k]^T + bias) + residual, bound by reading
 * the weights once.
 *
 * One block a multiprocessor takes an equal range of w's rows, its four warps a slice of k each; they add up through
 * shared memory once every 16 rows. A warp keeps a ring of its own full of bulk copies, 16 rows by up to 256 columns a
 * stage, across tile borders; its lane 0 to 15 fetch a row each, no other warp is waited for. Rows of w are the 16 rows of
 * mma.sync, tokens its 8 columns; a product may take the k of both operands in any common order, so a lane reads 16
 * contiguous bytes of a row of w and of x and calls them what the instruction wants. Two blocks fit a multiprocessor:
 * the next product fills its rings while this one ends, because weights do not depend on it (programmatic dependent
 * launch). The order of every sum depends on k alone, so a row's result is the same whatever else is in the batch.
 */
#include "kernels/cuda/attn_common.cuh"

enum {
    STREAM_WARPS = 4,
    TILE_ROWS = 16,
    STEP_K = 32,
    STAGE_STEPS = 8,
    STREAM_STAGES = 3,
    ROW_PITCH = STAGE_STEPS * STEP_K * 2 + 64, /* bytes; eight lanes' 16 bytes fall into different banks */
    STAGE_BYTES = TILE_ROWS * ROW_PITCH,
    RING_BYTES = STREAM_WARPS * STREAM_STAGES * STAGE_BYTES,
};

/* A warp's walk over its slice of k, tile of rows after tile of rows, a stage at a time. */
struct walk {
    int step, n_steps; /* of the slice, in STEP_K columns */
    int row, end;      /* first row of the tile; end of the block's rows */
};

__device__ __forceinline__ int walk_steps(const walk &w) { return min(STAGE_STEPS, w.n_steps - w.step); }

__device__ __forceinline__ void walk_advance(walk &w)
{
    w.step += STAGE_STEPS;
    if (w.step >= w.n_steps) {
        w.step = 0;
        w.row += TILE_ROWS;
    }
}

/* Bring a stage in: `slice` is row 0, first column of the warp's slice. */
template <typename T>
__device__ __forceinline__ void walk_fetch(walk &w, const T *slice, int64_t k, uint32_t to, uint32_t bar, int lane)
{
    if (w.row >= w.end)
        return;
    int rows = min(TILE_ROWS, w.end - w.row), bytes = walk_steps(w) * STEP_K * (int)sizeof(T);
    if (lane == 0)
        barrier_expect(bar, rows * bytes);
    __syncwarp();
    if (lane < rows)
        bulk_copy(to + lane * ROW_PITCH, slice + (w.row + lane) * k + w.step * STEP_K, bytes, bar);
    walk_advance(w);
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

template <typename T, int NT> struct stream_layout {
    static constexpr int PART = STREAM_WARPS * NT * 8 * (TILE_ROWS + 1) * 4;
    static constexpr int BYTES = RING_BYTES + PART + STREAM_WARPS * STREAM_STAGES * 8;
};

template <typename T, int NT>
__global__ void __launch_bounds__(STREAM_WARPS * 32, 2) stream_kernel(stream_args a)
{
    extern __shared__ __align__(128) char shared[];
    float (*part)[NT * 8][TILE_ROWS + 1] = (float (*)[NT * 8][TILE_ROWS + 1])(shared + RING_BYTES);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    uint32_t ring = shared_address(shared) + warp * STREAM_STAGES * STAGE_BYTES;
    uint32_t bars = shared_address(shared) + RING_BYTES + stream_layout<T, NT>::PART + warp * STREAM_STAGES * 8;
    if (lane == 0) {
        for (int i = 0; i < STREAM_STAGES; i++)
            barrier_init(bars + i * 8, 1);
        barrier_init_fence();
    }
    __syncwarp();
    int begin = (int)((int64_t)a.n * blockIdx.x / gridDim.x), end = (int)((int64_t)a.n * (blockIdx.x + 1) / gridDim.x);
    int steps = a.k / STEP_K, first = steps * warp / STREAM_WARPS, n_steps = steps * (warp + 1) / STREAM_WARPS - first;
    const T *slice = (const T *)a.w + first * STEP_K;
    walk ahead = {0, n_steps, begin, end}, w = ahead;
    for (int i = 0; i < STREAM_STAGES; i++)
        walk_fetch(ahead, slice, (int64_t)a.k, ring + i * STAGE_BYTES, bars + i * 8, lane);
    pdl_wait();
    pdl_release();

    const T *x = (const T *)a.x + (int64_t)g * a.x_stride + first * STEP_K + t4 * 8;
    float acc[NT][4];
#pragma unroll
    for (int j = 0; j < NT; j++)
        acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
    for (int turn = 0; w.row < end; turn++) {
        int stage = turn % STREAM_STAGES, count = walk_steps(w);
        uint4 xv[STAGE_STEPS][NT];
#pragma unroll
        for (int i = 0; i < STAGE_STEPS; i++)
#pragma unroll
            for (int j = 0; j < NT; j++) {
                xv[i][j] = make_uint4(0, 0, 0, 0);
                if (i < count && j * 8 + g < a.m)
                    xv[i][j] = *(const uint4 *)(x + j * 8 * a.x_stride + (w.step + i) * STEP_K);
            }
        barrier_wait(bars + stage * 8, turn / STREAM_STAGES & 1);
        const char *rows = shared + (warp * STREAM_STAGES + stage) * STAGE_BYTES + g * ROW_PITCH + t4 * 16;
#pragma unroll
        for (int i = 0; i < STAGE_STEPS; i++) {
            if (i >= count)
                break;
            /* rows past the block's last hold leftovers; what they give is not stored */
            uint4 upper = *(const uint4 *)(rows + i * 64), lower = *(const uint4 *)(rows + 8 * ROW_PITCH + i * 64);
            uint32_t lo[4] = {upper.x, lower.x, upper.y, lower.y}, hi[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
            for (int j = 0; j < NT; j++) {
                mma16816<T>(acc[j], lo, xv[i][j].x, xv[i][j].y);
                mma16816<T>(acc[j], hi, xv[i][j].z, xv[i][j].w);
            }
        }
        __syncwarp();
        walk_fetch(ahead, slice, (int64_t)a.k, ring + stage * STAGE_BYTES, bars + stage * 8, lane);
        int row0 = w.row;
        walk_advance(w);
        if (w.row == row0)
            continue;
        /* the tile is done in this slice of k: add the slices up */
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                part[warp][j * 8 + t4 * 2 + (e & 1)][g + (e >> 1) * 8] = acc[j][e];
                acc[j][e] = 0.0f;
            }
        __syncthreads();
        for (int o = threadIdx.x; o < a.m * TILE_ROWS; o += STREAM_WARPS * 32) {
            int token = o / TILE_ROWS, r = o % TILE_ROWS;
            float v = 0.0f;
#pragma unroll
            for (int k = 0; k < STREAM_WARPS; k++)
                v += part[k][token][r];
            if (row0 + r < end)
                stream_store<T, NT>(a, v, token, row0 + r);
        }
        __syncthreads();
    }
}

template <typename T, int NT> static void stream_start(const stream_args *a, int blocks, cudaStream_t stream)
{
    static bool ready;
    constexpr int bytes = stream_layout<T, NT>::BYTES;
    if (!ready) {
        cudaFuncSetAttribute(stream_kernel<T, NT>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        ready = true;
    }
    launch(stream_kernel<T, NT>, dim3(blocks), dim3(STREAM_WARPS * 32), bytes, stream, *a);
}

template <typename T> static void stream_dispatch(const stream_args *a, int blocks, cudaStream_t stream)
{
    if (a->m <= 8)
        stream_start<T, 1>(a, blocks, stream);
    else
        stream_start<T, 2>(a, blocks, stream);
}

extern "C" bool launch_stream(const struct stream_args *a, int32_t n_sms, cudaStream_t stream)
{
    bool fits = pdl_available() && a->m >= 1 && a->m <= STREAM_MAX_ROWS && a->k % STEP_K == 0 && a->k >= STREAM_WARPS * STEP_K &&
                a->x_stride % 8 == 0 && (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->w % 16 == 0 &&
                (a->type == T_F16 || a->type == T_BF16);
    if (!fits)
        return false;
    int blocks = a->n / TILE_ROWS < n_sms ? (a->n + TILE_ROWS - 1) / TILE_ROWS : n_sms;
    if (a->type == T_F16)
        stream_dispatch<__half>(a, blocks, stream);
    else
        stream_dispatch<__nv_bfloat16>(a, blocks, stream);
    return true;
}
