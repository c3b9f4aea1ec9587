/* A context-free grammar in tables: what the automaton runs on.
 *
 * Symbols below n_terms are terminals, those above are rules. A production is a run of
 * symbols in `rhs` that ends with END_OF(rule), so a position in it, a dot, is one
 * number. A rule that repeats has one production of one symbol; how often it was passed
 * is counted beside the dot. */
#ifndef QUIRE_ENGINE_CONSTRAIN_CFG_H
#define QUIRE_ENGINE_CONSTRAIN_CFG_H

#include "engine/constrain/builder.h"

#define END_OF(rule) (-1 - (rule))

struct cfg_rule {
    int32_t first, n; /* its productions: start[first .. first + n) */
    int32_t min, max; /* of a repetition; max -1: any number */
    bool repeats;     /* a repetition */
    bool nullable;    /* derives the empty text */
    bool productive;  /* derives some text */
};

struct cfg {
    rx_id *term;                          /* [n_terms], owned */
    int32_t n_terms, cap_terms;           /* terminals, and how many fit */
    struct cfg_rule *rule;                /* [n_rules], owned; the first is the start */
    int32_t n_rules, cap_rules;           /* rules, and how many fit */
    int32_t *start, n_starts, cap_starts; /* first dots of productions, owned */
    int32_t *rhs, n_rhs, cap_rhs;         /* symbols of all productions, owned */
};

/* The tables of what derives from `start`; in `to`, which is zeroed, with the builder's
 * budget. False: the builder has the error. */
bool cfg_compile(struct cfg *to, struct grammar_builder *b, sym_id start);
void cfg_release(struct cfg *g);

static inline bool cfg_nullable(const struct cfg *g, const struct rx *r, int32_t symbol)
{
    return symbol < g->n_terms ? rx_has(r, g->term[symbol], RX_NULLABLE)
                               : g->rule[symbol - g->n_terms].nullable;
}

#endif
