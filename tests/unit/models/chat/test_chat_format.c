/* Chat formats: the cases of tests/golden/chat/formats.json, each cut at every byte;
 * what a template's text tells; grammars; limits of the parser. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "models/chat/chat_format.h"
#include "models/chat/chat_template.h"
#include "models/checkpoint/file.h"

/* ---- what events add up to ---- */

struct answer {
    struct buf content, reasoning, calls;
    int32_t n_calls, n_ended;
    bool order; /* arguments came between the beginning and the end of their call */
};

static void answer_init(struct answer *a)
{
    buf_init(&a->content, (size_t)1 << 24);
    buf_init(&a->reasoning, (size_t)1 << 24);
    buf_init(&a->calls, (size_t)1 << 24);
    a->n_calls = a->n_ended = 0;
    a->order = true;
}

static void answer_release(struct answer *a)
{
    buf_release(&a->content);
    buf_release(&a->reasoning);
    buf_release(&a->calls);
}

static void take(void *arg, const struct chat_event *ev)
{
    struct answer *a = arg;

    switch (ev->kind) {
    case CHAT_CONTENT:
        buf_append(&a->content, ev->text, ev->len);
        break;
    case CHAT_REASONING:
        buf_append(&a->reasoning, ev->text, ev->len);
        break;
    case CHAT_CALL:
        a->order = a->order && ev->call == a->n_calls++;
        buf_printf(&a->calls, "[%s|%s]", ev->name, ev->id ? ev->id : "");
        break;
    case CHAT_ARGUMENTS:
        a->order = a->order && ev->call == a->n_calls - 1 && ev->len;
        buf_append(&a->calls, ev->text, ev->len);
        break;
    default:
        a->order = a->order && ev->call == a->n_calls - 1;
        a->n_ended++;
        buf_puts(&a->calls, "!");
        break;
    }
}

static const char *text_of(const struct buf *b)
{
    return b->data ? b->data : "";
}

/* The answer `text` in two pieces, cut at `cut`; byte by byte where that is -1. */
static void parse(struct answer *a, const char *format, const struct chat_tools *tools, bool opened,
                  const char *text, int64_t cut)
{
    size_t len = strlen(text);
    struct chat_parser *p;
    struct err e = {0};

    answer_init(a);
    assert_int_equal(chat_parser_new(&p, chat_format_find(format), tools, opened, &e), 0);
    for (size_t i = 0; cut < 0 && i < len; i++) {
        assert_int_equal(chat_parser_feed(p, text + i, 1, take, a), 0);
    }
    if (cut >= 0) {
        assert_int_equal(chat_parser_feed(p, text, (size_t)cut, take, a), 0);
        assert_int_equal(chat_parser_feed(p, text + cut, len - (size_t)cut, take, a), 0);
    }
    assert_int_equal(chat_parser_end(p, take, a), 0);
    assert_int_equal(chat_parser_calls(p), a->n_calls);
    assert_true(chat_parser_bytes(p) > 0);
    assert_true(a->order);
    chat_parser_free(p);
}

/* ---- the cases ---- */

static cJSON *read_cases(void)
{
    struct err e = {0};
    size_t len;
    char *text;

    assert_int_equal(model_file_read("tests/golden/chat", "formats.json", 1 << 22, &text, &len, &e),
                     0);
    cJSON *cases = cJSON_ParseWithLength(text, len);
    assert_non_null(cases);
    free(text);
    return cases;
}

static void read_tools(struct chat_tools *t, const cJSON *list)
{
    const cJSON *tool;

    memset(t, 0, sizeof(*t));
    t->tool = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof(*t->tool));
    t->parallel = true;
    cJSON_ArrayForEach(tool, list)
    {
        t->tool[t->n].strict = cJSON_IsTrue(cJSON_GetObjectItem(tool, "strict"));
        t->tool[t->n].name = strdup(cJSON_GetStringValue(cJSON_GetObjectItem(tool, "name")));
        t->tool[t->n++].parameters =
            cJSON_PrintUnformatted(cJSON_GetObjectItem(tool, "parameters"));
    }
}

static void expect_calls(const cJSON *list, struct buf *calls)
{
    const cJSON *call;

    cJSON_ArrayForEach(call, list)
    {
        buf_printf(calls, "[%s|%s]%s%s", cJSON_GetStringValue(cJSON_GetObjectItem(call, "name")),
                   cJSON_GetStringValue(cJSON_GetObjectItem(call, "id")),
                   cJSON_GetStringValue(cJSON_GetObjectItem(call, "arguments")),
                   cJSON_IsTrue(cJSON_GetObjectItem(call, "ended")) ? "!" : "");
    }
}

static void one_case(const cJSON *c)
{
    const char *format = cJSON_GetStringValue(cJSON_GetObjectItem(c, "format"));
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(c, "text"));
    bool opened = cJSON_IsTrue(cJSON_GetObjectItem(c, "opened"));
    struct chat_tools tools;
    struct answer a;
    struct buf calls;

    buf_init(&calls, 1 << 20);
    expect_calls(cJSON_GetObjectItem(c, "calls"), &calls);
    read_tools(&tools, cJSON_GetObjectItem(c, "tools"));
    for (int64_t cut = -1; cut <= (int64_t)strlen(text); cut++) {
        parse(&a, format, &tools, opened, text, cut);
        assert_string_equal(text_of(&a.content),
                            cJSON_GetStringValue(cJSON_GetObjectItem(c, "content")));
        assert_string_equal(text_of(&a.reasoning),
                            cJSON_GetStringValue(cJSON_GetObjectItem(c, "reasoning")));
        assert_string_equal(text_of(&a.calls), text_of(&calls));
        answer_release(&a);
    }
    chat_tools_release(&tools);
    buf_release(&calls);
}

static void every_case_at_every_cut(void **state)
{
    cJSON *cases = read_cases();
    const cJSON *c;

    (void)state;
    assert_true(cJSON_GetArraySize(cases) > 60);
    cJSON_ArrayForEach(c, cases)
    {
        one_case(c);
    }
    cJSON_Delete(cases);
}

/* What was reported of a beginning of an answer is never taken back. */
static void a_prefix_is_never_taken_back(void **state)
{
    cJSON *cases = read_cases();
    const cJSON *c;

    (void)state;
    cJSON_ArrayForEach(c, cases)
    {
        const char *format = cJSON_GetStringValue(cJSON_GetObjectItem(c, "format"));
        const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(c, "text"));
        bool opened = cJSON_IsTrue(cJSON_GetObjectItem(c, "opened"));
        struct chat_tools tools;
        struct answer whole, part;
        struct chat_parser *p;
        struct err e = {0};

        read_tools(&tools, cJSON_GetObjectItem(c, "tools"));
        parse(&whole, format, &tools, opened, text, 0);
        answer_init(&part);
        assert_int_equal(chat_parser_new(&p, chat_format_find(format), &tools, opened, &e), 0);
        for (size_t i = 0; text[i]; i++) {
            assert_int_equal(chat_parser_feed(p, text + i, 1, take, &part), 0);
            assert_int_equal(
                strncmp(text_of(&whole.content), text_of(&part.content), part.content.len), 0);
            assert_int_equal(
                strncmp(text_of(&whole.reasoning), text_of(&part.reasoning), part.reasoning.len),
                0);
            assert_int_equal(strncmp(text_of(&whole.calls), text_of(&part.calls), part.calls.len),
                             0);
        }
        chat_parser_free(p);
        answer_release(&whole);
        answer_release(&part);
        chat_tools_release(&tools);
    }
    cJSON_Delete(cases);
}

/* ---- streaming ---- */

static struct chat_tools one_tool(const char *name, const char *parameters)
{
    struct chat_tools t = {.n = 1, .parallel = true, .tool = calloc(1, sizeof(*t.tool))};

    t.tool[0].name = strdup(name);
    t.tool[0].parameters = parameters ? strdup(parameters) : NULL;
    return t;
}

/* Arguments are reported while they come, not at their end. */
static void arguments_stream(void **state)
{
    static const char begin[] = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"";
    struct chat_tools tools = one_tool("f", NULL);
    struct chat_parser *p;
    struct answer a;
    struct err e = {0};

    (void)state;
    answer_init(&a);
    assert_int_equal(chat_parser_new(&p, chat_format_find("hermes"), &tools, false, &e), 0);
    assert_int_equal(chat_parser_feed(p, begin, sizeof(begin) - 1, take, &a), 0);
    assert_string_equal(text_of(&a.calls), "[f|]{\"a\": \"");
    assert_int_equal(chat_parser_feed(p, "xyz", 3, take, &a), 0);
    assert_string_equal(text_of(&a.calls), "[f|]{\"a\": \"xyz");
    /* A character that is cut waits for its rest. */
    assert_int_equal(chat_parser_feed(p, "\xc3", 1, take, &a), 0);
    assert_string_equal(text_of(&a.calls), "[f|]{\"a\": \"xyz");
    assert_int_equal(chat_parser_feed(p, "\xbc\"}}</tool_call>", 15, take, &a), 0);
    assert_string_equal(text_of(&a.calls), "[f|]{\"a\": \"xyz\xc3\xbc\"}!");
    assert_int_equal(chat_parser_end(p, take, &a), 0);
    chat_parser_free(p);
    answer_release(&a);
    chat_tools_release(&tools);
}

/* A call after the 512th is text, and a long answer needs no more memory than a short
 * one. */
static void calls_are_bounded(void **state)
{
    struct chat_tools tools = one_tool("f", NULL);
    struct chat_parser *p;
    struct answer a;
    struct err e = {0};
    size_t early = 0;

    (void)state;
    answer_init(&a);
    assert_int_equal(chat_parser_new(&p, chat_format_find("hermes"), &tools, false, &e), 0);
    for (int i = 0; i < 600; i++) {
        static const char call[] = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n";
        assert_int_equal(chat_parser_feed(p, call, sizeof(call) - 1, take, &a), 0);
        early = i == 10 ? chat_parser_bytes(p) : early;
    }
    assert_int_equal(chat_parser_calls(p), 512);
    assert_true(chat_parser_bytes(p) <= 2 * early);
    assert_int_equal(chat_parser_end(p, take, &a), 0);
    assert_non_null(strstr(text_of(&a.content), "<tool_call>"));
    chat_parser_free(p);
    answer_release(&a);
    chat_tools_release(&tools);
}

/* Text that looks like a call again and again takes time in proportion to its length:
 * what a candidate holds back is bounded. */
static void candidates_are_bounded(void **state)
{
    struct chat_tools tools = one_tool("f", NULL);
    struct buf text;
    struct answer a;

    (void)state;
    buf_init(&text, (size_t)1 << 22);
    for (int i = 0; i < 20000; i++) {
        buf_puts(&text, "<tool_call>{\"name\": \"");
    }
    parse(&a, "hermes", &tools, false, text.data, 0);
    assert_int_equal(a.n_calls, 0);
    assert_string_equal(text_of(&a.content), text.data);
    answer_release(&a);
    buf_release(&text);
    chat_tools_release(&tools);
}

/* ---- templates ---- */

static void formats_of_templates(void **state)
{
    static const struct {
        const char *text, *name;
    } T[] = {
        {"{{ messages }}", "generic"},
        {"<tool_call>", "hermes"},
        {"<tool_call> <think>", "qwen3"},
        {"<tool_call> <function= <parameter=", "qwen3-coder"},
        {"<function= <parameter= <tool_call> <think>", "qwen3.5"},
        {"<tool_call> <arg_key>", "glm-4.5"},
        {"[TOOL_CALLS]", "mistral-list"},
        {"[TOOL_CALLS] [ARGS]", "mistral"},
        {"<|channel|> <|message|>", "gpt-oss"},
        {"<|python_tag|>", "llama-json"},
        {"<think></think>", "think"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(T); i++) {
        const struct chat_format *f = chat_format_of_template(T[i].text, strlen(T[i].text));
        assert_string_equal(chat_format_name(f), T[i].name);
        assert_ptr_equal(chat_format_find(T[i].name), f);
        assert_non_null(strstr(chat_format_names(), T[i].name));
    }
    assert_null(chat_format_find("none such"));
    assert_int_equal(chat_format_id_chars(chat_format_find("mistral")), 9);
    assert_false(chat_format_reasons(chat_format_find("hermes")));
    assert_true(chat_format_reasons(chat_format_find("gpt-oss")));
}

static void prompts_that_open_reasoning(void **state)
{
    static const struct {
        const char *format, *prompt;
        bool opened;
    } P[] = {
        {"qwen3", "<|im_start|>assistant\n<think>\n", true},
        {"qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", false},
        {"qwen3", "<|im_start|>assistant\n", false},
        {"qwen3", "Say <think> to me", false},
        {"gemma-4", "<|turn>model\n<|channel>thought\n", true},
        {"hermes", "<think>", false},
        {"gpt-oss", "<|start|>assistant", false},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(P); i++) {
        bool opened = chat_format_opens_reasoning(chat_format_find(P[i].format), P[i].prompt,
                                                  strlen(P[i].prompt));
        assert_int_equal(opened, P[i].opened);
    }
}

static void what_templates_can_do(void **state)
{
    static const char plain[] =
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    static const char objects[] =
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
        "{% endfor %}{% endfor %}";
    static const char texts[] =
        "{{ tools | tojson if tools }}{% for m in messages %}"
        "{% if m.role == 'developer' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content or '' }}{{ m.reasoning_content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments }}{% endfor %}{% endfor %}";
    struct chat_template *t;
    struct err e = {0};

    (void)state;
    assert_int_equal(chat_template_new(&t, plain, sizeof(plain) - 1, "", &e), 0);
    assert_true(chat_template_caps(t)->system && chat_template_caps(t)->developer);
    assert_false(chat_template_caps(t)->tools || chat_template_caps(t)->calls);
    chat_template_free(t);
    assert_int_equal(chat_template_new(&t, objects, sizeof(objects) - 1, "", &e), 0);
    assert_true(chat_template_caps(t)->tools && chat_template_caps(t)->calls);
    assert_true(chat_template_caps(t)->arguments);
    assert_false(chat_template_caps(t)->null || chat_template_caps(t)->reasoning);
    assert_string_equal(chat_format_name(chat_template_format(t)), "hermes");
    chat_template_free(t);
    assert_int_equal(chat_template_new(&t, texts, sizeof(texts) - 1, "", &e), 0);
    assert_true(chat_template_caps(t)->calls && chat_template_caps(t)->null);
    assert_true(chat_template_caps(t)->results && chat_template_caps(t)->reasoning);
    assert_false(chat_template_caps(t)->arguments || chat_template_caps(t)->developer);
    chat_template_free(t);
    assert_false(chat_template_caps(NULL)->tools);
}

static void expect_rendered(const struct chat_template *t, const char *context, const char *want)
{
    struct buf out;
    struct err e = {0};

    buf_init(&out, 1 << 20);
    if (chat_template_render(t, context, strlen(context), &out, &e) != 0) {
        fail_msg("%s", e.text);
    }
    assert_string_equal(text_of(&out), want);
    buf_release(&out);
}

#define CALL                                                                            \
    "\"tool_calls\":[{\"id\":\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\"," \
    "\"arguments\":{\"a\":1}}}]"
#define ANSWER "{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"2\"}"
#define TOOL "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"

/* A template without a place for tools gets them as text; one that has a place, or that
 * cannot be used, stays. */
static void tools_for_templates_without(void **state)
{
    static const char plain[] = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    static const char no_system[] =
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('no') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}";
    static const char parts[] = "{% for m in messages %}{% for p in m.content %}{{ p.text }}"
                                "{% endfor %}{% endfor %}";
    struct chat_template *t, *before;
    struct err e = {0};

    (void)state;
    assert_int_equal(chat_template_new(&t, plain, sizeof(plain) - 1, "", &e), 0);
    assert_int_equal(chat_template_add_tools(&t, &e), 0);
    const struct chat_caps *caps = chat_template_caps(t);
    assert_true(caps->system && caps->tools && caps->calls && caps->arguments && caps->results);
    assert_string_equal(chat_format_name(chat_template_format(t)), "hermes");
    expect_rendered(t, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", "user:x;");
    expect_rendered(
        t,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":"
        "null," CALL "}," ANSWER ",{\"role\":\"user\",\"content\":\"y\"},{\"role\":\"assistant\","
        "\"content\":\"z\"," CALL "}," ANSWER "]}",
        "user:x;assistant:<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>;"
        "user:<tool_response>\n2\n</tool_response>\ny;"
        "assistant:z\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>;"
        "user:<tool_response>\n2\n</tool_response>\n;");
    before = t;
    assert_int_equal(chat_template_add_tools(&t, &e), 0);
    assert_ptr_equal(t, before);
    chat_template_free(t);
    assert_int_equal(chat_template_new(&t, no_system, sizeof(no_system) - 1, "", &e), 0);
    assert_int_equal(chat_template_add_tools(&t, &e), 0);
    assert_true(chat_template_caps(t)->tools && chat_template_caps(t)->results);
    chat_template_free(t);
    assert_int_equal(chat_template_new(&t, parts, sizeof(parts) - 1, "", &e), 0);
    assert_int_equal(chat_template_add_tools(&t, &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "generic_tools"));
    chat_template_free(t);
    assert_int_equal(chat_template_new(&t, NULL, 0, "", &e), 0);
    assert_int_equal(chat_template_add_tools(&t, &e), 0);
    chat_template_free(t);
}

/* Where the functions stand: behind the system's message, or in one of their own, or in
 * front of the first message. */
static void tools_are_described(void **state)
{
    static const char plain[] = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    static const char user[] = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }};"
                               "{% endif %}{% endfor %}";
    static const char *const contexts[] = {
        "{" TOOL ",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
        "{" TOOL ",\"messages\":[{\"role\":\"system\",\"content\":\"s\"},"
        "{\"role\":\"user\",\"content\":\"x\"}]}",
    };
    static const char *const begin[] = {"system:You may call", "system:s\n\nYou may call"};
    struct chat_template *t;
    struct buf out;
    struct err e = {0};

    (void)state;
    buf_init(&out, 1 << 20);
    assert_int_equal(chat_template_new(&t, plain, sizeof(plain) - 1, "", &e), 0);
    assert_int_equal(chat_template_add_tools(&t, &e), 0);
    for (size_t i = 0; i < ARRAY_LEN(contexts); i++) {
        buf_clear(&out);
        assert_int_equal(chat_template_render(t, contexts[i], strlen(contexts[i]), &out, &e), 0);
        assert_memory_equal(out.data, begin[i], strlen(begin[i]));
        assert_non_null(strstr(text_of(&out), "<tools>\n{\"name\": \"f\"}\n</tools>"));
        assert_non_null(strstr(text_of(&out), "</tool_call>;user:x;"));
    }
    chat_template_free(t);
    assert_int_equal(chat_template_new(&t, user, sizeof(user) - 1, "", &e), 0);
    assert_int_equal(chat_template_add_tools(&t, &e), 0);
    buf_clear(&out);
    assert_int_equal(chat_template_render(t, contexts[0], strlen(contexts[0]), &out, &e), 0);
    assert_memory_equal(out.data, "You may call", 12);
    assert_non_null(strstr(text_of(&out), "</tool_call>\n\nx;"));
    chat_template_free(t);
    buf_release(&out);
}

/* ---- grammars ---- */

static void expect_grammar(const char *format, const struct chat_tools *t, const char *answer,
                           bool reasoning, const char *want)
{
    struct err e = {0};
    struct buf out;
    bool needed;

    buf_init(&out, 1 << 20);
    assert_int_equal(
        chat_format_grammar(chat_format_find(format), t, answer, reasoning, &out, &needed, &e), 0);
    assert_int_equal(needed, want[0] != '\0');
    assert_string_equal(text_of(&out), want);
    buf_release(&out);
}

static void grammars(void **state)
{
    struct chat_tools t =
        one_tool("f", "{\"type\":\"object\",\"required\":[\"a\"],\"properties\":"
                      "{\"a\":{\"type\":\"string\"},\"b\":{\"type\":\"integer\"}}}");

    (void)state;
    expect_grammar("hermes", &t, NULL, false, "");
    expect_grammar("hermes", NULL, "{\"type\":\"integer\"}", false,
                   "start: body\nbody: %json {\"type\":\"integer\"}\n");
    expect_grammar(
        "qwen3", NULL, "{}", true,
        "start: until(\"</think>\") marker(\"</think>\") /\\n{0,2}/ body\nbody: %json {}\n");
    t.choice = TOOL_NAMED;
    t.parallel = false;
    free(t.tool[0].parameters);
    t.tool[0].parameters = strdup("{\"type\":\"object\"}");
    expect_grammar(
        "hermes", &t, NULL, false,
        "start: body\nbody: calls\ncalls: call\ncall: c0\n"
        "c0: marker(\"<tool_call>\") \"\\n\" \"{\\\"name\\\": \\\"f\\\", \\\"arguments\\\": \""
        " %json {\"type\":\"object\"} \"}\" \"\\n\" marker(\"</tool_call>\")\n");
    t.choice = TOOL_REQUIRED;
    t.parallel = true;
    expect_grammar(
        "mistral", &t, NULL, true,
        "start: until(\"[/THINK]\") marker(\"[/THINK]\") /\\n{0,2}/ body\nbody: calls\n"
        "calls: call ( call)*\ncall: c0\n"
        "c0: marker(\"[TOOL_CALLS]\") \"f\" marker(\"[ARGS]\") %json {\"type\":\"object\"}\n");
    chat_tools_release(&t);
}

/* XML: a rule a parameter; what plain text cannot be held to is refused by name. */
static void grammars_of_tags(void **state)
{
    struct chat_tools t = one_tool(
        "f", "{\"type\":\"object\",\"required\":[\"a\"],\"properties\":{\"a\":{\"type\":\"string\","
             "\"enum\":[\"x\",\"y\"]},\"b\":{\"$ref\":\"#/$defs/"
             "n\"}},\"$defs\":{\"n\":{\"type\":\"integer\"}}}");
    struct err e = {0};
    struct buf out;
    bool needed;

    (void)state;
    t.tool[0].strict = true;
    t.parallel = false;
    expect_grammar(
        "qwen3.5", &t, NULL, true,
        "start: until(\"</think>\", \"<tool_call>\", \"<function=\") marker(\"</think>\") "
        "/\\n{0,2}/ body\n"
        "body: until(\"<tool_call>\", \"<function=\") (calls)?\n"
        "calls: call\ncall: c0\n"
        "c0: marker(\"<tool_call>\") \"\\n\" marker(\"<function=\") \"f\" marker(\">\") \"\\n\""
        " ( marker(\"<parameter=\") \"a\" marker(\">\") \"\\n\" (\"x\" | \"y\") \"\\n\""
        " marker(\"</parameter>\") \"\\n\")"
        " ( marker(\"<parameter=\") \"b\" marker(\">\") \"\\n\" %json "
        "{\"$defs\":{\"n\":{\"type\":\"integer\"}},"
        "\"$comment\":\"\",\"$ref\":\"#/$defs/n\"} \"\\n\" marker(\"</parameter>\") \"\\n\")?"
        " marker(\"</function>\") \"\\n\" marker(\"</tool_call>\")\n");
    free(t.tool[0].parameters);
    t.tool[0].parameters = strdup(
        "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\",\"pattern\":\"^a\"}}}");
    buf_init(&out, 1 << 20);
    assert_int_equal(
        chat_format_grammar(chat_format_find("qwen3.5"), &t, NULL, false, &out, &needed, &e),
        ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "pattern"));
    buf_release(&out);
    chat_tools_release(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case_at_every_cut),
        cmocka_unit_test(a_prefix_is_never_taken_back),
        cmocka_unit_test(arguments_stream),
        cmocka_unit_test(calls_are_bounded),
        cmocka_unit_test(candidates_are_bounded),
        cmocka_unit_test(formats_of_templates),
        cmocka_unit_test(prompts_that_open_reasoning),
        cmocka_unit_test(what_templates_can_do),
        cmocka_unit_test(tools_for_templates_without),
        cmocka_unit_test(tools_are_described),
        cmocka_unit_test(grammars),
        cmocka_unit_test(grammars_of_tags),
    };

    return cmocka_run_group_tests_name("chat_format", tests, NULL, NULL);
}
