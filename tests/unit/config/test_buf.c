/* The bounded buffer and JSON escaping. */
#include "config/base/buf.h"

#include <setjmp.h>
#include <string.h>

#include <cmocka.h>

#include "config/base/json_plain.h"

static void appends_grow_and_stay_terminated(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 100000);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(buf_printf(&b, "%03d,", i), 0);
    }
    assert_int_equal(b.len, 4000);
    assert_int_equal(strlen(b.data), 4000);
    assert_memory_equal(b.data + 3996, "999,", 5);
    buf_consume(&b, 3996);
    assert_string_equal(b.data, "999,");
    buf_consume(&b, 100);
    assert_int_equal(b.len, 0);
    buf_release(&b);
    assert_null(b.data);
    assert_int_equal(b.max, 100000);
    buf_consume(&b, 1);
    buf_release(&b);
}

static void the_maximum_holds_to_the_byte(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 10);
    assert_int_equal(buf_puts(&b, "0123456789"), 0);
    assert_int_equal(buf_puts(&b, ""), 0);
    assert_false(b.failed);
    assert_int_equal(buf_putc(&b, 'x'), ERR_FULL);
    assert_true(b.failed);
    assert_string_equal(b.data, "0123456789");
    assert_true(b.cap <= 11);
    buf_clear(&b);
    assert_false(b.failed);
    assert_string_equal(b.data, "");
    assert_int_equal(buf_printf(&b, "%s", "01234567890"), ERR_FULL);
    assert_int_equal(b.len, 0);
    assert_int_equal(buf_reserve(&b, SIZE_MAX), ERR_FULL);
    assert_int_equal(buf_append(&b, NULL, 0), 0);
    buf_release(&b);
}

static void check_escape(const char *in, size_t len, const char *want)
{
    struct buf b;

    buf_init(&b, 1000);
    assert_int_equal(buf_json_escape(&b, in, len), 0);
    assert_string_equal(!b.data ? "" : b.data, want);
    buf_release(&b);
}

static void json_escapes_what_json_forbids(void **state)
{
    (void)state;
    check_escape("", 0, "");
    check_escape("plain", 5, "plain");
    check_escape("a\"b\\c\n\r\t\b\f\x01\x1f\x7f", 13,
                 "a\\\"b\\\\c\\n\\r\\t\\b\\f\\u0001\\u001f\\u007f");
    check_escape("eight or more\nplain ones\"", 25, "eight or more\\nplain ones\\\"");
    check_escape("nul\0x", 5, "nul\\u0000x");
    check_escape("\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 9, "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
}

/* What a plain byte is, and where a run of them ends: at each place in and behind a
 * word of eight bytes, whatever byte follows. */
static void plain_text_ends_where_the_first_byte_needs_more(void **state)
{
    enum { LEN = 19 };
    char text[LEN];

    (void)state;
    for (int pair = 0; pair < 256 * 256; pair++) {
        int at = pair % (LEN - 1), n = 0;
        memset(text, 'a', LEN);
        text[at] = (char)(pair >> 8);
        text[at + 1] = (char)pair;
        while (n < LEN) {
            unsigned char c = (unsigned char)text[n];
            if (c < ' ' || c > '~' || strchr("\"\\", c)) {
                break;
            }
            n++;
        }
        assert_int_equal(json_plain_len(text, LEN), n);
    }
}

#define BAD "\xEF\xBF\xBD"

static void json_replaces_invalid_utf8(void **state)
{
    (void)state;
    check_escape("\xFF", 1, BAD);
    check_escape("a\x80z", 3, "a" BAD "z");
    check_escape("\xC0\x80", 2, BAD BAD);         /* overlong NUL */
    check_escape("\xE0\x80\x80", 3, BAD BAD BAD); /* overlong */
    check_escape("\xF0\x80\x80\x80", 4, BAD BAD BAD BAD);
    check_escape("\xED\xA0\x80", 3, BAD BAD BAD);         /* surrogate */
    check_escape("\xF4\x90\x80\x80", 4, BAD BAD BAD BAD); /* over U+10FFFF */
    check_escape("\xE2\x82", 2, BAD BAD); /* truncated: the byte after it is not read */
    check_escape("\xF0\x9F\x98", 3, BAD BAD BAD);
}

static void failed_escape_adds_nothing(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 8);
    buf_puts(&b, "abc");
    assert_int_equal(buf_json_escape(&b, "12\n\n\n\n", 6), ERR_FULL);
    assert_string_equal(b.data, "abc");
    assert_true(b.failed);
    buf_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(appends_grow_and_stay_terminated),
        cmocka_unit_test(the_maximum_holds_to_the_byte),
        cmocka_unit_test(json_escapes_what_json_forbids),
        cmocka_unit_test(plain_text_ends_where_the_first_byte_needs_more),
        cmocka_unit_test(json_replaces_invalid_utf8),
        cmocka_unit_test(failed_escape_adds_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
