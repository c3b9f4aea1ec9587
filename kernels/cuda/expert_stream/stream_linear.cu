/* A product of few rows in a launch of its own, between launches of experts, with the
 * norm in front of it: its weights depend on nothing, so its blocks fill their rings
 * while the launch in front ends. A block takes tiles of 16 columns of the result, over
 * the whole depth. The result may be a rank's summand of what is added
 * (stream_ranks.cuh).
 */
#include "kernels/cuda/expert_stream/stream_products.cuh"
#include "kernels/cuda/expert_stream/stream_ranks.cuh"

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
        load.tile((const char *)a.w + (t * TILE + warp * MINE) * stride, stride,
                  a.k / 8 * BYTES_OF<B>);
    }
}

struct linear_shared {
    float4 sums[SUM_BUFFERS * MULTIPLIERS];
    float squares[WARPS * ROWS];
    uint32_t row_most[ROWS];
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], sums_full[SUM_BUFFERS], sums_empty[SUM_BUFFERS];
    uint64_t norm;
};

template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void multiply(const expert_linear &a, ring<B> &r, linear_shared &s,
                                         const stage_x &x, const sum_ring &to, uint32_t norm_weight,
                                         int warp, int lane)
{
    const expert_product &p = a.product;
    const row_source from = {p.x,
                             p.x_stride,
                             a.rows,
                             p.k,
                             a.normed ? &a.norm : NULL,
                             norm_weight,
                             shared_address(&s.norm),
                             a.h,
                             a.h_stride};
    auto rows = [&](int tile) {
        int64_t low = (int64_t)tile * TILE + lane / 4;
        return row_pair{low, TILE / 2};
    };
    const row_most most = {s.row_most};
    int n = 0;

    pdl_wait();
    pdl_release();
    load_rows<T, B>(x, from, s.squares, most, warp, lane);
    scale_rows<B>(x, from, most, warp, lane);
    if (B == 8) {
        multipliers_sync();
    }
    int team = warp / team_of<B>::SIZE;
    r.next(team);
    multiply_tiles<T, B, GROUPED>(p, r, x, to, n, blockIdx.x, gridDim.x, p.width / TILE, rows, team,
                                  warp, lane);
}

/* A finishing warp. */
template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void finish_tiles(const expert_linear &a, const expert_ranks &ranks,
                                             const sum_ring &sums, const row_most &most, int warp,
                                             int lane)
{
    const expert_product &p = a.product;
    const bool over_ranks = ranks.n_ranks > 0;
    int n = 0, row = (lane & 3) * 2;
    uint32_t turn = 0;

    pdl_wait();
    if (over_ranks) {
        turn = begin_sum(ranks, warp, lane);
    }
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
        unscale<B>(v, most, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int c = column + i / 2 * 8, at = row + (i & 1);
            v[i] = v[i] * (i < 2 ? scale.x : scale.y) + bias[i];
            if (p.out && at < a.rows) {
                ((T *)p.out)[at * p.out_stride + c] = from_float<T>(v[i]);
            }
            v[i] = over_ranks ? v[i] : rounded<T>(v[i]);
        }
        if (over_ranks) {
            sum_tile<T>(v, ranks, turn, t, a.rows, lane);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (a.sum && row + (i & 1) < a.rows) {
                ((T *)a.sum)[(row + (i & 1)) * a.sum_stride + column + i / 2 * 8] =
                    from_float<T>(before[i] + v[i]);
            }
        }
    }
}

/* Dynamic shared memory: the ring of `count` stages, x, and the norm's weight. */
struct linear_layout {
    int count, in_flight, x_rows, x, norm, bytes;
};

template <typename T, int B, bool GROUPED>
__global__ void __launch_bounds__(THREADS, 1)
    linear_kernel(const __grid_constant__ expert_linear a,
                  const __grid_constant__ expert_ranks ranks, const linear_layout layout)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ linear_shared s;
    uint32_t base = shared_address(shared), norm_weight = base + layout.norm;
    int lane = threadIdx.x & 31, warp = __shfl_sync(ROUTE_LANES, threadIdx.x >> 5, 0);
    ring<B> r = {
        base, shared_address(s.full), shared_address(s.empty), layout.count, layout.in_flight, 0,
        0};

    const sum_ring to = {s.sums, shared_address(s.sums_full), shared_address(s.sums_empty)};

    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.norm), 1);
        barrier_init_fence();
    } else if (threadIdx.x == 32) {
        to.init();
    }
    if (threadIdx.x < ROWS) {
        s.row_most[threadIdx.x] = 0;
    }
    ring_init(r);
    __syncthreads();
    if (warp < WARPS) {
        stage_x x(base + layout.x, layout.x_rows, lane);
        multiply<T, B, GROUPED>(a, r, s, x, to, norm_weight, warp, lane);
    } else if (warp >= WARPS + LOADERS) {
        finish_tiles<T, B, GROUPED>(a, ranks, to, {s.row_most}, warp - WARPS - LOADERS, lane);
    } else if (lane == 0) {
        if (warp == WARPS && a.normed) {
            bulk_copy_all(norm_weight, a.norm.weight, a.product.k * 2, shared_address(&s.norm));
        }
        load_tiles<B>(a.product, r, warp - WARPS);
    }
}

template <typename T, int B, bool GROUPED>
bool run(const expert_linear &a, const expert_ranks &ranks, int32_t n_blocks, cudaStream_t stream)
{
    constexpr int MOST = 227 * 1024 - (int)sizeof(linear_shared) - 128;
    auto kernel = linear_kernel<T, B, GROUPED>;
    static bool allowed = allow_shared(kernel, MOST);
    int x_rows = room_for(a.rows);
    int depth = (a.product.k + STAGE_COLS - 1) / STAGE_COLS;
    int x = depth * x_stage_bytes(x_rows), norm = a.normed ? depth * STAGE_COLS * 2 : 0;
    int count = (MOST - x - norm) / stage_of<B>::BYTES;

    count = count < MOST_STAGES ? count : (int)MOST_STAGES;
    int ring = count * stage_of<B>::BYTES;
    const linear_layout l = {count,          stages_in_flight<B>(count), x_rows, ring, ring + x,
                             ring + x + norm};
    if (allowed) {
        launch(kernel, dim3((unsigned)n_blocks), dim3(THREADS), l.bytes, stream, a, ranks, l);
    }
    return allowed;
}

/* A norm of activations of `type`. */
bool norm_suits(const expert_linear *a)
{
    const struct norm_args *n = &a->norm;

    return !a->normed ||
           (!n->layer_norm && !n->bias && n->weight && n->weight_type == a->product.type &&
            (uintptr_t)n->weight % 16 == 0 && (uintptr_t)a->h % 16 == 0 && a->h_stride % 8 == 0);
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

extern "C" bool launch_expert_linear(const struct expert_linear *a,
                                     const struct expert_ranks *ranks, int32_t n_blocks,
                                     cudaStream_t stream)
{
    const struct expert_product *p = &a->product;

    if (a->rows > EXPERT_STREAM_ROWS || !suits(p) || !norm_suits(a)) {
        return false;
    }
    if (p->w_scale) {
        return p->n_groups > 1 ? run<__nv_bfloat16, 8, true>(*a, *ranks, n_blocks, stream)
                               : run<__nv_bfloat16, 8, false>(*a, *ranks, n_blocks, stream);
    }
    return p->type == T_F16 ? run<__half, 16, false>(*a, *ranks, n_blocks, stream)
                            : run<__nv_bfloat16, 16, false>(*a, *ranks, n_blocks, stream);
}
