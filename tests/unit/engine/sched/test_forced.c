/* Drafts that a grammar forces: which of them follow a sequence's tokens, which source
 * is asked where none do, and how what held is learned. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/sched/decode/constrained.h"
#include "engine/sched/decode/forced.h"

enum { N_PROMPT = 3 };

/* ---- another source behind ---- */

static int32_t n_asked, n_told, n_ended;

static float other_expect(struct draft_source *d, struct seq *q)
{
    (void)d, (void)q;
    return 2.5F;
}

static int32_t other_draft(struct draft_source *d, struct seq *q, int32_t most, int32_t *token,
                           float *prob)
{
    (void)d, (void)q, (void)most;
    token[0] = 77;
    prob[0] = 0.5F;
    n_asked++;
    return 1;
}

static void other_verified(struct draft_source *d, struct seq *q, int32_t n, int32_t n_accepted)
{
    (void)d, (void)q, (void)n, (void)n_accepted;
    n_told++;
}

static void other_ended(struct draft_source *d, struct group *g)
{
    (void)d, (void)g;
    n_ended++;
}

static struct draft_source other = {
    .expect = other_expect, .draft = other_draft, .verified = other_verified, .ended = other_ended};

/* ---- a sequence ---- */

/* A sequence with tokens 10, 11 ..., of whose n_out generated ones its node has read
 * n_read; behind those the grammar forces 10 + n_read ... */
struct sequence {
    struct group g;
    struct constraint_node node;
    struct seq q;
    int32_t out[64];
};

static void sequence(struct sequence *s, int32_t n_out, int32_t n_read, int32_t n_forced)
{
    *s = (struct sequence){.g = {.n_prompt = N_PROMPT},
                           .node = {.n_read = n_read, .n_forced = n_forced}};
    s->q = (struct seq){.group = &s->g,
                        .out = s->out,
                        .n_out = n_out,
                        .n_tokens = N_PROMPT + n_out,
                        .constraint = &s->node};
    for (int32_t i = 0; i < 64; i++) {
        s->out[i] = 10 + i;
    }
    for (int32_t i = 0; i < n_forced; i++) {
        s->node.forced[i] = 10 + n_read + i;
    }
}

static int32_t draft(struct forced_drafts *d, struct sequence *s, int32_t most, int32_t *first)
{
    int32_t token[LIMIT_DRAFT];
    float prob[LIMIT_DRAFT];
    int32_t n = d->base.draft(&d->base, &s->q, most, token, prob);

    *first = n > 0 ? token[0] : -1;
    for (int32_t i = 1; i < n; i++) {
        assert_int_equal(token[i], token[0] + i);
        assert_true(prob[i] <= prob[i - 1] && prob[i] > 0);
    }
    return n;
}

static void what_is_forced_is_drafted(void **state)
{
    struct forced_drafts d;
    struct sequence s;
    int32_t first;

    (void)state;
    forced_drafts_init(&d, NULL);
    sequence(&s, 4, 4, 5);
    assert_int_equal(draft(&d, &s, 8, &first), 5);
    assert_int_equal(first, 14);
    assert_int_equal(draft(&d, &s, 2, &first), 2);
    sequence(&s, 6, 4, 5); /* two of them have been generated */
    assert_int_equal(draft(&d, &s, 8, &first), 3);
    assert_int_equal(first, 16);
    assert_true(d.base.expect(&d.base, &s.q) > 2);
    s.q.n_tokens++; /* another one is in flight */
    assert_true(d.base.expect(&d.base, &s.q) < 2);
    sequence(&s, 9, 4, 5); /* all of them */
    assert_int_equal(draft(&d, &s, 8, &first), 0);
    sequence(&s, 6, 4, 5);
    s.out[4]++; /* the model wrote the same in other tokens */
    assert_int_equal(draft(&d, &s, 8, &first), 0);
    assert_true(d.base.expect(&d.base, &s.q) <= 0);
    s.q.constraint = NULL;
    assert_int_equal(draft(&d, &s, 8, &first), 0);
}

static void another_source_is_asked_where_nothing_is_forced(void **state)
{
    struct forced_drafts d;
    struct sequence s;
    int32_t first;

    (void)state;
    n_asked = n_told = n_ended = 0;
    forced_drafts_init(&d, &other);
    sequence(&s, 4, 4, 5);
    assert_int_equal(draft(&d, &s, 8, &first), 5);
    d.base.verified(&d.base, &s.q, 5, 5);
    assert_int_equal(n_asked + n_told, 0);
    sequence(&s, 4, 4, 0);
    assert_int_equal(draft(&d, &s, 8, &first), 1);
    assert_int_equal(first, 77);
    assert_true(d.base.expect(&d.base, &s.q) > 2.4F);
    d.base.verified(&d.base, &s.q, 1, 0);
    d.base.ended(&d.base, &s.g);
    assert_true(n_asked == 1 && n_told == 1 && n_ended == 1);
    assert_true(d.drafted == 5 && d.accepted == 5);
}

static void what_held_is_learned(void **state)
{
    struct forced_drafts d;
    struct sequence s;
    float before;

    (void)state;
    forced_drafts_init(&d, NULL);
    sequence(&s, 4, 4, 5);
    before = d.hold;
    d.base.verified(&d.base, &s.q, 3, 3);
    assert_true(d.hold > before && d.hold <= 1);
    before = d.hold;
    d.base.verified(&d.base, &s.q, 3, 0);
    assert_true(d.hold < before);
    for (int i = 0; i < 1000; i++) {
        d.base.verified(&d.base, &s.q, 3, 0);
    }
    assert_true(d.hold > 0); /* so that it is tried again */
    assert_true(d.drafted == 3006 && d.accepted == 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_forced_is_drafted),
        cmocka_unit_test(another_source_is_asked_where_nothing_is_forced),
        cmocka_unit_test(what_held_is_learned),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
