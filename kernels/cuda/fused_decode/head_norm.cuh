/* Norms of q and k over their heads in a fused launch. A head's results come from tiles
 * of several blocks; the epilogue warp whose tile is done last reads all of the head
 * back, norms and rotates it, and stores it to qkv and to the cache.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_HEAD_NORM_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_HEAD_NORM_CUH

#include "kernels/cuda/fused_decode/activations.cuh"

/* True for the last warp of n that call it with the same counter, which then sees what
 * all of them stored. The counter is zero again afterwards. */
__device__ __forceinline__ bool last_to_arrive(int32_t *counter, int n, int lane)
{
    int before = 0;

    random_delay();
    __syncwarp();
    if (lane == 0) {
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(counter)
                     : "memory");
    }
    __syncwarp(); /* the other lanes read behind lane 0's acquire; the shuffle orders nothing */
    bool last = __shfl_sync(0xffffffffu, before, 0) + 1 == n;
    if (last && lane == 0) {
        *counter = 0;
    }
    return last;
}

template <typename T> __device__ __forceinline__ void unpack8(float (&x)[8], const uint4 &v)
{
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 f = unpack2<T>(word[i]);
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
    }
}

template <typename T> __device__ __forceinline__ uint4 pack8(const float (&x)[8])
{
    return make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]),
                      pack2<T>(x[6], x[7]));
}

__device__ __forceinline__ float sum_of_squares(const float (&x)[8], float sum)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum = fmaf(x[i], x[i], sum);
    }
    return sum;
}

/* x = norm(x), rounded, of 8 dims from `at` on. */
template <typename T>
__device__ __forceinline__ void norm8(float (&x)[8], const void *weight, float offset, float scale,
                                      int at)
{
    float w[8];

    unpack8<T>(w, __ldg((const uint4 *)((const T *)weight + at)));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = rounded<T>(x[i] * scale * (w[i] + offset));
    }
}

/* Rotates 8 dims and those half a head behind them. */
__device__ __forceinline__ void rotate8(float (&low)[8], float (&high)[8], const float *cosine,
                                        const float *sine)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float x = low[i], c = __ldg(cosine + i), s = __ldg(sine + i);
        low[i] = x * c - high[i] * s;
        high[i] = high[i] * c + x * s;
    }
}

/* The head of q or k whose results lie at `x` of row 0: four lanes a row, each with up
 * to two times 8 dims of either half. */
template <typename T>
__device__ __noinline__ void norm_head(const fused_rope &r, T *x, int64_t stride, int rows,
                                       int head)
{
    enum { MOST = 2 };
    int lane = threadIdx.x & 31, row = lane >> 2, half = r.kv.head_dim / 2, n = half / 32;
    int first = (lane & 3) * 8;
    bool is_k = head >= r.n_heads, here = row < rows;
    const norm_args &norm = is_k ? r.k_norm : r.q_norm;
    float low[MOST][8] = {}, high[MOST][8] = {}, sum = 0.0f;

    x += row * stride;
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        if (here && i < n) {
            unpack8<T>(low[i], __ldcg((const uint4 *)(x + first + i * 32)));
            unpack8<T>(high[i], __ldcg((const uint4 *)(x + first + i * 32 + half)));
        }
        sum = sum_of_squares(high[i], sum_of_squares(low[i], sum));
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (!here) {
        return;
    }
    float scale = rsqrtf(sum / r.kv.head_dim + norm.eps);
    int slot = is_k ? r.slot[row] : -1;
    T *cache = (T *)r.kv.base + slot / r.kv.block_size * r.kv.block_stride +
               r.layer * r.kv.layer_stride + (head - r.n_heads) * r.kv.head_stride;
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        int at = first + i * 32;
        if (i >= n) {
            break;
        }
        norm8<T>(low[i], norm.weight, norm.weight_offset, scale, at);
        norm8<T>(high[i], norm.weight, norm.weight_offset, scale, at + half);
        if (r.cos_sin) {
            const float *turn = r.cos_sin + r.position[row] * r.cos_sin_stride + at;
            rotate8(low[i], high[i], turn, turn + half);
        }
        uint4 a = pack8<T>(low[i]), b = pack8<T>(high[i]);
        *(uint4 *)(x + at) = a;
        *(uint4 *)(x + at + half) = b;
        if (slot >= 0) {
            *(uint4 *)(cache + kv_offset(r.kv, slot % r.kv.block_size, at)) = a;
            *(uint4 *)(cache + kv_offset(r.kv, slot % r.kv.block_size, at + half)) = b;
        }
    }
}

/* After a tile of q, k and v is stored. */
template <typename T>
__device__ __forceinline__ void finish_head(const fused_args &a, const fused_op &q, int tile,
                                            int lane)
{
    const fused_rope &r = a.rope;
    int tiles = r.kv.head_dim / FUSED_TILE, head = tile / tiles;

    if (head < r.n_heads + r.kv.n_kv_heads &&
        last_to_arrive(a.arrived + q.n / FUSED_TILE + head, tiles, lane)) {
        norm_head<T>(r, (T *)q.out + (int64_t)head * r.kv.head_dim, q.out_stride, a.rows, head);
    }
}

#endif
