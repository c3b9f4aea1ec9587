/* Chat templates: renderings equal to transformers', templates that are refused at
 * start, errors and limits of a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "config/base/limits.h"
#include "models/chat/chat_template.h"
#include "models/checkpoint/file.h"

#define GOLDEN "tests/golden/chat"
#define SPECIALS "\"bos_token\":\"<s>\",\"eos_token\":\"</s>\","

static struct chat_template *template_of(const char *text)
{
    struct chat_template *t;
    struct err e = {0};

    assert_int_equal(chat_template_new(&t, text, strlen(text), SPECIALS, &e), 0);
    return t;
}

/* The rendering's code; its text or error in `out`. */
static int render(const char *text, const char *context, struct buf *out)
{
    struct chat_template *t = template_of(text);
    struct err e = {0};

    buf_init(out, LIMIT_TEMPLATE_OUTPUT_BYTES);
    int rc = chat_template_render(t, context, strlen(context), out, &e);
    if (rc) {
        buf_clear(out);
        buf_puts(out, e.text);
    }
    chat_template_free(t);
    return rc;
}

static void expect(const char *text, const char *written)
{
    struct buf b;
    int rc = render(text, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", &b);

    if (rc) {
        fail_msg("%s: %s", text, b.data);
    }
    assert_string_equal(b.data ? b.data : "", written);
    buf_release(&b);
}

static void expect_error(const char *text, const char *part)
{
    struct buf b;

    assert_int_equal(render(text, "{\"messages\":[]}", &b), ERR_INVALID);
    if (!strstr(b.data, part)) {
        fail_msg("'%s' does not say '%s'", b.data, part);
    }
    buf_release(&b);
}

static void expect_missing(const char *text, const char *part)
{
    struct chat_template *t = template_of(text);
    const char *missing = chat_template_missing(t);

    assert_non_null(missing);
    if (!strstr(missing, part)) {
        fail_msg("'%s' does not say '%s'", missing, part);
    }
    chat_template_free(t);
}

/* ---- goldens ---- */

static void check_case(const struct chat_template *t, const char *name, int i, const cJSON *context,
                       const cJSON *want)
{
    struct buf b;
    struct err e = {0};
    char *text = cJSON_PrintUnformatted(context);

    buf_init(&b, LIMIT_TEMPLATE_OUTPUT_BYTES);
    int rc = chat_template_render(t, text, strlen(text), &b, &e);
    if (cJSON_IsNull(want)) {
        assert_int_equal(rc, ERR_INVALID);
    } else if (rc) {
        fail_msg("%s, conversation %d: %s", name, i, e.text);
    } else if (strcmp(b.data ? b.data : "", want->valuestring) != 0) {
        fail_msg("%s, conversation %d: wrote\n%s\nnot\n%s", name, i, b.data, want->valuestring);
    }
    buf_release(&b);
    cJSON_free(text);
}

static void test_goldens(void **state)
{
    size_t len;
    char *text, name[80];
    struct err e = {0};
    int n = 0;

    (void)state;
    assert_int_equal(model_file_read(GOLDEN, "cases.json", 1 << 22, &text, &len, &e), 0);
    cJSON *all = cJSON_ParseWithLength(text, len);
    free(text);
    assert_non_null(all);
    const cJSON *contexts = cJSON_GetObjectItem(all, "contexts");
    for (const cJSON *k = cJSON_GetObjectItem(all, "texts")->child; k; k = k->next, n++) {
        snprintf(name, sizeof(name), "%s.jinja", k->string);
        assert_int_equal(model_file_read(GOLDEN "/templates", name, 1 << 20, &text, &len, &e), 0);
        struct chat_template *t = template_of(text);
        if (chat_template_missing(t)) {
            fail_msg("%s: %s", name, chat_template_missing(t));
        }
        const cJSON *want = k->child;
        int i = 0;
        for (const cJSON *c = contexts->child; c; c = c->next, want = want->next, i++) {
            check_case(t, name, i, c, want);
        }
        assert_null(want);
        chat_template_free(t);
        free(text);
    }
    assert_true(n >= 20);
    cJSON_Delete(all);
}

/* ---- refused by the parser ---- */

static void test_unsupported_is_named(void **state)
{
    (void)state;
    expect_missing("a\n{% include 'x' %}", "line 2: the statement 'include'");
    expect_missing("{{ x | groupby('y') }}", "the filter 'groupby'");
    expect_missing("{{ x is sameas y }}", "the test 'sameas'");
    expect_missing("{{ x.insert(1) }}", "the method 'insert'");
    expect_missing("{{ lipsum() }}", "the function 'lipsum'");
    expect_missing("{% for x in y recursive %}{% endfor %}", "recursive");
    expect_missing("{% if x %}", "endif");
    expect_missing("{{ x", "no end");
    expect_missing("{{ 1 + }}", "expression");
    expect_missing("{% for x in y %}{% endif %}", "statement 'endif'");
    expect_missing("{% break %}", "outside of a loop");
    assert_string_equal(chat_template_missing(NULL), "the model has no chat template");
}

static void test_deep_nesting_is_refused(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 1 << 20);
    buf_puts(&b, "{{ ");
    for (int i = 0; i < 100000; i++) {
        buf_putc(&b, '(');
    }
    for (int i = 0; i < 100000; i++) {
        buf_putc(&b, ')');
    }
    buf_puts(&b, " }}");
    expect_missing(b.data, "nest");
    buf_clear(&b);
    for (int i = 0; i < 50000; i++) {
        buf_puts(&b, "{% if x %}");
    }
    expect_missing(b.data, "nest");
    buf_clear(&b);
    buf_puts(&b, "{{ x");
    for (int i = 0; i < 100000; i++) {
        buf_puts(&b, ".x");
    }
    buf_puts(&b, " }}");
    expect_missing(b.data, "too long");
    buf_release(&b);
}

/* ---- errors and limits of a run ---- */

static void test_bombs_end(void **state)
{
    (void)state;
    expect_error("{% for a in range(100000000) %}{% endfor %}", "more than");
    expect_error("{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) "
                 "%}x{% endfor %}{% endfor "
                 "%}{% endfor %}",
                 "more than");
    expect_error("{{ 'x' * 1000000000 }}", "more than");
    expect_error("{% set ns = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set ns.x = ns.x "
                 "+ ns.x %}{% endfor %}",
                 "more than");
    expect_error("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nest");
    expect_error("{{ 9223372036854775807 + 1 }}", "64 bits");
    expect_error("{{ 2 ** 99999999999 }}", "64 bits");
    expect_error("{{ 1 // 0 }}", "zero");
    expect_error("{% set ns = namespace() %}{% set ns.l = [1] %}{% for a in range(40) %}{% set "
                 "ns.l = [ns.l, ns.l] %}{% "
                 "endfor %}{{ ns.l }}",
                 "more than");
}

static void test_errors_say_where(void **state)
{
    (void)state;
    expect_error("\n{{ raise_exception('no ' ~ 'way') }}", "line 2: it refuses: no way");
    expect_error("{{ missing.member }}", "member");
    expect_error("{{ 'a' + 1 }}", "a string + a number");
    expect_error("{{ none.strip() }}", "no method 'strip'");
    expect_error("{{ 'a' < 1 }}", "no order");
    expect_error("{% for x in 5 %}{% endfor %}", "gone over");
    expect_error("{% set m = 1 %}{{ m() }}", "cannot be called");
}

static void test_bad_context(void **state)
{
    struct buf b;

    (void)state;
    assert_int_equal(render("x", "[]", &b), ERR_INVALID);
    buf_release(&b);
    assert_int_equal(render("x", "{\"a\":", &b), ERR_INVALID);
    buf_release(&b);
}

static void test_values(void **state)
{
    (void)state;
    expect("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ unheard_of }}", "<s></s>True");
    expect("{{ strftime_now is defined }}{{ strftime_now('%Y')|length }}", "True4");
    expect("{{ '\\u00e9\\x41\\n'|tojson }}", "\"éA\\n\"");
    expect("{{ 1 if false }}|{{ [1,2,3][:2] }}|{{ 'a' ~ 1 ~ none }}", "|[1, 2]|a1None");
}

/* Long texts stay where they are in the context, short ones are copied. */
static void test_long_texts(void **state)
{
    enum { N = 700 };
    char context[4 * N], want[8 * N], plain[N + 1], escaped[N + 8];
    struct buf b;

    (void)state;
    memset(plain, 'p', N);
    plain[N] = '\0';
    snprintf(escaped, sizeof(escaped), "%.*s\\n\xC3\xA9%s", N / 2, plain, plain + N / 2);
    snprintf(context, sizeof(context), "{\"a\":\"%s\",\"b\":\"%s\",\"c\":\"%s\",\"eos_token\":1}",
             plain, escaped, "upper");
    snprintf(want, sizeof(want), "%s|\"%s\"|%d|%d|True|<s>1", plain, escaped, N, N + 2);
    assert_int_equal(render("{{ a }}|{{ b|tojson }}|{{ a|length }}|{{ b|length }}|"
                            "{{ [a, b]|map(c)|list|length == 2 }}|{{ bos_token }}{{ eos_token }}",
                            context, &b),
                     0);
    assert_string_equal(b.data, want);
    buf_release(&b);
}

static void test_what_it_wants(void **state)
{
    (void)state;
    struct chat_template *t = template_of("{% for p in m['content'] %}{{ p.text }}{% endfor %}");
    assert_true(chat_template_wants_parts(t));
    assert_false(chat_template_knows_developer(t));
    chat_template_free(t);
    t = template_of("{% if m.content is string %}{% endif %}{% for p in m.content %}{% endfor %}{{ "
                    "'developer' }}");
    assert_false(chat_template_wants_parts(t));
    assert_true(chat_template_knows_developer(t));
    chat_template_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goldens),
        cmocka_unit_test(test_unsupported_is_named),
        cmocka_unit_test(test_deep_nesting_is_refused),
        cmocka_unit_test(test_bombs_end),
        cmocka_unit_test(test_errors_say_where),
        cmocka_unit_test(test_bad_context),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_long_texts),
        cmocka_unit_test(test_what_it_wants),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
