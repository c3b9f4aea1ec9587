/* Readers, named by the field table, of single values that need more than a type and a
 * range. Lists: api_lists.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

/* ---- readers of single values ---- */

int read_later(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
               struct err *e)
{
    /* read by prompt_read or chat_read, which need other fields */
    (void)ret, (void)f, (void)v, (void)ctx, (void)e;
    return 0;
}

int read_model(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
               struct err *e)
{
    (void)ret;
    if (!cJSON_IsString(v)) {
        return field_wrong_type(f, v, "a string", e);
    }
    if (json_has_nul(v)) {
        return field_has_nul(f->name, e);
    }
    if (!json_is(v, ctx->info.model_name)) {
        return err_set_param(e, ERR_NOT_FOUND, f->name, "model '%.*s' is not served here; '%s' is",
                             100, v->valuestring, ctx->info.model_name);
    }
    return 0;
}

int read_early_stopping(void *ret, const struct field *f, const cJSON *v,
                        const struct api_context *ctx, struct err *e)
{
    struct completion *c = ret;

    (void)ctx;
    if (cJSON_IsBool(v)) {
        c->params.early_stopping = cJSON_IsTrue(v) ? 1 : 0;
        return 0;
    }
    if (json_is(v, "never")) {
        c->params.early_stopping = 2;
        return 0;
    }
    return field_wrong_type(f, v, "true, false or \"never\"", e);
}

int read_logprobs(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
                  struct err *e)
{
    return field_integer(&((struct completion *)ret)->params.n_logprobs, f->name, v, 0,
                         ctx->max_logprobs, e);
}

int read_prompt_logprobs(void *ret, const struct field *f, const cJSON *v,
                         const struct api_context *ctx, struct err *e)
{
    return field_integer(&((struct completion *)ret)->params.n_prompt_logprobs, f->name, v, 0,
                         ctx->max_logprobs, e);
}

int read_top_k(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
               struct err *e)
{
    struct completion *c = ret;
    int rc = field_integer(&c->params.top_k, f->name, v, -1, INT32_MAX, e);

    (void)ctx;
    if (!rc && c->params.top_k < 0) {
        c->params.top_k = 0;
    }
    return rc;
}

/* An exact 64-bit integer; a negative one is stored as its two's complement. */
int read_seed(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
              struct err *e)
{
    struct completion *c = ret;
    char text[JSON_NUMBER_BYTES];
    uint64_t n;
    bool minus;

    (void)ctx;
    if (!cJSON_IsNumber(v)) {
        return field_wrong_type(f, v, "an integer", e);
    }
    int rc = json_integer(v, &minus, &n);
    if (rc == ERR_INVALID) {
        return err_set_param(e, ERR_INVALID, f->name, "%s is %s but must be an integer of 64 bits",
                             f->name, json_number_text(v, text));
    }
    if (rc || (minus && n > UINT64_C(1) << 63)) {
        return err_set_param(e, ERR_INVALID, f->name, "%s is %s but must be from -2^63 to 2^64 - 1",
                             f->name, json_number_text(v, text));
    }
    c->params.seed = minus ? 0 - n : n;
    return 0;
}

int read_cache_salt(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
                    struct err *e)
{
    struct completion *c = ret;

    (void)ctx;
    if (!cJSON_IsString(v)) {
        return field_wrong_type(f, v, "a string", e);
    }
    if (json_has_nul(v)) {
        return field_has_nul(f->name, e);
    }
    size_t len = json_string_len(v);
    if (len < 1 || len > LIMIT_CACHE_SALT_BYTES) {
        return err_set_param(e, ERR_INVALID, f->name, "%s has %zu bytes; 1 to %d are allowed",
                             f->name, len, LIMIT_CACHE_SALT_BYTES);
    }
    free(c->params.cache_salt);
    c->params.cache_salt = strdup(v->valuestring);
    return c->params.cache_salt ? 0 : err_nomem(e, "cache_salt");
}

int read_request_id(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
                    struct err *e)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
    struct completion *c = ret;

    (void)ctx;
    if (!cJSON_IsString(v)) {
        return field_wrong_type(f, v, "a string", e);
    }
    size_t len = json_string_len(v);
    if (len < 1 || len > LIMIT_REQUEST_ID_BYTES || strspn(v->valuestring, allowed) != len) {
        return err_set_param(e, ERR_INVALID, f->name,
                             "%s must be 1 to %d letters, digits, '.', '_', ':' or '-'", f->name,
                             LIMIT_REQUEST_ID_BYTES);
    }
    memcpy(c->request_id, v->valuestring, len + 1);
    return 0;
}

int read_suffix(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
                struct err *e)
{
    if (!cJSON_IsString(v)) {
        return field_wrong_type(f, v, "a string", e);
    }
    ((struct completion *)ret)->suffix = json_string_len(v) ? v : NULL;
    if (json_string_len(v) && !ctx->fim.there) {
        return err_set_param(
            e, ERR_UNSUPPORTED, f->name,
            "%s is not supported: model '%s' has no fill-in-the-middle tokens; leave it out",
            f->name, ctx->info.model_name);
    }
    return 0;
}

/* ---- readers of chat's fields ---- */

int read_top_logprobs(void *ret, const struct field *f, const cJSON *v,
                      const struct api_context *ctx, struct err *e)
{
    return field_integer(&((struct completion *)ret)->top_logprobs, f->name, v, 0,
                         ctx->max_logprobs, e);
}

int read_any_object(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
                    struct err *e)
{
    (void)ret, (void)ctx;
    return cJSON_IsObject(v) ? 0 : field_wrong_type(f, v, "an object", e);
}

int read_list(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
              struct err *e)
{
    (void)ret, (void)ctx;
    return cJSON_IsArray(v) ? 0 : field_wrong_type(f, v, "a list", e);
}

int read_tool_choice(void *ret, const struct field *f, const cJSON *v,
                     const struct api_context *ctx, struct err *e)
{
    (void)ret, (void)ctx;
    return cJSON_IsString(v) || cJSON_IsObject(v)
               ? 0
               : field_wrong_type(f, v, "a string or an object that names a function", e);
}

/* A string of the field's schema, {"enum": […]}. */
int read_word(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
              struct err *e)
{
    char quoted[64];

    (void)ret, (void)ctx;
    if (!cJSON_IsString(v)) {
        return field_wrong_type(f, v, "a string", e);
    }
    snprintf(quoted, sizeof(quoted), "\"%.60s\"", v->valuestring);
    const char *list = strchr(f->schema, '[');
    if (json_has_nul(v) || strchr(v->valuestring, '"') || json_string_len(v) > 40 ||
        !strstr(list, quoted)) {
        return err_set_param(e, ERR_INVALID, f->name, "%s is '%.40s'; %.*s are allowed", f->name,
                             v->valuestring, (int)strcspn(list + 1, "]"), list + 1);
    }
    return 0;
}

int read_modalities(void *ret, const struct field *f, const cJSON *v, const struct api_context *ctx,
                    struct err *e)
{
    (void)ret, (void)ctx;
    if (!cJSON_IsArray(v) || !v->child) {
        return field_wrong_type(f, v, "a list that is not empty", e);
    }
    for (const cJSON *m = v->child; m; m = m->next) {
        if (!json_is(m, "text")) {
            return err_set_param(e, ERR_UNSUPPORTED, f->name,
                                 "%s may hold only \"text\": this server answers in no other way",
                                 f->name);
        }
    }
    return 0;
}
