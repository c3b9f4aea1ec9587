/* Histograms: the bucket of a value, and sums with several writers. */
#include "config/base/hist.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>

#include <cmocka.h>

static uint64_t count_at(struct hist *h, int i)
{
    return atomic_load(&h->count[i]);
}

static void a_bound_belongs_to_its_bucket(void **state)
{
    (void)state;
    static const double bound[] = {1, 2, 5};
    struct hist h;
    hist_init(&h, bound, 3);
    const double value[] = {-1, 0, 1, 1.5, 2, 5, 5.001, INFINITY};
    for (size_t i = 0; i < ARRAY_LEN(value); i++) {
        hist_add(&h, value[i]);
    }
    assert_int_equal(count_at(&h, 0), 3);
    assert_int_equal(count_at(&h, 1), 2);
    assert_int_equal(count_at(&h, 2), 1);
    assert_int_equal(count_at(&h, 3), 2);
    hist_init(&h, bound, 3);
    hist_add(&h, NAN);
    assert_int_equal(count_at(&h, 3), 1);
}

static void check_bounds(const double *bound, int n)
{
    assert_in_range(n, 1, HIST_MAX_BUCKETS);
    for (int i = 1; i < n; i++) {
        assert_true(bound[i - 1] < bound[i]);
    }
}

static void bounds_ascend(void **state)
{
    (void)state;
    check_bounds(HIST_TTFT_S, HIST_TTFT_N);
    check_bounds(HIST_ITL_S, HIST_ITL_N);
    check_bounds(HIST_LATENCY_S, HIST_LATENCY_N);
    check_bounds(HIST_TOKENS, HIST_TOKENS_N);
    check_bounds(HIST_STEP_S, HIST_STEP_N);
    check_bounds(HIST_N, HIST_N_N);
}

static void *add_many(void *arg)
{
    for (int i = 0; i < 10000; i++) {
        hist_add(arg, 0.5);
    }
    return NULL;
}

static void nothing_is_lost_between_threads(void **state)
{
    (void)state;
    struct hist h;
    hist_init(&h, HIST_N, HIST_N_N);
    pthread_t thread[4];
    for (size_t i = 0; i < ARRAY_LEN(thread); i++) {
        assert_int_equal(pthread_create(&thread[i], NULL, add_many, &h), 0);
    }
    for (size_t i = 0; i < ARRAY_LEN(thread); i++) {
        pthread_join(thread[i], NULL);
    }
    assert_int_equal(count_at(&h, 0), 40000);
    assert_true(atomic_load(&h.sum) == 20000.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_bound_belongs_to_its_bucket),
        cmocka_unit_test(bounds_ascend),
        cmocka_unit_test(nothing_is_lost_between_threads),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
