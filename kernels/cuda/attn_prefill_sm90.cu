/* Paged prefill attention on Hopper: wgmma with a loading warpgroup and two computing ones.
 *
 * A block stays on its multiprocessor and takes pieces of work in turn, those with most keys first: 128 query rows of one
 * head, 64 a computing warpgroup. The loading warps walk the block table and keep two rings full with bulk copies, two warps
 * the keys' and two the values', tile upon tile (128 tokens) and on into the next piece of work, with the block ids of a
 * tile read while they wait for room. A computing warpgroup issues the scores of tile j, then the product of tile j - 1's
 * weights with its values, and computes the softmax of tile j while the latter runs; it brings the next queries in while
 * its last product runs. The cache's swizzled panels are what wgmma reads: keys as they are, values through its transposed
 * form.
 */
#include "kernels/cuda/attn_common.cuh"
#include "kernels/cuda/wgmma.cuh"


enum { ROWS = ATTN_PREFILL_ROWS, GROUP_ROWS = 64, KEYS = 128, COMPUTE = 256, HOPPER_THREADS = COMPUTE + 128, STAGES = 2 };

template <int D> struct hopper_layout {
    static constexpr int Q = ROWS * D * 2, TILE = KEYS * D * 2; /* bytes; a panel is [rows][64] */
    static constexpr int BARS = 4 * STAGES + 1;
    static constexpr int BYTES = Q + 2 * STAGES * TILE + BARS * 8 + 1024;
};

/* Shared-memory addresses. Keys have index 0, values 1. */
template <int D> struct hopper_shared {
    using L = hopper_layout<D>;
    uint32_t q;
    __device__ uint32_t tile(int which, int stage) const { return q + L::Q + (which * STAGES + stage) * L::TILE; }
    __device__ uint32_t full(int which, int stage) const { return q + L::Q + 2 * STAGES * L::TILE + (which * STAGES + stage) * 8; }
    __device__ uint32_t empty(int which, int stage) const { return full(which, stage) + 2 * STAGES * 8; }
    __device__ uint32_t last(void) const { return full(0, 0) + 4 * STAGES * 8; } /* values of a tile that is cleared past the end */
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

/* A piece of work: rows [row0, q_end) of the step as far as ROWS reach, against tokens [begin, end). */
struct work {
    int seq, head, row0, q_end;
    int shift; /* position of a row less its index */
    int begin, end, n_tiles;
};

/* The block's piece number `turn`; false: there is none. Turns run forth and back over the blocks, as the longest pieces come first. */
__device__ __forceinline__ bool work_of(work &w, int turn, const attn_args &a, const step_arrays &s, const int32_t *tile, int n_work)
{
    int i = turn * gridDim.x + (turn & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (i >= n_work)
        return false;
    int t = i / a.n_heads;
    w.head = i - t * a.n_heads;
    w.seq = tile[2 * t];
    w.row0 = tile[2 * t + 1];
    w.q_end = s.q_start[w.seq + 1];
    w.shift = s.kv_len[w.seq] - w.q_end;
    int first = w.row0 + w.shift;
    w.end = min(w.row0 + ROWS, w.q_end) + w.shift;
    w.begin = a.window > 0 && first + 1 > a.window ? (first + 1 - a.window) / 16 * 16 : 0;
    w.n_tiles = (w.end - w.begin + KEYS - 1) / KEYS;
    return true;
}

__device__ __forceinline__ void arrive(uint32_t bar)
{
#if BULK_COPY
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

__device__ __forceinline__ void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
enum { GROUP_BARRIER = 1 };

/* Rows [from, KEYS) of a tile become zero: what lies past the end may be anything, and 0 * NaN is NaN. */
template <int D> __device__ __forceinline__ void clear_rows(uint32_t tile, int from, int i, int n)
{
    int count = (KEYS - from) * 8;
    for (; i < count * (D / 64); i += n) {
        uint32_t at = tile + i / count * KEYS * 128 + from * 128 + i % count * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
}

/* The loading warps 0 to 3: two a ring, which take its pieces of 16 tokens of a panel (8 with blocks of 8) in turn, a lane each. */
template <typename T, int D>
__device__ __forceinline__ void load_tiles(const attn_args &a, const step_arrays &s, const int32_t *tile, int n_work,
                                           const hopper_shared<D> &sh, int warp, int lane)
{
    constexpr int PANELS = D / 64;
    int which = warp >> 1, index = lane * 2 + (warp & 1), panel = index % PANELS;
    int bs = a.kv.block_size, piece = bs < 16 ? 8 : 16, at = index / PANELS * piece; /* first token of the lane's piece */
    ring r = {0, 1};
    uint32_t last_phase = 0;
    work w;
    for (int turn = 0; work_of(w, turn, a, s, tile, n_work); turn++) {
        const T *base = (const T *)a.kv.base + a.layer * a.kv.layer_stride + w.head / (a.n_heads / a.kv.n_kv_heads) * a.kv.head_stride +
                        which * a.kv.kv_stride + (int64_t)panel * bs * 64;
        const int32_t *table = s.table + (int64_t)s.row[w.seq] * s.table_width;
        auto block_of = [&](int token) { return at < KEYS && token + at < w.end ? table[(token + at) / bs] : 0; };
        int block = block_of(w.begin);
        for (int token = w.begin; token < w.end; token += KEYS) {
            int next = block_of(token + KEYS);
            bool partial = which && token + KEYS > w.end, mine = at < KEYS && token + at < w.end;
            const T *from = base + block * a.kv.block_stride + (token + at) % bs * 64;
            uint32_t bar = partial ? sh.last() : sh.full(which, r.stage), to = sh.tile(which, r.stage);
            int rows = (min(KEYS, w.end - token) + piece - 1) / piece * piece;
            barrier_wait(sh.empty(which, r.stage), r.phase);
            if (lane == 0)
                barrier_expect(bar, rows * D); /* half of the bytes; the other warp says the rest */
            __syncwarp();
            if (mine)
                bulk_copy(to + panel * KEYS * 128 + at * 128, from, piece * 128, bar);
            if (partial) {
                barrier_wait(bar, last_phase);
                last_phase ^= 1;
                clear_rows<D>(to, w.end - token, (warp & 1) * 32 + lane, 64);
                proxy_fence();
                __syncwarp();
                if (lane == 0)
                    arrive(sh.full(1, r.stage));
            }
            block = next;
            r.step();
        }
    }
}

/* A computing warpgroup's queries into swizzled panels, rows past the sequence as zeros; queries_wait makes them visible to wgmma. */
template <typename T, int D>
__device__ __forceinline__ void queries_fetch(const attn_args &a, const work &w, uint32_t q_tile, int group, int thread)
{
#if BULK_COPY
#pragma unroll
    for (int i = 0; i < GROUP_ROWS * D / 8 / 128; i++) {
        int n = i * 128 + thread, r = group * GROUP_ROWS + n / (D / 8), chunk = n % (D / 8);
        bool in = w.row0 + r < w.q_end;
        const T *from = (const T *)a.qkv + (in ? w.row0 + r : w.row0) * a.qkv_stride + (int64_t)w.head * D + chunk * 8;
        uint32_t to = q_tile + (chunk >> 3) * ROWS * 128 + r * 128 + (((chunk & 7) ^ (r & 7)) << 4);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(in ? 16 : 0) : "memory");
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
    named_sync(GROUP_BARRIER + group, 128);
}

/* What a thread holds of its warpgroup's 64 rows: in each of two rows, g and g + 8 of its warp's 16, every fourth pair. */
template <int D> struct rows {
    float o[D / 2], s[KEYS / 2];
    float m[2], l[2], keep[2]; /* greatest score times log2 e, sum of the weights so far, factor of what was summed before */
    uint32_t p[KEYS / 16][4];
};

template <typename T, int D> __device__ __forceinline__ void issue_scores(rows<D> &x, uint32_t q, uint32_t k)
{
    uint64_t dq = wgmma_descriptor(q), dk = wgmma_descriptor(k);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        wgmma_ss<T, KEYS>::run(x.s, dq + (i / 4) * (ROWS * 128 / 16) + i % 4 * 2, dk + (i / 4) * (KEYS * 128 / 16) + i % 4 * 2, i > 0);
    wgmma_commit();
}

template <typename T, int D> __device__ __forceinline__ void issue_values(rows<D> &x, uint32_t v)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma_rs<T, D>::run(x.o, x.p[i], wgmma_descriptor_n(v + i * 16 * 128, KEYS * 128));
    wgmma_commit();
}

/* Scores of tokens from `token` on that the rows from `position` on (the warp's first) do not see become -inf. */
template <int D> __device__ __forceinline__ void mask(rows<D> &x, int token, int position, int window, int lane)
{
    if (token + KEYS - 1 <= position && (window == 0 || token > position + 15 - window))
        return;
    token += (lane & 3) * 2;
    position += lane >> 2;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        int at = token + i / 4 * 8 + (i & 1), mine = position + (i >> 1 & 1) * 8;
        if (at > mine || (window > 0 && at <= mine - window))
            x.s[i] = -INFINITY;
    }
}

/* Scores become weights. factor: what takes them to powers of two. */
template <int D> __device__ __forceinline__ void softmax(rows<D> &x, float factor)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
            top = fmaxf(top, fmaxf(x.s[i * 4 + h * 2], x.s[i * 4 + h * 2 + 1]));
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
        asm volatile("" : "+f"(x.l[h])); /* summed here, not below the wait for the product that runs meanwhile */
    }
}

template <typename T, int D> __device__ __forceinline__ void pack_weights(rows<D> &x)
{
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x.p[k][i] = pack2<T>(x.s[k * 8 + i * 2], x.s[k * 8 + i * 2 + 1]);
}

template <int D> __device__ __forceinline__ void rescale(rows<D> &x)
{
    if (__all_sync(0xffffffffu, x.keep[0] == 1.0f && x.keep[1] == 1.0f))
        return;
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        x.o[i] *= x.keep[i >> 1 & 1];
}

template <typename T, int D>
__device__ __forceinline__ void write_rows(rows<D> &x, const attn_args &a, const work &w, int first, int lane)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = x.l[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int row = first + (lane >> 2) + h * 8;
        if (row >= w.q_end)
            continue;
        T *out = (T *)a.out + row * a.out_stride + (int64_t)w.head * D + (lane & 3) * 2;
        float over = 1.0f / sum;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            *(uint32_t *)(out + i * 8) = pack2<T>(x.o[i * 4 + h * 2] * over, x.o[i * 4 + h * 2 + 1] * over);
    }
}

template <typename T, int D>
__device__ __forceinline__ void compute_rows(const attn_args &a, const step_arrays &s, const int32_t *tile, int n_work,
                                             const hopper_shared<D> &sh, int warp, int lane)
{
    int group = warp >> 2, thread = threadIdx.x & 127;
    const float factor = a.softcap > 0.0f ? LOG2E : a.scale * LOG2E;
    bool speaker = thread == 0;
    ring k = {}, v = {};
    rows<D> x;
    work w;
    bool more = work_of(w, 0, a, s, tile, n_work);
    if (more)
        queries_fetch<T, D>(a, w, sh.q, group, thread);
    auto finish_scores = [&](int j) { /* of tile j; done: in x.s, and the keys' place given back */
        if (speaker)
            arrive(sh.empty(0, k.stage));
        k.step();
        if (a.softcap > 0.0f)
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                x.s[i] = soft_cap(x.s[i] * a.scale, a.softcap);
        mask(x, w.begin + j * KEYS, w.row0 + w.shift + warp * 16, a.window, lane);
        softmax(x, factor);
    };
    for (int turn = 1; more; turn++) {
        queries_wait(group);
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            x.o[i] = 0.0f;
        x.m[0] = x.m[1] = -INFINITY;
        x.l[0] = x.l[1] = 0.0f;
        const uint32_t q = sh.q + group * GROUP_ROWS * 128;
        barrier_wait(sh.full(0, k.stage), k.phase);
        issue_scores<T, D>(x, q, sh.tile(0, k.stage));
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
            if (j + 1 < w.n_tiles) /* the assembler keeps the wait below where it stands only if a block of code ends here */
                barrier_wait(sh.full(0, k.stage), k.phase);
            wgmma_wait<0>();
            if (speaker)
                arrive(sh.empty(1, v.stage));
            v.step();
            rescale(x);
            pack_weights<T, D>(x);
        }
        barrier_wait(sh.full(1, v.stage), v.phase);
        issue_values<T, D>(x, sh.tile(1, v.stage));
        work now = w;
        more = work_of(w, turn, a, s, tile, n_work);
        named_sync(GROUP_BARRIER + group, 128); /* all warps' scores are there: nobody reads the queries any more */
        if (more)
            queries_fetch<T, D>(a, w, sh.q, group, thread);
        wgmma_wait<0>();
        if (speaker)
            arrive(sh.empty(1, v.stage));
        v.step();
        write_rows<T, D>(x, a, now, now.row0 + warp * 16, lane);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
prefill_hopper_kernel(attn_args a, step_arrays s, const int32_t *tile, int n_work)
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
        compute_rows<T, D>(a, s, tile, n_work, sh, warp, lane);
    }
#endif
}

static int multiprocessors(void)
{
    static int n;
    int device = 0;
    if (n == 0 && (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess))
        n = 1;
    return n;
}

template <typename T, int D>
static bool hopper_launch(const attn_args *a, const step_arrays *s, const int32_t *tile, int32_t n_tiles, cudaStream_t stream)
{
    static bool ready;
    constexpr int bytes = hopper_layout<D>::BYTES;
    auto kernel = prefill_hopper_kernel<T, D>;
    if (!ready) {
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
            return false;
        ready = true;
    }
    int n_work = n_tiles * a->n_heads, blocks = multiprocessors();
    launch(kernel, dim3(n_work < blocks ? n_work : blocks), dim3(HOPPER_THREADS), bytes, stream, *a, *s, tile, n_work);
    return true;
}

extern "C" bool launch_attn_prefill_hopper(const struct attn_args *a, const struct step_arrays *s, const int32_t *tile,
                                           int32_t n_tiles, cudaStream_t stream)
{
    if (!a->kv.swizzled || a->qkv_stride % 8 || (uintptr_t)a->qkv % 16 || a->out_stride % 2)
        return false;
    bool half = a->kv.dtype == T_F16;
    switch (a->kv.head_dim) {
    case 64:
        return half ? hopper_launch<__half, 64>(a, s, tile, n_tiles, stream) : hopper_launch<__nv_bfloat16, 64>(a, s, tile, n_tiles, stream);
    case 128:
        return half ? hopper_launch<__half, 128>(a, s, tile, n_tiles, stream) : hopper_launch<__nv_bfloat16, 128>(a, s, tile, n_tiles, stream);
    default: return false;
    }
}
