/* Grammars that need no notation of their own: one of several texts, any JSON
 * object. */
#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "engine/constrain/builder.h"

struct strings {
    char **text;    /* [n], owned */
    size_t *len;    /* [n] */
    int32_t n, cap; /* texts, and how many fit */
};

static bool add_string(struct grammar_builder *b, struct strings *s, const char *text, size_t len)
{
    int32_t cap = s->cap;

    if (!budget_grow(&b->budget, &s->text, &cap, (int64_t)s->n + 1, sizeof(*s->text)) ||
        !budget_grow(&b->budget, &s->len, &s->cap, (int64_t)s->n + 1, sizeof(*s->len))) {
        return false;
    }
    s->text[s->n] = malloc(len + 1);
    if (!s->text[s->n]) {
        return budget_fail(&b->budget, ERR_NOMEM, NULL);
    }
    memcpy(s->text[s->n], text, len);
    s->len[s->n++] = len;
    return budget_work(&b->budget, (int64_t)len);
}

static void read_strings(struct grammar_builder *b, struct strings *s, const char *text, size_t len)
{
    struct err e = {0};
    struct json *j = malloc(sizeof(*j));
    char *one = malloc(len + 1);
    size_t n;

    if (!j || !one) {
        budget_fail(&b->budget, ERR_NOMEM, NULL);
        goto out;
    }
    json_init(j, text, len, "choice", &e);
    j->takes_nul = true;
    json_enter_array(j);
    while (json_next_element(j) && json_read_string(j, one, len + 1, &n) &&
           add_string(b, s, one, n)) {
    }
    if (!b->budget.failed && !json_finish(j)) {
        grammar_build_fail(b, ERR_INVALID, "%s", e.text);
    }
out:
    free(one);
    free(j);
}

/* Texts of a range that agree in their first `at` bytes, as a tree. */
static rx_id tree(struct grammar_builder *b, const struct strings *s, const int32_t *order,
                  int32_t n, size_t at, int32_t depth);

static int by_text(const void *x, const void *y, void *arg)
{
    const struct strings *s = arg;
    int32_t a = *(const int32_t *)x, b = *(const int32_t *)y;
    int order = memcmp(s->text[a], s->text[b], MIN(s->len[a], s->len[b]));

    return order ? order : (s->len[a] > s->len[b]) - (s->len[a] < s->len[b]);
}

/* What the first and the last of sorted texts have in common, all have. */
static size_t shared(const struct strings *s, int32_t x, int32_t y, size_t at)
{
    size_t n = MIN(s->len[x], s->len[y]);

    while (at < n && s->text[x][at] == s->text[y][at]) {
        at++;
    }
    return at;
}

static rx_id tree(struct grammar_builder *b, const struct strings *s, const int32_t *order,
                  int32_t n, size_t at, int32_t depth)
{
    enum { MAX_TREE = 400 }; /* deeper, texts stand beside each other */
    rx_id all = RX_ID_NEVER;

    for (int32_t i = 0; i < n;) {
        int32_t last = i;
        const char *text = s->text[order[i]];
        size_t len = s->len[order[i]];
        while (depth < MAX_TREE && len > at && last + 1 < n &&
               s->text[order[last + 1]][at] == text[at]) {
            last++;
        }
        size_t end = last == i ? len : shared(s, order[i], order[last], at);
        rx_id one = rx_bytes(b, text + at, end - at);
        if (last > i) {
            one = rx_concat(b, one, tree(b, s, order + i, last - i + 1, end, depth + 1));
        }
        all = rx_or(b, all, one);
        i = last + 1;
    }
    return all;
}

sym_id choice_build(struct grammar_builder *b, const char *text, size_t len)
{
    struct strings s = {0};
    sym_id start = 0;

    read_strings(b, &s, text, len);
    if (!grammar_build_failed(b) && s.n == 0) {
        grammar_build_fail(b, ERR_INVALID, "choice: no text to choose");
    }
    int32_t *order = malloc(((size_t)s.n + 1) * sizeof(*order));
    if (order && !grammar_build_failed(b)) {
        for (int32_t i = 0; i < s.n; i++) {
            order[i] = i;
        }
        qsort_r(order, (size_t)s.n, sizeof(*order), by_text, &s);
        start = sym_terminal(b, tree(b, &s, order, s.n, 0, 0));
    }
    for (int32_t i = 0; i < s.n; i++) {
        free(s.text[i]);
    }
    free(order);
    free(s.text);
    free(s.len);
    return start;
}

/* ---- JSON ---- */

static rx_id bytes(struct grammar_builder *b, const char *text)
{
    return rx_bytes(b, text, strlen(text));
}

static rx_id json_number(struct grammar_builder *b)
{
    static const char number[] = "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?";

    return rx_parse(b, number, sizeof(number) - 1, false);
}

static rx_id json_string(struct grammar_builder *b)
{
    return rx_concat(b, bytes(b, "\""), rx_concat(b, rx_json_body(b, rx_any(b)), bytes(b, "\"")));
}

/* White space: at most two blanks, and where a line may end that, or its break and
 * indentation. */
struct blanks {
    sym_id spaces, line;
};

/* open (item ("," item)*)? close, with blanks between. */
static sym_id json_list(struct grammar_builder *b, const char *open, sym_id item, const char *close,
                        const struct blanks *blanks)
{
    sym_id blank = blanks->line;
    sym_id comma_parts[] = {blanks->spaces, sym_text(b, ","), blank, item};
    sym_id more = sym_repeat(b, sym_concat(b, comma_parts, 4), 0, -1);
    sym_id item_parts[] = {item, more, blank};
    sym_id items = sym_repeat(b, sym_concat(b, item_parts, 3), 0, 1);
    sym_id parts[] = {sym_text(b, open), blank, items, sym_text(b, close)};

    return sym_concat(b, parts, 4);
}

sym_id json_object_build(struct grammar_builder *b)
{
    static const char spaces[] = " {0,2}", line[] = " {0,2}|\\r?\\n[ \\t]{0,64}";
    struct blanks blanks = {sym_terminal(b, rx_parse(b, spaces, sizeof(spaces) - 1, false)),
                            sym_terminal(b, rx_parse(b, line, sizeof(line) - 1, false))};
    sym_id value = sym_rule(b);
    sym_id string = sym_terminal(b, json_string(b));
    sym_id member_parts[] = {string, blanks.spaces, sym_text(b, ":"), blanks.spaces, value};
    sym_id member = sym_concat(b, member_parts, 5);
    sym_id object = json_list(b, "{", member, "}", &blanks);
    sym_id array = json_list(b, "[", value, "]", &blanks);
    rx_id words = rx_or(b, bytes(b, "true"), rx_or(b, bytes(b, "false"), bytes(b, "null")));
    rx_id scalar = rx_or(b, json_number(b), words);
    sym_id kinds[] = {string, object, array, sym_terminal(b, scalar)};

    sym_define(b, value, sym_or(b, kinds, 4));
    return object;
}
