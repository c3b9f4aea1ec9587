/* Symbols of objects: members in the order of the schema, then those of other names.
 *
 * A table of symbols is filled from the last property to the first: more[i][k] is
 * what follows, up to the object's end, where i properties are decided, k members are
 * written and another comes. It begins behind the comma, so that the blanks around a
 * comma are read once and not for each name that may come. Where members need not be
 * counted, k is 0 or 1: whether one was written. */
#include <string.h>

#include "engine/constrain/json_schema/schema.h"

enum { TABLE_MAX = 1 << 16 };

struct plan {
    struct schema *s;
    const struct object_set *o;
    sym_id *member;   /* [n_properties] name and value; 0: the property is absent */
    sym_id other;     /* a member of another name; 0: there is none */
    sym_id needed;    /* one of another name that must come; 0: none */
    int64_t min, max; /* members; max -1: any number */
    int32_t top;      /* the largest k */
};

static sym_id comma_then(struct plan *p, sym_id x)
{
    return emit_seq(p->s, p->s->comma, x);
}

static sym_id closed(struct plan *p, int32_t k)
{
    return k > 0 ? p->s->close_object : p->s->end_object;
}

/* From `min` to `max` members of other names, at least one, and the end; max -1: any
 * number. */
static sym_id others(struct plan *p, int64_t min, int64_t max)
{
    struct schema *s = p->s;

    if (!p->other || max == 0) {
        return 0;
    }
    sym_id rest = sym_repeat(s->b, comma_then(p, p->other), (int32_t)MAX(min - 1, 0),
                             max < 0 ? -1 : (int32_t)max - 1);
    return emit_seq(s, p->other, emit_seq(s, rest, s->close_object));
}

/* Members of other names of which one is p->needed, and the end. */
static sym_id others_with(struct plan *p)
{
    struct schema *s = p->s;
    sym_id behind = sym_repeat(s->b, comma_then(p, p->other), 0, -1);
    sym_id in_front = sym_repeat(s->b, emit_seq(s, p->other, s->comma), 0, -1);

    return emit_seq(s, in_front, emit_seq(s, p->needed, emit_seq(s, behind, s->close_object)));
}

/* Another member behind the last property and k members, and what follows it. */
static sym_id more_others(struct plan *p, int32_t k)
{
    int64_t lack = MAX(p->min - k, 0);

    if (p->needed) {
        return others_with(p);
    }
    /* A name may be repeated, which is one member: of other names only one counts. */
    if (lack > 1 && p->other) {
        return schema_refuse(p->s, "minProperties", "above the number of named properties"), 0;
    }
    return others(p, lack, p->max < 0 ? -1 : MAX(p->max - k, 0));
}

/* What may follow k members: another one, `more`, or the end, unless `required` of the
 * properties are still to come. */
static sym_id tail(struct plan *p, int32_t k, int32_t required, sym_id more)
{
    bool ends = required == 0 && k >= p->min && !p->needed;
    sym_id next = more && k > 0 ? comma_then(p, more) : more;

    return emit_either(p->s, next, ends ? closed(p, k) : 0);
}

/* Property i comes next and then `tails`, or it is left out: `more`, of i + 1. */
static sym_id step(struct plan *p, int32_t i, int32_t k, const sym_id *tails, sym_id more)
{
    struct schema *s = p->s;
    sym_id without = p->o->property[i].required ? 0 : more, with = 0;

    if (p->member[i] && (k < p->max || p->max < 0)) {
        with = emit_seq(s, p->member[i], tails[MIN(k + 1, p->top)]);
    }
    if (with && without) {
        sym_id rule = sym_rule(s->b);
        sym_define(s->b, rule, emit_either(s, without, with));
        return rule;
    }
    return with ? with : without;
}

static sym_id members(struct plan *p)
{
    int32_t n = p->o->n_properties, width, required = 0, before = 0;
    int64_t top = p->max >= 0 ? p->max : MAX(p->min, 1);

    top = MIN(top, n + 1);
    p->top = (int32_t)MAX(top, 1);
    width = p->top + 1;
    if ((int64_t)(n + 1) * width > TABLE_MAX) {
        return schema_refuse(p->s, "minProperties, maxProperties", "of so many properties"), 0;
    }
    for (int32_t i = 0; i < n; i++) {
        before += p->o->property[i].required;
    }
    sym_id *more = schema_alloc(p->s, (size_t)width, sizeof(*more));
    sym_id *tails = schema_alloc(p->s, (size_t)width, sizeof(*tails));
    if (!more || !tails) {
        return 0;
    }
    /* The required ones are written by then. */
    for (int32_t k = MIN(before, p->top); k < width && k <= n; k++) {
        more[k] = more_others(p, k);
        tails[k] = tail(p, k, 0, more[k]);
    }
    for (int32_t i = n - 1; i >= 0; i--) {
        before -= p->o->property[i].required;
        required += p->o->property[i].required;
        for (int32_t k = 0; k < width; k++) {
            bool there = k >= MIN(before, p->top) && k <= i;
            more[k] = there ? step(p, i, k, tails, more[k]) : 0;
        }
        for (int32_t k = 0; k < width; k++) {
            bool there = k >= MIN(before, p->top) && k <= i;
            tails[k] = there ? tail(p, k, required, more[k]) : 0;
        }
    }
    return tails[0];
}

/* ---- names ---- */

static rx_id all_names(struct schema *s, const struct object_set *o)
{
    rx_id *each = schema_alloc(s, (size_t)o->n_properties, sizeof(*each));

    for (int32_t i = 0; each && i < o->n_properties; i++) {
        each[i] = rx_bytes(s->b, o->property[i].name->text, (size_t)o->property[i].name->n);
    }
    return each ? rx_any_of(s, each, o->n_properties) : 0;
}

/* Members of the cells' names, those of properties left out, and only of `within`. */
static sym_id cell_members(struct schema *s, const struct object_set *o, rx_id within)
{
    rx_id taken = o->n_properties > 0 ? rx_not(s->b, all_names(s, o)) : s->any;
    sym_id ret = 0;

    for (int32_t i = 0; i < o->n_cells; i++) {
        sym_id value = o->cell[i].child == CONJ_FALSE ? 0 : emit_conj(s, o->cell[i].child);
        if (!value) {
            continue;
        }
        rx_id names = o->cell[i].names == s->any ? taken
                      : taken == s->any          ? o->cell[i].names
                                                 : rx_and(s->b, o->cell[i].names, taken);
        names = within == s->any ? names : rx_and(s->b, names, within);
        if (names != s->any && rx_is_never(s->b, names)) {
            continue;
        }
        sym_id name = sym_terminal(s->b, emit_names(s, names));
        ret = emit_either(s, ret, emit_seq(s, name, value));
    }
    return ret;
}

/* The alternatives in which a member has a name of the last set of `exist`: each
 * property of such a name in turn, then the other names. */
static sym_id emit_existing(struct schema *s, const struct object_set *o)
{
    struct object_set *one = schema_alloc(s, 1, sizeof(*one));
    rx_id names = o->exist[o->n_exist - 1];
    sym_id ret = 0;

    for (int32_t i = 0; one && i < o->n_properties; i++) {
        const struct property *p = &o->property[i];
        if (p->child == CONJ_FALSE || !rx_matches(s->b, names, p->name->text, (size_t)p->name->n)) {
            continue;
        }
        struct property *copy = schema_alloc(s, (size_t)o->n_properties, sizeof(*copy));
        struct object_set *with = schema_alloc(s, 1, sizeof(*with));
        if (!copy || !with) {
            return 0;
        }
        memcpy(copy, o->property, (size_t)o->n_properties * sizeof(*copy));
        copy[i].required = true;
        *with = *o;
        with->property = copy;
        with->n_exist--;
        ret = emit_either(s, ret, emit_object(s, with));
    }
    return ret;
}

sym_id emit_object(struct schema *s, const struct object_set *o)
{
    struct plan p = {.s = s, .o = o, .min = o->min, .max = o->max};
    sym_id ret = 0;

    if (!grammar_build_work(s->b, 1 + o->n_properties)) {
        return 0;
    }
    if (o->n_exist > 0) {
        ret = emit_existing(s, o);
        p.needed = cell_members(s, o, o->exist[o->n_exist - 1]);
        if (!p.needed) {
            return ret;
        }
        if (o->n_exist > 1 || o->min > 0 || o->max >= 0) {
            return schema_refuse(s, "additionalProperties", "under 'not', 'oneOf' or 'if'"), 0;
        }
    }
    p.member = schema_alloc(s, (size_t)o->n_properties, sizeof(*p.member));
    for (int32_t i = 0; p.member && i < o->n_properties; i++) {
        const struct property *x = &o->property[i];
        sym_id value = x->child == CONJ_FALSE ? 0 : emit_conj(s, x->child);
        if (value) {
            p.member[i] = emit_seq(s, sym_terminal(s->b, emit_name(s, x->name)), value);
        } else if (x->required) {
            return ret;
        }
    }
    p.other = cell_members(s, o, s->any);
    sym_id all = p.member ? members(&p) : 0;
    return emit_either(s, ret, emit_seq(s, s->open_object, all));
}
