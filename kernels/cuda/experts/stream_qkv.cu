/* Queries, keys and values of few rows in one launch, where heads are normed: norm,
 * product, norms of the heads, rotation, cache.
 *
 * A cluster of blocks has a head: each block a part of the depth, of all 128 dims. Sums
 * and squares of the rows meet in the shared memory of its first block, where a thread
 * has two dims half a head apart, for two rows, and finishes them. The factor of the
 * first norm multiplies the sums, so that no product waits for it.
 */
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/experts/stream_products.cuh"

namespace
{

using namespace expert_stream;

enum { PARTS = 3, HEAD = 128, TILES = HEAD / TILE, HALF = HEAD / 2 };

/* Where blocks of a cluster bring what they have, and the first one's work space. */
struct qkv_shared {
    float4 sums[2 * MULTIPLIERS];
    float4 part[PARTS][TILES][32];
    float squares[PARTS][WARPS][ROWS], head[TILES][ROWS];
    uint64_t full[32], empty[32];
};

/* The columns of a block: groups of 32 of the depth. */
struct depth_part {
    int first, n; /* columns */

    __device__ __forceinline__ depth_part(int k, int part)
    {
        int groups = k / GROUP;

        first = groups * part / PARTS * GROUP;
        n = groups * (part + 1) / PARTS * GROUP - first;
    }
};

/* A tile has 8 dims of the lower half of a head and the 8 that rotate with them. */
template <int B>
__device__ __forceinline__ void load_head(const expert_qkv &a, const ring<B> &r, int head,
                                          const depth_part &d, int warp)
{
    constexpr int MINE = TILE / LOADERS;
    loader<B> load(r, warp);
    int64_t stride = a.product.w_stride * (B == 16 ? 2 : 1); /* of codes it is in bytes */
    int row = head * HEAD + warp * MINE + (warp * MINE >= TILE / 2 ? HALF - TILE / 2 : 0);

    for (int t = 0; t < TILES; t++, row += TILE / 2) {
        load.tile((const char *)a.product.w + row * stride + d.first / 8 * B, stride, MINE,
                  d.n / 8 * B);
    }
}

/* What a thread finishes a head with: of dims i and i + HALF, rows 2 t and 2 t + 1. */
template <typename T> struct finish {
    float cosine[2], sine[2], low, high; /* low, high: the weights of the head's norm */
    int slot[2], dim, row;

    __device__ __forceinline__ finish(const expert_qkv &a, int head, int warp, int lane)
        : dim(warp * 8 + (lane >> 2)), row((lane & 3) * 2)
    {
        const norm_args &n = head < a.rope.n_heads ? a.rope.q_norm : a.rope.k_norm;

        low = load_any(n.weight, n.weight_type, dim) + n.weight_offset;
        high = load_any(n.weight, n.weight_type, dim + HALF) + n.weight_offset;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int at = min(row + i, a.rows - 1);
            const float *cs = a.rope.cos_sin + __ldcg(a.position + at) * a.rope.cos_sin_stride;
            cosine[i] = cs[dim];
            sine[i] = cs[HALF + dim];
            slot[i] = __ldcg(a.slot + at);
        }
    }
    /* The norm of a head and its rotation. square [TILES][ROWS]. By all threads of the
     * multiplying warps. */
    __device__ __forceinline__ void rotate(float (&v)[4], const norm_args &n,
                                           float (&square)[TILES][ROWS], int warp, int lane) const
    {
        float sum[2] = {v[0] * v[0] + v[2] * v[2], v[1] * v[1] + v[3] * v[3]};

#pragma unroll
        for (int o = 4; o < 32; o <<= 1) {
            sum[0] += __shfl_xor_sync(ROUTE_LANES, sum[0], o);
            sum[1] += __shfl_xor_sync(ROUTE_LANES, sum[1], o);
        }
        if (lane < 4) {
            square[warp][row] = sum[0];
            square[warp][row + 1] = sum[1];
        }
        multipliers_sync();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float all = 0.0f;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                all += square[t][row + i];
            }
            float scale = rsqrtf(all / HEAD + n.eps);
            float x = rounded<T>(v[i] * scale * low), y = rounded<T>(v[i + 2] * scale * high);
            v[i] = x * cosine[i] - y * sine[i];
            v[i + 2] = y * cosine[i] + x * sine[i];
        }
    }
    __device__ __forceinline__ void store(const expert_qkv &a, const float (&v)[4], int head) const
    {
        int kv_head = head - a.rope.n_heads;
        bool is_v = kv_head >= a.kv.n_kv_heads;

        kv_head -= is_v ? a.kv.n_kv_heads : 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + i >= a.rows) {
                break;
            }
            T x = from_float<T>(v[i]), y = from_float<T>(v[i + 2]);
            T *out = (T *)a.product.out + (row + i) * a.product.out_stride + head * HEAD + dim;
            out[0] = x;
            out[HALF] = y;
            if (kv_head >= 0 && slot[i] >= 0) {
                T *cache = kv_head_of<T>(a.kv, a.rope.layer, slot[i], kv_head, is_v);
                int t = slot[i] % a.kv.block_size;
                cache[kv_offset(a.kv, t, dim)] = x;
                cache[kv_offset(a.kv, t, dim + HALF)] = y;
            }
        }
    }
};

/* x times the first norm's weights. */
template <typename T>
__device__ __forceinline__ void weigh(activations<T, 1> &x, const vector16 (&weight)[SHARE],
                                      float offset)
{
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const T *u = (const T *)&x.v[0][j].v[i], *w = (const T *)&weight[j].v[i];
            x.v[0][j].v[i] = pack2<T>(to_float(u[0]) * (to_float(w[0]) + offset),
                                      to_float(u[1]) * (to_float(w[1]) + offset));
        }
    }
}

template <typename T, int B>
__device__ __forceinline__ void multiply_head(const expert_qkv &a, ring<B> &r, qkv_shared &s,
                                              const block_cluster &c, int head, const depth_part &d,
                                              int warp, int lane)
{
    const expert_product &p = a.product;
    qkv_shared &first = *c.of(&s, 0);
    int n_tile = 0, part = (int)c.rank();
    activations<T, 1> x, weight;

    weight.load(a.norm.weight, 0, ROWS, d.n, warp, lane, d.first);
    pdl_wait();
    pdl_release();
    x.load(p.x, p.x_stride, a.rows, d.n, warp, lane, d.first);
    x.squares(&s.squares[part][0][0], warp, lane);
    weigh<T>(x, weight.v[0], a.norm.weight_offset);
    x.template order<B>();
    for (int t = 0; t < TILES; t++) {
        int64_t row = head * HEAD + t * 8 + (lane >> 2);
        sums f = {};
        scales<B> scale;
        float v[4];
        scale.load(scale_rows(p, row, row + HALF), 0, d.n, warp, d.first);
        multiply_stage<T, B>(r, f, x.v[0], scale, d.n / GROUP, warp, lane);
        if (add_warps(v, f, s.sums, n_tile, warp, lane)) {
            first.part[part][t][lane] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
    if (part > 0 && lane < ROWS) {
        first.squares[part][warp][lane] = s.squares[part][warp][lane];
    }
}

/* By the multiplying warps of a cluster's first block, once all parts are there. */
template <typename T>
__device__ __forceinline__ void finish_head(const expert_qkv &a, qkv_shared &s, const finish<T> &f,
                                            int head, int warp, int lane)
{
    float v[4] = {}, square = 0.0f;

    for (int p = 0; p < PARTS; p++) {
        float4 u = s.part[p][warp][lane];
        v[0] += u.x;
        v[1] += u.y;
        v[2] += u.z;
        v[3] += u.w;
        for (int w = 0; w < WARPS; w++) {
            square += s.squares[p][w][lane % ROWS];
        }
    }
    float scale = rsqrtf(square / a.product.k + a.norm.eps); /* of row lane % ROWS */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float of = __shfl_sync(ROUTE_LANES, scale, f.row + i);
        v[i] = rounded<T>(v[i] * of);
        v[i + 2] = rounded<T>(v[i + 2] * of);
    }
    if (head < a.rope.n_heads + a.kv.n_kv_heads) {
        const norm_args &n = head < a.rope.n_heads ? a.rope.q_norm : a.rope.k_norm;
        f.rotate(v, n, s.head, warp, lane);
    }
    f.store(a, v, head);
}

template <typename T, int B>
__global__ void __launch_bounds__(THREADS, 1) qkv_kernel(const __grid_constant__ expert_qkv a)
{
    extern __shared__ __align__(128) char shared[];
    __shared__ qkv_shared s;
    int lane = threadIdx.x & 31, warp = __shfl_sync(ROUTE_LANES, threadIdx.x >> 5, 0);
    int head = blockIdx.x / PARTS;
    ring<B> r = {shared_address(shared), shared_address(s.full), shared_address(s.empty), 0, 0};
    block_cluster c;
    depth_part d(a.product.k, (int)c.rank());

    if (threadIdx.x == 0) {
        ring_init(r);
    }
    c.sync(); /* the first block's memory is there */
    if (warp >= WARPS) {
        if (lane == 0) {
            load_head<B>(a, r, head, d, warp - WARPS);
        }
        __syncwarp();
        c.sync();
        return;
    }
    finish<T> f(a, min(head, a.rope.n_heads + a.kv.n_kv_heads - 1), warp, lane);
    multiply_head<T, B>(a, r, s, c, head, d, warp, lane);
    c.sync();
    if (c.rank() == 0) {
        finish_head<T>(a, s, f, head, warp, lane);
    }
}

template <typename T, int B> bool run(const expert_qkv &a, int heads, cudaStream_t stream)
{
    constexpr int BYTES = stage_of<B>::COUNT * stage_of<B>::BYTES;
    static bool allowed = allow_shared(qkv_kernel<T, B>, BYTES);
    cudaLaunchAttribute attr[3];
    cudaLaunchConfig_t c = {};

    if (!allowed) {
        return false;
    }
    c.gridDim = dim3((unsigned)(heads * PARTS));
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = BYTES;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = cluster_attributes(attr, PARTS);
    return cudaLaunchKernelEx(&c, qkv_kernel<T, B>, a) == cudaSuccess;
}

/* An RMS norm with weights alone. */
bool plain_norm(const norm_args &n, int32_t type)
{
    return n.weight && !n.bias && !n.layer_norm && n.weight_type == type &&
           (uintptr_t)n.weight % 16 == 0;
}

} // namespace

extern "C" bool launch_expert_qkv(const struct expert_qkv *a, cudaStream_t stream)
{
    const struct expert_product *p = &a->product;
    int heads = a->rope.n_heads + 2 * a->kv.n_kv_heads;
    bool fits = a->rows <= EXPERT_STREAM_ROWS && expert_lists_stream(p) && !p->bias &&
                p->width == heads * HEAD && p->k <= PARTS * (STAGE_COLS - GROUP) &&
                a->kv.head_dim == HEAD && a->kv.dtype == p->type && a->rope.cos_sin &&
                a->rope.rot_dim == HEAD && !a->rope.interleaved && plain_norm(a->norm, p->type) &&
                plain_norm(a->rope.q_norm, p->type) && plain_norm(a->rope.k_norm, p->type);

    if (!fits) {
        return false;
    }
    if (p->w_scale) {
        return run<__nv_bfloat16, 8>(*a, heads, stream);
    }
    return p->type == T_F16 ? run<__half, 16>(*a, heads, stream)
                            : run<__nv_bfloat16, 16>(*a, heads, stream);
}
