/* Norms of rows whose columns the ranks share (backend_ops.square_sums, norm_by_sums),
 * around a sum over ranks. A block has a row, and one order of adding it up whatever
 * rows there are beside. */
#include "kernels/cuda/common.cuh"

namespace
{

enum { THREADS = 256 };

template <typename T>
__global__ void __launch_bounds__(THREADS)
    square_sums_kernel(float *sums, int64_t sums_stride, const T *x, int64_t x_stride, int32_t cols)
{
    __shared__ float shared[33];
    const T *row = x + blockIdx.x * x_stride;
    float sum = 0.0f;

    pdl_release();
    pdl_wait();
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        float v = to_float(row[i]);
        sum += v * v;
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) {
        sums[blockIdx.x * sums_stride] = sum;
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    norm_by_sums_kernel(T *x, int64_t x_stride, const float *sums, int64_t sums_stride, float width,
                        norm_args n, int32_t cols)
{
    T *row = x + blockIdx.x * x_stride;

    pdl_release();
    pdl_wait();
    float factor = rsqrtf(sums[blockIdx.x * sums_stride] / width + n.eps);
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        float weight = load_any(n.weight, n.weight_type, i) + n.weight_offset;
        row[i] = from_float<T>(to_float(row[i]) * factor * weight);
    }
}

} /* namespace */

extern "C" void launch_square_sums(float *sums, int64_t sums_stride, const void *x,
                                   int64_t x_stride, int32_t rows, int32_t cols, int type,
                                   cudaStream_t stream)
{
    DISPATCH_TYPE(type, launch(square_sums_kernel<T>, dim3(rows), dim3(THREADS), 0, stream, sums,
                               sums_stride, (const T *)x, x_stride, cols));
}

extern "C" void launch_norm_by_sums(void *x, int64_t x_stride, const float *sums,
                                    int64_t sums_stride, int32_t width, const struct norm_args *n,
                                    int32_t rows, int32_t cols, int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, launch(norm_by_sums_kernel<T>, dim3(rows), dim3(THREADS), 0, stream, (T *)x,
                               x_stride, sums, sums_stride, (float)width, *n, cols));
}
