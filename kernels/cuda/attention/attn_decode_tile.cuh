/* A work tile of decode attention (attn_decode.cuh).
 *
 * Tokens or dims are the 16 rows of the matrix instruction and queries its 8 columns:
 * scores are K Q^T, outputs V^T P^T. So there are no rows without queries for up to
 * eight of them, and a warp needs half of the instructions and registers that queries
 * as rows would take.
 *
 * Codes of 8 bits become float16 on their way from shared memory to the matrix unit,
 * which is exact. Eight bits in the place of sixteen give each lane four dims in a row
 * of a key, so queries are read in the same order; of values it gets two dims of two
 * tokens, which a byte permutation sorts.
 *
 * The maximum that weights are relative to is only raised when a score exceeds it by
 * far, which one vote tells. Weights are at most 2^WEIGHT_MOST, within float16's range,
 * and when it is raised the greatest one is 2^WEIGHT_ROOM, so that small ones keep
 * their digits.
 */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ATTN_DECODE_TILE_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_ATTN_DECODE_TILE_CUH

#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/attention/split_kv.cuh"

/* Whether each token has a scale: a stage ends with those of its keys and values. */
template <typename C> constexpr bool SCALED = std::is_same<C, int8_t>::value;

enum { WEIGHT_ROOM = 10, WEIGHT_MOST = 14 }; /* log2; see above */

/* The power of two that brings values of at most `most` near 2^14. */
__device__ __forceinline__ float power_below(float most)
{
    uint32_t exponent = __float_as_uint(most) >> 23; /* most is not negative */

    return __uint_as_float(min(268u - exponent, 253u) << 23);
}

/* Turns a query's dims, four in a row of each 16, into float16 that the result makes up
 * for; the four lanes of the query call it together. half: the dims are float16, else
 * bfloat16. */
template <int D>
__device__ __forceinline__ float narrow_query(uint32_t (&ret)[D / 16][2], const __half *q,
                                              bool half)
{
    uint2 raw[D / 16];
    float most = 0.0f;

#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        raw[k] = q ? *(const uint2 *)(q + k * 16) : make_uint2(0, 0);
    }
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        float2 a = unpack2_as(raw[k].x, half), b = unpack2_as(raw[k].y, half);
        most = fmaxf(most, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    float by = power_below(most);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        float2 a = unpack2_as(raw[k].x, half), b = unpack2_as(raw[k].y, half);
        ret[k][0] = pack2<__half>(a.x * by, a.y * by);
        ret[k][1] = pack2<__half>(b.x * by, b.y * by);
    }
    return __uint_as_float((254u << 23) - __float_as_uint(by)); /* 1 / by */
}

/* Transposes an 8 x 8 matrix of 16-bit elements, two of a row in each lane. */
__device__ __forceinline__ uint32_t matrix_transposed(uint32_t x)
{
    uint32_t y;

    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* Over the eight lanes that have the same queries. */
__device__ __forceinline__ float query_max(float x)
{
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    }
    return x;
}
__device__ __forceinline__ float query_sum(float x)
{
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* The queries of a work tile, eight in each of N column tiles, and what a warp has of
 * their outputs. A lane has queries 2 (lane % 4) and the next of a column tile, of
 * scores tokens lane / 4 and 8 more, of outputs two dims of each 16: lane / 4 and 8
 * more, too, but of codes 2 (lane / 4) and the next. T is the matrix unit's type, C the
 * cache's (attn_decode.cuh). */
template <typename T, typename C, int D, bool TALL> struct decode_tile {
    static constexpr bool CODES = sizeof(C) == 1;
    static constexpr int N = TALL ? 2 : 1, B = sizeof(C);
    uint32_t q[N][D / 16][2]; /* of query lane / 4 */
    float scale[N][2];        /* scores to exponents of two, or to what soft_cap takes */
    float o[N][D / 16][4];    /* dim, query: (0, 0), (0, 1), (1, 0), (1, 1) */
    float m[N][2], l[N][2];   /* what weights are relative to; this lane's sum of them */
    /* of int8: o is in units of this power of two, which the greatest scale of a value
     * so far does not exceed, so that weights times scales stay in float16's range */
    float unit;

    /* No chunk yet. */
    __device__ __forceinline__ void clear(void)
    {
        unit = 0x1p-100f;
#pragma unroll
        for (int j = 0; j < N; j++) {
            m[j][0] = m[j][1] = -INFINITY;
            l[j][0] = l[j][1] = 0.0f;
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                o[j][i][0] = o[j][i][1] = o[j][i][2] = o[j][i][3] = 0.0f;
            }
        }
    }

    /* row_at(r): query r's dims. */
    template <typename F>
    __device__ __forceinline__ void take_queries(const attn_args &a, int rows, F row_at, int lane)
    {
        float f = a.softcap > 0.0f ? a.scale : a.scale * LOG2E;

#pragma unroll
        for (int j = 0; j < N; j++) {
            int r = j * 8 + (lane >> 2);
            bool in = r < rows;
            if constexpr (CODES) {
                const __half *from = in ? row_at(r) + (lane & 3) * 4 : nullptr;
                float mine = f * a.k_scale * narrow_query<D>(q[j], from, a.type == T_F16);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    scale[j][e] = __shfl_sync(0xffffffffu, mine, ((lane & 3) * 2 + e) * 4);
                }
            } else {
                const T *from = row_at(in ? r : 0) + (lane & 3) * 2;
#pragma unroll
                for (int k = 0; k < D / 16; k++) {
                    q[j][k][0] = in ? *(const uint32_t *)(from + k * 16) : 0;
                    q[j][k][1] = in ? *(const uint32_t *)(from + k * 16 + 8) : 0;
                }
                scale[j][0] = scale[j][1] = f;
            }
        }
    }

    __device__ __forceinline__ void rescale(int j, const float (&keep)[2])
    {
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            o[j][i][0] *= keep[0], o[j][i][1] *= keep[1];
            o[j][i][2] *= keep[0], o[j][i][3] *= keep[1];
        }
    }

    /* Keys of 32 dims from the k-th 16 on, of chunk 0 or 1 at `at`: tokens as rows. */
    __device__ __forceinline__ void load_keys(uint32_t (&w)[2][4], uint32_t at, int k) const
    {
        if constexpr (CODES) {
            uint32_t b[4];
            ldmatrix_x4(b, tile_behind<D, ATTN_CHUNK, 1>(at, k));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                widen_four<__half, C>(b[i], w[i >> 1][i & 1], w[i >> 1][(i & 1) + 2]);
            }
        } else {
            ldmatrix_x4(w[0], tile_behind<D, ATTN_CHUNK>(at, k * 2));
            if (k + 1 < D / 16) {
                ldmatrix_x4(w[1], tile_behind<D, ATTN_CHUNK>(at, k * 2 + 2));
            }
        }
    }

    /* The same of values: dims as rows. */
    __device__ __forceinline__ void load_values(uint32_t (&w)[2][4], uint32_t at, int i) const
    {
        if constexpr (CODES) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, tile_behind<D, ATTN_CHUNK, 1>(at, i));
#pragma unroll
            for (int k = 0; k < 4; k++) { /* two tokens' even dim, then their odd one */
                widen_four<__half, C>(__byte_perm(b[k], 0, 0x3120), w[k >> 1][(k & 1) * 2],
                                      w[k >> 1][(k & 1) * 2 + 1]);
            }
        } else {
            ldmatrix_x4_trans(w[0], tile_behind<D, ATTN_CHUNK>(at, i * 2));
            if (i + 1 < D / 16) {
                ldmatrix_x4_trans(w[1], tile_behind<D, ATTN_CHUNK>(at, i * 2 + 2));
            }
        }
    }

    /* Scores of a chunk's 16 keys, in two sums each that do not wait for each other. */
    __device__ __forceinline__ void scores(float (&s)[N][4], uint32_t keys, int lane) const
    {
        int t = (lane >> 3 & 1) * 8 + (lane & 7), c = lane >> 4;
        float part[N][4] = {};

        keys += tile_at<D, ATTN_CHUNK, B>(t, c);
#pragma unroll
        for (int k = 0; k < D / 16; k += 2) {
            uint32_t w[2][4];
            load_keys(w, keys, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                mma16816<T>(s[j], w[0], q[j][k][0], q[j][k][1]);
                if (k + 1 < D / 16) {
                    mma16816<T>(part[j], w[1], q[j][k + 1][0], q[j][k + 1][1]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] += part[j][i];
            }
    }

    /* o += a chunk's values times weights p. */
    __device__ __forceinline__ void values(const uint32_t (&p)[N][2], uint32_t from, int lane)
    {
        int low = lane >> 3 & 1, high = lane >> 4;
        int t = (CODES ? low : high) * 8 + (lane & 7), c = CODES ? high : low;

        from += tile_at<D, ATTN_CHUNK, B>(t, c);
#pragma unroll
        for (int i = 0; i < D / 16; i += 2) {
            uint32_t w[2][4];
            load_values(w, from, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                mma16816<T>(o[j][i], w[0], p[j][0], p[j][1]);
                if (i + 1 < D / 16) {
                    mma16816<T>(o[j][i + 1], w[1], p[j][0], p[j][1]);
                }
            }
        }
    }

    /* Brings o to a greater unit if one of the lanes' values has a greater scale. */
    __device__ __forceinline__ void take_unit(const float (&of)[2])
    {
        float most = query_max(fmaxf(of[0], of[1]));

        if (most > unit) { /* the same in all lanes */
            float next = __uint_as_float((__float_as_uint(most) & 0x7f800000u) + 0x800000u);
            const float keep[2] = {unit / next, unit / next};
#pragma unroll
            for (int j = 0; j < N; j++) {
                rescale(j, keep);
            }
            unit = next;
        }
    }

    /* Raises the maxima of queries of which a lane has a score that exceeds them. */
    __device__ __forceinline__ void raise(int j, const float (&v)[4])
    {
        float keep[2];

#pragma unroll
        for (int e = 0; e < 2; e++) {
            float top = query_max(fmaxf(v[e], v[e + 2])), old = m[j][e];
            m[j][e] = top > old + WEIGHT_MOST ? top - WEIGHT_ROOM : old;
            keep[e] = old == m[j][e] ? 1.0f : fast_exp2(old - m[j][e]);
            l[j][e] *= keep[e];
        }
        rescale(j, keep);
    }

    /* Attends to tokens [lo, hi) of a chunk, at least one, whose keys, values and
     * scales are in shared memory. */
    __device__ __forceinline__ void chunk(const attn_args &a, uint32_t keys, uint32_t from,
                                          const float *scales, int lo, int hi, int lane)
    {
        int g = lane >> 2;
        bool edge = lo > 0 || hi < ATTN_CHUNK;
        float s[N][4] = {}, of_key[2] = {1.0f, 1.0f}, of_value[2] = {1.0f, 1.0f};
        uint32_t p[N][2];

        scores(s, keys, lane);
        if constexpr (SCALED<C>) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                bool in = g + h * 8 >= lo && g + h * 8 < hi;
                of_key[h] = scales[g + h * 8];
                of_value[h] = in ? scales[ATTN_CHUNK + g + h * 8] : 0.0f;
            }
            take_unit(of_value);
            float over = 1.0f / unit;
            of_value[0] *= over, of_value[1] *= over;
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            float v[4];
            bool above = false;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = s[j][i] * scale[j][i & 1] * of_key[i >> 1];
                if (a.softcap > 0.0f) {
                    v[i] = soft_cap(v[i], a.softcap) * LOG2E;
                }
                int at = g + (i >> 1) * 8;
                if (edge && (at < lo || at >= hi)) {
                    v[i] = -INFINITY;
                }
                above |= v[i] > m[j][i & 1] + WEIGHT_MOST;
            }
            if (__any_sync(0xffffffffu, above)) {
                raise(j, v);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = fast_exp2(v[i] - m[j][i & 1]);
                l[j][i & 1] += v[i];
                v[i] *= of_value[i >> 1];
            }
            p[j][0] = matrix_transposed(pack2<T>(v[0], v[1]));
            p[j][1] = matrix_transposed(pack2<T>(v[2], v[3]));
        }
        values(p, from, lane);
    }

    /* Ends the work tile: sums over lanes, outputs in units of 1. */
    __device__ __forceinline__ void end(void)
    {
        const float units[2] = {unit, unit};

#pragma unroll
        for (int j = 0; j < N; j++) {
            l[j][0] = query_sum(l[j][0]);
            l[j][1] = query_sum(l[j][1]);
            if (SCALED<C>) {
                rescale(j, units);
            }
        }
    }

    /* Stores rows 4 * quarter .. + 3. */
    __device__ __forceinline__ void store(const combine_shared<D> &x, int quarter, int warp,
                                          int lane) const
    {
        int g = lane >> 2, t4 = lane & 3;

        if (t4 >> 1 != (quarter & 1)) {
            return;
        }
        bool upper = TALL && quarter >> 1;
        constexpr int U = N - 1;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int r = (t4 & 1) * 2 + e;
#pragma unroll
            for (int i = 0; i < D / 16; i++) { /* the swizzle repeats after 32 dims */
                const float first = upper ? o[U][i][e] : o[0][i][e],
                            second = upper ? o[U][i][e + 2] : o[0][i][e + 2];
                float *to = x.at(warp, r, i % 2 * 16 + g * (CODES ? 2 : 1)) + i / 2 * 32;
                if constexpr (CODES) {
                    *(float2 *)to = make_float2(first, second);
                } else {
                    *to = first;
                    *(x.at(warp, r, i % 2 * 16 + g + 8) + i / 2 * 32) = second;
                }
            }
            if (g == 0) {
                *x.scores(warp, r) =
                    upper ? make_float2(m[U][e], l[U][e]) : make_float2(m[0][e], l[0][e]);
            }
        }
    }
};

#endif
