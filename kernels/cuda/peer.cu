/* Sums over ranks on peer devices, fused with the residual and the norm behind them.
 *
 * One block a row. It writes its rank's summands into every other rank's inbox, raises the row's epoch there, waits until the
 * others have done the same here, and adds up what came in the order of the ranks: the same bits everywhere. One hop over
 * the link, no host, so a captured graph replays it.
 *
 * The inbox has two halves, taken in turn. A rank writes a row's half again two sums later, and by then it has seen the
 * other's epoch of the sum between, which that one raised after reading this half: nobody overwrites what is still read.
 * Blocks wait for blocks of the same row elsewhere; each raises its epoch before it waits and rows start in ascending order
 * everywhere, so the first unfinished row is always under way on all ranks.
 */
#include "kernels/cuda/norm.cuh"

enum { PEER_THREADS = 512, LOOK_EVERY = 256 };

__device__ __forceinline__ void raise(uint32_t *flag, uint32_t epoch)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

__device__ __forceinline__ uint32_t look(const uint32_t *flag)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
    return v;
}

/* Until the flag has reached the epoch, or the host says that a rank is gone. */
__device__ void wait_for(const uint32_t *flag, uint32_t epoch, const int32_t *stop)
{
    for (int i = 1; (int32_t)(look(flag) - epoch) < 0; i++)
        if (i % LOOK_EVERY == 0 && *(const volatile int32_t *)stop)
            return;
}

template <typename T>
__global__ void __launch_bounds__(PEER_THREADS)
peer_sum_kernel(peer_args p, T *out, int64_t out_stride, T *x, int64_t x_stride, T *y, int64_t y_stride, norm_args n, int32_t cols)
{
    constexpr int V = 16 / sizeof(T);
    int row = blockIdx.x;
    pdl_release();
    pdl_wait();
    uint32_t epoch = p.epoch[row] + 1;
    int64_t slot = (int64_t)(epoch & 1) * p.n_ranks, at = (int64_t)row * cols;
    T *mine = y + row * y_stride;
    for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V) {
        vec<T, V> v = *(const vec<T, V> *)(mine + i);
        for (int r = 0; r < p.n_ranks; r++)
            if (r != p.rank)
                *(vec<T, V> *)((T *)(p.inbox[r] + (slot + p.rank) * PEER_SLOT_BYTES) + at + i) = v;
    }
    __syncthreads();
    int peer = threadIdx.x;
    if (peer < p.n_ranks && peer != p.rank) {
        __threadfence_system();
        raise(p.arrived[peer] + p.rank * PEER_MAX_ROWS + row, epoch);
        wait_for(p.arrived[p.rank] + peer * PEER_MAX_ROWS + row, epoch, p.stop);
    }
    __syncthreads();
    auto sum = [&](int i, float (&b)[V]) {
#pragma unroll
        for (int j = 0; j < V; j++)
            b[j] = 0.0f;
        for (int r = 0; r < p.n_ranks; r++) {
            const T *from = r == p.rank ? mine : (const T *)(p.inbox[p.rank] + (slot + r) * PEER_SLOT_BYTES) + at;
            vec<T, V> v = *(const vec<T, V> *)(from + i);
#pragma unroll
            for (int j = 0; j < V; j++)
                b[j] += to_float(v.v[j]);
        }
    };
    if (out) {
        norm_row<T, V>(out + row * out_stride, x + row * x_stride, n, cols, true, sum);
    } else {
        T *to = x ? x + row * x_stride : mine;
        for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V) {
            float b[V];
            sum(i, b);
            vec<T, V> v = x ? *(const vec<T, V> *)(to + i) : vec<T, V>{};
#pragma unroll
            for (int j = 0; j < V; j++)
                v.v[j] = from_float<T>(x ? to_float(v.v[j]) + b[j] : b[j]);
            *(vec<T, V> *)(to + i) = v;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0)
        p.epoch[row] = epoch;
}

extern "C" bool launch_peer_sum(const struct peer_args *p, void *out, int64_t out_stride, void *x, int64_t x_stride, void *y,
                                int64_t y_stride, const struct norm_args *n, int32_t rows, int32_t cols, int type, cudaStream_t stream)
{
    int64_t bytes = type == T_F32 ? 4 : 2, wide = 16 / bytes;
    bool fits = rows <= PEER_MAX_ROWS && (int64_t)rows * cols * bytes <= PEER_SLOT_BYTES && cols % wide == 0 && y_stride % wide == 0 &&
                x_stride % wide == 0 && out_stride % wide == 0 && (uintptr_t)y % 16 == 0 && (uintptr_t)x % 16 == 0 &&
                (uintptr_t)out % 16 == 0 && (out == nullptr || (uintptr_t)n->weight % 16 == 0);
    if (!fits)
        return false;
    norm_args none = {};
    DISPATCH_TYPE(type, launch(peer_sum_kernel<T>, dim3(rows), dim3(PEER_THREADS), 0, stream, *p, (T *)out, out_stride, (T *)x, x_stride,
                               (T *)y, y_stride, n ? *n : none, cols));
    return true;
}
