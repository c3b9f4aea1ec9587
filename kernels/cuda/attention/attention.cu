/* Attention for any head size, type and block size, one warp per (token, head). It
 * serves shapes that the tensor-core kernels do not take, and is what those are
 * compared with on the device. */
#include "kernels/cuda/common.cuh"

enum { PLAIN_WARPS = 4, PLAIN_MAX_PER_LANE = 16 }; /* head sizes up to 512 */

/* One head's keys and values, of any type. */
template <typename T> struct kv_reader {
    const kv_view &kv;
    int64_t base; /* elements from the cache's first to block 0's */

    /* Dim d of token t; `tile`: elements from block 0's. */
    __device__ float load(int64_t tile, int t, int d) const
    {
        int64_t at = base + tile + kv_offset(kv, t, d);

        return kv.dtype == T_F8   ? of_e4m3(((const uint8_t *)kv.base)[at])
               : kv.dtype == T_I8 ? (float)((const int8_t *)kv.base)[at]
                                  : to_float(((const T *)kv.base)[at]);
    }
    /* Of a token's codes. */
    __device__ float scale(int64_t tile, int t) const
    {
        const char *at = (const char *)kv.base + base + tile + kv.scale_offset;

        return kv.dtype == T_I8 ? ((const float *)at)[t] : 1.0f;
    }
};

template <typename T>
__global__ void __launch_bounds__(PLAIN_WARPS * 32)
    attn_plain_kernel(attn_args a, step_arrays s, int32_t first_seq, int32_t n_seqs,
                      int32_t first_token)
{
    extern __shared__ float shared_q[]; /* [PLAIN_WARPS][head_dim] */

    pdl_release();
    pdl_wait();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, d = a.kv.head_dim;
    int token = first_token + blockIdx.x, head = blockIdx.y * PLAIN_WARPS + warp;
    if (head >= a.n_heads) {
        return;
    }
    /* the last sequence that starts at or before the token */
    int lo = first_seq, hi = first_seq + n_seqs - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (s.q_start[mid] <= token) {
            lo = mid;
        } else {
            hi = mid - 1;
        }
    }
    /* the query's position in its sequence */
    int position = s.kv_len[lo] - (s.q_start[lo + 1] - token);
    int begin = a.chunk > 0                               ? position / a.chunk * a.chunk
                : a.window > 0 && position + 1 > a.window ? position + 1 - a.window
                                                          : 0;
    const T *q = (const T *)a.qkv + token * a.qkv_stride + (int64_t)head * d;
    T *out = (T *)a.out + token * a.out_stride + (int64_t)head * d;
    float *my_q = shared_q + warp * d;
    for (int i = lane; i < d; i += 32) {
        my_q[i] = to_float(q[i]);
    }
    __syncwarp();
    int kv_head = head / (a.n_heads / a.kv.n_kv_heads);
    const kv_reader<T> keys = {a.kv, a.layer * a.kv.layer_stride + kv_head * a.kv.head_stride};
    const int32_t *table = s.table + (int64_t)s.row[lo] * s.table_width;
    float best = -INFINITY, sum = 0.0f, acc[PLAIN_MAX_PER_LANE] = {};
    for (int first = begin; first <= position; first += 32) {
        int t = first + lane;
        float score = -INFINITY;
        int64_t block = 0;
        if (t <= position) {
            block = table[t / a.kv.block_size];
            int64_t k = block * a.kv.block_stride;
            int in_block = t % a.kv.block_size;
            float dot = 0.0f;
            for (int i = 0; i < d; i++) {
                dot += my_q[i] * keys.load(k, in_block, i);
            }
            score = dot * keys.scale(k, in_block) * a.k_scale * a.scale;
            if (a.softcap > 0.0f) {
                score = a.softcap * tanhf(score / a.softcap);
            }
        }
        float new_best = fmaxf(best, warp_max(score));
        float p = t <= position ? expf(score - new_best) : 0.0f, keep = expf(best - new_best);
        best = new_best;
        sum = sum * keep + warp_sum(p);
        for (int j = 0; j < PLAIN_MAX_PER_LANE; j++) {
            acc[j] *= keep;
        }
        int n = min(32, position - first + 1);
        for (int j = 0; j < n; j++) {
            float pj = __shfl_sync(0xffffffffu, p, j);
            int64_t bj = __shfl_sync(0xffffffffu, block, j);
            int64_t v = bj * a.kv.block_stride + a.kv.kv_stride;
            int in_block = (first + j) % a.kv.block_size;
            pj *= keys.scale(v, in_block);
#pragma unroll
            for (int i = 0; i < PLAIN_MAX_PER_LANE; i++) {
                if (i * 32 + lane < d) {
                    acc[i] += pj * keys.load(v, in_block, i * 32 + lane);
                }
            }
        }
    }
    sum += a.sinks ? expf(a.sinks[head] - best) : 0.0f;
#pragma unroll
    for (int i = 0; i < PLAIN_MAX_PER_LANE; i++) {
        if (i * 32 + lane < d) {
            out[i * 32 + lane] = from_float<T>(position >= 0 ? acc[i] / sum * a.v_scale : 0.0f);
        }
    }
}

extern "C" void launch_attn_plain(const struct attn_args *a, const struct step_arrays *s,
                                  int32_t first_seq, int32_t n_seqs, int32_t first_token,
                                  int32_t n_tokens, cudaStream_t stream)
{
    size_t shared = PLAIN_WARPS * a->kv.head_dim * sizeof(float);

    DISPATCH_TYPE(a->type, launch(attn_plain_kernel<T>,
                                  dim3(n_tokens, (a->n_heads + PLAIN_WARPS - 1) / PLAIN_WARPS),
                                  dim3(PLAIN_WARPS * 32), shared, stream, *a, *s, first_seq, n_seqs,
                                  first_token));
}
