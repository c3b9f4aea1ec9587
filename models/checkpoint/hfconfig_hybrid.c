/* What configurations of hybrids have besides: the pattern of Nemotron-H's layers, the
 * factors of Falcon-H1's. */
#include <math.h>
#include <string.h>

#include "models/checkpoint/hfconfig_internal.h"

static const char CONFIG[] = "config.json";

/* M a recurrence, * attention, - an MLP, E experts: a letter for each layer. */
static bool read_pattern(struct json *j, struct raw_config *raw)
{
    static const char KEY[] = "hybrid_override_pattern";
    char text[LIMIT_LAYERS + 1];

    if (json_peek(j) != JSON_STRING) {
        return json_fail(j, "%s must be a string, not %s", KEY, json_type_name(json_peek(j)));
    }
    if (!json_read_string(j, text, sizeof(text), NULL)) {
        return false;
    }
    raw->n_layer_types = (int32_t)strlen(text);
    for (int32_t i = 0; text[i]; i++) {
        if (!strchr("M*-E", text[i])) {
            return json_fail(j, "%s: '%c' is none of M, *, - and E", KEY, text[i]);
        }
        raw->layer_windowed[i] = false;
        raw->layer_recurrent[i] = text[i] == 'M';
        raw->layer_alone[i] = text[i] == '-' || text[i] == 'E';
        raw->layer_experts[i] = text[i] == 'E';
    }
    return true;
}

/* n factors. */
static bool read_factors(struct json *j, const char *key, double *ret, int n)
{
    int i = 0;

    if (json_peek(j) != JSON_ARRAY) {
        return json_fail(j, "%s must be a list of numbers, not %s", key,
                         json_type_name(json_peek(j)));
    }
    json_enter_array(j);
    while (json_next_element(j)) {
        if (i == n) {
            return json_fail(j, "%s has more than %d numbers", key, n);
        }
        if (json_peek(j) != JSON_NUMBER) {
            return json_fail(j, "%s must be a list of numbers", key);
        }
        if (!json_read_double(j, &ret[i])) {
            return false;
        }
        if (!(ret[i] >= 1e-6 && ret[i] <= 1e6)) {
            return json_fail(j, "%s: %g is not from 1e-6 to 1e6", key, ret[i]);
        }
        i++;
    }
    return !j->failed && (i == n || json_fail(j, "%s has %d numbers, not %d", key, i, n));
}

void raw_hybrid_init(struct raw_config *raw)
{
    for (size_t i = 0; i < ARRAY_LEN(raw->state_factor); i++) {
        raw->state_factor[i] = 1;
    }
    raw->mlp_factor[0] = raw->mlp_factor[1] = 1;
}

bool raw_hybrid_read(struct json *j, struct raw_config *raw, bool *ret_known)
{
    bool pattern = json_key_is(j, "hybrid_override_pattern");
    bool states = json_key_is(j, "ssm_multipliers"), mlp = json_key_is(j, "mlp_multipliers");

    *ret_known = pattern || states || mlp;
    if (!*ret_known) {
        return true;
    }
    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    return pattern  ? read_pattern(j, raw)
           : states ? read_factors(j, "ssm_multipliers", raw->state_factor, 5)
                    : read_factors(j, "mlp_multipliers", raw->mlp_factor, 2);
}

static double or_one(double given)
{
    return isnan(given) ? 1 : given;
}

int raw_falcon_derive(struct model_config *c, const struct raw_config *r, struct err *e)
{
    double in = or_one(r->attention_in_factor), key = or_one(r->key_factor);

    if (r->proj_bias == 1 || r->attention_bias == 1 || r->mlp_bias == 1) {
        return err_set(e, ERR_UNSUPPORTED, "%s: biases of linear layers are not supported with %s",
                       CONFIG, c->architecture);
    }
    c->recurrent.beside = true;
    c->recurrent.normed = r->state_norm == 1;
    c->recurrent.gate_first = r->norm_before_gate == 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        c->recurrent.layer[i] = true;
    }
    /* Factors of queries and keys are one of the scores; one of values is one of what
     * attention makes of them. */
    c->query_scalar = (float)(c->head_dim / pow(in * in * key, 2));
    c->factor[FACTOR_ATTENTION] = (float)(in * or_one(r->attention_out_factor));
    for (int i = FACTOR_Z; i <= FACTOR_STEP; i++) {
        c->factor[i] = (float)(or_one(r->state_in_factor) * r->state_factor[i - FACTOR_Z]);
    }
    c->factor[FACTOR_STATES] = (float)or_one(r->state_out_factor);
    c->factor[FACTOR_GATE] = (float)r->mlp_factor[0];
    c->factor[FACTOR_DOWN] = (float)r->mlp_factor[1];
    return 0;
}

int raw_nemotron_derive(struct model_config *c, const struct raw_config *r, struct err *e)
{
    struct expert_config *x = &c->experts;
    bool experts = false;

    if (*r->mlp_act && strcmp(r->mlp_act, "relu2") != 0) {
        return err_set(e, ERR_UNSUPPORTED, "%s: mlp_hidden_act is '%s', %s has relu2", CONFIG,
                       r->mlp_act, c->architecture);
    }
    if (r->enable_bias == 1 || r->proj_bias == 1 || r->attention_bias == 1 || r->mlp_bias == 1) {
        return err_set(e, ERR_UNSUPPORTED, "%s: biases of linear layers are not supported with %s",
                       CONFIG, c->architecture);
    }
    if (r->n_layer_types != c->n_layers) {
        return err_set(e, ERR_INVALID, "%s: hybrid_override_pattern (layers_block_type) is missing",
                       CONFIG);
    }
    c->act = ACT_RELU; /* of u times u */
    for (int32_t i = 0; i < c->n_layers; i++) {
        c->mlp_alone[i] = r->layer_alone[i];
        x->layer[i] = r->layer_experts[i];
        experts = experts || x->layer[i];
    }
    if (!experts) {
        *x = (struct expert_config){0};
        return 0;
    }
    if (x->n == 0) {
        return err_set(e, ERR_INVALID, "%s: n_routed_experts is missing", CONFIG);
    }
    x->shared_intermediate = MAX(r->shared_intermediate, 0);
    x->latent = MAX(r->expert_latent, 0);
    x->self_gated = true;
    return 0;
}

/* Which layers have attention and which experts: as listed, or one of so many. */
static void set_jamba_layers(struct model_config *c, const struct raw_config *r)
{
    int32_t every = r->attention_period > 0 ? r->attention_period : 8;
    int32_t at = r->attention_offset >= 0 ? r->attention_offset : 4;

    for (int32_t i = 0; i < c->n_layers; i++) {
        c->recurrent.layer[i] = r->n_layer_types >= 0 ? r->layer_recurrent[i] : i % every != at;
        if (c->experts.n > 0 && r->expert_period > 0) {
            c->experts.layer[i] = i % r->expert_period == MAX(r->expert_offset, 0);
        }
    }
}

int raw_jamba_derive(struct model_config *c, const struct raw_config *r, struct err *e)
{
    struct recurrent_config *x = &c->recurrent;
    int64_t inner = (int64_t)(r->state_expand > 0 ? r->state_expand : 2) * c->hidden;

    if (r->proj_bias == 1) {
        return err_set(e, ERR_UNSUPPORTED, "%s: mamba_proj_bias true is not supported", CONFIG);
    }
    /* A head is a slice of the channels, so that ranks divide them as they do heads. */
    x->kind = RECURRENCE_SCAN;
    x->n_heads = c->n_heads;
    x->value_dim = (int32_t)(inner / c->n_heads);
    x->key_dim = r->state_key_dim > 0 ? r->state_key_dim : 16;
    x->kernel = r->state_kernel > 0 ? r->state_kernel : 4;
    x->step_rank = r->step_rank > 0 ? r->step_rank : (int32_t)div_ceil(c->hidden, 16);
    x->conv_bias = r->conv_bias != 0;
    if (inner % c->n_heads != 0 || x->value_dim > LIMIT_HEAD_DIM) {
        return err_set(e, ERR_INVALID,
                       "%s: %lld channels of the recurrent layers are no multiple of "
                       "num_attention_heads %d, or more than %d a head",
                       CONFIG, (long long)inner, c->n_heads, LIMIT_HEAD_DIM);
    }
    set_jamba_layers(c, r);
    return 0;
}

int raw_lfm2_derive(struct model_config *c, const struct raw_config *r, struct err *e)
{
    struct recurrent_config *x = &c->recurrent;
    int64_t width = c->intermediate;

    if (r->conv_bias == 1) {
        return err_set(e, ERR_UNSUPPORTED, "%s: conv_bias true is not supported", CONFIG);
    }
    if (r->n_layer_types < 0 && !r->attention_listed) {
        return err_set(e, ERR_INVALID, "%s: layer_types (full_attn_idxs) is missing", CONFIG);
    }
    if (r->adjusts_width != 0 && c->experts.n == 0) {
        int64_t multiple = r->width_multiple > 0 ? r->width_multiple : 256;
        width = (int64_t)(2.0 * (double)width / 3);
        width = (int64_t)((double)width * or_one(r->width_factor));
        width = div_ceil(width, multiple) * multiple;
    }
    if (width < 1 || width > LIMIT_HIDDEN * 8) {
        return err_set(e, ERR_INVALID, "%s: MLPs of width %lld", CONFIG, (long long)width);
    }
    c->intermediate = (int32_t)width;
    /* A head is a slice of the channels, so that ranks divide them as they do heads. */
    x->kind = RECURRENCE_CONV;
    x->n_heads = x->n_groups = c->n_heads;
    x->value_dim = c->hidden / c->n_heads;
    x->kernel = r->state_kernel > 0 ? r->state_kernel : 3;
    if (c->hidden % c->n_heads != 0 || x->value_dim > LIMIT_HEAD_DIM) {
        return err_set(e, ERR_INVALID,
                       "%s: hidden_size %d is no multiple of num_attention_heads %d", CONFIG,
                       c->hidden, c->n_heads);
    }
    return 0;
}
