/* The tensors of a quantised directory (see quantise.h): which of the old file's they
 * are, which are quantised, and what they read and make.
 *
 * compressed-tensors has a weight for each product, so a tensor that holds all experts
 * of a layer becomes the tensors of the family's other table, those of one expert each.
 * Rows with the same target belong together: gate's and up's part of the old tensor are
 * rows in turn, or halves. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "models/quantise/quantise_internal.h"

/* How the names of modules' weights end. */
static const char WEIGHT[] = ".weight";

/* What the family's table says of a stored tensor. */
struct mention {
    const struct tensor_spec *spec; /* the first row of its name; NULL: none */
    struct tensor_index at;         /* of the tensor, among those of the row */
};

/* ---- the table ---- */

static bool of_experts(const struct tensor_spec *s)
{
    return tensor_spec_indices(s) == 2 || tensor_spec_stacked(s);
}

/* Weights of products in layers. */
static bool is_product(const struct tensor_spec *s)
{
    return s->kind == WEIGHT_LINEAR && s->cols != DIM_ONE && tensor_spec_indices(s) > 0;
}

/* Those of them that are quantised: not what makes a few values of a token, nor what is
 * taken apart while loading. */
static bool is_linear(const struct tensor_spec *s)
{
    return is_product(s) && (!s->transposed || tensor_spec_stacked(s)) && s->rows != DIM_EXPERTS &&
           s->rows != DIM_ONE && s->rows != DIM_K_UP && s->rows != DIM_V_UP;
}

static int32_t product_of(const struct tensor_spec *s, int32_t expert)
{
    static const struct {
        size_t target;
        int32_t product;
    } TARGETS[] = {{IN_LAYER(qkv), PRODUCT_QKV},
                   {IN_LAYER(o), PRODUCT_O},
                   {IN_LAYER(up), PRODUCT_UP},
                   {IN_LAYER(down), PRODUCT_DOWN},
                   {IN_LAYER(experts.up), PRODUCT_EXPERTS},
                   {IN_LAYER(experts.router), PRODUCT_EXPERTS},
                   {IN_LAYER(experts.shared_up), PRODUCT_EXPERTS},
                   {IN_LAYER(experts.shared_gate), PRODUCT_EXPERTS},
                   {IN_LAYER(experts.shared_down), PRODUCT_SHARED_DOWN}};

    if (s->target == IN_LAYER(experts.down)) {
        return PRODUCTS + expert;
    }
    for (size_t i = 0; i < ARRAY_LEN(TARGETS); i++) {
        if (s->target == TARGETS[i].target) {
            return TARGETS[i].product;
        }
    }
    return PRODUCT_NONE;
}

/* The product that reads what rows of the row's tensor make. */
static int32_t made_by(const struct tensor_spec *s, int32_t expert)
{
    return s->target == IN_LAYER(up)                  ? PRODUCT_DOWN
           : s->target == IN_LAYER(experts.shared_up) ? PRODUCT_SHARED_DOWN
           : s->target == IN_LAYER(experts.up)        ? PRODUCTS + expert
                                                      : PRODUCT_NONE;
}

/* The first of `rows` rows that make what down reads; `second`: the table has another
 * row of gate or up before this one. */
static int64_t up_from(const struct tensor_spec *s, int64_t rows, bool second)
{
    bool both = s->rows == DIM_GATE_UP || s->rows == DIM_SHARED_GATE_UP;

    return both ? rows / 2 : second ? 0 : rows;
}

/* The table whose experts have tensors of their own; NULL: there is none. */
static const struct tensor_spec *table_apart(const struct model_family *f)
{
    const struct tensor_spec *ret = NULL;

    for (; f; f = f->variant) { /* the last one has the finest tensors */
        for (const struct tensor_spec *s = f->tensors; s->name; s++) {
            ret = tensor_spec_indices(s) == 2 ? f->tensors : ret;
        }
    }
    return ret;
}

/* Row i of those of a table with the target of `like`, which are experts', in its
 * order; *ret_n: how many there are. */
static const struct tensor_spec *row_of_target(const struct tensor_spec *table,
                                               const struct tensor_spec *like, int32_t i,
                                               int32_t *ret_n)
{
    const struct tensor_spec *found = NULL;

    *ret_n = 0;
    for (const struct tensor_spec *s = table; s->name; s++) {
        if (s->target == like->target && of_experts(s)) {
            found = *ret_n == i ? s : found;
            (*ret_n)++;
        }
    }
    return found;
}

/* ---- outputs ---- */

/* What the row of the table says of its tensor, or of the part that is an expert's. */
static void describe(struct output *o, const struct tensor_spec *s, bool second, int32_t layer,
                     int32_t expert)
{
    o->layer = layer;
    o->linear = is_linear(s);
    o->product_alone = is_product(s) && !o->linear;
    o->product = is_product(s) ? product_of(s, expert) : PRODUCT_NONE;
    o->makes = o->linear ? made_by(s, expert) : PRODUCT_NONE;
    o->up_from = up_from(s, o->view.rows, second);
}

/* A norm in front of a product of the layer. */
static void describe_norm(const struct conversion *k, struct output *o, const struct tensor_spec *s)
{
    if (s->target == IN_LAYER(attn_norm.weight) || s->target == IN_LAYER(mlp_norm.weight)) {
        bool mlp = s->target == IN_LAYER(mlp_norm.weight);
        o->norm = true;
        o->product = !mlp                                ? PRODUCT_QKV
                     : k->config.experts.layer[o->layer] ? PRODUCT_EXPERTS
                                                         : PRODUCT_UP;
    }
}

static void add_whole(struct conversion *k, const struct tensor *t, const struct mention *m)
{
    struct output *o = &k->output[k->n_outputs++];
    const struct tensor_spec *s = m->spec;

    *o = (struct output){.t = t, .product = PRODUCT_NONE, .makes = PRODUCT_NONE};
    if (t->n_dims == 2) {
        o->view = weight_view_of(t);
    }
    if (s && tensor_spec_indices(s) > 0) {
        bool second = s > k->family->tensors && s[-1].target == s->target;
        describe(o, s, second, m->at.layer, m->at.expert);
        describe_norm(k, o, s);
    }
    size_t len = strlen(t->name), n = strlen(WEIGHT);
    bool named = t->n_dims == 2 && len > n && strcmp(t->name + len - n, WEIGHT) == 0;
    o->product_alone = named && (!s || o->product_alone);
}

/* "model.layers.3." of the tensor's name, whatever stands before it, and what the row
 * `apart` names behind it; NULL: out of memory. */
static char *part_name(const struct tensor *t, const struct tensor_spec *apart,
                       struct tensor_index at)
{
    char name[TENSOR_NAME_BYTES], *ret = NULL;
    const char *begin = strstr(t->name, "layers.");

    tensor_spec_name(apart, at, name);
    const char *end = strstr(name, "layers.");
    size_t n = begin && end ? (size_t)(begin - t->name) : 0;
    end = begin && end ? end : name;
    ret = malloc(n + strlen(end) + 1);
    if (ret) {
        memcpy(ret, t->name, n);
        strcpy(ret + n, end);
    }
    return ret;
}

/* Where part i of n of an expert lies in tensor t of row s. */
static struct weight_view part_view(const struct tensor_spec *s, const struct tensor *t, int32_t i,
                                    int32_t n, int32_t expert)
{
    bool vector = t->n_dims == 2;
    int64_t rows = t->dim[vector || !s->transposed ? 1 : 2],
            cols = vector ? 1 : t->dim[s->transposed ? 1 : 2], each = rows / n;
    bool in_turn = tensor_spec_step(s) == 2;
    int64_t row_step = s->transposed && !vector ? 1 : cols;

    return (struct weight_view){.t = t,
                                .rows = each,
                                .cols = cols,
                                .first = expert * rows * cols + i * (in_turn ? 1 : each) * row_step,
                                .row_step = row_step * (in_turn ? n : 1),
                                .col_step = s->transposed && !vector ? rows : 1};
}

/* The parts of a tensor that holds all experts of a layer. */
static int add_parts(struct conversion *k, const struct tensor *t, const struct mention *m,
                     const struct tensor_spec *table, struct err *e)
{
    int32_t n = 0, n_stored;

    row_of_target(table, m->spec, 0, &n);
    row_of_target(k->family->tensors, m->spec, 0, &n_stored);
    /* in turn: two rows of the table are of this tensor; halves: one is */
    int32_t parts = tensor_spec_step(m->spec) == 2 ? n_stored : n;
    if (n == 0 || n != parts) {
        return err_set(e, ERR_UNSUPPORTED, "%s: experts in one tensor that is not known apart",
                       t->name);
    }
    for (int32_t x = 0; x < k->config.experts.n; x++) {
        for (int32_t i = 0; i < n; i++) {
            const struct tensor_spec *apart = row_of_target(table, m->spec, i, &parts);
            struct output *o = &k->output[k->n_outputs++];
            *o =
                (struct output){.t = t,
                                .part = true,
                                .view = part_view(m->spec, t, i, n, x),
                                .name = part_name(t, apart, (struct tensor_index){m->at.layer, x})};
            if (!o->name) {
                return err_nomem(e, t->name);
            }
            describe(o, apart, i > 0, m->at.layer, x);
        }
    }
    return 0;
}

/* ---- all of them ---- */

/* Note what the table says of each tensor; returns how many outputs there can be. */
static int64_t mention_tensors(struct conversion *k, struct mention *m)
{
    const struct tensor *first = checkpoint_at(k->c, 0);
    int64_t n = checkpoint_count(k->c);

    for (const struct tensor_spec *s = k->family->tensors; s->name; s++) {
        int32_t layers = tensor_spec_indices(s) > 0 ? k->config.n_layers : 1,
                experts = tensor_spec_indices(s) == 2 ? k->config.experts.n : 1;
        for (int32_t i = 0; i < layers * experts; i++) {
            struct tensor_index at = {i / experts, i % experts};
            if (!tensor_spec_wanted(s, &k->config, at.layer)) {
                continue;
            }
            const struct tensor *t = tensor_spec_find(s, k->c, at);
            if (t && !m[t - first].spec) {
                m[t - first] = (struct mention){s, at};
                n += tensor_spec_stacked(s) ? 2 * (int64_t)k->config.experts.n : 0;
            }
        }
    }
    return n;
}

static int add_outputs(struct conversion *k, const struct mention *m, struct err *e)
{
    const struct tensor_spec *apart = table_apart(k->root);
    int rc = 0;

    for (int32_t i = 0; i < checkpoint_count(k->c) && rc == 0; i++) {
        const struct tensor *t = checkpoint_at(k->c, i);
        bool stacked = m[i].spec && tensor_spec_stacked(m[i].spec);
        if (!stacked) {
            add_whole(k, t, &m[i]);
        } else {
            rc = apart ? add_parts(k, t, &m[i], apart, e)
                       : err_set(e, ERR_UNSUPPORTED, "%s: experts in one tensor", t->name);
        }
    }
    return rc;
}

static bool some_linear(const struct conversion *k)
{
    for (int32_t i = 0; i < k->n_outputs; i++) {
        if (k->output[i].linear) {
            return true;
        }
    }
    return false;
}

int quantise_list_outputs(struct conversion *k, struct err *e)
{
    struct mention *m = calloc((size_t)MAX(checkpoint_count(k->c), 1), sizeof(*m));

    if (!m) {
        return err_nomem(e, k->from);
    }
    int64_t n = mention_tensors(k, m);
    k->output = n <= LIMIT_TENSORS ? calloc((size_t)MAX(n, 1), sizeof(*k->output)) : NULL;
    int rc = n > LIMIT_TENSORS ? err_set(e, ERR_FULL, "%s: %" PRId64 " tensors, at most %d fit",
                                         k->from, n, LIMIT_TENSORS)
             : !k->output      ? err_nomem(e, k->from)
                               : add_outputs(k, m, e);
    free(m);
    if (rc == 0 && !some_linear(k)) {
        return err_set(e, ERR_UNSUPPORTED,
                       "%s: models whose weights are transposed are not quantised",
                       k->config.architecture);
    }
    return rc;
}

void quantise_free_outputs(struct conversion *k)
{
    for (int32_t i = 0; i < k->n_outputs; i++) {
        free(k->output[i].name);
    }
    free(k->output);
}
