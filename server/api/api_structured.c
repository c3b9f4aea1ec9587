/* Fields that constrain the answer: response_format, structured_outputs and the older
 * guided_ fields. At most one of them may. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/api_structured.h"
#include "server/api/json_fields.h"

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

/* A text that is longer than a grammar may be is neither checked nor copied. */
static int refuse_long(const struct wish *w, size_t len, struct err *e)
{
    return len <= LIMIT_GRAMMAR_BYTES
               ? 0
               : err_set_param(e, ERR_INVALID, w->field, "%s has %zu bytes, at most %zu are taken",
                               w->path, len, LIMIT_GRAMMAR_BYTES);
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
        int rc = refuse_long(w, json_string_len(v), e);
        if (rc) {
            return rc;
        }
        rc = json_check(v->valuestring, json_string_len(v), &why);
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
    int rc = refuse_long(w, json_string_len(v), e);
    if (rc) {
        return rc;
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

/* A rule for one tag: its trigger as a mark, the rest of its beginning, JSON, its
 * end. */
static int put_tag(struct wish *w, const cJSON *tag, int i, const cJSON *triggers, struct err *e)
{
    const cJSON *begin = member(tag, "begin"), *end = member(tag, "end"), *schema = schema_of(tag);
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
    buf_json_string(b, trigger->valuestring, n);
    buf_putc(b, ')');
    if (begin->valuestring[n]) {
        buf_putc(b, ' ');
        buf_json_string(b, begin->valuestring + n, json_string_len(begin) - n);
    }
    buf_puts(b, " %json ");
    json_put(b, schema);
    if (json_string_len(end)) {
        buf_putc(b, ' ');
        buf_json_string(b, end->valuestring, json_string_len(end));
    }
    buf_putc(b, '\n');
    return 0;
}

static void put_until(struct buf *b, const cJSON *triggers)
{
    buf_puts(b, "until(");
    for (const cJSON *t = triggers->child; t; t = t->next) {
        buf_puts(b, t == triggers->child ? "" : ", ");
        buf_json_string(b, t->valuestring, json_string_len(t));
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
    for (const cJSON *t = tags->child; t && !rc && !b->failed; t = t->next, i++) {
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
    return strcmp(name, "json") == 0          ? wish_schema(w, v, e)
           : strcmp(name, "regex") == 0       ? wish_text(w, GRAMMAR_REGEX, v, e)
           : strcmp(name, "choice") == 0      ? wish_choice(w, v, e)
           : strcmp(name, "grammar") == 0     ? wish_text(w, GRAMMAR_LARK, v, e)
           : strcmp(name, "json_object") == 0 ? wish_object(w, v, ret_asked, e)
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
            return refuse(e, w,
                          "must hold one of json, regex, choice, grammar, json_object and "
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

const char *const structured_fields[STRUCTURED_FIELDS] = {
    "response_format", "structured_outputs", "guided_json",       "guided_regex",
    "guided_choice",   "guided_grammar",     "guided_json_object"};

int read_wish(struct wish *w, const cJSON *tree, struct err *e)
{
    for (int i = 0; i < STRUCTURED_FIELDS; i++) {
        const char *name = structured_fields[i];
        const cJSON *v = member(tree, name);
        bool asked = true;
        struct wish one = {.field = name, .work = w->work};
        if (!v) {
            continue;
        }
        buf_init(&one.text, LIMIT_GRAMMAR_BYTES);
        wish_path(&one, "");
        int rc = i == 0   ? read_format(&one, v, e)
                 : i == 1 ? read_structured(&one, v, e)
                          : read_way(&one, name + strlen("guided_"), v, &asked, e);
        if (!rc && one.text.failed) {
            rc = one.text.no_memory
                     ? err_nomem(e, "a grammar")
                     : err_set_param(e, ERR_INVALID, one.field,
                                     "%s makes a grammar of more than %zu bytes, which are the "
                                     "most that are taken",
                                     one.path, LIMIT_GRAMMAR_BYTES);
        }
        if (!rc && one.field && asked && w->field) {
            rc = err_set_param(e, ERR_INVALID, one.field,
                               "%s and %s both constrain the answer; "
                               "give one of them",
                               w->field, one.field);
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
    return 0;
}
