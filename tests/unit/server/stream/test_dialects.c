/* What the dialects of agents' APIs make of an answer's events. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/api/json_fields.h"
#include "server/stream/agents/dialects.h"

static const struct usage USAGE = {.prompt_tokens = 10, .completion_tokens = 4, .cached_tokens = 6};

/* An answer that is being made. */
struct answer {
    const struct dialect *dialect;
    struct answer_info info;
    void *state;
    struct buf b;
};

static void begin(struct answer *a, const struct dialect *d, bool whole)
{
    *a = (struct answer){.dialect = d};
    a->info = (struct answer_info){.id = d == &messages_dialect ? "msg_1" : "resp_1",
                                   .model = "m\"x",
                                   .fingerprint = "fp",
                                   .created = 5,
                                   .n_choices = 1,
                                   .whole = whole,
                                   .echo = d == &messages_dialect ? "" : "\"store\":false,"};
    a->state = calloc(1, d->state_bytes);
    assert_non_null(a->state);
    buf_init(&a->b, 1 << 20);
    assert_int_equal(d->init(a->state, &a->info, NULL), 0);
    assert_int_equal(d->begin(&a->b, a->state, &USAGE), 0);
}

static void event(struct answer *a, enum answer_kind kind, const char *text)
{
    struct answer_event e = {.kind = kind, .text = text, .len = strlen(text)};

    assert_int_equal(a->dialect->event(&a->b, a->state, 0, &e), 0);
}

static void call(struct answer *a, const char *name, const char *id)
{
    struct answer_event e = {.kind = ANSWER_CALL, .text = "", .name = name, .id = id};

    assert_int_equal(a->dialect->event(&a->b, a->state, 0, &e), 0);
}

static void end(struct answer *a, enum finish_reason finish, const char *stop, bool calls)
{
    assert_int_equal(a->dialect->finish(&a->b, a->state, 0, finish, stop, calls), 0);
    assert_int_equal(a->dialect->end(&a->b, a->state, &USAGE), 0);
}

static void release(struct answer *a)
{
    a->dialect->release(a->state);
    free(a->state);
    buf_release(&a->b);
}

static void expect(struct answer *a, const char *golden)
{
    assert_false(a->b.failed);
    assert_string_equal(a->b.data ? a->b.data : "", golden);
    buf_clear(&a->b);
}

/* ---- messages ---- */

#define MESSAGE_USAGE(out)                                             \
    "\"usage\":{\"input_tokens\":4,\"cache_creation_input_tokens\":0," \
    "\"cache_read_input_tokens\":6,\"output_tokens\":" out "}"
#define EVENT(name, rest) "event: " name "\ndata: {\"type\":\"" name "\"" rest "}\n\n"
#define MESSAGE_START                                                                           \
    EVENT("message_start", ",\"message\":{\"id\":\"msg_1\",\"type\":\"message\",\"role\":"      \
                           "\"assistant\",\"model\":\"m\\\"x\",\"content\":[],\"stop_reason\":" \
                           "null,\"stop_sequence\":null," MESSAGE_USAGE("4") "}")               \
    EVENT("ping", "")
#define MESSAGE_END(why, which)                                                               \
    EVENT("message_delta", ",\"delta\":{\"stop_reason\":\"" why "\",\"stop_sequence\":" which \
                           "}," MESSAGE_USAGE("4"))                                           \
    EVENT("message_stop", "")
#define DELTA(i, type, field, text) \
    EVENT("content_block_delta",    \
          ",\"index\":" i ",\"delta\":{\"type\":\"" type "\",\"" field "\":\"" text "\"}")
#define BLOCK_STOP(i) EVENT("content_block_stop", ",\"index\":" i)
#define TEXT_START(i)            \
    EVENT("content_block_start", \
          ",\"index\":" i ",\"content_block\":{\"type\":\"text\",\"text\":\"\"}")

static void a_streamed_message_is_a_block_between_start_and_stop(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &messages_dialect, false);
    expect(&a, MESSAGE_START);
    event(&a, ANSWER_CONTENT, "He\"llo");
    expect(&a, TEXT_START("0") DELTA("0", "text_delta", "text", "He\\\"llo"));
    event(&a, ANSWER_CONTENT, " you");
    expect(&a, DELTA("0", "text_delta", "text", " you"));
    end(&a, FINISH_STOP, NULL, false);
    expect(&a, BLOCK_STOP("0") MESSAGE_END("end_turn", "null"));
    release(&a);
}

static void thinking_text_and_calls_are_blocks_of_their_own(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &messages_dialect, false);
    buf_clear(&a.b);
    event(&a, ANSWER_REASONING, "hm");
    event(&a, ANSWER_CONTENT, "\n\n");
    call(&a, "look", "toolu_7");
    event(&a, ANSWER_ARGUMENTS, "{\"a\":");
    event(&a, ANSWER_ARGUMENTS, "1}");
    event(&a, ANSWER_CALL_END, "");
    end(&a, FINISH_STOP, NULL, true);
    expect(&a, EVENT("content_block_start",
                     ",\"index\":0,\"content_block\":{\"type\":\"thinking\",\"thinking\":\"\","
                     "\"signature\":\"\"}") DELTA("0", "thinking_delta", "thinking", "hm")
                   DELTA("0", "signature_delta", "signature", "msg_1") BLOCK_STOP("0")
                       EVENT("content_block_start",
                             ",\"index\":1,\"content_block\":{\"type\":\"tool_use\",\"id\":"
                             "\"toolu_7\",\"name\":\"look\",\"input\":{}}")
                           DELTA("1", "input_json_delta", "partial_json", "{\\\"a\\\":")
                               DELTA("1", "input_json_delta", "partial_json", "1}") BLOCK_STOP("1")
                                   MESSAGE_END("tool_use", "null"));
    release(&a);
}

static void a_whole_message_has_the_same_blocks(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &messages_dialect, true);
    expect(&a, "");
    event(&a, ANSWER_REASONING, "hm");
    event(&a, ANSWER_CONTENT, "Look:");
    call(&a, "look", "toolu_7");
    event(&a, ANSWER_ARGUMENTS, " {\"a\":1}");
    event(&a, ANSWER_CALL_END, "");
    call(&a, "cut", "toolu_8");
    event(&a, ANSWER_ARGUMENTS, "{\"a\":");
    end(&a, FINISH_LENGTH, NULL, true);
    expect(&a, "{\"id\":\"msg_1\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"m\\\"x\","
               "\"content\":[{\"type\":\"thinking\",\"thinking\":\"hm\",\"signature\":\"msg_1\"},"
               "{\"type\":\"text\",\"text\":\"Look:\"},"
               "{\"type\":\"tool_use\",\"id\":\"toolu_7\",\"name\":\"look\",\"input\": {\"a\":1}},"
               "{\"type\":\"tool_use\",\"id\":\"toolu_8\",\"name\":\"cut\",\"input\":{}}],"
               "\"stop_reason\":\"max_tokens\",\"stop_sequence\":null," MESSAGE_USAGE("4") "}");
    release(&a);
}

static void a_stop_sequence_is_named(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &messages_dialect, true);
    event(&a, ANSWER_CONTENT, "x");
    end(&a, FINISH_STOP, "E\"ND", false);
    assert_non_null(
        strstr(a.b.data, "\"stop_reason\":\"stop_sequence\",\"stop_sequence\":\"E\\\"ND\""));
    release(&a);
}

static void errors_of_messages_have_anthropics_form(void **state)
{
    static const struct {
        int status;
        const char *type;
    } known[] = {{400, "invalid_request_error"}, {401, "authentication_error"},
                 {403, "permission_error"},      {404, "not_found_error"},
                 {413, "request_too_large"},     {415, "invalid_request_error"},
                 {429, "rate_limit_error"},      {500, "api_error"},
                 {503, "overloaded_error"},      {504, "timeout_error"}};
    struct answer a;
    char want[200];

    (void)state;
    begin(&a, &messages_dialect, false);
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        buf_clear(&a.b);
        messages_dialect.error_body(&a.b, known[i].status, "x", "no \"x\"");
        snprintf(want, sizeof(want),
                 "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":\"no \\\"x\\\"\"}}",
                 known[i].type);
        expect(&a, want);
    }
    assert_int_equal(messages_dialect.error(&a.b, a.state, 503, "no"), 0);
    expect(&a, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\","
               "\"message\":\"no\"}}\n\n");
    release(&a);
}

/* ---- responses ---- */

#define RESPONSE(status, details, output, usage)                                         \
    "{\"id\":\"resp_1\",\"object\":\"response\",\"created_at\":5,\"completed_at\":null," \
    "\"status\":\"" status "\",\"error\":null,\"incomplete_details\":" details           \
    ",\"model\":\"m\\\"x\",\"output\":[" output "],\"store\":false,\"usage\":" usage "}"
#define RESPONSE_USAGE                                                                             \
    "{\"input_tokens\":10,\"input_tokens_details\":{\"cached_tokens\":6,\"cache_write_tokens\":0}" \
    ","                                                                                            \
    "\"output_tokens\":4,\"output_tokens_details\":{\"reasoning_tokens\":0},"                      \
    "\"total_tokens\":14}"
#define NUMBERED(name, n, rest) EVENT(name, ",\"sequence_number\":" n rest)
#define CREATED                                                            \
    NUMBERED("response.created", "0",                                      \
             ",\"response\":" RESPONSE("in_progress", "null", "", "null")) \
    NUMBERED("response.in_progress", "1",                                  \
             ",\"response\":" RESPONSE("in_progress", "null", "", "null"))
#define PART(text) \
    "{\"type\":\"output_text\",\"text\":\"" text "\",\"annotations\":[],\"logprobs\":[]}"
#define MESSAGE(status, content)                                    \
    "{\"id\":\"msg_1_0\",\"type\":\"message\",\"status\":\"" status \
    "\",\"role\":\"assistant\",\"content\":[" content "]}"
#define ABOUT(i, id) ",\"item_id\":\"" id "\",\"output_index\":" i
#define CONTENT ",\"content_index\":0"

static void a_streamed_response_numbers_its_events(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &responses_dialect, false);
    expect(&a, CREATED);
    event(&a, ANSWER_CONTENT, "Hi\n");
    expect(&a,
           NUMBERED("response.output_item.added", "2",
                    ",\"output_index\":0,\"item\":" MESSAGE("in_progress", ""))
               NUMBERED("response.content_part.added", "3",
                        ABOUT("0", "msg_1_0") CONTENT ",\"part\":" PART(""))
                   NUMBERED("response.output_text.delta", "4",
                            ABOUT("0", "msg_1_0") CONTENT ",\"delta\":\"Hi\\n\",\"logprobs\":[]"));
    end(&a, FINISH_STOP, NULL, false);
    expect(&a, NUMBERED("response.output_text.done", "5",
                        ABOUT("0", "msg_1_0") CONTENT ",\"text\":\"Hi\\n\",\"logprobs\":[]")
                   NUMBERED("response.content_part.done", "6",
                            ABOUT("0", "msg_1_0") CONTENT ",\"part\":" PART("Hi\\n"))
                       NUMBERED("response.output_item.done", "7",
                                ",\"output_index\":0,\"item\":" MESSAGE("completed", PART("Hi\\n")))
                           NUMBERED("response.completed", "8",
                                    ",\"response\":" RESPONSE("completed", "null",
                                                              MESSAGE("completed", PART("Hi\\n")),
                                                              RESPONSE_USAGE)) "data: [DONE]\n\n");
    release(&a);
}

#define REASONING(status, content)                                                        \
    "{\"id\":\"rs_1_0\",\"type\":\"reasoning\",\"status\":\"" status "\",\"summary\":[]," \
    "\"content\":[" content "]}"
#define CALLED(status, arguments)                                        \
    "{\"id\":\"fc_1_1\",\"type\":\"function_call\",\"status\":\"" status \
    "\",\"call_id\":\"call_7\",\"name\":\"look\",\"arguments\":\"" arguments "\"}"
#define THOUGHT "{\"type\":\"reasoning_text\",\"text\":\"hm\"}"

static void reasoning_and_calls_are_items(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &responses_dialect, false);
    buf_clear(&a.b);
    event(&a, ANSWER_REASONING, "hm");
    expect(&a, NUMBERED("response.output_item.added", "2",
                        ",\"output_index\":0,\"item\":" REASONING("in_progress", ""))
                   NUMBERED("response.content_part.added", "3",
                            ABOUT("0", "rs_1_0") CONTENT
                            ",\"part\":{\"type\":\"reasoning_text\",\"text\":\"\"}")
                       NUMBERED("response.reasoning_text.delta", "4",
                                ABOUT("0", "rs_1_0") CONTENT ",\"delta\":\"hm\""));
    event(&a, ANSWER_CONTENT, "\n\n"); /* no item: white space before a call */
    expect(&a, "");
    call(&a, "look", "call_7");
    expect(&a, NUMBERED("response.reasoning_text.done", "5",
                        ABOUT("0", "rs_1_0") CONTENT ",\"text\":\"hm\"")
                   NUMBERED("response.content_part.done", "6",
                            ABOUT("0", "rs_1_0") CONTENT ",\"part\":" THOUGHT)
                       NUMBERED("response.output_item.done", "7",
                                ",\"output_index\":0,\"item\":" REASONING("completed", THOUGHT))
                           NUMBERED("response.output_item.added", "8",
                                    ",\"output_index\":1,\"item\":" CALLED("in_progress", "")));
    event(&a, ANSWER_ARGUMENTS, "{\"a\":1}");
    event(&a, ANSWER_CALL_END, "");
    expect(&a,
           NUMBERED("response.function_call_arguments.delta", "9",
                    ABOUT("1", "fc_1_1") ",\"delta\":\"{\\\"a\\\":1}\"")
               NUMBERED("response.function_call_arguments.done", "10",
                        ABOUT("1", "fc_1_1") ",\"call_id\":\"call_7\",\"name\":\"look\","
                                             "\"arguments\":\"{\\\"a\\\":1}\"")
                   NUMBERED("response.output_item.done", "11",
                            ",\"output_index\":1,\"item\":" CALLED("completed", "{\\\"a\\\":1}")));
    end(&a, FINISH_STOP, NULL, true);
    expect(&a, NUMBERED("response.completed", "12",
                        ",\"response\":" RESPONSE("completed", "null",
                                                  REASONING("completed", THOUGHT) "," CALLED(
                                                      "completed", "{\\\"a\\\":1}"),
                                                  RESPONSE_USAGE)) "data: [DONE]\n\n");
    release(&a);
}

static void a_whole_response_that_was_cut_is_incomplete(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &responses_dialect, true);
    expect(&a, "");
    event(&a, ANSWER_CONTENT, " \n");
    event(&a, ANSWER_CONTENT, "Hi");
    end(&a, FINISH_LENGTH, NULL, false);
    expect(&a, RESPONSE("incomplete", "{\"reason\":\"max_output_tokens\"}",
                        MESSAGE("incomplete", PART(" \\nHi")), RESPONSE_USAGE));
    release(&a);
}

static void an_answer_without_text_is_one_empty_message(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &responses_dialect, true);
    end(&a, FINISH_STOP, NULL, false);
    expect(&a, RESPONSE("completed", "null", MESSAGE("completed", PART("")), RESPONSE_USAGE));
    release(&a);
}

static void an_error_ends_a_response_as_failed(void **state)
{
    struct answer a;

    (void)state;
    begin(&a, &responses_dialect, false);
    buf_clear(&a.b);
    assert_int_equal(responses_dialect.error(&a.b, a.state, 500, "lost \"it\""), 0);
    assert_non_null(strstr(a.b.data,
                           "event: error\ndata: {\"type\":\"error\",\"sequence_number\":2,"
                           "\"code\":\"server_error\",\"message\":\"lost \\\"it\\\"\","
                           "\"param\":null}\n\n"));
    assert_non_null(strstr(a.b.data, "\"status\":\"failed\",\"error\":{\"code\":\"server_error\","
                                     "\"message\":\"lost \\\"it\\\"\"}"));
    release(&a);
}

static void a_response_says_why_no_token_was_allowed(void **state)
{
    static const char why[] = "no next token is allowed";
    const struct output o = {.finish = FINISH_IMPOSSIBLE, .error = why};
    struct answer a;

    (void)state;
    begin(&a, &responses_dialect, true);
    assert_int_equal(responses_dialect.tokens(&a.b, a.state, 0, &o, 0, 0), 0);
    end(&a, FINISH_IMPOSSIBLE, NULL, false);
    assert_non_null(strstr(a.b.data, "\"status\":\"failed\",\"error\":{\"code\":\"invalid_prompt\","
                                     "\"message\":\"no next token is allowed\"}"));
    release(&a);
}

/* ---- both ---- */

static void splitting_the_text_changes_no_item(void **state)
{
    static const char text[] = "\n  The dog \xc3\xa9 ran.";
    const struct dialect *both[] = {&responses_dialect, &messages_dialect};

    (void)state;
    for (size_t d = 0; d < ARRAY_LEN(both); d++) {
        struct answer one, many;
        begin(&one, both[d], true);
        event(&one, ANSWER_CONTENT, text);
        end(&one, FINISH_STOP, NULL, false);
        begin(&many, both[d], true);
        for (size_t i = 0, n; text[i]; i += n) {
            n = text[i] == '\xc3' ? 2 : 1; /* pieces are whole characters */
            struct answer_event e = {.kind = ANSWER_CONTENT, .text = text + i, .len = n};
            assert_int_equal(both[d]->event(&many.b, many.state, 0, &e), 0);
        }
        end(&many, FINISH_STOP, NULL, false);
        assert_string_equal(one.b.data, many.b.data);
        assert_int_equal(json_check(one.b.data, one.b.len, NULL), 0);
        assert_true(both[d]->held(one.state) > 0);
        release(&one);
        release(&many);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_streamed_message_is_a_block_between_start_and_stop),
        cmocka_unit_test(thinking_text_and_calls_are_blocks_of_their_own),
        cmocka_unit_test(a_whole_message_has_the_same_blocks),
        cmocka_unit_test(a_stop_sequence_is_named),
        cmocka_unit_test(errors_of_messages_have_anthropics_form),
        cmocka_unit_test(a_streamed_response_numbers_its_events),
        cmocka_unit_test(reasoning_and_calls_are_items),
        cmocka_unit_test(a_whole_response_that_was_cut_is_incomplete),
        cmocka_unit_test(an_answer_without_text_is_one_empty_message),
        cmocka_unit_test(an_error_ends_a_response_as_failed),
        cmocka_unit_test(a_response_says_why_no_token_was_allowed),
        cmocka_unit_test(splitting_the_text_changes_no_item),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
