/* The configuration of an EAGLE-3 head: a LLaMA's, with members of its own at the top
 * level (SafeAILab's form), or with the layers' in an object transformer_layer_config
 * (vLLM's speculators). That of a P-EAGLE head has besides the id of a mask token. */
#include <stdio.h>
#include <string.h>

#include "models/checkpoint/hfconfig_internal.h"

static bool read_count(struct json *j, const char *key, int32_t least, int32_t most, int32_t *ret)
{
    int64_t n;

    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_peek(j) != JSON_NUMBER) {
        return json_fail(j, "%s must be a whole number, not %s", key, json_type_name(json_peek(j)));
    }
    if (!json_read_int(j, &n)) {
        return false;
    }
    if (n < least || n > most) {
        return json_fail(j, "%s is %lld, allowed are %d to %d", key, (long long)n, least, most);
    }
    *ret = (int32_t)n;
    return true;
}

static bool read_taps(struct json *j, struct raw_eagle *r)
{
    static const char KEY[] = "eagle_aux_hidden_state_layer_ids";

    if (json_peek(j) == JSON_NULL) {
        return json_skip(j);
    }
    if (json_peek(j) != JSON_ARRAY) {
        return json_fail(j, "%s must be a list of whole numbers", KEY);
    }
    r->n_taps = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        if (r->n_taps == LIMIT_TAPS) {
            return json_fail(j, "%s names more than %d layers", KEY, LIMIT_TAPS);
        }
        if (!read_count(j, KEY, 0, LIMIT_LAYERS, &r->tap[r->n_taps++])) {
            return false;
        }
    }
    return !j->failed;
}

/* eagle_config: an object with some of the members. */
static bool read_object(struct json *j, struct raw_eagle *r)
{
    bool known;

    if (json_peek(j) != JSON_OBJECT) {
        return json_peek(j) == JSON_NULL ? json_skip(j)
                                         : json_fail(j, "eagle_config must be an object");
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "eagle_aux_hidden_state_layer_ids")) {
            raw_eagle_read(j, r, &known);
        } else {
            json_skip(j);
        }
    }
    return !j->failed;
}

/* The members of P-EAGLE, and those of EAGLE-3.1, which are not computed. */
static bool read_newer(struct json *j, struct raw_eagle *r, bool *ret_known)
{
    static const char *const MASKS[] = {"pard_token", "ptd_token_id", "mask_token_id"};
    static const char *const UNKNOWN[] = {"norm_before_fc", "fc_norm", "norm_output"};
    bool flag = false;

    for (size_t i = 0; i < ARRAY_LEN(MASKS); i++) {
        if (json_key_is(j, MASKS[i]) && json_peek(j) == JSON_NUMBER) {
            r->parallel = r->parallel || i < 2;
            return read_count(j, MASKS[i], 0, LIMIT_VOCAB, &r->mask_token);
        }
    }
    for (size_t i = 0; i < ARRAY_LEN(UNKNOWN); i++) {
        if (json_key_is(j, UNKNOWN[i]) && json_peek(j) == JSON_BOOL) {
            json_read_bool(j, &flag);
            r->unknown = flag ? UNKNOWN[i] : r->unknown;
            return true;
        }
    }
    if (json_key_is(j, "parallel_drafting") && json_peek(j) == JSON_BOOL) {
        json_read_bool(j, &flag);
        r->parallel = r->parallel || flag;
        return true;
    }
    *ret_known = false;
    return true;
}

bool raw_eagle_read(struct json *j, struct raw_eagle *r, bool *ret_known)
{
    bool flag = false;
    char type[16];

    *ret_known = true;
    if (json_key_is(j, "draft_vocab_size")) {
        r->is = json_peek(j) != JSON_NULL || r->is;
        return read_count(j, "draft_vocab_size", 1, LIMIT_VOCAB, &r->draft_vocab);
    }
    if (json_key_is(j, "target_hidden_size")) {
        return read_count(j, "target_hidden_size", 1, LIMIT_HIDDEN, &r->target_hidden);
    }
    if (json_key_is(j, "eagle_aux_hidden_state_layer_ids")) {
        return read_taps(j, r);
    }
    if (json_key_is(j, "eagle_config")) {
        return read_object(j, r);
    }
    if (json_key_is(j, "norm_before_residual") && json_peek(j) == JSON_BOOL) {
        json_read_bool(j, &flag);
        r->norm_before_residual = flag;
        return true;
    }
    if (json_key_is(j, "speculators_model_type") && json_peek(j) == JSON_STRING) {
        if (!json_read_string(j, type, sizeof(type), NULL)) {
            return false;
        }
        r->speculators = true;
        r->parallel = r->parallel || strcmp(type, "peagle") == 0;
        r->is = r->is || strcmp(type, "eagle3") == 0 || strcmp(type, "peagle") == 0;
        return true;
    }
    return read_newer(j, r, ret_known);
}

bool raw_eagle_named(struct raw_eagle *r, const char *architecture)
{
    static const char *const NAMES[] = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM",
                                        "Eagle3Speculator",       "Eagle3DraftModel",
                                        "PEagleSpeculator",       "PEagleDraftModel",
                                        "PeagleLlamaForCausalLM"};
    enum { FIRST_PARALLEL = 4 };

    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        if (strcmp(architecture, NAMES[i]) == 0) {
            r->is = true;
            r->parallel = r->parallel || i >= FIRST_PARALLEL;
        }
    }
    return r->is;
}

int raw_eagle_derive(struct model_config *c, const struct raw_eagle *r, struct err *e)
{
    if (!r->is) {
        return 0;
    }
    if (r->unknown) {
        return err_set(e, ERR_UNSUPPORTED, "config.json: a draft head with %s is not supported",
                       r->unknown);
    }
    if (r->parallel && r->mask_token < 0) {
        return err_set(e, ERR_INVALID,
                       "config.json: the head drafts in parallel and names no mask token "
                       "(mask_token_id, pard_token or ptd_token_id)");
    }
    snprintf(c->architecture, sizeof(c->architecture), "%s",
             r->parallel ? "PeagleLlamaForCausalLM" : "Eagle3LlamaForCausalLM");
    c->head =
        (struct head_config){.kind = HEAD_EAGLE3,
                             .n_taps = r->n_taps,
                             .draft_vocab = r->draft_vocab,
                             .target_hidden = r->target_hidden > 0 ? r->target_hidden : c->hidden,
                             .parallel = r->parallel,
                             .mask_token = r->mask_token};
    memcpy(c->head.tap, r->tap, sizeof(c->head.tap));
    c->head.norm_before_residual =
        r->norm_before_residual < 0 ? r->speculators : r->norm_before_residual != 0;
    return 0;
}
