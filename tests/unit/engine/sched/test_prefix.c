#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/sched/kv/prefix.h"

enum { SIZE = 4, BLOCKS = 16 };

static struct kvpool pool;
static struct prefix px;
static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};

static int open_with(int32_t hash_bits)
{
    int rc = kvpool_init(&pool, BLOCKS, NULL);

    return rc < 0 ? rc : prefix_init(&px, &pool, SIZE, 1, hash_bits, 42, NULL);
}

static int open_cache(void **state)
{
    (void)state;
    return open_with(0);
}

/* Two bits of hash: nearly everything collides. */
static int open_colliding(void **state)
{
    (void)state;
    return open_with(2);
}

static int close_cache(void **state)
{
    (void)state;
    const char *wrong = prefix_check(&px);
    prefix_release(&px);
    kvpool_release(&pool);
    return !wrong ? 0 : -1;
}

static int32_t take(void)
{
    prefix_drop(&px, kvpool_peek(&pool));
    return kvpool_take(&pool);
}

/* Publish n blocks of `token` and give them back, tail first. */
static void publish(const char *salt, const int32_t *token, int32_t n, int32_t *ret_block)
{
    struct prefix_chain chain;

    prefix_start(&px, &chain, salt);
    for (int32_t i = 0; i < n; i++) {
        ret_block[i] = take();
        prefix_publish(&px, &chain, ret_block[i], token + i * SIZE);
    }
    for (int32_t i = n - 1; i >= 0; i--) {
        kvpool_unref(&pool, ret_block[i]);
    }
}

static int32_t found(const char *salt, const int32_t *token, int32_t n)
{
    struct prefix_chain chain;

    prefix_start(&px, &chain, salt);
    int32_t i = 0;
    while (i < n && prefix_find(&px, &chain, token + i * SIZE) >= 0) {
        i++;
    }
    return i;
}

static void what_was_published_is_found_block_by_block(void **state)
{
    (void)state;
    int32_t block[3];
    struct prefix_chain chain;
    publish(NULL, tokens, 3, block);
    prefix_start(&px, &chain, NULL);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(prefix_find(&px, &chain, tokens + i * SIZE), block[i]);
    }
    assert_int_equal(chain.n_blocks, 3);
    const int32_t other[] = {1, 2, 3, 5};
    assert_int_equal(found(NULL, other, 1), 0);
}

/* Publishes 3 tokens behind the first block of tokens[] as a tail of it and gives the
 * blocks back; *ret_chain ends before the tail. */
static int32_t publish_tail(const char *salt, struct prefix_chain *ret_chain)
{
    int32_t block, tail;

    publish(salt, tokens, 1, &block);
    prefix_start(&px, ret_chain, salt);
    assert_int_equal(prefix_find(&px, ret_chain, tokens), block);
    tail = take();
    assert_true(prefix_publish_tail(&px, ret_chain, tail, tokens + SIZE, 3));
    kvpool_unref(&pool, tail);
    return tail;
}

static void a_tail_is_found_by_what_begins_with_it(void **state)
{
    (void)state;
    struct prefix_chain chain;
    int32_t n = 0, tail = publish_tail("a", &chain);
    assert_int_equal(prefix_find_tail(&px, &chain, tokens + SIZE, 3, &n), tail);
    assert_int_equal(n, 3);
    assert_int_equal(prefix_find_tail(&px, &chain, tokens + SIZE, 2, &n), -1); /* not all */
    const int32_t other[] = {5, 6, 8};
    assert_int_equal(prefix_find_tail(&px, &chain, other, 3, &n), -1);
    assert_int_equal(prefix_find(&px, &chain, tokens + SIZE), -1); /* it is no full block */
    struct prefix_chain elsewhere;
    prefix_start(&px, &elsewhere, "a");
    assert_int_equal(prefix_find_tail(&px, &elsewhere, tokens + SIZE, 3, &n), -1);
    prefix_drop(&px, tail); /* as who goes on from it does */
    assert_int_equal(prefix_find_tail(&px, &chain, tokens + SIZE, 3, &n), -1);
    assert_int_equal(pool.n_cached, 1);
}

/* A text shorter than a block is nothing but a tail, whose parent is the salt. */
static void a_tail_is_found_with_its_salt_alone(void **state)
{
    (void)state;
    static const char *const salt[] = {"a", "b", NULL};
    for (int i = 0; i < 3; i++) {
        struct prefix_chain chain;
        int32_t n = 0, tail = take();
        prefix_start(&px, &chain, salt[i]);
        assert_true(prefix_publish_tail(&px, &chain, tail, tokens, 3));
        kvpool_unref(&pool, tail);
        for (int k = 0; k < 3; k++) {
            prefix_start(&px, &chain, salt[k]);
            assert_int_equal(prefix_find_tail(&px, &chain, tokens, 3, &n), k == i ? tail : -1);
        }
        prefix_drop(&px, tail);
    }
}

static void the_newer_tail_of_a_beginning_stays(void **state)
{
    (void)state;
    struct prefix_chain chain;
    int32_t n = 0, old = publish_tail(NULL, &chain), tail = take();
    const int32_t newer[] = {5, 6, 9};
    assert_int_not_equal(tail, old);
    assert_true(prefix_publish_tail(&px, &chain, tail, newer, 3));
    kvpool_unref(&pool, tail);
    assert_int_equal(prefix_find_tail(&px, &chain, tokens + SIZE, 3, &n), -1);
    assert_int_equal(prefix_find_tail(&px, &chain, newer, 3, &n), tail);
    assert_false(pool.block[old].hashed);
}

static void equal_tokens_on_another_parent_are_not_found(void **state)
{
    (void)state;
    int32_t block[3];
    publish(NULL, tokens, 3, block);
    assert_int_equal(found(NULL, tokens + SIZE, 1), 0);
}

static void salts_keep_tenants_apart(void **state)
{
    (void)state;
    int32_t block[2];
    publish("one", tokens, 2, block);
    assert_int_equal(found("two", tokens, 2), 0);
    assert_int_equal(found(NULL, tokens, 2), 0);
    assert_int_equal(found("one", tokens, 2), 2);
}

/* Pin blocks that were published without a salt. */
static void share(const int32_t *block, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        kvpool_ref(&pool, block[i]);
        prefix_share(&px, block[i]);
    }
}

static void shared_blocks_are_found_with_any_salt(void **state)
{
    (void)state;
    int32_t pinned[2], block[3];
    publish(NULL, tokens, 2, pinned);
    share(pinned, 2);
    assert_int_equal(found(NULL, tokens, 3), 2);
    assert_int_equal(found("one", tokens, 3), 2);
    publish(NULL, tokens, 3, block); /* the third is not shared */
    assert_int_equal(found(NULL, tokens, 3), 3);
    assert_int_equal(found("one", tokens, 3), 2);
    publish("one", tokens, 3, block);
    assert_int_equal(found("one", tokens, 3), 3);
    assert_int_equal(found("two", tokens, 3), 2);
    /* Behind other tokens, and behind a block of a salt, nothing is found. */
    const int32_t turned[] = {9, 10, 11, 12, 1, 2, 3, 4, 5, 6, 7, 8};
    publish("one", turned, 3, block);
    assert_int_equal(found("one", turned, 3), 3);
    assert_int_equal(found("two", turned, 3), 0);
    assert_int_equal(found(NULL, turned, 3), 0);
    for (int32_t i = 0; i < 2; i++) {
        kvpool_unref(&pool, pinned[i]);
    }
}

static void a_shared_block_keeps_its_entry(void **state)
{
    (void)state;
    int32_t pinned[1], block[1];
    publish(NULL, tokens, 1, pinned);
    share(pinned, 1);
    for (int32_t i = 0; i < 200; i++) { /* with two bits of hash most of these collide with it */
        int32_t mine[SIZE] = {i, 7, 7, 7};
        publish(i % 2 ? "one" : NULL, mine, 1, block);
        assert_int_equal(found("two", tokens, 1), 1);
        assert_int_equal(found(NULL, tokens, 1), 1);
    }
    kvpool_unref(&pool, pinned[0]);
}

static void a_chain_is_taken_from_its_tail(void **state)
{
    (void)state;
    int32_t block[3];
    publish(NULL, tokens, 3, block);
    for (int32_t i = 0; i < BLOCKS - 3; i++) {
        take();
    }
    take(); /* the first of the cached ones */
    assert_int_equal(found(NULL, tokens, 3), 2);
}

static void nothing_is_found_behind_a_lost_parent(void **state)
{
    (void)state;
    int32_t block[3], again[1];
    publish(NULL, tokens, 3, block);
    prefix_drop(&px, block[0]);
    assert_int_equal(found(NULL, tokens, 3), 0);
    /* Even if the parent is computed again: its children were computed on the old
     * one. */
    publish(NULL, tokens, 1, again);
    assert_int_equal(found(NULL, tokens, 3), 1);
    /* And they can be published again. */
    publish(NULL, tokens, 3, block);
    assert_int_equal(found(NULL, tokens, 3), 3);
}

static void an_equal_block_keeps_the_first_entry(void **state)
{
    (void)state;
    int32_t a[1], b[1];
    publish(NULL, tokens, 1, a);
    struct prefix_chain chain;
    prefix_start(&px, &chain, NULL);
    assert_int_equal(prefix_find(&px, &chain, tokens), a[0]);
    kvpool_ref(&pool, a[0]);
    publish(NULL, tokens, 1, b);
    assert_false(pool.block[b[0]].hashed);
    kvpool_unref(&pool, a[0]);
}

static void a_hash_is_never_proof(void **state)
{
    (void)state;
    /* With two bits of hash, many different blocks carry the same name: none is taken
     * for another. */
    int32_t block[1], n_found = 0;
    for (int32_t i = 0; i < 200; i++) {
        int32_t mine[SIZE] = {i, i + 1, i + 2, i + 3}, other[SIZE] = {i, i + 1, i + 2, i + 4};
        publish(NULL, mine, 1, block);
        n_found += found(NULL, mine, 1);
        assert_int_equal(found(NULL, other, 1), 0);
    }
    assert_int_equal(n_found, 200);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_was_published_is_found_block_by_block, open_cache,
                                        close_cache),
        cmocka_unit_test_setup_teardown(equal_tokens_on_another_parent_are_not_found, open_cache,
                                        close_cache),
        cmocka_unit_test_setup_teardown(salts_keep_tenants_apart, open_cache, close_cache),
        cmocka_unit_test_setup_teardown(shared_blocks_are_found_with_any_salt, open_cache,
                                        close_cache),
        cmocka_unit_test_setup_teardown(a_shared_block_keeps_its_entry, open_colliding,
                                        close_cache),
        cmocka_unit_test_setup_teardown(a_chain_is_taken_from_its_tail, open_cache, close_cache),
        cmocka_unit_test_setup_teardown(nothing_is_found_behind_a_lost_parent, open_cache,
                                        close_cache),
        cmocka_unit_test_setup_teardown(an_equal_block_keeps_the_first_entry, open_cache,
                                        close_cache),
        cmocka_unit_test_setup_teardown(a_tail_is_found_by_what_begins_with_it, open_cache,
                                        close_cache),
        cmocka_unit_test_setup_teardown(a_tail_is_found_with_its_salt_alone, open_cache,
                                        close_cache),
        cmocka_unit_test_setup_teardown(the_newer_tail_of_a_beginning_stays, open_cache,
                                        close_cache),
        cmocka_unit_test_setup_teardown(a_hash_is_never_proof, open_colliding, close_cache),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
