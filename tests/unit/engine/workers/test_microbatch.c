/* Tests that the micro-batches of a step hold each token, logits row and sampling row
 * once and in order, and that their results are gathered again. */
#include "engine/workers/microbatch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_SEQS = 40, MOST_TOKENS = 400, MOST_VERIFIED = 20 };

/* Decodes, then longer sequences; every sequence's last token has a logits row, read by
 * one or two sampling rows. Some verify drafts: all of their tokens have rows. */
struct step {
    struct batch b;
    int32_t token[MOST_TOKENS], src[MOST_TOKENS], position[MOST_TOKENS], slot[MOST_TOKENS],
        group_slot[2 * MOST_TOKENS]; /* of three KV groups */
    int32_t q_start[MOST_SEQS + 1], kv_len[MOST_SEQS], row[MOST_SEQS], lcp[MOST_SEQS],
        logits[MOST_TOKENS];
    bool verifies[MOST_SEQS];
    struct sample_row sample[2 * MOST_TOKENS];
    struct block_copy copy;
};

static void make_step(struct step *s, unsigned seed)
{
    struct batch *b = &s->b;

    srand(seed);
    memset(s, 0, sizeof(*s));
    b->n_seqs = 1 + rand() % MOST_SEQS;
    b->n_decode = rand() % (b->n_seqs + 1);
    b->n_copy = 1;
    for (int32_t i = 0; i < b->n_seqs; i++) {
        int32_t n = i < b->n_decode ? 1 : 2 + rand() % (rand() % 8 == 0 ? 60 : 4),
                first = rand() % 100;
        n = MIN(n, MOST_TOKENS - 2 * (b->n_seqs - i) - b->n_tokens + 2);
        s->q_start[i] = b->n_tokens;
        s->kv_len[i] = first + n;
        s->row[i] = 100 + i;
        s->lcp[i] = i > 0;
        for (int32_t k = 0; k < n; k++, b->n_tokens++) {
            s->token[b->n_tokens] = b->n_tokens * 3;
            s->src[b->n_tokens] = rand() % 5 - 1;
            s->position[b->n_tokens] = first + k;
            s->slot[b->n_tokens] = b->n_tokens * 7;
            s->group_slot[b->n_group_slots++] = b->n_tokens * 7 + 1;
            s->group_slot[b->n_group_slots++] = b->n_tokens * 7 + 2;
        }
        s->verifies[i] = n > 1 && n <= MOST_VERIFIED && rand() % 3 == 0;
        for (int32_t k = n - 1; k > 0 && s->verifies[i]; k--) {
            s->logits[b->n_logits] = b->n_tokens - 1 - k;
            s->sample[b->n_samples] =
                (struct sample_row){.logits_row = b->n_logits++, .position = b->n_samples};
            b->n_samples++;
        }
        s->logits[b->n_logits] = b->n_tokens - 1;
        for (int32_t k = rand() % 2; k < 2; k++, b->n_samples++) {
            s->sample[b->n_samples] =
                (struct sample_row){.logits_row = b->n_logits, .position = b->n_samples};
        }
        b->n_logits++;
    }
    s->q_start[b->n_seqs] = b->n_tokens;
    b->step = seed + 1;
    b->token = s->token, b->token_src = s->src, b->position = s->position, b->slot = s->slot;
    b->group_slot = s->group_slot;
    b->q_start = s->q_start, b->kv_len = s->kv_len, b->row = s->row, b->lcp_blocks = s->lcp;
    b->logits_token = s->logits, b->sample = s->sample, b->copy = &s->copy;
}

/* What the previous micro-batches held. */
struct seen {
    int32_t tokens, logits, samples;
};

static void check_seqs(const struct step *s, const struct batch *p, int32_t first)
{
    int32_t at = 0;

    while (s->q_start[at + 1] <= first) {
        at++;
    }
    assert_int_equal(p->q_start[0], 0);
    assert_int_equal(p->q_start[p->n_seqs], p->n_tokens);
    for (int32_t i = 0; i < p->n_seqs; i++) {
        int32_t n = p->q_start[i + 1] - p->q_start[i], last = first + p->q_start[i + 1] - 1;
        assert_true(n >= 1);
        assert_int_equal(n == 1, i < p->n_decode);
        assert_int_equal(p->row[i], s->row[at + i]);
        assert_int_equal(p->lcp_blocks[i], i > 0);
        assert_true(last < s->q_start[at + i + 1]);
        assert_true(!s->verifies[at + i] || n == s->q_start[at + i + 1] - s->q_start[at + i]);
        assert_int_equal(p->kv_len[i], s->position[last] + 1);
    }
}

static void check_part(const struct step *s, const struct batch *p, struct seen *seen)
{
    int32_t first = seen->tokens;

    for (int32_t i = 0; i < p->n_tokens; i++) {
        assert_int_equal(p->token[i], s->token[first + i]);
        assert_int_equal(p->token_src[i], s->src[first + i]);
        assert_int_equal(p->position[i], s->position[first + i]);
        assert_int_equal(p->slot[i], s->slot[first + i]);
        assert_int_equal(p->group_slot[2 * i], s->slot[first + i] + 1);
        assert_int_equal(p->group_slot[2 * i + 1], s->slot[first + i] + 2);
    }
    assert_int_equal(p->n_group_slots, 2 * p->n_tokens);
    check_seqs(s, p, first);
    for (int32_t i = 0; i < p->n_logits; i++) {
        assert_int_equal(first + p->logits_token[i], s->logits[seen->logits + i]);
    }
    assert_int_equal(p->first_sample, seen->samples);
    for (int32_t i = 0; i < p->n_samples; i++) {
        assert_int_equal(p->sample[i].position, seen->samples + i);
        assert_int_equal(p->sample[i].logits_row + seen->logits,
                         s->sample[seen->samples + i].logits_row);
        assert_in_range(p->sample[i].logits_row, 0, p->n_logits - 1);
    }
    seen->tokens += p->n_tokens;
    seen->logits += p->n_logits;
    seen->samples += p->n_samples;
}

static void microbatches_are_the_step(void **state)
{
    (void)state;
    static struct step s;
    struct microbatch memory = {0};
    struct err e;
    int32_t cuts = 0;
    for (unsigned seed = 0; seed < 3000; seed++) {
        make_step(&s, seed);
        int32_t n = microbatch_count(&s.b, 1 + (int32_t)(seed % 7));
        struct seen seen = {0};
        for (int32_t i = 0; i < n; i++) {
            struct batch p;
            assert_int_equal(microbatch_split(&memory, &s.b, i, n, &p, &e), 0);
            assert_int_equal(p.step, s.b.step);
            assert_int_equal(p.microbatch, i);
            assert_int_equal(p.n_copy, i == 0);
            if (n > 1) {
                assert_true(p.n_tokens >= MAX(s.b.n_tokens / n - 2 - MOST_VERIFIED, 1));
            }
            check_part(&s, &p, &seen);
        }
        assert_int_equal(seen.tokens, s.b.n_tokens);
        assert_int_equal(seen.logits, s.b.n_logits);
        assert_int_equal(seen.samples, s.b.n_samples);
        cuts += n - 1;
    }
    assert_true(cuts > 3000);
    microbatch_release(&memory);
}

static void small_steps_and_one_stage_stay_whole(void **state)
{
    (void)state;
    const int32_t q_start[] = {0, 1000};
    struct batch b = {.n_tokens = 7, .n_seqs = 1, .q_start = q_start};
    assert_int_equal(microbatch_count(&b, 8), 1);
    b.n_tokens = 0;
    assert_int_equal(microbatch_count(&b, 8), 1);
    b.n_tokens = 1000;
    assert_int_equal(microbatch_count(&b, 1), 1);
    assert_int_equal(microbatch_count(&b, 4), 4);
}

static void results_come_together(void **state)
{
    (void)state;
    struct gathered g = {0};
    struct err e;
    int32_t token[] = {1, 2, 3}, top[] = {10, 11, 20, 21};
    float logprob[] = {-1, -2, -3}, top_logprob[] = {-10, -11, -20, -21};
    struct results with = {.n_samples = 2,
                           .top_stride = 2,
                           .token = token,
                           .logprob = logprob,
                           .top_token = top,
                           .top_logprob = top_logprob,
                           .device_us = 5};
    struct results without = {
        .n_samples = 1, .token = token + 2, .logprob = logprob + 2, .device_us = 6};
    assert_int_equal(microbatch_results_begin(&g, 9, 3, 2, &e), 0);
    microbatch_results_add(&g, 0, &without);
    microbatch_results_add(&g, 1, &with);
    microbatch_results_add(&g, 3, &(struct results){.device_us = 1});
    assert_int_equal(g.results.step, 9);
    assert_int_equal(g.results.device_us, 12);
    assert_int_equal(g.results.token[0], 3);
    assert_int_equal(g.results.token[2], 2);
    assert_float_equal(g.results.logprob[1], -1, 0);
    assert_int_equal(g.results.top_token[2], 10);
    assert_int_equal(g.results.top_token[5], 21);
    assert_float_equal(g.results.top_logprob[4], -20, 0);
    microbatch_results_release(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(microbatches_are_the_step),
        cmocka_unit_test(small_steps_and_one_stage_stay_whole),
        cmocka_unit_test(results_come_together),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
