/* The grammar is RFC 8259's, with NaN, Infinity and -Infinity as further numbers. */
#include "config/base/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json_plain.h"
#include "config/base/utf8.h"

void json_init(struct json *j, const char *text, size_t len, const char *file, struct err *err)
{
    *j = (struct json){
        .start = text, .at = text, .end = text + len, .file = file, .err = err, .first = true};
}

bool json_fail(struct json *j, const char *fmt, ...)
{
    if (j->failed) {
        return false;
    }
    j->failed = true;
    char text[320];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    err_set(j->err, ERR_INVALID, "%s: byte %zu: %s", j->file, (size_t)(j->at - j->start), text);
    return false;
}

const char *json_type_name(enum json_type t)
{
    static const char *const NAMES[] = {"nothing",  "an object",     "an array", "a string",
                                        "a number", "true or false", "null"};

    return NAMES[t];
}

static void skip_space(struct json *j)
{
    while (j->at < j->end &&
           (*j->at == ' ' || *j->at == '\n' || *j->at == '\t' || *j->at == '\r')) {
        j->at++;
    }
}

enum json_type json_peek(struct json *j)
{
    if (j->failed) {
        return JSON_END;
    }
    skip_space(j);
    if (j->at == j->end) {
        return JSON_END;
    }
    switch (*j->at) {
    case '{':
        return JSON_OBJECT;
    case '[':
        return JSON_ARRAY;
    case '"':
        return JSON_STRING;
    case 't':
    case 'f':
        return JSON_BOOL;
    case 'n':
        return JSON_NULL;
    case '-':
    case 'N':
    case 'I':
    case '0' ... '9':
        return JSON_NUMBER;
    default:
        return JSON_END;
    }
}

static bool expect(struct json *j, enum json_type want)
{
    enum json_type got = json_peek(j);

    if (j->failed) {
        return false;
    }
    return got == want ||
           json_fail(j, "%s expected, not %s", json_type_name(want), json_type_name(got));
}

static bool enter(struct json *j, enum json_type type)
{
    if (!expect(j, type)) {
        return false;
    }
    if (++j->depth > LIMIT_FILE_JSON_DEPTH) {
        return json_fail(j, "nested deeper than %d", LIMIT_FILE_JSON_DEPTH);
    }
    j->at++;
    j->first = true;
    return true;
}

bool json_enter_object(struct json *j)
{
    return enter(j, JSON_OBJECT);
}

bool json_enter_array(struct json *j)
{
    return enter(j, JSON_ARRAY);
}

/* Step over the comma, or over `close`, the end; true: a member or element follows. */
static bool next(struct json *j, char close)
{
    if (j->failed) {
        return false;
    }
    skip_space(j);
    if (j->at == j->end) {
        return json_fail(j, "the text ends inside %s", close == '}' ? "an object" : "an array");
    }
    bool first = j->first;
    j->first = false;
    if (*j->at == close) {
        j->at++;
        j->depth--;
        return false;
    }
    if (first) {
        return true;
    }
    if (*j->at != ',') {
        return json_fail(j, "',' or '%c' expected", close);
    }
    j->at++;
    skip_space(j);
    return true;
}

static int hex4(const char *p)
{
    int value = 0;

    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

/* Decode \uXXXX or a surrogate pair, from after the first 'u', as UTF-8 into ret[4].
 * Returns the length; 0: an error. */
static int read_unicode_escape(struct json *j, char *ret)
{
    int32_t c = j->end - j->at >= 4 ? hex4(j->at) : -1;

    if (c < 0) {
        return json_fail(j, "four hexadecimal digits expected after \\u");
    }
    j->at += 4;
    if (c >= 0xD800 && c < 0xE000) {
        int low = c < 0xDC00 && j->end - j->at >= 6 && j->at[0] == '\\' && j->at[1] == 'u'
                      ? hex4(j->at + 2)
                      : -1;
        if (low < 0xDC00 || low > 0xDFFF) {
            return json_fail(j, "half of a surrogate pair");
        }
        j->at += 6;
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    }
    if (c == 0 && !j->takes_nul) {
        return json_fail(j, "a NUL character in a string");
    }
    return utf8_put(ret, c);
}

/* Read one character of a string, escaped or not, into ret[4]. Returns the length; 0:
 * an error. */
static int read_char(struct json *j, char *ret)
{
    if (*j->at != '\\') {
        size_t n = utf8_char_len(j->at, (size_t)(j->end - j->at));
        if (n == 0 || (unsigned char)*j->at < 0x20) {
            return json_fail(j,
                             n == 0 ? "a string is not UTF-8" : "a control character in a string");
        }
        memcpy(ret, j->at, n);
        j->at += n;
        return (int)n;
    }
    static const char FROM[] = "\"\\/bfnrt", TO[] = "\"\\/\b\f\n\r\t";
    const char *which = j->at + 1 < j->end && j->at[1] ? strchr(FROM, j->at[1]) : NULL;
    if (which) {
        j->at += 2;
        ret[0] = TO[which - FROM];
        return 1;
    }
    if (j->at + 1 == j->end || j->at[1] != 'u') {
        return json_fail(j, "an unknown escape in a string");
    }
    j->at += 2;
    return read_unicode_escape(j, ret);
}

/* ret NULL: only check the string. */
static bool read_string(struct json *j, char *ret, size_t cap, size_t *ret_len)
{
    if (!expect(j, JSON_STRING)) {
        return false;
    }
    j->at++;
    size_t len = 0;
    while (j->at < j->end && *j->at != '"') {
        char c[4];
        const char *from = j->at;
        size_t n = json_plain_len(from, (size_t)(j->end - from));
        if (n > 0) {
            j->at += n;
        } else {
            n = (size_t)read_char(j, c);
            if (n == 0) {
                return false;
            }
            from = c;
        }
        if (ret) {
            if (len + n >= cap) {
                return json_fail(j, "a string is longer than the %zu bytes allowed here", cap - 1);
            }
            memcpy(ret + len, from, n);
        }
        len += n;
    }
    if (j->at == j->end) {
        return json_fail(j, "the text ends inside a string");
    }
    j->at++;
    if (ret) {
        ret[len] = 0;
    }
    if (ret_len) {
        *ret_len = len;
    }
    return true;
}

bool json_read_string(struct json *j, char *ret, size_t cap, size_t *ret_len)
{
    return read_string(j, ret, cap, ret_len);
}

bool json_next_member(struct json *j)
{
    if (!next(j, '}') || !read_string(j, j->key, sizeof(j->key), &j->key_len)) {
        return false;
    }
    skip_space(j);
    if (j->at == j->end || *j->at != ':') {
        return json_fail(j, "':' expected");
    }
    j->at++;
    return true;
}

bool json_next_element(struct json *j)
{
    return next(j, ']');
}

bool json_key_is(const struct json *j, const char *key)
{
    return strcmp(j->key, key) == 0;
}

static bool take_word(struct json *j, const char *word)
{
    size_t len = strlen(word);

    if ((size_t)(j->end - j->at) < len || memcmp(j->at, word, len) != 0) {
        return false;
    }
    j->at += len;
    return true;
}

static const char *digits(const char *p, const char *end)
{
    while (p < end && *p >= '0' && *p <= '9') {
        p++;
    }
    return p;
}

/* The end of the number at j->at; NULL: not a number. *ret_integer: it has neither
 * fraction nor exponent. */
static const char *number_end(const struct json *j, bool *ret_integer)
{
    const char *p = j->at + (*j->at == '-'), *q = digits(p, j->end);

    if (q == p || (*p == '0' && q - p > 1)) {
        return NULL;
    }
    *ret_integer = true;
    p = q;
    if (p < j->end && *p == '.') {
        *ret_integer = false;
        q = digits(p + 1, j->end);
        if (q == p + 1) {
            return NULL;
        }
        p = q;
    }
    if (p < j->end && (*p == 'e' || *p == 'E')) {
        *ret_integer = false;
        p++;
        if (p < j->end && (*p == '+' || *p == '-')) {
            p++;
        }
        q = digits(p, j->end);
        if (q == p) {
            return NULL;
        }
        p = q;
    }
    return p;
}

bool json_read_double(struct json *j, double *ret)
{
    if (!expect(j, JSON_NUMBER)) {
        return false;
    }
    if (take_word(j, "NaN")) {
        *ret = NAN;
        return true;
    }
    bool infinite = take_word(j, "Infinity"), minus = !infinite && take_word(j, "-Infinity");
    if (infinite || minus) {
        *ret = minus ? -INFINITY : INFINITY;
        return true;
    }
    char text[128];
    bool integer;
    const char *p = number_end(j, &integer);
    if (!p || p - j->at >= (ptrdiff_t)sizeof(text)) {
        return json_fail(j, p ? "a number of more than 127 characters" : "not a number");
    }
    memcpy(text, j->at, (size_t)(p - j->at));
    text[p - j->at] = 0;
    j->at = p;
    *ret = strtod(text, NULL);
    return true;
}

bool json_read_int(struct json *j, int64_t *ret)
{
    if (!expect(j, JSON_NUMBER)) {
        return false;
    }
    bool integer, minus = *j->at == '-';
    const char *p = number_end(j, &integer);
    if (!p || !integer) {
        return json_fail(j, "a whole number expected");
    }
    int64_t value = 0;
    for (const char *q = j->at + minus; q < p; q++) {
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, *q - '0', &value)) {
            return json_fail(j, "a number over 64 bits");
        }
    }
    j->at = p;
    *ret = minus ? -value : value;
    return true;
}

bool json_read_bool(struct json *j, bool *ret)
{
    if (!expect(j, JSON_BOOL)) {
        return false;
    }
    bool yes = take_word(j, "true");
    if (!yes && !take_word(j, "false")) {
        return json_fail(j, "true or false expected");
    }
    *ret = yes;
    return true;
}

/* A value other than an object or array. */
static bool skip_scalar(struct json *j)
{
    double number;
    bool boolean;

    switch (json_peek(j)) {
    case JSON_STRING:
        return read_string(j, NULL, 0, NULL);
    case JSON_NUMBER:
        return json_read_double(j, &number);
    case JSON_BOOL:
        return json_read_bool(j, &boolean);
    case JSON_NULL:
        return take_word(j, "null") || json_fail(j, "null expected");
    default:
        return json_fail(j, "a value expected");
    }
}

/* Without recursion: `kinds` has one bit per open level, 1 for an object. */
bool json_skip(struct json *j)
{
    uint64_t kinds = 0; /* bit 0: the innermost level */

    _Static_assert(LIMIT_FILE_JSON_DEPTH <= 64, "one bit per level");
    int32_t outside = j->depth;
    do {
        enum json_type t = json_peek(j);
        if (t == JSON_OBJECT || t == JSON_ARRAY) {
            if (!enter(j, t)) {
                return false;
            }
            kinds = kinds << 1 | (t == JSON_OBJECT);
        } else if (!skip_scalar(j)) {
            return false;
        }
        while (j->depth > outside) { /* step to the next value, leaving levels that end */
            int32_t depth = j->depth;
            if (kinds & 1 ? json_next_member(j) : json_next_element(j)) {
                break;
            }
            if (j->failed) {
                return false;
            }
            kinds >>= (unsigned)(depth - j->depth);
        }
    } while (j->depth > outside);
    return true;
}

bool json_finish(struct json *j)
{
    if (j->failed) {
        return false;
    }
    skip_space(j);
    return j->at == j->end || json_fail(j, "something follows the end of the JSON text");
}
