/* The host's side of late masks: pinned memory that late_wait.cu reads. */
#include <string.h>

#include "kernels/cuda/cuda.h"

/* Kernels are loaded when they are first launched, for which the driver may wait until
 * the device is idle: never, behind a kernel that waits for masks which the host
 * computes only after the launch. So those that sample are loaded here; of the others
 * of a step none may be launched behind that kernel before it has run in front of it
 * (head_and_sample). */
static cudaError_t load_kernels(const struct cuda_backend *c)
{
    bool loaded = late_wait_load() && sample_load() &&
                  (!c->config.comm || (p2p_sample_load() && topk_merge_load()));

    return loaded ? cudaSuccess : cudaGetLastError();
}

int cuda_late_init(struct cuda_backend *c, struct err *e)
{
    struct late_args *a = &c->late;
    const struct backend_config *k = &c->config;

    if (k->vocab <= 0 || (k->max_logits <= 0 && k->pipeline)) {
        return 0; /* another stage samples, or a test that gives no masks */
    }
    a->stride = (int32_t)div_ceil(mask_words(k->vocab), 4) * 4;
    a->most = k->max_seqs;
    size_t n_bytes = (size_t)a->most * (size_t)a->stride * sizeof(uint32_t);
    a->device = cuda_alloc(c, n_bytes, "masks of a step", e);
    if (!a->device) {
        return e->code;
    }
    cudaError_t rc = cudaHostAlloc((void **)&a->host, 2 * n_bytes, cudaHostAllocMapped);
    rc = rc == cudaSuccess
             ? cudaHostAlloc((void **)&a->flags, sizeof(*a->flags), cudaHostAllocMapped)
             : rc;
    rc = rc == cudaSuccess ? load_kernels(c) : rc;
    if (rc != cudaSuccess) {
        return cuda_error(e, rc, "masks of a step");
    }
    memset(a->flags, 0, sizeof(*a->flags));
    c->arrays.late_mask = a->device;
    c->arrays.late_stride = a->stride;
    return 0;
}

static void set_flag(unsigned long long *flag, uint64_t value)
{
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

void cuda_late_give_up(struct cuda_backend *c)
{
    if (c->late.flags) {
        set_flag(&c->late.flags->given_up, 1);
    }
}

void cuda_late_release(struct cuda_backend *c)
{
    cudaFreeHost(c->late.host);
    cudaFreeHost(c->late.flags);
}

int cuda_masks(struct backend *b, uint64_t step, const struct late_mask *mask, int32_t n,
               struct err *e)
{
    struct cuda_backend *c = cuda_of(b);
    const struct late_args *a = &c->late;
    size_t n_bytes = (size_t)a->stride * sizeof(*a->host);
    size_t used = (size_t)mask_words(c->config.vocab) * sizeof(*a->host);

    if (!mask || !a->flags) { /* without flags another stage samples */
        cuda_late_give_up(c);
        return 0;
    }
    if (n < 0 || n > a->most) {
        return err_set(e, ERR_INVALID, "cuda: step %llu has %d masks; there is room for %d",
                       (unsigned long long)step, n, a->most);
    }
    uint32_t *slot = a->host + (int64_t)(step % 2) * a->most * a->stride;
    for (int32_t i = 0; i < n; i++) {
        uint32_t *to = slot + (int64_t)i * a->stride;
        if (mask[i].word) {
            memcpy(to, mask[i].word, used);
        } else {
            memset(to, 0xFF, n_bytes);
        }
    }
    set_flag(&a->flags->step[step % 2], step);
    return 0;
}

void cuda_late_wait(struct cuda_backend *c)
{
    if (c->late_mask && !c->late_waited && c->late.flags) {
        c->late_waited = true;
        cuda_expert_load_end(c);
        launch_late_wait(&c->late, &c->arrays, c->stream);
    }
}
