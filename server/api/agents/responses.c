/* The body of /v1/responses, OpenAI's newer API, as a chat request. Nothing is stored:
 * a conversation is sent whole, as items. The items are read in responses_input.c.
 *
 *     instructions                  the first system message
 *     tools[].name, parameters      tools[].function; tools of other types are left out
 *     text.format                   response_format
 *     reasoning.effort              reasoning_effort
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/agents/translate.h"
#include "server/api/field_rows.h"
#include "server/api/json_fields.h"

/* A member of the body that is larger is not repeated in the answer, whose events would
 * repeat it three times. */
enum { ECHO_MAX_BYTES = 128 * 1024 };

/* ---- the fields ---- */

#define ANY_OBJECT "{\"type\":\"object\"}"

static int refuse_state(void *ret, const struct field *f, const cJSON *v,
                        const struct api_context *ctx, struct err *e)
{
    (void)ret, (void)v, (void)ctx;
    return err_set_param(e, ERR_UNSUPPORTED, f->name,
                         "%s is not supported: this server stores no responses; send the whole "
                         "conversation as input",
                         f->name);
}

static int read_background(void *ret, const struct field *f, const cJSON *v,
                           const struct api_context *ctx, struct err *e)
{
    (void)ret, (void)ctx;
    if (!cJSON_IsBool(v)) {
        return field_wrong_type(f, v, "true or false", e);
    }
    return cJSON_IsTrue(v) ? err_set_param(e, ERR_UNSUPPORTED, f->name,
                                           "background is not supported: this server stores no "
                                           "responses; set stream instead")
                           : 0;
}

static int read_truncation(void *ret, const struct field *f, const cJSON *v,
                           const struct api_context *ctx, struct err *e)
{
    (void)ret, (void)ctx;
    return json_is(v, "auto") || json_is(v, "disabled")
               ? 0
               : field_wrong_type(f, v, "\"auto\" or \"disabled\"", e);
}

static int read_array(void *ret, const struct field *f, const cJSON *v,
                      const struct api_context *ctx, struct err *e)
{
    (void)ret, (void)ctx;
    return cJSON_IsArray(v) ? 0 : field_wrong_type(f, v, "a list", e);
}

static int read_include(void *ret, const struct field *f, const cJSON *v,
                        const struct api_context *ctx, struct err *e)
{
    int rc = read_array(ret, f, v, ctx, e);

    for (const cJSON *m = rc ? NULL : v->child; m; m = m->next) {
        if (!cJSON_IsString(m)) {
            return field_wrong_type(f, v, "a list of strings", e);
        }
    }
    return rc;
}

static int read_string(void *ret, const struct field *f, const cJSON *v,
                       const struct api_context *ctx, struct err *e)
{
    (void)ret, (void)ctx;
    return cJSON_IsString(v) ? 0 : field_wrong_type(f, v, "a string", e);
}

/* Rows that are accepted and have no effect. */
#define ROW_UNUSED(n, f, s) ROW_CUSTOM(n, f, s, "Accepted, but has no effect.")
#define ROW_STATE(n, s) \
    ROW_CUSTOM(n, refuse_state, s, "Only null: this server stores no responses.")

static const struct field rows[] = {
    ROW_CUSTOM("model", read_model, "{\"type\":\"string\"}",
               "The served model; it may be left out."),
    ROW_CUSTOM("input", read_later,
               "{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"array\",\"maxItems\":4096,\"items\":{"
               "\"type\":\"object\"}}]}",
               "A text, or the conversation as items: messages, reasoning, function_call and "
               "function_call_output."),
    ROW_CUSTOM("instructions", read_string, "{\"type\":\"string\"}", "The system prompt."),
    {.name = "max_output_tokens",
     .type = FIELD_INT,
     AT(params.max_tokens),
     GIVEN(has_ceiling),
     .lo = 1,
     .hi = INT32_MAX,
     .help = "Most tokens to generate; more than fit are cut to what fits."},
    ROW_FLOAT("temperature", params.temperature, 0, 2, "0 is greedy."),
    ROW_OVER("top_p", params.top_p, 0, 1,
             "Keep the likeliest tokens whose probabilities sum to this."),
    ROW_CUSTOM("top_k", read_top_k, "{\"type\":\"integer\",\"minimum\":-1,\"maximum\":2147483647}",
               "Keep the k likeliest tokens; -1 or 0: all."),
    ROW_FLOAT("presence_penalty", params.presence_penalty, -2, 2,
              "Subtracted from the logit of each token that was already generated."),
    ROW_FLOAT("frequency_penalty", params.frequency_penalty, -2, 2,
              "Subtracted once for each time the token was generated."),
    ROW_CUSTOM("stop", read_stop,
               "{\"oneOf\":[{\"type\":\"string\",\"minLength\":1},{\"type\":\"array\",\"maxItems\":"
               "16,\"items\":{\"type\":\"string\",\"minLength\":1}}]}",
               "The text ends before any of these."),
    {.name = "seed",
     .type = FIELD_CUSTOM,
     GIVEN(has_seed),
     .read = read_seed,
     .schema = "{\"type\":\"integer\",\"minimum\":-9223372036854775808,\"maximum\":"
               "18446744073709551615}",
     .help = "The same seed gives the same tokens."},
    ROW_CUSTOM("cache_salt", read_cache_salt,
               "{\"type\":\"string\",\"minLength\":1,\"maxLength\":256}",
               "Share cached prefixes only with requests that have the same salt."),
    ROW_BOOL("stream", params.stream, "Server-sent events instead of one JSON body."),
    ROW_UNUSED("stream_options", read_any_object, ANY_OBJECT),
    ROW_CUSTOM("tools", read_array, "{\"type\":\"array\",\"items\":{\"type\":\"object\"}}",
               "Functions; tools of other types are left out and named in X-Quire-Ignored."),
    ROW_CUSTOM("tool_choice", read_later,
               "{\"oneOf\":[{\"enum\":[\"auto\",\"none\",\"required\"]},{\"type\":\"object\"}]}",
               "Which tools may or must be called."),
    ROW_BOOL("parallel_tool_calls", ignored_bool, "Whether one answer may have several calls."),
    ROW_CUSTOM("text", read_any_object, ANY_OBJECT, "The answer's format, as text.format."),
    ROW_CUSTOM("reasoning", read_any_object, ANY_OBJECT,
               "How long to reason, as reasoning.effort; summaries are not made."),
    ROW_CUSTOM("chat_template_kwargs", read_any_object, ANY_OBJECT,
               "Further variables for the chat template."),
    ROW_BOOL("store", ignored_bool, "Accepted and answered false: no response is stored."),
    ROW_CUSTOM("background", read_background, "{\"type\":\"boolean\"}", "Only false."),
    ROW_CUSTOM("truncation", read_truncation, "{\"enum\":[\"auto\",\"disabled\"]}",
               "Accepted; a conversation that does not fit is refused."),
    ROW_CUSTOM("include", read_include, "{\"type\":\"array\",\"items\":{\"type\":\"string\"}}",
               "message.output_text.logprobs: the tokens' log-probabilities; nothing else is "
               "included."),
    ROW_INT("top_logprobs", ignored_int, 0, LIMIT_LOGPROBS,
            "Likeliest tokens listed for each token, where include asks for log-probabilities."),
    ROW_INT("max_tool_calls", ignored_int, 1, INT32_MAX, "Accepted, but has no effect."),
    ROW_UNUSED("metadata", read_any_object, ANY_OBJECT),
    ROW_UNUSED("client_metadata", read_any_object, ANY_OBJECT),
    ROW_UNUSED("context_management", read_array, "{\"type\":\"array\"}"),
    ROW_STRING("user", "Accepted, but has no effect."),
    ROW_STRING("safety_identifier", "Accepted, but has no effect."),
    ROW_STRING("prompt_cache_key", "Accepted, but has no effect: every prefix is cached."),
    ROW_STRING("prompt_cache_retention", "Accepted, but has no effect."),
    ROW_UNUSED("prompt_cache_options", read_any_object, ANY_OBJECT),
    ROW_STRING("service_tier", "Accepted, but has no effect."),
    ROW_STATE("previous_response_id", "{\"type\":\"null\"}"),
    ROW_STATE("conversation", "{\"type\":\"null\"}"),
    ROW_MISSING("prompt", "stored prompts"),
    ROW_MISSING("moderation", "moderation"),
};
const struct field_table responses_fields = {rows, ARRAY_LEN(rows), ROUTE_BOTH};

/* ---- what the answer repeats ---- */

static void put_name(struct buf *b, const char *name)
{
    buf_printf(b, "\"%s\":", name);
}

/* If what was appended from `begin` on is too large, put `otherwise` in its place. */
static void limit_echo(struct buf *b, size_t begin, const char *otherwise)
{
    if (!b->failed && b->len - begin > ECHO_MAX_BYTES) {
        b->len = begin;
        buf_puts(b, otherwise);
    }
}

/* A member as it was sent, or `otherwise`. */
static void echo(struct buf *b, const cJSON *body, const char *name, const char *otherwise)
{
    const cJSON *v = tree_member(body, name);

    put_name(b, name);
    size_t begin = b->len;
    if (v) {
        json_put(b, v);
    } else {
        buf_puts(b, otherwise);
    }
    limit_echo(b, begin, otherwise);
    buf_putc(b, ',');
}

/* The shortest decimal that is this float. */
static void echo_float(struct buf *b, const char *name, float v)
{
    char text[32] = "0";

    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, (double)v);
        if (strtof(text, NULL) == v) {
            break;
        }
    }
    buf_printf(b, "\"%s\":%s,", name, text);
}

/* One function as it was sent, with null for what it does not have. */
static void echo_tool(struct buf *b, const cJSON *tool)
{
    static const char *const members[] = {"name", "description", "parameters", "strict"};

    buf_puts(b, "{\"type\":\"function\"");
    for (size_t i = 0; i < ARRAY_LEN(members); i++) {
        const cJSON *m = tree_member(tool, members[i]);
        buf_putc(b, ',');
        put_name(b, members[i]);
        if (m) {
            json_put(b, m);
        } else {
            buf_puts(b, "null");
        }
    }
    buf_putc(b, '}');
}

static void echo_tools(struct buf *b, const cJSON *body)
{
    const cJSON *tools = tree_member(body, "tools");
    bool any = false;

    put_name(b, "tools");
    size_t begin = b->len;
    buf_putc(b, '[');
    for (const cJSON *v = tools ? tools->child : NULL; v; v = v->next) {
        if (cJSON_IsObject(v) && json_is(tree_member(v, "type"), "function")) {
            buf_puts(b, any ? "," : "");
            echo_tool(b, v);
            any = true;
        }
    }
    buf_putc(b, ']');
    limit_echo(b, begin, "[]");
    buf_putc(b, ',');
}

/* Close an object behind the comma of its last member. */
static void end_object(struct buf *b)
{
    b->len -= b->len && !b->failed;
    buf_puts(b, "},");
}

static void echo_text(struct buf *b, const cJSON *body)
{
    const cJSON *text = tree_member(body, "text");

    buf_puts(b, "\"text\":{");
    if (text && tree_member(text, "verbosity")) {
        echo(b, text, "verbosity", "null");
    }
    echo(b, text, "format", "{\"type\":\"text\"}");
    end_object(b);
}

static void echo_reasoning(struct buf *b, const cJSON *body)
{
    const cJSON *reasoning = tree_member(body, "reasoning");

    buf_puts(b, "\"reasoning\":{");
    echo(b, reasoning, "effort", "null");
    echo(b, reasoning, "summary", "null");
    end_object(b);
}

/* The members of a response object that repeat the request, in c->echo. */
static int make_echo(struct translation *t, const cJSON *body)
{
    const struct gen_params *p = &t->c->params;
    struct buf b;

    buf_init(&b, LIMIT_RESPONSE_BYTES);
    buf_puts(&b, "\"previous_response_id\":null,\"store\":false,\"background\":false,"
                 "\"truncation\":\"disabled\",\"service_tier\":\"default\",");
    echo(&b, body, "top_logprobs", "0");
    echo(&b, body, "instructions", "null");
    echo_tools(&b, body);
    echo(&b, body, "tool_choice", "\"auto\"");
    echo(&b, body, "parallel_tool_calls", "true");
    echo_text(&b, body);
    echo_reasoning(&b, body);
    echo_float(&b, "temperature", p->temperature);
    echo_float(&b, "top_p", p->top_p);
    echo_float(&b, "presence_penalty", p->presence_penalty);
    echo_float(&b, "frequency_penalty", p->frequency_penalty);
    echo(&b, body, "max_output_tokens", "null");
    echo(&b, body, "max_tool_calls", "null");
    echo(&b, body, "metadata", "{}");
    echo(&b, body, "user", "null");
    echo(&b, body, "safety_identifier", "null");
    echo(&b, body, "prompt_cache_key", "null");
    if (b.failed) {
        buf_release(&b);
        return err_nomem(t->e, "a response");
    }
    t->c->echo = b.data; /* the buffer's memory is handed over */
    return 0;
}

/* ---- tools ---- */

/* Whether tool_choice is a list of allowed tools, and this one is not in it. */
static bool is_left_out(const cJSON *allowed, const cJSON *tool)
{
    const cJSON *name = tree_member(tool, "name");

    for (const cJSON *v = allowed ? allowed->child : NULL; v; v = v->next) {
        const cJSON *other = cJSON_IsObject(v) ? tree_member(v, "name") : NULL;
        if (cJSON_IsString(name) && cJSON_IsString(other) && cJSON_Compare(name, other, true)) {
            return false;
        }
    }
    return allowed != NULL;
}

/* The error of a list of more functions than a chat may have. */
static int refuse_count(struct translation *t, const char *field, const char *list)
{
    return err_set_param(t->e, ERR_INVALID, field, "%s has more than %d functions", list,
                         LIMIT_TOOLS);
}

static int put_tools(struct translation *t, cJSON *body, const cJSON *allowed)
{
    cJSON *tools = tree_member(body, "tools"), *list = NULL;
    int i = 0, n = 0;

    t->field = "tools";
    for (cJSON *v = tools ? tools->child : NULL; v; v = v->next, i++) {
        const cJSON *type = cJSON_IsObject(v) ? tree_member(v, "type") : NULL;
        if (!is_plain_string(type)) {
            return refuse_entry(t, i, " must be an object with a type");
        }
        if (!json_is(type, "function")) {
            ignore_tool(t, type->valuestring);
            continue;
        }
        if (++n > LIMIT_TOOLS) {
            return refuse_count(t, "tools", "tools");
        }
        if (is_left_out(allowed, v)) {
            continue;
        }
        list = list ? list : tree_add_list(t, t->chat, "tools");
        t->entry = i + 1;
        tree_add_function(t, list, v, "parameters");
    }
    t->entry = 0;
    return 0;
}

static int put_choice(struct translation *t, cJSON *body)
{
    cJSON *choice = tree_member(body, "tool_choice");
    const cJSON *type = cJSON_IsObject(choice) ? tree_member(choice, "type") : NULL,
                *allowed = NULL;

    if (json_is(type, "allowed_tools")) {
        allowed = tree_member(choice, "tools");
        if (!cJSON_IsArray(allowed) || !cJSON_IsString(tree_member(choice, "mode"))) {
            return err_set_param(t->e, ERR_INVALID, "tool_choice",
                                 "tool_choice of type allowed_tools needs a mode and tools");
        }
        if (cJSON_GetArraySize(allowed) > LIMIT_TOOLS) {
            return refuse_count(t, "tool_choice", "tool_choice.tools");
        }
    }
    int rc = put_tools(t, body, allowed);
    if (rc || !choice) {
        return rc;
    }
    if (allowed) {
        tree_move(t, choice, "mode", t->chat, "tool_choice");
    } else if (cJSON_IsString(choice)) {
        tree_move(t, body, "tool_choice", t->chat, "tool_choice");
    } else if (json_is(type, "function") && is_plain_string(tree_member(choice, "name"))) {
        put_named_choice(t, choice);
    } else if (is_plain_string(type) && !json_is(type, "function")) {
        ignore_tool(t, type->valuestring); /* a tool of another type was left out */
    } else {
        return err_set_param(t->e, ERR_INVALID, "tool_choice",
                             "tool_choice must be \"auto\", \"none\", \"required\", or an object "
                             "that names a function");
    }
    return 0;
}

/* ---- format and reasoning ---- */

static int put_format(struct translation *t, cJSON *body)
{
    cJSON *text = tree_member(body, "text"), *format = text ? tree_member(text, "format") : NULL;
    const cJSON *type = cJSON_IsObject(format) ? tree_member(format, "type") : NULL;

    if (!format || json_is(type, "text")) {
        return 0;
    }
    if (!is_plain_string(type)) {
        return err_set_param(t->e, ERR_INVALID, "text",
                             "text.format must be an object with a type: text, json_object, "
                             "json_schema or structural_tag");
    }
    cJSON *to = tree_add_object(t, t->chat, "response_format");
    tree_add_word(t, to, "type", type->valuestring);
    if (json_is(type, "json_schema")) {
        to = tree_add_object(t, to, "json_schema");
        tree_move(t, format, "name", to, "name");
        tree_move(t, format, "description", to, "description");
        tree_move(t, format, "schema", to, "schema");
        tree_move(t, format, "strict", to, "strict");
        return 0;
    }
    static const char *const beside[] = {"schema", "format", "structures", "triggers"};
    for (size_t i = 0; i < ARRAY_LEN(beside); i++) {
        tree_move(t, format, beside[i], to, beside[i]);
    }
    return 0;
}

/* Log-probabilities are those of chats, where include asks for them. */
static void put_logprobs(struct translation *t, cJSON *body)
{
    const cJSON *include = tree_member(body, "include");

    for (const cJSON *m = include ? include->child : NULL; m; m = m->next) {
        if (json_is(m, "message.output_text.logprobs")) {
            tree_add(t, t->chat, "logprobs", cJSON_CreateTrue());
            tree_move(t, body, "top_logprobs", t->chat, "top_logprobs");
            return;
        }
    }
}

static void put_reasoning(struct translation *t, cJSON *body)
{
    cJSON *reasoning = tree_member(body, "reasoning");

    if (!reasoning) {
        return;
    }
    if (json_is(tree_member(reasoning, "effort"), "none")) {
        put_thinking_switch(t, false);
    }
    tree_move(t, reasoning, "effort", t->chat, "reasoning_effort");
}

int responses_translate(struct translation *t, cJSON *body)
{
    int rc = fields_read(&responses_fields, t->c, body, t->ctx, t->c->ignored,
                         sizeof(t->c->ignored), t->e);

    rc = rc || t->counts ? rc : make_echo(t, body);
    tree_move(t, body, "chat_template_kwargs", t->chat, "chat_template_kwargs");
    rc = rc ? rc : responses_put_input(t, body);
    tree_move(t, body, "parallel_tool_calls", t->chat, "parallel_tool_calls");
    rc = rc ? rc : put_choice(t, body);
    rc = rc ? rc : put_format(t, body);
    put_logprobs(t, body);
    put_reasoning(t, body);
    return rc;
}
