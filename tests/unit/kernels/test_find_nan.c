/* Codes and blocks that are no numbers are found, and no others.
 *
 *     build/tests/unit/kernels/test_find_nan
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/weight_format.h"

/* Every code at every place of a row, whose end is no multiple of a word. */
static void every_nan_of_e4m3_is_found(void **state)
{
    (void)state;
    enum { MOST = 21 };
    const struct weight_format *f = weight_format_of(FORMAT_FP8);

    for (int64_t n = 0; n <= MOST; n++) {
        for (int64_t at = 0; at < n; at++) {
            for (int32_t code = 0; code < 256; code++) {
                uint8_t codes[MOST];
                for (int64_t i = 0; i < MOST; i++) { /* any but NaN, which stand behind n too */
                    codes[i] = i >= n ? 0x7F : (uint8_t)(code * 7 + i * 31);
                    codes[i] = i < n && (codes[i] & 0x7F) == 0x7F ? 0xFE : codes[i];
                }
                codes[at] = (uint8_t)code;
                bool nan = isnan(weight_code_value(FORMAT_FP8, (uint8_t)code));
                assert_int_equal(weight_format_find_nan(f, codes, n), nan ? at : -1);
                if (nan && at > 0) { /* the first of two */
                    codes[0] = 0xFF;
                    assert_int_equal(weight_format_find_nan(f, codes, n), 0);
                }
            }
        }
    }
}

/* The first of n values that is no number, by blocks; -1: all are. */
static int64_t first_by_values(const struct weight_format *f, const float *value, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(value[i])) {
            return i / f->block_values * f->block_values;
        }
    }
    return -1;
}

/* The same of MXFP4, which is refused where a code might be beyond float32. */
static int64_t first_by_scale(const uint8_t *block, int64_t n_blocks)
{
    for (int64_t i = 0; i < n_blocks; i++) {
        if (!isfinite(ldexpf(6, block[i * 17] - 127))) {
            return i * 32;
        }
    }
    return -1;
}

/* Of random blocks at least one in a hundred has a scale that is no number. */
static void every_block_that_is_no_number_is_found(void **state)
{
    (void)state;
    enum { BLOCKS = 3, ROUNDS = 2000 };
    static uint8_t data[BLOCKS * FORMAT_BLOCK_BYTES_MAX];
    static float value[BLOCKS * FORMAT_BLOCK_MAX];
    uint32_t seed = 1;

    for (int id = FORMAT_Q4_0; id < FORMAT_FP8; id++) {
        const struct weight_format *f = weight_format_of((enum weight_format_id)id);
        int64_t n = (int64_t)BLOCKS * f->block_values;
        int n_found = 0;
        for (int round = 0; round < ROUNDS; round++) {
            for (int64_t i = 0; i < (int64_t)sizeof(data); i++) {
                data[i] = (uint8_t)((seed = seed * 1664525 + 1013904223) >> 24);
            }
            weight_format_decode(f, data, n, value);
            int64_t want =
                id == FORMAT_MXFP4 ? first_by_scale(data, BLOCKS) : first_by_values(f, value, n);
            int64_t got = weight_format_find_nan(f, data, n);
            if (got != want) {
                fail_msg("%s, round %d: %lld, not %lld", f->name, round, (long long)got,
                         (long long)want);
            }
            n_found += want >= 0;
        }
        assert_true(n_found > ROUNDS / 50);
    }
}

static void other_codes_are_numbers(void **state)
{
    (void)state;
    static const enum weight_format_id OTHERS[] = {FORMAT_INT8, FORMAT_INT4, FORMAT_FP4};
    uint8_t codes[256];

    for (int i = 0; i < 256; i++) {
        codes[i] = (uint8_t)i;
    }
    for (size_t i = 0; i < ARRAY_LEN(OTHERS); i++) {
        assert_int_equal(weight_format_find_nan(weight_format_of(OTHERS[i]), codes, 256), -1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_nan_of_e4m3_is_found),
        cmocka_unit_test(every_block_that_is_no_number_is_found),
        cmocka_unit_test(other_codes_are_numbers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
