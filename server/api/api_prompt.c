/* `prompt` in its four forms, encoded to token ids, and the bodies of /tokenize and
 * /detokenize. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

/* A text to encode. */
struct text_input {
    const char *name, *text; /* name: the field that holds the text, for errors */
    size_t len;
    bool add_special;
    int32_t max; /* more tokens than this are an error */
};

static struct text_input text_input_of(const cJSON *v, const char *name, bool add_special,
                                       int32_t max)
{
    return (struct text_input){name, v->valuestring, json_string_len(v), add_special, max};
}

/* The error of a prompt of n tokens (`about`: "at least ", or "") for a model of `max`.
 * Clients that shorten their conversation and try again know this error by its words:
 * Anthropic's for theirs, and OpenAI's "maximum context length". */
static int refuse_length(struct err *e, const char *name, const char *about, int32_t n, int32_t max)
{
    return err_set_param(e, ERR_INVALID, name,
                         "prompt is too long: %s%d tokens > %d maximum; this model's maximum "
                         "context length is %d tokens, prompt and answer together: reduce the "
                         "length of the %s, or set truncate_prompt_tokens",
                         about, n, max, max, name);
}

size_t prompt_most_bytes(const struct api_context *ctx)
{
    return (size_t)ctx->info.token_text_bytes * (size_t)ctx->info.max_model_len;
}

int prompt_refuse_bytes(struct err *e, const char *name, const struct api_context *ctx)
{
    int32_t max = ctx->info.max_model_len;

    return refuse_length(e, name, "at least ", max + 1, max);
}

static int encode_text(struct prompt *ret, const struct text_input *s,
                       const struct api_context *ctx, struct err *e)
{
    const char *name = s->name;
    int32_t max = s->max;

    if (s->len == 0) {
        return err_set_param(e, ERR_INVALID, name, "%s is empty; give at least one character",
                             name);
    }
    size_t most = prompt_most_bytes(ctx);
    if (most > 0 && s->len > most && max == ctx->info.max_model_len + 1) {
        return prompt_refuse_bytes(e, name, ctx);
    }
    int rc = ctx->encode(ctx->arg, s->text, s->len, s->add_special, max, &ret->id, &ret->n, e);
    /* A JSON string is valid UTF-8, so only the length of the text can be wrong. */
    if (rc == ERR_INVALID && max == LIMIT_JSON_VALUES) {
        return err_set_param(e, ERR_INVALID, name,
                             "%s has more than %d tokens (%zu bytes), too many to be truncated",
                             name, max, s->len);
    }
    if (rc == ERR_INVALID && max < INT32_MAX) {
        return refuse_length(e, name, "at least ", max, max - 1);
    }
    if (rc == ERR_INVALID && e) {
        snprintf(e->param, sizeof(e->param), "%s", name);
    }
    if (!rc && ret->n == 0) {
        return err_set_param(e, ERR_INVALID, name, "%s gives no tokens", name);
    }
    return rc;
}

/* Keep the last c->truncate tokens, then check the model's length. */
static int fit_prompt(struct completion *c, struct prompt *p, const struct api_context *ctx,
                      struct err *e)
{
    if (c->truncate && p->n > c->truncate) {
        memmove(p->id, p->id + p->n - c->truncate, (size_t)c->truncate * sizeof(*p->id));
        p->n = c->truncate;
    }
    if (p->n > ctx->info.max_model_len) {
        return refuse_length(e, "prompt", "", p->n, ctx->info.max_model_len);
    }
    return 0;
}

static int read_one(struct completion *c, struct prompt *p, const cJSON *v,
                    const struct api_context *ctx, struct err *e)
{
    /* A text to be truncated is encoded as a whole, up to the longest list of ids; else
     * one token too many is enough to detect the error. */
    int32_t max = c->truncate ? LIMIT_JSON_VALUES : ctx->info.max_model_len + 1;
    int rc;

    if (cJSON_IsString(v)) {
        struct text_input s = text_input_of(v, "prompt", c->add_special, max);
        rc = encode_text(p, &s, ctx, e);
    } else {
        rc = read_ids(&p->id, &p->n, "prompt", v, LIMIT_JSON_VALUES, ctx, e);
    }
    return rc ? rc : fit_prompt(c, p, ctx, e);
}

int prompt_from_text(struct completion *c, const char *text, size_t len,
                     const struct api_context *ctx, struct err *e)
{
    int32_t max = c->truncate ? LIMIT_JSON_VALUES : ctx->info.max_model_len + 1;
    struct text_input s = {"messages", text, len, c->add_special, max};

    c->prompt = calloc(1, sizeof(*c->prompt));
    if (!c->prompt) {
        return err_nomem(e, "prompts");
    }
    c->n_prompts = 1;
    int rc = encode_text(c->prompt, &s, ctx, e);
    return rc ? rc : fit_prompt(c, c->prompt, ctx, e);
}

/* ---- fill-in-the-middle ---- */

/* The token order: [BOS] PREFIX prompt SUFFIX suffix MIDDLE. `behind`: the encoded
 * suffix. */
static int add_gap(struct prompt *p, const struct prompt *behind, const struct engine_fim *f,
                   struct err *e)
{
    int32_t n = p->n + behind->n + 3, bos = p->n > 0 && p->id[0] == f->bos;
    int32_t *id = malloc((size_t)n * sizeof(*id));

    if (!id) {
        return err_nomem(e, "prompts");
    }
    memcpy(id, p->id, (size_t)bos * sizeof(*id));
    id[bos] = f->prefix;
    memcpy(id + bos + 1, p->id + bos, (size_t)(p->n - bos) * sizeof(*id));
    id[p->n + 1] = f->suffix;
    memcpy(id + p->n + 2, behind->id, (size_t)behind->n * sizeof(*id));
    id[n - 1] = f->middle;
    free(p->id);
    *p = (struct prompt){.id = id, .n = n};
    return 0;
}

/* Stop at the end-of-infill token, if the model has one. */
static int stop_at_end(struct gen_params *p, int32_t end, struct err *e)
{
    if (end < 0) {
        return 0;
    }
    int32_t *grown = realloc(p->stop_token, ((size_t)p->n_stop_token + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(e, "stop_token_ids");
    }
    p->stop_token = grown;
    grown[p->n_stop_token++] = end;
    return 0;
}

int prompt_add_suffix(struct completion *c, const struct api_context *ctx, struct err *e)
{
    struct prompt behind = {0};

    if (!c->suffix) {
        return 0;
    }
    struct text_input s = text_input_of(c->suffix, "suffix", false, ctx->info.max_model_len + 1);
    int rc = encode_text(&behind, &s, ctx, e);
    for (int32_t i = 0; i < c->n_prompts && rc == 0; i++) {
        rc = add_gap(&c->prompt[i], &behind, &ctx->fim, e);
        rc = rc ? rc : fit_prompt(c, &c->prompt[i], ctx, e);
    }
    free(behind.id);
    return rc ? rc : stop_at_end(&c->params, ctx->fim.end, e);
}

/* ---- the forms of a prompt ---- */

/* The elements of a list must be of one kind: texts, ids or lists of ids. */
static int check_kinds(const cJSON *v, struct err *e)
{
    const cJSON *first = v->child;

    if (!first) {
        return err_set_param(
            e, ERR_INVALID, "prompt",
            "prompt is an empty list; give a text, texts, token ids, or lists of token ids");
    }
    if (!cJSON_IsString(first) && !cJSON_IsArray(first) && !cJSON_IsNumber(first)) {
        return err_set_param(e, ERR_INVALID, "prompt",
                             "prompt must hold texts, token ids or lists of token ids, not %s",
                             json_kind(first));
    }
    for (const cJSON *m = first->next; m; m = m->next) {
        if ((m->type & 0xff) != (first->type & 0xff)) {
            return err_set_param(e, ERR_INVALID, "prompt",
                                 "prompt mixes %s and %s; all its entries must be of one kind",
                                 json_kind(first), json_kind(m));
        }
    }
    return 0;
}

int prompt_read(struct completion *c, const cJSON *v, const struct api_context *ctx, struct err *e)
{
    bool many = cJSON_IsArray(v) && v->child && !cJSON_IsNumber(v->child);
    int rc = cJSON_IsArray(v) ? check_kinds(v, e) : 0;

    if (!v || cJSON_IsNull(v)) {
        return err_set_param(
            e, ERR_INVALID, "prompt",
            "prompt is missing; give a text, texts, token ids, or lists of token ids");
    }
    if (!rc && !cJSON_IsArray(v) && !cJSON_IsString(v)) {
        rc = err_set_param(e, ERR_INVALID, "prompt",
                           "prompt must be a text, texts, token ids, or lists of token ids, not %s",
                           json_kind(v));
    }
    if (rc) {
        return rc;
    }
    int n = many ? cJSON_GetArraySize(v) : 1;
    if (n > LIMIT_PROMPTS) {
        return err_set_param(e, ERR_INVALID, "prompt",
                             "prompt has %d entries; at most %d are allowed", n, LIMIT_PROMPTS);
    }
    rc = n > 1 ? api_check_room(ctx, n, e) : 0;
    if (rc) {
        return rc;
    }
    c->prompt = calloc((size_t)n, sizeof(*c->prompt));
    if (!c->prompt) {
        return err_nomem(e, "prompts");
    }
    for (const cJSON *m = many ? v->child : v; c->n_prompts < n && !rc; m = m->next) {
        rc = read_one(c, &c->prompt[c->n_prompts++], m, ctx, e);
    }
    return rc;
}

/* ---- /tokenize and /detokenize ---- */

struct tokenize_body {
    struct tokenize out;
    bool add_special;
};

static int read_token_text(void *ret, const struct field *f, const cJSON *v,
                           const struct api_context *ctx, struct err *e)
{
    (void)ret, (void)ctx;
    return cJSON_IsString(v) ? 0
                             : err_set_param(e, ERR_INVALID, f->name, "%s must be a string, not %s",
                                             f->name, json_kind(v));
}

static int read_token_list(void *ret, const struct field *f, const cJSON *v,
                           const struct api_context *ctx, struct err *e)
{
    struct tokenize *t = &((struct tokenize_body *)ret)->out;

    if (cJSON_IsArray(v) && !v->child) {
        return 0;
    }
    return read_ids(&t->id, &t->n, f->name, v, LIMIT_JSON_VALUES, ctx, e);
}

static const struct field tokenize_rows[] = {
    {.name = "model",
     .type = FIELD_CUSTOM,
     .given = -1,
     .read = read_model,
     .schema = "{\"type\":\"string\"}",
     .help = "The served model; it may be left out."},
    {.name = "prompt",
     .type = FIELD_CUSTOM,
     .given = -1,
     .read = read_token_text,
     .schema = "{\"type\":\"string\"}",
     .help = "The text; it may be empty."},
    {.name = "add_special_tokens",
     .type = FIELD_BOOL,
     .given = -1,
     .offset = offsetof(struct tokenize_body, add_special),
     .help = "Begin as the model's tokenizer does (BOS)."},
    {.name = "return_token_strs",
     .type = FIELD_BOOL,
     .given = -1,
     .offset = offsetof(struct tokenize_body, out.return_strings),
     .help = "The tokens' texts too."},
};
const struct field_table tokenize_fields = {tokenize_rows, ARRAY_LEN(tokenize_rows), ROUTE_BOTH};

static const struct field detokenize_rows[] = {
    {.name = "model",
     .type = FIELD_CUSTOM,
     .given = -1,
     .read = read_model,
     .schema = "{\"type\":\"string\"}",
     .help = "The served model; it may be left out."},
    {.name = "tokens",
     .type = FIELD_CUSTOM,
     .given = -1,
     .read = read_token_list,
     .schema =
         "{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":@vocab}}",
     .help = "Token ids; there may be none."},
};
const struct field_table detokenize_fields = {detokenize_rows, ARRAY_LEN(detokenize_rows),
                                              ROUTE_BOTH};

static int token_body_parse(struct tokenize *ret, const struct field_table *t, const char *required,
                            const char *body, size_t len, const struct api_context *ctx,
                            struct err *e)
{
    struct tokenize_body b = {.add_special = true};
    cJSON *tree;
    int rc = json_parse(&tree, body, len, e);

    if (rc) {
        return rc;
    }
    rc = fields_read(t, &b, tree, ctx, b.out.ignored, sizeof(b.out.ignored), e);
    const cJSON *v = rc ? NULL : cJSON_GetObjectItemCaseSensitive(tree, required);
    if (!rc && (!v || cJSON_IsNull(v))) {
        rc = err_set_param(e, ERR_INVALID, required, "%s is missing", required);
    }
    /* An empty text has no tokens, not even BOS. */
    if (!rc && cJSON_IsString(v) && json_string_len(v)) {
        struct text_input s = text_input_of(v, required, b.add_special, INT32_MAX);
        struct prompt p = {0};
        rc = encode_text(&p, &s, ctx, e);
        b.out.id = p.id;
        b.out.n = p.n;
    }
    cJSON_Delete(tree);
    if (rc) {
        tokenize_release(&b.out);
        api_one_line(e);
        return rc;
    }
    *ret = b.out;
    return 0;
}

int tokenize_parse(struct tokenize *ret, const char *body, size_t len,
                   const struct api_context *ctx, struct err *e)
{
    return token_body_parse(ret, &tokenize_fields, "prompt", body, len, ctx, e);
}

int detokenize_parse(struct tokenize *ret, const char *body, size_t len,
                     const struct api_context *ctx, struct err *e)
{
    return token_body_parse(ret, &detokenize_fields, "tokens", body, len, ctx, e);
}

void tokenize_release(struct tokenize *t)
{
    free(t->id);
    *t = (struct tokenize){0};
}
