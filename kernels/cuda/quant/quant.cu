/* Codes with scales apart: packing and widening of weights, quantising of activations
 * (quant.h). */
#include <cuda_fp8.h>

#include "kernels/cuda/quant/codes.cuh"
#include "kernels/cuda/quant/groups.h"
#include "kernels/cuda/step/norm.cuh"

namespace
{

/* ---- values ---- */

__device__ __forceinline__ float e4m3_value(uint8_t code)
{
    if ((code & 0x7f) == 0x7f) {
        return __uint_as_float(0x7fc00000u);
    }
    return __uint_as_float((uint32_t)(code & 0x80) << 24 | (uint32_t)(code & 0x7f) << 20) *
           0x1p120f;
}

__device__ __forceinline__ float e2m1_value(int code)
{
    int magnitude = code & 7; /* 0, 0.5, 1, 1.5, 2, 3, 4, 6 */
    float v = magnitude < 2 ? 0.5f * magnitude
                            : (1.0f + 0.5f * (magnitude & 1)) * (float)(1 << (magnitude / 2 - 1));

    return code & 8 ? -v : v;
}

template <int FORMAT> __device__ __forceinline__ float code_value(const uint8_t *row, int column)
{
    if (FORMAT == FORMAT_FP8) {
        return e4m3_value(row[column]);
    }
    if (FORMAT == FORMAT_INT8) {
        return (float)(int8_t)row[column];
    }
    int nibble = row[column / 2] >> (column % 2 * 4) & 15;
    return FORMAT == FORMAT_FP4 ? e2m1_value(nibble) : (float)nibble;
}

template <int FORMAT>
__device__ __forceinline__ float zero_value(const struct quant_weight &w, int64_t group)
{
    if (!w.zero) {
        return FORMAT == FORMAT_INT4 ? 8.0f : 0.0f;
    }
    return FORMAT == FORMAT_INT8 ? (float)(int8_t)w.zero[group] : (float)w.zero[group];
}

/* ---- widening ---- */

/* V neighbours of a row a thread, of one group and one row. */
template <typename T, int FORMAT, int V>
__global__ void widen_kernel(T *out, int64_t out_stride, const struct quant_weight w)
{
    pdl_release();
    pdl_wait();
    int column = (blockIdx.y * blockDim.x + threadIdx.x) * V;
    int64_t row = blockIdx.x;

    if (column >= w.cols) {
        return;
    }
    int64_t group = row * w.n_groups + column / w.group_cols;
    float scale = w.scale[group], zero = zero_value<FORMAT>(w, group);
    const uint8_t *codes = (const uint8_t *)w.codes + row * w.row_bytes;
    vec<T, V> v;
#pragma unroll
    for (int i = 0; i < V; i++) {
        v.v[i] = from_float<T>(scale * (code_value<FORMAT>(codes, column + i) - zero));
    }
    *(vec<T, V> *)(out + row * out_stride + column) = v;
}

/* Eight neighbours of a row a thread, from the four words that have 32. */
template <typename T>
__global__ void widen_segments_kernel(T *out, int64_t out_stride, const struct quant_weight w)
{
    pdl_release();
    pdl_wait();
    int eight = blockIdx.y * blockDim.x + threadIdx.x;
    int64_t row = blockIdx.x;

    if (eight >= w.cols / 8) {
        return;
    }
    const uint32_t *segment =
        (const uint32_t *)((const char *)w.codes + quant_segment_at(row, eight / 64,
                                                                    w.cols / QUANT_SEGMENT,
                                                                    QUANT_SEGMENT_BYTES));
    int4_group g(segment[64 + eight % 64 / 16], w.f16_scales);
    uint4 words = *(const uint4 *)(segment + eight % 64 / 4 * 4);
    const uint32_t pairs[4] = {g.pair(words.x, eight % 4), g.pair(words.y, eight % 4),
                               g.pair(words.z, eight % 4), g.pair(words.w, eight % 4)};
    vec<T, 8> v;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        store_pair(v.v + 2 * i, g.scale, pairs[i]);
    }
    *(vec<T, 8> *)(out + row * out_stride + eight * 8) = v;
}

template <typename T, int FORMAT>
void widen_rows(T *out, int64_t out_stride, const struct quant_weight &w, cudaStream_t stream)
{
    bool wide = w.cols % 8 == 0 && w.group_cols % 8 == 0 && out_stride % 8 == 0;

    if (wide) {
        launch(widen_kernel<T, FORMAT, 8>, dim3(w.rows, (w.cols / 8 + 255) / 256), dim3(256), 0,
               stream, out, out_stride, w);
    } else {
        launch(widen_kernel<T, FORMAT, 1>, dim3(w.rows, (w.cols + 255) / 256), dim3(256), 0, stream,
               out, out_stride, w);
    }
}

template <typename T>
void widen_to(T *out, int64_t out_stride, const struct quant_weight &w, cudaStream_t stream)
{
    if (w.layout == QUANT_SEGMENTS) {
        launch(widen_segments_kernel<T>, dim3(w.rows, (w.cols / 8 + 255) / 256), dim3(256), 0,
               stream, out, out_stride, w);
    } else if (w.format == FORMAT_FP8) {
        widen_rows<T, FORMAT_FP8>(out, out_stride, w, stream);
    } else if (w.format == FORMAT_INT8) {
        widen_rows<T, FORMAT_INT8>(out, out_stride, w, stream);
    } else if (w.format == FORMAT_INT4) {
        widen_rows<T, FORMAT_INT4>(out, out_stride, w, stream);
    } else {
        widen_rows<T, FORMAT_FP4>(out, out_stride, w, stream);
    }
}

/* ---- packing ---- */

/* A word of eight codes a thread; the first four of a segment also write its groups. */
__global__ void pack_kernel(char *out, const uint8_t *codes, int64_t pitch, const uint16_t *scale,
                            const uint8_t *zero, int32_t cols)
{
    int word = blockIdx.y * blockDim.x + threadIdx.x, in_segment = word % 64;
    int64_t row = blockIdx.x;

    if (word >= cols / 8) {
        return;
    }
    const uint8_t *from = codes + row * pitch + word / 4 * 16 + word % 4;
    uint32_t v = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t two = from[4 * i];
        v |= (two & 15) << (4 * i) | two >> 4 << (4 * i + 16);
    }
    uint32_t *segment = (uint32_t *)(out + quant_segment_at(row, word / 64, cols / QUANT_SEGMENT,
                                                            QUANT_SEGMENT_BYTES));
    segment[in_segment] = v;
    if (in_segment < 4) {
        int64_t group = row * (cols / QUANT_GROUP) + word / 64 * 4 + in_segment;
        uint32_t z = zero ? zero[group] & 15 : 8;
        segment[64 + in_segment] = (uint32_t)scale[group] << 16 | 0x4300u | z;
    }
}

/* ---- dummies ---- */

__device__ __forceinline__ uint64_t mixed(uint64_t x)
{
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* Four bytes of a row a thread. */
__global__ void dummy_kernel(char *out, int64_t row_bytes, int format, int segment, uint16_t scale,
                             uint64_t seed)
{
    int64_t at = (int64_t)blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;

    if (at * 4 >= row_bytes) {
        return;
    }
    uint32_t v = (uint32_t)mixed(seed + (uint64_t)(row * row_bytes + at));
    if (format == FORMAT_FP8) { /* uniform over +-448 */
        uint32_t codes = 0;
        for (int i = 0; i < 4; i++) {
            float f = ((float)(v >> (8 * i) & 255) - 127.5f) * (448.0f / 127.5f);
            codes |= (uint32_t)__nv_cvt_float_to_fp8(f, __NV_SATFINITE, __NV_E4M3) << (8 * i);
        }
        v = codes;
    } else if (segment > 0 && at % (segment / 4) >= QUANT_SEGMENT / 8) {
        v = format == FORMAT_INT4          ? (uint32_t)scale << 16 | 0x4308u
            : segment == QUANT_MXFP4_BYTES ? 0xfdfdfdfdu
                                           : 0xf8f8f8f8u;
    }
    *(uint32_t *)(out + row * row_bytes + at * 4) = v;
}

__global__ void fill_kernel(float *out, int64_t n, float value)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    if (i < n) {
        out[i] = value;
    }
}

/* ---- activations ---- */

enum { ROW_THREADS = 512 };

__device__ __forceinline__ float block_max(float x)
{
    __shared__ float shared[ROW_THREADS / 32];

    x = warp_max(x);
    if ((threadIdx.x & 31) == 0) {
        shared[threadIdx.x >> 5] = x;
    }
    __syncthreads();
    x = shared[threadIdx.x & (ROW_THREADS / 32 - 1)];
    return warp_max(x);
}

template <typename T> __device__ __forceinline__ float greatest(const vec<T, 8> &v)
{
    float most = 0.0f;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        most = fmaxf(most, fabsf(to_float(v.v[i])));
    }
    return most;
}

template <typename T> __device__ __forceinline__ uint2 quantised(const vec<T, 8> &v, float factor)
{
    uint32_t out[2] = {};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 f = make_float2(to_float(v.v[2 * i]) * factor, to_float(v.v[2 * i + 1]) * factor);
        out[i / 2] |= (uint32_t)__nv_cvt_float2_to_fp8x2(f, __NV_SATFINITE, __NV_E4M3)
                      << (i % 2 * 16);
    }
    return make_uint2(out[0], out[1]);
}

/* The factor that makes codes of a row whose greatest magnitude is `most` (block_max of
 * each thread's), or by the fixed scale; the first thread stores the row's scale. */
__device__ __forceinline__ float code_factor(float most, float fixed, float *scale)
{
    if (fixed == 0.0f) {
        most = block_max(most);
    }
    if (threadIdx.x == 0) {
        *scale = fixed > 0.0f ? fixed : most / 448.0f;
    }
    return fixed > 0.0f ? 1.0f / fixed : most > 0.0f ? 448.0f / most : 0.0f;
}

/* Stores a row that the block's threads hold, vector q of a thread at
 * norm_column(q), as codes and scale; also as it is, unless `h` is NULL. */
template <typename T, int N>
__device__ __forceinline__ void store_codes(const vec<T, 8> (&kept)[N], uint8_t *codes,
                                            float *scale, float fixed, T *h, int32_t cols)
{
    float most = 0.0f;

#pragma unroll
    for (int q = 0; q < N; q++) {
        most = fmaxf(most, greatest(kept[q]));
    }
    float factor = code_factor(most, fixed, scale);
#pragma unroll
    for (int q = 0; q < N; q++) {
        int i = norm_column<8>(q);
        if (i < cols) {
            *(uint2 *)(codes + i) = quantised(kept[q], factor);
            if (h) {
                *(vec<T, 8> *)(h + i) = kept[q];
            }
        }
    }
}

/* A block a row; N 0: of any length, read twice. */
template <typename T, int N>
__global__ void __launch_bounds__(ROW_THREADS)
    quantise_kernel(uint8_t *codes, float *scale, float fixed, const T *x, int64_t x_stride,
                    int32_t cols)
{
    pdl_release();
    pdl_wait();
    const T *from = x + blockIdx.x * x_stride;
    uint8_t *to = codes + (int64_t)blockIdx.x * cols;

    if constexpr (N > 0) {
        vec<T, 8> kept[N];
#pragma unroll
        for (int q = 0; q < N; q++) {
            kept[q] = {};
            if (norm_column<8>(q) < cols) {
                kept[q] = *(const vec<T, 8> *)(from + norm_column<8>(q));
            }
        }
        store_codes<T, N>(kept, to, scale + blockIdx.x, fixed, nullptr, cols);
    } else {
        float most = 0.0f;
        for (int q = 0; norm_column<8>(q) < cols && fixed == 0.0f; q++) {
            most = fmaxf(most, greatest(*(const vec<T, 8> *)(from + norm_column<8>(q))));
        }
        float factor = code_factor(most, fixed, scale + blockIdx.x);
        for (int q = 0; norm_column<8>(q) < cols; q++) {
            int i = norm_column<8>(q);
            *(uint2 *)(to + i) = quantised(*(const vec<T, 8> *)(from + i), factor);
        }
    }
}

template <typename T>
void quantise_rows(uint8_t *codes, float *scale, float fixed, const T *x, int64_t x_stride,
                   int32_t rows, int32_t cols, cudaStream_t stream)
{
    auto kernel = cols <= 8 * ROW_THREADS    ? quantise_kernel<T, 1>
                  : cols <= 16 * ROW_THREADS ? quantise_kernel<T, 2>
                  : cols <= QUANT_ROW_COLS   ? quantise_kernel<T, 4>
                                             : quantise_kernel<T, 0>;

    launch(kernel, dim3(rows), dim3(ROW_THREADS), 0, stream, codes, scale, fixed, x, x_stride,
           cols);
}

/* A block a row. */
template <typename T, int N>
__global__ void __launch_bounds__(ROW_THREADS)
    norm_quantise_kernel(uint8_t *codes, float *scale, float fixed, T *h, int64_t h_stride, T *x,
                         int64_t x_stride, const T *y, int64_t y_stride, norm_args n, int32_t cols)
{
    __shared__ float shared[33];
    vec<T, 8> weight[N], kept[N];
    float sum = 0.0f, squares = 0.0f, mean = 0.0f;

    pdl_release();
    norm_fetch<T, 8, N>(weight, n, cols);
    pdl_wait();
    T *row = x + blockIdx.x * x_stride;
#pragma unroll
    for (int q = 0; q < N; q++) {
        int i = norm_column<8>(q);
        kept[q] = {};
        if (i < cols) {
            kept[q] = *(const vec<T, 8> *)(row + i);
        }
        if (y && i < cols) {
            vec<T, 8> add = *(const vec<T, 8> *)(y + blockIdx.x * y_stride + i);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                kept[q].v[j] = from_float<T>(to_float(kept[q].v[j]) + to_float(add.v[j]));
            }
            *(vec<T, 8> *)(row + i) = kept[q];
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum += to_float(kept[q].v[j]);
        }
    }
    if (n.layer_norm) {
        mean = block_sum(sum, shared) / cols;
    }
#pragma unroll
    for (int q = 0; q < N; q++) {
#pragma unroll
        for (int j = 0; j < 8 && norm_column<8>(q) < cols; j++) {
            float f = to_float(kept[q].v[j]) - mean;
            squares += f * f;
        }
    }
    float factor = rsqrtf(block_sum(squares, shared) / cols + n.eps);
#pragma unroll
    for (int q = 0; q < N; q++) {
        int i = norm_column<8>(q);
        if (i < cols) {
            kept[q] = norm_apply<T, 8>(kept[q], weight[q], n, i, mean, factor);
        }
    }
    store_codes(kept, codes + (int64_t)blockIdx.x * cols, scale + blockIdx.x, fixed,
                h ? h + blockIdx.x * h_stride : nullptr, cols);
}

/* A block a row of act(gate) * up, the two halves of a row of `in`. */
template <typename T, int N>
__global__ void __launch_bounds__(ROW_THREADS)
    gate_quantise_kernel(uint8_t *codes, float *scale, float fixed, const T *in, int64_t in_stride,
                         int32_t cols, int act)
{
    vec<T, 8> kept[N];

    pdl_release();
    pdl_wait();
    const T *gate = in + blockIdx.x * in_stride, *up = gate + cols;
#pragma unroll
    for (int q = 0; q < N; q++) {
        int i = norm_column<8>(q);
        kept[q] = {};
        if (i < cols) {
            vec<T, 8> g = *(const vec<T, 8> *)(gate + i), u = *(const vec<T, 8> *)(up + i);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                kept[q].v[j] = from_float<T>(activate(to_float(g.v[j]), act) * to_float(u.v[j]));
            }
        }
    }
    store_codes<T, N>(kept, codes + (int64_t)blockIdx.x * cols, scale + blockIdx.x, fixed, nullptr,
                      cols);
}

template <typename T>
void norm_quantise(const struct norm_quantise_args &a, int32_t rows, int32_t cols,
                   cudaStream_t stream)
{
    auto kernel = cols <= 8 * ROW_THREADS    ? norm_quantise_kernel<T, 1>
                  : cols <= 16 * ROW_THREADS ? norm_quantise_kernel<T, 2>
                                             : norm_quantise_kernel<T, 4>;

    launch(kernel, dim3(rows), dim3(ROW_THREADS), 0, stream, a.codes, a.scale, a.fixed, (T *)a.h,
           a.h_stride, (T *)a.x, a.x_stride, (const T *)a.y, a.y_stride, a.norm, cols);
}

template <typename T>
void gate_quantise(uint8_t *codes, float *scale, float fixed, const T *in, int64_t in_stride,
                   int32_t rows, int32_t cols, int act, cudaStream_t stream)
{
    auto kernel = cols <= 8 * ROW_THREADS    ? gate_quantise_kernel<T, 1>
                  : cols <= 16 * ROW_THREADS ? gate_quantise_kernel<T, 2>
                                             : gate_quantise_kernel<T, 4>;

    launch(kernel, dim3(rows), dim3(ROW_THREADS), 0, stream, codes, scale, fixed, in, in_stride,
           cols, act);
}

} /* namespace */

extern "C" void launch_widen(void *out, int64_t out_stride, const struct quant_weight *w, int type,
                             cudaStream_t stream)
{
    if (w->layout == QUANT_GROUPS) {
        launch_widen_groups(out, out_stride, w, type, stream);
    } else if (w->layout == QUANT_SEGMENTS && w->format == FORMAT_FP4) {
        launch_widen_fp4(out, out_stride, w, type, stream);
    } else if (type == T_F16) {
        widen_to((__half *)out, out_stride, *w, stream);
    } else if (type == T_F32) {
        widen_to((float *)out, out_stride, *w, stream);
    } else {
        widen_to((__nv_bfloat16 *)out, out_stride, *w, stream);
    }
}

extern "C" void launch_pack_segments(void *out, const uint8_t *codes, int64_t pitch,
                                     const uint16_t *scale, const uint8_t *zero, int32_t rows,
                                     int32_t cols, cudaStream_t stream)
{
    pack_kernel<<<dim3(rows, (cols / 8 + 255) / 256), 256, 0, stream>>>((char *)out, codes, pitch,
                                                                        scale, zero, cols);
}

extern "C" void launch_dummy_codes(void *out, int64_t row_bytes, int32_t rows, int format,
                                   int32_t segment, uint16_t scale, uint64_t seed,
                                   cudaStream_t stream)
{
    int64_t words = (row_bytes + 3) / 4;

    dummy_kernel<<<dim3(rows, (uint32_t)((words + 255) / 256)), 256, 0, stream>>>(
        (char *)out, row_bytes, format, segment, scale, seed);
}

extern "C" void launch_fill(float *out, int64_t n, float value, cudaStream_t stream)
{
    fill_kernel<<<(uint32_t)((n + 255) / 256), 256, 0, stream>>>(out, n, value);
}

extern "C" void launch_quantise_rows(uint8_t *codes, float *scale, float fixed, const void *x,
                                     int64_t x_stride, int type, int32_t rows, int32_t cols,
                                     cudaStream_t stream)
{
    if (type == T_F16) {
        quantise_rows(codes, scale, fixed, (const __half *)x, x_stride, rows, cols, stream);
    } else {
        quantise_rows(codes, scale, fixed, (const __nv_bfloat16 *)x, x_stride, rows, cols, stream);
    }
}

extern "C" void launch_norm_quantise(const struct norm_quantise_args *a, int type, int32_t rows,
                                     int32_t cols, cudaStream_t stream)
{
    if (type == T_F16) {
        norm_quantise<__half>(*a, rows, cols, stream);
    } else {
        norm_quantise<__nv_bfloat16>(*a, rows, cols, stream);
    }
}

extern "C" void launch_gate_quantise(uint8_t *codes, float *scale, float fixed, const void *gate_up,
                                     int64_t in_stride, int type, int32_t rows, int32_t cols,
                                     int act, cudaStream_t stream)
{
    if (type == T_F16) {
        gate_quantise(codes, scale, fixed, (const __half *)gate_up, in_stride, rows, cols, act,
                      stream);
    } else {
        gate_quantise(codes, scale, fixed, (const __nv_bfloat16 *)gate_up, in_stride, rows, cols,
                      act, stream);
    }
}
