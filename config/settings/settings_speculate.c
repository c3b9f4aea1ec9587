/* speculative_config: speculative decoding as vLLM's --speculative-config writes it. */
#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "config/base/limits.h"
#include "config/settings/settings_table.h"

enum { METHOD_BYTES = 64, MODEL_BYTES = 4096 };

/* What the JSON says. */
struct speculation {
    char method[METHOD_BYTES], model[MODEL_BYTES]; /* "": not given */
    int64_t n_drafts;
};

static int set_draft_model(struct settings *s, const char *model, struct err *e)
{
    if (!model[0]) {
        return err_set_param(
            e, ERR_INVALID, "speculative_config",
            "speculative_config: the method draft_model, or eagle3, needs a model");
    }
    char *name = strdup(model);
    if (!name) {
        return err_nomem(e, "the draft model's name");
    }
    free(s->draft_model);
    s->draft_model = name;
    s->speculate = SPECULATE_DRAFT;
    return 0;
}

/* vLLM's methods, and what each is here; `why`: it is refused. */
static const struct {
    const char *name;
    enum speculate is;
    const char *why;
} METHODS[] = {
    {"ngram", SPECULATE_SUFFIX, NULL},
    {"ngram_gpu", SPECULATE_SUFFIX, NULL},
    {"suffix", SPECULATE_SUFFIX, NULL},
    {"draft_model", SPECULATE_DRAFT, NULL},
    {"eagle3", SPECULATE_DRAFT, NULL},
    {"mtp", SPECULATE_MTP, NULL},
    {"deepseek_mtp", SPECULATE_MTP, NULL},
    {"glm4_moe_mtp", SPECULATE_MTP, NULL},
    {"glm4_moe_lite_mtp", SPECULATE_MTP, NULL},
    {"qwen3_next_mtp", SPECULATE_MTP, NULL},
    {"qwen3_5_mtp", SPECULATE_MTP, NULL},
    {"eagle", SPECULATE_OFF, "of EAGLE's heads those of EAGLE-3 are read"},
    {"medusa", SPECULATE_OFF, "Medusa's heads are not read"},
    {"mlp_speculator", SPECULATE_OFF, "MLP speculators are not read"},
    {"dflash", SPECULATE_OFF, "DFlash's draft models are not read"},
    {"dspark", SPECULATE_OFF, "DSpark's draft models are not read"},
    {"extract_hidden_states", SPECULATE_OFF, "hidden states are not given out"},
    {"custom_class", SPECULATE_OFF, "no code is loaded"},
};

static bool is_mtp(const char *method)
{
    const char *end = strstr(method, "_mtp");

    return end && end[strlen("_mtp")] == 0;
}

static int refuse_method(const char *method, const char *why, struct err *e)
{
    if (!why) {
        why = is_mtp(method) ? "MTP heads are known of DeepSeek-V3, GLM-4.5 and Qwen3-Next" : NULL;
    }
    return err_set_param(e, ERR_UNSUPPORTED, "speculative_config",
                         "speculative_config: the method %s is not there%s%s; there are ngram "
                         "and suffix, which are the same here, draft_model, eagle3 and mtp",
                         method, why ? ": " : "", why ? why : "");
}

/* As vLLM has it, a model without a method is a draft model. */
static int set_method(struct settings *s, const struct speculation *v, struct err *e)
{
    const char *method = v->method[0] || !v->model[0] ? v->method : "draft_model";
    size_t i = 0;

    if (!method[0]) {
        return err_set_param(e, ERR_INVALID, "speculative_config",
                             "speculative_config names no method; there are ngram, suffix, "
                             "draft_model, eagle3 and mtp");
    }
    while (i < ARRAY_LEN(METHODS) && strcmp(METHODS[i].name, method) != 0) {
        i++;
    }
    if (i == ARRAY_LEN(METHODS) || METHODS[i].why) {
        return refuse_method(method, i < ARRAY_LEN(METHODS) ? METHODS[i].why : NULL, e);
    }
    if (METHODS[i].is == SPECULATE_DRAFT) {
        return set_draft_model(s, v->model, e);
    }
    if (v->model[0]) {
        return err_set_param(e, ERR_INVALID, "speculative_config",
                             "speculative_config: the method %s has no model", method);
    }
    s->speculate = METHODS[i].is;
    return 0;
}

/* Members that only tune another implementation's search are passed over. */
static bool is_ignored(const struct json *j)
{
    return json_key_is(j, "prompt_lookup_max") || json_key_is(j, "prompt_lookup_min") ||
           strncmp(j->key, "suffix_decoding_", strlen("suffix_decoding_")) == 0;
}

static bool read_member(struct json *j, struct speculation *v)
{
    size_t len;

    if (json_key_is(j, "method")) {
        return json_read_string(j, v->method, METHOD_BYTES, &len);
    }
    if (json_key_is(j, "model")) {
        return json_read_string(j, v->model, MODEL_BYTES, &len);
    }
    if (json_key_is(j, "num_speculative_tokens")) {
        return json_read_int(j, &v->n_drafts) &&
               ((v->n_drafts >= 1 && v->n_drafts <= LIMIT_DRAFT) ||
                json_fail(j, "num_speculative_tokens is %lld; allowed are 1 to %d",
                          (long long)v->n_drafts, LIMIT_DRAFT));
    }
    return is_ignored(j) ? json_skip(j) : json_fail(j, "\"%s\" is not known here", j->key);
}

static int read_config(struct settings *s, struct err *e)
{
    struct speculation v = {.n_drafts = s->max_draft};
    struct err why = {0};
    struct json j;

    json_init(&j, s->speculative_config, strlen(s->speculative_config), "speculative_config", &why);
    bool read = json_enter_object(&j);
    while (read && json_next_member(&j)) {
        read = read_member(&j, &v);
    }
    if (!read || j.failed || !json_finish(&j)) {
        return err_set_param(e, ERR_INVALID, "speculative_config", "%s", why.text);
    }
    s->max_draft = v.n_drafts;
    return set_method(s, &v, e);
}

static int check_draft_model(const struct settings *s, struct err *e)
{
    if (s->speculate == SPECULATE_DRAFT && !s->draft_model) {
        return err_set_param(e, ERR_INVALID, "speculate", "speculate draft needs a draft_model");
    }
    if (s->draft_model && s->speculate != SPECULATE_DRAFT && s->speculate != SPECULATE_AUTO) {
        return err_set_param(e, ERR_INVALID, "draft_model",
                             "draft_model is set, but speculate is neither draft nor auto");
    }
    const char *drafts = s->draft_model                  ? "draft_model"
                         : s->speculate == SPECULATE_MTP ? "speculate"
                                                         : NULL;
    return drafts && s->pipeline_parallel_size > 1
               ? err_set_param(e, ERR_UNSUPPORTED, drafts,
                               "%s: a model in stages has no draft model or head; "
                               "pipeline_parallel_size must be 1",
                               drafts)
               : 0;
}

int settings_speculation(struct settings *s, struct err *e)
{
    int rc = s->speculative_config ? read_config(s, e) : 0;

    return rc < 0 ? rc : check_draft_model(s, e);
}
