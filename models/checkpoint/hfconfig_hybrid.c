/* What configurations of hybrids have besides: the pattern of Nemotron-H's layers. */
#include <string.h>

#include "models/checkpoint/hfconfig_internal.h"

static const char CONFIG[] = "config.json";

bool raw_pattern_read(struct json *j, struct raw_config *raw)
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
        return err_set(e, ERR_INVALID,
                       "%s: hybrid_override_pattern (layers_block_type) is missing", CONFIG);
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
