/* Sets of JSON values: conjunctions, strings, arrays, and the shapes that are their
 * union by type. Objects are in objects.c. */
#include <string.h>

#include "engine/constrain/json_schema/schema.h"

/* ---- conjunctions ---- */

static uint32_t hash_literals(const struct literal *lit, int32_t n)
{
    uint32_t hash = 2166136261u;

    for (int32_t i = 0; i < n; i++) {
        uint32_t id = (uint32_t)lit[i].value->id * 4 + (uint32_t)lit[i].constant * 2 +
                      (uint32_t)lit[i].negated;
        hash = (hash ^ id) * 16777619u;
    }
    return hash ^ hash >> 15;
}

static bool same_literal(const struct literal *a, const struct literal *b)
{
    return a->value == b->value && a->constant == b->constant && a->negated == b->negated;
}

static bool same_literals(const struct conj *c, const struct literal *lit, int32_t n)
{
    for (int32_t i = 0; i < n && c->n == n; i++) {
        if (!same_literal(&c->lit[i], &lit[i])) {
            return false;
        }
    }
    return c->n == n;
}

/* The conjunction of n > 0 literals, made if it is new. */
static conj_id intern(struct schema *s, const struct literal *lit, int32_t n)
{
    uint32_t mask = 4 * SCHEMA_CONJUNCTIONS - 1, at = hash_literals(lit, n) & mask;

    while (s->conj_table[at] > 0) {
        if (same_literals(&s->conj[s->conj_table[at]], lit, n)) {
            return s->conj_table[at];
        }
        at = (at + 1) & mask;
    }
    struct literal *copy = schema_alloc(s, (size_t)n, sizeof(*copy));
    if (s->n_conj == SCHEMA_CONJUNCTIONS) {
        grammar_build_fail(s->b, ERR_INVALID, "schema: more than %d combinations of schemas",
                           SCHEMA_CONJUNCTIONS);
    }
    if (!copy || s->n_conj == SCHEMA_CONJUNCTIONS) {
        return CONJ_FALSE;
    }
    memcpy(copy, lit, (size_t)n * sizeof(*lit));
    s->conj[s->n_conj] = (struct conj){.n = n, .lit = copy};
    s->conj_table[at] = s->n_conj;
    return s->n_conj++;
}

/* Whether a schema is true or false by itself: 1 or 0, else -1. */
static int trivial(const struct value *v)
{
    if (v->type == V_OBJECT) {
        return v->n == 0 ? 1 : -1;
    }
    return v->type == V_TRUE ? 1 : v->type == V_FALSE ? 0 : -1;
}

/* A schema that is a reference alone is the schema that it names. */
static const struct value *dereference(struct schema *s, const struct value *v)
{
    for (int i = 0; i < SCHEMA_NESTING && v->type == V_OBJECT && v->n == 1; i++) {
        if (!doc_is(v->name[0], "$ref")) {
            break;
        }
        const struct value *target = refs_resolve(s, v, v->item[0], false);
        if (!target) {
            break;
        }
        v = target;
    }
    return v;
}

conj_id conj_of(struct schema *s, struct literal lit)
{
    lit.value = lit.constant ? lit.value : dereference(s, lit.value);
    int is = lit.constant ? -1 : trivial(lit.value);

    if (is >= 0) {
        return (is == 1) != lit.negated ? CONJ_TRUE : CONJ_FALSE;
    }
    return intern(s, &lit, 1);
}

conj_id conj_and(struct schema *s, conj_id a, conj_id b)
{
    if (a == b || b == CONJ_TRUE) {
        return a;
    }
    if (a == CONJ_TRUE || b == CONJ_FALSE) {
        return b;
    }
    if (a == CONJ_FALSE) {
        return a;
    }
    const struct conj *x = &s->conj[a], *y = &s->conj[b];
    struct literal *all = schema_alloc(s, (size_t)(x->n + y->n), sizeof(*all));
    int32_t n = x->n;
    if (!all || !grammar_build_work(s->b, x->n + y->n)) {
        return CONJ_FALSE;
    }
    memcpy(all, x->lit, (size_t)n * sizeof(*all));
    for (int32_t i = 0; i < y->n; i++) {
        bool known = false;
        for (int32_t k = 0; k < n; k++) {
            struct literal against = all[k];
            known = known || same_literal(&all[k], &y->lit[i]);
            against.negated = !against.negated;
            if (same_literal(&against, &y->lit[i])) {
                return CONJ_FALSE;
            }
        }
        if (!known) {
            all[n++] = y->lit[i];
        }
    }
    return intern(s, all, n);
}

conj_id conj_not(struct schema *s, conj_id c, int32_t literal)
{
    struct literal lit = s->conj[c].lit[literal];

    lit.negated = !lit.negated;
    return conj_of(s, lit);
}

bool conj_never(struct schema *s, conj_id c, int depth)
{
    if (c == CONJ_TRUE || c == CONJ_FALSE || depth == 0 || s->conj[c].open) {
        return c == CONJ_FALSE;
    }
    const struct shape *shape = conj_shape(s, c);
    return shape && shape_never(s, shape, depth);
}

/* ---- strings ---- */

rx_id rx_any_of(struct schema *s, const rx_id *rx, int32_t n)
{
    if (n == 0) {
        return s->never;
    }
    return n == 1 ? rx[0]
                  : rx_or(s->b, rx_any_of(s, rx, n / 2), rx_any_of(s, rx + n / 2, n - n / 2));
}

/* The strings of the list that match. */
static struct string_set filter(struct schema *s, const struct string_set *list, rx_id rx)
{
    struct string_set ret = {.lit = schema_alloc(s, (size_t)list->n, sizeof(*ret.lit))};
    rx_id *each = schema_alloc(s, (size_t)list->n, sizeof(*each));

    ret.rx = s->never;
    if (!ret.lit || !each) {
        return ret;
    }
    for (int32_t i = 0; i < list->n; i++) {
        const struct value *v = list->lit[i];
        if (rx_matches(s->b, rx, v->text, (size_t)v->n)) {
            each[ret.n] = rx_bytes(s->b, v->text, (size_t)v->n);
            ret.lit[ret.n++] = v;
        }
    }
    ret.rx = rx_any_of(s, each, ret.n);
    return ret;
}

struct string_set string_and(struct schema *s, struct string_set a, struct string_set b)
{
    if (a.rx == s->any || b.rx == s->never) {
        return b;
    }
    if (b.rx == s->any || a.rx == s->never) {
        return a;
    }
    struct string_set ret = a.n > 0   ? filter(s, &a, b.rx)
                            : b.n > 0 ? filter(s, &b, a.rx)
                                      : (struct string_set){.rx = rx_and(s->b, a.rx, b.rx)};
    ret.inexact = a.inexact || b.inexact;
    return ret;
}

static struct string_set string_or(struct schema *s, struct string_set a, struct string_set b)
{
    struct string_set ret = {.rx = rx_or(s->b, a.rx, b.rx), .inexact = a.inexact || b.inexact};

    if (a.rx == s->never || b.rx == s->never) {
        return a.rx == s->never ? b : a;
    }
    if (a.n > 0 && b.n > 0) {
        ret.lit = schema_alloc(s, (size_t)(a.n + b.n), sizeof(*ret.lit));
        if (ret.lit) {
            memcpy(ret.lit, a.lit, (size_t)a.n * sizeof(*a.lit));
            memcpy(ret.lit + a.n, b.lit, (size_t)b.n * sizeof(*b.lit));
            ret.n = a.n + b.n;
        }
    }
    return ret;
}

static struct string_set string_not(struct schema *s, struct string_set a)
{
    if (a.inexact) {
        schema_refuse(s, "format", "under 'not', 'oneOf' or 'if'");
    }
    if (a.rx == s->never || a.rx == s->any) {
        return (struct string_set){.rx = a.rx == s->never ? s->any : s->never};
    }
    return (struct string_set){.rx = rx_not(s->b, a.rx)};
}

/* ---- arrays ---- */

static bool array_add(struct schema *s, struct shape *ret, const struct array_set *a)
{
    if (!a || ret->n_arrays >= SCHEMA_ALTERNATIVES || !grammar_build_work(s->b, 16)) {
        if (a) {
            grammar_build_fail(s->b, ERR_INVALID, "schema: more than %d alternatives",
                               SCHEMA_ALTERNATIVES);
        }
        return false;
    }
    if (a->max >= 0 && a->min > a->max) {
        return true;
    }
    if ((ret->n_arrays & (ret->n_arrays - 1)) == 0) {
        size_t cap = ret->n_arrays ? 2 * (size_t)ret->n_arrays : 1;
        const struct array_set **grown = schema_alloc(s, cap, sizeof(*grown));
        if (!grown) {
            return false;
        }
        if (ret->n_arrays > 0) {
            memcpy(grown, ret->array, (size_t)ret->n_arrays * sizeof(*grown));
        }
        ret->array = grown;
    }
    ret->array[ret->n_arrays++] = a;
    return true;
}

static conj_id element(const struct array_set *a, int32_t i)
{
    return i < a->n_prefix ? a->prefix[i] : a->items;
}

static const struct array_set *array_and(struct schema *s, const struct array_set *a,
                                         const struct array_set *b)
{
    struct array_set *ret = schema_alloc(s, 1, sizeof(*ret));
    int32_t n = MAX(a->n_prefix, b->n_prefix);
    conj_id *prefix = schema_alloc(s, (size_t)n, sizeof(*prefix));
    struct contains *contains =
        schema_alloc(s, (size_t)(a->n_contains + b->n_contains), sizeof(*contains));

    if (!ret || !prefix || !contains || !grammar_build_work(s->b, n + 1)) {
        return NULL;
    }
    for (int32_t i = 0; i < n; i++) {
        prefix[i] = conj_and(s, element(a, i), element(b, i));
    }
    for (int32_t i = 0; i < a->n_contains; i++) {
        contains[i] = a->contains[i];
    }
    for (int32_t i = 0; i < b->n_contains; i++) {
        contains[a->n_contains + i] = b->contains[i];
    }
    *ret = (struct array_set){.prefix = prefix,
                              .n_prefix = n,
                              .items = conj_and(s, a->items, b->items),
                              .min = MAX(a->min, b->min),
                              .max = a->max < 0   ? b->max
                                     : b->max < 0 ? a->max
                                                  : MIN(a->max, b->max),
                              .unique = a->unique || b->unique,
                              .n_contains = a->n_contains + b->n_contains,
                              .contains = contains};
    return ret;
}

/* Arrays whose element i, if `index` >= 0, else some element from `from` on, is not in
 * `c`, one set for each literal of it. */
static void array_not_element(struct schema *s, struct shape *ret, conj_id c, int32_t index,
                              int32_t from)
{
    int32_t n = c == CONJ_TRUE ? 0 : c == CONJ_FALSE ? 1 : s->conj[c].n;

    for (int32_t i = 0; i < n; i++) {
        struct array_set *a = schema_alloc(s, 1, sizeof(*a));
        struct contains *contains = schema_alloc(s, 1, sizeof(*contains));
        conj_id *prefix = schema_alloc(s, (size_t)MAX(index, 0) + 1, sizeof(*prefix));
        if (!a || !contains || !prefix) {
            return;
        }
        conj_id other = c == CONJ_FALSE ? CONJ_TRUE : conj_not(s, c, i);
        *a = (struct array_set){.max = -1, .min = (int64_t)MAX(index, from) + 1};
        if (index >= 0) {
            prefix[index] = other;
            a->prefix = prefix;
            a->n_prefix = index + 1;
        } else if (other != CONJ_TRUE) {
            *contains = (struct contains){.what = other, .min = 1, .max = -1, .from = from};
            a->contains = contains;
            a->n_contains = 1;
        }
        array_add(s, ret, a);
    }
}

static void add_length(struct schema *s, struct shape *ret, int64_t min, int64_t max)
{
    struct array_set *a = schema_alloc(s, 1, sizeof(*a));

    if (a) {
        a->min = min;
        a->max = max;
        array_add(s, ret, a);
    }
}

static void array_not(struct schema *s, const struct array_set *a, struct shape *ret)
{
    if (a->unique) {
        schema_refuse(s, "uniqueItems", "under 'not', 'oneOf' or 'if'");
    }
    if (a->min > 0) {
        add_length(s, ret, 0, a->min - 1);
    }
    if (a->max >= 0) {
        add_length(s, ret, a->max + 1, -1);
    }
    for (int32_t i = 0; i < a->n_prefix; i++) {
        array_not_element(s, ret, a->prefix[i], i, 0);
    }
    array_not_element(s, ret, a->items, -1, a->n_prefix);
    for (int32_t i = 0; i < a->n_contains; i++) {
        const struct contains *c = &a->contains[i];
        struct array_set *none = schema_alloc(s, 1, sizeof(*none));
        if (c->min != 1 || c->max >= 0 || c->from > 0 || s->conj[c->what].n != 1) {
            schema_refuse(s, "contains", "under 'not', 'oneOf' or 'if'");
        }
        if (!none || grammar_build_failed(s->b)) {
            return;
        }
        none->max = -1;
        none->items = conj_not(s, c->what, 0);
        array_add(s, ret, none);
    }
}

static bool array_never(struct schema *s, const struct array_set *a, int depth)
{
    for (int32_t i = 0; i < a->n_prefix && i < a->min; i++) {
        if (conj_never(s, a->prefix[i], depth - 1)) {
            return true;
        }
    }
    return (a->max >= 0 && a->min > a->max) ||
           (a->min > a->n_prefix && conj_never(s, a->items, depth - 1));
}

/* ---- shapes ---- */

const struct shape *shape_and(struct schema *s, const struct shape *a, const struct shape *b)
{
    if (!a || !b || a == s->all || b == s->all) {
        return !a || !b ? NULL : a == s->all ? b : a;
    }
    struct shape *ret = schema_alloc(s, 1, sizeof(*ret));
    if (!ret) {
        return NULL;
    }
    ret->null = a->null && b->null;
    ret->no = a->no && b->no;
    ret->yes = a->yes && b->yes;
    ret->number = number_and(s, a->number, b->number);
    ret->string = string_and(s, a->string, b->string);
    for (int32_t i = 0; i < a->n_arrays; i++) {
        for (int32_t k = 0; k < b->n_arrays; k++) {
            if (!array_add(s, ret, array_and(s, a->array[i], b->array[k]))) {
                return NULL;
            }
        }
    }
    for (int32_t i = 0; i < a->n_objects; i++) {
        for (int32_t k = 0; k < b->n_objects; k++) {
            if (!object_add(s, ret, object_and(s, a->object[i], b->object[k]))) {
                return NULL;
            }
        }
    }
    return ret;
}

const struct shape *shape_or(struct schema *s, const struct shape *a, const struct shape *b)
{
    if (!a || !b || a == s->none || a == b) {
        return !a || !b ? NULL : b;
    }
    if (b == s->none) {
        return a;
    }
    struct shape *ret = schema_alloc(s, 1, sizeof(*ret));
    if (!ret) {
        return NULL;
    }
    ret->null = a->null || b->null;
    ret->no = a->no || b->no;
    ret->yes = a->yes || b->yes;
    ret->number = number_or(s, a->number, b->number);
    ret->string = string_or(s, a->string, b->string);
    for (int32_t i = 0; i < a->n_arrays + b->n_arrays; i++) {
        if (!array_add(s, ret, i < a->n_arrays ? a->array[i] : b->array[i - a->n_arrays])) {
            return NULL;
        }
    }
    for (int32_t i = 0; i < a->n_objects + b->n_objects; i++) {
        if (!object_add(s, ret, i < a->n_objects ? a->object[i] : b->object[i - a->n_objects])) {
            return NULL;
        }
    }
    return ret;
}

/* The arrays and objects that are in none of `a`'s. */
static const struct shape *not_nested(struct schema *s, const struct shape *a)
{
    const struct shape *ret = s->all;

    for (int32_t i = 0; i < a->n_arrays + a->n_objects; i++) {
        struct shape *one = schema_alloc(s, 1, sizeof(*one));
        if (!one) {
            return NULL;
        }
        *one = *s->all;
        if (i < a->n_arrays) {
            one->n_arrays = 0;
            array_not(s, a->array[i], one);
        } else {
            one->n_objects = 0;
            object_not(s, a->object[i - a->n_arrays], one);
        }
        ret = shape_and(s, ret, one);
    }
    return ret;
}

const struct shape *shape_not(struct schema *s, const struct shape *a)
{
    if (!a || a == s->all || a == s->none) {
        return !a ? NULL : a == s->all ? s->none : s->all;
    }
    const struct shape *nested = not_nested(s, a);
    struct shape *ret = schema_alloc(s, 1, sizeof(*ret));
    if (!ret || !nested) {
        return NULL;
    }
    *ret = *nested;
    ret->null = !a->null;
    ret->no = !a->no;
    ret->yes = !a->yes;
    ret->number = number_not(s, a->number);
    ret->string = string_not(s, a->string);
    return ret;
}

bool shape_never(struct schema *s, const struct shape *a, int depth)
{
    if (a->null || a->no || a->yes) {
        return false;
    }
    for (int32_t i = 0; i < a->n_objects; i++) {
        if (!object_never(s, a->object[i], depth)) {
            return false;
        }
    }
    for (int32_t i = 0; i < a->n_arrays; i++) {
        if (!array_never(s, a->array[i], depth)) {
            return false;
        }
    }
    return rx_is_never(s->b, a->string.rx) && rx_is_never(s->b, a->number.plain);
}
