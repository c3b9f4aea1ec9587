/* Grammars of every kind: what they take, what they refuse, what they may cost, and
 * what many threads make of one. */
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "config/base/buf.h"
#include "engine/constrain/constrain.h"

/* Bytes, then words of several bytes, names, and an end. */
enum { WORDS = 256, TOOL = 261, END = 262, N_TOKENS };

static const char *const words[] = {"true", "null", "hello", "lo w", "ell", "<tool>"};

static const char *token_bytes(const void *arg, int32_t id, size_t *ret_len)
{
    static char bytes[256];

    (void)arg;
    if (id >= WORDS) {
        const char *text = id < END ? words[id - WORDS] : "";
        *ret_len = strlen(text);
        return text;
    }
    bytes[id] = (char)id;
    *ret_len = 1;
    return &bytes[id];
}

static bool token_special(const void *arg, int32_t id)
{
    (void)arg;
    return id == TOOL;
}

/* The longest token at each place. */
static int encode(const void *arg, const char *text, size_t len, int32_t **ret_ids, int32_t *ret_n)
{
    int32_t *ids = malloc((len + 1) * sizeof(*ids)), n = 0;

    (void)arg;
    for (size_t at = 0; ids && at < len;) {
        int32_t best = (uint8_t)text[at];
        size_t size = 1;
        for (int32_t id = WORDS; id < TOOL; id++) {
            size_t word = strlen(words[id - WORDS]);
            if (word > size && word <= len - at &&
                memcmp(text + at, words[id - WORDS], word) == 0) {
                best = id;
                size = word;
            }
        }
        ids[n++] = best;
        at += size;
    }
    *ret_ids = ids;
    *ret_n = n;
    return ids ? 0 : ERR_NOMEM;
}

static struct constrain_vocab *vocab;

static int make_vocab(void **state)
{
    static const int32_t eos = END;
    struct constrain_tokens t = {.n = N_TOKENS,
                                 .n_eos = 1,
                                 .eos = &eos,
                                 .bytes = token_bytes,
                                 .special = token_special,
                                 .encode = encode};
    struct err e;

    (void)state;
    return constrain_vocab_new(&vocab, &t, &e);
}

static int free_vocab(void **state)
{
    (void)state;
    constrain_vocab_free(vocab);
    return 0;
}

static struct grammar *compile(enum grammar_kind kind, const char *text)
{
    struct grammar_limits l;
    struct grammar *g = NULL;
    struct err e;

    grammar_limits_init(&l);
    if (grammar_new(&g, vocab, kind, text, strlen(text), &l, &e) != 0) {
        fail_msg("%s: %s", text, e.text);
    }
    return g;
}

static struct constraint *start(struct grammar *g)
{
    struct constraint *c;
    struct err e;

    assert_int_equal(constraint_new(&c, g, &e), 0);
    return c;
}

/* Whether the text is a sentence, byte by byte; 0x01 stands for the token <tool>. */
static bool takes(struct grammar *g, const char *text)
{
    struct constraint *c = start(g);
    bool ok = true;

    for (; *text && ok; text++) {
        ok = constraint_accept(c, *text == 1 ? TOOL : (uint8_t)*text, &(int64_t){INT64_MAX}) == 0;
    }
    ok = ok && constraint_complete(c);
    constraint_free(c);
    return ok;
}

/* ---- what is taken ---- */

struct example {
    enum grammar_kind kind;
    const char *grammar;
    const char *yes[6], *no[6];
};

static const struct example examples[] = {
    {GRAMMAR_CHOICE,
     "[\"yes\", \"no\", \"yesterday\", \"\\u00e9\"]",
     {"yes", "no", "yesterday", "\xc3\xa9"},
     {"", "ye", "yester", "nono"}},
    {GRAMMAR_JSON_OBJECT,
     "",
     {"{}", "{ }", "{\"a\": [1, -2.5e3, \"x\\n\", {}, []], \"b\": {\"c\": null}}", "{\"\":true}"},
     {"", "[]", "1", "{\"a\" 1}", "{\"a\":01}", "{\"a\":1,}"}},
    {GRAMMAR_JSON_OBJECT,
     "",
     {"{\n\t\"a\" : [\n\t\t1,\n\t\t2\n\t]\n}", "{\r\n  \"a\":  1\r\n}"},
     {"{\n\n}", "{   }", "{\"a\"\n:1}", "{\"a\":\n1}", "{} ", " {}"}},
    {GRAMMAR_LARK,
     "start: greeting (\", \" NAME)* \".\"\ngreeting: \"hello\" | \"bye\"i\n"
     "NAME: /[A-Z][a-z]+/ // a comment\n",
     {"hello.", "BYe, Al, Bob.", "bye."},
     {"hello", "HELLO.", "bye, al."}},
    {GRAMMAR_LARK,
     "start: list\nlist: \"[\" (item (\",\" item)*)? \"]\"\nitem: /\\d/ | list\n"
     "%ignore /[ \\t]+/",
     {"[]", " [ 1 ,[2] ] ", "[[[]]]"},
     {"[1,]", "[12]", "[1 2]", "]"}},
    {GRAMMAR_LARK,
     "start: e\ne: e \"+\" t | t\nt: \"(\" e \")\" | N\nN: \"0\"..\"9\"",
     {"1", "1+2+3", "((1)+2)"},
     {"", "1+", "(1", "12"}},
    {GRAMMAR_LARK,
     "start: a{2,3} b~2 [c]\na: \"a\"\nb: \"b\" -> named\nc: x\nx: \"c\" x | \"c\"",
     {"aabb", "aaabb", "aabbccc"},
     {"abb", "aab", "aaaabb"}},
    {GRAMMAR_LARK,
     "start: until(\"<tool>\", \"END\") marker(\"<tool>\") text()",
     {"\1", "free text\1more <tool> END", "<tool\1"},
     {"free text", "END\1", "<tool>\1", "\1\1"}},
    {GRAMMAR_LARK,
     "start: marker(\"<none>\") (\"a\" | ) \"b\"",
     {"<none>b", "<none>ab"},
     {"b", "<none>"}},
    {GRAMMAR_LARK, "start: \"a\" start \"b\" |", {"", "ab", "aaabbb"}, {"a", "abab", "aab"}},
    {GRAMMAR_LARK, "start: p*\np: \"(\" start \")\"", {"", "()", "(()())()"}, {"(", ")("}},
    {GRAMMAR_LARK, "start: /a\\/b[\\/]/ /x/i", {"a/b/x", "a/b/X"}, {"a/bx"}},
    {GRAMMAR_LARK,
     "start: \"x\" %json {\"type\": \"boolean\"} \"y\"",
     {"xtruey", "xfalsey"},
     {"xy", "xnully"}},
};

static void grammars_take_their_sentences_alone(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(examples); i++) {
        const struct example *x = &examples[i];
        struct grammar *g = compile(x->kind, x->grammar);
        for (int k = 0; k < 6 && x->yes[k]; k++) {
            if (!takes(g, x->yes[k])) {
                fail_msg("%s does not take %s", x->grammar, x->yes[k]);
            }
        }
        for (int k = 0; k < 6 && x->no[k]; k++) {
            if (takes(g, x->no[k])) {
                fail_msg("%s takes %s", x->grammar, x->no[k]);
            }
        }
        grammar_unref(g);
    }
}

static void faults_are_told_with_their_line(void **state)
{
    static const struct {
        enum grammar_kind kind;
        const char *grammar, *says;
    } cases[] = {
        {GRAMMAR_LARK, "a: \"x\"", "no rule named start"},
        {GRAMMAR_LARK, "start: a", "line 1: a is not defined"},
        {GRAMMAR_LARK, "start: \"x\"\nstart: \"y\"", "line 2: a name that is defined twice"},
        {GRAMMAR_LARK, "start: A\nA: B\nB: A \"x\"", "a terminal that holds itself"},
        {GRAMMAR_LARK, "start: A\nA: b\nb: \"x\"", "line 2: a terminal cannot hold a rule"},
        {GRAMMAR_LARK, "start: a\na: a \"x\"", "no text satisfies"},
        {GRAMMAR_LARK, "start: \"x", "closing quote"},
        {GRAMMAR_LARK, "start: /x", "closing slash"},
        {GRAMMAR_LARK, "start: (\"x\"", "not closed"},
        {GRAMMAR_LARK, "start: \"x\"{3,2}", "a count is"},
        {GRAMMAR_LARK, "\n\n%import common.WS", "line 3: of directives"},
        {GRAMMAR_LARK, "start: /x/s", "only i is enforced"},
        {GRAMMAR_LARK, "start: call(\"x\")", "until, marker and text"},
        {GRAMMAR_LARK, "start: until(\"\")", "none of them empty"},
        {GRAMMAR_LARK, "start: \"\\q\"", "unknown escape"},
        {GRAMMAR_CHOICE, "[]", "no text to choose"},
        {GRAMMAR_CHOICE, "[1]", "choice"},
        {GRAMMAR_CHOICE, "[\"a\"", "choice"},
    };
    struct grammar_limits l;
    struct grammar *g;
    struct err e;

    (void)state;
    grammar_limits_init(&l);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *text = cases[i].grammar;
        int rc = grammar_new(&g, vocab, cases[i].kind, text, strlen(text), &l, &e);
        if (rc == 0 || !strstr(e.text, cases[i].says)) {
            fail_msg("%s: %s", text, rc ? e.text : "taken");
        }
    }
}

/* ---- forced tokens ---- */

static int32_t forced(const char *lark, const char *before, int32_t *ret)
{
    struct grammar *g = compile(GRAMMAR_LARK, lark);
    struct constraint *c = start(g);

    for (; *before; before++) {
        assert_int_equal(constraint_accept(c, (uint8_t)*before, &(int64_t){INT64_MAX}), 0);
    }
    int32_t n = constraint_forced(c, ret, 8);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(constraint_accept(c, ret[i], &(int64_t){INT64_MAX}), 0);
    }
    constraint_free(c);
    grammar_unref(g);
    return n;
}

static void forced_tokens_are_the_models_own_whatever_follows(void **state)
{
    int32_t id[8];

    (void)state;
    assert_int_equal(forced("start: \"xhello\" /[0-9]/", "", id), 2);
    assert_int_equal(id[0], 'x');
    assert_int_equal(id[1], WORDS + 2);
    /* The rest may become "hello" or "lo w". */
    assert_int_equal(forced("start: \"xhe\" /[a-z]+/", "", id), 1);
    assert_int_equal(forced("start: \"xhello\" / ?w/", "", id), 2);
    assert_int_equal(forced("start: \"xlo\" / ?w/", "", id), 1);
    assert_int_equal(forced("start: \"x\"? \"y\"", "", id), 0);
    assert_int_equal(forced("start: \"x\"? \"y\"", "x", id), 1);
    assert_int_equal(forced("start: \"x\" \"y\"?", "x", id), 0);
    assert_int_equal(forced("start: \"x\" marker(\"<tool>\") \"y\"", "x", id), 1);
    assert_int_equal(id[0], TOOL);
}

/* ---- limits ---- */

static void repeat_into(struct buf *b, const char *text, int n)
{
    for (int i = 0; i < n; i++) {
        buf_puts(b, text);
    }
}

/* Compiled or refused, within the memory that the limits allow. */
static int try_hostile(enum grammar_kind kind, const struct buf *text, struct err *e)
{
    struct grammar_limits l;
    struct grammar *g;

    grammar_limits_init(&l);
    int rc = grammar_new(&g, vocab, kind, text->data, text->len, &l, e);
    if (rc == 0) {
        struct constraint *c = start(g);
        uint32_t mask[N_TOKENS / 32 + 1];
        for (int i = 0; i < 40 && constraint_mask(c, mask, &(int64_t){INT64_MAX}) == 0; i++) {
            int32_t id = 0;
            while (id < END && !(mask[id / 32] >> (id % 32) & 1)) {
                id++;
            }
            if (constraint_accept(c, id, &(int64_t){INT64_MAX}) != 0) {
                break;
            }
        }
        assert_true(constraint_bytes(c) <= 4096);
        assert_true(grammar_bytes(g) <= (size_t)48 << 20);
        constraint_free(c);
        grammar_unref(g);
    } else {
        assert_true(rc == ERR_INVALID || rc == ERR_UNSUPPORTED);
        assert_true(e->text[0] != '\0');
    }
    return rc;
}

static void hostile_grammars_are_refused_or_bounded(void **state)
{
    static const struct {
        enum grammar_kind kind;
        const char *before, *often, *between, *after;
        int n;
    } cases[] = {
        {GRAMMAR_REGEX, "", "(", "a", ")", 20000},
        {GRAMMAR_REGEX, "", "[", "a", "]", 20000},
        {GRAMMAR_REGEX, "", "(", "a", "*)*", 100},
        {GRAMMAR_REGEX, "", "(", "a", "{1,9}){1,9}", 100},
        {GRAMMAR_REGEX, "", "(", "a?", "){1000}", 3},
        {GRAMMAR_REGEX, "a{1000000}", "", "", "", 1},
        {GRAMMAR_REGEX, "(a{1000000}b?){1000000}", "", "", "", 1},
        {GRAMMAR_REGEX, "x", "|abcdefgh", "", "", 50000},
        {GRAMMAR_REGEX, "", "a?", "", "a", 20000},
        {GRAMMAR_REGEX, "(a|b)*a", "(a|b)", "", "", 5000},
        {GRAMMAR_REGEX, "", "\\p{L}{9}[^\\p{N}]", "", "", 2000},
        {GRAMMAR_LARK, "start: ", "(", "\"a\"", ")", 20000},
        {GRAMMAR_LARK, "start: \"a\"", "|start start", "", "", 2000},
        {GRAMMAR_LARK, "start: a\na: \"x\"", " a?", "", "", 20000},
        {GRAMMAR_LARK, "start: r{1000000}\nr: \"(\" r? \")\"", "", "", "", 1},
        {GRAMMAR_LARK, "start: ", "until(\"aaaaaaaaab\") ", "", "", 2000},
        {GRAMMAR_CHOICE, "[\"a\"", ",\"abcdefghijklmnopq\"", "", "]", 20000},
        {GRAMMAR_CHOICE, "", "[", "", "]", 20000},
    };
    struct buf text;
    struct err e;

    (void)state;
    buf_init(&text, (size_t)4 << 20);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        buf_clear(&text);
        buf_puts(&text, cases[i].before);
        repeat_into(&text, cases[i].often, cases[i].n);
        buf_puts(&text, cases[i].between);
        repeat_into(&text, cases[i].after, cases[i].n);
        try_hostile(cases[i].kind, &text, &e);
    }
    buf_release(&text);
}

static void limits_are_named(void **state)
{
    struct grammar_limits l;
    struct grammar *g;
    struct err e;
    char deep[600];

    (void)state;
    grammar_limits_init(&l);
    l.text_bytes = 3;
    assert_int_equal(grammar_new(&g, vocab, GRAMMAR_REGEX, "abcd", 4, &l, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "4 bytes, at most 3"));
    grammar_limits_init(&l);
    memset(deep, '(', 300);
    memset(deep + 300, ')', 300);
    assert_int_equal(grammar_new(&g, vocab, GRAMMAR_REGEX, deep, 600, &l, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "deeper than 128"));
    l.items = 50;
    assert_int_equal(grammar_new(&g, vocab, GRAMMAR_JSON_OBJECT, "", 0, &l, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "more than 50 nodes"));
    l.items = 100000;
    l.bytes = 4000;
    assert_int_equal(grammar_new(&g, vocab, GRAMMAR_JSON_OBJECT, "", 0, &l, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "more than 4000 bytes"));
    grammar_limits_init(&l);
    l.work = 1;
    assert_int_equal(grammar_new(&g, vocab, GRAMMAR_JSON_OBJECT, "", 0, &l, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "more than 1 steps"));
}

/* ---- many states, many threads ---- */

/* Each text of 20 letters after the a is a state of its own: more than are kept. */
static void sequences_go_on_when_the_states_are_full(void **state)
{
    struct grammar *g = compile(GRAMMAR_REGEX, "(a|b)*a(a|b){19}");
    struct constraint *c = start(g), *early = start(g);
    char last[20] = {0};
    uint32_t drawn = 5;

    (void)state;
    assert_int_equal(constraint_accept(early, 'a', &(int64_t){INT64_MAX}), 0);
    for (int i = 0; i < 400000; i++) {
        drawn = drawn * 1664525u + 1013904223u;
        char letter = drawn >> 20 & 1 ? 'a' : 'b';
        assert_int_equal(constraint_accept(c, letter, &(int64_t){INT64_MAX}), 0);
        constraint_settle(c);
        memmove(last, last + 1, sizeof(last) - 1);
        last[sizeof(last) - 1] = letter;
        assert_int_equal(constraint_complete(c), i >= 19 && last[0] == 'a');
    }
    assert_true(grammar_bytes(g) <= (size_t)48 << 20);
    for (int i = 0; i < 19; i++) {
        assert_false(constraint_complete(early));
        assert_int_equal(constraint_accept(early, 'b', &(int64_t){INT64_MAX}), 0);
    }
    assert_true(constraint_complete(early));
    constraint_free(c);
    constraint_free(early);
    grammar_unref(g);
}

struct runner {
    struct grammar *g;
    uint32_t seed;
    uint64_t sum; /* of what the masks held */
};

static void *run(void *arg)
{
    struct runner *r = arg;
    uint32_t mask[N_TOKENS / 32 + 1] = {0}, drawn = r->seed;

    for (int i = 0; i < 40; i++) {
        struct constraint *c;
        struct err e;
        bool ok = constraint_new(&c, r->g, &e) == 0;
        for (int k = 0; k < 60 && ok; k++) {
            ok = constraint_mask(c, mask, &(int64_t){INT64_MAX}) == 0;
            drawn = drawn * 1664525u + 1013904223u;
            int32_t id = (int32_t)((drawn >> 8) % N_TOKENS);
            while (ok && !(mask[id / 32] >> (id % 32) & 1)) {
                id = (id + 1) % N_TOKENS;
            }
            for (int w = 0; w <= N_TOKENS / 32; w++) {
                r->sum = r->sum * 31 + mask[w];
            }
            ok = ok && constraint_accept(c, id, &(int64_t){INT64_MAX}) == 0;
        }
        r->sum += ok;
        constraint_free(c);
    }
    return NULL;
}

static void threads_see_the_masks_that_one_alone_sees(void **state)
{
    enum { N = 4 };
    struct runner alone[N], together[N];
    pthread_t thread[N];

    (void)state;
    for (int i = 0; i < N; i++) {
        struct grammar *g = compile(GRAMMAR_JSON_OBJECT, "");
        alone[i] = (struct runner){g, (uint32_t)i, 0};
        run(&alone[i]);
        grammar_unref(g);
    }
    struct grammar *g = compile(GRAMMAR_JSON_OBJECT, "");
    for (int i = 0; i < N; i++) {
        together[i] = (struct runner){g, (uint32_t)i, 0};
        assert_int_equal(pthread_create(&thread[i], NULL, run, &together[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(thread[i], NULL);
        assert_true(together[i].sum == alone[i].sum);
    }
    grammar_unref(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grammars_take_their_sentences_alone),
        cmocka_unit_test(faults_are_told_with_their_line),
        cmocka_unit_test(forced_tokens_are_the_models_own_whatever_follows),
        cmocka_unit_test(hostile_grammars_are_refused_or_bounded),
        cmocka_unit_test(limits_are_named),
        cmocka_unit_test(sequences_go_on_when_the_states_are_full),
        cmocka_unit_test(threads_see_the_masks_that_one_alone_sees),
    };

    return cmocka_run_group_tests(tests, make_vocab, free_vocab);
}
