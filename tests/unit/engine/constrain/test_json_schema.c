/* JSON Schemas: which texts each accepts and refuses, byte by byte; what is refused by
 * name. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/byte_vocab.h"

static int compile(struct grammar **ret, const char *schema, size_t len, struct err *e)
{
    struct grammar_limits l;

    grammar_limits_init(&l);
    *e = (struct err){0};
    return grammar_new(ret, vocab, GRAMMAR_JSON_SCHEMA, schema, len, &l, e);
}

static bool accepts(struct grammar *g, const char *text)
{
    struct constraint *c = NULL;
    struct err e = {0};
    bool fine = true;

    assert_int_equal(constraint_new(&c, g, &e), 0);
    for (; *text && fine; text++) {
        fine = constraint_accept(c, (uint8_t)*text, &(int64_t){INT64_MAX}) == 0;
    }
    fine = fine && constraint_complete(c);
    constraint_free(c);
    return fine;
}

/* ---- the table ---- */

struct row {
    const char *schema;
    const char *yes[6], *no[8]; /* texts, up to the first NULL */
};

static void check_rows(const struct row *row, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct grammar *g = NULL;
        struct err e;
        if (compile(&g, row[i].schema, strlen(row[i].schema), &e) != 0) {
            fail_msg("%s: %s", row[i].schema, e.text);
        }
        for (int k = 0; k < 6 && row[i].yes[k]; k++) {
            if (!accepts(g, row[i].yes[k])) {
                fail_msg("%s refuses %s", row[i].schema, row[i].yes[k]);
            }
        }
        for (int k = 0; k < 8 && row[i].no[k]; k++) {
            if (accepts(g, row[i].no[k])) {
                fail_msg("%s accepts %s", row[i].schema, row[i].no[k]);
            }
        }
        grammar_unref(g);
    }
}

static void types_and_constants(void **state)
{
    static const struct row ROWS[] = {
        {"true",
         {"1", "{}", "[ 1, {\"a\" : null}]", "\"x\""},
         {"", "tru", "{,}", "01", " 1", "1 "}},
        {"{\"type\":\"string\"}", {"\"\"", "\"\\u00e9\\n\""}, {"1", "\"\n\"", "\"\\x\"", "null"}},
        {"{\"type\":[\"null\",\"boolean\"]}", {"null", "true", "false"}, {"0", "\"null\""}},
        {"{\"type\":\"integer\"}", {"0", "-12", "100"}, {"1.5", "1e3", "\"1\"", "-"}},
        {"{\"enum\":[1,\"a\\\"b\",null,[1,{\"k\":2}]]}",
         {"1", "\"a\\\"b\"", "null", "[1, {\"k\": 2}]"},
         {"2", "\"a\"", "[1]", "[1,{\"k\":2,\"l\":3}]"}},
        {"{\"const\":{\"a\":\"x\"}}",
         {"{\"a\":\"x\"}"},
         {"{}", "{\"a\":\"y\"}", "{\"a\":\"x\",\"b\":1}"}},
        {"{\"title\":\"t\",\"default\":1,\"format\":\"whatever\",\"x-own\":[]}",
         {"1", "\"\""},
         {"}"}},
    };

    (void)state;
    check_rows(ROWS, ARRAY_LEN(ROWS));
}

static void numbers(void **state)
{
    static const struct row ROWS[] = {
        {"{\"type\":\"integer\",\"minimum\":-3,\"maximum\":120}",
         {"-3", "0", "7", "99", "120", "-0"},
         {"-4", "121", "1000", "-10"}},
        {"{\"type\":\"number\",\"exclusiveMinimum\":0.5,\"maximum\":10.25}",
         {"0.51", "1", "10.25", "10.250", "9.999"},
         {"0.5", "0.50", "0", "-1", "10.26", "11", "100"}},
        {"{\"type\":\"number\",\"minimum\":0}",
         {"0", "-0", "1e-7", "2.5E+3"},
         {"-1", "-0.1", "-1e3"}},
        {"{\"type\":\"number\",\"exclusiveMaximum\":0}",
         {"-1", "-1e9"},
         {"0", "-0", "1", "-0.0e3"}},
        {"{\"maximum\":10,\"exclusiveMaximum\":true,\"type\":\"integer\"}",
         {"9", "-50"},
         {"10", "11"}},
        {"{\"type\":\"number\",\"multipleOf\":0.01}",
         {"1", "1.5", "1.25", "1.250"},
         {"1.255", "0.001"}},
        {"{\"type\":\"integer\",\"multipleOf\":25}",
         {"0", "25", "-100", "1075"},
         {"5", "26", "10"}},
        {"{\"type\":\"integer\",\"multipleOf\":16,\"minimum\":-2032,\"maximum\":4096}",
         {"0", "-16", "112", "1008", "4096"},
         {"8", "24", "100", "4112", "-2048"}},
        {"{\"type\":\"integer\",\"multipleOf\":64}",
         {"64", "-1000000", "123456"},
         {"32", "100", "123455", "-96", "064"}},
        {"{\"multipleOf\":2.5,\"type\":\"number\"}", {"5", "2.5", "7.50"}, {"2", "2.55", "3.5"}},
        {"{\"const\":1e2}", {"100"}, {"1", "1000"}},
    };

    (void)state;
    check_rows(ROWS, ARRAY_LEN(ROWS));
}

static void strings(void **state)
{
    static const struct row ROWS[] = {
        {"{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
         {"\"ab\"", "\"\xc3\xa9\xc3\xa9\xc3\xa9\"", "\"a\\n\""},
         {"\"a\"", "\"abcd\""}},
        {"{\"type\":\"string\",\"pattern\":\"^a+$\"}", {"\"aa\""}, {"\"\"", "\"ab\""}},
        {"{\"type\":\"string\",\"pattern\":\"b\"}", {"\"abc\"", "\"b\""}, {"\"ac\""}},
        {"{\"type\":\"string\",\"format\":\"date\"}",
         {"\"2024-02-29\"", "\"1999-12-31\""},
         {"\"2023-02-29\"", "\"2024-13-01\"", "\"2024-1-01\"", "\"1900-02-29\""}},
        {"{\"type\":\"string\",\"format\":\"date-time\"}",
         {"\"2024-02-29T23:59:59.5Z\"", "\"2024-02-29T00:00:00+05:30\""},
         {"\"2024-02-29\"", "\"2024-02-29T24:00:00Z\""}},
        {"{\"type\":\"string\",\"format\":\"ipv4\"}",
         {"\"127.0.0.1\""},
         {"\"256.0.0.1\"", "\"1.2.3\""}},
        {"{\"type\":\"string\",\"format\":\"ipv6\"}",
         {"\"::1\"", "\"1:2::8\""},
         {"\":1\"", "\"1::2::3\""}},
        {"{\"type\":\"string\",\"format\":\"uuid\"}",
         {"\"2eb8aa08-aa98-11ea-b4aa-73b441d16380\""},
         {"\"2eb8aa08aa9811eab4aa73b441d16380\""}},
        {"{\"type\":\"string\",\"format\":\"email\"}",
         {"\"a.b@c.de\""},
         {"\"a\"", "\"a..b@c.de\""}},
        {"{\"type\":\"string\",\"format\":\"uri\"}",
         {"\"https://a.b/c?d#e\""},
         {"\"//a.b\"", "\"a b:c\""}},
        {"{\"type\":\"string\",\"format\":\"hostname\"}",
         {"\"a-b.example\""},
         {"\"-a\"", "\"a..b\""}},
        {"{\"type\":\"string\",\"format\":\"duration\"}",
         {"\"P1DT2H\"", "\"P4W\""},
         {"\"P\"", "\"PT1D\""}},
    };

    (void)state;
    check_rows(ROWS, ARRAY_LEN(ROWS));
}

static void objects(void **state)
{
    static const struct row ROWS[] = {
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":"
         "\"string\"}},"
         "\"required\":[\"b\"]}",
         {"{\"b\":\"x\"}", "{ \"a\" : 1, \"b\": \"x\" }", "{\"a\":1,\"b\":\"x\",\"c\":[]}"},
         {"{}", "{\"a\":1}", "{\"a\":\"1\",\"b\":\"x\"}", "{\"b\":\"x\",\"a\":1}", "[]"}},
        {"{\"properties\":{\"a\":{}},\"additionalProperties\":false,\"type\":\"object\"}",
         {"{}", "{\"a\":0}", "{\n    \"a\": 0\n}"},
         {"{\"b\":0}", "{\"a\":0,}", "{\"\\u0062\":0}"}},
        {"{\"type\":\"object\",\"patternProperties\":{\"^n\":{\"type\":\"integer\"},\"x$\":{"
         "\"minimum\":5}},"
         "\"additionalProperties\":{\"type\":\"null\"}}",
         {"{\"n\":1}", "{\"nx\":5}", "{\"x\":\"t\"}", "{\"q\":null}"},
         {"{\"n\":\"1\"}", "{\"nx\":4}", "{\"x\":1}", "{\"q\":1}"}},
        {"{\"type\":\"object\",\"propertyNames\":{\"maxLength\":1}}",
         {"{}", "{\"a\":1,\"b\":2}"},
         {"{\"ab\":1}"}},
        {"{\"type\":\"object\",\"minProperties\":1,\"maxProperties\":2}",
         {"{\"a\":1}", "{\"a\":1,\"b\":2}"},
         {"{}", "{\"a\":1,\"b\":2,\"c\":3}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{},\"c\":{}},\"minProperties\":2,"
         "\"additionalProperties\":false}",
         {"{\"a\":1,\"b\":1}", "{\"b\":1,\"c\":1}", "{\"a\":1,\"b\":1,\"c\":1}"},
         {"{}", "{\"a\":1}"}},
        {"{\"type\":\"object\",\"maxProperties\":0}", {"{}"}, {"{\"a\":1}"}},
        {"{\"type\":\"object\",\"dependentRequired\":{\"a\":[\"b\"]},\"properties\":{\"a\":{},"
         "\"b\":{}}}",
         {"{}", "{\"b\":1}", "{\"a\":1,\"b\":1}"},
         {"{\"a\":1}"}},
    };

    (void)state;
    check_rows(ROWS, ARRAY_LEN(ROWS));
}

static void arrays(void **state)
{
    static const struct row ROWS[] = {
        {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":1,\"maxItems\":3}",
         {"[1]", "[1, 2,3]"},
         {"[]", "[1,2,3,4]", "[\"1\"]", "[1,]"}},
        {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"null\"},{\"type\":\"integer\"}],"
         "\"items\":false}",
         {"[]", "[null]", "[null,1]"},
         {"[1]", "[null,1,1]"}},
        {"{\"$schema\":\"http://json-schema.org/draft-07/schema#\",\"type\":\"array\","
         "\"items\":[{\"const\":1}],\"additionalItems\":{\"const\":2}}",
         {"[]", "[1]", "[1,2,2]"},
         {"[2]", "[1,1]"}},
        {"{\"type\":\"array\",\"contains\":{\"const\":5}}", {"[5]", "[1,5,2]"}, {"[]", "[1]"}},
        {"{\"type\":\"array\",\"contains\":{\"const\":5},\"minContains\":2,\"maxContains\":2}",
         {"[5,5]", "[5,1,5]"},
         {"[5]", "[5,5,5]"}},
        {"{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"b\",\"c\"]},\"uniqueItems\":true}",
         {"[]", "[\"a\"]", "[\"c\",\"a\"]", "[\"a\", \"b\" ,\"c\"]"},
         {"[\"a\",\"a\"]", "[\"a\",\"b\",\"a\"]", "[\"d\"]"}},
    };

    (void)state;
    check_rows(ROWS, ARRAY_LEN(ROWS));
}

static void combinations(void **state)
{
    static const struct row ROWS[] = {
        {"{\"allOf\":[{\"type\":\"integer\"},{\"minimum\":2}],\"maximum\":4}",
         {"2", "4"},
         {"1", "5", "2.5"}},
        {"{\"anyOf\":[{\"type\":\"integer\"},{\"minimum\":2}]}", {"1", "2.5", "\"x\""}, {"1.5"}},
        {"{\"oneOf\":[{\"type\":\"integer\"},{\"minimum\":2}]}", {"1", "2.5", "[]"}, {"3", "1.5"}},
        {"{\"oneOf\":[{\"multipleOf\":2},{\"multipleOf\":5}],\"type\":\"integer\"}",
         {"2", "5", "15"},
         {"10", "3"}},
        {"{\"not\":{\"type\":\"string\"}}", {"1", "{}"}, {"\"x\""}},
        {"{\"type\":\"string\",\"not\":{\"enum\":[\"a\",\"b\"]}}",
         {"\"c\"", "\"aa\""},
         {"\"a\"", "\"b\""}},
        {"{\"type\":\"object\",\"not\":{\"required\":[\"a\"]}}",
         {"{}", "{\"b\":1}"},
         {"{\"a\":1}"}},
        {"{\"not\":{\"properties\":{\"a\":{\"type\":\"integer\"}},\"type\":\"object\"}}",
         {"{\"a\":\"x\"}", "1"},
         {"{}", "{\"a\":1}"}},
        {"{\"type\":\"object\",\"properties\":{\"k\":{\"enum\":[\"x\",\"y\"]}},\"required\":[\"k\"]"
         ","
         "\"if\":{\"properties\":{\"k\":{\"const\":\"x\"}}},\"then\":{\"required\":[\"v\"]},"
         "\"else\":{\"properties\":{\"v\":false}}}",
         {"{\"k\":\"x\",\"v\":1}", "{\"k\":\"y\"}"},
         {"{\"k\":\"x\"}", "{\"k\":\"y\",\"v\":1}"}},
        {"{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"t\":{\"const\":\"a\"},\"n\":{\"type\":"
         "\"integer\"}},"
         "\"required\":[\"t\"]},{\"type\":\"object\",\"properties\":{\"t\":{\"const\":\"b\"}},"
         "\"required\":[\"t\"]}]}",
         {"{\"t\":\"a\",\"n\":1}", "{\"t\":\"b\",\"n\":\"s\"}"},
         {"{\"t\":\"a\",\"n\":\"s\"}", "{\"t\":\"c\"}", "{}"}},
    };

    (void)state;
    check_rows(ROWS, ARRAY_LEN(ROWS));
}

static void references(void **state)
{
    static const struct row ROWS[] = {
        {"{\"$defs\":{\"n\":{\"type\":\"integer\"}},\"type\":\"array\",\"items\":{\"$ref\":\"#/"
         "$defs/n\"}}",
         {"[1,2]"},
         {"[\"1\"]"}},
        {"{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},\"next\":{\"$ref\":\"#"
         "\"}},"
         "\"required\":[\"v\"],\"additionalProperties\":false}",
         {"{\"v\":1}", "{\"v\":1,\"next\":{\"v\":2,\"next\":{\"v\":3}}}"},
         {"{\"v\":1,\"next\":{}}", "{\"v\":1,\"next\":1}"}},
        {"{\"$id\":\"http://x.test/a/root.json\",\"$defs\":{\"q\":{\"$id\":\"q.json\",\"$defs\":{"
         "\"s\":{\"$anchor\":\"here\",\"type\":\"null\"}}}},\"$ref\":\"q.json#here\"}",
         {"null"},
         {"1"}},
        {"{\"$ref\":\"#/$defs/a~1b%25\",\"$defs\":{\"a/b%\":{\"const\":7}}}", {"7"}, {"8"}},
        {"{\"$schema\":\"http://json-schema.org/draft-07/"
         "schema#\",\"definitions\":{\"n\":{\"type\":"
         "\"integer\"}},\"$ref\":\"#/definitions/n\",\"minimum\":5}",
         {"1"},
         {"\"x\""}},
    };

    (void)state;
    check_rows(ROWS, ARRAY_LEN(ROWS));
}

/* ---- refused ---- */

static void refused_by_name(void **state)
{
    static const struct {
        const char *schema;
        int code;
        const char *says;
    } ROWS[] = {
        {"{\"allOf\":[{}],\"unevaluatedProperties\":false}", ERR_UNSUPPORTED,
         "'unevaluatedProperties'"},
        {"{\"type\":\"array\",\"items\":{\"type\":\"string\"},\"uniqueItems\":true}",
         ERR_UNSUPPORTED, "'uniqueItems'"},
        {"{\"$recursiveRef\":\"#\"}", ERR_UNSUPPORTED, "'$recursiveRef'"},
        {"{\"disallow\":\"string\"}", ERR_UNSUPPORTED, "'disallow'"},
        {"{\"type\":\"object\",\"minProperties\":2}", ERR_UNSUPPORTED, "'minProperties'"},
        {"{\"format\":\"regex\"}", ERR_UNSUPPORTED, "regex"},
        {"{\"not\":{\"format\":\"email\"}}", ERR_UNSUPPORTED, "'format'"},
        {"{\"$ref\":\"http://x.test/other.json\"}", ERR_UNSUPPORTED, "http://x.test/other.json"},
        {"{\"$ref\":\"#\"}", ERR_INVALID, "leads back"},
        {"{\"type\":\"any\"}", ERR_INVALID, "'type'"},
        {"{\"required\":true}", ERR_INVALID, "'required'"},
        {"{\"minLength\":-1}", ERR_INVALID, "'minLength'"},
        {"{\"anyOf\":[]}", ERR_INVALID, "'anyOf'"},
        {"{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", ERR_INVALID, "no value"},
        {"false", ERR_INVALID, "no value"},
        {"{\"type\":\"object\",\"required\":[\"a\"],\"properties\":{\"a\":{\"$ref\":\"#\"}}}",
         ERR_INVALID, "no "},
        {"3", ERR_INVALID, "a schema"},
        {"", ERR_INVALID, "expected"},
        {"{\"minimum\":NaN}", ERR_INVALID, "NaN"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(ROWS); i++) {
        struct grammar *g = NULL;
        struct err e;
        int rc = compile(&g, ROWS[i].schema, strlen(ROWS[i].schema), &e);
        if (rc != ROWS[i].code || !strstr(e.text, ROWS[i].says)) {
            fail_msg("%s: %d %s", ROWS[i].schema, rc, e.text);
        }
    }
}

/* ---- white space ---- */

static bool allowed(struct constraint *c, uint8_t byte)
{
    return constraint_allows(c, byte);
}

/* White space wherever it may be, else a byte that ends what was begun. In a string
 * there is none but its own. */
static int greedy_byte(struct constraint *c, bool in_string)
{
    static const char blanks[] = "\n\t ", others[] = "\"}]:,1{[";

    for (const char *b = in_string ? "" : blanks; *b; b++) {
        if (allowed(c, (uint8_t)*b)) {
            return *b;
        }
    }
    for (const char *b = others; *b; b++) {
        if (allowed(c, (uint8_t)*b)) {
            return *b;
        }
    }
    for (int b = 'a'; b <= 'z'; b++) {
        if (allowed(c, (uint8_t)b)) {
            return b;
        }
    }
    return -1;
}

static void check_white_space(enum grammar_kind kind, const char *text)
{
    struct grammar_limits l;
    struct grammar *g;
    struct constraint *c = NULL;
    struct err e = {0};
    bool in_string = false;
    int run = 0, byte;

    grammar_limits_init(&l);
    assert_int_equal(grammar_new(&g, vocab, kind, text, strlen(text), &l, &e), 0);
    assert_int_equal(constraint_new(&c, g, &e), 0);
    for (int i = 0; i < 2000 && (byte = greedy_byte(c, in_string)) >= 0; i++) {
        bool blank = !in_string && byte <= ' ';
        run = blank ? run + 1 : 0;
        assert_true(run <= 1 + 64);
        assert_false(blank && i == 0);                 /* a text begins with its value, */
        assert_false(blank && constraint_complete(c)); /* and ends with it */
        in_string ^= byte == '"';
        assert_int_equal(constraint_accept(c, byte, &(int64_t){INT64_MAX}), 0);
    }
    constraint_free(c);
    grammar_unref(g);
}

static void white_space_ends(void **state)
{
    static const struct row ROWS[] = {
        {"{\"properties\":{\"a\":{\"type\":\"object\"},\"b\":{\"items\":{\"type\":\"integer\"}}}}",
         {"{\n  \"a\": {\n    \"x\": [\n      1,\n      2\n    ]\n  },\n  \"b\": [1 , 2]\n}",
          "{\r\n\t\"a\" : {},\r\n\t\"b\":[]\r\n}", "{\"b\":[1,2]}"},
         {"{\n\n\"b\":[]}", "{\"b\"\n:[]}", "{\"b\":\n[]}", "{\"b\":[1\n,2]}", "{   \"b\":[]}",
          "{\"b\":[]}\n"}},
    };

    (void)state;
    check_rows(ROWS, ARRAY_LEN(ROWS));
    check_white_space(GRAMMAR_JSON_SCHEMA, ROWS[0].schema);
    check_white_space(GRAMMAR_JSON_SCHEMA, "true");
    check_white_space(
        GRAMMAR_JSON_SCHEMA,
        "{\"type\":\"array\",\"uniqueItems\":true,\"items\":{\"enum\":[\"a\",\"b\",\"c\"]}}");
    check_white_space(GRAMMAR_JSON_SCHEMA, "{\"additionalProperties\":{\"enum\":[1]}}");
    check_white_space(GRAMMAR_JSON_OBJECT, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(types_and_constants),
        cmocka_unit_test(numbers),
        cmocka_unit_test(strings),
        cmocka_unit_test(objects),
        cmocka_unit_test(arrays),
        cmocka_unit_test(combinations),
        cmocka_unit_test(references),
        cmocka_unit_test(refused_by_name),
        cmocka_unit_test(white_space_ends),
    };

    return cmocka_run_group_tests(tests, open_vocab, close_vocab);
}
