/* `instructions` and `input` of /v1/responses as a chat's messages.
 *
 * Reasoning, text and calls that follow each other are one turn of the assistant, so
 * they become one message: a turn begins anew with reasoning after anything else, and
 * with a text after a text or a call.
 */
#include <string.h>

#include "server/api/agents/translate.h"
#include "server/api/json_fields.h"

/* ---- parts ---- */

/* The text of a part of item i; NULL with the error set. */
static cJSON *part_text(struct translation *t, cJSON *part, int i, int *ret_rc)
{
    static const char *const texts[] = {"input_text", "output_text",    "text",
                                        "refusal",    "reasoning_text", "summary_text"};
    const cJSON *type = cJSON_IsObject(part) ? tree_member(part, "type") : NULL;

    if (!is_plain_string(type)) {
        *ret_rc = refuse_entry(t, i, " has a part that is no object with a type");
        return NULL;
    }
    for (size_t k = 0; k < ARRAY_LEN(texts); k++) {
        if (!json_is(type, texts[k])) {
            continue;
        }
        cJSON *text = tree_take(part, json_is(type, "refusal") ? "refusal" : "text");
        if (!cJSON_IsString(text)) {
            cJSON_Delete(text);
            *ret_rc = refuse_entry(t, i, " has a text part without text");
            return NULL;
        }
        return text;
    }
    *ret_rc = refuse_type(t, i, " has a part that", type);
    return NULL;
}

/* Move the member `name` of an item, a text or a list of parts, to the message. */
static int move_texts(struct translation *t, cJSON *message, cJSON *item, const char *name, int i)
{
    cJSON *content = tree_member(item, name);
    int rc = 0;

    if (cJSON_IsString(content)) {
        tree_add_part(t, message, tree_take(item, name));
        return 0;
    }
    if (!cJSON_IsArray(content)) {
        return err_set_param(t->e, ERR_INVALID, t->field,
                             "input[%d].%s must be a text or a list of parts", i, name);
    }
    for (cJSON *v = content->child; v && !rc; v = v->next) {
        cJSON *text = part_text(t, v, i, &rc);
        if (text) {
            tree_add_part(t, message, text);
        }
    }
    tree_end_message(t, message);
    return rc;
}

/* ---- items ---- */

/* The reader of a list of items. */
struct input {
    struct translation *t;
    cJSON *turn; /* the assistant's message that is being made; NULL: none */
};

static cJSON *assistant_turn(struct input *in, bool anew)
{
    if (!in->turn || anew) {
        in->turn = tree_add_message(in->t, "assistant");
    }
    return in->turn;
}

static int put_message(struct input *in, cJSON *item, int i)
{
    static const char *const roles[] = {"user", "assistant", "system", "developer"};
    struct translation *t = in->t;
    const cJSON *role = tree_member(item, "role");
    cJSON *m = NULL;

    if (!is_plain_string(role)) {
        return refuse_entry(t, i, " needs a role: user, assistant, system or developer");
    }
    if (json_is(role, "assistant")) {
        m = assistant_turn(in, in->turn && (tree_member(in->turn, "content") ||
                                            tree_member(in->turn, "tool_calls")));
        return move_texts(t, m, item, "content", i);
    }
    in->turn = NULL;
    for (size_t k = 0; k < ARRAY_LEN(roles) && !m; k++) {
        if (json_is(role, roles[k])) {
            m = k < 2 ? tree_add_message(t, roles[k]) : tree_add_system(t);
        }
    }
    return m           ? move_texts(t, m, item, "content", i)
           : t->failed ? 0
                       : err_set_param(t->e, ERR_INVALID, t->field,
                                       "input[%d] has the role '%.40s'; user, assistant, system "
                                       "and developer are allowed",
                                       i, role->valuestring);
}

/* Append the texts of a list of parts to the reasoning. */
static int put_thoughts(struct translation *t, struct buf *to, cJSON *parts, int i)
{
    int rc = 0;

    for (cJSON *v = cJSON_IsArray(parts) ? parts->child : NULL; v && !rc; v = v->next) {
        cJSON *text = part_text(t, v, i, &rc);
        if (text) {
            buf_puts(to, to->len ? "\n" : "");
            buf_append(to, text->valuestring, json_string_len(text));
        }
        cJSON_Delete(text);
    }
    return rc;
}

/* Reasoning: its text, or where another server has kept that to itself, its summary. */
static int put_reasoning(struct input *in, cJSON *item, int i)
{
    struct translation *t = in->t;
    struct buf thoughts;

    buf_init(&thoughts, LIMIT_RESPONSE_BYTES);
    int rc = put_thoughts(t, &thoughts, tree_member(item, "content"), i);
    if (!rc && !thoughts.len) {
        rc = put_thoughts(t, &thoughts, tree_member(item, "summary"), i);
    }
    t->failed = t->failed || thoughts.failed;
    if (!rc && !thoughts.failed && thoughts.len) {
        cJSON *m = assistant_turn(in, true);
        tree_add_text(t, m, "reasoning_content", thoughts.data, thoughts.len);
    }
    buf_release(&thoughts);
    return rc;
}

static int put_call(struct input *in, cJSON *item, int i)
{
    struct translation *t = in->t;
    const cJSON *arguments = tree_member(item, "arguments");

    if (!is_plain_string(tree_member(item, "call_id")) ||
        !is_plain_string(tree_member(item, "name")) || !cJSON_IsString(arguments)) {
        return refuse_entry(t, i, ", a function_call, needs call_id, name and arguments, strings");
    }
    cJSON *m = assistant_turn(in, false), *id = tree_take(item, "call_id"),
          *name = tree_take(item, "name");
    tree_add_call(t, m, id, name, arguments->valuestring, json_string_len(arguments));
    return 0;
}

static int put_output(struct input *in, cJSON *item, int i)
{
    struct translation *t = in->t;

    in->turn = NULL;
    if (!is_plain_string(tree_member(item, "call_id"))) {
        return refuse_entry(t, i, ", a function_call_output, needs the call_id of its call");
    }
    cJSON *m = tree_add_message(t, "tool");
    tree_move(t, item, "call_id", m, "tool_call_id");
    return move_texts(t, m, item, "output", i);
}

static int put_item(struct input *in, cJSON *item, int i)
{
    struct translation *t = in->t;
    const cJSON *type = cJSON_IsObject(item) ? tree_member(item, "type") : NULL;

    if (!cJSON_IsObject(item) || (type && !is_plain_string(type))) {
        return refuse_entry(t, i, " must be an object; its type must be a string");
    }
    if (!type || json_is(type, "message")) {
        return put_message(in, item, i);
    }
    if (json_is(type, "reasoning")) {
        return put_reasoning(in, item, i);
    }
    if (json_is(type, "function_call")) {
        return put_call(in, item, i);
    }
    if (json_is(type, "function_call_output")) {
        return put_output(in, item, i);
    }
    if (json_is(type, "item_reference")) {
        return refuse_entry(t, i, " refers to an item, but this server stores none; send the item");
    }
    /* Calls of tools that are left out, and their results: web_search_call … */
    note_ignored(t->c->ignored, sizeof(t->c->ignored), type->valuestring);
    return 0;
}

/* ---- the conversation ---- */

static void put_text_message(struct translation *t, const char *role, cJSON *text)
{
    tree_add_part(t, tree_add_message(t, role), text);
}

int responses_put_input(struct translation *t, cJSON *body)
{
    cJSON *input = tree_member(body, "input");
    struct input in = {.t = t};
    int i = 0, rc = 0;

    t->field = "input";
    if (!input || (!cJSON_IsString(input) && !cJSON_IsArray(input))) {
        return err_set_param(t->e, ERR_INVALID, "input", "input %s; give a text or a list of items",
                             input ? "must be a text or a list" : "is missing");
    }
    if (tree_member(body, "instructions")) {
        put_text_message(t, "system", tree_take(body, "instructions"));
    }
    if (cJSON_IsString(input)) {
        put_text_message(t, "user", tree_take(body, "input"));
        return 0;
    }
    for (cJSON *v = input->child; v && !rc && !tree_full(t); v = v->next) {
        t->entry = i + 1;
        rc = put_item(&in, v, i++);
    }
    t->entry = 0;
    /* Clients that look whether a server answers send no items at all. */
    if (!rc && !input->child) {
        tree_add_word(t, tree_add_message(t, "user"), "content", "");
    }
    for (cJSON *m = t->messages ? t->messages->child : NULL; m; m = m->next) {
        tree_end_message(t, m);
    }
    return rc;
}
