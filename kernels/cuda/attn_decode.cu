/* Paged decode attention on tensor cores: split-KV over a balanced work list.
 *
 * The key ranges of all (sequence, kv head) pairs are laid end to end in chunks of 16 tokens, and every block takes
 * an equal contiguous span of them, whatever the lengths. Within a span, a piece is what belongs to one pair. The
 * four warps of a block take the chunks of a piece in turn (or, where there are many short pairs, have spans of their
 * own), each with its own ring of stages in shared memory, so nothing in the loop waits for another warp and loads run
 * on across pieces. The query heads of one kv head are
 * the rows of one matrix tile (16), so a chunk is read once for all of them. At the end of a piece the warps merge
 * through shared memory; a pair cut between blocks goes through global memory, and the block that arrives last
 * adds the partial results in the order of the blocks.
 *
 * Samples of one request, beams and cached prefixes share blocks. The chunks that consecutive sequences share are read
 * once, by a launch before (PREFIX), for the query heads of all members, which are then the rows of the tile (as in
 * Hydragen, Juravsky et al. 2024); its results join each member's own at the end.
 */
#include "kernels/cuda/attn_common.cuh"
#include "kernels/cuda/attn_spans.cuh"

enum { DECODE_WARPS = 4, DECODE_ROWS = 16, BLOCKS_PER_SM = 2 };

template <typename T, int D, int STAGES> struct decode_layout {
    static constexpr int KV = 16 * D * (int)sizeof(T); /* keys of a chunk, bytes */
    static constexpr int STAGE = 2 * KV;
    static constexpr int RING = DECODE_WARPS * STAGES * STAGE;
    static constexpr int MERGE = 2 * D / 8 * 4 * 32 * 4;
    static constexpr int ML = DECODE_WARPS * DECODE_ROWS * 2 * 4;
    static constexpr int BYTES = RING + MERGE + ML + DECODE_WARPS * STAGES * 8 + 128;
};

/* The warps that work on a piece together: all of a block, or each warp by itself. */
struct team {
    int size, member;
};

enum { ALONE_CHUNKS = 48, FEW_CHUNKS = 6 };

/* Many short pairs: each warp takes its own, and nothing is merged. */
__device__ __forceinline__ team team_of(const span &w, int warp)
{
    int pairs = w.n_seqs * w.heads;
    return pairs >= 2 * (int)gridDim.x && w.total <= (int64_t)pairs * ALONE_CHUNKS ? team{1, 0} : team{DECODE_WARPS, warp};
}

/* How many teams take part: two chunks a warp at least, and a block a multiprocessor while its warps have few, so that there are few
 * parts to add up. Sequences of like lengths (by their first half) are cut at their ends. */
__device__ __forceinline__ int workers_of(const span &w, const team &t)
{
    int pairs = w.n_seqs * w.heads, half = w.n_seqs / 2, blocks = gridDim.x;
    if (w.total == 0)
        return 0;
    int64_t in_half = (int64_t)w.start[half] * w.heads * w.n_seqs, fair = w.total * half;
    int n = (int)min((int64_t)blocks * (DECODE_WARPS / t.size), (w.total + 2 * t.size - 1) / (2 * t.size));
    if (t.size > 1 && n > blocks / BLOCKS_PER_SM && w.total <= (int64_t)blocks / BLOCKS_PER_SM * DECODE_WARPS * FEW_CHUNKS)
        n = blocks / BLOCKS_PER_SM;
    if (8 * (in_half > fair ? in_half - fair : fair - in_half) > fair)
        return n;
    if (n >= pairs)
        return n - n % pairs;
    int each = (pairs + n - 1) / n;
    return pairs % each == 0 && pairs / each * 10 >= n * 9 ? pairs / each : n;
}

/* Where a warp's loads stand: the piece and chunk that come next, and the block ids of the coming 32 chunks. */
struct loader {
    piece p;
    int c;      /* next chunk of this warp in p */
    int ids;    /* block of the warp's chunk number `turn` + lane in p, good for 32 turns */
    int turn;
    bool more;
};

template <typename T, int D, bool PREFIX>
__device__ __forceinline__ bool loader_issue(loader &l, const span &w, const attn_args &a, const step_arrays &s,
                                             uint32_t to, uint32_t bar, const team &t, int lane)
{
    while (l.more && l.c >= l.p.hi) {
        l.more = piece_next<PREFIX>(l.p, w, a, s);
        l.c = l.p.lo + t.member;
        l.turn = 0;
    }
    if (!l.more)
        return false;
    int token = l.p.first_token + l.c * ATTN_CHUNK, bs = a.kv.block_size;
    if ((l.turn & 31) == 0)
        l.ids = l.p.table[(l.p.first_token + min(l.c + lane * t.size, l.p.n - 1) * ATTN_CHUNK) / bs];
    int block0 = __shfl_sync(0xffffffffu, l.ids, l.turn++ & 31);
    int block1 = bs % 16 && token + 8 < l.p.len ? l.p.table[(token + 8) / bs] : block0;
    int row_tiles = w.heads / a.kv.n_kv_heads;
    const T *base = (const T *)a.kv.base + a.layer * a.kv.layer_stride + l.p.head / row_tiles * a.kv.head_stride;
    if (!PREFIX && l.c == l.p.n - 1)
        pdl_wait(); /* the chunk of the newest token */
    if (BULK_COPY && lane == 0)
        barrier_expect(bar, 2 * 16 * D * sizeof(T));
    __syncwarp();
    load_chunk<T, D, ATTN_CHUNK>(a.kv, base, block0, block1, token, to, bar, lane);
    l.c += t.size;
    return true;
}

/* How a row's own part, of greatest score `top` and sum `all`, joins what the shared chunks gave: factors of both, and 1 over
 * the common sum. */
struct join {
    float own, prefix, over_sum;
    const float *prefix_o; /* NULL: no shared chunks */
};

__device__ __forceinline__ join join_of(const attn_args &a, const step_arrays &s, const attn_workspace &ws, const place &at, int dim,
                                        float top, float all)
{
    if (!a.shared || s.skip[at.seq] == 0)
        return {1.0f, 0.0f, 1.0f / all, nullptr};
    int64_t row = at.seq * a.n_heads + at.head;
    float2 v = *(const float2 *)(ws.prefix_ml + row * 2);
    float both = fmaxf(top, v.x), f = fast_exp2(top - both), g = fast_exp2(v.x - both);
    return {f, g, 1.0f / (all * f + v.y * g), ws.prefix_o + row * dim};
}

/* Row r of a pair from the pieces of workers first .. final, in their order, 16 at a time, four dims a lane. By one warp. */
template <typename T, int D, bool PREFIX>
__device__ __forceinline__ void add_partials(const attn_args &a, const step_arrays &s, const span &w, const attn_workspace &ws,
                                             const piece &p, int first, int final, int r, const place &to, int lane)
{
    constexpr int QUADS = (D / 4 + 31) / 32, AHEAD = D <= 128 ? 16 : 4; /* fours a lane; pieces whose loads are on their way at once */
    auto row_of = [&](int k) { return (int64_t)(2 * k + (k == first && span_begin(w, k) < p.base)) * DECODE_ROWS + r; };
    float top = -INFINITY, all = 0.0f;
    float4 acc[QUADS] = {};
    for (int k0 = first; k0 <= final; k0 += AHEAD) {
        int k = k0 + lane, n = min(AHEAD, final - k0 + 1);
        float2 v = make_float2(-INFINITY, 0.0f);
        if (lane < n)
            v = __ldcg((const float2 *)(ws.partial_ml + row_of(k) * 2));
        float4 part[AHEAD][QUADS];
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
#pragma unroll
            for (int i = 0; i < QUADS; i++)
                if (j < n && (i * 32 + lane) * 4 < D)
                    part[j][i] = __ldcg((const float4 *)(ws.partial_o + row_of(k0 + j) * D) + i * 32 + lane);
        float next = fmaxf(top, warp_max(v.x)), keep = top == -INFINITY ? 0.0f : fast_exp2(top - next);
        float f = v.x == -INFINITY ? 0.0f : fast_exp2(v.x - next);
        top = next;
        all = all * keep + warp_sum(v.y * f);
#pragma unroll
        for (int i = 0; i < QUADS; i++)
            acc[i] = make_float4(acc[i].x * keep, acc[i].y * keep, acc[i].z * keep, acc[i].w * keep);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            float fj = __shfl_sync(0xffffffffu, f, j);
            if (j < n)
#pragma unroll
                for (int i = 0; i < QUADS; i++) {
                    acc[i].x += part[j][i].x * fj;
                    acc[i].y += part[j][i].y * fj;
                    acc[i].z += part[j][i].z * fj;
                    acc[i].w += part[j][i].w * fj;
                }
        }
    }
    int64_t row = to.seq * a.n_heads + to.head;
    join j = PREFIX ? join{} : join_of(a, s, ws, to, D, top, all);
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        int at = (i * 32 + lane) * 4;
        if (at >= D)
            break;
        float4 v = acc[i];
        if (PREFIX) {
            *(float4 *)(ws.prefix_o + row * D + at) = v;
            continue;
        }
        float4 x = j.prefix_o ? *(const float4 *)(j.prefix_o + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        T *out = (T *)a.out + to.seq * a.out_stride + (int64_t)to.head * D + at;
        *(uint32_t *)out = pack2<T>((v.x * j.own + x.x * j.prefix) * j.over_sum, (v.y * j.own + x.y * j.prefix) * j.over_sum);
        *(uint32_t *)(out + 2) = pack2<T>((v.z * j.own + x.z * j.prefix) * j.over_sum, (v.w * j.own + x.w * j.prefix) * j.over_sum);
    }
    if (PREFIX && lane == 0)
        *(float2 *)(ws.prefix_ml + row * 2) = make_float2(top, all);
}

/* A whole row from the fragments of a warp: accumulators of half h, of which a lane holds two in every eight. */
template <typename T, int D, bool PREFIX>
__device__ __forceinline__ void write_row(const attn_args &a, const step_arrays &s, const attn_workspace &ws, const place &to,
                                          const float (&o)[D / 8][4], int h, float best, float sum, int t4)
{
    if (PREFIX) {
        int64_t row = to.seq * a.n_heads + to.head;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            *(float2 *)(ws.prefix_o + row * D + i * 8 + t4 * 2) = make_float2(o[i][h * 2], o[i][h * 2 + 1]);
        if (t4 == 0)
            *(float2 *)(ws.prefix_ml + row * 2) = make_float2(best, sum);
        return;
    }
    T *out = (T *)a.out + to.seq * a.out_stride + (int64_t)to.head * D;
    join j = join_of(a, s, ws, to, D, best, sum);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        float2 v = make_float2(o[i][h * 2] * j.own, o[i][h * 2 + 1] * j.own);
        if (j.prefix_o) {
            float2 x = *(const float2 *)(j.prefix_o + i * 8 + t4 * 2);
            v.x += x.x * j.prefix;
            v.y += x.y * j.prefix;
        }
        *(uint32_t *)(out + i * 8 + t4 * 2) = pack2<T>(v.x * j.over_sum, v.y * j.over_sum);
    }
}

/* The warps of a block add their accumulators, greatest scores and sums up in warp 0; the last two in all. */
template <int D, bool TALL>
__device__ __forceinline__ void merge_warps(float (&o)[D / 8][4], float (&m)[2], float (&l)[2], float *ml, float *merge, int warp,
                                            int lane)
{
    constexpr int NT = D / 8;
    int g = lane >> 2;
    if ((lane & 3) == 0)
#pragma unroll
        for (int h = 0; h < 2; h++)
            *(float2 *)(ml + (warp * DECODE_ROWS + g + h * 8) * 2) = make_float2(m[h], l[h]);
    __syncthreads();
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float2 of[DECODE_WARPS];
        float best = -INFINITY;
        for (int i = 0; i < DECODE_WARPS; i++) {
            of[i] = *(const float2 *)(ml + (i * DECODE_ROWS + g + h * 8) * 2);
            best = fmaxf(best, of[i].x);
        }
        factor[h] = m[h] == -INFINITY ? 0.0f : fast_exp2(m[h] - best);
        m[h] = best;
        l[h] = 0.0f;
        for (int i = 0; i < DECODE_WARPS; i++)
            l[h] += of[i].x == -INFINITY ? 0.0f : of[i].y * fast_exp2(of[i].x - best);
    }
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            o[i][j] *= factor[j >> 1];
    /* two places, by the writer's parity: in the second round warp 1 overwrites what only it has read */
    for (int half = DECODE_WARPS / 2; half > 0; half /= 2) {
        if (warp >= half && warp < 2 * half)
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int j = 0; j < (TALL ? 4 : 2); j++)
                    merge[(((warp & 1) * NT + i) * 4 + j) * 32 + lane] = o[i][j];
        __syncthreads();
        if (warp < half)
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int j = 0; j < (TALL ? 4 : 2); j++)
                    o[i][j] += merge[((((warp + half) & 1) * NT + i) * 4 + j) * 32 + lane];
        __syncwarp();
    }
}

template <typename T, int D, int STAGES, bool TALL, bool PREFIX>
__global__ void __launch_bounds__(DECODE_WARPS * 32, D <= 128 ? BLOCKS_PER_SM : 1)
attn_decode_kernel(attn_args a, step_arrays s, attn_workspace ws)
{
    using L = decode_layout<T, D, STAGES>;
    constexpr int NT = D / 8; /* tiles of 8 dims */
    extern __shared__ __align__(128) char shared[];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    float *merge = (float *)(shared + L::RING);
    float *ml = merge + L::MERGE / 4; /* [warp][row][max, sum] */
    int *last = (int *)(ml + L::ML / 4 + DECODE_WARPS * STAGES * 2);
    uint32_t bars = shared_address(ml + L::ML / 4) + warp * STAGES * 8;
    uint32_t ring = shared_address(shared) + warp * STAGES * L::STAGE;
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++)
            barrier_init(bars + i * 8, 1);
        barrier_init_fence();
    }
    __syncwarp();
    /* What the step's prologue wrote is there (rope_kv, the kernel before, starts its successor only then), and so are all
     * keys and values but those of the sequences' last tokens: loading begins before that kernel is done. */

    int group = a.n_heads / a.kv.n_kv_heads, row_tiles = (group + DECODE_ROWS - 1) / DECODE_ROWS;
    span w;
    w.start = PREFIX ? s.shared_start : s.chunk_start + a.window_index * (s.max_seqs + 1);
    int start_of_lane = w.start[min(lane, s.max_seqs)];
    w.heads = a.kv.n_kv_heads * row_tiles;
    w.n_seqs = PREFIX ? s.header->n_shared : s.header->n_decode;
    w.total = (int64_t)(PREFIX ? s.header->n_shared_chunks : s.header->n_chunks[a.window_index]) * w.heads;
    w.skips = a.shared != 0;
    const team t = team_of(w, warp);
    w.workers = workers_of(w, t);
    int worker = t.size > 1 ? blockIdx.x : blockIdx.x * DECODE_WARPS + warp;
    if (worker >= w.workers) {
        pdl_wait();
        return;
    }
    w.begin = span_begin(w, worker);
    w.end = span_begin(w, worker + 1);

    loader load;
    piece_find<PREFIX>(load.p, w, a, s, w.begin, start_of_lane);
    load.c = load.p.lo + t.member;
    load.turn = 0;
    load.more = true;
    piece p = load.p;
    for (int i = 0; i < STAGES - 1; i++) {
        loader_issue<T, D, PREFIX>(load, w, a, s, ring + i * L::STAGE, bars + i * 8, t, lane);
        copy_commit();
    }
    pdl_wait();
    pdl_release();
    int turn = 0; /* chunks this warp has consumed */
    const float scale = a.softcap > 0.0f ? a.scale : a.scale * LOG2E;
    for (bool more = true; more; more = piece_next<PREFIX>(p, w, a, s)) {
        /* Q rows of this pair, as the left operand */
        int kv_head = p.head / row_tiles, row0 = p.head % row_tiles * DECODE_ROWS;
        int rows = PREFIX ? p.members * group : min(DECODE_ROWS, group - row0);
        const T *q[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            place from = place_of<PREFIX>(p, group, kv_head, row0, g + h * 8);
            q[h] = (const T *)a.qkv + from.seq * a.qkv_stride + (int64_t)from.head * D + t4 * 2;
        }
        uint32_t qf[D / 16][4];
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            qf[k][0] = g < rows ? *(const uint32_t *)(q[0] + k * 16) : 0;
            qf[k][2] = g < rows ? *(const uint32_t *)(q[0] + k * 16 + 8) : 0;
            qf[k][1] = TALL && g + 8 < rows ? *(const uint32_t *)(q[1] + k * 16) : 0;
            qf[k][3] = TALL && g + 8 < rows ? *(const uint32_t *)(q[1] + k * 16 + 8) : 0;
        }
        float o[NT][4];
#pragma unroll
        for (int i = 0; i < NT; i++)
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};

        for (int c = p.lo + t.member; c < p.hi; c += t.size, turn++) {
            int stage = turn % STAGES, ahead = (turn + STAGES - 1) % STAGES;
            __syncwarp(); /* all lanes have read the stage that is filled next */
            loader_issue<T, D, PREFIX>(load, w, a, s, ring + ahead * L::STAGE, bars + ahead * 8, t, lane);
            copy_commit();
            barrier_wait(bars + stage * 8, turn / STAGES & 1);
            copy_wait<STAGES - 1>();
            __syncwarp();
            uint32_t keys = ring + stage * L::STAGE, values = keys + L::KV;
            int token = p.first_token + c * ATTN_CHUNK, valid = p.len - token;
            if (valid < ATTN_CHUNK) {
                clear_tokens<D, ATTN_CHUNK>(shared + (warp * STAGES + stage) * L::STAGE + L::KV, valid, lane, 32);
                proxy_fence();
                __syncwarp();
            }
            float sc[2][4] = {};
            int kt = (lane >> 4) * 8 + (lane & 7), kc = (lane >> 3) & 1;
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                uint32_t b[4];
                ldmatrix_x4(b, keys + tile_at<D, ATTN_CHUNK>(kt, k * 2 + kc));
                mma16816<T>(sc[0], qf[k], b[0], b[1]);
                mma16816<T>(sc[1], qf[k], b[2], b[3]);
            }
            bool edge = valid < ATTN_CHUNK || token < p.begin_token;
#pragma unroll
            for (int h = 0; h < (TALL ? 2 : 1); h++) {
                float v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    v[j] = sc[j >> 1][h * 2 + (j & 1)] * scale;
                    if (a.softcap > 0.0f)
                        v[j] = soft_cap(v[j], a.softcap) * LOG2E;
                    int at = (j >> 1) * 8 + t4 * 2 + (j & 1);
                    if (edge && (at >= valid || token + at < p.begin_token))
                        v[j] = -INFINITY;
                }
                float top = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                float old = m[h];
                m[h] = fmaxf(old, top);
                float keep = fast_exp2(old - m[h]);
                float add = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    v[j] = fast_exp2(v[j] - m[h]);
                    add += v[j];
                    sc[j >> 1][h * 2 + (j & 1)] = v[j];
                }
                l[h] = l[h] * keep + add;
                if (__any_sync(0xffffffffu, keep != 1.0f)) {
#pragma unroll
                    for (int i = 0; i < NT; i++) {
                        o[i][h * 2] *= keep;
                        o[i][h * 2 + 1] *= keep;
                    }
                }
            }
            uint32_t pf[4] = {pack2<T>(sc[0][0], sc[0][1]), TALL ? pack2<T>(sc[0][2], sc[0][3]) : 0,
                              pack2<T>(sc[1][0], sc[1][1]), TALL ? pack2<T>(sc[1][2], sc[1][3]) : 0};
            int vt = ((lane >> 3) & 1) * 8 + (lane & 7), vc = lane >> 4;
#pragma unroll
            for (int i = 0; i < NT / 2; i++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, values + tile_at<D, ATTN_CHUNK>(vt, i * 2 + vc));
                mma16816<T>(o[2 * i], pf, b[0], b[1]);
                mma16816<T>(o[2 * i + 1], pf, b[2], b[3]);
            }
        }

#pragma unroll
        for (int h = 0; h < 2; h++) {
            l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
            l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
        }
        if (t.size > 1)
            merge_warps<D, TALL>(o, m, l, ml, merge, warp, lane);

        if (p.lo == 0 && p.hi == p.n) {
            if (t.member == 0)
#pragma unroll
                for (int h = 0; h < (TALL ? 2 : 1); h++)
                    if (g + h * 8 < rows)
                        write_row<T, D, PREFIX>(a, s, ws, place_of<PREFIX>(p, group, kv_head, row0, g + h * 8), o, h, m[h], l[h],
                                                t4);
            continue;
        }
        int slot = 2 * worker + (w.begin >= p.base ? 0 : 1), first = span_owner(w, p.base), final = span_owner(w, p.base + p.n - 1);
        int complete = 0;
        if (t.member == 0) {
#pragma unroll
            for (int h = 0; h < (TALL ? 2 : 1); h++)
                if (g + h * 8 < rows) {
                    float *to = ws.partial_o + ((int64_t)slot * DECODE_ROWS + g + h * 8) * D;
#pragma unroll
                    for (int i = 0; i < NT; i++)
                        *(float2 *)(to + i * 8 + t4 * 2) = make_float2(o[i][h * 2], o[i][h * 2 + 1]);
                    if (t4 == 0)
                        *(float2 *)(ws.partial_ml + ((int64_t)slot * DECODE_ROWS + g + h * 8) * 2) = make_float2(m[h], l[h]);
                }
            __threadfence();
            __syncwarp();
            if (lane == 0) {
                int32_t *count = ws.arrived + (int64_t)p.entry * w.heads + p.head;
                complete = atomicAdd(count, 1) == final - first;
                if (complete)
                    *count = 0;
                if (t.size > 1) /* warps alone have no use for it, and would write it over one another */
                    *last = complete;
                __threadfence();
            }
        }
        if (t.size > 1) {
            __syncthreads();
            complete = *last;
        } else {
            complete = __shfl_sync(0xffffffffu, complete, 0);
        }
        if (complete) /* all of the pair is there: add it up */
            for (int r = t.member; r < rows; r += t.size)
                add_partials<T, D, PREFIX>(a, s, w, ws, p, first, final, r, place_of<PREFIX>(p, group, kv_head, row0, r), lane);
        if (t.size > 1)
            __syncthreads(); /* `last` is free again */
    }
}

template <typename T, int D, int STAGES, bool TALL, bool PREFIX>
static bool decode_launch(const attn_args *a, const step_arrays *s, const attn_workspace *w, cudaStream_t stream)
{
    static bool ready;
    constexpr int bytes = decode_layout<T, D, STAGES>::BYTES;
    auto kernel = attn_decode_kernel<T, D, STAGES, TALL, PREFIX>;
    if (!ready && cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) {
        cudaGetLastError(); /* a device with less shared memory */
        return false;
    }
    ready = true;
    launch(kernel, dim3(w->max_workers / DECODE_WARPS), dim3(DECODE_WARPS * 32), bytes, stream, *a, *s, *w);
    return true;
}

template <typename T, bool PREFIX>
static bool decode_dispatch(const attn_args *a, const step_arrays *s, const attn_workspace *w, cudaStream_t stream)
{
    bool tall = PREFIX || a->n_heads / a->kv.n_kv_heads > 8;
    switch (a->kv.head_dim) {
    case 64:
        return tall ? decode_launch<T, 64, 4, true, PREFIX>(a, s, w, stream) : decode_launch<T, 64, 4, PREFIX, PREFIX>(a, s, w, stream);
    case 80:
        return tall ? decode_launch<T, 80, 4, true, PREFIX>(a, s, w, stream) : decode_launch<T, 80, 4, PREFIX, PREFIX>(a, s, w, stream);
    case 96:
        return tall ? decode_launch<T, 96, 4, true, PREFIX>(a, s, w, stream) : decode_launch<T, 96, 4, PREFIX, PREFIX>(a, s, w, stream);
    case 128:
        return tall ? decode_launch<T, 128, 3, true, PREFIX>(a, s, w, stream) : decode_launch<T, 128, 3, PREFIX, PREFIX>(a, s, w, stream);
    case 256: /* three stages are more than some devices have room for */
        return tall ? decode_launch<T, 256, 3, true, PREFIX>(a, s, w, stream) || decode_launch<T, 256, 2, true, PREFIX>(a, s, w, stream)
                    : decode_launch<T, 256, 3, PREFIX, PREFIX>(a, s, w, stream) ||
                          decode_launch<T, 256, 2, PREFIX, PREFIX>(a, s, w, stream);
    default: return false;
    }
}

template <bool PREFIX>
static bool decode_any(const attn_args *a, const step_arrays *s, const attn_workspace *w, cudaStream_t stream)
{
    if (a->kv.panel_log2 == 0 || a->qkv_stride % 2 || a->out_stride % 2)
        return false;
    return a->kv.dtype == T_F16 ? decode_dispatch<__half, PREFIX>(a, s, w, stream) : decode_dispatch<__nv_bfloat16, PREFIX>(a, s, w, stream);
}

extern "C" int32_t attn_panel_log2(int32_t head_dim, int32_t block_size, int dtype)
{
    if (block_size % 8 != 0 || (dtype != T_F16 && dtype != T_BF16))
        return 0;
    switch (head_dim) {
    case 64:
    case 128:
    case 256: return 6;
    case 96: return 5;
    case 80: return 4;
    default: return 0;
    }
}

extern "C" int32_t attn_decode_workers(void)
{
    int device = 0, sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    return sms * BLOCKS_PER_SM * DECODE_WARPS;
}

extern "C" bool launch_attn_decode(const struct attn_args *a, const struct step_arrays *s, const struct attn_workspace *w,
                                   int32_t n_rows, cudaStream_t stream)
{
    (void)n_rows;
    return decode_any<false>(a, s, w, stream);
}

extern "C" bool launch_attn_shared(const struct attn_args *a, const struct step_arrays *s, const struct attn_workspace *w,
                                   cudaStream_t stream)
{
    return decode_any<true>(a, s, w, stream);
}
