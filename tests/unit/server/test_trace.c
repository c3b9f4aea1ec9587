/* traceparent: valid headers are used, others ignored. */
#include "server/http/trace.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define ID "4bf92f3577b34da6a3ce929d0e0e4736"
#define PARENT "00f067aa0ba902b7"

static void a_valid_one_gets_a_new_span(void **state)
{
    (void)state;
    static const char *const valid[] = {
        "00-" ID "-" PARENT "-01",
        "00-" ID "-" PARENT "-00",
        "cc-" ID "-" PARENT "-01",
        "cc-" ID "-" PARENT "-01-what-the-future-is-like",
    };
    for (size_t i = 0; i < ARRAY_LEN(valid); i++) {
        struct trace t;
        char header[TRACE_HEADER_BYTES];
        trace_read(&t, valid[i]);
        assert_string_equal(t.id, ID);
        assert_string_equal(t.parent, PARENT);
        assert_int_equal(strlen(t.span), 16);
        assert_string_not_equal(t.span, PARENT);
        trace_header(&t, header);
        assert_int_equal(strlen(header), 55);
        assert_memory_equal(header, "00-" ID "-", 36);
        assert_memory_equal(header + 36, t.span, 16);
        assert_memory_equal(header + 53, valid[i] + 53, 2);
    }
}

static void an_invalid_one_is_none(void **state)
{
    (void)state;
    static const char *const invalid[] = {
        NULL,
        "",
        "00",
        "00-" ID "-" PARENT "-0",
        "00-" ID "-" PARENT "-01-more",
        "00-" ID "-" PARENT "-011",
        "cc-" ID "-" PARENT "-01.more",
        "ff-" ID "-" PARENT "-01",
        "0-" ID "-" PARENT "-001",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-" PARENT "-01",
        "00-00000000000000000000000000000000-" PARENT "-01",
        "00-" ID "-0000000000000000-01",
        "00-" ID "-" PARENT "-0x",
        "00_" ID "-" PARENT "-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01",
        " 00-" ID "-" PARENT "-01",
    };
    for (size_t i = 0; i < ARRAY_LEN(invalid); i++) {
        struct trace t;
        char header[TRACE_HEADER_BYTES];
        trace_read(&t, invalid[i]);
        trace_header(&t, header);
        assert_string_equal(t.id, "");
        assert_string_equal(header, "");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_valid_one_gets_a_new_span),
        cmocka_unit_test(an_invalid_one_is_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
