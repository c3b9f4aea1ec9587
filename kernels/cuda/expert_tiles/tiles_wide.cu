/* Products of experts with many rows each (experts.h), by the tiles of
 * gemm/tiles_sm90.cuh: 128 of the rows that chose an expert times 256 of its weight
 * rows; with a gate 128 of the gate's and the 128 that they gate. The two blocks of a
 * cluster share the weights, of which each loads half for both, and divide a tile of
 * the list, of at most 256 rows.
 *
 * The producer warpgroup gathers: its first thread has the weights copied as tensors,
 * and every thread copies 16 bytes of eight rows, swizzled by hand. These copies arrive
 * at the stage's barrier by themselves. They are ordinary accesses to shared memory, so
 * the consumers fence them off from what the matrix instructions read. Blocks are
 * persistent and walk the list of tiles times blocks of weight rows, the latter
 * innermost: neighbours read the same rows of x.
 */
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/expert_tiles/gather.cuh"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/experts/gate.cuh"
#include "kernels/cuda/gemm/tiles_sm90.cuh"

namespace
{

using namespace tiles;

enum { CLUSTER = 2, GATHERERS = 128, HALF = COLUMNS / 2 };

/* Stages by which the first warpgroup is ahead of the second, so that one multiplies
 * while the other stores. */
enum { LEAD = 2 };

/* What a block does in turn: some pairs of an expert, and a block of columns. */
struct work {
    int expert, n;       /* pairs of this block, at most ROWS; 0: none */
    const int32_t *list; /* the pairs */
    int column;          /* of out */
};

#if HAS_WGMMA

/* The share of the cluster's block `rank`: with few pairs each takes 64. */
__device__ __forceinline__ work work_of(const expert_lists &l, int i, int n_columns, int width,
                                        int rank)
{
    int4 t = __ldg((const int4 *)l.tile + i / n_columns);
    int share = t.z > ROWS ? ROWS : ROWS / 2, first = rank * share;

    return {t.x, max(0, min(share, t.z - first)), l.list + (int64_t)t.x * l.cap + t.y + first,
            i % n_columns * width};
}

/* The list's entries of rows first, first + 16 and so on; any where there is none. */
template <int N>
__device__ __forceinline__ void load_pairs(int32_t (&pair)[N], const work &k, int first)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        int r = first + j * 16;
        pair[j] = r < k.n ? k.list[r] : 0;
    }
}

/* A tile's work and rows are read while the one before it is multiplied. */
template <typename T, bool GATED>
__device__ __forceinline__ void produce(const CUtensorMap *w, const expert_product &a,
                                        const expert_lists &l, uint32_t base, int n_columns)
{
    constexpr int CHUNKS = ROWS / 16, WIDTH = GATED ? HALF : COLUMNS; /* 8 threads copy a row */
    int t = threadIdx.x & 127, chunk = t & 7, r0 = t >> 3, n = l.total[0] * n_columns;
    int rank = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER, i = blockIdx.x / CLUSTER;
    uint32_t to = r0 * 128 + ((chunk ^ (r0 & 7)) << 4);
    int32_t row[CHUNKS], pair[CHUNKS];
    ring r = {base, 0, 1};

    if (n == 0) {
        return;
    }
    work next = work_of(l, min(i, n - 1), n_columns, WIDTH, rank);
    load_pairs(pair, next, r0);
    for (; i < n; i += clusters) {
        work k = next;
        int first = k.expert * a.width * (GATED ? 2 : 1) + k.column +
                    (rank == 0 ? 0
                     : GATED   ? a.width
                               : HALF);
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            row[j] = pair[j] / a.divide;
        }
        next = work_of(l, min(i + clusters, n - 1), n_columns, WIDTH, rank);
        load_pairs(pair, next, r0);
        for (int s = 0; s < a.k / DEPTH; s++, r.next()) {
            barrier_wait(r.empty(), r.phase); /* holds at once in the ring's first round */
            if (t == 0) {
                barrier_expect(r.full(), W_BYTES);
                tensor_copy_to(r.at() + X_BYTES + rank * (W_BYTES / 2), w, s * DEPTH, first,
                               r.full(), (1 << CLUSTER) - 1);
            }
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                if (r0 + j * 16 < k.n) {
                    copy_chunk(r.at() + to + j * 16 * 128,
                               (const T *)a.x + row[j] * a.x_stride + s * DEPTH + chunk * 8);
                }
            }
            random_delay();
            arrive_behind_copies(r.full());
        }
    }
    finish_copies();
}

/* Stores 64 columns of the warpgroup's rows, n of them, from its panel. */
template <typename T>
__device__ __forceinline__ void store_rows(const char *panel, const expert_product &a,
                                           const int32_t (&pair)[4], int n, int column)
{
    int chunk = threadIdx.x & 7, r0 = threadIdx.x >> 3 & 15;

#pragma unroll
    for (int j = 0; j < 4; j++) {
        int r = r0 + j * 16;
        if (r < n) {
            uint4 v = *(const uint4 *)(panel + r * 128 + ((chunk ^ (r & 7)) << 4));
            *(uint4 *)((T *)a.out + pair[j] * a.out_stride + column + chunk * 8) = v;
        }
    }
}

/* ACT: the activation, as a constant to keep the code short; A_NONE: the product's. */
template <typename T, bool GATED, int ACT>
__device__ __forceinline__ void finish(float (&d)[COLUMNS / 2], const expert_product &a,
                                       const work &k, const int32_t (&pair)[4], char *panels,
                                       uint32_t panels_at, int group)
{
    int64_t first = (int64_t)k.expert * a.width * (GATED ? 2 : 1) + k.column;
    const T *bias = (const T *)a.bias + first + (threadIdx.x & 3) * 2;

#pragma unroll
    for (int p = 0; p < (GATED ? HALF : COLUMNS) / 64; p++) {
        if (k.column + p * 64 >= a.width) {
            break;
        }
        fill_panel<T>(panels_at + p % PANELS * PANEL, p, [&](int j, int e) {
            float v = d[j * 4 + e], up = GATED ? d[(j + 16) * 4 + e] : 0.0f;
            if (a.bias) {
                v += to_float(bias[j * 8 + (e & 1)]);
                up += GATED ? to_float(bias[a.width + j * 8 + (e & 1)]) : 0.0f;
            }
            return !GATED          ? v
                   : ACT == A_NONE ? expert_gate(v, up, a.act, a.limit)
                                   : activate(v, ACT) * up;
        });
        sync_group(group);
        store_rows<T>(panels + p % PANELS * PANEL, a, pair, k.n - group * 64, k.column + p * 64);
    }
    sync_group(group); /* the first panel is read */
}

template <typename T, bool GATED, int ACT>
__device__ __forceinline__ void consume(const expert_product &a, const expert_lists &l, char *ring0,
                                        uint32_t base, int n_columns)
{
    constexpr int WIDTH = GATED ? HALF : COLUMNS;
    int group = threadIdx.x >> 7, n = l.total[0] * n_columns, steps = a.k / DEPTH;
    int rank = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER, i = blockIdx.x / CLUSTER;
    uint32_t offset = STAGES * STAGE + group * PANELS * PANEL;
    ring r = {base, 0, 0};

    if (n == 0) {
        return;
    }
    work next = work_of(l, min(i, n - 1), n_columns, WIDTH, rank);
    if (group > 0 && i < n && steps > LEAD) { /* the other warpgroup goes ahead */
        barrier_wait(base + BARRIERS + LEAD * 8, 0);
    }
    for (; i < n; i += clusters) {
        work k = next;
        int32_t pair[4];
        float d[COLUMNS / 2];
        load_pairs(pair, k, group * 64 + (threadIdx.x >> 3 & 15));
        next = work_of(l, min(i + clusters, n - 1), n_columns, WIDTH, rank);
        if (k.n <= group * 64) {
            pass_over<CLUSTER>(r, steps, group);
            continue;
        }
        multiply<T, CLUSTER, true>(d, r, steps, group);
        finish<T, GATED, ACT>(d, a, k, pair, ring0 + offset, base + offset, group);
    }
}

#endif

template <typename T, bool GATED, int ACT>
__global__ void __launch_bounds__(HAS_WGMMA ? THREADS : 32, 1)
    wide_tiles_kernel(const __grid_constant__ CUtensorMap w,
                      const __grid_constant__ expert_product a,
                      const __grid_constant__ expert_lists l)
{
#if HAS_WGMMA
    extern __shared__ char raw[];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    block_cluster cluster;

    if (threadIdx.x == 0) {
        for (ring r = {base, 0, 0}; r.phase == 0; r.next()) {
            barrier_init(r.full(), 1 + GATHERERS);
            barrier_init(r.empty(), GROUPS * CLUSTER);
        }
        barrier_init_fence();
    }
    cluster.sync();
    pdl_wait();
    pdl_release();
    int width = GATED ? HALF : COLUMNS, n_columns = (a.width + width - 1) / width;
    if (threadIdx.x >= GROUPS * 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        produce<T, GATED>(&w, a, l, base, n_columns);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume<T, GATED, ACT>(a, l, raw + (base - shared_address(raw)), base, n_columns);
    }
    __syncwarp();
    cluster.sync(); /* the other block may still write and arrive here */
#endif
}

/* ---- host ---- */

template <typename T, bool GATED, int ACT>
bool run(const expert_product &a, const expert_lists &l, int n_blocks, cudaStream_t stream)
{
    auto kernel = wide_tiles_kernel<T, GATED, ACT>;
    static bool allowed = allow_shared(kernel, BYTES);
    CUtensorMap w;

    if (!allowed || !tensor_map_16(&w, a.type, a.w, (int64_t)a.n * a.width * (GATED ? 2 : 1), a.k,
                                   a.w_stride, HALF)) {
        return false;
    }
    return launch_clusters(CLUSTER, kernel, dim3((unsigned)(n_blocks / CLUSTER * CLUSTER)),
                           dim3(THREADS), BYTES, stream, w, a, l);
}

template <typename T>
bool run_type(const expert_product &a, const expert_lists &l, int n_blocks, cudaStream_t stream)
{
    if (!a.gated) {
        return run<T, false, A_NONE>(a, l, n_blocks, stream);
    }
    return a.act == A_SILU && a.limit <= 0 ? run<T, true, A_SILU>(a, l, n_blocks, stream)
                                           : run<T, true, A_NONE>(a, l, n_blocks, stream);
}

} // namespace

extern "C" bool expert_wide_fits(void)
{
    return cuda_shared_limit() >= BYTES;
}

extern "C" bool launch_expert_wide(const struct expert_product *a, const struct expert_lists *l,
                                   int32_t n_blocks, cudaStream_t stream)
{
    return a->type == T_F16 ? run_type<__half>(*a, *l, n_blocks, stream)
                            : run_type<__nv_bfloat16>(*a, *l, n_blocks, stream);
}
