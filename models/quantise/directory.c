/* Writing a directory of quantised weights (see quantise.h): which weights, with which
 * factors, and what they cost. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "models/quantise/quantise_internal.h"

/* ---- which weights ---- */

/* The largest group of int4, or that of fp4, that divides the columns of all linear
 * weights. ERR_UNSUPPORTED: none does. */
static int choose_group(struct conversion *k, struct err *e)
{
    bool int4 = k->rounding.format == FORMAT_INT4;
    int32_t group = int4 ? 128 : k->options->fp4_group, least = int4 ? 32 : group;

    for (int32_t i = 0; i < k->n_outputs && group > 0; i++) {
        const struct output *o = &k->output[i];
        while (o->linear && o->view.cols % group != 0) {
            group /= 2;
            if (group < least) {
                return err_set(e, ERR_UNSUPPORTED,
                               "%s has %" PRId64 " columns, which are no groups of %" PRId32,
                               output_name(o), o->view.cols, least);
            }
        }
    }
    k->rounding.group = group;
    return 0;
}

/* ---- factors ---- */

/* What a line of the report calls a product. */
static const char *product_name(int32_t product, char *ret, size_t cap)
{
    static const char *const NAMES[PRODUCTS] = {"q, k, v", "o",       "gate, up",
                                                "down",    "experts", "shared down"};

    if (product < PRODUCTS) {
        return NAMES[product];
    }
    snprintf(ret, cap, "expert %" PRId32 " down", product - PRODUCTS);
    return ret;
}

/* The weights of a layer that read the input of `product`: [at most all outputs] v. */
static struct readers readers_of(const struct conversion *k, int32_t layer, int32_t product,
                                 const struct weight_view **v)
{
    struct readers r = {.v = v};

    for (int32_t i = 0; i < k->n_outputs; i++) {
        const struct output *at = &k->output[i];
        if (at->linear && at->layer == layer && at->product == product) {
            v[r.n++] = &at->view;
        }
    }
    return r;
}

static const struct tensor *norm_of(const struct conversion *k, int32_t layer, int32_t product)
{
    for (int32_t i = 0; i < k->n_outputs; i++) {
        const struct output *at = &k->output[i];
        if (at->norm && at->layer == layer && at->product == product) {
            return at->t;
        }
    }
    return NULL;
}

/* Whether rows of a weight make the product's input, each a factor of one column: what
 * is linear in them, so not behind a limit, nor beside a bias. */
static bool has_rows(const struct conversion *k, int32_t layer, int32_t product)
{
    bool biased = product == PRODUCT_DOWN ? k->config.mlp_bias : k->config.experts.swiglu_limit > 0;

    for (int32_t i = 0; i < k->n_outputs && !biased; i++) {
        const struct output *at = &k->output[i];
        if (at->layer == layer && at->makes == product && at->up_from < at->view.rows) {
            return true;
        }
    }
    return false;
}

/* Whether something of the model can take the inverse of the factors. What a norm makes
 * with an offset on its weights is no power of two of what it made. */
static bool takes_factors(const struct conversion *k, int32_t layer, int32_t product)
{
    if (product == PRODUCT_DOWN || product == PRODUCT_SHARED_DOWN || product >= PRODUCTS) {
        return has_rows(k, layer, product);
    }
    bool exact = !product_is_routed(product) || k->config.norm_offset == 0;
    return product != PRODUCT_O && exact && norm_of(k, layer, product);
}

/* The factors of a product that some weights read, and what they do to it. */
static int find_factors(struct conversion *k, int32_t layer, int32_t product,
                        const struct readers *r, float *s, struct err *e)
{
    const struct quantise_options *o = k->options;
    const struct inputs *in = &k->inputs[layer * k->per_layer + product];
    bool powers = product_is_routed(product);
    const struct tensor *norm = norm_of(k, layer, product);
    double before, after;
    char name[64];

    int rc = o->search ? fold_search(r, in, &k->rounding, powers, s, e)
                       : fold_smooth(r, in, o->smooth, s, e);
    if (rc == 0 && powers) {
        fold_to_powers(s, in->cols);
    } else if (rc == 0 && norm) {
        rc = fold_round_factors(norm, k->config.norm_offset, s, e);
    }
    rc = rc < 0 ? rc : fold_error(r, in, &k->rounding, NULL, &before, e);
    rc = rc < 0 ? rc : fold_error(r, in, &k->rounding, s, &after, e);
    if (rc == 0) {
        fprintf(k->report, "layer %-3d %-50s %.3e, with factors %.3e\n", layer,
                product_name(product, name, sizeof(name)), before, after);
    }
    return rc;
}

/* Choose the factors of a product, and report what they do; v: see readers_of. */
static int choose_factors(struct conversion *k, int32_t layer, int32_t product,
                          const struct weight_view **v, struct err *e)
{
    int32_t at = layer * k->per_layer + product;

    if (k->inputs[at].cols == 0 || !takes_factors(k, layer, product)) {
        return 0;
    }
    struct readers r = readers_of(k, layer, product, v);
    if (r.n == 0) {
        return 0;
    }
    k->factor[at] = malloc((size_t)k->inputs[at].cols * sizeof(*k->factor[at]));
    return k->factor[at] ? find_factors(k, layer, product, &r, k->factor[at], e)
                         : err_nomem(e, "factors");
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
    int32_t n = k->config.n_layers * k->per_layer;
    const struct weight_view **v = calloc((size_t)k->n_outputs, sizeof(*v));
    int rc = 0;

    k->factor = calloc((size_t)n, sizeof(*k->factor));
    if (!k->factor || !v) {
        free(v);
        return err_nomem(e, "factors");
    }
    for (int32_t i = 0; i < n && rc == 0; i++) {
        rc = choose_factors(k, i / k->per_layer, i % k->per_layer, v, e);
    }
    free(v);
    return rc;
}

/* ---- experts ---- */

/* Of a layer's experts, how many no token came to; 0 where the layer has none. */
static int32_t experts_unseen(const struct conversion *k, int32_t layer)
{
    const struct inputs *in = &k->inputs[layer * k->per_layer + PRODUCTS];
    int32_t n = 0;

    for (int32_t x = 0; x < k->config.experts.n && k->config.experts.layer[layer]; x++) {
        n += in[x].cols == 0;
    }
    return n;
}

/* Experts without a token are rounded to nearest, without factors; their scales of
 * activations are those of all experts of the layer. */
static void report_unseen(const struct conversion *k)
{
    int32_t all = 0, unseen = 0;

    for (int32_t i = 0; i < k->config.n_layers; i++) {
        all += k->config.experts.layer[i] ? k->config.experts.n : 0;
        unseen += experts_unseen(k, i);
    }
    if (all > 0) {
        fprintf(k->report,
                "%d of %d experts see no token of the text: they are rounded to nearest\n", unseen,
                all);
    }
}

/* ---- scales of inputs ---- */

/* Whether the text has shown the input of every weight that is quantised, of experts of
 * one in the layer. */
static int check_inputs(const struct conversion *k, struct err *e)
{
    for (int32_t i = 0; i < k->n_outputs; i++) {
        const struct output *o = &k->output[i];
        const struct inputs *in = &k->inputs[o->layer * k->per_layer];
        bool seen = o->product >= PRODUCTS ? experts_unseen(k, o->layer) < k->config.experts.n
                                           : o->product != PRODUCT_NONE && in[o->product].cols > 0;
        if (o->linear && !seen) {
            return err_set(e, ERR_UNSUPPORTED,
                           "%s: a text does not show the input of this weight; leave its scale "
                           "to each token",
                           output_name(o));
        }
    }
    return 0;
}

/* One scale for the experts of a layer: engines that multiply all of them at once have
 * one, and an expert that few tokens came to gets inputs as large as the others do. */
static void share_scales(const struct conversion *k, float *scale, const struct inputs *in)
{
    float most = 0;

    for (int32_t x = 0; x < k->config.experts.n; x++) {
        most = in[x].cols > 0 ? fmaxf(most, scale[x]) : most;
    }
    for (int32_t x = 0; x < k->config.experts.n; x++) {
        scale[x] = most;
    }
}

static void choose_layer_scales(const struct conversion *k, int32_t layer)
{
    int32_t at = layer * k->per_layer;
    const struct inputs *in = &k->inputs[at];

    for (int32_t p = 0; p < k->per_layer; p++) {
        k->input_scale[at + p] =
            inputs_scale(&in[p], conversion_factors(k, layer, p), k->rounding.format);
    }
    share_scales(k, &k->input_scale[at + PRODUCTS], in + PRODUCTS);
    bool experts = k->config.experts.layer[layer];
    for (int32_t p = 0; p < PRODUCTS + experts; p++) {
        if (p == PRODUCTS || in[p].cols > 0) {
            fprintf(k->report, "layer %-3d %-50s input scale %.6e\n", layer,
                    p == PRODUCTS ? "experts' down" : product_name(p, NULL, 0),
                    (double)k->input_scale[at + p]);
        }
    }
}

/* The scales of the inputs as the factors leave them. */
static int choose_input_scales(struct conversion *k, struct err *e)
{
    int rc = check_inputs(k, e);

    if (rc < 0) {
        return rc;
    }
    k->input_scale =
        calloc((size_t)k->config.n_layers * (size_t)k->per_layer, sizeof(*k->input_scale));
    if (!k->input_scale) {
        return err_nomem(e, "scales");
    }
    for (int32_t i = 0; i < k->config.n_layers; i++) {
        choose_layer_scales(k, i);
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
    if (rc == 0 && gather) {
        report_unseen(k);
    }
    rc = rc < 0 || !factors ? rc : choose_all_factors(k, e);
    return rc < 0 || !o->fixed ? rc : choose_input_scales(k, e);
}

/* What the written directory makes of the other half. */
static int score_written(const struct conversion *k, double before, struct err *e)
{
    const struct quantise_options *o = k->options;
    const struct input_rounding inputs = {.format = o->format};
    int32_t half = o->n_tokens / 2, n;
    double loss;
    struct scorer s;
    int rc = scorer_init(&s, k->partial, NULL, 0, e);

    if (rc < 0) {
        return rc;
    }
    /* products themselves round by scales of the file */
    bool rounded = o->format == FORMAT_INT4 || o->format == FORMAT_FP4 || o->fixed;
    rc = rounded
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
    int rc = quantise_write_files(k, e);

    if (rc < 0) {
        return rc;
    }
    k->out = quantise_create(k, QUANTISE_WEIGHTS, e);
    if (!k->out) {
        return ERR_IO;
    }
    rc = quantise_write_weights(k, e);
    bool closed = quantise_close(k->out);
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

/* The same with a report of its own, if the caller has none. */
static int convert_reported(struct conversion *k, struct err *e)
{
    FILE *own = !k->report ? quantise_create(k, QUANTISE_REPORT, e) : NULL;

    k->report = k->report ? k->report : own;
    int rc = k->report ? convert(k, e) : ERR_IO;
    bool closed = !own || quantise_close(own);
    return rc < 0 || closed ? rc : quantise_failed(k, QUANTISE_REPORT, e);
}

/* Nothing is left behind after a failure. */
static int convert_whole(struct conversion *k, struct err *e)
{
    int rc = target_begin(k, e);

    if (rc < 0) {
        return rc;
    }
    rc = convert_reported(k, e);
    rc = rc < 0 ? rc : target_finish(k, e);
    if (rc < 0) {
        quantise_discard(k->partial);
    }
    return rc;
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
    int32_t n = k->config.n_layers * k->per_layer;

    for (int32_t i = 0; k->factor && i < n; i++) {
        free(k->factor[i]);
    }
    free(k->factor);
    free(k->input_scale);
    inputs_free(k->inputs, n);
    quantise_free_outputs(k);
    checkpoint_free(k->c);
}

int quantise_directory(const char *from, const char *to, const struct quantise_options *o,
                       FILE *report, struct err *e)
{
    char partial[4096];
    struct conversion k = {.from = from,
                           .to = to,
                           .partial = partial,
                           .options = o,
                           .rounding = {.format = o->format, .zeros = o->zeros},
                           .report = report};
    const struct architecture *a;
    struct generation_defaults gen;

    int rc = quantise_check_source(from, e);

    rc = rc < 0 ? rc : check_options(o, e);
    rc = rc < 0 ? rc : quantise_partial(partial, sizeof(partial), to, getpid(), e);
    rc = rc < 0 ? rc : model_config_read(&k.config, &gen, from, e);
    rc = rc < 0 ? rc : checkpoint_open(&k.c, from, e);
    if (rc < 0) {
        return rc;
    }
    k.root = model_family_find(k.config.architecture, &a);
    k.family = k.root ? model_family_stored(k.root, k.c, &k.config) : NULL;
    k.per_layer = inputs_per_layer(&k.config);
    rc = k.family ? transformer_check(k.family, &k.config, k.c, e)
                  : err_set(e, ERR_UNSUPPORTED, "architecture %s", k.config.architecture);
    rc = rc < 0 ? rc : quantise_list_outputs(&k, e);
    rc = rc < 0 ? rc : convert_whole(&k, e);
    release(&k);
    return rc;
}
