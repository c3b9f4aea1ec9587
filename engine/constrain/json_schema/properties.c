/* The keywords about objects. */
#include <string.h>

#include "engine/constrain/json_schema/read.h"

static conj_id conj_of_schema(struct schema *s, const struct value *v)
{
    return conj_of(s, (struct literal){.value = v});
}

/* ---- names that are no property's ---- */

struct cells {
    struct cell cell[SCHEMA_CELLS];
    bool matched[SCHEMA_CELLS]; /* by a pattern, so that additionalProperties is not for it */
    rx_id pattern[SCHEMA_CELLS];
    conj_id child[SCHEMA_CELLS]; /* of the patterns */
    int32_t n, n_patterns;
};

/* Divide every cell into the names that match a pattern and those that do not. */
static bool split_cells(struct schema *s, struct cells *c, rx_id pattern, conj_id child)
{
    int32_t n = c->n;

    for (int32_t i = 0; i < n; i++) {
        struct cell *cell = &c->cell[i];
        rx_id in = cell->names == s->any ? pattern : rx_and(s->b, cell->names, pattern);
        rx_id out = rx_and(s->b, cell->names, rx_not(s->b, pattern));
        if (rx_is_never(s->b, in)) {
            continue;
        }
        bool both = !rx_is_never(s->b, out);
        if (both && c->n == SCHEMA_CELLS) {
            schema_refuse(s, "patternProperties", "with so many patterns that overlap");
            return false;
        }
        if (both) {
            c->cell[c->n] = (struct cell){out, cell->child};
            c->matched[c->n++] = c->matched[i];
        }
        *cell = (struct cell){in, conj_and(s, cell->child, child)};
        c->matched[i] = true;
    }
    return true;
}

static bool read_cells(struct schema *s, const struct value *v, struct cells *c)
{
    const struct value *patterns = doc_get(v, "patternProperties"),
                       *other = doc_get(v, "additionalProperties");

    c->cell[0] = (struct cell){s->any, CONJ_TRUE};
    c->matched[0] = false;
    c->n = 1;
    c->n_patterns = 0;
    if (patterns && patterns->type != V_OBJECT) {
        return schema_invalid(s, "patternProperties", "an object");
    }
    if (patterns && patterns->n > SCHEMA_CELLS) {
        return schema_refuse(s, "patternProperties", "with so many patterns");
    }
    for (int32_t i = 0; patterns && i < patterns->n; i++) {
        const struct value *name = patterns->name[i];
        rx_id rx = rx_parse(s->b, name->text, (size_t)name->n, true);
        conj_id child = conj_of_schema(s, patterns->item[i]);
        c->pattern[c->n_patterns] = rx;
        c->child[c->n_patterns++] = child;
        if (grammar_build_failed(s->b) || !split_cells(s, c, rx, child)) {
            return false;
        }
    }
    if (!other) {
        other = doc_get(v, "unevaluatedProperties");
    }
    for (int32_t i = 0; other && i < c->n; i++) {
        if (!c->matched[i]) {
            c->cell[i].child = conj_and(s, c->cell[i].child, conj_of_schema(s, other));
        }
    }
    return true;
}

/* ---- properties ---- */

static bool is_required(const struct value *required, const struct value *name)
{
    for (int32_t i = 0; required && i < required->n; i++) {
        const struct value *r = required->item[i];
        if (r->n == name->n && memcmp(r->text, name->text, (size_t)r->n) == 0) {
            return true;
        }
    }
    return false;
}

static int32_t find_name(const struct property *p, int32_t n, const struct value *name)
{
    for (int32_t i = 0; i < n; i++) {
        if (p[i].name->n == name->n && memcmp(p[i].name->text, name->text, (size_t)name->n) == 0) {
            return i;
        }
    }
    return -1;
}

static bool read_named(struct schema *s, const struct value *v, const struct cells *c,
                       struct object_set *o)
{
    const struct value *named = doc_get(v, "properties"), *required = doc_get(v, "required");

    if (named && named->type != V_OBJECT) {
        return schema_invalid(s, "properties", "an object");
    }
    bool strings = !required || required->type == V_ARRAY;
    for (int32_t i = 0; required && strings && i < required->n; i++) {
        strings = required->item[i]->type == V_STRING;
    }
    if (!strings) {
        return schema_invalid(s, "required", "an array of names");
    }
    int32_t room = (named ? named->n : 0) + (required ? required->n : 0), n = 0;
    struct property *p = schema_alloc(s, (size_t)room, sizeof(*p));
    if (!p || !grammar_build_work(s->b, room)) {
        return false;
    }
    for (int32_t i = 0; named && i < named->n; i++) {
        const struct value *name = named->name[i];
        if (!grammar_build_work(s->b, 1 + (required ? required->n / 4 : 0))) {
            return false;
        }
        conj_id child = conj_of_schema(s, named->item[i]);
        for (int32_t k = 0; k < c->n_patterns; k++) {
            if (rx_matches(s->b, c->pattern[k], name->text, (size_t)name->n)) {
                child = conj_and(s, child, c->child[k]);
            }
        }
        p[n++] = (struct property){name, child, is_required(required, name)};
    }
    for (int32_t i = 0; required && i < required->n; i++) {
        if (!grammar_build_work(s->b, 1 + n / 4)) {
            return false;
        }
        if (find_name(p, n, required->item[i]) < 0) {
            conj_id child = object_cell_of(s, o, required->item[i]);
            p[n++] = (struct property){required->item[i], child, true};
        }
    }
    o->property = p;
    o->n_properties = n;
    return true;
}

/* Objects whose names are all in a set. */
static const struct object_set *only_names(struct schema *s, const struct value *names)
{
    const struct shape *shape = read_schema(s, names);
    struct object_set *o = schema_alloc(s, 1, sizeof(*o));
    struct cell *cell = schema_alloc(s, 2, sizeof(*cell));

    if (!shape || !o || !cell) {
        return NULL;
    }
    if (shape->string.inexact) {
        return schema_refuse(s, "format", "under 'propertyNames'");
    }
    cell[0] = (struct cell){shape->string.rx, CONJ_TRUE};
    cell[1] = (struct cell){rx_not(s->b, shape->string.rx), CONJ_FALSE};
    *o =
        (struct object_set){.cell = cell, .n_cells = shape->string.rx == s->any ? 1 : 2, .max = -1};
    return o;
}

static const struct object_set *read_members(struct schema *s, const struct value *v)
{
    const struct value *min = doc_get(v, "minProperties"), *max = doc_get(v, "maxProperties");
    struct object_set *o = schema_alloc(s, 1, sizeof(*o));
    struct cells c;

    if (!o || !read_cells(s, v, &c)) {
        return NULL;
    }
    struct cell *cell = schema_alloc(s, (size_t)c.n, sizeof(*cell));
    if (!cell) {
        return NULL;
    }
    memcpy(cell, c.cell, (size_t)c.n * sizeof(*cell));
    o->cell = cell;
    o->n_cells = c.n;
    o->min = min ? read_count(s, "minProperties", min) : 0;
    o->max = max ? read_count(s, "maxProperties", max) : -1;
    const struct value *names = doc_get(v, "propertyNames");
    if (!read_named(s, v, &c, o) || !names) {
        return grammar_build_failed(s->b) ? NULL : o;
    }
    const struct object_set *only = only_names(s, names);
    return only ? object_and(s, o, only) : NULL;
}

const struct object_set *schema_object(struct schema *s, const struct value *v)
{
    static const char *const NAMES[] = {"properties",        "required",
                                        "patternProperties", "additionalProperties",
                                        "propertyNames",     "unevaluatedProperties",
                                        "minProperties",     "maxProperties"};

    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        if (doc_get(v, NAMES[i])) {
            return read_members(s, v);
        }
    }
    return NULL;
}

/* ---- dependencies ---- */

/* Every value but objects, and the objects that have, or lack, a property. */
static const struct shape *with_property(struct schema *s, const struct value *name, bool present)
{
    struct shape *ret = schema_alloc(s, 1, sizeof(*ret));
    struct object_set *o = schema_alloc(s, 1, sizeof(*o));
    struct property *p = schema_alloc(s, 1, sizeof(*p));

    if (!ret || !o || !p) {
        return NULL;
    }
    *ret = present ? *s->none : *s->all;
    *o = *s->all->object[0];
    *p = (struct property){name, present ? CONJ_TRUE : CONJ_FALSE, present};
    o->property = p;
    o->n_properties = 1;
    ret->n_objects = 0;
    object_add(s, ret, o);
    return ret;
}

/* Objects that have `name` satisfy `what`: a list of names or a schema. */
static const struct shape *depend(struct schema *s, const struct shape *base,
                                  const struct value *name, const struct value *what)
{
    const struct shape *has = shape_and(s, base, with_property(s, name, true));

    if (what->type == V_ARRAY || what->type == V_STRING) {
        int32_t n = what->type == V_ARRAY ? what->n : 1;
        for (int32_t i = 0; i < n; i++) {
            const struct value *other = what->type == V_ARRAY ? what->item[i] : what;
            if (other->type != V_STRING) {
                return schema_invalid(s, "dependentRequired", "lists of names");
            }
            has = shape_and(s, has, with_property(s, other, true));
        }
    } else {
        has = shape_and(s, has, read_schema(s, what));
    }
    return shape_or(s, shape_and(s, base, with_property(s, name, false)), has);
}

const struct shape *read_dependencies(struct schema *s, const struct value *v,
                                      const struct shape *base)
{
    static const char *const NAMES[] = {"dependentRequired", "dependentSchemas", "dependencies"};

    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        const struct value *list = doc_get(v, NAMES[i]);
        if (list && list->type != V_OBJECT) {
            return schema_invalid(s, NAMES[i], "an object");
        }
        for (int32_t k = 0; list && base && k < list->n; k++) {
            base = depend(s, base, list->name[k], list->item[k]);
        }
    }
    return base;
}
