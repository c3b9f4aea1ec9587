/* The products of a launch of few rows (stream.cu).
 *
 * What runs once is short, and every loop over stages is one loop in the code, too: a
 * layer's kernels take turns, so that most of what a launch executes is fetched from
 * the second-level cache, eight instructions at a time, and a loop is fetched once.
 * Activations lie in shared memory for that, where registers would need all stages
 * unrolled.
 */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_PRODUCTS_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_STREAM_STREAM_PRODUCTS_CUH

#include "kernels/cuda/expert_stream/stream_ring.cuh"
#include "kernels/cuda/gemm/async_copy.cuh"
#include "kernels/cuda/quant/groups.cuh"

namespace expert_stream
{
/* ---- weights ---- */

/* Eight neighbours of a weight's row, as they are stored in a stage at `stage`: of
 * group `group` of `groups`, this lane's columns of row `half` * 8 + lane / 4. */
template <int B> struct codes { /* of panels */
    static constexpr int CODE = panel_code_bytes(KIND_OF<B>),
                         SCALES = PANEL_ROWS * panel_scale_bytes(KIND_OF<B>);
    panel_eight<KIND_OF<B>> e;

    __device__ __forceinline__ void load(uint32_t stage, int group, int groups, int half, int lane)
    {
        uint32_t panel = stage + half * stage_of<B>::PANEL;
        e.load(panel + group * CODE, panel + groups * CODE + group * SCALES, group, lane);
    }
    __device__ __forceinline__ uint4 values(bool halves, int lane) const
    {
        return e.values(halves, 0, lane);
    }
};
template <> struct codes<16> {
    uint4 v;

    __device__ __forceinline__ void load(uint32_t stage, int group, int groups, int half, int lane)
    {
        v = load_shared16(stage + ((lane >> 2) + half * 8) * stage_of<16>::PITCH + group * 64 +
                          (lane & 3) * 16);
    }
    __device__ __forceinline__ uint4 values(bool, int) const
    {
        return v;
    }
};
template <> struct codes<8> {
    uint2 v;

    __device__ __forceinline__ void load(uint32_t stage, int group, int groups, int half, int lane)
    {
        uint32_t at =
            stage + ((lane >> 2) + half * 8) * stage_of<8>::PITCH + group * 32 + (lane & 3) * 8;
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    }
    __device__ __forceinline__ uint4 values(bool, int) const
    {
        uint4 ret;

        halves_of_e4m3(v.x, ret.x, ret.y);
        halves_of_e4m3(v.y, ret.z, ret.w);
        return ret;
    }
};
/* Of panels of int4, without their scale. */
template <> struct codes<B_INT4> {
    uint32_t v, word;

    __device__ __forceinline__ void load(uint32_t stage, int group, int groups, int half, int lane)
    {
        uint32_t panel = stage + half * stage_of<B_INT4>::PANEL;
        v = load_word(panel + group * PANEL_CODES + lane * 4);
        word = load_word(panel + groups * PANEL_CODES + (group * PANEL_ROWS + (lane >> 2)) * 4);
    }
    __device__ __forceinline__ uint4 values(bool, int) const
    {
        return int4_group(word).values(v);
    }
    __device__ __forceinline__ float scale(void) const
    {
        return int4_group(word).scale;
    }
};

/* What is multiplied. */
template <typename T, int B> struct factor_of {
    using type = T;
};
template <typename T> struct factor_of<T, 8> {
    using type = __half;
};

/* ---- activations ---- */

/* Shared memory for stages of activations, of `rows` rows that there is room for: by
 * stage, group, row and a lane's eight columns. Where a row has none, or there is no
 * row, anything may lie: it meets no sum but its own. */
struct stage_x {
    uint32_t base, at; /* of the whole, and of this lane's part of group 0 */
    int rows;
    bool has; /* this lane's row is there */

    __device__ __forceinline__ stage_x(uint32_t address, int most_rows, int lane)
        : base(address), at(base + (lane >> 2) * 64 + (lane & 3) * 16), rows(most_rows),
          has((lane >> 2) < rows)
    {
    }
    /* Of eight columns of a row, counted from the first stage's first one. */
    __device__ __forceinline__ uint32_t place(int row, int column) const
    {
        return base + (((column / GROUP) * rows + row) * 4 + column / 8 % 4) * 16;
    }
    /* What this lane multiplies of a group, and where it lies. */
    __device__ __forceinline__ uint32_t address(int group) const
    {
        return at + group * rows * 64;
    }
    __device__ __forceinline__ vector16 read(int group) const
    {
        uint4 u = {};

        if (has) {
            u = load_shared16(address(group));
        }
        return {{u.x, u.y, u.z, u.w}};
    }
};

/* Bytes of a stage of stage_x. */
__host__ __device__ constexpr int x_stage_bytes(int rows)
{
    return STAGE_COLS * rows * 2;
}

/* The greatest values of rows of bf16, as their bits without a sign: shared [ROWS], 0
 * before. Kept where weights are codes of 8 bits alone. */
struct row_most {
    uint32_t *of;

    /* By whole warps; two: the greatest of either half of this lane's values. */
    __device__ __forceinline__ void add(int row, uint32_t two, int lane) const
    {
        two = __reduce_max_sync(ROUTE_LANES, max(two & 0xffffu, two >> 16));
        if (lane == 0) {
            atomicMax(of + row, two);
        }
    }
    /* The exponent, with its bias, of the power of two that brings a row's greatest
     * value to 2^14; that power always has an inverse. */
    __device__ __forceinline__ uint32_t scale(int row) const
    {
        return 2 * 127 + 14 - max(of[row] >> 7, 15);
    }
};

/* The greatest 16 bits of either half of eight values, whose `bits` count. */
__device__ __forceinline__ uint32_t most_of(const uint4 &v, uint32_t bits)
{
    return __vmaxu2(__vmaxu2(v.x & bits, v.y & bits), __vmaxu2(v.z & bits, v.w & bits));
}

/* Where rows of activations come from, and the norm that they pass. */
struct row_source {
    const void *x; /* [rows, k] */
    int64_t stride;
    int rows, k;
    const norm_args *norm; /* NULL: none */
    uint32_t weight;       /* of the norm, in shared memory, there when `there` says so */
    uint32_t there;
    /* The first block stores normed rows here: one that others wait for, so that x,
     * which they may add to, has been read. NULL: it does not. */
    void *h;
    int64_t h_stride;
};

static_assert(WARPS == 16 && ROWS == 8, "row_share counts on them");

/* How rows are divided among the threads that multiply: WARPS / stage_x.rows warps have
 * a row, of which a thread has eight columns each `sweep`. */
struct row_share {
    int warps, row, first, sweep; /* of a row; this thread's row and its first column */

    __device__ __forceinline__ row_share(const stage_x &x, int warp, int lane)
    {
        int shift = x.rows == 1 ? 4 : x.rows == 4 ? 2 : 1;

        warps = 1 << shift;
        row = warp >> shift;
        first = ((warp & (warps - 1)) * 32 + lane) * 8;
        sweep = warps * 32 * 8;
    }
};

/* The sums of squares of each row's values, as each warp has them: shared
 * [ROWS][WARPS]. */
template <typename T>
__device__ __forceinline__ void sum_squares(const stage_x &x, const row_source &s,
                                            const row_share &of, float *squares, int warp, int lane)
{
    float sum = 0.0f;

    if (of.row < s.rows) {
#pragma unroll 1
        for (int c = of.first; c < s.k; c += of.sweep) {
            uint4 v = load_shared16(x.place(of.row, c));
            const uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const T *t = (const T *)&u[i];
                float low = to_float(t[0]), high = to_float(t[1]);
                sum += low * low;
                sum += high * high;
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        squares[of.row * WARPS + (warp & (of.warps - 1))] = sum;
    }
    multipliers_sync();
}

/* Norms each row in its place. */
template <typename T, int B>
__device__ __forceinline__ void norm_rows(const stage_x &x, const row_source &s,
                                          const row_share &of, const float *squares,
                                          const row_most &most, int lane)
{
    const bool stores = s.h && blockIdx.x == 0;
    float sum = 0.0f;
    uint32_t two = 0;

    if (of.row >= s.rows) {
        return;
    }
#pragma unroll 1
    for (int w = 0; w < of.warps; w += 2) { /* an even number of them */
        float2 two = *(const float2 *)(squares + of.row * WARPS + w);
        sum += two.x;
        sum += two.y;
    }
    float scale = rsqrtf(sum / s.k + s.norm->eps), offset = s.norm->weight_offset;
#pragma unroll 1
    for (int c = of.first; c < s.k; c += of.sweep) {
        uint32_t at = x.place(of.row, c);
        uint4 v = load_shared16(at), w = load_shared16(s.weight + c * 2);
        uint32_t u[4] = {v.x, v.y, v.z, v.w};
        const uint32_t by[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const T *t = (const T *)&u[i], *g = (const T *)&by[i];
            float low = to_float(t[0]) * scale, high = to_float(t[1]) * scale;
            u[i] = pack2<T>(low * (to_float(g[0]) + offset), high * (to_float(g[1]) + offset));
        }
        v = make_uint4(u[0], u[1], u[2], u[3]);
        store_shared16(at, v);
        if (B == 8) {
            two = __vmaxu2(two, most_of(v, 0x7fff7fffu));
        }
        if (stores) {
            *(uint4 *)((T *)s.h + of.row * s.h_stride + c) = v;
        }
    }
    if (B == 8) {
        most.add(of.row, two, lane);
    }
}

/* The same of rows that are not normed. */
template <int B>
__device__ __forceinline__ void find_most(const stage_x &x, const row_source &s,
                                          const row_share &of, const row_most &most, int lane)
{
    if constexpr (B == 8) {
        uint32_t two = 0;

        if (of.row >= s.rows) {
            return;
        }
#pragma unroll 1
        for (int c = of.first; c < s.k; c += of.sweep) {
            two = __vmaxu2(two, most_of(load_shared16(x.place(of.row, c)), 0x7fff7fffu));
        }
        most.add(of.row, two, lane);
    }
}

/* Brings rows to x, normed, by all warps that multiply, for all of them. squares:
 * shared [ROWS][WARPS]. */
template <typename T, int B>
__device__ __forceinline__ void load_rows(const stage_x &x, const row_source &s, float *squares,
                                          const row_most &most, int warp, int lane)
{
    const row_share of(x, warp, lane);

    if (of.row < s.rows) {
#pragma unroll 1
        for (int c = of.first; c < s.k; c += of.sweep) {
            async_copy_or_zeros(x.place(of.row, c), (const T *)s.x + of.row * s.stride + c, true);
        }
    }
    async_commit();
    async_wait<0>();
    if (s.norm) {
        sum_squares<T>(x, s, of, squares, warp, lane);
        barrier_wait(s.there, 0);
        norm_rows<T, B>(x, s, of, squares, most, lane);
    } else {
        find_most<B>(x, s, of, most, lane);
    }
    multipliers_sync();
}

/* With codes of 8 bits makes rows fp16, by row_most::scale: bits are lost below 2^-28
 * of a row's greatest value alone. By the threads that brought them; others have yet
 * to wait for them. */
template <int B>
__device__ __forceinline__ void scale_rows(const stage_x &x, const row_source &s,
                                           const row_most &most, int warp, int lane)
{
    if constexpr (B == 8) {
        const row_share of(x, warp, lane);

        if (of.row >= s.rows) {
            return;
        }
        float scale = __uint_as_float(most.scale(of.row) << 23);
#pragma unroll 1
        for (int c = of.first; c < s.k; c += of.sweep) {
            uint4 v = load_shared16(x.place(of.row, c));
            uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u[i] = pack2<__half>(__uint_as_float(u[i] << 16) * scale,
                                     __uint_as_float(u[i] & 0xffff0000u) * scale);
            }
            store_shared16(x.place(of.row, c), make_uint4(u[0], u[1], u[2], u[3]));
        }
    }
}

/* v: of sum_ring::take, of rows that scale_rows has scaled. */
template <int B>
__device__ __forceinline__ void unscale(float (&v)[4], const row_most &most, int lane)
{
    if constexpr (B == 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] *= __uint_as_float((2 * 127 - most.scale((lane & 3) * 2 + i % 2)) << 23);
        }
    }
}

/* ---- stages ---- */

/* f += eight columns of two rows of weights times those of x. */
template <typename T>
__device__ __forceinline__ void multiply8(sums &f, const uint4 &low, const uint4 &high,
                                          const vector16 &x)
{
    uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};

    mma16816<T>(f.even, first, x.v[0], x.v[1]);
    mma16816<T>(f.odd, second, x.v[2], x.v[3]);
}

__device__ __forceinline__ int stage_groups(int k, int stage)
{
    return min((int)STAGE_COLS, k - stage * STAGE_COLS) / GROUP;
}

/* Two rows of a weight, which a lane has of a tile: row lane / 4 and its eighth next
 * one, so many rows apart in the weight. */
struct row_pair {
    int64_t low;
    int apart;
};

/* f += the ring's next stage for this team, times the activations from group `first` of
 * x on. It is stage `stage` of a tile of p with the rows `rows`. In turns, so that
 * their code is fetched once. */
template <typename T, int B, bool GROUPED, int R>
__device__ __forceinline__ void multiply_stage(ring<R> &r, sums &f, const stage_x &x, int first,
                                               const expert_product &p, const row_pair &rows,
                                               int stage, int warp, int lane)
{
    constexpr bool SCALED = GROUPED && B != B_INT4; /* else scales lie with the codes */
    constexpr int TEAM = team_of<B>::SIZE, TURNS = team_of<B>::TURNS;
    using F = typename factor_of<T, B>::type;
    const bool halves = p.group_cols == 16;
    int groups = stage_groups(p.k, stage), g = warp % TEAM;

    barrier_wait(r.full + r.index * 8, r.phase);
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++, g += TEAM * SHARE) {
        codes<B> low[SHARE], high[SHARE];
        vector16 v[SHARE];
        float scale[SCALED ? 2 * SHARE : 1];
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            int group = g + TEAM * j;
            v[j] = x.read(first + group);
            if (group < groups) {
                low[j].load(r.stage(), group, groups, 0, lane);
                high[j].load(r.stage(), group, groups, 1, lane);
            }
            if constexpr (SCALED) {
                int at = min(stage * STAGE_COLS + group * GROUP, p.k - 1) >> p.group_shift;
                const float *of = p.w_scale + rows.low * p.n_groups + at;
                scale[2 * j] = __ldg(of);
                scale[2 * j + 1] = __ldg(of + rows.apart * p.n_groups);
            }
        }
        if (turn + 1 == TURNS) {
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(r.empty + r.index * 8);
            }
        }
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            if (g + TEAM * j >= groups) {
                continue;
            }
            if constexpr (!GROUPED) {
                multiply8<F>(f, low[j].values(halves, lane), high[j].values(halves, lane), v[j]);
            } else {
                sums s = {};
                float of[2];
                multiply8<F>(s, low[j].values(halves, lane), high[j].values(halves, lane), v[j]);
                if constexpr (B == B_INT4) {
                    of[0] = low[j].scale();
                    of[1] = high[j].scale();
                } else {
                    of[0] = scale[2 * j];
                    of[1] = scale[2 * j + 1];
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    f.even[i] += of[i / 2] * (s.even[i] + s.odd[i]);
                }
            }
        }
    }
    r.next(team_of<B>::COUNT);
}

/* ---- the ends of tiles ---- */

/* Sums of tiles on their way from the warps that multiply to those that finish: these
 * wait for memory (scales, biases, the residual stream) while the next tile is
 * multiplied. Tiles are numbered as the block takes them. */
struct sum_ring {
    float4 *sums;         /* shared [SUM_BUFFERS][WARPS][32] */
    uint32_t full, empty; /* addresses: barriers of each buffer */

    /* By one thread, before a barrier of the block. */
    __device__ __forceinline__ void init(void) const
    {
        barriers_init(full, SUM_BUFFERS, WARPS);
        barriers_init(empty, SUM_BUFFERS, 1);
    }
    /* A multiplying warp's part of tile n. */
    __device__ __forceinline__ void give(const float (&v)[4], int n, int warp, int lane) const
    {
        int b = n % SUM_BUFFERS;

        barrier_wait(empty + b * 8, (n / SUM_BUFFERS & 1) ^ 1);
        sums[(b * WARPS + warp) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(full + b * 8);
        }
    }
    __device__ __forceinline__ void give(const expert_stream::sums &f, int n, int warp,
                                         int lane) const
    {
        const float v[4] = {f.even[0] + f.odd[0], f.even[1] + f.odd[1], f.even[2] + f.odd[2],
                            f.even[3] + f.odd[3]};

        give(v, n, warp, lane);
    }
    /* v: of tile n, rows g and g + 8 of the weights, g = lane / 4, times rows 2 t and
     * 2 t + 1 of x, t = lane % 4. */
    __device__ __forceinline__ void take(float (&v)[4], int n, int lane) const
    {
        int b = n % SUM_BUFFERS;

        barrier_wait(full + b * 8, n / SUM_BUFFERS & 1);
        v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float4 u = sums[(b * WARPS + w) * 32 + lane];
            v[0] += u.x;
            v[1] += u.y;
            v[2] += u.z;
            v[3] += u.w;
        }
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(empty + b * 8);
        }
    }
};

/* Multiplies the tiles first, first + step, ... below `end` of a product whose tile t
 * has the rows `rows_of(t)`. s: this team's first stage, counted from that of the first
 * tile on. */
template <typename T, int B, bool GROUPED, int R, typename Rows>
__device__ __forceinline__ int multiply_tiles(const expert_product &p, ring<R> &r, const stage_x &x,
                                              const sum_ring &to, int &n_tile, int first, int step,
                                              int end, const Rows &rows_of, int s, int warp,
                                              int lane)
{
    int depth = (p.k + STAGE_COLS - 1) / STAGE_COLS;

#pragma unroll 1
    for (int t = first; t < end; t += step, s -= depth) {
        row_pair rows = GROUPED ? rows_of(t) : row_pair{};
        sums f = {};
#pragma unroll 1
        for (; s < depth; s += team_of<B>::COUNT) {
            multiply_stage<T, B, GROUPED>(r, f, x, s * (STAGE_COLS / GROUP), p, rows, s, warp,
                                          lane);
        }
        to.give(f, n_tile++, warp, lane);
    }
    return s;
}

/* Scales of two rows that multiply a tile's sums; 1 where there are none. */
template <int B, bool GROUPED>
__device__ __forceinline__ float2 tile_scale(const expert_product &p, int64_t row, int64_t other)
{
    return B != 16 && !GROUPED ? make_float2(__ldg(p.w_scale + row), __ldg(p.w_scale + other))
                               : make_float2(1.0f, 1.0f);
}

} // namespace expert_stream

#endif
