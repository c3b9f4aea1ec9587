/* The body of /v1/messages, Anthropic's API, as a chat request.
 *
 *     tools[].input_schema          tools[].function.parameters
 *     thinking, output_config       chat_template_kwargs, reasoning_effort, response_format
 *
 * The conversation is read in messages_input.c.
 */
#include <string.h>

#include "server/api/agents/translate.h"
#include "server/api/field_rows.h"
#include "server/api/json_fields.h"

/* ---- the fields ---- */

#define TEXT_OR_BLOCKS                                                                      \
    "{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"array\",\"items\":{\"type\":\"object\"," \
    "\"required\":[\"type\"]}}]}"
#define ANY_OBJECT "{\"type\":\"object\"}"

static const struct field rows[] = {
    ROW_CUSTOM("model", read_model, "{\"type\":\"string\"}",
               "The served model; it may be left out."),
    ROW_CUSTOM("messages", read_later,
               "{\"type\":\"array\",\"minItems\":1,\"maxItems\":4096,\"items\":{\"type\":"
               "\"object\",\"required\":[\"role\",\"content\"],\"properties\":{\"role\":{\"enum\":["
               "\"user\",\"assistant\",\"system\"]},\"content\":" TEXT_OR_BLOCKS "}}}",
               "The conversation, in text, tool_use, tool_result and thinking blocks. A last "
               "message of the assistant is continued."),
    ROW_CUSTOM("system", read_later, TEXT_OR_BLOCKS, "The system prompt, a text or text blocks."),
    {.name = "max_tokens",
     .type = FIELD_INT,
     AT(params.max_tokens),
     GIVEN(has_ceiling),
     .lo = 1,
     .hi = INT32_MAX,
     .help = "Most tokens to generate; more than fit are cut to what fits. Required, except for "
             "count_tokens."},
    ROW_CUSTOM(
        "stop_sequences", read_stop,
        "{\"type\":\"array\",\"maxItems\":16,\"items\":{\"type\":\"string\",\"minLength\":1}}",
        "The text ends before any of these."),
    ROW_FLOAT("temperature", params.temperature, 0, 2, "0 is greedy."),
    SAMPLING_ROWS,
    ROW_BOOL("stream", params.stream, "Server-sent events instead of one JSON body."),
    ROW_CUSTOM("tools", read_later,
               "{\"type\":\"array\",\"items\":{\"type\":\"object\",\"properties\":{\"name\":{"
               "\"type\":\"string\"},\"description\":{\"type\":\"string\"},\"input_schema\":{"
               "\"type\":\"object\"}}}}",
               "Tools with an input_schema; those of other types are left out and named in "
               "X-Quire-Ignored."),
    ROW_CUSTOM("tool_choice", read_any_object,
               "{\"type\":\"object\",\"required\":[\"type\"],\"properties\":{\"type\":{\"enum\":["
               "\"auto\",\"any\",\"tool\",\"none\"]},\"name\":{\"type\":\"string\"},"
               "\"disable_parallel_tool_use\":{\"type\":\"boolean\"}}}",
               "Which tools may or must be called."),
    ROW_CUSTOM("thinking", read_any_object,
               "{\"type\":\"object\",\"required\":[\"type\"],\"properties\":{\"type\":{\"enum\":["
               "\"enabled\",\"disabled\",\"adaptive\"]},\"budget_tokens\":{\"type\":\"integer\"}}}",
               "Whether the model reasons, where its template can tell it; budget_tokens has no "
               "effect."),
    ROW_CUSTOM("output_config", read_any_object,
               "{\"type\":\"object\",\"properties\":{\"effort\":{\"type\":\"string\"},\"format\":{"
               "\"type\":\"object\"}}}",
               "How long to reason, and a JSON Schema for the answer."),
    ROW_CUSTOM("metadata", read_any_object, ANY_OBJECT, "Accepted, but has no effect."),
    ROW_CUSTOM("cache_control", read_any_object, ANY_OBJECT,
               "Accepted, but has no effect: every prefix is cached."),
    ROW_CUSTOM("context_management", read_any_object, ANY_OBJECT, "Accepted, but has no effect."),
    ROW_STRING("service_tier", "Accepted, but has no effect."),
    ROW_CUSTOM("chat_template_kwargs", read_any_object, ANY_OBJECT,
               "Further variables for the chat template."),
    CONSTRAINT_ROWS,
    ROW_MISSING("container", "containers"),
    ROW_MISSING("mcp_servers", "MCP servers"),
};
const struct field_table messages_fields = {rows, ARRAY_LEN(rows), ROUTE_BOTH};

/* ---- tools ---- */

/* Read entry i of the list of tools: its function goes to the end of *list, which is
 * made if need be. A tool that Anthropic would run is left out and named. */
static int put_tool(struct translation *t, cJSON *tool, int i, cJSON **list)
{
    const cJSON *type = cJSON_IsObject(tool) ? tree_member(tool, "type") : NULL,
                *schema = tree_member(tool, "input_schema");

    if (!cJSON_IsObject(tool) || (type && !is_plain_string(type))) {
        return refuse_entry(t, i, " must be an object; its type must be a string");
    }
    if (type && !json_is(type, "custom") && !schema) {
        ignore_tool(t, type->valuestring);
        return 0;
    }
    if (!is_plain_string(tree_member(tool, "name"))) {
        return refuse_entry(t, i, ".name is missing; a tool needs one, a string");
    }
    if (!cJSON_IsObject(schema)) {
        return refuse_entry(t, i,
                            schema ? ".input_schema must be a JSON Schema, an object"
                                   : ".input_schema is missing; a tool needs one, a JSON Schema");
    }
    *list = *list ? *list : tree_add_list(t, t->chat, "tools");
    tree_add_function(t, *list, tool, "input_schema");
    return 0;
}

static int put_tools(struct translation *t, cJSON *body)
{
    cJSON *tools = tree_member(body, "tools"), *list = NULL;
    int i = 0, rc = 0;

    t->field = "tools";
    if (tools && !cJSON_IsArray(tools)) {
        return err_set_param(t->e, ERR_INVALID, "tools", "tools must be a list, not %s",
                             json_kind(tools));
    }
    for (cJSON *v = tools ? tools->child : NULL; v && !rc; v = v->next) {
        t->entry = i + 1;
        rc = put_tool(t, v, i++, &list);
    }
    t->entry = 0;
    return rc;
}

/* Whether a tool of this name was left out. Those that were taken have lost their
 * names. */
static bool names_left_out(const cJSON *body, const cJSON *name)
{
    const cJSON *tools = tree_member(body, "tools");

    for (const cJSON *v = tools ? tools->child : NULL; v; v = v->next) {
        const cJSON *other = tree_member(v, "name");
        if (cJSON_IsString(other) && cJSON_Compare(other, name, true)) {
            return true;
        }
    }
    return false;
}

static int put_choice(struct translation *t, cJSON *body)
{
    cJSON *choice = tree_member(body, "tool_choice");
    const cJSON *type = choice ? tree_member(choice, "type") : NULL,
                *name = choice ? tree_member(choice, "name") : NULL;

    if (!choice) {
        return 0;
    }
    const cJSON *alone = tree_member(choice, "disable_parallel_tool_use");
    if (alone && !cJSON_IsBool(alone)) {
        return err_set_param(t->e, ERR_INVALID, "tool_choice",
                             "tool_choice.disable_parallel_tool_use must be true or false");
    }
    if (alone) {
        tree_add(t, t->chat, "parallel_tool_calls", cJSON_CreateBool(!cJSON_IsTrue(alone)));
    }
    if (json_is(type, "auto") || json_is(type, "none")) {
        tree_add_word(t, t->chat, "tool_choice", type->valuestring);
    } else if (json_is(type, "any")) {
        tree_add_word(t, t->chat, "tool_choice", "required");
    } else if (!json_is(type, "tool") || !is_plain_string(name)) {
        return err_set_param(t->e, ERR_INVALID, "tool_choice",
                             "tool_choice must have the type auto, any, none, or tool with a name");
    } else if (names_left_out(body, name)) {
        note_ignored(t->c->ignored, sizeof(t->c->ignored), "tool_choice");
    } else {
        put_named_choice(t, choice);
    }
    return 0;
}

/* ---- reasoning and format ---- */

static int put_thinking_config(struct translation *t, cJSON *body)
{
    const cJSON *thinking = tree_member(body, "thinking"),
                *type = thinking ? tree_member(thinking, "type") : NULL;
    bool off = json_is(type, "disabled");

    if (!thinking) {
        return 0;
    }
    if (!off && !json_is(type, "enabled") && !json_is(type, "adaptive")) {
        return err_set_param(t->e, ERR_INVALID, "thinking",
                             "thinking.type must be enabled, adaptive or disabled");
    }
    put_thinking_switch(t, !off);
    return 0;
}

static int put_output_config(struct translation *t, cJSON *body)
{
    cJSON *config = tree_member(body, "output_config"),
          *format = config ? tree_member(config, "format") : NULL;

    if (config) {
        tree_move(t, config, "effort", t->chat, "reasoning_effort");
    }
    if (!format) {
        return 0;
    }
    if (!cJSON_IsObject(format) || !json_is(tree_member(format, "type"), "json_schema")) {
        return err_set_param(t->e, ERR_INVALID, "output_config",
                             "output_config.format must be an object of the type json_schema");
    }
    cJSON *to = tree_add_object(t, t->chat, "response_format");
    tree_add_word(t, to, "type", "json_schema");
    to = tree_add_object(t, to, "json_schema");
    tree_add_word(t, to, "name", "answer");
    tree_move(t, format, "schema", to, "schema");
    tree_add(t, to, "strict", cJSON_CreateTrue());
    return 0;
}

int messages_translate(struct translation *t, cJSON *body)
{
    int rc = fields_read(&messages_fields, t->c, body, t->ctx, t->c->ignored, sizeof(t->c->ignored),
                         t->e);

    tree_move(t, body, "chat_template_kwargs", t->chat, "chat_template_kwargs");
    rc = rc ? rc : messages_put_input(t, body);
    rc = rc ? rc : put_tools(t, body);
    rc = rc ? rc : put_choice(t, body);
    rc = rc ? rc : put_thinking_config(t, body);
    rc = rc ? rc : put_output_config(t, body);
    put_constraints(t, body);
    if (!rc && !t->counts && !t->c->has_ceiling) {
        rc = err_set_param(t->e, ERR_INVALID, "max_tokens",
                           "max_tokens is missing; give the most tokens to generate");
    }
    return rc;
}
