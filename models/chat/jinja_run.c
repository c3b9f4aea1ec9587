/* Runs statements: writes text and sets variables. */
#include <string.h>

#include "models/chat/jinja.h"

/* ---- scopes ---- */

static void scope_set(struct jrun *r, struct jscope *s, const char *name, struct jvalue v)
{
    if (!jspend(r, s->n / 8)) {
        return;
    }
    for (int32_t i = 0; i < s->n; i++) {
        if (strcmp(s->name[i], name) == 0) {
            s->value[i] = v;
            return;
        }
    }
    if (s->n == s->cap) {
        int32_t cap = s->cap ? s->cap * 2 : 8;
        const char **names = jalloc(r, (size_t)cap * sizeof(*names));
        struct jvalue *values = jalloc(r, (size_t)cap * sizeof(*values));
        if (!names || !values) {
            return;
        }
        if (s->n) {
            memcpy(names, s->name, (size_t)s->n * sizeof(*names));
            memcpy(values, s->value, (size_t)s->n * sizeof(*values));
        }
        s->name = names;
        s->value = values;
        s->cap = cap;
    }
    s->name[s->n] = name;
    s->value[s->n++] = v;
}

static struct jscope *scope_new(struct jrun *r, struct jscope *parent)
{
    struct jscope *s = jalloc(r, sizeof(*s));

    if (s) {
        s->parent = parent;
    }
    return s;
}

/* ---- assignment ---- */

static void assign(struct jrun *r, const struct jnode *target, struct jvalue v)
{
    if (r->failed) {
        return;
    }
    if (target->kind == N_NAME) {
        scope_set(r, r->scope, target->name, v);
    } else if (target->kind == N_ATTR) {
        struct jvalue object = jeval(r, target->a);
        if (object.type == J_NAMESPACE) {
            jdict_set(r, object.dict, target->value, v);
        } else {
            jfail(r, "only a namespace's members may be set, not those of %s", jtype_name(object));
        }
    } else {
        const struct jlist *l = jitems(r, v);
        int32_t i = 0;
        for (const struct jnode *k = target->args; k && l; k = k->next, i++) {
            if (i < l->n) {
                assign(r, k, l->at[i]);
            }
        }
        if (l && i != l->n) {
            jfail(r, "%d values for %d names", l->n, i);
        }
    }
}

/* ---- loops ---- */

/* The items that the loop's filter lets through. */
static struct jlist *filtered(struct jrun *r, const struct jnode *n)
{
    struct jlist *items = jitems(r, jeval(r, n->b));

    if (!items || !n->c) {
        return items;
    }
    struct jvalue l = jlist_new(r, J_LIST);
    struct jscope *outer = r->scope;
    for (int32_t i = 0; i < items->n && !r->failed; i++) {
        r->scope = scope_new(r, outer);
        if (!r->scope) {
            break;
        }
        assign(r, n->a, items->at[i]);
        if (jtruth(jeval(r, n->c))) {
            jlist_push(r, l.list, items->at[i]);
        }
    }
    r->scope = outer;
    return r->failed ? NULL : l.list;
}

static enum jflow run_for(struct jrun *r, const struct jnode *n)
{
    struct jscope *outer = r->scope;
    struct jlist *items = filtered(r, n);
    struct jloop *loop = r->failed ? NULL : jalloc(r, sizeof(*loop));

    if (!loop) {
        return FLOW_NEXT;
    }
    if (items->n == 0 && n->e) {
        return jexec(r, n->e);
    }
    *loop = (struct jloop){.items = items, .depth = ++r->loop_depth};
    struct jscope *inner = scope_new(r, outer);
    for (int32_t i = 0; i < items->n && !r->failed; i++) {
        inner->n = 0; /* variables of the last iteration are gone */
        r->scope = inner;
        loop->index = i;
        scope_set(r, inner, "loop", (struct jvalue){.type = J_LOOP, .loop = loop});
        assign(r, n->a, items->at[i]);
        if (jexec(r, n->d) == FLOW_BREAK) {
            break;
        }
    }
    r->loop_depth--;
    r->scope = outer;
    return FLOW_NEXT;
}

/* ---- capturing: set blocks and macros ---- */

/* The text that `body` writes, as a value. */
static struct jvalue capture(struct jrun *r, const struct jnode *body)
{
    struct buf b, *outer = r->out;

    jbuf_init(&b);
    r->out = &b;
    jexec(r, body);
    r->out = outer;
    return jtake(r, &b);
}

static void run_set_block(struct jrun *r, const struct jnode *n)
{
    struct jscope *outer = r->scope;

    r->scope = scope_new(r, outer);
    struct jvalue v = r->scope ? capture(r, n->d) : (struct jvalue){0};
    r->scope = outer;
    r->captured = v;
    assign(r, n->a, r->failed ? v : jeval(r, n->b));
}

static const struct jvalue *keyword(const struct jargs *a, const char *name)
{
    for (int32_t i = 0; i < a->n; i++) {
        if (a->name[i] && strcmp(a->name[i], name) == 0) {
            return &a->at[i];
        }
    }
    return NULL;
}

struct jvalue jcall_macro(struct jrun *r, const struct jmacro *m, const struct jargs *a)
{
    struct jscope *outer = r->scope;
    int32_t i = 0, used = 0, loops = r->loop_depth;
    struct jvalue text = {0};

    if (++r->depth > LIMIT_TEMPLATE_DEPTH) {
        jfail(r, "macros nest more than %d deep", LIMIT_TEMPLATE_DEPTH);
    }
    r->scope = scope_new(r, m->scope);
    for (const struct jnode *k = m->node->a; k && !r->failed; k = k->next, i++) {
        bool by_place = i < a->n && !a->name[i];
        const struct jvalue *given = by_place ? &a->at[i] : keyword(a, k->name);
        used += given != NULL;
        scope_set(r, r->scope, k->name,
                  given  ? *given
                  : k->a ? jeval(r, k->a)
                         : (struct jvalue){0});
    }
    if (!r->failed && used < a->n) {
        jfail(r, "the macro '%s' takes other arguments", m->node->name);
    }
    r->loop_depth = 0;
    if (!r->failed) {
        text = capture(r, m->node->d);
    }
    r->loop_depth = loops;
    r->scope = outer;
    r->depth--;
    return text;
}

static void define_macro(struct jrun *r, const struct jnode *n)
{
    struct jmacro *m = jalloc(r, sizeof(*m));

    if (!m) {
        return;
    }
    *m = (struct jmacro){.node = n, .scope = r->scope};
    scope_set(r, r->scope, n->name, (struct jvalue){.type = J_MACRO, .macro = m});
}

/* ---- statements ---- */

static void put(struct jrun *r, struct jvalue v)
{
    jput_str(r, r->out, v);
}

static enum jflow run_all(struct jrun *r, const struct jnode *n)
{
    enum jflow flow = FLOW_NEXT;

    for (; n && flow == FLOW_NEXT && !r->failed; n = n->next) {
        flow = jexec(r, n);
    }
    return flow;
}

static enum jflow exec(struct jrun *r, const struct jnode *n)
{
    switch (n->kind) {
    case N_TEXT:
        put(r, n->value);
        return FLOW_NEXT;
    case N_PRINT:
        put(r, jeval(r, n->a));
        return FLOW_NEXT;
    case N_IF:
        return jtruth(jeval(r, n->a)) ? jexec(r, n->b) : n->c ? jexec(r, n->c) : FLOW_NEXT;
    case N_FOR:
        return run_for(r, n);
    case N_SET:
        assign(r, n->a, jeval(r, n->b));
        return FLOW_NEXT;
    case N_SET_BLOCK:
        run_set_block(r, n);
        return FLOW_NEXT;
    case N_MACRO:
        define_macro(r, n);
        return FLOW_NEXT;
    case N_BREAK:
        return FLOW_BREAK;
    case N_CONTINUE:
        return FLOW_CONTINUE;
    default: /* N_BLOCK */
        return n->d ? jexec(r, n->d) : run_all(r, n->args);
    }
}

enum jflow jexec(struct jrun *r, const struct jnode *n)
{
    enum jflow flow = FLOW_NEXT;

    r->line = n->line;
    if (++r->depth > LIMIT_TEMPLATE_DEPTH) {
        jfail(r, "statements nest more than %d deep", LIMIT_TEMPLATE_DEPTH);
    }
    if (jspend(r, 1)) {
        flow = exec(r, n);
    }
    r->depth--;
    return flow;
}

/* ---- the whole ---- */

/* Add the variables of a JSON object. */
static void set_globals(struct jrun *r, struct jscope *globals, const char *text, size_t len)
{
    struct jvalue v = jfrom_json(r, text, len);

    if (!r->failed && v.type != J_DICT) {
        jfail(r, "the variables must be an object");
    }
    for (int32_t i = 0; !r->failed && i < v.dict->n; i++) {
        scope_set(r, globals, v.dict->key[i].s, v.dict->value[i]);
    }
}

int jinja_render(const struct jtemplate *t, const char *own, const char *context, size_t len,
                 struct buf *out, struct err *e)
{
    struct err ignored = {0};
    struct jrun r = {
        .arena = {.max = LIMIT_TEMPLATE_MEMORY_BYTES}, .out = out, .err = e ? e : &ignored};
    struct jscope *globals = scope_new(&r, NULL);

    if (!r.failed) {
        set_globals(&r, globals, own, strlen(own));
    }
    if (!r.failed) {
        set_globals(&r, globals, context, len);
    }
    r.scope = r.failed ? NULL : scope_new(&r, globals);
    if (!r.failed) {
        jexec(&r, t->body);
    }
    arena_release(&r.arena);
    return r.failed ? r.err->code : 0;
}
