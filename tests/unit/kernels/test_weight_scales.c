/* The values of codes whose scales are a tensor of their own.
 *
 *     build/tests/unit/kernels/test_weight_scales
 */
#include "tests/unit/ops.h"

#include "kernels/weight_format.h"

static void every_e4m3_code_has_its_value(void **state)
{
    (void)state;
    for (int32_t code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        double want = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
        float v = weight_code_value(FORMAT_FP8, (uint8_t)code);
        if ((code & 127) == 127) {
            assert_true(isnan(v));
        } else {
            assert_true((double)v == (code & 128 ? -want : want));
            assert_true((signbit(v) != 0) == (code >= 128));
        }
    }
}

/* Between neighbours the nearer one is taken, halfway the even one. */
static void values_are_rounded_to_the_nearest_e4m3(void **state)
{
    (void)state;
    for (int32_t c = 0; c < 0x7E; c++) {
        float low = weight_code_value(FORMAT_FP8, (uint8_t)c),
              high = weight_code_value(FORMAT_FP8, (uint8_t)(c + 1)), half = (low + high) / 2;
        assert_int_equal(weight_e4m3_of(low), c);
        assert_int_equal(weight_e4m3_of(-low), c | 0x80);
        assert_int_equal(weight_e4m3_of(nextafterf(half, 0)), c);
        assert_int_equal(weight_e4m3_of(nextafterf(half, 1000)), c + 1);
        assert_int_equal(weight_e4m3_of(half), c % 2 ? c + 1 : c);
    }
    assert_int_equal(weight_e4m3_of(1e9f), 0x7E);
    assert_int_equal(weight_e4m3_of(-465), 0xFE);
}

static void every_e2m1_code_has_its_value(void **state)
{
    (void)state;
    static const float WANT[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int32_t code = 0; code < 16; code++) {
        float v = weight_code_value(FORMAT_FP4, (uint8_t)code);
        assert_true(v == (code & 8 ? -WANT[code & 7] : WANT[code & 7]));
        assert_true((signbit(v) != 0) == (code >= 8));
    }
}

/* Between neighbours the nearer one is taken, halfway the one with an even mantissa. */
static void values_are_rounded_to_the_nearest_e2m1(void **state)
{
    (void)state;
    for (int32_t c = 0; c < 7; c++) {
        float low = weight_code_value(FORMAT_FP4, (uint8_t)c),
              high = weight_code_value(FORMAT_FP4, (uint8_t)(c + 1)), half = (low + high) / 2;
        assert_int_equal(weight_e2m1_of(low), c);
        assert_int_equal(weight_e2m1_of(-low), c | 8);
        assert_int_equal(weight_e2m1_of(nextafterf(half, 0)), c);
        assert_int_equal(weight_e2m1_of(nextafterf(half, 10)), c + 1);
        assert_int_equal(weight_e2m1_of(half), c % 2 ? c + 1 : c);
        assert_int_equal(weight_e2m1_of(-half), (c % 2 ? c + 1 : c) | 8);
    }
    assert_int_equal(weight_e2m1_of(1e9f), 7);
    assert_int_equal(weight_e2m1_of(-6.5f), 15);
}

static void scales_have_the_values_of_their_types(void **state)
{
    (void)state;
    static const uint8_t F32[] = {9, 0, 0, 0x40, 0x3F, 0, 0, 0x20, 0xC0}; /* unaligned */
    static const uint8_t F16[] = {0x00, 0x3A, 0x01, 0x00}, BF16[] = {0x40, 0x3F},
                         E8M0[] = {127, 0, 254, 255}, E4M3[] = {0x38, 0x7E, 0x7F};
    struct weight_scales s = {.data = F32 + 1, .type = SCALE_F32};
    assert_true(weight_scale_load(&s, 0) == 0.75f && weight_scale_load(&s, 1) == -2.5f);
    s = (struct weight_scales){.data = F16, .type = SCALE_F16};
    assert_true(weight_scale_load(&s, 0) == 0.75f && weight_scale_load(&s, 1) == 0x1p-24f);
    s = (struct weight_scales){.data = BF16, .type = SCALE_BF16};
    assert_true(weight_scale_load(&s, 0) == 0.75f);
    s = (struct weight_scales){.data = E8M0, .type = SCALE_E8M0};
    assert_true(weight_scale_load(&s, 0) == 1 && weight_scale_load(&s, 1) == 0x1p-127f &&
                weight_scale_load(&s, 2) == 0x1p127f && isnan(weight_scale_load(&s, 3)));
    s = (struct weight_scales){.data = E4M3, .type = SCALE_E4M3};
    assert_true(weight_scale_load(&s, 0) == 1 && weight_scale_load(&s, 1) == 448 &&
                isnan(weight_scale_load(&s, 2)));
}

enum { ROWS = 37, COLS = 75, STRIDE = 80, GROUPS = ROWS * COLS };

static int code_at(const uint8_t *codes, enum weight_format_id id, int32_t i, int32_t j)
{
    int32_t at = i * STRIDE + j;

    if (weight_format_of(id)->bits == 8) {
        return codes[at];
    }
    return at % 2 ? codes[at / 2] >> 4 : codes[at / 2] & 15;
}

/* Rows of a weight whose groups are `high` x `wide`, 0: all, against the definition. */
static void check_groups(struct rig *r, enum weight_format_id id, int32_t high, int32_t wide,
                         bool zeros)
{
    static uint8_t codes[ROWS * STRIDE], zero[GROUPS];
    static float scale[GROUPS];
    float out[COLS];
    const struct weight_format *f = weight_format_of(id);
    struct weight_scales s = {.data = scale,
                              .type = SCALE_F32,
                              .group_rows = high,
                              .group_cols = wide,
                              .stride = COLS,
                              .zero = zeros ? zero : NULL,
                              .zero_stride = COLS,
                              .factor = 0.5f};

    for (size_t i = 0; i < sizeof(codes); i++) {
        codes[i] = (uint8_t)(rig_next(r) & 0xF7); /* no NaN of e4m3 */
    }
    for (int32_t i = 0; i < GROUPS; i++) {
        scale[i] = rig_uniform(r);
        zero[i] = (uint8_t)(rig_next(r) & (f->bits == 8 ? 255 : 15));
    }
    for (int32_t i = 0; i < ROWS; i++) {
        weight_scales_decode(f, &s, codes + weight_format_bytes(f, (int64_t)i * STRIDE), i, COLS,
                             out);
        for (int32_t j = 0; j < COLS; j++) {
            int32_t group = (high ? i / high : 0) * COLS + (wide ? j / wide : 0);
            float z = zeros               ? id == FORMAT_INT8 ? (int8_t)zero[group] : zero[group]
                                    : id == FORMAT_INT4 ? 8
                                          : 0;
            float code = weight_code_value(id, (uint8_t)code_at(codes, id, i, j));
            float want = 0.5f * scale[group] * (code - z);
            assert_memory_equal(&out[j], &want, sizeof(want));
        }
    }
    int32_t row = high ? 2 * high : 3, col = wide ? 2 * wide : 0; /* a slice is a weight */
    struct weight_scales part = weight_scales_slice(&s, row, col);
    float whole[COLS];
    weight_scales_decode(f, &s, codes + weight_format_bytes(f, (int64_t)row * STRIDE), row, COLS,
                         whole);
    weight_scales_decode(f, &part, codes + weight_format_bytes(f, (int64_t)row * STRIDE + col), 0,
                         COLS - col, out);
    assert_memory_equal(out, whole + col, (size_t)(COLS - col) * sizeof(*out));
}

static void values_follow_the_groups_of_rows_and_columns(void **state)
{
    (void)state;
    static const struct {
        int32_t high, wide;
    } GROUP[] = {{0, 0}, {1, 0}, {1, 16}, {1, 32}, {16, 32}, {4, 0}, {0, 8}};
    struct rig r;
    rig_open(&r);
    for (int id = FORMAT_FP8; id <= FORMAT_FP4; id++) {
        for (size_t i = 0; i < ARRAY_LEN(GROUP); i++) {
            check_groups(&r, (enum weight_format_id)id, GROUP[i].high, GROUP[i].wide, false);
            if (id == FORMAT_INT8 || id == FORMAT_INT4) {
                check_groups(&r, (enum weight_format_id)id, GROUP[i].high, GROUP[i].wide, true);
            }
        }
    }
    rig_close(&r);
}

static int all_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_e4m3_code_has_its_value),
        cmocka_unit_test(values_are_rounded_to_the_nearest_e4m3),
        cmocka_unit_test(every_e2m1_code_has_its_value),
        cmocka_unit_test(values_are_rounded_to_the_nearest_e2m1),
        cmocka_unit_test(scales_have_the_values_of_their_types),
        cmocka_unit_test(values_follow_the_groups_of_rows_and_columns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, all_tests);
}
