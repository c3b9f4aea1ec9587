/* The key/value cache and the host pool behind it.
 *
 * The host pool is ordinary memory from the start and becomes pinned slice by slice in the background, so that being
 * ready does not wait for it; a swap through a part that is not pinned yet is merely slower.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cuda/cuda.h"

#define PIN_BYTES ((size_t)256 << 20)

/* Blocks of one pinned slice: about PIN_BYTES, and whole pages whatever a block's size (a multiple of 16 bytes). */
static int32_t slice_blocks(const struct cuda_backend *c)
{
    int64_t n = (int64_t)(PIN_BYTES / (size_t)kv_layout_block_bytes(&c->kv));
    return (int32_t)MAX(n / 256 * 256, 256);
}

static size_t slice_bytes(const struct cuda_backend *c)
{
    return (size_t)slice_blocks(c) * (size_t)kv_layout_block_bytes(&c->kv);
}

static void *pin_host_pool(void *arg)
{
    struct cuda_backend *c = arg;
    if (cudaSetDevice(c->config.device) != cudaSuccess) {
        return NULL;
    }
    for (size_t at = 0; at < c->kv_host_bytes && !c->pinner_stop; at += slice_bytes(c)) {
        if (cudaHostRegister(c->kv_host + at, MIN(slice_bytes(c), c->kv_host_bytes - at), cudaHostRegisterDefault) !=
            cudaSuccess) {
            cudaGetLastError(); /* stays pageable */
            return NULL;
        }
    }
    return NULL;
}

int cuda_kv_create(struct backend *b, const struct kv_layout *l, int32_t n_blocks, int32_t n_host_blocks, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    if (c->kv_data != NULL || l->block_size < 1 || l->head_dim < 1 || l->head_dim > 512 || n_blocks < 1 ||
        n_host_blocks < 0 || l->dtype == DTYPE_I32) {
        return err_set(e, ERR_INVALID, "cuda: a cache of %d blocks of %d tokens, heads of %d, is not possible",
                       n_blocks, l->block_size, l->head_dim);
    }
    size_t block_bytes = (size_t)kv_layout_block_bytes(l);
    if (block_bytes % 16 != 0) {
        return err_set(e, ERR_UNSUPPORTED, "cuda: blocks of %zu bytes: they must be a multiple of 16", block_bytes);
    }
    void *data = cuda_alloc(c, block_bytes * (size_t)n_blocks, "the key/value cache", e);
    if (data == NULL) {
        return ERR_NOMEM;
    }
    c->kv = *l;
    if (n_host_blocks > 0) {
        size_t bytes = block_bytes * (size_t)n_host_blocks;
        void *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (host == MAP_FAILED) {
            return err_set(e, ERR_NOMEM, "no room for the swap space of %zu MiB", bytes >> 20);
        }
        madvise(host, bytes, MADV_HUGEPAGE); /* a wish */
        c->kv_host = host;
        c->kv_host_bytes = bytes;
        c->pinner_running = pthread_create(&c->pinner, NULL, pin_host_pool, c) == 0;
    }
    c->n_blocks = n_blocks;
    c->n_host_blocks = n_host_blocks;
    c->kv_data = data;
    c->kv_view = (struct kv_view){.base = data,
                                  .block_stride = l->block_stride,
                                  .layer_stride = l->layer_stride,
                                  .kv_stride = l->kv_stride,
                                  .head_stride = l->head_stride,
                                  .block_size = l->block_size,
                                  .head_dim = l->head_dim,
                                  .n_kv_heads = l->n_kv_heads,
                                  .dtype = (int32_t)l->dtype,
                                  .swizzled = attn_fast(l->head_dim, l->block_size, (int)l->dtype)};
    cudaError_t rc = cudaMemsetAsync(data, 0, block_bytes * (size_t)n_blocks, c->stream);
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "the key/value cache");
}

void cuda_kv_release(struct cuda_backend *c)
{
    if (c->pinner_running) {
        c->pinner_stop = true;
        pthread_join(c->pinner, NULL);
        c->pinner_running = false;
    }
    if (c->kv_host != NULL) {
        for (size_t at = 0; at < c->kv_host_bytes; at += slice_bytes(c)) {
            cudaHostUnregister(c->kv_host + at);
        }
        cudaGetLastError(); /* slices that were never pinned */
        munmap(c->kv_host, c->kv_host_bytes);
        c->kv_host = NULL;
    }
}

/* Neighbouring blocks go as one copy, but never across two slices of pinned memory. */
void cuda_swap(struct cuda_backend *c, const struct block_copy *copy, int32_t n, bool out)
{
    size_t bytes = (size_t)kv_layout_block_bytes(&c->kv);
    for (int32_t i = 0; i < n;) {
        int32_t run = 1;
        while (i + run < n && copy[i + run].src == copy[i].src + run && copy[i + run].dst == copy[i].dst + run &&
               (out ? copy[i + run].dst : copy[i + run].src) % slice_blocks(c) != 0) {
            run++;
        }
        const char *from = (out ? c->kv_data : c->kv_host) + bytes * (size_t)copy[i].src;
        char *to = (out ? c->kv_host : c->kv_data) + bytes * (size_t)copy[i].dst;
        cuda_check(c,
                   cudaMemcpyAsync(to, from, bytes * (size_t)run, out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                                   c->stream),
                   "swapping");
        i += run;
    }
}
