/* See grammar.h: the rule of one tool's call, for each kind of body. */
#include <stdio.h>
#include <string.h>

#include "models/chat/format/grammar.h"

/* A text of the description in which the marks of a header may be special tokens. */
static void put_marked(struct grammar_text *g, const char *text)
{
    const struct chat_format *f = g->f;

    while (text && *text) {
        const char *at = NULL, *mark = NULL;
        char plain[MARK_BYTES];

        for (int32_t i = 0; i < FORMAT_MARKS && f->header[i]; i++) {
            const char *found = strchr("<[", f->header[i][0]) ? strstr(text, f->header[i]) : NULL;
            if (found && (!at || found < at)) {
                at = found;
                mark = f->header[i];
            }
        }
        size_t len = at ? (size_t)(at - text) : strlen(text);
        len = MIN(len, sizeof(plain) - 1);
        memcpy(plain, text, len);
        plain[len] = '\0';
        if (len) {
            put_string(g->out, plain);
        }
        /* "function<sep>" is one mark of the parser and two parts here. */
        const char *special = mark ? strchr(mark, mark[0] == '[' ? '[' : '<') : NULL;
        put_marker(g->out, special);
        text = at ? at + strlen(mark) : text + len;
    }
}

/* ---- {"name": …, "arguments": …} ---- */

static void object_call(struct grammar_text *g, const struct chat_tool *t)
{
    const struct chat_format *f = g->f;
    struct buf text;

    if (!f->list && !f->bare) {
        put_marker(g->out, f->call_open);
        if (f->before_call && f->call_open) {
            put_string(g->out, f->before_call);
        }
    }
    buf_init(&text, 16 * NAME_BYTES);
    if (f->name_key) {
        buf_printf(&text, "{\"%s\": ", t->name);
    } else {
        buf_puts(&text, "{");
        if (f->key_id && !f->late_id) {
            buf_printf(&text, "\"%s\": \"", f->key_id);
            put_string(g->out, text.data);
            buf_puts(g->out, " /[0-9]{1,4}/");
            buf_clear(&text);
            buf_puts(&text, "\", ");
        }
        buf_printf(&text, "\"%s\": \"%s\", \"%s\": ", f->key_name, t->name, f->key_arguments);
    }
    put_string(g->out, text.data ? text.data : "");
    buf_release(&text);
    put_schema(g, t);
    if (f->key_id && f->late_id) {
        buf_puts(g->out, " \", \\\"id\\\": \\\"\" /[a-zA-Z0-9]{9}/ \"\\\"}\"");
    } else {
        put_string(g->out, "}");
    }
    if (!f->list && !f->bare) {
        if (f->after_call && f->call_close) {
            put_string(g->out, f->after_call);
        }
        put_marker(g->out, f->call_close);
    }
}

/* ---- name[ARGS]{…} ---- */

static void named_call(struct grammar_text *g, const struct chat_tool *t)
{
    const struct chat_format *f = g->f;

    put_marker(g->out, f->call_open);
    put_marked(g, f->name_before);
    put_string(g->out, t->name);
    if (f->name_index) {
        buf_puts(g->out, " /:[0-9]{1,4}/");
    }
    put_marked(g, f->name_after);
    put_schema(g, t);
    if (f->after_call) {
        put_string(g->out, f->after_call);
    }
    put_marker(g->out, f->call_close);
}

/* ---- parameters one by one ---- */

/* A schema that stands inside another keeps what its references name. */
static void put_part(struct grammar_text *g, struct json_slice schema, struct json_slice root)
{
    static const char *const PLACES[] = {"$defs", "definitions"};

    buf_puts(g->out, " %json ");
    if (!schema.len || schema.at[0] != '{') {
        buf_append(g->out, schema.at, schema.len);
        return;
    }
    buf_puts(g->out, "{");
    for (size_t i = 0; i < ARRAY_LEN(PLACES); i++) {
        struct json_slice defs = json_member(root, PLACES[i]);
        if (defs.at && !json_member(schema, PLACES[i]).at) {
            buf_printf(g->out, "\"%s\":%.*s,", PLACES[i], (int)defs.len, defs.at);
        }
    }
    /* An empty schema has no members to put a comma before. */
    buf_puts(g->out, "\"$comment\":\"\"");
    const char *rest = schema.at + 1 + strspn(schema.at + 1, " \n\r\t");
    buf_puts(g->out, *rest == '}' ? "" : ",");
    buf_append(g->out, rest, (size_t)(schema.at + schema.len - rest));
}

/* Alternatives for the strings of an enumeration; false: there is none that can be
 * written as it is. */
static bool put_enum(struct grammar_text *g, struct json_slice schema)
{
    struct json_slice list = json_member(schema, "enum");
    struct err e = {0};
    struct json j;
    int32_t k = 0;

    if (!list.at) {
        return false;
    }
    json_init(&j, list.at, list.len, "a schema", &e);
    buf_puts(g->out, " (");
    json_enter_array(&j);
    while (json_next_element(&j)) {
        json_peek(&j);
        const char *at = j.at;
        bool string = json_peek(&j) == JSON_STRING;
        json_skip(&j);
        if (string) {
            buf_puts(g->out, k++ ? " | " : "");
            buf_append(g->out, at, (size_t)(j.at - at));
        }
    }
    buf_puts(g->out, ")");
    return k > 0;
}

/* What free text cannot be held to. */
static int check_text(struct grammar_text *g, const struct chat_tool *t, const char *name,
                      struct json_slice schema, unsigned types, struct err *e)
{
    static const char *const RULES[] = {"pattern", "minLength", "maxLength", "const"};

    for (size_t i = 0; t->strict && i < ARRAY_LEN(RULES); i++) {
        if (json_member(schema, RULES[i]).at) {
            return err_set(e, ERR_UNSUPPORTED,
                           "tool %s: the model writes parameter %s as plain text, which cannot be "
                           "held to \"%s\"",
                           t->name, name, RULES[i]);
        }
    }
    if (t->strict && types & (PARAM_ARRAY | PARAM_OBJECT)) {
        return err_set(e, ERR_UNSUPPORTED,
                       "tool %s: the model writes parameter %s as plain text, which cannot be told "
                       "from an array or object",
                       t->name, name);
    }
    (void)g;
    return 0;
}

static int put_value(struct grammar_text *g, const struct chat_tool *t, const char *name,
                     struct json_slice schema, struct err *e)
{
    const struct chat_format *f = g->f;
    struct json_slice root = {t->parameters, strlen(t->parameters)};
    unsigned types = schema_types(schema, root);
    bool text = !types || types & PARAM_STRING;
    char end[MARK_BYTES];

    put_marker(g->out, f->typed ? NULL : f->value_open);
    if (f->typed) {
        put_string(g->out, text ? "true\">" : "false\">");
    }
    if (f->lines) {
        put_string(g->out, "\n");
    }
    size_t len = f->lines ? 1 : 0;
    memcpy(end, "\n", 1);
    memcpy(end + len, f->value_close, strlen(f->value_close) + 1);
    if (!text) {
        put_part(g, schema, root);
    } else if (types != PARAM_STRING || !json_member(schema, "enum").at || !put_enum(g, schema)) {
        const char *ends[] = {end};
        int rc = check_text(g, t, name, schema, types, e);
        if (rc) {
            return rc;
        }
        put_until(g->out, ends, 1);
    }
    if (f->lines) {
        put_string(g->out, "\n");
    }
    put_marker(g->out, f->value_close);
    return 0;
}

/* The next parameter among a schema's properties: its name, cut to NAME_BYTES, and its
 * own schema. False: there is none. */
static bool next_parameter(struct json *j, char name[NAME_BYTES], struct json_slice *ret_schema)
{
    if (!json_next_member(j)) {
        return false;
    }
    size_t len = MIN(j->key_len, (size_t)NAME_BYTES - 1);
    memcpy(name, j->key, len);
    name[len] = '\0';
    json_peek(j);
    const char *at = j->at;
    json_skip(j);
    *ret_schema = (struct json_slice){at, (size_t)(j->at - at)};
    return true;
}

/* The parameters in the order of the schema; those that are not required may be left
 * out. */
static int put_parameters(struct grammar_text *g, const struct chat_tool *t, struct err *e)
{
    const struct chat_format *f = g->f;
    struct json_slice root = {t->parameters, strlen(t->parameters)};
    struct json_slice properties = json_member(root, "properties");
    struct json_slice schema;
    struct err own = {0};
    struct json j;
    char name[NAME_BYTES];

    if (!properties.at) {
        return 0;
    }
    json_init(&j, properties.at, properties.len, "a schema", &own);
    json_enter_object(&j);
    while (next_parameter(&j, name, &schema)) {
        buf_puts(g->out, " (");
        put_marker(g->out, f->key_open);
        put_string(g->out, name);
        put_marker(g->out, f->key_close);
        if (f->value_open && f->line[0]) {
            put_string(g->out, f->line);
        }
        int rc = put_value(g, t, name, schema, e);
        if (rc) {
            return rc;
        }
        if (f->line[0]) {
            put_string(g->out, f->line);
        }
        buf_puts(g->out, schema_requires(root, name) ? ")" : ")?");
    }
    return 0;
}

static int tagged_call(struct grammar_text *g, const struct chat_tool *t, struct err *e)
{
    const struct chat_format *f = g->f;

    put_marker(g->out, f->call_open);
    if (f->call_open && f->before_call) {
        put_string(g->out, f->before_call);
    }
    put_marker(g->out, f->name_open);
    put_string(g->out, t->name);
    put_marker(g->out, f->name_close);
    if (f->line[0]) {
        put_string(g->out, f->line);
    }
    int rc = t->parameters ? put_parameters(g, t, e) : 0;
    put_marker(g->out, f->name_end);
    if (f->call_open && f->after_call) {
        put_string(g->out, f->after_call);
    }
    put_marker(g->out, f->call_close);
    return rc;
}

/* ---- name(key=value, …) ---- */

/* Values are written as JSON, which is read as a literal too. */
static void put_literal(struct grammar_text *g, const struct chat_tool *t, const char *name,
                        struct json_slice schema, bool required, bool first)
{
    const struct chat_format *f = g->f;
    struct json_slice root = {t->parameters, strlen(t->parameters)};
    char key[NAME_BYTES + 8];

    buf_puts(g->out, " (");
    if (!first) {
        put_string(g->out, f->quote ? "," : ", ");
    }
    snprintf(key, sizeof(key), "%s%c", name, f->equal);
    put_string(g->out, key);
    put_part(g, schema, root);
    buf_puts(g->out, required ? ")" : ")?");
}

static int literal_call(struct grammar_text *g, const struct chat_tool *t, struct err *e)
{
    const struct chat_format *f = g->f;
    struct json_slice root = {t->parameters, t->parameters ? strlen(t->parameters) : 0};
    struct json_slice properties = json_member(root, "properties");
    const char open[] = {f->open, '\0'}, close[] = {f->close, '\0'};
    struct json_slice schema;
    struct err own = {0};
    struct json j;
    char name[NAME_BYTES];

    if (!f->list) {
        put_marker(g->out, f->call_open);
        put_marked(g, f->name_before);
    }
    put_string(g->out, t->name);
    put_string(g->out, open);
    /* Required parameters first, so that commas stand between parameters alone. */
    bool first = true;
    for (int pass = 0; properties.at && pass < 2; pass++) {
        json_init(&j, properties.at, properties.len, "a schema", &own);
        json_enter_object(&j);
        while (next_parameter(&j, name, &schema)) {
            bool required = schema_requires(root, name);
            if (required != (pass == 0)) {
                continue;
            }
            if (pass == 1 && first) {
                return err_set(e, ERR_UNSUPPORTED,
                               "tool %s: in the model's format a tool whose parameters are all "
                               "optional cannot be constrained",
                               t->name);
            }
            put_literal(g, t, name, schema, required, first);
            first = false;
        }
    }
    put_string(g->out, close);
    if (!f->list) {
        put_marker(g->out, f->call_close);
    }
    return 0;
}

/* ---- harmony ---- */

static void harmony_call(struct grammar_text *g, const struct chat_tool *t)
{
    buf_puts(g->out, " \"commentary to=functions.");
    buf_json_escape(g->out, t->name, strlen(t->name));
    buf_puts(g->out, " \" marker(\"<|constrain|>\") \"json\" marker(\"<|message|>\")");
    put_schema(g, t);
}

void grammar_harmony(struct grammar_text *g, bool reasoning)
{
    bool some = g->tools && (g->tools->choice == TOOL_REQUIRED || g->tools->choice == TOOL_NAMED);
    struct buf *out = g->out;

    buf_puts(out, "start:");
    if (reasoning) {
        buf_puts(out, " until(\"<|end|>\") next");
    }
    buf_puts(out, " thought* marker(\"<|channel|>\") body\n"
                  "next: marker(\"<|end|>\") marker(\"<|start|>\") \"assistant\"\n"
                  "thought: marker(\"<|channel|>\") \"analysis\" marker(\"<|message|>\")"
                  " until(\"<|end|>\") next\n"
                  "body:");
    if (!some) {
        buf_puts(out, " \"final\"");
        if (g->answer) {
            buf_puts(out,
                     " (\" \" marker(\"<|constrain|>\") \"json\")? marker(\"<|message|>\") %json ");
            buf_puts(out, g->answer);
        } else {
            buf_puts(out,
                     " marker(\"<|message|>\") until(\"<|end|>\", \"<|start|>\", \"<|channel|>\","
                     " \"<|call|>\", \"<|return|>\")");
        }
    }
    if (g->calls) {
        buf_puts(out, some ? " call" : " | call");
        buf_puts(out, "\ncall:");
        for (int32_t i = 0, k = 0; i < g->tools->n; i++) {
            if (g->tools->choice != TOOL_NAMED || g->tools->named == i) {
                buf_printf(out, "%s c%d", k++ ? " |" : "", i);
            }
        }
    }
    buf_puts(out, "\n");
}

int grammar_call(struct grammar_text *g, int32_t i, struct err *e)
{
    const struct chat_tool *t = &g->tools->tool[i];
    int rc = 0;

    buf_printf(g->out, "c%d:", i);
    switch (g->f->body) {
    case BODY_OBJECT:
        object_call(g, t);
        break;
    case BODY_NAMED:
        named_call(g, t);
        break;
    case BODY_TAGGED:
        rc = tagged_call(g, t, e);
        break;
    case BODY_LITERAL:
        rc = literal_call(g, t, e);
        break;
    default:
        harmony_call(g, t);
        break;
    }
    buf_puts(g->out, "\n");
    return rc;
}
