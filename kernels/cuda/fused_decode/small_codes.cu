/* Products of few rows of e4m3 codes (small_codes.h): the pipeline is that of
 * small_rows.cu. One warpgroup multiplies, one lane of a fifth warp loads.
 */
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_decode/small_codes.h"
#include "kernels/cuda/fused_decode/small_split.cuh"
#include "kernels/cuda/fused_decode/small_sum.cuh"
#include "kernels/cuda/gemm/wgmma_widths.cuh"
#include "kernels/cuda/quant/quant.h"

namespace
{

enum {
    THREADS = MULTIPLIERS + 32,
    SOURCE_BYTES = SMALL_ROWS * CODES_DEPTH, /* the activations of a stage */
    RING_BYTES = 220 * 1024,
    MOST_STAGES = 13,
    MOST_WIDTH = 224,
};

struct codes_args {
    bf16 *out; /* [rows, n]; gated [rows, n / 2]; the residual stream, which is added to */
    int64_t out_stride;
    const bf16 *bias;               /* [n] or NULL */
    const float *w_scale, *x_scale; /* [n], [rows] */
    int32_t act;
    int32_t rows, source_rows; /* the latter of a source's copy: a multiple of 8 */
    int32_t n, depth_steps;    /* stages of a block's part of the depth, an even number */
    struct p2p_summands ranks; /* SMALL_SUM: the other ranks' summands */
};

template <int WIDTH> struct codes_layout {
    static constexpr int WEIGHT_BYTES = WIDTH * CODES_DEPTH;
    static constexpr int STAGE_BYTES = WEIGHT_BYTES + SOURCE_BYTES;
    static constexpr int FIT = RING_BYTES / STAGE_BYTES;
    static constexpr int STAGES = FIT > MOST_STAGES ? MOST_STAGES : FIT;
    static constexpr int BYTES = STAGES * STAGE_BYTES + (2 * STAGES + 1) * 8 + 1024;
};

#if HAS_WGMMA

/* Of wide tiles one half after the other: two sums of all columns do not fit into
 * registers beside the whole sum. */
template <int WIDTH> constexpr int PARTS = WIDTH > 128 ? 2 : 1;
template <int WIDTH> constexpr int PART = WIDTH / PARTS<WIDTH>;

/* The lane that loads. Weights of all stages are on their way before the wait for the
 * launch ahead, which still writes the activations' codes. */
template <int WIDTH, bool GATED>
__device__ __forceinline__ void load_stages(const CUtensorMap *w, const CUtensorMap *x,
                                            const codes_args &a, uint32_t base, uint32_t full,
                                            uint32_t empty, int tile, int first_step)
{
    using L = codes_layout<WIDTH>;
    constexpr int ROWS = GATED ? WIDTH / 2 : WIDTH;
    uint64_t once = read_once(), again = read_again();
    uint32_t bytes = L::WEIGHT_BYTES + a.source_rows * CODES_DEPTH;
    auto load_weights = [&](int i) {
        uint32_t to = base + i % L::STAGES * L::STAGE_BYTES, bar = full + i % L::STAGES * 8;
        barrier_expect(bar, bytes);
        tensor_copy(to, w, (first_step + i) * CODES_DEPTH, tile * ROWS, bar, once);
        if (GATED) {
            tensor_copy(to + L::WEIGHT_BYTES / 2, w, (first_step + i) * CODES_DEPTH,
                        a.n / 2 + tile * ROWS, bar, once);
        }
    };
    auto load_source = [&](int i) {
        tensor_copy(base + i % L::STAGES * L::STAGE_BYTES + L::WEIGHT_BYTES, x,
                    (first_step + i) * CODES_DEPTH, 0, full + i % L::STAGES * 8, again);
    };
    int ahead = min(L::STAGES, a.depth_steps);

    for (int i = 0; i < ahead; i++) {
        load_weights(i);
    }
    pdl_wait();
    for (int i = 0; i < ahead; i++) {
        load_source(i);
    }
    for (int i = ahead; i < a.depth_steps; i++) {
        barrier_wait(empty + i % L::STAGES * 8, (i / L::STAGES & 1) ^ 1);
        load_weights(i);
        load_source(i);
    }
}

/* ---- the mainloop ---- */

/* Starts the sums of a stage over `part` of the tile's weight rows. */
template <int WIDTH>
__device__ __forceinline__ void start_sums(float (&sums)[PART<WIDTH> / 2], uint32_t stage, int part)
{
    using L = codes_layout<WIDTH>;
    uint64_t x = wgmma_descriptor(stage + L::WEIGHT_BYTES),
             w = wgmma_descriptor(stage + part * PART<WIDTH> * CODES_DEPTH);

#pragma unroll
    for (int k = 0; k < CODES_DEPTH / 32; k++) {
        wgmma_width<PART<WIDTH>>::run_e4m3(sums, x + k * 2, w + k * 2, k > 0);
    }
}

template <int N, int FIRST, int ALL>
__device__ __forceinline__ void add_sums(float (&d)[ALL], const float (&sums)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        d[FIRST + i] += sums[i];
    }
}

/* Two stages a turn, or the two halves of a wide tile. The matrix instructions of a
 * turn end before their sums are read: the assembler allows no overlap of the two. */
template <int WIDTH>
__device__ __forceinline__ void multiply(float (&d)[WIDTH / 2], uint32_t base, uint32_t full,
                                         uint32_t empty, int n_steps)
{
    using L = codes_layout<WIDTH>;
    constexpr int N = PART<WIDTH> / 2, SECOND = PARTS<WIDTH> == 2 ? N : 0, STEP = 2 / PARTS<WIDTH>;
    float even[N], odd[N];
    auto wait_stage = [&](int i) {
        barrier_wait(full + i % L::STAGES * 8, i / L::STAGES & 1);
        return base + i % L::STAGES * L::STAGE_BYTES;
    };
    auto release = [&](int i) {
        if ((threadIdx.x & 31) == 0) {
            barrier_arrive(empty + i % L::STAGES * 8);
        }
    };

#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        d[i] = 0.0f;
    }
    for (int i = 0; i < n_steps; i += STEP) {
        uint32_t first = wait_stage(i), second = STEP == 2 ? wait_stage(i + 1) : first;
        wgmma_fence();
        start_sums<WIDTH>(even, first, 0);
        start_sums<WIDTH>(odd, second, STEP == 2 ? 0 : 1);
        wgmma_commit();
        wgmma_wait<0>();
        release(i);
        if (STEP == 2) {
            release(i + 1);
        }
        add_sums<N, 0>(d, even);
        add_sums<N, SECOND>(d, odd);
    }
}

/* ---- epilogues ---- */

/* out = act(scales * sums + bias), from the registers of the matrix instruction;
 * w_scale: of the tile's rows. */
template <int WIDTH, int ACT>
__device__ __forceinline__ void store_plain(const float (&d)[WIDTH / 2], const codes_args &a,
                                            const float *w_scale, int tile)
{
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2), c = (lane & 3) * 2;

#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        if (row >= a.rows) {
            return;
        }
        float f = __ldcg(a.x_scale + row);
        bf16 *out = a.out + row * a.out_stride + tile * WIDTH + c;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            float2 s = *(const float2 *)(w_scale + j * 8 + c);
            float v0 = d[j * 4 + h * 2] * (f * s.x), v1 = d[j * 4 + h * 2 + 1] * (f * s.y);
            if (a.bias) {
                uint32_t b = *(const uint32_t *)(a.bias + tile * WIDTH + j * 8 + c);
                v0 += low(b);
                v1 += high(b);
            }
            *(uint32_t *)(out + j * 8) = pair(activated<ACT>(v0, a.act), activated<ACT>(v1, a.act));
        }
    }
}

/* The tile's first half of weight rows makes the gate, its second what is gated. */
template <int WIDTH, int ACT>
__device__ __forceinline__ void store_gated(const float (&d)[WIDTH / 2], const codes_args &a,
                                            const float *w_scale, int tile)
{
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2), c = (lane & 3) * 2;

#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        if (row >= a.rows) {
            return;
        }
        float f = __ldcg(a.x_scale + row);
        bf16 *out = a.out + row * a.out_stride + tile * (WIDTH / 2) + c;
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++) {
            const float *gate = &d[j * 4 + h * 2], *up = &d[(j + WIDTH / 16) * 4 + h * 2];
            float2 g = *(const float2 *)(w_scale + j * 8 + c),
                   u = *(const float2 *)(w_scale + WIDTH / 2 + j * 8 + c);
            *(uint32_t *)(out + j * 8) =
                pair(activated<ACT>(gate[0] * (f * g.x), a.act) * (up[0] * (f * u.x)),
                     activated<ACT>(gate[1] * (f * g.y), a.act) * (up[1] * (f * u.y)));
        }
    }
}

/* The residual stream += the sums of a cluster's two blocks: this block has half of the
 * tile's columns. */
template <int WIDTH>
__device__ __forceinline__ void store_sum(const float (&d)[WIDTH / 2], char *ring, uint32_t base,
                                          uint32_t pushed, const codes_args &a,
                                          const float *w_scale, int tile, int part)
{
    using L = codes_layout<WIDTH>;
    constexpr int COLUMNS = WIDTH / 2, LANES = COLUMNS / 4, ALL = SMALL_ROWS * LANES;
    constexpr int QUADS = (ALL + MULTIPLIERS - 1) / MULTIPLIERS;

    static_assert(COLUMNS % 4 == 0, "whole quads");
    static_assert(2 * HALF_PITCH<WIDTH> * 4 * SMALL_ROWS <= L::STAGES * L::STAGE_BYTES, "sums fit");
    int t = threadIdx.x;
    float *mine = (float *)ring, *theirs = mine + SMALL_ROWS * HALF_PITCH<WIDTH>;

    uint2 was[QUADS]; /* loaded before the wait for the other block, which takes as long */
    float factor[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int e = min(t + q * MULTIPLIERS, ALL - 1), row = e / LANES,
            column = part * COLUMNS + e % LANES * 4;
        was[q] = make_uint2(0, 0);
        factor[q] = 0.0f;
        if (row < a.rows) {
            was[q] = __ldcg((const uint2 *)(a.out + row * a.out_stride + tile * WIDTH + column));
            factor[q] = __ldcg(a.x_scale + row);
        }
    }
    share_sums<WIDTH>(d, mine, base + SMALL_ROWS * HALF_PITCH<WIDTH> * 4, pushed, a.rows, part);
    float v[QUADS][4];
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int e = min(t + q * MULTIPLIERS, ALL - 1), column = e % LANES * 4,
            at = e / LANES * HALF_PITCH<WIDTH> + column;
        float4 x = *(const float4 *)(mine + at), y = *(const float4 *)(theirs + at);
        float4 s = *(const float4 *)(w_scale + part * COLUMNS + column);
        float f = factor[q];
        v[q][0] = (x.x + y.x) * (f * s.x);
        v[q][1] = (x.y + y.y) * (f * s.y);
        v[q][2] = (x.z + y.z) * (f * s.z);
        v[q][3] = (x.w + y.w) * (f * s.w);
    }
    if (a.ranks.n_ranks > 0) {
        sum_over_ranks<ALL, LANES, MULTIPLIERS>(v, a.ranks, a.rows);
        sync_multipliers();
        if (t == 0) {
            leave_sum(a.ranks);
        }
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int e = t + q * MULTIPLIERS, row = e / LANES, column = part * COLUMNS + e % LANES * 4;
        if (e < ALL && row < a.rows) {
            *(uint2 *)(a.out + row * a.out_stride + tile * WIDTH + column) =
                make_uint2(pair(low(was[q].x) + v[q][0], high(was[q].x) + v[q][1]),
                           pair(low(was[q].y) + v[q][2], high(was[q].y) + v[q][3]));
        }
    }
}

/* The scales of the tile's weight rows, which depend on no other launch. */
template <int WIDTH, int KIND>
__device__ __forceinline__ void fetch_scales(float *to, const codes_args &a, int tile)
{
    for (int i = threadIdx.x; i < WIDTH; i += MULTIPLIERS) {
        int row = KIND != SMALL_GATED ? tile * WIDTH + i
                  : i < WIDTH / 2     ? tile * (WIDTH / 2) + i
                                      : a.n / 2 + tile * (WIDTH / 2) + i - WIDTH / 2;
        to[i] = __ldg(a.w_scale + row);
    }
}

#endif

template <int WIDTH, int SPLIT, int KIND>
__global__ void __launch_bounds__(HAS_WGMMA ? THREADS : 32, 1)
    codes_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                 const __grid_constant__ codes_args a)
{
#if HAS_WGMMA
    using L = codes_layout<WIDTH>;
    extern __shared__ char raw[];
    __shared__ __align__(16) float w_scale[WIDTH];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    uint32_t full = base + L::STAGES * L::STAGE_BYTES, empty = full + L::STAGES * 8,
             pushed = empty + L::STAGES * 8;
    char *ring = raw + (base - shared_address(raw));
    int part = SPLIT > 1 ? (int)(blockIdx.x % SPLIT) : 0, tile = (int)(blockIdx.x / SPLIT);

    if (threadIdx.x == 0) {
        barriers_init(full, L::STAGES, 1);
    } else if (threadIdx.x == 32) {
        barriers_init(empty, L::STAGES, MULTIPLIERS / 32);
    } else if (threadIdx.x == 64) {
        barriers_init(pushed, 1, 1);
        barrier_expect(pushed, a.rows * WIDTH / 2 * 4);
    } else if (threadIdx.x == MULTIPLIERS) {
        prefetch_map(&w);
        prefetch_map(&x);
    }
    __syncthreads();
    pdl_release();
    if (threadIdx.x >= MULTIPLIERS) {
        if (elected()) {
            load_stages<WIDTH, KIND == SMALL_GATED>(&w, &x, a, base, full, empty, tile,
                                                    part * a.depth_steps);
        }
        __syncwarp();
        if (SPLIT > 1) { /* the cluster's barriers are for all threads */
            cluster_arrive();
            cluster_wait();
        }
        return;
    }
    float d[WIDTH / 2];
    fetch_scales<WIDTH, KIND>(w_scale, a, tile);
    pdl_wait();
    multiply<WIDTH>(d, base, full, empty, a.depth_steps);
    sync_multipliers(); /* the scales are there; the ring becomes room for sums */
    if (KIND == SMALL_SUM) {
        store_sum<WIDTH>(d, ring, base, pushed, a, w_scale, tile, part);
    } else if (KIND == SMALL_GATED) {
        if (a.act == A_SILU) {
            store_gated<WIDTH, A_SILU>(d, a, w_scale, tile);
        } else {
            store_gated<WIDTH, -1>(d, a, w_scale, tile);
        }
    } else if (a.act == A_NONE) {
        store_plain<WIDTH, A_NONE>(d, a, w_scale, tile);
    } else {
        store_plain<WIDTH, -1>(d, a, w_scale, tile);
    }
#endif
}

/* ---- host ---- */

template <int WIDTH, int SPLIT, int KIND>
bool launch_tile(const CUtensorMap &w, const CUtensorMap &x, const codes_args &a,
                 cudaStream_t stream)
{
    return launch_clusters(SPLIT, codes_kernel<WIDTH, SPLIT, KIND>, dim3(a.n / WIDTH * SPLIT),
                           dim3(THREADS), codes_layout<WIDTH>::BYTES, stream, w, x, a);
}

bool launch_product(const struct small_tile &t, const CUtensorMap &w, const CUtensorMap &x,
                    const codes_args &a, cudaStream_t stream)
{
#define TILE(WIDTH, SPLIT, KIND)                                  \
    if (t.width == WIDTH && t.split == SPLIT && t.kind == KIND) { \
        return launch_tile<WIDTH, SPLIT, KIND>(w, x, a, stream);  \
    }
    CODES_TILES(TILE)
#undef TILE
    return false;
}

/* The codes of an op's activations, after the norm if it starts with one. */
void make_codes(const struct fused_args *a, const struct fused_op *p, cudaStream_t stream)
{
    if (p->h) {
        struct norm_quantise_args n = {};
        n.codes = a->codes;
        n.scale = a->code_scale;
        n.fixed = p->act_scale;
        n.h = p->h_transient ? NULL : p->h;
        n.h_stride = p->h_stride;
        n.x = (void *)p->x;
        n.x_stride = p->x_stride;
        n.norm = p->norm;
        launch_norm_quantise(&n, a->type, a->rows, p->k, stream);
    } else {
        launch_quantise_rows(a->codes, a->code_scale, p->act_scale, p->x, p->x_stride, a->type,
                             a->rows, p->k, stream);
    }
}

bool launch_op(const struct fused_args *a, const struct fused_op *p, int32_t n_blocks,
               cudaStream_t stream)
{
    struct small_tile t = small_codes_tile(p, n_blocks);
    struct small_target to = small_target_of(p, t.kind);
    CUtensorMap w, x;
    codes_args k = {};

    make_codes(a, p, stream);
    k.out = (bf16 *)to.out;
    k.out_stride = to.stride;
    k.bias = (const bf16 *)p->bias;
    k.w_scale = p->w_scale;
    k.x_scale = a->code_scale;
    k.act = to.act;
    k.rows = a->rows;
    k.source_rows = (a->rows + 7) / 8 * 8;
    k.n = p->n;
    k.depth_steps = p->k / CODES_DEPTH / t.split;
    if (p->partial) {
        k.ranks = summands_of(&a->p2p);
    }
    return small_map_bytes(&w, p->w, p->n, p->k, p->w_stride,
                           t.kind == SMALL_GATED ? t.width / 2 : t.width) &&
           small_map_bytes(&x, a->codes, a->rows, p->k, p->k, k.source_rows) &&
           launch_product(t, w, x, k, stream);
}

} /* namespace */

extern "C" void small_codes_prepare(void)
{
#define TILE(WIDTH, SPLIT, KIND) \
    allow_shared(codes_kernel<WIDTH, SPLIT, KIND>, codes_layout<WIDTH>::BYTES);
    CODES_TILES(TILE)
#undef TILE
}

extern "C" bool launch_small_codes(const struct fused_args *a, int32_t n_blocks,
                                   cudaStream_t stream)
{
    bool ok = true;

    for (int32_t i = 0; i < a->n_ops && ok; i++) {
        const struct fused_op *p = &a->op[i];
        if (p->n == 0) {
            launch_norm(p->h, p->h_stride, (void *)p->x, p->x_stride, NULL, 0, &p->norm, a->rows,
                        p->k, a->type, stream);
        } else {
            ok = launch_op(a, p, n_blocks, stream);
        }
    }
    return ok;
}
