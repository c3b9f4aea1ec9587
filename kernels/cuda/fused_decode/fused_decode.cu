/* Phases of a fused launch (fused_decode.h) by one block a multiprocessor, all at work
 * at the same time.
 *
 * Loading warps (ring.cuh) walk the weight tiles of all phases in order and keep
 * a ring of shared memory filled by bulk copies; they wait for nobody but the ring, for
 * weights depend on nothing. So while the others wait at a barrier, write back and
 * compute a norm (panel.cuh), the memory goes on: what the ring takes, some 6 us
 * of it, is what these may last.
 *
 * Eight warps multiply: a tile is 16 rows of weights, the left operand of a matrix
 * instruction, up to 8 rows of activations are its right one. Each warp has an eighth
 * of a stage's depth; its sums of a tile go through shared memory to one of the
 * finishing warps, which take tiles in turn, add up, and do what becomes of a result:
 * so nobody who multiplies waits for global memory. Which columns a lane takes is free
 * as long as both operands agree: vectors of 16 bytes, so that no transposing loads are
 * needed. A tile of a gated product has 8 rows of the gate and the 8 of `up` that
 * belong to them, one of qkv 8 dims of a head's lower half and the 8 of its upper half
 * that turn with them: so the same lane gets both.
 *
 * A warp needs the activations of its own columns alone, and has them in registers for
 * a whole phase: shared memory is for weights. A product deeper than that is done in
 * parts, each by blocks of its own; the last of a tile's parts to arrive adds all of
 * them up, in their order. Every block computes the norm of all rows itself: they are
 * few and lie in the second-level cache.
 *
 * Tiles are dealt round all blocks, or those of a part, from where the phase before
 * stopped. The blocks that have one tile less in a phase are ahead by a tile, which
 * their rings take.
 */
#include "kernels/cuda/fused_decode/all_reduce.cuh"
#include "kernels/cuda/fused_decode/panel.cuh"

/* ---- products ---- */

__device__ __forceinline__ uint4 load_shared(uint32_t at)
{
    uint4 v;

    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* 16 columns of a row of weights, two vectors 4 vectors apart. Rows lie 1 KB apart, all
 * in the same banks, so odd rows are read the other way round. */
__device__ __forceinline__ void load_row(uint4 &first, uint4 &second, uint32_t at, bool odd)
{
    uint4 a = load_shared(at + (odd ? 64 : 0)), b = load_shared(at + (odd ? 0 : 64));

    first = odd ? b : a;
    second = odd ? a : b;
}

/* One stage of a tile; x: this lane's activations of the stage's columns. */
template <typename T>
__device__ __forceinline__ void multiply_stage(ring &r, fragment &f, const vector16 &x0,
                                               const vector16 &x1, bool mine, int warp, int lane)
{
    uint32_t at = r.place() + (lane >> 2) * PITCH + warp * SLICE * 2 + (lane & 3) * 16;
    bool odd = lane & 4;
    uint4 low0, low1, high0, high1;

    barrier_wait(r.full + r.at * 8, r.round);
    if (mine) {
        load_row(low0, low1, at, odd);
        load_row(high0, high1, at + 8 * PITCH, odd);
        multiply16<T>(f, low0, high0, x0);
        multiply16<T>(f, low1, high1, x1);
    }
    __syncwarp();
    if (lane == 0) {
        ring_arrive(r.empty + r.at * 8);
    }
    r.next();
}

/* Results of a tile in the order of a fragment: rows g and g + 8 of the weight,
 * activation rows 2 t and 2 t + 1. */
struct spot {
    int out[2]; /* columns of the result */
    int row;    /* of the activations; and the next */
};

__device__ __forceinline__ spot spot_of(const fused_op &q, int tile, int lane)
{
    return {{weight_row(q, tile, lane >> 2), weight_row(q, tile, (lane >> 2) + 8)}, (lane & 3) * 2};
}

/* What becomes of a tile's results, fetched before they are there. */
template <typename T> struct fetched {
    T add[4];                 /* what they are added to */
    float cosine[2], sine[2]; /* by which two activation rows turn */
    int slot[2];              /* of these rows; negative: none */
};

template <typename T>
__device__ __forceinline__ void fetch_tile(fetched<T> &f, const fused_args &a, const fused_op &q,
                                           int tile, int lane)
{
    const T *from = (const T *)(q.sum ? q.sum : q.residual);
    int64_t stride = q.sum ? q.sum_stride : q.residual_stride;
    spot o = spot_of(q, tile, lane);

#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (from && o.row + (i & 1) < a.rows) {
            f.add[i] = __ldcg(from + (o.row + (i & 1)) * stride + o.out[i >> 1]);
        }
    }
    if (!q.turned) {
        return;
    }
    const fused_rope &r = a.rope;
    bool turns = r.cos_sin && o.out[0] / r.kv.head_dim < r.n_heads + r.kv.n_kv_heads;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (o.row + i < a.rows) {
            const float *at =
                r.cos_sin + r.position[o.row + i] * r.cos_sin_stride + o.out[0] % r.kv.head_dim;
            f.cosine[i] = turns ? at[0] : 1.0f;
            f.sine[i] = turns ? at[r.kv.head_dim / 2] : 0.0f;
            f.slot[i] = r.slot[o.row + i];
        }
    }
}

/* Two dims of a head, half a head apart, of one activation row: turned in place, and to
 * the cache what belongs there. */
template <typename T>
__device__ __forceinline__ void turn_pair(const fused_rope &r, T &low, T &high, int out,
                                          float cosine, float sine, int slot)
{
    int dim = out % r.kv.head_dim, head = out / r.kv.head_dim - r.n_heads, half = r.kv.head_dim / 2;

    if (head < r.kv.n_kv_heads) {
        float x = to_float(low), y = to_float(high);
        low = from_float<T>(x * cosine - y * sine);
        high = from_float<T>(y * cosine + x * sine);
    }
    if (head < 0 || slot < 0) {
        return;
    }
    bool is_v = head >= r.kv.n_kv_heads;
    T *cache = (T *)r.kv.base + slot / r.kv.block_size * r.kv.block_stride +
               r.layer * r.kv.layer_stride + (is_v ? r.kv.kv_stride : 0) +
               (is_v ? head - r.kv.n_kv_heads : head) * r.kv.head_stride;
    cache[kv_offset(r.kv, slot % r.kv.block_size, dim)] = low;
    cache[kv_offset(r.kv, slot % r.kv.block_size, dim + half)] = high;
}

__device__ __noinline__ float activated(float x, int act)
{
    return activate(x, act);
}

template <typename T>
__device__ __forceinline__ void store_tile(const fused_args &a, const fused_op &q, int tile,
                                           const float4 &all, const fetched<T> &f, owed<T> &owed,
                                           int lane)
{
    spot o = spot_of(q, tile, lane);
    const float sum[4] = {all.x, all.y, all.z, all.w};
    float result[4];
    T y[4];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = o.row + (i & 1), col = o.out[i >> 1];
        float v = sum[i];
        if (q.bias) {
            v += to_float(((const T *)q.bias)[col]);
        }
        if (q.act) {
            v = activated(v, q.act);
        }
        if (q.residual && row < a.rows) {
            v +=
                to_float(q.sum ? ((const T *)q.residual)[row * q.residual_stride + col] : f.add[i]);
        }
        result[i] = v;
        y[i] = from_float<T>(v);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (o.row + i < a.rows) {
            if (q.turned) {
                turn_pair<T>(a.rope, y[i], y[i + 2], o.out[0], f.cosine[i], f.sine[i], f.slot[i]);
            }
            if (q.gated) {
                ((T *)q.gated)[(o.row + i) * q.gated_stride + o.out[0]] =
                    from_float<T>(activated(result[i], q.gate_act) * result[i + 2]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = o.row + (i & 1), col = o.out[i >> 1];
        if (row < a.rows && q.out) {
            ((T *)q.out)[row * q.out_stride + col] = y[i];
            if (q.sum && !q.partial) {
                ((T *)q.sum)[row * q.sum_stride + col] =
                    from_float<T>(to_float(f.add[i]) + to_float(y[i]));
            }
        }
    }
    if (q.partial) {
        owe<T>(owed, a, q, tile, y, f.add, lane);
    }
}

__device__ __forceinline__ float4 added(const float4 &x, const float4 &y)
{
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

/* This warp's sums of a part of a tile go to the others'. True where the others are
 * there: then `all` are the sums of all parts, in the order of these. */
__device__ __forceinline__ bool add_parts(const fused_args &a, const fused_op &q, int part,
                                          int tile, float4 &all, int lane)
{
    float4 *at = (float4 *)a.sums + tile * q.parts * 32 + lane;
    int before = 0;

    __stcg(at + part * 32, all);
    __syncwarp();
    if (lane == 0) {
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(a.arrived + tile)
                     : "memory");
    }
    if (__shfl_sync(0xffffffffu, before, 0) + 1 < q.parts) {
        return false;
    }
    all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < q.parts; i++) {
        all = added(all, __ldcg(at + i * 32));
    }
    if (lane == 0) {
        a.arrived[tile] = 0;
    }
    return true;
}

/* ---- the warps that multiply ---- */

/* This warp's sums of a tile, for the finishing warp. There is room for two tiles;
 * `turn` counts them. */
__device__ __forceinline__ void hand_over(const places &s, const fragment &f, int turn, int warp,
                                          int lane)
{
    int place = turn & 1;

    barrier_wait(s.sums_empty + place * 8, ~(turn >> 1) & 1);
    s.sums[(place * FUSED_WARPS + warp) * 32 + lane] = make_float4(
        f.even[0] + f.odd[0], f.even[1] + f.odd[1], f.even[2] + f.odd[2], f.even[3] + f.odd[3]);
    __syncwarp();
    if (lane == 0) {
        ring_arrive(s.sums_full + turn % FINISHERS * 8);
    }
}

template <typename T>
__device__ __forceinline__ void multiply_phase(const fused_args &a, const fused_op &q, ring &r,
                                               const places &s, int &turn)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    tile_schedule d = deal_of(q);

    if (d.n == 0 && (q.n > 0 || d.first > 0)) { /* nothing to do, not even a norm alone */
        return;
    }
    span columns(q, d.part);
    source<T> x;
    x.take(q, s, d.part, a.rows);
    if (q.h && d.first == 0) {
        x.keep(q, columns, a.rows);
    }
    for (int i = 0; i < d.n; i++) {
        fragment f = {};
        int at = columns.begin;
#pragma unroll
        for (int j = 0; j < FUSED_PART_STEPS; j++) {
            if (j < columns.n) {
                multiply_stage<T>(r, f, x.v[2 * j], x.v[2 * j + 1],
                                  at + warp * SLICE < columns.cols, warp, lane);
                at = columns.after(at);
            }
        }
        hand_over(s, f, turn++, warp, lane);
    }
}

template <typename T>
__device__ __forceinline__ void multiply_phases(const fused_args &a, ring &r, const places &s)
{
    int turn = 0;

    fetch_norm_weight(a.op[0], s);
    pdl_wait();
    for (int p = 0; p < a.n_ops; p++) {
        if (p + 1 == a.n_ops) {
            pdl_release();
        }
        if (p > 0) {
            phase_sync(PHASE_OPEN);
        }
        multiply_phase<T>(a, a.op[p], r, s, turn);
        warps_sync(); /* all have read the weight of this phase's norm */
        phase_arrive(PHASE_DONE);
        if (p + 1 < a.n_ops) {
            fetch_norm_weight(a.op[p + 1], s);
        }
    }
}

/* ---- the warps that finish tiles ---- */

/* A tile's sums of all warps. */
__device__ __forceinline__ float4 take_sums(const places &s, int turn, int lane)
{
    int place = turn & 1;

    barrier_wait(s.sums_full + turn % FINISHERS * 8, turn / FINISHERS & 1);
    const float4 *sums = s.sums + place * FUSED_WARPS * 32 + lane;
    float4 all = sums[0];
#pragma unroll
    for (int w = 1; w < FUSED_WARPS; w++) {
        all = added(all, sums[w * 32]);
    }
    __syncwarp();
    if (lane == 0) {
        ring_arrive(s.sums_empty + place * 8);
    }
    return all;
}

template <typename T>
__device__ __forceinline__ void finish_phases(const fused_args &a, const places &s, int finisher)
{
    int lane = threadIdx.x & 31, turn = 0;

    pdl_wait();
    /* sums so far */
    uint32_t summed = a.p2p.n_ranks > 1 ? __ldcg(a.p2p.epoch + P2P_EPOCH_FUSED) : 0;
    for (int p = 0; p < a.n_ops; p++) {
        const fused_op &q = a.op[p];
        owed<T> owed = {.sum = summed};
        tile_schedule d = deal_of(q);
        int32_t *counter = a.counter + p * FUSED_COUNTER_STRIDE;
        if (p + 1 == a.n_ops) {
            pdl_release();
        }
        if (p > 0) {
            blocks_wait(counter - FUSED_COUNTER_STRIDE, finisher);
        }
        for (int i = 0; i < d.n; i++, turn++) {
            if (turn % FINISHERS != finisher) {
                continue;
            }
            int tile = d.first + i * d.step;
            fetched<T> ahead;
            fetch_tile<T>(ahead, a, q, tile, lane);
            float4 all = take_sums(s, turn, lane);
            if (q.parts == 1 || add_parts(a, q, d.part, tile, all, lane)) {
                store_tile<T>(a, q, tile, all, ahead, owed, lane);
            }
        }
        if (q.partial) {
            settle<T>(owed, a, q, lane);
        }
        summed += q.partial;
        phase_sync(PHASE_DONE);
        if (finisher == 0 && p + 1 < a.n_ops) {
            blocks_arrive(counter);
        }
    }
    if (finisher == 0) {
        blocks_leave(a, summed);
    }
}

/* ---- the kernel ---- */

template <typename T>
__global__ void __launch_bounds__(THREADS + FINISHERS * 32 + LOADERS * 32, 1)
    fused_decode_kernel(const __grid_constant__ fused_args a)
{
    extern __shared__ __align__(128) char shared[];
    places s;

    s.norm_weight = shared + a.n_stages * FUSED_STAGE_BYTES;
    s.sums = (float4 *)(s.norm_weight + a.norm_bytes);
    s.row_sums = (float *)(s.sums + 2 * FUSED_WARPS * 32);
    ring r;
    r.stage = shared_address(shared);
    r.full = shared_address(s.row_sums + 2 * FUSED_WARPS * FUSED_ROWS);
    r.empty = r.full + FUSED_MAX_STAGES * 8;
    s.sums_full = r.empty + FUSED_MAX_STAGES * 8;
    s.sums_empty = s.sums_full + FINISHERS * 8;
    r.n = a.n_stages;
    r.at = 0;
    r.round = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.n_stages; i++) {
            barrier_init(r.full + i * 8, LOADERS);
            barrier_init(r.empty + i * 8, FUSED_WARPS);
        }
        for (int i = 0; i < FINISHERS; i++) {
            barrier_init(s.sums_full + i * 8, FUSED_WARPS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(s.sums_empty + i * 8, 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (warp < FUSED_WARPS) {
        multiply_phases<T>(a, r, s);
    } else if (warp < FUSED_WARPS + FINISHERS) {
        finish_phases<T>(a, s, warp - FUSED_WARPS);
    } else if ((threadIdx.x & 31) == 0) {
        load_weights<T>(a, r, warp - FUSED_WARPS - FINISHERS);
    }
}

extern "C" bool fused_prepare(int32_t max_shared_bytes)
{
    cudaFuncAttributes made = {};
    /* bulk copies */
    bool ok = cudaFuncGetAttributes(&made, fused_decode_kernel<__half>) == cudaSuccess &&
              made.ptxVersion >= 90 &&
              allow_shared(fused_decode_kernel<__half>, max_shared_bytes) &&
              allow_shared(fused_decode_kernel<__nv_bfloat16>, max_shared_bytes);

    cudaGetLastError();
    return ok;
}

extern "C" void launch_fused_decode(const struct fused_args *a, int32_t n_blocks,
                                    cudaStream_t stream)
{
    auto kernel =
        a->type == T_F16 ? fused_decode_kernel<__half> : fused_decode_kernel<__nv_bfloat16>;

    launch(kernel, dim3(n_blocks), dim3(THREADS + FINISHERS * 32 + LOADERS * 32), a->shared_bytes,
           stream, *a);
}
