/* Steps that do not fit a backend are refused before anything is computed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/batch_check.h"

enum { NOTED = 64 };

static const struct backend_config config = {
    .max_tokens = 8, .max_seqs = 4, .max_samples = 4, .max_blocks_per_seq = 16, .n_kv_groups = 2};

/* A step that fits, in which everything is as large as it may be. */
struct step {
    struct table_update update[2];
    struct sample_row sample[4];
    struct batch batch;
};

static void fill(struct step *s)
{
    *s = (struct step){
        .update = {{.row = 3, .index = 15, .count = 1, .first = 4},
                   {.group = 1, .index = 12, .count = 4, .first = 1}},
        .batch = {.step = 7,
                  .first_sample = 1,
                  .n_tokens = 8,
                  .n_seqs = 4,
                  .n_decode = 4,
                  .n_logits = 8,
                  .n_samples = 3,
                  .n_group_slots = 8,
                  .n_table_update = 2,
                  .n_table_block = 5},
    };
    for (size_t i = 0; i < ARRAY_LEN(s->sample); i++) {
        s->sample[i] = (struct sample_row){.repetition_penalty = 1.5f, .row = 3, .position = NOTED};
    }
    s->batch.table_update = s->update;
    s->batch.sample = s->sample;
}

static void expect(struct step *s, const char *what)
{
    struct err e = {0};

    if (!what) {
        assert_int_equal(batch_check(&config, "box", NOTED, &s->batch, &e), 0);
        return;
    }
    assert_int_equal(batch_check(&config, "box", NOTED, &s->batch, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "box: step 7"));
    assert_non_null(strstr(e.text, what));
}

static void a_step_of_the_largest_sizes_fits(void **state)
{
    (void)state;
    struct step s;
    fill(&s);
    expect(&s, NULL);
}

static void sizes_beyond_the_backends_are_refused(void **state)
{
    (void)state;
    static const struct {
        size_t member;
        int32_t value;
    } wrong[] = {
        {offsetof(struct batch, n_tokens), 9},     {offsetof(struct batch, n_tokens), -1},
        {offsetof(struct batch, n_seqs), 5},       {offsetof(struct batch, n_seqs), -1},
        {offsetof(struct batch, n_samples), 4},    {offsetof(struct batch, n_samples), -1},
        {offsetof(struct batch, first_sample), 2}, {offsetof(struct batch, first_sample), -1},
        {offsetof(struct batch, n_logits), 9},     {offsetof(struct batch, n_decode), 5},
    };
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        struct step s;
        fill(&s);
        memcpy((char *)&s.batch + wrong[i].member, &wrong[i].value, sizeof(wrong[i].value));
        expect(&s, "too large");
    }
}

static void updates_outside_of_the_tables_are_refused(void **state)
{
    (void)state;
    static const struct table_update wrong[] = {
        {.group = 2, .count = 1},
        {.group = -1, .count = 1},
        {.row = 4, .count = 1},
        {.row = -1, .count = 1},
        {.index = 16, .count = 1},
        {.index = -1, .count = 1},
        {.count = -1},
        {.first = 5, .count = 1},
        {.first = -1, .count = 1},
        {.index = 14, .count = 3},
    };
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        struct step s;
        fill(&s);
        s.update[1] = wrong[i];
        expect(&s, "block-table update");
    }
}

static void every_kv_group_needs_its_slots(void **state)
{
    (void)state;
    struct step s;
    fill(&s);
    s.batch.n_group_slots = 0;
    expect(&s, "slots of 2 KV groups");
}

static void penalties_read_ids_that_are_noted(void **state)
{
    (void)state;
    struct step s;
    fill(&s);
    s.sample[2].position = NOTED + 1;
    expect(&s, "penalties");
    s.sample[2].repetition_penalty = 1; /* reads none */
    expect(&s, NULL);
    s.sample[1].row = 4;
    expect(&s, "penalties");
    s.sample[1].row = -1;
    expect(&s, "penalties");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_of_the_largest_sizes_fits),
        cmocka_unit_test(sizes_beyond_the_backends_are_refused),
        cmocka_unit_test(updates_outside_of_the_tables_are_refused),
        cmocka_unit_test(every_kv_group_needs_its_slots),
        cmocka_unit_test(penalties_read_ids_that_are_noted),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
