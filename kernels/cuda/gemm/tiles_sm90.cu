/* Products of many rows on Hopper (tiles.h): a persistent grid of tiles of 128 x 256
 * (tiles_sm90.cuh).
 *
 * The two blocks of a cluster multiply neighbouring tiles of rows with the same
 * weights: each loads half of these, for both. With a gate, one half is rows of the
 * gate and the other the rows that it gates, so a thread has both of a result. Results
 * leave by tensor stores, 64 columns at a time, while the producer fills the ring for
 * the next tile.
 */
#include "kernels/cuda/gemm/tiles.h"

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/gemm/tiles_sm90.cuh"

namespace
{

using namespace tiles;

#if HAS_WGMMA

template <int CLUSTER, bool GATED>
__device__ __forceinline__ void produce(const CUtensorMap *x, const CUtensorMap *w, const walk &k,
                                        uint32_t base, int steps, int gate_rows)
{
    constexpr int WIDTH = GATED ? COLUMNS / 2 : COLUMNS, HALF = COLUMNS / 2;
    int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, n = k.n_pairs * k.n_columns;
    ring r = {base, 0, 1};

    for (int i = blockIdx.x / CLUSTER; i < n; i += gridDim.x / CLUSTER) {
        tile t = tile_of<CLUSTER, WIDTH, ROWS>(k, i, rank);
        int second = t.column + (GATED ? gate_rows : HALF);
        for (int s = 0; s < steps; s++, r.next()) {
            barrier_wait(r.empty(), r.phase); /* holds at once in the ring's first round */
            random_delay();
            barrier_expect(r.full(), STAGE);
            tensor_copy(r.at(), x, s * DEPTH, t.row, r.full());
            uint32_t to = r.at() + X_BYTES;
            if (CLUSTER > 1) {
                tensor_copy_to(to + rank * (W_BYTES / 2), w, s * DEPTH, rank ? second : t.column,
                               r.full(), 3);
            } else {
                tensor_copy(to, w, s * DEPTH, t.column, r.full());
                tensor_copy(to + W_BYTES / 2, w, s * DEPTH, second, r.full());
            }
        }
    }
}

template <typename T, int CLUSTER, bool GATED, int ACT>
__device__ __forceinline__ void consume(const CUtensorMap *out, const walk &k, uint32_t base,
                                        int steps)
{
    constexpr int WIDTH = GATED ? COLUMNS / 2 : COLUMNS;
    int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, n = k.n_pairs * k.n_columns;
    int group = threadIdx.x >> 7;
    uint32_t result = base + STAGES * STAGE + group * PANELS * PANEL;
    bool first = (threadIdx.x & 127) == 0;
    ring r = {base, 0, 0};

    for (int i = blockIdx.x / CLUSTER; i < n; i += gridDim.x / CLUSTER) {
        float d[COLUMNS / 2];
        multiply<T, CLUSTER>(d, r, steps, group);
        tile t = tile_of<CLUSTER, WIDTH, ROWS>(k, i, rank);
#pragma unroll
        for (int p = 0; p < WIDTH / 64; p++) {
            uint32_t panel = result + p % PANELS * PANEL;
            if (first) {
                store_wait_read<PANELS - 1>();
            }
            sync_group(group);
            fill_panel<T>(panel, p, [&](int j, int e) {
                float v = d[j * 4 + e];
                return GATED ? activate(v, ACT) * d[(j + 16) * 4 + e] : v;
            });
            proxy_fence();
            sync_group(group);
            if (first) {
                tensor_store(out, t.column + p * 64, t.row + group * 64, panel);
                store_commit();
            }
        }
    }
    if (first) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

#endif

template <typename T, int CLUSTER, bool GATED, int ACT>
__global__ void __launch_bounds__(HAS_WGMMA ? THREADS : 32, 1)
    dense_tiles_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap out, const walk k, int steps,
                       int gate_rows)
{
#if HAS_WGMMA
    extern __shared__ char raw[];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    block_cluster cluster;

    if (threadIdx.x == 0) {
        for (ring r = {base, 0, 0}; r.phase == 0; r.next()) {
            barrier_init(r.full(), 1);
            barrier_init(r.empty(), GROUPS * CLUSTER);
        }
        barrier_init_fence();
    }
    if (CLUSTER > 1) {
        cluster.sync();
    } else {
        __syncthreads();
    }
    pdl_wait();
    pdl_release();
    if (threadIdx.x >= GROUPS * 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == GROUPS * 128) {
            produce<CLUSTER, GATED>(&x, &w, k, base, steps, gate_rows);
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<T, CLUSTER, GATED, ACT>(&out, k, base, steps);
    }
    if (CLUSTER > 1) {
        cluster.sync(); /* the other block may still write and arrive here */
    }
#endif
}

/* ---- host ---- */

/* Whether the device runs code with wgmma: the kernel of other code has blocks of a
 * warp. */
bool has_wgmma(void)
{
    static int found = -1;
    cudaFuncAttributes f;

    if (found < 0) {
        found = cudaFuncGetAttributes(&f, dense_tiles_kernel<__nv_bfloat16, 2, false, A_NONE>) ==
                    cudaSuccess &&
                f.maxThreadsPerBlock > 32;
        cudaGetLastError();
    }
    return found > 0;
}

template <typename T, int CLUSTER, bool GATED, int ACT>
bool run(const struct tiles_args &a, int32_t n_blocks, cudaStream_t stream)
{
    constexpr int WIDTH = GATED ? COLUMNS / 2 : COLUMNS;
    auto kernel = dense_tiles_kernel<T, CLUSTER, GATED, ACT>;
    static bool allowed = allow_shared(kernel, BYTES);
    int32_t n = GATED ? a.n / 2 : a.n;
    CUtensorMap x, w, out;

    if (!allowed || !tensor_map_16(&x, a.type, a.x, a.rows, a.k, a.x_stride, ROWS) ||
        !tensor_map_16(&w, a.type, a.w, a.n, a.k, a.w_stride, COLUMNS / 2) ||
        !tensor_map_16(&out, a.type, a.out, a.rows, n, a.out_stride, 64)) {
        return false;
    }
    walk k = {(a.rows + CLUSTER * ROWS - 1) / (CLUSTER * ROWS), (n + WIDTH - 1) / WIDTH,
              a.group > 0 ? a.group : 8};
    int blocks = min(n_blocks / CLUSTER, k.n_pairs * k.n_columns) * CLUSTER;
    return launch_clusters(CLUSTER, kernel, dim3((unsigned)blocks), dim3(THREADS), BYTES, stream, x,
                           w, out, k, (a.k + DEPTH - 1) / DEPTH, n);
}

template <typename T> bool run_type(const struct tiles_args &a, int32_t n, cudaStream_t stream)
{
    if (!a.gated) {
        return run<T, 2, false, A_NONE>(a, n, stream);
    }
    return a.act == A_SILU ? run<T, 2, true, A_SILU>(a, n, stream)
                           : run<T, 2, true, A_GELU_TANH>(a, n, stream);
}

} // namespace

extern "C" bool tiles_fit(const struct tiles_args *a)
{
    bool aligned = ((uintptr_t)a->x | (uintptr_t)a->w | (uintptr_t)a->out) % 16 == 0 &&
                   (a->x_stride | a->w_stride | a->out_stride) % 8 == 0;
    bool act = a->gated ? a->act == A_SILU || a->act == A_GELU_TANH : a->act == A_NONE;

    return (a->type == T_BF16 || a->type == T_F16) && aligned && act && a->rows > 0 && a->k > 0 &&
           (!a->gated || a->n % 2 == 0) && tiles_available() && cuda_shared_limit() >= BYTES;
}

extern "C" bool tiles_available(void)
{
    return has_wgmma() && tensor_map_encoder();
}

extern "C" bool launch_tiles(const struct tiles_args *a, int32_t n_blocks, cudaStream_t stream)
{
    if (!tiles_fit(a)) {
        return false;
    }
    return a->type == T_F16 ? run_type<__half>(*a, n_blocks, stream)
                            : run_type<__nv_bfloat16>(*a, n_blocks, stream);
}
