/* `system` and `messages` of /v1/messages as a chat's messages.
 *
 *     system                        the first system message
 *     messages[].content            text blocks: parts of a message's content
 *       tool_use, thinking          tool_calls and reasoning_content of the assistant
 *       tool_result                 messages of the role tool, before the turn's text
 *
 * If the last message is the assistant's, the answer continues it.
 */
#include <string.h>

#include "server/api/agents/translate.h"
#include "server/api/json_fields.h"

/* Agents send an attribution header as a system block of its own, with a checksum that
 * changes from turn to turn. It is no instruction, and left in it would change the
 * prompt's first tokens, and with them every cached prefix. */
#define ATTRIBUTION "x-anthropic-billing-header"

/* ---- content blocks ---- */

/* The type of block `v` of message i; NULL with the error set. */
static const cJSON *block_type(struct translation *t, const cJSON *v, int i)
{
    const cJSON *type = cJSON_IsObject(v) ? tree_member(v, "type") : NULL;

    if (!is_plain_string(type)) {
        refuse_entry(t, i, ".content has a block that is no object with a type");
        return NULL;
    }
    if (json_is(type, "text") && !cJSON_IsString(tree_member(v, "text"))) {
        refuse_entry(t, i, ".content has a text block without text");
        return NULL;
    }
    return type;
}

static int error_of(const struct translation *t)
{
    return t->e ? t->e->code : ERR_INVALID;
}

/* Remove an attribution header from the beginning of a text. */
static void drop_attribution(cJSON *text)
{
    size_t len = json_string_len(text), n = sizeof(ATTRIBUTION) - 1;

    if (len < n || memcmp(text->valuestring, ATTRIBUTION, n) != 0) {
        return;
    }
    char *end = memchr(text->valuestring, '\n', len);
    size_t gone = end ? (size_t)(end - text->valuestring) + 1 : len;
    memmove(text->valuestring, text->valuestring + gone, len - gone + 1);
    text->valueint = (int)(len - gone);
}

/* Move a text to the message, unless it is empty. */
static void move_text(struct translation *t, cJSON *message, cJSON *object, const char *name)
{
    cJSON *text = tree_member(object, name);

    if (text && json_string_len(text)) {
        tree_add_part(t, message, tree_take(object, name));
    }
}

/* Move the member `name` of `object`, a text or text blocks, to the message. */
static int move_texts(struct translation *t, cJSON *message, cJSON *object, const char *name, int i,
                      const char *where)
{
    cJSON *content = tree_member(object, name);

    if (cJSON_IsString(content)) {
        move_text(t, message, object, name);
        return 0;
    }
    if (content && !cJSON_IsArray(content)) {
        return refuse_entry(t, i, ".content must be a text or a list of blocks");
    }
    for (cJSON *v = content ? content->child : NULL; v; v = v->next) {
        const cJSON *type = block_type(t, v, i);
        if (!type) {
            return error_of(t);
        }
        if (!json_is(type, "text")) {
            return refuse_type(t, i, where, type);
        }
        move_text(t, message, v, "text");
    }
    return 0;
}

static int put_system(struct translation *t, cJSON *object, const char *name, int i)
{
    cJSON *content = tree_member(object, name);

    if (cJSON_IsString(content)) {
        drop_attribution(content);
    }
    for (cJSON *v = cJSON_IsArray(content) ? content->child : NULL; v; v = v->next) {
        cJSON *text = cJSON_IsObject(v) ? tree_member(v, "text") : NULL;
        if (cJSON_IsString(text)) {
            drop_attribution(text);
        }
    }
    cJSON *m = tree_add_system(t);
    int rc = move_texts(t, m, object, name, i, ".content");
    if (!rc && !tree_member(m, "content")) {
        cJSON_Delete(cJSON_DetachItemViaPointer(t->messages, m)); /* nothing is left of it */
    }
    return rc;
}

/* ---- the user's messages ---- */

/* The result of a call: a message of its own. */
static int put_result(struct translation *t, cJSON *block, int i)
{
    cJSON *m = tree_add_message(t, "tool"), *id = tree_member(block, "tool_use_id");

    if (!is_plain_string(id)) {
        return refuse_entry(t, i, ".content has a tool_result without tool_use_id");
    }
    tree_move(t, block, "tool_use_id", m, "tool_call_id");
    int rc = move_texts(t, m, block, "content", i, ".content's tool_result");
    tree_end_message(t, m);
    return rc;
}

static int put_user(struct translation *t, cJSON *message, int i)
{
    cJSON *content = tree_member(message, "content");
    cJSON *m = NULL;
    int rc = 0;

    if (!cJSON_IsArray(content)) {
        m = tree_add_message(t, "user");
        rc = move_texts(t, m, message, "content", i, "");
        tree_end_message(t, m);
        return rc;
    }
    for (cJSON *v = content->child; v && !rc && !tree_full(t); v = v->next) {
        const cJSON *type = block_type(t, v, i);
        rc = !type ? error_of(t) : json_is(type, "tool_result") ? put_result(t, v, i) : 0;
    }
    for (cJSON *v = content->child; v && !rc && !tree_full(t); v = v->next) {
        const cJSON *type = tree_member(v, "type");
        if (json_is(type, "text")) {
            m = m ? m : tree_add_message(t, "user");
            move_text(t, m, v, "text");
        } else if (!json_is(type, "tool_result")) {
            rc = refuse_type(t, i, ".content has a block that", type);
        }
    }
    if (m) {
        tree_end_message(t, m);
    }
    return rc;
}

/* ---- the assistant's messages ---- */

static int put_call(struct translation *t, cJSON *m, cJSON *block, int i)
{
    cJSON *input = tree_member(block, "input");
    struct buf arguments;

    if (!is_plain_string(tree_member(block, "id")) ||
        !is_plain_string(tree_member(block, "name"))) {
        return refuse_entry(t, i, ".content has a tool_use without id or name");
    }
    if (input && !cJSON_IsObject(input)) {
        return refuse_entry(t, i, ".content has a tool_use whose input is no object");
    }
    buf_init(&arguments, LIMIT_RESPONSE_BYTES);
    if (input) {
        json_put(&arguments, input);
    } else {
        buf_puts(&arguments, "{}");
    }
    t->failed = t->failed || arguments.failed;
    if (!t->failed) {
        cJSON *id = tree_take(block, "id"), *name = tree_take(block, "name");
        tree_add_call(t, m, id, name, arguments.data, arguments.len);
    }
    buf_release(&arguments);
    return 0;
}

/* Append a thinking block to the message's reasoning. */
static int put_thinking(struct translation *t, cJSON *block, struct buf *thoughts, int i)
{
    const cJSON *text = tree_member(block, "thinking");

    if (!cJSON_IsString(text)) {
        return refuse_entry(t, i, ".content has a thinking block without thinking");
    }
    if (thoughts->len && json_string_len(text)) {
        buf_putc(thoughts, '\n');
    }
    buf_append(thoughts, text->valuestring, json_string_len(text));
    t->failed = t->failed || thoughts->failed;
    return 0;
}

/* Blocks that tell nothing to this server's model: reasoning that another server has
 * encrypted, and calls of tools that another server ran itself. */
static bool is_foreign(const cJSON *type)
{
    size_t n = strlen(type->valuestring);

    return json_is(type, "redacted_thinking") || json_is(type, "server_tool_use") ||
           (n > 12 && strcmp(type->valuestring + n - 12, "_tool_result") == 0);
}

static int put_blocks(struct translation *t, cJSON *m, cJSON *content, struct buf *thoughts, int i)
{
    for (cJSON *v = content->child; v && !tree_full(t); v = v->next) {
        const cJSON *type = block_type(t, v, i);
        int rc = 0;
        if (!type) {
            return error_of(t);
        }
        if (json_is(type, "text")) {
            move_text(t, m, v, "text");
        } else if (json_is(type, "tool_use")) {
            rc = put_call(t, m, v, i);
        } else if (json_is(type, "thinking")) {
            rc = put_thinking(t, v, thoughts, i);
        } else if (!is_foreign(type)) {
            rc = refuse_type(t, i, ".content has a block that", type);
        }
        if (rc) {
            return rc;
        }
    }
    return 0;
}

static int put_assistant(struct translation *t, cJSON *message, int i)
{
    cJSON *m = tree_add_message(t, "assistant"), *content = tree_member(message, "content");
    struct buf thoughts;
    int rc;

    if (!cJSON_IsArray(content)) {
        rc = move_texts(t, m, message, "content", i, "");
        tree_end_message(t, m);
        return rc;
    }
    buf_init(&thoughts, LIMIT_RESPONSE_BYTES);
    rc = put_blocks(t, m, content, &thoughts, i);
    if (!rc && thoughts.len) {
        tree_add_text(t, m, "reasoning_content", thoughts.data, thoughts.len);
    }
    buf_release(&thoughts);
    tree_end_message(t, m);
    return rc;
}

/* ---- the conversation ---- */

static int put_turn(struct translation *t, cJSON *message, int i)
{
    const cJSON *role = cJSON_IsObject(message) ? tree_member(message, "role") : NULL;
    const cJSON *content = role ? tree_member(message, "content") : NULL;

    if (!is_plain_string(role)) {
        return refuse_entry(t, i, " must be an object with a role: user or assistant");
    }
    if (!cJSON_IsString(content) && !cJSON_IsArray(content)) {
        return refuse_entry(t, i, ".content must be a text or a list of blocks");
    }
    if (json_is(role, "user")) {
        return put_user(t, message, i);
    }
    if (json_is(role, "assistant")) {
        return put_assistant(t, message, i);
    }
    if (json_is(role, "system")) {
        return put_system(t, message, "content", i);
    }
    return err_set_param(
        t->e, ERR_INVALID, t->field,
        "messages[%d] has the role '%.40s'; user, assistant and system are allowed", i,
        role->valuestring);
}

/* A last message of the assistant is the beginning of its answer. */
static void continue_last(struct translation *t)
{
    const cJSON *first = t->messages ? t->messages->child : NULL,
                *last = first ? first->prev : NULL;

    t->c->continue_final_message = last && json_is(tree_member(last, "role"), "assistant") &&
                                   cJSON_IsArray(tree_member(last, "content")) &&
                                   !tree_member(last, "tool_calls");
}

int messages_put_input(struct translation *t, cJSON *body)
{
    cJSON *messages = tree_member(body, "messages"), *system = tree_member(body, "system");
    int i = 0, rc = 0;

    t->field = "system";
    if (system && !cJSON_IsString(system) && !cJSON_IsArray(system)) {
        return err_set_param(t->e, ERR_INVALID, "system",
                             "system must be a text or a list of text blocks, not %s",
                             json_kind(system));
    }
    rc = system ? put_system(t, body, "system", 0) : 0;
    t->field = "messages";
    if (!rc && (!cJSON_IsArray(messages) || !messages->child)) {
        return err_set_param(t->e, ERR_INVALID, "messages",
                             messages ? "messages must be a list of at least one message"
                                      : "messages is missing; give a list of {role, content}");
    }
    for (cJSON *m = rc ? NULL : messages->child; m && !rc && !tree_full(t); m = m->next) {
        t->entry = i + 1;
        rc = put_turn(t, m, i++);
    }
    t->entry = 0;
    continue_last(t);
    return rc;
}
