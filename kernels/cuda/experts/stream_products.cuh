/* The products of a launch of few rows (stream.cu).
 *
 * Every loop over stages is one loop in the code, too: a layer's kernels take turns, so
 * that most of what a launch executes is fetched from the second-level cache, and a
 * loop is fetched once. Activations lie in shared memory for that, where registers
 * would need all stages unrolled.
 */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_STREAM_PRODUCTS_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_STREAM_PRODUCTS_CUH

#include "kernels/cuda/experts/stream_ring.cuh"
#include "kernels/cuda/gemm/async_copy.cuh"
#include "kernels/cuda/quant/codes.cuh"

namespace expert_stream
{
/* ---- weights ---- */

/* Eight neighbours of a weight's row, as they are stored in a stage at `stage`: of
 * group `group` of `groups`, this lane's columns of row `half` * 8 + lane / 4. */
template <int B> struct codes;
template <> struct codes<16> {
    uint4 v;

    __device__ __forceinline__ void load(uint32_t stage, int group, int groups, int half, int lane)
    {
        v = load_shared16(stage + ((lane >> 2) + half * 8) * stage_of<16>::PITCH + group * 64 +
                          (lane & 3) * 16);
    }
    __device__ __forceinline__ uint4 values(void) const
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
    __device__ __forceinline__ uint4 values(void) const
    {
        return e4m3_values(v.x, v.y);
    }
};
template <> struct codes<4> {
    uint32_t v, scale;

    __device__ __forceinline__ void load(uint32_t stage, int group, int groups, int half, int lane)
    {
        uint32_t panel = stage + half * stage_of<4>::PANEL;
        v = load_word(panel + group * PANEL_CODES + lane * 4);
        asm volatile("ld.shared.u8 %0, [%1];"
                     : "=r"(scale)
                     : "r"(panel + groups * PANEL_CODES + group * PANEL_ROWS + (lane >> 2))
                     : "memory");
    }
    __device__ __forceinline__ uint4 values(void) const
    {
        uint32_t factor = fp4_factor<PANEL_GROUP>(scale);

        return make_uint4(fp4_values(fp4_pair(v, 0), factor), fp4_values(fp4_pair(v, 1), factor),
                          fp4_values(fp4_pair(v, 2), factor), fp4_values(fp4_pair(v, 3), factor));
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
    __device__ __forceinline__ uint4 values(void) const
    {
        return int4_group(word).values(v);
    }
    __device__ __forceinline__ float scale(void) const
    {
        return int4_group(word).scale;
    }
};

/* Eight activations in the order that codes<B>::values has. */
template <int B> __device__ __forceinline__ vector16 ordered(const vector16 &x)
{
    return B != 8 ? x
                  : vector16{
                        {__byte_perm(x.v[0], x.v[1], 0x5410), __byte_perm(x.v[0], x.v[1], 0x7632),
                         __byte_perm(x.v[2], x.v[3], 0x5410), __byte_perm(x.v[2], x.v[3], 0x7632)}};
}

/* ---- activations ---- */

/* Shared memory for stages of activations, of `rows` rows that there is room for: by
 * stage, group, row and a lane's eight columns. A lane reads what it wrote itself, so
 * nothing waits for other lanes. Rows that there is no room for are zeros. */
struct own_x {
    uint32_t at; /* this lane's part of its warp's first group */
    int rows;
    bool has; /* this lane's row is there */

    __device__ __forceinline__ own_x(uint32_t base, int most_rows, int warp, int lane)
        : at(base + (warp * most_rows * 4 + lane) * 16), rows(most_rows), has(lane >> 2 < most_rows)
    {
    }
    __device__ __forceinline__ uint32_t address(int stage, int j) const
    {
        return at + (stage * SHARE + j) * WARPS * rows * 64;
    }
    /* Copies 8 values, or writes zeros; there when async_wait says so. */
    __device__ __forceinline__ void copy(int stage, int j, const void *from, bool real) const
    {
        if (has) {
            async_copy_or_zeros(address(stage, j), from, real);
        }
    }
    __device__ __forceinline__ vector16 read(int stage, int j) const
    {
        uint4 u = {};

        if (has) {
            u = load_shared16(address(stage, j));
        }
        return {{u.x, u.y, u.z, u.w}};
    }
    __device__ __forceinline__ void write(int stage, int j, const vector16 &x) const
    {
        if (has) {
            store_shared16(address(stage, j), make_uint4(x.v[0], x.v[1], x.v[2], x.v[3]));
        }
    }
};

/* Bytes of a stage of own_x. */
__host__ __device__ constexpr int x_stage_bytes(int rows)
{
    return STAGE_COLS * rows * 2;
}

/* The first of a lane's columns of a stage. */
__device__ __forceinline__ int column_of(int stage, int j, int warp, int lane)
{
    return stage * STAGE_COLS + (warp + WARPS * j) * GROUP + (lane & 3) * 8;
}

/* k columns of `rows` rows, from column 0 on. */
template <typename T>
__device__ __forceinline__ void load_rows(const own_x &x, const void *rows_of, int64_t stride,
                                          int rows, int k, int warp, int lane)
{
    const T *from = (const T *)rows_of + min(lane >> 2, rows - 1) * stride;

#pragma unroll 1
    for (int s = 0; s * STAGE_COLS < k; s++) {
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            int c = column_of(s, j, warp, lane);
            bool real = lane >> 2 < rows && c < k;
            x.copy(s, j, from + (real ? c : 0), real);
        }
    }
    async_commit();
    async_wait<0>();
}

/* The factor of this lane's row in an RMS norm; shared [WARPS][ROWS]. */
template <typename T>
__device__ __forceinline__ float norm_factor(const own_x &x, int k, float eps, float *shared,
                                             int warp, int lane)
{
    float sum = 0.0f;

#pragma unroll 1
    for (int s = 0; s * STAGE_COLS < k; s++) {
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            vector16 v = column_of(s, j, warp, lane) < k ? x.read(s, j) : vector16{};
            const T *u = (const T *)v.v;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float f = to_float(u[i]);
                sum += f * f;
            }
        }
    }
    sum += __shfl_xor_sync(ROUTE_LANES, sum, 1);
    sum += __shfl_xor_sync(ROUTE_LANES, sum, 2);
    if ((lane & 3) == 0) {
        shared[warp * ROWS + (lane >> 2)] = sum;
    }
    multipliers_sync();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        sum += shared[w * ROWS + (lane >> 2)];
    }
    return rsqrtf(sum / k + eps);
}

/* weight: of the norm, in shared memory. */
template <typename T>
__device__ __forceinline__ void norm_rows(const own_x &x, const expert_few &a, uint32_t weight,
                                          float scale, int warp, int lane)
{
    const bool stores = a.h && blockIdx.x + 1 == gridDim.x && lane >> 2 < a.route.rows;

#pragma unroll 1
    for (int s = 0; s * STAGE_COLS < a.up.k; s++) {
        vector16 v[SHARE];
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            v[j] = x.read(s, j);
        }
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            int c = min(column_of(s, j, warp, lane), a.up.k - 8); /* beyond it all is zero */
            uint4 w = load_shared16(weight + c * 2);
            const uint32_t of[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const T *u = (const T *)&v[j].v[i], *g = (const T *)&of[i];
                float low = to_float(u[0]) * scale, high = to_float(u[1]) * scale;
                v[j].v[i] = pack2<T>(low * (to_float(g[0]) + a.norm.weight_offset),
                                     high * (to_float(g[1]) + a.norm.weight_offset));
            }
            x.write(s, j, v[j]);
            if (stores && column_of(s, j, warp, lane) < a.up.k) {
                *(uint4 *)((T *)a.h + (lane >> 2) * a.h_stride + c) =
                    make_uint4(v[j].v[0], v[j].v[1], v[j].v[2], v[j].v[3]);
            }
        }
    }
}

/* ---- scales ---- */

/* Scales of a tile's rows g and g + 8, g = lane / 4, where the weights are codes. With
 * GROUPED they are of groups of columns, and those of a stage are loaded while the one
 * before it is multiplied; else they are of rows, and multiply a tile's sums. */
template <int B, bool GROUPED> struct row_scales {
    static constexpr int N = GROUPED ? SHARE : 1;
    float low[N], high[N];

    /* Of a product's rows, and of columns from `first` on. */
    __device__ __forceinline__ void load(const expert_product &p, int64_t row, int64_t other,
                                         int stage, int warp)
    {
        if constexpr (GROUPED) {
#pragma unroll
            for (int j = 0; j < SHARE; j++) {
                int c = min(stage * STAGE_COLS + (warp + WARPS * j) * GROUP, p.k - 1);
                int at = c >> p.group_shift;
                low[j] = __ldg(p.w_scale + row * p.n_groups + at);
                high[j] = __ldg(p.w_scale + other * p.n_groups + at);
            }
        } else if constexpr (B < 16) {
            low[0] = __ldg(p.w_scale + row);
            high[0] = __ldg(p.w_scale + other);
        } else {
            low[0] = high[0] = 1.0f;
        }
    }
    /* A tile's sums, in units of a row's scale. */
    __device__ __forceinline__ void multiply(sums &f) const
    {
        if constexpr (B < 16 && !GROUPED) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                f.even[i] = (i < 2 ? low[0] : high[0]) * (f.even[i] + f.odd[i]);
                f.odd[i] = 0.0f;
            }
        }
    }
};

/* Those of panels of int4 come with their codes. */
template <> struct row_scales<B_INT4, true> {
    __device__ __forceinline__ void load(const expert_product &, int64_t, int64_t, int, int) {}
    __device__ __forceinline__ void multiply(sums &) const {}
};

/* ---- products ---- */

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

/* f += the next stage, of `groups` groups, times stage `at` of x. */
template <typename T, int B, bool GROUPED>
__device__ __forceinline__ void multiply_stage(ring<B> &r, sums &f, const own_x &x, int at,
                                               const row_scales<B, GROUPED> &scale, int groups,
                                               int warp, int lane)
{
    codes<B> low[SHARE], high[SHARE];
    vector16 v[SHARE];

#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        v[j] = ordered<B>(x.read(at, j));
    }
    barrier_wait(r.full + r.index * 8, r.phase);
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        int group = warp + WARPS * j;
        if (group < groups) {
            low[j].load(r.stage(), group, groups, 0, lane);
            high[j].load(r.stage(), group, groups, 1, lane);
        }
    }
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(r.empty + r.index * 8);
    }
    r.next();
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        if (warp + WARPS * j >= groups) {
            continue;
        }
        if constexpr (!GROUPED) {
            multiply8<T>(f, low[j].values(), high[j].values(), v[j]);
        } else {
            sums g = {};
            float of[2];
            multiply8<T>(g, low[j].values(), high[j].values(), v[j]);
            if constexpr (B == B_INT4) {
                of[0] = low[j].scale();
                of[1] = high[j].scale();
            } else {
                of[0] = scale.low[j];
                of[1] = scale.high[j];
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                f.even[i] += of[i / 2] * (g.even[i] + g.odd[i]);
            }
        }
    }
}

/* A tile of the router, whose 16-bit weights come in stages of any B: STAGE_COLS
 * columns in 16 / B of them. */
template <typename T, int B>
__device__ __forceinline__ sums multiply_router(ring<B> &r, const own_x &x, int k, int warp,
                                                int lane)
{
    constexpr int EACH = STAGE_COLS / GROUP * BYTES_OF<B> / 16; /* groups of a stage */
    sums f = {};
    int first = 0, s = 0; /* group of stage s */

#pragma unroll 1
    for (int c = 0; c < k; c += EACH * GROUP) {
        int groups = min(EACH, (k - c) / GROUP);
        uint32_t row = r.stage() + (lane >> 2) * stage_of<B>::PITCH + (lane & 3) * 16;
        barrier_wait(r.full + r.index * 8, r.phase);
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            int at = warp + WARPS * j - first;
            if (at >= 0 && at < groups) {
                uint32_t from = row + at * GROUP * 2;
                multiply8<T>(f, load_shared16(from),
                             load_shared16(from + TILE / 2 * stage_of<B>::PITCH), x.read(s, j));
            }
        }
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(r.empty + r.index * 8);
        }
        r.next();
        first += EACH;
        if (first == STAGE_COLS / GROUP) {
            first = 0;
            s++;
        }
    }
    return f;
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
        for (int i = 0; i < SUM_BUFFERS; i++) {
            barrier_init(full + i * 8, WARPS);
            barrier_init(empty + i * 8, 1);
        }
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

/* Scales of two rows that multiply a tile's sums; 1 where there are none. */
template <int B, bool GROUPED>
__device__ __forceinline__ float2 tile_scale(const expert_product &p, int64_t row, int64_t other)
{
    return B < 16 && !GROUPED ? make_float2(__ldg(p.w_scale + row), __ldg(p.w_scale + other))
                              : make_float2(1.0f, 1.0f);
}

} // namespace expert_stream

#endif
