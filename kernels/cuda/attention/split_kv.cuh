/* Where parts of decode attention's sums meet: those of a team's warps in shared
 * memory, those of a sequence that is cut between spans in global memory.
 *
 * The latter are their own flags: the workspace is blank (all bits ones, which no sum
 * is) but for parts that have come and are not yet added up. So there is no fence and
 * no counter to wait for. Whoever takes them is the last worker of the sequence, once
 * it has done all of its own work: it waits for blocks before it only, which have
 * begun.
 */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_SPLIT_KV_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_SPLIT_KV_CUH

#include "kernels/cuda/attention/attn_common.cuh"

enum { DECODE_ROWS = 16 };

/* A row of a piece or of a sequence's head, four dims a lane: weighted values, not
 * divided by their sum. */
template <int D> struct row_sum {
    static constexpr int QUADS = (D / 4 + 31) / 32; /* fours a lane */
    float4 v[QUADS];
    float top, all;
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
/* A NaN that looks blank becomes another. */
__device__ __forceinline__ float unblank(float x)
{
    return blank(x) ? __uint_as_float(0x7fffffffu) : x;
}
__device__ __forceinline__ bool blank(float4 v)
{
    return blank(v.x) || blank(v.y) || blank(v.z) || blank(v.w);
}

__device__ __forceinline__ void put(float *to, float4 v)
{
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}
__device__ __forceinline__ void put(float *to, float2 v)
{
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(to), "f"(v.x), "f"(v.y)
                 : "memory");
}
__device__ __forceinline__ float4 look4(const float *from)
{
    float4 v;

    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ float2 look2(const float *from)
{
    float2 v;

    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "l"(from)
                 : "memory");
    return v;
}

/* Row r of what a worker has of a sequence: in its first place where the sequence began
 * before its span, else in its second. */
__device__ __forceinline__ int64_t part_row(int worker, bool begins, int r)
{
    return (int64_t)(2 * worker + begins) * DECODE_ROWS + r;
}

template <int D>
__device__ __forceinline__ void put_part(const attn_workspace &ws, int64_t row, const row_sum<D> &x,
                                         int lane)
{
#pragma unroll
    for (int i = 0; i < row_sum<D>::QUADS; i++) {
        if ((i * 32 + lane) * 4 < D) {
            put(ws.partial_o + row * D + (i * 32 + lane) * 4,
                make_float4(unblank(x.v[i].x), unblank(x.v[i].y), unblank(x.v[i].z),
                            unblank(x.v[i].w)));
        }
    }
    if (lane == 0) {
        put(ws.partial_ml + row * 2, make_float2(unblank(x.top), unblank(x.all)));
    }
}

/* Row r of a sequence's head from n parts, those of worker `first` and every `step`
 * workers after it, in their order, so many at a time, as they come. By one warp. */
template <int D>
__device__ __forceinline__ void take_parts(row_sum<D> &x, const attn_workspace &ws, int first,
                                           int step, int n, int r, int lane)
{
    constexpr int QUADS = row_sum<D>::QUADS, AHEAD = D <= 128 ? 16 : 8;
    const float ones = __uint_as_float(~0u);
    auto row_of = [&](int k) { return part_row(first + k * step, k == 0, r); };
    auto mine = [&](int i, int j) { return j < n && (i * 32 + lane) * 4 < D; };

    x.top = -INFINITY;
    x.all = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        x.v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (int k0 = 0; k0 < n; k0 += AHEAD) {
        float2 v;
        float4 part[AHEAD][QUADS];
        bool waits;
        do {
            v = lane < AHEAD && k0 + lane < n ? look2(ws.partial_ml + row_of(k0 + lane) * 2)
                                              : make_float2(-INFINITY, 0.0f);
            waits = blank(v.x) || blank(v.y);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int i = 0; i < QUADS; i++) {
                    if (mine(i, k0 + j)) {
                        part[j][i] = look4(ws.partial_o + row_of(k0 + j) * D + (i * 32 + lane) * 4);
                    } else {
                        part[j][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    }
                }
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int i = 0; i < QUADS; i++) {
                    waits |= blank(part[j][i]);
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
        float next = fmaxf(x.top, warp_max(v.x)),
              keep = x.top == -INFINITY ? 0.0f : fast_exp2(x.top - next);
        float f = v.x == -INFINITY ? 0.0f : fast_exp2(v.x - next);
        x.top = next;
        x.all = x.all * keep + warp_sum(v.y * f);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            x.v[i] =
                make_float4(x.v[i].x * keep, x.v[i].y * keep, x.v[i].z * keep, x.v[i].w * keep);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            float fj = __shfl_sync(0xffffffffu, f, j);
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                scale_add(x.v[i], part[j][i], fj);
            }
        }
    }
}

/* A team's accumulators meet in shared memory, so many rows at a time: [warp][row][D]
 * with the dims of a row turned so that neither side has bank conflicts (where they are
 * 32 times a number); beside them greatest scores and sums, [warp][row]. */
template <int D> struct meeting {
    float *o, *ml;
    __device__ __forceinline__ float *at(int warp, int r, int dim) const
    {
        return o + (warp * MEETING_ROWS + r) * D + (D % 32 ? dim : dim ^ r * 8);
    }
    __device__ __forceinline__ float2 *scores(int warp, int r) const
    {
        return (float2 *)(ml + (warp * MEETING_ROWS + r) * 2);
    }
};

/* Rows 4 * part .. + 3 of a warp's fragments. */
template <int D>
__device__ __forceinline__ void meeting_put(const meeting<D> &x, const float (&o)[D / 8][4],
                                            const float (&m)[2], const float (&l)[2], int part,
                                            int warp, int lane)
{
    int g = lane >> 2, t4 = lane & 3, h = part >> 1;

    if (g / MEETING_ROWS != (part & 1)) {
        return;
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        *(float2 *)x.at(warp, g % MEETING_ROWS, i * 8 + t4 * 2) =
            make_float2(o[i][h * 2], o[i][h * 2 + 1]);
    }
    if (t4 == 0) {
        *x.scores(warp, g % MEETING_ROWS) = make_float2(m[h], l[h]);
    }
}

/* Row r of those from n warps of WARPS, the first of which is `warp`. */
template <int D, int WARPS>
__device__ __forceinline__ void meeting_take(row_sum<D> &ret, const meeting<D> &x, int warp, int n,
                                             int r, int lane)
{
    float2 of[WARPS];

    ret.top = -INFINITY;
    ret.all = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
        of[k] = k < n ? *x.scores(warp + k, r) : make_float2(-INFINITY, 0.0f);
        ret.top = fmaxf(ret.top, of[k].x);
    }
#pragma unroll
    for (int i = 0; i < row_sum<D>::QUADS; i++) {
        ret.v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
        if (k >= n) {
            break;
        }
        float f = of[k].x == -INFINITY ? 0.0f : fast_exp2(of[k].x - ret.top);
        ret.all += of[k].y * f;
#pragma unroll
        for (int i = 0; i < row_sum<D>::QUADS; i++) {
            if ((i * 32 + lane) * 4 < D) {
                scale_add(ret.v[i], *(const float4 *)x.at(warp + k, r, (i * 32 + lane) * 4), f);
            }
        }
    }
}

#endif
