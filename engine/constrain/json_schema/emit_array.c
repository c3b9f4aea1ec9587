/* Symbols of arrays: the elements in front, then the others. */
#include <string.h>

#include "engine/constrain/json_schema/schema.h"

enum { SPLITS = 32, UNIQUE_VALUES = 24 };

/* n elements at least, m at most (-1: any number), a comma in front of each. */
static sym_id more(struct schema *s, sym_id item, int64_t n, int64_t m)
{
    if (m == 0 || !item) {
        return n == 0 ? sym_terminal(s->b, rx_empty(s->b)) : 0;
    }
    return sym_repeat(s->b, emit_seq(s, s->comma, item), (int32_t)n, (int32_t)m);
}

/* The elements from index `at` on, of which `n` to `m` come, and the end. `what` are
 * those of which one must come; 0: none. */
static sym_id rest_of(struct schema *s, int32_t at, sym_id item, sym_id what, int64_t n, int64_t m);

/* One element of `what` behind i others. */
static sym_id split(struct schema *s, int32_t at, sym_id item, sym_id what, int64_t i, int64_t n,
                    int64_t m, bool or_more)
{
    int64_t behind = MAX(n - i - 1, 0), most = m < 0 ? -1 : m - i - 1;
    sym_id tail = emit_seq(s, more(s, item, behind, most), s->close_array);

    if (i == 0 && !or_more) {
        sym_id first = at > 0 ? emit_seq(s, s->comma, what) : what;
        return emit_seq(s, first, tail);
    }
    sym_id last = emit_seq(s, emit_seq(s, s->comma, what), tail);
    if (at > 0) {
        return emit_seq(s, more(s, item, i, or_more ? -1 : i), last);
    }
    if (!item) {
        return 0;
    }
    return emit_seq(s, item, emit_seq(s, more(s, item, i - 1, or_more ? -1 : i - 1), last));
}

static sym_id rest_of(struct schema *s, int32_t at, sym_id item, sym_id what, int64_t n, int64_t m)
{
    sym_id ret = 0;

    if (what) {
        int64_t splits = m >= 0 ? m : MAX(n, 1);
        if (splits > SPLITS) {
            return schema_refuse(s, "contains", "in so long an array"), 0;
        }
        for (int64_t i = 0; i < splits; i++) {
            bool or_more = m < 0 && i == splits - 1;
            ret = emit_either(s, ret, split(s, at, item, what, i, n, m, false));
            if (or_more) {
                ret = emit_either(s, ret, split(s, at, item, what, i + 1, n, m, true));
            }
        }
        return ret;
    }
    if (at > 0) {
        return emit_seq(s, more(s, item, n, m), s->close_array);
    }
    if (item && m != 0) {
        sym_id all = more(s, item, MAX(n - 1, 0), m < 0 ? -1 : m - 1);
        ret = emit_seq(s, item, emit_seq(s, all, s->close_array));
    }
    return n == 0 ? emit_either(s, ret, s->end_array) : ret;
}

static sym_id list_symbol(struct schema *s, const struct array_set *a, conj_id what)
{
    int64_t min = a->min, max = a->max;
    sym_id item = a->items == CONJ_FALSE ? 0 : emit_conj(s, a->items);
    sym_id special = what == CONJ_TRUE ? 0 : emit_conj(s, conj_and(s, a->items, what));
    int32_t n = a->n_prefix;

    if (what != CONJ_TRUE && !special) {
        return 0;
    }
    sym_id *front = schema_alloc(s, (size_t)n, sizeof(*front));
    for (int32_t i = 0; front && i < n; i++) {
        front[i] = max >= 0 && i >= max ? 0 : emit_conj(s, a->prefix[i]);
        if (!front[i]) {
            n = i;
            max = i;
        }
    }
    if (!item && !special) {
        max = max < 0 ? n : MIN(max, n);
    }
    if (!front || (max >= 0 && min > max)) {
        return 0;
    }
    int64_t most = max < 0 ? -1 : MAX(max - n, 0);
    sym_id ret =
        special && max >= 0 && n >= max ? 0 : rest_of(s, n, item, special, MAX(min - n, 0), most);
    for (int32_t i = n - 1; i >= 0; i--) {
        sym_id one = i > 0 ? emit_seq(s, s->comma, front[i]) : front[i];
        ret = emit_seq(s, one, ret);
        if (i >= min && !special) {
            ret = emit_either(s, ret, i > 0 ? s->close_array : s->end_array);
        }
    }
    return emit_seq(s, s->open_array, ret);
}

/* ---- contains ---- */

/* The alternatives in which an element of the prefix is the one that must come. */
static sym_id in_prefix(struct schema *s, const struct array_set *a, const struct contains *c)
{
    sym_id ret = 0;

    for (int32_t i = c->from; i < a->n_prefix; i++) {
        struct array_set *one = schema_alloc(s, 1, sizeof(*one));
        conj_id *prefix = schema_alloc(s, (size_t)a->n_prefix, sizeof(*prefix));
        if (!one || !prefix) {
            return 0;
        }
        memcpy(prefix, a->prefix, (size_t)a->n_prefix * sizeof(*prefix));
        prefix[i] = conj_and(s, prefix[i], c->what);
        *one = *a;
        one->prefix = prefix;
        one->min = MAX(a->min, i + 1);
        one->n_contains = 0;
        ret = emit_either(s, ret, emit_array(s, one));
    }
    return ret;
}

/* An array with n elements in front of which one must come in the rest. */
static const struct array_set *fill_prefix(struct schema *s, const struct array_set *a, int32_t n)
{
    struct array_set *ret = schema_alloc(s, 1, sizeof(*ret));
    conj_id *prefix = schema_alloc(s, (size_t)n, sizeof(*prefix));

    if (!ret || !prefix) {
        return NULL;
    }
    for (int32_t i = 0; i < n; i++) {
        prefix[i] = i < a->n_prefix ? a->prefix[i] : a->items;
    }
    *ret = *a;
    ret->prefix = prefix;
    ret->n_prefix = n;
    return ret;
}

/* From c->min to c->max elements of a kind among any number of others. */
static sym_id counted(struct schema *s, const struct array_set *a, const struct contains *c)
{
    bool exact = c->max >= 0;

    if (a->n_prefix > 0 || a->min > c->min || a->max >= 0 || (exact && s->conj[c->what].n != 1)) {
        return schema_refuse(s, exact ? "maxContains" : "minContains", "in such an array"), 0;
    }
    conj_id not_it = exact ? conj_and(s, a->items, conj_not(s, c->what, 0)) : a->items;
    sym_id it = emit_conj(s, conj_and(s, a->items, c->what)), other = emit_conj(s, not_it);
    sym_id others = more(s, other, 0, -1);
    sym_id each = it ? emit_seq(s, emit_seq(s, s->comma, it), others) : 0;
    int32_t min = (int32_t)c->min, max = (int32_t)c->max;
    sym_id ret = 0;
    if (it && max != 0) {
        sym_id rest = sym_repeat(s->b, each, MAX(min - 1, 0), exact ? max - 1 : -1);
        ret = emit_seq(s, emit_seq(s, it, others), emit_seq(s, rest, s->close_array));
    }
    if (other) {
        sym_id rest = each && max != 0 ? sym_repeat(s->b, each, min, exact ? max : -1)
                      : min == 0       ? sym_terminal(s->b, rx_empty(s->b))
                                       : 0;
        rest = emit_seq(s, emit_seq(s, other, others), emit_seq(s, rest, s->close_array));
        ret = emit_either(s, ret, rest);
    }
    ret = min == 0 && a->min == 0 ? emit_either(s, ret, s->end_array) : ret;
    return emit_seq(s, s->open_array, ret);
}

static sym_id emit_containing(struct schema *s, const struct array_set *a)
{
    const struct contains *c = &a->contains[0];

    if (a->n_contains > 1) {
        return schema_refuse(s, "contains", "more than once for an array"), 0;
    }
    if (c->min != 1 || c->max >= 0) {
        return counted(s, a, c);
    }
    if (MAX(a->n_prefix, c->from) > SPLITS) {
        return schema_refuse(s, "contains", "beside so many 'prefixItems'"), 0;
    }
    if (a->n_prefix < c->from) {
        const struct array_set *longer = fill_prefix(s, a, c->from);
        return longer ? emit_containing(s, longer) : 0;
    }
    struct array_set rest = *a;
    rest.min = MAX(a->min, a->n_prefix + 1);
    return emit_either(s, in_prefix(s, a, c), list_symbol(s, &rest, c->what));
}

/* ---- uniqueItems ---- */

/* The values of scalars of a few kinds, as texts; -1: there are too many. */
static int32_t values_of(struct schema *s, const struct shape *items, rx_id *each)
{
    int32_t n = 0;

    if (items->n_arrays > 0 || items->n_objects > 0 || items->number.plain != s->never ||
        items->string.n + 3 > UNIQUE_VALUES ||
        (items->string.n == 0 && items->string.rx != s->never)) {
        return -1;
    }
    for (int32_t i = 0; i < items->string.n + 3; i++) {
        struct shape one = *s->none;
        one.null = i == 0 && items->null;
        one.no = i == 1 && items->no;
        one.yes = i == 2 && items->yes;
        if (i > 2) {
            one.string =
                (struct string_set){.rx = s->any, .lit = &items->string.lit[i - 3], .n = 1};
        }
        rx_id x = emit_scalar(s, &one);
        bool known = x == s->never;
        for (int32_t k = 0; k < n; k++) {
            known = known || each[k] == x;
        }
        each[n] = x;
        n += !known;
    }
    return n;
}

/* Arrays in which none of a few values comes twice, as one expression: for each value,
 * the texts in which at most one element is it. Behind an element stands a comma or the
 * end. */
static sym_id unique_list(struct schema *s, const struct array_set *a, const struct shape *items)
{
    rx_id each[UNIQUE_VALUES], others[UNIQUE_VALUES];
    int32_t n = values_of(s, items, each);

    if (n < 0 || a->n_prefix > 0) {
        return schema_refuse(s, "uniqueItems", "for such elements"), 0;
    }
    int64_t most = a->max < 0 ? n : MIN(a->max, n);
    if (a->min > most) {
        return 0;
    }
    rx_id comma = emit_comma(s);
    rx_id end = rx_concat(s->b, s->blank, rx_bytes(s->b, "]", 1)), behind = rx_or(s->b, comma, end);
    rx_id any = rx_any_of(s, each, n), list = rx_never(s->b);
    if (most > 0) {
        list = rx_repeat(s->b, rx_concat(s->b, any, comma), (int32_t)MAX(a->min - 1, 0),
                         (int32_t)most - 1);
        list = rx_concat(s->b, list, rx_concat(s->b, any, end));
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t k = 0;
        for (int32_t j = 0; j < n; j++) {
            others[k] = each[j];
            k += j != i;
        }
        rx_id rest = rx_concat(s->b, rx_any_of(s, others, k), behind);
        rest = rx_repeat(s->b, rest, 0, -1);
        rx_id once = rx_concat(s->b, rx_concat(s->b, each[i], behind), rest);
        once = rx_concat(s->b, rest, rx_or(s->b, rx_empty(s->b), once));
        list = rx_and(s->b, list, once);
    }
    list = a->min == 0 ? rx_or(s->b, list, rx_bytes(s->b, "]", 1)) : list;
    return emit_seq(s, s->open_array, sym_terminal(s->b, list));
}

sym_id emit_array(struct schema *s, const struct array_set *a)
{
    if (!grammar_build_work(s->b, 1 + a->n_prefix)) {
        return 0;
    }
    bool few = a->max == 0 || a->max == 1 || (a->items == CONJ_FALSE && a->n_prefix <= 1);
    if (a->unique && !few) {
        if (a->n_contains > 0) {
            return schema_refuse(s, "uniqueItems", "beside 'contains'"), 0;
        }
        const struct shape *items = conj_shape(s, a->items);
        return items ? unique_list(s, a, items) : 0;
    }
    return a->n_contains > 0 ? emit_containing(s, a) : list_symbol(s, a, CONJ_TRUE);
}
