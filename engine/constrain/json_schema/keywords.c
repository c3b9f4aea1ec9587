/* The keywords that are about one type of value. */
#include <string.h>

#include "engine/constrain/json_schema/read.h"

enum { COUNT_MAX = 1 << 30 };

int64_t read_count(struct schema *s, const char *keyword, const struct value *v)
{
    struct decimal d;

    if (v->type != V_NUMBER || !decimal_read(s, v, &d) || d.negative || d.n_part > 0) {
        schema_invalid(s, keyword, "a count");
        return -1;
    }
    int64_t n = 0;
    for (int32_t i = 0; i < d.n_whole; i++) {
        n = MIN(n * 10 + (d.whole[i] - '0'), COUNT_MAX);
    }
    return n;
}

/* A count at most; one that no answer reaches is none. */
static int64_t read_max(struct schema *s, const char *keyword, const struct value *v)
{
    int64_t n = read_count(s, keyword, v);

    return n == COUNT_MAX ? -1 : n;
}

/* ---- numbers ---- */

static void add_bound(struct schema *s, const struct value *v, bool above, struct shape *ret)
{
    const char *keyword = above ? "minimum" : "maximum",
               *strict = above ? "exclusiveMinimum" : "exclusiveMaximum";
    const struct value *bound = doc_get(v, keyword), *exclusive = doc_get(v, strict);

    if (bound && bound->type != V_NUMBER) {
        schema_invalid(s, keyword, "a number");
        return;
    }
    /* Draft 4: a flag of the bound. */
    bool flag = exclusive && (exclusive->type == V_TRUE || exclusive->type == V_FALSE);
    if (exclusive && !flag && exclusive->type != V_NUMBER) {
        schema_invalid(s, strict, "a number");
        return;
    }
    if (bound) {
        bool open = flag && exclusive->type == V_TRUE;
        ret->number = number_and(s, ret->number, number_bound(s, bound, above, open));
    }
    if (exclusive && !flag) {
        ret->number = number_and(s, ret->number, number_bound(s, exclusive, above, true));
    }
}

static void add_numbers(struct schema *s, const struct value *v, struct shape *ret)
{
    const struct value *of = doc_get(v, "multipleOf");

    add_bound(s, v, true, ret);
    add_bound(s, v, false, ret);
    if (of && of->type != V_NUMBER) {
        schema_invalid(s, "multipleOf", "a number above zero");
    } else if (of) {
        ret->number = number_and(s, ret->number, number_multiples(s, of));
    }
}

/* ---- strings ---- */

static void add_strings(struct schema *s, const struct value *v, struct shape *ret)
{
    const struct value *min = doc_get(v, "minLength"), *max = doc_get(v, "maxLength"),
                       *pattern = doc_get(v, "pattern"), *format = doc_get(v, "format");
    struct string_set set = {0};

    if (pattern && pattern->type != V_STRING) {
        schema_invalid(s, "pattern", "an expression");
        return;
    }
    if (format && format->type == V_STRING && format_strings(s, format, &set)) {
        ret->string = string_and(s, ret->string, set);
    }
    if (pattern) {
        set = (struct string_set){.rx = rx_parse(s->b, pattern->text, (size_t)pattern->n, true)};
        ret->string = string_and(s, ret->string, set);
    }
    int64_t least = min ? read_count(s, "minLength", min) : 0;
    int64_t most = max ? read_max(s, "maxLength", max) : -1;
    if ((least > 0 || most >= 0) && !grammar_build_failed(s->b)) {
        rx_id one = rx_class(s->b, NULL, 0, true);
        set = (struct string_set){.rx = most >= 0 && least > most
                                            ? s->never
                                            : rx_repeat(s->b, one, (int32_t)least, (int32_t)most)};
        ret->string = string_and(s, ret->string, set);
    }
}

/* ---- arrays ---- */

/* The schemas of a list as the front of an array. */
static void read_prefix(struct schema *s, const struct value *list, struct array_set *a)
{
    conj_id *prefix = schema_alloc(s, (size_t)list->n, sizeof(*prefix));

    for (int32_t i = 0; prefix && i < list->n; i++) {
        prefix[i] = conj_of(s, (struct literal){.value = list->item[i]});
    }
    a->prefix = prefix;
    a->n_prefix = prefix ? list->n : 0;
}

static void read_items(struct schema *s, const struct value *v, struct array_set *a)
{
    const struct value *items = doc_get(v, "items"), *prefix = doc_get(v, "prefixItems"),
                       *rest = items;

    if (items && items->type == V_ARRAY) {
        if (s->draft == 2020) {
            schema_invalid(s, "items", "a schema; a list of them is 'prefixItems'");
        }
        prefix = prefix ? prefix : items;
        rest = doc_get(v, "additionalItems");
    }
    if (!rest) {
        rest = doc_get(v, "unevaluatedItems");
    }
    if (prefix && prefix->type != V_ARRAY) {
        schema_invalid(s, "prefixItems", "an array of schemas");
    } else if (prefix) {
        read_prefix(s, prefix, a);
    }
    if (rest) {
        a->items = conj_of(s, (struct literal){.value = rest});
    }
}

static void read_contains(struct schema *s, const struct value *v, struct array_set *a)
{
    const struct value *what = doc_get(v, "contains"), *min = doc_get(v, "minContains"),
                       *max = doc_get(v, "maxContains");
    struct contains *c = schema_alloc(s, 1, sizeof(*c));

    if (!what || !c) {
        return;
    }
    *c = (struct contains){.what = conj_of(s, (struct literal){.value = what}),
                           .min = min ? read_count(s, "minContains", min) : 1,
                           .max = max ? read_max(s, "maxContains", max) : -1};
    if (c->what == CONJ_TRUE) {
        a->min = MAX(a->min, c->min);
        a->max = a->max < 0 ? c->max : c->max < 0 ? a->max : MIN(a->max, c->max);
    } else if (c->what == CONJ_FALSE || (c->max >= 0 && c->min > c->max)) {
        a->min = c->min > 0 ? 1 : a->min;
        a->max = c->min > 0 ? 0 : a->max;
    } else if (c->min > 0 || c->max >= 0) {
        a->contains = c;
        a->n_contains = 1;
    }
}

static void add_arrays(struct schema *s, const struct value *v, struct shape *ret)
{
    const struct value *min = doc_get(v, "minItems"), *max = doc_get(v, "maxItems"),
                       *unique = doc_get(v, "uniqueItems");
    struct array_set *a = schema_alloc(s, 1, sizeof(*a));
    struct shape *only = schema_alloc(s, 1, sizeof(*only));
    const struct array_set **list = schema_alloc(s, 1, sizeof(*list));

    if (!a || !only || !list) {
        return;
    }
    a->min = min ? read_count(s, "minItems", min) : 0;
    a->max = max ? read_max(s, "maxItems", max) : -1;
    read_items(s, v, a);
    read_contains(s, v, a);
    a->unique = unique && unique->type == V_TRUE;
    *only = *s->all;
    *list = a;
    only->array = list;
    only->n_arrays = a->max >= 0 && a->min > a->max ? 0 : 1;
    const struct shape *both = shape_and(s, ret, only);
    if (both) {
        ret->array = both->array;
        ret->n_arrays = both->n_arrays;
    }
}

/* ---- what is not enforced ---- */

/* Keywords that look at schemas beside them. */
static bool combines(const struct value *v)
{
    static const char *const NAMES[] = {
        "$ref",         "$dynamicRef",      "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
        "dependencies", "dependentSchemas", NULL};

    for (int i = 0; NAMES[i]; i++) {
        if (doc_get(v, NAMES[i])) {
            return true;
        }
    }
    return false;
}

/* Assertions of some draft that are not enforced. */
static void refuse_others(struct schema *s, const struct value *v)
{
    static const char *const NAMES[] = {"$recursiveRef", "extends", "disallow", "divisibleBy"};

    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        if (doc_get(v, NAMES[i])) {
            schema_refuse(s, NAMES[i], NULL);
        }
    }
    const struct value *items = doc_get(v, "unevaluatedItems"),
                       *properties = doc_get(v, "unevaluatedProperties");
    if (items && items->type != V_TRUE && (combines(v) || doc_get(v, "contains"))) {
        schema_refuse(s, "unevaluatedItems", "beside schemas that it looks at");
    }
    if (properties && properties->type != V_TRUE && combines(v)) {
        schema_refuse(s, "unevaluatedProperties", "beside schemas that it looks at");
    }
}

/* ---- all of them ---- */

static bool has_any(const struct value *v, const char *const *name)
{
    for (int i = 0; name[i]; i++) {
        if (doc_get(v, name[i])) {
            return true;
        }
    }
    return false;
}

const struct shape *read_keywords(struct schema *s, const struct value *v)
{
    static const char *const ARRAYS[] = {"items",    "prefixItems", "unevaluatedItems", "minItems",
                                         "maxItems", "contains",    "uniqueItems",      NULL};
    const struct value *type = doc_get(v, "type"), *list = doc_get(v, "enum"),
                       *one = doc_get(v, "const");
    const struct shape *base = type ? read_type(s, type) : s->all;

    refuse_others(s, v);
    base = list ? shape_and(s, base, read_enum(s, list)) : base;
    base = one ? shape_and(s, base, read_const(s, one)) : base;
    struct shape *ret = schema_alloc(s, 1, sizeof(*ret));
    if (!base || !ret || grammar_build_failed(s->b)) {
        return NULL;
    }
    *ret = *base;
    if (ret->number.plain != s->never) {
        add_numbers(s, v, ret);
    }
    if (ret->string.rx != s->never) {
        add_strings(s, v, ret);
    }
    if (ret->n_arrays > 0 && has_any(v, ARRAYS)) {
        add_arrays(s, v, ret);
    }
    const struct object_set *o = ret->n_objects > 0 ? read_object(s, v) : NULL;
    if (o) {
        const struct object_set **own = ret->object;
        int32_t n = ret->n_objects;
        ret->object = NULL;
        ret->n_objects = 0;
        for (int32_t i = 0; i < n; i++) {
            object_add(s, ret, object_and(s, own[i], o));
        }
    }
    return grammar_build_failed(s->b) ? NULL : ret;
}
