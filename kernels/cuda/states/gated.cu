/* What follows a recurrence or an attention whose output is gated (states.h): an RMS
 * norm of each group of columns gated by silu, and a gate by sigmoid. */
#include "kernels/cuda/states/gated.cuh"

enum { WARP_WIDTH = 512, GROUP_WARPS = 4, WIDE_THREADS = 512, SIGMOID_THREADS = 256 };

/* A group by a warp (WIDE false) or by a block. The choice follows from the width
 * alone, and so do the bits. */
template <typename T, bool WIDE>
__global__ void __launch_bounds__(WIDE ? WIDE_THREADS : GROUP_WARPS * 32)
    norm_gated_kernel(gated_norm_args a, int32_t n_groups)
{
    __shared__ float shared[33];

    pdl_release();
    pdl_wait();
    int group = WIDE ? blockIdx.x : blockIdx.x * GROUP_WARPS + (threadIdx.x >> 5);
    int first = WIDE ? threadIdx.x : threadIdx.x & 31, step = WIDE ? WIDE_THREADS : 32;
    if (group >= n_groups) {
        return;
    }
    T *x = (T *)a.x + blockIdx.y * a.x_stride + (int64_t)group * a.width;
    const T *gate = (const T *)a.gate + blockIdx.y * a.gate_stride + (int64_t)group * a.width;
    int64_t weight = a.own_weights ? (int64_t)group * a.width : 0;
    float squares = 0.0f;
    for (int i = first; i < a.width; i += step) {
        squares = add_gated_square(a, squares, to_float(x[i]), to_float(gate[i]));
    }
    squares = WIDE ? block_sum(squares, shared) : warp_sum(squares);
    float factor = group_factor(a, squares);
    for (int i = first; i < a.width; i += step) {
        float w = load_any(a.weight, a.weight_type, weight + i);
        x[i] = from_float<T>(gated_element(to_float(x[i]), factor, w, to_float(gate[i])));
    }
}

template <typename T>
__global__ void __launch_bounds__(SIGMOID_THREADS)
    gate_sigmoid_kernel(T *x, int64_t x_stride, const T *gate, int64_t gate_stride, int32_t cols)
{
    pdl_release();
    pdl_wait();
    int i = blockIdx.x * SIGMOID_THREADS + threadIdx.x;
    if (i < cols) {
        T *at = x + blockIdx.y * x_stride + i;
        float g = to_float(gate[blockIdx.y * gate_stride + i]);
        *at = from_float<T>(to_float(*at) / (1.0f + expf(-g)));
    }
}

template <typename T>
__global__ void __launch_bounds__(SIGMOID_THREADS)
    multiply_kernel(T *x, int64_t x_stride, const void *y, int64_t y_stride, int32_t y_type,
                    int32_t cols, int32_t act)
{
    pdl_release();
    pdl_wait();
    int i = blockIdx.x * SIGMOID_THREADS + threadIdx.x;
    if (i < cols) {
        T *at = x + blockIdx.y * x_stride + i;
        float f = load_any(y, y_type, y_stride > 0 ? blockIdx.y * y_stride + i : 0);
        *at = from_float<T>(to_float(*at) * activate(f, act));
    }
}

extern "C" void launch_norm_gated(const struct gated_norm_args *a, int32_t rows, int32_t cols,
                                  int type, cudaStream_t stream)
{
    int groups = cols / a->width;

    if (a->width > WARP_WIDTH) {
        DISPATCH_TYPE(type, launch(norm_gated_kernel<T, true>, dim3(groups, rows),
                                   dim3(WIDE_THREADS), 0, stream, *a, groups));
    } else {
        DISPATCH_TYPE(type, launch(norm_gated_kernel<T, false>,
                                   dim3((groups + GROUP_WARPS - 1) / GROUP_WARPS, rows),
                                   dim3(GROUP_WARPS * 32), 0, stream, *a, groups));
    }
}

extern "C" void launch_gate_sigmoid(void *x, int64_t x_stride, const void *gate,
                                    int64_t gate_stride, int32_t rows, int32_t cols, int type,
                                    cudaStream_t stream)
{
    dim3 grid((cols + SIGMOID_THREADS - 1) / SIGMOID_THREADS, rows);

    DISPATCH_TYPE(type, launch(gate_sigmoid_kernel<T>, grid, dim3(SIGMOID_THREADS), 0, stream,
                               (T *)x, x_stride, (const T *)gate, gate_stride, cols));
}

extern "C" void launch_multiply(void *x, int64_t x_stride, const void *y, int64_t y_stride,
                                int y_type, int32_t rows, int32_t cols, int act, int type,
                                cudaStream_t stream)
{
    dim3 grid((cols + SIGMOID_THREADS - 1) / SIGMOID_THREADS, rows);

    DISPATCH_TYPE(type, launch(multiply_kernel<T>, grid, dim3(SIGMOID_THREADS), 0, stream, (T *)x,
                               x_stride, y, y_stride, (int32_t)y_type, cols, (int32_t)act));
}
