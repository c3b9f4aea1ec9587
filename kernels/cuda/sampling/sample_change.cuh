/* A row as changed for a sample: steps 1 to 3 of the specification
 * (kernels/cpu/sample.c); and the launch of kernels that scan rows.
 *
 * The raw row stays where it is. The changed row goes to shared memory where the slice
 * is staged there, else to device work space. Penalties count the tokens in the
 * sequence's blocks; each thread block walks all of them once per tile of its slice,
 * whose counts fit into shared memory. Counts are integers and one thread changes a
 * logit, so no result depends on the order of threads.
 */
#ifndef QUIRE_KERNELS_CUDA_SAMPLING_SAMPLE_CHANGE_CUH
#define QUIRE_KERNELS_CUDA_SAMPLING_SAMPLE_CHANGE_CUH

#include "kernels/cuda/gemm/bulk.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"

/* ---- the slice ---- */

/* This block's slice of a row. Pointers are offset so that they are indexed by token
 * id. */
struct row_slice {
    row_view raw;       /* the raw slice, staged or in device memory */
    const float *logit; /* raw logits in device memory */
    float *made;        /* changed logits: raw.l where staged, else work space */
    uint32_t *count;    /* [tile] occurrences of ids, in shared memory */
    int tile;           /* ids counted at a time */
    bool staged;        /* the slice lies in shared memory */
};

/* Copies the slice into shared memory. */
inline __device__ void stage(row_view &r, float *smem, shared_state *sh)
{
    uint32_t bar = shared_address(&sh->arrival), bytes = (uint32_t)(r.hi - r.lo + 3) / 4 * 16;

    if (bytes == 0) {
        return;
    }
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_fence();
        barrier_expect(bar, bytes);
        bulk_copy(shared_address(smem), r.l + r.lo, bytes, bar);
    }
    __syncthreads();
    barrier_wait(bar, 0);
    r.l = smem - r.lo;
}

/* Restores the staged slice after a sample has changed it. By all threads of the
 * block. */
inline __device__ void stage_again(const row_slice &s)
{
    __syncthreads();
    for (int t = s.raw.lo + (int)threadIdx.x; t < s.raw.hi; t += SAMPLE_THREADS) {
        s.made[t] = s.logit[t];
    }
    __syncthreads();
}

/* ---- steps 1 to 3 ---- */

__device__ __forceinline__ bool has_penalties(const step_arrays &s, const row_params &p)
{
    bool of_output = p.frequency_penalty != 0.0f || p.presence_penalty != 0.0f;

    return s.slot_token &&
           (p.repetition_penalty != 1.0f ? p.position > 0 : of_output && p.position > p.n_prompt);
}

/* Whether a sample changes the row. */
__device__ __forceinline__ bool changes_row(const step_arrays &s, const row_params &p)
{
    return p.n_bias > 0 || p.mask_first >= 0 || p.late_mask > 0 || has_penalties(s, p);
}

/* set by an occurrence in the prompt; added by one in the output */
enum { COUNT_PROMPT = 1, COUNT_OUTPUT = 2 };

/* Calls f(position, id) for the tokens of the sample's sequence before the one being
 * sampled, by all threads. */
template <typename F>
__device__ __forceinline__ void for_context(const step_arrays &s, const row_params &p, F f)
{
    const int32_t *table = s.table + (int64_t)p.row * s.table_width;
    const int size = s.block_size, end = min(p.position, s.table_width * size);

    for (int at = threadIdx.x; at < end; at += AHEAD * SAMPLE_THREADS) {
        int id[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            int i = at + j * SAMPLE_THREADS;
            id[j] = i < end ? s.slot_token[(int64_t)table[i / size] * size + i % size] : -1;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            f(at + j * SAMPLE_THREADS, id[j]);
        }
    }
}

/* Counts ids [from, to) in the sample's sequence. */
inline __device__ void count_tile(uint32_t *count, const step_arrays &s, const row_params &p,
                                  int from, int to)
{
    for (int k = threadIdx.x; k < to - from; k += SAMPLE_THREADS) {
        count[k] = 0;
    }
    __syncthreads();
    for_context(s, p, [&](int at, int id) {
        if (id < from || id >= to) {
            return;
        }
        if (at < p.n_prompt) {
            atomicOr(&count[id - from], COUNT_PROMPT);
        } else {
            atomicAdd(&count[id - from], COUNT_OUTPUT);
        }
    });
    __syncthreads();
}

__device__ __forceinline__ float penalised(float x, uint32_t count, const row_params &p)
{
    uint32_t n_output = count / COUNT_OUTPUT;

    if (count > 0 && p.repetition_penalty != 1.0f) {
        x = x > 0.0f ? __fdiv_rn(x, p.repetition_penalty) : __fmul_rn(x, p.repetition_penalty);
    }
    if (n_output > 0) {
        x = __fsub_rn(__fsub_rn(x, __fmul_rn(p.frequency_penalty, (float)n_output)),
                      p.presence_penalty);
    }
    return x;
}

/* Stores logits of ids t .. t + 3 that are below `end`; t as in quad_at. */
__device__ __forceinline__ void store_quad(float *l, int t, int end, const float *x)
{
    if (t + 4 <= end && (uintptr_t)(l + t) % 16 == 0) {
        *(float4 *)(l + t) = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (t + j < end) {
            l[t + j] = x[j];
        }
    }
}

/* Makes the sample's changed slice. A staged slice is changed in place; stage_again
 * undoes that. */
inline __device__ row_view make_row(const row_slice &slice, const step_arrays &s,
                                    const row_params &p)
{
    const char *base = (const char *)s.header;
    const uint32_t *mask = (const uint32_t *)(base + s.header->off_mask) + p.mask_first;
    const bias_entry *bias = (const bias_entry *)(base + s.header->off_bias) + p.bias_first;
    const uint32_t *late =
        p.late_mask > 0 ? s.late_mask + (int64_t)(p.late_mask - 1) * s.late_stride : NULL;
    const row_view r = slice.raw;
    const bool penalties = has_penalties(s, p),
               all = penalties || p.mask_first >= 0 || late || !slice.staged;

    for (int from = r.lo; from < r.hi && all; from += slice.tile) {
        int to = min(r.hi, from + slice.tile);
        if (penalties) {
            count_tile(slice.count, s, p, from, to);
        }
        for (int t = from + 4 * (int)threadIdx.x; t < to; t += 4 * SAMPLE_THREADS) {
            const float4 v = quad_at(r, t);
            float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int id = min(t + j, to - 1);
                if (penalties) {
                    x[j] = penalised(x[j], slice.count[id - from], p);
                }
                if (p.mask_first >= 0 && !(mask[id >> 5] >> (id & 31) & 1)) {
                    x[j] = -INFINITY;
                }
                if (late && !(late[id >> 5] >> (id & 31) & 1)) {
                    x[j] = -INFINITY;
                }
            }
            store_quad(slice.made, t, to, x);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < p.n_bias; i += SAMPLE_THREADS) {
        bias_entry e = bias[i];
        if (e.token >= r.lo && e.token < r.hi) {
            slice.made[e.token] += e.bias;
        }
    }
    __syncthreads();
    return {slice.made, r.lo, r.hi};
}

/* ---- a row ---- */

/* A cluster's row, counted from a.first, and its samples [i0, i1). There are none past
 * the step's last row or the launch's rows, whatever the cluster size. */
struct cluster_row {
    int at, i0, i1; /* see above */
};

inline __device__ cluster_row row_of(const sample_args &a, const step_header *h)
{
    int at = blockIdx.x / block_cluster().blocks(), row = a.first + at;
    const int32_t *group = (const int32_t *)((const char *)h + h->off_group);
    bool real = at < a.rows && row < h->n_logits;

    return real ? cluster_row{at, group[row], group[row + 1]} : cluster_row{at, 0, 0};
}

/* This block's slice of row `at`, whose first logit in memory is that of id `first`.
 * smem: space for the slice where it is staged, then for `tile` counts. */
inline __device__ row_slice slice_of(const sample_args &a, int at, int first, uint32_t *smem,
                                     bool staged, int tile, shared_state *sh)
{
    const block_cluster cluster;
    int n = ((a.vocab + (int)cluster.blocks() - 1) / (int)cluster.blocks() + 31) / 32 * 32;
    const float *logit = a.logits + at * a.stride - first;
    int lo = first + min(a.vocab, (int)cluster.rank() * n), hi = min(first + a.vocab, lo + n);
    row_slice s = {{logit, lo, hi},         logit, a.work + at * a.work_stride - first,
                   smem + (staged ? n : 0), tile,  staged};

    if (staged) {
        stage(s.raw, (float *)smem, sh);
        s.made = (float *)smem - lo;
    }
    if (threadIdx.x == 0) {
        sh->n_list[0] = sh->n_list[1] = 0;
    }
    return s;
}

/* ---- launching ---- */

/* Shared memory for a staged slice, at most; two blocks then fit on a
 * multiprocessor. */
static const size_t STAGED_BYTES = 80 * 1024;
enum { LEAST_COUNTS = 2048 };

/* Launch shape of a kernel that scans rows. */
struct sample_shape {
    int cluster;  /* blocks per row */
    size_t bytes; /* dynamic shared memory per block */
    bool staged;  /* slices lie in shared memory */
    int tile;     /* ids counted at a time */
};

/* Counts that fit into shared memory beside `bytes`, with two blocks per
 * multiprocessor. */
static int counts_beside(size_t bytes)
{
    enum { MOST_COUNTS = 20480, SYSTEM_BYTES = 1024 };
    static int half = 0;

    if (half == 0) {
        int device = 0, all = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
        half = all / 2 - SYSTEM_BYTES;
    }
    int smem = half < cuda_shared_limit() ? half : cuda_shared_limit();
    smem -= (int)(sizeof(shared_state) + 127) / 128 * 128 + (int)bytes;
    int n = smem / (int)sizeof(uint32_t) / 32 * 32;
    return n < LEAST_COUNTS ? LEAST_COUNTS : n > MOST_COUNTS ? MOST_COUNTS : n;
}

static sample_shape sample_shape_of(const sample_args *a)
{
    int cluster = !pdl_available()   ? 1
                  : a->deterministic ? 4
                  : a->rows <= 33    ? 8
                  : a->rows <= 66    ? 4
                  : a->rows <= 132   ? 2
                                     : 1;
    size_t slice = ((size_t)(a->vocab + cluster - 1) / cluster + 31) / 32 * 32;
    size_t smem = cuda_shared_limit() - sizeof(shared_state);
    bool staged = cluster == MAX_CLUSTER && a->stride % 4 == 0 && (uintptr_t)a->logits % 16 == 0 &&
                  slice * 4 <= STAGED_BYTES && slice * 4 + LEAST_COUNTS * sizeof(uint32_t) <= smem;
    size_t bytes = staged ? slice * 4 : 0;
    int tile = counts_beside(bytes);

    tile = (size_t)tile < slice ? tile : (int)slice;
    return {cluster, bytes + (size_t)tile * sizeof(uint32_t), staged, tile};
}

/* Launches one cluster per row. */
template <typename... P, typename... A>
static void launch_rows(void (*kernel)(P...), const sample_shape &s, int rows, cudaStream_t stream,
                        A... args)
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
