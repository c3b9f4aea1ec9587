/* Copies of 16 or 8 bytes into shared memory, by the thread that asks for them: it waits for
 * groups of them, and others see them behind a barrier. */
#ifndef QUIRE_KERNELS_CUDA_GEMM_ASYNC_COPY_CUH
#define QUIRE_KERNELS_CUDA_GEMM_ASYNC_COPY_CUH

#include <cstdint>

__device__ __forceinline__ void async_copy(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* Where `real` is false, 16 bytes of zeros; `from` is an address all the same. */
__device__ __forceinline__ void async_copy_or_zeros(uint32_t to, const void *from, bool real)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(real ? 16 : 0)
                 : "memory");
}

/* The same of 8 bytes, which are there. */
__device__ __forceinline__ void async_copy_pair(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

/* The copies since the last one become a group. */
__device__ __forceinline__ void async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* All of this thread's groups but the last LEFT are there. */
template <int LEFT> __device__ __forceinline__ void async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#endif
