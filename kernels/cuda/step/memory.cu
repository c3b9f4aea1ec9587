/* The prologue of a step, block copies, and conversion of weights. */
#include <stdlib.h>

#include "kernels/cuda/common.cuh"

struct table_change {
    int32_t group, row, index, count, first; /* struct table_update of batch.h */
};

/* Spreads the packed inputs of a step to the arrays at fixed addresses, applies the
 * block-table updates, and resolves tokens that the previous step sampled. Rows past
 * n_tokens of a captured graph become padding. */
__global__ void prologue_kernel(step_arrays a)
{
    pdl_wait(); /* no early release: dependents may read the arrays before they wait */
    const char *base = (const char *)a.header;
    const step_header h = *a.header;
    int i = blockIdx.x * blockDim.x + threadIdx.x, n_threads = gridDim.x * blockDim.x;
    const int32_t *token = (const int32_t *)(base + h.off_token),
                  *src = (const int32_t *)(base + h.off_token_src);
    const int32_t *position = (const int32_t *)(base + h.off_position),
                  *slot = (const int32_t *)(base + h.off_slot);
    for (int t = i; t < h.n_padded; t += n_threads) {
        bool real = t < h.n_tokens;
        int from = real ? src[t] : -1;
        int id = !real       ? 0
                 : from >= 0 ? max(a.sampled[from], 0)
                             : token[t],
            at = real ? slot[t] : -1;
        a.token[t] = id;
        a.position[t] = real ? position[t] : 0;
        a.slot[t] = at;
        for (int k = 1; k < h.n_kv_groups; k++) {
            a.slot[k * a.slot_rows + t] =
                real ? ((const int32_t *)(base + h.off_group_slot))[t * (h.n_kv_groups - 1) + k - 1]
                     : -1;
        }
        if (at >= 0 && a.slot_token) {
            a.slot_token[at] = id;
        }
    }
    int pad_seqs = h.n_padded > h.n_tokens ? h.n_seqs + h.n_padded - h.n_tokens : h.n_seqs;
    for (int s = i; s < pad_seqs; s += n_threads) {
        bool real = s < h.n_seqs;
        a.q_start[s] =
            real ? ((const int32_t *)(base + h.off_q_start))[s] : h.n_tokens + s - h.n_seqs;
        a.kv_len[s] = real ? ((const int32_t *)(base + h.off_kv_len))[s] : 0;
        a.row[s] = real ? ((const int32_t *)(base + h.off_row))[s] : 0;
        if (s == pad_seqs - 1) {
            a.q_start[s + 1] = h.n_padded;
        }
    }
    for (int l = i; l < max(h.n_logits, h.n_padded); l += n_threads) {
        a.logits_token[l] = l < h.n_logits ? ((const int32_t *)(base + h.off_logits_token))[l] : 0;
    }
    for (int w = 0; w < h.n_windows; w++) {
        for (int s = i; s <= h.n_decode; s += n_threads) {
            a.chunk_start[w * (a.max_seqs + 1) + s] =
                ((const int32_t *)(base + h.off_chunk_start))[w * (h.n_decode + 1) + s];
        }
    }
    for (int k = i; k < h.n_shared; k += n_threads) {
        a.shared[k] = ((const shared_run *)(base + h.off_shared))[k];
    }
    for (int k = i; k <= h.n_shared; k += n_threads) {
        a.shared_start[k] = ((const int32_t *)(base + h.off_shared_start))[k];
    }
    for (int k = i; k < h.n_decode; k += n_threads) {
        a.skip[k] = ((const int32_t *)(base + h.off_skip))[k];
    }
    const table_change *u = (const table_change *)(base + h.off_update);
    const int32_t *block = (const int32_t *)(base + h.off_table_block);
    int lane = threadIdx.x & 31;
    for (int c = i >> 5; c < h.n_table_update; c += n_threads >> 5) {
        for (int k = lane; k < u[c].count; k += 32) {
            a.table[((int64_t)u[c].group * a.max_seqs + u[c].row) * a.table_width + u[c].index +
                    k] = block[u[c].first + k];
        }
    }
}

/* Copies the token ids of one block, by all threads of a thread block. */
__device__ __forceinline__ void copy_tokens(const step_arrays &a, int64_t from, int64_t to)
{
    for (int i = threadIdx.x; i < a.block_size; i += blockDim.x) {
        a.slot_token[to * a.block_size + i] = a.slot_token[from * a.block_size + i];
    }
}

__global__ void token_copy_kernel(step_arrays a, const int32_t *pair, int32_t src_first,
                                  int32_t dst_first)
{
    pdl_release();
    pdl_wait();
    copy_tokens(a, src_first + pair[2 * blockIdx.x], dst_first + pair[2 * blockIdx.x + 1]);
}

__global__ void block_copy_kernel(step_arrays a, char *cache, int64_t block_bytes,
                                  const int32_t *pair)
{
    pdl_release();
    pdl_wait();
    if (blockIdx.x == 0) {
        copy_tokens(a, pair[2 * blockIdx.y], pair[2 * blockIdx.y + 1]);
    }
    const uint4 *from = (const uint4 *)(cache + pair[2 * blockIdx.y] * block_bytes);
    uint4 *to = (uint4 *)(cache + pair[2 * blockIdx.y + 1] * block_bytes);
    int64_t n = block_bytes / 16;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        to[i] = from[i];
    }
}

__global__ void convert_kernel(void *dst, int dst_type, int64_t dst_stride, const void *src,
                               int src_type, int64_t src_stride, int32_t rows, int32_t cols,
                               bool transposed)
{
    int64_t n = (int64_t)rows * cols;

    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t r = i / cols, c = i % cols;
        float x = load_any(src, src_type, transposed ? c * src_stride + r : r * src_stride + c);
        store_any(dst, dst_type, r * dst_stride + c, x);
    }
}

__global__ void dummy_kernel(void *dst, int type, int64_t n, uint64_t seed)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = (uint64_t)i + seed * 0x9e3779b97f4a7c15ull; /* splitmix64 */
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        store_any(dst, type, i, ((float)(z >> 40) * (1.0f / 8388608.0f) - 1.0f) * 1e-3f);
    }
}

extern "C" int32_t cuda_code_version(void)
{
    static int known = -1;

    if (known < 0) {
        cudaFuncAttributes made = {};

        known = cudaFuncGetAttributes(&made, prologue_kernel) == cudaSuccess ? made.ptxVersion : 0;
        cudaGetLastError();
    }
    return known;
}

extern "C" int32_t cuda_shared_limit(void)
{
    static int known;

    if (!known) {
        const char *asked = getenv("QUIRE_CUDA_SMEM_LIMIT");
        constexpr auto what = cudaDevAttrMaxSharedMemoryPerBlockOptin;
        constexpr int least = 48 << 10; /* available on every device without opt-in */
        int device = 0, bytes = least, most = asked ? atoi(asked) : 0;

        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&bytes, what, device) != cudaSuccess) {
            cudaGetLastError();
        }
        known = most >= least && most < bytes ? most : bytes;
    }
    return known;
}

/* An attribute of the current device; 0: unknown. */
static int device_attribute(cudaDeviceAttr what)
{
    int device = 0, v = 0;

    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&v, what, device) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return v;
}

extern "C" int32_t cuda_multiprocessors(void)
{
    static int known;

    known = known ? known : device_attribute(cudaDevAttrMultiProcessorCount);
    return known;
}

extern "C" int32_t cuda_memory_gbs(void)
{
    int64_t khz = device_attribute(cudaDevAttrMemoryClockRate),
            bits = device_attribute(cudaDevAttrGlobalMemoryBusWidth);

    return (int32_t)(2 * khz * bits / 8 / 1000000); /* two transfers a cycle */
}

extern "C" void launch_prologue(const struct step_arrays *a, int32_t max_rows, cudaStream_t stream)
{
    int blocks = (max_rows + 255) / 256;

    launch(prologue_kernel,
           dim3(blocks < 1    ? 1
                : blocks > 64 ? 64
                              : blocks),
           dim3(256), 0, stream, *a);
}

extern "C" void launch_block_copy(const struct step_arrays *a, void *cache, int64_t block_bytes,
                                  const int32_t *pair, int32_t n, cudaStream_t stream)
{
    int64_t wide = (block_bytes / 16 + 1023) / 1024;

    for (int32_t first = 0; first < n; first += 65535) {
        int32_t count = n - first < 65535 ? n - first : 65535;
        launch(block_copy_kernel,
               dim3(wide < 1     ? 1
                    : wide > 128 ? 128
                                 : wide,
                    count),
               dim3(256), 0, stream, *a, (char *)cache, block_bytes, pair + 2 * first);
    }
}

extern "C" void launch_token_copy(const struct step_arrays *a, const int32_t *pair, int32_t n,
                                  int32_t src_first, int32_t dst_first, cudaStream_t stream)
{
    if (n > 0) {
        launch(token_copy_kernel, dim3(n), dim3(64), 0, stream, *a, pair, src_first, dst_first);
    }
}

extern "C" void launch_convert(void *dst, int dst_type, int64_t dst_stride, const void *src,
                               int src_type, int64_t src_stride, int32_t rows, int32_t cols,
                               bool transposed, cudaStream_t stream)
{
    int64_t n = ((int64_t)rows * cols + 255) / 256;
    int n_blocks = (int)(n < 1 ? 1 : n > 4096 ? 4096 : n);

    convert_kernel<<<n_blocks, 256, 0, stream>>>(dst, dst_type, dst_stride, src, src_type,
                                                 src_stride, rows, cols, transposed);
}

extern "C" void launch_dummy(void *dst, int type, int64_t n, uint64_t seed, cudaStream_t stream)
{
    dummy_kernel<<<2048, 256, 0, stream>>>(dst, type, n, seed);
}
