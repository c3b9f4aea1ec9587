/* The schema's text as a tree. Of members with one name the last one counts. */
#include <string.h>

#include "config/base/json.h"
#include "engine/constrain/json_schema/schema.h"

struct reader {
    struct schema *s;
    struct json j;
};

static struct value *new_value(struct schema *s, enum value_type type)
{
    struct value *v = schema_alloc(s, 1, sizeof(*v));

    if (!v) {
        return NULL;
    }
    if (s->n_values == s->values_cap) {
        int32_t cap = MAX(64, 2 * s->values_cap);
        const struct value **grown = schema_alloc(s, (size_t)cap, sizeof(*grown));
        if (!grown) {
            return NULL;
        }
        if (s->n_values > 0) {
            memcpy(grown, s->values, (size_t)s->n_values * sizeof(*grown));
        }
        s->values = grown;
        s->values_cap = cap;
    }
    v->type = type;
    v->id = s->n_values;
    s->values[s->n_values++] = v;
    return v;
}

static struct value *new_string(struct schema *s, const char *text, size_t len)
{
    struct value *v = new_value(s, V_STRING);
    char *copy = schema_alloc(s, len + 1, 1);

    if (!v || !copy) {
        return NULL;
    }
    memcpy(copy, text, len);
    v->text = copy;
    v->n = (int32_t)len;
    return v;
}

static struct value *read_string(struct reader *r)
{
    json_peek(&r->j);
    const char *end = r->j.at + 1;
    while (end < r->j.end && *end != '"') {
        end += *end == '\\' ? 2 : 1;
    }
    size_t cap = (size_t)(end - r->j.at) + 1, len = 0;
    struct value *v = new_value(r->s, V_STRING);
    char *text = schema_alloc(r->s, cap, 1);
    if (!v || !text || !json_read_string(&r->j, text, cap, &len)) {
        return NULL;
    }
    v->text = text;
    v->n = (int32_t)len;
    return v;
}

static struct value *read_number(struct reader *r)
{
    json_peek(&r->j);
    const char *start = r->j.at;
    if (!json_skip(&r->j)) {
        return NULL;
    }
    size_t len = (size_t)(r->j.at - start);
    struct value *v = new_string(r->s, start, len);
    if (!v) {
        return NULL;
    }
    const char *digits = v->text + (v->text[0] == '-');
    if (*digits == 'N' || *digits == 'I') {
        json_fail(&r->j, "%s is no number of JSON", v->text);
        return NULL;
    }
    v->type = V_NUMBER;
    return v;
}

/* Elements or members that were read, before their number is known. */
struct list {
    const struct value **item, **name;
    int32_t n, cap;
};

static bool list_add(struct schema *s, struct list *l, const struct value *name,
                     const struct value *item)
{
    if (!item) {
        return false;
    }
    if (l->n == l->cap) {
        int32_t cap = MAX(4, 2 * l->cap);
        const struct value **both = schema_alloc(s, 2 * (size_t)cap, sizeof(*both));
        if (!both) {
            return false;
        }
        if (l->n > 0) {
            memcpy(both, l->item, (size_t)l->n * sizeof(*both));
            memcpy(both + cap, l->name, (size_t)l->n * sizeof(*both));
        }
        l->item = both;
        l->name = both + cap;
        l->cap = cap;
    }
    l->item[l->n] = item;
    l->name[l->n++] = name;
    return true;
}

static struct value *read_value(struct reader *r);

static struct value *finish_list(struct reader *r, enum value_type type, const struct list *l)
{
    struct value *v = r->j.failed ? NULL : new_value(r->s, type);

    if (v) {
        v->n = l->n;
        v->item = l->item;
        v->name = l->name;
    }
    return v;
}

static struct value *read_array(struct reader *r)
{
    struct list l = {0};

    json_enter_array(&r->j);
    while (json_next_element(&r->j)) {
        if (!list_add(r->s, &l, NULL, read_value(r))) {
            return NULL;
        }
    }
    return finish_list(r, V_ARRAY, &l);
}

/* Drop members whose name comes again. */
static void drop_repeated(struct schema *s, struct list *l)
{
    int32_t kept = 0;
    uint32_t size = 8;

    while (size < 2 * (uint32_t)l->n) {
        size *= 2;
    }
    int32_t *table = schema_alloc(s, size, sizeof(*table));
    if (!table) {
        return;
    }
    for (int32_t i = 0; i < l->n; i++) {
        uint32_t hash = 2166136261u;
        for (int32_t k = 0; k < l->name[i]->n; k++) {
            hash = (hash ^ (uint8_t)l->name[i]->text[k]) * 16777619u;
        }
        uint32_t at = hash & (size - 1);
        while (table[at] > 0 && !(l->name[table[at] - 1]->n == l->name[i]->n &&
                                  memcmp(l->name[table[at] - 1]->text, l->name[i]->text,
                                         (size_t)l->name[i]->n) == 0)) {
            at = (at + 1) & (size - 1);
        }
        if (table[at] > 0) {
            l->item[table[at] - 1] = l->item[i];
            continue;
        }
        l->name[kept] = l->name[i];
        l->item[kept++] = l->item[i];
        table[at] = kept;
    }
    l->n = kept;
}

static struct value *read_object(struct reader *r)
{
    struct list l = {0};

    json_enter_object(&r->j);
    while (json_next_member(&r->j)) {
        const struct value *name = new_string(r->s, r->j.key, r->j.key_len);
        if (!name || !list_add(r->s, &l, name, read_value(r))) {
            return NULL;
        }
    }
    drop_repeated(r->s, &l);
    return finish_list(r, V_OBJECT, &l);
}

/* As deep as the reader of JSON goes, LIMIT_FILE_JSON_DEPTH. */
static struct value *read_value(struct reader *r)
{
    struct value *v = NULL;
    bool flag;

    if (!grammar_build_work(r->s->b, 1)) {
        return NULL;
    }
    switch (json_peek(&r->j)) {
    case JSON_OBJECT:
        return read_object(r);
    case JSON_ARRAY:
        return read_array(r);
    case JSON_STRING:
        return read_string(r);
    case JSON_NUMBER:
        return read_number(r);
    case JSON_BOOL:
        v = json_read_bool(&r->j, &flag) ? new_value(r->s, flag ? V_TRUE : V_FALSE) : NULL;
        return v;
    case JSON_NULL:
        return json_skip(&r->j) ? new_value(r->s, V_NULL) : NULL;
    default:
        json_fail(&r->j, "a value expected");
        return NULL;
    }
}

bool doc_read(struct schema *s, const char *text, size_t len)
{
    struct reader r = {.s = s};
    struct err e = {0};

    json_init(&r.j, text, len, "schema", &e);
    r.j.takes_nul = true;
    s->root = read_value(&r);
    if (s->root && json_finish(&r.j)) {
        return true;
    }
    if (e.code != 0) {
        grammar_build_fail(s->b, ERR_INVALID, "%s", e.text);
    }
    return false;
}

const struct value *doc_get(const struct value *v, const char *name)
{
    if (v->type != V_OBJECT) {
        return NULL;
    }
    for (int32_t i = 0; i < v->n; i++) {
        if (doc_is(v->name[i], name)) {
            return v->item[i];
        }
    }
    return NULL;
}

bool doc_is(const struct value *string, const char *text)
{
    size_t len = strlen(text);

    return (size_t)string->n == len && memcmp(string->text, text, len) == 0;
}

static bool same_number(struct schema *s, const struct value *a, const struct value *b)
{
    struct decimal x, y;

    return decimal_read(s, a, &x) && decimal_read(s, b, &y) && decimal_equal(&x, &y);
}

bool doc_equal(struct schema *s, const struct value *a, const struct value *b)
{
    if (a->type != b->type || !grammar_build_work(s->b, 1)) {
        return false;
    }
    if (a->type == V_NUMBER) {
        return same_number(s, a, b);
    }
    if (a->n != b->n) {
        return false;
    }
    if (a->type == V_STRING) {
        return memcmp(a->text, b->text, (size_t)a->n) == 0;
    }
    for (int32_t i = 0; i < a->n; i++) {
        const struct value *other = a->type == V_OBJECT ? doc_get(b, a->name[i]->text) : b->item[i];
        if (!other || !doc_equal(s, a->item[i], other)) {
            return false;
        }
    }
    return true;
}
