/* Fields that are lists or objects: stop, bad_words, ids, logit_bias,
 * stream_options. */
#include <stdlib.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

static int check_string(const char *name, const cJSON *v, size_t max_bytes, struct err *e)
{
    if (!cJSON_IsString(v)) {
        return err_set_param(e, ERR_INVALID, name, "%s must hold strings, not %s", name,
                             json_kind(v));
    }
    size_t len = json_string_len(v);
    if (len < 1 || len > max_bytes) {
        return err_set_param(e, ERR_INVALID, name,
                             "%s holds a string of %zu bytes; 1 to %zu are allowed", name, len,
                             max_bytes);
    }
    return 0;
}

/* Strings with their lengths; each is followed by a NUL. */
struct strings {
    char **text;
    int32_t *len;
    int32_t n;
};

static void free_strings(struct strings *s)
{
    for (int32_t i = 0; s->text && i < s->n; i++) {
        free(s->text[i]);
    }
    free(s->text);
    free(s->len);
}

/* Append a copy of `v`; the arrays are large enough. */
static int add_string(struct strings *s, const char *name, const cJSON *v, size_t max_bytes,
                      struct err *e)
{
    int rc = check_string(name, v, max_bytes, e);

    if (rc) {
        return rc;
    }
    size_t len = json_string_len(v);
    char *copy = malloc(len + 1);
    if (!copy) {
        return err_nomem(e, name);
    }
    memcpy(copy, v->valuestring, len + 1);
    s->text[s->n] = copy;
    s->len[s->n++] = (int32_t)len;
    return 0;
}

/* A list of strings of 1 .. max_bytes bytes each, or with `single` also one string. An
 * empty list is allowed. */
static int read_strings(struct strings *ret, const char *name, const cJSON *v, bool single, int max,
                        size_t max_bytes, struct err *e)
{
    const cJSON *first = v;
    int n = 1, rc = 0;

    if (cJSON_IsArray(v)) {
        first = v->child;
        n = cJSON_GetArraySize(v);
    } else if (!single || !cJSON_IsString(v)) {
        return err_set_param(e, ERR_INVALID, name, "%s must be a list of strings%s, not %s", name,
                             single ? " or a string" : "", json_kind(v));
    }
    if (n > max) {
        return err_set_param(e, ERR_INVALID, name, "%s has %d entries; at most %d are allowed",
                             name, n, max);
    }
    *ret = (struct strings){0};
    if (n == 0) {
        return 0;
    }
    struct strings s = {.text = calloc((size_t)n, sizeof(*s.text)),
                        .len = calloc((size_t)n, sizeof(*s.len))};
    rc = s.text && s.len ? 0 : err_nomem(e, name);
    for (const cJSON *m = first; s.n < n && !rc; m = m->next) {
        rc = add_string(&s, name, m, max_bytes, e);
    }
    if (rc) {
        free_strings(&s);
        return rc;
    }
    *ret = s;
    return 0;
}

int read_stop(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
              struct err *e)
{
    struct gen_params *p = &((struct completion *)ret)->params;
    struct strings s;
    int rc = read_strings(&s, f->name, v, true, LIMIT_STOP_STRINGS, LIMIT_STOP_BYTES, e);

    (void)ctx;
    if (!rc) {
        p->stop = s.text;
        p->stop_len = s.len;
        p->n_stop = s.n;
    }
    return rc;
}

int read_bad_words(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
                   struct err *e)
{
    struct gen_params *p = &((struct completion *)ret)->params;
    struct strings s;
    int rc = read_strings(&s, f->name, v, false, LIMIT_BAD_WORDS, LIMIT_STOP_BYTES, e);

    (void)ctx;
    if (!rc) {
        p->bad_word = s.text;
        p->bad_word_len = s.len;
        p->n_bad_words = s.n;
    }
    return rc;
}

int read_ids(int32_t **ret, int32_t *ret_n, const char *name, const cJSON *v, int32_t max,
             const struct api_context *ctx, struct err *e)
{
    if (!cJSON_IsArray(v)) {
        return err_set_param(e, ERR_INVALID, name, "%s must be a list of token ids, not %s", name,
                             json_kind(v));
    }
    int n = cJSON_GetArraySize(v), i = 0;
    if (n < 1 || n > max) {
        return err_set_param(e, ERR_INVALID, name, "%s has %d token ids; 1 to %d are allowed", name,
                             n, max);
    }
    int32_t *id = malloc((size_t)n * sizeof(*id));
    if (!id) {
        return err_nomem(e, name);
    }
    for (const cJSON *m = v->child; m; m = m->next) {
        if (field_integer(&id[i++], name, m, 0, ctx->info.vocab - 1, NULL)) {
            free(id);
            int32_t again;
            int rc = field_integer(&again, name, m, 0, ctx->info.vocab - 1, e);
            err_prefix(e, "entry %d", i - 1);
            return rc;
        }
    }
    *ret = id;
    *ret_n = n;
    return 0;
}

int read_stop_token_ids(void *ret, const struct field *f, const cJSON *v,
                        const struct api_context *ctx, struct err *e)
{
    struct gen_params *p = &((struct completion *)ret)->params;

    if (cJSON_IsArray(v) && !v->child) {
        return 0;
    }
    return read_ids(&p->stop_token, &p->n_stop_token, f->name, v, LIMIT_STOP_TOKEN_IDS, ctx, e);
}

int read_allowed_token_ids(void *ret, const struct field *f, const cJSON *v,
                           const struct api_context *ctx, struct err *e)
{
    struct gen_params *p = &((struct completion *)ret)->params;

    return read_ids(&p->allowed_token, &p->n_allowed, f->name, v, LIMIT_ALLOWED_TOKEN_IDS, ctx, e);
}

/* The token id that a key of logit_bias gives in decimal digits; -1 if it is not one of
 * the vocabulary. */
static int32_t bias_key(const char *key, int32_t vocab)
{
    size_t len = strlen(key);

    if (len < 1 || len > 9 || strspn(key, "0123456789") != len) {
        return -1;
    }
    long id = strtol(key, NULL, 10);
    return id < vocab ? (int32_t)id : -1;
}

static int compare_bias(const void *a, const void *b)
{
    int32_t x = ((const struct gen_bias *)a)->token, y = ((const struct gen_bias *)b)->token;

    return (x > y) - (x < y);
}

static int read_bias(struct gen_bias *ret, const struct field *f, const cJSON *m,
                     const struct api_context *ctx, struct err *e)
{
    int32_t id = bias_key(m->string, ctx->info.vocab);

    if (id < 0) {
        return err_set_param(e, ERR_INVALID, f->name,
                             "%s has the key '%.40s'; keys are token ids, 0 to %d", f->name,
                             m->string, ctx->info.vocab - 1);
    }
    if (!cJSON_IsNumber(m) || m->valuedouble < -100 || m->valuedouble > 100) {
        return err_set_param(e, ERR_INVALID, f->name,
                             "%s of token %d must be a number from -100 to 100", f->name, id);
    }
    *ret = (struct gen_bias){id, (float)m->valuedouble};
    return 0;
}

int read_logit_bias(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
                    struct err *e)
{
    struct gen_params *p = &((struct completion *)ret)->params;

    if (!cJSON_IsObject(v)) {
        return err_set_param(e, ERR_INVALID, f->name,
                             "%s must be an object of token id: bias, not %s", f->name,
                             json_kind(v));
    }
    int n = cJSON_GetArraySize(v), i = 0;
    if (n > LIMIT_LOGIT_BIAS) {
        return err_set_param(e, ERR_INVALID, f->name, "%s has %d entries; at most %d are allowed",
                             f->name, n, LIMIT_LOGIT_BIAS);
    }
    if (n == 0) {
        return 0;
    }
    struct gen_bias *bias = malloc((size_t)n * sizeof(*bias));
    if (!bias) {
        return err_nomem(e, f->name);
    }
    for (const cJSON *m = v->child; m; m = m->next) {
        int rc = read_bias(&bias[i++], f, m, ctx, e);
        if (rc) {
            free(bias);
            return rc;
        }
    }
    qsort(bias, (size_t)n, sizeof(*bias), compare_bias);
    for (i = 1; i < n; i++) {
        if (bias[i].token == bias[i - 1].token) {
            int rc = err_set_param(e, ERR_INVALID, f->name, "%s names token %d twice", f->name,
                                   bias[i].token);
            free(bias);
            return rc;
        }
    }
    p->bias = bias;
    p->n_bias = n;
    return 0;
}

int read_stream_options(void *ret, const struct field *f, const cJSON *v,
                        const struct api_context *ctx, struct err *e)
{
    struct completion *c = ret;

    (void)ctx;
    if (!cJSON_IsObject(v)) {
        return err_set_param(e, ERR_INVALID, f->name, "%s must be an object, not %s", f->name,
                             json_kind(v));
    }
    c->has_stream_options = true;
    for (const cJSON *m = v->child; m; m = m->next) {
        bool *at = strcmp(m->string, "include_usage") == 0            ? &c->include_usage
                   : strcmp(m->string, "continuous_usage_stats") == 0 ? &c->continuous_usage
                                                                      : NULL;
        if (!at || cJSON_IsNull(m)) {
            continue;
        }
        if (!cJSON_IsBool(m)) {
            return err_set_param(e, ERR_INVALID, f->name, "%s.%s must be true or false, not %s",
                                 f->name, m->string, json_kind(m));
        }
        *at = cJSON_IsTrue(m);
    }
    return 0;
}
