/* Each allocation of the request path fails in turn: the request is refused and nothing
 * leaks. */
#include "tests/unit/nomem.h"

#include "server/access/auth.h"
#include "server/stream/agents/dialects.h"
#include "server/stream/collect.h"
#include "tests/unit/api_context.h"

static int parse_all(void)
{
    static const char body[] = "{\"prompt\":[\"ab\",\"c\"],\"stop\":[\"a\",\"b\"],\"bad_words\":["
                               "\"w\",\"v\"],\"logit_bias\":{\"1\":1,\"2\":2}"
                               ","
                               "\"stop_token_ids\":[9],\"allowed_token_ids\":[1,2],\"cache_salt\":"
                               "\"s\",\"foo\":{\"a\":[1,\"b\"]}}";
    struct completion c;
    struct shared_params *shared;
    struct err e = {0};
    int rc = completion_parse(&c, body, sizeof(body) - 1, &test_context, &e);

    if (rc) {
        assert_int_equal(rc, ERR_NOMEM);
        assert_int_equal(http_status_of(rc), 503);
        return rc;
    }
    rc = shared_params_new(&shared, &c.params, &e);
    if (rc == 0) {
        shared_params_unref(shared);
    }
    completion_release(&c);
    return rc;
}

/* A template that writes down what it is given, and refuses late system messages. */
static int render(void *arg, const char *context, size_t len, struct buf *out, struct err *e)
{
    (void)arg;
    if (strstr(context, "},{\"role\":\"system\"")) {
        return err_set(e, ERR_INVALID, "System message must be at the beginning.");
    }
    return buf_append(out, context, len) ? err_nomem(e, "a chat") : 0;
}

static int parse_agents(int (*parse)(struct completion *, const char *, size_t,
                                     const struct api_context *, struct err *),
                        const char *body)
{
    struct api_context ctx = test_context;
    struct completion c;
    struct err e = {0};

    ctx.render_chat = render;
    ctx.info.max_model_len = 4000;
    int rc = parse(&c, body, strlen(body), &ctx, &e);
    if (rc) {
        assert_int_equal(rc, ERR_NOMEM);
        return rc;
    }
    completion_release(&c);
    return 0;
}

static int parse_messages(void)
{
    return parse_agents(
        messages_parse,
        "{\"max_tokens\":5,\"system\":[{\"type\":\"text\",\"text\":\"S\"}],\"stop_sequences\":["
        "\"x\"],"
        "\"thinking\":{\"type\":\"enabled\"},\"tool_choice\":{\"type\":\"none\"},"
        "\"tools\":[{\"name\":\"f\",\"input_schema\":{\"type\":\"object\"}}],"
        "\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"system\",\"content\":"
        "\"b\"},"
        "{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"c\"},"
        "{\"type\":\"text\",\"text\":\"d\"}]},{\"role\":\"user\",\"content\":[{\"type\":\"text\","
        "\"text\":\"e\"}]}]}");
}

static int parse_responses(void)
{
    return parse_agents(
        responses_parse,
        "{\"max_output_tokens\":5,\"instructions\":\"S\",\"tool_choice\":\"none\",\"tools\":["
        "{\"type\":\"function\",\"name\":\"f\",\"parameters\":{\"type\":\"object\"}}],"
        "\"reasoning\":{\"effort\":\"none\"},\"metadata\":{\"k\":\"v\"},\"input\":["
        "{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"system\",\"content\":\"b\"},"
        "{\"type\":\"reasoning\",\"content\":[{\"type\":\"reasoning_text\",\"text\":\"c\"}]},"
        "{\"role\":\"assistant\",\"content\":[{\"type\":\"output_text\",\"text\":\"d\"}]},"
        "{\"role\":\"user\",\"content\":\"e\"}]}");
}

static int answer_in(const struct dialect *d, bool whole)
{
    static const struct answer_event events[] = {
        {.kind = ANSWER_REASONING, .text = "hm", .len = 2},
        {.kind = ANSWER_CONTENT, .text = "\n", .len = 1},
        {.kind = ANSWER_CONTENT, .text = "text", .len = 4},
        {.kind = ANSWER_CALL, .text = "", .name = "f", .id = "c"},
        {.kind = ANSWER_ARGUMENTS, .text = "{}", .len = 2},
        {.kind = ANSWER_CALL_END, .text = ""},
    };
    struct answer_info info = {
        .id = "x_1", .model = "m", .n_choices = 1, .whole = whole, .echo = ""};
    struct usage u = {0};
    struct buf b;
    void *state = calloc(1, d->state_bytes);

    if (!state) {
        return ERR_NOMEM;
    }
    buf_init(&b, 1 << 20);
    int rc = d->init(state, &info, NULL);
    rc = rc ? rc : d->begin(&b, state, &u);
    for (size_t i = 0; i < ARRAY_LEN(events) && !rc; i++) {
        rc = d->event(&b, state, 0, &events[i]);
    }
    rc = rc ? rc : d->finish(&b, state, 0, FINISH_STOP, "x", true);
    rc = rc ? rc : d->end(&b, state, &u);
    d->release(state);
    free(state);
    buf_release(&b);
    return rc;
}

static int answer_in_dialects(void)
{
    int rc = 0;

    for (int whole = 0; whole < 2 && !rc; whole++) {
        rc = answer_in(&responses_dialect, whole);
        rc = rc ? rc : answer_in(&messages_dialect, whole);
    }
    return rc;
}

static int tokenize_all(void)
{
    struct tokenize t;
    int rc = tokenize_parse(&t, "{\"prompt\":\"ab\"}", 15, &test_context, NULL);

    if (rc == 0) {
        tokenize_release(&t);
    }
    rc = rc ? rc : detokenize_parse(&t, "{\"tokens\":[1,2]}", 16, &test_context, NULL);
    if (rc == 0) {
        tokenize_release(&t);
    }
    return rc;
}

static int answer(struct sse_style *s, struct collector *c)
{
    struct token_out t = {.id = 'a', .logprob = -1};
    struct output o = {.text = "a\n",
                       .text_len = 2,
                       .token = &t,
                       .n_tokens = 1,
                       .finish = FINISH_STOP,
                       .stop_string = "\n",
                       .stop_string_len = 1};
    struct usage u = {0};
    int32_t id = 7;
    struct prompt_ids prompt = {&id, 1};
    struct buf events, body;

    buf_init(&events, 1 << 20);
    buf_init(&body, 1 << 20);
    int rc = collector_add(c, s, 0, &o);
    rc = rc ? rc : collector_body(&body, c, s, &prompt, 1, &u);
    rc = rc ? rc : sse_piece(&events, s, 0, &o, &id, 1, &u);
    o = (struct output){.text = "plain", .text_len = 5};
    s->logprobs = s->token_ids = false;
    rc = rc ? rc : sse_piece(&events, s, 0, &o, NULL, 0, &u);
    rc = rc ? rc : sse_done(&events);
    buf_release(&events);
    buf_release(&body);
    return rc;
}

static int answer_all(void)
{
    struct sse_style s = {.token_bytes = test_token_bytes,
                          .logprobs = true,
                          .n_top = LIMIT_LOGPROBS,
                          .token_ids = true};
    struct collector c;
    int rc = sse_style_init(&s, "cmpl-1", 5, "m", "fp", NULL);

    if (rc) {
        return rc;
    }
    collector_init(&c, 2);
    rc = answer(&s, &c);
    collector_release(&c);
    sse_style_release(&s);
    return rc;
}

static int load_keys(void)
{
    char *list[] = {"alpha"};
    struct settings s = {.api_key = list, .n_api_keys = 1};
    struct keys k;
    int rc = keys_open(&k, &s, NULL);

    if (rc == 0) {
        keys_close(&k);
    }
    return rc;
}

static void test_bodies(void **state)
{
    (void)state;
    nomem_each(parse_all, 10000, 40, 0);
}

static void test_bodies_of_agents(void **state)
{
    (void)state;
    nomem_each(parse_messages, 10000, 40, 0);
    nomem_each(parse_responses, 10000, 40, 0);
}

static void test_dialects(void **state)
{
    (void)state;
    nomem_each(answer_in_dialects, 10000, 8, 0);
}

static void test_token_bodies(void **state)
{
    (void)state;
    nomem_each(tokenize_all, 10000, 6, 0);
}

static void test_answers(void **state)
{
    (void)state;
    nomem_each(answer_all, 10000, 8, 0);
}

static void test_keys(void **state)
{
    (void)state;
    nomem_each(load_keys, 10000, 1, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bodies),   cmocka_unit_test(test_bodies_of_agents),
        cmocka_unit_test(test_dialects), cmocka_unit_test(test_token_bodies),
        cmocka_unit_test(test_answers),  cmocka_unit_test(test_keys),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
