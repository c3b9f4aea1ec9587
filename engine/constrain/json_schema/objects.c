/* Sets of objects: named properties, cells of other names, and counts of members. */
#include <string.h>

#include "engine/constrain/json_schema/schema.h"

static bool same_name(const struct value *a, const struct value *b)
{
    return a->n == b->n && memcmp(a->text, b->text, (size_t)a->n) == 0;
}

static int32_t find(const struct object_set *o, const struct value *name)
{
    for (int32_t i = 0; i < o->n_properties; i++) {
        if (same_name(o->property[i].name, name)) {
            return i;
        }
    }
    return -1;
}

conj_id object_cell_of(struct schema *s, const struct object_set *a, const struct value *name)
{
    for (int32_t i = 0; i < a->n_cells; i++) {
        if (a->cell[i].names == s->any ||
            rx_matches(s->b, a->cell[i].names, name->text, (size_t)name->n)) {
            return a->cell[i].child;
        }
    }
    return CONJ_FALSE;
}

/* ---- intersection ---- */

static bool and_properties(struct schema *s, const struct object_set *a, const struct object_set *b,
                           struct object_set *ret)
{
    struct property *p = schema_alloc(s, (size_t)(a->n_properties + b->n_properties), sizeof(*p));
    int32_t n = 0;

    int64_t pairs = (int64_t)a->n_properties * b->n_properties;
    if (!p || !grammar_build_work(s->b, 1 + a->n_properties + b->n_properties + pairs / 8)) {
        return false;
    }
    for (int32_t i = 0; i < a->n_properties; i++) {
        const struct property *x = &a->property[i];
        int32_t k = find(b, x->name);
        conj_id other = k >= 0 ? b->property[k].child : object_cell_of(s, b, x->name);
        p[n++] = (struct property){x->name, conj_and(s, x->child, other),
                                   x->required || (k >= 0 && b->property[k].required)};
    }
    for (int32_t i = 0; i < b->n_properties; i++) {
        const struct property *x = &b->property[i];
        if (find(a, x->name) < 0) {
            conj_id other = object_cell_of(s, a, x->name);
            p[n++] = (struct property){x->name, conj_and(s, other, x->child), x->required};
        }
    }
    ret->property = p;
    ret->n_properties = n;
    return true;
}

static bool and_cells(struct schema *s, const struct object_set *a, const struct object_set *b,
                      struct object_set *ret)
{
    struct cell *cell = schema_alloc(s, (size_t)a->n_cells * (size_t)b->n_cells, sizeof(*cell));
    int32_t n = 0;

    for (int32_t i = 0; cell && i < a->n_cells; i++) {
        for (int32_t k = 0; k < b->n_cells; k++) {
            rx_id x = a->cell[i].names, y = b->cell[k].names;
            rx_id names = x == s->any || x == y ? y : y == s->any ? x : rx_and(s->b, x, y);
            if (x != s->any && y != s->any && x != y && rx_is_never(s->b, names)) {
                continue;
            }
            cell[n++] = (struct cell){names, conj_and(s, a->cell[i].child, b->cell[k].child)};
        }
    }
    if (n > SCHEMA_CELLS) {
        schema_refuse(s, "patternProperties", "with so many patterns that overlap");
    }
    ret->cell = cell;
    ret->n_cells = n;
    return cell && n <= SCHEMA_CELLS;
}

const struct object_set *object_and(struct schema *s, const struct object_set *a,
                                    const struct object_set *b)
{
    struct object_set *ret = schema_alloc(s, 1, sizeof(*ret));
    rx_id *exist = schema_alloc(s, (size_t)(a->n_exist + b->n_exist), sizeof(*exist));

    if (!ret || !exist || !and_properties(s, a, b, ret) || !and_cells(s, a, b, ret)) {
        return NULL;
    }
    for (int32_t i = 0; i < a->n_exist; i++) {
        exist[i] = a->exist[i];
    }
    for (int32_t i = 0; i < b->n_exist; i++) {
        exist[a->n_exist + i] = b->exist[i];
    }
    ret->min = MAX(a->min, b->min);
    ret->max = a->max < 0 ? b->max : b->max < 0 ? a->max : MIN(a->max, b->max);
    ret->exist = exist;
    ret->n_exist = a->n_exist + b->n_exist;
    return ret;
}

/* ---- union ---- */

bool object_add(struct schema *s, struct shape *ret, const struct object_set *o)
{
    int64_t required = 0;

    if (!o || !grammar_build_work(s->b, 16)) {
        return false;
    }
    for (int32_t i = 0; i < o->n_properties; i++) {
        if (o->property[i].required && o->property[i].child == CONJ_FALSE) {
            return true;
        }
        required += o->property[i].required;
    }
    if (o->max >= 0 && MAX(required, o->min) > o->max) {
        return true;
    }
    if (ret->n_objects >= SCHEMA_ALTERNATIVES) {
        grammar_build_fail(s->b, ERR_INVALID, "schema: more than %d alternatives",
                           SCHEMA_ALTERNATIVES);
        return false;
    }
    if ((ret->n_objects & (ret->n_objects - 1)) == 0) {
        size_t cap = ret->n_objects ? 2 * (size_t)ret->n_objects : 1;
        const struct object_set **grown = schema_alloc(s, cap, sizeof(*grown));
        if (!grown) {
            return false;
        }
        if (ret->n_objects > 0) {
            memcpy(grown, ret->object, (size_t)ret->n_objects * sizeof(*grown));
        }
        ret->object = grown;
    }
    ret->object[ret->n_objects++] = o;
    return true;
}

/* ---- complement ---- */

static struct object_set *plain_object(struct schema *s)
{
    struct object_set *o = schema_alloc(s, 1, sizeof(*o));
    struct cell *cell = schema_alloc(s, 1, sizeof(*cell));

    if (!o || !cell) {
        return NULL;
    }
    *cell = (struct cell){s->any, CONJ_TRUE};
    *o = (struct object_set){.cell = cell, .n_cells = 1, .max = -1};
    return o;
}

static void add_property(struct schema *s, struct shape *ret, const struct value *name,
                         conj_id child, bool required)
{
    struct object_set *o = plain_object(s);
    struct property *p = schema_alloc(s, 1, sizeof(*p));

    if (o && p) {
        *p = (struct property){name, child, required};
        o->property = p;
        o->n_properties = 1;
        object_add(s, ret, o);
    }
}

static void not_property(struct schema *s, const struct property *p, struct shape *ret)
{
    if (p->required) {
        add_property(s, ret, p->name, CONJ_FALSE, false);
    }
    if (p->child == CONJ_FALSE) {
        add_property(s, ret, p->name, CONJ_TRUE, true);
    }
    for (int32_t i = 0; p->child > CONJ_FALSE && i < s->conj[p->child].n; i++) {
        add_property(s, ret, p->name, conj_not(s, p->child, i), true);
    }
}

static rx_id names_of(struct schema *s, const struct object_set *o)
{
    rx_id *each = schema_alloc(s, (size_t)o->n_properties, sizeof(*each));

    for (int32_t i = 0; each && i < o->n_properties; i++) {
        each[i] = rx_bytes(s->b, o->property[i].name->text, (size_t)o->property[i].name->n);
    }
    return each ? rx_any_of(s, each, o->n_properties) : 0;
}

static void not_cell(struct schema *s, const struct object_set *a, const struct cell *cell,
                     struct shape *ret)
{
    if (cell->child == CONJ_TRUE) {
        return;
    }
    rx_id names = rx_and(s->b, cell->names, rx_not(s->b, names_of(s, a)));
    if (rx_is_never(s->b, names)) {
        return;
    }
    struct object_set *o = plain_object(s);
    rx_id *exist = schema_alloc(s, 1, sizeof(*exist));
    if (cell->child != CONJ_FALSE) {
        schema_refuse(s, cell->names == s->any ? "additionalProperties" : "patternProperties",
                      "under 'not', 'oneOf' or 'if'");
    } else if (o && exist) {
        *exist = names;
        o->exist = exist;
        o->n_exist = 1;
        object_add(s, ret, o);
    }
}

static void not_exist(struct schema *s, rx_id names, struct shape *ret)
{
    struct object_set *o = plain_object(s);
    struct cell *cell = schema_alloc(s, 2, sizeof(*cell));

    if (o && cell) {
        cell[0] = (struct cell){names, CONJ_FALSE};
        cell[1] = (struct cell){rx_not(s->b, names), CONJ_TRUE};
        o->cell = cell;
        o->n_cells = 2;
        object_add(s, ret, o);
    }
}

void object_not(struct schema *s, const struct object_set *a, struct shape *ret)
{
    for (int32_t i = 0; i < a->n_properties; i++) {
        not_property(s, &a->property[i], ret);
    }
    for (int32_t i = 0; i < a->n_cells; i++) {
        not_cell(s, a, &a->cell[i], ret);
    }
    for (int32_t i = 0; i < a->n_exist; i++) {
        not_exist(s, a->exist[i], ret);
    }
    struct object_set *fewer = plain_object(s), *more = plain_object(s);
    if (fewer && a->min > 0) {
        fewer->max = a->min - 1;
        object_add(s, ret, fewer);
    }
    if (more && a->max >= 0) {
        more->min = a->max + 1;
        object_add(s, ret, more);
    }
}

/* ---- emptiness ---- */

bool object_never(struct schema *s, const struct object_set *a, int depth)
{
    int64_t possible = 0;
    bool open = false;

    for (int32_t i = 0; i < a->n_properties; i++) {
        if (a->property[i].required && conj_never(s, a->property[i].child, depth - 1)) {
            return true;
        }
        possible += a->property[i].child != CONJ_FALSE;
    }
    for (int32_t i = 0; i < a->n_cells; i++) {
        open = open || a->cell[i].child != CONJ_FALSE;
    }
    if (!open) {
        for (int32_t i = 0; i < a->n_exist; i++) {
            bool some = false;
            for (int32_t k = 0; k < a->n_properties && !some; k++) {
                const struct property *p = &a->property[k];
                some = p->child != CONJ_FALSE &&
                       rx_matches(s->b, a->exist[i], p->name->text, (size_t)p->name->n);
            }
            if (!some) {
                return true;
            }
        }
    }
    return !open && a->min > possible;
}
