/* Rotary embedding of a step's queries and keys in place, with optional norms of q and
 * k per head, and the write of k and v to the cache.
 *
 * The wide kernel gives each lane the same few dims of one or more heads of a token: it
 * reads their cosines and sines once, and moves 16 bytes at a time. Shapes without that
 * alignment (heads of 56 or 20 dims, norms with a bias) take one warp per head.
 *
 * Positions and slots come from the prologue, which never releases dependents early, so
 * they may be read before the wait.
 */
#include <type_traits>

#include "kernels/cuda/attention/rope.h"
#include "kernels/cuda/common.cuh"

/* Mean and reciprocal deviation of one head, computed by its warp. */
template <typename T>
__device__ __forceinline__ void head_stats(const T *x, int d, const norm_args &n, float *mean,
                                           float *scale)
{
    int lane = threadIdx.x & 31;
    float sum = 0.0f, squares = 0.0f;

    for (int i = lane; i < d; i += 32) {
        float f = to_float(x[i]);
        sum += f;
        squares += f * f;
    }
    sum = warp_sum(sum);
    *mean = 0.0f;
    if (!n.layer_norm) {
        *scale = rsqrtf(warp_sum(squares) / d + n.eps);
        return;
    }
    *mean = sum / d;
    squares = 0.0f;
    for (int i = lane; i < d; i += 32) {
        float f = to_float(x[i]) - *mean;
        squares += f * f;
    }
    *scale = rsqrtf(warp_sum(squares) / d + n.eps);
}

template <typename T>
__device__ __forceinline__ float head_normed(float x, int i, const norm_args &n, float mean,
                                             float scale)
{
    if (!n.weight) {
        return x;
    }
    x = (x - mean) * scale * (load_any(n.weight, n.weight_type, i) + n.weight_offset);
    if (n.bias) {
        x += load_any(n.bias, n.weight_type, i);
    }
    return rounded<T>(x);
}

/* Copied field by field: a reference to one of two parameters would put both on the
 * stack. */
__device__ __forceinline__ norm_args norm_of(const rope_args &r, bool q)
{
    norm_args n;

    n.weight = q ? r.q_norm.weight : r.k_norm.weight;
    n.bias = q ? r.q_norm.bias : r.k_norm.bias;
    n.weight_type = q ? r.q_norm.weight_type : r.k_norm.weight_type;
    n.layer_norm = q ? r.q_norm.layer_norm : r.k_norm.layer_norm;
    n.eps = q ? r.q_norm.eps : r.k_norm.eps;
    n.weight_offset = q ? r.q_norm.weight_offset : r.k_norm.weight_offset;
    return n;
}

enum { AHEAD = 4 };

/* Writes a head, as the warp has left it in x, to a cache of 8 bits. */
template <typename T>
__device__ __forceinline__ void store_narrow(const T *x, const kv_view &kv, const rope_args &r,
                                             int slot, int kv_head, bool is_v)
{
    int lane = threadIdx.x & 31, t = slot % kv.block_size;
    uint8_t *head = kv_head_of<uint8_t>(kv, r.layer, slot, kv_head, is_v);
    float over = is_v ? r.v_over : r.k_over, most = 0.0f;

    __syncwarp();
    if (kv.dtype == T_I8) {
        float sum = 0.0f; /* NaN unless all are finite */
        for (int i = lane; i < kv.head_dim; i += 32) {
            most = fmaxf(most, fabsf(to_float(x[i])));
            sum += to_float(x[i]) * 0.0f;
        }
        sum = warp_sum(sum);
        float2 scales = int8_scales(sum == 0.0f ? warp_max(most) : __uint_as_float(0x7fffffffu));
        over = scales.y;
        if (lane == 0) {
            ((float *)(head + kv.scale_offset))[t] = scales.x;
        }
    }
    for (int i = lane; i < kv.head_dim; i += 32) {
        float y = to_float(x[i]) * over;
        head[kv_offset(kv, t, i)] = kv.dtype == T_I8 ? int8_of(y) : e4m3_of(y);
    }
}

/* The factor of a token's queries, whose row of the table is cs. */
__device__ __forceinline__ float query_factor(const rope_args &r, const float *cs)
{
    return r.query_factors ? cs[r.rot_dim] : 1.0f;
}

/* Rotates a head in place, by its warp. */
template <typename T>
__device__ __forceinline__ void rotate_head(T *x, const rope_args &r, const float *cs, int half)
{
    for (int i = threadIdx.x & 31; i < half; i += 32) {
        int a = r.interleaved ? 2 * i : i, b = r.interleaved ? 2 * i + 1 : i + half;
        float xa = to_float(x[a]), xb = to_float(x[b]);
        x[a] = from_float<T>(xa * cs[i] - xb * cs[half + i]);
        x[b] = from_float<T>(xb * cs[i] + xa * cs[half + i]);
    }
    __syncwarp();
}

/* One warp per (token, head): q and k heads are normed and rotated; k and v are
 * stored. */
template <typename T>
__global__ void rope_kv_kernel(T *qkv, int64_t stride, rope_args r, bool norm_last, kv_view kv,
                               const int32_t *position, const int32_t *slot)
{
    pdl_release();
    pdl_wait();
    int lane = threadIdx.x & 31, head = blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int token = blockIdx.x, d = kv.head_dim;
    if (head >= r.n_heads + 2 * kv.n_kv_heads) {
        return;
    }
    T *x = qkv + token * stride + (int64_t)head * d;
    bool is_q = head < r.n_heads, is_v = head >= r.n_heads + kv.n_kv_heads;
    int s = is_q ? -1 : slot[token];
    T *cache = nullptr;
    int t = 0;
    if (s >= 0) {
        int kv_head = is_v ? head - r.n_heads - kv.n_kv_heads : head - r.n_heads;
        t = s % kv.block_size;
        cache = kv_narrow(kv) ? nullptr : kv_head_of<T>(kv, r.layer, s, kv_head, is_v);
    }
    /* loads first, AHEAD at a time: the stores below might alias, so the compiler
     * cannot hoist them */
    if (is_v && r.v_eps > 0) {
        float squares = 0.0f;
        for (int i = lane; i < d; i += 32) {
            squares += to_float(x[i]) * to_float(x[i]);
        }
        float factor = rsqrtf(warp_sum(squares) / d + r.v_eps);
        for (int i = lane; i < d; i += 32) {
            x[i] = from_float<T>(to_float(x[i]) * factor);
        }
    }
    if (is_v) {
        for (int i0 = lane; cache && i0 < d; i0 += 32 * AHEAD) {
            T v[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                v[j] = i0 + 32 * j < d ? x[i0 + 32 * j] : from_float<T>(0.0f);
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                if (i0 + 32 * j < d) {
                    cache[kv_offset(kv, t, i0 + 32 * j)] = v[j];
                }
            }
        }
        if (s >= 0 && kv_narrow(kv)) {
            store_narrow(x, kv, r, s, head - r.n_heads - kv.n_kv_heads, true);
        }
        return;
    }
    const norm_args n = norm_of(r, is_q);
    float mean = 0.0f, scale = 1.0f;
    int rot = r.cos_sin ? r.rot_dim : 0, half = rot / 2;
    const float *cs = r.cos_sin ? r.cos_sin + position[token] * r.cos_sin_stride : nullptr;
    float factor = is_q ? query_factor(r, cs) : 1.0f;
    if (norm_last && n.weight) {
        rotate_head(x, r, cs, half);
        rot = half = 0; /* the rest is the norm */
    }
    if (n.weight) {
        head_stats(x, d, n, &mean, &scale);
    }
    __syncwarp();
    for (int i0 = lane; i0 < half; i0 += 32 * AHEAD) {
        float xa[AHEAD], xb[AHEAD], c[AHEAD], sn[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            int i = i0 + 32 * j;
            if (i < half) {
                xa[j] = to_float(x[r.interleaved ? 2 * i : i]);
                xb[j] = to_float(x[r.interleaved ? 2 * i + 1 : i + half]);
                c[j] = cs[i];
                sn[j] = cs[half + i];
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            int i = i0 + 32 * j, a = r.interleaved ? 2 * i : i,
                b = r.interleaved ? 2 * i + 1 : i + half;
            if (i >= half) {
                break;
            }
            float na = head_normed<T>(xa[j], a, n, mean, scale),
                  nb = head_normed<T>(xb[j], b, n, mean, scale);
            T ya = from_float<T>((na * c[j] - nb * sn[j]) * factor),
              yb = from_float<T>((nb * c[j] + na * sn[j]) * factor);
            x[a] = ya;
            x[b] = yb;
            if (cache) {
                cache[kv_offset(kv, t, a)] = ya;
                cache[kv_offset(kv, t, b)] = yb;
            }
        }
    }
    for (int i = rot + lane; i < d; i += 32) {
        T y = from_float<T>(head_normed<T>(to_float(x[i]), i, n, mean, scale) * factor);
        x[i] = y;
        if (cache) {
            cache[kv_offset(kv, t, i)] = y;
        }
    }
    if (s >= 0 && kv_narrow(kv)) {
        store_narrow(x, kv, r, s, head - r.n_heads, false);
    }
}

enum { WIDE_THREADS = 128, WIDE_ROWS = 512 };

template <typename T> constexpr int WIDTH = 16 / sizeof(T);
template <typename T> using wide = vec<T, WIDTH<T>>;

/* The dims of a head that a lane holds: WIDTH from `low` and WIDTH from `high`. These
 * lie in the two halves of the rotated dims, or of the others, so that neighbouring
 * lanes read neighbouring memory; with interleaved pairs they are 2 WIDTH dims in a
 * row. */
struct lane_dims {
    int low, high;
    bool rotates;
};

__device__ __forceinline__ lane_dims dims_of(const rope_args &r, int head_dim, int lane, int width)
{
    int rot = r.cos_sin ? r.rot_dim : 0, at = lane * width;

    if (2 * at >= rot) {
        at += rot / 2;
        return {at, at + (head_dim - rot) / 2, false};
    }
    return r.interleaved ? lane_dims{2 * at, 2 * at + width, true}
                         : lane_dims{at, at + rot / 2, true};
}

template <int N> __device__ __forceinline__ void load_floats(float (&x)[N], const float *from)
{
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        *(float4 *)(x + j) = *(const float4 *)(from + j);
    }
}

/* Loads WIDTH weights from dim i on. */
template <typename T, int N = WIDTH<T>>
__device__ __forceinline__ void load_weights(float (&w)[N], const norm_args &n, int i)
{
    if (n.weight_type == T_F32) {
        load_floats(w, (const float *)n.weight + i);
    } else {
        wide<T> v = *(const wide<T> *)((const T *)n.weight + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            w[j] = to_float(v.v[j]);
        }
    }
}

/* Sum over the lanes of a head, a power of two. */
__device__ __forceinline__ float lanes_sum(float x, int lanes)
{
    for (int o = lanes >> 1; o > 0; o >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* RMS norm of a head over its lanes. mine: this head is normed; other heads of the warp
 * only take part in the shuffles. */
template <typename T, int N>
__device__ __forceinline__ void norm_head(float (&a)[N], float (&b)[N], const norm_args &n,
                                          const lane_dims &at, int head_dim, bool mine)
{
    float squares = 0.0f;

#pragma unroll
    for (int j = 0; j < N; j++) {
        squares += a[j] * a[j] + b[j] * b[j];
    }
    float scale = rsqrtf(lanes_sum(squares, blockDim.x) / head_dim + n.eps);
    if (!mine) {
        return;
    }
    float wa[N], wb[N];
    load_weights<T>(wa, n, at.low);
    load_weights<T>(wb, n, at.high);
#pragma unroll
    for (int j = 0; j < N; j++) {
        a[j] = rounded<T>(a[j] * scale * (wa[j] + n.weight_offset));
        b[j] = rounded<T>(b[j] * scale * (wb[j] + n.weight_offset));
    }
}

__device__ __forceinline__ void rotate_pair(float &a, float &b, float cosine, float sine)
{
    float x = a * cosine - b * sine;

    b = b * cosine + a * sine;
    a = x;
}

/* Greatest magnitude over the lanes of a head, a power of two; NaN unless all are
 * finite. */
template <typename T>
__device__ __forceinline__ float lanes_most(const wide<T> &low, const wide<T> &high, int lanes)
{
    float most = 0.0f, sum = 0.0f;

#pragma unroll
    for (int j = 0; j < WIDTH<T>; j++) {
        float a = to_float(low.v[j]), b = to_float(high.v[j]);
        most = fmaxf(most, fmaxf(fabsf(a), fabsf(b)));
        sum += a * 0.0f + b * 0.0f;
    }
    for (int o = lanes >> 1; o > 0; o >>= 1) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
    }
    return lanes_sum(sum, lanes) == 0.0f ? most : __uint_as_float(0x7fffffffu);
}

/* WIDTH codes of 8 bits. */
template <typename T>
__device__ __forceinline__ vec<uint8_t, WIDTH<T>> codes_of(const wide<T> &x, float over, bool e4m3)
{
    vec<uint8_t, WIDTH<T>> v;

#pragma unroll
    for (int j = 0; j < WIDTH<T>; j++) {
        float y = to_float(x.v[j]) * over;
        v.v[j] = e4m3 ? e4m3_of(y) : int8_of(y);
    }
    return v;
}

/* Writes a lane's dims of a head to a cache of 8 bits. `most`: of int8 codes, the
 * head's greatest magnitude. */
template <typename T>
__device__ __forceinline__ void
store_lane(const wide<T> &low, const wide<T> &high, const lane_dims &at, const kv_view &kv,
           const rope_args &r, int slot, int kv_head, bool is_v, float most)
{
    bool e4m3 = kv.dtype == T_F8;
    uint8_t *head = kv_head_of<uint8_t>(kv, r.layer, slot, kv_head, is_v);
    float2 scales = int8_scales(most);
    float over = !e4m3 ? scales.y : is_v ? r.v_over : r.k_over;
    int t = slot % kv.block_size;

    *(vec<uint8_t, WIDTH<T>> *)(head + kv_offset(kv, t, at.low)) = codes_of<T>(low, over, e4m3);
    *(vec<uint8_t, WIDTH<T>> *)(head + kv_offset(kv, t, at.high)) = codes_of<T>(high, over, e4m3);
    if (!e4m3 && threadIdx.x == 0) {
        ((float *)(head + kv.scale_offset))[t] = scales.x;
    }
}

template <int N>
__device__ __forceinline__ void rotate_lane(float (&a)[N], float (&b)[N], const float (&cosine)[N],
                                            const float (&sine)[N], bool interleaved)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (!interleaved) {
            rotate_pair(a[j], b[j], cosine[j], sine[j]);
        } else if (j < N / 2) {
            rotate_pair(a[2 * j], a[2 * j + 1], cosine[j], sine[j]);
        } else {
            rotate_pair(b[2 * j - N], b[2 * j - N + 1], cosine[j], sine[j]);
        }
    }
}

/* As they would lie in memory. */
template <typename T, int N>
__device__ __forceinline__ void round_lane(float (&a)[N], float (&b)[N])
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        a[j] = rounded<T>(a[j]);
        b[j] = rounded<T>(b[j]);
    }
}

/* None, or where those of q and k stand: before the rotation or behind it. */
enum head_norms { NORMS_NONE, NORMS_FIRST, NORMS_LAST };

/* Grid (token, share of the heads), block (lanes of a head, heads at once). NORMS: q
 * and k both have one, and the lanes are a power of two. Parallelism comes from many
 * blocks: more heads per thread cost more registers than they gain. */
template <typename T, head_norms NORMS>
__global__ void __launch_bounds__(WIDE_THREADS)
    rope_kv_wide_kernel(T *qkv, int64_t stride, rope_args r, kv_view kv, const int32_t *position,
                        const int32_t *slot)
{
    constexpr int V = WIDTH<T>;

    pdl_release();
    int token = blockIdx.x, s = __ldcg(slot + token);
    int first_k = r.n_heads, first_v = first_k + kv.n_kv_heads, end = first_v + kv.n_kv_heads;
    int first = (NORMS || r.cos_sin ? 0 : first_k) + blockIdx.y * blockDim.y;
    lane_dims at = dims_of(r, kv.head_dim, threadIdx.x, V);
    float cosine[V], sine[V], factor = 1.0f;
    if (at.rotates || r.query_factors) {
        const float *cs = r.cos_sin + __ldcg(position + token) * r.cos_sin_stride;
        factor = query_factor(r, cs);
        if (at.rotates) {
            load_floats(cosine, cs + threadIdx.x * V);
            load_floats(sine, cs + threadIdx.x * V + r.rot_dim / 2);
        }
    }
    pdl_wait();
    /* a whole warp stays in the loop: norms and int8 scales shuffle over its lanes */
    for (; first < end; first += gridDim.y * blockDim.y) {
        int head = first + threadIdx.y;
        bool is_v = head >= first_v;
        T *x = qkv + token * stride + (int64_t)head * kv.head_dim;
        wide<T> low = {}, high = {};
        if (head < end) {
            low = *(const wide<T> *)(x + at.low);
            high = *(const wide<T> *)(x + at.high);
        }
        bool scaled = r.query_factors && head < first_k;
        if (NORMS || scaled || (at.rotates && !is_v)) {
            float a[V], b[V];
#pragma unroll
            for (int j = 0; j < V; j++) {
                a[j] = to_float(low.v[j]);
                b[j] = to_float(high.v[j]);
            }
            if (NORMS == NORMS_FIRST) {
                norm_head<T>(a, b, norm_of(r, head < first_k), at, kv.head_dim, !is_v);
            }
            if (at.rotates && !is_v) {
                rotate_lane(a, b, cosine, sine, r.interleaved);
            }
            if (NORMS == NORMS_LAST) {
                round_lane<T>(a, b);
                norm_head<T>(a, b, norm_of(r, head < first_k), at, kv.head_dim, !is_v);
            }
            float by = scaled ? factor : 1.0f;
#pragma unroll
            for (int j = 0; j < V; j++) {
                low.v[j] = from_float<T>(a[j] * by);
                high.v[j] = from_float<T>(b[j] * by);
            }
            if (!is_v) {
                *(wide<T> *)(x + at.low) = low;
                *(wide<T> *)(x + at.high) = high;
            }
        }
        float most = kv.dtype == T_I8 ? lanes_most<T>(low, high, blockDim.x) : 0.0f;
        if (head >= first_k && head < end && s >= 0 && kv_narrow(kv)) {
            store_lane<T>(low, high, at, kv, r, s, head - (is_v ? first_v : first_k), is_v, most);
        } else if (head >= first_k && head < end && s >= 0) {
            T *cache = kv_head_of<T>(kv, r.layer, s, head - (is_v ? first_v : first_k), is_v);
            *(wide<T> *)(cache + kv_offset(kv, s % kv.block_size, at.low)) = low;
            *(wide<T> *)(cache + kv_offset(kv, s % kv.block_size, at.high)) = high;
        }
    }
}

/* ---- launching ---- */

static bool aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

template <typename T> static bool norm_fits(const norm_args &n)
{
    bool own_type = n.weight_type == (sizeof(T) == 4                   ? T_F32
                                      : std::is_same<T, __half>::value ? T_F16
                                                                       : T_BF16);

    return n.weight && !n.bias && !n.layer_norm && (own_type || n.weight_type == T_F32) &&
           aligned(n.weight);
}

template <typename T>
static bool wide_fits(const void *qkv, int64_t stride, const rope_args &r, const kv_view &kv)
{
    constexpr int V = WIDTH<T>;
    int lanes = kv.head_dim / (2 * V);
    bool rotates =
        !r.cos_sin || (r.rot_dim % (2 * V) == 0 && r.cos_sin_stride % 4 == 0 && aligned(r.cos_sin));
    bool shuffles = lanes <= 32 && (lanes & (lanes - 1)) == 0;
    bool norms = (!r.q_norm.weight && !r.k_norm.weight) ||
                 (norm_fits<T>(r.q_norm) && norm_fits<T>(r.k_norm) && shuffles);

    return r.v_eps == 0.0f && rotates && norms && (kv.dtype != T_I8 || shuffles) &&
           kv.head_dim % (2 * V) == 0 && lanes <= WIDE_THREADS && stride % V == 0 && aligned(qkv);
}

template <typename T>
static void launch_rope_kv_of(T *qkv, int64_t stride, const rope_args &r, bool norm_last,
                              const kv_view &kv, const int32_t *position, const int32_t *slot,
                              int32_t rows, cudaStream_t stream)
{
    int heads = r.n_heads + 2 * kv.n_kv_heads;

    if (!wide_fits<T>(qkv, stride, r, kv)) {
        launch(rope_kv_kernel<T>, dim3(rows, (heads + 7) / 8), dim3(256), 0, stream, qkv, stride, r,
               norm_last, kv, position, slot);
        return;
    }
    int lanes = kv.head_dim / (2 * WIDTH<T>), together = WIDE_THREADS / lanes;
    int y_blocks =
        /* with few rows each head gets threads of its own */
        rows < WIDE_ROWS ? (heads + together - 1) / together : 1;
    launch(!r.q_norm.weight ? rope_kv_wide_kernel<T, NORMS_NONE>
           : norm_last      ? rope_kv_wide_kernel<T, NORMS_LAST>
                            : rope_kv_wide_kernel<T, NORMS_FIRST>,
           dim3(rows, y_blocks), dim3(lanes, together), 0, stream, qkv, stride, r, kv, position,
           slot);
}

extern "C" void launch_rope_kv(void *qkv, int64_t stride, const struct rope_args *r,
                               const struct kv_view *kv, const int32_t *position,
                               const int32_t *slot, int32_t rows, cudaStream_t stream)
{
    DISPATCH_TYPE(
        r->type, launch_rope_kv_of((T *)qkv, stride, *r, false, *kv, position, slot, rows, stream));
}

extern "C" void launch_rope_kv_late(void *qkv, int64_t stride, const struct rope_args *r,
                                    const struct kv_view *kv, const int32_t *position,
                                    const int32_t *slot, int32_t rows, cudaStream_t stream)
{
    DISPATCH_TYPE(r->type,
                  launch_rope_kv_of((T *)qkv, stride, *r, true, *kv, position, slot, rows, stream));
}
