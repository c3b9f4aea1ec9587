/* A product of few rows in a launch of its own, between launches of experts: its
 * weights depend on nothing, so its blocks fill their rings while the launch in front
 * ends. A block takes tiles of 16 columns of the result, over the whole depth.
 */
#include "kernels/cuda/experts/stream_products.cuh"

namespace
{

using namespace expert_stream;

template <int B>
__device__ __forceinline__ void load_tiles(const expert_product &a, const ring<B> &r, int warp)
{
    constexpr int MINE = TILE / LOADERS;
    loader<B> load(r, warp);
    int64_t stride = a.w_stride * (B == 16 ? 2 : 1); /* of codes it is in bytes */

    for (int t = blockIdx.x; t < a.width / TILE; t += gridDim.x) {
        load.tile((const char *)a.w + (t * TILE + warp * MINE) * stride, stride, MINE, a.k / 8 * B);
    }
}

template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void multiply_tiles(const expert_linear &a, ring<B> &r, const own_x &x,
                                               const sum_ring &to, int warp, int lane)
{
    const expert_product &p = a.product;
    int n = 0, depth = (p.k + STAGE_COLS - 1) / STAGE_COLS, tiles = p.width / TILE;
    int64_t row = (int64_t)min((int)blockIdx.x, tiles - 1) * TILE + lane / 4;
    row_scales<B, GROUPED> scale, next;

    if (GROUPED) {
        next.load(p, row, row + TILE / 2, 0, warp);
    }
    pdl_wait();
    pdl_release();
    load_rows<T>(x, p.x, p.x_stride, a.rows, p.k, warp, lane);
#pragma unroll 1
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        sums f = {};
#pragma unroll 1
        for (int s = 0; s < depth; s++) {
            if (GROUPED) {
                bool last = s + 1 == depth;
                scale = next;
                row = last ? (int64_t)min(t + (int)gridDim.x, tiles - 1) * TILE + lane / 4 : row;
                next.load(p, row, row + TILE / 2, last ? 0 : s + 1, warp);
            }
            multiply_stage<T, B, GROUPED>(r, f, x, s, scale, stage_groups(p.k, s), warp, lane);
        }
        to.give(f, n++, warp, lane);
    }
}

/* A finishing warp. */
template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void finish_tiles(const expert_linear &a, const sum_ring &sums, int warp,
                                             int lane)
{
    const expert_product &p = a.product;
    int n = 0, row = (lane & 3) * 2;

    pdl_wait();
#pragma unroll 1
    for (int t = blockIdx.x; t < p.width / TILE; t += gridDim.x, n++) {
        if (n % FINISHERS != warp) {
            continue;
        }
        int column = t * TILE + (lane >> 2);
        float2 scale = tile_scale<B, GROUPED>(p, column, column + TILE / 2);
        float bias[4] = {}, before[4] = {}, v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int c = column + i / 2 * 8;
            bias[i] = p.bias ? to_float(((const T *)p.bias)[c]) : 0.0f;
            if (a.sum && row + (i & 1) < a.rows) {
                before[i] = to_float(((const T *)a.sum)[(row + (i & 1)) * a.sum_stride + c]);
            }
        }
        sums.take(v, n, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int c = column + i / 2 * 8, at = row + (i & 1);
            if (at >= a.rows) {
                continue;
            }
            float y = v[i] * (i < 2 ? scale.x : scale.y) + bias[i];
            if (p.out) {
                ((T *)p.out)[at * p.out_stride + c] = from_float<T>(y);
            }
            if (a.sum) {
                ((T *)a.sum)[at * a.sum_stride + c] = from_float<T>(before[i] + rounded<T>(y));
            }
        }
    }
}

struct linear_shared {
    float4 sums[SUM_BUFFERS * MULTIPLIERS];
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], sums_full[SUM_BUFFERS], sums_empty[SUM_BUFFERS];
};

/* Dynamic shared memory: the ring of `count` stages, then x. */
template <typename T, int B, bool GROUPED>
__global__ void __launch_bounds__(THREADS, 1)
    linear_kernel(const __grid_constant__ expert_linear a, int count, int in_flight, int x_rows)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ linear_shared s;
    uint32_t base = shared_address(shared);
    int lane = threadIdx.x & 31, warp = __shfl_sync(ROUTE_LANES, threadIdx.x >> 5, 0);
    ring<B> r = {base, shared_address(s.full), shared_address(s.empty), count, in_flight, 0, 0};

    const sum_ring to = {s.sums, shared_address(s.sums_full), shared_address(s.sums_empty)};

    if (threadIdx.x == 0) {
        to.init();
        ring_init(r);
    }
    __syncthreads();
    if (warp < WARPS) {
        own_x x(base + count * stage_of<B>::BYTES, x_rows, warp, lane);
        multiply_tiles<T, B, GROUPED>(a, r, x, to, warp, lane);
    } else if (warp >= WARPS + LOADERS) {
        finish_tiles<T, B, GROUPED>(a, to, warp - WARPS - LOADERS, lane);
    } else if (lane == 0) {
        load_tiles<B>(a.product, r, warp - WARPS);
    }
}

template <typename T, int B, bool GROUPED>
bool run(const expert_linear &a, int32_t n_blocks, cudaStream_t stream)
{
    constexpr int MOST = 227 * 1024 - (int)sizeof(linear_shared) - 128;
    auto kernel = linear_kernel<T, B, GROUPED>;
    static bool allowed = allow_shared(kernel, MOST);
    int x_rows = a.rows <= 1 ? 1 : a.rows <= 4 ? 4 : ROWS;
    int x = (a.product.k + STAGE_COLS - 1) / STAGE_COLS * x_stage_bytes(x_rows);
    int count = (MOST - x) / stage_of<B>::BYTES;

    count = count < MOST_STAGES ? count : (int)MOST_STAGES;
    if (allowed) {
        launch(kernel, dim3((unsigned)n_blocks), dim3(THREADS), count * stage_of<B>::BYTES + x,
               stream, a, count, stages_in_flight<B>(count), x_rows);
    }
    return allowed;
}

bool suits(const expert_product *a)
{
    bool codes = a->w_scale;

    return cuda_code_version() >= 90 && a->k % GROUP == 0 && a->k <= MOST_DEPTH * STAGE_COLS &&
           a->width % TILE == 0 && a->type != T_F32 && (uintptr_t)a->x % 16 == 0 &&
           a->x_stride % 8 == 0 && (uintptr_t)a->w % 16 == 0 &&
           (codes ? a->type == T_BF16 && (a->n_groups == 1 || a->group_shift >= 5) &&
                        a->w_stride % 16 == 0
                  : a->w_stride % 8 == 0);
}

} // namespace

extern "C" bool launch_expert_linear(const struct expert_linear *a, int32_t n_blocks,
                                     cudaStream_t stream)
{
    const struct expert_product *p = &a->product;

    if (a->rows > EXPERT_STREAM_ROWS || !suits(p)) {
        return false;
    }
    if (p->w_scale) {
        return p->n_groups > 1 ? run<__nv_bfloat16, 8, true>(*a, n_blocks, stream)
                               : run<__nv_bfloat16, 8, false>(*a, n_blocks, stream);
    }
    return p->type == T_F16 ? run<__half, 16, false>(*a, n_blocks, stream)
                            : run<__nv_bfloat16, 16, false>(*a, n_blocks, stream);
}
