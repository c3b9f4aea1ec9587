/* The UTF-8 decoder and validator. */
#include "config/base/utf8.h"

#include <setjmp.h>
#include <string.h>

#include <cmocka.h>
#include <utf8proc.h>

/* The text is not UTF-8, and one U+FFFD replaces its first `bad` bytes. */
static void check_invalid(const char *text, size_t len, int bad)
{
    int got_bad = -1;

    assert_int_equal(utf8_next((const uint8_t *)text, len, &got_bad), 0);
    assert_int_equal(got_bad, bad);
    assert_int_equal(utf8_char_len(text, len), 0);
    assert_false(utf8_valid(text, len));
}

static void check_char(int32_t c, const char *text, int len)
{
    char made[4];
    int got_len = -1, bad;

    assert_int_equal(utf8_next((const uint8_t *)text, (size_t)len, &bad), len);
    assert_int_equal(utf8_char_len(text, (size_t)len), len);
    assert_true(utf8_valid(text, (size_t)len));
    assert_int_equal(utf8_get((const uint8_t *)text, &got_len), c);
    assert_int_equal(got_len, len);
    assert_int_equal(utf8_put(made, c), len);
    assert_memory_equal(made, text, (size_t)len);
}

static void the_ends_of_each_length_are_characters(void **state)
{
    (void)state;
    check_char(0x00, "\x00", 1);
    check_char(0x7F, "\x7F", 1);
    check_char(0x80, "\xC2\x80", 2);
    check_char(0x7FF, "\xDF\xBF", 2);
    check_char(0x800, "\xE0\xA0\x80", 3);
    check_char(0xFFFF, "\xEF\xBF\xBF", 3);
    check_char(0x10000, "\xF0\x90\x80\x80", 4);
    check_char(0x10FFFF, "\xF4\x8F\xBF\xBF", 4);
}

static void overlong_forms_are_refused(void **state)
{
    (void)state;
    check_invalid("\xC0\x80", 2, 1);
    check_invalid("\xC1\xBF", 2, 1);
    check_invalid("\xE0\x80\x80", 3, 1);
    check_invalid("\xE0\x9F\xBF", 3, 1);
    check_invalid("\xF0\x80\x80\x80", 4, 1);
    check_invalid("\xF0\x8F\xBF\xBF", 4, 1);
}

static void surrogates_are_refused_and_their_neighbours_are_not(void **state)
{
    (void)state;
    check_char(0xD7FF, "\xED\x9F\xBF", 3);
    check_invalid("\xED\xA0\x80", 3, 1);
    check_invalid("\xED\xAF\xBF", 3, 1);
    check_invalid("\xED\xB0\x80", 3, 1);
    check_invalid("\xED\xBF\xBF", 3, 1);
    check_char(0xE000, "\xEE\x80\x80", 3);
}

static void code_points_over_10ffff_are_refused(void **state)
{
    (void)state;
    check_invalid("\xF4\x90\x80\x80", 4, 1);
    check_invalid("\xF5\x80\x80\x80", 4, 1);
    check_invalid("\xF8\x88\x80\x80\x80", 5, 1);
    check_invalid("\xFE", 1, 1);
    check_invalid("\xFF", 1, 1);
}

static void a_continuation_byte_begins_no_character(void **state)
{
    (void)state;
    check_invalid("\x80", 1, 1);
    check_invalid("\xBF", 1, 1);
}

static void a_character_cut_short_is_not_one_yet(void **state)
{
    static const char *const WHOLE[] = {"\xC2\x80",         "\xDF\xBF",        "\xE0\xA0\x80",
                                        "\xED\x9F\xBF",     "\xEF\xBF\xBF",    "\xF0\x90\x80\x80",
                                        "\xF1\x80\x80\x80", "\xF4\x8F\xBF\xBF"};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(WHOLE); i++) {
        for (size_t len = 1; len < strlen(WHOLE[i]); len++) {
            int bad;
            assert_int_equal(utf8_next((const uint8_t *)WHOLE[i], len, &bad), -1);
            assert_int_equal(utf8_char_len(WHOLE[i], len), 0);
            assert_false(utf8_valid(WHOLE[i], len));
        }
    }
}

static void a_broken_character_is_replaced_up_to_the_byte_that_breaks_it(void **state)
{
    (void)state;
    check_invalid("\xC2\x41", 2, 1);
    check_invalid("\xE2\x41", 2, 1);
    check_invalid("\xE2\x80\x41", 3, 2);
    check_invalid("\xF1\x80\x41", 3, 2);
    check_invalid("\xF1\x80\x80\x41", 4, 3);
    check_invalid("\xF4\x8F\xBF\xC2", 4, 3);
}

static void every_code_point_comes_back(void **state)
{
    (void)state;
    for (int32_t c = 0; c <= 0x10FFFF; c++) {
        char text[4];
        int len = utf8_put(text, c), got_len = -1;
        bool surrogate = c >= 0xD800 && c <= 0xDFFF;
        if (utf8_valid(text, (size_t)len) == surrogate) {
            fail_msg("U+%04X", (unsigned)c);
        }
        if (!surrogate && (utf8_get((const uint8_t *)text, &got_len) != c || got_len != len)) {
            fail_msg("U+%04X", (unsigned)c);
        }
    }
}

/* All texts of four bytes that stand at the ends of some range, against utf8proc. */
static void another_decoder_agrees(void **state)
{
    static const uint8_t EDGE[] = {0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF,
                                   0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE,
                                   0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFF};
    enum { N = ARRAY_LEN(EDGE) };

    (void)state;
    for (size_t i = 0; i < (size_t)N * N * N * N; i++) {
        uint8_t s[4] = {EDGE[i % N], EDGE[i / N % N], EDGE[i / N / N % N], EDGE[i / N / N / N]};
        for (size_t len = 1; len <= sizeof(s); len++) {
            utf8proc_int32_t c;
            utf8proc_ssize_t want = utf8proc_iterate(s, (utf8proc_ssize_t)len, &c);
            if (utf8_char_len(s, len) != (size_t)MAX(want, (utf8proc_ssize_t)0)) {
                fail_msg("%02x %02x %02x %02x, %zu bytes of it", s[0], s[1], s[2], s[3], len);
            }
        }
    }
}

static void a_wrong_byte_is_found_wherever_it_stands(void **state)
{
    char text[40];

    (void)state;
    for (size_t len = 1; len <= sizeof(text); len++) {
        memset(text, 'a', sizeof(text));
        assert_true(utf8_valid(text, len));
        for (size_t at = 0; at < len; at++) {
            text[at] = '\xFF';
            assert_false(utf8_valid(text, len));
            text[at] = '\xC2'; /* followed by a letter, or by the end */
            assert_false(utf8_valid(text, len));
            text[at] = 'a';
        }
    }
    assert_true(utf8_valid(NULL, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_ends_of_each_length_are_characters),
        cmocka_unit_test(overlong_forms_are_refused),
        cmocka_unit_test(surrogates_are_refused_and_their_neighbours_are_not),
        cmocka_unit_test(code_points_over_10ffff_are_refused),
        cmocka_unit_test(a_continuation_byte_begins_no_character),
        cmocka_unit_test(a_character_cut_short_is_not_one_yet),
        cmocka_unit_test(a_broken_character_is_replaced_up_to_the_byte_that_breaks_it),
        cmocka_unit_test(every_code_point_comes_back),
        cmocka_unit_test(another_decoder_agrees),
        cmocka_unit_test(a_wrong_byte_is_found_wherever_it_stands),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
