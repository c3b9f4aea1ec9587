/* Reading grammars in a dialect of Lark's notation (lark.h).
 *
 * A name becomes a rule of the builder where it is first met, and is defined later. In
 * a rule, what %ignore names may follow each terminal, and stand in front of the first.
 * */
#include "engine/constrain/notation/lark.h"

#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "config/base/utf8.h"
#include "engine/constrain/builder.h"

enum { MAX_NAME = 128, MAX_COUNT = 1 << 20, MAX_PARTS = 1 << 16, MAX_UNTIL = 64 };

struct name {
    const char *text; /* in the grammar */
    int32_t len;      /* its bytes */
    int32_t line;     /* of its first use or definition */
    sym_id rule;      /* what it stands for */
    bool defined, terminal;
    int32_t first_use, n_uses; /* terminals in a terminal: use[..] */
    uint8_t state;             /* of the search for recursion: 0, 1 open, 2 done */
};

struct lark {
    struct grammar_builder *b;
    const char *at, *end; /* the position in the text */
    int32_t line, depth;  /* for messages; parentheses that are open */
    bool in_terminal;     /* a terminal is being defined */
    int32_t defining;     /* the name that is */
    struct name *name;    /* [n_names], owned */
    int32_t n_names, cap_names;
    int32_t *use, n_uses, cap_uses;   /* names, owned */
    sym_id *part, n_parts, cap_parts; /* stack of parts, owned */
    sym_id ignored;                   /* what may follow a terminal */
    rx_id ignore;                     /* one thing that is ignored */
    char *text;                       /* of the string that was read last, owned */
    int32_t text_len, cap_text;
};

static sym_id fail(struct lark *l, int rc, const char *what)
{
    grammar_build_fail(l->b, rc, "Lark grammar, line %d: %s", l->line, what);
    return 0;
}

/* ---- the text ---- */

static void skip_blanks(struct lark *l)
{
    while (l->at < l->end) {
        bool comment = *l->at == '#' || (l->end - l->at > 1 && l->at[0] == '/' && l->at[1] == '/');
        if (comment) {
            while (l->at < l->end && *l->at != '\n') {
                l->at++;
            }
        } else if (*l->at == '\n' || *l->at == ' ' || *l->at == '\t' || *l->at == '\r') {
            l->line += *l->at == '\n';
            l->at++;
        } else {
            return;
        }
    }
}

static bool skip(struct lark *l, const char *what)
{
    size_t n = strlen(what);

    skip_blanks(l);
    if ((size_t)(l->end - l->at) < n || memcmp(l->at, what, n) != 0) {
        return false;
    }
    l->at += n;
    return true;
}

static char peek(struct lark *l)
{
    skip_blanks(l);
    return l->at < l->end && !grammar_build_failed(l->b) ? *l->at : '\0';
}

static bool name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

/* The bytes of the name at the position; 0: there is none. */
static int32_t name_len(struct lark *l)
{
    int32_t n = 0;

    skip_blanks(l);
    while (l->at + n < l->end && name_char(l->at[n])) {
        n++;
    }
    return n > 0 && l->at[0] >= '0' && l->at[0] <= '9' ? 0 : n;
}

static bool number(struct lark *l, int32_t *ret)
{
    int64_t n = 0;

    skip_blanks(l);
    const char *from = l->at;
    while (l->at < l->end && *l->at >= '0' && *l->at <= '9') {
        n = n * 10 + (*l->at++ - '0');
        if (n > MAX_COUNT) {
            fail(l, ERR_INVALID, "a count of more than 1048576");
            return false;
        }
    }
    *ret = (int32_t)n;
    return l->at > from;
}

/* ---- names ---- */

static bool is_terminal(const char *text, int32_t len)
{
    for (int32_t i = 0; i < len; i++) {
        if (text[i] != '_') {
            return text[i] >= 'A' && text[i] <= 'Z';
        }
    }
    return false;
}

static int32_t find_name(struct lark *l, const char *text, int32_t len)
{
    if (len > MAX_NAME) {
        fail(l, ERR_INVALID, "a name of more than 128 characters");
        return -1;
    }
    grammar_build_work(l->b, 1 + l->n_names / 4);
    for (int32_t i = 0; i < l->n_names; i++) {
        if (l->name[i].len == len && memcmp(l->name[i].text, text, (size_t)len) == 0) {
            return i;
        }
    }
    if (!budget_grow(&l->b->budget, &l->name, &l->cap_names, (int64_t)l->n_names + 1,
                     sizeof(*l->name))) {
        return -1;
    }
    l->name[l->n_names] = (struct name){.text = text,
                                        .len = len,
                                        .line = l->line,
                                        .rule = sym_rule(l->b),
                                        .terminal = is_terminal(text, len)};
    return l->n_names++;
}

/* ---- strings and expressions ---- */

static void push_text(struct lark *l, const char *bytes, size_t n)
{
    if (budget_grow(&l->b->budget, &l->text, &l->cap_text, (int64_t)l->text_len + (int64_t)n + 1,
                    1)) {
        memcpy(l->text + l->text_len, bytes, n);
        l->text_len += (int32_t)n;
        l->text[l->text_len] = '\0';
    }
}

static void push_code(struct lark *l, int n_digits)
{
    char digits[9] = "", utf8[4], *end;

    if (l->end - l->at < n_digits) {
        fail(l, ERR_INVALID, "an escape that is cut off");
        return;
    }
    memcpy(digits, l->at, (size_t)n_digits);
    long code = strtol(digits, &end, 16);
    if (end != digits + n_digits || digits[0] == '-' || digits[0] == '+' || digits[0] == ' ' ||
        code < 0 || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
        fail(l, ERR_INVALID, "an escape that is no character");
        return;
    }
    l->at += n_digits;
    push_text(l, utf8, (size_t)utf8_put(utf8, (int32_t)code));
}

static void read_escape(struct lark *l)
{
    static const char names[] = "nrtfbv\"\\/'", codes[] = "\n\r\t\f\b\v\"\\/'";
    char c = l->at < l->end ? *l->at++ : '\0';
    const char *at = c ? strchr(names, c) : NULL;

    if (at) {
        push_text(l, &codes[at - names], 1);
    } else if (c == 'x' || c == 'u' || c == 'U') {
        push_code(l, c == 'x' ? 2 : c == 'u' ? 4 : 8);
    } else {
        fail(l, ERR_INVALID, "an unknown escape in a string");
    }
}

/* Read a string into l->text; false: there is none, or an error. */
static bool read_string(struct lark *l)
{
    l->text_len = 0;
    if (!skip(l, "\"")) {
        return false;
    }
    push_text(l, "", 0);
    while (l->at < l->end && *l->at != '"' && *l->at != '\n') {
        if (grammar_build_failed(l->b)) {
            return false;
        }
        if (*l->at == '\\') {
            l->at++;
            read_escape(l);
        } else {
            push_text(l, l->at++, 1);
        }
    }
    if (l->at == l->end || *l->at != '"') {
        fail(l, ERR_INVALID, "a string without its closing quote");
        return false;
    }
    l->at++;
    return !grammar_build_failed(l->b);
}

static bool letter_at(const struct lark *l, char c)
{
    return l->at < l->end && *l->at == c && !(l->at + 1 < l->end && name_char(l->at[1]));
}

/* "a".."z", once the first string is read. */
static rx_id string_range(struct lark *l)
{
    int n, m;
    uint32_t first = (uint32_t)utf8_get((const uint8_t *)l->text, &n);
    int32_t len = l->text_len;

    if (!read_string(l)) {
        return (rx_id)fail(l, ERR_INVALID, "a range without its last character");
    }
    uint32_t last = (uint32_t)utf8_get((const uint8_t *)l->text, &m);
    if (n != len || m != l->text_len || last < first) {
        return (rx_id)fail(l, ERR_INVALID, "a range is of two characters in their order");
    }
    return rx_class(l->b, &(struct code_range){first, last}, 1, false);
}

static rx_id string_rx(struct lark *l)
{
    if (!read_string(l)) {
        return 0;
    }
    if (letter_at(l, 'i')) {
        l->at++;
        return rx_bytes_any_case(l->b, l->text, (size_t)l->text_len);
    }
    if (l->text_len > 0 && skip(l, "..")) {
        return string_range(l);
    }
    return rx_bytes(l->b, l->text, (size_t)l->text_len);
}

static rx_id expression_rx(struct lark *l)
{
    const char *from = ++l->at;
    bool any_case = false, in_class = false;

    while (l->at < l->end && *l->at != '\n' && (*l->at != '/' || in_class)) {
        in_class = *l->at == '[' || (in_class && *l->at != ']');
        l->at += *l->at == '\\' && l->at + 1 < l->end ? 2 : 1;
    }
    if (l->at >= l->end || *l->at != '/') {
        return (rx_id)fail(l, ERR_INVALID, "an expression without its closing slash");
    }
    const char *end = l->at++;
    for (; l->at < l->end && *l->at >= 'a' && *l->at <= 'z'; l->at++) {
        any_case |= *l->at == 'i';
        if (*l->at != 'i' && *l->at != 'u') {
            return (rx_id)fail(l, ERR_UNSUPPORTED, "of an expression's flags only i is enforced");
        }
    }
    return rx_parse_case(l->b, from, (size_t)(end - from), false, any_case);
}

/* ---- parts of a rule ---- */

static sym_id alternatives(struct lark *l);

/* A terminal, and in a rule what is ignored behind it. */
static sym_id terminal(struct lark *l, sym_id s)
{
    sym_id parts[] = {s, l->ignored};

    return l->in_terminal ? s : sym_concat(l->b, parts, 2);
}

static sym_id until_call(struct lark *l)
{
    const char *until[MAX_UNTIL];
    char *copy[MAX_UNTIL];
    int32_t n = 0;
    sym_id s = 0;

    do {
        if (n == MAX_UNTIL || !read_string(l) || l->text_len == 0 ||
            memchr(l->text, '\0', (size_t)l->text_len)) {
            fail(l, ERR_INVALID, "until takes up to 64 strings, none of them empty");
            break;
        }
        copy[n] = strdup(l->text);
        until[n] = copy[n];
        n += copy[n] != NULL;
    } while (skip(l, ","));
    if (!grammar_build_failed(l->b)) {
        s = sym_until(l->b, until, n);
    }
    for (int32_t i = 0; i < n; i++) {
        free(copy[i]);
    }
    return s;
}

/* name(..): until, marker, text. */
static sym_id call(struct lark *l, const char *name, int32_t len)
{
    sym_id s = 0;

    if (len == 5 && memcmp(name, "until", 5) == 0) {
        s = until_call(l);
    } else if (len == 4 && memcmp(name, "text", 4) == 0) {
        s = sym_terminal(l->b, rx_any(l->b));
    } else if (len == 6 && memcmp(name, "marker", 6) == 0) {
        s = read_string(l) ? sym_marker(l->b, l->text, (size_t)l->text_len)
                           : fail(l, ERR_INVALID, "marker takes a string");
    } else {
        return fail(l, ERR_UNSUPPORTED, "of calls there are until, marker and text");
    }
    return skip(l, ")") ? s : fail(l, ERR_INVALID, "a call without its closing parenthesis");
}

static sym_id named(struct lark *l)
{
    const char *text = l->at;
    int32_t len = name_len(l);

    l->at += len;
    if (l->at < l->end && *l->at == '(') {
        l->at++;
        return terminal(l, call(l, text, len));
    }
    int32_t i = find_name(l, text, len);
    if (i < 0) {
        return 0;
    }
    if (l->in_terminal && !l->name[i].terminal) {
        return fail(l, ERR_INVALID, "a terminal cannot hold a rule");
    }
    if (l->in_terminal && budget_grow(&l->b->budget, &l->use, &l->cap_uses, (int64_t)l->n_uses + 1,
                                      sizeof(*l->use))) {
        l->use[l->n_uses++] = i;
    }
    return l->name[i].terminal ? terminal(l, l->name[i].rule) : l->name[i].rule;
}

static sym_id json_part(struct lark *l)
{
    struct json *j = malloc(sizeof(*j));
    struct err e = {0};
    sym_id s = 0;

    skip_blanks(l);
    if (!j) {
        budget_fail(&l->b->budget, ERR_NOMEM, NULL);
        return 0;
    }
    json_init(j, l->at, (size_t)(l->end - l->at), "%json", &e);
    j->takes_nul = true;
    if (json_skip(j)) {
        s = json_schema_build(l->b, l->at, (size_t)(j->at - l->at));
        for (; l->at < j->at; l->at++) {
            l->line += *l->at == '\n';
        }
    } else {
        grammar_build_fail(l->b, ERR_INVALID, "Lark grammar, line %d: %s", l->line, e.text);
    }
    free(j);
    return terminal(l, s);
}

static sym_id grouped(struct lark *l, char close)
{
    char text[2] = {close, '\0'};

    l->at++;
    if (++l->depth > l->b->limits.depth) {
        return fail(l, ERR_INVALID, "parentheses nest too deep");
    }
    sym_id s = alternatives(l);
    l->depth--;
    if (!skip(l, text)) {
        return fail(l, ERR_INVALID, "a parenthesis or bracket that is not closed");
    }
    return close == ']' ? sym_repeat(l->b, s, 0, 1) : s;
}

static sym_id atom(struct lark *l)
{
    char c = peek(l);

    if (c == '(' || c == '[') {
        return grouped(l, c == '(' ? ')' : ']');
    }
    if (c == '"') {
        return terminal(l, sym_terminal(l->b, string_rx(l)));
    }
    if (c == '/') {
        return terminal(l, sym_terminal(l->b, expression_rx(l)));
    }
    if (skip(l, "%json")) {
        return l->in_terminal ? fail(l, ERR_INVALID, "%json in a terminal") : json_part(l);
    }
    if (name_len(l) > 0) {
        return named(l);
    }
    return fail(l, ERR_INVALID, "a rule's part was expected");
}

/* {n}, {n,}, {n,m}; ~ n, ~ n..m. */
static bool count(struct lark *l, int32_t *min, int32_t *max)
{
    bool braces = skip(l, "{");

    if (!braces && !skip(l, "~")) {
        return false;
    }
    bool ok = number(l, min);
    *max = *min;
    if (ok && skip(l, braces ? "," : "..") && !number(l, max)) {
        *max = -1;
        ok = braces;
    }
    ok = ok && (!braces || skip(l, "}")) && (*max < 0 || *max >= *min);
    if (!ok) {
        fail(l, ERR_INVALID, "a count is {n}, {n,} or {n,m}");
    }
    return ok;
}

static sym_id repeated(struct lark *l)
{
    sym_id s = atom(l);
    int32_t min, max;

    while (s && peek(l)) {
        if (skip(l, "*")) {
            s = sym_repeat(l->b, s, 0, -1);
        } else if (skip(l, "+")) {
            s = sym_repeat(l->b, s, 1, -1);
        } else if (skip(l, "?")) {
            s = sym_repeat(l->b, s, 0, 1);
        } else if (count(l, &min, &max)) {
            s = sym_repeat(l->b, s, min, max);
        } else {
            break;
        }
    }
    return s;
}

/* Whether a definition begins here: a name, perhaps with a priority, and a colon. */
static bool at_definition(struct lark *l)
{
    struct lark ahead = *l;

    if (peek(&ahead) == '?' || peek(&ahead) == '!') {
        ahead.at++;
    }
    int32_t n = name_len(&ahead);
    ahead.at += n;
    if (n > 0 && ahead.at < ahead.end && *ahead.at == '.') {
        ahead.at++;
        while (ahead.at < ahead.end && *ahead.at >= '0' && *ahead.at <= '9') {
            ahead.at++;
        }
    }
    return n > 0 && peek(&ahead) == ':';
}

static bool at_part(struct lark *l)
{
    char c = peek(l);

    if (c == '%') {
        return l->end - l->at >= 5 && memcmp(l->at, "%json", 5) == 0;
    }
    return c && !strchr("|)]-", c) && !at_definition(l);
}

static bool push_part(struct lark *l, sym_id s)
{
    if (!s || l->n_parts >= MAX_PARTS ||
        !budget_grow(&l->b->budget, &l->part, &l->cap_parts, (int64_t)l->n_parts + 1,
                     sizeof(*l->part))) {
        fail(l, ERR_INVALID, "a rule of too many parts");
        return false;
    }
    l->part[l->n_parts++] = s;
    return true;
}

static sym_id sequence(struct lark *l)
{
    int32_t base = l->n_parts;

    while (at_part(l) && push_part(l, repeated(l))) {
    }
    if (skip(l, "->")) { /* a name for the tree that is not built */
        l->at += name_len(l);
    }
    sym_id s = sym_concat(l->b, l->part + base, l->n_parts - base);
    l->n_parts = base;
    return grammar_build_failed(l->b) ? 0 : s;
}

static sym_id alternatives(struct lark *l)
{
    int32_t base = l->n_parts;

    do {
        if (!push_part(l, sequence(l))) {
            return 0;
        }
    } while (skip(l, "|"));
    sym_id s = sym_or(l->b, l->part + base, l->n_parts - base);
    l->n_parts = base;
    return s;
}

/* ---- definitions ---- */

static void definition(struct lark *l)
{
    if (peek(l) == '?' || peek(l) == '!') {
        l->at++;
    }
    int32_t i = find_name(l, l->at, name_len(l));
    if (i < 0) {
        return;
    }
    l->at += l->name[i].len;
    while (*l->at != ':') { /* a priority and blanks; at_definition saw the colon */
        skip_blanks(l);
        l->at += *l->at != ':';
    }
    l->at++;
    if (l->name[i].defined) {
        fail(l, ERR_INVALID, "a name that is defined twice");
        return;
    }
    l->name[i].defined = true;
    l->in_terminal = l->name[i].terminal;
    l->name[i].first_use = l->n_uses;
    sym_id body = alternatives(l);
    l->name[i].n_uses = l->n_uses - l->name[i].first_use;
    sym_define(l->b, l->name[i].rule, body);
}

static void ignore_statement(struct lark *l, sym_id *ignored)
{
    l->in_terminal = true;
    sym_id parts[] = {*ignored, alternatives(l)};

    *ignored = *ignored ? sym_or(l->b, parts, 2) : parts[1];
}

/* Terminals that hold each other are no regular language. */
static void check_recursion(struct lark *l, int32_t i, int32_t depth)
{
    struct name *n = &l->name[i];

    if (n->state == 2 || grammar_build_failed(l->b)) {
        return;
    }
    l->line = n->line;
    if (n->state == 1 || depth > l->b->limits.depth) {
        fail(l, ERR_INVALID,
             n->state == 1 ? "a terminal that holds itself" : "terminals nest too deep");
        return;
    }
    n->state = 1;
    for (int32_t k = 0; k < n->n_uses; k++) {
        check_recursion(l, l->use[n->first_use + k], depth + 1);
    }
    n->state = 2;
}

static sym_id finish(struct lark *l, sym_id ignored)
{
    sym_id start = 0;

    for (int32_t i = 0; i < l->n_names && !grammar_build_failed(l->b); i++) {
        const struct name *n = &l->name[i];
        if (!n->defined) {
            grammar_build_fail(l->b, ERR_INVALID, "Lark grammar, line %d: %.*s is not defined",
                               n->line, n->len, n->text);
        }
        if (n->terminal) {
            check_recursion(l, i, 0);
        }
        if (n->len == 5 && memcmp(n->text, "start", 5) == 0) {
            start = n->rule;
        }
    }
    if (!start && !grammar_build_failed(l->b)) {
        grammar_build_fail(l->b, ERR_INVALID, "Lark grammar: there is no rule named start");
    }
    ignored = ignored ? sym_repeat(l->b, ignored, 0, -1) : sym_terminal(l->b, rx_empty(l->b));
    sym_define(l->b, l->ignored, ignored);
    sym_id parts[] = {l->ignored, start};
    return grammar_build_failed(l->b) ? 0 : sym_concat(l->b, parts, 2);
}

static sym_id read_grammar(struct lark *l)
{
    sym_id ignored = 0;

    while (peek(l)) {
        if (skip(l, "%ignore")) {
            ignore_statement(l, &ignored);
        } else if (*l->at == '%') {
            return fail(l, ERR_UNSUPPORTED, "of directives there are %ignore and %json");
        } else if (at_definition(l)) {
            definition(l);
        } else {
            return fail(l, ERR_INVALID, "a definition, \"name: ...\", was expected");
        }
    }
    return grammar_build_failed(l->b) ? 0 : finish(l, ignored);
}

sym_id lark_build(struct grammar_builder *b, const char *text, size_t len)
{
    struct lark l = {.b = b, .at = text, .end = text + len, .line = 1};
    sym_id start = 0;

    if (!utf8_valid(text, len)) {
        grammar_build_fail(b, ERR_INVALID, "Lark grammar: not UTF-8");
        return 0;
    }
    l.ignored = sym_rule(b);
    if (l.ignored && budget_grow(&b->budget, &l.part, &l.cap_parts, 1, sizeof(*l.part))) {
        start = read_grammar(&l);
    }
    free(l.name);
    free(l.use);
    free(l.part);
    free(l.text);
    return start;
}
