/* The norm of one row by one block, after an optional addition to the row. */
#ifndef QUIRE_KERNELS_CUDA_STEP_NORM_CUH
#define QUIRE_KERNELS_CUDA_STEP_NORM_CUH

#include "kernels/cuda/common.cuh"

/* Column of the q-th vector of this thread. */
template <int V> __device__ __forceinline__ int norm_column(int q)
{
    return (q * blockDim.x + threadIdx.x) * V;
}

/* Whether weights are float32 while the row is not; else they have the row's type. */
template <typename T> __device__ __forceinline__ bool norm_weight_wide(const norm_args &n)
{
    return sizeof(T) < 4 && n.weight_type == T_F32;
}

/* Loads the weights of a thread's first N vectors, which may be done before pdl_wait.
 * Wide ones are read when they are needed. */
template <typename T, int V, int N>
__device__ __forceinline__ void norm_fetch(vec<T, V> (&weight)[N], const norm_args &n, int32_t cols)
{
#pragma unroll
    for (int q = 0; q < N; q++) {
        weight[q] = {};
        if (norm_column<V>(q) < cols && !norm_weight_wide<T>(n)) {
            weight[q] = *(const vec<T, V> *)((const T *)n.weight + norm_column<V>(q));
        }
    }
}

template <typename T, int V>
__device__ __forceinline__ vec<T, V> norm_apply(vec<T, V> a, const vec<T, V> &weight,
                                                const norm_args &n, int i, float mean, float scale)
{
    bool wide = norm_weight_wide<T>(n);

#pragma unroll
    for (int j = 0; j < V; j++) {
        float w = wide ? ((const float *)n.weight)[i + j] : to_float(weight.v[j]);
        float bias = !n.bias ? 0.0f
                     : wide  ? ((const float *)n.bias)[i + j]
                             : to_float(((const T *)n.bias)[i + j]);
        a.v[j] = from_float<T>((to_float(a.v[j]) - mean) * scale * (w + n.weight_offset) + bias);
    }
    return a;
}

/* to = norm(row), by all threads, after change(q, i, a) may have changed the V columns
 * `a` of the row from i on and stored them; q counts the thread's vectors, -1: one past
 * the first N. The first N are kept in registers, all their loads in flight at once;
 * the rest of longer rows is read again. */
template <typename T, int V, int N, typename CHANGE>
__device__ __forceinline__ void norm_changed_row(T *to, T *row, const vec<T, V> (&weight)[N],
                                                 const norm_args &n, int32_t cols, CHANGE change)
{
    __shared__ float shared[33];
    vec<T, V> keep[N];
    float sum = 0.0f, squares = 0.0f;
    auto take = [&](vec<T, V> &a, int q, int i) {
        change(q, i, a);
#pragma unroll
        for (int j = 0; j < V; j++) {
            float f = to_float(a.v[j]);
            sum += f;
            squares += f * f;
        }
    };
    auto each_other = [&](auto what) {
        for (int q = N; norm_column<V>(q) < cols; q++) {
            what(*(const vec<T, V> *)(row + norm_column<V>(q)), norm_column<V>(q));
        }
    };

#pragma unroll
    for (int q = 0; q < N; q++) {
        keep[q] = {};
        if (norm_column<V>(q) < cols) {
            keep[q] = *(const vec<T, V> *)(row + norm_column<V>(q));
        }
    }
#pragma unroll
    for (int q = 0; q < N; q++) {
        if (norm_column<V>(q) < cols) {
            take(keep[q], q, norm_column<V>(q));
        }
    }
    each_other([&](vec<T, V> a, int i) { take(a, -1, i); });
    float mean = 0.0f;
    if (n.layer_norm) {
        mean = block_sum(sum, shared) / cols;
        squares = 0.0f;
        auto spread = [&](const vec<T, V> &a) {
#pragma unroll
            for (int j = 0; j < V; j++)
                squares += (to_float(a.v[j]) - mean) * (to_float(a.v[j]) - mean);
        };
#pragma unroll
        for (int q = 0; q < N; q++) {
            if (norm_column<V>(q) < cols) {
                spread(keep[q]);
            }
        }
        each_other([&](const vec<T, V> &a, int) { spread(a); });
    }
    float scale = rsqrtf(block_sum(squares, shared) / cols + n.eps);
#pragma unroll
    for (int q = 0; q < N; q++) {
        if (norm_column<V>(q) < cols) {
            *(vec<T, V> *)(to + norm_column<V>(q)) =
                norm_apply<T, V>(keep[q], weight[q], n, norm_column<V>(q), mean, scale);
        }
    }
    each_other([&](const vec<T, V> &a, int i) {
        vec<T, V> w =
            norm_weight_wide<T>(n) ? vec<T, V>{} : *(const vec<T, V> *)((const T *)n.weight + i);
        *(vec<T, V> *)(to + i) = norm_apply<T, V>(a, w, n, i, mean, scale);
    });
}

/* row += add if `adds`, then to = norm(row); by all threads. `add(q, i, v)` puts V
 * summands of the columns from i on into v; q as in norm_changed_row. */
template <typename T, int V, int N, typename ADD>
__device__ __forceinline__ void norm_row(T *to, T *row, const vec<T, V> (&weight)[N],
                                         const norm_args &n, int32_t cols, bool adds, ADD add)
{
    norm_changed_row<T, V, N>(to, row, weight, n, cols, [&](int q, int i, vec<T, V> &a) {
        if (adds) {
            float b[V];
            add(q, i, b);
#pragma unroll
            for (int j = 0; j < V; j++)
                a.v[j] = from_float<T>(to_float(a.v[j]) + b[j]);
            *(vec<T, V> *)(row + i) = a;
        }
    });
}

#endif
