/* Combining partial results of decode attention: those of a warp group in shared
 * memory, those of a sequence cut between splits in global memory.
 *
 * Partials in global memory serve as their own ready flags. A slot is blank, all bits
 * ones, except between the store of a partial and its combination; a stored NaN of that
 * pattern is replaced by another NaN. So neither fences nor counters are needed. The
 * last split of a sequence combines, after all of its own work. It may wait for any
 * block of the grid: there is one for each multiprocessor, so all get on the device at
 * the same time, in whatever order they start (decode_launch asks). Where other
 * processes have blocks there too they start together or not at all.
 */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_SPLIT_KV_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_SPLIT_KV_CUH

#include "kernels/cuda/attention/attn_common.cuh"

enum { DECODE_ROWS = 16 };

/* The warps that work on a split together: this warp's rank of `size`, and the group's
 * index in the block. */
struct warp_group {
    int size, rank, index;
};

/* A row of a work tile or of a sequence's head, four dims per lane: output before
 * division by the sum, running maximum, sum of weights. */
template <int D> struct row_partial {
    static constexpr int QUADS = (D / 4 + 31) / 32; /* float4 per lane */
    float4 o[QUADS];
    float m, l;
};

__device__ __forceinline__ void scale_add(float4 &to, const float4 &v, float f)
{
    to.x += v.x * f;
    to.y += v.y * f;
    to.z += v.z * f;
    to.w += v.w * f;
}

#define BLANK_BITS 0xffffffffu
__device__ __forceinline__ bool blank(float x)
{
    return __float_as_uint(x) == BLANK_BITS;
}
/* Replaces a NaN that looks blank by another. */
__device__ __forceinline__ float unblank(float x)
{
    return blank(x) ? __uint_as_float(0x7fffffffu) : x;
}

__device__ __forceinline__ void store_relaxed(float *to, float4 v)
{
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store_relaxed(float *to, float2 v)
{
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(to), "f"(v.x), "f"(v.y)
                 : "memory");
}
__device__ __forceinline__ float4 load_relaxed4(const float *from)
{
    float4 v;

    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ float2 load_relaxed2(const float *from)
{
    float2 v;

    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "l"(from)
                 : "memory");
    return v;
}

/* Workspace row of a worker's row r: its first slot if the sequence began before its
 * split, else its second. */
__device__ __forceinline__ int64_t partial_row(int worker, bool begins, int r)
{
    return (int64_t)(2 * worker + begins) * DECODE_ROWS + r;
}

template <int D>
__device__ __forceinline__ void store_partial(const attn_workspace &ws, int64_t row,
                                              const row_partial<D> &x, int lane)
{
    random_delay();
#pragma unroll
    for (int i = 0; i < row_partial<D>::QUADS; i++) {
        if ((i * 32 + lane) * 4 < D) {
            store_relaxed(ws.partial_o + row * D + (i * 32 + lane) * 4,
                          make_float4(unblank(x.o[i].x), unblank(x.o[i].y), unblank(x.o[i].z),
                                      unblank(x.o[i].w)));
        }
    }
    if (lane == 0) {
        store_relaxed(ws.partial_ml + row * 2, make_float2(unblank(x.m), unblank(x.l)));
    }
}

/* A warp group's accumulators in shared memory, COMBINE_ROWS rows at a time:
 * [warp][row][D], with dims swizzled by row where D is a multiple of 32 so that neither
 * side has bank conflicts; beside them maxima and sums, [warp][row]. */
template <int D> struct combine_shared {
    float *o, *ml;
    __device__ __forceinline__ float *at(int warp, int r, int dim) const
    {
        return o + (warp * COMBINE_ROWS + r) * D + (D % 32 ? dim : dim ^ r * 8);
    }
    __device__ __forceinline__ float2 *scores(int warp, int r) const
    {
        return (float2 *)(ml + (warp * COMBINE_ROWS + r) * 2);
    }
};

/* Stores rows 4 * quarter .. + 3 of what splits of a sequence leave in global memory,
 * as it arrives: of that of n workers, `first` and every `step`-th after it, a warp
 * merges every t.size-th. rows: of the sequence's head. The slots become blank again.
 * Combining is done by a whole group of warps, so that the code, which runs once and is
 * fetched from far, is short. */
template <int D>
__device__ __forceinline__ void combine_fetch(const combine_shared<D> &x, const attn_workspace &ws,
                                              int first, int step, int n, int quarter, int rows,
                                              const warp_group &t, int warp, int lane)
{
    constexpr int QUADS = row_partial<D>::QUADS;
    const float ones = __uint_as_float(~0u);
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    row_partial<D> sum[COMBINE_ROWS];
    auto in_row = [&](int i) { return (i * 32 + lane) * 4 < D; };

    rows -= quarter * COMBINE_ROWS;
#pragma unroll
    for (int r = 0; r < COMBINE_ROWS; r++) {
        sum[r].m = -INFINITY;
        sum[r].l = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            sum[r].o[i] = none;
        }
    }
#pragma unroll 1
    for (int k = t.rank; k < n; k += t.size) {
        int64_t row = partial_row(first + k * step, k == 0, quarter * COMBINE_ROWS);
        float *ml = ws.partial_ml + row * 2, *from = ws.partial_o + row * D + lane * 4;
        float4 o[COMBINE_ROWS][QUADS];
        float2 v[COMBINE_ROWS];
        uint32_t most; /* of all bits: a blank is the greatest */
        do {
            most = 0;
#pragma unroll
            for (int r = 0; r < COMBINE_ROWS; r++) {
                v[r] = r < rows ? load_relaxed2(ml + r * 2) : make_float2(-INFINITY, 0.0f);
#pragma unroll
                for (int i = 0; i < QUADS; i++) {
                    o[r][i] = r < rows && in_row(i) ? load_relaxed4(from + r * D + i * 128) : none;
                }
            }
#pragma unroll
            for (int r = 0; r < COMBINE_ROWS; r++) {
                most = max(most, max(__float_as_uint(v[r].x), __float_as_uint(v[r].y)));
#pragma unroll
                for (int i = 0; i < QUADS; i++) {
                    uint4 bits = *(const uint4 *)&o[r][i];
                    most = max(most, max(max(bits.x, bits.y), max(bits.z, bits.w)));
                }
            }
        } while (__any_sync(0xffffffffu, most == BLANK_BITS));
#pragma unroll
        for (int r = 0; r < COMBINE_ROWS; r++) {
            float top = fmaxf(sum[r].m, v[r].x);
            float keep = sum[r].m == -INFINITY ? 0.0f : fast_exp2(sum[r].m - top);
            float f = v[r].x == -INFINITY ? 0.0f : fast_exp2(v[r].x - top);
            sum[r].m = top;
            sum[r].l = sum[r].l * keep + v[r].y * f;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                float4 &to = sum[r].o[i];
                to = make_float4(to.x * keep, to.y * keep, to.z * keep, to.w * keep);
                scale_add(to, o[r][i], f);
                if (r < rows && in_row(i)) {
                    *(float4 *)(from + r * D + i * 128) = make_float4(ones, ones, ones, ones);
                }
            }
            if (r < rows && lane == 0) {
                *(float2 *)(ml + r * 2) = make_float2(ones, ones);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < COMBINE_ROWS; r++) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            if (in_row(i)) {
                *(float4 *)x.at(warp, r, (i * 32 + lane) * 4) = sum[r].o[i];
            }
        }
        if (lane == 0) {
            *x.scores(warp, r) = make_float2(sum[r].m, sum[r].l);
        }
    }
}

/* Combines row r of n (of at most WARPS) warps, the first of which is `warp`. */
template <int D, int WARPS>
__device__ __forceinline__ void combine_load(row_partial<D> &ret, const combine_shared<D> &x,
                                             int warp, int n, int r, int lane)
{
    static_assert((WARPS & (WARPS - 1)) == 0, "lanes in groups of WARPS");
    int k = lane % WARPS;
    float2 v = k < n ? *x.scores(warp + k, r) : make_float2(-INFINITY, 0.0f);

    ret.m = v.x;
#pragma unroll
    for (int o = WARPS / 2; o > 0; o >>= 1) {
        ret.m = fmaxf(ret.m, __shfl_xor_sync(0xffffffffu, ret.m, o));
    }
    float of = v.x == -INFINITY ? 0.0f : fast_exp2(v.x - ret.m);
    ret.l = v.y * of;
#pragma unroll
    for (int o = WARPS / 2; o > 0; o >>= 1) {
        ret.l += __shfl_xor_sync(0xffffffffu, ret.l, o);
    }
#pragma unroll
    for (int i = 0; i < row_partial<D>::QUADS; i++) {
        ret.o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll 4
    for (int j = 0; j < n; j++) {
        float f = __shfl_sync(0xffffffffu, of, j);
#pragma unroll
        for (int i = 0; i < row_partial<D>::QUADS; i++) {
            if ((i * 32 + lane) * 4 < D) {
                scale_add(ret.o[i], *(const float4 *)x.at(warp + j, r, (i * 32 + lane) * 4), f);
            }
        }
    }
}

#endif
