/* Products of experts that a few rows each have chosen, by lists (experts.h): tiles of
 * at most 8 pairs, whose weights stream through a ring as in stream.cu.
 *
 * A piece of work is a tile of the list times 16 rows of weights, gated: 8 of gate and
 * the 8 of up that go with them. The pieces, tile after tile, are cut into equal spans,
 * one for each block, so that a block has few experts and every block as many bytes. A
 * lane holds the activations of the tile's pairs in registers until the next tile of
 * the list; while it loads those the ring fills.
 */
#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/experts/stream_products.cuh"

namespace
{

using namespace expert_stream;

/* A block's span, and where it is in it. */
struct span {
    int at, end, per; /* pieces; pieces of a tile of the list */
    expert_tile tile;

    __device__ __forceinline__ span(const expert_product &a, const expert_lists &l)
    {
        per = a.width / (a.gated ? TILE / 2 : TILE);
        int64_t n = (int64_t)l.total[0] * per;
        at = (int)(n * blockIdx.x / gridDim.x);
        end = (int)(n * (blockIdx.x + 1) / gridDim.x);
        enter(l);
    }
    __device__ __forceinline__ void enter(const expert_lists &l)
    {
        if (at < end) {
            int4 t = __ldcg((const int4 *)l.tile + at / per);
            tile = {t.x, t.y, t.z, t.w};
        }
    }
    /* True: the next piece is of another tile of the list. */
    __device__ __forceinline__ bool next(const expert_lists &l)
    {
        if (++at < end && at % per == 0) {
            enter(l);
            return true;
        }
        return false;
    }
    /* The first of the piece's rows of weights; with `up` of those of up. */
    __device__ __forceinline__ int64_t row(const expert_product &a, bool up) const
    {
        int64_t first = (int64_t)tile.expert * a.width;

        return a.gated ? 2 * first + (up ? a.width : 0) + at % per * (TILE / 2)
                       : first + at % per * TILE;
    }
    __device__ __forceinline__ scale_rows scales_at(const expert_product &a, int lane) const
    {
        int64_t low = at < end ? row(a, false) + lane / 4 : 0;

        return scale_rows(a, low, low + (a.gated ? a.width : TILE / 2));
    }
};

template <int B>
__device__ __forceinline__ void load_span(const expert_product &a, const expert_lists &l,
                                          const ring<B> &r, int warp)
{
    constexpr int MINE = TILE / LOADERS;
    loader<B> load(r, warp);
    int64_t stride = a.w_stride * (B == 16 ? 2 : 1); /* of codes it is in bytes */
    int first = warp * MINE;

    for (span s(a, l); s.at < s.end; s.next(l)) {
        bool up = a.gated && first >= TILE / 2;
        int64_t row = s.row(a, up) + first - (up ? TILE / 2 : 0);
        load.tile((const char *)a.w + row * stride, stride, MINE, a.k / 8 * B);
    }
}

/* The activations of a tile of the list; of pairs that it lacks zeros. */
template <typename T, int B, int STAGES>
__device__ __forceinline__ void load_pairs(activations<T, STAGES> &x, const expert_product &a,
                                           const expert_lists &l, const expert_tile &t, int warp,
                                           int lane)
{
    int g = lane >> 2;
    const T *from = nullptr;

    if (g < t.n) {
        int pair = __ldcg(l.list + (int64_t)t.expert * l.cap + t.first + g);
        from = (const T *)a.x + pair / a.divide * a.x_stride;
    }
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            int c = activations<T, STAGES>::column(s, j, warp, lane);
            uint4 u = {};
            if (from && c < a.k) {
                u = __ldcg((const uint4 *)(from + c));
            }
            x.v[s][j] = ordered<B>({{u.x, u.y, u.z, u.w}});
        }
    }
}

/* As add_warps leaves them. */
template <typename T>
__device__ __forceinline__ void store_pairs(const expert_product &a, const expert_lists &l,
                                            const span &s, const float (&v)[4], int lane)
{
    int64_t row = s.row(a, false) + (lane >> 2);
    int column = (int)(s.at % s.per) * (a.gated ? TILE / 2 : TILE) + (lane >> 2);
    const T *bias = (const T *)a.bias + row;
    float low = a.bias ? to_float(bias[0]) : 0.0f;
    float high = a.bias ? to_float(bias[a.gated ? a.width : TILE / 2]) : 0.0f;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        int at = (lane & 3) * 2 + i;
        if (at < s.tile.n) {
            int pair = __ldcg(l.list + (int64_t)s.tile.expert * l.cap + s.tile.first + at);
            T *out = (T *)a.out + pair * a.out_stride + column;
            float u = v[i] + low, w = v[i + 2] + high;
            if (a.gated) {
                out[0] = from_float<T>(expert_gate(u, w, a.act, a.limit));
            } else {
                out[0] = from_float<T>(u);
                out[TILE / 2] = from_float<T>(w);
            }
        }
    }
}

template <typename T, int B, int STAGES>
__device__ __forceinline__ void multiply_span(const expert_product &a, const expert_lists &l,
                                              ring<B> &r, float4 *shared, int warp, int lane)
{
    int n_tile = 0;
    span s(a, l);
    activations<T, STAGES> x;
    scales<B> scale;
    float v[4];

    if (s.at >= s.end) {
        return;
    }
    scale_rows mine = s.scales_at(a, lane);
    scale.load(mine, 0, a.k, warp);
    load_pairs<T, B, STAGES>(x, a, l, s.tile, warp, lane);
    while (s.at < s.end) {
        span ahead = s;
        bool other = ahead.next(l);
        scale_rows next = ahead.scales_at(a, lane);
        sums f = multiply_up<T, B, STAGES>(r, x, a.k, scale, mine, next, warp, lane);
        if (other) {
            load_pairs<T, B, STAGES>(x, a, l, ahead.tile, warp, lane);
        }
        if (add_warps(v, f, shared, n_tile, warp, lane)) {
            store_pairs<T>(a, l, s, v, lane);
        }
        mine = next;
        s = ahead;
    }
}

struct lists_shared {
    float4 sums[2 * MULTIPLIERS];
    uint64_t full[32], empty[32];
};

template <typename T, int B, int STAGES>
__global__ void __launch_bounds__(THREADS, 1)
    lists_kernel(const __grid_constant__ expert_product a, const __grid_constant__ expert_lists l)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ lists_shared s;
    int lane = threadIdx.x & 31, warp = __shfl_sync(ROUTE_LANES, threadIdx.x >> 5, 0);
    ring<B> r = {shared_address(shared), shared_address(s.full), shared_address(s.empty), 0, 0};

    if (threadIdx.x == 0) {
        ring_init(r);
    }
    __syncthreads();
    if (warp < WARPS) {
        pdl_wait();
        pdl_release();
        multiply_span<T, B, STAGES>(a, l, r, s.sums, warp, lane);
    } else if (lane == 0) {
        /* down's lists were complete before up was: it waited for them */
        if (a.gated) {
            pdl_wait();
        }
        pdl_release();
        load_span<B>(a, l, r, warp - WARPS);
    }
}

template <typename T, int B, int STAGES> struct lists_launch {
    static constexpr int BYTES = stage_of<B>::COUNT * stage_of<B>::BYTES;

    static bool run(const expert_product &a, const expert_lists &l, int32_t n_blocks,
                    cudaStream_t stream)
    {
        auto kernel = lists_kernel<T, B, STAGES>;
        static bool allowed = allow_shared(kernel, BYTES);

        if (allowed) {
            launch(kernel, dim3((unsigned)n_blocks), dim3(THREADS), BYTES, stream, a, l);
        }
        return allowed;
    }
};

template <typename T, int B>
bool run_depth(const expert_product &a, const expert_lists &l, int32_t n_blocks,
               cudaStream_t stream)
{
    return a.k <= STAGE_COLS       ? lists_launch<T, B, 1>::run(a, l, n_blocks, stream)
           : a.k <= 3 * STAGE_COLS ? lists_launch<T, B, 3>::run(a, l, n_blocks, stream)
                                   : lists_launch<T, B, 6>::run(a, l, n_blocks, stream);
}

} // namespace

extern "C" bool expert_lists_stream(const struct expert_product *a)
{
    bool codes = a->w_scale;
    int32_t each = a->gated ? TILE / 2 : TILE;

    return cuda_code_version() >= 90 && a->k % GROUP == 0 && a->k <= 6 * STAGE_COLS &&
           a->width % each == 0 && a->type != T_F32 && (uintptr_t)a->x % 16 == 0 &&
           a->x_stride % 8 == 0 && (uintptr_t)a->w % 16 == 0 &&
           (codes ? a->type == T_BF16 && a->group_cols % GROUP == 0 && a->w_stride % 16 == 0
                  : a->w_stride % 8 == 0);
}

extern "C" bool launch_expert_lists(const struct expert_product *a, const struct expert_lists *l,
                                    int32_t n_blocks, cudaStream_t stream)
{
    if (l->tile_rows > ROWS || !expert_lists_stream(a)) {
        return false;
    }
    if (a->w_scale) {
        return run_depth<__nv_bfloat16, 8>(*a, *l, n_blocks, stream);
    }
    return a->type == T_F16 ? run_depth<__half, 16>(*a, *l, n_blocks, stream)
                            : run_depth<__nv_bfloat16, 16>(*a, *l, n_blocks, stream);
}
