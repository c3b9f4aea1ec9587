/* Answers that benchmarks give in the model's place. */
#include "engine/speculate/script.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* A sequence of its own group. */
struct text {
    struct request request;
    struct group group;
    struct seq seq;
};

static void text_init(struct text *t, uint64_t order, int32_t *prompt, int32_t n_prompt)
{
    *t = (struct text){.request = {.prompt = prompt, .n_prompt = n_prompt},
                       .group = {.order = order, .n_prompt = n_prompt, .state = GROUP_RUNNING},
                       .seq = {.state = SEQ_LIVE}};
    t->group.request = &t->request;
    t->seq.group = &t->group;
}

static void known_prompts_get_their_answers(void **state)
{
    (void)state;
    int32_t known[] = {1, 2, 3}, other[] = {1, 2, 4}, answer[] = {5, 6, 7};
    int32_t sampled[] = {90, 91, 92, 93, 94};
    struct script *s;
    struct text a, b;
    struct err e;

    assert_int_equal(script_open(&s, 5, &e), 0);
    assert_int_equal(script_add(s, known, 3, answer, 3, &e), 0);
    text_init(&a, 1, known, 3);
    text_init(&b, 2, other, 3);
    struct plan_item item[] = {{.seq = &b.seq, .n = 1, .n_sampled = 1, .sample_first = 0},
                               {.seq = &a.seq, .n = 3, .n_sampled = 1, .n_verify = 2}};
    item[1].sample_first = 1;
    item[1].n_scores = 1;
    struct plan p = {.item = item, .n_items = 2};
    struct results r = {.n_samples = 5, .token = sampled};
    script_apply(s, &p, &r);
    const int32_t first[] = {90, 91, 5, 6, 7};
    assert_memory_equal(r.token, first, sizeof(first));
    assert_int_equal(sampled[2], 92);

    a.seq.n_out = 2; /* behind the answer the model goes on */
    r.token = sampled;
    script_apply(s, &p, &r);
    const int32_t next[] = {90, 91, 7, 93, 94};
    assert_memory_equal(r.token, next, sizeof(next));

    a.seq.state = SEQ_DONE;
    r.token = sampled;
    script_apply(s, &p, &r);
    assert_memory_equal(r.token, sampled, sizeof(sampled));
    script_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(known_prompts_get_their_answers)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
