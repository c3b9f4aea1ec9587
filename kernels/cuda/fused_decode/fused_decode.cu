/* The kernel of a fused launch (fused_decode.h): one persistent block per
 * multiprocessor, all co-resident.
 *
 * Load warps (ring.cuh) walk the weight tiles of all ops in order and keep a ring of
 * shared-memory stages filled by bulk copies. Weights depend on nothing, so they wait
 * only for free stages: memory keeps streaming while the other warps wait at a barrier,
 * store results or compute a norm (activations.cuh).
 *
 * Eight MMA warps run the mainloop. A tile is 16 rows of weights, the A operand; up to
 * 8 activation rows are the B operand. Each warp has an eighth of a stage's depth; its
 * accumulators go through shared memory to one of the epilogue warps, which take tiles
 * in turn, reduce over the MMA warps, and run the epilogue, so that MMA warps never
 * wait for global memory. The assignment of columns to lanes is free as long as both
 * operands agree: it uses vectors of 16 bytes, so no ldmatrix is needed. A tile of a
 * gated product has 8 rows of the gate and the matching 8 of `up`; one of qkv has 8
 * dims of a head's lower half and the 8 of its upper half that rotate with them: one
 * lane gets both.
 *
 * An MMA warp needs only the activations of its own columns and keeps them in registers
 * for a whole op, leaving shared memory to weights. Deeper products are cut into
 * split-K slices, each done by its own blocks; the last slice of a tile to arrive adds
 * all of them up, in order. Every block computes the norm of all rows itself: they are
 * few and lie in L2.
 *
 * Tiles are scheduled round-robin over all blocks (or those of a slice), starting where
 * the previous op stopped. A block with one tile less runs ahead by a tile, up to its
 * ring.
 */
#include "kernels/cuda/fused_decode/activations.cuh"
#include "kernels/cuda/fused_decode/all_reduce.cuh"
#include "kernels/cuda/quant/codes.cuh"

/* ---- products ---- */

/* A lane's codes of a weight row, as two vectors 4 vectors apart. Where rows lie 1 KB
 * apart, all in the same banks, odd rows are read in swapped order. */
__device__ __forceinline__ void load_row(uint4 &first, uint4 &second, uint32_t at, bool odd)
{
    uint4 a = load_shared16(at + (odd ? 64 : 0)), b = load_shared16(at + (odd ? 0 : 64));

    first = odd ? b : a;
    second = odd ? a : b;
}

/* 16 codes of two rows by 16 activations after to_e4m3_order. */
template <typename T>
__device__ __forceinline__ void mma_fp8(accumulator &f, const uint4 &low, const uint4 &high,
                                        const vector16 *x)
{
    mma_columns<T>(f, e4m3_values(low.x, low.y), e4m3_values(high.x, high.y), x[0]);
    mma_columns<T>(f, e4m3_values(low.z, low.w), e4m3_values(high.z, high.w), x[1]);
}

/* 32 codes of two rows by 32 activations in segment order; with those of the other
 * lanes they are a group of each row, g of the lower one. */
template <typename T>
__device__ __forceinline__ void mma_int4(accumulator &f, const uint4 &low, const uint4 &high,
                                         const int4_group &g, const int4_group &h,
                                         const vector16 *x)
{
    const uint32_t a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
    accumulator sum = {};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        mma_columns<T>(sum, g.values(a[i]), h.values(b[i]), x[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f.even[i] += (i < 2 ? g.scale : h.scale) * (sum.even[i] + sum.odd[i]);
    }
}

/* A lane's codes of a stage, of two weight rows. */
template <int F> struct stage_codes {
    using S = stage_shape<F>;
    uint4 low[2], high[2];
    uint32_t group[4]; /* of FUSED_INT4: words of the groups of low and high, in turns */

    __device__ __forceinline__ void load(uint32_t stage, int warp, int lane)
    {
        constexpr int HIGH = 8 * S::PITCH;
        bool odd = (lane & 4) && S::PITCH % 128 == 0;
        uint32_t row = stage + (lane >> 2) * S::PITCH +
                       (F == FUSED_INT4 ? warp / 2 * FUSED_TILE * S::PITCH : 0);
        uint32_t at = row + (F == FUSED_INT4 ? warp % 2 : warp) * 128 + (lane & 3) * 16;
        load_row(low[0], low[1], at, odd);
        load_row(high[0], high[1], at + HIGH, odd);
#pragma unroll
        for (int i = 0; i < 4 && F == FUSED_INT4; i++) {
            group[i] =
                load_word(row + FUSED_SEGMENT_K / 2 + warp % 2 * 8 + i / 2 * 4 + i % 2 * HIGH);
        }
    }

    template <typename T>
    __device__ __forceinline__ void multiply(accumulator &f, const vector16 *x, bool f16) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (F == FUSED_INT4) {
                mma_int4<T>(f, low[i], high[i], int4_group(group[2 * i], f16),
                            int4_group(group[2 * i + 1], f16), x + 4 * i);
            } else if constexpr (F == FUSED_FP8) {
                mma_fp8<T>(f, low[i], high[i], x + 2 * i);
            } else {
                mma_columns<T>(f, low[i], high[i], x[i]);
            }
        }
    }
};

/* One stage of a tile; x: this lane's activations of the stage's columns; mine: the
 * stage has this warp's columns; f16: scales are fp16. */
template <typename T, int F>
__device__ __forceinline__ void mma_stage(ring<F> &r, accumulator &f, const vector16 *x, bool mine,
                                          bool f16, int warp, int lane)
{
    stage_codes<F> codes;

    barrier_wait(r.full + r.index * 8, r.phase);
    if (mine) {
        codes.load(r.stage_address(), warp, lane);
    }
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(r.empty + r.index * 8);
    }
    r.next();
    if (mine) {
        codes.template multiply<T>(f, x, f16);
    }
}

/* A lane's coordinates in a tile of results: rows g and g + 8 of the weight tile,
 * activation rows 2 t and 2 t + 1. */
struct tile_coord {
    int out[2]; /* columns of the output */
    int row;    /* activation row; the next one too */
};

__device__ __forceinline__ tile_coord tile_coord_of(const fused_op &q, int tile, int lane)
{
    return {{weight_row(q, tile, lane >> 2), weight_row(q, tile, (lane >> 2) + 8)}, (lane & 3) * 2};
}

/* Epilogue operands of a tile, loaded before its accumulators are complete. */
template <typename T> struct epilogue_operands {
    T add[4];                 /* residual or running sum */
    float scale[2];           /* of the two columns of the output */
    float cosine[2], sine[2]; /* rotation of two activation rows */
    int slot[2];              /* cache slots of these rows; negative: none */
};

template <typename T>
__device__ __forceinline__ void load_epilogue_operands(epilogue_operands<T> &e, const fused_args &a,
                                                       const fused_op &q, int tile, int lane)
{
    const T *from = (const T *)(q.sum ? q.sum : q.residual);
    int64_t stride = q.sum ? q.sum_stride : q.residual_stride;
    tile_coord o = tile_coord_of(q, tile, lane);

#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (from && o.row + (i & 1) < a.rows) {
            e.add[i] = __ldcg(from + (o.row + (i & 1)) * stride + o.out[i >> 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        e.scale[i] = q.w_scale ? __ldg(q.w_scale + o.out[i]) : 1.0f;
    }
    if (!q.roped) {
        return;
    }
    const fused_rope &r = a.rope;
    int head = o.out[0] / r.kv.head_dim, dim = o.out[0] % r.kv.head_dim;
    bool rotates = r.cos_sin && head < r.n_heads + r.kv.n_kv_heads;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (o.row + i < a.rows) {
            const float *at = r.cos_sin + r.position[o.row + i] * r.cos_sin_stride;
            float factor = r.query_factors && head < r.n_heads ? at[r.kv.head_dim] : 1.0f;
            e.cosine[i] = rotates ? at[dim] * factor : 1.0f;
            e.sine[i] = rotates ? at[dim + r.kv.head_dim / 2] * factor : 0.0f;
            e.slot[i] = r.slot[o.row + i];
        }
    }
}

/* Rotates two dims of a head, half a head apart, of one activation row in place, and
 * writes k and v to the cache. */
template <typename T>
__device__ __forceinline__ void rope_pair(const fused_rope &r, T &low, T &high, int out,
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
    int kv_head = is_v ? head - r.kv.n_kv_heads : head, t = slot % r.kv.block_size;
    if (r.kv.dtype == T_F8) {
        uint8_t *codes = kv_head_of<uint8_t>(r.kv, r.layer, slot, kv_head, is_v);
        float over = is_v ? r.v_over : r.k_over;
        codes[kv_offset(r.kv, t, dim)] = e4m3_of(to_float(low) * over);
        codes[kv_offset(r.kv, t, dim + half)] = e4m3_of(to_float(high) * over);
        return;
    }
    T *cache = kv_head_of<T>(r.kv, r.layer, slot, kv_head, is_v);
    cache[kv_offset(r.kv, t, dim)] = low;
    cache[kv_offset(r.kv, t, dim + half)] = high;
}

__device__ __noinline__ float activated(float x, int act)
{
    return activate(x, act);
}

template <typename T>
__device__ __forceinline__ void run_epilogue(const fused_args &a, const fused_op &q, int tile,
                                             const float4 &all, const epilogue_operands<T> &e,
                                             pending_all_reduce<T> &pending, int lane)
{
    tile_coord o = tile_coord_of(q, tile, lane);
    const float sum[4] = {all.x, all.y, all.z, all.w};
    float result[4];
    T y[4];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = o.row + (i & 1), col = o.out[i >> 1];
        float v = sum[i] * e.scale[i >> 1];
        if (q.bias) {
            v += to_float(((const T *)q.bias)[col]);
        }
        if (q.act) {
            v = activated(v, q.act);
        }
        if (q.residual && row < a.rows) {
            v +=
                to_float(q.sum ? ((const T *)q.residual)[row * q.residual_stride + col] : e.add[i]);
        }
        result[i] = v;
        y[i] = from_float<T>(v);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (o.row + i < a.rows) {
            if (q.roped) {
                rope_pair<T>(a.rope, y[i], y[i + 2], o.out[0], e.cosine[i], e.sine[i], e.slot[i]);
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
                    from_float<T>(to_float(e.add[i]) + to_float(y[i]));
            }
        }
    }
    if (q.partial) {
        start_all_reduce<T>(pending, a, q, tile, y, e.add, lane);
    }
}

__device__ __forceinline__ float4 added(const float4 &x, const float4 &y)
{
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

/* Split-K reduction: stores this slice's sums of a tile. True if this was the last
 * slice to arrive: then `all` is the sum over all slices, in order. */
__device__ __forceinline__ bool reduce_slices(const fused_args &a, const fused_op &q, int slice,
                                              int tile, float4 &all, int lane)
{
    float4 *at = (float4 *)a.partials + tile * q.slices * 32 + lane;
    int before = 0;

    __stcg(at + slice * 32, all);
    random_delay();
    __syncwarp();
    if (lane == 0) {
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(a.arrived + tile)
                     : "memory");
    }
    __syncwarp(); /* the other lanes read behind lane 0's acquire; the shuffle orders nothing */
    if (__shfl_sync(0xffffffffu, before, 0) + 1 < q.slices) {
        return false;
    }
    all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < q.slices; i++) {
        all = added(all, __ldcg(at + i * 32));
    }
    if (lane == 0) {
        a.arrived[tile] = 0;
    }
    return true;
}

/* ---- MMA warps ---- */

/* Passes this warp's accumulator of a tile to the epilogue warp, through one of two
 * buffers; n_tile counts tiles. */
__device__ __forceinline__ void store_accumulator(const shared_storage &s, const accumulator &f,
                                                  int n_tile, int warp, int lane)
{
    int buffer = n_tile & 1;

    barrier_wait(s.accumulators_empty + buffer * 8, ~(n_tile >> 1) & 1);
    s.accumulators[(buffer * FUSED_MMA_WARPS + warp) * 32 + lane] = make_float4(
        f.even[0] + f.odd[0], f.even[1] + f.odd[1], f.even[2] + f.odd[2], f.even[3] + f.odd[3]);
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(s.accumulators_full + n_tile % EPILOGUE_WARPS * 8);
    }
}

template <typename T, int F>
__device__ __forceinline__ void mainloop(const fused_args &a, const fused_op &q, ring<F> &r,
                                         const shared_storage &s, int &n_tile)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    tile_schedule d = schedule_of(q);

    if (d.n == 0 && (q.n > 0 || d.first > 0)) { /* nothing to do, not even a norm alone */
        return;
    }
    using S = stage_shape<F>;
    k_range<F> columns(q, d.slice);
    activations<T, F> x;
    x.load_normed(q, s, d.slice, a.rows);
    if (q.h && d.first == 0) {
        x.store_norm(q, columns, a.rows);
    }
    if (F == FUSED_FP8) {
        x.to_e4m3_order();
    } else if (F == FUSED_INT4) {
        x.to_segment_order();
    }
    for (int i = 0; i < d.n; i++) {
        accumulator f = {};
        int at = columns.begin;
#pragma unroll
        for (int j = 0; j < S::SLICE_STAGES; j++) {
            if (j < columns.n) {
                mma_stage<T, F>(r, f, x.v + S::VECTORS * j, at + warp * S::WARP_K < columns.cols,
                                q.f16_scales, warp, lane);
                at = columns.after(at);
            }
        }
        store_accumulator(s, f, n_tile++, warp, lane);
    }
}

template <typename T, int F>
__device__ __forceinline__ void mma_warps(const fused_args &a, ring<F> &r, const shared_storage &s)
{
    int n_tile = 0;

    fetch_norm_weight(a.op[0], s);
    pdl_wait();
    for (int p = 0; p < a.n_ops; p++) {
        if (p + 1 == a.n_ops) {
            pdl_release();
        }
        if (p > 0) {
            op_sync(BARRIER_OP_OPEN);
        }
        mainloop<T, F>(a, a.op[p], r, s, n_tile);
        mma_warps_sync(); /* all warps have read this op's norm weight */
        op_arrive(BARRIER_OP_DONE);
        if (p + 1 < a.n_ops) {
            fetch_norm_weight(a.op[p + 1], s);
        }
    }
}

/* ---- epilogue warps ---- */

/* A tile's accumulators, summed over the MMA warps. */
__device__ __forceinline__ float4 load_accumulators(const shared_storage &s, int n_tile, int lane)
{
    int buffer = n_tile & 1;

    barrier_wait(s.accumulators_full + n_tile % EPILOGUE_WARPS * 8, n_tile / EPILOGUE_WARPS & 1);
    const float4 *sums = s.accumulators + buffer * FUSED_MMA_WARPS * 32 + lane;
    float4 all = sums[0];
#pragma unroll
    for (int w = 1; w < FUSED_MMA_WARPS; w++) {
        all = added(all, sums[w * 32]);
    }
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(s.accumulators_empty + buffer * 8);
    }
    return all;
}

template <typename T>
__device__ __forceinline__ void epilogue_warps(const fused_args &a, const shared_storage &s,
                                               int warp_index)
{
    int lane = threadIdx.x & 31, n_tile = 0;

    pdl_wait();
    /* all-reduces so far */
    uint32_t summed = a.p2p.n_ranks > 1 ? __ldcg(a.p2p.epoch + P2P_EPOCH_FUSED) : 0;
    for (int p = 0; p < a.n_ops; p++) {
        const fused_op &q = a.op[p];
        pending_all_reduce<T> pending = {.sum = summed};
        tile_schedule d = schedule_of(q);
        int32_t *counter = a.counter + p * FUSED_COUNTER_STRIDE;
        if (p + 1 == a.n_ops) {
            pdl_release();
        }
        if (p > 0) {
            blocks_wait(counter - FUSED_COUNTER_STRIDE, warp_index);
        }
        for (int i = 0; i < d.n; i++, n_tile++) {
            if (n_tile % EPILOGUE_WARPS != warp_index) {
                continue;
            }
            int tile = d.first + i * d.step;
            epilogue_operands<T> ahead;
            load_epilogue_operands<T>(ahead, a, q, tile, lane);
            float4 all = load_accumulators(s, n_tile, lane);
            if (q.slices == 1 || reduce_slices(a, q, d.slice, tile, all, lane)) {
                run_epilogue<T>(a, q, tile, all, ahead, pending, lane);
            }
        }
        if (q.partial) {
            finish_all_reduce<T>(pending, a, q, lane);
        }
        summed += q.partial;
        op_sync(BARRIER_OP_DONE);
        if (warp_index == 0 && p + 1 < a.n_ops) {
            blocks_arrive(counter);
        }
    }
    if (warp_index == 0) {
        blocks_leave(a, summed);
    }
}

/* ---- the kernel ---- */

template <typename T, int F>
__global__ void __launch_bounds__(MMA_THREADS + EPILOGUE_WARPS * 32 + LOAD_WARPS * 32, 1)
    fused_decode_kernel(const __grid_constant__ fused_args a)
{
    extern __shared__ __align__(128) char shared[];
    shared_storage s;

    s.norm_weight = shared + a.n_stages * stage_shape<F>::BYTES;
    s.accumulators = (float4 *)(s.norm_weight + a.norm_bytes);
    s.norm_sums = (float *)(s.accumulators + 2 * FUSED_MMA_WARPS * 32);
    ring<F> r;
    r.base = shared_address(shared);
    r.full = shared_address(s.norm_sums + 2 * FUSED_MMA_WARPS * FUSED_ROWS);
    r.empty = r.full + FUSED_MAX_STAGES * 8;
    s.accumulators_full = r.empty + FUSED_MAX_STAGES * 8;
    s.accumulators_empty = s.accumulators_full + EPILOGUE_WARPS * 8;
    r.n = a.n_stages;
    r.index = 0;
    r.phase = 0;
    if (threadIdx.x == 0) {
        barriers_init(r.full, a.n_stages, LOAD_WARPS);
    } else if (threadIdx.x == 32) {
        barriers_init(r.empty, a.n_stages, FUSED_MMA_WARPS);
    } else if (threadIdx.x == 64) {
        barriers_init(s.accumulators_full, EPILOGUE_WARPS, FUSED_MMA_WARPS);
        barriers_init(s.accumulators_empty, 2, 1);
    }
    __syncthreads();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (warp < FUSED_MMA_WARPS) {
        mma_warps<T, F>(a, r, s);
    } else if (warp < FUSED_MMA_WARPS + EPILOGUE_WARPS) {
        epilogue_warps<T>(a, s, warp - FUSED_MMA_WARPS);
    } else if ((threadIdx.x & 31) == 0) {
        load_weights<F>(a, r, warp - FUSED_MMA_WARPS - EPILOGUE_WARPS);
    }
}

extern "C" bool fused_prepare(int32_t max_shared_bytes)
{
    cudaFuncAttributes made = {};
    /* bulk copies */
    bool ok = cudaFuncGetAttributes(&made, fused_decode_kernel<__half, FUSED_16>) == cudaSuccess &&
              made.ptxVersion >= 90 &&
              allow_shared(fused_decode_kernel<__half, FUSED_16>, max_shared_bytes) &&
              allow_shared(fused_decode_kernel<__nv_bfloat16, FUSED_16>, max_shared_bytes) &&
              allow_shared(fused_decode_kernel<__nv_bfloat16, FUSED_FP8>, max_shared_bytes) &&
              allow_shared(fused_decode_kernel<__nv_bfloat16, FUSED_INT4>, max_shared_bytes);

    cudaGetLastError();
    return ok;
}

extern "C" void launch_fused_decode(const struct fused_args *a, int32_t n_blocks,
                                    cudaStream_t stream)
{
    auto kernel = a->format == FUSED_FP8    ? fused_decode_kernel<__nv_bfloat16, FUSED_FP8>
                  : a->format == FUSED_INT4 ? fused_decode_kernel<__nv_bfloat16, FUSED_INT4>
                  : a->type == T_F16        ? fused_decode_kernel<__half, FUSED_16>
                                            : fused_decode_kernel<__nv_bfloat16, FUSED_16>;

    launch(kernel, dim3(n_blocks), dim3(MMA_THREADS + EPILOGUE_WARPS * 32 + LOAD_WARPS * 32),
           a->shared_bytes, stream, *a);
}
