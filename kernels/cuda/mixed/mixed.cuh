/* The kernel of mixed-input products (mixed.h). Two lanes of a fifth warpgroup load, a
 * ring each: stages of codes, and columns of the activations. The copies of codes do
 * not depend on other launches; those of the activations follow them.
 *
 * Included once for each format, whose kernels are compiled by themselves.
 */
#ifndef QUIRE_KERNELS_CUDA_MIXED_MIXED_CUH
#define QUIRE_KERNELS_CUDA_MIXED_MIXED_CUH

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/mixed/epilogue.cuh"
#include "kernels/cuda/mixed/few_fp4.cuh"

#if HAS_WGMMA

/* Addresses of the rings and their mbarriers. */
template <typename L> struct rings {
    uint32_t source, codes, source_full, source_empty, codes_full, codes_empty, pushed;
    uint32_t source_scaled; /* of few_fp4.cuh */

    __device__ __forceinline__ rings(uint32_t base)
        : source(base), codes(base + L::SOURCES * L::SOURCE_BYTES), source_full(base + L::RING),
          source_empty(source_full + L::SOURCES * 8), codes_full(source_empty + L::SOURCES * 8),
          codes_empty(codes_full + L::SLOTS * 8), pushed(codes_empty + L::SLOTS * 8),
          source_scaled(pushed + 8)
    {
    }
    /* By all threads, before a barrier of the block. pushed_bytes: what the other block
     * of the cluster sends; scaled: a warp writes to each source. */
    __device__ __forceinline__ void init(uint32_t pushed_bytes, bool scaled) const
    {
        if (threadIdx.x == 0) {
            barriers_init(codes_full, L::SLOTS, 1);
        } else if (threadIdx.x == 32) {
            barriers_init(codes_empty, L::SLOTS, L::PARTS * 4);
        } else if (threadIdx.x == 64) {
            barriers_init(source_full, L::SOURCES, 1);
            barriers_init(pushed, 1, 1);
            barrier_expect(pushed, pushed_bytes);
        } else if (threadIdx.x == 96) { /* count: warps that multiply or write it */
            barriers_init(source_empty, L::SOURCES, L::TILES * L::SOURCE_PARTS * 4 + scaled);
        } else if (L::FEW_FP4 && threadIdx.x == 128) {
            barriers_init(source_scaled, L::SOURCES, 1);
        }
    }
};

/* ---- the lane that loads ---- */

template <int F, int N, int WIDTH> struct loader {
    using L = mixed_layout<F, N, WIDTH>;
    const CUtensorMap *w, *x;
    const mixed_args &a;
    rings<L> r;
    int kind, tile, first_group, source_row;
    uint64_t once, again;

    /* The i-th 64 rows of a stage, as soon as those that lay there are read. */
    __device__ __forceinline__ void load_codes(int s, int i) const
    {
        int slot = s % L::STAGES * L::TILES + i, group = first_group + s * L::GROUPS;
        int row = first_row<WIDTH>(a.s, kind, tile, i);
        uint32_t to = r.codes + slot * L::TILE_BYTES, bar = r.codes_full + slot * 8;

        if (s >= L::STAGES) {
            barrier_wait(r.codes_empty + slot * 8, (s / L::STAGES - 1) & 1);
        }
        barrier_expect(bar, L::TILE_BYTES);
        if constexpr (L::SEGMENTS) {
            plain_copy(to,
                       a.segments +
                           quant_segment_at(row, group / L::SEGMENT_GROUPS, a.n_segments, L::PITCH),
                       L::TILE_BYTES, bar, once);
        } else {
#pragma unroll
            for (int g = 0; g < L::GROUPS; g++) {
                tensor_copy(to + g * MIXED_ROWS * L::PITCH, w, (group + g) * MIXED_GROUP, row, bar,
                            once);
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
    /* Each stage as soon as there is room; either by a lane of its own, so that neither
     * waits for what the other one's room waits for. */
    __device__ __forceinline__ void run_codes(void) const
    {
        for (int s = 0; s < a.s.depth_steps / L::GROUPS; s++) {
#pragma unroll
            for (int i = 0; i < L::TILES; i++) {
                load_codes(s, i);
            }
        }
    }
    __device__ __forceinline__ void run_sources(void) const
    {
        int n = (a.s.depth_steps + L::SOURCE_GROUPS - 1) / L::SOURCE_GROUPS;

        pdl_wait();
        for (int i = 0; i < n; i++) {
            if (i >= L::SOURCES) {
                barrier_wait(r.source_empty + i % L::SOURCES * 8, (i / L::SOURCES - 1) & 1);
            }
            load_source(i);
        }
    }
};

/* ---- the mainloop ---- */

/* sums = the products of a group's 128 columns. tile, g: where its codes are, g groups
 * behind the warpgroup's first of a stage; from: its activations, which are there once
 * ready() returns. */
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

/* Sums of a warp's instructions, in two chains. */
template <int N> struct warp_sums {
    float even[N / 8][4], odd[N / 8][4];

    __device__ __forceinline__ float sum(int i) const
    {
        return even[i / 4][i % 4] + odd[i / 4][i % 4];
    }
};

/* Where a lane reads a group's activations for sum_group_by_warp, from their begin. The
 * shuffle is of a lane's own: else the compiler computes this anew for each group. */
__device__ __forceinline__ uint32_t lane_source(void)
{
    int lane = threadIdx.x & 31;

    return __shfl_sync(0xffffffffu, (lane & 7) * 128 + ((lane >> 3) ^ (lane & 7)) * 16, lane);
}

/* The same, added to `sums`, by the instruction of a warp, which other warps' need not
 * wait for: of few rows it takes less time than a warpgroup's one after the other.
 * from: with lane_source. */
template <int F, int N, typename READY>
__device__ __forceinline__ void sum_group_by_warp(warp_sums<N> &sums, lane_codes<F> &codes,
                                                  uint32_t tile, int g, uint32_t from, READY ready)
{
    constexpr int TILES = N / 8; /* of eight rows */
    lane_codes<F> second = codes;

    codes.load(tile, g, 0);
    second.load(tile, g, 1);
    ready();
#pragma unroll
    for (int k = 0; k < MIXED_GROUP / 16; k += 2) {
        uint32_t x[TILES][4], a[2][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            ldmatrix_x4(x[i], (from ^ k % 4 * 32) + k / 4 * (N * MIXED_GROUP) + i * 1024);
        }
        (k < 4 ? codes : second).operand(a[0], k / 4, k % 4);
        (k < 4 ? codes : second).operand(a[1], k / 4, k % 4 + 1);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            mma16816<bf16>(sums.even[i], a[0], x[i][0], x[i][1]);
            mma16816<bf16>(sums.odd[i], a[1], x[i][2], x[i][3]);
        }
    }
    __syncwarp(); /* all lanes have read their codes */
}

/* The same of FUSED_GROUPS_4 and eight rows (operands_groups.cuh). */
template <typename READY>
__device__ __forceinline__ void
sum_nibbles_by_warp(warp_sums<8> &sums, lane_codes<FUSED_GROUPS_4> &codes, uint32_t tile, int g,
                    uint32_t from, READY ready);

/* The same of codes of eight bits. Which column the instruction takes for which is free
 * as long as both operands agree: a lane multiplies 16 neighbours of each 64, and so
 * fetches 16 bytes of both at a time. */
template <int F, int N, typename READY>
__device__ __forceinline__ void sum_bytes_by_warp(warp_sums<N> &sums, lane_codes<F> &codes,
                                                  uint32_t tile, int g, uint32_t from, READY ready)
{
    constexpr int TILES = N / 8;
    int lane = threadIdx.x & 31;
    uint32_t at = from + (lane >> 2) * 128 + ((lane & 3) * 2 ^ lane >> 2) * 16;

    codes.load_rows(tile, g);
    ready();
#pragma unroll
    for (int i = 0; i < 4; i++) { /* eight columns of a lane */
        uint4 x[TILES];
        uint32_t a[2][4];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            x[j] = load_shared16((at ^ i % 2 * 16) + i / 2 * (N * MIXED_GROUP) + j * 1024);
        }
        codes.next_operand(a[0], i / 2, i % 2 * 2);
        codes.next_operand(a[1], i / 2, i % 2 * 2 + 1);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            mma16816<bf16>(sums.even[j], a[0], x[j].x, x[j].y);
            mma16816<bf16>(sums.odd[j], a[1], x[j].z, x[j].w);
        }
    }
    __syncwarp(); /* all lanes have read their codes */
}

/* Where a warp is in a ring of COUNT stages. */
template <int COUNT> struct ring_place {
    int stage;
    uint32_t phase; /* of the stage's mbarrier */

    template <int STEP> __device__ __forceinline__ void advance(void)
    {
        static_assert(STEP <= COUNT, "no turn is skipped");
        stage += STEP;
        if (stage >= COUNT) {
            stage -= COUNT;
            phase ^= 1;
        }
    }
};

/* Scales activations as they arrive, as few_fp4.cuh says; by SCALING_WARPS of the
 * warpgroup that loads, a copy each. */
template <typename L>
__device__ __forceinline__ void scale_sources(const rings<L> &r, const mixed_args &a)
{
    int thread = threadIdx.x - L::MULTIPLIERS - 32, lane = thread % 32;
    int n = (a.s.depth_steps + L::SOURCE_GROUPS - 1) / L::SOURCE_GROUPS;

    for (int i = thread / 32; i < n; i += SCALING_WARPS) {
        int stage = i % L::SOURCES;
        barrier_wait(r.source_full + stage * 8, i / L::SOURCES & 1);
        scale_source(r.source + stage * L::SOURCE_BYTES, L::SOURCE_GROUPS, a.s.rows);
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(r.source_scaled + stage * 8);
        }
        proxy_fence(); /* before a copy to the same place */
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(r.source_empty + stage * 8);
        }
    }
}

/* d = the sums of this warpgroup's part of the depth; warpgroup w has the tile's 64
 * rows w % TILES and every PARTS-th group from w / TILES on. row: the weight's row of
 * the first of these; first_group: of the block's depth. Few instructions besides those
 * that widen codes: of few rows the warps' instructions take as long as memory.
 * APART_ROWS: rows of MXFP4 whose groups are summed apart (few_fp4.cuh), or 0. */
template <int F, int N, int WIDTH, int APART_ROWS>
__device__ __forceinline__ void multiply(float (&d)[N / 2],
                                         const rings<mixed_layout<F, N, WIDTH>> &r,
                                         const mixed_args &a, int row, int first_group)
{
    using L = mixed_layout<F, N, WIDTH>;
    constexpr int EACH = L::GROUPS / L::PARTS; /* groups of a stage of codes */
    constexpr int STEP = L::PARTS / L::SOURCE_GROUPS;
    constexpr bool BY_WARP = N <= MIXED_FEW_ROWS, APART = APART_ROWS > 0;
    /* Besides those in its values a row of FP4 or groups has one scale, for the end. */
    constexpr bool ROW_SCALES = BY_WARP && F >= FUSED_MXFP4;
    /* the same in all lanes, which the compiler cannot know of threadIdx */
    int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), part = warpgroup / L::TILES,
        group = first_group + part, in_source = part % L::SOURCE_GROUPS;
    bool leads = (threadIdx.x & 31) == 0;
    uint32_t tile_at = r.codes + warpgroup % L::TILES * L::TILE_BYTES,
             bars_at = warpgroup % L::TILES * 8;
    ring_place<L::STAGES> c = {0, 0};
    ring_place<L::SOURCES> x = {part / L::SOURCE_GROUPS, 0};
    lane_codes<F> codes(row, part, a);
    warp_sums<BY_WARP ? N : 8> few = {};
    fp4_sums<APART ? APART_ROWS : 2> apart;
    uint32_t own = BY_WARP && L::SEGMENTS ? lane_source() : 0;
    fp4_scales<APART ? APART_ROWS : 2> bytes(part);

#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        d[i] = 0.0f;
    }
    for (int s = a.s.depth_steps / L::GROUPS; s > 0; s--) {
        uint32_t tile = tile_at + c.stage * L::STAGE_BYTES;
        uint32_t bar = bars_at + c.stage * (L::TILES * 8);
        barrier_wait(r.codes_full + bar, c.phase);
#pragma unroll
        for (int j = 0; j < EACH; j++, group += L::PARTS) {
            uint32_t from = r.source + x.stage * L::SOURCE_BYTES + in_source * L::GROUP_BYTES;
            auto ready = [&] {
                barrier_wait((APART ? r.source_scaled : r.source_full) + x.stage * 8, x.phase);
            };
            float sums[BY_WARP ? 1 : N / 2];
            if constexpr (!APART) {
                codes.scales(tile, j * L::PARTS, group, a);
            }
            if constexpr (APART) {
                apart.add(codes, bytes, tile, j * L::PARTS, from + own, ready);
            } else if constexpr (!BY_WARP) {
                sum_group<F, N>(sums, codes, tile, j * L::PARTS, from, ready);
            } else {
                if (!ROW_SCALES) {
                    few = {};
                }
                if constexpr (F == FUSED_GROUPS_4 && N == 8) {
                    sum_nibbles_by_warp(few, codes, tile, j * L::PARTS, from, ready);
                } else if constexpr (L::SEGMENTS) {
                    sum_group_by_warp<F, N>(few, codes, tile, j * L::PARTS, from + own, ready);
                } else {
                    sum_bytes_by_warp<F, N>(few, codes, tile, j * L::PARTS, from, ready);
                }
            }
            if (leads && in_source + L::PARTS >= L::SOURCE_GROUPS) {
                barrier_arrive(r.source_empty + x.stage * 8);
            }
            if (leads && j + 1 == EACH) {
                barrier_arrive(r.codes_empty + bar);
            }
#pragma unroll
            for (int i = 0; i < N / 2 && !ROW_SCALES; i++) {
                d[i] += codes.scale[i / 2 & 1] * (BY_WARP ? few.sum(i) : sums[i]);
            }
            if constexpr (STEP > 0) {
                x.template advance<STEP>();
            } else if (in_source + L::PARTS < L::SOURCE_GROUPS) {
                in_source += L::PARTS;
            } else {
                in_source += L::PARTS - L::SOURCE_GROUPS;
                x.template advance<1>();
            }
        }
        c.template advance<1>();
    }
    if constexpr (APART) {
        apart.finish(d, codes.scale);
    } else if constexpr (ROW_SCALES) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            d[i] = codes.scale[i / 2 & 1] * few.sum(i);
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
    int rows = N == MIXED_WIDE_ROWS ? min(a.s.rows - source_row, N) : a.s.rows; /* the block's */

    bool apart = L::FEW_FP4 && rows <= FEW_FP4_ROWS;

    r.init(rows * WIDTH / 2 * 4, apart);
    if (threadIdx.x == L::MULTIPLIERS) {
        if (!L::SEGMENTS) {
            prefetch_map(&w);
        }
        prefetch_map(&x);
    }
    __syncthreads();
    pdl_release();
    if (threadIdx.x >= L::MULTIPLIERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::LOADER_REGISTERS));
        int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - L::MULTIPLIERS / 32;
        const loader<F, N, WIDTH> load = {
            &w,         &x,          a,           r, kind, tile, part * a.s.depth_steps,
            source_row, read_once(), read_again()};
        if (warp == 0 && elected()) {
            load.run_codes();
        } else if (warp == 1 + SCALING_WARPS && elected()) {
            load.run_sources();
        } else if (apart && warp > 0 && warp <= SCALING_WARPS) {
            scale_sources<L>(r, a);
        }
        __syncwarp();
        if (SPLIT > 1) { /* the cluster's barriers are for all threads */
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
    int row = first_row<WIDTH>(a.s, kind, tile, threadIdx.x / 128 % L::TILES),
        first_group = part * a.s.depth_steps;
    if constexpr (L::FEW_FP4) {
        if (rows <= 2) {
            multiply<F, N, WIDTH, 2>(d, r, a, row, first_group);
        } else if (rows <= FEW_FP4_ROWS) {
            multiply<F, N, WIDTH, 4>(d, r, a, row, first_group);
        } else {
            multiply<F, N, WIDTH, 0>(d, r, a, row, first_group);
        }
    } else {
        multiply<F, N, WIDTH, 0>(d, r, a, row, first_group);
    }
    stream_part<L, N, SPLIT, WIDTH> stream;
    if (N != MIXED_WIDE_ROWS && kind == SMALL_SUM) {
        stream.load(a.s, tile, part);
    }
    sync_multipliers<L>(); /* the rings become room for sums */
    float *kept = (float *)(raw + (base - shared_address(raw)));
    keep_sums<L, N>(d, kept);
    if (SPLIT > 1) {
        cluster_arrive();
        cluster_wait();
    }
    sync_multipliers<L>();
    shared_sums<L, N, SPLIT> sums = {kept, part};
    if constexpr (SPLIT > 1) {
        sums.share(base, r.pushed, rows);
    }
    if constexpr (N == MIXED_WIDE_ROWS) {
        small_args s = a.s;
        s.out += source_row * s.out_stride;
        if (L::FLOATS && s.floats) {
            s.floats += source_row * s.out_stride;
        }
        s.rows = rows;
        store<L, N, SPLIT, WIDTH>(sums, stream, s, kind, tile, part);
    } else {
        store<L, N, SPLIT, WIDTH>(sums, stream, a.s, kind, tile, part);
    }
#endif
}

/* ---- host ---- */

template <int F, int N, int WIDTH, int SPLIT>
bool launch_tile(const CUtensorMap &w, const CUtensorMap &x, const mixed_args &a, int kind,
                 cudaStream_t stream)
{
    using L = mixed_layout<F, N, WIDTH>;
    dim3 grid(a.s.n / WIDTH * SPLIT, N == MIXED_WIDE_ROWS ? (a.s.rows + N - 1) / N : 1);

    return launch_clusters(SPLIT, mixed_kernel<F, N, WIDTH, SPLIT>, grid, dim3(L::THREADS),
                           L::BYTES, stream, w, x, a, kind);
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
