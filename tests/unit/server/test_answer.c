/* The answer path: text of the model, cut in pieces, becomes the events and the body of
 * a chat completion, by the parser of a real format. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine_state.h"
#include "server/api/json_fields.h"
#include "server/stream/sse.h"
#include "tests/unit/api_context.h"

#include "server/stream/answer.h"

#define CALL(name, arguments) \
    "<tool_call>\n{\"name\": \"" name "\", \"arguments\": " arguments "}\n</tool_call>"

/* One answer being made. */
struct rig {
    struct engine *engine;
    struct sse_style style;
    struct answer *answer;
    struct request request;
    struct buf b;
    struct usage usage;
};

struct ask {
    const char *format;
    int32_t n_choices;
    bool whole, no_tools, one_call, functions, reasoning, logprobs, token_ids, usage_at_end;
};

static struct completion completion_with(const struct ask *q)
{
    struct completion c = {
        .functions = q->functions, .parsed = true, .opens_reasoning = q->reasoning};

    c.tools.parallel = !q->one_call;
    if (!q->no_tools) {
        c.tools.tool = calloc(2, sizeof(*c.tools.tool));
        c.tools.tool[0].name = strdup("f");
        c.tools.tool[1].name = strdup("g");
        c.tools.n = 2;
    }
    return c;
}

static void rig_open(struct rig *r, const struct ask *q)
{
    static const int32_t prompt[] = {7, 8};
    struct completion c = completion_with(q);
    struct err e = {0};

    *r = (struct rig){.usage = {2, 3, 1}};
    r->engine = calloc(1, sizeof(*r->engine));
    r->engine->chat_format = chat_format_find(q->format);
    assert_non_null(r->engine->chat_format);
    r->style = (struct sse_style){.chat = true,
                                  .whole = q->whole,
                                  .logprobs = q->logprobs,
                                  .token_ids = q->token_ids,
                                  .token_bytes = test_token_bytes};
    r->request = (struct request){.prompt = (int32_t *)prompt, .n_prompt = 2};
    buf_init(&r->b, 1 << 20);
    assert_int_equal(sse_style_init(&r->style, "chatcmpl-1", 5, "m", "fp", &e), 0);
    struct answer_info info = {.id = "chatcmpl-1",
                               .model = "m",
                               .fingerprint = "fp",
                               .created = 5,
                               .n_choices = q->n_choices ? q->n_choices : 1,
                               .whole = q->whole,
                               .style = &r->style,
                               .include_usage = q->usage_at_end,
                               .functions = q->functions};
    if (answer_new(&r->answer, r->engine, &chat_dialect, &info, &c, &e)) {
        fail_msg("%s", e.text);
    }
    completion_release(&c);
}

static void rig_close(struct rig *r)
{
    answer_free(r->answer);
    sse_style_release(&r->style);
    buf_release(&r->b);
    free(r->engine);
}

static void add(struct rig *r, int32_t choice, const char *text, size_t len,
                enum finish_reason finish)
{
    struct token_out token = {.id = 'a', .logprob = -1};
    struct output o = {.request = &r->request,
                       .text = text,
                       .text_len = len,
                       .token = &token,
                       .n_tokens = 1,
                       .finish = finish,
                       .stop_token = -1};
    struct answer_cursor at = {0};
    int rc, turns = 0;

    do { /* in portions of one unit, as renderers do it */
        int32_t units = 1;
        rc = answer_add(r->answer, &r->b, choice, &o, &r->usage, &at, &units);
        turns++;
    } while (rc == ANSWER_MORE);
    assert_int_equal(rc, 0);
    assert_true(turns > 1 || len <= 128);
}

/* The text in pieces of `step` bytes, its end, and the answer's. */
static void answer_with(struct rig *r, const char *text, size_t step, enum finish_reason finish)
{
    size_t len = strlen(text);

    for (size_t at = 0; at < len; at += step) {
        add(r, 0, text + at, MIN(step, len - at), FINISH_NONE);
    }
    add(r, 0, "", 0, finish);
    assert_int_equal(answer_end(r->answer, &r->b, &r->usage), 0);
    assert_false(r->b.failed);
    assert_true(answer_held(r->answer) > 0);
}

/* ---- a client that reads the events ---- */

struct seen {
    char content[4096], reasoning[4096], finish[32];
    int32_t n_calls, n_logprobs, n_ids, n_events;
    struct {
        char id[64], name[64], arguments[4096];
        int named;
    } call[8];
    bool prompt_ids, usage, done, function;
};

static void append(char *to, size_t size, const cJSON *v)
{
    if (cJSON_IsString(v)) {
        strncat(to, v->valuestring, size - strlen(to) - 1);
    }
}

static const cJSON *at(const cJSON *v, const char *name)
{
    return cJSON_GetObjectItemCaseSensitive(v, name);
}

static void see_call(struct seen *s, const cJSON *v, int index)
{
    const cJSON *f = at(v, "function") ? at(v, "function") : v;

    assert_true(index >= 0 && index < 8);
    s->n_calls = MAX(s->n_calls, index + 1);
    append(s->call[index].id, sizeof(s->call[index].id), at(v, "id"));
    if (at(f, "name")) {
        s->call[index].named++;
    }
    append(s->call[index].name, sizeof(s->call[index].name), at(f, "name"));
    append(s->call[index].arguments, sizeof(s->call[index].arguments), at(f, "arguments"));
}

/* A delta of an event, or the message of a body. */
static void see_message(struct seen *s, const cJSON *d)
{
    int i = 0;

    append(s->content, sizeof(s->content), at(d, "content"));
    append(s->reasoning, sizeof(s->reasoning), at(d, "reasoning"));
    if (at(d, "reasoning")) {
        assert_string_equal(at(d, "reasoning")->valuestring,
                            at(d, "reasoning_content")->valuestring);
    }
    for (const cJSON *v = at(d, "tool_calls") ? at(d, "tool_calls")->child : NULL; v; v = v->next) {
        see_call(s, v, at(v, "index") ? (int)at(v, "index")->valuedouble : i);
        i++;
    }
    if (at(d, "function_call")) {
        s->function = true;
        see_call(s, at(d, "function_call"), 0);
    }
}

static void see_choice(struct seen *s, const cJSON *c)
{
    const cJSON *finish = at(c, "finish_reason");

    assert_string_equal(s->finish, ""); /* nothing follows the end of a choice */
    see_message(s, at(c, "delta") ? at(c, "delta") : at(c, "message"));
    append(s->finish, sizeof(s->finish), finish);
    s->n_logprobs += cJSON_GetArraySize(at(at(c, "logprobs"), "content"));
    s->n_ids += cJSON_GetArraySize(at(c, "token_ids"));
    s->prompt_ids = s->prompt_ids || cJSON_GetArraySize(at(c, "prompt_token_ids")) == 2;
}

static void see_json(struct seen *s, const char *text, size_t len)
{
    cJSON *tree;
    struct err e = {0};

    if (json_parse(&tree, text, len, &e)) {
        fail_msg("%s: %.*s", e.text, (int)len, text);
    }
    s->usage = s->usage || at(tree, "usage");
    if (at(tree, "choices")->child) {
        see_choice(s, at(tree, "choices")->child);
    }
    cJSON_Delete(tree);
}

static void see(struct seen *s, const struct rig *r, bool whole)
{
    const char *p = r->b.data, *end;

    memset(s, 0, sizeof(*s));
    if (whole) {
        see_json(s, r->b.data, r->b.len);
        return;
    }
    for (; (end = strstr(p, "\n\n")) != NULL; p = end + 2) {
        assert_memory_equal(p, "data: ", 6);
        if (strncmp(p, "data: [DONE]", 12) == 0) {
            s->done = true;
        } else {
            assert_false(s->done);
            see_json(s, p + 6, (size_t)(end - p) - 6);
            s->n_events++;
        }
    }
    assert_true(s->done && *p == '\0');
}

/* Every way to cut the text, streamed and as one body, must be read the same. */
static void read_all_ways(struct ask q, const char *text, struct seen *ret)
{
    for (int whole = 0; whole < 2; whole++) {
        for (size_t step = 1; step <= strlen(text); step = step < 9 ? step + 1 : step * 3) {
            struct rig r;
            struct seen s;
            q.whole = whole;
            rig_open(&r, &q);
            answer_with(&r, text, step, FINISH_STOP);
            see(&s, &r, whole);
            if (whole + step > 1) {
                assert_string_equal(s.content, ret->content);
                assert_string_equal(s.reasoning, ret->reasoning);
                assert_string_equal(s.finish, ret->finish);
                assert_int_equal(s.n_calls, ret->n_calls);
                for (int32_t i = 0; i < s.n_calls; i++) {
                    assert_string_equal(s.call[i].name, ret->call[i].name);
                    assert_string_equal(s.call[i].arguments, ret->call[i].arguments);
                    assert_int_equal(s.call[i].named, 1); /* once and whole */
                }
            }
            *ret = s;
            rig_close(&r);
        }
    }
}

/* ---- tests ---- */

static void test_calls_are_read(void **state)
{
    struct seen s;

    (void)state;
    read_all_ways((struct ask){.format = "hermes"},
                  "Let me see.\n" CALL("f", "{\"x\": \"a\\n\\\"\xc3\xa9\"}") "\n" CALL("g", "{}"),
                  &s);
    assert_int_equal(s.n_calls, 2);
    assert_string_equal(s.call[0].name, "f");
    assert_string_equal(s.call[0].arguments, "{\"x\": \"a\\n\\\"\xc3\xa9\"}");
    assert_string_equal(s.call[1].name, "g");
    assert_string_equal(s.call[1].arguments, "{}");
    assert_string_equal(s.finish, "tool_calls");
    assert_non_null(strstr(s.content, "Let me see."));
    assert_memory_equal(s.call[0].id, "call_", 5);
    assert_int_equal(strlen(s.call[0].id), 29);
    assert_string_not_equal(s.call[0].id, s.call[1].id);
}

static void test_reasoning_is_read(void **state)
{
    struct seen s;

    (void)state;
    read_all_ways((struct ask){.format = "qwen3", .no_tools = true},
                  "<think>\nWell \"so\"\n</think>\n\nYes.", &s);
    assert_non_null(strstr(s.reasoning, "Well \"so\""));
    assert_string_equal(s.content, "Yes.");
    assert_string_equal(s.finish, "stop");
    read_all_ways((struct ask){.format = "qwen3", .reasoning = true}, "Hm.</think>" CALL("f", "{}"),
                  &s);
    assert_string_equal(s.reasoning, "Hm.");
    assert_int_equal(s.n_calls, 1);
    assert_string_equal(s.finish, "tool_calls");
}

static void test_a_long_output_is_read_in_portions(void **state)
{
    struct rig r;
    struct seen s;
    char text[3000];

    (void)state;
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    rig_open(&r, &(struct ask){.format = "hermes", .whole = true});
    answer_with(&r, text, sizeof(text), FINISH_LENGTH);
    see(&s, &r, true);
    assert_string_equal(s.content, text);
    assert_string_equal(s.finish, "length");
    rig_close(&r);
}

static void test_only_one_call_where_one_is_allowed(void **state)
{
    struct seen s;

    (void)state;
    read_all_ways((struct ask){.format = "hermes", .one_call = true},
                  CALL("f", "{\"x\": 1}") CALL("g", "{}"), &s);
    assert_int_equal(s.n_calls, 1);
    assert_string_equal(s.call[0].arguments, "{\"x\": 1}");
    assert_string_equal(s.finish, "tool_calls");
}

static void test_functions_are_answered_in_their_form(void **state)
{
    struct seen s;

    (void)state;
    read_all_ways((struct ask){.format = "hermes", .functions = true, .one_call = true},
                  CALL("f", "{\"x\": 1}"), &s);
    assert_true(s.function);
    assert_string_equal(s.call[0].name, "f");
    assert_string_equal(s.call[0].arguments, "{\"x\": 1}");
    assert_string_equal(s.call[0].id, "");
    assert_string_equal(s.finish, "function_call");
}

static void test_a_call_that_is_cut_short(void **state)
{
    for (int whole = 0; whole < 2; whole++) {
        struct rig r;
        struct seen s;
        rig_open(&r, &(struct ask){.format = "hermes", .whole = whole});
        answer_with(&r, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"ab", 3,
                    FINISH_LENGTH);
        see(&s, &r, whole);
        assert_string_equal(s.finish, "length"); /* not tool_calls: it cannot be used */
        assert_int_equal(s.n_calls, 1);
        rig_close(&r);
    }
    (void)state;
}

static void test_tokens_are_shown(void **state)
{
    for (int whole = 0; whole < 2; whole++) {
        struct rig r;
        struct seen s;
        rig_open(&r, &(struct ask){.format = "hermes",
                                   .whole = whole,
                                   .logprobs = true,
                                   .token_ids = true,
                                   .usage_at_end = true});
        answer_with(&r, CALL("f", "{}"), 4, FINISH_STOP);
        see(&s, &r, whole);
        int pieces = (int)(strlen(CALL("f", "{}")) + 3) / 4 + 1;
        assert_int_equal(s.n_logprobs, pieces);
        assert_int_equal(s.n_ids, pieces);
        assert_true(s.prompt_ids && s.usage);
        rig_close(&r);
    }
    (void)state;
}

static void test_choices_do_not_mix(void **state)
{
    struct rig r;
    const char *first = CALL("f", "{\"x\": 1}"), *second = CALL("g", "{\"y\": 2}");

    (void)state;
    rig_open(&r, &(struct ask){.format = "hermes", .whole = true, .n_choices = 2});
    for (size_t i = 0; first[i]; i++) {
        add(&r, 0, first + i, 1, FINISH_NONE);
        add(&r, 1, second + i, 1, FINISH_NONE);
    }
    add(&r, 1, "", 0, FINISH_STOP);
    add(&r, 0, "", 0, FINISH_LENGTH);
    assert_int_equal(answer_end(r.answer, &r.b, &r.usage), 0);
    cJSON *tree = NULL;
    assert_int_equal(json_parse(&tree, r.b.data, r.b.len, NULL), 0);
    const cJSON *one = at(tree, "choices")->child, *two = one->next;
    const cJSON *f = at(at(at(one, "message"), "tool_calls")->child, "function"),
                *g = at(at(at(two, "message"), "tool_calls")->child, "function");
    assert_string_equal(at(f, "arguments")->valuestring, "{\"x\": 1}");
    assert_string_equal(at(g, "arguments")->valuestring, "{\"y\": 2}");
    assert_string_equal(at(one, "finish_reason")->valuestring, "length");
    assert_string_equal(at(two, "finish_reason")->valuestring, "tool_calls");
    assert_true(cJSON_IsNull(at(at(one, "message"), "content")));
    cJSON_Delete(tree);
    rig_close(&r);
}

static void test_an_error_ends_the_stream(void **state)
{
    struct rig r;

    (void)state;
    rig_open(&r, &(struct ask){.format = "hermes"});
    add(&r, 0, "abc", 3, FINISH_NONE);
    assert_int_equal(answer_error(r.answer, &r.b, 503, "too bad"), 0);
    assert_non_null(strstr(r.b.data, "data: {\"error\":{\"message\":\"too bad\""));
    assert_non_null(strstr(r.b.data, "data: [DONE]\n\n"));
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls_are_read),
        cmocka_unit_test(test_reasoning_is_read),
        cmocka_unit_test(test_a_long_output_is_read_in_portions),
        cmocka_unit_test(test_only_one_call_where_one_is_allowed),
        cmocka_unit_test(test_functions_are_answered_in_their_form),
        cmocka_unit_test(test_a_call_that_is_cut_short),
        cmocka_unit_test(test_tokens_are_shown),
        cmocka_unit_test(test_choices_do_not_mix),
        cmocka_unit_test(test_an_error_ends_the_stream),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
