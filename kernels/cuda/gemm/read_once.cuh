/* Bulk copies of what is read once: it leaves the second-level cache first. */
#ifndef QUIRE_KERNELS_CUDA_GEMM_READ_ONCE_CUH
#define QUIRE_KERNELS_CUDA_GEMM_READ_ONCE_CUH

#include "kernels/cuda/gemm/bulk.cuh"

__device__ __forceinline__ uint64_t evict_first_policy(void)
{
    uint64_t policy = 0;

#if BULK_COPY
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

__device__ __forceinline__ void bulk_copy_evict_first(uint32_t to, const void *from, uint32_t bytes,
                                                      uint32_t bar, uint64_t policy)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
#endif
}

#endif
