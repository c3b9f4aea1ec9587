/* Tests the request queue: order, bounds, all or none, wake-ups, threads. Groups are
 * only passed through, so plain addresses stand in for them. */
#include "engine/loop/inbox.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static char body[1 << 16];

static struct group *fake(int64_t i)
{
    return (struct group *)(void *)&body[i];
}

static int64_t number(const struct group *g)
{
    return (const char *)g - body;
}

static void a_set_goes_in_whole_or_not_at_all(void **state)
{
    (void)state;
    struct inbox b;
    struct err e;
    struct group *set[8], *got[16];
    assert_int_equal(inbox_init(&b, 10, &e), 0);
    for (int i = 0; i < 8; i++) {
        set[i] = fake(i);
    }
    assert_int_equal(inbox_submit(&b, set, 8, &e), 0);
    assert_int_equal(inbox_submit(&b, set, 3, &e), ERR_FULL);
    assert_non_null(strstr(e.text, "8 requests wait, at most 10"));
    assert_int_equal(inbox_submit(&b, set, 2, &e), 0);
    assert_int_equal(inbox_submit(&b, set, 1, &e), ERR_FULL);
    assert_int_equal(inbox_take(&b, got, 16), 10);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(number(got[i]), i % 8);
    }
    inbox_release(&b);
}

static void what_was_taken_counts_as_waiting_until_admitted(void **state)
{
    (void)state;
    struct inbox b;
    struct err e;
    struct group *set[4] = {fake(0), fake(1), fake(2), fake(3)}, *got[4];
    assert_int_equal(inbox_init(&b, 4, &e), 0);
    assert_int_equal(inbox_submit(&b, set, 4, &e), 0);
    assert_int_equal(inbox_take(&b, got, 4), 4);
    assert_int_equal(inbox_waiting(&b), 4);
    assert_int_equal(inbox_submit(&b, set, 1, &e), ERR_FULL);
    inbox_admit(&b, 3);
    assert_int_equal(inbox_submit(&b, set, 3, &e), 0);
    assert_int_equal(inbox_submit(&b, set, 1, &e), ERR_FULL);
    assert_int_equal(inbox_take(&b, got, 2), 2);
    assert_int_equal(inbox_take(&b, got, 4), 1);
    inbox_release(&b);
}

static void more_than_the_queue_holds_is_refused_for_good(void **state)
{
    (void)state;
    struct inbox b;
    struct err e;
    struct group *set[5] = {0};
    assert_int_equal(inbox_init(&b, 4, &e), 0);
    assert_int_equal(inbox_check(&b, 5, &e), ERR_INVALID);
    assert_int_equal(inbox_submit(&b, set, 5, &e), ERR_INVALID);
    assert_string_equal(e.param, "prompt");
    assert_int_equal(inbox_check(&b, 4, &e), 0);
    assert_int_equal(inbox_submit(&b, set, 3, &e), 0);
    assert_int_equal(inbox_check(&b, 1, &e), 0);
    assert_int_equal(inbox_check(&b, 2, &e), ERR_FULL);
    assert_int_equal(inbox_waiting(&b), 3);
    inbox_release(&b);
}

static void a_closed_inbox_takes_nothing_and_drains(void **state)
{
    (void)state;
    struct inbox b;
    struct err e;
    struct group *one = fake(1), *got[4];
    assert_int_equal(inbox_init(&b, 4, &e), 0);
    assert_int_equal(inbox_submit(&b, &one, 1, &e), 0);
    inbox_close(&b);
    inbox_close(&b);
    assert_int_equal(inbox_check(&b, 1, &e), ERR_DRAINING);
    assert_int_equal(inbox_submit(&b, &one, 1, &e), ERR_DRAINING);
    assert_false(inbox_drained(&b));
    assert_int_equal(inbox_take(&b, got, 4), 1);
    assert_true(inbox_drained(&b));
    assert_int_equal(inbox_waiting(&b), 1);
    inbox_release(&b);
}

/* ---- threads ---- */

enum { PRODUCERS = 4, SETS = 3000, SET_MAX = 7 };

struct producer {
    struct inbox *inbox;
    int id;
};

/* Sets of 1 to 7, numbered (id, serial) in order; retried while the queue is full. */
static void *produce(void *arg)
{
    struct producer *p = arg;
    int64_t serial = 0;

    for (int i = 0; i < SETS; i++) {
        struct group *set[SET_MAX];
        int32_t n = 1 + (i * 5 + p->id) % SET_MAX;
        for (int32_t k = 0; k < n; k++) {
            set[k] = fake((int64_t)p->id * (sizeof(body) / PRODUCERS) + serial++);
        }
        struct err e;
        while (inbox_submit(p->inbox, set, n, &e) == ERR_FULL) {
            sched_yield();
        }
    }
    return NULL;
}

static int64_t produced(int id)
{
    int64_t n = 0;

    for (int i = 0; i < SETS; i++) {
        n += 1 + (i * 5 + id) % SET_MAX;
    }
    return n;
}

/* Every group arrives once, each producer's in its order, and a sleeping consumer is
 * always woken. */
static void producers_lose_nothing(void **state)
{
    (void)state;
    struct inbox b;
    struct err e;
    struct producer p[PRODUCERS];
    pthread_t thread[PRODUCERS];
    int64_t next[PRODUCERS] = {0}, left = 0;
    assert_int_equal(inbox_init(&b, 64, &e), 0);
    for (int i = 0; i < PRODUCERS; i++) {
        p[i] = (struct producer){&b, i};
        left += produced(i);
        assert_int_equal(pthread_create(&thread[i], NULL, produce, &p[i]), 0);
    }
    while (left > 0) {
        struct group *got[16];
        int32_t n = inbox_take(&b, got, 16);
        for (int32_t i = 0; i < n; i++) {
            int id = (int)(number(got[i]) / (int64_t)(sizeof(body) / PRODUCERS));
            assert_int_equal(number(got[i]) % (int64_t)(sizeof(body) / PRODUCERS), next[id]);
            next[id]++;
        }
        inbox_admit(&b, n);
        left -= n;
        int64_t before = clock_us();
        if (n == 0 && left > 0) {
            inbox_sleep(&b, 20000000);
            assert_true(clock_us() - before < 10000000);
        }
    }
    for (int i = 0; i < PRODUCERS; i++) {
        pthread_join(thread[i], NULL);
    }
    assert_int_equal(inbox_waiting(&b), 0);
    inbox_release(&b);
}

static void *mark_later(void *arg)
{
    struct timespec ts = {.tv_nsec = 20000000};

    nanosleep(&ts, NULL);
    inbox_mark(arg);
    return NULL;
}

static void a_mark_wakes_and_an_idle_inbox_sleeps(void **state)
{
    (void)state;
    struct inbox b;
    struct err e;
    pthread_t thread;
    assert_int_equal(inbox_init(&b, 4, &e), 0);
    int64_t start = clock_us();
    inbox_sleep(&b, 30000);
    assert_true(clock_us() - start >= 29000);
    start = clock_us();
    assert_int_equal(pthread_create(&thread, NULL, mark_later, &b), 0);
    inbox_sleep(&b, 20000000);
    int64_t slept = clock_us() - start;
    assert_true(slept >= 10000 && slept < 10000000);
    pthread_join(thread, NULL);
    inbox_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_set_goes_in_whole_or_not_at_all),
        cmocka_unit_test(what_was_taken_counts_as_waiting_until_admitted),
        cmocka_unit_test(more_than_the_queue_holds_is_refused_for_good),
        cmocka_unit_test(a_closed_inbox_takes_nothing_and_drains),
        cmocka_unit_test(producers_lose_nothing),
        cmocka_unit_test(a_mark_wakes_and_an_idle_inbox_sleeps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
