/* Template text to tokens: the text between tags, and the words inside them. White
 * space control ('-' and '+' in tags, trim_blocks, lstrip_blocks) is applied here. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/utf8.h"
#include "models/chat/jinja.h"

struct lexer {
    struct jtokens *out;
    struct arena *arena;
    const char *at, *end;
    int32_t line;
    bool line_start; /* the text from here begins a line: for lstrip_blocks */
    struct err *err;
};

static int lex_fail(struct lexer *x, const char *what)
{
    return err_set(x->err, ERR_INVALID, "chat template: line %d: %s", x->line, what);
}

static int push(struct lexer *x, struct jtoken t)
{
    struct jtokens *o = x->out;

    if (o->n == o->cap) {
        int32_t cap = o->cap ? o->cap * 2 : 256;
        struct jtoken *at = realloc(o->at, (size_t)cap * sizeof(*at));
        if (!at) {
            return err_nomem(x->err, "a chat template");
        }
        o->at = at;
        o->cap = cap;
    }
    t.line = x->line;
    o->at[o->n++] = t;
    return 0;
}

/* Advance to `to`, counting lines. */
static void advance(struct lexer *x, const char *to)
{
    for (; x->at < to; x->at++) {
        x->line += *x->at == '\n';
    }
}

static bool starts(const struct lexer *x, const char *with)
{
    size_t n = strlen(with);

    return (size_t)(x->end - x->at) >= n && memcmp(x->at, with, n) == 0;
}

static const char *skip_space(const char *s, const char *end)
{
    for (size_t n; s < end && (n = jspace_len(s, (size_t)(end - s))) > 0;) {
        s += n;
    }
    return s;
}

/* ---- text between tags ---- */

/* How many bytes of text[len] are left before a tag with `sign` behind its opening
 * characters. */
static size_t strip_before(const struct lexer *x, const char *text, size_t len, char sign,
                           bool is_print)
{
    if (sign == '-') {
        for (size_t n; (n = jspace_len_back(text, len)) > 0;) {
            len -= n;
        }
        return len;
    }
    if (sign == '+' || is_print) {
        return len;
    }
    size_t line = len;
    while (line && text[line - 1] != '\n') {
        line--;
    }
    if ((line > 0 || x->line_start) && skip_space(text + line, text + len) == text + len) {
        return line;
    }
    return len;
}

/* After a tag: '-' removes all white space; without a sign, a newline after a block or
 * comment is removed; '+' keeps it. */
static void strip_after(struct lexer *x, char sign, bool is_print)
{
    const char *before = x->at;

    if (sign == '-') {
        advance(x, skip_space(x->at, x->end));
    } else if (!is_print && sign != '+' && x->at < x->end && *x->at == '\n') {
        advance(x, x->at + 1);
    }
    x->line_start = x->at > before && x->at[-1] == '\n';
}

static int push_text(struct lexer *x, const char *text, size_t len)
{
    return len ? push(x, (struct jtoken){.type = T_TEXT, .s = text, .len = len}) : 0;
}

static char sign_at(const struct lexer *x, const char *at)
{
    return at < x->end && (*at == '-' || *at == '+') ? *at : 0;
}

static int lex_comment(struct lexer *x)
{
    const char *end = memmem(x->at + 2, (size_t)(x->end - x->at) - 2, "#}", 2);

    if (!end) {
        return lex_fail(x, "a comment has no end");
    }
    char sign = end > x->at + 2 && (end[-1] == '-' || end[-1] == '+') ? end[-1] : 0;
    advance(x, end + 2);
    strip_after(x, sign, false);
    return 0;
}

/* If the tag at `at` is `{% word %}`, its end, with the sign there in *ret_end_sign;
 * else NULL. */
static const char *tag_word(const struct lexer *x, const char *at, const char *word,
                            char *ret_end_sign)
{
    size_t n = strlen(word);

    at += 2;
    if (at < x->end && (*at == '-' || *at == '+')) {
        at++;
    }
    at = skip_space(at, x->end);
    if ((size_t)(x->end - at) < n || memcmp(at, word, n) != 0) {
        return NULL;
    }
    at = skip_space(at + n, x->end);
    *ret_end_sign = sign_at(x, at);
    at += *ret_end_sign != 0;
    return x->end - at >= 2 && memcmp(at, "%}", 2) == 0 ? at + 2 : NULL;
}

static int lex_raw(struct lexer *x, const char *body, char sign)
{
    advance(x, body);
    strip_after(x, sign, false);
    for (const char *at = x->at; (at = memmem(at, (size_t)(x->end - at), "{%", 2)) != NULL;
         at += 2) {
        char end_sign;
        const char *end = tag_word(x, at, "endraw", &end_sign);
        if (!end) {
            continue;
        }
        size_t len = strip_before(x, x->at, (size_t)(at - x->at), sign_at(x, at + 2), false);
        int rc = push_text(x, x->at, len);
        advance(x, end);
        strip_after(x, end_sign, false);
        return rc;
    }
    return lex_fail(x, "raw has no endraw");
}

/* ---- words inside tags ---- */

static bool is_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static int push_copy(struct lexer *x, enum jtoken_type type, const char *s, size_t len)
{
    char *copy = arena_alloc(x->arena, len + 1);

    if (!copy) {
        return lex_fail(x, "the template is too large");
    }
    memcpy(copy, s, len);
    return push(x, (struct jtoken){.type = type, .s = copy, .len = len});
}

static int lex_name(struct lexer *x)
{
    const char *s = x->at;

    while (x->at < x->end && is_word(*x->at)) {
        x->at++;
    }
    if (x->at - s >= JINJA_MAX_NAME) {
        return lex_fail(x, "a name is too long");
    }
    return push_copy(x, T_NAME, s, (size_t)(x->at - s));
}

static int lex_number(struct lexer *x)
{
    char digits[64];
    size_t n = 0;
    bool real = false;

    for (; x->at < x->end && n + 1 < sizeof(digits); x->at++) {
        char c = *x->at, next = x->at + 1 < x->end ? x->at[1] : 0;
        bool dot = c == '.' && !real && next >= '0' && next <= '9';
        bool exponent = (c == 'e' || c == 'E') && n &&
                        ((next >= '0' && next <= '9') || next == '-' || next == '+');
        bool sign = (c == '-' || c == '+') && n && (digits[n - 1] == 'e' || digits[n - 1] == 'E');
        real = real || dot || exponent;
        if (c == '_') {
            continue;
        }
        if (!(c >= '0' && c <= '9') && !dot && !exponent && !sign) {
            break;
        }
        digits[n++] = c;
    }
    digits[n] = '\0';
    if (real) {
        return push(x, (struct jtoken){.type = T_FLOAT, .f = strtod(digits, NULL)});
    }
    errno = 0;
    int64_t i = strtoll(digits, NULL, 10);
    return errno ? lex_fail(x, "a number has more than 64 bits")
                 : push(x, (struct jtoken){.type = T_INT, .i = i});
}

static int hex_digits(const char *s, const char *end, int n, uint32_t *ret)
{
    *ret = 0;
    for (int i = 0; i < n; i++) {
        if (s + i >= end) {
            return -1;
        }
        char c = s[i], low = (char)(c | 0x20);
        if (!(c >= '0' && c <= '9') && !(low >= 'a' && low <= 'f')) {
            return -1;
        }
        *ret = *ret * 16 + (uint32_t)(c <= '9' ? c - '0' : low - 'a' + 10);
    }
    return *ret > 0x10ffff || (*ret >= 0xd800 && *ret < 0xe000) || *ret == 0 ? -1 : n;
}

/* Write the character of the escape at x->at, which is after the backslash, to `to`.
 * Returns its bytes, or a negative code. */
static int lex_escape(struct lexer *x, char *to)
{
    static const char from[] = "ntrabfv\\'\"", into[] = "\n\t\r\a\b\f\v\\'\"";
    char c = *x->at++;
    const char *known = c ? strchr(from, c) : NULL;

    if (known) {
        *to = into[known - from];
        return 1;
    }
    if (c == '\n') {
        x->line++;
        return 0;
    }
    if (c == 'x' || c == 'u' || c == 'U') {
        uint32_t code;
        int n = hex_digits(x->at, x->end, c == 'x' ? 2 : c == 'u' ? 4 : 8, &code);
        if (n < 0) {
            return lex_fail(x, "a string has a wrong escape");
        }
        x->at += n;
        return utf8_put(to, (int32_t)code);
    }
    to[0] = '\\';
    to[1] = c;
    return 2;
}

static int lex_string(struct lexer *x)
{
    char quote = *x->at++;
    const char *end = x->at;

    while (end < x->end && *end != quote) {
        end += *end == '\\' ? 2 : 1;
    }
    if (end >= x->end) {
        return lex_fail(x, "a string has no end");
    }
    char *text = arena_alloc(x->arena, (size_t)(end - x->at) + 4);
    size_t len = 0;
    if (!text) {
        return lex_fail(x, "the template is too large");
    }
    while (x->at < end) {
        x->line += *x->at == '\n';
        if (*x->at != '\\') {
            text[len++] = *x->at++;
            continue;
        }
        x->at++;
        int n = lex_escape(x, text + len);
        if (n < 0) {
            return n;
        }
        len += (size_t)n;
    }
    x->at = end + 1;
    text[len] = '\0';
    return push(x, (struct jtoken){.type = T_STRING, .s = text, .len = len});
}

static int lex_operator(struct lexer *x)
{
    static const char *const OPS[] = {"==", "!=", "<=", ">=", "//", "**", "+", "-", "*",
                                      "/",  "%",  "~",  "<",  ">",  "=",  "(", ")", "[",
                                      "]",  "{",  "}",  ",",  ":",  ".",  "|"};

    for (size_t i = 0; i < ARRAY_LEN(OPS); i++) {
        if (starts(x, OPS[i])) {
            x->at += strlen(OPS[i]);
            return push(x, (struct jtoken){.type = T_OP, .s = OPS[i], .len = strlen(OPS[i])});
        }
    }
    return lex_fail(x, "a character that does not belong in an expression");
}

/* The tokens up to the tag's end, `%}` or `}}`. Brackets are counted, because `}}` may
 * close two dicts. */
static int lex_inside(struct lexer *x, bool is_print)
{
    const char *closing = is_print ? "}}" : "%}";
    int open = 0, rc = 0;

    while (rc == 0) {
        advance(x, skip_space(x->at, x->end));
        if (x->at == x->end) {
            return lex_fail(x, "a tag has no end");
        }
        char sign = sign_at(x, x->at);
        if (open == 0 && (starts(x, closing) ||
                          (sign && x->end - x->at >= 3 && memcmp(x->at + 1, closing, 2) == 0))) {
            rc = push(x, (struct jtoken){.type = is_print ? T_PRINT_END : T_BLOCK_END});
            advance(x, x->at + (sign ? 3 : 2));
            strip_after(x, sign, is_print);
            return rc;
        }
        char c = *x->at;
        open += c == '(' || c == '[' || c == '{';
        open -= open > 0 && (c == ')' || c == ']' || c == '}');
        rc = c == '\'' || c == '"'  ? lex_string(x)
             : c >= '0' && c <= '9' ? lex_number(x)
             : is_word(c)           ? lex_name(x)
                                    : lex_operator(x);
    }
    return rc;
}

/* The beginning of the next tag at or after `at`, or `end`. */
static const char *next_tag(const char *at, const char *end)
{
    for (; (at = memchr(at, '{', (size_t)(end - at))) != NULL && at + 1 < end; at++) {
        if (at[1] == '%' || at[1] == '{' || at[1] == '#') {
            return at;
        }
    }
    return end;
}

static int lex_tag(struct lexer *x)
{
    char kind = x->at[1], sign = sign_at(x, x->at + 2), raw_sign;
    const char *raw = kind == '%' ? tag_word(x, x->at, "raw", &raw_sign) : NULL;

    if (kind == '#') {
        return lex_comment(x);
    }
    if (raw) {
        return lex_raw(x, raw, raw_sign);
    }
    int rc = push(x, (struct jtoken){.type = kind == '{' ? T_PRINT_BEGIN : T_BLOCK_BEGIN});
    advance(x, x->at + (sign ? 3 : 2));
    return rc ? rc : lex_inside(x, kind == '{');
}

/* A copy of the text in which \r\n and \r are \n, without a newline at its end. */
static char *normal_text(struct arena *arena, const char *text, size_t *len)
{
    char *copy = arena_alloc(arena, *len + 1);
    size_t n = 0;

    for (size_t i = 0; copy && i < *len; i++) {
        if (text[i] == '\r' && i + 1 < *len && text[i + 1] == '\n') {
            continue;
        }
        copy[n++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (n && copy[n - 1] == '\n') {
        n--;
    }
    *len = n;
    return copy;
}

int jinja_lex(struct jtokens *ret, struct arena *arena, const char *text, size_t len, struct err *e)
{
    if (len > LIMIT_TEMPLATE_BYTES || !utf8_valid(text, len)) {
        return err_set(e, ERR_INVALID, "chat template: %zu bytes; at most %zu of UTF-8 are allowed",
                       len, LIMIT_TEMPLATE_BYTES);
    }
    char *copy = normal_text(arena, text, &len);
    if (!copy) {
        return err_nomem(e, "a chat template");
    }
    struct lexer x = {.out = ret,
                      .arena = arena,
                      .at = copy,
                      .end = copy + len,
                      .line = 1,
                      .line_start = true,
                      .err = e};
    int rc = 0;
    while (rc == 0 && x.at < x.end) {
        const char *tag = next_tag(x.at, x.end);
        size_t n = (size_t)(tag - x.at);
        if (tag < x.end) {
            n = strip_before(&x, x.at, n, sign_at(&x, tag + 2), tag[1] == '{');
        }
        rc = push_text(&x, x.at, n);
        if (tag > x.at) {
            x.line_start = tag[-1] == '\n';
        }
        advance(&x, tag);
        if (rc == 0 && tag < x.end) {
            rc = lex_tag(&x);
        }
    }
    return rc ? rc : push(&x, (struct jtoken){.type = T_END});
}
