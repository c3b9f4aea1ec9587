/* All-reduce over ranks on devices of their own. ranks_open.c connects them,
 * rank_sample.c samples, wait.c waits for them.
 *
 * Sums go straight into the peers' memory (p2p.cu), fused with the residual and the
 * norm. Devices that do not reach each other sum by NCCL.
 */
#include "kernels/cuda/comm/ranks.h"

static ncclDataType_t nccl_type(enum dtype t)
{
    return t == DTYPE_F32 ? ncclFloat : t == DTYPE_F16 ? ncclHalf : ncclBfloat16;
}

/* Sums y in place by NCCL; its rows may lie apart. */
static void nccl_sum(struct cuda_backend *c, struct mat y, int32_t rows)
{
    size_t n =
        /* the padding between rows is summed too, unused */
        (size_t)(rows - 1) * (size_t)y.stride + (size_t)y.cols;
    const struct nccl_group *g = &c->ranks->nccl;

    nccl_check(
        c, g->lib,
        g->lib->AllReduce(y.data, y.data, n, nccl_type(y.dtype), ncclSum, g->comm, c->stream),
        "a sum");
}

bool cuda_rank_sum(struct cuda_backend *c, struct mat *out, struct mat *x, struct mat y,
                   const struct norm_args *n, int32_t rows)
{
    if (!c->ranks || !cuda_usable(c) || rows < 1) {
        return false;
    }
    if (cuda_ranks_p2p(c->ranks) &&
        launch_p2p_sum(&c->ranks->p2p, out ? out->data : NULL, out ? out->stride : 0,
                       x ? x->data : NULL, x ? x->stride : 0, y.data, y.stride, n, rows, y.cols,
                       (int)y.dtype, c->stream)) {
        return true;
    }
    nccl_sum(c, y, rows);
    return false;
}

bool cuda_ranks_all(struct cuda_backend *c, bool mine)
{
    struct comm *m = c->config.comm;
    float n = mine ? 1 : 0;
    struct mat one = {.data = &n, .rows = 1, .cols = 1, .stride = 1, .dtype = DTYPE_F32};
    struct err e = {0};

    if (!m) {
        return mine;
    }
    if (m->ops->all_reduce(m, one, &e) < 0) {
        c->failed = c->failed.code == 0 ? e : c->failed;
        return false;
    }
    return n == (float)m->n_ranks;
}

void cuda_all_reduce(struct backend *b, struct mat x)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    cuda_rank_sum(c, NULL, NULL, x, NULL, cuda_rows(c, x));
}

void cuda_square_sums(struct backend *b, struct mat sums, struct mat x)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    cuda_rows(c, sums);
    launch_square_sums(sums.data, sums.stride, x.data, x.stride, cuda_rows(c, x), x.cols,
                       (int)x.dtype, c->stream);
}

void cuda_norm_by_sums(struct backend *b, struct mat x, struct mat sums, int32_t width,
                       const struct norm *n)
{
    struct cuda_backend *c = cuda_of(b);
    struct norm_args a = cuda_norm_args(n);

    cuda_start(c);
    launch_norm_by_sums(x.data, x.stride, sums.data, sums.stride, width, &a, cuda_rows(c, x),
                        x.cols, (int)x.dtype, c->stream);
}

void cuda_embed_part(struct backend *b, struct mat out, struct mat table, int32_t first,
                     float scale)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    int32_t rows = cuda_rows(c, out);
    cuda_embed_rows(c, out, table, first, rows, scale);
    cuda_rank_sum(c, NULL, NULL, out, NULL, rows);
}
