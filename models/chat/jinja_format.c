/* Filters and methods that put values into texts, take JSON apart, and change lists and
 * dicts in place. The last are more than jinja2's sandbox allows, but templates use
 * them. */
#include <string.h>

#include "config/base/utf8.h"
#include "models/chat/jinja_strings.h"

/* "%s and %d" | format(a, b) */
struct jvalue jdo_percent_format(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    int32_t next = 0;
    struct buf b;

    if (!jneed_string(r, in, "format")) {
        return in;
    }
    jbuf_init(&b);
    jspend(r, (int64_t)in.len);
    for (size_t i = 0; i < in.len && !r->failed; i++) {
        if (in.s[i] != '%') {
            buf_putc(&b, in.s[i]);
            continue;
        }
        char kind = ++i < in.len ? in.s[i] : '\0';
        if (kind == '%') {
            buf_putc(&b, '%');
        } else if ((kind != 's' && kind != 'd') || next >= a->n) {
            jfail(r, "format takes %%s and %%d, and a value for each");
        } else if (kind == 'd' && a->at[next].type != J_INT && a->at[next].type != J_BOOL) {
            jfail(r, "%%d of %s", jtype_name(a->at[next]));
        } else if (kind == 'd') {
            buf_printf(&b, "%lld",
                       (long long)(a->at[next].type == J_INT ? a->at[next].i : a->at[next].b));
            next++;
        } else {
            jput_str(r, &b, a->at[next++]);
        }
    }
    return jtake(r, &b);
}

/* The value that a field of str.format names: "", a number, or a name. */
static struct jvalue field(struct jrun *r, const struct jargs *a, const char *name, size_t len,
                           int32_t *next)
{
    int32_t index = len ? 0 : (*next)++;

    for (size_t i = 0; i < len && index >= 0; i++) {
        bool digit = name[i] >= '0' && name[i] <= '9' && index < JINJA_MAX_ARGS;
        index = digit ? index * 10 + (name[i] - '0') : -1;
    }
    for (int32_t i = 0; index < 0 && i < a->n; i++) {
        if (a->name[i] && strlen(a->name[i]) == len && memcmp(a->name[i], name, len) == 0) {
            return a->at[i];
        }
    }
    return index >= 0 && index < a->n
               ? a->at[index]
               : jfail(r, "format has no value for {%.*s}", (int)MIN(len, 40), name);
}

/* "{} and {name}".format(a, name=b) */
struct jvalue jdo_format(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    int32_t next = 0;
    struct buf b;

    jbuf_init(&b);
    jspend(r, (int64_t)in.len);
    for (size_t i = 0; i < in.len && !r->failed; i++) {
        char c = in.s[i];
        if ((c == '{' || c == '}') && i + 1 < in.len && in.s[i + 1] == c) {
            buf_putc(&b, c);
            i++;
        } else if (c == '{') {
            const char *name = in.s + i + 1, *end = memchr(name, '}', in.len - i - 1);
            if (!end) {
                jfail(r, "format: a brace without its end");
                break;
            }
            jput_str(r, &b, field(r, a, name, (size_t)(end - name), &next));
            i = (size_t)(end - in.s);
        } else {
            buf_putc(&b, c);
        }
    }
    return jtake(r, &b);
}

struct jvalue jdo_from_json(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)a;
    return jneed_string(r, in, "from_json") ? jfrom_json(r, in.s, in.len) : in;
}

/* Characters beyond ASCII as JSON escapes. */
struct jvalue jto_ascii(struct jrun *r, struct jvalue in)
{
    struct buf b;
    int n;

    jbuf_init(&b);
    jspend(r, (int64_t)in.len);
    for (size_t i = 0; i < in.len && !r->failed; i += (size_t)n) {
        n = 1;
        if ((unsigned char)in.s[i] < 0x80 || utf8_char_len(in.s + i, in.len - i) == 0) {
            buf_putc(&b, in.s[i]);
            continue;
        }
        int32_t c = utf8_get((const uint8_t *)in.s + i, &n);
        if (c >= 0x10000) {
            buf_printf(&b, "\\u%04x\\u%04x", 0xD7C0 + (c >> 10), 0xDC00 + (c & 0x3FF));
        } else {
            buf_printf(&b, "\\u%04x", c);
        }
    }
    return jtake(r, &b);
}

/* ---- changes in place ---- */

/* Containers are not put into others in place: they could come to hold themselves. */
static bool may_hold(struct jrun *r, struct jvalue v)
{
    if (v.type == J_LIST || v.type == J_TUPLE || v.type == J_DICT || v.type == J_NAMESPACE) {
        jfail(r, "append and update take no %s", jtype_name(v));
    }
    return !r->failed;
}

struct jvalue jdo_append(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    if (a->n != 1) {
        return jfail(r, "append takes one value");
    }
    if (may_hold(r, a->at[0])) {
        jlist_push(r, in.list, a->at[0]);
    }
    return jnone();
}

/* list.pop() and list.pop(index) */
struct jvalue jdo_pop(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jlist *l = in.list;
    int64_t at = a->n && a->at[0].type == J_INT ? a->at[0].i : -1;

    at = at < 0 ? at + l->n : at;
    if (at < 0 || at >= l->n || !jspend(r, l->n)) {
        return jfail(r, "pop from outside a list");
    }
    struct jvalue v = l->at[at];
    memmove(l->at + at, l->at + at + 1, (size_t)(l->n - at - 1) * sizeof(*l->at));
    l->n--;
    return v;
}

struct jvalue jdo_update(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    if (a->n != 1 || a->at[0].type != J_DICT) {
        return jfail(r, "update takes one dict");
    }
    const struct jdict *from = a->at[0].dict;
    for (int32_t i = 0; i < from->n && may_hold(r, from->value[i]); i++) {
        jdict_set(r, in.dict, from->key[i], from->value[i]);
    }
    return jnone();
}
