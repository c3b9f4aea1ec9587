/* Tools, histories with calls, and fields that constrain the answer: what of a body
 * reaches the chat template and the grammar engine, and what is refused. The template
 * here writes its variables as they came. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "config/base/limits.h"
#include "server/api/json_fields.h"
#include "tests/unit/api_context.h"

/* What the fakes below were asked last. */
static struct {
    char context[8192]; /* the template's variables */
    char text[8192];    /* the grammar */
    char answer[512];   /* the schema of the text beside calls; "": none */
    enum grammar_kind kind;
    int32_t n_tools;
    int n_compiled, n_failing, n_encoded;
    int32_t n_bytes; /* that render_bytes writes */
    int64_t work;    /* that compiling a grammar takes */
} asked;

static int render(void *arg, const char *context, size_t len, struct buf *out, struct err *e)
{
    (void)arg, (void)e;
    snprintf(asked.context, sizeof(asked.context), "%.*s", (int)len, context);
    return buf_puts(out, "prompt");
}

static int format_grammar(void *arg, const struct chat_tools *t, const char *answer, bool reasoning,
                          struct buf *out, bool *ret_needed, struct err *e)
{
    (void)arg, (void)reasoning, (void)e;
    asked.n_tools = t ? t->n : 0;
    snprintf(asked.answer, sizeof(asked.answer), "%s", answer ? answer : "");
    *ret_needed = answer || (t && (t->choice != TOOL_AUTO || t->tool[0].strict));
    for (int32_t i = 0; t && i < t->n; i++) {
        buf_puts(out, t->tool[i].parameters ? t->tool[i].parameters : "{}");
    }
    return 0;
}

/* A grammar with the word "impossible" cannot be enforced. */
static int compile(void *arg, enum grammar_kind kind, const char *text, size_t len, int64_t *work,
                   struct grammar **ret, struct err *e)
{
    (void)arg, (void)ret;
    *work -= asked.work;
    asked.kind = kind;
    asked.n_compiled++;
    snprintf(asked.text, sizeof(asked.text), "%.*s", (int)len, text);
    if (strstr(asked.text, "impossible")) {
        asked.n_failing++;
        return err_set(e, ERR_UNSUPPORTED, "cannot enforce 'impossible'");
    }
    return 0;
}

static struct api_context context_with_tools(void)
{
    struct api_context ctx = test_context;

    memset(&asked, 0, sizeof(asked));
    ctx.chat = (struct engine_chat){.knows_tools = true,
                                    .knows_calls = true,
                                    .object_arguments = true,
                                    .null_content = true,
                                    .calls = true};
    ctx.render_chat = render;
    ctx.chat_grammar = format_grammar;
    ctx.grammar_new = compile;
    return ctx;
}

#define USER "{\"role\":\"user\",\"content\":\"hi\"}"
#define BODY(fields) "{\"messages\":[" USER "]," fields "}"
#define TOOL(name, more) "{\"type\":\"function\",\"function\":{\"name\":\"" name "\"" more "}}"
#define CALL(id, name, arguments)                                             \
    "{\"id\":\"" id "\",\"type\":\"function\",\"function\":{\"name\":\"" name \
    "\",\"arguments\":\"" arguments "\"}}"
#define HISTORY(messages) "{\"messages\":[" USER "," messages "]}"
#define CALLED(calls) "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[" calls "]}"

static int parse_with(const struct api_context *ctx, struct completion *c, const char *body,
                      struct err *e)
{
    *e = (struct err){0};
    return chat_parse(c, body, strlen(body), ctx, e);
}

/* The body is accepted; `context` and `text` are parts of what the template and the
 * grammar engine get. */
static void accept(const char *body, const char *context, const char *text)
{
    struct api_context ctx = context_with_tools();
    struct completion c;
    struct err e;

    if (parse_with(&ctx, &c, body, &e)) {
        fail_msg("refused: %s: %s", body, e.text);
    }
    if (!strstr(asked.context, context)) {
        fail_msg("%s: not in %s", context, asked.context);
    }
    if (!strstr(asked.text, text)) {
        fail_msg("%s: not in %s", text, asked.text);
    }
    completion_release(&c);
}

static void refuse(const struct api_context *ctx, const char *body, const char *param,
                   const char *text)
{
    struct completion c;
    struct err e;
    int rc = parse_with(ctx, &c, body, &e);

    if (rc == 0) {
        fail_msg("accepted: %s", body);
    }
    if ((rc != ERR_INVALID && rc != ERR_UNSUPPORTED) || strcmp(e.param, param) != 0 ||
        !strstr(e.text, text)) {
        fail_msg("%s: code %d, param '%s', text '%s'", body, rc, e.param, e.text);
    }
}

/* ---- tools ---- */

static void test_tools_reach_the_template_as_they_came(void **state)
{
    (void)state;
    accept(
        BODY("\"tools\":[" TOOL("b", ",\"parameters\":{\"z\":1,\"a\":1.50}") "," TOOL("a", "") "]"),
        "\"tools\":[" TOOL("b", ",\"parameters\":{\"z\":1,\"a\":1.50}") "," TOOL("a", "") "]", "");
    accept(BODY("\"functions\":[{\"name\":\"f\"}]"), "\"tools\":[" TOOL("f", "") "]", "");
    accept(BODY("\"tools\":[" TOOL("f", "") "],\"tool_choice\":\"none\""), "\"tools\":[", "");
    accept(BODY("\"tools\":[],\"tool_choice\":\"none\""), "\"add_generation_prompt\":true}", "");
}

static void test_tools_are_read(void **state)
{
    static const struct {
        const char *fields;
        enum tool_choice choice;
        bool parallel, strict, parsed;
    } cases[] = {
        {"", TOOL_AUTO, true, false, true},
        {",\"tool_choice\":\"auto\",\"parallel_tool_calls\":false", TOOL_AUTO, false, false, true},
        {",\"tool_choice\":\"required\"", TOOL_REQUIRED, true, false, true},
        {",\"tool_choice\":\"none\"", TOOL_NONE, true, false, false},
        {",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}", TOOL_NAMED, true,
         false, true},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct api_context ctx = context_with_tools();
        struct completion c;
        struct err e;
        char body[512];
        snprintf(body, sizeof(body),
                 BODY("\"tools\":[" TOOL("f", "") "," TOOL("g", ",\"strict\":true") "]%s"),
                 cases[i].fields);
        if (parse_with(&ctx, &c, body, &e)) {
            fail_msg("%s: %s", body, e.text);
        }
        assert_int_equal(c.tools.n, 2);
        assert_int_equal(c.tools.choice, cases[i].choice);
        assert_int_equal(c.tools.parallel, cases[i].parallel);
        assert_true(c.tools.tool[1].strict && !c.tools.tool[0].strict);
        assert_true(c.tools.choice != TOOL_NAMED || c.tools.named == 1);
        assert_int_equal(c.parsed, cases[i].parsed);
        /* the format's marks must arrive at the parser */
        assert_int_equal(c.params.skip_special, !cases[i].parsed);
        completion_release(&c);
    }
}

static void test_wrong_tools_are_refused(void **state)
{
    struct api_context ctx = context_with_tools();

    (void)state;
    refuse(&ctx, BODY("\"tools\":{}"), "tools", "must be a list");
    refuse(&ctx, BODY("\"tools\":[1]"), "tools", "tools[0] must be an object");
    refuse(&ctx, BODY("\"tools\":[{\"type\":\"web_search\"}]"), "tools", "'web_search'");
    refuse(&ctx, BODY("\"tools\":[{\"type\":\"function\"}]"), "tools", "tools[0].function must");
    refuse(&ctx, BODY("\"tools\":[" TOOL("a b", "") "]"), "tools", "1 to 128 letters");
    refuse(&ctx, BODY("\"tools\":[" TOOL("", "") "]"), "tools", "1 to 128 letters");
    refuse(&ctx, BODY("\"tools\":[" TOOL("f", ",\"parameters\":[]") "]"), "tools", "JSON Schema");
    refuse(&ctx, BODY("\"tools\":[" TOOL("f", ",\"strict\":1") "]"), "tools", "true or false");
    refuse(&ctx, BODY("\"tools\":[" TOOL("f", "") "," TOOL("f", "") "]"), "tools",
           "tools[1] has the name 'f' of another one");
    refuse(&ctx, BODY("\"tools\":[" TOOL("f", "") "],\"functions\":[{\"name\":\"f\"}]"),
           "functions", "give one of them");
    refuse(&ctx, BODY("\"tool_choice\":\"required\""), "tool_choice", "no tools");
    refuse(&ctx, BODY("\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}"),
           "tool_choice", "no tools");
    refuse(&ctx,
           BODY("\"tools\":[" TOOL("f", "") "],\"tool_choice\":{\"type\":\"function\","
                                            "\"function\":{\"name\":\"g\"}}"),
           "tool_choice", "no tool has that name");
    refuse(&ctx, BODY("\"tools\":[" TOOL("f", "") "],\"tool_choice\":\"any\""), "tool_choice",
           "or name a function");
    refuse(&ctx, BODY("\"tool_choice\":1"), "tool_choice", "must be a string");
    refuse(&ctx, BODY("\"functions\":[{\"name\":\"f\"}],\"function_call\":{\"name\":\"g\"}"),
           "function_call", "no tool has that name");
}

static void test_a_model_without_tools_says_so(void **state)
{
    struct api_context ctx = context_with_tools();

    (void)state;
    ctx.chat.calls = false;
    refuse(&ctx, BODY("\"tools\":[" TOOL("f", "") "]"), "tools", "format");
    ctx.chat.knows_tools = false;
    refuse(&ctx, BODY("\"tools\":[" TOOL("f", "") "]"), "tools", "no place for tools");
    ctx.chat.knows_calls = false;
    refuse(&ctx, HISTORY(CALLED(CALL("a", "f", "{}"))), "messages", "no place");
}

/* ---- histories ---- */

static void test_calls_reach_the_template(void **state)
{
    (void)state;
    accept(HISTORY(CALLED(
               CALL("a", "f", "{\\\"x\\\": [1.50]}")) ",{\"role\":\"tool\","
                                                      "\"tool_call_id\":\"a\",\"content\":\"ok\"}"),
           "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"a\",\"type\":"
           "\"function\",\"function\":{\"name\":\"f\",\"arguments\":{\"x\":[1.50]}}}]},"
           "{\"role\":\"tool\",\"content\":\"ok\",\"tool_call_id\":\"a\",\"name\":\"f\"}",
           "");
    /* parallel calls, answered in another order; no arguments */
    accept(HISTORY(CALLED(CALL("a", "f", "") "," CALL(
               "b", "g",
               "{}")) ","
                      "{\"role\":\"tool\",\"tool_call_id\":\"b\",\"content\":\"2\"},"
                      "{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":[{\"type\":\"text\","
                      "\"text\":\"1\"}]}"),
           "{\"role\":\"tool\",\"content\":\"1\",\"tool_call_id\":\"a\",\"name\":\"f\"}", "");
    /* the older form has no ids */
    accept(
        HISTORY("{\"role\":\"assistant\",\"content\":null,\"function_call\":{\"name\":\"f\","
                "\"arguments\":\"{}\"}},{\"role\":\"function\",\"name\":\"f\",\"content\":\"3\"}"),
        "\"tool_calls\":[{\"id\":\"call00000\",\"type\":\"function\",\"function\":{\"name\":\"f\","
        "\"arguments\":{}}}]},{\"role\":\"tool\",\"content\":\"3\",\"tool_call_id\":"
        "\"call00000\",\"name\":\"f\"}",
        "");
}

static void test_templates_get_what_they_take(void **state)
{
    struct api_context ctx = context_with_tools();
    const char *body = HISTORY(CALLED(CALL("a", "f", "{\\\"x\\\": 1}")));
    struct completion c;
    struct err e;

    (void)state;
    ctx.chat.object_arguments = false;
    ctx.chat.null_content = false;
    assert_int_equal(parse_with(&ctx, &c, body, &e), 0);
    assert_non_null(strstr(asked.context, "\"arguments\":\"{\\\"x\\\": 1}\""));
    assert_non_null(strstr(asked.context, "\"content\":\"\""));
    completion_release(&c);
}

/* Calls that were cut, or that a model wrote wrongly, stay in the conversation. */
static void test_arguments_that_are_no_object_reach_the_template_as_text(void **state)
{
    struct api_context ctx = context_with_tools();
    struct completion c;
    struct err e;

    (void)state;
    accept(HISTORY(CALLED(CALL("a", "f", "{\\\"x\\\": \\\"y"))),
           "\"arguments\":{\"arguments\":\"{\\\"x\\\": \\\"y\"}", "");
    accept(HISTORY(CALLED(CALL("a", "f", "[1]"))), "\"arguments\":{\"arguments\":\"[1]\"}", "");
    ctx.chat.object_arguments = false;
    assert_int_equal(parse_with(&ctx, &c, HISTORY(CALLED(CALL("a", "f", "{x"))), &e), 0);
    assert_non_null(strstr(asked.context, "\"arguments\":\"{x\""));
    completion_release(&c);
}

/* Models write numbers that templates cannot hold; see template_numbers_round. */
static void test_numbers_of_calls_are_rounded(void **state)
{
    static const char *const cases[][2] = {
        {"12345678901234567890123", "1.2345678901234568e+22"},
        {"9223372036854775807", "9223372036854775807"},
        {"9223372036854775808", "9.2233720368547758e+18"},
        {"[-1e999]", "[-1.7976931348623157e+308]"},
        {"0.3333333333333333333333333333333333333333333333333333333333333", "0.33333333333333331"},
    };
    struct api_context ctx = context_with_tools();
    char body[600], want[200];

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct completion c;
        struct err e;
        snprintf(body, sizeof(body), HISTORY(CALLED(CALL("a", "f", "{\\\"x\\\": %s}"))),
                 cases[i][0]);
        snprintf(want, sizeof(want), "\"arguments\":{\"x\":%s}", cases[i][1]);
        assert_int_equal(parse_with(&ctx, &c, body, &e), 0);
        assert_non_null(strstr(asked.context, want));
        completion_release(&c);
    }
}

/* `levels` objects in each other, the innermost one empty. */
static void print_nested(char *ret, int levels, bool escaped)
{
    *ret = '\0';
    for (int i = 1; i < levels; i++) {
        strcat(ret, escaped ? "{\\\"a\\\":" : "{\"a\":");
    }
    strcat(ret, "{}");
    for (int i = 1; i < levels; i++) {
        strcat(ret, "}");
    }
}

/* The template's variables may nest 64 deep in all. */
static void test_what_nests_too_deep_for_a_template_is_named(void **state)
{
    static const struct {
        const char *before, *after;
        int most; /* levels that are accepted */
        const char *param, *message;
    } cases[] = {
        {"\"tools\":[" TOOL(
             "a", "") ",{\"type\":\"function\",\"function\":{\"name\":\"b\",\"parameters\":",
         "}}]", 60, "tools", "tools[1].function.parameters nests deeper than 60 levels"},
        {"\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"b\"},\"x\":", "}]", 61,
         "tools", "tools[0] nests deeper than 62 levels"},
        {"\"functions\":[{\"name\":\"b\",\"parameters\":", "}]", 60, "functions",
         "functions[0].parameters nests deeper than 60 levels"},
        {"\"chat_template_kwargs\":{\"x\":", "}", 63, "chat_template_kwargs",
         "chat_template_kwargs nests deeper than 64 levels"},
    };
    struct api_context ctx = context_with_tools();
    char nested[1000], body[1400];

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct completion c;
        struct err e;
        print_nested(nested, cases[i].most, false);
        snprintf(body, sizeof(body), BODY("%s%s%s"), cases[i].before, nested, cases[i].after);
        assert_int_equal(parse_with(&ctx, &c, body, &e), 0);
        completion_release(&c);
        print_nested(nested, cases[i].most + 1, false);
        snprintf(body, sizeof(body), BODY("%s%s%s"), cases[i].before, nested, cases[i].after);
        assert_int_equal(parse_with(&ctx, &c, body, &e), ERR_INVALID);
        assert_string_equal(e.param, cases[i].param);
        assert_string_equal(e.text, cases[i].message);
        completion_release(&c);
    }
}

/* A model has written them: the conversation must be able to go on. */
static void test_arguments_that_nest_too_deep_are_text(void **state)
{
    static const int MOST = 58;
    struct api_context ctx = context_with_tools();
    char nested[1000], body[1400];

    (void)state;
    for (int levels = MOST; levels <= MOST + 1; levels++) {
        struct completion c;
        struct err e;
        print_nested(nested, levels, true);
        snprintf(body, sizeof(body), HISTORY(CALLED(CALL("a", "f", "%s"))), nested);
        assert_int_equal(parse_with(&ctx, &c, body, &e), 0);
        assert_true(!strstr(asked.context, "\"arguments\":{\"arguments\":") == (levels == MOST));
        completion_release(&c);
    }
}

static void test_reasoning_is_accepted_under_both_names(void **state)
{
    static const char want[] = "\"reasoning_content\":\"hm\",\"reasoning\":\"hm\"";

    (void)state;
    accept(HISTORY("{\"role\":\"assistant\",\"content\":\"a\",\"reasoning\":\"hm\"}"), want, "");
    accept(HISTORY("{\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"hm\"}"), want,
           "");
}

static void test_wrong_histories_are_refused(void **state)
{
    struct api_context ctx = context_with_tools();

    (void)state;
    refuse(&ctx, HISTORY("{\"role\":\"tool\",\"content\":\"x\"}"), "messages",
           "needs a tool_call_id");
    refuse(&ctx, HISTORY("{\"role\":\"tool\",\"content\":\"x\",\"tool_call_id\":\"a\"}"),
           "messages", "no assistant message before it has this call");
    refuse(&ctx,
           HISTORY(CALLED(CALL("a", "f", "{}")) ",{\"role\":\"tool\",\"tool_call_id\":\"a\","
                                                "\"content\":\"1\"},{\"role\":\"tool\",\"tool_call_"
                                                "id\":\"a\",\"content\":\"1\"}"),
           "messages", "messages[3] answers the call 'a'");
    refuse(&ctx, HISTORY(CALLED(CALL("a", "f", "{}") "," CALL("a", "f", "{}"))), "messages",
           "two calls of the id 'a'");
    refuse(&ctx, HISTORY(CALLED(CALL("", "f", "{}"))), "messages", "without an id");
    refuse(&ctx, HISTORY(CALLED(CALL("a", "", "{}"))), "messages", "names no function");
    refuse(&ctx, HISTORY("{\"role\":\"assistant\",\"content\":null}"), "messages", ".content must");
    refuse(&ctx, HISTORY("{\"role\":\"user\",\"content\":\"x\",\"tool_calls\":[1]}"), "messages",
           "belongs to an assistant message");
    refuse(&ctx, HISTORY("{\"role\":\"function\",\"content\":\"x\",\"name\":\"f\"}"), "messages",
           "answers the call 'f'");
    refuse(&ctx, HISTORY("{\"role\":\"assistant\",\"content\":\"\",\"reasoning\":1}"), "messages",
           ".reasoning must");
}

/* ---- variables of the template ---- */

static void test_fields_become_variables(void **state)
{
    (void)state;
    accept(BODY("\"reasoning_effort\":\"low\",\"verbosity\":\"high\""),
           ",\"reasoning_effort\":\"low\",\"verbosity\":\"high\"}", "");
    accept(BODY("\"reasoning_effort\":\"none\""),
           ",\"reasoning_effort\":\"none\",\"enable_thinking\":false}", "");
    accept(BODY("\"reasoning_effort\":\"low\",\"chat_template_kwargs\":{\"reasoning_effort\":1}"),
           "\"add_generation_prompt\":true,\"reasoning_effort\":1}", "");
}

static void test_fields_without_effect_are_checked(void **state)
{
    struct api_context ctx = context_with_tools();

    (void)state;
    accept(
        BODY("\"prompt_cache_key\":\"k\",\"safety_identifier\":\"s\",\"store\":true,\"metadata\":"
             "{\"a\":\"b\"},\"service_tier\":\"auto\",\"prediction\":{\"type\":\"content\","
             "\"content\":\"x\"},\"modalities\":[\"text\"],\"prompt_cache_retention\":\"24h\","
             "\"prompt_cache_options\":{\"mode\":\"implicit\",\"ttl\":\"30m\"},"
             "\"moderation\":null"),
        "", "");
    refuse(&ctx, BODY("\"reasoning_effort\":\"much\""), "reasoning_effort", "\"high\"");
    refuse(&ctx, BODY("\"service_tier\":\"fast\""), "service_tier", "\"flex\"");
    refuse(&ctx, BODY("\"verbosity\":2"), "verbosity", "must be a string");
    refuse(&ctx, BODY("\"modalities\":[\"text\",\"audio\"]"), "modalities", "only \"text\"");
    refuse(&ctx, BODY("\"metadata\":[]"), "metadata", "an object");
    refuse(&ctx, BODY("\"audio\":{}"), "audio", "not supported");
    refuse(&ctx, BODY("\"web_search_options\":{}"), "web_search_options", "web search");
    refuse(&ctx, BODY("\"moderation\":{\"model\":\"m\"}"), "moderation", "not supported");
    refuse(&ctx, BODY("\"prompt_cache_options\":\"24h\""), "prompt_cache_options", "an object");
}

/* ---- constrained output ---- */

static void test_each_field_gives_its_grammar(void **state)
{
    static const struct {
        const char *fields, *text;
        enum grammar_kind kind;
    } cases[] = {
        {"\"response_format\":{\"type\":\"json_object\"}", "", GRAMMAR_JSON_OBJECT},
        {"\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"n\",\"strict\":"
         "true,\"schema\":{\"type\":\"integer\",\"minimum\":1.0}}}",
         "{\"type\":\"integer\",\"minimum\":1.0}", GRAMMAR_JSON_SCHEMA},
        {"\"structured_outputs\":{\"json\":{\"const\":1}}", "{\"const\":1}", GRAMMAR_JSON_SCHEMA},
        {"\"structured_outputs\":{\"json\":\"{\\\"const\\\": 1}\"}", "{\"const\": 1}",
         GRAMMAR_JSON_SCHEMA},
        {"\"structured_outputs\":{\"regex\":\"a+\",\"json\":null}", "a+", GRAMMAR_REGEX},
        {"\"structured_outputs\":{\"choice\":[\"a\",\"b\"]}", "[\"a\",\"b\"]", GRAMMAR_CHOICE},
        {"\"structured_outputs\":{\"grammar\":\"start: \\\"x\\\"\"}", "start: \"x\"", GRAMMAR_LARK},
        {"\"structured_outputs\":{\"json_object\":true}", "", GRAMMAR_JSON_OBJECT},
        {"\"guided_json\":{\"const\":2}", "{\"const\":2}", GRAMMAR_JSON_SCHEMA},
        {"\"guided_regex\":\"b+\"", "b+", GRAMMAR_REGEX},
        {"\"guided_choice\":[\"c\"]", "[\"c\"]", GRAMMAR_CHOICE},
        {"\"guided_grammar\":\"start: \\\"y\\\"\"", "start: \"y\"", GRAMMAR_LARK},
        {"\"structured_outputs\":{\"structural_tag\":{\"structures\":[{\"begin\":\"<f=a>\","
         "\"schema\":{\"const\":3},\"end\":\"</f>\"}],\"triggers\":[\"<f=\"]}}",
         "start: until(\"<f=\") (tag until(\"<f=\"))*\ntag: tag_0\n"
         "tag_0: marker(\"<f=\") \"a>\" %json {\"const\":3} \"</f>\"\n",
         GRAMMAR_LARK},
        {"\"response_format\":{\"type\":\"structural_tag\",\"format\":{\"type\":\"triggered_tags\","
         "\"triggers\":[\"<t>\"],\"tags\":[{\"begin\":\"<t>\",\"content\":{\"type\":\"json_"
         "schema\","
         "\"json_schema\":{\"const\":4}},\"end\":\"\"}]}}",
         "tag_0: marker(\"<t>\") %json {\"const\":4}\n", GRAMMAR_LARK},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char body[1024];
        snprintf(body, sizeof(body), BODY("%s"), cases[i].fields);
        accept(body, "", cases[i].text);
        assert_int_equal(asked.n_compiled, 1);
        assert_int_equal(asked.kind, cases[i].kind);
        struct api_context ctx = context_with_tools();
        struct completion c;
        struct err e = {0};
        snprintf(body, sizeof(body), "{\"prompt\":\"p\",%s}", cases[i].fields);
        assert_int_equal(completion_parse(&c, body, strlen(body), &ctx, &e), 0);
        assert_string_equal(asked.text, cases[i].text[0] == 't' ? asked.text : cases[i].text);
        completion_release(&c);
    }
    accept(BODY("\"response_format\":{\"type\":\"text\"},\"guided_json_object\":false"), "", "");
    assert_int_equal(asked.n_compiled, 0);
}

static void test_what_cannot_be_constrained_is_named(void **state)
{
    struct api_context ctx = context_with_tools();

    (void)state;
    refuse(&ctx, BODY("\"response_format\":{}"), "response_format", "object with a type");
    refuse(&ctx, BODY("\"response_format\":{\"type\":\"json_schema\"}"), "response_format",
           "json_schema must");
    refuse(&ctx, BODY("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}"),
           "response_format", "json_schema.schema must");
    refuse(&ctx,
           BODY("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{"
                "\"impossible\":1}}}"),
           "response_format", "json_schema.schema: cannot enforce 'impossible'");
    refuse(&ctx, BODY("\"structured_outputs\":{\"regex\":\"a\",\"choice\":[\"a\"]}"),
           "structured_outputs", "not several");
    refuse(&ctx, BODY("\"structured_outputs\":{\"xml\":\"a\"}"), "structured_outputs",
           "structured_outputs.xml is not supported");
    refuse(&ctx, BODY("\"structured_outputs\":{\"disable_any_whitespace\":true}"),
           "structured_outputs", "disable_any_whitespace is not supported");
    refuse(&ctx, BODY("\"structured_outputs\":{\"choice\":[]}"), "structured_outputs",
           "list of texts");
    refuse(&ctx, BODY("\"structured_outputs\":{\"json\":\"{\"}"), "structured_outputs",
           "not valid JSON");
    refuse(&ctx, BODY("\"guided_regex\":\"\""), "guided_regex", "not empty");
    refuse(&ctx, BODY("\"guided_regex\":\"a\",\"guided_choice\":[\"a\"]"), "guided_choice",
           "both constrain");
    refuse(&ctx,
           BODY("\"structured_outputs\":{\"structural_tag\":{\"structures\":[{\"begin\":\"x\","
                "\"schema\":{},\"end\":\"\"}],\"triggers\":[\"<\"]}}"),
           "structured_outputs", "none of the triggers");
    refuse(&ctx, BODY("\"structured_outputs\":{\"structural_tag\":\"{\"}"), "structured_outputs",
           "no JSON");
    refuse(&ctx, BODY("\"tools\":[" TOOL("f", "") "],\"guided_regex\":\"a\""), "guided_regex",
           "does not go with tools");
}

/* A grammar that is too long is refused before it is compiled, in whatever form. */
static void test_long_grammars_are_refused_unread(void **state)
{
    static const char *const forms[] = {"\"guided_regex\":\"%s\"", "\"guided_json\":\"%s\"",
                                        "\"guided_choice\":[\"%s\"]",
                                        "\"guided_json\":{\"const\":\"%s\"}",
                                        "\"structured_outputs\":{\"structural_tag\":{"
                                        "\"structures\":[{\"begin\":\"<%s\",\"schema\":{},"
                                        "\"end\":\"\"}],\"triggers\":[\"<\"]}}"};
    struct api_context ctx = context_with_tools();
    char *text = malloc(LIMIT_GRAMMAR_BYTES + 2), *body = malloc(LIMIT_GRAMMAR_BYTES + 400);

    (void)state;
    assert_true(text && body);
    memset(text, '7', LIMIT_GRAMMAR_BYTES + 1);
    text[LIMIT_GRAMMAR_BYTES + 1] = '\0';
    for (size_t i = 0; i < ARRAY_LEN(forms); i++) {
        char fields[256];
        snprintf(fields, sizeof(fields), BODY("%s"), forms[i]);
        snprintf(body, LIMIT_GRAMMAR_BYTES + 400, fields, text);
        refuse(&ctx, body,
               i < 4 ? (const char *[]){"guided_regex", "guided_json", "guided_choice",
                                        "guided_json"}[i]
                     : "structured_outputs",
               "524288");
        assert_int_equal(asked.n_compiled, 0);
    }
    text[LIMIT_GRAMMAR_BYTES] = '\0';
    snprintf(body, LIMIT_GRAMMAR_BYTES + 400, BODY("\"guided_regex\":\"%s\""), text);
    accept(body, "", "777");
    free(body);
    free(text);
}

/* As many bytes as a model's length can have do not say that a prompt is too long. */
static int render_bytes(void *arg, const char *context, size_t len, struct buf *out, struct err *e)
{
    (void)arg, (void)context, (void)len;
    for (int32_t i = 0; i < asked.n_bytes; i++) {
        if (buf_putc(out, 'a')) {
            return err_set(e, ERR_INVALID, "a string of more than %zu bytes", out->max);
        }
    }
    return 0;
}

static int encode_some(void *arg, const char *text, size_t len, bool add_special,
                       int32_t max_tokens, int32_t **ret_ids, int32_t *ret_n, struct err *e)
{
    asked.n_encoded++;
    return test_encode(arg, text, MIN(len, 10), add_special, max_tokens, ret_ids, ret_n, e);
}

static void test_prompts_that_cannot_fit_are_not_encoded(void **state)
{
    enum { MOST = 3 * 1000 };
    struct api_context ctx = context_with_tools();
    struct completion c;
    struct err e;

    (void)state;
    ctx.info.token_text_bytes = 3;
    ctx.render_chat = render_bytes;
    ctx.encode = encode_some;
    asked.n_bytes = MOST;
    assert_int_equal(parse_with(&ctx, &c, BODY("\"seed\":1"), &e), 0);
    completion_release(&c);
    assert_int_equal(asked.n_encoded, 1);
    asked.n_bytes = MOST + 1;
    refuse(&ctx, BODY("\"seed\":1"), "messages", "prompt is too long: at least 1001 tokens > 1000");
    assert_int_equal(asked.n_encoded, 1);
    /* of a longer one the end may be kept */
    assert_int_equal(parse_with(&ctx, &c, BODY("\"truncate_prompt_tokens\":9"), &e), 0);
    completion_release(&c);
    ctx.info.token_text_bytes = 0;
    assert_int_equal(parse_with(&ctx, &c, BODY("\"seed\":1"), &e), 0);
    completion_release(&c);
    assert_int_equal(asked.n_encoded, 3);
}

static void test_tools_and_answers_make_one_grammar(void **state)
{
    (void)state;
    accept(BODY("\"tools\":[" TOOL(
               "f", ",\"parameters\":{\"const\":5}") "],\"tool_choice\":\"required\""),
           "", "{\"const\":5}");
    assert_int_equal(asked.kind, GRAMMAR_LARK);
    accept(BODY("\"tools\":[" TOOL("f", "") "],\"response_format\":{\"type\":\"json_object\"}"), "",
           "");
    assert_string_equal(asked.answer, "{\"type\":\"object\"}");
    assert_int_equal(asked.n_tools, 1);
    accept(BODY("\"tools\":[" TOOL("f", ",\"parameters\":{\"impossible\":1}") "]"), "", "");
    assert_int_equal(asked.n_compiled, 0); /* nothing is constrained */
}

static void test_a_lax_tool_that_cannot_be_enforced_is_named(void **state)
{
    struct api_context ctx = context_with_tools();
    struct completion c;
    struct err e;

    (void)state;
    assert_int_equal(
        parse_with(&ctx, &c,
                   BODY("\"tools\":[" TOOL("f", ",\"parameters\":{\"const\":6}") "," TOOL(
                       "g", ",\"parameters\":{\"impossible\":1}") "],\"tool_choice\":\"required\""),
                   &e),
        0);
    assert_string_equal(c.ignored, "tools.g.parameters");
    assert_string_equal(asked.text, "{\"const\":6}{\"type\":\"object\"}");
    assert_string_equal(c.tools.tool[1].parameters, "{\"impossible\":1}");
    completion_release(&c);
    refuse(&ctx,
           BODY("\"tools\":[" TOOL("f", ",\"strict\":true,\"parameters\":{\"impossible\":1}") "]"),
           "tools", "tools.f.parameters: cannot enforce");
}

/* What all schemas of a request take is limited: those that are not tried any more
 * count as schemas that cannot be enforced. */
static void test_schemas_share_the_work_of_a_request(void **state)
{
    enum { N = 100, WORK = 200000, MOST = 2000000 };
    struct api_context ctx = context_with_tools();
    struct completion c;
    struct buf b;
    struct err e;

    (void)state;
    for (int strict = 0; strict < 2; strict++) {
        memset(&asked, 0, sizeof(asked));
        asked.work = WORK;
        buf_init(&b, 1 << 20);
        buf_puts(&b, "{\"messages\":[" USER "],\"tool_choice\":\"required\",\"tools\":[");
        for (int i = 0; i < N; i++) {
            buf_printf(&b,
                       "%s{\"type\":\"function\",\"function\":{\"name\":\"f%d\",\"strict\":%s,"
                       "\"parameters\":{\"type\":\"object\",\"title\":\"%s\"}}}",
                       i ? "," : "", i, i && strict ? "true" : "false", i ? "a" : "impossible");
        }
        buf_puts(&b, "]}");
        assert_false(b.failed);
        int rc = parse_with(&ctx, &c, b.data, &e);
        buf_release(&b);
        assert_in_range(asked.n_compiled, 3, MOST / WORK);
        if (strict) {
            assert_int_equal(rc, ERR_INVALID);
            assert_non_null(strstr(e.text, "too many steps to compile"));
            continue;
        }
        assert_int_equal(rc, 0);
        assert_non_null(strstr(c.ignored, "tools.f0.parameters, "));
        assert_non_null(strstr(c.ignored, "tools.f5.parameters"));
        assert_null(strstr(c.ignored, "tools.f4.parameters"));
        completion_release(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tools_reach_the_template_as_they_came),
        cmocka_unit_test(test_tools_are_read),
        cmocka_unit_test(test_wrong_tools_are_refused),
        cmocka_unit_test(test_a_model_without_tools_says_so),
        cmocka_unit_test(test_calls_reach_the_template),
        cmocka_unit_test(test_templates_get_what_they_take),
        cmocka_unit_test(test_arguments_that_are_no_object_reach_the_template_as_text),
        cmocka_unit_test(test_numbers_of_calls_are_rounded),
        cmocka_unit_test(test_what_nests_too_deep_for_a_template_is_named),
        cmocka_unit_test(test_arguments_that_nest_too_deep_are_text),
        cmocka_unit_test(test_reasoning_is_accepted_under_both_names),
        cmocka_unit_test(test_wrong_histories_are_refused),
        cmocka_unit_test(test_fields_become_variables),
        cmocka_unit_test(test_fields_without_effect_are_checked),
        cmocka_unit_test(test_each_field_gives_its_grammar),
        cmocka_unit_test(test_what_cannot_be_constrained_is_named),
        cmocka_unit_test(test_long_grammars_are_refused_unread),
        cmocka_unit_test(test_prompts_that_cannot_fit_are_not_encoded),
        cmocka_unit_test(test_tools_and_answers_make_one_grammar),
        cmocka_unit_test(test_a_lax_tool_that_cannot_be_enforced_is_named),
        cmocka_unit_test(test_schemas_share_the_work_of_a_request),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
