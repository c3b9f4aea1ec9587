/* Each allocation of the request path fails in turn: the request is refused and nothing
 * leaks. */
#include "tests/unit/nomem.h"

#include "server/access/auth.h"
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
        cmocka_unit_test(test_bodies),
        cmocka_unit_test(test_token_bodies),
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_keys),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
