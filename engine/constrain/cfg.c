/* From symbols to tables: what is regular becomes terminals, however deep it is nested;
 * what is recursive becomes rules. */
#include "engine/constrain/cfg.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 1000 };
enum { UNSEEN, OPEN, REGULAR, NOT_REGULAR };

struct compile {
    struct grammar_builder *b;
    struct cfg *g;
    uint8_t *state;  /* [n_syms] UNSEEN and its like, owned */
    rx_id *regular;  /* [n_syms] the expression of a regular symbol, owned */
    int32_t *rule;   /* [n_syms] 1 + the rule of another, or 0; owned */
    sym_id *of_rule; /* [n_rules] what a rule is made of, owned */
    int32_t cap;     /* of of_rule */
    int32_t depth;   /* of recursion */
};

/* ---- what is regular ---- */

static bool find_regular(struct compile *c, sym_id s);

static bool parts_regular(struct compile *c, const struct sym *s)
{
    bool all = true;

    for (int32_t i = 0; i < s->n; i++) {
        all &= find_regular(c, c->b->part[s->a + i]);
    }
    return all;
}

static rx_id combine(struct compile *c, const struct sym *s)
{
    struct rx *r = &c->b->rx;
    rx_id x = s->kind == SYM_OR ? RX_ID_NEVER : RX_ID_EMPTY;

    if (s->kind == SYM_REPEAT) {
        return rx_make_repeat(r, c->regular[c->b->part[s->a]], s->min, s->max);
    }
    for (int32_t i = s->n - 1; i >= 0; i--) {
        rx_id part = c->regular[c->b->part[s->a + i]];
        x = s->kind == SYM_OR ? rx_make_or(r, x, part) : rx_make_concat(r, part, x);
    }
    return x;
}

/* A symbol that is met again while it is open is recursive, and so is what holds it. */
static bool find_regular(struct compile *c, sym_id id)
{
    const struct sym *s = &c->b->sym[id];

    if (c->state[id] != UNSEEN) {
        return c->state[id] == REGULAR;
    }
    if (s->kind == SYM_RULE && !s->a) {
        grammar_build_fail(c->b, ERR_INVALID, "a rule of the grammar is not defined");
    }
    if (c->depth >= MAX_DEPTH) {
        grammar_build_fail(c->b, ERR_INVALID, "the grammar nests deeper than %d", MAX_DEPTH);
    }
    if (!grammar_build_work(c->b, 1)) {
        return false;
    }
    c->state[id] = OPEN;
    c->depth++;
    bool regular = true;
    if (s->kind == SYM_TERMINAL) {
        c->regular[id] = s->a;
    } else if (s->kind == SYM_RULE) {
        regular = find_regular(c, s->a);
        c->regular[id] = c->regular[s->a];
    } else {
        regular = parts_regular(c, s);
        c->regular[id] = regular ? combine(c, s) : 0;
    }
    c->depth--;
    c->state[id] = regular ? REGULAR : NOT_REGULAR;
    return regular;
}

/* ---- productions ---- */

static bool push(struct compile *c, int32_t **array, int32_t *n, int32_t *cap, int32_t value)
{
    if (!budget_grow(&c->b->budget, array, cap, (int64_t)*n + 1, sizeof(**array))) {
        return false;
    }
    (*array)[(*n)++] = value;
    return true;
}

/* Rules are numbered when they are first met; their productions are made in that order.
 * Negative numbers stand for them until the number of terminals is known. */
static int32_t rule_of(struct compile *c, sym_id s)
{
    struct cfg *g = c->g;

    if (!c->rule[s]) {
        if (!budget_item(&c->b->budget) ||
            !budget_grow(&c->b->budget, &g->rule, &g->cap_rules, (int64_t)g->n_rules + 1,
                         sizeof(*g->rule)) ||
            !budget_grow(&c->b->budget, &c->of_rule, &c->cap, (int64_t)g->n_rules + 1,
                         sizeof(*c->of_rule))) {
            return 0;
        }
        c->of_rule[g->n_rules] = s;
        g->rule[g->n_rules++] = (struct cfg_rule){0};
        c->rule[s] = g->n_rules;
    }
    return c->rule[s] - 1;
}

static int32_t terminal_of(struct compile *c, rx_id x)
{
    struct cfg *g = c->g;

    for (int32_t i = MAX(g->n_terms - 64, 0); i < g->n_terms; i++) {
        if (g->term[i] == x) {
            return i;
        }
    }
    push(c, &g->term, &g->n_terms, &g->cap_terms, x);
    return g->n_terms - 1;
}

/* A production while it is made: rules as ~rule, and regular parts joined. */
static void add_regular(struct compile *c, rx_id *pending)
{
    if (*pending && *pending != RX_ID_EMPTY) {
        push(c, &c->g->rhs, &c->g->n_rhs, &c->g->cap_rhs, terminal_of(c, *pending));
    }
    *pending = RX_ID_EMPTY;
}

static void add_symbol(struct compile *c, sym_id id, rx_id *pending)
{
    const struct sym *s = &c->b->sym[id];

    if (!grammar_build_work(c->b, 1)) {
        return;
    }
    if (c->state[id] == REGULAR) {
        *pending = rx_make_concat(&c->b->rx, *pending, c->regular[id]);
    } else if (s->kind == SYM_CONCAT && c->depth < MAX_DEPTH) {
        c->depth++;
        for (int32_t i = 0; i < s->n; i++) {
            add_symbol(c, c->b->part[s->a + i], pending);
        }
        c->depth--;
    } else {
        add_regular(c, pending);
        push(c, &c->g->rhs, &c->g->n_rhs, &c->g->cap_rhs, ~rule_of(c, id));
    }
}

static void begin_production(struct compile *c)
{
    push(c, &c->g->start, &c->g->n_starts, &c->g->cap_starts, c->g->n_rhs);
}

static void end_production(struct compile *c)
{
    push(c, &c->g->rhs, &c->g->n_rhs, &c->g->cap_rhs, INT32_MIN);
}

static void make_alternative(struct compile *c, sym_id id)
{
    rx_id pending = RX_ID_EMPTY;

    begin_production(c);
    add_symbol(c, id, &pending);
    add_regular(c, &pending);
    end_production(c);
}

/* The alternatives of a symbol; regular ones are gathered. */
static void make_alternatives(struct compile *c, sym_id id, rx_id *regular)
{
    const struct sym *s = &c->b->sym[id];

    if (c->state[id] == REGULAR) {
        *regular = rx_make_or(&c->b->rx, *regular, c->regular[id]);
    } else if (s->kind == SYM_OR && c->depth < MAX_DEPTH) {
        c->depth++;
        for (int32_t i = 0; i < s->n; i++) {
            make_alternatives(c, c->b->part[s->a + i], regular);
        }
        c->depth--;
    } else {
        make_alternative(c, id);
    }
}

static void make_rule(struct compile *c, int32_t rule)
{
    const struct sym *s = &c->b->sym[c->of_rule[rule]];
    struct cfg *g = c->g;
    rx_id regular = RX_ID_NEVER;

    g->rule[rule].first = g->n_starts;
    g->rule[rule].min = s->min;
    g->rule[rule].max = s->max;
    if (s->kind == SYM_REPEAT && s->max != 1) {
        g->rule[rule].repeats = true;
        begin_production(c);
        int32_t of = rule_of(c, c->b->part[s->a]);
        push(c, &g->rhs, &g->n_rhs, &g->cap_rhs, ~of);
        end_production(c);
    } else if (s->kind == SYM_REPEAT) {
        regular = s->min == 0 ? RX_ID_EMPTY : RX_ID_NEVER;
        make_alternatives(c, c->b->part[s->a], &regular);
    } else {
        make_alternatives(c, s->kind == SYM_RULE ? s->a : c->of_rule[rule], &regular);
    }
    if (regular != RX_ID_NEVER) {
        begin_production(c);
        add_regular(c, &regular);
        end_production(c);
    }
    g->rule[rule].n = g->n_starts - g->rule[rule].first;
}

/* Rules take their numbers above the terminals, ends the number of their rule. */
static void number_symbols(struct cfg *g)
{
    for (int32_t rule = 0; rule < g->n_rules; rule++) {
        for (int32_t k = 0; k < g->rule[rule].n; k++) {
            int32_t *at = &g->rhs[g->start[g->rule[rule].first + k]];
            for (; *at != INT32_MIN; at++) {
                *at = *at < 0 ? g->n_terms + ~*at : *at;
            }
            *at = END_OF(rule);
        }
    }
}

/* ---- what derives something, and what derives the empty text ---- */

enum property { PRODUCTIVE, NULLABLE };

static bool has_property(struct compile *c, int32_t symbol, enum property p)
{
    const struct cfg *g = c->g;

    if (symbol < g->n_terms) {
        return p == PRODUCTIVE ? rx_live(&c->b->rx, g->term[symbol])
                               : rx_has(&c->b->rx, g->term[symbol], RX_NULLABLE);
    }
    const struct cfg_rule *r = &g->rule[symbol - g->n_terms];
    return p == PRODUCTIVE ? r->productive : r->nullable;
}

static bool rule_has(struct compile *c, const struct cfg_rule *r, enum property p)
{
    if (r->repeats && r->min == 0) {
        return true;
    }
    for (int32_t k = 0; k < r->n; k++) {
        const int32_t *at = &c->g->rhs[c->g->start[r->first + k]];
        while (*at >= 0 && has_property(c, *at, p)) {
            at++;
        }
        if (*at < 0) {
            return true;
        }
    }
    return false;
}

/* Each pass finds at least one more rule or is the last. Parts are mostly numbered
 * after what holds them, so a pass runs backwards. */
static void find_property(struct compile *c, enum property p)
{
    for (bool more = true; more && budget_work(&c->b->budget, c->g->n_rhs);) {
        more = false;
        for (int32_t i = c->g->n_rules - 1; i >= 0; i--) {
            struct cfg_rule *r = &c->g->rule[i];
            bool *has = p == PRODUCTIVE ? &r->productive : &r->nullable;
            if (!*has && rule_has(c, r, p)) {
                *has = more = true;
            }
        }
    }
}

/* Productions with a part that derives nothing are never completed. */
static void drop_unproductive(struct compile *c)
{
    struct cfg *g = c->g;

    for (int32_t i = 0; i < g->n_rules; i++) {
        struct cfg_rule *r = &g->rule[i];
        int32_t kept = 0;
        for (int32_t k = 0; k < r->n; k++) {
            const int32_t *at = &g->rhs[g->start[r->first + k]];
            while (*at >= 0 && has_property(c, *at, PRODUCTIVE)) {
                at++;
            }
            if (*at < 0) {
                g->start[r->first + kept++] = g->start[r->first + k];
            }
        }
        r->n = kept;
        if (r->repeats && kept > 0 && cfg_nullable(g, &c->b->rx, g->rhs[g->start[r->first]])) {
            r->min = 0;
        }
    }
}

static void make_tables(struct compile *c, sym_id start)
{
    find_regular(c, start);
    if (grammar_build_failed(c->b)) {
        return;
    }
    rule_of(c, start);
    for (int32_t rule = 0; rule < c->g->n_rules && !grammar_build_failed(c->b); rule++) {
        make_rule(c, rule);
    }
    if (grammar_build_failed(c->b)) {
        return;
    }
    number_symbols(c->g);
    find_property(c, PRODUCTIVE);
    find_property(c, NULLABLE);
    if (!grammar_build_failed(c->b)) {
        drop_unproductive(c);
        if (!c->g->rule[0].productive) {
            grammar_build_fail(c->b, ERR_INVALID, "no text satisfies the grammar");
        }
    }
}

bool cfg_compile(struct cfg *to, struct grammar_builder *b, sym_id start)
{
    struct compile c = {.b = b, .g = to};
    size_t n = (size_t)b->n_syms;

    c.state = budget_alloc(&b->budget, n);
    c.regular = budget_alloc(&b->budget, n * sizeof(*c.regular));
    c.rule = budget_alloc(&b->budget, n * sizeof(*c.rule));
    if (c.state && c.regular && c.rule) {
        make_tables(&c, start);
    }
    budget_free(&b->budget, c.state, n);
    budget_free(&b->budget, c.regular, n * sizeof(*c.regular));
    budget_free(&b->budget, c.rule, n * sizeof(*c.rule));
    budget_free(&b->budget, c.of_rule, (size_t)c.cap * sizeof(*c.of_rule));
    return !grammar_build_failed(b);
}

void cfg_release(struct cfg *g)
{
    free(g->term);
    free(g->rule);
    free(g->start);
    free(g->rhs);
    *g = (struct cfg){0};
}
