/* The memory that a process can have: of the machine, and of its control groups. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "config/base/memory.h"

static void fields_are_found_at_the_start_of_a_line(void **state)
{
    static const char text[] = "MemTotal:       24683652 kB\nSwapCached:  7 kB\nCached:  8 kB\n"
                               "inactive_file 12\nactive_file 34";

    (void)state;
    assert_int_equal(memory_field(text, "MemTotal"), 24683652);
    assert_int_equal(memory_field(text, "Cached"), 8);
    assert_int_equal(memory_field(text, "active_file"), 34);
    assert_int_equal(memory_field(text, "inactive_file"), 12);
    assert_int_equal(memory_field(text, "Mem"), -1);
    assert_int_equal(memory_field("", "MemTotal"), -1);
}

static void a_group_limits_the_machine(void **state)
{
    static const struct {
        const char *max, *current, *stat;
        int64_t total, available;
    } cases[] = {
        {"max\n", "700\n", "active_file 9\n", 1000, 600},
        {"", "", "", 1000, 600},
        {"5000\n", "700\n", "", 1000, 600},
        {"500\n", "100\n", "", 500, 400},
        {"500\n", "", "", 500, 500},
        /* files' pages are dropped where they are in the way */
        {"500\n", "450\n", "anon 50\nactive_file 300\ninactive_file 90\nslab_reclaimable 10\n", 500,
         450},
        {"500\n", "450\n", "anon 450\n", 500, 50},
        {"500\n", "510\n", "anon 510\n", 500, 0},
        {"500\n", "100\n", "active_file 110\n", 500, 500},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct memory_size size = {.total = 1000, .available = 600};
        memory_size_limit(&size, cases[i].max, cases[i].current, cases[i].stat);
        assert_int_equal(size.total, cases[i].total);
        assert_int_equal(size.available, cases[i].available);
    }
}

static void this_machine_has_some(void **state)
{
    struct memory_size size;

    (void)state;
    assert_true(memory_size_read(&size));
    assert_true(size.total > 0 && size.available >= 0 && size.available <= size.total);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields_are_found_at_the_start_of_a_line),
        cmocka_unit_test(a_group_limits_the_machine),
        cmocka_unit_test(this_machine_has_some),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
