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

static bool has_halved_rows(const struct cpu_kernels *k, int32_t n_x)
{
    return cpu_blocks_of(k, FORMAT_Q4_K, n_x) == &k->other[OTHER_BLOCKS_256];
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
    assert_true(has_rows_of(&k, 1, CPU_AVX512_VNNI) || has_rows_of(&k, 1, CPU_AVX2) ||
                has_halved_rows(&k, 1));
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
    setenv("QUIRE_CPU_WAYS", "avx512vnni-256", 1);
    k = functions(CPU_AMX);
    assert_true(has_halved_rows(&k, 1) && has_halved_rows(&k, 4));
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

enum { BIT_ROWS = 7, BIT_COLS = 3 * 256 };

/* The sums of one way. Blocks are of bytes of which any part makes an ordinary
 * number. */
static void sums_of(const struct cpu_blocks *b, enum weight_format_id f, int32_t n_x, float *ret)
{
    static _Alignas(64) struct act_block x[BIT_COLS / 256 * TILE_ROWS];
    static uint8_t w[BIT_ROWS * BIT_COLS * 2];
    const void *row[BIT_ROWS];
    float line[BIT_COLS];
    uint32_t random = 1;

    for (size_t i = 0; i < sizeof(w); i++) {
        random = random * 1664525 + 1013904223;
        w[i] = (uint8_t)(0x28 + (random >> 29));
    }
    for (int32_t i = 0; i < BIT_ROWS; i++) {
        row[i] = w + i * weight_format_bytes(weight_format_of(f), BIT_COLS);
    }
    for (int32_t j = 0; j < n_x; j++) {
        for (int32_t i = 0; i < BIT_COLS; i++) {
            random = random * 1664525 + 1013904223;
            line[i] = (float)(int32_t)random * 1e-9f;
        }
        b->quantise(x + j, n_x, line, BIT_COLS);
    }
    const struct dot_rows rows = {.row = row, .n = BIT_ROWS};
    b->dots[f](ret, &rows, BIT_COLS, x, n_x, &(struct prefetch){0});
}

static void ways_have_the_same_bits(void **state)
{
    (void)state;
    enum cpu_isa best;
    struct err e = {0};
    int32_t n = 0;
    assert_int_equal(cpu_isa_detect(&best, &e), 0);
    if (best < CPU_AVX512_VNNI || best > CPU_AMX) {
        skip();
    }
    struct cpu_kernels k;
    cpu_kernels_for(&k, CPU_AVX512_VNNI, CPU_BF16_PAIRS);
    for (int32_t f = 0; f < WEIGHT_FORMATS; f++) {
        for (int32_t i = 0; i < OTHER_BLOCKS; i++) {
            for (int32_t n_x = 1; n_x <= TILE_ROWS && k.other[i].dots[f]; n_x++, n++) {
                float own[BIT_ROWS * TILE_ROWS + 4] = {0}, other[BIT_ROWS * TILE_ROWS + 4] = {0};
                sums_of(&k.blocks, (enum weight_format_id)f, n_x, own);
                sums_of(&k.other[i], (enum weight_format_id)f, n_x, other);
                assert_true(own[0] != 0);
                assert_memory_equal(own, other, (size_t)(BIT_ROWS * n_x) * sizeof(*own));
            }
        }
    }
    assert_true(n >= 12 * OTHER_BLOCKS * TILE_ROWS); /* all formats of blocks */
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
        cmocka_unit_test(ways_have_the_same_bits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
