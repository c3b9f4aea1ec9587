/* See format.h: a validator of JSON that is read as it comes (RFC 8259). Control
 * characters are taken inside strings, because models write them; the
 * writer of the arguments escapes them. */
#include <string.h>

#include "models/chat/format/format.h"

enum {
    E_VALUE,
    E_FIRST_ITEM, /* a value or the end of a list */
    E_FIRST_KEY,  /* a key or the end of an object */
    E_KEY,
    E_COLON,
    E_NEXT, /* a comma or the end of a container */
};
enum { S_BETWEEN, S_STRING, S_NUMBER, S_WORD, S_DONE };
/* Where a number may end: N_ZERO, N_INT, N_FRACTION, N_POWER. */
enum { N_MINUS, N_ZERO, N_INT, N_POINT, N_FRACTION, N_E, N_SIGN, N_POWER };

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool in_object(const struct json_scan *s)
{
    return s->depth && (s->objects >> (s->depth - 1) & 1);
}

static enum json_scan_rc value_ended(struct json_scan *s)
{
    s->state = s->depth ? S_BETWEEN : S_DONE;
    s->expect = E_NEXT;
    return s->depth ? SCAN_MORE : SCAN_DONE;
}

static enum json_scan_rc open_container(struct json_scan *s, bool object)
{
    if (s->depth == JSON_DEPTH) {
        return SCAN_BAD;
    }
    uint64_t bit = (uint64_t)1 << s->depth++;
    s->objects = object ? s->objects | bit : s->objects & ~bit;
    s->expect = object ? E_FIRST_KEY : E_FIRST_ITEM;
    return SCAN_MORE;
}

static enum json_scan_rc begin_value(struct json_scan *s, char c)
{
    static const char *const WORDS[] = {"true", "false", "null"};

    if (c == '{' || c == '[') {
        return open_container(s, c == '{');
    }
    if (c == '"') {
        s->state = S_STRING;
        return SCAN_MORE;
    }
    if (c == '-' || is_digit(c)) {
        s->state = S_NUMBER;
        s->number = c == '-' ? N_MINUS : c == '0' ? N_ZERO : N_INT;
        return SCAN_MORE;
    }
    for (size_t i = 0; i < ARRAY_LEN(WORDS); i++) {
        if (c == WORDS[i][0]) {
            s->state = S_WORD;
            s->word = WORDS[i] + 1;
            return SCAN_MORE;
        }
    }
    return SCAN_BAD;
}

static enum json_scan_rc between(struct json_scan *s, char c)
{
    if (is_space(c)) {
        return SCAN_MORE;
    }
    bool may_end = s->expect == E_NEXT || s->expect == E_FIRST_ITEM || s->expect == E_FIRST_KEY;
    if (may_end && s->depth && c == (in_object(s) ? '}' : ']')) {
        s->depth--;
        return value_ended(s);
    }
    switch (s->expect) {
    case E_VALUE:
    case E_FIRST_ITEM:
        return begin_value(s, c);
    case E_FIRST_KEY:
    case E_KEY:
        if (c != '"') {
            return SCAN_BAD;
        }
        s->state = S_STRING;
        s->expect = E_COLON;
        return SCAN_MORE;
    case E_COLON:
        s->expect = E_VALUE;
        return c == ':' ? SCAN_MORE : SCAN_BAD;
    default:
        s->expect = in_object(s) ? E_KEY : E_VALUE;
        return c == ',' ? SCAN_MORE : SCAN_BAD;
    }
}

static enum json_scan_rc in_string(struct json_scan *s, char c)
{
    if (s->escape > 1) {
        s->escape = s->escape == 2 ? 0 : s->escape - 1;
        bool hex = is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
        return hex ? SCAN_MORE : SCAN_BAD;
    }
    if (s->escape == 1) {
        s->escape = c == 'u' ? 5 : 0;
        return c && strchr("\"\\/bfnrtu", c) ? SCAN_MORE : SCAN_BAD;
    }
    if (c == '\\') {
        s->escape = 1;
    } else if (c == '"') {
        if (s->expect == E_COLON) {
            s->state = S_BETWEEN;
            return SCAN_MORE;
        }
        return value_ended(s);
    }
    return SCAN_MORE;
}

/* The state of a number after one more character; -1: it does not belong to it. */
static int number_next(uint8_t at, char c)
{
    bool digit = is_digit(c), e = c == 'e' || c == 'E';

    switch (at) {
    case N_MINUS:
        return digit ? c == '0' ? N_ZERO : N_INT : -1;
    case N_ZERO:
        return c == '.' ? N_POINT : e ? N_E : -1;
    case N_INT:
        return digit ? N_INT : c == '.' ? N_POINT : e ? N_E : -1;
    case N_POINT:
        return digit ? N_FRACTION : -1;
    case N_FRACTION:
        return digit ? N_FRACTION : e ? N_E : -1;
    case N_E:
        return digit ? N_POWER : c == '+' || c == '-' ? N_SIGN : -1;
    default:
        return digit ? N_POWER : -1;
    }
}

static enum json_scan_rc in_number(struct json_scan *s, char c)
{
    int next = number_next(s->number, c);

    if (next >= 0) {
        s->number = (uint8_t)next;
        return SCAN_MORE;
    }
    uint8_t at = s->number;
    if (at != N_ZERO && at != N_INT && at != N_FRACTION && at != N_POWER) {
        return SCAN_BAD;
    }
    return value_ended(s) == SCAN_DONE ? SCAN_BEFORE : between(s, c);
}

enum json_scan_rc json_scan_byte(struct json_scan *s, char c)
{
    switch (s->state) {
    case S_BETWEEN:
        return between(s, c);
    case S_STRING:
        return in_string(s, c);
    case S_NUMBER:
        return in_number(s, c);
    case S_WORD:
        if (c != *s->word) {
            return SCAN_BAD;
        }
        s->word++;
        return *s->word ? SCAN_MORE : value_ended(s);
    default:
        return SCAN_BAD;
    }
}

bool json_scan_in_string(const struct json_scan *s)
{
    return s->state == S_STRING;
}

bool json_scan_all(const char *text, size_t len)
{
    struct json_scan s = {0};
    bool done = false;

    for (size_t i = 0; i < len; i++) {
        if (done) {
            if (!is_space(text[i])) {
                return false;
            }
            continue;
        }
        enum json_scan_rc rc = json_scan_byte(&s, text[i]);
        if (rc == SCAN_BAD || (s.state == S_STRING && (unsigned char)text[i] < 0x20)) {
            return false;
        }
        done = rc == SCAN_DONE || rc == SCAN_BEFORE;
        if (rc == SCAN_BEFORE && !is_space(text[i])) {
            return false;
        }
    }
    /* A number at the outermost level has no end of its own. */
    return done || (s.state == S_NUMBER && !s.depth && json_scan_byte(&s, ' ') == SCAN_BEFORE);
}
