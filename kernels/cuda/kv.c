/* The key/value cache and the host pool behind it.
 *
 * The host pool is ordinary memory from the start and becomes pinned slice by slice in the background, so that being
 * ready does not wait for it; a swap through a part that is not pinned yet is merely slower. The first slices are pinned at once: by
 * them the engine measures what swapping costs.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cuda/cuda.h"

#define PIN_BYTES ((int64_t)8 << 20)
#define PAGE_BYTES ((int64_t)4096)
/* The driver takes no calls while it pins: the start has it to itself for so long, and then for three quarters of the time. */
enum { START_US = 3000000, REST_PARTS = 3, FIRST_SLICES = 4 };

/* About PIN_BYTES, and whole pages whatever a block's size (a multiple of 16 bytes). */
int32_t cuda_kv_slice_blocks(const struct cuda_backend *c)
{
    int64_t bytes = kv_layout_block_bytes(&c->kv), unit = PAGE_BYTES / MIN(bytes & -bytes, PAGE_BYTES);
    return (int32_t)MAX(PIN_BYTES / bytes / unit * unit, unit);
}

static size_t slice_bytes(const struct cuda_backend *c)
{
    return (size_t)cuda_kv_slice_blocks(c) * (size_t)kv_layout_block_bytes(&c->kv);
}

/* The pages are made first: the driver takes no launches while it pins, and pins those that are there in a moment. */
static bool pin_slice(struct cuda_backend *c, size_t at)
{
    size_t n_bytes = MIN(slice_bytes(c), c->kv_host_bytes - at);
#ifdef MADV_POPULATE_WRITE
    madvise(c->kv_host + at, n_bytes, MADV_POPULATE_WRITE);
#endif
    if (cudaHostRegister(c->kv_host + at, n_bytes, cudaHostRegisterDefault) == cudaSuccess) {
        return true;
    }
    cudaGetLastError(); /* stays pageable */
    return false;
}

static bool pin_first(struct cuda_backend *c)
{
    bool ok = true;
    for (size_t at = 0; ok && at < MIN(FIRST_SLICES * slice_bytes(c), c->kv_host_bytes); at += slice_bytes(c)) {
        ok = pin_slice(c, at);
    }
    return ok;
}

static void *pin_host_pool(void *arg)
{
    struct cuda_backend *c = arg;
    int64_t rest_us = START_US;
    bool ok = cudaSetDevice(c->config.device) == cudaSuccess;
    for (size_t at = FIRST_SLICES * slice_bytes(c); ok && at < c->kv_host_bytes && !c->pinner_stop;
         at += slice_bytes(c)) {
        for (int64_t until_us = clock_us() + rest_us; clock_us() < until_us && !c->pinner_stop;) {
            usleep((useconds_t)MIN(rest_us, 10000));
        }
        int64_t begun_us = clock_us();
        ok = pin_slice(c, at);
        rest_us = REST_PARTS * (clock_us() - begun_us);
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
        c->pinner_running = pin_first(c) && pthread_create(&c->pinner, NULL, pin_host_pool, c) == 0;
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
    int rc = n_host_blocks > 0 ? cuda_swap_init(c, e) : 0;
    if (rc < 0) {
        return rc;
    }
    cudaError_t status = cudaMemsetAsync(data, 0, block_bytes * (size_t)n_blocks, c->stream);
    return status == cudaSuccess ? 0 : cuda_error(e, status, "the key/value cache");
}

void cuda_kv_release(struct cuda_backend *c)
{
    cuda_swap_release(c);
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
