/* Parses expressions by recursive descent, with Jinja's precedence: filters and tests
 * bind tighter than any operator. */
#include <stdlib.h>
#include <string.h>

#include "models/chat/jinja.h"

static struct jnode *parse_or(struct jparser *p);
static struct jnode *parse_unary(struct jparser *p, bool filters);

/* ---- arguments ---- */

static void append(struct jnode ***end, struct jnode *n)
{
    if (n) {
        **end = n;
        *end = &n->next;
    }
}

/* Arguments, `name=value` or a value, up to and including the closing bracket. */
static struct jnode *parse_arguments(struct jparser *p)
{
    struct jnode *first = NULL, **end = &first;
    int n = 0;

    while (!p->failed && !jtoken_take(p, T_OP, ")")) {
        if (n++ && (!jtoken_expect(p, T_OP, ",") || jtoken_take(p, T_OP, ")"))) {
            break;
        }
        if (n > JINJA_MAX_ARGS || jtoken_is(p, T_OP, "*") || jtoken_is(p, T_OP, "**")) {
            return jparse_fail(p, ERR_UNSUPPORTED, "a call with * or more than %d arguments",
                               JINJA_MAX_ARGS);
        }
        if (p->at->type == T_NAME && p->at[1].type == T_OP && strcmp(p->at[1].s, "=") == 0) {
            struct jnode *k = jnode_new(p, N_KEYWORD);
            if (!k) {
                return NULL;
            }
            k->name = p->at->s;
            p->at += 2;
            k->a = jparse_expression(p);
            append(&end, k);
        } else {
            append(&end, jparse_expression(p));
        }
    }
    return first;
}

static struct jnode *parse_call(struct jparser *p, struct jnode *of)
{
    struct jnode *n = jnode_new(p, of->kind == N_ATTR ? N_METHOD : N_CALL);

    if (!n) {
        return NULL;
    }
    n->a = of;
    if (of->kind == N_ATTR) {
        n->name = of->name;
        n->a = of->a;
        n->builtin = jinja_method_find(of->name);
        if (!n->builtin) {
            return jparse_fail(p, ERR_UNSUPPORTED, "the method '%s'", of->name);
        }
    } else if (of->kind == N_NAME) {
        if (p->n_calls == p->cap_calls) {
            int32_t cap = p->cap_calls ? p->cap_calls * 2 : 32;
            struct jnode **calls = realloc(p->calls, (size_t)cap * sizeof(struct jnode *));
            if (!calls) {
                return jparse_fail(p, ERR_NOMEM, "no memory");
            }
            p->calls = calls;
            p->cap_calls = cap;
        }
        p->calls[p->n_calls++] = of;
    }
    n->args = parse_arguments(p);
    return n;
}

/* ---- what follows a primary ---- */

static struct jnode *parse_subscript(struct jparser *p, struct jnode *of)
{
    struct jnode *n = jnode_new(p, N_INDEX), *bound[3] = {0};
    int k = 0;
    bool slice = false;

    while (n && !p->failed && !jtoken_take(p, T_OP, "]")) {
        if (jtoken_take(p, T_OP, ":")) {
            slice = true;
            if (++k > 2) {
                return jparse_fail(p, ERR_INVALID, "a slice has at most three bounds");
            }
            continue;
        }
        if (bound[k]) {
            return jparse_fail(p, ERR_UNSUPPORTED, "an index of several values");
        }
        bound[k] = jparse_expression(p);
    }
    if (!n || (!slice && !bound[0])) {
        return jparse_fail(p, ERR_INVALID, "an empty index");
    }
    n->kind = slice ? N_SLICE : N_INDEX;
    n->a = of;
    n->b = bound[0];
    n->c = bound[1];
    n->d = bound[2];
    return n;
}

static struct jnode *parse_attribute(struct jparser *p, struct jnode *of)
{
    struct jnode *n = jnode_new(p, N_ATTR);

    if (!n) {
        return NULL;
    }
    n->a = of;
    if (p->at->type == T_INT) {
        n->kind = N_INDEX;
        n->b = jnode_new(p, N_LITERAL);
        if (n->b) {
            n->b->value = jint(p->at->i);
        }
    } else if (p->at->type != T_NAME) {
        return jparse_fail(p, ERR_INVALID, "a name must follow '.'");
    }
    n->name = p->at->s;
    n->value = n->name ? jtext(n->name) : (struct jvalue){0};
    p->at++;
    return n;
}

static struct jnode *parse_postfix(struct jparser *p, struct jnode *n)
{
    int chain = 0;

    while (n && !p->failed) {
        if (jtoken_take(p, T_OP, ".")) {
            n = parse_attribute(p, n);
        } else if (jtoken_take(p, T_OP, "[")) {
            n = parse_subscript(p, n);
        } else if (jtoken_take(p, T_OP, "(")) {
            n = parse_call(p, n);
        } else {
            break;
        }
        if (++chain > LIMIT_TEMPLATE_DEPTH / 2) {
            return jparse_fail(p, ERR_INVALID, "too long an expression");
        }
    }
    return n;
}

static struct jnode *parse_filter(struct jparser *p, struct jnode *in)
{
    struct jnode *n = jnode_new(p, N_FILTER);

    if (!n) {
        return NULL;
    }
    if (p->at->type != T_NAME) {
        return jparse_fail(p, ERR_INVALID, "a filter's name must follow '|'");
    }
    n->name = p->at->s;
    n->builtin = jinja_filter_find(n->name);
    if (!n->builtin) {
        return jparse_fail(p, ERR_UNSUPPORTED, "the filter '%s'", n->name);
    }
    p->at++;
    n->a = in;
    if (jtoken_take(p, T_OP, "(")) {
        n->args = parse_arguments(p);
    }
    return n;
}

static bool begins_argument(const struct jparser *p)
{
    if (p->at->type == T_NAME) {
        return !jtoken_is(p, T_NAME, "else") && !jtoken_is(p, T_NAME, "or") &&
               !jtoken_is(p, T_NAME, "and") && !jtoken_is(p, T_NAME, "is") &&
               !jtoken_is(p, T_NAME, "if") && !jtoken_is(p, T_NAME, "in") &&
               !jtoken_is(p, T_NAME, "not");
    }
    return p->at->type == T_STRING || p->at->type == T_INT || p->at->type == T_FLOAT ||
           jtoken_is(p, T_OP, "[") || jtoken_is(p, T_OP, "{");
}

static struct jnode *parse_test(struct jparser *p, struct jnode *of)
{
    struct jnode *n = jnode_new(p, N_TEST);

    if (!n) {
        return NULL;
    }
    n->a = of;
    n->negate = jtoken_take(p, T_NAME, "not");
    if (p->at->type != T_NAME) {
        return jparse_fail(p, ERR_INVALID, "a test's name must follow 'is'");
    }
    n->name = p->at->s;
    n->builtin = jinja_test_find(n->name);
    if (!n->builtin) {
        return jparse_fail(p, ERR_UNSUPPORTED, "the test '%s'", n->name);
    }
    if (strcmp(n->name, "string") == 0) {
        p->template->tests_for_string = true;
    }
    p->at++;
    if (jtoken_take(p, T_OP, "(")) {
        n->args = parse_arguments(p);
    } else if (begins_argument(p)) {
        n->args = parse_postfix(p, jparse_primary(p));
    }
    return n;
}

/* What may follow an operand: filters, tests, and calls of their results. */
static struct jnode *parse_tail(struct jparser *p, struct jnode *n)
{
    int chain = 0;

    while (n && !p->failed) {
        if (jtoken_take(p, T_OP, "|")) {
            n = parse_filter(p, n);
        } else if (jtoken_take(p, T_NAME, "is")) {
            n = parse_test(p, n);
        } else if ((n->kind == N_FILTER || n->kind == N_TEST) && jtoken_take(p, T_OP, "(")) {
            n = parse_call(p, n);
        } else {
            break;
        }
        if (++chain > LIMIT_TEMPLATE_DEPTH / 2) {
            return jparse_fail(p, ERR_INVALID, "too long an expression");
        }
    }
    return n;
}

struct jnode *jparse_filters(struct jparser *p, struct jnode *in)
{
    while (in && jtoken_take(p, T_OP, "|")) {
        in = parse_filter(p, in);
    }
    return in;
}

/* ---- primaries ---- */

static struct jnode *parse_list(struct jparser *p)
{
    struct jnode *n = jnode_new(p, N_LIST), **end = n ? &n->args : NULL;
    int k = 0;

    while (n && !p->failed && !jtoken_take(p, T_OP, "]")) {
        if (k++ && (!jtoken_expect(p, T_OP, ",") || jtoken_take(p, T_OP, "]"))) {
            break;
        }
        append(&end, jparse_expression(p));
    }
    return n;
}

static struct jnode *parse_dict(struct jparser *p)
{
    struct jnode *n = jnode_new(p, N_DICT), **end = n ? &n->args : NULL;
    int k = 0;

    while (n && !p->failed && !jtoken_take(p, T_OP, "}")) {
        if (k++ && (!jtoken_expect(p, T_OP, ",") || jtoken_take(p, T_OP, "}"))) {
            break;
        }
        append(&end, jparse_expression(p));
        jtoken_expect(p, T_OP, ":");
        append(&end, jparse_expression(p));
    }
    return n;
}

static struct jnode *parse_name(struct jparser *p)
{
    static const struct {
        const char *name;
        struct jvalue value;
    } WORDS[] = {{"true", {.type = J_BOOL, .b = true}},
                 {"True", {.type = J_BOOL, .b = true}},
                 {"false", {.type = J_BOOL, .b = false}},
                 {"False", {.type = J_BOOL, .b = false}},
                 {"none", {.type = J_NONE}},
                 {"None", {.type = J_NONE}}};
    struct jnode *n = jnode_new(p, N_NAME);

    if (!n) {
        return NULL;
    }
    n->name = p->at->s;
    p->at++;
    for (size_t i = 0; i < ARRAY_LEN(WORDS); i++) {
        if (strcmp(n->name, WORDS[i].name) == 0) {
            n->kind = N_LITERAL;
            n->value = WORDS[i].value;
        }
    }
    return n;
}

static struct jnode *parse_string(struct jparser *p)
{
    struct jnode *n = jnode_new(p, N_LITERAL);

    if (!n) {
        return NULL;
    }
    n->value = jstring(p->at->s, p->at->len);
    p->at++;
    while (p->at->type == T_STRING) {
        size_t len = n->value.len + p->at->len;
        char *text = arena_alloc(p->arena, len + 1);
        if (!text) {
            return jparse_fail(p, ERR_INVALID, "the template is too large");
        }
        memcpy(text, n->value.s, n->value.len);
        memcpy(text + n->value.len, p->at->s, p->at->len);
        n->value = jstring(text, len);
        p->at++;
    }
    return n;
}

static struct jnode *parse_number(struct jparser *p)
{
    struct jnode *n = jnode_new(p, N_LITERAL);

    if (n) {
        n->value =
            p->at->type == T_INT ? jint(p->at->i) : (struct jvalue){.type = J_FLOAT, .f = p->at->f};
    }
    p->at++;
    return n;
}

struct jnode *jparse_primary(struct jparser *p)
{
    switch (p->at->type) {
    case T_NAME:
        return parse_name(p);
    case T_STRING:
        return parse_string(p);
    case T_INT:
    case T_FLOAT:
        return parse_number(p);
    default:
        break;
    }
    if (jtoken_take(p, T_OP, "(")) {
        struct jnode *n = jtoken_is(p, T_OP, ")") ? jnode_new(p, N_TUPLE) : jparse_tuple(p, true);
        jtoken_expect(p, T_OP, ")");
        return n;
    }
    if (jtoken_take(p, T_OP, "[")) {
        return parse_list(p);
    }
    if (jtoken_take(p, T_OP, "{")) {
        return parse_dict(p);
    }
    return jparse_fail(p, ERR_INVALID, "an expression is missing%s%.20s",
                       p->at->s ? " before " : "",
                       p->at->s && p->at->type != T_TEXT ? p->at->s : "");
}

/* ---- operators ---- */

static struct jnode *unary(struct jparser *p, enum jop op, struct jnode *a)
{
    struct jnode *n = jnode_new(p, N_UNARY);

    if (n) {
        n->op = op;
        n->a = a;
    }
    return n;
}

static struct jnode *parse_unary(struct jparser *p, bool filters)
{
    struct jnode *n;

    if (++p->depth > LIMIT_TEMPLATE_DEPTH) {
        return jparse_fail(p, ERR_INVALID, "expressions nest more than %d deep",
                           LIMIT_TEMPLATE_DEPTH);
    }
    if (jtoken_take(p, T_OP, "-")) {
        n = unary(p, OP_SUB, parse_unary(p, false));
    } else if (jtoken_take(p, T_OP, "+")) {
        n = unary(p, OP_ADD, parse_unary(p, false));
    } else {
        n = jparse_primary(p);
    }
    n = parse_postfix(p, n);
    n = filters ? parse_tail(p, n) : n;
    p->depth--;
    return n;
}

struct level {
    const char *token;
    enum jop op;
};

static struct jnode *binary(struct jparser *p, enum jop op, struct jnode *a, struct jnode *b)
{
    struct jnode *n = jnode_new(p, N_BINARY);

    if (n) {
        n->op = op;
        n->a = a;
        n->b = b;
    }
    return n;
}

/* Left-associative operators of levels 0 (loosest) to 3. */
static struct jnode *parse_math(struct jparser *p, int level)
{
    static const struct level OPS[4][4] = {
        {{"+", OP_ADD}, {"-", OP_SUB}},
        {{"~", OP_CONCAT}},
        {{"*", OP_MUL}, {"/", OP_DIV}, {"//", OP_FLOORDIV}, {"%", OP_MOD}},
        {{"**", OP_POW}}};
    struct jnode *n = level == 3 ? parse_unary(p, true) : parse_math(p, level + 1);

    for (int chain = 0; n && !p->failed; chain++) {
        const struct level *found = NULL;
        for (int i = 0; i < 4 && OPS[level][i].token && !found; i++) {
            found = jtoken_take(p, T_OP, OPS[level][i].token) ? &OPS[level][i] : NULL;
        }
        if (!found) {
            break;
        }
        if (chain > LIMIT_TEMPLATE_DEPTH / 2) {
            return jparse_fail(p, ERR_INVALID, "too long an expression");
        }
        n = binary(p, found->op, n, level == 3 ? parse_unary(p, true) : parse_math(p, level + 1));
    }
    return n;
}

static enum jop take_comparison(struct jparser *p)
{
    static const struct level OPS[] = {{"==", OP_EQ}, {"!=", OP_NE}, {"<=", OP_LE},
                                       {">=", OP_GE}, {"<", OP_LT},  {">", OP_GT}};

    for (size_t i = 0; i < ARRAY_LEN(OPS); i++) {
        if (jtoken_take(p, T_OP, OPS[i].token)) {
            return OPS[i].op;
        }
    }
    if (jtoken_take(p, T_NAME, "in")) {
        return OP_IN;
    }
    if (jtoken_is(p, T_NAME, "not") && p->at[1].type == T_NAME && strcmp(p->at[1].s, "in") == 0) {
        p->at += 2;
        return OP_NOT_IN;
    }
    return 0;
}

/* a < b < c is a < b and b < c. */
static struct jnode *parse_compare(struct jparser *p)
{
    struct jnode *left = parse_math(p, 0), *first = NULL, **end = &first;

    for (enum jop op; left && !p->failed && (op = take_comparison(p)) != 0;) {
        struct jnode *n = jnode_new(p, N_COMPARE);
        if (!n) {
            return NULL;
        }
        n->op = op;
        n->a = left;
        n->b = left = parse_math(p, 0);
        *end = n;
        end = &n->c;
    }
    return first ? first : left;
}

static struct jnode *parse_not(struct jparser *p)
{
    if (!jtoken_take(p, T_NAME, "not")) {
        return parse_compare(p);
    }
    if (++p->depth > LIMIT_TEMPLATE_DEPTH) {
        return jparse_fail(p, ERR_INVALID, "expressions nest more than %d deep",
                           LIMIT_TEMPLATE_DEPTH);
    }
    struct jnode *n = jnode_new(p, N_NOT);
    if (n) {
        n->a = parse_not(p);
    }
    p->depth--;
    return n;
}

/* Chains of `and` and `or` nest to the right, so that the limit on the parser's depth
 * bounds the tree's. */
static struct jnode *parse_logic(struct jparser *p, bool is_or)
{
    struct jnode *left = is_or ? parse_logic(p, false) : parse_not(p);

    if (!left || !jtoken_take(p, T_NAME, is_or ? "or" : "and")) {
        return left;
    }
    if (++p->depth > LIMIT_TEMPLATE_DEPTH) {
        return jparse_fail(p, ERR_INVALID, "too long an expression");
    }
    struct jnode *n = jnode_new(p, is_or ? N_OR : N_AND);
    if (n) {
        n->a = left;
        n->b = parse_logic(p, is_or);
    }
    p->depth--;
    return n;
}

static struct jnode *parse_or(struct jparser *p)
{
    return parse_logic(p, true);
}

struct jnode *jparse_expression(struct jparser *p)
{
    if (++p->depth > LIMIT_TEMPLATE_DEPTH) {
        return jparse_fail(p, ERR_INVALID, "expressions nest more than %d deep",
                           LIMIT_TEMPLATE_DEPTH);
    }
    struct jnode *n = parse_or(p);
    if (n && jtoken_take(p, T_NAME, "if")) {
        struct jnode *c = jnode_new(p, N_CONDITION);
        if (!c) {
            return NULL;
        }
        c->b = n;
        c->a = parse_or(p);
        c->c = jtoken_take(p, T_NAME, "else") ? jparse_expression(p) : NULL;
        n = c;
    }
    p->depth--;
    return n;
}

static bool ends_tuple(const struct jparser *p)
{
    return p->at->type != T_NAME && p->at->type != T_STRING && p->at->type != T_INT &&
           p->at->type != T_FLOAT && !jtoken_is(p, T_OP, "(") && !jtoken_is(p, T_OP, "[") &&
           !jtoken_is(p, T_OP, "{") && !jtoken_is(p, T_OP, "-");
}

struct jnode *jparse_tuple(struct jparser *p, bool condition)
{
    struct jnode *first = condition ? jparse_expression(p) : parse_or(p), *tuple, **end;

    if (!first || !jtoken_is(p, T_OP, ",")) {
        return first;
    }
    tuple = jnode_new(p, N_TUPLE);
    if (!tuple) {
        return NULL;
    }
    tuple->args = first;
    end = &first->next;
    while (!p->failed && jtoken_take(p, T_OP, ",") && !ends_tuple(p)) {
        append(&end, condition ? jparse_expression(p) : parse_or(p));
    }
    return tuple;
}
