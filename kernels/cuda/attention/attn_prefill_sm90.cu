/* Paged prefill attention on Hopper: wgmma with a loading warpgroup and two computing
 * ones.
 *
 * A block stays on its multiprocessor and takes pieces of work in turn, those with most
 * keys first: 128 query rows of one head, 64 a computing warpgroup. The loading warps
 * walk the block table and keep two rings full with bulk copies, two warps the keys'
 * and two the values', tile upon tile (128 tokens; 64 of wide heads) and on into the
 * next piece of work, with the block ids of a tile read while they wait for room. A
 * computing warpgroup issues the scores of tile j, then the product of tile j - 1's
 * weights with its values, and computes the softmax of tile j while the latter runs;
 * the queries of the next piece come in beside those of this one, or, of wide heads,
 * once their scores are done. The cache's swizzled panels are what wgmma reads: keys as
 * they are, values through its transposed form.
 */
#include "kernels/cuda/attention/attn_common.cuh"
#include "kernels/cuda/gemm/wgmma.cuh"

enum {
    ROWS = ATTN_PREFILL_ROWS,
    GROUP_ROWS = 64,
    COMPUTE = 256,
    HOPPER_THREADS = COMPUTE + 128,
    STAGES = 2
};

template <int D> struct hopper_layout {
    static constexpr int KEYS = D > 128 ? 64 : 128; /* tokens of a tile */
    /* 2: the next piece's queries come in beside this one's */
    static constexpr int Q_PLACES = D > 128 ? 1 : 2;
    /* bytes; a panel is [rows][width] */
    static constexpr int Q = ROWS * D * 2, TILE = KEYS * D * 2;
    static constexpr int BARS = 4 * STAGES + 1;
    static constexpr int BYTES = Q_PLACES * Q + 2 * STAGES * TILE + BARS * 8 + 1024;
};

/* Shared-memory addresses: queries of this piece of work and the next, keys' ring (0),
 * values' ring (1), barriers. */
template <int D> struct hopper_shared {
    using L = hopper_layout<D>;
    uint32_t base;
    __device__ uint32_t queries(int turn) const
    {
        return base + turn % L::Q_PLACES * L::Q;
    }
    __device__ uint32_t tile(int which, int stage) const
    {
        return base + L::Q_PLACES * L::Q + (which * STAGES + stage) * L::TILE;
    }
    __device__ uint32_t full(int which, int stage) const
    {
        return tile(2, 0) + (which * STAGES + stage) * 8;
    }
    __device__ uint32_t empty(int which, int stage) const
    {
        return full(2 + which, stage);
    }
    /* values of a tile that is cleared past the end */
    __device__ uint32_t last(void) const
    {
        return full(4, 0);
    }
};

/* A place in a ring, and the parity of its turn. */
struct ring {
    int stage;
    uint32_t phase;
    __device__ __forceinline__ void step(void)
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* A piece of work: a tile of query rows and a head; what it sees are tokens [begin,
 * end). */
struct work {
    query_tile rows;
    int head, begin, end, n_tiles;
};

/* The tiles come with most keys first, so the turns run forth and back over the
 * blocks. */
__device__ __forceinline__ int work_index(int turn)
{
    return turn * gridDim.x + (turn & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* The tile of a block's piece number `turn`, read well before work_of needs it; any
 * when there is none. */
__device__ __forceinline__ int4 tile_of(const query_tile *tile, int turn, int heads, int n_work)
{
    return __ldg((const int4 *)tile + min(work_index(turn), n_work - 1) / heads);
}

/* The block's piece number `turn`, whose tile is t. False: there is none. */
template <int D>
__device__ __forceinline__ bool work_of(work &w, int turn, int4 t, const attn_args &a, int n_work)
{
    int i = work_index(turn);

    w.rows = {t.x, t.y, t.z, t.w};
    w.head = i % a.n_heads;
    w.end = t.z + t.w;
    int first = t.y + t.w;
    w.begin = a.window > 0 && first + 1 > a.window ? (first + 1 - a.window) / 16 * 16 : 0;
    w.n_tiles = (w.end - w.begin + hopper_layout<D>::KEYS - 1) / hopper_layout<D>::KEYS;
    return i < n_work;
}

__device__ __forceinline__ void arrive(uint32_t bar)
{
#if BULK_COPY
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

/* The threads of one computing warpgroup. */
__device__ __forceinline__ void group_sync(int group)
{
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

/* The loading warps 0 to 3: two a ring, which take the pieces of a tile (16 tokens of a
 * panel, 8 where blocks are not of 16 tokens times a number) in turn, each lane ROUNDS
 * of them at most. */
template <typename T, int D>
__device__ __forceinline__ void load_tiles(const attn_args &a, const step_arrays &s,
                                           const query_tile *tile, int n_work,
                                           const hopper_shared<D> &sh, int warp, int lane)
{
    using P = panels<D>;
    constexpr int KEYS = hopper_layout<D>::KEYS, ROUNDS = (KEYS / 8 * P::COUNT + 63) / 64;
    int which = warp >> 1, index = lane * 2 + (warp & 1), bs = a.kv.block_size,
        piece = bs % 16 ? 8 : 16;
    /* of the lane's pieces: at is the first token */
    int panel[ROUNDS], at[ROUNDS], block[ROUNDS], next[ROUNDS];

#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        panel[i] = (index + i * 64) % P::COUNT;
        at[i] = (index + i * 64) / P::COUNT * piece;
    }
    ring r = {0, 1};
    uint32_t last_phase = 0;
    work w;
    int4 ahead = tile_of(tile, 0, a.n_heads, n_work);
    for (int turn = 0; work_of<D>(w, turn, ahead, a, n_work); turn++) {
        ahead = tile_of(tile, turn + 1, a.n_heads, n_work);
        int kv_head = w.head / (a.n_heads / a.kv.n_kv_heads);
        const T *base = (const T *)a.kv.base + a.layer * a.kv.layer_stride +
                        which * a.kv.kv_stride + kv_head * a.kv.head_stride;
        const int32_t *table = s.table + (int64_t)w.rows.row * s.table_width;
        auto mine = [&](int i, int token) { return at[i] < KEYS && token + at[i] < w.end; };
        auto find_blocks = [&](int(&ret)[ROUNDS], int token) {
#pragma unroll
            for (int i = 0; i < ROUNDS; i++)
                ret[i] = mine(i, token) ? table[(token + at[i]) / bs] : 0;
        };
        find_blocks(block, w.begin);
        for (int token = w.begin; token < w.end; token += KEYS) {
            find_blocks(next, token + KEYS);
            bool partial = which && token + KEYS > w.end;
            uint32_t bar = partial ? sh.last() : sh.full(which, r.stage),
                     to = sh.tile(which, r.stage);
            int rows = (min(KEYS, w.end - token) + piece - 1) / piece * piece;
            barrier_wait(sh.empty(which, r.stage), r.phase);
            if (lane == 0) {
                /* half of the bytes; the other warp says the rest */
                barrier_expect(bar, rows * D);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                if (mine(i, token)) {
                    int64_t row = (int64_t)panel[i] * bs + (token + at[i]) % bs;
                    bulk_copy(to + (panel[i] * KEYS + at[i]) * P::ROW,
                              base + block[i] * a.kv.block_stride + row * P::WIDTH, piece * P::ROW,
                              bar);
                }
            }
            if (partial) {
                barrier_wait(bar, last_phase);
                last_phase ^= 1;
                clear_tokens<D, KEYS>((char *)__cvta_shared_to_generic(to), w.end - token,
                                      (warp & 1) * 32 + lane, 64);
                proxy_fence();
                __syncwarp();
                if (lane == 0) {
                    arrive(sh.full(1, r.stage));
                }
            }
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                block[i] = next[i];
            }
            r.step();
        }
    }
}

/* A computing warpgroup's queries into swizzled panels, rows past the tile's as zeros;
 * queries_wait makes them visible to wgmma. */
template <typename T, int D>
__device__ __forceinline__ void queries_fetch(const attn_args &a, const work &w, uint32_t q_tile,
                                              int group, int thread)
{
#if BULK_COPY
#pragma unroll
    for (int i = 0; i < GROUP_ROWS * D / 8 / 128; i++) {
        int n = i * 128 + thread, r = group * GROUP_ROWS + n / (D / 8), chunk = n % (D / 8);
        int row = w.rows.first + r;
        bool in = row < w.rows.end;
        const T *from = (const T *)a.qkv + (in ? row : w.rows.first) * a.qkv_stride +
                        (int64_t)w.head * D + chunk * 8;
        uint32_t to = q_tile + tile_at<D, ROWS>(r, chunk);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(in ? 16 : 0)
                     : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

__device__ __forceinline__ void queries_wait(int group)
{
#if BULK_COPY
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
    proxy_fence();
    group_sync(group);
}

/* What a thread holds of its warpgroup's 64 rows: in each of two rows, g and g + 8 of
 * its warp's 16, every fourth pair. */
template <int D> struct rows {
    static constexpr int KEYS = hopper_layout<D>::KEYS;
    float o[D / 2], s[KEYS / 2];
    /* greatest score times log2 e, sum of the weights so far, factor of what was summed
     * before */
    float m[2], l[2], keep[2];
    uint32_t p[KEYS / 16][4];
};

template <typename T, int D>
__device__ __forceinline__ void issue_scores(rows<D> &x, uint32_t q, uint32_t k)
{
    using P = panels<D>;
    constexpr int KEYS = hopper_layout<D>::KEYS, STEPS = P::WIDTH / 16; /* of a panel */
    uint64_t dq = wgmma_descriptor(q, P::ROW), dk = wgmma_descriptor(k, P::ROW);

    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        wgmma_ss<T, KEYS>::run(x.s, dq + i / STEPS * (ROWS * P::ROW / 16) + i % STEPS * 2,
                               dk + i / STEPS * (KEYS * P::ROW / 16) + i % STEPS * 2, i > 0);
    }
    wgmma_commit();
}

template <typename T, int D> __device__ __forceinline__ void issue_values(rows<D> &x, uint32_t v)
{
    constexpr int KEYS = hopper_layout<D>::KEYS;

    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        wgmma_rs<T, D>::run(
            x.o, x.p[i],
            wgmma_descriptor_n(v + i * 16 * panels<D>::ROW, KEYS * panels<D>::ROW, panels<D>::ROW));
    }
    wgmma_commit();
}

/* Scores of tokens from `token` on that the rows from `position` on (the warp's first)
 * do not see become -inf. */
template <int D>
__device__ __forceinline__ void mask(rows<D> &x, int token, int position, int window, int lane)
{
    constexpr int KEYS = hopper_layout<D>::KEYS;

    if (token + KEYS - 1 <= position && (window == 0 || token > position + 15 - window)) {
        return;
    }
    token += (lane & 3) * 2;
    position += lane >> 2;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        int at = token + i / 4 * 8 + (i & 1), mine = position + (i >> 1 & 1) * 8;
        if (at > mine || (window > 0 && at <= mine - window)) {
            x.s[i] = -INFINITY;
        }
    }
}

/* Scores become weights. factor: what takes them to powers of two. */
template <int D> __device__ __forceinline__ void softmax(rows<D> &x, float factor)
{
    constexpr int KEYS = hopper_layout<D>::KEYS;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            top = fmaxf(top, fmaxf(x.s[i * 4 + h * 2], x.s[i * 4 + h * 2 + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        float next = fmaxf(x.m[h], top * factor), from = next == -INFINITY ? 0.0f : next;
        x.keep[h] = fast_exp2(x.m[h] - from);
        x.m[h] = next;
        float add[2] = {};
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            float e = fast_exp2(x.s[i / 2 * 4 + h * 2 + (i & 1)] * factor - from);
            x.s[i / 2 * 4 + h * 2 + (i & 1)] = e;
            add[i & 1] += e;
        }
        x.l[h] = x.l[h] * x.keep[h] + (add[0] + add[1]);
    }
}

template <typename T, int D> __device__ __forceinline__ void pack_weights(rows<D> &x)
{
    constexpr int KEYS = hopper_layout<D>::KEYS;

#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x.p[k][i] = pack2<T>(x.s[k * 8 + i * 2], x.s[k * 8 + i * 2 + 1]);
        }
}

/* The sums so far meet a greater score; in most tiles none is. */
template <int D> __device__ __forceinline__ void rescale(rows<D> &x)
{
    if (__all_sync(0xffffffffu, x.keep[0] == 1.0f && x.keep[1] == 1.0f)) {
        return;
    }
#pragma unroll
    for (int i = 0; i < D / 2; i++) {
        x.o[i] *= x.keep[i >> 1 & 1];
    }
}

/* Lane t of four, which holds element t of each of four vectors, gets vector t. */
__device__ __forceinline__ void transpose(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, int t)
{
    auto swap = [](uint32_t &low, uint32_t &high, int t, int bit) {
        uint32_t got = __shfl_xor_sync(0xffffffffu, t & bit ? low : high, bit);
        (t & bit ? low : high) = got;
    };

    swap(a, b, t, 1);
    swap(c, d, t, 1);
    swap(a, c, t, 2);
    swap(b, d, t, 2);
}

/* The sums over a row's four lanes, and the row out, 16 bytes a lane. */
template <typename T, int D>
__device__ __forceinline__ void write_rows(rows<D> &x, const attn_args &a, const work &w, int first,
                                           int lane)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = x.l[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int row = first + (lane >> 2) + h * 8;
        T *out = (T *)a.out + row * a.out_stride + (int64_t)w.head * D + (lane & 3) * 8;
        float over = 1.0f / sum;
#pragma unroll
        for (int i = 0; i < D / 8; i += 4) {
            uint32_t v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                v[k] = i + k < D / 8 ? pack2<T>(x.o[(i + k) * 4 + h * 2] * over,
                                                x.o[(i + k) * 4 + h * 2 + 1] * over)
                                     : 0;
            }
            transpose(v[0], v[1], v[2], v[3], lane & 3);
            if (row < w.rows.end && i + (lane & 3) < D / 8) {
                *(uint4 *)(out + i * 8) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

/* A computing warp, 0 to 7, whose 16 rows of the tile begin at 16 * warp. */
template <typename T, int D>
__device__ __forceinline__ void compute_rows(const attn_args &a, const query_tile *tile, int n_work,
                                             const hopper_shared<D> &sh, int warp, int lane)
{
    constexpr int KEYS = hopper_layout<D>::KEYS;
    constexpr bool BESIDE = hopper_layout<D>::Q_PLACES == 2;
    int group = warp >> 2, thread = threadIdx.x & 127;
    const float factor = a.softcap > 0.0f ? LOG2E : a.scale * LOG2E;
    bool speaker = thread == 0;
    ring k = {}, v = {};
    rows<D> x;
    work w = {}, next;
    int4 ahead = tile_of(tile, 1, a.n_heads, n_work);

    work_of<D>(next, 0, tile_of(tile, 0, a.n_heads, n_work), a, n_work);
    queries_fetch<T, D>(a, next, sh.queries(0), group, thread);
    auto finish_scores = [&](int j) { /* of tile j; done: in x.s, and the keys' place given back */
                                      if (speaker) {
                                          arrive(sh.empty(0, k.stage));
                                      }
                                      k.step();
                                      if (a.softcap > 0.0f)
#pragma unroll
                                          for (int i = 0; i < KEYS / 2; i++)
                                              x.s[i] = soft_cap(x.s[i] * a.scale, a.softcap);
                                      mask(x, w.begin + j * KEYS,
                                           w.rows.first + w.rows.shift + warp * 16, a.window, lane);
                                      softmax(x, factor);
    };
    bool more = true;
    for (int turn = 0; more; turn++) {
        queries_wait(group);
        w = next;
#pragma unroll
        for (int i = 0; i < D / 2; i++) {
            x.o[i] = 0.0f;
        }
        x.m[0] = x.m[1] = -INFINITY;
        x.l[0] = x.l[1] = 0.0f;
        const uint32_t q = sh.queries(turn) + group * GROUP_ROWS * panels<D>::ROW;
        barrier_wait(sh.full(0, k.stage), k.phase);
        issue_scores<T, D>(x, q, sh.tile(0, k.stage));
        more = work_of<D>(next, turn + 1, ahead, a, n_work);
        ahead = tile_of(tile, turn + 2, a.n_heads, n_work);
        if (BESIDE && more) {
            queries_fetch<T, D>(a, next, sh.queries(turn + 1), group, thread);
        }
        wgmma_wait<0>();
        finish_scores(0);
        pack_weights<T, D>(x);
        for (int j = 1; j < w.n_tiles; j++) {
            barrier_wait(sh.full(0, k.stage), k.phase);
            issue_scores<T, D>(x, q, sh.tile(0, k.stage));
            barrier_wait(sh.full(1, v.stage), v.phase);
            issue_values<T, D>(x, sh.tile(1, v.stage));
            wgmma_wait<1>();
            finish_scores(j);
            /* The assembler leaves the wait below the softmax only if a block of code
             * ends between them, and the sums above it only if they are asked for: they
             * are never negative. */
            if (j + 1 < w.n_tiles || x.l[0] + x.l[1] < 0.0f) {
                barrier_wait(sh.full(0, k.stage), k.phase);
            }
            wgmma_wait<0>();
            if (speaker) {
                arrive(sh.empty(1, v.stage));
            }
            v.step();
            rescale(x);
            pack_weights<T, D>(x);
        }
        barrier_wait(sh.full(1, v.stage), v.phase);
        issue_values<T, D>(x, sh.tile(1, v.stage));
        if (!BESIDE && more) {
            group_sync(group); /* the warpgroup's scores are done */
            queries_fetch<T, D>(a, next, sh.queries(turn + 1), group, thread);
        }
        wgmma_wait<0>();
        if (speaker) {
            arrive(sh.empty(1, v.stage));
        }
        v.step();
        write_rows<T, D>(x, a, w, w.rows.first + warp * 16, lane);
    }
}

/* Code without wgmma has an empty kernel, whose bounds keep it from being launched and
 * tell the host that it is empty. */
enum { KERNEL_THREADS = HAS_WGMMA ? HOPPER_THREADS : 32 };

template <typename T, int D>
__global__ void __launch_bounds__(KERNEL_THREADS, 1)
    prefill_hopper_kernel(attn_args a, step_arrays s, const query_tile *tile, int n_work)
{
#if HAS_WGMMA
    extern __shared__ char raw[];
    hopper_shared<D> sh = {(shared_address(raw) + 1023) & ~1023u};
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == COMPUTE) {
        for (int i = 0; i < 2 * STAGES; i++) {
            barrier_init(sh.full(0, i), 2);
            barrier_init(sh.empty(0, i), 2);
        }
        barrier_init(sh.last(), 2);
        barrier_init_fence();
    }
    pdl_wait();
    pdl_release();
    __syncthreads();
    if (warp >= COMPUTE / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        load_tiles<T, D>(a, s, tile, n_work, sh, warp - COMPUTE / 32, lane);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        compute_rows<T, D>(a, tile, n_work, sh, warp, lane);
    }
#endif
}

/* Blocks of the kernel, one a multiprocessor; 0 where it is empty or does not fit. */
template <typename T, int D> static int hopper_blocks(void)
{
    auto kernel = prefill_hopper_kernel<T, D>;
    cudaFuncAttributes made = {};
    int device = 0, n = 0;
    bool ok = cudaFuncGetAttributes(&made, kernel) == cudaSuccess &&
              made.maxThreadsPerBlock >= HOPPER_THREADS &&
              allow_shared(kernel, hopper_layout<D>::BYTES) &&
              cudaGetDevice(&device) == cudaSuccess &&
              cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;

    cudaGetLastError();
    return ok ? n : 0;
}

template <typename T, int D>
static bool hopper_launch(const attn_args *a, const step_arrays *s, const query_tile *tile,
                          int32_t n_tiles, cudaStream_t stream)
{
    static const int blocks = hopper_blocks<T, D>();
    int n_work = n_tiles * a->n_heads;

    if (blocks > 0) {
        launch(prefill_hopper_kernel<T, D>, dim3(n_work < blocks ? n_work : blocks),
               dim3(HOPPER_THREADS), hopper_layout<D>::BYTES, stream, *a, *s, tile, n_work);
    }
    return blocks > 0;
}

template <typename T>
static bool hopper_dispatch(const attn_args *a, const step_arrays *s, const query_tile *tile,
                            int32_t n, cudaStream_t stream)
{
    switch (a->kv.head_dim) {
    case 64:
        return hopper_launch<T, 64>(a, s, tile, n, stream);
    case 80:
        return hopper_launch<T, 80>(a, s, tile, n, stream);
    case 96:
        return hopper_launch<T, 96>(a, s, tile, n, stream);
    case 128:
        return hopper_launch<T, 128>(a, s, tile, n, stream);
    case 256:
        return hopper_launch<T, 256>(a, s, tile, n, stream);
    default:
        return false;
    }
}

extern "C" bool launch_attn_prefill_hopper(const struct attn_args *a, const struct step_arrays *s,
                                           const query_tile *tile, int32_t n_tiles,
                                           cudaStream_t stream)
{
    if (a->kv.panel_log2 == 0 || a->qkv_stride % 8 || (uintptr_t)a->qkv % 16 || a->out_stride % 8 ||
        (uintptr_t)a->out % 16) {
        return false;
    }
    return a->kv.dtype == T_F16 ? hopper_dispatch<__half>(a, s, tile, n_tiles, stream)
                                : hopper_dispatch<__nv_bfloat16>(a, s, tile, n_tiles, stream);
}
