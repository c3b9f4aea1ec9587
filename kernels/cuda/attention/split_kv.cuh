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

__device__ __forceinline__ bool blank(float x)
{
    return __float_as_uint(x) == 0xffffffffu;
}
/* Replaces a NaN that looks blank by another. */
__device__ __forceinline__ float unblank(float x)
{
    return blank(x) ? __uint_as_float(0x7fffffffu) : x;
}
__device__ __forceinline__ bool blank(float4 v)
{
    return blank(v.x) || blank(v.y) || blank(v.z) || blank(v.w);
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

/* Combines row r of a sequence's head from n partials: worker `first` and every
 * `step`-th after it, in that order, AHEAD at a time as they arrive. Slots become blank
 * again. Called by one warp. */
template <int D>
__device__ __forceinline__ void combine_partials(row_partial<D> &x, const attn_workspace &ws,
                                                 int first, int step, int n, int r, int lane)
{
    constexpr int QUADS = row_partial<D>::QUADS, AHEAD = D <= 128 ? 16 : 8;
    const float ones = __uint_as_float(~0u);
    auto row_of = [&](int k) { return partial_row(first + k * step, k == 0, r); };
    auto mine = [&](int i, int j) { return j < n && (i * 32 + lane) * 4 < D; };

    x.m = -INFINITY;
    x.l = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        x.o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (int k0 = 0; k0 < n; k0 += AHEAD) {
        float2 v;
        float4 o[AHEAD][QUADS];
        bool waits;
        do {
            v = lane < AHEAD && k0 + lane < n ? load_relaxed2(ws.partial_ml + row_of(k0 + lane) * 2)
                                              : make_float2(-INFINITY, 0.0f);
            waits = blank(v.x) || blank(v.y);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int i = 0; i < QUADS; i++) {
                    if (mine(i, k0 + j)) {
                        o[j][i] =
                            load_relaxed4(ws.partial_o + row_of(k0 + j) * D + (i * 32 + lane) * 4);
                    } else {
                        o[j][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    }
                }
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int i = 0; i < QUADS; i++) {
                    waits |= blank(o[j][i]);
                }
        } while (__any_sync(0xffffffffu, waits));
        if (lane < AHEAD && k0 + lane < n) {
            *(float2 *)(ws.partial_ml + row_of(k0 + lane) * 2) = make_float2(ones, ones);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                if (mine(i, k0 + j)) {
                    *(float4 *)(ws.partial_o + row_of(k0 + j) * D + (i * 32 + lane) * 4) =
                        make_float4(ones, ones, ones, ones);
                }
            }
        float next = fmaxf(x.m, warp_max(v.x)),
              keep = x.m == -INFINITY ? 0.0f : fast_exp2(x.m - next);
        float f = v.x == -INFINITY ? 0.0f : fast_exp2(v.x - next);
        x.m = next;
        x.l = x.l * keep + warp_sum(v.y * f);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            x.o[i] =
                make_float4(x.o[i].x * keep, x.o[i].y * keep, x.o[i].z * keep, x.o[i].w * keep);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            float fj = __shfl_sync(0xffffffffu, f, j);
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                scale_add(x.o[i], o[j][i], fj);
            }
        }
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

/* Stores rows 4 * quarter .. + 3 of a warp's fragments. */
template <int D>
__device__ __forceinline__ void combine_store(const combine_shared<D> &x,
                                              const float (&o)[D / 8][4], const float (&m)[2],
                                              const float (&l)[2], int quarter, int warp, int lane)
{
    int g = lane >> 2, t4 = lane & 3, h = quarter >> 1;

    if (g / COMBINE_ROWS != (quarter & 1)) {
        return;
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        *(float2 *)x.at(warp, g % COMBINE_ROWS, i * 8 + t4 * 2) =
            make_float2(o[i][h * 2], o[i][h * 2 + 1]);
    }
    if (t4 == 0) {
        *x.scores(warp, g % COMBINE_ROWS) = make_float2(m[h], l[h]);
    }
}

/* Combines row r of n (of at most WARPS) warps, the first of which is `warp`. */
template <int D, int WARPS>
__device__ __forceinline__ void combine_load(row_partial<D> &ret, const combine_shared<D> &x,
                                             int warp, int n, int r, int lane)
{
    float2 of[WARPS];

    ret.m = -INFINITY;
    ret.l = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
        of[k] = k < n ? *x.scores(warp + k, r) : make_float2(-INFINITY, 0.0f);
        ret.m = fmaxf(ret.m, of[k].x);
    }
#pragma unroll
    for (int i = 0; i < row_partial<D>::QUADS; i++) {
        ret.o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
        if (k >= n) {
            break;
        }
        float f = of[k].x == -INFINITY ? 0.0f : fast_exp2(of[k].x - ret.m);
        ret.l += of[k].y * f;
#pragma unroll
        for (int i = 0; i < row_partial<D>::QUADS; i++) {
            if ((i * 32 + lane) * 4 < D) {
                scale_add(ret.o[i], *(const float4 *)x.at(warp + k, r, (i * 32 + lane) * 4), f);
            }
        }
    }
}

#endif
