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
 * of a row or of a group of columns multiplies its sums. Those of panels (panels.h) are
 * widened with their groups' scales, of int4 without. The router's weights have 16 bits
 * always.
 *
 * A shared expert whose width is that of some experts is so many more chosen ones.
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

/* Where the middle of pair `pair` of a row lies, of expert e: among the pairs, or of a
 * part of the shared expert. */
template <typename T>
__device__ __forceinline__ T *middle(const expert_few &a, int e, int row, int pair)
{
    int part = e - a.route.held;

    return part >= 0 ? (T *)a.shared_act + row * a.shared_act_stride + part * a.up.width
                     : (T *)a.up.out + (row * a.route.top + pair) * a.up.out_stride;
}

/* Tile n of the block, item i of up. */
template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void finish_up(const expert_few &a, const chosen_experts &c,
                                          const sum_ring &sums, int n, int i, int lane)
{
    int per = a.up.width / (TILE / 2), k = i / per, e = c.expert[k];
    int column = i % per * (TILE / 2) + (lane >> 2);
    int64_t row = (int64_t)e * 2 * a.up.width + column;
    bool biased = a.up.bias && e < a.route.held;
    const T *bias = (const T *)a.up.bias + row;
    float g = biased ? to_float(bias[0]) : 0.0f, u = biased ? to_float(bias[a.up.width]) : 0.0f;
    float2 scale = tile_scale<B, GROUPED>(a.up, row, row + a.up.width);
    float v[4];

    sums.take(v, n, lane);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int r = (lane & 3) * 2 + j, pair = c.pair[k][r];
        if (pair != NONE) {
            middle<T>(a, e, r, pair)[column] = from_float<T>(
                expert_gate(v[j] * scale.x + g, v[j + 2] * scale.y + u, a.up.act, a.up.limit));
        }
    }
}

/* Tile n of the block, tile `tile` of down. */
template <typename T>
__device__ __forceinline__ void finish_down(const expert_few &a, const chosen_experts &c,
                                            const sum_ring &sums, int n, int tile, int lane)
{
    int column = tile * TILE + (lane >> 2), row = (lane & 3) * 2;
    float before[4] = {}, v[4];

    if (a.down.bias) {
#pragma unroll 4
        for (int k = 0; k < c.n && c.expert[k] < a.route.held; k++) {
            const T *bias = (const T *)a.down.bias + (int64_t)c.expert[k] * a.down.width + column;
            float low = to_float(bias[0]), high = to_float(bias[8]);
            before[0] += c.share[k][row] * low;
            before[1] += c.share[k][row + 1] * low;
            before[2] += c.share[k][row] * high;
            before[3] += c.share[k][row + 1] * high;
        }
    }
    T *y = (T *)a.y + row * a.y_stride + column;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (a.adds && row + (i & 1) < a.route.rows) {
            before[i] += to_float(y[(i & 1) * a.y_stride + i / 2 * 8]);
        }
    }
    sums.take(v, n, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row + (i & 1) < a.route.rows) {
            y[(i & 1) * a.y_stride + i / 2 * 8] = from_float<T>(before[i] + v[i]);
        }
    }
}

/* A finishing warp: every FINISHERS-th of the block's tiles. */
template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void finish(const expert_few &a, const chosen_experts &c,
                                       const sum_ring &sums, int warp, int lane)
{
    int n = 0, tiles = (a.route.n + TILE - 1) / TILE;

    pdl_wait();
    if (blockIdx.x < tiles) {
        if (n++ % FINISHERS == warp) {
            float v[4];
            sums.take(v, 0, lane);
            store_scores<T>(a, v, lane);
            __syncwarp();
            if (lane == 0) {
                blocks_arrive(a.counter);
            }
        }
    }
    choice_sync();
    int items = c.n * (a.up.width / (TILE / 2));
#pragma unroll 1
    for (int i = blockIdx.x; i < items; i += gridDim.x, n++) {
        if (n % FINISHERS == warp) {
            finish_up<T, B, GROUPED>(a, c, sums, n, i, lane);
        }
    }
    stored_sync();
#pragma unroll 1
    for (int t = blockIdx.x; t < a.down.width / TILE; t += gridDim.x, n++) {
        if (n % FINISHERS == warp) {
            finish_down<T>(a, c, sums, n, t, lane);
        }
    }
}

/* ---- up ---- */

/* The rows of the weight that a lane has in a tile of up, for their scales; past the
 * last one anywhere. */
__device__ __forceinline__ int64_t up_row(const expert_few &a, const chosen_experts &c, int item,
                                          int per, int lane)
{
    return item < c.n * per
               ? (int64_t)c.expert[item / per] * 2 * a.up.width + item % per * (TILE / 2) + lane / 4
               : 0;
}

template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void multiply_all_up(const expert_few &a, ring<B> &r,
                                                const chosen_experts &c, const own_x &x,
                                                const sum_ring &to, int &n_tile, int warp, int lane)
{
    int per = a.up.width / (TILE / 2), depth = (a.up.k + STAGE_COLS - 1) / STAGE_COLS;
    int64_t row = GROUPED ? up_row(a, c, blockIdx.x, per, lane) : 0;
    row_scales<B, GROUPED> scale, next;

    if (GROUPED) {
        next.load(a.up, row, row + a.up.width, 0, warp);
    }
#pragma unroll 1
    for (int i = blockIdx.x; i < c.n * per; i += gridDim.x) {
        sums f = {};
#pragma unroll 1
        for (int s = 0; s < depth; s++) {
            if (GROUPED) {
                bool last = s + 1 == depth;
                scale = next;
                row = last ? up_row(a, c, i + gridDim.x, per, lane) : row;
                next.load(a.up, row, row + a.up.width, last ? 0 : s + 1, warp);
            }
            multiply_stage<T, B, GROUPED>(r, f, x, s, scale, stage_groups(a.up.k, s), warp, lane);
        }
        to.give(f, n_tile++, warp, lane);
    }
}

/* ---- down ---- */

/* Of a tile of down: its stages are those of all chosen experts, one after another. */
struct down_place {
    int k, s; /* chosen expert, stage of it */

    __device__ __forceinline__ void next(int per)
    {
        if (++s == per) {
            s = 0;
            k++;
        }
    }
};

/* Begins to copy this lane's activations of a stage into slot `slot` of x; past the
 * last one zeros. */
template <typename T>
__device__ __forceinline__ void copy_middle(const own_x &x, int slot, const expert_few &a,
                                            const chosen_experts &c, down_place p, int warp,
                                            int lane)
{
    int row = lane >> 2, pair = p.k < c.n ? c.pair[p.k][row] : NONE;
    const T *from = pair != NONE ? middle<T>(a, c.expert[p.k], row, pair) : (const T *)a.up.out;

#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        int at = column_of(p.s, j, warp, lane);
        bool real = pair != NONE && at < a.down.k;
        x.copy(slot, j, from + (real ? at : 0), real);
    }
    async_commit();
}

/* The row of down that a lane has of an expert, for its scales. */
__device__ __forceinline__ int64_t down_row(const expert_few &a, const chosen_experts &c, int k,
                                            int tile, int lane)
{
    return k < c.n ? (int64_t)c.expert[k] * a.down.width + tile * TILE + lane / 4 : 0;
}

template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void multiply_down_tile(float (&sum)[4], const expert_few &a,
                                                   const chosen_experts &c, ring<B> &r,
                                                   const own_x &x, int tile, int warp, int lane)
{
    int per = (a.down.k + STAGE_COLS - 1) / STAGE_COLS, n = c.n * per;
    row_scales<B, GROUPED> scale, next;
    down_place now = {}, ahead = {};
    sums f = {};

    for (int q = 0; q < ACT_AHEAD; q++, ahead.next(per)) {
        copy_middle<T>(x, q, a, c, ahead, warp, lane);
    }
    int64_t row = down_row(a, c, 0, tile, lane);
    next.load(a.down, row, row + TILE / 2, 0, warp);
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        bool last = now.s + 1 == per;
        if (GROUPED || now.s == 0) {
            scale = next;
        }
        if (GROUPED || last) {
            row = last ? down_row(a, c, now.k + 1, tile, lane) : row;
            next.load(a.down, row, row + TILE / 2, last ? 0 : now.s + 1, warp);
        }
        async_wait<ACT_AHEAD - 1>();
        multiply_stage<T, B, GROUPED>(r, f, x, i % ACT_AHEAD, scale, stage_groups(a.down.k, now.s),
                                      warp, lane);
        copy_middle<T>(x, i % ACT_AHEAD, a, c, ahead, warp, lane);
        ahead.next(per);
        if (last) {
            float2 share = *(const float2 *)&c.share[now.k][(lane & 3) * 2];
            scale.multiply(f);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float of = j & 1 ? share.y : share.x;
                sum[j] += of != 0.0f ? of * (f.even[j] + f.odd[j]) : 0.0f;
            }
            f = {};
        }
        now.next(per);
    }
    async_wait<0>(); /* no copy is left for the next tile's slots, nor behind the end */
}

template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void multiply_down(const expert_few &a, const chosen_experts &c,
                                              ring<B> &r, const own_x &x, const sum_ring &to,
                                              int &n_tile, int warp, int lane)
{
#pragma unroll 1
    for (int t = blockIdx.x; t < a.down.width / TILE; t += gridDim.x) {
        float sum[4] = {};
        multiply_down_tile<T, B, GROUPED>(sum, a, c, r, x, t, warp, lane);
        to.give(sum, n_tile++, warp, lane);
    }
}

/* ---- the kernel ---- */

/* Dynamic shared memory: the ring, then activations, then the norm's weight. */
struct stream_layout {
    int count, in_flight, x_rows; /* stages; rows that there is room for */
    int x, norm, bytes;
};

struct stream_shared {
    float4 sums[SUM_BUFFERS * MULTIPLIERS];
    float squares[WARPS * ROWS];
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], norm;
    uint64_t sums_full[SUM_BUFFERS], sums_empty[SUM_BUFFERS];
    chosen_experts chosen;
};

template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void multiply(const expert_few &a, ring<B> &r, stream_shared &s,
                                         const own_x &x, const sum_ring &to, uint32_t norm_weight,
                                         int warp, int lane)
{
    int n_tile = 0, tiles = (a.route.n + TILE - 1) / TILE;

    pdl_wait();
    load_rows<T>(x, a.up.x, a.up.x_stride, a.route.rows, a.up.k, warp, lane);
    if (a.normed) {
        float scale = norm_factor<T>(x, a.up.k, a.norm.eps, s.squares, warp, lane);
        barrier_wait(shared_address(&s.norm), 0);
        norm_rows<T>(x, a, norm_weight, scale, warp, lane);
    }
    if (blockIdx.x < tiles) {
        to.give(multiply_router<T, B>(r, x, a.up.k, warp, lane), n_tile++, warp, lane);
    }
    choose(a, s.chosen, tiles, warp, lane);
    choice_sync();
    multiply_all_up<T, B, GROUPED>(a, r, s.chosen, x, to, n_tile, warp, lane);
    stored_sync();
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
    multiply_down<T, B, GROUPED>(a, s.chosen, r, x, to, n_tile, warp, lane);
}

template <typename T, int B, bool GROUPED>
__global__ void __launch_bounds__(THREADS, 1)
    stream_kernel(const __grid_constant__ expert_few a, const stream_layout layout)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ stream_shared s;
    uint32_t base = shared_address(shared), norm_weight = base + layout.norm;
    int lane = threadIdx.x & 31, warp = __shfl_sync(ROUTE_LANES, threadIdx.x >> 5, 0);
    ring<B> r = {
        base, shared_address(s.full), shared_address(s.empty), layout.count, layout.in_flight, 0,
        0};

    const sum_ring to = {s.sums, shared_address(s.sums_full), shared_address(s.sums_empty)};

    for (int i = threadIdx.x; i < MOST_PAIRS * ROWS; i += THREADS) {
        s.chosen.pair[0][i] = NONE;
        s.chosen.share[0][i] = 0.0f;
    }
    if (threadIdx.x < MOST_EXPERTS / 32) {
        s.chosen.bit[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.norm), 1);
        to.init();
        ring_init(r);
    }
    __syncthreads();
    if (warp < WARPS) {
        own_x x(base + layout.x, layout.x_rows, warp, lane);
        multiply<T, B, GROUPED>(a, r, s, x, to, norm_weight, warp, lane);
        return;
    }
    if (warp >= WARPS + LOADERS) {
        finish<T, B, GROUPED>(a, s.chosen, to, warp - WARPS - LOADERS, lane);
        return;
    }
    if (warp == WARPS && lane == 0 && a.normed) {
        barrier_expect(shared_address(&s.norm), a.up.k * 2);
        bulk_copy(norm_weight, a.norm.weight, a.up.k * 2, shared_address(&s.norm));
    }
    load_weights<B>(a, r, s.chosen, warp - WARPS, lane);
}

/* What a block of the chip has beside the kernel's own shared memory. */
constexpr int SHARED_MOST = 227 * 1024 - (int)sizeof(stream_shared) - 128;

/* For so many rows, of up to k columns of up. Fewer rows leave more to the ring. */
template <int B> stream_layout layout_of(int rows, int k)
{
    int depth = (k + STAGE_COLS - 1) / STAGE_COLS, x_rows = rows <= 1 ? 1 : rows <= 4 ? 4 : ROWS;
    int x = (depth > ACT_AHEAD ? depth : (int)ACT_AHEAD) * x_stage_bytes(x_rows),
        norm = depth * STAGE_COLS * 2;
    int count = (SHARED_MOST - x - norm) / stage_of<B>::BYTES;

    count = count < MOST_STAGES ? count : (int)MOST_STAGES;
    int ring = count * stage_of<B>::BYTES;
    return {count, stages_in_flight<B>(count), x_rows, ring, ring + x, ring + x + norm};
}

template <typename T, int B, bool GROUPED> struct stream_launch {
    static bool fits(void)
    {
        static bool allowed = allow_shared(stream_kernel<T, B, GROUPED>, SHARED_MOST);

        return allowed;
    }
    static void run(const expert_few &a, int32_t n_blocks, cudaStream_t stream)
    {
        const stream_layout l = layout_of<B>(a.route.rows, a.up.k);

        launch(stream_kernel<T, B, GROUPED>, dim3((unsigned)n_blocks), dim3(THREADS), l.bytes,
               stream, a, l);
    }
};

/* STATEMENT with L = the stream_launch for the operands of `a`. */
#define DISPATCH_STREAM(a, STATEMENT)                             \
    do {                                                          \
        if ((a)->up.panels == PANELS_INT4) {                      \
            using L = stream_launch<__nv_bfloat16, B_INT4, true>; \
            STATEMENT;                                            \
        } else if ((a)->up.panels) {                              \
            using L = stream_launch<__nv_bfloat16, 4, false>;     \
            STATEMENT;                                            \
        } else if ((a)->up.w_scale && (a)->up.n_groups > 1) {     \
            using L = stream_launch<__nv_bfloat16, 8, true>;      \
            STATEMENT;                                            \
        } else if ((a)->up.w_scale) {                             \
            using L = stream_launch<__nv_bfloat16, 8, false>;     \
            STATEMENT;                                            \
        } else if ((a)->up.type == T_F16) {                       \
            using L = stream_launch<__half, 16, false>;           \
            STATEMENT;                                            \
        } else {                                                  \
            using L = stream_launch<__nv_bfloat16, 16, false>;    \
            STATEMENT;                                            \
        }                                                         \
    } while (0)

bool aligned16(const void *p, int64_t stride)
{
    return (uintptr_t)p % 16 == 0 && stride % 8 == 0;
}

/* A row begins at a multiple of 16 bytes; a group of columns has one scale. */
bool codes_fit(const expert_product *p)
{
    if (p->panels) {
        return p->type == T_BF16 && p->w_scale && p->k % (2 * PANEL_GROUP) == 0 &&
               p->width % TILE == 0;
    }
    if (p->w_scale) {
        return p->type == T_BF16 && (p->n_groups == 1 || p->group_shift >= 5) && p->k % 16 == 0 &&
               aligned16(p->w, p->w_stride / 2) && p->w_stride % 16 == 0;
    }
    return aligned16(p->w, p->w_stride);
}

/* Both products have weights of one kind. */
bool alike(const expert_product *p, const expert_product *o)
{
    return p->panels == o->panels && !p->w_scale == !o->w_scale &&
           (p->n_groups > 1) == (o->n_groups > 1);
}

/* The shared expert's weights have 16 bits, as the experts' have, and it is some
 * experts wide. */
bool shared_fits(const expert_few *a)
{
    return a->shared_parts == 0 ||
           (!a->up.w_scale && aligned16(a->shared_up, a->shared_up_stride) &&
            aligned16(a->shared_down, a->shared_down_stride) &&
            aligned16(a->shared_act, a->shared_act_stride) &&
            a->route.rows * a->route.top + a->shared_parts <= MOST_PAIRS);
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
                up->k <= MOST_DEPTH * STAGE_COLS && up->width % GROUP == 0 && codes_fit(up) &&
                codes_fit(down) && alike(up, down) && shared_fits(a) &&
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
