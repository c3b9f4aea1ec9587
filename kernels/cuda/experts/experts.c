/* backend_ops.experts: the routing, the products by its lists, the sum. See
 * experts.h. */
#include "kernels/cuda/experts/experts.h"

#include "kernels/cuda/cuda.h"

/* Rows of a tile: about what an expert gets of `rows` evenly spread ones. It depends on
 * the number of rows alone, so a graph can hold it. */
static int32_t tile_rows(const struct experts *e, int32_t rows)
{
    int64_t mean = div_ceil((int64_t)rows * e->top, e->n);

    return mean <= 12 ? 16 : mean <= 28 ? 32 : mean <= 64 ? 64 : 128;
}

/* The lists of a call of `rows` rows, in the workspace. */
static struct expert_lists lists_of(const struct experts *e, const struct expert_scratch *s,
                                    int32_t rows)
{
    int64_t pairs = (int64_t)rows * e->top;
    struct expert_lists l = {.cap = rows, .tile_rows = tile_rows(e, rows)};
    int32_t *at = s->lists.data;

    l.tile = (struct expert_tile *)at;
    at += experts_most_tiles(e->n, pairs) * 4;
    l.total = at;
    l.count = l.total + 4;
    l.active = l.count + e->n;
    l.expert = l.active + e->n;
    l.weight = (float *)(l.expert + pairs);
    l.list = l.expert + 2 * pairs;
    return l;
}

static struct expert_route routing(const struct experts *e, struct mat scores, int32_t rows,
                                   const int32_t *n_live)
{
    return (struct expert_route){.scores = scores.data,
                                 .scores_stride = scores.stride,
                                 .choice_bias = e->choice_bias.data,
                                 .n_live = n_live,
                                 .rows = rows,
                                 .n = e->n,
                                 .top = e->top,
                                 .n_groups = e->n_groups,
                                 .top_groups = e->top_groups,
                                 .sigmoid = e->scores == SCORES_SIGMOID,
                                 .normalised = e->normalised,
                                 .groups_by_two = e->groups_by_two,
                                 .factor = e->factor != 0 ? e->factor : 1};
}

/* Up, with the gate inside, into the workspace's pairs. */
static struct expert_product product_up(const struct experts *e, struct mat x,
                                        const struct expert_scratch *s)
{
    return (struct expert_product){.out = s->pair_act.data,
                                   .out_stride = s->pair_act.stride,
                                   .x = x.data,
                                   .x_stride = x.stride,
                                   .w = e->up.data,
                                   .w_stride = e->up.stride,
                                   .bias = e->up_bias.data,
                                   .k = x.cols,
                                   .width = e->width,
                                   .n = e->n,
                                   .divide = e->top,
                                   .gated = true,
                                   .act = (int32_t)e->act,
                                   .type = (int32_t)x.dtype,
                                   .limit = e->swiglu_limit};
}

static struct expert_product product_down(const struct experts *e, struct mat x,
                                          const struct expert_scratch *s)
{
    return (struct expert_product){.out = s->pair_y.data,
                                   .out_stride = s->pair_y.stride,
                                   .x = s->pair_act.data,
                                   .x_stride = s->pair_act.stride,
                                   .w = e->down.data,
                                   .w_stride = e->down.stride,
                                   .bias = e->down_bias.data,
                                   .k = e->width,
                                   .width = x.cols,
                                   .n = e->n,
                                   .divide = 1,
                                   .type = (int32_t)x.dtype};
}

static void products(struct cuda_backend *c, const struct experts *e, struct mat x,
                     const struct expert_scratch *s, const struct expert_lists *l)
{
    struct expert_product up = product_up(e, x, s), down = product_down(e, x, s);
    bool tiles = expert_tiles_fit(x.cols, e->width, (int32_t)x.dtype);

    if (!tiles || !launch_expert_tiles(&up, l, c->n_sms, c->stream)) {
        launch_expert_product(&up, l, l->cap, e->top, c->stream);
    }
    if (!tiles || !launch_expert_tiles(&down, l, c->n_sms, c->stream)) {
        launch_expert_product(&down, l, l->cap, e->top, c->stream);
    }
}

/* Few rows, where results may depend on their number. */
static bool few(struct cuda_backend *c, struct mat y, struct mat x, const struct experts *e,
                const struct expert_scratch *s, const struct expert_route *r,
                const struct expert_lists *l)
{
    struct expert_few a = {.route = *r,
                           .up = product_up(e, x, s),
                           .down = product_down(e, x, s),
                           .router = e->router.data,
                           .router_bias = e->router_bias.data,
                           .router_stride = e->router.stride,
                           .y = y.data,
                           .y_stride = y.stride};

    return !c->config.deterministic && !e->shared_up.data && launch_expert_few(&a, l, c->stream);
}

static bool takes(struct cuda_backend *c, const struct experts *e)
{
    bool fits =
        e->n <= EXPERT_MOST && e->top <= EXPERT_MOST_TOP && e->n_groups <= EXPERT_MOST_GROUPS;

    if (!fits && cuda_usable(c)) {
        err_set(&c->failed, ERR_UNSUPPORTED, "cuda: %d of %d experts in %d groups", e->top, e->n,
                e->n_groups);
    }
    return fits;
}

void cuda_experts(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                  const struct expert_scratch *s)
{
    struct cuda_backend *c = cuda_of(b);
    struct mat shared = mat_rows(s->y, 0, x.rows);

    if (!takes(c, e)) {
        return;
    }
    cuda_start(c); /* x is stored, though the next product were to read it alone */
    int32_t rows = cuda_rows(c, y);
    bool padded = c->capturing && x.rows == c->batch.n_tokens;
    const int32_t *n_live = padded ? &c->arrays.header->n_tokens : NULL;
    struct expert_lists l = lists_of(e, s, rows);
    struct expert_route r = routing(e, s->scores, rows, n_live);
    if (rows < 1 || !cuda_usable(c) || few(c, y, x, e, s, &r, &l)) {
        return;
    }
    if (e->shared_up.data) {
        cuda_linear_gated(b, s->shared_act, s->shared_up, x, e->shared_up, (struct mat){0}, e->act);
        cuda_linear(b, shared, s->shared_act, e->shared_down, NULL);
    }
    cuda_linear(b, s->scores, x, e->router, &(struct epilogue){.bias = e->router_bias});
    cuda_start(c);
    launch_expert_route(&r, &l, c->stream);
    products(c, e, x, s, &l);
    struct expert_combine a = {.y = y.data,
                               .y_stride = y.stride,
                               .pairs = s->pair_y.data,
                               .pairs_stride = s->pair_y.stride,
                               .weight = l.weight,
                               .n_live = n_live,
                               .shared = e->shared_up.data ? shared.data : NULL,
                               .shared_stride = shared.stride,
                               .x = x.data,
                               .gate = e->shared_gate.data,
                               .x_stride = x.stride,
                               .rows = rows,
                               .top = e->top,
                               .hidden = x.cols,
                               .type = (int32_t)x.dtype};
    launch_expert_combine(&a, c->stream);
}
