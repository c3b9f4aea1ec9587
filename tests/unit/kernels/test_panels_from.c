/* From how many rows panels multiply: which times decide, that the choice is kept for
 * the processor and its threads, and what takes its place. */
#include "kernels/cpu/cpu.h"
#include "tests/unit/kept_dir.h"
#include "tests/unit/ops.h"

#include <unistd.h>

static enum cpu_from choice(double tiles_half, double tiles, double panels_half, double panels)
{
    const double of_tiles[2] = {tiles_half, tiles}, of_panels[2] = {panels_half, panels};

    return cpu_from_choice(of_tiles, of_panels);
}

static void the_threshold_moves_where_that_is_clearly_faster(void **state)
{
    (void)state;
    assert_int_equal(choice(50, 100, 50, 100), CPU_FROM_BUILT);
    assert_int_equal(choice(50, 100, 48, 80), CPU_FROM_BUILT);
    assert_int_equal(choice(50, 100, 47, 80), CPU_FROM_HALF);
    assert_int_equal(choice(50, 100, 80, 104), CPU_FROM_BUILT);
    assert_int_equal(choice(50, 100, 80, 106), CPU_FROM_TWICE);
    assert_int_equal(choice(50, 100, 40, 120), CPU_FROM_HALF); /* noise */
}

/* cpu_panels.from of a table for weights of type t once a weight is there, and as it is
 * built; false: there are no panels to choose. */
static bool threshold(enum dtype t, int32_t *ret, int32_t *ret_built)
{
    struct rig r;

    rig_open(&r);
    struct cpu_backend *c = cpu_of(r.b);
    const struct cpu_panels *p = cpu_panels_of(&c->k, t);
    *ret_built = p->from;
    bool some = p->k_block > 0 && p->from / 2 > cpu_tiles_of(&c->k, t)->rows;
    cpu_panels_from(c, t);
    *ret = p->from;
    cpu_panels_from(c, t);
    assert_int_equal(*ret, p->from);
    rig_close(&r);
    return some;
}

static void the_threshold_is_kept(void **state)
{
    (void)state;
    int32_t from, built, again;
    if (!threshold(DTYPE_F32, &from, &built)) {
        assert_int_equal(from, built);
        skip();
    }
    assert_true(from == built || from == built / 2 || from == built * 2);
    for (int i = 0; i < 3; i++) {
        assert_true(threshold(DTYPE_F32, &again, &built));
        assert_int_equal(again, from);
    }
    setenv("QUIRE_CPU_WAYS", "own", 1);
    threshold(DTYPE_F32, &again, &built);
    unsetenv("QUIRE_CPU_WAYS");
    assert_int_equal(again, built);
}

int main(void)
{
    unsetenv("QUIRE_CPU_WAYS");
    unsetenv("QUIRE_CPU_ISA");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_threshold_moves_where_that_is_clearly_faster),
        cmocka_unit_test_setup_teardown(the_threshold_is_kept, make_cache_root, remove_cache_root),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
