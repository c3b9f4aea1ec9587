/* Rows gathered into shared memory by 16-byte copies that arrive at an mbarrier by
 * themselves, like tensor copies. Unlike those they are ordinary accesses, so the
 * readers of the matrix instruction's operands fence (proxy_fence) after their wait. */
#ifndef QUIRE_KERNELS_CUDA_EXPERT_TILES_GATHER_CUH
#define QUIRE_KERNELS_CUDA_EXPERT_TILES_GATHER_CUH

#include "kernels/cuda/gemm/bulk.cuh"

__device__ __forceinline__ void copy_chunk(uint32_t to, const void *from)
{
#if BULK_COPY
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}

/* Arrives once this thread's copies so far are complete. */
__device__ __forceinline__ void arrive_behind_copies(uint32_t bar)
{
#if BULK_COPY
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
#endif
}

/* Before the thread ends. */
__device__ __forceinline__ void finish_copies(void)
{
#if BULK_COPY
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#endif
