/* wgmma of Hopper (sm_90a) with both operands in shared memory, K-major, 128-byte
 * swizzle: D [64, N] += A [64, 16] B [N, 16]^T in bf16, or twice the depth in e4m3
 * (whose sums keep about 14 bits), for the widths of tiles of few rows. Each width
 * is its own instruction with its own list of registers.
 */
#ifndef QUIRE_KERNELS_CUDA_GEMM_WGMMA_WIDTHS_CUH
#define QUIRE_KERNELS_CUDA_GEMM_WGMMA_WIDTHS_CUH

#include "kernels/cuda/gemm/wgmma.cuh"

/* d: the accumulator, N / 2 registers a thread; `add` 0: it is overwritten. */
template <int N> struct wgmma_width;

/* SUMS: how many accumulators there are, N / 2, and so the number of operand A, which
 * is the next behind them; B and ADD: those of the other two. */
#define WGMMA_WIDTH(N, SUMS, B, ADD)                                                              \
    template <> struct wgmma_width<N> {                                                           \
        static __device__ __forceinline__ void run(float (&d)[SUMS], uint64_t a, uint64_t b,      \
                                                   int add)                                       \
        {                                                                                         \
            WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                          \
                      "wgmma.mma_async.sync.aligned.m64n" #N                                      \
                      "k16.f32.bf16.bf16 {" WGMMA_NAMES_##SUMS "}"                                \
                                                               ", %" #SUMS ", %" #B               \
                                                               ", p, 1, 1, 0, 0;\n}"              \
                      : WGMMA_BIND_##SUMS(d)                                                      \
                      : "l"(a), "l"(b), "r"(add));                                                \
        }                                                                                         \
        static __device__ __forceinline__ void run_e4m3(float (&d)[SUMS], uint64_t a, uint64_t b, \
                                                        int add)                                  \
        {                                                                                         \
            WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                          \
                      "wgmma.mma_async.sync.aligned.m64n" #N                                      \
                      "k32.f32.e4m3.e4m3 {" WGMMA_NAMES_##SUMS "}, %" #SUMS ", %" #B              \
                                                               ", p, 1, 1;\n}"                    \
                      : WGMMA_BIND_##SUMS(d)                                                      \
                      : "l"(a), "l"(b), "r"(add));                                                \
        }                                                                                         \
    };

WGMMA_WIDTH(16, 8, 9, 10)
WGMMA_WIDTH(24, 12, 13, 14)
WGMMA_WIDTH(32, 16, 17, 18)
WGMMA_WIDTH(40, 20, 21, 22)
WGMMA_WIDTH(48, 24, 25, 26)
WGMMA_WIDTH(56, 28, 29, 30)
WGMMA_WIDTH(64, 32, 33, 34)
WGMMA_WIDTH(72, 36, 37, 38)
WGMMA_WIDTH(80, 40, 41, 42)
WGMMA_WIDTH(96, 48, 49, 50)
WGMMA_WIDTH(112, 56, 57, 58)
WGMMA_WIDTH(128, 64, 65, 66)
WGMMA_WIDTH(160, 80, 81, 82)
WGMMA_WIDTH(192, 96, 97, 98)
WGMMA_WIDTH(224, 112, 113, 114)
WGMMA_WIDTH(256, 128, 129, 130)

#endif
