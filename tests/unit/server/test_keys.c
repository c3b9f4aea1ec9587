/* The keys file, limits, and keys replaced while the server runs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/access/auth.h"

static char path[] = "/tmp/quire-keys-XXXXXX";

static int make_file(void **state)
{
    (void)state;
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(path);
}

static void write_file(const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static int parse(struct key_list *l, const char *text, struct err *e)
{
    *l = (struct key_list){0};
    return key_list_parse(l, text, strlen(text), e);
}

static void entries_and_keys_alone(void **state)
{
    struct key_list l;
    struct err e = {0};
    uint8_t digest[KEY_DIGEST_BYTES];

    (void)state;
    assert_int_equal(
        parse(&l,
              "# who\n\nsk-one\r\nname=alice key=sk=two weight=2.5 requests_per_minute=60\n"
              "name=bob\tsha256=9F86D081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 "
              "tokens_per_minute=1000 concurrent_requests=4 priority=-5..5  \nname=c key=k "
              "priority=3",
              &e),
        0);
    assert_int_equal(l.n, 4);
    assert_string_equal(l.key[0].name, "key-1");
    assert_int_equal(key_digest(digest, "sk-one", 6), 0);
    assert_memory_equal(l.key[0].digest, digest, sizeof(digest));
    assert_int_equal(l.key[0].limits.priority_low, INT32_MIN);
    assert_true(l.key[0].limits.weight == 1);
    assert_string_equal(l.key[1].name, "alice");
    assert_int_equal(key_digest(digest, "sk=two", 6), 0);
    assert_memory_equal(l.key[1].digest, digest, sizeof(digest));
    assert_true(l.key[1].limits.weight == 2.5F);
    assert_int_equal(l.key[1].limits.requests_per_minute, 60);
    assert_int_equal(l.key[1].limits.tokens_per_minute, 0);
    assert_int_equal(key_digest(digest, "test", 4), 0);
    assert_memory_equal(l.key[2].digest, digest, sizeof(digest));
    assert_int_equal(l.key[2].limits.tokens_per_minute, 1000);
    assert_int_equal(l.key[2].limits.concurrent_requests, 4);
    assert_int_equal(l.key[2].limits.priority_low, -5);
    assert_int_equal(l.key[2].limits.priority_high, 5);
    assert_int_equal(l.key[3].limits.priority_low, 3);
    assert_int_equal(l.key[3].limits.priority_high, 3);
    key_list_release(&l);
}

static void errors_name_the_line_and_not_the_key(void **state)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"# none\n", "holds no key"},
        {"ok\nsk-secret two\n", "line 2: a key holds a character"},
        {"ok\nname=a sk-secret\n", "line 2: an entry must consist"},
        {"name=a\n", "neither key nor sha256"},
        {"name=a key=sk-secret key=sk-secret2\n", "one key or one sha256"},
        {"name=a key=\n", "a key must have 1 to"},
        {"name=a sha256=9f86\n", "64 hexadecimal digits"},
        {"name=a key=sk-secret\nname=a key=sk-secret2\n", "line 2: the name 'a' appears twice"},
        {"name=a key=sk-secret\nname=b key=sk-secret\n", "line 2: 'b' has the same key as 'a'"},
        {"name= key=sk-secret\n", "a name must be 1 to"},
        {"name=a\"b key=sk-secret\n", "a name must be 1 to"},
        {"name=a key=sk-secret colour=red\n", "an unknown word"},
        {"name=a sk-secret==\n", "an unknown word"},
        {"name=a weight=sk-secret\n", "weight must be"},
        {"name=a key=sk-secret weight=0\n", "weight must be"},
        {"name=a key=sk-secret weight=nan\n", "weight must be"},
        {"name=a key=sk-secret requests_per_minute=0\n", "requests_per_minute must be an integer"},
        {"name=a key=sk-secret tokens_per_minute=-1\n", "tokens_per_minute must be an integer"},
        {"name=a key=sk-secret tokens_per_minute=99999999999999999999\n",
         "tokens_per_minute must be an integer"},
        {"name=a key=sk-secret concurrent_requests=1x\n", "concurrent_requests must be an integer"},
        {"name=a key=sk-secret priority=5..1\n", "priority must be"},
        {"name=a key=sk-secret priority=1..\n", "priority must be"},
        {"name=a key=sk-secret priority=..2\n", "priority must be"},
    };
    struct key_list l;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct err e = {0};
        if (parse(&l, bad[i].text, &e) != ERR_INVALID || !strstr(e.text, bad[i].says) ||
            strstr(e.text, "sk-secret")) {
            fail_msg("%s: %s", bad[i].text, e.text);
        }
        key_list_release(&l);
    }
}

static void a_nul_is_no_end(void **state)
{
    struct key_list l = {0};
    struct err e = {0};

    (void)state;
    assert_int_equal(key_list_parse(&l, "abc\0def\n", 8, &e), ERR_INVALID);
    key_list_release(&l);
}

static void keys_are_found(void **state)
{
    char *list[] = {"alpha", "beta"};
    struct settings s = {.api_key = list, .n_api_keys = 2};
    struct keys k;
    struct auth_result g;

    (void)state;
    assert_int_equal(keys_open(&k, &s, NULL), 0);
    assert_true(keys_find(&k, "Bearer alpha", &g));
    assert_string_equal(g.client->name, "key-1");
    assert_true(keys_find(&k, "bearer  beta", &g));
    assert_true(keys_find_bare(&k, "beta", &g));
    assert_false(keys_find_bare(&k, "Bearer beta", &g) || keys_find_bare(&k, "", &g) ||
                 keys_find_bare(&k, NULL, &g));
    assert_string_equal(g.client->name, "key-2");
    assert_int_equal(g.client->tenant, 2);
    static const char *const wrong[] = {"Bearer alph", "Bearer alphaa", "Bearer ",
                                        "Basic alpha", "alpha",         NULL};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        assert_false(keys_find(&k, wrong[i], &g));
    }
    keys_close(&k);
    s.n_api_keys = 0;
    assert_int_equal(keys_open(&k, &s, NULL), 0);
    assert_true(keys_find(&k, NULL, &g));
    assert_int_equal(g.client->tenant, 0);
    keys_close(&k);
}

static void a_reload_replaces_all_or_nothing(void **state)
{
    struct settings s = {.api_key_file = path};
    struct keys k;
    struct auth_result g;
    struct err e = {0};
    struct quota_refusal why;

    (void)state;
    write_file("name=a key=one requests_per_minute=2\nname=b key=two\n");
    assert_int_equal(keys_open(&k, &s, &e), 0);
    assert_true(keys_find(&k, "Bearer one", &g));
    struct client *a = g.client;
    assert_true(client_begin(a, &g.limits, 0, 1, &why));

    write_file("name=a key=three\nname=c\n");
    assert_int_equal(keys_reload(&k, &s, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "api_key_file line 2"));
    assert_string_equal(e.param, "api_key_file");
    assert_true(keys_find(&k, "Bearer one", &g) && keys_find(&k, "Bearer two", &g));
    assert_false(keys_find(&k, "Bearer three", &g));

    write_file("name=c key=four\nname=a key=three requests_per_minute=2\n");
    assert_int_equal(keys_reload(&k, &s, &e), 0);
    assert_false(keys_find(&k, "Bearer one", &g) || keys_find(&k, "Bearer two", &g));
    assert_true(keys_find(&k, "Bearer three", &g));
    assert_ptr_equal(g.client, a); /* the counters stay with the name */
    assert_true(client_begin(a, &g.limits, 0, 1, &why));
    assert_false(client_begin(a, &g.limits, 0, 1, &why));
    assert_true(keys_find(&k, "Bearer four", &g));
    assert_int_equal(keys_count(&k), 2);

    assert_int_equal(unlink(path), 0);
    assert_true(keys_reload(&k, &s, &e) < 0);
    assert_true(keys_find(&k, "Bearer four", &g));
    write_file("");
    keys_close(&k);
}

static void names_come_and_go_without_end(void **state)
{
    struct settings s = {.api_key_file = path};
    struct keys k;
    struct err e = {0};

    (void)state;
    write_file("name=first key=x\n");
    assert_int_equal(keys_open(&k, &s, &e), 0);
    for (int round = 0; round < 3; round++) {
        FILE *f = fopen(path, "w");
        for (int i = 0; i < LIMIT_API_KEYS - 1; i++) {
            fprintf(f, "name=n%d-%d key=k%d-%d\n", round, i, round, i);
        }
        fclose(f);
        assert_int_equal(keys_reload(&k, &s, &e), 0);
    }
    struct auth_result g;
    assert_true(keys_find(&k, "Bearer k2-1000", &g));
    assert_string_equal(g.client->name, "n2-1000");
    assert_true(k.n_clients <= LIMIT_TENANTS);
    keys_close(&k);
}

enum { SECOND_US = 1000000 };

static void buckets_fill_evenly(void **state)
{
    struct client c;
    struct key_limits l = key_limits_none();
    struct quota_refusal why;
    struct quota_view requests, tokens;

    (void)state;
    client_init(&c, "a", 1);
    l.requests_per_minute = 60;
    for (int i = 0; i < 60; i++) {
        assert_true(client_begin(&c, &l, 0, 0, &why));
    }
    assert_false(client_begin(&c, &l, 0, 0, &why));
    assert_int_equal(why.wait_us, SECOND_US);
    assert_false(client_begin(&c, &l, 0, SECOND_US / 4, &why));
    assert_int_equal(why.wait_us, SECOND_US * 3 / 4);
    client_view(&c, &l, SECOND_US / 4, &requests, &tokens);
    assert_int_equal(requests.limit, 60);
    assert_int_equal(requests.remaining, 0);
    assert_int_equal(requests.reset_us, 60 * SECOND_US - SECOND_US / 4);
    assert_int_equal(tokens.limit, 0);
    assert_true(client_begin(&c, &l, 0, SECOND_US, &why));
    assert_false(client_begin(&c, &l, 0, SECOND_US, &why));
    assert_int_equal(atomic_load(&c.n_limited[QUOTA_REQUESTS]), 3);
    client_release(&c);
}

static void generated_tokens_are_charged_at_the_end(void **state)
{
    struct client c;
    struct key_limits l = key_limits_none();
    struct quota_refusal why;

    (void)state;
    client_init(&c, "a", 1);
    l.tokens_per_minute = 600;
    assert_true(client_begin(&c, &l, 0, 0, &why));
    assert_true(client_take_tokens(&c, &l, 100, 0, &why));
    client_end(&c);
    client_charge(&c, 700); /* 200 below zero, refilled by 10 per second */
    assert_false(client_take_tokens(&c, &l, 50, 0, &why));
    assert_int_equal(why.wait_us, 25 * SECOND_US);
    assert_true(client_take_tokens(&c, &l, 50, 25 * SECOND_US, &why));
    client_return_tokens(&c, 50);
    assert_true(client_take_tokens(&c, &l, 50, 25 * SECOND_US, &why));
    assert_int_equal(atomic_load(&c.prompt_tokens), 150);
    assert_int_equal(atomic_load(&c.generation_tokens), 700);
    /* More than the bucket holds: allowed when it is full. */
    assert_false(client_take_tokens(&c, &l, 5000, 25 * SECOND_US, &why));
    assert_int_equal(why.wait_us, 60 * SECOND_US);
    assert_true(client_take_tokens(&c, &l, 5000, 85 * SECOND_US, &why));
    client_release(&c);
}

static void bodies_are_charged_in_bytes(void **state)
{
    struct client c;
    struct key_limits l = key_limits_none();
    struct quota_refusal why;

    (void)state;
    client_init(&c, "a", 1);
    l.tokens_per_minute = 600; /* 9600 bytes */
    assert_true(client_begin(&c, &l, 9000, 0, &why));
    assert_false(client_begin(&c, &l, 760, 0, &why));
    assert_int_equal(why.wait_us, SECOND_US);
    assert_non_null(strstr(why.text, "9600 bytes of request bodies per minute"));
    assert_int_equal(atomic_load(&c.n_limited[QUOTA_BYTES]), 1);
    assert_true(client_begin(&c, &l, 760, SECOND_US, &why));
    /* More than the bucket holds: allowed when it is full. */
    assert_false(client_begin(&c, &l, 1 << 20, 60 * SECOND_US, &why));
    assert_int_equal(why.wait_us, SECOND_US);
    assert_true(client_begin(&c, &l, 1 << 20, 61 * SECOND_US, &why));
    l.tokens_per_minute = INT32_MAX; /* and no overflow */
    assert_true(client_begin(&c, &l, 1 << 20, 121 * SECOND_US, &why));
    l.tokens_per_minute = 0;
    assert_true(client_begin(&c, &l, 1 << 30, 121 * SECOND_US, &why));
    client_release(&c);
}

static void concurrent_requests_are_limited(void **state)
{
    struct client c;
    struct key_limits l = key_limits_none();
    struct quota_refusal why;

    (void)state;
    client_init(&c, "a", 1);
    l.concurrent_requests = 2;
    l.requests_per_minute = 3;
    assert_true(client_begin(&c, &l, 0, 0, &why) && client_begin(&c, &l, 0, 0, &why));
    assert_false(client_begin(&c, &l, 0, 0, &why));
    assert_non_null(strstr(why.text, "2 concurrent requests"));
    client_end(&c);
    /* a refused request takes nothing from the bucket */
    assert_true(client_begin(&c, &l, 0, 0, &why));
    client_release(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entries_and_keys_alone),
        cmocka_unit_test(errors_name_the_line_and_not_the_key),
        cmocka_unit_test(a_nul_is_no_end),
        cmocka_unit_test(keys_are_found),
        cmocka_unit_test(a_reload_replaces_all_or_nothing),
        cmocka_unit_test(names_come_and_go_without_end),
        cmocka_unit_test(buckets_fill_evenly),
        cmocka_unit_test(generated_tokens_are_charged_at_the_end),
        cmocka_unit_test(bodies_are_charged_in_bytes),
        cmocka_unit_test(concurrent_requests_are_limited),
    };

    return cmocka_run_group_tests(tests, make_file, remove_file);
}
