/* Everything between matrix products and attention except the rotary embedding
 * (rope.cu): embedding, norms, gates, sums.
 *
 * Each kernel is bound by memory or, with few rows, by latency: one block per row or
 * part of it, 16-byte accesses where the width allows, sums in float32. Kernels first,
 * then launchers.
 */
#include "kernels/cuda/step/norm.cuh"

/* Rows of ids outside [first, first + n_ids), which another rank has, are zero. */
template <typename T, int V>
__global__ void embed_kernel(T *out, int64_t out_stride, const T *table, int64_t table_stride,
                             const int32_t *token, int32_t first, int32_t n_ids, int32_t cols,
                             float scale)
{
    pdl_wait(); /* before the release: attention reads the step's arrays before it waits */
    pdl_release();
    int id = token[blockIdx.x] - first;
    bool here = id >= 0 && id < n_ids;
    const T *from = table + (int64_t)id * table_stride;
    T *to = out + blockIdx.x * out_stride;
    for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V) {
        vec<T, V> x = {};
        if (here) {
            x = *(const vec<T, V> *)(from + i);
        }
        if (scale != 1.0f) {
            for (int j = 0; j < V; j++) {
                x.v[j] = from_float<T>(to_float(x.v[j]) * scale);
            }
        }
        *(vec<T, V> *)(to + i) = x;
    }
}

template <typename T>
__global__ void embed_position_kernel(T *x, int64_t x_stride, const void *table, int table_type,
                                      int64_t table_stride, const int32_t *position, int32_t offset,
                                      int32_t cols)
{
    pdl_release();
    pdl_wait();
    int64_t from = (int64_t)(position[blockIdx.x] + offset) * table_stride;
    T *to = x + blockIdx.x * x_stride;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        to[i] = from_float<T>(to_float(to[i]) + load_any(table, table_type, from + i));
    }
}

enum { NORM_THREADS = 512 };

/* One block per row. */
template <typename T, int V, int N>
__global__ void __launch_bounds__(NORM_THREADS, N == 1 ? 3 : 1)
    norm_kernel(T *out, int64_t out_stride, T *x, int64_t x_stride, const T *y, int64_t y_stride,
                norm_args n, int32_t cols)
{
    pdl_release();
    vec<T, V> weight[N];
    norm_fetch<T, V, N>(weight, n, cols);
    pdl_wait();
    const T *add = y ? y + blockIdx.x * y_stride : nullptr;
    vec<T, V> ahead[N];
#pragma unroll
    for (int q = 0; q < N; q++) {
        if (add && norm_column<V>(q) < cols) {
            ahead[q] = *(const vec<T, V> *)(add + norm_column<V>(q));
        }
    }
    norm_row<T, V, N>(out + blockIdx.x * out_stride, x + blockIdx.x * x_stride, weight, n, cols,
                      add != nullptr, [&](int q, int i, float(&b)[V]) {
                          vec<T, V> v = q >= 0 ? ahead[q] : *(const vec<T, V> *)(add + i);
#pragma unroll
                          for (int j = 0; j < V; j++)
                              b[j] = to_float(v.v[j]);
                      });
}

enum { GATE_THREADS = 256 };

/* ACT: the activation, as a constant to keep the code short; A_NONE: `act` tells. */
template <typename T, int V, int ACT>
__global__ void __launch_bounds__(GATE_THREADS)
    gated_act_kernel(T *out, int64_t out_stride, const T *in, int64_t in_stride, int32_t n, int act)
{
    pdl_release();
    pdl_wait();
    const T *gate = in + blockIdx.y * in_stride, *up = gate + n;
    T *to = out + blockIdx.y * out_stride;
    int i = (blockIdx.x * GATE_THREADS + threadIdx.x) * V;
    if (i >= n) {
        return;
    }
    vec<T, V> g = *(const vec<T, V> *)(gate + i), u = *(const vec<T, V> *)(up + i);
#pragma unroll
    for (int j = 0; j < V; j++) {
        g.v[j] =
            from_float<T>(activate(to_float(g.v[j]), ACT == A_NONE ? act : ACT) * to_float(u.v[j]));
    }
    *(vec<T, V> *)(to + i) = g;
}

template <typename T, int V>
__global__ void add_kernel(T *x, int64_t x_stride, const T *y, int64_t y_stride, int32_t cols)
{
    pdl_release();
    pdl_wait();
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (i >= cols) {
        return;
    }
    vec<T, V> *to = (vec<T, V> *)(x + blockIdx.y * x_stride + i);
    vec<T, V> a = *to, b = *(const vec<T, V> *)(y + blockIdx.y * y_stride + i);
#pragma unroll
    for (int j = 0; j < V; j++) {
        a.v[j] = from_float<T>(to_float(a.v[j]) + to_float(b.v[j]));
    }
    *to = a;
}

__global__ void soft_cap_kernel(float *x, int64_t stride, int32_t cols, float cap)
{
    pdl_release();
    pdl_wait();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < cols) {
        x[blockIdx.y * stride + i] = cap * tanhf(x[blockIdx.y * stride + i] / cap);
    }
}

template <typename T>
__global__ void xielu_kernel(T *x, int64_t stride, const float *factors, int32_t cols)
{
    pdl_release();
    pdl_wait();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < cols) {
        T *at = x + blockIdx.y * stride + i;
        float v = to_float(*at);
        float bent = v > 0.0f ? softplus(factors[0]) * v * v
                              : (0.5f + softplus(factors[1])) * (expm1f(fminf(v, -1e-6f)) - v);
        *at = from_float<T>(bent + 0.5f * v);
    }
}

/* One block per row. */
template <typename T>
__global__ void scale_by_score_kernel(T *out, int64_t out_stride, const T *x, int64_t x_stride,
                                      const float *scores, int64_t scores_stride, int32_t n,
                                      int32_t cols)
{
    pdl_release();
    pdl_wait();
    const float *score = scores + blockIdx.x * scores_stride;
    float most = score[0];
    for (int i = 1; i < n; i++) {
        most = fmaxf(most, score[i]);
    }
    float factor = 1.0f / (1.0f + expf(-most));
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        out[blockIdx.x * out_stride + i] =
            from_float<T>(to_float(x[blockIdx.x * x_stride + i]) * factor);
    }
}

template <typename T, int V>
__global__ void gather_kernel(T *out, int64_t out_stride, const T *x, int64_t x_stride,
                              const int32_t *index, int32_t cols)
{
    pdl_release();
    pdl_wait();
    const T *from = x + index[blockIdx.x] * x_stride;
    T *to = out + blockIdx.x * out_stride;
    for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V) {
        *(vec<T, V> *)(to + i) = *(const vec<T, V> *)(from + i);
    }
}

template <typename T>
__global__ void epilogue_kernel(T *out, const T *from, int64_t out_stride, const void *bias,
                                int bias_type, int act, const T *residual, int64_t residual_stride,
                                int32_t cols)
{
    pdl_release();
    pdl_wait();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= cols) {
        return;
    }
    T *to = out + blockIdx.y * out_stride + i;
    float v = to_float(from[blockIdx.y * out_stride + i]);
    if (bias) {
        v += load_any(bias, bias_type, i);
    }
    v = activate(v, act);
    if (residual) {
        v += to_float(residual[blockIdx.y * residual_stride + i]);
    }
    *to = from_float<T>(v);
}

/* Elements per access, 16 bytes or 1 element, as pointers and strides of a row
 * allow. */
template <typename T>
static int width(int64_t cols, int64_t s0, int64_t s1, const void *p0, const void *p1)
{
    const int v = 16 / sizeof(T);
    bool ok = cols % v == 0 && s0 % v == 0 && s1 % v == 0 && (uintptr_t)p0 % 16 == 0 &&
              (uintptr_t)p1 % 16 == 0;

    return ok ? v : 1;
}

#define WIDE(v_, T, kernel, ...)                            \
    do {                                                    \
        if ((v_) == 1)                                      \
            launch(kernel<T, 1>, __VA_ARGS__);              \
        else                                                \
            launch(kernel<T, 16 / sizeof(T)>, __VA_ARGS__); \
    } while (0)

static int row_threads(int64_t cols, int v)
{
    return (int)(cols / v >= 512                  ? 512
                 : (cols / v + 31) / 32 * 32 < 32 ? 32
                                                  : (cols / v + 31) / 32 * 32);
}

extern "C" void launch_embed(void *out, int64_t out_stride, const void *table, int64_t table_stride,
                             const int32_t *token, int32_t first, int32_t n_ids, int32_t rows,
                             int32_t cols, float scale, int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, int v = width<T>(cols, out_stride, table_stride, out, table);
                  WIDE(v, T, embed_kernel, dim3(rows), dim3(row_threads(cols, v)), 0, stream,
                       (T *)out, out_stride, (const T *)table, table_stride, token, first, n_ids,
                       cols, scale));
}

extern "C" void launch_embed_position(void *x, int64_t x_stride, const void *table, int table_type,
                                      int64_t table_stride, const int32_t *position, int32_t offset,
                                      int32_t rows, int32_t cols, int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, launch(embed_position_kernel<T>, dim3(rows), dim3(256), 0, stream, (T *)x,
                               x_stride, table, table_type, table_stride, position, offset, cols));
}

/* As many threads as vectors up to NORM_THREADS, then more vectors per thread: many
 * small blocks on a multiprocessor hide latency better than many loads per thread. */
template <typename T, int V>
static void launch_norm_of(T *out, int64_t out_stride, T *x, int64_t x_stride, const T *y,
                           int64_t y_stride, const norm_args &n, int32_t rows, int32_t cols,
                           cudaStream_t stream)
{
    int vectors = (cols + V - 1) / V, keep = vectors <= NORM_THREADS       ? 1
                                             : vectors <= 2 * NORM_THREADS ? 2
                                                                           : 4;
    int threads = min(((vectors + keep - 1) / keep + 31) / 32 * 32, (int)NORM_THREADS);
    auto kernel = keep == 1   ? norm_kernel<T, V, 1>
                  : keep == 2 ? norm_kernel<T, V, 2>
                              : norm_kernel<T, V, 4>;

    launch(kernel, dim3(rows), dim3(threads), 0, stream, out, out_stride, x, x_stride, y, y_stride,
           n, cols);
}

extern "C" void launch_norm(void *out, int64_t out_stride, void *x, int64_t x_stride, const void *y,
                            int64_t y_stride, const struct norm_args *n, int32_t rows, int32_t cols,
                            int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, bool wide = width<T>(cols, out_stride, x_stride, out, x) > 1 &&
                                    (uintptr_t)n->weight % 16 == 0 &&
                                    (!y || width<T>(cols, y_stride, 0, y, n->weight) > 1);
                  (wide ? launch_norm_of<T, 16 / sizeof(T)>
                        : launch_norm_of<T, 1>)((T *)out, out_stride, (T *)x, x_stride,
                                                (const T *)y, y_stride, *n, rows, cols, stream));
}

template <typename T, int V>
static void launch_gated_act_of(T *out, int64_t out_stride, const T *gate_up, int64_t in_stride,
                                int32_t rows, int32_t n, int act, cudaStream_t stream)
{
    constexpr int block = GATE_THREADS * V;

    launch(act == A_SILU ? gated_act_kernel<T, V, A_SILU> : gated_act_kernel<T, V, A_NONE>,
           dim3((n + block - 1) / block, rows), dim3(GATE_THREADS), 0, stream, out, out_stride,
           gate_up, in_stride, n, act);
}

extern "C" void launch_gated_act(void *out, int64_t out_stride, const void *gate_up,
                                 int64_t in_stride, int32_t rows, int32_t n, int act, int type,
                                 cudaStream_t stream)
{
    DISPATCH_TYPE(type, bool wide = width<T>(n, out_stride, in_stride, out, gate_up) > 1;
                  (wide ? launch_gated_act_of<T, 16 / sizeof(T)>
                        : launch_gated_act_of<T, 1>)((T *)out, out_stride, (const T *)gate_up,
                                                     in_stride, rows, n, act, stream));
}

extern "C" void launch_add(void *x, int64_t x_stride, const void *y, int64_t y_stride, int32_t rows,
                           int32_t cols, int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, int v = width<T>(cols, x_stride, y_stride, x, y);
                  WIDE(v, T, add_kernel, dim3((cols / v + 255) / 256, rows), dim3(256), 0, stream,
                       (T *)x, x_stride, (const T *)y, y_stride, cols));
}

extern "C" void launch_soft_cap(float *x, int64_t stride, int32_t rows, int32_t cols, float cap,
                                cudaStream_t stream)
{
    launch(soft_cap_kernel, dim3((cols + 255) / 256, rows), dim3(256), 0, stream, x, stride, cols,
           cap);
}

extern "C" void launch_xielu(void *x, int64_t stride, const float *factors, int32_t rows,
                             int32_t cols, int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, launch(xielu_kernel<T>, dim3((cols + 255) / 256, rows), dim3(256), 0,
                               stream, (T *)x, stride, factors, cols));
}

extern "C" void launch_scale_by_score(void *out, int64_t out_stride, const void *x,
                                      int64_t x_stride, const float *scores, int64_t scores_stride,
                                      int32_t n, int32_t rows, int32_t cols, int type,
                                      cudaStream_t stream)
{
    DISPATCH_TYPE(type, launch(scale_by_score_kernel<T>, dim3(rows), dim3(256), 0, stream, (T *)out,
                               out_stride, (const T *)x, x_stride, scores, scores_stride, n, cols));
}

extern "C" void launch_gather(void *out, int64_t out_stride, const void *x, int64_t x_stride,
                              const int32_t *index, int32_t rows, int32_t cols, int type,
                              cudaStream_t stream)
{
    DISPATCH_TYPE(type, int v = width<T>(cols, out_stride, x_stride, out, x);
                  WIDE(v, T, gather_kernel, dim3(rows), dim3(row_threads(cols, v)), 0, stream,
                       (T *)out, out_stride, (const T *)x, x_stride, index, cols));
}

extern "C" void launch_epilogue(void *out, const void *from, int out_type, int64_t out_stride,
                                const void *bias, int bias_type, int act, const void *residual,
                                int64_t residual_stride, int32_t rows, int32_t cols,
                                cudaStream_t stream)
{
    DISPATCH_TYPE(out_type, launch(epilogue_kernel<T>, dim3((cols + 255) / 256, rows), dim3(256), 0,
                                   stream, (T *)out, (const T *)from, out_stride, bias, bias_type,
                                   act, (const T *)residual, residual_stride, cols));
}
