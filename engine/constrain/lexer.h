/* The lexer's states, shared by all places of a text where the same may be read.
 *
 * A state is a set of terminals that are being read, each with what is left of its
 * expression. It does not know where they began, so the many rows of a long text have
 * few states, and what a state becomes by a symbol is found out once. All calls are
 * made under the automaton's lock. */
#ifndef QUIRE_ENGINE_CONSTRAIN_LEXER_H
#define QUIRE_ENGINE_CONSTRAIN_LEXER_H

#include "engine/constrain/cfg.h"

/* Sets of records found by their content: 1 + the index of each. */
struct index_table {
    int32_t *slot; /* [size], owned */
    int32_t size;  /* a power of two, or 0 */
};

/* A terminal that is being read. */
struct reading {
    int32_t term; /* which of the cfg's */
    rx_id x;      /* what is left of it */
};

/* What a state becomes by a symbol. */
struct lex_step {
    int32_t to;               /* the state behind it; 0: nothing is read on */
    int32_t first_end, n_end; /* end[first_end ..): the terminals that may end there */
    struct byte_set alike;    /* classes of bytes by which it becomes the same */
};

/* What is left of an expression behind a symbol, as it was found out for some state. */
struct lex_rest {
    rx_id x; /* the expression; 0: none */
    int32_t symbol;
    int32_t first, n;      /* left[first ..): what is left of it */
    bool ended;            /* it may end there */
    struct byte_set alike; /* classes of bytes behind which the same is left */
};

struct lex_state {
    int32_t first, n; /* reading[first .. first + n), sorted */
    int32_t *edge;    /* [n_symbols] 1 + the step by each symbol, or 0; owned */
    /* [n] classes of bytes that each reading may go on with; NULL: not asked for, as of
     * few readings; owned */
    struct byte_set *begins;
};

struct lexer {
    struct rx *rx;                    /* not owned */
    struct budget *budget;            /* not owned */
    struct lex_state *state;          /* [n_states], owned; 0 is none */
    int32_t n_states, cap_states;     /* states, and how many fit */
    struct reading *reading;          /* of all states, owned */
    int32_t n_readings, cap_readings; /* of them, and how many fit */
    struct lex_step *step;            /* owned */
    int32_t n_steps, cap_steps;       /* steps, and how many fit */
    int32_t *end, n_end, cap_end;     /* terminals that end, of all steps; owned */
    struct lex_rest *rest;            /* [LEX_RESTS] by hash; NULL: none yet; owned */
    rx_id *left;                      /* of all rests, owned */
    int32_t n_left, cap_left;         /* of them, and how many fit */
    struct index_table states;        /* by content */
    struct reading *next;             /* of the state being made; owned */
    int32_t n_next, cap_next;         /* of them, and how many fit */
};

/* `l` is zeroed. False: the budget has failed. */
bool lexer_init(struct lexer *l, struct rx *rx, struct budget *b);
void lexer_release(struct lexer *l);
/* Begin a state; add what it reads; its number, or 0 where it reads nothing or the
 * budget has failed. */
void lexer_begin(struct lexer *l);
void lexer_add(struct lexer *l, int32_t term, rx_id x);
int32_t lexer_intern(struct lexer *l);
/* What state `s`, not 0, becomes; valid until the next call. NULL: the budget has
 * failed, and nothing is kept. */
const struct lex_step *lexer_step(struct lexer *l, int32_t s, int32_t symbol);
uint32_t hash_words(const void *words, size_t bytes);

#endif
