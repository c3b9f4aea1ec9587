/* Methods of strings and dicts; the filters of the same names use them. */
#include "models/chat/jinja_strings.h"

#include <string.h>
#include <utf8proc.h>

enum { ON_STRING = 1 << J_STRING, ON_DICT = 1 << J_DICT, ON_LIST = 1 << J_LIST | 1 << J_TUPLE };

bool jneed_string(struct jrun *r, struct jvalue v, const char *name)
{
    if (v.type != J_STRING) {
        jfail(r, "%s needs a string, not %s", name, jtype_name(v));
    }
    return !r->failed;
}

/* ---- strip ---- */

static size_t char_len(const char *s, size_t left)
{
    size_t n = 1;

    while (n < left && ((unsigned char)s[n] & 0xc0) == 0x80) {
        n++;
    }
    return n;
}

/* Whether to strip the character s[n]: it is white space, or in `set` if that is
 * given. */
static bool strips(struct jrun *r, struct jvalue set, const char *s, size_t n)
{
    if (set.type != J_STRING) {
        return jspace_len(s, n) == n;
    }
    return jspend(r, 1 + (int64_t)(set.len / 16)) && memmem(set.s, set.len, s, n) != NULL;
}

static struct jvalue strip(struct jrun *r, struct jvalue in, const struct jargs *a, bool left,
                           bool right)
{
    struct jvalue set = jarg(a, 0, "chars");

    if (!jneed_string(r, in, "strip")) {
        return in;
    }
    jspend(r, (int64_t)(in.len / 16));
    for (size_t n;
         left && in.len && strips(r, set, in.s, n = char_len(in.s, in.len)) && !r->failed;) {
        in.s += n;
        in.len -= n;
    }
    while (right && in.len && !r->failed) {
        size_t n = 1;
        while (n < in.len && ((unsigned char)in.s[in.len - n] & 0xc0) == 0x80) {
            n++;
        }
        if (!strips(r, set, in.s + in.len - n, n)) {
            break;
        }
        in.len -= n;
    }
    return in;
}

struct jvalue jdo_strip(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return strip(r, in, a, true, true);
}

struct jvalue jdo_lstrip(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return strip(r, in, a, true, false);
}

struct jvalue jdo_rstrip(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return strip(r, in, a, false, true);
}

static bool has_end(struct jvalue in, struct jvalue end, bool front)
{
    return end.type == J_STRING && end.len <= in.len &&
           memcmp(front ? in.s : in.s + in.len - end.len, end.s, end.len) == 0;
}

static struct jvalue with_end(struct jrun *r, struct jvalue in, const struct jargs *a, bool front)
{
    struct jvalue end = jarg(a, 0, NULL);
    bool any = has_end(in, end, front);

    if (end.type != J_STRING && end.type != J_TUPLE) {
        return jfail(r, "startswith and endswith need a string or a tuple of them, not %s",
                     jtype_name(end));
    }
    for (int32_t i = 0; end.type == J_TUPLE && i < end.list->n && jspend(r, 1); i++) {
        any = any || has_end(in, end.list->at[i], front);
    }
    return jbool(any);
}

static struct jvalue do_startswith(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return with_end(r, in, a, true);
}

static struct jvalue do_endswith(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return with_end(r, in, a, false);
}

static struct jvalue do_removeprefix(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue end = jarg(a, 0, NULL);

    (void)r;
    return has_end(in, end, true) ? jstring(in.s + end.len, in.len - end.len) : in;
}

static struct jvalue do_removesuffix(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue end = jarg(a, 0, NULL);

    (void)r;
    return has_end(in, end, false) ? jstring(in.s, in.len - end.len) : in;
}

/* ---- letter case ---- */

enum case_mode { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_WORDS, CASE_FIRST };

static bool is_cased(int32_t c)
{
    return utf8proc_toupper(c) != c || utf8proc_tolower(c) != c;
}

/* Whether a character after `c` begins a word. */
static bool begins_word(enum case_mode mode, int32_t c, const char *s, size_t n)
{
    return mode == CASE_TITLE   ? !is_cased(c)
           : mode == CASE_WORDS ? jspace_len(s, n) == n || (c < 0x80 && strchr("-({[<", c))
                                : false;
}

static struct jvalue change_case(struct jrun *r, struct jvalue in, enum case_mode mode)
{
    bool first = true;
    struct buf b;

    in = jto_string(r, in);
    if (!jspend(r, (int64_t)(in.len / 4))) {
        return in;
    }
    jbuf_init(&b);
    for (size_t at = 0; at < in.len;) {
        utf8proc_uint8_t to[4];
        int32_t c = -1;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)in.s + at,
                                              (utf8proc_ssize_t)(in.len - at), &c);
        if (n <= 0) {
            break;
        }
        bool upper = mode == CASE_UPPER || (mode != CASE_LOWER && first);
        int32_t changed = upper ? utf8proc_toupper(c) : utf8proc_tolower(c);
        buf_append(&b, to, (size_t)utf8proc_encode_char(changed, to));
        first = begins_word(mode, c, in.s + at, (size_t)n);
        at += (size_t)n;
    }
    struct jvalue text = jtake(r, &b);
    text.markup = in.markup;
    return text;
}

struct jvalue jdo_upper(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return change_case(r, in, CASE_UPPER);
}

struct jvalue jdo_lower(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return change_case(r, in, CASE_LOWER);
}

struct jvalue jdo_title(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return change_case(r, in, CASE_TITLE);
}

struct jvalue jdo_title_words(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return change_case(r, in, CASE_WORDS);
}

struct jvalue jdo_capitalize(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return change_case(r, in, CASE_FIRST);
}

/* ---- replace, split, find ---- */

static int64_t count_of(struct jvalue v)
{
    return v.type == J_INT ? v.i : -1;
}

struct jvalue jdo_replace(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue old = jarg(a, 0, "old"), new = jarg(a, 1, "new");
    int64_t left = count_of(jarg(a, 2, "count"));
    struct buf b;

    in = jto_string(r, in);
    if (!jneed_string(r, old, "replace") || !jneed_string(r, new, "replace")) {
        return in;
    }
    jbuf_init(&b);
    size_t at = 0;
    while (left != 0 && !b.failed && jspend(r, 1)) {
        const char *found = at <= in.len ? memmem(in.s + at, in.len - at, old.s, old.len) : NULL;
        if (!found) {
            break;
        }
        size_t upto = (size_t)(found - in.s);
        buf_append(&b, in.s + at, upto - at);
        buf_append(&b, new.s, new.len);
        at = upto + old.len;
        left--;
        /* An empty `old` matches before every character and at the end. */
        if (old.len == 0 && at == in.len) {
            break;
        }
        if (old.len == 0) {
            size_t n = char_len(in.s + at, in.len - at);
            buf_append(&b, in.s + at, n);
            at += n;
        }
    }
    if (at < in.len) {
        buf_append(&b, in.s + at, in.len - at);
    }
    return jtake(r, &b);
}

/* Words between white space. */
static void split_words(struct jrun *r, struct jlist *l, struct jvalue in, int64_t left)
{
    const char *at = in.s, *end = in.s + in.len;

    while (!r->failed) {
        for (size_t n; at < end && (n = jspace_len(at, (size_t)(end - at))) > 0;) {
            at += n;
        }
        if (at == end) {
            return;
        }
        const char *word = at;
        while (at < end && !jspace_len(at, (size_t)(end - at))) {
            at++;
        }
        if (left == 0) {
            struct jargs none = {0};
            jlist_push(r, l, jdo_rstrip(r, jstring(word, (size_t)(end - word)), &none));
            return;
        }
        jlist_push(r, l, jstring(word, (size_t)(at - word)));
        left--;
    }
}

static struct jvalue do_split(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue sep = jarg(a, 0, "sep"), l = jlist_new(r, J_LIST);
    int64_t left = count_of(jarg(a, 1, "maxsplit"));

    if (!jspend(r, (int64_t)(in.len / 16))) {
        return l;
    }
    if (sep.type != J_STRING) {
        split_words(r, l.list, in, left);
        return l;
    }
    if (sep.len == 0) {
        return jfail(r, "split by an empty text");
    }
    const char *at = in.s, *end = in.s + in.len, *found;
    while (left-- != 0 && !r->failed &&
           (found = memmem(at, (size_t)(end - at), sep.s, sep.len)) != NULL) {
        jlist_push(r, l.list, jstring(at, (size_t)(found - at)));
        at = found + sep.len;
    }
    jlist_push(r, l.list, jstring(at, (size_t)(end - at)));
    return l;
}

static struct jvalue do_splitlines(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue l = jlist_new(r, J_LIST);

    (void)a;
    for (size_t at = 0, line; at < in.len && !r->failed;) {
        for (line = at; at < in.len && in.s[at] != '\n' && in.s[at] != '\r';) {
            at++;
        }
        jlist_push(r, l.list, jstring(in.s + line, at - line));
        at += at + 1 < in.len && in.s[at] == '\r' && in.s[at + 1] == '\n' ? 2 : 1;
    }
    return l;
}

static struct jvalue do_find(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue what = jarg(a, 0, NULL);

    if (!jneed_string(r, what, "find") || !jspend(r, (int64_t)(in.len / 16))) {
        return what;
    }
    const char *found = memmem(in.s, in.len, what.s, what.len);
    return jint(found ? jchars(in.s, (size_t)(found - in.s)) : -1);
}

static struct jvalue do_count(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue what = jarg(a, 0, NULL);
    int64_t n = 0;

    if (in.type != J_STRING) {
        for (int32_t i = 0; i < in.list->n && !r->failed; i++) {
            n += jequal(r, in.list->at[i], what);
        }
        return jint(n);
    }
    if (!jneed_string(r, what, "count") || !jspend(r, (int64_t)(in.len / 16))) {
        return what;
    }
    if (what.len == 0) {
        return jint(jchars(in.s, in.len) + 1);
    }
    const char *at = in.s, *end = in.s + in.len;
    while ((at = memmem(at, (size_t)(end - at), what.s, what.len)) != NULL) {
        at += what.len;
        n++;
    }
    return jint(n);
}

static struct jvalue do_join(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *l = jitems(r, jarg(a, 0, NULL));
    struct buf b;

    jbuf_init(&b);
    for (int32_t i = 0; l && i < l->n && !r->failed; i++) {
        if (i) {
            buf_append(&b, in.s, in.len);
        }
        if (jneed_string(r, l->at[i], "join")) {
            jput_str(r, &b, l->at[i]);
        }
    }
    return jtake(r, &b);
}

static struct jvalue do_isdigit(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    jspend(r, (int64_t)(in.len / 16));
    for (size_t i = 0; i < in.len; i++) {
        if (in.s[i] < '0' || in.s[i] > '9') {
            return jbool(false);
        }
    }
    return jbool(in.len > 0);
}

/* ---- mappings ---- */

struct jvalue jdo_items(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue l = jlist_new(r, J_LIST);

    (void)a;
    if (in.type == J_UNDEFINED) {
        return l;
    }
    if (in.type != J_DICT) {
        return jfail(r, "items of %s", jtype_name(in));
    }
    for (int32_t i = 0; i < in.dict->n && !r->failed; i++) {
        struct jvalue pair = jlist_new(r, J_TUPLE);
        if (r->failed) {
            break;
        }
        jlist_push(r, pair.list, in.dict->key[i]);
        jlist_push(r, pair.list, in.dict->value[i]);
        jlist_push(r, l.list, pair);
    }
    return l;
}

static struct jvalue do_keys(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    struct jlist *keys = jitems(r, in);
    return keys ? (struct jvalue){.type = J_LIST, .list = keys} : (struct jvalue){0};
}

static struct jvalue do_values(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue l = jlist_new(r, J_LIST);

    (void)a;
    for (int32_t i = 0; i < in.dict->n && !r->failed; i++) {
        jlist_push(r, l.list, in.dict->value[i]);
    }
    return l;
}

static struct jvalue do_get(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    const struct jvalue *v = jdict_find(r, in.dict, jarg(a, 0, NULL));

    return v ? *v : a->n > 1 ? a->at[1] : jnone();
}

/* loop.cycle('a', 'b') */
static struct jvalue do_cycle(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    return a->n ? a->at[in.loop->index % a->n] : jfail(r, "cycle needs values");
}

static const struct jbuiltin methods[] = {
    {"strip", jdo_strip, ON_STRING},
    {"lstrip", jdo_lstrip, ON_STRING},
    {"rstrip", jdo_rstrip, ON_STRING},
    {"startswith", do_startswith, ON_STRING},
    {"endswith", do_endswith, ON_STRING},
    {"removeprefix", do_removeprefix, ON_STRING},
    {"removesuffix", do_removesuffix, ON_STRING},
    {"upper", jdo_upper, ON_STRING},
    {"lower", jdo_lower, ON_STRING},
    {"title", jdo_title, ON_STRING},
    {"capitalize", jdo_capitalize, ON_STRING},
    {"replace", jdo_replace, ON_STRING},
    {"split", do_split, ON_STRING},
    {"splitlines", do_splitlines, ON_STRING},
    {"find", do_find, ON_STRING},
    {"count", do_count, ON_STRING | ON_LIST},
    {"join", do_join, ON_STRING},
    {"isdigit", do_isdigit, ON_STRING},
    {"format", jdo_format, ON_STRING},
    {"append", jdo_append, 1 << J_LIST},
    {"pop", jdo_pop, 1 << J_LIST},
    {"update", jdo_update, ON_DICT},
    {"items", jdo_items, ON_DICT},
    {"keys", do_keys, ON_DICT},
    {"values", do_values, ON_DICT},
    {"get", do_get, ON_DICT},
    {"cycle", do_cycle, 1 << J_LOOP},
};

const struct jbuiltin *jinja_method_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(methods); i++) {
        if (strcmp(methods[i].name, name) == 0) {
            return &methods[i];
        }
    }
    return NULL;
}
