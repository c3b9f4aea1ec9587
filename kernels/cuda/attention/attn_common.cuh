/* Building blocks of the attention kernels: matrix instructions, and loading 16 tokens
 * of one head's keys and values from the paged cache into shared memory.
 *
 * A chunk in shared memory is [k|v][panels][tokens][width], with 16-byte chunks
 * swizzled as in the cache (struct kv_view), so a load is a handful of contiguous
 * copies. Compute capability 9 uses bulk copies that complete on an mbarrier, one
 * instruction each; older devices use cp.async, 16 bytes per lane.
 */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ATTN_COMMON_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_ATTN_COMMON_CUH

#include <type_traits>

#include "kernels/cuda/gemm/bulk.cuh"

#define LOG2E 1.44269504088896341f

/* The panels of a head of D dims of B bytes. */
template <int D, int B = 2> struct panels {
    /* bytes of a token's row, and 16-byte chunks in it */
    static constexpr int ROW = D * B % 128 == 0  ? 128
                               : D * B % 64 == 0 ? 64
                               : D * B % 32 == 0 ? 32
                                                 : 16,
                         CHUNKS = ROW / 16;
    static constexpr int WIDTH = ROW / B, COUNT = D / WIDTH;
};

/* Byte offset of 16-byte chunk `chunk` of token t in a tile of TOKENS tokens. */
template <int D, int TOKENS, int B = 2>
__device__ __forceinline__ uint32_t tile_at(uint32_t t, uint32_t chunk)
{
    using P = panels<D, B>;

    return chunk / P::CHUNKS * (TOKENS * P::ROW) + t * P::ROW +
           (((chunk % P::CHUNKS) ^ (t * P::ROW / 128 % P::CHUNKS)) << 4);
}

/* The chunk `even` chunks behind the one at `first`, which tile_at has for chunk 0 or 1
 * in a tile at a multiple of 128 bytes. */
template <int D, int TOKENS, int B = 2>
__device__ __forceinline__ uint32_t tile_behind(uint32_t first, int even)
{
    using P = panels<D, B>;

    return (first ^ (even % P::CHUNKS << 4)) + even / P::CHUNKS * (TOKENS * P::ROW);
}

/* Zeroes tokens [from, TOKENS) of a tile: memory past the end of a sequence may hold
 * NaN, and 0 * NaN is NaN. The caller is thread i of n. */
template <int D, int TOKENS, int B = 2>
__device__ __forceinline__ void clear_tokens(char *tile, int from, int i, int n)
{
    using P = panels<D, B>;
    constexpr int CHUNKS = P::COUNT * P::CHUNKS; /* of a token */

#pragma unroll 1
    for (; i < (TOKENS - from) * CHUNKS; i += n) {
        int t = from + i / CHUNKS, chunk = i % CHUNKS;
        *(uint4 *)(tile + chunk / P::CHUNKS * (TOKENS * P::ROW) + t * P::ROW +
                   chunk % P::CHUNKS * 16) = make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* c [16, 8] += a [16, 16] b [16, 8] */
template <typename T>
__device__ __forceinline__ void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1);
template <>
__device__ __forceinline__ void mma16816<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                        uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma16816<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T> __device__ __forceinline__ uint32_t pack2(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float lo, float hi)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);

    return *(uint32_t *)&v;
}
template <> __device__ __forceinline__ uint32_t pack2<__half>(float lo, float hi)
{
    __half2 v = __floats2half2_rn(lo, hi);

    return *(uint32_t *)&v;
}

/* Four codes of e4m3 as two pairs of float16, which holds them exactly. */
__device__ __forceinline__ void halves_of_e4m3(uint32_t codes, uint32_t &low, uint32_t &high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{.reg .b16 a, b;\n"
        "mov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
#else
    __half2_raw a = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(codes & 0xffffu), __NV_E4M3);
    __half2_raw b = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(codes >> 16), __NV_E4M3);

    low = (uint32_t)a.x | (uint32_t)a.y << 16;
    high = (uint32_t)b.x | (uint32_t)b.y << 16;
#endif
}

/* Four codes of int8 likewise: 1024 + 128 + code, less 1152. */
__device__ __forceinline__ void halves_of_int8(uint32_t codes, uint32_t &low, uint32_t &high)
{
    const __half2 base = __half2half2(__float2half_rn(1152.0f));
    uint32_t v = codes ^ 0x80808080u, a = __byte_perm(v, 0x64646464u, 0x4140),
             b = __byte_perm(v, 0x64646464u, 0x4342);
    __half2 x = __hsub2(*(__half2 *)&a, base), y = __hsub2(*(__half2 *)&b, base);

    low = *(uint32_t *)&x;
    high = *(uint32_t *)&y;
}

/* Four codes of C as two pairs of T, exactly. */
template <typename T, typename C>
__device__ __forceinline__ void widen_four(uint32_t codes, uint32_t &low, uint32_t &high)
{
    if (std::is_same<C, int8_t>::value) {
        halves_of_int8(codes, low, high);
    } else {
        halves_of_e4m3(codes, low, high);
    }
    if (!std::is_same<T, __half>::value) {
        float2 a = __half22float2(*(__half2 *)&low), b = __half22float2(*(__half2 *)&high);
        low = pack2<T>(a.x, a.y);
        high = pack2<T>(b.x, b.y);
    }
}

/* 16 codes of C as T, exactly: dims 0 to 7 and 8 to 15. */
template <typename T, typename C>
__device__ __forceinline__ void widen_chunk(const uint4 &codes, uint4 &low, uint4 &high)
{
    widen_four<T, C>(codes.x, low.x, low.y);
    widen_four<T, C>(codes.y, low.z, low.w);
    widen_four<T, C>(codes.z, high.x, high.y);
    widen_four<T, C>(codes.w, high.z, high.w);
}

/* Two neighbouring activations of a type that is known when the kernel runs, float16 or
 * bfloat16. */
__device__ __forceinline__ float2 unpack2_as(uint32_t pair, bool half)
{
    return half ? __half22float2(*(__half2 *)&pair) : __bfloat1622float2(*(__nv_bfloat162 *)&pair);
}
__device__ __forceinline__ uint32_t pack2_as(float low, float high, bool half)
{
    return half ? pack2<__half>(low, high) : pack2<__nv_bfloat16>(low, high);
}

__device__ __forceinline__ void copy16(uint32_t to, const void *from)
{
#if !BULK_COPY
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void copy_commit(void)
{
#if !BULK_COPY
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N> __device__ __forceinline__ void copy_wait(void)
{
#if !BULK_COPY
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* Loads tokens [token, token + 16) of one head's keys and values into tiles of TOKENS
 * tokens, the first of them at `to`. block0 and block1 are the blocks of the first and
 * last eight; the block size is a multiple of 8, and block1 matters only if it is not
 * one of 16. Called by all lanes of a warp. */
template <typename T, int D, int TOKENS>
__device__ __forceinline__ void load_chunk(const kv_view &kv, const T *head_base, int block0,
                                           int block1, int token, uint32_t to, uint32_t bar,
                                           int lane)
{
    constexpr int B = sizeof(T);
    using P = panels<D, B>;
    int n_segments = kv.block_size % 16 == 0 ? 1 : 2;

#if BULK_COPY
    if (kv.block_size == 16 && TOKENS == 16) { /* all panels of a block are contiguous */
        if (lane < 2) {
            bulk_copy(to + lane * 16 * D * B,
                      head_base + block0 * kv.block_stride + lane * kv.kv_stride, 16 * D * B, bar);
        }
    } else if (lane < 2 * P::COUNT * n_segments) {
        int segment = lane % n_segments, panel = lane / n_segments % P::COUNT,
            which = lane / n_segments / P::COUNT;
        const T *from =
            head_base + (segment ? block1 : block0) * kv.block_stride + which * kv.kv_stride +
            ((int64_t)panel * kv.block_size + (token + segment * 8) % kv.block_size) * P::WIDTH;
        bulk_copy(to + which * TOKENS * D * B + (panel * TOKENS + segment * 8) * P::ROW, from,
                  16 / n_segments * P::ROW, bar);
    }
#else
    for (int i = 0; i < D * B / 16; i++) { /* 512 bytes per access */
        int n = i * 32 + lane, chunk = n % P::CHUNKS, t = n / P::CHUNKS % 16,
            panel = n / P::CHUNKS / 16 % P::COUNT;
        int which = n / (D * B);
        bool second = n_segments == 2 && t >= 8;
        const T *from = head_base + (second ? block1 : block0) * kv.block_stride +
                        which * kv.kv_stride +
                        ((int64_t)panel * kv.block_size + (token + t) % kv.block_size) * P::WIDTH +
                        chunk * (16 / B);
        copy16(to + which * TOKENS * D * B + (panel * TOKENS + t) * P::ROW + chunk * 16, from);
    }
#endif
}

/* Loads the scales of tokens [token, token + 16) of one head's int8 keys and values, 64
 * bytes each, to `to`. Called by all lanes of a warp, as load_chunk is. */
__device__ __forceinline__ void load_scales(const kv_view &kv, const int8_t *head_base, int block0,
                                            int block1, int token, uint32_t to, uint32_t bar,
                                            int lane)
{
    int n_segments = kv.block_size % 16 == 0 ? 1 : 2;
    auto from = [&](int which, int t) {
        const int8_t *head = head_base +
                             (n_segments == 2 && t >= 8 ? block1 : block0) * kv.block_stride +
                             which * kv.kv_stride;
        return head + kv.scale_offset + (token + t) % kv.block_size * 4;
    };

#if BULK_COPY
    if (lane < 2 * n_segments) {
        int which = lane / n_segments, t = lane % n_segments * 8;
        bulk_copy(to + which * 64 + t * 4, from(which, t), 64 / n_segments, bar);
    }
#else
    if (lane < 8) {
        copy16(to + lane * 16, from(lane / 4, lane % 4 * 4));
    }
#endif
}

/* Widens tokens [token, token + 16) of one head from a cache of 8 bits into tiles of
 * TOKENS tokens, of which they are those from `at` on: keys at `to`, values TOKENS * D
 * elements behind it. Scales of int8 go to `scales`, those of TOKENS keys and then
 * those of as many values, times SCALE_UNIT. Called by all lanes of a warp, in place of
 * load_chunk. */
#define SCALE_UNIT 128.0f
template <typename T, int D, int TOKENS>
__device__ __forceinline__ void widen_tokens(const kv_view &kv, const uint8_t *head, int block0,
                                             int block1, int token, char *to, float *scales, int at,
                                             int lane)
{
    using P = panels<D, 1>;
    bool e4m3 = kv.dtype == T_F8;
    auto codes_of = [&](int which, int t) {
        bool second = kv.block_size % 16 != 0 && t >= 8;
        return head + (second ? block1 : block0) * kv.block_stride + which * kv.kv_stride;
    };

    if (!e4m3) { /* a lane for each key and value */
        int which = lane >> 4, t = lane & 15;
        const float *from = (const float *)(codes_of(which, t) + kv.scale_offset);
        scales[which * TOKENS + at + t] = from[(token + t) % kv.block_size] * SCALE_UNIT;
    }
#pragma unroll 2
    for (int n = lane; n < 2 * D; n += 32) {
        int t = n / P::CHUNKS % 16, panel = n / P::CHUNKS / 16 % P::COUNT, which = n / D;
        int slot = (token + t) % kv.block_size,
            chunk = panel * P::CHUNKS + ((n % P::CHUNKS) ^ (t * P::ROW / 128 % P::CHUNKS));
        const uint8_t *from = codes_of(which, t) +
                              ((int64_t)panel * kv.block_size + slot) * P::ROW + n % P::CHUNKS * 16;
        uint4 v = *(const uint4 *)from, w[2];
        if (e4m3) {
            widen_chunk<T, uint8_t>(v, w[0], w[1]);
        } else {
            widen_chunk<T, int8_t>(v, w[0], w[1]);
        }
        char *tile = to + which * TOKENS * D * sizeof(T);
        *(uint4 *)(tile + tile_at<D, TOKENS>(at + t, 2 * chunk)) = w[0];
        *(uint4 *)(tile + tile_at<D, TOKENS>(at + t, 2 * chunk + 1)) = w[1];
    }
}

/* What the sums over tiles of widen_tokens are multiplied by. */
__device__ __forceinline__ float scale_of_keys(const attn_args &a)
{
    return a.kv.dtype == T_I8 ? 1.0f / SCALE_UNIT : a.k_scale;
}
__device__ __forceinline__ float scale_of_values(const attn_args &a)
{
    return a.kv.dtype == T_I8 ? 1.0f / SCALE_UNIT : a.v_scale;
}

/* 2^x by the special function unit; 0 for -infinity, denormals flushed to 0. */
__device__ __forceinline__ float fast_exp2(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* cap * tanh(s / cap), computed as cap - 2 cap / (1 + exp(2 s / cap)): branch-free,
 * with an error of 2e-7 * cap. */
__device__ __forceinline__ float soft_cap(float s, float cap)
{
    return cap - __fdividef(2.0f * cap, 1.0f + fast_exp2(s * __fdividef(2.0f * LOG2E, cap)));
}

#endif
