/* backend_ops.experts: the routing, the products by its lists, the sum. See
 * experts.h. */
#include "kernels/cuda/experts/experts.h"

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/quant/panels.h"

_Static_assert((int)EXPERTS_PARTS_ROWS <= (int)EXPERT_PARTS_ROWS, "the routing lists parts");

/* How a call is computed; it depends on the number of rows alone, so a graph can hold
 * it. */
struct expert_way {
    int32_t rows;
    bool free;   /* results may depend on the number of rows */
    bool own;    /* the router is of 16 bits and reads what the experts read */
    bool e4m3;   /* codes times codes */
    bool widens; /* codes are widened first */
    bool wgmma;  /* tiles of 16 bits with wgmma */
    /* Of the shared expert, in the lists beside the experts; 0: there is none, or it is
     * a product of its own. */
    int32_t parts;
};

/* About what an expert gets of evenly spread rows. */
static int64_t mean_rows(const struct experts *e, int32_t rows)
{
    return div_ceil((int64_t)rows * e->top, e->n);
}

/* Most rows of tiles of a weight, if it is multiplied as panels. */
static int32_t panels_rows(struct mat w)
{
    int32_t kind = w.format ? panel_kind(w.priv) : (int32_t)PANELS_NONE;

    return kind == (int32_t)PANELS_NONE ? EXPERT_WIDE_ROWS : expert_panels_rows(kind);
}

/* Rows of a tile; a part of a shared expert has all rows. */
static int32_t tile_rows(const struct experts *e, const struct expert_way *w)
{
    int64_t mean = mean_rows(e, w->rows);
    int32_t most = w->e4m3 ? EXPERT_E4M3_ROWS : w->wgmma ? EXPERT_WIDE_ROWS : 64;

    if (w->parts > 0) {
        return w->rows <= 16 ? 16 : w->rows <= 32 ? 32 : 64;
    }
    if (!w->e4m3 && !w->widens) {
        most = MIN(most, MIN(panels_rows(e->up), panels_rows(e->down)));
    }
    return MIN(most, mean <= 12 ? 16 : mean <= 28 ? 32 : mean <= 64 ? 64 : most);
}

/* The lists of a call, in the workspace. */
static struct expert_lists lists_of(const struct experts *e, const struct expert_scratch *s,
                                    const struct expert_way *w)
{
    int32_t n = e->n + w->parts;
    int64_t pairs = (int64_t)w->rows * (e->top + w->parts);
    struct expert_lists l = {.cap = w->rows, .tile_rows = tile_rows(e, w)};
    int32_t *at = s->lists.data;

    l.tile = (struct expert_tile *)at;
    at += experts_most_tiles(n, pairs) * 4;
    l.total = at;
    l.count = l.total + 4;
    l.active = l.count + n;
    l.expert = l.active + n;
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
                                 .scale = e->expert_scale.data,
                                 .n_live = n_live,
                                 .rows = rows,
                                 .n = e->n,
                                 .top = e->top,
                                 .first = e->first,
                                 .held = experts_held(e),
                                 .n_groups = e->n_groups,
                                 .top_groups = e->top_groups,
                                 .sigmoid = e->scores == SCORES_SIGMOID,
                                 .mixer = e->scores == SCORES_MIXER,
                                 .jitter = e->mixer_jitter,
                                 .normalised = e->normalised,
                                 .groups_by_two = e->groups_by_two,
                                 .factor = e->factor != 0 ? e->factor : 1};
}

/* The logarithm of a power of two; 0: it is none. */
static int32_t shift_of(int32_t n)
{
    int32_t shift = 0;

    while (shift < 30 && 1 << shift < n) {
        shift++;
    }
    return 1 << shift == n ? shift : 0;
}

/* The weight of a product, as the device holds it. */
static void set_weight(struct expert_product *p, struct mat w)
{
    const struct quant_weight *q = w.format ? w.priv : NULL;

    p->w = w.data;
    p->w_stride = q ? q->row_bytes : w.stride;
    if (q) {
        p->w_scale = q->scale;
        p->n_groups = q->n_groups;
        p->group_cols = q->group_cols;
        p->group_shift = shift_of(q->group_cols);
        p->panels = panel_kind(q);
    }
}

/* Up, with the gate inside, into the workspace's pairs. */
static struct expert_product product_up(const struct experts *e, struct mat x,
                                        const struct expert_scratch *s)
{
    struct expert_product p = {.out = s->pair_act.data,
                               .out_stride = s->pair_act.stride,
                               .x = x.data,
                               .x_stride = x.stride,
                               .bias = e->up_bias.data,
                               .k = x.cols,
                               .width = e->width,
                               .n = experts_held(e),
                               .divide = e->top,
                               .gated = true,
                               .act = (int32_t)e->act,
                               .type = (int32_t)x.dtype,
                               .limit = e->swiglu_limit};

    set_weight(&p, e->up);
    return p;
}

static struct expert_product product_down(const struct experts *e, struct mat x,
                                          const struct expert_scratch *s)
{
    struct expert_product p = {.out = s->pair_y.data,
                               .out_stride = s->pair_y.stride,
                               .x = s->pair_act.data,
                               .x_stride = s->pair_act.stride,
                               .bias = e->down_bias.data,
                               .k = e->width,
                               .width = x.cols,
                               .n = experts_held(e),
                               .divide = 1,
                               .type = (int32_t)x.dtype};

    set_weight(&p, e->down);
    return p;
}

/* The parts of the shared expert for both products. */
static void add_parts(const struct experts *e, int32_t parts, struct expert_product *up,
                      struct expert_product *down)
{
    up->divide = e->top + parts;
    up->parts = down->parts = parts;
    up->shared = e->shared_up.data;
    up->shared_stride = e->shared_up.stride;
    down->shared = e->shared_down.data;
    down->shared_stride = e->shared_down.stride;
}

/* Rows from which activations are quantised, where they may be and one launch does not
 * take all. */
enum { E4M3_ROWS = 5 };

/* Rows from which widening a layer's codes is less work than it saves on an H200: bf16
 * tiles are twice as fast as those of codes, and every expert has rows. */
enum { WIDEN_ROWS = 512 };

/* Replaces the codes of a product by their values. */
static void widen(struct cuda_backend *c, struct expert_product *a, struct mat w)
{
    if (!cuda_quant_reserve(c, w.priv, (enum dtype)a->type, &c->failed)) {
        return;
    }
    if (a->panels) {
        launch_widen_panels(c->widened, w.cols, w.priv, (int)a->type, c->stream);
    } else {
        launch_widen(c->widened, w.cols, w.priv, (int)a->type, c->stream);
    }
    a->panels = 0;
    a->w = c->widened;
    a->w_stride = w.cols;
    a->w_scale = NULL;
}

/* Returns whether launch_expert_tiles made it. */
static bool product(struct cuda_backend *c, const struct expert_product *a,
                    const struct expert_lists *l, int32_t top, bool wgmma)
{
    if (a->w_scale) {
        bool done = a->x_scale  ? launch_expert_e4m3(a, l, c->n_sms, c->stream)
                    : a->panels ? launch_expert_panels(a, l, 2 * c->n_sms, c->stream)
                                : launch_expert_codes(a, l, 2 * c->n_sms, c->stream);
        if (!done) {
            err_set(&c->failed, ERR_UNSUPPORTED, "cuda: experts of %d x %d %s times %s activations",
                    a->width, a->k, a->panels ? "panels" : "e4m3 codes",
                    dtype_name((enum dtype)a->type));
        }
        return false;
    }
    if (wgmma && launch_expert_tiles(a, l, c->n_sms, c->stream)) {
        return true;
    }
    if (a->parts > 0) {
        err_set(&c->failed, ERR_UNSUPPORTED, "cuda: tiles of a shared expert, %d x %d", a->width,
                a->k);
        return false;
    }
    if (!launch_expert_mma(a, l, 2 * c->n_sms, c->stream)) {
        launch_expert_product(a, l, l->cap, top, c->stream);
    }
    return false;
}

/* The codes of x lie where down's results will, which are twice as long and written
 * when up has read them; those of its own result where they would lie as floats. */
static struct expert_quantise quantised(const struct experts *e, struct expert_product *up,
                                        struct expert_product *down, int32_t rows)
{
    const struct quant_weight *of_up = e->up.priv, *of_down = e->down.priv;
    uint8_t *x = down->out, *act = up->out;
    struct expert_quantise q = {.x = up->x,
                                .x_stride = up->x_stride,
                                .codes = x,
                                .scale = (float *)(x + (int64_t)rows * up->k),
                                .fixed = of_up->act_scale,
                                .rows = rows,
                                .cols = up->k};

    up->x = q.codes;
    up->x_stride = up->k;
    up->x_scale = q.scale;
    up->out_stride = up->width;
    up->out_scale = (float *)(act + (int64_t)rows * e->top * up->width);
    up->out_fixed = of_down->act_scale;
    down->x = act;
    down->x_stride = down->k;
    down->x_scale = up->out_scale;
    return q;
}

static struct expert_few few_args(struct mat y, struct mat x, const struct experts *e,
                                  const struct expert_scratch *s, const struct expert_route *r)
{
    struct expert_few f = {.route = *r,
                           .up = product_up(e, x, s),
                           .down = product_down(e, x, s),
                           .router = e->router.data,
                           .router_bias = e->router_bias.data,
                           .router_stride = e->router.stride,
                           .y = y.data,
                           .y_stride = y.stride};

    if (e->shared_up.data) {
        f.shared_up = e->shared_up.data;
        f.shared_down = e->shared_down.data;
        f.shared_up_stride = e->shared_up.stride;
        f.shared_down_stride = e->shared_down.stride;
        f.shared_parts = e->shared_down.cols / e->width;
    }
    return f;
}

/* Whether the shared expert can join the launch of few rows: one without a gate, of
 * 16-bit weights, as wide as some experts, with a middle like theirs. */
static bool shared_joins(const struct experts *e)
{
    return !e->shared_up.data ||
           (!e->shared_gate.data && !e->shared_up.format && !e->shared_down.format &&
            e->swiglu_limit <= 0 && e->shared_down.cols % e->width == 0);
}

/* ---- the last launch ---- */

static void launch_pending(struct cuda_backend *c, struct expert_pending *p)
{
    p->waits = false;
    if (p->stream) {
        launch_expert_stream(&p->down, &p->ranks, c->n_sms, c->stream);
    } else if (p->few) {
        launch_expert_down(&p->down, &p->lists, c->stream);
    } else {
        launch_expert_combine(&p->combine, c->stream);
    }
}

void cuda_experts_flush(struct cuda_backend *c)
{
    if (c->experts.waits) {
        launch_pending(c, &c->experts);
    }
}

static bool aligned(struct mat m)
{
    return (uintptr_t)m.data % 16 == 0 && m.stride % 8 == 0 && m.cols % 8 == 0;
}

/* Whether the sum makes the norm too. With few rows the norm rather joins the product
 * behind it, and one that is quantised does so at once. */
static bool sum_norms(struct cuda_backend *c, const struct expert_combine *a, struct mat out)
{
    return a->rows > FUSED_ROWS && out.dtype != DTYPE_F32 && aligned(out) &&
           a->pairs_stride % 8 == 0 && a->shared_stride % 8 == 0 &&
           !cuda_pending_suits(c, out, a->rows);
}

/* Whether the launch that waits can sum its result over the ranks. */
static bool sums_over_ranks(const struct cuda_backend *c, const struct expert_pending *p)
{
    return p->stream && c->fused.p2p.n_ranks > 0 &&
           p->down.down.width / FUSED_TILE * FUSED_RESULT_BYTES <= P2P_FUSED_BYTES;
}

enum experts_added cuda_experts_add(struct cuda_backend *c, struct mat out, struct mat x,
                                    struct mat y, const struct norm_args *n, bool partial)
{
    enum experts_added added = EXPERTS_ADDED;
    struct expert_pending *p = &c->experts;
    void *made = p->few ? p->down.y : p->combine.y;
    int32_t rows = p->few ? p->down.route.rows : p->combine.rows;

    if (!p->waits || (partial && !sums_over_ranks(c, p)) || made != y.data || x.cols != y.cols ||
        x.dtype != y.dtype || rows != cuda_rows(c, x) || !aligned(x)) {
        return EXPERTS_WAIT;
    }
    if (p->few) {
        p->down.y = x.data;
        p->down.y_stride = x.stride;
        p->down.adds = true;
        if (partial) {
            p->ranks = cuda_experts_ranks(c);
        }
    } else {
        p->combine.y = x.data;
        p->combine.y_stride = x.stride;
        p->combine.adds = true;
        if (sum_norms(c, &p->combine, out)) {
            p->combine.h = out.data;
            p->combine.h_stride = out.stride;
            p->combine.norm = *n;
            added = EXPERTS_NORMED;
        }
    }
    launch_pending(c, p);
    return added;
}

/* ---- the operation ---- */

/* All of it in one launch, which makes x by itself where that is a norm that waits to
 * join a fused launch. It is put off until the operations behind it are known. False:
 * nothing was done. */
static bool stream(struct cuda_backend *c, const struct expert_few *f, struct mat x)
{
    const struct fused_op *norm = cuda_fused_last_norm(c, x, f->route.rows);
    struct expert_few plain = *f, a;

    plain.exchange = c->expert_exchange;
    plain.route.scores_stride = div_ceil(f->route.n, 32) * 32;
    a = plain;
    if (norm) {
        a.normed = true;
        a.norm = norm->norm;
        a.up.x = norm->x;
        a.up.x_stride = norm->x_stride;
        a.h = x.transient ? NULL : x.data;
        a.h_stride = x.stride;
    }
    if (!norm || !expert_stream_fits(&a, c->n_sms) || !cuda_fused_drop_last(c)) {
        a = plain;
    }
    if (!expert_stream_fits(&a, c->n_sms)) {
        return false;
    }
    cuda_start(c);
    c->experts = (struct expert_pending){.waits = true, .few = true, .stream = true, .down = a};
    return true;
}

/* Whether x is quantised for both products, as the schemes of the files say. */
static bool quantises(const struct experts *e)
{
    const struct quant_weight *up = e->up.format ? e->up.priv : NULL,
                              *down = e->down.format ? e->down.priv : NULL;

    return up && down && up->quantises && down->quantises;
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

/* The parts of the shared expert that tiles of `rows` rows with wgmma multiply beside
 * the experts; 0: none. */
static int32_t parts_in_tiles(const struct experts *e, int32_t rows)
{
    int32_t parts = e->shared_up.data ? experts_parts(e->shared_down.cols, e->width) : 0;
    bool fits = parts > 0 && rows <= EXPERTS_PARTS_ROWS && mean_rows(e, rows) <= 64 &&
                !e->shared_up.format && !e->shared_down.format && e->swiglu_limit <= 0 &&
                e->top + parts <= EXPERT_MOST_TOP && e->n + parts <= EXPERT_MOST &&
                aligned(e->shared_up) && aligned(e->shared_down);

    return fits ? parts : 0;
}

static struct expert_way way_of(const struct cuda_backend *c, const struct experts *e,
                                const struct expert_scratch *s, struct mat x, int32_t rows)
{
    bool codes = e->up.format || e->down.format;
    struct expert_way w = {.rows = rows,
                           .free = !c->config.deterministic,
                           .own = !s->router_x.data && !e->router.format};

    w.e4m3 = quantises(e) && rows >= E4M3_ROWS;
    w.widens = codes && !w.e4m3 && w.free && rows >= rows_that_pay(WIDEN_ROWS, &c->speed);
    w.wgmma = (!codes || w.widens) && expert_tiles_fit(x.cols, e->width, (int32_t)x.dtype);
    w.parts = w.free && w.wgmma && rows > 0 ? parts_in_tiles(e, rows) : 0;
    return w;
}

/* From the router's product to the lists, and the codes of q unless that is NULL. */
static void route(struct backend *b, const struct expert_few *f, const struct expert_lists *l,
                  const struct expert_quantise *q, const struct experts *e, struct mat x,
                  const struct expert_scratch *s, const struct expert_way *w)
{
    struct cuda_backend *c = cuda_of(b);
    bool free = w->free && w->own;

    if (free && launch_expert_choose(f, l, q, c->stream)) {
        return;
    }
    if (!free || !launch_expert_router(f, c->stream)) {
        struct mat from = s->router_x.data ? s->router_x : x;
        cuda_linear(b, s->scores, from, e->router, &(struct epilogue){.bias = e->router_bias});
        cuda_start(c);
    }
    launch_expert_route(&f->route, l, q, c->stream);
}

/* Routing and both products, by lists. */
static void multiply_lists(struct backend *b, const struct expert_few *f,
                           const struct expert_lists *l, const struct experts *e, struct mat x,
                           const struct expert_scratch *s, const struct expert_way *w)
{
    struct cuda_backend *c = cuda_of(b);
    struct expert_product up = product_up(e, x, s), down = product_down(e, x, s);
    struct expert_quantise q;

    if (w->e4m3) {
        q = quantised(e, &up, &down, w->rows);
    }
    if (w->parts > 0) {
        add_parts(e, w->parts, &up, &down);
    }
    route(b, f, l, w->e4m3 ? &q : NULL, e, x, s, w);
    if (w->widens && e->up.format) {
        widen(c, &up, e->up);
    }
    down.ahead = product(c, &up, l, e->top, w->wgmma) && !w->widens;
    if (w->widens && e->down.format) {
        widen(c, &down, e->down);
    }
    product(c, &down, l, e->top, w->wgmma);
}

/* The sum of all, which waits. */
static void sum_later(struct cuda_backend *c, const struct expert_route *r,
                      const struct expert_lists *l, const struct experts *e, struct mat y,
                      struct mat x, const struct expert_scratch *s)
{
    bool product = e->shared_up.data && r->parts == 0; /* of the shared expert */
    struct expert_combine sum = {.y = y.data,
                                 .y_stride = y.stride,
                                 .pairs = s->pair_y.data,
                                 .pairs_stride = s->pair_y.stride,
                                 .weight = l->weight,
                                 .n_live = r->n_live,
                                 .shared = product ? s->y.data : NULL,
                                 .shared_stride = s->y.stride,
                                 .x = x.data,
                                 .gate = e->shared_gate.data,
                                 .x_stride = x.stride,
                                 .rows = r->rows,
                                 .top = e->top,
                                 .parts = r->parts,
                                 .hidden = x.cols,
                                 .type = (int32_t)x.dtype};

    c->experts = (struct expert_pending){.waits = true, .combine = sum};
}

void cuda_experts(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                  const struct expert_scratch *s)
{
    struct cuda_backend *c = cuda_of(b);
    int32_t rows = cuda_rows(c, y);
    bool padded = c->capturing && x.rows == c->batch.n_tokens;
    const int32_t *n_live = padded ? &c->arrays.header->n_tokens : NULL;
    struct expert_route r = routing(e, s->scores, rows, n_live);

    if (!takes(c, e)) {
        return;
    }
    r.load = rows > 0 ? cuda_expert_counts(c, e->n) : NULL;
    r.counter = c->expert_counter;
    struct expert_way w = way_of(c, e, s, x, rows);
    struct expert_few f = few_args(y, x, e, s, &r);
    if (w.free && w.own && rows > 0 && cuda_usable(c) && shared_joins(e) && stream(c, &f, x)) {
        return;
    }
    cuda_start(c); /* x is stored, though the next product were to read it alone */
    if (rows < 1 || !cuda_usable(c)) {
        return;
    }
    struct expert_lists l = lists_of(e, s, &w);
    if (w.free && w.own && !e->up.format && !e->down.format && !e->shared_up.data &&
        launch_expert_few(&f, &l, c->stream)) {
        c->experts = (struct expert_pending){.waits = true, .few = true, .down = f, .lists = l};
        return;
    }
    if (e->shared_up.data && w.parts == 0) {
        cuda_linear_gated(b, s->shared_act, s->shared_up, x, e->shared_up, (struct mat){0}, e->act);
        cuda_linear(b, mat_rows(s->y, 0, x.rows), s->shared_act, e->shared_down, NULL);
    }
    cuda_start(c);
    f.route.parts = w.parts;
    multiply_lists(b, &f, &l, e, x, s, &w);
    sum_later(c, &f.route, &l, e, y, x, s);
}
