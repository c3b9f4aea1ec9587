/* Sampling over ranks on peer devices, each of which has the logits of its shard of the
 * vocabulary.
 *
 * Greedy steps: each rank finds the best token of its shard, and the ranks compare
 * (p2p_tokens_kernel). Otherwise the rows are shared out: every rank writes its columns
 * of a row into the memory of the rank that samples it (p2p_rows_kernel), which then
 * samples the whole row as if it were alone, and the tokens go to all
 * (p2p_share_tokens_kernel). Results for the host are written to rank 0's memory before
 * the tokens are sent, so rank 0 passes them on once it has every token.
 *
 * Exchanges of tokens are numbered, the same on all ranks. A token's line carries the
 * number, and lies in two halves used alternately. Every exchange follows an all-reduce
 * or p2p_rows_kernel, in which all ranks take part; so before a half is written again
 * it has been read.
 */
#include "kernels/cuda/comm/p2p.cuh"

/* ---- rows to the ranks that sample them ---- */

enum { ROW_CHUNKS = 8 };

/* Copies one chunk of this rank's `cols` columns of a row. */
__device__ __forceinline__ void copy_chunk(float *to, const float *from, int cols)
{
    int chunk = (cols + ROW_CHUNKS - 1) / ROW_CHUNKS, lo, hi;

    chunk = (chunk + 3) / 4 * 4;
    lo = min(cols, (int)blockIdx.x * chunk), hi = min(cols, lo + chunk);
    if ((uintptr_t)to % 16 == 0 && (uintptr_t)from % 16 == 0) {
        for (int i = lo + 4 * (int)threadIdx.x; i + 4 <= hi; i += 4 * blockDim.x) {
            *(float4 *)(to + i) = *(const float4 *)(from + i);
        }
        lo += (hi - lo) / 4 * 4;
    }
    for (int i = lo + (int)threadIdx.x; i < hi; i += blockDim.x) {
        to[i] = from[i];
    }
}

/* Barrier of all ranks: all columns have arrived, here and at the peers. */
__device__ void rows_barrier(const p2p_args &p)
{
    uint32_t epoch = p.epoch[P2P_EPOCH_ROWS] + 1;

    for (int r = 0; r < p.n_ranks; r++) {
        if (r != p.rank) {
            random_delay();
            p2p_flag(p.inbox[r].rows_epoch + p.rank, epoch);
        }
    }
    for (int r = 0; r < p.n_ranks; r++) {
        if (r != p.rank) {
            for (int i = 1; (int32_t)(p2p_flagged(p.inbox[p.rank].rows_epoch + r) - epoch) < 0 &&
                            !stopped(p, i);) {
                i++;
            }
        }
    }
    p.epoch[P2P_EPOCH_ROWS] = epoch;
}

__global__ void __launch_bounds__(P2P_THREADS)
    p2p_rows_kernel(p2p_args p, p2p_rows out, const float *shard, int64_t stride, int32_t rows)
{
    pdl_release();
    pdl_wait();
    int rows_per_rank = (rows + p.n_ranks - 1) / p.n_ranks, first = p.rank * out.width;
    int row = blockIdx.y;
    copy_chunk(out.row[row / rows_per_rank] + (row % rows_per_rank) * out.stride + first,
               shard + row * stride, min(out.width, out.vocab - first));
    __syncthreads();
    if (threadIdx.x > 0) {
        return;
    }
    __threadfence_system();
    random_delay();
    if (atomicAdd(p.arrived, 1) < (int)(gridDim.x * gridDim.y) - 1) {
        return;
    }
    *p.arrived = 0;
    __threadfence_system();
    rows_barrier(p);
}

extern "C" void launch_p2p_rows(const struct p2p_args *p, const struct p2p_rows *out,
                                const float *shard, int64_t stride, int32_t rows,
                                cudaStream_t stream)
{
    launch(p2p_rows_kernel, dim3(ROW_CHUNKS, rows), dim3(P2P_THREADS), 0, stream, *p, *out, shard,
           stride, rows);
}

/* ---- tokens to all ranks ---- */

struct sampled_rows {
    const step_header *h;
    const int32_t *group; /* first sample of each row */
    int first, rows, rows_per_rank;

    /* Calls f(sample, its index in the exchange) for the samples of rank r's rows, by
     * all threads. */
    template <typename F> __device__ void of(int r, F f) const
    {
        for (int row = r * rows_per_rank + (int)threadIdx.x;
             row < min(rows, (r + 1) * rows_per_rank); row += blockDim.x) {
            for (int i = group[first + row]; i < group[first + row + 1]; i++) {
                f(i, i - group[first]);
            }
        }
    }
};

/* Copies the results from device memory to rank 0's host. */
__device__ void copy_results_to_host(const sampled_rows &d)
{
    const step_header *h = d.h;
    int from = d.group[d.first], to = d.group[d.first + d.rows];

    for (int i = from + (int)threadIdx.x; i < to; i += blockDim.x) {
        h->host_results.token[i] = __ldcg(h->result_token + i);
        h->host_results.logprob[i] = __ldcg(h->result_logprob + i);
    }
    for (int64_t k = (int64_t)from * h->top_stride + threadIdx.x; k < (int64_t)to * h->top_stride;
         k += blockDim.x) {
        h->host_results.top_token[k] = __ldcg(h->result_top_token + k);
        h->host_results.top_logprob[k] = __ldcg(h->result_top_logprob + k);
    }
}

__global__ void __launch_bounds__(P2P_THREADS)
    p2p_share_tokens_kernel(p2p_args p, step_arrays s, int32_t first_row, int32_t rows)
{
    pdl_wait();
    pdl_release();
    const step_header *h = s.header;
    uint32_t epoch = p.epoch[P2P_EPOCH_TOKENS] + 1;
    int64_t half = (int64_t)(epoch & 1) * p.n_ranks;
    sampled_rows d = {h, (const int32_t *)((const char *)h + h->off_group), first_row,
                      min(rows, h->n_logits - first_row), (rows + p.n_ranks - 1) / p.n_ranks};
    /* this rank's results become visible before its tokens */
    __threadfence_system();
    random_delay();
    d.of(p.rank, [&](int i, int at) {
        for (int r = 0; r < p.n_ranks; r++) {
            if (r != p.rank) {
                p2p_store((uint4 *)(p.inbox[r].token + (half + p.rank) * P2P_MAX_TOKENS + at),
                          make_uint4(s.sampled[i], epoch, 0, epoch));
            }
        }
    });
    for (int r = 0; r < p.n_ranks; r++) {
        if (r == p.rank) {
            continue;
        }
        random_delay();
        d.of(r, [&](int i, int at) {
            const uint4 *from =
                (const uint4 *)(p.inbox[p.rank].token + (half + r) * P2P_MAX_TOKENS + at);
            uint4 got = p2p_load(from);
            for (int k = 1; (got.y != epoch || got.w != epoch) && !stopped(p, k); k++) {
                got = p2p_load(from);
            }
            s.sampled[i] = (int32_t)got.x;
        });
    }
    __threadfence_system();
    __syncthreads();
    if (p.rank == 0) {
        copy_results_to_host(d);
    }
    if (threadIdx.x == 0) {
        p.epoch[P2P_EPOCH_TOKENS] = epoch;
    }
}

extern "C" bool p2p_sample_load(void)
{
    cudaFuncAttributes made;

    return cudaFuncGetAttributes(&made, p2p_share_tokens_kernel) == cudaSuccess;
}

extern "C" void launch_p2p_share_tokens(const struct p2p_args *p, const struct step_arrays *s,
                                        int32_t first_row, int32_t rows, cudaStream_t stream)
{
    launch(p2p_share_tokens_kernel, dim3(1), dim3(P2P_THREADS), 0, stream, *p, *s, first_row, rows);
}

/* ---- greedy: the best of all shards ---- */

/* A shard's candidate for a sample: the id of its greatest logit, the logit, and the
 * logarithm of the shard's summed exponentials. */
struct candidate {
    int32_t token;
    float logit, lse;
};

/* Two 16-byte stores, each with the exchange's number beside its data, so they may
 * arrive in any order. */
__device__ __forceinline__ void send_candidate(p2p_token *to, candidate c, uint32_t epoch)
{
    p2p_store((uint4 *)to, make_uint4(c.token, epoch, __float_as_uint(c.logit), epoch));
    p2p_store((uint4 *)to + 1, make_uint4(__float_as_uint(c.lse), epoch, 0, epoch));
}

__device__ __forceinline__ candidate receive_candidate(const p2p_args &p, const p2p_token *from,
                                                       uint32_t epoch)
{
    uint4 a = p2p_load((const uint4 *)from), b = p2p_load((const uint4 *)from + 1);

    for (int i = 1;
         (a.y != epoch || a.w != epoch || b.y != epoch || b.w != epoch) && !stopped(p, i); i++) {
        a = p2p_load((const uint4 *)from);
        b = p2p_load((const uint4 *)from + 1);
    }
    return {(int32_t)a.x, __uint_as_float(a.z), __uint_as_float(b.x)};
}

/* The better of two; of equal ones a's, whose ids are lower. A negative token: the
 * logits held no usable number. */
__device__ __forceinline__ candidate merge(candidate a, candidate b)
{
    if (a.token < 0 || b.token < 0) {
        return {-1, 0.0f, 0.0f};
    }
    float top = fmaxf(a.lse, b.lse);
    float lse = top > -INFINITY ? top + logf(expf(a.lse - top) + expf(b.lse - top)) : top;
    return b.logit > a.logit ? candidate{b.token, b.logit, lse} : candidate{a.token, a.logit, lse};
}

__global__ void __launch_bounds__(P2P_THREADS)
    p2p_tokens_kernel(p2p_args p, step_arrays s, const float *shard, int64_t stride, int32_t first,
                      int32_t first_row, int32_t rows)
{
    pdl_wait();
    pdl_release();
    const step_header *h = s.header;
    const int32_t *group = (const int32_t *)((const char *)h + h->off_group);
    uint32_t epoch = p.epoch[P2P_EPOCH_TOKENS] + 1;
    int64_t half = (int64_t)(epoch & 1) * p.n_ranks;
    rows = min(rows, h->n_logits - first_row);
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        int i = group[first_row + row], end = group[first_row + row + 1];
        if (i == end) {
            continue;
        }
        candidate mine = {s.sampled[i], 0.0f, 0.0f};
        if (mine.token >= 0) {
            mine.logit = shard[row * stride + mine.token];
            mine.lse = mine.logit - *(volatile float *)&h->result_logprob[i];
            mine.token += first;
        }
        for (int r = 0; r < p.n_ranks; r++) {
            if (r != p.rank) {
                random_delay();
                send_candidate(p.inbox[r].token + (half + p.rank) * P2P_MAX_TOKENS + row, mine,
                               epoch);
            }
        }
        candidate best;
        random_delay();
        for (int r = 0; r < p.n_ranks; r++) {
            candidate c =
                r == p.rank
                    ? mine
                    : receive_candidate(
                          p, p.inbox[p.rank].token + (half + r) * P2P_MAX_TOKENS + row, epoch);
            best = r == 0 ? c : merge(best, c);
        }
        for (; i < end; i++) {
            s.sampled[i] = best.token;
            h->result_token[i] = best.token;
            h->result_logprob[i] = best.token >= 0 ? best.logit - best.lse : -INFINITY;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        p.epoch[P2P_EPOCH_TOKENS] = epoch;
    }
}

extern "C" void launch_p2p_tokens(const struct p2p_args *p, const struct step_arrays *s,
                                  const float *shard, int64_t stride, int32_t first,
                                  int32_t first_row, int32_t rows, cudaStream_t stream)
{
    launch(p2p_tokens_kernel, dim3(1), dim3(P2P_THREADS), 0, stream, *p, *s, shard, stride, first,
           first_row, rows);
}
