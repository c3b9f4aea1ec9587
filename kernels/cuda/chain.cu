/* Phases of a chain (chain.h) by one block a multiprocessor, all at work at the same time.
 *
 * Loading warps (chain_ring.cuh) walk the weight tiles of all phases in order and keep a ring of shared memory filled by bulk
 * copies; they wait for nobody but the ring, for weights depend on nothing. So while the others wait at a barrier, write back
 * and compute a norm (chain_panel.cuh), the memory goes on: what the ring takes, some 5 us of it, is what these may last.
 *
 * The other warps multiply: a tile is 16 rows of weights, the left operand of a matrix instruction, up to 8 rows of
 * activations are its right one. Each warp has an eighth of a stage's depth; at a tile's end their sums are added through
 * shared memory by one of them, in turn. Which columns a lane takes is free as long as both operands agree: vectors of 16
 * bytes, so that no transposing loads are needed. A tile of a gated product has 8 rows of the gate and the 8 of `up` that
 * belong to them, one of qkv 8 dims of a head's lower half and the 8 of its upper half that turn with them: so the same lane
 * gets both.
 *
 * Every block computes the norm of all rows itself: they are few and lie in the second-level cache.
 *
 * Tiles are dealt round all blocks, from where the phase before stopped. The blocks that have one tile less in a phase are ahead
 * by a tile, which their rings take.
 */
#include "kernels/cuda/chain_panel.cuh"
#include "kernels/cuda/chain_sum.cuh"

/* ---- products ------------------------------------------------------------------------------------------------------- */

struct fragment {
    float even[4], odd[4]; /* two sums, so that matrix instructions need not wait for each other */
};

__device__ __forceinline__ uint4 load_shared(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

template <typename T>
__device__ __forceinline__ void multiply16(fragment &f, const uint4 &low, const uint4 &high, const uint4 &x)
{
    uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
    mma16816<T>(f.even, first, x.x, x.y);
    mma16816<T>(f.odd, second, x.z, x.w);
}

/* 16 columns of a row of weights, two vectors 4 vectors apart. Rows lie 1 KB apart, all in the same banks, so odd rows are read
 * the other way round. */
__device__ __forceinline__ void load_row(uint4 &first, uint4 &second, uint32_t at, bool odd)
{
    uint4 a = load_shared(at + (odd ? 64 : 0)), b = load_shared(at + (odd ? 0 : 64));
    first = odd ? b : a;
    second = odd ? a : b;
}

/* One stage of a tile; panel: this lane's place in it for the stage. */
template <typename T>
__device__ __forceinline__ void multiply_stage(ring &r, fragment &f, uint32_t panel, int cols, bool has_row, int warp, int lane)
{
    uint32_t at = r.place() + (lane >> 2) * PITCH + warp * SLICE * 2 + (lane & 3) * 16;
    bool mine = warp * SLICE < cols, odd = lane & 4;
    uint4 x0 = {}, x1 = {}, low0, low1, high0, high1;
    if (mine && has_row) {
        x0 = load_shared(panel);
        x1 = load_shared(panel + 64);
    }
    barrier_wait(r.full + r.at * 8, r.round);
    if (mine) {
        load_row(low0, low1, at, odd);
        load_row(high0, high1, at + 8 * PITCH, odd);
        multiply16<T>(f, low0, high0, x0);
        multiply16<T>(f, low1, high1, x1);
    }
    __syncwarp();
    if (lane == 0)
        ring_arrive(r.empty + r.at * 8);
    r.next();
}

/* Results of a tile in the order of a fragment: rows g and g + 8 of the weight, activation rows 2 t and 2 t + 1. */
struct spot {
    int out[2]; /* columns of the result */
    int row;    /* of the activations; and the next */
};

__device__ __forceinline__ spot spot_of(const chain_phase &q, int tile, int lane)
{
    return {{weight_row(q, tile, lane >> 2), weight_row(q, tile, (lane >> 2) + 8)}, (lane & 3) * 2};
}

/* What becomes of a tile's results, fetched before they are there. */
template <typename T> struct fetched {
    T add[4];               /* what they are added to */
    float cosine[2], sine[2]; /* by which two activation rows turn */
    int slot[2];            /* of these rows; negative: none */
};

template <typename T>
__device__ __forceinline__ void fetch_tile(fetched<T> &f, const chain_args &a, const chain_phase &q, int tile, int lane)
{
    const T *from = (const T *)(q.sum ? q.sum : q.residual);
    int64_t stride = q.sum ? q.sum_stride : q.residual_stride;
    spot o = spot_of(q, tile, lane);
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (from && o.row + (i & 1) < a.rows)
            f.add[i] = __ldcg(from + (o.row + (i & 1)) * stride + o.out[i >> 1]);
    if (!q.turned)
        return;
    const chain_rope &r = a.rope;
    bool turns = r.cos_sin && o.out[0] / r.kv.head_dim < r.n_heads + r.kv.n_kv_heads;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (o.row + i < a.rows) {
            const float *at = r.cos_sin + r.position[o.row + i] * r.cos_sin_stride + o.out[0] % r.kv.head_dim;
            f.cosine[i] = turns ? at[0] : 1.0f;
            f.sine[i] = turns ? at[r.kv.head_dim / 2] : 0.0f;
            f.slot[i] = r.slot[o.row + i];
        }
}

/* Two dims of a head, half a head apart, of one activation row: turned in place, and to the cache what belongs there. */
template <typename T>
__device__ __forceinline__ void turn_pair(const chain_rope &r, T &low, T &high, int out, float cosine, float sine, int slot)
{
    int dim = out % r.kv.head_dim, head = out / r.kv.head_dim - r.n_heads, half = r.kv.head_dim / 2;
    if (head < r.kv.n_kv_heads) {
        float x = to_float(low), y = to_float(high);
        low = from_float<T>(x * cosine - y * sine);
        high = from_float<T>(y * cosine + x * sine);
    }
    if (head < 0 || slot < 0)
        return;
    bool is_v = head >= r.kv.n_kv_heads;
    T *cache = (T *)r.kv.base + slot / r.kv.block_size * r.kv.block_stride + r.layer * r.kv.layer_stride + (is_v ? r.kv.kv_stride : 0) +
               (is_v ? head - r.kv.n_kv_heads : head) * r.kv.head_stride;
    cache[kv_offset(r.kv, slot % r.kv.block_size, dim)] = low;
    cache[kv_offset(r.kv, slot % r.kv.block_size, dim + half)] = high;
}

template <typename T>
__device__ __forceinline__ void store_tile(const chain_args &a, const chain_phase &q, int tile, const float (&sum)[4], const fetched<T> &f,
                                           owed<T> &owed, int lane)
{
    spot o = spot_of(q, tile, lane);
    float result[4];
    T y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = o.row + (i & 1), col = o.out[i >> 1];
        float v = sum[i];
        if (q.bias)
            v += to_float(((const T *)q.bias)[col]);
        v = activate(v, q.act);
        if (q.residual && row < a.rows)
            v += to_float(q.sum ? ((const T *)q.residual)[row * q.residual_stride + col] : f.add[i]);
        result[i] = v;
        y[i] = from_float<T>(v);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (o.row + i < a.rows) {
            if (q.turned)
                turn_pair<T>(a.rope, y[i], y[i + 2], o.out[0], f.cosine[i], f.sine[i], f.slot[i]);
            if (q.gated)
                ((T *)q.gated)[(o.row + i) * q.gated_stride + o.out[0]] =
                    from_float<T>(activate(result[i], q.gate_act) * result[i + 2]);
        }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = o.row + (i & 1), col = o.out[i >> 1];
        if (row < a.rows && q.out) {
            ((T *)q.out)[row * q.out_stride + col] = y[i];
            if (q.sum && !q.partial)
                ((T *)q.sum)[row * q.sum_stride + col] = from_float<T>(to_float(f.add[i]) + to_float(y[i]));
        }
    }
    if (q.partial)
        owe<T>(owed, a, q, tile, y, f.add, lane);
}

/* A tile's sums of all warps, added by one of them in turn. Two places in turn: what one tile's adder reads is written again after
 * the barrier of the tile between. */
template <typename T>
__device__ __forceinline__ void finish_tile(const chain_args &a, const chain_phase &q, const places &s, int tile, int turn, const fragment &f,
                                            const fetched<T> &fetched, owed<T> &owed, int warp, int lane)
{
    float4 *sums = s.sums + (turn & 1) * CHAIN_WARPS * 32;
    sums[warp * 32 + lane] = make_float4(f.even[0] + f.odd[0], f.even[1] + f.odd[1], f.even[2] + f.odd[2], f.even[3] + f.odd[3]);
    warps_sync();
    if (warp != turn % CHAIN_WARPS)
        return;
    float all[4] = {};
#pragma unroll
    for (int w = 0; w < CHAIN_WARPS; w++) {
        float4 v = sums[w * 32 + lane];
        all[0] += v.x;
        all[1] += v.y;
        all[2] += v.z;
        all[3] += v.w;
    }
    store_tile<T>(a, q, tile, all, fetched, owed, lane);
}

template <typename T, int N>
__device__ __forceinline__ void multiply_phase(const chain_args &a, const chain_phase &q, const chain_phase *after, ring &r, const places &s, int &turn,
                                               uint32_t summed)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    deal d(q);
    int together = tiles_together(q);
    vector16 v[N]; /* the next panel */
    load_panel<T, N>(v, a, q, 0, min(q.depth, q.k));
    if (q.depth == q.k)
        store_panel<T, N>(v, a, q, s, q.k);
    if (after)
        fetch_norm_weight(*after, s);
    uint32_t own = shared_address(s.panel) + (lane >> 2) * (q.depth * 2 + CHAIN_PAD_BYTES) + warp * SLICE * 2 + (lane & 3) * 16;
    bool has_row = (lane >> 2) < a.rows;
    owed<T> owed = {.sum = summed};
    for (int i = 0; i < d.n(); i += together) {
        fragment f[TILES] = {};
        fetched<T> ahead[TILES];
#pragma unroll
        for (int j = 0; j < TILES; j++)
            if (j < together && i + j < d.n() && warp == (turn + j) % CHAIN_WARPS)
                fetch_tile<T>(ahead[j], a, q, d.tile(i + j), lane);
        for (int k0 = 0; k0 < q.k; k0 += q.depth) {
            int end = min(k0 + q.depth, q.k);
            if (q.depth < q.k) {
                warps_sync(); /* the panel before is read */
                store_panel<T, N>(v, a, q, s, end - k0);
                int next = end < q.k ? end : 0;
                load_panel<T, N>(v, a, q, next, min(q.depth, q.k - next));
            }
#pragma unroll
            for (int j = 0; j < TILES; j++)
                if (j < together && i + j < d.n()) {
                    for (int k = k0; k < end; k += CHAIN_STEP)
                        multiply_stage<T>(r, f[j], own + (k - k0) * 2, end - k, has_row, warp, lane);
                }
        }
#pragma unroll
        for (int j = 0; j < TILES; j++)
            if (j < together && i + j < d.n())
                finish_tile<T>(a, q, s, d.tile(i + j), turn++, f[j], ahead[j], owed, warp, lane);
    }
    if (q.partial)
        settle<T>(owed, a, q, lane);
}

/* ---- the kernel ----------------------------------------------------------------------------------------------------- */

template <typename T, int N> __device__ __forceinline__ void run_phases(const chain_args &a, ring &r, const places &s)
{
    int turn = 0; /* tiles that were finished: warps add them up in turn */
    fetch_norm_weight(a.phase[0], s);
    pdl_wait();
    uint32_t summed = a.peer.n_ranks > 1 ? __ldcg(a.peer.epoch + PEER_EPOCH_CHAIN) : 0; /* sums so far */
    for (int p = 0; p < a.n_phases; p++) {
        int32_t *counter = a.counter + p * CHAIN_COUNTER_STRIDE;
        if (p + 1 == a.n_phases)
            pdl_release();
        if (p > 0)
            blocks_wait(counter - CHAIN_COUNTER_STRIDE);
        multiply_phase<T, N>(a, a.phase[p], p + 1 < a.n_phases ? &a.phase[p + 1] : nullptr, r, s, turn, summed);
        summed += a.phase[p].partial;
        if (p + 1 < a.n_phases)
            blocks_arrive(counter);
    }
    blocks_leave(a, summed);
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS + LOADERS * 32, 1) chain_kernel(const __grid_constant__ chain_args a)
{
    extern __shared__ __align__(128) char shared[];
    places s;
    s.panel = shared + a.n_stages * CHAIN_STAGE_BYTES;
    s.norm_weight = s.panel + a.panel_bytes;
    s.sums = (float4 *)(s.norm_weight + a.norm_bytes);
    s.row_sums = (float *)(s.sums + 2 * CHAIN_WARPS * 32);
    ring r;
    r.stage = shared_address(shared);
    r.full = shared_address(s.row_sums + 2 * CHAIN_WARPS);
    r.empty = r.full + CHAIN_MAX_STAGES * 8;
    r.n = a.n_stages;
    r.at = 0;
    r.round = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.n_stages; i++) {
            barrier_init(r.full + i * 8, LOADERS);
            barrier_init(r.empty + i * 8, CHAIN_WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (warp < CHAIN_WARPS)
        run_phases<T, N>(a, r, s);
    else if ((threadIdx.x & 31) == 0)
        load_weights<T>(a, r, warp - CHAIN_WARPS);
}

using chain_function = void (*)(chain_args);

/* For panels of so many vectors a thread, so that what few rows run through is short. */
template <typename T> static chain_function chain_of(int32_t vectors)
{
    return vectors <= 2 ? chain_kernel<T, 2> : vectors <= 4 ? chain_kernel<T, 4> : vectors <= 8 ? chain_kernel<T, 8> : chain_kernel<T, VECTORS>;
}

static chain_function chain_for(int32_t type, int32_t vectors)
{
    return type == T_F16 ? chain_of<__half>(vectors) : chain_of<__nv_bfloat16>(vectors);
}

extern "C" bool chain_prepare(int32_t max_shared_bytes)
{
    cudaFuncAttributes made = {};
    bool ok = cudaFuncGetAttributes(&made, chain_for(T_F16, 1)) == cudaSuccess && made.ptxVersion >= 90; /* bulk copies */
    for (int vectors = 2; vectors <= VECTORS; vectors *= 2)
        for (int type : {T_F16, T_BF16})
            ok = ok && cudaFuncSetAttribute(chain_for(type, vectors), cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared_bytes) ==
                           cudaSuccess;
    cudaGetLastError();
    return ok;
}

extern "C" void launch_chain(const struct chain_args *a, int32_t n_blocks, cudaStream_t stream)
{
    launch(chain_for(a->type, a->vectors), dim3(n_blocks), dim3(THREADS + LOADERS * 32), a->shared_bytes, stream, *a);
}
