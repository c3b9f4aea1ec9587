/* Constrained output: response_format, structured_outputs and the older guided_ fields,
 * and in chats the calls of tools, become the one grammar of the request.
 *
 * At most one field may constrain the answer. Together with tools or reasoning, the
 * model's format makes one grammar of all (chat_format_grammar). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

/* What a field asks of the answer. */
struct wish {
    const char *field; /* that asks; NULL: none does */
    char path[64];     /* the value within it, for messages */
    enum grammar_kind kind;
    struct buf text; /* of the grammar, as grammar_new takes it */
};

static const cJSON *member(const cJSON *object, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(object, name);

    return cJSON_IsNull(v) ? NULL : v;
}

static int refuse(struct err *e, const struct wish *w, const char *what)
{
    return err_set_param(e, ERR_INVALID, w->field, "%s %s", w->path, what);
}

static int lacks(struct err *e, const struct wish *w, const char *what)
{
    return err_set_param(e, ERR_UNSUPPORTED, w->field, "%s is not supported: %s", w->path, what);
}

/* ---- values ---- */

/* A JSON Schema: an object, or the text of one. */
static int wish_schema(struct wish *w, const cJSON *v, struct err *e)
{
    if (!cJSON_IsObject(v) && !cJSON_IsString(v)) {
        return refuse(e, w, "must be a JSON Schema, an object");
    }
    w->kind = GRAMMAR_JSON_SCHEMA;
    if (cJSON_IsString(v)) {
        struct err why = {0};
        int rc = json_check(v->valuestring, json_string_len(v), &why);
        if (rc) {
            return err_set_param(e, rc, w->field, "%s: %.380s", w->path, why.text);
        }
        buf_append(&w->text, v->valuestring, json_string_len(v));
    } else {
        json_put(&w->text, v);
    }
    return 0;
}

/* A text: an expression or a grammar. */
static int wish_text(struct wish *w, enum grammar_kind kind, const cJSON *v, struct err *e)
{
    if (!cJSON_IsString(v) || json_string_len(v) == 0) {
        return refuse(e, w, "must be a text that is not empty");
    }
    w->kind = kind;
    buf_append(&w->text, v->valuestring, json_string_len(v));
    return 0;
}

static int wish_choice(struct wish *w, const cJSON *v, struct err *e)
{
    bool strings = cJSON_IsArray(v) && v->child;

    for (const cJSON *s = strings ? v->child : NULL; s; s = s->next) {
        strings = strings && cJSON_IsString(s);
    }
    if (!strings) {
        return refuse(e, w, "must be a list of texts that is not empty");
    }
    w->kind = GRAMMAR_CHOICE;
    json_put(&w->text, v);
    return 0;
}

static int wish_object(struct wish *w, const cJSON *v, bool *ret_asked, struct err *e)
{
    if (!cJSON_IsBool(v)) {
        return refuse(e, w, "must be true or false");
    }
    *ret_asked = cJSON_IsTrue(v);
    w->kind = GRAMMAR_JSON_OBJECT;
    return 0;
}

/* ---- structural tags ---- */

/* The trigger that begins `begin`; NULL: none does. */
static const cJSON *trigger_of(const cJSON *triggers, const char *begin)
{
    for (const cJSON *t = triggers->child; t; t = t->next) {
        if (strncmp(begin, t->valuestring, json_string_len(t)) == 0) {
            return t;
        }
    }
    return NULL;
}

/* The schema of a tag's inside, in the older and the newer form; NULL: it has none. */
static const cJSON *schema_of(const cJSON *tag)
{
    const cJSON *content = member(tag, "content");

    return content ? json_is(member(content, "type"), "json_schema")
                         ? member(content, "json_schema")
                         : NULL
                   : member(tag, "schema");
}

/* A rule for one tag: its trigger as a mark, the rest of its beginning, JSON, its end. */
static int put_tag(struct wish *w, const cJSON *tag, int i, const cJSON *triggers, struct err *e)
{
    const cJSON *begin = member(tag, "begin"), *end = member(tag, "end"),
                *schema = schema_of(tag);
    struct buf *b = &w->text;

    if (!cJSON_IsString(begin) || !cJSON_IsString(end) || json_has_nul(begin) ||
        json_has_nul(end) || json_string_len(begin) == 0) {
        return refuse(e, w, "has a tag without the texts begin and end");
    }
    if (!cJSON_IsObject(schema)) {
        return refuse(e, w, "has a tag without a schema");
    }
    const cJSON *trigger = trigger_of(triggers, begin->valuestring);
    if (!trigger) {
        return refuse(e, w, "has a tag that begins with none of the triggers");
    }
    size_t n = json_string_len(trigger);
    buf_printf(b, "tag_%d: marker(", i);
    json_put_string(b, trigger->valuestring, n);
    buf_putc(b, ')');
    if (begin->valuestring[n]) {
        buf_putc(b, ' ');
        json_put_string(b, begin->valuestring + n, json_string_len(begin) - n);
    }
    buf_puts(b, " %json ");
    json_put(b, schema);
    if (json_string_len(end)) {
        buf_putc(b, ' ');
        json_put_string(b, end->valuestring, json_string_len(end));
    }
    buf_putc(b, '\n');
    return 0;
}

static void put_until(struct buf *b, const cJSON *triggers)
{
    buf_puts(b, "until(");
    for (const cJSON *t = triggers->child; t; t = t->next) {
        buf_puts(b, t == triggers->child ? "" : ", ");
        json_put_string(b, t->valuestring, json_string_len(t));
    }
    buf_putc(b, ')');
}

static int check_triggers(const struct wish *w, const cJSON *triggers, struct err *e)
{
    bool texts = cJSON_IsArray(triggers) && triggers->child;

    for (const cJSON *t = texts ? triggers->child : NULL; t; t = t->next) {
        texts = texts && cJSON_IsString(t) && json_string_len(t) > 0 && !json_has_nul(t);
    }
    return texts ? 0 : refuse(e, w, "needs triggers, a list of texts");
}

/* Free text in which every trigger begins one of the tags. */
static int put_tags(struct wish *w, const cJSON *tags, const cJSON *triggers, struct err *e)
{
    struct buf *b = &w->text;
    int i = 0, rc = check_triggers(w, triggers, e);

    if (!rc && (!cJSON_IsArray(tags) || !tags->child)) {
        rc = refuse(e, w, "needs a list of tags");
    }
    if (rc) {
        return rc;
    }
    w->kind = GRAMMAR_LARK;
    buf_puts(b, "start: ");
    put_until(b, triggers);
    buf_puts(b, " (tag ");
    put_until(b, triggers);
    buf_puts(b, ")*\ntag: ");
    for (const cJSON *t = tags->child; t; t = t->next, i++) {
        buf_printf(b, i ? " | tag_%d" : "tag_%d", i);
    }
    buf_putc(b, '\n');
    i = 0;
    for (const cJSON *t = tags->child; t && !rc; t = t->next, i++) {
        rc = put_tag(w, t, i, triggers, e);
    }
    return rc;
}

static int wish_tags(struct wish *w, const cJSON *v, struct err *e)
{
    const cJSON *format = member(v, "format");
    cJSON *parsed = NULL;

    if (cJSON_IsString(v)) {
        int rc = json_parse(&parsed, v->valuestring, json_string_len(v), NULL);
        if (rc) {
            return rc == ERR_NOMEM ? err_nomem(e, "structural_tag") : refuse(e, w, "is no JSON");
        }
        rc = cJSON_IsObject(parsed) ? wish_tags(w, parsed, e) : refuse(e, w, "must be an object");
        cJSON_Delete(parsed);
        return rc;
    }
    if (!cJSON_IsObject(v)) {
        return refuse(e, w, "must be an object");
    }
    if (!format) {
        return put_tags(w, member(v, "structures"), member(v, "triggers"), e);
    }
    if (!json_is(member(format, "type"), "triggered_tags")) {
        return lacks(e, w, "of the formats only triggered_tags is known");
    }
    return put_tags(w, member(format, "tags"), member(format, "triggers"), e);
}

/* ---- fields ---- */

static void wish_path(struct wish *w, const char *inside)
{
    snprintf(w->path, sizeof(w->path), "%s%s%s", w->field, inside[0] ? "." : "", inside);
}

static int read_format(struct wish *w, const cJSON *v, struct err *e)
{
    const cJSON *type = member(v, "type"), *inside = member(v, "json_schema");

    w->field = "response_format";
    wish_path(w, "");
    if (!cJSON_IsObject(v) || !cJSON_IsString(type)) {
        return refuse(e, w, "must be an object with a type");
    }
    if (json_is(type, "text")) {
        w->field = NULL;
        return 0;
    }
    if (json_is(type, "json_object")) {
        w->kind = GRAMMAR_JSON_OBJECT;
        if (!member(v, "schema")) {
            return 0;
        }
        wish_path(w, "schema");
        return wish_schema(w, member(v, "schema"), e);
    }
    if (json_is(type, "structural_tag")) {
        return wish_tags(w, v, e);
    }
    if (!json_is(type, "json_schema")) {
        return err_set_param(e, ERR_UNSUPPORTED, w->field,
                             "response_format '%.60s' is not supported; text, json_object, "
                             "json_schema and structural_tag are",
                             type->valuestring);
    }
    wish_path(w, "json_schema");
    if (!cJSON_IsObject(inside)) {
        return refuse(e, w, "must be an object with a schema");
    }
    if (member(inside, "strict") && !cJSON_IsBool(member(inside, "strict"))) {
        return refuse(e, w, ".strict must be true or false");
    }
    wish_path(w, "json_schema.schema");
    return wish_schema(w, member(inside, "schema"), e);
}

/* One way to constrain, by its name. *ret_asked: false if the value says no. */
static int read_way(struct wish *w, const char *name, const cJSON *v, bool *ret_asked,
                    struct err *e)
{
    *ret_asked = true;
    return strcmp(name, "json") == 0      ? wish_schema(w, v, e)
           : strcmp(name, "regex") == 0   ? wish_text(w, GRAMMAR_REGEX, v, e)
           : strcmp(name, "choice") == 0  ? wish_choice(w, v, e)
           : strcmp(name, "grammar") == 0 ? wish_text(w, GRAMMAR_LARK, v, e)
           : strcmp(name, "json_object") == 0
               ? wish_object(w, v, ret_asked, e)
               : wish_tags(w, v, e);
}

static const char *const WAYS[] = {"json",    "regex",       "choice",
                                   "grammar", "json_object", "structural_tag"};

/* Whether a member of structured_outputs asks for nothing. */
static bool is_idle(const cJSON *m)
{
    return cJSON_IsNull(m) || cJSON_IsFalse(m) || strcmp(m->string, "disable_fallback") == 0;
}

static int read_structured(struct wish *w, const cJSON *v, struct err *e)
{
    const cJSON *way = NULL;
    bool asked;
    size_t k = 0;

    w->field = "structured_outputs";
    wish_path(w, "");
    if (!cJSON_IsObject(v)) {
        return refuse(e, w, "must be an object");
    }
    for (const cJSON *m = v->child; m; m = m->next) {
        if (is_idle(m)) {
            continue;
        }
        if (way) {
            return refuse(e, w, "must hold one of json, regex, choice, grammar, json_object and "
                                "structural_tag, not several");
        }
        way = m;
    }
    if (!way) {
        w->field = NULL;
        return 0;
    }
    while (k < ARRAY_LEN(WAYS) && strcmp(WAYS[k], way->string) != 0) {
        k++;
    }
    if (k == ARRAY_LEN(WAYS)) {
        return err_set_param(e, ERR_UNSUPPORTED, w->field,
                             "structured_outputs.%.40s is not supported; json, regex, choice, "
                             "grammar, json_object and structural_tag are",
                             way->string);
    }
    wish_path(w, WAYS[k]);
    return read_way(w, WAYS[k], way, &asked, e);
}

/* The one field that constrains the answer. */
static int read_wish(struct wish *w, const cJSON *tree, struct err *e)
{
    static const char *const FIELDS[] = {"response_format", "structured_outputs",
                                         "guided_json",     "guided_regex",
                                         "guided_choice",   "guided_grammar",
                                         "guided_json_object"};

    for (size_t i = 0; i < ARRAY_LEN(FIELDS); i++) {
        const cJSON *v = member(tree, FIELDS[i]);
        bool asked = true;
        struct wish one = {.field = FIELDS[i]};
        if (!v) {
            continue;
        }
        buf_init(&one.text, LIMIT_RESPONSE_BYTES);
        wish_path(&one, "");
        int rc = i == 0   ? read_format(&one, v, e)
                 : i == 1 ? read_structured(&one, v, e)
                          : read_way(&one, FIELDS[i] + strlen("guided_"), v, &asked, e);
        if (!rc && one.field && asked && w->field) {
            rc = err_set_param(e, ERR_INVALID, one.field, "%s and %s both constrain the answer; "
                               "give one of them", w->field, one.field);
        }
        if (rc || !one.field || !asked) {
            buf_release(&one.text);
        } else {
            *w = one;
        }
        if (rc) {
            return rc;
        }
    }
    return w->text.failed ? err_nomem(e, "a grammar") : 0;
}

/* ---- grammars ---- */

/* Compile a grammar; an error names the field and the value in it. */
static int compile(struct grammar **ret, const struct api_context *ctx, enum grammar_kind kind,
                   const char *text, size_t len, const char *field, const char *path,
                   struct err *e)
{
    struct err why = {0};
    int rc = ctx->grammar_new
                 ? ctx->grammar_new(ctx->arg, kind, text, len, ret, &why)
                 : err_set(&why, ERR_UNSUPPORTED, "this server has no constrained output");

    return rc ? err_set_param(e, rc, field, "%s: %.400s", path, why.text) : 0;
}

/* Whether a JSON Schema can be enforced; if not, the error says why. */
static int try_schema(const struct api_context *ctx, const char *schema, const char *field,
                      const char *path, struct err *e)
{
    struct gen_params p = {0};
    int rc = compile(&p.grammar, ctx, GRAMMAR_JSON_SCHEMA, schema, strlen(schema), field, path, e);

    gen_params_release(&p);
    return rc;
}

/* The grammar of calls and of an answer with `schema` (NULL: any text) did not compile.
 * Find the schema at fault: that of the answer or of a strict tool is an error; other
 * tools lose theirs in `lax`, and are named as ignored. *ret_lost: their number. */
static int find_fault(struct completion *c, struct chat_tool *lax, const struct wish *w,
                      const char *schema, const struct api_context *ctx, int *ret_lost,
                      struct err *e)
{
    static char any[] = "{\"type\":\"object\"}";
    const char *field = c->functions ? "functions" : "tools";
    char name[LIMIT_TOOL_NAME_BYTES + 32];
    int rc = schema ? try_schema(ctx, schema, w->field, w->path, e) : 0;

    *ret_lost = 0;
    for (int32_t i = 0; i < c->tools.n && !rc; i++) {
        const struct chat_tool *t = &c->tools.tool[i];
        struct err why = {0};
        lax[i] = *t;
        if (!t->parameters) {
            continue;
        }
        snprintf(name, sizeof(name), "%s.%s.parameters", field, t->name);
        int wrong = try_schema(ctx, t->parameters, field, name, &why);
        if (wrong == ERR_NOMEM || (wrong && t->strict)) {
            rc = wrong;
            if (e) {
                *e = why;
            }
        } else if (wrong) {
            lax[i].parameters = any;
            note_ignored(c->ignored, sizeof(c->ignored), name);
            ++*ret_lost;
        }
    }
    return rc;
}

/* The format's grammar of an answer with these tools. */
static int compile_format(struct completion *c, const struct chat_tools *tools,
                          const struct wish *w, const char *schema, const struct api_context *ctx,
                          struct err *e)
{
    const char *field = w->field ? w->field : c->functions ? "functions" : "tools",
               *path = w->field ? w->path : field;
    struct buf lark;
    bool needed = false;

    buf_init(&lark, LIMIT_RESPONSE_BYTES);
    int rc = ctx->chat_grammar(ctx->arg, tools->n ? tools : NULL, schema, c->opens_reasoning,
                               &lark, &needed, e);
    if (rc && e && !e->param[0]) {
        snprintf(e->param, sizeof(e->param), "%s", field);
    }
    rc = rc           ? rc
         : !needed    ? 0
         : lark.failed ? err_nomem(e, "a grammar")
                       : compile(&c->params.grammar, ctx, GRAMMAR_LARK, lark.data, lark.len, field,
                                 path, e);
    buf_release(&lark);
    return rc;
}

/* The grammar of a chat whose answer may hold calls or reasoning; `schema` constrains
 * the text that is neither (NULL: any). */
static int read_with_format(struct completion *c, const struct wish *w, const char *schema,
                            const struct api_context *ctx, struct err *e)
{
    struct chat_tools none = {0}, lax = c->tools;
    struct err why = {0};
    int lost, rc;

    if (!tools_active(c) && !schema) {
        return 0;
    }
    if (!ctx->chat_grammar) {
        return err_set_param(e, ERR_UNSUPPORTED, w->field ? w->field : "tools",
                             "this server has no constrained output");
    }
    rc = compile_format(c, tools_active(c) ? &c->tools : &none, w, schema, ctx, e);
    if (!rc || rc == ERR_NOMEM || (!tools_active(c) && !schema)) {
        return rc;
    }
    lax.tool = calloc((size_t)MAX(c->tools.n, 1), sizeof(*lax.tool));
    if (!lax.tool) {
        return err_nomem(e, "tools");
    }
    int fault = find_fault(c, lax.tool, w, schema, ctx, &lost, &why);
    if (fault) {
        rc = fault;
        if (e) {
            *e = why;
        }
    } else if (lost) {
        rc = compile_format(c, &lax, w, schema, ctx, e);
    }
    free(lax.tool);
    return rc;
}

/* The whole answer is constrained, or its text beside calls and reasoning. */
static int read_chat(struct completion *c, struct wish *w, const struct api_context *ctx,
                     struct err *e)
{
    bool schema = w->field && w->kind == GRAMMAR_JSON_SCHEMA,
         object = w->field && w->kind == GRAMMAR_JSON_OBJECT;

    if (!w->field || schema || object) {
        buf_putc(&w->text, '\0'); /* an end for the text of a schema */
        return read_with_format(c, w,
                                schema   ? w->text.data
                                : object ? "{\"type\":\"object\"}"
                                         : NULL,
                                ctx, e);
    }
    if (tools_active(c)) {
        return err_set_param(e, ERR_UNSUPPORTED, w->field,
                             "%s does not go with tools: beside calls only JSON can be "
                             "constrained",
                             w->field);
    }
    if (c->opens_reasoning) {
        return err_set_param(e, ERR_UNSUPPORTED, w->field,
                             "%s does not go with reasoning, with which the answer begins; only "
                             "JSON does",
                             w->field);
    }
    return compile(&c->params.grammar, ctx, w->kind, w->text.data, w->text.len, w->field, w->path,
                   e);
}

int structured_read(struct completion *c, const cJSON *tree, const struct api_context *ctx,
                    struct err *e)
{
    struct wish w = {0};
    int rc;

    buf_init(&w.text, LIMIT_RESPONSE_BYTES);
    rc = read_wish(&w, tree, e);
    if (!rc && c->parsed) {
        rc = read_chat(c, &w, ctx, e);
    } else if (!rc && w.field) {
        rc = compile(&c->params.grammar, ctx, w.kind, w.text.data ? w.text.data : "", w.text.len,
                     w.field, w.path, e);
    }
    buf_release(&w.text);
    return rc;
}
