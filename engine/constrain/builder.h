/* The inside of a grammar builder (grammar_build.h), for the files of the compiler. */
#ifndef QUIRE_ENGINE_CONSTRAIN_BUILDER_H
#define QUIRE_ENGINE_CONSTRAIN_BUILDER_H

#include "engine/constrain/grammar_build.h"
#include "engine/constrain/rx/rx.h"

enum sym_kind { SYM_NONE, SYM_TERMINAL, SYM_CONCAT, SYM_OR, SYM_REPEAT, SYM_RULE };

struct sym {
    int32_t kind;     /* enum sym_kind */
    int32_t a, n;     /* the parts: part[a .. a + n); terminal: a is its rx_id; rule: a its body */
    int32_t min, max; /* SYM_REPEAT of part[a] */
};

/* Code points, sorted, none twice: what a node made by rx_class stands for. */
struct rx_chars {
    int32_t first, n; /* range[first .. first + n) of the builder */
    rx_id x, escaped; /* the node; rx_escaped of them, once made */
};

struct grammar_builder {
    const struct constrain_vocab *vocab; /* not owned */
    struct grammar_limits limits;        /* as asked for */
    struct budget budget;                /* of all that is built */
    struct err err;                      /* the first error; code 0: none */
    struct rx rx;                        /* the expressions */
    rx_id any;                           /* rx_any, once made */
    struct sym *sym;                     /* [n_syms], owned; 0 is none */
    int32_t n_syms, cap_syms;            /* symbols, and how many fit */
    int32_t *part, n_parts, cap_parts;   /* parts of symbols, owned */
    struct rx_chars *chars;              /* [n_chars], owned: sets of characters */
    int32_t n_chars, cap_chars;          /* of them, and how many fit */
    int32_t *chars_of, cap_chars_of;     /* [node] 1 + index into `chars`, or 0; owned */
    rx_id *body;                         /* [cap_body] JSON bodies of nodes, or 0; owned */
    int32_t cap_body;                    /* nodes that have a place in it */
    rx_id any_char, any_body;            /* any character; the body of any text; or 0 */
    struct code_range *range;            /* [n_ranges], owned: of `chars` */
    int32_t n_ranges, cap_ranges;        /* of them, and how many fit */
};

/* One character of the ranges, sorted and apart, as UTF-8 (rx_chars.c). */
rx_id rx_utf8(struct rx *r, const struct code_range *range, int32_t n);
/* The same as it may be written in a JSON string: itself or escaped. */
rx_id rx_escaped(struct rx *r, const struct code_range *range, int32_t n);
/* The text in any case of ASCII letters. */
rx_id rx_bytes_any_case(struct grammar_builder *b, const char *text, size_t len);
/* rx_parse; `any_case`: ASCII letters match in either case. */
rx_id rx_parse_case(struct grammar_builder *b, const char *pattern, size_t len, bool search,
                    bool any_case);
/* The ranges of a Unicode general category ("L", "Lu"), negated or not, as rx_class
 * takes them; NULL: no such category. Valid for ever. */
const struct code_range *unicode_category(const char *name, size_t len, int32_t *ret_n);

#endif
