/* Building blocks of the attention kernels: matrix instructions, and bringing 16 tokens of keys and values of one
 * head from the paged cache into shared memory.
 *
 * A chunk in shared memory is [k|v][D / 64 panels][tokens][64], chunks of 16 bytes permuted as in the cache
 * (struct kv_view), so the copy is a handful of contiguous pieces: on compute capability 9 bulk copies that
 * complete on an mbarrier, one instruction each; before it, cp.async of 16 bytes a lane.
 */
#ifndef QUIRE_CUDA_ATTN_COMMON_CUH
#define QUIRE_CUDA_ATTN_COMMON_CUH

#include "kernels/cuda/bulk.cuh"

#define LOG2E 1.44269504088896341f

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* c [16, 8] += a [16, 16] b [16, 8] */
template <typename T> __device__ __forceinline__ void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma16816<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma16816<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T> __device__ __forceinline__ uint32_t pack2(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float lo, float hi)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&v;
}
template <> __device__ __forceinline__ uint32_t pack2<__half>(float lo, float hi)
{
    __half2 v = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&v;
}

__device__ __forceinline__ void copy16(uint32_t to, const void *from)
{
#if !BULK_COPY
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void copy_commit(void)
{
#if !BULK_COPY
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N> __device__ __forceinline__ void copy_wait(void)
{
#if !BULK_COPY
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* One piece of a chunk: `tokens` tokens of one panel, 128 bytes each, contiguous on both sides. By one warp, all lanes. */
template <typename T, int D>
__device__ __forceinline__ void load_chunk(const kv_view &kv, const T *head_base, int block0, int block1, int first,
                                           uint32_t to, int kv_bytes, int panel_bytes, uint32_t bar, int lane)
{
    /* block0 holds the first tokens (all 16 when blocks have 16 or more), block1 the last 8 when blocks have 8 */
    constexpr int PANELS = D / 64;
    int parts = kv.block_size >= 16 ? 1 : 2;
#if BULK_COPY
    int bytes = 16 / parts * 128;
    if (lane < 2 * PANELS * parts) {
        int part = lane % parts, panel = lane / parts % PANELS, which = lane / parts / PANELS;
        const T *from = head_base + (part ? block1 : block0) * kv.block_stride + which * kv.kv_stride +
                        (int64_t)panel * kv.block_size * 64 + (part ? 0 : first) * 64;
        bulk_copy(to + which * kv_bytes + panel * panel_bytes + part * bytes, from, bytes, bar);
    }
#else
    for (int i = 0; i < 2 * PANELS * 4; i++) { /* 512 bytes, 4 tokens, an access */
        int token = i % 4 * 4 + lane / 8, panel = i / 4 % PANELS, which = i / 4 / PANELS;
        int part = parts == 2 && token >= 8;
        const T *from = head_base + (part ? block1 : block0) * kv.block_stride + which * kv.kv_stride +
                        (int64_t)panel * kv.block_size * 64 + (part ? token - 8 : first + token) * 64 + lane % 8 * 8;
        copy16(to + which * kv_bytes + panel * panel_bytes + token * 128 + lane % 8 * 16, from);
    }
#endif
}

/* 2^x by the special function unit; 0 for -infinity, denormals flushed. */
__device__ __forceinline__ float fast_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* cap tanh(s / cap) as cap - 2 cap / (1 + exp(2 s / cap)): no branches, its error cap times 2e-7. */
__device__ __forceinline__ float soft_cap(float s, float cap)
{
    return cap - __fdividef(2.0f * cap, 1.0f + fast_exp2(s * __fdividef(2.0f * LOG2E, cap)));
}

#endif
