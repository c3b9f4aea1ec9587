/* Error values: the convention of config/base/base.h. */
#include "config/base/base.h"

#include <setjmp.h>
#include <string.h>

#include <cmocka.h>

static void sets_code_text_and_param(void **state)
{
    (void)state;
    struct err e = {0};
    assert_int_equal(err_set_param(&e, ERR_FULL, "n", "n is %d", 7), ERR_FULL);
    assert_int_equal(e.code, ERR_FULL);
    assert_string_equal(e.param, "n");
    assert_string_equal(e.text, "n is 7");
    assert_int_equal(err_set(&e, ERR_IO, "%s", "gone"), ERR_IO);
    assert_string_equal(e.param, "");
    assert_string_equal(e.text, "gone");
}

static void null_error_keeps_the_code(void **state)
{
    (void)state;
    assert_int_equal(err_set(NULL, ERR_IO, "x"), ERR_IO);
    assert_int_equal(err_nomem(NULL, "x"), ERR_NOMEM);
    assert_int_equal(err_prefix(NULL, "x"), ERR_INVALID);
}

static void prefix_goes_in_front(void **state)
{
    (void)state;
    struct err e;
    err_set(&e, ERR_IO, "no such file");
    assert_int_equal(err_prefix(&e, "model '%s'", "demo"), ERR_IO);
    assert_string_equal(e.text, "model 'demo': no such file");
}

static void a_text_is_one_line(void **state)
{
    (void)state;
    struct err e;
    err_set(&e, ERR_INVALID, "\"%s\"", "a\nb\x1B[31m\x7F\xC3\xA9");
    assert_string_equal(e.text, "\"a?b?[31m?\xC3\xA9\"");
}

static void long_texts_are_cut_at_the_end(void **state)
{
    (void)state;
    struct err e;
    char big[2000];
    memset(big, 'a', sizeof(big));
    big[sizeof(big) - 1] = '\0';
    err_set_param(&e, ERR_INVALID, big, "%s", big);
    assert_int_equal(strlen(e.text), sizeof(e.text) - 1);
    assert_int_equal(strlen(e.param), sizeof(e.param) - 1);
    err_prefix(&e, "first");
    assert_memory_equal(e.text, "first: aaa", 10);
    assert_int_equal(strlen(e.text), sizeof(e.text) - 1);
    err_prefix(&e, "%s", big);
    assert_int_equal(strlen(e.text), sizeof(e.text) - 1);
}

static void clock_goes_forward(void **state)
{
    (void)state;
    int64_t a = clock_us();
    assert_true(a > 0);
    assert_true(clock_us() >= a);
    assert_int_equal(div_ceil(9, 4), 3);
    assert_int_equal(div_ceil(8, 4), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sets_code_text_and_param), cmocka_unit_test(null_error_keeps_the_code),
        cmocka_unit_test(prefix_goes_in_front),     cmocka_unit_test(long_texts_are_cut_at_the_end),
        cmocka_unit_test(a_text_is_one_line),       cmocka_unit_test(clock_goes_forward),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
