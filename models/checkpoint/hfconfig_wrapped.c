/* What hfconfig.c reads of a checkpoint whose text model is another architecture's
 * (models/families/wrappers.c): the text_config's model_type names it.
 */
#include <stdio.h>
#include <string.h>

#include "models/checkpoint/hfconfig_internal.h"

static void fill(int32_t *value, int32_t otherwise)
{
    if (*value < 0 && otherwise > 0) {
        *value = otherwise;
    }
}

int raw_config_unwrap(struct raw_config *raw, struct err *e)
{
    /* of whose text models one has an architecture of its own */
    if (strcmp(raw->architecture, "Mistral3ForConditionalGeneration") == 0 &&
        strcmp(raw->type, "mistral4") == 0) {
        snprintf(raw->architecture, sizeof(raw->architecture), "Mistral4ForCausalLM");
        raw->wrapped = true;
        return 0;
    }
    if (!model_is_wrapper(raw->architecture)) {
        return 0;
    }
    if (!raw->text_found) {
        return err_set(e, ERR_INVALID,
                       "config.json: text_config is missing, in which %s has its text model",
                       raw->architecture);
    }
    const struct wrapped_text *t = model_wrapped_text(raw->type);
    if (!t) {
        return err_set(e, ERR_UNSUPPORTED,
                       "config.json: model_type of text_config is '%s', which is not supported in "
                       "%s (docs/models.md)",
                       raw->type, raw->architecture);
    }
    snprintf(raw->architecture, sizeof(raw->architecture), "%s", t->architecture);
    raw->wrapped = true;
    fill(&raw->hidden, t->hidden);
    fill(&raw->intermediate, t->intermediate);
    fill(&raw->n_layers, raw->n_layer_types > 0 ? 0 : t->layers);
    fill(&raw->n_heads, t->heads);
    fill(&raw->n_kv_heads, t->kv_heads);
    fill(&raw->vocab, t->vocab);
    fill(&raw->max_positions, t->positions);
    return 0;
}
