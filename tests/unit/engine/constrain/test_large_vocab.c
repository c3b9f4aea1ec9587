/* Masks over a vocabulary of many tokens, where subtrees and slices are taken whole,
 * against asking for each token. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/constrain/constrain.h"

/* Every row of up to three pieces is a token; some pieces are parts of characters. */
static const char *const pieces[] = {
    "a",        "b",  "m",  "Z",  "1",        "{",    "}",    ":",
    " ",        "\"", "\\", "\n", "\xc3\xa9", "\xc3", "\xa9", "\xe2\x80\xa8",
    "\xe2\x80",
};

enum { N = ARRAY_LEN(pieces), END = N + N * N + N * N * N, N_TOKENS };

static const char *token_bytes(const void *arg, int32_t id, size_t *ret_len)
{
    static char text[32];

    (void)arg;
    text[0] = '\0';
    if (id < N) {
        strcpy(text, pieces[id]);
    } else if (id < N + N * N) {
        strcat(strcpy(text, pieces[(id - N) / N]), pieces[(id - N) % N]);
    } else if (id < END) {
        id -= N + N * N;
        strcat(strcat(strcpy(text, pieces[id / N / N]), pieces[id / N % N]), pieces[id % N]);
    }
    *ret_len = strlen(text);
    return text;
}

/* With so much work in a call. Returns how many calls were needed. */
static int64_t mask_in_portions(struct constraint *c, uint32_t *mask, int64_t portion, int *ret_rc)
{
    int64_t n = 0;

    do {
        int64_t work = portion;
        n++;
        *ret_rc = constraint_mask(c, mask, &work);
    } while (*ret_rc == CONSTRAINT_UNFINISHED);
    return n;
}

static int accept_in_portions(struct constraint *c, int32_t id, int64_t portion)
{
    int rc;

    do {
        int64_t work = portion;
        rc = constraint_ended(c, &work) == 2 ? CONSTRAINT_UNFINISHED
                                             : constraint_accept(c, id, &work);
    } while (rc == CONSTRAINT_UNFINISHED);
    return rc;
}

static int64_t check_masks(struct grammar *g, uint32_t drawn, int64_t portion)
{
    int64_t n_calls = 0;
    uint32_t mask[N_TOKENS / 32 + 1];
    struct constraint *c;
    struct err e;

    assert_int_equal(constraint_new(&c, g, &e), 0);
    for (int step = 0; step < 6; step++) {
        int rc;
        n_calls += mask_in_portions(c, mask, portion, &rc) - 1;
        assert_true(rc == 0 || rc == ERR_UNSUPPORTED); /* no piece is a brace, say */
        for (int32_t id = 0; id < N_TOKENS; id++) {
            assert_int_equal(mask[id / 32] >> (id % 32) & 1, constraint_allows(c, id));
        }
        if (rc != 0) {
            break;
        }
        drawn = drawn * 1664525u + 1013904223u;
        int32_t id = (int32_t)((drawn >> 8) % N_TOKENS);
        while (!(mask[id / 32] >> (id % 32) & 1)) {
            id = (id + 1) % N_TOKENS;
        }
        assert_int_equal(accept_in_portions(c, id, portion), 0);
    }
    constraint_free(c);
    return n_calls;
}

static void a_mask_is_what_each_token_by_itself_is_told(void **state)
{
    static const struct {
        enum grammar_kind kind;
        const char *text;
    } grammars[] = {
        {GRAMMAR_REGEX, ".*"},
        {GRAMMAR_REGEX, "[^]*"},
        {GRAMMAR_REGEX, "[a-z ]*1"},
        {GRAMMAR_REGEX, "[^m]*m.*"},
        {GRAMMAR_REGEX, ".*mab.*"},
        {GRAMMAR_REGEX, ".*m[ab]{4}.*"},
        {GRAMMAR_REGEX, "(\\S+\\s+){0,3}\\S+"},
        {GRAMMAR_REGEX, "([^ ]+ +){0,9}[^ ]+"},
        {GRAMMAR_REGEX, "[abm1]{3,40}"},
        {GRAMMAR_REGEX, "[a-m ]{1,6}Z?"},
        {GRAMMAR_REGEX, "[ab\xc3\xa9]{2,4}"},
        {GRAMMAR_REGEX, ".*[ab1]{90}.*"},
        {GRAMMAR_REGEX, "([^ \\n]+ +){0,40}[^ \\n]+"},
        {GRAMMAR_REGEX, "(\\S+\\s+){2,12}\\S+"},
        {GRAMMAR_REGEX, "[ab1]{4,9}"},
        {GRAMMAR_REGEX, "[ab1]{0,5}(m[ab1]{0,70}|1{0,6}Z){0,8}"},
        {GRAMMAR_REGEX, "((ab|1){0,7}m?){0,4}Z"},
        {GRAMMAR_JSON_SCHEMA,
         "{\"type\": \"string\", \"maxLength\": 19, \"pattern\": \"^(\\\\S+\\\\s+){0,9}\\\\S+$\"}"},
        {GRAMMAR_JSON_SCHEMA, "{\"type\": \"string\", \"minLength\": 5, \"maxLength\": 9, "
                              "\"pattern\": \"^(\\\\S+\\\\s+){1,5}\\\\S+$\"}"},
        {GRAMMAR_JSON_SCHEMA, "{\"type\": \"string\", \"maxLength\": 9, \"not\": {\"pattern\": "
                              "\"^[ab]{0,6}$\"}}"},
        {GRAMMAR_REGEX, "\"([^\"\\\\\\n]|\\\\[ab])*\""},
        {GRAMMAR_REGEX, "\"[^\"\\\\\\n]{0,30}\""},
        {GRAMMAR_REGEX, "\"[^\"\\\\\\n]{2,5}\""},
        {GRAMMAR_REGEX, "[\\x00-\\x7f]*\xc3\xa9"},
        {GRAMMAR_REGEX, "[a\xc3\xa9]*[bZ]"},
        {GRAMMAR_JSON_OBJECT, ""},
        {GRAMMAR_JSON_SCHEMA, "{\"type\": \"string\"}"},
        {GRAMMAR_JSON_SCHEMA, "{\"type\": \"string\", \"maxLength\": 20}"},
        {GRAMMAR_JSON_SCHEMA, "{\"type\": \"string\", \"minLength\": 3, \"maxLength\": 7}"},
        {GRAMMAR_JSON_SCHEMA, "{\"type\": \"string\", \"maxLength\": 13}"},
        {GRAMMAR_REGEX, "\"[^\"\\\\\\n]{11}(m|\")"},
        {GRAMMAR_JSON_SCHEMA, "{\"type\": \"object\", \"properties\": {\"ab\": {}, \"mZ1\": {}}}"},
        {GRAMMAR_LARK, "start: until(\"ma\", \"b b\") \"b b\" text()"},
    };
    static const int32_t eos = END;
    struct constrain_tokens t = {.n = N_TOKENS, .n_eos = 1, .eos = &eos, .bytes = token_bytes};
    struct constrain_vocab *vocab;
    struct grammar_limits l;
    struct grammar *g;
    struct err e;

    (void)state;
    grammar_limits_init(&l);
    assert_int_equal(constrain_vocab_new(&vocab, &t, &e), 0);
    for (size_t i = 0; i < 3 * ARRAY_LEN(grammars); i++) {
        static const int64_t portion[] = {INT64_MAX, 1, 100};
        const char *text = grammars[i / 3].text;
        int64_t n_calls = 0;
        int rc = grammar_new(&g, vocab, grammars[i / 3].kind, text, strlen(text), &l, &e);
        assert_int_equal(rc, 0);
        for (uint32_t seed = 0; seed < 8; seed++) {
            n_calls += check_masks(g, seed * 7919, portion[i % 3]);
        }
        assert_true(i % 3 == 0 ? n_calls == 0 : i % 3 == 2 || n_calls > 0);
        grammar_unref(g);
    }
    constrain_vocab_free(vocab);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_mask_is_what_each_token_by_itself_is_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
