/* Products of experts without matrix instructions: a warp multiplies one row of an
 * expert's weight (gated: two, of gate and up) with the rows that chose the expert,
 * four at a time. Weights are read straight into registers, several accesses ahead.
 * Each row's sum is in one order, whatever the other rows.
 */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/experts/gate.cuh"

namespace
{

enum { WARPS = 8, AT_ONCE = 4, AHEAD = 4 };

template <typename T, int VEC>
__device__ __forceinline__ float dot(const vec<T, VEC> &a, const vec<T, VEC> &b, float sum)
{
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        sum = fmaf(to_float(a.v[i]), to_float(b.v[i]), sum);
    }
    return sum;
}

/* sum[s][r] = w_s . x_r over k columns, for this lane. */
template <typename T, int VEC, int WEIGHTS>
__device__ __forceinline__ void multiply(float (&sum)[WEIGHTS][AT_ONCE],
                                         const T *const (&w)[WEIGHTS], const T *const (&x)[AT_ONCE],
                                         int n, int k, int lane)
{
    using V = vec<T, VEC>;

    for (int at = lane * VEC; at < k; at += 32 * VEC * AHEAD) {
        V v[WEIGHTS][AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
#pragma unroll
            for (int s = 0; s < WEIGHTS; s++) {
                int c = at + i * 32 * VEC;
                v[s][i] = *(const V *)(w[s] + (c < k ? c : at));
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int c = at + i * 32 * VEC;
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                if (r < n && c < k) {
                    V u = *(const V *)(x[r] + c);
#pragma unroll
                    for (int s = 0; s < WEIGHTS; s++) {
                        sum[s][r] = dot<T, VEC>(v[s][i], u, sum[s][r]);
                    }
                }
            }
        }
    }
}

/* The grid is [rows of w / WARPS, most active experts]. */
template <typename T, int VEC, bool GATED>
__global__ void __launch_bounds__(WARPS * 32)
    product_kernel(const expert_product a, const expert_lists l)
{
    constexpr int WEIGHTS = GATED ? 2 : 1;
    int lane = threadIdx.x & 31, column = blockIdx.x * WARPS + (threadIdx.x >> 5);

    pdl_wait();
    pdl_release();
    if ((int)blockIdx.y >= l.total[1] || column >= a.width) {
        return;
    }
    int e = l.active[blockIdx.y], n = l.count[e];
    const int32_t *list = l.list + (int64_t)e * l.cap;
    const T *w[WEIGHTS];
    float bias[WEIGHTS] = {};
#pragma unroll
    for (int s = 0; s < WEIGHTS; s++) {
        int64_t row = ((int64_t)e * WEIGHTS + s) * a.width + column;
        w[s] = (const T *)a.w + row * a.w_stride;
        bias[s] = a.bias ? to_float(((const T *)a.bias)[row]) : 0.0f;
    }
    for (int first = 0; first < n; first += AT_ONCE) {
        float sum[WEIGHTS][AT_ONCE] = {};
        const T *x[AT_ONCE];
        int pair[AT_ONCE];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            pair[r] = list[min(first + r, n - 1)];
            x[r] = (const T *)a.x + pair[r] / a.divide * a.x_stride;
        }
        multiply<T, VEC, WEIGHTS>(sum, w, x, n - first, a.k, lane);
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            if (r >= n - first) {
                break;
            }
            float v[2] = {};
#pragma unroll
            for (int s = 0; s < WEIGHTS; s++) {
                v[s] = warp_sum(sum[s][r]) + bias[s];
            }
            if (lane == 0) {
                ((T *)a.out)[pair[r] * a.out_stride + column] =
                    from_float<T>(GATED ? expert_gate(v[0], v[1], a.act, a.limit) : v[0]);
            }
        }
    }
}

template <typename T, int VEC>
void run(const expert_product &a, const expert_lists &l, int most, cudaStream_t stream)
{
    dim3 grid((unsigned)(a.width + WARPS - 1) / WARPS, (unsigned)most);

    launch(a.gated ? product_kernel<T, VEC, true> : product_kernel<T, VEC, false>, grid,
           dim3(WARPS * 32), 0, stream, a, l);
}

} // namespace

extern "C" void launch_expert_product(const struct expert_product *a, const struct expert_lists *l,
                                      int32_t rows, int32_t top, cudaStream_t stream)
{
    int most = rows * top < a->n ? rows * top : a->n;

    DISPATCH_TYPE(a->type, {
        constexpr int VEC = 16 / (int)sizeof(T);
        if (a->k % VEC == 0 && a->x_stride % VEC == 0 && a->w_stride % VEC == 0) {
            run<T, VEC>(*a, *l, most, stream);
        } else {
            run<T, 1>(*a, *l, most, stream);
        }
    });
}
