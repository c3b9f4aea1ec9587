/* Tests when the next step is launched under policy: fair. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/loop/launch_delay.h"

static void nothing_is_delayed_before_a_step_was_seen(void **state)
{
    (void)state;
    struct launch_delay p = {0};
    assert_int_equal(launch_delay_hold_us(&p, 0), 0);
    launch_delay_launched(&p, 1000, 20000);
    assert_int_equal(launch_delay_hold_us(&p, 1000), 0);
}

static void the_next_one_is_launched_shortly_before_the_end(void **state)
{
    (void)state;
    struct launch_delay p = {0};
    launch_delay_launched(&p, 0, 10000);
    launch_delay_launched(&p, 100, 20000);
    assert_int_equal(launch_delay_hold_us(&p, 100), 0); /* two run: no third is launched anyway */
    launch_delay_ended(&p, 20000);                      /* twice as long as estimated */
    assert_int_equal(launch_delay_hold_us(&p, 20000), 40000 - 4000 - 1000);
    assert_int_equal(launch_delay_hold_us(&p, 50000), 5000);
    assert_int_equal(launch_delay_hold_us(&p, 56000), 0);
}

static void estimates_follow_what_steps_take(void **state)
{
    (void)state;
    struct launch_delay p = {0};
    int64_t now = 0;
    launch_delay_launched(&p, now, 10000);
    for (int i = 0; i < 60; i++) { /* half the time, then three times */
        launch_delay_launched(&p, now, 10000);
        now += i < 30 ? 5000 : 30000;
        launch_delay_ended(&p, now);
    }
    assert_in_range(launch_delay_hold_us(&p, now), 25900, 26000);
}

static void unknown_costs_delay_nothing(void **state)
{
    (void)state;
    struct launch_delay p = {0};
    launch_delay_launched(&p, 0, 0);
    launch_delay_launched(&p, 0, 0);
    launch_delay_ended(&p, 50000);
    assert_int_equal(launch_delay_hold_us(&p, 50000), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_delayed_before_a_step_was_seen),
        cmocka_unit_test(the_next_one_is_launched_shortly_before_the_end),
        cmocka_unit_test(estimates_follow_what_steps_take),
        cmocka_unit_test(unknown_costs_delay_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
