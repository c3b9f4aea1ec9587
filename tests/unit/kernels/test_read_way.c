/* How products of few rows read weights: which times decide, what is timed, that a
 * choice is kept, and that results do not depend on it. */
#include "kernels/cpu/cpu.h"
#include "tests/unit/kept_dir.h"
#include "tests/unit/ops.h"

enum { STEP_BYTES = 64 << 20, ROWS = 203, COLS = 1536, FEW = 4 };

static void another_way_must_be_faster_by_a_margin(void **state)
{
    (void)state;
    double equal[READ_WAYS_MAX][READ_TURNS], faster[READ_WAYS_MAX][READ_TURNS];
    for (int t = 0; t < READ_TURNS; t++) {
        equal[0][t] = faster[0][t] = 1;
        equal[1][t] = equal[2][t] = 0.98;
        /* most turns count, not those that were disturbed */
        faster[1][t] = t % 4 == 0 ? 3 : 0.9;
        faster[2][t] = t % 4 == 0 ? 0.1 : 1.1;
    }
    assert_int_equal(cpu_read_fastest(equal, 3, READ_TURNS), 0);
    assert_int_equal(cpu_read_fastest(faster, 3, READ_TURNS), 1);
    assert_int_equal(cpu_read_fastest(faster, 1, READ_TURNS), 0);
}

/* A step of one sequence whose products took so long by each way. */
static void step(struct cpu_read_ways *w, const int64_t us[READ_WAYS_MAX], int64_t bytes,
                 bool settled)
{
    cpu_read_took(w, READ_CODES, us[w->of[READ_CODES].now] / 2, bytes / 2);
    cpu_read_took(w, READ_CODES, us[w->of[READ_CODES].now] / 2, bytes / 2);
    cpu_read_ways_step(w, settled);
}

static void steps_choose_and_the_choice_is_kept(void **state)
{
    (void)state;
    const int64_t us[READ_WAYS_MAX] = {1000, 800, 900};
    struct cpu_read_ways w, next;
    char path[512];
    int32_t n = cpu_read_way_count(READ_CODES) * READ_TURNS;
    cpu_read_ways_init(&w, true);
    for (int32_t i = 0; i < n; i++) {
        assert_true(cpu_read_is_timed(&w, READ_CODES));
        step(&w, us, STEP_BYTES, true);
    }
    assert_false(cpu_read_is_timed(&w, READ_CODES));
    assert_true(cpu_read_is_timed(&w, READ_FLOATS));
    assert_string_equal(cpu_read_way(&w, READ_CODES)->name, "two-runs-far");
    cpu_read_ways_keep(&w);
    assert_int_equal(kept_files(path), 1);
    cpu_read_ways_init(&next, true);
    assert_false(cpu_read_is_timed(&next, READ_CODES));
    assert_true(cpu_read_is_timed(&next, READ_FLOATS));
    assert_ptr_equal(cpu_read_way(&next, READ_CODES), cpu_read_way(&w, READ_CODES));
    cpu_read_ways_init(&next, false);
    assert_false(cpu_read_is_timed(&next, READ_CODES));
    assert_string_equal(cpu_read_way(&next, READ_CODES)->name, "four-runs");
}

static void only_like_steps_are_compared(void **state)
{
    (void)state;
    const int64_t us[READ_WAYS_MAX] = {1000, 800, 900};
    struct cpu_read_ways w;
    cpu_read_ways_init(&w, true);
    for (int32_t i = 0; i < 8 * READ_TURNS; i++) {
        step(&w, us, STEP_BYTES, false);         /* weights are still moved */
        step(&w, us, 1 << 20, true);             /* fits into a cache */
        step(&w, us, STEP_BYTES << i % 2, true); /* of a step and of a prompt's last row */
    }
    assert_int_equal(w.of[READ_CODES].n_turns, 0);
    assert_true(cpu_read_is_timed(&w, READ_CODES));
    cpu_read_ways_keep(&w);
    cpu_read_ways_init(&w, true);
    assert_true(cpu_read_is_timed(&w, READ_CODES));
}

static void take(struct cpu_backend *c, int32_t way)
{
    for (int class = 0; class < READ_CLASSES; class ++) {
        c->reads.of[class].now = c->reads.of[class].taken =
            MIN(way, cpu_read_way_count((enum cpu_read_class) class) - 1);
    }
}

/* Products of x's first n rows. */
static float *product(struct rig *r, int32_t n, struct mat out, struct mat x, struct mat w)
{
    struct epilogue ep = {0};

    rig_begin_plain(r, n);
    out.rows = x.rows = n;
    r->b->ops->linear(r->b, out, x, w, &ep);
    rig_end(r);
    return rig_download(r, out);
}

static void check_bits(struct rig *r, struct mat out, struct mat x, struct mat w, const char *what)
{
    for (int32_t n = 1; n <= FEW; n++) {
        take(cpu_of(r->b), 0);
        float *first = product(r, n, out, x, w);
        for (int32_t way = 1; way < READ_WAYS_MAX; way++) {
            take(cpu_of(r->b), way);
            float *other = product(r, n, out, x, w);
            if (memcmp(first, other, (size_t)n * ROWS * sizeof(*first)) != 0) {
                fail_msg("%s: %d rows have other bits by way %d", what, n, way);
            }
            free(other);
        }
        free(first);
    }
}

static struct mat weight_in(struct rig *r, enum weight_format_id f)
{
    const struct weight_format *format = weight_format_of(f);
    size_t bytes = (size_t)weight_format_bytes(format, (int64_t)ROWS * COLS);
    uint8_t *blocks = rig_alloc(bytes);
    struct weight_piece p = {
        .data = blocks, .dtype = DTYPE_BF16, .rows = ROWS, .cols = COLS, .stride = COLS};
    struct weight_desc d = {.name = "test",
                            .kind = WEIGHT_LINEAR,
                            .dtype = DTYPE_BF16,
                            .rows = ROWS,
                            .cols = COLS,
                            .piece = &p,
                            .n_pieces = 1};
    struct mat m;
    struct err e = {0};

    for (size_t i = 0; i < bytes; i++) { /* as any part of a block an ordinary number */
        blocks[i] = (uint8_t)(0x28 + rig_below(r, 8));
    }
    p.format = format;
    if (r->b->ops->weight(r->b, &d, &m, &e) < 0) {
        fail_msg("%s", e.text);
    }
    free(blocks);
    return m;
}

static void results_do_not_depend_on_the_way(void **state)
{
    (void)state;
    const enum weight_format_id formats[] = {FORMAT_Q8_0, FORMAT_Q4_0, FORMAT_Q4_K, FORMAT_Q6_K};
    struct rig r;
    rig_open(&r);
    float *xv = rig_floats(&r, (int64_t)FEW * COLS, 1, DTYPE_F32);
    float *wv = rig_floats(&r, (int64_t)ROWS * COLS, 1, DTYPE_BF16);
    struct mat x = rig_mat(&r, FEW, COLS, DTYPE_F32, xv);
    struct mat out = rig_mat(&r, FEW, ROWS, DTYPE_F32, NULL);
    check_bits(&r, out, x, rig_weight(&r, WEIGHT_LINEAR, DTYPE_BF16, ROWS, COLS, wv), "bfloat16");
    check_bits(&r, out, x, rig_weight(&r, WEIGHT_LINEAR, DTYPE_F32, ROWS, COLS, wv), "float32");
    for (size_t i = 0; i < ARRAY_LEN(formats); i++) {
        check_bits(&r, out, x, weight_in(&r, formats[i]), weight_format_of(formats[i])->name);
    }
    free(xv);
    free(wv);
    rig_close(&r);
}

int main(void)
{
    unsetenv("QUIRE_CPU_WAYS");
    unsetenv("QUIRE_CPU_ISA");
#define WITH_ROOT(test) cmocka_unit_test_setup_teardown(test, make_cache_root, remove_cache_root)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_way_must_be_faster_by_a_margin),
        WITH_ROOT(steps_choose_and_the_choice_is_kept),
        WITH_ROOT(only_like_steps_are_compared),
        cmocka_unit_test(results_do_not_depend_on_the_way),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
