/* The kernel of mixed-input products (mixed.h). One lane of a fifth warpgroup loads,
 * into two rings: stages of codes, and stages of 128 columns of the activations. The
 * copies of codes do not depend on other launches; those of the activations follow
 * them.
 *
 * Included once for each format, whose kernels are compiled by themselves.
 */
#ifndef QUIRE_KERNELS_CUDA_MIXED_MIXED_CUH
#define QUIRE_KERNELS_CUDA_MIXED_MIXED_CUH

#include "kernels/cuda/mixed/epilogue.cuh"

#if HAS_WGMMA

/* Addresses of the rings and their mbarriers. */
template <typename L> struct rings {
    uint32_t source, codes, source_full, source_empty, codes_full, codes_empty;

    __device__ __forceinline__ rings(uint32_t base)
        : source(base), codes(base + L::SOURCES * L::SOURCE_BYTES), source_full(base + L::RING),
          source_empty(source_full + L::SOURCES * 8), codes_full(source_empty + L::SOURCES * 8),
          codes_empty(codes_full + L::STAGES * 8)
    {
    }
    __device__ __forceinline__ void init(void) const
    {
        for (int i = 0; i < L::SOURCES; i++) {
            barrier_init(source_full + i * 8, 1);
            /* warps that multiply it */
            barrier_init(source_empty + i * 8, L::TILES * L::SOURCE_PARTS * 4);
        }
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(codes_full + i * 8, 1);
            barrier_init(codes_empty + i * 8, L::MULTIPLIERS / 32);
        }
        barrier_init_fence();
    }
};

template <typename L> __device__ __forceinline__ void sync_multipliers(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"(L::MULTIPLIERS) : "memory");
}

/* The weight row at which a tile's i-th 64 rows begin: those of a gated product are the
 * gate's first, then those that it gates. */
template <int WIDTH>
__device__ __forceinline__ int first_row(const mixed_args &a, int kind, int tile, int i)
{
    constexpr int HALF = WIDTH / 2;

    if (kind != SMALL_GATED) {
        return tile * WIDTH + i * MIXED_ROWS;
    }
    int row = i * MIXED_ROWS;
    return row < HALF ? tile * HALF + row : a.s.n / 2 + tile * HALF + row - HALF;
}

/* ---- the lane that loads ---- */

template <int F, int N, int WIDTH> struct loader {
    using L = mixed_layout<F, N, WIDTH>;
    const CUtensorMap *w, *x;
    const mixed_args &a;
    rings<L> r;
    int kind, tile, first_group, source_row;
    uint64_t once, again;

    __device__ __forceinline__ void load_codes(int s) const
    {
        uint32_t to = r.codes + s % L::STAGES * L::STAGE_BYTES,
                 bar = r.codes_full + s % L::STAGES * 8;
        int group = first_group + s * L::GROUPS;

        barrier_expect(bar, L::STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < L::TILES; i++) {
            int row = first_row<WIDTH>(a, kind, tile, i);
            if constexpr (L::SEGMENTS) {
                plain_copy(to + i * L::TILE_BYTES,
                           a.segments + quant_segment_at(row, group / 4, a.n_segments, L::PITCH),
                           L::TILE_BYTES, bar, once);
            } else {
#pragma unroll
                for (int g = 0; g < L::GROUPS; g++) {
                    tensor_copy(to + i * L::TILE_BYTES + g * MIXED_ROWS * L::PITCH, w,
                                (group + g) * MIXED_GROUP, row, bar, once);
                }
            }
        }
    }
    __device__ __forceinline__ void load_source(int i) const
    {
        uint32_t to = r.source + i % L::SOURCES * L::SOURCE_BYTES,
                 bar = r.source_full + i % L::SOURCES * 8;
        int panel = (first_group + i * L::SOURCE_GROUPS) * (MIXED_GROUP / SMALL_DEPTH);

        barrier_expect(bar, L::SOURCE_BYTES);
        panels_copy(to, x, source_row, panel, bar, again);
    }
    /* All stages of both rings, then each one again as soon as it is free. */
    __device__ __forceinline__ void run(void) const
    {
        int n = a.s.depth_steps, stages = n / L::GROUPS,
            sources = (n + L::SOURCE_GROUPS - 1) / L::SOURCE_GROUPS;

        for (int i = 0; i < min(L::STAGES, stages); i++) {
            load_codes(i);
        }
        pdl_wait();
        for (int i = 0; i < min(L::SOURCES, sources); i++) {
            load_source(i);
        }
        /* in the order in which they are free again */
        for (int s = 0, i = 0; s < stages; s++) {
            for (; i + L::SOURCES < sources && (i + 1) * L::SOURCE_GROUPS <= (s + 1) * L::GROUPS;
                 i++) {
                barrier_wait(r.source_empty + i % L::SOURCES * 8, i / L::SOURCES & 1);
                load_source(i + L::SOURCES);
            }
            if (s + L::STAGES < stages) {
                barrier_wait(r.codes_empty + s % L::STAGES * 8, s / L::STAGES & 1);
                load_codes(s + L::STAGES);
            }
        }
    }
};

/* ---- the mainloop ---- */

/* sums = the products of a group's 128 columns. tile, g: where its codes are; from: its
 * activations, which are there once ready() returns. */
template <int F, int N, typename READY>
__device__ __forceinline__ void sum_group(float (&sums)[N / 2], lane_codes<F> &codes, uint32_t tile,
                                          int g, uint32_t from, READY ready)
{
    codes.load(tile, g, 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t x = wgmma_mixed_descriptor(from + half * (N * MIXED_GROUP));
        uint32_t operand[MIXED_GROUP / 32][4];
#pragma unroll
        for (int k = 0; k < MIXED_GROUP / 32; k++) {
            codes.operand(operand[k], half, k);
        }
        if (half == 0) {
            codes.load(tile, g, 1);
            ready();
        }
        wgmma_fence(); /* one for all four: behind each they would wait */
#pragma unroll
        for (int k = 0; k < MIXED_GROUP / 32; k++) {
            wgmma_mixed<N>::run(sums, operand[k], x + k * 2, half + k > 0);
        }
        wgmma_commit();
    }
    wgmma_wait<0>();
}

/* The same by the instruction of a warp, which other warps' need not wait for: of few
 * rows it takes less time than a warpgroup's one after the other. */
template <int F, int N, typename READY>
__device__ __forceinline__ void sum_group_by_warp(float (&sums)[N / 2], lane_codes<F> &codes,
                                                  uint32_t tile, int g, uint32_t from, READY ready)
{
    constexpr int TILES = N / 8; /* of eight rows */
    int lane = threadIdx.x & 31;
    uint32_t at = from + (lane & 7) * 128, chunk = ((lane >> 3) ^ (lane & 7)) * 16;
    float even[TILES][4] = {}, odd[TILES][4] = {};
    lane_codes<F> second = codes;

    codes.load(tile, g, 0);
    second.load(tile, g, 1);
    ready();
#pragma unroll
    for (int k = 0; k < MIXED_GROUP / 16; k += 2) {
        uint32_t x[TILES][4], a[2][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            ldmatrix_x4(x[i], at + k / 4 * (N * MIXED_GROUP) + i * 1024 + (chunk ^ k % 4 * 32));
        }
        (k < 4 ? codes : second).operand(a[0], k / 4, k % 4);
        (k < 4 ? codes : second).operand(a[1], k / 4, k % 4 + 1);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            mma16816<bf16>(even[i], a[0], x[i][0], x[i][1]);
            mma16816<bf16>(odd[i], a[1], x[i][2], x[i][3]);
        }
    }
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        sums[j] = even[j / 4][j % 4] + odd[j / 4][j % 4];
    }
    __syncwarp(); /* all lanes have read their codes */
}

/* d = the sums of this warpgroup's part of the depth; warpgroup w has the tile's 64
 * rows w % TILES and every PARTS-th group from w / TILES on. row: the weight's row of
 * the first of these; first_group: of the block's depth. */
template <int F, int N, int WIDTH>
__device__ __forceinline__ void multiply(float (&d)[N / 2],
                                         const rings<mixed_layout<F, N, WIDTH>> &r,
                                         const mixed_args &a, int row, int first_group)
{
    using L = mixed_layout<F, N, WIDTH>;
    /* the same in all lanes, which the compiler cannot know of threadIdx */
    int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), part = warpgroup / L::TILES,
        stages = a.s.depth_steps / L::GROUPS;
    bool leads = (threadIdx.x & 31) == 0;
    lane_codes<F> codes(row, a);

#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        d[i] = 0.0f;
    }
    for (int s = 0; s < stages; s++) {
        int stage = s % L::STAGES;
        uint32_t tile = r.codes + stage * L::STAGE_BYTES + warpgroup % L::TILES * L::TILE_BYTES;
        barrier_wait(r.codes_full + stage * 8, s / L::STAGES & 1);
#pragma unroll 1
        for (int g = part; g < L::GROUPS; g += L::PARTS) {
            int i = s * L::GROUPS + g, turn = i / L::SOURCE_GROUPS, source = turn % L::SOURCES;
            uint32_t from =
                r.source + source * L::SOURCE_BYTES + i % L::SOURCE_GROUPS * L::GROUP_BYTES;
            auto ready = [&] { barrier_wait(r.source_full + source * 8, turn / L::SOURCES & 1); };
            float sums[N / 2];
            codes.scales(tile, g, first_group + i, a);
            if constexpr (N <= MIXED_FEW_ROWS) {
                sum_group_by_warp<F, N>(sums, codes, tile, g, from, ready);
            } else {
                sum_group<F, N>(sums, codes, tile, g, from, ready);
            }
            if (leads) {
                if ((i + L::PARTS) / L::SOURCE_GROUPS > turn) {
                    barrier_arrive(r.source_empty + source * 8);
                }
                if (g + L::PARTS >= L::GROUPS) {
                    barrier_arrive(r.codes_empty + stage * 8);
                }
            }
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                d[j] += codes.scale[j / 2 & 1] * sums[j];
            }
        }
    }
}

#endif

template <int F, int N, int WIDTH, int SPLIT>
__global__ void __launch_bounds__(HAS_WGMMA ? mixed_layout<F, N, WIDTH>::THREADS : 32, 1)
    mixed_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                 const __grid_constant__ mixed_args a, int kind)
{
#if HAS_WGMMA
    using L = mixed_layout<F, N, WIDTH>;
    extern __shared__ char raw[];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    rings<L> r(base);
    int part = SPLIT > 1 ? (int)(blockIdx.x % SPLIT) : 0, tile = (int)(blockIdx.x / SPLIT);
    int source_row = N == MIXED_WIDE_ROWS ? (int)blockIdx.y * N : 0;

    if (threadIdx.x == 0) {
        r.init();
    }
    __syncthreads();
    pdl_release();
    if (threadIdx.x >= L::MULTIPLIERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::LOADER_REGISTERS));
        if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == L::MULTIPLIERS / 32 && elected()) {
            loader<F, N, WIDTH>{
                &w,         &x,          a,           r, kind, tile, part * a.s.depth_steps,
                source_row, read_once(), read_again()}
                .run();
        }
        __syncwarp();
        if (SPLIT > 1) { /* the cluster's barriers are for all threads */
            cluster_arrive();
            cluster_wait();
            cluster_arrive();
            cluster_wait();
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::REGISTERS));
    float d[N / 2];
    pdl_wait();
    if (kind != SMALL_SUM && a.s.cleared && blockIdx.x == 0 && threadIdx.x < SMALL_ROWS) {
        a.s.cleared[threadIdx.x] = 0;
    }
    multiply<F, N, WIDTH>(d, r, a, first_row<WIDTH>(a, kind, tile, threadIdx.x / 128 % L::TILES),
                          part * a.s.depth_steps);
    sync_multipliers<L>(); /* the rings become room for sums */
    keep_sums<L, N>(d, (float *)(raw + (base - shared_address(raw))));
    if (SPLIT > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    } else {
        sync_multipliers<L>();
    }
    shared_sums<L, N, SPLIT> sums(base);
    if constexpr (N == MIXED_WIDE_ROWS) {
        small_args s = a.s;
        s.out += source_row * s.out_stride;
        s.rows -= source_row;
        store<L, N, SPLIT, WIDTH>(sums, s, kind, tile, part);
    } else {
        store<L, N, SPLIT, WIDTH>(sums, a.s, kind, tile, part);
    }
    if (SPLIT > 1) {
        __syncwarp();
        cluster_arrive(); /* the other block may leave once it has read this one's sums */
        cluster_wait();
    }
#endif
}

/* ---- host ---- */

template <int F, int N, int WIDTH, int SPLIT>
bool launch_tile(const CUtensorMap &w, const CUtensorMap &x, const mixed_args &a, int kind,
                 cudaStream_t stream)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[3];

    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    attr[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attr[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    attr[2].id = cudaLaunchAttributeClusterDimension;
    attr[2].val.clusterDim.x = SPLIT;
    attr[2].val.clusterDim.y = attr[2].val.clusterDim.z = 1;
    c.gridDim = dim3(a.s.n / WIDTH * SPLIT, N == MIXED_WIDE_ROWS ? (a.s.rows + N - 1) / N : 1);
    c.blockDim = dim3(mixed_layout<F, N, WIDTH>::THREADS);
    c.dynamicSmemBytes = mixed_layout<F, N, WIDTH>::BYTES;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = SPLIT > 1 ? 3 : 2;
    return cudaLaunchKernelEx(&c, mixed_kernel<F, N, WIDTH, SPLIT>, w, x, a, kind) == cudaSuccess;
}

template <int F, int N>
bool launch_product(struct small_tile t, const CUtensorMap &w, const CUtensorMap &x,
                    const mixed_args &a, cudaStream_t stream)
{
#define TILE(WIDTH, SPLIT)                                                   \
    if constexpr (WIDTH <= mixed_warpgroups(N) * MIXED_ROWS) {               \
        if (t.width == WIDTH && t.split == SPLIT) {                          \
            return launch_tile<F, N, WIDTH, SPLIT>(w, x, a, t.kind, stream); \
        }                                                                    \
    }
    MIXED_TILES(TILE)
#undef TILE
    return false;
}

template <int F, int N> void prepare(void)
{
#define TILE(WIDTH, SPLIT)                                                                \
    if constexpr (WIDTH <= mixed_warpgroups(N) * MIXED_ROWS) {                            \
        allow_shared(mixed_kernel<F, N, WIDTH, SPLIT>, mixed_layout<F, N, WIDTH>::BYTES); \
    }
    MIXED_TILES(TILE)
#undef TILE
}

/* Enqueues the product of a weight of format F. */
template <int F>
bool launch_mixed(struct small_tile t, const CUtensorMap &w, const CUtensorMap &x,
                  const mixed_args &a, cudaStream_t stream)
{
    return a.s.rows <= 8    ? launch_product<F, 8>(t, w, x, a, stream)
           : a.s.rows <= 16 ? launch_product<F, 16>(t, w, x, a, stream)
           : a.s.rows <= 32 ? launch_product<F, 32>(t, w, x, a, stream)
           : a.s.rows <= 64 ? launch_product<F, 64>(t, w, x, a, stream)
                            : launch_product<F, MIXED_WIDE_ROWS>(t, w, x, a, stream);
}

/* Allows its kernels their shared memory. */
template <int F> void prepare_mixed(void)
{
    prepare<F, 8>();
    prepare<F, 16>();
    prepare<F, 32>();
    prepare<F, 64>();
    prepare<F, MIXED_WIDE_ROWS>();
}

#define MIXED_FORMAT(F)                                                                        \
    template bool launch_mixed<F>(struct small_tile, const CUtensorMap &, const CUtensorMap &, \
                                  const mixed_args &, cudaStream_t);                           \
    template void prepare_mixed<F>(void);

#endif
