/* The bytes of events and of JSON answers, golden. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "server/auth.h"
#include "server/collect.h"
#include "tests/api_context.h"

#define HEAD                                                                                      \
    "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"m\\\"x\"," \
    "\"system_fingerprint\":\"fp\",\"choices\":["

static struct sse_style style(void)
{
    struct sse_style s = {.token_bytes = test_token_bytes, .n_top = LIMIT_LOGPROBS, .n_prompt_top = LIMIT_LOGPROBS};
    assert_int_equal(sse_style_init(&s, "cmpl-1", 5, "m\"x", "fp", NULL), 0);
    return s;
}

static struct output piece(const char *text, enum finish_reason finish)
{
    return (struct output){.text = text, .text_len = strlen(text), .finish = finish, .stop_token = -1};
}

static void expect(struct buf *b, const char *golden)
{
    assert_false(b->failed);
    assert_string_equal(b->data, golden);
    assert_int_equal(b->len, strlen(golden));
    buf_clear(b);
}

static void test_events(void **state)
{
    struct sse_style s = style();
    struct usage u = {3, 4, 1};
    struct buf b;
    (void)state;
    buf_init(&b, 1 << 20);
    struct output o = piece("ab c", FINISH_NONE);
    sse_piece(&b, &s, 12, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":12,\"text\":\"ab c\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    o = piece("", FINISH_NONE);
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    o = piece("a\"\\\n\x01\xc3\xa9", FINISH_NONE);
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD
           "{\"index\":0,\"text\":\"a\\\"\\\\\\n\\u0001\xc3\xa9\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    o = piece("", FINISH_LENGTH);
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD
           "{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}]}\n\n");
    o = piece("x", FINISH_STOP);
    o.stop_string = "\"";
    o.stop_string_len = 1;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD
           "{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":\"\\\"\"}]}\n\n");
    o = piece("x", FINISH_STOP);
    o.stop_token = 77;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b,
           HEAD "{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":77}]}\n\n");
    sse_usage(&b, &s, &u);
    expect(&b, HEAD "],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7,"
                    "\"prompt_tokens_details\":{\"cached_tokens\":1}}}\n\n");
    sse_error(&b, 500, "the device failed");
    expect(&b, "data: {\"error\":{\"message\":\"the device "
               "failed\",\"type\":\"server_error\",\"param\":null,\"code\":500}}\n\n");
    sse_done(&b);
    expect(&b, "data: [DONE]\n\n");
    sse_keepalive(&b);
    expect(&b, ": keepalive\n\n");
    buf_release(&b);
    sse_style_release(&s);
}

static void test_continuous_usage_and_ids(void **state)
{
    struct sse_style s = style();
    struct usage u = {2, 1, 0};
    struct token_out t = {.id = 'a', .logprob = -1};
    int32_t prompt[] = {7, 8};
    struct buf b;
    (void)state;
    buf_init(&b, 1 << 20);
    s.continuous_usage = s.token_ids = true;
    struct output o = piece("a", FINISH_NONE);
    o.token = &t;
    o.n_tokens = 1;
    sse_piece(&b, &s, 0, &o, prompt, 2, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"a\",\"logprobs\":null,\"finish_reason\":null,\"token_ids\":[97],\"prompt_"
                    "token_ids\":[7,8]}],"
                    "\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":1,\"total_tokens\":3,"
                    "\"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\n");
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    assert_null(strstr(b.data, "prompt_token_ids"));
    buf_release(&b);
    sse_style_release(&s);
}

static void test_logprobs(void **state)
{
    struct sse_style s = style();
    struct usage u = {0};
    /* The best one twice by id, then a token that is part of a character, and one that is masked. */
    int32_t top[] = {'b', 'a'}, top2[] = {0xe2, 'c'};
    float lp[] = {-0.5f, -1.25f}, lp2[] = {-0.25f, -INFINITY};
    struct token_out t[] = {
        {.id = 'a', .text_offset = 4, .logprob = -1.25f, .n_top = 2, .top_id = top, .top_logprob = lp},
        {.id = 0xe2, .text_offset = 5, .logprob = -0.25f, .n_top = 2, .top_id = top2, .top_logprob = lp2}};
    struct buf b;
    (void)state;
    buf_init(&b, 1 << 20);
    s.logprobs = true;
    struct output o = piece("a", FINISH_NONE);
    o.token = t;
    o.n_tokens = 2;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD
           "{\"index\":0,\"text\":\"a\",\"logprobs\":{\"tokens\":[\"a\",\"bytes:\\\\xe2\"],\"token_logprobs\":[-1.25,-"
           "0.25],"
           "\"top_logprobs\":[{\"b\":-0.5,\"a\":-1.25},{\"bytes:\\\\xe2\":-0.25,\"c\":-9999.0}],\"text_offset\":[4,5]},"
           "\"finish_reason\":null}]}\n\n");
    /* logprobs 0: the token itself. */
    t[0].n_top = 0;
    o.n_tokens = 1;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    assert_non_null(strstr(b.data, "\"top_logprobs\":[{\"a\":-1.25}]"));
    buf_release(&b);
    sse_style_release(&s);
}

static void test_prompt_logprobs(void **state)
{
    struct sse_style s = style();
    struct usage u = {0};
    int32_t top[] = {'y'};
    float lp[] = {-0.5f};
    struct token_out t[] = {{.id = 'x', .logprob = NAN},
                            {.id = 'z', .text_offset = 1, .logprob = -2, .n_top = 1, .top_id = top, .top_logprob = lp}};
    struct buf b;
    (void)state;
    buf_init(&b, 1 << 20);
    s.prompt_logprobs = s.echo_logprobs = s.logprobs = true;
    struct output o = piece("xz", FINISH_NONE);
    o.token = t;
    o.n_tokens = 2;
    o.prompt = true;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"xz\",\"logprobs\":{\"tokens\":[\"x\",\"z\"],\"token_logprobs\":[null,-2],"
                    "\"top_logprobs\":[null,{\"y\":-0.5,\"z\":-2}],\"text_offset\":[0,1]},\"finish_reason\":null,"
                    "\"prompt_logprobs\":[null,{\"121\":{\"logprob\":-0.5,\"rank\":1,\"decoded_token\":\"y\"},"
                    "\"122\":{\"logprob\":-2,\"decoded_token\":\"z\"}}]}]}\n\n");
    /* prompt_logprobs alone: nothing of the prompt in `logprobs`. */
    s.echo_logprobs = false;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    assert_non_null(strstr(b.data, "\"logprobs\":null"));
    buf_release(&b);
    sse_style_release(&s);
}

static void test_full_buffer_is_told(void **state)
{
    struct sse_style s = style();
    struct usage u = {0};
    struct buf b;
    (void)state;
    buf_init(&b, 100);
    struct output o = piece("ab", FINISH_NONE);
    assert_int_not_equal(sse_piece(&b, &s, 0, &o, NULL, 0, &u), 0);
    assert_true(b.failed);
    buf_release(&b);
    sse_style_release(&s);
}

#define DEAD_END                                                                                             \
    "\"finish_reason\":\"error\",\"stop_reason\":null,\"error\":{\"message\":\"no way\",\"type\":\"invalid_" \
    "request_error\",\"param\":null,\"code\":400}}"

static void test_a_choice_that_could_not_go_on(void **state)
{
    struct sse_style s = style();
    struct usage u = {3, 4, 0};
    struct collector c;
    struct buf b;
    (void)state;
    buf_init(&b, 1 << 20);
    struct output o = piece("a", FINISH_IMPOSSIBLE);
    o.error = "no way";
    assert_int_equal(sse_piece(&b, &s, 0, &o, NULL, 0, &u), 0);
    b.data[b.len] = '\0';
    assert_non_null(strstr(b.data, "{\"index\":0,\"text\":\"a\",\"logprobs\":null," DEAD_END "]}\n\n"));
    buf_clear(&b);
    collector_init(&c, 2);
    assert_int_equal(collector_add(&c, &s, 0, &o), 0);
    o = piece("b", FINISH_LENGTH);
    assert_int_equal(collector_add(&c, &s, 1, &o), 0);
    assert_int_equal(collector_body(&b, &c, &s, NULL, 2, &u), 0);
    assert_non_null(strstr(b.data, DEAD_END ",{\"index\":1,\"text\":\"b\""));
    collector_release(&c);
    buf_release(&b);
    sse_style_release(&s);
}

static void test_collected_body(void **state)
{
    struct sse_style s = style();
    struct usage u = {3, 4, 0};
    struct token_out t = {.id = 'a', .text_offset = 0, .logprob = -1};
    int32_t id[] = {1, 2};
    struct prompt_ids prompts[] = {{id, 2}};
    struct collector c;
    struct buf b;
    (void)state;
    buf_init(&b, 1 << 20);
    s.logprobs = s.token_ids = true;
    collector_init(&c, 2);
    struct output o = piece("a\"", FINISH_NONE);
    o.token = &t;
    o.n_tokens = 1;
    assert_int_equal(collector_add(&c, &s, 1, &o), 0);
    o = piece("b", FINISH_STOP);
    o.stop_string = "END";
    o.stop_string_len = 3;
    assert_int_equal(collector_add(&c, &s, 1, &o), 0);
    o = piece("z", FINISH_LENGTH);
    assert_int_equal(collector_add(&c, &s, 0, &o), 0);
    assert_int_equal(collector_body(&b, &c, &s, prompts, 2, &u), 0);
    expect(&b, "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"m\\\"x\",\"system_"
               "fingerprint\":\"fp\",\"choices\":["
               "{\"index\":0,\"text\":\"z\",\"logprobs\":{\"tokens\":[],\"token_logprobs\":[],\"top_logprobs\":[],"
               "\"text_offset\":[]},"
               "\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":[],\"prompt_token_ids\":[1,2]},"
               "{\"index\":1,\"text\":\"a\\\"b\",\"logprobs\":{\"tokens\":[\"a\"],\"token_logprobs\":[-1],\"top_"
               "logprobs\":[{\"a\":-1}],"
               "\"text_offset\":[0]},\"finish_reason\":\"stop\",\"stop_reason\":\"END\",\"token_ids\":[97],\"prompt_"
               "token_ids\":[1,2]}],"
               "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7,\"prompt_tokens_details\":{"
               "\"cached_tokens\":0}}}");
    collector_release(&c);
    buf_release(&b);
    sse_style_release(&s);
}

static void test_numbers(void **state)
{
    struct buf b;
    (void)state;
    buf_init(&b, 1000);
    put_i64(&b, 0);
    buf_putc(&b, ' ');
    put_i64(&b, INT64_MIN);
    buf_putc(&b, ' ');
    put_i64(&b, INT64_MAX);
    expect(&b, "0 -9223372036854775808 9223372036854775807");
    buf_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_continuous_usage_and_ids),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_prompt_logprobs),
        cmocka_unit_test(test_full_buffer_is_told),
        cmocka_unit_test(test_a_choice_that_could_not_go_on),
        cmocka_unit_test(test_collected_body),
        cmocka_unit_test(test_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
