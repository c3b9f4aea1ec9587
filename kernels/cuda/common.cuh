/* Shared by all kernels: types, vector access, warp and block sums, dependent
 * launch. */
#ifndef QUIRE_KERNELS_CUDA_COMMON_CUH
#define QUIRE_KERNELS_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/cuda/launch.h"

/* The values of enum dtype and enum activation; backend.h is C only. */
enum { T_F32, T_F16, T_BF16, T_I32, T_F8, T_I8 };
enum { A_NONE, A_RELU, A_GELU_ERF, A_GELU_TANH, A_SILU };

__device__ __forceinline__ float to_float(float x)
{
    return x;
}
__device__ __forceinline__ float to_float(__half x)
{
    return __half2float(x);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ __half from_float<__half>(float x)
{
    return __float2half_rn(x);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* x rounded to T. */
template <typename T> __device__ __forceinline__ float rounded(float x)
{
    return to_float(from_float<T>(x));
}

/* N elements moved in one access; VEC > 1 is used only where rows are 16-byte
 * aligned. */
template <typename T, int N> struct alignas(sizeof(T) * N) vec {
    T v[N];
};

__device__ __forceinline__ float load_any(const void *p, int type, int64_t i)
{
    if (type == T_F32) {
        return ((const float *)p)[i];
    }
    if (type == T_F16) {
        return __half2float(((const __half *)p)[i]);
    }
    return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}

__device__ __forceinline__ void store_any(void *p, int type, int64_t i, float x)
{
    if (type == T_F32) {
        ((float *)p)[i] = x;
    } else if (type == T_F16) {
        ((__half *)p)[i] = __float2half_rn(x);
    } else {
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(x);
    }
}

__device__ __forceinline__ float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

__device__ __forceinline__ float activate(float x, int act)
{
    switch (act) {
    case A_RELU:
        return fmaxf(x, 0.0f);
    case A_GELU_ERF:
        return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case A_GELU_TANH:
        return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case A_SILU:
        return __fdividef(x, 1.0f + __expf(-x));
    default:
        return x;
    }
}

__device__ __forceinline__ float warp_sum(float x)
{
    for (int o = 16; o > 0; o >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

__device__ __forceinline__ float warp_max(float x)
{
    for (int o = 16; o > 0; o >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    }
    return x;
}

/* Sum over the block. `shared` holds 33 floats, and may be reused after the call's last
 * barrier. */
__device__ __forceinline__ float block_sum(float x, float *shared)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = (blockDim.x + 31) >> 5;

    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) {
        shared[warp] = x;
    }
    __syncthreads();
    x = lane < n_warps ? shared[lane] : 0.0f;
    return warp_sum(x);
}

/* Where blocks or warps meet: holds one in eight up for 10 to 50 us, at random, in a
 * build with -DQUIRE_RANDOM_DELAYS (scripts/gpu-variants). Results must not change. */
__device__ __forceinline__ void random_delay(void)
{
#ifdef QUIRE_RANDOM_DELAYS
    uint32_t z = (uint32_t)clock64() * 2654435761u + blockIdx.x * 40503u + threadIdx.x / 32 * 9973u;

    z = (z ^ z >> 15) * 2246822519u;
    z ^= z >> 13;
    if ((z & 7) == 0) {
        __nanosleep(10000 + (z >> 3) % 40000);
    }
#endif
}

/* Programmatic dependent launch. Every kernel waits before it touches what other
 * kernels touch, so completion is transitive; only weights may be read before the
 * wait, and the step's own arrays (struct step_arrays). Those are complete because the
 * prologue never releases its dependents early and the step's first kernel behind it,
 * the embedding, waits before it releases: whatever starts later starts behind both. A
 * kernel that may come first in a step (a stage's first, a new embedding) must keep to
 * that. */
__device__ __forceinline__ void pdl_wait(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    random_delay();
}

__device__ __forceinline__ void pdl_release(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* True when the running code was compiled for compute capability 9 or newer: it
 * supports dependent launches and clusters. */
static inline bool pdl_available(void)
{
    return cuda_code_version() >= 90;
}

/* Allows a kernel `bytes` of dynamic shared memory. False where the device has less;
 * the CUDA error is cleared then. */
template <typename... P> static inline bool allow_shared(void (*kernel)(P...), int64_t bytes)
{
    constexpr auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    bool ok = bytes <= cuda_shared_limit() &&
              cudaFuncSetAttribute(kernel, limit, (int)bytes) == cudaSuccess;

    if (!ok) {
        cudaGetLastError();
    }
    return ok;
}

/* How the launch starts: `first`, which devices without dependent launches ignore
 * unless it is cudaLaunchAttributeCooperative. */
template <typename... P, typename... A>
static inline void launch_with(cudaLaunchAttribute first, void (*kernel)(P...), dim3 grid,
                               dim3 block, size_t shared_bytes, cudaStream_t stream, A... args)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[2];

    attr[0] = first;
    attr[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attr[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared_bytes;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = pdl_available() ? 2 : first.id == cudaLaunchAttributeCooperative ? 1 : 0;
    cudaLaunchKernelEx(&c, kernel, P(args)...);
}

/* Launches with the dependent-launch attribute where available, and with the largest
 * shared-memory carveout, as matrix products and attention use: changing the carveout
 * takes time and keeps blocks of two kernels off one multiprocessor. */
template <typename... P, typename... A>
static inline void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream, A... args)
{
    cudaLaunchAttribute early = {};

    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    launch_with(early, kernel, grid, block, shared_bytes, stream, args...);
}

/* The same for a kernel whose blocks wait for each other while other processes have
 * blocks on the device (mps_told): all of them start together, after the launch in
 * front. */
template <typename... P, typename... A>
static inline void launch_together(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                                   cudaStream_t stream, A... args)
{
    cudaLaunchAttribute together = {};

    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    launch_with(together, kernel, grid, block, shared_bytes, stream, args...);
}

/* The last of [first, first + n) that begins, by start_of, at `at` or before it; starts
 * do not fall, and the first's is not above `at`. */
template <typename F>
__device__ __forceinline__ int last_begun(int first, int n, int at, F start_of)
{
    int lo = first, hi = first + n - 1;

    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (start_of(mid) <= at) {
            lo = mid;
        } else {
            hi = mid - 1;
        }
    }
    return lo;
}

/* The one of sequences [first_seq, first_seq + n_seqs) that has the step's token. */
__device__ __forceinline__ int sequence_of(const step_arrays &s, int token, int first_seq,
                                           int n_seqs)
{
    return last_begun(first_seq, n_seqs, token, [&](int i) { return s.q_start[i]; });
}

/* What a head's sink adds to its sum of weights, which are powers of two relative to
 * `top`. A sink far above all scores makes it infinite, and the result zero. */
__device__ __forceinline__ float sink_weight(const attn_args &a, int head, float top)
{
    return a.sinks ? exp2f(a.sinks[head] * 1.44269504088896341f - top) : 0.0f;
}

/* Whether the cache's elements have 8 bits. */
__host__ __device__ __forceinline__ bool kv_narrow(const kv_view &kv)
{
    return kv.dtype == T_F8 || kv.dtype == T_I8;
}

/* Offset in elements of dim `d` of token `t` in the tile of one (block, layer, k|v,
 * head); see struct kv_view. */
__device__ __forceinline__ int64_t kv_offset(const kv_view &kv, int t, int d)
{
    if (kv.panel_log2 == 0) {
        return (int64_t)t * kv.head_dim + d;
    }
    int chunk = kv_narrow(kv) ? 4 : 3; /* log2 of the elements of 16 bytes */
    int width = 1 << kv.panel_log2, in_panel = d & (width - 1),
        swizzle = (t << kv.panel_log2 >> (3 + chunk)) & ((width >> chunk) - 1);
    return ((int64_t)(d >> kv.panel_log2) * kv.block_size + t) * width +
           ((in_panel >> chunk ^ swizzle) << chunk) + (d & ((1 << chunk) - 1));
}

/* ---- caches of 8 bits ---- */

/* The nearest code of e4m3, at most 448; a NaN stays one. */
__device__ __forceinline__ uint8_t e4m3_of(float x)
{
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

/* The nearest whole number from -127 to 127; 0 of a NaN. */
__device__ __forceinline__ uint8_t int8_of(float x)
{
    return x != x ? 0 : (uint8_t)(int8_t)__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f));
}

__device__ __forceinline__ float of_e4m3(uint8_t code)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

/* The scale of int8 codes of values of at most `most`, and one over it. */
__device__ __forceinline__ float2 int8_scales(float most)
{
    float scale = __fdiv_rn(most, 127.0f);

    return make_float2(scale, scale > 0.0f ? __frcp_rn(scale) : 0.0f);
}

/* Start of a token's k or v of a KV head in the cache; its dims lie as kv_offset
 * says. */
template <typename C>
__device__ __forceinline__ C *kv_head_of(const kv_view &kv, int layer, int slot, int kv_head,
                                         bool is_v)
{
    return (C *)kv.base + (slot / kv.block_size) * kv.block_stride + layer * kv.layer_stride +
           (is_v ? kv.kv_stride : 0) + kv_head * kv.head_stride;
}

#define DISPATCH_TYPE(type, ...)      \
    do {                              \
        if ((type) == T_F32) {        \
            using T = float;          \
            __VA_ARGS__;              \
        } else if ((type) == T_F16) { \
            using T = __half;         \
            __VA_ARGS__;              \
        } else {                      \
            using T = __nv_bfloat16;  \
            __VA_ARGS__;              \
        }                             \
    } while (0)

#endif
