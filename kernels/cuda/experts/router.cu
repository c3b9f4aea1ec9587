/* The router's product, the choice and the lists of up to EXPERT_PARTS_ROWS rows in one
 * launch (experts.h).
 *
 * A cluster takes 8 to 32 rows, and all experts: each of its blocks multiplies a share
 * of the columns, then adds up the shares of all for one to four rows of its own, and a
 * warp chooses for a row. Clusters are few enough to run at the same time. The last
 * block of the grid to be done lists. Clusters behind the routing ones quantise.
 *
 * Of the product, a warp has 16 experts as the rows of the matrix instruction and a
 * part of the block's columns. A lane has 8 neighbours of each 32 columns, of both
 * operands. Weights are on their way before the launch ahead has ended. Of more than
 * TILE * WARPS experts a warp has as many again, in a second turn.
 */
#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/expert_tiles/code_group.cuh"
#include "kernels/cuda/experts/list.cuh"

namespace
{

enum {
    CLUSTER = 8,
    WARPS = 16,
    THREADS = WARPS * 32,
    TILE = 16,        /* experts of a warp */
    GROUP = 32,       /* columns that the lanes of a row share */
    AHEAD = 4,        /* groups on their way at a time */
    MOST_SHARE = 4,   /* warps that divide the columns of the same experts */
    MOST_CHOICE = 512 /* experts */
};

/* Turns that the warps take for up to PER * 32 experts. */
template <int PER> constexpr int TURNS = (PER * 32 + TILE * WARPS - 1) / (TILE * WARPS);

/* TILES: of 8 rows each. */
template <int PER, int TILES> struct choose_shared {
    /* of the block's columns, by warp and turn */
    float part[TURNS<PER> * WARPS][TILES * 8][TILE];
    float score[TILES][PER * 32]; /* of the block's rows */
    int count[THREADS], sums[32];
};

/* The part of a warp: experts from tile * TILE on, columns of groups [at, end). With
 * more tiles than warps it has the columns of all. */
struct warp_part {
    int tiles, share, tile, at, end;

    __device__ __forceinline__ warp_part(int n, int k, int rank, int warp)
        : tiles((n + TILE - 1) / TILE), share(max(min(WARPS / tiles, (int)MOST_SHARE), 1)),
          tile(warp % tiles)
    {
        int groups = k / GROUP, first = groups * rank / CLUSTER;
        int part = warp / tiles, mine = groups * (rank + 1) / CLUSTER - first;

        at = first + mine * min(part, share) / share;
        end = first + mine * min(part + 1, share) / share;
    }
};

/* Eight columns of each of AHEAD groups of a row; those past the end are any. */
template <typename T>
__device__ __forceinline__ void load_groups(uint4 (&v)[AHEAD], const T *row, int at, int end)
{
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        v[i] = *(const uint4 *)(row + max(min(at + i, end - 1), 0) * GROUP);
    }
}

/* The warp's experts times the cluster's rows. */
template <typename T, int TILES>
__device__ __forceinline__ void multiply(float (&d)[TILES][4], const expert_few &a,
                                         const warp_part &p, int row0, int lane)
{
    uint4 low[AHEAD], high[AHEAD], x[AHEAD];
    int e = p.tile * TILE + (lane >> 2), column = (lane & 3) * 8, last = a.route.n - 1;
    const T *w0 = (const T *)a.router + min(e, last) * a.router_stride + column;
    const T *w1 = (const T *)a.router + min(e + 8, last) * a.router_stride + column;

    load_groups(low, w0, p.at, p.end);
    load_groups(high, w1, p.at, p.end);
    pdl_wait();
    pdl_release();
    for (int at = p.at; at < p.end; at += AHEAD) {
        if (at > p.at) {
            load_groups(low, w0, at, p.end);
            load_groups(high, w1, at, p.end);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            int row = min(row0 + t * 8 + (lane >> 2), a.route.rows - 1);
            load_groups(x, (const T *)a.up.x + row * a.up.x_stride + column, at, p.end);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                uint32_t first[4] = {low[i].x, high[i].x, low[i].y, high[i].y},
                         second[4] = {low[i].z, high[i].z, low[i].w, high[i].w};
                if (at + i < p.end) {
                    mma16816<T>(d[t], first, x[i].x, x[i].y);
                    mma16816<T>(d[t], second, x[i].z, x[i].w);
                }
            }
        }
    }
}

/* The scores of the block's rows, from the parts of all blocks of the cluster. */
template <typename T, int PER, int TILES>
__device__ __forceinline__ void add_parts(choose_shared<PER, TILES> &s,
                                          const block_cluster &cluster, const expert_few &a,
                                          const warp_part &p, int rank)
{
#pragma unroll
    for (int at0 = 0; at0 < TILES * PER * 32; at0 += THREADS) {
        int t = (at0 + threadIdx.x) / (PER * 32), e = (at0 + threadIdx.x) % (PER * 32);
        if (t >= TILES || e >= a.route.n) {
            continue;
        }
        float sum = a.router_bias ? to_float(((const T *)a.router_bias)[e]) : 0.0f;
        for (int i = 0; i < p.share; i++) {
            float *at = &s.part[i * p.tiles + e / TILE][t * 8 + rank][e % TILE];
#pragma unroll
            for (int c = 0; c < CLUSTER; c++) {
                sum += *cluster.of(at, c);
            }
        }
        s.score[t][e] = sum;
    }
}

/* Chooses for a row by one warp. */
template <int PER>
__device__ __forceinline__ void choose_row(const expert_route &a, const expert_lists &l,
                                           const float *scores, int row, int lane)
{
    expert_route of = a;
    int e;
    float weight;

    of.scores = scores;
    route_row<PER>(of, 0, lane, &e, &weight);
    store_choice(a, l, row, lane, e, weight);
}

/* The grid is [clusters], the first n_route of which route. */
template <typename T, int PER, int TILES>
__global__ void __launch_bounds__(THREADS)
    choose_kernel(const __grid_constant__ expert_few a, const __grid_constant__ expert_lists l,
                  const expert_quantise q, int n_route)
{
    __shared__ choose_shared<PER, TILES> s;
    block_cluster cluster;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = (int)cluster.rank();
    int block = blockIdx.x - n_route * CLUSTER, row0 = blockIdx.x / CLUSTER * TILES * 8;

    if (block >= 0) {
        pdl_wait();
        pdl_release();
        quantise_groups(q, (block * THREADS + threadIdx.x) / 16,
                        (gridDim.x - n_route * CLUSTER) * (THREADS / 16));
        return;
    }
    warp_part p(a.route.n, a.up.k, rank, warp);
    s.count[threadIdx.x] = 0;
#pragma unroll 1
    for (int turn = 0; turn < TURNS<PER>; turn++) {
        float d[TILES][4] = {};
        multiply<T, TILES>(d, a, p, row0, lane);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s.part[turn * WARPS + warp][t * 8 + (lane & 3) * 2 + (i & 1)]
                      [(lane >> 2) + i / 2 * 8] = d[t][i];
            }
        }
        p.tile += WARPS;
    }
    random_delay();
    cluster.sync();
    add_parts<T, PER, TILES>(s, cluster, a, p, rank);
    cluster.arrive(); /* this block has read the others */
    __syncthreads();
    int rows = live_rows(a.route), row = row0 + warp * 8 + rank;
    if (warp < TILES && row < rows) {
        choose_row<PER>(a.route, l, s.score[warp], row, lane);
    }
    if (comes_last(a.route.counter, n_route * CLUSTER)) {
        list_rows<THREADS>(a.route, l, rows, s.count, s.sums);
    }
    cluster.wait(); /* all have read this one */
}

template <typename T, int PER, int TILES>
void run(const expert_few &a, const expert_lists &l, const expert_quantise *q, cudaStream_t stream)
{
    static const expert_quantise none = {};
    int n_route = (a.route.rows + TILES * 8 - 1) / (TILES * 8);
    int groups = q ? q->rows * (q->cols / EXPERT_CODES_K) : 0, each = CLUSTER * (THREADS / 16);

    launch_clusters(CLUSTER, choose_kernel<T, PER, TILES>,
                    dim3((unsigned)(n_route + (groups + each - 1) / each) * CLUSTER), dim3(THREADS),
                    0, stream, a, l, q ? *q : none, n_route);
}

/* MOST: tiles of a cluster at most. */
template <typename T, int PER, int MOST>
void run_rows(const expert_few &a, const expert_lists &l, const expert_quantise *q,
              cudaStream_t stream)
{
    constexpr int FULL = 64; /* rows of as many clusters of one tile as run at once */

    if (a.route.rows <= FULL) {
        run<T, PER, 1>(a, l, q, stream);
    } else if (a.route.rows <= 2 * FULL || MOST == 2) {
        run<T, PER, 2>(a, l, q, stream);
    } else {
        run<T, PER, MOST>(a, l, q, stream);
    }
}

template <typename T>
void run_type(const expert_few &a, const expert_lists &l, const expert_quantise *q,
              cudaStream_t stream)
{
    if (a.route.n <= 128) {
        run_rows<T, 4, 4>(a, l, q, stream);
    } else if (a.route.n <= 256) {
        run_rows<T, 8, 4>(a, l, q, stream);
    } else { /* the parts of 32 rows do not fit */
        run_rows<T, 16, 2>(a, l, q, stream);
    }
}

} // namespace

extern "C" bool launch_expert_choose(const struct expert_few *a, const struct expert_lists *l,
                                     const struct expert_quantise *q, cudaStream_t stream)
{
    const struct expert_product *up = &a->up;
    bool fits = cuda_code_version() >= 90 && a->route.counter &&
                a->route.rows <= EXPERT_PARTS_ROWS && a->route.n <= MOST_CHOICE &&
                a->route.n + a->route.parts <= THREADS && up->type != T_F32 && up->k % GROUP == 0 &&
                up->x_stride % 8 == 0 && a->router_stride % 8 == 0 && (uintptr_t)up->x % 16 == 0 &&
                (uintptr_t)a->router % 16 == 0;

    if (fits && up->type == T_F16) {
        run_type<__half>(*a, *l, q, stream);
    } else if (fits) {
        run_type<__nv_bfloat16>(*a, *l, q, stream);
    }
    return fits;
}
