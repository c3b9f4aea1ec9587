/* Sampling on the device: the same tokens as kernels/cpu/sample.c, which is the specification, for the same logits.
 *
 * A cluster of blocks takes one logits row, each block a slice of the vocabulary, and answers the row's samples one
 * after another (samples of one prompt share a row). The slice is brought into shared memory where it fits, so that the
 * row is read once however often it is looked through. Penalties and biases are written into it and taken back
 * afterwards. What a row is looked through for stands in sample_row.cuh, the draw in sample_draw.cuh. Every block of a
 * cluster computes every decision, from the same sums, but what a short list decides: that the first block does alone.
 */
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/sample_draw.cuh"

/* ---- steps 1 to 3 ---- */

__device__ __forceinline__ float penalised(float x, int n_output, bool seen, const row_params &p)
{
    if (seen && p.repetition_penalty != 1.0f)
        x = x > 0.0f ? __fdiv_rn(x, p.repetition_penalty) : __fmul_rn(x, p.repetition_penalty);
    if (n_output > 0)
        x = __fsub_rn(__fsub_rn(x, __fmul_rn(p.frequency_penalty, (float)n_output)), p.presence_penalty);
    return x;
}

__device__ __forceinline__ bool mine(const row_view &r, int t) { return t >= r.lo && t < r.hi; }

struct changes {
    const count_entry *count;
    const bias_entry *bias;
    float *saved_count, *saved_bias; /* the logits before */
    int prev;                        /* token of the step before that counts once more, or -1 */
    bool penalties;
};

/* Write penalties and biases into this block's slice, keeping what was there. */
__device__ void changes_apply(const row_view &r, shared_state *sh, const row_params &p, const changes &c)
{
    if (threadIdx.x == 0)
        sh->prev_seen = 0;
    __syncthreads();
    if (c.penalties) {
        for (int i = threadIdx.x; i < p.n_counts; i += blockDim.x) {
            count_entry e = c.count[i];
            if (!mine(r, e.token))
                continue;
            float x = r.l[e.token];
            c.saved_count[i] = x;
            int n = e.n_output + (e.token == c.prev);
            if (e.token == c.prev)
                sh->prev_seen = 1;
            r.l[e.token] = penalised(x, n, n > 0 || e.in_prompt, p);
        }
        __syncthreads();
        if (threadIdx.x == 0 && mine(r, c.prev) && !sh->prev_seen) {
            sh->prev_saved = r.l[c.prev];
            r.l[c.prev] = penalised(sh->prev_saved, 1, true, p);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < p.n_bias; i += blockDim.x)
        if (mine(r, c.bias[i].token))
            c.saved_bias[i] = r.l[c.bias[i].token];
    __syncthreads();
    for (int i = threadIdx.x; i < p.n_bias; i += blockDim.x)
        if (mine(r, c.bias[i].token))
            atomicAdd(&r.l[c.bias[i].token], c.bias[i].bias);
    __syncthreads();
}

__device__ void changes_undo(const row_view &r, shared_state *sh, const row_params &p, const changes &c)
{
    __syncthreads();
    for (int i = threadIdx.x; i < p.n_bias; i += blockDim.x)
        if (mine(r, c.bias[i].token))
            r.l[c.bias[i].token] = c.saved_bias[i];
    __syncthreads();
    if (c.penalties) {
        if (threadIdx.x == 0 && mine(r, c.prev) && !sh->prev_seen)
            r.l[c.prev] = sh->prev_saved;
        for (int i = threadIdx.x; i < p.n_counts; i += blockDim.x)
            if (mine(r, c.count[i].token))
                r.l[c.count[i].token] = c.saved_count[i];
    }
    __syncthreads();
}

/* ---- answers ---- */

/* Gather the n best of the row, smallest ids first at the edge, by histograms. */
__device__ void collect_best(const row_view &r, shared_state *sh, const stats &st, int n, int turn)
{
    uint32_t least_key, least_id = 0; /* of what is taken: key above, or equal with ~id from least_id on */
    selection s = select_key(
        r, sh, sample_order(st.least), (uint32_t)(st.best >> 32),
        [&](int, float v, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
            *key = sample_order(v);
            *weight = 1;
            return v > -INFINITY && *key >= from && *key <= to;
        },
        [&](unsigned long long total) { return total < (unsigned long long)n ? total : (unsigned long long)n; });
    least_key = s.lo;
    if (s.inside > s.goal) {
        selection tie = select_key(
            r, sh, 0x80000000u, 0xFFFFFFFFu,
            [&](int token, float v, uint32_t from, uint32_t to, uint32_t *key, unsigned long long *weight) {
                *key = ~(uint32_t)token;
                *weight = 1;
                return v > -INFINITY && sample_order(v) == s.lo && *key >= from && *key <= to;
            },
            [&](unsigned long long) { return s.goal; });
        least_id = tie.lo;
    }
    collect(r, sh, turn, [&](int t, float v, uint32_t *key) {
        *key = sample_order(v);
        return v > -INFINITY && (*key > least_key || (*key == least_key && ~(uint32_t)t >= least_id));
    });
}

/* The n best of the row with their logits minus lse: greatest first, the smallest id first on a tie. After row_stats of the
 * same view. False: there are none; else the first block is still at it when the others come back. */
__device__ bool write_best(const row_view &r, shared_state *sh, const stats &st, float lse, int n, int *turn,
                           int32_t *ret_token, float *ret_logprob)
{
    const block_cluster cluster;
    bool some = !st.bad && st.best != 0, fit = false;
    if (some && n <= FEW) {
        float least = peak_threshold(sh, n);
        fit = collect_few(r, sh, ++*turn, sh->peak[threadIdx.x] >= least, [&](int, float v, uint32_t *key) {
            *key = sample_order(v);
            return v >= least && v > -INFINITY;
        });
        if (!fit)
            cluster.sync();
    }
    if (some && !fit)
        collect_best(r, sh, st, min(n, (int)LIST), ++*turn);
    if (cluster.rank() != 0)
        return some;
    int found = some ? min(sh->n_list[*turn & 1], n) : 0;
    if (some)
        sort_list(sh, sh->n_list[*turn & 1]);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        ret_token[i] = i < found ? (int)~(uint32_t)sh->bucket[i] : -1;
        ret_logprob[i] = i < found ? key_float((uint32_t)(sh->bucket[i] >> 32)) - lse : -INFINITY;
    }
    return some;
}

/* Bring this block's slice into shared memory. */
__device__ void stage(row_view &r, float *room, shared_state *sh)
{
    uint32_t bar = shared_address(&sh->arrival), bytes = (uint32_t)(r.hi - r.lo + 3) / 4 * 16;
    if (bytes == 0)
        return;
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_fence();
        barrier_expect(bar, bytes);
        bulk_copy(shared_address(room), r.l + r.lo, bytes, bar);
    }
    __syncthreads();
    barrier_wait(bar, 0);
    r.l = room - r.lo;
}

/* The tokens of a sample's list that lie in this slice. */
__device__ void fill_bitmap(const row_view &r, uint32_t *bitmap, int slice, const int32_t *allowed, int n)
{
    for (int k = threadIdx.x; k < slice / 32; k += blockDim.x)
        bitmap[k] = 0;
    __syncthreads();
    for (int k = threadIdx.x; k < n; k += blockDim.x)
        if (mine(r, allowed[k]))
            atomicOr(&bitmap[(allowed[k] - r.lo) >> 5], 1u << ((allowed[k] - r.lo) & 31));
    __syncthreads();
}

/* One cluster a logits row, all its samples. Dynamic shared memory: the slice when it is staged, then the bitmap of allowed
 * tokens. */
__global__ void __launch_bounds__(SAMPLE_THREADS, 2) sample_kernel(sample_args a, step_arrays s, bool staged)
{
    extern __shared__ __align__(128) uint32_t room[];
    __shared__ shared_state state;
    shared_state *sh = &state;
    const block_cluster cluster;
    pdl_wait();
    pdl_release();
    const char *base = (const char *)s.header;
    const step_header *h = s.header;
    int row = blockIdx.x / cluster.blocks();
    if (a.first + row >= h->n_logits)
        return;
    const int32_t *group = (const int32_t *)(base + h->off_group);
    int i0 = group[a.first + row], i1 = group[a.first + row + 1];
    if (i0 == i1)
        return;
    int slice = ((a.vocab + (int)cluster.blocks() - 1) / (int)cluster.blocks() + 31) / 32 * 32;
    float *logits = a.logits + row * a.stride;
    row_view raw = {logits, min(a.vocab, (int)cluster.rank() * slice), 0, nullptr};
    raw.hi = min(a.vocab, raw.lo + slice);
    uint32_t *bitmap = room + (staged ? slice : 0);
    if (staged)
        stage(raw, (float *)room, sh);
    if (threadIdx.x == 0)
        sh->n_list[0] = sh->n_list[1] = 0;
    bool speaker = cluster.rank() == 0 && threadIdx.x == 0, listed = false, other_peaks = false;
    int turn = 0;
    const stats st = row_stats(raw, sh);
    float lse = stats_max(st) + logf(st.sum);
    for (int i = i0; i < i1; i++) {
        if (i > i0)
            cluster.sync();
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
            float *saved = a.saved + ((const int32_t *)(base + h->off_saved))[i];
            changes c = {(const count_entry *)(base + h->off_count) + p.counts_first,
                         (const bias_entry *)(base + h->off_bias) + p.bias_first, saved, saved + p.n_counts, -1, false};
            if (p.prev_sample >= 0 && p.prev_sample < h->n_prev)
                c.prev = s.sampled_before[p.prev_sample];
            c.penalties = (p.repetition_penalty != 1.0f || p.frequency_penalty != 0.0f || p.presence_penalty != 0.0f) &&
                          (p.n_counts > 0 || c.prev >= 0);
            row_view view = raw;
            stats now = st;
            bool changed = c.penalties || p.n_bias > 0;
            if (changed)
                changes_apply(raw, sh, p, c);
            if (p.n_allowed > 0) {
                fill_bitmap(raw, bitmap, slice, (const int32_t *)(base + h->off_allowed) + p.allowed_first, p.n_allowed);
                view.allowed = bitmap;
            }
            bool other_view = changed || p.n_allowed > 0;
            if (other_view || other_peaks) {
                cluster.sync();
                now = row_stats(view, sh);
                other_peaks = other_view;
            }
            token = stats_token(now);
            if (p.kind == KIND_CANDIDATES) {
                float all = stats_max(now) + logf(now.sum);
                listed = write_best(view, sh, now, all, n_best, &turn, top_token, top_logprob);
                logprob = stats_max(now) - all;
                answered = true;
            } else if (token >= 0 && p.temperature != 0.0f && p.top_k != 1) {
                token = draw(view, sh, p, now, &turn, &listed);
            }
            if (changed) {
                changes_undo(raw, sh, p, c);
                cluster.sync();
            }
        }
        if (!answered) {
            if (n_best > 0) {
                cluster.sync();
                stats now = other_peaks ? row_stats(raw, sh) : st;
                other_peaks = false;
                if (token < 0)
                    now.best = 0;
                listed = write_best(raw, sh, now, lse, n_best, &turn, top_token, top_logprob);
            }
            if (speaker && token >= 0)
                logprob = logits[token] - lse;
        }
        if (speaker) {
            s.sampled[i] = token;
            h->result_token[i] = token;
            h->result_logprob[i] = token >= 0 ? logprob : -INFINITY;
        }
    }
    /* shared memory stays until the others have read it; of those who made a list last only the first block's is read */
    if (!listed || cluster.rank() == 0)
        cluster.sync();
}

/* ---- every row greedy and nothing else asked: several blocks a row, one pass ---- */

__global__ void __launch_bounds__(512, 2) greedy_kernel(sample_args a, step_arrays s)
{
    __shared__ stats part[16];
    pdl_wait();
    pdl_release();
    const step_header *h = s.header;
    int row = blockIdx.y;
    if (a.first + row >= h->n_logits)
        return;
    const row_view r = {a.logits + row * a.stride, 0, a.vocab, nullptr};
    int step = 4 * gridDim.x * blockDim.x;
    stats st = scan_stats(r, scan_quads(r, 4 * (blockIdx.x * blockDim.x + threadIdx.x), step), step);
    st = stats_warp(st);
    if ((threadIdx.x & 31) == 0)
        part[threadIdx.x >> 5] = st;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    int lane = threadIdx.x, last = 0;
    st = stats_warp(lane < (int)(blockDim.x >> 5) ? part[lane] : stats_none());
    stats *all = (stats *)a.partial + row * gridDim.x;
    if (lane == 0) {
        all[blockIdx.x] = st;
        __threadfence();
        last = atomicAdd(&a.arrived[row], 1) == (int)gridDim.x - 1;
        __threadfence();
    }
    if (!__shfl_sync(0xffffffffu, last, 0))
        return;
    st = stats_none();
    if (lane < (int)gridDim.x) { /* at most GREEDY_BLOCKS */
        st.best = __ldcg(&all[lane].best);
        st.bad = __ldcg(&all[lane].bad);
        st.sum = __ldcg(&all[lane].sum);
    }
    st = stats_warp(st);
    if (lane != 0)
        return;
    a.arrived[row] = 0;
    const int32_t *group = (const int32_t *)((const char *)h + h->off_group);
    int drawn = stats_token(st);
    for (int i = group[a.first + row]; i < group[a.first + row + 1]; i++) {
        s.sampled[i] = drawn;
        h->result_token[i] = drawn;
        h->result_logprob[i] = drawn >= 0 ? -logf(st.sum) : -INFINITY;
    }
}

extern "C" int64_t sample_partial_bytes(int32_t max_rows) { return (int64_t)max_rows * GREEDY_BLOCKS * sizeof(stats); }

/* Dynamic shared memory that a block may have beside its state; with a slice, two of them find room on a multiprocessor. */
static const size_t STAGED_BYTES = 80 * 1024, BITMAP_BYTES = 128 * 1024;

extern "C" bool launch_sample(const struct sample_args *a, const struct step_arrays *s, cudaStream_t stream)
{
    if (a->greedy && a->stride % 4 == 0 && (uintptr_t)a->logits % 16 == 0) {
        int blocks = 264 / a->rows < 1 ? 1 : 264 / a->rows > GREEDY_BLOCKS ? GREEDY_BLOCKS : 264 / a->rows;
        launch(greedy_kernel, dim3(blocks, a->rows), dim3(512), 0, stream, *a, *s);
        return true;
    }
    int cluster = !pdl_available() ? 1 : a->deterministic ? 4 : a->rows <= 33 ? 8 : a->rows <= 66 ? 4 : a->rows <= 132 ? 2 : 1;
    size_t slice = ((size_t)(a->vocab + cluster - 1) / cluster + 31) / 32 * 32, bitmap = a->any_allowed ? slice / 8 : 0;
    bool staged = cluster == MAX_CLUSTER && a->stride % 4 == 0 && (uintptr_t)a->logits % 16 == 0 && slice * 4 <= STAGED_BYTES;
    size_t bytes = bitmap + (staged ? slice * 4 : 0);
    if (bytes > BITMAP_BYTES + (staged ? STAGED_BYTES : 0))
        return false;
    cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[2];
    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim.x = cluster;
    attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3(a->rows * cluster);
    c.blockDim = dim3(SAMPLE_THREADS);
    c.dynamicSmemBytes = bytes;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = pdl_available() ? 2 : 0;
    cudaLaunchKernelEx(&c, sample_kernel, *a, *s, staged);
    return true;
}
