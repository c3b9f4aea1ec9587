/* The names of fill-in-the-middle tokens in the vocabularies of their families. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "models/tokenizer/fim.h"
#include "models/tokenizer/tokenizer_internal.h"

/* A byte-level vocabulary of one letter and up to four added tokens, ids 1, 2, ... */
static struct tokenizer *open_with(const char *const *added)
{
    char json[2048];
    struct tokenizer *t = NULL;
    struct err e = {0};
    int at = snprintf(
        json, sizeof(json),
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"added_tokens\":[");

    for (int i = 0; added[i]; i++) {
        at += snprintf(json + at, sizeof(json) - (size_t)at,
                       "%s{\"id\":%d,\"content\":\"%s\",\"special\":true}", i ? "," : "", i + 1,
                       added[i]);
    }
    snprintf(json + at, sizeof(json) - (size_t)at, "]}");
    if (tokenizer_open_json(&t, json, strlen(json), &e) != 0) {
        fail_msg("%s", e.text);
    }
    return t;
}

static void every_family_is_known(void **state)
{
    static const char *const family[][5] = {
        {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", NULL},
        {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", NULL},
        {"<fim-prefix>", "<fim-suffix>", "<fim-middle>", NULL},
        {"\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>", NULL},
        {"<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>",
         "<\uff5cfim\u2581end\uff5c>", NULL},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(family); i++) {
        struct tokenizer *t = open_with(family[i]);
        struct fim f;
        assert_true(fim_find(t, &f));
        assert_int_equal(f.prefix, 1);
        assert_int_equal(f.suffix, 2);
        assert_int_equal(f.middle, 3);
        assert_int_equal(f.end, family[i][3] ? 4 : -1);
        tokenizer_free(t);
    }
}

static void half_a_family_is_none(void **state)
{
    static const char *const half[] = {"<fim_prefix>", "<fim_suffix>", "<|fim_middle|>", NULL};
    struct tokenizer *t = open_with(half);
    struct fim f;

    (void)state;
    assert_false(fim_find(t, &f));
    tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_family_is_known),
        cmocka_unit_test(half_a_family_is_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
