/* The products of a launch of few rows (stream.cu). */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_STREAM_PRODUCTS_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_STREAM_PRODUCTS_CUH

#include "kernels/cuda/experts/stream_ring.cuh"
#include "kernels/cuda/quant/codes.cuh"

namespace expert_stream
{
/* Eight neighbours of a weight's row, as they are stored. */
template <int B> struct codes;
template <> struct codes<16> {
    uint4 v;

    __device__ __forceinline__ void load(uint32_t at)
    {
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(at)
                     : "memory");
    }
    __device__ __forceinline__ uint4 values(void) const
    {
        return v;
    }
};
template <> struct codes<8> {
    uint2 v;

    __device__ __forceinline__ void load(uint32_t at)
    {
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    }
    __device__ __forceinline__ uint4 values(void) const
    {
        return e4m3_values(v.x, v.y);
    }
};

/* Eight activations in the order that codes<B>::values has. */
template <int B> __device__ __forceinline__ vector16 ordered(const vector16 &x)
{
    return B == 16
               ? x
               : vector16{{__byte_perm(x.v[0], x.v[1], 0x5410), __byte_perm(x.v[0], x.v[1], 0x7632),
                           __byte_perm(x.v[2], x.v[3], 0x5410),
                           __byte_perm(x.v[2], x.v[3], 0x7632)}};
}

/* Scales of a tile's rows g and g + 8, g = lane / 4, where the weights are codes. */
struct scale_rows {
    const float *low, *high;
    int n_groups, group_cols;

    __device__ __forceinline__ scale_rows(const expert_product &p, int64_t row, int64_t other)
        : low(p.w_scale + row * p.n_groups), high(p.w_scale + other * p.n_groups),
          n_groups(p.n_groups), group_cols(p.group_cols)
    {
    }
};

/* Those of a stage's groups that a warp has. */
template <int B> struct scales {
    float low[SHARE], high[SHARE];

    /* Of k columns from `first` on. */
    __device__ __forceinline__ void load(const scale_rows &from, int stage, int k, int warp,
                                         int first = 0)
    {
        if constexpr (B < 16) {
#pragma unroll
            for (int j = 0; j < SHARE; j++) {
                int c = min(stage * STAGE_COLS + (warp + WARPS * j) * GROUP, k - 1);
                int at = from.n_groups == 1 ? 0 : (first + c) / from.group_cols;
                low[j] = __ldg(from.low + at);
                high[j] = __ldg(from.high + at);
            }
        }
    }
};

/* f += eight columns of two rows of weights times those of x. */
template <typename T>
__device__ __forceinline__ void multiply8(sums &f, const uint4 &low, const uint4 &high,
                                          const vector16 &x)
{
    uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};

    mma16816<T>(f.even, first, x.v[0], x.v[1]);
    mma16816<T>(f.odd, second, x.v[2], x.v[3]);
}

/* The next stage, of `groups` groups, times this lane's activations. */
template <typename T, int B>
__device__ __forceinline__ void multiply_stage(ring<B> &r, sums &f, const vector16 (&x)[SHARE],
                                               const scales<B> &scale, int groups, int warp,
                                               int lane)
{
    codes<B> low[SHARE], high[SHARE];
    uint32_t row =
        r.stage() + (lane >> 2) * stage_of<B>::PITCH + warp * GROUP / 8 * B + (lane & 3) * B;

    barrier_wait(r.full + r.index * 8, r.phase);
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        if (warp + WARPS * j < groups) {
            uint32_t at = row + WARPS * j * GROUP / 8 * B;
            low[j].load(at);
            high[j].load(at + TILE / 2 * stage_of<B>::PITCH);
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
        if constexpr (B == 16) {
            multiply8<T>(f, low[j].values(), high[j].values(), x[j]);
        } else {
            sums g = {};
            multiply8<T>(g, low[j].values(), high[j].values(), x[j]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                f.even[i] += (i < 2 ? scale.low[j] : scale.high[j]) * (g.even[i] + g.odd[i]);
            }
        }
    }
}

/* The same of 16-bit weights in stages of any B, which have STAGE_COLS columns in
 * 16 / B stages. */
template <typename T, int B>
__device__ __forceinline__ void multiply_wide(ring<B> &r, sums &f, const vector16 (&x)[SHARE],
                                              int groups, int warp, int lane)
{
    constexpr int EACH = STAGE_COLS / GROUP * B / 16; /* groups of a stage */

    for (int first = 0; first < groups; first += EACH) {
        uint32_t row = r.stage() + (lane >> 2) * stage_of<B>::PITCH + (lane & 3) * 16;
        codes<16> low[SHARE], high[SHARE];
        barrier_wait(r.full + r.index * 8, r.phase);
#pragma unroll
        for (int j = 0; j < SHARE; j++) {
            int at = warp + WARPS * j;
            if (at >= first && at < min(first + EACH, groups)) {
                low[j].load(row + (at - first) * GROUP * 2);
                high[j].load(row + (at - first) * GROUP * 2 + TILE / 2 * stage_of<B>::PITCH);
                multiply8<T>(f, low[j].values(), high[j].values(), x[j]);
            }
        }
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(r.empty + r.index * 8);
        }
        r.next();
    }
}

__device__ __forceinline__ int stage_groups(int k, int stage)
{
    return min(STAGE_COLS, k - stage * STAGE_COLS) / GROUP;
}

/* The activations of all rows, normed if the layer begins with a norm. */
template <typename T, int STAGES> struct activations {
    vector16 v[STAGES][SHARE];

    static __device__ __forceinline__ int column(int s, int j, int warp, int lane)
    {
        return s * STAGE_COLS + (warp + WARPS * j) * GROUP + (lane & 3) * 8;
    }
    /* k columns of rows_of [rows], from column `first` on. */
    __device__ __forceinline__ void load(const void *rows_of, int64_t stride, int rows, int k,
                                         int warp, int lane, int first = 0)
    {
        const T *x = (const T *)rows_of + (lane >> 2) * stride + first;

#pragma unroll
        for (int s = 0; s < STAGES; s++) {
#pragma unroll
            for (int j = 0; j < SHARE; j++) {
                int c = column(s, j, warp, lane);
                uint4 u = {};
                if (lane >> 2 < rows && c < k) {
                    u = __ldcg((const uint4 *)(x + c));
                }
                v[s][j] = {u.x, u.y, u.z, u.w};
            }
        }
    }
    /* shared [warp][row] = the sums of squares of this warp's columns: the diagonal of
     * x x^T. */
    __device__ __forceinline__ void squares(float *shared, int warp, int lane) const
    {
        sums f = {};
        const uint4 none = {};
        int row = lane >> 2;

#pragma unroll
        for (int s = 0; s < STAGES; s++) {
#pragma unroll
            for (int j = 0; j < SHARE; j++) {
                const uint32_t *u = v[s][j].v;
                multiply8<T>(f, make_uint4(u[0], u[1], u[2], u[3]), none, v[s][j]);
            }
        }
        if ((lane & 3) == row >> 1) {
            shared[warp * ROWS + row] = row & 1 ? f.even[1] + f.odd[1] : f.even[0] + f.odd[0];
        }
    }
    /* The factor of this lane's row in an RMS norm. */
    __device__ __forceinline__ float factor(int k, float eps, float *shared, int warp,
                                            int lane) const
    {
        int row = lane >> 2;

        squares(shared, warp, lane);
        multipliers_sync();
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            sum += shared[w * ROWS + row];
        }
        return rsqrtf(sum / k + eps);
    }
    /* Into the order of the experts' weights. */
    template <int B> __device__ __forceinline__ void order(void)
    {
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
#pragma unroll
            for (int j = 0; j < SHARE; j++) {
                v[s][j] = ordered<B>(v[s][j]);
            }
        }
    }
    /* weight: of the norm, in shared memory. */
    __device__ __forceinline__ void norm(const expert_few &a, const char *weight, float scale,
                                         int warp, int lane)
    {
        const bool stores = a.h && blockIdx.x + 1 == gridDim.x && lane >> 2 < a.route.rows;

#pragma unroll
        for (int s = 0; s < STAGES; s++) {
#pragma unroll
            for (int j = 0; j < SHARE; j++) {
                int c = column(s, j, warp, lane);
                if (c < a.up.k) {
                    uint4 w = *(const uint4 *)(weight + c * 2);
                    const uint32_t of[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const T *u = (const T *)&v[s][j].v[i], *g = (const T *)&of[i];
                        float low = to_float(u[0]) * scale, high = to_float(u[1]) * scale;
                        v[s][j].v[i] = pack2<T>(low * (to_float(g[0]) + a.norm.weight_offset),
                                                high * (to_float(g[1]) + a.norm.weight_offset));
                    }
                    if (stores) {
                        const uint32_t *u = v[s][j].v;
                        *(uint4 *)((T *)a.h + (lane >> 2) * a.h_stride + c) =
                            make_uint4(u[0], u[1], u[2], u[3]);
                    }
                }
            }
        }
    }
};

/* A tile of the router. */
template <typename T, int B, int STAGES>
__device__ __forceinline__ sums multiply_router(ring<B> &r, const activations<T, STAGES> &x, int k,
                                                int warp, int lane)
{
    sums f = {};

#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (s * STAGE_COLS < k) {
            multiply_wide<T, B>(r, f, x.v[s], stage_groups(k, s), warp, lane);
        }
    }
    return f;
}

/* A tile of up. scale: of its first stage, then of the next tile's. */
template <typename T, int B, int STAGES>
__device__ __forceinline__ sums multiply_up(ring<B> &r, const activations<T, STAGES> &x, int k,
                                            scales<B> &scale, const scale_rows &mine,
                                            const scale_rows &next, int warp, int lane)
{
    sums f = {};

#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (s * STAGE_COLS < k) {
            scales<B> now = scale;
            bool last = (s + 1) * STAGE_COLS >= k;
            scale_rows from = mine;
            if (last) {
                from = next;
            }
            scale.load(from, last ? 0 : s + 1, k, warp);
            multiply_stage<T, B>(r, f, x.v[s], now, stage_groups(k, s), warp, lane);
        }
    }
    return f;
}

/* The sums of a tile over the warps, for the one whose turn it is; false: another's.
 * ret: rows g and g + 8 of the weights, g = lane / 4, times rows 2 t and 2 t + 1 of x,
 * t = lane % 4. shared [2][WARPS][32]. */
__device__ __forceinline__ bool add_warps(float (&ret)[4], const float (&mine)[4], float4 *shared,
                                          int &n_tile, int warp, int lane)
{
    float4 *at = shared + (n_tile & 1) * MULTIPLIERS + lane;
    bool turn = n_tile++ % WARPS == warp;

    at[warp * 32] = make_float4(mine[0], mine[1], mine[2], mine[3]);
    multipliers_sync(); /* the buffer before this one is free, too */
    if (turn) {
        ret[0] = ret[1] = ret[2] = ret[3] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float4 v = at[w * 32];
            ret[0] += v.x;
            ret[1] += v.y;
            ret[2] += v.z;
            ret[3] += v.w;
        }
    }
    return turn;
}

__device__ __forceinline__ bool add_warps(float (&ret)[4], const sums &f, float4 *shared,
                                          int &n_tile, int warp, int lane)
{
    const float mine[4] = {f.even[0] + f.odd[0], f.even[1] + f.odd[1], f.even[2] + f.odd[2],
                           f.even[3] + f.odd[3]};

    return add_warps(ret, mine, shared, n_tile, warp, lane);
}

} // namespace expert_stream

#endif
