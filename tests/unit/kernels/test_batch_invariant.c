/* Batch invariance: under `deterministic` a row of a matrix product has the same bits
 * whatever other rows are in the step. On a CPU that is always so. For a GPU:
 * build/tests/unit/kernels/test_batch_invariant --device cuda. */
#include "tests/unit/ops.h"

enum { ROWS = RIG_TOKENS, CPU_WEIGHTS = 2 << 20, SMALL_WEIGHTS = 200 << 10 };

static const int32_t shapes[][2] = {{256, 256},  {704, 256},   {4096, 256},  {1280, 1024},
                                    {301, 2600}, {4096, 4096}, {1024, 14336}};
static const int32_t some_rows[] = {1,  2,  3,  5,   8,   16,  17,  31,  32,
                                    48, 64, 65, 100, 128, 200, 256, 257, 512};

static void open_invariant(struct rig *r)
{
    struct err e = {0};
    struct backend_config c = {.max_tokens = ROWS,
                               .max_seqs = RIG_SEQS,
                               .max_samples = 8,
                               .max_blocks_per_seq = 1,
                               .deterministic = true};

    *r = (struct rig){.rng = 11};
    if (backend_open(&r->b, rig_device, &c, &e) < 0) {
        fail_msg("%s", e.text);
    }
}

/* Products of x's first n rows, with the residual added. */
static float *product(struct rig *r, int32_t n, struct mat out, struct mat x, struct mat w,
                      struct mat residual)
{
    struct epilogue ep = {.residual = residual};

    rig_begin_plain(r, n);
    out.rows = x.rows = ep.residual.rows = n;
    r->b->ops->linear(r->b, out, x, w, &ep);
    rig_end(r);
    return rig_download(r, out);
}

/* range: of the numbers; where it is small, products are denormal numbers. */
static void check_shape(struct rig *r, enum dtype t, int32_t n, int32_t k, float range)
{
    float *xv = rig_floats(r, (int64_t)ROWS * k, range, t);
    float *wv = rig_floats(r, (int64_t)n * k, range, t);
    float *rv = rig_floats(r, (int64_t)ROWS * n, range * range, t);
    enum dtype act = backend_act_dtype(r->b, t);
    struct mat x = rig_mat(r, ROWS, k, act, xv), residual = rig_mat(r, ROWS, n, act, rv),
               out = rig_mat(r, ROWS, n, act, NULL);
    struct mat w = rig_weight(r, WEIGHT_LINEAR, t, n, k, wv);
    float *all = product(r, ROWS, out, x, w, residual);

    for (size_t i = 0; i < ARRAY_LEN(some_rows); i += rig_small() ? 4 : 1) {
        float *few = product(r, some_rows[i], out, x, w, residual);
        if (memcmp(few, all, (size_t)some_rows[i] * (size_t)n * sizeof(*few)) != 0) {
            fail_msg("[%d, %d] of %s: %d rows differ from the same of %d", n, k, dtype_name(t),
                     some_rows[i], ROWS);
        }
        free(few);
    }
    free(all);
    free(xv);
    free(wv);
    free(rv);
}

static void rows_do_not_depend_on_their_number(void **state)
{
    (void)state;
    const char *isa = getenv("QUIRE_CPU_ISA");
    if (strcmp(rig_device, "cpu") == 0 && isa && strcmp(isa, "plain") == 0) {
        return;
    }
    struct rig r;
    open_invariant(&r);
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        int64_t weights = (int64_t)shapes[i][0] * shapes[i][1];
        if (weights > (rig_small()                      ? SMALL_WEIGHTS
                       : strcmp(rig_device, "cpu") == 0 ? CPU_WEIGHTS
                                                        : INT64_MAX)) {
            continue;
        }
        check_shape(&r, DTYPE_BF16, shapes[i][0], shapes[i][1], 1);
        check_shape(&r, DTYPE_F16, shapes[i][0], shapes[i][1], 1);
    }
    rig_close(&r);
}

/* Sums whose products, sums or inputs are denormal numbers. */
static void nor_do_rows_of_tiny_numbers(void **state)
{
    (void)state;
    static const float range[] = {1e-18f, 3e-19f, 1e-19f, 1e-38f};
    const char *isa = getenv("QUIRE_CPU_ISA");
    if (strcmp(rig_device, "cpu") != 0 || (isa && strcmp(isa, "plain") == 0)) {
        return;
    }
    struct rig r;
    open_invariant(&r);
    for (size_t i = 0; i < ARRAY_LEN(range); i++) {
        check_shape(&r, DTYPE_BF16, 150, 608, range[i]);
    }
    rig_close(&r);
}

static int group(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_do_not_depend_on_their_number),
                                       cmocka_unit_test(nor_do_rows_of_tiny_numbers)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
