/* Whether a layer of experts joins a fused launch, and how its products are cut; see
 * heuristics_fused.h. */
#include "kernels/cuda/fused_decode/heuristics_fused.h"

/* Rows up to which a layer of experts is faster in a fused launch than in its own. */
enum { FUSED_WORTH_EXPERT_ROWS = FUSED_ROWS };

static bool holds_experts(const struct fused_args *a)
{
    return a->experts.route.rows > 0;
}

/* What the routing and the tiles of experts can do. Layers with a shared expert or
 * groups of experts, or whose router has no whole tiles, are left to single
 * launches. */
static bool layer_suits(const struct experts *e, const struct expert_route *r)
{
    return !e->shared_up.data && e->n <= FUSED_EXPERTS && e->n % FUSED_TILE == 0 &&
           e->top <= EXPERT_MOST_TOP && r->rows * e->top <= FUSED_PAIRS && e->n_groups <= 1 &&
           e->width % (FUSED_TILE / 2) == 0;
}

/* The first of n matrices that are stacked in w: each is w.rows / n rows of it. */
static struct mat first_of(struct mat w, int32_t n)
{
    return mat_rows(w, 0, w.rows / n);
}

/* A bias of the first of n matrices. */
static struct mat bias_of(struct mat bias, int32_t n)
{
    return bias.data ? mat_cols(bias, 0, bias.cols / n) : bias;
}

static void last_is(struct fused_args *a, enum fused_kind kind)
{
    a->op[a->n_ops - 1].kind = kind;
}

bool fused_push_experts(struct fused_args *a, int32_t rows, struct mat y, struct mat x,
                        const struct experts *e, const struct expert_scratch *s,
                        const struct expert_route *route)
{
    struct mat act = s->pair_act;

    if (rows > FUSED_WORTH_EXPERT_ROWS || holds_experts(a) || !layer_suits(e, route) ||
        !fused_push_router(a, rows, s->scores, x, e->router, e->router_bias)) {
        return false;
    }
    act.rows = x.rows;
    if (!fused_push_linear_gated(a, rows, act, x, first_of(e->up, e->n), bias_of(e->up_bias, e->n),
                                 e->act)) {
        return false;
    }
    last_is(a, FUSED_EXPERT_UP);
    if (!fused_push_linear(a, rows, y, act, first_of(e->down, e->n),
                           &(struct epilogue){.bias = bias_of(e->down_bias, e->n)})) {
        return false;
    }
    last_is(a, FUSED_EXPERT_DOWN);
    a->experts.route = *route;
    a->experts.limit = e->swiglu_limit;
    return true;
}

bool fused_plan_experts(struct fused_args *a, const struct fused_op *p)
{
    int32_t stage_k = fused_stage_k(a->format);
    struct fused_experts *e = &a->experts;

    if (p->k > FUSED_SLICE_K || a->format == FUSED_INT4) {
        return false; /* an expert's activations do not fit the registers */
    }
    if (p->kind == FUSED_EXPERT_UP) {
        return true;
    }
    e->stages = (p->k + stage_k - 1) / stage_k;
    e->part_stages = FUSED_DOWN_K / stage_k;
    e->parts = (e->stages + e->part_stages - 1) / e->part_stages;
    e->per_slice = MAX(e->part_stages / e->stages, 1);
    int32_t most = MIN(e->route.rows * e->route.top, e->route.n);
    int32_t slices = e->parts > 1 ? most * e->parts : (most + e->per_slice - 1) / e->per_slice;
    return p->n / FUSED_TILE * slices <= FUSED_MAX_PARTIALS;
}
