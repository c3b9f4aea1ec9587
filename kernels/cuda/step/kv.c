/* The key/value cache, and the host pool behind it.
 *
 * The host pool is ordinary memory at first and is pinned in the background, so that
 * readiness does not wait for it; a swap through an unpinned part is merely slower. The
 * first slice is pinned at once, because the engine measures the cost of swapping with
 * it.
 *
 * To pin memory the driver may wait until the device is idle, and accepts no launches
 * meanwhile: a step launched then is delayed by up to two running steps. So all pages
 * are populated first, after which a slice is pinned quickly, and slices are pinned
 * while nothing runs; under load only once a swap has used an unpinned part.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "config/base/limits.h"
#include "kernels/cuda/cuda.h"

#define PIN_SLICE_BYTES ((int64_t)64 << 20)
#define PAGE_BYTES ((int64_t)4096)
#define POPULATE_BYTES ((size_t)2 << 20) /* populated per call */
enum {
    STARTUP_US = 3000000, /* delay: start-up maps much memory and would wait for page population */
    /* Between populating calls, each of which holds the lock of the process's mappings
     * as a reader. Without a pause it is taken again before a thread that waits to
     * write, as malloc does for every page that its heap grows by, and that thread
     * waits for milliseconds each time. */
    POPULATE_PAUSE_US = 200,
    POLL_US = 10000,
    /* polls without work in a row, so that the device is idle and not between two
     * requests */
    QUIET_POLLS = 5,
    PAUSE_FACTOR = 3, /* under load: pause after a slice, as a multiple of the time it took */
};

/* About PIN_SLICE_BYTES, in whole pages whatever the block size (a multiple of 16
 * bytes). */
int32_t cuda_kv_slice_blocks(const struct cuda_backend *c)
{
    int64_t bytes = kv_layout_block_bytes(&c->kv),
            unit = PAGE_BYTES / MIN(bytes & -bytes, PAGE_BYTES);

    return (int32_t)MAX(PIN_SLICE_BYTES / bytes / unit * unit, unit);
}

static size_t slice_bytes(const struct cuda_backend *c)
{
    return (size_t)cuda_kv_slice_blocks(c) * (size_t)kv_layout_block_bytes(&c->kv);
}

static void populate_pages(char *from, size_t n_bytes)
{
#ifdef MADV_POPULATE_WRITE
    /* best effort: otherwise the driver populates them while pinning */
    madvise(from, n_bytes, MADV_POPULATE_WRITE);
#else
    (void)from, (void)n_bytes;
#endif
}

/* Pins the next slice. */
static bool pin(struct cuda_backend *c)
{
    size_t at = c->kv_pinned_bytes, n_bytes = MIN(slice_bytes(c), c->kv_host_bytes - at);

    if (cudaHostRegister(c->kv_host + at, n_bytes, cudaHostRegisterDefault) == cudaSuccess) {
        c->kv_pinned_bytes += n_bytes;
        return true;
    }
    cudaGetLastError(); /* the rest stays pageable */
    return false;
}

static bool sleep_us(const struct cuda_backend *c, int64_t us)
{
    for (int64_t until_us = clock_us() + us; clock_us() < until_us && !c->pinner_stop;) {
        usleep((useconds_t)MIN(us, POLL_US));
    }
    return !c->pinner_stop;
}

/* Waits until a slice may be pinned: nothing ran for a while, or a swap needs it.
 * False: stop. */
static bool wait_to_pin(const struct cuda_backend *c, int64_t *n_steps, int32_t *n_quiet)
{
    while (!c->pin_wanted) {
        bool quiet = c->n_begun == *n_steps && c->n_waited == *n_steps;
        *n_steps = c->n_begun;
        *n_quiet = quiet ? *n_quiet : 0;
        if (*n_quiet == QUIET_POLLS) {
            return true;
        }
        ++*n_quiet;
        if (!sleep_us(c, POLL_US)) {
            return false;
        }
    }
    return true;
}

static void *pin_host_pool(void *arg)
{
    struct cuda_backend *c = arg;
    int64_t n_steps = 0;
    int32_t n_quiet = 0;
    bool ok = cudaSetDevice(c->config.device) == cudaSuccess && sleep_us(c, STARTUP_US);

    for (size_t at = c->kv_pinned_bytes; at < c->kv_host_bytes && ok && !c->pinner_stop;
         at += POPULATE_BYTES) {
        populate_pages(c->kv_host + at, MIN(POPULATE_BYTES, c->kv_host_bytes - at));
        ok = sleep_us(c, POPULATE_PAUSE_US);
    }
    while (ok && c->kv_pinned_bytes < c->kv_host_bytes && wait_to_pin(c, &n_steps, &n_quiet)) {
        int64_t begun_us = clock_us();
        ok = pin(c) && (!c->pin_wanted || sleep_us(c, PAUSE_FACTOR * (clock_us() - begun_us)));
    }
    return NULL;
}

void cuda_kv_swaps(struct cuda_backend *c, int32_t host_block)
{
    if ((size_t)(host_block + 1) * (size_t)kv_layout_block_bytes(&c->kv) > c->kv_pinned_bytes) {
        c->pin_wanted = true;
    }
}

static int32_t panel_of(const struct kv_layout *l)
{
    return l->kind == KV_KEYS_VALUES ? attn_panel_log2(l->head_dim, l->block_size, (int)l->dtype)
                                     : 0;
}

/* Takes the layouts of the groups of states, which must be equal, and c->kv: that of
 * attention, of those with a fast kernel if there is one. Layouts of attention may
 * differ in their heads alone. */
static int take_layouts(struct cuda_backend *c, const struct kv_layout *l, struct err *e)
{
    int32_t n = backend_kv_groups(&c->config);

    c->kv = l[0];
    for (int32_t k = 1; k < n; k++) {
        if (l[k].kind == KV_STATE) {
            c->states = c->states.n_layers > 0 ? c->states : l[k];
        } else if (panel_of(&c->kv) == 0 && panel_of(&l[k]) > 0) {
            c->kv = l[k];
        }
        bool alike = l[k].kind == KV_STATE ? memcmp(&l[k], &c->states, sizeof(*l)) == 0
                                           : l[k].kind == l->kind && l[k].dtype == l->dtype &&
                                                 l[k].block_size == l->block_size;
        if (!alike) {
            return err_set(e, ERR_UNSUPPORTED,
                           "cuda: KV groups must have the same number of layers, heads and type");
        }
    }
    return kv_layouts_agree(l, n)
               ? 0
               : err_set(e, ERR_UNSUPPORTED, "cuda: blocks of KV groups differ in their size");
}

static struct kv_view view_of(const struct kv_layout *l, void *data)
{
    return (struct kv_view){.base = data,
                            .block_stride = l->block_stride,
                            .layer_stride = l->layer_stride,
                            .kv_stride = l->kv_stride,
                            .head_stride = l->head_stride,
                            .block_size = l->block_size,
                            .head_dim = l->head_dim,
                            .n_kv_heads = l->n_kv_heads,
                            .dtype = (int32_t)l->dtype,
                            .panel_log2 = panel_of(l),
                            .scale_offset = l->scale_offset};
}

/* The views of the cache for kernels. */
static void set_views(struct cuda_backend *c, const struct kv_layout *l)
{
    struct backend *b = &c->base;

    c->kv_view = view_of(&c->kv, c->kv_data);
    for (int32_t k = 0; k < backend_kv_groups(&c->config); k++) {
        c->group_view[k] = view_of(&l[k], c->kv_data);
        if (l[k].kind == KV_KEYS_VALUES && l[k].head_dim != c->kv.head_dim) {
            snprintf(b->note, sizeof(b->note),
                     "attention of some layers is slow: heads of %d beside heads of %d",
                     l[k].head_dim, c->kv.head_dim);
        }
    }
    if (dtype_bytes(c->kv.dtype) == 1 && c->kv_view.panel_log2 == 0) {
        snprintf(b->note, sizeof(b->note),
                 "attention is slow: no fast kernel reads a cache of 8 bits with heads of %d and "
                 "blocks of %d",
                 c->kv.head_dim, c->kv.block_size);
    }
}

int cuda_kv_create(struct backend *b, const struct kv_layout *l, int32_t n_blocks,
                   int32_t n_host_blocks, struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    int rc = take_layouts(c, l, e);

    if (rc < 0) {
        return rc;
    }
    int32_t most = l->kind == KV_LATENT ? LIMIT_LATENT_DIM : LIMIT_HEAD_DIM;
    if (c->kv_data || l->block_size < 1 || l->head_dim < 1 || l->head_dim > most || n_blocks < 1 ||
        n_host_blocks < 0 || l->dtype == DTYPE_I32) {
        return err_set(e, ERR_INVALID,
                       "cuda: a cache of %d blocks of %d tokens, heads of %d, is not possible",
                       n_blocks, l->block_size, l->head_dim);
    }
    size_t block_bytes = (size_t)kv_layout_block_bytes(l);
    if (block_bytes % 16 != 0) {
        return err_set(e, ERR_UNSUPPORTED,
                       "cuda: blocks of %zu bytes: they must be a multiple of 16", block_bytes);
    }
    void *data = cuda_alloc(c, block_bytes * (size_t)n_blocks, "the key/value cache", e);
    if (!data) {
        return ERR_NOMEM;
    }
    size_t n_slots = ((size_t)n_blocks + (size_t)n_host_blocks) * (size_t)l->block_size;
    int32_t *slot_token =
        cuda_alloc(c, n_slots * sizeof(*slot_token), "the tokens of the cache", e);
    if (!slot_token) {
        return ERR_NOMEM;
    }
    if (n_host_blocks > 0) {
        size_t bytes = block_bytes * (size_t)n_host_blocks;
        void *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (host == MAP_FAILED) {
            return err_set(e, ERR_NOMEM, "no room for the swap space of %zu MiB", bytes >> 20);
        }
        madvise(host, bytes, MADV_HUGEPAGE); /* best effort */
        c->kv_host = host;
        c->kv_host_bytes = bytes;
        populate_pages(host, MIN(slice_bytes(c), bytes));
        c->pinner_running = pin(c) && pthread_create(&c->pinner, NULL, pin_host_pool, c) == 0;
    }
    c->n_blocks = n_blocks;
    c->n_host_blocks = n_host_blocks;
    c->kv_data = data;
    set_views(c, l);
    cuda_expanded_init(c);
    rc = n_host_blocks > 0 ? cuda_swap_init(c, e) : 0;
    if (rc < 0) {
        return rc;
    }
    c->arrays.slot_token = slot_token;
    c->arrays.block_size = l->block_size;
    cudaError_t status = cudaMemsetAsync(data, 0, block_bytes * (size_t)n_blocks, c->stream);
    status = status == cudaSuccess
                 ? cudaMemsetAsync(slot_token, 0, n_slots * sizeof(*slot_token), c->stream)
                 : status;
    return status == cudaSuccess ? 0 : cuda_error(e, status, "the key/value cache");
}

void cuda_panel_prepare(struct cuda_backend *c, enum dtype act)
{
    const char *asked = getenv("QUIRE_CUDA_PANEL_BYTES"); /* for tests of smaller ones */
    const int64_t most = (int64_t)128 << 20, n_bytes = asked ? MIN(atoll(asked), most) : most,
                  block_bytes = (int64_t)c->kv.block_size * c->kv.head_dim * 2 * 2;
    int32_t n_blocks = (int32_t)(n_bytes / block_bytes);
    struct err e = {0};

    if (n_blocks < 1 || c->kv.dtype != DTYPE_F8 || c->capability != 90 || c->config.deterministic ||
        c->kv_view.panel_log2 == 0 || (act != DTYPE_F16 && act != DTYPE_BF16)) {
        return;
    }
    int32_t *id = malloc((size_t)n_blocks * sizeof(*id));
    struct kv_panel p = {.n_bytes = n_bytes};
    p.block = id ? cuda_alloc(c, (size_t)n_blocks * sizeof(*id), "attention", &e) : NULL;
    p.data = p.block ? cuda_alloc(c, (size_t)n_bytes, "attention", &e) : NULL;
    for (int32_t i = 0; i < n_blocks && p.data; i++) {
        id[i] = i;
    }
    if (p.data &&
        cuda_check(c,
                   cudaMemcpyAsync(p.block, id, (size_t)n_blocks * sizeof(*id),
                                   cudaMemcpyHostToDevice, c->stream),
                   "attention") &&
        cuda_check(c, cudaStreamSynchronize(c->stream), "attention")) {
        c->panel = p;
    }
    free(id);
}

void cuda_kv_release(struct cuda_backend *c)
{
    cuda_swap_release(c);
    if (c->pinner_running) {
        c->pinner_stop = true;
        pthread_join(c->pinner, NULL);
        c->pinner_running = false;
    }
    if (c->kv_host) {
        for (size_t at = 0; at < c->kv_host_bytes; at += slice_bytes(c)) {
            cudaHostUnregister(c->kv_host + at);
        }
        cudaGetLastError(); /* slices that were never pinned */
        munmap(c->kv_host, c->kv_host_bytes);
        c->kv_host = NULL;
    }
}
