/* Hidden states of draft heads: copies between rows of a step and blocks of a cache,
 * and logits of a part of the vocabulary. All are bound by latency. */
#include "kernels/batch.h"
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/step/hidden.h"

enum { HIDDEN_THREADS = 256, SPREAD_COLS = 4096 };

/* One block per row and direction. */
template <typename T, int V, bool STORE> __global__ void hidden_kernel(hidden_args a)
{
    pdl_wait(); /* before the release: a later kernel may write what this one reads */
    pdl_release();
    int slot = a.slot[blockIdx.x];
    T *row = (T *)a.row + blockIdx.x * a.row_stride;
    T *kept = (T *)(a.block + max(slot, 0) / a.block_size * a.block_bytes) +
              (int64_t)(max(slot, 0) % a.block_size) * a.width + a.first;
    for (int i = threadIdx.x * V; i < a.cols; i += blockDim.x * V) {
        if (STORE && slot >= 0) {
            *(vec<T, V> *)(kept + i) = *(const vec<T, V> *)(row + i);
        } else if (!STORE) {
            vec<T, V> x = {};
            if (slot >= 0) {
                x = *(const vec<T, V> *)(kept + i);
            }
            *(vec<T, V> *)(row + i) = x;
        }
    }
}

template <typename T>
__global__ void hidden_own_kernel(T *out, int64_t out_stride, const T *own, int64_t own_stride,
                                  int32_t own_rows, const step_header *header, int32_t cols)
{
    pdl_wait();
    pdl_release();
    const int32_t *src = (const int32_t *)((const char *)header + header->off_token_src);
    int from = (int)blockIdx.x < header->n_tokens ? src[blockIdx.x] : -1;
    bool there = from >= 0 && from < own_rows;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        out[blockIdx.x * out_stride + i] = there ? own[from * own_stride + i] : from_float<T>(0.0f);
    }
}

/* A block is for a row, and leaves most as they are. */
template <typename T>
__global__ void hidden_masked_kernel(T *out, int64_t out_stride, const T *row,
                                     const step_header *header, int32_t cols)
{
    pdl_wait();
    pdl_release();
    const int32_t *src = (const int32_t *)((const char *)header + header->off_token_src);
    if ((int)blockIdx.x >= header->n_tokens || src[blockIdx.x] != TOKEN_MASKED) {
        return;
    }
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        out[blockIdx.x * out_stride + i] = row[i];
    }
}

/* The first of id[n], which ascend, that is not below `least`. */
static __device__ int lower_bound(const float *id, int n, float least)
{
    int low = 0, high = n;

    while (low < high) {
        int half = (low + high) / 2;
        if (id[half] < least) {
            low = half + 1;
        } else {
            high = half;
        }
    }
    return low;
}

/* A block has SPREAD_COLS columns of a row. */
__global__ void spread_kernel(float *out, int64_t out_stride, const float *x, int64_t x_stride,
                              const float *id, int32_t vocab, int32_t n)
{
    pdl_wait();
    pdl_release();
    int begin = blockIdx.x * SPREAD_COLS, end = min(begin + SPREAD_COLS, vocab);
    float *to = out + blockIdx.y * out_stride;
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        to[i] = -INFINITY;
    }
    __syncthreads();
    int last = lower_bound(id, n, (float)end);
    for (int i = lower_bound(id, n, (float)begin) + threadIdx.x; i < last; i += blockDim.x) {
        to[(int)id[i]] = x[blockIdx.y * x_stride + i];
    }
}

template <typename T, bool STORE>
static void launch_hidden(const struct hidden_args *a, cudaStream_t stream)
{
    const int V = 16 / sizeof(T);
    bool wide = a->cols % V == 0 && a->first % V == 0 && a->width % V == 0 &&
                a->row_stride % V == 0 && (uintptr_t)a->row % 16 == 0 &&
                (uintptr_t)a->block % 16 == 0 && a->block_bytes % 16 == 0;

    launch(wide ? hidden_kernel<T, V, STORE> : hidden_kernel<T, 1, STORE>, dim3(a->rows),
           dim3(HIDDEN_THREADS), 0, stream, *a);
}

extern "C" void launch_hidden_store(const struct hidden_args *a, int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, (launch_hidden<T, true>(a, stream)));
}

extern "C" void launch_hidden_load(const struct hidden_args *a, int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, (launch_hidden<T, false>(a, stream)));
}

extern "C" void launch_hidden_own(void *out, int64_t out_stride, const void *own,
                                  int64_t own_stride, int32_t own_rows,
                                  const struct step_header *header, int32_t rows, int32_t cols,
                                  int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type,
                  launch(hidden_own_kernel<T>, dim3(rows), dim3(HIDDEN_THREADS), 0, stream,
                         (T *)out, out_stride, (const T *)own, own_stride, own_rows, header, cols));
}

extern "C" void launch_hidden_masked(void *out, int64_t out_stride, const void *row,
                                     const struct step_header *header, int32_t rows, int32_t cols,
                                     int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, launch(hidden_masked_kernel<T>, dim3(rows), dim3(HIDDEN_THREADS), 0, stream,
                               (T *)out, out_stride, (const T *)row, header, cols));
}

extern "C" void launch_spread(float *out, int64_t out_stride, const float *x, int64_t x_stride,
                              const float *id, int32_t rows, int32_t vocab, int32_t n,
                              cudaStream_t stream)
{
    launch(spread_kernel, dim3((vocab + SPREAD_COLS - 1) / SPREAD_COLS, rows), dim3(HIDDEN_THREADS),
           0, stream, out, out_stride, x, x_stride, id, vocab, n);
}
