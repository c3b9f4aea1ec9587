/* From the choices of a call's rows to the lists of pairs and of tiles (experts.h), by
 * one block: the last one of those that choose. */
#ifndef QUIRE_KERNELS_CUDA_EXPERTS_LIST_CUH
#define QUIRE_KERNELS_CUDA_EXPERTS_LIST_CUH

#include "kernels/cuda/experts/route.cuh"

/* The sum of v over the block's THREADS threads up to this one, and in *all over all;
 * shared [32]. */
template <int THREADS> __device__ __forceinline__ int block_scan(int v, int *shared, int *all)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sum = v;

    for (int o = 1; o < 32; o <<= 1) {
        int before = __shfl_up_sync(ROUTE_LANES, sum, o);
        sum += lane >= o ? before : 0;
    }
    __syncthreads();
    if (lane == 31) {
        shared[warp] = sum;
    }
    __syncthreads();
    int of = lane < THREADS / 32 ? shared[lane] : 0, before = of;
    for (int o = 1; o < 32; o <<= 1) {
        int u = __shfl_up_sync(ROUTE_LANES, before, o);
        before += lane >= o ? u : 0;
    }
    *all = __shfl_sync(ROUTE_LANES, before, 31);
    return sum + __shfl_sync(ROUTE_LANES, before - of, warp);
}

/* Thread e lists the tiles of expert e, which has `count` pairs. */
template <int THREADS>
__device__ __forceinline__ void list_tiles(const expert_lists &l, int count, int *shared)
{
    int e = threadIdx.x, tiles = (count + l.tile_rows - 1) / l.tile_rows, n_tiles, n_active;
    int end = block_scan<THREADS>(tiles, shared, &n_tiles);
    int active = block_scan<THREADS>(count > 0, shared, &n_active);

    for (int i = 0; i < tiles; i++) {
        int first = i * l.tile_rows;
        expert_tile t = {e, first, min(l.tile_rows, count - first), 0};
        *(int4 *)(l.tile + end - tiles + i) = *(int4 *)&t;
    }
    if (count > 0) {
        l.active[active - 1] = e;
    }
    if (e == 0) {
        l.total[0] = n_tiles;
        l.total[1] = n_active;
    }
}

/* Counts the rows of this thread's expert if it is held here; those of others were
 * counted as they were routed. */
__device__ __forceinline__ void count_held(const expert_route &a, int rows)
{
    if (a.load && rows > 0 && threadIdx.x < a.held) {
        atomicAdd(a.load + a.first + threadIdx.x, rows);
    }
}

/* Whether this block is the last one of `n` to come here; what the others wrote before
 * is visible to it then. */
__device__ __forceinline__ bool comes_last(int32_t *counter, int n)
{
    __shared__ int last;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1) == n - 1;
        if (last) {
            *counter = 0;
        }
    }
    __syncthreads();
    __threadfence();
    return last;
}

/* Leaves an expert of a row and its weight, as lane `lane` of route_row has them. */
__device__ __forceinline__ void store_choice(const expert_route &a, const expert_lists &l, int row,
                                             int lane, int expert, float weight)
{
    int pair = row * (a.top + a.parts) + lane, at = held_place(a, expert);

    if (lane >= a.top) {
        return;
    }
    l.expert[pair] = at;
    l.weight[pair] = at < 0 ? 0.0f : weight;
    if (at < 0) {
        count_row(a, expert);
    }
}

/* Lists the pairs of `rows` rows, whose choices are stored, by one block of at least as
 * many threads as experts and parts. count [THREADS]: zeros; sums [32]. */
template <int THREADS>
__device__ __forceinline__ void list_rows(const expert_route &a, const expert_lists &l, int rows,
                                          int *count, int *sums)
{
    int each = a.top + a.parts, part = (int)threadIdx.x - a.held;

    __syncthreads();
    for (int pair = threadIdx.x; pair < rows * each; pair += THREADS) {
        int row = pair / each, i = pair - row * each;
        int at = i < a.top ? __ldcg(l.expert + pair) : a.held + i - a.top;
        if (at >= 0) {
            int place = i < a.top ? atomicAdd(count + at, 1) : row;
            l.list[(int64_t)at * l.cap + place] = pair;
        }
    }
    __syncthreads();
    int n = part >= 0 && part < a.parts ? rows : count[threadIdx.x];
    if (threadIdx.x < a.n + a.parts) {
        l.count[threadIdx.x] = n;
    }
    count_held(a, n);
    list_tiles<THREADS>(l, n, sums);
}

#endif
