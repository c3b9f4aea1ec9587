/* Evaluates expressions. Once the run has failed, every value is undefined. */
#include <math.h>
#include <string.h>

#include "models/chat/jinja.h"

/* ---- names ---- */

static struct jvalue lookup(struct jrun *r, const char *name)
{
    for (const struct jscope *s = r->scope; s; s = s->parent) {
        for (int32_t i = 0; i < s->n; i++) {
            if (s->name[i] == name || strcmp(s->name[i], name) == 0) {
                return jspend(r, i / 8) ? s->value[i] : (struct jvalue){0};
            }
        }
    }
    const struct jbuiltin *f = jinja_function_find(name);
    return f ? (struct jvalue){.type = J_FUNCTION, .function = f} : (struct jvalue){0};
}

/* ---- arithmetic ---- */

static bool is_number(struct jvalue v)
{
    return v.type == J_INT || v.type == J_FLOAT || v.type == J_BOOL;
}

static struct jvalue as_int(struct jvalue v)
{
    return v.type == J_BOOL ? jint(v.b) : v;
}

static double as_double(struct jvalue v)
{
    return v.type == J_FLOAT ? v.f : (double)v.i;
}

static struct jvalue real(double d)
{
    return (struct jvalue){.type = J_FLOAT, .f = d};
}

static struct jvalue int_power(struct jrun *r, int64_t base, int64_t exponent)
{
    int64_t v = 1;

    if (exponent < 0) {
        return real(pow((double)base, (double)exponent));
    }
    for (; exponent > 0 && base != 1; exponent--) {
        if (!jspend(r, 1) || __builtin_mul_overflow(v, base, &v)) {
            return jfail(r, "a number has more than 64 bits");
        }
    }
    return jint(v);
}

static struct jvalue int_math(struct jrun *r, enum jop op, int64_t a, int64_t b)
{
    int64_t v = 0;
    bool over = false;

    if ((op == OP_DIV || op == OP_FLOORDIV || op == OP_MOD) && b == 0) {
        return jfail(r, "a division by zero");
    }
    if ((op == OP_FLOORDIV || op == OP_MOD) && b == -1) {
        return op == OP_MOD                       ? jint(0)
               : __builtin_sub_overflow(0, a, &v) ? jfail(r, "a number has more than 64 bits")
                                                  : jint(v);
    }
    switch (op) {
    case OP_ADD:
        over = __builtin_add_overflow(a, b, &v);
        break;
    case OP_SUB:
        over = __builtin_sub_overflow(a, b, &v);
        break;
    case OP_MUL:
        over = __builtin_mul_overflow(a, b, &v);
        break;
    case OP_DIV:
        return real((double)a / (double)b);
    case OP_FLOORDIV:
        v = a / b - ((a % b != 0) && ((a < 0) != (b < 0)));
        break;
    case OP_MOD:
        v = a % b + ((a % b != 0) && ((a < 0) != (b < 0)) ? b : 0);
        break;
    default:
        return int_power(r, a, b);
    }
    return over ? jfail(r, "a number has more than 64 bits") : jint(v);
}

static struct jvalue real_math(struct jrun *r, enum jop op, double a, double b)
{
    if ((op == OP_DIV || op == OP_FLOORDIV || op == OP_MOD) && b == 0) {
        return jfail(r, "a division by zero");
    }
    switch (op) {
    case OP_ADD:
        return real(a + b);
    case OP_SUB:
        return real(a - b);
    case OP_MUL:
        return real(a * b);
    case OP_DIV:
        return real(a / b);
    case OP_FLOORDIV:
        return real(floor(a / b));
    case OP_MOD:
        return real(a - b * floor(a / b));
    default:
        return real(pow(a, b));
    }
}

static struct jvalue joined(struct jrun *r, struct jvalue a, struct jvalue b)
{
    if (r->failed) {
        return (struct jvalue){0};
    }
    if (a.len == 0 || b.len == 0) {
        return a.len ? a : b;
    }
    char *text = jalloc(r, a.len + b.len + 1);
    if (!text || !jspend(r, (int64_t)((a.len + b.len) / 16))) {
        return (struct jvalue){0};
    }
    memcpy(text, a.s, a.len);
    memcpy(text + a.len, b.s, b.len);
    return jstring(text, a.len + b.len);
}

/* The sum of markup and a string: what was not markup is escaped. */
static struct jvalue joined_markup(struct jrun *r, struct jvalue a, struct jvalue b)
{
    struct jvalue text = joined(r, jescape(r, a), jescape(r, b));

    text.markup = true;
    return text;
}

static struct jvalue added_lists(struct jrun *r, struct jvalue a, struct jvalue b)
{
    struct jvalue l = jlist_new(r, a.type);

    for (int32_t i = 0; i < a.list->n && !r->failed; i++) {
        jlist_push(r, l.list, a.list->at[i]);
    }
    for (int32_t i = 0; i < b.list->n && !r->failed; i++) {
        jlist_push(r, l.list, b.list->at[i]);
    }
    return l;
}

static struct jvalue repeated(struct jrun *r, struct jvalue v, int64_t times)
{
    struct buf b;

    if (v.type != J_STRING) {
        struct jvalue l = jlist_new(r, v.type);
        for (int64_t k = 0; k < times && v.list->n > 0 && !r->failed; k++) {
            for (int32_t i = 0; i < v.list->n && !r->failed; i++) {
                jlist_push(r, l.list, v.list->at[i]);
            }
        }
        return l;
    }
    jbuf_init(&b);
    for (int64_t k = 0; k < times && v.len && jspend(r, 1) && !b.failed; k++) {
        buf_append(&b, v.s, v.len);
    }
    return jtake(r, &b);
}

static bool is_sequence(struct jvalue v)
{
    return v.type == J_STRING || v.type == J_LIST || v.type == J_TUPLE;
}

static struct jvalue binary(struct jrun *r, enum jop op, struct jvalue a, struct jvalue b)
{
    static const char *const SIGNS[] = {"", "+", "-", "*", "/", "//", "%", "**"};

    if (r->failed) {
        return (struct jvalue){0};
    }
    if (op == OP_CONCAT) {
        struct jvalue text = joined(r, jto_string(r, a), jto_string(r, b));
        text.markup = false;
        return text;
    }
    if (is_number(a) && is_number(b)) {
        a = as_int(a);
        b = as_int(b);
        return a.type == J_INT && b.type == J_INT ? int_math(r, op, a.i, b.i)
                                                  : real_math(r, op, as_double(a), as_double(b));
    }
    if (op == OP_ADD && a.type == J_STRING && b.type == J_STRING) {
        return a.markup || b.markup ? joined_markup(r, a, b) : joined(r, a, b);
    }
    if (op == OP_ADD && a.type == b.type && is_sequence(a)) {
        return added_lists(r, a, b);
    }
    if (op == OP_MUL && is_sequence(a) && b.type == J_INT) {
        return repeated(r, a, b.i);
    }
    if (op == OP_MUL && is_sequence(b) && a.type == J_INT) {
        return repeated(r, b, a.i);
    }
    return jfail(r, "%s %s %s is not possible", jtype_name(a), SIGNS[op], jtype_name(b));
}

static struct jvalue unary(struct jrun *r, enum jop op, struct jvalue v)
{
    v = as_int(v);
    if (v.type == J_FLOAT) {
        return real(op == OP_SUB ? -v.f : v.f);
    }
    if (v.type != J_INT) {
        return r->failed ? v : jfail(r, "a sign before %s", jtype_name(v));
    }
    return op == OP_SUB ? int_math(r, OP_SUB, 0, v.i) : v;
}

static bool compare(struct jrun *r, enum jop op, struct jvalue a, struct jvalue b)
{
    switch (op) {
    case OP_EQ:
        return jequal(r, a, b);
    case OP_NE:
        return !jequal(r, a, b);
    case OP_IN:
        return jcontains(r, b, a);
    case OP_NOT_IN:
        return !jcontains(r, b, a);
    case OP_LT:
        return jcompare(r, a, b) < 0;
    case OP_LE:
        return jcompare(r, a, b) <= 0;
    case OP_GT:
        return jcompare(r, a, b) > 0;
    default:
        return jcompare(r, a, b) >= 0;
    }
}

/* ---- calls ---- */

static bool eval_arguments(struct jrun *r, const struct jnode *n, struct jargs *ret)
{
    ret->n = 0;
    for (const struct jnode *k = n; k && !r->failed; k = k->next, ret->n++) {
        ret->name[ret->n] = k->kind == N_KEYWORD ? k->name : NULL;
        ret->at[ret->n] = jeval(r, k->kind == N_KEYWORD ? k->a : k);
    }
    return !r->failed;
}

struct jvalue jarg(const struct jargs *a, int32_t i, const char *name)
{
    if (i < a->n && !a->name[i]) {
        return a->at[i];
    }
    for (int32_t k = 0; k < a->n && name; k++) {
        if (a->name[k] && strcmp(a->name[k], name) == 0) {
            return a->at[k];
        }
    }
    return (struct jvalue){0};
}

static struct jvalue call(struct jrun *r, const struct jnode *n)
{
    struct jargs args;
    struct jvalue f = jeval(r, n->a);

    if (!eval_arguments(r, n->args, &args)) {
        return (struct jvalue){0};
    }
    r->line = n->line;
    if (f.type == J_FUNCTION) {
        return f.function->call(r, f, &args);
    }
    if (f.type == J_MACRO) {
        return jcall_macro(r, f.macro, &args);
    }
    return jfail(r, "%s%s%.60s cannot be called", jtype_name(f),
                 n->a->kind == N_NAME ? " named " : "", n->a->kind == N_NAME ? n->a->name : "");
}

/* A filter, a test or a method on a value. */
static struct jvalue apply(struct jrun *r, const struct jnode *n)
{
    struct jargs args;
    struct jvalue in = jeval(r, n->a);

    if (!eval_arguments(r, n->args, &args)) {
        return (struct jvalue){0};
    }
    r->line = n->line;
    if (n->kind == N_METHOD && !(n->builtin->types >> in.type & 1)) {
        return jfail(r, "%s has no method '%s'", jtype_name(in), n->builtin->name);
    }
    struct jvalue v = n->builtin->call(r, in, &args);
    return n->kind == N_TEST ? jbool(jtruth(v) != n->negate) : v;
}

/* ---- the tree ---- */

static struct jvalue make_list(struct jrun *r, const struct jnode *n)
{
    struct jvalue l = jlist_new(r, n->kind == N_TUPLE ? J_TUPLE : J_LIST);

    for (const struct jnode *k = n->args; k && !r->failed; k = k->next) {
        jlist_push(r, l.list, jeval(r, k));
    }
    return l;
}

static struct jvalue make_dict(struct jrun *r, const struct jnode *n)
{
    struct jvalue d = jdict_new(r, J_DICT);

    for (const struct jnode *k = n->args; k && k->next && !r->failed; k = k->next->next) {
        struct jvalue key = jeval(r, k), value = jeval(r, k->next);
        if (!r->failed) {
            jdict_set(r, d.dict, key, value);
        }
    }
    return d;
}

static struct jvalue compare_chain(struct jrun *r, const struct jnode *n)
{
    struct jvalue left = jeval(r, n->a);

    for (; n && !r->failed; n = n->c) {
        struct jvalue right = jeval(r, n->b);
        if (r->failed || !compare(r, n->op, left, right)) {
            return jbool(false);
        }
        left = right;
    }
    return jbool(true);
}

static struct jvalue member(struct jrun *r, const struct jnode *n)
{
    struct jvalue object = jeval(r, n->a), key = n->kind == N_ATTR ? n->value : jeval(r, n->b);

    r->line = n->line;
    return r->failed ? (struct jvalue){0} : jmember(r, object, key);
}

static struct jvalue slice(struct jrun *r, const struct jnode *n)
{
    const struct jnode *part[] = {n->b, n->c, n->d};
    struct jvalue object = jeval(r, n->a), at[3];

    for (int i = 0; i < 3; i++) {
        at[i] = part[i] ? jeval(r, part[i]) : jnone();
    }
    return r->failed ? (struct jvalue){0} : jslice(r, object, at[0], at[1], at[2]);
}

static struct jvalue logic(struct jrun *r, const struct jnode *n)
{
    struct jvalue a = jeval(r, n->a);

    return jtruth(a) == (n->kind == N_OR) ? a : jeval(r, n->b);
}

static struct jvalue eval(struct jrun *r, const struct jnode *n)
{
    struct jvalue v;

    switch (n->kind) {
    case N_LITERAL:
        return n->value;
    case N_NAME:
        return lookup(r, n->name);
    case N_CAPTURED:
        return r->captured;
    case N_ATTR:
    case N_INDEX:
        return member(r, n);
    case N_SLICE:
        return slice(r, n);
    case N_LIST:
    case N_TUPLE:
        return make_list(r, n);
    case N_DICT:
        return make_dict(r, n);
    case N_CALL:
        return call(r, n);
    case N_METHOD:
    case N_FILTER:
    case N_TEST:
        return apply(r, n);
    case N_UNARY:
        return unary(r, n->op, jeval(r, n->a));
    case N_BINARY:
        v = jeval(r, n->a);
        return binary(r, n->op, v, jeval(r, n->b));
    case N_COMPARE:
        return compare_chain(r, n);
    case N_AND:
    case N_OR:
        return logic(r, n);
    case N_NOT:
        return jbool(!jtruth(jeval(r, n->a)));
    case N_CONDITION:
        return jtruth(jeval(r, n->a)) ? jeval(r, n->b) : n->c ? jeval(r, n->c) : (struct jvalue){0};
    default:
        return jfail(r, "an expression of kind %d", (int)n->kind);
    }
}

struct jvalue jeval(struct jrun *r, const struct jnode *n)
{
    struct jvalue v = {0};

    r->line = n->line;
    if (++r->depth > LIMIT_TEMPLATE_DEPTH) {
        jfail(r, "calls nest more than %d deep", LIMIT_TEMPLATE_DEPTH);
    }
    if (jspend(r, 1)) {
        v = eval(r, n);
    }
    r->depth--;
    return r->failed ? (struct jvalue){0} : v;
}
