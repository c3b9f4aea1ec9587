/* `messages` of a chat request: validated, and written as the chat template gets them.
 *
 * Content may be a string or a list of text parts. A template that iterates over parts
 * gets parts; any other gets one string, the parts joined by newlines.
 *
 * Every tool message answers a call of an assistant message before it, by the call's
 * id. The older form, function_call and the role `function`, has no ids: it is written
 * as calls and tool messages with ids made here. Reasoning is accepted as `reasoning`
 * and as `reasoning_content`, and written under both names.
 */
#include <stdio.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

/* What was read of the messages so far. */
struct history {
    const struct api_context *ctx;
    /* [n_open] calls that no tool message has answered: their ids, strings of the
     * body's tree, or their names, of calls in the older form */
    struct open_call {
        const char *id, *name; /* id: NULL in the older form */
        int32_t number;        /* from 0 through the whole conversation */
    } open[LIMIT_CALLS_UNANSWERED];
    int n_open;
    int32_t n_calls; /* of all messages */
    int i;           /* the message */
    bool mark;       /* it ends with CHAT_CONTINUE_MARK */
};

static int refuse(struct err *e, int i, const char *what)
{
    return err_set_param(e, ERR_INVALID, "messages", "messages[%d]%s", i, what);
}

static const cJSON *member(const cJSON *object, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(object, name);

    return cJSON_IsNull(v) ? NULL : v;
}

/* ---- roles ---- */

enum role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_DEVELOPER, ROLE_TOOL, ROLE_FUNCTION };
static const char *const ROLES[] = {"system", "user", "assistant", "developer", "tool", "function"};

static int read_role(enum role *ret, const cJSON *m, int i, struct err *e)
{
    const cJSON *role = cJSON_GetObjectItemCaseSensitive(m, "role");

    if (!cJSON_IsString(role)) {
        return refuse(e, i, " needs a role: system, developer, user, assistant or tool");
    }
    if (json_has_nul(role)) {
        return refuse(e, i, ".role holds the character NUL (\\u0000), which it may not");
    }
    for (size_t k = 0; k < ARRAY_LEN(ROLES); k++) {
        if (json_is(role, ROLES[k])) {
            *ret = (enum role)k;
            return 0;
        }
    }
    return err_set_param(
        e, ERR_INVALID, "messages",
        "messages[%d] has the role '%.40s'; system, developer, user, assistant and tool are "
        "allowed",
        i, role->valuestring);
}

/* The role's name for the template. Most know only the older name of the developer. */
static const char *role_name(enum role role, const struct api_context *ctx)
{
    return role == ROLE_DEVELOPER && !ctx->chat.knows_developer ? "system"
           : role == ROLE_FUNCTION                              ? "tool"
                                                                : ROLES[role];
}

/* ---- content ---- */

const char *api_why_blind(const struct api_context *ctx, const char *type)
{
    bool seen = strstr(type, "image") || strstr(type, "video");

    return seen && ctx->chat.skips_vision
               ? ": the model's vision tower is skipped, its text part alone is served"
               : "";
}

/* The text of a content part, a string; NULL with the error set. */
static const cJSON *part_text(const cJSON *part, const struct history *h, struct err *e)
{
    int i = h->i;

    const cJSON *type = cJSON_GetObjectItemCaseSensitive(part, "type");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(part, "text");

    if (!cJSON_IsObject(part) || !cJSON_IsString(type)) {
        refuse(e, i, ".content has a part that is no object with a type");
        return NULL;
    }
    if (!json_is(type, "text")) {
        err_set_param(
            e, ERR_UNSUPPORTED, "messages",
            "messages[%d].content has a part of type '%.40s'; this server takes only 'text'%s", i,
            type->valuestring, api_why_blind(h->ctx, type->valuestring));
        return NULL;
    }
    if (!cJSON_IsString(text)) {
        refuse(e, i, ".content has a text part without text");
        return NULL;
    }
    return text;
}

/* Append the content as the inside of one JSON string. */
static int put_joined(struct buf *b, const cJSON *content, const struct history *h, struct err *e)
{
    if (cJSON_IsString(content)) {
        buf_json_escape(b, content->valuestring, json_string_len(content));
        return 0;
    }
    if (!cJSON_IsArray(content) || !content->child) {
        return refuse(e, h->i, ".content must be a text, or a list of text parts");
    }
    for (const cJSON *p = content->child; p; p = p->next) {
        const cJSON *text = part_text(p, h, e);
        if (!text) {
            return e ? e->code : ERR_INVALID;
        }
        buf_puts(b, p == content->child ? "" : "\\n");
        buf_json_escape(b, text->valuestring, json_string_len(text));
    }
    return 0;
}

static bool is_empty(const cJSON *content)
{
    return !content || cJSON_IsNull(content) || (cJSON_IsArray(content) && !content->child) ||
           (cJSON_IsString(content) && json_string_len(content) == 0);
}

/* `may_lack`: the message says something else, calls or reasoning. */
static int put_content(struct buf *b, const cJSON *content, bool may_lack, bool calls,
                       const struct history *h, struct err *e)
{
    bool parts = h->ctx->chat.wants_parts;

    if (may_lack && is_empty(content)) {
        if (h->mark) {
            return refuse(e, h->i, " has no content that could be continued");
        }
        buf_puts(b, calls && h->ctx->chat.null_content ? "null" : parts ? "[]" : "\"\"");
        return 0;
    }
    buf_puts(b, parts ? "[{\"type\":\"text\",\"text\":\"" : "\"");
    int rc = put_joined(b, content, h, e);
    buf_puts(b, h->mark ? CHAT_CONTINUE_MARK "\"" : "\"");
    if (parts) {
        buf_puts(b, "}]");
    }
    return rc;
}

/* ---- calls ---- */

/* The open call of this id, or in the older form (id NULL) of this name; -1: none. */
static int find_open(const struct history *h, const char *id, const char *name)
{
    for (int k = 0; k < h->n_open; k++) {
        const struct open_call *o = &h->open[k];
        if (id ? o->id && strcmp(o->id, id) == 0 : !o->id && strcmp(o->name, name) == 0) {
            return k;
        }
    }
    return -1;
}

/* Note a call that waits for its answer. */
static int open_call(struct history *h, const char *id, const char *name, struct err *e)
{
    if (h->n_calls == LIMIT_TOOL_CALLS || h->n_open == LIMIT_CALLS_UNANSWERED) {
        return err_set_param(e, ERR_INVALID, "messages",
                             "messages[%d]: more than %d tool calls, or %d without an answer", h->i,
                             LIMIT_TOOL_CALLS, LIMIT_CALLS_UNANSWERED);
    }
    h->open[h->n_open++] = (struct open_call){id, name, h->n_calls++};
    return 0;
}

/* Append a call's arguments that are no JSON object, as of one that its length has cut:
 * their text, for a template that takes objects as a member of one. */
static void put_broken_arguments(struct buf *b, const cJSON *text, bool as_object)
{
    buf_puts(b, as_object ? "{\"arguments\":" : "");
    buf_json_string(b, text->valuestring, json_string_len(text));
    buf_puts(b, as_object ? "}" : "");
}

/* Whether a template can take them as an object. The levels around them: the template's
 * variables, messages, the message, its calls, the call, its function. */
static bool are_arguments(const cJSON *tree)
{
    return cJSON_IsObject(tree) && template_reaches(tree, 6);
}

/* Append `text`, a call's arguments, as the template takes them. */
static int put_arguments(struct buf *b, const cJSON *text, const struct history *h, struct err *e)
{
    bool as_object = h->ctx->chat.object_arguments;
    cJSON *tree = NULL;

    if (!text || (cJSON_IsString(text) && json_string_len(text) == 0)) {
        buf_puts(b, as_object ? "{}" : "\"{}\"");
        return 0;
    }
    if (!cJSON_IsString(text)) {
        return refuse(e, h->i, " has a call whose arguments are no string of JSON");
    }
    int rc = json_parse(&tree, text->valuestring, json_string_len(text), NULL);
    if (rc == ERR_NOMEM) {
        return err_nomem(e, "a call's arguments");
    }
    if (rc || !are_arguments(tree)) {
        put_broken_arguments(b, text, as_object);
        rc = 0;
    } else if (as_object) {
        rc = template_numbers_round(tree, e);
        json_put(b, tree);
    } else {
        buf_json_string(b, text->valuestring, json_string_len(text));
    }
    cJSON_Delete(tree);
    return rc;
}

/* Append one call. `id`: NULL in the older form. */
static int put_call(struct buf *b, const cJSON *id, const cJSON *function, struct history *h,
                    struct err *e)
{
    const cJSON *name = member(function, "name");
    char made[32];

    if (!cJSON_IsString(name) || json_has_nul(name) || json_string_len(name) == 0) {
        return refuse(e, h->i, " has a call that names no function");
    }
    if (id && find_open(h, id->valuestring, NULL) >= 0) {
        return err_set_param(e, ERR_INVALID, "messages",
                             "messages[%d] has two calls of the id '%.100s', or one before it that "
                             "has no answer",
                             h->i, id->valuestring);
    }
    snprintf(made, sizeof(made), "call%05d", h->n_calls);
    int rc = open_call(h, id ? id->valuestring : NULL, name->valuestring, e);
    if (rc) {
        return rc;
    }
    buf_puts(b, "{\"id\":");
    buf_json_string(b, id ? id->valuestring : made, strlen(id ? id->valuestring : made));
    buf_puts(b, ",\"type\":\"function\",\"function\":{\"name\":");
    buf_json_string(b, name->valuestring, json_string_len(name));
    buf_puts(b, ",\"arguments\":");
    rc = put_arguments(b, member(function, "arguments"), h, e);
    buf_puts(b, "}}");
    return rc;
}

/* An id: a string of 1 to LIMIT_CALL_ID_BYTES bytes without NUL. */
static bool is_id(const cJSON *v)
{
    return cJSON_IsString(v) && json_string_len(v) > 0 &&
           json_string_len(v) <= LIMIT_CALL_ID_BYTES && !json_has_nul(v);
}

static int put_calls(struct buf *b, const cJSON *calls, struct history *h, struct err *e)
{
    int rc = 0;

    if (!cJSON_IsArray(calls)) {
        return refuse(e, h->i, ".tool_calls must be a list");
    }
    buf_puts(b, ",\"tool_calls\":[");
    for (const cJSON *v = calls->child; v && !rc; v = v->next) {
        if (!cJSON_IsObject(v) || !cJSON_IsObject(member(v, "function"))) {
            return refuse(e, h->i, ".tool_calls has an entry that is no object with a function");
        }
        if (!is_id(member(v, "id"))) {
            return refuse(e, h->i, ".tool_calls has a call without an id, a string");
        }
        buf_puts(b, v == calls->child ? "" : ",");
        rc = put_call(b, member(v, "id"), member(v, "function"), h, e);
    }
    buf_putc(b, ']');
    return rc;
}

/* The calls of an assistant message in either form, or nothing. */
static int put_all_calls(struct buf *b, const cJSON *m, struct history *h, struct err *e)
{
    const cJSON *calls = member(m, "tool_calls"), *call = member(m, "function_call");

    calls = cJSON_IsArray(calls) && !calls->child ? NULL : calls;
    if ((calls || call) && !h->ctx->chat.knows_calls) {
        return err_set_param(e, ERR_UNSUPPORTED, "messages",
                             "messages[%d] has tool calls, for which the model's chat template has "
                             "no place",
                             h->i);
    }
    if (calls) {
        return put_calls(b, calls, h, e);
    }
    if (!call) {
        return 0;
    }
    if (!cJSON_IsObject(call)) {
        return refuse(e, h->i, ".function_call must be an object");
    }
    buf_puts(b, ",\"tool_calls\":[");
    int rc = put_call(b, NULL, call, h, e);
    buf_putc(b, ']');
    return rc;
}

/* What a tool message answers: its id, and the function's name. */
static int put_answered(struct buf *b, const cJSON *m, enum role role, struct history *h,
                        struct err *e)
{
    const cJSON *id = member(m, "tool_call_id"), *name = member(m, "name");
    char made[32];

    if (role == ROLE_TOOL && !is_id(id)) {
        return refuse(e, h->i, " needs a tool_call_id, the id of the call that it answers");
    }
    if (role == ROLE_FUNCTION && (!cJSON_IsString(name) || json_has_nul(name))) {
        return refuse(e, h->i, " needs a name, that of the function that it answers for");
    }
    int k = role == ROLE_TOOL ? find_open(h, id->valuestring, NULL)
                              : find_open(h, NULL, name->valuestring);
    if (k < 0) {
        return err_set_param(e, ERR_INVALID, "messages",
                             "messages[%d] answers the call '%.100s', but no assistant message "
                             "before it has this call, or it is answered already",
                             h->i, role == ROLE_TOOL ? id->valuestring : name->valuestring);
    }
    struct open_call o = h->open[k];
    memmove(&h->open[k], &h->open[k + 1], (size_t)(--h->n_open - k) * sizeof(o));
    snprintf(made, sizeof(made), "call%05d", o.number);
    buf_puts(b, ",\"tool_call_id\":");
    buf_json_string(b, o.id ? o.id : made, strlen(o.id ? o.id : made));
    buf_puts(b, ",\"name\":");
    buf_json_string(b, o.name, strlen(o.name));
    return 0;
}

/* ---- one message ---- */

/* Past reasoning, under the names that templates read. */
static int put_reasoning(struct buf *b, const cJSON *m, const struct history *h, struct err *e)
{
    static const char *const NAMES[] = {"reasoning_content", "reasoning", "thinking"};
    const cJSON *text = member(m, NAMES[0]) ? member(m, NAMES[0]) : member(m, NAMES[1]);
    size_t n = h->ctx->chat.thinking ? 3 : 2;

    if (!text) {
        return 0;
    }
    if (!cJSON_IsString(text)) {
        return refuse(e, h->i, ".reasoning must be a string");
    }
    for (size_t k = 0; k < n; k++) {
        buf_printf(b, ",\"%s\":", NAMES[k]);
        buf_json_string(b, text->valuestring, json_string_len(text));
    }
    return 0;
}

/* Other members that are strings: name, and what the template may use. */
static int put_others(struct buf *b, const cJSON *m, bool named, int i, struct err *e)
{
    static const char *const WRITTEN[] = {"role",         "content",           "reasoning",
                                          "tool_calls",   "reasoning_content", "tool_call_id",
                                          "function_call"};
    int n = 0;

    for (const cJSON *k = m->child; k; k = k->next) {
        bool written = named && strcmp(k->string, "name") == 0;
        if (++n > 32) {
            return refuse(e, i, " has more than 32 members");
        }
        for (size_t t = 0; t < ARRAY_LEN(WRITTEN); t++) {
            written = written || strcmp(k->string, WRITTEN[t]) == 0;
        }
        if (strcmp(k->string, "name") == 0 && !cJSON_IsString(k) && !cJSON_IsNull(k)) {
            return refuse(e, i, ".name must be a string");
        }
        if (written || !cJSON_IsString(k)) {
            continue;
        }
        buf_putc(b, ',');
        buf_json_string(b, k->string, strlen(k->string));
        buf_putc(b, ':');
        json_put(b, k);
    }
    return 0;
}

/* Members that belong to one role: calls and reasoning, or what is answered. */
static int put_of_role(struct buf *b, const cJSON *m, enum role role, struct history *h,
                       struct err *e)
{
    if (role == ROLE_ASSISTANT) {
        int rc = put_all_calls(b, m, h, e);
        return rc ? rc : put_reasoning(b, m, h, e);
    }
    if (role == ROLE_TOOL || role == ROLE_FUNCTION) {
        return put_answered(b, m, role, h, e);
    }
    const cJSON *calls = member(m, "tool_calls");
    if (calls && !(cJSON_IsArray(calls) && !calls->child)) {
        return refuse(e, h->i, ".tool_calls belongs to an assistant message");
    }
    return 0;
}

static int put_message(struct buf *b, const cJSON *m, struct history *h, struct err *e)
{
    enum role role = ROLE_USER;

    if (!cJSON_IsObject(m)) {
        return err_set_param(e, ERR_INVALID, "messages", "messages[%d] must be an object, not %s",
                             h->i, json_kind(m));
    }
    int rc = read_role(&role, m, h->i, e);
    if (rc) {
        return rc;
    }
    const cJSON *list = member(m, "tool_calls");
    bool assistant = role == ROLE_ASSISTANT,
         calls = assistant && ((list && list->child) || member(m, "function_call")),
         thought = assistant && (member(m, "reasoning") || member(m, "reasoning_content")),
         answers = role == ROLE_TOOL || role == ROLE_FUNCTION;
    buf_puts(b, h->i ? ",{\"role\":\"" : "{\"role\":\"");
    buf_puts(b, role_name(role, h->ctx));
    buf_puts(b, "\",\"content\":");
    rc = put_content(b, cJSON_GetObjectItemCaseSensitive(m, "content"), calls || thought, calls, h,
                     e);
    rc = rc ? rc : put_of_role(b, m, role, h, e);
    rc = rc ? rc : put_others(b, m, answers, h->i, e);
    buf_putc(b, '}');
    return rc;
}

int messages_put(struct buf *b, const cJSON *messages, bool mark, const struct api_context *ctx,
                 struct err *e)
{
    int n = cJSON_IsArray(messages) ? cJSON_GetArraySize(messages) : 0, rc = 0;
    struct history h = {.ctx = ctx};

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
    for (const cJSON *m = messages->child; m && !rc; m = m->next, h.i++) {
        h.mark = mark && !m->next;
        rc = put_message(b, m, &h, e);
    }
    buf_putc(b, ']');
    return rc;
}
