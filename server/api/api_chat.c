/* `messages` of a chat request: validated, rendered by the model's chat template, and
 * encoded.
 *
 * Content may be a string or a list of text parts. A template that iterates over parts
 * gets parts; any other gets one string, the parts joined by newlines. Special tokens
 * in the rendered text are encoded as such.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

/* Appended to the last message for rendering, to find where the prompt must end; the
 * same as in Hugging Face transformers. */
#define CONTINUE_MARK "CONTINUE_FINAL_MESSAGE_TAG "

static int refuse(struct err *e, int i, const char *what)
{
    return err_set_param(e, ERR_INVALID, "messages", "messages[%d]%s", i, what);
}

/* ---- one message ---- */

/* The role as the template gets it. */
static int read_role(const char **ret, const cJSON *m, int i, const struct api_context *ctx,
                     struct err *e)
{
    static const char *const ROLES[] = {"system", "user", "assistant", "developer"};
    const cJSON *role = cJSON_GetObjectItemCaseSensitive(m, "role");

    if (!cJSON_IsString(role)) {
        return refuse(e, i, " needs a role: system, developer, user or assistant");
    }
    if (json_has_nul(role)) {
        return refuse(e, i, ".role holds the character NUL (\\u0000), which it may not");
    }
    for (size_t k = 0; k < ARRAY_LEN(ROLES); k++) {
        if (json_is(role, ROLES[k])) {
            /* Most templates know only the older name of the developer. */
            *ret = k == 3 && !ctx->chat.knows_developer ? "system" : ROLES[k];
            return 0;
        }
    }
    if (json_is(role, "tool") || json_is(role, "function")) {
        return err_set_param(
            e, ERR_UNSUPPORTED, "messages",
            "messages[%d] has the role '%s', but this server has no tool calls yet", i,
            role->valuestring);
    }
    return err_set_param(
        e, ERR_INVALID, "messages",
        "messages[%d] has the role '%.40s'; system, developer, user and assistant are allowed", i,
        role->valuestring);
}

/* The text of a content part, a string; NULL with the error set. */
static const cJSON *part_text(const cJSON *part, int i, struct err *e)
{
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(part, "type");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(part, "text");

    if (!cJSON_IsObject(part) || !cJSON_IsString(type)) {
        refuse(e, i, ".content has a part that is no object with a type");
        return NULL;
    }
    if (!json_is(type, "text")) {
        err_set_param(
            e, ERR_UNSUPPORTED, "messages",
            "messages[%d].content has a part of type '%.40s'; this server takes only 'text'", i,
            type->valuestring);
        return NULL;
    }
    if (!cJSON_IsString(text)) {
        refuse(e, i, ".content has a text part without text");
        return NULL;
    }
    return text;
}

/* Append the content as the inside of one JSON string. */
static int put_joined(struct buf *b, const cJSON *content, int i, struct err *e)
{
    if (cJSON_IsString(content)) {
        buf_json_escape(b, content->valuestring, json_string_len(content));
        return 0;
    }
    if (!cJSON_IsArray(content) || !content->child) {
        return refuse(e, i, ".content must be a text, or a list of text parts");
    }
    for (const cJSON *p = content->child; p; p = p->next) {
        const cJSON *text = part_text(p, i, e);
        if (!text) {
            return e ? e->code : ERR_INVALID;
        }
        buf_puts(b, p == content->child ? "" : "\\n");
        buf_json_escape(b, text->valuestring, json_string_len(text));
    }
    return 0;
}

static int put_content(struct buf *b, const cJSON *content, int i, bool mark,
                       const struct api_context *ctx, struct err *e)
{
    buf_puts(b, ctx->chat.wants_parts ? "[{\"type\":\"text\",\"text\":\"" : "\"");
    int rc = put_joined(b, content, i, e);
    buf_puts(b, mark ? CONTINUE_MARK "\"" : "\"");
    if (ctx->chat.wants_parts) {
        buf_puts(b, "}]");
    }
    return rc;
}

/* Members besides role and content: name, and others that the template may use
 * (reasoning_content …). */
static int put_others(struct buf *b, const cJSON *m, int i, struct err *e)
{
    static const char *const TOOLS[] = {"tool_calls", "tool_call_id", "function_call"};
    int n = 0;

    for (const cJSON *k = m->child; k; k = k->next) {
        if (++n > 32) {
            return refuse(e, i, " has more than 32 members");
        }
        for (size_t t = 0; t < ARRAY_LEN(TOOLS); t++) {
            if (strcmp(k->string, TOOLS[t]) == 0 && !cJSON_IsNull(k) &&
                !(cJSON_IsArray(k) && !k->child)) {
                return err_set_param(
                    e, ERR_UNSUPPORTED, "messages",
                    "messages[%d].%s is not supported: this server has no tool calls yet", i,
                    TOOLS[t]);
            }
        }
        if (strcmp(k->string, "name") == 0 && !cJSON_IsString(k) && !cJSON_IsNull(k)) {
            return refuse(e, i, ".name must be a string");
        }
        if (strcmp(k->string, "role") == 0 || strcmp(k->string, "content") == 0 ||
            !cJSON_IsString(k)) {
            continue;
        }
        buf_putc(b, ',');
        json_put_string(b, k->string, strlen(k->string));
        buf_putc(b, ':');
        json_put(b, k);
    }
    return 0;
}

static int put_message(struct buf *b, const cJSON *m, int i, bool mark,
                       const struct api_context *ctx, struct err *e)
{
    const char *role = NULL;

    if (!cJSON_IsObject(m)) {
        return err_set_param(e, ERR_INVALID, "messages", "messages[%d] must be an object, not %s",
                             i, json_kind(m));
    }
    int rc = read_role(&role, m, i, ctx, e);
    if (rc) {
        return rc;
    }
    buf_puts(b, i ? ",{\"role\":" : "{\"role\":");
    json_put_string(b, role, strlen(role));
    buf_puts(b, ",\"content\":");
    rc = put_content(b, cJSON_GetObjectItemCaseSensitive(m, "content"), i, mark, ctx, e);
    rc = rc ? rc : put_others(b, m, i, e);
    buf_putc(b, '}');
    return rc;
}

/* ---- the template's variables ---- */

static int put_messages(struct buf *b, const cJSON *messages, bool mark,
                        const struct api_context *ctx, struct err *e)
{
    int n = cJSON_IsArray(messages) ? cJSON_GetArraySize(messages) : 0, i = 0, rc = 0;

    if (!messages || cJSON_IsNull(messages)) {
        return err_set_param(e, ERR_INVALID, "messages",
                             "messages is missing; give a list of {role, content}");
    }
    if (n < 1 || n > LIMIT_MESSAGES) {
        return err_set_param(e, ERR_INVALID, "messages",
                             "messages must be a list of 1 to %d, not %s%s", LIMIT_MESSAGES,
                             n ? "one of more" : json_kind(messages),
                             n || !cJSON_IsArray(messages) ? "" : " of none");
    }
    buf_puts(b, "\"messages\":[");
    for (const cJSON *m = messages->child; m && !rc; m = m->next, i++) {
        rc = put_message(b, m, i, mark && !m->next, ctx, e);
    }
    buf_putc(b, ']');
    return rc;
}

/* Refuse numbers that the template engine cannot represent: integers beyond 64 bits,
 * and doubles that are not finite. */
static int check_numbers(const cJSON *v, struct err *e)
{
    enum { MOST = 60 };
    char text[JSON_NUMBER_BYTES];
    bool minus, number = cJSON_IsNumber(v) && v->valuestring;
    uint64_t n;

    if (number &&
        (!isfinite(v->valuedouble) || strlen(v->valuestring) > MOST ||
         (!strpbrk(v->valuestring, ".eE") && (json_integer(v, &minus, &n) || n > INT64_MAX)))) {
        return err_set_param(e, ERR_INVALID, "chat_template_kwargs",
                             "chat_template_kwargs holds the number %s; integers of 63 bits and "
                             "finite doubles of at "
                             "most %d characters are allowed",
                             json_number_text(v, text), MOST);
    }
    for (const cJSON *m = v->child; m; m = m->next) {
        int rc = check_numbers(m, e);
        if (rc) {
            return rc;
        }
    }
    return 0;
}

static int put_variables(struct buf *b, const cJSON *kwargs, struct err *e)
{
    static const char *const FIELDS[] = {"messages", "tools", "documents", "add_generation_prompt"};

    for (const cJSON *k = kwargs ? kwargs->child : NULL; k; k = k->next) {
        for (size_t i = 0; i < ARRAY_LEN(FIELDS); i++) {
            if (strcmp(k->string, FIELDS[i]) == 0) {
                return err_set_param(
                    e, ERR_INVALID, "chat_template_kwargs",
                    "chat_template_kwargs may not set %s, which is a field of its own", FIELDS[i]);
            }
        }
        int rc = check_numbers(k, e);
        if (rc) {
            return rc;
        }
        buf_putc(b, ',');
        json_put_string(b, k->string, strlen(k->string));
        buf_putc(b, ':');
        json_put(b, k);
    }
    return 0;
}

/* End the prompt where the last message ends; what the template writes after it is
 * dropped. */
static int cut_at_mark(struct buf *prompt, struct err *e)
{
    const char mark[] = CONTINUE_MARK;
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

int chat_read(struct completion *c, const cJSON *tree, const struct api_context *ctx, struct err *e)
{
    struct buf context, prompt;

    if (ctx->chat.missing) {
        return err_set(e, ERR_UNSUPPORTED,
                       "chat is not possible: %s; use /v1/completions with a prompt",
                       ctx->chat.missing);
    }
    buf_init(&context, LIMIT_RESPONSE_BYTES);
    buf_init(&prompt, LIMIT_TEMPLATE_OUTPUT_BYTES);
    buf_putc(&context, '{');
    int rc = put_messages(&context, cJSON_GetObjectItemCaseSensitive(tree, "messages"),
                          c->continue_final_message, ctx, e);
    buf_puts(&context, c->add_generation_prompt ? ",\"add_generation_prompt\":true"
                                                : ",\"add_generation_prompt\":false");
    rc = rc ? rc
            : put_variables(&context,
                            cJSON_GetObjectItemCaseSensitive(tree, "chat_template_kwargs"), e);
    buf_putc(&context, '}');
    rc = rc ? rc : context.failed ? err_nomem(e, "messages") : 0;
    if (!rc) {
        rc = ctx->render_chat(ctx->arg, context.data, context.len, &prompt, e);
        if (rc == ERR_INVALID && e) {
            memcpy(e->param, "messages", sizeof("messages"));
        }
    }
    rc = rc || !c->continue_final_message ? rc : cut_at_mark(&prompt, e);
    rc = rc ? rc : prompt_from_text(c, prompt.data ? prompt.data : "", prompt.len, ctx, e);
    buf_release(&context);
    buf_release(&prompt);
    return rc;
}
