/* Products of many rows of e4m3 codes on Hopper (tiles.h): a persistent grid of tiles
 * of 256 rows of x times 128 rows of weights, in stages of 128 columns of codes.
 *
 * Hopper adds up products of e4m3 with about 14 bits, which deep sums would lose digits
 * to. So every stage is summed by itself, and its sums are added in float32: that needs
 * a second set of accumulators, and a warpgroup has its 128 rows in two halves of 64,
 * one of which is multiplied at a time. While one warpgroup adds, the other multiplies.
 *
 * Clusters, walk and stores are those of tiles_sm90.cu. The sum with a matrix that is
 * there already is made by the stores.
 */
#include "kernels/cuda/gemm/tiles.h"

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/gemm/tiles_sm90.cuh"
#include "kernels/cuda/gemm/wgmma_widths.cuh"

namespace
{

using tiles::tile;
using tiles::walk;

enum { PLAIN, SUM, GATED_SILU, GATED_GELU }; /* kinds of a product */
enum {
    ROWS = 256,
    COLUMNS = 128,
    DEPTH = 128, /* columns, and bytes, of a stage */
    HALF_ROWS = 64,
    X_BYTES = ROWS * DEPTH,
    W_BYTES = COLUMNS * DEPTH,
    CLUSTER = 2,
};
static_assert(X_BYTES + W_BYTES == tiles::STAGE, "the ring is that of tiles_sm90.cuh");

/* Columns of out that a tile makes. */
template <int KIND> constexpr int width_of = KIND >= GATED_SILU ? COLUMNS / 2 : COLUMNS;

#if HAS_WGMMA

using tiles::ring;

template <int KIND>
__device__ __forceinline__ void produce(const CUtensorMap *x, const CUtensorMap *w, const walk &k,
                                        uint32_t base, int steps, int gate_rows)
{
    constexpr int WIDTH = width_of<KIND>, HALF = COLUMNS / 2;
    int rank = blockIdx.x % CLUSTER, n = k.n_pairs * k.n_columns;
    ring r = {base, 0, 1};

    for (int i = blockIdx.x / CLUSTER; i < n; i += gridDim.x / CLUSTER) {
        tile t = tiles::tile_of<CLUSTER, WIDTH, ROWS>(k, i, rank);
        int row = rank ? t.column + (KIND >= GATED_SILU ? gate_rows : HALF) : t.column;
        for (int s = 0; s < steps; s++, r.next()) {
            barrier_wait(r.empty(), r.phase); /* holds at once in the ring's first round */
            random_delay();
            barrier_expect(r.full(), tiles::STAGE);
            tensor_copy(r.at(), x, s * DEPTH, t.row, r.full());
            tensor_copy_to(r.at() + X_BYTES + rank * (W_BYTES / 2), w, s * DEPTH, row, r.full(), 3);
        }
    }
}

/* sum [two halves of the warpgroup's rows][their columns] = the product over `steps`
 * stages, each summed by itself. */
__device__ __forceinline__ void multiply(float (&sum)[2][COLUMNS / 2], ring &r, int steps,
                                         int group)
{
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) {
        sum[0][i] = sum[1][i] = 0.0f;
    }
    for (int s = 0; s < steps; s++) {
        barrier_wait(r.full(), r.phase);
        uint64_t w = wgmma_descriptor(r.at() + X_BYTES);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint64_t x = wgmma_descriptor(r.at() + (group * 2 + h) * HALF_ROWS * DEPTH);
            float d[COLUMNS / 2];
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < DEPTH / 32; c++) {
                wgmma_width<COLUMNS>::run_e4m3(d, x + c * 2, w + c * 2, c > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            if (h == 1) {
                tiles::give_back<CLUSTER>(r.empty());
            }
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) {
                sum[h][i] += d[i];
            }
        }
        r.next();
    }
}

/* The scales of a tile. A lane has those of its rows of x, and of the columns it needs
 * those of 8 j + 2 (lane % 4) and the next for two j; the others are other lanes'. */
struct tile_scales {
    float row[2][2];
    float2 column[2];

    __device__ __forceinline__ void load(const float *of_x, const float *of_w, int first_row,
                                         int rows, int column0, int column1)
    {
        int lane = threadIdx.x & 31, g = lane >> 2;

#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int at = first_row + h * HALF_ROWS + g + i * 8;
                row[h][i] = at < rows ? __ldg(of_x + at) : 0.0f;
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int j = 2 * g + i, at = (j < 8 ? column0 + j * 8 : column1 + (j - 8) * 8);
            column[i] = __ldg((const float2 *)(of_w + at + (lane & 3) * 2));
        }
    }
    __device__ __forceinline__ float2 of_column(int j) const
    {
        int from = j / 2 * 4 + (threadIdx.x & 3);

        return make_float2(__shfl_sync(0xffffffffu, column[j & 1].x, from),
                           __shfl_sync(0xffffffffu, column[j & 1].y, from));
    }
};

/* Stores a box, or adds it to what is there. */
template <bool ADD>
__device__ __forceinline__ void store_box(const CUtensorMap *out, int column, int row,
                                          uint32_t from)
{
    if (ADD) {
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group "
                     "[%0, {%1, %2}], [%3];" ::"l"(out),
                     "r"(column), "r"(row), "r"(from)
                     : "memory");
    } else {
        tensor_store(out, column, row, from);
    }
    store_commit();
}

template <int KIND>
__device__ __forceinline__ void consume(const CUtensorMap *out, const float *x_scale,
                                        const float *w_scale, const walk &k, uint32_t base,
                                        int steps, int rows, int gate_rows)
{
    constexpr int WIDTH = width_of<KIND>, PANELS = WIDTH / 64;
    constexpr bool GATED = KIND >= GATED_SILU;
    int rank = blockIdx.x % CLUSTER, n = k.n_pairs * k.n_columns, group = threadIdx.x >> 7;
    int warp = threadIdx.x >> 5 & 3;
    uint32_t result = base + tiles::STAGES * tiles::STAGE + group * tiles::PANELS * tiles::PANEL;
    bool first = (threadIdx.x & 127) == 0;
    ring r = {base, 0, 0};

    for (int i = blockIdx.x / CLUSTER; i < n; i += gridDim.x / CLUSTER) {
        float sum[2][COLUMNS / 2];
        tile_scales scale;
        tile t = tiles::tile_of<CLUSTER, WIDTH, ROWS>(k, i, rank);
        int row = t.row + group * 2 * HALF_ROWS;
        scale.load(x_scale, w_scale, row + warp * 16, rows, t.column,
                   t.column + (GATED ? gate_rows : COLUMNS / 2));
        multiply(sum, r, steps, group);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            float2 f = scale.of_column(j);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sum[h][j * 4] *= f.x * scale.row[h][0], sum[h][j * 4 + 1] *= f.y * scale.row[h][0];
                sum[h][j * 4 + 2] *= f.x * scale.row[h][1];
                sum[h][j * 4 + 3] *= f.y * scale.row[h][1];
            }
        }
#pragma unroll
        for (int p = 0; p < 2 * PANELS; p++) {
            int h = p / PANELS;
            uint32_t panel = result + p % 2 * tiles::PANEL;
            if (first) {
                store_wait_read<tiles::PANELS - 1>();
            }
            tiles::sync_group(group);
            tiles::fill_panel<__nv_bfloat16>(panel, p % PANELS, [&](int j, int e) {
                float v = sum[h][j * 4 + e];
                return !GATED ? v
                              : activate(v, KIND == GATED_SILU ? A_SILU : A_GELU_TANH) *
                                    sum[h][(j + 8) * 4 + e];
            });
            proxy_fence();
            tiles::sync_group(group);
            if (first) {
                store_box<KIND == SUM>(out, t.column + p % PANELS * 64, row + h * HALF_ROWS, panel);
            }
        }
    }
    if (first) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

#endif

template <int KIND>
__global__ void __launch_bounds__(HAS_WGMMA ? tiles::THREADS : 32, 1)
    codes_tiles_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap out, const float *x_scale,
                       const float *w_scale, const walk k, int steps, int rows, int gate_rows)
{
#if HAS_WGMMA
    extern __shared__ char raw[];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    block_cluster cluster;

    if (threadIdx.x == 0) {
        for (ring r = {base, 0, 0}; r.phase == 0; r.next()) {
            barrier_init(r.full(), 1);
            barrier_init(r.empty(), tiles::GROUPS * CLUSTER);
        }
        barrier_init_fence();
    }
    cluster.sync();
    pdl_wait();
    pdl_release();
    if (threadIdx.x >= tiles::GROUPS * 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == tiles::GROUPS * 128) {
            produce<KIND>(&x, &w, k, base, steps, gate_rows);
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<KIND>(&out, x_scale, w_scale, k, base, steps, rows, gate_rows);
    }
    cluster.sync(); /* the other block may still write and arrive here */
#endif
}

/* ---- host ---- */

bool map_of_codes(CUtensorMap *ret, const void *data, int64_t rows, int64_t columns, int64_t pitch,
                  int box_rows)
{
    return tensor_map(ret, CU_TENSOR_MAP_DATA_TYPE_UINT8, data, rows, columns, pitch, box_rows,
                      DEPTH);
}

template <int KIND>
bool run(const struct codes_tiles_args &a, int32_t n_blocks, cudaStream_t stream)
{
    constexpr int WIDTH = width_of<KIND>;
    auto kernel = codes_tiles_kernel<KIND>;
    static bool allowed = allow_shared(kernel, tiles::BYTES);
    int32_t n = KIND >= GATED_SILU ? a.n / 2 : a.n;
    CUtensorMap x, w, out;

    if (!allowed || !map_of_codes(&x, a.x, a.rows, a.k, a.x_stride, ROWS) ||
        !map_of_codes(&w, a.w, a.n, a.k, a.w_stride, COLUMNS / 2) ||
        !tensor_map_16(&out, T_BF16, a.out, a.rows, n, a.out_stride, HALF_ROWS)) {
        return false;
    }
    walk k = {(a.rows + CLUSTER * ROWS - 1) / (CLUSTER * ROWS), n / WIDTH, 8};
    int blocks = min(n_blocks / CLUSTER, k.n_pairs * k.n_columns) * CLUSTER;
    return launch_clusters(CLUSTER, kernel, dim3((unsigned)blocks), dim3(tiles::THREADS),
                           tiles::BYTES, stream, x, w, out, a.x_scale, a.w_scale, k,
                           (a.k + DEPTH - 1) / DEPTH, a.rows, n);
}

} // namespace

extern "C" bool codes_tiles_fit(const struct codes_tiles_args *a)
{
    bool aligned = ((uintptr_t)a->x | (uintptr_t)a->w | (uintptr_t)a->out) % 16 == 0 &&
                   (a->x_stride | a->w_stride | a->out_stride * 2) % 16 == 0 &&
                   (uintptr_t)a->w_scale % 8 == 0;
    bool act = a->gated ? a->act == A_SILU || a->act == A_GELU_TANH : a->act == A_NONE;

    return aligned && act && !(a->gated && a->add) && a->rows > 0 && a->k > 0 &&
           a->n % COLUMNS == 0 && tiles_available() && cuda_shared_limit() >= tiles::BYTES;
}

extern "C" bool launch_codes_tiles(const struct codes_tiles_args *a, int32_t n_blocks,
                                   cudaStream_t stream)
{
    if (!codes_tiles_fit(a)) {
        return false;
    }
    return !a->gated ? a->add ? run<SUM>(*a, n_blocks, stream) : run<PLAIN>(*a, n_blocks, stream)
           : a->act == A_SILU ? run<GATED_SILU>(*a, n_blocks, stream)
                              : run<GATED_GELU>(*a, n_blocks, stream);
}
