/* Building a grammar: what the front ends (json_schema/, notation/, rx/) call and
 * the compiler (grammar.c) turns into tables.
 *
 * A grammar has two levels. Regular expressions over bytes make terminals: they are
 * nodes of an arena, equal ones are one node, and besides the usual operators they have
 * intersection and complement. Symbols make the context-free level above: a terminal,
 * a sequence, alternatives, or a rule, which may be recursive.
 *
 * Errors are sticky: the first one, a limit reached or memory exhausted, is kept in the
 * builder; functions then return 0, which every function takes as an argument, and
 * grammar_build_end reports it.
 */
#ifndef QUIRE_ENGINE_CONSTRAIN_GRAMMAR_BUILD_H
#define QUIRE_ENGINE_CONSTRAIN_GRAMMAR_BUILD_H

#include "engine/constrain/constrain.h"

struct grammar_builder;

/* A regular expression; a symbol of the grammar. 0: none, after an error. */
typedef int32_t rx_id;
typedef int32_t sym_id;

struct code_range {
    uint32_t first, last; /* code points, inclusive */
};

int grammar_build_begin(struct grammar_builder **ret, const struct constrain_vocab *v,
                        const struct grammar_limits *l, struct err *e);
/* The grammar of `start`; the builder is freed either way. 0 or the first error. */
int grammar_build_end(struct grammar **ret, struct grammar_builder *b, sym_id start, struct err *e);
void grammar_build_abandon(struct grammar_builder *b); /* NULL: nothing */
/* Record an error of the front end, unless there is one; the arguments of err_set. */
void grammar_build_fail(struct grammar_builder *b, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool grammar_build_failed(const struct grammar_builder *b);
/* Charge work that the front end does itself; false: a limit is reached. */
bool grammar_build_work(struct grammar_builder *b, int64_t units);

/* ---- regular expressions ---- */

rx_id rx_empty(struct grammar_builder *b); /* the empty text */
rx_id rx_never(struct grammar_builder *b); /* no text at all */
rx_id rx_any(struct grammar_builder *b);   /* every valid UTF-8 text */
rx_id rx_bytes(struct grammar_builder *b, const char *text, size_t len);
/* One character of the ranges [n], or, `negated`, one that is in none; as UTF-8. */
rx_id rx_class(struct grammar_builder *b, const struct code_range *range, int32_t n, bool negated);
rx_id rx_concat(struct grammar_builder *b, rx_id left, rx_id right);
rx_id rx_or(struct grammar_builder *b, rx_id left, rx_id right);
rx_id rx_and(struct grammar_builder *b, rx_id left, rx_id right);
/* The valid UTF-8 texts that x does not match. */
rx_id rx_not(struct grammar_builder *b, rx_id x);
/* x from `min` to `max` times; max -1: any number. */
rx_id rx_repeat(struct grammar_builder *b, rx_id x, int32_t min, int32_t max);
/* An expression in ECMA-262's and PCRE's common notation: classes, groups,
 * alternatives, repetition, ^ and $ at the ends of alternatives, \p{..} classes.
 * `search`: it may match anywhere unless anchored (JSON Schema's pattern); else the
 * whole text. Backreferences, look-around and word boundaries: ERR_UNSUPPORTED. */
rx_id rx_parse(struct grammar_builder *b, const char *pattern, size_t len, bool search);
/* The body of a JSON string, between its quotes, whose decoded text matches x: the
 * expression with each character replaced by its escaped forms. */
rx_id rx_json_body(struct grammar_builder *b, rx_id x);
/* Whether some text matches; whether the text does. */
bool rx_is_never(struct grammar_builder *b, rx_id x);
bool rx_matches(struct grammar_builder *b, rx_id x, const char *text, size_t len);

/* ---- symbols ---- */

/* A terminal; the empty text is allowed in it. */
sym_id sym_terminal(struct grammar_builder *b, rx_id x);
sym_id sym_text(struct grammar_builder *b, const char *text); /* rx_bytes of a C string */
/* The special or added token of exactly this text, else the text. */
sym_id sym_marker(struct grammar_builder *b, const char *text, size_t len);
/* Text that holds none of the n strings, nor the tokens that markers of them stand
 * for. */
sym_id sym_until(struct grammar_builder *b, const char *const *text, int32_t n);
sym_id sym_concat(struct grammar_builder *b, const sym_id *part, int32_t n);
sym_id sym_or(struct grammar_builder *b, const sym_id *part, int32_t n);
/* x from `min` to `max` times; max -1: any number. Large counts are counted, not
 * copied. */
sym_id sym_repeat(struct grammar_builder *b, sym_id x, int32_t min, int32_t max);
/* A rule to be defined later, so that it can refer to itself. */
sym_id sym_rule(struct grammar_builder *b);
void sym_define(struct grammar_builder *b, sym_id rule, sym_id body);

/* ---- front ends: the start symbol of a text, 0 with the error recorded ---- */

/* Between the tokens of JSON a bounded run of whitespace is allowed, so that a model
 * can write it as it is used to and cannot fill an answer with blanks. */
sym_id json_schema_build(struct grammar_builder *b, const char *schema, size_t len);
sym_id json_object_build(struct grammar_builder *b);
sym_id lark_build(struct grammar_builder *b, const char *text, size_t len);
sym_id choice_build(struct grammar_builder *b, const char *text, size_t len);

#endif
