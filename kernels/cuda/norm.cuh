/* The norm of one row by one block, with what is added to the row before it. */
#ifndef QUIRE_CUDA_NORM_CUH
#define QUIRE_CUDA_NORM_CUH

#include "kernels/cuda/common.cuh"

/* A thread keeps its first NORM_KEEP vectors in registers; longer rows are read again. */
enum { NORM_KEEP = 4 };

/* row += add (where `adds`), to = norm(row). `add(i, v)` puts V summands of the columns from i into v. All threads. */
template <typename T, int V, typename ADD>
__device__ __forceinline__ void norm_row(T *to, T *row, const norm_args &n, int32_t cols, bool adds, ADD add)
{
    __shared__ float shared[33];
    float keep[NORM_KEEP][V];
    float sum = 0.0f, squares = 0.0f;
    int k = 0;
    for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V, k++) {
        vec<T, V> a = *(const vec<T, V> *)(row + i);
        if (adds) {
            float b[V];
            add(i, b);
#pragma unroll
            for (int j = 0; j < V; j++)
                a.v[j] = from_float<T>(to_float(a.v[j]) + b[j]);
            *(vec<T, V> *)(row + i) = a;
        }
#pragma unroll
        for (int j = 0; j < V; j++) {
            float f = to_float(a.v[j]);
            sum += f;
            squares += f * f;
        }
#pragma unroll
        for (int q = 0; q < NORM_KEEP; q++)
            if (q == k)
#pragma unroll
                for (int j = 0; j < V; j++)
                    keep[q][j] = to_float(a.v[j]);
    }
    float mean = 0.0f, scale;
    if (n.layer_norm) {
        mean = block_sum(sum, shared) / cols;
        float var = 0.0f;
        k = 0;
        for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V, k++) {
            vec<T, V> a = *(const vec<T, V> *)(row + i);
            for (int j = 0; j < V; j++) {
                float f = to_float(a.v[j]) - mean;
                var += f * f;
            }
        }
        scale = rsqrtf(block_sum(var, shared) / cols + n.eps);
    } else {
        scale = rsqrtf(block_sum(squares, shared) / cols + n.eps);
    }
    k = 0;
    for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V, k++) {
        vec<T, V> a;
        float f[V];
        if (k >= NORM_KEEP) {
            a = *(const vec<T, V> *)(row + i);
#pragma unroll
            for (int j = 0; j < V; j++)
                f[j] = to_float(a.v[j]);
        }
#pragma unroll
        for (int q = 0; q < NORM_KEEP; q++)
            if (q == k)
#pragma unroll
                for (int j = 0; j < V; j++)
                    f[j] = keep[q][j];
        if (n.weight_type == T_F32) {
#pragma unroll
            for (int j = 0; j < V; j++)
                a.v[j] = from_float<T>((f[j] - mean) * scale * (((const float *)n.weight)[i + j] + n.weight_offset) +
                                       (n.bias ? ((const float *)n.bias)[i + j] : 0.0f));
        } else {
            vec<T, V> w = *(const vec<T, V> *)((const T *)n.weight + i);
#pragma unroll
            for (int j = 0; j < V; j++)
                a.v[j] = from_float<T>((f[j] - mean) * scale * (to_float(w.v[j]) + n.weight_offset) +
                                       (n.bias ? to_float(((const T *)n.bias)[i + j]) : 0.0f));
        }
        *(vec<T, V> *)(to + i) = a;
    }
}

#endif
