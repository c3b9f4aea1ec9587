/* Which instruction set multiplies weights in blocks: which times decide, what the
 * environment says, and that the choice is kept and followed. */
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

#include "kernels/cpu/ways/block_ways.h"
#include "tests/unit/kept_dir.h"

static void another_set_must_be_faster_by_a_margin(void **state)
{
    (void)state;
    assert_int_equal(cpu_block_fastest((double[]){100}, 1), 0);
    assert_int_equal(cpu_block_fastest((double[]){100, 100}, 2), 0);
    assert_int_equal(cpu_block_fastest((double[]){100, 96}, 2), 0);
    assert_int_equal(cpu_block_fastest((double[]){100, 94}, 2), 1);
    assert_int_equal(cpu_block_fastest((double[]){100, 94, 93}, 3), 2);
    assert_int_equal(cpu_block_fastest((double[]){100, 93, 94}, 3), 1);
    assert_int_equal(cpu_block_fastest((double[]){100, 200, 96}, 3), 0);
}

static void the_environment_decides(void **state)
{
    (void)state;
    struct cpu_block_ways w;
    struct err e = {0};
    assert_int_equal(cpu_block_ways_init(&w, CPU_AMX, &e), 0);
    assert_true(w.timed && w.most == CPU_AMX);
    setenv("QUIRE_CPU_ISA", "amx", 1);
    assert_int_equal(cpu_block_ways_init(&w, CPU_AMX, &e), 0);
    assert_true(!w.timed && w.most == CPU_AMX);
    setenv("QUIRE_CPU_WAYS", "timed", 1);
    assert_int_equal(cpu_block_ways_init(&w, CPU_AMX, &e), 0);
    assert_true(w.timed && w.most == CPU_AMX);
    unsetenv("QUIRE_CPU_ISA");
    setenv("QUIRE_CPU_WAYS", "own", 1);
    assert_int_equal(cpu_block_ways_init(&w, CPU_AVX512_BF16, &e), 0);
    assert_true(!w.timed && w.most == CPU_AVX512_BF16);
    assert_int_equal(cpu_block_ways_init(&w, CPU_PLAIN, &e), 0);
    setenv("QUIRE_CPU_WAYS", "avx2", 1);
    assert_int_equal(cpu_block_ways_init(&w, CPU_AMX, &e), 0);
    assert_true(!w.timed && w.most == CPU_AVX2);
    assert_int_equal(cpu_block_ways_init(&w, CPU_PLAIN, &e), ERR_INVALID);
    assert_int_equal(cpu_block_ways_init(&w, CPU_NEON, &e), ERR_INVALID);
    static const char *const none[] = {"plain", "neon", "pear", "amx"};
    for (size_t i = 0; i < ARRAY_LEN(none); i++) {
        setenv("QUIRE_CPU_WAYS", none[i], 1);
        assert_int_equal(cpu_block_ways_init(&w, CPU_AVX512_BF16, &e), ERR_INVALID);
        assert_non_null(strstr(e.text, none[i]));
    }
    unsetenv("QUIRE_CPU_WAYS");
}

/* The functions for Q4_K of a table for `isa`. */
static struct cpu_kernels functions(enum cpu_isa isa)
{
    struct cpu_block_ways w;
    struct cpu_kernels k;
    struct err e = {0};

    assert_int_equal(cpu_block_ways_init(&w, isa, &e), 0);
    cpu_kernels_for(&k, isa, CPU_BF16_PAIRS);
    cpu_block_ways(&w, &k, FORMAT_Q4_K);
    cpu_block_ways(&w, &k, FORMAT_FP8);
    return k;
}

static bool has_rows_of(const struct cpu_kernels *k, int32_t n_x, enum cpu_isa isa)
{
    struct cpu_kernels of;

    cpu_kernels_for(&of, isa, CPU_BF16_PAIRS);
    return cpu_blocks_of(k, FORMAT_Q4_K, n_x)->dots[FORMAT_Q4_K] == of.blocks.dots[FORMAT_Q4_K] &&
           cpu_blocks_of(k, FORMAT_Q4_K, n_x)->quantise == of.blocks.quantise;
}

static bool has_panels_of(const struct cpu_kernels *k, enum cpu_isa isa)
{
    struct cpu_kernels of;

    cpu_kernels_for(&of, isa, CPU_BF16_PAIRS);
    return k->code_panels[FORMAT_Q4_K].dots == of.code_panels[FORMAT_Q4_K].dots &&
           k->code_panels[FORMAT_Q4_K].pack_x == of.code_panels[FORMAT_Q4_K].pack_x;
}

static void what_is_kept_is_followed(void **state)
{
    (void)state;
    enum cpu_isa best;
    struct err e = {0};
    char path[512], text[1024], changed[2048];
    assert_int_equal(cpu_isa_detect(&best, &e), 0);
    if (best < CPU_AVX512_VNNI || best > CPU_AMX) {
        skip();
    }
    struct cpu_kernels k = functions(CPU_AVX512_VNNI);
    assert_true(has_rows_of(&k, 1, CPU_AVX512_VNNI) || has_rows_of(&k, 1, CPU_AVX2));
    assert_int_equal(kept_files(path), 1);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof(text) - 1, f)] = '\0';
    fclose(f);
    assert_null(strstr(text, "FP8")); /* there is one way only */
    assert_non_null(strstr(text, "avx512vnni.one-row.Q4_K "));
    *(strchr(text, '\n') + 1) = '\0';
    snprintf(changed, sizeof(changed),
             "%savx512vnni.one-row.Q4_K avx2\navx512vnni.few-rows.Q4_K avx512vnni\n"
             "avx512vnni.panels.Q4_K avx2\nend\n",
             text);
    f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(changed, 1, strlen(changed), f), strlen(changed));
    fclose(f);
    k = functions(CPU_AVX512_VNNI);
    assert_true(has_rows_of(&k, 1, CPU_AVX2));
    assert_true(has_rows_of(&k, 2, CPU_AVX512_VNNI));
    assert_true(has_panels_of(&k, CPU_AVX2));
    setenv("QUIRE_CPU_WAYS", "own", 1);
    k = functions(CPU_AVX512_VNNI);
    assert_true(has_rows_of(&k, 1, CPU_AVX512_VNNI) && has_panels_of(&k, CPU_AVX512_VNNI));
    unsetenv("QUIRE_CPU_WAYS");
}

static void a_set_that_is_named_is_taken(void **state)
{
    (void)state;
    char path[512];
    enum cpu_isa best;
    struct err e = {0};
    assert_int_equal(cpu_isa_detect(&best, &e), 0);
    if (best < CPU_AVX512_VNNI || best > CPU_AMX) { /* its tables are made by its instructions */
        skip();
    }
    setenv("QUIRE_CPU_WAYS", "avx2", 1);
    struct cpu_kernels k = functions(CPU_AMX);
    assert_true(has_rows_of(&k, 1, CPU_AVX2) && has_rows_of(&k, 4, CPU_AVX2));
    assert_true(has_panels_of(&k, CPU_AVX2));
    setenv("QUIRE_CPU_WAYS", "avx512vnni", 1);
    k = functions(CPU_AMX);
    assert_true(has_rows_of(&k, 1, CPU_AVX512_VNNI) && has_rows_of(&k, 4, CPU_AVX512_VNNI));
    assert_true(has_panels_of(&k, CPU_AVX512_VNNI));
    setenv("QUIRE_CPU_WAYS", "own", 1);
    k = functions(CPU_AMX);
    assert_true(has_rows_of(&k, 1, CPU_AMX) && has_panels_of(&k, CPU_AMX));
    assert_true(cpu_blocks_of(&k, FORMAT_FP8, 1)->dots[FORMAT_FP8] == k.blocks.dots[FORMAT_FP8]);
    unsetenv("QUIRE_CPU_WAYS");
    assert_int_equal(kept_files(path), 0); /* nothing was timed */
}

/* Of the oldest set there is nothing older. */
static void where_there_is_one_way_nothing_is_timed(void **state)
{
    (void)state;
    char path[512];
    functions(CPU_PLAIN);
    functions(CPU_AVX2);
    functions(CPU_AVX512);
    functions(CPU_NEON);
    assert_int_equal(kept_files(path), 0);
}

int main(void)
{
    unsetenv("QUIRE_CPU_WAYS");
    unsetenv("QUIRE_CPU_ISA");
#define WITH_ROOT(test) cmocka_unit_test_setup_teardown(test, make_cache_root, remove_cache_root)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_set_must_be_faster_by_a_margin),
        cmocka_unit_test(the_environment_decides),
        WITH_ROOT(what_is_kept_is_followed),
        WITH_ROOT(a_set_that_is_named_is_taken),
        WITH_ROOT(where_there_is_one_way_nothing_is_timed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
