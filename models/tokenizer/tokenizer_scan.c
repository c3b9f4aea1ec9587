/* Hand-written scanners for the regular expressions that most byte-level tokenizers
 * split with; they are faster than PCRE2 and do not backtrack.
 *
 * Each function tries the alternatives of its expression in their order.
 * tests/unit/models/test_tokenizer.c and tests/fuzz/fuzz_encode.c compare them with
 * PCRE2.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <string.h>

#include <utf8proc.h>

/* Classes of characters; each character is in exactly one. NEWLINE is \r and \n, which
 * the expressions count as white space too. */
enum char_class { LETTER, NUMBER, SPACE, NEWLINE, OTHER };

#define L LETTER
#define N NUMBER
#define S SPACE
#define E NEWLINE
#define O OTHER
static const uint8_t ASCII_CLASS[128] = {
    /* 00: tab, line feed, vertical tab, form feed, return */
    O, O, O, O, O, O, O, O, O, S, E, S, S, E, O, O,
    O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, /* 10 */
    S, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, /* 20 */
    N, N, N, N, N, N, N, N, N, N, O, O, O, O, O, O, /* 30 */
    O, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, /* 40 */
    L, L, L, L, L, L, L, L, L, L, L, O, O, O, O, O, /* 50 */
    O, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, /* 60 */
    L, L, L, L, L, L, L, L, L, L, L, O, O, O, O, O, /* 70 */
};
#undef L
#undef N
#undef S
#undef E
#undef O

/* Unicode's White_Space property. */
bool char_is_space(int32_t c)
{
    if (c < 0x80) {
        return c == ' ' || (c >= 0x09 && c <= 0x0D);
    }
    return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
           c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool char_is_number(int32_t c)
{
    if (c < 0x80) {
        return c >= '0' && c <= '9';
    }
    utf8proc_category_t k = utf8proc_category(c);
    return k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO;
}

/* Unicode's \w: alphabetic characters (letters, letter numbers, letters in circles and
 * squares), marks, decimal digits, connectors and the two joiners. */
bool char_is_word(int32_t c)
{
    utf8proc_category_t k = utf8proc_category(c);

    return (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_ME) || k == UTF8PROC_CATEGORY_ND ||
           k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_PC || c == 0x200C || c == 0x200D ||
           (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
           (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}

bool char_is_punctuation(int32_t c)
{
    if (c < 0x80) {
        return c > ' ' && c < 0x7F && ASCII_CLASS[c] == OTHER;
    }
    utf8proc_category_t k = utf8proc_category(c);
    return k >= UTF8PROC_CATEGORY_PC && k <= UTF8PROC_CATEGORY_PO;
}

/* The class of the character at `s`, its length in *n. */
static inline enum char_class class_at(const uint8_t *s, int *n)
{
    if (*s < 0x80) {
        *n = 1;
        return ASCII_CLASS[*s];
    }
    int32_t c = utf8_get(s, n);
    utf8proc_category_t k = utf8proc_category(c);
    if (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO) {
        return LETTER;
    }
    if (k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO) {
        return NUMBER;
    }
    return char_is_space(c) ? SPACE : OTHER;
}

/* The end of the run of class `want` that begins at `s`. */
static inline const uint8_t *run(const uint8_t *s, const uint8_t *end, enum char_class want)
{
    int n;

    while (s < end && class_at(s, &n) == want) {
        s += n;
    }
    return s;
}

/* \s+(?!\S)|\s+ at white space: the end of the run, or before its last character if
 * other text follows. */
static const uint8_t *spaces(const uint8_t *s, const uint8_t *end)
{
    const uint8_t *p = s, *last = s;
    int n;

    while (p < end) {
        enum char_class k = class_at(p, &n);
        if (k != SPACE && k != NEWLINE) {
            return last > s ? last : p;
        }
        last = p;
        p += n;
    }
    return p;
}

const char GPT2_PATTERN[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* The length of 's|'t|'re|'ve|'m|'ll|'d at an apostrophe, or 0. */
static size_t contraction(const uint8_t *s, const uint8_t *end, bool any_case)
{
    if (end - s < 2) {
        return 0;
    }
    uint8_t mask = any_case ? 0x20 : 0, a = s[1] | mask;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') {
        return 2;
    }
    if (end - s < 3) {
        return 0;
    }
    uint8_t b = s[2] | mask;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) {
        return 3;
    }
    /* U+017F, the long s, equals s without regard to case */
    return any_case && s[1] == 0xC5 && s[2] == 0xBF ? 3 : 0;
}

size_t scan_gpt2(const uint8_t *s, size_t len)
{
    const uint8_t *end = s + len, *p = s;

    if (*s == '\'') {
        size_t n = contraction(s, end, false);
        if (n > 0) {
            return n;
        }
    }
    int n;
    if (*p == ' ' && len > 1) {
        p++;
    }
    enum char_class k = class_at(p, &n);
    if (k == SPACE || k == NEWLINE) {
        return (size_t)(spaces(s, end) - s);
    }
    return (size_t)(run(p + n, end, k) - s);
}

static const char LLAMA3_PATTERN[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
                                     "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                                     "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
static const char QWEN2_PATTERN[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
                                    "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                                    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* \s*[\r\n]+ at white space: the end of the run's last newline; NULL: there is none. */
static const uint8_t *line_ends(const uint8_t *s, const uint8_t *end)
{
    const uint8_t *found = NULL;
    int n;

    while (s < end) {
        enum char_class k = class_at(s, &n);
        if (k != SPACE && k != NEWLINE) {
            break;
        }
        s += n;
        if (k == NEWLINE) {
            found = s;
        }
    }
    return found;
}

static inline size_t scan_llama(const uint8_t *s, size_t len, int max_digits)
{
    const uint8_t *end = s + len, *p;

    if (*s == '\'') {
        size_t n = contraction(s, end, true);
        if (n > 0) {
            return n;
        }
    }
    int n, m;
    enum char_class k = class_at(s, &n), next = OTHER;
    p = s + n;
    if (k == LETTER) {
        return (size_t)(run(p, end, LETTER) - s);
    }
    if (k == NUMBER) {
        for (int i = 1; i < max_digits && p < end && class_at(p, &m) == NUMBER; i++) {
            p += m;
        }
        return (size_t)(p - s);
    }
    if (p < end) {
        next = class_at(p, &m);
        if (next == LETTER && k != NEWLINE) {
            return (size_t)(run(p + m, end, LETTER) - s);
        }
    }
    if (k == OTHER || (*s == ' ' && p < end && next == OTHER)) {
        p = run(p, end, OTHER);
        return (size_t)(run(p, end, NEWLINE) - s);
    }
    p = line_ends(s, end);
    return (size_t)((p ? p : spaces(s, end)) - s);
}

static size_t scan_llama3(const uint8_t *s, size_t len)
{
    return scan_llama(s, len, 3);
}

static size_t scan_qwen2(const uint8_t *s, size_t len)
{
    return scan_llama(s, len, 1);
}

size_t (*scan_for(const char *regex, size_t len))(const uint8_t *s, size_t len)
{
    static const struct {
        const char *regex;
        size_t (*scan)(const uint8_t *s, size_t len);
    } KNOWN[] = {
        {GPT2_PATTERN, scan_gpt2}, {LLAMA3_PATTERN, scan_llama3}, {QWEN2_PATTERN, scan_qwen2}};

    for (size_t i = 0; i < ARRAY_LEN(KNOWN); i++) {
        if (strlen(KNOWN[i].regex) == len && memcmp(KNOWN[i].regex, regex, len) == 0) {
            return KNOWN[i].scan;
        }
    }
    return NULL;
}
