/* Matrix products of few rows (decode): out [m, n] = act(x [m, k] w [n, k]^T + bias), bound by reading the weights once.
 *
 * The weights are the left operand of wgmma, 128 rows of w a tile, two warpgroups of 64; the m tokens, padded to 8 .. 128,
 * are its columns. One block a multiprocessor; all (tile, 64 columns of k) units are laid end to end and dealt in equal
 * contiguous spans, so every multiprocessor reads the same number of bytes whatever n is. One thread keeps a ring of
 * bulk tensor copies full, across tile borders, and starts it before the kernel before this one is done: the weights do
 * not depend on it (programmatic dependent launch). A tile cut between blocks is added up by the block that arrives
 * last, in the order of the blocks: a row's result does not depend on m or on timing.
 */
#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels/cuda/attn_common.cuh"
#include "kernels/cuda/wgmma.cuh"

enum { TILE_N = 128, TILE_K = 64, CONSUMERS = 256, SKINNY_THREADS = CONSUMERS + 32, MAX_M = 128 };

template <int MT> struct skinny_layout {
    static constexpr int W = TILE_N * TILE_K * 2, X = MT * TILE_K * 2;
    static constexpr int STAGE = W + X;
    static constexpr int RING = 221184;
    static constexpr int STAGES = RING / STAGE;
    static constexpr int BYTES = STAGES * STAGE + STAGES * 16 + 16 + 1024; /* the ring starts at a multiple of 1024 */
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
__device__ __forceinline__ void skinny_store(const skinny_args &a, const float (&acc)[MT / 2], int row0, int lane)
{
    /* this warp: rows row0 .. row0 + 15 of w, all tokens; fragments as mma's */
    int g = lane >> 2, t4 = lane & 3;
    float bias[2] = {0.0f, 0.0f};
    if (a.bias)
        for (int h = 0; h < 2; h++)
            bias[h] = row0 + g + 8 * h < a.n ? load_any(a.bias, a.bias_type, row0 + g + 8 * h) : 0.0f;
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
                if (row + g < a.n && j * 8 + t4 * 2 < a.m)
                    to[0] = v0;
                if (row + g < a.n && j * 8 + t4 * 2 + 1 < a.m)
                    to[a.out_stride] = v1;
            } else {
                uint32_t pair = transpose8(pack2<T>(v0, v1)); /* token j * 8 + g, rows row + 2 t4 .. */
                T *to = (T *)a.out + (int64_t)(j * 8 + g) * a.out_stride + row + t4 * 2;
                if (j * 8 + g < a.m && row + t4 * 2 < a.n)
                    *(uint32_t *)to = pair;
            }
        }
    }
}

template <typename T, int MT>
__global__ void __launch_bounds__(SKINNY_THREADS, 1)
skinny_kernel(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x, skinny_args a)
{
    using L = skinny_layout<MT>;
    extern __shared__ char raw[];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t ring = (shared_address(raw) + 1023) & ~1023u;
    uint32_t full = ring + L::STAGES * L::STAGE, empty = full + L::STAGES * 8;
    int *last = (int *)(raw + (empty + L::STAGES * 8 - shared_address(raw)));
    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, 2);
        }
        barrier_init_fence();
    }
    __syncthreads();

    int k_units = a.k / TILE_K, tiles = (a.n + TILE_N - 1) / TILE_N;
    int64_t total = (int64_t)k_units * tiles;
    int64_t begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;

    if (warp == CONSUMERS / 32) { /* the loader */
        if (lane == 0) {
            uint64_t first = policy_evict_first(), keep = policy_evict_last();
            int n_units = (int)(end - begin), ahead = n_units < L::STAGES ? n_units : L::STAGES;
            int tile = (int)(begin / k_units), k = (int)(begin % k_units);
            for (int i = 0; i < ahead; i++) {
                barrier_expect(full + i * 8, L::STAGE);
                tensor_copy(ring + i * L::STAGE, &map_w, k * TILE_K, tile * TILE_N, full + i * 8, first);
                if (++k == k_units) {
                    k = 0;
                    tile++;
                }
            }
            pdl_wait();
            pdl_release();
            int kx = (int)(begin % k_units);
            for (int i = 0; i < ahead; i++) {
                tensor_copy(ring + i * L::STAGE + L::W, &map_x, kx * TILE_K, 0, full + i * 8, keep);
                kx = kx + 1 == k_units ? 0 : kx + 1;
            }
            for (int i = ahead; i < n_units; i++) {
                int stage = i % L::STAGES;
                barrier_wait(empty + stage * 8, (i / L::STAGES - 1) & 1);
                barrier_expect(full + stage * 8, L::STAGE);
                tensor_copy(ring + stage * L::STAGE, &map_w, k * TILE_K, tile * TILE_N, full + stage * 8, first);
                tensor_copy(ring + stage * L::STAGE + L::W, &map_x, k * TILE_K, 0, full + stage * 8, keep);
                if (++k == k_units) {
                    k = 0;
                    tile++;
                }
            }
        }
        return;
    }

    pdl_wait();
    pdl_release();
    int group = warp >> 2; /* warpgroup: rows group * 64 .. of the tile */
    int unit = 0;
    for (int64_t at = begin; at < end;) {
        int tile = (int)(at / k_units);
        int64_t tile_begin = (int64_t)tile * k_units, tile_end = tile_begin + k_units;
        int n = (int)((tile_end < end ? tile_end : end) - at);
        float acc[MT / 2];
#pragma unroll
        for (int i = 0; i < MT / 2; i++)
            acc[i] = 0.0f;
        for (int i = 0; i < n; i++, unit++) {
            int stage = unit % L::STAGES;
            barrier_wait(full + stage * 8, unit / L::STAGES & 1);
            uint64_t dw = wgmma_descriptor(ring + stage * L::STAGE + group * 64 * 128);
            uint64_t dx = wgmma_descriptor(ring + stage * L::STAGE + L::W);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < TILE_K / 16; s++)
                wgmma_ss<T, MT>::run(acc, dw + 2 * s, dx + 2 * s, 1);
            wgmma_commit();
            if (i > 0) {
                wgmma_wait<1>();
                if ((threadIdx.x & 127) == 0)
                    barrier_arrive(empty + (unit - 1) % L::STAGES * 8);
            }
        }
        wgmma_wait<0>();
        if ((threadIdx.x & 127) == 0)
            barrier_arrive(empty + (unit - 1) % L::STAGES * 8);

        int row0 = tile * TILE_N + group * 64 + (warp & 3) * 16;
        bool whole = n == k_units;
        if (!whole) {
            int64_t slot = 2 * (int64_t)blockIdx.x + (at == begin ? 0 : 1);
            float *mine = a.workspace + slot * TILE_N * MAX_M + threadIdx.x;
#pragma unroll
            for (int i = 0; i < MT / 2; i++)
                __stcg(mine + i * CONSUMERS, acc[i]);
            __threadfence();
            consumers_sync();
            int first = (int)(((tile_begin + 1) * gridDim.x - 1) / total), final = (int)((tile_end * gridDim.x - 1) / total);
            if (threadIdx.x == 0) {
                *last = atomicAdd(&a.arrived[tile], 1) == final - first;
                if (*last)
                    a.arrived[tile] = 0;
                __threadfence();
            }
            consumers_sync();
            whole = *last;
            if (whole) {
#pragma unroll
                for (int i = 0; i < MT / 2; i++)
                    acc[i] = 0.0f;
                for (int b = first; b <= final; b++) {
                    int64_t theirs = 2 * (int64_t)b + (total * b / gridDim.x >= tile_begin ? 0 : 1);
                    const float *from = a.workspace + theirs * TILE_N * MAX_M + threadIdx.x;
#pragma unroll
                    for (int i = 0; i < MT / 2; i++)
                        acc[i] += __ldcg(from + i * CONSUMERS);
                }
            }
            consumers_sync(); /* `last` is free again */
        }
        if (whole)
            skinny_store<T, MT>(a, acc, row0, lane);
        at += n;
    }
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
    cuuint32_t box[2] = {TILE_K, (cuuint32_t)box_rows}, step[2] = {1, 1};
    return fn != NULL &&
           fn(map, type == T_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)p, size, pitch, box,
              step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T, int MT> static bool skinny_start(const skinny_args *a, int blocks, cudaStream_t stream)
{
    static bool ready;
    constexpr int bytes = skinny_layout<MT>::BYTES;
    auto kernel = skinny_kernel<T, MT>;
    if (!ready) {
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
            return false;
        ready = true;
    }
    CUtensorMap map_w, map_x;
    if (!encode(&map_w, a->w, a->k, a->n, a->k, TILE_N, a->type) || !encode(&map_x, a->x, a->x_stride, a->m, a->k, MT, a->type))
        return false;
    launch(kernel, dim3(blocks), dim3(SKINNY_THREADS), bytes, stream, map_w, map_x, *a);
    return true;
}

template <typename T> static bool skinny_dispatch(const skinny_args *a, int blocks, cudaStream_t stream)
{
    return a->m <= 8    ? skinny_start<T, 8>(a, blocks, stream)
           : a->m <= 16 ? skinny_start<T, 16>(a, blocks, stream)
           : a->m <= 32 ? skinny_start<T, 32>(a, blocks, stream)
           : a->m <= 64 ? skinny_start<T, 64>(a, blocks, stream)
                        : skinny_start<T, 128>(a, blocks, stream);
}

extern "C" int64_t skinny_workspace_bytes(int32_t n_sms) { return (int64_t)2 * n_sms * TILE_N * MAX_M * (int64_t)sizeof(float); }

extern "C" bool launch_skinny(const struct skinny_args *a, int32_t n_sms, cudaStream_t stream)
{
    int64_t units = (int64_t)(a->k / TILE_K) * ((a->n + TILE_N - 1) / TILE_N);
    bool fits = a->m >= 1 && a->m <= MAX_M && a->k % TILE_K == 0 && a->n % 2 == 0 && a->x_stride % 8 == 0 && a->out_stride % 2 == 0 &&
                (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->w % 16 == 0 && (uintptr_t)a->out % 4 == 0 &&
                (a->type == T_F16 || a->type == T_BF16) && (a->out_type == a->type || a->out_type == T_F32) &&
                (a->n + TILE_N - 1) / TILE_N <= SKINNY_MAX_TILES;
    if (!fits)
        return false;
    int blocks = units < n_sms ? (int)units : n_sms;
    return a->type == T_F16 ? skinny_dispatch<__half>(a, blocks, stream) : skinny_dispatch<__nv_bfloat16>(a, blocks, stream);
}
