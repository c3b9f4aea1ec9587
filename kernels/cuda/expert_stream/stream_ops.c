/* Products of decode steps that stand between layers of experts: alone in a fused
 * launch they take launches of their own, which begin to load before their turn. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/quant/quant.h"

/* The only operation that waits for a fused launch, if it is a product of few rows with
 * weights of 16 bits or e4m3; else NULL. */
static const struct fused_op *only_product(const struct cuda_backend *c)
{
    const struct fused_op *p = &c->fused.op[0];
    bool is = c->fused.n_ops == 1 && p->n > 0 && !p->gated && !p->act && !p->residual &&
              (!p->partial || p->sum) && c->fused.rows <= EXPERT_STREAM_ROWS &&
              c->expert_exchange && (c->fused.format == FUSED_16 || c->fused.format == FUSED_FP8);

    return is ? p : NULL;
}

static struct expert_product product_of(const struct cuda_backend *c, const struct fused_op *p)
{
    return (struct expert_product){.out = p->out,
                                   .out_stride = p->out_stride,
                                   .x = p->x,
                                   .x_stride = p->x_stride,
                                   .w = p->w,
                                   .w_stride = p->w_stride,
                                   .bias = p->bias,
                                   .k = p->k,
                                   .width = p->n,
                                   .n = 1,
                                   .divide = 1,
                                   .type = c->fused.type,
                                   .w_scale = p->w_scale,
                                   .n_groups = p->n_groups,
                                   .group_cols = p->n_groups > 1 ? QUANT_GROUP : p->k,
                                   .group_shift = p->n_groups > 1 ? 7 : 0};
}

struct expert_ranks cuda_experts_ranks(const struct cuda_backend *c)
{
    const struct p2p_args *p = &c->fused.p2p;
    struct expert_ranks s = {.epoch = p->epoch + P2P_EPOCH_FUSED,
                             .arrived = p->arrived,
                             .stop = p->stop,
                             .rank = p->rank,
                             .n_ranks = p->n_ranks};

    for (int32_t r = 0; r < p->n_ranks; r++) {
        s.inbox[r] = p->inbox[r].fused;
    }
    return s;
}

bool cuda_experts_linear(struct cuda_backend *c)
{
    const struct fused_op *p = only_product(c);

    if (!p || !p->sum == !p->h || p->roped) { /* one of both */
        return false;
    }
    struct expert_linear a = {.product = product_of(c, p),
                              .sum = p->sum,
                              .sum_stride = p->sum_stride,
                              .rows = c->fused.rows,
                              .normed = p->h != NULL,
                              .norm = p->norm,
                              .h = p->h_transient ? NULL : p->h,
                              .h_stride = p->h_stride};
    a.product.out = p->sum && p->out_transient ? NULL : p->out;
    struct expert_ranks s = p->partial ? cuda_experts_ranks(c) : (struct expert_ranks){0};
    return launch_expert_linear(&a, &s, c->n_sms, c->stream);
}
