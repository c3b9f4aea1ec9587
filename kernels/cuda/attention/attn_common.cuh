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

/* Zeroes tokens [from, TOKENS) of a tile: memory past the end of a sequence may hold
 * NaN, and 0 * NaN is NaN. The caller is thread i of n. */
template <int D, int TOKENS, int B = 2>
__device__ __forceinline__ void clear_tokens(char *tile, int from, int i, int n)
{
    using P = panels<D, B>;
    int count = (TOKENS - from) * P::CHUNKS; /* of a panel */

    for (; i < P::COUNT * count; i += n) {
        *(uint4 *)(tile + i / count * TOKENS * P::ROW + from * P::ROW + i % count * 16) =
            make_uint4(0, 0, 0, 0);
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

/* Two codes of e4m3 as float16, which holds them exactly. */
__device__ __forceinline__ uint32_t half2_of_e4m3(uint32_t codes)
{
    __half2_raw v = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3);

    return (uint32_t)v.x | (uint32_t)v.y << 16;
}

/* Two codes of e4m3 as T, exactly. */
template <typename T> __device__ __forceinline__ uint32_t pair_of_e4m3(uint32_t codes);
template <> __device__ __forceinline__ uint32_t pair_of_e4m3<__half>(uint32_t codes)
{
    return half2_of_e4m3(codes);
}
template <> __device__ __forceinline__ uint32_t pair_of_e4m3<__nv_bfloat16>(uint32_t codes)
{
    uint32_t h = half2_of_e4m3(codes);
    float2 f = __half22float2(*(__half2 *)&h);

    return pack2<__nv_bfloat16>(f.x, f.y);
}

/* 16 codes of e4m3 as T: dims 0 to 7 and 8 to 15. */
template <typename T>
__device__ __forceinline__ void widen_chunk(const uint4 &codes, uint4 &low, uint4 &high)
{
    low = make_uint4(pair_of_e4m3<T>(codes.x & 0xffffu), pair_of_e4m3<T>(codes.x >> 16),
                     pair_of_e4m3<T>(codes.y & 0xffffu), pair_of_e4m3<T>(codes.y >> 16));
    high = make_uint4(pair_of_e4m3<T>(codes.z & 0xffffu), pair_of_e4m3<T>(codes.z >> 16),
                      pair_of_e4m3<T>(codes.w & 0xffffu), pair_of_e4m3<T>(codes.w >> 16));
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

/* Two codes of int8 as T, times a scale. */
template <typename T> __device__ __forceinline__ uint32_t pair_of_int8(uint32_t codes, float scale)
{
    return pack2<T>((float)(int8_t)(codes & 0xff) * scale, (float)(int8_t)(codes >> 8) * scale);
}

/* Widens tokens [token, token + 16) of one head from a cache of 8 bits into tiles of
 * TOKENS tokens, of which they are those from `at` on: keys at `to`, values TOKENS * D
 * elements behind it. Codes of e4m3 keep their value, those of int8 are multiplied by
 * their scale and rounded to T. Called by all lanes of a warp, in place of
 * load_chunk. */
template <typename T, int D, int TOKENS>
__device__ __forceinline__ void widen_tokens(const kv_view &kv, const uint8_t *head, int block0,
                                             int block1, int token, char *to, int at, int lane)
{
    using P = panels<D, 1>;
    bool e4m3 = kv.dtype == T_F8;

#pragma unroll 2
    for (int n = lane; n < 2 * D; n += 32) {
        int t = n / P::CHUNKS % 16, panel = n / P::CHUNKS / 16 % P::COUNT, which = n / D;
        int slot = (token + t) % kv.block_size,
            chunk = panel * P::CHUNKS + ((n % P::CHUNKS) ^ (t * P::ROW / 128 % P::CHUNKS));
        bool second = kv.block_size % 16 != 0 && t >= 8;
        const uint8_t *from =
            head + (second ? block1 : block0) * kv.block_stride + which * kv.kv_stride;
        uint4 v = *(const uint4 *)(from + ((int64_t)panel * kv.block_size + slot) * P::ROW +
                                   n % P::CHUNKS * 16),
              w[2];
        if (e4m3) {
            widen_chunk<T>(v, w[0], w[1]);
        } else {
            float scale = ((const float *)(from + kv.scale_offset))[slot];
            auto pair = [&](uint32_t codes) { return pair_of_int8<T>(codes, scale); };
            w[0] = make_uint4(pair(v.x & 0xffffu), pair(v.x >> 16), pair(v.y & 0xffffu),
                              pair(v.y >> 16));
            w[1] = make_uint4(pair(v.z & 0xffffu), pair(v.z >> 16), pair(v.w & 0xffffu),
                              pair(v.w >> 16));
        }
        char *tile = to + which * TOKENS * D * sizeof(T);
        *(uint4 *)(tile + tile_at<D, TOKENS>(at + t, 2 * chunk)) = w[0];
        *(uint4 *)(tile + tile_at<D, TOKENS>(at + t, 2 * chunk + 1)) = w[1];
    }
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
