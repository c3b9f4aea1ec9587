/* Bulk copies into shared memory that complete on an mbarrier, of compute capability 9.
 * In code for older devices these functions do nothing. */
#ifndef QUIRE_KERNELS_CUDA_GEMM_BULK_CUH
#define QUIRE_KERNELS_CUDA_GEMM_BULK_CUH

#include "kernels/cuda/common.cuh"

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes of shared memory. */
__device__ __forceinline__ uint4 load_shared16(uint32_t from)
{
    uint4 v;

    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared16(uint32_t to, const uint4 &v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BULK_COPY 1
#else
#define BULK_COPY 0
#endif

__device__ __forceinline__ void barrier_init(uint32_t bar, int count)
{
#if BULK_COPY
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
#endif
}

/* Makes mbarriers initialised by this thread visible to the copy engine. */
__device__ __forceinline__ void barrier_init_fence(void)
{
#if BULK_COPY
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Initialises n mbarriers, one behind the other, for copies too. By one thread, before
 * a barrier of the block; where there are several kinds, a warp for each. A loop, since
 * code that runs once costs what its length is. */
__device__ __forceinline__ void barriers_init(uint32_t bar, int n, int count)
{
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        barrier_init(bar + i * 8, count);
    }
    barrier_init_fence();
}

/* Orders this thread's shared-memory accesses before later ones of the async proxy. */
__device__ __forceinline__ void proxy_fence(void)
{
#if BULK_COPY
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar)
{
#if BULK_COPY
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes)
{
#if BULK_COPY
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
#endif
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity)
{
#if BULK_COPY
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\n"
                 "bra again;\n"
                 "done:\n"
                 "}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
#endif
}

__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t bar)
{
#if BULK_COPY
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar)
        : "memory");
#endif
}

#endif
