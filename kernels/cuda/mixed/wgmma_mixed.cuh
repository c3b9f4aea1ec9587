/* wgmma of Hopper (sm_90a) with A in registers and B in shared memory, K-major,
 * 128-byte swizzle: D [64, N] += A [64, 16] B [N, 16]^T in bf16. A lies as mma's
 * operand does, 16 rows a warp. Descriptors are halved, so that they stay in uniform
 * registers.
 */
#ifndef QUIRE_KERNELS_CUDA_MIXED_WGMMA_MIXED_CUH
#define QUIRE_KERNELS_CUDA_MIXED_WGMMA_MIXED_CUH

#include "kernels/cuda/gemm/wgmma.cuh"

/* The lower half of wgmma_descriptor(shared_address); the upper one is always the
 * same. */
__device__ __forceinline__ uint32_t wgmma_mixed_descriptor(uint32_t shared_address)
{
    return (shared_address & 0x3FFFF) >> 4 | 1u << 16;
}

/* b: by wgmma_mixed_descriptor; d: the accumulator, N / 2 registers a thread; `add` 0:
 * it is overwritten. */
template <int N> struct wgmma_mixed;

#define WGMMA_MIXED(N, REGISTERS, A, B, ADD, ...)                                             \
    template <> struct wgmma_mixed<N> {                                                       \
        static __device__ __forceinline__ void run(float (&d)[N / 2], const uint32_t (&a)[4], \
                                                   uint32_t b, int add)                       \
        {                                                                                     \
            WGMMA_ASM("{\n.reg .pred p;\n.reg .b64 x;\nsetp.ne.b32 p, " ADD ", 0;\n"          \
                      "mov.b64 x, {" B ", 0x40000040};\n"                                     \
                      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "             \
                      "{" REGISTERS "}, {" A "}, x, p, 1, 1, 0;\n}"                           \
                      : __VA_ARGS__                                                           \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));        \
        }                                                                                     \
    };

WGMMA_MIXED(8, WGMMA_NAMES_4, "%4, %5, %6, %7", "%8", "%9", WGMMA_BIND_4(d))
WGMMA_MIXED(16, WGMMA_NAMES_8, "%8, %9, %10, %11", "%12", "%13", WGMMA_BIND_8(d))
WGMMA_MIXED(32, WGMMA_NAMES_16, "%16, %17, %18, %19", "%20", "%21", WGMMA_BIND_16(d))
WGMMA_MIXED(64, WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37", WGMMA_BIND_32(d))
WGMMA_MIXED(128, WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69", WGMMA_BIND_64(d))

#endif
