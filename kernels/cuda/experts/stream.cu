/* Experts of a few rows in one launch, from the residual stream's norm to the sum of
 * the chosen experts (experts.h): one persistent block a multiprocessor, all
 * co-resident.
 *
 *     norm and router   each block norms all rows; as many as there are tiles of the
 *                       router multiply one each
 *     choice            each block chooses for itself, a warp a row
 *     up                tiles of 8 columns of a chosen expert: their rows of gate and
 *                       of up, times all rows
 *     down              tiles of 16 columns of the result; a block takes all chosen
 *                       experts of a tile, in the order of their indices
 *
 * The blocks meet behind the router and behind up. Load warps walk the weights of all
 * phases and keep a ring of stages full by bulk copies: they wait for the choice, since
 * it says which weights these are, but not for the second meeting.
 *
 * Products are those of the fused launch (fused_decode.h): 16 rows of weights are the A
 * operand, up to 8 rows of activations the B operand. A stage has 24 groups of 32
 * columns, which the multiplying warps take in turn; a lane has 8 neighbouring columns
 * of a group. Rows that an expert was not chosen for are zeros there, and a row's sum
 * has the same terms in the same order whatever the other rows are.
 *
 * Weights of up and down may be e4m3 codes, which are widened in registers; the scale
 * of a group of columns multiplies its sums. The router's weights have 16 bits always.
 */
#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/experts/stream_choice.cuh"
#include "kernels/cuda/experts/stream_products.cuh"

namespace
{

using namespace expert_stream;

/* ---- epilogues ---- */

template <typename T>
__device__ __forceinline__ void store_scores(const expert_few &a, const float (&v)[4], int lane)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = (lane & 3) * 2 + (i & 1), e = blockIdx.x * TILE + (lane >> 2) + i / 2 * 8;
        if (row < a.route.rows && e < a.route.n) {
            float bias = a.router_bias ? to_float(((const T *)a.router_bias)[e]) : 0.0f;
            ((float *)a.route.scores)[row * a.route.scores_stride + e] = v[i] + bias;
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_gated(const expert_few &a, const chosen_experts &c,
                                            const float (&v)[4], int k, int tile, int lane)
{
    int column = tile * (TILE / 2) + (lane >> 2);
    const T *bias = (const T *)a.up.bias + (int64_t)c.expert[k] * 2 * a.up.width + column;
    float g = a.up.bias ? to_float(bias[0]) : 0.0f, u = a.up.bias ? to_float(bias[a.up.width]) : 0;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = (lane & 3) * 2 + i, pair = c.pair[k][row];
        if (pair != NONE) {
            ((T *)a.up.out)[(row * a.route.top + pair) * a.up.out_stride + column] =
                from_float<T>(expert_gate(v[i] + g, v[i + 2] + u, a.up.act, a.up.limit));
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_sum(const expert_few &a, const chosen_experts &c,
                                          float (&v)[4], int tile, int lane)
{
    int column = tile * TILE + (lane >> 2), row = (lane & 3) * 2;

    if (a.down.bias) {
#pragma unroll 4
        for (int k = 0; k < c.n; k++) {
            const T *bias = (const T *)a.down.bias + (int64_t)c.expert[k] * a.down.width + column;
            float low = to_float(bias[0]), high = to_float(bias[8]);
            v[0] += c.share[k][row] * low;
            v[1] += c.share[k][row + 1] * low;
            v[2] += c.share[k][row] * high;
            v[3] += c.share[k][row + 1] * high;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        T *y = (T *)a.y + (row + (i & 1)) * a.y_stride + column + i / 2 * 8;
        if (row + (i & 1) < a.route.rows) {
            *y = from_float<T>(a.adds ? to_float(*y) + v[i] : v[i]);
        }
    }
}

/* ---- up ---- */

/* Where the scales of a tile of up are; past the last one anywhere. */
__device__ __forceinline__ scale_rows up_scales(const expert_few &a, const chosen_experts &c,
                                                int item, int per, int lane)
{
    int64_t row = 0;

    if (item < c.n * per) {
        row = (int64_t)c.expert[item / per] * 2 * a.up.width + item % per * (TILE / 2) + lane / 4;
    }
    return scale_rows(a.up, row, row + a.up.width);
}

template <typename T, int B, int STAGES>
__device__ __forceinline__ void
multiply_all_up(const expert_few &a, ring<B> &r, const chosen_experts &c,
                const activations<T, STAGES> &x, float4 *shared, int &n_tile, int warp, int lane)
{
    int per = a.up.width / (TILE / 2);
    scale_rows mine = up_scales(a, c, blockIdx.x, per, lane);
    scales<B> scale;
    float v[4];

    scale.load(mine, 0, a.up.k, warp);
    for (int i = blockIdx.x; i < c.n * per; i += gridDim.x) {
        scale_rows next = up_scales(a, c, i + gridDim.x, per, lane);
        sums f = multiply_up<T, B, STAGES>(r, x, a.up.k, scale, mine, next, warp, lane);
        mine = next;
        if (add_warps(v, f, shared, n_tile, warp, lane)) {
            store_gated<T>(a, c, v, i / per, i % per, lane);
        }
    }
}

/* ---- down ---- */

/* A lane's activations and scales of stage `item` of a tile of down: stage item % per
 * of the chosen expert item / per. Past the last one zeros. */
template <typename T, int B>
__device__ __forceinline__ void load_act(vector16 (&x)[SHARE], scales<B> &scale,
                                         const expert_few &a, const chosen_experts &c, int tile,
                                         int item, int per, int warp, int lane)
{
    int k = item / per, s = item - k * per, row = lane >> 2, pair = k < c.n ? c.pair[k][row] : NONE;
    const T *from = (const T *)a.down.x + (row * a.route.top + pair) * a.down.x_stride;

#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        int at = s * STAGE_COLS + (warp + WARPS * j) * GROUP + (lane & 3) * 8;
        uint4 u = {};
        if (pair != NONE && at < a.down.k) {
            u = __ldcg((const uint4 *)(from + at));
        }
        x[j] = ordered<B>({{u.x, u.y, u.z, u.w}});
    }
    if (B < 16 && k < c.n) {
        int64_t of = (int64_t)c.expert[k] * a.down.width + tile * TILE + row;
        scale.load(scale_rows(a.down, of, of + TILE / 2), s, a.down.k, warp);
    }
}

template <typename T, int B>
__device__ __forceinline__ void multiply_down(const expert_few &a, const chosen_experts &c,
                                              ring<B> &r, float4 *shared, int &n_tile, int warp,
                                              int lane)
{
    int per = (a.down.k + STAGE_COLS - 1) / STAGE_COLS, n = c.n * per;

    for (int t = blockIdx.x; t < a.down.width / TILE; t += gridDim.x) {
        vector16 x[ACT_AHEAD][SHARE];
        scales<B> scale[ACT_AHEAD];
        float sum[4] = {};
        sums f = {};
        int k = 0, s = 0;
#pragma unroll
        for (int q = 0; q < ACT_AHEAD; q++) {
            load_act<T, B>(x[q], scale[q], a, c, t, q, per, warp, lane);
        }
        for (int i = 0; i < n; i += ACT_AHEAD) {
#pragma unroll
            for (int q = 0; q < ACT_AHEAD; q++) {
                if (i + q >= n) {
                    break;
                }
                multiply_stage<T, B>(r, f, x[q], scale[q], stage_groups(a.down.k, s), warp, lane);
                load_act<T, B>(x[q], scale[q], a, c, t, i + q + ACT_AHEAD, per, warp, lane);
                if (++s == per) {
                    float2 share = *(const float2 *)&c.share[k][(lane & 3) * 2];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float of = j & 1 ? share.y : share.x;
                        sum[j] += of != 0.0f ? of * (f.even[j] + f.odd[j]) : 0.0f;
                    }
                    f = {};
                    s = 0;
                    k++;
                }
            }
        }
        float all[4];
        if (add_warps(all, sum, shared, n_tile, warp, lane)) {
            store_sum<T>(a, c, all, t, lane);
        }
    }
}

/* ---- the kernel ---- */

/* Dynamic shared memory: the ring, then the norm's weight. */
template <typename T, int B, int STAGES> struct stream_layout {
    static constexpr int RING = stage_of<B>::COUNT * stage_of<B>::BYTES;
    static constexpr int BYTES = RING + STAGES * STAGE_COLS * 2;
};

struct stream_shared {
    float4 sums[2 * MULTIPLIERS];
    float squares[WARPS * ROWS];
    uint64_t full[32], empty[32], norm;
    chosen_experts chosen;
};

template <typename T, int B, int STAGES>
__device__ __forceinline__ void multiply(const expert_few &a, ring<B> &r, stream_shared &s,
                                         const char *norm_weight, int warp, int lane)
{
    int n_tile = 0, tiles = (a.route.n + TILE - 1) / TILE;
    activations<T, STAGES> x;
    float v[4];

    pdl_wait();
    x.load(a.up.x, a.up.x_stride, a.route.rows, a.up.k, warp, lane);
    if (a.normed) {
        float scale = x.factor(a.up.k, a.norm.eps, s.squares, warp, lane);
        barrier_wait(shared_address(&s.norm), 0);
        x.norm(a, norm_weight, scale, warp, lane);
    }
    if (blockIdx.x < tiles) {
        sums f = multiply_router<T, B, STAGES>(r, x, a.up.k, warp, lane);
        if (add_warps(v, f, s.sums, n_tile, warp, lane)) {
            store_scores<T>(a, v, lane);
            __syncwarp();
            if (lane == 0) {
                blocks_arrive(a.counter);
            }
        }
    }
    x.template order<B>();
    choose(a, s.chosen, tiles, warp, lane);
    choice_sync();
    multiply_all_up<T, B, STAGES>(a, r, s.chosen, x, s.sums, n_tile, warp, lane);
    multipliers_sync();
    pdl_release();
    if (threadIdx.x == 0) {
        blocks_arrive(a.counter + EXPERT_COUNTER_STRIDE);
        blocks_wait(a.counter + EXPERT_COUNTER_STRIDE, gridDim.x);
        int32_t *left = a.counter + 2 * EXPERT_COUNTER_STRIDE;
        if (atomicAdd(left, 1) == (int)gridDim.x - 1) { /* no block reads them any more */
            a.counter[0] = a.counter[EXPERT_COUNTER_STRIDE] = *left = 0;
        }
    }
    multipliers_sync();
    multiply_down<T, B>(a, s.chosen, r, s.sums, n_tile, warp, lane);
}

template <typename T, int B, int STAGES>
__global__ void __launch_bounds__(THREADS, 1) stream_kernel(const __grid_constant__ expert_few a)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ stream_shared s;
    char *norm_weight = shared + stream_layout<T, B, STAGES>::RING;
    int lane = threadIdx.x & 31, warp = __shfl_sync(ROUTE_LANES, threadIdx.x >> 5, 0);
    ring<B> r = {shared_address(shared), shared_address(s.full), shared_address(s.empty), 0, 0};

    for (int i = threadIdx.x; i < MOST_PAIRS * ROWS; i += THREADS) {
        s.chosen.pair[0][i] = NONE;
        s.chosen.share[0][i] = 0.0f;
    }
    if (threadIdx.x < MOST_EXPERTS / 32) {
        s.chosen.bit[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.norm), 1);
        ring_init(r);
    }
    __syncthreads();
    if (warp < WARPS) {
        multiply<T, B, STAGES>(a, r, s, norm_weight, warp, lane);
        return;
    }
    if (warp == WARPS && lane == 0 && a.normed) {
        barrier_expect(shared_address(&s.norm), a.up.k * 2);
        bulk_copy(shared_address(norm_weight), a.norm.weight, a.up.k * 2, shared_address(&s.norm));
    }
    load_weights<B>(a, r, s.chosen, warp - WARPS, lane);
}

template <typename T, int B, int STAGES> struct stream_launch {
    static constexpr int BYTES = stream_layout<T, B, STAGES>::BYTES;

    static bool fits(void)
    {
        static bool allowed = allow_shared(stream_kernel<T, B, STAGES>, BYTES);

        return allowed;
    }
    static void run(const expert_few &a, int32_t n_blocks, cudaStream_t stream)
    {
        launch(stream_kernel<T, B, STAGES>, dim3((unsigned)n_blocks), dim3(THREADS), BYTES, stream,
               a);
    }
};

/* STATEMENT with L = the stream_launch for the operands of `a`. */
#define DISPATCH_STREAM(a, STATEMENT)                         \
    do {                                                      \
        bool deep = (a)->up.k > 3 * STAGE_COLS;               \
        if ((a)->up.w_scale) {                                \
            if (deep) {                                       \
                using L = stream_launch<__nv_bfloat16, 8, 6>; \
                STATEMENT;                                    \
            } else {                                          \
                using L = stream_launch<__nv_bfloat16, 8, 3>; \
                STATEMENT;                                    \
            }                                                 \
        } else if ((a)->up.type == T_F16) {                   \
            using L = stream_launch<__half, 16, 6>;           \
            STATEMENT;                                        \
        } else if (deep) {                                    \
            using L = stream_launch<__nv_bfloat16, 16, 6>;    \
            STATEMENT;                                        \
        } else {                                              \
            using L = stream_launch<__nv_bfloat16, 16, 3>;    \
            STATEMENT;                                        \
        }                                                     \
    } while (0)

bool aligned16(const void *p, int64_t stride)
{
    return (uintptr_t)p % 16 == 0 && stride % 8 == 0;
}

/* A row begins at a multiple of 16 bytes; a group of columns has one scale. */
bool codes_fit(const expert_product *p)
{
    bool codes = p->w_scale;

    return (!codes || (p->type == T_BF16 && p->group_cols % GROUP == 0 && p->k % 16 == 0)) &&
           aligned16(p->w, codes ? p->w_stride / 2 : p->w_stride) &&
           (!codes || p->w_stride % 16 == 0);
}

} // namespace

extern "C" bool expert_stream_fits(const struct expert_few *a, int32_t n_blocks)
{
    const struct expert_product *up = &a->up, *down = &a->down;
    bool norm = !a->normed || (!a->norm.layer_norm && !a->norm.bias && a->norm.weight &&
                               a->norm.weight_type == up->type && aligned16(a->norm.weight, 0));
    bool fits = a->counter && a->route.rows <= EXPERT_STREAM_ROWS && up->type != T_F32 && norm &&
                a->route.rows * a->route.top <= MOST_PAIRS && a->route.n <= MOST_EXPERTS &&
                (a->route.n + TILE - 1) / TILE <= n_blocks && up->k % GROUP == 0 &&
                up->k <= 6 * STAGE_COLS && up->width % GROUP == 0 && codes_fit(up) &&
                codes_fit(down) && !up->w_scale == !down->w_scale &&
                aligned16(up->x, up->x_stride) && aligned16(down->x, down->x_stride) &&
                aligned16(a->router, a->router_stride) && aligned16(a->h, a->h_stride);

    if (fits) {
        DISPATCH_STREAM(a, fits = L::fits());
    }
    return fits;
}

extern "C" void launch_expert_stream(const struct expert_few *a, int32_t n_blocks,
                                     cudaStream_t stream)
{
    DISPATCH_STREAM(a, L::run(*a, n_blocks, stream));
}
