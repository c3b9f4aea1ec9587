/* Tests batches as messages: a batch arrives unchanged, and malformed messages are
 * refused. */
#include "engine/workers/batch_wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* A small step with something in every array. */
struct example {
    struct executor_info info;
    struct batch b;
    struct block_copy out[2], in[1], copy[1];
    struct table_update update[2];
    int32_t table[5], token[4], src[4], position[4], slot[4], q_start[3], kv_len[2], row[2], lcp[2],
        logits[2];
    uint32_t mask[2];
    struct sample_row sample[3];
    struct token_bias bias[1];
};

static struct example *example(void)
{
    static struct example x;

    x = (struct example){
        .info = {.vocab = 50,
                 .max_len = 64,
                 .n_blocks = 20,
                 .n_host_blocks = 10,
                 .block_size = 4,
                 .max_num_seqs = 4,
                 .max_num_batched_tokens = 8,
                 .max_samples = 6},
        .out = {{1, 2}, {19, 9}},
        .in = {{3, 4}},
        .copy = {{5, 6}},
        .update = {{.row = 3, .index = 0, .count = 3, .first = 0},
                   {.row = 1, .index = 14, .count = 2, .first = 3}},
        .table = {7, 8, 9, 10, 11},
        .token = {1, 49, 0, 3},
        .src = {-1, 5, -1, -1},
        .position = {9, 0, 1, 63},
        .slot = {29, 79, -1, 0},
        .q_start = {0, 1, 4},
        .kv_len = {10, 64},
        .row = {3, 1},
        .lcp = {0, 1},
        .logits = {0, 3},
        .mask = {0x30, 1},
        .sample = {{.logits_row = 0, .top_p = 1, .n_logprobs = -1, .mask_first = -1, .seed = 99},
                   {.logits_row = 1,
                    .kind = SAMPLE_CANDIDATES,
                    .n_candidates = 8,
                    .late_mask = 2,
                    .row = 3,
                    .n_prompt = 9,
                    .position = 10},
                   {.logits_row = 1, .kind = SAMPLE_SCORE, .target = 7, .n_bias = 1}},
        .bias = {{.token = 49, .bias = -1}},
    };
    x.b = (struct batch){.step = 77,
                         .swap_out = x.out,
                         .n_swap_out = 2,
                         .swap_in = x.in,
                         .n_swap_in = 1,
                         .copy = x.copy,
                         .n_copy = 1,
                         .table_update = x.update,
                         .n_table_update = 2,
                         .table_block = x.table,
                         .n_table_block = 5,
                         .n_tokens = 4,
                         .token = x.token,
                         .token_src = x.src,
                         .position = x.position,
                         .slot = x.slot,
                         .n_seqs = 2,
                         .n_decode = 1,
                         .q_start = x.q_start,
                         .kv_len = x.kv_len,
                         .row = x.row,
                         .lcp_blocks = x.lcp,
                         .n_logits = 2,
                         .logits_token = x.logits,
                         .n_samples = 3,
                         .sample = x.sample,
                         .token_bias = x.bias,
                         .n_token_bias = 1,
                         .n_late_mask = 2,
                         .mask_word = x.mask,
                         .n_mask_word = 2};
    return &x;
}

/* The example's message, in memory of exactly its size so that sanitizers detect
 * overruns. */
static char *message(const struct example *x, size_t *ret_n)
{
    size_t n = batch_wire_write(NULL, &x->b);
    char *at = aligned_alloc(64, (n + 63) / 64 * 64);

    assert_non_null(at);
    assert_int_equal(batch_wire_write(at, &x->b), n);
    assert_true(n <= batch_wire_max(&x->info));
    *ret_n = n;
    return at;
}

static void a_batch_arrives_as_it_was(void **state)
{
    (void)state;
    struct example *x = example();
    struct batch got;
    struct err e;
    size_t n, again;
    char *at = message(x, &n);
    if (batch_wire_read(&got, at, n, &x->info, &e) < 0) {
        fail_msg("%s", e.text);
    }
    char *second = aligned_alloc(64, (n + 63) / 64 * 64);
    again = batch_wire_write(second, &got);
    assert_int_equal(again, n);
    assert_int_equal(got.step, 77);
    assert_memory_equal(got.sample, x->sample, sizeof(x->sample));
    assert_memory_equal(got.table_update, x->update, sizeof(x->update));
    assert_memory_equal(got.swap_out, x->out, sizeof(x->out));
    assert_int_equal(got.slot[1], 79);
    assert_int_equal(got.mask_word[0], 0x30);
    free(at);
    free(second);
}

static void slots_and_tables_of_every_kv_group_arrive(void **state)
{
    (void)state;
    struct example *x = example();
    int32_t group_slot[] = {28, 4, 78, -1, 79, 0, 1, 2};
    struct batch got;
    struct err e;
    size_t n;
    x->info.n_kv_groups = 3;
    x->update[1].group = 2;
    x->b.group_slot = group_slot;
    x->b.n_group_slots = 8;
    char *at = message(x, &n);
    if (batch_wire_read(&got, at, n, &x->info, &e) < 0) {
        fail_msg("%s", e.text);
    }
    assert_memory_equal(got.group_slot, group_slot, sizeof(group_slot));
    assert_int_equal(got.table_update[1].group, 2);
    x->info.n_kv_groups = 2;
    assert_int_equal(batch_wire_read(&got, at, n, &x->info, &e), ERR_INVALID);
    free(at);
    x->info.n_kv_groups = 3;
    group_slot[5] = 80;
    at = message(x, &n);
    assert_int_equal(batch_wire_read(&got, at, n, &x->info, &e), ERR_INVALID);
    free(at);
    group_slot[5] = 0;
    x->update[1].group = 3;
    at = message(x, &n);
    assert_int_equal(batch_wire_read(&got, at, n, &x->info, &e), ERR_INVALID);
    free(at);
}

static void a_step_that_only_copies_has_no_tokens(void **state)
{
    (void)state;
    struct example *x = example();
    struct batch got, only = {.step = 1, .swap_out = x->out, .n_swap_out = 2};
    struct err e;
    _Alignas(64) char at[512];
    size_t n = batch_wire_write(NULL, &only);
    assert_true(n <= sizeof(at));
    batch_wire_write(at, &only);
    assert_int_equal(batch_wire_read(&got, at, n, &x->info, &e), 0);
    assert_int_equal(got.n_swap_out, 2);
    assert_null(got.token);
}

static void refused(struct example *x, const char *why)
{
    struct batch got;
    struct err e = {0};
    size_t n;
    char *at = message(x, &n);

    assert_int_equal(batch_wire_read(&got, at, n, &x->info, &e), ERR_INVALID);
    if (!strstr(e.text, why)) {
        fail_msg("\"%s\" does not say \"%s\"", e.text, why);
    }
    free(at);
}

#define REFUSED(change, why)           \
    do {                               \
        struct example *x = example(); \
        change;                        \
        refused(x, why);               \
    } while (0)

static void what_does_not_exist_is_refused(void **state)
{
    (void)state;
    REFUSED(x->out[0].src = 20, "block that does not exist");
    REFUSED(x->in[0].src = 10, "block that does not exist");
    REFUSED(x->copy[0].dst = -1, "block that does not exist");
    REFUSED(x->update[0].row = 4, "table update");
    REFUSED(x->update[1].index = 15, "table update");
    REFUSED(x->update[1].first = 4, "table update");
    REFUSED(x->update[0].count = -1, "table update");
    REFUSED(x->table[2] = 20, "table update");
    REFUSED(x->token[0] = 50, "token");
    REFUSED(x->src[1] = 6, "token");
    REFUSED(x->position[0] = 64, "token");
    REFUSED(x->slot[0] = 80, "token");
    REFUSED(x->q_start[2] = 3, "sequences");
    REFUSED(x->q_start[1] = 5, "sequences");
    REFUSED(x->kv_len[1] = 2, "sequences");
    REFUSED(x->row[0] = 4, "sequences");
    REFUSED(x->logits[1] = 4, "sampling row");
    REFUSED(x->logits[1] = 0, "sampling row");
    REFUSED(x->sample[0].logits_row = 2, "sampling row");
    REFUSED(x->sample[0].kind = 3, "sampling row");
    REFUSED(x->sample[0].n_logprobs = 1000, "sampling row");
    REFUSED(x->sample[1].row = 4, "sampling row");
    REFUSED(x->sample[1].row = -1, "sampling row");
    REFUSED(x->sample[1].position = 65, "sampling row");
    REFUSED(x->sample[1].position = -1, "sampling row");
    REFUSED(x->sample[1].n_prompt = -1, "sampling row");
    REFUSED(x->sample[1].mask_first = 1, "sampling row");
    REFUSED(x->sample[1].mask_first = -2, "sampling row");
    REFUSED(x->sample[1].late_mask = 3, "sampling row");
    REFUSED(x->sample[1].late_mask = -1, "sampling row");
    REFUSED(x->sample[2].bias_first = 1, "sampling row");
    REFUSED(x->sample[2].target = 50, "sampling row");
    REFUSED(x->bias[0].token = 50, "sampling row");
    REFUSED(x->b.n_decode = 3, "is not a batch");
    REFUSED(x->b.n_late_mask = -1, "is not a batch");
    REFUSED(x->b.n_late_mask = 5, "is not a batch");
    REFUSED(x->info.max_num_seqs = 1, "is not a batch");
    REFUSED(x->info.max_samples = 2, "is not a batch");
}

/* Arbitrary bytes give a result, never a fault: truncated at every length, and with a
 * bit flipped at every place. */
static void broken_messages_do_no_harm(void **state)
{
    (void)state;
    struct example *x = example();
    struct batch got;
    struct err e;
    size_t n;
    int n_refused = 0;
    char *whole = message(x, &n);
    for (size_t cut = 0; cut < n; cut += 4) {
        char *at = aligned_alloc(64, (MAX(cut, 1) + 63) / 64 * 64);
        memcpy(at, whole, cut);
        assert_int_equal(batch_wire_read(&got, at, cut, &x->info, &e), ERR_INVALID);
        free(at);
    }
    for (size_t bit = 0; bit < 8 * n; bit++) {
        whole[bit / 8] ^= (char)(1 << bit % 8);
        n_refused += batch_wire_read(&got, whole, n, &x->info, &e) < 0;
        whole[bit / 8] ^= (char)(1 << bit % 8);
    }
    assert_true(n_refused > 1000);
    assert_int_equal(batch_wire_read(&got, whole, n, &x->info, &e), 0);
    free(whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_batch_arrives_as_it_was),
        cmocka_unit_test(slots_and_tables_of_every_kv_group_arrive),
        cmocka_unit_test(a_step_that_only_copies_has_no_tokens),
        cmocka_unit_test(what_does_not_exist_is_refused),
        cmocka_unit_test(broken_messages_do_no_harm),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
