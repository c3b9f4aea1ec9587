/* Inputs of products, watched or rounded on their way into them (see inputs.h).
 *
 * The backend's table of operations is exchanged for one whose products look at their
 * input first. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/families/layers.h"
#include "models/quantise/inputs.h"

struct tap {
    struct backend_ops ops; /* in the backend's place for its own */
    const struct backend_ops *own;
    const struct transformer *t;
    /* [n_layers * per_layer] to be filled; NULL: inputs are rounded */
    struct inputs *inputs;
    int32_t per_layer; /* inputs_per_layer() */
    int64_t every;     /* tokens between those of the sample */
    /* While `experts` runs: what it got, the layer, and whether an expert's down comes
     * next. */
    const struct experts *experts;
    int32_t layer;
    bool down_next;
    struct input_rounding rounding;
    float *row;      /* [most columns] one row of an input; owned */
    struct err *err; /* of the first failure; code 0: none */
};

static bool same(struct mat a, struct mat b)
{
    return a.priv == b.priv && a.data == b.data && a.rows == b.rows && a.cols == b.cols;
}

/* The expert whose down w is, of weights of floats; of others, whose rows need not be
 * neighbours, 0. */
static int32_t expert_of(const struct experts *e, struct mat w)
{
    int64_t row = w.stride * dtype_bytes(w.dtype);

    return w.format ? 0 : (int32_t)(((char *)w.data - (char *)e->down.data) / (row * w.rows));
}

/* The product of the layer that `experts` multiplies with w; PRODUCT_NONE: one whose
 * input is left alone, or was watched before. An expert's two products follow each
 * other. */
static int32_t product_of_experts(struct tap *t, struct mat w)
{
    const struct experts *e = t->experts;
    int32_t reads = t->inputs ? PRODUCT_NONE : PRODUCT_EXPERTS;

    if (same(w, e->router) || same(w, e->shared_gate)) {
        return PRODUCT_NONE;
    }
    if (same(w, e->shared_up) || same(w, e->shared_down)) {
        return same(w, e->shared_up) ? reads : PRODUCT_SHARED_DOWN;
    }
    t->down_next = !t->down_next;
    return t->down_next ? reads : PRODUCTS + e->first + expert_of(e, w);
}

/* The index in `inputs` of the product with weight w; -1: none that is watched. */
static int32_t product_of(struct tap *t, struct mat w)
{
    if (t->experts) {
        int32_t p = product_of_experts(t, w);
        return p == PRODUCT_NONE ? -1 : t->layer * t->per_layer + p;
    }
    for (int32_t i = 0; i < t->t->n_layers; i++) {
        const struct layer *l = &t->t->layer[i];
        struct mat weight[PRODUCTS] = {[PRODUCT_QKV] = l->qkv,
                                       [PRODUCT_O] = l->o,
                                       [PRODUCT_UP] = l->up,
                                       [PRODUCT_DOWN] = l->down};
        for (int32_t p = 0; p < PRODUCTS; p++) {
            if (weight[p].cols > 0 && same(weight[p], w)) {
                return i * t->per_layer + p;
            }
        }
    }
    return -1;
}

/* ---- watching ---- */

static int inputs_init(struct inputs *in, int32_t cols)
{
    size_t n = (size_t)cols;

    in->most = calloc(n, sizeof(*in->most));
    in->sum = calloc(n, sizeof(*in->sum));
    in->squares = calloc(n, sizeof(*in->squares));
    in->cols = cols;
    return in->most && in->sum && in->squares ? 0 : -1;
}

/* Room for a row more of the sample, which few tokens of an expert may fill. */
static int grow_sample(struct inputs *in)
{
    size_t n = (size_t)in->n_samples;

    if ((n & (n - 1)) != 0) { /* there is room up to the next power of two */
        return 0;
    }
    float *more = realloc(in->sample, MAX(2 * n, 1) * (size_t)in->cols * sizeof(*more));
    in->sample = more ? more : in->sample;
    return more ? 0 : -1;
}

static int add_row(struct inputs *in, const float *x, int64_t every)
{
    for (int32_t c = 0; c < in->cols; c++) {
        in->most[c] = fmaxf(in->most[c], fabsf(x[c]));
        in->sum[c] += (double)fabsf(x[c]);
        in->squares[c] += (double)x[c] * x[c];
    }
    if (in->n++ % every == 0 && in->n_samples < INPUT_SAMPLES) {
        if (grow_sample(in) < 0) {
            return -1;
        }
        memcpy(in->sample + (ptrdiff_t)in->n_samples++ * in->cols, x,
               (size_t)in->cols * sizeof(*x));
    }
    return 0;
}

static void watch(struct tap *t, struct backend *b, struct mat x, int32_t product)
{
    struct inputs *in = &t->inputs[product];

    if (t->err->code != 0) {
        return;
    }
    if (in->cols == 0 && inputs_init(in, x.cols) < 0) {
        err_nomem(t->err, "the inputs of a layer");
        return;
    }
    for (int32_t r = 0; r < x.rows; r++) {
        if (t->own->download(b, mat_rows(x, r, 1), t->row, t->err) < 0) {
            return;
        }
        if (add_row(in, t->row, t->every) < 0) {
            err_nomem(t->err, "the inputs of a layer");
        }
    }
}

/* ---- rounding ---- */

static float scale_of(enum weight_format_id f, float most)
{
    return most > 0 ? most / (f == FORMAT_FP8 ? 448.0f : 127.0f) : 1;
}

static float token_scale(enum weight_format_id f, const float *x, int32_t n)
{
    float most = 0;

    for (int32_t i = 0; i < n; i++) {
        most = fmaxf(most, fabsf(x[i]));
    }
    return scale_of(f, most);
}

float inputs_scale(const struct inputs *in, const float *factor, enum weight_format_id format)
{
    float most = 0;

    for (int32_t j = 0; j < in->cols; j++) {
        most = fmaxf(most, in->most[j] / (factor ? factor[j] : 1));
    }
    return scale_of(format, most);
}

/* x is written back: products that share it get the same codes, and no operation but
 * products reads it. */
static void round_input(struct tap *t, struct backend *b, struct mat x, int32_t product)
{
    enum weight_format_id f = t->rounding.format;
    const float *fixed = t->rounding.scale;

    for (int32_t r = 0; r < x.rows && t->err->code == 0; r++) {
        struct mat row = mat_rows(x, r, 1);
        if (t->own->download(b, row, t->row, t->err) == 0) {
            float scale = fixed ? fixed[product] : token_scale(f, t->row, x.cols);
            for (int32_t i = 0; i < x.cols; i++) {
                t->row[i] = weight_act_round(f, scale, t->row[i]);
            }
            t->own->upload(b, row, t->row, t->err);
        }
    }
}

/* ---- the exchanged table ---- */

static struct tap *tap_of(const struct backend *b)
{
    return CONTAINER_OF(b->ops, struct tap, ops);
}

static void look_at(struct backend *b, struct mat x, struct mat w)
{
    struct tap *t = tap_of(b);
    int32_t product = product_of(t, w);

    if (product >= 0 && t->inputs) {
        watch(t, b, x, product);
    } else if (product >= 0) {
        round_input(t, b, x, product);
    }
}

static void tapped_linear(struct backend *b, struct mat out, struct mat x, struct mat w,
                          const struct epilogue *ep)
{
    look_at(b, x, w);
    tap_of(b)->own->linear(b, out, x, w, ep);
}

static void tapped_linear_gated(struct backend *b, struct mat out, struct mat workspace,
                                struct mat x, struct mat w, struct mat bias, enum activation act)
{
    look_at(b, x, w);
    tap_of(b)->own->linear_gated(b, out, workspace, x, w, bias, act);
}

static void tapped_experts(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                           const struct expert_scratch *s)
{
    struct tap *t = tap_of(b);

    t->layer = 0;
    while (!same(t->t->layer[t->layer].experts.up, e->up)) {
        t->layer++;
    }
    if (t->inputs) {
        watch(t, b, x, t->layer * t->per_layer + PRODUCT_EXPERTS);
    }
    t->experts = e;
    t->down_next = false;
    t->own->experts(b, y, x, e, s);
    t->experts = NULL;
}

static int32_t most_columns(const struct transformer *t)
{
    int32_t n = 1;

    for (int32_t i = 0; i < t->n_layers; i++) {
        const struct layer *l = &t->layer[i];
        const struct experts *e = &l->experts;
        n = MAX(n, MAX(MAX(l->qkv.cols, l->o.cols), MAX(l->up.cols, l->down.cols)));
        n = MAX(n, MAX(MAX(e->up.cols, e->down.cols), e->shared_down.cols));
    }
    return n;
}

/* The loss of the text while the tap is in place. */
static int tapped_loss(struct tap *t, struct scorer *s, const int32_t *token, int32_t n,
                       double *ret_loss, int32_t *ret_n, struct err *e)
{
    struct err own = {0};

    t->own = s->backend->ops;
    t->ops = *t->own;
    t->ops.linear = tapped_linear;
    t->ops.linear_gated = tapped_linear_gated;
    t->ops.experts = tapped_experts;
    t->per_layer = inputs_per_layer(&s->config);
    t->t = s->model->weights;
    t->err = &own;
    t->row = calloc((size_t)most_columns(t->t), sizeof(*t->row));
    if (!t->row) {
        return err_nomem(e, "inputs");
    }
    s->backend->ops = &t->ops;
    int rc = scorer_loss(s, token, n, ret_loss, ret_n, e);
    s->backend->ops = t->own;
    free(t->row);
    if (rc == 0 && own.code != 0) {
        *e = own;
        rc = own.code;
    }
    return rc;
}

int inputs_gather(struct scorer *s, const int32_t *token, int32_t n, struct inputs **ret,
                  struct err *e)
{
    int32_t n_inputs = s->model->weights->n_layers * inputs_per_layer(&s->config);
    struct tap t = {.every = MAX(n / INPUT_SAMPLES, 1)};

    t.inputs = calloc((size_t)n_inputs, sizeof(*t.inputs));
    if (!t.inputs) {
        return err_nomem(e, "inputs");
    }
    double loss;
    int32_t n_scored;
    int rc = tapped_loss(&t, s, token, n, &loss, &n_scored, e);
    if (rc < 0) {
        inputs_free(t.inputs, n_inputs);
        return rc;
    }
    *ret = t.inputs;
    return 0;
}

void inputs_free(struct inputs *in, int32_t n)
{
    for (int32_t i = 0; in && i < n; i++) {
        free(in[i].most);
        free(in[i].sum);
        free(in[i].squares);
        free(in[i].sample);
    }
    free(in);
}

int inputs_rounded_loss(struct scorer *s, const struct input_rounding *how, const int32_t *token,
                        int32_t n, double *ret_loss, int32_t *ret_n, struct err *e)
{
    return tapped_loss(&(struct tap){.rounding = *how}, s, token, n, ret_loss, ret_n, e);
}
