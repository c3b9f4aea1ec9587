/* A small Jinja: what chat templates are written in, bounded, read once and run for
 * every chat request.
 *
 *     text ─jinja_lex.c─► tokens ─jinja_parse.c, jinja_expr.c─► tree
 *          ─jinja_run.c, jinja_eval.c─► text
 *
 * Values live in an arena that goes with the run; the tree lives in one that goes with
 * the template. Both have a maximum, so has the number of steps, the depth and the
 * output: a template (a file from anyone) or a conversation (a request from anyone)
 * that is too much is refused with one sentence. What the language has and this does
 * not is found while the template is read, so it is known at start. The first error of
 * a run is kept (`failed`) and ends every loop.
 *
 * Semantics follow Jinja2 with trim_blocks and lstrip_blocks as transformers sets it
 * up: undefined names print nothing, str() and repr() are Python's, tojson is
 * json.dumps without ASCII escapes.
 */
#ifndef QUIRE_MODELS_CHAT_JINJA_H
#define QUIRE_MODELS_CHAT_JINJA_H

#include "config/base/base.h"
#include "config/base/buf.h"
#include "config/base/limits.h"

/* ---- arena ---- */

struct arena_chunk;
struct arena {
    struct arena_chunk *chunk;
    size_t used, max; /* bytes handed out, and at most */
};
/* Zeroed memory that lasts as long as the arena; NULL where it is full. */
void *arena_alloc(struct arena *a, size_t bytes);
void arena_release(struct arena *a);

/* ---- values ---- */

enum jtype {
    J_UNDEFINED,
    J_NONE,
    J_BOOL,
    J_INT,
    J_FLOAT,
    J_STRING,
    J_LIST,
    J_TUPLE,
    J_DICT,
    J_NAMESPACE, /* a dict whose members may be set */
    J_LOOP,
    J_MACRO,
    J_FUNCTION,
};

struct jlist;
struct jdict;
struct jloop;
struct jmacro;
struct jrun;

struct jvalue {
    enum jtype type;
    union {
        bool b;
        int64_t i;
        double f;
        struct {
            const char *s; /* [len] UTF-8 */
            size_t len;
        };
        struct jlist *list; /* J_LIST, J_TUPLE */
        struct jdict *dict; /* J_DICT, J_NAMESPACE */
        struct jloop *loop;
        struct jmacro *macro;
        const struct jbuiltin *function;
    };
};

struct jlist {
    struct jvalue *at; /* [n] */
    int32_t n, cap;
};

struct jdict {
    struct jvalue *key, *value; /* [n] in the order of insertion */
    int32_t n, cap;
};

struct jloop {
    const struct jlist *items;
    int32_t index, depth;
};

/* ---- the tree ---- */

enum jkind {
    /* Statements. */
    N_TEXT, /* value */
    N_PRINT,
    N_IF,        /* a: condition, b: body, c: else */
    N_FOR,       /* a: target, b: what, c: filter, d: body, e: else */
    N_SET,       /* a: target, b: value */
    N_SET_BLOCK, /* a: target, d: body, b: filters around N_CAPTURED */
    N_MACRO,     /* name, a: parameters (N_NAME, `a` its default), d: body */
    N_BREAK,
    N_CONTINUE,
    N_BLOCK, /* d: body */
    /* Expressions. */
    N_LITERAL, /* value */
    N_NAME,
    N_ATTR,    /* a.name */
    N_INDEX,   /* a[b] */
    N_SLICE,   /* a[b:c:d] */
    N_LIST,    /* args */
    N_TUPLE,   /* args */
    N_DICT,    /* args: key, value, key, value … */
    N_CALL,    /* a(args) */
    N_METHOD,  /* a.builtin(args) */
    N_FILTER,  /* a|builtin(args) */
    N_TEST,    /* a is builtin(args); `negate` */
    N_KEYWORD, /* name=a, among args */
    N_UNARY,   /* op a */
    N_BINARY,  /* a op b */
    N_COMPARE, /* a op b, then next comparisons in c (whose `a` is the operand before) */
    N_AND,
    N_OR,
    N_NOT,
    N_CONDITION, /* b if a else c */
    N_CAPTURED,  /* the text of a set block */
};

enum jop {
    OP_ADD = 1,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_FLOORDIV,
    OP_MOD,
    OP_POW,
    OP_CONCAT,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOT_IN
};

struct jnode {
    enum jkind kind;
    enum jop op;
    int32_t line;
    bool negate;
    const char *name; /* NUL-terminated */
    struct jvalue value;
    const struct jbuiltin *builtin;
    struct jnode *a, *b, *c, *d, *e, *args, *next;
};

struct jmacro {
    const struct jnode *node;
    struct jscope *scope; /* where it was defined */
};

/* ---- builtins: filters, tests, methods, functions ---- */

enum { JINJA_MAX_ARGS = 32, JINJA_MAX_NAME = 64 };

struct jargs {
    struct jvalue at[JINJA_MAX_ARGS];
    const char *name[JINJA_MAX_ARGS]; /* NULL: by position */
    int32_t n;
};

struct jbuiltin {
    const char *name;
    struct jvalue (*call)(struct jrun *r, struct jvalue in, const struct jargs *a);
    uint32_t types; /* a method's: 1 << J_… that have it */
};
const struct jbuiltin *jinja_filter_find(const char *name);
const struct jbuiltin *jinja_test_find(const char *name);
const struct jbuiltin *jinja_method_find(const char *name);
const struct jbuiltin *jinja_function_find(const char *name);

/* Argument `i` by position, or by its name; undefined where it is not given. */
struct jvalue jarg(const struct jargs *a, int32_t i, const char *name);

/* ---- a template ---- */

struct jtemplate {
    struct arena arena;
    struct jnode *body;
    /* a for loop goes over a message's content: it takes lists of parts */
    bool loops_over_content;
    bool tests_for_string; /* and it asks whether something is a string */
};
/* Read a template. ERR_INVALID: not Jinja; ERR_UNSUPPORTED: Jinja that this does not
 * have, named with its line. */
int jinja_parse(struct jtemplate *ret, const char *text, size_t len, struct err *e);
void jinja_release(struct jtemplate *t);
/* Run it over `context`, an object of variables as JSON text. ERR_INVALID:
 * raise_exception, a limit, a wrong operation. */
int jinja_render(const struct jtemplate *t, const char *context, size_t len, struct buf *out,
                 struct err *e);

/* ---- a run ---- */

struct jscope {
    struct jscope *parent;
    const char **name;
    struct jvalue *value;
    int32_t n, cap;
};

enum jflow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };

struct jrun {
    struct arena arena;
    struct buf *out;
    struct err *err;
    bool failed;
    int32_t depth, line, loop_depth;
    int64_t steps;
    struct jscope *scope;
    struct jvalue captured;
};

/* Keep the first error; returns undefined. */
struct jvalue jfail(struct jrun *r, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Pay for `n` units of work; false when the run is over. */
bool jspend(struct jrun *r, int64_t n);
void *jalloc(struct jrun *r, size_t bytes);

struct jvalue jeval(struct jrun *r, const struct jnode *n);
enum jflow jexec(struct jrun *r, const struct jnode *n);
struct jvalue jcall_macro(struct jrun *r, const struct jmacro *m, const struct jargs *a);

/* jinja_value.c */
struct jvalue jstring(const char *s, size_t len);
struct jvalue jtext(const char *s); /* NUL-terminated, not copied */
struct jvalue jcopy(struct jrun *r, const char *s, size_t len);
struct jvalue jint(int64_t i);
struct jvalue jbool(bool b);
struct jvalue jnone(void);
struct jvalue jlist_new(struct jrun *r, enum jtype type);
void jlist_push(struct jrun *r, struct jlist *l, struct jvalue v);
struct jvalue jdict_new(struct jrun *r, enum jtype type);
void jdict_set(struct jrun *r, struct jdict *d, struct jvalue key, struct jvalue v);
/* NULL where there is none. */
const struct jvalue *jdict_find(struct jrun *r, const struct jdict *d, struct jvalue key);
bool jtruth(struct jvalue v);
bool jequal(struct jrun *r, struct jvalue a, struct jvalue b);
/* -1, 0, 1 as Python orders; an error where it does not. */
int jcompare(struct jrun *r, struct jvalue a, struct jvalue b);
bool jcontains(struct jrun *r, struct jvalue in, struct jvalue what);
const char *jtype_name(struct jvalue v);
/* What iterating gives: lists as they are, a dict's keys, a string's characters. */
struct jlist *jitems(struct jrun *r, struct jvalue v);
/* object.name or object[key] */
struct jvalue jmember(struct jrun *r, struct jvalue object, struct jvalue key);
struct jvalue jslice(struct jrun *r, struct jvalue v, struct jvalue from, struct jvalue to,
                     struct jvalue step);
/* Characters (code points) of a text. */
int64_t jchars(const char *s, size_t len);
/* The value of JSON text. */
struct jvalue jfrom_json(struct jrun *r, const char *text, size_t len);

/* jinja_text.c: str(), repr() and json.dumps(), appended to `b` */
void jput_str(struct jrun *r, struct buf *b, struct jvalue v);
void jput_json(struct jrun *r, struct buf *b, struct jvalue v, int indent, int level);
struct jvalue jto_string(struct jrun *r, struct jvalue v);
/* A buffer's content as a value; the buffer is released. */
struct jvalue jtake(struct jrun *r, struct buf *b);
void jbuf_init(struct buf *b);
/* Python's white space. Its length at s, or 0. */
size_t jspace_len(const char *s, size_t left);
size_t jspace_len_back(const char *s, size_t len);

/* jinja_lex.c */
enum jtoken_type {
    T_END,
    T_TEXT,
    T_BLOCK_BEGIN,
    T_BLOCK_END,
    T_PRINT_BEGIN,
    T_PRINT_END,
    T_NAME,
    T_STRING,
    T_INT,
    T_FLOAT,
    T_OP
};
struct jtoken {
    enum jtoken_type type;
    int32_t line;
    const char *s; /* text, name, resolved string or operator; NUL-terminated but for T_TEXT */
    size_t len;
    int64_t i;
    double f;
};
struct jtokens {
    struct jtoken *at; /* [n] the last is T_END; malloc'd */
    int32_t n, cap;
};
/* Strings go into `arena`. */
int jinja_lex(struct jtokens *ret, struct arena *arena, const char *text, size_t len,
              struct err *e);

/* jinja_parse.c and jinja_expr.c */
struct jparser {
    struct arena *arena;
    const struct jtoken *at;
    struct err *err;
    bool failed;
    int32_t depth, loop_depth;
    const char **bound; /* names of macros, parameters and variables the template sets; malloc'd */
    int32_t n_bound, cap_bound;
    struct jnode **calls; /* calls of names, to be looked up at the end; malloc'd */
    int32_t n_calls, cap_calls;
    struct jtemplate *template;
};
/* Record the first error, with the line; returns NULL. */
void *jparse_fail(struct jparser *p, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);
struct jnode *jnode_new(struct jparser *p, enum jkind kind);
bool jtoken_is(const struct jparser *p, enum jtoken_type type, const char *text);
/* Take the token if it is that. */
bool jtoken_take(struct jparser *p, enum jtoken_type type, const char *text);
bool jtoken_expect(struct jparser *p, enum jtoken_type type, const char *text);
struct jnode *jparse_expression(struct jparser *p);
/* One expression, or several with commas: a tuple. `condition`: an inline if may stand
 * at its end. */
struct jnode *jparse_tuple(struct jparser *p, bool condition);
struct jnode *jparse_filters(struct jparser *p, struct jnode *in);
struct jnode *jparse_primary(struct jparser *p);

#endif
