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

__device__ __forceinline__ scale_rows tile_scales(const expert_product &a, int tile, int lane)
{
    int64_t row = tile < a.width / TILE ? tile * TILE + lane / 4 : 0;

    return scale_rows(a, row, row + TILE / 2);
}

template <typename T, int B, int STAGES>
__device__ __forceinline__ void multiply_tiles(const expert_linear &a, ring<B> &r, float4 *shared,
                                               int warp, int lane)
{
    const expert_product &p = a.product;
    int n_tile = 0, row = (lane & 3) * 2;
    activations<T, STAGES> x;
    scales<B> scale;

    scale_rows mine = tile_scales(p, blockIdx.x, lane);
    scale.load(mine, 0, p.k, warp);
    pdl_wait();
    pdl_release();
    x.load(p.x, p.x_stride, a.rows, p.k, warp, lane);
    x.template order<B>();
    for (int t = blockIdx.x; t < p.width / TILE; t += gridDim.x) {
        scale_rows next = tile_scales(p, t + gridDim.x, lane);
        sums f = multiply_up<T, B, STAGES>(r, x, p.k, scale, mine, next, warp, lane);
        float v[4];
        mine = next;
        if (!add_warps(v, f, shared, n_tile, warp, lane)) {
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = t * TILE + (lane >> 2) + i / 2 * 8, at = row + (i & 1);
            if (at >= a.rows) {
                continue;
            }
            float y = v[i] + (p.bias ? to_float(((const T *)p.bias)[column]) : 0.0f);
            if (p.out) {
                ((T *)p.out)[at * p.out_stride + column] = from_float<T>(y);
            }
            if (a.sum) {
                T *to = (T *)a.sum + at * a.sum_stride + column;
                *to = from_float<T>(to_float(*to) + rounded<T>(y));
            }
        }
    }
}

struct linear_shared {
    float4 sums[2 * MULTIPLIERS];
    uint64_t full[32], empty[32];
};

template <typename T, int B, int STAGES>
__global__ void __launch_bounds__(THREADS, 1) linear_kernel(const __grid_constant__ expert_linear a)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ linear_shared s;
    int lane = threadIdx.x & 31, warp = __shfl_sync(ROUTE_LANES, threadIdx.x >> 5, 0);
    ring<B> r = {shared_address(shared), shared_address(s.full), shared_address(s.empty), 0, 0};

    if (threadIdx.x == 0) {
        ring_init(r);
    }
    __syncthreads();
    if (warp < WARPS) {
        multiply_tiles<T, B, STAGES>(a, r, s.sums, warp, lane);
    } else if (lane == 0) {
        load_tiles<B>(a.product, r, warp - WARPS);
    }
}

template <typename T, int B, int STAGES> struct linear_launch {
    static constexpr int BYTES = stage_of<B>::COUNT * stage_of<B>::BYTES;

    static bool run(const expert_linear &a, int32_t n_blocks, cudaStream_t stream)
    {
        auto kernel = linear_kernel<T, B, STAGES>;
        static bool allowed = allow_shared(kernel, BYTES);

        if (allowed) {
            launch(kernel, dim3((unsigned)n_blocks), dim3(THREADS), BYTES, stream, a);
        }
        return allowed;
    }
};

template <typename T, int B>
bool run_depth(const expert_linear &a, int32_t n_blocks, cudaStream_t stream)
{
    return a.product.k <= 3 * STAGE_COLS ? linear_launch<T, B, 3>::run(a, n_blocks, stream)
                                         : linear_launch<T, B, 6>::run(a, n_blocks, stream);
}

bool suits(const expert_product *a)
{
    bool codes = a->w_scale;

    return cuda_code_version() >= 90 && a->k % GROUP == 0 && a->k <= 6 * STAGE_COLS &&
           a->width % TILE == 0 && a->type != T_F32 && (uintptr_t)a->x % 16 == 0 &&
           a->x_stride % 8 == 0 && (uintptr_t)a->w % 16 == 0 &&
           (codes ? a->type == T_BF16 && a->group_cols % GROUP == 0 && a->w_stride % 16 == 0
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
        return run_depth<__nv_bfloat16, 8>(*a, n_blocks, stream);
    }
    return p->type == T_F16 ? run_depth<__half, 16>(*a, n_blocks, stream)
                            : run_depth<__nv_bfloat16, 16>(*a, n_blocks, stream);
}
