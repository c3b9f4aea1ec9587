/* Request bodies: the parsed values of accepted ones, and every error with the field
 * that it names. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "server/api/json_fields.h"
#include "tests/unit/api_context.h"

static int parse(struct completion *c, const char *body, struct err *e)
{
    *e = (struct err){0};
    /* Nothing after the end of the body may be read. */
    size_t len = strlen(body);
    char *copy = malloc(len ? len : 1);
    memcpy(copy, body, len);
    int rc = completion_parse(c, copy, len, &test_context, e);
    free(copy);
    return rc;
}

static void accept_body(struct completion *c, const char *body)
{
    struct err e;

    if (parse(c, body, &e)) {
        fail_msg("refused: %s: %s", body, e.text);
    }
}

struct refusal {
    const char *body, *param, *text;
};

static void refuse_all(const struct refusal *r, size_t n, int code)
{
    for (size_t i = 0; i < n; i++) {
        struct completion c;
        struct err e;
        int rc = parse(&c, r[i].body, &e);
        if (rc == 0) {
            fail_msg("accepted: %s", r[i].body);
        }
        if (rc != code || e.code != code || strcmp(e.param, r[i].param) != 0 ||
            !strstr(e.text, r[i].text)) {
            fail_msg("%s: code %d, param '%s', text '%s'", r[i].body, rc, e.param, e.text);
        }
    }
}

/* ---- accepted bodies ---- */

static void test_defaults_stand(void **state)
{
    struct completion c;

    (void)state;
    accept_body(&c, "{\"prompt\":\"ab\"}");
    assert_int_equal(c.n_prompts, 1);
    assert_int_equal(c.prompt[0].n, 3);
    assert_int_equal(c.prompt[0].id[0], 1);
    assert_int_equal(c.prompt[0].id[2], 'b');
    assert_int_equal(c.params.max_tokens, 16);
    assert_int_equal(c.params.n, 1);
    assert_int_equal(c.params.best_of, 1);
    assert_int_equal(c.params.beam_width, 0);
    assert_int_equal(c.params.n_logprobs, -1);
    assert_int_equal(c.prompt[0].seed, 99);
    assert_true(c.params.skip_special);
    assert_string_equal(c.ignored, "");
    completion_release(&c);
}

static void test_every_field_arrives(void **state)
{
    struct completion c;

    (void)state;
    accept_body(
        &c, "{\"model\":\"m\",\"prompt\":\"x\",\"max_tokens\":7,\"min_tokens\":2,\"n\":3,\"best_"
            "of\":4,\"temperature\":0.5,"
            "\"top_p\":0.25,\"top_k\":5,\"min_p\":0.125,\"presence_penalty\":-1,\"frequency_"
            "penalty\":2,"
            "\"repetition_penalty\":1.5,\"logit_bias\":{\"7\":-100,\"3\":1},\"seed\":5,\"stop\":["
            "\"a\",\"bc\"],"
            "\"stop_token_ids\":[9],\"include_stop_str_in_output\":true,\"ignore_eos\":true,\"bad_"
            "words\":[\"w\"],"
            "\"allowed_token_ids\":[1,2],\"echo\":true,\"logprobs\":2,\"prompt_logprobs\":1,"
            "\"skip_special_tokens\":false,\"spaces_between_special_tokens\":false,\"add_special_"
            "tokens\":false,"
            "\"return_token_ids\":true,\"priority\":-4,\"cache_salt\":\"s\",\"user\":\"u\","
            "\"request_id\":\"r.1\","
            "\"response_format\":{\"type\":\"text\"},\"suffix\":\"\",\"early_stopping\":false}");
    const struct gen_params *p = &c.params;
    assert_int_equal(p->max_tokens, 7);
    assert_int_equal(p->min_tokens, 2);
    assert_int_equal(p->n, 3);
    assert_int_equal(p->best_of, 4);
    assert_true(p->temperature == 0.5f && p->top_p == 0.25f && p->min_p == 0.125f);
    assert_int_equal(p->top_k, 5);
    assert_true(p->presence_penalty == -1 && p->frequency_penalty == 2 &&
                p->repetition_penalty == 1.5f);
    assert_int_equal(p->n_bias, 2);
    assert_int_equal(p->bias[0].token, 3); /* ascending */
    assert_true(p->bias[1].bias == -100);
    assert_int_equal(c.prompt[0].seed, 5);
    assert_int_equal(p->n_stop, 2);
    assert_string_equal(p->stop[1], "bc");
    assert_int_equal(p->stop_token[0], 9);
    assert_string_equal(p->bad_word[0], "w");
    assert_int_equal(p->n_allowed, 2);
    assert_true(p->include_stop_str && p->ignore_eos && p->echo && !p->skip_special &&
                !p->spaces_between_special);
    assert_int_equal(p->n_logprobs, 2);
    assert_int_equal(p->n_prompt_logprobs, 2); /* echo with logprobs includes the prompt's */
    assert_true(c.echo_logprobs && c.has_prompt_logprobs && c.return_token_ids);
    assert_int_equal(p->priority, -4);
    assert_string_equal(p->cache_salt, "s");
    assert_string_equal(c.request_id, "r.1");
    assert_int_equal(c.prompt[0].n, 1); /* no special token */
    completion_release(&c);
}

static void test_null_means_not_given(void **state)
{
    struct completion c;

    (void)state;
    accept_body(&c, "{\"prompt\":\"x\",\"max_tokens\":null,\"stop\":null,\"seed\":null,\"logit_"
                    "bias\":null,\"stream_options\":null,"
                    "\"guided_json\":null,\"model\":null}");
    assert_int_equal(c.params.max_tokens, 16);
    completion_release(&c);
}

static void test_prompt_forms(void **state)
{
    struct completion c;

    (void)state;
    accept_body(&c, "{\"prompt\":[\"a\",\"bc\"]}");
    assert_int_equal(c.n_prompts, 2);
    assert_int_equal(c.prompt[1].n, 3);
    completion_release(&c);
    accept_body(&c, "{\"prompt\":[0,255,7]}");
    assert_int_equal(c.n_prompts, 1);
    assert_int_equal(c.prompt[0].n, 3);
    assert_int_equal(c.prompt[0].id[1], 255);
    completion_release(&c);
    accept_body(&c, "{\"prompt\":[[1,2],[3]]}");
    assert_int_equal(c.n_prompts, 2);
    assert_int_equal(c.prompt[1].id[0], 3);
    completion_release(&c);
    accept_body(&c, "{\"prompt\":[1,2,3,4,5],\"truncate_prompt_tokens\":2}");
    assert_int_equal(c.prompt[0].n, 2);
    assert_int_equal(c.prompt[0].id[0], 4);
    completion_release(&c);
    accept_body(&c, "{\"prompt\":\"\\u00e9\\ud83d\\ude00\",\"add_special_tokens\":false}");
    assert_int_equal(c.prompt[0].n, 6); /* two and four bytes */
    completion_release(&c);
}

static void test_seed_is_exact(void **state)
{
    static const struct {
        const char *text;
        uint64_t seed;
    } t[] = {{"0", 0},
             {"9007199254740993", 9007199254740993u},
             {"18446744073709551615", UINT64_MAX},
             {"-1", UINT64_MAX},
             {"-0", 0},
             {"0.000e99999999999999999999", 0},
             {"1.0", 1},
             {"1e3", 1000},
             {"9007199254740993.000", 9007199254740993u},
             {"1844674407370955161.5e1", UINT64_MAX},
             {"184467440737095516150000e-4", UINT64_MAX},
             {"-9223372036854775808", (uint64_t)1 << 63}};
    char body[200];

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(t); i++) {
        struct completion c;
        /* A nested member called seed is not the seed. */
        snprintf(body, sizeof(body), "{\"x\":{\"seed\":1}, \"\\u0073eed\" : %s ,\"prompt\":\"x\"}",
                 t[i].text);
        accept_body(&c, body);
        assert_true(c.prompt[0].seed == t[i].seed);
        completion_release(&c);
    }
}

static void test_prompts_without_a_seed_share_none(void **state)
{
    struct completion c;

    (void)state;
    accept_body(&c, "{\"prompt\":[\"x\",\"x\",\"x\"]}");
    assert_true(c.prompt[0].seed != c.prompt[1].seed && c.prompt[1].seed != c.prompt[2].seed &&
                c.prompt[0].seed != c.prompt[2].seed);
    completion_release(&c);
    accept_body(&c, "{\"prompt\":[\"x\",\"x\"],\"seed\":0}");
    assert_true(c.prompt[0].seed == 0 && c.prompt[1].seed == 0);
    completion_release(&c);
}

/* Numbers with 100,000 zeros in the middle. */
static void test_long_numbers(void **state)
{
    enum { ZEROS = 100000 };
    static const struct {
        const char *before, *behind, *param, *text;
    } t[] = {
        {"{\"prompt\":\"x\",\"max_tokens\":0.", "1}", "max_tokens",
         "(100003 characters) but must be an integer"},
        {"{\"prompt\":\"x\",\"seed\":1.", "1}", "seed", "must be an integer of 64 bits"},
        {"{\"prompt\":\"x\",\"n\":1", "}", "n", "must be between 1 and 128"},
        {"{\"prompt\":\"x\",\"temperature\":1", "}", "temperature",
         "must be at least 0 and at most 2"},
        {"{\"prompt\":\"x\",\"max_tokens\":7.", "}", NULL, NULL},
        {"{\"prompt\":\"x\",\"foo\":1", "}", NULL, NULL},
    };
    char *body = malloc(ZEROS + 100);

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(t); i++) {
        size_t at = strlen(t[i].before);
        struct completion c;
        struct err e;
        memcpy(body, t[i].before, at);
        memset(body + at, '0', ZEROS);
        strcpy(body + at + ZEROS, t[i].behind);
        if (!t[i].param) {
            accept_body(&c, body);
            completion_release(&c);
            continue;
        }
        assert_int_equal(parse(&c, body, &e), ERR_INVALID);
        assert_string_equal(e.param, t[i].param);
        assert_non_null(strstr(e.text, t[i].text));
    }
    free(body);
}

static void test_nul_is_a_character(void **state)
{
    struct completion c;
    struct tokenize t;
    struct err e;
    const char *text = "{\"prompt\":\"a\\u0000b\"}";

    (void)state;
    accept_body(&c,
                "{\"prompt\":[\"a\\u0000b\",\"\\u0000\"],\"stop\":[\"\\u0000\",\"x\\u0000y\"],"
                "\"bad_words\":[\"\\u0000z\"],\"foo\":\"\\u0000\",\"add_special_tokens\":false}");
    assert_int_equal(c.prompt[0].n, 3);
    assert_int_equal(c.prompt[0].id[1], 0);
    assert_int_equal(c.prompt[0].id[2], 'b');
    assert_int_equal(c.prompt[1].n, 1);
    assert_int_equal(c.params.stop_len[0], 1);
    assert_int_equal(c.params.stop_len[1], 3);
    assert_memory_equal(c.params.stop[1], "x\0y", 4);
    assert_int_equal(c.params.bad_word_len[0], 2);
    assert_memory_equal(c.params.bad_word[0], "\0z", 3);
    completion_release(&c);
    assert_int_equal(tokenize_parse(&t, text, strlen(text), &test_context, &e), 0);
    assert_int_equal(t.n, 4);
    tokenize_release(&t);
}

static void test_beams(void **state)
{
    struct completion c;

    (void)state;
    accept_body(&c, "{\"prompt\":\"x\",\"use_beam_search\":true,\"n\":2,\"beam_width\":4,\"length_"
                    "penalty\":0.5,"
                    "\"early_stopping\":\"never\"}");
    assert_int_equal(c.params.beam_width, 4);
    assert_int_equal(c.params.best_of, 2);
    assert_int_equal(c.params.early_stopping, 2);
    assert_true(c.params.temperature == 0 && c.params.length_penalty == 0.5f);
    completion_release(&c);
    accept_body(&c, "{\"prompt\":\"x\",\"use_beam_search\":true,\"best_of\":3,\"temperature\":0,"
                    "\"stream\":true}");
    assert_int_equal(c.params.beam_width, 3);
    assert_int_equal(c.params.n, 1);
    completion_release(&c);
    accept_body(&c, "{\"prompt\":\"x\",\"length_penalty\":1,\"early_stopping\":false}");
    assert_int_equal(c.params.beam_width, 0);
    completion_release(&c);
}

static void test_unknown_fields_are_named(void **state)
{
    struct completion c;
    struct err e;
    struct api_context strict = test_context;
    const char *body = "{\"prompt\":\"x\",\"Temperature\":9,\"ch\\r\\nunk\":{\"a\":[1]}}";

    (void)state;
    accept_body(&c, body);
    assert_string_equal(c.ignored, "Temperature, ch??unk");
    assert_true(c.params.temperature == 1); /* names are case-sensitive */
    completion_release(&c);
    strict.reject_unknown = true;
    assert_int_equal(completion_parse(&c, body, strlen(body), &strict, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "Temperature"));
}

static void test_lengths(void **state)
{
    struct completion c;

    (void)state;
    /* The default of 16 tokens is lowered for a long prompt. */
    char body[1200] = "{\"add_special_tokens\":false,\"prompt\":\"";
    size_t at = strlen(body);
    memset(body + at, 'a', 990);
    strcpy(body + at + 990, "\"}");
    accept_body(&c, body);
    assert_int_equal(c.params.max_tokens, 10);
    completion_release(&c);
    accept_body(&c, "{\"prompt\":\"x\",\"max_tokens\":0,\"echo\":true}");
    assert_int_equal(c.params.max_tokens, 0);
    completion_release(&c);
}

/* The requests of one body share its parameters, which live as long as the last of
 * them. */
static void test_prompts_share_their_parameters(void **state)
{
    struct completion c;
    struct shared_params *shared;
    struct request *r[2];

    (void)state;
    accept_body(&c, "{\"prompt\":[\"x\",\"yz\"],\"stop\":\"end\",\"bad_words\":[\"b\"],"
                    "\"logit_bias\":{\"1\":1},\"allowed_token_ids\":[3],\"seed\":5}");
    assert_int_equal(shared_params_new(&shared, &c.params, NULL), 0);
    assert_null(c.params.stop);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(request_new_shared(&r[i], shared, c.prompt[i].id, c.prompt[i].n, NULL), 0);
    }
    completion_release(&c);
    shared_params_unref(shared);
    assert_ptr_equal(r[0]->params.allowed_token, r[1]->params.allowed_token);
    assert_ptr_equal(r[0]->stops, r[1]->stops);
    request_unref(r[0]);
    assert_int_equal(r[1]->seed, 5);
    assert_string_equal(r[1]->params.stop[0], "end");
    assert_string_equal(r[1]->params.bad_word[0], "b");
    assert_int_equal(r[1]->params.bias[0].token, 1);
    assert_int_equal(r[1]->params.allowed_token[0], 3);
    request_unref(r[1]);
}

/* ---- the queue is checked first ---- */

struct asked {
    int32_t n[4], n_asked, room, n_encoded;
};

static int count_room(void *arg, int32_t tenant, int32_t n, struct err *e)
{
    struct asked *a = arg;

    assert_int_equal(tenant, 3);
    a->n[a->n_asked++] = n;
    return n > a->room ? err_set(e, ERR_FULL, "the queue is full") : 0;
}

static int count_encode(void *arg, const char *text, size_t len, bool add_special,
                        int32_t max_tokens, int32_t **ret_ids, int32_t *ret_n, struct err *e)
{
    ((struct asked *)arg)->n_encoded++;
    return test_encode(arg, text, len, add_special, max_tokens, ret_ids, ret_n, e);
}

/* Once before the body is parsed, once for all prompts before the first is encoded. */
static void test_the_queue_is_checked_before_the_work(void **state)
{
    struct asked a = {.room = 2};
    struct api_context ctx = test_context;
    struct completion c;
    struct err e;
    const char *three = "{\"prompt\":[\"a\",\"b\",\"c\"]}", *two = "{\"prompt\":[\"a\",\"b\"]}";

    (void)state;
    ctx.check_capacity = count_room;
    ctx.encode = count_encode;
    ctx.tenant = 3;
    ctx.arg = &a;
    assert_int_equal(completion_parse(&c, three, strlen(three), &ctx, &e), ERR_FULL);
    assert_int_equal(a.n_asked, 2);
    assert_int_equal(a.n[0], 1);
    assert_int_equal(a.n[1], 3);
    assert_int_equal(a.n_encoded, 0);
    assert_int_equal(completion_parse(&c, two, strlen(two), &ctx, &e), 0);
    completion_release(&c);
    assert_int_equal(a.n_encoded, 2);
    a = (struct asked){.room = 0};
    assert_int_equal(completion_parse(&c, "{", 1, &ctx, &e), ERR_FULL);
    assert_int_equal(chat_parse(&c, "{", 1, &ctx, &e), ERR_FULL);
    assert_int_equal(http_status_of(ERR_FULL), 429);
}

/* ---- refused bodies ---- */

static void test_refused_json(void **state)
{
    static const struct refusal r[] = {
        {"", "", "ends where a value"},
        {"{", "", "ends where a member's name"},
        {"{\"prompt\":\"x\"", "", "ends where ',' or '}'"},
        {"{\"prompt\":\"x\",}", "", "a member's name"},
        {"{\"prompt\":\"x\"} x", "", "the end of the body"},
        {"{'prompt':1}", "", "a member's name in quotes at byte 1"},
        {"{\"prompt\" 1}", "", "':'"},
        {"{\"a\":[1 2]}", "", "',' or ']'"},
        {"[]", "", "must be a JSON object, not a list"},
        {"\"x\"", "", "not a string"},
        {"nul", "", "a value at byte 0"},
        {"{\"a\":tru}", "", "a value"},
        {"{\"a\":01}", "", "',' or '}'"},
        {"{\"a\":-}", "", "a digit"},
        {"{\"a\":1.}", "", "a digit"},
        {"{\"a\":1e}", "", "a digit"},
        {"{\"a\":NaN}", "", "a value"},
        {"{\"a\":Infinity}", "", "a value"},
        {"{\"a\":\"\x01\"}", "", "control character (0x01)"},
        {"{\"a\":\"\xff\"}", "", "not valid UTF-8 at byte 6"},
        {"{\"a\":\"\xc0\x80\"}", "", "not valid UTF-8"},
        {"{\"a\":\"\xed\xa0\x80\"}", "", "not valid UTF-8"},
        {"{\"a\":\"\xf5\x80\x80\x80\"}", "", "not valid UTF-8"},
        {"{\"a\":\"\xe2\x82\"}", "", "not valid UTF-8"},
        {"{\"a\\u0000\":1}", "", "name holds the character NUL at byte 1"},
        {"{\"a\":\"\\ud800\"}", "", "half of a surrogate pair"},
        {"{\"a\":\"\\udc00\\ud800\"}", "", "half of a surrogate pair"},
        {"{\"a\":\"\\ud800\\u0041\"}", "", "half of a surrogate pair"},
        {"{\"a\":\"\\u12g4\"}", "", "four hexadecimal digits"},
        {"{\"a\":\"\\u12", "", "four hexadecimal digits"},
        {"{\"a\":\"\\x\"}", "", "can be escaped"},
        {"{\"a\":\"x", "", "'\"'"},
        {"{\"prompt\":\"x\",\"n\":1,\"n\":2}", "n", "given twice"},
        {"{\"prompt\":\"x\",\"foo\":1,\"foo\":2}", "", "'foo' is given twice"},
        {"{\"prompt\":\"x\",\"f\\no\":1,\"f\\no\":2}", "", "'f?o' is given twice"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"1\":1,\"2\":1,\"1\":2}}", "logit_bias",
         "logit_bias has an object that gives the member '1' twice"},
        {"{\"prompt\":\"x\",\"foo\":[[{\"a\":{}},{\"b\":{\"c\":0,\"c\":0}}]]}", "foo",
         "gives the member 'c' twice"},
        {"{\"prompt\":\"x\",\"foo\":{\"0\":0,\"1\":0,\"2\":0,\"3\":0,\"4\":0,\"5\":0,\"6\":0,"
         "\"7\":0,\"8\":0,\"9\":0,\"a\":0,\"b\":0,\"c\":0,\"d\":0,\"e\":0,\"f\":0,\"3\":0}}",
         "foo", "gives the member '3' twice"},
    };

    (void)state;
    refuse_all(r, ARRAY_LEN(r), ERR_INVALID);
}

static void test_refused_depth_and_size(void **state)
{
    struct completion c;
    struct err e;
    char deep[400] = "{\"prompt\":\"x\",\"a\":";

    (void)state;
    memset(deep + strlen(deep), '[', 200);
    assert_int_equal(parse(&c, deep, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "deeper than 128"));

    size_t n = (size_t)LIMIT_JSON_VALUES + 10, at = 0;
    char *wide = malloc(2 * n + 20);
    at += (size_t)sprintf(wide, "{\"a\":[1");
    for (size_t i = 0; i < n; i++) {
        at += (size_t)sprintf(wide + at, ",1");
    }
    strcpy(wide + at, "]}");
    assert_int_equal(parse(&c, wide, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "a field of more than 131072 values"));

    memmove(wide + 9, wide + 4, strlen(wide + 4) + 1);
    memcpy(wide, "{\"prompt\"", 9); /* token ids may be more */
    assert_int_equal(parse(&c, wide, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "more than 1048576 values"));

    at = (size_t)sprintf(wide, "{\"a\":[{\"b\":1}");
    for (int i = 0; i < LIMIT_JSON_NAMES / 4; i++) {
        at += (size_t)sprintf(wide + at, ",{\"b\":1,\"c\":1,\"d\":1,\"e\":1}");
    }
    strcpy(wide + at, "]}");
    assert_int_equal(parse(&c, wide, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "more than 65536 members together"));

    at = (size_t)sprintf(wide, "{\"prompt\":\"x\"");
    for (int i = 0; i < LIMIT_JSON_MEMBERS; i++) {
        at += (size_t)sprintf(wide + at, ",\"f%d\":1", i);
    }
    strcpy(wide + at, "}");
    assert_int_equal(parse(&c, wide, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "more than 256 fields"));

    at = (size_t)sprintf(wide, "{\"prompt\":[[1]");
    for (int i = 0; i < LIMIT_PROMPTS; i++) {
        at += (size_t)sprintf(wide + at, ",[1]");
    }
    strcpy(wide + at, "]}");
    assert_int_equal(parse(&c, wide, &e), ERR_INVALID);
    assert_string_equal(e.param, "prompt");
    assert_non_null(strstr(e.text, "at most 1024"));
    free(wide);
}

static void test_refused_fields(void **state)
{
    static const struct refusal r[] = {
        {"{}", "prompt", "prompt is missing"},
        {"{\"prompt\":null}", "prompt", "prompt is missing"},
        {"{\"prompt\":\"\"}", "prompt", "prompt is empty"},
        {"{\"prompt\":[]}", "prompt", "empty list"},
        {"{\"prompt\":[\"a\",\"\"]}", "prompt", "prompt is empty"},
        {"{\"prompt\":[[]]}", "prompt", "0 token ids"},
        {"{\"prompt\":[\"a\",1]}", "prompt", "mixes a string and a number"},
        {"{\"prompt\":[1,\"a\"]}", "prompt", "mixes a number and a string"},
        {"{\"prompt\":[{}]}", "prompt", "not an object"},
        {"{\"prompt\":[null]}", "prompt", "not null"},
        {"{\"prompt\":7}", "prompt", "not a number"},
        {"{\"prompt\":true}", "prompt", "not a boolean"},
        {"{\"prompt\":{}}", "prompt", "not an object"},
        {"{\"prompt\":[256]}", "prompt", "between 0 and 255"},
        {"{\"prompt\":[-1]}", "prompt", "between 0 and 255"},
        {"{\"prompt\":[1,1.5]}", "prompt", "entry 1: prompt is 1.5 but must be an integer"},
        {"{\"prompt\":[1e99]}", "prompt", "between 0 and 255"},
        {"{\"prompt\":[[1],[[2]]]}", "prompt", "not a list"},
        {"{\"prompt\":\"x\",\"max_tokens\":0}", "max_tokens", "0 is allowed with echo"},
        {"{\"prompt\":\"x\",\"max_tokens\":-1}", "max_tokens", "-1 but must be between 0"},
        {"{\"prompt\":\"x\",\"max_tokens\":1.5}", "max_tokens", "must be an integer"},
        {"{\"prompt\":\"x\",\"max_tokens\":\"1\"}", "max_tokens", "not a string"},
        {"{\"prompt\":\"x\",\"max_tokens\":999}", "max_tokens",
         "maximum context length is 1000 tokens"},
        {"{\"prompt\":\"x\",\"max_tokens\":1e300}", "max_tokens", "must be between"},
        {"{\"prompt\":\"x\",\"min_tokens\":20}", "min_tokens", "at most max_tokens"},
        {"{\"prompt\":\"x\",\"min_tokens\":5,\"max_tokens\":4}", "min_tokens",
         "at most max_tokens, which is 4"},
        {"{\"prompt\":\"x\",\"n\":0}", "n", "between 1 and 128"},
        {"{\"prompt\":\"x\",\"n\":129}", "n", "between 1 and 128"},
        {"{\"prompt\":\"x\",\"n\":2,\"temperature\":0}", "n", "all samples would be equal"},
        {"{\"prompt\":\"x\",\"best_of\":2,\"temperature\":0}", "best_of",
         "all samples would be equal"},
        {"{\"prompt\":\"x\",\"n\":3,\"best_of\":2}", "best_of", "at least n, which is 3"},
        {"{\"prompt\":\"x\",\"best_of\":2,\"stream\":true}", "best_of", "must equal n"},
        {"{\"prompt\":\"x\",\"beam_width\":2}", "beam_width", "needs use_beam_search"},
        {"{\"prompt\":\"x\",\"length_penalty\":2}", "length_penalty", "needs use_beam_search"},
        {"{\"prompt\":\"x\",\"early_stopping\":true}", "early_stopping", "needs use_beam_search"},
        {"{\"prompt\":\"x\",\"use_beam_search\":true,\"early_stopping\":\"often\"}",
         "early_stopping", "\"never\""},
        {"{\"prompt\":\"x\",\"use_beam_search\":true,\"temperature\":0.5}", "temperature",
         "other than 0"},
        {"{\"prompt\":\"x\",\"use_beam_search\":true,\"n\":3,\"beam_width\":2}", "beam_width",
         "at least n"},
        {"{\"prompt\":\"x\",\"use_beam_search\":true,\"best_of\":3,\"beam_width\":2}", "best_of",
         "differ"},
        {"{\"prompt\":\"x\",\"use_beam_search\":1}", "use_beam_search",
         "true or false, not a number"},
        {"{\"prompt\":\"x\",\"temperature\":-0.1}", "temperature", "at least 0 and at most 2"},
        {"{\"prompt\":\"x\",\"temperature\":2.1}", "temperature", "at most 2"},
        {"{\"prompt\":\"x\",\"temperature\":\"hot\"}", "temperature",
         "must be a number, not a string"},
        {"{\"prompt\":\"x\",\"top_p\":0}", "top_p", "greater than 0"},
        {"{\"prompt\":\"x\",\"top_p\":1e-60}", "top_p", "greater than 0"},
        {"{\"prompt\":\"x\",\"top_p\":1.01}", "top_p", "at most 1"},
        {"{\"prompt\":\"x\",\"top_k\":-2}", "top_k", "between -1"},
        {"{\"prompt\":\"x\",\"min_p\":1.5}", "min_p", "at most 1"},
        {"{\"prompt\":\"x\",\"presence_penalty\":3}", "presence_penalty", "at most 2"},
        {"{\"prompt\":\"x\",\"frequency_penalty\":-3}", "frequency_penalty", "at least -2"},
        {"{\"prompt\":\"x\",\"repetition_penalty\":0}", "repetition_penalty", "at least 0.001"},
        {"{\"prompt\":\"x\",\"repetition_penalty\":1e-38}", "repetition_penalty", "at least 0.001"},
        {"{\"prompt\":\"x\",\"repetition_penalty\":1e300}", "repetition_penalty", "at most 1000"},
        {"{\"prompt\":\"x\",\"use_beam_search\":true,\"length_penalty\":-1e300}", "length_penalty",
         "finite"},
        {"{\"prompt\":\"x\",\"logit_bias\":[1]}", "logit_bias", "not a list"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"256\":1}}", "logit_bias",
         "'256'; keys are token ids, 0 to 255"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"-1\":1}}", "logit_bias", "'-1'"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\" 1\":1}}", "logit_bias", "' 1'"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"\":1}}", "logit_bias", "''"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"99999999999\":1}}", "logit_bias", "99999999999"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"1\":101}}", "logit_bias", "-100 to 100"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"1\":\"a\"}}", "logit_bias", "must be a number"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"1\":1,\"01\":2}}", "logit_bias",
         "names token 1 twice"},
        {"{\"prompt\":\"x\",\"seed\":1.5}", "seed", "integer of 64 bits"},
        {"{\"prompt\":\"x\",\"seed\":1e-3}", "seed", "integer of 64 bits"},
        {"{\"prompt\":\"x\",\"seed\":0.1e0}", "seed",
         "seed is 0.1e0 but must be an integer of 64 bits"},
        {"{\"prompt\":\"x\",\"seed\":1e400}", "seed", "from -2^63 to 2^64 - 1"},
        {"{\"prompt\":\"x\",\"seed\":1e99999999999999999999}", "seed", "from -2^63 to 2^64 - 1"},
        {"{\"prompt\":\"x\",\"seed\":18446744073709551615.5}", "seed", "integer of 64 bits"},
        {"{\"prompt\":\"x\",\"seed\":"
         "1000000000000000000000000000000000000000000000000000000000000000000}",
         "seed", "1000000000000000000000000000000000000000... (67 characters)"},
        {"{\"prompt\":\"x\",\"n\":1.00000000000000000001}", "n", "must be an integer"},
        {"{\"prompt\":\"x\",\"n\":0.99999999999999999999}", "n", "must be an integer"},
        {"{\"prompt\":\"x\",\"max_tokens\":1e-400}", "max_tokens",
         "is 1e-400 but must be an integer"},
        {"{\"prompt\":\"x\",\"max_tokens\":4294967297}", "max_tokens", "must be between"},
        {"{\"prompt\":\"x\",\"max_tokens\":18446744073709551617}", "max_tokens", "must be between"},
        {"{\"prompt\":\"x\",\"top_k\":-1e30}", "top_k", "-1e30 but must be between"},
        {"{\"prompt\":\"x\",\"temperature\":1e400}", "temperature",
         "temperature is 1e400 but must be at least 0"},
        {"{\"prompt\":\"x\",\"top_p\":1e999}", "top_p", "at most 1"},
        {"{\"prompt\":\"x\",\"logit_bias\":{\"1\":-1e999}}", "logit_bias", "-100 to 100"},
        {"{\"prompt\":\"x\",\"model\":\"m\\u0000\"}", "model", "holds the character NUL"},
        {"{\"prompt\":\"x\",\"cache_salt\":\"m\\u0000\"}", "cache_salt", "holds the character NUL"},
        {"{\"prompt\":\"x\",\"request_id\":\"m\\u0000\"}", "request_id", "letters, digits"},
        {"{\"prompt\":\"x\",\"use_beam_search\":true,\"early_stopping\":\"never\\u0000\"}",
         "early_stopping", "\"never\""},
        {"{\"prompt\":\"x\",\"seed\":\"1\"}", "seed", "not a string"},
        {"{\"prompt\":\"x\",\"seed\":18446744073709551616}", "seed", "from -2^63 to 2^64 - 1"},
        {"{\"prompt\":\"x\",\"seed\":-9223372036854775809}", "seed", "from -2^63 to 2^64 - 1"},
        {"{\"prompt\":\"x\",\"stop\":\"\"}", "stop", "0 bytes"},
        {"{\"prompt\":\"x\",\"stop\":[\"a\",1]}", "stop", "must hold strings, not a number"},
        {"{\"prompt\":\"x\",\"stop\":5}", "stop", "a list of strings or a string"},
        {"{\"prompt\":\"x\",\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"0\","
         "\"1\",\"2\",\"3\","
         "\"4\",\"5\",\"6\",\"7\"]}",
         "stop", "17 entries; at most 16"},
        {"{\"prompt\":\"x\",\"bad_words\":\"w\"}", "bad_words", "a list of strings, not a string"},
        {"{\"prompt\":\"x\",\"bad_words\":[\"\"]}", "bad_words", "0 bytes"},
        {"{\"prompt\":\"x\",\"stop_token_ids\":[256]}", "stop_token_ids", "between 0 and 255"},
        {"{\"prompt\":\"x\",\"stop_token_ids\":7}", "stop_token_ids", "not a number"},
        {"{\"prompt\":\"x\",\"allowed_token_ids\":[]}", "allowed_token_ids", "0 token ids"},
        {"{\"prompt\":\"x\",\"allowed_token_ids\":[300]}", "allowed_token_ids",
         "between 0 and 255"},
        {"{\"prompt\":\"x\",\"echo\":\"yes\"}", "echo", "not a string"},
        {"{\"prompt\":\"x\",\"logprobs\":21}", "logprobs", "between 0 and 20"},
        {"{\"prompt\":\"x\",\"logprobs\":-1}", "logprobs", "between 0 and 20"},
        {"{\"prompt\":\"x\",\"logprobs\":true}", "logprobs", "not a boolean"},
        {"{\"prompt\":\"x\",\"prompt_logprobs\":21}", "prompt_logprobs", "between 0 and 20"},
        {"{\"prompt\":\"x\",\"stream\":1}", "stream", "not a number"},
        {"{\"prompt\":\"x\",\"stream_options\":{\"include_usage\":true}}", "stream_options",
         "needs stream"},
        {"{\"prompt\":\"x\",\"stream\":true,\"stream_options\":1}", "stream_options",
         "must be an object"},
        {"{\"prompt\":\"x\",\"stream\":true,\"stream_options\":{\"include_usage\":1}}",
         "stream_options", "true or false"},
        {"{\"prompt\":\"x\",\"truncate_prompt_tokens\":0}", "truncate_prompt_tokens", "between 1"},
        {"{\"prompt\":\"x\",\"priority\":3000000000}", "priority", "between"},
        {"{\"prompt\":\"x\",\"cache_salt\":\"\"}", "cache_salt", "0 bytes"},
        {"{\"prompt\":\"x\",\"cache_salt\":1}", "cache_salt", "not a number"},
        {"{\"prompt\":\"x\",\"user\":1}", "user", "not a number"},
        {"{\"prompt\":\"x\",\"request_id\":\"a b\"}", "request_id", "letters, digits"},
        {"{\"prompt\":\"x\",\"request_id\":\"\"}", "request_id", "letters, digits"},
        {"{\"prompt\":\"x\",\"request_id\":5}", "request_id", "not a number"},
        {"{\"prompt\":\"x\",\"suffix\":5}", "suffix", "not a number"},
        {"{\"prompt\":\"x\",\"response_format\":\"json\"}", "response_format",
         "an object with a type"},
        {"{\"prompt\":\"x\",\"model\":5}", "model", "not a number"},
    };

    (void)state;
    refuse_all(r, ARRAY_LEN(r), ERR_INVALID);
}

static void test_refused_features(void **state)
{
    static const struct refusal r[] = {
        {"{\"prompt\":\"x\",\"suffix\":\"y\"}", "suffix", "fill-in-the-middle"},
        {"{\"prompt\":\"x\",\"response_format\":{\"type\":\"xml\"}}", "response_format",
         "'xml' is not supported"},
        {"{\"prompt\":\"x\",\"guided_json\":{}}", "guided_json", "no constrained output"},
        {"{\"prompt\":\"x\",\"guided_whitespace_pattern\":\"\"}", "guided_whitespace_pattern",
         "not supported"},
        {"{\"prompt\":\"x\",\"logits_processors\":[]}", "logits_processors", "not supported"},
    };
    static const struct refusal model[] = {
        {"{\"prompt\":\"x\",\"model\":\"gpt-4\"}", "model", "'gpt-4' is not served here; 'm' is"}};

    (void)state;
    refuse_all(r, ARRAY_LEN(r), ERR_UNSUPPORTED);
    refuse_all(model, ARRAY_LEN(model), ERR_NOT_FOUND);
}

static void test_suffix(void **state)
{
    struct api_context context = test_context;
    struct completion c;
    struct err e;

    (void)state;
    context.fim = (struct engine_fim){
        .there = true, .prefix = 200, .suffix = 201, .middle = 202, .end = 203, .bos = 1};
    const char *body = "{\"prompt\":[\"ab\",\"c\"],\"suffix\":\"yz\",\"stop_token_ids\":[9]}";
    assert_int_equal(completion_parse(&c, body, strlen(body), &context, &e), 0);
    const int32_t first[] = {1, 200, 'a', 'b', 201, 'y', 'z', 202},
                  second[] = {1, 200, 'c', 201, 'y', 'z', 202};
    assert_int_equal(c.prompt[0].n, ARRAY_LEN(first));
    assert_memory_equal(c.prompt[0].id, first, sizeof(first));
    assert_int_equal(c.prompt[1].n, ARRAY_LEN(second));
    assert_memory_equal(c.prompt[1].id, second, sizeof(second));
    assert_int_equal(c.params.n_stop_token, 2);
    assert_int_equal(c.params.stop_token[1], 203);
    completion_release(&c);
    body = "{\"prompt\":[7,8],\"suffix\":\"y\"}";
    assert_int_equal(completion_parse(&c, body, strlen(body), &context, &e), 0);
    const int32_t of_ids[] = {200, 7, 8, 201, 'y', 202};
    assert_int_equal(c.prompt[0].n, ARRAY_LEN(of_ids));
    assert_memory_equal(c.prompt[0].id, of_ids, sizeof(of_ids));
    completion_release(&c);
    static const char *const refused[] = {
        "{\"prompt\":\"x\",\"suffix\":\"y\",\"echo\":true}",
        "{\"prompt\":\"x\",\"suffix\":\"y\",\"truncate_prompt_tokens\":3}"};
    for (size_t i = 0; i < ARRAY_LEN(refused); i++) {
        assert_int_equal(completion_parse(&c, refused[i], strlen(refused[i]), &context, &e),
                         ERR_INVALID);
    }
}

static void test_refused_long_prompt(void **state)
{
    struct completion c;
    struct err e;
    char body[2200] = "{\"prompt\":\"";

    (void)state;
    memset(body + strlen(body), 'a', 2000);
    strcat(body, "\"}");
    assert_int_equal(parse(&c, body, &e), ERR_INVALID);
    assert_string_equal(e.param, "prompt");
    assert_non_null(strstr(e.text, "prompt is too long: at least 1001 tokens > 1000 maximum"));
    body[strlen(body) - 1] = '\0';
    strcat(body, ",\"truncate_prompt_tokens\":50}");
    accept_body(&c, body);
    assert_int_equal(c.prompt[0].n, 50);
    completion_release(&c);
}

static void test_too_many_sequences(void **state)
{
    struct completion c;
    struct err e;
    char body[300] = "{\"n\":128,\"prompt\":[\"a\"";

    (void)state;
    for (int i = 0; i < 32; i++) {
        strcat(body, ",\"a\"");
    }
    strcat(body, "]}");
    assert_int_equal(parse(&c, body, &e), ERR_INVALID);
    assert_string_equal(e.param, "n");
    assert_non_null(strstr(e.text, "4224 sequences; at most 4096"));
}

/* ---- /tokenize and /detokenize ---- */

static void test_tokenize(void **state)
{
    struct tokenize t;
    struct err e = {0};
    const char *body = "{\"prompt\":\"ab\",\"return_token_strs\":true}",
               *empty = "{\"prompt\":\"\"}", *ids = "{\"tokens\":[5,6]}";

    (void)state;
    assert_int_equal(tokenize_parse(&t, body, strlen(body), &test_context, &e), 0);
    assert_int_equal(t.n, 3);
    assert_true(t.return_strings);
    tokenize_release(&t);
    assert_int_equal(tokenize_parse(&t, empty, strlen(empty), &test_context, &e), 0);
    assert_int_equal(t.n, 0);
    tokenize_release(&t);
    assert_int_equal(detokenize_parse(&t, "{\"tokens\":[]}", 13, &test_context, &e), 0);
    assert_int_equal(t.n, 0);
    tokenize_release(&t);
    assert_int_equal(tokenize_parse(&t, "{}", 2, &test_context, &e), ERR_INVALID);
    assert_string_equal(e.text, "prompt is missing");
    assert_int_equal(tokenize_parse(&t, "{\"prompt\":1}", 12, &test_context, &e), ERR_INVALID);
    assert_int_equal(detokenize_parse(&t, ids, strlen(ids), &test_context, &e), 0);
    assert_int_equal(t.n, 2);
    assert_int_equal(t.id[1], 6);
    tokenize_release(&t);
    assert_int_equal(detokenize_parse(&t, "{\"tokens\":[256]}", 16, &test_context, &e),
                     ERR_INVALID);
    assert_string_equal(e.param, "tokens");
}

/* ---- responses ---- */

static void test_error_body(void **state)
{
    struct buf b;

    (void)state;
    buf_init(&b, 10000);
    api_error(&b, 400, "n", "say \"1\"");
    assert_string_equal(
        b.data, "{\"error\":{\"message\":\"say "
                "\\\"1\\\"\",\"type\":\"invalid_request_error\",\"param\":\"n\",\"code\":400}}");
    buf_clear(&b);
    api_error(&b, 429, NULL, "full");
    assert_string_equal(b.data, "{\"error\":{\"message\":\"full\",\"type\":\"rate_limit_error\","
                                "\"param\":null,\"code\":429}}");
    buf_release(&b);
}

static void test_openapi_is_json(void **state)
{
    struct buf b;
    struct err e = {0};
    cJSON *tree;

    (void)state;
    buf_init(&b, 1 << 20);
    api_openapi(&b, &test_context);
    if (json_parse(&tree, b.data, b.len, &e)) {
        fail_msg("%s", e.text);
    }
    const cJSON *schemas = cJSON_GetObjectItem(cJSON_GetObjectItem(tree, "components"), "schemas");
    const cJSON *properties =
        cJSON_GetObjectItem(cJSON_GetObjectItem(schemas, "completion"), "properties");
    assert_non_null(cJSON_GetObjectItem(properties, "repetition_penalty"));
    assert_non_null(strstr(b.data, "\"maximum\":255"));
    assert_null(strchr(b.data, '@'));
    /* fields that are not supported are not listed */
    assert_null(cJSON_GetObjectItem(properties, "logits_processors"));
    cJSON_Delete(tree);
    buf_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_stand),
        cmocka_unit_test(test_every_field_arrives),
        cmocka_unit_test(test_null_means_not_given),
        cmocka_unit_test(test_prompt_forms),
        cmocka_unit_test(test_seed_is_exact),
        cmocka_unit_test(test_prompts_without_a_seed_share_none),
        cmocka_unit_test(test_long_numbers),
        cmocka_unit_test(test_nul_is_a_character),
        cmocka_unit_test(test_beams),
        cmocka_unit_test(test_unknown_fields_are_named),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_prompts_share_their_parameters),
        cmocka_unit_test(test_the_queue_is_checked_before_the_work),
        cmocka_unit_test(test_refused_json),
        cmocka_unit_test(test_refused_depth_and_size),
        cmocka_unit_test(test_refused_fields),
        cmocka_unit_test(test_refused_features),
        cmocka_unit_test(test_suffix),
        cmocka_unit_test(test_refused_long_prompt),
        cmocka_unit_test(test_too_many_sequences),
        cmocka_unit_test(test_tokenize),
        cmocka_unit_test(test_error_body),
        cmocka_unit_test(test_openapi_is_json),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
