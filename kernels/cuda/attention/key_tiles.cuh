/* Tiles of 64 keys and values for attention with mma.sync: a ring of them in shared
 * memory, which one warp fills straight from the cache's blocks, and the two products
 * of a warp's 16 query rows with a tile.
 *
 * Fragments are those of mma16816, lane by lane: q [D / 16][4] and weights as its A
 * operand, scores [KEY_TILE / 8][4] and outputs [D / 8][4] as its C operand.
 */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_KEY_TILES_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_KEY_TILES_CUH

#include "kernels/cuda/attention/attn_common.cuh"

enum { KEY_TILE = 64 };

/* Dynamic shared memory: N stages, each keys, values and their scales, then a stage's
 * mbarrier each. */
template <typename T, int D, int N> struct key_ring {
    static constexpr int STAGES = N;
    static constexpr int KV = KEY_TILE * D * (int)sizeof(T);
    static constexpr int STAGE = 2 * KV + 2 * KEY_TILE * 4;
    static constexpr int BYTES = STAGES * STAGE + STAGES * 8;
};

/* Loads tokens [token, token + 64), as far as they lie before `end`. Called by one
 * warp. */
template <typename T, int D>
__device__ __forceinline__ void load_tile(const attn_args &a, int kv_head, const int32_t *table,
                                          int token, int end, uint32_t to, uint32_t bar, int lane)
{
    int bs = a.kv.block_size, chunks = min(KEY_TILE / 16, (end - token + 15) / 16);
    int64_t head = a.layer * a.kv.layer_stride + kv_head * a.kv.head_stride;
    const T *head_base = (const T *)a.kv.base + head;
    bool narrow = kv_narrow(a.kv);

    if (BULK_COPY && lane == 0 && !narrow) {
        barrier_expect(bar, chunks * 2 * 16 * D * sizeof(T));
    }
    __syncwarp();
    char *tile = (char *)__cvta_shared_to_generic(to);
    for (int c = 0; c < chunks; c++) {
        int t = token + c * 16, block0 = table[t / bs];
        int block1 = bs % 16 && t + 8 < end ? table[(t + 8) / bs] : block0;
        if (narrow) {
            widen_tokens<T, D, KEY_TILE>(a.kv, (const uint8_t *)a.kv.base + head, block0, block1, t,
                                         tile, (float *)(tile + 2 * KEY_TILE * D * sizeof(T)),
                                         c * 16, lane);
            continue;
        }
        load_chunk<T, D, KEY_TILE>(a.kv, head_base, block0, block1, t, to + c * 16 * panels<D>::ROW,
                                   bar, lane);
    }
    __syncwarp();
    if (BULK_COPY && lane == 0 && narrow) {
        barrier_arrive(bar);
    }
}

/* sc [16, KEY_TILE] = q [16, D] times the tile's keys. */
template <typename T, int D>
__device__ __forceinline__ void scores_of(float (&sc)[KEY_TILE / 8][4],
                                          const uint32_t (&q)[D / 16][4], uint32_t keys, int lane)
{
    constexpr int ST = KEY_TILE / 8;

#pragma unroll
    for (int i = 0; i < ST; i++) {
        sc[i][0] = sc[i][1] = sc[i][2] = sc[i][3] = 0.0f;
    }
    int kt = (lane >> 4) * 8 + (lane & 7), kc = (lane >> 3) & 1;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t at = keys + tile_at<D, KEY_TILE>(kt, k * 2 + kc);
#pragma unroll
        for (int i = 0; i < ST / 2; i++) {
            uint32_t b[4];
            ldmatrix_x4(b, at + i * 16 * panels<D>::ROW);
            mma16816<T>(sc[2 * i], q[k], b[0], b[1]);
            mma16816<T>(sc[2 * i + 1], q[k], b[2], b[3]);
        }
    }
}

/* o [16, D] += weights [16, 16], the k-th of the tile, times the values. */
template <typename T, int D>
__device__ __forceinline__ void add_sixteen(float (&o)[D / 8][4], const uint32_t (&w)[4],
                                            uint32_t values, int k, int lane)
{
    int vt = ((lane >> 3) & 1) * 8 + (lane & 7), vc = lane >> 4;

#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, values + tile_at<D, KEY_TILE>(k * 16 + vt, i * 2 + vc));
        mma16816<T>(o[2 * i], w, b[0], b[1]);
        mma16816<T>(o[2 * i + 1], w, b[2], b[3]);
    }
}

/* What rounding to T leaves of x. */
template <typename T> __device__ __forceinline__ float rest_of(float x)
{
    return x - to_float(from_float<T>(x));
}

/* o [16, D] += weights [16, KEY_TILE], rounded to T, times the tile's values. `fine`:
 * as sums of two values of T, for weights that have a value's scale in them: where one
 * key takes all, such a weight is not 1, and its rounding would be the result's. */
template <typename T, int D>
__device__ __forceinline__ void add_values(float (&o)[D / 8][4],
                                           const float (&weights)[KEY_TILE / 8][4], uint32_t values,
                                           bool fine, int lane)
{
#pragma unroll
    for (int k = 0; k < KEY_TILE / 16; k++) {
        const float(&low)[4] = weights[2 * k], (&high)[4] = weights[2 * k + 1];
        uint32_t w[4] = {pack2<T>(low[0], low[1]), pack2<T>(low[2], low[3]),
                         pack2<T>(high[0], high[1]), pack2<T>(high[2], high[3])};
        add_sixteen<T, D>(o, w, values, k, lane);
        if (fine) {
            uint32_t rest[4] = {pack2<T>(rest_of<T>(low[0]), rest_of<T>(low[1])),
                                pack2<T>(rest_of<T>(low[2]), rest_of<T>(low[3])),
                                pack2<T>(rest_of<T>(high[0]), rest_of<T>(high[1])),
                                pack2<T>(rest_of<T>(high[2]), rest_of<T>(high[3]))};
            add_sixteen<T, D>(o, rest, values, k, lane);
        }
    }
}

#endif
