/* Values as text, in the forms of Python's str(), repr() and json.dumps(). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json_plain.h"
#include "models/chat/jinja.h"

void jbuf_init(struct buf *b)
{
    buf_init(b, LIMIT_TEMPLATE_OUTPUT_BYTES);
}

struct jvalue jtake(struct jrun *r, struct buf *b)
{
    struct jvalue v = {0};

    if (b->failed) {
        jfail_buf(r, b);
    } else {
        v = jcopy(r, b->data ? b->data : "", b->len);
    }
    buf_release(b);
    return v;
}

/* ---- white space ---- */

size_t jspace_len(const char *s, size_t left)
{
    const unsigned char *u = (const unsigned char *)s;

    if (left == 0) {
        return 0;
    }
    if ((u[0] >= 9 && u[0] <= 13) || (u[0] >= 28 && u[0] <= 32)) {
        return 1;
    }
    if (left >= 2 && u[0] == 0xc2 && (u[1] == 0x85 || u[1] == 0xa0)) {
        return 2;
    }
    if (left < 3) {
        return 0;
    }
    uint32_t c = (u[0] & 0xf0) == 0xe0 ? (u[0] & 15u) << 12 | (u[1] & 63u) << 6 | (u[2] & 63u) : 0;
    bool space = c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
                 c == 0x202f || c == 0x205f || c == 0x3000;
    return space ? 3 : 0;
}

size_t jspace_len_back(const char *s, size_t len)
{
    size_t n = 1;

    while (n < len && n < 4 && ((unsigned char)s[len - n] & 0xc0) == 0x80) {
        n++;
    }
    return len && jspace_len(s + len - n, n) == n ? n : 0;
}

/* ---- numbers ---- */

/* The shortest digits that read back as the same number, in the form of Python's
 * repr(). */
static void put_double(struct buf *b, double d)
{
    char text[64];

    if (!isfinite(d)) {
        buf_puts(b, isnan(d) ? "nan" : d > 0 ? "inf" : "-inf");
        return;
    }
    int digits = 1;
    do {
        snprintf(text, sizeof(text), "%.*e", digits - 1, d);
    } while (strtod(text, NULL) != d && digits++ < 17);
    int exponent = atoi(strchr(text, 'e') + 1);
    if (exponent < -4 || exponent >= 16) {
        char *e = strchr(text, 'e');
        *e = '\0';
        buf_printf(b, "%se%c%02d", text, exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    snprintf(text, sizeof(text), "%.*f", MAX(digits - 1 - exponent, 1), d);
    buf_puts(b, text);
}

/* ---- strings ---- */

/* Python's repr() of a string: in single quotes, unless it has some and no double
 * quotes. */
static void put_repr_string(struct buf *b, const char *s, size_t len)
{
    char quote = len && memchr(s, '\'', len) && !memchr(s, '"', len) ? '"' : '\'';

    buf_putc(b, quote);
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c == (unsigned char)quote || c == '\\') {
            buf_printf(b, "\\%c", c);
        } else if (c == '\n' || c == '\r' || c == '\t') {
            buf_printf(b, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        } else if (c < 0x20 || c == 0x7f) {
            buf_printf(b, "\\x%02x", c);
        } else {
            buf_putc(b, (char)c);
        }
    }
    buf_putc(b, quote);
}

static void put_json_string(struct buf *b, const char *s, size_t len)
{
    static const char from[] = "\"\\\n\r\t\b\f", into[] = "\"\\nrtbf";

    buf_putc(b, '"');
    for (size_t i = 0; i < len; i++) {
        size_t plain = json_plain_len(s + i, len - i);
        buf_append(b, s + i, plain);
        i += plain;
        const char *known = i < len && s[i] ? strchr(from, s[i]) : NULL;
        if (known) {
            buf_putc(b, '\\');
            buf_putc(b, into[known - from]);
        } else if (i < len && (unsigned char)s[i] < 0x20) {
            buf_printf(b, "\\u%04x", (unsigned char)s[i]);
        } else if (i < len) {
            buf_putc(b, s[i]);
        }
    }
    buf_putc(b, '"');
}

/* ---- str() and repr() ---- */

static void put_repr(struct jrun *r, struct buf *b, struct jvalue v);

static void put_list(struct jrun *r, struct buf *b, const struct jlist *l, bool tuple)
{
    buf_putc(b, tuple ? '(' : '[');
    for (int32_t i = 0; i < l->n && !r->failed; i++) {
        if (i) {
            buf_puts(b, ", ");
        }
        put_repr(r, b, l->at[i]);
    }
    buf_puts(b, tuple ? l->n == 1 ? ",)" : ")" : "]");
}

static void put_dict(struct jrun *r, struct buf *b, const struct jdict *d)
{
    buf_putc(b, '{');
    for (int32_t i = 0; i < d->n && !r->failed; i++) {
        if (i) {
            buf_puts(b, ", ");
        }
        put_repr(r, b, d->key[i]);
        buf_puts(b, ": ");
        put_repr(r, b, d->value[i]);
    }
    buf_putc(b, '}');
}

static void put_repr(struct jrun *r, struct buf *b, struct jvalue v)
{
    if (!jspend(r, 1 + (v.type == J_STRING ? (int64_t)(v.len / 16) : 0))) {
        return;
    }
    if (v.type == J_STRING) {
        put_repr_string(b, v.s, v.len);
    } else if (v.type == J_UNDEFINED) {
        buf_puts(b, "Undefined");
    } else {
        jput_str(r, b, v);
    }
}

void jput_str(struct jrun *r, struct buf *b, struct jvalue v)
{
    if (++r->depth > LIMIT_TEMPLATE_DEPTH) {
        jfail(r, "values nest too deeply");
    }
    switch (r->failed ? J_UNDEFINED : v.type) {
    case J_UNDEFINED:
        break;
    case J_NONE:
        buf_puts(b, "None");
        break;
    case J_BOOL:
        buf_puts(b, v.b ? "True" : "False");
        break;
    case J_INT:
        buf_printf(b, "%lld", (long long)v.i);
        break;
    case J_FLOAT:
        put_double(b, v.f);
        break;
    case J_STRING:
        jspend(r, (int64_t)(v.len / 16));
        buf_append(b, v.s, v.len);
        break;
    case J_LIST:
    case J_TUPLE:
        put_list(r, b, v.list, v.type == J_TUPLE);
        break;
    case J_DICT:
        put_dict(r, b, v.dict);
        break;
    default:
        jfail(r, "%s cannot be printed", jtype_name(v));
    }
    r->depth--;
    if (b->failed) {
        jfail_buf(r, b);
    }
}

struct jvalue jto_string(struct jrun *r, struct jvalue v)
{
    if (v.type == J_STRING) {
        return v;
    }
    struct buf b;
    jbuf_init(&b);
    jput_str(r, &b, v);
    return jtake(r, &b);
}

struct jvalue jescape(struct jrun *r, struct jvalue v)
{
    static const char from[] = "&<>'\"", *const into[] = {"&amp;", "&lt;", "&gt;", "&#39;",
                                                          "&#34;"};
    struct buf b;

    if (v.markup) {
        return v;
    }
    jbuf_init(&b);
    jspend(r, (int64_t)v.len);
    for (size_t i = 0; i < v.len && !r->failed; i++) {
        const char *k = v.s[i] ? strchr(from, v.s[i]) : NULL;
        if (k) {
            buf_puts(&b, into[k - from]);
        } else {
            buf_putc(&b, v.s[i]);
        }
    }
    struct jvalue text = jtake(r, &b);
    text.markup = true;
    return text;
}

/* ---- json.dumps ---- */

static void new_line(struct buf *b, int indent, int level)
{
    if (indent < 0) {
        return;
    }
    buf_printf(b, "\n%*s", indent * level, "");
}

static void put_json_members(struct jrun *r, struct buf *b, struct jvalue v, int indent, int level)
{
    bool dict = v.type == J_DICT;
    int32_t n = dict ? v.dict->n : v.list->n;

    buf_putc(b, dict ? '{' : '[');
    for (int32_t i = 0; i < n && !r->failed; i++) {
        if (i) {
            buf_puts(b, indent < 0 ? ", " : ",");
        }
        new_line(b, indent, level + 1);
        if (dict) {
            struct jvalue key = jto_string(r, v.dict->key[i]);
            if (r->failed) {
                return;
            }
            put_json_string(b, key.s, key.len);
            buf_puts(b, ": ");
        }
        jput_json(r, b, dict ? v.dict->value[i] : v.list->at[i], indent, level + 1);
    }
    if (n) {
        new_line(b, indent, level);
    }
    buf_putc(b, dict ? '}' : ']');
}

void jput_json(struct jrun *r, struct buf *b, struct jvalue v, int indent, int level)
{
    if (!jspend(r, 1 + (v.type == J_STRING ? (int64_t)(v.len / 16) : 0))) {
        return;
    }
    if (b->failed) {
        jfail_buf(r, b);
        return;
    }
    if (level > LIMIT_TEMPLATE_DEPTH) {
        jfail(r, "tojson: values nest too deeply");
        return;
    }
    switch (v.type) {
    case J_NONE:
        buf_puts(b, "null");
        break;
    case J_BOOL:
        buf_puts(b, v.b ? "true" : "false");
        break;
    case J_STRING:
        put_json_string(b, v.s, v.len);
        break;
    case J_LIST:
    case J_TUPLE:
    case J_DICT:
        put_json_members(r, b, v, indent, level);
        break;
    case J_INT:
    case J_FLOAT:
        jput_str(r, b, v);
        break;
    default:
        jfail(r, "tojson of %s", jtype_name(v));
    }
}
