/* See format.h: literals of Python, and of the format that Gemma writes, as JSON, read
 * as they come. Strings stand between ', " or the format's mark; a bare word is True,
 * None, a number or, where it is none of them, a string; keys of dictionaries may be
 * bare. Tuples become lists. JSON is read as well. */
#include <string.h>

#include "config/base/utf8.h"
#include "models/chat/format/format.h"

enum {
    L_VALUE, /* a value, or the end of a container */
    L_KEY,   /* a key, or the end of a container */
    L_EQUAL, /* what stands between a key and its value */
    L_NEXT,  /* a comma or an end */
    L_STRING,
    L_WORD,
};

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool word_char(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c && strchr("_+-.$/@%", c)) || (unsigned char)c >= 0x80;
}

static void open_container(struct literal *l, char close, struct buf *out)
{
    l->close[l->depth++] = close;
    l->state = close == ']' ? L_VALUE : L_KEY;
    l->empty = true;
    buf_putc(out, close == ']' ? '[' : '{');
}

void literal_begin(struct literal *l, char close, char equal, const char *mark)
{
    memset(l, 0, sizeof(*l));
    l->close[0] = close;
    l->depth = 1;
    l->equal = equal;
    l->mark = mark;
    l->state = L_KEY;
    l->empty = true;
}

static char top(const struct literal *l)
{
    return l->depth ? l->close[l->depth - 1] : '\0';
}

/* A key or value is about to be written: the comma before it. */
static void item(struct literal *l, bool key, struct buf *out)
{
    bool behind_key = !key && top(l) != ']' && top(l) != 'T';

    if (!behind_key && !l->empty) {
        buf_puts(out, ", ");
    }
    l->empty = false;
    l->as_key = key;
}

static enum json_scan_rc after_item(struct literal *l, struct buf *out)
{
    l->state = l->as_key ? L_EQUAL : L_NEXT;
    if (l->as_key) {
        buf_puts(out, ": ");
    }
    l->as_key = false;
    return l->depth ? SCAN_MORE : SCAN_DONE;
}

static enum json_scan_rc close_container(struct literal *l, struct buf *out)
{
    char close = l->close[--l->depth];

    buf_putc(out, close == ']' ? ']' : '}');
    l->empty = false;
    l->as_key = false;
    l->state = L_NEXT;
    return l->depth ? SCAN_MORE : SCAN_DONE;
}

static enum json_scan_rc begin_item(struct literal *l, char c, bool key, struct buf *out)
{
    if (is_space(c)) {
        return SCAN_MORE;
    }
    /* An end may follow an opening bracket or a trailing comma. */
    if (l->depth && c == top(l) && (key || top(l) == ']')) {
        return close_container(l, out);
    }
    if (!key && (c == '[' || c == '{' || c == '(')) {
        if (l->depth == JSON_DEPTH) {
            return SCAN_BAD;
        }
        item(l, false, out);
        open_container(l, c == '{' ? '}' : ']', out);
        if (c == '(') {
            l->close[l->depth - 1] = 'T';
        }
        return SCAN_MORE;
    }
    if (c == '"' || c == '\'' || (l->mark && c == l->mark[0])) {
        item(l, key, out);
        l->state = L_STRING;
        l->quote = c;
        l->n_word = 0;
        if (c != '"' && c != '\'') {
            l->quote = 'm';
            l->state = L_WORD;
            l->word[l->n_word++] = c;
            return SCAN_MORE;
        }
        buf_putc(out, '"');
        return SCAN_MORE;
    }
    if (!word_char(c)) {
        return SCAN_BAD;
    }
    item(l, key, out);
    l->state = L_WORD;
    l->quote = '\0';
    l->word[0] = c;
    l->n_word = 1;
    return SCAN_MORE;
}

/* ---- strings ---- */

static void put_code(struct buf *out, uint32_t code)
{
    char text[8];

    if (code >= 0xD800 && code <= 0xDFFF) {
        buf_printf(out, "\\u%04x", code); /* half of a pair, as JSON writes it */
    } else if (code <= 0x10FFFF) {
        int n = utf8_put(text, (int32_t)code);
        buf_json_escape(out, text, (size_t)n);
    }
}

static enum json_scan_rc escaped(struct literal *l, char c, struct buf *out)
{
    static const char NAMES[] = "ntrbfv0a", CODES[] = "\n\t\r\b\f\v\0\a";

    if (l->escape == 1) {
        const char *name = c ? strchr(NAMES, c) : NULL;
        l->escape = 0;
        l->code = 0;
        if (name) {
            buf_json_escape(out, &CODES[name - NAMES], 1);
        } else if (c == 'x' || c == 'u' || c == 'U') {
            l->escape = c == 'x' ? 3 : c == 'u' ? 5 : 9;
        } else if (c == '\\' || c == '\'' || c == '"' || c == '/') {
            buf_json_escape(out, &c, 1);
        } else if (c != '\n') {
            buf_puts(out, "\\\\");
            return (unsigned char)c < 0x20 || c == 0x7f ? SCAN_BAD : (buf_putc(out, c), SCAN_MORE);
        }
        return SCAN_MORE;
    }
    int digit = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
    if (digit < 0) {
        return SCAN_BAD;
    }
    l->code = l->code << 4 | (uint32_t)digit;
    if (--l->escape == 1) {
        l->escape = 0;
        put_code(out, l->code);
    }
    return SCAN_MORE;
}

static void put_string_byte(struct buf *out, char c)
{
    if ((unsigned char)c < 0x80) {
        buf_json_escape(out, &c, 1);
    } else {
        buf_putc(out, c);
    }
}

/* Inside a string between the format's marks; nothing is escaped. */
static enum json_scan_rc marked_byte(struct literal *l, char c, struct buf *out)
{
    size_t len = strlen(l->mark);

    l->word[l->n_word++] = c;
    while (l->n_word && memcmp(l->word, l->mark, l->n_word) != 0) {
        put_string_byte(out, l->word[0]);
        memmove(l->word, l->word + 1, --l->n_word);
    }
    if (l->n_word < len) {
        return SCAN_MORE;
    }
    l->n_word = 0;
    buf_putc(out, '"');
    return after_item(l, out);
}

static enum json_scan_rc string_byte(struct literal *l, char c, struct buf *out)
{
    if (l->quote == 'm') {
        return marked_byte(l, c, out);
    }
    if (l->escape) {
        return escaped(l, c, out);
    }
    if (c == '\\') {
        l->escape = 1;
    } else if (c == l->quote) {
        buf_putc(out, '"');
        return after_item(l, out);
    } else {
        put_string_byte(out, c);
    }
    return SCAN_MORE;
}

/* ---- words ---- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Those of 07, which is no JSON. */
static uint8_t leading_zeros(const struct literal *l)
{
    uint8_t zeros = 0;

    while (zeros + 1 < l->n_word && l->word[zeros] == '0' && is_digit(l->word[zeros + 1])) {
        zeros++;
    }
    return zeros;
}

/* A bare word as a value of its parameter; false: its type is not known. */
static bool put_typed(const struct literal *l, struct buf *out)
{
    if (l->as_key || l->depth != 1 || !l->params || !l->types) {
        return false;
    }
    uint8_t zeros = l->types & PARAM_STRING ? 0 : leading_zeros(l);
    value_put(out, l->word + zeros, (size_t)(l->n_word - zeros), l->types, true);
    return true;
}

static void put_word(struct literal *l, struct buf *out)
{
    static const struct {
        const char *word, *json;
    } NAMES[] = {{"True", "true"}, {"False", "false"}, {"None", "null"}, {"Null", "null"}};

    if (l->as_key && l->depth == 1 && l->params) {
        char key[sizeof(l->word) + 1];
        memcpy(key, l->word, l->n_word);
        key[l->n_word] = '\0';
        l->types = param_table_types(l->params, key);
    }
    if (put_typed(l, out)) {
        return;
    }
    for (size_t i = 0; !l->as_key && i < ARRAY_LEN(NAMES); i++) {
        if (strlen(NAMES[i].word) == l->n_word && memcmp(l->word, NAMES[i].word, l->n_word) == 0) {
            buf_puts(out, NAMES[i].json);
            return;
        }
    }
    uint8_t zeros = leading_zeros(l);
    if (!l->as_key && json_scan_all(l->word + zeros, (size_t)(l->n_word - zeros))) {
        buf_append(out, l->word + zeros, (size_t)(l->n_word - zeros));
        return;
    }
    buf_putc(out, '"');
    buf_json_escape(out, l->word, l->n_word);
    buf_putc(out, '"');
}

static enum json_scan_rc word_byte(struct literal *l, char c, struct buf *out)
{
    if (l->quote == 'm') { /* the opening mark */
        if (c != l->mark[l->n_word]) {
            return SCAN_BAD;
        }
        l->n_word++;
        if (l->n_word == strlen(l->mark)) {
            l->state = L_STRING;
            l->n_word = 0;
            buf_putc(out, '"');
        }
        return SCAN_MORE;
    }
    if (word_char(c)) {
        if (l->n_word == sizeof(l->word)) {
            return SCAN_BAD;
        }
        l->word[l->n_word++] = c;
        return SCAN_MORE;
    }
    put_word(l, out);
    enum json_scan_rc rc = after_item(l, out);
    return rc == SCAN_MORE ? literal_byte(l, c, out) : SCAN_BEFORE;
}

/* ---- between ---- */

static enum json_scan_rc next_byte(struct literal *l, char c, struct buf *out)
{
    if (is_space(c)) {
        return SCAN_MORE;
    }
    if (c == ',') {
        l->state = top(l) == ']' || top(l) == 'T' ? L_VALUE : L_KEY;
        return SCAN_MORE;
    }
    if (c == top(l)) {
        return close_container(l, out);
    }
    if (c == ')' && top(l) == 'T') {
        l->close[l->depth - 1] = ']';
        return close_container(l, out);
    }
    return SCAN_BAD;
}

enum json_scan_rc literal_byte(struct literal *l, char c, struct buf *out)
{
    char between;

    switch (l->state) {
    case L_VALUE:
    case L_KEY:
        if (top(l) == 'T' && c == ')') {
            return next_byte(l, c, out);
        }
        return begin_item(l, c, l->state == L_KEY, out);
    case L_EQUAL:
        between = l->depth == 1 && l->equal ? l->equal : ':';
        if (c == between) {
            l->state = L_VALUE;
            return SCAN_MORE;
        }
        return is_space(c) ? SCAN_MORE : SCAN_BAD;
    case L_NEXT:
        return next_byte(l, c, out);
    case L_STRING:
        return string_byte(l, c, out);
    default:
        return word_byte(l, c, out);
    }
}

bool literal_all(const char *text, size_t len, struct buf *out)
{
    struct literal l = {.state = L_VALUE, .empty = true};
    enum json_scan_rc rc = SCAN_MORE;
    size_t i = 0;

    for (; i < len && rc == SCAN_MORE; i++) {
        rc = literal_byte(&l, text[i], out);
    }
    return rc == SCAN_DONE && i == len;
}
