/* Random grammars over two letters against a matcher that knows nothing of derivatives
 * or rows: it fills tables of "part p matches text[i..j)" until nothing changes. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/constrain/grammar_build.h"

enum { MAX_PARTS = 40, MAX_TEXT = 16, N_GRAMMARS = 1500, WALK = 5 };

/* ---- the vocabulary: all texts of up to three letters, some twice, and names ---- */

enum { N_TEXTS = 2 + 4 + 8 + 3, NAME = N_TEXTS, OTHER_NAME, END, N_TOKENS };

static const char *const texts[N_TOKENS] = {
    "a",   "b",   "aa",  "ab",  "ba", "bb", "aaa", "aab", "aba",     "abb",
    "baa", "bab", "bba", "bbb", "a",  "ab", "bba", "<n>", "<other>", "",
};

static const char *token_bytes(const void *arg, int32_t id, size_t *ret_len)
{
    (void)arg;
    *ret_len = strlen(texts[id]);
    return texts[id];
}

static bool token_special(const void *arg, int32_t id)
{
    (void)arg;
    return id == NAME || id == OTHER_NAME;
}

static struct constrain_vocab *vocab;

static int make_vocab(void **state)
{
    static const int32_t eos = END;
    struct constrain_tokens t = {
        .n = N_TOKENS, .n_eos = 1, .eos = &eos, .bytes = token_bytes, .special = token_special};
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

/* ---- grammars as the matcher sees them: letters a, b and n, which stands for
 * NAME ---- */

enum kind { LETTER, EMPTY, SEQUENCE, CHOICE, REPEAT, RULE };

struct part {
    enum kind kind;
    char letter;
    int a, b;     /* parts */
    int min, max; /* REPEAT of a */
};

struct model {
    struct part part[MAX_PARTS];
    int n, start;
};

static uint32_t drawn;

static int draw(int below)
{
    drawn = drawn * 1664525u + 1013904223u;
    return (int)((drawn >> 8) % (uint32_t)below);
}

static int add(struct model *m, struct part p)
{
    m->part[m->n] = p;
    return m->n++;
}

/* Rules are parts 0 .. 2; each may be referred to from anywhere. */
static int make_part(struct model *m, int depth)
{
    int kind = depth > 0 && m->n < MAX_PARTS - 8 ? draw(12) : draw(3);

    if (kind < 2) {
        return add(m, (struct part){.kind = LETTER, .letter = "aabbabn"[draw(7)]});
    }
    if (kind == 2) {
        return draw(3) ? add(m, (struct part){.kind = LETTER, .letter = 'a'})
                       : add(m, (struct part){.kind = EMPTY});
    }
    if (kind < 5) {
        return draw(3);
    }
    struct part p = {.kind = kind < 8 ? SEQUENCE : kind < 10 ? CHOICE : REPEAT};
    p.a = make_part(m, depth - 1);
    if (p.kind == REPEAT) {
        p.min = draw(3);
        p.max = draw(2) ? -1 : p.min + draw(3);
    } else {
        p.b = make_part(m, depth - 1);
    }
    return add(m, p);
}

static void make_model(struct model *m)
{
    memset(m, 0, sizeof(*m));
    m->n = 3;
    for (int rule = 0; rule < 3; rule++) {
        int body = make_part(m, 3);
        m->part[rule] = (struct part){.kind = RULE, .a = body};
    }
}

/* ---- the matcher ---- */

struct tables {
    const char *text;
    int len;
    bool derives[MAX_PARTS];                       /* some text */
    bool match[MAX_PARTS][MAX_TEXT][MAX_TEXT + 1]; /* text[i .. j) */
    bool begins[MAX_PARTS][MAX_TEXT];              /* text[i ..) begins a text of it */
};

/* Whether `a` repeated from min to max times matches text[i .. j), by counting. */
static bool repeats(const struct tables *t, const struct part *p, int i, int j)
{
    bool at[MAX_TEXT] = {false}, next[MAX_TEXT];
    int most = p->max < 0 ? p->min + MAX_TEXT : p->max;

    at[i] = true;
    for (int count = 0; count <= most; count++) {
        if (count >= p->min && at[j]) {
            return true;
        }
        memset(next, 0, sizeof(next));
        for (int from = i; from <= j; from++) {
            for (int to = from; at[from] && to <= j; to++) {
                next[to] |= t->match[p->a][from][to];
            }
        }
        memcpy(at, next, sizeof(at));
    }
    return false;
}

static bool part_derives(const struct tables *t, const struct part *p)
{
    switch (p->kind) {
    case LETTER:
    case EMPTY:
        return true;
    case SEQUENCE:
        return t->derives[p->a] && t->derives[p->b];
    case CHOICE:
        return t->derives[p->a] || t->derives[p->b];
    case REPEAT:
        return p->min == 0 || t->derives[p->a];
    case RULE:
        break;
    }
    return t->derives[p->a];
}

static bool part_matches(const struct tables *t, const struct part *p, int i, int j)
{
    bool found = false;

    switch (p->kind) {
    case LETTER:
        return j == i + 1 && t->text[i] == p->letter;
    case EMPTY:
        return i == j;
    case SEQUENCE:
        for (int k = i; k <= j && !found; k++) {
            found = t->match[p->a][i][k] && t->match[p->b][k][j];
        }
        return found;
    case CHOICE:
        return t->match[p->a][i][j] || t->match[p->b][i][j];
    case REPEAT:
        return repeats(t, p, i, j);
    case RULE:
        break;
    }
    return t->match[p->a][i][j];
}

/* Whether `a` repeated begins with text[i ..): some repetitions match up to k, and the
 * next one begins with the rest. */
static bool repetition_begins(const struct tables *t, const struct part *p, int i)
{
    struct part before = *p;

    if (p->max == 0 || !t->derives[p->a]) {
        return i == t->len && part_derives(t, p);
    }
    before.min = 0;
    before.max = p->max < 0 ? -1 : p->max - 1;
    for (int k = i; k <= t->len; k++) {
        if (t->begins[p->a][k] && repeats(t, &before, i, k)) {
            return true;
        }
    }
    return i == t->len;
}

static bool part_begins(const struct tables *t, const struct part *p, int i)
{
    bool found = false;

    switch (p->kind) {
    case LETTER:
        return i == t->len || (i == t->len - 1 && t->text[i] == p->letter);
    case EMPTY:
        return i == t->len;
    case SEQUENCE:
        found = t->derives[p->b] && t->begins[p->a][i];
        for (int k = i; k <= t->len && !found; k++) {
            found = t->match[p->a][i][k] && t->begins[p->b][k];
        }
        return found;
    case CHOICE:
        return t->begins[p->a][i] || t->begins[p->b][i];
    case REPEAT:
        return repetition_begins(t, p, i);
    case RULE:
        break;
    }
    return t->begins[p->a][i];
}

static bool set(bool *to, bool value)
{
    bool news = value && !*to;

    *to |= value;
    return news;
}

static void fill(struct tables *t, const struct model *m, const char *text)
{
    memset(t, 0, sizeof(*t));
    t->text = text;
    t->len = (int)strlen(text);
    for (bool news = true; news;) {
        news = false;
        for (int p = 0; p < m->n; p++) {
            news |= set(&t->derives[p], part_derives(t, &m->part[p]));
            for (int i = 0; i <= t->len; i++) {
                for (int j = i; j <= t->len; j++) {
                    news |= set(&t->match[p][i][j], part_matches(t, &m->part[p], i, j));
                }
            }
        }
    }
    for (bool news = true; news;) {
        news = false;
        for (int p = 0; p < m->n; p++) {
            for (int i = 0; i <= t->len; i++) {
                news |= set(&t->begins[p][i], part_begins(t, &m->part[p], i));
            }
        }
    }
}

static bool is_sentence(const struct model *m, const char *text)
{
    static struct tables t;

    fill(&t, m, text);
    return t.match[m->start][0][t.len];
}

static bool may_begin(const struct model *m, const char *text)
{
    static struct tables t;

    fill(&t, m, text);
    return t.begins[m->start][0];
}

/* ---- the same grammar for the engine ---- */

static sym_id symbol_of(struct grammar_builder *b, const struct model *m, const sym_id *rule, int p)
{
    const struct part *part = &m->part[p];
    char letter[2] = {part->letter, '\0'};

    if (p < 3) {
        return rule[p];
    }
    if (part->kind == LETTER) {
        return part->letter == 'n' ? sym_marker(b, "<n>", 3) : sym_text(b, letter);
    }
    if (part->kind == EMPTY) {
        return sym_text(b, "");
    }
    sym_id left = symbol_of(b, m, rule, part->a);
    if (part->kind == REPEAT) {
        return sym_repeat(b, left, part->min, part->max);
    }
    sym_id parts[] = {left, symbol_of(b, m, rule, part->b)};
    return part->kind == SEQUENCE ? sym_concat(b, parts, 2) : sym_or(b, parts, 2);
}

static int compile(struct grammar **ret, const struct model *m, struct err *e)
{
    struct grammar_limits l;
    struct grammar_builder *b;
    sym_id rule[3];

    grammar_limits_init(&l);
    assert_int_equal(grammar_build_begin(&b, vocab, &l, e), 0);
    for (int i = 0; i < 3; i++) {
        rule[i] = sym_rule(b);
    }
    for (int i = 0; i < 3; i++) {
        sym_define(b, rule[i], symbol_of(b, m, rule, m->part[i].a));
    }
    return grammar_build_end(ret, b, rule[m->start], e);
}

/* A token's letters in the matcher's texts. */
static const char *letters(int32_t id)
{
    return id == NAME ? "n" : id == OTHER_NAME ? "?" : texts[id];
}

static bool has(uint32_t mask, int32_t id)
{
    return mask >> id & 1;
}

static void check_mask(const struct model *m, struct constraint *c, const char *text, uint32_t mask)
{
    char longer[MAX_TEXT + 8];

    for (int32_t id = 0; id < N_TOKENS; id++) {
        bool wanted = id == END ? is_sentence(m, text) : false;
        if (id != END) {
            snprintf(longer, sizeof(longer), "%s%s", text, letters(id));
            wanted = may_begin(m, longer);
        }
        assert_int_equal(has(mask, id), wanted);
        assert_int_equal(constraint_allows(c, id), wanted);
    }
    assert_int_equal(constraint_complete(c), is_sentence(m, text));
    assert_int_equal(constraint_ended(c, &(int64_t){INT64_MAX}), mask == 1u << END);
}

/* A token that the mask allows, the end only where nothing else is. */
static int32_t draw_token(uint32_t mask)
{
    int32_t id = draw(N_TOKENS);

    mask = mask == 1u << END ? mask : mask & ~(1u << END);
    while (!has(mask, id)) {
        id = (id + 1) % N_TOKENS;
    }
    return id;
}

static void walk(const struct model *m, struct grammar *g)
{
    struct constraint *c;
    char text[MAX_TEXT + 1] = "";
    uint32_t mask = 0;
    struct err e;

    assert_int_equal(constraint_new(&c, g, &e), 0);
    for (int i = 0; i < WALK; i++) {
        assert_int_equal(constraint_mask(c, &mask, &(int64_t){INT64_MAX}), 0);
        check_mask(m, c, text, mask);
        int32_t id = draw_token(mask);
        assert_int_equal(constraint_accept(c, id, &(int64_t){INT64_MAX}), 0);
        if (id == END) {
            break;
        }
        strcat(text, letters(id));
        if (strlen(text) + 3 >= MAX_TEXT - 1) {
            break;
        }
    }
    constraint_free(c);
}

/* Whether the two allow the same tokens now and for a while. */
static void check_alike(struct constraint *x, struct constraint *y)
{
    uint32_t mask = 0, other = 0;

    for (int i = 0; i < 4; i++) {
        assert_int_equal(constraint_mask(x, &mask, &(int64_t){INT64_MAX}), 0);
        assert_int_equal(constraint_mask(y, &other, &(int64_t){INT64_MAX}), 0);
        assert_int_equal(mask, other);
        int32_t id = draw_token(mask);
        assert_int_equal(constraint_accept(x, id, &(int64_t){INT64_MAX}), 0);
        assert_int_equal(constraint_accept(y, id, &(int64_t){INT64_MAX}), 0);
    }
    constraint_rollback(x, 4);
    constraint_rollback(y, 4);
}

/* Tokens are taken back, and the state forks; a fresh one replays what is left. */
static void check_rollback(struct grammar *g)
{
    struct constraint *c, *forked, *fresh;
    int32_t taken[8];
    int n = 1 + draw(7), kept = draw(n + 1);
    uint32_t mask = 0;
    struct err e;

    assert_int_equal(constraint_new(&c, g, &e), 0);
    for (int i = 0; i < n; i++) {
        assert_int_equal(constraint_mask(c, &mask, &(int64_t){INT64_MAX}), 0);
        taken[i] = draw_token(mask);
        assert_int_equal(constraint_accept(c, taken[i], &(int64_t){INT64_MAX}), 0);
    }
    assert_int_equal(constraint_fork(&forked, c, &e), 0);
    constraint_rollback(forked, n - kept);
    assert_int_equal(constraint_new(&fresh, g, &e), 0);
    for (int i = 0; i < kept; i++) {
        assert_int_equal(constraint_accept(fresh, taken[i], &(int64_t){INT64_MAX}), 0);
    }
    check_alike(forked, fresh);
    constraint_free(fresh);
    constraint_rollback(c, n - kept);
    constraint_settle(c);
    constraint_rollback(c, 3);
    check_alike(forked, c);
    constraint_free(c);
    constraint_free(forked);
}

/* Calls `check` for random grammars that some text satisfies; those that none does must
 * be refused. */
static void for_grammars(uint32_t seed, void (*check)(const struct model *m, struct grammar *g))
{
    static struct model m;
    struct grammar *g;
    struct err e;

    for (uint32_t i = 0; i < N_GRAMMARS; i++) {
        drawn = seed + i * 7919;
        make_model(&m);
        int rc = compile(&g, &m, &e);
        if (!may_begin(&m, "")) {
            assert_int_equal(rc, ERR_INVALID);
            continue;
        }
        if (rc != 0) {
            fail_msg("grammar %u: %s", i, e.text);
        }
        check(&m, g);
        grammar_unref(g);
    }
}

static void check_walks(const struct model *m, struct grammar *g)
{
    walk(m, g);
    walk(m, g);
}

static void masks_hold_the_tokens_after_which_a_sentence_can_be_completed(void **state)
{
    (void)state;
    for_grammars(1, check_walks);
}

static void check_rollbacks(const struct model *m, struct grammar *g)
{
    (void)m;
    check_rollback(g);
    check_rollback(g);
}

static void taking_back_and_forking_equal_a_replay(void **state)
{
    (void)state;
    for_grammars(77, check_rollbacks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masks_hold_the_tokens_after_which_a_sentence_can_be_completed),
        cmocka_unit_test(taking_back_and_forking_equal_a_replay),
    };

    return cmocka_run_group_tests(tests, make_vocab, free_vocab);
}
