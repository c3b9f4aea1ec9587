/* Late masks on the device (batch.h): in front of the step's first sampling kernel, one
 * that waits until the host has written them, and copies them to device memory. It is
 * part of the step's graph: what changes from step to step is in the header.
 *
 * The host writes the masks of step i to slot i % 2 of pinned memory, then the step's
 * number behind them. The wait ends too when the host gives up, and after MOST_NS at
 * the latest; then every id is allowed, and the host finds that a token was not. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/launch.h"

namespace
{

enum { WAIT_BLOCKS = 32, WAIT_THREADS = 256, NAP_NS = 500 };
__device__ constexpr unsigned long long MOST_NS = 300ull * 1000 * 1000 * 1000;

__device__ __forceinline__ unsigned long long host_word(const unsigned long long *from)
{
    unsigned long long v;

    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

/* Past the caches, which may hold what lay there two steps ago. */
__device__ __forceinline__ uint4 host_words(const uint32_t *from)
{
    uint4 v;

    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ unsigned long long now_ns(void)
{
    unsigned long long ns;

    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

/* Whether the step's masks have arrived; false: none will. */
__device__ bool wait_for_masks(const late_args &a, unsigned long long step)
{
    const unsigned long long start = now_ns();

    while (host_word(&a.flags->step[step % 2]) != step) {
        if (host_word(&a.flags->given_up) != 0 || now_ns() - start > MOST_NS) {
            return false;
        }
        __nanosleep(NAP_NS);
    }
    return true;
}

__global__ void __launch_bounds__(WAIT_THREADS) late_wait_kernel(late_args a, const step_header *h)
{
    __shared__ bool there;

    pdl_wait();
    pdl_release();
    const unsigned long long step = h->step;
    const int n = h->n_late_mask * a.stride / 4;
    if (threadIdx.x == 0) {
        there = wait_for_masks(a, step);
    }
    __syncthreads();
    const uint32_t *from = a.host + (int64_t)(step % 2) * a.most * a.stride;
    for (int i = blockIdx.x * WAIT_THREADS + threadIdx.x; i < n; i += WAIT_BLOCKS * WAIT_THREADS) {
        const uint4 all = make_uint4(~0u, ~0u, ~0u, ~0u);
        ((uint4 *)a.device)[i] = there ? host_words(from + 4 * (int64_t)i) : all;
    }
}

} // namespace

extern "C" void launch_late_wait(const struct late_args *a, const struct step_arrays *s,
                                 cudaStream_t stream)
{
    launch(late_wait_kernel, dim3(WAIT_BLOCKS), dim3(WAIT_THREADS), 0, stream, *a, s->header);
}

extern "C" bool late_wait_load(void)
{
    cudaFuncAttributes made;

    return cudaFuncGetAttributes(&made, late_wait_kernel) == cudaSuccess;
}
