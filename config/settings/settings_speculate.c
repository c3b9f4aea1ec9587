/* speculative_config: speculative decoding as vLLM's --speculative-config writes it. */
#include <string.h>

#include "config/base/json.h"
#include "config/base/limits.h"
#include "config/settings/settings_table.h"

enum { METHOD_BYTES = 64 };

static int set_method(struct settings *s, const char *method, struct err *e)
{
    if (strcmp(method, "ngram") != 0 && strcmp(method, "suffix") != 0) {
        return err_set_param(e, ERR_UNSUPPORTED, "speculative_config",
                             "speculative_config: the method %s is not there; there are ngram "
                             "and suffix, which are the same here",
                             method);
    }
    s->speculate = SPECULATE_SUFFIX;
    return 0;
}

/* Members that only tune another implementation's search are passed over. */
static bool is_ignored(const struct json *j)
{
    return json_key_is(j, "prompt_lookup_max") || json_key_is(j, "prompt_lookup_min") ||
           strncmp(j->key, "suffix_decoding_", strlen("suffix_decoding_")) == 0;
}

static bool read_member(struct json *j, char *method, int64_t *n_drafts)
{
    size_t len;

    if (json_key_is(j, "method")) {
        return json_read_string(j, method, METHOD_BYTES, &len);
    }
    if (json_key_is(j, "num_speculative_tokens")) {
        return json_read_int(j, n_drafts) &&
               ((*n_drafts >= 1 && *n_drafts <= LIMIT_DRAFT) ||
                json_fail(j, "num_speculative_tokens is %lld; allowed are 1 to %d",
                          (long long)*n_drafts, LIMIT_DRAFT));
    }
    return is_ignored(j) ? json_skip(j) : json_fail(j, "\"%s\" is not known here", j->key);
}

int settings_speculation(struct settings *s, struct err *e)
{
    char method[METHOD_BYTES] = "";
    int64_t n_drafts = s->max_draft;
    struct err why = {0};
    struct json j;

    if (!s->speculative_config) {
        return 0;
    }
    json_init(&j, s->speculative_config, strlen(s->speculative_config), "speculative_config", &why);
    bool read = json_enter_object(&j);
    while (read && json_next_member(&j)) {
        read = read_member(&j, method, &n_drafts);
    }
    if (!read || j.failed || !json_finish(&j)) {
        return err_set_param(e, ERR_INVALID, "speculative_config", "%s", why.text);
    }
    if (!method[0]) {
        return err_set_param(e, ERR_INVALID, "speculative_config",
                             "speculative_config names no method; there are ngram and suffix");
    }
    s->max_draft = n_drafts;
    return set_method(s, method, e);
}
