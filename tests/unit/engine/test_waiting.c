/* Tests what a request holds while it waits, whatever its parameters, and what happens
 * if there is no memory for its choices later. */
#include "tests/unit/nomem.h"

#include <string.h>

#include "engine/output/emit.h"
#include "engine/sched/seq.h"
#include "engine/stats.h"
#include "tests/sim/rig.h"

enum { WAITING = 1000, MOST_BYTES = 64 << 20, VOCAB = 128256, TEXTS = 16 };

/* A request that is as large as one of its fields allows. */
struct shape {
    const char *name;
    int32_t n_prompt, max_tokens;
    int32_t best_of, beam_width;
    int32_t n_logprobs, n_prompt_logprobs;
    float penalty;
    bool echo;
    int32_t n_allowed, n_bias, n_stop, n_bad_words;
};

static const struct shape shapes[] = {
    {.name = "n with a penalty", .n_prompt = 8, .max_tokens = 8000, .best_of = 64, .penalty = 1.1f},
    {.name = "beams", .n_prompt = 8, .max_tokens = 500, .beam_width = 128, .n_logprobs = 20},
    {.name = "beams with stop strings",
     .n_prompt = 8,
     .max_tokens = 500,
     .beam_width = 128,
     .echo = true,
     .n_stop = TEXTS},
    {.name = "echo with log-probabilities",
     .n_prompt = 4000,
     .max_tokens = 16,
     .best_of = 128,
     .n_logprobs = 20,
     .n_prompt_logprobs = 20,
     .echo = true},
    {.name = "allowed ids", .n_prompt = 8, .max_tokens = 16, .best_of = 128, .n_allowed = 65536},
    {.name = "biases", .n_prompt = 8, .max_tokens = 16, .best_of = 128, .n_bias = 1024},
    {.name = "texts",
     .n_prompt = 8,
     .max_tokens = 16,
     .best_of = 128,
     .n_stop = TEXTS,
     .n_bad_words = 128},
};

static struct tokenizer *tokenizer;

static struct sched_config config(void)
{
    return (struct sched_config){.n_blocks = 1 << 16,
                                 .block_size = 16,
                                 .vocab = VOCAB,
                                 .max_len = 1 << 16,
                                 .max_num_seqs = 256,
                                 .max_num_batched_tokens = 8192,
                                 .max_logits = 512,
                                 .max_waiting = WAITING,
                                 .tokenizer = tokenizer};
}

static char **texts(int32_t n, int32_t len)
{
    char **ret = calloc((size_t)n, sizeof(*ret));

    assert_non_null(ret);
    for (int32_t i = 0; i < n; i++) {
        ret[i] = calloc(1, (size_t)len + 1);
        assert_non_null(ret[i]);
        memset(ret[i], 'a' + i % 26, (size_t)len);
    }
    return ret;
}

static void *list(int32_t n, size_t size)
{
    void *ret = calloc((size_t)n, size);

    assert_non_null(ret);
    return ret;
}

static struct gen_params params_of(const struct shape *s)
{
    struct gen_params p = rig_params();

    p.max_tokens = s->max_tokens;
    p.n = p.best_of = MAX(s->best_of, 1);
    p.beam_width = s->beam_width;
    p.n_logprobs = s->n_logprobs > 0 ? s->n_logprobs : -1;
    p.n_prompt_logprobs = s->n_prompt_logprobs > 0 ? s->n_prompt_logprobs : -1;
    p.repetition_penalty = s->penalty > 0 ? s->penalty : 1;
    p.echo = s->echo;
    p.n_allowed = s->n_allowed;
    p.allowed_token = s->n_allowed ? list(s->n_allowed, sizeof(*p.allowed_token)) : NULL;
    p.n_bias = s->n_bias;
    p.bias = s->n_bias ? list(s->n_bias, sizeof(*p.bias)) : NULL;
    p.n_stop = s->n_stop;
    p.stop = s->n_stop ? texts(s->n_stop, LIMIT_STOP_BYTES) : NULL;
    p.n_bad_words = s->n_bad_words;
    p.bad_word = s->n_bad_words ? texts(s->n_bad_words, 8) : NULL;
    return p;
}

/* Memory beside the body and the token ids, which are the client's own. */
static long own_bytes(const struct shape *s)
{
    long texts = s->n_stop * LIMIT_STOP_BYTES + s->n_bad_words * 8;

    return texts + 4 * (s->n_prompt + s->n_allowed) + 12 * s->n_bias;
}

struct waiting {
    struct request *request;
    struct group *group;
};

static void make(struct waiting *w, const struct shape *s, const int32_t *prompt)
{
    struct sched_config c = config();
    struct gen_params p = params_of(s);
    struct err e = {0};

    assert_int_equal(request_new(&w->request, &p, prompt, s->n_prompt, &e), 0);
    if (group_new(&w->group, w->request, NULL, &c, &e) < 0) {
        fail_msg("%s: %s", s->name, e.text);
    }
    assert_int_equal(output_state_new(w->request, c.tokenizer, &e), 0);
}

static void unmake(struct waiting *w)
{
    group_free(w->group);
    request_unref(w->request);
}

/* Requests and groups are in pages that stay (config/base/slab.h), each rounded up to
 * an odd number of lines. */
static long slab_bytes(void)
{
    return (long)(sizeof(struct request) + sizeof(struct group)) + 4 * 64;
}

static void make_all(struct waiting *w, const struct shape *s, const int32_t *prompt)
{
    for (int32_t k = 0; k < WAITING; k++) {
        make(&w[k], s, prompt);
    }
}

static void unmake_all(struct waiting *w)
{
    for (int32_t k = 0; k < WAITING; k++) {
        unmake(&w[k]);
    }
}

static void a_thousand_waiting_requests_fit_64_mib(void **state)
{
    static struct waiting w[WAITING];
    static const int32_t prompt[4096];

    (void)state;
    if (!REPLACED_MALLOC) {
        skip();
    }
    make_all(w, &shapes[0], prompt); /* takes the pages */
    unmake_all(w);
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        live = live_bytes = 0;
        counting = true;
        make_all(w, &shapes[i], prompt);
        long more = live_bytes + WAITING * (slab_bytes() - own_bytes(&shapes[i]));
        unmake_all(w);
        counting = false;
        if (more > MOST_BYTES) {
            fail_msg("%s: %ld bytes beyond what the clients sent", shapes[i].name, more);
        }
        assert_int_equal(live, 0);
        assert_int_equal(live_bytes, 0);
    }
}

/* ---- no memory for the choices, later ---- */

struct told {
    struct sink sink;
    int32_t n_failed, n_last;
    bool sane; /* every error had a sentence */
};

static void tell(struct sink *sink, const struct output *o)
{
    struct told *t = CONTAINER_OF(sink, struct told, sink);

    if (o->finish == FINISH_ERROR) {
        t->n_failed++;
        t->sane = o->error != NULL;
    }
    t->n_last += o->last;
}

static void pass(struct sink *sink)
{
    (void)sink;
}

/* Each failing choice is reported once, the engine is told to stop it, and the request
 * ends. */
static void answer(const struct shape *s, struct told *told, long fail_at)
{
    static const int32_t prompt[64];
    struct engine_stats *stats = calloc(1, sizeof(*stats));
    struct output_processor em = {.tokenizer = tokenizer, .sink = &told->sink, .stats = stats};
    struct waiting w;
    struct delta d = {.kind = DELTA_TOKEN, .token = 'a', .stop_token = -1};

    assert_non_null(stats);
    engine_stats_init(stats);
    make(&w, s, prompt);
    struct request *r = request_ref(w.request);
    d.request = r;
    counting = true;
    countdown = fail_at;
    emit_delta(&em, &d, NULL);
    counting = false;
    bool failed = countdown < 0;
    countdown = -1;
    assert_int_equal(told->n_failed > 0, failed);
    for (int32_t i = 0; failed && i < s->best_of; i++) {
        assert_true(atomic_load(&r->stop_at[i]) <= 1);
    }
    d.token = 'b';
    emit_delta(&em, &d, NULL);
    d.kind = DELTA_END;
    d.finish = FINISH_STOP;
    emit_delta(&em, &d, NULL);
    group_free(w.group);
    request_unref(r);
    free(stats);
}

static void choices_without_memory_end_and_the_engine_goes_on(void **state)
{
    static const struct shape s = {
        .n_prompt = 8, .max_tokens = 4, .best_of = 3, .n_logprobs = 2, .n_prompt_logprobs = 2};

    (void)state;
    if (!REPLACED_MALLOC) {
        skip();
    }
    for (long i = 0; i < 4; i++) { /* the choices, and the prompt's three arrays */
        struct told told = {.sink = {.emit = tell, .flush = pass}};
        answer(&s, &told, i);
        assert_int_equal(told.n_failed, s.best_of);
        assert_int_equal(told.n_last, 1);
        assert_true(told.sane);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_thousand_waiting_requests_fit_64_mib),
        cmocka_unit_test(choices_without_memory_end_and_the_engine_goes_on),
    };
    struct err e;

    if (tokenizer_open_bytes(&tokenizer, &e) < 0) {
        return 1;
    }
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tokenizer_free(tokenizer);
    return failed;
}
