/* Products of few rows (small_rows.h): one warpgroup multiplies (two of more than
 * SMALL_ROWS rows), one lane of another warp loads. A stage of the ring holds 64
 * columns of the tile's weight rows and of the activations, both by tensor copies with
 * the 128-byte swizzle. There is one block a multiprocessor, so the ring has nearly all
 * of its shared memory. A stage has room for the rows that there are: the instruction
 * takes what lies behind them for more, whose sums nobody reads.
 *
 * With a split depth each of the two blocks of a cluster adds half of the columns, of
 * which the other one pushes its sums into its shared memory: 16 bytes a lane along
 * rows, from both. Clusters of two alone: with one block a multiprocessor larger ones
 * do not all fit at once.
 */
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/fused_decode/small_codes.h"
#include "kernels/cuda/fused_decode/small_split.cuh"
#include "kernels/cuda/fused_decode/small_sum.cuh"
#include "kernels/cuda/gemm/tensor_map.cuh"
#include "kernels/cuda/gemm/tiles.h"
#include "kernels/cuda/gemm/wgmma_widths.cuh"
#include "kernels/cuda/mixed/mixed.h"

namespace
{

enum {
    GROUP_BYTES = SMALL_ROWS * SMALL_DEPTH * 2, /* a warpgroup's activations of a stage */
    RING_BYTES = 220 * 1024,
    MOST_STAGES = 24,
    MOST_WEIGHT_BYTES = 160 * 1024, /* of all stages: more on their way are no faster */
};

/* GROUPS: warpgroups that multiply, each SMALL_ROWS rows of the activations. */
template <int WIDTH, int GROUPS> struct small_layout {
    static constexpr int THREADS = GROUPS * MULTIPLIERS + 32;
    static constexpr int WEIGHT_BYTES = WIDTH * SMALL_DEPTH * 2;
    static constexpr int MOST = MOST_WEIGHT_BYTES / WEIGHT_BYTES;
    static constexpr int STAGES = MOST < MOST_STAGES ? MOST : MOST_STAGES; /* at most */
    static constexpr int BYTES = RING_BYTES + (2 * STAGES + 1) * 8 + 1024;
};

#if HAS_WGMMA

/* The ring of stages: addresses of it and of its mbarriers. */
template <int WIDTH, int GROUPS> struct stage_ring {
    using L = small_layout<WIDTH, GROUPS>;
    uint32_t base, full, empty, pushed;
    int stage_bytes, stages;

    __device__ __forceinline__ stage_ring(uint32_t at, int source_rows)
        : base(at), full(at + RING_BYTES), empty(full + L::STAGES * 8),
          pushed(empty + L::STAGES * 8)
    {
        /* of one group what is behind its rows is read, too */
        int source = GROUPS > 1 ? GROUPS * GROUP_BYTES : source_rows * SMALL_DEPTH * 2;
        int behind = GROUPS > 1 ? 0 : GROUP_BYTES - source;

        stage_bytes = L::WEIGHT_BYTES + source;
        stages = min((RING_BYTES - behind) / stage_bytes, L::STAGES);
    }
};

/* Where one is in it. */
struct ring_place {
    int stage;
    uint32_t phase;

    __device__ __forceinline__ void next(int stages)
    {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* The lane that loads. Weights of all stages are on their way before the wait for the
 * launch ahead, which may still write the activations. */
template <int WIDTH, bool GATED, int GROUPS>
__device__ __forceinline__ void load_stages(const CUtensorMap *w, const CUtensorMap *x,
                                            const small_args &a, const stage_ring<WIDTH, GROUPS> &r,
                                            int tile, int first_step)
{
    using L = small_layout<WIDTH, GROUPS>;
    constexpr int ROWS = GATED ? WIDTH / 2 : WIDTH;
    uint64_t once = read_once(), again = read_again();
    uint32_t bytes = L::WEIGHT_BYTES + a.source_rows * SMALL_DEPTH * 2;
    auto load_weights = [&](int i, int stage) {
        uint32_t to = r.base + stage * r.stage_bytes, bar = r.full + stage * 8;
        barrier_expect(bar, bytes);
        tensor_copy(to, w, (first_step + i) * SMALL_DEPTH, tile * ROWS, bar, once);
        if (GATED) {
            tensor_copy(to + L::WEIGHT_BYTES / 2, w, (first_step + i) * SMALL_DEPTH,
                        a.n / 2 + tile * ROWS, bar, once);
        }
    };
    auto load_source = [&](int i, int stage) {
        tensor_copy(r.base + stage * r.stage_bytes + L::WEIGHT_BYTES, x,
                    (first_step + i) * SMALL_DEPTH, 0, r.full + stage * 8, again);
    };
    int ahead = min(r.stages, a.depth_steps);
    ring_place free = {0, 0};

    for (int i = 0; i < ahead; i++) {
        load_weights(i, i);
    }
    pdl_wait();
    for (int i = 0; i < ahead; i++) {
        load_source(i, i);
    }
    for (int i = ahead; i < a.depth_steps; i++) {
        barrier_wait(r.empty + free.stage * 8, free.phase);
        load_weights(i, free.stage);
        load_source(i, free.stage);
        free.next(r.stages);
    }
}

template <int WIDTH, int GROUPS>
__device__ __forceinline__ void multiply(float (&d)[WIDTH / 2], const stage_ring<WIDTH, GROUPS> &r,
                                         int n_steps)
{
    using L = small_layout<WIDTH, GROUPS>;
    uint32_t source = L::WEIGHT_BYTES;
    ring_place at = {0, 0};
    int before = 0; /* the stage before */

    if (GROUPS > 1) { /* the same in all lanes, which the compiler cannot know of threadIdx */
        source += __shfl_sync(0xffffffffu, threadIdx.x / MULTIPLIERS, 0) * GROUP_BYTES;
    }

    for (int i = 0; i < n_steps; i++) {
        uint32_t stage = r.base + at.stage * r.stage_bytes;
        barrier_wait(r.full + at.stage * 8, at.phase);
        uint64_t x = wgmma_descriptor(stage + source), w = wgmma_descriptor(stage);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < SMALL_DEPTH / 16; k++) {
            wgmma_width<WIDTH>::run(d, x + k * 2, w + k * 2, i > 0 || k > 0);
        }
        wgmma_commit();
        if (i > 0) {
            wgmma_wait<1>();
            if (threadIdx.x % MULTIPLIERS == 0) {
                barrier_arrive(r.empty + before * 8);
            }
        }
        before = at.stage;
        at.next(r.stages);
    }
    wgmma_wait<0>();
}

/* out = act(factor * sums + bias), from the registers of the matrix instruction. */
template <int WIDTH, int ACT>
__device__ __forceinline__ void store_plain(const float (&d)[WIDTH / 2], const small_args &a,
                                            int tile)
{
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2), c = (lane & 3) * 2;
    int columns = a.n - tile * WIDTH; /* fewer than WIDTH of a last tile that is cut */
    float factor[2] = {norm_factor(a, row), norm_factor(a, row + 8)};

#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        if (row >= a.rows) {
            return;
        }
        bf16 *out = a.out + row * a.out_stride + tile * WIDTH + c;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            if (j * 8 >= columns) {
                break;
            }
            float v0 = d[j * 4 + h * 2] * factor[h], v1 = d[j * 4 + h * 2 + 1] * factor[h];
            if (a.bias) {
                uint32_t b = *(const uint32_t *)(a.bias + tile * WIDTH + j * 8 + c);
                v0 += low(b);
                v1 += high(b);
            }
            *(uint32_t *)(out + j * 8) = pair(activated<ACT>(v0, a.act), activated<ACT>(v1, a.act));
        }
    }
}

/* The tile's first half of weight rows makes the gate, its second what is gated: a lane
 * has both of a column. */
template <int WIDTH, int ACT>
__device__ __forceinline__ void store_gated(const float (&d)[WIDTH / 2], const small_args &a,
                                            int tile)
{
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2), c = (lane & 3) * 2;
    int columns = a.n / 2 - tile * (WIDTH / 2); /* as in store_plain */
    float factor[2] = {norm_factor(a, row), norm_factor(a, row + 8)};

#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        if (row >= a.rows) {
            return;
        }
        float f = factor[h];
        bf16 *out = a.out + row * a.out_stride + tile * (WIDTH / 2) + c;
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++) {
            if (j * 8 >= columns) {
                break;
            }
            const float *gate = &d[j * 4 + h * 2], *up = &d[(j + WIDTH / 16) * 4 + h * 2];
            *(uint32_t *)(out + j * 8) = pair(activated<ACT>(gate[0] * f, a.act) * (up[0] * f),
                                              activated<ACT>(gate[1] * f, a.act) * (up[1] * f));
        }
    }
}

/* Adds the sums of a cluster's two blocks: this block has half of the tile's columns.
 * pushed: counts the bytes that come from the other one. */
template <int WIDTH, int KIND>
__device__ __forceinline__ void store_split(const float (&d)[WIDTH / 2], char *ring, uint32_t base,
                                            uint32_t pushed, const small_args &a, int tile,
                                            int part)
{
    constexpr int COLUMNS = WIDTH / 2, LANES = COLUMNS / 4, ALL = SMALL_ROWS * LANES;
    constexpr int QUADS = (ALL + MULTIPLIERS - 1) / MULTIPLIERS;

    static_assert(COLUMNS % 4 == 0, "whole quads");
    static_assert((2 * HALF_PITCH<WIDTH> + LANES) * 4 * SMALL_ROWS <= RING_BYTES, "sums fit");
    int t = threadIdx.x;
    float *mine = (float *)ring, *theirs = mine + SMALL_ROWS * HALF_PITCH<WIDTH>,
          *squares = theirs + SMALL_ROWS * HALF_PITCH<WIDTH>;

    stream_quad stream[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS && KIND == SMALL_SUM; q++) {
        int e = min(t + q * MULTIPLIERS, ALL - 1);
        stream[q] = load_stream(a, e / LANES, tile * WIDTH + part * COLUMNS + e % LANES * 4);
    }
    share_sums<WIDTH>(d, mine, base + SMALL_ROWS * HALF_PITCH<WIDTH> * 4, pushed, a.rows, part);
    float v[QUADS][4];
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int e = min(t + q * MULTIPLIERS, ALL - 1),
            at = e / LANES * HALF_PITCH<WIDTH> + e % LANES * 4;
        float4 x = *(const float4 *)(mine + at), y = *(const float4 *)(theirs + at);
        v[q][0] = x.x + y.x;
        v[q][1] = x.y + y.y;
        v[q][2] = x.z + y.z;
        v[q][3] = x.w + y.w;
    }
    if (KIND == SMALL_SUM && a.ranks.n_ranks > 0) {
        sum_over_ranks<ALL, LANES, MULTIPLIERS>(v, a.ranks, a.rows);
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int e = t + q * MULTIPLIERS, row = e / LANES, column = e % LANES * 4,
            at = tile * WIDTH + part * COLUMNS + column;
        float square = 0.0f;
        if (e >= ALL) {
            break;
        }
        if (row < a.rows && KIND == SMALL_SUM) {
            square = add_to_stream(a, row, at, stream[q], v[q]);
        } else if (row < a.rows) {
            float f = norm_factor(a, row);
            uint2 b = a.bias ? *(const uint2 *)(a.bias + at) : make_uint2(0, 0);
            *(uint2 *)(a.out + row * a.out_stride + at) =
                make_uint2(pair(activate(v[q][0] * f + low(b.x), a.act),
                                activate(v[q][1] * f + high(b.x), a.act)),
                           pair(activate(v[q][2] * f + low(b.y), a.act),
                                activate(v[q][3] * f + high(b.y), a.act)));
        }
        if (KIND == SMALL_SUM) {
            squares[e] = square;
        }
    }
    if (KIND == SMALL_SUM && a.squares_out) {
        sync_multipliers();
        if (t < a.rows) {
            float sum = 0.0f;
            for (int i = 0; i < LANES; i++) {
                sum += squares[t * LANES + i];
            }
            atomicAdd(a.squares_out + t, as_squares(sum));
        }
    }
    if (KIND == SMALL_SUM && a.ranks.n_ranks > 0) {
        sync_multipliers();
        if (t == 0) {
            leave_sum(a.ranks);
        }
    }
}

#endif

template <int WIDTH, int SPLIT, int KIND, int GROUPS>
__global__ void __launch_bounds__(HAS_WGMMA ? small_layout<WIDTH, GROUPS>::THREADS : 32, 1)
    small_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                 const __grid_constant__ small_args a)
{
#if HAS_WGMMA
    using L = small_layout<WIDTH, GROUPS>;
    static_assert(GROUPS == 1 || (SPLIT == 1 && KIND == SMALL_GATED), "an epilogue of rows alone");
    extern __shared__ char raw[];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    const stage_ring<WIDTH, GROUPS> r(base, a.source_rows);
    char *ring = raw + (base - shared_address(raw));
    int part = SPLIT > 1 ? (int)(blockIdx.x % SPLIT) : 0, tile = (int)(blockIdx.x / SPLIT);

    if (threadIdx.x == 0) {
        barriers_init(r.full, L::STAGES, 1);
    } else if (threadIdx.x == 32) {
        barriers_init(r.empty, L::STAGES, GROUPS);
    } else if (threadIdx.x == 64) {
        barriers_init(r.pushed, 1, 1);
        barrier_expect(r.pushed, a.rows * WIDTH / 2 * 4);
    } else if (threadIdx.x == GROUPS * MULTIPLIERS) {
        prefetch_map(&w);
        prefetch_map(&x);
    }
    __syncthreads();
    pdl_release();
    if (threadIdx.x >= GROUPS * MULTIPLIERS) {
        if (elected()) {
            load_stages<WIDTH, KIND == SMALL_GATED>(&w, &x, a, r, tile, part * a.depth_steps);
        }
        __syncwarp();
        if (SPLIT > 1) { /* the cluster's barriers are for all threads */
            cluster_arrive();
            cluster_wait();
        }
        return;
    }
    float d[WIDTH / 2];
    pdl_wait();
    if (KIND != SMALL_SUM && a.cleared && blockIdx.x == 0 && threadIdx.x < SMALL_ROWS) {
        a.cleared[threadIdx.x] = 0;
    }
    multiply(d, r, a.depth_steps);
    if (SPLIT > 1) {
        sync_multipliers(); /* the ring becomes room for sums */
        store_split<WIDTH, KIND>(d, ring, base, r.pushed, a, tile, part);
    } else if (KIND == SMALL_GATED) {
        if (a.act == A_SILU) {
            store_gated<WIDTH, A_SILU>(d, a, tile);
        } else {
            store_gated<WIDTH, -1>(d, a, tile);
        }
    } else if (a.act == A_NONE) {
        store_plain<WIDTH, A_NONE>(d, a, tile);
    } else {
        store_plain<WIDTH, -1>(d, a, tile);
    }
#endif
}

/* ---- host ---- */

template <int WIDTH, int SPLIT, int KIND, int GROUPS = 1>
bool launch_tile(const CUtensorMap &w, const CUtensorMap &x, const small_args &a,
                 cudaStream_t stream)
{
    using L = small_layout<WIDTH, GROUPS>;

    return launch_clusters(SPLIT, small_kernel<WIDTH, SPLIT, KIND, GROUPS>,
                           dim3((a.n + WIDTH - 1) / WIDTH * SPLIT), dim3(L::THREADS), L::BYTES,
                           stream, w, x, a);
}

bool launch_product(const struct small_tile &t, const CUtensorMap &w, const CUtensorMap &x,
                    const small_args &a, cudaStream_t stream)
{
#define TILE(WIDTH, SPLIT, KIND)                                  \
    if (t.width == WIDTH && t.split == SPLIT && t.kind == KIND) { \
        return launch_tile<WIDTH, SPLIT, KIND>(w, x, a, stream);  \
    }
    SMALL_TILES(TILE)
#undef TILE
    return false;
}

/* The norm behind op `i`, which the next product takes apart. Its sums begin at zero:
 * the last reader of the other ones has cleared these. */
bool norm_behind(small_args *ret, const struct fused_args *a, int32_t i,
                 struct small_squares *squares, cudaStream_t stream)
{
    const struct fused_op *next = &a->op[i + 1];

    if (i + 1 >= a->n_ops || !small_norm_apart(a, i + 1)) {
        return true;
    }
    squares->turn ^= 1;
    ret->squares_out = squares->sum[squares->turn];
    ret->times_weight = (bf16 *)next->h;
    ret->times_stride = next->h_stride;
    ret->weight = (const bf16 *)next->norm.weight;
    ret->weight_offset = next->norm.weight_offset;
    bool zero = squares->zero[squares->turn];
    squares->zero[squares->turn] = false;
    return zero || cudaMemsetAsync(ret->squares_out, 0, sizeof(*ret->squares_out) * SMALL_ROWS,
                                   stream) == cudaSuccess;
}

/* The norm before op `p`, taken apart. */
void norm_before(small_args *ret, const struct fused_op *p, struct small_squares *squares)
{
    ret->squares = squares->sum[squares->turn];
    ret->cleared = squares->sum[squares->turn ^ 1];
    squares->zero[squares->turn ^ 1] = true;
    ret->columns = (float)p->k;
    ret->eps = p->norm.eps;
}

bool launch_op(const struct fused_args *a, int32_t i, struct small_squares *squares,
               int32_t n_blocks, cudaStream_t stream)
{
    const struct fused_op *p = &a->op[i];
    bool mixed = a->format != FUSED_16;
    struct small_tile t =
        mixed ? small_mixed_tile(p, a->format, a->rows, n_blocks) : small_tile_of(p, n_blocks);
    struct small_target to = small_target_of(p, t.kind);
    const void *from = p->h ? p->h : p->x;
    int64_t stride = p->h ? p->h_stride : p->x_stride;
    CUtensorMap w, x;
    small_args k = {};

    if (small_norm_apart(a, i)) {
        norm_before(&k, p, squares);
    } else if (p->h) {
        launch_norm(p->h, p->h_stride, (void *)p->x, p->x_stride, NULL, 0, &p->norm, a->rows, p->k,
                    a->type, stream);
    }
    k.out = (bf16 *)to.out;
    k.out_stride = to.stride;
    k.bias = (const bf16 *)p->bias;
    k.act = to.act;
    k.rows = a->rows;
    k.source_rows = (a->rows + 7) / 8 * 8;
    k.n = p->n;
    k.depth_steps = p->k / SMALL_DEPTH / t.split;
    if (p->partial) {
        k.ranks = summands_of(&a->p2p);
    }
    if (t.kind == SMALL_SUM && !norm_behind(&k, a, i, squares, stream)) {
        return false;
    }
    if (mixed) {
        return launch_small_mixed(a, p, t, k, from, stride, stream);
    }
    return tensor_map_16(&w, T_BF16, p->w, p->n, p->k, p->w_stride,
                         t.kind == SMALL_GATED ? t.width / 2 : t.width) &&
           tensor_map_16(&x, T_BF16, from, a->rows, p->k, stride, k.source_rows) &&
           launch_product(t, w, x, k, stream);
}

} /* namespace */

extern "C" bool small_map_bytes(void *ret, const void *data, int64_t rows, int64_t columns,
                                int64_t pitch, int box_rows)
{
    return tensor_map((CUtensorMap *)ret, CU_TENSOR_MAP_DATA_TYPE_UINT8, data, rows, columns, pitch,
                      box_rows, CODES_DEPTH);
}

extern "C" bool small_prepare(void)
{
    cudaFuncAttributes made = {};
    /* Code without the instruction, Hopper's alone, has an empty body and a lower
     * bound. */
    bool ok = tensor_map_encoder() &&
              cudaFuncGetAttributes(&made, small_kernel<64, 2, SMALL_SUM, 1>) == cudaSuccess &&
              made.maxThreadsPerBlock >= small_layout<64, 1>::THREADS;

#define TILE(WIDTH, SPLIT, KIND) \
    ok = ok && allow_shared(small_kernel<WIDTH, SPLIT, KIND, 1>, small_layout<WIDTH, 1>::BYTES);
    SMALL_TILES(TILE)
#undef TILE
    ok = ok && allow_shared(small_kernel<WIDE_GATE, 1, SMALL_GATED, 2>,
                            small_layout<WIDE_GATE, 2>::BYTES);
    cudaGetLastError();
    return ok;
}

extern "C" bool launch_gated_wide(const struct tiles_args *a, cudaStream_t stream)
{
    static bool ready = small_prepare();
    CUtensorMap w, x;
    small_args k = {};

    k.out = (bf16 *)a->out;
    k.out_stride = a->out_stride;
    k.act = a->act;
    k.rows = a->rows;
    k.source_rows = (a->rows + 7) / 8 * 8;
    k.n = a->n;
    k.depth_steps = a->k / SMALL_DEPTH;
    return ready && a->type == T_BF16 && a->k % SMALL_DEPTH == 0 && a->rows <= 2 * SMALL_ROWS &&
           tensor_map_16(&w, T_BF16, a->w, a->n, a->k, a->w_stride, WIDE_GATE / 2) &&
           tensor_map_16(&x, T_BF16, a->x, a->rows, a->k, a->x_stride, k.source_rows) &&
           launch_tile<WIDE_GATE, 1, SMALL_GATED, 2>(w, x, k, stream);
}

extern "C" bool launch_small_rows(const struct fused_args *a, struct small_squares *squares,
                                  int32_t n_blocks, cudaStream_t stream)
{
    bool ok = true;

    for (int32_t i = 0; i < a->n_ops && ok; i++) {
        const struct fused_op *p = &a->op[i];
        if (p->n == 0) {
            launch_norm(p->h, p->h_stride, (void *)p->x, p->x_stride, NULL, 0, &p->norm, a->rows,
                        p->k, a->type, stream);
        } else {
            ok = launch_op(a, i, squares, n_blocks, stream);
        }
    }
    return ok;
}
