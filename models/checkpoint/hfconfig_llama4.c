/* What configurations of Llama 4 have besides: chunks of attention, factors of queries
 * where nothing rotates, and which layers have experts. */
#include <math.h>

#include "models/checkpoint/hfconfig_internal.h"

static const char CONFIG[] = "config.json";

/* Layers with chunks: as listed, or those that rotate. */
static int set_chunks(struct model_config *c, const struct raw_config *r, struct err *e)
{
    int32_t chunk = r->chunk > 0 ? r->chunk : r->chunk_is_null ? 0 : 8192;
    bool any = false;

    for (int32_t i = 0; i < c->n_layers; i++) {
        if (r->n_layer_types >= 0 && r->layer_windowed[i] && !r->layer_chunked[i]) {
            return err_set(e, ERR_UNSUPPORTED, "%s: layer_types: %s has no sliding_attention",
                           CONFIG, c->architecture);
        }
        c->windowed[i] =
            chunk > 0 && (r->n_layer_types >= 0 ? r->layer_chunked[i] : !c->unrotated[i]);
        any = any || c->windowed[i];
    }
    c->chunked = any;
    c->sliding_window = any ? chunk : 0;
    return 0;
}

static int set_llama4_experts(struct model_config *c, const struct raw_config *r, struct err *e)
{
    struct expert_config *x = &c->experts;

    if (x->top != 1) {
        return err_set(e, ERR_UNSUPPORTED, "%s: num_experts_per_tok is %d, %s chooses 1", CONFIG,
                       x->top, c->architecture);
    }
    for (int32_t i = 0; i < LIMIT_LAYERS && r->experts_listed; i++) {
        if (r->layer_moe[i] && i >= c->n_layers) {
            return err_set(e, ERR_INVALID, "%s: moe_layers names layer %d, num_hidden_layers is %d",
                           CONFIG, i, c->n_layers);
        }
        x->layer[i] = r->layer_moe[i];
    }
    x->shared_intermediate = x->intermediate;
    if (r->expert_intermediate < 1) { /* intermediate_size is that of experts */
        c->intermediate = r->dense_intermediate > 0 ? r->dense_intermediate : 2 * x->intermediate;
    }
    /* the weight of one expert, as its share of itself, is 1 */
    x->normalised = x->scaled_inputs = true;
    return 0;
}

int raw_llama4_derive(struct model_config *c, const struct raw_config *r, struct err *e)
{
    int rc = set_chunks(c, r, e);

    c->plain_qk_norm = r->use_qk_norm != 0;
    if (!r->untuned) {
        c->unrotated_beta = isnan(r->unrotated_beta) ? 0.1 : r->unrotated_beta;
        c->unrotated_span = r->unrotated_span > 0 ? r->unrotated_span : 8192;
    }
    return rc < 0 ? rc : set_llama4_experts(c, r, e);
}
