/* Writing a directory of quantised weights (see quantise.h): which weights, with which
 * factors, and what they cost.
 *
 * What a failure leaves behind does not load: its weights are cut short. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "models/checkpoint/gguf/gguf.h"
#include "models/quantise/quantise_internal.h"

/* ---- which weights ---- */

/* Weights of products in layers, as the family's table has them. */
static bool is_linear(const struct tensor_spec *s)
{
    return s->kind == WEIGHT_LINEAR && s->cols != DIM_ONE && !s->transposed &&
           tensor_spec_indices(s) == 1 && !tensor_spec_stacked(s) && s->rows != DIM_EXPERTS &&
           s->rows != DIM_ONE && s->rows != DIM_K_UP && s->rows != DIM_V_UP;
}

static enum product product_of(const struct tensor_spec *s)
{
    return s->target == IN_LAYER(qkv)    ? PRODUCT_QKV
           : s->target == IN_LAYER(o)    ? PRODUCT_O
           : s->target == IN_LAYER(up)   ? PRODUCT_UP
           : s->target == IN_LAYER(down) ? PRODUCT_DOWN
                                         : PRODUCTS;
}

/* The first of its rows that make the input of down; `second`: the layer has another
 * tensor of gate or up before this one. */
static int64_t up_from(const struct tensor_spec *s, const struct tensor *t, bool second)
{
    return s->rows == DIM_GATE_UP ? t->dim[0] / 2 : second ? 0 : t->dim[0];
}

/* The place of a layer's tensor; returns whether it is quantised. */
static bool mark(struct conversion *k, const struct tensor_spec *s, int32_t layer)
{
    const struct tensor *t = tensor_spec_find(s, k->c, (struct tensor_index){layer, -1});

    if (!t || !tensor_spec_wanted(s, &k->config, layer)) {
        return false;
    }
    struct place *p = &k->place[t - checkpoint_at(k->c, 0)];
    bool second = s > k->family->tensors && s[-1].target == s->target;
    *p = (struct place){.linear = is_linear(s), .layer = layer, .product = product_of(s)};
    p->up_from = p->linear ? up_from(s, t, second) : 0;
    if (s->target == IN_LAYER(attn_norm.weight) || s->target == IN_LAYER(mlp_norm.weight)) {
        p->norm = true;
        p->product = s->target == IN_LAYER(attn_norm.weight) ? PRODUCT_QKV : PRODUCT_UP;
    }
    return p->linear;
}

/* Returns the number of weights to be quantised. */
static int32_t mark_tensors(struct conversion *k)
{
    int32_t n = 0;

    for (const struct tensor_spec *s = k->family->tensors; s->name; s++) {
        for (int32_t i = 0; i < k->config.n_layers && tensor_spec_indices(s) == 1; i++) {
            n += mark(k, s, i);
        }
    }
    return n;
}

/* The largest group of int4, or that of fp4, that divides the columns of all linear
 * weights. ERR_UNSUPPORTED: none does. */
static int choose_group(struct conversion *k, struct err *e)
{
    bool int4 = k->rounding.format == FORMAT_INT4;
    int32_t group = int4 ? 128 : k->options->fp4_group, least = int4 ? 32 : group;

    for (int32_t i = 0; i < checkpoint_count(k->c) && group > 0; i++) {
        const struct tensor *t = checkpoint_at(k->c, i);
        while (k->place[i].linear && t->dim[1] % group != 0) {
            group /= 2;
            if (group < least) {
                return err_set(e, ERR_UNSUPPORTED,
                               "%s has %" PRId64 " columns, which are no groups of %" PRId32,
                               t->name, t->dim[1], least);
            }
        }
    }
    k->rounding.group = group;
    return 0;
}

/* ---- factors ---- */

/* The weights of a layer that read the input of `p`. */
static struct readers readers_of(const struct conversion *k, int32_t layer, enum product p)
{
    struct readers r = {.n = 0};

    for (int32_t i = 0; i < checkpoint_count(k->c) && r.n < READERS; i++) {
        const struct place *at = &k->place[i];
        if (at->linear && at->layer == layer && at->product == p) {
            r.t[r.n++] = checkpoint_at(k->c, i);
        }
    }
    return r;
}

static const struct tensor *norm_of(const struct conversion *k, int32_t layer, enum product p)
{
    for (int32_t i = 0; i < checkpoint_count(k->c); i++) {
        const struct place *at = &k->place[i];
        if (at->norm && at->layer == layer && at->product == p) {
            return checkpoint_at(k->c, i);
        }
    }
    return NULL;
}

/* Whether something of the model can take the inverse of the factors. */
static bool takes_factors(const struct conversion *k, int32_t layer, enum product p)
{
    return p == PRODUCT_DOWN ? !k->config.mlp_bias : p != PRODUCT_O && norm_of(k, layer, p);
}

/* Choose the factors of a product, and report what they do. */
static int choose_factors(struct conversion *k, int32_t layer, enum product p, struct err *e)
{
    static const char *const NAMES[] = {"q, k, v", "o", "gate, up", "down"};
    const struct quantise_options *o = k->options;
    const struct inputs *in = &k->inputs[layer * PRODUCTS + p];
    struct readers r = readers_of(k, layer, p);
    double before, after;

    if (in->cols == 0 || r.n == 0 || !takes_factors(k, layer, p)) {
        return 0;
    }
    float *s = malloc((size_t)in->cols * sizeof(*s));
    k->factor[layer * PRODUCTS + p] = s;
    if (!s) {
        return err_nomem(e, "factors");
    }
    int rc =
        o->search ? fold_search(&r, in, &k->rounding, s, e) : fold_smooth(&r, in, o->smooth, s, e);
    if (rc == 0 && p != PRODUCT_DOWN) {
        rc = fold_round_factors(norm_of(k, layer, p), k->config.norm_offset, s, e);
    }
    rc = rc < 0 ? rc : fold_error(&r, in, &k->rounding, NULL, &before, e);
    rc = rc < 0 ? rc : fold_error(&r, in, &k->rounding, s, &after, e);
    if (rc == 0) {
        fprintf(k->report, "layer %-3d %-50s %.3e, with factors %.3e\n", layer, NAMES[p], before,
                after);
    }
    return rc;
}

/* Factors need a norm or up's rows in front of every product, as in LLaMA's layers. */
static int check_factors(const struct conversion *k, struct err *e)
{
    if (k->family->forward != llama_forward || k->config.norm != NORM_RMS ||
        !k->config.norm_before) {
        return err_set(e, ERR_UNSUPPORTED, "%s: factors are for models with LLaMA's layers",
                       k->config.architecture);
    }
    return 0;
}

static int choose_all_factors(struct conversion *k, struct err *e)
{
    int rc = 0;

    k->factor = calloc((size_t)k->config.n_layers * PRODUCTS, sizeof(*k->factor));
    if (!k->factor) {
        return err_nomem(e, "factors");
    }
    for (int32_t i = 0; i < k->config.n_layers * PRODUCTS && rc == 0; i++) {
        rc = choose_factors(k, i / PRODUCTS, (enum product)(i % PRODUCTS), e);
    }
    return rc;
}

/* ---- scales of inputs ---- */

/* Whether the text has shown the input of every weight that is quantised. */
static int check_inputs(const struct conversion *k, struct err *e)
{
    for (int32_t i = 0; i < checkpoint_count(k->c); i++) {
        const struct place *p = &k->place[i];
        if (p->linear &&
            (p->product == PRODUCTS || k->inputs[p->layer * PRODUCTS + p->product].cols == 0)) {
            return err_set(e, ERR_UNSUPPORTED,
                           "%s: a text does not show the input of this weight; leave its scale "
                           "to each token",
                           checkpoint_at(k->c, i)->name);
        }
    }
    return 0;
}

/* The scales of the inputs as the factors leave them. */
static int choose_input_scales(struct conversion *k, struct err *e)
{
    static const char *const NAMES[] = {"q, k, v", "o", "gate, up", "down"};
    int rc = check_inputs(k, e);

    if (rc < 0) {
        return rc;
    }
    k->input_scale = calloc((size_t)k->config.n_layers * PRODUCTS, sizeof(*k->input_scale));
    if (!k->input_scale) {
        return err_nomem(e, "scales");
    }
    for (int32_t i = 0; i < k->config.n_layers * PRODUCTS; i++) {
        int32_t layer = i / PRODUCTS, p = i % PRODUCTS;
        k->input_scale[i] = inputs_scale(
            &k->inputs[i], conversion_factors(k, layer, (enum product)p), k->rounding.format);
        if (k->inputs[i].cols > 0) {
            fprintf(k->report, "layer %-3d %-50s input scale %.6e\n", layer, NAMES[p],
                    (double)k->input_scale[i]);
        }
    }
    return 0;
}

/* Run half of the text, and choose what it is for. */
static int calibrate(struct conversion *k, double *ret_before, struct err *e)
{
    const struct quantise_options *o = k->options;
    int32_t half = o->n_tokens / 2, n;
    struct scorer s;
    bool factors = o->smooth > 0 || o->search, gather = factors || o->fixed;
    int rc = factors ? check_factors(k, e) : 0;

    if (rc < 0) {
        return rc;
    }
    rc = scorer_init(&s, k->from, NULL, 0, e);
    if (rc < 0) {
        return rc;
    }
    rc = scorer_loss(&s, o->token + half, o->n_tokens - half, ret_before, &n, e);
    *ret_before = rc == 0 ? exp(*ret_before / n) : 0;
    rc = rc < 0 || !gather ? rc : inputs_gather(&s, o->token, half, &k->inputs, e);
    scorer_release(&s);
    rc = rc < 0 || !factors ? rc : choose_all_factors(k, e);
    return rc < 0 || !o->fixed ? rc : choose_input_scales(k, e);
}

/* What the written directory makes of the other half. */
static int score_written(const struct conversion *k, double before, struct err *e)
{
    const struct quantise_options *o = k->options;
    const struct input_rounding inputs = {.format = o->format, .scale = k->input_scale};
    int32_t half = o->n_tokens / 2, n;
    double loss;
    struct scorer s;
    int rc = scorer_init(&s, k->to, NULL, 0, e);

    if (rc < 0) {
        return rc;
    }
    rc = o->format == FORMAT_INT4 || o->format == FORMAT_FP4
             ? scorer_loss(&s, o->token + half, o->n_tokens - half, &loss, &n, e)
             : inputs_rounded_loss(&s, &inputs, o->token + half, o->n_tokens - half, &loss, &n, e);
    scorer_release(&s);
    if (rc == 0) {
        fprintf(k->report, "perplexity of %d tokens %.4f, quantised %.4f\n", n, before,
                exp(loss / n));
    }
    return rc;
}

/* ---- all of it ---- */

static int write_directory(struct conversion *k, struct err *e)
{
    if (mkdir(k->to, 0777) != 0) {
        return err_set(e, ERR_IO, "%s: %s", k->to, strerror(errno));
    }
    int rc = quantise_write_files(k, e);
    if (rc < 0) {
        return rc;
    }
    k->out = quantise_create(k, QUANTISE_WEIGHTS, e);
    if (!k->out) {
        return ERR_IO;
    }
    rc = quantise_write_weights(k, e);
    bool closed = fclose(k->out) == 0;
    return rc < 0 || closed ? rc : quantise_failed(k, QUANTISE_WEIGHTS, e);
}

static int convert(struct conversion *k, struct err *e)
{
    bool text = k->options->n_tokens > 0;
    double before = 0;
    int rc = choose_group(k, e);

    rc = rc < 0 || !text ? rc : calibrate(k, &before, e);
    rc = rc < 0 ? rc : write_directory(k, e);
    return rc < 0 || !text ? rc : score_written(k, before, e);
}

static int check_options(const struct quantise_options *o, struct err *e)
{
    if ((o->smooth > 0 && o->format != FORMAT_INT8) ||
        (o->search && o->format != FORMAT_INT8 && o->format != FORMAT_INT4)) {
        return err_set(e, ERR_UNSUPPORTED, "smoothing is for int8, and a search for int8 and int4");
    }
    if (o->zeros && o->format != FORMAT_INT8 && o->format != FORMAT_INT4) {
        return err_set(e, ERR_UNSUPPORTED, "zero points are for int8 and int4");
    }
    if (o->fixed && o->format != FORMAT_INT8 && o->format != FORMAT_FP8) {
        return err_set(e, ERR_UNSUPPORTED,
                       "scales of activations are for fp8 and int8: other formats leave "
                       "activations as they are");
    }
    if ((o->smooth > 0 || o->search || o->fixed || o->n_tokens > 0) && o->n_tokens < 8) {
        return err_set(e, ERR_INVALID, "a text of at least 8 tokens is needed");
    }
    return 0;
}

static void release(struct conversion *k)
{
    for (int32_t i = 0; k->factor && i < k->config.n_layers * PRODUCTS; i++) {
        free(k->factor[i]);
    }
    free(k->factor);
    free(k->input_scale);
    inputs_free(k->inputs, k->config.n_layers);
    free(k->place);
    checkpoint_free(k->c);
}

int quantise_directory(const char *from, const char *to, const struct quantise_options *o,
                       FILE *report, struct err *e)
{
    struct conversion k = {.from = from,
                           .to = to,
                           .options = o,
                           .rounding = {.format = o->format, .zeros = o->zeros},
                           .report = report};
    const struct architecture *a;
    struct generation_defaults gen;

    if (gguf_is_file(from)) {
        return err_set(e, ERR_UNSUPPORTED, "%s is a GGUF file, a directory is needed", from);
    }
    int rc = check_options(o, e);
    rc = rc < 0 ? rc : model_config_read(&k.config, &gen, from, e);
    rc = rc < 0 ? rc : checkpoint_open(&k.c, from, e);
    if (rc < 0) {
        return rc;
    }
    k.family = model_family_find(k.config.architecture, &a);
    k.place = calloc((size_t)MAX(checkpoint_count(k.c), 1), sizeof(*k.place));
    rc = !k.family  ? err_set(e, ERR_UNSUPPORTED, "architecture %s", k.config.architecture)
         : !k.place ? err_nomem(e, from)
                    : transformer_check(k.family, &k.config, k.c, e);
    if (rc == 0 && (k.config.experts.n > 0 || mark_tensors(&k) == 0)) {
        rc = err_set(e, ERR_UNSUPPORTED, "%s: models %s are not quantised", k.config.architecture,
                     k.config.experts.n > 0 ? "with experts" : "whose weights are transposed");
    }
    rc = rc < 0 ? rc : convert(&k, e);
    release(&k);
    return rc;
}
