/* The choice between pairs and floats: which time decides, that it is kept, and what
 * takes the place of both. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/ways/bf16_way.h"
#include "tests/unit/kept_dir.h"

static void floats_must_be_faster_by_a_margin(void **state)
{
    (void)state;
    assert_int_equal(cpu_bf16_faster(100, 100), CPU_BF16_PAIRS);
    assert_int_equal(cpu_bf16_faster(100, 96), CPU_BF16_PAIRS);
    assert_int_equal(cpu_bf16_faster(100, 94), CPU_BF16_FLOATS);
    assert_int_equal(cpu_bf16_faster(50, 100), CPU_BF16_PAIRS);
}

static void the_environment_decides(void **state)
{
    (void)state;
    enum cpu_bf16 way;
    struct err e = {0};
    setenv("QUIRE_CPU_BF16", "floats", 1);
    assert_int_equal(cpu_bf16_detect(&way, CPU_AVX512_BF16, &e), 0);
    assert_int_equal(way, CPU_BF16_FLOATS);
    assert_int_equal(cpu_bf16_detect(&way, CPU_AMX, &e), 0);
    assert_int_equal(way, CPU_BF16_PAIRS); /* only that set has two ways */
    setenv("QUIRE_CPU_BF16", "pairs", 1);
    assert_int_equal(cpu_bf16_detect(&way, CPU_AVX512_BF16, &e), 0);
    assert_int_equal(way, CPU_BF16_PAIRS);
    setenv("QUIRE_CPU_BF16", "pear", 1);
    assert_int_equal(cpu_bf16_detect(&way, CPU_AMX, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "pear"));
    unsetenv("QUIRE_CPU_BF16");
}

/* By timing, where the machine can: once in a process, whatever becomes of the file. */
static void a_process_keeps_its_way(void **state)
{
    (void)state;
    enum cpu_isa best;
    enum cpu_bf16 first, way;
    struct err e = {0};
    char found[256];
    assert_int_equal(cpu_isa_detect(&best, &e), 0);
    if (best != CPU_AVX512_BF16 && best != CPU_AMX) {
        skip();
    }
    setenv("CACHE_DIRECTORY", root, 1);
    assert_int_equal(cpu_bf16_detect(&first, CPU_AVX512_BF16, &e), 0);
    size_t n = get_file(found, sizeof(found) - 1);
    found[n] = '\0';
    char line[32];
    snprintf(line, sizeof(line), "\nbf16 %s\n", cpu_bf16_name(first));
    assert_non_null(strstr(found, line));
    put_file("", 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(cpu_bf16_detect(&way, CPU_AVX512_BF16, &e), 0);
        assert_int_equal(way, first);
    }
    unsetenv("CACHE_DIRECTORY");
}

int main(void)
{
    unsetenv("QUIRE_CPU_BF16");
    unsetenv("QUIRE_CPU_ISA");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(floats_must_be_faster_by_a_margin),
        cmocka_unit_test(the_environment_decides),
        cmocka_unit_test_setup_teardown(a_process_keeps_its_way, make_root, remove_root),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
