/* Runs never overlap, can be taken again as a whole once given back, and pages behind
 * REGIONS_KEPT_BYTES do not stay resident. */
#include "engine/sched/kv/regions.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RUNS = 32, TURNS = 20000 };

/* A sanitizer shadows all address space. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static uint64_t seed = 0x9e3779b97f4a7c15u;

static uint32_t below(uint32_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32) % n;
}

struct taken {
    unsigned char *at;
    int64_t bytes;
    unsigned char mark;
};

static void check_whole(const struct regions *a)
{
    assert_int_equal(a->n_taken, 0);
    assert_int_equal(a->n_runs, 1);
    assert_int_equal(a->run[0].n, a->n_lines);
    assert_int_equal(a->most, a->n_lines);
}

static void take_one(struct regions *a, struct taken *t)
{
    int64_t bytes = 1 + below(6 * 4096);
    bool fits = regions_fits(a, bytes);
    unsigned char *at = regions_take(a, bytes);

    assert_int_equal(fits, at != NULL);
    if (at) {
        *t = (struct taken){at, bytes, (unsigned char)(1 + below(255))};
        memset(at, t->mark, (size_t)bytes);
    }
}

static void give_one(struct regions *a, struct taken *t)
{
    assert_int_equal(t->at[0], t->mark);
    assert_int_equal(t->at[t->bytes - 1], t->mark);
    regions_give(a, t->at, t->bytes);
    *t = (struct taken){0};
}

static void runs_do_not_overlap_and_join_again(void **state)
{
    struct regions a;
    struct err e;
    struct taken t[RUNS + 1] = {0};

    (void)state;
    assert_int_equal(regions_init(&a, 50 * 4096, RUNS, &e), 0);
    assert_true(regions_bytes(&a) >= 50 * 4096);
    for (int32_t i = 0; i < TURNS; i++) {
        struct taken *one = &t[below(RUNS + 1)];
        if (one->at) {
            give_one(&a, one);
        } else {
            take_one(&a, one);
        }
        assert_true(a.n_taken <= RUNS && a.n_runs <= RUNS + 1);
    }
    for (int32_t i = 0; i <= RUNS; i++) {
        if (t[i].at) {
            give_one(&a, &t[i]);
        }
    }
    check_whole(&a);
    assert_null(regions_take(&a, regions_bytes(&a) + 1));
    assert_true(regions_fits(&a, regions_bytes(&a)));
    regions_release(&a);
}

/* Pages behind REGIONS_KEPT_BYTES are zero when they are taken again. */
static void what_is_given_back_does_not_stay(void **state)
{
    struct regions a;
    struct err e;
    int64_t bytes = REGIONS_KEPT_BYTES + (1 << 20);

    (void)state;
    assert_int_equal(regions_init(&a, 2 * bytes, 2, &e), 0);
    char *p = regions_take(&a, bytes);
    assert_non_null(p);
    p[0] = p[REGIONS_KEPT_BYTES] = p[bytes - 1] = 1;
    regions_give(&a, p, bytes);
    assert_ptr_equal(regions_take(&a, bytes), p);
    assert_int_equal(p[0], 1);
    assert_int_equal(p[REGIONS_KEPT_BYTES], 0);
    assert_int_equal(p[bytes - 1], 0);
    regions_give(&a, p, bytes);
    check_whole(&a);
    regions_release(&a);
}

/* A page that two runs share stays until both are given back. */
static void a_shared_page_stays_as_long_as_a_run_needs_it(void **state)
{
    struct regions a;
    struct err e;
    enum { BYTES = 4096 * 3 / 2 };

    (void)state;
    assert_int_equal(regions_init(&a, 2 * REGIONS_KEPT_BYTES, 8, &e), 0);
    char *kept = regions_take(&a, REGIONS_KEPT_BYTES), *p[4];
    for (int32_t i = 0; i < 4; i++) {
        p[i] = regions_take(&a, BYTES);
        assert_non_null(p[i]);
        memset(p[i], 1 + i, BYTES);
    }
    regions_give(&a, p[1], BYTES);
    assert_int_equal(p[0][BYTES - 1], 1);
    assert_int_equal(p[2][0], 3);
    regions_give(&a, p[0], BYTES);
    assert_int_equal(p[0][BYTES - 1], 0);
    assert_int_equal(p[1][0], 0);
    assert_int_equal(p[2][0], 3);
    regions_give(&a, p[3], BYTES);
    assert_int_equal(p[2][BYTES - 1], 3);
    regions_give(&a, p[2], BYTES);
    assert_int_equal(p[2][BYTES - 1], 0);
    regions_give(&a, kept, REGIONS_KEPT_BYTES);
    check_whole(&a);
    regions_release(&a);
}

/* Far more than any machine allows: less is reserved, and regions_bytes tells. */
static void less_is_reserved_where_the_system_has_no_more(void **state)
{
    struct regions a;
    struct err e;

    (void)state;
    if (SANITIZED) {
        skip();
    }
    assert_int_equal(regions_init(&a, INT64_MAX / 4, 2, &e), 0);
    assert_true(regions_bytes(&a) < INT64_MAX / 4);
    char *p = regions_take(&a, 1 << 20);
    assert_non_null(p);
    p[0] = 1;
    regions_give(&a, p, 1 << 20);
    regions_release(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_do_not_overlap_and_join_again),
        cmocka_unit_test(what_is_given_back_does_not_stay),
        cmocka_unit_test(a_shared_page_stays_as_long_as_a_run_needs_it),
        cmocka_unit_test(less_is_reserved_where_the_system_has_no_more),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
