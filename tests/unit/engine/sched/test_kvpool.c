#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/sched/kv/kvpool.h"

static struct kvpool pool;

static int open_pool(void **state)
{
    (void)state;
    return kvpool_init(&pool, 6, NULL);
}

static int close_pool(void **state)
{
    (void)state;
    kvpool_release(&pool);
    return 0;
}

static void every_block_is_taken_once(void **state)
{
    (void)state;
    bool seen[6] = {0};
    for (int i = 0; i < 6; i++) {
        int32_t b = kvpool_take(&pool);
        assert_in_range(b, 0, 5);
        assert_false(seen[b]);
        seen[b] = true;
        assert_null(kvpool_check(&pool));
    }
    assert_int_equal(kvpool_available(&pool), 0);
    assert_int_equal(kvpool_peek(&pool), -1);
    assert_int_equal(kvpool_used(&pool), 6);
}

static void a_shared_block_returns_with_its_last_holder(void **state)
{
    (void)state;
    int32_t b = kvpool_take(&pool);
    kvpool_ref(&pool, b);
    kvpool_unref(&pool, b);
    assert_int_equal(kvpool_available(&pool), 5);
    kvpool_unref(&pool, b);
    assert_int_equal(kvpool_available(&pool), 6);
    assert_null(kvpool_check(&pool));
}

static void cached_blocks_are_taken_last_and_oldest_first(void **state)
{
    (void)state;
    int32_t b[6];
    for (int i = 0; i < 6; i++) {
        b[i] = kvpool_take(&pool);
    }
    kvpool_set_hashed(&pool, b[1], true);
    kvpool_set_hashed(&pool, b[4], true);
    for (int i = 5; i >= 0; i--) {
        kvpool_unref(&pool, b[i]); /* b[4] is freed before b[1] */
    }
    assert_int_equal(pool.n_cached, 2);
    for (int i = 0; i < 4; i++) {
        int32_t taken = kvpool_take(&pool);
        assert_int_not_equal(taken, b[1]);
        assert_int_not_equal(taken, b[4]);
    }
    assert_int_equal(kvpool_peek(&pool), b[4]);
    assert_null(kvpool_check(&pool));
}

static void a_cached_block_comes_back_to_life(void **state)
{
    (void)state;
    int32_t b = kvpool_take(&pool);
    kvpool_set_hashed(&pool, b, true);
    kvpool_unref(&pool, b);
    kvpool_ref(&pool, b);
    assert_int_equal(kvpool_used(&pool), 1);
    assert_int_equal(pool.n_cached, 0);
    assert_null(kvpool_check(&pool));
}

static void a_block_that_is_no_longer_hashed_is_taken_first(void **state)
{
    (void)state;
    int32_t b = kvpool_take(&pool);
    kvpool_set_hashed(&pool, b, true);
    kvpool_unref(&pool, b);
    kvpool_set_hashed(&pool, b, false);
    assert_int_equal(kvpool_peek(&pool), b);
    assert_null(kvpool_check(&pool));
}

static void check_sees_a_wrong_count_and_a_broken_list(void **state)
{
    (void)state;
    int32_t b = kvpool_take(&pool);
    pool.block[b].count = 0;
    assert_non_null(kvpool_check(&pool));
    pool.block[b].count = 1;
    pool.block[pool.last].prev = pool.last;
    assert_non_null(kvpool_check(&pool));
}

static void a_pool_may_be_empty(void **state)
{
    (void)state;
    struct kvpool none;
    assert_int_equal(kvpool_init(&none, 0, NULL), 0);
    assert_int_equal(kvpool_available(&none), 0);
    assert_null(kvpool_check(&none));
    kvpool_release(&none);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_block_is_taken_once, open_pool, close_pool),
        cmocka_unit_test_setup_teardown(a_shared_block_returns_with_its_last_holder, open_pool,
                                        close_pool),
        cmocka_unit_test_setup_teardown(cached_blocks_are_taken_last_and_oldest_first, open_pool,
                                        close_pool),
        cmocka_unit_test_setup_teardown(a_cached_block_comes_back_to_life, open_pool, close_pool),
        cmocka_unit_test_setup_teardown(a_block_that_is_no_longer_hashed_is_taken_first, open_pool,
                                        close_pool),
        cmocka_unit_test_setup_teardown(check_sees_a_wrong_count_and_a_broken_list, open_pool,
                                        close_pool),
        cmocka_unit_test(a_pool_may_be_empty),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
