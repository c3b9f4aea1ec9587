#include "engine/constrain/builder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/constrain/vocab.h"

int grammar_build_begin(struct grammar_builder **ret, const struct constrain_vocab *v,
                        const struct grammar_limits *l, struct err *e)
{
    struct grammar_builder *b = calloc(1, sizeof(*b));

    if (!b) {
        return err_nomem(e, "a grammar");
    }
    b->vocab = v;
    b->limits = *l;
    b->budget = (struct budget){.max_bytes = l->bytes, .max_items = l->items};
    if (!rx_init(&b->rx, &b->budget) ||
        !budget_grow(&b->budget, &b->sym, &b->cap_syms, 16, sizeof(*b->sym))) {
        grammar_build_abandon(b);
        return err_nomem(e, "a grammar");
    }
    b->sym[b->n_syms++] = (struct sym){0};
    b->budget.work = 0;
    b->budget.max_work = l->work;
    *ret = b;
    return 0;
}

void grammar_build_abandon(struct grammar_builder *b)
{
    if (!b) {
        return;
    }
    rx_release(&b->rx);
    free(b->sym);
    free(b->part);
    free(b->chars);
    free(b->chars_of);
    free(b->body);
    free(b->range);
    free(b);
}

void grammar_build_fail(struct grammar_builder *b, int rc, const char *format, ...)
{
    char text[400];
    va_list args;

    if (grammar_build_failed(b)) {
        return;
    }
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    err_set(&b->err, rc, "%s", text);
}

/* A limit that the budget met becomes the builder's error. */
bool grammar_build_failed(const struct grammar_builder *b)
{
    return b->err.code != 0 || b->budget.failed;
}

bool grammar_build_work(struct grammar_builder *b, int64_t units)
{
    return budget_work(&b->budget, units) && b->err.code == 0;
}

/* ---- expressions ---- */

rx_id rx_empty(struct grammar_builder *b)
{
    (void)b;
    return RX_ID_EMPTY;
}

rx_id rx_never(struct grammar_builder *b)
{
    (void)b;
    return RX_ID_NEVER;
}

rx_id rx_concat(struct grammar_builder *b, rx_id left, rx_id right)
{
    return rx_make_concat(&b->rx, left, right);
}

rx_id rx_or(struct grammar_builder *b, rx_id left, rx_id right)
{
    return rx_make_or(&b->rx, left, right);
}

rx_id rx_and(struct grammar_builder *b, rx_id left, rx_id right)
{
    return rx_make_and(&b->rx, left, right);
}

rx_id rx_not(struct grammar_builder *b, rx_id x)
{
    return rx_make_and(&b->rx, rx_any(b), rx_make_not(&b->rx, x));
}

rx_id rx_repeat(struct grammar_builder *b, rx_id x, int32_t min, int32_t max)
{
    return rx_make_repeat(&b->rx, x, min, max);
}

bool rx_is_never(struct grammar_builder *b, rx_id x)
{
    return x && !rx_live(&b->rx, x);
}

bool rx_matches(struct grammar_builder *b, rx_id x, const char *text, size_t len)
{
    rx_classify(&b->rx);
    for (size_t i = 0; i < len && x; i++) {
        x = rx_derived(&b->rx, x, b->rx.class_of[(uint8_t)text[i]]);
    }
    return x && rx_has(&b->rx, x, RX_NULLABLE);
}

/* ---- symbols ---- */

static sym_id add_sym(struct grammar_builder *b, struct sym s)
{
    if (grammar_build_failed(b) || !budget_item(&b->budget) ||
        !budget_grow(&b->budget, &b->sym, &b->cap_syms, (int64_t)b->n_syms + 1, sizeof(*b->sym))) {
        return 0;
    }
    b->sym[b->n_syms] = s;
    return b->n_syms++;
}

static bool add_parts(struct grammar_builder *b, const sym_id *part, int32_t n, int32_t *ret)
{
    for (int32_t i = 0; i < n; i++) {
        if (!part[i]) {
            return false;
        }
    }
    if (!budget_work(&b->budget, n) || !budget_grow(&b->budget, &b->part, &b->cap_parts,
                                                    (int64_t)b->n_parts + n, sizeof(*b->part))) {
        return false;
    }
    *ret = b->n_parts;
    if (n > 0) {
        memcpy(b->part + b->n_parts, part, (size_t)n * sizeof(*part));
    }
    b->n_parts += n;
    return true;
}

static bool all_terminals(const struct grammar_builder *b, const sym_id *part, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (b->sym[part[i]].kind != SYM_TERMINAL) {
            return false;
        }
    }
    return true;
}

sym_id sym_terminal(struct grammar_builder *b, rx_id x)
{
    return x ? add_sym(b, (struct sym){.kind = SYM_TERMINAL, .a = x}) : 0;
}

sym_id sym_text(struct grammar_builder *b, const char *text)
{
    return sym_terminal(b, rx_bytes(b, text, strlen(text)));
}

sym_id sym_marker(struct grammar_builder *b, const char *text, size_t len)
{
    int32_t id = vocab_special(b->vocab, text, len);

    return sym_terminal(b, id >= 0 ? rx_make_token(&b->rx, id) : rx_bytes(b, text, len));
}

sym_id sym_until(struct grammar_builder *b, const char *const *text, int32_t n)
{
    rx_id any = RX_ID_NEVER;

    for (int32_t i = 0; i < n; i++) {
        any = rx_or(b, any, rx_bytes(b, text[i], strlen(text[i])));
    }
    /* Special tokens are no text, so none of them is in it. */
    any = rx_concat(b, RX_ID_ALL, rx_concat(b, any, RX_ID_ALL));
    return sym_terminal(b, rx_not(b, any));
}

sym_id sym_concat(struct grammar_builder *b, const sym_id *part, int32_t n)
{
    struct sym s = {.kind = SYM_CONCAT, .n = n};
    rx_id x = RX_ID_EMPTY;

    if (n == 1) {
        return part[0];
    }
    if (all_terminals(b, part, n)) {
        for (int32_t i = n - 1; i >= 0; i--) {
            x = rx_concat(b, b->sym[part[i]].a, x);
        }
        return sym_terminal(b, x);
    }
    return add_parts(b, part, n, &s.a) ? add_sym(b, s) : 0;
}

sym_id sym_or(struct grammar_builder *b, const sym_id *part, int32_t n)
{
    struct sym s = {.kind = SYM_OR, .n = n};
    rx_id x = RX_ID_NEVER;

    if (n == 1) {
        return part[0];
    }
    if (all_terminals(b, part, n)) {
        for (int32_t i = 0; i < n; i++) {
            x = rx_or(b, x, b->sym[part[i]].a);
        }
        return sym_terminal(b, x);
    }
    return add_parts(b, part, n, &s.a) ? add_sym(b, s) : 0;
}

sym_id sym_repeat(struct grammar_builder *b, sym_id x, int32_t min, int32_t max)
{
    struct sym s = {.kind = SYM_REPEAT, .n = 1, .min = min, .max = max};

    if (b->sym[x].kind == SYM_TERMINAL) {
        return sym_terminal(b, rx_repeat(b, b->sym[x].a, min, max));
    }
    if (max == 0) {
        return sym_terminal(b, RX_ID_EMPTY);
    }
    if (min == 1 && max == 1) {
        return x;
    }
    return add_parts(b, &x, 1, &s.a) ? add_sym(b, s) : 0;
}

sym_id sym_rule(struct grammar_builder *b)
{
    return add_sym(b, (struct sym){.kind = SYM_RULE});
}

void sym_define(struct grammar_builder *b, sym_id rule, sym_id body)
{
    if (rule && body) {
        b->sym[rule].a = body;
    }
}
