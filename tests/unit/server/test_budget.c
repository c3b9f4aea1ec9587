/* Memory held for clients: counted exactly, refused beyond the limit, freed by
 * disconnecting the slowest; long bodies are freed as they are read. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/http/body.h"

static int64_t held(struct budget *b)
{
    return atomic_load(&b->held);
}

static void test_accounts_add_up(void **state)
{
    struct budget b;
    struct account one, two;

    (void)state;
    budget_init(&b, 100);
    account_open(&one, &b);
    account_open(&two, &b);
    account_set(&one, 60);
    assert_false(account_try(&two, 41));
    assert_int_equal(held(&b), 60);
    assert_true(account_try(&two, 40));
    assert_int_equal(held(&b), 100);
    assert_false(budget_is_over(&b));
    account_set(&one,
                /* an existing account may grow beyond the limit; one has to be cut off
                 * then */
                61);
    assert_true(budget_is_over(&b));
    assert_true(account_try(&two, 10)); /* a decrease always succeeds */
    assert_int_equal(held(&b), 71);
    account_close(&one);
    account_close(&two);
    assert_int_equal(held(&b), 0);
    budget_release(&b);
}

static void test_a_default_limit(void **state)
{
    struct budget b;

    (void)state;
    budget_init(&b, 0);
    assert_true(b.limit >= (int64_t)64 << 20);
    budget_release(&b);
}

static void test_the_slowest_goes_then_the_largest(void **state)
{
    struct budget b;
    struct account a[3];
    int fd[2];
    char c;

    (void)state;
    budget_init(&b, 100);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    for (int i = 0; i < 3; i++) {
        account_open(&a[i], &b);
        account_list(&a[i], i == 1 ? fd[0] : -1);
        account_set(&a[i], 50 + 10 * i);
    }
    atomic_store(&a[1].since_us, clock_us() - 5000000);
    atomic_store(&a[0].since_us, clock_us());
    budget_make_room(&b);
    assert_true(a[1].cut && !a[0].cut && !a[2].cut);
    assert_int_equal(read(fd[1], &c, 1), 0); /* its socket was shut down */
    budget_make_room(&b);                    /* too soon after the last cut-off */
    assert_true(!a[0].cut && !a[2].cut);
    account_close(&a[1]);
    atomic_store(&b.looked_us, 0);
    budget_make_room(&b);
    assert_true(!a[0].cut && a[2].cut);
    account_close(&a[2]);
    atomic_store(&b.looked_us, 0);
    budget_make_room(&b); /* not over the limit */
    assert_false(a[0].cut);
    budget_sweep(&b, 60000000);
    assert_false(a[0].cut);
    atomic_store(&a[0].since_us, clock_us() - 61000000);
    budget_sweep(&b, 60000000);
    assert_true(a[0].cut);
    assert_int_equal(b.n_cut, 1); /* those without a socket are told and not disconnected */
    account_close(&a[0]);
    assert_int_equal(held(&b), 0);
    close(fd[0]);
    close(fd[1]);
    budget_release(&b);
}

static void fill(struct buf *b, char c, size_t n)
{
    buf_init(b, 64 << 20);
    assert_int_equal(buf_reserve(b, n), 0);
    memset(b->data, c, n);
    b->len = n;
    b->data[n] = '\0';
}

static void test_segments_are_read_in_order_and_freed(void **state)
{
    struct segments g;
    struct buf large, shared, last, expected;
    char *to = malloc(100000);
    size_t n, before, first, seen = 0;

    (void)state;
    fill(&large, 'l', 3 << 20);
    fill(&shared, 's', 5000);
    fill(&last, 'e', 10);
    buf_init(&expected, 64 << 20);
    segments_init(&g, 1000);
    buf_puts(&g.literal, "begin,");
    segments_take(&g, &large);
    assert_null(large.data);
    buf_puts(&g.literal, "then,");
    segments_share(&g, &shared);
    buf_puts(&g.literal, "and,");
    segments_take(&g, &shared);
    segments_take(&g, &last);
    assert_int_equal(segments_close(&g), 0);
    assert_int_equal(g.total, 6 + (3 << 20) + 5 + 5000 + 4 + 5000 + 10);
    first = before = segments_held(&g);
    assert_true(before > (3 << 20));
    while ((n = segments_read(&g, to, 100000)) > 0) {
        buf_append(&expected, to, n);
        seen += n;
        assert_true(segments_held(&g) <= before);
        before = segments_held(&g);
        if (seen > (1 << 20)) {
            assert_true(before < first - seen + (1 << 20));
        }
    }
    assert_int_equal(seen, g.total);
    assert_memory_equal(expected.data, "begin,lll", 9);
    assert_memory_equal(expected.data + 6 + (3 << 20), "then,sss", 8);
    assert_memory_equal(expected.data + 6 + (3 << 20) + 5 + 5000, "and,sss", 7);
    assert_memory_equal(expected.data + seen - 12, "sseeeeeeeeee", 12);
    segments_release(&g);
    buf_release(&expected);
    free(to);
}

/* A stream's writer and the budget's sweep both look for clients that take nothing. */
static void a_client_is_counted_by_the_first_that_cuts_it_off(void **state)
{
    struct budget b;
    struct account a[2];
    int fd[2];

    (void)state;
    budget_init(&b, 100);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    for (int i = 0; i < 2; i++) {
        account_open(&a[i], &b);
        account_list(&a[i], fd[0]);
        atomic_store(&a[i].since_us, clock_us() - 61000000);
    }
    assert_true(account_cut(&a[0]));
    budget_sweep(&b, 60000000);
    assert_int_equal(b.n_cut, 1);
    budget_sweep(&b, 60000000);
    assert_int_equal(b.n_cut, 1);
    assert_false(account_cut(&a[1]));
    account_close(&a[0]);
    account_close(&a[1]);
    close(fd[0]);
    close(fd[1]);
    budget_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accounts_add_up),
        cmocka_unit_test(test_a_default_limit),
        cmocka_unit_test(test_the_slowest_goes_then_the_largest),
        cmocka_unit_test(a_client_is_counted_by_the_first_that_cuts_it_off),
        cmocka_unit_test(test_segments_are_read_in_order_and_freed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
