/* Sums over ranks on peer devices, fused with the residual and the norm behind them.
 *
 * One block a row: it writes its rank's summands into every other rank's inbox, waits until the others have done the same
 * here, and adds up what came in the order of the ranks: the same bits everywhere. One hop over the link, no host, so a
 * captured graph replays it. Sums of a row are counted; the count, its epoch, marks what belongs to which.
 *
 * Few rows go as lines, eight bytes of data and twice the epoch, which the reader waits for line by line: a store of 16
 * bytes arrives as one, so nothing else needs to be ordered. They take twice the bytes. More rows go as they are, and an epoch
 * is raised behind them, which costs a fence's way to the peer and back.
 *
 * The inbox has two halves, taken in turn, and every row has its place there, whatever the shape. A rank writes a row's
 * half again two sums later, and by then it has seen the other's epoch of the sum between, which that one sent after
 * reading this half: nobody overwrites what is still read. Blocks wait for blocks of the same row elsewhere; each sends before
 * it waits and rows start in ascending order everywhere, so the first unfinished row is always under way on all ranks.
 */
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/peer.h"

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

/* Whether the host says that a rank is gone; asked now and then. */
__device__ __forceinline__ bool stopped(const peer_args &p, int round)
{
    return round % LOOK_EVERY == 0 && *(const volatile int32_t *)p.stop;
}

__device__ __forceinline__ void line_store(uint4 *to, uint32_t a, uint32_t b, uint32_t epoch)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(epoch), "r"(b), "r"(epoch)
                 : "memory");
}

__device__ __forceinline__ uint4 line_load(const uint4 *from)
{
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

/* One row's exchange. `slot` is that of a sender in a receiver's inbox; vectors of 16 bytes are counted by m. */
struct row_exchange {
    const peer_args &p;
    int row;
    uint32_t epoch;

    __device__ __forceinline__ char *slot(int receiver, int sender) const
    {
        return p.inbox[receiver] + ((int64_t)(epoch & 1) * p.n_ranks + sender) * PEER_SLOT_BYTES;
    }
    __device__ __forceinline__ uint4 *vector(int receiver, int sender, int m) const
    {
        return (uint4 *)(slot(receiver, sender) + (int64_t)row * PEER_ROW_BYTES) + m;
    }
    /* The first of a vector's two lines; the second is half a row further. */
    __device__ __forceinline__ uint4 *line(int receiver, int sender, int m) const
    {
        return (uint4 *)(slot(receiver, sender) + (int64_t)(PEER_MAX_ROWS + row) * PEER_ROW_BYTES) + m;
    }
    static constexpr int SECOND = PEER_ROW_BYTES / 2 / sizeof(uint4);

    template <bool LINES> __device__ __forceinline__ void send(int m, uint4 v) const
    {
        for (int r = 0; r < p.n_ranks; r++) {
            if (r == p.rank)
                continue;
            if (LINES) {
                line_store(line(r, p.rank, m), v.x, v.y, epoch);
                line_store(line(r, p.rank, m) + SECOND, v.z, v.w, epoch);
            } else {
                *vector(r, p.rank, m) = v;
            }
        }
    }
    /* All threads, behind their sends; vectors may be received then. */
    __device__ __forceinline__ void meet() const
    {
        __syncthreads();
        int peer = threadIdx.x;
        if (peer < p.n_ranks && peer != p.rank) {
            __threadfence_system();
            raise(p.arrived[peer] + p.rank * PEER_MAX_ROWS + row, epoch);
            const uint32_t *flag = p.arrived[p.rank] + peer * PEER_MAX_ROWS + row;
            for (int i = 1; (int32_t)(look(flag) - epoch) < 0 && !stopped(p, i); i++)
                ;
        }
        __syncthreads();
    }
    template <bool LINES> __device__ __forceinline__ uint4 receive(int sender, int m) const
    {
        if (!LINES)
            return *vector(p.rank, sender, m);
        const uint4 *at = line(p.rank, sender, m);
        uint4 a = line_load(at), b = line_load(at + SECOND);
        for (int i = 1; (a.y != epoch || a.w != epoch || b.y != epoch || b.w != epoch) && !stopped(p, i); i++) {
            a = line_load(at);
            b = line_load(at + SECOND);
        }
        return make_uint4(a.x, a.z, b.x, b.z);
    }
};

template <typename T, bool LINES>
__global__ void __launch_bounds__(PEER_THREADS)
peer_sum_kernel(peer_args p, T *out, int64_t out_stride, T *x, int64_t x_stride, T *y, int64_t y_stride, norm_args n, int32_t cols)
{
    constexpr int V = 16 / sizeof(T);
    int row = blockIdx.x;
    pdl_release();
    pdl_wait();
    row_exchange e = {p, row, p.epoch[row] + 1};
    T *mine = y + row * y_stride;
    for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V)
        e.send<LINES>(i / V, *(const uint4 *)(mine + i));
    if (!LINES)
        e.meet();
    auto sum = [&](int i, float (&b)[V]) {
#pragma unroll
        for (int j = 0; j < V; j++)
            b[j] = 0.0f;
        for (int r = 0; r < p.n_ranks; r++) {
            uint4 got = r == p.rank ? *(const uint4 *)(mine + i) : e.receive<LINES>(r, i / V);
            const vec<T, V> v = *(const vec<T, V> *)&got;
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
        p.epoch[row] = e.epoch;
}

extern "C" bool launch_peer_sum(const struct peer_args *p, void *out, int64_t out_stride, void *x, int64_t x_stride, void *y,
                                int64_t y_stride, const struct norm_args *n, int32_t rows, int32_t cols, int type, cudaStream_t stream)
{
    int64_t bytes = type == T_F32 ? 4 : 2, wide = 16 / bytes;
    bool fits = rows <= PEER_MAX_ROWS && cols * bytes <= PEER_ROW_BYTES && cols % wide == 0 && y_stride % wide == 0 &&
                x_stride % wide == 0 && out_stride % wide == 0 && (uintptr_t)y % 16 == 0 && (uintptr_t)x % 16 == 0 &&
                (uintptr_t)out % 16 == 0 && (out == nullptr || (uintptr_t)n->weight % 16 == 0);
    if (!fits)
        return false;
    norm_args none = {};
    if (rows <= PEER_LINE_ROWS && cols * bytes <= PEER_ROW_BYTES / 2)
        DISPATCH_TYPE(type, launch(peer_sum_kernel<T, true>, dim3(rows), dim3(PEER_THREADS), 0, stream, *p, (T *)out, out_stride, (T *)x,
                                   x_stride, (T *)y, y_stride, n ? *n : none, cols));
    else
        DISPATCH_TYPE(type, launch(peer_sum_kernel<T, false>, dim3(rows), dim3(PEER_THREADS), 0, stream, *p, (T *)out, out_stride, (T *)x,
                                   x_stride, (T *)y, y_stride, n ? *n : none, cols));
    return true;
}
