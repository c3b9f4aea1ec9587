/* Which outputs the output thread renders itself and which it leaves to the renderers,
 * and that a stream's events keep their order. */
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/output/emit.h"
#include "server/stream/stream.h"
#include "tests/unit/api_context.h"

struct desk {
    struct stream_hub hub;
    struct tokenizer *tokenizer;
};

static void desk_open(struct desk *d)
{
    assert_int_equal(stream_hub_open(&d->hub, 1, 64 << 20, NULL), 0);
    assert_int_equal(tokenizer_open_bytes(&d->tokenizer, NULL), 0);
}

/* A stream of one request, without a client; the test and the engine hold one reference
 * each. */
static struct stream *ask(struct desk *d, const char *body)
{
    struct completion c;
    struct stream *s;
    struct err e;

    assert_int_equal(completion_parse(&c, body, strlen(body), &test_context, &e), 0);
    assert_int_equal(stream_new(&s, &d->hub, &c, "cmpl-1", &test_context, &e), 0);
    assert_int_equal(output_state_new(s->request[0], d->tokenizer, &e), 0);
    struct output_processor em = {.tokenizer = d->tokenizer};
    struct delta first = {.request = s->request[0],
                          .kind = DELTA_PROMPT,
                          .token = s->request[0]->prompt[0],
                          .logprob = NAN};
    emit_delta(&em, &first, NULL);
    s->n_left = 1;
    completion_release(&c);
    return stream_ref(s);
}

static void say_prompt(struct desk *d, struct stream *s, int32_t choice)
{
    struct request *r = s->request[0];
    struct output o = {.request = r,
                       .choice = choice,
                       .text = "",
                       .n_tokens = r->n_prompt,
                       .prompt = true,
                       .stop_token = -1};

    d->hub.sink.emit(&d->hub.sink, &o);
}

static void say(struct desk *d, struct stream *s, int32_t choice, const char *text)
{
    struct token_out t = {.id = (unsigned char)text[0], .logprob = -1};
    struct output o = {.request = s->request[0],
                       .choice = choice,
                       .text = text,
                       .text_len = strlen(text),
                       .token = &t,
                       .n_tokens = 1,
                       .stop_token = -1};

    d->hub.sink.emit(&d->hub.sink, &o);
}

static void end(struct desk *d, struct stream *s)
{
    struct output o = {
        .request = s->request[0], .choice = -1, .text = "", .stop_token = -1, .last = true};

    d->hub.sink.emit(&d->hub.sink, &o);
    d->hub.sink.flush(&d->hub.sink);
}

static bool finished(struct stream *s)
{
    pthread_mutex_lock(&s->lock);
    bool ret = s->finished;
    pthread_mutex_unlock(&s->lock);
    return ret;
}

static void test_long_pieces_are_left_to_the_renderers(void **state)
{
    struct desk d;

    (void)state;
    desk_open(&d);
    struct stream *s =
        ask(&d, "{\"prompt\":\"abc\",\"stream\":true,\"echo\":true,\"logprobs\":2,\"n\":2}");
    struct stream *other = ask(&d, "{\"prompt\":\"abc\",\"stream\":true}");
    d.hub.allowance = 0;
    say_prompt(&d, s, 0);
    say(&d, s, 0, "x");
    say_prompt(&d, s, 1);
    say(&d, s, 1, "y");
    say(&d, other, 0, "plain"); /* rendered at once, whatever the other stream wants */
    assert_null(other->queue);
    assert_non_null(strstr(other->pending.data, "plain"));
    end(&d, s);
    end(&d, other);
    assert_true(finished(other));
    while (!finished(s)) {
        sched_yield();
    }
    const char *at = s->pending.data;
    static const char *const in_order[] = {
        "{\"index\":0,\"text\":\"\\u0001abc\"", "{\"index\":0,\"text\":\"x\"",
        "{\"index\":1,\"text\":\"\\u0001abc\"", "{\"index\":1,\"text\":\"y\"", "[DONE]"};
    for (size_t i = 0; i < ARRAY_LEN(in_order); i++) {
        at = strstr(at, in_order[i]);
        assert_non_null(at);
    }
    assert_true(atomic_load(&d.hub.budget.held) > 0);
    stream_unref(s);
    stream_unref(other);
    while (atomic_load(&d.hub.n_streams) > 0) {
        sched_yield(); /* the writer and the renderers have references */
    }
    assert_int_equal(atomic_load(&d.hub.budget.held), 0);
    stream_hub_close(&d.hub);
    tokenizer_free(d.tokenizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_long_pieces_are_left_to_the_renderers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
