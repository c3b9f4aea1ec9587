/* Parses statements: the tokens of a template become its tree, or one error with the
 * line of what is wrong or not supported. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/chat/jinja.h"

static struct jnode *parse_body(struct jparser *p, const char *const *until);

void *jparse_fail(struct jparser *p, int rc, const char *fmt, ...)
{
    if (!p->failed) {
        char text[300];
        va_list args;
        va_start(args, fmt);
        vsnprintf(text, sizeof(text), fmt, args);
        va_end(args);
        p->failed = true;
        err_set(p->err, rc, "chat template: line %d: %s%s", p->at->line, text,
                rc == ERR_UNSUPPORTED ? " is not supported" : "");
    }
    return NULL;
}

struct jnode *jnode_new(struct jparser *p, enum jkind kind)
{
    struct jnode *n = p->failed ? NULL : arena_alloc(p->arena, sizeof(*n));

    if (!n) {
        return jparse_fail(p, ERR_INVALID, "the template is too large");
    }
    n->kind = kind;
    n->line = p->at->line;
    return n;
}

bool jtoken_is(const struct jparser *p, enum jtoken_type type, const char *text)
{
    return p->at->type == type && (!text || strcmp(p->at->s, text) == 0);
}

bool jtoken_take(struct jparser *p, enum jtoken_type type, const char *text)
{
    if (p->failed || !jtoken_is(p, type, text)) {
        return false;
    }
    p->at += type != T_END;
    return true;
}

bool jtoken_expect(struct jparser *p, enum jtoken_type type, const char *text)
{
    if (jtoken_take(p, type, text)) {
        return true;
    }
    jparse_fail(p, ERR_INVALID, "%s is missing",
                text                  ? text
                : type == T_BLOCK_END ? "%}"
                : type == T_PRINT_END ? "}}"
                                      : "a name");
    return false;
}

/* Record a name that the template sets: calling it is not an unknown function. */
static void bind(struct jparser *p, const char *name)
{
    if (p->n_bound == p->cap_bound) {
        int32_t cap = p->cap_bound ? p->cap_bound * 2 : 32;
        const char **bound = realloc(p->bound, (size_t)cap * sizeof(*bound));
        if (!bound) {
            jparse_fail(p, ERR_NOMEM, "no memory");
            return;
        }
        p->bound = bound;
        p->cap_bound = cap;
    }
    p->bound[p->n_bound++] = name;
}

/* ---- targets ---- */

/* A name, or namespace.name. */
static struct jnode *parse_target_name(struct jparser *p)
{
    struct jnode *n = jnode_new(p, N_NAME);

    if (!n) {
        return NULL;
    }
    if (p->at->type != T_NAME) {
        return jparse_fail(p, ERR_INVALID, "a name must stand here");
    }
    n->name = p->at->s;
    p->at++;
    if (jtoken_take(p, T_OP, ".")) {
        struct jnode *m = jnode_new(p, N_ATTR);
        if (!m || p->at->type != T_NAME) {
            return jparse_fail(p, ERR_INVALID, "a name must follow '.'");
        }
        m->a = n;
        m->name = p->at->s;
        m->value = jtext(m->name);
        p->at++;
        return m;
    }
    bind(p, n->name);
    return n;
}

static struct jnode *parse_target(struct jparser *p)
{
    bool bracket = jtoken_take(p, T_OP, "(");
    struct jnode *first = parse_target_name(p), *n = first;

    if (first && jtoken_is(p, T_OP, ",")) {
        n = jnode_new(p, N_TUPLE);
        if (!n) {
            return NULL;
        }
        n->args = first;
        for (struct jnode *last = first; last && jtoken_take(p, T_OP, ",");) {
            last->next = parse_target_name(p);
            last = last->next;
        }
    }
    if (bracket) {
        jtoken_expect(p, T_OP, ")");
    }
    return n;
}

/* ---- statements ---- */

static bool block_begins(const struct jparser *p, const char *name)
{
    return p->at->type == T_BLOCK_BEGIN && p->at[1].type == T_NAME && strcmp(p->at[1].s, name) == 0;
}

/* `{% name %}` */
static bool take_end(struct jparser *p, const char *name)
{
    if (p->failed || !block_begins(p, name)) {
        char text[40];
        snprintf(text, sizeof(text), "{%% %s %%}", name);
        jparse_fail(p, ERR_INVALID, "%s is missing", text);
        return false;
    }
    p->at += 2;
    return jtoken_expect(p, T_BLOCK_END, NULL);
}

static struct jnode *parse_if(struct jparser *p)
{
    static const char *const UNTIL[] = {"elif", "else", "endif", NULL}, *const END[] = {"endif",
                                                                                        NULL};
    struct jnode *n = jnode_new(p, N_IF);

    if (!n) {
        return NULL;
    }
    n->a = jparse_tuple(p, false);
    jtoken_expect(p, T_BLOCK_END, NULL);
    n->b = parse_body(p, UNTIL);
    if (p->failed) {
        return NULL;
    }
    if (block_begins(p, "elif")) {
        p->at += 2;
        if (++p->depth > LIMIT_TEMPLATE_DEPTH) {
            return jparse_fail(p, ERR_INVALID, "more than %d elif", LIMIT_TEMPLATE_DEPTH);
        }
        n->c = parse_if(p);
        p->depth--;
        return n;
    }
    if (block_begins(p, "else")) {
        p->at += 2;
        jtoken_expect(p, T_BLOCK_END, NULL);
        n->c = parse_body(p, END);
    }
    take_end(p, "endif");
    return n;
}

/* Whether the expression is some `content`: a name, an attribute or a key. */
static bool is_content(const struct jnode *n)
{
    const char *name =
        !n                  ? NULL
        : n->kind == N_ATTR ? n->name
        : n->kind == N_INDEX && n->b->kind == N_LITERAL && n->b->value.type == J_STRING
            ? n->b->value.s
        : n->kind == N_NAME ? n->name
                            : NULL;

    return name && strcmp(name, "content") == 0;
}

static struct jnode *parse_for(struct jparser *p)
{
    static const char *const UNTIL[] = {"else", "endfor", NULL}, *const END[] = {"endfor", NULL};
    struct jnode *n = jnode_new(p, N_FOR);

    if (!n) {
        return NULL;
    }
    n->a = parse_target(p);
    jtoken_expect(p, T_NAME, "in");
    n->b = jparse_tuple(p, false);
    if (jtoken_take(p, T_NAME, "if")) {
        n->c = jparse_expression(p);
    }
    if (jtoken_is(p, T_NAME, "recursive")) {
        return jparse_fail(p, ERR_UNSUPPORTED, "a recursive loop");
    }
    jtoken_expect(p, T_BLOCK_END, NULL);
    p->template->loops_over_content = p->template->loops_over_content || is_content(n->b);
    p->loop_depth++;
    n->d = parse_body(p, UNTIL);
    p->loop_depth--;
    if (!p->failed && block_begins(p, "else")) {
        p->at += 2;
        jtoken_expect(p, T_BLOCK_END, NULL);
        n->e = parse_body(p, END);
    }
    take_end(p, "endfor");
    return n;
}

static struct jnode *parse_set(struct jparser *p)
{
    static const char *const END[] = {"endset", NULL};
    struct jnode *n = jnode_new(p, N_SET);

    if (!n) {
        return NULL;
    }
    n->a = parse_target(p);
    if (jtoken_take(p, T_OP, "=")) {
        n->b = jparse_tuple(p, true);
        jtoken_expect(p, T_BLOCK_END, NULL);
        return n;
    }
    n->kind = N_SET_BLOCK;
    n->b = jparse_filters(p, jnode_new(p, N_CAPTURED));
    jtoken_expect(p, T_BLOCK_END, NULL);
    n->d = parse_body(p, END);
    take_end(p, "endset");
    return n;
}

static struct jnode *parse_macro(struct jparser *p)
{
    static const char *const END[] = {"endmacro", NULL};
    struct jnode *n = jnode_new(p, N_MACRO), **end = n ? &n->a : NULL;

    if (!n || p->at->type != T_NAME) {
        return jparse_fail(p, ERR_INVALID, "a macro needs a name");
    }
    n->name = p->at->s;
    bind(p, n->name);
    p->at++;
    jtoken_expect(p, T_OP, "(");
    for (int k = 0; !p->failed && !jtoken_take(p, T_OP, ")"); k++) {
        if (k && !jtoken_expect(p, T_OP, ",")) {
            break;
        }
        if (k >= JINJA_MAX_ARGS) {
            return jparse_fail(p, ERR_UNSUPPORTED, "a macro of more than %d parameters",
                               JINJA_MAX_ARGS);
        }
        struct jnode *parameter = parse_target_name(p);
        if (!parameter || parameter->kind != N_NAME) {
            return jparse_fail(p, ERR_INVALID, "a parameter is a name");
        }
        parameter->a = jtoken_take(p, T_OP, "=") ? jparse_expression(p) : NULL;
        *end = parameter;
        end = &parameter->next;
    }
    jtoken_expect(p, T_BLOCK_END, NULL);
    int32_t loops = p->loop_depth;
    p->loop_depth = 0;
    n->d = parse_body(p, END);
    p->loop_depth = loops;
    take_end(p, "endmacro");
    return n;
}

/* `{% generation %}` marks the assistant's text for training; here it is a plain
 * block. */
static struct jnode *parse_generation(struct jparser *p)
{
    static const char *const END[] = {"endgeneration", NULL};
    struct jnode *n = jnode_new(p, N_BLOCK);

    if (!n) {
        return NULL;
    }
    jtoken_expect(p, T_BLOCK_END, NULL);
    n->d = parse_body(p, END);
    take_end(p, "endgeneration");
    return n;
}

static struct jnode *parse_jump(struct jparser *p, enum jkind kind)
{
    struct jnode *n = jnode_new(p, kind);

    if (p->loop_depth == 0) {
        return jparse_fail(p, ERR_INVALID, "break or continue outside of a loop");
    }
    jtoken_expect(p, T_BLOCK_END, NULL);
    return n;
}

static struct jnode *parse_statement(struct jparser *p)
{
    static const struct {
        const char *name;
        struct jnode *(*parse)(struct jparser *p);
    } ROWS[] = {{"if", parse_if},
                {"for", parse_for},
                {"set", parse_set},
                {"macro", parse_macro},
                {"generation", parse_generation}};

    if (p->at->type != T_NAME) {
        return jparse_fail(p, ERR_INVALID, "a statement needs a name");
    }
    const char *name = p->at->s;
    if (strcmp(name, "break") == 0 || strcmp(name, "continue") == 0) {
        p->at++;
        return parse_jump(p, name[0] == 'b' ? N_BREAK : N_CONTINUE);
    }
    for (size_t i = 0; i < ARRAY_LEN(ROWS); i++) {
        if (strcmp(ROWS[i].name, name) == 0) {
            p->at++;
            return ROWS[i].parse(p);
        }
    }
    return jparse_fail(p, ERR_UNSUPPORTED, "the statement '%s'", name);
}

static struct jnode *parse_piece(struct jparser *p)
{
    struct jnode *n;

    switch (p->at->type) {
    case T_TEXT:
        n = jnode_new(p, N_TEXT);
        if (n) {
            n->value = jstring(p->at->s, p->at->len);
        }
        p->at++;
        return n;
    case T_PRINT_BEGIN:
        p->at++;
        n = jnode_new(p, N_PRINT);
        if (n) {
            n->a = jparse_tuple(p, true);
        }
        jtoken_expect(p, T_PRINT_END, NULL);
        return n;
    default:
        p->at++;
        return parse_statement(p);
    }
}

/* Text and tags up to one of the blocks `until`, which is not consumed; NULL: up to the
 * end of the template. */
static struct jnode *parse_body(struct jparser *p, const char *const *until)
{
    struct jnode *body = jnode_new(p, N_BLOCK), **end = body ? &body->args : NULL;

    if (++p->depth > LIMIT_TEMPLATE_DEPTH) {
        return jparse_fail(p, ERR_INVALID, "blocks nest more than %d deep", LIMIT_TEMPLATE_DEPTH);
    }
    while (!p->failed && p->at->type != T_END) {
        for (int i = 0; until && until[i]; i++) {
            if (block_begins(p, until[i])) {
                p->depth--;
                return body;
            }
        }
        struct jnode *n = parse_piece(p);
        if (n && end) {
            *end = n;
            end = &n->next;
        }
    }
    if (until) {
        return jparse_fail(p, ERR_INVALID, "{%% %s %%} is missing",
                           until[until[1] ? until[2] ? 2 : 1 : 0]);
    }
    p->depth--;
    return body;
}

/* ---- the whole ---- */

static bool is_bound(const struct jparser *p, const char *name)
{
    for (int32_t i = 0; i < p->n_bound; i++) {
        if (strcmp(p->bound[i], name) == 0) {
            return true;
        }
    }
    return false;
}

/* Check that every function called by name is a builtin or set by the template. */
static int check_calls(struct jparser *p)
{
    for (int32_t i = 0; i < p->n_calls && !p->failed; i++) {
        const struct jnode *n = p->calls[i];
        if (!jinja_function_find(n->name) && !is_bound(p, n->name)) {
            return err_set(p->err, ERR_UNSUPPORTED,
                           "chat template: line %d: the function '%s' is not supported", n->line,
                           n->name);
        }
    }
    return 0;
}

int jinja_parse(struct jtemplate *ret, const char *text, size_t len, struct err *e)
{
    struct jtokens tokens = {0};
    struct err own = {0};

    *ret = (struct jtemplate){.arena = {.max = LIMIT_TEMPLATE_TREE_BYTES}};
    struct jparser p = {.arena = &ret->arena, .err = e ? e : &own, .template = ret};
    int rc = jinja_lex(&tokens, &ret->arena, text, len, p.err);
    if (rc == 0) {
        p.at = tokens.at;
        ret->body = parse_body(&p, NULL);
        rc = p.failed ? p.err->code : check_calls(&p);
    }
    free(tokens.at);
    free(p.bound);
    free(p.calls);
    if (rc) {
        jinja_release(ret);
    }
    return rc;
}

void jinja_release(struct jtemplate *t)
{
    arena_release(&t->arena);
    t->body = NULL;
}
