/* The JSON Schema front end: from a schema's text to symbols of a grammar.
 *
 * Three steps. The text becomes a tree of values (doc.c), with the places that $ref can
 * name (refs.c). Keywords become sets of JSON values (read.c): a `shape` is a union by
 * type, and shapes are closed under intersection, union and complement (sets.c), which
 * is how allOf, anyOf, oneOf, not, if and the dependencies are enforced. What is inside
 * arrays and objects stays unread until it is needed: a `conj` names it, an
 * intersection of schemas of the document and of their complements. The shapes that the
 * root reaches become symbols (emit.c).
 *
 * Sets are exact: a value is in the shape if and only if the schema allows it. Where a
 * schema needs a set that shapes do not have, it is refused by the keyword's name. The
 * texts of a value that the grammar takes are fewer than JSON's:
 *
 *   - properties come in the order in which schemas name them, `properties` before
 *     `required`, then all others in any order;
 *   - names of properties and texts of enum and const are spelled without needless
 *     escapes; integers without a fraction or exponent; numbers with bounds without an
 *     exponent, unless the only bound is zero;
 *   - between tokens are at most two blanks, or, behind a comma and inside brackets, a
 *     line break and its indentation of at most 64 blanks and tabs.
 *
 * Errors are the builder's, which is sticky: functions go on with what they have after
 * one, and pointers that they return are then NULL.
 */
#ifndef QUIRE_ENGINE_CONSTRAIN_JSON_SCHEMA_SCHEMA_H
#define QUIRE_ENGINE_CONSTRAIN_JSON_SCHEMA_SCHEMA_H

#include "engine/constrain/grammar_build.h"

enum {
    SCHEMA_BYTES = 8 << 20,     /* memory of one front end */
    SCHEMA_CONJUNCTIONS = 8192, /* distinct sets of values below arrays and objects */
    SCHEMA_ALTERNATIVES = 256,  /* arrays, and objects, that one union holds */
    SCHEMA_CELLS = 64,          /* classes of names that patterns make */
    SCHEMA_NESTING = 128,       /* schemas on one value: $ref and allOf in one another */
};

/* ---- the document ---- */

enum value_type { V_NULL, V_FALSE, V_TRUE, V_NUMBER, V_STRING, V_ARRAY, V_OBJECT };

struct value {
    enum value_type type;
    int32_t id;                /* its place in schema.values */
    int32_t n;                 /* elements or members; bytes of a string or number */
    const char *text;          /* of a string, decoded and NUL-terminated; of a number */
    const struct value **item; /* [n] elements, or the values of the members */
    const struct value **name; /* [n] strings: the members' names */
    const struct value *base;  /* the schema whose $id its references are relative to */
};

/* A place that a reference can name. */
struct anchor {
    const char *uri;           /* without an empty fragment */
    const struct value *value; /* the schema there */
};

/* ---- sets of values ---- */

/* A set below an array or object: an index of schema.conj. */
typedef int32_t conj_id;
enum { CONJ_TRUE = 0, CONJ_FALSE = 1 };

/* A schema or constant of the document, or what it is not. */
struct literal {
    const struct value *value;
    bool constant, negated;
};

struct shape;

struct conj {
    int32_t n;                 /* literals; 0: every value */
    const struct literal *lit; /* [n] the set is their intersection */
    const struct shape *shape; /* NULL until it is asked for */
    bool open;                 /* its shape is being made */
    sym_id sym;                /* 0 until it is asked for */
};

/* Numbers. A value is in the set with all its decimal texts or with none. */
struct number_set {
    rx_id plain; /* texts without an exponent: exact */
    rx_id power; /* texts with one: some of those whose value is in the set */
    bool whole;  /* all values are known to be integers */
};

/* Strings, decoded. */
struct string_set {
    rx_id rx;
    const struct value **lit; /* [n] the same set as a list, if it was made of one */
    int32_t n;
    bool inexact; /* a format's expression stands in for what cannot be expressed */
};

/* Arrays: the elements in front, then items. */
struct array_set {
    const conj_id *prefix;
    int32_t n_prefix;
    conj_id items;    /* the elements behind the prefix */
    int64_t min, max; /* elements; max -1: any number */
    bool unique;
    int32_t n_contains;
    const struct contains *contains;
};

struct contains {
    conj_id what;
    int64_t min, max; /* elements of this kind from index `from` on; max -1: any number */
    int32_t from;
};

struct property {
    const struct value *name;
    conj_id child; /* CONJ_FALSE: the property is absent */
    bool required;
};

/* The names of a cell that are no property's; the cells are disjoint. */
struct cell {
    rx_id names;
    conj_id child;
};

struct object_set {
    const struct property *property;
    int32_t n_properties;
    const struct cell *cell; /* [n_cells] together they hold every name */
    int32_t n_cells;
    int64_t min, max;   /* members; max -1: any number */
    const rx_id *exist; /* [n_exist] for each some member has a name of it */
    int32_t n_exist;
};

struct shape {
    bool null, no, yes; /* null, false and true */
    struct number_set number;
    struct string_set string;
    const struct array_set **array; /* a union */
    const struct object_set **object;
    int32_t n_arrays, n_objects;
};

/* ---- the front end ---- */

struct schema {
    struct grammar_builder *b;
    struct chunk *chunks; /* memory, freed together */
    size_t bytes;         /* of them */
    const struct value *root;
    const struct value **values;
    int32_t n_values, values_cap;
    struct anchor *anchors;
    int32_t n_anchors, anchors_cap;
    struct conj *conj;
    int32_t n_conj;
    int32_t *conj_table; /* open addressing by the literals' hash; 0: free */
    conj_id *queue;      /* [n_queue] conjunctions whose symbols are still to define */
    int32_t n_queue, queued;
    int32_t nesting; /* schemas on the value that is being read */
    int draft;       /* 3, 4, 6, 7, 2019 or 2020 */
    const struct shape *all, *none;
    rx_id any, never;   /* of strings */
    rx_id plain, power; /* every number, as number_set has them */
    rx_id blank;        /* white space where a line may end */
    rx_id spaces;       /* and where none may */
    rx_id body;         /* a string's body, any */
    /* Symbols: any value and string; the marks with the blanks beside them. */
    sym_id any_value, any_string, comma;
    sym_id open_object, close_object, end_object; /* end: right behind its opening */
    sym_id open_array, close_array, end_array;
};

/* Zeroed memory that lives as long as the front end; NULL after an error. */
void *schema_alloc(struct schema *s, size_t n, size_t size);
/* Record that `keyword` cannot be enforced, and why. Returns NULL. */
void *schema_refuse(struct schema *s, const char *keyword, const char *why);
/* Record that the value of `keyword` is malformed. Returns NULL. */
void *schema_invalid(struct schema *s, const char *keyword, const char *want);

/* ---- doc.c ---- */

/* Read a text into schema.root; false after an error. */
bool doc_read(struct schema *s, const char *text, size_t len);
/* The member of an object; NULL: there is none, or `v` is no object. */
const struct value *doc_get(const struct value *v, const char *name);
bool doc_is(const struct value *string, const char *text);
/* Whether two values are equal, numbers by their value. */
bool doc_equal(struct schema *s, const struct value *a, const struct value *b);

/* ---- refs.c ---- */

/* Find what references can name. */
void refs_collect(struct schema *s);
/* The schema that a reference in `from` names; NULL with the error recorded. */
const struct value *refs_resolve(struct schema *s, const struct value *from,
                                 const struct value *ref, bool dynamic);

/* ---- number.c ---- */

/* A decimal number: digits without leading zeros before the point, without trailing
 * ones behind it. */
struct decimal {
    bool negative;
    const char *whole, *part; /* digits; "0" and "" at least */
    int32_t n_whole, n_part;
};

/* The value of a number's text; false: it is too long or its exponent too large, with
 * the error recorded. */
bool decimal_read(struct schema *s, const struct value *number, struct decimal *ret);
bool decimal_equal(const struct decimal *a, const struct decimal *b);
void number_constants(struct schema *s);
struct number_set number_all(struct schema *s);
struct number_set number_none(struct schema *s);
struct number_set number_integers(struct schema *s);
struct number_set number_equal(struct schema *s, const struct value *number);
/* The numbers above, or below, `bound`. */
struct number_set number_bound(struct schema *s, const struct value *bound, bool above,
                               bool exclusive);
struct number_set number_multiples(struct schema *s, const struct value *of);
struct number_set number_and(struct schema *s, struct number_set a, struct number_set b);
struct number_set number_or(struct schema *s, struct number_set a, struct number_set b);
struct number_set number_not(struct schema *s, struct number_set a);
/* The texts that the grammar takes. */
rx_id number_text(struct schema *s, struct number_set a);

/* ---- format.c ---- */

/* Strings of a format; false: the format is unknown, an annotation. */
bool format_strings(struct schema *s, const struct value *name, struct string_set *ret);

/* ---- sets.c, objects.c ---- */

struct string_set string_and(struct schema *s, struct string_set a, struct string_set b);
const struct shape *shape_and(struct schema *s, const struct shape *a, const struct shape *b);
const struct shape *shape_or(struct schema *s, const struct shape *a, const struct shape *b);
const struct shape *shape_not(struct schema *s, const struct shape *a);
/* Whether no value is in the shape, as far as `depth` levels below it show. */
bool shape_never(struct schema *s, const struct shape *a, int depth);
bool conj_never(struct schema *s, conj_id c, int depth);
/* The intersection of literals or of sets. */
conj_id conj_of(struct schema *s, struct literal lit);
conj_id conj_and(struct schema *s, conj_id a, conj_id b);
/* The set of one literal of `c` negated. */
conj_id conj_not(struct schema *s, conj_id c, int32_t literal);
const struct object_set *object_and(struct schema *s, const struct object_set *a,
                                    const struct object_set *b);
/* The objects that are not in `a`: appended to `ret`. */
void object_not(struct schema *s, const struct object_set *a, struct shape *ret);
bool object_never(struct schema *s, const struct object_set *a, int depth);
bool object_add(struct schema *s, struct shape *ret, const struct object_set *o);
/* The child of the cell that holds a name. */
conj_id object_cell_of(struct schema *s, const struct object_set *a, const struct value *name);
rx_id rx_any_of(struct schema *s, const rx_id *rx, int32_t n);

/* ---- read.c ---- */

/* The values that a conjunction allows; NULL after an error. */
const struct shape *conj_shape(struct schema *s, conj_id c);

/* ---- emit.c, emit_object.c, emit_array.c ---- */

/* The symbol of the texts of a conjunction's values. 0: there are none, or an error. */
sym_id emit_conj(struct schema *s, conj_id c);
/* Define the symbols that are still to define. */
void emit_queue(struct schema *s);
void emit_constants(struct schema *s);
/* Objects and arrays of a set; 0: there are none, or an error. */
sym_id emit_object(struct schema *s, const struct object_set *o);
sym_id emit_array(struct schema *s, const struct array_set *a);
/* Sequences and alternatives of two; 0 stands for no text at all. */
sym_id emit_seq(struct schema *s, sym_id a, sym_id b);
sym_id emit_either(struct schema *s, sym_id a, sym_id b);
/* A member's name in its shortest spelling, and names of a set; with their colon. */
rx_id emit_name(struct schema *s, const struct value *name);
rx_id emit_names(struct schema *s, rx_id names);
/* The comma between two elements, with its white space. */
rx_id emit_comma(struct schema *s);
/* The texts of a shape's values that are neither arrays nor objects. */
rx_id emit_scalar(struct schema *s, const struct shape *shape);

#endif
