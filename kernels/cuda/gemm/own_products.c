/* Gated products of many rows by tiles of our own, and which of them. */
#include "kernels/cuda/fused_decode/small_rows.h"
#include "kernels/cuda/gemm/linear.h"
#include "kernels/cuda/gemm/tiles.h"
#include "kernels/cuda/heuristics.h"

bool product_may_be_own(const struct cuda_backend *c, const struct product *d)
{
    return d->args.gated && !c->config.deterministic && !d->put_off && !d->args.bias &&
           d->key.x_type != PRODUCT_E4M3 && d->args.out_type == d->key.x_type;
}

enum product_way product_way_by_shape(const struct cuda_backend *c, const struct product *d)
{
    const struct linear_args *a = &d->args;

    return !product_may_be_own(c, d)                     ? PRODUCT_LT
           : gated_by_wide_rows(a->rows, a->n, c->n_sms) ? PRODUCT_WIDE_GATE
           : product_by_tiles(a->rows, a->n, c->n_sms)   ? PRODUCT_TILES
                                                         : PRODUCT_LT;
}

bool product_suits(enum product_way way, const struct product *d)
{
    const struct linear_args *a = &d->args;

    return a->rows > SMALL_ROWS &&
           (way != PRODUCT_WIDE_GATE || (a->rows <= 2 * SMALL_ROWS && a->n % WIDE_GATE == 0));
}

bool product_run_own(struct cuda_backend *c, enum product_way way, const struct product *d)
{
    struct tiles_args a = {.out = d->args.out,
                           .x = d->args.x,
                           .w = d->args.w,
                           .out_stride = d->args.out_stride,
                           .x_stride = d->key.x_stride,
                           .w_stride = d->key.w_stride,
                           .rows = d->args.rows,
                           .n = d->key.n,
                           .k = d->key.k,
                           .gated = true,
                           .act = d->args.act,
                           .type = d->key.x_type};

    return way == PRODUCT_WIDE_GATE ? launch_gated_wide(&a, c->stream)
                                    : launch_tiles(&a, c->n_sms, c->stream);
}
