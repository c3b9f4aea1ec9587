/* Sampling on the device: for the same logits, the same tokens as kernels/cpu/sample.c,
 * which is the specification.
 *
 * A cluster of blocks takes one logits row, each block a slice of the vocabulary, and
 * processes the row's samples one after another (samples of one prompt share a row).
 * The slice is staged in shared memory where it fits, so that the row is read once.
 * Penalties, biases and masks are in sample_change.cuh, scans of a row in
 * sample_row.cuh, the draw in sample_draw.cuh. Every block of a cluster computes every
 * decision from the same sums, except what a short list decides: only the first block
 * does that.
 */
#include "kernels/cuda/sampling/sample_best.cuh"
#include "kernels/cuda/sampling/sample_change.cuh"
#include "kernels/cuda/sampling/sample_draw.cuh"

/* ---- a row's samples ---- */

/* Writes the n best tokens of the row with their logits minus lse: greatest first, the
 * smallest id first on a tie. Called after row_stats of the same view. False: there are
 * none; else the first block is still writing when the others return. */
__device__ bool write_best(const row_view &r, shared_state *sh, const stats &st, float lse, int n,
                           int *n_lists, int32_t *ret_token, float *ret_logprob)
{
    bool some = list_best(r, sh, st, n, n_lists);

    if (block_cluster().rank() == 0) {
        write_list(sh, some ? min(sh->n_list[*n_lists & 1], n) : 0, n, lse, ret_token, ret_logprob);
    }
    return some;
}

/* One cluster per logits row, all its samples. Dynamic shared memory: the slice if it
 * is staged, then `tile` counts. */
__global__ void __launch_bounds__(SAMPLE_THREADS, 2)
    sample_kernel(sample_args a, step_arrays s, bool staged, int tile)
{
    extern __shared__ __align__(128) uint32_t smem[];
    __shared__ shared_state state;
    shared_state *sh = &state;
    const block_cluster cluster;

    pdl_wait();
    pdl_release();
    const char *base = (const char *)s.header;
    const step_header *h = s.header;
    const cluster_row row = row_of(a, h);
    if (row.i0 == row.i1) {
        return;
    }
    const row_slice slice = slice_of(a, row.at, 0, smem, staged, tile, sh);
    const row_view &raw = slice.raw;
    bool speaker = cluster.rank() == 0 && threadIdx.x == 0, listed = false, other_peaks = false;
    int n_lists = 0;
    const stats st = row_stats(raw, sh);
    float lse = stats_max(st) + logf(st.sum);
    for (int i = row.i0; i < row.i1; i++) {
        if (i > row.i0) {
            cluster.sync();
        }
        listed = false;
        const row_params p = ((const row_params *)(base + h->off_sample))[i];
        int32_t *top_token = h->result_top_token + (int64_t)i * h->top_stride;
        float *top_logprob = h->result_top_logprob + (int64_t)i * h->top_stride;
        int n_best = p.kind == KIND_CANDIDATES ? p.n_candidates : max(p.n_logprobs, 0);
        int token = stats_token(st);
        float logprob = 0.0f;
        bool answered = false;
        if (p.kind == KIND_SCORE && token >= 0) {
            token = p.target < a.vocab ? p.target : -1;
        } else if (token >= 0 || p.kind == KIND_CANDIDATES) {
            stats now = st;
            bool changed = changes_row(s, p);
            row_view view = changed ? make_row(slice, s, p) : raw;
            if (changed || other_peaks) {
                cluster.sync();
                now = row_stats(view, sh);
                other_peaks = changed;
            }
            token = asked_token(st, now);
            if (p.kind == KIND_CANDIDATES) {
                float all = stats_max(now) + logf(now.sum);
                listed = write_best(view, sh, now, all, n_best, &n_lists, top_token, top_logprob);
                logprob = stats_max(now) - all;
                answered = true;
            } else if (token >= 0 && p.temperature != 0.0f && p.top_k != 1) {
                token = sample_token(view, sh, p, now, &n_lists, &listed);
            }
            if (changed && staged && (i + 1 < row.i1 || (!answered && n_best > 0))) {
                stage_again(slice);
            }
        }
        if (!answered) {
            if (n_best > 0) {
                cluster.sync();
                stats now = other_peaks ? row_stats(raw, sh) : st;
                other_peaks = false;
                if (token < 0) {
                    now.best = 0;
                }
                listed = write_best(raw, sh, now, lse, n_best, &n_lists, top_token, top_logprob);
            }
            if (speaker && token >= 0) {
                logprob = slice.logit[token] - lse;
            }
        }
        if (speaker) {
            s.sampled[i] = token;
            h->result_token[i] = token;
            h->result_logprob[i] = token >= 0 ? logprob : -INFINITY;
        }
    }
    /* blocks stay until the others have read their shared memory; after a list only the
     * first block's is read */
    if (!listed || cluster.rank() == 0) {
        cluster.sync();
    }
}

/* ---- greedy steps: several blocks per row, one pass ---- */

__global__ void __launch_bounds__(512, 2) greedy_kernel(sample_args a, step_arrays s)
{
    __shared__ stats warp_stats[16];

    pdl_wait();
    pdl_release();
    const step_header *h = s.header;
    int row = blockIdx.y;
    if (a.first + row >= h->n_logits) {
        return;
    }
    const row_view r = {a.logits + row * a.stride, 0, a.vocab};
    int step = 4 * gridDim.x * blockDim.x;
    stats st =
        scan_stats(r, scan_quads(r, 4 * (blockIdx.x * blockDim.x + threadIdx.x), step), step);
    st = stats_warp(st);
    if ((threadIdx.x & 31) == 0) {
        warp_stats[threadIdx.x >> 5] = st;
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    int lane = threadIdx.x, last = 0;
    st = stats_warp(lane < (int)(blockDim.x >> 5) ? warp_stats[lane] : stats_none());
    stats *all = (stats *)a.partial + row * gridDim.x;
    if (lane == 0) {
        all[blockIdx.x] = st;
        __threadfence();
        last = atomicAdd(&a.arrived[row], 1) == (int)gridDim.x - 1;
        __threadfence();
    }
    __syncwarp(); /* the other lanes read behind lane 0's fence; the shuffle orders nothing */
    if (!__shfl_sync(0xffffffffu, last, 0)) {
        return;
    }
    st = stats_none();
    if (lane < (int)gridDim.x) { /* there are at most GREEDY_BLOCKS */
        st.best = __ldcg(&all[lane].best);
        st.bad = __ldcg(&all[lane].bad);
        st.sum = __ldcg(&all[lane].sum);
    }
    st = stats_warp(st);
    if (lane != 0) {
        return;
    }
    a.arrived[row] = 0;
    const int32_t *group = (const int32_t *)((const char *)h + h->off_group);
    int token = stats_token(st);
    for (int i = group[a.first + row]; i < group[a.first + row + 1]; i++) {
        s.sampled[i] = token;
        h->result_token[i] = token;
        h->result_logprob[i] = token >= 0 ? -logf(st.sum) : -INFINITY;
    }
}

extern "C" int64_t sample_partial_bytes(int32_t max_rows)
{
    return (int64_t)max_rows * GREEDY_BLOCKS * sizeof(stats);
}

extern "C" bool sample_load(void)
{
    cudaFuncAttributes made;

    return cudaFuncGetAttributes(&made, sample_kernel) == cudaSuccess;
}

extern "C" void launch_sample(const struct sample_args *a, const struct step_arrays *s,
                              cudaStream_t stream)
{
    if (a->greedy && a->stride % 4 == 0 && (uintptr_t)a->logits % 16 == 0) {
        int each = 2 * cuda_multiprocessors() / a->rows; /* that fill the device */
        int blocks = each < 1 ? 1 : each > GREEDY_BLOCKS ? GREEDY_BLOCKS : each;
        launch(greedy_kernel, dim3(blocks, a->rows), dim3(512), 0, stream, *a, *s);
        return;
    }
    const sample_shape shape = sample_shape_of(a);
    launch_rows(sample_kernel, shape, a->rows, stream, *a, *s, shape.staged, shape.tile);
}
