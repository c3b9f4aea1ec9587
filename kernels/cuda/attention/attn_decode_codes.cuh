/* The parts of decode attention that differ for a cache of 8 bits: queries as float16,
 * codes on their way to the matrix unit, scales of tokens (attn_decode.cuh). */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ATTN_DECODE_CODES_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_ATTN_DECODE_CODES_CUH

#include "kernels/cuda/attention/attn_common.cuh"

/* Whether each token has a scale: a stage ends with those of its keys and values. */
template <typename C> constexpr bool SCALED = std::is_same<C, int8_t>::value;

enum { NARROW_HEADROOM = 12 }; /* log2 of the greatest weight of a tile, in float16 */

/* The power of two that brings values of at most `most` near 2^14. */
__device__ __forceinline__ float power_below(float most)
{
    uint32_t exponent = __float_as_uint(most) >> 23; /* most is not negative */

    return __uint_as_float(min(268u - exponent, 253u) << 23);
}

/* Turns a row's dims, four in a row of each 16, into float16 that the row's scale makes
 * up for; the four lanes of the row call it together. half: the dims are float16, else
 * bfloat16. */
template <int D>
__device__ __forceinline__ void narrow_query(uint32_t (&qf)[D / 16][4], int h, const __half *q,
                                             bool real, bool half, float &scale)
{
    uint2 raw[D / 16];
    float most = 0.0f;

#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        raw[k] = real ? *(const uint2 *)(q + k * 16) : make_uint2(0, 0);
    }
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        float2 a = unpack2_as(raw[k].x, half), b = unpack2_as(raw[k].y, half);
        most = fmaxf(most, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    float by = power_below(most);
    scale *= __uint_as_float((254u << 23) - __float_as_uint(by)); /* 1 / by */
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        float2 a = unpack2_as(raw[k].x, half), b = unpack2_as(raw[k].y, half);
        qf[k][h] = pack2<__half>(a.x * by, a.y * by);
        qf[k][h + 2] = pack2<__half>(b.x * by, b.y * by);
    }
}

/* Four codes as two pairs of float16. */
template <typename C>
__device__ __forceinline__ void halves_of(uint32_t codes, uint32_t &low, uint32_t &high)
{
    widen_four<__half, C>(codes, low, high);
}

/* Scores of a chunk's 16 keys. */
template <typename C, int D>
__device__ __forceinline__ void narrow_scores(float (&sc)[2][4], const uint32_t (&qf)[D / 16][4],
                                              uint32_t keys, int lane)
{
    int kt = (lane >> 4) * 8 + (lane & 7), kc = (lane >> 3) & 1;

#pragma unroll
    for (int k = 0; k < D / 16; k += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, keys + tile_at<D, ATTN_CHUNK, 1>(kt, k + kc));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t low, high;
            halves_of<C>(b[i], low, high);
            mma16816<__half>(sc[i >> 1], qf[k + (i & 1)], low, high);
        }
    }
}

/* o += weights pf times a chunk's values: o[2i] has the even dims of 16, o[2i + 1] the
 * odd ones. */
template <typename C, int D>
__device__ __forceinline__ void narrow_values(float (&o)[D / 8][4], const uint32_t (&pf)[4],
                                              uint32_t values, int lane)
{
    int vt = ((lane >> 3) & 1) * 8 + (lane & 7), vc = lane >> 4;

#pragma unroll
    for (int i = 0; i < D / 16; i += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, values + tile_at<D, ATTN_CHUNK, 1>(vt, i + vc));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            b[j] = __byte_perm(b[j], 0, 0x3120); /* two tokens' even dims, then their odd ones */
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t even[2], odd[2];
            halves_of<C>(b[2 * j], even[0], odd[0]);
            halves_of<C>(b[2 * j + 1], even[1], odd[1]);
            mma16816<__half>(o[2 * (i + j)], pf, even[0], even[1]);
            mma16816<__half>(o[2 * (i + j) + 1], pf, odd[0], odd[1]);
        }
    }
}

/* A lane's four tokens of a chunk of int8 codes, and what their scales make of weights.
 * o is in units of `unit`, a power of two that the greatest scale so far does not
 * exceed, so that weights times scales stay in float16's range. */
struct token_scales {
    float key[4], value[4];
    float unit;
};

/* Reads the scales of a chunk, of which [lo, hi) count, and brings o to a greater
 * unit if there is one. */
template <int D>
__device__ __forceinline__ void scales_load(token_scales &x, float (&o)[D / 8][4],
                                            const float *scales, int lo, int hi, int t4)
{
    float most = 0.0f;

#pragma unroll
    for (int j = 0; j < 4; j++) {
        int at = (j >> 1) * 8 + t4 * 2 + (j & 1);
        x.key[j] = scales[at];
        x.value[j] = at >= lo && at < hi ? scales[ATTN_CHUNK + at] : 0.0f;
        most = fmaxf(most, x.value[j]);
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    if (most > x.unit) { /* the same in all lanes */
        float next = __uint_as_float((__float_as_uint(most) & 0x7f800000u) + 0x800000u);
        float by = x.unit / next;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            o[i][0] *= by, o[i][1] *= by, o[i][2] *= by, o[i][3] *= by;
        }
        x.unit = next;
    }
    float over = 1.0f / x.unit;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x.value[j] *= over;
    }
}

#endif
