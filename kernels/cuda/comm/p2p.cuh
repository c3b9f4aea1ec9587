/* Access to peers' memory from kernels: uncached stores and loads over the link, and
 * the host's signal that a rank is gone. */
#ifndef QUIRE_KERNELS_CUDA_COMM_P2P_CUH
#define QUIRE_KERNELS_CUDA_COMM_P2P_CUH

#include "kernels/cuda/comm/p2p.h"
#include "kernels/cuda/common.cuh"

enum { P2P_THREADS = 512, P2P_LOOK_EVERY = 4096 };

/* Fills a slot that holds no data. Data never looks like it: as a NaN, it is replaced
 * by another. */
#define BLANK 0xFFFFFFFFu
#define OTHER_NAN 0x7FFF7FFFu /* a NaN in float32, float16 and bfloat16 */

__device__ __forceinline__ uint32_t not_blank(uint32_t v)
{
    return v == BLANK ? OTHER_NAN : v;
}

/* Whether the host has signalled that a rank is gone; looked up every P2P_LOOK_EVERY
 * rounds, some milliseconds: a look is a read over the bus, and many threads wait. */
__device__ __forceinline__ bool stopped(const int32_t *stop, int round)
{
    return round % P2P_LOOK_EVERY == 0 && *(const volatile int32_t *)stop;
}
__device__ __forceinline__ bool stopped(const p2p_args &p, int round)
{
    return stopped(p.stop, round);
}

__device__ __forceinline__ void p2p_store(uint4 *to, uint4 v)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void p2p_store(uint2 *to, uint2 v)
{
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y)
                 : "memory");
}

__device__ __forceinline__ uint2 p2p_load(const uint2 *from)
{
    uint2 v;

    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint4 p2p_load(const uint4 *from)
{
    uint4 v;

    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

/* Release store: all earlier writes that this thread has seen are visible to a peer
 * that reads the flag. */
__device__ __forceinline__ void p2p_flag(uint32_t *to, uint32_t v)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t p2p_flagged(const uint32_t *from)
{
    uint32_t v;

    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

#endif
