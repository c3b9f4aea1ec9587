/* The exact bytes of events and of JSON answers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "engine/output/emit.h"
#include "server/access/auth.h"
#include "server/stream/collect.h"
#include "tests/unit/api_context.h"

#define HEAD                                                                                      \
    "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"m\\\"x\"," \
    "\"system_fingerprint\":\"fp\",\"choices\":["

static struct sse_style style(void)
{
    struct sse_style s = {
        .token_bytes = test_token_bytes, .n_top = LIMIT_LOGPROBS, .n_prompt_top = LIMIT_LOGPROBS};

    assert_int_equal(sse_style_init(&s, "cmpl-1", 5, "m\"x", "fp", NULL), 0);
    return s;
}

static struct output piece(const char *text, enum finish_reason finish)
{
    return (struct output){
        .text = text, .text_len = strlen(text), .finish = finish, .stop_token = -1};
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
    struct usage u = {3, 4, 1, 0};
    struct buf b;

    (void)state;
    buf_init(&b, 1 << 20);
    struct output o = piece("ab c", FINISH_NONE);
    sse_piece(&b, &s, 12, &o, NULL, 0, &u);
    expect(&b,
           HEAD "{\"index\":12,\"text\":\"ab c\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    o = piece("", FINISH_NONE);
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    o = piece("a\"\\\n\x01\xc3\xa9", FINISH_NONE);
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"a\\\"\\\\\\n\\u0001\xc3\xa9\",\"logprobs\":null,"
                    "\"finish_reason\":null}]}\n\n");
    o = piece("", FINISH_LENGTH);
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"length\","
                    "\"stop_reason\":null}]}\n\n");
    o = piece("x", FINISH_STOP);
    o.stop_string = "\"";
    o.stop_string_len = 1;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":\"stop\","
                    "\"stop_reason\":\"\\\"\"}]}\n\n");
    o = piece("x", FINISH_STOP);
    o.stop_token = 77;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":\"stop\","
                    "\"stop_reason\":77}]}\n\n");
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
    struct usage u = {2, 1, 0, 0};
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
    expect(&b, HEAD "{\"index\":0,\"text\":\"a\",\"logprobs\":null,\"finish_reason\":null,\"token_"
                    "ids\":[97],\"prompt_"
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
    /* The best token twice, then a token that is part of a character, and a masked
     * one. */
    int32_t top[] = {'b', 'a'}, top2[] = {0xe2, 'c'};
    float lp[] = {-0.5f, -1.25f}, lp2[] = {-0.25f, -INFINITY};
    struct token_out t[] = {{.id = 'a',
                             .text_offset = 4,
                             .logprob = -1.25f,
                             .n_top = 2,
                             .top_id = top,
                             .top_logprob = lp},
                            {.id = 0xe2,
                             .text_offset = 5,
                             .logprob = -0.25f,
                             .n_top = 2,
                             .top_id = top2,
                             .top_logprob = lp2}};
    struct buf b;

    (void)state;
    buf_init(&b, 1 << 20);
    s.logprobs = true;
    struct output o = piece("a", FINISH_NONE);
    o.token = t;
    o.n_tokens = 2;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    expect(&b, HEAD "{\"index\":0,\"text\":\"a\",\"logprobs\":{\"tokens\":[\"a\",\"bytes:\\\\xe2\"]"
                    ",\"token_logprobs\":[-1.25,-"
                    "0.25],"
                    "\"top_logprobs\":[{\"b\":-0.5,\"a\":-1.25},{\"bytes:\\\\xe2\":-0.25,\"c\":-"
                    "9999.0}],\"text_offset\":[4,5]},"
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
    struct token_out t[] = {
        {.id = 'x', .logprob = NAN},
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
    expect(
        &b, HEAD
        "{\"index\":0,\"text\":\"xz\",\"logprobs\":{\"tokens\":[\"x\",\"z\"],\"token_logprobs\":["
        "null,-2],"
        "\"top_logprobs\":[null,{\"y\":-0.5,\"z\":-2}],\"text_offset\":[0,1]},\"finish_reason\":"
        "null,"
        "\"prompt_logprobs\":[null,{\"121\":{\"logprob\":-0.5,\"rank\":1,\"decoded_token\":\"y\"},"
        "\"122\":{\"logprob\":-2,\"decoded_token\":\"z\"}}]}]}\n\n");
    /* prompt_logprobs alone: nothing of the prompt in `logprobs`. */
    s.echo_logprobs = false;
    sse_piece(&b, &s, 0, &o, NULL, 0, &u);
    assert_non_null(strstr(b.data, "\"logprobs\":null"));
    buf_release(&b);
    sse_style_release(&s);
}

static void test_full_buffer_is_an_error(void **state)
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

#define DEAD_END                                                                    \
    "\"finish_reason\":\"error\",\"stop_reason\":null,\"error\":{\"message\":\"no " \
    "way\",\"type\":\"invalid_"                                                     \
    "request_error\",\"param\":null,\"code\":400}}"

static void test_a_choice_that_could_not_go_on(void **state)
{
    struct sse_style s = style();
    struct usage u = {3, 4, 0, 0};
    struct collector c;
    struct buf b;

    (void)state;
    buf_init(&b, 1 << 20);
    struct output o = piece("a", FINISH_IMPOSSIBLE);
    o.error = "no way";
    assert_int_equal(sse_piece(&b, &s, 0, &o, NULL, 0, &u), 0);
    b.data[b.len] = '\0';
    assert_non_null(
        strstr(b.data, "{\"index\":0,\"text\":\"a\",\"logprobs\":null," DEAD_END "]}\n\n"));
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
    struct usage u = {3, 4, 0, 0};
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
    expect(&b, "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":"
               "\"m\\\"x\",\"system_"
               "fingerprint\":\"fp\",\"choices\":["
               "{\"index\":0,\"text\":\"z\",\"logprobs\":{\"tokens\":[],\"token_logprobs\":[],"
               "\"top_logprobs\":[],"
               "\"text_offset\":[]},"
               "\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":[],\"prompt_token_"
               "ids\":[1,2]},"
               "{\"index\":1,\"text\":\"a\\\"b\",\"logprobs\":{\"tokens\":[\"a\"],\"token_"
               "logprobs\":[-1],\"top_"
               "logprobs\":[{\"a\":-1}],"
               "\"text_offset\":[0]},\"finish_reason\":\"stop\",\"stop_reason\":\"END\",\"token_"
               "ids\":[97],\"prompt_"
               "token_ids\":[1,2]}],"
               "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7,\"prompt_"
               "tokens_details\":{"
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

/* ---- in portions ---- */

/* A request with an echoed prompt and its log-probabilities. */
static struct request *echoed(struct tokenizer **t)
{
    static const char prompt[] = "h\xc3\xa9 \xe2\x82\xac\n";
    struct gen_params p = {.n = 2,
                           .best_of = 2,
                           .echo = true,
                           .n_logprobs = 2,
                           .n_prompt_logprobs = 1,
                           .skip_special = true};
    int32_t id[sizeof(prompt) - 1], top[] = {'y', 'z'};
    float logprob[] = {-0.5f, -3};
    struct request *r;
    struct err e;
    struct engine_stats stats;
    struct output_processor em = {.stats = &stats};

    for (size_t i = 0; i < sizeof(id) / sizeof(id[0]); i++) {
        id[i] = (unsigned char)prompt[i];
    }
    assert_int_equal(tokenizer_open_bytes(t, &e), 0);
    assert_int_equal(request_new(&r, &p, id, ARRAY_LEN(id), &e), 0);
    assert_int_equal(output_state_new(r, *t, &e), 0);
    for (size_t i = 0; i < ARRAY_LEN(id); i++) {
        struct delta d = {
            .request = r, .kind = DELTA_PROMPT, .token = id[i], .logprob = i ? -2 : NAN};
        d.n_top = i ? 2 : 0;
        d.top_token = top;
        d.top_logprob = logprob;
        emit_delta(&em, &d, NULL);
    }
    return r;
}

static void make_in_portions(struct buf *b, const struct sse_style *s, const struct output *o,
                             const struct prompt_ids *ids, const struct usage *u, int32_t portion)
{
    struct sse_cursor c = {0};
    int32_t units = portion, n = 0;

    sse_open(b, s, 1);
    for (; !sse_middle(b, s, o, ids, &c, &units); units = portion) {
        assert_true(++n < 1000);
    }
    sse_cursor_release(&c);
    assert_int_equal(sse_close(b, s, u), 0);
    assert_true(portion > 1 || n > 5);
}

static void test_portions_make_the_same(void **state)
{
    struct sse_style s = style();
    struct usage u = {3, 4, 1, 0};
    struct tokenizer *t;
    struct request *r = echoed(&t);
    struct prompt_ids ids = {r->prompt, r->n_prompt};
    struct output o = {
        .request = r, .text = "", .n_tokens = r->n_prompt, .prompt = true, .stop_token = -1};
    struct buf whole, b;

    (void)state;
    buf_init(&whole, 1 << 20);
    buf_init(&b, 1 << 20);
    s.logprobs = s.echo_logprobs = s.prompt_logprobs = s.token_ids = s.continuous_usage = true;
    assert_int_equal(sse_piece(&whole, &s, 1, &o, r->prompt, r->n_prompt, &u), 0);
    assert_non_null(strstr(whole.data, "\"text\":\"h\xc3\xa9 \xe2\x82\xac\\n\""));
    assert_non_null(strstr(whole.data, "\"text_offset\":[0,1,1,2,3,3,3,4]"));
    assert_non_null(strstr(whole.data, "\"prompt_token_ids\":[104,195,169,32,226,130,172,10]"));
    assert_non_null(strstr(whole.data, "\"prompt_logprobs\":[null,{"));
    for (int32_t portion = 1; portion < 80; portion++) {
        buf_clear(&b);
        make_in_portions(&b, &s, &o, &ids, &u, portion);
        assert_string_equal(b.data, whole.data);
    }
    buf_release(&whole);
    buf_release(&b);
    request_unref(r);
    tokenizer_free(t);
    sse_style_release(&s);
}

/* An echoed prompt is collected once, in portions, and appears in each of its
 * choices. */
static void test_a_prompt_is_collected_once(void **state)
{
    struct sse_style s = style();
    struct usage u = {0};
    struct tokenizer *t;
    struct request *r = echoed(&t);
    struct prompt_ids ids = {r->prompt, r->n_prompt};
    struct output o = {.request = r,
                       .text = "",
                       .n_tokens = r->n_prompt,
                       .prompt = true,
                       .stop_token = -1},
                  x;
    struct token_out token = {.id = 'x', .text_offset = 6, .logprob = -1};
    struct collector c;
    struct buf first, b;

    (void)state;
    s.whole = s.logprobs = s.echo_logprobs = s.prompt_logprobs = s.token_ids = true;
    buf_init(&first, 1 << 20);
    for (int32_t portion = 1; portion < 40; portion++) {
        buf_init(&b, 1 << 20);
        collector_init(&c, 2);
        collector_share_prompts(&c, 1);
        for (int32_t i = 0; i < 2; i++) {
            struct sse_cursor at = {0};
            int32_t units = portion, rc;
            while ((rc = collector_add_some(&c, &s, i, &o, &at, &units)) == COLLECT_MORE) {
                units = portion;
            }
            assert_int_equal(rc, 0);
            sse_cursor_release(&at);
            x = piece("x", FINISH_LENGTH);
            x.token = &token;
            x.n_tokens = 1;
            assert_int_equal(collector_add(&c, &s, i, &x), 0);
        }
        assert_int_equal(collector_body(&b, &c, &s, &ids, 2, &u), 0);
        if (portion == 1) {
            buf_append(&first, b.data, b.len);
        }
        assert_string_equal(b.data, first.data);
        collector_release(&c);
        buf_release(&b);
    }
    const char *at = strstr(first.data, "\"text\":\"h\xc3\xa9 \xe2\x82\xac\\nx\"");
    assert_non_null(at);
    assert_non_null(strstr(at + 1, "\"text\":\"h\xc3\xa9 \xe2\x82\xac\\nx\""));
    assert_non_null(strstr(first.data, "\"tokens\":[\"h\",\"bytes:\\\\xc3\""));
    assert_non_null(strstr(first.data, "\"text_offset\":[0,1,1,2,3,3,3,4,6]"));
    buf_release(&first);
    request_unref(r);
    tokenizer_free(t);
    sse_style_release(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_continuous_usage_and_ids),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_prompt_logprobs),
        cmocka_unit_test(test_full_buffer_is_an_error),
        cmocka_unit_test(test_a_choice_that_could_not_go_on),
        cmocka_unit_test(test_collected_body),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_portions_make_the_same),
        cmocka_unit_test(test_a_prompt_is_collected_once),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
