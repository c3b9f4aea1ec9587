#include "server/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config/limits.h"

struct scan {
    const char *text;
    size_t len, at;
    int64_t values;
    struct err *e;
};

static int scan_value(struct scan *s, int depth);

static int scan_fail(struct scan *s, const char *what)
{
    if (s->at >= s->len) {
        return err_set(s->e, ERR_INVALID, "body is not valid JSON: it ends where %s was expected", what);
    }
    return err_set(s->e, ERR_INVALID, "body is not valid JSON: expected %s at byte %zu", what, s->at);
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

size_t utf8_char_len(const unsigned char *s, size_t left)
{
    unsigned char a = s[0];

    if (a < 0x80) {
        return 1;
    }
    size_t n = a >= 0xf0 ? 4 : a >= 0xe0 ? 3 : 2;
    if (a < 0xc2 || a > 0xf4 || n > left) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    /* Overlong forms, surrogates, beyond U+10FFFF. */
    bool wrong = (a == 0xe0 && s[1] < 0xa0) || (a == 0xed && s[1] > 0x9f) || (a == 0xf0 && s[1] < 0x90) ||
                 (a == 0xf4 && s[1] > 0x8f);
    return wrong ? 0 : n;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
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

/* Behind `\u`: one code unit, or a pair of surrogates. */
static int scan_unicode(struct scan *s)
{
    int unit = scan_hex4(s, s->at);

    if (unit < 0) {
        return scan_fail(s, "four hexadecimal digits");
    }
    if (unit == 0) {
        return err_set(s->e, ERR_INVALID, "body has \\u0000 at byte %zu: strings cannot hold the character NUL",
                       s->at - 2);
    }
    s->at += 4;
    if (unit < 0xd800 || unit > 0xdfff) {
        return 0;
    }
    bool pair = unit < 0xdc00 && s->at + 6 <= s->len && s->text[s->at] == '\\' && s->text[s->at + 1] == 'u';
    int low = pair ? scan_hex4(s, s->at + 2) : -1;
    if (low < 0xdc00 || low > 0xdfff) {
        return err_set(s->e, ERR_INVALID, "body has half of a surrogate pair (\\u%04x) at byte %zu", unit, s->at - 6);
    }
    s->at += 6;
    return 0;
}

static int scan_escape(struct scan *s)
{
    if (s->at < s->len && s->text[s->at] == 'u') {
        s->at++;
        return scan_unicode(s);
    }
    if (s->at >= s->len || !strchr("\"\\/bfnrt", s->text[s->at]) || !s->text[s->at]) {
        return scan_fail(s, "a character that can be escaped");
    }
    s->at++;
    return 0;
}

/* Behind the opening quote. */
static int scan_string(struct scan *s)
{
    while (s->at < s->len) {
        unsigned char c = (unsigned char)s->text[s->at];
        if (c == '"') {
            s->at++;
            return 0;
        }
        if (c < 0x20) {
            return err_set(s->e, ERR_INVALID,
                           "body has a control character (0x%02x) inside a string at byte %zu: escape it", c, s->at);
        }
        if (c == '\\') {
            s->at++;
            int rc = scan_escape(s);
            if (rc) {
                return rc;
            }
            continue;
        }
        size_t n = utf8_char_len((const unsigned char *)s->text + s->at, s->len - s->at);
        if (!n) {
            return err_set(s->e, ERR_INVALID, "body is not valid UTF-8 at byte %zu", s->at);
        }
        s->at += n;
    }
    return scan_fail(s, "'\"'");
}

static bool scan_digits(struct scan *s)
{
    size_t begin = s->at;

    while (s->at < s->len && s->text[s->at] >= '0' && s->text[s->at] <= '9') {
        s->at++;
    }
    return s->at > begin;
}

static int scan_number(struct scan *s)
{
    size_t begin = s->at;
    bool plain = true;

    scan_take(s, '-');
    if (!scan_take(s, '0') && !scan_digits(s)) {
        return scan_fail(s, "a digit");
    }
    if (scan_take(s, '.')) {
        plain = false;
        if (!scan_digits(s)) {
            return scan_fail(s, "a digit");
        }
    }
    if (s->at < s->len && (s->text[s->at] | 0x20) == 'e') {
        s->at++;
        plain = false;
        if (!scan_take(s, '-')) {
            scan_take(s, '+');
        }
        if (!scan_digits(s)) {
            return scan_fail(s, "a digit");
        }
    }
    /* cJSON copies a number to 64 bytes of stack and reads what fits. */
    if (s->at - begin > 60) {
        return err_set(s->e, ERR_INVALID, "body has a number of %zu characters at byte %zu; at most 60 are read",
                       s->at - begin, begin);
    }
    if (!plain) {
        char copy[64];
        memcpy(copy, s->text + begin, s->at - begin);
        copy[s->at - begin] = '\0';
        if (!isfinite(strtod(copy, NULL))) {
            return err_set(s->e, ERR_INVALID, "body has a number that is not finite (%s) at byte %zu", copy, begin);
        }
    }
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

static int scan_member_name(struct scan *s)
{
    scan_space(s);
    if (!scan_take(s, '"')) {
        return scan_fail(s, "a member's name in quotes");
    }
    int rc = scan_string(s);
    if (rc) {
        return rc;
    }
    scan_space(s);
    return scan_take(s, ':') ? 0 : scan_fail(s, "':'");
}

/* Behind the opening bracket. */
static int scan_list(struct scan *s, int depth, char close)
{
    scan_space(s);
    if (scan_take(s, close)) {
        return 0;
    }
    for (;;) {
        int rc = close == '}' ? scan_member_name(s) : 0;
        if (!rc) {
            rc = scan_value(s, depth + 1);
        }
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

static int scan_value(struct scan *s, int depth)
{
    if (depth > LIMIT_JSON_DEPTH) {
        return err_set(s->e, ERR_INVALID, "body nests deeper than %d levels at byte %zu", LIMIT_JSON_DEPTH, s->at);
    }
    if (++s->values > LIMIT_JSON_VALUES) {
        return err_set(s->e, ERR_INVALID, "body holds more than %d values", LIMIT_JSON_VALUES);
    }
    scan_space(s);
    if (s->at >= s->len) {
        return scan_fail(s, "a value");
    }
    switch (s->text[s->at]) {
    case '"':
        s->at++;
        return scan_string(s);
    case '{':
        s->at++;
        return scan_list(s, depth, '}');
    case '[':
        s->at++;
        return scan_list(s, depth, ']');
    case 't':
        return scan_word(s, "true");
    case 'f':
        return scan_word(s, "false");
    case 'n':
        return scan_word(s, "null");
    case '-':
    case '0':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case '8':
    case '9':
        return scan_number(s);
    default:
        return scan_fail(s, "a value");
    }
}

int json_check(const char *text, size_t len, struct err *e)
{
    struct scan s = {.text = text, .len = len, .e = e};
    int rc = scan_value(&s, 0);

    if (rc) {
        return rc;
    }
    scan_space(&s);
    return s.at == len ? 0 : scan_fail(&s, "the end of the body");
}

int json_parse(cJSON **ret, const char *text, size_t len, struct err *e)
{
    int rc = json_check(text, len, e);

    if (rc) {
        return rc;
    }
    cJSON *tree = cJSON_ParseWithLength(text, len);
    if (!tree) {
        return err_nomem(e, "the request's JSON");
    }
    *ret = tree;
    return 0;
}

size_t json_member_text(const char *text, size_t len, int k, const char **ret)
{
    struct scan s = {.text = text, .len = len};

    scan_space(&s);
    if (!scan_take(&s, '{')) {
        return 0;
    }
    for (int i = 0; scan_member_name(&s) == 0; i++) {
        scan_space(&s);
        size_t begin = s.at;
        if (scan_value(&s, 1)) {
            return 0;
        }
        if (i == k) {
            *ret = text + begin;
            return s.at - begin;
        }
        scan_space(&s);
        if (!scan_take(&s, ',')) {
            return 0;
        }
    }
    return 0;
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
