/* Requests under a grammar, through the engine's public interface, on the null
 * executor: its tokens are bytes, drawn from those that masks allow. */
#include "engine/engine_state.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/sim/recorder.h"

enum { PATIENCE_S = 60 };

struct rig {
    struct settings settings;
    struct recorder recorder;
    struct engine *engine;
};

static struct settings base_settings(void)
{
    return (struct settings){
        .block_size = 16, .max_queue = 64, .step_timeout = 60, .prefix_cache = true};
}

static struct rig *rig_open(struct settings s)
{
    struct rig *r = calloc(1, sizeof(*r));
    struct executor *x;
    struct tokenizer *t;
    struct err e;

    r->settings = s;
    recorder_init(&r->recorder);
    assert_int_equal(null_open(&x, &s, &e), 0);
    assert_int_equal(tokenizer_open_bytes(&t, &e), 0);
    if (engine_open_on(&r->engine, &s, x, t, &r->recorder.sink, &e) != 0) {
        fail_msg("%s", e.text);
    }
    return r;
}

static void rig_close(struct rig *r)
{
    engine_free(r->engine);
    recorder_release(&r->recorder);
    free(r);
}

static struct grammar *grammar_of(struct rig *r, enum grammar_kind kind, const char *text)
{
    struct grammar *g = NULL;
    struct err e = {0};

    if (engine_grammar_new(r->engine, kind, text, strlen(text), NULL, &g, &e) < 0) {
        fail_msg("%s: %s", text, e.text);
    }
    return g;
}

static struct gen_params params(struct rig *r, int32_t max_tokens, uint64_t seed)
{
    struct gen_params p;

    gen_params_init(&p, r->engine);
    p.max_tokens = max_tokens;
    p.seed = seed;
    return p;
}

static struct request *make(struct gen_params p, struct recording **ret)
{
    struct request *q;
    struct err e;

    assert_int_equal(request_new(&q, &p, (const int32_t[]){'a', 'b', 'c'}, 3, &e), 0);
    q->user = *ret = recording_new();
    return q;
}

static struct request *submit(struct rig *r, struct gen_params p, struct recording **ret)
{
    struct request *q = make(p, ret);
    struct err e;

    if (engine_submit(r->engine, q, &e) < 0) {
        fail_msg("%s", e.text);
    }
    return q;
}

static void done(struct request *q, struct recording *rec)
{
    request_unref(q);
    recording_free(rec);
}

static bool text_is(const struct recorded_choice *c, const char *text)
{
    return c->text.len == strlen(text) && memcmp(c->text.data, text, c->text.len) == 0;
}

/* ---- ends ---- */

static void a_choice_ends_where_its_grammar_does(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec;
    struct gen_params p = params(r, 100, 3);
    p.n = p.best_of = 4;
    p.grammar = grammar_of(r, GRAMMAR_REGEX, "[0-9]{3}-(red|green)");
    struct request *q = submit(r, p, &rec);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    for (int i = 0; i < 4; i++) {
        const struct recorded_choice *c = &rec->choice[i];
        assert_int_equal(c->finish, FINISH_STOP);
        assert_int_equal(c->stop_token, -1);
        assert_int_equal(c->n_tokens, c->text.len);
        for (size_t k = 0; k < 3; k++) {
            assert_in_range(c->text.data[k], '0', '9');
        }
        assert_true((c->text.len == 7 && memcmp(c->text.data + 3, "-red", 4) == 0) ||
                    (c->text.len == 9 && memcmp(c->text.data + 3, "-green", 6) == 0));
    }
    done(q, rec);
    rig_close(r);
}

/* min_tokens and ignore_eos ask for more than the grammar has: its end wins. */
static void the_end_of_a_grammar_wins(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec;
    struct gen_params p = params(r, 50, 3);
    p.min_tokens = 40;
    p.ignore_eos = true;
    p.grammar = grammar_of(r, GRAMMAR_REGEX, "yes");
    struct request *q = submit(r, p, &rec);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    assert_true(text_is(&rec->choice[0], "yes"));
    assert_int_equal(rec->choice[0].finish, FINISH_STOP);
    done(q, rec);
    rig_close(r);
}

/* Its bans and the grammar's masks hold together; where they leave nothing, the choice
 * says so. */
static void bans_and_masks_hold_together(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec;
    struct gen_params p = params(r, 50, 3);
    p.grammar = grammar_of(r, GRAMMAR_REGEX, "[ab]{20}");
    p.bias = calloc(1, sizeof(*p.bias));
    p.bias[0] = (struct gen_bias){'a', -__builtin_inff()};
    p.n_bias = 1;
    struct request *q = submit(r, p, &rec);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    assert_true(text_is(&rec->choice[0], "bbbbbbbbbbbbbbbbbbbb"));
    done(q, rec);
    p = params(r, 50, 3);
    p.grammar = grammar_of(r, GRAMMAR_REGEX, "ab[cd]");
    p.bias = calloc(1, sizeof(*p.bias));
    p.bias[0] = (struct gen_bias){'b', -__builtin_inff()};
    p.n_bias = 1;
    q = submit(r, p, &rec);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    assert_int_equal(rec->choice[0].finish, FINISH_IMPOSSIBLE);
    done(q, rec);
    rig_close(r);
}

static void beams_speak_the_grammar_too(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct recording *rec;
    struct gen_params p = params(r, 50, 3);
    p.n = p.best_of = p.beam_width = 3;
    p.temperature = 0;
    p.grammar = grammar_of(r, GRAMMAR_REGEX, "(cat|cow|dog)s?!");
    struct request *q = submit(r, p, &rec);
    assert_true(recorder_wait(&r->recorder, rec, PATIENCE_S));
    for (int i = 0; i < 3; i++) {
        const struct recorded_choice *c = &rec->choice[i];
        assert_int_equal(c->finish, FINISH_STOP);
        assert_true(c->text.len == 4 || c->text.len == 5);
        assert_int_equal(c->text.data[c->text.len - 1], '!');
    }
    done(q, rec);
    rig_close(r);
}

/* A model on a CPU, whose tokens are pieces of words. */
static void a_model_speaks_the_grammar(void **state)
{
    (void)state;
    struct settings s = base_settings();
    struct rig r;
    struct recording *rec;
    struct err e;
    s.model = "models/demo";
    s.device = DEVICE_CPU;
    s.threads = 1;
    s.max_num_seqs = 4;
    s.kv_blocks = 64;
    recorder_init(&r.recorder);
    if (engine_open(&r.engine, &s, &r.recorder.sink, &e) < 0) {
        fail_msg("%s", e.text);
    }
    struct gen_params p = params(&r, 60, 5);
    p.n = p.best_of = 3;
    p.temperature = 1;
    p.grammar = grammar_of(&r, GRAMMAR_REGEX, "\\{\"name\": \"[A-Z][a-z]{2,12}\"\\}");
    struct request *q = submit(&r, p, &rec);
    assert_true(recorder_wait(&r.recorder, rec, PATIENCE_S));
    for (int i = 0; i < 3; i++) {
        const struct recorded_choice *c = &rec->choice[i];
        assert_int_equal(c->finish, FINISH_STOP);
        assert_in_range(c->text.len, 15, 25);
        assert_memory_equal(c->text.data, "{\"name\": \"", 10);
        assert_memory_equal(c->text.data + c->text.len - 2, "\"}", 2);
        assert_true(c->n_tokens < (int32_t)c->text.len); /* some tokens are several bytes */
    }
    done(q, rec);
    engine_free(r.engine);
    recorder_release(&r.recorder);
}

/* ---- company ---- */

/* Under preemption, with free requests beside them, every text is what it is alone. */
static void the_same_text_in_any_company(void **state)
{
    (void)state;
    enum { N = 16 };
    struct settings s = base_settings();
    s.max_num_seqs = 8;
    s.kv_blocks = 24;
    s.max_model_len = 256;
    struct rig *r = rig_open(s);
    struct request *q[N];
    struct recording *rec[N];
    struct err e;
    for (int i = 0; i < N; i++) {
        struct gen_params p = params(r, 120, (uint64_t)i);
        p.grammar = i % 4 == 3 ? NULL : grammar_of(r, GRAMMAR_REGEX, "([a-f]{5}[0-9],)*end");
        q[i] = make(p, &rec[i]);
    }
    /* all at once, so that they run together */
    if (engine_submit_all(r->engine, q, N, &e) < 0) {
        fail_msg("%s", e.text);
    }
    for (int i = 0; i < N; i++) {
        assert_true(recorder_wait(&r->recorder, rec[i], PATIENCE_S));
    }
    assert_true(engine_stats(r->engine)->preempt_recompute > 0);
    for (int i = 0; i < N; i++) {
        struct recording *alone;
        struct gen_params p = params(r, 120, (uint64_t)i);
        p.grammar = i % 4 == 3 ? NULL : grammar_of(r, GRAMMAR_REGEX, "([a-f]{5}[0-9],)*end");
        struct request *again = submit(r, p, &alone);
        assert_true(recorder_wait(&r->recorder, alone, PATIENCE_S));
        assert_int_equal(alone->choice[0].finish, rec[i]->choice[0].finish);
        assert_int_equal(alone->choice[0].text.len, rec[i]->choice[0].text.len);
        assert_memory_equal(alone->choice[0].text.data, rec[i]->choice[0].text.data,
                            alone->choice[0].text.len);
        done(again, alone);
        done(q[i], rec[i]);
    }
    rig_close(r);
}

/* Requests that end in mid-flight, and an engine that stops under way. */
static void cancelled_requests_give_their_states_back(void **state)
{
    (void)state;
    enum { N = 6 };
    struct rig *r = rig_open(base_settings());
    struct request *q[N];
    struct recording *rec[N];
    for (int i = 0; i < N; i++) {
        struct gen_params p = params(r, 20000, (uint64_t)i);
        p.grammar = grammar_of(r, GRAMMAR_REGEX, "[a-z]*");
        p.ignore_eos = true;
        q[i] = submit(r, p, &rec[i]);
    }
    for (int i = 0; i < N / 2; i++) {
        assert_true(recorder_wait_tokens(&r->recorder, rec[i], 20, PATIENCE_S));
        engine_cancel(r->engine, q[i]);
        assert_true(recorder_wait(&r->recorder, rec[i], PATIENCE_S));
        assert_int_equal(rec[i]->choice[0].finish, FINISH_ABORT);
    }
    for (int i = 0; i < N; i++) {
        request_unref(q[i]);
    }
    rig_close(r); /* the others still run */
    for (int i = 0; i < N; i++) {
        recording_free(rec[i]);
    }
}

/* ---- compiled grammars ---- */

static void a_grammar_is_compiled_once(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct grammar *a = grammar_of(r, GRAMMAR_REGEX, "a+b"),
                   *b = grammar_of(r, GRAMMAR_REGEX, "a+b"),
                   *c = grammar_of(r, GRAMMAR_REGEX, "a+c"),
                   *d = grammar_of(r, GRAMMAR_CHOICE, "[\"a+b\"]");
    assert_ptr_equal(a, b);
    assert_ptr_not_equal(a, c);
    assert_ptr_not_equal(a, d);
    grammar_unref(c);
    for (int i = 0; i < 300; i++) { /* more than are kept */
        char text[32];
        snprintf(text, sizeof(text), "x{%d}", i + 1);
        grammar_unref(grammar_of(r, GRAMMAR_REGEX, text));
    }
    struct grammar *again = grammar_of(r, GRAMMAR_REGEX, "a+b");
    assert_ptr_not_equal(again, a); /* which is still held here */
    grammar_unref(again);
    grammar_unref(a);
    grammar_unref(b);
    grammar_unref(d);
    rig_close(r);
}

static void a_bad_grammar_is_refused(void **state)
{
    (void)state;
    struct rig *r = rig_open(base_settings());
    struct grammar *g = NULL;
    struct err e = {0};
    assert_int_equal(engine_grammar_new(r->engine, GRAMMAR_REGEX, "(a", 2, NULL, &g, &e),
                     ERR_INVALID);
    assert_true(e.text[0] != '\0');
    assert_null(g);
    rig_close(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_choice_ends_where_its_grammar_does),
        cmocka_unit_test(the_end_of_a_grammar_wins),
        cmocka_unit_test(bans_and_masks_hold_together),
        cmocka_unit_test(beams_speak_the_grammar_too),
        cmocka_unit_test(a_model_speaks_the_grammar),
        cmocka_unit_test(the_same_text_in_any_company),
        cmocka_unit_test(cancelled_requests_give_their_states_back),
        cmocka_unit_test(a_grammar_is_compiled_once),
        cmocka_unit_test(a_bad_grammar_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
