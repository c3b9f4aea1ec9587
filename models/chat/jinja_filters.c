/* Filters. Those that are also methods are in jinja_strings.c. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/chat/jinja_strings.h"

/* ---- members by path ---- */

/* The member of an item that a filter's `attribute` names: "a.b", or an index. */
static struct jvalue by_path(struct jrun *r, struct jvalue v, struct jvalue path)
{
    if (path.type == J_INT) {
        return jmember(r, v, path);
    }
    if (!jneed_string(r, path, "an attribute")) {
        return path;
    }
    for (const char *at = path.s, *end = path.s + path.len; at <= end && !r->failed;) {
        const char *dot = memchr(at, '.', (size_t)(end - at));
        const char *stop = dot ? dot : end;
        v = jmember(r, v, jcopy(r, at, (size_t)(stop - at)));
        at = stop + 1;
    }
    return v;
}

/* The arguments from number `from` on. */
static struct jargs rest(const struct jargs *a, int32_t from)
{
    struct jargs b;

    b.n = 0;
    for (int32_t i = from; i < a->n; i++, b.n++) {
        b.at[b.n] = a->at[i];
        b.name[b.n] = a->name[i];
    }
    return b;
}

/* ---- select and reject ---- */

/* Whether `v` passes the test that argument `from` names, with the arguments after it;
 * without a name, whether it is true. */
static bool passes(struct jrun *r, struct jvalue v, const struct jargs *a, int32_t from)
{
    struct jvalue name = jarg(a, from, NULL);

    if (name.type == J_UNDEFINED) {
        return jtruth(v);
    }
    const struct jbuiltin *t = name.type == J_STRING ? jinja_test_find(name.s) : NULL;
    if (!t) {
        jfail(r, "the test '%.40s' is not supported",
              name.type == J_STRING ? name.s : "(not a string)");
        return false;
    }
    struct jargs more = rest(a, from + 1);
    return jtruth(t->call(r, v, &more));
}

static struct jvalue choose(struct jrun *r, struct jvalue in, const struct jargs *a, bool attribute,
                            bool keep)
{
    /* As jinja2 does, which goes over nothing where the value is false. */
    struct jlist *items = jtruth(in) ? jitems(r, in) : NULL;
    struct jvalue l = jlist_new(r, J_LIST);

    for (int32_t i = 0; items && i < items->n && jspend(r, 1); i++) {
        struct jvalue v = attribute ? by_path(r, items->at[i], jarg(a, 0, NULL)) : items->at[i];
        if (!r->failed && passes(r, v, a, attribute) == keep) {
            jlist_push(r, l.list, items->at[i]);
        }
    }
    return l;
}

static struct jvalue do_selectattr(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return choose(r, in, a, true, true);
}

static struct jvalue do_rejectattr(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return choose(r, in, a, true, false);
}

static struct jvalue do_select(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return choose(r, in, a, false, true);
}

static struct jvalue do_reject(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return choose(r, in, a, false, false);
}

static struct jvalue do_map(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *items = jtruth(in) ? jitems(r, in) : NULL;
    struct jvalue l = jlist_new(r, J_LIST), attribute = jarg(a, JINJA_MAX_ARGS, "attribute"),
                  name = jarg(a, 0, NULL);
    const struct jbuiltin *f = name.type == J_STRING ? jinja_filter_find(name.s) : NULL;

    if (attribute.type == J_UNDEFINED && !f) {
        return jfail(r, "map needs attribute= or the name of a filter of this version");
    }
    struct jargs more = rest(a, 1);
    for (int32_t i = 0; items && i < items->n && jspend(r, 1); i++) {
        struct jvalue v = f ? f->call(r, items->at[i], &more) : by_path(r, items->at[i], attribute);
        jlist_push(r, l.list, v.type == J_UNDEFINED ? jarg(a, JINJA_MAX_ARGS, "default") : v);
    }
    return l;
}

/* ---- lists ---- */

static struct jvalue do_length(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    switch (in.type) {
    case J_STRING:
        return jspend(r, (int64_t)(in.len / 16)) ? jint(jchars(in.s, in.len)) : in;
    case J_LIST:
    case J_TUPLE:
        return jint(in.list->n);
    case J_DICT:
        return jint(in.dict->n);
    case J_UNDEFINED:
        return jint(0);
    default:
        return jfail(r, "%s has no length", jtype_name(in));
    }
}

static struct jvalue do_first(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *l = jitems(r, in);

    (void)a;
    return l && l->n ? l->at[0] : (struct jvalue){0};
}

static struct jvalue do_last(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *l = jitems(r, in);

    (void)a;
    return l && l->n ? l->at[l->n - 1] : (struct jvalue){0};
}

static struct jvalue do_join(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *l = jitems(r, in);
    struct jvalue between = jarg(a, 0, "d"), attribute = jarg(a, 1, "attribute");
    struct buf b;

    jbuf_init(&b);
    for (int32_t i = 0; l && i < l->n && !r->failed; i++) {
        if (i) {
            jput_str(r, &b, between);
        }
        jput_str(r, &b, attribute.type == J_UNDEFINED ? l->at[i] : by_path(r, l->at[i], attribute));
    }
    return jtake(r, &b);
}

static struct jvalue do_list(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *from = jitems(r, in);
    struct jvalue l = jlist_new(r, J_LIST);

    (void)a;
    for (int32_t i = 0; from && i < from->n && !r->failed; i++) {
        jlist_push(r, l.list, from->at[i]);
    }
    return l;
}

static struct jvalue do_reverse(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *from = jitems(r, in);
    struct jvalue l = jlist_new(r, J_LIST);
    struct buf b;

    (void)a;
    jbuf_init(&b);
    for (int32_t i = from ? from->n : 0; i-- > 0 && !r->failed;) {
        jlist_push(r, l.list, from->at[i]);
        if (in.type == J_STRING) {
            jput_str(r, &b, from->at[i]);
        }
    }
    struct jvalue text = jtake(r, &b);
    return in.type == J_STRING ? text : l;
}

static struct jvalue do_unique(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *from = jitems(r, in);
    struct jvalue l = jlist_new(r, J_LIST);

    (void)a;
    for (int32_t i = 0; from && i < from->n && !r->failed; i++) {
        if (!jcontains(r, l, from->at[i])) {
            jlist_push(r, l.list, from->at[i]);
        }
    }
    return l;
}

/* Strings are sorted without regard to case unless case_sensitive is given. */
static struct jvalue sort_key(struct jrun *r, struct jvalue v, const struct jargs *a)
{
    struct jvalue attribute = jarg(a, 2, "attribute");
    struct jargs none = {0};

    if (attribute.type != J_UNDEFINED && attribute.type != J_NONE) {
        v = by_path(r, v, attribute);
    }
    return v.type == J_STRING && !jtruth(jarg(a, 1, "case_sensitive")) ? jdo_lower(r, v, &none) : v;
}

/* Merge sort of at[n] by key[n]: stable, and every comparison counts as a step. */
static void merge_sort(struct jrun *r, struct jvalue *at, struct jvalue *key, struct jvalue *spare,
                       int32_t n, bool down)
{
    if (n < 2 || r->failed) {
        return;
    }
    int32_t half = n / 2, i = 0, j = half, k = 0;
    merge_sort(r, at, key, spare, half, down);
    merge_sort(r, at + half, key + half, spare, n - half, down);
    while (k < n && jspend(r, 1)) {
        int order = i < half && j < n ? jcompare(r, key[j], key[i]) * (down ? -1 : 1)
                    : i < half        ? 1
                                      : -1;
        int32_t from = order < 0 ? j++ : i++;
        spare[2 * k] = at[from];
        spare[2 * k + 1] = key[from];
        k++;
    }
    for (i = 0; i < n && !r->failed; i++) {
        at[i] = spare[2 * i];
        key[i] = spare[2 * i + 1];
    }
}

static struct jvalue do_sort(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue l = do_list(r, in, a), keys = jlist_new(r, J_LIST);

    if (r->failed) {
        return l;
    }
    for (int32_t i = 0; i < l.list->n && !r->failed; i++) {
        jlist_push(r, keys.list, sort_key(r, l.list->at[i], a));
    }
    struct jvalue *spare = jalloc(r, (size_t)l.list->n * 2 * sizeof(*spare));
    if (spare) {
        merge_sort(r, l.list->at, keys.list->at, spare, l.list->n, jtruth(jarg(a, 0, "reverse")));
    }
    return l;
}

static struct jvalue do_dictsort(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jargs by = {.at = {{0}, {0}, {.type = J_INT, .i = 0}}, .n = 3};

    (void)a;
    return do_sort(r, jdo_items(r, in, a), &by);
}

static struct jvalue extreme(struct jrun *r, struct jvalue in, int sign)
{
    struct jlist *l = jitems(r, in);
    struct jvalue best = l && l->n ? l->at[0] : (struct jvalue){0};

    for (int32_t i = 1; l && i < l->n && !r->failed; i++) {
        best = jcompare(r, l->at[i], best) * sign > 0 ? l->at[i] : best;
    }
    return best;
}

static struct jvalue do_max(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return extreme(r, in, 1);
}

static struct jvalue do_min(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return extreme(r, in, -1);
}

/* ---- single values ---- */

static struct jvalue do_default(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    bool missing = in.type == J_UNDEFINED || (jtruth(jarg(a, 1, "boolean")) && !jtruth(in));
    struct jvalue other = jarg(a, 0, "default_value");

    (void)r;
    return !missing ? in : other.type == J_UNDEFINED && a->n == 0 ? jstring("", 0) : other;
}

static struct jvalue do_trim(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return jdo_strip(r, jto_string(r, in), a);
}

static struct jvalue do_string(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return jto_string(r, in);
}

static struct jvalue do_safe(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    in = jto_string(r, in);
    in.markup = true;
    return in;
}

static struct jvalue do_tojson(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue indent = jarg(a, 1, "indent");
    struct buf b;

    indent = indent.type == J_UNDEFINED ? jarg(a, JINJA_MAX_ARGS, "indent") : indent;
    jbuf_init(&b);
    jput_json(r, &b, in, indent.type == J_INT ? (int)MAX(0, MIN(indent.i, 16)) : -1, 0);
    struct jvalue text = jtake(r, &b);
    return jtruth(jarg(a, 0, "ensure_ascii")) && !r->failed ? jto_ascii(r, text) : text;
}

static struct jvalue do_int(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue other = jarg(a, 0, "default");

    (void)r;
    if (in.type == J_INT || in.type == J_BOOL) {
        return jint(in.type == J_INT ? in.i : in.b);
    }
    double d = in.type == J_FLOAT ? in.f : NAN;
    if (in.type == J_STRING && in.len && in.len < 40) {
        char text[40], *end;
        memcpy(text, in.s, in.len);
        text[in.len] = '\0';
        long long i = strtoll(text, &end, 10);
        if (*end == '\0') {
            return jint(i);
        }
        d = strtod(text, &end);
        d = *end == '\0' ? d : NAN;
    }
    return fabs(d) < 9e18 ? jint((int64_t)d) : other.type == J_UNDEFINED ? jint(0) : other;
}

static struct jvalue do_float(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue v = {.type = J_FLOAT, .f = 0};

    (void)r, (void)a;
    if (in.type == J_STRING && in.len && in.len < 40) {
        char text[40], *end;
        memcpy(text, in.s, in.len);
        text[in.len] = '\0';
        v.f = strtod(text, &end);
        v.f = *end == '\0' ? v.f : 0;
    } else if (in.type == J_FLOAT || in.type == J_INT || in.type == J_BOOL) {
        v.f = in.type == J_FLOAT ? in.f : in.type == J_INT ? (double)in.i : in.b;
    }
    return v;
}

static struct jvalue do_abs(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    if (in.type == J_FLOAT) {
        return (struct jvalue){.type = J_FLOAT, .f = fabs(in.f)};
    }
    return in.type == J_INT && in.i != INT64_MIN ? jint(in.i < 0 ? -in.i : in.i)
                                                 : jfail(r, "abs of %s", jtype_name(in));
}

/* Lines after the first are indented, empty ones are not. */
static struct jvalue do_indent(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue width = jarg(a, 0, "width");
    bool first = jtruth(jarg(a, 1, "first")), blank = jtruth(jarg(a, 2, "blank")), begin = true;
    int n = width.type == J_INT ? (int)MAX(0, MIN(width.i, 64)) : 4;
    struct buf b;

    in = jto_string(r, in);
    jbuf_init(&b);
    jspend(r, (int64_t)in.len);
    for (size_t i = 0; i < in.len && !r->failed; i++) {
        if (begin && (blank || in.s[i] != '\n') && (i || first)) {
            buf_printf(&b, "%*s", n, "");
        }
        begin = in.s[i] == '\n';
        buf_putc(&b, in.s[i]);
    }
    return jtake(r, &b);
}

static struct jvalue do_escape(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return jescape(r, jto_string(r, in));
}

static const struct jbuiltin filters[] = {
    {"trim", do_trim, 0},
    {"length", do_length, 0},
    {"count", do_length, 0},
    {"upper", jdo_upper, 0},
    {"lower", jdo_lower, 0},
    {"title", jdo_title_words, 0},
    {"capitalize", jdo_capitalize, 0},
    {"tojson", do_tojson, 0},
    {"first", do_first, 0},
    {"last", do_last, 0},
    {"join", do_join, 0},
    {"default", do_default, 0},
    {"d", do_default, 0},
    {"selectattr", do_selectattr, 0},
    {"rejectattr", do_rejectattr, 0},
    {"select", do_select, 0},
    {"reject", do_reject, 0},
    {"map", do_map, 0},
    {"list", do_list, 0},
    {"replace", jdo_replace, 0},
    {"items", jdo_items, 0},
    {"string", do_string, 0},
    {"safe", do_safe, 0},
    {"int", do_int, 0},
    {"float", do_float, 0},
    {"abs", do_abs, 0},
    {"sort", do_sort, 0},
    {"dictsort", do_dictsort, 0},
    {"unique", do_unique, 0},
    {"reverse", do_reverse, 0},
    {"max", do_max, 0},
    {"min", do_min, 0},
    {"indent", do_indent, 0},
    {"format", jdo_percent_format, 0},
    {"from_json", jdo_from_json, 0},
    {"fromjson", jdo_from_json, 0},
    {"escape", do_escape, 0},
    {"e", do_escape, 0},
};

const struct jbuiltin *jinja_filter_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(filters); i++) {
        if (strcmp(filters[i].name, name) == 0) {
            return &filters[i];
        }
    }
    return NULL;
}
