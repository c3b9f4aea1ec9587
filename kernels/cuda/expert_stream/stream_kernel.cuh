/* The kernel of a launch of few rows (stream.cu). */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_KERNEL_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_KERNEL_CUH

#include "kernels/cuda/expert_stream/stream_choice.cuh"
#include "kernels/cuda/expert_stream/stream_products.cuh"
#include "kernels/cuda/expert_stream/stream_ranks.cuh"
#include "kernels/cuda/experts/gate.cuh"

namespace expert_stream
{
/* ---- epilogues ---- */

/* The block's tile of the router: `weights` in shared memory as load_router leaves it.
 * Each warp has every WARPS-th group; parts: shared [WARPS][32]. */
template <typename T>
__device__ __forceinline__ void score_tile(const expert_few &a, const stage_x &x, uint32_t weights,
                                           float4 *parts, float *scores, int warp, int lane)
{
    uint32_t row = weights + (lane >> 2) * router_pitch(a.up.k) + (lane & 3) * 16;
    sums f = {};

#pragma unroll 1
    for (int g = warp; g < a.up.k / GROUP; g += WARPS) {
        uint4 w = load_shared16(row + g * GROUP * 2);
        multiply8<T>(f, w, w, x.read(g)); /* the upper half is not used */
    }
    parts[warp * 32 + lane] = make_float4(f.even[0] + f.odd[0], f.even[1] + f.odd[1], 0.0f, 0.0f);
    multipliers_sync();
    int i = threadIdx.x / ROWS, of = threadIdx.x % ROWS, e = blockIdx.x * ROUTER_TILE + i;
    if (i < ROUTER_TILE && of < a.route.rows && e < a.route.n) {
        const float *at = (const float *)(parts + i * 4 + of / 2) + of % 2; /* see multiply8 */
        float score = a.router_bias ? to_float(((const T *)a.router_bias)[e]) : 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            score += at[w * 32 * 4];
        }
        score_give(scores + of * a.route.scores_stride + e, score);
    }
}

/* Results of up are fp16 times SMALL_BY where down's weights become fp16: they lose
 * bits below 2^-18 alone. What is LARGE or no number is HALF_LARGE there, which nothing
 * else is, and lies times LARGE_BY in a plane of its own, a pair's width behind. */
enum { HALF_LARGE = 0xfc00 };
constexpr float LARGE = 0x1p11f, SMALL_BY = 0x1p4f, LARGE_BY = 0x1p-14f;
template <int D> constexpr int PLANES = D == 8 ? 2 : 1;

/* All bits of the halves that say so. */
__device__ __forceinline__ uint32_t large_halves(uint32_t word)
{
    return __vcmpeq2(word, (uint32_t)HALF_LARGE * 0x10001u);
}

/* Where what up makes of pair `pair` of a row lies, from its column `column` on. */
template <int D>
__device__ __forceinline__ uint16_t *middle(const expert_few &a, uint16_t *all, int row, int pair,
                                            int column)
{
    return all + (row * (a.route.top + a.shared_parts) + pair) * PLANES<D> * a.up.width + column;
}

/* Two results of up as fp16, for down at `to` and, where one is large, `plane` elements
 * behind. */
__device__ __forceinline__ void give_halves(uint16_t *to, int plane, float left, float right)
{
    bool is[2] = {!(fabsf(left) < LARGE), !(fabsf(right) < LARGE)};

    if (is[0] || is[1]) {
        word_give(to + plane,
                  pack2<__half>(is[0] ? left * LARGE_BY : 0.0f, is[1] ? right * LARGE_BY : 0.0f));
    }
    word_give(to, pack2<__half>(is[0] ? -INFINITY : left * SMALL_BY,
                                is[1] ? -INFINITY : right * SMALL_BY));
}

/* Tile n of the block, item i of up: a lane has one column of two rows, and stores two
 * columns of one row. most: of up's rows. */
template <typename T, int B, int D, bool GROUPED>
__device__ __forceinline__ void finish_up(const expert_few &a, const chosen_experts &c,
                                          uint16_t *all, const sum_ring &sums, const row_most &most,
                                          int n, int i, int lane)
{
    int per = a.up.width / (TILE / 2), k = i / per, e = c.expert[k];
    int column = i % per * (TILE / 2) + (lane >> 2);
    int64_t row = (int64_t)e * 2 * a.up.width + column;
    bool biased = a.up.bias && e < a.route.held;
    const T *bias = (const T *)a.up.bias + row;
    float g = biased ? to_float(bias[0]) : 0.0f, u = biased ? to_float(bias[a.up.width]) : 0.0f;
    float2 scale = tile_scale<B, GROUPED>(a.up, row, row + a.up.width);
    float v[4];

    int odd = lane >> 2 & 1, r = (lane & 3) * 2 + odd, pair = c.pair[k][r];
    float value[2];

    sums.take(v, n, lane);
    unscale<B>(v, most, lane);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        value[j] = expert_gate(v[j] * scale.x + g, v[j + 2] * scale.y + u, a.up.act, a.up.limit);
    }
    float got = __shfl_xor_sync(ROUTE_LANES, odd ? value[0] : value[1], 4);
    if (pair == NONE) {
        return;
    }
    uint16_t *to = middle<D>(a, all, r, pair, column - odd);
    float left = odd ? got : value[0], right = odd ? value[1] : got;
    if constexpr (D == 8) {
        give_halves(to, a.up.width, rounded<T>(left), rounded<T>(right));
    } else {
        word_give(to, pack2<T>(left, right));
    }
}

/* Chosen experts that the block has met large results of. */
struct large_experts {
    uint32_t bit[MOST_PAIRS / 32];
};

/* v += what large results add to a tile of down, of which multiplying warps have left
 * them out. By one warp. */
template <int D, bool GROUPED>
__device__ __forceinline__ void add_large(float (&v)[4], const expert_few &a,
                                          const chosen_experts &c, uint16_t *all,
                                          const large_experts &large, int tile, int lane)
{
    static_assert(MOST_PAIRS == 4 * 32, "all words of `large` are looked at");
    const expert_product &p = a.down;
    int end = large.bit[0] | large.bit[1] | large.bit[2] | large.bit[3] ? c.n : 0;

#pragma unroll 1
    for (int k = 0; k < end; k++) {
        if (!(large.bit[k / 32] >> k % 32 & 1)) {
            continue;
        }
        int64_t row = (int64_t)c.expert[k] * p.width + tile * TILE + (lane >> 2);
        float2 share = *(const float2 *)&c.share[k][(lane & 3) * 2];
        float2 scale = tile_scale<D, GROUPED>(p, row, row + TILE / 2);
        int pair = c.pair[k][lane >> 2];
#pragma unroll 1
        for (int column = (lane & 3) * 8; column < p.k; column += GROUP) {
            const uint16_t *from = middle<D>(a, all, lane >> 2, pair, column);
            uint32_t x[4] = {};
#pragma unroll
            for (int i = 0; i < 4 && pair != NONE; i++) {
                x[i] = large_halves(word_wait(from + i * 2)) ? word_wait(from + p.k + i * 2) : 0;
            }
            if (!__any_sync(ROUTE_LANES, x[0] | x[1] | x[2] | x[3])) {
                continue;
            }
            const char *w = (const char *)p.w + row * p.w_stride + column;
            codes<D> low = {__ldg((const uint2 *)w)},
                     high = {__ldg((const uint2 *)(w + TILE / 2 * p.w_stride))};
            sums f = {};
            multiply8<__half>(f, low.values(false, lane), high.values(false, lane),
                              {{x[0], x[1], x[2], x[3]}});
            if (GROUPED) {
                const float *of = p.w_scale + row * p.n_groups + (column >> p.group_shift);
                scale = make_float2(__ldg(of), __ldg(of + TILE / 2 * p.n_groups));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float s = i & 1 ? share.y : share.x;
                float y = (i < 2 ? scale.x : scale.y) * (f.even[i] + f.odd[i]);
                v[i] += s != 0.0f ? s * (y * (SMALL_BY / LARGE_BY)) : 0.0f;
            }
        }
    }
}

/* Tile n of the block, tile `tile` of down. sum_turn: of the sum over ranks, if there
 * is one. */
template <typename T, int D, bool GROUPED>
__device__ __forceinline__ void finish_down(const expert_few &a, const expert_ranks &ranks,
                                            const chosen_experts &c, uint16_t *all,
                                            const large_experts &large, const sum_ring &sums, int n,
                                            int tile, uint32_t sum_turn, int lane)
{
    int column = tile * TILE + (lane >> 2), row = (lane & 3) * 2;
    float biases[4] = {}, before[4] = {}, v[4];

    if (a.down.bias) {
#pragma unroll 4
        for (int k = 0; k < c.n && c.expert[k] < a.route.held; k++) {
            const T *bias = (const T *)a.down.bias + (int64_t)c.expert[k] * a.down.width + column;
            float low = to_float(bias[0]), high = to_float(bias[8]);
            biases[0] += c.share[k][row] * low;
            biases[1] += c.share[k][row + 1] * low;
            biases[2] += c.share[k][row] * high;
            biases[3] += c.share[k][row + 1] * high;
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
    if constexpr (D == 8) {
        add_large<D, GROUPED>(v, a, c, all, large, tile, lane);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = v[i] * (D == 8 ? 1.0f / SMALL_BY : 1.0f) + biases[i];
    }
    if (ranks.n_ranks > 0) {
        sum_tile<T>(v, ranks, sum_turn, tile, a.route.rows, lane);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row + (i & 1) < a.route.rows) {
            y[(i & 1) * a.y_stride + i / 2 * 8] = from_float<T>(before[i] + v[i]);
        }
    }
}

/* A finishing warp: every FINISHERS-th of the block's tiles. */
template <typename T, int B, int D, bool GROUPED>
__device__ __forceinline__ void finish(const expert_few &a, const expert_ranks &ranks,
                                       const chosen_experts &c, const exchange_turn &turn,
                                       const large_experts &large, const sum_ring &sums,
                                       const row_most &most, int warp, int lane)
{
    int n = 0, pairs = a.route.rows * (a.route.top + a.shared_parts);
    uint32_t sum_turn = 0;

    if (warp == 0) {
        rehearse_choice(a.route, c.share[0], lane);
    }
    pdl_wait();
    if (ranks.n_ranks > 0) {
        sum_turn = begin_sum(ranks, warp, lane);
    }
    choice_sync();
    if (warp == 0 && lane == 0) {
        turn_pass(turn, a.exchange, a.route.rows * (int)a.route.scores_stride,
                  pairs * PLANES<D> * a.up.width / 8);
    }
    turn_clear(turn, a.exchange, warp * 32 + lane, FINISHERS * 32);
    __syncwarp();
    uint16_t *all = a.exchange->set[turn.set].middle;
    int items = c.n * (a.up.width / (TILE / 2));
#pragma unroll 1
    for (int i = blockIdx.x; i < items; i += gridDim.x, n++) {
        if (n % FINISHERS == warp) {
            finish_up<T, B, D, GROUPED>(a, c, all, sums, most, n, i, lane);
        }
    }
#pragma unroll 1
    for (int t = blockIdx.x; t < a.down.width / TILE; t += gridDim.x, n++) {
        if (n % FINISHERS == warp) {
            finish_down<T, D, GROUPED>(a, ranks, c, all, large, sums, n, t, sum_turn, lane);
        }
    }
}

/* ---- up ---- */

/* Returns how many of this team's next stage down has in front of it. */
template <typename T, int B, bool GROUPED, int R>
__device__ __forceinline__ int multiply_up(const expert_few &a, ring<R> &r, const chosen_experts &c,
                                           const stage_x &x, const sum_ring &to, int &n_tile,
                                           int warp, int lane)
{
    int per = a.up.width / (TILE / 2), team = warp / team_of<B>::SIZE;
    auto rows = [&](int item) {
        int64_t low =
            (int64_t)c.expert[item / per] * 2 * a.up.width + item % per * (TILE / 2) + lane / 4;
        return row_pair{low, a.up.width};
    };

    r.next(team);
    return multiply_tiles<T, B, GROUPED>(a.up, r, x, to, n_tile, blockIdx.x, gridDim.x, c.n * per,
                                         rows, team, warp, lane);
}

/* ---- down ---- */

/* Of a tile of down: its stages are those of all chosen experts, one after another. */
struct down_place {
    int k, s; /* chosen expert, stage of it */

    __device__ __forceinline__ void skip(int n, int per)
    {
#pragma unroll 1
        for (s += n; s >= per; s -= per) {
            k++;
        }
    }
};

/* What this lane multiplies of a stage of down, whether it is there or not: bit j of
 * `of` stands for the eight columns of its j-th group. */
struct down_part {
    const uint16_t *from; /* of the first group */
    uint32_t of;

    template <int B>
    __device__ __forceinline__ void set(const expert_few &a, const chosen_experts &c, uint16_t *all,
                                        const down_place &p, int warp, int lane)
    {
        constexpr int TEAM = team_of<B>::SIZE, N = team_of<B>::TURNS * SHARE;
        int row = lane >> 2;
        int pair = p.k < c.n ? c.pair[p.k][row] : NONE;
        int column = p.s * STAGE_COLS + warp % TEAM * GROUP + (lane & 3) * 8;
        int n = min((a.down.k - column + TEAM * GROUP - 1) / (TEAM * GROUP), N);

        from = middle<B>(a, all, row, pair, column);
        of = pair != NONE && n > 0 ? (1u << n) - 1 : 0;
    }
    /* Begins to copy it to groups `first` and after of x, which nobody else reads. */
    template <int B>
    __device__ __forceinline__ void copy(const stage_x &x, int first, int warp) const
    {
        constexpr int TEAM = team_of<B>::SIZE, N = team_of<B>::TURNS * SHARE;

#pragma unroll
        for (int j = 0; j < N; j++) {
            if (of >> j & 1) {
                async_copy_or_zeros(x.address(first + warp % TEAM + TEAM * j),
                                    from + j * TEAM * GROUP, true);
            }
        }
        async_commit();
    }
    /* Waits until all that a copy has brought was there. Large results, of the chosen
     * expert k, become zero in x and are noted. */
    template <int B>
    __device__ __forceinline__ void settle(const stage_x &x, int first, large_experts &large, int k,
                                           int warp)
    {
        constexpr int TEAM = team_of<B>::SIZE, N = team_of<B>::TURNS * SHARE;
        uint32_t most = 0;

#pragma unroll 1
        for (;;) {
            uint32_t missing = 0;
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (of >> j & 1) {
                    uint4 v = load_shared16(x.address(first + warp % TEAM + TEAM * j));
                    bool none = v.x == NOT_THERE || v.y == NOT_THERE || v.z == NOT_THERE ||
                                v.w == NOT_THERE;
                    missing |= none ? 1u << j : 0;
                    if (B == 8) {
                        most = none ? most : __vmaxu2(most, most_of(v, ~0u));
                    }
                }
            }
            of = missing;
            if (!__any_sync(ROUTE_LANES, missing)) {
                break;
            }
            copy<B>(x, first, warp);
            async_wait<0>();
        }
        random_delay();
        if (B == 8 && max(most >> 16, most & 0xffffu) >= HALF_LARGE) {
            atomicOr(large.bit + k / 32, 1u << k % 32);
#pragma unroll 1
            for (int i = 0; i < N * 4; i++) {
                uint32_t word = x.address(first + warp % TEAM + i / 4 * TEAM) + i % 4 * 4;
                uint32_t v = load_word(word);
                store_word(word, v & ~large_halves(v));
            }
        }
        __syncwarp();
    }
};

/* A tile of down. first: this team's first stage. x has `slots` slots, 1 or 2, for each
 * team. */
template <typename T, int B, bool GROUPED, int R>
__device__ __forceinline__ void
multiply_down_tile(float (&sum)[4], const expert_few &a, const chosen_experts &c, uint16_t *all,
                   large_experts &large, ring<R> &r, const stage_x &x, int slots, int first,
                   int tile, int warp, int lane)
{
    constexpr int SLOT = STAGE_COLS / GROUP, TEAM = team_of<B>::SIZE, TEAMS = team_of<B>::COUNT;
    int per = (a.down.k + STAGE_COLS - 1) / STAGE_COLS, slot = warp / TEAM * slots * SLOT,
        flip = (slots - 1) * SLOT;
    down_place now = {}, ahead;
    down_part part, next;

    now.skip(first, per);
    ahead = now;
    part.set<B>(a, c, all, ahead, warp, lane);
    part.copy<B>(x, slot, warp);
    ahead.skip(TEAMS, per);
    next.set<B>(a, c, all, ahead, warp, lane);
    if (slots > 1) {
        next.copy<B>(x, slot + SLOT, warp);
    } else {
        async_commit();
    }
    int at = slot;
#pragma unroll 1
    while (now.k < c.n) {
        int64_t row = (int64_t)c.expert[now.k] * a.down.width + tile * TILE + (lane >> 2);
        float2 share = *(const float2 *)&c.share[now.k][(lane & 3) * 2];
        float2 scale = tile_scale<B, GROUPED>(a.down, row, row + TILE / 2);
        sums f = {};
        async_wait<1>();
        part.settle<B>(x, at, large, now.k, warp);
        multiply_stage<T, B, GROUPED>(r, f, x, at, a.down, {row, TILE / 2}, now.s, warp, lane);
        part = next;
        ahead.skip(TEAMS, per);
        if (slots == 1) {
            part.copy<B>(x, at, warp);
            next.set<B>(a, c, all, ahead, warp, lane);
            async_commit();
        } else {
            next.set<B>(a, c, all, ahead, warp, lane);
            next.copy<B>(x, at, warp);
        }
        at = 2 * slot + flip - at;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float of = j & 1 ? share.y : share.x;
            float v = (j < 2 ? scale.x : scale.y) * (f.even[j] + f.odd[j]);
            sum[j] += of != 0.0f ? of * v : 0.0f;
        }
        now.skip(TEAMS, per);
    }
    async_wait<0>(); /* no copy is left for the next tile's slots, nor behind the end */
}

template <typename T, int B, bool GROUPED, int R>
__device__ __forceinline__ void multiply_down(const expert_few &a, const chosen_experts &c,
                                              uint16_t *all, large_experts &large, ring<R> &r,
                                              const stage_x &x, int slots, int first,
                                              const sum_ring &to, int &n_tile, int warp, int lane)
{
    constexpr int TEAMS = team_of<B>::COUNT;
    int n = c.n * ((a.down.k + STAGE_COLS - 1) / STAGE_COLS);

#pragma unroll 1
    for (int t = blockIdx.x; t < a.down.width / TILE; t += gridDim.x) {
        float sum[4] = {};
        multiply_down_tile<T, B, GROUPED>(sum, a, c, all, large, r, x, slots, first, t, warp, lane);
        to.give(sum, n_tile++, warp, lane);
        first = n > 0 ? (first + n * TEAMS - n) % TEAMS : first;
    }
}

/* ---- the kernel ---- */

/* Whose stages have room for those of both. */
template <int B, int D> constexpr int WIDER = stage_of<B>::BYTES < stage_of<D>::BYTES ? D : B;

/* Dynamic shared memory: the ring, then activations, then the norm's weight. */
struct stream_layout {
    int count, in_flight, x_rows; /* stages; rows that there is room for */
    int slots;                    /* of a team for activations of down */
    int x, norm, bytes;
};

struct stream_shared {
    float4 sums[SUM_BUFFERS * MULTIPLIERS];
    float squares[WARPS * ROWS];
    uint32_t row_most[ROWS];
    large_experts large;
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], norm, router;
    uint64_t sums_full[SUM_BUFFERS], sums_empty[SUM_BUFFERS];
    chosen_experts chosen;
    exchange_turn turn;
};

template <typename T, int B, int D, bool GROUPED, int R>
__device__ __forceinline__ void multiply(const expert_few &a, ring<R> &r, stream_shared &s,
                                         const stage_x &x, int slots, const sum_ring &to,
                                         uint32_t norm_weight, int warp, int lane)
{
    const row_source from = {
        a.up.x,      a.up.x_stride,           a.route.rows, a.up.k,    a.normed ? &a.norm : NULL,
        norm_weight, shared_address(&s.norm), a.h,          a.h_stride};
    const row_most most = {s.row_most};
    int n_tile = 0;

    pdl_wait();
    if (threadIdx.x == MULTIPLIERS - 1) { /* load_rows waits for it, too */
        async_copy_or_zeros(shared_address(&s.turn), &a.exchange->turn, true);
    }
    load_rows<T, B>(x, from, s.squares, most, warp, lane);
    auto &set = a.exchange->set[s.turn.set];
    if (blockIdx.x * ROUTER_TILE < a.route.n) {
        barrier_wait(shared_address(&s.router), 0);
        score_tile<T>(a, x, r.base, s.sums, (float *)set.scores, warp, lane);
    }
    scale_rows<B>(x, from, most, warp, lane);
    choose(a, s.chosen, (const float *)set.scores, warp, lane);
    choice_sync();
    int first = multiply_up<T, B, GROUPED>(a, r, s.chosen, x, to, n_tile, warp, lane);
    pdl_release();
    multipliers_sync(); /* down's activations take the place of up's */
    multiply_down<T, D, GROUPED>(a, s.chosen, set.middle, s.large, r, x, slots, first, to, n_tile,
                                 warp, lane);
}

/* The weights of up are stored as B says, those of down as D. */
template <typename T, int B, int D, bool GROUPED>
__global__ void __launch_bounds__(THREADS, 1)
    stream_kernel(const __grid_constant__ expert_few a, const __grid_constant__ expert_ranks ranks,
                  const stream_layout layout)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ stream_shared s;
    uint32_t base = shared_address(shared), norm_weight = base + layout.norm;
    int lane = threadIdx.x & 31, warp = __shfl_sync(ROUTE_LANES, threadIdx.x >> 5, 0);
    ring<WIDER<B, D>> r = {
        base, shared_address(s.full), shared_address(s.empty), layout.count, layout.in_flight, 0,
        0};

    const sum_ring to = {s.sums, shared_address(s.sums_full), shared_address(s.sums_empty)};

    for (int i = threadIdx.x; i < MOST_PAIRS * ROWS; i += THREADS) {
        s.chosen.pair[0][i] = NONE;
        s.chosen.share[0][i] = 0.0f;
    }
    if (threadIdx.x < ROWS) {
        s.row_most[threadIdx.x] = 0;
    }
    if (threadIdx.x < MOST_PAIRS / 32) {
        s.large.bit[threadIdx.x] = 0;
    }
    if (threadIdx.x < MOST_EXPERTS / 32) {
        s.chosen.bit[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.norm), 1);
        barrier_init(shared_address(&s.router), 1);
        barrier_init_fence();
    } else if (threadIdx.x == 32) {
        to.init();
    }
    ring_init(r);
    __syncthreads();
    if (warp < WARPS) {
        stage_x x(base + layout.x, layout.x_rows, lane);
        multiply<T, B, D, GROUPED>(a, r, s, x, layout.slots, to, norm_weight, warp, lane);
        return;
    }
    if (warp >= WARPS + LOADERS) {
        finish<T, B, D, GROUPED>(a, ranks, s.chosen, s.turn, s.large, to, {s.row_most},
                                 warp - WARPS - LOADERS, lane);
        return;
    }
    if (warp == WARPS && lane == 0 && a.normed) {
        bulk_copy_all(norm_weight, a.norm.weight, a.up.k * 2, shared_address(&s.norm));
    }
    if (warp == WARPS) {
        load_router(a, r.base, shared_address(&s.router), lane);
    }
    load_weights<B, D>(a, r, s.chosen, warp - WARPS, lane);
}

/* What a block of the chip has beside the kernel's own shared memory. */
constexpr int SHARED_MOST = 227 * 1024 - (int)sizeof(stream_shared) - 128;

/* For so many rows, of up to k columns of up. Fewer rows leave more to the ring. */
template <int B, int D> stream_layout layout_of(int rows, int k)
{
    int depth = (k + STAGE_COLS - 1) / STAGE_COLS, x_rows = room_for(rows);
    int slots = x_rows == ROWS ? 1 : 2;
    int of_down = slots * team_of<B>::COUNT;
    int x = (depth > of_down ? depth : of_down) * x_stage_bytes(x_rows),
        norm = depth * STAGE_COLS * 2;
    int count = (SHARED_MOST - x - norm) / stage_of<WIDER<B, D>>::BYTES;

    count = count < MOST_STAGES ? count : (int)MOST_STAGES;
    int ring = count * stage_of<WIDER<B, D>>::BYTES;
    return {count, stages_in_flight<B>(count), x_rows, slots, ring, ring + x, ring + x + norm};
}

template <typename T, int B, int D, bool GROUPED> struct stream_launch {
    static bool fits(void)
    {
        static bool allowed = allow_shared(stream_kernel<T, B, D, GROUPED>, SHARED_MOST);

        return allowed;
    }
    static void run(const expert_few &a, const expert_ranks &ranks, int32_t n_blocks,
                    cudaStream_t stream)
    {
        const stream_layout l = layout_of<B, D>(a.route.rows, a.up.k);

        launch(stream_kernel<T, B, D, GROUPED>, dim3((unsigned)n_blocks), dim3(THREADS), l.bytes,
               stream, a, ranks, l);
    }
};

} // namespace expert_stream

#endif
