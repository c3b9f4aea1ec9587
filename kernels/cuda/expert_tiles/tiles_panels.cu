/* Products of experts whose weights are panels of codes (panels.h), by tiles with mma.
 * Codes are widened to bf16 in the registers of the lanes that multiply them, exactly,
 * or rounded once where they are in groups; a row's factor multiplies its sums. Those
 * of int4 are widened without their scale, which multiplies the sums of a group.
 *
 * A block multiplies 128 rows of an expert's weight, gated: 64 of gate and the 64 of up
 * that go with them, with all rows of one tile. Each of its eight warps has 16 rows of
 * weights, gated: 8 and 8, so that gate and up meet in a lane, and no code is widened
 * twice. Blocks are persistent, and their ring of stages runs on from one piece of work
 * to the next. Of 32 columns a lane has 8 neighbours of two rows.
 */
#include "kernels/cuda/expert_tiles/tile_walk.cuh"
#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/quant/groups.cuh"

namespace
{

using namespace expert_tiles;
using T = __nv_bfloat16;

enum {
    DEPTH = 256, /* columns of a stage */
    GROUPS = DEPTH / PANEL_GROUP,
    THREADS = 256,
    PANELS = 16,      /* of a stage: gated, eight of each kind */
    X_ROW = DEPTH * 2 /* bytes of a row of x */
};
static_assert(PANEL_COLS % DEPTH == 0, "a stage lies in one segment");

/* Bytes of a stage's codes, of these and their scales, and of a stage for n rows. */
constexpr int codes_bytes(int kind)
{
    return PANELS * GROUPS * panel_code_bytes(kind);
}
constexpr int weight_bytes(int kind)
{
    return codes_bytes(kind) + PANELS * GROUPS * PANEL_ROWS * panel_scale_bytes(kind);
}
constexpr int stage_bytes(int n, int kind)
{
    return weight_bytes(kind) + n * X_ROW;
}
/* Stages where shared memory is that of Hopper; of few rows two blocks fit a
 * multiprocessor. */
constexpr int stages_of(int n, int kind)
{
    return n > 32                                 ? 3
           : panel_code_bytes(kind) > PANEL_CODES ? 2
           : panel_scale_bytes(kind) < 4          ? 4
                                                  : 3;
}

template <int N, int KIND> struct panels_layout {
    static constexpr int CODE = panel_code_bytes(KIND), SCALE = panel_scale_bytes(KIND);
    static constexpr int CODES = codes_bytes(KIND);
    static constexpr int X = weight_bytes(KIND);
    static constexpr int STAGE = stage_bytes(N, KIND);
};

template <bool GATED> using place = position<(GATED ? 64 : 128), DEPTH>;

/* Address of 16-byte chunk `chunk` of row r: lanes that read together hit each bank
 * once. */
__device__ __forceinline__ uint32_t x_chunk(uint32_t base, int r, int chunk)
{
    return base + r * X_ROW + ((chunk ^ (r & 1) << 2) << 4);
}

/* Groups of a stage. */
__device__ __forceinline__ int groups_of(const expert_product &a, int step)
{
    return min((int)DEPTH, a.k - step * DEPTH) / PANEL_GROUP;
}

/* What a thread loads of the stages of an item: of every fourth panel 16 bytes of codes
 * (64 threads have a panel's), of one panel scales, and of every eighth row of x. */
template <int N, bool GATED, int KIND> struct loader {
    using L = panels_layout<N, KIND>;
    static constexpr int EACH = PANELS / 4, ROWS = N / 8;
    static constexpr int CHUNKS = GROUPS * PANEL_ROWS * L::SCALE / 16; /* of a panel's scales */
    const char *panel[EACH], *scale; /* of the segment's beginning; NULL: there is none */
    const T *x[ROWS];                /* NULL: the tile lacks the row */
    int64_t whole;                   /* bytes of a panel */

    __device__ __forceinline__ loader(const expert_product &a) : whole(panel_bytes(a.k, KIND)) {}

    /* The i-th panel of a block: gated, those of gate, then those of up. */
    __device__ __forceinline__ const char *at(const expert_product &a, const place<GATED> &p, int i)
    {
        int kind = GATED ? i / 8 : 0, row = (GATED ? i % 8 : i) * PANEL_ROWS;

        return p.column + row < a.width
                   ? (const char *)a.w + (p.first + kind * a.width + row) / PANEL_ROWS * whole
                   : nullptr;
    }
    __device__ __forceinline__ void enter(const expert_product &a, const place<GATED> &p)
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            panel[i] = at(a, p, i * 4 + threadIdx.x / 64);
        }
        scale = threadIdx.x < PANELS * CHUNKS ? at(a, p, threadIdx.x / CHUNKS) : nullptr;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int r = threadIdx.x / 32 + 8 * i;
            x[i] = nullptr;
            if (r < p.tile.n) {
                x[i] = (const T *)a.x + p.list[r] / a.divide * a.x_stride + threadIdx.x % 32 * 8;
            }
        }
    }
    /* Rows that the tile lacks are not loaded: no result that is stored depends on
     * them. */
    __device__ __forceinline__ void load(const expert_product &a, uint32_t to, int step) const
    {
        int first = step * DEPTH, segment = first / PANEL_COLS * PANEL_COLS, n = groups_of(a, step);
        int from = panel_bytes(segment, KIND), in = (first - segment) / PANEL_GROUP;
        int codes = from + in * L::CODE;
        int scales = from + in * PANEL_ROWS * L::SCALE +
                     min((int)PANEL_COLS, a.k - segment) / PANEL_GROUP * L::CODE;
        int chunk;

#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < GROUPS * L::CODE; j += 64 * 16) {
                chunk = j + threadIdx.x % 64 * 16;
                if (panel[i] && chunk < n * L::CODE) {
                    async_copy(to + (i * 4 + threadIdx.x / 64) * GROUPS * L::CODE + chunk,
                               panel[i] + codes + chunk);
                }
            }
        }
        chunk = threadIdx.x % CHUNKS;
        if (scale && chunk * 16 < n * PANEL_ROWS * L::SCALE) {
            async_copy(to + L::CODES + threadIdx.x * 16, scale + scales + chunk * 16);
        }
        chunk = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (x[i] && chunk < n * 4) {
                async_copy(x_chunk(to + L::X, threadIdx.x / 32 + 8 * i, chunk), x[i] + first);
            }
        }
    }
};

/* Eight codes of a panel's row as bf16: those of this lane in a group. */
template <int KIND>
__device__ __forceinline__ uint4 panel_values(uint32_t stage, int panel, int group, bool halves,
                                              int lane)
{
    using L = panels_layout<16, KIND>; /* of codes and scales, as for other rows */
    uint32_t at = panel * GROUPS + group;
    panel_eight<KIND> e;

    e.load(stage + at * L::CODE, stage + L::CODES + at * (PANEL_ROWS * L::SCALE), group, lane);
    return e.values(halves, group, lane);
}

/* The same of int4, without their scale. */
__device__ __forceinline__ uint4 panel_codes(int4_group &ret, uint32_t stage, int panel, int group,
                                             int lane)
{
    using L = panels_layout<16, PANELS_INT4>;
    uint32_t at = panel * GROUPS + group;

    ret = int4_group(load_word(stage + L::CODES + (at * PANEL_ROWS + (lane >> 2)) * 4));
    return ret.values(load_word(stage + at * PANEL_CODES + lane * 4));
}

/* d += a warp's 16 rows of weights, of panels `panel` and `other`, times x. */
template <int TILES, int KIND>
__device__ __forceinline__ void multiply_stage(float (&d)[TILES][4], uint32_t stage, uint32_t rows,
                                               int panel, int other, int groups, bool halves,
                                               int lane)
{
#pragma unroll 2
    for (int group = 0; group < groups; group++) {
        uint4 low, high;
        int4_group of[2]; /* of int4 */
        if constexpr (KIND == PANELS_INT4) {
            low = panel_codes(of[0], stage, panel, group, lane);
            high = panel_codes(of[1], stage, other, group, lane);
        } else {
            low = panel_values<KIND>(stage, panel, group, halves, lane);
            high = panel_values<KIND>(stage, other, group, halves, lane);
        }
        uint32_t first[4] = {low.x, high.x, low.y, high.y},
                 second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint4 x = load_shared16(x_chunk(rows, i * 8 + (lane >> 2), group * 4 + (lane & 3)));
            if constexpr (KIND == PANELS_INT4) {
                float sum[4] = {};
                mma16816<T>(sum, first, x.x, x.y);
                mma16816<T>(sum, second, x.z, x.w);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    d[i][j] += of[j / 2].scale * sum[j];
                }
            } else {
                mma16816<T>(d[i], first, x.x, x.y);
                mma16816<T>(d[i], second, x.z, x.w);
            }
        }
    }
}

/* The results of a warp, whose rows of weights are `low` and `high` in the stacked
 * weight, in this lane; of column `column` of the results, not gated of column + 8,
 * too. */
template <int TILES, bool GATED>
__device__ __forceinline__ void store_panels(const float (&d)[TILES][4], const expert_product &a,
                                             const place<GATED> &p, int64_t low, int64_t high,
                                             int column, int lane)
{
    float scale[2] = {__ldg(a.w_scale + low), __ldg(a.w_scale + high)}, bias[2] = {};

    if (a.bias) {
        bias[0] = to_float(((const T *)a.bias)[low]);
        bias[1] = to_float(((const T *)a.bias)[high]);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int r = i * 8 + (lane & 3) * 2 + c;
            float u = scale[0] * d[i][c] + bias[0], v = scale[1] * d[i][2 + c] + bias[1];
            if (r >= p.tile.n) {
                continue;
            }
            T *to = (T *)a.out + p.list[r] * a.out_stride + column;
            if (GATED) {
                *to = from_float<T>(expert_gate(u, v, a.act, a.limit));
            } else {
                to[0] = from_float<T>(u);
                to[8] = from_float<T>(v);
            }
        }
    }
}

template <int TILES> __device__ __forceinline__ void clear(float (&d)[TILES][4])
{
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.0f;
    }
}

template <int N, bool GATED, int KIND, int STAGES>
__global__ void __launch_bounds__(THREADS, N <= 32 ? 2 : 1)
    panels_kernel(const __grid_constant__ expert_product a, const __grid_constant__ expert_lists l)
{
    using L = panels_layout<N, KIND>;
    constexpr int TILES = N / 8;
    extern __shared__ __align__(1024) char shared[];
    uint32_t base = shared_address(shared);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int panel = GATED ? warp : 2 * warp, other = GATED ? warp + 8 : panel + 1;
    int row = panel * PANEL_ROWS + (lane >> 2), apart = GATED ? a.width : PANEL_ROWS;
    float d[TILES][4] = {};

    pdl_wait();
    pdl_release();
    place<GATED> now(a, l), ahead(a, l);
    loader<N, GATED, KIND> load(a);
    if (ahead.more()) {
        load.enter(a, ahead);
    }
    for (int i = 0; i < STAGES - 1; i++) {
        load_next(load, ahead, a, l, base + i * L::STAGE);
    }
    for (int i = 0; now.more(); i++) {
        async_wait<STAGES - 2>();
        __syncthreads(); /* stage i is there; all are done with the one before */
        load_next(load, ahead, a, l, base + (i + STAGES - 1) % STAGES * L::STAGE);
        bool mine = now.column + panel * PANEL_ROWS < a.width;
        if (mine) {
            uint32_t stage = base + i % STAGES * L::STAGE;
            multiply_stage<TILES, KIND>(d, stage, stage + L::X, panel, other,
                                        groups_of(a, now.step), a.group_cols == 16, lane);
        }
        if (mine && (now.step + 1) * DEPTH >= a.k) {
            store_panels<TILES, GATED>(d, a, now, now.first + row, now.first + row + apart,
                                       now.column + row, lane);
            clear<TILES>(d);
        }
        now.next(a, l);
    }
}

/* Kernels with MOST stages, or fewer. */
template <int KIND, int MOST> struct panels_of {
    template <int N, bool GATED> struct tile {
        static constexpr int STAGES = stages_of(N, KIND) < MOST ? stages_of(N, KIND) : MOST;
        static constexpr auto KERNEL = panels_kernel<N, GATED, KIND, STAGES>;
        static constexpr int BLOCK = THREADS, BYTES = STAGES * stage_bytes(N, KIND);
    };
};

/* Tiles of 16 rows have one stage less where a block can have no more than 99 KiB. */
template <int KIND>
bool run(const expert_product &a, const expert_lists &l, int32_t n_blocks, cudaStream_t stream)
{
    using few = panels_of<KIND, 3>;

    return launch_product<panels_of<KIND, 4>::template tile>(a, l, n_blocks, stream) ||
           (l.tile_rows == 16 &&
            (a.gated
                 ? launch_tiles<typename few::template tile<16, true>>(a, l, n_blocks, stream)
                 : launch_tiles<typename few::template tile<16, false>>(a, l, n_blocks, stream)));
}

bool run_kind(const expert_product &a, const expert_lists &l, int32_t n_blocks, cudaStream_t stream)
{
    switch (a.panels) {
    case PANELS_FP4:
        return run<PANELS_FP4>(a, l, n_blocks, stream);
    case PANELS_INT4:
        return run<PANELS_INT4>(a, l, n_blocks, stream);
    case PANELS_NVFP4:
        return run<PANELS_NVFP4>(a, l, n_blocks, stream);
    case PANELS_GROUPS_4:
        return run<PANELS_GROUPS_4>(a, l, n_blocks, stream);
    case PANELS_GROUPS_2:
        return run<PANELS_GROUPS_2>(a, l, n_blocks, stream);
    case PANELS_LEVELS:
        return run<PANELS_LEVELS>(a, l, n_blocks, stream);
    default:
        return run<PANELS_GROUPS_8>(a, l, n_blocks, stream);
    }
}

} // namespace

extern "C" int32_t expert_panels_rows(int32_t kind)
{
    int32_t rows = 64;

    while (rows > 16 && stages_of(rows, kind) * stage_bytes(rows, kind) > cuda_shared_limit()) {
        rows /= 2;
    }
    return rows;
}

extern "C" bool launch_expert_panels(const struct expert_product *a, const struct expert_lists *l,
                                     int32_t n_blocks, cudaStream_t stream)
{
    bool fits = a->panels && a->w_scale && a->type == T_BF16 && a->k % (2 * PANEL_GROUP) == 0 &&
                a->width % (2 * PANEL_ROWS) == 0 && a->x_stride % 8 == 0 && l->tile_rows <= 64;

    return fits && run_kind(*a, *l, n_blocks, stream);
}
