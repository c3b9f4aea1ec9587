/* What the kernels of few rows share (small_rows.cu, small_codes.cu, mixed/):
 * copies into the ring, barriers of a cluster of two blocks, and what an epilogue does
 * about the norms before and behind its product.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_PIPELINE_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_SMALL_PIPELINE_CUH

#include <cuda.h>

#include "kernels/cuda/fused_decode/small_rows.h"
#include "kernels/cuda/gemm/bulk.cuh"

typedef __nv_bfloat16 bf16;

/* A product's epilogue and its sizes. */
struct small_args {
    bf16 *out; /* [rows, n]; gated [rows, n / 2]; the residual stream, which is added to */
    int64_t out_stride;
    const bf16 *bias; /* [n] or NULL */
    int32_t act;
    int32_t rows, source_rows; /* the latter of a source's copy: a multiple of 8 */
    int32_t n, depth_steps;    /* stages of a block's part of the depth */
    /* The norm before: factor = rsqrt(squares / columns + eps). */
    const unsigned long long *squares; /* [rows] or NULL: no factor */
    unsigned long long *cleared;       /* [SMALL_ROWS] for the next sum */
    float columns, eps;
    /* The norm behind (SMALL_SUM): times_weight = the new residual stream * weight. */
    bf16 *times_weight; /* NULL: none */
    int64_t times_stride;
    const bf16 *weight; /* [n] */
    float weight_offset;
    unsigned long long *squares_out; /* [rows], added to */
    struct p2p_summands ranks;       /* SMALL_SUM: the other ranks' summands */
    float *floats; /* SMALL_PLAIN of weights in groups: in place of `out`; NULL: not */
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/* ---- clusters and copies ---- */

/* A cluster's barrier, by all threads: the other block may write to this one's shared
 * memory. It orders no writes of this block, and so waits for none. */
__device__ __forceinline__ void cluster_arrive(void)
{
    random_delay();
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t address_in(uint32_t shared, uint32_t rank)
{
    uint32_t v;

    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(shared), "r"(rank));
    return v;
}

/* Writes to another block's shared memory; `to` and its mbarrier `bar`, which counts
 * the bytes when they are there, are of address_in. */
__device__ __forceinline__ void push(uint32_t to, float2 v, uint32_t bar)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(
            to),
        "f"(v.x), "f"(v.y), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void push(uint32_t to, float4 v, uint32_t bar)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], "
                 "{%1,%2,%3,%4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
                 : "memory");
}

/* Waits until all that is pushed to this block is there. */
__device__ __forceinline__ void push_wait(uint32_t bar)
{
    uint32_t done;

    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(bar)
                     : "memory");
    } while (!done);
}

/* Brings a map to the copy engine, whose first copy by it would wait for that. */
__device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tensor_copy(uint32_t to, const CUtensorMap *map, int column,
                                            int row, uint32_t bar, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(bar), "l"(policy)
                 : "memory");
}

/* A copy by a map of tensor_map_panels. */
__device__ __forceinline__ void panels_copy(uint32_t to, const CUtensorMap *map, int row, int panel,
                                            uint32_t bar, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(0), "r"(row), "r"(panel), "r"(bar), "l"(policy)
                 : "memory");
}

/* True in one lane of the warp, of which the compiler knows that it is alone: it copies
 * without asking the others. */
__device__ __forceinline__ bool elected(void)
{
    uint32_t v;

    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(v));
    return v != 0;
}

/* A copy of contiguous bytes, a multiple of 16. */
__device__ __forceinline__ void plain_copy(uint32_t to, const void *from, uint32_t bytes,
                                           uint32_t bar, uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ uint64_t read_once(void)
{
    uint64_t policy;

    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t read_again(void)
{
    uint64_t policy;

    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

#endif

/* ---- values ---- */

__device__ __forceinline__ uint32_t pair(float a, float b)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);

    return *(uint32_t *)&v;
}

__device__ __forceinline__ float low(uint32_t v)
{
    return __uint_as_float(v << 16);
}

__device__ __forceinline__ float high(uint32_t v)
{
    return __uint_as_float(v & 0xffff0000u);
}

/* ACT: what is known at compile time, or -1. */
template <int ACT> __device__ __forceinline__ float activated(float x, int act)
{
    return activate(x, ACT < 0 ? act : ACT);
}

/* ---- norms taken apart ---- */

/* Sums of squares are whole numbers of 2^-SQUARE_BITS, so that they do not depend on
 * the order of the blocks that add to them. The rounding is far below any norm's
 * eps. */
constexpr int SQUARE_BITS = 20;

__device__ __forceinline__ unsigned long long as_squares(float sum)
{
    return (unsigned long long)fminf(sum * (float)(1 << SQUARE_BITS), 1e17f);
}

/* The factor of the norm before op's product, of the row of this lane. */
__device__ __forceinline__ float norm_factor(const small_args &a, int row)
{
    if (!a.squares || row >= a.rows) {
        return 1.0f;
    }
    float sum = (float)__ldcg(a.squares + row) * (1.0f / (1 << SQUARE_BITS));
    return rsqrtf(sum / a.columns + a.eps);
}

/* What add_to_stream needs of memory for four columns of a row. It is fetched before a
 * block waits for the other one of its cluster: a load takes as long as that. */
struct stream_quad {
    uint2 was, weight;
};

__device__ __forceinline__ stream_quad load_stream(const small_args &a, int row, int column)
{
    stream_quad q = {};

    if (row < a.rows) {
        q.was = __ldcg((const uint2 *)(a.out + row * a.out_stride + column));
        if (a.times_weight) {
            q.weight = __ldg((const uint2 *)(a.weight + column));
        }
    }
    return q;
}

/* Four columns of the residual stream, of which q is: += v; also times the next norm's
 * weight. Returns the sum of their squares as stored. */
__device__ __forceinline__ float add_to_stream(const small_args &a, int row, int column,
                                               const stream_quad &q, const float (&v)[4])
{
    uint2 now = make_uint2(pair(v[0] + low(q.was.x), v[1] + high(q.was.x)),
                           pair(v[2] + low(q.was.y), v[3] + high(q.was.y)));
    float e[4] = {low(now.x), high(now.x), low(now.y), high(now.y)};

    *(uint2 *)(a.out + row * a.out_stride + column) = now;
    if (a.times_weight) {
        uint2 g = q.weight;
        float o = a.weight_offset;
        *(uint2 *)(a.times_weight + row * a.times_stride + column) =
            make_uint2(pair(e[0] * (low(g.x) + o), e[1] * (high(g.x) + o)),
                       pair(e[2] * (low(g.y) + o), e[3] * (high(g.y) + o)));
    }
    return (e[0] * e[0] + e[1] * e[1]) + (e[2] * e[2] + e[3] * e[3]);
}

#endif
