/* All-reduce between peer devices, without a library, fused with the residual and the
 * norm that follow. One hop over the link and no host, so a captured graph can replay
 * it.
 *
 * One block per row writes its rank's summands into every other rank's inbox, waits for
 * the others', and sums in the order of the ranks: the same bits everywhere. The data
 * itself is the flag: a slot of the inbox is blank, all ones, until it is written, and
 * a summand that is all ones (a NaN) is sent as another NaN. So neither fences nor
 * flags are needed, and nothing has to arrive in order.
 *
 * The inbox has three slots for every row, whatever the shape, used in turn. While one
 * is written and read, the one read last is blanked, and the next one has been blank
 * since the previous sum. A rank writes a slot again three sums later; after two sums
 * it has received what the peer sent after blanking the slot. Blocks wait for blocks of
 * the same row on other ranks. Each sends before it waits, and rows start in ascending
 * order everywhere, so the first unfinished row is running on all ranks.
 */
#include "kernels/cuda/comm/p2p.cuh"
#include "kernels/cuda/step/norm.cuh"

/* The exchange of one row; m counts vectors of 16 bytes. */
struct row_all_reduce {
    const p2p_args &p;
    int row, buffer;

    __device__ __forceinline__ uint4 *slot_address(int receiver, int sender, int in_buffer) const
    {
        int64_t slot = ((int64_t)in_buffer * p.n_ranks + sender) * P2P_MAX_ROWS + row;
        return (uint4 *)(p.inbox[receiver].row + slot * P2P_ROW_BYTES);
    }
    __device__ __forceinline__ void send(int m, uint4 v) const
    {
        v = make_uint4(not_blank(v.x), not_blank(v.y), not_blank(v.z), not_blank(v.w));
        for (int r = 0; r < p.n_ranks; r++) {
            if (r != p.rank) {
                p2p_store(slot_address(r, p.rank, buffer) + m, v);
            }
        }
    }
    __device__ __forceinline__ uint4 receive(int sender, int m) const
    {
        const uint4 *at = slot_address(p.rank, sender, buffer) + m;
        uint4 v = p2p_load(at);
        for (int i = 1;
             (v.x == BLANK || v.y == BLANK || v.z == BLANK || v.w == BLANK) && !stopped(p, i);
             i++) {
            v = p2p_load(at);
        }
        return v;
    }
    __device__ __forceinline__ void clear(int in_buffer, int32_t n_bytes) const
    {
        for (int m = threadIdx.x; m < n_bytes / (int)sizeof(uint4); m += blockDim.x) {
            for (int r = 0; r < p.n_ranks; r++) {
                if (r != p.rank) {
                    p2p_store(slot_address(p.rank, r, in_buffer) + m,
                              make_uint4(BLANK, BLANK, BLANK, BLANK));
                }
            }
        }
    }
};

enum { P2P_KEEP = 2 }; /* vectors of a row that a thread keeps in registers */

template <typename T>
__global__ void __launch_bounds__(P2P_THREADS, 1)
    p2p_sum_kernel(p2p_args p, T *out, int64_t out_stride, T *x, int64_t x_stride, T *y,
                   int64_t y_stride, norm_args n, int32_t cols)
{
    constexpr int V = 16 / sizeof(T);
    int row = blockIdx.x;

    pdl_release();
    pdl_wait();
    p2p_row *state = p.row + row;
    int buffer = state->buffer, before = (buffer + P2P_BUFFERS - 1) % P2P_BUFFERS;
    int32_t stale = state->used[before];
    row_all_reduce e = {p, row, buffer};
    T *mine = y + row * y_stride;
    for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V) {
        e.send(i / V, *(const uint4 *)(mine + i));
    }
    e.clear(before, stale);
    auto sum = [&](int, int i, float(&b)[V]) {
#pragma unroll
        for (int j = 0; j < V; j++)
            b[j] = 0.0f;
        for (int r = 0; r < p.n_ranks; r++) {
            uint4 got = r == p.rank ? *(const uint4 *)(mine + i) : e.receive(r, i / V);
            const vec<T, V> v = *(const vec<T, V> *)&got;
#pragma unroll
            for (int j = 0; j < V; j++)
                b[j] += to_float(v.v[j]);
        }
    };
    if (out) {
        vec<T, V> weight[P2P_KEEP];
        norm_fetch<T, V, P2P_KEEP>(weight, n, cols);
        norm_row<T, V, P2P_KEEP>(out + row * out_stride, x + row * x_stride, weight, n, cols, true,
                                 sum);
    } else {
        T *to = x ? x + row * x_stride : mine;
        for (int i = threadIdx.x * V; i < cols; i += blockDim.x * V) {
            float b[V];
            sum(0, i, b);
            vec<T, V> v = x ? *(const vec<T, V> *)(to + i) : vec<T, V>{};
#pragma unroll
            for (int j = 0; j < V; j++) {
                v.v[j] = from_float<T>(x ? to_float(v.v[j]) + b[j] : b[j]);
            }
            *(vec<T, V> *)(to + i) = v;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        state->used[before] = 0;
        state->used[buffer] = cols * (int32_t)sizeof(T);
        state->buffer = (buffer + 1) % P2P_BUFFERS;
    }
}

extern "C" bool launch_p2p_sum(const struct p2p_args *p, void *out, int64_t out_stride, void *x,
                               int64_t x_stride, void *y, int64_t y_stride,
                               const struct norm_args *n, int32_t rows, int32_t cols, int type,
                               cudaStream_t stream)
{
    int64_t bytes = type == T_F32 ? 4 : 2, wide = 16 / bytes;
    bool fits = rows <= P2P_MAX_ROWS && cols * bytes <= P2P_ROW_BYTES && cols % wide == 0 &&
                y_stride % wide == 0 && x_stride % wide == 0 && out_stride % wide == 0 &&
                (uintptr_t)y % 16 == 0 && (uintptr_t)x % 16 == 0 && (uintptr_t)out % 16 == 0 &&
                (out == nullptr || (uintptr_t)n->weight % 16 == 0);

    if (!fits) {
        return false;
    }
    norm_args none = {};
    DISPATCH_TYPE(type,
                  launch(p2p_sum_kernel<T>, dim3(rows), dim3(P2P_THREADS), 0, stream, *p, (T *)out,
                         out_stride, (T *)x, x_stride, (T *)y, y_stride, n ? *n : none, cols));
    return true;
}
