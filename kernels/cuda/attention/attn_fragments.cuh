/* What a consumer warpgroup of prefill attention on Hopper does with its 64 query rows:
 * scores, softmax, weighted values (attn_prefill_sm90.cu, latent_expanded.cu). Keys
 * have D dims, values V; a tile of either has KEYS tokens, in swizzled panels. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ATTN_FRAGMENTS_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_ATTN_FRAGMENTS_CUH

#include "kernels/cuda/attention/attn_hopper.cuh"
#include "kernels/cuda/gemm/wgmma.cuh"

/* Syncs the threads of one consumer warpgroup. */
__device__ __forceinline__ void group_sync(int group)
{
    random_delay();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

/* Loads a consumer warpgroup's queries, of heads of D dims in rows at `queries`, into
 * swizzled panels; rows past the tile are zeros. They are there once the thread has
 * waited for its copies, and visible to wgmma behind proxy_fence and group_sync. */
template <typename T, int D>
__device__ __forceinline__ void queries_fetch(const void *queries, int64_t stride,
                                              const work_tile &w, uint32_t q_tile, int group,
                                              int thread)
{
#if BULK_COPY
#pragma unroll
    for (int i = 0; i < GROUP_ROWS * D / 8 / 128; i++) {
        int n = i * 128 + thread, r = group * GROUP_ROWS + n / (D / 8), chunk = n % (D / 8);
        int row = w.rows.first + r;
        bool in = row < w.rows.end;
        const T *from = (const T *)queries + (in ? row : w.rows.first) * stride +
                        (int64_t)w.head * D + chunk * 8;
        uint32_t to = q_tile + tile_at<D, ROWS>(r, chunk);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(in ? 16 : 0)
                     : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* A thread's share of its warpgroup's 64 rows: in rows g and g + 8 of its warp's 16,
 * every fourth pair of columns. o: output, s: scores, p: weights packed as the A
 * operand. */
template <int V, int KEYS> struct fragments {
    float o[V / 2], s[KEYS / 2];
    /* maximum score times log2 e; sum of weights; factor for what was summed before */
    float m[2], l[2], keep[2];
    float unit; /* with scales: of o, a power of two that no scale of a value exceeds */
    uint32_t p[KEYS / 16][4];
};

/* Before the first tile. */
template <int V, int KEYS> __device__ __forceinline__ void clear_sums(fragments<V, KEYS> &x)
{
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        x.o[i] = 0.0f;
    }
    x.m[0] = x.m[1] = -INFINITY;
    x.l[0] = x.l[1] = 0.0f;
    x.unit = 0x1p-100f;
}

template <typename T, int D, int V, int KEYS>
__device__ __forceinline__ void issue_scores(fragments<V, KEYS> &x, uint32_t q, uint32_t k)
{
    using P = panels<D>;
    constexpr int STEPS = P::WIDTH / 16; /* of a panel */
    uint64_t dq = wgmma_descriptor(q, P::ROW), dk = wgmma_descriptor(k, P::ROW);

    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        wgmma_ss<T, KEYS>::run(x.s, dq + i / STEPS * (ROWS * P::ROW / 16) + i % STEPS * 2,
                               dk + i / STEPS * (KEYS * P::ROW / 16) + i % STEPS * 2, i > 0);
    }
    wgmma_commit();
}

template <typename T, int V, int KEYS>
__device__ __forceinline__ void issue_values(fragments<V, KEYS> &x, uint32_t v)
{
    using P = panels<V>;

    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        wgmma_rs<T, V>::run(x.o, x.p[i],
                            wgmma_descriptor_n(v + i * 16 * P::ROW, KEYS * P::ROW, P::ROW));
    }
    wgmma_commit();
}

/* Sets to -inf the scores of tokens from `token` on that rows from `position` (the
 * warp's first) on do not see. */
template <int V, int KEYS>
__device__ __forceinline__ void mask(fragments<V, KEYS> &x, int token, int position, int window,
                                     int lane)
{
    if (token + KEYS - 1 <= position && (window == 0 || token > position + 15 - window)) {
        return;
    }
    token += (lane & 3) * 2;
    position += lane >> 2;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        int at = token + i / 4 * 8 + (i & 1), mine = position + (i >> 1 & 1) * 8;
        if (at > mine || (window > 0 && at <= mine - window)) {
            x.s[i] = -INFINITY;
        }
    }
}

/* Turns scores into weights. factor: converts scores to exponents of two. */
template <int HEADROOM, int V, int KEYS>
__device__ __forceinline__ void softmax(fragments<V, KEYS> &x, float factor)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            top = fmaxf(top, fmaxf(x.s[i * 4 + h * 2], x.s[i * 4 + h * 2 + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        float next = fmaxf(x.m[h], top * factor - HEADROOM), from = next == -INFINITY ? 0.0f : next;
        x.keep[h] = fast_exp2(x.m[h] - from);
        x.m[h] = next;
        float add[2] = {};
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            float e = fast_exp2(x.s[i / 2 * 4 + h * 2 + (i & 1)] * factor - from);
            x.s[i / 2 * 4 + h * 2 + (i & 1)] = e;
            add[i & 1] += e;
        }
        x.l[h] = x.l[h] * x.keep[h] + (add[0] + add[1]);
    }
}

template <typename T, int V, int KEYS>
__device__ __forceinline__ void pack_weights(fragments<V, KEYS> &x)
{
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x.p[k][i] = pack2<T>(x.s[k * 8 + i * 2], x.s[k * 8 + i * 2 + 1]);
        }
}

/* Rescales the output after the maximum has grown; most tiles skip this. */
template <int V, int KEYS> __device__ __forceinline__ void rescale(fragments<V, KEYS> &x)
{
    if (__all_sync(0xffffffffu, x.keep[0] == 1.0f && x.keep[1] == 1.0f)) {
        return;
    }
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        x.o[i] *= x.keep[i >> 1 & 1];
    }
}

/* 4 x 4 transpose over four lanes: lane t holds element t of each vector, and gets
 * vector t. */
__device__ __forceinline__ void transpose(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, int t)
{
    auto swap = [](uint32_t &low, uint32_t &high, int t, int bit) {
        uint32_t got = __shfl_xor_sync(0xffffffffu, t & bit ? low : high, bit);
        (t & bit ? low : high) = got;
    };

    swap(a, b, t, 1);
    swap(c, d, t, 1);
    swap(a, c, t, 2);
    swap(b, d, t, 2);
}

/* A row's sum of weights, over its four lanes. */
template <int V, int KEYS>
__device__ __forceinline__ float sum_of_weights(const fragments<V, KEYS> &x, int h)
{
    float sum = x.l[h];

    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

/* Writes a lane's row h (0: g, 1: g + 8) times `over` to `out`, 16 bytes per lane,
 * unless it is not real. */
template <int V, int KEYS>
__device__ __forceinline__ void write_row(const fragments<V, KEYS> &x, int h, float over, void *out,
                                          bool real, bool half, int lane)
{
    uint16_t *to = (uint16_t *)out + (lane & 3) * 8;

#pragma unroll
    for (int i = 0; i < V / 8; i += 4) {
        uint32_t v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[k] = i + k < V / 8 ? pack2_as(x.o[(i + k) * 4 + h * 2] * over,
                                            x.o[(i + k) * 4 + h * 2 + 1] * over, half)
                                 : 0;
        }
        transpose(v[0], v[1], v[2], v[3], lane & 3);
        if (real && i + (lane & 3) < V / 8) {
            *(uint4 *)(to + i * 8) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

#endif
