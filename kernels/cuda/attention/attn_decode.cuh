/* Paged decode attention on tensor cores: split-KV over a balanced work list.
 *
 * The chunks (16 tokens) of all sequences are laid end to end and cut into equal
 * splits, whatever the lengths. Each head of a split goes to a warp group: the warps of
 * a block, or a single one when there are many short sequences (struct split_kv_plan,
 * made by the host for the step's lengths). Within a split, a work tile is the part of
 * one sequence. The warps of a group take a work tile's chunks in turn, each with its
 * own ring of shared-memory stages, so the mainloop waits for no other warp and loads
 * run on across work tiles. Up to 16 query heads of one KV head are the columns of one
 * matrix tile, so a chunk is read once for all of them. At the end of a work tile the
 * group combines its results in shared memory; a sequence cut between splits is
 * combined through global memory by its last split, in order (split_kv.cuh).
 *
 * Samples of one request, beams and cached prefixes share blocks. The chunks that
 * consecutive sequences share are read once by a separate launch (PREFIX), whose matrix
 * tile holds the query heads of all members (as in Hydragen, Juravsky et al. 2024).
 * Each member merges the result with its own at the end.
 *
 * T is the matrix unit's type, C the cache's: T itself, or one of 8 bits
 * (attn_decode_tile.cuh). Activations are of T; with a cache of 8 bits they are of
 * attn_args.type, and T is float16.
 */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ATTN_DECODE_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_ATTN_DECODE_CUH

#include "config/base/limits.h"
#include "kernels/cuda/attention/attn_decode_tile.cuh"
#include "kernels/cuda/attention/split_kv.cuh"
#include "kernels/cuda/attention/tile_scheduler.cuh"

/* Offsets in shared memory: rows being combined, their maxima and sums, mbarriers
 * [warp][DECODE_MAX_STAGES], rings. */
template <int D, int WARPS, int B> struct decode_layout {
    static constexpr int STAGE = DECODE_STAGE(D, B), KV = ATTN_CHUNK * D * B; /* KV: keys */
    static constexpr int ML = WARPS * COMBINE_ROWS * D * 4; /* offset of maxima and sums */
    static constexpr int BARS = ML + WARPS * COMBINE_ROWS * 2 * 4;
    static constexpr int RINGS = DECODE_RINGS(WARPS, D);
};

__device__ __forceinline__ void warp_group_sync(const warp_group &t)
{
    if (t.size == 1) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + t.index), "r"(t.size * 32) : "memory");
    }
}

/* A warp's load position: its next chunk, and the block ids of its next 32 chunks. */
struct loader {
    work_tile p; /* of the next chunk */
    int c;       /* this warp's next chunk in p */
    /* lane i: block of the warp's chunk n_loaded + i in p; refilled every 32 chunks */
    int block_ids;
    int n_loaded; /* chunks of p loaded so far */
    bool more;    /* there is a next chunk */
};

/* The query heads of the matrix tiles. The host divides, since code that runs once
 * costs what its length is. */
struct decode_heads {
    int group, row_tiles; /* query heads of a KV head; matrix tiles of these */
    int all;              /* matrix tiles of all KV heads */
    uint32_t inverse;     /* 2^21 / all, rounded up */

    /* x / all, of x up to the number of warps of a grid */
    __device__ __forceinline__ int quotient(int x) const
    {
        return (uint32_t)x * inverse >> 21;
    }
};
static inline decode_heads decode_heads_of(const attn_args *a)
{
    decode_heads h;

    h.group = a->n_heads / a->kv.n_kv_heads;
    h.row_tiles = (h.group + DECODE_ROWS - 1) / DECODE_ROWS;
    h.all = a->kv.n_kv_heads * h.row_tiles;
    h.inverse = ((1u << 21) + h.all - 1) / h.all;
    return h;
}

/* x, which the compiler takes for another value: what is computed of it is computed
 * where it is needed, not on the way to the first load. */
__device__ __forceinline__ int computed_here(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* The block of a token. */
__device__ __forceinline__ int block_of(int token, int block_size)
{
    return block_size == 16 ? token >> 4 : token / block_size;
}

/* Whether the chunk at hand may hold tokens of this step beside a sequence's last one.
 * Drafts are sequences of one token each over one table (heuristics_verify.h), so that
 * is where the sequence in front has the same row, in as many chunks at the end as the
 * most drafts fill. */
__device__ __forceinline__ bool holds_drafts(const loader &l, const step_arrays &s)
{
    const int chunks = (LIMIT_DRAFT + ATTN_CHUNK - 1) / ATTN_CHUNK;

    return l.c + 1 + chunks >= l.p.n && l.p.seq > 0 && s.row[l.p.seq] == s.row[l.p.seq - 1];
}

template <typename C, int D, bool PREFIX>
__device__ __forceinline__ bool loader_issue(loader &l, const kv_split &w, const attn_args &a,
                                             const step_arrays &s, const C *head_base, uint32_t to,
                                             uint32_t bar, const warp_group &t, int lane)
{
    while (l.more && l.c >= l.p.hi) {
        l.more = work_tile_next<PREFIX>(l.p, w, a, s);
        l.c = l.p.lo + t.rank;
        l.n_loaded = 0;
    }
    if (!l.more) {
        return false;
    }
    int token = l.p.first_token + l.c * ATTN_CHUNK, bs = a.kv.block_size;
    if ((l.n_loaded & 31) == 0) {
        l.block_ids = l.p.table[block_of(
            l.p.first_token + min(l.c + lane * t.size, l.p.n - 1) * ATTN_CHUNK, bs)];
    }
    int block0 = __shfl_sync(0xffffffffu, l.block_ids, l.n_loaded++ & 31);
    int block1 = bs % 16 && token + 8 < l.p.len ? l.p.table[(token + 8) / bs] : block0;
    if ((!PREFIX && l.c == l.p.n - 1) || holds_drafts(l, s)) {
        pdl_wait(); /* this chunk holds new tokens, which the kernel in front writes */
    }
    if (BULK_COPY && lane == 0) {
        barrier_expect(bar, 2 * 16 * (D * sizeof(C) + (SCALED<C> ? 4 : 0)));
    }
    __syncwarp();
    load_chunk<C, D, ATTN_CHUNK>(a.kv, head_base, block0, block1, token, to, bar, lane);
    if constexpr (SCALED<C>) {
        load_scales(a.kv, head_base, block0, block1, token, to + 2 * 16 * D, bar, lane);
    }
    l.c += t.size;
    return true;
}

/* How a row's own result, with maximum `top` and sum `all`, merges with that of the
 * shared prefix: factors of both, and 1 over the common sum. */
struct prefix_scales {
    float own, prefix, over_sum;
    const float *prefix_o; /* NULL: no shared prefix */
};

__device__ __forceinline__ prefix_scales prefix_scales_of(const attn_args &a, const step_arrays &s,
                                                          const attn_workspace &ws, const q_row &at,
                                                          int dim, float top, float all)
{
    if (!a.shared || s.skip[at.seq] == 0) {
        return {1.0f, 0.0f, 1.0f / (all + sink_weight(a, at.head, top)), nullptr};
    }
    int64_t row = at.seq * a.n_heads + at.head;
    float2 v = *(const float2 *)(ws.prefix_ml + row * 2);
    float both = fmaxf(top, v.x), f = fast_exp2(top - both), g = fast_exp2(v.x - both);
    float sum = all * f + v.y * g + sink_weight(a, at.head, both);
    return {f, g, 1.0f / sum, ws.prefix_o + row * dim};
}

/* Writes a finished row: to the output, or (PREFIX) to the workspace. Called by one
 * warp. */
template <typename T, int D, bool PREFIX, bool NARROW>
__device__ __forceinline__ void write_row(const attn_args &a, const step_arrays &s,
                                          const attn_workspace &ws, const q_row &to,
                                          const row_partial<D> &x, int lane)
{
    int64_t row = to.seq * a.n_heads + to.head;
    prefix_scales j = PREFIX ? prefix_scales{} : prefix_scales_of(a, s, ws, to, D, x.m, x.l);

#pragma unroll
    for (int i = 0; i < row_partial<D>::QUADS; i++) {
        int at = (i * 32 + lane) * 4;
        if (at >= D) {
            break;
        }
        float4 v = x.o[i];
        if (PREFIX) {
            *(float4 *)(ws.prefix_o + row * D + at) = v;
            continue;
        }
        float4 y =
            j.prefix_o ? *(const float4 *)(j.prefix_o + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        T *out = (T *)a.out + to.seq * a.out_stride + (int64_t)to.head * D + at;
        auto sum = [&](float own, float prefix) {
            return (own * j.own + prefix * j.prefix) * j.over_sum * a.v_scale;
        };
        bool half = NARROW ? a.type == T_F16 : std::is_same<T, __half>::value;
        *(uint2 *)out = make_uint2(pack2_as(sum(v.x, y.x), sum(v.y, y.y), half),
                                   pack2_as(sum(v.z, y.z), sum(v.w, y.w), half));
    }
    if (PREFIX && lane == 0) {
        *(float2 *)(ws.prefix_ml + row * 2) = make_float2(x.m, x.l);
    }
}

/* Waits for the oldest of `stages` cp.async groups; does nothing where mbarriers are
 * used. */
__device__ __forceinline__ void copies_wait(int stages)
{
    if (stages == 2) {
        copy_wait<1>();
    } else if (stages == 3) {
        copy_wait<2>();
    } else {
        copy_wait<3>();
    }
}

/* Most of this runs once in a launch of few sequences, and code that runs once costs
 * several cycles an instruction, since it is fetched from far: there is one copy of
 * what loads and of what combines, and as little as can be is unrolled. */
template <typename T, typename C, int D, int WARPS, bool TALL, bool PREFIX>
__global__ void __launch_bounds__(WARPS * 32, 1)
    attn_decode_kernel(attn_args a, step_arrays s, attn_workspace ws, decode_heads heads)
{
    constexpr int B = sizeof(C);
    constexpr bool NARROW = B == 1;
    static_assert(!NARROW || std::is_same<T, __half>::value, "codes become float16");
    using L = decode_layout<D, WARPS, B>;
    extern __shared__ __align__(128) char shared[];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int stages = ws.shape.stages;
    const combine_shared<D> combine = {(float *)shared, (float *)(shared + L::ML)};
    uint32_t bars = shared_address(shared + L::BARS) + warp * DECODE_MAX_STAGES * 8;
    char *stage_memory = shared + L::RINGS + warp * stages * L::STAGE;
    uint32_t ring = shared_address(stage_memory);
    /* The step's arrays are complete (pdl_wait). So are all keys and values but those
     * of the step's tokens, so loading starts before the kernel has ended that writes
     * these. */
    kv_split w;

    w.start = PREFIX ? s.shared_start : s.chunk_start + a.window_index * (s.max_seqs + 1);
    w.skips = a.shared != 0;
    const lane_entry mine = lane_entry_of<PREFIX>(w, s);
    w.n_seqs = PREFIX ? s.header->n_shared : s.header->n_decode;
    const split_kv_plan plan =
        PREFIX ? s.header->shared_split_kv : s.header->split_kv[a.window_index];
    if (lane < stages) {
        barrier_init(bars + lane * 8, 1);
        barrier_init_fence();
    }
    __syncwarp();
    /* A plan has all warps of a block for a split, or one; it may have been made for
     * fewer heads (cuda_split_kv). */
    bool alone = plan.warps == 1 || heads.all > (int)gridDim.x;
    const warp_group t = {alone ? 1 : WARPS, alone ? 0 : warp, alone ? warp : 0};
    int worker = alone ? blockIdx.x * WARPS + warp : blockIdx.x,
        splits = min(plan.splits, heads.quotient(gridDim.x * (alone ? WARPS : 1)));
    int index = heads.quotient(worker), head = worker - index * heads.all;
    if (index >= splits) {
        pdl_wait();
        return;
    }
    int kv_head = head, row0 = 0, group = heads.group;
    if (heads.row_tiles > 1) {
        kv_head = head / heads.row_tiles;
        row0 = head % heads.row_tiles * DECODE_ROWS;
    }
    kv_split_set(w, plan.chunks, splits, index);
    const C *head_base =
        (const C *)a.kv.base + a.layer * a.kv.layer_stride + kv_head * a.kv.head_stride;

    loader load;
    work_tile_first<PREFIX>(load.p, w, a, s, mine);
    load.c = load.p.lo + t.rank;
    load.n_loaded = 0;
    load.more = true;
    work_tile p = load.p;
    /* If this split ends a sequence that began in an earlier one, it combines that
     * sequence in the end, when the other splits have had as much to do. */
    bool ends = p.lo > 0 && p.hi == p.n;
    int ended = p.base, ended_seq = p.seq,
        ended_rows = PREFIX ? p.members * group : min(DECODE_ROWS, group - row0);
    int loaded = 0, to = 0, stage = 0; /* stages filled; the next to fill and to read */
    uint32_t phase = 0;
    decode_tile<T, C, D, TALL> x;
    for (bool attends = true;;) {
        int rows = PREFIX ? p.members * group : min(DECODE_ROWS, group - row0), seq = p.seq;
        bool whole = p.lo == 0 && p.hi == p.n;
        if (attends) {
            auto row_at = [&](int r) {
                q_row from = q_row_of<PREFIX>(seq, group, kv_head, row0, r);
                return (const T *)a.qkv + from.seq * a.qkv_stride + (int64_t)from.head * D;
            };
            bool fresh = true;
            for (int c = p.lo + t.rank; c < p.hi || fresh; c += t.size) {
#pragma unroll 1
                for (; loaded < stages; loaded++) {
                    loader_issue<C, D, PREFIX>(load, w, a, s, head_base, ring + to * L::STAGE,
                                               bars + to * 8, t, lane);
                    copy_commit();
                    to = to + 1 < stages ? to + 1 : 0;
                }
                if (fresh) {
                    pdl_wait();
                    pdl_release();
                    x.clear();
                    x.take_queries(a, rows, row_at, lane);
                    fresh = false;
                    if (c >= p.hi) {
                        break;
                    }
                }
                barrier_wait(bars + stage * 8, phase);
                copies_wait(stages);
                __syncwarp();
                uint32_t keys = ring + stage * L::STAGE, values = keys + L::KV;
                char *memory = stage_memory + stage * L::STAGE;
                int token = p.first_token + c * ATTN_CHUNK, valid = p.len - token;
                if (valid < ATTN_CHUNK) {
                    clear_tokens<D, ATTN_CHUNK, B>(memory + L::KV, valid, lane, 32);
                    proxy_fence();
                    __syncwarp();
                }
                x.chunk(a, keys, values, (const float *)(memory + 2 * L::KV), p.begin_token - token,
                        valid, lane);
                __syncwarp(); /* all lanes have read this stage */
                loaded--;
                if (++stage == stages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            x.end();
        } else {
            rows = ended_rows;
            seq = ended_seq;
        }
#pragma unroll 1
        for (int quarter = 0; quarter * COMBINE_ROWS < rows; quarter++) {
            warp_group_sync(t); /* the previous rows have been read */
            if (attends) {
                x.store(combine, quarter, warp, lane);
            } else {
                int first = kv_split_owner(w, computed_here(ended));
                combine_fetch<D>(combine, ws, first * heads.all + head, heads.all,
                                 index - first + 1, quarter, rows, t, warp, lane);
            }
            warp_group_sync(t);
#pragma unroll 1
            for (int r = t.rank; r < min(COMBINE_ROWS, rows - quarter * COMBINE_ROWS);
                 r += t.size) {
                row_partial<D> own;
                combine_load<D, WARPS>(own, combine, warp - t.rank, t.size, r, lane);
                int row = quarter * COMBINE_ROWS + r;
                if (whole || !attends) {
                    write_row<T, D, PREFIX, NARROW>(
                        a, s, ws, q_row_of<PREFIX>(seq, group, kv_head, row0, row), own, lane);
                } else {
                    store_partial<D>(ws, partial_row(worker, p.lo == 0, row), own, lane);
                }
            }
        }
        if (!attends) {
            break;
        }
        if (!work_tile_next<PREFIX>(p, w, a, s)) {
            if (!ends) {
                break;
            }
            attends = false;
        }
    }
}

/* Whether a multiprocessor takes a block: the grid waits for all of its blocks. */
template <typename... P> static bool one_fits(void (*kernel)(P...), int threads, int bytes)
{
    int n = 0;

    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, threads, bytes) != cudaSuccess) {
        cudaGetLastError();
    }
    return n > 0;
}

template <typename T, typename C, int D, int WARPS, bool TALL, bool PREFIX>
static bool decode_launch(const attn_args *a, const step_arrays *s, const attn_workspace *w,
                          cudaStream_t stream)
{
    using L = decode_layout<D, WARPS, sizeof(C)>;

    static const bool shared_device = mps_told();
    static bool ready;
    auto kernel = attn_decode_kernel<T, C, D, WARPS, TALL, PREFIX>;
    int bytes = L::RINGS + w->shape.stages * WARPS * L::STAGE;

    ready = ready || (allow_shared(kernel, bytes) && one_fits(kernel, WARPS * 32, bytes));
    if (ready && shared_device) {
        launch_together(kernel, dim3(w->blocks), dim3(WARPS * 32), bytes, stream, *a, *s, *w,
                        decode_heads_of(a));
    } else if (ready) {
        launch(kernel, dim3(w->blocks), dim3(WARPS * 32), bytes, stream, *a, *s, *w,
               decode_heads_of(a));
    }
    return ready;
}

template <typename T, typename C, int D, int WARPS, bool PREFIX>
static bool decode_rows(const attn_args *a, const step_arrays *s, const attn_workspace *w,
                        cudaStream_t stream)
{
    bool tall = PREFIX || a->n_heads / a->kv.n_kv_heads > 8;

    return tall ? decode_launch<T, C, D, WARPS, true, PREFIX>(a, s, w, stream)
                : decode_launch<T, C, D, WARPS, PREFIX, PREFIX>(a, s, w, stream);
}

template <typename T, typename C, int D, bool PREFIX>
static bool decode_warps(const attn_args *a, const step_arrays *s, const attn_workspace *w,
                         cudaStream_t stream)
{
    constexpr int MOST = DECODE_MOST_WARPS(D), LEAST = DECODE_LEAST_WARPS(D);

    if (w->shape.warps == MOST) {
        return decode_rows<T, C, D, MOST, PREFIX>(a, s, w, stream);
    }
    if constexpr (sizeof(C) > 1 && LEAST != MOST) {
        return w->shape.warps == LEAST && decode_rows<T, C, D, LEAST, PREFIX>(a, s, w, stream);
    }
    return false;
}

template <typename T, typename C, bool PREFIX>
static bool decode_dispatch(const attn_args *a, const step_arrays *s, const attn_workspace *w,
                            cudaStream_t stream)
{
    switch (a->kv.head_dim) {
    case 64:
        return decode_warps<T, C, 64, PREFIX>(a, s, w, stream);
    case 80:
        if constexpr (sizeof(C) > 1) {
            return decode_warps<T, C, 80, PREFIX>(a, s, w, stream);
        }
        return false;
    case 96:
        return decode_warps<T, C, 96, PREFIX>(a, s, w, stream);
    case 128:
        return decode_warps<T, C, 128, PREFIX>(a, s, w, stream);
    case 256:
        return decode_warps<T, C, 256, PREFIX>(a, s, w, stream);
    default:
        return false;
    }
}

#endif
