/* Experts of a few rows, in three launches (experts.h): the router's products; up,
 * whose blocks each choose the row's experts anew, in place of a launch that does;
 * down with the weighted sum. Nothing is shared among rows, so an expert that two rows
 * choose is read twice, the second time from the cache.
 *
 * A warp takes one row of weights (gated: two; of down: one of each chosen expert) and
 * has many accesses on their way before it uses the first.
 */
#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/experts/route.cuh"

namespace
{

enum { WARPS = 8, ROUTER_WARPS = 4, VEC = 8, AHEAD = 8, DOWN_AHEAD = 12 };

template <typename T> using vector = vec<T, VEC>;

template <typename T>
__device__ __forceinline__ float dot(const vector<T> &a, const vector<T> &b, float sum)
{
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        sum = fmaf(to_float(a.v[i]), to_float(b.v[i]), sum);
    }
    return sum;
}

/* AHEAD vectors of a row of k columns from column `at` on, 32 lanes apart; those past
 * the end are of its beginning. */
template <typename T>
__device__ __forceinline__ void load_row(vector<T> (&v)[AHEAD], const T *row, int at, int k)
{
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        int c = at + i * 32 * VEC;
        v[i] = *(const vector<T> *)(row + (c < k ? c : 0));
    }
}

/* A warp multiplies an expert's row of the router with a row of x; the grid is
 * [n / ROUTER_WARPS, rows]. Its first columns are on their way before the launch ahead
 * has ended. */
template <typename T>
__global__ void __launch_bounds__(ROUTER_WARPS * 32)
    router_kernel(const __grid_constant__ expert_few a)
{
    int lane = threadIdx.x & 31, e = blockIdx.x * ROUTER_WARPS + (threadIdx.x >> 5), k = a.up.k;
    const T *x = (const T *)a.up.x + blockIdx.y * a.up.x_stride;
    float sum = 0.0f;
    vector<T> w[AHEAD];

    if (e >= a.route.n) {
        return;
    }
    const T *row = (const T *)a.router + e * a.router_stride;
    load_row(w, row, lane * VEC, k);
    pdl_wait();
    pdl_release();
    for (int at = lane * VEC; at < k; at += 32 * VEC * AHEAD) {
        if (at >= 32 * VEC * AHEAD) {
            load_row(w, row, at, k);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int c = at + i * 32 * VEC;
            if (c < k) {
                sum = dot(w[i], *(const vector<T> *)(x + c), sum);
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        float bias = a.router_bias ? to_float(((const T *)a.router_bias)[e]) : 0.0f;
        ((float *)a.route.scores)[blockIdx.y * a.route.scores_stride + e] = sum + bias;
    }
}

/* The grid is [width / WARPS, pairs]. */
template <typename T, int PER>
__global__ void __launch_bounds__(WARPS * 32)
    up_kernel(const __grid_constant__ expert_few a, const expert_lists l)
{
    __shared__ int chosen;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = blockIdx.y, top = a.route.top;
    int row = pair / top, column = blockIdx.x * WARPS + warp, k = a.up.k;

    pdl_wait();
    pdl_release();
    if (a.route.n_live && row >= *a.route.n_live) {
        return;
    }
    if (warp == 0) {
        int expert;
        float weight;
        route_row<PER>(a.route, row, lane, &expert, &weight);
        if (lane == pair % top) {
            chosen = held_place(a.route, expert);
            if (blockIdx.x == 0) {
                count_row(a.route, expert);
                l.expert[pair] = chosen;
                l.weight[pair] = chosen < 0 ? 0.0f : weight;
            }
        }
    }
    __syncthreads();
    if (column >= a.up.width || chosen < 0) {
        return;
    }
    int64_t first = (int64_t)chosen * 2 * a.up.width + column;
    const T *gate = (const T *)a.up.w + first * a.up.w_stride, *x, *up;
    const T *bias = (const T *)a.up.bias + first;
    up = gate + a.up.width * a.up.w_stride;
    x = (const T *)a.up.x + row * a.up.x_stride;
    float g = 0.0f, u = 0.0f;
    for (int at = lane * VEC; at < k; at += 32 * VEC * AHEAD) {
        vector<T> v[AHEAD], w[AHEAD];
        load_row(v, gate, at, k);
        load_row(w, up, at, k);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int c = at + i * 32 * VEC;
            if (c < k) {
                vector<T> of = *(const vector<T> *)(x + c);
                g = dot(v[i], of, g);
                u = dot(w[i], of, u);
            }
        }
    }
    g = warp_sum(g);
    u = warp_sum(u);
    if (lane == 0) {
        g += a.up.bias ? to_float(bias[0]) : 0.0f;
        u += a.up.bias ? to_float(bias[a.up.width]) : 0.0f;
        ((T *)a.up.out)[pair * a.up.out_stride + column] =
            from_float<T>(expert_gate(g, u, a.up.act, a.up.limit));
    }
}

/* The grid is [hidden / WARPS, rows]: a warp makes one value of y. Task j of a lane is
 * the j-th vector of the chosen experts' rows, expert after expert. */
template <typename T>
__global__ void __launch_bounds__(WARPS * 32)
    down_kernel(const __grid_constant__ expert_few a, const expert_lists l)
{
    int lane = threadIdx.x & 31, column = blockIdx.x * WARPS + (threadIdx.x >> 5), row = blockIdx.y;
    int k = a.down.k, steps = (k + 32 * VEC - 1) / (32 * VEC), n = steps * a.route.top;
    float sum = 0.0f;

    pdl_wait();
    pdl_release();
    if (column >= a.down.width) {
        return;
    }
    bool live = !a.route.n_live || row < *a.route.n_live;
    int pair = row * a.route.top;
    int mine = lane < a.route.top && live ? max(l.expert[pair + lane], 0) : 0;
    float weight = lane < a.route.top && live ? l.weight[pair + lane] : 0.0f;
    if (a.down.bias && live && lane < a.route.top) {
        sum = weight * to_float(((const T *)a.down.bias)[(int64_t)mine * a.down.width + column]);
    }
    for (int first = 0; first < n && live; first += DOWN_AHEAD) {
        vector<T> w[DOWN_AHEAD];
#pragma unroll
        for (int i = 0; i < DOWN_AHEAD; i++) {
            int j = min(first + i, n - 1), c = j % steps * 32 * VEC + lane * VEC;
            int64_t expert = __shfl_sync(ROUTE_LANES, mine, j / steps);
            w[i] = *(const vector<T> *)((const T *)a.down.w +
                                        (expert * a.down.width + column) * a.down.w_stride +
                                        (c < k ? c : 0));
        }
#pragma unroll
        for (int i = 0; i < DOWN_AHEAD; i++) {
            int j = first + i, at = min(j / steps, a.route.top - 1);
            int c = j % steps * 32 * VEC + lane * VEC;
            float share = __shfl_sync(ROUTE_LANES, weight, at);
            if (j < n && c < k && share != 0.0f) { /* else it is not held here */
                const T *act = (const T *)a.down.x + (pair + at) * a.down.x_stride;
                sum += share * dot(w[i], *(const vector<T> *)(act + c), 0.0f);
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        T *y = (T *)a.y + row * a.y_stride + column;
        *y = from_float<T>(a.adds ? to_float(*y) + sum : sum);
    }
}

template <typename T> void run_router(const expert_few &a, cudaStream_t stream)
{
    launch(router_kernel<T>,
           dim3((unsigned)(a.route.n + ROUTER_WARPS - 1) / ROUTER_WARPS, (unsigned)a.route.rows),
           dim3(ROUTER_WARPS * 32), 0, stream, a);
}

template <typename T> void run_up(const expert_few &a, const expert_lists &l, cudaStream_t stream)
{
    dim3 grid((unsigned)(a.up.width + WARPS - 1) / WARPS,
              (unsigned)a.route.rows * (unsigned)a.route.top);

    launch(a.route.n <= 128   ? up_kernel<T, 4>
           : a.route.n <= 256 ? up_kernel<T, 8>
                              : up_kernel<T, 16>,
           grid, dim3(WARPS * 32), 0, stream, a, l);
}

template <typename T> void run_down(const expert_few &a, const expert_lists &l, cudaStream_t stream)
{
    dim3 grid((unsigned)(a.down.width + WARPS - 1) / WARPS, (unsigned)a.route.rows);

    launch(down_kernel<T>, grid, dim3(WARPS * 32), 0, stream, a, l);
}

} // namespace

extern "C" bool launch_expert_router(const struct expert_few *a, cudaStream_t stream)
{
    const struct expert_product *up = &a->up;

    if (a->route.rows > EXPERT_ROUTER_ROWS || up->type == T_F32 || up->k % VEC ||
        up->x_stride % VEC || a->router_stride % VEC || (uintptr_t)up->x % 16) {
        return false;
    }
    if (up->type == T_F16) {
        run_router<__half>(*a, stream);
    } else {
        run_router<__nv_bfloat16>(*a, stream);
    }
    return true;
}

extern "C" bool launch_expert_few(const struct expert_few *a, const struct expert_lists *l,
                                  cudaStream_t stream)
{
    const struct expert_product *up = &a->up, *down = &a->down;

    if (a->route.rows > EXPERT_FEW_ROWS || a->route.n > EXPERT_FEW_EXPERTS || down->k % VEC ||
        up->w_stride % VEC || down->x_stride % VEC || down->w_stride % VEC ||
        !launch_expert_router(a, stream)) {
        return false;
    }
    if (up->type == T_F16) {
        run_up<__half>(*a, *l, stream);
    } else {
        run_up<__nv_bfloat16>(*a, *l, stream);
    }
    return true;
}

extern "C" void launch_expert_down(const struct expert_few *a, const struct expert_lists *l,
                                   cudaStream_t stream)
{
    if (a->up.type == T_F16) {
        run_down<__half>(*a, *l, stream);
    } else {
        run_down<__nv_bfloat16>(*a, *l, stream);
    }
}
