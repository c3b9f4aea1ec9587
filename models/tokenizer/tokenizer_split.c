/* Pre-tokenizers: stages that split a piece of text into smaller ones, down to the
 * model's words.
 *
 * Regular expressions come from the model's files and run over clients' text. PCRE2
 * runs them, compiled by its JIT, under a match limit: an expression that backtracks
 * without end is an error of that request, not a stalled thread. The files use
 * Oniguruma's dialect, in which \s, \w and scripts stand for other characters than in
 * PCRE2, and classes have intersections; these are written out.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

enum { MATCH_LIMIT = 20 * 1000 * 1000, MATCH_HEAP_KIB = 64 * 1024 };

/* Unicode's White_Space (PCRE2's \s also includes U+180E), and Oniguruma's word
 * characters: letters, marks, decimal digits, letter numbers, connectors and a few
 * single characters. */
#define SPACE_CLASS "\\t-\\r \\x{85}\\p{Z}"
#define WORD_CLASS                                                                                 \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}\\x{24B6}-\\x{24E9}\\x{" \
    "1F130}-\\x{1F149}"                                                                            \
    "\\x{1F150}-\\x{1F169}"                                                                        \
    "\\x{1F170}-\\x{1F189}"

/* The class that replaces an escape; NULL: the escape is kept. A negated one inside
 * brackets is left to PCRE2. */
static const char *written_out(char escape, bool in_class)
{
    switch (escape) {
    case 's':
        return in_class ? SPACE_CLASS : "[" SPACE_CLASS "]";
    case 'w':
        return in_class ? WORD_CLASS : "[" WORD_CLASS "]";
    case 'S':
        return in_class ? NULL : "[^" SPACE_CLASS "]";
    case 'W':
        return in_class ? NULL : "[^" WORD_CLASS "]";
    default:
        return NULL;
    }
}

/* An expression that is being written. */
struct rewritten {
    char text[TOKENIZER_PATTERN_BYTES * 2]; /* [n] */
    size_t n;
    bool full;
};

static void put(struct rewritten *w, const char *text, size_t len)
{
    w->full = w->full || len > sizeof(w->text) - w->n;
    if (!w->full) {
        memcpy(w->text + w->n, text, len);
        w->n += len;
    }
}

/* A script by its name, as in \p{Han}: PCRE2 from 10.40 on takes it for the characters
 * that are used with the script, Oniguruma for those of it. */
static bool put_script(struct rewritten *w, const char *in, size_t len)
{
    static const char *const SCRIPTS[] = {
        "Han",    "Hiragana", "Katakana", "Hangul", "Bopomofo",   "Latin",   "Greek", "Cyrillic",
        "Arabic", "Hebrew",   "Thai",     "Lao",    "Devanagari", "Bengali", "Tamil", "Telugu"};
    const char *end = memchr(in, '}', len);

    if (PCRE2_MAJOR * 100 + PCRE2_MINOR < 1040 || len < 4 || (in[1] != 'p' && in[1] != 'P') ||
        in[2] != '{' || !end) {
        return false;
    }
    bool negated = in[3] == '^';
    const char *name = in + 3 + negated;
    for (size_t i = 0; i < ARRAY_LEN(SCRIPTS); i++) {
        if (strlen(SCRIPTS[i]) == (size_t)(end - name) &&
            memcmp(name, SCRIPTS[i], (size_t)(end - name)) == 0) {
            put(w, in, 3 + negated);
            put(w, "sc:", 3);
            put(w, name, (size_t)(end + 1 - name));
            return true;
        }
    }
    return false;
}

/* Write one character or escape; returns the bytes read. */
static size_t put_one(struct rewritten *w, const char *in, size_t len, bool in_class)
{
    if (in[0] != '\\' || len < 2) {
        put(w, in, 1);
        return 1;
    }
    if (put_script(w, in, len)) {
        return (size_t)((const char *)memchr(in, '}', len) + 1 - in);
    }
    const char *other = written_out(in[1], in_class);
    put(w, other ? other : in, other ? strlen(other) : 2);
    return 2;
}

/* The bytes of a class's inside up to one of `ends`, none of them escaped. */
static size_t class_span(const char *in, size_t len, const char *ends)
{
    size_t i = 0;

    while (i < len &&
           !(strchr(ends, in[i]) && (in[i] != '&' || (i + 1 < len && in[i + 1] == '&')))) {
        i += in[i] == '\\' ? 2 : 1;
    }
    return MIN(i, len);
}

/* The intersection of two classes, which PCRE2 lacks: [a&&[^b]] and [a&&b] become
 * (?:(?![b])[a]) and (?:(?=[b])[a]). Returns the bytes read; 0: it is none; -1: of
 * another form. */
static int64_t put_intersection(struct rewritten *w, const char *in, size_t len)
{
    size_t a = class_span(in + 1, len - 1, "&[]"), at = 1 + a + 2;

    if (at > len || in[1 + a] != '&') {
        return 0;
    }
    bool nested = at < len && in[at] == '[';
    bool negated = nested && at + 1 < len && in[at + 1] == '^';
    const char *b = in + at + nested + negated;
    size_t n = class_span(b, (size_t)(in + len - b), "&[]"), end = (size_t)(b - in) + n;
    if (a == 0 || in[1] == '^' || n == 0 || end + 1 + nested > len ||
        memcmp(in + end, "]]", 1 + (size_t)nested) != 0) {
        return -1;
    }
    put(w, negated ? "(?:(?![" : "(?:(?=[", 7);
    for (size_t i = 0; i < n;) {
        i += put_one(w, b + i, n - i, true);
    }
    put(w, "])[", 3);
    for (size_t i = 0; i < a;) {
        i += put_one(w, in + 1 + i, a - i, true);
    }
    put(w, "])", 2);
    return (int64_t)(end + 1 + nested);
}

/* Write the expression with what PCRE2 reads in another way replaced. */
static int rewrite(struct rewritten *w, const char *in, size_t len, struct err *e)
{
    bool in_class = false;

    for (size_t i = 0; i < len;) {
        int64_t n = in[i] == '[' && !in_class ? put_intersection(w, in + i, len - i) : 0;
        if (n < 0) {
            return err_set(e, ERR_INVALID,
                           "the regular expression \"%.100s\" has an intersection (&&) that is "
                           "not [a&&b] or [a&&[^b]]",
                           in);
        }
        if (n == 0) {
            in_class = in[i] == '[' || (in_class && in[i] != ']');
            n = (int64_t)put_one(w, in + i, len - i, in_class);
        }
        i += (size_t)n;
    }
    return w->full ? err_set(e, ERR_INVALID, "a regular expression is longer than %d bytes",
                             TOKENIZER_PATTERN_BYTES)
                   : 0;
}

int pattern_compile(struct pattern *p, const char *regex, size_t len, struct err *e)
{
    struct rewritten w = {.n = 0};
    int code, rc = rewrite(&w, regex, len, e);
    PCRE2_SIZE at;

    if (rc < 0) {
        return rc;
    }
    *p = (struct pattern){.scan = scan_for(regex, len)};
    p->code = pcre2_compile((PCRE2_SPTR)w.text, w.n,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                            &code, &at, NULL);
    if (!p->code) {
        PCRE2_UCHAR why[128];
        pcre2_get_error_message(code, why, sizeof(why));
        return err_set(e, ERR_INVALID,
                       "the regular expression \"%.100s\" is refused at byte %zu: %s", regex,
                       (size_t)at, why);
    }
    p->jit = pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE) == 0;
    return 0;
}

int pattern_literal(struct pattern *p, const char *text, size_t len, struct err *e)
{
    *p = (struct pattern){.literal = malloc(len + 1), .literal_len = len};
    if (!p->literal) {
        return err_nomem(e, "a tokenizer's pattern");
    }
    memcpy(p->literal, text, len);
    p->literal[len] = 0;
    return 0;
}

void pattern_release(struct pattern *p)
{
    pcre2_code_free(p->code);
    free(p->literal);
    *p = (struct pattern){0};
}

static int find_regex(const struct pattern *p, struct encoder *enc, const char *s, size_t len,
                      size_t at, size_t *ret_start, size_t *ret_end)
{
    if (!enc->match) {
        enc->match = pcre2_match_data_create(1, NULL);
        enc->limits = pcre2_match_context_create(NULL);
        if (!enc->match || !enc->limits) {
            return err_nomem(enc->e, "matching a regular expression");
        }
        pcre2_set_match_limit(enc->limits, MATCH_LIMIT);
        pcre2_set_heap_limit(enc->limits, MATCH_HEAP_KIB);
    }
    PCRE2_SPTR subject = (PCRE2_SPTR)s;
    int n = p->jit ? pcre2_jit_match(p->code, subject, len, at, 0, enc->match, enc->limits)
                   : pcre2_match(p->code, subject, len, at, PCRE2_NO_UTF_CHECK, enc->match,
                                 enc->limits);
    if (n == PCRE2_ERROR_JIT_STACKLIMIT) {
        n = pcre2_match(p->code, subject, len, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, enc->match,
                        enc->limits);
    }
    if (n == PCRE2_ERROR_NOMATCH) {
        return 0;
    }
    if (n < 0) {
        return err_set(
            enc->e, ERR_UNSUPPORTED,
            "the text is beyond what the tokenizer's regular expression can split (PCRE2 error %d)",
            n);
    }
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(enc->match);
    *ret_start = v[0];
    *ret_end = v[1];
    return v[1] >= v[0] ? 1 : 0; /* \K can put the start after the end */
}

int pattern_find(const struct pattern *p, struct encoder *enc, const char *s, size_t len, size_t at,
                 size_t *ret_start, size_t *ret_end)
{
    if (p->code) {
        while (at < len) {
            int found = find_regex(p, enc, s, len, at, ret_start, ret_end);
            if (found <= 0 || *ret_end > *ret_start) {
                return found;
            }
            at = *ret_start; /* an empty match splits nothing: skip a character */
            int n;
            if (at >= len) {
                return 0;
            }
            utf8_get((const uint8_t *)s + at, &n);
            at += (size_t)n;
        }
        return 0;
    }
    const char *found = p->literal_len > 0 && at < len
                            ? memmem(s + at, len - at, p->literal, p->literal_len)
                            : NULL;
    if (!found) {
        return 0;
    }
    *ret_start = (size_t)(found - s);
    *ret_end = *ret_start + p->literal_len;
    return 1;
}

/* ---- one split: matches and gaps to pieces ---- */

struct splitter {
    struct encoder *enc;
    const struct stage *stage;
    const char *s;   /* the text that is split */
    int32_t next;    /* number of the stage that gets the pieces */
    bool first;      /* `s` is the beginning of the whole text */
    size_t from, to; /* offsets of a piece that may still grow; empty: from == to */
    bool match;      /* its last span was a match */
};

static int emit_piece(struct splitter *c)
{
    size_t from = c->from, len = c->to - from;

    c->from = c->to;
    return len > 0 ? encode_piece(c->enc, c->next, c->s + from, len, c->first && from == 0) : 0;
}

/* Add the span, a match or a gap, from the end of the last one to `to`. */
static int add_span(struct splitter *c, size_t to, bool match)
{
    if (to == c->to) {
        return 0;
    }
    match ^= c->stage->invert;
    bool open = c->from < c->to, grow = false;
    switch (c->stage->behavior) {
    case SPLIT_REMOVED:
    case SPLIT_ISOLATED:
        break;
    case SPLIT_CONTIGUOUS:
        grow = open && match == c->match;
        break;
    case SPLIT_MERGED_PREVIOUS:
        grow = open && match && !c->match;
        break;
    case SPLIT_MERGED_NEXT:
        grow = open && !match && c->match;
        break;
    }
    int rc = grow ? 0 : emit_piece(c);
    c->to = to;
    c->match = match;
    if (match && c->stage->behavior == SPLIT_REMOVED) {
        c->from = to;
    }
    return rc;
}

static int split_by_pattern(struct splitter *c, size_t len)
{
    const struct pattern *p = &c->stage->pattern;
    int rc = 0;

    /* every span is a piece, matched or not */
    if (p->scan && c->stage->behavior == SPLIT_ISOLATED) {
        for (size_t at = 0; at < len && rc == 0;) {
            size_t n = p->scan((const uint8_t *)c->s + at, len - at);
            rc = encode_piece(c->enc, c->next, c->s + at, n, c->first && at == 0);
            at += n;
        }
        return rc;
    }
    size_t start, end, at = 0;
    while (rc == 0 && (rc = pattern_find(p, c->enc, c->s, len, at, &start, &end)) == 1) {
        rc = add_span(c, start, false);
        if (rc == 0) {
            rc = add_span(c, end, true);
        }
        at = end;
    }
    if (rc == 0) {
        rc = add_span(c, len, false);
    }
    return rc == 0 ? emit_piece(c) : rc;
}

static int split_by_class(struct splitter *c, size_t len, bool (*is_match)(int32_t c))
{
    int rc = 0, n;

    for (size_t at = 0; at < len && rc == 0;) {
        bool match = is_match(utf8_get((const uint8_t *)c->s + at, &n));
        at += (size_t)n;
        if (!match) {
            while (at < len && !is_match(utf8_get((const uint8_t *)c->s + at, &n))) {
                at += (size_t)n;
            }
        }
        rc = add_span(c, at, match);
    }
    return rc == 0 ? emit_piece(c) : rc;
}

/* ---- stages that change the text ---- */

static int prefix_space(struct splitter *c, size_t len)
{
    if (c->s[0] == ' ') {
        return encode_piece(c->enc, c->next, c->s, len, c->first);
    }
    char *text = malloc(len + 1);
    if (!text) {
        return err_nomem(c->enc->e, "encoding a text");
    }
    text[0] = ' ';
    memcpy(text + 1, c->s, len);
    int rc = encode_piece(c->enc, c->next, text, len + 1, c->first);
    free(text);
    return rc;
}

static int metaspace(struct splitter *c, size_t len)
{
    const struct stage *st = c->stage;
    size_t n_spaces = 0, r = st->replacement_len, n = 0;

    for (size_t i = 0; i < len; i++) {
        n_spaces += c->s[i] == ' ';
    }
    char *text = malloc(len + (n_spaces + 1) * r + 1);
    if (!text) {
        return err_nomem(c->enc->e, "encoding a text");
    }
    bool marked = c->s[0] == ' ' || (len >= r && memcmp(c->s, st->replacement, r) == 0);
    if (!marked && (st->prepend == PREPEND_ALWAYS || (st->prepend == PREPEND_FIRST && c->first))) {
        memcpy(text, st->replacement, r);
        n = r;
    }
    for (size_t i = 0; i < len; i++) {
        if (c->s[i] == ' ') {
            memcpy(text + n, st->replacement, r);
            n += r;
        } else {
            text[n++] = c->s[i];
        }
    }
    int rc = 0;
    for (size_t at = 0; at < n && rc == 0;) {
        char *mark =
            st->split && at + r < n ? memmem(text + at + r, n - at - r, st->replacement, r) : NULL;
        /* The text before the first mark is a piece of its own. */
        if (st->split && at == 0 && (n < r || memcmp(text, st->replacement, r) != 0)) {
            mark = memmem(text, n, st->replacement, r);
        }
        size_t end = mark ? (size_t)(mark - text) : n;
        rc = encode_piece(c->enc, c->next, text + at, end - at, c->first && at == 0);
        at = end;
    }
    free(text);
    return rc;
}

int encode_piece(struct encoder *enc, int32_t at, const char *s, size_t len, bool first)
{
    const struct tokenizer *t = enc->t;

    if (len == 0) {
        return 0;
    }
    if (at == t->n_stages) {
        return encode_word(enc, s, len);
    }
    const struct stage *st = &t->stage[at];
    struct splitter c = {.enc = enc, .stage = st, .s = s, .next = at + 1, .first = first};
    switch (st->kind) {
    case STAGE_SPLIT:
        return split_by_pattern(&c, len);
    case STAGE_CLASS:
        return split_by_class(&c, len, st->is_match);
    case STAGE_PREFIX_SPACE:
        return prefix_space(&c, len);
    case STAGE_METASPACE:
        return metaspace(&c, len);
    }
    return 0;
}
