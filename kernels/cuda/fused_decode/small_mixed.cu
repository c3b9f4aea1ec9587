/* Products of few rows of bf16 with weights of codes (small_mixed.h). One lane of a
 * fifth warpgroup loads, into two rings: stages of codes, and stages of 128 columns of
 * the activations. The copies of codes do not depend on other launches; those of the
 * activations follow them.
 */
#include "kernels/cuda/fused_decode/small_codes.h"
#include "kernels/cuda/fused_decode/small_mixed.h"
#include "kernels/cuda/fused_decode/small_pipeline.cuh"
#include "kernels/cuda/gemm/wgmma_mixed.cuh"
#include "kernels/cuda/quant/codes.cuh"

namespace
{

enum {
    MULTIPLIERS = MIXED_WARPGROUPS * 128,
    THREADS = MULTIPLIERS + 128,
    RING_BYTES = 220 * 1024,
    MOST_STAGES = 12,
};

struct mixed_args {
    small_args s;         /* depth_steps: groups of a block's part of the depth */
    const float *w_scale; /* FUSED_FP8: [n, n_groups] */
    int32_t n_groups;     /* of FUSED_FP8: 1, or one for each 128 columns */
    int32_t f16_scales;   /* of FUSED_INT4 */
};

/* F: enum fused_format; N: rows of the activations' operand; WIDTH: of the tile. */
template <int F, int N, int WIDTH> struct mixed_layout {
    static constexpr int TILES = WIDTH / MIXED_ROWS;           /* of 64 weight rows */
    static constexpr int PARTS = MIXED_WARPGROUPS / TILES;     /* of the depth, by warpgroup */
    static constexpr int GROUPS = F == FUSED_INT4 ? 4 : PARTS; /* of a stage of codes */
    /* Bytes between rows of codes, and of 64 rows' codes of a stage. Rows of
     * FUSED_INT4 are whole segments, whose banks differ; those of FUSED_FP8 are of one
     * group and swizzled. */
    static constexpr int PITCH = F == FUSED_INT4 ? (int)FUSED_SEGMENT_BYTES : (int)MIXED_GROUP;
    static constexpr int COPIES = F == FUSED_INT4 ? 1 : GROUPS;
    static constexpr int TILE_BYTES = MIXED_ROWS * PITCH * COPIES;
    static constexpr int STAGE_BYTES = TILES * TILE_BYTES;
    static constexpr int SOURCE_BYTES = N * MIXED_GROUP * 2;
    static constexpr int SOURCES = N < 64 ? 8 : TILES == 4 ? 5 : TILES == 2 ? 7 : 8;
    static constexpr int FIT = (RING_BYTES - SOURCES * SOURCE_BYTES) / STAGE_BYTES;
    static constexpr int STAGES = FIT > MOST_STAGES ? MOST_STAGES : FIT;
    static constexpr int RING = SOURCES * SOURCE_BYTES + STAGES * STAGE_BYTES;
    static constexpr int BARRIERS = 2 * (SOURCES + STAGES);
    static constexpr int BYTES = RING + BARRIERS * 8 + 1024;
    static constexpr int SUM_PITCH = WIDTH + 4; /* floats of a row of sums */

    static_assert(STAGES >= 2, "codes arrive while others are multiplied");
    static_assert(PARTS * N * SUM_PITCH * 4 <= RING, "sums fit");
};

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
            barrier_init(source_empty + i * 8, L::TILES * 4); /* warps that multiply it */
        }
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(codes_full + i * 8, 1);
            barrier_init(codes_empty + i * 8, MULTIPLIERS / 32);
        }
        barrier_init_fence();
    }
};

__device__ __forceinline__ void sync_multipliers(void)
{
    static_assert(MULTIPLIERS == 512, "as the barrier counts");
    asm volatile("bar.sync 1, 512;" ::: "memory");
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
    int kind, tile, first_group;
    uint64_t once, again;

    __device__ __forceinline__ void load_codes(int s) const
    {
        uint32_t to = r.codes + s % L::STAGES * L::STAGE_BYTES, bar = r.codes_full + s % L::STAGES * 8;
        int group = first_group + s * L::GROUPS;

        barrier_expect(bar, L::STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < L::TILES; i++) {
            int row = first_row<WIDTH>(a, kind, tile, i);
#pragma unroll
            for (int g = 0; g < L::COPIES; g++) {
                int column = F == FUSED_INT4 ? group / 4 * (FUSED_SEGMENT_BYTES / 4)
                                             : (group + g) * MIXED_GROUP;
                tensor_copy(to + i * L::TILE_BYTES + g * MIXED_ROWS * L::PITCH, w, column, row, bar,
                            once);
            }
        }
    }
    __device__ __forceinline__ void load_source(int i) const
    {
        uint32_t to = r.source + i % L::SOURCES * L::SOURCE_BYTES,
                 bar = r.source_full + i % L::SOURCES * 8;
        int column = (first_group + i) * MIXED_GROUP;

        barrier_expect(bar, a.s.source_rows * MIXED_GROUP * 2);
        tensor_copy(to, x, column, 0, bar, again);
        tensor_copy(to + L::SOURCE_BYTES / 2, x, column + SMALL_DEPTH, 0, bar, again);
    }
    /* All stages of both rings, then each one again as soon as it is free. */
    __device__ __forceinline__ void run(void) const
    {
        int n = a.s.depth_steps, stages = n / L::GROUPS;

        for (int i = 0; i < min(L::STAGES, stages); i++) {
            load_codes(i);
        }
        pdl_wait();
        for (int i = 0; i < min(L::SOURCES, n); i++) {
            load_source(i);
        }
        for (int i = 0; i < n; i++) {
            if (i + L::SOURCES < n) {
                barrier_wait(r.source_empty + i % L::SOURCES * 8, i / L::SOURCES & 1);
                load_source(i + L::SOURCES);
            }
            int s = i / L::GROUPS;
            if (i % L::GROUPS == L::GROUPS - 1 && s + L::STAGES < stages) {
                barrier_wait(r.codes_empty + s % L::STAGES * 8, s / L::STAGES & 1);
                load_codes(s + L::STAGES);
            }
        }
    }
};

/* ---- codes to operands ---- */

__device__ __forceinline__ uint4 load_vector(uint32_t at)
{
    uint4 v;

    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* A lane's codes of half a group: of two weight rows, 8 apart, the columns 2 t, 2 t + 1,
 * 2 t + 8 and 2 t + 9 of each 16, where t is its number modulo 4. */
template <int F> struct half_codes;

template <> struct half_codes<FUSED_INT4> {
    uint4 low[2], high[2]; /* whole words of the rows; t chooses in each word */

    __device__ __forceinline__ void load(uint32_t tile, int group, int half)
    {
        int lane = threadIdx.x & 31;
        uint32_t at = tile +
                      ((threadIdx.x >> 5 & 3) * 16 + (lane >> 2)) * (uint32_t)FUSED_SEGMENT_BYTES +
                      group * 64 + half * 32;

        low[0] = load_vector(at);
        low[1] = load_vector(at + 16);
        high[0] = load_vector(at + 8 * FUSED_SEGMENT_BYTES);
        high[1] = load_vector(at + 8 * FUSED_SEGMENT_BYTES + 16);
    }
};

template <> struct half_codes<FUSED_FP8> {
    uint32_t low[4][2], high[4][2]; /* of each 16 columns two words; t chooses half of each */

    __device__ __forceinline__ void load(uint32_t tile, int group, int half)
    {
        int lane = threadIdx.x & 31, row = lane >> 2;
        uint32_t at = tile + (group * MIXED_ROWS + (threadIdx.x >> 5 & 3) * 16 + row) * MIXED_GROUP +
                      (lane >> 1 & 1) * 4;

#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t chunk = ((half * 4 + k) ^ row) * 16; /* the 128-byte swizzle */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                low[k][i] = load_word(at + chunk + i * 8);
                high[k][i] = load_word(at + 8 * MIXED_GROUP + chunk + i * 8);
            }
        }
    }
};

/* The scales of a group of these two rows, and how their codes are widened. tile, group:
 * as for the codes; row: the weight's, of the lower one; index: the group in its rows. */
template <int F> struct group_scales;

template <> struct group_scales<FUSED_FP8> {
    float scale[2];
    uint32_t select; /* spreads two codes over the upper bytes of two values */

    __device__ __forceinline__ group_scales(uint32_t, int, int row, int index, const mixed_args &a)
        : select(threadIdx.x & 1 ? 0x3424 : 0x1404)
    {
        const float *from = a.w_scale + (int64_t)row * a.n_groups + (a.n_groups > 1 ? index : 0);

        scale[0] = __ldg(from);
        scale[1] = __ldg(from + (int64_t)8 * a.n_groups);
    }
    __device__ __forceinline__ uint32_t values(uint32_t word) const
    {
        uint32_t v = __byte_perm(word, 0, select);

        return e4m3_pair((v >> 4 & 0x07f007f0u) | (v & 0x80008000u));
    }
    __device__ __forceinline__ void operand(uint32_t (&ret)[4], const half_codes<FUSED_FP8> &codes,
                                            int k) const
    {
        ret[0] = values(codes.low[k][0]);
        ret[1] = values(codes.high[k][0]);
        ret[2] = values(codes.low[k][1]);
        ret[3] = values(codes.high[k][1]);
    }
};

template <> struct group_scales<FUSED_INT4> {
    float scale[2];
    uint32_t zero[2];
    int shift;

    __device__ __forceinline__ group_scales(uint32_t tile, int group, int, int, const mixed_args &a)
        : shift((threadIdx.x & 3) * 4)
    {
        uint32_t at = tile +
                      ((threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7)) *
                          (uint32_t)FUSED_SEGMENT_BYTES +
                      FUSED_SEGMENT_K / 2 + group * 4;

#pragma unroll
        for (int h = 0; h < 2; h++) {
            int4_group g(load_word(at + h * 8 * FUSED_SEGMENT_BYTES), a.f16_scales);
            scale[h] = g.scale;
            zero[h] = g.zero;
        }
    }
    /* 128 + code is exact in bf16, and so is the difference to 128 + zero point. */
    __device__ __forceinline__ uint32_t values(uint32_t word, int h) const
    {
        uint32_t bits = ((word >> shift) & 0x000f000fu) | 0x43004300u;
        __nv_bfloat162 x = __hsub2(*(__nv_bfloat162 *)&bits, *(const __nv_bfloat162 *)&zero[h]);

        return *(uint32_t *)&x;
    }
    /* The operand of the k-th 16 columns of the half. */
    __device__ __forceinline__ void operand(uint32_t (&ret)[4],
                                            const half_codes<FUSED_INT4> &codes, int k) const
    {
        const uint4 &l = codes.low[k / 2], &h = codes.high[k / 2];

        ret[0] = values(k & 1 ? l.z : l.x, 0);
        ret[1] = values(k & 1 ? h.z : h.x, 1);
        ret[2] = values(k & 1 ? l.w : l.y, 0);
        ret[3] = values(k & 1 ? h.w : h.y, 1);
    }
};

/* ---- the mainloop ---- */

/* row: the first weight row of this warpgroup; first_group: of the block.
 *
 * d = the sums of this warpgroup's part of the depth; warpgroup w has the tile's 64 rows
 * w % TILES and every PARTS-th group from w / TILES on. */
template <int F, int N, int WIDTH>
__device__ __forceinline__ void multiply(float (&d)[N / 2],
                                         const rings<mixed_layout<F, N, WIDTH>> &r,
                                         const mixed_args &a, int row, int first_group)
{
    using L = mixed_layout<F, N, WIDTH>;
    int warpgroup = threadIdx.x / 128, part = warpgroup / L::TILES,
        stages = a.s.depth_steps / L::GROUPS;
    bool leads = (threadIdx.x & 31) == 0;

    row += (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);

#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        d[i] = 0.0f;
    }
    for (int s = 0; s < stages; s++) {
        int stage = s % L::STAGES;
        uint32_t tile =
            r.codes + stage * L::STAGE_BYTES + warpgroup % L::TILES * L::TILE_BYTES;
        barrier_wait(r.codes_full + stage * 8, s / L::STAGES & 1);
#pragma unroll 1
        for (int g = part; g < L::GROUPS; g += L::PARTS) {
            int i = s * L::GROUPS + g, source = i % L::SOURCES;
            uint32_t from = r.source + source * L::SOURCE_BYTES;
            group_scales<F> group(tile, g, row, first_group + i, a);
            float sums[N / 2];
            barrier_wait(r.source_full + source * 8, i / L::SOURCES & 1);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint64_t x = wgmma_descriptor(from + half * (L::SOURCE_BYTES / 2));
                half_codes<F> codes;
                codes.load(tile, g, half);
                if (N == 64 && half == 1) { /* too few registers for the operands of both */
                    wgmma_wait<0>();
                }
#pragma unroll
                for (int k = 0; k < MIXED_GROUP / 32; k++) {
                    uint32_t operand[4];
                    group.operand(operand, codes, k);
                    wgmma_fence();
                    wgmma_mixed<N>::run(sums, operand, x + k * 2, half + k > 0);
                }
                wgmma_commit();
            }
            wgmma_wait<0>();
            if (leads) {
                barrier_arrive(r.source_empty + source * 8);
                if (g + L::PARTS >= L::GROUPS) {
                    barrier_arrive(r.codes_empty + stage * 8);
                }
            }
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                d[j] += group.scale[j / 2 & 1] * sums[j];
            }
        }
    }
}

/* ---- epilogues ---- */

/* Sums in shared memory, [PARTS][N][SUM_PITCH] in each block of the cluster. */
template <typename L, int N, int SPLIT> struct shared_sums {
    uint32_t at[SPLIT];

    __device__ __forceinline__ shared_sums(uint32_t base)
    {
#pragma unroll
        for (int i = 0; i < SPLIT; i++) {
            at[i] = address_in(base, i);
        }
    }
    /* Four columns of a row: the sums of all parts of the depth, in order. */
    __device__ __forceinline__ float4 quad(int row, int column) const
    {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

#pragma unroll
        for (int i = 0; i < SPLIT * L::PARTS; i++) {
            float4 e = load_from(at[i / L::PARTS] +
                                 ((i % L::PARTS * N + row) * L::SUM_PITCH + column) * 4);
            v = make_float4(v.x + e.x, v.y + e.y, v.z + e.z, v.w + e.w);
        }
        return v;
    }
};

/* The warpgroups' sums to shared memory, as rows of the activations. */
template <typename L, int N>
__device__ __forceinline__ void keep_sums(const float (&d)[N / 2], float *sums)
{
    int lane = threadIdx.x & 31, warpgroup = threadIdx.x / 128;
    float *to = sums + warpgroup / L::TILES * N * L::SUM_PITCH +
                warpgroup % L::TILES * MIXED_ROWS + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);

#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        int row = j / 4 * 8 + (lane & 3) * 2 + (j & 1);
        to[row * L::SUM_PITCH + (j >> 1 & 1) * 8] = d[j];
    }
}

template <int ACT>
__device__ __forceinline__ uint2 gated_quad(const float4 &gate, const float4 &up, float f, int act)
{
    return make_uint2(pair(activated<ACT>(gate.x * f, act) * (up.x * f),
                           activated<ACT>(gate.y * f, act) * (up.y * f)),
                      pair(activated<ACT>(gate.z * f, act) * (up.z * f),
                           activated<ACT>(gate.w * f, act) * (up.w * f)));
}

template <typename L, int N, int SPLIT, int WIDTH>
__device__ __forceinline__ void store_gated(const shared_sums<L, N, SPLIT> &sums,
                                            const small_args &a, int tile)
{
    constexpr int LANES = WIDTH / 8;

    for (int e = threadIdx.x; e < N * LANES; e += MULTIPLIERS) {
        int row = e / LANES, column = e % LANES * 4;
        if (row >= a.rows) {
            continue;
        }
        float4 gate = sums.quad(row, column), up = sums.quad(row, WIDTH / 2 + column);
        float f = norm_factor(a, row);
        *(uint2 *)(a.out + row * a.out_stride + tile * (WIDTH / 2) + column) =
            a.act == A_SILU ? gated_quad<A_SILU>(gate, up, f, a.act)
                            : gated_quad<-1>(gate, up, f, a.act);
    }
}

template <int ACT>
__device__ __forceinline__ uint2 plain_quad(const float4 &v, uint2 bias, float f, int act)
{
    return make_uint2(pair(activated<ACT>(v.x * f + low(bias.x), act),
                           activated<ACT>(v.y * f + high(bias.x), act)),
                      pair(activated<ACT>(v.z * f + low(bias.y), act),
                           activated<ACT>(v.w * f + high(bias.y), act)));
}

/* out = act(factor * sums + bias); of a cluster's tile each block has its part of the
 * columns. */
template <typename L, int N, int SPLIT, int WIDTH>
__device__ __forceinline__ void store_plain(const shared_sums<L, N, SPLIT> &sums,
                                            const small_args &a, int tile, int part)
{
    constexpr int COLUMNS = WIDTH / SPLIT, LANES = COLUMNS / 4;

    for (int e = threadIdx.x; e < N * LANES; e += MULTIPLIERS) {
        int row = e / LANES, column = part * COLUMNS + e % LANES * 4, at = tile * WIDTH + column;
        if (row >= a.rows) {
            continue;
        }
        float4 v = sums.quad(row, column);
        float f = norm_factor(a, row);
        uint2 bias = a.bias ? *(const uint2 *)(a.bias + at) : make_uint2(0, 0);
        *(uint2 *)(a.out + row * a.out_stride + at) =
            a.act == A_NONE ? plain_quad<A_NONE>(v, bias, f, a.act)
                            : plain_quad<-1>(v, bias, f, a.act);
    }
}

/* The residual stream += sums, and what the next norm needs. */
template <typename L, int N, int SPLIT, int WIDTH>
__device__ __forceinline__ void store_sum(const shared_sums<L, N, SPLIT> &sums,
                                          const small_args &a, int tile, int part)
{
    constexpr int COLUMNS = WIDTH / SPLIT, LANES = COLUMNS / 4, LAST = LANES < 32 ? LANES : 32;

    static_assert(N * LANES % 32 == 0, "whole warps");
    for (int e = threadIdx.x; e < N * LANES; e += MULTIPLIERS) {
        int row = e / LANES, column = part * COLUMNS + e % LANES * 4;
        float square = 0.0f;
        if (row < a.rows) {
            float4 v = sums.quad(row, column);
            const float four[4] = {v.x, v.y, v.z, v.w};
            square = add_to_stream(a, row, tile * WIDTH + column, four);
        }
        if (a.squares_out) {
#pragma unroll
            for (int o = LAST / 2; o > 0; o >>= 1) {
                square += __shfl_xor_sync(0xffffffffu, square, o);
            }
            if (row < a.rows && e % LAST == 0) {
                atomicAdd(a.squares_out + row, as_squares(square));
            }
        }
    }
}

#endif

template <int F, int N, int WIDTH, int SPLIT>
__global__ void __launch_bounds__(HAS_WGMMA ? THREADS : 32, 1)
    mixed_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                 const __grid_constant__ mixed_args a, int kind)
{
#if HAS_WGMMA
    using L = mixed_layout<F, N, WIDTH>;
    extern __shared__ char raw[];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    rings<L> r(base);
    int part = SPLIT > 1 ? (int)(blockIdx.x % SPLIT) : 0, tile = (int)(blockIdx.x / SPLIT);

    if (threadIdx.x == 0) {
        r.init();
    }
    __syncthreads();
    pdl_release();
    if (threadIdx.x >= MULTIPLIERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == MULTIPLIERS) {
            loader<F, N, WIDTH>{&w,   &x,   a,           r,           kind,
                                tile, part * a.s.depth_steps, read_once(), read_again()}
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
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;"); /* of 96 for each thread */
    float d[N / 2];
    pdl_wait();
    if (kind != SMALL_SUM && a.s.cleared && blockIdx.x == 0 && threadIdx.x < SMALL_ROWS) {
        a.s.cleared[threadIdx.x] = 0;
    }
    multiply<F, N, WIDTH>(d, r, a, first_row<WIDTH>(a, kind, tile, threadIdx.x / 128 % L::TILES),
                          part * a.s.depth_steps);
    sync_multipliers(); /* the rings become room for sums */
    keep_sums<L, N>(d, (float *)(raw + (base - shared_address(raw))));
    if (SPLIT > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    } else {
        sync_multipliers();
    }
    shared_sums<L, N, SPLIT> sums(base);
    if (kind == SMALL_SUM) {
        store_sum<L, N, SPLIT, WIDTH>(sums, a.s, tile, part);
    } else if (kind == SMALL_PLAIN) {
        store_plain<L, N, SPLIT, WIDTH>(sums, a.s, tile, part);
    } else if (WIDTH > MIXED_ROWS) {
        store_gated<L, N, SPLIT, WIDTH>(sums, a.s, tile);
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
    c.gridDim = dim3(a.s.n / WIDTH * SPLIT);
    c.blockDim = dim3(THREADS);
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
#define TILE(WIDTH, SPLIT)                                              \
    if (t.width == WIDTH && t.split == SPLIT) {                         \
        return launch_tile<F, N, WIDTH, SPLIT>(w, x, a, t.kind, stream); \
    }
    MIXED_TILES(TILE)
#undef TILE
    return false;
}

/* FUSED_FP8 has more than 8 rows multiplied as codes (small_codes.h). */
bool launch_format(int32_t format, struct small_tile t, const CUtensorMap &w, const CUtensorMap &x,
                   const mixed_args &a, cudaStream_t stream)
{
    if (format == FUSED_FP8) {
        return a.s.rows <= 8 && launch_product<FUSED_FP8, 8>(t, w, x, a, stream);
    }
    return a.s.rows <= 8    ? launch_product<FUSED_INT4, 8>(t, w, x, a, stream)
           : a.s.rows <= 16 ? launch_product<FUSED_INT4, 16>(t, w, x, a, stream)
           : a.s.rows <= 32 ? launch_product<FUSED_INT4, 32>(t, w, x, a, stream)
                            : launch_product<FUSED_INT4, 64>(t, w, x, a, stream);
}

template <int F, int N> void prepare(void)
{
#define TILE(WIDTH, SPLIT) \
    allow_shared(mixed_kernel<F, N, WIDTH, SPLIT>, mixed_layout<F, N, WIDTH>::BYTES);
    MIXED_TILES(TILE)
#undef TILE
}

} /* namespace */

extern "C" void small_mixed_prepare(void)
{
    prepare<FUSED_INT4, 8>();
    prepare<FUSED_INT4, 16>();
    prepare<FUSED_INT4, 32>();
    prepare<FUSED_INT4, 64>();
    prepare<FUSED_FP8, 8>();
}

bool launch_small_mixed(const struct fused_args *a, const struct fused_op *p, struct small_tile t,
                        const struct small_args &s, const void *x, int64_t x_stride,
                        cudaStream_t stream)
{
    CUtensorMap wm, xm;
    mixed_args m = {};

    m.s = s;
    m.s.depth_steps = p->k / MIXED_GROUP / t.split;
    m.w_scale = p->w_scale;
    m.n_groups = 1;
    m.f16_scales = p->f16_scales;
    bool ok = a->format == FUSED_INT4
                  ? small_map_words(&wm, p->w, p->n, p->w_stride / 4, p->w_stride,
                                    FUSED_SEGMENT_BYTES / 4, MIXED_ROWS)
                  : small_map_bytes(&wm, p->w, p->n, p->k, p->w_stride, MIXED_ROWS);
    return ok && small_map_16(&xm, x, a->rows, p->k, x_stride, s.source_rows) &&
           launch_format(a->format, t, wm, xm, m, stream);
}
