/* A device that is lost in the middle of a step: every later call reports the error,
 * and none waits for ever.
 *
 *     build/tests/unit/kernels/cuda/test_lost --device cuda
 */
#include "tests/unit/ops.h"

/* Adds to a row `away` bytes off, which is an invalid address unless 0. Returns 0, or
 * the error of step_end or step_wait. */
static int step_into_nowhere(struct rig *r, struct mat row, int64_t away, struct err *e)
{
    struct results res;
    struct mat to = row;

    to.data = (char *)row.data + away;
    rig_begin_plain(r, 1);
    r->b->ops->add(r->b, to, row, false);
    int ended = r->b->ops->step_end(r->b, e), rc = r->b->ops->step_wait(r->b, &res, e);
    return rc < 0 ? rc : ended;
}

static void every_step_after_a_lost_device_reports_it(void **state)
{
    (void)state;
    if (strcmp(rig_device, "cpu") == 0) {
        print_message("skipped: a CPU cannot be lost; --device cuda\n");
        skip();
    }
    struct rig r;
    struct err e = {0};
    rig_open(&r);
    struct mat row = rig_mat(&r, 1, 64, DTYPE_F32, NULL);
    assert_int_equal(step_into_nowhere(&r, row, 0, &e), 0);
    for (int i = 0; i < 6; i++) { /* more steps than there are buffers for steps in flight */
        assert_int_equal(step_into_nowhere(&r, row, i == 0 ? 1ll << 46 : 0, &e), ERR_DEVICE);
        assert_non_null(strstr(e.text, "illegal memory access"));
    }
    rig_close(&r);
}

static int group(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_step_after_a_lost_device_reports_it)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
