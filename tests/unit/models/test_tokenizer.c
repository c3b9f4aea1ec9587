/* Tokenizers against Hugging Face's (tests/golden/tokenizers, made by
 * scripts/make-tokenizer-goldens); and hostile text, broken files, threads and
 * streaming, which goldens do not cover. */
#include "models/tokenizer/tokenizer_internal.h"

#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

enum { OUT_MAX = 16 << 20 };

static uint64_t rng_state = 88172645463325252u;

static uint32_t rng(uint32_t below)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return (uint32_t)((rng_state >> 16) % below);
}

static struct tokenizer *open_dir(const char *dir)
{
    struct tokenizer *t = NULL;
    struct err e = {0};

    if (tokenizer_open(&t, dir, &e) != 0) {
        fail_msg("%s", e.text);
    }
    return t;
}

static struct tokenizer *open_text(const char *json)
{
    struct tokenizer *t = NULL;
    struct err e = {0};

    if (tokenizer_open_json(&t, json, strlen(json), &e) != 0) {
        fail_msg("%s", e.text);
    }
    return t;
}

/* ---- goldens ---- */

static char *read_whole(const char *path)
{
    FILE *f = fopen(path, "rb");

    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long n = ftell(f);
    rewind(f);
    char *text = malloc((size_t)n + 1);
    assert_int_equal(fread(text, 1, (size_t)n, f), n);
    text[n] = 0;
    fclose(f);
    return text;
}

static void check_decoded(const struct tokenizer *t, const struct token_list *l, bool skip,
                          const char *want, const char *text)
{
    struct buf out;
    struct err e = {0};

    buf_init(&out, OUT_MAX);
    assert_int_equal(tokenizer_decode(t, l->id, l->n, skip, &out, &e), 0);
    if (strcmp(out.data ? out.data : "", want) != 0) {
        fail_msg("\"%s\" decodes to \"%s\", not \"%s\"", text, out.data, want);
    }
    /* Streaming gives the same, except for byte-fallback runs that are invalid as a
     * whole: a stream has already written their beginning. */
    if (!(t->has_byte_tokens && strstr(want, "\xEF\xBF\xBD"))) {
        struct detokenizer d;
        buf_clear(&out);
        detokenizer_init(&d, t, skip, true);
        for (int32_t i = 0; i < l->n; i++) {
            assert_int_equal(detokenizer_push(&d, l->id[i], &out), 0);
            assert_true(out.len == 0 || utf8_valid(out.data, out.len));
        }
        assert_int_equal(detokenizer_finish(&d, &out), 0);
        assert_string_equal(out.data ? out.data : "", want);
    }
    buf_release(&out);
}

/* A limit of exactly the text's tokens suffices; one less does not. */
static void check_limit(const struct tokenizer *t, const char *text, int32_t n)
{
    struct token_list l = {0};
    struct err e = {0};

    assert_int_equal(tokenizer_encode(t, text, strlen(text), true, n, &l, &e), 0);
    assert_int_equal(l.n, n);
    if (n > 0) {
        assert_int_equal(tokenizer_encode(t, text, strlen(text), true, n - 1, &l, &e), ERR_INVALID);
    }
    token_list_release(&l);
}

static void check_case(const struct tokenizer *t, const cJSON *c)
{
    const char *text = cJSON_GetObjectItem(c, "text")->valuestring;
    const cJSON *ids = cJSON_GetObjectItem(c, "ids"), *id;
    struct token_list l = {0};
    struct err e = {0};

    if (tokenizer_encode(t, text, strlen(text), true, 1 << 20, &l, &e) != 0) {
        fail_msg("\"%s\": %s", text, e.text);
    }
    int32_t i = 0;
    cJSON_ArrayForEach(id, ids)
    {
        if (i >= l.n || l.id[i] != id->valueint) {
            fail_msg("\"%s\": token %d is %d, not %d", text, i, i < l.n ? l.id[i] : -1,
                     id->valueint);
        }
        i++;
    }
    if (i != l.n) {
        fail_msg("\"%s\": %d tokens, not %d", text, l.n, i);
    }
    check_limit(t, text, l.n);
    size_t most = tokenizer_most_text(t);
    assert_true(most == 0 || strlen(text) <= most * (size_t)l.n);
    check_decoded(t, &l, false, cJSON_GetObjectItem(c, "decoded")->valuestring, text);
    check_decoded(t, &l, true, cJSON_GetObjectItem(c, "plain")->valuestring, text);
    token_list_release(&l);
}

static void ids_and_text_are_those_of_tokenizers(void **state)
{
    char *text = read_whole(*state);
    cJSON *golden = cJSON_Parse(text), *c;

    assert_non_null(golden);
    const cJSON *dir = cJSON_GetObjectItem(golden, "dir");
    struct tokenizer *t = NULL;
    if (dir) {
        char path[512];
        snprintf(path, sizeof(path), "%s", dir->valuestring);
        if (access(path, R_OK) != 0) {
            print_message(
                "skipped: no %s here: scripts/fetch-tokenizers or scripts/fetch-model makes it\n",
                path);
            cJSON_Delete(golden);
            free(text);
            skip();
        }
        t = open_dir(dir->valuestring);
    } else {
        char *json = cJSON_PrintUnformatted(cJSON_GetObjectItem(golden, "tokenizer"));
        t = open_text(json);
        free(json);
    }
    int n = 0;
    cJSON_ArrayForEach(c, cJSON_GetObjectItem(golden, "cases"))
    {
        check_case(t, c);
        n++;
    }
    assert_true(n > 30);
    tokenizer_free(t);
    cJSON_Delete(golden);
    free(text);
}

/* ---- the demo model ---- */

static void the_demo_model_has_its_special_ids(void **state)
{
    (void)state;
    struct tokenizer *t = open_dir("models/demo");
    assert_int_equal(tokenizer_vocab_size(t), 4096);
    assert_int_equal(tokenizer_bos(t), 0);
    assert_int_equal(tokenizer_eos(t), 1);
    assert_int_equal(tokenizer_find(t, "</s>", 4), 1);
    assert_int_equal(tokenizer_find(t, "no such token", 13), -1);
    assert_true(tokenizer_is_special(t, 0));
    assert_false(tokenizer_is_special(t, 300));
    assert_false(tokenizer_is_special(t, -1));
    assert_false(tokenizer_is_special(t, 4096));
    size_t len;
    int32_t the = tokenizer_find(t, "\xC4\xA0the", 5);
    assert_true(the > 0);
    assert_memory_equal(tokenizer_bytes(t, the, &len), " the", 4);
    assert_int_equal(len, 4);
    tokenizer_bytes(t, 1 << 20, &len);
    assert_int_equal(len, 0);
    tokenizer_free(t);
}

static void the_limit_of_tokens_holds_and_nothing_is_left_behind(void **state)
{
    (void)state;
    struct tokenizer *t = open_dir("models/demo");
    struct token_list l = {0};
    struct err e = {0};
    assert_int_equal(token_list_push(&l, 77), 0);
    assert_int_equal(tokenizer_encode(t, "a b c d", 7, true, 5, &l, &e), 0);
    assert_int_equal(l.n, 6);
    assert_int_equal(l.id[0], 77);
    assert_int_equal(tokenizer_encode(t, "a b c d", 7, true, 4, &l, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "more than 4 tokens"));
    assert_int_equal(l.n, 6);
    assert_int_equal(tokenizer_encode(t, "a\xFF", 2, true, 100, &l, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "UTF-8"));
    assert_int_equal(l.n, 6);
    token_list_release(&l);
    tokenizer_free(t);
}

/* Of what is dropped, ids do not tell how much it was. */
static void the_text_of_a_token_is_bounded_where_no_text_is_dropped(void **state)
{
    static const enum normal_kind DROPS[] = {NORMAL_STRIP, NORMAL_STRIP_ACCENTS, NORMAL_LOWERCASE,
                                             NORMAL_NFKC, NORMAL_NFKD};
    struct tokenizer *t = open_dir("models/demo"), *bytes;
    size_t most = tokenizer_most_text(t);
    struct err e;

    (void)state;
    assert_in_range(most, 4, TOKEN_TEXT_BYTES);
    assert_int_equal(t->n_normal, 0);
    t->n_normal = 1;
    t->normal[0].kind = NORMAL_NFC;
    assert_int_equal(tokenizer_most_text(t), 4 * most);
    for (size_t i = 0; i < ARRAY_LEN(DROPS); i++) {
        t->normal[0].kind = DROPS[i];
        assert_int_equal(tokenizer_most_text(t), 0);
    }
    t->n_normal = 0;
    t->added[0].lstrip = true;
    assert_int_equal(tokenizer_most_text(t), 0);
    t->added[0].lstrip = false;
    t->stage[0].behavior = SPLIT_REMOVED;
    assert_int_equal(tokenizer_most_text(t), 0);
    tokenizer_free(t);
    assert_int_equal(tokenizer_open_bytes(&bytes, &e), 0);
    assert_int_equal(tokenizer_most_text(bytes), 1);
    tokenizer_free(bytes);
}

/* ---- streaming ---- */

/* A text of one word that is certain to exceed the limit is refused before any work is
 * done. */
static void a_word_that_cannot_fit_costs_nothing(void **state)
{
    enum { BYTES = 1 << 20, ROOM = 16 };
    struct tokenizer *t = open_dir("models/demo");
    struct token_list l = {0};
    struct err e = {0};
    struct encoder enc = {.t = t, .out = &l, .limit = ROOM, .max_tokens = ROOM, .e = &e};
    char *text = malloc(BYTES);

    (void)state;
    assert_non_null(text);
    memset(text, 'a', BYTES);
    assert_int_equal(bpe_encode_word(&enc, text, BYTES), ERR_INVALID);
    assert_non_null(strstr(e.text, "more than 16 tokens"));
    assert_int_equal(enc.symbol_cap, 0);
    enc.limit = BYTES;
    assert_int_equal(bpe_encode_word(&enc, text, BYTES), 0);
    for (int32_t n = l.n; n > 0; n /= 2) { /* a text that fits is never refused */
        token_list_release(&l);
        enc.limit = n;
        assert_int_equal(bpe_encode_word(&enc, text, (size_t)n), 0);
    }
    free(enc.symbol);
    free(enc.heap);
    free(text);
    token_list_release(&l);
    tokenizer_free(t);
}

static void a_stream_carries_whole_characters_only(void **state)
{
    (void)state;
    struct tokenizer *t = NULL;
    assert_int_equal(tokenizer_open_bytes(&t, NULL), 0);
    static const struct {
        const char *bytes, *want;
    } CASES[] = {
        {"abc", "abc"},
        {"\xF0\x9F\x99\x82!", "\xF0\x9F\x99\x82!"},
        {"\xE2\x82", "\xEF\xBF\xBD"},                             /* cut off: one */
        {"\xE2\x82x", "\xEF\xBF\xBDx"},                           /* cut off, then a letter */
        {"\xC0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD"},                 /* overlong: one a byte */
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, /* a surrogate */
        {"\xF0\x90\xE2\x82\xAC", "\xEF\xBF\xBD\xE2\x82\xAC"},     /* incomplete, then whole */
        {"\xF4\x90\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\x80\xC3\xA9\xFF", "\xEF\xBF\xBD\xC3\xA9\xEF\xBF\xBD"},
    };
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct detokenizer d;
        struct buf out;
        buf_init(&out, 100);
        detokenizer_init(&d, t, true, true);
        for (const char *p = CASES[i].bytes; *p; p++) {
            assert_int_equal(detokenizer_push(&d, (uint8_t)*p, &out), 0);
            assert_true(out.len == 0 || utf8_valid(out.data, out.len));
        }
        assert_int_equal(detokenizer_finish(&d, &out), 0);
        assert_string_equal(out.data, CASES[i].want);
        buf_release(&out);
    }
    tokenizer_free(t);
}

static void a_forked_stream_goes_its_own_way(void **state)
{
    (void)state;
    struct tokenizer *t = NULL;
    assert_int_equal(tokenizer_open_bytes(&t, NULL), 0);
    struct detokenizer a, b;
    struct buf x, y;
    buf_init(&x, 100);
    buf_init(&y, 100);
    detokenizer_init(&a, t, true, true);
    detokenizer_push(&a, 0xC3, &x);
    b = a;
    detokenizer_push(&a, 0xA9, &x);
    detokenizer_push(&b, 0xA8, &y);
    assert_string_equal(x.data, "\xC3\xA9");
    assert_string_equal(y.data, "\xC3\xA8");
    buf_release(&x);
    buf_release(&y);
    tokenizer_free(t);
}

/* ---- hostile text ---- */

static char *repeat(const char *unit, size_t n_bytes)
{
    size_t len = strlen(unit);
    char *s = malloc(n_bytes + 1);

    for (size_t i = 0; i < n_bytes; i++) {
        s[i] = unit[i % len];
    }
    s[n_bytes] = 0;
    return s;
}

/* Encode, decode, compare; for byte-level tokenizers without normalizers. */
static void check_round_trip(const struct tokenizer *t, const char *s, size_t len)
{
    struct token_list l = {0};
    struct buf out;
    struct err e = {0};

    buf_init(&out, OUT_MAX);
    if (tokenizer_encode(t, s, len, false, INT32_MAX, &l, &e) != 0) {
        fail_msg("%s", e.text);
    }
    assert_int_equal(tokenizer_decode(t, l.id, l.n, false, &out, &e), 0);
    assert_int_equal(out.len, len);
    assert_true(len == 0 || memcmp(out.data, s, len) == 0);
    buf_release(&out);
    token_list_release(&l);
}

static void a_megabyte_of_anything_is_encoded(void **state)
{
    (void)state;
    static const char *const UNITS[] = {"a",
                                        " ",
                                        "\n",
                                        "ab",
                                        "th",
                                        "the",
                                        "1",
                                        "\xC3\xA9",
                                        "\xCC\x81\xCC\xA3",
                                        "<",
                                        "</s",
                                        "'",
                                        " x",
                                        "\xF0\x9F\x99\x82"};
    struct tokenizer *t = open_dir("models/demo");
    for (size_t i = 0; i < ARRAY_LEN(UNITS); i++) {
        size_t len = strlen(UNITS[i]) * ((1 << 20) / strlen(UNITS[i]));
        char *s = repeat(UNITS[i], len);
        check_round_trip(t, s, len);
        free(s);
    }
    tokenizer_free(t);
}

static void a_megabyte_of_marks_is_normalized(void **state)
{
    (void)state;
    static const char JSON[] =
        "{\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":null,\"model\":{\"type\":\"BPE\","
        "\"vocab\":{\"\xC3\xA9\":0,"
        "\"\xCC\x81\":1,\"\xCC\xA3\":2,\"a\":3,\"\xE1\xBA\xA1\":4},\"merges\":[]}}";
    struct tokenizer *t = open_text(JSON);
    size_t n = 1 << 20;
    char *s = repeat("\xCC\x81\xCC\xA3", n);
    s[0] = 'a';
    s[1] = 'a';
    struct token_list l = {0};
    struct err e = {0};
    assert_int_equal(tokenizer_encode(t, s, n, false, INT32_MAX, &l, &e), 0);
    /* Dots below (class 220) are ordered before acutes (230), and the first composes
     * with the second a. */
    assert_int_equal(l.n, 1 + (n - 2) / 2);
    assert_int_equal(l.id[0], 3);
    assert_int_equal(l.id[1], 4);
    assert_int_equal(l.id[2], 2);
    assert_int_equal(l.id[l.n - 1], 1);
    token_list_release(&l);
    free(s);
    tokenizer_free(t);
}

static void an_expression_that_backtracks_without_end_is_an_error(void **state)
{
    (void)state;
    static const char JSON[] = "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{"
                               "\"type\":\"Split\",\"pattern\":{\"Regex\":"
                               "\"(a|aa)+(b|bb)+$\"},\"behavior\":\"Isolated\"},{\"type\":"
                               "\"ByteLevel\",\"use_regex\":false}]},"
                               "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\","
                               "\"vocab\":{\"a\":0,\"b\":1,\"c\":2},"
                               "\"merges\":[]}}";
    struct tokenizer *t = open_text(JSON);
    struct token_list l = {0};
    struct err e = {0};
    char *s = repeat("a", 200);
    memcpy(s + 198, "bc", 2);
    assert_int_equal(tokenizer_encode(t, s, 200, false, 1000, &l, &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "regular expression"));
    assert_int_equal(tokenizer_encode(t, "aabb", 4, false, 1000, &l, &e), 0);
    assert_int_equal(l.n, 4);
    token_list_release(&l);
    free(s);
    tokenizer_free(t);
}

/* Intersections of classes, and scripts, as the library tokenizers splits by them: the
 * comma of U+3001 is used with Han, and of no script itself. */
static void classes_are_those_of_oniguruma(void **state)
{
    (void)state;
    static const char JSON[] =
        "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
        "\"pattern\":{\"Regex\":\"%s\"},\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\","
        "\"use_regex\":false}]},\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\","
        "\"vocab\":{\"a\":0,\"b\":1,\"\u00e4\":2,\"\u00bd\":3,\"\u0142\":4,\"\u00e3\":5,"
        "\"\u0122\":6,\"\u0123\":7,\"a\u00e4\":8,\"\u0142\u00e4\":9,\"\u0123\u00e4\":10,\"ab\":11,"
        "\"\u0142a\":12,\"1\":13,\"a1\":14},\"merges\":[\"a \u00e4\",\"\u0142 \u00e4\","
        "\"\u0123 \u00e4\",\"a b\",\"\u0142 a\",\"a 1\"]}}";
    static const char TEXT[] = "a\u4f60\u4f60a\u3001\u4f60ab1";
    static const struct {
        const char *regex;
        int32_t want[17]; /* up to -1; none: the expression is refused */
    } CASES[] = {
        {"[\\\\p{Han}]+|[\\\\p{L}&&[^\\\\p{Han}]]+|\\\\p{N}",
         {0, 2, 3, 9, 3, 4, 0, 5, 6, 7, 2, 3, 4, 11, 13, -1}},
        {"[\\\\p{L}&&\\\\p{Han}]+|.", {0, 2, 3, 9, 3, 4, 0, 5, 6, 7, 2, 3, 4, 0, 1, 13, -1}},
        {"[\\\\p{L}\\\\p{N}&&[^ab]]+|[ab]+", {0, 2, 3, 9, 3, 4, 0, 5, 6, 7, 2, 3, 4, 11, 13, -1}},
        {"[\\\\w&&[^\\\\d]]+", {8, 3, 9, 3, 12, 5, 6, 7, 2, 3, 4, 11, 13, -1}},
        {"\\\\P{Han}+", {0, 2, 3, 9, 3, 4, 0, 5, 6, 7, 2, 3, 4, 11, 13, -1}},
        {"\\\\p{^Han}+", {0, 2, 3, 9, 3, 4, 0, 5, 6, 7, 2, 3, 4, 11, 13, -1}},
        {"[ab&&]", {-1}},
        {"[^a&&[^b]]", {-1}},
        {"[ab&&b&&a]", {-1}},
        {"[ab&&[b]a]", {-1}}};
    char text[1024];

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct tokenizer *t = NULL;
        struct token_list l = {0};
        struct err e = {0};
        int32_t n = 0, len = snprintf(text, sizeof(text), JSON, CASES[i].regex);
        int rc = tokenizer_open_json(&t, text, (size_t)len, &e);
        while (CASES[i].want[n] >= 0) {
            n++;
        }
        if (n == 0) {
            assert_int_equal(rc, ERR_INVALID);
            assert_non_null(strstr(e.text, "intersection"));
            continue;
        }
        assert_int_equal(rc, 0);
        assert_int_equal(tokenizer_encode(t, TEXT, strlen(TEXT), false, 1000, &l, &e), 0);
        assert_int_equal(l.n, n);
        assert_memory_equal(l.id, CASES[i].want, (size_t)n * sizeof(*l.id));
        token_list_release(&l);
        tokenizer_free(t);
    }
}

/* ---- short and long words, scanners and PCRE2 ---- */

/* A word by the definition: repeatedly merge the leftmost pair of the lowest rank. */
static int32_t merge_plainly(const struct tokenizer *t, int32_t *id, int32_t n)
{
    for (;;) {
        int32_t best = -1, best_rank = INT32_MAX, best_id = -1;
        for (int32_t i = 0; i + 1 < n; i++) {
            uint64_t pair = (uint64_t)(uint32_t)id[i] << 32 | (uint32_t)id[i + 1];
            for (uint32_t k = 0; k <= t->bpe.mask; k++) {
                const struct merge_slot *s = &t->bpe.slot[k];
                if (s->rank >= 0 && s->pair == pair && s->rank < best_rank) {
                    best = i;
                    best_rank = s->rank;
                    best_id = s->id;
                }
            }
        }
        if (best < 0) {
            return n;
        }
        id[best] = best_id;
        memmove(&id[best + 1], &id[best + 2], (size_t)(n - best - 2) * sizeof(*id));
        n--;
    }
}

static void long_and_short_words_merge_alike(void **state)
{
    (void)state;
    /* Merges that overlap, so that the order of ranks and positions matters. */
    static const char JSON[] = "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"use_regex\":false},"
                               "\"decoder\":{\"type\":\"ByteLevel\"},"
                               "\"model\":{\"type\":\"BPE\",\"vocab\":"
                               "{\"a\":0,\"b\":1,\"ab\":2,\"ba\":3,\"aa\":4,\"aba\":5,\"aab\":6,"
                               "\"bb\":7,\"abab\":8,\"aaaa\":9,\"bab\":10,"
                               "\"baba\":11},\"merges\":"
                               "[\"b a\",\"a a\",\"a b\",\"a ba\",\"ab a\",\"aa b\",\"b b\",\"ab "
                               "ab\",\"aa aa\",\"ba b\",[\"ba\",\"ba\"]]}}";
    struct tokenizer *t = open_text(JSON);
    for (int round = 0; round < 400; round++) {
        char text[200];
        int32_t want[200], n = 1 + (int32_t)rng(199);
        for (int32_t i = 0; i < n; i++) {
            want[i] = (int32_t)rng(2);
            text[i] = "ab"[want[i]];
        }
        struct token_list l = {0};
        struct err e = {0};
        assert_int_equal(tokenizer_encode(t, text, (size_t)n, false, 1000, &l, &e), 0);
        n = merge_plainly(t, want, n);
        assert_int_equal(l.n, n);
        assert_memory_equal(l.id, want, (size_t)n * sizeof(*want));
        token_list_release(&l);
    }
    tokenizer_free(t);
}

/* Random text of characters that are in the same class in all versions of Unicode's
 * tables. */
static size_t random_text(char *s, size_t max)
{
    static const char *const PARTS[] = {"'s",
                                        "'S",
                                        "'ll",
                                        "'lL",
                                        "'\xC5\xBF",
                                        "'re",
                                        "'V",
                                        "'ve",
                                        "'",
                                        "a",
                                        "B",
                                        "zz",
                                        "1",
                                        "123",
                                        "4567",
                                        " ",
                                        "  ",
                                        "\n",
                                        "\r",
                                        "\r\n",
                                        "\t",
                                        "!",
                                        "?!",
                                        "...",
                                        "_",
                                        "-",
                                        "(",
                                        "\xC3\xA9",
                                        "\xCE\xBB",
                                        "\xD0\x96",
                                        "\xE4\xBD\xA0",
                                        "\xD9\xA3",
                                        "\xE2\x85\xA7",
                                        "\xC2\xBD",
                                        "\xC2\xA0",
                                        "\xE3\x80\x80",
                                        "\xE2\x80\xA8",
                                        "\xC2\x85",
                                        "\xE1\xA0\x8E",
                                        "\xE2\x80\x8B",
                                        "\xCC\x81",
                                        "\xF0\x9F\x99\x82",
                                        "\xE2\x82\xAC",
                                        "\xC2\xAD",
                                        "\xE1\x9A\x80",
                                        "\x0B",
                                        "\x0C",
                                        "\x1C",
                                        "\x01",
                                        "\x7F"};
    size_t n = 0, want = 1 + rng((uint32_t)max - 8);

    while (n < want) {
        const char *p = PARTS[rng(ARRAY_LEN(PARTS))];
        memcpy(s + n, p, strlen(p));
        n += strlen(p);
    }
    return n;
}

static void scanners_split_as_pcre2_does(void **state)
{
    (void)state;
    static const char *const REGEX[] = {GPT2_PATTERN,
                                        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
                                        "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                                        "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
                                        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
                                        "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
                                        "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"};
    struct err e = {0};
    for (size_t r = 0; r < ARRAY_LEN(REGEX); r++) {
        struct pattern p;
        struct encoder enc = {.e = &e};
        assert_int_equal(pattern_compile(&p, REGEX[r], strlen(REGEX[r]), &e), 0);
        assert_non_null(p.scan);
        for (int round = 0; round < 20000; round++) {
            char s[64];
            size_t len = random_text(s, 48), start, end;
            for (size_t at = 0; at < len;) {
                assert_int_equal(pattern_find(&p, &enc, s, len, at, &start, &end), 1);
                size_t n = p.scan((const uint8_t *)s + at, len - at);
                if (start != at || end - start != n) {
                    fail_msg("expression %zu, \"%.*s\" at %zu: %zu bytes, PCRE2 finds %zu to %zu",
                             r, (int)len, s, at, n, start, end);
                }
                at = end;
            }
        }
        pcre2_match_data_free(enc.match);
        pcre2_match_context_free(enc.limits);
        pattern_release(&p);
    }
}

/* ---- threads ---- */

static void *encode_often(void *arg)
{
    const struct tokenizer *t = arg;
    static const char TEXT[] =
        "Once upon a time, there was a little fox who lived in a forest near the old bridge.";
    struct token_list first = {0}, l = {0};
    intptr_t bad = tokenizer_encode(t, TEXT, sizeof(TEXT) - 1, true, 1000, &first, NULL);

    for (int i = 0; i < 3000 && !bad; i++) {
        char other[16];
        /* replaces entries of the cache */
        snprintf(other, sizeof(other), "w%dx %d", i % 977, i % 331);
        l.n = 0;
        bad |= tokenizer_encode(t, other, strlen(other), false, 1000, &l, NULL);
        l.n = 0;
        bad |= tokenizer_encode(t, TEXT, sizeof(TEXT) - 1, true, 1000, &l, NULL);
        bad |= l.n != first.n || memcmp(l.id, first.id, (size_t)l.n * sizeof(*l.id)) != 0;
    }
    token_list_release(&first);
    token_list_release(&l);
    return (void *)bad;
}

static void threads_share_one_tokenizer(void **state)
{
    (void)state;
    struct tokenizer *t = open_dir("models/demo");
    pthread_t thread[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&thread[i], NULL, encode_often, t), 0);
    }
    for (int i = 0; i < 4; i++) {
        void *bad;
        pthread_join(thread[i], &bad);
        assert_null(bad);
    }
    tokenizer_free(t);
}

/* ---- broken files ---- */

#define MODEL \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"

static void a_broken_file_is_one_clear_error(void **state)
{
    (void)state;
    static const struct {
        const char *json, *says;
        int code;
    } CASES[] = {
        {"", "an object expected", ERR_INVALID},
        {"[]", "an object expected", ERR_INVALID},
        {"{}", "no model", ERR_INVALID},
        {"{" MODEL "} x", "something follows", ERR_INVALID},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{}}}", "no model with a vocabulary", ERR_INVALID},
        {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0}}}",
         "\"WordPiece\" with ids is not supported", ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0]]}}", "unk_id -1 is not in",
         ERR_INVALID},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":-5,\"vocab\":[[\"a\",0]]}}",
         "unk_id -5 is no", ERR_INVALID},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\",NaN]]}}",
         "not a token and its score", ERR_INVALID},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\"]]}}",
         "not a token and its score", ERR_INVALID},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"byte_fallback\":true,\"vocab\":[[\"a\",0]"
         "]}}",
         "byte_fallback without", ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":[[\"a\",0]]}}", "with scores is not supported",
         ERR_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":-1}}}", "has the id -1", ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":99999999}}}", "has the id 99999999", ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1.5}}}", "whole number", ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1,\"b\":1}}}", "belongs to two tokens", ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1,\"a\":2}}}", "has two ids", ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a c\"]}}", "\"c\" is not in the vocabulary",
         ERR_INVALID},
        {"{\"model\":{\"merges\":[\"a b\"],\"vocab\":{\"a\":0,\"b\":1}}}",
         "\"ab\" is not in the vocabulary", ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a\"]}}", "two tokens with a space",
         ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a a a\"]}}", "two tokens with a space",
         ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", "two strings", ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\",\"a\",\"a\"]]}}", "two strings",
         ERR_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":0},\"end_of_word_suffix\":\"</w>\"}}", "end_of_word_suffix",
         ERR_INVALID},
        {"{\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,\"vocab\":{\"a\":0}}}",
         "byte_fallback without", ERR_UNSUPPORTED},
        {"{\"added_tokens\":[{\"content\":\"x\"}]," MODEL "}", "an added token needs", ERR_INVALID},
        {"{\"added_tokens\":[{\"content\":\"\",\"id\":3}]," MODEL "}", "an added token needs",
         ERR_INVALID},
        {"{" MODEL ",\"added_tokens\":[{\"content\":\"x\",\"id\":0}]}", "belongs to two tokens",
         ERR_INVALID},
        {"{\"normalizer\":{\"type\":\"Magic\"}," MODEL "}", "\"Magic\" is not supported",
         ERR_INVALID},
        {"{\"pre_tokenizer\":{\"type\":\"Magic\"}," MODEL "}", "\"Magic\" is not supported",
         ERR_INVALID},
        {"{\"post_processor\":{\"type\":\"Magic\"}," MODEL "}", "\"Magic\" is not supported",
         ERR_INVALID},
        {"{\"decoder\":{\"type\":\"Magic\"}," MODEL "}", "\"Magic\" is not supported", ERR_INVALID},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":"
         "\"Isolated\"}," MODEL "}",
         "is refused at byte", ERR_INVALID},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"x\"},\"behavior\":"
         "\"Odd\"}," MODEL "}",
         "\"Odd\" is not known", ERR_INVALID},
        {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\"}," MODEL "}",
         "one character", ERR_INVALID},
        {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":"
         "\"odd\"}," MODEL "}",
         "\"odd\" is not known", ERR_INVALID},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{"
         "\"type\":\"Digits\"}]}"
         "," MODEL "}",
         "after ByteLevel", ERR_INVALID},
        {"{\"post_processor\":{\"type\":\"BertProcessing\",\"sep\":[\"x\",1]}," MODEL "}",
         "needs \"cls\"", ERR_INVALID},
        {"{\"post_processor\":{\"type\":\"BertProcessing\",\"sep\":[\"x\",-1]}," MODEL "}",
         "no token id", ERR_INVALID},
        {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{"
         "\"id\":\"q\"}}]}," MODEL "}",
         "\"q\" has no ids", ERR_INVALID},
        {"{\"post_processor\":{\"type\":\"BertProcessing\",\"sep\":[\"x\",9],\"cls\":[\"a\",0]}"
         "," MODEL "}",
         "post_processor: id 9, the vocabulary ends", ERR_INVALID},
        {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{"
         "\"id\":\"q\"}}],"
         "\"special_tokens\":{\"q\":{\"ids\":[9]}}}," MODEL "}",
         "post_processor: id 9, the vocabulary ends", ERR_INVALID},
        {"{\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":5,\"stop\":0}," MODEL "}",
         "this form of the decoder", ERR_INVALID},
    };
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct tokenizer *t = NULL;
        struct err e = {0};
        int rc = tokenizer_open_json(&t, CASES[i].json, strlen(CASES[i].json), &e);
        if (rc != CASES[i].code || !strstr(e.text, CASES[i].says) || t) {
            fail_msg("%s: rc %d, \"%s\" (\"%s\" expected)", CASES[i].json, rc, e.text,
                     CASES[i].says);
        }
    }
}

static void every_beginning_of_a_file_is_refused(void **state)
{
    (void)state;
    static const char JSON[] =
        "{\"added_tokens\":[{\"id\":3,\"content\":\"<s>\",\"special\":true}],\"normalizer\":{"
        "\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"}]},"
        "\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a+\"},\"behavior\":"
        "\"Isolated\"},\"post_processor\":{\"type\":"
        "\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{"
        "\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":"
        "{\"ids\":[3]}}},\"decoder\":{\"type\":\"Fuse\"}," MODEL "}";
    struct tokenizer *t = open_text(JSON);
    tokenizer_free(t);
    for (size_t len = 0; len + 1 < sizeof(JSON) - 1; len++) {
        struct err e = {0};
        t = NULL;
        assert_true(tokenizer_open_json(&t, JSON, len, &e) < 0);
        assert_null(t);
        assert_true(e.text[0]);
    }
}

/* A vocabulary with a run of `n` spaces as one token, either an added one or the result
 * of merges that each double the run; `n` is a power of two. */
static char *json_of_spaces(int n, bool added)
{
    struct buf b;
    int id = 1;

    buf_init(&b, (size_t)1 << 20);
    buf_puts(&b, "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0");
    for (int len = 1; len <= (added ? 1 : n); len *= 2) {
        buf_puts(&b, ",\"");
        for (int i = 0; i < len; i++) {
            buf_puts(&b, "\xe2\x96\x81");
        }
        buf_printf(&b, "\":%d", id++);
    }
    buf_puts(&b, "},\"merges\":[");
    for (int len = 1; len < n && !added; len *= 2) {
        buf_puts(&b, len > 1 ? ",[\"" : "[\"");
        for (int i = 0; i < 2 * len; i++) {
            buf_puts(&b, i == len ? "\",\"\xe2\x96\x81" : "\xe2\x96\x81");
        }
        buf_puts(&b, "\"]");
    }
    buf_puts(&b, "]}");
    if (added) {
        buf_printf(&b, ",\"added_tokens\":[{\"id\":%d,\"content\":\"%*s\"}]", id, n, "");
    }
    buf_puts(&b, ",\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" "
                 "\"},\"content\":\"\xe2\x96\x81\"},"
                 "\"decoder\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"\xe2\x96\x81\"},"
                 "\"content\":\" \"}}");
    assert_false(b.failed);
    return b.data;
}

static void runs_of_hundreds_of_spaces_are_tokens(void **state)
{
    (void)state;
    for (int added = 0; added < 2; added++) {
        char *json = json_of_spaces(1024, added == 1), text[1026];
        struct tokenizer *t = open_text(json);
        struct token_list l = {0};
        struct buf out;
        memset(text, ' ', 1024);
        memcpy(text + 1024, "a", 2);
        assert_int_equal(tokenizer_encode(t, text, 1025, false, 100, &l, NULL), 0);
        assert_int_equal(l.n, 2);
        buf_init(&out, 1 << 16);
        assert_int_equal(tokenizer_decode(t, l.id, l.n, false, &out, NULL), 0);
        assert_string_equal(out.data, text);
        assert_int_equal(tokenizer_longest(t), 1024);
        buf_release(&out);
        token_list_release(&l);
        tokenizer_free(t);
        free(json);
    }
}

/* An added token is forgotten, in any of the tries; what a word becomes is not. */
static void added_tokens_behind_the_logits_are_text(void **state)
{
    (void)state;
    static const char JSON[] =
        "{\"added_tokens\":[{\"id\":3,\"content\":\"aa\",\"normalized\":false},"
        "{\"id\":5,\"content\":\"ba\",\"normalized\":true},"
        "{\"id\":4,\"content\":\"aab\",\"normalized\":false}]," MODEL "}";
    static const struct {
        int32_t vocab, n_forgotten, n_ids, id[4];
    } CASES[] = {
        {6, 0, 2, {4, 5}}, {5, 1, 3, {4, 1, 0}}, {4, 2, 4, {3, 1, 1, 0}}, {3, 3, 4, {0, 2, 1, 0}}};
    struct err e = {0};
    int32_t n;

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct tokenizer *t = open_text(JSON);
        struct token_list l = {0};
        assert_int_equal(tokenizer_limit(t, CASES[i].vocab, &n, &e), 0);
        assert_int_equal(n, CASES[i].n_forgotten);
        assert_int_equal(tokenizer_vocab_size(t), CASES[i].vocab);
        assert_int_equal(tokenizer_encode(t, "aabba", 5, false, 100, &l, &e), 0);
        assert_int_equal(l.n, CASES[i].n_ids);
        assert_memory_equal(l.id, CASES[i].id, (size_t)l.n * sizeof(*l.id));
        assert_int_equal(tokenizer_find(t, "ba", 2), CASES[i].vocab > 5 ? 5 : -1);
        assert_int_equal(tokenizer_find(t, "ab", 2), 2);
        token_list_release(&l);
        tokenizer_free(t);
    }
    struct tokenizer *t = open_text(JSON);
    assert_int_equal(tokenizer_limit(t, 2, &n, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "ids up to 5, the model's logits end at vocab_size 2"));
    tokenizer_free(t);
    t = open_text("{\"post_processor\":{\"type\":\"BertProcessing\",\"sep\":[\"x\",3],\"cls\":"
                  "[\"a\",0]},\"added_tokens\":[{\"id\":3,\"content\":\"x\"}]," MODEL "}");
    assert_int_equal(tokenizer_limit(t, 3, &n, &e), ERR_INVALID);
    tokenizer_free(t);
}

static void a_token_longer_than_any_real_one_is_refused(void **state)
{
    struct tokenizer *t = NULL;
    struct err e = {0};

    (void)state;
    for (int added = 0; added < 2; added++) {
        char *json = json_of_spaces(added ? 8192 : 4096, added == 1);
        assert_int_equal(tokenizer_open_json(&t, json, strlen(json), &e), ERR_INVALID);
        assert_non_null(strstr(e.text, "8191 bytes"));
        free(json);
    }
}

static void deep_nesting_is_refused(void **state)
{
    (void)state;
    enum { DEPTH = 3000 };
    char *json = malloc(64 * DEPTH);
    size_t n = (size_t)sprintf(json, "{\"pre_tokenizer\":");
    for (int i = 0; i < DEPTH; i++) {
        n += (size_t)sprintf(json + n, "{\"type\":\"Sequence\",\"pretokenizers\":[");
    }
    struct tokenizer *t = NULL;
    struct err e = {0};
    assert_int_equal(tokenizer_open_json(&t, json, n, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "nested deeper"));
    free(json);
}

static void a_directory_without_a_tokenizer_is_not_found(void **state)
{
    (void)state;
    struct tokenizer *t = NULL;
    struct err e = {0};
    assert_int_equal(tokenizer_open(&t, "tests/golden", &e), ERR_NOT_FOUND);
    assert_non_null(strstr(e.text, "tokenizer.json"));
}

enum { MAX_GOLDENS = 128 };

int main(void)
{
    static char path[MAX_GOLDENS][300], name[MAX_GOLDENS][400];
    const struct CMUnitTest fixed[] = {
        cmocka_unit_test(the_demo_model_has_its_special_ids),
        cmocka_unit_test(the_limit_of_tokens_holds_and_nothing_is_left_behind),
        cmocka_unit_test(the_text_of_a_token_is_bounded_where_no_text_is_dropped),
        cmocka_unit_test(a_word_that_cannot_fit_costs_nothing),
        cmocka_unit_test(a_stream_carries_whole_characters_only),
        cmocka_unit_test(a_forked_stream_goes_its_own_way),
        cmocka_unit_test(a_megabyte_of_anything_is_encoded),
        cmocka_unit_test(a_megabyte_of_marks_is_normalized),
        cmocka_unit_test(an_expression_that_backtracks_without_end_is_an_error),
        cmocka_unit_test(classes_are_those_of_oniguruma),
        cmocka_unit_test(long_and_short_words_merge_alike),
        cmocka_unit_test(scanners_split_as_pcre2_does),
        cmocka_unit_test(threads_share_one_tokenizer),
        cmocka_unit_test(a_broken_file_is_one_clear_error),
        cmocka_unit_test(every_beginning_of_a_file_is_refused),
        cmocka_unit_test(runs_of_hundreds_of_spaces_are_tokens),
        cmocka_unit_test(added_tokens_behind_the_logits_are_text),
        cmocka_unit_test(a_token_longer_than_any_real_one_is_refused),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(a_directory_without_a_tokenizer_is_not_found),
    };
    struct CMUnitTest tests[MAX_GOLDENS + ARRAY_LEN(fixed)];
    size_t n = 0;
    DIR *dir = opendir("tests/golden/tokenizers");

    for (struct dirent *d; dir && (d = readdir(dir)) && n < MAX_GOLDENS;) {
        if (!strstr(d->d_name, ".json")) {
            continue;
        }
        snprintf(path[n], sizeof(path[0]), "tests/golden/tokenizers/%.200s", d->d_name);
        snprintf(name[n], sizeof(name[0]), "ids_and_text_are_those_of_tokenizers: %.200s",
                 d->d_name);
        tests[n] = (struct CMUnitTest){.name = name[n],
                                       .test_func = ids_and_text_are_those_of_tokenizers,
                                       .initial_state = path[n]};
        n++;
    }
    if (dir) {
        closedir(dir);
    }
    if (n == 0) {
        fprintf(stderr, "no goldens: run from the repository's root\n");
        return 1;
    }
    memcpy(tests + n, fixed, sizeof(fixed));
    n += ARRAY_LEN(fixed);
    return _cmocka_run_group_tests("tokenizer", tests, n, NULL, NULL);
}
