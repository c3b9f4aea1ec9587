/* Reading regular expressions: the notation that ECMA-262 and PCRE share.
 *
 * Every alternative is read in a context: whether it stands at the start of the text
 * and whether at its end. There ^ and $ may occur; where a search meets none, any text
 * is put in their place. */
#include <stdlib.h>
#include <string.h>

#include "config/base/utf8.h"
#include "engine/constrain/builder.h"

enum { MAX_COUNT = 1 << 20, MAX_CLASS_RANGES = 1 << 14 };

struct pattern {
    struct grammar_builder *b;
    const char *start, *at, *end; /* the text, and the position in it */
    bool search, any_case;        /* see rx_parse_case */
    int32_t depth;                /* groups that are open */
    rx_id any;                    /* what stands before and after a match */
    struct code_range *range;     /* of the class being read, owned */
    int32_t n_ranges, cap_ranges; /* of them, and how many fit */
};

static rx_id fail(struct pattern *p, int rc, const char *what)
{
    grammar_build_fail(p->b, rc, "regular expression, at byte %zu: %s", (size_t)(p->at - p->start),
                       what);
    return 0;
}

static bool more(const struct pattern *p)
{
    return p->at < p->end && !grammar_build_failed(p->b);
}

static bool skip(struct pattern *p, const char *text)
{
    size_t n = strlen(text);

    if ((size_t)(p->end - p->at) < n || memcmp(p->at, text, n) != 0) {
        return false;
    }
    p->at += n;
    return true;
}

/* The character at the position, which was checked to be UTF-8. */
static uint32_t next_char(struct pattern *p)
{
    int len;
    uint32_t c = (uint32_t)utf8_get((const uint8_t *)p->at, &len);

    p->at += len;
    return c;
}

/* ---- classes ---- */

static void add_range(struct pattern *p, uint32_t first, uint32_t last)
{
    if (p->n_ranges >= MAX_CLASS_RANGES) {
        fail(p, ERR_INVALID, "a class of too many ranges");
        return;
    }
    if (budget_grow(&p->b->budget, &p->range, &p->cap_ranges, (int64_t)p->n_ranges + 1,
                    sizeof(*p->range))) {
        p->range[p->n_ranges++] = (struct code_range){first, last};
    }
}

static void add_ranges(struct pattern *p, const struct code_range *range, int32_t n, bool negated)
{
    uint32_t next = 0;

    for (int32_t i = 0; i < n; i++) {
        if (!negated) {
            add_range(p, range[i].first, range[i].last);
        } else if (range[i].first > next) {
            add_range(p, next, range[i].first - 1);
        }
        next = range[i].last + 1;
    }
    if (negated) {
        add_range(p, next, 0x10ffff);
    }
}

static bool add_named_class(struct pattern *p, char name)
{
    static const struct code_range digits[] = {{'0', '9'}};
    static const struct code_range words[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
    static const struct code_range spaces[] = {
        {9, 13},          {32, 32},         {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
        {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}, {0xfeff, 0xfeff},
    };
    bool negated = name < 'a';

    switch (name | 0x20) {
    case 'd':
        add_ranges(p, digits, ARRAY_LEN(digits), negated);
        return true;
    case 'w':
        add_ranges(p, words, ARRAY_LEN(words), negated);
        return true;
    case 's':
        add_ranges(p, spaces, ARRAY_LEN(spaces), negated);
        return true;
    default:
        return false;
    }
}

/* \p{Lu}, \pL, \P{..}: behind the letter. */
static void add_property(struct pattern *p, bool negated)
{
    const char *name = p->at, *end = p->at + 1;
    int32_t n;

    if (skip(p, "{")) {
        name = p->at;
        end = memchr(name, '}', (size_t)(p->end - name));
    }
    if (!end || end > p->end) {
        fail(p, ERR_INVALID, "\\p without a name");
        return;
    }
    bool inverted = name < end && *name == '^';
    name += inverted;
    const char *value = memchr(name, '=', (size_t)(end - name));
    bool general = value && ((value - name == 2 && memcmp(name, "gc", 2) == 0) ||
                             (value - name == 16 && memcmp(name, "General_Category", 16) == 0));
    name = general ? value + 1 : name;
    const struct code_range *range = unicode_category(name, (size_t)(end - name), &n);
    if (!range) {
        fail(p, ERR_UNSUPPORTED, "\\p takes general categories such as L, Lu or Nd");
        return;
    }
    add_ranges(p, range, n, negated != inverted);
    p->at = end < p->end && *end == '}' ? end + 1 : end;
}

static int hex_digit(char c)
{
    const char *digits = "0123456789abcdef";
    const char *at = c ? strchr(digits, c >= 'A' && c <= 'F' ? c | 0x20 : c) : NULL;

    return at ? (int)(at - digits) : -1;
}

/* `n` hexadecimal digits, or with a brace up to six and the brace. */
static uint32_t hex_number(struct pattern *p, int n)
{
    uint32_t value = 0;
    bool braced = skip(p, "{");

    for (int i = 0; i < (braced ? 6 : n); i++) {
        int digit = p->at < p->end ? hex_digit(*p->at) : -1;
        if (digit < 0) {
            if (braced && i > 0) {
                break;
            }
            fail(p, ERR_INVALID, "hexadecimal digits are missing");
            return 0;
        }
        value = value * 16 + (uint32_t)digit;
        p->at++;
    }
    if ((braced && !skip(p, "}")) || value > 0x10ffff) {
        fail(p, ERR_INVALID, "not a code point");
        return 0;
    }
    return value;
}

static uint32_t unicode_escape(struct pattern *p)
{
    uint32_t c = hex_number(p, 4);

    if (c >= 0xd800 && c < 0xdc00 && skip(p, "\\u")) {
        uint32_t low = hex_number(p, 4);
        c = low >= 0xdc00 && low <= 0xdfff ? 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00)
                                           : 0xd800;
    }
    if (c >= 0xd800 && c <= 0xdfff) {
        fail(p, ERR_INVALID, "a surrogate is no character");
    }
    return c;
}

/* The character that an escape stands for, behind the backslash. */
static uint32_t escaped_char(struct pattern *p, bool in_class)
{
    static const char names[] = "nrtfvae", codes[] = "\n\r\t\f\v\a\x1b";
    uint32_t c = next_char(p);
    const char *at = c && c < 128 ? strchr(names, (int)c) : NULL;

    if (at) {
        return (uint8_t)codes[at - names];
    }
    if (c == 'b' && in_class) {
        return '\b';
    }
    if (c == '0' && (p->at == p->end || *p->at < '0' || *p->at > '9')) {
        return 0;
    }
    if (c == 'x') {
        return hex_number(p, 2);
    }
    if (c == 'u') {
        return unicode_escape(p);
    }
    if (c == 'c' && p->at < p->end && ((*p->at | 0x20) >= 'a' && (*p->at | 0x20) <= 'z')) {
        return (uint32_t)*p->at++ & 31;
    }
    if (c < 128 && ((c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z'))) {
        bool known = strchr("123456789bBkAzZGKXRQENhHVCU", (int)c);
        fail(p, known ? ERR_UNSUPPORTED : ERR_INVALID,
             known ? "back references, boundaries and the like cannot be enforced"
                   : "an unknown escape");
    }
    return c;
}

/* One item of a class: a set is added, and false returned; or a character. */
static bool class_char(struct pattern *p, uint32_t *ret)
{
    if (*p->at != '\\') {
        *ret = next_char(p);
        return true;
    }
    if (++p->at == p->end) {
        fail(p, ERR_INVALID, "it ends in a backslash");
        return false;
    }
    if (*p->at == 'p' || *p->at == 'P') {
        add_property(p, *p->at++ == 'P');
        return false;
    }
    if (add_named_class(p, *p->at)) {
        p->at++;
        return false;
    }
    *ret = escaped_char(p, true);
    return true;
}

static void add_posix(struct pattern *p)
{
    static const struct {
        const char *name, *ranges; /* pairs of first and last */
    } posix[] = {
        {"[:alpha:]", "AZaz"},     {"[:digit:]", "09"},      {"[:alnum:]", "09AZaz"},
        {"[:upper:]", "AZ"},       {"[:lower:]", "az"},      {"[:space:]", "\t\r  "},
        {"[:punct:]", "!/:@[`{~"}, {"[:xdigit:]", "09AFaf"},
    };

    for (size_t i = 0; i < ARRAY_LEN(posix); i++) {
        if (skip(p, posix[i].name)) {
            for (const char *r = posix[i].ranges; *r; r += 2) {
                add_range(p, (uint8_t)r[0], (uint8_t)r[1]);
            }
            return;
        }
    }
    add_range(p, '[', '[');
    p->at++;
}

static rx_id finish_class(struct pattern *p, bool negated)
{
    int32_t n = p->n_ranges;

    for (int32_t i = 0; p->any_case && i < n; i++) {
        struct code_range range = p->range[i];
        for (uint32_t c = 'A'; c <= 'z'; c++) {
            bool letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
            if (letter && range.first <= c && c <= range.last) {
                add_range(p, c ^ 0x20, c ^ 0x20);
            }
        }
    }
    if (grammar_build_failed(p->b)) {
        return 0;
    }
    return rx_class(p->b, p->range, p->n_ranges, negated);
}

/* Behind the bracket. */
static rx_id parse_class(struct pattern *p)
{
    bool negated = skip(p, "^");
    uint32_t first, last;

    p->n_ranges = 0;
    while (more(p) && *p->at != ']') {
        if (*p->at == '[' && p->at + 1 < p->end && p->at[1] == ':') {
            add_posix(p);
            continue;
        }
        if (!class_char(p, &first)) {
            continue;
        }
        bool range = p->end - p->at >= 2 && p->at[0] == '-' && p->at[1] != ']';
        if (!range) {
            add_range(p, first, first);
            continue;
        }
        p->at++;
        if (!class_char(p, &last)) {
            add_range(p, first, first);
            add_range(p, '-', '-');
        } else if (last < first) {
            return fail(p, ERR_INVALID, "a range that runs backwards");
        } else {
            add_range(p, first, last);
        }
    }
    if (!skip(p, "]")) {
        return fail(p, ERR_INVALID, "a class without its closing bracket");
    }
    return finish_class(p, negated);
}

/* ---- repetition ---- */

static bool number(struct pattern *p, int32_t *ret)
{
    const char *from = p->at;
    int64_t n = 0;

    while (p->at < p->end && *p->at >= '0' && *p->at <= '9') {
        n = n * 10 + (*p->at++ - '0');
        n = MIN(n, INT32_MAX);
    }
    *ret = (int32_t)n;
    return p->at > from;
}

/* {n}, {n,} or {n,m}; otherwise the position stays. */
static bool braces(struct pattern *p, int32_t *min, int32_t *max)
{
    const char *from = p->at;

    p->at++;
    bool ok = number(p, min);
    *max = *min;
    if (ok && skip(p, ",") && !number(p, max)) {
        *max = -1;
    }
    if (ok && skip(p, "}")) {
        return true;
    }
    p->at = from;
    return false;
}

static bool quantifier(struct pattern *p, int32_t *min, int32_t *max)
{
    if (!more(p)) {
        return false;
    }
    *min = *p->at == '+';
    *max = *p->at == '?' ? 1 : -1;
    if (*p->at == '{') {
        return braces(p, min, max);
    }
    if (*p->at != '*' && *p->at != '+' && *p->at != '?') {
        return false;
    }
    p->at++;
    return true;
}

static rx_id repeated(struct pattern *p, rx_id x)
{
    int32_t min, max;

    while (x && quantifier(p, &min, &max)) {
        if (min > MAX_COUNT || max > MAX_COUNT) {
            return fail(p, ERR_INVALID, "a count of more than 1048576");
        }
        if (max >= 0 && max < min) {
            return fail(p, ERR_INVALID, "a count that runs backwards");
        }
        if (skip(p, "+")) {
            return fail(p, ERR_UNSUPPORTED, "possessive repetition cannot be enforced");
        }
        skip(p, "?"); /* how much is taken first does not change what matches */
        x = rx_repeat(p->b, x, min, max);
        if (more(p) && (*p->at == '*' || *p->at == '+' || *p->at == '?')) {
            return fail(p, ERR_INVALID, "nothing to repeat");
        }
    }
    return x;
}

/* ---- groups and alternatives ---- */

static rx_id alternatives(struct pattern *p, bool at_start, bool at_end);

/* Behind the parenthesis: what kind of group it is. */
static bool group_kind(struct pattern *p)
{
    if (!skip(p, "?") || skip(p, ":")) {
        return true;
    }
    skip(p, "P");
    bool named = skip(p, "<") && p->at < p->end && *p->at != '=' && *p->at != '!';
    const char *close = named ? memchr(p->at, '>', (size_t)(p->end - p->at)) : NULL;
    if (!close) {
        fail(p, ERR_UNSUPPORTED, "look-around and flags within cannot be enforced");
        return false;
    }
    p->at = close + 1;
    return true;
}

/* Whether the group that begins here has anchors, and where it ends. */
static bool scan_group(struct pattern *p, const char **ret_close)
{
    bool in_class = false, anchors = false;
    int depth = 1;
    const char *at = p->at;

    for (; at < p->end && depth > 0; at++) {
        if (*at == '\\') {
            at += at + 1 < p->end;
        } else if (in_class) {
            in_class = *at != ']';
        } else {
            in_class = *at == '[';
            depth += (*at == '(') - (*at == ')');
            anchors |= *at == '^' || *at == '$';
        }
    }
    budget_work(&p->b->budget, (at - p->at) / 8);
    *ret_close = at;
    return anchors;
}

/* A group, its quantifier not read; *ret_start, *ret_end: it dealt with the start, the
 * end of the text itself. */
static rx_id group(struct pattern *p, bool at_start, bool at_end, bool *ret_start, bool *ret_end)
{
    const char *close;

    if (!group_kind(p)) {
        return 0;
    }
    bool anchors = scan_group(p, &close);
    bool last = close == p->end || *close == '|' || *close == ')';
    *ret_start = anchors && at_start;
    *ret_end = anchors && at_end && last;
    if (++p->depth > p->b->limits.depth) {
        grammar_build_fail(p->b, ERR_INVALID, "regular expression: groups nest deeper than %d",
                           p->b->limits.depth);
        return 0;
    }
    rx_id x = alternatives(p, *ret_start, *ret_end);
    p->depth--;
    if (!skip(p, ")")) {
        return fail(p, ERR_INVALID, "a group without its closing parenthesis");
    }
    return x;
}

static rx_id atom(struct pattern *p)
{
    char c = *p->at;
    const struct code_range lines[] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

    if (c == '[') {
        p->at++;
        return parse_class(p);
    }
    if (c == '.') {
        p->at++;
        return rx_class(p->b, lines, ARRAY_LEN(lines), true);
    }
    if (c == '*' || c == '+' || c == '?') {
        return fail(p, ERR_INVALID, "nothing to repeat");
    }
    if (c == '\\' && p->end - p->at > 1 && p->at[1] == 'b') {
        return fail(p, ERR_UNSUPPORTED, "word boundaries cannot be enforced");
    }
    uint32_t code;
    p->n_ranges = 0;
    if (class_char(p, &code)) {
        add_range(p, code, code);
    }
    return finish_class(p, false);
}

static bool at_alternative_end(const struct pattern *p)
{
    return !more(p) || *p->at == '|' || *p->at == ')';
}

/* Anchors at the end of an alternative. */
static bool end_anchor(struct pattern *p, bool at_end)
{
    bool found = false;

    while (more(p) && *p->at == '$') {
        p->at++;
        found = true;
    }
    if (found && !(at_end && at_alternative_end(p))) {
        fail(p, ERR_UNSUPPORTED, "$ anywhere but at the end of an alternative");
    }
    return found;
}

/* Beside any text a repetition means as much with its smallest count. */
static rx_id fewest(struct pattern *p, rx_id x)
{
    struct rx_node n = p->b->rx.node[x];

    return n.kind == RX_REPEAT && p->search ? rx_repeat(p->b, n.a, n.b, n.b) : x;
}

static rx_id sequence(struct pattern *p, bool at_start, bool at_end)
{
    bool start = !at_start, end = !at_end, first = true; /* start, end: dealt with */
    rx_id all = RX_ID_EMPTY, in_front = all, last = all; /* all: in_front, then last */

    while (more(p) && *p->at == '^') {
        p->at++;
        if (!at_start) {
            return fail(p, ERR_UNSUPPORTED, "^ anywhere but at the start of an alternative");
        }
        start = true;
    }
    while (!at_alternative_end(p)) {
        bool does_start = false, does_end = false;
        rx_id x;
        if (*p->at == '^') {
            return fail(p, ERR_UNSUPPORTED, "^ anywhere but at the start of an alternative");
        }
        if (*p->at == '$') {
            end |= end_anchor(p, at_end);
            break;
        }
        if (*p->at == '(') {
            p->at++;
            x = group(p, at_start && first && !start, at_end, &does_start, &does_end);
        } else {
            x = atom(p);
        }
        int32_t min, max;
        const char *before = p->at;
        if ((does_start || does_end) && quantifier(p, &min, &max)) {
            p->at = before;
            return fail(p, ERR_UNSUPPORTED, "a repeated group with anchors");
        }
        x = repeated(p, x);
        if (first && !start && !does_start) {
            all = p->any;
            x = fewest(p, x);
        }
        start = true;
        first = false;
        end |= does_end;
        in_front = all;
        last = x;
        all = rx_concat(p->b, all, x);
    }
    all = start ? all : rx_concat(p->b, p->any, all);
    return end ? all : rx_concat(p->b, rx_concat(p->b, in_front, fewest(p, last)), p->any);
}

static rx_id alternatives(struct pattern *p, bool at_start, bool at_end)
{
    rx_id all = sequence(p, at_start, at_end);

    while (skip(p, "|")) {
        all = rx_or(p->b, all, sequence(p, at_start, at_end));
    }
    return all;
}

rx_id rx_parse_case(struct grammar_builder *b, const char *pattern, size_t len, bool search,
                    bool any_case)
{
    struct pattern p = {.b = b, .start = pattern, .at = pattern, .end = pattern + len};

    if (grammar_build_failed(b)) {
        return 0;
    }
    if (!utf8_valid(pattern, len)) {
        return fail(&p, ERR_INVALID, "not UTF-8");
    }
    p.search = search;
    p.any_case = any_case;
    p.any = search ? rx_any(b) : RX_ID_EMPTY;
    rx_id x = alternatives(&p, true, true);
    if (p.at < p.end && !grammar_build_failed(b)) {
        fail(&p, ERR_INVALID, "a closing parenthesis without a group");
    }
    budget_free(&b->budget, p.range, (size_t)p.cap_ranges * sizeof(*p.range));
    return grammar_build_failed(b) ? 0 : x;
}

rx_id rx_parse(struct grammar_builder *b, const char *pattern, size_t len, bool search)
{
    return rx_parse_case(b, pattern, len, search, false);
}
