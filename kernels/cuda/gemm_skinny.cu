/* Matrix products of few rows (decode): out [m, n] = act(x [m, k] w [n, k]^T + bias), bound by reading the weights once.
 *
 * The weights are the left operand of wgmma, m tokens (padded to 8 .. 64) its columns. heuristics.c cuts the rows of w into
 * tiles such that every multiprocessor reads about the same; a tile is one block's from end to end of k, or, where x would
 * be read too often that way, a cluster's, each block a slice of k, added up through the cluster's shared memory: no sum
 * goes through global memory, whose latency is what such short kernels are made of. One thread keeps a ring of bulk tensor
 * copies full, across tile borders, and starts it before the kernel before this one is done: weights do not depend on it
 * (programmatic dependent launch); two blocks fit a multiprocessor, so the next product fills its ring beside this one.
 */
#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels/cuda/attn_common.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    PANEL_K = 64, /* columns of one copy: 128 bytes, the swizzle's width */
    CONSUMERS = 256,
    SKINNY_THREADS = CONSUMERS + 32,
    SKINNY_RING = 103 * 1024,
    SKINNY_STAGES = 16, /* at most */
};

__device__ __forceinline__ void barrier_arrive(uint32_t bar)
{
#if BULK_COPY
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

__device__ __forceinline__ void tensor_copy(uint32_t to, const CUtensorMap *map, int column, int row, uint32_t bar, uint64_t policy)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(bar), "l"(policy)
                 : "memory");
#endif
}

__device__ __forceinline__ uint64_t policy_evict_first(void)
{
    uint64_t p = 0;
#if BULK_COPY
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
#endif
    return p;
}

__device__ __forceinline__ uint64_t policy_evict_last(void)
{
    uint64_t p = 0;
#if BULK_COPY
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
#endif
    return p;
}

__device__ __forceinline__ void consumers_sync(void) { asm volatile("bar.sync 1, 256;" ::: "memory"); }

/* 8 x 8 of 16 bits: lane holds (row lane / 4, columns 2 (lane % 4) ..) before, (column, rows ..) after. */
__device__ __forceinline__ uint32_t transpose8(uint32_t v)
{
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

template <typename T, int MT>
__device__ __forceinline__ void skinny_store(const skinny_args &a, const float (&acc)[MT / 2], int row0, int end, int lane)
{
    /* this warp: rows row0 .. row0 + 15 of w before `end`, all tokens; fragments as mma's */
    if (row0 >= end)
        return;
    int g = lane >> 2, t4 = lane & 3;
    float bias[2] = {0.0f, 0.0f};
    if (a.bias)
        for (int h = 0; h < 2; h++)
            bias[h] = row0 + g + 8 * h < end ? load_any(a.bias, a.bias_type, row0 + g + 8 * h) : 0.0f;
#pragma unroll
    for (int j = 0; j < MT / 8; j++) {
        if (j * 8 >= a.m)
            break;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float v0 = activate(acc[j * 4 + h * 2] + bias[h], a.act), v1 = activate(acc[j * 4 + h * 2 + 1] + bias[h], a.act);
            int row = row0 + 8 * h;
            if (a.out_type == T_F32) {
                float *to = (float *)a.out + (int64_t)(j * 8 + t4 * 2) * a.out_stride + row + g;
                if (row + g < end && j * 8 + t4 * 2 < a.m)
                    to[0] = v0;
                if (row + g < end && j * 8 + t4 * 2 + 1 < a.m)
                    to[a.out_stride] = v1;
            } else {
                uint32_t pair = transpose8(pack2<T>(v0, v1)); /* token j * 8 + g, rows row + 2 t4 .. */
                T *to = (T *)a.out + (int64_t)(j * 8 + g) * a.out_stride + row + t4 * 2;
                if (j * 8 + g < a.m && row + t4 * 2 < end)
                    *(uint32_t *)to = pair;
            }
        }
    }
}

/* How the ring is cut; the same on host and device. */
struct ring_shape {
    int panels;      /* of PANEL_K columns in a stage */
    int panel_bytes; /* of w, then of x */
    int stage_bytes, stages;
};

__host__ __device__ __forceinline__ ring_shape ring_of(int tile_rows, int mt, int k_panels)
{
    ring_shape r;
    int bytes = (tile_rows + mt) * PANEL_K * 2;
    r.panels = 24 * 1024 / bytes < 1 ? 1 : 24 * 1024 / bytes > 4 ? 4 : 24 * 1024 / bytes;
    if (r.panels > k_panels)
        r.panels = k_panels;
    r.panel_bytes = tile_rows * PANEL_K * 2;
    r.stage_bytes = r.panels * bytes;
    r.stages = SKINNY_RING / r.stage_bytes < SKINNY_STAGES ? SKINNY_RING / r.stage_bytes : SKINNY_STAGES;
    return r;
}

/* GROUPS: tiles of 64 rows that each of the two warpgroups computes. */
template <typename T, int MT, int GROUPS>
__global__ void __launch_bounds__(SKINNY_THREADS, 2)
skinny_kernel(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x, skinny_args a)
{
#if HAS_WGMMA
    extern __shared__ char raw[];
    __shared__ uint64_t barrier[2 * SKINNY_STAGES];
    const block_cluster cluster;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t ring = (shared_address(raw) + 1023) & ~1023u, full = shared_address(barrier), empty = full + SKINNY_STAGES * 8;
    int splits = a.splits, part = blockIdx.x % splits, slot = blockIdx.x / splits, slots = gridDim.x / splits;
    int all_panels = a.k / PANEL_K, p0 = all_panels * part / splits, p1 = all_panels * (part + 1) / splits, n_panels = p1 - p0;
    ring_shape r = ring_of(a.tile_rows, MT, (all_panels + splits - 1) / splits);
    int tiles = (a.n + a.tile_rows - 1) / a.tile_rows, stages_a_tile = (n_panels + r.panels - 1) / r.panels;
    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < r.stages; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, 2);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warp == CONSUMERS / 32) { /* the loader */
        if (lane == 0) {
            uint64_t first = policy_evict_first(), keep = policy_evict_last();
            int total = slot < tiles ? ((tiles - 1 - slot) / slots + 1) * stages_a_tile : 0, early = min(total, r.stages);
            for (int turn = 0; turn < total + early; turn++) {
                /* turns 0 .. early: weights alone; then their x; then whole stages */
                bool weights = turn < early || turn >= 2 * early, tokens = turn >= early;
                if (turn == early) {
                    pdl_wait();
                    pdl_release();
                }
                int unit = turn < early ? turn : turn - early, stage = unit % r.stages;
                int tile = slot + unit / stages_a_tile * slots, p = unit % stages_a_tile * r.panels;
                int count = min(r.panels, n_panels - p);
                uint32_t to = ring + stage * r.stage_bytes, bar = full + stage * 8;
                if (weights) {
                    if (unit >= r.stages)
                        barrier_wait(empty + stage * 8, (unit / r.stages - 1) & 1);
                    barrier_expect(bar, count * (r.panel_bytes + MT * PANEL_K * 2));
                    for (int i = 0; i < count; i++)
                        tensor_copy(to + i * r.panel_bytes, &map_w, (p0 + p + i) * PANEL_K, tile * a.tile_rows, bar, first);
                }
                if (tokens)
                    for (int i = 0; i < count; i++)
                        tensor_copy(to + r.panels * r.panel_bytes + i * MT * PANEL_K * 2, &map_x, (p0 + p + i) * PANEL_K, 0, bar, keep);
            }
            if (total == 0)
                pdl_wait();
        }
    } else {
        pdl_wait();
        pdl_release();
        int group = warp >> 2;
        int unit = 0;
        float acc[GROUPS][MT / 2];
        for (int tile = slot; tile < tiles; tile += slots) {
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
#pragma unroll
                for (int j = 0; j < MT / 2; j++)
                    acc[i][j] = 0.0f;
            int in_stage = 0;
            uint32_t from = 0;
            for (int p = 0; p < n_panels; p++) {
                if (in_stage == 0) {
                    int stage = unit % r.stages;
                    from = ring + stage * r.stage_bytes;
                    barrier_wait(full + stage * 8, unit / r.stages & 1);
                }
                uint64_t dx = wgmma_descriptor(from + r.panels * r.panel_bytes + in_stage * MT * PANEL_K * 2);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < GROUPS; i++) {
                    /* rows past the tile read what lies behind it; they are not stored */
                    if ((group + 2 * i) * 64 >= a.tile_rows)
                        break;
                    uint64_t dw = wgmma_descriptor(from + in_stage * r.panel_bytes + (group + 2 * i) * 64 * 128);
#pragma unroll
                    for (int k = 0; k < PANEL_K / 16; k++)
                        wgmma_ss<T, MT>::run(acc[i], dw + 2 * k, dx + 2 * k, 1);
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (in_stage == 0 && p > 0 && (threadIdx.x & 127) == 0)
                    barrier_arrive(empty + (unit - 1) % r.stages * 8);
                if (++in_stage == r.panels || p + 1 == n_panels) {
                    in_stage = 0;
                    unit++;
                }
            }
            wgmma_wait<0>();
            if ((threadIdx.x & 127) == 0)
                barrier_arrive(empty + (unit - 1) % r.stages * 8);
            if (splits == 1) {
#pragma unroll
                for (int i = 0; i < GROUPS; i++) {
                    int row = (group + 2 * i) * 64 + (warp & 3) * 16;
                    skinny_store<T, MT>(a, acc[i], tile * a.tile_rows + row, min(a.n, (tile + 1) * a.tile_rows), lane);
                }
            }
        }
        if (splits > 1) { /* one tile a cluster: the partial sums go where the ring was, [token][row] */
            float *sums = (float *)(raw + (ring - shared_address(raw)));
            int pitch = a.tile_rows + 4, g = lane >> 2, t4 = lane & 3;
            consumers_sync();
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
#pragma unroll
                for (int j = 0; j < MT / 2; j++) {
                    int row = (group + 2 * i) * 64 + (warp & 3) * 16 + g + (j >> 1 & 1) * 8, token = (j >> 2) * 8 + t4 * 2 + (j & 1);
                    if (row < a.tile_rows)
                        sums[token * pitch + row] = acc[i][j];
                }
        }
    }
    if (splits > 1) {
        cluster.sync();
        float *sums = (float *)(raw + (ring - shared_address(raw)));
        int pitch = a.tile_rows + 4, mine = a.tile_rows / splits, row0 = part * mine;
        for (int o = threadIdx.x; o < a.m * mine; o += SKINNY_THREADS) {
            int token = o / mine, row = row0 + o % mine, column = slot * a.tile_rows + row;
            float v = 0.0f;
            for (int i = 0; i < splits; i++)
                v += *cluster.of(sums + token * pitch + row, i);
            if (column < a.n) {
                if (a.bias)
                    v += load_any(a.bias, a.bias_type, column);
                store_any(a.out, a.out_type, (int64_t)token * a.out_stride + column, activate(v, a.act));
            }
        }
        cluster.sync(); /* nobody leaves while its sums are read */
    }
#endif
}

static PFN_cuTensorMapEncodeTiled_v12000 encode_tiled(void)
{
    static PFN_cuTensorMapEncodeTiled_v12000 fn;
    static bool tried;
    if (!tried) {
        cudaDriverEntryPointQueryResult found;
        tried = true;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&fn, 12000, cudaEnableDefault, &found) != cudaSuccess ||
            found != cudaDriverEntryPointSuccess)
            fn = NULL;
    }
    return fn;
}

/* Map of a row-major [rows, cols] matrix read in boxes of box_rows x 64, swizzled by 128 bytes; rows past the end read as 0. */
static bool encode(CUtensorMap *map, const void *p, int64_t stride, int32_t rows, int32_t cols, int32_t box_rows, int type)
{
    PFN_cuTensorMapEncodeTiled_v12000 fn = encode_tiled();
    cuuint64_t size[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, pitch[1] = {(cuuint64_t)stride * 2};
    cuuint32_t box[2] = {PANEL_K, (cuuint32_t)box_rows}, step[2] = {1, 1};
    return fn != NULL &&
           fn(map, type == T_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)p, size, pitch, box,
              step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T, int MT, int GROUPS> static bool skinny_start(const skinny_args *a, cudaStream_t stream)
{
    static bool ready;
    auto kernel = skinny_kernel<T, MT, GROUPS>;
    int bytes = SKINNY_RING + 1024 + 64 * PANEL_K * 2; /* the last tile of 64 rows may reach behind the ring */
    if (!ready) {
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
            return false;
        ready = true;
    }
    CUtensorMap map_w, map_x;
    if (!encode(&map_w, a->w, a->k, a->n, a->k, a->tile_rows, a->type) || !encode(&map_x, a->x, a->x_stride, a->m, a->k, MT, a->type))
        return false;
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[2];
    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    attr[1].id = cudaLaunchAttributeClusterDimension;
    attr[1].val.clusterDim.x = a->splits;
    attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
    c.gridDim = dim3(a->blocks);
    c.blockDim = dim3(SKINNY_THREADS);
    c.dynamicSmemBytes = bytes;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = a->splits > 1 ? 2 : 1;
    cudaLaunchKernelEx(&c, kernel, map_w, map_x, *a);
    return true;
}

template <typename T, int MT> static bool skinny_groups(const skinny_args *a, cudaStream_t stream)
{
    return a->tile_rows > 128 ? skinny_start<T, MT, 2>(a, stream) : skinny_start<T, MT, 1>(a, stream);
}

template <typename T> static bool skinny_dispatch(const skinny_args *a, cudaStream_t stream)
{
    return a->m <= 8    ? skinny_groups<T, 8>(a, stream)
           : a->m <= 16 ? skinny_groups<T, 16>(a, stream)
           : a->m <= 32 ? skinny_groups<T, 32>(a, stream)
                        : skinny_groups<T, 64>(a, stream);
}

extern "C" bool launch_skinny(const struct skinny_args *a, cudaStream_t stream)
{
    bool fits = a->m >= 1 && a->m <= SKINNY_MAX_ROWS && a->k % PANEL_K == 0 && a->k / PANEL_K >= a->splits && a->n % 2 == 0 &&
                a->x_stride % 8 == 0 && a->out_stride % 2 == 0 && (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->w % 16 == 0 &&
                (uintptr_t)a->out % 4 == 0 && (a->type == T_F16 || a->type == T_BF16) &&
                (a->out_type == a->type || a->out_type == T_F32) && a->tile_rows % (8 * a->splits) == 0 && a->tile_rows <= 256;
    if (!fits)
        return false;
    return a->type == T_F16 ? skinny_dispatch<__half>(a, stream) : skinny_dispatch<__nv_bfloat16>(a, stream);
}
