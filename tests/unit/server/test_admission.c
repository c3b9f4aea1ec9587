/* Which connections are admitted, by number and by peer address. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "config/base/limits.h"
#include "server/access/admission.h"

static struct sockaddr_storage from(const char *address)
{
    struct sockaddr_storage a = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&a;

    if (!address) {
        a.ss_family = AF_UNIX;
    } else if (strchr(address, ':')) {
        v6->sin6_family = AF_INET6;
        assert_int_equal(inet_pton(AF_INET6, address, &v6->sin6_addr), 1);
    } else {
        v4->sin_family = AF_INET;
        assert_int_equal(inet_pton(AF_INET, address, &v4->sin_addr), 1);
    }
    return a;
}

static bool enter(struct admission *a, struct admitted *m, const char *address)
{
    struct sockaddr_storage s = from(address);

    return admission_enter(a, m, (const struct sockaddr *)&s, -1);
}

static void open_with(struct admission *a, int64_t most, int64_t per_address, char *trusted)
{
    struct settings s = {.max_connections_per_address = per_address, .trusted_proxies = trusted};
    struct err e = {0};

    assert_int_equal(admission_open(a, &s, most, &e), 0);
}

/* How many of 20 connections from this address are admitted; all are closed again. */
static int admitted_of_20(struct admission *a, const char *address)
{
    struct admitted m[20];
    int n = 0;

    for (int i = 0; i < 20; i++) {
        n += enter(a, &m[i], address);
    }
    for (int i = 0; i < 20; i++) {
        admission_leave(a, &m[i]);
    }
    assert_int_equal(atomic_load(&a->connections), 0);
    return n;
}

static void an_address_has_a_share(void **state)
{
    struct admission a;

    (void)state;
    open_with(&a, 12, 0, NULL);
    assert_int_equal(admitted_of_20(&a, "192.0.2.1"), 3); /* a quarter */
    assert_int_equal(admitted_of_20(&a, "::ffff:192.0.2.1"), 3);
    assert_int_equal(admitted_of_20(&a, "2001:db8::1"), 3);
    admission_close(&a);
    open_with(&a, 2, 0, NULL);
    assert_int_equal(admitted_of_20(&a, "192.0.2.1"), 1);
    admission_close(&a);
    open_with(&a, 100, 7, NULL);
    for (int again = 0; again < 3; again++) {
        assert_int_equal(admitted_of_20(&a, "192.0.2.1"), 7);
    }
    admission_close(&a);
}

static void addresses_are_distinguished(void **state)
{
    struct admission a;
    struct admitted m[6];

    (void)state;
    open_with(&a, 100, 1, NULL);
    assert_true(enter(&a, &m[0], "192.0.2.1"));
    assert_false(enter(&a, &m[1], "::ffff:192.0.2.1")); /* the same one */
    assert_true(enter(&a, &m[2], "192.0.2.2"));
    assert_true(enter(&a, &m[3], "2001:db8::1"));
    assert_false(enter(&a, &m[4], "2001:db8::ffff:1")); /* of the same network */
    assert_true(enter(&a, &m[5], "2001:db8:0:1::1"));
    for (int i = 0; i < 6; i++) {
        admission_leave(&a, &m[i]);
        admission_leave(&a, &m[i]); /* does nothing */
    }
    assert_true(enter(&a, &m[0], "192.0.2.1"));
    admission_leave(&a, &m[0]);
    admission_close(&a);
}

static void some_are_not_counted(void **state)
{
    struct admission a;
    char trusted[] = "10.0.0.0/9, 203.0.113.7,2001:db8::/33";

    (void)state;
    open_with(&a, 100, 1, trusted);
    static const char *const free[] = {NULL,          "127.0.0.1",        "127.9.9.9",
                                       "::1",         "::ffff:127.0.0.1", "10.127.255.255",
                                       "203.0.113.7", "::ffff:10.1.2.3",  "2001:db8:7fff::1"};
    for (size_t i = 0; i < ARRAY_LEN(free); i++) {
        assert_int_equal(admitted_of_20(&a, free[i]), 20);
    }
    static const char *const counted[] = {"10.128.0.0", "203.0.113.6", "2001:db8:8000::1",
                                          "126.255.255.255", "::2"};
    for (size_t i = 0; i < ARRAY_LEN(counted); i++) {
        assert_int_equal(admitted_of_20(&a, counted[i]), 1);
    }
    admission_close(&a);
}

static void bad_lists_are_refused(void **state)
{
    static const char *const bad[] = {
        "x",
        "10.0.0.0/33",
        "10.0.0.0/",
        "10.0.0.0/-1",
        "10.0.0.0/8x",
        "::/129",
        ",",
        "10.0.0.1,",
        "10.0.0",
        "/8",
        "1111:2222:3333:4444:5555:6666:7777:8888:9999:aaaa:bbbb:cccc:dddd"};
    struct address_range *range;
    int32_t n;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct err e = {0};
        assert_int_not_equal(address_ranges_parse(&range, &n, bad[i], &e), 0);
        assert_non_null(strstr(e.text, "trusted-proxies"));
        assert_null(range);
    }
}

/* Connections beyond the limit, on real sockets: the other ends show which one was shut
 * down. */
static void the_oldest_reserved_one_yields(void **state)
{
    enum { N = LIMIT_RESERVED_CONNECTIONS + 1 };
    struct sockaddr_storage unix_socket = from(NULL);
    struct admission a;
    struct admitted first, m[N];
    int fd[N][2];
    char byte;

    (void)state;
    open_with(&a, 1, 0, NULL);
    assert_true(enter(&a, &first, NULL));
    assert_false(first.reserved);
    for (int i = 0; i < N; i++) {
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fd[i]), 0);
        assert_true(admission_enter(&a, &m[i], (const struct sockaddr *)&unix_socket, fd[i][0]));
        assert_true(m[i].reserved);
    }
    assert_int_equal(read(fd[0][1], &byte, 1), 0); /* the end */
    assert_int_equal(read(fd[1][1], &byte, 1), -1);
    assert_int_equal(a.n_reserved, LIMIT_RESERVED_CONNECTIONS);
    assert_int_equal(a.n_reserved, N - 1);
    for (int i = 0; i < N; i++) {
        admission_leave(&a, &m[i]);
        close(fd[i][0]);
        close(fd[i][1]);
    }
    admission_leave(&a, &first);
    assert_int_equal(a.n + a.n_reserved + atomic_load(&a.connections), 0);
    assert_null(a.oldest);
    assert_null(a.newest);
    admission_close(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_address_has_a_share),
        cmocka_unit_test(addresses_are_distinguished),
        cmocka_unit_test(some_are_not_counted),
        cmocka_unit_test(bad_lists_are_refused),
        cmocka_unit_test(the_oldest_reserved_one_yields),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
