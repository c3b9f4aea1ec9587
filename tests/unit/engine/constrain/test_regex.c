/* Regular expressions: against PCRE2 on random ones, and what they may not hold. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pcre2.h>

#include "config/base/buf.h"
#include "engine/constrain/grammar_build.h"

enum { N_PATTERNS = 1500, N_TEXTS = 40 };

static const char *byte_of(const void *arg, int32_t id, size_t *ret_len)
{
    static char bytes[256];

    (void)arg;
    bytes[id & 255] = (char)id;
    *ret_len = id < 256;
    return &bytes[id & 255];
}

static struct constrain_vocab *vocab;

static int make_vocab(void **state)
{
    static const int32_t eos = 256;
    struct constrain_tokens t = {.n = 257, .n_eos = 1, .eos = &eos, .bytes = byte_of};
    struct err e;

    (void)state;
    return constrain_vocab_new(&vocab, &t, &e);
}

static int free_vocab(void **state)
{
    (void)state;
    constrain_vocab_free(vocab);
    return 0;
}

static struct grammar_builder *begin(void)
{
    struct grammar_builder *b;
    struct grammar_limits l;
    struct err e;

    grammar_limits_init(&l);
    l.work = INT64_MAX;
    assert_int_equal(grammar_build_begin(&b, vocab, &l, &e), 0);
    return b;
}

static uint32_t drawn;

static int draw(int below)
{
    drawn = drawn * 1664525u + 1013904223u;
    return (int)((drawn >> 8) % (uint32_t)below);
}

/* ---- against PCRE2 ---- */

static void draw_pattern(struct buf *out, int depth)
{
    static const char *const atoms[] = {
        "a",   "b",        "c",     "[ab]",     "[^a]",        ".",           "\\d",     "\\w",
        "\\S", "[a-c\\d]", "\\x61", "\xc3\xa9", "[b\xc3\xa9]", "[^\xc3\xa9]", "\\u0062", "\\.",
    };
    static const char *const counts[] = {"*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?"};
    int kind = depth > 0 ? draw(10) : 0;

    if (kind < 4) {
        buf_puts(out, atoms[draw(ARRAY_LEN(atoms))]);
    } else if (kind < 7) {
        draw_pattern(out, depth - 1);
        draw_pattern(out, depth - 1);
    } else {
        buf_puts(out, draw(2) ? "(" : "(?:");
        draw_pattern(out, depth - 1);
        if (kind == 7) {
            buf_puts(out, "|");
            draw_pattern(out, depth - 1);
        }
        buf_puts(out, ")");
        if (kind > 7) {
            buf_puts(out, counts[draw(ARRAY_LEN(counts))]);
        }
    }
}

static void draw_text(struct buf *out)
{
    static const char *const pieces[] = {"a", "b", "c", "a", "1", "\xc3\xa9", "_", ".", "\n"};

    buf_clear(out);
    buf_puts(out, "");
    for (int n = draw(8); n > 0; n--) {
        buf_puts(out, pieces[draw(ARRAY_LEN(pieces))]);
    }
}

static pcre2_code *compile(const char *pattern)
{
    int number;
    PCRE2_SIZE at;
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                      PCRE2_UTF | PCRE2_DOLLAR_ENDONLY | PCRE2_ALT_BSUX, &number, &at, NULL);

    if (!code) {
        fail_msg("PCRE2 does not take %s", pattern);
    }
    return code;
}

static void check_texts(const char *pattern, const char *for_pcre2, bool search)
{
    struct grammar_builder *b = begin();
    rx_id x = rx_parse(b, pattern, strlen(pattern), search);
    pcre2_code *code = compile(for_pcre2);
    pcre2_match_data *match = pcre2_match_data_create_from_pattern(code, NULL);
    struct buf text;

    buf_init(&text, 4096);
    assert_true(x);
    for (int i = 0; i < N_TEXTS; i++) {
        draw_text(&text);
        bool wanted = pcre2_match(code, (PCRE2_SPTR)text.data, text.len, 0, 0, match, NULL) >= 0;
        if (rx_matches(b, x, text.data, text.len) != wanted) {
            fail_msg("%s on \"%s\": PCRE2 says %d", for_pcre2, text.data, wanted);
        }
    }
    buf_release(&text);
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    grammar_build_abandon(b);
}

static void whole_texts_match_as_with_pcre2(void **state)
{
    struct buf pattern, whole;

    (void)state;
    buf_init(&pattern, 65536);
    buf_init(&whole, 65536);
    for (uint32_t i = 0; i < N_PATTERNS; i++) {
        drawn = 11 + i * 7919;
        buf_clear(&pattern);
        buf_clear(&whole);
        draw_pattern(&pattern, 4);
        buf_printf(&whole, "\\A(?:%s)\\z", pattern.data);
        check_texts(pattern.data, whole.data, false);
    }
    buf_release(&pattern);
    buf_release(&whole);
}

/* Anchors at the ends of alternatives, within groups too. */
static void a_search_finds_what_pcre2_finds(void **state)
{
    static const char *const forms[] = {"%s|%s",     "^%s|%s",    "%s$|^%s",         "^%s%s$",
                                        "(^%s|b)%s", "%s(%s$|c)", "(?:^(?:%s|a))%s", "(^%s$)|%s"};
    struct buf one, other, pattern;

    (void)state;
    buf_init(&one, 65536);
    buf_init(&other, 65536);
    buf_init(&pattern, 65536);
    for (uint32_t i = 0; i < N_PATTERNS; i++) {
        drawn = 13 + i * 7919;
        buf_clear(&one);
        buf_clear(&other);
        buf_clear(&pattern);
        draw_pattern(&one, 2);
        draw_pattern(&other, 2);
        const char *at = forms[draw(ARRAY_LEN(forms))];
        for (int part = 0; *at; at++) {
            if (at[0] == '%' && at[1] == 's') {
                buf_puts(&pattern, part++ ? other.data : one.data);
                at++;
            } else {
                buf_putc(&pattern, *at);
            }
        }
        check_texts(pattern.data, pattern.data, true);
    }
    buf_release(&one);
    buf_release(&other);
    buf_release(&pattern);
}

/* ---- sets of texts ---- */

static rx_id pattern(struct grammar_builder *b, const char *text)
{
    return rx_parse(b, text, strlen(text), false);
}

static void complement_and_intersection_are_those_of_sets(void **state)
{
    struct grammar_builder *b = begin();
    struct buf p, q, text;

    (void)state;
    buf_init(&p, 65536);
    buf_init(&q, 65536);
    buf_init(&text, 4096);
    for (uint32_t i = 0; i < 300; i++) {
        drawn = 17 + i * 7919;
        buf_clear(&p);
        buf_clear(&q);
        draw_pattern(&p, 3);
        draw_pattern(&q, 3);
        rx_id x = pattern(b, p.data), y = pattern(b, q.data);
        rx_id both = rx_and(b, x, rx_not(b, y));
        bool any = false;
        for (int k = 0; k < N_TEXTS; k++) {
            draw_text(&text);
            bool wanted =
                rx_matches(b, x, text.data, text.len) && !rx_matches(b, y, text.data, text.len);
            assert_int_equal(rx_matches(b, both, text.data, text.len), wanted);
            any |= wanted;
        }
        assert_false(any && rx_is_never(b, both));
        assert_true(rx_is_never(b, rx_and(b, both, y)));
        assert_false(grammar_build_failed(b));
    }
    buf_release(&p);
    buf_release(&q);
    buf_release(&text);
    grammar_build_abandon(b);
}

static void nothing_but_utf8_is_in_a_complement(void **state)
{
    struct grammar_builder *b = begin();
    rx_id x = rx_not(b, rx_bytes(b, "a", 1));

    (void)state;
    assert_true(rx_matches(b, x, "", 0));
    assert_true(rx_matches(b, x, "\xf0\x9f\x98\x80", 4));
    assert_false(rx_matches(b, x, "a", 1));
    assert_false(rx_matches(b, x, "\x80", 1));
    assert_false(rx_matches(b, x, "\xed\xa0\x80", 3));
    assert_false(rx_matches(b, x, "\xc3", 1));
    grammar_build_abandon(b);
}

/* ---- strings of JSON ---- */

static void bodies_of_strings_decode_to_what_matches(void **state)
{
    static const struct {
        const char *pattern, *body;
        bool matches;
    } cases[] = {
        {"a", "a", true},
        {"a", "\\u0061", true},
        {"a", "\\u0062", false},
        {"\\n", "\\n", true},
        {"\\n", "\\u000A", true},
        {"\\n", "\n", false},
        {"[\"\\\\]", "\\\"", true},
        {"[\"\\\\]", "\\\\", true},
        {"[\"\\\\]", "\"", false},
        {"a/b", "a\\/b", true},
        {"\xc3\xa9", "\xc3\xa9", true},
        {"\xc3\xa9", "\\u00e9", true},
        {"\xc3\xa9", "\\u00E9", true},
        {"\xc3\xa9", "\\u00ea", false},
        {"\xf0\x9f\x98\x80", "\\ud83d\\ude00", true},
        {"\xf0\x9f\x98\x80", "\\ud83d\\ude01", false},
        {"\xf0\x9f\x98\x80", "\\ud83d", false},
        {"[\\u{1f600}-\\u{1f64f}]", "\\ud83d\\ude4f", true},
        {"[\\u{1f600}-\\u{1f64f}]", "\\ud83d\\ude50", false},
        {".{3}", "\\\\\\u0041\xc3\xa9", true},
        {".{3}", "abcd", false},
        {"[^a]*", "b\\u0061", false},
        {"[^a]*", "b\\u0063\\t", true},
        {"\\p{Lu}+", "AB\xc3\x89", true},
        {"\\p{Lu}+", "Ab", false},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct grammar_builder *b = begin();
        rx_id body = rx_json_body(b, pattern(b, cases[i].pattern));
        const char *text = cases[i].body;
        if (rx_matches(b, body, text, strlen(text)) != cases[i].matches) {
            fail_msg("%s: %s", cases[i].pattern, text);
        }
        rx_id rest = rx_json_body(b, rx_not(b, pattern(b, cases[i].pattern)));
        assert_false(rx_matches(b, rest, text, strlen(text)) && cases[i].matches);
        assert_true(rx_is_never(b, rx_and(b, rest, body)));
        grammar_build_abandon(b);
    }
}

/* ---- what is refused ---- */

static void what_cannot_be_enforced_is_refused_by_name(void **state)
{
    static const struct {
        const char *pattern;
        int rc;
        const char *says;
    } cases[] = {
        {"(?=a)b", ERR_UNSUPPORTED, "look-around"},
        {"(?<!a)b", ERR_UNSUPPORTED, "look-around"},
        {"(a)\\1", ERR_UNSUPPORTED, "back references"},
        {"\\bword", ERR_UNSUPPORTED, "boundaries"},
        {"a^b", ERR_UNSUPPORTED, "^ anywhere"},
        {"a$b", ERR_UNSUPPORTED, "$ anywhere"},
        {"(a$)b", ERR_UNSUPPORTED, "$ anywhere"},
        {"(^a)*", ERR_UNSUPPORTED, "repeated group"},
        {"a++", ERR_UNSUPPORTED, "possessive"},
        {"\\p{Greek}", ERR_UNSUPPORTED, "general categories"},
        {"(a", ERR_INVALID, "closing parenthesis"},
        {"a)", ERR_INVALID, "without a group"},
        {"[a", ERR_INVALID, "closing bracket"},
        {"[b-a]", ERR_INVALID, "backwards"},
        {"*a", ERR_INVALID, "nothing to repeat"},
        {"a**", ERR_INVALID, "nothing to repeat"},
        {"a{3,2}", ERR_INVALID, "backwards"},
        {"a{9999999}", ERR_INVALID, "1048576"},
        {"\\u12", ERR_INVALID, "hexadecimal"},
        {"\\ud800", ERR_INVALID, "surrogate"},
        {"a\\", ERR_INVALID, "backslash"},
        {"\xff", ERR_INVALID, "UTF-8"},
        {"[]", ERR_INVALID, "no text satisfies"},
    };
    struct grammar_limits l;
    struct grammar *g;
    struct err e;

    (void)state;
    grammar_limits_init(&l);
    l.work = INT64_MAX;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *text = cases[i].pattern;
        assert_int_equal(grammar_new(&g, vocab, GRAMMAR_REGEX, text, strlen(text), &l, &e),
                         cases[i].rc);
        if (!strstr(e.text, cases[i].says)) {
            fail_msg("%s: %s", text, e.text);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_texts_match_as_with_pcre2),
        cmocka_unit_test(a_search_finds_what_pcre2_finds),
        cmocka_unit_test(complement_and_intersection_are_those_of_sets),
        cmocka_unit_test(nothing_but_utf8_is_in_a_complement),
        cmocka_unit_test(bodies_of_strings_decode_to_what_matches),
        cmocka_unit_test(what_cannot_be_enforced_is_refused_by_name),
    };

    return cmocka_run_group_tests(tests, make_vocab, free_vocab);
}
