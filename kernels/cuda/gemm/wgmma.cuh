/* wgmma of Hopper (sm_90a): D [64, N] += A [64, 16] B, with B in shared memory,
 * swizzled.
 *
 * The accumulators are listed register by register, so every width N is an instruction
 * of its own.
 */
#ifndef QUIRE_KERNELS_CUDA_GEMM_WGMMA_CUH
#define QUIRE_KERNELS_CUDA_GEMM_WGMMA_CUH

#include "kernels/cuda/common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

/* Descriptor field for the swizzle of rows of 128, 64 or 32 bytes. */
__device__ __forceinline__ uint64_t wgmma_swizzle(int row_bytes)
{
    return row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
}

/* Descriptor of a K-major operand tile: rows of row_bytes in groups of eight; the base
 * is aligned to a group. */
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared_address, int row_bytes = 128)
{
    return (uint64_t)((shared_address & 0x3FFFF) >> 4) | 1ull << 16 |
           (uint64_t)(row_bytes / 2) << 32 | wgmma_swizzle(row_bytes) << 62;
}

__device__ __forceinline__ void wgmma_fence(void)
{
#if HAS_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit(void)
{
#if HAS_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int N> __device__ __forceinline__ void wgmma_wait(void)
{
#if HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

/* The operand numbers of N accumulators in the instruction, and their bindings. */
#define WGMMA_NAMES_4 "%0, %1, %2, %3"
#define WGMMA_NAMES_8 WGMMA_NAMES_4 ", %4, %5, %6, %7"
#define WGMMA_NAMES_12 WGMMA_NAMES_8 ", %8, %9, %10, %11"
#define WGMMA_NAMES_16 WGMMA_NAMES_12 ", %12, %13, %14, %15"
#define WGMMA_NAMES_20 WGMMA_NAMES_16 ", %16, %17, %18, %19"
#define WGMMA_NAMES_24 WGMMA_NAMES_20 ", %20, %21, %22, %23"
#define WGMMA_NAMES_28 WGMMA_NAMES_24 ", %24, %25, %26, %27"
#define WGMMA_NAMES_32 WGMMA_NAMES_28 ", %28, %29, %30, %31"
#define WGMMA_NAMES_36 WGMMA_NAMES_32 ", %32, %33, %34, %35"
#define WGMMA_NAMES_40 WGMMA_NAMES_36 ", %36, %37, %38, %39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_80                                          \
    WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, " \
                   "%72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_96                                          \
    WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, " \
                   "%88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_112                                             \
    WGMMA_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, " \
                   "%104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_128                                                  \
    WGMMA_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119, " \
                    "%120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_EIGHT(d, i) WGMMA_FOUR(d, i), WGMMA_FOUR(d, i + 4)
#define WGMMA_SIXTEEN(d, i) WGMMA_EIGHT(d, i), WGMMA_EIGHT(d, i + 8)
#define WGMMA_BIND_4(d) WGMMA_FOUR(d, 0)
#define WGMMA_BIND_8(d) WGMMA_BIND_4(d), WGMMA_FOUR(d, 4)
#define WGMMA_BIND_12(d) WGMMA_BIND_8(d), WGMMA_FOUR(d, 8)
#define WGMMA_BIND_16(d) WGMMA_BIND_12(d), WGMMA_FOUR(d, 12)
#define WGMMA_BIND_20(d) WGMMA_BIND_16(d), WGMMA_FOUR(d, 16)
#define WGMMA_BIND_24(d) WGMMA_BIND_20(d), WGMMA_FOUR(d, 20)
#define WGMMA_BIND_28(d) WGMMA_BIND_24(d), WGMMA_FOUR(d, 24)
#define WGMMA_BIND_32(d) WGMMA_BIND_28(d), WGMMA_FOUR(d, 28)
#define WGMMA_BIND_36(d) WGMMA_BIND_32(d), WGMMA_FOUR(d, 32)
#define WGMMA_BIND_40(d) WGMMA_BIND_36(d), WGMMA_FOUR(d, 36)
#define WGMMA_BIND_48(d) WGMMA_BIND_40(d), WGMMA_EIGHT(d, 40)
#define WGMMA_BIND_56(d) WGMMA_BIND_48(d), WGMMA_EIGHT(d, 48)
#define WGMMA_BIND_64(d) WGMMA_BIND_56(d), WGMMA_EIGHT(d, 56)
#define WGMMA_BIND_80(d) WGMMA_BIND_64(d), WGMMA_SIXTEEN(d, 64)
#define WGMMA_BIND_96(d) WGMMA_BIND_80(d), WGMMA_SIXTEEN(d, 80)
#define WGMMA_BIND_112(d) WGMMA_BIND_96(d), WGMMA_SIXTEEN(d, 96)
#define WGMMA_BIND_128(d) WGMMA_BIND_112(d), WGMMA_SIXTEEN(d, 112)

#if HAS_WGMMA
#define WGMMA_ASM(...) asm volatile(__VA_ARGS__)
#else
#define WGMMA_ASM(...)
#endif

/* Descriptor of a B operand [16, N] stored with N contiguous, in panels of row_bytes /
 * 2 columns. */
__device__ __forceinline__ uint64_t wgmma_descriptor_n(uint32_t shared_address,
                                                       uint32_t panel_bytes, int row_bytes = 128)
{
    return (uint64_t)((shared_address & 0x3FFFF) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 |
           (uint64_t)(row_bytes / 2) << 32 | wgmma_swizzle(row_bytes) << 62;
}

/* Both operands in shared memory; add 0: d is overwritten. */
template <typename T, int N> struct wgmma_ss;
/* A [64, 16] in registers, laid out as mma's A operand; B [16, N] by
 * wgmma_descriptor_n. */
template <typename T, int N> struct wgmma_rs;
/* The same with B K-major, by wgmma_descriptor; add 0: d is overwritten. */
template <typename T, int N> struct wgmma_rs_k;
/* Both operands in shared memory, B by wgmma_descriptor_n. */
template <typename T, int N> struct wgmma_ss_n;

#define WGMMA_OF(T, type)                                                                   \
    template <> struct wgmma_ss<T, 256> {                                                   \
        static __device__ __forceinline__ void run(float (&d)[128], uint64_t a, uint64_t b, \
                                                   int add)                                 \
        {                                                                                   \
            WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                         \
                      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type          \
                      " {" WGMMA_NAMES_128 "}, %128, %129, p, 1, 1, 0, 0;\n}"               \
                      : WGMMA_BIND_128(d)                                                   \
                      : "l"(a), "l"(b), "r"(add));                                          \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_ss<T, 128> {                                                   \
        static __device__ __forceinline__ void run(float (&d)[64], uint64_t a, uint64_t b,  \
                                                   int add)                                 \
        {                                                                                   \
            WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                          \
                      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type          \
                      " {" WGMMA_NAMES_64 "}, %64, %65, p, 1, 1, 0, 0;\n}"                  \
                      : WGMMA_BIND_64(d)                                                    \
                      : "l"(a), "l"(b), "r"(add));                                          \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_ss<T, 64> {                                                    \
        static __device__ __forceinline__ void run(float (&d)[32], uint64_t a, uint64_t b,  \
                                                   int add)                                 \
        {                                                                                   \
            WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                          \
                      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type           \
                      " {" WGMMA_NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}"                  \
                      : WGMMA_BIND_32(d)                                                    \
                      : "l"(a), "l"(b), "r"(add));                                          \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_rs_k<T, 64> {                                                  \
        static __device__ __forceinline__ void run(float (&d)[32], const uint32_t (&a)[4],  \
                                                   uint64_t b, int add)                     \
        {                                                                                   \
            WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                          \
                      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type           \
                      " {" WGMMA_NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"    \
                      : WGMMA_BIND_32(d)                                                    \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));      \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_ss_n<T, 256> {                                                 \
        static __device__ __forceinline__ void run(float (&d)[128], uint64_t a, uint64_t b) \
        {                                                                                   \
            WGMMA_ASM("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type          \
                      " {" WGMMA_NAMES_128 "}, %128, %129, 1, 1, 1, 0, 1;"                  \
                      : WGMMA_BIND_128(d)                                                   \
                      : "l"(a), "l"(b));                                                    \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_rs<T, 64> {                                                    \
        static __device__ __forceinline__ void run(float (&d)[32], const uint32_t (&a)[4],  \
                                                   uint64_t b)                              \
        {                                                                                   \
            WGMMA_ASM("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type           \
                      " {" WGMMA_NAMES_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"       \
                      : WGMMA_BIND_32(d)                                                    \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_rs<T, 80> {                                                    \
        static __device__ __forceinline__ void run(float (&d)[40], const uint32_t (&a)[4],  \
                                                   uint64_t b)                              \
        {                                                                                   \
            WGMMA_ASM("wgmma.mma_async.sync.aligned.m64n80k16.f32." type "." type           \
                      " {" WGMMA_NAMES_40 "}, {%40, %41, %42, %43}, %44, 1, 1, 1, 1;"       \
                      : WGMMA_BIND_40(d)                                                    \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_rs<T, 96> {                                                    \
        static __device__ __forceinline__ void run(float (&d)[48], const uint32_t (&a)[4],  \
                                                   uint64_t b)                              \
        {                                                                                   \
            WGMMA_ASM("wgmma.mma_async.sync.aligned.m64n96k16.f32." type "." type           \
                      " {" WGMMA_NAMES_48 "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 1;"       \
                      : WGMMA_BIND_48(d)                                                    \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_rs<T, 128> {                                                   \
        static __device__ __forceinline__ void run(float (&d)[64], const uint32_t (&a)[4],  \
                                                   uint64_t b)                              \
        {                                                                                   \
            WGMMA_ASM("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type          \
                      " {" WGMMA_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"       \
                      : WGMMA_BIND_64(d)                                                    \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                \
        }                                                                                   \
    };                                                                                      \
    template <> struct wgmma_rs<T, 256> {                                                   \
        static __device__ __forceinline__ void run(float (&d)[128], const uint32_t (&a)[4], \
                                                   uint64_t b)                              \
        {                                                                                   \
            WGMMA_ASM("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type          \
                      " {" WGMMA_NAMES_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;" \
                      : WGMMA_BIND_128(d)                                                   \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                \
        }                                                                                   \
    };

WGMMA_OF(__nv_bfloat16, "bf16")
WGMMA_OF(__half, "f16")

#endif
