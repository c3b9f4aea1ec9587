/* Routing of experts, and the sum of a row's pairs (experts.h).
 *
 * A warp routes a row (route.cuh). A few rows are routed and listed by one kernel,
 * which alone knows parts of a shared expert; more by three. The lists of an expert's
 * pairs are filled in any order, which no result depends on.
 */
#include "kernels/cuda/expert_tiles/code_group.cuh"
#include "kernels/cuda/experts/list.cuh"
#include "kernels/cuda/step/norm.cuh"

namespace
{

enum { LIST_THREADS = 1024, ROUTE_WARPS = 8, SMALL_ROUTE = EXPERT_PARTS_ROWS };

/* All of it for at most SMALL_ROUTE rows: the first n_route blocks route, the last of
 * them to be done lists; the others quantise. */
template <int PER>
__global__ void __launch_bounds__(LIST_THREADS)
    route_few_kernel(const expert_route a, const expert_lists l, const expert_quantise q,
                     int n_route)
{
    __shared__ int count[EXPERT_MOST], sums[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, block = blockIdx.x;

    count[threadIdx.x] = 0;
    pdl_wait();
    pdl_release();
    if (block >= n_route) {
        quantise_groups(q, ((block - n_route) * LIST_THREADS + threadIdx.x) / 16,
                        (gridDim.x - n_route) * (LIST_THREADS / 16));
        return;
    }
    int rows = live_rows(a), share = n_route > 1 ? ROUTE_WARPS : rows;
    for (int row = block * share + warp; row < min(rows, (block + 1) * share);
         row += LIST_THREADS / 32) {
        int e;
        float weight;
        route_row<PER>(a, row, lane, &e, &weight);
        store_choice(a, l, row, lane, e, weight);
    }
    if (n_route == 1 || comes_last(a.counter, n_route)) {
        list_rows<LIST_THREADS>(a, l, rows, count, sums);
    }
}

template <int PER>
__global__ void __launch_bounds__(ROUTE_WARPS * 32)
    route_kernel(const expert_route a, const expert_lists l)
{
    int lane = threadIdx.x & 31, row = blockIdx.x * ROUTE_WARPS + (threadIdx.x >> 5), e;
    float weight;

    pdl_wait();
    pdl_release();
    for (int i = threadIdx.x; i < a.n && blockIdx.x == 0; i += blockDim.x) {
        l.count[i] = 0;
    }
    if (row >= live_rows(a)) {
        return;
    }
    route_row<PER>(a, row, lane, &e, &weight);
    store_choice(a, l, row, lane, e, weight);
}

/* A block takes LIST_THREADS pairs, and room in the lists for all of an expert's at
 * once. */
__global__ void __launch_bounds__(LIST_THREADS)
    list_kernel(const expert_route a, const expert_lists l)
{
    __shared__ int count[EXPERT_MOST], first[EXPERT_MOST];
    int pair = blockIdx.x * LIST_THREADS + threadIdx.x, e = 0, at = 0;

    count[threadIdx.x] = 0;
    pdl_wait();
    pdl_release();
    __syncthreads();
    bool live = pair < live_rows(a) * a.top;
    if (live) {
        e = l.expert[pair];
        live = e >= 0;
    }
    if (live) {
        at = atomicAdd(count + e, 1);
    }
    __syncthreads();
    if (count[threadIdx.x] > 0) {
        first[threadIdx.x] = atomicAdd(l.count + threadIdx.x, count[threadIdx.x]);
    }
    __syncthreads();
    if (live) {
        l.list[(int64_t)e * l.cap + first[e] + at] = pair;
    }
}

__global__ void __launch_bounds__(LIST_THREADS)
    tiles_kernel(const expert_route a, const expert_lists l)
{
    __shared__ int sums[32];

    pdl_wait();
    pdl_release();
    int n = threadIdx.x < a.n ? l.count[threadIdx.x] : 0;
    count_held(a, n);
    list_tiles<LIST_THREADS>(l, n, sums);
}

__global__ void __launch_bounds__(256) quantise_kernel(const expert_quantise q)
{
    pdl_wait();
    pdl_release();
    quantise_groups(q, (blockIdx.x * 256 + threadIdx.x) / 16, gridDim.x * 16);
}

template <int PER>
void route(const expert_route &a, const expert_lists &l, const expert_quantise *q,
           cudaStream_t stream)
{
    enum { MOST_BLOCKS = 2048 };
    static const expert_quantise none = {};
    unsigned groups = q ? (unsigned)(q->rows * (q->cols / EXPERT_CODES_K)) : 0;

    if (a.rows <= SMALL_ROUTE) {
        int n_route = a.counter ? (a.rows + ROUTE_WARPS - 1) / ROUTE_WARPS : 1;
        launch(route_few_kernel<PER>, dim3(n_route + (groups + 63) / 64), dim3(LIST_THREADS), 0,
               stream, a, l, q ? *q : none, n_route);
        return;
    }
    if (q) {
        launch(quantise_kernel, dim3(min((groups + 15) / 16, MOST_BLOCKS)), dim3(256), 0, stream,
               *q);
    }
    unsigned pairs = (unsigned)(a.rows * a.top);
    launch(route_kernel<PER>, dim3((unsigned)(a.rows + ROUTE_WARPS - 1) / ROUTE_WARPS),
           dim3(ROUTE_WARPS * 32), 0, stream, a, l);
    launch(list_kernel, dim3((pairs + LIST_THREADS - 1) / LIST_THREADS), dim3(LIST_THREADS), 0,
           stream, a, l);
    launch(tiles_kernel, dim3(1), dim3(LIST_THREADS), 0, stream, a, l);
}

/* ---- the sum ---- */

enum { COMBINE_THREADS = 256, COMBINE_AHEAD = 8, COMBINE_KEPT = 2 };

/* The factor of the shared expert in a row; by all threads. */
template <typename T>
__device__ __forceinline__ float shared_factor(const expert_combine &a, int row, bool live)
{
    __shared__ float sums[33];
    const T *x = (const T *)a.x + row * a.x_stride, *gate = (const T *)a.gate;
    float sum = 0.0f;

    if (!a.gate || !live) {
        return 1.0f;
    }
    for (int i = threadIdx.x; i < a.hidden; i += COMBINE_THREADS) {
        sum += to_float(x[i]) * to_float(gate[i]);
    }
    return 1.0f / (1.0f + expf(-block_sum(sum, sums)));
}

/* The sum of a row's pairs and the shared expert, of VEC columns from i on. */
template <typename T, int VEC>
__device__ __forceinline__ void pair_sum(float (&sum)[VEC], const expert_combine &a, int row,
                                         bool live, float factor, int i)
{
    using V = vec<T, VEC>;
    int each = a.top + a.parts;
    const T *pairs = (const T *)a.pairs + (int64_t)row * each * a.pairs_stride;

#pragma unroll
    for (int j = 0; j < VEC; j++) {
        sum[j] = 0.0f;
    }
    for (int first = 0; first < each && live; first += COMBINE_AHEAD) {
        V v[COMBINE_AHEAD];
        float weight[COMBINE_AHEAD];
#pragma unroll
        for (int k = 0; k < COMBINE_AHEAD; k++) { /* all on their way at once */
            int at = min(first + k, each - 1);
            weight[k] = at < a.top ? a.weight[row * each + at] : factor;
            v[k] = *(const V *)(pairs + at * a.pairs_stride + i);
        }
#pragma unroll
        for (int k = 0; k < COMBINE_AHEAD; k++) {
#pragma unroll
            for (int j = 0; j < VEC && first + k < each; j++) {
                /* of one that is not held here nothing was made */
                sum[j] += weight[k] != 0.0f ? weight[k] * to_float(v[k].v[j]) : 0.0f;
            }
        }
    }
    if (a.shared && live) {
        V v = *(const V *)((const T *)a.shared + row * a.shared_stride + i);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            sum[j] += factor * to_float(v.v[j]);
        }
    }
}

/* A block adds the pairs of a row, VEC columns a thread at a time. */
template <typename T, int VEC>
__global__ void __launch_bounds__(COMBINE_THREADS) combine_kernel(const expert_combine a)
{
    using V = vec<T, VEC>;
    int row = blockIdx.x;

    pdl_wait();
    pdl_release();
    bool live = !a.n_live || row < *a.n_live;
    T *y = (T *)a.y + row * a.y_stride;
    float factor = shared_factor<T>(a, row, live);
    for (int i = threadIdx.x * VEC; i < a.hidden; i += COMBINE_THREADS * VEC) {
        float sum[VEC];
        V out, was = {};
        pair_sum<T, VEC>(sum, a, row, live, factor, i);
        if (a.adds) {
            was = *(const V *)(y + i);
        }
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            out.v[j] = from_float<T>(a.adds ? to_float(was.v[j]) + sum[j] : sum[j]);
        }
        *(V *)(y + i) = out;
    }
}

/* The same with y += the sum and its norm. */
template <typename T, int VEC>
__global__ void __launch_bounds__(COMBINE_THREADS) combine_norm_kernel(const expert_combine a)
{
    int row = blockIdx.x;
    vec<T, VEC> weight[COMBINE_KEPT];

    norm_fetch<T, VEC, COMBINE_KEPT>(weight, a.norm, a.hidden);
    pdl_wait();
    pdl_release();
    bool live = !a.n_live || row < *a.n_live;
    float factor = shared_factor<T>(a, row, live);
    norm_row<T, VEC, COMBINE_KEPT>(
        (T *)a.h + row * a.h_stride, (T *)a.y + row * a.y_stride, weight, a.norm, a.hidden, true,
        [&](int, int i, float(&sum)[VEC]) { pair_sum<T, VEC>(sum, a, row, live, factor, i); });
}

} // namespace

extern "C" void launch_expert_route(const struct expert_route *a, const struct expert_lists *l,
                                    const struct expert_quantise *q, cudaStream_t stream)
{
    if (a->n <= 64) {
        route<2>(*a, *l, q, stream);
    } else if (a->n <= 128) {
        route<4>(*a, *l, q, stream);
    } else if (a->n <= 256) {
        route<8>(*a, *l, q, stream);
    } else if (a->n <= 512) {
        route<16>(*a, *l, q, stream);
    } else {
        route<EXPERT_MOST / 32>(*a, *l, q, stream);
    }
}

extern "C" void launch_expert_combine(const struct expert_combine *a, cudaStream_t stream)
{
    bool wide = a->hidden % 8 == 0 && a->y_stride % 8 == 0 && a->pairs_stride % 8 == 0 &&
                a->shared_stride % 8 == 0;

    DISPATCH_TYPE(a->type, {
        constexpr int VEC = 16 / (int)sizeof(T);
        if (a->h) {
            launch(combine_norm_kernel<T, VEC>, dim3((unsigned)a->rows), dim3(COMBINE_THREADS), 0,
                   stream, *a);
        } else if (wide) {
            launch(combine_kernel<T, VEC>, dim3((unsigned)a->rows), dim3(COMBINE_THREADS), 0,
                   stream, *a);
        } else {
            launch(combine_kernel<T, 1>, dim3((unsigned)a->rows), dim3(COMBINE_THREADS), 0, stream,
                   *a);
        }
    });
}
