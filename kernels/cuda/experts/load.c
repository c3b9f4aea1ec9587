/* The counts of a step's layers of experts, and their sums (load.h). */
#include "kernels/cuda/experts/load.h"

#include "kernels/cuda/cuda.h"

/* Makes the counts and the sums. */
static bool prepare(struct cuda_backend *c)
{
    struct expert_load_state *l = &c->expert_load;
    size_t n_bytes = (size_t)LOAD_COUNTS * sizeof(*l->counts);
    char *room = cuda_alloc(c, n_bytes + sizeof(*l->sums), "counts of experts", &c->failed);

    if (!room ||
        !cuda_check(c, cudaHostAlloc((void **)&l->copy, sizeof(*l->copy), cudaHostAllocMapped),
                    "counts of experts") ||
        !cuda_check(c, cudaMemsetAsync(room, 0, n_bytes + sizeof(*l->sums), c->stream),
                    "counts of experts")) {
        return false;
    }
    *l->copy = (struct load_sums){0};
    l->sums = (struct load_sums *)room;
    l->counts = (int32_t *)(room + sizeof(*l->sums));
    return true;
}

int32_t *cuda_expert_counts(struct cuda_backend *c, int32_t n)
{
    struct expert_load_state *l = &c->expert_load;

    if (!l->counts && (c->capturing || !cuda_usable(c) || !prepare(c))) {
        return NULL;
    }
    if (l->n_layers == 0) {
        l->n = n;
    }
    if (l->n != n || (l->n_layers + 1) * n > LOAD_COUNTS) {
        return NULL;
    }
    return l->counts + (int64_t)l->n_layers++ * n;
}

void cuda_expert_load_end(struct cuda_backend *c)
{
    struct expert_load_state *l = &c->expert_load;

    if (l->n_layers > 0) {
        launch_expert_load(l->counts, l->n_layers, l->n, l->sums, l->copy, c->stream);
    }
    l->n_layers = 0;
}

struct expert_load cuda_expert_load(struct cuda_backend *c)
{
    struct expert_load_state *l = &c->expert_load;

    if (!l->copy) {
        return (struct expert_load){0};
    }
    volatile struct load_sums *at = l->copy; /* a step in flight may write it */
    struct load_sums now = {.rows = at->rows, .peak = at->peak}, before = l->seen;
    l->seen = now;
    return (struct expert_load){.rows = (int64_t)(now.rows - before.rows),
                                .peak = (int64_t)(now.peak - before.peak)};
}

void cuda_expert_load_release(struct cuda_backend *c)
{
    cudaFreeHost(c->expert_load.copy);
}
