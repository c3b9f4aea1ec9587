/* What would break: memory that is not zeroed, objects that overlap or are far apart,
 * one that two threads hold, and a page that cannot be had. */
#include "tests/unit/nomem.h"

#include <pthread.h>
#include <string.h>

#include "config/base/slab.h"

enum { N = 5000, THREADS = 4, ROUNDS = 20000, HELD = 16 };

struct object {
    char bytes[100];
};

static void check_fresh(const struct object *p)
{
    static const struct object zeros;

    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 64, 0);
    assert_memory_equal(p, &zeros, sizeof(zeros));
}

static void objects_are_zeroed_and_apart(void **state)
{
    (void)state;
    struct slab s = SLAB_OF(struct object);
    struct object *p[N];

    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N; i++) {
            p[i] = slab_take(&s);
            check_fresh(p[i]);
            memset(p[i], i % 255 + 1, sizeof(*p[i]));
        }
        for (int i = 0; i < N; i++) {
            for (size_t k = 0; k < sizeof(*p[i]); k++) {
                assert_int_equal((unsigned char)p[i]->bytes[k], i % 255 + 1);
            }
        }
        for (int i = 0; i < N; i++) {
            slab_give(&s, p[i]);
        }
    }
    slab_give(&s, NULL);
}

/* 100 bytes are two lines, and the next odd number is three. */
static void objects_are_next_to_each_other(void **state)
{
    (void)state;
    struct slab s = SLAB_OF(struct object);
    if (!REPLACED_MALLOC) {
        skip();
    }
    char *before = slab_take(&s);
    assert_int_equal((uintptr_t)before % HUGE_PAGE_BYTES, 64);
    for (int i = 0; i < 100; i++) {
        char *p = slab_take(&s);
        assert_ptr_equal(p, before + (ptrdiff_t)3 * 64);
        before = p;
    }
    slab_give(&s, before);
    assert_ptr_equal(slab_take(&s), before);
}

static void a_page_that_cannot_be_had_is_asked_for_again(void **state)
{
    (void)state;
    struct slab s = SLAB_OF(struct object);
    if (!REPLACED_MALLOC) {
        skip();
    }
    counting = true;
    countdown = 0;
    void *p = slab_take(&s);
    counting = false;
    countdown = -1;
    assert_null(p);
    check_fresh(slab_take(&s));
}

static struct slab shared = SLAB_OF(struct object);

static void *take_and_give(void *arg)
{
    struct object *held[HELD] = {NULL};
    char mine = (char)(intptr_t)arg;

    for (int i = 0; i < ROUNDS; i++) {
        struct object **at = &held[i * 7 % HELD];
        for (size_t k = 0; *at && k < sizeof(**at); k++) {
            if ((*at)->bytes[k] != mine) {
                return "another thread wrote there";
            }
        }
        slab_give(&shared, *at);
        *at = slab_take(&shared);
        memset(*at, mine, sizeof(**at));
    }
    for (int i = 0; i < HELD; i++) {
        slab_give(&shared, held[i]);
    }
    return NULL;
}

static void threads_hold_different_objects(void **state)
{
    (void)state;
    pthread_t thread[THREADS];

    for (intptr_t i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&thread[i], NULL, take_and_give, (void *)(i + 1)), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(thread[i], &wrong);
        assert_null(wrong);
    }
}

static void large_memory_begins_at_a_huge_page(void **state)
{
    (void)state;
    char *p = huge_alloc(HUGE_PAGE_BYTES + 1), *few = huge_alloc(0);

    assert_non_null(p);
    assert_non_null(few);
    assert_int_equal((uintptr_t)p % HUGE_PAGE_BYTES, 0);
    p[HUGE_PAGE_BYTES] = 1;
    free(p);
    free(few);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(objects_are_zeroed_and_apart),
        cmocka_unit_test(objects_are_next_to_each_other),
        cmocka_unit_test(a_page_that_cannot_be_had_is_asked_for_again),
        cmocka_unit_test(threads_hold_different_objects),
        cmocka_unit_test(large_memory_begins_at_a_huge_page),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
