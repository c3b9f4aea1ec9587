/* Prefill of latents with expanded heads: a portion's latents are gathered from the
 * cache, one product by head makes the keys' own parts and one the values, and
 * attention is over those (latent_expanded.cu).
 *
 * Buffers are bounded: a portion has at most EXPANDED_ROWS rows of latents, a sequence
 * with more keys stays in the space of latents, and heads take turns where keys and
 * values of all of them have no room.
 */
#include <stdlib.h>

#include "kernels/cuda/attention/latent_expanded.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/heuristics.h"

enum { EXPANDED_ROWS = 128 << 10, EXPANDED_WIDTH = 576, HEAD_MOST_BYTES = (192 + 256) * 2 };
#define EXPANDED_BYTES ((int64_t)512 << 20)

void cuda_expanded_init(struct cuda_backend *c)
{
    const char *asked = getenv("QUIRE_CUDA_EXPANDED_BYTES"); /* for tests of smaller ones */
    int64_t most = asked ? MIN(atoll(asked), EXPANDED_BYTES) : EXPANDED_BYTES;
    bool fits = c->kv.kind == KV_LATENT && c->kv.head_dim == EXPANDED_WIDTH &&
                (c->kv.dtype == DTYPE_BF16 || c->kv.dtype == DTYPE_F16);

    if (fits && c->capability == 90 && !c->config.deterministic) {
        c->expanded.most_bytes = most;
        c->expanded.most_rows = (int32_t)MAX(MIN(EXPANDED_ROWS, most / HEAD_MOST_BYTES), 0);
    }
}

/* Enlarges a buffer to `need` bytes, at least twofold but to no more than `most`.
 * False: there is no room. */
static bool grow(struct cuda_backend *c, void **buffer, int64_t *have, int64_t need, int64_t most)
{
    struct err none = {0};
    int64_t n_bytes = MAX(need, MIN(*have * 2, most));

    if (need <= *have) {
        return true;
    }
    cuda_release(c, *buffer);
    *have = 0;
    *buffer = cuda_alloc(c, (size_t)n_bytes, "attention", &none);
    *have = *buffer ? n_bytes : 0;
    return *buffer != NULL;
}

/* The step's batch with the arrays that were packed. */
static struct batch packed_batch(const struct cuda_backend *c)
{
    const char *base = (const char *)c->header;
    struct batch b = c->batch;

    b.q_start = (const int32_t *)(base + c->header->off_q_start);
    b.kv_len = (const int32_t *)(base + c->header->off_kv_len);
    b.row = (const int32_t *)(base + c->header->off_row);
    return b;
}

/* Head h's n rows of a weight that is stacked by heads. It is not the weight that its
 * handle stands for. */
static struct mat heads_of(struct mat w, int32_t h, int32_t n, int32_t n_heads)
{
    int32_t rows = w.rows / n_heads;
    struct mat m = mat_rows(w, h * rows, n * rows);

    m.priv = NULL;
    return m;
}

/* Makes keys and values of heads [first, first + n) from the gathered latents. False:
 * there is no such product. */
static bool expand(struct cuda_backend *c, const struct latent_attention *a, struct mat k,
                   struct mat v, int32_t first, int32_t n)
{
    struct mat latents = {.data = c->expanded.latents,
                          .stride = EXPANDED_WIDTH,
                          .rows = k.rows,
                          .cols = a->latent,
                          .dtype = k.dtype};
    const struct head_products keys = {.out = k,
                                       .x = latents,
                                       .w = heads_of(a->k_up, first, n, a->n_heads),
                                       .out_head = a->nope_dim,
                                       .n_heads = n,
                                       .rows = k.rows,
                                       .transposed = true};

    if (!cuda_linear_heads(c, &keys)) {
        return false;
    }
    cuda_linear(&c->base, v, latents, heads_of(a->v_up, first, n, a->n_heads), NULL);
    return true;
}

/* All but keys, values and latents, of all heads. */
static struct expanded_args args_of(struct mat out, struct mat q, const struct latent_attention *a)
{
    return (struct expanded_args){.out = out.data,
                                  .q = q.data,
                                  .out_stride = out.stride,
                                  .q_stride = q.stride,
                                  .n_heads = a->n_heads,
                                  .latent = a->latent,
                                  .rot_dim = a->rot_dim,
                                  .nope_dim = a->nope_dim,
                                  .v_dim = a->v_dim,
                                  .scale = a->scale,
                                  .type = (int32_t)q.dtype};
}

/* Attention of a portion over heads [first, first + n). */
static bool attend_heads(struct cuda_backend *c, struct mat out, struct mat q,
                         const struct latent_attention *a, const struct expanded_portion *p,
                         int32_t first, int32_t n)
{
    struct cuda_expanded *x = &c->expanded;
    struct mat k = {.data = x->heads,
                    .stride = (int64_t)n * a->nope_dim,
                    .rows = p->n_rows,
                    .cols = n * a->nope_dim,
                    .dtype = q.dtype};
    struct mat v = {.data = mat_rows(k, p->n_rows, 0).data,
                    .stride = (int64_t)n * a->v_dim,
                    .rows = p->n_rows,
                    .cols = n * a->v_dim,
                    .dtype = q.dtype};
    struct expanded_args args = args_of(out, q, a);

    args.out = mat_cols(out, first * a->v_dim, 0).data;
    args.q = mat_cols(q, first * (a->nope_dim + a->rot_dim), 0).data;
    args.k = k.data;
    args.v = v.data;
    args.latents = x->latents;
    args.n_keys = p->n_rows;
    args.n_heads = n;
    return expand(c, a, k, v, first, n) &&
           launch_latent_expanded(&args, x->tile + p->tile, p->n_tiles, c->stream);
}

/* Attention of a portion, in turns of as many heads as there is room for. */
static bool attend_portion(struct cuda_backend *c, struct mat out, struct mat q,
                           const struct latent_attention *a, const struct expanded_portion *p)
{
    const struct step_arrays s = cuda_group_arrays(c, a->group);
    struct cuda_expanded *x = &c->expanded;
    int64_t head = (int64_t)p->n_rows * (a->nope_dim + a->v_dim) * dtype_bytes(q.dtype);
    int32_t turn = (int32_t)MIN(x->most_bytes / head, a->n_heads);

    if (!grow(c, &x->latents, &x->n_bytes, (int64_t)p->n_rows * EXPANDED_WIDTH * 2,
              (int64_t)x->most_rows * EXPANDED_WIDTH * 2) ||
        !grow(c, &x->heads, &x->head_bytes, turn * head, x->most_bytes)) {
        x->most_rows = 0; /* nor will there be room in later steps */
        return false;
    }
    launch_latent_gather(x->latents, &c->kv_view, a->layer, &s, x->seq + p->seq, p->n_seqs,
                         p->n_rows, c->stream);
    for (int32_t h = 0; h < a->n_heads; h += turn) {
        if (!attend_heads(c, out, q, a, p, h, MIN(turn, a->n_heads - h))) {
            return false;
        }
    }
    return true;
}

/* Whether the operands have a kernel. */
static bool takes(const struct cuda_backend *c, struct mat out, struct mat q,
                  const struct latent_attention *a)
{
    const struct expanded_args k = args_of(out, q, a);

    return a->latent + a->rot_dim == EXPANDED_WIDTH && !a->k_up.format && !a->v_up.format &&
           q.dtype == c->kv.dtype && out.dtype == q.dtype && a->k_up.dtype == q.dtype &&
           a->v_up.dtype == q.dtype && latent_expanded_takes(&k);
}

bool cuda_latent_expanded(struct cuda_backend *c, struct mat out, struct mat q,
                          const struct latent_attention *a)
{
    int32_t most = c->expanded.most_rows;
    bool any = false;

    if (most == 0 || c->capturing || c->batch.n_seqs == c->batch.n_decode || !takes(c, out, q, a)) {
        return false;
    }
    const struct batch b = packed_batch(c);
    struct expanded_portion p = {.next = b.n_decode};
    while (expanded_next(&b, most, NULL, NULL, &p)) {
        if (!attend_portion(c, out, q, a, &p)) {
            return false;
        }
        any = true;
    }
    return any;
}
