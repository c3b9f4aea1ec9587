/* What the cache of a draft model is taken to hold, where blocks change hands. Random
 * cases: test_oracle. */
#include "engine/speculate/draft_cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { SIZE = 4, BLOCKS = 16, LONGEST = 32 };

/* A sequence of known tokens over some blocks. */
struct text {
    struct request request;
    struct group group;
    struct seq seq;
    int32_t token[LONGEST], block[LONGEST / SIZE];
};

static struct draft_cache cache;
static struct text text[2];
static uint64_t step;

static int start(void **state)
{
    (void)state;
    struct err e;
    memset(text, 0, sizeof(text));
    step = 0;
    for (int32_t i = 0; i < 2; i++) {
        struct text *t = &text[i];
        t->request = (struct request){.prompt = t->token};
        t->group = (struct group){.request = &t->request, .order = (uint64_t)i + 1};
        t->seq = (struct seq){.group = &t->group, .slot = i, .out = t->token};
        t->seq.table[0].block = t->block;
    }
    return draft_cache_init(&cache, BLOCKS, SIZE, LONGEST, 2, 77, &e);
}

static int stop(void **state)
{
    (void)state;
    draft_cache_release(&cache);
    return 0;
}

/* Sequence i has n known tokens from 10 on, in the blocks named. */
static struct seq *set(int32_t i, int32_t n, int32_t n_blocks, const int32_t *block)
{
    struct text *t = &text[i];

    for (int32_t k = 0; k < n; k++) {
        t->token[k] = 10 + k;
    }
    t->group.n_prompt = n;
    memcpy(t->block, block, (size_t)n_blocks * sizeof(*block));
    t->seq.table[0].n_blocks = n_blocks;
    return &t->seq;
}

/* The draft model reads what it lacks of all known tokens, and drafts n. */
static struct draft_seq *draft(struct seq *q, int32_t n)
{
    struct draft_seq *s = draft_cache_find(&cache, q, 0.5f);
    int32_t known = q->group->n_prompt;

    cache.n_updates = cache.n_table_blocks = 0;
    assert_true(draft_cache_take(&cache, q, s->n_valid, known + n - 1, ++step));
    draft_cache_written(&cache, q, known);
    s->n_from = known;
    s->n_drafts = n;
    for (int32_t i = 0; i < n; i++) {
        s->token[i] = 10 + known + i; /* right */
    }
    return s;
}

static void drafts_that_became_tokens_are_there(void **state)
{
    (void)state;
    const int32_t block[] = {1, 2, 3, 4};
    draft(set(0, 6, 3, block), 5);
    /* of five drafts the last was not read */
    assert_int_equal(draft_cache_find(&cache, set(0, 12, 3, block), 0.5f)->n_valid, 10);
    draft(set(1, 6, 3, (int32_t[]){5, 6, 7}), 7);
    assert_int_equal(
        draft_cache_find(&cache, set(1, 14, 4, (int32_t[]){5, 6, 7, 8}), 0.5f)->n_valid, 12);
}

static void a_block_that_was_lent_has_other_drafts(void **state)
{
    (void)state;
    const int32_t block[] = {1, 2, 3, 4};
    draft(set(0, 6, 3, block), 7);
    draft(set(1, 2, 1, (int32_t[]){3}), 1); /* block 3 was given back, and is again */
    assert_int_equal(draft_cache_find(&cache, set(0, 14, 4, block), 0.5f)->n_valid, 8);
}

/* A block that the sequence wrote at another place of its table holds other tokens. */
static void a_block_from_elsewhere_has_other_drafts(void **state)
{
    (void)state;
    draft(set(0, 10, 3, (int32_t[]){9, 2, 3}), 1);
    draft(set(0, 6, 3, (int32_t[]){1, 2, 3}), 7);
    assert_int_equal(
        draft_cache_find(&cache, set(0, 14, 4, (int32_t[]){1, 2, 9, 4}), 0.5f)->n_valid, 8);
}

static void a_shared_block_is_known_by_its_tokens(void **state)
{
    (void)state;
    draft(set(0, 9, 3, (int32_t[]){1, 2, 3}), 1);
    assert_int_equal(draft_cache_find(&cache, set(1, 10, 3, (int32_t[]){1, 2, 4}), 0.5f)->n_valid,
                     8);
    text[1].token[5] = 99;
    assert_int_equal(draft_cache_find(&cache, &text[1].seq, 0.5f)->n_valid, 8);
    text[1].group.order = 9; /* another sequence, of another text */
    assert_int_equal(draft_cache_find(&cache, &text[1].seq, 0.5f)->n_valid, 4);
}

/* What a sequence has read of a block ends where another one wrote to it since. */
static void the_rest_of_a_block_is_its_writers(void **state)
{
    (void)state;
    draft(set(0, 7, 2, (int32_t[]){1, 2}), 1);
    draft(set(1, 2, 1, (int32_t[]){2}), 1);
    assert_int_equal(draft_cache_find(&cache, set(0, 8, 2, (int32_t[]){1, 2}), 0.5f)->n_valid, 4);
}

static void a_preempted_sequence_is_read_by_its_tags(void **state)
{
    (void)state;
    const int32_t block[] = {1, 2, 3};
    draft(set(0, 10, 3, block), 1);
    text[0].group.n_preempted = 1;
    assert_int_equal(draft_cache_find(&cache, &text[0].seq, 0.5f)->n_valid, 8);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(drafts_that_became_tokens_are_there),
        CASE(a_block_that_was_lent_has_other_drafts),
        CASE(a_block_from_elsewhere_has_other_drafts),
        CASE(a_shared_block_is_known_by_its_tokens),
        CASE(the_rest_of_a_block_is_its_writers),
        CASE(a_preempted_sequence_is_read_by_its_tags),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
