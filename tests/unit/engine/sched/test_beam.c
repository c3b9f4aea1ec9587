/* Beam search against transformers: tests/golden/beams.txt holds the results of
 * generate(num_beams=k) for a table of log-probabilities
 * (scripts/make-beam-goldens). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/tokenizer/tokenizer.h"
#include "tests/sim/rig.h"

enum { VOCAB = 12, ROWS = 48, MAX_PROMPT = 8, STOPS = 2 };

static float table[ROWS][VOCAB];
static struct rig rig;

struct golden {
    int32_t k, n, early, max_tokens, n_prompt;
    float penalty;
    int32_t prompt[MAX_PROMPT];
    int32_t n_stop;
    char stop[STOPS][3]; /* a token's text is the character of its id */
};

static FILE *open_goldens(void)
{
    FILE *f = fopen("tests/golden/beams.txt", "r");
    int32_t rows = 0, vocab = 0;

    assert_non_null(f);
    assert_int_equal(fscanf(f, "# transformers %*s table %d %d", &rows, &vocab), 2);
    assert_int_equal(rows, ROWS);
    assert_int_equal(vocab, VOCAB);
    for (int32_t i = 0; i < ROWS * VOCAB; i++) {
        assert_int_equal(fscanf(f, "%f", &table[i / VOCAB][i % VOCAB]), 1);
    }
    return f;
}

static bool read_golden(FILE *f, struct golden *g)
{
    if (fscanf(f, " case %d %d %f %d %d %d", &g->k, &g->n, &g->penalty, &g->early, &g->max_tokens,
               &g->n_prompt) != 6) {
        return false;
    }
    for (int32_t i = 0; i < g->n_prompt; i++) {
        assert_int_equal(fscanf(f, "%d", &g->prompt[i]), 1);
    }
    assert_int_equal(fscanf(f, "%d", &g->n_stop), 1);
    memset(g->stop, 0, sizeof(g->stop));
    for (int32_t i = 0; i < g->n_stop; i++) {
        int32_t len, id;
        assert_int_equal(fscanf(f, "%d", &len), 1);
        for (int32_t k = 0; k < len; k++) {
            assert_int_equal(fscanf(f, "%d", &id), 1);
            g->stop[i][k] = (char)id;
        }
    }
    return true;
}

/* The best next tokens of a sequence by the table. */
static void table_tops(struct rig *r, const struct seq *q, int32_t *top, float *top_logprob)
{
    (void)r;
    int32_t length = q->group->n_prompt + q->n_out;
    const float *row = table[(3 * seq_token(q, length - 1) + length) % ROWS];
    int32_t n = 0;
    for (int32_t t = 0; t < VOCAB; t++) {
        int32_t i = n++;
        for (; i > 0 && top_logprob[i - 1] < row[t]; i--) {
            top_logprob[i] = top_logprob[i - 1];
            top[i] = top[i - 1];
        }
        top_logprob[i] = row[t];
        top[i] = t;
    }
}

static struct rig_request *add(struct golden *g, char **stop)
{
    for (int32_t i = 0; i < g->n_stop; i++) {
        stop[i] = g->stop[i];
    }
    struct gen_params p = rig_params();
    p.max_tokens = g->max_tokens;
    p.beam_width = p.best_of = g->k;
    p.n = g->n;
    p.length_penalty = g->penalty;
    p.early_stopping = (int8_t)g->early;
    p.stop = stop;
    p.n_stop = g->n_stop;
    struct rig_request *q = rig_add(&rig, p, 0, g->n_prompt);
    memcpy(q->request.prompt, g->prompt, (size_t)g->n_prompt * sizeof(int32_t));
    return q;
}

/* The choice's tokens in the order in which they came, and their sum of
 * log-probabilities. */
static int32_t collect(const struct rig_request *q, int32_t choice, int32_t *token, double *sum)
{
    int32_t n = 0;

    *sum = 0;
    for (int32_t i = 0; i < rig.n_deltas; i++) {
        const struct delta *d = &rig.delta[i];
        if (d->request != &q->request || d->kind != DELTA_TOKEN || d->choice != choice) {
            continue;
        }
        token[n++] = d->token;
        *sum += (double)d->logprob;
    }
    return n;
}

static bool ends_with_stop(const struct golden *g, const int32_t *token, int32_t n)
{
    for (int32_t i = 0; i < g->n_stop; i++) {
        int32_t len = (int32_t)strlen(g->stop[i]), same = 0;
        while (same < len && len <= n && token[n - len + same] == g->stop[i][same]) {
            same++;
        }
        if (same == len) {
            return true;
        }
    }
    return false;
}

static void compare_choice(FILE *f, const struct golden *g, const struct rig_request *q,
                           int32_t choice)
{
    double score, sum;
    int32_t n_tokens, got[RIG_DELTAS], n = collect(q, choice, got, &sum);

    assert_int_equal(fscanf(f, "%lf %d", &score, &n_tokens), 2);
    assert_int_equal(n, n_tokens);
    for (int32_t i = 0; i < n_tokens; i++) {
        int32_t token = -1;
        assert_int_equal(fscanf(f, "%d", &token), 1);
        assert_int_equal(got[i], token);
    }
    assert_true(fabs(sum / pow(n, (double)g->penalty) - score) < 1e-3 * fmax(1, fabs(score)));
    const struct delta *end = rig_finish(&rig, q, choice);
    assert_non_null(end);
    assert_int_equal(end->finish,
                     got[n - 1] == 0 || ends_with_stop(g, got, n) ? FINISH_STOP : FINISH_LENGTH);
}

static void texts_and_scores_are_those_of_transformers(void **state)
{
    (void)state;
    struct golden g;
    struct sched_config c;
    struct tokenizer *t;
    struct err e;
    char *stop[STOPS];
    int32_t n_cases = 0, n_stops = 0;
    FILE *f = open_goldens();
    rig_config(&c);
    c.vocab = VOCAB;
    c.eos[0] = 0;
    assert_int_equal(tokenizer_open_bytes(&t, &e), 0);
    c.tokenizer = t;
    for (; read_golden(f, &g); n_cases++) {
        rig_open(&rig, &c);
        rig.tops = table_tops;
        struct rig_request *q = add(&g, stop);
        n_stops += g.n_stop > 0;
        rig_run(&rig, 100);
        assert_true(q->ended);
        for (int32_t i = 0; i < g.n; i++) {
            compare_choice(f, &g, q, i);
        }
        rig_close(&rig);
    }
    assert_true(n_cases > 100);
    assert_true(n_stops > 50);
    tokenizer_free(t);
    fclose(f);
}

/* Leaving the best path costs less the later it happens, so the beams differ in their
 * last tokens only. */
static void late_leavers(struct rig *r, const struct seq *q, int32_t *top, float *top_logprob)
{
    (void)r;
    for (int32_t k = 0; k < RIG_TOPS; k++) {
        top[k] = 7 + k;
        top_logprob[k] = (float)(-k * (40 - q->n_out));
    }
}

static void what_beams_agree_on_goes_out_before_the_end(void **state)
{
    (void)state;
    struct sched_config c;
    rig_config(&c);
    rig_open(&rig, &c);
    rig.tops = late_leavers;
    struct gen_params p = rig_params();
    p.beam_width = p.best_of = p.n = 3;
    p.max_tokens = 12;
    p.n_logprobs = 2;
    struct rig_request *q = rig_add(&rig, p, 0, 5);
    rig_run(&rig, 8);
    assert_false(q->ended);
    assert_true(rig_count(&rig, q, DELTA_TOKEN, 0) > 2);
    assert_int_equal(rig_count(&rig, q, DELTA_TOKEN, 0), rig_count(&rig, q, DELTA_TOKEN, 2));
    rig_run(&rig, 100);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(rig_count(&rig, q, DELTA_TOKEN, i), 12);
    }
    for (int32_t i = 0; i < rig.n_deltas; i++) {
        assert_true(rig.delta[i].kind != DELTA_TOKEN || rig.delta[i].n_top == 2);
    }
    rig_close(&rig);
}

static void a_search_ends_once_the_output_side_has_ended_every_choice(void **state)
{
    (void)state;
    struct sched_config c;
    rig_config(&c);
    rig_open(&rig, &c);
    rig.tops = late_leavers;
    struct gen_params p = rig_params();
    p.beam_width = p.best_of = 4;
    p.n = 2;
    p.max_tokens = 40;
    struct rig_request *q = rig_add(&rig, p, 0, 5);
    rig_run(&rig, 10);
    atomic_store(&q->stop_at[0], 2);
    rig_run(&rig, 1);
    assert_false(q->ended); /* the other choice may go on */
    atomic_store(&q->stop_at[1], 2);
    rig_run(&rig, 1);
    assert_true(q->ended);
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(rig_finish(&rig, q, i)->finish, FINISH_STOP);
    }
    rig_close(&rig);
}

/* Tokens 256, 257, 258, ... on the best path; each is four letters of a dummy
 * vocabulary. */
static void counting_tokens(struct rig *r, const struct seq *q, int32_t *top, float *top_logprob)
{
    (void)r;
    for (int32_t k = 0; k < RIG_TOPS; k++) {
        top[k] = 256 + q->n_out + k;
        top_logprob[k] = (float)-k;
    }
}

/* How many tokens a search of width 1 takes when `stop` ends its text. */
static int32_t tokens_until(struct tokenizer *t, char *stop, int32_t min_tokens)
{
    struct sched_config c;

    rig_config(&c);
    c.vocab = 300;
    c.tokenizer = t;
    rig_open(&rig, &c);
    rig.tops = counting_tokens;
    struct gen_params p = rig_params();
    p.beam_width = p.best_of = p.early_stopping = 1;
    p.max_tokens = 12;
    p.min_tokens = min_tokens;
    p.stop = &stop;
    p.n_stop = 1;
    struct rig_request *q = rig_add(&rig, p, 0, 5);
    rig_run(&rig, 100);
    assert_true(q->ended);
    int32_t n = rig_count(&rig, q, DELTA_TOKEN, 0);
    assert_int_equal(rig_finish(&rig, q, 0)->finish, n < 12 ? FINISH_STOP : FINISH_LENGTH);
    rig_close(&rig);
    return n;
}

static void a_stop_string_is_found_inside_and_across_tokens(void **state)
{
    (void)state;
    struct tokenizer *t;
    struct err e;
    char text[4 * 9 + 1] = "", stop[8] = "";
    size_t len;
    assert_int_equal(tokenizer_open_dummy(&t, 300, &e), 0);
    for (int32_t i = 0; i < 9; i++) {
        const char *bytes = tokenizer_bytes(t, 256 + i, &len);
        assert_int_equal(len, 4);
        memcpy(text + 4 * i, bytes, 4);
    }
    for (size_t at = 0; at + 7 <= 36; at++) {
        memcpy(stop, text + at, 7);
        int32_t want = (int32_t)((strstr(text, stop) - text + 7 + 3) / 4);
        assert_int_equal(tokens_until(t, stop, 0), want);
        /* min_tokens: the stop string does not count yet */
        assert_int_equal(tokens_until(t, stop, want), 12);
        assert_int_equal(tokens_until(t, stop, want - 1), want);
    }
    tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_and_scores_are_those_of_transformers),
        cmocka_unit_test(what_beams_agree_on_goes_out_before_the_end),
        cmocka_unit_test(a_stop_string_is_found_inside_and_across_tokens),
        cmocka_unit_test(a_search_ends_once_the_output_side_has_ended_every_choice),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
