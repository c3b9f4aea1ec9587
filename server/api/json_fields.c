/* A recursive-descent parser (struct scan), and the values of its tree. */
#include "server/api/json_fields.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json_plain.h"
#include "config/base/limits.h"
#include "config/base/utf8.h"

enum {
    PLAIN_DIGITS = 15,     /* an integer of that many digits is exact as a double */
    UINT64_DIGITS = 20,    /* of 2^64 - 1 */
    EXPONENT_MAX = 1 << 30 /* exponents beyond this count as this */
};

struct scan {
    const char *text;
    size_t len, at;
    int64_t values, names; /* read so far */
    int64_t most_values;   /* when the field ends that is being read */
    struct err *e;
};

/* Read a value into `v`, which is zeroed; NULL: only check the syntax. */
static int scan_value(struct scan *s, int depth, cJSON *v);

static int scan_fail(struct scan *s, const char *what)
{
    if (s->at >= s->len) {
        return err_set(s->e, ERR_INVALID, "body is not valid JSON: it ends where %s was expected",
                       what);
    }
    return err_set(s->e, ERR_INVALID, "body is not valid JSON: expected %s at byte %zu", what,
                   s->at);
}

static void scan_space(struct scan *s)
{
    while (s->at < s->len && strchr(" \t\r\n", s->text[s->at]) && s->text[s->at]) {
        s->at++;
    }
}

static bool scan_take(struct scan *s, char c)
{
    if (s->at < s->len && s->text[s->at] == c) {
        s->at++;
        return true;
    }
    return false;
}

static int hex_digit(char c)
{
    unsigned digit = (unsigned char)c - '0', letter = ((unsigned char)c | 0x20U) - 'a';

    return digit < 10 ? (int)digit : letter < 6 ? (int)letter + 10 : -1;
}

/* Four digits at `at`, or -1. */
static int scan_hex4(const struct scan *s, size_t at)
{
    int v = 0;

    if (at + 4 > s->len) {
        return -1;
    }
    for (size_t i = at; i < at + 4; i++) {
        int d = hex_digit(s->text[i]);
        if (d < 0) {
            return -1;
        }
        v = v * 16 + d;
    }
    return v;
}

/* After `\u`: one code unit, or a pair of surrogates. */
static int scan_unicode(struct scan *s, uint32_t *ret)
{
    int unit = scan_hex4(s, s->at);

    if (unit < 0) {
        return scan_fail(s, "four hexadecimal digits");
    }
    s->at += 4;
    *ret = (uint32_t)unit;
    if (unit < 0xd800 || unit > 0xdfff) {
        return 0;
    }
    bool pair =
        unit < 0xdc00 && s->at + 6 <= s->len && s->text[s->at] == '\\' && s->text[s->at + 1] == 'u';
    int low = pair ? scan_hex4(s, s->at + 2) : -1;
    if (low < 0xdc00 || low > 0xdfff) {
        return err_set(s->e, ERR_INVALID, "body has half of a surrogate pair (\\u%04x) at byte %zu",
                       unit, s->at - 6);
    }
    s->at += 6;
    *ret = 0x10000 + ((uint32_t)(unit - 0xd800) << 10) + (uint32_t)(low - 0xdc00);
    return 0;
}

/* After the backslash: the character that the escape stands for. */
static int scan_escape(struct scan *s, uint32_t *ret)
{
    static const char into[128] = {['"'] = '"',  ['\\'] = '\\', ['/'] = '/',  ['b'] = '\b',
                                   ['f'] = '\f', ['n'] = '\n',  ['r'] = '\r', ['t'] = '\t'};
    unsigned char c = s->at < s->len ? (unsigned char)s->text[s->at] : '\0';

    if (c == 'u') {
        s->at++;
        return scan_unicode(s, ret);
    }
    if (c >= sizeof(into) || !into[c]) {
        return scan_fail(s, "a character that can be escaped");
    }
    s->at++;
    *ret = (unsigned char)into[c];
    return 0;
}

/* From after the opening quote to after the closing one. */
static int scan_string(struct scan *s, bool *ret_escaped)
{
    uint32_t c;

    *ret_escaped = false;
    while ((s->at += json_plain_len(s->text + s->at, s->len - s->at)) < s->len) {
        unsigned char first = (unsigned char)s->text[s->at];
        if (first == '"') {
            s->at++;
            return 0;
        }
        if (first < 0x20) {
            return err_set(
                s->e, ERR_INVALID,
                "body has a control character (0x%02x) inside a string at byte %zu: escape it",
                first, s->at);
        }
        if (first == '\\') {
            s->at++;
            *ret_escaped = true;
            int rc = scan_escape(s, &c);
            if (rc) {
                return rc;
            }
            continue;
        }
        size_t n = utf8_char_len(s->text + s->at, s->len - s->at);
        if (!n) {
            return err_set(s->e, ERR_INVALID, "body is not valid UTF-8 at byte %zu", s->at);
        }
        s->at += n;
    }
    return scan_fail(s, "'\"'");
}

/* Decode the string text [s->at, end), which scan_string has accepted, into `to`. No
 * escape is shorter than what it stands for. Returns the bytes written. */
static size_t unescape(struct scan *s, size_t end, char *to)
{
    size_t n = 0;
    uint32_t c = 0;

    while (s->at < end) {
        const char *escape = memchr(s->text + s->at, '\\', end - s->at);
        size_t run = (escape ? (size_t)(escape - s->text) : end) - s->at;
        memcpy(to + n, s->text + s->at, run);
        n += run;
        s->at += run;
        if (escape) {
            s->at++;
            scan_escape(s, &c);
            n += (size_t)utf8_put(to + n, (int32_t)c);
        }
    }
    return n;
}

/* `ret` NULL: only check the syntax. */
static int read_string(struct scan *s, char **ret, size_t *ret_len)
{
    size_t begin = s->at;
    bool escaped;
    int rc = scan_string(s, &escaped);

    if (rc || !ret) {
        return rc;
    }
    size_t end = s->at - 1, len = end - begin;
    char *to = len < INT_MAX ? cJSON_malloc(len + 1) : NULL;
    if (!to) {
        return err_nomem(s->e, "the request's JSON");
    }
    if (escaped) {
        struct scan again = {.text = s->text, .len = s->len, .at = begin};
        len = unescape(&again, end, to);
    } else {
        memcpy(to, s->text + begin, len);
    }
    to[len] = '\0';
    *ret = to;
    *ret_len = len;
    return 0;
}

static bool scan_digits(struct scan *s)
{
    size_t begin = s->at;

    while (s->at < s->len && s->text[s->at] >= '0' && s->text[s->at] <= '9') {
        s->at++;
    }
    return s->at > begin;
}

/* Pass over a number; *plain: it is an integer of at most PLAIN_DIGITS digits. */
static int scan_number(struct scan *s, bool *plain)
{
    bool minus = scan_take(s, '-');
    size_t begin = s->at;

    if (!scan_take(s, '0') && !scan_digits(s)) {
        return scan_fail(s, "a digit");
    }
    *plain = s->at - begin <= PLAIN_DIGITS && !(minus && s->text[begin] == '0');
    if (scan_take(s, '.')) {
        *plain = false;
        if (!scan_digits(s)) {
            return scan_fail(s, "a digit");
        }
    }
    if (s->at < s->len && (s->text[s->at] | 0x20) == 'e') {
        s->at++;
        *plain = false;
        if (!scan_take(s, '-')) {
            scan_take(s, '+');
        }
        if (!scan_digits(s)) {
            return scan_fail(s, "a digit");
        }
    }
    return 0;
}

static double plain_number(const char *text, size_t len)
{
    bool minus = text[0] == '-';
    int64_t n = 0;

    for (size_t i = minus; i < len; i++) {
        n = n * 10 + (text[i] - '0');
    }
    return (double)(minus ? -n : n);
}

static int read_number(struct scan *s, cJSON *v)
{
    size_t begin = s->at;
    bool plain = false;
    int rc = scan_number(s, &plain);

    if (rc || !v) {
        return rc;
    }
    size_t len = s->at - begin;
    v->type = cJSON_Number;
    if (plain) {
        v->valuedouble = plain_number(s->text + begin, len);
        return 0;
    }
    v->valuestring = cJSON_malloc(len + 1);
    if (!v->valuestring) {
        return err_nomem(s->e, "the request's JSON");
    }
    memcpy(v->valuestring, s->text + begin, len);
    v->valuestring[len] = '\0';
    v->valuedouble = strtod(v->valuestring, NULL);
    return 0;
}

static int scan_word(struct scan *s, const char *word)
{
    size_t n = strlen(word);

    if (s->len - s->at < n || memcmp(s->text + s->at, word, n) != 0) {
        return scan_fail(s, "a value");
    }
    s->at += n;
    return 0;
}

/* The body's field with the name at `at` begins: its values are limited, in front of
 * the body's own limit unless they are token ids. */
static void begin_field(struct scan *s, size_t at)
{
    static const char *const ids[] = {"\"prompt\"", "\"tokens\""};

    s->most_values = MIN(s->values + LIMIT_JSON_FIELD_VALUES, LIMIT_JSON_VALUES);
    for (size_t i = 0; i < ARRAY_LEN(ids); i++) {
        size_t n = strlen(ids[i]);
        if (s->len - at >= n && memcmp(s->text + at, ids[i], n) == 0) {
            s->most_values = LIMIT_JSON_VALUES;
        }
    }
}

static int read_member_name(struct scan *s, int depth, cJSON *v)
{
    size_t len = 0, at;

    scan_space(s);
    at = s->at;
    if (depth == 0) {
        begin_field(s, at);
    }
    if (++s->names > LIMIT_JSON_NAMES) {
        return err_set(s->e, ERR_INVALID, "body holds objects of more than %d members together",
                       LIMIT_JSON_NAMES);
    }
    if (!scan_take(s, '"')) {
        return scan_fail(s, "a member's name in quotes");
    }
    int rc = read_string(s, v ? &v->string : NULL, &len);
    if (rc) {
        return rc;
    }
    if (v && strlen(v->string) != len) {
        return err_set(s->e, ERR_INVALID,
                       "body has a member whose name holds the character NUL at byte %zu", at);
    }
    scan_space(s);
    return scan_take(s, ':') ? 0 : scan_fail(s, "':'");
}

/* A new last child of `list`; in cJSON the first child's `prev` is the last child. */
static cJSON *add_child(cJSON *list)
{
    cJSON *v = cJSON_malloc(sizeof(*v));

    if (!v) {
        return NULL;
    }
    *v = (cJSON){0};
    if (list->child) {
        v->prev = list->child->prev;
        v->prev->next = v;
        list->child->prev = v;
    } else {
        list->child = v;
        v->prev = v;
    }
    return v;
}

/* From after the opening bracket to after `close`. */
static int read_list(struct scan *s, int depth, char close, cJSON *list)
{
    if (list) {
        list->type = close == '}' ? cJSON_Object : cJSON_Array;
    }
    scan_space(s);
    if (scan_take(s, close)) {
        return 0;
    }
    for (;;) {
        cJSON *v = list ? add_child(list) : NULL;
        if (list && !v) {
            return err_nomem(s->e, "the request's JSON");
        }
        int rc = close == '}' ? read_member_name(s, depth, v) : 0;
        rc = rc ? rc : scan_value(s, depth + 1, v);
        if (rc) {
            return rc;
        }
        scan_space(s);
        if (scan_take(s, close)) {
            return 0;
        }
        if (!scan_take(s, ',')) {
            return scan_fail(s, close == '}' ? "',' or '}'" : "',' or ']'");
        }
    }
}

static int read_text(struct scan *s, cJSON *v)
{
    size_t len = 0;
    int rc = read_string(s, v ? &v->valuestring : NULL, &len);

    if (v) {
        v->type = cJSON_String;
        v->valueint = (int)len;
    }
    return rc;
}

static int read_word(struct scan *s, const char *word, int type, cJSON *v)
{
    if (v) {
        v->type = type;
    }
    return scan_word(s, word);
}

static int scan_value(struct scan *s, int depth, cJSON *v)
{
    if (depth > LIMIT_JSON_DEPTH) {
        return err_set(s->e, ERR_INVALID, "body nests deeper than %d levels at byte %zu",
                       LIMIT_JSON_DEPTH, s->at);
    }
    if (++s->values > s->most_values) {
        return s->values > LIMIT_JSON_VALUES
                   ? err_set(s->e, ERR_INVALID, "body holds more than %d values", LIMIT_JSON_VALUES)
                   : err_set(s->e, ERR_INVALID, "body has a field of more than %d values",
                             LIMIT_JSON_FIELD_VALUES);
    }
    scan_space(s);
    if (s->at >= s->len) {
        return scan_fail(s, "a value");
    }
    switch (s->text[s->at]) {
    case '"':
        s->at++;
        return read_text(s, v);
    case '{':
        s->at++;
        return read_list(s, depth, '}', v);
    case '[':
        s->at++;
        return read_list(s, depth, ']', v);
    case 't':
        return read_word(s, "true", cJSON_True, v);
    case 'f':
        return read_word(s, "false", cJSON_False, v);
    case 'n':
        return read_word(s, "null", cJSON_NULL, v);
    case '-':
    case '0' ... '9':
        return read_number(s, v);
    default:
        return scan_fail(s, "a value");
    }
}

static int read_body(struct scan *s, cJSON *v)
{
    int rc = scan_value(s, 0, v);

    if (rc) {
        return rc;
    }
    scan_space(s);
    return s->at == s->len ? 0 : scan_fail(s, "the end of the body");
}

int json_check(const char *text, size_t len, struct err *e)
{
    struct scan s = {.text = text, .len = len, .most_values = LIMIT_JSON_FIELD_VALUES, .e = e};

    return read_body(&s, NULL);
}

int json_parse(cJSON **ret, const char *text, size_t len, struct err *e)
{
    struct scan s = {.text = text, .len = len, .most_values = LIMIT_JSON_FIELD_VALUES, .e = e};
    cJSON *tree = cJSON_malloc(sizeof(*tree));

    if (!tree) {
        return err_nomem(e, "the request's JSON");
    }
    *tree = (cJSON){0};
    int rc = read_body(&s, tree);
    if (rc) {
        cJSON_Delete(tree);
        return rc;
    }
    *ret = tree;
    return 0;
}

/* ---- values ---- */

size_t json_string_len(const cJSON *v)
{
    return (size_t)v->valueint;
}

bool json_is(const cJSON *v, const char *text)
{
    return cJSON_IsString(v) && !json_has_nul(v) && strcmp(v->valuestring, text) == 0;
}

bool json_has_nul(const cJSON *v)
{
    return memchr(v->valuestring, '\0', json_string_len(v)) != NULL;
}

/* The exponent in a number's text, clamped to +-EXPONENT_MAX; 0 if there is none. */
static int64_t exponent_of(const char *text)
{
    size_t digits = strcspn(text, "eE");
    int64_t n = 0;

    if (!text[digits]) {
        return 0;
    }
    const char *at = text + digits + 1;
    bool minus = *at == '-';
    for (at += minus || *at == '+'; *at; at++) {
        n = MIN(n * 10 + (*at - '0'), (int64_t)EXPONENT_MAX);
    }
    return minus ? -n : n;
}

/* A number's significant digits: the text [first, last], without leading and trailing
 * zeros, possibly with the decimal point inside; NULL for zero. The value is these
 * digits, as an integer, times ten to the power of `scale`. */
struct decimal {
    const char *first, *last;
    int64_t scale;
};

static struct decimal decimal_of(const char *digits)
{
    size_t len = strspn(digits, "0123456789.");
    const char *point = memchr(digits, '.', len), *end = digits + len;
    struct decimal d = {0};

    for (const char *p = digits; p < end; p++) {
        if (*p != '0' && *p != '.') {
            d.first = d.first ? d.first : p;
            d.last = p;
        }
    }
    if (d.first) {
        int64_t fraction = point ? end - point - 1 : 0; /* digits after the point */
        int64_t dropped = end - d.last - 1 - (point && d.last < point);
        d.scale = exponent_of(digits) + dropped - fraction;
    }
    return d;
}

static int text_integer(uint64_t *ret, const char *digits)
{
    struct decimal d = decimal_of(digits);
    uint64_t n = 0;

    *ret = 0;
    if (!d.first) {
        return 0;
    }
    if (d.scale < 0) {
        return ERR_INVALID;
    }
    if (d.last - d.first > UINT64_DIGITS || d.scale > UINT64_DIGITS) {
        return ERR_FULL;
    }
    for (const char *p = d.first; p <= d.last; p++) {
        if (*p != '.' && (__builtin_mul_overflow(n, 10, &n) ||
                          __builtin_add_overflow(n, (uint64_t)(*p - '0'), &n))) {
            return ERR_FULL;
        }
    }
    for (int64_t i = 0; i < d.scale; i++) {
        if (__builtin_mul_overflow(n, 10, &n)) {
            return ERR_FULL;
        }
    }
    *ret = n;
    return 0;
}

int json_integer(const cJSON *v, bool *ret_minus, uint64_t *ret)
{
    const char *text = v->valuestring;

    if (text) {
        *ret_minus = text[0] == '-';
        return text_integer(ret, text + *ret_minus);
    }
    *ret_minus = v->valuedouble < 0;
    *ret = (uint64_t)(*ret_minus ? -v->valuedouble : v->valuedouble);
    return 0;
}

const char *json_number_text(const cJSON *v, char text[JSON_NUMBER_BYTES])
{
    enum { SHOWN = 40 };

    if (!v->valuestring) {
        snprintf(text, JSON_NUMBER_BYTES, "%.0f", v->valuedouble);
    } else if (strlen(v->valuestring) <= SHOWN) {
        snprintf(text, JSON_NUMBER_BYTES, "%s", v->valuestring);
    } else {
        snprintf(text, JSON_NUMBER_BYTES, "%.*s... (%zu characters)", SHOWN, v->valuestring,
                 strlen(v->valuestring));
    }
    return text;
}

/* ---- back to text ---- */

static void put_members(struct buf *b, const cJSON *v)
{
    bool object = cJSON_IsObject(v);

    buf_putc(b, object ? '{' : '[');
    for (const cJSON *m = v->child; m; m = m->next) {
        if (m != v->child) {
            buf_putc(b, ',');
        }
        if (object) {
            buf_json_string(b, m->string, strlen(m->string));
            buf_putc(b, ':');
        }
        json_put(b, m);
    }
    buf_putc(b, object ? '}' : ']');
}

static void put_integer(struct buf *b, int64_t n)
{
    char text[24], *at = text + sizeof(text);
    uint64_t rest = n < 0 ? (uint64_t)-n : (uint64_t)n;

    do {
        *--at = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest);
    if (n < 0) {
        *--at = '-';
    }
    buf_append(b, at, (size_t)(text + sizeof(text) - at));
}

void json_put(struct buf *b, const cJSON *v)
{
    switch (v->type & 0xff) {
    case cJSON_True:
        buf_puts(b, "true");
        break;
    case cJSON_False:
        buf_puts(b, "false");
        break;
    case cJSON_Number:
        if (v->valuestring) {
            buf_puts(b, v->valuestring);
        } else {
            put_integer(b, (int64_t)v->valuedouble);
        }
        break;
    case cJSON_String:
        buf_json_string(b, v->valuestring, json_string_len(v));
        break;
    case cJSON_Array:
    case cJSON_Object:
        put_members(b, v);
        break;
    default:
        buf_puts(b, "null");
    }
}

const char *json_kind(const cJSON *v)
{
    switch (v->type & 0xff) {
    case cJSON_True:
    case cJSON_False:
        return "a boolean";
    case cJSON_Number:
        return "a number";
    case cJSON_String:
        return "a string";
    case cJSON_Array:
        return "a list";
    case cJSON_Object:
        return "an object";
    default:
        return "null";
    }
}
