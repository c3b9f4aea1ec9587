/* Looking at a row as a sample asks for it: steps 1 to 3 of the specification (kernels/cpu/sample.c), written into the row and
 * taken back afterwards; and how the kernels that do so are launched. */
#ifndef QUIRE_CUDA_SAMPLE_CHANGE_CUH
#define QUIRE_CUDA_SAMPLE_CHANGE_CUH

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/sample_row.cuh"

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
inline __device__ void changes_apply(const row_view &r, shared_state *sh, const row_params &p, const changes &c)
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

inline __device__ void changes_undo(const row_view &r, shared_state *sh, const row_params &p, const changes &c)
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

/* ---- the slice ---- */

/* Bring this block's slice into shared memory. */
inline __device__ void stage(row_view &r, float *room, shared_state *sh)
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
inline __device__ void fill_bitmap(const row_view &r, uint32_t *bitmap, int slice, const int32_t *allowed, int n)
{
    for (int k = threadIdx.x; k < slice / 32; k += blockDim.x)
        bitmap[k] = 0;
    __syncthreads();
    for (int k = threadIdx.x; k < n; k += blockDim.x)
        if (mine(r, allowed[k]))
            atomicOr(&bitmap[(allowed[k] - r.lo) >> 5], 1u << ((allowed[k] - r.lo) & 31));
    __syncthreads();
}

/* A cluster's row, of the step's rows from a.first on, and its samples [i0, i1): none past the
 * step's last row, nor past the rows of the launch, of whatever size its clusters are. */
struct cluster_row {
    int at, i0, i1;
};

inline __device__ cluster_row row_of(const sample_args &a, const step_header *h)
{
    int at = blockIdx.x / block_cluster().blocks(), row = a.first + at;
    const int32_t *group = (const int32_t *)((const char *)h + h->off_group);
    bool real = at < a.rows && row < h->n_logits;
    return real ? cluster_row{at, group[row], group[row + 1]} : cluster_row{at, 0, 0};
}

/* This block's slice of it, `n` ids wide, whose first logit in the device's memory is that of id `first`; in `room`, when it is staged, and
 * the bitmap behind. */
struct row_slice {
    row_view raw;
    float *logit; /* of id 0 in the device's memory: as they came, once changes are undone */
    uint32_t *bitmap;
    int n;
};

inline __device__ row_slice slice_of(const sample_args &a, int at, int first, uint32_t *room, bool staged, shared_state *sh)
{
    const block_cluster cluster;
    int n = ((a.vocab + (int)cluster.blocks() - 1) / (int)cluster.blocks() + 31) / 32 * 32;
    float *logit = a.logits + at * a.stride - first;
    row_slice s = {{logit, first + min(a.vocab, (int)cluster.rank() * n), 0, nullptr}, logit, room + (staged ? n : 0), n};
    s.raw.hi = min(first + a.vocab, s.raw.lo + n);
    if (staged)
        stage(s.raw, (float *)room, sh);
    if (threadIdx.x == 0)
        sh->n_list[0] = sh->n_list[1] = 0;
    return s;
}

/* The changes that sample i asks for. */
inline __device__ changes changes_of(const sample_args &a, const step_arrays &s, int i, const row_params &p)
{
    const step_header *h = s.header;
    const char *base = (const char *)h;
    float *saved = a.saved + ((const int32_t *)(base + h->off_saved))[i];
    changes c = {(const count_entry *)(base + h->off_count) + p.counts_first, (const bias_entry *)(base + h->off_bias) + p.bias_first,
                 saved, saved + p.n_counts, -1, false};
    if (p.prev_sample >= 0 && p.prev_sample < h->n_prev)
        c.prev = s.sampled_before[p.prev_sample];
    c.penalties = (p.repetition_penalty != 1.0f || p.frequency_penalty != 0.0f || p.presence_penalty != 0.0f) &&
                  (p.n_counts > 0 || c.prev >= 0);
    return c;
}

/* ---- launching ---- */

/* Dynamic shared memory that a block may have beside its state; with a slice, two of them find room on a multiprocessor. */
static const size_t STAGED_BYTES = 80 * 1024, BITMAP_BYTES = 128 * 1024;

/* Blocks a row, their dynamic shared memory, and whether slices are staged. */
struct sample_shape {
    int cluster;
    size_t bytes;
    bool staged;
};

/* False: the vocabulary is too wide for lists of allowed tokens. */
static bool sample_shape_of(const sample_args *a, sample_shape *ret)
{
    int cluster = !pdl_available() ? 1 : a->deterministic ? 4 : a->rows <= 33 ? 8 : a->rows <= 66 ? 4 : a->rows <= 132 ? 2 : 1;
    size_t slice = ((size_t)(a->vocab + cluster - 1) / cluster + 31) / 32 * 32, bitmap = a->any_allowed ? slice / 8 : 0;
    size_t room = cuda_shared_limit() - sizeof(shared_state);
    bool staged = cluster == MAX_CLUSTER && a->stride % 4 == 0 && (uintptr_t)a->logits % 16 == 0 &&
                  slice * 4 <= STAGED_BYTES && slice * 4 + bitmap <= room;
    size_t bytes = bitmap + (staged ? slice * 4 : 0);
    *ret = {cluster, bytes, staged};
    return bitmap <= BITMAP_BYTES && bytes <= room;
}

/* A cluster a row. */
template <typename... P, typename... A>
static void launch_rows(void (*kernel)(P...), const sample_shape &s, int rows, cudaStream_t stream, A... args)
{
    allow_shared(kernel, (int64_t)s.bytes);
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[2];
    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim.x = s.cluster;
    attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3(rows * s.cluster);
    c.blockDim = dim3(SAMPLE_THREADS);
    c.dynamicSmemBytes = s.bytes;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = pdl_available() ? 2 : 0;
    cudaLaunchKernelEx(&c, kernel, P(args)...);
}

#endif
