/* All-reduce between peer devices, without a library, fused with the residual and the
 * norm that follow. One hop over the link and no host, so a captured graph can replay
 * it.
 *
 * A block writes its rank's summands of a row into every other rank's inbox, waits for
 * the others', and sums in the order of the ranks: the same bits everywhere. The data
 * itself is the flag: a slot of the inbox is blank, all ones, until it is written, and
 * a summand that is all ones (a NaN) is sent as another NaN. So neither fences nor
 * flags are needed, and nothing has to arrive in order.
 *
 * Over more than two ranks a sum takes two hops: of each row a rank gets the summands
 * of its share of the columns alone, adds them up, and sends the others what the row
 * has then. Each link carries two shares of a row in place of the row. A slot's share
 * of the receiver takes summands, its share of the sender what became of the row: they
 * do not meet. The bits are those of one hop.
 *
 * The inbox has three slots for every block, whatever the shape, used in turn, row by
 * row and sum by sum. While one is written and read, the one read last is blanked, and
 * the next one has been blank since the row before. With two hops a reader blanks what
 * it reads at once. A rank writes a slot again three rows later; after two rows it has
 * received what the peer sent after blanking the slot: the same thread, with a fence or
 * the end of a launch in between. Blocks wait for the same blocks of other ranks. Each
 * sends before it waits, and blocks start in ascending order everywhere, so the first
 * unfinished one is running on all ranks.
 */
#include "kernels/cuda/comm/p2p.cuh"
#include "kernels/cuda/step/norm.cuh"

/* The exchange of one row by a block's slot; m counts vectors of 16 bytes. */
struct row_all_reduce {
    const p2p_args &p;
    int block, buffer;

    __device__ __forceinline__ uint4 *slot_address(int receiver, int sender, int in_buffer) const
    {
        int64_t slot = ((int64_t)in_buffer * p.n_ranks + sender) * P2P_SLOTS + block;
        return (uint4 *)(p.inbox[receiver].row + slot * P2P_ROW_BYTES);
    }
    __device__ __forceinline__ void send_to(int receiver, int m, uint4 v) const
    {
        v = make_uint4(not_blank(v.x), not_blank(v.y), not_blank(v.z), not_blank(v.w));
        p2p_store(slot_address(receiver, p.rank, buffer) + m, v);
    }
    __device__ __forceinline__ void send(int m, uint4 v) const
    {
        for (int r = 0; r < p.n_ranks; r++) {
            if (r != p.rank) {
                send_to(r, m, v);
            }
        }
    }
    __device__ __forceinline__ uint4 receive(int sender, int m, bool blanks) const
    {
        uint4 *at = slot_address(p.rank, sender, buffer) + m;
        uint4 v = p2p_load(at);
        for (int i = 1;
             (v.x == BLANK || v.y == BLANK || v.z == BLANK || v.w == BLANK) && !stopped(p, i);
             i++) {
            v = p2p_load(at);
        }
        random_delay();
        if (blanks) {
            p2p_store(at, make_uint4(BLANK, BLANK, BLANK, BLANK));
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

/* a += all ranks' summands of the columns from i on, this rank's in `mine`. */
template <typename T, int V>
__device__ __forceinline__ void add_ranks(vec<T, V> &a, const row_all_reduce &e, const T *mine,
                                          int i, bool blanks)
{
    float b[V];

#pragma unroll
    for (int j = 0; j < V; j++) {
        b[j] = 0.0f;
    }
    for (int r = 0; r < e.p.n_ranks; r++) {
        uint4 got = r == e.p.rank ? *(const uint4 *)(mine + i) : e.receive(r, i / V, blanks);
        const vec<T, V> v = *(const vec<T, V> *)&got;
#pragma unroll
        for (int j = 0; j < V; j++) {
            b[j] += to_float(v.v[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < V; j++) {
        a.v[j] = from_float<T>(to_float(a.v[j]) + b[j]);
    }
}

/* A row of the operation, by all threads of a block. */
template <typename T> struct row_of_sum {
    T *out, *to, *mine; /* out NULL: no norm; to: x, or y where there is none */
    bool adds;          /* to has what the sum is added to */
    int32_t cols;
    int before;    /* the slot set of the row before */
    int32_t stale; /* bytes of it to blank */
};

/* The row's summands to the ranks that add them up. */
template <typename T, bool TWO_HOPS>
__device__ __forceinline__ void send_row(const row_all_reduce &e, const row_of_sum<T> &r)
{
    constexpr int V = 16 / sizeof(T);
    int share = r.cols / e.p.n_ranks;

    for (int i = threadIdx.x * V; i < r.cols; i += blockDim.x * V) {
        uint4 v = *(const uint4 *)(r.mine + i);
        random_delay();
        if (!TWO_HOPS) {
            e.send(i / V, v);
        } else if (i / share != e.p.rank) {
            e.send_to(i / share, i / V, v);
        }
    }
}

/* What the row has after the sum in this rank's share of the columns, made and sent to
 * the others. The thread that makes a vector is the one that reads it. */
template <typename T>
__device__ __forceinline__ void make_share(const row_all_reduce &e, const row_of_sum<T> &r)
{
    constexpr int V = 16 / sizeof(T);
    int share = r.cols / e.p.n_ranks;

    for (int i = threadIdx.x * V; i < r.cols; i += blockDim.x * V) {
        if (i / share == e.p.rank) {
            vec<T, V> a = r.adds ? *(const vec<T, V> *)(r.to + i) : vec<T, V>{};
            add_ranks<T, V>(a, e, r.mine, i, true);
            *(vec<T, V> *)(r.to + i) = a;
            random_delay();
            e.send(i / V, *(const uint4 *)&a);
        }
    }
}

/* The sum and the norm of the row, with what the others send. */
template <typename T, bool TWO_HOPS, int N>
__device__ __forceinline__ void finish_row(const row_all_reduce &e, const row_of_sum<T> &r,
                                           const vec<T, 16 / sizeof(T)> (&weight)[N],
                                           const norm_args &n)
{
    constexpr int V = 16 / sizeof(T);
    int share = r.cols / e.p.n_ranks;
    auto change = [&](int, int i, vec<T, V> &a) {
        if (!TWO_HOPS) {
            add_ranks<T, V>(a, e, r.mine, i, false);
        } else if (i / share != e.p.rank) {
            uint4 got = e.receive(i / share, i / V, true);
            a = *(const vec<T, V> *)&got;
        }
        *(vec<T, V> *)(r.to + i) = a;
    };

    random_delay();
    e.clear(r.before, r.stale);
    if (r.out) {
        norm_changed_row<T, V, N>(r.out, r.to, weight, n, r.cols, change);
        return;
    }
    for (int i = threadIdx.x * V; i < r.cols; i += blockDim.x * V) {
        bool reads = r.adds || (TWO_HOPS && i / share == e.p.rank);
        vec<T, V> a = reads ? *(const vec<T, V> *)(r.to + i) : vec<T, V>{};
        change(0, i, a);
    }
}

/* LOOPS: a block may have several rows, one after another; else it has one. */
template <typename T, bool TWO_HOPS, bool LOOPS>
__global__ void __launch_bounds__(P2P_THREADS, LOOPS ? 2 : 1)
    p2p_sum_kernel(p2p_args p, T *out, int64_t out_stride, T *x, int64_t x_stride, T *y,
                   int64_t y_stride, norm_args n, int32_t rows, int32_t cols)
{
    constexpr int V = 16 / sizeof(T);
    vec<T, V> weight[P2P_KEEP];

    pdl_release();
    if (out) {
        norm_fetch<T, V, P2P_KEEP>(weight, n, cols);
    }
    pdl_wait();
    p2p_row *state = p.row + blockIdx.x;
    int buffer = state->buffer, before = (buffer + P2P_BUFFERS - 1) % P2P_BUFFERS;
    int32_t stale = state->used[before], received = TWO_HOPS ? 0 : cols * (int32_t)sizeof(T);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        T *from = y + row * y_stride;
        row_all_reduce e = {p, (int)blockIdx.x, buffer};
        row_of_sum<T> r = {out ? out + row * out_stride : nullptr,
                           x ? x + row * x_stride : from,
                           from,
                           x != nullptr,
                           cols,
                           before,
                           stale};
        if (LOOPS && row != blockIdx.x) { /* what was blanked comes before what is sent next */
            __threadfence_system();
            __syncthreads();
        }
        send_row<T, TWO_HOPS>(e, r);
        if (TWO_HOPS) {
            make_share<T>(e, r);
        }
        finish_row<T, TWO_HOPS, P2P_KEEP>(e, r, weight, n);
        stale = received;
        before = buffer;
        buffer = (buffer + 1) % P2P_BUFFERS;
        if (!LOOPS) {
            break;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        random_delay();
        state->used[before] = received;
        state->used[buffer] = state->used[(buffer + 1) % P2P_BUFFERS] = 0;
        state->buffer = buffer;
    }
}

template <typename T> static auto sum_kernel_of(bool two_hops, bool loops)
{
    return two_hops ? loops ? p2p_sum_kernel<T, true, true> : p2p_sum_kernel<T, true, false>
           : loops ? p2p_sum_kernel<T, false, true>
                    : p2p_sum_kernel<T, false, false>;
}

extern "C" bool launch_p2p_sum(const struct p2p_args *p, void *out, int64_t out_stride, void *x,
                               int64_t x_stride, void *y, int64_t y_stride,
                               const struct norm_args *n, int32_t rows, int32_t cols, int type,
                               cudaStream_t stream)
{
    int64_t bytes = type == T_F32 ? 4 : 2, wide = 16 / bytes;
    bool fits = cols * bytes <= P2P_ROW_BYTES && cols % wide == 0 && y_stride % wide == 0 &&
                x_stride % wide == 0 && out_stride % wide == 0 && (uintptr_t)y % 16 == 0 &&
                (uintptr_t)x % 16 == 0 && (uintptr_t)out % 16 == 0 &&
                (out == nullptr || (uintptr_t)n->weight % 16 == 0);

    if (!fits) {
        return false;
    }
    norm_args norm = {};
    if (n) {
        norm = *n;
    }
    bool two_hops = p->n_ranks > 2 && cols % (wide * p->n_ranks) == 0, loops = rows > P2P_SLOTS;
    DISPATCH_TYPE(type, launch(sum_kernel_of<T>(two_hops, loops), dim3(loops ? P2P_SLOTS : rows),
                               dim3(P2P_THREADS), 0, stream, *p, (T *)out, out_stride, (T *)x,
                               x_stride, (T *)y, y_stride, norm, rows, cols));
    return true;
}
