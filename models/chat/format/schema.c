/* See format.h: what the schemas of parameters say of their types, and a parameter's
 * text as JSON by them. Schemas are read where they stand; nothing is built. */
#include <stdlib.h>
#include <string.h>

#include "models/chat/format/format.h"

enum { REF_DEPTH = 8, MAX_REFS = 256, MAX_PARAMS = 4096 };

void chat_tools_release(struct chat_tools *t)
{
    for (int32_t i = 0; i < t->n; i++) {
        free(t->tool[i].name);
        free(t->tool[i].parameters);
    }
    free(t->tool);
    memset(t, 0, sizeof(*t));
}

int32_t tools_find(const struct chat_tools *t, const char *name)
{
    for (int32_t i = 0; t && i < t->n; i++) {
        if (strcmp(t->tool[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

/* ---- reading ---- */

/* A reader of a value; false: it is not of this type. */
static bool read_begin(struct json *j, struct err *e, struct json_slice s, enum json_type type)
{
    if (!s.at) {
        return false;
    }
    json_init(j, s.at, s.len, "a schema", e);
    j->takes_nul = true;
    return json_peek(j) == type;
}

static struct json_slice take_value(struct json *j)
{
    json_peek(j); /* steps over white space */
    const char *at = j->at;

    if (!json_skip(j)) {
        return (struct json_slice){0};
    }
    return (struct json_slice){at, (size_t)(j->at - at)};
}

struct json_slice json_member(struct json_slice object, const char *key)
{
    struct json_slice found = {0};
    struct err e = {0};
    struct json j;

    if (!read_begin(&j, &e, object, JSON_OBJECT)) {
        return found;
    }
    json_enter_object(&j);
    while (json_next_member(&j)) {
        if (json_key_is(&j, key)) {
            found = take_value(&j);
        } else {
            json_skip(&j);
        }
    }
    return found;
}

bool slice_is_string(struct json_slice s, const char *text)
{
    size_t len = strlen(text);

    return s.at && s.len == len + 2 && s.at[0] == '"' && memcmp(s.at + 1, text, len) == 0;
}

static struct json_slice tool_schema(const struct chat_tool *t)
{
    return t->parameters ? (struct json_slice){t->parameters, strlen(t->parameters)}
                         : (struct json_slice){0};
}

struct json_slice schema_property(const struct chat_tool *t, const char *name)
{
    struct json_slice properties = json_member(tool_schema(t), "properties");

    return json_member(properties, name);
}

bool schema_requires(struct json_slice schema, const char *name)
{
    struct err e = {0};
    struct json j;
    bool found = false;

    if (!read_begin(&j, &e, json_member(schema, "required"), JSON_ARRAY)) {
        return false;
    }
    json_enter_array(&j);
    while (json_next_element(&j)) {
        found = slice_is_string(take_value(&j), name) || found;
    }
    return found;
}

/* ---- types ---- */

static unsigned type_named(struct json_slice s)
{
    static const struct {
        const char *name;
        unsigned bits;
    } TYPES[] = {{"string", PARAM_STRING},
                 {"integer", PARAM_INTEGER},
                 {"number", PARAM_NUMBER | PARAM_INTEGER},
                 {"boolean", PARAM_BOOLEAN},
                 {"null", PARAM_NULL},
                 {"array", PARAM_ARRAY},
                 {"object", PARAM_OBJECT},
                 /* names that are no JSON Schema but are sent */
                 {"str", PARAM_STRING},
                 {"text", PARAM_STRING},
                 {"int", PARAM_INTEGER},
                 {"float", PARAM_NUMBER | PARAM_INTEGER},
                 {"bool", PARAM_BOOLEAN},
                 {"dict", PARAM_OBJECT},
                 {"list", PARAM_ARRAY}};

    for (size_t i = 0; i < ARRAY_LEN(TYPES); i++) {
        if (slice_is_string(s, TYPES[i].name)) {
            return TYPES[i].bits;
        }
    }
    return 0;
}

/* The type of a JSON value. */
static unsigned type_of_value(struct json_slice s)
{
    if (!s.len) {
        return 0;
    }
    switch (s.at[0]) {
    case '"':
        return PARAM_STRING;
    case '{':
        return PARAM_OBJECT;
    case '[':
        return PARAM_ARRAY;
    case 't':
    case 'f':
        return PARAM_BOOLEAN;
    case 'n':
        return PARAM_NULL;
    default:
        break;
    }
    for (size_t i = 0; i < s.len; i++) {
        if (s.at[i] == '.' || s.at[i] == 'e' || s.at[i] == 'E') {
            return PARAM_NUMBER;
        }
    }
    return PARAM_INTEGER;
}

/* Resolves references within a schema, a bounded number of them: each reads it anew. */
struct resolver {
    struct json_slice root;
    int refs; /* that may still be followed */
};

static unsigned types_at(struct json_slice schema, struct resolver *r, int depth);

/* The union over a list's elements: schemas, values or names of types. */
static unsigned types_of_list(struct json_slice list, struct resolver *r, int depth, char what)
{
    unsigned types = 0;
    struct err e = {0};
    struct json j;

    if (!read_begin(&j, &e, list, JSON_ARRAY)) {
        return 0;
    }
    json_enter_array(&j);
    while (json_next_element(&j)) {
        struct json_slice s = take_value(&j);
        types |= what == 't'   ? type_named(s)
                 : what == 'v' ? type_of_value(s)
                               : types_at(s, r, depth);
    }
    return types;
}

/* "#/$defs/Name", or what stands in `definitions`. */
static unsigned types_of_ref(struct json_slice ref, struct resolver *r, int depth)
{
    static const char *const PLACES[] = {"$defs", "definitions"};
    char name[NAME_BYTES];

    if (r->refs-- <= 0) {
        return 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(PLACES); i++) {
        size_t len = strlen(PLACES[i]);
        if (ref.len < len + 6 || ref.len - len - 5 >= sizeof(name) ||
            memcmp(ref.at, "\"#/", 3) != 0 || memcmp(ref.at + 3, PLACES[i], len) != 0 ||
            ref.at[3 + len] != '/') {
            continue;
        }
        size_t n = ref.len - len - 5;
        memcpy(name, ref.at + len + 4, n);
        name[n] = '\0';
        return types_at(json_member(json_member(r->root, PLACES[i]), name), r, depth);
    }
    return 0;
}

static unsigned types_at(struct json_slice schema, struct resolver *r, int depth)
{
    static const char *const UNIONS[] = {"anyOf", "oneOf", "allOf"};

    if (depth == 0 || !schema.at) {
        return 0;
    }
    struct json_slice type = json_member(schema, "type"), ref = json_member(schema, "$ref");
    unsigned types = type.at && type.at[0] == '[' ? types_of_list(type, r, 0, 't')
                     : type.at                    ? type_named(type)
                                                  : 0;

    if (types) {
        return types;
    }
    for (size_t i = 0; i < ARRAY_LEN(UNIONS); i++) {
        types |= types_of_list(json_member(schema, UNIONS[i]), r, depth - 1, 's');
    }
    types |= types_of_list(json_member(schema, "enum"), r, 0, 'v');
    types |= type_of_value(json_member(schema, "const"));
    if (!types && ref.at) {
        types = types_of_ref(ref, r, depth - 1);
    }
    if (!types && json_member(schema, "properties").at) {
        types = PARAM_OBJECT;
    }
    return types | (!types && json_member(schema, "items").at ? PARAM_ARRAY : 0);
}

unsigned schema_types(struct json_slice schema, struct json_slice root)
{
    struct resolver r = {.root = root, .refs = MAX_REFS};

    return types_at(schema, &r, REF_DEPTH);
}

/* ---- the parameters of a tool ---- */

uint64_t name_hash(const char *text, size_t len)
{
    uint64_t h = 1469598103934665603u; /* FNV-1a */

    for (size_t i = 0; i < len; i++) {
        h = (h ^ (uint8_t)text[i]) * 1099511628211u;
    }
    return h;
}

static int add_param(struct param_table *t, uint64_t hash, unsigned types)
{
    if (t->n == t->cap) {
        int32_t cap = t->cap ? 2 * t->cap : 8;
        struct param *grown = realloc(t->param, (size_t)cap * sizeof(*grown));
        if (!grown) {
            return ERR_NOMEM;
        }
        t->param = grown;
        t->cap = cap;
    }
    t->param[t->n++] = (struct param){hash, types};
    return 0;
}

int param_table_make(struct param_table *t, const struct chat_tool *tool)
{
    struct json_slice root = tool_schema(tool);
    struct resolver r = {.root = root, .refs = MAX_REFS};
    struct err e = {0};
    struct json j;
    int rc = 0;

    t->made = true;
    if (!read_begin(&j, &e, json_member(root, "properties"), JSON_OBJECT)) {
        return 0;
    }
    json_enter_object(&j);
    while (rc == 0 && t->n < MAX_PARAMS && json_next_member(&j)) {
        uint64_t hash = name_hash(j.key, j.key_len);
        rc = add_param(t, hash, types_at(take_value(&j), &r, REF_DEPTH));
    }
    return rc;
}

static const struct param *find_param(const struct param_table *t, const char *name)
{
    uint64_t hash = name_hash(name, strlen(name));

    for (int32_t i = 0; i < t->n; i++) {
        if (t->param[i].hash == hash) {
            return &t->param[i];
        }
    }
    return NULL;
}

unsigned param_table_types(const struct param_table *t, const char *name)
{
    const struct param *found = find_param(t, name);

    return found ? found->types : 0;
}

bool param_table_has(const struct param_table *t, const char *name)
{
    return find_param(t, name) != NULL;
}

/* ---- values ---- */

static void trim(const char **text, size_t *len)
{
    while (*len && strchr(" \n\r\t", (*text)[*len - 1])) {
        --*len;
    }
    while (*len && strchr(" \n\r\t", (*text)[0])) {
        ++*text;
        --*len;
    }
}

/* "True", "None" and so on, as Python writes them or in any case; NULL: none. */
static const char *constant(const char *text, size_t len, unsigned types)
{
    if (types & PARAM_BOOLEAN && len == 4 && strncasecmp(text, "true", 4) == 0) {
        return "true";
    }
    if (types & PARAM_BOOLEAN && len == 5 && strncasecmp(text, "false", 5) == 0) {
        return "false";
    }
    bool null = len == 4 && (strncasecmp(text, "null", 4) == 0 || memcmp(text, "None", 4) == 0);
    return null && types & PARAM_NULL ? "null" : NULL;
}

/* Whether a JSON value is of one of the types. A null is taken for any but a string:
 * what could the text mean else. */
static bool fits(const char *text, size_t len, unsigned types)
{
    unsigned type = type_of_value((struct json_slice){text, len});

    return type & (types | (types & PARAM_NUMBER ? PARAM_INTEGER : 0)) ||
           (type == PARAM_NULL && !(types & PARAM_STRING));
}

/* The length of a number without a fraction of zeros, 5.0 as 5; other texts keep it. */
static size_t whole_number(const char *text, size_t len)
{
    size_t point = 0;

    while (point < len && (text[point] == '-' || (text[point] >= '0' && text[point] <= '9'))) {
        point++;
    }
    if (point == len || text[point] != '.') {
        return len;
    }
    for (size_t i = point + 1; i < len; i++) {
        if (text[i] != '0') {
            return len;
        }
    }
    return point;
}

/* A list or object that is written as Python does. */
static bool put_python(struct buf *out, const char *text, size_t len, unsigned types)
{
    struct buf json;
    bool done = false;

    if (!len || !((text[0] == '{' && types & PARAM_OBJECT) ||
                  ((text[0] == '[' || text[0] == '(') && types & PARAM_ARRAY))) {
        return false;
    }
    buf_init(&json, 8 * len + 64);
    if (literal_all(text, len, &json) && !json.failed && json_scan_all(json.data, json.len)) {
        buf_append(out, json.data, json.len);
        done = true;
    }
    buf_release(&json);
    return done;
}

void value_put(struct buf *out, const char *text, size_t len, unsigned types, bool untyped_json)
{
    const char *whole = text, *word;
    size_t n = len;

    if (!types) {
        types = untyped_json ? PARAM_ANY : PARAM_STRING;
    }
    trim(&text, &n);
    if (types != PARAM_STRING) {
        word = constant(text, n, types);
        if (word) {
            buf_puts(out, word);
            return;
        }
        bool quoted = n && text[0] == '"';
        if (!(quoted && types & PARAM_STRING && !untyped_json) && json_scan_all(text, n)) {
            size_t number = types & PARAM_STRING ? n : whole_number(text, n);
            if (fits(text, number, types)) {
                buf_append(out, text, number);
                return;
            }
        }
        if (put_python(out, text, n, types)) {
            return;
        }
    }
    buf_putc(out, '"');
    buf_json_escape(out, whole, len);
    buf_putc(out, '"');
}
