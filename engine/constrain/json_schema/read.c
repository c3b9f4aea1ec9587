/* From the keywords of a schema to the set of values that it allows. */
#include <string.h>

#include "engine/constrain/json_schema/read.h"

static const struct shape *literal_shape(struct schema *s, struct literal lit);

const struct shape *conj_shape(struct schema *s, conj_id c)
{
    if (c == CONJ_TRUE || c == CONJ_FALSE) {
        return c == CONJ_TRUE ? s->all : s->none;
    }
    if (s->conj[c].shape || grammar_build_failed(s->b)) {
        return s->conj[c].shape;
    }
    if (s->conj[c].open || s->nesting >= SCHEMA_NESTING) {
        grammar_build_fail(s->b, ERR_INVALID,
                           s->conj[c].open ? "schema: a reference leads back to its own value"
                                           : "schema: too many schemas for one value");
        return NULL;
    }
    s->conj[c].open = true;
    s->nesting++;
    const struct shape *shape;
    if (s->conj[c].n == 1) {
        shape = literal_shape(s, s->conj[c].lit[0]);
    } else {
        shape = s->all;
        for (int32_t i = 0; i < s->conj[c].n && shape; i++) {
            shape = shape_and(s, shape, conj_shape(s, conj_of(s, s->conj[c].lit[i])));
        }
    }
    s->nesting--;
    s->conj[c].open = false;
    s->conj[c].shape = grammar_build_failed(s->b) ? NULL : shape;
    return s->conj[c].shape;
}

/* The shape of a schema of the document. */
const struct shape *read_schema(struct schema *s, const struct value *v)
{
    return conj_shape(s, conj_of(s, (struct literal){.value = v}));
}

/* ---- constants ---- */

static const struct array_set *constant_array(struct schema *s, const struct value *v)
{
    struct array_set *a = schema_alloc(s, 1, sizeof(*a));
    conj_id *prefix = schema_alloc(s, (size_t)v->n, sizeof(*prefix));

    if (!a || !prefix) {
        return NULL;
    }
    for (int32_t i = 0; i < v->n; i++) {
        prefix[i] = conj_of(s, (struct literal){.value = v->item[i], .constant = true});
    }
    *a = (struct array_set){
        .prefix = prefix, .n_prefix = v->n, .items = CONJ_FALSE, .min = v->n, .max = v->n};
    return a;
}

static const struct object_set *constant_object(struct schema *s, const struct value *v)
{
    struct object_set *o = schema_alloc(s, 1, sizeof(*o));
    struct property *p = schema_alloc(s, (size_t)v->n, sizeof(*p));
    struct cell *cell = schema_alloc(s, 1, sizeof(*cell));

    if (!o || !p || !cell) {
        return NULL;
    }
    for (int32_t i = 0; i < v->n; i++) {
        conj_id child = conj_of(s, (struct literal){.value = v->item[i], .constant = true});
        p[i] = (struct property){v->name[i], child, true};
    }
    *cell = (struct cell){s->any, CONJ_FALSE};
    *o = (struct object_set){
        .property = p, .n_properties = v->n, .cell = cell, .n_cells = 1, .max = -1};
    return o;
}

static void add_constant(struct schema *s, const struct value *v, struct shape *ret)
{
    const struct array_set **array;
    const struct object_set **object;

    switch (v->type) {
    case V_NULL:
        ret->null = true;
        break;
    case V_FALSE:
        ret->no = true;
        break;
    case V_TRUE:
        ret->yes = true;
        break;
    case V_NUMBER:
        ret->number = number_equal(s, v);
        break;
    case V_STRING:
        ret->string.rx = rx_bytes(s->b, v->text, (size_t)v->n);
        ret->string.lit = schema_alloc(s, 1, sizeof(*ret->string.lit));
        if (ret->string.lit) {
            ret->string.lit[0] = v;
            ret->string.n = 1;
        }
        break;
    case V_ARRAY:
        array = schema_alloc(s, 1, sizeof(*array));
        if (array) {
            array[0] = constant_array(s, v);
            ret->array = array;
            ret->n_arrays = array[0] ? 1 : 0;
        }
        break;
    case V_OBJECT:
        object = schema_alloc(s, 1, sizeof(*object));
        if (object) {
            object[0] = constant_object(s, v);
            ret->object = object;
            ret->n_objects = object[0] ? 1 : 0;
        }
        break;
    }
}

static const struct shape *constant(struct schema *s, const struct value *v)
{
    struct shape *ret = schema_alloc(s, 1, sizeof(*ret));

    if (!ret) {
        return NULL;
    }
    *ret = *s->none;
    add_constant(s, v, ret);
    return ret;
}

static const struct shape *any_constant(struct schema *s, const struct value *const *v, int32_t n)
{
    if (n <= 1) {
        return n == 1 ? constant(s, v[0]) : s->none;
    }
    return shape_or(s, any_constant(s, v, n / 2), any_constant(s, v + n / 2, n - n / 2));
}

const struct shape *read_enum(struct schema *s, const struct value *v)
{
    if (v->type != V_ARRAY) {
        return schema_invalid(s, "enum", "an array");
    }
    return any_constant(s, v->item, v->n);
}

const struct shape *read_const(struct schema *s, const struct value *v)
{
    return constant(s, v);
}

/* ---- type ---- */

static bool add_type(struct schema *s, const struct value *name, struct shape *ret)
{
    if (name->type != V_STRING) {
        return false;
    }
    if (doc_is(name, "null")) {
        ret->null = true;
    } else if (doc_is(name, "boolean")) {
        ret->no = ret->yes = true;
    } else if (doc_is(name, "number")) {
        ret->number = s->all->number;
    } else if (doc_is(name, "integer")) {
        if (ret->number.plain == s->never) {
            ret->number = number_integers(s);
        }
    } else if (doc_is(name, "string")) {
        ret->string = s->all->string;
    } else if (doc_is(name, "array")) {
        ret->array = s->all->array;
        ret->n_arrays = 1;
    } else if (doc_is(name, "object")) {
        ret->object = s->all->object;
        ret->n_objects = 1;
    } else {
        return false;
    }
    return true;
}

const struct shape *read_type(struct schema *s, const struct value *v)
{
    struct shape *ret = schema_alloc(s, 1, sizeof(*ret));
    bool fine = ret && (v->type == V_STRING || v->type == V_ARRAY);

    if (fine) {
        *ret = *s->none;
    }
    if (fine && v->type == V_STRING) {
        fine = add_type(s, v, ret);
    }
    for (int32_t i = 0; fine && v->type == V_ARRAY && i < v->n; i++) {
        fine = add_type(s, v->item[i], ret);
    }
    return fine ? ret : schema_invalid(s, "type", "a type's name or a list of them");
}

/* ---- keywords that combine schemas ---- */

static const struct shape *all_of(struct schema *s, const struct value *v, const struct shape *base)
{
    for (int32_t i = 0; i < v->n && base; i++) {
        base = shape_and(s, base, read_schema(s, v->item[i]));
    }
    return base;
}

static const struct shape *any_of(struct schema *s, const struct value *v, const struct shape *base)
{
    const struct shape *ret = s->none;

    for (int32_t i = 0; i < v->n && ret; i++) {
        ret = shape_or(s, ret, shape_and(s, base, read_schema(s, v->item[i])));
    }
    return ret;
}

/* One of the branches, and none of the others that share values with it. */
static const struct shape *one_of(struct schema *s, const struct value *v, const struct shape *base)
{
    const struct shape *ret = s->none;

    for (int32_t i = 0; i < v->n && ret; i++) {
        const struct shape *one = shape_and(s, base, read_schema(s, v->item[i]));
        for (int32_t k = 0; k < v->n && one; k++) {
            const struct shape *other = k == i ? NULL : read_schema(s, v->item[k]);
            const struct shape *both = other ? shape_and(s, one, other) : NULL;
            if (both && !shape_never(s, both, 4)) {
                one = shape_and(s, one, shape_not(s, other));
            }
        }
        ret = one ? shape_or(s, ret, one) : NULL;
    }
    return ret;
}

static const struct shape *conditional(struct schema *s, const struct value *schema,
                                       const struct shape *base)
{
    const struct value *test = doc_get(schema, "if"), *then = doc_get(schema, "then"),
                       *other = doc_get(schema, "else");

    if (!then && !other) {
        return base;
    }
    const struct shape *is = read_schema(s, test);
    const struct shape *yes = shape_and(s, base, is);
    const struct shape *no = shape_and(s, base, shape_not(s, is));
    if (then) {
        yes = shape_and(s, yes, read_schema(s, then));
    }
    if (other) {
        no = shape_and(s, no, read_schema(s, other));
    }
    return shape_or(s, yes, no);
}

static const struct shape *combine(struct schema *s, const struct value *v,
                                   const struct shape *base)
{
    static const char *const LISTS[] = {"allOf", "anyOf", "oneOf"};
    const struct value *list;

    for (size_t i = 0; i < ARRAY_LEN(LISTS) && base; i++) {
        list = doc_get(v, LISTS[i]);
        if (!list) {
            continue;
        }
        if (list->type != V_ARRAY || list->n == 0) {
            return schema_invalid(s, LISTS[i], "an array of schemas");
        }
        base = i == 0   ? all_of(s, list, base)
               : i == 1 ? any_of(s, list, base)
                        : one_of(s, list, base);
    }
    if (base && doc_get(v, "not")) {
        base = shape_and(s, base, shape_not(s, read_schema(s, doc_get(v, "not"))));
    }
    if (base && doc_get(v, "if") && (s->draft == 0 || s->draft >= 7)) {
        base = conditional(s, v, base);
    }
    return base;
}

/* ---- a schema ---- */

static const struct shape *reference(struct schema *s, const struct value *v,
                                     const struct shape *base)
{
    static const char *const NAMES[] = {"$ref", "$dynamicRef"};

    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        const struct value *ref = doc_get(v, NAMES[i]);
        const struct value *target = ref ? refs_resolve(s, v, ref, i == 1) : NULL;
        if (target) {
            base = shape_and(s, base, read_schema(s, target));
        } else if (ref) {
            return NULL;
        }
    }
    return base;
}

static const struct shape *schema_shape(struct schema *s, const struct value *v)
{
    if (v->type == V_TRUE || v->type == V_FALSE) {
        return v->type == V_TRUE ? s->all : s->none;
    }
    if (v->type != V_OBJECT) {
        grammar_build_fail(s->b, ERR_INVALID, "schema: a schema is an object or a boolean");
        return NULL;
    }
    if (s->draft > 0 && s->draft <= 7 && doc_get(v, "$ref")) {
        return reference(s, v, s->all);
    }
    const struct shape *base = read_keywords(s, v);
    base = base ? reference(s, v, base) : NULL;
    base = base ? combine(s, v, base) : NULL;
    return base ? read_dependencies(s, v, base) : NULL;
}

static const struct shape *literal_shape(struct schema *s, struct literal lit)
{
    if (lit.negated) {
        lit.negated = false;
        return shape_not(s, conj_shape(s, conj_of(s, lit)));
    }
    return lit.constant ? constant(s, lit.value) : schema_shape(s, lit.value);
}
