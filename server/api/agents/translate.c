/* What the translations have in common: making a chat request's tree, and system
 * messages that a template refuses. */
#include "server/api/agents/translate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/api_structured.h"
#include "server/api/json_fields.h"

static bool has_role(const cJSON *message, const char *role)
{
    return json_is(cJSON_GetObjectItemCaseSensitive(message, "role"), role);
}

/* ---- making a tree ---- */

cJSON *tree_add(struct translation *t, cJSON *to, const char *name, cJSON *item)
{
    bool added = to && item &&
                 (name ? cJSON_AddItemToObject(to, name, item) : cJSON_AddItemToArray(to, item));

    if (!added) {
        cJSON_Delete(item);
        t->failed = true;
    }
    return added ? item : NULL;
}

/* A string node; its length is in valueint, as json_parse leaves it. */
static cJSON *new_text(const char *text, size_t len)
{
    cJSON *v = cJSON_CreateNull();
    char *copy = v ? cJSON_malloc(len + 1) : NULL;

    if (!copy) {
        cJSON_Delete(v);
        return NULL;
    }
    memcpy(copy, text, len);
    copy[len] = '\0';
    v->type = cJSON_String;
    v->valuestring = copy;
    v->valueint = (int)len;
    return v;
}

cJSON *tree_add_text(struct translation *t, cJSON *to, const char *name, const char *text,
                     size_t len)
{
    return tree_add(t, to, name, new_text(text, len));
}

cJSON *tree_add_word(struct translation *t, cJSON *to, const char *name, const char *word)
{
    return tree_add_text(t, to, name, word, strlen(word));
}

cJSON *tree_add_object(struct translation *t, cJSON *to, const char *name)
{
    return tree_add(t, to, name, cJSON_CreateObject());
}

cJSON *tree_add_list(struct translation *t, cJSON *to, const char *name)
{
    return tree_add(t, to, name, cJSON_CreateArray());
}

cJSON *tree_member(const cJSON *object, const char *name)
{
    cJSON *v = cJSON_GetObjectItemCaseSensitive(object, name);

    return cJSON_IsNull(v) ? NULL : v;
}

cJSON *tree_take(cJSON *object, const char *name)
{
    cJSON *v = tree_member(object, name);

    return v ? cJSON_DetachItemViaPointer(object, v) : NULL;
}

void tree_move(struct translation *t, cJSON *object, const char *from, cJSON *to, const char *name)
{
    cJSON *v = tree_take(object, from);

    if (v) {
        tree_add(t, to, name, v);
    }
}

void tree_add_function(struct translation *t, cJSON *list, cJSON *tool, const char *schema)
{
    cJSON *entry = tree_add_object(t, list, NULL);

    if (entry) {
        entry->valueint = t->entry;
    }
    tree_add_word(t, entry, "type", "function");
    cJSON *function = tree_add_object(t, entry, "function");
    tree_move(t, tool, "name", function, "name");
    tree_move(t, tool, "description", function, "description");
    tree_move(t, tool, schema, function, "parameters");
    tree_move(t, tool, "strict", function, "strict");
}

bool tree_full(const struct translation *t)
{
    return t->n_messages > LIMIT_MESSAGES || t->n_calls > LIMIT_TOOL_CALLS;
}

cJSON *tree_add_message(struct translation *t, const char *role)
{
    t->n_messages++;
    cJSON *m = tree_add_object(t, t->messages, NULL);

    if (m) {
        m->valueint = t->entry;
    }
    tree_add_word(t, m, "role", role);
    return m;
}

void tree_add_part(struct translation *t, cJSON *message, cJSON *text)
{
    cJSON *parts = tree_member(message, "content");

    parts = parts ? parts : tree_add_list(t, message, "content");
    cJSON *part = tree_add_object(t, parts, NULL);
    tree_add_word(t, part, "type", "text");
    tree_add(t, part, "text", text);
}

cJSON *tree_add_system(struct translation *t)
{
    cJSON *first = t->messages ? t->messages->child : NULL;

    return first && !first->next && has_role(first, "system") ? first
                                                              : tree_add_message(t, "system");
}

void tree_end_message(struct translation *t, cJSON *message)
{
    if (!message || cJSON_HasObjectItem(message, "content")) {
        return;
    }
    if (tree_member(message, "tool_calls") || tree_member(message, "reasoning_content")) {
        tree_add(t, message, "content", cJSON_CreateNull());
    } else {
        tree_add_word(t, message, "content", "");
    }
}

void tree_add_call(struct translation *t, cJSON *message, cJSON *id, cJSON *name,
                   const char *arguments, size_t len)
{
    cJSON *calls = tree_member(message, "tool_calls");

    t->n_calls++;
    calls = calls ? calls : tree_add_list(t, message, "tool_calls");
    cJSON *call = tree_add_object(t, calls, NULL);
    tree_add(t, call, "id", id);
    tree_add_word(t, call, "type", "function");
    cJSON *function = tree_add_object(t, call, "function");
    tree_add(t, function, "name", name);
    tree_add_text(t, function, "arguments", arguments, len);
}

void put_named_choice(struct translation *t, cJSON *choice)
{
    cJSON *to = tree_add_object(t, t->chat, "tool_choice");

    tree_add_word(t, to, "type", "function");
    to = tree_add_object(t, to, "function");
    tree_move(t, choice, "name", to, "name");
}

void put_thinking_switch(struct translation *t, bool on)
{
    static const char *const names[] = {"enable_thinking", "thinking"};
    cJSON *kwargs = tree_member(t->chat, "chat_template_kwargs");

    kwargs = kwargs ? kwargs : tree_add_object(t, t->chat, "chat_template_kwargs");
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        if (!cJSON_GetObjectItemCaseSensitive(kwargs, names[i])) {
            tree_add(t, kwargs, names[i], cJSON_CreateBool(on));
        }
    }
}

void put_constraints(struct translation *t, cJSON *body)
{
    for (int i = 1; i < STRUCTURED_FIELDS; i++) { /* response_format has another name here */
        tree_move(t, body, structured_fields[i], t->chat, structured_fields[i]);
    }
}

void ignore_tool(struct translation *t, const char *type)
{
    char name[80];

    snprintf(name, sizeof(name), "tools.%.50s", type);
    note_ignored(t->c->ignored, sizeof(t->c->ignored), name);
}

/* ---- errors ---- */

int refuse_entry(struct translation *t, int i, const char *what)
{
    return err_set_param(t->e, ERR_INVALID, t->field, "%s[%d]%s", t->field, i, what);
}

int refuse_type(struct translation *t, int i, const char *where, const cJSON *type)
{
    return err_set_param(t->e, ERR_UNSUPPORTED, t->field,
                         "%s[%d]%s is of type '%.40s', which this server does not take%s", t->field,
                         i, where, type->valuestring, api_why_blind(t->ctx, type->valuestring));
}

bool is_plain_string(const cJSON *v)
{
    return cJSON_IsString(v) && !json_has_nul(v);
}

/* ---- system messages that a template refuses ---- */

/* The message's content as a list of parts. */
static cJSON *parts_of(struct translation *t, cJSON *message)
{
    cJSON *content = tree_take(message, "content");

    if (cJSON_IsArray(content)) {
        return tree_add(t, message, "content", content);
    }
    tree_add_part(t, message, content);
    return tree_member(message, "content");
}

static void add_text_part(struct translation *t, cJSON *parts, const char *text)
{
    cJSON *part = tree_add_object(t, parts, NULL);

    tree_add_word(t, part, "type", "text");
    tree_add_word(t, part, "text", text);
}

/* Append the system message's parts to those of a user turn, between marks. */
static void append_marked(struct translation *t, cJSON *to, cJSON *system)
{
    cJSON *from = parts_of(t, system);

    add_text_part(t, to, "<system-reminder>");
    while (from && from->child) {
        tree_add(t, to, NULL, cJSON_DetachItemViaPointer(from, from->child));
    }
    add_text_part(t, to, "</system-reminder>");
}

static void join_parts(struct translation *t, cJSON *to, cJSON *message)
{
    cJSON *from = parts_of(t, message);

    while (from && from->child) {
        tree_add(t, to, NULL, cJSON_DetachItemViaPointer(from, from->child));
    }
}

/* Make user turns of the system messages from the index `first` on. A turn joins the
 * user's turn before or behind it, since some templates want turns to alternate. False:
 * there is none. */
static bool system_to_user(struct translation *t, int first)
{
    cJSON *before = NULL, *next;
    bool marked = false, found = false;
    int i = 0;

    for (cJSON *m = t->messages->child; m && !t->failed; m = next, i++) {
        bool system = has_role(m, "system") || has_role(m, "developer"),
             late = system && i >= first, user = has_role(m, "user");
        next = m->next;
        found = found || late;
        if (late && !before) {
            cJSON *turn = cJSON_CreateObject();
            tree_add_word(t, turn, "role", "user");
            append_marked(t, tree_add_list(t, turn, "content"), m);
            if (turn) {
                turn->valueint = m->valueint;
            }
            if (!turn || !cJSON_ReplaceItemViaPointer(t->messages, m, turn)) {
                t->failed = true;
                return true;
            }
            before = turn;
            marked = true;
        } else if (late || (user && before && marked)) {
            if (late) {
                append_marked(t, parts_of(t, before), m);
                marked = true;
            } else {
                join_parts(t, parts_of(t, before), m);
            }
            cJSON_Delete(cJSON_DetachItemViaPointer(t->messages, m));
        } else {
            before = user ? m : NULL;
            marked = false;
        }
    }
    return found;
}

int translated_read(struct completion *c, cJSON *chat, const struct api_context *ctx, struct err *e)
{
    struct translation t = {.c = c, .ctx = ctx, .chat = chat, .e = e};
    int rc = chat_read(c, chat, ctx, e);

    t.messages = cJSON_GetObjectItemCaseSensitive(chat, "messages");
    if (rc) {
        translated_message_error(&t, e);
    }
    for (int first = 1; first >= 0 && rc == ERR_INVALID && !c->prompt; first--) {
        struct err again = {0};
        if (!system_to_user(&t, first)) {
            continue;
        }
        chat_tools_release(&c->tools);
        int second = t.failed ? err_nomem(&again, "messages") : chat_read(c, chat, ctx, &again);
        if (second != ERR_INVALID) {
            if (second && e) {
                translated_message_error(&t, &again);
                *e = again;
            }
            rc = second;
        }
    }
    return rc;
}
