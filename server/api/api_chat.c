/* The prompt of a chat request: its messages, tools and the template's other variables,
 * rendered by the model's chat template and encoded. Special tokens in the rendered
 * text are encoded as such.
 */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

/* ---- the template's variables ---- */

enum { NUMBER_MOST = 60 }; /* characters */

static bool template_holds(const cJSON *v)
{
    bool minus;
    uint64_t n;

    return !cJSON_IsNumber(v) || !v->valuestring ||
           (isfinite(v->valuedouble) && strlen(v->valuestring) <= NUMBER_MOST &&
            (strpbrk(v->valuestring, ".eE") || (!json_integer(v, &minus, &n) && n <= INT64_MAX)));
}

int template_numbers(const char *name, const cJSON *v, struct err *e)
{
    char text[JSON_NUMBER_BYTES];

    if (!template_holds(v)) {
        return err_set_param(e, ERR_INVALID, name,
                             "%s holds the number %s; integers of 63 bits and finite doubles of at "
                             "most %d characters are allowed",
                             name, json_number_text(v, text), NUMBER_MOST);
    }
    for (const cJSON *m = v->child; m; m = m->next) {
        int rc = template_numbers(name, m, e);
        if (rc) {
            return rc;
        }
    }
    return 0;
}

bool template_reaches(const cJSON *v, int outside)
{
    if (outside >= LIMIT_FILE_JSON_DEPTH) {
        return !cJSON_IsObject(v) && !cJSON_IsArray(v);
    }
    for (const cJSON *m = v->child; m; m = m->next) {
        if (!template_reaches(m, outside + 1)) {
            return false;
        }
    }
    return true;
}

int template_numbers_round(cJSON *v, struct err *e)
{
    enum { DOUBLE_BYTES = 32 };

    if (!template_holds(v)) {
        double near = fmax(-DBL_MAX, fmin(v->valuedouble, DBL_MAX));
        char *text = cJSON_malloc(DOUBLE_BYTES);
        if (!text) {
            return err_nomem(e, "a number");
        }
        snprintf(text, DOUBLE_BYTES, "%.17g", near);
        cJSON_free(v->valuestring);
        v->valuestring = text;
    }
    for (cJSON *m = v->child; m; m = m->next) {
        int rc = template_numbers_round(m, e);
        if (rc) {
            return rc;
        }
    }
    return 0;
}

static int put_variables(struct buf *b, const cJSON *kwargs, struct err *e)
{
    static const char *const FIELDS[] = {"messages", "tools", "documents", "add_generation_prompt"};

    if (kwargs && cJSON_GetArraySize(kwargs) > LIMIT_JSON_MEMBERS) {
        return err_set_param(e, ERR_INVALID, "chat_template_kwargs",
                             "chat_template_kwargs has more than %d members", LIMIT_JSON_MEMBERS);
    }
    for (const cJSON *k = kwargs ? kwargs->child : NULL; k; k = k->next) {
        for (size_t i = 0; i < ARRAY_LEN(FIELDS); i++) {
            if (strcmp(k->string, FIELDS[i]) == 0) {
                return err_set_param(
                    e, ERR_INVALID, "chat_template_kwargs",
                    "chat_template_kwargs may not set %s, which is a field of its own", FIELDS[i]);
            }
        }
        int rc = template_numbers("chat_template_kwargs", k, e);
        if (rc) {
            return rc;
        }
        if (!template_reaches(k, 1)) {
            return err_set_param(e, ERR_INVALID, "chat_template_kwargs",
                                 "chat_template_kwargs nests deeper than %d levels",
                                 LIMIT_FILE_JSON_DEPTH);
        }
        buf_putc(b, ',');
        buf_json_string(b, k->string, strlen(k->string));
        buf_putc(b, ':');
        json_put(b, k);
    }
    return 0;
}

/* Fields that are variables of templates. chat_template_kwargs, which is nearer to the
 * template, counts if it sets the same. */
static void put_fields(struct buf *b, const cJSON *tree, const cJSON *kwargs)
{
    static const char *const FIELDS[] = {"reasoning_effort", "verbosity"};

    for (size_t i = 0; i < ARRAY_LEN(FIELDS); i++) {
        const cJSON *v = cJSON_GetObjectItemCaseSensitive(tree, FIELDS[i]);
        if (!cJSON_IsString(v) || cJSON_GetObjectItemCaseSensitive(kwargs, FIELDS[i])) {
            continue;
        }
        buf_printf(b, ",\"%s\":", FIELDS[i]);
        json_put(b, v);
        if (json_is(v, "none") && !cJSON_GetObjectItemCaseSensitive(kwargs, "enable_thinking")) {
            buf_puts(b, ",\"enable_thinking\":false");
        }
    }
}

/* The object of all that the template sees. */
static int put_context(struct buf *b, const struct completion *c, const cJSON *tree,
                       const struct api_context *ctx, struct err *e)
{
    const cJSON *kwargs = cJSON_GetObjectItemCaseSensitive(tree, "chat_template_kwargs");

    buf_putc(b, '{');
    int rc = messages_put(b, cJSON_GetObjectItemCaseSensitive(tree, "messages"),
                          c->continue_final_message, ctx, e);
    buf_puts(b, c->add_generation_prompt ? ",\"add_generation_prompt\":true"
                                         : ",\"add_generation_prompt\":false");
    rc = rc ? rc : tools_put(b, tree, e);
    if (!rc) {
        put_fields(b, tree, kwargs);
    }
    rc = rc ? rc : put_variables(b, kwargs, e);
    buf_putc(b, '}');
    return rc ? rc : b->failed ? err_nomem(e, "messages") : 0;
}

/* End the prompt where the last message ends; what the template writes after it is
 * dropped. */
static int cut_at_mark(struct buf *prompt, struct err *e)
{
    const char mark[] = CHAT_CONTINUE_MARK;
    size_t n = sizeof(mark) - 2; /* a template that trims removes the mark's space */
    char *found = NULL, *end = prompt->data + prompt->len;

    for (char *at = prompt->data; at && (at = memmem(at, (size_t)(end - at), mark, n)) != NULL;
         at++) {
        found = at;
    }
    if (!found) {
        return err_set_param(e, ERR_INVALID, "continue_final_message",
                             "the model's chat template does not write the last message's text; it "
                             "cannot be continued");
    }
    bool kept = found[n] == ' ';
    while (!kept && found > prompt->data && strchr(" \t\r\n", found[-1])) {
        found--;
    }
    prompt->len = (size_t)(found - prompt->data);
    *found = '\0';
    return 0;
}

/* Render the prompt. A text that is certain to be too long is not rendered to its end,
 * unless the end is what is kept of it, or where the last message is looked for. */
static int render(struct completion *c, const struct buf *context, struct buf *prompt,
                  const struct api_context *ctx, struct err *e)
{
    size_t most = prompt_most_bytes(ctx);
    bool bounded = most > 0 && most < LIMIT_TEMPLATE_OUTPUT_BYTES && !c->truncate &&
                   !c->continue_final_message;

    buf_init(prompt, bounded ? most : LIMIT_TEMPLATE_OUTPUT_BYTES);
    int rc = ctx->render_chat(ctx->arg, context->data, context->len, prompt, e);
    if (rc == ERR_INVALID && bounded && prompt->failed && !prompt->no_memory) {
        return prompt_refuse_bytes(e, "messages", ctx);
    }
    if (rc == ERR_INVALID && e) {
        memcpy(e->param, "messages", sizeof("messages"));
    }
    return rc;
}

int chat_read(struct completion *c, const cJSON *tree, const struct api_context *ctx, struct err *e)
{
    struct buf context, prompt;

    if (ctx->chat.missing) {
        return err_set(e, ERR_UNSUPPORTED,
                       "chat is not possible: %s; use /v1/completions with a prompt",
                       ctx->chat.missing);
    }
    buf_init(&context, LIMIT_RESPONSE_BYTES);
    buf_init(&prompt, 0);
    int rc = tools_read(c, tree, ctx, e);
    rc = rc ? rc : put_context(&context, c, tree, ctx, e);
    rc = rc ? rc : render(c, &context, &prompt, ctx, e);
    buf_release(&context);
    rc = rc || !c->continue_final_message ? rc : cut_at_mark(&prompt, e);
    const char *text = prompt.data ? prompt.data : "";
    c->parsed = tools_active(c) || ctx->chat.reasons;
    if (!rc && c->parsed) {
        c->opens_reasoning =
            ctx->opens_reasoning && ctx->opens_reasoning(ctx->arg, text, prompt.len);
        c->params.skip_special = false; /* the format's marks may be special tokens */
    }
    rc = rc ? rc : structured_read(c, tree, ctx, e);
    rc = rc ? rc : prompt_from_text(c, text, prompt.len, ctx, e);
    buf_release(&prompt);
    return rc;
}
