/* The values of a run, which live in its arena: making, comparing and indexing them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "models/chat/jinja.h"

/* ---- arena ---- */

struct arena_chunk {
    struct arena_chunk *next;
    size_t at, size; /* bytes of data in use, and in all */
    max_align_t data[];
};

void *arena_alloc(struct arena *a, size_t bytes)
{
    bytes = (MAX(bytes, 1) + 15) & ~(size_t)15;
    if (bytes > a->max || a->used > a->max - bytes) {
        return NULL;
    }
    struct arena_chunk *c = a->chunk;
    if (!c || c->size - c->at < bytes) {
        size_t size = MAX(bytes, (size_t)64 * 1024);
        c = calloc(1, sizeof(*c) + size);
        if (!c) {
            return NULL;
        }
        c->size = size;
        c->next = a->chunk;
        a->chunk = c;
    }
    void *p = (char *)c->data + c->at;
    c->at += bytes;
    a->used += bytes;
    return p;
}

void arena_release(struct arena *a)
{
    for (struct arena_chunk *c = a->chunk, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    a->chunk = NULL;
    a->used = 0;
}

/* ---- errors and limits of a run ---- */

struct jvalue jfail(struct jrun *r, const char *fmt, ...)
{
    if (!r->failed) {
        char text[400];
        va_list args;
        va_start(args, fmt);
        vsnprintf(text, sizeof(text), fmt, args);
        va_end(args);
        r->failed = true;
        err_set(r->err, ERR_INVALID, "chat template: line %d: %s", r->line, text);
    }
    return (struct jvalue){0};
}

void jfail_memory(struct jrun *r)
{
    if (!r->failed) {
        r->failed = true;
        err_nomem(r->err, "a conversation");
    }
}

void jfail_buf(struct jrun *r, const struct buf *b)
{
    if (b->no_memory) {
        jfail_memory(r);
    } else {
        jfail(r, "a string of more than %zu bytes", b->max);
    }
}

bool jspend(struct jrun *r, int64_t n)
{
    r->steps += n;
    if (r->steps > LIMIT_TEMPLATE_STEPS) {
        jfail(r, "the conversation takes more than %d steps to render", LIMIT_TEMPLATE_STEPS);
    }
    return !r->failed;
}

void *jalloc(struct jrun *r, size_t bytes)
{
    void *p = r->failed ? NULL : arena_alloc(&r->arena, bytes);

    if (!p && bytes < r->arena.max && r->arena.used < r->arena.max - bytes) {
        jfail_memory(r);
    } else if (!p) {
        jfail(r, "the conversation takes more than %zu bytes of memory to render", r->arena.max);
    }
    return p;
}

/* ---- making ---- */

struct jvalue jstring(const char *s, size_t len)
{
    return (struct jvalue){.type = J_STRING, .s = s, .len = len};
}

struct jvalue jtext(const char *s)
{
    return jstring(s, strlen(s));
}

struct jvalue jcopy(struct jrun *r, const char *s, size_t len)
{
    char *copy = jalloc(r, len + 1);

    if (!copy) {
        return (struct jvalue){0};
    }
    if (len) {
        memcpy(copy, s, len);
    }
    return jspend(r, (int64_t)(len / 16)) ? jstring(copy, len) : (struct jvalue){0};
}

struct jvalue jint(int64_t i)
{
    return (struct jvalue){.type = J_INT, .i = i};
}

struct jvalue jbool(bool b)
{
    return (struct jvalue){.type = J_BOOL, .b = b};
}

struct jvalue jnone(void)
{
    return (struct jvalue){.type = J_NONE};
}

struct jvalue jlist_new(struct jrun *r, enum jtype type)
{
    struct jlist *l = jalloc(r, sizeof(*l));

    return l ? (struct jvalue){.type = type, .list = l} : (struct jvalue){0};
}

void jlist_push(struct jrun *r, struct jlist *l, struct jvalue v)
{
    if (r->failed || !jspend(r, 1)) {
        return;
    }
    if (l->n == l->cap) {
        int32_t cap = l->cap ? l->cap * 2 : 8;
        struct jvalue *at = jalloc(r, (size_t)cap * sizeof(*at));
        if (!at) {
            return;
        }
        if (l->n) {
            memcpy(at, l->at, (size_t)l->n * sizeof(*at));
        }
        l->at = at;
        l->cap = cap;
    }
    l->at[l->n++] = v;
}

struct jvalue jdict_new(struct jrun *r, enum jtype type)
{
    struct jdict *d = jalloc(r, sizeof(*d));

    return d ? (struct jvalue){.type = type, .dict = d} : (struct jvalue){0};
}

const struct jvalue *jdict_find(struct jrun *r, const struct jdict *d, struct jvalue key)
{
    if (!jspend(r, d->n / 4)) {
        return NULL;
    }
    for (int32_t i = 0; i < d->n; i++) {
        if (jequal(r, d->key[i], key)) {
            return &d->value[i];
        }
    }
    return NULL;
}

void jdict_set(struct jrun *r, struct jdict *d, struct jvalue key, struct jvalue v)
{
    struct jvalue *at = (struct jvalue *)jdict_find(r, d, key);

    if (at) {
        *at = v;
        return;
    }
    if (d->n == d->cap) {
        int32_t cap = d->cap ? d->cap * 2 : 8;
        struct jvalue *keys = jalloc(r, (size_t)cap * sizeof(*keys)),
                      *values = jalloc(r, (size_t)cap * sizeof(*keys));
        if (!keys || !values) {
            return;
        }
        if (d->n) {
            memcpy(keys, d->key, (size_t)d->n * sizeof(*keys));
            memcpy(values, d->value, (size_t)d->n * sizeof(*keys));
        }
        d->key = keys;
        d->value = values;
        d->cap = cap;
    }
    d->key[d->n] = key;
    d->value[d->n++] = v;
}

/* ---- truth and order ---- */

bool jtruth(struct jvalue v)
{
    switch (v.type) {
    case J_UNDEFINED:
    case J_NONE:
        return false;
    case J_BOOL:
        return v.b;
    case J_INT:
        return v.i != 0;
    case J_FLOAT:
        return v.f != 0;
    case J_STRING:
        return v.len > 0;
    case J_LIST:
    case J_TUPLE:
        return v.list->n > 0;
    case J_DICT:
        return v.dict->n > 0;
    default:
        return true;
    }
}

static bool is_number(struct jvalue v)
{
    return v.type == J_BOOL || v.type == J_INT || v.type == J_FLOAT;
}

static double as_double(struct jvalue v)
{
    return v.type == J_FLOAT ? v.f : v.type == J_BOOL ? v.b : (double)v.i;
}

static bool equal_lists(struct jrun *r, const struct jlist *a, const struct jlist *b)
{
    if (a->n != b->n) {
        return false;
    }
    for (int32_t i = 0; i < a->n; i++) {
        if (!jequal(r, a->at[i], b->at[i])) {
            return false;
        }
    }
    return true;
}

static bool equal_dicts(struct jrun *r, const struct jdict *a, const struct jdict *b)
{
    if (a->n != b->n) {
        return false;
    }
    for (int32_t i = 0; i < a->n; i++) {
        const struct jvalue *other = jdict_find(r, b, a->key[i]);
        if (!other || !jequal(r, a->value[i], *other)) {
            return false;
        }
    }
    return true;
}

static bool equal_same(struct jrun *r, struct jvalue a, struct jvalue b)
{
    switch (a.type) {
    case J_STRING:
        return a.len == b.len && jspend(r, (int64_t)(a.len / 16)) && memcmp(a.s, b.s, a.len) == 0;
    case J_LIST:
    case J_TUPLE:
        return equal_lists(r, a.list, b.list);
    case J_DICT:
        return equal_dicts(r, a.dict, b.dict);
    case J_UNDEFINED:
    case J_NONE:
        return true;
    default:
        return a.dict == b.dict;
    }
}

bool jequal(struct jrun *r, struct jvalue a, struct jvalue b)
{
    if (!jspend(r, 1)) {
        return false;
    }
    if (is_number(a) && is_number(b)) {
        return a.type == J_FLOAT || b.type == J_FLOAT
                   ? as_double(a) == as_double(b)
                   : (a.type == J_BOOL ? a.b : a.i) == (b.type == J_BOOL ? b.b : b.i);
    }
    if (a.type != b.type) {
        return false;
    }
    if (++r->depth > LIMIT_TEMPLATE_DEPTH) {
        jfail(r, "values nest too deeply");
    }
    bool same = !r->failed && equal_same(r, a, b);
    r->depth--;
    return same;
}

int jcompare(struct jrun *r, struct jvalue a, struct jvalue b)
{
    if (is_number(a) && is_number(b)) {
        if (a.type != J_FLOAT && b.type != J_FLOAT) {
            int64_t x = a.type == J_BOOL ? a.b : a.i, y = b.type == J_BOOL ? b.b : b.i;
            return (x > y) - (x < y);
        }
        double x = as_double(a), y = as_double(b);
        return (x > y) - (x < y);
    }
    if (a.type == J_STRING && b.type == J_STRING) {
        size_t n = MIN(a.len, b.len);
        jspend(r, (int64_t)(n / 16));
        int c = n ? memcmp(a.s, b.s, n) : 0;
        return c ? (c > 0) - (c < 0) : (a.len > b.len) - (a.len < b.len);
    }
    if (a.type == b.type && (a.type == J_LIST || a.type == J_TUPLE)) {
        for (int32_t i = 0; i < MIN(a.list->n, b.list->n) && !r->failed; i++) {
            if (!jequal(r, a.list->at[i], b.list->at[i])) {
                return jcompare(r, a.list->at[i], b.list->at[i]);
            }
        }
        return (a.list->n > b.list->n) - (a.list->n < b.list->n);
    }
    jfail(r, "%s and %s have no order", jtype_name(a), jtype_name(b));
    return 0;
}

bool jcontains(struct jrun *r, struct jvalue in, struct jvalue what)
{
    switch (in.type) {
    case J_STRING:
        if (what.type != J_STRING) {
            jfail(r, "'in' of a string needs a string, not %s", jtype_name(what));
            return false;
        }
        return jspend(r, (int64_t)(in.len / 16)) &&
               (what.len == 0 || memmem(in.s, in.len, what.s, what.len));
    case J_DICT:
        return jdict_find(r, in.dict, what) != NULL;
    case J_LIST:
    case J_TUPLE:
        for (int32_t i = 0; i < in.list->n; i++) {
            if (jequal(r, in.list->at[i], what)) {
                return true;
            }
        }
        return false;
    case J_UNDEFINED:
        return false;
    default:
        jfail(r, "'in' needs a list, a string or a dict, not %s", jtype_name(in));
        return false;
    }
}

const char *jtype_name(struct jvalue v)
{
    static const char *const NAMES[] = {"an undefined value",
                                        "none",
                                        "true or false",
                                        "a number",
                                        "a number",
                                        "a string",
                                        "a list",
                                        "a tuple",
                                        "a dict",
                                        "a namespace",
                                        "loop",
                                        "a macro",
                                        "a function"};

    return NAMES[v.type];
}

/* ---- indexing ---- */

static size_t char_len(const char *s, size_t left)
{
    size_t n = 1;

    while (n < left && ((unsigned char)s[n] & 0xc0) == 0x80) {
        n++;
    }
    return n;
}

int64_t jchars(const char *s, size_t len)
{
    int64_t n = 0;

    for (size_t i = 0; i < len; i++) {
        n += ((unsigned char)s[i] & 0xc0) != 0x80;
    }
    return n;
}

static struct jlist *list_of_keys(struct jrun *r, const struct jdict *d)
{
    struct jvalue l = jlist_new(r, J_LIST);

    for (int32_t i = 0; i < d->n && !r->failed; i++) {
        jlist_push(r, l.list, d->key[i]);
    }
    return r->failed ? NULL : l.list;
}

struct jlist *jitems(struct jrun *r, struct jvalue v)
{
    struct jvalue l;

    switch (v.type) {
    case J_LIST:
    case J_TUPLE:
        return v.list;
    case J_DICT:
        return list_of_keys(r, v.dict);
    case J_UNDEFINED:
        return jlist_new(r, J_LIST).list;
    case J_STRING:
        l = jlist_new(r, J_LIST);
        for (size_t at = 0, n; at < v.len && !r->failed; at += n) {
            n = char_len(v.s + at, v.len - at);
            jlist_push(r, l.list, jstring(v.s + at, n));
        }
        return r->failed ? NULL : l.list;
    default:
        jfail(r, "%s cannot be gone over", jtype_name(v));
        return NULL;
    }
}

static struct jvalue loop_member(const struct jloop *l, const char *name, size_t len)
{
    static const char *const NAMES[] = {"index",  "index0",   "revindex", "revindex0",
                                        "first",  "last",     "length",   "depth",
                                        "depth0", "previtem", "nextitem"};
    int32_t n = l->items->n, i = l->index;
    size_t k = 0;

    while (k < ARRAY_LEN(NAMES) && (strlen(NAMES[k]) != len || memcmp(NAMES[k], name, len) != 0)) {
        k++;
    }
    switch (k) {
    case 0:
        return jint(i + 1);
    case 1:
        return jint(i);
    case 2:
        return jint(n - i);
    case 3:
        return jint(n - i - 1);
    case 4:
        return jbool(i == 0);
    case 5:
        return jbool(i == n - 1);
    case 6:
        return jint(n);
    case 7:
        return jint(l->depth);
    case 8:
        return jint(l->depth - 1);
    case 9:
        return i > 0 ? l->items->at[i - 1] : (struct jvalue){0};
    case 10:
        return i + 1 < n ? l->items->at[i + 1] : (struct jvalue){0};
    default:
        return (struct jvalue){0};
    }
}

/* The byte range of character `i` of a string that is long enough. */
static struct jvalue char_at(struct jrun *r, struct jvalue v, int64_t i)
{
    size_t at = 0;

    jspend(r, i / 16);
    while (i-- > 0) {
        at += char_len(v.s + at, v.len - at);
    }
    return jstring(v.s + at, char_len(v.s + at, v.len - at));
}

struct jvalue jmember(struct jrun *r, struct jvalue object, struct jvalue key)
{
    if (object.type == J_UNDEFINED) {
        return jfail(r, "a member %s%.40s is asked of an undefined value",
                     key.type == J_STRING ? "" : "(an index)", key.type == J_STRING ? key.s : "");
    }
    if (object.type == J_DICT || object.type == J_NAMESPACE) {
        const struct jvalue *v = jdict_find(r, object.dict, key);
        return v ? *v : (struct jvalue){0};
    }
    if (object.type == J_LOOP && key.type == J_STRING) {
        return loop_member(object.loop, key.s, key.len);
    }
    bool text = object.type == J_STRING, list = object.type == J_LIST || object.type == J_TUPLE;
    if ((key.type != J_INT && key.type != J_BOOL) || (!text && !list)) {
        return (struct jvalue){0};
    }
    int64_t n = list ? object.list->n : jchars(object.s, object.len),
            i = key.type == J_INT ? key.i : key.b;
    jspend(r, text ? n / 16 : 0);
    i += i < 0 ? n : 0;
    if (i < 0 || i >= n) {
        return (struct jvalue){0};
    }
    return list ? object.list->at[i] : char_at(r, object, i);
}

/* A bound of a slice in Python's sense: counted from the end if negative, then clamped
 * to [lo, hi]. */
static int64_t slice_bound(struct jrun *r, struct jvalue v, int64_t n, int64_t lo, int64_t hi,
                           int64_t missing)
{
    if (v.type == J_UNDEFINED || v.type == J_NONE) {
        return missing;
    }
    if (v.type != J_INT) {
        jfail(r, "a slice needs whole numbers, not %s", jtype_name(v));
        return missing;
    }
    int64_t i = v.i < 0 ? (v.i < -n ? lo : v.i + n) : v.i;
    return MAX(lo, MIN(hi, i));
}

static struct jvalue slice_text(struct jrun *r, struct jvalue v, const struct jlist *chars,
                                int64_t from, int64_t to)
{
    if (from >= to) {
        return jstring("", 0);
    }
    (void)r;
    const char *begin = chars->at[from].s, *end = to < chars->n ? chars->at[to].s : v.s + v.len;
    return jstring(begin, (size_t)(end - begin));
}

struct jvalue jslice(struct jrun *r, struct jvalue v, struct jvalue from, struct jvalue to,
                     struct jvalue step)
{
    if (v.type != J_LIST && v.type != J_TUPLE && v.type != J_STRING) {
        return v.type == J_UNDEFINED ? jfail(r, "a slice of an undefined value")
                                     : jfail(r, "%s has no slices", jtype_name(v));
    }
    struct jlist *items = jitems(r, v);
    int64_t by = step.type == J_UNDEFINED || step.type == J_NONE ? 1
                 : step.type == J_INT                            ? step.i
                                                                 : 0;
    if (!items || by == 0) {
        return jfail(r, "a slice's step is a whole number other than 0");
    }
    int64_t n = items->n, lo = by > 0 ? 0 : -1, hi = by > 0 ? n : n - 1;
    int64_t i = slice_bound(r, from, n, lo, hi, by > 0 ? 0 : n - 1),
            end = slice_bound(r, to, n, lo, hi, by > 0 ? n : -1);
    if (v.type == J_STRING && by == 1) {
        return slice_text(r, v, items, i, end);
    }
    struct jvalue l = jlist_new(r, v.type == J_STRING ? J_LIST : v.type);
    struct buf b;
    jbuf_init(&b);
    by = MAX(-n - 1, MIN(n + 1, by));
    for (; !r->failed && (by > 0 ? i < end : i > end); i += by) {
        jlist_push(r, l.list, items->at[i]);
        if (v.type == J_STRING) {
            jput_str(r, &b, items->at[i]);
        }
    }
    struct jvalue text = jtake(r, &b);
    return v.type == J_STRING ? text : l;
}

/* ---- JSON ---- */

static struct jvalue read_value(struct jrun *r, struct json *j);

/* A long string without escapes stays in the text. Short ones are copied, with a NUL
 * behind them, which names need. */
static struct jvalue read_string(struct jrun *r, struct json *j)
{
    enum { LONG = 256 };
    const char *begin = j->at;
    size_t len = 0;

    if (!json_read_string(j, NULL, 0, &len)) {
        return (struct jvalue){0};
    }
    if (len >= LONG && len == (size_t)(j->at - begin) - 2) {
        return jstring(begin + 1, len);
    }
    char *text = jalloc(r, len + 1);
    j->at = begin;
    return text && json_read_string(j, text, len + 1, &len) ? jstring(text, len)
                                                            : (struct jvalue){0};
}

static struct jvalue read_number(struct jrun *r, struct json *j)
{
    const char *at = j->at;
    double d = 0;

    (void)r;
    while (at < j->end && ((*at >= '0' && *at <= '9') || *at == '-')) {
        at++;
    }
    if (at == j->end || (*at != '.' && *at != 'e' && *at != 'E')) {
        int64_t i;
        return json_read_int(j, &i) ? jint(i) : (struct jvalue){0};
    }
    json_read_double(j, &d);
    return (struct jvalue){.type = J_FLOAT, .f = d};
}

static struct jvalue read_object(struct jrun *r, struct json *j)
{
    struct jvalue d = jdict_new(r, J_DICT);

    json_enter_object(j);
    while (!r->failed && json_next_member(j)) {
        struct jvalue key = jcopy(r, j->key, j->key_len);
        jdict_set(r, d.dict, key, read_value(r, j));
    }
    return d;
}

static struct jvalue read_value(struct jrun *r, struct json *j)
{
    bool b = false;
    struct jvalue l;

    switch (json_peek(j)) {
    case JSON_OBJECT:
        return read_object(r, j);
    case JSON_ARRAY:
        l = jlist_new(r, J_LIST);
        json_enter_array(j);
        while (!r->failed && json_next_element(j)) {
            jlist_push(r, l.list, read_value(r, j));
        }
        return l;
    case JSON_STRING:
        return read_string(r, j);
    case JSON_NUMBER:
        return read_number(r, j);
    case JSON_BOOL:
        json_read_bool(j, &b);
        return jbool(b);
    default:
        json_skip(j);
        return jnone();
    }
}

struct jvalue jfrom_json(struct jrun *r, const char *text, size_t len)
{
    struct json j;
    struct err e = {0};

    json_init(&j, text, len, "the conversation", &e);
    j.takes_nul = true;
    struct jvalue v = read_value(r, &j);
    if (!r->failed && !json_finish(&j)) {
        return jfail(r, "%s", e.text);
    }
    return v;
}
