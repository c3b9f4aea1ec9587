/* A small, bounded Jinja, the language of chat templates: parsed once at start, run for
 * every chat request.
 *
 *     text ─jinja_lex.c─► tokens ─jinja_parse.c, jinja_expr.c─► tree
 *          ─jinja_run.c, jinja_eval.c─► text
 *
 * Values live in an arena that is freed after the run, the tree in one that is freed
 * with the template. Neither templates nor conversations are trusted: both arenas, the
 * number of steps, the depth and the output have limits, and exceeding one is an error
 * of the request. Parts of the language that are not supported are refused by the
 * parser, at start. The first error of a run is kept (`failed`) and ends every loop.
 *
 * Semantics are those of Jinja2 as transformers configures it, with trim_blocks and
 * lstrip_blocks: undefined names print nothing, str() and repr() are Python's, tojson
 * is json.dumps without ASCII escapes.
 */
#ifndef QUIRE_MODELS_CHAT_JINJA_H
#define QUIRE_MODELS_CHAT_JINJA_H

#include "config/base/base.h"
#include "config/base/buf.h"
#include "config/base/limits.h"

/* ---- arena ---- */

struct arena_chunk;
struct arena {
    struct arena_chunk *chunk; /* list of owned chunks; memory is taken from the first */
    size_t used, max;          /* bytes allocated from the arena, and their limit */
};
/* Zeroed memory that lasts until arena_release, aligned to 16 bytes; NULL where the
 * limit is reached or memory is out. */
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
    J_LOOP,      /* `loop` inside a for block */
    J_MACRO,     /* defined by the template */
    J_FUNCTION,  /* one of the builtin functions */
};

struct jlist;
struct jdict;
struct jloop;
struct jmacro;
struct jrun;

struct jvalue {
    enum jtype type; /* says which member of the union counts */
    bool markup;     /* J_STRING: of `safe` or `escape`; `+` escapes what it adds to it */
    union {
        bool b;    /* J_BOOL */
        int64_t i; /* J_INT */
        double f;  /* J_FLOAT */
        struct {
            const char *s; /* J_STRING: [len] UTF-8, not always NUL-terminated */
            size_t len;    /* bytes */
        };
        struct jlist *list;              /* J_LIST, J_TUPLE */
        struct jdict *dict;              /* J_DICT, J_NAMESPACE */
        struct jloop *loop;              /* J_LOOP */
        struct jmacro *macro;            /* J_MACRO */
        const struct jbuiltin *function; /* J_FUNCTION */
    };
};

struct jlist {
    struct jvalue *at; /* [n], in the run's arena */
    int32_t n, cap;    /* items, and how many fit */
};

struct jdict {
    struct jvalue *key, *value; /* [n] in the order of insertion, in the run's arena */
    int32_t n, cap;             /* pairs, and how many fit */
};

/* The variable `loop`. */
struct jloop {
    const struct jlist *items; /* those that pass the loop's filter */
    int32_t index;             /* of the current item, from 0 */
    int32_t depth;             /* of nesting; 1: an outermost loop */
};

/* ---- the tree ---- */

enum jkind {
    /* Statements. */
    N_TEXT,      /* value */
    N_PRINT,     /* a */
    N_IF,        /* a: condition, b: body, c: else */
    N_FOR,       /* a: target, b: iterable, c: filter, d: body, e: else */
    N_SET,       /* a: target, b: value */
    N_SET_BLOCK, /* a: target, d: body, b: filters around N_CAPTURED */
    N_MACRO,     /* name, a: parameters (N_NAME, `a` its default), d: body */
    N_BREAK,
    N_CONTINUE,
    N_BLOCK, /* d: body, or args: statements in order */
    /* Expressions. */
    N_LITERAL,   /* value */
    N_NAME,      /* name */
    N_ATTR,      /* a.name; value is the name as a string */
    N_INDEX,     /* a[b] */
    N_SLICE,     /* a[b:c:d] */
    N_LIST,      /* args */
    N_TUPLE,     /* args */
    N_DICT,      /* args: key, value, key, value … */
    N_CALL,      /* a(args) */
    N_METHOD,    /* a.builtin(args) */
    N_FILTER,    /* a|builtin(args) */
    N_TEST,      /* a is builtin(args); `negate` */
    N_KEYWORD,   /* name=a, among args */
    N_UNARY,     /* op a */
    N_BINARY,    /* a op b */
    N_COMPARE,   /* a op b, and the comparison c, whose `a` is this one's b */
    N_AND,       /* a and b */
    N_OR,        /* a or b */
    N_NOT,       /* not a */
    N_CONDITION, /* b if a else c */
    N_CAPTURED,  /* jrun.captured: the text of a set block, before its filters */
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

/* enum jkind says which fields a node of each kind has. */
struct jnode {
    enum jkind kind;
    enum jop op;                     /* N_UNARY, N_BINARY, N_COMPARE */
    int32_t line;                    /* of the template, from 1; for messages */
    bool negate;                     /* N_TEST: `is not` */
    const char *name;                /* NUL-terminated */
    struct jvalue value;             /* a literal, or text outside of tags */
    const struct jbuiltin *builtin;  /* N_METHOD, N_FILTER, N_TEST: looked up by name */
    struct jnode *a, *b, *c, *d, *e; /* children */
    struct jnode *args;              /* the first of a list of children */
    struct jnode *next;              /* in the list that this node is part of */
};

struct jmacro {
    const struct jnode *node; /* N_MACRO */
    struct jscope *scope;     /* where it was defined: the parent of its own scope */
};

/* ---- builtins: filters, tests, methods, functions ---- */

enum { JINJA_MAX_ARGS = 32, JINJA_MAX_NAME = 64 };

struct jargs {
    struct jvalue at[JINJA_MAX_ARGS];
    const char *name[JINJA_MAX_ARGS]; /* NULL: by position */
    int32_t n;                        /* arguments given */
};

struct jbuiltin {
    const char *name; /* in templates */
    /* `in` is what a filter, a test or a method is applied to; undefined for
     * functions */
    struct jvalue (*call)(struct jrun *r, struct jvalue in, const struct jargs *a);
    uint32_t types; /* of a method: bits 1 << J_… of the types that have it */
};
const struct jbuiltin *jinja_filter_find(const char *name);
const struct jbuiltin *jinja_test_find(const char *name);
const struct jbuiltin *jinja_method_find(const char *name);
const struct jbuiltin *jinja_function_find(const char *name);

/* Argument `i` by position, or by its name; undefined if it is missing. */
struct jvalue jarg(const struct jargs *a, int32_t i, const char *name);

/* ---- a template ---- */

struct jtemplate {
    struct arena arena; /* the tree, its names and its strings */
    struct jnode *body; /* N_BLOCK */
    /* some for loop iterates over a message's `content`: content may be a list of
     * parts */
    bool loops_over_content;
    bool tests_for_string; /* some test is `is string`: content may be a string as well */
};
/* Parse a template. ERR_INVALID: not Jinja; ERR_UNSUPPORTED: a part of Jinja that is
 * not supported; the message names it and its line. */
int jinja_parse(struct jtemplate *ret, const char *text, size_t len, struct err *e);
void jinja_release(struct jtemplate *t);
/* Run a template with the variables of two texts of JSON objects: `own`, which ends
 * with a NUL, and `context` [len], whose variables replace those of `own`. ERR_INVALID:
 * raise_exception was called, a limit was reached, an operation is not possible. */
int jinja_render(const struct jtemplate *t, const char *own, const char *context, size_t len,
                 struct buf *out, struct err *e);

/* ---- a run ---- */

/* Variables of one block; a name that is not found here is looked up in the parent. */
struct jscope {
    struct jscope *parent; /* NULL: the globals */
    const char **name;     /* [n] */
    struct jvalue *value;  /* [n] */
    int32_t n, cap;        /* variables, and how many fit */
};

enum jflow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };

struct jrun {
    struct arena arena;     /* all values of the run */
    struct buf *out;        /* where text goes; a buffer of its own inside macros, set blocks */
    struct err *err;        /* takes the first error */
    bool failed;            /* an error was recorded: everything returns at once */
    int32_t depth;          /* nested statements, expressions and macro calls */
    int32_t line;           /* of the statement that runs; for messages */
    int32_t loop_depth;     /* nested for loops, counted anew in each macro */
    int64_t steps;          /* units of work done, of LIMIT_TEMPLATE_STEPS */
    struct jscope *scope;   /* innermost */
    struct jvalue captured; /* N_CAPTURED */
};

/* Record the first error; returns undefined. */
struct jvalue jfail(struct jrun *r, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Account for `n` units of work; false when the run has failed, or fails because its
 * steps are used up. */
bool jspend(struct jrun *r, int64_t n);
/* Record that memory ran out, or, of a buffer that failed, why it did. */
void jfail_memory(struct jrun *r);
void jfail_buf(struct jrun *r, const struct buf *b);
/* Zeroed memory of the run's arena; NULL once the run has failed. */
void *jalloc(struct jrun *r, size_t bytes);

struct jvalue jeval(struct jrun *r, const struct jnode *n);
enum jflow jexec(struct jrun *r, const struct jnode *n);
struct jvalue jcall_macro(struct jrun *r, const struct jmacro *m, const struct jargs *a);

/* jinja_value.c */
struct jvalue jstring(const char *s, size_t len);
struct jvalue jtext(const char *s); /* of a NUL-terminated string, not copied */
struct jvalue jcopy(struct jrun *r, const char *s, size_t len);
struct jvalue jint(int64_t i);
struct jvalue jbool(bool b);
struct jvalue jnone(void);
struct jvalue jlist_new(struct jrun *r, enum jtype type);
void jlist_push(struct jrun *r, struct jlist *l, struct jvalue v);
struct jvalue jdict_new(struct jrun *r, enum jtype type);
void jdict_set(struct jrun *r, struct jdict *d, struct jvalue key, struct jvalue v);
/* NULL if the key is absent. */
const struct jvalue *jdict_find(struct jrun *r, const struct jdict *d, struct jvalue key);
bool jtruth(struct jvalue v);
bool jequal(struct jrun *r, struct jvalue a, struct jvalue b);
/* -1, 0 or 1 in Python's order; an error for types that Python does not order. */
int jcompare(struct jrun *r, struct jvalue a, struct jvalue b);
bool jcontains(struct jrun *r, struct jvalue in, struct jvalue what);
const char *jtype_name(struct jvalue v);
/* The items that iterating over `v` gives: those of a list, the keys of a dict, the
 * characters of a string. */
struct jlist *jitems(struct jrun *r, struct jvalue v);
/* object.name or object[key] */
struct jvalue jmember(struct jrun *r, struct jvalue object, struct jvalue key);
struct jvalue jslice(struct jrun *r, struct jvalue v, struct jvalue from, struct jvalue to,
                     struct jvalue step);
/* Characters (code points) of a text. */
int64_t jchars(const char *s, size_t len);
/* The value that a JSON text describes, which the text must outlive: long strings are
 * not copied. */
struct jvalue jfrom_json(struct jrun *r, const char *text, size_t len);

/* jinja_text.c: str(), repr() and json.dumps(), appended to `b` */
void jput_str(struct jrun *r, struct buf *b, struct jvalue v);
void jput_json(struct jrun *r, struct buf *b, struct jvalue v, int indent, int level);
struct jvalue jto_string(struct jrun *r, struct jvalue v);
/* The string `v` with the characters of HTML escaped, as markup; markup stays. */
struct jvalue jescape(struct jrun *r, struct jvalue v);
/* The content of `b` as a value; releases `b`. */
struct jvalue jtake(struct jrun *r, struct buf *b);
void jbuf_init(struct buf *b);
/* Bytes of the white-space character (as Python defines it) at `s`, or before
 * s + len; 0: another character. */
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
    int32_t line;  /* of the template, from 1 */
    const char *s; /* text, name, unescaped string or operator; NUL-terminated but for T_TEXT */
    size_t len;    /* bytes of s */
    int64_t i;     /* T_INT */
    double f;      /* T_FLOAT */
};
struct jtokens {
    struct jtoken *at; /* [n] the last is T_END; malloc'd */
    int32_t n, cap;    /* tokens, and how many fit */
};
/* Names and strings are copied into `arena`. */
int jinja_lex(struct jtokens *ret, struct arena *arena, const char *text, size_t len,
              struct err *e);

/* jinja_parse.c and jinja_expr.c */
struct jparser {
    struct arena *arena;     /* the template's */
    const struct jtoken *at; /* the next token */
    struct err *err;         /* takes the first error */
    bool failed;             /* an error was recorded: every function returns NULL or false */
    int32_t depth;           /* nested blocks and expressions */
    int32_t loop_depth;      /* nested for loops; break and continue need one */
    /* [n_bound] names of macros, parameters and variables that the template sets;
     * malloc'd */
    const char **bound;
    int32_t n_bound, cap_bound;
    /* [n_calls] names that are called, which must be bound or builtin; malloc'd */
    struct jnode **calls;
    int32_t n_calls, cap_calls;
    struct jtemplate *template; /* being made */
};
/* Record the first error, with the current line; returns NULL. */
void *jparse_fail(struct jparser *p, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);
struct jnode *jnode_new(struct jparser *p, enum jkind kind);
bool jtoken_is(const struct jparser *p, enum jtoken_type type, const char *text);
/* Step over the next token if it is of this type and, unless `text` is NULL, reads
 * `text`. */
bool jtoken_take(struct jparser *p, enum jtoken_type type, const char *text);
/* The same; its absence is an error. */
bool jtoken_expect(struct jparser *p, enum jtoken_type type, const char *text);
struct jnode *jparse_expression(struct jparser *p);
/* One expression, or a tuple of several separated by commas. `condition`: they may be
 * inline ifs. */
struct jnode *jparse_tuple(struct jparser *p, bool condition);
struct jnode *jparse_filters(struct jparser *p, struct jnode *in);
struct jnode *jparse_primary(struct jparser *p);

#endif
